//! Sockets inherited from a service manager.

use crate::harness::client::{Client, connect};
use crate::harness::process::{BEANSTALKD, Daemon, ON_LOOPBACK, command, script};
use crate::{UnixPath, serve};
use socket2::Socket;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};

#[test]
fn inherited_sockets_are_used_instead_of_flags() {
    const WARNING: &str = "-l, -p and --socket-mode have no effect";
    let (mut daemon, mut client) = serve(&["-l", "192.0.2.1", "-p", "1"]);
    daemon.wait_for_log(WARNING);
    client.expect_service();
    let socket = UnixPath::new();
    let listener = UnixListener::bind(&socket.path).unwrap();
    let mode = socket.path.metadata().unwrap().mode();
    let flags = ["-l", "unix:/no/such/directory/socket", "--socket-mode", "000"];
    let mut daemon = Daemon::with_inherited(&flags, listener);
    daemon.wait_for_log(WARNING);
    socket.connect().expect_service();
    assert_eq!(socket.path.metadata().unwrap().mode(), mode);
}

#[test]
fn flags_with_the_address_of_an_inherited_socket_cause_no_warning() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let daemon =
        Daemon::with_inherited(&["-l", "127.0.0.1", "-p", &address.port().to_string()], listener);
    Client::connect(address).expect_service();
    assert_eq!(daemon.stop(), "");
    // Of all addresses.
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let daemon = Daemon::with_inherited(&["-p", &port.to_string()], listener);
    Client::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).expect_service();
    assert_eq!(daemon.stop(), "");
    let socket = UnixPath::new();
    let daemon = Daemon::with_inherited(
        &["-l", &socket.flag, "-p", "1"],
        UnixListener::bind(&socket.path).unwrap(),
    );
    socket.connect().expect_service();
    assert_eq!(daemon.stop(), "");
}

/// Starts a server with two sockets on loopback; returns it and their addresses.
fn start_with_two_sockets(flags: &[&str]) -> (Daemon, [SocketAddr; 2]) {
    const SCRIPT: &str =
        r#"exec 3<&0 4<&1 </dev/null >/dev/null; LISTEN_PID=$$ LISTEN_FDS=2 exec "$0" "$@""#;
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let addresses = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
    let [first, second] = listeners.map(OwnedFd::from);
    let mut command = script(SCRIPT, flags);
    command.stdin(first).stdout(second);
    (Daemon::spawn_with_stdout(&mut command), addresses)
}

#[test]
fn all_inherited_sockets_are_served_and_none_starves_another_at_the_connection_limit() {
    let (mut daemon, [crowded, calm]) = start_with_two_sockets(&["--max-connections", "1"]);
    let mut inside = Client::connect(crowded);
    inside.expect_service();
    let mut crowd: Vec<Socket> = (0..3).map(|_| connect(crowded)).collect();
    daemon.wait_for_log("cannot accept connections");
    let mut pending = Client::connect(calm);
    drop(inside);
    pending.expect_service();
    drop(pending);
    Client::over(crowd.remove(0)).expect_service();
}

#[test]
fn inherited_descriptors_that_cannot_be_used_are_refused() {
    let (stream, _peer) = UnixStream::pair().unwrap();
    let datagram = UdpSocket::bind("127.0.0.1:0").unwrap();
    for socket in [OwnedFd::from(datagram), OwnedFd::from(stream)] {
        let (status, log) = Daemon::with_inherited(&[], socket).wait();
        assert_eq!(status.code(), Some(111));
        assert!(log.contains("inherited descriptor 3"), "{log}");
    }
    let with_count = |count: &str| {
        let set_count = format!(r#"LISTEN_PID=$$ LISTEN_FDS="{count}" exec "$0" "$@""#);
        Daemon::spawn(script(&set_count, &ON_LOOPBACK))
    };
    let refused = |count: &str, message: &str| {
        let (status, log) = with_count(count).wait();
        assert_eq!(status.code(), Some(111), "{count}: {log}");
        assert!(log.contains(message), "{log}");
    };
    for count in ["", "one", "-1", "1 ", "0x1", "4294967296", "99999999999999999999"] {
        refused(count, &format!("LISTEN_FDS={count}: not a number"));
    }
    refused("2147483647", "inherited descriptor 3: it is not open");
    // A count of zero is valid, and so are sockets for another process.
    with_count("0").address();
    let mut command = command(BEANSTALKD, ON_LOOPBACK);
    command.env("LISTEN_PID", "1").env("LISTEN_FDS", "1");
    Daemon::spawn(command).address();
}
