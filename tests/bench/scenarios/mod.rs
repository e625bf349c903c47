//! What is measured: each scenario with its name, its sentence, how its servers are started, and
//! what a round of it is. A file for each family.

mod backlog;
mod many;
mod steady;
mod timers;

use crate::client::{Outcome, Pool};
use crate::load::{Load, Step, Writes};
use crate::report::Figures;
use crate::server::Server;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

pub struct Scenario {
    pub name: String,
    /// What is measured, in a sentence.
    pub what: String,
    /// How a server is started: `DIR` stands for a directory, `METRICS` for an address.
    pub flags: String,
    /// The size of bodies as the limit server needs to know it.
    pub body_len: usize,
    pub rounds: usize,
    /// Whether one round more counts system calls.
    pub is_traced: bool,
    /// Whether the server runs in valgrind, which counts the instructions of user space.
    pub counts_instructions: bool,
    /// Whether replies that are always the same make sense here.
    pub has_limit: bool,
    /// Whether only servers take part that have the commands that C beanstalkd does not have.
    pub needs_extensions: bool,
    /// What the client opens, or the server if that has more.
    pub open_files: u64,
    pub round: Round,
}

/// Prepares a fresh server, measures, and returns the figures.
type Round = Box<dyn Fn(&mut Server) -> Outcome<Figures>>;

impl Scenario {
    fn new(
        name: impl Into<String>,
        rounds: usize,
        what: impl Into<String>,
        round: impl Fn(&mut Server) -> Outcome<Figures> + 'static,
    ) -> Scenario {
        Scenario {
            name: name.into(),
            what: what.into(),
            flags: String::new(),
            body_len: 64,
            rounds,
            is_traced: false,
            counts_instructions: false,
            has_limit: false,
            needs_extensions: false,
            open_files: 500,
            round: Box::new(round),
        }
    }
}

/// All of them, in the order of the table.
pub fn all() -> Vec<Scenario> {
    [steady::all(), backlog::all(), timers::all(), many::all()].into_iter().flatten().collect()
}

const CONSUME: Writes = &[&[Step::Reserve], &[Step::Delete]];

/// Opens connections that each watch this number of tubes.
fn watch_all(server: &Server, connections: usize, tubes: usize) -> Outcome<Pool> {
    let mut keeper = server.connect(connections);
    if tubes > 0 {
        let load = Load { tubes, ..Load::of_jobs(&[&[Step::Watch]], connections * tubes) };
        // A write each, so that each of many connections watches all tubes.
        let batch = if connections > 1 { tubes } else { load.batch };
        keeper.run(&Load { batch, ..load })?;
    }
    Ok(keeper)
}

/// Does `act` while `other` runs on a thread of its own, and is shown when `act` has ended.
fn meanwhile<A: Send, B>(
    other: impl FnOnce(&AtomicBool) -> A + Send,
    act: impl FnOnce() -> B,
) -> (A, B) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let other = scope.spawn(|| other(&is_over));
        let result = act();
        is_over.store(true, Ordering::Relaxed);
        (other.join().expect("every reply is one that the client knows"), result)
    })
}
