//! Tubes: named queues.
//!
//! A tube is created by the first connection that uses or watches it. It is removed when no
//! connection uses or watches it and it has no job. `default` is never removed. The rules are in
//! `queue/mod.rs`, the order in which workers wait in `queue/waiters.rs`.

use super::job::{Job, Jobs};
use super::ordered::Ordered;
use super::outcomes::Outcomes;
use super::waiters::{FRESHNESS, Waiter};
use crate::engine::binlog::record::JobState;
use crate::engine::collections::chains::{HashSlab, Hashed, low_half, mix};
use crate::engine::collections::heap::Heap;
use crate::engine::collections::list::List;
use crate::engine::collections::slab::PagedSlab;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{ConnKey, JobKey, Key, TubeKey};
use crate::engine::text;
use crate::engine::time::Nanos;
use std::cell::Cell;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, DerefMut};

#[derive(Default)]
pub struct Tube {
    pub name: Box<str>,
    pub jobs: TubeJobs,
    /// The number of connections that use it.
    pub using: u32,
    /// The number of connections that watch it.
    pub watching: u32,
    /// The watches whose connection waits, or has waited since this heap was last searched.
    pub waiters: Heap<Waiter>,
    /// The watches whose cached best job is not worse than the best job of this tube.
    pub clean: List<FRESHNESS>,
    /// The pause in force; boxed, because few tubes are paused.
    pub pause: Option<Box<Pause>>,
    /// Increases with each flush of all jobs, and wraps. A job with another epoch is flushed.
    pub epoch: u8,
    /// A job that was buried before this moment and still is, is flushed.
    pub flushed_before: Nanos,
    /// The number of its jobs whose bodies are only in the binlog.
    pub cold: u32,
    /// The number of flushes whose jobs are not freed yet.
    pub flushes: u8,
    /// The number of puts.
    pub total_jobs: u64,
    /// The number of deletes.
    pub deletes: u64,
    /// The number of pauses.
    pub pauses: u64,
    /// The number of jobs that `--bury-after` buried.
    pub buried_after_returns: u64,
    /// What `--metrics` counts, from the first reservation or kick on.
    pub outcomes: Option<Box<Outcomes>>,
    /// Half of the hash of the name: as many bits as there can be tubes.
    hash: u32,
    /// The next tube in its chain of [`Tubes::find`].
    next: Cell<u32>,
    /// The index in [`Tubes::order`].
    list_index: u32,
}

/// The jobs of a tube, or those that a flush has taken from it.
#[derive(Default)]
pub struct TubeJobs {
    pub ready: Ordered<u32>,
    pub delayed: Ordered<Nanos>,
    pub buried: List,
    /// The number of ready jobs that are not in `ready`, because others of their group come first.
    pub behind: u32,
    /// The number of ready jobs that are urgent.
    pub urgent: u32,
    /// The number of jobs that connections have reserved.
    pub reserved: u32,
}

/// A pause of a tube.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    /// The length that the client asked for, in seconds.
    pub secs: u32,
    /// The end of the pause.
    pub until: Nanos,
}

/// All tubes.
#[derive(Default)]
pub struct Tubes {
    table: HashSlab<TubeKey, Tube>,
    /// The order of `list-tubes`.
    order: Vec<TubeKey>,
    /// The number of tubes removed since the start.
    pub removed_count: u64,
    hasher: RandomState,
}

impl Tube {
    /// Returns the job that a worker reserves next; `None` while the tube is paused.
    pub fn best_job(&self, jobs: &Jobs) -> Option<JobKey> {
        if self.pause.is_some() { None } else { self.first_ready(jobs) }
    }

    /// Returns the ready job with the lowest priority, even while the tube is paused.
    pub fn first_ready(&self, jobs: &Jobs) -> Option<JobKey> {
        self.jobs.ready.first(jobs)
    }

    /// Returns the delayed job that is due first.
    pub fn first_delayed(&self, jobs: &Jobs) -> Option<JobKey> {
        self.jobs.delayed.first(jobs)
    }

    /// Returns the job that was buried first.
    pub fn first_buried(&self) -> Option<JobKey> {
        self.jobs.buried.front().map(JobKey::from_number)
    }

    /// Returns a hash of the tube and a connection. The hash of the name is keyed with a secret, so
    /// that no client can choose tubes whose watches share a bucket.
    pub fn hash_with(&self, conn: ConnKey) -> u32 {
        low_half(mix(u64::from(conn.number()) << u32::BITS | u64::from(self.hash)))
    }

    /// Returns whether the tube has no user, no watch, no job and no flush.
    fn is_idle(&self) -> bool {
        self.using == 0 && self.watching == 0 && self.jobs.count() == 0 && self.flushes == 0
    }
}

impl TubeJobs {
    /// Returns the number of ready jobs.
    pub fn ready_count(&self) -> usize {
        self.ready.len() + self.behind as usize
    }

    /// Returns the number of jobs.
    pub fn count(&self) -> u64 {
        let ordered = self.ready_count() + self.delayed.len();
        ordered as u64 + u64::from(self.reserved) + u64::from(self.buried.len())
    }

    /// Checks the lists, whose jobs must fulfil the condition.
    ///
    /// # Panics
    /// The check fails. `what` names the jobs in the message.
    pub fn check(&self, jobs: &Jobs, what: fmt::Arguments<'_>, is_right: impl Fn(&Job) -> bool) {
        let check = |job, state| {
            let job = &jobs[job];
            let is_here = job.state.shown() == state && is_right(job);
            assert!(is_here, "job {} is among the {state:?} {what}: {:?}", job.id, job.state);
        };
        self.ready.check(jobs, what, |job| check(job, JobState::Ready));
        self.delayed.check(jobs, what, |job| check(job, JobState::Delayed));
        self.buried.check(jobs, what, |job| check(JobKey::from_number(job), JobState::Buried));
    }
}

impl Tubes {
    /// Returns the tube at this index in the order of `list-tubes`.
    pub fn at(&self, index: usize) -> TubeKey {
        self.order[index]
    }

    /// Returns the tube of this name.
    pub fn find(&self, name: &str) -> Option<TubeKey> {
        Some(self.table.find_by(self.hash(name), |tube| &*tube.name == name)?.0)
    }

    fn hash(&self, name: &str) -> u32 {
        low_half(self.hasher.hash_one(name))
    }

    /// Reserves memory for one more tube. Returns the key that it gets.
    pub fn try_reserve_key(&mut self) -> Result<TubeKey, NoMemory> {
        self.table.try_reserve_one()?;
        headroom::keeping(Headroom::Quarter, || self.order.try_reserve(1))?;
        Ok(self.table.next_key())
    }

    /// Creates a tube with a new name, after [`Tubes::try_reserve_key`].
    pub fn create(&mut self, name: &str) -> Result<TubeKey, NoMemory> {
        let tube = Tube {
            name: text::try_boxed(name)?,
            hash: self.hash(name),
            list_index: u32::try_from(self.order.len()).expect("2^32 tubes or more"),
            ..Tube::default()
        };
        let key = self.table.insert(tube);
        self.order.push(key);
        Ok(key)
    }

    /// Removes the tube if it is idle and not `default`. Returns whether it was.
    pub fn remove_if_idle(&mut self, key: TubeKey) -> bool {
        if key == TubeKey::DEFAULT || !self[key].is_idle() {
            return false;
        }
        let tube = self.table.remove(key);
        self.removed_count += 1;
        // Quirk: the last tube of the list moves to the index of the removed one; pinned by
        // tests/conversations/list-tubes-order.txt.
        let removed = self.order.swap_remove(tube.list_index as usize);
        assert_eq!(removed, key, "the list index of a tube belongs to another tube");
        if let Some(&moved) = self.order.get(tube.list_index as usize) {
            self[moved].list_index = tube.list_index;
        }
        true
    }

    /// Returns all tubes with their keys, in the order of `list-tubes`.
    pub fn entries(&self) -> impl Iterator<Item = (TubeKey, &Tube)> + Clone {
        self.order.iter().map(|&key| (key, &self[key]))
    }

    /// Checks that each tube is found by its name and its index, and that no idle tube is kept.
    ///
    /// # Panics
    /// The check fails.
    pub fn check(&self) {
        self.table.check(format_args!("the tubes"));
        assert_eq!(self.order.len(), self.len(), "tubes in list order, and tubes in the table");
        for (index, &key) in self.order.iter().enumerate() {
            let tube = self.get(key);
            let tube = tube.unwrap_or_else(|| panic!("no tube {key:?}, listed at {index}"));
            let name = &tube.name;
            assert_eq!(
                tube.list_index as usize, index,
                "stored and actual list index of tube {name}"
            );
            assert_eq!(self.find(name), Some(key), "key found for tube {name}, and its own");
            assert!(key == TubeKey::DEFAULT || !tube.is_idle(), "idle tube {name} is kept");
        }
        assert!(self.get(TubeKey::DEFAULT).is_some(), "no default tube");
    }

    /// Returns all tubes in the order of `list-tubes`.
    pub fn iter(&self) -> impl Iterator<Item = &Tube> + Clone {
        self.entries().map(|(_, tube)| tube)
    }
}

impl Deref for Tubes {
    type Target = PagedSlab<TubeKey, Tube>;

    fn deref(&self) -> &PagedSlab<TubeKey, Tube> {
        &self.table
    }
}

impl DerefMut for Tubes {
    fn deref_mut(&mut self) -> &mut PagedSlab<TubeKey, Tube> {
        &mut self.table
    }
}

impl Hashed for Tube {
    fn hash(&self) -> u32 {
        self.hash
    }

    fn next(&self) -> &Cell<u32> {
        &self.next
    }
}
