//! The server under stress: the binary in a process of its own, on loopback.
//!
//! `make soak` runs all scenarios, about five minutes, and `make soak ARGS='--minutes 60 --only
//! churn'` runs one of them for an hour. Each prints a line of measurements. A scenario that finds an
//! error prints it, and the program fails. `cargo test` runs the short form of each: one round of few
//! clients, in which nothing depends on the speed of the machine.
//!
//! This file owns the command line, [`scenarios`] what is checked.
#![allow(unreachable_pub, reason = "a program has no interface")]
#![allow(clippy::disallowed_methods, reason = "a scenario looks at the clock from outside")]

#[path = "../harness/mod.rs"]
mod harness;
mod scenarios;

use getopts::Options;
use harness::program;
use libtest_mimic::{Arguments, Trial};
use scenarios::{Form, Run, Scenario, Skipped};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// What makes the test the program.
const SOAK: &str = "--soak";

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_none_or(|first| first != SOAK) {
        return test();
    }
    arguments.remove(0);
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(Wrong(what)) => {
            eprintln!("soak: {what}\nmake soak ARGS=--help lists the flags");
            ExitCode::from(2)
        }
    }
}

/// A test for the short form of each scenario.
fn test() -> ExitCode {
    let trial = |scenario: Scenario| {
        Trial::test(scenario.name, move || {
            if let Err(Skipped(why)) = scenario.run(&Run::new(Form::Short, 1, Duration::ZERO)) {
                harness::skip(&format!("{}: {why}", scenario.name));
            }
            Ok(())
        })
    };
    let trials = scenarios::all().into_iter().map(trial).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

const USAGE: &str = "Use: make soak ARGS='[OPTIONS]'

Puts the server under stress, on loopback, and fails when it breaks a promise.";

/// An error of the command line.
struct Wrong(String);

fn options() -> Options {
    let mut options = Options::new();
    options
        .optmulti("", "only", "only scenarios with this in their names; may be repeated", "TEXT")
        .optopt("", "minutes", "minutes of each scenario (default: see --list)", "N")
        .optopt("", "seed", "what all chance comes from (default: another each time)", "N")
        .optflag("", "list", "list the scenarios, run none")
        .optflag("h", "help", "show this help");
    options
}

/// Whether all that was promised was kept.
fn run(arguments: &[String]) -> Result<bool, Wrong> {
    let matches = options().parse(arguments).map_err(|fail| Wrong(fail.to_string()))?;
    if matches.opt_present("help") {
        println!("{}", options().usage(USAGE));
        return Ok(true);
    }
    if let Some(free) = matches.free.first() {
        return Err(Wrong(format!("{free}: what is this?")));
    }
    let scenarios =
        program::chosen(&matches, scenarios::all(), |scenario| scenario.name).map_err(Wrong)?;
    if matches.opt_present("list") {
        for Scenario { name, what, lasts, .. } in &scenarios {
            println!("{name:16} {what} ({} s)", lasts.as_secs());
        }
        return Ok(true);
    }
    let minutes: Option<f64> = program::number(&matches, "minutes").map_err(Wrong)?;
    let lasts = minutes.map(|minutes| Duration::try_from_secs_f64(minutes * 60.0));
    let lasts = lasts.transpose().map_err(|error| Wrong(format!("--minutes: {error}")))?;
    let seed = program::number(&matches, "seed")
        .map_err(Wrong)?
        .unwrap_or_else(|| fastrand::u64(1..1_000_000));
    println!("seed {seed}, up to {} open files", program::raise_open_files());
    keep_first_panic();
    let mut is_kept = true;
    for scenario in &scenarios {
        let run = Run::new(Form::Whole, seed, lasts.unwrap_or(scenario.lasts));
        is_kept &= play(scenario, &run);
    }
    Ok(is_kept)
}

/// Runs one scenario and prints its result.
fn play(scenario: &Scenario, run: &Run) -> bool {
    let (name, start) = (scenario.name, Instant::now());
    let outcome = catch_unwind(AssertUnwindSafe(|| scenario.run(run)));
    let elapsed_s = start.elapsed().as_secs();
    let first_panic = FIRST_PANIC.lock().expect("no thread panics with it").take();
    match outcome {
        Ok(Ok(figures)) => println!("ok      {name} ({elapsed_s} s): {figures}"),
        Ok(Err(Skipped(why))) => println!("SKIPPED {name}: {why}"),
        Err(_) => {
            println!("BROKEN  {name} ({elapsed_s} s): {}", first_panic.unwrap_or_default());
            return false;
        }
    }
    true
}

/// The message of the first panic, which is the cause of later ones.
static FIRST_PANIC: Mutex<Option<String>> = Mutex::new(None);

fn keep_first_panic() {
    std::panic::set_hook(Box::new(|info| {
        let mut first = FIRST_PANIC.lock().expect("no thread panics with it");
        first.get_or_insert_with(|| info.to_string());
    }));
}
