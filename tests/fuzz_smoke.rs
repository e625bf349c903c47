//! The fuzz targets of `tests/fuzz` without libFuzzer. Each run of the tests feeds a target with its
//! seeds, with earlier findings, and with thousands of mutations of both. They are the same in each run.
//!
//! An input that fails is written to a file; `FUZZ_INPUT=FILE cargo test --test fuzz_smoke TARGET`
//! feeds only that one. `FUZZ_ROUNDS=100` tries a hundred times as many mutations.

mod harness;
#[path = "fuzz/mutator.rs"]
mod mutator;
#[path = "fuzz/seeds.rs"]
mod seeds;
#[path = "fuzz/targets/mod.rs"]
mod targets;

#[allow(dead_code, unreachable_pub, reason = "the targets use a part of it")]
#[allow(clippy::unwrap_used, reason = "in a test it is an assertion")]
#[allow(clippy::wildcard_enum_match_arm, reason = "most matches look for one variant")]
mod simulation {
    pub mod driver;
    pub mod event;
    pub mod generator;
    pub mod journal;
    pub mod model;
    pub mod request;
    pub mod shrink;
    pub mod world;
}

use mutator::Mutator;
use std::collections::BTreeSet;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use targets::TARGETS;

#[test]
fn connection() {
    feed("connection", 1_500);
}

#[test]
fn replay() {
    feed("replay", 500);
}

#[test]
fn every_finding_is_in_the_readme() {
    let findings = Path::new(FOLDER).join("findings");
    let readme = std::fs::read_to_string(findings.join("README.md"));
    let readme = readme.expect("the findings have a README");
    let names = readme.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let listed: BTreeSet<PathBuf> = names.map(|name| findings.join(name)).collect();
    let found = TARGETS.iter().flat_map(|(target, _)| findings_of(target)).collect();
    assert_eq!(listed, found);
}

/// Writes a file for each seed and finding below the directory `FUZZ_SEEDS`, for `make fuzz`.
#[test]
#[ignore = "writes files"]
fn write_seeds() {
    let home = std::env::var_os("FUZZ_SEEDS").expect("FUZZ_SEEDS names a directory");
    for (target, _) in TARGETS {
        let directory = Path::new(&home).join(target);
        std::fs::create_dir_all(&directory).expect("it can be made");
        for (place, seed) in starts_of(target).iter().enumerate() {
            std::fs::write(directory.join(format!("{place:04}")), seed).expect("it can be written");
        }
    }
}

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fuzz");

fn findings_of(target: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(Path::new(FOLDER).join("findings").join(target));
    let entries = entries.into_iter().flatten();
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be read").path()).collect();
    paths.sort();
    paths
}

/// Returns seeds and findings.
fn starts_of(target: &str) -> Vec<Vec<u8>> {
    let findings = findings_of(target);
    let findings = findings.iter().map(|path| std::fs::read(path).expect("it can be read"));
    seeds::of(target).into_iter().chain(findings).collect()
}

// ---- Feeding ----

/// Longer than any input takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

fn feed(name: &'static str, mutations: usize) {
    let target = targets::named(name);
    if let Some(path) = std::env::var_os("FUZZ_INPUT") {
        return target(&std::fs::read(path).expect("the input can be read"));
    }
    let rounds = std::env::var("FUZZ_ROUNDS");
    let rounds = rounds.map_or(1, |text| text.parse().expect("FUZZ_ROUNDS is a number"));
    let current = Arc::new(Mutex::new(Vec::new()));
    let next = Arc::clone(&current);
    let (done, is_done) = mpsc::channel();
    let feeder = std::thread::spawn(move || {
        let starts = starts_of(name);
        let mut mutator = Mutator::new(&starts);
        let mutated = (0..mutations * rounds).map(|_| mutator.next());
        for input in starts.iter().cloned().chain(mutated) {
            next.lock().expect("no thread panics with it").clone_from(&input);
            target(&input);
            done.send(()).expect("the receiver waits");
        }
    });
    let end = std::iter::repeat_with(|| is_done.recv_timeout(PATIENCE)).find_map(Result::err);
    let input = current.lock().expect("no thread panics with it").clone();
    assert_ne!(end, Some(RecvTimeoutError::Timeout), "{name} does not end: {}", keep(name, &input));
    if let Err(panic) = feeder.join() {
        eprintln!("{name}: the input is {}", keep(name, &input));
        resume_unwind(panic);
    }
    // The engine has not allocated what the length of a damaged record claims, which is up to 1 GiB.
    let peak_kib = harness::process::status_kib("self", "VmPeak:");
    assert!(peak_kib < 1 << 20, "the process had {peak_kib} KiB at its peak");
}

/// Writes the input to a file; returns its path and the input.
fn keep(target: &str, input: &[u8]) -> String {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz_smoke");
    let path = directory.join(target);
    let kept = std::fs::create_dir_all(&directory).and_then(|()| std::fs::write(&path, input));
    let place = kept.map_or_else(|error| error.to_string(), |()| path.display().to_string());
    format!("in {place}: {}", input.escape_ascii())
}
