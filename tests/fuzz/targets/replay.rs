//! A start on binlog files in any state, and commands for the jobs that come back.
//!
//! The first two bytes choose the meaning of the rest and how the binlog is kept. The rest is either
//! the bytes of the files, or a program that writes records with odd fields and damages some of them.
//! Checksums would reject most mutations, so the mode can repair those of files, and a program
//! writes correct checksums unless it damages them.

use super::{Bytes, check_log};
use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::{FakeDisk, Files};
use crate::harness::fixtures::START;
use crate::harness::request::put;
use crate::harness::yaml::{field, number};
use beanstalkd::testing::{Nanos, ReplayError, Syncing, inspect, record};
use std::collections::{BTreeMap, HashSet};

/// Every job with every body that a record has for it, with CR LF.
type Written = HashSet<(u64, Vec<u8>)>;

/// The bytes between two files.
pub const NEXT_FILE: &[u8] = b"\xff\xfe<next file>";
/// The modes that `mode` is made of.
pub const REPAIRED: u8 = 1;
pub const PROGRAM: u8 = 2;
const FULL_DISK: u8 = 1;
const LARGE: u8 = 2;

const MAX_FILES: usize = 4;
/// The most jobs that are compared one by one.
const MAX_JOBS: usize = 40;
/// No file becomes longer than this.
const MAX_FILE_LEN: usize = 400_000;

/// The directory of a case.
#[derive(Clone, Copy)]
struct Case {
    policy: Policy,
    /// The free space, if the disk is nearly full.
    left: Option<u64>,
    /// Bodies and gaps may be longer than a window of the reader, which costs time.
    is_large: bool,
}

/// Judges any directory.
pub fn run(bytes: &[u8]) {
    check_log();
    let mut bytes = Bytes(bytes);
    let (mode, more) = (bytes.byte(), bytes.byte());
    let is_large = more & LARGE > 0;
    let mut written: Option<Written> = None;
    let mut contents = if mode & PROGRAM == 0 {
        let files = split(bytes.0, NEXT_FILE);
        let fix = |file: &[u8]| if mode & REPAIRED == 0 { file.to_vec() } else { repaired(file) };
        files.into_iter().take(MAX_FILES).map(fix).collect()
    } else {
        let program = Program::new(bytes, is_large).run();
        written = Some(program.written).filter(|_| !program.may_be_unchecked);
        program.files
    };
    for content in &mut contents {
        add_zeros(content, mode >> 6, is_large);
    }
    let (first, step) =
        [(1, 1), (7, 1), (3, 2), (i32::MAX as usize - 3, 1)][usize::from(more >> 2) % 4];
    let names = (0..).map(|place| format!("binlog.{}", first + place * step));
    let files: Files = names.zip(contents).collect();
    let policy = Policy::new(
        [4096, 16_384, 65_536, 1 << 18][usize::from(mode >> 2) % 4],
        [
            Syncing::EachIteration,
            Syncing::Within(Nanos::from_millis(50)),
            Syncing::Never,
            Syncing::Never,
        ][usize::from(mode >> 4) % 4],
    );
    let left = (more & FULL_DISK > 0).then(|| u64::from(more >> 4) * 4096);
    let case = Case { policy, left, is_large };
    judge(&files, case, first > 7, written.as_ref());
}

fn split<'b>(mut bytes: &'b [u8], separator: &[u8]) -> Vec<&'b [u8]> {
    let mut parts = Vec::new();
    while let Some(at) = bytes.windows(separator.len()).position(|window| window == separator) {
        parts.push(&bytes[..at]);
        bytes = &bytes[at + separator.len()..];
    }
    parts.push(bytes);
    parts
}

/// Adds the zeros of a file that was being written to.
fn add_zeros(file: &mut Vec<u8>, kind: u8, is_large: bool) {
    let len = match kind {
        0 => file.len(),
        1 => file.len() + 50,
        2 => file.len().next_multiple_of(4096),
        _ => file.len() + if is_large { 70_000 } else { 84 },
    };
    file.resize(len.min(MAX_FILE_LEN), 0);
}

// ---- The judge ----

/// What a restart keeps of each job.
type Jobs = BTreeMap<u64, View>;

/// A job as a client sees it.
#[derive(Debug)]
struct View {
    /// `stats-job` without the file and seconds.
    text: String,
    /// Its age and the time left, which change when a second is full.
    seconds: [u64; 2],
}

fn judge(files: &Files, case: Case, numbers_end: bool, written: Option<&Written>) {
    let before = Inspection::of(files);
    let disk = FakeDisk::with_files(files);
    disk.set_capacity(case.left.map(|left| disk.used() + left));
    let may_lack_space = case.left.is_some() || numbers_end;
    let mut engine = match Instance::try_start(&disk, case.policy, START) {
        Ok(engine) => engine,
        Err(error) => {
            assert!(matches!(error, ReplayError::Begin(_)) && may_lack_space, "{error}");
            let after = Inspection::of(&disk.live_files());
            assert_eq!(after.jobs, before.jobs, "a failed start changes the jobs");
            return;
        }
    };
    assert_eq!(
        engine.recovered.jobs,
        before.jobs.len() as u64,
        "--dump has another number of jobs"
    );
    for (&id, job) in before.jobs.iter().take(MAX_JOBS) {
        check_job(&mut engine, id, job);
        if let Some(written) = written {
            check_body(&mut engine, id, written);
        }
    }
    let mut ids: Vec<u64> = before.jobs.keys().copied().take(MAX_JOBS).collect();
    let body_lens: &[usize] = if case.is_large { &[3, 70_000] } else { &[0, 1, 4100] };
    let put_ids = put_jobs(&mut engine, body_lens, &ids, may_lack_space);
    ids.extend(put_ids);
    work(&mut engine, &ids, may_lack_space);
    idle_10_seconds(&mut engine);
    let jobs = read_jobs(&mut engine, &ids);
    let now = engine.now;

    let restart = |disk: &FakeDisk| match Instance::try_start(disk, case.policy, now) {
        Err(ReplayError::Begin(_)) if numbers_end => None,
        engine => Some(engine.unwrap()),
    };
    let crashed = FakeDisk::with_files(&disk.live_files());
    if let Some(mut again) = restart(&crashed) {
        assert_same(&jobs, &mut again, &before, &ids, may_lack_space);
    }
    engine.close();
    let report = report(&disk);
    assert!(!is_damaged(&report) || may_lack_space, "damage is left: {report}");
    let has_set_aside = disk.live_files().keys().any(|name| name.ends_with(".damaged"));
    assert!(
        has_set_aside == before.is_damaged || may_lack_space,
        "wrong files are set aside: {report}"
    );
    disk.set_capacity(None);
    if let Some(mut again) = restart(&disk) {
        assert_same(&jobs, &mut again, &before, &ids, may_lack_space);
    }
}

/// Asserts that a restart has kept the jobs. If space is short, a job may stay reserved, which is not
/// recorded.
fn assert_same(
    jobs: &(u64, Jobs),
    again: &mut Instance,
    at_first: &Inspection,
    ids: &[u64],
    may_lack_space: bool,
) {
    let found = read_jobs(again, ids);
    assert_eq!(found.0, jobs.0, "the number of jobs changes with a restart");
    assert!(found.1.keys().eq(jobs.1.keys()), "other jobs: {found:?}, not {jobs:?}");
    for ((id, before), after) in jobs.1.iter().zip(found.1.values()).filter(|_| !may_lack_space) {
        assert_eq!(after.text, before.text);
        let (from, mut to) = (before.seconds, after.seconds);
        if at_first.jobs.get(id).is_some_and(|dumped| is_due_too_late(dumped)) {
            to[1] = from[1];
        }
        let are_near = from.iter().zip(to).all(|(a, b)| a.abs_diff(b) <= 1);
        assert!(are_near, "{} had {from:?} and has {to:?}", before.text);
    }
}

/// Returns the report of `--check`.
fn report(disk: &FakeDisk) -> String {
    let mut report = Vec::new();
    let is_sound = inspect::check(&mut *disk.boxed(), &mut report).unwrap();
    let report = String::from_utf8(report).unwrap();
    assert_eq!(is_sound, report.ends_with(": sound\n"), "{report}");
    report
}

fn is_damaged(report: &str) -> bool {
    report.contains("\n  damage at ")
}

/// What `--check` and `--dump` report.
struct Inspection {
    is_damaged: bool,
    /// The line of each job.
    jobs: BTreeMap<u64, String>,
}

impl Inspection {
    fn of(files: &Files) -> Inspection {
        let disk = FakeDisk::with_files(files);
        let report = report(&disk);
        let mut dumped = Vec::new();
        let is_sound = inspect::dump(&mut *disk.boxed(), &mut dumped).unwrap();
        assert_eq!(disk.live_files(), *files, "the inspection changes files");
        let dumped = String::from_utf8(dumped).unwrap();
        let jobs: BTreeMap<u64, String> = dumped
            .lines()
            .map(|line| (json(line, "id").parse().unwrap(), line.to_owned()))
            .collect();
        assert_eq!(jobs.len(), dumped.lines().count(), "--dump has a job twice");
        let sum = report.lines().last().unwrap();
        let count = disk.boxed().list().unwrap().len();
        let is_equal = sum.contains(&format!("{count} files, {} jobs: ", jobs.len()));
        assert!(is_equal, "--dump has {} jobs, --check: {sum}", jobs.len());
        assert_eq!(is_sound, sum.ends_with(": sound"), "--check and --dump disagree");
        Inspection { is_damaged: is_damaged(&report), jobs }
    }
}

/// Returns a value in a line of JSON, without quotes. The keys come before all text of clients except
/// the tube, which has no quotes.
fn json<'l>(line: &'l str, key: &str) -> &'l str {
    let (_, rest) = line.split_once(&format!("\"{key}\":")).unwrap();
    rest.split([',', '}']).next().unwrap().trim_matches('"')
}

/// Returns whether a delayed job was due later than its delay allows. The clock was set back then, and each
/// start begins the delay again.
fn is_due_too_late(dumped: &str) -> bool {
    let delay_ns = json(dumped, "delay").parse::<u64>().unwrap() * 1_000_000_000;
    json(dumped, "state") == "delayed"
        && json(dumped, "due_at_ns").parse::<u64>().unwrap() > START.as_nanos() + delay_ns
}

/// Compares a job with its line of `--dump`.
fn check_job(engine: &mut Instance, id: u64, dumped: &str) {
    let text = engine.ask_now(format!("stats-job {id}\r\n"));
    let now_ns = engine.now.as_nanos();
    let is_due = || {
        let has_delay = json(dumped, "delay") != "0";
        !has_delay || json(dumped, "due_at_ns").parse::<u64>().unwrap() <= now_ns
    };
    let state = match json(dumped, "state") {
        "reserved" => "ready",
        "delayed" if is_due() => "ready",
        state => state,
    };
    assert_eq!(field(&text, "state"), Some(state), "{dumped}\n{text}");
    assert_eq!(field(&text, "tube"), Some(json(dumped, "tube")), "{dumped}\n{text}");
    for key in ["pri", "delay", "reserves", "timeouts", "releases", "buries", "kicks"] {
        assert_eq!(field(&text, key), Some(json(dumped, key)), "{key}: {dumped}\n{text}");
    }
    let ttr_secs: u32 = json(dumped, "ttr").parse().unwrap();
    assert_eq!(number(&text, "ttr"), u64::from(ttr_secs.max(1)));
}

/// Asserts that with checksums no damage leads to a body that was not written.
fn check_body(engine: &mut Instance, id: u64, written: &Written) {
    let conn = engine.conn;
    let found = engine.ask_bytes(conn, format!("peek {id}\r\n"));
    let body = found.splitn(2, |&byte| byte == b'\n').nth(1).unwrap_or_default();
    let is_written = written.contains(&(id, body.to_vec()));
    assert!(is_written, "job {id} never had this body: {}", found.escape_ascii());
}

/// Puts jobs with these lengths of bodies; returns their ids.
fn put_jobs(
    engine: &mut Instance,
    body_lens: &[usize],
    ids: &[u64],
    may_lack_space: bool,
) -> Vec<u64> {
    let mut put_ids = Vec::new();
    for &body_len in body_lens {
        let reply = engine.ask_now(put(7, 0, 100, "x".repeat(body_len)));
        let Some(id) = reply.trim_end().strip_prefix("INSERTED ") else {
            assert!(reply == "OUT_OF_MEMORY\r\n" && may_lack_space, "{reply}");
            continue;
        };
        let id: u64 = id.parse().unwrap();
        assert!(id > engine.recovered.last_id && !ids.contains(&id), "{id} was assigned before");
        put_ids.push(id);
    }
    put_ids
}

/// Releases, buries, kicks or deletes each job.
fn work(engine: &mut Instance, ids: &[u64], may_lack_space: bool) {
    for (index, id) in ids.iter().enumerate() {
        let (commands, replies) = match index % 5 {
            0 => (format!("reserve-job {id}\r\nrelease {id} 3 5\r\n"), "RELEASED\r\n"),
            1 => (format!("reserve-job {id}\r\nbury {id} 4\r\n"), "BURIED\r\n"),
            2 => (format!("reserve-job {id}\r\nbury {id} 4\r\nkick-job {id}\r\n"), "KICKED\r\n"),
            3 => (format!("delete {id}\r\n"), "DELETED\r\n"),
            _ => continue,
        };
        let replied = engine.ask_now(&commands);
        let is_done = replied.ends_with(replies);
        let is_refused = may_lack_space && replied.contains("OUT_OF_MEMORY\r\n");
        assert!(is_done || is_refused, "{commands}{:?}", replied.lines().last());
    }
}

/// Runs what comes due within 10 seconds. It ends between two seconds: the timer of a job that is due at the
/// very end may run some microseconds later, and a restart then finds it due.
fn idle_10_seconds(engine: &mut Instance) {
    let end = engine.now + Nanos::from_millis(10_001);
    let mut steps_at_once = 0;
    while let Some(due) = engine.server.next_due().filter(|&due| due <= end) {
        steps_at_once = if due > engine.now { 0 } else { steps_at_once + 1 };
        assert!(steps_at_once < 10_000, "work is due in the same moment again and again");
        engine.now = engine.now.max(due);
        engine.tick();
        engine.commit();
    }
    engine.now = end;
    engine.tick();
    engine.commit();
    engine.server.check();
}

/// Returns the number of jobs and the views of these jobs.
fn read_jobs(engine: &mut Instance, ids: &[u64]) -> (u64, Jobs) {
    const VOLATILE: [&str; 3] = ["age: ", "time-left: ", "file: "];
    let stats = engine.ask_now("stats\r\n");
    let sum = |states: &[&str]| -> u64 {
        states.iter().map(|state| number(&stats, &format!("current-jobs-{state}"))).sum()
    };
    let mut jobs = Jobs::new();
    for id in ids {
        let view = engine.ask_now(format!("stats-job {id}\r\npeek {id}\r\n"));
        assert!(view.ends_with("\r\n"), "job {id} has no end");
        if view != "NOT_FOUND\r\nNOT_FOUND\r\n" {
            let (_, document) = view.split_once("---\n").unwrap();
            let is_kept = |line: &&str| !VOLATILE.iter().any(|key| line.starts_with(key));
            let text: String = document.split_inclusive('\n').filter(is_kept).collect();
            let seconds = ["age", "time-left"].map(|key| number(document, key));
            jobs.insert(*id, View { text, seconds });
        }
    }
    (sum(&["ready", "reserved", "delayed", "buried"]), jobs)
}

// ---- Checksums ----

const VERSION_7: [u8; 4] = 7_i32.to_ne_bytes();
pub const HEAD_LEN: usize = 4 + 80;
const FILE_HEAD_LEN: usize = 4 + HEAD_LEN;
// Where the fields are, from the first one on.
const CHECKSUM_AT: usize = 12;
const BODY_LEN_AT: usize = 32;
pub const NONCE_AT: usize = 36;
const STATE_AT: usize = 76;

/// Returns the file with correct nonces and checksums, as far as records can be parsed.
pub fn repaired(file: &[u8]) -> Vec<u8> {
    let mut file = file.to_vec();
    if file.len() < 4 + HEAD_LEN {
        return file;
    }
    let nonce: [u8; 4] = file[4 + 4 + NONCE_AT..][..4].try_into().unwrap();
    let mut at = 4;
    while let Some(len) = record_len(&file[at..]) {
        repair(&mut file[at..at + len], nonce);
        at += len;
    }
    file
}

/// Returns the length of the record at the start of `bytes`, if it is complete.
pub fn record_len(bytes: &[u8]) -> Option<usize> {
    let name_len = usize::try_from(i32::from_ne_bytes(*bytes.first_chunk()?)).ok()?;
    let head_len = HEAD_LEN.checked_add(name_len).filter(|_| name_len <= 200)?;
    let fields = bytes.get(4 + name_len..head_len)?;
    let has_body = name_len > 0 && fields[STATE_AT] != 0;
    let body_len = i32::from_ne_bytes(fields[BODY_LEN_AT..][..4].try_into().unwrap());
    let body_len = if has_body { usize::try_from(body_len).ok()? } else { 0 };
    let is_blank = fields.iter().all(|&byte| byte == 0);
    Some(head_len + body_len).filter(|&len| len <= bytes.len() && !is_blank)
}

fn repair(bytes: &mut [u8], nonce: [u8; 4]) {
    let name_len = usize::try_from(i32::from_ne_bytes(*bytes.first_chunk().unwrap())).unwrap();
    bytes[4 + name_len + NONCE_AT..][..4].copy_from_slice(&nonce);
    let (head, body) = bytes.split_at(HEAD_LEN + name_len);
    // Only the length of the name counts.
    let (_, mut sum) = record::checksum(head, &"n".repeat(name_len));
    sum.update(body);
    let sum = sum.finalize().to_ne_bytes();
    bytes[4 + name_len + CHECKSUM_AT..][..4].copy_from_slice(&sum);
}

// ---- Programs ----

/// How the records of a file are written.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// With a marker and checksums.
    Checked,
    V7,
    V5,
}

/// A program that makes files.
struct Program<'b> {
    bytes: Bytes<'b>,
    files: Vec<Vec<u8>>,
    kind: Kind,
    nonce: [u8; 4],
    is_large: bool,
    /// The next record is of a job that is buried and reserved.
    is_held: bool,
    /// The next record is of this job.
    next_id: Option<u64>,
    /// The record written last.
    last: Vec<u8>,
    written: Written,
    /// A file may be taken for one without checksums.
    may_be_unchecked: bool,
}

const IDS: [u64; 12] =
    [1, 2, 3, 4, 8, 9, 1 << 20, u64::MAX - 1, u64::MAX, u64::MAX - (1 << 40), 0, u64::MAX / 2];
const FLUSH_ALL_ID: u64 = u64::MAX - 1;
const FLUSH_BURIED_ID: u64 = u64::MAX - 2;
pub const KEY_ID: u64 = u64::MAX - 3;
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
    fn new(bytes: Bytes<'_>, is_large: bool) -> Program<'_> {
        Program {
            bytes,
            files: Vec::new(),
            kind: Kind::Checked,
            nonce: *b"once",
            is_large,
            is_held: false,
            next_id: None,
            last: Vec::new(),
            written: Written::new(),
            may_be_unchecked: false,
        }
    }

    fn run(mut self) -> Self {
        self.begin_file();
        while !self.bytes.is_empty() && self.files.last().unwrap().len() < MAX_FILE_LEN / 2 {
            self.step();
        }
        self
    }

    fn file(&mut self) -> &mut Vec<u8> {
        self.files.last_mut().unwrap()
    }

    fn begin_file(&mut self) {
        if self.files.len() == MAX_FILES {
            return;
        }
        self.kind = self.bytes.one_of(&[Kind::Checked, Kind::Checked, Kind::V7, Kind::V5]);
        self.files.push(match self.kind {
            Kind::Checked | Kind::V7 => VERSION_7.to_vec(),
            Kind::V5 => 5_i32.to_ne_bytes().to_vec(),
        });
        if self.kind == Kind::Checked {
            let last_id = self.id();
            self.marker(last_id);
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
                self.full(&body, body.len() as u64);
            }
            6..=10 => self.record("", &[], None),
            11 => {
                // A body that looks like records.
                let body = [&self.last[..], b"\r\n"].concat();
                self.full(&body, body.len() as u64);
            }
            12 => {
                let claimed = self.number();
                self.full(b"short\r\n", claimed);
            }
            13 => {
                let len = usize::from(self.bytes.byte());
                let raw = self.bytes.take(len).to_vec();
                self.file().extend(raw);
            }
            14 => {
                let len = self.len(&GAP_LENS) + self.file().len();
                self.file().resize(len, 0);
            }
            15 => self.damage(),
            16 => {
                let cut = usize::from(self.bytes.byte());
                let len = self.file().len().saturating_sub(cut);
                self.file().truncate(len);
                self.may_be_unchecked |= len < FILE_HEAD_LEN;
            }
            17 => self.begin_file(),
            18 => {
                for _ in 0..self.bytes.byte() % 32 {
                    let last = self.last.clone();
                    self.file().extend(last);
                }
            }
            _ => self.odd_head(),
        }
    }

    /// The record of a key, and mostly a record of its job behind it.
    fn key(&mut self, kind: u8) {
        let id = self.id();
        let digest = u64::from(self.bytes.byte() % 4);
        let ttl = self.number();
        let kept_until = if kind.is_multiple_of(2) { 0 } else { self.moment() };
        // Mostly one secret.
        let secret = u64::from(kind % 16 == 15);
        self.write("", [KEY_ID, ttl, secret, 7, 0, id, kept_until], [digest, 1, 2, 3, 0], 0, &[]);
        self.next_id = (kind % 8 < 6).then_some(id);
        match kind % 4 {
            0 | 2 => self.full(b"body\r\n", 6),
            1 => self.record("", &[], None),
            _ => {}
        }
    }

    /// What should stand at the head of a file only, or elsewhere; or the record of a flush.
    fn odd_head(&mut self) {
        let kind = self.bytes.byte();
        match kind % 4 {
            _ if kind >= 0xc0 => {
                let id = if kind.is_multiple_of(2) { FLUSH_ALL_ID } else { FLUSH_BURIED_ID };
                let tube = TUBES[usize::from(kind >> 1) % TUBES.len()];
                let decided_at = self.moment();
                self.write(tube, [id, 0, 0, 0, 0, decided_at, 0], [0; 5], 0, &[]);
            }
            _ if kind >= 0x80 => self.key(kind),
            0 => {
                let last_id = self.id();
                self.marker(last_id);
            }
            1 => self.nonce = [self.bytes.byte(); 4],
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

    fn damage(&mut self) {
        let back = usize::from(self.bytes.byte()) * usize::from(self.bytes.byte() % 4 + 1);
        let mask = self.bytes.byte();
        let len = self.file().len();
        if let Some(at) = len.checked_sub(back + 1) {
            self.file()[at] ^= mask;
            self.may_be_unchecked |= at < FILE_HEAD_LEN;
        }
    }

    fn len(&mut self, lens: &[usize]) -> usize {
        let len = self.bytes.one_of(lens);
        if self.is_large || len < LARGE_LEN { len } else { len % 100 }
    }

    fn id(&mut self) -> u64 {
        if let Some(id) = self.next_id.take() {
            return id;
        }
        let byte = self.bytes.byte();
        let known = IDS.get(usize::from(byte));
        known.copied().unwrap_or_else(|| if byte < 0xf8 { byte.into() } else { self.bytes.u64() })
    }

    fn number(&mut self) -> u64 {
        let byte = self.bytes.byte();
        let known = NUMBERS.get(usize::from(byte));
        known.copied().unwrap_or_else(|| if byte < 0xf8 { byte.into() } else { self.bytes.u64() })
    }

    /// A moment, mostly one near the present.
    fn moment(&mut self) -> u64 {
        match self.bytes.byte() {
            secs @ 0..0xc0 => START.as_nanos() - 96_000_000_000 + u64::from(secs) * 1_000_000_000,
            _ => self.number(),
        }
    }

    fn full(&mut self, body: &[u8], body_len: u64) {
        let tube = match self.bytes.byte() {
            0xff => "t".repeat(200),
            0xfe => "t".repeat(201),
            byte => TUBES[usize::from(byte) % TUBES.len()].to_owned(),
        };
        self.record(&tube, body, Some(body_len));
    }

    fn record(&mut self, tube: &str, body: &[u8], body_len: Option<u64>) {
        let id = self.id();
        let state = match self.bytes.byte() {
            byte @ 0xf0.. => byte,
            byte => byte % 5,
        };
        let chance = self.bytes.byte();
        let is_plain = chance < 0x80;
        // A worker has reserved the buried job.
        self.is_held = chance % 8 == 7;
        let mut number = |plain| if is_plain { plain } else { self.number() };
        let (pri, delay, ttr) = (number(7), number(0), number(60_000_000_000));
        let mut counts = [0; 5];
        counts.iter_mut().for_each(|count| *count = number(1));
        let (created_at, moment) = (self.moment(), self.moment());
        let body_len = body_len.unwrap_or(0);
        self.write(tube, [id, pri, delay, ttr, body_len, created_at, moment], counts, state, body);
    }

    fn marker(&mut self, last_id: u64) {
        self.write("", [u64::MAX, 0, 0, 0, 0, 0, last_id], [0; 5], 0, &[]);
    }

    #[expect(clippy::cast_possible_truncation, reason = "what does not fit is cut")]
    fn write(&mut self, tube: &str, numbers: [u64; 7], counts: [u64; 5], state: u8, body: &[u8]) {
        let [id, pri, delay, ttr, body_len, created_at, moment] = numbers;
        let is_v5 = self.kind == Kind::V5;
        let mut bytes = if is_v5 {
            (tube.len() as u64).to_ne_bytes().to_vec()
        } else {
            (tube.len() as u32).to_ne_bytes().to_vec()
        };
        let time = |nanos: u64| if is_v5 { nanos / 1000 } else { nanos };
        bytes.extend(tube.as_bytes());
        bytes.extend(id.to_ne_bytes());
        bytes.extend((pri as u32).to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(time(delay).to_ne_bytes());
        bytes.extend(time(ttr).to_ne_bytes());
        bytes.extend((body_len as u32).to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(time(created_at).to_ne_bytes());
        bytes.extend(time(moment).to_ne_bytes());
        for count in counts {
            bytes.extend((count as u32).to_ne_bytes());
        }
        bytes.push(state);
        if !is_v5 {
            bytes.extend([u8::from(std::mem::take(&mut self.is_held)), 0, 0]);
        }
        let has_body = !tube.is_empty() && state != 0;
        bytes.extend(if has_body { body } else { &[] });
        if self.kind == Kind::Checked {
            repair(&mut bytes, self.nonce);
        }
        if has_body {
            self.written.insert((id, body.to_vec()));
        }
        self.file().extend(&bytes);
        self.last = bytes;
    }
}
