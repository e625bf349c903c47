//! Jobs, and finding them by key or by id.
//!
//! A job stores its tube and its links or its index among the jobs of its state. It does not know the
//! rules of `queue/mod.rs`, and connections only by key.

use super::body::Body;
use super::counts::JobCounts;
use crate::engine::collections::chains::{HashSlab, Hashed, mix_blocks};
use crate::engine::collections::heap::Entry;
use crate::engine::collections::list::{Linked, Links};
use crate::engine::keys::{ConnKey, JobKey, Key, TubeKey, UniqueKey};
use crate::engine::time::Nanos;
use std::cell::Cell;

use crate::engine::binlog::record::JobState;

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
    /// How often the job was reserved, timed out, released, buried and kicked: see [`Queue::counts`](super::Queue::counts).
    pub counts: JobCounts,
    pub created_at: Nanos,
    /// The end of the delay, while it is delayed; the end of the TTR while it is reserved, or
    /// [`Nanos::NEVER`] if the TTR has not begun; the moment of the bury while it is buried; until when its key
    /// is kept.
    pub due: Nanos,
    pub state: State,
    pub body: Body,
    /// Its key if it is a unique job, or [`UniqueKey::NONE`]: see [`Job::unique`].
    pub key: UniqueKey,
    /// The epoch of its tube when the job was put.
    pub epoch: u8,
    /// The number of times that it came back since it was put or kicked: its TTR ran out, or the
    /// connection that had reserved it closed.
    pub returns: u16,
    /// The next job in its chain of [`Jobs::find`].
    next: Cell<u32>,
}

const _: () = assert!(size_of::<Option<Job>>() == 72, "a slot for a job has 72 bytes");

/// The state of a job, with its links or its index among the jobs of that state.
#[derive(Clone, Copy, Debug)]
pub enum State {
    /// Among no others: it is new, or about to be removed.
    Detached,
    /// Among the ready jobs of its tube.
    Ready(Links),
    /// Among the delayed jobs of its tube.
    Delayed(Links),
    /// Among those that a connection holds. For a moment only in [`Queue::woken`](super::Queue::woken).
    Reserved(Holder),
    /// In the list of buried jobs of its tube.
    Buried(Links),
    /// Deleted: only its id and its key are left, which is kept. Among those with kept keys.
    Kept(Links),
}

impl State {
    /// Returns the connection that has reserved the job.
    pub fn holder(self) -> Option<ConnKey> {
        let State::Reserved(Holder { by, .. }) = self else { return None };
        Some(by)
    }

    /// Returns the state for clients.
    ///
    /// # Panics
    /// The job is between two states: no command ends there.
    pub fn shown(self) -> JobState {
        match self {
            State::Ready(_) => JobState::Ready,
            State::Reserved(_) => JobState::Reserved,
            State::Delayed(_) => JobState::Delayed,
            State::Buried(_) => JobState::Buried,
            State::Kept(_) => JobState::Deleted,
            State::Detached => unreachable!("between commands no job is detached"),
        }
    }
}

/// The connection that has reserved a job, and the index in its heap. Packed, as [`Links`] are.
#[derive(Clone, Copy, Debug)]
#[repr(Rust, packed)]
pub struct Holder {
    pub by: ConnKey,
    pub index: u32,
}

/// The state to which a job is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Ready,
    Delayed {
        /// The end of the delay.
        due: Nanos,
    },
    Buried {
        /// The moment of the bury, which no other job has. Buried jobs are in this order.
        at: Nanos,
    },
}

/// The order of ready jobs: the lowest priority first, then the lowest id.
pub type Rank = (u32, u64);

/// A reserved job in the heap of its connection: the first deadline first, then the first reserved.
#[derive(Clone, Copy, Debug)]
pub struct ReservedEntry {
    /// The end of the TTR.
    pub deadline: Nanos,
    /// The time of the reservation.
    pub reserved_at: Nanos,
    /// The number of reservations before this one. It wraps, so it is compared with that of the next one.
    pub seq: u32,
    pub job: JobKey,
}

/// All jobs, found by id.
pub type Jobs = HashSlab<JobKey, Job>;

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
            key: UniqueKey::NONE,
            epoch: 0,
            returns: 0,
            next: Cell::default(),
        }
    }

    /// Returns a deleted job whose key is kept until this moment.
    pub fn kept(id: u64, until: Nanos) -> Job {
        let params = JobParams { pri: 0, delay_secs: 0, ttr_secs: 0 };
        let (state, due) = (State::Kept(Links::LOOSE), until);
        // No tube has it.
        Job { state, due, ..Job::new(id, TubeKey::DEFAULT, params, Body::cold(0), until) }
    }

    /// Leaves a deleted job whose key is kept until this moment, and returns the rest of it.
    pub fn keep_key(&mut self, until: Nanos) -> Job {
        let kept = Job { key: self.key, next: self.next.clone(), ..Job::kept(self.id, until) };
        std::mem::replace(self, kept)
    }

    /// Returns whether it is deleted, and only its key is kept.
    pub fn is_kept(&self) -> bool {
        matches!(self.state, State::Kept(_))
    }

    /// Returns its key, if it is a unique job.
    pub fn unique(&self) -> Option<UniqueKey> {
        (self.key != UniqueKey::NONE).then_some(self.key)
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

impl Jobs {
    /// Returns the key of the job with this id, which is not kept after a delete.
    pub fn find(&self, id: u64) -> Option<JobKey> {
        Some(self.find_entry(id)?.0)
    }

    /// Returns that job, and its key.
    pub fn find_entry(&self, id: u64) -> Option<(JobKey, &Job)> {
        self.find_by(mix_blocks(id), |job| job.id == id && !job.is_kept())
    }
}

impl Hashed for Job {
    fn hash(&self) -> u32 {
        mix_blocks(self.id)
    }

    fn next(&self) -> &Cell<u32> {
        &self.next
    }
}

impl Linked for Jobs {
    #[inline]
    fn links(&self, key: u32) -> Links {
        match self[JobKey::from_number(key)].state {
            State::Ready(it) | State::Delayed(it) | State::Buried(it) | State::Kept(it) => it,
            State::Detached | State::Reserved(_) => unreachable!("{NOT_LISTED}"),
        }
    }

    fn links_mut(&mut self, key: u32) -> &mut Links {
        match &mut self[JobKey::from_number(key)].state {
            State::Ready(it) | State::Delayed(it) | State::Buried(it) | State::Kept(it) => it,
            State::Detached | State::Reserved(_) => unreachable!("{NOT_LISTED}"),
        }
    }
}

const NOT_LISTED: &str = "a list has a job whose state has no list";

impl Entry for ReservedEntry {
    type Store = Jobs;

    fn is_before(self, other: ReservedEntry, _: &Jobs) -> bool {
        (self.deadline, self.seq) < (other.deadline, other.seq)
    }

    fn set_index(self, new: u32, jobs: &mut Jobs) {
        if let State::Reserved(holder) = &mut jobs[self.job].state {
            holder.index = new;
        }
    }
}
