//! What several test programs need: servers as child processes that end with the test.
#![allow(dead_code, unreachable_pub, reason = "each test program uses some of it")]

use std::io::{BufRead, BufReader, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::Duration;

/// Long enough that only something that never comes takes so long.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Our own binary.
pub const BEANSTALKD: &str = env!("CARGO_BIN_EXE_beanstalkd");

/// A server under test; killed when it goes out of scope.
pub struct Daemon {
    pub child: Child,
}

impl Daemon {
    /// Starts `program` with `listener` as an inherited socket, as systemd would. Clients
    /// may connect at once: the socket listens already.
    pub fn with_inherited(
        program: &Path,
        arguments: &[&str],
        listener: impl Into<OwnedFd>,
    ) -> Daemon {
        let mut command = Command::new("sh");
        // The socket comes in as standard input and is moved to where it is looked for.
        command.args(["-c", r#"exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@""#, "sh"]);
        command.arg(program).args(arguments).stdin(Stdio::from(listener.into()));
        Daemon::spawn(command)
    }

    /// Starts `program` with the given arguments.
    pub fn start(program: &Path, arguments: &[&str]) -> Daemon {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        Daemon::spawn(command)
    }

    /// Starts a prepared command.
    pub fn spawn(mut command: Command) -> Daemon {
        command.env_remove("RUST_LOG").stdout(Stdio::null()).stderr(Stdio::piped());
        Daemon { child: command.spawn().expect("the server starts") }
    }

    /// Reads the log until a line contains `text`; returns that line.
    pub fn wait_for_log(&mut self, text: &str) -> String {
        let stderr = self.child.stderr.as_mut().expect("the log is piped");
        let mut seen = String::new();
        // One byte at a time, so that nothing is buffered away from the next reader.
        let mut reader = BufReader::with_capacity(1, stderr);
        loop {
            let start = seen.len();
            let count = reader.read_line(&mut seen).expect("the log can be read");
            assert!(count > 0, "the log ended without {text:?}:\n{seen}");
            if seen[start..].contains(text) {
                return seen[start..].trim_end().to_owned();
            }
        }
    }

    /// The process id.
    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.child)
    }

    /// Sends a signal.
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("the server still runs");
    }

    /// Sends a signal and waits until the server has ended of it.
    pub fn end(&mut self, signal: rustix::process::Signal) -> ExitStatus {
        self.signal(signal);
        self.child.wait().expect("a child can be waited for")
    }

    /// Waits until the server has ended by itself; returns what is left of the log too.
    pub fn wait(mut self) -> (ExitStatus, String) {
        let mut log = String::new();
        let stderr = self.child.stderr.as_mut().expect("the log is piped");
        stderr.read_to_string(&mut log).expect("the log can be read");
        (self.child.wait().expect("a child can be waited for"), log)
    }
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
    let mut command = Command::new("sh");
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

/// A connection that does not wait for ever.
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the server listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    stream.set_nodelay(true).expect("the option can be set");
    stream
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
    let mut command = Command::new(BEANSTALKD);
    command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null());
    command.output().expect("the binary starts")
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
    const PAUSE: Duration = Duration::from_millis(5);
    for _ in 0..PATIENCE.as_millis() / PAUSE.as_millis() {
        if is_so() {
            return;
        }
        std::thread::sleep(PAUSE);
    }
    panic!("it never came to be that {what}");
}
