//! Plays the conversations of `tests/conversations` into the engine with virtual time, into our
//! binary over sockets, into both without a body in memory, into C beanstalkd where it is installed, and into our binary on a real etcd
//! where both are there.
//!
//! `tests/conversations/README.md` describes the form of a script. Each pair of a script and a
//! player is a test of its own: `cargo test --test conversations engine::put` plays one pair.
//! `C_BEANSTALKD=/path` names a C beanstalkd that is not on the path. `BEANSTALKD_ETCD_BINARY=/path`
//! names a binary that was built with support for etcd; `make etcd` builds one.

#![allow(clippy::disallowed_methods, reason = "a player measures time from outside")]

mod harness;

use beanstalkd::testing::{Nanos, Settings, Syncing};
use harness::client::unix;
use harness::engine::Engine;
use harness::etcd::{Etcd, beanstalkd_with_etcd};
use harness::event_loop::{ClientId, EventLoop};
use harness::fake_disk::FakeDisk;
use harness::process::{self, Daemon, ON_LOOPBACK, connect_when_ready};
use harness::script::{self, Line, Script};
use harness::{PATIENCE, fixtures};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::Signal;
use socket2::{SockAddr, Socket};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Over sockets most of the time is spent waiting for time to pass.
    arguments.test_threads.get_or_insert(16);
    let Ok(others) = other_programs() else { return ExitCode::FAILURE };

    let mut trials = Vec::new();
    for script in script::all() {
        let name = script.name.clone();
        for (player, chunk) in [("engine", usize::MAX), ("engine-bytewise", 1)] {
            let script = script.clone();
            let play = move || play(&script, &mut EnginePlayer::new(&script, chunk), None);
            trials.push(Trial::test(format!("{player}::{name}"), play));
        }
        for (player, are_late) in [("engine-cold", false), ("engine-cold-late", true)] {
            let script = script.clone();
            let play = move || play(&script, &mut EnginePlayer::cold(&script, are_late), None);
            trials.push(Trial::test(format!("{player}::{name}"), play));
        }
        for program in [Program::Ours, Program::OursCold].iter().chain(&others) {
            let (script, program) = (script.clone(), program.clone());
            let player = program.player();
            let is_skipped = script.skips_c && matches!(program, Program::C { .. });
            let play = move || play_in_real_time(&script, &program);
            let trial = Trial::test(format!("{player}::{name}"), play);
            trials.push(trial.with_ignored_flag(is_skipped));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A program that conversations are played into over sockets.
#[derive(Clone)]
enum Program {
    Ours,
    /// Our binary, which keeps no body in memory.
    OursCold,
    C {
        path: PathBuf,
        version: String,
    },
    /// Our binary with support for etcd. The first conversation starts etcd.
    OnEtcd {
        path: PathBuf,
        etcd: Arc<OnceLock<Etcd>>,
    },
}

impl Program {
    fn player(&self) -> &'static str {
        match self {
            Program::Ours => "binary",
            Program::OursCold => "binary-cold",
            Program::C { .. } => "c",
            Program::OnEtcd { .. } => "etcd",
        }
    }

    fn c_version(&self) -> Option<&str> {
        match self {
            Program::C { version, .. } => Some(version),
            Program::Ours | Program::OursCold | Program::OnEtcd { .. } => None,
        }
    }
}

/// Returns the programs that take part because they are installed. Prints which do not. An error means
/// that a server on etcd must take part and cannot.
fn other_programs() -> Result<Vec<Program>, ()> {
    let mut programs = Vec::new();
    let c_beanstalkd = process::c_beanstalkd();
    match c_beanstalkd.and_then(|path| Some((process::version_of(&path)?, path))) {
        Some((version, path)) => {
            eprintln!("C beanstalkd {version} at {} takes part", path.display());
            programs.push(Program::C { path, version });
        }
        None => eprintln!("SKIPPED: C beanstalkd is not installed, so nothing is played into it"),
    }
    let missing = match beanstalkd_with_etcd() {
        Some(path) if Etcd::is_installed() => {
            eprintln!("{} takes part on etcd", path.display());
            programs.push(Program::OnEtcd { path, etcd: Arc::default() });
            return Ok(programs);
        }
        Some(_) => "etcd is not installed",
        None => "no binary has support for etcd (make etcd)",
    };
    let is_required = std::env::var("CI").is_ok_and(|value| value == "true")
        && std::env::var_os("BEANSTALKD_ETCD_BINARY").is_some();
    if is_required {
        eprintln!(
            "cannot play into a server on etcd: {missing}; the test fails, because CI is set"
        );
        return Err(());
    }
    eprintln!("SKIPPED: {missing}, so nothing is played into a server on etcd");
    Ok(programs)
}

/// A server that a script can be played into. Clients have names and connect when a line of the
/// script first names them.
trait Player {
    fn send(&mut self, client: &str, bytes: &[u8]);
    /// The next bytes for the client, or `None` once the server has closed the connection.
    /// Waits for them, unless `is_brief` and nothing comes soon: then they are none.
    fn receive(&mut self, client: &str, is_brief: bool) -> Option<Vec<u8>>;
    fn half_close(&mut self, client: &str);
    fn disconnect(&mut self, client: &str);
    fn drain(&mut self);
    /// Ends the server with or without a crash and starts it again; all connections are gone.
    fn restart(&mut self, is_crash: bool);
    fn advance(&mut self, span: Duration);
    /// Returns a received line as a server with the options of the script sends it.
    fn normalize(&self, line: String) -> String {
        line
    }
}

/// Plays the script and compares what comes back. `c_version` is that of C beanstalkd,
/// when it is the one that is played into.
fn play(script: &Script, player: &mut dyn Player, c_version: Option<&str>) -> Result<(), Failed> {
    let mut inboxes: BTreeMap<String, script::Inbox> = BTreeMap::new();
    for (number, line) in &script.lines {
        let outcome = match line {
            Line::Send { client, bytes } => {
                player.send(client, bytes);
                Ok(())
            }
            Line::Expect { client, expectation } => {
                let inbox = inboxes.entry(client.clone()).or_default();
                expectation.check(c_version, || {
                    let line = next_line(player, inbox, client);
                    player.normalize(line)
                })
            }
            Line::ExpectNothing { client } => {
                let inbox = inboxes.entry(client.clone()).or_default();
                check_nothing_came(player, inbox, client)
            }
            Line::HalfClose { client } => {
                player.half_close(client);
                Ok(())
            }
            Line::HangUp { client } => {
                player.disconnect(client);
                inboxes.remove(client);
                Ok(())
            }
            Line::Drain => {
                player.drain();
                Ok(())
            }
            Line::Restart { is_crash } => {
                player.restart(*is_crash);
                inboxes.clear();
                Ok(())
            }
            Line::Advance { span } => {
                player.advance(*span);
                Ok(())
            }
        };
        outcome.map_err(|why| format!("{}:{number}: {why}", script.path.display()))?;
    }
    // Output after the last expectation is an error too.
    for (client, inbox) in &mut inboxes {
        inbox.add(&player.receive(client, true).unwrap_or_default());
        let checked = inbox.check_empty();
        checked.map_err(|why| format!("{}, the end, {client}: {why}", script.path.display()))?;
    }
    Ok(())
}

/// Plays the script over sockets. A script may expect that a job is not ready half a second after it
/// was put. If a busy machine delayed the test by more than 50 ms before a failure, the script is
/// played again; without such a delay a failure is final.
fn play_in_real_time(script: &Script, program: &Program) -> Result<(), Failed> {
    const TRIES: u32 = 10;
    /// No script asks for more precision.
    const MARGIN: Duration = Duration::from_millis(50);
    let mut outcome = Ok(());
    for _ in 0..TRIES {
        let mut player = SocketPlayer::new(program, script);
        outcome = play(script, &mut player, program.c_version());
        if outcome.is_ok() || player.delay() < MARGIN {
            break;
        }
    }
    outcome
}

fn check_nothing_came(
    player: &mut dyn Player,
    inbox: &mut script::Inbox,
    client: &str,
) -> Result<(), String> {
    let Some(bytes) = player.receive(client, true) else {
        return Err(format!("the connection is {}", script::CLOSED));
    };
    inbox.add(&bytes);
    inbox.check_empty()
}

/// The next line for the client, however many pieces it comes in.
fn next_line(player: &mut dyn Player, inbox: &mut script::Inbox, client: &str) -> String {
    loop {
        if let Some(line) = inbox.next_line() {
            return line;
        }
        match player.receive(client, false) {
            None if inbox.is_empty() => return script::CLOSED.to_owned(),
            None => return format!("{} and then {}", inbox.rest(), script::CLOSED),
            Some(bytes) if bytes.is_empty() => return format!("{}<nothing>", inbox.rest()),
            Some(bytes) => inbox.add(&bytes),
        }
    }
}

// ---- Into the engine ----

/// The engine without sockets: time is a number.
struct EnginePlayer {
    engine: EventLoop,
    settings: Settings,
    /// For the binlog, if the script has one, or no body is in memory.
    disk: Option<FakeDisk>,
    /// The script has no binlog, but the server has one.
    hides_binlog: bool,
    /// At most this many bytes are read at once.
    read_len: usize,
    clients: BTreeMap<String, ClientId>,
}

fn start(settings: Settings, disk: Option<&FakeDisk>, read_len: usize, now: Nanos) -> EventLoop {
    let mut engine = Engine::new(settings, now);
    if let Some(disk) = disk {
        engine.recover(disk, Syncing::EachIteration).expect("the disk works");
    }
    EventLoop::new(engine, read_len, Nanos::ZERO)
}

impl EnginePlayer {
    fn new(script: &Script, read_len: usize) -> EnginePlayer {
        let settings = script.settings();
        let disk = script.has_binlog.then(FakeDisk::default);
        EnginePlayer::on(disk, settings, read_len, false)
    }

    /// Keeps no body in memory. Each read of one is done at once, or later.
    fn cold(script: &Script, are_late: bool) -> EnginePlayer {
        let settings = Settings { body_cache_bytes: Some(0), ..script.settings() };
        let disk = FakeDisk::default();
        if are_late {
            disk.delay_reads();
        }
        EnginePlayer::on(Some(disk), settings, usize::MAX, !script.has_binlog)
    }

    fn on(
        disk: Option<FakeDisk>,
        settings: Settings,
        read_len: usize,
        hides_binlog: bool,
    ) -> EnginePlayer {
        let engine = start(settings, disk.as_ref(), read_len, fixtures::START);
        EnginePlayer { engine, settings, disk, hides_binlog, read_len, clients: BTreeMap::new() }
    }

    fn client(&mut self, name: &str) -> ClientId {
        *self.clients.entry(name.to_owned()).or_insert_with(|| self.engine.connect())
    }

    fn settle(&mut self) {
        self.engine.settle();
        while self.disk.as_ref().is_some_and(FakeDisk::has_reads) {
            self.engine.settle();
        }
        self.engine.server.check();
    }
}

impl Player for EnginePlayer {
    fn send(&mut self, client: &str, bytes: &[u8]) {
        let client = self.client(client);
        self.engine.send(client, bytes);
        self.settle();
    }

    fn receive(&mut self, client: &str, _is_brief: bool) -> Option<Vec<u8>> {
        let client = self.client(client);
        let received = self.engine.take(client);
        (self.engine.key(client).is_some() || !received.is_empty()).then_some(received)
    }

    fn half_close(&mut self, client: &str) {
        let client = self.client(client);
        self.engine.half_close(client);
        self.settle();
    }

    fn disconnect(&mut self, client: &str) {
        self.half_close(client);
        let id = self.clients.remove(client).expect("it was connected");
        assert!(self.engine.key(id).is_none(), "the server does not close");
    }

    fn drain(&mut self) {
        self.engine.server.set_draining(true);
    }

    fn restart(&mut self, is_crash: bool) {
        let disk = self.disk.as_ref().expect("only scripts with a binlog restart");
        let now = self.engine.now;
        if is_crash {
            let are_late = disk.are_reads_late();
            self.disk = Some(FakeDisk::with_files(&disk.live_files()));
            self.disk.iter().filter(|_| are_late).for_each(FakeDisk::delay_reads);
        } else {
            self.engine.server.close(now).expect("the disk works");
        }
        self.clients.clear();
        self.engine = start(self.settings, self.disk.as_ref(), self.read_len, now);
    }

    fn advance(&mut self, span: Duration) {
        let span = Nanos::from_nanos(u64::try_from(span.as_nanos()).expect("scripts are short"));
        let end = self.engine.now + span;
        loop {
            let next = self.engine.server.next_due().filter(|&next| next <= end);
            self.engine.now = next.unwrap_or(end).max(self.engine.now);
            self.settle();
            if next.is_none() {
                break;
            }
        }
    }

    fn normalize(&self, line: String) -> String {
        if self.hides_binlog { script::without_binlog(&line) } else { line }
    }
}

// ---- Over sockets ----

/// A server process, sockets and real time.
struct SocketPlayer {
    daemon: Daemon,
    address: SockAddr,
    clients: BTreeMap<String, Socket>,
    arguments: Vec<String>,
    program: Program,
    /// The script has no binlog, but the server has one.
    hides_binlog: bool,
    /// For its files.
    directory: TempDir,
    started_at: Instant,
    /// How much time has passed in the script.
    scripted: Duration,
}

fn arguments(program: &Program, script: &Script, directory: &Path) -> Vec<String> {
    let mut arguments: Vec<String> = script.options().into_iter().map(str::to_owned).collect();
    if let Program::OnEtcd { etcd, .. } = program {
        let url = etcd.get_or_init(Etcd::start).new_binlog();
        // A server that was killed leads for this time.
        let flags = ["-b", &url, "--lease-ttl", "2"];
        arguments.extend(ON_LOOPBACK.iter().chain(&flags).map(|&flag| flag.to_owned()));
    } else if script.has_binlog || matches!(program, Program::OursCold) {
        arguments.extend(["-b".to_owned(), directory.display().to_string()]);
    }
    if matches!(program, Program::OursCold) {
        arguments.extend(["--body-cache", "0"].map(str::to_owned));
    }
    arguments
}

fn launch(program: &Program, arguments: &[String], directory: &Path) -> (Daemon, SockAddr) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match program {
        Program::Ours | Program::OursCold => {
            let (daemon, address) = Daemon::on_loopback(&arguments);
            (daemon, address.into())
        }
        Program::C { path, .. } => {
            let socket = directory.join("socket");
            let listen = format!("unix:{}", socket.display());
            let daemon = Daemon::start(path, &[&["-l", &listen], &arguments[..]].concat());
            (daemon, unix(&socket))
        }
        // It listens when it leads.
        Program::OnEtcd { path, .. } => {
            let mut daemon = Daemon::start(path, &arguments);
            let address = daemon.address();
            (daemon, address.into())
        }
    }
}

impl SocketPlayer {
    fn new(program: &Program, script: &Script) -> SocketPlayer {
        let directory = tempfile::tempdir().expect("there is space for files");
        let arguments = arguments(program, script, directory.path());
        let (daemon, address) = launch(program, &arguments, directory.path());
        SocketPlayer {
            daemon,
            address,
            clients: BTreeMap::new(),
            arguments,
            program: program.clone(),
            hides_binlog: matches!(program, Program::OnEtcd { .. } | Program::OursCold)
                && !script.has_binlog,
            directory,
            started_at: Instant::now(),
            scripted: Duration::ZERO,
        }
    }

    /// How far the clock is ahead of the script.
    fn delay(&self) -> Duration {
        self.started_at.elapsed().saturating_sub(self.scripted)
    }

    fn client(&mut self, name: &str) -> &mut Socket {
        let address = &self.address;
        self.clients.entry(name.to_owned()).or_insert_with(|| connect_when_ready(address))
    }
}

impl Player for SocketPlayer {
    fn send(&mut self, client: &str, bytes: &[u8]) {
        // If the server has closed the connection, the next read shows it.
        let _ = self.client(client).write_all(bytes);
    }

    fn receive(&mut self, client: &str, is_brief: bool) -> Option<Vec<u8>> {
        // No event shows that nothing comes: it has 30 ms to come.
        let patience = Some(if is_brief { Duration::from_millis(30) } else { PATIENCE });
        let mut buffer = vec![0; 1 << 16];
        let socket = self.client(client);
        let result = socket.set_read_timeout(patience).and_then(|()| socket.read(&mut buffer));
        match result {
            Ok(0) => None,
            Ok(count) => Some(buffer[..count].to_vec()),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                Some(Vec::new())
            }
            // The test was stopped and continued.
            Err(error) if error.kind() == ErrorKind::Interrupted => self.receive(client, is_brief),
            Err(_) => None,
        }
    }

    fn half_close(&mut self, client: &str) {
        let shut = self.client(client).shutdown(Shutdown::Write);
        shut.expect("an open connection can be shut down");
    }

    fn disconnect(&mut self, client: &str) {
        self.clients.remove(client);
    }

    fn drain(&mut self) {
        // Both servers look at signals before they look at clients.
        self.daemon.signal(Signal::USR1);
    }

    fn restart(&mut self, is_crash: bool) {
        self.clients.clear();
        self.daemon.end(if is_crash { Signal::KILL } else { Signal::TERM });
        (self.daemon, self.address) = launch(&self.program, &self.arguments, self.directory.path());
    }

    fn advance(&mut self, span: Duration) {
        std::thread::sleep(span);
        self.scripted += span;
    }

    fn normalize(&self, line: String) -> String {
        if self.hides_binlog { script::without_binlog(&line) } else { line }
    }
}
