//! Plays the conversations of `tests/conversations` into the core in several manners, into the model of
//! the simulation, into our binary over sockets, with and without bodies in memory, into C beanstalkd
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
    pub mod journal;
    pub mod model;
    pub mod request;
    pub mod world;
}

use harness::driver::{Limits, Options, Settings};
use harness::etcd::{Etcd, beanstalkd_with_etcd};
use harness::process;
use harness::script::{self, Expectation, Inbox, Line, Script};
use harness::world::{Client, Core, DiskKind, Manner, Process, Program, Restart, World};
use harness::{cannot_test, skip};
use libtest_mimic::{Arguments, Failed, Trial};
use simulation::world::ModelWorld;
use std::cmp::Reverse;
use std::collections::BTreeMap;
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
            let play = move || play_in_real_time(&script, &program, is_cold);
            trials.push(Trial::test(name, play).with_ignored_flag(is_skipped));
        }
    }
    for script in scripts {
        for (player, manner) in manners() {
            let script = script.clone();
            let name = format!("{player}::{}", script.name);
            trials.push(Trial::test(name, move || play_in_virtual_time(&script, manner)));
        }
        if !script.has_binlog {
            let (name, script) = (format!("model::{}", script.name), script.clone());
            trials.push(Trial::test(name, move || play_into_the_model(&script)));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The time that passes in a script.
fn time_of(script: &Script) -> Duration {
    let span = |(_, line): &(usize, Line)| {
        if let Line::Advance { span } = line { Some(*span) } else { None }
    };
    script.lines.iter().filter_map(span).sum()
}

/// How conversations are played into the core.
fn manners() -> [(&'static str, Manner); 7] {
    let default = Manner::DEFAULT;
    let bytewise = Limits { read_bytes: 1, ..Limits::DEFAULT };
    // What can be done in several iterations is.
    let in_steps = Limits {
        shared_work: 1,
        least_share_work: 1,
        most_due_work: 1,
        due_slice_work: 1,
        closing_work: 1,
        closing_slice_work: 1,
        keys_forgotten_per_tick: 1,
        watches_per_step: 1,
        jobs_per_batch_step: 1,
        jobs_per_kick_step: 1,
        wakes_per_step: 1,
        jobs_per_touch_step: 1,
        names_per_list_step: 1,
        lists_sent_per_tick: 1,
        first_flush_work: 1,
        jobs_compared_at_once: 1,
        ids_looked_up_at_once: 1,
        memory_pages_per_step: 1,
        ..Limits::DEFAULT
    };
    let with = |options| Manner { options, ..default };
    let cold = |disk| {
        let settings = Settings { body_cache_bytes: Some(0), ..Options::DEFAULT.settings };
        Manner { disk, ..with(Options { settings, ..Options::DEFAULT }) }
    };
    [
        ("core", default),
        ("core-bytewise", with(Options { limits: bytewise, ..Options::DEFAULT })),
        ("core-in-steps", with(Options { limits: in_steps, ..Options::DEFAULT })),
        ("core-slow-reader", Manner { room: 7, ..default }),
        ("core-late", Manner { disk: DiskKind::LateAcknowledgements, ..default }),
        ("core-cold", cold(DiskKind::Local)),
        ("core-cold-late", cold(DiskKind::LateReads)),
    ]
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

fn play_in_virtual_time(script: &Script, manner: Manner) -> Result<(), Failed> {
    let mut manner = manner;
    let hides_binlog = manner.disk != DiskKind::None && !script.has_binlog;
    if script.has_binlog && manner.disk == DiskKind::None {
        manner.disk = DiskKind::Local;
    }
    manner.options.settings = script.settings(manner.options.settings);
    Play::new(Core::new(manner), hides_binlog).play(script)
}

fn play_into_the_model(script: &Script) -> Result<(), Failed> {
    let settings = script.settings(Options::DEFAULT.settings);
    let world = ModelWorld::new(Options { settings, ..Options::DEFAULT });
    Play::new(world, false).play(script)
}

/// Plays the script over sockets. In a script with time, a job may be expected not to be ready half a
/// second after it was put. If a busy machine delayed the test by more than 50 ms before such a script
/// failed, it is played again; another script after a second, because ages count in seconds. Without such a
/// delay a failure is final.
fn play_in_real_time(script: &Script, program: &Program, is_cold: bool) -> Result<(), Failed> {
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

/// A failure shows this many characters of what was sent last.
const LAST_SENT_LEN: usize = 200;

/// One script and the world that it is played into.
struct Play<'s, W> {
    world: W,
    /// The script has no binlog, but the server has one.
    hides_binlog: bool,
    /// The version of C beanstalkd, if the script is played into it.
    c_version: Option<&'s str>,
    last_sent: String,
}

/// A client of the script, with what it has received.
struct Named {
    client: Client,
    inbox: Inbox,
}

impl<W: World> Play<'_, W> {
    fn new(world: W, hides_binlog: bool) -> Self {
        Play { world, hides_binlog, c_version: None, last_sent: String::new() }
    }

    /// Plays the script and compares what comes back.
    fn play(&mut self, script: &Script) -> Result<(), Failed> {
        let mut clients: BTreeMap<String, Named> = BTreeMap::new();
        for (number, line) in &script.lines {
            let outcome = self.play_line(&mut clients, line);
            outcome.map_err(|why| {
                let path = script.path.display();
                format!("{path}:{number}: {why}\n  last sent {}", self.last_sent)
            })?;
        }
        // Output after the last expectation is an error too.
        for (name, Named { client, inbox }) in &mut clients {
            inbox.add(&self.world.take(*client, true).unwrap_or_default());
            let checked = inbox.check_empty();
            checked.map_err(|why| format!("{}, the end, {name}: {why}", script.path.display()))?;
        }
        Ok(())
    }

    fn play_line(
        &mut self,
        clients: &mut BTreeMap<String, Named>,
        line: &Line,
    ) -> Result<(), String> {
        match line {
            Line::Send { client, bytes } => {
                let client = self.client(clients, client).client;
                self.world.send(client, bytes);
                self.last_sent = script::escape(bytes).chars().take(LAST_SENT_LEN).collect();
            }
            Line::Expect { client, expectation } => {
                let client = self.client(clients, client);
                return self.expect(client, expectation);
            }
            Line::ExpectNothing { client } => {
                let Named { client, inbox } = self.client(clients, client);
                let came = self.world.take(*client, true);
                inbox.add(&came.ok_or(format!("the connection is {}", script::CLOSED))?);
                return inbox.check_empty();
            }
            Line::HalfClose { client } => {
                let client = self.client(clients, client).client;
                self.world.half_close(client);
            }
            Line::HangUp { client } => {
                self.client(clients, client);
                let gone = clients.remove(client).expect("it was just added");
                self.world.hang_up(gone.client);
            }
            Line::Drain => self.world.drain(),
            Line::Restart { is_crash } => {
                self.world.restart(if *is_crash { Restart::Kill } else { Restart::Stop });
                clients.clear();
            }
            Line::Advance { span } => self.world.advance(*span),
        }
        Ok(())
    }

    /// Returns the client with this name. It connects when a line first names it.
    fn client<'c>(
        &mut self,
        clients: &'c mut BTreeMap<String, Named>,
        name: &str,
    ) -> &'c mut Named {
        clients
            .entry(name.to_owned())
            .or_insert_with(|| Named { client: self.world.connect(), inbox: Inbox::default() })
    }

    fn expect(&mut self, from: &mut Named, expectation: &Expectation) -> Result<(), String> {
        let hides_binlog = self.hides_binlog;
        expectation.check(self.c_version, || {
            let line = self.next_line(from);
            if hides_binlog { script::without_binlog(&line) } else { line }
        })
    }

    /// Returns the next line for the client, however many pieces it comes in.
    fn next_line(&mut self, Named { client, inbox }: &mut Named) -> String {
        loop {
            if let Some(line) = inbox.next_line() {
                return line;
            }
            match self.world.take(*client, false) {
                None if inbox.is_empty() => return script::CLOSED.to_owned(),
                None => return format!("{} and then {}", inbox.rest(), script::CLOSED),
                Some(bytes) if bytes.is_empty() => return format!("{}<nothing>", inbox.rest()),
                Some(bytes) => inbox.add(&bytes),
            }
        }
    }
}
