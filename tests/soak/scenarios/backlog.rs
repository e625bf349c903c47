//! A backlog larger than memory: jobs are put, the server is restarted, and workers drain them, while
//! most bodies are only in the binlog. Every body must be right, and the memory bounded.
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures have three digits, and a number of jobs fits in each integer"
)]

use super::{Outcome, Run, Skipped};
use crate::harness::client::Client;
use crate::harness::process::{self, Daemon, path_text};
use crate::harness::request::{numbered_body, put};
use rustix::fs::{Advice, fadvise, statvfs};
use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::ops::Range;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const BODY_LEN: usize = 4096;
/// The bytes of a job in the binlog.
const RECORD_LEN: u64 = 84 + 7 + BODY_LEN as u64 + 2;
/// The bytes of bodies in memory.
const BODY_CACHE: &str = "67108864";
/// The memory that the server may have.
const MAX_RSS_KIB: u64 = 1024 * 1024;
const PRODUCERS: u64 = 2;
const WORKERS: usize = 4;
/// The number of commands that are sent at once.
const DEPTH: u64 = 50;
/// The cost of a put is measured with this many jobs.
const SAMPLE: u64 = 100_000;

pub fn larger_than_memory(run: &Run) -> Outcome {
    let jobs = run.size(2_000, 4_000_000) as u64;
    let directory = tempfile::tempdir().expect("it can be made");
    let space = statvfs(directory.path()).expect("it is there");
    let (free, needed) = (space.f_bavail * space.f_frsize, jobs * RECORD_LEN * 5 / 4);
    if free < needed {
        return Err(Skipped(format!("{needed} bytes of disk are needed, {free} are free")));
    }
    let mut figures = Vec::new();
    if run.is_whole() {
        figures.push(cost_of_puts());
    }
    let cache = if run.is_whole() { BODY_CACHE } else { "1048576" };
    let flags = ["-b", path_text(directory.path()), "-s", "104857600", "--body-cache", cache];
    let (daemon, address) = Daemon::on_loopback(&flags);
    let began = Instant::now();
    put_all(address, 0..jobs);
    let took_s = began.elapsed().as_secs_f64();
    check_memory(&daemon, "after the puts");
    figures.push(format!(
        "{jobs} jobs put at {:.0}/s, peak {}",
        jobs as f64 / took_s,
        peak(&daemon)
    ));
    daemon.stop();

    let disk_rate = read_without_cache(directory.path());
    let began = Instant::now();
    let (daemon, address) = Daemon::on_loopback(&flags);
    let mut client = Client::connect(address);
    assert_eq!(client.stat("current-jobs-ready"), jobs, "jobs after the restart");
    figures.push(format!("restart in {:.1} s", began.elapsed().as_secs_f64()));
    check_memory(&daemon, "after the restart");
    drop_cache(directory.path());
    let began = Instant::now();
    let waits_us = drain(address, jobs);
    let took_s = began.elapsed().as_secs_f64();
    check_memory(&daemon, "after the drain");
    assert_eq!(client.stat("current-jobs-ready"), 0);
    let rate = jobs as f64 * BODY_LEN as f64 / took_s / 1e6;
    let cpu_us = daemon.processor_time().as_secs_f64() * 1e6 / jobs as f64;
    figures.push(format!(
        "drained at {:.0}/s = {rate:.0} MB/s (the disk alone, one reader: {disk_rate:.0} MB/s), {cpu_us:.1} us \
         of the server's time a job since the restart, peak {}; a client beside it waited {} us at \
         the median, {} at p99.9",
        jobs as f64 / took_s,
        peak(&daemon),
        percentile(&waits_us, 0.5),
        percentile(&waits_us, 0.999),
    ));
    daemon.stop();
    if run.is_whole() {
        figures.extend(memory_of_c());
    }
    Ok(figures.join("; "))
}

fn peak(daemon: &Daemon) -> String {
    format!("{} MiB", daemon.peak_rss_kib() / 1024)
}

fn check_memory(daemon: &Daemon, when: &str) {
    let peak_kib = daemon.peak_rss_kib();
    assert!(peak_kib <= MAX_RSS_KIB, "{peak_kib} KiB of memory {when}");
}

/// Puts jobs with the bodies of these numbers.
fn put_all(address: SocketAddr, numbers: Range<u64>) {
    thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let numbers = numbers.clone();
            scope.spawn(move || {
                let mut client = Client::connect(address);
                let mut numbers =
                    (numbers.start + producer..numbers.end).step_by(PRODUCERS as usize).peekable();
                while numbers.peek().is_some() {
                    let some: Vec<Vec<u8>> = (&mut numbers)
                        .take(DEPTH as usize)
                        .map(|number| put(0, 0, 600, numbered_body(number, BODY_LEN)))
                        .collect();
                    client.send(some.concat());
                    for _ in some {
                        let reply = client.reply();
                        assert!(reply.line.starts_with("INSERTED "), "{}", reply.line);
                    }
                }
            });
        }
    });
}

/// Reserves and deletes all jobs with several workers, and compares their bodies. Returns how long a
/// client that puts and deletes meanwhile, one command at a time, has waited for each reply.
fn drain(address: SocketAddr, jobs: u64) -> Vec<u64> {
    // A bit for each number of a body.
    let seen: Vec<AtomicU64> = (0..=jobs / 64).map(|_| AtomicU64::new(0)).collect();
    let is_over = AtomicBool::new(false);
    let waits_us = Mutex::new(Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = Client::connect(address);
            client.expect("use other\r\n", "USING other");
            let mut waits = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                let begun = Instant::now();
                let id = client.put(b"beside");
                waits.push(begun.elapsed().as_micros() as u64);
                let begun = Instant::now();
                client.expect(format!("delete {id}\r\n"), "DELETED");
                waits.push(begun.elapsed().as_micros() as u64);
                thread::sleep(Duration::from_millis(1));
            }
            *waits_us.lock().expect("no thread panics with it") = waits;
        });
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(|| work(address, &seen))).collect();
        let drained: u64 = workers.into_iter().map(|it| it.join().expect("it works")).sum();
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(drained, jobs, "jobs that were drained");
    });
    let mut waits_us = waits_us.into_inner().expect("no thread panics with it");
    waits_us.sort_unstable();
    waits_us
}

/// Works until there are no jobs. Returns how many there were.
fn work(address: SocketAddr, seen: &[AtomicU64]) -> u64 {
    let mut client = Client::connect(address);
    let requests = "reserve-with-timeout 0\r\n".repeat(DEPTH as usize);
    let mut drained = 0;
    loop {
        client.send(&requests);
        let mut deletes = String::new();
        let mut count = 0;
        for _ in 0..DEPTH {
            let reply = client.reply();
            let Some(id) = reply.number("RESERVED") else {
                assert_eq!(reply.line, "TIMED_OUT");
                continue;
            };
            let body = reply.body;
            let number = number_of(&body);
            let bit = 1 << (number % 64);
            let before = seen[(number / 64) as usize].fetch_or(bit, Ordering::Relaxed);
            assert_eq!(before & bit, 0, "body {number} came twice");
            deletes += &format!("delete {id}\r\n");
            count += 1;
        }
        client.send(&deletes);
        for _ in 0..count {
            assert_eq!(client.reply().line, "DELETED");
        }
        drained += count;
        if count < DEPTH {
            return drained;
        }
    }
}

/// Returns the number of a body, every byte of which must be right.
fn number_of(body: &[u8]) -> u64 {
    let digits = body.split(|&byte| byte == b' ').next().unwrap_or_default();
    let number: u64 = std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| digits.parse().ok())
        .expect("a body begins with its number");
    assert!(body == numbered_body(number, BODY_LEN), "body {number} is not what was put");
    number
}

fn percentile(sorted: &[u64], part: f64) -> u64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((sorted.len() as f64 * part) as usize).or(sorted.get(last)).copied().unwrap_or(0)
}

/// Returns the server's time for puts with and without the flag, and how fast jobs in memory are drained:
/// the limit of the machine.
fn cost_of_puts() -> String {
    let (mut us, mut rates) = (Vec::new(), Vec::new());
    for cache in [&[][..], &["--body-cache", BODY_CACHE]] {
        let directory = tempfile::tempdir().expect("it can be made");
        let flags = ["-b", path_text(directory.path()), "-s", "104857600"];
        let (daemon, address) = Daemon::on_loopback(&[&flags, cache].concat());
        // Half of them fill the cache.
        put_all(address, 0..SAMPLE);
        let before = daemon.processor_time();
        put_all(address, SAMPLE..2 * SAMPLE);
        us.push((daemon.processor_time() - before).as_secs_f64() * 1e6 / SAMPLE as f64);
        let began = Instant::now();
        let waits_us = drain(address, 2 * SAMPLE);
        let rate = 2.0 * SAMPLE as f64 / began.elapsed().as_secs_f64();
        rates.push(format!("{rate:.0}/s (p99.9 {} us)", percentile(&waits_us, 0.999)));
        daemon.stop();
    }
    format!(
        "a put takes {:.2} us of the server's time, {:.2} without the flag; {} jobs in the page cache \
         are drained at {}, in memory at {}",
        us[1],
        us[0],
        2 * SAMPLE,
        rates[1],
        rates[0]
    )
}

/// Returns how much memory C beanstalkd takes for a part of the jobs, if it is installed.
fn memory_of_c() -> Option<String> {
    let program = process::c_beanstalkd()?;
    let directory = tempfile::tempdir().expect("it can be made");
    let socket = directory.path().join("socket");
    let listen = format!("unix:{}", socket.display());
    let flags = ["-l", &listen, "-b", path_text(directory.path()), "-s", "104857600"];
    let daemon = Daemon::start(program, &flags);
    let socket = process::connect_when_ready(&crate::harness::client::unix(&socket));
    let mut client = Client::over(socket);
    for first in (0..SAMPLE).step_by(DEPTH as usize) {
        let some: Vec<Vec<u8>> = (first..first + DEPTH)
            .map(|number| put(0, 0, 600, numbered_body(number, BODY_LEN)))
            .collect();
        client.send(some.concat());
        some.iter().for_each(|_| assert!(client.reply().line.starts_with("INSERTED ")));
    }
    let kib = daemon.rss_kib();
    let us = daemon.processor_time().as_secs_f64() * 1e6 / SAMPLE as f64;
    Some(format!("C beanstalkd: {} bytes a job, {us:.2} us a put", kib * 1024 / SAMPLE))
}

/// Returns how many megabytes a second one reader gets from the files, which are not in the page cache.
fn read_without_cache(directory: &Path) -> f64 {
    drop_cache(directory);
    let began = Instant::now();
    let (mut bytes, mut buffer) = (0, vec![0; 1 << 20]);
    for mut file in files(directory) {
        loop {
            let count = file.read(&mut buffer).expect("it can be read");
            if count == 0 {
                break;
            }
            bytes += count;
        }
    }
    let rate = bytes as f64 / began.elapsed().as_secs_f64() / 1e6;
    drop_cache(directory);
    rate
}

/// Drops the files from the page cache.
fn drop_cache(directory: &Path) {
    for file in files(directory) {
        file.sync_all().expect("the disk works");
        fadvise(&file, 0, None, Advice::DontNeed).expect("it is a hint");
    }
}

fn files(directory: &Path) -> Vec<File> {
    let entries = std::fs::read_dir(directory).expect("the directory exists");
    let paths = entries.map(|entry| entry.expect("it can be read").path());
    let is_binlog = |path: &std::path::PathBuf| path.to_string_lossy().contains("binlog.");
    paths.filter(is_binlog).filter_map(|path| File::open(path).ok()).collect()
}
