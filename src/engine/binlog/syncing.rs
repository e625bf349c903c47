//! Syncs records and the names of files, removes free files, and stops at the first error of the disk.
//!
//! A kernel reports a failed write or sync once, and a later sync may succeed although data is
//! lost. So the first error of a write, sync or truncation is kept: after it nothing is created,
//! written, synced, truncated, renamed or removed, and [`Binlog::commit`] returns it.
//!
//! A closed file with unsynced records stays open until the next sync begins. With an interval between
//! syncs, a disk that can sync in the background does so, one sync at a time.
//!
//! A remote disk stores all changes in their order, also removals. There is always a sync while changes are not
//! stored, and replies wait for it, but the loop does not: see [`Progress`].
//!
//! A record in an older file must never outlive the record that supersedes it. So a free file is removed
//! only when a sync has ended that began after the last record that has made it free, after the record of the
//! gap that it leaves, and after the removal of the file before: otherwise a power cut could bring that one
//! back alone.
//!
//! The disk frees the space of removed files step by step, one step an iteration, because freeing
//! a large file at once takes milliseconds.

use super::Binlog;
use super::disk::FileNumber;
use super::error::{BinlogError, Step};
use super::files::File;
use crate::engine::limits::Limits;
use crate::engine::time::Nanos;
use log::{debug, warn};
use std::io;

/// The moment at which records are made to survive a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syncing {
    /// Before the replies of the same iteration leave.
    EachIteration,
    /// At most this long after they were made.
    Within(Nanos),
    /// Never: the system decides.
    Never,
    /// As soon as a remote disk has ended the sync before. Replies wait for that, at most for this time.
    Remote(Nanos),
}

/// The number of a sync, in the order in which they begin.
pub type Seq = u64;

/// How far the syncs of a remote disk are, for which replies wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The sync that stores the last change.
    pub wanted: Seq,
    /// The last sync that has ended.
    pub ended: Seq,
    /// The bytes that are not stored.
    pub waiting_bytes: usize,
    /// For how long none of them was stored.
    pub waiting_for: Nanos,
    /// The moment of the commit, in steps of a tenth of a second.
    pub now: Nanos,
    /// What has waited for longer is given up.
    pub patience: Nanos,
}

/// What is not synced yet, and what waits for that.
#[derive(Debug, Default)]
pub struct SyncState {
    /// The moment of the oldest record that is not synced.
    pub unsynced_since: Option<Nanos>,
    /// Names of files have changed since the last sync was begun.
    pub has_new_names: bool,
    /// Closed files with records that are not synced, and for which no sync was begun.
    unsynced_closed: Vec<FileNumber>,
    /// How many syncs of all records and names were begun, and the number of the last one that has ended.
    pub begun: Seq,
    ended: Seq,
    /// The moment at which the sync in progress has begun or stored some bytes, as far as is known.
    stored_at: Nanos,
    /// The bytes that a remote disk had stored then.
    stored_bytes: u64,
    /// The bytes of the sync in progress, and those that were written since it was begun.
    begun_bytes: usize,
    pub unsynced_bytes: usize,
    /// The moment of the next attempt, after a file could not be removed, or created for a drained binlog.
    pub retry_at: Nanos,
    /// The next commit frees more of the space of removed files.
    pub is_truncating: bool,
}

/// At most this many closed files stay open for the next sync.
const MAX_UNSYNCED_CLOSED: usize = 2;

/// A sync begins this much before it is due, because it takes time; but at most a quarter of the
/// interval before.
const SYNC_MARGIN: Nanos = Nanos::from_millis(5);

/// A file of at most this many bytes is small.
const SMALL_FILE: u64 = 1024 * 1024;

/// The pause before a file is tried again whose gap could not be recorded for want of space.
const NO_ROOM_PAUSE: Nanos = Nanos::from_secs(1);

/// The pause before a failed removal is tried again.
pub const RETRY_PAUSE: Nanos = Nanos::from_secs(60);

/// A change that is not stored for longer is a stall.
const STALL: Nanos = Nanos::from_secs(1);
/// The precision of [`Progress::now`]: replies that wait are looked at so often.
const PROGRESS_INTERVAL: Nanos = Nanos::from_millis(100);

impl Progress {
    /// Returns whether all changes are stored.
    pub fn is_complete(self) -> bool {
        self.ended >= self.wanted
    }

    /// Returns whether nothing was stored for more than a second: nothing is promised to new clients.
    pub fn is_stalled(self) -> bool {
        self.waiting_for > STALL
    }

    /// Returns whether what waits since this moment has waited for too long for a disk that stores nothing.
    pub fn is_overdue(self, since: Nanos) -> bool {
        self.has_overdue() && self.now.since(since) > self.patience
    }

    /// Returns whether nothing was stored for too long.
    pub fn has_overdue(self) -> bool {
        self.waiting_for > self.patience
    }
}

impl SyncState {
    /// Returns whether there is a background sync. When it has ended, the loop is woken.
    fn is_in_background(&self) -> bool {
        self.ended < self.begun
    }
}

impl Binlog {
    // ---- Errors ----

    /// Returns the first error of the disk, if there was one.
    pub(super) fn status(&self) -> Result<(), BinlogError> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Keeps the error of `done`, if it is the first; `what` describes what was tried.
    pub(super) fn keep_error(&mut self, done: io::Result<()>, what: impl FnOnce() -> String) {
        if let Err(error) = done {
            self.failure.get_or_insert_with(|| BinlogError::new(Step::Write, what(), error));
        }
    }

    // ---- Syncs ----

    /// Returns whether each commit with records ends in a sync.
    pub fn syncs_each_iteration(&self) -> bool {
        self.syncing == Syncing::EachIteration
    }

    /// Returns whether replies wait until the changes before them are stored.
    pub fn holds_replies(&self) -> bool {
        matches!(self.syncing, Syncing::EachIteration | Syncing::Remote(_))
    }

    /// Returns whether the files of a directory are synced.
    fn syncs_files(&self) -> bool {
        matches!(self.syncing, Syncing::EachIteration | Syncing::Within(_))
    }

    /// Returns how far the syncs are for which replies wait.
    pub fn progress(&self) -> Option<Progress> {
        let Syncing::Remote(patience) = self.syncing else { return None };
        let SyncState { begun, ended, stored_at, unsynced_since, has_new_names, .. } = self.sync;
        let is_changed = unsynced_since.is_some() || has_new_names;
        let since = if ended < begun { stored_at } else { self.now };
        let step = PROGRESS_INTERVAL.as_nanos();
        Some(Progress {
            wanted: begun + u64::from(is_changed),
            ended,
            waiting_bytes: self.sync.begun_bytes + self.sync.unsynced_bytes,
            waiting_for: self.now.since(since),
            now: Nanos::from_nanos(self.now.as_nanos() / step * step),
            patience,
        })
    }

    /// Returns whether too many changes wait for a remote disk: no more should be made until the next sync begins.
    pub fn is_congested(&self) -> bool {
        matches!(self.syncing, Syncing::Remote(_))
            && self.sync.unsynced_bytes + self.batch.len() >= self.limits.congested_bytes
    }

    /// Returns when the next sync is due: never if there is nothing to sync, or if there is a background sync.
    pub(super) fn sync_due(&self) -> Nanos {
        let since = self.sync.unsynced_since.unwrap_or(Nanos::NEVER);
        match self.syncing {
            Syncing::Never => Nanos::NEVER,
            _ if self.sync.is_in_background() => Nanos::NEVER,
            Syncing::EachIteration => since,
            Syncing::Within(span) => {
                let quarter = Nanos::from_nanos(span.as_nanos() / 4);
                since + span.since(quarter.min(SYNC_MARGIN))
            }
            Syncing::Remote(_) if self.sync.has_new_names => self.now,
            Syncing::Remote(_) => since,
        }
    }

    /// Notes the end of a background sync, and begins the next one if that is due.
    pub fn sync_if_due(&mut self) {
        self.end_sync(false);
        if self.sync_due() <= self.now {
            self.begin_sync(true);
        }
    }

    /// Syncs the names of files, and all files with records that are not synced: in the background if
    /// `may_wait` and replies do not wait for it. Then only one is begun at a time.
    pub(super) fn begin_sync(&mut self, may_wait: bool) {
        if self.sync.is_in_background() {
            return;
        }
        let in_background = may_wait && self.syncing != Syncing::EachIteration;
        self.files.count_free(self.sync.begun);
        self.sync.begun += 1;
        self.sync.stored_at = self.now;
        self.sync.begun_bytes = std::mem::take(&mut self.sync.unsynced_bytes);
        let has_records = self.sync.unsynced_since.take().is_some();
        let with_names = std::mem::take(&mut self.sync.has_new_names);
        let mut files = std::mem::take(&mut self.sync.unsynced_closed);
        let closed = files.len();
        // At the start there may be no current file any more.
        if has_records && let Some(&File { number, .. }) = self.files.list.get(self.files.current) {
            files.push(number);
        }
        let is_wanted = self.syncing != Syncing::Never && (has_records || with_names);
        if is_wanted && !self.has_failed() {
            self.disk.begin_sync(&files, with_names, in_background);
            files.iter().take(closed).for_each(|&number| self.disk.close(number));
            self.end_sync(!in_background);
        } else {
            self.sync.ended = self.sync.begun;
        }
    }

    /// Notes the end of the sync that was begun. Waits for it if it `must_wait`.
    pub(super) fn end_sync(&mut self, must_wait: bool) {
        if !self.sync.is_in_background() {
            return;
        }
        let Some(result) = self.disk.finished_sync(must_wait) else {
            let stored = self.disk.stored_bytes();
            if std::mem::replace(&mut self.sync.stored_bytes, stored) != stored {
                self.sync.stored_at = self.now;
            }
            return;
        };
        self.sync.ended = self.sync.begun;
        self.sync.begun_bytes = 0;
        if let Err(failure) = result {
            self.failure.get_or_insert(failure);
        }
    }

    /// Writes the batch, syncs all records and names, and waits for that.
    pub(super) fn sync(&mut self) {
        self.write_batch();
        self.end_sync(true);
        self.begin_sync(false);
    }

    /// Closes a file, now or after the next sync, which is that of the next file with the end of this one. It will
    /// not be written any more.
    pub(super) fn close_after_sync(&mut self, number: FileNumber) {
        if self.sync.unsynced_closed.len() == MAX_UNSYNCED_CLOSED {
            self.begin_sync(true);
        }
        if self.sync.unsynced_closed.len() == MAX_UNSYNCED_CLOSED {
            self.sync();
        }
        if self.syncs_files() {
            self.sync.unsynced_closed.push(number);
        } else {
            self.disk.close(number);
        }
    }

    // ---- Removal ----

    /// Returns when the next commit has something to remove or to free. During a background sync only what was
    /// synced before can be removed.
    pub(super) fn removal_due(&self) -> Nanos {
        if self.sync.is_truncating {
            return self.now;
        }
        let is_removable = |first| self.may_remove(first) || !self.sync.is_in_background();
        let is_due = self.files.sums.first_free.is_some_and(is_removable);
        if is_due { self.sync.retry_at } else { Nanos::NEVER }
    }

    /// Returns the file that can be removed now, perhaps after a sync.
    pub(super) fn next_to_remove(&self) -> Option<usize> {
        let may_try = self.sync.retry_at <= self.now && !self.has_failed();
        self.files.sums.first_free.filter(|_| may_try)
    }

    /// Returns whether a free file may be removed: what has made it free is synced, and so is the removal of
    /// the file before. A remote disk keeps that order.
    fn may_remove(&self, index: usize) -> bool {
        let is_synced =
            self.files.list[index].free_since.is_some_and(|since| since < self.sync.ended);
        (is_synced || self.disk.is_remote()) && !self.has_failed()
    }

    /// Removes free files, as many as one iteration has time for.
    pub(super) fn remove_some(&mut self, may_wait: bool) {
        let Some(first) = self.files.sums.first_free else { return };
        let is_small = self.files.list[first].size <= SMALL_FILE;
        let Limits { removals_per_commit, small_removals_per_commit, .. } = self.limits;
        let most = if is_small { small_removals_per_commit } else { removals_per_commit };
        for _ in 0..most {
            if !self.remove_next(may_wait) {
                return;
            }
        }
    }

    /// Removes the oldest free file; a damaged one is renamed instead. First it syncs what must be synced. If it
    /// `may_wait`, it only begins that sync, and a later call removes the file. Returns `false` if the file is
    /// not removed. Then no newer one is removed before it.
    pub(super) fn remove_next(&mut self, may_wait: bool) -> bool {
        let Some(index) = self.next_to_remove() else { return false };
        if !self.record_gap(index) {
            self.sync.retry_at = self.now + NO_ROOM_PAUSE;
            return false;
        }
        self.write_batch();
        if !self.may_remove(index) && may_wait {
            self.begin_sync(true);
        } else if !self.may_remove(index) {
            self.sync();
        }
        if !self.may_remove(index) {
            return false;
        }
        let File { number, is_damaged, .. } = self.files.list[index];
        let removed = if is_damaged { self.set_aside(number) } else { self.disk.remove(number) };
        if let Err(error) = removed {
            self.sync.retry_at = self.now + RETRY_PAUSE;
            warn!("cannot remove binlog.{number}, which has no jobs: {error}; retrying in 60 s");
            return false;
        }
        debug!("binlog.{number}: removed");
        self.sync.has_new_names = true;
        self.forget_file(index);
        // The next one waits until this removal is synced.
        if let Some(next) = self.files.sums.first_free {
            self.files.list[next].free_since = Some(self.sync.begun);
        }
        true
    }

    /// Forgets a file that is gone from the disk. Its space is freed by the next commits, and puts may use it.
    pub(super) fn forget_file(&mut self, index: usize) {
        self.sync.is_truncating = true;
        self.space.refusal = None;
        self.files.remove_file(index);
    }

    fn set_aside(&mut self, number: FileNumber) -> io::Result<()> {
        match self.disk.quarantine(number) {
            Ok(name) => warn!("binlog.{number}: damaged; renamed to {name}"),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                warn!("binlog.{number}: damaged, and it was removed by someone else");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    // ---- Checking ----

    /// Checks that the files to be synced exist.
    pub(super) fn check_sync(&self) {
        let SyncState { unsynced_since, unsynced_closed: closed, .. } = &self.sync;
        let File { number, .. } = *self.files.current();
        let numbers = closed.iter().copied().chain([number]);
        let is_sorted = numbers.clone().is_sorted_by(|before, after| before < after);
        let are_there = numbers.min() >= Some(self.files.oldest_number());
        assert!(is_sorted && are_there, "{closed:?} are to be synced, before binlog.{number}");
        let is_wanted = self.syncs_files()
            && (unsynced_since.is_some() || self.has_failed())
            && closed.len() <= MAX_UNSYNCED_CLOSED;
        assert!(closed.is_empty() || is_wanted, "{closed:?} are kept to be synced, but never are");
    }
}
