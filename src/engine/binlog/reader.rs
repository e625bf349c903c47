//! Reads one file of the binlog from its start to its end, however damaged it is.
//!
//! A [`Reader`] returns the intact records and the damaged places. After a damaged record it
//! continues with the next intact one. It finds that by the length of the damaged one, or else by
//! trying every byte. `queue/replay.rs` and `inspect.rs` decide what the records mean together. The
//! reader changes nothing.
//!
//! It keeps one window of the file in memory, as large as the longest record so far. No bytes make
//! it loop or panic.

use super::disk::{Disk, FileNumber};
use super::gaps::Gap;
use super::key_record::{self, KeyRecord};
use super::record::{
    self, DecodeError, FILE_HEAD_LEN, Fields, FileHeader, FlushKind, Head, Layout, VERSION_LEN,
};
use crate::engine::headroom::{self, Headroom};
use crate::engine::text::CR_LF;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::fmt;
use std::io;

/// A file that is being read.
#[derive(Debug)]
pub struct Reader<'d> {
    disk: &'d mut dyn Disk,
    number: FileNumber,
    size: u64,
    layout: Layout,
    /// The last id in the file header record, or 0.
    last_id: u64,
    /// The nonce of the file header record. If that is damaged, the nonce of the first record, if
    /// that is intact.
    nonce: Option<u32>,
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
#[derive(Debug)]
pub enum Item<'s> {
    /// An intact record.
    Record(Record<'s>),
    /// Bytes that are no record.
    Damage(Damage),
    /// There are no more records.
    End(End),
}

/// An intact record.
#[derive(Debug)]
pub struct Record<'s> {
    /// Its offset in the file in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The fields of the job.
    pub fields: Fields,
    /// The kind of flush, if this is the record of a flush of the tube. Then the fields are of no job.
    pub flush: Option<FlushKind>,
    /// The key, if this is the record of the key of a job. Then the fields are of no job.
    pub key: Option<KeyRecord>,
    /// The numbers of removed files, if this is the record of a gap. Then the fields are of no job.
    pub gap: Option<Gap>,
    /// The tube of the job, in a full record.
    pub tube: Option<&'s str>,
    /// The body, in a full record of a job that is not deleted.
    pub body: Option<&'s [u8]>,
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
    /// The id of the job in the record. It may be wrong too.
    pub id: Option<u64>,
    /// The record seems to be a full one.
    pub is_full: bool,
}

/// The end of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// The offset of the end of the last intact record in bytes.
    pub used: u64,
    /// The bytes behind it, unless they are zeros.
    pub tail: Option<Damage>,
}

/// Why bytes are no intact record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// The version of the file is unknown.
    Version(i32),
    /// The file header record is damaged.
    FileHeader,
    /// A field is out of range.
    Fields(DecodeError),
    /// The record does not end within the file.
    CutShort,
    /// The bytes are zeros, and other bytes follow.
    Zeros,
    /// The checksum does not match.
    Checksum,
    /// The body does not end in CR LF.
    BodyEnd,
    /// The record is that of another job, or of another length.
    OtherRecord,
}

/// Why a file cannot be read.
#[derive(Debug)]
pub enum ReadError {
    /// The system refuses to read it.
    Io(io::Error),
    /// A body does not fit in memory.
    NoMemory(TryReserveError),
}

/// A record, or the bytes in its place.
enum Parsed {
    Record(Span),
    Blank,
    /// `next` is the end of the record, if its length is plausible.
    Damaged {
        cause: Corruption,
        id: Option<u64>,
        is_full: bool,
        next: Option<u64>,
    },
}

/// An intact record in the window.
#[derive(Clone, Copy)]
struct Span {
    offset: u64,
    fields: Fields,
    tube_len: usize,
    head_len: usize,
    body_len: usize,
}

/// The bytes behind the last intact record of a file. If no record follows in newer files, a crash
/// has left them; otherwise they are damage.
#[derive(Debug, Default)]
pub struct TornTail(Option<(FileNumber, Damage)>);

impl TornTail {
    /// Notes that a file ends in such bytes. Returns bytes that are damage now: those of an older
    /// file, or these, if the file has no intact record.
    pub fn begins(&mut self, number: FileNumber, tail: Damage) -> Option<(FileNumber, Damage)> {
        if tail.offset == 0 {
            return Some((number, tail));
        }
        self.0.replace((number, tail))
    }

    /// Returns the bytes that were noted last. They are damage if a record follows. After the last
    /// file, a crash has left them.
    pub fn take(&mut self) -> Option<(FileNumber, Damage)> {
        self.0.take()
    }
}

const WINDOW_LEN: usize = 64 * 1024;
/// At most this many bytes are tried per byte of the file. A file of heads of huge records would
/// otherwise be searched for hours.
const SEARCH_PER_BYTE: u64 = 16;
/// A short record begins with at most this many zeros.
const ZEROS_BEFORE_ID: u64 = 16;
/// 2000-01-01. In a file without checksums, a record found by trying every byte must be newer than
/// this, or it is no record.
const YEAR_2000: Nanos = Nanos::from_secs(946_684_800);

impl<'d> Reader<'d> {
    /// Opens a file and reads its head.
    pub fn open(disk: &'d mut dyn Disk, number: FileNumber) -> Result<Reader<'d>, ReadError> {
        let size = disk.size(number).map_err(ReadError::Io)?;
        let mut reader = Reader {
            disk,
            number,
            size,
            layout: Layout::V7,
            last_id: 0,
            nonce: None,
            offset: VERSION_LEN as u64,
            head_damage: None,
            window: Vec::new(),
            window_at: 0,
            search_left: size.saturating_mul(SEARCH_PER_BYTE).max(WINDOW_LEN as u64),
        };
        reader.read_head()?;
        Ok(reader)
    }

    fn read_head(&mut self) -> Result<(), ReadError> {
        let head = self.bytes_at(0, FILE_HEAD_LEN)?;
        let Some(&version) = head.first_chunk::<VERSION_LEN>() else {
            self.offset = 0;
            return Ok(());
        };
        let header = FileHeader::read(&head[VERSION_LEN..]);
        let number = i32::from_ne_bytes(version);
        let damage = |offset: usize, end: u64, cause| {
            let (offset, len) = (offset as u64, end - offset as u64);
            Some(Damage { offset, len, cause, id: None, is_full: false })
        };
        let (version_end, header_end) = (VERSION_LEN as u64, FILE_HEAD_LEN as u64);
        let (layout, offset, damage) = match (Layout::of_version(version), header) {
            // Only files of this server have a file header record, so the version is damaged.
            (_, FileHeader::Intact { .. } | FileHeader::Damaged) if version != record::VERSION => {
                let damage = damage(0, version_end, Corruption::Version(number));
                (Layout::V7WithCrc, header_end, damage)
            }
            (_, FileHeader::Intact { .. }) => (Layout::V7WithCrc, header_end, None),
            (_, FileHeader::Damaged) => {
                let damage = damage(VERSION_LEN, header_end, Corruption::FileHeader);
                (Layout::V7WithCrc, header_end, damage)
            }
            (Some(Layout::V7 | Layout::V7WithCrc), FileHeader::Blank) => {
                (Layout::V7WithCrc, version_end, None)
            }
            (Some(layout), FileHeader::Blank | FileHeader::None) => (layout, version_end, None),
            // The file is empty, or its first sector is lost. A record with a matching checksum
            // is intact nevertheless.
            (None, FileHeader::Blank | FileHeader::None) if number == 0 => {
                (Layout::V7WithCrc, 0, None)
            }
            (None, FileHeader::Blank | FileHeader::None) => {
                (Layout::V7, self.size, damage(0, self.size, Corruption::Version(number)))
            }
        };
        self.layout = layout;
        self.offset = offset;
        self.head_damage = damage;
        if let FileHeader::Intact { last_id, nonce } = header {
            self.last_id = last_id;
            self.nonce = Some(nonce);
        }
        Ok(())
    }

    /// Returns the layout of the file.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Returns the size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the nonce of the records, if this server wrote the file.
    pub fn nonce(&self) -> Option<u32> {
        self.nonce
    }

    /// Returns the last id that was given out before the file was created, or 0 if it is unknown.
    pub fn last_id(&self) -> u64 {
        self.last_id
    }

    /// Returns the next part of the file. After the end it returns the end again.
    pub fn next_item(&mut self) -> Result<Item<'_>, ReadError> {
        if let Some(damage) = self.head_damage.take() {
            return Ok(Item::Damage(damage));
        }
        let offset = self.offset;
        let (cause, id, is_full, search_from) = match self.parse(offset)? {
            Parsed::Record(span) => {
                self.offset = span.end();
                return Ok(Item::Record(self.record(span)));
            }
            Parsed::Blank => match self.end_of_zeros(offset)? {
                None => return Ok(Item::End(End { used: offset, tail: None })),
                Some(at) => (Corruption::Zeros, None, false, at),
            },
            Parsed::Damaged { cause, id, is_full, next } => {
                (cause, id, is_full, self.search_start(offset, next)?)
            }
        };
        let found = self.search(search_from)?;
        let len = found.unwrap_or(self.size) - offset;
        let damage = Damage { offset, len, cause, id, is_full };
        match found {
            Some(next) => {
                self.offset = next;
                Ok(Item::Damage(damage))
            }
            // A remote disk stores a batch up to some byte, or with all that follow: what is there was
            // written so, and was damaged later.
            None if cause != Corruption::CutShort && self.disk.progress().is_some() => {
                self.offset = self.size;
                Ok(Item::Damage(damage))
            }
            None => Ok(Item::End(End { used: offset, tail: Some(damage) })),
        }
    }

    /// Returns the offset from which to search the next intact record, after a damaged one at
    /// `offset` that ends at `next` by its own length.
    fn search_start(&mut self, offset: u64, next: Option<u64>) -> Result<u64, ReadError> {
        // Its length may be damaged. Bytes of its body cannot be mistaken for a record if the nonce
        // of the file is known. In other files a client may have put a record into a body.
        let is_body_harmless = self.nonce.is_some();
        let Some(next) = next.filter(|_| !is_body_harmless) else { return Ok(offset + 1) };
        Ok(match self.parse(next)? {
            // Only the body or a field is damaged, and the next record is in its place.
            Parsed::Record(_) => next,
            Parsed::Blank => self.end_of_zeros(next)?.unwrap_or(self.size),
            Parsed::Damaged { .. } => offset + 1,
        })
    }

    /// Parses the record at `offset`.
    fn parse(&mut self, offset: u64) -> Result<Parsed, ReadError> {
        let layout = self.layout;
        let left = self.size - offset;
        let damaged = |cause| Parsed::Damaged { cause, id: None, is_full: false, next: None };
        let bytes = self.bytes_at(offset, Layout::LONGEST_HEAD)?;
        let (fields, tube, body_len, nonce) = match layout.read(bytes) {
            Ok(Head::Job { fields, tube, body_len, nonce }) => (fields, tube, body_len, nonce),
            Ok(Head::Blank) => return Ok(Parsed::Blank),
            // The file ends in fewer zeros than a record has bytes.
            Err(DecodeError::Incomplete) if bytes.iter().all(|&byte| byte == 0) => {
                return Ok(Parsed::Blank);
            }
            Err(DecodeError::Incomplete) => return Ok(damaged(Corruption::CutShort)),
            Err(error) => return Ok(damaged(Corruption::Fields(error))),
        };
        let (head_len, body_len) = (layout.head_len(tube), body_len as usize);
        let span = Span { offset, fields, tube_len: tube.len(), head_len, body_len };
        let checksum = layout.has_checksums().then(|| record::checksum(&bytes[..head_len], tube));
        let (id, is_full) = (Some(fields.id), !tube.is_empty());
        let damaged = |cause, next| Parsed::Damaged { cause, id, is_full, next };
        if span.end() - offset > left {
            return Ok(damaged(Corruption::CutShort, None));
        }
        let next = Some(span.end());
        let record = self.bytes_at(offset, head_len + body_len)?;
        // The file may have been truncated since it was opened.
        let body = record.get(head_len..head_len + body_len).unwrap_or_default();
        if body_len > 0 && !body.ends_with(CR_LF) {
            return Ok(damaged(Corruption::BodyEnd, next));
        }
        if let Some((expected, mut crc)) = checksum {
            crc.update(body);
            let is_ours = self.nonce.is_none_or(|of_file| of_file == nonce);
            if crc.finalize() != expected || !is_ours {
                return Ok(damaged(Corruption::Checksum, next));
            }
            // A record at this offset was written by a server, and is no part of a body.
            if offset == FILE_HEAD_LEN as u64 {
                self.nonce = Some(nonce);
            }
        }
        Ok(Parsed::Record(span))
    }

    /// Returns the record that was parsed last.
    fn record(&self, span: Span) -> Record<'_> {
        let Span { offset, fields, tube_len, head_len, body_len } = span;
        let start = usize::try_from(offset - self.window_at).expect("it is in the window");
        let (head, body) = self.window[start..start + head_len + body_len].split_at(head_len);
        let name = &head[self.layout.name_at()..][..tube_len];
        Record {
            offset,
            len: span.end() - offset,
            fields,
            flush: record::flush_kind(fields.id),
            gap: record::gap_of(&fields),
            key: if key_record::is_key(fields.id) { KeyRecord::read(head) } else { None },
            tube: str::from_utf8(name).ok().filter(|tube| !tube.is_empty()),
            body: Some(body).filter(|body| !body.is_empty()),
        }
    }

    /// Returns the offset of the next intact record, from `offset` on.
    fn search(&mut self, mut offset: u64) -> Result<Option<u64>, ReadError> {
        while offset < self.size && self.search_left > 0 {
            self.search_left -= 1;
            let layout = self.layout;
            let bytes = self.bytes_at(offset, Layout::LONGEST_HEAD)?;
            let is_likely = match layout.read(bytes) {
                // A client may have put any number of heads into a body.
                Ok(Head::Job { nonce, .. }) if layout.has_checksums() => {
                    self.nonce.is_none_or(|of_file| of_file == nonce)
                }
                Ok(Head::Job { fields, .. }) => fields.created_at >= YEAR_2000,
                Ok(Head::Blank) => match self.end_of_zeros(offset)? {
                    Some(at) if at > offset => {
                        offset = at;
                        continue;
                    }
                    Some(_) => false,
                    None => return Ok(None),
                },
                Err(_) => false,
            };
            if is_likely {
                match self.parse(offset)? {
                    Parsed::Record(_) => return Ok(Some(offset)),
                    Parsed::Damaged { next: Some(next), .. } => {
                        self.search_left = self.search_left.saturating_sub(next - offset);
                    }
                    Parsed::Damaged { next: None, .. } | Parsed::Blank => {}
                }
            }
            offset += 1;
        }
        Ok(None)
    }

    /// Returns the offset at which a record may begin after the zeros from `offset` on, or `None` if
    /// the rest of the file is zeros.
    fn end_of_zeros(&mut self, offset: u64) -> Result<Option<u64>, ReadError> {
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
    fn bytes_at(&mut self, offset: u64, len: usize) -> Result<&[u8], ReadError> {
        let len = len.min(usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX));
        let start = usize::try_from(offset.wrapping_sub(self.window_at)).unwrap_or(usize::MAX);
        let is_there = start.checked_add(len).is_some_and(|end| end <= self.window.len());
        if is_there {
            return Ok(&self.window[start..start + len]);
        }
        let window_len = len.max(WINDOW_LEN);
        let missing = window_len.saturating_sub(self.window.len());
        let reserved =
            headroom::leave(Headroom::Quarter, || self.window.try_reserve_exact(missing));
        reserved.map_err(ReadError::NoMemory)?;
        self.window.resize(window_len, 0);
        let read = self.disk.read(self.number, offset, &mut self.window).map_err(ReadError::Io)?;
        self.window.truncate(read);
        self.window_at = offset;
        Ok(&self.window[..len.min(read)])
    }
}

impl Span {
    fn end(&self) -> u64 {
        self.offset + (self.head_len + self.body_len) as u64
    }
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Corruption::Version(version) => write!(f, "version {version} is unknown"),
            Corruption::FileHeader => f.write_str("the file header record is damaged"),
            Corruption::Fields(error) => write!(f, "no record: {error}"),
            Corruption::CutShort => f.write_str("the record is cut short"),
            Corruption::Zeros => f.write_str("zeros in the place of a record"),
            Corruption::Checksum => f.write_str("the record fails its checksum"),
            Corruption::BodyEnd => f.write_str("the body does not end in CR LF"),
            Corruption::OtherRecord => f.write_str("another record is in its place"),
        }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Io(error) => write!(f, "{error}"),
            ReadError::NoMemory(error) => write!(f, "{error}"),
        }
    }
}
