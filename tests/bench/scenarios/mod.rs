//! What is measured: each scenario with its name, its sentence, how its servers are started
//! and prepared, and what a round of it is. A file for each family.

mod batches;
mod binlog;
mod connections;
mod deep;
mod held;
mod instructions;
mod scrape;
mod steady;
mod timers;
mod tubes;
mod unique;

use crate::client::Outcome;
use crate::figures::Figures;
use crate::server::{Server, Setup};
use std::time::Duration;

/// One thing to measure.
pub struct Scenario {
    pub name: String,
    /// What is measured, in a sentence.
    pub what: String,
    pub setup: Setup,
    pub rounds: usize,
    pub turns: Turns,
    /// Whether replies that are always the same make sense here.
    pub has_limit: bool,
    /// Whether only servers take part that have the commands that C beanstalkd does not have.
    pub needs_extensions: bool,
    /// What the client opens for each server, where that is many.
    pub open_files: usize,
    pub prepare: Prepare,
}

/// Makes a server ready for its rounds.
pub type Prepare = Box<dyn Fn(&mut Server, &Settings) -> Outcome<Round>>;

/// Runs a round and returns its figures.
pub type Round = Box<dyn FnMut(&mut Server) -> Outcome<Figures>>;

/// How servers share the machine.
#[derive(Debug, Clone, Copy)]
pub enum Turns {
    /// All run; their rounds alternate. System calls may be counted in one round more.
    Interleaved { is_traced: bool },
    /// One at a time, started again for each round.
    Alone,
}

/// What was asked for on the command line.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The number of rounds, instead of that of the scenario.
    pub rounds: Option<usize>,
    /// How long a server may take for a step outside the measured rounds.
    pub patience: Duration,
}

/// How long a steady round lasts.
const ROUND: Duration = Duration::from_millis(300);

impl Scenario {
    /// Rounds in turn with those of all other servers, and one to count system calls.
    /// The defaults of a scenario.
    fn new(
        name: impl Into<String>,
        what: impl Into<String>,
        prepare: impl Fn(&mut Server, &Settings) -> Outcome<Round> + 'static,
    ) -> Scenario {
        Scenario {
            name: name.into(),
            what: what.into(),
            setup: Setup::default(),
            rounds: 5,
            turns: Turns::Interleaved { is_traced: true },
            has_limit: false,
            needs_extensions: false,
            open_files: 100,
            prepare: Box::new(prepare),
        }
    }
}

/// Those that count instructions.
pub fn counting_instructions() -> Vec<Scenario> {
    instructions::all()
}

/// All others, in the order of the table.
pub fn all() -> Vec<Scenario> {
    let families = [
        steady::all(),
        tubes::all(),
        held::all(),
        connections::all(),
        deep::all(),
        timers::all(),
        binlog::all(),
        scrape::all(),
        batches::all(),
        unique::all(),
    ];
    families.into_iter().flatten().collect()
}
