//! Flags, exit codes and the log.

use crate::harness::client::Client;
use crate::harness::process::{BEANSTALKD, Daemon, ON_LOOPBACK, command, run, text};
use crate::{assert_refused, serve};

#[test]
fn version_and_help_are_printed_to_standard_output() {
    for flag in ["-v", "--version"] {
        let output = run(&[flag]);
        assert_eq!(text(&output.stdout), "beanstalkd 1.13 (beanstalkd-server 0.1.0)\n");
        assert_eq!(output.status.code(), Some(0));
    }
    for flag in ["-h", "--help"] {
        let output = run(&[flag]);
        let help = text(&output.stdout);
        assert!(help.starts_with("Use: beanstalkd") && help.contains("--max-job-size BYTES"));
        assert_eq!(help.contains("--lease-ttl"), cfg!(feature = "etcd"), "{help}");
        assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    }
}

#[test]
fn a_wrong_command_line_is_rejected_in_two_lines() {
    for (arguments, why) in [
        (&["-z", "10X"][..], "-z 10X: not a size, such as 65535, 64K or 1M"),
        (&["--max-memory", "1GB"], "--max-memory 1GB: not a size, such as 65535, 64K or 1M"),
        (&["-X"], "unknown flag: -X"),
        (&["-p"], "flag requires an argument: -p"),
        (&["-p", "70000"], "-p 70000: not a number in range"),
        (&["--socket-mode", "8"], "--socket-mode 8: not an octal number from 0 to 777"),
        (&["what"], "unknown argument: what"),
        (
            &["--leave", "."],
            "--leave .: the URL of etcd with -b is missing, to end the lease in this file",
        ),
    ] {
        let log = assert_refused(arguments, 5, why);
        assert_eq!(log, format!("beanstalkd: {why}\nTry 'beanstalkd --help'.\n"));
    }
}

#[test]
fn old_flags_are_accepted_with_a_warning() {
    let (daemon, mut client) = serve(&["-c", "-n", "-z", "2000000000"]);
    client.expect_service();
    let log = daemon.stop();
    for warning in ["-c has no effect", "-n has no effect", "-z 2000000000"] {
        assert!(log.contains(warning), "{log}");
    }
}

#[test]
fn the_log_names_what_cannot_be_bound_or_found() {
    for (flags, code, text) in [
        (&["-l", "192.0.2.1", "-p", "0"][..], 111, "192.0.2.1"),
        (&["-l", "no such host", "-p", "0"], 111, "no such host"),
        (&["-l", "127.0.0.1", "-p", "nothing"], 111, "the service nothing: /etc/services"),
        (&["-l", "unix:/no/such/directory/socket"], 111, "/no/such/directory"),
        (&["-l", "127.0.0.1", "-p", "0", "-u", "nosuchuser"], 33, "nosuchuser"),
    ] {
        assert_refused(flags, code, text);
    }
    // The log can be one object a line.
    let flags = ["-V", "--log-format", "json", "-l", "192.0.2.1", "-p", "0"];
    let log = assert_refused(&flags, 111, "INFO");
    let lines = log.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<serde_json::Value> = lines.collect();
    for line in &lines {
        let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["level", "message", "time"]);
        let time = line["time"].as_str().unwrap();
        assert_eq!(time.replace(|it: char| it.is_ascii_digit(), "0"), "0000-00-00T00:00:00.000Z");
    }
    let last = lines.last().unwrap();
    assert_eq!(last["level"], "ERROR");
    assert!(last["message"].as_str().unwrap().contains("cannot listen on 192.0.2.1"), "{last}");
}

#[test]
fn verbosity_comes_from_flags_and_environment() {
    let (mut daemon, mut client) = serve(&["-VV"]);
    let line = daemon.wait_for_log("listening on ");
    assert!(line.contains(" INFO ") && line.contains('T') && line.contains('Z'), "{line}");
    client.expect_service();
    daemon.wait_for_log("DEBUG connection 1 opened");
    let mut command = command(BEANSTALKD, &ON_LOOPBACK[1..]);
    command.env("RUST_LOG", "info");
    let line = Daemon::spawn(command).wait_for_log("listening on ");
    assert!(line.contains(" INFO "), "{line}");
}

#[test]
fn requests_are_logged_at_trace_only() {
    let lines_for = |verbosity: &str, requests: usize| {
        let (daemon, address) = Daemon::on_loopback(&[verbosity]);
        let mut client = Client::connect(address);
        (0..requests).for_each(|_| client.expect_service());
        drop(client);
        daemon.stop().lines().filter(|line| !line.contains("connection 1 closed")).count()
    };
    assert_eq!(lines_for("-VV", 1), lines_for("-VV", 100));
    assert_eq!(lines_for("-VVV", 1) + 99, lines_for("-VVV", 100));
}
