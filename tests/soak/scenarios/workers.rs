//! Fifty workers that crash at any point, and producers that do: every job is accounted for. In
//! the second scenario the server is killed too, again and again, and starts from its binlog.

use super::ledger::{Holder, Ledger};
use super::{Outcome, Run};
use crate::harness::client::Client;
use crate::harness::process::{BEANSTALKD, Daemon, path_text, run as run_to_its_end};
use crate::harness::reply::Reply;
use crate::harness::request::{body_number, numbered_body, put};
use crate::harness::{PATIENCE, wait_until};
use fastrand::Rng;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub fn crash(run: &Run) -> Outcome {
    Ok(play(run, None))
}

pub fn are_left_alone(run: &Run) -> Outcome {
    // Below the directory of cargo's, which is on a real disk.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("it can be made");
    Ok(play(run, Some(directory)))
}

const TUBES: [&str; 3] = ["default", "second", "third"];
const TTR_S: u32 = 3600;

fn play(run: &Run, directory: Option<TempDir>) -> String {
    let field = Field::begin(run, directory);
    thread::scope(|scope| {
        let mut seeds = Rng::with_seed(run.seed);
        for _ in 0..run.size(10, 50) {
            let seed = seeds.u64(..);
            scope.spawn({
                let field = &field;
                move || Player::new(field, seed).live(Player::work_until_crash)
            });
        }
        for _ in 0..run.size(2, 5) {
            let seed = seeds.u64(..);
            scope.spawn({
                let field = &field;
                move || Player::new(field, seed).live(Player::produce_until_crash)
            });
        }
        field.watch_over(seeds);
    });
    field.drain();
    let mut ledger = field.ledger();
    ledger.check_none_is_lost();
    let totals = ledger.totals;
    let line = format!(
        "{} jobs put, {} times reserved, {} deleted, {} perhaps; {} crashes of clients, {} of the \
         server",
        totals.inserted,
        totals.reserved,
        totals.deleted,
        totals.perhaps_deleted,
        field.crashes.load(Ordering::Relaxed),
        ledger.instances() - 1
    );
    drop(ledger);
    field.check_nothing_comes_back();
    line
}

/// Where all this happens.
struct Field<'a> {
    run: &'a Run,
    /// Kept open, so that connections between two servers wait for the next.
    listener: TcpListener,
    address: SocketAddr,
    directory: Option<TempDir>,
    daemon: Mutex<Daemon>,
    ledger: Mutex<Ledger>,
    is_over: AtomicBool,
    connections: AtomicU64,
    crashes: AtomicU64,
}

impl Field<'_> {
    fn begin(run: &Run, directory: Option<TempDir>) -> Field<'_> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let path = directory.as_ref().map(|directory| directory.path().to_owned());
        let daemon = start(&listener, path.as_ref(), "0");
        let mut ledger = Ledger::default();
        ledger.begin_instance(daemon.id());
        Field {
            run,
            listener,
            address,
            directory,
            daemon: Mutex::new(daemon),
            ledger: Mutex::new(ledger),
            is_over: AtomicBool::new(false),
            connections: AtomicU64::new(0),
            crashes: AtomicU64::new(0),
        }
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("no client has found an error")
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Lets them play, and kills the server now and then if it has a binlog.
    fn watch_over(&self, mut random: Rng) {
        /// The short form ends after this number of puts.
        const ENOUGH: u64 = 1_500;
        const KILLS: u64 = 3;
        let mut next_kill = Instant::now();
        let mut kills = 0;
        let mut last = (0, Instant::now());
        // A player that finds an error ends the run too.
        while !self.is_over() {
            thread::sleep(Duration::from_millis(2));
            if self.ledger.is_poisoned() {
                self.end();
                break;
            }
            let inserted = self.ledger().totals.inserted;
            let is_over =
                if self.run.is_whole() { !self.run.has_time() } else { inserted >= ENOUGH };
            if is_over {
                self.end();
                break;
            }
            if inserted > last.0 {
                last = (inserted, Instant::now());
            } else if last.1.elapsed() > PATIENCE {
                self.end();
                panic!("no job is put any more: jobs are lost, or clients are not served");
            }
            let is_due = if self.run.is_whole() {
                next_kill <= Instant::now()
            } else {
                inserted * (KILLS + 1) >= ENOUGH * (kills + 1)
            };
            if self.directory.is_some() && is_due {
                self.kill(&mut random);
                kills += 1;
                next_kill = Instant::now() + Duration::from_millis(random.u64(50..1_500));
            }
        }
    }

    fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    fn kill(&self, random: &mut Rng) {
        let mut daemon = self.daemon.lock().expect("only this thread has it");
        daemon.kill();
        let path = self.directory.as_ref().map(|directory| directory.path().to_owned());
        // The ledger must know each server before it serves.
        let mut ledger = self.ledger();
        *daemon = start(&self.listener, path.as_ref(), ["0", "50", "1000"][random.usize(..3)]);
        ledger.begin_instance(daemon.id());
    }

    /// Takes out what is left, through the ledger.
    fn drain(&self) {
        let player = Player::new(self, 0);
        let mut session = player.connect().expect("the server runs");
        for tube in TUBES {
            session.client.expect(format!("use {tube}\r\n"), &format!("USING {tube}"));
        }
        wait_until("all jobs are gone", || {
            loop {
                let reply = session.client.ask("reserve-with-timeout 0\r\n");
                if reply.line == "TIMED_OUT" {
                    break;
                }
                let id = session.note_reserved(self, &reply);
                session.delete(self, id).expect("the server runs");
            }
            for tube in TUBES {
                session.client.expect(format!("use {tube}\r\n"), &format!("USING {tube}"));
                let kicked = session.client.ask("kick 1000000\r\n");
                assert!(kicked.number("KICKED").is_some(), "{}", kicked.line);
            }
            let states = ["ready", "reserved", "delayed", "buried"];
            let left = states.map(|state| session.client.stat(&format!("current-jobs-{state}")));
            left == [0; 4]
        });
    }

    /// What was deleted stays so.
    fn check_nothing_comes_back(&self) {
        let Some(directory) = &self.directory else { return };
        let mut daemon = self.daemon.lock().expect("only this thread has it");
        daemon.kill();
        let path = path_text(directory.path());
        let check = run_to_its_end(&["-b", path, "--check"]);
        let report = String::from_utf8_lossy(&check.stdout);
        assert!(check.status.success(), "the binlog is not sound: {report}");
        assert!(report.contains(" 0 jobs: sound"), "there are jobs again: {report}");
        assert!(!report.contains("damaged"), "{report}");
    }
}

fn start(listener: &TcpListener, directory: Option<&PathBuf>, sync_ms: &str) -> Daemon {
    let path = directory.map(|path| path_text(path));
    let flags = match path {
        Some(path) => vec!["-b", path, "-s", "262144", "-f", sync_ms],
        None => vec![],
    };
    let listener = listener.try_clone().expect("a descriptor is free");
    Daemon::with_inherited(Path::new(BEANSTALKD), &flags, listener)
}

/// A client that connects again and again.
struct Player<'a> {
    field: &'a Field<'a>,
    random: Rng,
}

impl Drop for Player<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.field.end();
        }
    }
}

/// One connection, until it ends or is cut off.
struct Session {
    client: Client,
    holder: Holder,
    held: Vec<u64>,
}

impl<'a> Player<'a> {
    fn new(field: &'a Field<'a>, seed: u64) -> Player<'a> {
        Player { field, random: Rng::with_seed(seed) }
    }

    fn connect(&self) -> io::Result<Session> {
        let mut client = Client::try_connect(self.field.address)?;
        let stats = client.try_ask("stats\r\n")?;
        let pid = stats.value("pid").expect("stats has it");
        for tube in &TUBES[1..] {
            client.try_ask(format!("watch {tube}\r\n"))?;
        }
        let connection = self.field.connections.fetch_add(1, Ordering::Relaxed);
        let instance = self.field.ledger().instance(pid);
        Ok(Session { client, holder: Holder { instance, connection }, held: Vec::new() })
    }

    /// Connects, works until it crashes, and starts again.
    fn live(mut self, work: fn(&mut Self, &mut Session) -> io::Result<()>) {
        while !self.field.is_over() {
            let outcome = self.connect().and_then(|mut session| {
                let outcome = work(&mut self, &mut session);
                session.crash(self.field, self.random.bool());
                outcome
            });
            self.check(outcome);
        }
    }

    /// Only a server that is killed may leave a client alone.
    fn check(&self, outcome: io::Result<()>) {
        if let Err(error) = outcome {
            let is_cut_off = matches!(
                error.kind(),
                io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
            );
            let may_be = is_cut_off && self.field.directory.is_some();
            assert!(may_be, "a client is left alone: {error} (patience is {PATIENCE:?})");
        }
    }

    fn work_until_crash(&mut self, session: &mut Session) -> io::Result<()> {
        const MOST_HELD: usize = 5;
        let field = self.field;
        while self.random.u32(..30) > 0 && !field.is_over() {
            if session.held.len() < MOST_HELD {
                session.reserve(field, self.random.u32(..10) == 0)?;
            }
            if session.held.is_empty() {
                // Buried jobs come back.
                let tube = TUBES[self.random.usize(..TUBES.len())];
                session.ask(&format!("use {tube}\r\n"), &["USING"])?;
                session.ask("kick 10\r\n", &["KICKED"])?;
                continue;
            }
            let id = session.held[self.random.usize(..session.held.len())];
            match self.random.u32(..10) {
                0..5 => session.delete(field, id)?,
                5 => session.give_away(field, id, &format!("release {id} 7 0\r\n"), "RELEASED")?,
                6 => session.give_away(field, id, &format!("release {id} 0 1\r\n"), "RELEASED")?,
                7 => session.give_away(field, id, &format!("bury {id} 7\r\n"), "BURIED")?,
                8 => session.ask(&format!("touch {id}\r\n"), &["TOUCHED"])?,
                _ => {}
            }
        }
        self.begin_something(session)
    }

    /// Sends the last command of a worker that crashes; it reads no reply.
    fn begin_something(&mut self, session: &mut Session) -> io::Result<()> {
        let held = session.held.last().copied().unwrap_or_default();
        match self.random.u32(..8) {
            0 => {
                session.client.try_send("reserve\r\n")?;
                thread::sleep(Duration::from_micros(self.random.u64(..5_000)));
                Ok(())
            }
            1 => session.client.try_send("reserve-with-timeout 0\r\n".repeat(3)),
            2 => session.client.try_send("delete 12"),
            3 => session.client.try_send("put 0 0 60 1000\r\nhalf a body"),
            4 if held > 0 => {
                self.field.ledger().perhaps_deleted(session.holder, held);
                session.client.try_send(format!("delete {held}\r\n"))
            }
            5 if held > 0 => {
                self.field.ledger().let_go(session.holder, held);
                session.client.try_send(format!("release {held} 0 0\r\n"))
            }
            6 if held > 0 => {
                self.field.ledger().let_go(session.holder, held);
                session.client.try_send(format!("bury {held} 0\r\n"))
            }
            _ => Ok(()),
        }
    }

    fn produce_until_crash(&mut self, session: &mut Session) -> io::Result<()> {
        const MOST_LIVE: u64 = 3_000;
        let field = self.field;
        while field.ledger().live() > MOST_LIVE && !field.is_over() {
            thread::sleep(Duration::from_millis(1));
        }
        let tube = TUBES[self.random.usize(..TUBES.len())];
        session.ask(&format!("use {tube}\r\n"), &["USING"])?;
        while self.random.u32(..100) > 0 && !field.is_over() {
            let (number, request) = self.next_put();
            let reply = session.client.try_ask(request)?;
            let id = reply.number("INSERTED");
            let id = id.unwrap_or_else(|| panic!("a put is answered {}", reply.line));
            field.ledger().inserted(id, number);
        }
        let (_, request) = self.next_put();
        // All of it, or a part.
        let len = [request.len(), self.random.usize(..request.len())][self.random.usize(..2)];
        session.client.try_send(&request[..len])
    }

    fn next_put(&mut self) -> (u64, Vec<u8>) {
        let number = self.field.ledger().next_number();
        // Room for its number at least.
        let body = numbered_body(number, self.random.usize(24..2_000));
        let delay_s = u32::from(self.random.u32(..20) == 0);
        (number, put(self.random.u32(..100), delay_s, TTR_S, &body))
    }
}

impl Session {
    fn ask(&mut self, request: &str, words: &[&str]) -> io::Result<()> {
        let reply = self.client.try_ask(request)?;
        let word = reply.line.split(' ').next().unwrap_or_default();
        assert!(words.contains(&word), "to {request:?}: {}", reply.line);
        Ok(())
    }

    fn reserve(&mut self, field: &Field<'_>, waits: bool) -> io::Result<()> {
        let timeout_s = u32::from(waits);
        let reply = self.client.try_ask(format!("reserve-with-timeout {timeout_s}\r\n"))?;
        if reply.line != "TIMED_OUT" {
            let id = self.note_reserved(field, &reply);
            self.held.push(id);
        }
        Ok(())
    }

    fn note_reserved(&self, field: &Field<'_>, reply: &Reply) -> u64 {
        let id = reply.number("RESERVED");
        let id = id.unwrap_or_else(|| panic!("a reserve is answered {}", reply.line));
        let number = body_number(&reply.body);
        let number = number.unwrap_or_else(|| panic!("the body of job {id} is not whole"));
        field.ledger().reserved(self.holder, id, number);
        id
    }

    fn delete(&mut self, field: &Field<'_>, id: u64) -> io::Result<()> {
        self.held.retain(|&held| held != id);
        field.ledger().perhaps_deleted(self.holder, id);
        let reply = self.client.try_ask(format!("delete {id}\r\n"))?;
        // Who holds a job can delete it.
        assert_eq!(reply.line, "DELETED", "to the delete of {id}");
        field.ledger().deleted(self.holder, id);
        Ok(())
    }

    fn give_away(
        &mut self,
        field: &Field<'_>,
        id: u64,
        request: &str,
        word: &str,
    ) -> io::Result<()> {
        self.held.retain(|&held| held != id);
        field.ledger().let_go(self.holder, id);
        self.ask(request, &[word])
    }

    /// Ends without a word, and with whatever is held.
    fn crash(self, field: &Field<'_>, is_reset: bool) {
        let mut ledger = field.ledger();
        for &id in &self.held {
            ledger.let_go(self.holder, id);
        }
        drop(ledger);
        field.crashes.fetch_add(1, Ordering::Relaxed);
        if is_reset {
            self.client.reset();
        }
    }
}
