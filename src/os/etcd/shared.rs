//! The state that the thread of etcd and the event loop share. No one waits for the other.

use super::keys::ChunkNumber;
use crate::engine::collections::histogram::Histogram;
use crate::engine::time::Nanos;
use mio::Waker;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Returns the time since some moment, also that in which the machine was suspended.
pub type Clock = fn() -> Nanos;

/// The state that both threads see.
#[derive(Debug)]
pub struct Shared {
    clock: Clock,
    role: Mutex<Role>,
    /// The lease that this server has, or 0.
    lease: AtomicI64,
    /// No reply may leave after this moment of the clock, in nanoseconds.
    deadline_ns: AtomicU64,
    /// The number of the last change that is stored, with all before it.
    acknowledged: AtomicU64,
    /// Changes are being stored.
    is_storing: AtomicBool,
    /// etcd has no space for more.
    has_no_space: AtomicBool,
    stored_bytes: AtomicU64,
    transactions: Mutex<Histogram>,
    /// Wakes the event loop.
    waker: Mutex<Option<Waker>>,
}

/// The part of this server in the cluster.
#[derive(Clone, Debug)]
pub enum Role {
    /// It is not known yet whether another server leads.
    Starting,
    /// The server with this name leads.
    StandingBy(String),
    /// This server leads.
    Leading(Leader),
    /// etcd refuses what the server needs. Another try would fail too.
    Refused(String),
    /// This server has led, and does not any more.
    Lost(String),
}

/// What the transactions of a leader need.
#[derive(Clone, Copy, Debug)]
pub struct Leader {
    /// The revision in which the key of the leader was created.
    pub revision: i64,
    /// The revision in which the key of the format was last changed.
    pub format_revision: i64,
    /// The size of a file in bytes, which that key has.
    pub file_size: u32,
    /// A binlog is being imported.
    pub is_import: bool,
    /// The number of the last chunk, or 0 if there is none.
    pub last_chunk: ChunkNumber,
}

impl Shared {
    pub fn new(clock: Clock) -> Shared {
        Shared {
            clock,
            role: Mutex::new(Role::Starting),
            lease: AtomicI64::new(0),
            deadline_ns: AtomicU64::new(0),
            acknowledged: AtomicU64::new(0),
            is_storing: AtomicBool::new(false),
            has_no_space: AtomicBool::new(false),
            stored_bytes: AtomicU64::new(0),
            transactions: Mutex::new(Histogram::default()),
            waker: Mutex::new(None),
        }
    }

    pub fn now(&self) -> Nanos {
        (self.clock)()
    }

    // ---- The role ----

    pub fn role(&self) -> Role {
        lock(&self.role).clone()
    }

    /// Changes the role and wakes the event loop. A role that was lost stays lost.
    pub fn set_role(&self, role: Role) {
        let mut present = lock(&self.role);
        if !matches!(*present, Role::Lost(_)) {
            *present = role;
        }
        drop(present);
        self.wake();
    }

    pub fn set_lease(&self, lease: i64) {
        self.lease.store(lease, SeqCst);
    }

    /// Returns the lease that this server has, or 0.
    pub fn lease(&self) -> i64 {
        self.lease.load(SeqCst)
    }

    /// Sets the moment of the clock after which no reply may leave.
    pub fn set_deadline(&self, deadline: Nanos) {
        self.deadline_ns.store(deadline.as_nanos(), SeqCst);
    }

    /// Returns the time until no reply may leave.
    pub fn lease_left(&self) -> Nanos {
        Nanos::from_nanos(self.deadline_ns.load(SeqCst)).since(self.now())
    }

    /// Returns why no reply may leave, if none may.
    pub fn loss(&self) -> Option<String> {
        if let Role::Lost(reason) = &*lock(&self.role) {
            return Some(reason.clone());
        }
        let is_over = self.lease_left() == Nanos::ZERO;
        is_over.then(|| "the lease was not renewed in time".to_owned())
    }

    /// Returns whether a reply may leave now. If none may, none may ever.
    pub fn may_answer(&self) -> bool {
        if let Some(reason) = self.loss() {
            self.set_role(Role::Lost(reason));
            return false;
        }
        true
    }

    // ---- Changes ----

    /// Begins to store changes.
    pub fn begin_storing(&self) {
        self.is_storing.store(true, SeqCst);
    }

    pub fn is_storing(&self) -> bool {
        self.is_storing.load(SeqCst)
    }

    /// Notes that all changes up to this number are stored, and wakes the event loop.
    pub fn acknowledge(&self, change: u64) {
        self.acknowledged.store(change, SeqCst);
        self.is_storing.store(false, SeqCst);
        self.wake();
    }

    pub fn acknowledged(&self) -> u64 {
        self.acknowledged.load(SeqCst)
    }

    pub fn set_no_space(&self, has_no_space: bool) {
        self.has_no_space.store(has_no_space, SeqCst);
    }

    pub fn has_no_space(&self) -> bool {
        self.has_no_space.load(SeqCst)
    }

    /// Counts a transaction that took `span` and stored `bytes`.
    pub fn count_transaction(&self, span: Nanos, bytes: usize) {
        lock(&self.transactions).count(span);
        self.stored_bytes.fetch_add(bytes as u64, SeqCst);
    }

    pub fn transactions(&self) -> Histogram {
        lock(&self.transactions).clone()
    }

    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes.load(SeqCst)
    }

    // ---- Waking ----

    /// Sets what wakes the event loop, and wakes it: the state may have changed before.
    pub fn set_waker(&self, waker: Waker) {
        *lock(&self.waker) = Some(waker);
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = &*lock(&self.waker) {
            // A failure is that the poll is gone, with the event loop.
            let _ = waker.wake();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
