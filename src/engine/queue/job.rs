//! Jobs, and where to find them: by key in a step, by id in about three.
//!
//! A job knows its tube and which structure it stands in; it does not know the rules by
//! which it moves (`queue.rs`) nor anything of connections but their keys.

use super::body::Body;
use crate::engine::binlog::record::Counts;
use crate::engine::collections::heap::{Entry, rank};
use crate::engine::collections::job_index::JobIndex;
use crate::engine::collections::list::{Linked, Links};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::keys::{ConnKey, JobKey, Key, LogKey, TubeKey};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::ops::{Index, IndexMut};

/// One job.
#[derive(Debug)]
pub struct Job {
    /// What clients call it; never used twice.
    pub id: u64,
    /// The tube in which it is from the first to the last.
    pub tube: TubeKey,
    /// The least comes first.
    pub pri: u32,
    /// The delay it was last given, whether or not that is over.
    pub delay_secs: u32,
    /// How long a worker may hold it; at least 1.
    pub ttr_secs: u32,
    /// How often it went through what.
    pub counts: Counts,
    /// When it was put.
    pub created_at: Nanos,
    /// Where it stands.
    pub state: State,
    /// What it carries.
    pub body: Body,
    /// What the binlog knows of it.
    pub log: LogKey,
}

/// Counts one more. Behind the largest number comes zero again, as in C beanstalkd; a job from its
/// files may be as far as that.
pub fn count_one(count: &mut u32) {
    *count = count.wrapping_add(1);
}

/// Where a job stands, with its place there.
#[derive(Clone, Copy, Debug)]
pub enum State {
    /// Nowhere: on its way from one place to another.
    Moving,
    /// In the ready heap of its tube.
    Ready {
        /// The place in the heap.
        place: u32,
    },
    /// In the delay heap of its tube.
    Delayed {
        /// The place in the heap.
        place: u32,
    },
    /// In the heap of reserved jobs of a connection.
    Reserved {
        /// Whose.
        by: ConnKey,
        /// The place in the heap.
        place: u32,
    },
    /// In the list of buried jobs of its tube.
    Buried(Links),
}

/// Where a job is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Among the ready.
    Ready,
    /// Among the delayed.
    Delayed {
        /// When the delay is over.
        due: Nanos,
    },
    /// Among the buried.
    Buried,
}

/// A ready job as its tube orders it: the least priority, then the least id.
#[derive(Clone, Copy, Debug)]
pub struct ReadyEntry {
    /// The priority.
    pub pri: u32,
    /// The id.
    pub id: u64,
    /// The job.
    pub job: JobKey,
}

/// A delayed job as its tube orders it: the soonest, then the least id.
#[derive(Clone, Copy, Debug)]
pub struct DelayedEntry {
    /// When the delay is over.
    pub due: Nanos,
    /// The id.
    pub id: u64,
    /// The job.
    pub job: JobKey,
}

/// A reserved job as its connection orders it: the soonest deadline, then the first
/// reserved.
#[derive(Clone, Copy, Debug)]
pub struct ReservedEntry {
    /// When the TTR runs out.
    pub deadline: Nanos,
    /// How many reservations there had been before this one.
    pub turn: u64,
    /// The job.
    pub job: JobKey,
    /// The connection.
    pub by: ConnKey,
}

/// All jobs.
#[derive(Debug, Default)]
pub struct Jobs {
    pages: PagedSlab<JobKey, Job>,
    ids: JobIndex,
}

impl Job {
    /// A new job in no place yet. A `ttr_secs` of 0 becomes 1.
    pub fn new(id: u64, tube: TubeKey, terms: JobParams, body: Body, created_at: Nanos) -> Job {
        Job {
            id,
            tube,
            pri: terms.pri,
            delay_secs: terms.delay_secs,
            ttr_secs: terms.ttr_secs.max(1),
            counts: Counts::default(),
            created_at,
            state: State::Moving,
            body,
            log: LogKey::NONE,
        }
    }
}

impl Job {
    /// Where its terms send it.
    pub fn destination(&self, now: Nanos) -> Target {
        match self.delay_secs {
            0 => Target::Ready,
            secs => Target::Delayed { due: now + Nanos::from_secs(secs) },
        }
    }
}

/// The numbers that a client puts a job with.
#[derive(Clone, Copy, Debug)]
pub struct JobParams {
    pub pri: u32,
    pub delay_secs: u32,
    pub ttr_secs: u32,
}

impl Jobs {
    /// The job that clients call `id`.
    pub fn find(&self, id: u64) -> Option<JobKey> {
        self.ids.find(id).map(JobKey::from_number)
    }

    /// Makes sure that the next [`Jobs::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.pages.try_reserve_one()?;
        self.ids.try_reserve_one()
    }

    /// Adds a job, whose id no other has, and says under which key.
    ///
    /// # Panics
    /// There was no successful [`Jobs::try_reserve_one`] before.
    pub fn insert(&mut self, job: Job) -> JobKey {
        let id = job.id;
        let key = self.pages.insert(job);
        self.ids.insert(id, key.number());
        key
    }

    /// Takes out a job to which nothing refers any more.
    ///
    /// # Panics
    /// There is none under this key.
    pub fn remove(&mut self, key: JobKey) -> Job {
        let job = self.pages.remove(key).expect("nobody has the key of a job that is gone");
        self.ids.remove(job.id);
        job
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The job under this key, if there is one.
    pub fn get(&self, key: JobKey) -> Option<&Job> {
        self.pages.get(key)
    }

    /// How many bytes of memory the jobs take, with the places where they stand and are found, and
    /// without their bodies.
    pub fn taken_bytes(&self) -> u64 {
        let entries = self.len() * size_of::<ReadyEntry>();
        self.pages.taken_bytes() + self.ids.taken_bytes() + entries as u64
    }

    /// The part of one job, but for finding it by its id: that is shared by eight.
    const BYTES_OF_A_JOB: u64 = (size_of::<Job>() + size_of::<ReadyEntry>()) as u64;

    /// The part of one job when it is the first of those.
    pub const MOST_BYTES_OF_A_JOB: u64 = Jobs::BYTES_OF_A_JOB + JobIndex::MAX_BYTES_PER_ID;

    /// All jobs, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (JobKey, &Job)> + '_ {
        self.pages.iter()
    }

    /// Every job is found by its id, and nothing else is.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(&self) {
        self.pages.check(format_args!("the jobs"));
        self.ids.check();
        assert_eq!(self.len(), self.ids.count(), "jobs, and ids under which there is one");
        for (key, job) in self.iter() {
            let found = self.find(job.id);
            assert_eq!(found, Some(key), "what is found for job {}, and where it is", job.id);
            assert!(job.ttr_secs >= 1, "job {} has no time to run", job.id);
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

/// For the lists of buried jobs.
impl Linked for Jobs {
    fn links(&self, key: u32) -> Links {
        match self[JobKey::from_number(key)].state {
            State::Buried(links) => links,
            State::Moving
            | State::Ready { .. }
            | State::Delayed { .. }
            | State::Reserved { .. } => {
                unreachable!("only buried jobs stand in a list of buried jobs")
            }
        }
    }

    fn set_links(&mut self, key: u32, links: Links) {
        self[JobKey::from_number(key)].state = State::Buried(links);
    }
}

impl Entry for ReadyEntry {
    type Store = Jobs;

    fn rank(self) -> u128 {
        rank(self.pri, self.id)
    }

    fn set_index(self, place: u32, jobs: &mut Jobs) {
        jobs[self.job].state = State::Ready { place };
    }

    fn index(self, jobs: &Jobs) -> Option<u32> {
        let Job { id, pri, state, .. } = jobs[self.job];
        match state {
            State::Ready { place } if (pri, id) == (self.pri, self.id) => Some(place),
            State::Ready { .. }
            | State::Moving
            | State::Delayed { .. }
            | State::Reserved { .. }
            | State::Buried(_) => None,
        }
    }
}

impl Entry for DelayedEntry {
    type Store = Jobs;

    fn rank(self) -> u128 {
        rank(self.due.as_nanos(), self.id)
    }

    fn set_index(self, place: u32, jobs: &mut Jobs) {
        jobs[self.job].state = State::Delayed { place };
    }

    fn index(self, jobs: &Jobs) -> Option<u32> {
        let Job { id, state, .. } = jobs[self.job];
        match state {
            State::Delayed { place } if id == self.id => Some(place),
            State::Delayed { .. }
            | State::Moving
            | State::Ready { .. }
            | State::Reserved { .. }
            | State::Buried(_) => None,
        }
    }
}

impl Entry for ReservedEntry {
    type Store = Jobs;

    fn rank(self) -> u128 {
        rank(self.deadline.as_nanos(), self.turn)
    }

    fn set_index(self, place: u32, jobs: &mut Jobs) {
        jobs[self.job].state = State::Reserved { by: self.by, place };
    }

    fn index(self, jobs: &Jobs) -> Option<u32> {
        match jobs[self.job].state {
            State::Reserved { by, place } if by == self.by => Some(place),
            State::Reserved { .. }
            | State::Moving
            | State::Ready { .. }
            | State::Delayed { .. }
            | State::Buried(_) => None,
        }
    }
}
