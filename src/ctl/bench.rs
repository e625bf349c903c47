//! `bench`: puts, reserves and deletes jobs in a tube of its own, and prints the latency of each command.

use super::act::delete_one_by_one;
use super::conn::{Conn, EXIT_NO_SERVER};
use super::look;
use super::print::{Column, Table, grouped, json_object, json_string};
use super::work::Work;
use super::{Args, Ctl, print, unwritten, usage_error};
use crate::os::failure::Failure;
use crate::os::sys::clock;
use std::io::{self, BufWriter, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

const DEFAULT_JOBS: u64 = 10_000;
const DEFAULT_SIZE: usize = 100;

/// The most connections, each with a thread.
const MAX_CONNECTIONS: u64 = 1000;

const COMMANDS: [&str; 3] = ["put", "reserve", "delete"];

/// The latencies of each of [`COMMANDS`], in ns.
type Latencies = [Vec<u64>; 3];

/// `bench`
pub fn bench(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let jobs = args.number("jobs")?.unwrap_or(DEFAULT_JOBS);
    let connections = args.number("connections")?.unwrap_or(1);
    let body = vec![b'x'; args.number("size")?.unwrap_or(DEFAULT_SIZE)];
    if jobs == 0 || !(1..=MAX_CONNECTIONS).contains(&connections) {
        let message = format!("bench: at least 1 job, and 1 to {MAX_CONNECTIONS} connections");
        return Err(usage_error(&message));
    }
    let tube =
        format!("beanstalkctl-bench-{}-{}", std::process::id(), clock::time_of_day().as_nanos());
    if ctl.is_dry_run {
        print(&format!("would put, reserve and delete {jobs} jobs in a tube of its own"))?;
        return Ok(0);
    }
    let mut conns = (0..connections).map(|_| ctl.connect()).collect::<Result<Vec<_>, _>>()?;
    let mut work = Work::start("", jobs);
    let (is_stopped, done, next) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let start = clock::monotonic().as_nanos();
    let run = |conn: &mut Conn| {
        let mut latencies = Latencies::default();
        let ended = on_tube(conn, &tube, |conn| {
            while !is_stopped.load(Ordering::Relaxed) && next.fetch_add(1, Ordering::Relaxed) < jobs
            {
                cycle(conn, &body, &mut latencies)?;
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        if ended.is_err() {
            is_stopped.store(true, Ordering::Relaxed);
        }
        ended.map(|()| latencies)
    };
    let results: Vec<Result<Latencies, Failure>> = thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = conns.iter_mut().map(|conn| scope.spawn(move || run(conn))).collect();
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            if work.wait(Duration::from_millis(20)) {
                is_stopped.store(true, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(1));
            }
            work.add(done.swap(0, Ordering::Relaxed));
        }
        threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect()
    });
    work.add(done.swap(0, Ordering::Relaxed));
    let nanos = clock::monotonic().as_nanos() - start;
    let mut latencies = Latencies::default();
    let mut ended = Ok(());
    for result in results {
        match result {
            Ok(own) => latencies.iter_mut().zip(own).for_each(|(all, own)| all.extend(own)),
            Err(failure) => ended = Err(failure),
        }
    }
    if matches!(&ended, Err(failure) if failure.exit_code != EXIT_NO_SERVER) {
        let names = [tube];
        for tube in look::tubes(&mut conns[0], &names)? {
            delete_one_by_one(&mut conns[0], &tube, "any", &mut work)?;
        }
    }
    let done = work.done;
    let exit_code = work.end(ended)?;
    report(ctl, latencies, done, nanos)?;
    Ok(exit_code)
}

/// Runs `act` while the connection uses and watches only this tube.
fn on_tube(
    conn: &mut Conn,
    tube: &str,
    act: impl FnOnce(&mut Conn) -> Result<(), Failure>,
) -> Result<(), Failure> {
    conn.use_tube(tube)?;
    conn.ask(&format!("watch {tube}"))?.expect("WATCHING")?;
    conn.ask("ignore default")?.expect("WATCHING")?;
    let done = act(conn);
    // The tube is gone before the tool ends.
    conn.use_tube("default")?;
    conn.ask("watch default")?.expect("WATCHING")?;
    conn.ask(&format!("ignore {tube}"))?.expect("WATCHING")?;
    done
}

/// Puts a job, reserves one, and deletes that.
fn cycle(conn: &mut Conn, body: &[u8], latencies: &mut Latencies) -> Result<(), Failure> {
    let mut times = [0; 4];
    let now = || clock::monotonic().as_nanos();
    times[0] = now();
    conn.put("0 0 60", "", body)?;
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
    #[expect(clippy::cast_precision_loss, reason = "a few digits are printed")]
    let seconds = nanos as f64 / 1e9;
    let rate = u128::from(jobs) * 1_000_000_000 / u128::from(nanos.max(1));
    let mut out = BufWriter::new(io::stdout().lock());
    let mut columns = vec![Column::Word("COMMAND")];
    columns.extend(["P50_US", "P95_US", "P99_US", "MAX_US"].map(Column::Number));
    let mut table = Table::new(&columns);
    for (command, mut latencies) in COMMANDS.into_iter().zip(latencies) {
        latencies.sort_unstable();
        let micros = [50, 95, 99, 100].map(|percent| {
            let index = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
            latencies.get(index).map_or(0, |nanos| nanos / 1000).to_string()
        });
        if ctl.is_json {
            let keys = ["p50_us", "p95_us", "p99_us", "max_us"];
            let mut pairs = vec![("command", json_string(command)), ("jobs", jobs.to_string())];
            pairs.push(("jobs_per_second", rate.to_string()));
            pairs.extend(keys.into_iter().zip(micros));
            writeln!(out, "{}", json_object(pairs)).map_err(unwritten)?;
        } else {
            let mut row = vec![command.to_owned()];
            row.extend(micros);
            table.add(row);
        }
    }
    table.print(&mut out).and_then(|()| out.flush()).map_err(unwritten)?;
    drop(out);
    if ctl.is_json {
        return Ok(());
    }
    let rate = grouped(u64::try_from(rate).unwrap_or(u64::MAX));
    print(&format!("{jobs} jobs in {seconds:.2} s: {rate} jobs per second"))
}
