//! Many clients, all commands, a disk that tears, fails, fills up and forgets, and time that
//! jumps: years of it in minutes, and the same again from the same seed.
//!
//! A world comes from a seed (`generator`). Whatever happens in it happens to the engine and to a
//! slow and obvious `model`, which predicts every byte that is said, and after each call
//! `Server::check` recounts all there is. What fails is made as short as it can be, and told as a
//! history, one event a line. Histories that failed once are kept in `tests/simulation/past`.
//!
//! `make simulate SEED=n STEPS=n` lets one world go on for so many events; without a seed, `make
//! simulate FOR_SECONDS=n` makes new worlds for so long. `HISTORY=FILE make simulate` replays a file.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod fake_disk;
mod made_up;
mod support;

#[allow(unreachable_pub, reason = "a part of this program only")]
#[allow(clippy::wildcard_enum_match_arm, reason = "the model asks for one state at a time")]
mod simulation {
    pub mod event;
    pub mod generator;
    pub mod journal;
    pub mod model;
    pub mod original;
    pub mod shrink;
    pub mod words;
    pub mod world;
}

use simulation::event::{Event, Setup};
use simulation::generator::Generator;
use simulation::original::Original;
use simulation::shrink::{self, replay};
use simulation::world::{World, Wrong};
use std::path::Path;
use std::time::{Duration, Instant};

/// So many events happen in a world that is not asked for by its seed.
const STEPS: u64 = 3_000;
/// How long `cargo test` makes new worlds.
const FOR_SECONDS: u64 = 6;

#[test]
fn worlds_nobody_has_seen_before() {
    let sum = new_worlds(Duration::from_secs(number("FOR_SECONDS").unwrap_or(FOR_SECONDS)));
    assert!(sum.steps > 0, "nothing has happened");
}

#[test]
fn histories_that_failed_once() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulation/past");
    let mut count = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let (setup, history) = read(&path);
        if let Err(wrong) = replay(setup, &history) {
            panic!("{}: {wrong}", path.display());
        }
        count += 1;
    }
    assert!(count > 0, "there are none");
}

/// The same seed makes the same history, or a failure could not be found again.
#[test]
fn a_seed_makes_one_history() {
    for seed in 0..20 {
        let history = || {
            let mut generator = Generator::new(seed);
            let mut world = World::new(generator.setup).unwrap();
            let mut history = Vec::new();
            for _ in 0..500 {
                let event = generator.next(&world);
                world.apply(&event).unwrap();
                history.push(event.to_string());
            }
            history
        };
        let (first, second) = (history(), history());
        assert_eq!(first, second);
        let parsed: Vec<Event> = first.iter().map(|line| line.parse().unwrap()).collect();
        assert!(parsed.iter().map(Event::to_string).eq(first), "a line is read as it is written");
    }
}

/// What the server says to clients that come in no time's reach, C beanstalkd says too.
#[test]
fn c_beanstalkd_says_the_same() {
    let Some(path) = support::c_beanstalkd() else {
        return eprintln!("SKIPPED: C beanstalkd is not installed, so nothing is compared with it");
    };
    let seeds = number("C_SEEDS").unwrap_or(10);
    // The same ones each time: how fast two processes are is not in anybody's hand.
    let first = number("SEED").unwrap_or(0);
    for seed in first..first + seeds {
        let mut generator = Generator::timeless(seed);
        let mut world = World::new(generator.setup).unwrap();
        let mut original = Original::start(&path, generator.setup);
        for step in 0..STEPS / 3 {
            let event = generator.next(&world);
            let compared = original.compare(&mut world, &event);
            assert!(compared.is_ok(), "SEED={seed}, step {step}, {event}: {compared:?}");
        }
    }
}

#[test]
#[ignore = "make simulate"]
fn simulate() {
    if let Ok(path) = std::env::var("HISTORY") {
        let (setup, history) = read(Path::new(&path));
        replay(setup, &history).unwrap();
        return println!("{path}: {} events, and nothing is wrong", history.len());
    }
    let began_at = now();
    let sum = match number("SEED") {
        Some(seed) => live(seed, number("STEPS").unwrap_or(STEPS)),
        None => new_worlds(Duration::from_secs(number("FOR_SECONDS").unwrap_or(60))),
    };
    let millis = u64::try_from(began_at.elapsed().as_millis()).unwrap().max(1);
    println!(
        "{} events in {} worlds, {} starts on what was left: nothing is wrong; {} events a second",
        sum.steps,
        sum.worlds,
        sum.lives - sum.worlds,
        sum.steps * 1000 / millis
    );
}

/// What has happened.
#[derive(Default)]
struct Sum {
    steps: u64,
    worlds: u64,
    /// How often a server was started.
    lives: u64,
}

/// Makes one world after another for so long.
fn new_worlds(span: Duration) -> Sum {
    let began_at = now();
    let mut sum = Sum::default();
    while began_at.elapsed() < span {
        let one = live(fastrand::u64(..1 << 40), STEPS);
        sum.steps += one.steps;
        sum.worlds += one.worlds;
        sum.lives += one.lives;
    }
    sum
}

/// Lets the world of this seed live for so many events.
fn live(seed: u64, steps: u64) -> Sum {
    let mut generator = Generator::new(seed);
    let mut world = World::new(generator.setup).unwrap();
    for step in 0..steps {
        let event = generator.next(&world);
        if let Err(wrong) = shrink::apply(&mut world, &event) {
            fail(seed, step, &wrong);
        }
    }
    Sum { steps, worlds: 1, lives: world.lives }
}

/// Lives again through a world that failed at this step, to tell how.
fn fail(seed: u64, step: u64, wrong: &Wrong) -> ! {
    assert!(number("AS_IT_IS").is_none(), "SEED={seed} fails at step {step}: {wrong}");
    eprintln!("SEED={seed} fails at step {step}: {wrong}\n\nIt is made shorter ...");
    // Most of what follows panics too.
    std::panic::set_hook(Box::new(|_| {}));
    let mut generator = Generator::new(seed);
    let mut world = World::new(generator.setup).unwrap();
    let mut history = Vec::new();
    for _ in 0..=step {
        let event = generator.next(&world);
        let _ = shrink::apply(&mut world, &event);
        history.push(event);
    }
    let history = shrink::shrink(generator.setup, &history);
    let wrong = replay(generator.setup, &history).expect_err("it has just failed");
    let _ = std::panic::take_hook();
    eprintln!("\n{}", generator.setup);
    history.iter().for_each(|event| eprintln!("{event}"));
    panic!(
        "SEED={seed} STEPS={} fails, and so do these {} events: {wrong}",
        step + 1,
        history.len()
    );
}

/// A history that is kept: lines that begin with a number sign tell of it.
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
