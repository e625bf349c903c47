//! A server process: start, readiness, log, signals, exit code, and what `/proc` reports of it.
//! A process that a test starts is killed when the test drops it.
//!
//! A server is ready when its inherited socket exists ([`Daemon::on_loopback`]), when it logs its
//! address ([`Daemon::address`]), or when its Unix socket takes a connection ([`connect_when_ready`]).

use super::client::try_connect;
use super::{PATIENCE, wait_until};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, kill_process, setrlimit};
use socket2::{SockAddr, Socket};
use std::ffi::OsStr;
use std::fmt::Display;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener};
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Our own binary.
pub const BEANSTALKD: &str = env!("CARGO_BIN_EXE_beanstalkd");

/// Flags to listen on a loopback port that the kernel chooses, and to log it.
pub const ON_LOOPBACK: [&str; 5] = ["-V", "-l", "127.0.0.1", "-p", "0"];

// ---- Commands ----

/// Returns a command with all signals at their defaults and without standard input. A shell
/// ignores SIGINT for its background jobs, nohup ignores SIGHUP, and children inherit both.
pub fn command<A: AsRef<OsStr>>(
    program: impl AsRef<OsStr>,
    arguments: impl IntoIterator<Item = A>,
) -> Command {
    let mut command = if has_ignored_signals() {
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(program);
        command
    } else {
        Command::new(program)
    };
    command.env_remove("RUST_LOG").stdin(Stdio::null()).args(arguments);
    command
}

/// Returns a command that runs our binary from a shell script, in which it is `$0` and the
/// arguments are `$@`.
pub fn script(script: &str, arguments: &[&str]) -> Command {
    command("sh", [&["-c", script, BEANSTALKD], arguments].concat())
}

/// Whether this process ignores a signal that the server or its tests use.
fn has_ignored_signals() -> bool {
    let used = [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::CHILD];
    let used = used.into_iter().chain([Signal::USR1, Signal::USR2, Signal::TSTP, Signal::CONT]);
    let ignored = u64::from_str_radix(&status("self", "SigIgn:"), 16).expect("a mask is hex");
    used.into_iter().any(|signal| ignored & 1 << (signal.as_raw() - 1) != 0)
}

/// Runs our binary until it exits, which it must do by itself.
pub fn run(arguments: &[&str]) -> Output {
    run_command(command(BEANSTALKD, arguments))
}

/// Runs a command until it exits, which it must do by itself.
pub fn run_command(mut command: Command) -> Output {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.expect("the program starts");
    let pid = Pid::from_child(&child);
    let (sender, output) = mpsc::channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = output.recv_timeout(PATIENCE) else {
        let _ = kill_process(pid, Signal::KILL);
        panic!("{command:?} has not exited within {PATIENCE:?}");
    };
    output.expect("a child can be waited for")
}

/// Raises the limit of open files of this process, and of servers that inherit it, as far as the system
/// allows. Returns the limit.
pub fn raise_open_files() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    // None means no limit.
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum.unwrap_or(u64::MAX),
        Err(_) => current.unwrap_or(u64::MAX),
    }
}

pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("the program writes text")
}

// ---- Processes ----

/// A child process, killed when dropped.
pub struct Process {
    child: Child,
}

impl Process {
    pub fn spawn(command: &mut Command) -> Process {
        let process = Process::try_spawn(command);
        process.unwrap_or_else(|error| panic!("{}: {error}", command.get_program().display()))
    }

    pub fn try_spawn(command: &mut Command) -> io::Result<Process> {
        Ok(Process { child: command.spawn()? })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the server still runs");
    }

    pub fn exit_status(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child can be waited for")
    }

    /// Takes the standard output, which is piped.
    pub fn stdout(&mut self) -> BufReader<ChildStdout> {
        BufReader::new(self.child.stdout.take().expect("standard output is piped"))
    }

    pub fn read_stderr(&mut self) -> String {
        let mut text = String::new();
        let stderr = self.child.stderr.as_mut().expect("standard error is piped");
        stderr.read_to_string(&mut text).expect("the program writes text");
        text
    }

    pub fn wait_for_exit(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the process has exited", || {
            status = self.exit_status();
            status.is_some()
        });
        status.expect("it was just returned")
    }

    pub fn end(&mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.wait_for_exit()
    }

    /// Kills the process, as a crash would.
    pub fn kill(&mut self) {
        let status = self.end(Signal::KILL);
        assert!(status.code().is_none(), "the server has exited by itself: {status}");
    }

    /// Runs `action` while the process is stopped.
    pub fn while_stopped<T>(&self, action: impl FnOnce() -> T) -> T {
        self.signal(Signal::STOP);
        wait_until("the process is stopped", || self.state() == 'T');
        let result = action();
        self.signal(Signal::CONT);
        result
    }

    // ---- Figures of /proc ----

    /// A line of `/proc/PID/status`, without its key.
    pub fn status(&self, key: &str) -> String {
        status(self.id(), key)
    }

    pub fn rss_kib(&self) -> u64 {
        status_kib(self.id(), "VmRSS:")
    }

    /// Resident memory of no file: the part that the server allocates.
    pub fn anonymous_kib(&self) -> u64 {
        status_kib(self.id(), "RssAnon:")
    }

    /// The highest resident memory since the start.
    pub fn peak_rss_kib(&self) -> u64 {
        status_kib(self.id(), "VmHWM:")
    }

    pub fn open_files(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.id())).expect("the server runs").count()
    }

    pub fn is_asleep(&self) -> bool {
        self.state() == 'S'
    }

    /// Asserts that the process, once it waits for an event, uses no processor time.
    #[track_caller]
    pub fn assert_rests(&self) {
        const SPAN: Duration = Duration::from_millis(300);
        wait_until("the server waits for an event", || self.is_asleep());
        let before = self.processor_time();
        thread::sleep(SPAN);
        let used = self.processor_time() - before;
        assert!(used <= Duration::from_millis(20), "the server spins: {used:?} in {SPAN:?}");
    }

    fn state(&self) -> char {
        stat(self.id()).chars().next().expect("the state comes first")
    }

    /// Processor time of all threads.
    pub fn processor_time(&self) -> Duration {
        /// What Linux reports to user space, whatever it uses itself.
        const TICK: Duration = Duration::from_millis(10);
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id())).expect("the server runs");
        let times = tasks.map(|task| {
            let schedstat = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            schedstat.split(' ').next()?.parse().ok().map(Duration::from_nanos)
        });
        // Not every kernel counts nanoseconds.
        times.sum::<Option<Duration>>().unwrap_or_else(|| {
            let stat = stat(self.id());
            let ticks = stat.split(' ').skip(11).take(2).map(|field| field.parse::<u32>());
            TICK * ticks.map(|ticks| ticks.expect("ticks are a number")).sum::<u32>()
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A line of `/proc/PID/status`, without its key.
pub fn status(pid: impl Display, key: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("the process runs");
    let value = status.lines().find_map(|line| line.strip_prefix(key)).expect("the key is known");
    value.split_whitespace().collect::<Vec<&str>>().join(" ")
}

/// A number of KiB in `/proc/PID/status`.
pub fn status_kib(pid: impl Display, key: &str) -> u64 {
    status(pid, key).trim_end_matches(" kB").parse().expect("it is a number")
}

/// The fields of `/proc/PID/stat` from the state on. The name before them may contain blanks.
fn stat(pid: u32) -> String {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process runs");
    stat.rsplit_once(") ").expect("the name is in brackets").1.to_owned()
}

// ---- Servers ----

/// A server whose log the test reads.
pub struct Daemon {
    process: Process,
    log: Log,
}

impl Deref for Daemon {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl DerefMut for Daemon {
    fn deref_mut(&mut self) -> &mut Process {
        &mut self.process
    }
}

impl Daemon {
    /// Starts our server on an inherited socket of loopback, so that clients may connect at once.
    pub fn on_loopback(arguments: &[&str]) -> (Daemon, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        (Daemon::with_inherited(arguments, listener), address)
    }

    /// Starts our server on a loopback port of its own, with its own backlog.
    pub fn on_own_port(arguments: &[&str]) -> (Daemon, SocketAddr) {
        let arguments = [&ON_LOOPBACK, arguments].concat();
        Daemon::spawn(command(BEANSTALKD, arguments)).with_address()
    }

    /// Starts the same under a limit that the `ulimit` of the shell sets.
    pub fn with_limit(limit: &str, arguments: &[&str]) -> (Daemon, SocketAddr) {
        let arguments = [&ON_LOOPBACK, arguments].concat();
        let command = script(&format!(r#"ulimit {limit}; exec "$0" "$@""#), &arguments);
        Daemon::spawn(command).with_address()
    }

    /// Starts our server with an inherited socket, as systemd does.
    pub fn with_inherited(arguments: &[&str], socket: impl Into<OwnedFd>) -> Daemon {
        const SCRIPT: &str = r#"exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0" "$@""#;
        let mut command = script(SCRIPT, arguments);
        command.stdin(socket.into());
        Daemon::spawn(command)
    }

    pub fn start(program: impl AsRef<OsStr>, arguments: &[&str]) -> Daemon {
        Daemon::spawn(command(program, arguments))
    }

    /// Starts a command; its standard output is discarded.
    pub fn spawn(mut command: Command) -> Daemon {
        Daemon::spawn_with_stdout(command.stdout(Stdio::null()))
    }

    /// Starts a command with the standard output that it has.
    pub fn spawn_with_stdout(command: &mut Command) -> Daemon {
        let mut process = Process::spawn(command.stderr(Stdio::piped()));
        let log = Log::read(process.child.stderr.take().expect("the log is piped"));
        Daemon { process, log }
    }

    /// Waits until the server listens; see [`Daemon::address`].
    pub fn with_address(mut self) -> (Daemon, SocketAddr) {
        let address = self.address();
        (self, address)
    }

    /// Waits until the server logs the address that it listens on; needs `-V`.
    pub fn address(&mut self) -> SocketAddr {
        let address = self.wait_for_value("listening on ");
        address.parse().expect("an address was logged")
    }

    /// Waits for a line of the log that contains `text`; returns what follows it.
    pub fn wait_for_value(&mut self, text: &str) -> String {
        let line = self.wait_for_log(text);
        line.split_once(text).expect("the line contains it").1.to_owned()
    }

    /// Waits for a line of the log that contains `text`; returns the line.
    #[expect(clippy::needless_pass_by_ref_mut, reason = "lines are taken from the log")]
    pub fn wait_for_log(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = String::new();
        while let Some(line) = self.log.next_line(deadline, &seen) {
            if line.contains(text) {
                return line;
            }
            seen += &(line + "\n");
        }
        panic!("the log ended without {text:?}:\n{seen}")
    }

    /// Waits until the server exits by itself; returns its status and the rest of its log.
    pub fn wait(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + PATIENCE;
        let mut log = String::new();
        while let Some(line) = self.log.next_line(deadline, &log) {
            log += &(line + "\n");
        }
        (self.process.wait_for_exit(), log)
    }

    /// Stops the server as an operator does, which must succeed; returns the rest of its log.
    pub fn stop(self) -> String {
        self.signal(Signal::TERM);
        let (status, log) = self.wait();
        assert!(status.success(), "the server exits with {status}: {log}");
        log
    }
}

/// Connects as soon as the server listens. For servers that neither log readiness nor inherit
/// their socket, C beanstalkd among them.
pub fn connect_when_ready(address: &SockAddr) -> Socket {
    let mut socket = None;
    wait_until("the server listens", || {
        socket = try_connect(address.clone()).ok();
        socket.is_some()
    });
    socket.expect("it was just connected")
}

/// The lines of a log, as a thread reads them.
struct Log(Receiver<String>);

impl Log {
    fn read(stderr: ChildStderr) -> Log {
        let (lines, log) = mpsc::channel();
        thread::spawn(move || {
            // The test may end before the server does.
            for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
                if lines.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    break;
                }
            }
        });
        Log(log)
    }

    /// Returns the next line, or `None` once the server has closed its log.
    fn next_line(&self, deadline: Instant, seen: &str) -> Option<String> {
        let left = deadline.saturating_duration_since(Instant::now());
        match self.0.recv_timeout(left) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                panic!("the server logs nothing more within {PATIENCE:?}:\n{seen}")
            }
        }
    }
}

/// Returns the binlog directory for flags.
pub fn path_text(directory: &Path) -> &str {
    directory.to_str().expect("the path is text")
}

// ---- C beanstalkd ----

/// Finds C beanstalkd: `$C_BEANSTALKD`, or `beanstalkd` on the path.
pub fn c_beanstalkd() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("C_BEANSTALKD") {
        return Some(PathBuf::from(named));
    }
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|directory| directory.join("beanstalkd"));
    found.into_iter().find(|candidate| candidate.is_file() && version_of(candidate).is_some())
}

/// Returns the version of a C beanstalkd, or `None` for other programs, ours among them.
pub fn version_of(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("-v").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let version = text.trim().strip_prefix("beanstalkd ")?.to_owned();
    (!version.contains(' ')).then_some(version)
}
