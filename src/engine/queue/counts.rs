//! The counts of jobs: how often each was reserved, timed out, released, buried and kicked.
//!
//! Five counts take 20 bytes. Hardly any job has a count above 63, so a job has 4 bytes:
//!
//! ```text
//! bit    31   29..24   23..18    17..12     11..6      5..0
//!      |  0 |  kicks | buries | releases | timeouts | reserves |    bit 30 is not used
//!      |  1 |  the key of the counts in [`LargeCounts`]         |
//! ```
//!
//! With a million jobs this saves 16 MB.

use super::Queue;
use crate::engine::binlog::record::Counts;
use crate::engine::collections::slab::PagedSlab;
use crate::engine::keys::{JobKey, Key, LargeCountsKey};
use std::fmt;

/// The counts of one job, or the key of its entry in [`LargeCounts`]. The owner must call
/// [`LargeCounts::remove`].
#[derive(Debug, Default)]
pub struct JobCounts(u32);

/// An event of a job that `stats-job` counts, in the order of [`Counts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedEvent {
    Reserve,
    Timeout,
    Release,
    Bury,
    Kick,
}

/// The counts of jobs that do not fit in [`JobCounts`]. Their keys have 31 bits.
#[derive(Default)]
pub struct LargeCounts(PagedSlab<LargeCountsKey, Counts>);

const BITS: u32 = 6;
/// The largest count that fits in [`JobCounts`].
const MAX_SMALL: u32 = (1 << BITS) - 1;
/// Set if the other bits are a key.
const IS_LARGE: u32 = 1 << 31;

impl Queue {
    /// Changes the counts of a job.
    pub(super) fn set_counts(&mut self, key: JobKey, counts: Counts) {
        self.large_counts.set(&mut self.jobs[key].counts, counts);
    }
}

impl JobCounts {
    /// Returns these counts if they fit.
    fn pack(counts: Counts) -> Option<JobCounts> {
        let add = |packed, &count| (count <= MAX_SMALL).then_some(packed << BITS | count);
        counts.iter().rev().try_fold(0, add).map(JobCounts)
    }

    /// Returns whether the job was never reserved. A job with large counts was, or is rare enough.
    pub fn is_never_reserved(&self) -> bool {
        self.0 & (IS_LARGE | MAX_SMALL) == 0
    }

    fn large_key(&self) -> Option<LargeCountsKey> {
        (self.0 & IS_LARGE != 0).then(|| LargeCountsKey::from_number(self.0 ^ IS_LARGE))
    }
}

impl LargeCounts {
    /// Returns the counts of a job.
    pub fn get(&self, counts: &JobCounts) -> Counts {
        match counts.large_key() {
            Some(key) => self.0[key],
            None => [0, 1, 2, 3, 4].map(|event| counts.0 >> (event * BITS) & MAX_SMALL),
        }
    }

    /// Sets the counts of a job. Without memory for large ones they stay as they are.
    pub fn set(&mut self, counts: &mut JobCounts, new: Counts) {
        match (counts.large_key(), JobCounts::pack(new)) {
            (Some(key), None) => self.0[key] = new,
            (large, Some(small)) => {
                large.map(|key| self.0.remove(key));
                *counts = small;
            }
            (None, None) if self.has_room() => {
                *counts = JobCounts(self.0.insert(new).number() | IS_LARGE);
            }
            (None, None) => {}
        }
    }

    fn has_room(&mut self) -> bool {
        self.0.try_reserve_one().is_ok() && self.0.next_key().number() & IS_LARGE == 0
    }

    /// Counts an event of a job. A count wraps to 0 as in C beanstalkd: a job from its files may have the
    /// largest one.
    #[inline]
    pub fn count_event(&mut self, counts: &mut JobCounts, event: CountedEvent) {
        let is_small = counts.0 & IS_LARGE == 0 && counts.0 >> shift(event) & MAX_SMALL < MAX_SMALL;
        if is_small {
            counts.0 += 1 << shift(event);
        } else {
            self.count_large(counts, event);
        }
    }

    #[cold]
    fn count_large(&mut self, counts: &mut JobCounts, event: CountedEvent) {
        let mut new = self.get(counts);
        let count = &mut new[event as usize];
        *count = count.wrapping_add(1);
        self.set(counts, new);
    }

    /// Removes the counts of a job that is gone.
    pub fn remove(&mut self, counts: JobCounts) {
        counts.large_key().map(|key| self.0.remove(key));
    }

    /// Returns the memory of the counts in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.0.taken_bytes()
    }

    /// Checks that `all` are the counts of all jobs.
    ///
    /// # Panics
    /// The check fails.
    pub fn check<'a>(&self, all: impl Iterator<Item = &'a JobCounts>, what: fmt::Arguments<'_>) {
        self.0.check(what);
        let mut count = 0;
        for key in all.filter_map(JobCounts::large_key) {
            assert!(self.0.get(key).is_some(), "{what}: a job refers to counts that are gone");
            count += 1;
        }
        assert_eq!(count, self.0.len(), "{what}: jobs with large counts, and large counts");
    }
}

/// Returns the position of the lowest bit of a count.
fn shift(event: CountedEvent) -> u32 {
    event as u32 * BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_grows_by_itself() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut table = LargeCounts::default();
        let mut jobs: [JobCounts; 8] = Default::default();
        let mut model = [[0_u32; 5]; 8];
        use CountedEvent::{Bury, Kick, Release, Reserve, Timeout};
        let events = [Reserve, Timeout, Release, Bury, Kick];
        for step in 0..4_000 {
            let (job, event) = (random.usize(..8), random.usize(..5));
            table.count_event(&mut jobs[job], events[event]);
            model[job][event] += 1;
            assert_eq!(table.get(&jobs[job]), model[job], "step {step}");
            table.check(jobs.iter(), format_args!("step {step}"));
        }
        assert_eq!(table.0.len(), 8, "all counts are large in the end");
        for job in jobs {
            table.remove(job);
        }
        table.check(std::iter::empty(), format_args!("no job is left"));
    }

    #[test]
    fn counts_of_a_record_are_kept_and_the_largest_wraps() {
        let mut table = LargeCounts::default();
        let mut job = JobCounts::default();
        const M: u32 = MAX_SMALL;
        let most = [M, M, M, M, u32::MAX];
        for counts in [[M; 5], most, [M + 1, M, M, M, M], [0; 5], most] {
            table.set(&mut job, counts);
            assert_eq!(table.get(&job), counts);
            assert_eq!(table.0.len(), usize::from(counts.iter().any(|&it| it > M)));
        }
        table.count_event(&mut job, CountedEvent::Kick);
        assert_eq!(table.get(&job), [M, M, M, M, 0]);
    }
}
