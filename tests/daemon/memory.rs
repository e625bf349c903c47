//! Memory use and `--max-memory`.

use crate::harness::client::{Client, connect};
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::put;
use crate::harness::wait_until;
use crate::{PUT, serve};
use socket2::{SockRef, Socket};
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener};
use tempfile::TempDir;

#[test]
fn puts_are_refused_at_the_memory_limit() {
    let directory = tempfile::tempdir().unwrap();
    let path = path_text(directory.path());
    let (mut daemon, mut client) = serve(&["--max-memory", "10000", "-b", path]);
    let put = put(0, 0, 9, "x".repeat(3000));
    let unique = format!("put 0 0 9 3000 idp:a\r\n{}\r\n", "x".repeat(3000));
    client.expect(&unique, "INSERTED 1");
    for id in 2..=3 {
        client.expect(&put, &format!("INSERTED {id}"));
    }
    client.expect(&put, "OUT_OF_MEMORY");
    // It inserts nothing, so that its small body needs no memory.
    client.expect(&unique, "INSERTED 1 READY");
    daemon.wait_for_log("a put is answered OUT_OF_MEMORY");
    client.expect_service();
    daemon.kill();
    // Acknowledged jobs come back even above the limit.
    let (daemon, mut client) = serve(&["--max-memory", "5000", "-b", path]);
    assert_eq!(client.stat("current-jobs-ready"), 3);
    client.expect(&put, "OUT_OF_MEMORY");
    client.delete_all(&[1, 2, 3]);
    client.expect(&put, "INSERTED 4");
    let log = daemon.stop();
    assert_eq!(log.matches("OUT_OF_MEMORY").count(), 1, "more than one warning a minute: {log}");
}

/// Puts jobs, a hundred at a time, until `most` are taken or one is refused; returns the ids. `next` returns
/// the put with a number. Of 10 million one must be refused.
pub(crate) fn put_many(
    client: &mut Client,
    most: usize,
    mut next: impl FnMut(usize) -> Vec<u8>,
) -> Vec<u64> {
    const BATCH: usize = 100;
    const MOST_PUTS: usize = 10_000_000;
    let mut ids = Vec::new();
    for first in (0..most).step_by(BATCH) {
        let puts: Vec<Vec<u8>> = (first..first + BATCH).map(&mut next).collect();
        client.send(puts.concat());
        ids.extend((0..BATCH).filter_map(|_| id_of_put(client)));
        if ids.len() < first + BATCH {
            break;
        }
        assert!(first < MOST_PUTS, "no put is refused");
    }
    ids
}

/// Reads the reply to a put: the id of the job, if there was memory for it.
pub(crate) fn id_of_put(client: &mut Client) -> Option<u64> {
    let reply = client.reply();
    let id = reply.number("INSERTED");
    assert!(id.is_some() || reply.line == "OUT_OF_MEMORY", "to a put: {}", reply.line);
    id
}

/// The size of the bodies does not matter, nor whether the server is ever idle for long.
#[test]
fn memory_is_returned_to_the_system_after_a_backlog() {
    for (is_idle, jobs, body_len) in [(true, 100_000, 500), (false, 20_000, 16_000)] {
        let (daemon, mut client) = serve(&[]);
        client.expect_service();
        // Not the whole RSS: how much of the program file is in memory depends on the system.
        let empty = daemon.anonymous_kib();
        let put = put(0, 0, 9, vec![b'x'; body_len]);
        let ids = put_many(&mut client, jobs, |_| put.clone());
        assert_eq!(ids.len(), jobs);
        let backlog = daemon.anonymous_kib() - empty;
        assert!(backlog > 50_000, "{backlog} KiB");
        client.delete_all(&ids);
        if cfg!(target_env = "gnu") {
            // The defect would leave all.
            let left = if is_idle { backlog / 10 } else { 16 * 1024 };
            wait_until(&format!("of {backlog} KiB {left} are left"), || {
                if !is_idle {
                    client.expect_service();
                }
                daemon.anonymous_kib() < empty + left
            });
        }
    }
}

fn start_with_max_memory() -> (Daemon, SocketAddr) {
    start_with_small_buffers(&["--max-memory", "16777216"])
}

/// Starts a server for whose clients the kernel keeps little that they do not read. Otherwise it would keep
/// megabytes for each, and the server nothing.
fn start_with_small_buffers(arguments: &[&str]) -> (Daemon, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Connections inherit it.
    SockRef::from(&listener).set_send_buffer_size(64 * 1024).unwrap();
    let address = listener.local_addr().unwrap();
    (Daemon::with_inherited(arguments, listener), address)
}

/// Asserts that the process takes at most the limit, a quarter more, and 32 MiB, when it has run all
/// that it has received: it serves a client 1000 times.
fn assert_is_within_memory(daemon: &Daemon, client: &mut Client) {
    (0..1_000).for_each(|_| client.expect_service());
    let (rss, most) = (daemon.rss_kib(), (16 + 4 + 32) * 1024);
    assert!(rss <= most, "{rss} KiB of at most {most}");
}

#[test]
fn pages_with_one_job_left_count_as_memory() {
    let (daemon, address) = start_with_max_memory();
    let mut client = Client::connect(address);
    for len in [60_000, 20_000, 7_000, 3_000, 2_000, 1_500, 1_100, 800, 600] {
        let put = put(0, 0, 9, vec![b'x'; len]);
        let ids = put_many(&mut client, usize::MAX, |_| put.clone());
        // One job of each page of 128 KiB or more stays.
        let in_page = 2 * 128 * 1024 / len;
        for ids in ids.chunks(in_page) {
            client.delete_all(&ids[1..]);
        }
        assert_is_within_memory(&daemon, &mut client);
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
    let mut reader = Client::connect(address);
    let others = (1..CLIENTS).map(|_| Client::connect_with_window(address, 4096));
    let mut others: Vec<Client> = others.collect();
    for client in others.iter_mut().chain([&mut reader]) {
        client.send("peek 1\r\n".repeat(PEEKS));
    }
    assert_is_within_memory(&daemon, &mut first);
    // A client that reads receives all replies.
    for _ in 0..PEEKS {
        let reply = reader.reply();
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
    assert_is_within_memory(&daemon, &mut other);
    drop(clients);
    wait_until("a put works again", || other.ask(PUT).number("INSERTED").is_some());
}

#[test]
fn a_client_that_never_reads_costs_bounded_memory() {
    let (daemon, mut hostile) = serve(&["-z", "1000000"]);
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
    let address = socket.peer_addr().unwrap().as_socket().unwrap();
    Client::connect(address).expect_service();
    let kib = daemon.rss_kib();
    assert!(kib < 32 * 1024, "{kib} KiB");
}

/// A server with 64 MiB that keeps no body in memory, and a client.
struct Cold {
    daemon: Daemon,
    address: SocketAddr,
    first: Client,
    _directory: TempDir,
}

impl Cold {
    fn start() -> Cold {
        let directory = tempfile::tempdir().unwrap();
        let flags = ["-z", "10000000", "--body-cache", "0", "--max-memory", "67108864", "-b"];
        let flags = [&flags[..], &[path_text(directory.path())]].concat();
        let (daemon, address) = start_with_small_buffers(&flags);
        Cold { daemon, address, first: Client::connect(address), _directory: directory }
    }

    fn connect_many(&self, count: usize) -> Vec<Client> {
        (0..count).map(|_| Client::connect_with_window(self.address, 4096)).collect()
    }

    /// Asserts that the process has never taken more than the limit, a quarter more, and 32 MiB.
    fn assert_is_within_memory(&mut self) {
        (0..1_000).for_each(|_| self.first.expect_service());
        let (peak, most) = (self.daemon.peak_rss_kib(), (64 + 16 + 32) * 1024);
        assert!(peak <= most, "{peak} KiB of at most {most}");
    }
}

#[test]
fn a_cold_body_that_many_clients_do_not_read_is_in_memory_once() {
    let mut cold = Cold::start();
    let body = vec![b'x'; 1 << 20];
    assert_eq!(cold.first.put(&body), 1);
    let mut clients = cold.connect_many(600);
    clients.iter_mut().for_each(|client| client.send("peek 1\r\n"));
    cold.assert_is_within_memory();
    assert!(clients.into_iter().rev().take(20).all(|mut client| client.reply().body == body));
}

#[test]
fn unread_batches_of_cold_bodies_take_bounded_memory() {
    let mut cold = Cold::start();
    let put = put(0, 0, 60, vec![b'x'; 16_000]);
    put_many(&mut cold.first, 2_000, |_| put.clone());
    let mut clients = cold.connect_many(600);
    for (number, client) in clients.iter_mut().enumerate() {
        client.send(format!("peek-batch default any 1000 {}\r\n", 3 * number));
    }
    cold.assert_is_within_memory();
    // A worker gets its job all the same, and each client its reply in its turn.
    assert_eq!(cold.first.ask("reserve\r\n").line, "RESERVED 1 16000");
    for client in clients.iter_mut().take(100) {
        assert!(client.line().starts_with("FOUND_BATCH 65 "));
        (0..65).for_each(|_| assert_eq!(client.reply().body.len(), 16_000));
    }
}

#[test]
fn large_cold_bodies_that_are_read_at_once_take_bounded_memory() {
    let mut cold = Cold::start();
    let ids: Vec<u64> = (0..40).map(|_| cold.first.put(vec![b'x'; 8 << 20])).collect();
    std::thread::scope(|scope| {
        for id in ids {
            let mut client = Client::connect(cold.address);
            scope.spawn(move || {
                assert_eq!(client.ask(format!("peek {id}\r\n")).body.len(), 8 << 20);
            });
        }
    });
    cold.assert_is_within_memory();
}

/// Another client holds the memory for large replies, and does not read. The puts behind the reserve are complete.
#[test]
fn a_job_is_ready_again_when_its_worker_that_waits_for_memory_is_reset() {
    const BEHIND: usize = 2_000;
    let mut cold = Cold::start();
    let mut idle = cold.connect_many(2);
    let Cold { first, address, .. } = &mut cold;
    for _ in 0..3 {
        first.put(vec![b'x'; 9_900_000]);
    }
    idle[0].send("peek 2\r\n");
    idle[0].wait_for_reply();
    idle[1].send("peek 3\r\n");
    let mut worker = Client::connect(*address);
    worker.send("reserve\r\n");
    wait_until("the worker waits", || first.stat("current-jobs-reserved") == 1);
    worker.send([PUT, "reserve-job 2\r\n"].concat().repeat(BEHIND));
    worker.reset();
    wait_until("the connection is closed", || first.stat("current-connections") == 3);
    assert_eq!(first.stat("current-jobs-ready"), 3 + BEHIND as u64);
    assert_eq!(first.ask("stats-job 1\r\n").value("reserves"), Some(0));
    assert_eq!(idle[0].reply().body.len(), 9_900_000);
}
