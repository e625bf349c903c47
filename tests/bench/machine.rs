//! What the kernel knows: the cores and which process runs on which, how long a thread waits for a
//! core, and the system calls and user instructions of a process.

use crate::harness::process::Process;
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

/// The cores that the benchmark was given, before it moved to one of them.
pub static CORES: LazyLock<Vec<usize>> = LazyLock::new(|| {
    let set = sched_getaffinity(None).expect("affinity can be asked");
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
});

/// The client's threads stay away from the first core if there is another one.
pub fn move_to_second_core() {
    if let [_, second, ..] = CORES[..] {
        pin_to(second);
    }
}

/// Children inherit the cores of the thread that starts them.
pub fn spawn_on_first_core(command: &mut Command) -> Process {
    let own = sched_getaffinity(None).expect("affinity can be asked");
    pin_to(CORES[0]);
    let process = Process::spawn(command);
    sched_setaffinity(None, &own).expect("what it was can be restored");
    process
}

fn pin_to(core: usize) {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).expect("a core that is there can be chosen");
}

// ---- Waiting for a core ----

/// The kernel's accounts of two threads, kept open: they are read often. A stall that comes of
/// other programs is the machine's, not the server's; with one core they cannot be separated.
pub struct Waits {
    accounts: Vec<File>,
}

impl Waits {
    /// Of this process and the calling thread. Not every kernel keeps such accounts.
    pub fn of(pid: u32) -> Waits {
        let paths = [format!("/proc/{pid}/schedstat"), "/proc/thread-self/schedstat".to_owned()];
        Waits { accounts: paths.iter().filter_map(|path| File::open(path).ok()).collect() }
    }

    /// Both together, so far.
    pub fn total(&self) -> Duration {
        self.accounts.iter().filter_map(waited).sum()
    }
}

/// The second number: nanoseconds in which the thread could have run but did not.
fn waited(account: &File) -> Option<Duration> {
    let mut buffer = [0; 128];
    let count = account.read_at(&mut buffer, 0).ok()?;
    let text = str::from_utf8(&buffer[..count]).ok()?;
    text.split(' ').nth(1)?.parse().ok().map(Duration::from_nanos)
}

// ---- System calls ----

/// `strace` at work on a process; killed when it goes out of scope.
pub struct Trace(Process);

impl Trace {
    /// Begins to count system calls, if `strace` works here.
    pub fn start(pid: u32) -> Option<Trace> {
        /// It does not report that it has attached.
        const TIME_TO_ATTACH: Duration = Duration::from_millis(300);
        let mut command = Command::new("strace");
        command.args(["-f", "-c", "-p"]).arg(pid.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut tracer = Process::try_spawn(&mut command).ok()?;
        std::thread::sleep(TIME_TO_ATTACH);
        tracer.exit_status().is_none().then_some(Trace(tracer))
    }

    /// Ends counting. Returns the count, if the machine can count.
    pub fn stop(mut self) -> Option<f64> {
        self.0.signal(Signal::INT);
        let report = self.0.read_stderr();
        self.0.wait_for_exit();
        report.lines().find_map(|line| {
            // The last line of strace: `100.00 0.001 2 1234 total`.
            let total = line.trim_end().strip_suffix(" total")?;
            total.split_whitespace().nth(3)?.parse().ok()
        })
    }
}

// ---- Instructions ----

/// The command that runs a program in valgrind; its arguments are to be added. Cachegrind counts
/// the instructions of user space, the same on every machine and under any load, unlike processor
/// time. The count is in the log when the program has ended.
pub fn counting(program: &Path, log: &Path) -> Command {
    let mut command = Command::new("valgrind");
    command.args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]);
    command.arg(format!("--log-file={}", log.display())).arg(program);
    command
}

/// From the line `==1234== I   refs:      79,993,386` of the log.
pub fn instructions(log: &Path) -> f64 {
    let log = fs::read_to_string(log).expect("the log is text");
    let count = log.lines().find_map(|line| {
        let (before, digits) = line.split_once("refs:")?;
        before.trim_end().ends_with(" I").then(|| digits.trim().replace(',', ""))?.parse().ok()
    });
    count.unwrap_or_else(|| panic!("valgrind has not counted instructions: {log}"))
}
