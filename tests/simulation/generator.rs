//! Generates histories: clients that give all commands, malformed ones too, and faults of the disk.
//!
//! Each seed has a profile of its own: which commands are frequent, whether clients send whole
//! commands or single bytes, and how often the disk fails. The generator takes most ids and tubes
//! from the model, so that most commands have an effect.

use super::driver::Simulation;
use super::event::{Crash, Event, Of, SETTINGS, Setup};
use super::model::{ClientNumber, EXTENSIONS, Model, SECOND, State};
use super::request::{Argument, Command, MAX_COUNT, STATES, command_named, commands};
use crate::harness::driver::Limits;
use std::collections::{BTreeMap, VecDeque};

pub struct Generator {
    random: fastrand::Rng,
    pub setup: Setup,
    profile: Profile,
    /// For the comparison with C beanstalkd: no timer becomes due, at most one client waits, and no
    /// command triggers a known defect of C.
    is_timeless: bool,
    /// Whether a client may wait, quit or send malformed commands now.
    may_stop: bool,
    /// The rest of commands that clients have sent in part.
    unsent: BTreeMap<ClientNumber, Vec<u8>>,
    starts: u64,
    /// A client that only keeps all tubes.
    keeper: Option<ClientNumber>,
    /// The events that follow the last one: a client that stops to read its replies asks for many, and
    /// a crash in the middle of a flush.
    next: VecDeque<Event>,
}

/// How frequent each kind of event is.
#[derive(Debug)]
struct Profile {
    clients: usize,
    jobs: usize,
    tubes: Vec<String>,
    body_len: usize,
    /// Bodies are so large that a batch ends with 1 MiB of them.
    has_large_bodies: bool,
    /// Tubes have hundreds of jobs, so that a flush takes several iterations.
    is_deep: bool,
    /// In percent: how often an iteration ends after an event, a client sends only a part of a
    /// command, and a command is malformed.
    iteration_ends: u8,
    pieces: u8,
    malformed: u8,
    /// How many puts in a hundred have a key, and how many one of `con:`.
    keys: u8,
    cons: u8,
    /// The longest usual TTR and delay, in seconds.
    ttr: u32,
    delay: u32,
    /// The weight of each command.
    commands: Vec<(&'static Command, u32)>,
    /// In a thousand events.
    times: u32,
    connects: u32,
    disconnects: u32,
    read_limits: u32,
    bursts: u32,
    acknowledgements: u32,
    /// Ends of reads and of syncs.
    ends: u32,
    /// In ten thousand events.
    crashes: u32,
    disk_limits: u32,
    clock_offsets: u32,
    drains: u32,
}

/// They show how many connections watch or use a tube, close one, or free jobs in the same ticks.
const KNOWS_WATCHES: [&str; 4] = ["stats-tube", "quit", "flush-tube", "flush-buried"];
/// They make records and garbage.
const RECORDED: [&str; 6] = ["put", "delete", "reserve-job", "release", "bury", "kick-job"];
const FLUSHES: [&str; 2] = ["flush-tube", "flush-buried"];

/// Lines that are no commands, or commands with unusual arguments.
const MALFORMED: &str = "put|delete|reserve-with-timeout|kick -1|kick \t+2x|statsx|quitting|peek-readyy|\
    pause-tubea 0|put 1 2 3|use -a|stats |reserve-with-timeout 2147483648|put 0 0 1 99999999999|\
    reserve |release 1 2|put 4294967296 0 1 0|delete 18446744073709551616|list-jobs|\
    list-jobs a any 0|list-clients|list-clients 0|list-clients 1 0 |list-clients 1 a|list-jobs a any 1001|list-jobs a an 1|list-jobs a any 1 |\
    peek-batch a ready 1 1 1|reserve-batch|reserve-batch 0|reserve-batch 1 2147483648|\
    delete-batch |delete-batch 1 x|touch-allx|flush-tube  a|flush-buried -a|\
    put-in-tube a 0 0 1 |put 0 0 1 idp:a";

const NAMES: [&str; 8] = ["default", "a", "b", "mail", "az09-+/;.$_()", "c", "d", "work.now"];
/// In seconds: longer than a run.
const LONG: u32 = 1_000_000;
/// The largest body where a batch ends with 1 MiB of them.
const LARGE_BODY_LEN: u32 = 1_100_000;
/// A client sends nothing more while the server has not read this many bytes.
const MAX_UNREAD: usize = 300;
/// The number of commands in a burst: more than the server runs in one iteration, also where each
/// iteration ends in a sync.
const BURST: std::ops::Range<usize> = 250..500;
const BURST_BEFORE_SYNC: std::ops::Range<usize> = 4_000..6_000;
/// The number of puts in a burst. So few jobs become due in one iteration, and the model does not
/// have to know in which steps the engine handles more.
const BURST_OF_PUTS: std::ops::Range<usize> = 10..40;
/// The number of puts in a burst of jobs that are never due, and of jobs that make a flush take
/// several iterations.
const DEEP_BURST: std::ops::Range<usize> = 100..900;
const DEEP_JOBS: std::ops::Range<usize> = 400..3_000;
/// The weight of each flush where it takes several iterations.
const DEEP_FLUSH_WEIGHT: u32 = 15;
/// A client that has reserved this many jobs reserves no batch: all its jobs may be due in one tick,
/// which takes back about 32.
const MAX_HELD: usize = 20;

impl Generator {
    pub fn new(seed: u64) -> Generator {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut setup = setup(&mut random);
        let profile = profile(&mut random, &setup);
        if profile.has_large_bodies {
            setup.max_job_size = LARGE_BODY_LEN;
            setup.limits.read_bytes = Limits::DEFAULT.read_bytes;
        }
        let unsent = BTreeMap::new();
        let mut generator = Generator {
            random,
            setup,
            profile,
            is_timeless: false,
            may_stop: true,
            unsent,
            starts: 1,
            keeper: None,
            next: VecDeque::new(),
        };
        if setup.limits.closing_work < Limits::DEFAULT.closing_work {
            generator.close_in_steps();
        }
        generator
    }

    /// Closed connections give back their jobs in steps. A client keeps all tubes: while the others
    /// close, it would not be known which tubes are left.
    fn close_in_steps(&mut self) {
        self.is_timeless = true;
        let it = &mut self.profile;
        it.commands.retain(|(command, _)| !KNOWS_WATCHES.contains(&command.word));
        (it.has_large_bodies, it.is_deep) = (false, false);
        (it.malformed, it.times, it.bursts) = (0, 0, 0);
        (it.disconnects, it.drains) = (60, 0);
        let keeper = it.clients;
        let watches: String = it.tubes.iter().map(|tube| format!("watch {tube}\r\n")).collect();
        self.next.push_back(Event::Connect(keeper));
        self.next.push_back(Event::Send(keeper, watches.into_bytes()));
        self.keeper = Some(keeper);
    }

    /// Generates histories whose replies do not depend on time.
    pub fn timeless(seed: u64) -> Generator {
        let mut generator = Generator::new(seed);
        generator.setup = Setup::new(generator.setup.max_job_size);
        (generator.is_timeless, generator.keeper) = (true, None);
        generator.next.clear();
        let it = &mut generator.profile;
        it.commands.retain(|(it, _)| !EXTENSIONS.iter().any(|extension| extension.word == it.word));
        (it.has_large_bodies, it.is_deep) = (false, false);
        (it.iteration_ends, it.pieces, it.keys, it.cons) = (0, 0, 0, 0);
        (it.times, it.disconnects, it.read_limits, it.bursts) = (0, 0, 0, 0);
        (it.crashes, it.disk_limits, it.clock_offsets, it.drains) = (0, 0, 0, 0);
        (it.acknowledgements, it.ends) = (0, 0);
        generator
    }

    /// Generates histories of a binlog of many small files, which a client fills and empties. Syncs are
    /// before each reply, soon, soon and in the background, or never.
    pub fn of_records(seed: u64) -> Generator {
        const SETUPS: [&str; 4] = [
            "setup 65535 file-size 4096 sync-within 0",
            "setup 65535 file-size 8192 sync-within 8000000",
            "setup 65535 file-size 8192 sync-within 8000000 threads",
            "setup 65535 file-size 4096",
        ];
        let mut generator = Generator::new(seed);
        let index = usize::try_from(seed % 4).expect("it is small");
        generator.setup = SETUPS[index].parse().expect("it is a setup");
        (generator.keeper, generator.is_timeless) = (None, false);
        generator.next.clear();
        let it = &mut generator.profile;
        it.commands.retain(|(command, _)| RECORDED.contains(&command.word));
        it.commands.iter_mut().for_each(|(_, weight)| *weight += 10);
        (it.jobs, it.body_len, it.has_large_bodies, it.is_deep) = (30, 3_000, false, false);
        (it.iteration_ends, it.pieces, it.malformed, it.bursts) = (60, 0, 0, 0);
        (it.times, it.acknowledgements, it.ends) = (60, 0, if index == 2 { 100 } else { 0 });
        (it.crashes, it.disk_limits, it.clock_offsets) = (0, 0, 0);
        generator
    }

    pub fn next(&mut self, simulation: &Simulation) -> Event {
        if self.starts != simulation.starts {
            self.starts = simulation.starts;
            self.unsent.clear();
        }
        if let Some(event) = self.next.pop_front() {
            return event;
        }
        if simulation.disk.is_refused() && self.random.u8(..20) == 0 {
            return Event::Crash(self.crash());
        }
        let clients = simulation.clients();
        let chance = self.random.u32(..1000);
        let profile = &self.profile;
        let client = self.random.choice(&clients).copied();
        let client = client.filter(|client| Some(*client) != self.keeper);
        let Some(client) = client.filter(|_| chance >= profile.connects) else {
            return Event::Connect(self.random.usize(..profile.clients));
        };
        if chance < profile.connects + profile.times {
            return self.time();
        }
        if self.random.u32(..1000) < profile.acknowledgements {
            return self.acknowledge(simulation);
        }
        if self.random.u32(..1000) < profile.ends {
            let count = if self.random.bool() { usize::MAX } else { self.random.usize(1..4) };
            return match self.random.u8(..3) {
                0 => Event::EndSync,
                1 if count < 3 => {
                    self.next.push_back(Event::EndReads(usize::MAX));
                    Event::FailReads(count)
                }
                _ => Event::EndReads(count),
            };
        }
        let chance = self.random.u32(..1000);
        if chance < profile.disconnects {
            if self.keeper.is_some() && simulation.driver.facts().closing > 0 {
                return Event::EndIteration;
            }
            self.unsent.remove(&client);
            if self.keeper.is_some() {
                return Event::Disconnect(client);
            }
            return match self.random.u8(..4) {
                0 => Event::Disconnect(client),
                other => Event::HalfClose(client, other > 1),
            };
        }
        if chance < profile.disconnects + profile.read_limits {
            return self.read_limit(client, simulation);
        }
        if let Some(event) = self.fault(simulation) {
            return event;
        }
        if self.random.u8(..100) < self.profile.iteration_ends {
            return Event::EndIteration;
        }
        self.send(client, simulation)
    }

    fn read_limit(&mut self, client: ClientNumber, simulation: &Simulation) -> Event {
        let limit = match self.random.u8(..3) {
            0 => Some(0),
            1 => Some(self.random.usize(1..5_000)),
            _ => None,
        };
        let jobs = &simulation.model.jobs;
        let can_send = simulation.can_send(client) && simulation.unread(client) <= MAX_UNREAD;
        if let (Some(_), Some(longest)) = (limit, jobs.iter().max_by_key(|job| job.body.len()))
            && can_send
        {
            let peek = format!("peek {}\r\n", longest.id);
            let peeks = peek.repeat(self.random.usize(BURST)).into_bytes();
            self.next.push_back(Event::Send(client, peeks));
        }
        Event::ReadLimit(client, limit)
    }

    /// Acknowledges a change, some, or all that wait.
    fn acknowledge(&mut self, simulation: &Simulation) -> Event {
        let waiting = simulation.disk.waiting();
        match self.random.u8(..6) {
            0 => Event::Acknowledge(1),
            1..4 => Event::Acknowledge(self.random.usize(..=waiting)),
            _ => Event::Acknowledge(usize::MAX),
        }
    }

    /// While the disk reads a body, compaction looks for it each millisecond: then only short times pass.
    fn time(&mut self) -> Event {
        let has_threads = self.setup.has_threads;
        if has_threads && self.random.bool() {
            return Event::Advance(self.random.u64(..200_000_000));
        }
        let event = match self.random.u8(..10) {
            0..4 => Event::AdvanceUntilDue,
            4..6 => Event::Advance(self.random.u64(..20_000_000)),
            6..8 => Event::Advance(self.random.u64(..3 * SECOND)),
            8 => Event::Advance(self.random.u64(..20) * SECOND),
            _ => Event::Suspend(self.random.u64(..3 * SECOND)),
        };
        if !has_threads {
            return event;
        }
        self.next.push_back(event);
        Event::EndReads(usize::MAX)
    }

    fn fault(&mut self, simulation: &Simulation) -> Option<Event> {
        let Profile { crashes, disk_limits, clock_offsets, drains, .. } = self.profile;
        let chance = self.random.u32(..10_000);
        let ends =
            [crashes, disk_limits, clock_offsets, drains].into_iter().scan(0, |end, next| {
                *end += next;
                Some(*end)
            });
        let kind = ends.into_iter().position(|end| chance < end)?;
        Some(match kind {
            0 => match self.random.u8(..4) {
                0 => Event::Restart,
                1 if self.setup.chunk_len.is_some() => Event::LoseLeadership(self.random.u64(..)),
                // Without space for the record of its bury, a job is ready.
                1 => match (self.random.u64(..12), self.crash()) {
                    (changes @ 0..9, crash) if self.setup.bury_after.is_none() => {
                        Event::FailDiskAfter(changes, crash)
                    }
                    (syncs, crash) => Event::FailSyncsAfter(syncs % 3, crash),
                },
                _ => Event::Crash(self.crash()),
            },
            1 => {
                let is_unlimited = self.random.u8(..3) == 0;
                let file_size = self.setup.file_size.unwrap_or(1);
                // About as much as the files take now, or a little more.
                let more = self.random.u64(..3) * file_size;
                let bytes = simulation.disk.used() + more - self.random.u64(..=more.min(file_size));
                Event::DiskCapacity((!is_unlimited).then_some(bytes))
            }
            2 => Event::ClockOffset(self.random.i64(-3_600..3_600) * 1_000_000_000),
            _ => Event::Drain(!simulation.model.is_draining),
        })
    }

    fn crash(&mut self) -> Crash {
        let power_cut = self.random.bool().then(|| self.random.u64(..));
        let flipped_bits = if self.random.u8(..6) == 0 { self.random.u32(1..4) } else { 0 };
        // The keys of jobs may be lost then, although the jobs are there.
        let loses_keys = self.profile.cons > 0;
        let power_cut = power_cut.filter(|_| !loses_keys);
        Crash { power_cut, flipped_bits: if loses_keys { 0 } else { flipped_bits } }
    }

    // ---- Commands ----

    fn send(&mut self, client: ClientNumber, simulation: &Simulation) -> Event {
        if !simulation.can_send(client) || simulation.unread(client) > MAX_UNREAD {
            return Event::EndIteration;
        }
        let model = &simulation.model;
        if model.is_waiting(client) && (self.is_timeless || self.random.u8(..8) > 0) {
            return Event::EndIteration;
        }
        let mut bytes = self.unsent.remove(&client).unwrap_or_default();
        if bytes.is_empty() && self.random.u32(..1000) < self.profile.bursts {
            return Event::Send(client, self.burst(client, model));
        }
        if bytes.is_empty()
            && self.profile.is_deep
            && model.jobs.len() < self.profile.jobs
            && self.random.u8(..8) == 0
        {
            return Event::Send(client, self.deep_burst());
        }
        if bytes.is_empty() {
            let count = if self.random.u8(..4) == 0 { self.random.usize(1..5) } else { 1 };
            // C does not define the order of commands of several clients.
            self.may_stop = !self.is_timeless || (count == 1 && model.waiters.is_empty());
            let is_in_order = !self.is_timeless || model.waiters.is_empty();
            for _ in 0..if is_in_order { count } else { 1 } {
                self.command(client, model, &mut bytes);
            }
        }
        if self.random.u8(..100) < self.profile.pieces {
            let longest = if self.random.bool() { 4 } else { bytes.len() };
            let rest =
                bytes.split_off(self.random.usize(..longest.max(1)).min(bytes.len() - 1) + 1);
            if !rest.is_empty() {
                self.unsent.insert(client, rest);
            }
        }
        Event::Send(client, bytes)
    }

    /// One command many times, more often than the server runs it in one iteration.
    fn burst(&mut self, client: ClientNumber, model: &Model) -> Vec<u8> {
        let id = self.id(client, model);
        let (command, range) = match self.random.u8(..8) {
            0 => ("put 1 0 9 0\r\n\r\n".to_owned(), BURST_OF_PUTS),
            1 => ("put 1 0 9 0\r\nxx".to_owned(), BURST),
            2 => ("stats\r\n".to_owned(), BURST_OF_PUTS),
            3 => (format!("peek {id}\r\n"), BURST),
            4 => (format!("kick-job {id}\r\n"), BURST),
            5 if self.random.u8(..4) == 0 => ("x\r\n".to_owned(), BURST_BEFORE_SYNC),
            5 if model.jobs.len() <= MAX_HELD => ("reserve-with-timeout 0\r\n".to_owned(), BURST),
            6 => (format!("use {}\r\nlist-tube-used\r\n", self.tube()), BURST),
            _ => ("list-tube-used\r\n".to_owned(), BURST),
        };
        let count = self.random.usize(range);
        let mut bytes = command.into_bytes().repeat(count);
        self.command(client, model, &mut bytes);
        bytes
    }

    /// Puts many jobs that are never due.
    fn deep_burst(&mut self) -> Vec<u8> {
        let count = self.random.usize(DEEP_BURST);
        let (pri, delay) = (self.pri(), [0, 0, u32::MAX][self.random.usize(..3)]);
        let len = [0, 1, 30][self.random.usize(..3)];
        let body = "d".repeat(len);
        format!("put {pri} {delay} {} {len}\r\n{body}\r\n", u32::MAX).repeat(count).into_bytes()
    }

    fn command(&mut self, client: ClientNumber, model: &Model, bytes: &mut Vec<u8>) {
        let is_malformed = self.random.u8(..100) < self.profile.malformed;
        if is_malformed && (!self.is_timeless || self.may_stop) {
            let start = bytes.len();
            self.malformed(client, model, bytes);
            if !self.is_timeless || is_parsed_alike(&bytes[start..]) {
                return;
            }
            bytes.truncate(start);
        }
        let command = self.choose(model);
        let is_flush = FLUSHES.contains(&command.word);
        if is_flush && self.profile.is_deep && self.profile.crashes > 0 && self.random.bool() {
            // In the middle of the flush, or after it.
            let iterations = self.random.usize(..4);
            self.next.extend(std::iter::repeat_n(Event::EndIteration, iterations));
            let crash = self.crash();
            self.next.push_back(Event::Crash(crash));
        }
        match command.word {
            "put" => return self.put("put".to_owned(), bytes),
            "put-in-tube" => {
                let words = format!("put-in-tube {}", self.tube());
                return self.put(words, bytes);
            }
            _ => {}
        }
        let line = self.line(command, client, model);
        bytes.extend_from_slice(line.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }

    fn choose(&mut self, model: &Model) -> &'static Command {
        let is_full = model.jobs.len() >= self.profile.jobs;
        let sum: u32 = self.profile.commands.iter().map(|(_, weight)| weight).sum();
        let mut at = self.random.u32(..sum);
        let found = self.profile.commands.iter().find(|(_, weight)| {
            let is_it = at < *weight;
            at = at.saturating_sub(*weight);
            is_it
        });
        let command = found.expect("the weights add up to the sum").0;
        let is_put = command.word.starts_with("put");
        if is_put && is_full { command_named("delete") } else { command }
    }

    fn put(&mut self, words: String, bytes: &mut Vec<u8>) {
        let (pri, delay, ttr) = (self.pri(), self.delay(), self.ttr());
        let max = self.setup.max_job_size as usize;
        let len = match self.random.u8(..60) {
            chance if self.profile.has_large_bodies && chance < 30 => self.large_body_len(),
            0 if max <= self.profile.body_len || self.random.u8(..8) == 0 => max,
            1 if max <= self.profile.body_len => max.saturating_sub(1),
            _ => self.random.usize(..=self.profile.body_len) >> self.random.u32(..8),
        };
        let tag = self.tag();
        let line = format!("{words} {pri} {delay} {ttr} {len}{tag}\r\n");
        // A long name may leave too few bytes of the line.
        let has_body = line.len() <= 224 || !tag.is_empty();
        bytes.extend_from_slice(line.as_bytes());
        if !has_body {
            return;
        }
        let letter = self.random.alphanumeric() as u8;
        let is_text = self.profile.has_large_bodies || self.random.u8(..8) > 0;
        let random = &mut self.random;
        bytes.extend((0..len).map(|_| if is_text { letter } else { random.u8(..) }));
        // Some bodies are longer than announced.
        bytes.extend_from_slice(if self.random.u8(..60) == 0 { b"xx" } else { b"\r\n" });
    }

    /// The keys of a job, if it has some.
    fn tag(&mut self) -> String {
        if self.profile.cons == 0 {
            return self.unique_tag();
        }
        let mut tags = [self.unique_tag(), self.con_tag()];
        self.random.shuffle(&mut tags);
        tags.concat()
    }

    fn con_tag(&mut self) -> String {
        if self.random.u8(..100) >= self.profile.cons {
            return String::new();
        }
        let key = self.random.u8(..4);
        match self.random.u8(..4) {
            0 => format!("  con:con-{key}:{}", self.random.u32(1..4)),
            1 => format!(" con:con-{key}:2"),
            _ => format!(" con:con-{key}"),
        }
    }

    /// The key of a unique job, if it has one. There are few keys, so that jobs have the same.
    fn unique_tag(&mut self) -> String {
        if self.random.u8(..100) >= self.profile.keys {
            return String::new();
        }
        let key = match self.random.u8(..20) {
            0 => "k".repeat(200),
            other => format!("key-{}", other % 5),
        };
        match self.random.u8(..8) {
            0..3 => format!(" idp:{key}"),
            3 => format!("  idp:{key}:0"),
            4 => format!(" idp:{key}:{}", u32::MAX),
            _ => format!(" idp:{key}:{}", self.random.u32(1..6)),
        }
    }

    /// Some of these add up to 1 MiB, or to one byte more.
    fn large_body_len(&mut self) -> usize {
        const MIB: usize = 1 << 20;
        let sizes =
            [MIB, MIB / 2, MIB / 2, MIB / 2 + 1, MIB / 4, MIB / 4, MIB / 4 - 1, MIB - 100, 1, 0];
        sizes[self.random.usize(..sizes.len())]
    }

    fn line(&mut self, command: &'static Command, client: ClientNumber, model: &Model) -> String {
        // C may lose its last replies with unread commands behind a `quit`.
        let command = match command.word {
            "reserve" if !self.may_stop => command_named("reserve-with-timeout"),
            "quit" if !self.may_stop => command_named("list-tubes"),
            _ => command,
        };
        let mut line = command.word.to_owned();
        for argument in command.arguments {
            line += &self.argument(*argument, client, model);
        }
        line
    }

    /// Returns an argument with the space before it, or nothing.
    fn argument(&mut self, what: Argument, client: ClientNumber, model: &Model) -> String {
        match what {
            Argument::Tube | Argument::LastTube => format!(" {}", self.tube()),
            Argument::Pause => {
                let secs = if self.is_timeless { LONG } else { self.random.u32(..4) };
                format!(" {} {secs}", self.tube())
            }
            Argument::Id => format!(" {}", self.id(client, model)),
            Argument::Held => format!(" {}", self.held(client, model)),
            Argument::Ids => {
                let count = match self.random.u8(..20) {
                    0 => self.random.usize(MAX_COUNT..=MAX_COUNT + 2),
                    1 => self.random.usize(1..200),
                    _ => self.random.usize(1..9),
                };
                (0..count).map(|_| format!(" {}", self.id(client, model))).collect()
            }
            Argument::Pri => format!(" {}", self.pri()),
            Argument::Delay => format!(" {}", self.delay()),
            Argument::Ttr => format!(" {}", self.ttr()),
            // In `put`, where it is known whether a body follows.
            Argument::Len | Argument::Tag | Argument::Anything => String::new(),
            Argument::Timeout => {
                let is_none = self.is_timeless || self.random.bool();
                format!(" {}", if is_none { 0 } else { self.random.u32(..4) })
            }
            Argument::Wait => match self.random.u8(..3) {
                0 => String::new(),
                1 => " 0".to_owned(),
                _ => format!(" {}", self.random.u32(..4)),
            },
            Argument::BatchCount => {
                let held = model.jobs.iter().filter(|job| is_held_by(job.state, client)).count();
                let count = match self.random.u8(..12) {
                    _ if held > MAX_HELD => 1,
                    0 if model.jobs.len() <= MAX_HELD => MAX_COUNT,
                    _ => self.random.usize(1..12),
                };
                format!(" {count}")
            }
            Argument::PageCount => {
                let count = match self.random.u8(..6) {
                    0 => MAX_COUNT,
                    1 => self.random.usize(1..=MAX_COUNT),
                    _ => self.random.usize(1..6),
                };
                format!(" {count}")
            }
            Argument::Bound => format!(" {}", self.random.u32(..12)),
            Argument::State => {
                let state = STATES[self.random.usize(..STATES.len())];
                format!(" {}", if self.random.bool() { "any" } else { state })
            }
            // The second one is that of a connection that is closed again and again.
            Argument::AfterClient => match self.random.u8(..3) {
                0 => " 0".to_owned(),
                _ => format!(" {}", self.random.u64(..6)),
            },
            Argument::AnyTube => match self.random.bool() {
                true => String::new(),
                false => format!(" {}", self.tube()),
            },
            Argument::After => match self.random.u8(..3) {
                0 => String::new(),
                1 => format!(" {}", self.random.u64(..=model.last_id)),
                _ => format!(" {}", self.random.choice(&model.jobs).map_or(0, |job| job.id)),
            },
        }
    }

    fn malformed(&mut self, client: ClientNumber, model: &Model, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        let others = commands().filter(|command| !command.arguments.contains(&Argument::Len));
        let command = self.random.choice(others.collect::<Vec<_>>()).expect("there are others");
        let line = self.line(command, client, model);
        match self.random.u8(..14) {
            0 => bytes.extend((0..self.random.usize(..40)).map(|_| self.random.u8(..))),
            1 => bytes.extend_from_slice(&b"x".repeat(self.random.usize(215..600))),
            2 => {
                bytes.extend_from_slice(line.as_bytes());
                bytes.resize(start + self.random.usize(215..240).max(line.len()), b' ');
            }
            3 => {
                let lines: Vec<&str> = MALFORMED.split('|').collect();
                let line = lines[self.random.usize(..lines.len())];
                // A kick of more jobs than one step moves may end in its middle.
                let line =
                    if self.profile.is_deep { line.replace("-1", "1") } else { line.to_owned() };
                bytes.extend_from_slice(line.as_bytes());
            }
            // A body over the size limit.
            4 => {
                let len = self.setup.max_job_size as usize + self.random.usize(1..300);
                bytes.extend_from_slice(format!("put 0 0 1 {len}\r\n").as_bytes());
                bytes.resize(bytes.len() + len, b'\n');
            }
            5 => {
                let words = ["put", "put-in-tube a"][self.random.usize(..2)];
                let ends =
                    ["x", "idp:", "idp:-", "idp:a:", "idp:a idp:b", "idp:a:4294967296", "grp:a"];
                let end = ends[self.random.usize(..ends.len())];
                let line = format!("{words} 1 0 9 {} {end}", self.random.u8(..9));
                bytes.extend_from_slice(line.as_bytes());
            }
            6 => bytes.extend_from_slice(line.to_uppercase().as_bytes()),
            7 => bytes.extend_from_slice(format!(" {line}").as_bytes()),
            8 => bytes.extend_from_slice(line.replace(' ', "  ").as_bytes()),
            9 => bytes.extend_from_slice(line.replace(' ', "\r").as_bytes()),
            10 => bytes.extend_from_slice(&line.as_bytes()[..self.random.usize(..line.len())]),
            12 => bytes.extend_from_slice(
                format!("use {}", "y".repeat(self.random.usize(199..202))).as_bytes(),
            ),
            // A browser's request.
            11 => {
                let path = "x".repeat(self.random.usize(..300));
                let word = ["GET", "use", "kick"][self.random.usize(..3)];
                bytes.extend_from_slice(format!("{word} /{path} HTTP/1.1").as_bytes());
            }
            _ => {
                bytes.extend_from_slice(line.as_bytes());
                let at = self.random.usize(start..bytes.len());
                bytes[at] = self.random.u8(..);
            }
        }
        bytes.extend_from_slice(match self.random.u8(..8) {
            0 => b"\n\r\n",
            1 => b"\r\r\n",
            _ => b"\r\n",
        });
    }

    // ---- Arguments ----

    fn tube(&mut self) -> String {
        self.profile.tubes[self.random.usize(..self.profile.tubes.len())].clone()
    }

    fn pri(&mut self) -> u32 {
        match self.random.u8(..8) {
            0 => [0, 1023, 1024, u32::MAX][self.random.usize(..4)],
            _ => self.random.u32(..5),
        }
    }

    fn ttr(&mut self) -> u32 {
        // So that deadlines are in another order than reservations.
        let longer = if self.is_timeless { LONG } else { 0 };
        longer + self.random.u32(..=self.profile.ttr)
    }

    fn delay(&mut self) -> u32 {
        match self.random.u8(..20) {
            0 => u32::MAX,
            1..6 if self.is_timeless => LONG,
            1..6 => self.random.u32(..=self.profile.delay),
            _ => 0,
        }
    }

    fn id(&mut self, client: ClientNumber, model: &Model) -> u64 {
        match self.random.u8(..10) {
            0 => [0, u64::MAX, model.last_id + 1][self.random.usize(..3)],
            1 => self.random.u64(..=model.last_id),
            2..6 => self.held(client, model),
            _ => self.random.choice(&model.jobs).map_or(1, |job| job.id),
        }
    }

    /// Mostly a job that the client has reserved.
    fn held(&mut self, client: ClientNumber, model: &Model) -> u64 {
        let own = model.jobs.iter().filter(|job| is_held_by(job.state, client)).map(|job| job.id);
        let own: Vec<u64> = own.collect();
        let any = self.random.u8(..15) == 0;
        let own = self.random.choice(&own).copied().filter(|_| !any);
        own.or_else(|| self.random.choice(&model.jobs).map(|job| job.id)).unwrap_or(1)
    }
}

fn is_held_by(state: State, client: ClientNumber) -> bool {
    matches!(state, State::Reserved { by, .. } if by == client)
}

/// Returns whether C beanstalkd parses these bytes as this server does. C misses the end of a line
/// with a CR inside, and of a long line that arrives in pieces, and does not close after an HTTP
/// request. Commands that it does not have and commands whose replies may depend on time are left out
/// too.
fn is_parsed_alike(bytes: &[u8]) -> bool {
    let lines = bytes.split(|&byte| byte == b'\n');
    let has = |word: &str| bytes.windows(word.len()).any(|window| window == word.as_bytes());
    let is_sound =
        |line: &[u8]| line.len() < 200 && !line[..line.len().max(1) - 1].contains(&b'\r');
    let is_other = ["reserve", "release", "pause-tube", "quit", " HTTP/"].into_iter().any(has);
    let is_extension =
        ["-batch", "-all", "-jobs", "-in-tube", "flush-", "idp:", "con:"].into_iter().any(has);
    lines.into_iter().all(is_sound) && !is_other && !is_extension
}

fn setup(random: &mut fastrand::Rng) -> Setup {
    let mut setup = Setup::new([0, 10, 300, 65_535, 65_535, 65_535][random.usize(..6)]);
    setup.bury_after = (random.u8(..3) == 0).then(|| random.u32(1..4).into());
    if random.u8(..5) > 1 {
        draw_binlog(random, &mut setup);
    }
    draw_limits(random, &mut setup);
    setup
}

fn draw_binlog(random: &mut fastrand::Rng, setup: &mut Setup) {
    let file_size = [4096, 8192, 16_384, 65_536][random.usize(..4)];
    setup.file_size = Some(file_size);
    if random.u8(..3) == 0 {
        setup.chunk_len = Some([50, 300, 4_000, 70_000][random.usize(..4)]);
        setup.congested_above =
            [None, None, Some(300), Some(3_000), Some(30_000)][random.usize(..5)];
        setup.eager = (random.u8(..3) == 0).then(|| random.u64(..));
    }
    let is_local = setup.chunk_len.is_none();
    let spans = [Some(0), Some(0), Some(50_000_000), Some(10_000_000), None];
    setup.sync_within = spans[random.usize(..5)].filter(|_| is_local);
    // Without space for the record of its bury, a job is ready.
    let is_limited = random.u8(..8) == 0 && setup.bury_after.is_none();
    setup.limit = is_limited.then(|| random.u64(4..16) * file_size);
    let has_cold = is_local && random.u8(..3) == 0;
    setup.body_cache = has_cold.then(|| [0, 200, 5_000, 200_000][random.usize(..4)]);
    setup.has_threads = has_cold && random.bool();
}

/// Draws small limits in two of three runs. In some the only steps are those of closed connections, and
/// no timer is due.
fn draw_limits(random: &mut fastrand::Rng, setup: &mut Setup) {
    let kind = random.u8(..12);
    if kind < 4 {
        return;
    }
    let is_closing = kind == 4;
    for setting in SETTINGS {
        let is_of_closing = setting.is_of_closing();
        let Of::Limit(of, range) = setting.1 else { continue };
        if if is_of_closing { is_closing } else { random.u8(..3) == 0 } {
            *of(&mut setup.limits) = random.usize(range);
        }
    }
    if is_closing {
        *setup = setup.without_binlog();
    }
    // No time passes between two steps.
    setup.congested_above = None;
    if setup.max_job_size > 300 {
        setup.limits.read_bytes = Limits::DEFAULT.read_bytes;
    }
}

fn profile(random: &mut fastrand::Rng, setup: &Setup) -> Profile {
    let (has_binlog, has_threads) = (setup.has_binlog(), setup.has_threads);
    let searches_in_steps = setup.limits.watches_per_step < Limits::DEFAULT.watches_per_step;
    let mut weights = Vec::new();
    for command in commands() {
        let is_flush = FLUSHES.contains(&command.word);
        // A job that is deleted while its body is read is tested in tests/binlog/cold.rs. The search of
        // many tubes does not show which jobs a batch has.
        let is_left_out =
            is_flush && has_threads || command.word == "reserve-batch" && searches_in_steps;
        let times = if is_left_out { 0 } else { [0, 1, 1, 1, 4][random.usize(..5)] };
        let times = if command.word == "put" { 1 } else { times };
        weights.push((command, command.weight * times));
    }
    let tubes = (0..random.usize(1..=NAMES.len())).map(|index| NAMES[index].to_owned());
    let mut tubes: Vec<String> = tubes.collect();
    if random.u8(..6) == 0 {
        tubes.push("x".repeat(200));
    }
    let seldom =
        |random: &mut fastrand::Rng, count: u32| if random.u8(..3) == 0 { count } else { 0 };
    let sets_clock = seldom(random, 1) == 1;
    let is_deep = random.u8(..24) == 0 && !has_threads;
    if is_deep {
        // So that a tube has enough jobs for a flush in steps, and is flushed.
        tubes.truncate(2);
        let flushes = weights.iter_mut().filter(|(it, _)| FLUSHES.contains(&it.word));
        flushes.for_each(|(_, weight)| *weight = DEEP_FLUSH_WEIGHT);
    }
    let has_large_bodies = !is_deep && random.u8(..24) == 0;
    let may_lack_space = has_binlog && setup.bury_after.is_none();
    // A draw that changes no other one.
    let cons = [0, 0, 0, 30, 80][random.clone().usize(..5)];
    if cons > 0 {
        // Several groups have a free slot at once after a flush, in no order.
        let flushes = weights.iter_mut().filter(|(it, _)| FLUSHES.contains(&it.word));
        flushes.for_each(|(_, weight)| *weight = 0);
    }
    Profile {
        clients: random.usize(1..=9),
        jobs: random.usize(if is_deep { DEEP_JOBS } else { 3..50 }),
        has_large_bodies,
        is_deep,
        tubes,
        body_len: [20, 200, 3_000, 9_000][random.usize(..4)],
        iteration_ends: [90, 60, 60, 20][random.usize(..4)],
        pieces: [0, 5, 20, 80][random.usize(..4)],
        malformed: [0, 3, 10, 30][random.usize(..4)],
        keys: [0, 10, 50, 90][random.usize(..4)],
        cons,
        ttr: [3, 3, 10, 1_000][random.usize(..4)],
        delay: [3, 10, 1_000][random.usize(..3)],
        commands: weights,
        times: [30, 120, 300][random.usize(..3)],
        connects: [5, 30][random.usize(..2)],
        disconnects: [0, 5, 30][random.usize(..3)],
        read_limits: seldom(random, 10),
        bursts: seldom(random, 10),
        acknowledgements: if setup.chunk_len.is_some() {
            [10, 50, 300][random.usize(..3)]
        } else {
            0
        },
        ends: if has_threads { [20, 100, 300][random.usize(..3)] } else { 0 },
        crashes: if has_binlog { [1, 10, 40][random.usize(..3)] } else { 0 },
        disk_limits: if may_lack_space { seldom(random, 30) } else { 0 },
        clock_offsets: if has_binlog && sets_clock { 20 } else { 0 },
        drains: seldom(random, 1) * seldom(random, 1),
    }
}
