//! A system that refuses memory: the server replies OUT_OF_MEMORY and goes on.

use crate::harness::client::Client;
use crate::harness::process::Daemon;
use crate::harness::request::put;
use crate::harness::wait_until;
use crate::{PUT, stat};
use std::net::SocketAddr;

/// Starts the server with 40 MB of address space.
fn start() -> (Daemon, SocketAddr) {
    Daemon::with_limit("-v 40000", &[])
}

#[test]
fn clients_are_served_without_memory_for_a_put() {
    let (_daemon, address) = Daemon::with_limit("-v 100000", &[]);
    let mut client = Client::connect(address);
    let put = put(0, 0, 600, "x".repeat(60_000));
    let mut replies = (0..10_000).map(|_| client.ask(&put).line);
    let refusal = replies.find(|line| !line.starts_with("INSERTED "));
    assert_eq!(refusal.as_deref(), Some("OUT_OF_MEMORY"));

    // Other commands work, and puts do after deletes.
    let mut clients: Vec<Client> = (0..200).map(|_| Client::connect(address)).collect();
    for (id, client) in (1..).zip(&mut clients) {
        client.expect(format!("watch tube-{id}\r\n"), "WATCHING 2");
        client.expect(format!("delete {id}\r\n"), "DELETED");
    }
    assert!(client.ask(&put).number("INSERTED").is_some());
}

/// Watches tubes; returns the line of the last reply.
fn watch_all(client: &mut Client, names: impl ExactSizeIterator<Item = String>) -> String {
    let count = names.len();
    client.send(names.map(|name| format!("watch {name}\r\n")).collect::<String>());
    (0..count).map(|_| client.line()).last().unwrap()
}

/// Watches tubes with long names until there is no memory for one more.
fn watch_until_refused(client: &mut Client) {
    const AT_ONCE: u32 = 500;
    let batches = (0..).step_by(AT_ONCE as usize);
    let mut replies = batches.map(|first: u32| {
        watch_all(client, (0..AT_ONCE).map(move |number| format!("{:0>200}", first + number)))
    });
    let refusal = replies.find(|reply| !reply.starts_with("WATCHING "));
    assert_eq!(refusal.as_deref(), Some("OUT_OF_MEMORY"));
}

/// Waits until the server accepts jobs again, which needs all of its headroom.
fn wait_for_memory(producer: &mut Client) {
    wait_until("there is memory again", || producer.ask(PUT).number("INSERTED").is_some());
}

fn assert_times_out_or_is_refused(client: &mut Client) {
    let line = client.ask("reserve-with-timeout 1\r\n").line;
    assert!(["TIMED_OUT", "OUT_OF_MEMORY"].contains(&&*line), "{line}");
}

#[test]
fn a_reserve_without_memory_for_its_waiters_gets_a_reply() {
    let (_daemon, address) = start();
    let [mut hog, mut producer] = [(); 2].map(|()| Client::connect(address));
    producer.expect("use kept\r\n", "USING kept");
    producer.expect(PUT, "INSERTED 1");
    watch_until_refused(&mut hog);
    for _ in 0..3 {
        assert_times_out_or_is_refused(&mut hog);
    }
    Client::connect(address).expect("list-tube-used\r\n", "USING default");
    drop(hog);
    wait_for_memory(&mut producer);
    producer.expect("delete 1\r\n", "DELETED");
}

#[test]
fn a_worker_is_served_after_another_client_frees_its_memory() {
    const BATCHES: u32 = 40;
    const AT_ONCE: u32 = 500;
    let (_daemon, address) = start();
    let [mut worker, mut hog, mut producer] = [(); 3].map(|()| Client::connect(address));
    for batch in 0..BATCHES {
        let names = (0..AT_ONCE).map(|number| format!("own-{batch}-{number}"));
        let last = watch_all(&mut worker, names);
        assert_eq!(last, format!("WATCHING {}", (batch + 1) * AT_ONCE + 1));
    }
    producer.expect("use own-1-1\r\n", "USING own-1-1");
    watch_until_refused(&mut hog);
    assert_times_out_or_is_refused(&mut worker);
    drop(hog);
    wait_for_memory(&mut producer);
    assert!(worker.ask("reserve-with-timeout 0\r\n").number("RESERVED").is_some());
}

#[test]
fn a_connection_without_memory_waits_or_is_served() {
    // The list of connections has room for a power of two.
    const CLIENTS: usize = 1024;
    let (_daemon, address) = start();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| Client::connect(address)).collect();
    let mut producer = clients.pop().unwrap();
    producer.expect(PUT, "INSERTED 1");
    let mut hog = clients.pop().unwrap();
    watch_until_refused(&mut hog);
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

#[test]
fn lists_and_tubes_without_memory_are_refused_and_small_replies_work() {
    let (_daemon, address) = start();
    let mut client = Client::connect(address);
    watch_until_refused(&mut client);
    client.expect("list-tubes\r\n", "OUT_OF_MEMORY");
    client.expect("list-tubes-watched\r\n", "OUT_OF_MEMORY");
    // Memory that a list would have taken may be enough for one more tube.
    let line = client.ask("use another\r\n").line;
    assert!(["OUT_OF_MEMORY", "USING another"].contains(&&*line), "{line}");
    client.expect("reserve-with-timeout 0\r\n", "TIMED_OUT");
    assert_eq!(client.stat("current-waiting"), 0);
    // The tubes are removed with their only watcher.
    drop(client);
    wait_until("there is memory again", || {
        Client::connect(address).ask(PUT).number("INSERTED").is_some()
    });
    wait_until("the tubes are removed", || stat(address, "current-tubes") == 1);
}
