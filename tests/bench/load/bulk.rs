//! Clients that send a given amount of commands at once, pipelined.

use super::requests::{RESERVE, bury_all, delete_all, repeat, write_put_with_key};
use crate::client::Script;
use crate::reply::Reply;
use fastrand::Rng;
use std::time::{Duration, Instant};

/// Puts a number of jobs, pipelined.
pub struct Fill {
    left: usize,
    priority: Priority,
    pub delay: Delay,
    pub ttr_s: u32,
    body_size: usize,
    /// The number of the next key, if the jobs have keys.
    next_key: Option<u64>,
    /// How many are sent at once.
    pub batch: usize,
    /// When the last of them becomes ready, as far as the client knows.
    pub last_due: Instant,
}

impl Fill {
    pub fn new(count: usize, body_size: usize) -> Fill {
        let (priority, delay) = (Priority::Same, Delay::Seconds(0));
        let last_due = Instant::now();
        Fill {
            left: count,
            priority,
            delay,
            ttr_s: 3600,
            body_size,
            next_key: None,
            batch: BATCH,
            last_due,
        }
    }

    /// The same with keys, which have this number and the next ones.
    pub fn with_keys(first: u64, count: usize, body_size: usize) -> Fill {
        Fill { next_key: Some(first), ..Fill::new(count, body_size) }
    }

    /// The same with random priorities.
    pub fn with_priorities(count: usize, body_size: usize) -> Fill {
        Fill { priority: Priority::Random(Rng::with_seed(1)), ..Fill::new(count, body_size) }
    }
}

impl Script for Fill {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let count = next_batch(&mut self.left, self.batch, is_over);
        if count == 0 {
            return 0;
        }
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
            let key = self.next_key;
            self.next_key = key.map(|number| number + 1);
            write_put_with_key(priority, delay_s, self.ttr_s, self.body_size, key, output);
        }
        count
    }

    fn receive(&mut self, _: usize, _: Reply) {}
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

/// Reserves a number of jobs, pipelined, and keeps them.
pub struct Take {
    left: usize,
    pub ids: Vec<u64>,
}

impl Take {
    pub fn new(count: usize) -> Take {
        Take { left: count, ids: Vec::new() }
    }
}

impl Script for Take {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let count = next_batch(&mut self.left, BATCH, is_over);
        repeat(RESERVE, count, output);
        count
    }

    fn receive(&mut self, _: usize, reply: Reply) {
        if let Reply::Reserved(id) = reply {
            self.ids.push(id);
        }
    }
}

/// Reserves a number of jobs and deletes or buries them, pipelined, on one connection.
pub struct Drain {
    take: Take,
    end: fn(&mut Vec<u64>, &mut Vec<u8>) -> usize,
}

impl Drain {
    pub fn deleting(count: usize) -> Drain {
        Drain { take: Take::new(count), end: delete_all }
    }

    pub fn burying(count: usize) -> Drain {
        Drain { take: Take::new(count), end: bury_all }
    }

    /// How many have not been reserved yet.
    pub fn left(&self) -> usize {
        self.take.left
    }
}

impl Script for Drain {
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        if self.take.ids.is_empty() {
            self.take.ask(connection, is_over, output)
        } else {
            (self.end)(&mut self.take.ids, output)
        }
    }

    fn receive(&mut self, connection: usize, reply: Reply) {
        self.take.receive(connection, reply);
    }
}

/// Reserves a number of jobs and deletes them, pipelined, on one connection: one write deletes the
/// last batch and reserves the next.
pub struct Consume {
    take: Take,
}

impl Consume {
    pub fn new(count: usize) -> Consume {
        Consume { take: Take::new(count) }
    }

    /// How many have not been reserved yet.
    pub fn left(&self) -> usize {
        self.take.left
    }
}

impl Script for Consume {
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let deleted = delete_all(&mut self.take.ids, output);
        deleted + self.take.ask(connection, is_over, output)
    }

    fn receive(&mut self, connection: usize, reply: Reply) {
        self.take.receive(connection, reply);
    }
}

/// Sends each of these lines once, pipelined, or one at a time with a batch of one.
pub struct Say<Lines> {
    lines: Lines,
    batch: usize,
}

impl<Lines: Iterator<Item = String>> Say<Lines> {
    /// The lines in flight: enough that the server is never idle.
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

    fn receive(&mut self, _: usize, reply: Reply) {
        assert!(reply != Reply::NotFound, "every job that is named is there");
    }
}

/// Requests in one write.
const BATCH: usize = 100;

/// How many of those that are left come next.
fn next_batch(left: &mut usize, batch: usize, is_over: bool) -> usize {
    let count = if is_over { 0 } else { batch.min(*left) };
    *left -= count;
    count
}
