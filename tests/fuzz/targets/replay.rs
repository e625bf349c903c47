//! A start on binlog files in any state, and commands for the jobs that come back.
//!
//! The first two bytes choose how the binlog is kept. The rest is a program that writes the files
//! (`program.rs`).

use super::program::{Program, Written};
use super::{Bytes, check_log};
use crate::harness::driver::{Nanos, Options, START, Syncing, is_of_first_file};
use crate::harness::fake_disk::{FakeDisk, Files};
use crate::harness::instance::Instance;
use crate::harness::request::put;
use crate::harness::yaml::{field, number};
use beanstalkd::testing::inspect;
use std::collections::BTreeMap;

/// Two bits of the second byte.
const FULL_DISK: u8 = 1;
const LARGE: u8 = 2;

pub const MAX_FILES: usize = 4;
/// The most jobs that are compared one by one.
const MAX_JOBS: usize = 40;
/// No file becomes longer than this.
pub const MAX_FILE_LEN: usize = 400_000;

pub fn run(bytes: &[u8]) {
    check_log();
    let mut bytes = Bytes(bytes);
    let (mode, more) = (bytes.byte(), bytes.byte());
    let is_large = more & LARGE > 0;
    let mut program = Program::run(bytes, is_large);
    for file in &mut program.files {
        // Zeros of a file that was being written to.
        let aligned = file.len().next_multiple_of(4096) - file.len();
        let zeros = [0, 50, aligned, if is_large { 70_000 } else { 84 }][usize::from(mode >> 6)];
        file.resize((file.len() + zeros).min(MAX_FILE_LEN), 0);
    }
    let (first, step) =
        [(1, 1), (7, 1), (3, 2), (i32::MAX as usize - 3, 1)][usize::from(more >> 2) % 4];
    let names = (0..).map(|place| format!("binlog.{}", first + place * step));
    let files: Files = names.zip(program.files).collect();
    let syncing = match mode >> 4 & 3 {
        0 => Syncing::EachIteration,
        1 => Syncing::Within(Nanos::from_millis(50)),
        _ => Syncing::Never,
    };
    let file_size = [4096, 16_384, 65_536, 1 << 18][usize::from(mode >> 2) % 4];
    let case = Case {
        options: Options::binlog(file_size, syncing),
        left: (more & FULL_DISK > 0).then(|| u64::from(more >> 4) * 4096),
        is_large,
        numbers_end: first > 7,
    };
    judge(&files, case, Some(program.written).filter(|_| !program.may_be_unchecked).as_ref());
}

// ---- The judge ----

/// The directory of a case.
#[derive(Clone, Copy)]
struct Case {
    options: Options,
    /// The free space, if the disk is nearly full.
    left: Option<u64>,
    /// Bodies and gaps may be longer than a window of the reader, which costs time.
    is_large: bool,
    /// Few more files can have a number.
    numbers_end: bool,
}

impl Case {
    fn may_lack_space(self) -> bool {
        self.left.is_some() || self.numbers_end
    }

    /// Starts a server, unless no file number is left.
    fn restart(self, disk: &FakeDisk, now: Nanos) -> Option<Instance> {
        match Instance::try_start(disk, self.options, now) {
            Err(error) if is_of_first_file(&error) && self.numbers_end => None,
            instance => Some(instance.unwrap()),
        }
    }
}

fn judge(files: &Files, case: Case, written: Option<&Written>) {
    let newer = FakeDisk::with_files(files);
    if let Err(error) = inspect::check(&mut *newer.boxed(), &mut Vec::new()) {
        assert!(error.to_string().contains("this server reads versions"), "{error}");
        assert!(Instance::try_start(&newer, case.options, START).is_err(), "a newer file is read");
        assert_eq!(newer.live_files(), *files, "a start that is refused changes files");
        return;
    }
    let before = Inspection::of(files);
    let disk = FakeDisk::with_files(files);
    disk.faults().capacity = case.left.map(|left| disk.used() + left);
    let mut server = match Instance::try_start(&disk, case.options, START) {
        Ok(server) => server,
        Err(error) => {
            let lacks_space = is_of_first_file(&error) && case.may_lack_space();
            assert!(lacks_space, "{error}");
            let after = Inspection::of(&disk.live_files());
            assert_eq!(after.jobs, before.jobs, "a failed start changes the jobs");
            return;
        }
    };
    let jobs = before.jobs.len() as u64;
    assert_eq!(server.recovered.jobs, jobs, "--dump has another number of jobs");
    for (&id, dumped) in before.jobs.iter().take(MAX_JOBS) {
        check_job(&mut server, id, dumped, written);
    }
    let mut ids: Vec<u64> = before.jobs.keys().copied().take(MAX_JOBS).collect();
    put_jobs(&mut server, case, &mut ids);
    work(&mut server, &ids, case);
    // Not until a full second: the timer of a job that is due at the very end may run some
    // microseconds later, and a restart then finds it due.
    server.advance(Nanos::from_millis(10_001));
    server.check();
    let jobs = read_jobs(&mut server, &ids);
    let now = server.now;

    let crashed = FakeDisk::with_files(&disk.live_files());
    if let Some(mut again) = case.restart(&crashed, now) {
        assert_same(&jobs, &read_jobs(&mut again, &ids), &before, case);
    }
    server.close();
    let report = report(&disk);
    assert!(!is_damaged(&report) || case.may_lack_space(), "damage is left: {report}");
    let has_set_aside = disk.live_files().keys().any(|name| name.ends_with(".damaged"));
    let is_right = has_set_aside == before.is_damaged || case.may_lack_space();
    assert!(is_right, "wrong files are set aside: {report}");
    disk.faults().capacity = None;
    if let Some(mut again) = case.restart(&disk, now) {
        assert_same(&jobs, &read_jobs(&mut again, &ids), &before, case);
    }
}

/// Compares a job with its line of `--dump`, and its body with those that were written: with checksums
/// no damage leads to another one.
fn check_job(server: &mut Instance, id: u64, dumped: &str, written: Option<&Written>) {
    let text = server.ask_now(format!("stats-job {id}\r\n"));
    let now = server.now.as_nanos();
    let is_due = || json(dumped, "delay") == "0" || due_at_ns(dumped) <= now;
    let state = match json(dumped, "state") {
        "reserved" => "ready",
        "delayed" if is_due() => "ready",
        state => state,
    };
    assert_eq!(field(&text, "state"), Some(state), "{dumped}\n{text}");
    for key in ["tube", "pri", "delay", "reserves", "timeouts", "releases", "buries", "kicks"] {
        assert_eq!(field(&text, key), Some(json(dumped, key)), "{key}: {dumped}\n{text}");
    }
    let ttr_secs: u32 = json(dumped, "ttr").parse().unwrap();
    assert_eq!(number(&text, "ttr"), u64::from(ttr_secs.max(1)));
    let client = server.client;
    server.receive(client, format!("peek {id}\r\n"));
    server.settle();
    let found = server.take(client);
    let body = found.splitn(2, |&byte| byte == b'\n').nth(1).unwrap_or_default();
    let is_written = written.is_none_or(|written| written.contains(&(id, body.to_vec())));
    assert!(is_written, "job {id} never had this body: {}", found.escape_ascii());
}

fn put_jobs(server: &mut Instance, case: Case, ids: &mut Vec<u64>) {
    let body_lens: &[usize] = if case.is_large { &[3, 70_000] } else { &[0, 1, 4100] };
    for &body_len in body_lens {
        let reply = server.ask_now(put(7, 0, 100, "x".repeat(body_len)));
        let Some(id) = reply.trim_end().strip_prefix("INSERTED ") else {
            assert!(reply == "OUT_OF_MEMORY\r\n" && case.may_lack_space(), "{reply}");
            continue;
        };
        let id: u64 = id.parse().unwrap();
        assert!(id > server.recovered.last_id && !ids.contains(&id), "{id} was assigned before");
        ids.push(id);
    }
}

/// What is done with each fifth job, and the last reply.
const WORK: [(&str, &str); 4] = [
    ("reserve-job ID\r\nrelease ID 3 5\r\n", "RELEASED\r\n"),
    ("reserve-job ID\r\nbury ID 4\r\n", "BURIED\r\n"),
    ("reserve-job ID\r\nbury ID 4\r\nkick-job ID\r\n", "KICKED\r\n"),
    ("delete ID\r\n", "DELETED\r\n"),
];

fn work(server: &mut Instance, ids: &[u64], case: Case) {
    for (index, id) in ids.iter().enumerate() {
        let Some((commands, reply)) = WORK.get(index % 5) else { continue };
        let replied = server.ask_now(commands.replace("ID", &id.to_string()));
        let is_refused = case.may_lack_space() && replied.contains("OUT_OF_MEMORY\r\n");
        assert!(replied.ends_with(reply) || is_refused, "{id}: {commands}{replied}");
    }
}

/// What a restart keeps: the number of all jobs, and some of them: `stats-job` without the file and
/// seconds, and the body; the age and the time left.
type Jobs = (u64, BTreeMap<u64, (String, [u64; 2])>);

fn read_jobs(server: &mut Instance, ids: &[u64]) -> Jobs {
    const VOLATILE: [&str; 3] = ["age: ", "time-left: ", "file: "];
    let stats = server.ask_now("stats\r\n");
    let states = ["ready", "reserved", "delayed", "buried"];
    let counts = states.map(|state| number(&stats, &format!("current-jobs-{state}")));
    let mut jobs = BTreeMap::new();
    for id in ids {
        let view = server.ask_now(format!("stats-job {id}\r\npeek {id}\r\n"));
        assert!(view.ends_with("\r\n"), "job {id} has no end");
        if view != "NOT_FOUND\r\nNOT_FOUND\r\n" {
            let (_, document) = view.split_once("---\n").unwrap();
            let is_kept = |line: &&str| !VOLATILE.iter().any(|key| line.starts_with(key));
            let text = document.split_inclusive('\n').filter(is_kept).collect();
            jobs.insert(*id, (text, ["age", "time-left"].map(|key| number(document, key))));
        }
    }
    (counts.iter().sum(), jobs)
}

/// Asserts that a restart has kept the jobs. If space is short, a job may stay reserved, which is not
/// recorded.
fn assert_same(jobs: &Jobs, found: &Jobs, at_first: &Inspection, case: Case) {
    assert_eq!(found.0, jobs.0, "the number of jobs changes with a restart");
    assert!(found.1.keys().eq(jobs.1.keys()), "other jobs: {found:?}, not {jobs:?}");
    for ((id, before), after) in jobs.1.iter().zip(found.1.values()) {
        assert!(after.0 == before.0 || case.may_lack_space(), "{after:?}, not {before:?}");
        let (from, mut to) = (before.1, after.1);
        if at_first.jobs.get(id).is_some_and(|dumped| is_due_too_late(dumped)) {
            to[1] = from[1];
        }
        let are_near = from.iter().zip(to).all(|(a, b)| a.abs_diff(b) <= 1);
        assert!(are_near || case.may_lack_space(), "{} had {from:?} and has {to:?}", before.0);
    }
}

// ---- `--check` and `--dump` ----

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
        let job = |line: &str| (json(line, "id").parse().unwrap(), line.to_owned());
        let jobs: BTreeMap<u64, String> = dumped.lines().map(job).collect();
        assert_eq!(jobs.len(), dumped.lines().count(), "--dump has a job twice");
        let sum = report.lines().last().unwrap();
        let count = disk.boxed().list().unwrap().len();
        let is_equal = sum.contains(&format!("{count} files, {} jobs: ", jobs.len()));
        assert!(is_equal, "--dump has {} jobs, --check: {sum}", jobs.len());
        assert_eq!(is_sound, sum.ends_with(": sound"), "--check and --dump disagree");
        Inspection { is_damaged: is_damaged(&report), jobs }
    }
}

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

/// Returns a value in a line of JSON, without quotes. The keys come before all text of clients except
/// the tube, which has no quotes.
fn json<'l>(line: &'l str, key: &str) -> &'l str {
    let (_, rest) = line.split_once(&format!("\"{key}\":")).unwrap();
    rest.split([',', '}']).next().unwrap().trim_matches('"')
}

fn due_at_ns(dumped: &str) -> u64 {
    json(dumped, "due_at_ns").parse().unwrap()
}

/// Returns whether a delayed job was due later than its delay allows. The clock was set back then, and
/// each start begins the delay again.
fn is_due_too_late(dumped: &str) -> bool {
    let delay_ns = json(dumped, "delay").parse::<u64>().unwrap() * 1_000_000_000;
    json(dumped, "state") == "delayed" && due_at_ns(dumped) > START.as_nanos() + delay_ns
}
