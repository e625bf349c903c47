//! More clients than descriptors: accepted clients are served, pending ones are accepted as others
//! disconnect, the binlog has the descriptors that it needs, and the log has one warning a minute.

use crate::harness::client::Client;
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::numbered_body;
use crate::harness::wait_until;
use crate::run::{Outcome, Run};
use std::net::SocketAddr;
use std::time::Instant;

const LIMIT: &str = "-n 64";
const COMPLAINT: &str = "cannot accept connections";

pub fn run_out(run: &Run) -> Outcome {
    let start = Instant::now();
    let (mut daemon, address) = Daemon::with_limit(LIMIT, &[]);
    // The server has opened its own files once a client is served.
    let mut first = Client::connect(address);
    first.expect_service();
    let files_before = daemon.open_files() - 1;
    drop(first);
    let mut inside = 0;
    let rounds = run.rounds(|round| {
        let mut clients: Vec<Client> =
            (0..run.size(100, 300)).map(|_| Client::connect(address)).collect();
        if round == 0 {
            daemon.wait_for_log(COMPLAINT);
        }
        inside = replace_all(&daemon, &mut clients).max(inside);
        drop(clients);
        wait_until("all descriptors are free again", || daemon.open_files() == files_before);
    });
    let log = daemon.stop();
    let complaints = 1 + log.lines().filter(|line| line.contains(COMPLAINT)).count();
    // Once, and then no more than once a minute.
    let minutes = usize::try_from(start.elapsed().as_secs() / 60).expect("it is small");
    assert!(complaints <= 1 + minutes, "{complaints} warnings: {log}");
    let files = fill_binlog(run.size(300, 3_000) as u64);
    Some(format!(
        "{rounds} rounds with up to {inside} clients, {complaints} warnings; puts into {files} files"
    ))
}

/// Disconnects one client after the other, so that all are served; returns how many were at once.
fn replace_all(daemon: &Daemon, clients: &mut Vec<Client>) -> usize {
    for client in &mut *clients {
        client.send("list-tube-used\r\n");
    }
    let first = &mut clients[0];
    assert_eq!(first.reply().line, "USING default");
    let mut count = 0;
    wait_until("the server is full", || {
        let before = std::mem::replace(&mut count, first.stat("current-connections"));
        before == count
    });
    assert!((40..64).contains(&count), "{count} of 64 descriptors are for clients");
    let count = usize::try_from(count).expect("it is small");
    for client in &mut clients[1..count] {
        assert_eq!(client.reply().line, "USING default");
    }
    daemon.assert_rests();
    for mut pending in clients.split_off(count) {
        drop(clients.swap_remove(0));
        assert_eq!(pending.reply().line, "USING default");
        clients.push(pending);
    }
    count
}

/// Puts jobs into many files while clients have all other descriptors, and reads them after a
/// crash; returns the number of files.
fn fill_binlog(jobs: u64) -> u64 {
    let directory = tempfile::tempdir().expect("it is new");
    let flags = ["-b", path_text(directory.path()), "-s", "65536"];
    let start = || -> (Daemon, SocketAddr) { Daemon::with_limit(LIMIT, &flags) };
    let (mut daemon, address) = start();
    let mut inside = Client::connect(address);
    inside.expect_service();
    let _crowd: Vec<Client> = (0..100).map(|_| Client::connect(address)).collect();
    daemon.wait_for_log(COMPLAINT);
    for number in 0..jobs {
        inside.put(numbered_body(number, 1_000));
    }
    let files = inside.stat("binlog-current-index");
    assert!(files > 1, "one file was enough");
    daemon.kill();
    let (_daemon, address) = start();
    assert_eq!(Client::connect(address).stat("current-jobs-ready"), jobs);
    let mut names = directory.path().read_dir().expect("it is there");
    let is_damaged = names.any(|name| {
        name.expect("it can be read").path().extension().is_some_and(|end| end == "damaged")
    });
    assert!(!is_damaged, "files are damaged");
    files
}
