//! `bench`: puts, reserves and deletes jobs in a tube of its own, and prints the latency of each command.

use super::act::flush_selected;
use super::conn::{Conn, Fields};
use super::look;
use super::print::{Listing, json_string};
use super::select::Selection;
use super::{Ctl, Flags, print, usage_error};
use crate::engine::text::{CountOf, Grouped};
use crate::os::failure::Failure;
use crate::os::sys::clock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

const DEFAULT_JOBS: u64 = 10_000;
const DEFAULT_SIZE: usize = 100;

/// The most connections, each with a thread.
const MAX_CONNECTIONS: u64 = 1000;

/// The latencies of put, reserve and delete, in ns.
type Latencies = [Vec<u64>; 3];

/// `bench`
pub fn bench(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let jobs = args.number("jobs")?.unwrap_or(DEFAULT_JOBS);
    let connections = args.number("connections")?.unwrap_or(1);
    let body = vec![b'x'; args.number("size")?.unwrap_or(DEFAULT_SIZE)];
    if jobs == 0 || !(1..=MAX_CONNECTIONS).contains(&connections) {
        return Err(usage_error("bench: at least 1 job, and 1 to 1,000 connections"));
    }
    if ctl.is_dry_run {
        let jobs = CountOf(jobs, "job");
        return ctl.would(&format!("put, reserve and delete {jobs} in a tube of its own"));
    }
    let tube =
        format!("beanstalkctl-bench-{}-{}", std::process::id(), clock::time_of_day().as_nanos());
    ctl.begin("", "", jobs);
    let (is_stopped, done, next) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let start = clock::monotonic();
    let run = |mut conn: Conn| {
        let mut latencies = Latencies::default();
        let mut cycles = |conn: &mut Conn| {
            while !is_stopped.load(Ordering::Relaxed) && next.fetch_add(1, Ordering::Relaxed) < jobs
            {
                cycle(conn, &tube, &body, &mut latencies)?;
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        };
        let ended = switch(&mut conn, "default", &tube).and_then(|()| {
            let ended = cycles(&mut conn);
            // The tube is gone before the tool ends.
            switch(&mut conn, &tube, "default").and(ended)
        });
        is_stopped.fetch_or(ended.is_err(), Ordering::Relaxed);
        ended.map(|()| latencies)
    };
    let results: Vec<Result<Latencies, Failure>> = thread::scope(|scope| {
        let run = &run;
        let conns = (0..connections).map(|_| ctl.conn.another());
        let threads: Vec<_> = conns.map(|conn| scope.spawn(move || run(conn))).collect();
        while !threads.iter().all(ScopedJoinHandle::is_finished) {
            thread::sleep(Duration::from_millis(10));
            is_stopped.fetch_or(ctl.work.is_stopped(), Ordering::Relaxed);
            ctl.work.add(done.swap(0, Ordering::Relaxed));
        }
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    ctl.work.add(done.into_inner());
    let (done, nanos) = (ctl.work.done, clock::monotonic().since(start).as_nanos());
    let mut latencies = Latencies::default();
    let ended: Result<(), Failure> = results.into_iter().try_for_each(|own| {
        latencies.iter_mut().zip(own?).for_each(|(all, own)| all.extend(own));
        Ok(())
    });
    if ended.is_err() {
        // That has failed, whether its jobs can be deleted or not.
        let tubes = look::tubes(&mut ctl.conn, &[tube]).unwrap_or_default();
        let _ = tubes
            .into_iter()
            .try_for_each(|tube| flush_selected(ctl, Selection::of_tube(tube, &["any"])));
    }
    ctl.work.show("");
    ended?;
    report(ctl, latencies, done, nanos)
}

/// Makes `to` the only tube that the connection uses and watches, in place of `from`.
fn switch(conn: &mut Conn, from: &str, to: &str) -> Result<(), Failure> {
    conn.use_tube(to)?;
    for request in [format!("watch {to}"), format!("ignore {from}")] {
        conn.ask(&request)?.expect("WATCHING")?;
    }
    Ok(())
}

/// Puts a job, reserves one, and deletes that.
fn cycle(
    conn: &mut Conn,
    tube: &str,
    body: &[u8],
    latencies: &mut Latencies,
) -> Result<(), Failure> {
    let now = || clock::monotonic().as_nanos();
    let mut times = [now(); 4];
    conn.put(tube, [0, 0, 60], "", body)?;
    times[1] = now();
    // Each connection has put a job before, so that there is one.
    let reserved = conn.ask("reserve-with-timeout 1")?.expect("RESERVED")?;
    times[2] = now();
    let id = reserved.split(' ').nth(1).unwrap_or_default();
    conn.ask(&format!("delete {id}"))?.expect("DELETED")?;
    times[3] = now();
    for (latencies, pair) in latencies.iter_mut().zip(times.windows(2)) {
        latencies.push(pair[1] - pair[0]);
    }
    Ok(())
}

fn report(ctl: &Ctl, latencies: Latencies, jobs: u64, nanos: u64) -> Result<(), Failure> {
    let rate = u128::from(jobs) * 1_000_000_000 / u128::from(nanos.max(1));
    let rate = u64::try_from(rate).unwrap_or(u64::MAX);
    const COLUMNS: &str = "command<COMMAND p50_us>P50_US p95_us>P95_US p99_us>P99_US max_us>MAX_US";
    let mut listing = Listing::new(ctl.is_json, COLUMNS);
    for (command, mut latencies) in ["put", "reserve", "delete"].into_iter().zip(latencies) {
        latencies.sort_unstable();
        let last = latencies.len().saturating_sub(1);
        let micros = |percent: usize| {
            let nanos = latencies.get((latencies.len() * percent / 100).min(last));
            nanos.map_or(0, |nanos| nanos / 1000).to_string()
        };
        let row = Fields::of([
            ("command", json_string(command)),
            ("jobs", jobs.to_string()),
            ("jobs_per_second", rate.to_string()),
            ("p50_us", micros(50)),
            ("p95_us", micros(95)),
            ("p99_us", micros(99)),
            ("max_us", micros(100)),
        ]);
        listing.add(&row, &[])?;
    }
    listing.print()?;
    let (jobs, millis) = (CountOf(jobs, "job"), Grouped(nanos / 1_000_000));
    let line = format!("{jobs} in {millis} ms: {} a second", Grouped(rate));
    if ctl.is_json { Ok(()) } else { print(&line) }
}
