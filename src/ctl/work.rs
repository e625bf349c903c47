//! Work on many jobs: the question before it, its progress, Ctrl-C, and the line at its end. It must not
//! know what the work is.

use super::{Ctl, EXIT_PARTLY, EXIT_USAGE, complain, print::grouped};
use crate::os::failure::Failure;
use crate::os::sys::signals::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

/// Work that ends early, with a report, if SIGINT arrives.
pub struct Work {
    /// What was done, for the last line: `moved`.
    verb: &'static str,
    /// The number of jobs that are done.
    pub done: u64,
    /// The number of jobs that the work is about; 0 if it shows no progress.
    total: u64,
    signals: Option<Signals>,
    is_stopped: bool,
    /// Whether something was not found or not done.
    has_failed: bool,
    shows_progress: bool,
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
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::new(EXIT_USAGE, "nothing was changed")),
    }
}

impl Work {
    /// Starts the work. From now on, SIGINT stops it between two jobs.
    pub fn start(verb: &'static str, total: u64) -> Work {
        let shows_progress = total > 1 && io::stderr().is_terminal();
        // Without the descriptor, SIGINT ends the process: jobs that it holds become ready again.
        let signals = Signals::take().ok();
        Work { verb, done: 0, total, signals, is_stopped: false, has_failed: false, shows_progress }
    }

    /// Counts jobs that are done.
    pub fn add(&mut self, jobs: u64) {
        let percent = |done: u64| (done * 100).checked_div(self.total).unwrap_or(0);
        let before = percent(self.done);
        self.done += jobs;
        let now = percent(self.done);
        if self.shows_progress && now > before {
            let (done, total) = (grouped(self.done), grouped(self.total));
            let _ = write!(io::stderr(), "\r{done}/{total} {now}%");
        }
    }

    /// Reports what was not found or not done.
    pub fn fail(&mut self, message: &str) {
        self.has_failed = true;
        self.clear_progress();
        complain(message);
    }

    /// Returns whether the work should stop now.
    pub fn is_stopped(&mut self) -> bool {
        self.is_stopped |= self.signals.as_ref().is_some_and(|signals| signals.next().is_some());
        self.is_stopped
    }

    /// Waits, and returns whether the work should stop.
    pub fn wait(&mut self, time: Duration) -> bool {
        let Some(signals) = &self.signals else {
            std::thread::sleep(time);
            return false;
        };
        let timeout = Timespec::try_from(time).ok();
        let _ = poll(&mut [PollFd::new(signals, PollFlags::IN)], timeout.as_ref());
        self.is_stopped()
    }

    /// Shows what the work waits for.
    pub fn show(&self, text: &str) {
        if io::stderr().is_terminal() {
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
        }
    }

    /// Prints what was done on stdout, and returns the exit code. `ended` may have a failure that ended
    /// the work early.
    pub fn end(mut self, ended: Result<(), Failure>) -> Result<u8, Failure> {
        self.clear_progress();
        let line = format!("{} {}", self.verb, self.done);
        let printed = match self.verb {
            "" => Ok(()),
            // Stdout has the jobs.
            "exported" => {
                let _ = writeln!(io::stderr(), "{line}");
                Ok(())
            }
            _ => super::print(&line),
        };
        ended.and(printed)?;
        if self.is_stopped() {
            complain("interrupted");
        }
        Ok(if self.is_stopped || self.has_failed { EXIT_PARTLY } else { 0 })
    }

    fn clear_progress(&self) {
        if io::stderr().is_terminal() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}
