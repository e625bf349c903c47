//! `bench`: puts, reserves and deletes jobs in a tube of its own, and prints the latency of each command.

use super::act::flush_selected;
use super::conn::{Conn, Fields};
use super::look::{self, NOT_HELD};
use super::print::{Listing, json_string};
use super::work::Task;
use super::{Ctl, Flags, Result, print, usage_error};
use crate::engine::text::{CountOf, Grouped};
use crate::os::sys::clock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

const DEFAULT_JOBS: usize = 10_000;
const DEFAULT_SIZE: u64 = 100;

/// The most connections, each with a thread.
const MAX_CONNECTIONS: usize = 1000;

/// The latencies of a put, a reserve and a delete, in ns.
type Latencies = [u64; 3];

/// `bench`
pub fn bench(ctl: &mut Ctl, args: &Flags) -> Result {
    let jobs = args.number("jobs")?.unwrap_or(DEFAULT_JOBS);
    let connections = args.number("connections")?.unwrap_or(1);
    let size = args.size("size")?.unwrap_or(DEFAULT_SIZE);
    if jobs == 0 || !(1..=MAX_CONNECTIONS).contains(&connections) {
        return Err(usage_error("bench: at least 1 job, and 1 to 1,000 connections"));
    }
    let most = look::server(&mut ctl.conn)?.number("max-job-size");
    if size > most {
        let message = format!("--size {size}: the server takes at most {most} bytes");
        return Err(usage_error(message));
    }
    let count = CountOf(jobs as u64, "job");
    if ctl.is_dry_run {
        return ctl.would(format_args!("put, reserve and delete {count} in a tube of its own"));
    }
    let body = b"x".repeat(usize::try_from(size).unwrap_or(0));
    let now = clock::time_of_day().as_nanos();
    let tube = format!("beanstalkctl-bench-{}-{now}", std::process::id());
    ctl.begin(count.0);
    let start = clock::monotonic();
    let (sender, receiver) = channel();
    let mut all = Vec::new();
    let ended = thread::scope(|scope| {
        for first in 0..connections {
            let (conn, tube, body, sender) = (ctl.conn.another(), &tube, &body, sender.clone());
            let own = (first..jobs).step_by(connections);
            scope.spawn(move || run(conn, tube, body, own.len(), &sender));
        }
        drop(sender);
        // Once the channel is closed, the threads end.
        for latencies in receiver {
            all.push(latencies?);
            ctl.work.add(1);
            if ctl.work.is_stopped() {
                break;
            }
        }
        Ok(())
    });
    let nanos = clock::monotonic().since(start).as_nanos();
    ctl.work.show("");
    if ended.is_err()
        && let Ok(tube) = look::tube(&mut ctl.conn, &tube)
    {
        // It has failed, whether its jobs can be deleted or not.
        let task = Task { tube: Some(tube), states: NOT_HELD.to_vec(), ..Task::default() };
        let _ = flush_selected(ctl, &task);
    }
    ended.and_then(|()| report(ctl, &all, nanos))
}

/// Puts, reserves and deletes some jobs, and sends the latencies of each.
fn run(mut conn: Conn, tube: &str, body: &[u8], jobs: usize, sender: &Sender<Result<Latencies>>) {
    let mut cycles = || {
        for request in [format!("watch {tube}"), "ignore default".into()] {
            conn.ask(&request)?.expect("WATCHING")?;
        }
        for _ in 0..jobs {
            if sender.send(Ok(cycle(&mut conn, tube, body)?)).is_err() {
                break;
            }
        }
        Ok(())
    };
    if let Err(failure) = cycles() {
        let _ = sender.send(Err(failure));
    }
    // Once the server has ended the connection, the tube is gone.
    let _ = conn.ask("quit");
}

/// Puts a job, reserves one, and deletes that.
fn cycle(conn: &mut Conn, tube: &str, body: &[u8]) -> Result<Latencies> {
    let now = || clock::monotonic().as_nanos();
    let start = now();
    conn.put(tube, [0, 0, 60], "", body)?;
    let put_at = now();
    // Each connection has put a job before, so that there is one.
    let reserved = conn.ask("reserve-with-timeout 1")?.expect("RESERVED")?;
    let reserved_at = now();
    conn.ask(&format!("delete {}", reserved.word(1)))?.expect("DELETED")?;
    Ok([put_at - start, reserved_at - put_at, now() - reserved_at])
}

fn report(ctl: &Ctl, all: &[Latencies], nanos: u64) -> Result {
    let jobs = all.len() as u64;
    let rate = jobs * 1_000_000_000 / nanos.max(1);
    const COLUMNS: &str = "command<COMMAND p50_us>P50_US p95_us>P95_US p99_us>P99_US max_us>MAX_US";
    let mut listing = Listing::new(ctl.is_json, COLUMNS);
    for (index, command) in ["put", "reserve", "delete"].into_iter().enumerate() {
        let mut sorted: Vec<u64> = all.iter().map(|latencies| latencies[index]).collect();
        sorted.sort_unstable();
        let mut row = Fields::of([("command", json_string(command))]);
        row.push("jobs", jobs);
        row.push("jobs_per_second", rate);
        for (key, percent) in [("p50_us", 50), ("p95_us", 95), ("p99_us", 99), ("max_us", 100)] {
            let last = sorted.len().saturating_sub(1);
            let nanos = sorted.get((sorted.len() * percent / 100).min(last));
            row.push(key, nanos.map_or(0, |nanos| nanos / 1000));
        }
        listing.add(&row, &[])?;
    }
    listing.print()?;
    let (jobs, millis) = (CountOf(jobs, "job"), Grouped(nanos / 1_000_000));
    let line = format!("{jobs} in {millis} ms: {} a second", Grouped(rate));
    if ctl.is_json { Ok(()) } else { print(line) }
}
