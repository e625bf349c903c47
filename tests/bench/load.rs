//! What clients send. A [`Load`] is a few writes that each connection repeats; every write is a list
//! of steps, and a step becomes one request for each job of the batch.
//!
//! This file knows requests and the order in which a connection sends them, but no sockets.

use crate::harness::reply::decimal;
use fastrand::Rng;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// A request, sent once for each job of a batch unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Put,
    /// `use` of a random tube
    Use,
    /// `watch` of the next tube
    Watch,
    /// The next of [`Load::lines`].
    Line,
    Reserve,
    /// `reserve-with-timeout 0`; a connection that finds no job is done
    ReserveNow,
    /// One for the whole batch.
    ReserveBatch,
    /// Deletes each job that the connection holds.
    Delete,
    /// One for all jobs that the connection holds.
    DeleteBatch,
    /// Buries each job that the connection holds, with pseudo-random priorities.
    Bury,
}

pub type Writes = &'static [&'static [Step]];

#[derive(Debug, Clone, Default)]
pub struct Load {
    /// What each connection repeats. It sends the next write after all replies to the last one.
    pub writes: Writes,
    /// What the first connection repeats instead, unless this is empty. The run then notes when each job
    /// was put and reserved.
    pub producer: Writes,
    pub batch: usize,
    /// The number of jobs of all connections together.
    pub jobs: usize,
    pub body_len: usize,
    pub ttr_s: u32,
    pub delay_s: u64,
    pub has_random_priorities: bool,
    /// The number of the first key, if the jobs have keys.
    pub first_key: Option<usize>,
    /// Tubes that are used and watched are `tube-0` to the one before this.
    pub tubes: usize,
    pub lines: Vec<String>,
    /// The client waits this long before each write, to imitate a longer round trip.
    pub round_trip: Duration,
}

/// The number of requests in one write of a client that pipelines.
const PIPELINED: usize = 100;

impl Load {
    /// These writes for jobs of 64 bytes, one by one and without an end.
    pub fn of(writes: Writes) -> Load {
        Load { writes, batch: 1, jobs: usize::MAX, body_len: 64, ttr_s: 60, ..Load::default() }
    }

    /// The same for a number of jobs, pipelined.
    pub fn of_jobs(writes: Writes, jobs: usize) -> Load {
        Load { jobs, batch: PIPELINED, ..Load::of(writes) }
    }

    /// Each connection puts before it reserves, so that none waits.
    pub fn cycle() -> Load {
        Load::of(&[&[Step::Put], &[Step::Reserve], &[Step::Delete]])
    }

    /// Jobs that stay, so that their TTR is long.
    pub fn put(jobs: usize) -> Load {
        Load { ttr_s: 3600, ..Load::of_jobs(&[&[Step::Put]], jobs) }
    }

    pub fn put_with_priorities(jobs: usize) -> Load {
        Load { has_random_priorities: true, ..Load::put(jobs) }
    }

    pub fn reserve(jobs: usize) -> Load {
        Load::of_jobs(&[&[Step::Reserve]], jobs)
    }

    fn has_producer(&self) -> bool {
        !self.producer.is_empty()
    }

    /// These lines, one by one.
    pub fn lines(lines: Vec<String>) -> Load {
        Load { jobs: lines.len(), lines, ..Load::of(&[&[Step::Line]]) }
    }
}

/// Where a connection is in its writes.
#[derive(Debug, Default)]
pub struct Turn {
    /// The index of the next write.
    next: usize,
    /// The jobs of this pass through the writes: the number of the first, and their number.
    first: usize,
    count: usize,
    pub held: Vec<u64>,
    /// It has found no job to reserve.
    is_done: bool,
}

#[derive(Debug, Default)]
pub struct Run {
    pub replies: u64,
    /// From the write of requests to the last of their replies, in nanoseconds.
    pub latencies: Vec<u64>,
    pub inserted: usize,
    pub deleted: usize,
    /// When each job was put, and each reserved, with its id; if there is a producer.
    pub put_at: Vec<Instant>,
    pub reserved: Vec<(u64, Instant)>,
}

impl Run {
    /// Adds what another run has come to.
    pub fn append(&mut self, mut other: Run) {
        self.replies += other.replies;
        self.latencies.append(&mut other.latencies);
    }
}

pub struct Work<'l> {
    pub load: &'l Load,
    /// The number of jobs that were begun.
    begun: usize,
    random: Rng,
    pub run: Run,
}

impl Work<'_> {
    pub fn new(load: &Load) -> Work<'_> {
        let run = Run { latencies: Vec::with_capacity(1 << 16), ..Run::default() };
        Work { load, begun: 0, random: Rng::new(), run }
    }

    /// Appends the next write of a connection; returns the number of its replies, or 0 if the
    /// connection has no more requests. Once the run `is_over` it only completes what it has begun.
    pub fn ask(
        &mut self,
        index: usize,
        turn: &mut Turn,
        is_over: bool,
        out: &mut Vec<u8>,
    ) -> usize {
        spin(self.load.round_trip);
        let is_producer = index == 0 && self.load.has_producer();
        let writes = if is_producer { self.load.producer } else { self.load.writes };
        for _ in 0..=writes.len() {
            if turn.next == 0 {
                let left = if is_over || turn.is_done { 0 } else { self.load.jobs - self.begun };
                turn.first = self.begun;
                turn.count = left.min(self.load.batch);
                self.begun += turn.count;
            }
            let steps = writes[turn.next];
            turn.next = (turn.next + 1) % writes.len();
            let replies: usize = steps.iter().map(|&step| self.write(step, turn, out)).sum();
            if replies > 0 {
                return replies;
            }
        }
        0
    }

    /// Appends the requests of a step; returns the number of their replies.
    fn write(&mut self, step: Step, turn: &mut Turn, out: &mut Vec<u8>) -> usize {
        /// A large prime number.
        const SCATTER: u64 = 2_654_435_761;
        let Work { load, random, .. } = self;
        let (numbers, held) = (turn.first..turn.first + turn.count, &mut turn.held);
        match step {
            Step::Put => {
                if load.has_producer() {
                    self.run.put_at.extend(numbers.clone().map(|_| Instant::now()));
                }
                lines(out, numbers, |out, number| self.write_put(number, out))
            }
            Step::Use => lines(out, numbers, |out, _| {
                write!(out, "use tube-{}\r\n", random.usize(..load.tubes))
            }),
            Step::Watch => lines(out, numbers, |out, number| {
                write!(out, "watch tube-{}\r\n", number % load.tubes)
            }),
            Step::Line => {
                lines(out, numbers, |out, number| write!(out, "{}\r\n", load.lines[number]))
            }
            Step::Reserve => lines(out, numbers, |out, _| out.write_all(b"reserve\r\n")),
            Step::ReserveNow => {
                lines(out, numbers, |out, _| out.write_all(b"reserve-with-timeout 0\r\n"))
            }
            Step::Delete => lines(out, held.drain(..), |out, id| write!(out, "delete {id}\r\n")),
            Step::Bury => lines(out, held.drain(..), |out, id| {
                write!(out, "bury {id} {}\r\n", (id * SCATTER) & u64::from(u32::MAX))
            }),
            Step::ReserveBatch => {
                let count = (turn.count > 0).then_some(turn.count);
                lines(out, count, |out, count| write!(out, "reserve-batch {count}\r\n"))
            }
            Step::DeleteBatch => {
                let ids: String = held.drain(..).map(|id| format!(" {id}")).collect();
                let ids = (!ids.is_empty()).then_some(ids);
                lines(out, ids, |out, ids| write!(out, "delete-batch{ids}\r\n"))
            }
        }
    }

    fn write_put(&mut self, number: usize, out: &mut Vec<u8>) -> io::Result<()> {
        let Load { delay_s, ttr_s, body_len, .. } = self.load;
        let priority = if self.load.has_random_priorities { self.random.u32(..) } else { 0 };
        write!(out, "put {priority} {delay_s} {ttr_s} {body_len}")?;
        if let Some(first) = self.load.first_key {
            write!(out, " idp:order-{}", first + number)?;
        }
        out.extend_from_slice(b"\r\n");
        out.resize(out.len() + body_len, b'x');
        out.write_all(b"\r\n")
    }

    /// Takes the line of a reply; returns the number of replies that follow it unasked.
    pub fn receive(&mut self, turn: &mut Turn, line: &[u8]) -> usize {
        let mut words = line.split(|&byte| byte == b' ');
        let word = words.next().unwrap_or_default();
        let mut number = || words.next().and_then(decimal).unwrap_or_else(|| refuse(line));
        let count = |number| usize::try_from(number).expect("a batch has at most 1000 jobs");
        let run = &mut self.run;
        run.replies += 1;
        match word {
            b"RESERVED" => {
                let id = number();
                turn.held.push(id);
                if self.load.has_producer() {
                    run.reserved.push((id, Instant::now()));
                }
            }
            b"TIMED_OUT" => turn.is_done = true,
            b"RESERVED_BATCH" => {
                let jobs = count(number());
                turn.is_done = jobs == 0;
                return jobs;
            }
            b"INSERTED" => run.inserted += 1,
            b"DELETED" => run.deleted += 1,
            b"DELETED_BATCH" => run.deleted += count(number()),
            // A slow server lets a TTR end before the job is deleted.
            b"NOT_FOUND" => {}
            b"OK" | b"TOUCHED" | b"BURIED" | b"KICKED" | b"USING" | b"WATCHING" => {}
            _ => refuse(line),
        }
        0
    }

    /// Returns whether all that a producer has put was deleted, so that the run can end although
    /// workers wait for more.
    pub fn is_finished(&self, is_over: bool) -> bool {
        let put = self.run.put_at.len();
        is_over && self.load.has_producer() && self.run.inserted == put && self.run.deleted == put
    }
}

/// Appends a request for each of these; returns their number.
fn lines<T>(
    out: &mut Vec<u8>,
    of: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut Vec<u8>, T) -> io::Result<()>,
) -> usize {
    let written = of.into_iter().map(|item| write(out, item).expect("memory takes it"));
    written.count()
}

fn refuse(line: &[u8]) -> ! {
    panic!("unexpected reply {}", line.escape_ascii());
}

/// Keeps the thread busy: a sleep would take longer than asked for.
fn spin(time: Duration) {
    let start = (!time.is_zero()).then(Instant::now);
    while start.is_some_and(|start| start.elapsed() < time) {
        std::hint::spin_loop();
    }
}
