//! Jobs that come back from their workers: the TTR runs out, or the connection closes.
//!
//! With `--bury-after N` a job is buried that came back N times since it was put or last kicked. A `release` by the
//! worker does not count. The number is not recorded in the binlog.

use super::client::Client;
use super::counts::CountedEvent;
use super::job::{Job, Target};
use super::outcomes::End;
use super::{Queue, WORK_PER_MOVE};
use crate::engine::keys::JobKey;
use crate::engine::time::Nanos;
use log::warn;

/// Limits the log lines about buried jobs: a broken worker, or a broken disk, may lose thousands of jobs at once.
#[derive(Debug, Default)]
pub struct BuryLog {
    /// The beginning of the interval.
    began_at: Nanos,
    /// The number of jobs that were buried in the interval, or could not be read.
    buried: u64,
}

/// In each interval, at most this many jobs are logged one by one.
const MAX_LOGGED: u64 = 100;
const INTERVAL: Nanos = Nanos::from_secs(10);

impl Queue {
    /// Makes a job ready that this connection has reserved, and whose body there is no memory for.
    pub fn give_back(&mut self, client: &mut Client, key: JobKey, id: u64) {
        if self.is_held(client, key, id) {
            self.stop_ttr(client, key);
            self.take_back(client, key, End::Disconnect);
        }
    }

    /// Makes a reserved job ready that comes back from its worker, or buries it if it came back too
    /// often.
    ///
    /// A job whose body was not read yet, or whose reply a remote disk holds back, has not reached its worker:
    /// neither its reserve nor its return counts.
    pub(super) fn take_back(&mut self, client: &mut Client, key: JobKey, end: End) {
        self.work.spend(WORK_PER_MOVE);
        let has_begun = self.due(&self.jobs[key]).is_some();
        if has_begun && matches!(end, End::Timeout) {
            self.count_event(key, CountedEvent::Timeout);
            self.totals.timeouts += 1;
        }
        let job = &mut self.jobs[key];
        job.returns = job.returns.saturating_add(u16::from(has_begun));
        let returns = job.returns;
        let is_last =
            self.settings.bury_after.is_some_and(|limit| has_begun && returns >= limit.get());
        // Without space for the record of the bury, the job becomes ready.
        if !is_last || self.reserve_update().is_err() {
            self.take(client, key, has_begun.then_some(end));
            if !has_begun {
                self.uncount_reserve(key);
            }
            return self.attach(key, Target::Ready);
        }
        self.count_event(key, CountedEvent::Bury);
        let Job { id, tube, .. } = self.jobs[key];
        let target = self.next_burial();
        self.transition(client, key, target, end);
        let tube = &mut self.tubes[tube];
        tube.buried_after_returns += 1;
        if self.bury_log.is_allowed(self.now) {
            warn!("job {id} in tube \"{}\" came back {returns} times: burying it", tube.name);
        }
    }

    /// Does not count the reserve of a job that has not reached its worker.
    pub(super) fn uncount_reserve(&mut self, key: JobKey) {
        let mut counts = self.counts(&self.jobs[key]);
        let reserves = &mut counts[CountedEvent::Reserve as usize];
        *reserves = reserves.wrapping_sub(1);
        self.set_counts(key, counts);
    }
}

impl BuryLog {
    /// Returns whether one more buried job is logged.
    pub(super) fn is_allowed(&mut self, now: Nanos) -> bool {
        if now >= self.began_at + INTERVAL {
            self.end_interval();
            self.began_at = now;
        }
        self.buried += 1;
        self.buried <= MAX_LOGGED
    }

    /// Returns when [`BuryLog::tick`] has something to do.
    pub(super) fn next_due(&self) -> Nanos {
        if self.buried > MAX_LOGGED { self.began_at + INTERVAL } else { Nanos::NEVER }
    }

    /// Logs how many buried jobs were not logged, if the interval has passed.
    pub(super) fn tick(&mut self, now: Nanos) {
        if self.next_due() <= now {
            self.end_interval();
        }
    }

    fn end_interval(&mut self) {
        let unlogged = self.buried.saturating_sub(MAX_LOGGED);
        if unlogged > 0 {
            warn!("{unlogged} more jobs came back too often, or cannot be read");
        }
        self.buried = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_hundred_lines_are_allowed_in_ten_seconds() {
        let mut log = BuryLog::default();
        for start in [100, 110, 500] {
            let allowed = (0..1_000).filter(|&millis| {
                log.is_allowed(Nanos::from_secs(start) + Nanos::from_millis(millis * 9))
            });
            assert_eq!(allowed.count(), 100, "from second {start}");
        }
    }
}
