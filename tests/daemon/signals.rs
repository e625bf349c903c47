//! Signals, and the first process of a container.

use crate::harness::client::Client;
use crate::harness::process::{BEANSTALKD, Daemon, ON_LOOPBACK, command, path_text, script};
use crate::harness::{cannot_test, skip, wait_until};
use crate::{PUT, binlog_with_one_job, serve, stat};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::read_to_string;
use std::net::TcpListener;
use std::os::fd::OwnedFd;

#[test]
fn an_inherited_ignore_of_sigint_stays() {
    const SCRIPT: &str =
        r#"trap '' INT; exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0""#;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut command = script(SCRIPT, &[]);
    command.stdin(OwnedFd::from(listener));
    let daemon = Daemon::spawn(command);
    let mut client = Client::connect(address);
    client.expect_service();
    daemon.signal(Signal::INT);
    client.expect_service();
    daemon.stop();
}

#[test]
fn term_and_int_stop_with_success() {
    for signal in [Signal::TERM, Signal::INT] {
        let (daemon, mut client) = serve(&[]);
        client.expect_service();
        daemon.signal(signal);
        let (status, log) = daemon.wait();
        assert_eq!((status.code(), log.as_str()), (Some(0), ""));
    }
}

/// The signal is pending when the server starts, before it reads the first file.
#[test]
fn term_stops_the_server_while_it_reads_the_binlog() {
    let blocking = command("env", ["--block-signal=TERM", "true"]).output();
    if !blocking.is_ok_and(|output| output.status.success()) {
        return skip("env cannot block signals here");
    }
    let directory = binlog_with_one_job();
    let flags = ["-b", path_text(directory.path())];
    let kill_first = r#"kill -TERM $$; exec "$0" "$@""#;
    let mut command = command("env", ["--block-signal=TERM", "sh", "-c", kill_first, BEANSTALKD]);
    command.args(ON_LOOPBACK).args(flags);
    let (status, log) = Daemon::spawn(command).wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("stopped: Terminate") && !log.contains("binlog.1: read"), "{log}");
    serve(&flags).1.expect("reserve\r\n", "RESERVED 1 1");
}

#[test]
fn usr1_starts_draining_and_usr2_ends_it_and_hup_changes_nothing() {
    let (mut daemon, mut client) = serve(&["-V"]);
    client.expect(PUT, "INSERTED 1");
    daemon.signal(Signal::USR1);
    client.expect(PUT, "DRAINING");
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("SIGHUP: ");
    client.expect("reserve\r\n", "RESERVED 1 1");
    assert_eq!(client.ask("stats\r\n").field("draining"), Some("true"));
    daemon.signal(Signal::USR2);
    client.expect(PUT, "INSERTED 3");
    assert_eq!(client.ask("stats\r\n").field("draining"), Some("false"));
}

/// A server that is the first process of a process namespace.
struct Contained {
    /// unshare(1), which passes the exit code on.
    daemon: Daemon,
    /// The server, as the test sees it.
    server: u32,
}

/// Starts this command in a process namespace; returns `None` if there can be none.
fn start_contained(arguments: &[&str]) -> Option<Contained> {
    let in_namespace = |arguments: &[&str]| {
        command("unshare", [&["--fork", "--kill-child", "--pid"], arguments].concat())
    };
    if !in_namespace(&["true"]).output().is_ok_and(|output| output.status.success()) {
        cannot_test("no process namespace can be created here");
        return None;
    }
    let mut daemon = Daemon::spawn(in_namespace(&[arguments, &ON_LOOPBACK].concat()));
    assert_eq!(stat(daemon.address(), "pid"), 1);
    let [server] = children(daemon.id())[..] else { panic!("unshare has one child") };
    Some(Contained { daemon, server })
}

fn children(pid: u32) -> Vec<u32> {
    let children = read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    children.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

fn send_signal(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

#[test]
fn the_first_process_of_a_container_exits_as_if_killed() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 0)] {
        let Some(Contained { daemon, server }) = start_contained(&[BEANSTALKD]) else { return };
        send_signal(server, signal);
        assert_eq!(daemon.wait().0.code(), Some(code), "{signal:?}");
    }
}

#[test]
fn the_first_process_of_a_container_reaps_orphans() {
    // The first orphan exits before the server starts, the second when the test kills it.
    let script = r#"true & (sleep 1000 &); exec "$0" "$@""#;
    let contained = start_contained(&["sh", "-c", script, BEANSTALKD]);
    let Some(Contained { daemon: _daemon, server }) = contained else { return };
    wait_until("one child is left", || children(server).len() == 1);
    send_signal(children(server)[0], Signal::KILL);
    wait_until("no child is left", || children(server).is_empty());
}
