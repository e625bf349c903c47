//! One server under test: its start, its end, and its figures.

use crate::client::{Outcome, Run, TooSlow, nanoseconds};
use crate::figures::Figures;
use crate::harness::process::Process;
use crate::instructions::Instructions;
use crate::machine;
use crate::trace::{Counts, Trace};
use crate::waits::Waits;
use rustix::process::Signal;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const MIB: f64 = 1024.0 * 1024.0;

/// What can be started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// A server with its version, and whether it has `--metrics`, and the commands that C beanstalkd
    /// does not have.
    Real { path: String, version: String, can_tell_metrics: bool, has_extensions: bool },
    /// The ceiling.
    Limit,
}

impl Program {
    /// The server at this path, if it prints its version.
    pub fn find(path: &str) -> Result<Program, String> {
        let output = Command::new(path).arg("-v").stdin(Stdio::null()).output();
        let output = output.map_err(|error| format!("{path}: {error}"))?;
        let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if version.is_empty() {
            return Err(format!("{path}: prints no version with -v"));
        }
        let help = Command::new(path).arg("-h").stdin(Stdio::null()).output();
        let help = help.map_err(|error| format!("{path}: {error}"))?;
        // The help is on standard error.
        let help = String::from_utf8_lossy(&[help.stdout, help.stderr].concat()).into_owned();
        let can_tell_metrics = help.contains("--metrics");
        // The flag came in the same version as the commands.
        let has_extensions = help.contains("--bury-after");
        let path = path.to_owned();
        Ok(Program::Real { path, version, can_tell_metrics, has_extensions })
    }

    pub fn name(&self) -> &str {
        match self {
            Program::Real { path, .. } => path,
            Program::Limit => "limit",
        }
    }

    pub fn has_extensions(&self) -> bool {
        matches!(self, Program::Real { has_extensions: true, .. })
    }

    pub fn version(&self) -> &str {
        match self {
            Program::Real { version, .. } => version,
            Program::Limit => "limit server",
        }
    }
}

/// How a server is started.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    pub flags: Vec<String>,
    pub has_binlog: bool,
    pub tells_metrics: bool,
    /// Whether it runs in valgrind, which counts the instructions of user space.
    pub counts_instructions: bool,
    /// The size of bodies as the limit server needs to know it.
    pub body_size: usize,
}

/// A running server; killed when it goes out of scope.
pub struct Server {
    pub address: SocketAddr,
    /// The address of its metrics.
    pub metrics: Option<SocketAddr>,
    command: Command,
    process: Process,
    binlog: Option<TempDir>,
    instructions: Option<Instructions>,
    /// Whether system calls are counted, which takes time of its own.
    pub is_traced: bool,
    /// Whether it has the commands that C beanstalkd does not have.
    pub has_extensions: bool,
}

impl Server {
    pub fn start(program: &Program, setup: &Setup) -> Server {
        let address = free_address();
        let metrics = setup.tells_metrics.then(free_address);
        let binlog = setup.has_binlog.then(|| {
            // Below the directory of cargo's, which is on a real disk.
            tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory can be made")
        });
        let instructions = setup.counts_instructions.then(Instructions::new);
        let mut command = match program {
            Program::Limit => {
                let own = std::env::current_exe().expect("the benchmark is a file");
                let mut command = start_command(&own, instructions.as_ref());
                let body_size = setup.body_size.to_string();
                command.args(["--limit-server", &body_size, &address.to_string()]);
                command
            }
            Program::Real { path, .. } => {
                let mut command = start_command(Path::new(path), instructions.as_ref());
                let port = address.port().to_string();
                command.args(["-l", "127.0.0.1", "-p", &port]).args(&setup.flags);
                if let Some(directory) = &binlog {
                    command.arg("-b").arg(directory.path());
                }
                if let Some(metrics) = metrics {
                    command.args(["--metrics", &metrics.to_string()]);
                }
                command
            }
        };
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null());
        let process = spawn_on_first_core(&mut command);
        let mut server = Server {
            address,
            metrics,
            command,
            process,
            binlog,
            instructions,
            is_traced: false,
            has_extensions: program.has_extensions(),
        };
        let is_up = server.wait_for_port(Duration::from_secs(10)).is_ok();
        assert!(is_up, "{} does not listen on {address}", program.name());
        server
    }

    /// Ends it as an operator would.
    pub fn terminate(&mut self) {
        self.process.end(Signal::TERM);
    }

    /// How many instructions it has run in user space, from its start to its end. It has ended.
    pub fn instructions(&self) -> f64 {
        let instructions = self.instructions.as_ref();
        instructions.expect("the scenario has asked for it").count()
    }

    /// Starts it again, with the same flags and binlog.
    pub fn start_again(&mut self, patience: Duration) -> Outcome<()> {
        self.process = spawn_on_first_core(&mut self.command);
        self.wait_for_port(patience)
    }

    fn wait_for_port(&mut self, patience: Duration) -> Outcome<()> {
        let end = Instant::now() + patience;
        while TcpStream::connect(self.address).is_err() {
            if let Some(status) = self.process.exit_status() {
                let program = self.command.get_program().display();
                panic!("{program} exits before it listens: {status}");
            }
            if Instant::now() >= end {
                return Err(TooSlow);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Runs work against the server, and returns its cost.
    pub fn measure(&self, work: impl FnOnce() -> Outcome<Run>) -> Outcome<Measured> {
        let trace = self.is_traced.then(|| Trace::start(self.pid())).flatten();
        let (cpu_before_ns, start) = (self.cpu_ns(), Instant::now());
        let run = work()?;
        let elapsed_ns = nanoseconds(start.elapsed());
        let cpu_ns = self.cpu_ns() - cpu_before_ns;
        let counts = trace.map(Trace::stop).unwrap_or_default();
        let ops = run.replies;
        let (elapsed_s, cpu_us) = (elapsed_ns as f64 / 1e9, cpu_ns as f64 / 1e3);
        let mut latencies = run.latencies;
        latencies.sort_unstable();
        Ok(Measured { ops: ops as f64, elapsed_s, cpu_us, latencies, counts })
    }

    /// Processor time of all threads.
    pub fn cpu_ns(&self) -> u64 {
        nanoseconds(self.process.processor_time())
    }

    /// How long it, or the calling thread, waits for a core.
    pub fn waits(&self) -> Waits {
        Waits::of(self.pid())
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn rss_bytes(&self) -> f64 {
        self.process.rss_kib() as f64 * 1024.0
    }

    pub fn peak_rss_bytes(&self) -> f64 {
        self.process.peak_rss_kib() as f64 * 1024.0
    }

    /// What it has made the disk write, in whole pages.
    pub fn written_bytes(&self) -> f64 {
        let io = fs::read_to_string(format!("/proc/{}/io", self.pid())).expect("the server runs");
        let bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok());
        bytes.unwrap_or_else(|| panic!("/proc/PID/io has no write_bytes: {io}"))
    }

    /// The files of the binlog together.
    pub fn binlog_bytes(&self) -> f64 {
        let directory = self.binlog.as_ref().expect("the server has a binlog");
        let files = fs::read_dir(directory.path()).expect("the directory is there");
        // A file may go away while it is looked at.
        let sizes = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len()));
        sizes.map(|size| size as f64).sum()
    }
}

/// What some work has cost a server.
pub struct Measured {
    pub ops: f64,
    pub elapsed_s: f64,
    pub cpu_us: f64,
    /// In nanoseconds, the shortest first.
    pub latencies: Vec<u64>,
    pub counts: Counts,
}

impl Measured {
    /// The figures that every scenario has.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        figures.add("ops_per_s", self.ops / self.elapsed_s);
        // Of less than a thousand, 99.9% are all.
        for (name, share, needed) in
            [("p50_us", 0.5, 1), ("p99_us", 0.99, 1), ("p99.9_us", 0.999, 1000), ("max_us", 1.0, 1)]
        {
            if self.latencies.len() >= needed {
                figures.add(name, self.latency_us(share));
            }
        }
        figures.add("cpu_us_per_op", self.cpu_us / self.ops);
        if let Some(calls) = self.counts.system_calls {
            figures.add("syscalls_per_op", calls / self.ops);
        }
        if let Some(instructions) = self.counts.user_instructions {
            figures.add("user_instructions_per_op", instructions / self.ops);
        }
        figures
    }

    /// So large a share of all requests took no longer than this.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    fn latency_us(&self, share: f64) -> f64 {
        let last = self.latencies.len() - 1;
        self.latencies[(share * last as f64).ceil() as usize] as f64 / 1e3
    }
}

/// Not every server takes an inherited socket, so a free port is looked for and given up again;
/// a benchmark that fails for this can be started again.
fn free_address() -> SocketAddr {
    let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has a free port");
    probe.local_addr().expect("a bound socket has an address")
}

fn spawn_on_first_core(command: &mut Command) -> Process {
    machine::on_first_core(|| Process::spawn(command))
}

/// The program itself, or valgrind with it as its argument.
fn start_command(program: &Path, instructions: Option<&Instructions>) -> Command {
    match instructions {
        None => Command::new(program),
        Some(instructions) => instructions.command(program),
    }
}
