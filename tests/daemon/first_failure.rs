//! What stops the first start: one line that names the cause and the remedy, and the exit code by which
//! the service manager starts the server again, or does not.

use crate::faults::{start_traced, start_with_fault};
use crate::harness::cannot_test;
use crate::harness::process::{BEANSTALKD, command, path_text, run, text};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::{File, create_dir, remove_file, set_permissions, write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

/// Runs the server at a free port.
fn run_at_port(flags: &[&str]) -> Output {
    run(&[&["-l", "127.0.0.1", "-p", "0"], flags].concat())
}

/// Asserts that the server, and `--check`, refuse a binlog for this reason.
#[track_caller]
fn assert_binlog_fails(directory: &Path, expected: i32, is_restarted: bool, cause: &str) {
    let flags = ["-b", path_text(directory)];
    assert_output(&run_at_port(&flags), expected, is_restarted, &[flags[1], cause]);
    let checked = run(&[&flags[..], &["--check"]].concat());
    assert_output(&checked, 1, true, &[flags[1], cause]);
}

/// Asserts that the only line of the log has all `parts`. Also asserts that the unit of systemd restarts
/// the server after this exit code, or that it does not.
#[track_caller]
pub(crate) fn assert_fails(
    code: Option<i32>,
    log: &str,
    expected: i32,
    is_restarted: bool,
    parts: &[&str],
) {
    assert_eq!(code, Some(expected), "{log}");
    // Flags of some tests log more, at level info.
    let lines: Vec<&str> = log.lines().filter(|line| !line.contains(" INFO ")).collect();
    let [line] = lines[..] else { panic!("not one line: {log}") };
    assert!(line.starts_with("beanstalkd: "), "{line}");
    for part in parts {
        assert!(line.contains(part), "no {part:?}: {line}");
    }
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/dist/systemd/beanstalkd.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    let mut lines = unit.lines();
    let codes = lines.find_map(|line| line.strip_prefix("RestartPreventExitStatus=")).unwrap();
    let stays_down = codes.split(' ').any(|code| code.parse() == Ok(expected));
    assert_eq!(stays_down, !is_restarted, "{expected} in {codes}");
}

#[track_caller]
fn assert_output(output: &Output, expected: i32, is_restarted: bool, parts: &[&str]) {
    assert_fails(output.status.code(), text(&output.stderr), expected, is_restarted, parts);
}

#[test]
fn a_port_that_is_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let cause = format!("cannot listen on {address}: Address already in use");
    let parts = [&cause, "; stop the program that listens there, or choose another port"];
    let (port, address) = (address.port().to_string(), address.to_string());
    assert_output(&run(&["-l", "127.0.0.1", "-p", &port]), 111, true, &parts);
    assert_output(&run_at_port(&["--metrics", &address]), 111, true, &parts);
}

#[test]
fn a_directory_that_is_missing_or_belongs_to_another_user() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("jobs");
    let flags = ["-l", "127.0.0.1", "-p", "0", "-b", path_text(&missing)];
    let parts = [path_text(&missing), "No such file or directory", "; create the directory"];
    assert_output(&run(&flags), 10, false, &parts);
    create_dir(&missing).unwrap();
    set_permissions(&missing, PermissionsExt::from_mode(0o500)).unwrap();
    // The permissions bind root only if it becomes another user.
    let as_user = ["--reuid", "65534", "--clear-groups", BEANSTALKD];
    let tried = command("setpriv", [&as_user[..], &["-v"]].concat()).output();
    let output = if tried.is_ok_and(|output| output.status.success()) {
        set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
        command("setpriv", [&as_user[..], &flags].concat()).output().unwrap()
    } else {
        run(&flags)
    };
    let parts = [
        path_text(&missing),
        "Permission denied",
        "; make the directory and its files belong to the user of the server",
    ];
    assert_output(&output, 10, false, &parts);
}

#[test]
fn a_disk_that_is_full() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-b", path_text(directory.path())];
    let parts = [path_text(directory.path()), "No space left", "; free space on its file system"];
    let Some(daemon) = start_with_fault("fallocate:error=ENOSPC", &flags) else { return };
    let (status, log) = daemon.wait();
    assert_fails(status.code(), &log, 1, true, &parts);
    // It may be so full that not even the lock file can be created.
    let lock = directory.path().join("lock");
    let options = ["-q", "-P", path_text(&lock), "-e", "inject=openat:error=ENOSPC"];
    let Some(daemon) = start_traced(&options, &flags) else { return };
    let (status, log) = daemon.wait();
    assert_fails(status.code(), &log, 1, true, &parts);
}

/// Reading it, or opening it, would not end.
#[test]
fn a_binlog_that_is_no_file_of_a_server() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("binlog.1");
    File::create(&file).unwrap().set_len(1 << 40).unwrap();
    let cause = "cannot read binlog.1: not a regular file of at most 4 GiB";
    assert_binlog_fails(directory.path(), 1, true, cause);
    let lock = directory.path().join("lock");
    remove_file(&lock).unwrap();
    mknodat(CWD, &lock, FileType::Fifo, Mode::RWXU, 0).unwrap();
    let output = run_at_port(&["-b", path_text(directory.path())]);
    assert_output(&output, 10, false, &["cannot lock the file lock"]);
}

/// No server takes a part of an export for the whole.
#[test]
fn a_directory_to_which_an_export_was_moving_files() {
    let directory = tempfile::tempdir().unwrap();
    create_dir(directory.path().join("binlog.moving")).unwrap();
    let cause = "an export ended before it had moved all files there; empty it and export again";
    assert_binlog_fails(directory.path(), 10, false, cause);
}

#[test]
fn a_binlog_of_a_newer_version() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("binlog.3");
    let cause = "cannot read binlog.3: it has version 8, and this server reads versions 5 and 7";
    // With records, and without one yet.
    for rest in [[1; 5000], [0; 5000]] {
        let bytes = [&8_i32.to_ne_bytes()[..], &rest].concat();
        write(&file, &bytes).unwrap();
        assert_binlog_fails(directory.path(), 10, false, cause);
        assert_eq!(std::fs::read(&file).unwrap(), bytes);
        assert_eq!(directory.path().read_dir().unwrap().count(), 2, "and the lock");
    }
    let remedy = "; start the newer server that wrote it, or move the files away";
    let output = run_at_port(&["-b", path_text(directory.path())]);
    assert_output(&output, 10, false, &[remedy]);
}

#[test]
fn a_port_that_needs_privileges() {
    let first = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start").unwrap();
    if first.trim().parse::<u16>().unwrap() <= 80 {
        return cannot_test("any user may bind any port here");
    }
    let flags = ["--reuid", "65534", "--clear-groups", BEANSTALKD, "-l", "127.0.0.1", "-p", "80"];
    let output = command("setpriv", flags).output().unwrap();
    if text(&output.stderr).starts_with("setpriv:") {
        return cannot_test("setpriv needs root, and a binary that all users can run");
    }
    let parts = ["127.0.0.1:80: Permission denied", "; start as root with -u, or give the server"];
    assert_output(&output, 111, true, &parts);
}
