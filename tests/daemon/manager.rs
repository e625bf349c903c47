//! Notifications of a service manager.

use crate::harness::client::Client;
use crate::harness::process::{BEANSTALKD, Daemon, ON_LOOPBACK, command, path_text, text};
use crate::harness::{PATIENCE, wait_until};
use crate::{PUT, binlog_with_one_job};
use rustix::process::Signal;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixSocketAddr, UnixDatagram};
use tempfile::TempDir;

struct Manager {
    socket: UnixDatagram,
    /// As `NOTIFY_SOCKET` has it.
    name: String,
    _directory: TempDir,
}

impl Manager {
    /// Binds a socket in a new directory, or with an abstract address.
    fn new(is_abstract: bool) -> Manager {
        let directory = tempfile::tempdir().unwrap();
        let path = path_text(&directory.path().join("notify")).to_owned();
        let (address, name) = match is_abstract {
            true => (UnixSocketAddr::from_abstract_name(&path), format!("@{path}")),
            false => (UnixSocketAddr::from_pathname(&path), path),
        };
        let socket = UnixDatagram::bind_addr(&address.unwrap()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Manager { socket, name, _directory: directory }
    }

    fn receive(&self) -> String {
        let mut buffer = [0; 512];
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(len) => return text(&buffer[..len]).to_owned(),
                // The test was stopped and continued.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("no message within {PATIENCE:?}: {error}"),
            }
        }
    }

    #[track_caller]
    fn expect(&self, message: &str) {
        assert_eq!(self.receive(), message);
    }

    /// Receives messages until one has a line that begins with `text`.
    fn wait_for(&self, text: &str) -> String {
        let mut message = String::new();
        wait_until(text, || {
            message = self.receive();
            message.lines().any(|line| line.starts_with(text))
        });
        message
    }
}

/// Starts a server whose manager is at `name`, and may have a watchdog with this period.
fn start(name: &str, flags: &[&str], watchdog_us: Option<&str>) -> (Daemon, SocketAddr) {
    let mut command = command(BEANSTALKD, [&ON_LOOPBACK, flags].concat());
    command.env("NOTIFY_SOCKET", name).envs(watchdog_us.map(|period| ("WATCHDOG_USEC", period)));
    Daemon::spawn(command).with_address()
}

const READY: &str = "READY=1\nSTATUS=0 jobs, 0 connections";

#[test]
fn the_service_manager_receives_the_status_of_the_server() {
    for is_abstract in [false, true] {
        let manager = Manager::new(is_abstract);
        let (daemon, address) = start(&manager.name, &[], None);
        manager.expect(READY);
        let mut client = Client::connect(address);
        client.expect(PUT, "INSERTED 1");
        daemon.signal(Signal::USR1);
        let status = "STATUS=1 job (1 ready), 1 connection, draining";
        assert_eq!(manager.wait_for(status), format!("READY=1\n{status}"));
        daemon.stop();
        manager.expect("STOPPING=1\nSTATUS=stopping");
    }
}

#[test]
fn the_server_extends_the_start_timeout_while_it_reads_the_binlog() {
    let manager = Manager::new(false);
    let binlog = binlog_with_one_job();
    let _daemon = start(&manager.name, &["-b", path_text(binlog.path())], None);
    manager.expect("EXTEND_TIMEOUT_USEC=120000000\nSTATUS=reading binlog.1");
    manager.expect("READY=1\nSTATUS=1 job (1 ready), 0 connections");
}

#[test]
fn the_loop_triggers_the_watchdog() {
    let manager = Manager::new(false);
    let _daemon = start(&manager.name, &[], Some("20000"));
    for _ in 0..5 {
        manager.wait_for("WATCHDOG=1");
    }
}

#[test]
fn a_service_manager_that_stops_reading_or_exits_delays_no_client() {
    let manager = Manager::new(false);
    let sender = UnixDatagram::unbound().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.send_to(b"in the way", &manager.name).is_ok() {}
    // Without a watchdog, no later message has what was lost.
    let (mut daemon, _) = start(&manager.name, &["-VV"], None);
    daemon.wait_for_log("cannot notify the service manager: its socket is full");
    manager.wait_for("READY=1");
    daemon.stop();
    while sender.send_to(b"in the way", &manager.name).is_ok() {}
    let (mut daemon, address) = start(&manager.name, &["-VV"], Some("2000"));
    daemon.wait_for_log("cannot notify the service manager: its socket is full");
    Client::connect(address).expect_service();
    // The message is sent as soon as there is room.
    manager.wait_for("READY=1");
    drop(manager);
    daemon.wait_for_log("dropping the message");
    Client::connect(address).expect_service();
    let log = daemon.stop();
    assert!(!log.contains("dropping the message"), "the message is logged twice: {log}");
}

#[test]
fn a_service_manager_with_an_unknown_kind_of_address_is_ignored() {
    let (mut daemon, address) = start("vsock:2:1234", &[], None);
    daemon.wait_for_log("cannot notify the service manager: NOTIFY_SOCKET=vsock:2:1234: ");
    Client::connect(address).expect_service();
}
