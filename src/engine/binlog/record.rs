//! Converts one record of the binlog to bytes and from bytes.
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
//! | 12 | unused by C; in files of this server the checksum | u32 |
//! | 16 | delay | i64 |
//! | 24 | TTR | i64 |
//! | 32 | length of the body, with CR LF | i32 |
//! | 36 | unused by C; in files of this server the nonce of the file | u32 |
//! | 40 | when the job was put, since 1970 | i64 |
//! | 48 | when the job is due, or its deadline; see [`Fields::due_or_buried_at`] | i64 |
//! | 56 | reserves, timeouts, releases, buries, kicks | 5 x u32 |
//! | 76 | state | u8 |
//!
//! A record with a name is a full one. A record without a name is a short one: it has new fields
//! for a job that has a full record. All integers have the byte order of the machine, and the
//! fields have the offsets that a C compiler for 64 bits gives them. Times are microseconds in
//! version 5 and nanoseconds in version 7. Version 5 is only read.
//!
//! C beanstalkd ignores the four bytes behind the priority. This server writes a CRC-32 of the
//! whole record there. The first record of such a file is the file header record: a short record
//! with an id that no job has. It has the number of the file where other records have the creation of the job, and
//! the last id that was given out in the place of the due moment. In those of the delay and the priority it has the
//! length that the file before had without what is behind its last record, and the nonce of that file. C
//! beanstalkd skips it. In a file without it, the four bytes are ignored.
//!
//! The first byte behind the state, which C beanstalkd ignores too, is a [`Mark`].
//!
//! The record of a flush is a full record of a delete, with an id that no job has. It deletes all
//! jobs of its tube that have no later record, or the buried ones. C beanstalkd skips it. For C
//! beanstalkd a record of a delete of each job follows. This server ignores these deletes if the
//! record of the flush is lost, as after a power cut: then no job is deleted.
//!
//! The record of a gap is a short record with an id that no job has. It has the numbers of files that were
//! removed before older ones: the first where other records have the creation of the job, the last in the
//! place of the due moment. C beanstalkd skips it.
//!
//! The record of the keys of a job, unique or of a group, is a short record with an id that no job has. C beanstalkd skips it.
//! In the place of the fields of a job it has:
//!
//! | field | content |
//! |---|---|
//! | priority | for how many seconds the key is kept after the delete of the job |
//! | delay, TTR | the secret with which the digest was made |
//! | when the job was put | the id of the job |
//! | when the job is due | until when the key of a deleted job is kept, since 1970; of a job its group, or 0 |
//! | the first four counts | the digest of the tube and the key; see [`Digest::none`] |
//! | the last count | the limit of the group; 0 for a job without a group, and for a deleted one |
//!
//! The key of a job has its record directly before each full record of the job, in the same file. So a
//! torn write loses both, or leaves a key that no job follows, which is ignored. When a job is deleted
//! whose key is kept, a record of the kept key is directly before the record of the delete. Without that
//! delete it is ignored too. Compaction writes the record of a kept key alone. All records of a binlog have
//! one secret: each start reads it from them.
//!
//! The four bytes behind the length of the body have the nonce of the file, which no client knows.
//! So a client cannot put a job whose body is taken for records when the records before it are
//! damaged.

mod header;

pub use header::FileHeader;

use super::disk::FileNumber;
use super::error::Corruption;
use super::gaps::Gap;
use crate::engine::digest::{Con, Digest, Secret};
use crate::engine::text::{CR_LF, TUBE_NAME_MAX, is_tube_name};
use crate::engine::time::Nanos;

/// How often a job was reserved, timed out, released, buried and kicked.
pub type Counts = [u32; 5];

/// The fields of a job in a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    pub id: u64,
    pub pri: u32,
    pub delay_secs: u32,
    pub ttr_secs: u32,
    /// The length of the body in bytes, with CR LF.
    pub body_len: u32,
    /// Since 1970.
    pub created_at: Nanos,
    /// Since 1970. The moment at which a delayed job is due, and the deadline of a reserved one. In
    /// files with checksums also the moment of a bury, which C beanstalkd does not record.
    pub due_or_buried_at: Nanos,
    pub counts: Counts,
    pub state: JobState,
    /// Only in files with checksums.
    pub mark: Mark,
}

/// A property of a record that C beanstalkd ignores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mark {
    /// Nothing.
    #[default]
    None = 0,
    /// A worker has reserved the buried job. Flushes of buried jobs do not delete it.
    Held = 1,
    /// The record is of the delete of a flushed job. It needs the record of the flush before it.
    Flushed = 2,
    /// The same, and the flush was of the buried jobs.
    FlushedBuried = 3,
}

impl Mark {
    const ALL: [Mark; 4] = [Mark::None, Mark::Held, Mark::Flushed, Mark::FlushedBuried];

    /// Returns whether a flush has deleted the job before.
    pub fn is_flushed(self) -> bool {
        matches!(self, Mark::Flushed | Mark::FlushedBuried)
    }
}

/// The jobs that a flush deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushKind {
    /// All jobs of the tube.
    All,
    /// The buried jobs of the tube.
    Buried,
}

/// What a flush deletes, and when it was decided: at this moment the jobs were deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    pub kind: FlushKind,
    pub decided_at: Nanos,
}

/// The key of a unique job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRecord {
    /// The id of the job that has or had the key.
    pub id: u64,
    pub digest: Digest,
    pub secret: Secret,
    /// For how many seconds the key is kept after the delete of the job.
    pub ttl_secs: u32,
    /// Since 1970. The job is deleted, and its key is kept until then. `None` while there is the job.
    pub kept_until: Option<Nanos>,
    /// The group of the job, of which only some may be reserved. A deleted job has none.
    pub con: Option<Con>,
}

/// The state of a job, in a record and for clients. The numbers are those of C beanstalkd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JobState {
    /// For clients, the key of the job is kept.
    #[default]
    Deleted = 0,
    Ready = 1,
    Reserved = 2,
    Buried = 3,
    Delayed = 4,
}

impl JobState {
    const ALL: [JobState; 5] = {
        use JobState::{Buried, Delayed, Deleted, Ready, Reserved};
        [Deleted, Ready, Reserved, Buried, Delayed]
    };

    /// Returns the name in lists and statistics.
    pub fn name(self) -> &'static str {
        ["deleted", "ready", "reserved", "buried", "delayed"][self as usize]
    }
}

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    Job(Fields),
    /// The key of the job of the next record, or a kept key.
    Key(KeyRecord),
    /// A flush of the tube of the record.
    Flush(Decision),
    Gap(Gap),
    /// The number of the file, and the last id that was given out, so that ids continue from there when all older
    /// files are removed. Only the first record of a file has it: see [`FileHeader`].
    FileHeader(FileNumber, u64, FileEnd),
}

/// How the file before was when a file was begun: the offset behind its last record, or 0 if it is unknown, and
/// its nonce if it has checksums.
pub type FileEnd = (u64, u32);

/// The fields as they are in a record of any content, one after the other.
#[derive(Default)]
struct Raw {
    id: u64,
    pri: u32,
    /// Zero while the checksum is made.
    checksum: u32,
    delay: u64,
    ttr: u64,
    body_len: u32,
    nonce: u32,
    created: u64,
    moment: u64,
    counts: Counts,
    state: u8,
    mark: u8,
}

/// The layout of a file. It follows from the version and the file header record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub version: i32,
    /// Records have checksums.
    pub has_checksums: bool,
    /// The offset of the name of the tube in a record in bytes.
    name_at: usize,
    /// The length of the fields in bytes.
    fields_len: usize,
    /// The unit of times.
    nanos_per_tick: i64,
}

/// The version at the head of the files that this server writes.
pub const VERSION: [u8; VERSION_LEN] = 7_i32.to_ne_bytes();

/// The length of the version in bytes.
pub const VERSION_LEN: usize = 4;

/// The length of the version and the file header record in bytes.
pub const FILE_HEAD_LEN: usize = VERSION_LEN + SHORT_LEN;

/// The length of a short record in bytes.
pub const SHORT_LEN: usize = NAME_LENGTH_LEN + FIELDS_LEN;

/// The length of the longest body in bytes, with CR LF.
const MAX_BODY_LEN: u64 = (1 << 30) + 2;

/// The id of the file header record. No job has it.
const FILE_HEADER_ID: u64 = u64::MAX;
/// The ids of records of flushes. No job has them.
pub const FLUSH_ALL_ID: u64 = u64::MAX - 1;
pub const FLUSH_BURIED_ID: u64 = u64::MAX - 2;
/// The id of records of keys. No job has it.
pub const KEY_ID: u64 = u64::MAX - 3;
/// The id of records of gaps. No job has it.
pub const GAP_ID: u64 = u64::MAX - 4;
/// The highest id that is plausible. A higher one is believed only if the ids before it were
/// nearly as high.
pub const HIGHEST_ID: u64 = u64::MAX - (1 << 40);

const NAME_LENGTH_LEN: usize = 4;
const FIELDS_LEN: usize = 80;

/// The offset of the checksum, in bytes from the first field.
const CHECKSUM_AT: usize = 12;

thread_local! {
    /// The checksum of no bytes. To look for the instructions that the processor has takes a quarter as long as
    /// to sum a short record.
    static CRC: crc32fast::Hasher = crc32fast::Hasher::new();
}

// ---- To bytes ----

/// Returns the length of the full record of a job in bytes. `body_len` includes the CR LF.
pub fn full_len(tube: &str, body_len: usize) -> usize {
    SHORT_LEN + tube.len() + body_len
}

/// Appends a record with a checksum to `out`, with the first `copied` bytes of its body. A short record has an
/// empty tube and body.
#[inline(always)]
pub fn write(
    out: &mut Vec<u8>,
    content: &Content,
    tube: &str,
    body: &[u8],
    copied: usize,
    nonce: u32,
) {
    let start = out.len();
    let name_len = i32::try_from(tube.len()).expect("a name of a tube has at most 200 bytes");
    out.extend_from_slice(&name_len.to_ne_bytes());
    out.extend_from_slice(tube.as_bytes());
    let checksum_at = out.len() + CHECKSUM_AT;
    out.extend_from_slice(&Raw { nonce, ..content.to_raw() }.to_bytes());
    let (copied, rest) = body.split_at(copied);
    out.extend_from_slice(copied);
    let mut crc = CRC.with(Clone::clone);
    crc.update(&out[start..]);
    if !rest.is_empty() {
        crc.update(rest);
    }
    out[checksum_at..checksum_at + 4].copy_from_slice(&crc.finalize().to_ne_bytes());
}

impl Content {
    /// Returns whether the record of a flush has the effect of this one: without it, this one need not be synced.
    pub fn is_implied(&self) -> bool {
        matches!(self, Content::Job(fields) if fields.mark.is_flushed())
    }

    fn to_raw(self) -> Raw {
        match self {
            Content::Job(job) => Raw {
                id: job.id,
                pri: job.pri,
                delay: Nanos::from_secs(job.delay_secs).as_nanos(),
                ttr: Nanos::from_secs(job.ttr_secs).as_nanos(),
                body_len: job.body_len,
                created: job.created_at.as_nanos(),
                moment: job.due_or_buried_at.as_nanos(),
                counts: job.counts,
                state: job.state as u8,
                mark: job.mark as u8,
                ..Raw::default()
            },
            Content::Key(key) => {
                let ([delay, ttr], [a, b, c, d]) = (key.secret.0, key.digest.0);
                let Con { group, limit } = key.con.unwrap_or_default();
                let moment = key.kept_until.map_or(group, |until| until.as_nanos().max(1));
                let (pri, created, counts) = (key.ttl_secs, key.id, [a, b, c, d, limit]);
                Raw { id: KEY_ID, pri, delay, ttr, created, moment, counts, ..Raw::default() }
            }
            Content::Flush(Decision { kind, decided_at }) => {
                let id = match kind {
                    FlushKind::All => FLUSH_ALL_ID,
                    FlushKind::Buried => FLUSH_BURIED_ID,
                };
                Raw { id, created: decided_at.as_nanos(), ..Raw::default() }
            }
            Content::Gap((first, last)) => {
                Raw { id: GAP_ID, created: first.into(), moment: last.into(), ..Raw::default() }
            }
            Content::FileHeader(number, moment, (delay, pri)) => {
                let created = number.into();
                Raw { id: FILE_HEADER_ID, pri, delay, created, moment, ..Raw::default() }
            }
        }
    }
}

impl Raw {
    fn to_bytes(&self) -> [u8; FIELDS_LEN] {
        let (mut bytes, mut at) = ([0; FIELDS_LEN], 0);
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&self.id.to_ne_bytes());
        put(&self.pri.to_ne_bytes());
        put(&self.checksum.to_ne_bytes());
        put(&self.delay.to_ne_bytes());
        put(&self.ttr.to_ne_bytes());
        put(&self.body_len.to_ne_bytes());
        put(&self.nonce.to_ne_bytes());
        put(&self.created.to_ne_bytes());
        put(&self.moment.to_ne_bytes());
        self.counts.into_iter().for_each(|count| put(&count.to_ne_bytes()));
        put(&[self.state, self.mark]);
        bytes
    }

    fn of_bytes(mut bytes: &[u8]) -> Raw {
        let rest = &mut bytes;
        Raw {
            id: u64::from_ne_bytes(take(rest)),
            pri: u32::from_ne_bytes(take(rest)),
            checksum: u32::from_ne_bytes(take(rest)),
            delay: u64::from_ne_bytes(take(rest)),
            ttr: u64::from_ne_bytes(take(rest)),
            body_len: u32::from_ne_bytes(take(rest)),
            nonce: u32::from_ne_bytes(take(rest)),
            created: u64::from_ne_bytes(take(rest)),
            moment: u64::from_ne_bytes(take(rest)),
            counts: [(); 5].map(|()| u32::from_ne_bytes(take(rest))),
            state: take::<1>(rest)[0],
            // Version 5 has none.
            mark: rest.first().copied().unwrap_or_default(),
        }
    }
}

// ---- From bytes ----

/// The part of a record before its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// The id of the job, or the one that stands for another content.
    pub id: u64,
    pub content: Content,
    /// The length of the name of the tube in bytes; 0 in a short record.
    pub tube_len: usize,
    /// The length of the head in bytes.
    pub len: usize,
    /// The length in bytes of the body that follows.
    pub body_len: usize,
    /// The nonce of its file, in a file with checksums.
    pub nonce: u32,
}

impl Head {
    /// Returns the length of the record in bytes, with its body.
    pub fn record_len(&self) -> u64 {
        (self.len + self.body_len) as u64
    }
}

impl Layout {
    /// The layout of C beanstalkd 1.4.
    pub const V5: Layout = Layout {
        version: 5,
        has_checksums: false,
        name_at: 8,
        fields_len: 77,
        nanos_per_tick: 1_000,
    };
    /// The layout of later versions of C beanstalkd.
    pub const V7: Layout = Layout {
        version: 7,
        name_at: NAME_LENGTH_LEN,
        fields_len: FIELDS_LEN,
        nanos_per_tick: 1,
        ..Layout::V5
    };
    /// The layout of this server: version 7 with checksums.
    pub const V7_WITH_CRC: Layout = Layout { has_checksums: true, ..Layout::V7 };

    /// The length of the longest head of a record in bytes.
    pub const LONGEST_HEAD: usize = 8 + TUBE_NAME_MAX + FIELDS_LEN;

    /// Returns the length in bytes of the head of a record of a job in this tube.
    pub fn head_len(self, tube: &str) -> usize {
        self.name_at + tube.len() + self.fields_len
    }

    /// Returns the name of the tube in an intact record.
    pub fn tube(self, record: &[u8], tube_len: usize) -> &str {
        str::from_utf8(&record[self.name_at..][..tube_len]).expect("the record is intact")
    }

    /// Reads the head of the record at the start of `bytes`.
    pub fn read(self, bytes: &[u8]) -> Result<Head, Corruption> {
        let name_len = match self.name_at {
            // A negative length is out of range too.
            NAME_LENGTH_LEN => bytes.first_chunk().map(|&word| u32::from_ne_bytes(word).into()),
            _ => bytes.first_chunk().map(|&word| u64::from_ne_bytes(word)),
        };
        let name_len = name_len.ok_or(Corruption::CUT_SHORT)?;
        let tube_len = usize::try_from(name_len).ok().filter(|&len| len <= TUBE_NAME_MAX);
        let tube_len = tube_len.ok_or(Corruption::NAME_LENGTH)?;
        let fields_at = self.name_at + tube_len;
        let len = fields_at + self.fields_len;
        let head = bytes.get(..len).ok_or(Corruption::CUT_SHORT)?;
        let (name, fields) = (&head[self.name_at..fields_at], &head[fields_at..]);
        let raw = Raw::of_bytes(fields);
        if raw.id == 0 {
            let is_blank = head.iter().all(|&byte| byte == 0);
            return Err(if is_blank { Corruption::ZEROS } else { Corruption::ID });
        }
        let is_short = name.is_empty();
        let of_job = self.fields(&raw)?;
        if !is_short && !is_tube_name(name) {
            return Err(Corruption::NAME);
        }
        let is_deleted = of_job.state == JobState::Deleted;
        let flush = |kind| Some(Content::Flush(Decision { kind, decided_at: of_job.created_at }));
        let content = match raw.id {
            id if id < GAP_ID => Some(Content::Job(of_job)),
            _ if !self.has_checksums || !is_deleted => None,
            FLUSH_ALL_ID if !is_short => flush(FlushKind::All),
            FLUSH_BURIED_ID if !is_short => flush(FlushKind::Buried),
            KEY_ID if is_short => key_of(&raw),
            GAP_ID if is_short => gap_of(&raw),
            _ => None,
        };
        let content = content.ok_or(Corruption::ID)?;
        // The full record of a delete has no body.
        let has_body = !is_short && !is_deleted;
        let is_body = (CR_LF.len() as u64..=MAX_BODY_LEN).contains(&u64::from(raw.body_len));
        if has_body && !is_body {
            return Err(Corruption::BODY_LENGTH);
        }
        let body_len = if has_body { raw.body_len as usize } else { 0 };
        Ok(Head { id: raw.id, content, tube_len, len, body_len, nonce: raw.nonce })
    }

    /// Checks a whole record, whose head has `head_len` bytes.
    pub fn verify(self, record: &[u8], head_len: usize) -> Result<(), Corruption> {
        let (head, body) = record.split_at(head_len);
        if !body.is_empty() && !body.ends_with(CR_LF) {
            return Err(Corruption::BODY_END);
        }
        if !self.has_checksums {
            return Ok(());
        }
        let (before, checksum_on) = head.split_at(head_len - FIELDS_LEN + CHECKSUM_AT);
        let mut crc = CRC.with(Clone::clone);
        crc.update(before);
        crc.update(&[0; 4]);
        crc.update(&checksum_on[4..]);
        crc.update(body);
        let is_intact = crc.finalize().to_ne_bytes() == checksum_on[..4];
        if is_intact { Ok(()) } else { Err(Corruption::CHECKSUM) }
    }

    fn fields(self, raw: &Raw) -> Result<Fields, Corruption> {
        let nanos = |ticks: u64| {
            // It is limited to what version 7 can have.
            let nanos = ticks.cast_signed().saturating_mul(self.nanos_per_tick);
            Nanos::from_nanos(u64::try_from(nanos).unwrap_or(0))
        };
        let secs = |ticks| u32::try_from(nanos(ticks).whole_secs()).unwrap_or(u32::MAX);
        let mark = Mark::ALL.get(usize::from(raw.mark)).filter(|_| self.has_checksums);
        Ok(Fields {
            id: raw.id,
            pri: raw.pri,
            delay_secs: secs(raw.delay),
            ttr_secs: secs(raw.ttr),
            body_len: raw.body_len,
            created_at: nanos(raw.created),
            due_or_buried_at: nanos(raw.moment),
            counts: raw.counts,
            state: *JobState::ALL.get(usize::from(raw.state)).ok_or(Corruption::STATE)?,
            mark: mark.copied().unwrap_or_default(),
        })
    }
}

/// Returns the key of such a record, if a job can have its id.
fn key_of(raw: &Raw) -> Option<Content> {
    let [a, b, c, d, limit] = raw.counts;
    (raw.created > 0).then_some(Content::Key(KeyRecord {
        id: raw.created,
        digest: Digest([a, b, c, d]),
        secret: Secret([raw.delay, raw.ttr]),
        ttl_secs: raw.pri,
        kept_until: (limit == 0 && raw.moment > 0).then_some(Nanos::from_nanos(raw.moment)),
        con: (limit > 0).then_some(Con { group: raw.moment, limit }),
    }))
}

/// Returns the gap of such a record, if it is possible.
fn gap_of(raw: &Raw) -> Option<Content> {
    let number = |number: u64| FileNumber::try_from(number).ok();
    let (first, last) = number(raw.created).zip(number(raw.moment))?;
    (1..=last).contains(&first).then_some(Content::Gap((first, last)))
}

/// Returns the body in the full record of the job `id`. An error means that the bytes are not those
/// that were written: the record is damaged, or another one.
pub fn body_of(bytes: &[u8], layout: Layout, id: u64) -> Result<&[u8], Corruption> {
    let Head { id: found, len, body_len, .. } = layout.read(bytes)?;
    if found != id || bytes.len() != len + body_len {
        return Err(Corruption::OTHER_RECORD);
    }
    layout.verify(bytes, len)?;
    Ok(&bytes[len..])
}

/// Returns the first bytes, and removes them.
fn take<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
    let (first, rest) = bytes.split_first_chunk().expect("the caller has checked the length");
    *bytes = rest;
    *first
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
        counts: [1, 2, 3, 4, 5],
        state: JobState::Delayed,
        mark: Mark::None,
    };
    const NONCE: u32 = 0x4142_4344;

    fn record(tube: &str, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, &Content::Job(FIELDS), tube, body, body.len(), NONCE);
        bytes
    }

    #[test]
    fn fields_have_the_offsets_of_c_beanstalkd() {
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
    fn the_checksum_covers_the_record_with_a_zero_checksum() {
        for (tube, body) in [("mail", &b"hello\r\n"[..]), ("", b"")] {
            let mut bytes = record(tube, body);
            let at = 4 + tube.len() + 12;
            let checksum = u32::from_ne_bytes(take(&mut &bytes[at..]));
            bytes[at..at + 4].fill(0);
            assert_eq!(checksum, crc32fast::hash(&bytes));
        }
    }

    #[test]
    fn a_written_record_is_read_back() {
        let bytes = record("mail", b"hello\r\n");
        let (id, content) = (FIELDS.id, Content::Job(FIELDS));
        let head = Head { id, content, tube_len: 4, len: 88, body_len: 7, nonce: NONCE };
        assert_eq!(Layout::V7_WITH_CRC.read(&bytes), Ok(head));
        assert_eq!(Layout::V7_WITH_CRC.verify(&bytes, head.len), Ok(()));
        assert_eq!(Layout::V7_WITH_CRC.tube(&bytes, head.tube_len), "mail");
        for len in 0..88 {
            assert_eq!(Layout::V7_WITH_CRC.read(&bytes[..len]), Err(Corruption::CUT_SHORT));
        }
        assert_eq!(Layout::V7.read(&[0; 84]), Err(Corruption::ZEROS));
    }

    /// A short record of such a job would be taken for something else.
    #[test]
    fn no_job_has_the_id_of_a_flush_or_a_key() {
        let read = |layout: Layout, fields: Fields, tube| {
            let mut bytes = Vec::new();
            write(&mut bytes, &Content::Job(fields), tube, b"", 0, NONCE);
            layout.read(&bytes).map(|_| ())
        };
        for (id, is_of_tube) in
            [(FLUSH_ALL_ID, true), (FLUSH_BURIED_ID, true), (KEY_ID, false), (GAP_ID, false)]
        {
            for (tube, is_right) in [("mail", is_of_tube), ("", !is_of_tube)] {
                let first = Nanos::ONE;
                let fields =
                    Fields { id, created_at: first, due_or_buried_at: first, ..Fields::default() };
                let expected = if is_right { Ok(()) } else { Err(Corruption::ID) };
                assert_eq!(read(Layout::V7_WITH_CRC, fields, tube), expected, "{id}");
                assert_eq!(read(Layout::V7, fields, tube), Err(Corruption::ID), "{id}");
                let job = Fields { id, ..FIELDS };
                assert_eq!(read(Layout::V7_WITH_CRC, job, tube), Err(Corruption::ID), "{id}");
            }
        }
        let below = Fields { id: GAP_ID - 1, ..FIELDS };
        assert_eq!(read(Layout::V7, below, "mail"), Ok(()));
    }

    #[test]
    fn a_written_key_is_read_back_and_is_a_delete_of_no_job() {
        let con = Some(Con { group: 5, limit: 7 });
        for (kept_until, con) in [(None, None), (None, con), (Some(Nanos::from_secs(77)), None)] {
            let content = Content::Key(KeyRecord {
                id: 0x0102_0304_0506_0708,
                digest: Digest([1, 2, 3, u32::MAX]),
                secret: Secret([u64::MAX, 0x1112_1314_1516_1718]),
                ttl_secs: u32::MAX,
                kept_until,
                con,
            });
            let mut bytes = Vec::new();
            write(&mut bytes, &content, "", b"", 0, 9);
            assert_eq!(bytes.len(), SHORT_LEN);
            let len = SHORT_LEN;
            let head = Head { id: KEY_ID, content, tube_len: 0, len, body_len: 0, nonce: 9 };
            assert_eq!(Layout::V7_WITH_CRC.read(&bytes), Ok(head));
            assert_eq!(Layout::V7_WITH_CRC.verify(&bytes, len), Ok(()));
        }
    }

    #[test]
    fn a_file_header_with_a_flipped_bit_is_recognized_as_damaged() {
        let mut bytes = Vec::new();
        let before = (1000, 6);
        write(&mut bytes, &Content::FileHeader(5, 77, before), "", b"", 0, NONCE);
        let intact = FileHeader::Intact { number: 5, last_id: 77, before, nonce: NONCE };
        assert_eq!(FileHeader::read(&bytes), intact);
        for bit in 0..SHORT_LEN * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(FileHeader::read(&damaged), FileHeader::Damaged, "bit {bit}");
        }
        assert_eq!(FileHeader::read(&record("mail", b"hello\r\n")), FileHeader::None);
        assert_eq!(FileHeader::read(&record("", b"")), FileHeader::None);
        assert_eq!(FileHeader::read(&[0; SHORT_LEN]), FileHeader::Blank);
        assert_eq!(FileHeader::read(&bytes[1..]), FileHeader::None);
    }
}
