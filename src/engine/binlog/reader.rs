//! Reads one file of the binlog from its start to its end, however damaged it is.
//!
//! A [`Reader`] returns the intact records and the damaged places. After a damaged record it
//! continues with the next intact one. It finds that by the length of the damaged one, or else by
//! trying every byte. [`history`](super::history) decides what the records mean together. The
//! reader changes nothing.
//!
//! It keeps one window of the file in memory, as large as the longest record so far. No bytes make
//! it loop or panic.

use super::disk::{Disk, FileNumber};
use super::error::{BinlogError, Corruption};
use super::record::{self, Content, FILE_HEAD_LEN, FileEnd, FileHeader, Head, Layout, VERSION_LEN};
use crate::engine::headroom::{self, Headroom};
use crate::engine::time::Nanos;
use std::io;
use std::ops::Range;

/// A file that is being read.
pub struct Reader<'d> {
    disk: &'d mut dyn Disk,
    number: FileNumber,
    /// In bytes.
    pub size: u64,
    pub layout: Layout,
    /// The last id that was given out before the file was created, or 0 if it is unknown.
    pub last_id: u64,
    /// What the file header record has about the file before.
    pub before: FileEnd,
    /// The nonce of the file header record. If that is damaged, the nonce of the first record, if
    /// that is intact.
    pub nonce: Option<u32>,
    /// The offset of the next record.
    offset: u64,
    /// Damage at the head that was not returned yet.
    head_damage: Option<Damage>,
    /// A piece of the file, and its offset.
    window: Vec<u8>,
    window_at: u64,
    /// The number of bytes that may still be tried in search of the next intact record.
    search_left: u64,
}

/// A part of a file.
pub enum Item<'s> {
    /// An intact record.
    Record(Record<'s>),
    /// Bytes that are no record.
    Damage(Damage),
    /// There are no more records. The last intact one ends at the offset `used`. `tail` is what a crash may
    /// have left of a record behind it.
    End { used: u64, tail: Option<Damage> },
}

/// An intact record.
#[derive(Clone, Copy, Debug)]
pub struct Record<'s> {
    /// Its offset in the file in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    pub content: Content,
    /// The name of the tube; empty in a short record.
    pub tube: &'s str,
    /// The body; empty in a short record, and in that of a delete.
    pub body: &'s [u8],
}

/// Bytes that should be a record and are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Their offset in the file in bytes.
    pub offset: u64,
    /// Their number.
    pub len: u64,
    /// The kind of damage at the first of them.
    pub cause: Corruption,
    /// The id in the record. It may be wrong too.
    pub id: Option<u64>,
    /// The record seems to be a full one.
    pub is_full: bool,
}

/// Bytes that are no intact record, before their number is known, and the end of the record, if its length is
/// plausible. Only those whose cause is [`Corruption::ZEROS`] may be free space.
type Broken = (Damage, Option<u64>);

/// Versions that a newer server may write. A version 7 with one flipped bit is none of them.
const NEWER_VERSIONS: Range<i32> = 8..15;
const WINDOW_LEN: usize = 64 * 1024;
/// At most this many bytes are tried per byte of the file. A file of heads of huge records would
/// otherwise be searched for hours.
const SEARCH_PER_BYTE: u64 = 16;
/// A disk writes at least this many bytes at once.
const SECTOR: u64 = 512;
/// A short record begins with at most this many zeros.
const ZEROS_BEFORE_ID: u64 = 16;
/// In a file without checksums, a record found by trying every byte must be that of a job from this year or later,
/// with a body and not too high an id, or it is no record: the end of one record and the beginning of the next one
/// often look like one too.
const YEAR_2000: Nanos = Nanos::from_secs(946_684_800);
const HIGHEST_LIKELY_ID: u64 = 1 << 48;

impl<'d> Reader<'d> {
    /// Opens a file and reads its head.
    pub fn open(disk: &'d mut dyn Disk, number: FileNumber) -> Result<Reader<'d>, BinlogError> {
        let size = disk.size(number).map_err(|error| BinlogError::of_read(number, error))?;
        let mut reader = Reader {
            disk,
            number,
            size,
            layout: Layout::V7_WITH_CRC,
            last_id: 0,
            before: (0, 0),
            nonce: None,
            offset: 0,
            head_damage: None,
            window: Vec::new(),
            window_at: 0,
            search_left: size.saturating_mul(SEARCH_PER_BYTE).max(WINDOW_LEN as u64),
        };
        reader.read_head()?;
        Ok(reader)
    }

    fn read_head(&mut self) -> Result<(), BinlogError> {
        let head = self.bytes_at(0, FILE_HEAD_LEN)?;
        let Some((&version, rest)) = head.split_first_chunk::<VERSION_LEN>() else {
            self.layout = Layout::V7;
            return Ok(());
        };
        let header = FileHeader::read(rest);
        let number = i32::from_ne_bytes(version);
        let (version_end, header_end) = (VERSION_LEN as u64, FILE_HEAD_LEN as u64);
        let unknown = Corruption::Version(number);
        let ours = Layout::V7_WITH_CRC;
        let known = [Layout::V5, Layout::V7].into_iter().find(|layout| layout.version == number);
        let (layout, offset, damage) = match (header, known) {
            // Only files of this server have a file header record, so the version is damaged.
            (FileHeader::Intact { .. } | FileHeader::Damaged, _) if version != record::VERSION => {
                (ours, header_end, Some((0, version_end, unknown)))
            }
            // In a file of an early server it is 0.
            (FileHeader::Intact { number, .. }, _) if ![0, self.number].contains(&number) => {
                (ours, header_end, Some((version_end, header_end, Corruption::Number(number))))
            }
            (FileHeader::Intact { .. }, _) => (ours, header_end, None),
            (FileHeader::Damaged, _) => {
                (ours, header_end, Some((version_end, header_end, Corruption::FILE_HEADER)))
            }
            (FileHeader::Blank, Some(Layout::V7)) => (ours, version_end, None),
            (FileHeader::Blank | FileHeader::None, Some(layout)) => (layout, version_end, None),
            // The file is empty, or its first sector is lost. A record with a matching checksum
            // is intact nevertheless.
            (FileHeader::Blank | FileHeader::None, None) if number == 0 => (ours, 0, None),
            (FileHeader::Blank | FileHeader::None, None) if NEWER_VERSIONS.contains(&number) => {
                let why =
                    format!("it has version {number}, and this server reads versions 5 and 7");
                let error = io::Error::new(io::ErrorKind::Unsupported, why);
                return Err(BinlogError::of_read(self.number, error));
            }
            (FileHeader::Blank | FileHeader::None, None) => {
                (Layout::V7, self.size, Some((0, self.size, unknown)))
            }
        };
        (self.layout, self.offset) = (layout, offset);
        self.head_damage = damage.map(|(offset, end, cause)| {
            let len = end - offset;
            Damage { offset, len, cause, id: None, is_full: false }
        });
        if let FileHeader::Intact { number, last_id, before, nonce } = header {
            (self.last_id, self.nonce) = (last_id, Some(nonce));
            // A file under another number does not know the one before it.
            self.before = if number == self.number { before } else { (0, 0) };
        }
        Ok(())
    }

    /// Returns the next part of the file. After the end it returns the end again.
    pub fn next_item(&mut self) -> Result<Item<'_>, BinlogError> {
        if let Some(damage) = self.head_damage.take() {
            return Ok(Item::Damage(damage));
        }
        let offset = self.offset;
        let (mut damage, next) = match self.parse(offset)? {
            Ok(head) => {
                self.offset += head.record_len();
                return Ok(Item::Record(self.record(offset, head)));
            }
            Err(broken) => broken,
        };
        let search_from = if damage.cause == Corruption::ZEROS {
            match self.end_of_zeros(offset)? {
                Some(at) => at,
                None => return Ok(Item::End { used: offset, tail: None }),
            }
        } else {
            self.search_start(offset, next)?
        };
        let found = self.search(search_from)?;
        damage.len = found.unwrap_or(self.size) - offset;
        match found {
            Some(next) => self.offset = next,
            None if damage.cause == Corruption::CUT_SHORT || self.is_unwritten(offset, next)? => {
                return Ok(Item::End { used: offset, tail: Some(damage) });
            }
            // It was written whole, and was damaged later.
            None => self.offset = self.size,
        }
        Ok(Item::Damage(damage))
    }

    /// Returns whether a sector of the record at `offset` was never written, so that it has only zeros. The
    /// record ends at `next`, if that is known.
    fn is_unwritten(&mut self, offset: u64, next: Option<u64>) -> Result<bool, BinlogError> {
        // A remote disk stores a batch up to some byte, or with all that follow.
        if self.disk.is_remote() {
            return Ok(false);
        }
        let mut from = offset;
        let end = next.unwrap_or(offset + Layout::LONGEST_HEAD as u64).min(self.size);
        while from < end {
            let len = usize::try_from(SECTOR - from % SECTOR).expect("a sector is short");
            if self.bytes_at(from, len)?.iter().all(|&byte| byte == 0) {
                return Ok(true);
            }
            from += len as u64;
        }
        Ok(false)
    }

    /// Returns the offset from which to search the next intact record, after a damaged one at
    /// `offset` that ends at `next` by its own length.
    fn search_start(&mut self, offset: u64, next: Option<u64>) -> Result<u64, BinlogError> {
        // Its length may be damaged. Bytes of its body cannot be mistaken for a record if the nonce
        // of the file is known. In other files a client may have put a record into a body.
        let Some(next) = next.filter(|_| self.nonce.is_none()) else { return Ok(offset + 1) };
        Ok(match self.parse(next)? {
            // Only the body or a field is damaged, and the next record is in its place.
            Ok(_) => next,
            Err((Damage { cause: Corruption::ZEROS, .. }, _)) => {
                self.end_of_zeros(next)?.unwrap_or(self.size)
            }
            Err(_) => offset + 1,
        })
    }

    /// Parses the record at `offset`.
    fn parse(&mut self, offset: u64) -> Result<Result<Head, Broken>, BinlogError> {
        let (layout, size) = (self.layout, self.size);
        let bytes = self.bytes_at(offset, Layout::LONGEST_HEAD)?;
        let head = match layout.read(bytes) {
            Ok(head) => head,
            Err(cause) => {
                // The file may end in fewer zeros than a record has bytes.
                let is_cut = cause == Corruption::CUT_SHORT;
                let is_blank = is_cut && bytes.iter().all(|&byte| byte == 0);
                let cause = if is_blank { Corruption::ZEROS } else { cause };
                return Ok(Err((Damage { offset, len: 0, cause, id: None, is_full: false }, None)));
            }
        };
        let end = offset + head.record_len();
        let next = (end <= size).then_some(end);
        let (id, is_full) = (Some(head.id), head.tube_len > 0);
        let broken = |cause| (Damage { offset, len: 0, cause, id, is_full }, next);
        if next.is_none() {
            return Ok(Err(broken(Corruption::CUT_SHORT)));
        }
        let record = self.bytes_at(offset, head.len + head.body_len)?;
        // The file may have been truncated since it was opened.
        if record.len() < head.len + head.body_len {
            return Ok(Err(broken(Corruption::BODY_END)));
        }
        let mut checked = layout.verify(record, head.len);
        if layout.has_checksums && self.nonce.is_some_and(|of_file| of_file != head.nonce) {
            checked = checked.and(Err(Corruption::CHECKSUM));
        }
        // A record at this offset was written by a server, and is no part of a body.
        if checked.is_ok() && layout.has_checksums && offset == FILE_HEAD_LEN as u64 {
            self.nonce = Some(head.nonce);
        }
        Ok(checked.map(|()| head).map_err(broken))
    }

    /// Returns the record that was parsed last.
    fn record(&self, offset: u64, head: Head) -> Record<'_> {
        let Head { content, tube_len, len, body_len, .. } = head;
        let start = usize::try_from(offset - self.window_at).expect("it is in the window");
        let (head, body) = self.window[start..start + len + body_len].split_at(len);
        let (tube, len) = (self.layout.tube(head, tube_len), (len + body_len) as u64);
        Record { offset, len, content, tube, body }
    }

    /// Returns the offset of the next intact record, from `offset` on.
    fn search(&mut self, mut offset: u64) -> Result<Option<u64>, BinlogError> {
        while offset < self.size && self.search_left > 0 {
            self.search_left -= 1;
            let layout = self.layout;
            let bytes = self.bytes_at(offset, Layout::LONGEST_HEAD)?;
            let is_likely = match layout.read(bytes) {
                // A client may have put any number of heads into a body.
                Ok(Head { nonce, .. }) if layout.has_checksums => {
                    self.nonce.is_none_or(|of_file| of_file == nonce)
                }
                Ok(Head { content: Content::Job(job), id, body_len, .. }) => {
                    body_len > 0 && id <= HIGHEST_LIKELY_ID && job.created_at >= YEAR_2000
                }
                Err(Corruption::ZEROS) => match self.end_of_zeros(offset)? {
                    Some(at) if at > offset => {
                        offset = at;
                        continue;
                    }
                    Some(_) => false,
                    None => return Ok(None),
                },
                Ok(_) | Err(_) => false,
            };
            if is_likely {
                match self.parse(offset)? {
                    Ok(_) => return Ok(Some(offset)),
                    Err((_, next)) => {
                        let tried = next.map_or(0, |next| next - offset);
                        self.search_left = self.search_left.saturating_sub(tried);
                    }
                }
            }
            offset += 1;
        }
        Ok(None)
    }

    /// Returns the offset at which a record may begin after the zeros from `offset` on, or `None` if
    /// the rest of the file is zeros.
    fn end_of_zeros(&mut self, offset: u64) -> Result<Option<u64>, BinlogError> {
        let mut at = offset;
        loop {
            let bytes = self.bytes_at(at, WINDOW_LEN)?;
            if bytes.is_empty() {
                return Ok(None);
            }
            if let Some(index) = bytes.iter().position(|&byte| byte != 0) {
                return Ok(Some((at + index as u64).saturating_sub(ZEROS_BEFORE_ID).max(offset)));
            }
            at += bytes.len() as u64;
        }
    }

    /// Returns `len` bytes from `offset` on, or fewer at the end of the file.
    fn bytes_at(&mut self, offset: u64, len: usize) -> Result<&[u8], BinlogError> {
        let file = self.number;
        let len = len.min(usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX));
        let start = usize::try_from(offset.wrapping_sub(self.window_at)).unwrap_or(usize::MAX);
        let is_there = start.checked_add(len).is_some_and(|end| end <= self.window.len());
        if is_there {
            return Ok(&self.window[start..start + len]);
        }
        let window_len = len.max(WINDOW_LEN);
        let missing = window_len.saturating_sub(self.window.len());
        headroom::keeping(Headroom::Quarter, || self.window.try_reserve_exact(missing))
            .map_err(|error| BinlogError::of_read(file, io::Error::from(error)))?;
        self.window.resize(window_len, 0);
        let read = self.disk.read(file, offset, &mut self.window);
        let read = read.map_err(|error| BinlogError::of_read(file, error))?;
        self.window.truncate(read);
        self.window_at = offset;
        Ok(&self.window[..len.min(read)])
    }
}
