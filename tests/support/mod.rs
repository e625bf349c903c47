//! What several test programs need: servers as child processes that end with the test.
#![allow(dead_code, unreachable_pub, reason = "each test program uses some of it")]
#![allow(clippy::disallowed_methods, reason = "a test looks at the clock from outside")]

use rustix::process::{Pid, Signal, kill_process};
use socket2::{Domain, SockAddr, Socket, Type};
use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// The deadline of every wait in a test. It ends a test whose event never comes, and measures
/// nothing: a busy machine needs seconds for what an idle one does in a millisecond.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Our own binary.
pub const BEANSTALKD: &str = env!("CARGO_BIN_EXE_beanstalkd");

/// A server under test; killed when it goes out of scope.
pub struct Daemon {
    pub child: Child,
    log: Log,
}

impl Daemon {
    /// Starts `program` with `listener` as an inherited socket, as systemd would. Clients
    /// may connect at once: the socket listens already.
    pub fn with_inherited(
        program: &Path,
        arguments: &[&str],
        listener: impl Into<OwnedFd>,
    ) -> Daemon {
        let mut command = command("sh");
        // The socket comes in as standard input and is moved to where it is looked for.
        command.args(["-c", r#"exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@""#, "sh"]);
        command.arg(program).args(arguments).stdin(Stdio::from(listener.into()));
        Daemon::spawn(command)
    }

    /// Starts `program` with the given arguments.
    pub fn start(program: &Path, arguments: &[&str]) -> Daemon {
        let mut command = command(program);
        command.args(arguments).stdin(Stdio::null());
        Daemon::spawn(command)
    }

    /// Starts a prepared command; its standard output is discarded.
    pub fn spawn(mut command: Command) -> Daemon {
        Daemon::spawn_with_stdout(command.stdout(Stdio::null()))
    }

    /// Starts a prepared command with the standard output that it has.
    pub fn spawn_with_stdout(command: &mut Command) -> Daemon {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the server starts");
        let log = Log::read(child.stderr.take().expect("the log is piped"));
        Daemon { child, log }
    }

    /// Reads the log until a line contains `text`; returns that line.
    #[expect(clippy::needless_pass_by_ref_mut, reason = "lines are taken from the log")]
    pub fn wait_for_log(&mut self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = String::new();
        loop {
            match self.log.next_line(deadline) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => seen += &(line + "\n"),
                Err(LogError::Ended) => panic!("the log ended without {text:?}:\n{seen}"),
                Err(LogError::Late) => {
                    panic!("no {text:?} in the log within {PATIENCE:?}:\n{seen}")
                }
            }
        }
    }

    /// The process id.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the server still runs");
    }

    /// Sends a signal and waits until the server has ended of it.
    pub fn end(&mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.wait_for_exit()
    }

    /// Waits until the server has ended by itself; returns what is left of the log too.
    pub fn wait(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + PATIENCE;
        let mut log = String::new();
        loop {
            match self.log.next_line(deadline) {
                Ok(line) => log += &(line + "\n"),
                Err(LogError::Ended) => return (self.wait_for_exit(), log),
                Err(LogError::Late) => {
                    panic!("the server has not closed its log within {PATIENCE:?}:\n{log}")
                }
            }
        }
    }

    /// Waits until the server has ended by itself, and leaves its log.
    pub fn wait_for_exit(&mut self) -> ExitStatus {
        let mut status = None;
        wait_until("the server has ended", || {
            status = self.child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        status.expect("it was just waited for")
    }
}

/// The log of a server, line by line, as a thread reads it.
struct Log(Receiver<String>);

enum LogError {
    /// The server has closed it.
    Ended,
    /// No line came before the deadline.
    Late,
}

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

    fn next_line(&self, deadline: Instant) -> Result<String, LogError> {
        let left = deadline.saturating_duration_since(Instant::now());
        self.0.recv_timeout(left).map_err(|error| match error {
            RecvTimeoutError::Disconnected => LogError::Ended,
            RecvTimeoutError::Timeout => LogError::Late,
        })
    }
}

/// A command that starts with all signals at their defaults. A shell ignores SIGINT for its
/// background jobs, nohup ignores SIGHUP, and children inherit both. The log is as flags set it.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = if has_ignored_signals() {
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(program);
        command
    } else {
        Command::new(program)
    };
    command.env_remove("RUST_LOG");
    command
}

/// Whether this process ignores a signal that the server or its tests use.
fn has_ignored_signals() -> bool {
    let used = [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::CHILD];
    let used = used.into_iter().chain([Signal::USR1, Signal::USR2, Signal::TSTP, Signal::CONT]);
    let status = std::fs::read_to_string("/proc/self/status").expect("the system tells it");
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = u64::from_str_radix(ignored.expect("it has this line").trim(), 16);
    let ignored = ignored.expect("a mask is a number");
    used.into_iter().any(|signal| ignored & 1 << (signal.as_raw() - 1) != 0)
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have ended already; either way nothing is left behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Our own server on a loopback port that the kernel chose.
pub fn start_on_loopback(arguments: &[&str]) -> (Daemon, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    let address = listener.local_addr().expect("a bound socket has an address");
    (Daemon::with_inherited(Path::new(BEANSTALKD), arguments, listener), address)
}

/// Our own server on a TCP port of its own choice; `-V` makes it tell which.
pub fn start_on_own_port(arguments: &[&str]) -> (Daemon, SocketAddr) {
    let all: Vec<&str> = ["-V", "-p", "0"].iter().chain(arguments).copied().collect();
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &all);
    let address = logged_address(&mut daemon);
    (daemon, address)
}

/// The same on loopback, under a limit that the shell's `ulimit` sets.
pub fn start_with_limit(limit: &str, arguments: &[&str]) -> (Daemon, SocketAddr) {
    let script = format!(r#"ulimit {limit}; exec "$0" -V -l 127.0.0.1 -p 0 "$@""#);
    let mut command = command("sh");
    command.args(["-c", &script, BEANSTALKD]).args(arguments).stdin(Stdio::null());
    let mut daemon = Daemon::spawn(command);
    let address = logged_address(&mut daemon);
    (daemon, address)
}

/// Waits until a server under `-V` has told where it listens.
pub fn logged_address(daemon: &mut Daemon) -> SocketAddr {
    let line = daemon.wait_for_log("listening on ");
    let (_, address) = line.split_once("listening on ").expect("it was just found");
    address.parse().expect("an address was logged")
}

/// The processor time that a process has had, in ticks of 10 ms.
pub fn processor_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the server runs");
    // The name, in brackets, may contain blanks.
    let (_, fields) = stat.rsplit_once(") ").expect("the name is in brackets");
    let ticks = fields.split(' ').skip(11).take(2).map(|field| field.parse::<u64>());
    ticks.map(|ticks| ticks.expect("ticks are a number")).sum()
}

/// A figure in KiB from the status of a process.
pub fn status_kib(pid: u32, key: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the server runs");
    let value = status.lines().find_map(|line| line.strip_prefix(key)).expect("the key is known");
    value.trim().trim_end_matches(" kB").parse().expect("it is a number")
}

/// A process that neither runs nor is about to: it waits in the kernel for something to happen.
pub fn is_asleep(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the server runs");
    let (_, fields) = stat.rsplit_once(") ").expect("the name is in brackets");
    fields.starts_with('S')
}

/// A connection whose reads and writes end with an error when [`PATIENCE`] is over.
pub fn connect(address: SocketAddr) -> TcpStream {
    try_connect(address).expect("the server listens")
}

/// The same, where the server may be gone.
pub fn try_connect(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The same for a Unix socket.
pub fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // A connection that finds no room in the backlog waits too.
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect(&SockAddr::unix(path)?)?;
    Ok(UnixStream::from(OwnedFd::from(socket)))
}

/// C beanstalkd, where it is installed: `$C_BEANSTALKD`, or `beanstalkd` on the path.
pub fn c_beanstalkd() -> Option<PathBuf> {
    if let Some(named) = std::env::var_os("C_BEANSTALKD") {
        return Some(PathBuf::from(named));
    }
    let path = std::env::var_os("PATH")?;
    let found = std::env::split_paths(&path).map(|directory| directory.join("beanstalkd"));
    found.into_iter().find(|candidate| candidate.is_file() && version_of(candidate).is_some())
}

/// The version of a C beanstalkd; none for other programs, ours among them.
pub fn version_of(program: &Path) -> Option<String> {
    let output = Command::new(program).arg("-v").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let version = text.trim().strip_prefix("beanstalkd ")?.to_owned();
    (!version.contains(' ')).then_some(version)
}

/// Says why a test has nothing to do here. The test runner swallows what `eprintln` prints.
pub fn skip(why: &str) {
    use std::io::Write;
    writeln!(std::io::stderr(), "SKIPPED: {why}").expect("standard error is open");
}

/// Runs our binary until it ends by itself, which it must.
pub fn run(arguments: &[&str]) -> Output {
    let mut command = command(BEANSTALKD);
    command.args(arguments).stdin(Stdio::null());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = child.expect("the binary starts");
    let pid = Pid::from_child(&child);
    let (sender, output) = mpsc::channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = output.recv_timeout(PATIENCE) else {
        let _ = kill_process(pid, Signal::KILL);
        panic!("beanstalkd {arguments:?} has not ended within {PATIENCE:?}");
    };
    output.expect("a child can be waited for")
}

/// What a program wrote.
pub fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("the program writes text")
}

/// The value of a line of a document.
pub fn field<'t>(text: &'t str, key: &str) -> Option<&'t str> {
    let value = |line: &'t str| line.strip_prefix(key)?.strip_prefix(": ");
    text.lines().find_map(value).map(|value| value.trim_matches('"'))
}

/// Waits until something is so that comes with no event of its own.
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    const PAUSE: Duration = Duration::from_millis(2);
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "after {PATIENCE:?} it is not so that {what}");
        thread::sleep(PAUSE);
    }
}
