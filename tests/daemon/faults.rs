//! System calls that fail.

use crate::harness::client::Client;
use crate::harness::process::{BEANSTALKD, Daemon, ON_LOOPBACK, command, path_text};
use crate::harness::request::put;
use crate::harness::{skip, wait_until};
use crate::{binlog_with_one_job, serve};

/// Starts a server in which a system call fails, as strace(1) describes faults. Returns `None` if
/// strace cannot trace here.
pub(crate) fn start_with_fault(fault: &str, flags: &[&str]) -> Option<Daemon> {
    start_traced(&["-e", &format!("inject={fault}")], flags)
}

/// Starts a server with these options of strace. `None` if strace cannot be used.
pub(crate) fn start_traced(options: &[&str], flags: &[&str]) -> Option<Daemon> {
    // With -D the server, not strace, is the child of this process.
    let traced = |arguments: &[&str]| {
        command("strace", [&["-D", "-o", "/dev/null"], options, arguments].concat())
    };
    if !traced(&["true"]).output().is_ok_and(|output| output.status.success()) {
        skip("strace is not installed, or may not trace here");
        return None;
    }
    Some(Daemon::spawn(traced(&[&[BEANSTALKD], &ON_LOOPBACK[..], flags].concat())))
}

/// The kernel reports the error once: a server that is started again would not see it.
#[test]
fn a_failed_sync_during_the_start_ends_the_server() {
    let directory = binlog_with_one_job();
    let flags = ["-b", path_text(directory.path())];
    let files = || std::fs::read_dir(directory.path()).unwrap().count();
    let files_before = files();
    for (fault, code, message) in [
        ("fdatasync:error=EIO:when=1", 74, "cannot sync binlog.1: Input/output error"),
        ("fsync:error=EIO:when=1", 74, "cannot sync the directory: Input/output error"),
        ("fallocate:error=EIO", 74, "cannot create a file: Input/output error"),
        ("fallocate:error=EPERM", 1, "cannot create a file: Operation not permitted"),
    ] {
        let Some(daemon) = start_with_fault(fault, &flags) else { return };
        let (status, log) = daemon.wait();
        assert_eq!(status.code(), Some(code), "{fault}: {log}");
        assert!(log.contains(message) && !log.contains("recovered"), "{fault}: {log}");
    }
    assert!(files() >= files_before);
    serve(&flags).1.expect("reserve\r\n", "RESERVED 1 1");
}

#[test]
fn a_file_system_without_sync_of_directories_is_used_with_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-f", "0", "-s", "4096", "-b", path_text(directory.path())];
    let Some(mut daemon) = start_with_fault("fsync:error=EINVAL", &flags) else { return };
    let address = daemon.address();
    daemon.wait_for_log("this file system cannot sync a directory: Invalid argument");
    let mut client = Client::connect(address);
    for id in 1..=10 {
        client.expect(put(0, 0, 9, "x".repeat(3000)), &format!("INSERTED {id}"));
    }
    let log = daemon.stop();
    assert!(!log.contains("cannot sync a directory"), "the warning is logged twice: {log}");
}

/// A slow disk must not keep clients waiting who asked for no sync before the reply.
#[test]
fn a_thread_syncs_what_no_reply_waits_for() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let options = ["-f", "-e", "trace=fdatasync", "-o", path_text(&trace)];
    let flags = ["-f", "1", "-b", path_text(directory.path())];
    let Some(mut daemon) = start_traced(&options, &flags) else { return };
    let mut client = Client::connect(daemon.address());
    let syncs = |of_loop: bool| {
        let text = std::fs::read_to_string(&trace).unwrap();
        let pids = text.lines().filter_map(|line| line.split_once(' '));
        pids.filter(|(pid, _)| (*pid == daemon.id().to_string()) == of_loop).count()
    };
    client.expect("list-tube-used\r\n", "USING default");
    let at_start = syncs(true);
    client.expect(put(0, 0, 9, "x"), "INSERTED 1");
    wait_until("the record is synced", || syncs(false) > 0);
    assert_eq!(syncs(true), at_start, "the loop has waited for the disk");
}

/// Otherwise another worker gets the job early, and both have it.
#[test]
fn a_ttr_begins_after_a_slow_sync() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-f", "0", "-b", path_text(directory.path())];
    let fault = "fdatasync:delay_exit=2000000";
    let Some(mut daemon) = start_with_fault(fault, &flags) else { return };
    let address = daemon.address();
    let [mut worker, mut producer] = [Client::connect(address), Client::connect(address)];
    worker.send("reserve\r\n");
    wait_until("the worker waits", || producer.stat("current-waiting") == 1);
    producer.expect(put(0, 0, 100, "x"), "INSERTED 1");
    let stats = producer.ask("stats-job 1\r\n");
    let value = |key| stats.value(key).unwrap();
    // The job was put before the sync, and its TTR has begun after it.
    assert!(100 - value("time-left") < value("age"), "{stats:?}");
}

#[test]
fn without_a_thread_the_loop_syncs() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-b", path_text(directory.path())];
    let Some(mut daemon) = start_with_fault("clone,clone3:error=EAGAIN", &flags) else { return };
    let mut client = Client::connect(daemon.address());
    client.expect(put(0, 0, 9, "x"), "INSERTED 1");
    daemon.wait_for_log("cannot start a thread: Resource temporarily unavailable");
}

/// A file that could not be created in full is removed, so that it can be created once there is space.
#[test]
fn a_disk_that_is_full_for_a_while_refuses_puts_for_a_while() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-s", "4096", "-b", path_text(directory.path())];
    let fault = "fallocate:error=ENOSPC:when=6..9";
    let Some(mut daemon) = start_with_fault(fault, &flags) else { return };
    let mut client = Client::connect(daemon.address());
    let mut replies = (0..40).map(|_| client.ask(put(0, 0, 9, "x".repeat(1000))).line);
    assert!(replies.any(|reply| reply == "OUT_OF_MEMORY"), "the disk is never full");
    assert!(replies.any(|reply| reply.starts_with("INSERTED")), "the disk stays full");
    daemon.stop();
}

#[test]
fn where_no_space_can_be_allocated_zeros_are_written() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-s", "20480", "-b", path_text(directory.path())];
    let Some(mut daemon) = start_with_fault("fallocate:error=EOPNOTSUPP", &flags) else { return };
    Client::connect(daemon.address()).expect_service();
    let file = directory.path().join("binlog.1");
    assert_eq!(file.metadata().unwrap().len(), 20_480);
    daemon.stop();
}
