//! Much that falls due at once, or must be done in one go: how long others wait meanwhile,
//! whether it is done in time, and what a timer costs.

use super::{Round, Scenario, Settings, Turns};
use crate::client::{Limits, Outcome, Pool, Question, Run, TooSlow};
use crate::figures::Figures;
use crate::load::{Consume, Cycle, CycleUntil, Delay, Drain, Fill, Rescue, Say, Take};
use crate::server::Server;
use crate::waits::Waits;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

pub fn all() -> Vec<Scenario> {
    vec![
        once("delayed-1m", 1, "a million delayed jobs due within one second", delayed),
        once(
            "delayed-consumed",
            1,
            "a million delayed jobs due within five seconds, in bursts, and a consumer that \
             pipelines; latencies, without the time in which server or client waited for a core, \
             are of a client beside it that puts, reserves and deletes one by one",
            consumed,
        ),
        once(
            "ttrs-10k",
            3,
            "10,000 TTRs of one connection run out at once; it is silent until they have",
            ttrs,
        ),
        once("kick-100k", 3, "kick of 100,000 buried jobs; until its reply", kick),
        once(
            "close-100k",
            3,
            "a connection that holds 100,000 jobs closes; until all are ready",
            close,
        ),
        silent_ttr(),
        once("timer-cost", 1, "200 delayed jobs, one due every 5 ms; an op is a timer", timer_cost),
    ]
}

fn silent_ttr() -> Scenario {
    let what = "200 jobs whose workers are silent, ttr 1: how many come to a waiting worker \
                within 2 ms of time";
    // Each worker waits for itself: a connection, and a poll for its readiness.
    Scenario { open_files: 2 * WORKERS, ..once("silent-ttr", 1, what, silent) }
}

/// A scenario that is over when it has happened.
fn once(
    name: &str,
    rounds: usize,
    what: &str,
    round: fn(&mut Server, patience: Duration) -> Outcome<Figures>,
) -> Scenario {
    let prepare = move |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        Ok(Box::new(move |server| round(server, patience)))
    };
    Scenario { rounds, turns: Turns::Alone, ..Scenario::new(name, what, prepare) }
}

fn delayed(server: &mut Server, patience: Duration) -> Outcome<Figures> {
    const JOBS: usize = 1_000_000;
    /// Time to put them all.
    const HORIZON: Duration = Duration::from_secs(15);
    let mut pool = Pool::with_probe(server.address, 1, Question::PeekDelayed, server.waits());
    let due = Instant::now() + HORIZON;
    let mut fill = Fill::with_priorities(JOBS, 64);
    fill.delay = Delay::Until(due);
    let limits = Limits::within(HORIZON - Duration::from_secs(1));
    let filled = server.measure(|| pool.run(&mut fill, limits))?;
    pool.take_stalls();
    // They fall due in the second before; until then the probe would only cost.
    sleep_until(due - Duration::from_millis(1100));
    let before_ns = server.cpu_ns();
    pool.watch_for_none(HORIZON + patience);
    let stalls = pool.take_stalls();
    let mut figures = stalls.figures("");
    let ready_at = stalls.none_found_at.ok_or(TooSlow)?;
    figures.add("late_ms", ready_at.saturating_duration_since(fill.last_due).as_secs_f64() * 1e3);
    figures.add("fill_cpu_us_per_op", filled.cpu_us / filled.ops);
    figures.add("cpu_us_per_timer", (server.cpu_ns() - before_ns) as f64 / 1e3 / JOBS as f64);
    Ok(figures)
}

/// The client is a thread of its own, so that it does not wait until the consumer has read its
/// replies. A slow server does not get done with all jobs.
fn consumed(server: &mut Server, patience: Duration) -> Outcome<Figures> {
    const JOBS: usize = 1_000_000;
    const TIME: Duration = Duration::from_secs(2 * WINDOW.as_secs());
    let due_from = fill_for_a_window(server, JOBS, patience)?;
    let mut consumer = Pool::connect(server.address, 1);
    let (address, pid) = (server.address, server.pid());
    let mut consume = Consume::new(JOBS);
    let is_consumed = AtomicBool::new(false);
    sleep_until(due_from);
    let measured = server.measure(|| {
        thread::scope(|scope| {
            let client = scope.spawn(|| cycle_until(&is_consumed, address, pid));
            let consumed = consumer.run(&mut consume, Limits::lasting(TIME));
            is_consumed.store(true, Ordering::Relaxed);
            let run = client.join().expect("every reply is one that the client knows")?;
            Ok(Run { replies: run.replies + consumed?.replies, ..run })
        })
    })?;
    let mut figures = Figures::default();
    figures.add("jobs_per_s", (JOBS - consume.left()) as f64 / measured.elapsed_s);
    figures.append(measured.figures());
    Ok(figures)
}

/// The time in which delayed jobs come due. A whole number of seconds, as delays are.
const WINDOW: Duration = Duration::from_secs(5);

/// Puts delayed jobs at a rate that any server can take, so that they come due at the same times
/// whatever server it is: in the window that begins at the time that is returned, in bursts.
fn fill_for_a_window(server: &Server, jobs: usize, patience: Duration) -> Outcome<Instant> {
    const BURST: usize = 10_000;
    const PERIOD: Duration = Duration::from_millis(100);
    /// The last jobs are put in the tenth second.
    const HORIZON: Duration = Duration::from_secs(12);
    let mut producer = Pool::connect(server.address, 1);
    let start = Instant::now();
    let mut next_at = start;
    for _ in 0..jobs / BURST {
        sleep_until(next_at);
        next_at += PERIOD;
        let windows = start.elapsed().as_secs() / WINDOW.as_secs();
        let delay = HORIZON.as_secs().saturating_sub(windows * WINDOW.as_secs());
        let mut fill = Fill::with_priorities(BURST, 64);
        fill.delay = Delay::Seconds(u32::try_from(delay).expect("it is at most the horizon"));
        producer.run(&mut fill, Limits::within(patience))?;
    }
    Ok(start + HORIZON)
}

/// Puts, reserves and deletes one by one, in a tube of its own.
fn cycle_until(is_over: &AtomicBool, address: SocketAddr, pid: u32) -> Outcome<Run> {
    /// Far longer than the other thread takes; a server that stops replying is too slow.
    const PATIENCE: Duration = Duration::from_secs(120);
    let limits = Limits::within(PATIENCE);
    let mut pool = Pool::without_noise(address, 1, Waits::of(pid));
    let lines = ["use own", "watch own", "ignore default"].map(str::to_owned);
    pool.run(&mut Say::one_by_one(lines), limits)?;
    pool.run(&mut CycleUntil::new(Cycle::new(1, 1, 64), is_over), limits)
}

fn ttrs(server: &mut Server, patience: Duration) -> Outcome<Figures> {
    const JOBS: usize = 10_000;
    let mut pool = Pool::with_probe(server.address, 1, Question::Use, server.waits());
    let mut fill = Fill::new(JOBS, 64);
    fill.ttr_s = 1;
    pool.run(&mut fill, Limits::within(patience))?;
    pool.run(&mut Take::new(JOBS), Limits::within(patience))?;
    pool.take_stalls();
    pool.watch(Duration::from_secs(2));
    // C beanstalkd may notice only now.
    pool.run(&mut Say::one_by_one(["use default".to_owned()]), Limits::within(patience))?;
    pool.watch(AFTERMATH);
    Ok(pool.take_stalls().figures(""))
}

fn kick(server: &mut Server, patience: Duration) -> Outcome<Figures> {
    const JOBS: usize = 100_000;
    let mut pool = Pool::with_probe(server.address, 1, Question::Use, server.waits());
    pool.run(&mut Fill::new(JOBS, 64), Limits::within(patience))?;
    pool.run(&mut Drain::burying(JOBS), Limits::within(patience))?;
    pool.take_stalls();
    let start = Instant::now();
    pool.run(&mut Say::one_by_one([format!("kick {JOBS}")]), Limits::within(patience))?;
    let kick = start.elapsed();
    pool.watch(AFTERMATH);
    let mut figures = pool.take_stalls().figures("");
    figures.add("kick_ms", kick.as_secs_f64() * 1e3);
    Ok(figures)
}

fn close(server: &mut Server, patience: Duration) -> Outcome<Figures> {
    const JOBS: usize = 100_000;
    let mut holder = Pool::connect(server.address, 1);
    holder.run(&mut Fill::with_priorities(JOBS, 64), Limits::within(patience))?;
    holder.run(&mut Take::new(JOBS), Limits::within(patience))?;
    let mut others = Pool::with_probe(server.address, 0, Question::ReadyJobs, server.waits());
    others.watch(Duration::from_millis(10));
    others.take_stalls();
    let start = Instant::now();
    drop(holder);
    others.watch_for_ready(JOBS as u64, patience);
    let close = start.elapsed();
    others.watch(AFTERMATH);
    let stalls = others.take_stalls();
    if stalls.ready_jobs < JOBS as u64 {
        return Err(TooSlow);
    }
    let mut figures = stalls.figures("");
    figures.add("close_ms", close.as_secs_f64() * 1e3);
    Ok(figures)
}

/// What was put off is felt within this time.
const AFTERMATH: Duration = Duration::from_secs(1);

/// The silent workers.
const WORKERS: usize = 200;

fn silent(server: &mut Server, patience: Duration) -> Outcome<Figures> {
    const ON_TIME: Duration = Duration::from_millis(2);
    let mut rescuer = Pool::connect(server.address, 1);
    let mut fill = Fill::new(WORKERS, 64);
    fill.ttr_s = 1;
    rescuer.run(&mut fill, Limits::within(patience))?;
    let holders = (0..WORKERS).map(|_| Holder::new(server, patience));
    let holders = holders.collect::<Outcome<Vec<Holder>>>()?;
    let mut rescue = Rescue::default();
    rescuer.run(&mut rescue, Limits::within(patience))?;
    let due: HashMap<u64, Instant> = holders.iter().map(|holder| (holder.id, holder.due)).collect();
    let late = |&(id, came_at): &(u64, Instant)| came_at.saturating_duration_since(due[&id]);
    let lateness: Vec<Duration> = rescue.came.iter().map(late).collect();
    let on_time = lateness.iter().filter(|&&late| late <= ON_TIME).count();
    let percent = |count: usize| 100.0 * count as f64 / WORKERS as f64;
    let worst = lateness.iter().max().copied().unwrap_or_default();
    let mut figures = Figures::default();
    figures.add("on_time_percent", percent(on_time));
    figures.add("handed_on_percent", percent(lateness.len()));
    figures.add("worst_late_ms", worst.as_secs_f64() * 1e3);
    Ok(figures)
}

/// A worker that has reserved a job and sends no more commands.
struct Holder {
    _connection: Pool,
    id: u64,
    /// When its TTR has run out.
    due: Instant,
}

impl Holder {
    fn new(server: &Server, patience: Duration) -> Outcome<Holder> {
        const TTR: Duration = Duration::from_secs(1);
        /// Spread, so that the TTRs end one after the other.
        const PAUSE: Duration = Duration::from_millis(3);
        let mut connection = Pool::connect(server.address, 1);
        let mut take = Take::new(1);
        connection.run(&mut take, Limits::within(patience))?;
        let due = Instant::now() + TTR;
        thread::sleep(PAUSE);
        Ok(Holder { _connection: connection, id: take.ids[0], due })
    }
}

/// Twice: a tracer that counts system calls costs the server processor time.
fn timer_cost(server: &mut Server, patience: Duration) -> Outcome<Figures> {
    let mut figures = fire_timers(server, patience)?.only(&["cpu_us_per_op"]);
    server.is_traced = true;
    figures.append(fire_timers(server, patience)?.only(&["syscalls_per_op"]));
    Ok(figures)
}

/// Puts jobs with a delay, and measures while nothing happens but that they become ready.
fn fire_timers(server: &Server, patience: Duration) -> Outcome<Figures> {
    const JOBS: u32 = 200;
    const PERIOD: Duration = Duration::from_millis(5);
    /// Longer than it takes to put them all.
    const DELAY_S: u32 = 2;
    let mut pool = Pool::connect(server.address, 1);
    let start = Instant::now();
    for index in 0..JOBS {
        let mut fill = Fill::new(1, 64);
        fill.delay = Delay::Seconds(DELAY_S);
        pool.run(&mut fill, Limits::within(patience))?;
        sleep_until(start + PERIOD * (index + 1));
    }
    let end = start + Duration::from_secs(DELAY_S.into()) + PERIOD * (JOBS + 1);
    let measured = server.measure(|| {
        sleep_until(end);
        Ok(Run { replies: JOBS.into(), latencies: Vec::new() })
    })?;
    Ok(measured.figures())
}

fn sleep_until(end: Instant) {
    thread::sleep(end.saturating_duration_since(Instant::now()));
}
