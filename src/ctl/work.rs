//! Work on many jobs: the question before it, its progress, Ctrl-C, and the line at its end. It must not
//! know what the work is.

use super::conn::Fields;
use super::print::json_string;
use super::{Ctl, EXIT_PARTLY, EXIT_USAGE, complain, print};
use crate::engine::text::{CountOf, Grouped};
use crate::os::failure::Failure;
use crate::os::sys::signals::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// Work that ends early, with a report, if SIGINT arrives.
#[derive(Default)]
pub struct Work {
    /// The beginning of the last line: `moved`; nothing without that line.
    line: String,
    /// The number of jobs that are done.
    pub done: u64,
    /// The number of jobs that cannot be reserved, because others with their `con:` key are.
    pub blocked: u64,
    /// The number of jobs that the work is about; 0 if it shows no progress.
    total: u64,
    signals: Option<Signals>,
    is_stopped: bool,
    /// The exit code, unless the work ends with a failure.
    pub exit_code: u8,
}

impl Ctl {
    /// Asks before work that destroys. Without a terminal, `--yes` is needed.
    pub fn confirm(&self, question: &str) -> Result<(), Failure> {
        if self.is_confirmed {
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

    /// Returns one of both: the object with `--json`, and the line without.
    pub fn either(&self, object: Fields, line: String) -> String {
        if self.is_json { object.to_string() } else { line }
    }

    /// Prints what a dry run would do.
    pub fn would(&self, what: &str) -> Result<(), Failure> {
        let object = Fields::of([("would", json_string(what))]);
        print(&self.either(object, format!("would {what}")))
    }

    /// Begins the work. From now on, SIGINT stops it between two jobs. The last line begins with `done`, or in
    /// a dry run with what it would do.
    pub fn begin(&mut self, verb: &str, done: &str, total: u64) {
        let line = if self.is_dry_run { format!("would {verb}") } else { done.to_owned() };
        // Without the descriptor, SIGINT ends the process: jobs that it holds become ready again.
        self.work = Work { line, total, signals: Signals::take().ok(), ..Work::default() };
    }

    /// Prints what was done, and returns the exit code. `ended` may have a failure that ended the work
    /// early.
    pub fn end(mut self, ended: Result<(), Failure>) -> Result<u8, Failure> {
        let Work { line, done, .. } = &self.work;
        self.work.show("");
        let object = Fields::of([(&**line, done.to_string())]);
        let text = self.either(object, format!("{line} {done}"));
        let printed = match &**line {
            "" => Ok(()),
            // Stdout has the jobs.
            "exported" => writeln!(io::stderr(), "{text}").or(Ok(())),
            _ => print(&text),
        };
        if self.work.blocked > 0 {
            let stay = if self.work.blocked == 1 { "stays" } else { "stay" };
            let blocked = CountOf(self.work.blocked, "job");
            self.work.fail(&format!("{blocked} {stay}: others with their con: key are reserved"));
        }
        ended.and(printed)?;
        if self.work.is_stopped() {
            complain("interrupted");
            self.work.exit_code = EXIT_PARTLY;
        }
        Ok(self.work.exit_code)
    }
}

impl Work {
    /// Counts jobs that are done.
    pub fn add(&mut self, jobs: u64) {
        let percent = |done: u64| (done * 100).checked_div(self.total).unwrap_or(0);
        let (before, now) = (percent(self.done), percent(self.done + jobs));
        self.done += jobs;
        if self.total > 1 && now > before {
            self.show(&format!("{}/{} {now}%", Grouped(self.done), Grouped(self.total)));
        }
    }

    /// Shows progress of work that has begun, on a terminal, in place of what it showed before.
    pub fn show(&self, text: &str) {
        if self.signals.is_some() && io::stderr().is_terminal() {
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
        }
    }

    /// Reports what was not found or not done.
    pub fn fail(&mut self, message: &str) {
        self.exit_code = EXIT_PARTLY;
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
}
