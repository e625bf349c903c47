//! A connection of a client that puts and reserves at random, until it ends or is cut off.

use super::ledger::Holder;
use super::workers::Field;
use crate::harness::client::{Client, reset_on_close};
use crate::harness::reply::Reply;
use crate::harness::request::put;
use fastrand::Rng;
use std::io;
use std::sync::atomic::Ordering;

pub struct Session<'a> {
    field: &'a Field<'a>,
    random: Rng,
    client: Client,
    holder: Holder,
    tube: String,
    /// In addition to `default`.
    watched: Vec<String>,
    held: Vec<u64>,
}

impl Drop for Session<'_> {
    /// Notes the end before the connection is closed.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.let_all_go();
            self.field.open.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl<'a> Session<'a> {
    pub fn open(field: &'a Field<'a>, random: Rng) -> io::Result<Session<'a>> {
        let mut client = Client::try_connect(field.address)?;
        // Until it is accepted, the connection may be one to the next server.
        client.try_ask("list-tube-used\r\n")?;
        let holder = field.connections.fetch_add(1, Ordering::Relaxed);
        field.open.fetch_add(1, Ordering::Relaxed);
        let (tube, watched, held) = ("default".to_owned(), Vec::new(), Vec::new());
        let mut session = Session { field, random, client, holder, tube, watched, held };
        if field.plan.crashes {
            // There are few tubes: a worker watches all.
            for tube in 0..field.plan.tubes {
                session.watch(format!("tube-{tube}"))?;
            }
        }
        Ok(session)
    }

    /// Whether there is another step.
    pub fn goes_on(&mut self) -> bool {
        self.random.u32(..self.field.plan.steps) > 0
    }

    /// Sends one command at random and checks its reply.
    pub fn step(&mut self, put_share: u32) -> io::Result<()> {
        if self.random.u32(..100) < put_share {
            return self.put_or_delete();
        }
        match self.random.u32(..60) {
            0..25 => self.reserve().map(drop),
            25..45 => self.finish(),
            45..50 => self.ask("kick 10\r\n", "KICKED").map(drop),
            50..54 => self.peek(),
            _ => self.change_tubes(),
        }
    }

    fn put_or_delete(&mut self) -> io::Result<()> {
        if self.field.ledger().len() >= self.field.most_jobs {
            // Of a delete that is cut off it would not be known whether it was done.
            return if self.field.plan.crashes { self.peek() } else { self.delete_any() };
        }
        let (body, request) = self.next_put();
        let id = self.client.try_ask(request)?.inserted();
        self.field.ledger().inserted(id, &body);
        Ok(())
    }

    fn next_put(&mut self) -> (Vec<u8>, Vec<u8>) {
        /// Room for the number of the body.
        const LEAST: f64 = 8.0;
        // As many below a hundred bytes as between a hundred and ten thousand.
        #[expect(clippy::cast_precision_loss, reason = "it is small")]
        let range = self.field.plan.largest_body as f64 / LEAST;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is small")]
        let len = (LEAST * range.powf(self.random.f64())) as usize;
        let body = self.field.ledger().next_body(len, &self.tube);
        let delay_s = u32::from(self.random.u32(..15) == 0);
        let request = put(self.random.u32(..2_000), delay_s, 3600, &body);
        (body, request)
    }

    /// Deletes a job that any client has put, and that no other client holds.
    fn delete_any(&mut self) -> io::Result<()> {
        let Some(id) = self.any_id() else { return Ok(()) };
        let reply = self.client.try_ask(format!("delete {id}\r\n"))?;
        if reply.line == "DELETED" {
            self.held.retain(|&held| held != id);
            self.field.ledger().deleted(self.holder, id);
        } else {
            assert_eq!(reply.line, "NOT_FOUND");
            assert!(!self.held.contains(&id), "job {id} is gone, and this connection holds it");
        }
        Ok(())
    }

    fn any_id(&mut self) -> Option<u64> {
        let ledger = self.field.ledger();
        ledger.any_id(self.random.u64(..=ledger.inserted))
    }

    /// Reserves a job, if there is one and not too many are held.
    fn reserve(&mut self) -> io::Result<()> {
        const MOST_HELD: usize = 20;
        // A client that waits would keep the field from being quiet.
        let waits = self.field.plan.crashes && self.random.u32(..10) == 0;
        if self.held.len() < MOST_HELD {
            self.try_reserve(u32::from(waits))?;
        }
        Ok(())
    }

    /// Returns whether there was a job.
    fn try_reserve(&mut self, timeout_s: u32) -> io::Result<bool> {
        let reply = self.client.try_ask(format!("reserve-with-timeout {timeout_s}\r\n"))?;
        if reply.line == "TIMED_OUT" {
            return Ok(false);
        }
        let id = reply.number("RESERVED");
        let id = id.unwrap_or_else(|| panic!("the reply to a reserve is {}", reply.line));
        self.field.ledger().reserved(self.holder, id, &reply.body);
        self.held.push(id);
        Ok(true)
    }

    /// What a worker does with a job in the end.
    fn finish(&mut self) -> io::Result<()> {
        if self.held.is_empty() {
            return Ok(());
        }
        let id = self.held.swap_remove(self.random.usize(..self.held.len()));
        let pri = self.random.u32(..2_000);
        let (request, word) = match self.random.u32(..8) {
            0..4 => return self.delete(id),
            4 => (format!("release {id} {pri} 0\r\n"), "RELEASED"),
            5 => (format!("release {id} {pri} 1\r\n"), "RELEASED"),
            6 => (format!("bury {id} {pri}\r\n"), "BURIED"),
            _ => {
                self.held.push(id);
                return self.ask(&format!("touch {id}\r\n"), "TOUCHED").map(drop);
            }
        };
        self.field.ledger().let_go(self.holder, id);
        self.ask(&request, word).map(drop)
    }

    /// Deletes a held job that is not in the list any more.
    fn delete(&mut self, id: u64) -> io::Result<()> {
        self.field.ledger().may_be_deleted(id);
        let deleted = self.ask(&format!("delete {id}\r\n"), "DELETED");
        let mut ledger = self.field.ledger();
        match deleted {
            Ok(_) => ledger.deleted(self.holder, id),
            Err(_) => ledger.let_go(self.holder, id),
        }
        deleted.map(drop)
    }

    fn peek(&mut self) -> io::Result<()> {
        let Some(id) = self.any_id() else { return Ok(()) };
        let reply = self.client.try_ask(format!("peek {id}\r\n"))?;
        // Another client may have deleted it; a lost job is found in the end.
        if reply.line != "NOT_FOUND" {
            assert_eq!(reply.number("FOUND"), Some(id), "{}", reply.line);
            self.field.ledger().check_body(id, &reply.body);
        }
        Ok(())
    }

    fn change_tubes(&mut self) -> io::Result<()> {
        const MOST_WATCHED: usize = 50;
        let name = format!("tube-{}", self.random.u32(..self.field.plan.tubes));
        match self.random.u32(..3) {
            0 => self.use_tube(name),
            1 if self.watched.len() < MOST_WATCHED => self.watch(name),
            _ => match self.watched.pop() {
                Some(name) => self.expect(&format!("ignore {name}\r\n"), self.watching()),
                None => Ok(()),
            },
        }
    }

    fn use_tube(&mut self, name: String) -> io::Result<()> {
        self.expect(&format!("use {name}\r\n"), format!("USING {name}"))?;
        self.tube = name;
        Ok(())
    }

    fn watch(&mut self, name: String) -> io::Result<()> {
        let request = format!("watch {name}\r\n");
        if name != "default" && !self.watched.contains(&name) {
            self.watched.push(name);
        }
        self.expect(&request, self.watching())
    }

    /// The reply to `watch` and `ignore`.
    fn watching(&self) -> String {
        format!("WATCHING {}", 1 + self.watched.len())
    }

    /// Ends the connection, with whatever is held.
    pub fn end(mut self) -> io::Result<()> {
        let last = if self.field.plan.crashes { self.begin_last() } else { Ok(()) };
        if self.random.bool() {
            reset_on_close(self.client.socket());
        }
        last
    }

    fn let_all_go(&mut self) {
        let mut ledger = self.field.ledger();
        for id in self.held.drain(..) {
            ledger.let_go(self.holder, id);
        }
    }

    /// Sends the last command of a client that crashes and reads no reply, or half-closes.
    fn begin_last(&mut self) -> io::Result<()> {
        let held = self.held.last().copied();
        let kind = self.random.usize(..12);
        if let (0, Some(id)) = (kind, held) {
            self.field.ledger().may_be_deleted(id);
            return self.client.try_send(format!("delete {id}\r\n"));
        }
        self.let_all_go();
        if kind == 1 {
            return self.half_close_after_puts();
        }
        let id = held.unwrap_or_default();
        let (_, put) = self.next_put();
        let lasts = [
            format!("release {id} 0 0\r\n").into(),
            format!("bury {id} 0\r\n").into(),
            b"reserve\r\n".to_vec(),
            b"reserve-with-timeout 0\r\n".repeat(3),
            b"list-tube-used\r\nquit\r\n".to_vec(),
            b"list-tube-us".to_vec(),
            b"put 0 0 60 1000\r\nhalf a body".to_vec(),
            put[..self.random.usize(..put.len())].to_vec(),
            put,
        ];
        let last = kind.checked_sub(2).and_then(|index| lasts.get(index));
        last.map_or(Ok(()), |last| self.client.try_send(last))
    }

    /// Everything that was sent before is answered.
    fn half_close_after_puts(&mut self) -> io::Result<()> {
        const PUTS: usize = 20;
        let (bodies, requests): (Vec<_>, Vec<_>) = (0..PUTS).map(|_| self.next_put()).unzip();
        self.client.try_send(requests.concat())?;
        self.client.socket().shutdown(std::net::Shutdown::Write)?;
        for body in &bodies {
            let id = self.client.try_reply()?.inserted();
            self.field.ledger().inserted(id, body);
        }
        match self.client.try_line() {
            Ok(line) => panic!("after the last reply: {line}"),
            // A server that is killed resets.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Reserves and deletes what is ready, after it has kicked the rest; returns whether no job
    /// is left.
    pub fn drain_once(&mut self) -> io::Result<bool> {
        let tubes = self.client.try_ask("list-tubes\r\n")?;
        for name in tubes.text().lines().filter_map(|line| line.strip_prefix("- ")) {
            self.watch(name.to_owned())?;
            self.use_tube(name.to_owned())?;
            self.ask("kick 1000000\r\n", "KICKED")?;
        }
        self.use_tube("default".to_owned())?;
        while self.try_reserve(0)? {
            let id = self.held.pop().expect("it was just reserved");
            self.delete(id)?;
        }
        Ok(self.client.jobs() == 0)
    }

    fn ask(&mut self, request: &str, word: &str) -> io::Result<Reply> {
        let reply = self.client.try_ask(request)?;
        let is_expected = reply.line.split(' ').next() == Some(word);
        assert!(is_expected, "to {request:?}: {}", reply.line);
        Ok(reply)
    }

    fn expect(&mut self, request: &str, line: String) -> io::Result<()> {
        assert_eq!(self.client.try_ask(request)?.line, line, "to {request:?}");
        Ok(())
    }
}
