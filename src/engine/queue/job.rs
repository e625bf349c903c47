//! Jobs, and finding them by key or by id.
//!
//! A job stores its tube and its links or its index among the jobs of its state. It does not know the
//! rules of `queue/mod.rs`, and connections only by key.

use super::body::Body;
use super::counts::{CountedEvent, JobCounts, LargeCounts};
use crate::engine::binlog::record::Counts;
use crate::engine::collections::heap::Entry;
use crate::engine::collections::job_index::JobIndex;
use crate::engine::collections::list::{Linked, Links};
use crate::engine::collections::ordered::Ranked;
use crate::engine::collections::slab::PagedSlab;
use crate::engine::keys::{ConnKey, Either, EitherKey, JobKey, Key, LogKey, TubeKey, UniqueKey};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::ops::{Index, IndexMut};

#[derive(Debug)]
pub struct Job {
    /// The id that clients use; never used twice.
    pub id: u64,
    /// The tube of the job; it never changes.
    pub tube: TubeKey,
    /// The priority; the lowest number is reserved first.
    pub pri: u32,
    /// The delay of the last put or release, even if it has passed.
    pub delay_secs: u32,
    /// The time to run: how long a worker may hold the job; at least 1 s.
    pub ttr_secs: u32,
    /// How often the job was reserved, timed out, released, buried and kicked: see [`Jobs::counts`].
    pub counts: JobCounts,
    pub created_at: Nanos,
    /// The end of the delay, while it is delayed or postponed.
    pub due: Nanos,
    pub state: State,
    pub body: Body,
    /// The job's entry in the binlog, or its key, which has that entry.
    pub log: LogRef,
    /// The epoch of its tube when the job was put.
    pub epoch: u8,
    /// The epoch of the buried jobs of its tube when it was last buried.
    pub buried_epoch: u8,
    /// The number of times that it came back since it was put or kicked: its TTR ran out, or the
    /// connection that had reserved it closed.
    pub returns: u16,
}

const _: () = assert!(size_of::<Option<Job>>() == 72, "a slot for a job has 72 bytes");

/// Refers to the entry of a job in the binlog, or to the key of a unique job, which has that entry. So a
/// job without a key takes no memory for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRef(EitherKey<LogKey, UniqueKey>);

/// The target of a [`LogRef`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogTarget {
    /// The entry in the binlog; [`LogKey::NONE`] without a binlog.
    Entry(LogKey),
    Unique(UniqueKey),
}

impl LogRef {
    /// Returns a reference to no entry, because there is no binlog.
    pub fn none() -> LogRef {
        LogKey::NONE.into()
    }

    /// Returns what it refers to.
    pub fn target(self) -> LogTarget {
        match self.0.split() {
            Either::First(log) => LogTarget::Entry(log),
            Either::Second(unique) => LogTarget::Unique(unique),
        }
    }

    /// Returns the key of the job, if it has one.
    pub fn unique(self) -> Option<UniqueKey> {
        self.0.second()
    }
}

impl From<LogKey> for LogRef {
    fn from(key: LogKey) -> LogRef {
        LogRef(EitherKey::from_first(key))
    }
}

impl From<UniqueKey> for LogRef {
    fn from(key: UniqueKey) -> LogRef {
        LogRef(EitherKey::from_second(key))
    }
}

/// The state of a job, with its links or its index among the jobs of that state.
#[derive(Clone, Copy, Debug)]
pub enum State {
    /// In no heap and no list: between two states.
    Detached,
    /// Among the ready jobs of its tube.
    Ready(Links),
    /// Among the delayed jobs of its tube.
    Delayed(Links),
    /// In the list of postponed jobs of its tube: there is no memory for its place among the others. For
    /// clients it is delayed.
    Postponed(Links),
    /// In the heap of reserved jobs of a connection.
    Reserved { by: ConnKey, index: u32 },
    /// In the list of buried jobs of its tube.
    Buried(Links),
}

/// The state to which a job is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Ready,
    Delayed {
        /// The end of the delay.
        due: Nanos,
    },
    Buried,
}

/// The order of ready jobs: the lowest priority first, then the lowest id.
pub type Rank = (u32, u64);

/// A ready job of a tube. The id is only in the job, so that an entry has 8 bytes.
#[derive(Clone, Copy, Debug)]
pub struct ReadyEntry {
    pri: u32,
    pub job: JobKey,
}

/// A delayed job of a tube: the first due first, then the lowest id. Without gaps it takes 12 bytes
/// instead of 16.
#[derive(Clone, Copy, Debug)]
#[repr(Rust, packed(4))]
pub struct DelayedEntry {
    due: Nanos,
    job: JobKey,
}

/// A reserved job in the heap of its connection: the first deadline first, then the first reserved.
#[derive(Clone, Copy, Debug)]
pub struct ReservedEntry {
    /// The end of the TTR.
    pub deadline: Nanos,
    /// The number of reservations before this one. It wraps, so it is compared with that of the next one.
    pub seq: u32,
    pub job: JobKey,
}

/// All jobs.
#[derive(Debug)]
pub struct Jobs {
    pages: PagedSlab<JobKey, Job>,
    ids: JobIndex,
    large_counts: LargeCounts,
    /// The highest id of a job that was ever inserted.
    highest_id: u64,
}

impl Job {
    /// Returns a detached job. A `ttr_secs` of 0 becomes 1.
    pub fn new(id: u64, tube: TubeKey, params: JobParams, body: Body, created_at: Nanos) -> Job {
        Job {
            id,
            tube,
            pri: params.pri,
            delay_secs: params.delay_secs,
            ttr_secs: params.ttr_secs.max(1),
            counts: JobCounts::default(),
            created_at,
            due: Nanos::ZERO,
            state: State::Detached,
            body,
            log: LogRef::none(),
            epoch: 0,
            buried_epoch: 0,
            returns: 0,
        }
    }

    /// Returns the rank among ready jobs.
    pub fn rank(&self) -> Rank {
        (self.pri, self.id)
    }

    /// Returns the state that a put or release gives the job: ready, or delayed if it has a delay.
    pub fn target(&self, now: Nanos) -> Target {
        match self.delay_secs {
            0 => Target::Ready,
            secs => Target::Delayed { due: now + Nanos::from_secs(secs) },
        }
    }
}

/// The parameters of a put.
#[derive(Clone, Copy, Debug)]
pub struct JobParams {
    pub pri: u32,
    pub delay_secs: u32,
    pub ttr_secs: u32,
}

impl Default for Jobs {
    fn default() -> Jobs {
        Jobs {
            // The binlog stores job keys in an `EitherKey`, which has 31 bits for a number.
            pages: PagedSlab::with_31_bits(),
            ids: JobIndex::default(),
            large_counts: LargeCounts::default(),
            highest_id: 0,
        }
    }
}

impl Jobs {
    /// Returns the job with this id.
    pub fn find(&self, id: u64) -> Option<JobKey> {
        self.ids.find(id).map(JobKey::from_number)
    }

    /// Ensures that the next [`Jobs::insert`] needs no memory.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.pages.try_reserve_one()?;
        self.ids.try_reserve_one()
    }

    /// Adds a job with a new id, and returns its key.
    ///
    /// # Panics
    /// [`Jobs::try_reserve_one`] was not called before, or failed.
    pub fn insert(&mut self, job: Job) -> JobKey {
        let id = job.id;
        self.highest_id = self.highest_id.max(id);
        let key = self.pages.insert(job);
        self.ids.insert(id, key.number());
        key
    }

    /// Removes a detached job. The caller then removes its counts with [`Jobs::drop_counts`].
    ///
    /// # Panics
    /// The job is not detached, or there is no job for this key.
    pub fn remove(&mut self, key: JobKey) -> Job {
        let job = self.pages.remove(key).expect("no job for this key");
        assert!(matches!(job.state, State::Detached), "removed job {}: {:?}", job.id, job.state);
        self.ids.remove(job.id);
        job
    }

    /// Returns the counts of a job.
    pub fn counts(&self, job: &Job) -> Counts {
        self.large_counts.get(&job.counts)
    }

    /// Counts an event of a job.
    #[inline]
    pub fn count_event(&mut self, key: JobKey, event: CountedEvent) {
        self.large_counts.count_event(&mut self.pages[key].counts, event);
    }

    /// Changes the counts of a job.
    pub fn set_counts(&mut self, key: JobKey, counts: Counts) {
        self.large_counts.set(&mut self.pages[key].counts, counts);
    }

    /// Drops the counts of a job that was removed.
    pub fn drop_counts(&mut self, counts: JobCounts) {
        self.large_counts.remove(counts);
    }

    pub fn len(&self) -> usize {
        self.pages.len()
    }

    pub fn get(&self, key: JobKey) -> Option<&Job> {
        self.pages.get(key)
    }

    /// Returns the memory of the jobs in bytes, with their heap entries and index, without their
    /// bodies.
    pub fn taken_bytes(&self) -> u64 {
        let entries = self.len() * size_of::<ReadyEntry>();
        self.page_bytes() + entries as u64
    }

    /// Returns the memory of the jobs, of their index and of large counts in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.pages.taken_bytes() + self.ids.taken_bytes() + self.large_counts.taken_bytes()
    }

    /// The memory of one job in bytes, without its id in the index: eight ids share one block.
    const BYTES_OF_A_JOB: u64 = (size_of::<Job>() + size_of::<ReadyEntry>()) as u64;

    /// The memory of one job in bytes if it is the first in its block of ids.
    pub const MOST_BYTES_OF_A_JOB: u64 = Jobs::BYTES_OF_A_JOB + JobIndex::MAX_BYTES_PER_ID;

    pub fn iter(&self) -> impl Iterator<Item = (JobKey, &Job)> + '_ {
        self.pages.iter()
    }

    /// Returns the jobs in a memory page. A job stays in its page.
    pub fn in_page(&self, page: usize) -> impl Iterator<Item = (JobKey, &Job)> + '_ {
        self.pages.in_page(page)
    }

    /// Returns the number of memory pages.
    pub fn page_count(&self) -> usize {
        self.pages.page_count()
    }

    /// Returns the highest id of a job that was ever inserted.
    pub fn highest_id(&self) -> u64 {
        self.highest_id
    }

    /// Checks that each job is found by its id, and that the index has no other id.
    ///
    /// # Panics
    /// The check fails.
    pub fn check(&self) {
        self.pages.check(format_args!("the jobs"));
        self.ids.check();
        let counts = self.iter().map(|(_, job)| &job.counts);
        self.large_counts.check(counts, format_args!("the large counts"));
        assert_eq!(self.len(), self.ids.count(), "jobs, and ids in the index");
        for (key, job) in self.iter() {
            let found = self.find(job.id);
            assert_eq!(found, Some(key), "key found for job {}, and its own", job.id);
            assert!(job.ttr_secs >= 1, "job {} has a TTR of 0 s", job.id);
        }
    }
}

impl Index<JobKey> for Jobs {
    type Output = Job;

    fn index(&self, key: JobKey) -> &Job {
        &self.pages[key]
    }
}

impl IndexMut<JobKey> for Jobs {
    fn index_mut(&mut self, key: JobKey) -> &mut Job {
        &mut self.pages[key]
    }
}

impl Linked for Jobs {
    #[inline]
    fn links(&self, key: u32) -> Links {
        match self[JobKey::from_number(key)].state {
            State::Ready(it) | State::Delayed(it) | State::Postponed(it) | State::Buried(it) => it,
            State::Detached | State::Reserved { .. } => unreachable!("{NOT_LISTED}"),
        }
    }

    fn set_links(&mut self, key: u32, new: Links) {
        match &mut self[JobKey::from_number(key)].state {
            State::Ready(it) | State::Delayed(it) | State::Postponed(it) | State::Buried(it) => {
                *it = new;
            }
            State::Detached | State::Reserved { .. } => unreachable!("{NOT_LISTED}"),
        }
    }
}

const NOT_LISTED: &str = "a list has a job whose state has no list";

impl Entry for ReadyEntry {
    type Store = Jobs;

    #[inline]
    fn is_before(self, other: ReadyEntry, jobs: &Jobs) -> bool {
        self.pri < other.pri || (self.pri == other.pri && jobs[self.job].id < jobs[other.job].id)
    }

    fn set_index(self, index: u32, jobs: &mut Jobs) {
        Self::set_links(self.key(), Links::at_index(index), jobs);
    }

    fn index(self, jobs: &Jobs) -> Option<u32> {
        jobs.links(self.job.number()).index()
    }
}

impl Ranked for ReadyEntry {
    fn of(key: u32, jobs: &Jobs) -> ReadyEntry {
        let job = JobKey::from_number(key);
        ReadyEntry { pri: jobs[job].pri, job }
    }

    fn key(self) -> u32 {
        self.job.number()
    }

    /// All jobs of a run have the same priority. So a job with a high one does not end it for others,
    /// and the first is the oldest.
    fn follows(self, last: ReadyEntry, jobs: &Jobs) -> bool {
        self.pri == last.pri && last.is_before(self, jobs)
    }

    fn set_links(key: u32, links: Links, jobs: &mut Jobs) {
        jobs[JobKey::from_number(key)].state = State::Ready(links);
    }
}

impl Entry for DelayedEntry {
    type Store = Jobs;

    fn is_before(self, other: DelayedEntry, jobs: &Jobs) -> bool {
        let (due, others) = (self.due, other.due);
        due < others || (due == others && jobs[self.job].id < jobs[other.job].id)
    }

    fn set_index(self, index: u32, jobs: &mut Jobs) {
        Self::set_links(self.key(), Links::at_index(index), jobs);
    }

    fn index(self, jobs: &Jobs) -> Option<u32> {
        jobs.links(self.job.number()).index()
    }
}

impl Ranked for DelayedEntry {
    fn of(key: u32, jobs: &Jobs) -> DelayedEntry {
        let job = JobKey::from_number(key);
        DelayedEntry { due: jobs[job].due, job }
    }

    fn key(self) -> u32 {
        self.job.number()
    }

    fn follows(self, last: DelayedEntry, jobs: &Jobs) -> bool {
        last.is_before(self, jobs)
    }

    fn set_links(key: u32, links: Links, jobs: &mut Jobs) {
        jobs[JobKey::from_number(key)].state = State::Delayed(links);
    }
}

impl Entry for ReservedEntry {
    type Store = Jobs;

    fn is_before(self, other: ReservedEntry, _: &Jobs) -> bool {
        (self.deadline, self.seq) < (other.deadline, other.seq)
    }

    fn set_index(self, new: u32, jobs: &mut Jobs) {
        if let State::Reserved { index, .. } = &mut jobs[self.job].state {
            *index = new;
        }
    }

    fn index(self, jobs: &Jobs) -> Option<u32> {
        let State::Reserved { index, .. } = jobs[self.job].state else { return None };
        Some(index)
    }
}
