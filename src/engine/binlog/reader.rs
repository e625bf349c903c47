//! Reading one file of the binlog from its head to its end, whatever state it is in.
//!
//! A [`Reader`] yields the records that are sound and the places that are not. Where a record
//! is damaged it goes on with the next one that is sound, found by its length or else by
//! trying every byte. What the records mean together is for others (`replay.rs`,
//! `inspect.rs`) to say; nothing is changed here.
//!
//! It takes one window of the file into memory at a time, which has room for the longest record
//! so far, and neither loops nor panics on any bytes.

use super::disk::{Disk, FileNumber};
use super::record::{self, DecodeError, FILE_HEAD_LEN, Fields, Head, Layout, Marker, VERSION_LEN};
use crate::engine::headroom::{self, Headroom};
use crate::engine::text::CR_LF;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::fmt;
use std::io;

/// One file that is being read.
#[derive(Debug)]
pub struct Reader<'d> {
    disk: &'d mut dyn Disk,
    number: FileNumber,
    size: u64,
    layout: Layout,
    /// What the marker says, or 0.
    last_id: u64,
    /// That of the marker, or if it is damaged that of the first record, if that is sound.
    nonce: Option<u32>,
    /// Where the next record begins.
    offset: u64,
    /// Damage at the head, which is still to be told.
    head_damage: Option<Damage>,
    /// A piece of the file, and where it begins.
    window: Vec<u8>,
    window_at: u64,
    /// How many more bytes may be looked at in search of the next sound record.
    search_left: u64,
}

/// What there is in a file.
#[derive(Debug)]
pub enum Item<'s> {
    /// A sound record.
    Record(Record<'s>),
    /// Bytes that are none.
    Damage(Damage),
    /// There are no more records.
    End(End),
}

/// A sound record, and where it was.
#[derive(Debug)]
pub struct Record<'s> {
    /// Where it begins, in bytes from the start of the file.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// What it says.
    pub fields: Fields,
    /// The tube of the job, in a full record.
    pub tube: Option<&'s str>,
    /// The body, in a full record of a job that is not deleted.
    pub body: Option<&'s [u8]>,
}

/// Bytes that should be records and are not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Where they begin, in bytes from the start of the file.
    pub offset: u64,
    /// How many they are.
    pub len: u64,
    /// What is wrong with the first of them.
    pub what: Corruption,
    /// The job that the record says it is of, which may be wrong too.
    pub id: Option<u64>,
    /// Whether it looks like a full record.
    pub is_full: bool,
}

/// How a file ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// How many bytes of the file are in use, up to the end of the last sound record.
    pub used: u64,
    /// What is behind that, if it is not just zeros.
    pub rest: Option<Damage>,
}

/// What is wrong with a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// The file is of a version that nobody knows.
    Version(i32),
    /// The marker at the head is damaged.
    Marker,
    /// Its fields make no sense.
    Fields(DecodeError),
    /// It goes on beyond the end of the file.
    CutShort,
    /// Zeros, with something behind them.
    Zeros,
    /// The checksum is another.
    Checksum,
    /// The body does not end in CR LF.
    BodyEnd,
}

/// Why a file cannot be read.
#[derive(Debug)]
pub enum ReadError {
    /// The system does not let us.
    Io(io::Error),
    /// A body does not fit in memory.
    NoMemory(TryReserveError),
}

/// A record, or what stands in its place.
enum Parsed {
    Record(Span),
    Blank,
    /// `next` is where the record ends, if its length can be believed.
    Faulty {
        what: Corruption,
        id: Option<u64>,
        is_full: bool,
        next: Option<u64>,
    },
}

/// A sound record that is in the window.
#[derive(Clone, Copy)]
struct Span {
    offset: u64,
    fields: Fields,
    tube_len: usize,
    head_len: usize,
    body_len: usize,
}

/// The pairs of neighbours between which files are missing.
pub fn gaps(numbers: &[FileNumber]) -> impl Iterator<Item = (FileNumber, FileNumber)> {
    let pairs = numbers.iter().zip(numbers.iter().skip(1));
    pairs.map(|(&before, &after)| (before, after)).filter(|(before, after)| after - before > 1)
}

/// What is behind the last sound record of a file. If nothing follows in newer files it is what
/// a crash has left; otherwise it is damage, and so is a file with no sound beginning.
#[derive(Debug, Default)]
pub struct TornTail(Option<(FileNumber, Damage)>);

impl TornTail {
    /// A file ends in such bytes; says what is damage now.
    pub fn begins(&mut self, number: FileNumber, rest: Damage) -> Option<(FileNumber, Damage)> {
        if rest.offset == 0 {
            return Some((number, rest));
        }
        self.0.replace((number, rest))
    }

    /// What it is so far. When more is found behind it, that is damage; when all has been read,
    /// it is what a crash has left.
    pub fn take(&mut self) -> Option<(FileNumber, Damage)> {
        self.0.take()
    }
}

const WINDOW_LEN: usize = 64 * 1024;
/// A file that is nothing but the heads of huge records is not searched for ever.
const SEARCH_PER_BYTE: u64 = 16;
/// A short record may begin with so many zeros.
const ZEROS_BEFORE_ID: u64 = 16;
/// A record found by trying every byte of a file without checksums must be younger than this,
/// or it is chance: 2000-01-01.
const YEAR_2000: Nanos = Nanos::from_secs(946_684_800);

impl<'d> Reader<'d> {
    /// Begins to read the file.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn open(disk: &'d mut dyn Disk, number: FileNumber) -> Result<Reader<'d>, ReadError> {
        let size = disk.size(number).map_err(ReadError::Io)?;
        let mut scan = Reader {
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
        scan.read_head()?;
        Ok(scan)
    }

    fn read_head(&mut self) -> Result<(), ReadError> {
        let head = self.bytes_at(0, FILE_HEAD_LEN)?;
        let Some(&version) = head.first_chunk::<VERSION_LEN>() else {
            self.offset = 0;
            return Ok(());
        };
        let marker = Marker::read(&head[VERSION_LEN..]);
        let number = i32::from_ne_bytes(version);
        let damage = |offset: usize, end: u64, what| {
            let (offset, len) = (offset as u64, end - offset as u64);
            Some(Damage { offset, len, what, id: None, is_full: false })
        };
        let (versions_end, markers_end) = (VERSION_LEN as u64, FILE_HEAD_LEN as u64);
        let (layout, offset, damage) = match (Layout::of_version(version), marker) {
            // Whatever the version says, only ours have a marker.
            (_, Marker::Sound { .. } | Marker::Damaged) if version != record::VERSION => {
                let damage = damage(0, versions_end, Corruption::Version(number));
                (Layout::V7WithCrc, markers_end, damage)
            }
            (_, Marker::Sound { .. }) => (Layout::V7WithCrc, markers_end, None),
            (_, Marker::Damaged) => {
                let damage = damage(VERSION_LEN, markers_end, Corruption::Marker);
                (Layout::V7WithCrc, markers_end, damage)
            }
            (Some(Layout::V7 | Layout::V7WithCrc), Marker::Blank) => {
                (Layout::V7WithCrc, versions_end, None)
            }
            (Some(layout), Marker::Blank | Marker::None) => (layout, versions_end, None),
            // An empty file, or one whose first sector is lost: what has a checksum there is
            // sound nevertheless.
            (None, Marker::Blank | Marker::None) if number == 0 => (Layout::V7WithCrc, 0, None),
            (None, Marker::Blank | Marker::None) => {
                (Layout::V7, self.size, damage(0, self.size, Corruption::Version(number)))
            }
        };
        self.layout = layout;
        self.offset = offset;
        self.head_damage = damage;
        if let Marker::Sound { last_id, nonce } = marker {
            self.last_id = last_id;
            self.nonce = Some(nonce);
        }
        Ok(())
    }

    /// The layout of the file.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The nonce of the records, if the file was made by this server.
    pub fn nonce(&self) -> Option<u32> {
        self.nonce
    }

    /// The last id that was given out before the file was begun, as far as it knows.
    pub fn last_id(&self) -> u64 {
        self.last_id
    }

    /// What comes next; after the end, the end again.
    ///
    /// # Errors
    /// The file cannot be read on.
    pub fn next_item(&mut self) -> Result<Item<'_>, ReadError> {
        if let Some(damage) = self.head_damage.take() {
            return Ok(Item::Damage(damage));
        }
        let offset = self.offset;
        let (what, id, is_full, search_from) = match self.parse(offset)? {
            Parsed::Record(outline) => {
                self.offset = outline.end();
                return Ok(Item::Record(self.found(outline)));
            }
            Parsed::Blank => match self.end_of_zeros(offset)? {
                None => return Ok(Item::End(End { used: offset, rest: None })),
                Some(at) => (Corruption::Zeros, None, false, at),
            },
            Parsed::Faulty { what, id, is_full, next } => {
                (what, id, is_full, self.search_start(offset, next)?)
            }
        };
        let found = self.search(search_from)?;
        let len = found.unwrap_or(self.size) - offset;
        let damage = Damage { offset, len, what, id, is_full };
        match found {
            Some(next) => {
                self.offset = next;
                Ok(Item::Damage(damage))
            }
            None => Ok(Item::End(End { used: offset, rest: Some(damage) })),
        }
    }

    /// From where on the next sound record is searched, after one at `offset` that is not sound and
    /// says that it ends at `next`.
    fn search_start(&mut self, offset: u64, next: Option<u64>) -> Result<u64, ReadError> {
        // Its length may be what is wrong. Nothing in its body is mistaken for a record where
        // records are known by the nonce of the file; elsewhere a client may have put one there.
        let is_body_harmless = self.nonce.is_some();
        let Some(next) = next.filter(|_| !is_body_harmless) else { return Ok(offset + 1) };
        Ok(match self.parse(next)? {
            // Only the body or a field is wrong, and all else follows in its place.
            Parsed::Record(_) => next,
            Parsed::Blank => self.end_of_zeros(next)?.unwrap_or(self.size),
            Parsed::Faulty { .. } => offset + 1,
        })
    }

    /// Reads the record at `offset`.
    fn parse(&mut self, offset: u64) -> Result<Parsed, ReadError> {
        let layout = self.layout;
        let left = self.size - offset;
        let faulty = |what| Parsed::Faulty { what, id: None, is_full: false, next: None };
        let bytes = self.bytes_at(offset, Layout::LONGEST_HEAD)?;
        let (fields, tube, body_len, nonce) = match layout.read(bytes) {
            Ok(Head::Job { fields, tube, body_len, nonce }) => (fields, tube, body_len, nonce),
            Ok(Head::Blank) => return Ok(Parsed::Blank),
            // Fewer zeros than a record has, at the end of the file.
            Err(DecodeError::Incomplete) if bytes.iter().all(|&byte| byte == 0) => {
                return Ok(Parsed::Blank);
            }
            Err(DecodeError::Incomplete) => return Ok(faulty(Corruption::CutShort)),
            Err(malformed) => return Ok(faulty(Corruption::Fields(malformed))),
        };
        let (head_len, body_len) = (layout.head_len(tube), body_len as usize);
        let outline = Span { offset, fields, tube_len: tube.len(), head_len, body_len };
        let checksum = layout.is_checked().then(|| record::checksum(&bytes[..head_len], tube));
        let (id, is_full) = (Some(fields.id), !tube.is_empty());
        let faulty = |what, next| Parsed::Faulty { what, id, is_full, next };
        if outline.end() - offset > left {
            return Ok(faulty(Corruption::CutShort, None));
        }
        let next = Some(outline.end());
        let record = self.bytes_at(offset, head_len + body_len)?;
        // The file may have become shorter.
        let body = record.get(head_len..head_len + body_len).unwrap_or_default();
        if body_len > 0 && !body.ends_with(CR_LF) {
            return Ok(faulty(Corruption::BodyEnd, next));
        }
        if let Some((expected, mut crc)) = checksum {
            crc.update(body);
            let is_ours = self.nonce.is_none_or(|of_file| of_file == nonce);
            if crc.finalize() != expected || !is_ours {
                return Ok(faulty(Corruption::Checksum, next));
            }
            // What stands there was written by a server, not by a client into a body.
            if offset == FILE_HEAD_LEN as u64 {
                self.nonce = Some(nonce);
            }
        }
        Ok(Parsed::Record(outline))
    }

    /// The record that was parsed last.
    fn found(&self, outline: Span) -> Record<'_> {
        let Span { offset, fields, tube_len, head_len, body_len } = outline;
        let start = usize::try_from(offset - self.window_at).expect("it is in the window");
        let (head, body) = self.window[start..start + head_len + body_len].split_at(head_len);
        let name = &head[self.layout.name_at()..][..tube_len];
        Record {
            offset,
            len: outline.end() - offset,
            fields,
            tube: str::from_utf8(name).ok().filter(|tube| !tube.is_empty()),
            body: Some(body).filter(|body| !body.is_empty()),
        }
    }

    /// Where the next sound record is, from `offset` on.
    fn search(&mut self, mut offset: u64) -> Result<Option<u64>, ReadError> {
        while offset < self.size && self.search_left > 0 {
            self.search_left -= 1;
            let layout = self.layout;
            let bytes = self.bytes_at(offset, Layout::LONGEST_HEAD)?;
            let is_likely = match layout.read(bytes) {
                // A client may have put any number of heads into a body.
                Ok(Head::Job { nonce, .. }) if layout.is_checked() => {
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
                    Parsed::Faulty { next: Some(next), .. } => {
                        self.search_left = self.search_left.saturating_sub(next - offset);
                    }
                    Parsed::Faulty { next: None, .. } | Parsed::Blank => {}
                }
            }
            offset += 1;
        }
        Ok(None)
    }

    /// Where a record may begin after the zeros from `offset` on, if anything does.
    fn end_of_zeros(&mut self, offset: u64) -> Result<Option<u64>, ReadError> {
        let mut at = offset;
        loop {
            let bytes = self.bytes_at(at, WINDOW_LEN)?;
            if bytes.is_empty() {
                return Ok(None);
            }
            if let Some(place) = bytes.iter().position(|&byte| byte != 0) {
                return Ok(Some((at + place as u64).saturating_sub(ZEROS_BEFORE_ID).max(offset)));
            }
            at += bytes.len() as u64;
        }
    }

    /// Up to `len` bytes from `offset` on; fewer only at the end of the file.
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
            Corruption::Version(version) => write!(f, "version {version} is not known"),
            Corruption::Marker => f.write_str("the marker of a file with checksums is damaged"),
            Corruption::Fields(malformed) => write!(f, "no record: {malformed}"),
            Corruption::CutShort => f.write_str("the record is cut short"),
            Corruption::Zeros => f.write_str("zeros instead of a record"),
            Corruption::Checksum => f.write_str("the record fails its checksum"),
            Corruption::BodyEnd => f.write_str("the body does not end in CR LF"),
        }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DecodeError::Incomplete => "it is cut short",
            DecodeError::NameLength => "the length of the tube's name is out of range",
            DecodeError::Name => "the tube's name is none",
            DecodeError::Id => "the id is out of range",
            DecodeError::State => "the state is out of range",
            DecodeError::BodyLength => "the length of the body is out of range",
        })
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
