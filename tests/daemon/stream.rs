//! The stream of bytes: urgent data, HTTP, and bodies of many writes.

use crate::harness::wait_until;
use crate::{PUT, serve, stat};
use rustix::net::SendFlags;

#[test]
fn urgent_data_is_ignored() {
    let (_daemon, mut client) = serve(&[]);
    for _ in 0..50 {
        for (bytes, flags) in [
            (&b"use a\r\nuse b\r"[..], SendFlags::empty()),
            (b"!", SendFlags::OOB),
            (b"\nuse c\r\n", SendFlags::empty()),
        ] {
            assert_eq!(rustix::net::send(client.socket(), bytes, flags).unwrap(), bytes.len());
        }
        assert_eq!([(); 3].map(|()| client.line()), ["USING a", "USING b", "USING c"]);
    }
}

#[test]
fn no_command_after_an_http_request_is_run() {
    let (_daemon, mut client) = serve(&[]);
    let address = client.socket().peer_addr().unwrap().as_socket().unwrap();
    // The server closes while much of this is under way.
    let _ = client.try_send(["POST / HTTP/1.1\r\n", &PUT.repeat(10_000)].concat());
    assert_eq!(client.line(), "UNKNOWN_COMMAND");
    assert_eq!(stat(address, "total-jobs"), 0);
    wait_until("the connection is closed", || stat(address, "current-connections") == 1);
}

/// The bodies take more than one write, the kernel has room, and the client sends nothing meanwhile.
#[test]
fn twenty_large_bodies_at_once_all_arrive() {
    const COUNT: usize = 20;
    let (_daemon, mut client) = serve(&[]);
    let body = vec![b'x'; 5_000];
    assert_eq!(client.put(&body), 1);
    client.send("peek 1\r\n".repeat(COUNT));
    for _ in 0..COUNT {
        let reply = client.reply();
        assert!(reply.line == "FOUND 1 5000" && reply.body == body, "{}", reply.line);
    }
}

#[test]
fn a_large_body_arrives_unchanged_though_its_job_is_deleted() {
    const LEN: usize = 20_000_000;
    let (_daemon, mut client) = serve(&["-z", "1073741824"]);
    let body: Vec<u8> = (0..=250).cycle().take(LEN).collect();
    assert_eq!(client.put(&body), 1);
    client.send("reserve\r\ndelete 1\r\n");
    let reply = client.reply();
    assert_eq!(reply.line, format!("RESERVED 1 {LEN}"));
    assert!(reply.body == body);
    assert_eq!(client.line(), "DELETED");
}

/// The first write of replies is answered with a reset, and the next one fails. The commands that have arrived
/// before are complete.
#[test]
fn all_puts_of_a_client_that_has_closed_count() {
    const COUNT: usize = 2_000;
    let (daemon, mut client) = serve(&[]);
    client.expect("use a\r\n", "USING a");
    let address = client.socket().peer_addr().unwrap().as_socket().unwrap();
    daemon.while_stopped(|| {
        client.send(PUT.repeat(COUNT));
        drop(client);
    });
    wait_until("the connection is closed", || stat(address, "current-connections") == 1);
    assert_eq!(stat(address, "total-jobs"), COUNT as u64);
}
