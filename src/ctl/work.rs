//! Work on many jobs: which ones, the question before it, its progress, Ctrl-C, and the line at its end. It must
//! not know what is done with a job.

use super::conn::{Fields, WINDOW};
use super::look::{self, Pages, Tube};
use super::print::json_string;
use super::{Ctl, EXIT_PARTLY, EXIT_USAGE, Result, complain, print};
use crate::engine::text::{CountOf, Grouped};
use crate::os::failure::Failure;
use crate::os::sys::signals::Signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::fmt::Display;
use std::io::{self, IsTerminal, Read, Write};
use std::time::Duration;

/// How often work without progress is tried again, and the time before each further pass over a tube: a worker
/// may hold a job for a moment only.
const TRIES: usize = 5;
const TRY_PAUSE: Duration = Duration::from_millis(10);

/// Work that ends early, with a report, if SIGINT arrives.
#[derive(Default)]
pub struct Work {
    /// The number of jobs that are done.
    pub done: u64,
    /// The number of jobs that the work is about, once it has begun; 0 if it shows no progress.
    total: Option<u64>,
    /// The percentage that was shown last.
    percent: u64,
    signals: Option<Signals>,
    is_stopped: bool,
    /// The exit code, unless the work ends with a failure.
    pub exit_code: u8,
}

/// Acts on some jobs. Returns those that could not be done.
type Act<'a> = &'a dyn for<'j> Fn(&mut Ctl, &'j [Fields]) -> Result<Vec<&'j Fields>>;

/// The jobs that a command works on: those with some ids, or those of a tube.
#[derive(Default)]
pub struct Task {
    /// What follows the number of jobs and their tube in a question or a dry run.
    pub to: String,
    /// Whether it asks before it begins.
    pub asks: bool,
    /// The tube; `None` if only ids select the jobs.
    pub tube: Option<Tube>,
    /// The ids; without one, all jobs of the tube in these states are selected.
    pub ids: Vec<u64>,
    pub states: Vec<&'static str>,
    /// At most this many jobs.
    pub limit: Option<u64>,
}

impl Task {
    /// Returns the number of jobs that it still has to do at most.
    fn left(&self, ctl: &Ctl) -> u64 {
        self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(ctl.work.done))
    }

    /// Returns the number of jobs of a tube in its states.
    fn count(&self, tube: &Tube) -> u64 {
        self.states.iter().map(|state| tube.jobs(state)).sum()
    }

    /// Asks, and begins the work. A dry run on a tube prints the number of jobs and has no work. Returns whether
    /// there is work.
    pub fn begin(&self, ctl: &mut Ctl) -> Result<bool> {
        let (Task { to, tube, ids, .. }, verb) = (self, ctl.verb);
        let of_tube = tube.as_ref().map_or(String::new(), |tube| format!(" of tube {}", tube.name));
        let searched = tube.as_ref().filter(|_| ids.is_empty());
        let total = searched.map_or(ids.len() as u64, |tube| self.count(tube)).min(self.left(ctl));
        let is_part = verb == "delete" && self.states == ["buried"];
        let noun = if is_part { "buried job" } else { "job" };
        let what = format!("{}{of_tube}{to}", CountOf(total, noun));
        if ctl.is_dry_run && ids.is_empty() {
            return ctl.would(format_args!("{verb} {what}")).map(|()| false);
        }
        if self.asks {
            ctl.confirm(what)?;
        }
        ctl.begin(total);
        Ok(true)
    }

    /// Calls `act` with some of the jobs after the other, until all are done or the work is stopped.
    pub fn each(&self, ctl: &mut Ctl, act: Act<'_>) -> Result {
        match &self.tube {
            Some(tube) if self.ids.is_empty() => self.each_of(tube, ctl, act),
            _ => self.ids.chunks(WINDOW).try_for_each(|ids| self.each_named(ids.into(), ctl, act)),
        }
    }

    /// Acts on the jobs with some ids. In a dry run they are only counted.
    fn each_named(&self, mut ids: Vec<u64>, ctl: &mut Ctl, act: Act<'_>) -> Result {
        for _ in 0..TRIES {
            if ids.is_empty() || ctl.work.is_stopped() {
                return Ok(());
            }
            let jobs = self.named(ctl, &ids)?;
            if ctl.is_dry_run {
                ctl.work.add(jobs.len() as u64);
                return Ok(());
            }
            ids = act(ctl, &jobs)?.into_iter().map(|job| job.number("id")).collect();
        }
        let why = "reserved by a worker, or blocked by jobs with the same con: key";
        ids.iter().for_each(|id| ctl.work.fail(format_args!("job {id}: {why}")));
        Ok(())
    }

    /// Acts on the jobs of a tube. Jobs that are put meanwhile are left out.
    fn each_of(&self, tube: &Tube, ctl: &mut Ctl, act: Act<'_>) -> Result {
        let total = self.count(tube).min(self.left(ctl));
        let mut tries = 0;
        while ctl.work.done < total
            && tries < TRIES
            && !ctl.work.is_over()
            && let Some(tube) = look::find_tube(&mut ctl.conn, &tube.name)?
        {
            let before = ctl.work.done;
            for &state in &self.states {
                let left = total.saturating_sub(ctl.work.done).min(tube.jobs(state));
                let mut pages = Pages { tube: &tube.name, state, after: 0, left };
                while !ctl.work.is_stopped()
                    && let jobs @ [_, ..] = &pages.next(&mut ctl.conn)?[..]
                {
                    act(ctl, jobs)?;
                }
            }
            // A copy of jobs is whole after one look: those that are left are copied already.
            if ctl.verb == "export" {
                return Ok(());
            }
            // A worker may give back a job that it holds.
            tries = if ctl.work.done > before { 0 } else { tries + 1 };
            if tries > 0 {
                ctl.work.wait(TRY_PAUSE);
            }
        }
        if ctl.work.is_over() || self.left(ctl) == 0 {
            return Ok(());
        }
        let Some(tube) = look::find_tube(&mut ctl.conn, &tube.name)? else { return Ok(()) };
        let left = total.saturating_sub(ctl.work.done).min(self.count(&tube));
        let held = if self.states.contains(&"ready") { tube.jobs("reserved") } else { 0 };
        if left > 0 {
            let why = ": reserved by workers, or blocked by jobs with the same con: key";
            ctl.work.fail_left(CountOf(left, "job"), &tube, why);
        } else if held > 0 {
            ctl.work.fail_left(CountOf(held, "held job"), &tube, "");
        }
        Ok(())
    }

    /// Begins, and does all work.
    pub fn run(&self, ctl: &mut Ctl, act: Act<'_>) -> Result {
        if self.begin(ctl)? { self.each(ctl, act) } else { Ok(()) }
    }

    /// Returns the statistics of the jobs with these ids. Those that are gone, or in another tube or state,
    /// are reported.
    fn named(&self, ctl: &mut Ctl, ids: &[u64]) -> Result<Vec<Fields>> {
        let mut jobs = Vec::new();
        for (id, job) in ids.iter().zip(look::jobs(&mut ctl.conn, ids)?) {
            let Some(job) = job else {
                ctl.work.fail(format_args!("job {id}: not found"));
                continue;
            };
            let (tube, state) = (job.text("tube"), job.text("state"));
            if self.tube.as_ref().is_some_and(|own| own.name != tube) {
                ctl.work.fail(format_args!("job {id}: it is in tube {tube}"));
            } else if state == "reserved" {
                ctl.work.fail(format_args!("job {id}: a worker holds it"));
            } else if !self.states.contains(&state) {
                let states = self.states.join(" or ");
                ctl.work.fail(format_args!("job {id}: {state}, not {states}"));
            } else if (jobs.len() as u64) < self.left(ctl) {
                jobs.push(job);
            }
        }
        Ok(jobs)
    }
}

/// Stdin, which ends when one of these signals arrives.
pub struct Input(pub Option<Signals>);

impl Read for Input {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let stdin = io::stdin();
        let mut ready = vec![PollFd::new(&stdin, PollFlags::IN)];
        ready.extend(self.0.iter().map(|signals| PollFd::new(signals, PollFlags::IN)));
        poll(&mut ready, None)?;
        // The signal itself is for the work.
        let is_over = ready[1..].iter().any(|signals| !signals.revents().is_empty());
        if is_over { Ok(0) } else { Ok(rustix::io::read(&stdin, bytes)?) }
    }
}

impl Ctl {
    /// Asks before work that destroys. Without a terminal, `--yes` is needed.
    pub fn confirm(&self, what: impl Display) -> Result {
        if self.is_confirmed || self.is_dry_run {
            return Ok(());
        }
        let refuse = |why| Err(Failure::new(EXIT_USAGE, format!("{why}nothing was changed")));
        if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
            return refuse("needs --yes without a terminal; ");
        }
        let (first, rest) = self.verb.split_at(1);
        let _ = write!(io::stderr(), "{}{rest} {what}? [y/N] ", first.to_uppercase());
        let mut answer = String::new();
        let _ = io::stdin().read_line(&mut answer);
        if ["y", "Y", "yes"].contains(&answer.trim()) { Ok(()) } else { refuse("") }
    }

    /// Returns an object with this value, which is JSON, with `--json`, and the line without.
    pub fn either(&self, key: &str, value: String, line: String) -> String {
        if self.is_json { Fields::of([(key, value)]).to_string() } else { line }
    }

    /// Prints what a dry run would do.
    pub fn would(&self, what: impl Display) -> Result {
        print(self.either("would", json_string(&what.to_string()), format!("would {what}")))
    }

    /// Begins the work on some number of jobs, 0 without progress. From now on, SIGINT stops it between two jobs.
    pub fn begin(&mut self, total: u64) {
        // Without the descriptor, SIGINT still ends the process: jobs that it holds become ready again.
        self.work = Work { total: Some(total), signals: Signals::take().ok(), ..Work::default() };
    }

    /// Sends a request about each of these, and counts those that are `done`. Returns what was not found.
    pub fn request<'t, T>(
        &mut self,
        of: &'t [T],
        request: impl Fn(&T) -> String,
        done: &str,
    ) -> Result<Vec<&'t T>> {
        let mut missed = Vec::new();
        for (item, reply) in of.iter().zip(self.conn.ask_each(of, request)?) {
            match reply.word(0) {
                "NOT_FOUND" => missed.push(item),
                _ => reply.expect(done).map(|_| self.work.add(1))?,
            }
        }
        Ok(missed)
    }

    /// Prints what was done, and returns the exit code. `ended` may have a failure that ended the work
    /// early.
    pub fn end(mut self, ended: Result) -> Result<u8> {
        self.work.show("");
        let line = if self.is_dry_run { format!("would {}", self.verb) } else { self.done.into() };
        let done = self.work.done.to_string();
        let text = self.either(&line, done.clone(), format!("{line} {done}"));
        let printed = match self.done {
            word if word.is_empty() || self.work.total.is_none() => Ok(()),
            // Stdout has the jobs.
            "exported" => writeln!(io::stderr(), "{text}").or(Ok(())),
            _ => print(text),
        };
        ended.and(printed)?;
        if self.work.is_stopped() {
            self.work.fail("interrupted");
        }
        Ok(self.work.exit_code)
    }
}

impl Work {
    /// Counts jobs that are done.
    pub fn add(&mut self, jobs: u64) {
        self.done += jobs;
        let total = self.total.unwrap_or(0);
        if total > 1 {
            let (done, all) = (Grouped(self.done), Grouped(total));
            self.show_part(self.done, total, format_args!("{done}/{all}"));
        }
    }

    /// Shows `text` and how much of the whole is done, if that is another percent.
    pub fn show_part(&mut self, done: u64, whole: u64, text: impl Display) {
        let percent = (done * 100).checked_div(whole).unwrap_or(0);
        if percent > self.percent {
            self.percent = percent;
            self.show(&format!("{text} {percent}%"));
        }
    }

    /// Shows progress of work that has begun, on a terminal, in place of what it showed before.
    pub fn show(&self, text: &str) {
        if self.signals.is_some() && io::stderr().is_terminal() {
            let _ = write!(io::stderr(), "\r\x1b[K{text}");
        }
    }

    /// Reports what was not found or not done.
    pub fn fail(&mut self, message: impl Display) {
        self.exit_code = EXIT_PARTLY;
        self.show("");
        complain(message);
    }

    /// Reports jobs of a tube that were not done.
    fn fail_left(&mut self, jobs: CountOf, tube: &Tube, why: &str) {
        let are = if jobs.0 == 1 { "is" } else { "are" };
        self.fail(format_args!("{jobs} of tube {} {are} left{why}", tube.name));
    }

    /// Returns whether the work should stop now.
    pub fn is_stopped(&mut self) -> bool {
        self.is_stopped |= self.signals.as_ref().is_some_and(|signals| signals.next().is_some());
        self.is_stopped
    }

    /// Returns whether the work should stop, or something has failed: then a job may be in both places, and must not
    /// be taken again.
    fn is_over(&mut self) -> bool {
        self.exit_code != 0 || self.is_stopped()
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
