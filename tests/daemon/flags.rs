//! Flags, exit codes and the log.

use crate::harness::client::Client;
use crate::harness::process::{BEANSTALKD, Daemon, command, run, text};
use crate::refusal;
use std::net::TcpListener;

#[test]
fn version_and_help_use_the_streams_of_c_beanstalkd() {
    for flag in ["-v", "--version"] {
        let output = run(&[flag]);
        assert_eq!(text(&output.stdout), "beanstalkd 1.13 (beanstalkd-server 0.1.0)\n");
        assert_eq!(output.status.code(), Some(0));
    }
    for flag in ["-h", "--help"] {
        let output = run(&[flag]);
        assert!(text(&output.stderr).starts_with("Use: beanstalkd"));
        assert!(text(&output.stderr).contains("--max-job-size BYTES"));
        assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 0));
    }
}

#[test]
fn a_wrong_command_line_is_rejected_with_the_usage() {
    for arguments in
        [&["-X"][..], &["-p"], &["-z", "1x"], &["-p", "70000"], &["--socket-mode", "8"], &["what"]]
    {
        let output = run(arguments);
        let message = text(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{arguments:?}");
        assert!(message.starts_with("beanstalkd: ") && message.contains("Use: beanstalkd"));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn old_flags_are_accepted_with_a_warning() {
    let (mut daemon, _) = Daemon::on_loopback(&["-c", "-n", "-z", "2000000000"]);
    daemon.wait_for_log("-c has no effect");
    daemon.wait_for_log("-n has no effect");
    daemon.wait_for_log("-z 2000000000");
}

#[test]
fn the_log_names_an_address_that_cannot_be_bound() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (arguments, name) in [
        (&["-l", "127.0.0.1", "-p", &port][..], "127.0.0.1"),
        (&["-l", "192.0.2.1", "-p", "0"], "192.0.2.1"),
        (&["-l", "no such host", "-p", "0"], "no such host"),
        (
            &["-l", "127.0.0.1", "-p", "no-such-service"],
            "the service no-such-service: /etc/services",
        ),
        (&["-l", "unix:/no/such/directory/socket"], "/no/such/directory"),
    ] {
        let (code, log) = refusal(arguments);
        assert_eq!(code, Some(111), "{arguments:?}");
        assert!(log.contains(name), "{log}");
    }
}

#[test]
fn verbosity_comes_from_flags_and_environment() {
    let (mut daemon, address) = Daemon::on_loopback(&["-VV"]);
    let line = daemon.wait_for_log("listening on ");
    assert!(line.contains(" INFO ") && line.contains('T') && line.contains('Z'), "{line}");
    Client::connect(address).expect_service();
    daemon.wait_for_log("DEBUG connection 0 opened");

    let mut command = command(BEANSTALKD, ["-l", "127.0.0.1", "-p", "0"]);
    command.env("RUST_LOG", "info");
    let line = Daemon::spawn(command).wait_for_log("listening on ");
    assert!(line.contains(" INFO "), "{line}");
}

#[test]
fn the_log_can_be_one_object_a_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, log) = refusal(&["-V", "--log-format", "json", "-l", "127.0.0.1", "-p", &port]);
    assert_eq!(code, Some(111));
    let mut levels = Vec::new();
    for line in log.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["level", "message", "time"]);
        assert!(line["time"].as_str().unwrap().ends_with('Z'));
        levels.push((line["level"].as_str().unwrap().to_owned(), line["message"].to_string()));
    }
    let (last, message) = levels.last().unwrap();
    assert!(last == "ERROR" && message.contains("cannot listen on 127.0.0.1"), "{message}");
    assert!(levels.iter().any(|(level, _)| level == "INFO"));
}

#[test]
fn requests_are_logged_at_trace_only() {
    let lines_for = |verbosity: &str, requests: usize| {
        let (daemon, address) = Daemon::on_loopback(&[verbosity]);
        let mut client = Client::connect(address);
        for _ in 0..requests {
            client.expect_service();
        }
        drop(client);
        daemon.stop().lines().filter(|line| !line.contains("connection 0 closed")).count()
    };
    assert_eq!(lines_for("-VV", 1), lines_for("-VV", 100));
    assert_eq!(lines_for("-VVV", 1) + 99, lines_for("-VVV", 100));
}
