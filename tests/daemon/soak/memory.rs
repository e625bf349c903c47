//! A limit of address space: puts until none is taken, in every shape of data. Other commands still
//! work, and puts work again after deletes.

use super::Run;
use crate::harness::client::Client;
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::{numbered_body, put};
use crate::harness::wait_until;
use crate::memory::{id_of_put, put_many};
use std::net::SocketAddr;

/// What fills the memory: its name, the limit in MiB as `ulimit -v` counts it, whether there is a
/// binlog, and how it is done.
type Shape = (&'static str, u32, bool, fn(&mut Filled));

/// A test of a second; the others take longer.
const LARGE: Shape = ("large bodies", 96, false, large);
const SHAPES: [Shape; 8] = [
    LARGE,
    ("small bodies", 64, false, small),
    ("bodies of all sizes", 128, false, mixed),
    ("tubes", 64, false, tubes),
    ("watches", 64, false, watches),
    ("bodies under way", 96, false, under_way),
    ("a binlog, small bodies", 64, true, small),
    ("a binlog, large bodies", 96, true, large),
];

pub(super) fn run_out(run: &Run) -> String {
    let shapes = if run.is_whole { &SHAPES[..] } else { &[LARGE] };
    let mut figures = String::new();
    let rounds = run.rounds(|| figures = shapes.iter().map(play).collect());
    format!("{figures}{rounds} rounds")
}

/// A server under its limit, and what has been put into it.
struct Filled {
    address: SocketAddr,
    client: Client,
    ids: Vec<u64>,
    /// Clients that must stay.
    crowd: Vec<Client>,
}

fn play(&(name, limit_mib, has_binlog, fill): &Shape) -> String {
    let directory = tempfile::tempdir().expect("it is new");
    let path = path_text(directory.path());
    let flags: &[&str] = if has_binlog { &["-F", "-b", path] } else { &[] };
    let (daemon, address) = Daemon::with_limit(&format!("-v {}", limit_mib << 10), flags);
    let client = Client::connect(address);
    let mut filled = Filled { address, client, ids: Vec::new(), crowd: Vec::new() };
    fill(&mut filled);
    let first = filled.ids.len();
    filled.check_other_clients();
    // A part of it goes, and there is room again.
    filled.delete(first / 4);
    filled.crowd.truncate(filled.crowd.len() / 2);
    wait_until(&format!("puts work again after {name}"), || filled.takes_put("again"));
    filled.crowd.clear();
    filled.delete(filled.ids.len());
    filled.client.expect("use default\r\n", "USING default");
    assert_eq!(filled.client.jobs(), 0);
    // The memory that the jobs had can be had again.
    fill(&mut filled);
    let second = filled.ids.len();
    assert!(second * 10 >= first * 8, "{name}: {second} jobs now, {first} at first");
    filled.check_other_clients();
    daemon.stop();
    format!("{name}: {first} jobs, then {second}; ")
}

impl Filled {
    /// Puts bodies until one is refused.
    fn put_until_refused(&mut self, mut next: impl FnMut(u64) -> Vec<u8>) {
        let next = |number| put(0, 0, 3600, next(number as u64));
        self.ids.extend(put_many(&mut self.client, usize::MAX, next));
    }

    /// Puts a job; returns whether it was taken.
    fn takes_put(&mut self, body: &str) -> bool {
        self.client.send(put(0, 0, 3600, body));
        let id = id_of_put(&mut self.client);
        self.ids.extend(id);
        id.is_some()
    }

    /// Commands that need little memory work, for old and new clients.
    fn check_other_clients(&mut self) {
        let mut newcomers: Vec<Client> = (0..100).map(|_| Client::connect(self.address)).collect();
        for client in &mut newcomers {
            client.expect("list-tube-used\r\n", "USING default");
        }
        let id = self.ids.pop();
        for (request, word) in [
            ("stats", "OK"),
            ("stats-tube default", "OK"),
            ("kick 1", "KICKED"),
            ("pause-tube default 0", "PAUSED"),
            ("stats-job ID", "OK"),
            ("peek ID", "FOUND"),
            ("reserve-job ID", "RESERVED"),
            ("touch ID", "TOUCHED"),
            ("bury ID 1", "BURIED"),
            ("kick-job ID", "KICKED"),
            ("reserve-job ID", "RESERVED"),
            ("release ID 0 0", "RELEASED"),
            ("delete ID", "DELETED"),
        ] {
            let request = match id {
                None if request.contains("ID") => continue,
                id => request.replace("ID", &id.unwrap_or_default().to_string()),
            };
            let line = newcomers[0].ask(format!("{request}\r\n")).line;
            assert_eq!(line.split(' ').next(), Some(word), "to {request}: {line}");
        }
    }

    fn delete(&mut self, count: usize) {
        let ids = self.ids.split_off(self.ids.len() - count);
        self.client.delete_all(&ids);
    }
}

fn small(filled: &mut Filled) {
    filled.put_until_refused(|number| numbered_body(number, 8));
}

fn large(filled: &mut Filled) {
    let body = numbered_body(0, 60_000);
    filled.put_until_refused(|_| body.clone());
}

fn mixed(filled: &mut Filled) {
    let mut random = fastrand::Rng::with_seed(1);
    let all = numbered_body(0, 65_535);
    filled.put_until_refused(|_| all[..random.usize(..all.len())].to_vec());
}

/// Each job in a tube of its own, with the longest of names.
fn tubes(filled: &mut Filled) {
    for number in 0.. {
        let used = filled.client.ask(format!("use {number:0>200}\r\n"));
        if used.line == "OUT_OF_MEMORY" || !filled.takes_put("x") {
            return;
        }
    }
}

/// Clients that watch more and more tubes.
fn watches(filled: &mut Filled) {
    const TUBES: usize = 1_000;
    assert!(filled.takes_put("one job"));
    let requests: String = (0..TUBES).map(|number| format!("watch tube-{number}\r\n")).collect();
    for _ in 0..10_000 {
        let mut client = Client::connect(filled.address);
        client.send(&requests);
        let refused = (0..TUBES).map(|_| client.line()).find(|line| !line.starts_with("WATCHING "));
        // Replies that were not read go with the client.
        filled.crowd.push(client);
        if let Some(line) = refused {
            return assert_eq!(line, "OUT_OF_MEMORY");
        }
    }
    panic!("there is no end to the memory");
}

/// Clients that have sent all of a body but its end.
fn under_way(filled: &mut Filled) {
    let whole = put(0, 0, 3600, numbered_body(0, 60_000));
    let (start, end) = whole.split_at(whole.len() - 10);
    filled.crowd = (0..3_000).map(|_| Client::connect(filled.address)).collect();
    filled.crowd.iter_mut().for_each(|client| client.send(start));
    filled.crowd.iter_mut().for_each(|client| client.send(end));
    filled.ids.extend(filled.crowd.iter_mut().filter_map(id_of_put));
    assert!(filled.ids.len() < filled.crowd.len(), "there was memory for all");
}
