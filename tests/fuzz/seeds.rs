//! Seeds of the mutations: the conversations of `tests/conversations`, runs of the simulation, and random
//! programs.

use crate::harness::driver::Settings;
use crate::harness::play::Play;
use crate::harness::script::{self, Line, Script};
use crate::simulation::driver::Simulation;
use crate::simulation::event::{Event, Setup};
use crate::simulation::generator::Generator;
use crate::simulation::shrink;
use crate::simulation::world::JudgedWorld;
use std::collections::BTreeSet;

pub(crate) fn of(target: &str) -> Vec<Vec<u8>> {
    match target {
        "connection" => {
            script::all().iter().map(history_of).chain((0..60).map(history_of_seed)).collect()
        }
        "replay" => programs(),
        _ => panic!("there is no target {target}"),
    }
}

fn lines() -> Vec<Vec<u8>> {
    let mut lines = BTreeSet::new();
    for (_, line) in script::all().into_iter().flat_map(|script| script.lines) {
        if let Line::Send { bytes, .. } = line {
            let sent = bytes.split(|&byte| byte == b'\n');
            lines.extend(sent.map(|line| line.trim_ascii_end().to_vec()));
        }
    }
    lines.into_iter().collect()
}

/// The words of commands and those of their arguments, with the spaces between them.
pub(crate) fn words() -> [Vec<Vec<u8>>; 2] {
    let mut words = [BTreeSet::new(), BTreeSet::new()];
    for line in lines().into_iter().chain(EVENTS.map(|event| event.as_bytes().to_vec())) {
        for (place, word) in line.split_inclusive(|&byte| byte == b' ').enumerate() {
            words[place.min(1)].insert(word.to_vec());
        }
    }
    words.map(|words| words.into_iter().filter(|word| (1..24).contains(&word.len())).collect())
}

/// Events with numbers that are seldom drawn, each behind the end of a line.
const EVENTS: [&str; 16] = [
    "\nend-iteration\n",
    "\nsend 1 ",
    "\nhalf-close 0 reported\n",
    "\ndisconnect 1\n",
    "\nread-limit 0 1\n",
    "\nread-limit 0 -\n",
    "\nadvance 1000000000\n",
    "\nadvance-until-due\n",
    "\nsuspend 1\n",
    "\ndisk-capacity 8192\n",
    "\nfail-disk-after 2 3 0\n",
    "\nacknowledge 1\n",
    "\nlose-leadership 5\n",
    "\ncrash 1 0\n",
    "\nrestart\n",
    "\\r\\n \\(300*x) \\xff",
];

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
