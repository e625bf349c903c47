//! Very many clients at once: they idle, wait and disconnect, and leave nothing behind.

use super::Run;
use crate::harness::client::Client;
use crate::harness::process::{Daemon, raise_open_files};
use crate::harness::{cannot_test, wait_until};

const WANTED: usize = 10_000;

pub(super) fn at_once(run: &Run) -> String {
    /// Files that this process, the server, and other tests in this process have open in addition.
    const OTHERS: u64 = 7_000;
    let limit = raise_open_files();
    let count = usize::try_from(limit.saturating_sub(OTHERS)).unwrap_or(WANTED).min(WANTED);
    if count < WANTED {
        cannot_test(&format!("{} of {WANTED} clients: {limit} files may be open", WANTED - count));
    }
    let (daemon, address) = Daemon::on_own_port(&[]);
    let mut observer = Client::connect(address);
    observer.expect_service();
    let (files_before, before_kib) = (daemon.open_files(), daemon.rss_kib());
    let kib = || daemon.rss_kib().saturating_sub(before_kib);
    let (mut idle_kib, mut waiting_kib, mut left_kib) = (0, 0, Vec::new());
    let rounds = run.rounds(|| {
        let mut clients: Vec<Client> = (0..count).map(|_| Client::connect(address)).collect();
        ask_all(&mut clients, "list-tube-used\r\n", "USING default");
        assert_eq!(observer.stat("current-connections"), count as u64 + 1);
        assert_eq!(daemon.open_files(), files_before + count);
        idle_kib = kib();
        daemon.assert_rests();
        ask_all(&mut clients, "watch crowd\r\n", "WATCHING 2");
        for client in &mut clients {
            client.send("reserve\r\n");
        }
        wait_until("all wait", || observer.stat("current-waiting") == count as u64);
        waiting_kib = kib();
        daemon.assert_rests();
        for (index, client) in clients.into_iter().enumerate() {
            if index.is_multiple_of(2) {
                client.reset();
            }
        }
        wait_until("all are gone", || observer.stat("current-connections") == 1);
        assert_eq!(daemon.open_files(), files_before, "descriptors are left");
        assert_eq!(observer.stat("current-waiting"), 0);
        assert_eq!(observer.stat("current-tubes"), 2);
        left_kib.push(kib());
    });
    let last_kib = left_kib[rounds - 1];
    let line = format!(
        "{count} connections {rounds} times: {idle_kib} KiB for idle ones, {waiting_kib} for waiting \
         ones; {} left after the first round, {last_kib} after the last",
        left_kib[0]
    );
    // The allocator keeps what is small for the next crowd, but nothing for each crowd.
    assert!(last_kib <= waiting_kib + 1024, "each round leaves something: {line}");
    line
}

fn ask_all(clients: &mut [Client], request: &str, line: &str) {
    for client in &mut *clients {
        client.send(request);
    }
    for client in clients {
        assert_eq!(client.reply().line, line);
    }
}
