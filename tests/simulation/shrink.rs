//! Shortens a history that fails, as long as it still fails.

use super::driver::{Failure, Simulation};
use super::event::{Event, Setup};
use std::panic::AssertUnwindSafe;

const MAX_TRIALS: usize = 20_000;

/// Applies a history to a new simulation. A panic is a failure too.
pub fn replay(setup: Setup, history: &[Event]) -> Result<(), Failure> {
    let mut simulation = Simulation::new(setup)?;
    history.iter().try_for_each(|event| apply(&mut simulation, event))
}

/// Applies one event. After a failure the simulation must not be used again.
pub fn apply(simulation: &mut Simulation, event: &Event) -> Result<(), Failure> {
    let applied = std::panic::catch_unwind(AssertUnwindSafe(|| simulation.apply(event)));
    applied.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("no message")))
    })
}

/// Returns a part of `history` that fails too, and from which no single event can be removed. It
/// may fail in another way.
pub fn shrink(setup: Setup, history: &[Event]) -> Vec<Event> {
    let mut trials = 0;
    let mut fails = |history: &[Event]| {
        trials += 1;
        trials < MAX_TRIALS && replay(setup, history).is_err()
    };
    let mut history = history.to_vec();
    let mut size = history.len().div_ceil(2);
    loop {
        let before = history.len();
        let mut at = 0;
        while at < history.len() {
            let end = (at + size).min(history.len());
            let rest = [&history[..at], &history[end..]].concat();
            if fails(&rest) {
                history = rest;
            } else {
                at = end;
            }
        }
        if size == 1 && history.len() == before {
            return history;
        }
        size = size.div_ceil(2).max(1);
    }
}
