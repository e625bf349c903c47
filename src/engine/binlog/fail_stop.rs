//! A disk that stops at its first error.
//!
//! A kernel reports a failed write or sync once, and a later sync may succeed although data is
//! lost. So the first error of a write, sync or truncation is kept: after it nothing is created,
//! written, synced or truncated, and [`FailStopDisk::status`] returns the error.

use super::IoFailed;
use super::disk::{Disk, FileNumber, Progress, RemoteStats};
use super::record::VERSION;
use crate::engine::collections::histogram::Histogram;
use std::io;

/// A directory of files in which nothing is changed after the first error.
#[derive(Debug)]
pub struct FailStopDisk {
    disk: Box<dyn Disk>,
    /// `false`: the operator wants no syncs.
    is_synced: bool,
    failure: Option<IoFailed>,
}

impl FailStopDisk {
    /// Returns a disk without an error. Syncs do nothing unless `is_synced`.
    pub fn new(disk: Box<dyn Disk>, is_synced: bool) -> FailStopDisk {
        FailStopDisk { disk, is_synced, failure: None }
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
        self.check_may_grow()?;
        self.disk.create(number, size)?;
        self.write(number, 0, &VERSION);
        self.sync_directory();
        Ok(())
    }

    /// Lengthens a file to `size` bytes. An error is not kept.
    pub fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        self.check_may_grow()?;
        self.disk.extend(number, size)
    }

    fn check_may_grow(&self) -> io::Result<()> {
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

    /// Starts to write bytes to the disk that will be synced later.
    pub fn begin_sync(&mut self, number: FileNumber, offset: u64, len: u64) {
        if !self.has_failed() {
            self.disk.begin_sync(number, offset, len);
        }
    }

    /// Syncs a file.
    pub fn sync(&mut self, number: FileNumber) {
        if self.is_synced && !self.has_failed() {
            let synced = self.disk.sync(number);
            self.latch_error(synced, || format!("cannot sync binlog.{number}"));
        }
    }

    /// Syncs the names of the files.
    pub fn sync_directory(&mut self) {
        if self.is_synced && !self.has_failed() {
            let synced = self.disk.sync_directory();
            self.latch_error(synced, || "cannot sync the directory".to_owned());
        }
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
