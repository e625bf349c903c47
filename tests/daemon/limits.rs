//! Limits of connections and descriptors.

use crate::faults::start_with_fault;
use crate::harness::client::{Client, connect};
use crate::harness::process::{Daemon, ON_LOOPBACK};
use crate::harness::program::raise_open_files;
use crate::harness::{skip, wait_until};
use crate::{HEALTH, stat};
use socket2::Socket;
use std::fs::read_to_string;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

const AT_LIMIT: &str = "cannot accept connections";

fn connect_all(address: SocketAddr, count: usize) -> Vec<Socket> {
    (0..count).map(|_| connect(address)).collect()
}

#[test]
fn the_soft_limit_of_open_files_is_raised() {
    let (daemon, _) = Daemon::with_limit("-Sn 50", &[]);
    let limits = read_to_string(format!("/proc/{}/limits", daemon.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<&str> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1]);
}

#[test]
fn the_server_works_at_the_descriptor_limit_and_accepts_again() {
    let start = Instant::now();
    let (mut daemon, address) = Daemon::with_limit("-n 32", &[]);
    let mut clients = connect_all(address, 64);
    daemon.wait_for_log(AT_LIMIT);

    let mut accepted = Client::over(clients.remove(0));
    accepted.expect_service();
    wait_until("the server is idle", || daemon.is_asleep());
    let used_before = daemon.processor_time();
    thread::sleep(Duration::from_millis(300));
    let used = daemon.processor_time() - used_before;
    assert!(used <= Duration::from_millis(20), "the server spins: {used:?} in 300 ms");

    // When clients disconnect, pending connections are accepted, to the last one.
    let mut last = Client::over(clients.pop().unwrap());
    drop((accepted, clients));
    last.expect_service();
    let log = daemon.stop();
    let warnings = log.matches("cannot accept").count() as u64;
    assert!(warnings <= start.elapsed().as_secs() / 60, "more than one warning a minute: {log}");
}

#[test]
fn a_client_beyond_the_connection_limit_waits_for_another_to_disconnect() {
    let (mut daemon, address) = Daemon::on_loopback(&["--max-connections", "2"]);
    let [mut first, mut second, mut third] = [(); 3].map(|()| Client::connect(address));
    first.expect_service();
    second.expect_service();
    daemon.wait_for_log("cannot accept connections: 2 are open");
    third.send("use a\r\n");
    second.expect_service();
    third.socket().set_nonblocking(true).unwrap();
    let error = third.try_reply().expect_err("the connection is not accepted");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    drop(first);
    third.socket().set_nonblocking(false).unwrap();
    assert_eq!(third.line(), "USING a");
    drop((second, third));
    Client::connect(address).expect_service();
}

#[test]
fn no_warning_is_logged_at_exactly_the_connection_limit() {
    let (daemon, address) = Daemon::on_loopback(&["--max-connections", "1"]);
    for _ in 0..3 {
        let mut client = Client::connect(address);
        client.expect_service();
        // The next client has a place once the server has closed its end.
        client.half_close();
        assert!(client.is_at_end(), "the server does not close");
    }
    assert_eq!(daemon.stop(), "");
}

/// One poll reports the end of a connection and the next connection.
#[test]
fn a_client_takes_the_place_of_one_that_disconnects_in_the_same_iteration() {
    let (daemon, address) = Daemon::on_loopback(&["--max-connections", "1"]);
    let mut first = Client::connect(address);
    first.expect_service();
    let mut second = daemon.while_stopped(|| {
        drop(first);
        Client::connect(address)
    });
    second.expect_service();
    // The last command of a connection arrives together with its end.
    let mut third = daemon.while_stopped(|| {
        second.send("use c\r\n");
        drop(second);
        Client::connect(address)
    });
    third.expect_service();
    assert_eq!(daemon.stop(), "");
}

#[test]
fn accept_errors_of_one_connection_do_not_delay_the_next() {
    let fault = |error: &str| format!("accept4:error={error}:when=1..3");
    for error in ["EPERM", "ENONET", "EHOSTDOWN", "ENOPROTOOPT", "EOPNOTSUPP", "ECONNABORTED"] {
        let Some(mut daemon) = start_with_fault(&fault(error), &ON_LOOPBACK) else { return };
        Client::connect(daemon.address()).expect_service();
        let log = daemon.stop();
        assert!(!log.contains("cannot accept"), "{error}: {log}");
    }
    // If every call fails, the server backs off.
    let Some(mut daemon) = start_with_fault("accept4:error=EPERM", &ON_LOOPBACK) else { return };
    let _client = connect(daemon.address());
    daemon.wait_for_log("cannot accept connections: Operation not");
}

#[test]
fn health_is_served_while_clients_have_all_descriptors() {
    let flags = ["--metrics", "127.0.0.1:0"];
    let (mut daemon, address) = Daemon::with_limit("-n 32", &flags);
    let metrics = daemon.wait_for_value("serving metrics on ");
    let metrics: SocketAddr = metrics.parse().unwrap();
    let _clients = connect_all(address, 64);
    daemon.wait_for_log(AT_LIMIT);
    for _ in 0..10 {
        Client::connect(metrics).expect(HEALTH, "HTTP/1.1 200 OK");
    }
    // Silent clients cannot take all descriptors that are reserved for metrics.
    let _silent = connect_all(metrics, 4);
    Client::connect(metrics).expect(HEALTH, "HTTP/1.1 200 OK");
}

#[test]
fn the_backlog_has_room_for_1024_clients() {
    let largest = read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    if largest.trim().parse::<u32>().unwrap() < 1024 {
        return skip("this machine allows no backlog of 1024");
    }
    let (daemon, address) = Daemon::on_own_port(&[]);
    // A stopped server accepts no connection, and a connect needs a place in the backlog.
    let mut clients = daemon.while_stopped(|| connect_all(address, 1024));
    Client::over(clients.pop().unwrap()).expect_service();
}

#[test]
fn ten_thousand_clients_are_served() {
    const WANTED: u64 = 10_000;
    // The test opens as many files as the server, in addition to those of other tests.
    const OTHERS: u64 = 500;
    let limit = raise_open_files();
    let count = limit.saturating_sub(OTHERS).min(WANTED);
    if count < WANTED {
        skip(&format!("{} of {WANTED} clients: {limit} files may be open", WANTED - count));
    }
    let (_daemon, address) = Daemon::on_own_port(&[]);
    let mut clients = connect_all(address, usize::try_from(count).unwrap());
    let mut last = Client::over(clients.pop().unwrap());
    last.expect_service();
    assert_eq!(stat(address, "current-connections"), count + 1);
}
