//! The fuzz targets of `tests/fuzz` without libFuzzer. Each run of the tests feeds a target with its
//! seeds, with earlier findings, and with thousands of mutations of both. They are the same in each run.
//!
//! An input that fails is written to a file; `FUZZ_INPUT=FILE cargo test --test fuzz_smoke TARGET`
//! feeds only that one. `FUZZ_ROUNDS=100` tries a hundred times as many mutations.

mod harness;
#[path = "fuzz/seeds.rs"]
mod seeds;
#[path = "fuzz/targets/mod.rs"]
mod targets;

use std::collections::BTreeSet;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use targets::{TARGETS, Target};

#[test]
fn command() {
    feed("command", 60_000);
}

#[test]
fn connection() {
    feed("connection", 2_500);
}

#[test]
fn replay() {
    feed("replay", 1_200);
}

#[test]
fn options() {
    feed("options", 3_000);
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn findings_of(target: &str) -> Vec<PathBuf> {
    let directory = root().join("tests/fuzz/findings").join(target);
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be read").path()).collect();
    paths.sort();
    paths
}

#[test]
fn every_finding_is_in_the_readme() {
    let readme = root().join("tests/fuzz/findings/README.md");
    let readme = std::fs::read_to_string(readme).expect("the findings have a README");
    let listed: BTreeSet<&str> =
        readme.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let mut found = BTreeSet::new();
    for path in TARGETS.iter().flat_map(|(target, _)| findings_of(target)) {
        let path = path.strip_prefix(root().join("tests/fuzz/findings")).expect("it is there");
        found.insert(path.display().to_string());
    }
    let found: BTreeSet<&str> = found.iter().map(String::as_str).collect();
    assert_eq!(listed, found);
}

/// Writes a file for each seed and finding, below the directory `FUZZ_SEEDS`; for `make fuzz`.
#[test]
#[ignore = "writes files"]
fn write_seeds() {
    let directory = std::env::var_os("FUZZ_SEEDS").expect("FUZZ_SEEDS names a directory");
    for (target, _) in TARGETS {
        let directory = Path::new(&directory).join(target);
        std::fs::create_dir_all(&directory).expect("it can be made");
        for (place, seed) in starts_of(target).iter().enumerate() {
            std::fs::write(directory.join(format!("{place:04}")), seed).expect("it can be written");
        }
    }
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

fn feed(name: &str, mutations: usize) {
    let target = *TARGETS.iter().find(|(target, _)| *target == name).expect("it is a target");
    if let Some(path) = std::env::var_os("FUZZ_INPUT") {
        target.1(&std::fs::read(path).expect("the input can be read"));
        return;
    }
    let rounds = std::env::var("FUZZ_ROUNDS")
        .ok()
        .map_or(1, |text| text.parse().expect("FUZZ_ROUNDS is a number"));
    let current = Arc::new(Mutex::new(Vec::new()));
    let (done, is_done) = mpsc::channel();
    let feeder = {
        let current = Arc::clone(&current);
        std::thread::spawn(move || feed_all(target, mutations * rounds, &current, &done))
    };
    loop {
        match is_done.recv_timeout(PATIENCE) {
            Ok(()) => {}
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {
                let input = current.lock().expect("no thread panics with it").clone();
                panic!("{name}: after {PATIENCE:?} it still runs the input {}", keep(name, &input));
            }
        }
    }
    if let Err(panic) = feeder.join() {
        let input = current.lock().expect("no thread panics with it").clone();
        eprintln!("{name}: the input is {}", keep(name, &input));
        resume_unwind(panic);
    }
    check_memory();
}

fn feed_all(target: Target, mutations: usize, current: &Mutex<Vec<u8>>, done: &mpsc::Sender<()>) {
    let (name, run) = target;
    let starts = starts_of(name);
    let mut mutator = Mutator::new(&starts);
    let mutated = (0..mutations).map(|_| mutator.next());
    for input in starts.iter().cloned().chain(mutated) {
        current.lock().expect("no thread panics with it").clone_from(&input);
        run(&input);
        done.send(()).expect("the receiver waits");
    }
}

/// Writes the input to a file; returns its path and the input.
fn keep(target: &str, input: &[u8]) -> String {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fuzz_smoke");
    let path = directory.join(target);
    let kept = std::fs::create_dir_all(&directory).and_then(|()| std::fs::write(&path, input));
    let place = kept.map_or_else(|error| error.to_string(), |()| path.display().to_string());
    format!("in {place}: {}", input.escape_ascii())
}

/// Asserts that the engine has not allocated what the length of a damaged record claims, which is up
/// to 1 GiB.
fn check_memory() {
    let peak_kib = harness::process::status_kib("self", "VmPeak:");
    assert!(peak_kib < 1 << 20, "the process had {peak_kib} KiB at its peak");
}

// ---- Mutations ----

struct Mutator<'s> {
    random: fastrand::Rng,
    starts: &'s [Vec<u8>],
    words: Vec<Vec<u8>>,
}

const MAX_LEN: usize = 4096;

impl Mutator<'_> {
    fn new(starts: &[Vec<u8>]) -> Mutator<'_> {
        let dictionary = root().join("tests/fuzz/dictionary.txt");
        let dictionary = std::fs::read_to_string(dictionary).expect("there is a dictionary");
        let quoted = dictionary.lines().filter_map(|line| line.strip_prefix('"'));
        let words = quoted.map(|line| unescaped(line.strip_suffix('"').expect("quotes end")));
        Mutator { random: fastrand::Rng::with_seed(11), starts, words: words.collect() }
    }

    fn next(&mut self) -> Vec<u8> {
        let mut input = self.start();
        for _ in 0..self.random.usize(1..6) {
            self.mutate(&mut input);
        }
        input.truncate(MAX_LEN);
        input
    }

    fn start(&mut self) -> Vec<u8> {
        self.random.choice(self.starts).expect("there are seeds").clone()
    }

    fn mutate(&mut self, input: &mut Vec<u8>) {
        let at = self.random.usize(..=input.len());
        let longest = 1 << self.random.u32(..8);
        let end = (at + self.random.usize(..longest)).min(input.len());
        match self.random.u8(..9) {
            0 if at < input.len() => input[at] ^= 1 << self.random.u8(..8),
            1 if at < input.len() => input[at] = self.random.u8(..),
            2 => input.truncate(at.max(1)),
            3 => drop(input.drain(at..end)),
            4 => {
                let piece = input[at..end].repeat(self.random.usize(1..4));
                input.splice(at..at, piece);
            }
            5 => {
                let other = self.start();
                let from = self.random.usize(..=other.len());
                input.splice(at..end, other[from..].iter().copied());
            }
            6 => {
                let word = self.random.choice(&self.words).expect("there are words").clone();
                let end = if self.random.bool() { at } else { (at + word.len()).min(input.len()) };
                input.splice(at..end, word);
            }
            7 => {
                // A number near an end of its range, of one to eight bytes.
                let number = [0, 1, 0x7f, 0xff, 0x7fff, u64::MAX >> 1, u64::MAX, 1 << 30];
                let number = *self.random.choice(&number).expect("there are numbers");
                let number = number.wrapping_add(self.random.u64(..3)).to_le_bytes();
                let len = (1 << self.random.usize(..4)).min(input.len() - at);
                input.splice(at..at + len, number[..len].iter().copied());
            }
            _ => {
                let number = self.random.u64(..) >> self.random.u32(..64);
                input.splice(at..end, format!(" {number}").into_bytes());
            }
        }
    }
}

/// Returns the bytes of a word of the dictionary, in which `\xNN` is a byte.
fn unescaped(text: &str) -> Vec<u8> {
    let mut parts = text.split("\\x");
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at(2);
        bytes.push(u8::from_str_radix(digits, 16).expect("two digits follow"));
        bytes.extend_from_slice(rest.as_bytes());
    }
    bytes
}
