//! The server under stress: the binary in a process of its own, on loopback.
//!
//! `make soak` runs all scenarios, about five minutes, and `make soak ARGS='--minutes 60 --only
//! churn'` runs one of them for an hour. Each prints a line of measurements. A scenario that finds an
//! error prints it, and the program fails. `cargo test` runs one small round of each. This file owns
//! the command line.
#![allow(unreachable_pub, reason = "a program has no interface")]
#![allow(clippy::disallowed_methods, reason = "a scenario measures time from outside")]

mod backlog;
mod beside;
mod connections;
mod descriptors;
#[path = "../harness/mod.rs"]
mod harness;
mod ledger;
mod memory;
mod run;
mod session;
mod slow;
mod timers;
mod workers;

use getopts::Options;
use harness::program;
use libtest_mimic::{Arguments, Trial};
use run::{Outcome, Run};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One way to stress the server.
struct Scenario {
    name: &'static str,
    /// How long it is played by default.
    lasts_s: u64,
    what: &'static str,
    play: fn(&Run) -> Outcome,
}

fn scenarios() -> Vec<Scenario> {
    let scenario = |name, lasts_s, what, play| Scenario { name, lasts_s, what, play };
    vec![
        scenario("connections", 20, "10,000 at once, then none", connections::at_once),
        scenario("slow", 20, "clients that write byte by byte, or do not read", slow::clients),
        scenario("descriptors", 15, "more clients than descriptors", descriptors::run_out),
        scenario("memory", 30, "less memory than is asked for", memory::run_out),
        scenario("clock", 15, "the time of day is set forward and back", timers::clock_is_set),
        scenario("stopped", 15, "a server that is stopped for seconds", timers::server_is_stopped),
        scenario("storms", 20, "clients that connect, send something and leave", workers::storms),
        scenario("workers", 30, "50 workers that crash at any point", workers::crash),
        scenario("workers-killed", 40, "the same, and the server is killed", workers::survive),
        scenario("churn-plain", 30, "jobs, tubes and clients come and go", workers::churn),
        scenario("churn-binlog", 30, "the same with small binlog files", workers::churn_files),
        scenario("backlog", 400, "16 GB of jobs with 1 GiB of memory", backlog::larger_than_memory),
    ]
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().is_none_or(|first| first != "--soak") {
        return test();
    }
    match soak(arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(wrong) => {
            eprintln!("soak: {wrong}\nmake soak ARGS=--help lists the flags");
            ExitCode::from(2)
        }
    }
}

/// A test for the small round of each scenario.
fn test() -> ExitCode {
    let trial = |Scenario { name, play, .. }: Scenario| {
        Trial::test(name, move || {
            play(&Run::short());
            Ok(())
        })
    };
    let trials = scenarios().into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

const USAGE: &str = "Use: make soak ARGS='[OPTIONS]'

Puts the server under stress, on loopback, and fails when it breaks a promise.";

/// Runs the scenarios that the flags choose; returns whether none has found an error.
fn soak(arguments: impl Iterator<Item = String>) -> Result<bool, String> {
    let mut options = Options::new();
    options
        .optmulti("", "only", "only scenarios with this in their names; may be repeated", "TEXT")
        .optopt("", "minutes", "minutes of each scenario (default: see --list)", "N")
        .optopt("", "seed", "the seed of all random numbers (default: another each time)", "N")
        .optflag("", "list", "list the scenarios, run none")
        .optflag("h", "help", "show this help");
    let matches = options.parse(arguments).map_err(|fail| fail.to_string())?;
    if matches.opt_present("help") {
        println!("{}", options.usage(USAGE));
        return Ok(true);
    }
    if let Some(free) = matches.free.first() {
        return Err(format!("{free}: unknown argument"));
    }
    let scenarios = program::chosen(&matches, scenarios(), |scenario| scenario.name)?;
    if matches.opt_present("list") {
        for Scenario { name, lasts_s, what, .. } in &scenarios {
            println!("{name:16} {what} ({lasts_s} s)");
        }
        return Ok(true);
    }
    let minutes: Option<f64> = program::number(&matches, "minutes")?;
    let lasts = minutes.map(|minutes| Duration::try_from_secs_f64(minutes * 60.0)).transpose();
    let lasts = lasts.map_err(|error| format!("--minutes: {error}"))?;
    let seed = program::number(&matches, "seed")?.unwrap_or_else(|| fastrand::u64(1..1_000_000));
    println!("seed {seed}, up to {} open files", program::raise_open_files());
    keep_first_panic();
    let broken = scenarios.iter().filter(|scenario| {
        let lasts = lasts.unwrap_or(Duration::from_secs(scenario.lasts_s));
        !is_kept(scenario, &Run::whole(seed, lasts))
    });
    Ok(broken.count() == 0)
}

/// Runs one scenario and prints its result.
fn is_kept(scenario: &Scenario, run: &Run) -> bool {
    let (name, start) = (scenario.name, Instant::now());
    let outcome = catch_unwind(AssertUnwindSafe(|| (scenario.play)(run)));
    let elapsed_s = start.elapsed().as_secs();
    let first_panic = FIRST_PANIC.lock().expect("no thread panics with it").take();
    match &outcome {
        Ok(Some(figures)) => println!("ok      {name} ({elapsed_s} s): {figures}"),
        Ok(None) => println!("SKIPPED {name}"),
        Err(_) => println!("BROKEN  {name} ({elapsed_s} s): {}", first_panic.unwrap_or_default()),
    }
    outcome.is_ok()
}

/// The message of the first panic, which is the cause of later ones.
static FIRST_PANIC: Mutex<Option<String>> = Mutex::new(None);

fn keep_first_panic() {
    std::panic::set_hook(Box::new(|info| {
        let mut first = FIRST_PANIC.lock().expect("no thread panics with it");
        first.get_or_insert_with(|| info.to_string());
    }));
}
