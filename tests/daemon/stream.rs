//! The stream of bytes: large bodies, pipelines, urgent data, HTTP and resets.

use crate::harness::client::{Client, connect};
use crate::harness::process::Daemon;
use crate::harness::request::put;
use crate::harness::wait_until;
use crate::{PUT, stat};
use rustix::net::SendFlags;
use std::io::Write;
use std::net::Shutdown;

/// The bodies take more than one write, and the client sends nothing meanwhile.
#[test]
fn twenty_large_bodies_at_once_all_arrive() {
    const COUNT: usize = 20;
    let (_daemon, address) = Daemon::on_loopback(&[]);
    let mut client = Client::connect(address);
    let body = vec![b'x'; 5_000];
    assert_eq!(client.put(&body), 1);
    client.send("peek 1\r\n".repeat(COUNT));
    for _ in 0..COUNT {
        let reply = client.reply();
        assert!(reply.line == "FOUND 1 5000" && reply.body == body, "{}", reply.line);
    }
}

#[test]
fn a_client_may_reset_the_connection_anywhere_in_a_put() {
    let (_daemon, address) = Daemon::on_loopback(&[]);
    let put = put(0, 0, 9, "x".repeat(60_000));
    for sent in [0, 17, 18, 5_000, 60_000, put.len() - 1] {
        for _ in 0..20 {
            let mut client = Client::connect(address);
            assert!(client.ask(&put).number("INSERTED").is_some());
            client.send(&put[..sent]);
            client.reset();
        }
    }
    assert_eq!(stat(address, "current-jobs-ready"), 120);
    wait_until("all connections are closed", || stat(address, "current-connections") == 1);
}

#[test]
fn urgent_data_is_ignored() {
    let (_daemon, address) = Daemon::on_loopback(&[]);
    let mut client = Client::connect(address);
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
    let (_daemon, address) = Daemon::on_loopback(&[]);
    let mut client = Client::connect(address);
    // The server closes while much of this is under way.
    let _ =
        client.try_send([&b"POST / HTTP/1.1\r\n"[..], &PUT.repeat(10_000).into_bytes()].concat());
    assert_eq!(client.line(), "UNKNOWN_COMMAND");
    assert_eq!(stat(address, "total-jobs"), 0);
    wait_until("the connection is closed", || stat(address, "current-connections") == 1);
}

#[test]
fn a_large_body_arrives_unchanged_though_its_job_is_deleted() {
    const LEN: usize = 100_000_000;
    let (_daemon, address) = Daemon::on_loopback(&["-z", "1073741824"]);
    let body: Vec<u8> = (0..=250).cycle().take(LEN).collect();
    let mut client = Client::connect(address);
    assert_eq!(client.put(&body), 1);
    client.send("reserve\r\ndelete 1\r\n");
    let reply = client.reply();
    assert_eq!(reply.line, format!("RESERVED 1 {LEN}"));
    assert!(reply.body == body);
    assert_eq!(client.line(), "DELETED");
}

#[test]
fn a_pipeline_of_200000_commands_has_all_replies() {
    const COUNT: usize = 100_000;
    let (_daemon, address) = Daemon::on_loopback(&[]);
    let socket = connect(address);
    let mut writer = socket.try_clone().unwrap();
    let mut client = Client::over(socket);
    let sender = std::thread::spawn(move || {
        writer.write_all(&b"put 0 0 9 3\r\nabc\r\n".repeat(COUNT)).unwrap();
        writer.write_all(&b"reserve-with-timeout 0\r\n".repeat(COUNT)).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    for id in 1..=COUNT {
        assert_eq!(client.line(), format!("INSERTED {id}"));
    }
    for id in 1..=COUNT {
        let reply = client.reply();
        assert_eq!((reply.line, &*reply.body), (format!("RESERVED {id} 3"), &b"abc"[..]));
    }
    assert!(client.is_at_end(), "the server does not close");
    sender.join().unwrap();
}

#[test]
fn a_client_that_resets_while_waiting_leaves_no_waiter() {
    let (_daemon, address) = Daemon::on_loopback(&[]);
    let mut waiting = Client::connect(address);
    waiting.send("reserve\r\n");
    wait_until("the client waits", || stat(address, "current-waiting") == 1);
    waiting.reset();
    wait_until("no client waits", || stat(address, "current-waiting") == 0);
    let mut client = Client::connect(address);
    client.expect(PUT, "INSERTED 1");
    client.expect("reserve-with-timeout 0\r\n", "RESERVED 1 1");
}
