//! The disk as the binlog sees it: files with numbers, and the few operations on them.
//!
//! `os/disk.rs` implements it for a directory, `os/etcd` for a cluster. The tests have
//! implementations that tear writes, fail and fill up. An implementation continues short writes and
//! repeats interrupted calls, so that an error is final.
//!
//! A remote disk only gathers changes. A sync stores all that were made before it, in their order and in the
//! background. After a crash the first changes up to some moment are stored, and those of all syncs that
//! have ended are among them.

use super::error::BinlogError;
use super::reads::RecordRead;
use crate::engine::collections::histogram::Histogram;
use crate::engine::time::Nanos;
use std::io;

/// The number N of a file `binlog.N`.
pub type FileNumber = u32;

/// The largest file number that C beanstalkd reads.
pub const LAST_NUMBER: FileNumber = i32::MAX as FileNumber;

/// The numbers of a remote disk, for metrics.
#[derive(Clone, Debug)]
pub struct RemoteStats {
    /// The time until the server may not answer any more, unless its lease is renewed.
    pub lease_left: Nanos,
    /// The durations of transactions.
    pub transactions: Histogram,
}

/// A directory of files `binlog.N`.
pub trait Disk {
    /// Returns the numbers of all files, in ascending order.
    fn list(&mut self) -> io::Result<Vec<FileNumber>>;

    /// Returns the size of the file in bytes.
    fn size(&mut self, number: FileNumber) -> io::Result<u64>;

    /// Reads from `offset` on into `bytes`. Returns the number of bytes, which is less than the
    /// length of `bytes` only at the end of the file. The error is [`io::ErrorKind::InvalidData`] if the disk
    /// has lost these bytes: after any other one they may still be there. That is so for each read.
    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;

    /// Fills `bytes` from `offset` on if that needs no waiting for the disk. Returns whether it did.
    fn read_now(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
        let is_whole = self.read(number, offset, bytes)? == bytes.len();
        if is_whole { Ok(true) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Returns how many bytes more fit on the disk, if that is known.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Begins to read a record, and to verify it with [`RecordRead::verify`]. [`Disk::finished_read`] returns
    /// it later.
    fn begin_read(&mut self, read: RecordRead) {
        unreachable!("{read} was not read at once")
    }

    /// Returns the record of the oldest read that was begun, once, or `None` before its end. Reads end in
    /// the order in which they were begun.
    fn finished_read(&mut self) -> Option<io::Result<Vec<u8>>> {
        None
    }

    /// Announces that a record is probably read soon. It promises nothing and cannot fail.
    fn will_read(&mut self, _read: RecordRead) {}

    /// Creates a file of `size` zero bytes, whose space is allocated. After an error there is no
    /// such file.
    fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()>;

    /// Lengthens a file to `size` bytes, whose space is allocated. An error leaves the file
    /// unchanged.
    fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`. After an error some of them may be written.
    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes the creation, renaming and removal of files survive a power cut if `with_names`, and then
    /// everything that was written to these files. With `in_background` it may be done later, if the disk can do
    /// that. No other sync may begin before [`Disk::finished_sync`] has returned the result. On a remote disk it
    /// is of all changes, and always done later.
    fn begin_sync(&mut self, _files: &[FileNumber], _with_names: bool, _in_background: bool) {}

    /// Returns the result of [`Disk::begin_sync`], once, or `None` before its end. Waits for the end if it
    /// `must_wait`.
    fn finished_sync(&mut self, _must_wait: bool) -> Option<Result<(), BinlogError>> {
        Some(Ok(()))
    }

    /// Returns the duration of each sync. It is empty unless the implementation measures
    /// them.
    fn sync_times(&self) -> Histogram {
        Histogram::default()
    }

    /// Shortens the file to `size` bytes. An error leaves it unchanged.
    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()>;

    /// Closes the file, which will not be written any more.
    fn close(&mut self, number: FileNumber);

    /// Removes the file, if it exists. Its space may be freed later, by [`Disk::truncate_step`] or
    /// when it is needed. After an error the file still exists.
    fn remove(&mut self, number: FileNumber) -> io::Result<()>;

    /// Frees some of the space of removed files, because freeing all of it at once takes long.
    /// Returns whether more is to be freed by the next call, which nothing else will cause.
    fn truncate_step(&mut self) -> bool {
        false
    }

    /// Renames the file and returns its new name, which [`Disk::list`] ignores. After an error the
    /// file still has its number.
    fn quarantine(&mut self, number: FileNumber) -> io::Result<String>;

    /// Returns whether the disk is remote.
    fn is_remote(&self) -> bool {
        false
    }

    /// Notes how many bytes of deletes are to come. A remote disk, on which no file has space ahead, keeps them free.
    fn note_deletes(&mut self, _len: u64) {}

    /// Returns whether the disk has no space for more than what was made, so that puts are refused.
    fn refuses_puts(&self) -> bool {
        false
    }

    /// Returns whether it has none for moves either, which free space only later.
    fn refuses_moves(&self) -> bool {
        false
    }

    /// Returns how many bytes a remote disk has stored.
    fn stored_bytes(&self) -> u64 {
        0
    }

    /// Returns the numbers of a remote disk.
    fn remote_stats(&self) -> Option<RemoteStats> {
        None
    }
}
