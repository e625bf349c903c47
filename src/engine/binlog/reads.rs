//! Reads full records back from the files, for bodies that are not in memory.
//!
//! A read does not stop the loop: a short record that the system has in memory is read at once, and the
//! disk reads the others meanwhile ([`Disk::begin_read`](super::disk::Disk::begin_read)). It does not
//! decide which record is read next.

use super::Binlog;
use super::disk::FileNumber;
use super::files::FAR_OFFSET;
use super::record::{self, Layout};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, Owner};
use std::fmt;
use std::io;

/// The place of a full record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub file: FileNumber,
    /// Its offset in the file in bytes.
    pub offset: u32,
    /// Its length in bytes.
    pub len: u32,
    /// The length of the body at its end, with CR LF, in bytes.
    pub body_len: u32,
    pub layout: Layout,
}

/// A record that is to be read.
#[derive(Clone, Copy, Debug)]
pub struct RecordRead {
    /// Where it is.
    pub place: Place,
    /// The id of its job.
    pub id: u64,
}

impl RecordRead {
    /// Checks that `bytes` are the intact record. A disk that reads on a thread calls this there: the checksum
    /// of a large body takes milliseconds.
    pub fn verify(&self, bytes: &[u8]) -> io::Result<()> {
        match record::body_of(bytes, self.place.layout, self.id) {
            Ok(_) => Ok(()),
            Err(corruption) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, corruption.to_string()))
            }
        }
    }
}

impl Binlog {
    /// Returns the place of the full record of a job, or `None` if it is too far from the start of its
    /// file. The body has `body_len` bytes with the CR LF.
    pub fn place(&self, key: JobKey, tube: &str, body_len: u32) -> Option<Place> {
        if !self.has_place(key) {
            return None;
        }
        let entry = self.files.entry(Owner::Job(key));
        let layout = self.files.list[self.files.find_file(entry.file())?].layout;
        let head_len = u32::try_from(layout.head_len(tube)).expect("a head is short");
        let (file, offset) = (entry.file(), entry.offset);
        Some(Place { file, offset, len: head_len + body_len, body_len, layout })
    }

    /// Returns whether the place of the full record of a job is known.
    pub fn has_place(&self, key: JobKey) -> bool {
        self.files.entry(Owner::Job(key)).offset != FAR_OFFSET
    }

    /// Returns a record if that needs no waiting for the disk, and otherwise `None`. It is not verified.
    pub fn read_now(&mut self, place: Place) -> io::Result<Option<Vec<u8>>> {
        if let Some(unwritten) = self.unwritten(place.file, place.offset.into(), place.len) {
            let mut bytes = place.zeros()?;
            bytes.copy_from_slice(unwritten);
            return Ok(Some(bytes));
        }
        if place.len as usize > self.policy.limits.read_at_once_bytes {
            return Ok(None);
        }
        let mut bytes = place.zeros()?;
        let is_read = self.disk.read_now(place.file, place.offset.into(), &mut bytes)?;
        Ok(is_read.then_some(bytes))
    }

    /// Returns a record, and waits for the disk. It is not verified.
    pub fn read_and_wait(&mut self, place: Place) -> io::Result<Vec<u8>> {
        if let Some(bytes) = self.read_now(place)? {
            return Ok(bytes);
        }
        let mut bytes = place.zeros()?;
        let count = self.disk.read(place.file, place.offset.into(), &mut bytes)?;
        if count < bytes.len() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(bytes) }
    }

    /// Asks the disk for a record that is probably wanted soon.
    pub fn read_ahead(&mut self, place: Place) {
        self.disk.will_read(place.file, place.offset.into(), place.len);
    }
}

impl Place {
    /// Returns as many zeros as the record has bytes.
    pub fn zeros(&self) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        headroom::leave(Headroom::Quarter, || bytes.try_reserve_exact(self.len as usize))
            .map_err(|_| io::ErrorKind::OutOfMemory)?;
        bytes.resize(self.len as usize, 0);
        Ok(bytes)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "binlog.{}:{}", self.file, self.offset)
    }
}
