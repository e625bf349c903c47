//! The jobs of a tube in one state, or those whose keys are kept, by rank: a run of those that came in order, and a
//! heap of the others.
//!
//! Most jobs come in order. They are appended to the run, a linked list whose links are in the jobs, in
//! O(1) and without memory. The first job of all is that of the run or that of the heap:
//!
//! ```text
//! run     7 -> 8 -> 9 -> 12      a new 13 is appended
//! heap    10  11                 a new 3 is inserted
//! ```
//!
//! Only the heap needs memory. A job for which there is none comes into a tree, whose links are in the jobs
//! too, so no job is refused. Among a million jobs a place in the tree costs 2 us, and in the heap 0.1 us.

use super::job::{Job, Jobs, State};
use crate::engine::collections::chains::{low_half, mix};
use crate::engine::collections::heap::{Entry, Heap};
use crate::engine::collections::list::{Linked, Links, List};
use crate::engine::collections::tree::{Order, Tree};
use crate::engine::keys::{JobKey, Key};
use crate::engine::time::Nanos;
use std::fmt;

/// The number that decides about the order of jobs in one state.
pub trait OrderedBy: Copy + Ord + fmt::Debug {
    /// All jobs of a run have the same rank.
    const IS_EQUAL_IN_RUNS: bool;

    fn of(job: &Job) -> Self;

    /// Returns the state of the jobs.
    fn state(links: Links) -> State;
}

/// Ready jobs: the lowest priority first, then the lowest id.
impl OrderedBy for u32 {
    /// So a job with a high priority does not end a run for others, and the first is the oldest.
    const IS_EQUAL_IN_RUNS: bool = true;

    fn of(job: &Job) -> u32 {
        job.pri
    }

    fn state(links: Links) -> State {
        State::Ready(links)
    }
}

/// Delayed jobs: the first due first, then the lowest id.
impl OrderedBy for Nanos {
    const IS_EQUAL_IN_RUNS: bool = false;

    fn of(job: &Job) -> Nanos {
        job.due
    }

    fn state(links: Links) -> State {
        State::Delayed(links)
    }
}

/// Until when the key of a deleted job is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeptUntil(Nanos);

/// Deleted jobs whose keys are kept: the first to be forgotten first.
impl OrderedBy for KeptUntil {
    const IS_EQUAL_IN_RUNS: bool = false;

    fn of(job: &Job) -> KeptUntil {
        KeptUntil(job.due)
    }

    fn state(links: Links) -> State {
        State::Kept(links)
    }
}

/// A job with its rank. The id, which decides between equal ranks, is only in the job: an entry has 8 bytes with a
/// priority, and 12 with a time.
#[derive(Clone, Copy, Debug)]
#[repr(Rust, packed(4))]
pub struct TubeEntry<R> {
    rank: R,
    pub job: JobKey,
}

impl<R: OrderedBy> TubeEntry<R> {
    /// Returns the entry of a job with its present rank.
    fn of(job: u32, jobs: &Jobs) -> TubeEntry<R> {
        let job = JobKey::from_number(job);
        TubeEntry { rank: R::of(&jobs[job]), job }
    }

    /// Returns whether a run whose last entry is `last` can be continued with this one.
    fn follows(self, last: TubeEntry<R>, jobs: &Jobs) -> bool {
        let (rank, before) = (self.rank, last.rank);
        (rank == before || !R::IS_EQUAL_IN_RUNS) && last.is_before(self, jobs)
    }
}

impl<R: OrderedBy> Entry for TubeEntry<R> {
    type Store = Jobs;

    #[inline]
    fn is_before(self, other: TubeEntry<R>, jobs: &Jobs) -> bool {
        let (rank, others) = (self.rank, other.rank);
        rank < others || (rank == others && jobs[self.job].id < jobs[other.job].id)
    }

    /// A heap moves many entries: writing the state costs less than reading it first.
    fn set_index(self, index: u32, jobs: &mut Jobs) {
        jobs[self.job].state = R::state(Links::at_index(index));
    }
}

impl<R: OrderedBy> Order for TubeEntry<R> {
    type Store = Jobs;

    fn precedes(job: u32, other: u32, jobs: &Jobs) -> bool {
        TubeEntry::<R>::of(job, jobs).is_before(TubeEntry::of(other, jobs), jobs)
    }

    /// Clients do not know when a job was created to the nanosecond.
    fn weight(job: u32, jobs: &Jobs) -> u32 {
        low_half(mix(jobs[JobKey::from_number(job)].created_at.as_nanos() ^ mix(job.into())))
    }
}

/// The heap may grow again for each job at which the tree has a multiple of this number.
const ASKED_AGAIN: usize = 64;

/// Jobs in the order of their ranks. The links of a job have its index while it is in the heap.
#[derive(Default)]
pub struct Ordered<R> {
    run: List,
    heap: Heap<TubeEntry<R>>,
    /// The jobs for which the heap could not grow.
    tree: Tree<TubeEntry<R>>,
}

impl<R: OrderedBy> Ordered<R> {
    pub fn len(&self) -> usize {
        self.run.len() as usize + self.heap.len() + self.tree.len()
    }

    /// Returns the job that comes before all others.
    #[inline]
    pub fn first(&self, jobs: &Jobs) -> Option<JobKey> {
        let first = match (self.run.front(), self.heap.first()) {
            (Some(run), Some(least)) if !least.is_before(TubeEntry::of(run, jobs), jobs) => {
                Some(JobKey::from_number(run))
            }
            (_, Some(least)) => Some(least.job),
            (run, None) => run.map(JobKey::from_number),
        };
        let Some(in_tree) = self.tree.first(jobs) else { return first };
        let is_before = |it: &JobKey| TubeEntry::<R>::precedes(it.number(), in_tree, jobs);
        first.filter(is_before).or(Some(JobKey::from_number(in_tree)))
    }

    /// Adds a job.
    #[inline(always)]
    pub fn insert(&mut self, job: JobKey, jobs: &mut Jobs) {
        let key = job.number();
        let follows = |last| TubeEntry::<R>::of(key, jobs).follows(TubeEntry::of(last, jobs), jobs);
        if self.run.back().is_none_or(follows) {
            self.run.push_back(jobs, key);
        } else if self.heap.has_room() || self.try_grow() {
            self.heap.insert(TubeEntry::of(key, jobs), jobs);
        } else {
            self.tree.insert(key, jobs);
        }
    }

    /// While the tree has jobs, the system is asked again for some of them only.
    fn try_grow(&mut self) -> bool {
        self.tree.len().is_multiple_of(ASKED_AGAIN) && self.heap.try_reserve_one().is_ok()
    }

    /// Removes a job, which must be here.
    #[inline(always)]
    pub fn remove(&mut self, job: JobKey, jobs: &mut Jobs) {
        let key = job.number();
        match jobs.links(key).index() {
            None if self.tree.len() > 0 && self.tree.remove(key, jobs) => {}
            None => self.run.remove(jobs, key),
            Some(index) => {
                let removed = self.heap.remove(index, jobs).job;
                assert_eq!(removed, job, "the heap index of a job belongs to another job");
            }
        }
    }

    /// Removes and returns any job.
    pub fn pop_any(&mut self, jobs: &mut Jobs) -> Option<JobKey> {
        let in_heap = |heap: &mut Heap<TubeEntry<R>>| Some(heap.pop_last()?.job.number());
        let removed = self.run.pop_front(jobs).or_else(|| in_heap(&mut self.heap));
        removed.or_else(|| self.tree.pop_first(jobs)).map(JobKey::from_number)
    }

    /// Returns all jobs in arbitrary order.
    pub fn keys(&self, jobs: &Jobs) -> impl Iterator<Item = JobKey> {
        let listed = self.run.iter(jobs).chain(self.tree.iter(jobs));
        listed.map(JobKey::from_number).chain(self.heap.iter().map(|entry| entry.job))
    }

    /// Returns the first `count` jobs, in order. The cost depends on `count` only.
    pub fn first_keys(&self, count: usize, jobs: &Jobs) -> impl Iterator<Item = JobKey> {
        let others = self.run.iter(jobs).take(count).chain(self.tree.iter(jobs).take(count));
        let mut first = self.heap.first_entries(count, jobs);
        first.extend(others.map(|job| TubeEntry::of(job, jobs)));
        first.sort_by_key(|entry| ({ entry.rank }, jobs[entry.job].id));
        first.into_iter().take(count).map(|entry| entry.job)
    }

    /// Checks the run, the heap and the tree, and calls `each` with all jobs.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the jobs in the message.
    pub fn check(&self, jobs: &Jobs, what: fmt::Arguments<'_>, each: impl FnMut(JobKey)) {
        let mut last: Option<TubeEntry<R>> = None;
        self.run.check(jobs, what, |key| {
            let entry = TubeEntry::of(key, jobs);
            assert_eq!(jobs.links(key).index(), None, "{what}: {entry:?} is in the run");
            let follows = last.is_none_or(|last| entry.follows(last, jobs));
            assert!(follows, "{what}: {entry:?} is after {last:?} in the run");
            last = Some(entry);
        });
        self.heap.check(jobs, what, |entry| jobs.links(entry.job.number()).index());
        for &TubeEntry { rank, job } in self.heap.iter() {
            assert_eq!(rank, R::of(&jobs[job]), "{what}: stored and real rank of {job:?}");
        }
        self.tree.check(jobs, what, |_| {});
        self.keys(jobs).for_each(each);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::headroom;
    use crate::engine::keys::TubeKey;
    use crate::engine::queue::body::Body;
    use crate::engine::queue::job::JobParams;
    use std::collections::BTreeSet;

    fn random_operations_match_a_btree_set<R: OrderedBy + Default>(equal_ranks: u32) {
        let mut random = fastrand::Rng::with_seed(5);
        let mut jobs = Jobs::default();
        let mut ordered = Ordered::<R>::default();
        let mut model: BTreeSet<(u32, u64)> = BTreeSet::new();
        let mut in_tree = 0;
        for step in 0..20_000 {
            if random.u32(..300) < u32::try_from(model.len()).unwrap() {
                let removed = *model.iter().nth(random.usize(..model.len())).unwrap();
                model.remove(&removed);
                let job = jobs.find(removed.1).unwrap();
                ordered.remove(job, &mut jobs);
                jobs.remove(job);
            } else {
                // Ranks that rise with time join the run.
                let rank = if random.bool() { step } else { random.u32(..step + 1) } / equal_ranks;
                let id = u64::from(step) ^ u64::from(random.u8(..4));
                if jobs.find(id).is_some() {
                    continue;
                }
                let params = JobParams { pri: rank, delay_secs: 0, ttr_secs: 1 };
                let created_at = Nanos::from_secs(step);
                let mut job = Job::new(id, TubeKey::DEFAULT, params, Body::cold(2), created_at);
                job.due = Nanos::from_nanos(rank.into());
                job.state = R::state(Links::LOOSE);
                jobs.try_reserve_one().unwrap();
                let job = jobs.insert(job);
                headroom::refuse_after(usize::from(random.bool()));
                ordered.insert(job, &mut jobs);
                headroom::refuse_after(usize::MAX);
                model.insert((rank, id));
            }
            in_tree += ordered.tree.len();
            let id_of = |job: JobKey| jobs[job].id;
            assert_eq!(ordered.len(), model.len());
            assert_eq!(ordered.first(&jobs).map(id_of), model.first().map(|&(_, id)| id));
            let mut seen = BTreeSet::new();
            ordered.check(&jobs, format_args!("step {step}"), |job| {
                seen.insert((jobs[job].pri, jobs[job].id));
            });
            assert_eq!(seen, model);
            if step % 50 == 0 {
                let first = model.iter().map(|&(_, id)| id).take(9);
                assert!(ordered.first_keys(9, &jobs).map(id_of).eq(first), "step {step}");
            }
        }
        assert!(in_tree > 0, "the heap could always grow");
        while ordered.pop_any(&mut jobs).is_some() {}
        assert_eq!(ordered.len(), 0);
    }

    #[test]
    fn ready_jobs_match_a_btree_set() {
        random_operations_match_a_btree_set::<u32>(500);
    }

    #[test]
    fn delayed_jobs_match_a_btree_set() {
        random_operations_match_a_btree_set::<Nanos>(1);
    }
}
