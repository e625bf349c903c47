//! Plays the conversations of `tests/conversations` into the engine with virtual time, into our
//! binary over sockets, and into C beanstalkd where it is installed.
//!
//! `tests/conversations/README.md` describes the form of a script. Each pair of a script and a
//! player is a test of its own: `cargo test --test conversations engine::put` plays one pair.
//! `C_BEANSTALKD=/path` names a C beanstalkd that is not on the path.

#![allow(clippy::disallowed_methods, reason = "a player measures time from outside")]

mod harness;

use beanstalkd::testing::{ConnKey, Nanos, Settings, Syncing};
use harness::client::unix;
use harness::engine::Engine;
use harness::fake_disk::FakeDisk;
use harness::process::{self, Daemon, connect_when_ready};
use harness::script::{self, Line, Script};
use harness::{PATIENCE, fixtures};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::Signal;
use socket2::{SockAddr, Socket};
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Over sockets most of the time is spent waiting for time to pass.
    arguments.test_threads.get_or_insert(16);
    let c_beanstalkd = process::c_beanstalkd();
    let c_version = c_beanstalkd.as_deref().and_then(process::version_of);
    match (&c_beanstalkd, &c_version) {
        (Some(path), Some(version)) => {
            eprintln!("C beanstalkd {version} at {} takes part", path.display());
        }
        _ => eprintln!("SKIPPED: C beanstalkd is not installed, so nothing is played into it"),
    }

    let mut trials = Vec::new();
    for script in script::all() {
        let name = script.name.clone();
        for (player, chunk) in [("engine", usize::MAX), ("engine-bytewise", 1)] {
            let script = script.clone();
            let play = move || play(&script, &mut EnginePlayer::new(&script, chunk), None);
            trials.push(Trial::test(format!("{player}::{name}"), play));
        }
        let for_binary = script.clone();
        let play_binary = move || play_in_real_time(&for_binary, None, None);
        trials.push(Trial::test(format!("binary::{name}"), play_binary));
        if let (Some(path), Some(version)) = (c_beanstalkd.clone(), c_version.clone()) {
            let is_skipped = script.skips_c;
            let play_c = move || play_in_real_time(&script, Some(&path), Some(&version));
            trials.push(Trial::test(format!("c::{name}"), play_c).with_ignored_flag(is_skipped));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A server that a script can be played into. Clients have names and connect when a line of the
/// script first names them.
trait Player {
    fn send(&mut self, client: &str, bytes: &[u8]);
    /// The next bytes for the client, or `None` once the server has closed the connection.
    /// Waits for them, unless `is_brief` and nothing comes soon: then they are none.
    fn receive(&mut self, client: &str, is_brief: bool) -> Option<Vec<u8>>;
    fn half_close(&mut self, client: &str);
    fn close_after_write(&mut self, client: &str);
    fn drain(&mut self);
    /// Ends the server with or without a crash and starts it again; all connections are gone.
    fn restart(&mut self, is_crash: bool);
    fn advance(&mut self, span: Duration);
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
                expectation.check(c_version, || next_line(player, inbox, client))
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
                player.close_after_write(client);
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
fn play_in_real_time(
    script: &Script,
    c_program: Option<&Path>,
    c_version: Option<&str>,
) -> Result<(), Failed> {
    const TRIES: u32 = 10;
    /// No script asks for more precision.
    const MARGIN: Duration = Duration::from_millis(50);
    let mut outcome = Ok(());
    for _ in 0..TRIES {
        let mut player = SocketPlayer::new(c_program, script);
        outcome = play(script, &mut player, c_version);
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

/// The engine without sockets: time is a number, and a connection two queues of bytes.
struct EnginePlayer {
    engine: Engine,
    settings: Settings,
    /// For the binlog, if the script has one.
    disk: Option<FakeDisk>,
    /// At most this many bytes are received at once.
    chunk: usize,
    clients: BTreeMap<String, EngineClient>,
}

struct EngineClient {
    /// None once the server has closed the connection.
    key: Option<ConnKey>,
    /// Sent and not yet received by the server.
    sent: VecDeque<u8>,
    is_half_closed: bool,
    input_ended: bool,
    received: Vec<u8>,
}

fn start(settings: Settings, disk: Option<&FakeDisk>, now: Nanos) -> Engine {
    let mut engine = Engine::new(settings, now);
    if let Some(disk) = disk {
        engine.recover(disk, Syncing::EachIteration).expect("the disk works");
    }
    engine
}

impl EnginePlayer {
    fn new(script: &Script, chunk: usize) -> EnginePlayer {
        let settings = Settings {
            max_job_size: script.max_job_size(),
            binlog_file_size: 10_485_760,
            ..Settings::DEFAULT
        };
        let disk = script.has_binlog.then(FakeDisk::default);
        let engine = start(settings, disk.as_ref(), fixtures::START);
        EnginePlayer { engine, settings, disk, chunk, clients: BTreeMap::new() }
    }

    fn client(&mut self, name: &str) -> &mut EngineClient {
        let engine = &mut self.engine;
        self.clients.entry(name.to_owned()).or_insert_with(|| EngineClient {
            key: Some(engine.connect()),
            sent: VecDeque::new(),
            is_half_closed: false,
            input_ended: false,
            received: Vec::new(),
        })
    }

    /// Does what the event loop does until no connection has anything to do.
    fn pump(&mut self) {
        let names: Vec<String> = self.clients.keys().cloned().collect();
        let mut is_moving = true;
        while is_moving {
            is_moving = false;
            for name in &names {
                is_moving |= self.pump_one(name);
            }
        }
    }

    fn pump_one(&mut self, name: &str) -> bool {
        let engine = &mut self.engine;
        engine.server.check();
        engine.commit();
        let client = self.clients.get_mut(name).expect("only known clients are pumped");
        let Some(key) = client.key else { return false };
        let mut is_moving = false;
        let takes_input = engine.server.actions(key).read;
        if takes_input && !client.sent.is_empty() {
            let count = client.sent.len().min(self.chunk);
            engine.receive(key, client.sent.drain(..count).collect::<Vec<u8>>());
            is_moving = true;
        } else if takes_input && client.is_half_closed && !client.input_ended {
            engine.server.end_input(key);
            client.input_ended = true;
            is_moving = true;
        }
        let output = engine.output(key);
        is_moving |= !output.is_empty();
        client.received.extend(output);
        if engine.server.actions(key).run {
            engine.resume(key);
            is_moving = true;
        }
        if engine.server.actions(key).close {
            engine.disconnect(key);
            client.key = None;
            is_moving = true;
        }
        is_moving
    }
}

impl Player for EnginePlayer {
    fn send(&mut self, client: &str, bytes: &[u8]) {
        self.client(client).sent.extend(bytes);
        self.pump();
    }

    fn receive(&mut self, client: &str, _is_brief: bool) -> Option<Vec<u8>> {
        let client = self.client(client);
        let received = std::mem::take(&mut client.received);
        (client.key.is_some() || !received.is_empty()).then_some(received)
    }

    fn half_close(&mut self, client: &str) {
        let client = self.client(client);
        client.is_half_closed = true;
        if let Some(key) = client.key {
            self.engine.server.half_close(key);
        }
        self.pump();
    }

    fn close_after_write(&mut self, client: &str) {
        self.half_close(client);
        let gone = self.clients.remove(client);
        assert!(
            gone.is_some_and(|gone| gone.key.is_none()),
            "the server closes a connection that ended"
        );
        self.pump();
    }

    fn drain(&mut self) {
        self.engine.server.set_draining(true);
    }

    fn restart(&mut self, is_crash: bool) {
        let disk = self.disk.as_ref().expect("only scripts with a binlog restart");
        if is_crash {
            self.disk = Some(FakeDisk::with_files(&disk.live_files()));
        } else {
            self.engine.server.close(self.engine.now).expect("the disk works");
        }
        self.clients.clear();
        self.engine = start(self.settings, self.disk.as_ref(), self.engine.now);
    }

    fn advance(&mut self, span: Duration) {
        let span = Nanos::from_nanos(u64::try_from(span.as_nanos()).expect("scripts are short"));
        let end = self.engine.now + span;
        loop {
            let next = self.engine.server.next_due().filter(|&next| next <= end);
            self.engine.now = next.unwrap_or(end).max(self.engine.now);
            self.engine.tick();
            self.pump();
            if next.is_none() {
                break;
            }
        }
    }
}

// ---- Over sockets ----

/// A server process, sockets and real time.
struct SocketPlayer {
    daemon: Daemon,
    address: SockAddr,
    clients: BTreeMap<String, Socket>,
    arguments: Vec<String>,
    /// C beanstalkd, if the script is played into it.
    c_program: Option<PathBuf>,
    /// For its files.
    directory: TempDir,
    started_at: Instant,
    /// How much time has passed in the script.
    scripted: Duration,
}

fn arguments(script: &Script, directory: &Path) -> Vec<String> {
    let mut arguments: Vec<String> = script.options().into_iter().map(str::to_owned).collect();
    if script.has_binlog {
        arguments.extend(["-b".to_owned(), directory.display().to_string()]);
    }
    arguments
}

fn launch(c_program: Option<&Path>, arguments: &[String], directory: &Path) -> (Daemon, SockAddr) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let Some(program) = c_program else {
        let (daemon, address) = Daemon::on_loopback(&arguments);
        return (daemon, address.into());
    };
    let path = directory.join("socket");
    let listen = format!("unix:{}", path.display());
    let daemon = Daemon::start(program, &[&["-l", &listen], &arguments[..]].concat());
    (daemon, unix(&path))
}

impl SocketPlayer {
    /// Starts our binary, or a C beanstalkd.
    fn new(c_program: Option<&Path>, script: &Script) -> SocketPlayer {
        let directory = tempfile::tempdir().expect("there is space for files");
        let arguments = arguments(script, directory.path());
        let (daemon, address) = launch(c_program, &arguments, directory.path());
        SocketPlayer {
            daemon,
            address,
            clients: BTreeMap::new(),
            arguments,
            c_program: c_program.map(Path::to_owned),
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

    fn close_after_write(&mut self, client: &str) {
        self.clients.remove(client);
    }

    fn drain(&mut self) {
        // Both servers look at signals before they look at clients.
        self.daemon.signal(Signal::USR1);
    }

    fn restart(&mut self, is_crash: bool) {
        self.clients.clear();
        self.daemon.end(if is_crash { Signal::KILL } else { Signal::TERM });
        (self.daemon, self.address) =
            launch(self.c_program.as_deref(), &self.arguments, self.directory.path());
    }

    fn advance(&mut self, span: Duration) {
        std::thread::sleep(span);
        self.scripted += span;
    }
}
