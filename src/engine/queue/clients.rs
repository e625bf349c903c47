//! The part of a connection that the rules use, from its start to the end of its closing.
//!
//! It knows connections by key, and nothing of their streams and commands.

use super::Queue;
use super::due::with_slice;
use super::job::{ReservedEntry, State};
use super::tube::Tubes;
use super::waiters::Watching;
use crate::engine::collections::heap::Heap;
use crate::engine::collections::slab::PagedSlab;
use crate::engine::collections::timers::Timed;
use crate::engine::keys::{ConnKey, JobKey, TubeKey};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// The clients, by connection.
pub type Clients = PagedSlab<ConnKey, Client>;

/// The part of a connection that the rules use.
#[derive(Debug)]
pub struct Client {
    /// The tube of its puts.
    pub used: TubeKey,
    /// The tubes from which it reserves.
    pub watching: Watching,
    /// The jobs that it has reserved, the one with the first deadline on top.
    pub reserved: Heap<ReservedEntry>,
    /// The index of its timer, which fires when the next deadline, safety margin or timeout is due.
    timer: u32,
    pub(super) is_producer: bool,
    pub(super) is_worker: bool,
}

impl Timed for ConnKey {
    type Store = Clients;

    fn timer_index(self, clients: &Clients) -> Option<u32> {
        clients.get(self).map(|client| client.timer)
    }

    fn timer_index_mut(self, clients: &mut Clients) -> &mut u32 {
        &mut clients[self].timer
    }
}

/// A closed connection whose jobs are released and whose watches are removed in steps.
#[derive(Debug)]
pub(super) struct Closing {
    conn: ConnKey,
    /// Its reserved jobs in reverse order of reservation; empty if there are more than
    /// [`MAX_ORDERED_RELEASES`].
    release_order: Vec<JobKey>,
}

/// A closed connection with at most this many jobs releases them in the order of reservation.
const MAX_ORDERED_RELEASES: usize = 4096;
/// Units of work to remove a watch.
const WORK_PER_WATCH: usize = 4;

impl Queue {
    /// Adds a connection, which uses and watches `default`, under a key that no connection has.
    pub fn connect(&mut self, conn: ConnKey) -> Result<(), TryReserveError> {
        let client = Client {
            used: Tubes::DEFAULT,
            watching: Watching::default(),
            reserved: Heap::default(),
            timer: 0,
            is_producer: false,
            is_worker: false,
        };
        self.conn_timers.try_reserve_one()?;
        self.clients.try_insert(conn, client)?;
        if let Err(no_memory) = self.add_watch(conn, Tubes::DEFAULT) {
            self.clients.remove(conn);
            return Err(no_memory);
        }
        self.conn_timers.add(conn, &mut self.clients);
        self.tubes[Tubes::DEFAULT].using += 1;
        Ok(())
    }

    /// Closes a connection: ends its wait, releases its jobs in the order of reservation, and
    /// removes its watches. Returns `false` if [`Queue::close_next`] must do the rest. A connection
    /// with more than 4,096 jobs releases them in the order of their deadlines.
    pub fn disconnect(&mut self, conn: ConnKey, now: Nanos) -> bool {
        self.stop_waiting(conn);
        let client = &mut self.clients[conn];
        self.totals.producers -= u64::from(std::mem::take(&mut client.is_producer));
        self.totals.workers -= u64::from(std::mem::take(&mut client.is_worker));
        let mut entries: Vec<ReservedEntry> = Vec::new();
        let count = client.reserved.len();
        if count <= MAX_ORDERED_RELEASES && entries.try_reserve_exact(count).is_ok() {
            entries.extend(client.reserved.iter());
            // The latest reservation first.
            let next = self.next_reserve_seq;
            entries.sort_unstable_by_key(|entry| next.wrapping_sub(entry.seq));
        }
        let release_order = entries.into_iter().map(|entry| entry.job).collect();
        let mut closing = Closing { conn, release_order };
        let mut work_left = self.closing_work_left;
        let is_done = with_slice(&mut work_left, self.limits.closing_slice_work, |slice_left| {
            self.close_step(&mut closing, slice_left, now)
        });
        self.closing_work_left = work_left;
        if !is_done {
            self.closing.push_back(closing);
        }
        is_done
    }

    /// Releases more jobs and removes more watches of closed connections. Returns a connection that
    /// has none left; its key is free.
    pub fn close_next(&mut self, work_left: &mut usize, now: Nanos) -> Option<ConnKey> {
        while *work_left > 0 {
            let mut closing = self.closing.pop_front()?;
            let is_done = with_slice(work_left, self.limits.closing_slice_work, |slice_left| {
                self.close_step(&mut closing, slice_left, now)
            });
            if is_done {
                return Some(closing.conn);
            }
            self.closing.push_back(closing);
        }
        None
    }

    /// Returns the closed connections that still have jobs or watches.
    pub fn closing(&self) -> impl ExactSizeIterator<Item = ConnKey> + '_ {
        self.closing.iter().map(|closing| closing.conn)
    }

    /// Ensures that closing any connection, including one more, needs no memory.
    pub fn try_reserve_closing(&mut self) -> Result<(), TryReserveError> {
        self.closing.try_reserve(self.clients.len() + 1)
    }

    fn close_step(&mut self, closing: &mut Closing, work_left: &mut usize, now: Nanos) -> bool {
        let conn = closing.conn;
        if !self.release_reserved(closing, work_left, now) {
            return false;
        }
        while let Some(watch) = self.clients[conn].watching.first_watch() {
            if *work_left == 0 {
                return false;
            }
            *work_left = work_left.saturating_sub(WORK_PER_WATCH);
            let tube = self.remove_watch(watch);
            self.remove_tube_if_idle(tube);
        }
        self.remove_client(conn);
        true
    }

    /// Releases the jobs that a closed connection has reserved. Returns `false` if `work_left` is
    /// too small.
    fn release_reserved(
        &mut self,
        closing: &mut Closing,
        work_left: &mut usize,
        now: Nanos,
    ) -> bool {
        let conn = closing.conn;
        while let Some(soonest) = self.clients[conn].reserved.first() {
            if *work_left == 0 {
                return false;
            }
            // Between two steps the TTR may run out, and another client may delete the job.
            let is_reserved = |job: &JobKey| {
                let state = self.jobs.get(*job).map(|job| job.state);
                state.and_then(State::holder) == Some(conn)
            };
            let job = closing.release_order.pop().filter(is_reserved).unwrap_or(soonest.job);
            if self.is_flushed(&self.jobs[job]) {
                self.free_flushed_reserved(job, work_left, now);
            } else {
                self.take_back(job, work_left, now);
            }
        }
        true
    }

    /// Removes a client that has no job, no watch and no wait.
    fn remove_client(&mut self, conn: ConnKey) {
        let client = self.clients.remove(conn).expect("no client for this connection");
        self.conn_timers.remove(client.timer, &mut self.clients);
        self.tubes[client.used].using -= 1;
        self.remove_tube_if_idle(client.used);
    }

    /// Counts the connection as a producer.
    pub fn mark_producer(&mut self, conn: ConnKey) {
        let was_one = std::mem::replace(&mut self.clients[conn].is_producer, true);
        self.totals.producers += u64::from(!was_one);
    }

    /// Counts the connection as a worker.
    pub fn mark_worker(&mut self, conn: ConnKey) {
        let was_one = std::mem::replace(&mut self.clients[conn].is_worker, true);
        self.totals.workers += u64::from(!was_one);
    }
}
