//! One server under test: its start, its end, and its figures.

use crate::client::{Outcome, Pool, TooSlow, nanoseconds};
use crate::harness::process::Process;
use crate::load::{Load, Run};
use crate::machine::{self, Trace, Waits};
use crate::report::Figures;
use crate::scenarios::Scenario;
use rustix::process::Signal;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const MIB: f64 = 1024.0 * 1024.0;
/// How long a server may take for a step beside the measured ones.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// In the directory of the server, which leaves files alone that are not its own.
const VALGRIND_LOG: &str = "valgrind.log";

#[derive(Debug)]
pub struct Program {
    /// Its path, or `limit`: the server that keeps no queue.
    pub name: String,
    pub version: String,
    help: String,
    pub is_limit: bool,
}

impl Program {
    pub fn limit() -> Program {
        let (name, version) = ("limit".to_owned(), "limit server".to_owned());
        Program { name, version, help: String::new(), is_limit: true }
    }

    /// The server at this path, if it prints its version.
    pub fn find(path: &str) -> Result<Program, String> {
        let run = |flag| {
            let output = Command::new(path).arg(flag).stdin(Stdio::null()).output();
            let output = output.map_err(|error| format!("{path}: {error}"))?;
            // C beanstalkd prints its help to standard error.
            let text = [output.stdout, output.stderr].concat();
            Ok::<_, String>(String::from_utf8_lossy(&text).trim().to_owned())
        };
        let (version, help) = (run("-v")?, run("-h")?);
        if version.is_empty() {
            return Err(format!("{path}: prints no version with -v"));
        }
        Ok(Program { name: path.to_owned(), version, help, is_limit: false })
    }

    /// Whether it has the commands that C beanstalkd does not have. A flag came with them.
    pub fn has_extensions(&self) -> bool {
        self.help.contains("--bury-after")
    }

    pub fn can_play(&self, scenario: &Scenario) -> bool {
        let has_flags = self.help.contains("--metrics") || !scenario.flags.contains("--metrics");
        let has_commands = self.has_extensions() || !scenario.needs_extensions;
        if self.is_limit { scenario.has_limit } else { has_flags && has_commands }
    }
}

/// A running server; killed when it goes out of scope.
pub struct Server {
    pub address: SocketAddr,
    pub metrics: SocketAddr,
    pub has_extensions: bool,
    /// Whether system calls are counted, which takes time of its own.
    pub is_traced: bool,
    command: Command,
    process: Process,
    directory: TempDir,
}

impl Server {
    /// Starts it with the flags of the scenario, in which `DIR` is a directory of its own and
    /// `METRICS` an address.
    pub fn start(program: &Program, scenario: &Scenario) -> Server {
        let (address, metrics) = (free_address(), free_address());
        // Below the directory of cargo's, which is on a real disk.
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"));
        let directory = directory.expect("a directory can be made");
        let own = std::env::current_exe().expect("the benchmark is a file");
        let path = if program.is_limit { &own } else { Path::new(&program.name) };
        let mut command = if scenario.counts_instructions {
            machine::counting(path, &directory.path().join(VALGRIND_LOG))
        } else {
            Command::new(path)
        };
        if program.is_limit {
            command.args(["--limit-server", &scenario.body_len.to_string(), &address.to_string()]);
        } else {
            command.args(["-l", "127.0.0.1", "-p", &address.port().to_string()]);
            command.args(scenario.flags.split_whitespace().map(|flag| match flag {
                "DIR" => directory.path().display().to_string(),
                "METRICS" => metrics.to_string(),
                flag => flag.to_owned(),
            }));
        }
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null());
        let process = machine::spawn_on_first_core(&mut command);
        let (has_extensions, is_traced) = (program.has_extensions(), false);
        let mut server =
            Server { address, metrics, has_extensions, is_traced, command, process, directory };
        let is_up = server.wait_for_port().is_ok();
        assert!(is_up, "{} does not listen on {address}", program.name);
        server
    }

    pub fn terminate(&mut self) {
        self.process.end(Signal::TERM);
    }

    /// The instructions of user space, from its start to its end, if the scenario counts them.
    pub fn instructions(&self) -> f64 {
        machine::instructions(&self.directory.path().join(VALGRIND_LOG))
    }

    pub fn start_again(&mut self) -> Outcome<()> {
        self.process = machine::spawn_on_first_core(&mut self.command);
        self.wait_for_port()
    }

    fn wait_for_port(&mut self) -> Outcome<()> {
        let end = Instant::now() + PATIENCE;
        while TcpStream::connect(self.address).is_err() {
            if let Some(status) = self.process.exit_status() {
                let program = self.command.get_program().display();
                panic!("{program} exits before it listens: {status}");
            }
            if Instant::now() >= end {
                return Err(TooSlow);
            }
            // A sleep would be a part of the time of a start.
            std::thread::yield_now();
        }
        Ok(())
    }

    pub fn connect(&self, count: usize) -> Pool {
        Pool::connect(self.address, count)
    }

    pub fn run(&self, load: &Load) -> Outcome<Run> {
        self.connect(1).run(load)
    }

    /// Runs work against the server, and returns its cost.
    pub fn measure(&self, work: impl FnOnce() -> Outcome<Run>) -> Outcome<Measured> {
        let trace = self.is_traced.then(|| Trace::start(self.pid())).flatten();
        let (cpu_before_ns, faults_before) = (self.cpu_ns(), self.page_faults());
        let start = Instant::now();
        let mut run = work()?;
        let elapsed_s = start.elapsed().as_secs_f64();
        let cpu_us = (self.cpu_ns() - cpu_before_ns) as f64 / 1e3;
        let page_faults = self.page_faults() - faults_before;
        let system_calls = trace.and_then(Trace::stop);
        run.latencies.sort_unstable();
        let (ops, stalls) = (run.replies as f64, Figures::default());
        Ok(Measured { ops, run, elapsed_s, cpu_us, stalls, page_faults, system_calls })
    }

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

    /// Page faults that needed no disk.
    fn page_faults(&self) -> f64 {
        let stat = self.proc_file("stat");
        let after_name = stat.rsplit_once(") ").expect("the name is in brackets").1;
        let faults = after_name.split(' ').nth(7).and_then(|field| field.parse().ok());
        faults.unwrap_or_else(|| panic!("/proc/PID/stat has no faults: {stat}"))
    }

    /// What it has made the disk write, in whole pages.
    pub fn written_bytes(&self) -> f64 {
        let io = self.proc_file("io");
        let bytes = io.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok());
        bytes.unwrap_or_else(|| panic!("/proc/PID/io has no write_bytes: {io}"))
    }

    fn proc_file(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.pid())).expect("the server runs")
    }

    pub fn binlog_bytes(&self) -> f64 {
        let files = fs::read_dir(self.directory.path()).expect("the directory is there");
        // A file may go away while it is looked at.
        let sizes = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len()));
        sizes.map(|size| size as f64).sum()
    }
}

pub struct Measured {
    pub ops: f64,
    /// Its latencies are sorted.
    pub run: Run,
    pub elapsed_s: f64,
    pub cpu_us: f64,
    /// Of a probe beside the work, if there was one.
    pub stalls: Figures,
    page_faults: f64,
    system_calls: Option<f64>,
}

impl Measured {
    /// The figures that every scenario has.
    pub fn figures(&self) -> Figures {
        let per_second = |count: f64| count / self.elapsed_s;
        let mut figures = Figures::of([("ops_per_s", per_second(self.ops))]);
        let latencies = &self.run.latencies;
        // Of less than a thousand, 99.9% are all.
        for (name, permille, needed) in
            [("p50_us", 500, 1), ("p99_us", 990, 1), ("p99.9_us", 999, 1000), ("max_us", 1000, 1)]
        {
            if latencies.len() >= needed {
                let index = (permille * (latencies.len() - 1)).div_ceil(1000);
                figures = figures.with("", Figures::of([(name, latencies[index] as f64 / 1e3)]));
            }
        }
        let calls =
            self.system_calls.map(|calls| Figures::of([("syscalls_per_op", calls / self.ops)]));
        figures
            .with("", Figures::of([("cpu_us_per_op", self.cpu_us / self.ops)]))
            .with("", Figures::of([("faults_per_s", per_second(self.page_faults))]))
            .with("", calls.unwrap_or_default())
            .with("", self.stalls.clone())
    }
}

/// Not every server takes an inherited socket, so a free port is looked for and given up again;
/// a benchmark that fails for this can be started again.
fn free_address() -> SocketAddr {
    let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has a free port");
    probe.local_addr().expect("a bound socket has an address")
}
