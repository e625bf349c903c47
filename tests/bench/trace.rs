//! System calls of a process, and instructions where the machine counts them: `perf` if it
//! works here, else `strace`, else none.

use crate::harness::process::Process;
use rustix::process::Signal;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A tracer at work; killed when it goes out of scope.
pub struct Trace {
    tracer: Process,
    tool: Tool,
}

#[derive(Clone, Copy)]
enum Tool {
    Perf,
    Strace,
}

/// What was counted.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    pub system_calls: Option<f64>,
    pub user_instructions: Option<f64>,
}

impl Trace {
    /// Begins to count what this process does.
    pub fn start(pid: u32) -> Option<Trace> {
        [Tool::Perf, Tool::Strace].into_iter().find_map(|tool| tool.attach(pid))
    }

    /// Ends counting.
    pub fn stop(mut self) -> Counts {
        self.tracer.signal(Signal::INT);
        let report = self.tracer.read_stderr();
        self.tracer.wait_for_exit();
        match self.tool {
            Tool::Perf => Counts {
                system_calls: perf_count(&report, SYSTEM_CALLS),
                user_instructions: perf_count(&report, USER_INSTRUCTIONS),
            },
            Tool::Strace => Counts { system_calls: strace_total(&report), user_instructions: None },
        }
    }
}

impl Tool {
    fn attach(self, pid: u32) -> Option<Trace> {
        /// Neither tool reports that it has attached.
        const TIME_TO_ATTACH: Duration = Duration::from_millis(300);
        let pid = pid.to_string();
        let mut command = match self {
            Tool::Perf => Command::new("perf"),
            Tool::Strace => Command::new("strace"),
        };
        match self {
            Tool::Perf => command.args(["stat", "-x,", "-e", SYSTEM_CALLS, "-e"]).args([
                USER_INSTRUCTIONS,
                "-p",
                &pid,
            ]),
            Tool::Strace => command.args(["-f", "-c", "-p", &pid]),
        };
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut tracer = Process::try_spawn(&mut command).ok()?;
        std::thread::sleep(TIME_TO_ATTACH);
        tracer.exit_status().is_none().then_some(Trace { tracer, tool: self })
    }
}

const SYSTEM_CALLS: &str = "raw_syscalls:sys_enter";
const USER_INSTRUCTIONS: &str = "instructions:u";

/// From lines such as `1234,,raw_syscalls:sys_enter,...`; there is no number where the
/// machine does not count this.
fn perf_count(report: &str, event: &str) -> Option<f64> {
    let line = report.lines().find(|line| line.split(',').any(|column| column == event))?;
    line.split(',').next()?.parse().ok()
}

/// From the last line of the table: `100.00 0.001 2 1234 total`.
fn strace_total(report: &str) -> Option<f64> {
    let line = report.lines().find(|line| line.trim_end().ends_with(" total"))?;
    line.split_whitespace().nth(3)?.parse().ok()
}
