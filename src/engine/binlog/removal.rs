//! Removes free files, the oldest first.
//!
//! A record in an older file must never outlive the record that supersedes it. So a file is removed
//! only when its records supersede none that is needed, and when the records that replace its own are
//! synced, with that of the gap in the numbers.
//!
//! The disk frees the space of removed files step by step, one step an iteration, because freeing
//! a large file at once takes milliseconds.

use super::files::Files;
use super::writer::Writer;
use crate::engine::limits::Limits;
use crate::engine::time::Nanos;
use log::warn;

/// The state of the removal of files.
#[derive(Debug)]
pub struct Removal {
    /// The disk has not freed the space of all removed files.
    is_truncating: bool,
    /// The moment of the next attempt, after a file could not be removed.
    retry_at: Nanos,
}

/// A file of at most this many bytes is small.
const SMALL_FILE: u64 = 1024 * 1024;

/// The pause before a file is tried again whose gap could not be recorded for want of space.
const NO_ROOM_PAUSE: Nanos = Nanos::from_secs(1);

/// The pause before a failed removal is tried again.
pub const RETRY_PAUSE: Nanos = Nanos::from_secs(60);

impl Removal {
    /// Returns the state at the start. Files that were removed before it may still take space.
    pub fn new() -> Removal {
        Removal { is_truncating: true, retry_at: Nanos::ZERO }
    }

    /// Returns when the next commit has something to remove or to free. During a background sync only what was
    /// synced before can be removed.
    pub fn next_due(&self, writer: &Writer) -> Option<Nanos> {
        if self.is_truncating {
            return Some(writer.now());
        }
        let files = writer.files();
        let is_removable =
            |&index: &usize| files.may_remove(index) || !writer.syncing().has_background_sync();
        files.first_free().filter(is_removable).map(|_| self.retry_at)
    }

    /// Returns the file that can be removed now.
    pub fn next(&self, files: &Files, now: Nanos) -> Option<usize> {
        let may_try = self.retry_at <= now && !files.disk().has_failed();
        files.first_free().filter(|_| may_try)
    }

    /// Returns whether the next commit should remove files. It waits until the space of earlier ones
    /// is freed, unless the disk is full.
    pub fn is_due(&self, files: &Files, now: Nanos) -> bool {
        self.next(files, now).is_some() && (files.is_full() || !self.is_truncating)
    }

    /// Removes free files, as many as one iteration has time for. First it syncs what
    /// must be synced. If it `may_wait`, it only begins that sync, and a later commit removes the files.
    pub fn remove_some(&mut self, writer: &mut Writer, may_wait: bool, now: Nanos) {
        let Some(first) = writer.files().first_free() else { return };
        let is_small = writer.files().segments()[first].size <= SMALL_FILE;
        let Limits { removals_per_commit, small_removals_per_commit, .. } =
            *writer.files().limits();
        for _ in 0..if is_small { small_removals_per_commit } else { removals_per_commit } {
            let Some(index) = self.next(writer.files(), now) else { return };
            if !writer.record_gap(index) {
                self.retry_at = now + NO_ROOM_PAUSE;
                return;
            }
            if !writer.files().may_remove(index) {
                if may_wait { writer.request_sync() } else { writer.sync() }
            }
            if !writer.files().may_remove(index) {
                return;
            }
            self.remove(writer.files_mut(), index, now);
        }
    }

    /// Removes all files that can be removed without the record of a gap.
    pub fn remove_all(&mut self, files: &mut Files, now: Nanos) {
        while let Some(index) = self.next(files, now).filter(|&index| files.is_recorded_gap(index))
        {
            self.remove(files, index, now);
        }
        self.is_truncating = true;
    }

    /// Removes a free file. If that fails, no newer one is removed before it.
    pub fn remove(&mut self, files: &mut Files, index: usize, now: Nanos) {
        let number = files.segments()[index].number;
        if let Err(error) = files.remove_free(index) {
            self.retry_at = now + RETRY_PAUSE;
            warn!("cannot remove binlog.{number}, which has no jobs: {error}; retrying in 60 s");
        }
    }

    /// Frees some space of removed files.
    pub fn truncate_step(&mut self, files: &mut Files) {
        self.is_truncating = files.disk_mut().raw().truncate_step();
    }
}
