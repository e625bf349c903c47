//! Timers.

use crate::harness::client::Client;
use crate::harness::process::Daemon;
use crate::harness::wait_until;
use std::fs::{read_dir, read_to_string};
use std::time::{Duration, Instant};

/// No test can suspend the machine, so this one reads the timer of CLOCK_BOOTTIME from `/proc`.
#[test]
fn timers_use_the_clock_that_runs_during_a_suspend() {
    let (daemon, address) = Daemon::on_loopback(&[]);
    let timer = || {
        read_dir(format!("/proc/{}/fdinfo", daemon.id())).unwrap().find_map(|entry| {
            let info = read_to_string(entry.unwrap().path()).ok()?;
            // CLOCK_BOOTTIME is 7.
            let (_, left) =
                info.contains("clockid: 7\n").then(|| info.split_once("it_value: ("))??;
            left.split_once(',')?.0.parse::<u32>().ok()
        })
    };
    let mut client = Client::connect(address);
    client.expect_service();
    assert_eq!(timer(), Some(0), "nothing is due");
    client.expect("put 0 1000 9 1\r\na\r\n", "INSERTED 1");
    wait_until("the timer is set", || timer().is_some_and(|left| (900..1000).contains(&left)));
    client.expect("put 0 500 9 1\r\na\r\n", "INSERTED 2");
    wait_until("the timer is set", || timer().is_some_and(|left| (400..500).contains(&left)));
}

#[test]
fn reserve_with_timeout_does_not_end_early() {
    let (_daemon, address) = Daemon::on_loopback(&[]);
    let mut client = Client::connect(address);
    let start = Instant::now();
    client.expect("reserve-with-timeout 1\r\n", "TIMED_OUT");
    assert!(start.elapsed() >= Duration::from_secs(1));
}
