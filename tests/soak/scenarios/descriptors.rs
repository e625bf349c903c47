//! More clients than descriptors: accepted clients are served, pending ones are accepted as others
//! disconnect, and the log has one warning a minute.

use super::{Outcome, Run};
use crate::harness::client::Client;
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::numbered_body;
use crate::harness::wait_until;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const LIMIT: &str = "-n 64";
const COMPLAINT: &str = "cannot accept connections";

pub fn run_out(run: &Run) -> Outcome {
    let start = Instant::now();
    let (mut daemon, address) = Daemon::with_limit(LIMIT, &[]);
    let mut rounds = 0;
    let mut inside = 0;
    // The server has opened its own files once a client is served.
    let mut first = Client::connect(address);
    first.expect("list-tube-used\r\n", "USING default");
    let files_before = daemon.open_files() - 1;
    drop(first);
    loop {
        inside = fill_and_leave(run, &mut daemon, address, rounds == 0).max(inside);
        wait_until("all descriptors are free again", || daemon.open_files() == files_before);
        rounds += 1;
        if !run.has_time() {
            break;
        }
    }
    let log = daemon.stop();
    let complaints = 1 + log.lines().filter(|line| line.contains(COMPLAINT)).count();
    // Once, and then no more than once a minute.
    let minutes = usize::try_from(start.elapsed().as_secs() / 60).expect("it ends before that");
    assert!(complaints <= 1 + minutes, "{complaints} warnings: {log}");
    let with_binlog = beside_a_binlog(run);
    Ok(format!(
        "{rounds} rounds with up to {inside} inside, {complaints} warnings in the log; with a \
         binlog {with_binlog}"
    ))
}

/// Returns the number of open connections.
fn fill_and_leave(run: &Run, daemon: &mut Daemon, address: SocketAddr, is_first: bool) -> usize {
    let mut clients: Vec<Client> =
        (0..run.size(100, 300)).map(|_| Client::connect(address)).collect();
    for client in &mut clients {
        client.send("list-tube-used\r\n");
    }
    if is_first {
        daemon.wait_for_log(COMPLAINT);
    }
    let mut clients = clients.into_iter();
    let first = clients.next().expect("there are many");
    let mut inside: Vec<Client> = vec![first];
    assert_eq!(inside[0].reply().line, "USING default");
    let mut count = 0;
    // The server answers after the limit was reached, so the number is final.
    wait_until("the server is full", || {
        let before = std::mem::replace(&mut count, inside[0].stat("current-connections"));
        before == count
    });
    let count = usize::try_from(count).expect("it is less than the limit");
    assert!((40..64).contains(&count), "{count} of 64 descriptors are for clients");
    inside.extend(clients.by_ref().take(count - 1));
    for client in &mut inside[1..] {
        assert_eq!(client.reply().line, "USING default");
    }
    if run.is_whole() {
        let before = daemon.processor_time();
        thread::sleep(Duration::from_secs(1));
        let used = daemon.processor_time() - before;
        assert!(used <= Duration::from_millis(30), "the server spins: {used:?} in a second");
    }
    // One leaves, one gets in.
    for mut outside in clients {
        drop(inside.swap_remove(0));
        assert_eq!(outside.reply().line, "USING default");
        inside.push(outside);
    }
    count
}

/// While clients have all descriptors the binlog has those that it keeps for its files.
fn beside_a_binlog(run: &Run) -> String {
    let directory = tempfile::tempdir().expect("it can be made");
    let path = path_text(directory.path());
    let flags = ["-b", path, "-s", "65536"];
    let (mut daemon, address) = Daemon::with_limit(LIMIT, &flags);
    let mut inside = Client::connect(address);
    inside.expect("list-tube-used\r\n", "USING default");
    let crowd: Vec<Client> = (0..100).map(|_| Client::connect(address)).collect();
    daemon.wait_for_log(COMPLAINT);
    let count = run.size(300, 3_000) as u64;
    for number in 0..count {
        inside.put(numbered_body(number, 1_000));
    }
    let files = inside.stat("binlog-current-index");
    assert!(files > 1, "one file was enough");
    drop(crowd);
    daemon.kill();
    let (_daemon, address) = Daemon::with_limit(LIMIT, &["-b", path]);
    assert_eq!(Client::connect(address).stat("current-jobs-ready"), count);
    assert!(has_no_damage(directory.path()));
    format!("{count} puts into {files} files")
}

fn has_no_damage(directory: &Path) -> bool {
    let mut files = std::fs::read_dir(directory).expect("the directory is there");
    files.all(|file| !file.expect("it can be read").path().ends_with("damaged"))
}
