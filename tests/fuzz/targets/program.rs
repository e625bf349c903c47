//! A program that writes binlog files with odd records, and damages some of them. Its checksums are
//! correct unless it damages them, so that mutations of the program reach the code behind the checksums.

use super::Bytes;
use super::replay::{MAX_FILE_LEN, MAX_FILES};
use crate::harness::driver::START;
use crate::harness::record::{self, Record, VERSION_5, VERSION_7};
use std::collections::HashSet;

/// Every job with every body that a record has for it, with CR LF.
pub type Written = HashSet<(u64, Vec<u8>)>;

/// How the records of a file are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// With a file header and checksums.
    Checked,
    V7,
    V5,
}

pub struct Program<'b> {
    bytes: Bytes<'b>,
    pub files: Vec<Vec<u8>>,
    kind: Kind,
    nonce: u32,
    is_large: bool,
    /// The next record is of this job.
    next_id: Option<u64>,
    /// The record written last.
    last: Vec<u8>,
    pub written: Written,
    /// A file may be taken for one without checksums.
    pub may_be_unchecked: bool,
}

const IDS: [u64; 12] =
    [1, 2, 3, 4, 8, 9, 1 << 20, u64::MAX - 1, u64::MAX, u64::MAX - (1 << 40), 0, u64::MAX / 2];
const NUMBERS: [u64; 14] = [
    0,
    1,
    2,
    1023,
    1024,
    u32::MAX as u64,
    1 << 30,
    1_000_000_000,
    60_000_000_000,
    u32::MAX as u64 * 1_000_000_000,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
    START.as_nanos(),
];
const BODY_LENS: [usize; 10] = [0, 1, 5, 40, 200, 700, 4093, 4094, 66_000, 140_000];
const GAP_LENS: [usize; 9] = [1, 3, 16, 79, 84, 88, 512, 4096, 70_000];
/// From here on they are large.
const LARGE_LEN: usize = 10_000;
const TUBES: [&str; 6] = ["default", "a", "b", "mail", "-bad", "no good"];

impl Program<'_> {
    /// Runs a program. `is_large` if bodies and gaps may be longer than a window of the reader.
    pub fn run(bytes: Bytes<'_>, is_large: bool) -> Program<'_> {
        let mut program = Program {
            bytes,
            files: Vec::new(),
            kind: Kind::Checked,
            nonce: 7,
            is_large,
            next_id: None,
            last: Vec::new(),
            written: Written::new(),
            may_be_unchecked: false,
        };
        program.begin_file();
        while !program.bytes.0.is_empty() && program.file().len() < MAX_FILE_LEN / 2 {
            program.step();
        }
        program
    }

    fn file(&mut self) -> &mut Vec<u8> {
        self.files.last_mut().unwrap()
    }

    fn begin_file(&mut self) {
        if self.files.len() == MAX_FILES {
            return;
        }
        self.kind = self.bytes.one_of(&[Kind::Checked, Kind::Checked, Kind::V7, Kind::V5]);
        self.files.push(if self.kind == Kind::V5 { VERSION_5 } else { VERSION_7 }.to_vec());
        if self.kind == Kind::Checked {
            self.file_header();
        } else {
            self.may_be_unchecked = true;
        }
    }

    fn step(&mut self) {
        match self.bytes.byte() % 20 {
            0..=5 => {
                let len = self.len(&BODY_LENS);
                let mut body = vec![self.bytes.byte(); len];
                body.extend_from_slice(b"\r\n");
                self.full(&body, None);
            }
            6..=10 => self.job(Record::default()),
            11 => {
                // A body that looks like records.
                let body = [&self.last[..], b"\r\n"].concat();
                self.full(&body, None);
            }
            12 => {
                let claimed = cut(self.number());
                self.full(b"short\r\n", Some(claimed));
            }
            13 => {
                let len = self.bytes.byte().into();
                let raw = self.bytes.take(len).to_vec();
                self.file().extend(raw);
            }
            14 => {
                let len = self.len(&GAP_LENS) + self.file().len();
                self.file().resize(len, 0);
            }
            15 => self.damage(),
            16 => {
                let len = self.file().len().saturating_sub(self.bytes.byte().into());
                self.file().truncate(len);
                self.may_be_unchecked |= len < record::FILE_HEAD_LEN;
            }
            17 => self.begin_file(),
            18 => {
                let repeated = self.last.repeat((self.bytes.byte() % 32).into());
                self.file().extend(repeated);
            }
            _ => self.odd_head(),
        }
    }

    /// What should stand at the head of a file only, or elsewhere; or the record of a flush or a key.
    fn odd_head(&mut self) {
        let kind = self.bytes.byte();
        match kind % 4 {
            _ if kind >= 0xc0 => {
                let id = [record::FLUSH_ALL, record::FLUSH_BURIED][usize::from(kind % 2)];
                let tube = TUBES[usize::from(kind >> 1) % TUBES.len()];
                let created_at_ns = self.moment();
                self.write(Record { id, tube, created_at_ns, ..Record::default() });
            }
            _ if kind >= 0x80 => self.key(kind),
            0 => self.file_header(),
            1 => self.nonce = u32::from(self.bytes.byte()),
            2 => {
                self.may_be_unchecked = true;
                let version = self.bytes.byte();
                self.file().first_mut().into_iter().for_each(|first| *first = version);
            }
            _ => {
                self.may_be_unchecked = true;
                let end = self.file().len().min(512);
                self.file()[..end].fill(0);
            }
        }
    }

    /// The record of a key, and mostly a record of its job behind it.
    fn key(&mut self, kind: u8) {
        let id = self.id();
        let counts = [u32::from(self.bytes.byte() % 4), 1, 2, 3, 0];
        let pri = cut(self.number());
        let moment_ns = if kind.is_multiple_of(2) { 0 } else { self.moment() };
        // Mostly one secret.
        let delay_ns = u64::from(kind % 16 == 15);
        let key = Record { id: record::KEY, pri, delay_ns, ttr_ns: 7, counts, ..Record::default() };
        self.write(Record { created_at_ns: id, moment_ns, ..key });
        self.next_id = (kind % 8 < 6).then_some(id);
        match kind % 4 {
            0 | 2 => self.full(b"body\r\n", None),
            1 => self.job(Record::default()),
            _ => {}
        }
    }

    fn damage(&mut self) {
        let back = usize::from(self.bytes.byte()) * usize::from(self.bytes.byte() % 4 + 1);
        let mask = self.bytes.byte();
        let len = self.file().len();
        if let Some(at) = len.checked_sub(back + 1) {
            self.file()[at] ^= mask;
            self.may_be_unchecked |= at < record::FILE_HEAD_LEN;
        }
    }

    // ---- Fields ----

    fn len(&mut self, lens: &[usize]) -> usize {
        let len = self.bytes.one_of(lens);
        if self.is_large || len < LARGE_LEN { len } else { len % 100 }
    }

    fn id(&mut self) -> u64 {
        self.next_id.take().unwrap_or_else(|| self.bytes.number(&IDS))
    }

    fn number(&mut self) -> u64 {
        self.bytes.number(&NUMBERS)
    }

    /// A moment, mostly one near the present.
    fn moment(&mut self) -> u64 {
        match self.bytes.byte() {
            secs @ 0..0xc0 => START.as_nanos() - 96_000_000_000 + u64::from(secs) * 1_000_000_000,
            _ => self.number(),
        }
    }

    // ---- Records ----

    fn file_header(&mut self) {
        let moment_ns = self.id();
        self.write(Record { id: record::FILE_HEADER, moment_ns, ..Record::default() });
    }

    /// A full record of a job.
    fn full(&mut self, body: &[u8], body_len: Option<u32>) {
        let tube = match self.bytes.byte() {
            0xff => "t".repeat(200),
            0xfe => "t".repeat(201),
            byte => TUBES[usize::from(byte) % TUBES.len()].to_owned(),
        };
        self.job(Record { tube: &tube, body, body_len, ..Record::default() });
    }

    fn job(&mut self, record: Record<'_>) {
        let id = self.id();
        let state = match self.bytes.byte() {
            byte @ 0xf0.. => byte,
            byte => byte % 5,
        };
        let chance = self.bytes.byte();
        // A worker has reserved the buried job.
        let mark = if chance % 8 == 7 { record::HELD } else { 0 };
        let mut number = |plain| if chance < 0x80 { plain } else { self.number() };
        let (pri, delay_ns, ttr_ns) = (cut(number(7)), number(0), number(60_000_000_000));
        let counts = std::array::from_fn(|_| cut(number(1)));
        let (created_at_ns, moment_ns) = (self.moment(), self.moment());
        let times = Record { delay_ns, ttr_ns, created_at_ns, moment_ns, ..record };
        self.write(Record { id, state, pri, counts, mark, ..times });
    }

    fn write(&mut self, record: Record<'_>) {
        let has_body = !record.tube.is_empty() && record.state != record::DELETED;
        let claimed = record.body_len.or_else(|| u32::try_from(record.body.len()).ok());
        let body = if has_body { record.body } else { &[] };
        let record = Record { body, body_len: claimed, ..record };
        let bytes = match self.kind {
            Kind::Checked => record.v7(Some(self.nonce)),
            Kind::V7 => record.v7(None),
            Kind::V5 => record.v5(),
        };
        if has_body {
            self.written.insert((record.id, body.to_vec()));
        }
        self.file().extend(&bytes);
        self.last = bytes;
    }
}

#[expect(clippy::cast_possible_truncation, reason = "what does not fit is cut")]
fn cut(number: u64) -> u32 {
    number as u32
}
