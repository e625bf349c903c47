//! Reads full records back from the files, for bodies that are not in memory.
//!
//! A read does not stop the loop: what the system has in memory is read at once, and the disk reads
//! the rest meanwhile ([`Disk::begin_read`](super::disk::Disk::begin_read)). The caller checks the
//! bytes with [`record::body_of`](super::record::body_of).

use super::Binlog;
use super::disk::{FileNumber, FinishedRead, ReadToken};
use super::record::Layout;
use super::segments::FAR_OFFSET;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::LogKey;
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
    pub layout: Layout,
}

/// Bytes that the disk is asked to read early are asked for in blocks of this length.
const BLOCK_BITS: u32 = 18;
/// The most blocks that are asked for before they are wanted: 2 MiB.
const BLOCKS_AHEAD: u32 = 8;
/// The number of places that are read at the same time for which this works.
const STREAMS: usize = 32;

/// The parts of files that were read, or asked for, last.
#[derive(Debug, Default)]
pub struct ReadAhead {
    streams: Vec<Stream>,
    /// The stream that is replaced next.
    oldest: usize,
}

/// Reads of one file from some place on.
#[derive(Clone, Copy, Debug)]
struct Stream {
    file: FileNumber,
    /// The first block that was not asked for.
    end: u32,
    /// A read was followed by one of the next block.
    is_sequential: bool,
}

impl Binlog {
    /// Returns the place of the full record of a job, or `None` if it is too far from the start of its
    /// file. The body has `body_len` bytes with the CR LF.
    pub fn place(&self, key: LogKey, tube: &str, body_len: u32) -> Option<Place> {
        if !self.has_place(key) {
            return None;
        }
        let entry = self.segments().entry(key);
        let layout = self.segments().layout_of(entry.file());
        let head_len = u32::try_from(layout.head_len(tube)).expect("a head is short");
        let (file, offset) = (entry.file(), entry.offset());
        Some(Place { file, offset, len: head_len + body_len, layout })
    }

    /// Returns whether the place of the full record of a job is known.
    pub fn has_place(&self, key: LogKey) -> bool {
        self.segments().entry(key).offset() != FAR_OFFSET
    }

    /// Reads a record into `bytes` if that needs no waiting for the disk. Returns whether it did.
    pub fn read_now(&mut self, place: Place, bytes: &mut Vec<u8>) -> io::Result<bool> {
        if let Some(unwritten) = self.writer.unwritten(place.file, place.offset.into(), place.len) {
            bytes.clear();
            headroom::leave(Headroom::Quarter, || bytes.try_reserve(unwritten.len()))
                .map_err(|_| io::ErrorKind::OutOfMemory)?;
            bytes.extend_from_slice(unwritten);
            return Ok(true);
        }
        if place.len as usize > self.writer.files().limits().read_at_once_bytes {
            return Ok(false);
        }
        make_room(bytes, place.len)?;
        self.writer.files_mut().disk_mut().raw().read_now(place.file, place.offset.into(), bytes)
    }

    /// Reads a record into `bytes`, and waits for the disk.
    pub fn read_and_wait(&mut self, place: Place, bytes: &mut Vec<u8>) -> io::Result<()> {
        if self.read_now(place, bytes)? {
            return Ok(());
        }
        make_room(bytes, place.len)?;
        let disk = self.writer.files_mut().disk_mut().raw();
        let count = disk.read(place.file, place.offset.into(), bytes)?;
        if count < bytes.len() { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(()) }
    }

    /// Begins to read a record. [`Binlog::finished_read`] returns it later, with this token.
    pub fn begin_read(&mut self, token: ReadToken, place: Place) {
        let Place { file, offset, len, .. } = place;
        self.writer.files_mut().disk_mut().raw().begin_read(token, file, offset.into(), len);
    }

    /// Returns a record that was read, once.
    pub fn finished_read(&mut self) -> Option<FinishedRead> {
        self.writer.files_mut().disk_mut().raw().finished_read()
    }

    /// Asks the disk for what is probably wanted soon: this record, and if earlier ones came before
    /// it in its file, what comes after it.
    pub fn read_ahead(&mut self, place: Place) {
        let Some((offset, len)) = self.read_ahead.want(place) else { return };
        self.writer.files_mut().disk_mut().raw().will_read(place.file, offset, len);
    }
}

/// Makes `bytes` as long as a record.
fn make_room(bytes: &mut Vec<u8>, len: u32) -> io::Result<()> {
    let len = len as usize;
    let missing = len.saturating_sub(bytes.len());
    headroom::leave(Headroom::Quarter, || bytes.try_reserve_exact(missing))
        .map_err(|_| io::ErrorKind::OutOfMemory)?;
    bytes.resize(len, 0);
    Ok(())
}

impl ReadAhead {
    /// Notes that a record is wanted soon. Returns the offset and the length of what to ask for.
    fn want(&mut self, place: Place) -> Option<(u64, u64)> {
        let block = place.offset >> BLOCK_BITS;
        let stream = self.streams.iter_mut().find(|stream| {
            stream.file == place.file
                && (stream.end.saturating_sub(2 * BLOCKS_AHEAD)..stream.end + 2).contains(&block)
        });
        let Some(stream) = stream else {
            self.begin_stream(Stream { file: place.file, end: block + 1, is_sequential: false });
            return Some((place.offset.into(), place.len.into()));
        };
        stream.is_sequential |= block >= stream.end;
        let end = block + BLOCKS_AHEAD;
        if !stream.is_sequential || stream.end + BLOCKS_AHEAD / 2 > end {
            return None;
        }
        let begin = std::mem::replace(&mut stream.end, end).max(block);
        Some((u64::from(begin) << BLOCK_BITS, u64::from(end - begin) << BLOCK_BITS))
    }

    fn begin_stream(&mut self, stream: Stream) {
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
        } else {
            self.streams[self.oldest] = stream;
            self.oldest = (self.oldest + 1) % STREAMS;
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "binlog.{}:{}", self.file, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK: u32 = 1 << BLOCK_BITS;

    fn place(file: FileNumber, offset: u32) -> Place {
        Place { file, offset, len: 100, layout: Layout::V7WithCrc }
    }

    #[test]
    fn what_follows_is_asked_for_only_when_reads_are_sequential() {
        let mut ahead = ReadAhead::default();
        assert_eq!(ahead.want(place(1, 10)), Some((10, 100)));
        assert_eq!(ahead.want(place(1, 200)), None, "the system reads more than one record");
        let block = u64::from(BLOCK);
        assert_eq!(ahead.want(place(1, BLOCK)), Some((block, 8 * block)));
        assert_eq!(ahead.want(place(1, 4 * BLOCK)), None, "most of it is still ahead");
        assert_eq!(ahead.want(place(1, 5 * BLOCK)), Some((9 * block, 4 * block)));
        assert_eq!(ahead.want(place(2, 5 * BLOCK)), Some((5 * block, 100)), "another file");
    }

    #[test]
    fn records_at_random_places_are_asked_for_alone() {
        let mut ahead = ReadAhead::default();
        for round in 0..3 {
            for number in 0..1000 {
                let offset = number * 37 % 1000 * 4 * BLOCK + round;
                let asked = ahead.want(place(1, offset));
                assert!(asked.is_none_or(|asked| asked == (offset.into(), 100)), "{asked:?}");
            }
        }
        assert_eq!(ahead.streams.len(), STREAMS);
    }
}
