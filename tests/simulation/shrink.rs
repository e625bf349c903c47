//! Makes a history that fails shorter, as long as it fails.

use super::event::{Event, Setup};
use super::world::{World, Wrong};
use std::panic::AssertUnwindSafe;

/// How often it is tried, at most.
const MOST_TRIALS: usize = 20_000;

/// Lets a history happen from the beginning. A panic is as wrong as anything else.
pub fn replay(setup: Setup, history: &[Event]) -> Result<(), Wrong> {
    let mut world = World::new(setup)?;
    history.iter().try_for_each(|event| apply(&mut world, event))
}

/// Lets one event happen.
pub fn apply(world: &mut World, event: &Event) -> Result<(), Wrong> {
    let applied = std::panic::catch_unwind(AssertUnwindSafe(|| world.apply(event)));
    applied.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        // What has panicked may be in any state: it must not be looked at again.
        Err(format!("panic: {}", text.unwrap_or("without a word")))
    })
}

/// A part of `history` that fails too, and in which nothing can be left out. It may fail in
/// another way.
pub fn shrink(setup: Setup, history: &[Event]) -> Vec<Event> {
    let mut trials = 0;
    let mut fails = |history: &[Event]| {
        trials += 1;
        trials < MOST_TRIALS && replay(setup, history).is_err()
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
