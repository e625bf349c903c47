//! A system that refuses memory: the server replies OUT_OF_MEMORY and goes on. `soak::memory` fills the memory
//! with jobs; here one client watches tubes with long names until there is no memory for one more.

use crate::harness::client::Client;
use crate::harness::process::Daemon;
use crate::harness::wait_until;
use crate::memory::put_many;
use crate::{PUT, stat};
use std::net::SocketAddr;

fn start() -> (Daemon, SocketAddr) {
    Daemon::with_limit("-v 40000", &[])
}

/// Watches tubes; returns the line of the last reply.
fn watch_all(client: &mut Client, names: impl ExactSizeIterator<Item = String>) -> String {
    let count = names.len();
    client.send(names.map(|name| format!("watch {name}\r\n")).collect::<String>());
    (0..count).map(|_| client.line()).last().unwrap()
}

/// Connects a client that takes all memory, until it is dropped.
fn hog(address: SocketAddr) -> Client {
    let mut client = Client::connect(address);
    let mut replies = (0..).step_by(500).map(|first: u32| {
        watch_all(&mut client, (0..500).map(move |number| format!("{:0>200}", first + number)))
    });
    let refusal = replies.find(|reply| !reply.starts_with("WATCHING "));
    assert_eq!(refusal.as_deref(), Some("OUT_OF_MEMORY"));
    client
}

/// Waits until the server accepts jobs again, which needs all of its headroom.
fn wait_for_memory(producer: &mut Client) {
    wait_until("there is memory again", || producer.ask(PUT).number("INSERTED").is_some());
}

#[track_caller]
fn expect_one_of(client: &mut Client, request: &str, lines: [&str; 2]) {
    let line = client.ask(request).line;
    assert!(lines.contains(&&*line), "to {request:?}: {line}");
}

#[test]
fn lists_tubes_and_waiters_without_memory_are_refused_and_small_replies_work() {
    let (_daemon, address) = start();
    let mut producer = Client::connect(address);
    producer.expect("use kept\r\n", "USING kept");
    producer.expect(PUT, "INSERTED 1");
    let mut hog = hog(address);
    for _ in 0..3 {
        expect_one_of(&mut hog, "reserve-with-timeout 1\r\n", ["TIMED_OUT", "OUT_OF_MEMORY"]);
    }
    Client::connect(address).expect("list-tube-used\r\n", "USING default");
    hog.expect("list-tubes\r\n", "OUT_OF_MEMORY");
    hog.expect("list-tubes-watched\r\n", "OUT_OF_MEMORY");
    // Memory that a list would have taken may be enough for one more tube.
    expect_one_of(&mut hog, "use another\r\n", ["OUT_OF_MEMORY", "USING another"]);
    hog.expect("reserve-with-timeout 0\r\n", "TIMED_OUT");
    assert_eq!(hog.stat("current-waiting"), 0);
    // The tubes are removed with their only watcher.
    drop(hog);
    wait_for_memory(&mut producer);
    producer.expect("delete 1\r\n", "DELETED");
    wait_until("the tubes are removed", || stat(address, "current-tubes") == 2);
}

/// The priorities descend, so that no job becomes ready behind the others.
#[test]
fn jobs_with_groups_fill_the_memory_and_can_all_be_reserved() {
    for delay in [0, 2] {
        let (_daemon, address) = start();
        let mut producer = Client::connect(address);
        let ids = put_many(&mut producer, usize::MAX, |number| {
            let (pri, body) = (10_000_000 - number, "x".repeat(200));
            format!("put {pri} {delay} 600 200 con:k{number}\r\n{body}\r\n").into_bytes()
        });
        let jobs = ids.len() as u64;
        wait_until("all are ready", || producer.stat("current-jobs-ready") == jobs);
        let mut worker = Client::connect(address);
        // One at a time while the memory is full, then many.
        let ids: Vec<u64> = ids.into_iter().rev().collect();
        let (first, others) = ids.split_at(100);
        for ids in first.chunks(1).chain(others.chunks(100)) {
            worker.send("reserve-with-timeout 0\r\n".repeat(ids.len()));
            for id in ids {
                assert_eq!(worker.reply().number("RESERVED"), Some(*id), "the best job");
            }
            worker.delete_all(ids);
        }
    }
}

#[test]
fn a_connection_without_memory_waits_or_is_served() {
    // The list of connections has room for a power of two: of these, a producer, and the hog.
    const CLIENTS: usize = 1022;
    let (_daemon, address) = start();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| Client::connect(address)).collect();
    let mut producer = Client::connect(address);
    producer.expect(PUT, "INSERTED 1");
    let hog = hog(address);
    let mut newcomers = [(); 3].map(|()| Client::connect(address));
    // The server accepts connections before it runs commands.
    for client in &mut clients {
        client.expect("list-tube-used\r\n", "USING default");
    }
    drop(hog);
    for client in &mut newcomers {
        client.expect("list-tube-used\r\n", "USING default");
    }
    wait_for_memory(&mut producer);
    producer.expect("delete 1\r\n", "DELETED");
}
