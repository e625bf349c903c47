//! Clients that take jobs in batches, or one by one for comparison, and clients that list jobs.

use super::requests::{delete_all, repeat};
use crate::client::Script;
use crate::reply::Reply;
use std::io::Write;
use std::time::{Duration, Instant};

/// How a worker reserves and deletes jobs.
#[derive(Debug, Clone, Copy)]
pub enum Taking {
    /// One command after the other.
    Single,
    /// This number of single commands in one write.
    Pipelined(usize),
    /// `reserve-batch` and `delete-batch` with at most this number of jobs.
    Batch(usize),
}

/// Reserves and deletes jobs on each connection until none is ready.
pub struct DrainAll {
    taking: Taking,
    /// One for each connection.
    workers: Vec<Worker>,
    pub deleted: u64,
    /// The client waits this long before each write, to imitate a longer round trip.
    round_trip: Duration,
}

#[derive(Default, Clone)]
struct Worker {
    held: Vec<u64>,
    has_found_none: bool,
}

impl DrainAll {
    pub fn new(connections: usize, taking: Taking) -> DrainAll {
        let workers = vec![Worker::default(); connections];
        DrainAll { taking, workers, deleted: 0, round_trip: Duration::ZERO }
    }

    /// The same for one connection to a distant server.
    pub fn from_afar(taking: Taking, round_trip: Duration) -> DrainAll {
        DrainAll { round_trip, ..DrainAll::new(1, taking) }
    }
}

impl Script for DrainAll {
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        const RESERVE_NOW: &[u8] = b"reserve-with-timeout 0\r\n";
        let worker = &mut self.workers[connection];
        if worker.held.is_empty() && (is_over || worker.has_found_none) {
            return 0;
        }
        spin(self.round_trip);
        if worker.held.is_empty() {
            let (request, count) = match self.taking {
                Taking::Single => (RESERVE_NOW, 1),
                Taking::Pipelined(count) => (RESERVE_NOW, count),
                Taking::Batch(count) => {
                    write!(output, "reserve-batch {count}\r\n").expect("memory takes it");
                    return 1;
                }
            };
            repeat(request, count, output);
            return count;
        }
        match self.taking {
            Taking::Single | Taking::Pipelined(_) => delete_all(&mut worker.held, output),
            Taking::Batch(_) => {
                output.extend_from_slice(b"delete-batch");
                for id in worker.held.drain(..) {
                    write!(output, " {id}").expect("memory takes it");
                }
                output.extend_from_slice(b"\r\n");
                1
            }
        }
    }

    fn receive(&mut self, connection: usize, reply: Reply) {
        let worker = &mut self.workers[connection];
        match reply {
            Reply::Reserved(id) => worker.held.push(id),
            Reply::TimedOut | Reply::Batch(0) => worker.has_found_none = true,
            Reply::Done => self.deleted += 1,
            Reply::DeletedBatch(count) => self.deleted += count,
            Reply::Batch(_) => {}
            Reply::Inserted(_) | Reply::NotFound | Reply::ReadyJobs(_) | Reply::Listed(_) => {
                panic!("a worker gets {reply:?}")
            }
        }
    }
}

/// Keeps the thread busy: a sleep would take longer than asked for.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Sends a `list-jobs` a number of times, one by one; each page must have the same number of jobs.
pub struct List {
    pub line: String,
    pub left: usize,
    pub jobs: u64,
}

impl Script for List {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        if is_over || self.left == 0 {
            return 0;
        }
        self.left -= 1;
        write!(output, "{}\r\n", self.line).expect("memory takes it");
        1
    }

    fn receive(&mut self, _: usize, reply: Reply) {
        assert_eq!(reply, Reply::Listed(self.jobs), "{}", self.line);
    }
}
