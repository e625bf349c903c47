//! Clients that go on with the same until the time is over.

use super::requests::{RESERVE, delete_all, put_request, repeat, write_put, write_use};
use crate::client::Script;
use crate::reply::Reply;
use fastrand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};

/// Puts a batch of jobs, reserves as many, deletes those, and begins again. Each connection
/// puts before it reserves, so that no connection waits.
pub struct Cycle {
    put: Vec<u8>,
    batch: usize,
    /// One for each connection.
    turns: Vec<Turn>,
}

impl Cycle {
    pub fn new(connections: usize, batch: usize, body_size: usize) -> Cycle {
        let turns = (0..connections).map(|_| Turn::default()).collect();
        Cycle { put: put_request(body_size), batch, turns }
    }

    /// The same, but each connection ends after the given number of cycles.
    pub fn ending_after(mut self, cycles: usize) -> Cycle {
        self.turns.iter_mut().for_each(|turn| turn.cycles_left = cycles);
        self
    }
}

impl Script for Cycle {
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let turn = &mut self.turns[connection];
        match turn.phase {
            Phase::Put if is_over || turn.cycles_left == 0 => return 0,
            Phase::Put => {
                turn.cycles_left -= 1;
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

    fn receive(&mut self, connection: usize, reply: Reply) {
        if let Reply::Reserved(id) = reply {
            self.turns[connection].reserved.push(id);
        }
    }
}

/// Cycles until another thread ends them.
pub struct CycleUntil<'a> {
    cycle: Cycle,
    is_over: &'a AtomicBool,
}

impl CycleUntil<'_> {
    pub fn new(cycle: Cycle, is_over: &AtomicBool) -> CycleUntil<'_> {
        CycleUntil { cycle, is_over }
    }
}

impl Script for CycleUntil<'_> {
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        let is_over = is_over || self.is_over.load(Ordering::Relaxed);
        self.cycle.ask(connection, is_over, output)
    }

    fn receive(&mut self, connection: usize, reply: Reply) {
        self.cycle.receive(connection, reply);
    }
}

/// Where a connection is in its cycle.
struct Turn {
    phase: Phase,
    reserved: Vec<u64>,
    /// How often it still begins one.
    cycles_left: usize,
}

impl Default for Turn {
    fn default() -> Turn {
        Turn { phase: Phase::Put, reserved: Vec::new(), cycles_left: usize::MAX }
    }
}

#[derive(Clone, Copy)]
enum Phase {
    Put,
    Reserve,
    Delete,
}

/// Puts a job into a random tube, reserves and deletes it. All of the tubes
/// are watched already.
pub struct Watcher {
    tubes: usize,
    random: Rng,
    turn: Turn,
}

impl Watcher {
    /// Replies to all that is asked for one job.
    pub const REPLIES_PER_JOB: u32 = 4;

    pub fn new(tubes: usize) -> Watcher {
        Watcher { tubes, random: Rng::with_seed(1), turn: Turn::default() }
    }
}

impl Script for Watcher {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        match self.turn.phase {
            Phase::Put if is_over => 0,
            Phase::Put => {
                write_use(self.random.usize(..self.tubes), output);
                write_put(0, 0, 60, 64, output);
                self.turn.phase = Phase::Reserve;
                2
            }
            Phase::Reserve => {
                output.extend_from_slice(RESERVE);
                self.turn.phase = Phase::Delete;
                1
            }
            Phase::Delete => {
                self.turn.phase = Phase::Put;
                delete_all(&mut self.turn.reserved, output)
            }
        }
    }

    fn receive(&mut self, _: usize, reply: Reply) {
        if let Reply::Reserved(id) = reply {
            self.turn.reserved.push(id);
        }
    }
}

/// Uses random tubes.
pub struct UseRandom {
    tubes: usize,
    random: Rng,
}

impl UseRandom {
    pub fn new(tubes: usize) -> UseRandom {
        UseRandom { tubes, random: Rng::with_seed(1) }
    }
}

impl Script for UseRandom {
    fn ask(&mut self, _: usize, is_over: bool, output: &mut Vec<u8>) -> usize {
        if is_over {
            return 0;
        }
        write_use(self.random.usize(..self.tubes), output);
        1
    }

    fn receive(&mut self, _: usize, _: Reply) {}
}
