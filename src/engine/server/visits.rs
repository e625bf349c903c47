//! The connections to visit, and their order.
//!
//! Those that read a command come first. Those in the steps of a long one share what they leave of the iteration, and
//! at least one of them is visited: so hundreds of batches delay no short command by more than a step.

use super::link::Link;
use crate::engine::headroom::NoMemory;
use crate::engine::keys::ConnKey;
use std::collections::VecDeque;

/// The connections to visit, each once.
#[derive(Default)]
pub struct Visits {
    short: Class,
    long: Class,
    /// No connection of the class `long` was visited in this iteration.
    must_visit_long: bool,
}

#[derive(Default)]
struct Class {
    /// Those of this iteration come first.
    keys: VecDeque<ConnKey>,
    /// How many these are.
    left: usize,
}

impl Visits {
    /// Ensures that this number of connections needs no memory.
    pub fn try_reserve(&mut self, connections: usize) -> Result<(), NoMemory> {
        self.short.keys.try_reserve(connections)?;
        self.long.keys.try_reserve(connections)
    }

    /// Visits a connection in the next iteration, or in this one if it has not begun.
    pub fn add<S>(&mut self, link: &mut Link<S>) {
        if !std::mem::replace(&mut link.is_queued, true) {
            let is_long = link.conn.doing.is_in_steps();
            let class = if is_long { &mut self.long } else { &mut self.short };
            class.keys.push_back(link.conn.client.key);
        }
    }

    /// Begins an iteration.
    pub fn begin(&mut self) {
        for class in [&mut self.short, &mut self.long] {
            class.left = class.keys.len();
        }
        self.must_visit_long = true;
    }

    /// Returns the next connection to visit in this iteration. If no work `is_left`, it is at most one.
    pub fn next(&mut self, is_left: bool) -> Option<ConnKey> {
        let short = if is_left { self.short.next() } else { None };
        short.or_else(|| {
            let may_visit = is_left || self.must_visit_long;
            self.must_visit_long = false;
            if may_visit { self.long.next() } else { None }
        })
    }

    pub fn len(&self) -> usize {
        self.short.keys.len() + self.long.keys.len()
    }

    /// Removes the connections for which `is_kept` returns false.
    pub fn retain(&mut self, mut is_kept: impl FnMut(ConnKey) -> bool) {
        for class in [&mut self.short, &mut self.long] {
            class.keys.retain(|&key| is_kept(key));
        }
    }
}

impl Class {
    fn next(&mut self) -> Option<ConnKey> {
        self.left = self.left.checked_sub(1)?;
        self.keys.pop_front()
    }
}
