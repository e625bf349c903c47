//! Much that falls due at once, or must be done in one go: how long others wait meanwhile, and
//! whether it is done in time.

use super::{CONSUME, Scenario, meanwhile};
use crate::client::{Outcome, TooSlow};
use crate::harness::client::Client;
use crate::load::{Load, Run, Step};
use crate::probe::Probe;
use crate::report::Figures;
use crate::server::{PATIENCE, Server};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

/// As many jobs as a user of beanstalkd once wanted to delete.
const FLUSHED: usize = 711_769;
const MANY: usize = 100_000;

const CONSUMED: &str = "a million delayed jobs due within five seconds, in bursts, and a consumer \
    that pipelines; latencies, without the time in which server or client waited for a core, \
    are of a client beside it that puts, reserves and deletes one by one";
const TTRS: &str = "10,000 TTRs of one connection run out at once; it is silent until they have";
const CLOSE: &str = "a connection that holds 100,000 jobs closes; until all are ready (visible)";
const FLUSH: &str = "flush-tube of 711,769 jobs, until its reply (flush), and until a probe sees an \
    empty tube (visible); single: the jobs are reserved and deleted, 100 to a write";

pub fn all() -> Vec<Scenario> {
    vec![
        delayed("delayed-1m", 1_000_000, 0),
        delayed("delayed-busy", 300_000, 400),
        Scenario::new("delayed-consumed", 1, CONSUMED, consumed),
        Scenario::new("ttrs-10k", 3, TTRS, ttrs),
        Scenario::new("kick-100k", 3, "kick of 100,000 buried jobs; until its reply", kick),
        Scenario::new("close-100k", 3, CLOSE, close),
        Scenario::new("flush-712k", 3, FLUSH, flush),
    ]
}

// ---- Many jobs at once ----

/// Does something, on a thread of its own, that ends when this number of jobs of the tube `default`
/// is ready. Measures when a probe sees that: after `due`, or else after the start, without the time
/// in which server or client waited for a core; and the processor time and the stalls meanwhile.
fn at_once(
    server: &Server,
    due: Option<Instant>,
    ready: usize,
    act: impl FnOnce() -> Outcome<Figures> + Send,
) -> Outcome<Figures> {
    /// What was put off is felt within this time.
    const AFTERMATH: Duration = Duration::from_secs(1);
    let probe = Probe::start(server, "stats-tube default");
    probe.wait_for(PATIENCE, |_| true)?;
    probe.take_stalls()?;
    let (waits, before_ns) = (server.waits(), server.cpu_ns());
    let (start, waited_before) = (Instant::now(), waits.total());
    let see = || {
        let is_done = Some(ready as u64);
        let seen_at =
            probe.wait_for(5 * PATIENCE, |reply| reply.value("current-jobs-ready") == is_done)?;
        let noise = waits.total() - waited_before;
        Ok(match due {
            Some(due) => seen_at.saturating_duration_since(due),
            None => (seen_at - start).saturating_sub(noise),
        })
    };
    let (acted, visible) = meanwhile(|_| act(), see);
    let (acted, visible_ms) = (acted?, milliseconds(visible?));
    // The kernel counts the processor time of a running process in steps of some milliseconds.
    let cpu_ms = (server.cpu_ns() - before_ns) as f64 / 1e6;
    thread::sleep(AFTERMATH);
    let seen = Figures::of([("visible_ms", visible_ms), ("cpu_ms", cpu_ms)]);
    Ok(acted.with("", seen).with("", probe.take_stalls()?))
}

fn timed(name: &str, act: impl FnOnce() -> Outcome<()>) -> Outcome<Figures> {
    let start = Instant::now();
    act().map(|()| Figures::of([(name, milliseconds(start.elapsed()))]))
}

fn ttrs(server: &mut Server) -> Outcome<Figures> {
    const JOBS: usize = 10_000;
    let mut pool = server.connect(1);
    pool.run(&Load { ttr_s: 1, ..Load::put(JOBS) })?;
    pool.run(&Load::reserve(JOBS))?;
    let due = Instant::now() + Duration::from_secs(1);
    at_once(server, Some(due), JOBS, || {
        sleep_until(due + Duration::from_secs(1));
        // C beanstalkd may notice only now.
        pool.say("use default").map(|()| Figures::default())
    })
}

fn kick(server: &mut Server) -> Outcome<Figures> {
    let mut pool = server.connect(1);
    pool.run(&Load::put(MANY))?;
    pool.run(&Load::of_jobs(&[&[Step::Reserve], &[Step::Bury]], MANY))?;
    at_once(server, None, MANY, || timed("kick_ms", || pool.say(&format!("kick {MANY}"))))
}

fn close(server: &mut Server) -> Outcome<Figures> {
    let mut holder = server.connect(1);
    holder.run(&Load::put_with_priorities(MANY))?;
    holder.run(&Load::reserve(MANY))?;
    at_once(server, None, MANY, || {
        drop(holder);
        Ok(Figures::default())
    })
}

/// With the command if the server has it, and one by one.
fn flush(server: &mut Server) -> Outcome<Figures> {
    let mut figures = Figures::default();
    if server.has_extensions {
        server.run(&Load::put(FLUSHED))?;
        let flush = || {
            let reply = format!("FLUSHED {FLUSHED}");
            Client::connect(server.address).expect("flush-tube default\r\n", &reply);
            Ok(())
        };
        figures = at_once(server, None, 0, || timed("flush_ms", flush))?;
    }
    server.run(&Load::put(FLUSHED))?;
    let drain = || server.run(&Load::of_jobs(CONSUME, FLUSHED)).map(drop);
    Ok(figures.with("single_", at_once(server, None, 0, || timed("ms", drain))?))
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

fn sleep_until(end: Instant) {
    thread::sleep(end.saturating_duration_since(Instant::now()));
}

// ---- Delayed jobs ----

fn delayed(name: &str, jobs: usize, busy: usize) -> Scenario {
    /// Time to put them all.
    const HORIZON: Duration = Duration::from_secs(15);
    let what = format!(
        "{jobs} delayed jobs due within one second; beside them connections that put, reserve and \
         delete: {busy}; how late the last is ready (visible)"
    );
    let round = move |server: &mut Server| {
        let (due, before_ns) = (Instant::now() + HORIZON, server.cpu_ns());
        let last_due = put_delayed(server, jobs, Duration::ZERO, |now| {
            due.saturating_duration_since(now).as_secs()
        })?;
        let fill_us = (server.cpu_ns() - before_ns) as f64 / 1e3;
        // They fall due in the second before; until then the probe would only cost.
        let due_from = due - Duration::from_millis(1100);
        if Instant::now() > due_from {
            return Err(TooSlow);
        }
        sleep_until(due_from);
        let wait = || at_once(server, Some(last_due), jobs, || Ok(Figures::default()));
        let (others, figures) = beside(server, busy, wait);
        others?;
        Ok(figures?.with("", Figures::of([("fill_cpu_us_per_op", fill_us / jobs as f64)])))
    };
    Scenario { open_files: 500 + busy as u64, ..Scenario::new(name, 1, what, round) }
}

/// Does something while clients, on a thread of their own, put, reserve and delete one by one in a
/// tube of their own. Returns what their run has come to, too.
fn beside<T>(server: &Server, clients: usize, act: impl FnOnce() -> T) -> (Outcome<Run>, T) {
    meanwhile(
        |is_over| {
            let mut pool = server.connect(clients).without_noise(server.waits());
            for line in ["use own", "watch own", "ignore default"] {
                pool.say(line)?;
            }
            let mut all = Run::default();
            while clients > 0 && !is_over.load(Ordering::Relaxed) {
                all.append(pool.run_for(&Load::cycle(), Duration::from_millis(50))?);
            }
            Ok(all)
        },
        act,
    )
}

/// The client is a thread of its own, so that it does not wait until the consumer has read its
/// replies. A slow server does not get done with all jobs.
fn consumed(server: &mut Server) -> Outcome<Figures> {
    const JOBS: usize = 1_000_000;
    /// The time in which delayed jobs come due. A whole number of seconds, as delays are.
    const WINDOW_S: u64 = 5;
    const TIME: Duration = Duration::from_secs(2 * WINDOW_S);
    /// The last jobs are put in the tenth second.
    const HORIZON_S: u64 = 12;
    // At a rate that any server can take, so that jobs come due at the same times whatever server
    // it is.
    let (start, period) = (Instant::now(), Duration::from_millis(100));
    put_delayed(server, JOBS, period, |now| {
        let windows = (now - start).as_secs() / WINDOW_S;
        HORIZON_S.saturating_sub(windows * WINDOW_S)
    })?;
    let mut consumer = server.connect(1);
    // One write deletes the last batch and reserves the next.
    let consume = Load::of_jobs(&[&[Step::Delete, Step::Reserve]], JOBS);
    let mut consumed = 0;
    sleep_until(start + Duration::from_secs(HORIZON_S));
    let measured = server.measure(|| {
        let (all, run) = beside(server, 1, || consumer.run_for(&consume, TIME));
        let (mut all, run) = (all?, Run { latencies: Vec::new(), ..run? });
        consumed = run.deleted;
        all.append(run);
        Ok(all)
    })?;
    let jobs_per_s = consumed as f64 / measured.elapsed_s;
    Ok(Figures::of([("jobs_per_s", jobs_per_s)]).with("", measured.figures()))
}

/// Puts delayed jobs in bursts that begin at least so far apart; `delay_s` returns the delay of a
/// burst that begins now. Returns when the last job becomes ready.
fn put_delayed(
    server: &Server,
    jobs: usize,
    period: Duration,
    delay_s: impl Fn(Instant) -> u64,
) -> Outcome<Instant> {
    const BURST: usize = 10_000;
    let mut producer = server.connect(1);
    let mut next_at = Instant::now();
    let mut last_due = next_at;
    for _ in 0..jobs / BURST {
        sleep_until(next_at);
        next_at += period;
        let delay_s = delay_s(Instant::now());
        producer.run(&Load { delay_s, ..Load::put_with_priorities(BURST) })?;
        last_due = last_due.max(Instant::now() + Duration::from_secs(delay_s));
    }
    Ok(last_due)
}
