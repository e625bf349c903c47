//! The server at scale: many clients, jobs or seconds. `cargo test` plays one small round of each
//! scenario, in which nothing depends on the speed of the machine. `make soak` plays each for its time,
//! and prints what it measures. Scenarios with clients that work at random are in `cluster/soak.py`.

mod backlog;
mod connections;
mod memory;
mod timers;

use crate::harness::process::{BEANSTALKD, command, text};
use crate::harness::skip;
use fastrand::Rng;
use std::str::FromStr;
use std::time::{Duration, Instant};

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

/// Makes a test of each scenario: its name, its seconds, and how it is played.
macro_rules! scenarios {
    ($($name:ident, $seconds:literal, $scenario:expr;)*) => {
        $(#[test]
        fn $name() {
            play($seconds, $scenario);
        })*
    };
}

scenarios! {
    // 10,000 clients at once, then none.
    connections, 20, connections::at_once;
    // Less memory than clients ask for.
    memory, 30, memory::run_out;
    // The time of day is set forward and back.
    clock, 15, timers::clock_is_set;
    // The server is stopped for seconds.
    stopped, 15, timers::server_is_stopped;
    // Clients that connect, send something and leave.
    storms, 20, |run| with_checker(run, "storms");
    // 50 workers that crash at any point; with a server that is killed, too.
    workers, 30, |run| with_checker(run, "workers");
    workers_killed, 40, |run| with_checker(run, "workers-killed");
    // Jobs, tubes and clients come and go, and memory stays; with small binlog files, too.
    churn_plain, 30, |run| with_checker(run, "churn-plain");
    churn_binlog, 30, |run| with_checker(run, "churn-binlog");
    // 16 GB of jobs with 1 GiB of memory.
    backlog, 400, backlog::larger_than_memory;
}

/// Plays a scenario of `cluster/soak.py`, where the checker of clusters verifies what clients saw.
fn with_checker(run: &Run, scenario: &str) -> String {
    const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cluster/soak.py");
    let (seed, seconds) = (run.seed.to_string(), run.lasts.as_secs_f64().to_string());
    let arguments = ["-B", SCRIPT, BEANSTALKD, scenario, &seed, &seconds];
    let Ok(output) = command("python3", arguments).output() else {
        skip("python3 is not installed");
        return String::new();
    };
    let figures = text(&output.stdout);
    assert!(output.status.success(), "{figures}{}", text(&output.stderr));
    figures.to_owned()
}
