//! A limit of memory: puts until none is left, in every shape of data. Other commands still work, and
//! puts work again after deletes.

use super::{Outcome, Run};
use crate::harness::client::Client;
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::{numbered_body, put};
use crate::harness::{PATIENCE, wait_until};
use std::fmt::Write;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

/// What fills the memory.
struct Shape {
    name: &'static str,
    /// Of address space, as `ulimit -v` counts it.
    limit_kib: u32,
    has_binlog: bool,
    fill: fn(&mut Filled),
}

/// A server under its limit, and what has been put into it.
struct Filled {
    daemon: Daemon,
    address: SocketAddr,
    client: Client,
    ids: Vec<u64>,
    /// Who must stay.
    crowd: Vec<Client>,
}

pub fn run_out(run: &Run) -> Outcome {
    const SHAPES: [Shape; 8] = [
        Shape { name: "small bodies", limit_kib: 64 << 10, has_binlog: false, fill: small },
        Shape { name: "large bodies", limit_kib: 96 << 10, has_binlog: false, fill: large },
        Shape { name: "bodies of all sizes", limit_kib: 128 << 10, has_binlog: false, fill: mixed },
        Shape { name: "tubes", limit_kib: 64 << 10, has_binlog: false, fill: tubes },
        Shape { name: "watches", limit_kib: 64 << 10, has_binlog: false, fill: watches },
        Shape { name: "bodies under way", limit_kib: 96 << 10, has_binlog: false, fill: under_way },
        Shape {
            name: "a binlog, small bodies",
            limit_kib: 64 << 10,
            has_binlog: true,
            fill: small,
        },
        Shape {
            name: "a binlog, large bodies",
            limit_kib: 96 << 10,
            has_binlog: true,
            fill: large,
        },
    ];
    let mut line = String::new();
    let mut rounds = 0;
    if run.is_whole() {
        write!(line, "clients alone: {}; ", clients_that_find_no_room()).expect("it is text");
    }
    loop {
        // The other shapes take seconds.
        for shape in &SHAPES[if run.is_whole() { 0..8 } else { 1..2 }] {
            let figures = shape.play();
            if rounds == 0 {
                write!(line, "{}: {figures}; ", shape.name).expect("it is text");
            }
        }
        rounds += 1;
        if !run.has_time() {
            return Ok(format!("{line}{rounds} rounds"));
        }
    }
}

/// Connects clients until there is no memory for one more. That client waits, and is served when
/// other clients have disconnected.
fn clients_that_find_no_room() -> String {
    const LIMIT_KIB: u32 = 12_000;
    const MOST: usize = 15_000;
    /// Longer than the server waits until it tries again.
    const SILENCE: Duration = Duration::from_secs(2);
    let (_daemon, address) = Daemon::with_limit(&format!("-v {LIMIT_KIB}"), &[]);
    let mut inside: Vec<Client> = Vec::new();
    let mut outside = loop {
        assert!(inside.len() < MOST, "the memory has no limit");
        let mut client = Client::connect(address);
        client.socket().set_read_timeout(Some(SILENCE)).expect("it can be set");
        client.send(format!("watch {:0>150}\r\n", inside.len()));
        match client.try_line() {
            Ok(_) => inside.push(client),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break client,
            Err(error) => panic!("client {} is not served: {error}", inside.len()),
        }
    };
    let count = inside.len();
    inside.truncate(count / 2);
    outside.socket().set_read_timeout(Some(PATIENCE)).expect("it can be set");
    let reply = outside.reply().line;
    assert!(reply == "WATCHING 2" || reply == "OUT_OF_MEMORY", "at last it receives {reply}");
    format!("{count} inside")
}

impl Shape {
    fn play(&self) -> String {
        let directory = tempfile::tempdir().expect("it can be made");
        let path = path_text(directory.path());
        let flags: &[&str] = if self.has_binlog { &["-F", "-b", path] } else { &[] };
        let (daemon, address) = Daemon::with_limit(&format!("-v {}", self.limit_kib), flags);
        let client = Client::connect(address);
        let mut filled = Filled { daemon, address, client, ids: Vec::new(), crowd: Vec::new() };
        (self.fill)(&mut filled);
        let first = filled.ids.len();
        filled.check_other_clients();
        // A part of it goes, and there is room again.
        filled.delete_some(first / 4);
        filled.crowd.truncate(filled.crowd.len() / 2);
        wait_until(&format!("puts work again after {}", self.name), || {
            let id = filled.client.ask(put(0, 0, 3600, b"again")).number("INSERTED");
            filled.ids.extend(id);
            id.is_some()
        });
        filled.crowd.clear();
        let count = filled.ids.len();
        filled.delete_some(count);
        filled.client.expect("use default\r\n", "USING default");
        let empty = ["ready", "reserved", "delayed", "buried"]
            .map(|state| filled.client.stat(&format!("current-jobs-{state}")));
        assert_eq!(empty, [0; 4]);
        // The memory that the jobs had can be had again.
        (self.fill)(&mut filled);
        let second = filled.ids.len();
        assert!(second * 10 >= first * 8, "{}: {second} jobs now, {first} at first", self.name);
        filled.check_other_clients();
        let Filled { daemon, .. } = filled;
        daemon.stop();
        format!("{first} jobs, then {second}")
    }
}

impl Filled {
    /// Sends puts, many at a time, until one is refused.
    fn put_until_refused(&mut self, mut next: impl FnMut(u64) -> Vec<u8>) {
        /// This number of the smallest bodies would exceed every limit here.
        const MOST: u64 = 10_000_000;
        for first in (0..MOST).step_by(100) {
            let numbers = first..first + 100;
            let requests: Vec<Vec<u8>> = numbers.map(&mut next).collect();
            // Both sides would wait for each other if it read nothing meanwhile.
            for some in requests.chunks(10) {
                self.client.send(some.concat());
                let mut is_full = false;
                for _ in some {
                    is_full |= !self.take_inserted();
                }
                if is_full {
                    return;
                }
            }
        }
        panic!("there is no end to the memory");
    }

    /// Whether a put was taken.
    fn take_inserted(&mut self) -> bool {
        let reply = self.client.reply();
        let id = reply.number("INSERTED");
        assert!(id.is_some() || reply.line == "OUT_OF_MEMORY", "to a put: {}", reply.line);
        self.ids.extend(id);
        id.is_some()
    }

    /// Commands that need little memory work, for old and new clients.
    fn check_other_clients(&mut self) {
        let mut newcomers: Vec<Client> = (0..100).map(|_| Client::connect(self.address)).collect();
        for client in &mut newcomers {
            client.expect("list-tube-used\r\n", "USING default");
        }
        let client = &mut newcomers[0];
        for request in ["stats\r\n", "stats-tube default\r\n"] {
            assert!(client.ask(request).line.starts_with("OK "), "to {request}");
        }
        client.expect("kick 1\r\n", "KICKED 0");
        client.expect("pause-tube default 0\r\n", "PAUSED");
        let Some(&id) = self.ids.first() else { return };
        assert!(client.ask(format!("stats-job {id}\r\n")).line.starts_with("OK "));
        assert!(client.ask(format!("peek {id}\r\n")).line.starts_with("FOUND "));
        let reply = client.ask(format!("reserve-job {id}\r\n"));
        assert_eq!(reply.number("RESERVED"), Some(id), "{}", reply.line);
        client.expect(format!("touch {id}\r\n"), "TOUCHED");
        client.expect(format!("bury {id} 1\r\n"), "BURIED");
        client.expect(format!("kick-job {id}\r\n"), "KICKED");
        client.expect(format!("reserve-job {id}\r\n"), &reply.line);
        client.expect(format!("release {id} 0 0\r\n"), "RELEASED");
        client.expect(format!("delete {id}\r\n"), "DELETED");
        self.ids.swap_remove(0);
    }

    fn delete_some(&mut self, count: usize) {
        let rest = self.ids.len() - count;
        let gone = self.ids.split_off(rest);
        for some in gone.chunks(500) {
            let requests: Vec<String> = some.iter().map(|id| format!("delete {id}\r\n")).collect();
            self.client.send(requests.concat());
            for _ in some {
                assert_eq!(self.client.reply().line, "DELETED");
            }
        }
    }
}

fn small(filled: &mut Filled) {
    filled.put_until_refused(|number| put(0, 0, 3600, numbered_body(number, 8)));
}

fn large(filled: &mut Filled) {
    let body = numbered_body(0, 60_000);
    filled.put_until_refused(|_| put(0, 0, 3600, &body));
}

fn mixed(filled: &mut Filled) {
    let mut random = fastrand::Rng::with_seed(1);
    let all = numbered_body(0, 65_535);
    filled.put_until_refused(|_| put(0, 0, 3600, &all[..random.usize(..all.len())]));
}

/// Each job in a tube of its own, with the longest of names.
fn tubes(filled: &mut Filled) {
    for number in 0.. {
        let used = filled.client.ask(format!("use {number:0>200}\r\n"));
        if used.line == "OUT_OF_MEMORY" {
            return;
        }
        filled.client.send(put(0, 0, 3600, b"x"));
        if !filled.take_inserted() {
            return;
        }
    }
}

/// Clients that watch more and more tubes.
fn watches(filled: &mut Filled) {
    const TUBES: u64 = 1_000;
    filled.ids.push(filled.client.put(b"one job"));
    let requests: String = (0..TUBES).map(|number| format!("watch tube-{number}\r\n")).collect();
    for _ in 0..10_000 {
        let mut client = Client::connect(filled.address);
        client.send(&requests);
        let mut watched = 1;
        for _ in 0..TUBES {
            let reply = client.reply();
            match reply.number("WATCHING") {
                Some(count) => watched = count,
                None => {
                    assert_eq!(reply.line, "OUT_OF_MEMORY");
                    // The rest has not been read, and goes with it.
                    filled.crowd.push(client);
                    return;
                }
            }
        }
        assert_eq!(watched, TUBES + 1);
        filled.crowd.push(client);
    }
    panic!("there is no end to the memory");
}

/// Clients that have sent all of a body but its end.
fn under_way(filled: &mut Filled) {
    const LEN: usize = 60_000;
    let whole = put(0, 0, 3600, numbered_body(0, LEN));
    let (start, end) = whole.split_at(whole.len() - 10);
    for _ in 0..3_000 {
        let mut client = Client::connect(filled.address);
        client.send(start);
        filled.crowd.push(client);
    }
    let mut refused = 0;
    for client in &mut filled.crowd {
        client.send(end);
        let reply = client.reply();
        let id = reply.number("INSERTED");
        assert!(id.is_some() || reply.line == "OUT_OF_MEMORY", "to a put: {}", reply.line);
        filled.ids.extend(id);
        refused += u32::from(id.is_none());
    }
    assert!(refused > 0, "there was memory for all");
}
