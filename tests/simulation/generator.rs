//! Makes histories: many clients who do what clients do, and what they should not.
//!
//! Each seed makes a world of its own kind: some commands are common there and others unknown,
//! clients are tidy or send byte by byte, the disk is sound or not. The generator looks at the
//! model to choose ids and tubes that mean something, most of the time.

use super::event::{BinlogSetup, Crash, Event, Setup};
use super::model::{ClientNumber, Model, Phase, Place, SECOND};
use super::world::World;
use std::collections::BTreeMap;

pub struct Generator {
    random: fastrand::Rng,
    pub setup: Setup,
    kind: Kind,
    /// Nothing ever comes due, no more than one client waits, and nobody does what C beanstalkd is
    /// known to stumble over.
    is_timeless: bool,
    /// Whether a client may say what ends its turn, or upset it: it waits, goes, or says nonsense.
    may_stop: bool,
    /// What clients are in the middle of sending.
    outboxes: BTreeMap<ClientNumber, Vec<u8>>,
    lives: u64,
}

/// What kind of world it is.
#[derive(Debug)]
struct Kind {
    clients: usize,
    jobs: usize,
    tubes: Vec<String>,
    body_len: usize,
    /// In percent: how often a turn ends after an event, a client sends only a part of what it has
    /// to say, and a command is not what it should be.
    turns: u8,
    pieces: u8,
    hostility: u8,
    /// The longest TTR and delay that are usual, in seconds.
    ttr: u32,
    delay: u32,
    /// How often each command is given.
    commands: Vec<(Command, u32)>,
    /// How often something else than a command happens, of a thousand.
    times: u32,
    comings: u32,
    hang_ups: u32,
    stalls: u32,
    /// Of ten thousand.
    crashes: u32,
    disk_limits: u32,
    drifts: u32,
    drains: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    Put,
    Use,
    Watch,
    Ignore,
    Reserve,
    ReserveWithTimeout,
    ReserveJob,
    Delete,
    Release,
    Bury,
    Touch,
    Kick,
    KickJob,
    Peek,
    PeekReady,
    PeekDelayed,
    PeekBuried,
    Stats,
    StatsJob,
    StatsTube,
    ListTubes,
    ListTubeUsed,
    ListTubesWatched,
    PauseTube,
    Quit,
}

const COMMANDS: [(Command, u32); 25] = [
    (Command::Put, 200),
    (Command::Use, 40),
    (Command::Watch, 40),
    (Command::Ignore, 25),
    (Command::Reserve, 60),
    (Command::ReserveWithTimeout, 120),
    (Command::ReserveJob, 20),
    (Command::Delete, 130),
    (Command::Release, 60),
    (Command::Bury, 40),
    (Command::Touch, 25),
    (Command::Kick, 20),
    (Command::KickJob, 15),
    (Command::Peek, 10),
    (Command::PeekReady, 8),
    (Command::PeekDelayed, 8),
    (Command::PeekBuried, 8),
    (Command::Stats, 3),
    (Command::StatsJob, 25),
    (Command::StatsTube, 12),
    (Command::ListTubes, 6),
    (Command::ListTubeUsed, 4),
    (Command::ListTubesWatched, 6),
    (Command::PauseTube, 12),
    (Command::Quit, 2),
];

const NAMES: [&str; 8] = ["default", "a", "b", "mail", "az09-+/;.$_()", "c", "d", "work.now"];
/// To tell how many wait at a tube takes the longer the more stand there, and where they stand is not
/// known to the model: it is less than a piece of work.
const MOST_SHARERS: usize = 7;
/// So many seconds do not pass in a test.
const LONG: u32 = 1_000_000;
/// Nobody sends more as long as so much is unread.
const MOST_UNREAD: usize = 300;

impl Generator {
    pub fn new(seed: u64) -> Generator {
        let mut random = fastrand::Rng::with_seed(seed);
        let setup = setup(&mut random);
        let mut kind = kind(&mut random, setup.binlog.is_some());
        if setup.sharers > 1 {
            kind.clients = kind.clients.min(MOST_SHARERS);
        }
        let outboxes = BTreeMap::new();
        Generator { random, setup, kind, is_timeless: false, may_stop: true, outboxes, lives: 1 }
    }

    /// Makes histories that are the same however fast the clock goes.
    pub fn timeless(seed: u64) -> Generator {
        let mut generator = Generator::new(seed);
        generator.setup.binlog = None;
        generator.is_timeless = true;
        let kind = &mut generator.kind;
        (kind.turns, kind.pieces) = (0, 0);
        (kind.times, kind.hang_ups, kind.stalls) = (0, 0, 0);
        (kind.crashes, kind.disk_limits, kind.drifts, kind.drains) = (0, 0, 0, 0);
        generator
    }

    /// What happens next.
    pub fn next(&mut self, world: &World) -> Event {
        if self.lives != world.lives {
            self.lives = world.lives;
            self.outboxes.clear();
        }
        let clients = world.clients();
        let chance = self.random.u32(..1000);
        let kind = &self.kind;
        let client = self.random.choice(&clients).copied();
        let Some(client) = client.filter(|_| chance >= kind.comings) else {
            return Event::Connect(self.random.usize(..kind.clients));
        };
        if chance < kind.comings + kind.times {
            return self.time();
        }
        let chance = self.random.u32(..1000);
        if chance < kind.hang_ups {
            self.outboxes.remove(&client);
            return match self.random.u8(..4) {
                0 => Event::HangUp(client),
                other => Event::HalfClose(client, other > 1),
            };
        }
        if chance < kind.hang_ups + kind.stalls {
            let limit = match self.random.u8(..3) {
                0 => Some(0),
                1 => Some(self.random.usize(1..5_000)),
                _ => None,
            };
            return Event::Take(client, limit);
        }
        if let Some(event) = self.disaster(world) {
            return event;
        }
        if self.random.u8(..100) < self.kind.turns {
            return Event::Turn;
        }
        self.say(client, world)
    }

    fn time(&mut self) -> Event {
        match self.random.u8(..10) {
            0..4 => Event::WaitUntilDue,
            4..6 => Event::Wait(self.random.u64(..20_000_000)),
            6..8 => Event::Wait(self.random.u64(..3 * SECOND)),
            8 => Event::Wait(self.random.u64(..20) * SECOND),
            _ => Event::Sleep(self.random.u64(..3 * SECOND)),
        }
    }

    fn disaster(&mut self, world: &World) -> Option<Event> {
        let Kind { crashes, disk_limits, drifts, drains, .. } = self.kind;
        let chance = self.random.u32(..10_000);
        let ends = [crashes, disk_limits, drifts, drains].into_iter().scan(0, |end, next| {
            *end += next;
            Some(*end)
        });
        let place = ends.into_iter().position(|end| chance < end)?;
        Some(match place {
            0 => match self.random.u8(..4) {
                0 => Event::Restart,
                1 => Event::FailAfter(self.random.u64(..12), self.crash()),
                _ => Event::Crash(self.crash()),
            },
            1 => {
                let is_over = self.random.u8(..3) == 0;
                let file_size = self.setup.binlog.map_or(1, |binlog| binlog.file_size.into());
                // No more than there is, or a little more.
                let more = self.random.u64(..3) * file_size;
                let bytes = world.disk_use() + more - self.random.u64(..=more.min(file_size));
                Event::Capacity((!is_over).then_some(bytes))
            }
            2 => Event::ClockOffset(self.random.i64(-3_600..3_600) * 1_000_000_000),
            _ => Event::Drain(!world.model().is_draining),
        })
    }

    fn crash(&mut self) -> Crash {
        let power_cut = self.random.bool().then(|| self.random.u64(..));
        let flipped_bits = if self.random.u8(..6) == 0 { self.random.u32(1..4) } else { 0 };
        Crash { power_cut, flipped_bits }
    }

    // ---- Speaking ----

    fn say(&mut self, client: ClientNumber, world: &World) -> Event {
        if !world.can_send(client) || world.unread(client) > MOST_UNREAD {
            return Event::Turn;
        }
        let is_waiting = world
            .model()
            .clients
            .get(&client)
            .is_some_and(|client| matches!(client.phase, Phase::Waiting { .. }));
        if is_waiting && (self.is_timeless || self.random.u8(..8) > 0) {
            return Event::Turn;
        }
        let mut bytes = self.outboxes.remove(&client).unwrap_or_default();
        if bytes.is_empty() {
            let model = world.model();
            let count = if self.random.u8(..4) == 0 { self.random.usize(1..5) } else { 1 };
            // What several clients have sent may come in any order.
            self.may_stop = !self.is_timeless || (count == 1 && !model.is_somebody_waiting());
            let is_in_order = !self.is_timeless || !model.is_somebody_waiting();
            for _ in 0..if is_in_order { count } else { 1 } {
                self.command(client, model, &mut bytes);
            }
        }
        if self.random.u8(..100) < self.kind.pieces {
            let longest = if self.random.bool() { 4 } else { bytes.len() };
            let rest =
                bytes.split_off(self.random.usize(..longest.max(1)).min(bytes.len() - 1) + 1);
            if !rest.is_empty() {
                self.outboxes.insert(client, rest);
            }
        }
        Event::Send(client, bytes)
    }

    fn command(&mut self, client: ClientNumber, model: &Model, bytes: &mut Vec<u8>) {
        if self.random.u8(..100) < self.kind.hostility && (!self.is_timeless || self.may_stop) {
            let start = bytes.len();
            self.hostile(client, model, bytes);
            if !self.is_timeless || is_read_alike(&bytes[start..]) {
                return;
            }
            bytes.truncate(start);
        }
        let command = self.choose(model);
        if command == Command::Put {
            return self.put(bytes);
        }
        let line = self.line(command, client, model);
        bytes.extend_from_slice(line.as_bytes());
        bytes.extend_from_slice(b"\r\n");
    }

    fn choose(&mut self, model: &Model) -> Command {
        let is_crowded = model.jobs.len() >= self.kind.jobs;
        let sum: u32 = self.kind.commands.iter().map(|(_, weight)| weight).sum();
        let mut at = self.random.u32(..sum);
        let found = self.kind.commands.iter().find(|(_, weight)| {
            let is_it = at < *weight;
            at = at.saturating_sub(*weight);
            is_it
        });
        match found.map_or(Command::Put, |(command, _)| *command) {
            Command::Put if is_crowded => Command::Delete,
            command => command,
        }
    }

    fn put(&mut self, bytes: &mut Vec<u8>) {
        let (pri, delay, ttr) = (self.pri(), self.delay(), self.ttr());
        let most = self.setup.max_job_size as usize;
        let len = match self.random.u8(..60) {
            0 if most <= self.kind.body_len || self.random.u8(..8) == 0 => most,
            1 if most <= self.kind.body_len => most.saturating_sub(1),
            _ => self.random.usize(..=self.kind.body_len) >> self.random.u32(..8),
        };
        let line = format!("put {pri} {delay} {ttr} {len}\r\n");
        bytes.extend_from_slice(line.as_bytes());
        let letter = self.random.alphanumeric() as u8;
        let is_text = self.random.u8(..8) > 0;
        let random = &mut self.random;
        bytes.extend((0..len).map(|_| if is_text { letter } else { random.u8(..) }));
        // Some say how long it is, and are wrong.
        bytes.extend_from_slice(if self.random.u8(..60) == 0 { b"xx" } else { b"\r\n" });
    }

    fn line(&mut self, command: Command, client: ClientNumber, model: &Model) -> String {
        match command {
            Command::Put => unreachable!("it has a body"),
            Command::Use => format!("use {}", self.tube()),
            Command::Watch => format!("watch {}", self.tube()),
            Command::Ignore => format!("ignore {}", self.tube()),
            Command::Reserve if self.may_stop => "reserve".to_owned(),
            Command::Reserve | Command::ReserveWithTimeout => {
                let is_none = self.is_timeless || self.random.bool();
                let secs = if is_none { 0 } else { self.random.u32(..4) };
                format!("reserve-with-timeout {secs}")
            }
            Command::ReserveJob => format!("reserve-job {}", self.id(client, model)),
            Command::Delete => format!("delete {}", self.id(client, model)),
            Command::Release => {
                let id = self.held(client, model);
                format!("release {id} {} {}", self.pri(), self.delay())
            }
            Command::Bury => format!("bury {} {}", self.held(client, model), self.pri()),
            Command::Touch => format!("touch {}", self.held(client, model)),
            Command::Kick => format!("kick {}", self.random.u32(..12)),
            Command::KickJob => format!("kick-job {}", self.id(client, model)),
            Command::Peek => format!("peek {}", self.id(client, model)),
            Command::PeekReady => "peek-ready".to_owned(),
            Command::PeekDelayed => "peek-delayed".to_owned(),
            Command::PeekBuried => "peek-buried".to_owned(),
            Command::Stats => "stats".to_owned(),
            Command::StatsJob => format!("stats-job {}", self.id(client, model)),
            Command::StatsTube => format!("stats-tube {}", self.tube()),
            Command::ListTubes => "list-tubes".to_owned(),
            Command::ListTubeUsed => "list-tube-used".to_owned(),
            Command::ListTubesWatched => "list-tubes-watched".to_owned(),
            Command::PauseTube => {
                let secs = if self.is_timeless { LONG } else { self.random.u32(..4) };
                format!("pause-tube {} {secs}", self.tube())
            }
            // With more behind it that nobody reads, C's last replies may be lost.
            Command::Quit if !self.may_stop => "list-tubes".to_owned(),
            Command::Quit => "quit".to_owned(),
        }
    }

    /// Bytes that are no command, or nearly one.
    fn hostile(&mut self, client: ClientNumber, model: &Model, bytes: &mut Vec<u8>) {
        let start = bytes.len();
        let command = COMMANDS[self.random.usize(1..COMMANDS.len())].0;
        let line = self.line(command, client, model);
        match self.random.u8(..14) {
            0 => bytes.extend((0..self.random.usize(..40)).map(|_| self.random.u8(..))),
            1 => bytes.extend_from_slice(&b"x".repeat(self.random.usize(215..600))),
            2 => {
                bytes.extend_from_slice(line.as_bytes());
                bytes.resize(start + self.random.usize(215..240).max(line.len()), b' ');
            }
            3 => {
                let words = [
                    "put",
                    "delete",
                    "reserve-with-timeout",
                    "kick -1",
                    "kick \t+2x",
                    "statsx",
                    "quitting",
                    "peek-readyy",
                    "pause-tubea 0",
                    "put 1 2 3",
                    "use -a",
                    "stats ",
                    "reserve-with-timeout 2147483648",
                    "put 0 0 1 99999999999",
                    "reserve ",
                    "release 1 2",
                    "put 4294967296 0 1 0",
                    "delete 18446744073709551616",
                ];
                bytes.extend_from_slice(words[self.random.usize(..words.len())].as_bytes());
            }
            // Too large, and swallowed.
            4 => {
                let len = self.setup.max_job_size as usize + self.random.usize(1..300);
                bytes.extend_from_slice(format!("put 0 0 1 {len}\r\n").as_bytes());
                bytes.resize(bytes.len() + len, b'\n');
            }
            5 => bytes.extend_from_slice(format!("put 1 0 9 {} x", self.random.u8(..9)).as_bytes()),
            6 => bytes.extend_from_slice(line.to_uppercase().as_bytes()),
            7 => bytes.extend_from_slice(format!(" {line}").as_bytes()),
            8 => bytes.extend_from_slice(line.replace(' ', "  ").as_bytes()),
            9 => bytes.extend_from_slice(line.replace(' ', "\r").as_bytes()),
            10 => bytes.extend_from_slice(&line.as_bytes()[..self.random.usize(..line.len())]),
            12 => bytes.extend_from_slice(
                format!("use {}", "y".repeat(self.random.usize(199..202))).as_bytes(),
            ),
            // A browser has lost its way.
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

    // ---- Words ----

    fn tube(&mut self) -> String {
        self.kind.tubes[self.random.usize(..self.kind.tubes.len())].clone()
    }

    fn pri(&mut self) -> u32 {
        match self.random.u8(..8) {
            0 => [0, 1023, 1024, u32::MAX][self.random.usize(..4)],
            _ => self.random.u32(..5),
        }
    }

    fn ttr(&mut self) -> u32 {
        if self.is_timeless { LONG } else { self.random.u32(..=self.kind.ttr) }
    }

    fn delay(&mut self) -> u32 {
        match self.random.u8(..20) {
            0 => u32::MAX,
            1..6 if self.is_timeless => LONG,
            1..6 => self.random.u32(..=self.kind.delay),
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

    /// A job that the client holds, mostly.
    fn held(&mut self, client: ClientNumber, model: &Model) -> u64 {
        let is_held = |place: Place| matches!(place, Place::Reserved { by, .. } if by == client);
        let held = model.jobs.iter().filter(|job| is_held(job.place)).map(|job| job.id);
        let held: Vec<u64> = held.collect();
        let is_sober = self.random.u8(..15) > 0;
        let held = self.random.choice(&held).copied().filter(|_| is_sober);
        held.or_else(|| self.random.choice(&model.jobs).map(|job| job.id)).unwrap_or(1)
    }
}

/// Whether C beanstalkd reads these bytes as it should: it misses the end of a line that has a CR
/// within it, or is too long and comes in pieces, and it listens to browsers. What takes time in
/// unforeseen ways is left out too.
fn is_read_alike(bytes: &[u8]) -> bool {
    let lines = bytes.split(|&byte| byte == b'\n');
    let has = |word: &str| bytes.windows(word.len()).any(|window| window == word.as_bytes());
    let is_sound =
        |line: &[u8]| line.len() < 200 && !line[..line.len().max(1) - 1].contains(&b'\r');
    let is_other = ["reserve", "release", "pause-tube", "quit", " HTTP/"].into_iter().any(has);
    lines.into_iter().all(is_sound) && !is_other
}

fn setup(random: &mut fastrand::Rng) -> Setup {
    let max_job_size = [0, 10, 300, 65_535, 65_535, 65_535][random.usize(..6)];
    let binlog = (random.u8(..5) > 1).then(|| BinlogSetup {
        file_size: [4096, 8192, 16_384, 65_536][random.usize(..4)],
        sync_within: [Some(0), Some(0), Some(50_000_000), Some(10_000_000), None]
            [random.usize(..5)],
    });
    // How long compaction takes is not known to the model.
    let sharers = if binlog.is_some() { 1 } else { [1, 1, 20, 1_000][random.usize(..4)] };
    Setup { max_job_size, binlog, sharers }
}

fn kind(random: &mut fastrand::Rng, has_binlog: bool) -> Kind {
    let mut commands = Vec::new();
    for (command, weight) in COMMANDS {
        let times = [0, 1, 1, 1, 4][random.usize(..5)];
        commands.push((command, if command == Command::Put { weight } else { weight * times }));
    }
    let tubes = (0..random.usize(1..=NAMES.len())).map(|name| NAMES[name].to_owned());
    let mut tubes: Vec<String> = tubes.collect();
    if random.u8(..6) == 0 {
        tubes.push("x".repeat(200));
    }
    let seldom =
        |random: &mut fastrand::Rng, count: u32| if random.u8(..3) == 0 { count } else { 0 };
    let is_drifting = seldom(random, 1) == 1;
    Kind {
        clients: random.usize(1..=9),
        jobs: random.usize(3..50),
        tubes,
        body_len: [20, 200, 3_000, 9_000][random.usize(..4)],
        turns: [90, 60, 60, 20][random.usize(..4)],
        pieces: [0, 5, 20, 80][random.usize(..4)],
        hostility: [0, 3, 10, 30][random.usize(..4)],
        ttr: [3, 3, 10, 1_000][random.usize(..4)],
        delay: [3, 10, 1_000][random.usize(..3)],
        commands,
        times: [30, 120, 300][random.usize(..3)],
        comings: [5, 30][random.usize(..2)],
        hang_ups: [0, 5, 30][random.usize(..3)],
        stalls: seldom(random, 10),
        crashes: if has_binlog { [1, 10, 40][random.usize(..3)] } else { 0 },
        disk_limits: if has_binlog { seldom(random, 30) } else { 0 },
        drifts: if has_binlog && is_drifting { 20 } else { 0 },
        drains: seldom(random, 1) * seldom(random, 1),
    }
}
