//! Plays the conversations of `tests/conversations` into the engine with virtual time, into our
//! binary over sockets, and into C beanstalkd where it is installed.
//!
//! The form of a script is told in `tests/conversations/README.md`. Each pair of a script and a
//! player is a test of its own, so `cargo test --test conversations engine::put` plays
//! one. `C_BEANSTALKD=/path` names a C beanstalkd that is not on the path.

#![allow(clippy::disallowed_methods, reason = "a player looks at the clock from outside")]

mod fake_disk;
mod made_up;
mod script;
mod support;

use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Nanos;
use beanstalkd::testing::Syncing;
use beanstalkd::testing::{Server, Settings};
use fake_disk::FakeDisk;
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::Signal;
use script::{Line, Script};
use std::collections::{BTreeMap, VecDeque};
use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use support::{Daemon, PATIENCE};
use tempfile::TempDir;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Over sockets most of the time is spent waiting for time to pass.
    arguments.test_threads.get_or_insert(16);
    let c_beanstalkd = support::c_beanstalkd();
    let c_version = c_beanstalkd.as_deref().and_then(support::version_of);
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

/// Something that a script can be played into. Clients are named; they connect when first
/// spoken of.
trait Player {
    fn send(&mut self, client: &str, bytes: &[u8]);
    /// The next bytes for the client, or `None` once the server has closed the connection.
    /// Waits for them, unless `is_brief` and nothing comes soon: then they are none.
    fn receive(&mut self, client: &str, is_brief: bool) -> Option<Vec<u8>>;
    fn half_close(&mut self, client: &str);
    fn close_after_write(&mut self, client: &str);
    fn drain(&mut self);
    /// The server ends, in good order or not, and is started again; all clients are gone.
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
    // Whatever is said beyond the last expectation is a mistake too.
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

/// The engine alone: time is a number, and a connection two queues of bytes.
struct EnginePlayer {
    server: Server,
    settings: Settings,
    /// For the binlog, if there is to be one.
    disk: Option<FakeDisk>,
    now: Nanos,
    /// No more bytes than this are handed in at once.
    chunk: usize,
    clients: BTreeMap<String, EngineClient>,
}

struct EngineClient {
    /// None once the server has closed the connection.
    key: Option<ConnKey>,
    /// Sent and not yet read by the server.
    sent: VecDeque<u8>,
    is_half_closed: bool,
    input_ended: bool,
    received: Vec<u8>,
}

fn start(settings: Settings, disk: Option<&FakeDisk>, now: Nanos) -> Server {
    let mut server = Server::new(settings, made_up::facts(now), now);
    if let Some(disk) = disk {
        server.recover(disk.boxed(), Syncing::EachIteration, now).expect("the disk works");
    }
    server
}

impl EnginePlayer {
    fn new(script: &Script, chunk: usize) -> EnginePlayer {
        let now = Nanos::from_secs(1_700_000_000);
        let settings = Settings {
            max_job_size: script.max_job_size(),
            binlog_file_size: 10_485_760,
            ..Settings::DEFAULT
        };
        let disk = script.has_binlog.then(FakeDisk::default);
        let server = start(settings, disk.as_ref(), now);
        EnginePlayer { server, settings, disk, now, chunk, clients: BTreeMap::new() }
    }

    fn client(&mut self, name: &str) -> &mut EngineClient {
        let server = &mut self.server;
        self.clients.entry(name.to_owned()).or_insert_with(|| EngineClient {
            key: Some(server.connect().expect("a script needs little memory")),
            sent: VecDeque::new(),
            is_half_closed: false,
            input_ended: false,
            received: Vec::new(),
        })
    }

    /// Does what the event loop does, until nothing moves any more.
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
        self.server.check();
        let (server, now) = (&mut self.server, self.now);
        server.commit(now).expect("the disk works");
        let client = self.clients.get_mut(name).expect("only known clients are pumped");
        let Some(key) = client.key else { return false };
        let mut is_moving = false;
        if server.actions(key).read && !client.sent.is_empty() {
            let count = client.sent.len().min(self.chunk);
            let bytes: Vec<u8> = client.sent.drain(..count).collect();
            server.receive(key, &bytes, now);
            is_moving = true;
        } else if server.actions(key).read && client.is_half_closed && !client.input_ended {
            server.end_input(key);
            client.input_ended = true;
            is_moving = true;
        }
        let mut slices = [IoSlice::new(&[]); 3];
        let mut output_handle = server.output_handle(key);
        let filled = output_handle.next_slices(&mut slices);
        let before = client.received.len();
        for slice in &slices[..filled] {
            client.received.extend_from_slice(slice);
        }
        if client.received.len() > before {
            output_handle.sent(client.received.len() - before);
            is_moving = true;
        }
        if server.actions(key).run {
            server.resume(key, now);
            is_moving = true;
        }
        if server.actions(key).close {
            server.disconnect(key, now);
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
            self.server.half_close(key);
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
        self.server.set_draining(true);
    }

    fn restart(&mut self, is_crash: bool) {
        let disk = self.disk.as_ref().expect("only scripts with a binlog restart");
        if is_crash {
            self.disk = Some(FakeDisk::with_files(&disk.live_files()));
        } else {
            self.server.close(self.now).expect("the disk works");
        }
        self.clients.clear();
        self.server = start(self.settings, self.disk.as_ref(), self.now);
    }

    fn advance(&mut self, span: Duration) {
        let span = Nanos::from_nanos(u64::try_from(span.as_nanos()).expect("scripts are short"));
        let end = self.now + span;
        loop {
            let next = self.server.next_due().filter(|&next| next <= end);
            self.now = next.unwrap_or(end).max(self.now);
            self.server.tick(self.now);
            self.pump();
            if next.is_none() {
                break;
            }
        }
    }
}

// ---- Over sockets ----

/// A real server, real sockets, real time.
struct SocketPlayer {
    daemon: Daemon,
    address: Address,
    clients: BTreeMap<String, Socket>,
    arguments: Vec<String>,
    /// C beanstalkd, if it is played into.
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

fn launch(c_program: Option<&Path>, arguments: &[String], directory: &Path) -> (Daemon, Address) {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let Some(program) = c_program else {
        let (daemon, address) = support::start_on_loopback(&arguments);
        return (daemon, Address::Tcp(address));
    };
    let path = directory.join("socket");
    let listen = format!("unix:{}", path.display());
    let all = [&["-l", &listen], &arguments[..]].concat();
    (Daemon::start(program, &all), Address::Unix(path))
}

enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl SocketPlayer {
    /// Our binary, or a C beanstalkd.
    fn new(c_program: Option<&Path>, script: &Script) -> SocketPlayer {
        let directory = tempfile::tempdir().expect("there is space for files");
        let arguments = arguments(script, directory.path());
        let (daemon, address) = launch(c_program, &arguments, directory.path());
        let c_program = c_program.map(Path::to_owned);
        SocketPlayer {
            daemon,
            address,
            clients: BTreeMap::new(),
            arguments,
            c_program,
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
        self.clients.entry(name.to_owned()).or_insert_with(|| connect(address))
    }
}

fn connect(address: &Address) -> Socket {
    match address {
        Address::Tcp(address) => Socket::Tcp(support::connect(*address)),
        Address::Unix(path) => Socket::Unix(connect_unix(path)),
    }
}

/// C beanstalkd says nothing when it is ready: the socket must be tried.
fn connect_unix(path: &Path) -> UnixStream {
    let mut stream = None;
    support::wait_until("the server listens on its Unix socket", || {
        stream = support::connect_unix(path).ok();
        stream.is_some()
    });
    stream.expect("it was just connected")
}

impl Player for SocketPlayer {
    fn send(&mut self, client: &str, bytes: &[u8]) {
        // Should the server have closed the connection, what is received next tells.
        let _ = match self.client(client) {
            Socket::Tcp(stream) => stream.write_all(bytes),
            Socket::Unix(stream) => stream.write_all(bytes),
        };
    }

    fn receive(&mut self, client: &str, is_brief: bool) -> Option<Vec<u8>> {
        // That something does not come cannot be waited for, only given a fair chance.
        let patience = Some(if is_brief { Duration::from_millis(30) } else { PATIENCE });
        let mut buffer = vec![0; 1 << 16];
        let result = match self.client(client) {
            Socket::Tcp(stream) => {
                stream.set_read_timeout(patience).and_then(|()| stream.read(&mut buffer))
            }
            Socket::Unix(stream) => {
                stream.set_read_timeout(patience).and_then(|()| stream.read(&mut buffer))
            }
        };
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
        let shut = match self.client(client) {
            Socket::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Socket::Unix(stream) => stream.shutdown(Shutdown::Write),
        };
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
