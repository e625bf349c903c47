//! Plays the conversations of `tests/conversations` into the core in several manners, where the model of the
//! simulation judges each reply, into our binary over sockets, with and without bodies in memory, into C beanstalkd
//! where it is installed, and into our binary on a real etcd where both are there.
//!
//! `tests/conversations/README.md` describes the form of a script. Each pair of a script and a
//! player is a test of its own: `cargo test --test conversations core::put` plays one pair.
//! `C_BEANSTALKD=/path` names a C beanstalkd that is not on the path. `BEANSTALKD_ETCD_BINARY=/path`
//! names a binary that was built with support for etcd; `make etcd` builds one.

#![allow(clippy::disallowed_methods, reason = "a player measures time from outside")]

mod harness;

#[allow(dead_code, unreachable_pub, reason = "a part of the simulation only")]
#[allow(clippy::wildcard_enum_match_arm, reason = "most matches look for one variant")]
#[path = "simulation"]
mod simulation {
    pub mod driver;
    pub mod event;
    pub mod journal;
    pub mod model;
    pub mod request;
    pub mod world;
}

use harness::etcd::{Etcd, beanstalkd_with_etcd};
use harness::play::Play;
use harness::process;
use harness::script::{self, Line, Script};
use harness::world::{Process, Program, World};
use harness::{cannot_test, skip};
use libtest_mimic::{Arguments, Trial};
use simulation::event::Setup;
use simulation::world::JudgedWorld;
use std::cmp::Reverse;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Over sockets most of the time is spent waiting for time to pass: many do so at once, the longest
    // first.
    arguments.test_threads.get_or_insert(48);
    let programs = programs();

    let mut trials = Vec::new();
    let mut scripts = script::all();
    scripts.sort_by_key(|script| Reverse(time_of(script)));
    for script in &scripts {
        for (player, program) in &programs {
            let (script, program) = (script.clone(), program.clone());
            let is_skipped = script.skips_c && matches!(program, Program::C { .. });
            let (name, is_cold) = (format!("{player}::{}", script.name), *player == "binary-cold");
            let play = move || Ok(play_in_real_time(&script, &program, is_cold)?);
            trials.push(Trial::test(name, play).with_ignored_flag(is_skipped));
        }
    }
    for script in scripts {
        for (player, setup, room) in MANNERS {
            let script = script.clone();
            let mut setup: Setup = format!("setup 0 {setup}").parse().expect("it is a setup");
            setup.limits.read_bytes = setup.limits.read_bytes.max(bytes_of(&script) / MOST_READS);
            // No seed draws it.
            setup.limits.due_slice_work = 1;
            let name = format!("{player}::{}", script.name);
            trials.push(Trial::test(name, move || {
                let world = JudgedWorld::new(&script, setup, room);
                Ok(Play::new(world, !script.has_binlog).play(&script)?)
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// How conversations are played into the core and the model: the setup of the simulation, and how many bytes a
/// client reads at once. What can be done in several iterations is, in steps.
const MANNERS: [(&str, &str, Option<usize>); 7] = [
    ("core", "sync-within 0", None),
    ("core-bytewise", "sync-within 0 read-bytes 1", None),
    ("core-in-steps", IN_STEPS, None),
    ("core-slow-reader", "sync-within 0", Some(7)),
    ("core-late", "chunk-len 60", None),
    ("core-cold", "sync-within 0 body-cache 0", None),
    ("core-cold-late", "sync-within 0 body-cache 0 threads", None),
];

const IN_STEPS: &str = "sync-within 0 kick-step 1 batch-step 1 wakes 1 touch-step 1 watch-step 1 \
    list-step 1 lists-sent 1 flush-work 1 jobs-compared 1 ids-looked-up 1 pages-per-step 1 \
    closing-work 1 closing-slice 1 shared-work 1 least-share 1 due-work 4";

/// A script with more bytes is read in longer pieces.
const MOST_READS: usize = 1_000;

fn bytes_of(script: &Script) -> usize {
    let sent = |(_, line): &(usize, Line)| {
        if let Line::Send { bytes, .. } = line { bytes.len() } else { 0 }
    };
    script.lines.iter().map(sent).sum()
}

/// The time that passes in a script.
fn time_of(script: &Script) -> Duration {
    let span = |(_, line): &(usize, Line)| {
        if let Line::Advance { span } = line { Some(*span) } else { None }
    };
    script.lines.iter().filter_map(span).sum()
}

/// Returns the programs that take part because they are installed.
fn programs() -> Vec<(&'static str, Program)> {
    let mut programs = vec![("binary", Program::Ours), ("binary-cold", Program::Ours)];
    let c_beanstalkd = process::c_beanstalkd();
    match c_beanstalkd.and_then(|path| Some((process::version_of(&path)?, path))) {
        Some((version, path)) => {
            eprintln!("C beanstalkd {version} at {} takes part", path.display());
            programs.push(("c", Program::C { path, version }));
        }
        None => skip("C beanstalkd is not installed, so nothing is played into it"),
    }
    // In .ci/run, servers on etcd have a run of their own, which names their binary.
    let skip_etcd =
        if std::env::var_os("BEANSTALKD_ETCD_BINARY").is_some() { skip } else { cannot_test };
    match beanstalkd_with_etcd() {
        Some(path) if Etcd::is_installed() => {
            eprintln!("{} takes part on etcd", path.display());
            programs.push(("etcd", Program::OnEtcd { path, etcd: Arc::default() }));
        }
        Some(_) => skip_etcd("etcd is not installed, so nothing is played into a server on etcd"),
        None => {
            skip_etcd("no binary has support for etcd (make etcd), so nothing is played into one")
        }
    }
    programs
}

/// Plays the script over sockets. In a script with time, a job may be expected not to be ready half a
/// second after it was put. If a busy machine delayed the test by more than 50 ms before such a script
/// failed, it is played again; another script after a second, because ages count in seconds. Without such a
/// delay a failure is final.
fn play_in_real_time(script: &Script, program: &Program, is_cold: bool) -> Result<(), String> {
    const TRIES: u32 = 10;
    // No script asks for more precision.
    let margin = Duration::from_millis(if time_of(script).is_zero() { 1_000 } else { 50 });
    let c_version = match program {
        Program::C { version, .. } => Some(&**version),
        Program::Ours | Program::OnEtcd { .. } => None,
    };
    let has_binlog = script.has_binlog || is_cold;
    let hides_binlog = !script.has_binlog && (is_cold || matches!(program, Program::OnEtcd { .. }));
    let mut flags = script.options();
    flags.extend(is_cold.then_some(["--body-cache", "0"]).into_iter().flatten());
    for tries in 1.. {
        let mut play = Play::new(Process::new(program, &flags, has_binlog), hides_binlog);
        play.c_version = c_version;
        let outcome = play.play(script);
        let is_late = play.world.delay() >= margin;
        if outcome.is_ok() || !is_late || tries == TRIES {
            return outcome;
        }
        let late = play.world.delay();
        eprintln!("{} is played again, because the machine was {late:?} late", script.name);
    }
    unreachable!("the last try returns")
}
