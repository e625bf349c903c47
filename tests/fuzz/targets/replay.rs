//! A start on a directory of binlog files in whatever state, and what is done with the jobs then.
//!
//! The first two bytes choose how the rest is meant and how the binlog is kept. The rest is either
//! the bytes of the files themselves, or a program that makes them: records whose fields are
//! seldom what they should be, one after the other, some of them damaged. Checksums would stop
//! most mutations at the door, so those of files as they are can be put right, and those of a
//! program are right unless it says otherwise.

use super::{Bytes, START, ask, ask_bytes, field, number, read_log, server};
use crate::fake_disk::FakeDisk;
use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Nanos;
use beanstalkd::testing::ReplayError;
use beanstalkd::testing::Syncing;
use beanstalkd::testing::inspect;
use beanstalkd::testing::record;
use beanstalkd::testing::{Server, Settings};
use std::collections::{BTreeMap, HashSet};

type Files = BTreeMap<String, Vec<u8>>;
/// Every job with every body that a record says it has, CR LF and all.
type Written = HashSet<(u64, Vec<u8>)>;

/// Stands between two files.
pub const NEXT_FILE: &[u8] = b"\xff\xfe<next file>";
/// The modes that `mode` is made of.
pub const REPAIRED: u8 = 1;
pub const PROGRAM: u8 = 2;
const FULL_DISK: u8 = 1;
const LARGE: u8 = 2;

const MAX_FILES: usize = 4;
/// No more jobs than this are looked at one by one.
const MAX_JOBS: usize = 40;
/// No file becomes longer than this.
const MAX_FILE_LEN: usize = 400_000;

/// How the binlog is kept.
#[derive(Clone, Copy)]
struct Policy {
    file_size: u32,
    syncing: Syncing,
    /// How many bytes more than there are the disk takes, if it is nearly full.
    left: Option<u64>,
    /// Bodies and gaps may be longer than a window of the reader; that takes a while.
    is_large: bool,
}

/// Any directory at all.
pub fn run(bytes: &[u8]) {
    read_log();
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
    let policy = Policy {
        file_size: [4096, 16_384, 65_536, 1 << 18][usize::from(mode >> 2) % 4],
        syncing: [
            Syncing::EachIteration,
            Syncing::Within(Nanos::from_millis(50)),
            Syncing::Never,
            Syncing::Never,
        ][usize::from(mode >> 4) % 4],
        left: (more & FULL_DISK > 0).then(|| u64::from(more >> 4) * 4096),
        is_large,
    };
    judge(&files, policy, first > 7, written.as_ref());
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

/// Files are not cut while they are written to.
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

/// What stays of a job when the server is started again.
type Jobs = BTreeMap<u64, View>;

/// A job as a client sees it.
#[derive(Debug)]
struct View {
    /// All but the file that it is in, and seconds.
    text: String,
    /// Its age and the time left, which change when a second is full.
    seconds: [u64; 2],
}

fn judge(files: &Files, policy: Policy, numbers_end: bool, written: Option<&Written>) {
    let before = Look::at(files);
    let disk = FakeDisk::with_files(files);
    disk.set_capacity(policy.left.map(|left| disk.used() + left));
    let may_lack_space = policy.left.is_some() || numbers_end;
    let mut engine = match Engine::start(&disk, policy, START) {
        Ok(engine) => engine,
        Err(error) => {
            assert!(matches!(error, ReplayError::Begin(_)) && may_lack_space, "{error}");
            let after = Look::at(&disk.live_files());
            assert_eq!(after.jobs, before.jobs, "a start in vain has lost nothing");
            return;
        }
    };
    assert_eq!(engine.jobs_recovered, before.jobs.len() as u64, "a look tells as many jobs");
    for (&id, job) in before.jobs.iter().take(MAX_JOBS) {
        engine.check_job(id, job);
        if let Some(written) = written {
            engine.check_body(id, written);
        }
    }
    let mut ids: Vec<u64> = before.jobs.keys().copied().take(MAX_JOBS).collect();
    let body_lens: &[usize] = if policy.is_large { &[3, 70_000] } else { &[0, 1, 4100] };
    let put = engine.put(body_lens, &ids, may_lack_space);
    ids.extend(put);
    engine.work(&ids, may_lack_space);
    engine.idle();
    let jobs = engine.jobs(&ids);
    let now = engine.now;

    let restart = |disk: &FakeDisk| match Engine::start(disk, policy, now) {
        Err(ReplayError::Begin(_)) if numbers_end => None,
        engine => Some(engine.unwrap()),
    };
    let crashed = FakeDisk::with_files(&disk.live_files());
    if let Some(mut again) = restart(&crashed) {
        assert_same(&jobs, &mut again, &ids, may_lack_space);
    }
    engine.server.close(now).unwrap();
    let told = told(&disk);
    assert!(!is_damaged(&told) || may_lack_space, "damaged files are set aside: {told}");
    let has_set_aside = disk.live_files().keys().any(|name| name.ends_with(".damaged"));
    assert!(has_set_aside == before.is_damaged || may_lack_space, "no others are: {told}");
    disk.set_capacity(None);
    if let Some(mut again) = restart(&disk) {
        assert_same(&jobs, &mut again, &ids, may_lack_space);
    }
}

/// Where space is short a job may stay reserved, and that is not recorded.
fn assert_same(jobs: &(u64, Jobs), again: &mut Engine, ids: &[u64], may_lack_space: bool) {
    let found = again.jobs(ids);
    assert_eq!(found.0, jobs.0, "as many jobs are there again");
    assert!(
        found.1.keys().eq(jobs.1.keys()),
        "{:?} are there, not {:?}",
        found.1.keys(),
        jobs.1.keys()
    );
    for (before, after) in jobs.1.values().zip(found.1.values()).filter(|_| !may_lack_space) {
        assert_eq!(after.text, before.text);
        let are_near = before.seconds.iter().zip(after.seconds).all(|(a, b)| a.abs_diff(b) <= 1);
        let (from, to) = (before.seconds, after.seconds);
        assert!(are_near, "{} had {from:?} and has {to:?}", before.text);
    }
}

/// What `--check` tells.
fn told(disk: &FakeDisk) -> String {
    let mut told = Vec::new();
    let is_sound = inspect::check(&mut *disk.boxed(), &mut told).unwrap();
    let told = String::from_utf8(told).unwrap();
    assert_eq!(is_sound, told.ends_with(": sound\n"), "{told}");
    told
}

fn is_damaged(told: &str) -> bool {
    told.contains("\n  damage at ")
}

/// What `--check` and `--dump` tell.
struct Look {
    is_damaged: bool,
    /// Each as it is dumped.
    jobs: BTreeMap<u64, String>,
}

impl Look {
    fn at(files: &Files) -> Look {
        let disk = FakeDisk::with_files(files);
        let told = told(&disk);
        let mut dumped = Vec::new();
        let is_sound = inspect::dump(&mut *disk.boxed(), &mut dumped).unwrap();
        assert_eq!(disk.live_files(), *files, "a look changes nothing");
        let dumped = String::from_utf8(dumped).unwrap();
        let jobs: BTreeMap<u64, String> = dumped
            .lines()
            .map(|line| (json(line, "id").parse().unwrap(), line.to_owned()))
            .collect();
        assert_eq!(jobs.len(), dumped.lines().count(), "each job is told once");
        let sum = told.lines().last().unwrap();
        let count = disk.boxed().list().unwrap().len();
        let is_told = sum.contains(&format!("{count} files, {} jobs: ", jobs.len()));
        assert!(is_told, "{} jobs are dumped, but: {sum}", jobs.len());
        assert_eq!(is_sound, sum.ends_with(": sound"), "both say whether it is sound");
        Look { is_damaged: is_damaged(&told), jobs }
    }
}

/// A value in a line of JSON, without quotes; the keys come before all that a client chose but
/// for the tube, which can have no quotes.
fn json<'l>(line: &'l str, key: &str) -> &'l str {
    let (_, rest) = line.split_once(&format!("\"{key}\":")).unwrap();
    rest.split([',', '}']).next().unwrap().trim_matches('"')
}

struct Engine {
    server: Server,
    key: ConnKey,
    now: Nanos,
    jobs_recovered: u64,
    last_id: u64,
}

impl Engine {
    fn start(disk: &FakeDisk, policy: Policy, now: Nanos) -> Result<Engine, ReplayError> {
        let settings = Settings {
            max_job_size: 1 << 20,
            binlog_file_size: policy.file_size,
            ..Settings::DEFAULT
        };
        let mut server = server(settings, now);
        let recovered = server.recover(disk.boxed(), policy.syncing, now)?;
        let key = server.connect().unwrap();
        let (jobs_recovered, last_id) = (recovered.jobs, recovered.last_id);
        Ok(Engine { server, key, now, jobs_recovered, last_id })
    }

    fn ask(&mut self, input: &str) -> String {
        ask(&mut self.server, self.key, input, self.now)
    }

    /// Compares a job with what was told of it.
    fn check_job(&mut self, id: u64, told: &str) {
        let text = self.ask(&format!("stats-job {id}\r\n"));
        let now_ns = self.now.as_nanos();
        let is_due = || {
            let has_delay = json(told, "delay") != "0";
            !has_delay || json(told, "due_at_ns").parse::<u64>().unwrap() <= now_ns
        };
        let state = match json(told, "state") {
            "reserved" => "ready",
            "delayed" if is_due() => "ready",
            state => state,
        };
        assert_eq!(field(&text, "state"), Some(state), "{told}\n{text}");
        assert_eq!(field(&text, "tube"), Some(json(told, "tube")), "{told}\n{text}");
        for key in ["pri", "delay", "reserves", "timeouts", "releases", "buries", "kicks"] {
            assert_eq!(field(&text, key), Some(json(told, key)), "{key}: {told}\n{text}");
        }
        let ttr_secs: u32 = json(told, "ttr").parse().unwrap();
        assert_eq!(number(&text, "ttr"), u64::from(ttr_secs.max(1)));
    }

    /// Whatever is damaged, where there are checksums nobody is handed a body that was not written.
    fn check_body(&mut self, id: u64, written: &Written) {
        let found = ask_bytes(&mut self.server, self.key, &format!("peek {id}\r\n"), self.now);
        let body = found.splitn(2, |&byte| byte == b'\n').nth(1).unwrap_or_default();
        let is_written = written.contains(&(id, body.to_vec()));
        assert!(is_written, "job {id} never had this body: {}", found.escape_ascii());
    }

    /// New jobs beside these; says which.
    fn put(&mut self, body_lens: &[usize], ids: &[u64], may_lack_space: bool) -> Vec<u64> {
        let mut put = Vec::new();
        for &body_len in body_lens {
            let body = "x".repeat(body_len);
            let reply = self.ask(&format!("put 7 0 100 {body_len}\r\n{body}\r\n"));
            let Some(id) = reply.trim_end().strip_prefix("INSERTED ") else {
                assert!(reply == "OUT_OF_MEMORY\r\n" && may_lack_space, "{reply}");
                continue;
            };
            let id: u64 = id.parse().unwrap();
            assert!(id > self.last_id && !ids.contains(&id), "{id} was given out before");
            put.push(id);
        }
        put
    }

    /// Some of everything that jobs go through.
    fn work(&mut self, ids: &[u64], may_lack_space: bool) {
        for (index, id) in ids.iter().enumerate() {
            let (commands, replies) = match index % 5 {
                0 => (format!("reserve-job {id}\r\nrelease {id} 3 5\r\n"), "RELEASED\r\n"),
                1 => (format!("reserve-job {id}\r\nbury {id} 4\r\n"), "BURIED\r\n"),
                2 => {
                    (format!("reserve-job {id}\r\nbury {id} 4\r\nkick-job {id}\r\n"), "KICKED\r\n")
                }
                3 => (format!("delete {id}\r\n"), "DELETED\r\n"),
                _ => continue,
            };
            let said = self.ask(&commands);
            let is_done = said.ends_with(replies);
            let is_refused = may_lack_space && said.contains("OUT_OF_MEMORY\r\n");
            assert!(is_done || is_refused, "{commands}{:?}", said.lines().last());
        }
    }

    /// Lets a few seconds pass, with whatever there is to do in them.
    fn idle(&mut self) {
        let end = self.now + Nanos::from_secs(10);
        let mut steps_at_once = 0;
        while let Some(due) = self.server.next_due().filter(|&due| due <= end) {
            steps_at_once = if due > self.now { 0 } else { steps_at_once + 1 };
            assert!(steps_at_once < 10_000, "there is always something to do at once");
            self.now = self.now.max(due);
            self.server.tick(self.now);
            self.server.commit(self.now).unwrap();
        }
        self.now = end;
        self.server.tick(self.now);
        self.server.commit(self.now).unwrap();
        self.server.check();
    }

    /// How many jobs there are, and what is told of these. None is left reserved.
    fn jobs(&mut self, ids: &[u64]) -> (u64, Jobs) {
        const VOLATILE: [&str; 3] = ["age: ", "time-left: ", "file: "];
        let stats = self.ask("stats\r\n");
        let sum = |states: &[&str]| -> u64 {
            states.iter().map(|state| number(&stats, &format!("current-jobs-{state}"))).sum()
        };
        let mut jobs = Jobs::new();
        for id in ids {
            let told = self.ask(&format!("stats-job {id}\r\npeek {id}\r\n"));
            assert!(told.ends_with("\r\n"), "job {id} has no end");
            if told != "NOT_FOUND\r\nNOT_FOUND\r\n" {
                let (_, document) = told.split_once("---\n").unwrap();
                let is_kept = |line: &&str| !VOLATILE.iter().any(|key| line.starts_with(key));
                let text: String = document.split_inclusive('\n').filter(is_kept).collect();
                let seconds = ["age", "time-left"].map(|key| number(document, key));
                jobs.insert(*id, View { text, seconds });
            }
        }
        (sum(&["ready", "reserved", "delayed", "buried"]), jobs)
    }
}

// ---- Checksums ----

const VERSION_7: [u8; 4] = 7_i32.to_ne_bytes();
const HEAD_LEN: usize = 4 + 80;
const FILE_HEAD_LEN: usize = 4 + HEAD_LEN;
// Where the fields are, from the first one on.
const CHECKSUM_AT: usize = 12;
const BODY_LEN_AT: usize = 32;
const NONCE_AT: usize = 36;
const STATE_AT: usize = 76;

/// The file with the nonce and the checksum that each of its records should have, as far as it can
/// be told where one ends.
fn repaired(file: &[u8]) -> Vec<u8> {
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

/// How long the record at the start of `bytes` says it is, if all of it is there.
fn record_len(bytes: &[u8]) -> Option<usize> {
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
    // Only the length of the name is looked at.
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
    /// The record written last.
    last: Vec<u8>,
    written: Written,
    /// A file may be taken for one without checksums.
    may_be_unchecked: bool,
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
    fn new(bytes: Bytes<'_>, is_large: bool) -> Program<'_> {
        Program {
            bytes,
            files: Vec::new(),
            kind: Kind::Checked,
            nonce: *b"once",
            is_large,
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

    /// What should stand at the head of a file only, or elsewhere.
    fn odd_head(&mut self) {
        match self.bytes.byte() % 4 {
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
        let is_plain = self.bytes.byte() < 0x80;
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
            bytes.extend([0; 3]);
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
