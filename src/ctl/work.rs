//! Work on many jobs: the question before it, its progress, Ctrl-C, and the line at its end. It must not
//! know what the work is.

use super::{Ctl, EXIT_PARTLY, EXIT_USAGE, complain, print, print::grouped, print::json_object};
use crate::os::failure::Failure;
use crate::os::sys::signals::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// Work that ends early, with a report, if SIGINT arrives.
pub struct Work {
    /// The beginning of the last line: `moved`; nothing without that line.
    line: String,
    is_json: bool,
    pub is_dry_run: bool,
    /// The number of jobs that are done.
    pub done: u64,
    /// The number of jobs that the work is about; 0 if it shows no progress.
    total: u64,
    signals: Option<Signals>,
    is_stopped: bool,
    /// Whether something was not found or not done.
    has_failed: bool,
}

/// Asks before work that destroys. Without a terminal, `--yes` is needed.
pub fn confirm(ctl: &Ctl, question: &str) -> Result<(), Failure> {
    if ctl.is_confirmed {
        return Ok(());
    }
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        let message = "needs --yes without a terminal; nothing was changed";
        return Err(Failure::new(EXIT_USAGE, message));
    }
    let _ = write!(io::stderr(), "{question} [y/N] ");
    let mut answer = String::new();
    let _ = io::stdin().read_line(&mut answer);
    let is_yes = ["y", "Y", "yes"].contains(&answer.trim());
    if is_yes { Ok(()) } else { Err(Failure::new(EXIT_USAGE, "nothing was changed")) }
}

impl Work {
    /// Starts the work. From now on, SIGINT stops it between two jobs. The last line begins with `done`, or in
    /// a dry run with what it would do.
    pub fn start(ctl: &Ctl, verb: &str, done: &str, total: u64) -> Work {
        let &Ctl { is_json, is_dry_run, .. } = ctl;
        let line = if is_dry_run { format!("would {verb}") } else { done.to_owned() };
        // Without the descriptor, SIGINT ends the process: jobs that it holds become ready again.
        let signals = Signals::take().ok();
        let (is_stopped, has_failed) = (false, false);
        Work { line, is_json, is_dry_run, done: 0, total, signals, is_stopped, has_failed }
    }

    /// Counts jobs that are done.
    pub fn add(&mut self, jobs: u64) {
        let percent = |done: u64| (done * 100).checked_div(self.total).unwrap_or(0);
        let (before, now) = (percent(self.done), percent(self.done + jobs));
        self.done += jobs;
        if self.total > 1 && now > before {
            self.show(&format!("{}/{} {now}%", grouped(self.done), grouped(self.total)));
        }
    }

    /// Shows progress on a terminal, in place of what it showed before.
    pub fn show(&self, text: &str) {
        if io::stderr().is_terminal() {
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
        }
    }

    /// Reports what was not found or not done.
    pub fn fail(&mut self, message: &str) {
        self.has_failed = true;
        self.show("");
        complain(message);
    }

    /// Returns whether the work should stop now.
    pub fn is_stopped(&mut self) -> bool {
        self.is_stopped |= self.signals.as_ref().is_some_and(|signals| signals.next().is_some());
        self.is_stopped
    }

    /// Waits, and returns whether the work should stop.
    pub fn wait(&mut self, time: Duration) -> bool {
        let timeout = Timespec::try_from(time).ok();
        let mut signals: Vec<PollFd<'_>> =
            self.signals.iter().map(|signals| PollFd::new(signals, PollFlags::IN)).collect();
        let _ = poll(&mut signals, timeout.as_ref());
        self.is_stopped()
    }

    /// Prints what was done, and returns the exit code. `ended` may have a failure that ended the work
    /// early.
    pub fn end(mut self, ended: Result<(), Failure>) -> Result<u8, Failure> {
        self.show("");
        let line = match self.is_json {
            true => json_object([(&*self.line, self.done.to_string())]),
            false => format!("{} {}", self.line, self.done),
        };
        let printed = match &*self.line {
            "" => Ok(()),
            // Stdout has the jobs.
            "exported" => writeln!(io::stderr(), "{line}").or(Ok(())),
            _ => print(&line),
        };
        ended.and(printed)?;
        if self.is_stopped() {
            complain("interrupted");
        }
        Ok(if self.is_stopped || self.has_failed { EXIT_PARTLY } else { 0 })
    }
}
