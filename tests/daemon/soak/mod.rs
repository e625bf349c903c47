//! The server at scale: many clients, jobs or seconds. `cargo test` plays one small round of each
//! scenario, in which nothing depends on the speed of the machine. `make soak` plays each for its time,
//! and prints what it measures.

mod backlog;
mod connections;
mod ledger;
mod memory;
mod session;
mod timers;
mod workers;

use crate::harness::client::Client;
use crate::harness::request::put;
use fastrand::Rng;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How much of a scenario is played.
struct Run {
    /// Played for its time. Else it is one small round.
    is_whole: bool,
    seed: u64,
    lasts: Duration,
    started_at: Instant,
}

impl Run {
    /// Plays rounds until the time is over, at least one; returns their number.
    fn rounds(&self, mut round: impl FnMut()) -> usize {
        let mut count = 0;
        while count == 0 || self.has_time() {
            round();
            count += 1;
        }
        count
    }

    fn has_time(&self) -> bool {
        self.started_at.elapsed() < self.lasts
    }

    /// Returns the number for this form.
    fn size(&self, [short, whole]: [usize; 2]) -> usize {
        if self.is_whole { whole } else { short }
    }

    fn random(&self) -> Rng {
        Rng::with_seed(self.seed)
    }
}

/// A number that `make soak` hands on from its command line.
fn variable<N: FromStr>(name: &str) -> Option<N> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

/// Plays a scenario, which lasts for so many seconds unless `MINUTES` is set.
fn play(seconds: u32, scenario: impl FnOnce(&Run) -> String) {
    let is_whole = variable::<u8>("SOAK").is_some();
    let seconds = variable("MINUTES").map_or(f64::from(seconds), |minutes: f64| minutes * 60.0);
    let lasts = if is_whole { Duration::from_secs_f64(seconds) } else { Duration::ZERO };
    let new_seed = || if is_whole { fastrand::u64(1..1_000_000) } else { 1 };
    let seed = variable("SEED").unwrap_or_else(new_seed);
    println!("SEED={seed}");
    println!("{}", scenario(&Run { is_whole, seed, lasts, started_at: Instant::now() }));
}

/// 10,000 clients at once, then none.
#[test]
fn connections() {
    play(20, connections::at_once);
}

/// Less memory than clients ask for.
#[test]
fn memory() {
    play(30, memory::run_out);
}

/// The time of day is set forward and back.
#[test]
fn clock() {
    play(15, timers::clock_is_set);
}

/// The server is stopped for seconds.
#[test]
fn stopped() {
    play(15, timers::server_is_stopped);
}

/// Clients that connect, send something and leave.
#[test]
fn storms() {
    play(20, |run| workers::play(run, &workers::STORMS));
}

/// 50 workers that crash at any point.
#[test]
fn workers() {
    play(30, |run| workers::play(run, &workers::CRASH));
}

/// The same, and the server is killed.
#[test]
fn workers_killed() {
    play(40, |run| workers::play(run, &workers::KILLED));
}

/// Jobs, tubes and clients come and go, and memory stays.
#[test]
fn churn_plain() {
    play(30, |run| workers::play(run, &workers::CHURN));
}

/// The same with small binlog files.
#[test]
fn churn_binlog() {
    play(30, |run| workers::play(run, &workers::CHURN_FILES));
}

/// 16 GB of jobs with 1 GiB of memory.
#[test]
fn backlog() {
    play(400, backlog::larger_than_memory);
}

// ---- A client beside ----

/// Puts, reserves and deletes one job after another in a tube of its own while `load` runs. Returns
/// the result of the load, and the number of jobs and the waits of the client in words.
fn with_client_beside<T>(address: SocketAddr, load: impl FnOnce() -> T) -> (T, String) {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let beside = scope.spawn(|| work_beside(address, &is_over));
        // The client must end if the load panics, too.
        let result = catch_unwind(AssertUnwindSafe(load));
        is_over.store(true, Ordering::Relaxed);
        let waits = beside.join().expect("the client beside is served");
        (result.unwrap_or_else(|panic| resume_unwind(panic)), words(waits))
    })
}

fn work_beside(address: SocketAddr, is_over: &AtomicBool) -> Vec<Duration> {
    const PAUSE: Duration = Duration::from_millis(1);
    let mut client = Client::in_tube(address, "beside");
    let mut waits = Vec::new();
    loop {
        let mut ask = |request: &[u8]| {
            let start = Instant::now();
            let reply = client.ask(request);
            waits.push(start.elapsed());
            reply
        };
        let id = ask(&put(0, 0, 60, b"beside")).inserted();
        assert_eq!(ask(b"reserve\r\n").number("RESERVED"), Some(id));
        assert_eq!(ask(format!("delete {id}\r\n").as_bytes()).line, "DELETED");
        if is_over.load(Ordering::Relaxed) {
            return waits;
        }
        std::thread::sleep(PAUSE);
    }
}

fn words(mut waits: Vec<Duration>) -> String {
    waits.sort_unstable();
    let [median, late, worst] =
        [500, 999, 1000].map(|thousandth| waits[(waits.len() - 1) * thousandth / 1000]);
    format!(
        "a client beside had {} jobs and waited {median:.0?} at the median, {late:.0?} at p99.9, \
         {worst:.0?} at most",
        waits.len() / 3
    )
}
