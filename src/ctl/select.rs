//! The jobs that a command works on: those with some ids, or those of a tube in some states. It must not
//! know what the work is.

use super::Ctl;
use super::conn::{Fields, WINDOW};
use super::look::{self, Pages, Tube};
use super::print::capitalized;
use crate::engine::text::CountOf;
use crate::os::failure::Failure;

/// The states of jobs that no worker holds.
pub const NOT_HELD: &[&str] = &["buried", "delayed", "ready"];

/// Selected jobs.
pub struct Selection {
    /// The tube; `None` if only ids select the jobs.
    pub tube: Option<Tube>,
    /// The ids; without one, all jobs of the tube in these states are selected.
    pub ids: Vec<u64>,
    pub states: &'static [&'static str],
    /// At most this many jobs of the tube.
    pub limit: u64,
}

/// What is done with jobs, in the words of the tool.
pub struct Task<'t> {
    /// `retry`, and `retried` in the last line.
    pub verb: &'static str,
    pub done: &'static str,
    /// What follows the number of jobs in a question or a dry run.
    pub to: &'t str,
    /// Whether it asks before it begins.
    pub asks: bool,
}

impl Selection {
    /// Selects all jobs of a tube in these states.
    pub fn of_tube(tube: Tube, states: &'static [&'static str]) -> Selection {
        Selection { tube: Some(tube), ids: Vec::new(), states, limit: u64::MAX }
    }

    /// Returns the number of selected jobs.
    fn total(&self) -> u64 {
        let count = |tube: &Tube| self.states.iter().map(|state| tube.jobs(state)).sum();
        let of_tube = self.tube.as_ref().filter(|_| self.ids.is_empty());
        of_tube.map_or(self.ids.len() as u64, |tube| self.limit.min(count(tube)))
    }

    /// Asks, and begins the work. A dry run on a tube prints the number of jobs and has no work. Returns whether
    /// there is work.
    pub fn begin(&self, ctl: &mut Ctl, task: &Task<'_>) -> Result<bool, Failure> {
        let &Task { verb, done, to, asks } = task;
        let total = self.total();
        let of_tube = self.tube.as_ref().map(|tube| format!(" of tube {}", tube.name));
        let (of_tube, jobs) = (of_tube.unwrap_or_default(), CountOf(total, "job"));
        if ctl.is_dry_run && self.ids.is_empty() {
            return ctl.would(&format!("{verb} {jobs}{of_tube}{to}")).map(|()| false);
        }
        if asks && !ctl.is_dry_run {
            ctl.confirm(&format!("{} {jobs}{of_tube}{to}?", capitalized(verb)))?;
        }
        ctl.begin(verb, done, total);
        Ok(true)
    }

    /// Calls `act` with some of the jobs after the other, until all are done or the work is stopped. In a dry
    /// run they are only counted.
    pub fn each(
        &self,
        ctl: &mut Ctl,
        mut act: impl FnMut(&mut Ctl, &[Fields]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        for window in self.ids.chunks(WINDOW) {
            if ctl.work.is_stopped() {
                return Ok(());
            }
            let jobs = self.named(ctl, window)?;
            if ctl.is_dry_run {
                ctl.work.add(jobs.len() as u64);
                continue;
            }
            let settled = |ctl: &Ctl| ctl.work.done + ctl.work.blocked;
            let before = settled(ctl);
            act(ctl, &jobs)?;
            if settled(ctl) - before < jobs.len() as u64 && !ctl.work.is_stopped() {
                ctl.work.fail(
                    "some of these jobs are gone, or held by a worker, since they were found",
                );
            }
        }
        let Some(tube) = self.tube.as_ref().filter(|_| self.ids.is_empty()) else { return Ok(()) };
        for state in self.states {
            // Jobs that are put meanwhile are left out.
            let left = self.limit.saturating_sub(ctl.work.done).min(tube.jobs(state));
            let mut pages = Pages::new(&tube.name, state, 0, left, *state != "any");
            while !ctl.work.is_stopped()
                && let jobs @ [_, ..] = &pages.next(&mut ctl.conn)?[..]
            {
                act(ctl, jobs)?;
            }
        }
        Ok(())
    }

    /// Begins, and does all work.
    pub fn run(
        &self,
        ctl: &mut Ctl,
        task: &Task<'_>,
        act: impl FnMut(&mut Ctl, &[Fields]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if self.begin(ctl, task)? { self.each(ctl, act) } else { Ok(()) }
    }

    /// Returns the statistics of the jobs with these ids. Those that are gone, or in another tube or state,
    /// are reported.
    fn named(&self, ctl: &mut Ctl, ids: &[u64]) -> Result<Vec<Fields>, Failure> {
        let mut jobs = Vec::new();
        for (id, job) in ids.iter().zip(look::jobs(&mut ctl.conn, ids)?) {
            let is_here =
                |job: &Fields| self.tube.as_ref().is_none_or(|tube| tube.name == job.text("tube"));
            match job.filter(is_here) {
                None => ctl.work.fail(&format!("job {id}: not found")),
                Some(job) if self.states.contains(&job.text("state")) => jobs.push(job),
                Some(job) => {
                    let (own, states) = (job.text("state"), self.states.join(" or "));
                    ctl.work.fail(&format!("job {id}: {own}, not {states}"));
                }
            }
        }
        Ok(jobs)
    }
}

/// Sends a request for each of these jobs. Those that are gone since they were found need none.
pub fn request(ctl: &mut Ctl, jobs: &[Fields], word: &str, done: &str) -> Result<(), Failure> {
    let replies = ctl.conn.ask_each(jobs, |job| format!("{word} {}", job.text("id")))?;
    for reply in replies.into_iter().filter(|reply| reply.line != "NOT_FOUND") {
        reply.expect(done).map(|_| ctl.work.add(1))?;
    }
    Ok(())
}
