//! Addresses and Unix sockets.

use crate::harness::client::{Client, try_connect};
use crate::harness::process::{BEANSTALKD, Daemon, ON_LOOPBACK, path_text, script};
use crate::harness::{PATIENCE, cannot_test};
use crate::{HEALTH, UnixPath, assert_refused};
use socket2::{Domain, Socket, Type};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::time::Instant;

#[test]
fn the_default_serves_ipv4_and_ipv6() {
    let mut daemon = Daemon::start(BEANSTALKD, &["-V", "-p", "0"]);
    let address = daemon.address();
    Client::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, address.port()))).expect_service();
    match try_connect(SocketAddr::from((Ipv6Addr::LOCALHOST, address.port()))) {
        Ok(socket) => Client::over(socket).expect_service(),
        Err(error) => {
            assert!(address.is_ipv4(), "IPv6 is bound but refuses: {error}");
            cannot_test("this machine has no IPv6");
        }
    }
}

#[test]
fn the_server_listens_on_addresses_and_names() {
    for name in ["127.0.0.1", "localhost"] {
        let mut daemon = Daemon::start(BEANSTALKD, &["-V", "-p", "0", "-l", name]);
        Client::connect(daemon.address()).expect_service();
    }
}

#[test]
fn a_unix_socket_ignores_the_name_of_a_service() {
    let socket = UnixPath::new();
    let flags = ["-V", "-l", &socket.flag, "-p", "no-such-service"];
    let mut daemon = Daemon::start(BEANSTALKD, &flags);
    daemon.wait_for_log("listening on unix:");
    socket.connect().expect_service();
}

#[test]
fn the_server_replaces_a_stale_unix_socket_and_no_other_file() {
    let socket = UnixPath::new();
    drop(UnixListener::bind(&socket.path).unwrap());
    assert!(socket.path.exists(), "the listener has not left its socket");
    let mut daemon = Daemon::start(BEANSTALKD, &["-V", "-l", &socket.flag]);
    daemon.wait_for_log(&socket.flag);
    socket.connect().expect_service();

    let file = socket.directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    assert_refused(&["-l", &format!("unix:{}", file.display())], 111, "is no socket");
    let link = socket.directory.path().join("link");
    std::os::unix::fs::symlink(socket.directory.path().join("nothing"), &link).unwrap();
    assert_refused(&["-l", &format!("unix:{}", link.display())], 111, "it links to nothing");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

#[test]
fn a_unix_socket_is_not_taken_from_a_running_server() {
    let [queue, metrics] = [UnixPath::new(), UnixPath::new()];
    let flags = ["-V", "-l", &queue.flag, "--metrics", &metrics.flag];
    let mut daemon = Daemon::start(BEANSTALKD, &flags);
    daemon.wait_for_log(&metrics.flag);
    let with_metrics = [&ON_LOOPBACK[..], &["--metrics", &metrics.flag]].concat();
    for flags in [&["-l", &*queue.flag][..], &with_metrics] {
        let socket = flags[flags.len() - 1];
        let message = format!("cannot listen on {socket}: another server listens there");
        assert_refused(flags, 111, &message);
    }
    queue.connect().expect_service();
    metrics.connect().expect(HEALTH, "HTTP/1.1 200 OK");
}

#[test]
fn a_server_with_a_full_backlog_keeps_its_unix_socket() {
    let socket = UnixPath::new();
    let address = socket.address();
    let new_socket = || Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let listener = new_socket();
    listener.bind(&address).unwrap();
    listener.listen(1).unwrap();
    let mut clients = Vec::new();
    let full = loop {
        let client = new_socket();
        client.set_nonblocking(true).unwrap();
        match client.connect(&address) {
            Ok(()) => clients.push(client),
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), ErrorKind::WouldBlock);
    let inode = socket.path.metadata().unwrap().ino();
    assert_refused(&["-l", &socket.flag], 111, "");
    assert_eq!(socket.path.metadata().unwrap().ino(), inode);
}

#[test]
fn a_server_that_cannot_lock_the_binlog_replaces_no_socket() {
    let socket = UnixPath::new();
    let binlog = path_text(socket.directory.path());
    let (_daemon, address) = Daemon::on_loopback(&["-b", binlog]);
    Client::connect(address).expect_service();
    drop(UnixListener::bind(&socket.path).unwrap());
    // A second name keeps the inode number from being reused.
    std::fs::hard_link(&socket.path, socket.directory.path().join("backup")).unwrap();
    let inode = socket.path.metadata().unwrap().ino();
    let with_metrics = [&ON_LOOPBACK[..], &["--metrics", &socket.flag]].concat();
    for flags in [&["-l", &*socket.flag][..], &with_metrics] {
        let message =
            "another process keeps its binlog there; stop it, or choose another directory";
        assert_refused(&[flags, &["-b", binlog]].concat(), 10, message);
        assert_eq!(socket.path.metadata().unwrap().ino(), inode, "{flags:?}");
    }
}

/// Starts the server on a Unix socket, under a umask that removes no permission.
pub(crate) fn start_on_path(socket: &UnixPath, flags: &[&str]) -> Daemon {
    let mut daemon = spawn_on_path(socket, flags);
    daemon.wait_for_log("listening on unix:");
    daemon
}

fn spawn_on_path(socket: &UnixPath, flags: &[&str]) -> Daemon {
    let flags = [&["-V", "-l", &socket.flag], flags].concat();
    Daemon::spawn(script(r#"umask 000; exec "$0" "$@""#, &flags))
}

#[test]
fn a_unix_socket_has_its_mode_from_its_first_moment_on() {
    let socket = UnixPath::new();
    for mode in [0o600, 0o660, 0o777, 0o000].repeat(5) {
        let mut daemon = spawn_on_path(&socket, &["--socket-mode", &format!("{mode:o}")]);
        let start = Instant::now();
        let first_seen = loop {
            assert!(start.elapsed() < PATIENCE, "there is no socket");
            if let Ok(socket) = socket.path.symlink_metadata() {
                break socket.mode() & 0o7777;
            }
        };
        assert_eq!(first_seen, mode, "{first_seen:o} is not {mode:o}");
        daemon.wait_for_log("listening on unix:");
        assert_eq!(socket.path.metadata().unwrap().mode() & 0o7777, mode);
        assert_eq!(daemon.status("Umask:"), "0000", "the umask has changed");
        drop(daemon);
        std::fs::remove_file(&socket.path).unwrap();
    }
}

#[test]
fn a_new_unix_socket_does_not_inherit_the_mode_of_a_stale_one() {
    let socket = UnixPath::new();
    for (flag, mode) in [("600", 0o600), ("0660", 0o660), ("", 0o777), ("200", 0o200)] {
        let flags: &[&str] = if flag.is_empty() { &[] } else { &["--socket-mode", flag] };
        let _daemon = start_on_path(&socket, flags);
        assert_eq!(socket.path.metadata().unwrap().mode() & 0o7777, mode, "{flags:?}");
    }
}
