//! The binlog on a disk of the tests' own: crashes at every step, torn and reordered writes,
//! flipped bits, full and failing disks.
//!
//! The judge is what a client knows: a [`Journal`] of what it asked for and what was
//! acknowledged. It shares no code with the engine.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod fake_disk;
mod made_up;
mod support;

use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Recovered;
use beanstalkd::testing::Syncing;
use beanstalkd::testing::record::{self, HIGHEST_ID, VERSION};
use beanstalkd::testing::{ClockOffset, Nanos};
use beanstalkd::testing::{Server, Settings};
use fake_disk::FakeDisk;
use std::collections::BTreeMap;
use std::io::{ErrorKind, IoSlice};
use support::field;

// ---- A server with a client ----

/// The engine on a disk, with one connection. What it says is seen only if it was committed.
struct Engine {
    server: Server,
    conn: ConnKey,
    now: Nanos,
    recovered: Recovered,
    turns: u64,
}

const START: Nanos = Nanos::from_secs(1_700_000_000);

impl Engine {
    /// Starts on what is on the disk; nothing when that fails.
    fn try_start(disk: &FakeDisk, policy: Policy, now: Nanos) -> Option<Engine> {
        let settings = Settings {
            max_job_size: 1 << 20,
            binlog_file_size: policy.file_size,
            ..Settings::DEFAULT
        };
        let mut server = Server::new(settings, made_up::facts(START), now);
        let recovered = server.recover(disk.boxed(), policy.syncing, now).ok()?;
        let conn = server.connect().unwrap();
        server.check();
        Some(Engine { server, conn, now, recovered, turns: 0 })
    }

    fn start(disk: &FakeDisk, policy: Policy, now: Nanos) -> Engine {
        Engine::try_start(disk, policy, now).expect("the server starts")
    }

    /// One turn: all of `input`, and what is said to it; nothing when the disk has failed.
    fn turn(&mut self, input: &str) -> Option<String> {
        self.now = self.now + Nanos::from_millis(1);
        self.server.tick(self.now);
        self.server.receive(self.conn, input.as_bytes(), self.now);
        while self.server.actions(self.conn).run {
            self.server.resume(self.conn, self.now);
        }
        let committed = self.server.commit(self.now);
        let only_asks = input.starts_with("stats") || input.starts_with("peek");
        if !only_asks {
            self.check();
        }
        committed.ok()?;
        let mut said = Vec::new();
        loop {
            let mut slices = [IoSlice::new(&[]); 16];
            let mut output_handle = self.server.output_handle(self.conn);
            let filled = output_handle.next_slices(&mut slices);
            if filled == 0 {
                break;
            }
            let before = said.len();
            slices[..filled].iter().for_each(|slice| said.extend_from_slice(slice));
            output_handle.sent(said.len() - before);
        }
        Some(String::from_utf8(said).unwrap())
    }

    /// Sees whether all counts agree: after each turn of a short life, and after some of a long one.
    fn check(&mut self) {
        self.turns += 1;
        if self.turns < 100 || self.turns.is_multiple_of(64) {
            self.server.check();
        }
    }

    /// The same on a disk that works.
    fn ask(&mut self, input: &str) -> String {
        self.turn(input).expect("the disk works")
    }

    /// Lets time pass with nothing to do, at most so many turns.
    fn idle(&mut self, turns: usize) {
        for _ in 0..turns {
            let Some(due) = self.server.next_due() else { break };
            self.now = self.now.max(due);
            self.server.tick(self.now);
            self.server.commit(self.now).expect("the disk works");
            self.check();
        }
        self.server.check();
    }

    fn put(&mut self, body: &str) -> Option<u64> {
        let reply = self.ask(&format!("put 0 0 1000 {}\r\n{body}\r\n", body.len()));
        reply.trim_end().strip_prefix("INSERTED ").map(|id| id.parse().unwrap())
    }

    fn stat(&mut self, key: &str) -> u64 {
        let text = self.ask("stats\r\n");
        field(&text, key).unwrap().parse().unwrap()
    }
}

/// How a binlog is kept.
#[derive(Clone, Copy)]
struct Policy {
    file_size: u32,
    syncing: Syncing,
}

fn policy(file_size: u32, syncing: Syncing) -> Policy {
    Policy { file_size, syncing }
}

// ---- What a client knows ----

/// A job as a client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct View {
    tube: String,
    body: String,
    pri: u32,
    delay_secs: u32,
    ttr_secs: u32,
    state: String,
    /// Of a delayed job: the moment, or when found, how long until then.
    due: Nanos,
    /// reserves, timeouts, releases, buries, kicks
    counts: [u32; 5],
}

/// All that has become of each job, in order.
#[derive(Debug, Default)]
struct Journal {
    jobs: BTreeMap<u64, Vec<Event>>,
    safe: Safe,
}

/// For each job, the last event that nothing may take back: what may be there after a crash is
/// that or whatever came later. What is not recorded is no such event.
#[derive(Clone, Debug, Default)]
struct Safe {
    acknowledged: BTreeMap<u64, usize>,
    /// Even when the power is cut.
    durable: BTreeMap<u64, usize>,
}

/// What a job became: this, or nothing.
#[derive(Debug)]
struct Event {
    view: Option<View>,
    is_recorded: bool,
}

impl Journal {
    fn add(&mut self, id: u64, view: Option<View>) {
        let nothing = || vec![Event { view: None, is_recorded: true }];
        self.jobs.entry(id).or_insert_with(nothing).push(Event { view, is_recorded: true });
    }

    fn add_unrecorded(&mut self, id: u64, view: View) {
        let events = self.jobs.get_mut(&id).expect("a job is put first");
        events.push(Event { view: Some(view), is_recorded: false });
    }

    /// All replies have come.
    fn acknowledge(&mut self, is_durable: bool) {
        for (&id, events) in &self.jobs {
            let last = events.iter().rposition(|event| event.is_recorded).unwrap();
            self.safe.acknowledged.insert(id, last);
        }
        if is_durable {
            self.safe.durable = self.safe.acknowledged.clone();
        }
    }

    /// Compares what is there with what may be. `safe` is one half of a [`Safe`].
    fn judge(&self, safe: &BTreeMap<u64, usize>, engine: &mut Engine, when: &str) {
        for (id, events) in &self.jobs {
            let first = safe.get(id).copied().unwrap_or(0);
            let found = view(engine, *id);
            let now = engine.now;
            let is_allowed = events[first..].iter().any(|event| is_same(&event.view, &found, now));
            assert!(
                is_allowed,
                "{when}: job {id} is {found:?}, but should be one of {:?}",
                &events[first..]
            );
        }
        let ids_used = safe.iter().filter(|(_, first)| **first > 0).map(|(&id, _)| id).max();
        let next = engine.put("next");
        assert!(next > ids_used, "{when}: {next:?} is given out after {ids_used:?}");
    }

    fn last(&self, id: u64) -> Option<&View> {
        self.jobs.get(&id)?.last()?.view.as_ref()
    }
}

fn is_same(expected: &Option<View>, found: &Option<View>, now: Nanos) -> bool {
    let (Some(expected), Some(found)) = (expected, found) else {
        return expected.is_none() && found.is_none();
    };
    let mut expected = expected.clone();
    if expected.state == "delayed" && expected.due > now {
        // The server tells whole seconds.
        expected.due = Nanos::from_secs(u32::try_from(expected.due.secs_left(now)).unwrap());
    } else {
        expected.due = Nanos::ZERO;
        if expected.state == "delayed" {
            "ready".clone_into(&mut expected.state);
        }
    }
    expected == *found
}

/// The job as the server tells of it; `due` is how long it is delayed yet.
fn view(engine: &mut Engine, id: u64) -> Option<View> {
    let text = engine.ask(&format!("stats-job {id}\r\n"));
    if text == "NOT_FOUND\r\n" {
        return None;
    }
    let number = |key: &str| -> u32 { field(&text, key).unwrap().parse().unwrap() };
    let found = engine.ask(&format!("peek {id}\r\n"));
    let (_, body) = found.split_once("\r\n").unwrap();
    Some(View {
        tube: field(&text, "tube").unwrap().to_owned(),
        body: body.strip_suffix("\r\n").unwrap().to_owned(),
        pri: number("pri"),
        delay_secs: number("delay"),
        ttr_secs: number("ttr"),
        state: field(&text, "state").unwrap().to_owned(),
        due: Nanos::from_secs(number("time-left")),
        counts: ["reserves", "timeouts", "releases", "buries", "kicks"].map(number),
    })
}

// ---- A client that does everything ----

/// Random commands, the same ones for the same seed as long as the replies are the same.
struct Worker {
    random: fastrand::Rng,
    journal: Journal,
    held: Vec<u64>,
    next_id: u64,
}

const TUBES: [&str; 3] = ["default", "mail", "a-tube-with-a-longer-name"];

impl Worker {
    fn new(seed: u64) -> Worker {
        Worker {
            random: fastrand::Rng::with_seed(seed),
            journal: Journal::default(),
            held: Vec::new(),
            next_id: 1,
        }
    }

    /// One turn with a few commands, on a disk that works.
    fn turn(&mut self, disk: &FakeDisk, engine: &mut Engine) {
        assert!(self.try_turn(disk, engine), "the disk works");
    }

    /// The same on one that may not. `false` when it does not: what was done is then
    /// written down and not acknowledged.
    fn try_turn(&mut self, disk: &FakeDisk, engine: &mut Engine) -> bool {
        let count = self.random.usize(1..4);
        let mut input = String::new();
        let mut expected = Vec::new();
        for _ in 0..count {
            let (line, reply) = self.command(engine.now);
            input.push_str(&line);
            expected.push(reply);
        }
        let syncs = disk.syncs();
        let Some(said) = engine.turn(&input) else { return false };
        if said.contains("OUT_OF_MEMORY") {
            return false;
        }
        self.journal.acknowledge(disk.syncs() > syncs);
        assert_eq!(said, expected.concat(), "after {input:?}");
        true
    }

    /// A command and the reply to it; what becomes of the job is written down.
    fn command(&mut self, now: Nanos) -> (String, String) {
        let pri = self.random.u32(..3000);
        match self.random.u8(..10) {
            0..=3 => self.put(pri, now),
            4 | 5 => self.reserve(),
            6 => self.delete(),
            _ => self.give_back(pri, now),
        }
    }

    fn put(&mut self, pri: u32, now: Nanos) -> (String, String) {
        let tube = TUBES[self.random.usize(..TUBES.len())];
        let len = if self.random.u8(..20) == 0 { 3000 } else { self.random.usize(..60) };
        let body: String =
            std::iter::repeat_with(|| self.random.alphanumeric()).take(len).collect();
        let delay_secs = if self.random.u8(..4) == 0 { self.random.u32(1..500) } else { 0 };
        let id = self.next_id;
        self.next_id += 1;
        let line = format!("use {tube}\r\nput {pri} {delay_secs} 1000 {len}\r\n{body}\r\n");
        // The command is run a millisecond later, see [`Engine::turn`].
        let due = now + Nanos::from_millis(1) + Nanos::from_secs(delay_secs);
        let state = if delay_secs > 0 { "delayed" } else { "ready" }.to_owned();
        let tube_name = tube.to_owned();
        self.journal.add(
            id,
            Some(View {
                tube: tube_name,
                body,
                pri,
                delay_secs,
                ttr_secs: 1000,
                state,
                due,
                counts: [0; 5],
            }),
        );
        (line, format!("USING {tube}\r\nINSERTED {id}\r\n"))
    }

    /// Any job that is not held.
    fn reserve(&mut self) -> (String, String) {
        let free: Vec<u64> = (1..self.next_id)
            .filter(|id| self.journal.last(*id).is_some() && !self.held.contains(id))
            .collect();
        let Some(&id) = self.random.choice(&free) else { return self.nothing() };
        let mut view = self.journal.last(id).unwrap().clone();
        let reply = format!("RESERVED {id} {}\r\n{}\r\n", view.body.len(), view.body);
        // It is not recorded; but a job may be moved while it is reserved.
        view.counts[0] += 1;
        view.state = "ready".to_owned();
        self.held.push(id);
        self.journal.add_unrecorded(id, view);
        (format!("reserve-job {id}\r\n"), reply)
    }

    fn delete(&mut self) -> (String, String) {
        let all: Vec<u64> =
            (1..self.next_id).filter(|id| self.journal.last(*id).is_some()).collect();
        let Some(&id) = self.random.choice(&all) else { return self.nothing() };
        self.held.retain(|held| *held != id);
        self.journal.add(id, None);
        (format!("delete {id}\r\n"), "DELETED\r\n".to_owned())
    }

    /// Releases or buries a job that is held, or kicks one.
    fn give_back(&mut self, pri: u32, now: Nanos) -> (String, String) {
        if self.held.is_empty() || self.random.u8(..4) == 0 {
            return self.kick(now);
        }
        let id = self.held.swap_remove(self.random.usize(..self.held.len()));
        let mut view = self.journal.last(id).unwrap().clone();
        view.pri = pri;
        let (line, reply) = if self.random.bool() {
            view.counts[3] += 1;
            view.state = "buried".to_owned();
            (format!("bury {id} {pri}\r\n"), "BURIED\r\n")
        } else {
            view.counts[2] += 1;
            view.delay_secs = if self.random.bool() { 0 } else { self.random.u32(1..500) };
            view.state = if view.delay_secs > 0 { "delayed" } else { "ready" }.to_owned();
            view.due = now + Nanos::from_millis(1) + Nanos::from_secs(view.delay_secs);
            (format!("release {id} {pri} {}\r\n", view.delay_secs), "RELEASED\r\n")
        };
        self.journal.add(id, Some(view));
        (line, reply.to_owned())
    }

    fn kick(&mut self, now: Nanos) -> (String, String) {
        let is_kickable = |view: &View| {
            view.state == "buried"
                || (view.state == "delayed" && view.due > now + Nanos::from_secs(1))
        };
        let kickable: Vec<u64> = (1..self.next_id)
            .filter(|id| !self.held.contains(id) && self.journal.last(*id).is_some_and(is_kickable))
            .collect();
        let Some(&id) = self.random.choice(&kickable) else { return self.nothing() };
        let mut view = self.journal.last(id).unwrap().clone();
        view.counts[4] += 1;
        view.state = "ready".to_owned();
        self.journal.add(id, Some(view));
        (format!("kick-job {id}\r\n"), "KICKED\r\n".to_owned())
    }

    fn nothing(&self) -> (String, String) {
        ("list-tubes-watched\r\n".to_owned(), "OK 14\r\n---\n- default\n\r\n".to_owned())
    }
}

// ---- Crashes ----

/// The ways in which a machine can stop.
#[derive(Clone, Copy, Debug)]
enum Crash {
    /// The process alone: the system still has all that was written.
    Kill,
    /// Only what was synced is sure to be there.
    PowerCut,
}

/// Lets a worker work, in three lives on one disk, of which the first two end in good order,
/// and starts the server on what every crash on the way would have left.
fn crash_everywhere(seed: u64, policy: Policy, crashes: &[Crash]) {
    let disk = FakeDisk::default();
    let mut worker = Worker::new(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut now = START;
    let mut count = 0;
    disk.remember();
    for turns in [20, 10, 30] {
        let mut engine = Engine::start(&disk, policy, now);
        worker.come_back(&mut engine);
        for turn in 0..turns {
            let before = worker.journal.safe.clone();
            worker.turn(&disk, &mut engine);
            // Between two moments, so that rounding to seconds is the same everywhere.
            let now = engine.now + Nanos::from_nanos(500_000);
            for (index, image) in disk.take_history().iter().enumerate() {
                for crash in crashes {
                    let when = format!("seed {seed}, turn {turn}/{turns}, step {index}, {crash:?}");
                    let (files, safe) = match crash {
                        Crash::Kill => (image.live_files(), &before.acknowledged),
                        Crash::PowerCut => {
                            (image.files_after_power_cut(&mut random), &before.durable)
                        }
                    };
                    let mut engine = Engine::start(&FakeDisk::with_files(&files), policy, now);
                    worker.journal.judge(safe, &mut engine, &when);
                    count += 1;
                }
            }
        }
        engine.server.close(engine.now).unwrap();
        now = engine.now;
        disk.take_history();
    }
    assert!(count > 100, "only {count} crashes were tried");
}

impl Worker {
    /// After a restart nothing is held, and each job is what was recorded last or has become
    /// of it since.
    fn come_back(&mut self, engine: &mut Engine) {
        self.held.clear();
        for (&id, events) in &mut self.journal.jobs {
            let first = self.journal.safe.acknowledged[&id];
            let found = view(engine, id);
            let is_it = |event: &&Event| is_same(&event.view, &found, engine.now);
            let event = events[first..].iter().find(is_it);
            let view = event.expect("it comes back as it was").view.clone();
            events.push(Event { view, is_recorded: true });
        }
        self.journal.acknowledge(true);
    }
}

/// Seeds to be tried; `BINLOG_SEEDS` is how many times as many.
fn seeds(range: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
    let times = std::env::var("BINLOG_SEEDS").map_or(1, |times| times.parse().unwrap());
    let more = move |seed: u64| (0..times).map(move |round: u64| seed + 1000 * round);
    range.flat_map(more)
}

#[test]
fn nothing_acknowledged_is_lost_when_each_turn_is_synced() {
    for seed in seeds(0..4) {
        let policy = policy(4096, Syncing::EachIteration);
        crash_everywhere(seed, policy, &[Crash::Kill, Crash::PowerCut, Crash::PowerCut]);
    }
}

#[test]
fn nothing_synced_is_lost_when_syncs_come_later() {
    for seed in seeds(4..12) {
        let policy = policy(8192, Syncing::Within(Nanos::from_millis(8)));
        crash_everywhere(seed, policy, &[Crash::Kill, Crash::PowerCut, Crash::PowerCut]);
    }
}

#[test]
fn nothing_acknowledged_is_lost_with_the_process_when_nothing_is_synced() {
    for seed in seeds(12..16) {
        crash_everywhere(seed, policy(4096, Syncing::Never), &[Crash::Kill]);
    }
}

#[test]
fn records_are_synced_in_time_with_nothing_else_to_do() {
    let span = Nanos::from_millis(50);
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy(65_536, Syncing::Within(span)), START);
    engine.put("first").unwrap();
    for _ in 0..20 {
        engine.idle(5);
        let (syncs, put_at) = (disk.syncs(), engine.now);
        assert!(engine.put("job").is_some());
        let due = engine.server.next_due().expect("there is something to sync");
        assert!(due > engine.now && due <= put_at + span, "{due:?} for {put_at:?}");
        assert_eq!(disk.syncs(), syncs);
        engine.idle(1);
        assert_eq!(disk.syncs(), syncs + 1);
    }
}

#[test]
fn one_sync_serves_a_whole_turn() {
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy(1 << 20, Syncing::EachIteration), START);
    engine.ask("put 0 0 9 1\r\nx\r\n");
    let (writes, syncs) = (disk.writes(), disk.syncs());
    engine.ask(&"put 0 0 9 1\r\nx\r\n".repeat(500));
    assert_eq!((disk.writes() - writes, disk.syncs() - syncs), (1, 1));
    engine.ask("stats\r\n");
    assert_eq!(disk.syncs() - syncs, 1);
}

// ---- Space ----

/// What the files may take, for what is live.
fn limit(live: u64, file_size: u32) -> u64 {
    3 * live + 2 * u64::from(file_size)
}

/// The length of a job's full record.
fn record_len(tube: &str, body: usize) -> u64 {
    (84 + tube.len() + body + 2) as u64
}

#[test]
fn a_job_released_a_million_times_does_not_grow_the_log() {
    let disk = FakeDisk::default();
    let mut engine =
        Engine::start(&disk, policy(65_536, Syncing::Within(Nanos::from_millis(50))), START);
    assert_eq!(engine.put("job"), Some(1));
    let live = record_len("default", 3);
    let turn = "reserve\r\nrelease 1 7 0\r\n".repeat(100);
    for _ in 0..10_000 {
        let said = engine.ask(&turn);
        assert!(said.ends_with("RELEASED\r\n"));
        assert!(disk.take_peak() <= limit(live, 65_536));
    }
    assert_eq!(field(&engine.ask("stats-job 1\r\n"), "releases"), Some("1000000"));
    let now = engine.now;
    let mut again = Engine::start(&disk, policy(65_536, Syncing::Never), now);
    let text = again.ask("stats-job 1\r\n");
    assert_eq!(field(&text, "releases"), Some("1000000"));
    assert_eq!(field(&text, "pri"), Some("7"));
}

/// Puts and deletes for a long time beside jobs that stay, and watches the disk at each step.
fn churn(file_size: u32, long_lived: u64, body_len: usize, in_order: bool) {
    let disk = FakeDisk::default();
    let mut engine =
        Engine::start(&disk, policy(file_size, Syncing::Within(Nanos::from_millis(50))), START);
    let mut random = fastrand::Rng::with_seed(body_len as u64);
    let body = "x".repeat(body_len);
    let each = record_len("default", body_len);
    let rounds = 40 * u64::from(file_size) / each + 1_000;
    let mut short_lived = std::collections::VecDeque::new();
    let mut live = 0;
    let mut needed = 0;
    for round in 0..rounds {
        let id = engine.put(&body).expect("there is space");
        live += each;
        needed += each;
        // The long-lived jobs are spread over many files.
        if round.is_multiple_of(10) && round / 10 < long_lived {
            continue;
        }
        short_lived.push_back(id);
        if short_lived.len() > 20 {
            let index = if in_order { 0 } else { random.usize(..short_lived.len()) };
            let id = short_lived.remove(index).unwrap();
            assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n");
            live -= each;
            needed += 84;
        }
        let peak = disk.take_peak();
        assert!(peak <= limit(live + each, file_size), "round {round}: {peak} for {live} live");
    }
    let written = disk.bytes_written();
    assert!(written * 10 < needed * 28, "{written} bytes are written where {needed} are needed");
    // All at once, then one file is enough.
    let ids: Vec<u64> = (1..=rounds).collect();
    for some in ids.chunks(50) {
        let input: String = some.iter().map(|id| format!("delete {id}\r\n")).collect();
        engine.ask(&input);
    }
    engine.idle(200);
    assert_eq!(disk.live_files().len(), 1, "{:?}", disk.live_files().keys());
    assert!(disk.used() <= u64::from(file_size));
}

#[test]
fn disk_use_is_bounded_beside_long_lived_jobs() {
    for in_order in [true, false] {
        churn(16_384, 0, 100, in_order);
        churn(16_384, 10, 100, in_order);
        churn(16_384, 200, 10, in_order);
        churn(16_384, 2_000, 50, in_order);
        churn(65_536, 150, 10, in_order);
        churn(65_536, 40, 3_000, in_order);
    }
}

#[test]
fn disk_use_is_bounded_after_starts_too() {
    let disk = FakeDisk::default();
    let policy = policy(65_536, Syncing::EachIteration);
    let mut now = START;
    let mut live = 0;
    for life in 0..20 {
        let mut engine = Engine::start(&disk, policy, now);
        // One that stays, and more that goes.
        assert!(engine.put("long-lived").is_some());
        live += record_len("default", "long-lived".len());
        let large = [3_000; 3].map(|len| engine.put(&"x".repeat(len)).unwrap());
        for id in large {
            assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n");
        }
        engine.idle(100);
        let used = disk.used();
        assert!(used <= limit(live, 65_536), "life {life}: {used} for {live} live");
        now = engine.now;
    }
}

#[test]
fn no_more_is_prepared_than_is_needed_when_jobs_have_gone() {
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy(16_384, Syncing::EachIteration), START);
    for len in [1_558, 4_058, 6_844] {
        assert!(engine.put(&"x".repeat(len)).is_some());
    }
    assert!(disk.used() > 2 * 16_384, "there is room for all the deletes and a spare");
    assert_eq!(engine.ask("delete 2\r\ndelete 3\r\n"), "DELETED\r\nDELETED\r\n");
    assert!(disk.used() <= limit(record_len("default", 1_558), 16_384));
}

#[test]
fn compaction_on_behalf_of_a_burst_is_shared_among_turns() {
    const SHARE: u64 = 2 << 20;
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy(1 << 20, Syncing::Never), START);
    let body = "b".repeat(20_000);
    let mut ids: Vec<u64> = (0..2_000).map(|_| engine.put(&body).unwrap()).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut ids);
    let input: String = ids[..1_500].iter().map(|id| format!("delete {id}\r\n")).collect();
    let mut most = 0;
    let mut before = disk.bytes_written();
    engine.server.receive(engine.conn, input.as_bytes(), engine.now);
    loop {
        engine.server.commit(engine.now).unwrap();
        most = most.max(disk.bytes_written() - before);
        before = disk.bytes_written();
        if !engine.server.actions(engine.conn).run {
            break;
        }
        engine.server.resume(engine.conn, engine.now);
    }
    let moved = engine.stat("binlog-records-migrated") * 20_000;
    assert!(moved > 2 * SHARE, "only {moved} bytes were moved");
    assert!(most <= SHARE + 200_000, "{most} bytes in one turn");
    assert_eq!(engine.stat("current-jobs-ready"), 500);
}

#[test]
fn a_job_larger_than_a_file_works() {
    let disk = FakeDisk::default();
    let policy = policy(4096, Syncing::EachIteration);
    let mut engine = Engine::start(&disk, policy, START);
    let body = "y".repeat(100_000);
    for round in 0..20 {
        let id = engine.put(&body).unwrap();
        engine.put("small").unwrap();
        if round < 18 {
            assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n");
        }
        assert!(disk.used() <= limit(3 * record_len("default", 100_000), 4096));
    }
    let now = engine.now;
    let mut again = Engine::start(&disk, policy, now);
    assert_eq!(again.ask("peek 39\r\n"), format!("FOUND 39 100000\r\n{body}\r\n"));
    assert_eq!(again.recovered.jobs, 22);
}

/// Fills the disk up to the first refusal; says how many jobs there are.
fn fill(engine: &mut Engine, body: &str) -> u64 {
    let mut count = 0;
    while engine.put(body).is_some() {
        count += 1;
    }
    count
}

/// The longest are written beside the batch of the turn, and must not overtake it.
#[test]
fn bodies_of_any_length_are_recorded_in_their_order() {
    for len in [131_069, 131_070, 131_071, 131_072, 300_000] {
        let disk = FakeDisk::default();
        let policy = policy(65_536, Syncing::EachIteration);
        let mut engine = Engine::start(&disk, policy, START);
        let large = "x".repeat(len);
        let put = |body: &str| format!("put 0 0 9 {}\r\n{body}\r\n", body.len());
        let turn = put("before") + &put(&large) + &put("behind");
        assert_eq!(engine.ask(&turn), "INSERTED 1\r\nINSERTED 2\r\nINSERTED 3\r\n");
        let mut again = Engine::start(&disk, policy, engine.now);
        assert_eq!(again.ask("peek 1\r\n"), "FOUND 1 6\r\nbefore\r\n");
        assert!(again.ask("peek 2\r\n") == format!("FOUND 2 {len}\r\n{large}\r\n"), "{len}");
        assert_eq!(again.ask("peek 3\r\n"), "FOUND 3 6\r\nbehind\r\n");
    }
}

/// C beanstalkd makes whole files only, and keeps room for the delete of each job in the same file.
fn jobs_that_c_takes(capacity: u64, file_size: u64, body: usize) -> u64 {
    (capacity / file_size) * ((file_size - 4) / (record_len("default", body) + 84))
}

#[test]
fn a_small_disk_takes_as_many_jobs_as_in_c() {
    const FILE_SIZE: u32 = 2 << 20;
    let policy = policy(FILE_SIZE, Syncing::Never);
    // With room for one file and a half, for two and a half, and for exactly four.
    for (tenths, body) in [(16, 64), (16, 10_000), (24, 10_000), (40, 2_000), (40, 60_000)] {
        let capacity = u64::from(FILE_SIZE) * tenths / 10;
        let of_c = jobs_that_c_takes(capacity, FILE_SIZE.into(), body);
        let body = "x".repeat(body);
        let disk = FakeDisk::default();
        disk.set_capacity(Some(capacity));
        let mut engine = Engine::start(&disk, policy, START);
        let count = fill(&mut engine, &body);
        let case = format!("{capacity} bytes, bodies of {}", body.len());
        assert!(count * 100 >= of_c * 95, "{case}: {count} jobs, {of_c} in C");
        // Killed, and started again on the full disk: every delete works, and then puts do.
        let mut engine = Engine::start(&disk, policy, engine.now);
        assert_eq!(engine.recovered.jobs, count, "{case}");
        for id in 1..=count {
            assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n", "{case}: {id}");
        }
        engine.idle(200);
        assert_eq!(disk.live_files().len(), 1, "{case}: {}", disk.names());
        let again = fill(&mut engine, &body);
        assert!(again * 100 >= of_c * 90, "{case}: {again} jobs the second time, {of_c} in C");
    }
}

#[test]
fn a_full_disk_refuses_puts_and_nothing_else_at_first() {
    for capacity in [3 * 8192, 10 * 8192, 50 * 8192 + 4096] {
        let disk = FakeDisk::default();
        disk.set_capacity(Some(capacity));
        let policy = policy(8192, Syncing::EachIteration);
        let mut engine = Engine::start(&disk, policy, START);
        let count = fill(&mut engine, "0123456789");
        assert!(count > 20, "{count} jobs in {capacity} bytes");
        let before = engine.ask("stats\r\n");
        assert_eq!(engine.put("0123456789"), None);
        for key in ["current-jobs-ready", "total-jobs", "current-tubes"] {
            assert_eq!(field(&before, key), field(&engine.ask("stats\r\n"), key), "{key}");
        }
        // Releases go on for a while, and then leave the job where it is.
        assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        let mut releases = 0;
        loop {
            let said = engine.ask("release 1 5 0\r\n");
            if said == "OUT_OF_MEMORY\r\n" {
                break;
            }
            assert_eq!(said, "RELEASED\r\n");
            releases += 1;
            assert!(releases < 100_000, "there is no end to it");
            assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        }
        assert!(releases >= 20, "only {releases} releases");
        let job = engine.ask("stats-job 1\r\n");
        assert_eq!(field(&job, "state"), Some("reserved"));
        assert_eq!(field(&job, "releases").unwrap(), releases.to_string());
        assert_eq!(engine.ask("bury 1 9\r\n"), "OUT_OF_MEMORY\r\n");
        let job = engine.ask("stats-job 1\r\n");
        assert_eq!(
            (field(&job, "state"), field(&job, "buries"), field(&job, "pri")),
            (Some("reserved"), Some("0"), Some("5"))
        );
        // Every delete works, to the last one.
        for id in 1..=count {
            assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n");
        }
        engine.idle(100);
        assert!(engine.put("again").is_some(), "there is space again");
        assert!(disk.used() <= 2 * 8192);
    }
}

#[test]
fn a_kick_on_a_full_disk_counts_what_it_moved() {
    let disk = FakeDisk::default();
    disk.set_capacity(Some(40 * 8192));
    let policy = policy(8192, Syncing::EachIteration);
    let mut engine = Engine::start(&disk, policy, START);
    let mut count = 0;
    while engine.ask("put 0 1000 9 1\r\nx\r\n").starts_with("INSERTED") {
        count += 1;
    }
    let mut kicked = 0;
    loop {
        let said = engine.ask("kick 4294967295\r\n");
        if said == "OUT_OF_MEMORY\r\n" {
            break;
        }
        let some: u64 = said.trim().strip_prefix("KICKED ").unwrap().parse().unwrap();
        assert!(some > 0);
        kicked += some;
        assert_eq!(engine.stat("current-jobs-ready"), kicked);
        assert_eq!(engine.stat("current-jobs-delayed"), count - kicked);
    }
    assert!(kicked > 0 && kicked < count, "{kicked} of {count}");
    assert_eq!(engine.ask("kick-job 1\r\n"), "NOT_FOUND\r\n");
    let last = format!("kick-job {count}\r\n");
    assert_eq!(engine.ask(&last), "OUT_OF_MEMORY\r\n");
    let now = engine.now;
    let mut again = Engine::start(&disk, policy, now);
    assert_eq!(again.stat("current-jobs-ready"), kicked);
    assert_eq!(again.stat("current-jobs-delayed"), count - kicked);
}

/// Each start used to take one more block, until deletes were refused.
#[test]
fn starts_on_a_full_disk_take_no_space_from_deletes() {
    for (file_size, capacity) in [(8192, 10 * 8192), (65_536, 200_000), (1 << 20, 700_000)] {
        let policy = policy(file_size, Syncing::EachIteration);
        let disk = FakeDisk::default();
        disk.set_capacity(Some(capacity));
        let mut engine = Engine::start(&disk, policy, START);
        let count = fill(&mut engine, "0123456789");
        assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        while engine.ask("release 1 5 0\r\n") == "RELEASED\r\n" {
            assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        }
        // The newest first, so that no file goes before the last jobs do.
        for id in (1..=count).rev() {
            if id % 7 == 0 {
                engine = Engine::start(&disk, policy, engine.now);
            }
            let said = engine.ask(&format!("delete {id}\r\n"));
            assert_eq!(said, "DELETED\r\n", "{id} of {count}, files of {file_size}");
        }
        let again = Engine::start(&disk, policy, engine.now);
        assert_eq!((again.recovered.jobs, again.recovered.last_id >= count), (0, true));
    }
}

#[test]
fn space_that_others_give_back_is_used() {
    let disk = FakeDisk::default();
    disk.set_capacity(Some(5 * 8192));
    let mut engine = Engine::start(&disk, policy(8192, Syncing::EachIteration), START);
    let count = fill(&mut engine, "job");
    disk.set_capacity(Some(50 * 8192));
    assert!(engine.put("job").is_some());
    assert!(fill(&mut engine, "job") > count);
}

#[test]
fn a_full_disk_is_compacted_where_that_makes_space() {
    let disk = FakeDisk::default();
    disk.set_capacity(Some(12 * 8192));
    let mut engine = Engine::start(&disk, policy(8192, Syncing::EachIteration), START);
    let count = fill(&mut engine, "job");
    // Every second job stays, so that no file is without one.
    for id in (1..=count).filter(|id| id % 2 != 0) {
        assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n");
    }
    engine.idle(100);
    let more = fill(&mut engine, "job");
    assert!(more > count / 4, "{more} jobs where there were {count}");
    assert_eq!(field(&engine.ask("stats-job 2\r\n"), "state"), Some("ready"));
}

#[test]
fn a_start_that_finds_no_space_forgets_no_id() {
    let disk = FakeDisk::default();
    let policy = policy(8192, Syncing::EachIteration);
    let mut engine = Engine::start(&disk, policy, START);
    let last = fill_and_drain(&mut engine);
    disk.set_capacity(Some(0));
    assert!(Engine::try_start(&disk, policy, engine.now).is_none(), "there is no space at all");
    disk.set_capacity(None);
    let mut again = Engine::start(&disk, policy, engine.now);
    assert_eq!(again.put("next"), Some(last + 1));
}

/// Some jobs come and go; says which was the last one.
fn fill_and_drain(engine: &mut Engine) -> u64 {
    const LAST: u64 = 10;
    for id in 1..=LAST {
        assert_eq!(engine.put("job"), Some(id));
        assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n");
    }
    LAST
}

// ---- Faults ----

#[test]
fn a_file_that_cannot_be_removed_is_not_tried_again_at_once() {
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy(8192, Syncing::Never), START);
    fill_and_drain(&mut engine);
    disk.fail_from(disk.changes() + 1, ErrorKind::Other);
    // A prepared file is not needed any more.
    engine.now = engine.now + Nanos::from_secs(2);
    engine.server.tick(engine.now);
    engine.server.commit(engine.now).unwrap();
    let next = engine.server.next_due();
    assert!(next.is_some_and(|due| due > engine.now), "it is tried at {next:?}");
    disk.heal();
    engine.idle(10);
    assert_eq!(disk.live_files().len(), 1);
}

#[test]
fn a_file_that_cannot_be_cut_fails_the_disk_unless_space_or_permission_is_missing() {
    let puts_until_failure = |error: ErrorKind| {
        let disk = FakeDisk::default();
        let mut engine = Engine::start(&disk, policy(8192, Syncing::Never), START);
        disk.fail_cuts(error);
        (0..200).find(|_| engine.turn("put 0 0 9 3\r\njob\r\n").is_none())
    };
    assert_eq!(puts_until_failure(ErrorKind::StorageFull), None);
    assert_eq!(puts_until_failure(ErrorKind::PermissionDenied), None);
    assert!(puts_until_failure(ErrorKind::Other).is_some());
}

#[test]
fn after_a_fault_nothing_is_acknowledged_and_nothing_acknowledged_is_lost() {
    for (seed, sync) in [(1, Syncing::EachIteration), (2, Syncing::Within(Nanos::from_millis(4)))] {
        for error in [ErrorKind::Other, ErrorKind::StorageFull] {
            let policy = policy(4096, sync);
            let mut faults = 0;
            loop {
                let disk = FakeDisk::default();
                let mut engine = Engine::start(&disk, policy, START);
                let change = disk.changes() + 1 + faults;
                disk.fail_from(change, error);
                let mut worker = Worker::new(seed);
                let mut turns = 0;
                while turns < 60 && worker.try_turn(&disk, &mut engine) {
                    turns += 1;
                }
                let image = FakeDisk::with_files(&disk.live_files());
                let mut again = Engine::start(&image, policy, engine.now);
                let when = format!("seed {seed}, {error}, change {change}");
                worker.journal.judge(&worker.journal.safe.acknowledged, &mut again, &when);
                if turns == 60 {
                    break;
                }
                faults += 1;
            }
            assert!(faults > 50, "only {faults} faults were tried");
        }
    }
}

// ---- Damage ----

/// Files by their names.
type Files = BTreeMap<String, Vec<u8>>;

/// A log with all kinds of records in several files, the jobs in it, and when it was closed.
fn sample() -> (Files, BTreeMap<u64, Option<View>>, Nanos) {
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy(4096, Syncing::EachIteration), START);
    let mut worker = Worker::new(21);
    for _ in 0..40 {
        worker.turn(&disk, &mut engine);
    }
    engine.server.close(engine.now).unwrap();
    let files = disk.live_files();
    let now = engine.now + Nanos::from_nanos(500_000);
    let mut engine =
        Engine::start(&FakeDisk::with_files(&files), policy(4096, Syncing::EachIteration), now);
    let ids = 1..worker.next_id;
    let views = ids.map(|id| (id, view(&mut engine, id))).collect();
    (files, views, now)
}

#[test]
fn no_flipped_bit_hands_out_a_changed_body_or_loses_more_than_it_hit() {
    let (files, views, now) = sample();
    assert!(files.len() >= 3, "{:?}", files.keys());
    let bodies: BTreeMap<u64, &str> = views
        .iter()
        .filter_map(|(&id, view)| view.as_ref().map(|view| (id, view.body.as_str())))
        .collect();
    let mut tried = 0;
    for (name, bytes) in &files {
        // Every bit of the version and the marker, and one of every other byte of records.
        let head = (0..88 * 8).map(|bit| (bit / 8, bit % 8));
        let records = (88..bytes.len()).step_by(2).map(|at| (at, at / 2 % 8));
        for (at, bit) in head.chain(records) {
            let mut damaged = files.clone();
            damaged.get_mut(name).unwrap()[at] ^= 1 << bit;
            let disk = FakeDisk::with_files(&damaged);
            let mut engine = Engine::start(&disk, policy(4096, Syncing::EachIteration), now);
            let mut changed = 0;
            for (id, before) in &views {
                let after = view(&mut engine, *id);
                if let (Some(after), Some(body)) = (&after, bodies.get(id)) {
                    assert_eq!(after.body, *body, "{name}:{at}");
                }
                // It may be a second later by now.
                let state = |view: &Option<View>| {
                    view.as_ref().map(|view| (view.state.clone(), view.pri, view.counts))
                };
                changed += usize::from(state(&after) != state(before));
            }
            assert!(changed <= 1, "{name}:{at}.{bit}: {changed} jobs are not as they were");
            let is_kept = disk.live_files().keys().any(|name| name.ends_with(".damaged"));
            let is_last = files.keys().last() == Some(name);
            assert!(is_kept || is_last, "{name}:{at}: the damaged file is kept");
            tried += 1;
        }
    }
    assert!(tried > 2_000, "only {tried} bits were flipped");
}

#[test]
fn a_record_of_wrong_length_takes_no_other_with_it() {
    const JOBS: u64 = 40;
    let disk = FakeDisk::default();
    let policy = policy(16_384, Syncing::EachIteration);
    let mut engine = Engine::start(&disk, policy, START);
    for id in 1..=JOBS {
        // Where they are 128 bytes long, a flipped bit leads from one to the next but one.
        assert_eq!(engine.put(&"x".repeat(35)), Some(id));
    }
    let files = disk.live_files();
    let (name, bytes) = files.first_key_value().unwrap();
    let name_len = "default".len();
    let third = 88 + 2 * 128;
    assert_eq!(bytes[third..][4..4 + name_len], *b"default");
    let lengths = [third..third + 4, third + 4 + name_len + 32..third + 4 + name_len + 36];
    for at in lengths.into_iter().flatten() {
        for bit in 0..8 {
            let mut damaged = files.clone();
            damaged.get_mut(name).unwrap()[at] ^= 1 << bit;
            let disk = FakeDisk::with_files(&damaged);
            let engine = Engine::start(&disk, policy, engine.now);
            assert_eq!(engine.recovered.jobs, JOBS - 1, "bit {bit} of byte {at}");
        }
    }
}

#[test]
fn no_bytes_at_all_stop_the_server_from_reading_them() {
    let (files, ..) = sample();
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..2_000 {
        let mut mangled = files.clone();
        for bytes in mangled.values_mut() {
            for _ in 0..random.usize(..4) {
                mangle(bytes, &mut random);
            }
        }
        let disk = FakeDisk::with_files(&mangled);
        let mut engine = Engine::start(&disk, policy(4096, Syncing::EachIteration), START);
        assert!(engine.put("still works").is_some(), "round {round}");
        let jobs = engine.stat("current-jobs-ready")
            + engine.stat("current-jobs-buried")
            + engine.stat("current-jobs-delayed");
        let mut again = Engine::start(&disk, policy(4096, Syncing::EachIteration), engine.now);
        assert_eq!(again.recovered.jobs, jobs, "round {round}");
        assert!(again.put("still works").is_some());
    }
}

/// Does something to the bytes that no good disk does.
fn mangle(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    if bytes.is_empty() {
        return;
    }
    let at = random.usize(..bytes.len());
    let len = random.usize(..=(bytes.len() - at).min(300));
    match random.u8(..6) {
        0 => bytes[at] ^= 1 << random.u8(..8),
        1 => bytes[at..at + len].fill(0),
        2 => bytes[at..at + len].iter_mut().for_each(|byte| *byte = random.u8(..)),
        3 => bytes.truncate(at),
        4 => {
            bytes.drain(at..at + len);
        }
        _ => {
            let piece = bytes[at..at + len].to_vec();
            let to = random.usize(..bytes.len());
            bytes.splice(to..to, piece);
        }
    }
}

#[test]
fn a_torn_tail_is_cut_wherever_it_is_torn() {
    let (files, views, now) = sample();
    let (last, bytes) = files.last_key_value().unwrap();
    for len in 88..bytes.len() {
        let mut torn = files.clone();
        let torn_bytes = torn.get_mut(last).unwrap();
        torn_bytes.truncate(len);
        torn_bytes.resize(4096, 0);
        let disk = FakeDisk::with_files(&torn);
        let mut engine = Engine::start(&disk, policy(4096, Syncing::EachIteration), now);
        let lost = views.iter().filter(|(id, before)| {
            let after = view(&mut engine, **id);
            if let (Some(after), Some(before)) = (&after, before) {
                assert_eq!(after.body, before.body, "cut to {len}");
            }
            after.is_none() && before.is_some()
        });
        // No more than one job for each record that is cut.
        let records_cut = records_from(bytes, len);
        let lost = lost.count();
        assert!(lost <= records_cut, "cut to {len}: {lost} jobs lost, {records_cut} records cut");
        let left = disk.live_files().get(last).map_or(0, Vec::len);
        // A short record ends in three zeros.
        assert!(left <= len + 3, "cut to {len}, and {left} bytes are left");
    }
}

/// How many records of version 7 end behind `from`.
fn records_from(bytes: &[u8], from: usize) -> usize {
    let number = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap()) as usize;
    let mut at = 4;
    let mut count = 0;
    while at < bytes.len() {
        let name_len = number(at);
        let is_full = name_len > 0 && bytes[at + 4 + name_len + 76] != 0;
        at += 84 + name_len + if is_full { number(at + 4 + name_len + 32) } else { 0 };
        count += usize::from(at > from);
    }
    count
}

#[test]
fn empty_files_are_empty() {
    let mut files = BTreeMap::new();
    files.insert("binlog.3".to_owned(), Vec::new());
    files.insert("binlog.4".to_owned(), vec![0; 4096]);
    files.insert("binlog.5".to_owned(), 7_i32.to_ne_bytes().to_vec());
    files.insert("binlog.6".to_owned(), 5_i32.to_ne_bytes().to_vec());
    files.insert("notes.txt".to_owned(), b"mine".to_vec());
    let disk = FakeDisk::with_files(&files);
    let mut engine = Engine::start(&disk, policy(65_536, Syncing::EachIteration), START);
    assert_eq!(engine.recovered.jobs, 0);
    assert_eq!(engine.put("first"), Some(1));
    assert_eq!(engine.stat("binlog-current-index"), 7);
    engine.ask("delete 1\r\n");
    engine.idle(10);
    let names: Vec<String> = disk.live_files().into_keys().collect();
    assert_eq!(names, ["binlog.7", "notes.txt"]);
}

#[test]
fn the_order_of_the_buried_survives_moves_and_restarts() {
    let disk = FakeDisk::default();
    let policy = policy(4096, Syncing::Never);
    let mut now = START;
    for (round, id) in [5_u64, 2, 9, 1, 7].into_iter().enumerate() {
        // The clock of the system goes backwards.
        let mut engine = Engine::start(&disk, policy, now);
        if round == 0 {
            (0..10).for_each(|_| assert!(engine.put("job").is_some()));
        }
        engine.ask(&format!("reserve-job {id}\r\nbury {id} 0\r\n"));
        // Many short records, so that all jobs are moved.
        for _ in 0..200 {
            let said = engine.ask("reserve-job 10\r\nrelease 10 0 0\r\n");
            assert!(said.ends_with("RELEASED\r\n"));
        }
        assert!(engine.stat("binlog-records-migrated") > 0);
        now = now.before(Nanos::from_secs(1000));
    }
    let mut engine = Engine::start(&disk, policy, now);
    for id in [5, 2, 9, 1, 7] {
        assert!(engine.ask("peek-buried\r\n").starts_with(&format!("FOUND {id} ")));
        assert_eq!(engine.ask("kick 1\r\n"), "KICKED 1\r\n");
    }
}

// ---- What others wrote ----

/// The files of a fixture.
fn fixture(name: &str) -> FakeDisk {
    let directory =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let files = std::fs::read_dir(directory).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    });
    FakeDisk::with_files(&files.collect())
}

/// A job of the fixtures, as short as it can be said: state, tube, pri, delay, ttr, body and
/// counts.
type Brief<'t> = (&'t str, &'t str, u32, u32, u32, &'t str, [u32; 5]);

fn check_jobs(engine: &mut Engine, expected: &[(u64, Brief<'_>)]) {
    for (id, (state, tube, pri, delay_secs, ttr_secs, body, counts)) in expected {
        let found = view(engine, *id).unwrap_or_else(|| panic!("job {id} is not there"));
        let expected = View {
            tube: (*tube).to_owned(),
            body: (*body).to_owned(),
            pri: *pri,
            delay_secs: *delay_secs,
            ttr_secs: *ttr_secs,
            state: (*state).to_owned(),
            due: found.due,
            counts: *counts,
        };
        assert_eq!(found, expected, "job {id}");
    }
}

/// A day in the year in which the fixtures were made.
const FIXTURE_DAY: Nanos = Nanos::from_secs(1_796_000_000);

#[test]
#[cfg(target_endian = "little")]
fn what_c_beanstalkd_wrote_is_read() {
    let long = "x".repeat(2000);
    let jobs = [
        (1, ("ready", "first", 10, 0, 60, "ready", [0; 5])),
        (2, ("delayed", "first", 20, 4_000_000_000, 61, "delayed", [0; 5])),
        (3, ("buried", "first", 31, 0, 62, "buried", [1, 0, 0, 1, 0])),
        (5, ("delayed", "second-tube", 51, 4_000_000_000, 64, "released", [1, 0, 1, 0, 0])),
        (6, ("ready", "second-tube", 61, 0, 65, "kicked", [1, 0, 0, 1, 1])),
        (8, ("ready", "second-tube", 80, 0, 67, &long, [0; 5])),
    ];
    let policy = policy(8192, Syncing::EachIteration);
    for name in ["c-1.12/records", "c-1.12/moved"] {
        let disk = fixture(name);
        let mut engine = Engine::start(&disk, policy, FIXTURE_DAY);
        // The body of job 7 is no text.
        assert_eq!(engine.recovered.jobs, 7);
        assert_eq!(engine.ask("delete 7\r\n"), "DELETED\r\n");
        check_jobs(&mut engine, &jobs);
        let highest = if name.ends_with("moved") { 68 } else { 8 };
        assert_eq!(engine.put("next"), Some(highest + 1));
        engine.ask(&format!("delete {}\r\n", highest + 1));
        // And once more from what we made of it.
        engine.ask("reserve-job 1\r\nrelease 1 11 0\r\n");
        engine.server.close(engine.now).unwrap();
        let mut again = Engine::start(&disk, policy, engine.now);
        assert_eq!(again.recovered.jobs, 6);
        check_jobs(&mut again, &jobs[1..]);
        let released = ("ready", "first", 11, 0, 60, "ready", [1, 0, 1, 0, 0]);
        check_jobs(&mut again, &[(1, released)]);
    }
}

/// A record of version 5. A short one has no tube.
fn record_v5(id: u64, tube: &str, state: u8, pri: u32, delay_secs: u64, body: &str) -> Vec<u8> {
    const SECOND_US: u64 = 1_000_000;
    let body = if tube.is_empty() || state == 0 { String::new() } else { format!("{body}\r\n") };
    let now_us = FIXTURE_DAY.as_nanos() / 1_000;
    let mut bytes = (tube.len() as u64).to_ne_bytes().to_vec();
    bytes.extend(tube.as_bytes());
    bytes.extend(id.to_ne_bytes());
    bytes.extend(pri.to_ne_bytes());
    bytes.extend([0xaa; 4]);
    bytes.extend((delay_secs * SECOND_US).to_ne_bytes());
    bytes.extend((90 * SECOND_US).to_ne_bytes());
    bytes.extend(i32::try_from(body.len()).unwrap().to_ne_bytes());
    bytes.extend([0xaa; 4]);
    bytes.extend((now_us - 5 * SECOND_US).to_ne_bytes());
    bytes.extend((now_us + delay_secs * SECOND_US).to_ne_bytes());
    for count in [1_u32, 2, 3, 4, 5] {
        bytes.extend(count.to_ne_bytes());
    }
    bytes.push(state);
    bytes.extend(body.as_bytes());
    bytes
}

#[test]
fn version_5_is_read_and_never_written() {
    let mut bytes = 5_i32.to_ne_bytes().to_vec();
    bytes.extend(record_v5(1, "old", 1, 10, 0, "ready"));
    bytes.extend(record_v5(2, "old", 4, 20, 1000, "delayed"));
    bytes.extend(record_v5(3, "old", 1, 30, 0, "buried"));
    bytes.extend(record_v5(3, "", 3, 31, 0, ""));
    bytes.extend(record_v5(4, "old", 1, 40, 0, "deleted"));
    bytes.extend(record_v5(4, "", 0, 40, 0, ""));
    bytes.extend(record_v5(5, "old", 2, 50, 0, "reserved"));
    bytes.extend(record_v5(9, "", 1, 50, 0, ""));
    bytes.resize(4096, 0);
    let counts = [1, 2, 3, 4, 5];
    let jobs = [
        (1, ("ready", "old", 10, 0, 90, "ready", counts)),
        (2, ("delayed", "old", 20, 1000, 90, "delayed", counts)),
        (3, ("buried", "old", 31, 0, 90, "buried", counts)),
        (5, ("ready", "old", 50, 0, 90, "reserved", counts)),
    ];
    let disk = FakeDisk::with_files(&BTreeMap::from([("binlog.4".to_owned(), bytes)]));
    let policy = policy(4096, Syncing::EachIteration);
    let mut engine = Engine::start(&disk, policy, FIXTURE_DAY);
    assert_eq!(engine.recovered.jobs, 4);
    check_jobs(&mut engine, &jobs);
    let delayed = engine.ask("stats-job 2\r\n");
    assert_eq!((field(&delayed, "age"), field(&delayed, "time-left")), (Some("5"), Some("999")));
    assert_eq!(engine.put("next"), Some(10));
    engine.ask("delete 10\r\n");
    // Many short records, so that all jobs are moved.
    for _ in 0..200 {
        engine.ask("reserve-job 1\r\nrelease 1 10 0\r\n");
    }
    assert!(engine.stat("binlog-oldest-index") > 4, "the old file is gone");
    for bytes in disk.live_files().values() {
        assert_eq!(bytes[..4], 7_i32.to_ne_bytes());
    }
    let mut again = Engine::start(&disk, policy, engine.now);
    assert_eq!(again.recovered.jobs, 4);
    check_jobs(&mut again, &jobs[1..]);
}

// ---- Found by attack ----

#[test]
fn a_body_that_looks_like_records_is_never_taken_for_them() {
    let policy = policy(65_536, Syncing::EachIteration);
    // What a delete of job 1 looks like in another server's file.
    let other = FakeDisk::default();
    let mut engine = Engine::start(&other, policy, START);
    engine.put("precious").unwrap();
    engine.ask("delete 1\r\n");
    let files = other.live_files();
    let delete = &files["binlog.1"][88 + 101..88 + 101 + 84];

    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy, START);
    engine.put("precious").unwrap();
    let mut put = format!("put 0 0 100 {}\r\n", delete.len()).into_bytes();
    put.extend_from_slice(delete);
    put.extend_from_slice(b"\r\n");
    engine.server.receive(engine.conn, &put, engine.now);
    assert!(engine.ask("list-tube-used\r\n").starts_with("INSERTED 2\r\n"));
    engine.put("third").unwrap();
    let mut files = disk.live_files();
    let bytes = files.get_mut("binlog.1").unwrap();
    // The length of the body of job 2 is damaged, so that its end cannot be believed.
    bytes[88 + 101 + 4 + "default".len() + 32] ^= 0x40;
    let mut again = Engine::start(&FakeDisk::with_files(&files), policy, START);
    assert_eq!(again.ask("peek 1\r\n"), "FOUND 1 8\r\nprecious\r\n");
    assert_eq!(again.ask("peek 2\r\n"), "NOT_FOUND\r\n");
    assert_eq!(again.ask("peek 3\r\n"), "FOUND 3 5\r\nthird\r\n");
}

/// A file of many jobs, the first of which has `body`; where its record begins, and where its fields.
fn file_with(body: &[u8], jobs: u64) -> (BTreeMap<String, Vec<u8>>, usize) {
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy(65_536, Syncing::EachIteration), START);
    let mut put = format!("put 0 0 100 {}\r\n", body.len()).into_bytes();
    put.extend_from_slice(body);
    put.extend_from_slice(b"\r\n");
    engine.server.receive(engine.conn, &put, engine.now);
    assert!(engine.ask("list-tube-used\r\n").starts_with("INSERTED 1\r\n"));
    for id in 2..=jobs {
        assert_eq!(engine.put("plain"), Some(id));
    }
    (disk.live_files(), 88 + 4 + "default".len())
}

/// How many jobs come back from these files.
fn recovered(files: &BTreeMap<String, Vec<u8>>) -> u64 {
    let policy = policy(65_536, Syncing::EachIteration);
    Engine::start(&FakeDisk::with_files(files), policy, START).recovered.jobs
}

#[test]
fn a_body_full_of_heads_of_records_hides_nothing_behind_it() {
    const JOBS: u64 = 101;
    // A full record of job 7 that says that its body is very long.
    let mut head = b"\x01\0\0\0x\x07\0\0\0\0\0\0\0".to_vec();
    head.resize(85, 0);
    head[5 + 32..5 + 36].copy_from_slice(&60_000_u32.to_ne_bytes());
    head[5 + 76] = 1;
    let (mut files, fields) = file_with(&head.repeat(40), JOBS);
    assert_eq!(recovered(&files), JOBS);
    // The priority of the first job.
    files.get_mut("binlog.1").unwrap()[fields + 8] ^= 1;
    assert_eq!(recovered(&files), JOBS - 1);
}

#[test]
fn records_in_a_body_count_for_nothing_where_the_marker_is_damaged_too() {
    const PLAIN: usize = 100;
    let engine_with_jobs = |disk: &FakeDisk| {
        let mut engine = Engine::start(disk, policy(65_536, Syncing::EachIteration), START);
        (0..PLAIN).for_each(|_| assert!(engine.put("plain").is_some()));
        engine
    };
    let end = 88 + PLAIN * usize::try_from(record_len("default", 5)).unwrap();
    // What the deletes of all these look like in another server's file.
    let other = FakeDisk::default();
    let mut engine = engine_with_jobs(&other);
    (1..=PLAIN).for_each(|id| {
        assert_eq!(engine.ask(&format!("delete {id}\r\n")), "DELETED\r\n");
    });
    let deletes = other.live_files()["binlog.1"][end..end + PLAIN * 84].to_vec();

    let disk = FakeDisk::default();
    let mut engine = engine_with_jobs(&disk);
    let mut put = format!("put 0 0 100 {}\r\n", deletes.len()).into_bytes();
    put.extend_from_slice(&deletes);
    put.extend_from_slice(b"\r\n");
    engine.server.receive(engine.conn, &put, engine.now);
    assert!(engine.ask("list-tube-used\r\n").starts_with("INSERTED"));
    let mut files = disk.live_files();
    let bytes = files.get_mut("binlog.1").unwrap();
    // The nonce in the marker, and the length of the body that carries them.
    bytes[4 + 4 + 36] ^= 1;
    bytes[end + 4 + "default".len() + 32] ^= 0x40;
    assert_eq!(recovered(&files), PLAIN as u64);
}

#[test]
fn jobs_behind_an_absurd_id_are_not_lost() {
    for id in [u64::MAX / 2, u64::MAX - (1 << 40), u64::MAX - 1] {
        let mut bytes = 5_i32.to_ne_bytes().to_vec();
        bytes.extend(record_v5(id, "old", 1, 10, 0, "absurd"));
        let disk = FakeDisk::with_files(&BTreeMap::from([("binlog.1".to_owned(), bytes)]));
        let policy = policy(65_536, Syncing::EachIteration);
        let mut engine = Engine::start(&disk, policy, FIXTURE_DAY);
        let ids = ["first", "second"].map(|body| engine.put(body).unwrap());
        let mut again = Engine::start(&disk, policy, engine.now);
        assert_eq!(again.recovered.jobs, 3);
        for id in ids {
            assert!(again.ask(&format!("peek {id}\r\n")).starts_with("FOUND"), "{id}");
        }
        assert!(!ids.contains(&again.put("third").unwrap()));
    }
}

#[test]
fn ids_do_not_go_on_from_an_absurd_one_in_a_marker() {
    for last_id in [u64::MAX, u64::MAX - 1, HIGHEST_ID + 1] {
        let mut bytes = VERSION.to_vec();
        record::write_marker(&mut bytes, last_id, 7);
        let disk = FakeDisk::with_files(&BTreeMap::from([("binlog.1".to_owned(), bytes)]));
        let policy = policy(65_536, Syncing::EachIteration);
        let mut engine = Engine::start(&disk, policy, START);
        assert_eq!(engine.put("first"), Some(1));
        let mut again = Engine::start(&disk, policy, engine.now);
        assert_eq!(again.ask("peek 1\r\n"), "FOUND 1 5\r\nfirst\r\n");
    }
}

#[test]
fn counts_that_are_full_begin_again_at_zero() {
    let mut bytes = 5_i32.to_ne_bytes().to_vec();
    bytes.extend(record_v5(1, "old", 1, 10, 0, "busy"));
    let counts_at = 4 + 8 + "old".len() + 56;
    bytes[counts_at..counts_at + 5 * 4].fill(0xff);
    let disk = FakeDisk::with_files(&BTreeMap::from([("binlog.1".to_owned(), bytes)]));
    let mut engine = Engine::start(&disk, policy(4096, Syncing::EachIteration), FIXTURE_DAY);
    engine.ask("reserve-job 1\r\nbury 1 10\r\nkick-job 1\r\nreserve-job 1\r\nrelease 1 10 0\r\n");
    assert_eq!(view(&mut engine, 1).unwrap().counts, [1, u32::MAX, 0, 0, 0]);
    engine.ask("reserve-job 1\r\n");
    engine.now = engine.now + Nanos::from_secs(90);
    assert_eq!(view(&mut engine, 1).unwrap().counts, [2, 0, 0, 0, 0]);
}

#[test]
fn times_of_version_5_that_are_too_large_for_7_stay_in_the_future() {
    let mut bytes = 5_i32.to_ne_bytes().to_vec();
    bytes.extend(record_v5(2, "old", 4, 20, 1000, "delayed"));
    let due_at = 4 + 8 + "old".len() + 48;
    bytes[due_at..due_at + 8].copy_from_slice(&i64::MAX.to_ne_bytes());
    bytes.extend(record_v5(1, "old", 1, 10, 0, "ready"));
    let disk = FakeDisk::with_files(&BTreeMap::from([("binlog.1".to_owned(), bytes)]));
    let policy = policy(4096, Syncing::EachIteration);
    let mut engine = Engine::start(&disk, policy, FIXTURE_DAY);
    // Many short records, so that all jobs are moved.
    for _ in 0..200 {
        engine.ask("reserve-job 1\r\nrelease 1 10 0\r\n");
    }
    assert!(engine.stat("binlog-oldest-index") > 1, "the old file is gone");
    let mut again = Engine::start(&disk, policy, engine.now);
    assert!(again.ask("stats-job 2\r\n").contains("\nstate: delayed\n"));
}

#[test]
fn space_that_comes_back_after_a_start_on_a_full_disk_is_not_wasted() {
    let policy = policy(65_536, Syncing::EachIteration);
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy, START);
    for _ in 0..900 {
        engine.put("x").unwrap();
    }
    let mut starts = 0;
    for capacity in (150_000..400_000).step_by(4096) {
        let image = FakeDisk::with_files(&disk.live_files());
        image.set_capacity(Some(capacity));
        let Some(mut again) = Engine::try_start(&image, policy, engine.now) else { continue };
        starts += 1;
        image.set_capacity(None);
        let before = image.used();
        for _ in 0..8 {
            assert!(again.put(&"y".repeat(20_000)).is_some(), "capacity {capacity}");
        }
        assert!(image.used() <= before + 8 * 65_536, "capacity {capacity}: {}", image.used());
    }
    assert!(starts > 10, "only {starts} starts");
}

#[test]
fn a_disk_that_is_full_again_and_again_breaks_no_promise() {
    for seed in 0..100 {
        let mut random = fastrand::Rng::with_seed(seed);
        let file_size = if random.bool() { 4096 } else { 16_384 };
        let policy = policy(file_size, Syncing::EachIteration);
        let disk = FakeDisk::default();
        let mut engine = Engine::start(&disk, policy, START);
        disk.set_capacity(Some(u64::from(file_size) * random.u64(4..14)));
        let mut live = Vec::new();
        for step in 0..400 {
            let any = random.choice(&live).copied();
            match (random.u8(..10), any) {
                (0..=4, _) => {
                    let len = random.choice([0, 10, 300, 3000, 5000]).unwrap();
                    let before = engine.stat("total-jobs");
                    match engine.put(&"q".repeat(len)) {
                        Some(id) => live.push(id),
                        None => assert_eq!(engine.stat("total-jobs"), before),
                    }
                }
                (5 | 6, Some(id)) => {
                    let said = engine.ask(&format!("delete {id}\r\n"));
                    assert_eq!(said, "DELETED\r\n", "seed {seed}, step {step}");
                    live.retain(|other| *other != id);
                }
                (7 | 8, Some(id)) => {
                    engine.ask(&format!("reserve-job {id}\r\nrelease {id} 1 0\r\nbury {id} 1\r\n"));
                }
                _ => engine.idle(3),
            }
        }
        disk.set_capacity(None);
        let again = Engine::start(&disk, policy, engine.now);
        assert_eq!(again.recovered.jobs, live.len() as u64, "seed {seed}");
        drop(engine);
        // It comes to rest.
        let mut engine = again;
        engine.idle(2_000);
        let rest = engine.server.next_due();
        assert!(rest.is_none_or(|due| due > engine.now), "seed {seed}: there is no end to it");
    }
}

#[test]
fn due_times_are_true_when_the_clock_was_set_meanwhile() {
    let policy = policy(65_536, Syncing::EachIteration);
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy, START);
    // The machine has slept for an hour.
    let hour = Nanos::from_secs(3600);
    engine.server.set_clock_offset(ClockOffset::between(engine.now, engine.now + hour));
    engine.ask("put 0 100 9 1\r\nx\r\n");
    let mut again = Engine::start(&disk, policy, engine.now + hour);
    let job = again.ask("stats-job 1\r\n");
    assert_eq!((field(&job, "time-left"), field(&job, "age")), (Some("99"), Some("0")));
}

/// As beanstalkd(1) says under THE BINLOG.
#[test]
fn a_delay_ends_by_the_new_clock_after_a_restart() {
    let policy = policy(65_536, Syncing::EachIteration);
    let disk = FakeDisk::default();
    let mut engine = Engine::start(&disk, policy, START);
    engine.ask("put 0 100 9 1\r\nx\r\n");
    let time_left = |engine: &mut Engine| -> u64 {
        let job = engine.ask("stats-job 1\r\n");
        field(&job, "time-left").unwrap().parse().unwrap()
    };
    // Set forward by 40 seconds: not seen before the restart.
    let ahead = Nanos::from_secs(40);
    engine.server.set_clock_offset(ClockOffset::between(engine.now, engine.now + ahead));
    assert_eq!(time_left(&mut engine), 99);
    let mut again = Engine::start(&disk, policy, engine.now + ahead);
    assert_eq!(time_left(&mut again), 59);
    // Set back by 40 seconds: later, though not later than the full delay from the start on.
    let mut again = Engine::start(&disk, policy, engine.now.before(ahead));
    assert_eq!(time_left(&mut again), 99);
}

#[test]
fn a_delay_is_never_longer_than_it_was_asked_for_when_the_clock_was_set_back() {
    let disk = FakeDisk::default();
    let policy = policy(1 << 20, Syncing::EachIteration);
    let mut engine = Engine::start(&disk, policy, START);
    assert_eq!(engine.ask("put 0 100 9 1\r\na\r\n"), "INSERTED 1\r\n");
    assert_eq!(engine.ask("put 0 300 9 1\r\nb\r\n"), "INSERTED 2\r\n");
    let hours_before = Nanos::from_nanos(START.as_nanos() - Nanos::from_secs(10_000).as_nanos());
    for now in [hours_before, Nanos::from_secs(1)] {
        let mut again = Engine::start(&disk, policy, now);
        assert_eq!(field(&again.ask("stats-job 1\r\n"), "time-left"), Some("99"));
        assert_eq!(field(&again.ask("stats-job 2\r\n"), "time-left"), Some("299"));
        again.now = again.now + Nanos::from_secs(100);
        assert_eq!(field(&again.ask("stats-job 1\r\n"), "state"), Some("ready"));
    }
    // Set right again, it shows what was recorded.
    let mut again = Engine::start(&disk, policy, START + Nanos::from_secs(50));
    assert_eq!(field(&again.ask("stats-job 1\r\n"), "time-left"), Some("50"));
}
