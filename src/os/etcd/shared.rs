//! The state that the thread of etcd and the event loop share. No one waits for the other.

use super::api::{EtcdError, Result};
use super::keys::ChunkNumber;
use crate::engine::collections::histogram::Histogram;
use crate::engine::time::Nanos;
use crate::os::membership::{Standing, puts_end};
use mio::Waker;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

/// Returns the time since some moment, also that in which the machine was suspended.
pub type Clock = fn() -> Nanos;

/// What both threads see.
#[derive(Debug)]
pub struct Shared {
    clock: Clock,
    state: Mutex<State>,
    /// This server has just won the lead.
    pub won: Notify,
}

/// The state. The lock is held for moments only.
#[derive(Debug, Default)]
pub struct State {
    standing: Standing,
    /// Why this server is no member any more.
    failure: Option<EtcdError>,
    /// The lease that this server has, or 0.
    pub lease: i64,
    /// No reply may leave after this moment of the clock; 0 before this server has created the key of the leader.
    pub deadline: Nanos,
    /// The revision of the last change of the log.
    pub revision: i64,
    /// The number of the last chunk, once this server leads and has found it.
    pub last_chunk: ChunkNumber,
    /// How many times changes were stored that were handed over.
    pub stored_batches: u64,
    /// etcd has no space for more.
    pub is_full: bool,
    /// The [length](super::disk::Change::len) of all changes since the start.
    pub written_len: u64,
    /// That of the changes that are stored.
    pub stored_len: u64,
    /// The size of etcd's database at the last look, in bytes, and what of it was in use.
    pub size: u64,
    pub used: u64,
    /// The length of the changes that this has: those that were stored at the look before, because etcd counts a
    /// change some 100 ms after it has stored it.
    pub counted_len: u64,
    quota: u64,
    /// The bytes of the deletes of all jobs.
    pub owed_len: u64,
    pub stored_bytes: u64,
    /// The durations of transactions.
    pub transactions: Histogram,
    /// Wakes the event loop.
    waker: Option<Waker>,
}

impl State {
    /// Returns whether what etcd has left is kept for deletes. It uses free pages again, but counts them.
    pub fn refuses_puts(&self) -> bool {
        self.size >= self.quota / 16 * 15 || self.is_beyond(puts_end(self.quota))
    }

    /// Returns the same for moves. What a move frees is in use for some minutes more.
    pub fn refuses_moves(&self) -> bool {
        self.is_beyond(self.quota / 32 * 29)
    }

    /// Returns the length of the changes that the last look may not have counted.
    pub fn recent_len(&self) -> u64 {
        self.written_len - self.counted_len
    }

    /// Returns whether more is in use than this. Behind it deletes have some room; more of them need space before it.
    fn is_beyond(&self, end: u64) -> bool {
        let needed = self.owed_len.saturating_sub(self.quota / 16);
        self.is_full || (self.used + self.recent_len()).saturating_add(needed) >= end
    }
}

impl Shared {
    pub fn new(clock: Clock, quota: u64) -> Shared {
        let state = State { quota, ..State::default() };
        Shared { clock, state: Mutex::new(state), won: Notify::new() }
    }

    pub fn now(&self) -> Nanos {
        (self.clock)()
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes the event loop.
    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        if let Some(waker) = &state.waker {
            // A failure is that the poll is gone, with the event loop.
            let _ = waker.wake();
        }
    }

    /// Returns the part of this server in the cluster.
    pub fn standing(&self) -> Result<Standing> {
        let state = self.state();
        state.failure.clone().map_or_else(|| Ok(state.standing.clone()), Err)
    }

    /// Changes or ends the part of this server. The first failure stays.
    pub fn set_standing(&self, standing: Result<Standing>) {
        self.change(|state| match standing {
            Ok(standing) => state.standing = standing,
            Err(failure) => drop(state.failure.get_or_insert(failure)),
        });
    }

    /// Returns the time until no reply may leave.
    pub fn lease_left(&self) -> Nanos {
        let deadline = self.state().deadline;
        deadline.since(self.now())
    }

    /// Fails if no reply may leave, and then none may ever.
    pub fn check(&self) -> Result {
        if self.lease_left() == Nanos::ZERO {
            self.set_standing(Err(EtcdError::lost("the lease was not renewed in time")));
        }
        self.standing().map(drop)
    }

    /// Notes that the oldest changes that were handed over, of this length, are stored.
    pub fn note_stored(&self, len: u64) {
        self.change(|state| {
            state.stored_batches += 1;
            state.stored_len += len;
        });
    }

    /// Notes that this many bytes are copied in etcd, which takes space as all changes do.
    pub fn note_copied(&self, len: u64) {
        let mut state = self.state();
        state.written_len += len;
        state.stored_len += len;
    }

    /// Sets what wakes the event loop, and wakes it: the state may have changed before.
    pub fn set_waker(&self, waker: Waker) {
        self.change(|state| state.waker = Some(waker));
    }
}
