//! Memory use and `--max-memory`.

use crate::harness::client::{Client, connect};
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::{delete_all, put};
use crate::harness::wait_until;
use crate::{PUT, stat};
use socket2::Socket;
use std::io::{ErrorKind, Write};
use std::net::SocketAddr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

#[test]
fn puts_are_refused_at_the_memory_limit() {
    let directory = tempfile::tempdir().unwrap();
    let path = path_text(directory.path());
    let (mut daemon, address) = Daemon::on_loopback(&["--max-memory", "10000", "-b", path]);
    let mut client = Client::connect(address);
    let put = put(0, 0, 9, "x".repeat(3000));
    for id in 1..=3 {
        client.expect(&put, &format!("INSERTED {id}"));
    }
    client.expect(&put, "OUT_OF_MEMORY");
    daemon.wait_for_log("a put is answered OUT_OF_MEMORY");
    client.expect_service();
    daemon.kill();
    // Acknowledged jobs come back even above the limit.
    let (daemon, address) = Daemon::on_loopback(&["--max-memory", "5000", "-b", path]);
    let mut client = Client::connect(address);
    assert_eq!(stat(address, "current-jobs-ready"), 3);
    client.expect(&put, "OUT_OF_MEMORY");
    for id in 1..=3 {
        client.expect(format!("delete {id}\r\n"), "DELETED");
    }
    client.expect(&put, "INSERTED 4");
    let log = daemon.stop();
    assert_eq!(log.matches("OUT_OF_MEMORY").count(), 1, "more than one warning a minute: {log}");
}

/// Puts jobs of this size in batches, and returns their ids.
fn put_in_batches(client: &mut Client, jobs: usize, batch: usize, body_len: usize) -> Vec<u64> {
    let puts = put(0, 0, 9, vec![b'x'; body_len]).repeat(batch);
    let mut ids = Vec::new();
    for _ in 0..jobs / batch {
        client.send(&puts);
        ids.extend((0..batch).map(|_| client.reply().number("INSERTED").unwrap()));
    }
    ids
}

fn delete_in_batches(client: &mut Client, ids: &[u64], batch: usize) {
    for ids in ids.chunks(batch) {
        client.send(delete_all(ids.iter().copied()));
        assert!(ids.iter().all(|_| client.line() == "DELETED"));
    }
}

#[test]
fn memory_is_returned_to_the_system_after_a_backlog() {
    const BATCH: usize = 1_000;
    let (daemon, address) = Daemon::on_loopback(&[]);
    let mut client = Client::connect(address);
    // Not the whole RSS: how much of the program file is in memory depends on the system.
    let empty = daemon.anonymous_kib();
    let ids = put_in_batches(&mut client, 100_000, BATCH, 500);
    let backlog = daemon.anonymous_kib() - empty;
    assert!(backlog > 50_000, "{backlog} KiB");
    delete_in_batches(&mut client, &ids, BATCH);
    if cfg!(target_env = "gnu") {
        let what = format!("nine tenths of {backlog} KiB are free");
        wait_until(&what, || daemon.anonymous_kib() < empty + backlog / 10);
    }
}

/// The size of the bodies does not matter, nor that the server is never idle for long.
#[test]
fn memory_is_returned_to_the_system_under_traffic() {
    const BATCH: usize = 100;
    let (daemon, address) = Daemon::on_loopback(&[]);
    let traffic = Traffic::start(address);
    let mut client = Client::connect(address);
    let empty = daemon.rss_kib();
    let ids = put_in_batches(&mut client, 20_000, BATCH, 16_000);
    let full = daemon.rss_kib();
    assert!(full > 300_000, "{full} KiB");
    delete_in_batches(&mut client, &ids, BATCH);
    if cfg!(target_env = "gnu") {
        // The defect would leave all 300 MiB.
        let what = format!("of {full} KiB at most 16 MiB are left above {empty} KiB");
        wait_until(&what, || daemon.rss_kib() < empty + 16 * 1024);
    }
    traffic.end();
}

/// A client that sends a command every 50 ms and reads the reply.
struct Traffic {
    end: mpsc::Sender<()>,
    client: thread::JoinHandle<()>,
}

impl Traffic {
    fn start(address: SocketAddr) -> Traffic {
        const PAUSE: Duration = Duration::from_millis(50);
        let (end, is_over) = mpsc::channel();
        let mut client = Client::connect(address);
        let client = thread::spawn(move || {
            while is_over.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                client.expect_service();
            }
        });
        Traffic { end, client }
    }

    fn end(self) {
        drop(self.end);
        self.client.join().expect("the client is served");
    }
}

const MIB_IN_KIB: u64 = 1024;
/// The `--max-memory` of these tests.
const LIMIT_KIB: u64 = 16 * MIB_IN_KIB;

fn start_with_max_memory() -> (Daemon, SocketAddr) {
    let bytes = (LIMIT_KIB * 1024).to_string();
    Daemon::on_loopback(&["--max-memory", &bytes])
}

/// Asserts that the process takes at most the limit, a quarter more, and 32 MiB.
fn assert_is_within_memory(daemon: &Daemon) {
    let rss = daemon.rss_kib();
    let most = LIMIT_KIB + LIMIT_KIB / 4 + 32 * MIB_IN_KIB;
    assert!(rss <= most, "{rss} KiB of at most {most}");
}

/// Waits until the server has run all that it has received: it serves a client 1000 times.
fn settle(client: &mut Client) {
    for _ in 0..1_000 {
        client.expect_service();
    }
}

#[test]
fn pages_with_one_job_left_count_as_memory() {
    let (daemon, address) = start_with_max_memory();
    let mut client = Client::connect(address);
    for len in [60_000, 20_000, 7_000, 3_000, 2_000, 1_500, 1_100, 800, 600] {
        let body = "x".repeat(len);
        let ids: Vec<u64> = std::iter::from_fn(|| client.try_put(&body)).collect();
        // One job of each page of 128 KiB or more stays.
        let in_page = 2 * 128 * 1024 / len;
        for (_, id) in ids.iter().enumerate().filter(|(n, _)| n % in_page != 0) {
            client.expect(format!("delete {id}\r\n"), "DELETED");
        }
        assert_is_within_memory(&daemon);
    }
}

#[test]
fn unread_replies_count_as_memory() {
    const CLIENTS: usize = 600;
    const PEEKS: usize = 1_500;
    let (daemon, address) = start_with_max_memory();
    let mut first = Client::connect(address);
    let body = vec![b'x'; 4_000];
    assert_eq!(first.put(&body), 1);
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| Client::connect(address)).collect();
    for client in &mut clients {
        client.send("peek 1\r\n".repeat(PEEKS));
    }
    settle(&mut first);
    assert_is_within_memory(&daemon);
    // A client that reads receives all replies.
    for _ in 0..PEEKS {
        let reply = clients[0].reply();
        assert!(reply.line == "FOUND 1 4000" && reply.body == body, "{}", reply.line);
    }
}

#[test]
fn unfinished_bodies_and_pending_commands_count_as_memory() {
    const CLIENTS: usize = 1_500;
    let (daemon, address) = start_with_max_memory();
    let unfinished = format!("put 0 0 9 60000\r\n{}\r", "x".repeat(60_000));
    let pending = format!("reserve\r\n{}", "list-tube-used\r\n".repeat(4_200));
    let clients: Vec<Socket> = (0..CLIENTS).map(|_| connect(address)).collect();
    for (number, mut client) in clients.iter().enumerate() {
        let bytes = if number % 2 == 0 { &unfinished } else { &pending };
        client.set_nonblocking(true).unwrap();
        // Bytes for which the kernel has no room are not sent.
        let _ = client.write(bytes.as_bytes());
    }
    let mut other = Client::connect(address);
    settle(&mut other);
    assert_is_within_memory(&daemon);
    drop(clients);
    wait_until("a put works again", || other.ask(PUT).number("INSERTED").is_some());
}

#[test]
fn a_client_that_never_reads_costs_bounded_memory() {
    let (daemon, address) = Daemon::on_loopback(&["-z", "1000000"]);
    let mut hostile = Client::connect(address);
    assert_eq!(hostile.put(vec![b'x'; 1_000_000]), 1);
    // The replies to these requests would be 2 TB; the server stops reading long before.
    let mut socket = hostile.socket();
    socket.set_nonblocking(true).unwrap();
    let mut requests = &*b"peek 1\r\nstats\r\n".repeat(2_000_000);
    wait_until("the server stops reading requests", || {
        let was_asleep = daemon.is_asleep();
        match socket.write(requests) {
            Ok(count) => {
                requests = &requests[count..];
                assert!(!requests.is_empty(), "the server has read all requests");
                false
            }
            // The server sleeps although the buffers of the kernel are full of requests.
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                was_asleep
            }
        }
    });
    Client::connect(address).expect_service();
    let kib = daemon.rss_kib();
    assert!(kib < 32 * 1024, "{kib} KiB");
}
