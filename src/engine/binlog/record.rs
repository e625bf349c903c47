//! One record of the binlog, to bytes and from bytes.
//!
//! ```text
//! version 7   | i32 name length | name | 80 bytes of fields | body with CR LF |
//! version 5   | u64 name length | name | 77 bytes of fields | body with CR LF |
//! ```
//!
//! The fields of version 7, with the C types that they have there:
//!
//! | offset | field | type |
//! |---|---|---|
//! | 0 | id | u64 |
//! | 8 | priority | u32 |
//! | 12 | nothing; in our files the checksum | u32 |
//! | 16 | delay | i64 |
//! | 24 | TTR | i64 |
//! | 32 | length of the body, with CR LF | i32 |
//! | 36 | nothing; in our files the nonce of the file | u32 |
//! | 40 | when it was put, since 1970 | i64 |
//! | 48 | when it is due, or its deadline; see [`Fields::due_or_buried_at`] | i64 |
//! | 56 | reserves, timeouts, releases, buries, kicks | 5 x u32 |
//! | 76 | state | u8 |
//!
//! A record with a name is a full one; without, it is a short one: new fields for a job that
//! a full record has told of. All integers have the byte order of the machine, and the fields
//! stand where a C compiler for 64 bits puts them. Version 5 counts in microseconds, 7 in
//! nanoseconds; 5 is only read.
//!
//! C beanstalkd ignores four bytes behind the priority. There we put a checksum of the whole
//! record, and say so in a marker, a short record at the head of the file for a job that cannot
//! exist. C beanstalkd skips it; in a file without it nobody looks at the four bytes. In four
//! others every record of a file has its nonce, which no client knows: so nobody can put a job
//! whose body is taken for records should those before it be damaged.
//! Which file a record is in, and where, is not known here.

use crate::engine::text::{CR_LF, TUBE_NAME_MAX, is_tube_name};
use crate::engine::time::Nanos;

/// How often a job was reserved, timed out, released, buried and kicked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is named after its line in stats-job")]
pub struct Counts {
    pub reserves: u32,
    pub timeouts: u32,
    pub releases: u32,
    pub buries: u32,
    pub kicks: u32,
}

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
    /// Since 1970. When a delayed job is due, and the deadline of a reserved one; in checked
    /// files also when a buried one was buried, which C beanstalkd does not keep.
    pub due_or_buried_at: Nanos,
    pub counts: Counts,
    pub state: RecordState,
}

/// The state of a job as a record has it. The numbers are C beanstalkd's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the field's own words")]
pub enum RecordState {
    Deleted = 0,
    Ready = 1,
    Reserved = 2,
    Buried = 3,
    Delayed = 4,
}

/// The layout of a file, by the version and the marker at its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Of C beanstalkd 1.4.
    V5,
    /// Of C beanstalkd since.
    V7,
    /// Ours: the same, with checksums.
    V7WithCrc,
}

/// The version at the head of the files that we write.
pub const VERSION: [u8; VERSION_LEN] = 7_i32.to_ne_bytes();

/// How many bytes the version takes.
pub const VERSION_LEN: usize = 4;

/// How many bytes the version and the marker take.
pub const FILE_HEAD_LEN: usize = VERSION_LEN + SHORT_LEN;

/// The length of a short record in bytes.
pub const SHORT_LEN: usize = NAME_LENGTH_LEN + FIELDS_LEN;

/// The longest body, with CR LF.
const MAX_BODY_LEN: u64 = (1 << 30) + 2;

/// The id of no job: that of the marker.
const MARKER_ID: u64 = u64::MAX;
/// Nobody gives out ids that are higher, unless they go on from one that is nearly as high.
pub const HIGHEST_ID: u64 = u64::MAX - (1 << 40);

const NAME_LENGTH_LEN: usize = 4;
const FIELDS_LEN: usize = 80;

// Where the fields are, in bytes from the first one.
const ID_AT: usize = 0;
const PRI_AT: usize = 8;
const CHECKSUM_AT: usize = 12;
const DELAY_AT: usize = 16;
const TTR_AT: usize = 24;
const BODY_LEN_AT: usize = 32;
const NONCE_AT: usize = 36;
const CREATED_AT: usize = 40;
const MOMENT_AT: usize = 48;
const COUNTS_AT: usize = 56;
const STATE_AT: usize = 76;

/// A flipped bit or two do not make a file with a marker one without.
const BITS_OFF_IN_MARKER: u32 = 16;

// ---- To bytes ----

/// The length of the full record of a job, in bytes; `body_len` has the CR LF.
pub fn full_len(tube: &str, body_len: usize) -> usize {
    SHORT_LEN + tube.len() + body_len
}

/// Appends a record for a checked file to `out`, up to its body, which is to follow. A short
/// record has neither tube nor body.
pub fn write(out: &mut Vec<u8>, fields: &Fields, tube: &str, body: &[u8], nonce: u32) {
    let start = out.len();
    let name_len = i32::try_from(tube.len()).expect("no name of a tube is that long");
    out.extend_from_slice(&name_len.to_ne_bytes());
    out.extend_from_slice(tube.as_bytes());
    let fields_at = out.len();
    out.extend_from_slice(&fields_to_bytes(fields, nonce));
    let mut crc = crc32fast::Hasher::new();
    crc.update(&out[start..]);
    crc.update(body);
    let checksum_at = fields_at + CHECKSUM_AT;
    out[checksum_at..checksum_at + 4].copy_from_slice(&crc.finalize().to_ne_bytes());
}

/// Appends the marker of a checked file to `out`. It also remembers the last id that was given
/// out, so that ids go on when nothing else is left.
pub fn write_marker(out: &mut Vec<u8>, last_id: u64, nonce: u32) {
    write(out, &marker(last_id), "", &[], nonce);
}

fn marker(last_id: u64) -> Fields {
    Fields {
        id: MARKER_ID,
        pri: 0,
        delay_secs: 0,
        ttr_secs: 0,
        body_len: 0,
        created_at: Nanos::ZERO,
        due_or_buried_at: Nanos::from_nanos(last_id),
        counts: Counts::default(),
        state: RecordState::Deleted,
    }
}

fn fields_to_bytes(fields: &Fields, nonce: u32) -> [u8; FIELDS_LEN] {
    let Counts { reserves, timeouts, releases, buries, kicks } = fields.counts;
    let mut bytes = [0; FIELDS_LEN];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    put(ID_AT, &fields.id.to_ne_bytes());
    put(PRI_AT, &fields.pri.to_ne_bytes());
    put(DELAY_AT, &Nanos::from_secs(fields.delay_secs).as_nanos().to_ne_bytes());
    put(TTR_AT, &Nanos::from_secs(fields.ttr_secs).as_nanos().to_ne_bytes());
    put(BODY_LEN_AT, &fields.body_len.to_ne_bytes());
    put(NONCE_AT, &nonce.to_ne_bytes());
    put(CREATED_AT, &fields.created_at.as_nanos().to_ne_bytes());
    put(MOMENT_AT, &fields.due_or_buried_at.as_nanos().to_ne_bytes());
    for (index, count) in [reserves, timeouts, releases, buries, kicks].into_iter().enumerate() {
        put(COUNTS_AT + 4 * index, &count.to_ne_bytes());
    }
    put(STATE_AT, &[fields.state as u8]);
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
        /// The nonce of its file, in one of ours.
        nonce: u32,
    },
    /// Zeros instead of a record.
    Blank,
}

/// Why bytes are not a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeError {
    /// There are too few bytes.
    Incomplete,
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
    /// The layout of a file that begins with `version` and has no marker.
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
            Layout::V7 | Layout::V7WithCrc => 7,
        }
    }

    /// Whether records have checksums.
    pub fn is_checked(self) -> bool {
        match self {
            Layout::V5 | Layout::V7 => false,
            Layout::V7WithCrc => true,
        }
    }

    /// The longest that a record is before its body, in bytes.
    pub const LONGEST_HEAD: usize = 8 + TUBE_NAME_MAX + FIELDS_LEN;

    /// Where the name of the tube begins in a record, in bytes.
    pub fn name_at(self) -> usize {
        match self {
            Layout::V5 => 8,
            Layout::V7 | Layout::V7WithCrc => NAME_LENGTH_LEN,
        }
    }

    fn fields_len(self) -> usize {
        match self {
            Layout::V5 => 77,
            Layout::V7 | Layout::V7WithCrc => FIELDS_LEN,
        }
    }

    /// The length of the head of a record with a tube's name of this length.
    pub fn head_len(self, tube: &str) -> usize {
        self.name_at() + tube.len() + self.fields_len()
    }

    /// Reads the head of the record at the start of `bytes`.
    ///
    /// # Errors
    /// There is none.
    pub fn read(self, bytes: &[u8]) -> Result<Head<'_>, DecodeError> {
        let name_at = self.name_at();
        let name_len = match self {
            Layout::V5 => bytes.first_chunk().map(|&word| u64::from_ne_bytes(word)),
            // A negative length is out of range too.
            Layout::V7 | Layout::V7WithCrc => {
                bytes.first_chunk().map(|&word| u32::from_ne_bytes(word).into())
            }
        };
        let name_len = name_len.ok_or(DecodeError::Incomplete)?;
        let name_len = usize::try_from(name_len).ok().filter(|&len| len <= TUBE_NAME_MAX);
        let name_len = name_len.ok_or(DecodeError::NameLength)?;
        let fields_at = name_at + name_len;
        let head_len = fields_at + self.fields_len();
        let name = bytes.get(name_at..fields_at);
        let fields = bytes.get(fields_at..head_len);
        let (Some(name), Some(fields)) = (name, fields) else {
            return Err(DecodeError::Incomplete);
        };
        let id = u64::from_ne_bytes(array(fields, ID_AT));
        let nonce = u32::from_ne_bytes(array(fields, NONCE_AT));
        if id == 0 {
            let is_blank = bytes[..head_len].iter().all(|&byte| byte == 0);
            return if is_blank { Ok(Head::Blank) } else { Err(DecodeError::Id) };
        }
        if id == MARKER_ID {
            return Err(DecodeError::Id);
        }
        let fields = self.fields(fields)?;
        let tube = str::from_utf8(name).map_err(|_| DecodeError::Name)?;
        if !tube.is_empty() && !is_tube_name(name) {
            return Err(DecodeError::Name);
        }
        // A full record that deletes has no body.
        let has_body = !tube.is_empty() && fields.state != RecordState::Deleted;
        let is_body = (CR_LF.len() as u64..=MAX_BODY_LEN).contains(&u64::from(fields.body_len));
        if has_body && !is_body {
            return Err(DecodeError::BodyLength);
        }
        let body_len = if has_body { fields.body_len } else { 0 };
        Ok(Head::Job { fields, tube, body_len, nonce })
    }

    fn fields(self, bytes: &[u8]) -> Result<Fields, DecodeError> {
        let u32_at = |at| u32::from_ne_bytes(array(bytes, at));
        let nanos_at = |at| {
            let count = i64::from_ne_bytes(array(bytes, at));
            let nanos = match self {
                // No more than can be written again.
                Layout::V5 => count.saturating_mul(1_000),
                Layout::V7 | Layout::V7WithCrc => count,
            };
            Nanos::from_nanos(u64::try_from(nanos).unwrap_or(0))
        };
        let secs_at = |at| u32::try_from(nanos_at(at).whole_secs()).unwrap_or(u32::MAX);
        Ok(Fields {
            id: u64::from_ne_bytes(array(bytes, ID_AT)),
            pri: u32_at(PRI_AT),
            delay_secs: secs_at(DELAY_AT),
            ttr_secs: secs_at(TTR_AT),
            body_len: u32_at(BODY_LEN_AT),
            created_at: nanos_at(CREATED_AT),
            due_or_buried_at: nanos_at(MOMENT_AT),
            counts: Counts {
                reserves: u32_at(COUNTS_AT),
                timeouts: u32_at(COUNTS_AT + 4),
                releases: u32_at(COUNTS_AT + 8),
                buries: u32_at(COUNTS_AT + 12),
                kicks: u32_at(COUNTS_AT + 16),
            },
            state: match bytes[STATE_AT] {
                0 => RecordState::Deleted,
                1 => RecordState::Ready,
                2 => RecordState::Reserved,
                3 => RecordState::Buried,
                4 => RecordState::Delayed,
                _ => return Err(DecodeError::State),
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
        /// The nonce of its records.
        nonce: u32,
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
        let last_id = u64::from_ne_bytes(array(bytes, NAME_LENGTH_LEN + MOMENT_AT));
        let nonce = u32::from_ne_bytes(array(bytes, NAME_LENGTH_LEN + NONCE_AT));
        let mut expected = Vec::with_capacity(SHORT_LEN);
        write_marker(&mut expected, last_id, nonce);
        if expected == bytes {
            return Marker::Sound { last_id, nonce };
        }
        // If one of these is damaged the checksum is another, and the rest is as it must be.
        let checksum_at = NAME_LENGTH_LEN + CHECKSUM_AT;
        let is_checksum = |at: usize| (checksum_at..checksum_at + 4).contains(&at);
        let pairs = expected.iter().zip(bytes).enumerate().filter(|(at, _)| !is_checksum(*at));
        let bits_off: u32 = pairs.map(|(_, (one, other))| (one ^ other).count_ones()).sum();
        if bits_off <= BITS_OFF_IN_MARKER { Marker::Damaged } else { Marker::None }
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("the fields are all there")
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: Fields = Fields {
        id: 0x0102_0304_0506_0708,
        pri: 0x1112_1314,
        delay_secs: 3,
        ttr_secs: 4,
        body_len: 7,
        created_at: Nanos::from_nanos(0x2122_2324_2526_2728),
        due_or_buried_at: Nanos::from_nanos(0x3132_3334_3536_3738),
        counts: Counts { reserves: 1, timeouts: 2, releases: 3, buries: 4, kicks: 5 },
        state: RecordState::Delayed,
    };
    const NONCE: u32 = 0x4142_4344;

    fn record(tube: &str, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, &FIELDS, tube, body, NONCE);
        bytes.extend_from_slice(body);
        bytes
    }

    #[test]
    fn fields_stand_where_c_beanstalkd_has_them() {
        let bytes = record("mail", b"hello\r\n");
        assert_eq!(bytes.len(), full_len("mail", b"hello\r\n".len()));
        assert_eq!(bytes[..8], [&4_i32.to_ne_bytes()[..], b"mail"].concat());
        let fields = &bytes[8..88];
        assert_eq!(fields[0..8], FIELDS.id.to_ne_bytes());
        assert_eq!(fields[8..12], FIELDS.pri.to_ne_bytes());
        assert_eq!(fields[16..24], 3_000_000_000_i64.to_ne_bytes());
        assert_eq!(fields[24..32], 4_000_000_000_i64.to_ne_bytes());
        assert_eq!(fields[32..36], 7_i32.to_ne_bytes());
        assert_eq!(fields[36..40], NONCE.to_ne_bytes());
        assert_eq!(fields[40..48], FIELDS.created_at.as_nanos().to_ne_bytes());
        assert_eq!(fields[48..56], FIELDS.due_or_buried_at.as_nanos().to_ne_bytes());
        let counts: Vec<u8> = (1_u32..=5).flat_map(u32::to_ne_bytes).collect();
        assert_eq!(fields[56..76], counts);
        assert_eq!(fields[76..80], [4, 0, 0, 0]);
        assert_eq!(&bytes[88..], b"hello\r\n");
    }

    #[test]
    fn the_checksum_is_of_the_whole_record_with_itself_as_zeros() {
        for (tube, body) in [("mail", &b"hello\r\n"[..]), ("", b"")] {
            let mut bytes = record(tube, body);
            let at = 4 + tube.len() + 12;
            let told = u32::from_ne_bytes(array(&bytes, at));
            bytes[at..at + 4].fill(0);
            assert_eq!(told, crc32fast::hash(&bytes));
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = record("mail", b"hello\r\n");
        let head = Layout::V7WithCrc.read(&bytes);
        let expected = Head::Job { fields: FIELDS, tube: "mail", body_len: 7, nonce: NONCE };
        assert_eq!(head, Ok(expected));
        for len in 0..88 {
            assert_eq!(Layout::V7WithCrc.read(&bytes[..len]), Err(DecodeError::Incomplete));
        }
        assert_eq!(Layout::V7.read(&[0; 84]), Ok(Head::Blank));
    }

    #[test]
    fn a_marker_is_known_even_when_it_is_damaged() {
        let mut bytes = Vec::new();
        write_marker(&mut bytes, 77, NONCE);
        assert_eq!(Marker::read(&bytes), Marker::Sound { last_id: 77, nonce: NONCE });
        for bit in 0..SHORT_LEN * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Marker::read(&damaged), Marker::Damaged, "bit {bit}");
        }
        assert_eq!(Marker::read(&record("mail", b"hello\r\n")), Marker::None);
        assert_eq!(Marker::read(&record("", b"")), Marker::None);
        assert_eq!(Marker::read(&[0; SHORT_LEN]), Marker::Blank);
        assert_eq!(Marker::read(&bytes[1..]), Marker::None);
    }
}
