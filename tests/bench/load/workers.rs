//! Clients that wait for jobs.

use super::requests::{RESERVE, delete_all, put_request};
use crate::client::{Script, nanoseconds};
use crate::reply::Reply;
use std::io::Write;
use std::time::Instant;

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
            put: put_request(64),
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

    fn receive(&mut self, connection: usize, reply: Reply) {
        match reply {
            // The reply of the worker or that of the producer comes first.
            Reply::Inserted(id) => _ = self.first_id.get_or_insert(id),
            Reply::Reserved(id) => {
                let first_id = *self.first_id.get_or_insert(id);
                let index = usize::try_from(id - first_id).expect("few jobs were put");
                self.latencies.push(nanoseconds(self.put_at[index].elapsed()));
                self.held[connection - 1] = Some(id);
            }
            Reply::Done => self.deleted += 1,
            Reply::TimedOut
            | Reply::NotFound
            | Reply::ReadyJobs(_)
            | Reply::Listed(_)
            | Reply::Batch(_)
            | Reply::DeletedBatch(_) => {
                panic!("every job is there for its worker")
            }
        }
    }

    /// Workers wait without a timeout.
    fn is_finished(&self, _: usize) -> bool {
        self.is_over && self.deleted == self.put_at.len()
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

    fn receive(&mut self, _: usize, reply: Reply) {
        match reply {
            Reply::Reserved(id) => {
                self.came.push((id, Instant::now()));
                self.reserved.push(id);
            }
            Reply::TimedOut => self.is_done = true,
            Reply::Done
            | Reply::Inserted(_)
            | Reply::NotFound
            | Reply::ReadyJobs(_)
            | Reply::Listed(_)
            | Reply::Batch(_)
            | Reply::DeletedBatch(_) => {}
        }
    }
}
