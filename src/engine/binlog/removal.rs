//! Removes closed files without jobs, the oldest first.
//!
//! A record in an older file must never outlive the record that supersedes it. So a file is removed
//! only when no older one is left, and when the records that replace its own are synced.
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

/// The pause before a failed removal is tried again.
pub const RETRY_PAUSE: Nanos = Nanos::from_secs(60);

impl Removal {
    /// Returns the state at the start. Files that were removed before it may still take space.
    pub fn new() -> Removal {
        Removal { is_truncating: true, retry_at: Nanos::ZERO }
    }

    /// Returns when the next commit has something to remove or to free. While a sync `is_sync_pending`,
    /// nothing can be removed.
    pub fn next_due(&self, files: &Files, is_sync_pending: bool, now: Nanos) -> Option<Nanos> {
        if self.is_truncating {
            return Some(now);
        }
        (files.has_removable() && !is_sync_pending).then_some(self.retry_at)
    }

    /// Returns whether the oldest file can be removed now.
    pub fn can_remove(&self, files: &Files, now: Nanos) -> bool {
        files.has_removable() && self.retry_at <= now && !files.disk().has_failed()
    }

    /// Returns whether the next commit should remove files. It waits until the space of earlier ones
    /// is freed, unless the disk is full.
    pub fn is_due(&self, files: &Files, now: Nanos) -> bool {
        self.can_remove(files, now) && (files.is_full() || !self.is_truncating)
    }

    /// Removes the oldest files without jobs, as many as one iteration has time for. First it syncs what
    /// must be synced. If it `may_wait`, it only begins that sync, and a later commit removes the files.
    pub fn remove_some(&mut self, writer: &mut Writer, may_wait: bool, now: Nanos) {
        let is_small = writer.files().segments()[0].size <= SMALL_FILE;
        let Limits { removals_per_commit, small_removals_per_commit, .. } =
            *writer.files().limits();
        for _ in 0..if is_small { small_removals_per_commit } else { removals_per_commit } {
            if !self.can_remove(writer.files(), now) {
                return;
            }
            if !writer.may_remove_oldest() {
                if may_wait { writer.request_sync() } else { writer.sync() }
            }
            if !writer.may_remove_oldest() {
                return;
            }
            self.remove_oldest(writer.files_mut(), now);
        }
    }

    /// Removes all files that can be removed.
    pub fn remove_all(&mut self, files: &mut Files, now: Nanos) {
        while self.can_remove(files, now) {
            self.remove_oldest(files, now);
        }
        self.is_truncating = true;
    }

    /// Removes the oldest file. If that fails, no newer one is removed before it.
    pub fn remove_oldest(&mut self, files: &mut Files, now: Nanos) {
        let number = files.segments()[0].number;
        if let Err(error) = files.remove_oldest() {
            self.retry_at = now + RETRY_PAUSE;
            warn!("cannot remove binlog.{number}, which has no jobs: {error}; retrying in 60 s");
        }
    }

    /// Frees some space of removed files.
    pub fn truncate_step(&mut self, files: &mut Files) {
        self.is_truncating = files.disk_mut().raw().truncate_step();
    }
}
