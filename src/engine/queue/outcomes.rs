//! How long the jobs of a tube wait and run, and how their reservations end: for `--metrics`. Without it
//! nothing is counted.
//!
//! A tube has one box, from its first reservation or kick on. A job has no more data: its wait ends with its
//! first reservation, and the entry of a reserved job has the time of the reservation.

use super::Queue;
use super::tube::Tube;
use crate::engine::collections::histogram::{Histogram, Scale};
use crate::engine::keys::JobKey;
use crate::engine::time::Nanos;

/// The counts of a tube.
#[derive(Clone, Debug, Default)]
pub struct Outcomes {
    /// The times from the put and the end of its delay to the first reservation.
    pub waits: Histogram<Slow>,
    /// The times from a reservation to the delete by its holder.
    pub runs: Histogram<Slow>,
    /// The ends of reservations, by [`End`].
    pub ended: [u64; End::NAMES.len()],
    /// The number of kicked jobs.
    pub kicks: u64,
}

const _: () =
    assert!(size_of::<Outcomes>() <= 256, "a tube that gave out a job has 256 bytes more");

/// The way in which a reservation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A delete by the holder, or a flush.
    Delete,
    Release,
    Bury,
    /// The TTR ran out.
    Timeout,
    /// The connection of the holder was closed.
    Disconnect,
}

impl End {
    /// The names of all ends in metrics, in their order.
    pub const NAMES: [&str; 5] = ["delete", "release", "bury", "timeout", "disconnect"];
}

/// The bounds of the times of jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slow;

impl Scale for Slow {
    type Counts = [u64; 7];

    const BOUNDS: &'static [(u64, &'static str)] = &[
        (100_000_000, "0.1"),
        (1_000_000_000, "1"),
        (10_000_000_000, "10"),
        (60_000_000_000, "60"),
        (600_000_000_000, "600"),
        (3_600_000_000_000, "3600"),
    ];
}

impl Outcomes {
    /// Returns the number of reservations that have ended, and the number of these that failed.
    pub fn ends(&self) -> (u64, u64) {
        let [_, _, bury, timeout, disconnect] = self.ended;
        (self.ended.iter().sum(), bury + timeout + disconnect)
    }

    /// Returns whether the time of a job was counted.
    pub fn has_times(&self) -> bool {
        self.waits.total() + self.runs.total() > 0
    }

    /// Adds the times of another tube, which has none then.
    pub fn take_times(&mut self, other: &mut Outcomes) {
        self.waits.add(&std::mem::take(&mut other.waits));
        self.runs.add(&std::mem::take(&mut other.runs));
    }

    /// Adds the counts of another tube.
    pub fn add(&mut self, other: &Outcomes) {
        self.waits.add(&other.waits);
        self.runs.add(&other.runs);
        self.ended.iter_mut().zip(other.ended).for_each(|(sum, count)| *sum += count);
        self.kicks += other.kicks;
    }
}

impl Tube {
    fn outcomes(&mut self) -> &mut Outcomes {
        self.outcomes.get_or_insert_default()
    }
}

impl Queue {
    /// Returns whether these are counted.
    pub(super) fn has_metrics(&self) -> bool {
        self.settings.metrics_tubes.is_some()
    }

    /// Counts the wait of a job that is about to be reserved, if it never was before.
    #[inline]
    pub(super) fn count_wait(&mut self, key: JobKey) {
        if self.has_metrics() && self.jobs[key].counts.is_never_reserved() {
            let job = &self.jobs[key];
            let wait = self.now.since(job.created_at + Nanos::from_secs(job.delay_secs));
            self.tubes[job.tube].outcomes().waits.count(wait);
        }
    }

    /// Counts the end of a reservation that began at this moment.
    pub(super) fn count_end(&mut self, key: JobKey, reserved_at: Nanos, end: End) {
        if !self.has_metrics() {
            return;
        }
        let job = &self.jobs[key];
        let has_run = end == End::Delete && !self.is_flushed(job);
        let outcomes = self.tubes[job.tube].outcomes();
        outcomes.ended[end as usize] += 1;
        if has_run {
            outcomes.runs.count(self.now.since(reserved_at));
        }
    }

    pub(super) fn count_kick(&mut self, key: JobKey) {
        if self.has_metrics() {
            self.tubes[self.jobs[key].tube].outcomes().kicks += 1;
        }
    }
}
