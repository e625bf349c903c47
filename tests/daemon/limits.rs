//! Limits of connections, descriptors and the backlog.

use crate::faults::start_with_fault;
use crate::first_failure::assert_fails;
use crate::harness::client::{Client, connect};
use crate::harness::process::{Daemon, path_text, script};
use crate::harness::{cannot_test, wait_until};
use crate::{HEALTH, stat};
use socket2::Socket;
use std::fs::read_to_string;
use std::net::SocketAddr;
use std::time::Instant;

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

/// With flags that take many descriptors.
#[test]
fn too_low_a_limit_of_open_files_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("metrics");
    let flags = ["-l", "127.0.0.1", "-p", "0", "-V", "-b", path_text(directory.path())];
    let metrics = format!("unix:{}", socket.display());
    let flags = [&flags[..], &["--body-cache", "0", "--metrics", &metrics]].concat();
    let mut served = 0;
    for limit in (8..80).step_by(3) {
        let start = format!(r#"ulimit -n {limit}; exec "$0" "$@""#);
        let mut daemon = Daemon::spawn(script(&start, &flags));
        let log = daemon.wait_for_log("limit of open files is");
        assert!(log.contains(&format!("limit of open files is {limit}")), "{log}");
        if log.contains("are needed") {
            let parts = ["; raise it with ulimit -n or LimitNOFILE="];
            assert_fails(daemon.wait().0.code(), &log, 1, true, &parts);
            assert_eq!(served, 0, "a lower limit is enough");
        } else {
            let mut client = Client::connect(daemon.address());
            let id = client.put("x");
            assert_eq!(client.ask("reserve\r\n").number("RESERVED"), Some(id));
            client.delete_all(&[id]);
            served += 1;
            daemon.stop();
        }
    }
    assert!((1..10).contains(&served), "{served} limits are enough");
}

#[test]
fn a_client_beyond_the_connection_limit_waits_for_another_to_disconnect() {
    let flags = ["-V", "--max-connections", "2", "--metrics", "127.0.0.1:0"];
    let (mut daemon, address) = Daemon::on_loopback(&flags);
    let metrics: SocketAddr = daemon.wait_for_value("serving metrics on ").parse().unwrap();
    let [mut first, mut second, mut third] = [(); 3].map(|()| Client::connect(address));
    first.expect_service();
    second.expect_service();
    daemon.wait_for_log("cannot accept connections: 2 are open");
    let mut reader = Client::connect(metrics);
    reader.send("GET /?format=text HTTP/1.1\r\nConnection: close\r\n\r\n");
    let page = String::from_utf8(reader.rest()).unwrap();
    assert!(page.contains("critical  server  all 2 connections are in use"), "{page}");
    third.send("use a\r\n");
    second.expect_service();
    third.socket().set_nonblocking(true).unwrap();
    let error = third.try_reply().expect_err("the connection is not accepted");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    third.socket().set_nonblocking(false).unwrap();
    drop(first);
    assert_eq!(third.line(), "USING a");
}

#[test]
fn clients_beyond_the_descriptors_are_served_as_others_disconnect() {
    const COMPLAINT: &str = "cannot accept connections";
    let start = Instant::now();
    let (mut daemon, address) = Daemon::with_limit("-n 64", &[]);
    Client::connect(address).expect_service();
    wait_until("the connection is closed", || stat(address, "current-connections") == 1);
    let files_before = daemon.open_files();
    let mut clients: Vec<Client> = (0..100).map(|_| Client::connect(address)).collect();
    clients.iter_mut().for_each(|client| client.send("use a\r\n"));
    daemon.wait_for_log(COMPLAINT);
    daemon.assert_rests();
    // Each makes room for one of those that wait.
    clients.into_iter().for_each(|mut client| assert_eq!(client.line(), "USING a"));
    wait_until("no descriptor is left", || daemon.open_files() <= files_before);
    let log = daemon.stop();
    // Once, and then no more than once a minute.
    let most = start.elapsed().as_secs() / 60;
    assert!(log.matches(COMPLAINT).count() as u64 <= most, "more than one warning a minute: {log}");
}

/// A server with room for one client warns of none that comes after another.
#[test]
fn a_client_takes_the_place_of_one_that_disconnects() {
    let (daemon, address) = Daemon::on_loopback(&["--max-connections", "1"]);
    for _ in 0..3 {
        let mut client = Client::connect(address);
        client.expect_service();
        // The next client has a place once the server has closed its end.
        client.half_close();
        assert!(client.is_at_end(), "the server does not close");
    }
    assert_eq!(daemon.stop(), "");
    // One poll reports the end of a connection and the next connection; the last command of a
    // connection may arrive together with its end. If the server is stopped for long it may warn.
    let (daemon, address) = Daemon::on_loopback(&["--max-connections", "1"]);
    let mut before = Client::connect(address);
    before.expect_service();
    for last_command in ["", "use c\r\n"] {
        let mut next = daemon.while_stopped(|| {
            before.send(last_command);
            drop(before);
            Client::connect(address)
        });
        next.expect_service();
        before = next;
    }
}

#[test]
fn accept_errors_of_one_connection_do_not_delay_the_next() {
    let fault = |error: &str| format!("accept4:error={error}:when=1..3");
    for error in ["EPERM", "ENONET", "EHOSTDOWN", "ENOPROTOOPT", "EOPNOTSUPP", "ECONNABORTED"] {
        let Some(mut daemon) = start_with_fault(&fault(error), &[]) else { return };
        Client::connect(daemon.address()).expect_service();
        let log = daemon.stop();
        assert!(!log.contains("cannot accept"), "{error}: {log}");
    }
    // Nor do any number of them, if calls succeed in between.
    let Some(mut daemon) = start_with_fault("accept4:error=EPERM:when=1+2", &[]) else { return };
    let address = daemon.address();
    (0..260).for_each(|_| Client::connect(address).expect_service());
    let log = daemon.stop();
    assert!(!log.contains("cannot accept"), "{log}");
    // If every call fails, the server backs off.
    let Some(mut daemon) = start_with_fault("accept4:error=EPERM", &[]) else { return };
    let _client = connect(daemon.address());
    daemon.wait_for_log("cannot accept connections: Operation not");
}

#[test]
fn health_is_served_while_clients_have_all_descriptors() {
    let (mut daemon, address) = Daemon::with_limit("-n 32", &["--metrics", "127.0.0.1:0"]);
    let metrics: SocketAddr = daemon.wait_for_value("serving metrics on ").parse().unwrap();
    let _clients = connect_all(address, 64);
    daemon.wait_for_log("cannot accept connections");
    for _ in 0..10 {
        Client::connect(metrics).expect(HEALTH, "HTTP/1.1 200 OK");
    }
    let mut reader = Client::connect(metrics);
    reader.send("GET /?format=text HTTP/1.1\r\nConnection: close\r\n\r\n");
    let page = String::from_utf8(reader.rest()).unwrap();
    assert!(page.contains("connections are in use: new clients wait"), "{page}");
    // Silent clients cannot take all descriptors that are reserved for metrics.
    let _silent = connect_all(metrics, 4);
    Client::connect(metrics).expect(HEALTH, "HTTP/1.1 200 OK");
}

#[test]
fn the_backlog_has_room_for_1024_clients() {
    let largest = read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    if largest.trim().parse::<u32>().unwrap() < 1024 {
        return cannot_test("this machine allows no backlog of 1024");
    }
    let (daemon, address) = Daemon::on_own_port(&[]);
    // A stopped server accepts no connection, and a connect needs a place in the backlog.
    let mut clients = daemon.while_stopped(|| connect_all(address, 1024));
    Client::over(clients.pop().unwrap()).expect_service();
}
