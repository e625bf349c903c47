//! The part of a connection that the rules use: what it uses and watches, and the jobs that it holds.
//!
//! Each rule that acts for a connection gets it from its caller. No rule looks up another connection.

use super::Queue;
use super::job::{Holder, Job, ReservedEntry, State};
use super::outcomes::End;
use super::waiters::{Watcher, Watching};
use crate::engine::collections::heap::Heap;
use crate::engine::headroom::{Headroom, NoMemory};
use crate::engine::keys::{ConnKey, JobKey, TubeKey};
use crate::engine::time::Nanos;

/// The part of a connection that the rules use.
pub struct Client {
    pub key: ConnKey,
    /// The tube of its puts.
    pub used: TubeKey,
    /// The tubes from which it reserves.
    pub watching: Watching,
    /// The jobs that it has reserved, the one with the first deadline on top.
    pub held: Heap<ReservedEntry>,
    pub(super) is_producer: bool,
    pub(super) is_worker: bool,
}

/// A closed connection with at most this many jobs releases them in the order of reservation.
const MAX_ORDERED_RELEASES: usize = 4096;
/// The watches of the first clients together take less than a quarter of the headroom.
const FEW_WATCHES: usize = 16;
/// Units of work to remove a watch.
const WORK_PER_WATCH: usize = 4;

impl Queue {
    /// Returns the client of a new connection, which uses and watches `default`. No other one has its key.
    pub fn connect(&mut self, key: ConnKey) -> Result<Client, NoMemory> {
        let mut client = Client {
            key,
            used: TubeKey::DEFAULT,
            watching: Watching::default(),
            held: Heap::default(),
            is_producer: false,
            is_worker: false,
        };
        self.conn_timers.try_reserve(key)?;
        self.watches.try_reserve_one()?;
        self.watchers.try_insert(key, Watcher::default())?;
        self.add_watch(&mut client, TubeKey::DEFAULT)?;
        self.conn_timers.add(key);
        self.tubes[TubeKey::DEFAULT].using += 1;
        Ok(client)
    }

    /// Begins to close a connection that does not wait: ends its roles. Returns its jobs in reverse order of
    /// reservation, for [`Queue::leave`], which does the rest; none if there are more than
    /// [`MAX_ORDERED_RELEASES`].
    pub fn disconnect(&mut self, client: &mut Client) -> Vec<JobKey> {
        self.totals.producers -= u64::from(std::mem::take(&mut client.is_producer));
        self.totals.workers -= u64::from(std::mem::take(&mut client.is_worker));
        let mut entries: Vec<ReservedEntry> = Vec::new();
        let count = client.held.len();
        if count <= MAX_ORDERED_RELEASES && entries.try_reserve_exact(count).is_ok() {
            entries.extend(client.held.iter());
            // The latest reservation first.
            let next = self.next_reserve_seq;
            entries.sort_unstable_by_key(|entry| next.wrapping_sub(entry.seq));
        }
        entries.into_iter().map(|entry| entry.job).collect()
    }

    /// Releases the jobs of a closed connection in the order of reservation, then removes its watches. One
    /// with more than 4,096 jobs releases them in the order of their deadlines. Returns `false` without work left
    /// for all of it; otherwise the key is free.
    pub fn leave(&mut self, client: &mut Client, release_order: &mut Vec<JobKey>) -> bool {
        while let Some(soonest) = client.held.first() {
            if !self.work.is_left() {
                return false;
            }
            // Between two steps its TTR may have run out.
            let is_held = |job: &JobKey| self.jobs.get(*job).is_some_and(|job| client.holds(job));
            let job = release_order.pop().filter(is_held).unwrap_or(soonest.job);
            if self.is_flushed(&self.jobs[job]) {
                self.free_held(client, job);
            } else {
                self.take_back(client, job, End::Disconnect);
                self.make_cold_if_full(job);
            }
        }
        while let Some(watch) = client.watching.first_watch() {
            if !self.work.is_left() {
                return false;
            }
            self.work.spend(WORK_PER_WATCH);
            let tube = self.remove_watch(client, watch);
            self.remove_tube_if_idle(tube);
        }
        self.watchers.remove(client.key);
        self.conn_timers.remove(client.key);
        self.tubes[client.used].using -= 1;
        self.remove_tube_if_idle(client.used);
        true
    }

    /// Counts the connection as a producer.
    pub fn mark_producer(&mut self, client: &mut Client) {
        let was_one = std::mem::replace(&mut client.is_producer, true);
        self.totals.producers += u64::from(!was_one);
    }

    /// Counts the connection as a worker.
    pub fn mark_worker(&mut self, client: &mut Client) {
        let was_one = std::mem::replace(&mut client.is_worker, true);
        self.totals.workers += u64::from(!was_one);
    }

    // ---- Held jobs ----

    /// Adds a job to those that a connection holds, after [`Queue::assign`]. There must be room for it.
    #[inline(always)]
    pub fn hold(&mut self, client: &mut Client, key: JobKey) {
        let deadline = self.jobs[key].due;
        let seq = self.next_reserve_seq;
        self.next_reserve_seq = seq.wrapping_add(1);
        let entry = ReservedEntry { deadline, reserved_at: self.now, seq, job: key };
        client.held.insert(entry, &mut self.jobs);
        self.conn_timers.set_no_later_than(client.key, deadline.max(self.now));
    }

    /// Detaches a job that no other connection holds.
    #[inline(always)]
    pub(super) fn take(&mut self, client: &mut Client, key: JobKey, end: Option<End>) {
        self.give_up(client, key, end);
        self.detach(key);
    }

    /// Removes a job from those that the connection holds, if it is one of them, and leaves it in its state. `end` is
    /// counted, if the reservation has begun.
    #[inline(always)]
    pub(super) fn give_up(&mut self, client: &mut Client, key: JobKey, end: Option<End>) {
        let Some(index) = client.index_of(&self.jobs[key]) else { return };
        let entry = client.held.remove(index, &mut self.jobs);
        assert_eq!(entry.job, key, "the heap index of a job belongs to another job");
        if let Some(end) = end {
            self.count_end(key, entry.reserved_at, end);
        }
    }

    /// Changes the deadline of a job that the connection holds. [`Nanos::NEVER`] stops its TTR.
    pub(super) fn set_deadline(&mut self, client: &mut Client, key: JobKey, deadline: Nanos) {
        let index = client.index_of(&self.jobs[key]).expect("the connection holds the job");
        let entry = ReservedEntry { deadline, ..client.held[index as usize] };
        assert_eq!(entry.job, key, "the index of a reserved job belongs to another job");
        self.jobs[key].due = deadline;
        client.held.replace(index, entry, &mut self.jobs);
    }

    /// Returns the job `id` if the connection has reserved it.
    pub fn find_held(&self, client: &Client, id: u64) -> Option<JobKey> {
        self.find_if(id, |job| client.holds(job))
    }

    /// Returns the job `id` if no other connection has reserved it.
    #[inline(always)]
    pub fn find_own(&self, client: &Client, id: u64) -> Option<JobKey> {
        self.find_if(id, |job| job.state.holder().is_none_or(|holder| holder == client.key))
    }
}

impl Client {
    /// Returns whether it has reserved this job.
    pub fn holds(&self, job: &Job) -> bool {
        self.index_of(job).is_some()
    }

    /// Returns the index of a job among those that it has reserved, if it is one of them.
    pub(super) fn index_of(&self, job: &Job) -> Option<u32> {
        let State::Reserved(Holder { by, index }) = job.state else { return None };
        ({ by } == self.key).then_some(index)
    }

    /// Returns the part of the headroom that its watches of existing tubes must leave. A worker has few of them,
    /// and only a worker frees the memory that jobs take.
    pub fn headroom_for_watches(&self) -> Headroom {
        if self.watching.len() < FEW_WATCHES { Headroom::Quarter } else { Headroom::ThreeQuarters }
    }
}
