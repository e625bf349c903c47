//! Seeds of the mutations: the conversations of `tests/conversations`, runs of the simulation, and random
//! programs.

use crate::harness::driver::Settings;
use crate::harness::play::Play;
use crate::harness::script::{self, Script};
use crate::simulation::driver::Simulation;
use crate::simulation::event::{Event, Setup};
use crate::simulation::generator::Generator;
use crate::simulation::shrink;
use crate::simulation::world::JudgedWorld;

pub(crate) fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "connection" => {
            script::all().iter().map(history_of).chain((0..60).map(history_of_seed)).collect()
        }
        "replay" => programs(),
        _ => panic!("there is no target {target}"),
    }
}

// ---- Histories ----

/// Returns a script in the form of the target `connection`.
fn history_of(script: &Script) -> Vec<u8> {
    let settings = script.settings(Settings::DEFAULT);
    let setup = match (script.has_binlog, settings.max_job_size, settings.bury_after) {
        (true, _, Some(_)) => 4,
        (true, _, None) => 2,
        (false, _, Some(_)) => 3,
        (false, 0..=1000, None) => 1,
        (false, _, None) => 0,
    };
    let mut play = Play::new(JudgedWorld::new(script, Setup::default(), None), !script.has_binlog);
    play.play(script).expect("it is one of the tests");
    input(setup, &play.world.history)
}

/// Returns the first events of a run of the simulation: outputs that no client reads, bodies and long
/// lines in pieces, binlogs that are compacted, full, failing and remote disks.
fn history_of_seed(seed: u8) -> Vec<u8> {
    let mut generator = Generator::new(seed.into());
    let mut simulation = Simulation::new(generator.setup).expect("the disk is empty");
    let mut events = Vec::new();
    for _ in 0..60 {
        events.push(generator.next(&simulation));
        shrink::apply(&mut simulation, &events[events.len() - 1])
            .expect("it is a run of the tests");
    }
    input(seed, &events)
}

fn input(setup: u8, events: &[Event]) -> Vec<u8> {
    let text: String = events.iter().map(|event| format!("{event}\n")).collect();
    [&[setup], text.as_bytes()].concat()
}

/// Random programs that write binlog files.
fn programs() -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(7);
    let program = |_| {
        let mut program = vec![random.u8(..), random.u8(..) & 0xfe];
        program.extend((0..random.usize(..400)).map(|_| random.u8(..)));
        program
    };
    (0..60).map(program).collect()
}
