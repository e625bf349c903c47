//! A backlog larger than memory: jobs are put, the server is restarted, and workers drain them, while
//! most bodies are only in the binlog. Every body must be right, and the memory bounded.

use super::Run;
use crate::harness::client::Client;
use crate::harness::process::{Daemon, path_text};
use crate::harness::request::{body_number, numbered_body, put};
use rustix::fs::{Advice, fadvise, statvfs};
use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

const BODY_LEN: usize = 4096;
/// The bytes of a job in the binlog.
const RECORD_LEN: u64 = 84 + 7 + BODY_LEN as u64 + 2;
const PRODUCERS: usize = 2;
const WORKERS: usize = 4;
/// The number of commands that are sent at once.
const DEPTH: usize = 50;

pub(super) fn larger_than_memory(run: &Run) -> String {
    // In the default time of 400 s, 4 million: 16 GB.
    let jobs = if run.is_whole { 10_000 * run.lasts.as_secs() } else { 2_000 };
    let directory = tempfile::tempdir().expect("it is new");
    let space = statvfs(directory.path()).expect("it is there");
    let (free, needed) = (space.f_bavail * space.f_frsize, jobs * RECORD_LEN * 5 / 4);
    assert!(free >= needed, "{needed} bytes of disk are needed, {free} are free");
    // Of bodies in memory.
    let cache = run.size([1 << 20, 64 << 20]).to_string();
    let flags =
        ["-b", path_text(directory.path()), "-s", "104857600", "--body-cache", cache.as_str()];
    let (daemon, address) = Daemon::on_loopback(&flags);
    let ((), put) = timed(|| put_all(address, jobs));
    let first_peak = check_memory(&daemon, jobs);
    daemon.stop();
    drop_cache(directory.path());

    let start = Instant::now();
    let (daemon, address) = Daemon::on_loopback(&flags);
    let mut client = Client::connect(address);
    assert_eq!(client.stat("current-jobs-ready"), jobs, "jobs after the restart");
    let restart = start.elapsed();
    check_memory(&daemon, jobs);
    drop_cache(directory.path());
    let (slowest, drain) = timed(|| drain_beside(address, jobs));
    let peak = check_memory(&daemon, jobs);
    assert_eq!(client.stat("current-jobs-ready"), 0);
    daemon.stop();
    format!(
        "{jobs} jobs put in {put:.1?}, peak {first_peak} KiB; restart in {restart:.1?}; drained in \
         {drain:.1?}, peak {peak} KiB, where the slowest job of a client beside took {slowest:.0?}"
    )
}

fn timed<T>(action: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = action();
    (result, start.elapsed())
}

/// The server may have 1 GiB for 4 million jobs, 64 MiB of it for bodies; returns its peak.
fn check_memory(daemon: &Daemon, jobs: u64) -> u64 {
    let (peak_kib, limit_kib) = (daemon.peak_rss_kib(), (160 << 10) + jobs * 226 / 1024);
    assert!(peak_kib <= limit_kib, "{peak_kib} KiB of memory, {limit_kib} are allowed");
    peak_kib
}

/// Puts jobs with the bodies of the numbers below `jobs`.
fn put_all(address: SocketAddr, jobs: u64) {
    let produce = |first| {
        let mut client = Client::connect(address);
        let numbers: Vec<u64> = (first..jobs).step_by(PRODUCERS).collect();
        for numbers in numbers.chunks(DEPTH) {
            let bodies = numbers.iter().map(|&number| numbered_body(number, BODY_LEN));
            client.send(bodies.flat_map(|body| put(0, 0, 600, body)).collect::<Vec<u8>>());
            for _ in numbers {
                client.reply().inserted();
            }
        }
    };
    thread::scope(|scope| {
        for first in 0..PRODUCERS as u64 {
            scope.spawn(move || produce(first));
        }
    });
}

/// Reserves and deletes all jobs with several workers. Each body must come once.
fn drain_all(address: SocketAddr, jobs: u64) {
    let mut numbers = thread::scope(|scope| {
        let workers = [(); WORKERS].map(|()| scope.spawn(|| work(address)));
        workers.map(|worker| worker.join().expect("it is served")).concat()
    });
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..jobs), "bodies are missing, or came twice");
}

/// Works until there are no jobs; returns the numbers of the bodies.
fn work(address: SocketAddr) -> Vec<u64> {
    let mut client = Client::connect(address);
    let mut numbers = Vec::new();
    loop {
        client.send("reserve-with-timeout 0\r\n".repeat(DEPTH));
        let replies = (0..DEPTH).map(|_| client.reply()).filter(|reply| reply.line != "TIMED_OUT");
        let ids: Vec<u64> = replies
            .map(|reply| {
                let number = body_number(&reply.body).expect("the body is as it was put");
                assert_eq!(reply.body.len(), BODY_LEN, "body {number}");
                numbers.push(number);
                reply.number("RESERVED").expect("a job or nothing is reserved")
            })
            .collect();
        client.delete_all(&ids);
        if ids.len() < DEPTH {
            return numbers;
        }
    }
}

/// Drops the files from the page cache, so that bodies are read from the disk.
fn drop_cache(directory: &Path) {
    for entry in directory.read_dir().expect("the directory exists") {
        // A file may be removed meanwhile.
        if let Ok(file) = File::open(entry.expect("it can be read").path()) {
            file.sync_all().expect("the disk works");
            fadvise(&file, 0, None, Advice::DontNeed).expect("it is a hint");
        }
    }
}

/// Drains the queue on threads of their own, while a client beside them puts, reserves and deletes one job
/// after another. Returns the time that the slowest took.
fn drain_beside(address: SocketAddr, jobs: u64) -> Duration {
    const PAUSE: Duration = Duration::from_millis(1);
    let mut client = Client::in_tube(address, "beside");
    let mut slowest = Duration::ZERO;
    thread::scope(|scope| {
        let drain = scope.spawn(|| drain_all(address, jobs));
        while slowest.is_zero() || !drain.is_finished() {
            let ((), took) = timed(|| {
                let id = client.put("beside");
                assert_eq!(client.ask("reserve\r\n").number("RESERVED"), Some(id));
                client.delete_all(&[id]);
            });
            slowest = slowest.max(took);
            thread::sleep(PAUSE);
        }
    });
    slowest
}
