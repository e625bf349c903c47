//! System calls of a process, and instructions where the machine counts them: `perf` if it
//! works here, else `strace`, else nobody counts.

use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A tracer at work; killed when it goes out of scope.
pub struct Trace {
    tracer: Child,
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
        let pid = Pid::from_child(&self.tracer);
        kill_process(pid, Signal::INT).expect("the tracer still runs");
        let mut report = String::new();
        let stderr = self.tracer.stderr.as_mut().expect("it is piped");
        stderr.read_to_string(&mut report).expect("the report is text");
        self.tracer.wait().expect("a child can be waited for");
        match self.tool {
            Tool::Perf => Counts {
                system_calls: perf_count(&report, SYSTEM_CALLS),
                user_instructions: perf_count(&report, USER_INSTRUCTIONS),
            },
            Tool::Strace => Counts { system_calls: strace_total(&report), user_instructions: None },
        }
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.tracer.kill();
        let _ = self.tracer.wait();
    }
}

impl Tool {
    fn attach(self, pid: u32) -> Option<Trace> {
        /// Neither tool says when it has begun.
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
        let mut tracer = command.spawn().ok()?;
        std::thread::sleep(TIME_TO_ATTACH);
        let has_ended = tracer.try_wait().expect("a child can be asked").is_some();
        (!has_ended).then_some(Trace { tracer, tool: self })
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
