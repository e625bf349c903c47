//! Jobs, and where to find them: by key in a step, by id in about two.
//!
//! A job knows its tube and which structure it stands in; it does not know the rules by
//! which it moves (`queue.rs`) nor anything of connections but their keys.

use super::body::Body;
use super::heap::{Entry, rank};
use super::keys::{ConnKey, JobKey, Key, LogKey, TubeKey};
use super::list::{Linked, Links, NIL};
use super::table::{Hashed, Table, scatter};
use super::time::Nanos;

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
    /// The next job in the same bucket of the index.
    next_in_bucket: u32,
}

/// How often a job went through what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is named after its line in stats-job")]
pub struct Counts {
    pub reserves: u32,
    pub timeouts: u32,
    pub releases: u32,
    pub buries: u32,
    pub kicks: u32,
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
pub enum Destination {
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
pub type Jobs = Table<JobKey, Job>;

impl Job {
    /// A new job in no place yet. A `ttr_secs` of 0 becomes 1.
    pub fn new(id: u64, tube: TubeKey, terms: Terms, body: Body, created_at: Nanos) -> Job {
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
            next_in_bucket: NIL,
        }
    }
}

impl Job {
    /// Where its terms send it.
    pub fn destination(&self, now: Nanos) -> Destination {
        match self.delay_secs {
            0 => Destination::Ready,
            secs => Destination::Delayed { due: now + Nanos::from_secs(secs) },
        }
    }
}

/// The numbers that a client puts a job with.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "each is named after its word in the protocol")]
pub struct Terms {
    pub pri: u32,
    pub delay_secs: u32,
    pub ttr_secs: u32,
}

impl Jobs {
    /// The job that clients call `id`.
    pub fn find(&self, id: u64) -> Option<JobKey> {
        self.find_by(hash(id), |job| job.id == id)
    }
}

impl Hashed for Job {
    fn hash(&self) -> u64 {
        hash(self.id)
    }

    fn next_in_bucket(&self) -> u32 {
        self.next_in_bucket
    }

    fn next_in_bucket_mut(&mut self) -> &mut u32 {
        &mut self.next_in_bucket
    }
}

/// Sixteen ids in a row share a neighbourhood, so that a queue that is worked off in
/// order stays in the processor's cache; the neighbourhoods are scattered, so that no
/// pattern of ids left behind makes long chains.
fn hash(id: u64) -> u64 {
    scatter(id >> 4) << 4 | (id & 15)
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
    type Owners = Jobs;

    fn rank(self) -> u128 {
        rank(self.pri, self.id)
    }

    fn stands_at(self, place: u32, jobs: &mut Jobs) {
        jobs[self.job].state = State::Ready { place };
    }
}

impl Entry for DelayedEntry {
    type Owners = Jobs;

    fn rank(self) -> u128 {
        rank(self.due.as_nanos(), self.id)
    }

    fn stands_at(self, place: u32, jobs: &mut Jobs) {
        jobs[self.job].state = State::Delayed { place };
    }
}

impl Entry for ReservedEntry {
    type Owners = Jobs;

    fn rank(self) -> u128 {
        rank(self.deadline.as_nanos(), self.turn)
    }

    fn stands_at(self, place: u32, jobs: &mut Jobs) {
        jobs[self.job].state = State::Reserved { by: self.by, place };
    }
}
