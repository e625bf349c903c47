//! A disk that stops at its first error.
//!
//! A kernel reports a failed write or sync once, and a later sync may succeed although data is
//! lost. So the first error of a write, sync or truncation is kept: after it nothing is created,
//! written, synced, truncated, renamed or removed, and [`FailStopDisk::status`] returns the error.
//!
//! It also records which changes of file names are not synced, so that a file is removed only after the
//! removal of the one before is synced.

use super::IoFailed;
use super::disk::{Disk, FileNumber, Progress, RemoteStats, SyncError};
use super::record::VERSION;
use crate::engine::collections::histogram::Histogram;
use std::io;

/// A directory of files in which nothing is changed after the first error.
#[derive(Debug)]
pub struct FailStopDisk {
    disk: Box<dyn Disk>,
    /// `false`: the operator wants no syncs.
    is_synced: bool,
    names: NameChanges,
    failure: Option<IoFailed>,
}

/// Changes of the names of files, which survive a power cut only after a sync.
#[derive(Clone, Copy, Debug, Default)]
struct NameChanges {
    /// A file was created, renamed or removed since the last sync of names was begun.
    has_changes: bool,
    /// A file was renamed or removed since then.
    has_removals: bool,
    /// A file was renamed or removed before the background sync that has not ended.
    has_removals_in_background: bool,
}

impl FailStopDisk {
    /// Returns a disk without an error. Syncs do nothing unless `is_synced`.
    pub fn new(disk: Box<dyn Disk>, is_synced: bool) -> FailStopDisk {
        FailStopDisk {
            disk,
            is_synced,
            // The server before may have been killed after a change.
            names: NameChanges { has_changes: true, has_removals: true, ..NameChanges::default() },
            failure: None,
        }
    }

    /// Returns whether there was an error.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Returns the first error, if there was one.
    pub fn status(&self) -> Result<(), IoFailed> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Keeps the error of `done`, if it is the first; `what` describes what was tried.
    pub fn latch_error(&mut self, done: io::Result<()>, what: impl FnOnce() -> String) {
        if let Err(error) = done {
            self.failure.get_or_insert_with(|| IoFailed(format!("{}: {error}", what())));
        }
    }

    /// Creates a file of `size` bytes with the version at its head. An error of the creation is
    /// not kept.
    pub fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        self.check_unfailed()?;
        self.disk.create(number, size)?;
        self.names.has_changes = true;
        self.write(number, 0, &VERSION);
        Ok(())
    }

    /// Removes a file that is not the newest one. The removal of an older one is synced before: otherwise
    /// a power cut could bring that one back alone. An error is not kept.
    pub fn remove(&mut self, number: FileNumber) -> io::Result<()> {
        self.begin_removal()?;
        self.disk.remove(number)?;
        self.note_removal();
        Ok(())
    }

    /// Renames a damaged file in the same way. Returns its new name.
    pub fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        self.begin_removal()?;
        let name = self.disk.quarantine(number)?;
        self.note_removal();
        Ok(name)
    }

    fn begin_removal(&mut self) -> io::Result<()> {
        if !self.has_synced_removals() {
            self.sync_names();
        }
        self.check_unfailed()
    }

    fn note_removal(&mut self) {
        self.names.has_changes = true;
        self.names.has_removals = true;
    }

    /// Lengthens a file to `size` bytes. An error is not kept.
    pub fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        self.check_unfailed()?;
        self.disk.extend(number, size)
    }

    fn check_unfailed(&self) -> io::Result<()> {
        match &self.failure {
            None => Ok(()),
            Some(failure) => Err(io::Error::new(io::ErrorKind::StorageFull, failure.to_string())),
        }
    }

    /// Writes `bytes` at `offset`.
    pub fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) {
        if !self.has_failed() {
            let written = self.disk.write(number, offset, bytes);
            self.latch_error(written, || format!("cannot write binlog.{number}"));
        }
    }

    /// Announces that bytes will be synced.
    pub fn will_sync(&mut self, number: FileNumber, offset: u64, len: u64) {
        if !self.has_failed() {
            self.disk.will_sync(number, offset, len);
        }
    }

    /// Syncs a file.
    pub fn sync(&mut self, number: FileNumber) {
        if self.is_synced && !self.has_failed() {
            let synced = self.disk.sync(number);
            self.latch_sync_error(synced.map_err(|error| SyncError { file: Some(number), error }));
        }
    }

    /// Begins to sync files, and names that have changed, in the background. Returns whether that is
    /// possible.
    pub fn begin_sync(&mut self, files: &[FileNumber]) -> bool {
        let may_begin = self.is_synced && !self.has_failed();
        let is_begun = may_begin && self.disk.begin_sync(files, self.names.has_changes);
        if is_begun {
            let has_removals_in_background = self.names.has_removals;
            self.names = NameChanges { has_removals_in_background, ..NameChanges::default() };
        }
        is_begun
    }

    /// Returns whether the background sync has ended. Waits for its end if it `must_wait`.
    pub fn poll_sync(&mut self, must_wait: bool) -> bool {
        let Some(result) = self.disk.finished_sync(must_wait) else { return false };
        self.names.has_removals_in_background = false;
        self.latch_sync_error(result);
        true
    }

    fn latch_sync_error(&mut self, result: Result<(), SyncError>) {
        if let Err(SyncError { file, error }) = result {
            self.latch_error(Err(error), || match file {
                Some(number) => format!("cannot sync binlog.{number}"),
                None => "cannot sync the directory".to_owned(),
            });
        }
    }

    /// Syncs the names of files if they have changed.
    pub fn sync_names(&mut self) {
        if self.is_synced && !self.has_failed() && self.has_changed_names() {
            let synced = self.disk.sync_directory();
            self.latch_sync_error(synced.map_err(|error| SyncError { file: None, error }));
        }
        self.names = NameChanges::default();
    }

    /// Returns whether a name has changed since the last sync of names was begun.
    pub fn has_changed_names(&self) -> bool {
        self.names.has_changes
    }

    /// Returns whether all removals survive a power cut.
    pub fn has_synced_removals(&self) -> bool {
        !self.names.has_removals && !self.names.has_removals_in_background
    }

    /// Hands over the changes to a remote disk.
    pub fn hand_over(&mut self) {
        if !self.has_failed() {
            self.disk.hand_over();
        }
    }

    /// Returns how far a remote disk is with the changes.
    pub fn progress(&self) -> Option<Progress> {
        self.disk.progress()
    }

    /// Returns whether puts are refused for want of space.
    pub fn refuses_puts(&self) -> bool {
        self.disk.refuses_puts()
    }

    /// Returns the numbers of a remote disk.
    pub fn remote_stats(&self) -> Option<RemoteStats> {
        self.disk.remote_stats()
    }

    /// Returns the disk, for calls whose errors are not final.
    pub fn raw(&mut self) -> &mut dyn Disk {
        &mut *self.disk
    }

    /// Returns how long syncs of files took.
    pub fn sync_times(&self) -> Histogram {
        self.disk.sync_times()
    }
}
