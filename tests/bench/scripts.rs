//! What the clients of the scenarios say, each kind of client a small state machine.

use crate::client::{Script, nanoseconds};
use crate::reply::Reply;
use fastrand::Rng;
use std::io::Write;
use std::time::{Duration, Instant};

/// Puts a batch of jobs, reserves as many, deletes those, and begins again. Each connection
/// puts before it reserves, so that nobody waits.
pub struct Cycle {
    put: Vec<u8>,
    batch: usize,
    /// One for each connection.
    turns: Vec<Turn>,
}

/// Where a connection is in its cycle.
#[derive(Default)]
struct Turn {
    phase: Phase,
    reserved: Vec<u64>,
}

#[derive(Default, Clone, Copy)]
enum Phase {
    #[default]
    Put,
    Reserve,
    Delete,
}

impl Cycle {
    pub fn new(connections: usize, batch: usize, body_size: usize) -> Cycle {
        let turns = (0..connections).map(|_| Turn::default()).collect();
        Cycle { put: put_request(0, 0, 60, body_size), batch, turns }
    }
}

impl Script for Cycle {
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let turn = &mut self.turns[connection];
        match turn.phase {
            Phase::Put if is_over => return 0,
            Phase::Put => {
                repeat(&self.put, self.batch, output);
                turn.phase = Phase::Reserve;
            }
            Phase::Reserve => {
                repeat(RESERVE, self.batch, output);
                turn.phase = Phase::Delete;
            }
            Phase::Delete => {
                delete_all(&mut turn.reserved, output);
                turn.phase = Phase::Put;
            }
        }
        self.batch
    }

    fn hear(&mut self, connection: usize, reply: Reply) {
        if let Reply::Reserved(id) = reply {
            self.turns[connection].reserved.push(id);
        }
    }
}

/// Puts so many jobs, pipelined.
pub struct Fill {
    left: usize,
    priority: Priority,
    pub delay: Delay,
    pub ttr_s: u32,
    body_size: usize,
    /// When the last of them becomes ready, as far as the client knows.
    pub last_due: Instant,
}

/// The priorities of jobs.
enum Priority {
    Same,
    Random(Rng),
}

/// When jobs become ready.
pub enum Delay {
    /// So long after they were put.
    Seconds(u32),
    /// In the second before this, whenever they are put.
    Until(Instant),
}

impl Fill {
    pub fn new(count: usize, body_size: usize) -> Fill {
        let (priority, delay) = (Priority::Same, Delay::Seconds(0));
        let last_due = Instant::now();
        Fill { left: count, priority, delay, ttr_s: 3600, body_size, last_due }
    }

    /// The same with random priorities.
    pub fn with_priorities(count: usize, body_size: usize) -> Fill {
        Fill { priority: Priority::Random(Rng::with_seed(1)), ..Fill::new(count, body_size) }
    }
}

impl Script for Fill {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let count = if is_over { 0 } else { self.left.min(BATCH) };
        self.left -= count;
        let now = Instant::now();
        let delay_s = match self.delay {
            Delay::Seconds(delay_s) => u64::from(delay_s),
            Delay::Until(due) => due.saturating_duration_since(now).as_secs(),
        };
        self.last_due = self.last_due.max(now + Duration::from_secs(delay_s));
        for _ in 0..count {
            let priority = match &mut self.priority {
                Priority::Same => 0,
                Priority::Random(random) => random.u32(..),
            };
            write_put(priority, delay_s, self.ttr_s, self.body_size, output);
        }
        count
    }

    fn hear(&mut self, _: usize, _: Reply) {}
}

/// Reserves so many jobs, pipelined, and keeps them.
pub struct Take {
    left: usize,
    pub ids: Vec<u64>,
}

impl Take {
    pub fn new(count: usize) -> Take {
        Take { left: count, ids: Vec::with_capacity(count) }
    }
}

impl Script for Take {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let count = if is_over { 0 } else { self.left.min(BATCH) };
        self.left -= count;
        repeat(RESERVE, count, output);
        count
    }

    fn hear(&mut self, _: usize, reply: Reply) {
        if let Reply::Reserved(id) = reply {
            self.ids.push(id);
        }
    }
}

/// Reserves so many jobs and deletes or buries them, in turns, pipelined, on one connection.
pub struct Drain {
    pub left: usize,
    end: fn(&mut Vec<u64>, &mut Vec<u8>) -> usize,
    reserved: Vec<u64>,
}

impl Drain {
    pub fn deleting(count: usize) -> Drain {
        Drain { left: count, end: delete_all, reserved: Vec::new() }
    }

    pub fn burying(count: usize) -> Drain {
        Drain { left: count, end: bury_all, reserved: Vec::new() }
    }
}

impl Script for Drain {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        if !self.reserved.is_empty() {
            return (self.end)(&mut self.reserved, output);
        }
        let count = if is_over { 0 } else { self.left.min(BATCH) };
        self.left -= count;
        repeat(RESERVE, count, output);
        count
    }

    fn hear(&mut self, _: usize, reply: Reply) {
        if let Reply::Reserved(id) = reply {
            self.reserved.push(id);
        }
    }
}

/// Uses one of so many tubes after another, at random.
pub struct UseRandom {
    pub tubes: usize,
    pub random: Rng,
}

impl Script for UseRandom {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        if is_over {
            return 0;
        }
        write_use(self.random.usize(..self.tubes), output);
        1
    }

    fn hear(&mut self, _: usize, _: Reply) {}
}

/// Puts a job into one of so many tubes, at random, reserves and deletes it. All of the tubes
/// are watched already.
pub struct Watcher {
    pub tubes: usize,
    pub random: Rng,
    phase: Phase,
    reserved: Vec<u64>,
}

impl Watcher {
    /// Replies to all that is asked for one job.
    pub const REPLIES_PER_JOB: u32 = 4;

    pub fn new(tubes: usize) -> Watcher {
        let (random, phase) = (Rng::with_seed(1), Phase::Put);
        Watcher { tubes, random, phase, reserved: Vec::new() }
    }
}

impl Script for Watcher {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        match self.phase {
            Phase::Put if is_over => 0,
            Phase::Put => {
                write_use(self.random.usize(..self.tubes), output);
                write_put(0, 0, 60, 64, output);
                self.phase = Phase::Reserve;
                2
            }
            Phase::Reserve => {
                output.extend_from_slice(RESERVE);
                self.phase = Phase::Delete;
                1
            }
            Phase::Delete => {
                self.phase = Phase::Put;
                delete_all(&mut self.reserved, output)
            }
        }
    }

    fn hear(&mut self, _: usize, reply: Reply) {
        if let Reply::Reserved(id) = reply {
            self.reserved.push(id);
        }
    }
}

/// Waits for jobs whose TTR runs out, and deletes them, until none has come for some seconds.
#[derive(Default)]
pub struct Rescue {
    /// Each job, and when it came.
    pub came: Vec<(u64, Instant)>,
    reserved: Vec<u64>,
    is_done: bool,
}

impl Script for Rescue {
    fn ask(&mut self, _: usize, _: bool, output: &mut Vec<u8>) -> usize {
        if self.is_done {
            return 0;
        }
        if !self.reserved.is_empty() {
            return delete_all(&mut self.reserved, output);
        }
        output.extend_from_slice(b"reserve-with-timeout 2\r\n");
        1
    }

    fn hear(&mut self, _: usize, reply: Reply) {
        match reply {
            Reply::Reserved(id) => {
                self.came.push((id, Instant::now()));
                self.reserved.push(id);
            }
            Reply::TimedOut => self.is_done = true,
            Reply::Done | Reply::Inserted(_) | Reply::NotFound => {}
        }
    }
}

/// Says each of these lines once, pipelined, or one after the other with a batch of one.
pub struct Say<Lines> {
    pub lines: Lines,
    pub batch: usize,
}

impl<Lines: Iterator<Item = String>> Say<Lines> {
    /// So many lines at a time that the server always has something to do.
    pub fn pipelined(lines: impl IntoIterator<IntoIter = Lines>) -> Say<Lines> {
        Say { lines: lines.into_iter(), batch: BATCH }
    }

    /// Each when the reply to the last one is in.
    pub fn one_by_one(lines: impl IntoIterator<IntoIter = Lines>) -> Say<Lines> {
        Say { lines: lines.into_iter(), batch: 1 }
    }
}

impl<Lines: Iterator<Item = String>> Script for Say<Lines> {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        if is_over {
            return 0;
        }
        let mut count = 0;
        for line in self.lines.by_ref().take(self.batch) {
            output.extend_from_slice(line.as_bytes());
            output.extend_from_slice(b"\r\n");
            count += 1;
        }
        count
    }

    fn hear(&mut self, _: usize, reply: Reply) {
        assert!(reply != Reply::NotFound, "every job that is named is there");
    }
}

/// The first connection puts jobs one by one, all others wait for them, each for one at a
/// time.
pub struct HandOff {
    put: Vec<u8>,
    /// The job that each worker has to delete.
    held: Vec<Option<u64>>,
    /// When each job was put. Their ids follow each other.
    put_at: Vec<Instant>,
    first_id: Option<u64>,
    latencies: Vec<u64>,
    deleted: usize,
    is_over: bool,
}

impl HandOff {
    pub fn new(workers: usize) -> HandOff {
        HandOff {
            put: put_request(0, 0, 60, 64),
            held: vec![None; workers],
            put_at: Vec::new(),
            first_id: None,
            latencies: Vec::new(),
            deleted: 0,
            is_over: false,
        }
    }

    /// From each put to the RESERVED that came of it, since this was last asked.
    pub fn take_latencies(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.latencies)
    }
}

impl Script for HandOff {
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let Some(worker) = connection.checked_sub(1) else {
            self.is_over = is_over;
            if !is_over {
                output.extend_from_slice(&self.put);
                self.put_at.push(Instant::now());
            }
            return usize::from(!is_over);
        };
        match self.held[worker].take() {
            Some(id) => write!(output, "delete {id}\r\n").expect("memory takes it"),
            None => output.extend_from_slice(RESERVE),
        }
        1
    }

    fn hear(&mut self, connection: usize, reply: Reply) {
        match reply {
            // Whether its worker or the producer hears of the first job first is chance.
            Reply::Inserted(id) => _ = self.first_id.get_or_insert(id),
            Reply::Reserved(id) => {
                let first_id = *self.first_id.get_or_insert(id);
                let index = usize::try_from(id - first_id).expect("few jobs were put");
                self.latencies.push(nanoseconds(self.put_at[index].elapsed()));
                self.held[connection - 1] = Some(id);
            }
            Reply::Done => self.deleted += 1,
            Reply::TimedOut | Reply::NotFound => panic!("every job is there for its worker"),
        }
    }

    /// Workers wait for ever.
    fn is_finished(&self, _: usize) -> bool {
        self.is_over && self.deleted == self.put_at.len()
    }
}

const RESERVE: &[u8] = b"reserve\r\n";

/// Requests in one write of a pipelined client.
const BATCH: usize = 100;

fn repeat(request: &[u8], count: usize, output: &mut Vec<u8>) {
    for _ in 0..count {
        output.extend_from_slice(request);
    }
}

/// Deletes all of these; tells how many they were.
fn delete_all(ids: &mut Vec<u64>, output: &mut Vec<u8>) -> usize {
    let count = ids.len();
    for id in ids.drain(..) {
        write!(output, "delete {id}\r\n").expect("memory takes it");
    }
    count
}

/// Buries all of these, with priorities as good as random; tells how many they were.
fn bury_all(ids: &mut Vec<u64>, output: &mut Vec<u8>) -> usize {
    /// A large prime number.
    const SCATTER: u64 = 2_654_435_761;
    let count = ids.len();
    for id in ids.drain(..) {
        let priority = (id * SCATTER) & u64::from(u32::MAX);
        write!(output, "bury {id} {priority}\r\n").expect("memory takes it");
    }
    count
}

/// The name of the tube with this number.
pub fn tube(number: usize) -> String {
    format!("tube-{number}")
}

fn write_use(number: usize, output: &mut Vec<u8>) {
    write!(output, "use tube-{number}\r\n").expect("memory takes it");
}

fn put_request(priority: u32, delay_s: u64, ttr_s: u32, body_size: usize) -> Vec<u8> {
    let mut request = Vec::new();
    write_put(priority, delay_s, ttr_s, body_size, &mut request);
    request
}

fn write_put(priority: u32, delay_s: u64, ttr_s: u32, body_size: usize, output: &mut Vec<u8>) {
    write!(output, "put {priority} {delay_s} {ttr_s} {body_size}\r\n").expect("memory takes it");
    output.resize(output.len() + body_size, b'x');
    output.extend_from_slice(b"\r\n");
}
