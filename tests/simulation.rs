//! A randomized simulation: many clients, all commands, a disk with faults, crashes and restarts,
//! and a simulated clock. The same seed repeats the same run.
//!
//! A seed generates a history of events (`generator`). The engine and a slow, obvious `model` both
//! get each of them (`driver`), and every reply must be one that the model allows. After each event
//! `Server::check` checks the engine's invariants. A history that fails is shortened and printed,
//! one event a line. Histories that failed once are kept in `tests/simulation/regressions`.
//!
//! `make simulate SEED=n STEPS=n` repeats one run. Without a seed, `make simulate FOR_SECONDS=n`
//! makes runs with random seeds. `make simulate HISTORY=FILE` replays a file.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod harness;

#[allow(unreachable_pub, reason = "a part of this program only")]
#[allow(clippy::wildcard_enum_match_arm, reason = "most matches look for one variant")]
mod simulation {
    pub mod c_beanstalkd;
    pub mod driver;
    pub mod event;
    pub mod generator;
    pub mod journal;
    pub mod model;
    pub mod request;
    pub mod shrink;
}

use simulation::c_beanstalkd::CBeanstalkd;
use simulation::driver::{Failure, Simulation};
use simulation::event::{Event, Setup};
use simulation::generator::Generator;
use simulation::shrink::{self, replay};
use std::fmt::Write as _;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The number of events in a run, unless `STEPS` gives another.
const STEPS: u64 = 3_000;
/// `cargo test` makes the runs of this many seeds, always the same ones.
const SEEDS: u64 = 200;
/// Runs in which each step of the disk is judged, and the events of each.
const STEPWISE_SEEDS: u64 = 24;
const STEPWISE_STEPS: u64 = 400;
/// The longest line that is printed.
const LINE_LEN: usize = 200;

#[test]
fn histories_of_the_first_seeds() {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let steps: u64 = std::thread::scope(|scope| {
        let of_core = |core| (core..SEEDS).step_by(cores).map(|seed| run(seed, STEPS).steps).sum();
        let runs: Vec<_> =
            (0..cores as u64).map(|core| scope.spawn(move || -> u64 { of_core(core) })).collect();
        runs.into_iter().map(|run| run.join().expect("a seed has failed, see above")).sum()
    });
    assert!(steps > SEEDS * STEPS * 9 / 10, "only {steps} events were applied");
}

/// What is acknowledged survives a kill, and what is synced a power cut, at each step of the disk.
#[test]
fn a_crash_at_each_step_loses_nothing() {
    for seed in 0..STEPWISE_SEEDS {
        let mut generator = Generator::of_records(seed);
        let mut simulation = Simulation::new(generator.setup).unwrap();
        simulation.judges_steps = true;
        for step in 0..STEPWISE_STEPS {
            let event = generator.next(&simulation);
            if let Err(failure) = shrink::apply(&mut simulation, &event) {
                panic!("{}", cut_lines(&format!("seed {seed}, step {step}, {event}: {failure}")));
            }
        }
    }
}

#[test]
fn regressions() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulation/regressions");
    let mut count = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let (setup, history) = read(&path);
        if let Err(failure) = replay(setup, &history) {
            panic!("{}: {}", path.display(), cut_lines(&failure));
        }
        count += 1;
    }
    assert!(count > 0, "there are no regressions");
}

/// Otherwise a failure could not be repeated.
#[test]
fn a_seed_generates_one_history() {
    for seed in 0..20 {
        let history = || {
            let mut generator = Generator::new(seed);
            let mut simulation = Simulation::new(generator.setup).unwrap();
            let mut history = Vec::new();
            for _ in 0..500 {
                let event = generator.next(&simulation);
                if let Err(failure) = shrink::apply(&mut simulation, &event) {
                    panic!("SEED={seed} fails: {}", cut_lines(&failure));
                }
                history.push(event);
            }
            (generator.setup, history)
        };
        let (setup, first) = history();
        assert_eq!((setup, &first), (history().0, &history().1));
        assert_eq!(setup.to_string().parse::<Setup>().unwrap(), setup);
        let parsed: Vec<Event> =
            first.iter().map(|event| event.to_string().parse().unwrap()).collect();
        assert_eq!(parsed, first, "a history is read as it was written");
    }
}

/// Replies that do not depend on time are those of C beanstalkd.
#[test]
fn c_beanstalkd_replies_alike() {
    let Some(path) = harness::process::c_beanstalkd() else {
        return harness::skip("C beanstalkd is not installed: no replies are compared");
    };
    // Always the same seeds: the real clock makes a failure hard enough to repeat.
    for seed in 0..10 {
        let mut generator = Generator::timeless(seed);
        let mut simulation = Simulation::new(generator.setup).unwrap();
        let mut original = CBeanstalkd::start(path.clone(), generator.setup);
        for step in 0..STEPS / 3 {
            let event = generator.next(&simulation);
            if let Err(failure) = original.compare(&mut simulation, &event) {
                panic!("{}", cut_lines(&format!("SEED={seed}, step {step}, {event}: {failure}")));
            }
        }
    }
}

#[test]
#[ignore = "make simulate"]
fn simulate() {
    if let Ok(path) = std::env::var("HISTORY") {
        let (setup, history) = read(Path::new(&path));
        if let Err(failure) = replay(setup, &history) {
            panic!("{}", cut_lines(&format!("{path}: {failure}")));
        }
        return println!("{path}: {} events without a failure", history.len());
    }
    let began_at = now();
    let total = if let Some(seed) = number("SEED") {
        run(seed, number("STEPS").unwrap_or(STEPS))
    } else {
        let seconds = number("FOR_SECONDS").unwrap_or(60);
        println!("runs a randomized simulation for {seconds} seconds");
        run_seeds(Duration::from_secs(seconds))
    };
    let millis = u64::try_from(began_at.elapsed().as_millis()).unwrap().max(1);
    println!(
        "{} events in {} runs with {} restarts, no failure; {} events per second",
        total.steps,
        total.runs,
        total.restarts,
        total.steps * 1000 / millis
    );
}

#[derive(Default)]
struct Total {
    steps: u64,
    runs: u64,
    restarts: u64,
}

/// Makes one run after another with random seeds.
fn run_seeds(span: Duration) -> Total {
    let began_at = now();
    let mut total = Total::default();
    while began_at.elapsed() < span {
        let one = run(fastrand::u64(..1 << 40), STEPS);
        total.steps += one.steps;
        total.runs += one.runs;
        total.restarts += one.restarts;
    }
    total
}

fn run(seed: u64, steps: u64) -> Total {
    let mut generator = Generator::new(seed);
    let mut simulation = Simulation::new(generator.setup).unwrap();
    let mut history = Vec::new();
    for step in 0..steps {
        let event = generator.next(&simulation);
        let applied = shrink::apply(&mut simulation, &event);
        history.push(event);
        if let Err(failure) = applied {
            // The model may have done what was due at once in another order than the engine. The generator
            // chooses events by the state of the model, so the run ends here either way.
            fail_unless_other_order_explains(seed, generator.setup, &history, &failure);
            return Total { steps: step, runs: 1, restarts: simulation.starts - 1 };
        }
    }
    Total { steps, runs: 1, restarts: simulation.starts - 1 }
}

/// Replays a run that has failed. Returns if another order of what was due at once explains all replies.
/// Otherwise shortens the history and prints it.
fn fail_unless_other_order_explains(seed: u64, setup: Setup, history: &[Event], first: &Failure) {
    let steps = history.len();
    if shrink::silently(|| replay(setup, history)).is_ok() {
        return;
    }
    let first = cut_lines(&format!("SEED={seed} fails at step {}: {first}", steps - 1));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("history-{seed}.txt"));
    if number("NO_SHRINK").is_some() {
        std::fs::write(&path, shrink::text_of(setup, history)).unwrap();
        panic!("{first}");
    }
    eprintln!("{first}\nshortening the history ...");
    let (text, failure) = shrink::shortest(setup, history);
    std::fs::write(&path, &text).unwrap();
    panic!(
        "\n\nthe shortest history found, {} events:\n\n{}\n\
         it fails with: {}\nto repeat the run:      make simulate SEED={seed} STEPS={steps}\n\
         to replay the history:  make simulate HISTORY={}\n",
        text.lines().count() - 1,
        cut_lines(&text),
        cut_lines(&failure),
        path.display()
    );
}

/// Shortens each line to what is printed.
fn cut_lines(text: &str) -> String {
    let mut result = String::new();
    for line in text.lines() {
        match line.char_indices().nth(LINE_LEN) {
            // Leave space for the note at the end.
            Some(_) => {
                let kept: String = line.chars().take(LINE_LEN - 30).collect();
                let missing = line.len() - kept.len();
                writeln!(result, "{kept} ... {missing} more bytes").unwrap();
            }
            None => writeln!(result, "{line}").unwrap(),
        }
    }
    result
}

/// Reads a history from a file. Lines that begin with a number sign are comments.
fn read(path: &Path) -> (Setup, Vec<Event>) {
    let text = std::fs::read_to_string(path).unwrap();
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let setup = lines.next().unwrap_or_default().parse().unwrap();
    (setup, lines.map(|line| line.parse().unwrap()).collect())
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

#[expect(clippy::disallowed_methods, reason = "only to know when to stop")]
fn now() -> Instant {
    Instant::now()
}
