//! One record of the binlog, to bytes and from bytes.
//!
//! ```text
//! version 7   | i32 name length | name | 80 bytes of fields | body with CR LF |
//! version 5   | u64 name length | name | 77 bytes of fields | body with CR LF |
//! ```
//!
//! A record with a name is a full one; without, it is a short one: new fields for a job that
//! a full record has told of. All integers have the byte order of the machine, and the fields
//! stand where a C compiler for 64 bits puts them. Version 5 counts in microseconds, 7 in
//! nanoseconds; 5 is only read.
//!
//! C beanstalkd ignores four bytes behind the priority. There we put a checksum of the whole
//! record, and say so in a marker, a short record at the head of the file for a job that cannot
//! exist. C beanstalkd skips it; in a file without it nobody looks at the four bytes.
//! Which file a record is in, and where, is not known here.

use super::body::CR_LF;
use super::command::{TUBE_NAME_MAX, is_tube_name};
use super::job::Counts;
use super::time::Nanos;
use std::ops::Range;

/// What a record says of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each field but these is named after its like in a job")]
pub struct Fields {
    pub id: u64,
    pub pri: u32,
    pub delay_secs: u32,
    pub ttr_secs: u32,
    /// The length of the body in bytes, with CR LF.
    pub body_len: u32,
    /// Since 1970.
    pub created_at: Nanos,
    /// Since 1970. When a delayed job is due; in checked files also when a buried one was
    /// buried, which C beanstalkd does not keep.
    pub moment: Nanos,
    pub counts: Counts,
    pub state: Logged,
}

/// The state of a job as a record has it. The numbers are C beanstalkd's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the field's own words")]
pub enum Logged {
    Deleted = 0,
    Ready = 1,
    Reserved = 2,
    Buried = 3,
    Delayed = 4,
}

/// The layout of a file, by the version at its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Of C beanstalkd 1.4.
    V5,
    /// Of C beanstalkd since, and ours.
    V7,
}

/// The version at the head of the files that we write.
pub const VERSION: [u8; VERSION_LEN] = 7_i32.to_ne_bytes();

/// How many bytes the version takes.
pub const VERSION_LEN: usize = 4;

/// The length of a short record in bytes.
pub const SHORT_LEN: usize = NAME_LENGTH_LEN + FIELDS_LEN;

/// The longest body, with CR LF.
const MAX_BODY_LEN: u64 = (1 << 30) + 2;

/// The id of no job: that of the marker. Half of all ids are kept away from, so that ids that
/// go on after a restart cannot come near.
const MARKER_ID: u64 = u64::MAX;
const LAST_ID: u64 = u64::MAX / 2;

const NAME_LENGTH_LEN: usize = 4;
const FIELDS_LEN: usize = 80;
/// Where the checksum is, counted from the first of the fields.
const CHECKSUM_AT: usize = 12;

/// A flipped bit or two do not make a file with a marker one without.
const BITS_OFF_IN_MARKER: u32 = 16;

// ---- To bytes ----

/// The length of the full record of a job, in bytes.
pub fn full_len(tube: &str, body: &[u8]) -> usize {
    SHORT_LEN + tube.len() + body.len()
}

/// Appends a record for a checked file to `out`, up to its body, which is to follow. A short
/// record has neither tube nor body.
pub fn write(out: &mut Vec<u8>, fields: &Fields, tube: &str, body: &[u8]) {
    let start = out.len();
    let name_len = i32::try_from(tube.len()).expect("no name of a tube is that long");
    out.extend_from_slice(&name_len.to_ne_bytes());
    out.extend_from_slice(tube.as_bytes());
    let fields_at = out.len();
    out.extend_from_slice(&fields_to_bytes(fields));
    let mut crc = crc32fast::Hasher::new();
    crc.update(&out[start..]);
    crc.update(body);
    let checksum_at = fields_at + CHECKSUM_AT;
    out[checksum_at..checksum_at + 4].copy_from_slice(&crc.finalize().to_ne_bytes());
}

/// Appends the marker of a checked file to `out`. It also remembers the last id that was given
/// out, so that ids go on when nothing else is left.
pub fn write_marker(out: &mut Vec<u8>, last_id: u64) {
    write(out, &marker(last_id), "", &[]);
}

fn marker(last_id: u64) -> Fields {
    Fields {
        id: MARKER_ID,
        pri: 0,
        delay_secs: 0,
        ttr_secs: 0,
        body_len: 0,
        created_at: Nanos::ZERO,
        moment: Nanos::from_nanos(last_id),
        counts: Counts::default(),
        state: Logged::Deleted,
    }
}

fn fields_to_bytes(fields: &Fields) -> [u8; FIELDS_LEN] {
    let Counts { reserves, timeouts, releases, buries, kicks } = fields.counts;
    let mut bytes = [0; FIELDS_LEN];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(0, &fields.id.to_ne_bytes());
    put(8, &fields.pri.to_ne_bytes());
    put(16, &Nanos::from_secs(fields.delay_secs).as_nanos().to_ne_bytes());
    put(24, &Nanos::from_secs(fields.ttr_secs).as_nanos().to_ne_bytes());
    put(32, &fields.body_len.to_ne_bytes());
    put(40, &fields.created_at.as_nanos().to_ne_bytes());
    put(48, &fields.moment.as_nanos().to_ne_bytes());
    for (index, count) in [reserves, timeouts, releases, buries, kicks].into_iter().enumerate() {
        put(56 + 4 * index, &count.to_ne_bytes());
    }
    put(76, &[fields.state as u8]);
    bytes
}

// ---- From bytes ----

/// The part of a record before its body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Head<'a> {
    /// A record of a job.
    Job {
        /// What it says.
        fields: Fields,
        /// The name of the tube; empty in a short record.
        tube: &'a str,
        /// The length of the body that follows, in bytes.
        body_len: u32,
    },
    /// Zeros: there are no more records.
    End,
}

/// Why bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// More bytes are needed, so many from the start of the record.
    Incomplete(usize),
    /// The length of the tube's name is out of range.
    NameLength,
    /// Such a tube cannot be.
    Name,
    /// No job has such an id.
    Id,
    /// There is no such state.
    State,
    /// No body has such a length.
    BodyLength,
}

impl Layout {
    /// The layout of a file that begins with `version`.
    pub fn of_version(version: [u8; VERSION_LEN]) -> Option<Layout> {
        match i32::from_ne_bytes(version) {
            5 => Some(Layout::V5),
            7 => Some(Layout::V7),
            _ => None,
        }
    }

    /// The version, as it is told to people.
    pub fn version(self) -> u32 {
        match self {
            Layout::V5 => 5,
            Layout::V7 => 7,
        }
    }

    /// The longest that a record is before its body, in bytes.
    pub const LONGEST_HEAD: usize = 8 + TUBE_NAME_MAX + FIELDS_LEN;

    fn name_length_len(self) -> usize {
        match self {
            Layout::V5 => 8,
            Layout::V7 => NAME_LENGTH_LEN,
        }
    }

    fn fields_len(self) -> usize {
        match self {
            Layout::V5 => 77,
            Layout::V7 => FIELDS_LEN,
        }
    }

    /// The length of the head of a record with a tube's name of this length.
    pub fn head_len(self, tube: &str) -> usize {
        self.name_length_len() + tube.len() + self.fields_len()
    }

    /// Reads the head of the record at the start of `bytes`.
    ///
    /// # Errors
    /// There is none.
    pub fn read(self, bytes: &[u8]) -> Result<Head<'_>, Malformed> {
        let name_at = self.name_length_len();
        let name_len = match self {
            Layout::V5 => bytes.first_chunk().map(|&word| u64::from_ne_bytes(word)),
            // A negative length is out of range too.
            Layout::V7 => bytes.first_chunk().map(|&word| u32::from_ne_bytes(word).into()),
        };
        let name_len = name_len.ok_or(Malformed::Incomplete(name_at))?;
        let name_len = usize::try_from(name_len).ok().filter(|&len| len <= TUBE_NAME_MAX);
        let name_len = name_len.ok_or(Malformed::NameLength)?;
        let fields_at = name_at + name_len;
        let head_len = fields_at + self.fields_len();
        let name = bytes.get(name_at..fields_at);
        let fields = bytes.get(fields_at..head_len);
        let (Some(name), Some(fields)) = (name, fields) else {
            return Err(Malformed::Incomplete(head_len));
        };
        let id = u64::from_ne_bytes(array(fields, 0));
        if id == 0 {
            let is_blank = bytes[..head_len].iter().all(|&byte| byte == 0);
            return if is_blank { Ok(Head::End) } else { Err(Malformed::Id) };
        }
        if id > LAST_ID && id != MARKER_ID {
            return Err(Malformed::Id);
        }
        let fields = self.fields(fields)?;
        let tube = str::from_utf8(name).map_err(|_| Malformed::Name)?;
        if !tube.is_empty() && !is_tube_name(name) {
            return Err(Malformed::Name);
        }
        // A full record that deletes has no body.
        let has_body = !tube.is_empty() && fields.state != Logged::Deleted;
        let is_body = (CR_LF.len() as u64..=MAX_BODY_LEN).contains(&u64::from(fields.body_len));
        if has_body && !is_body {
            return Err(Malformed::BodyLength);
        }
        Ok(Head::Job { fields, tube, body_len: if has_body { fields.body_len } else { 0 } })
    }

    fn fields(self, bytes: &[u8]) -> Result<Fields, Malformed> {
        let u32_at = |at| u32::from_ne_bytes(array(bytes, at));
        let nanos_at = |at| {
            let count = i64::from_ne_bytes(array(bytes, at));
            let count = u64::try_from(count).unwrap_or(0);
            match self {
                Layout::V5 => Nanos::from_nanos(count.saturating_mul(1_000)),
                Layout::V7 => Nanos::from_nanos(count),
            }
        };
        let secs_at = |at| u32::try_from(nanos_at(at).whole_secs()).unwrap_or(u32::MAX);
        Ok(Fields {
            id: u64::from_ne_bytes(array(bytes, 0)),
            pri: u32_at(8),
            delay_secs: secs_at(16),
            ttr_secs: secs_at(24),
            body_len: u32_at(32),
            created_at: nanos_at(40),
            moment: nanos_at(48),
            counts: Counts {
                reserves: u32_at(56),
                timeouts: u32_at(60),
                releases: u32_at(64),
                buries: u32_at(68),
                kicks: u32_at(72),
            },
            state: match bytes[76] {
                0 => Logged::Deleted,
                1 => Logged::Ready,
                2 => Logged::Reserved,
                3 => Logged::Buried,
                4 => Logged::Delayed,
                _ => return Err(Malformed::State),
            },
        })
    }
}

/// The checksum that a record of a checked file has, and a sum that its own bytes will be
/// added to: `head` is all of it but the body.
pub fn checksum(head: &[u8], tube: &str) -> (u32, crc32fast::Hasher) {
    let at = NAME_LENGTH_LEN + tube.len() + CHECKSUM_AT;
    let mut crc = crc32fast::Hasher::new();
    crc.update(&head[..at]);
    crc.update(&[0; 4]);
    crc.update(&head[at + 4..]);
    (u32::from_ne_bytes(array(head, at)), crc)
}

/// What the first record of a file says of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// Nothing: the file is not ours.
    None,
    /// Nothing yet, or what a power cut has left of it: C beanstalkd leaves no such gap.
    Blank,
    /// It is one of our checked files.
    Sound {
        /// The last id given out before it was begun.
        last_id: u64,
    },
    /// It is, but the marker itself is damaged.
    Damaged,
}

impl Marker {
    /// Reads the first record of a file from the start of `bytes`.
    pub fn read(bytes: &[u8]) -> Marker {
        let Some(bytes) = bytes.first_chunk::<SHORT_LEN>() else { return Marker::None };
        if bytes.iter().all(|&byte| byte == 0) {
            return Marker::Blank;
        }
        let last_id = u64::from_ne_bytes(array(bytes, NAME_LENGTH_LEN + 48));
        let mut expected = Vec::with_capacity(SHORT_LEN);
        write_marker(&mut expected, last_id);
        if expected == bytes {
            return Marker::Sound { last_id: last_id.min(LAST_ID) };
        }
        let difference = |range: Range<usize>| -> u32 {
            let pairs = expected[range.clone()].iter().zip(&bytes[range]);
            pairs.map(|(one, other)| (one ^ other).count_ones()).sum()
        };
        // The checksum and the last id may be anything if one of them is damaged.
        let checksum_at = NAME_LENGTH_LEN + CHECKSUM_AT;
        let last_id_at = NAME_LENGTH_LEN + 48;
        let bits_off = difference(0..checksum_at)
            + difference(checksum_at + 4..last_id_at)
            + difference(last_id_at + 8..SHORT_LEN);
        if bits_off <= BITS_OFF_IN_MARKER { Marker::Damaged } else { Marker::None }
    }
}

/// Whether these are the fields of a marker.
pub fn is_marker(fields: &Fields) -> bool {
    fields.id == MARKER_ID
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("the fields are all there")
}
