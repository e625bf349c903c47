//! Reads full records back from the files, for bodies that are not in memory.
//!
//! A read does not stop the loop: a short record that the system has in memory is read at once, and the
//! disk reads the others meanwhile ([`Disk::begin_read`](super::disk::Disk::begin_read)). It does not
//! decide which record is read next.

use super::Binlog;
use super::disk::FileNumber;
use super::record::{self, Layout};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::JobKey;
use std::fmt;
use std::io;

/// A full record that is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordRead {
    /// The id of its job.
    pub id: u64,
    /// Its file.
    pub file: FileNumber,
    /// Its offset in the file in bytes.
    pub offset: u32,
    /// Its length in bytes.
    pub len: u32,
    /// The length of the body at its end, with CR LF, in bytes.
    pub body_len: u32,
    layout: Layout,
}

impl RecordRead {
    /// Returns `bytes` if they are the intact record. A disk that reads on a thread calls this there: the
    /// checksum of a large body takes milliseconds.
    pub fn verify(&self, bytes: Vec<u8>) -> io::Result<Vec<u8>> {
        match record::body_of(&bytes, self.layout, self.id) {
            Ok(_) => Ok(bytes),
            Err(damage) => Err(io::Error::new(io::ErrorKind::InvalidData, damage.to_string())),
        }
    }

    /// Returns as many zeros as the record has bytes.
    pub fn zeros(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        headroom::keeping(Headroom::Quarter, || bytes.try_reserve_exact(self.len as usize))
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        bytes.resize(self.len as usize, 0);
        Ok(bytes)
    }
}

impl Binlog {
    /// Returns the full record of a job. The body has `body_len` bytes with the CR LF.
    pub fn record_of(&self, key: JobKey, id: u64, tube: &str, body_len: u32) -> RecordRead {
        let entry = self.files.entry(key);
        let (file, offset) = (entry.file(), entry.offset);
        let index = self.files.find_file(file).expect("the file of a job is there");
        let layout = self.files.list[index].layout;
        let head_len = u32::try_from(layout.head_len(tube)).expect("a head is short");
        RecordRead { id, file, offset, len: head_len + body_len, body_len, layout }
    }

    /// Returns a record if that needs no waiting for the disk, and otherwise `None`.
    pub fn read_now(&mut self, read: RecordRead) -> io::Result<Option<Vec<u8>>> {
        let RecordRead { file, offset, len, .. } = read;
        if let Some(unwritten) = self.unwritten(file, offset.into(), len) {
            let mut bytes = read.zeros()?;
            bytes.copy_from_slice(unwritten);
            return Ok(Some(bytes));
        }
        if len as usize > self.limits.read_at_once_bytes {
            return Ok(None);
        }
        let mut bytes = read.zeros()?;
        let is_read = self.disk.read_now(file, offset.into(), &mut bytes)?;
        is_read.then(|| read.verify(bytes)).transpose()
    }

    /// Returns a record, and waits for the disk.
    pub fn read_and_wait(&mut self, read: RecordRead) -> io::Result<Vec<u8>> {
        if let Some(bytes) = self.read_now(read)? {
            return Ok(bytes);
        }
        let mut bytes = read.zeros()?;
        let count = self.disk.read(read.file, read.offset.into(), &mut bytes)?;
        bytes.truncate(count);
        read.verify(bytes)
    }
}

impl fmt::Display for RecordRead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "binlog.{}:{}", self.file, self.offset)
    }
}
