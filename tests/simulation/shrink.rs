//! Shortens a history that fails, as long as it still fails.

use super::driver::{Failure, Orders, Simulation};
use super::event::{Event, Setup};
use std::panic::AssertUnwindSafe;

const MAX_TRIALS: usize = 20_000;

/// At most this many orders of what was due at once are tried.
const MAX_ORDERS: usize = 100;

/// Applies a history to a new simulation. A panic is a failure too. If it fails, other orders of what was
/// due at once are tried: it is a failure only if it fails with each. Returns the first failure.
pub fn replay(setup: Setup, history: &[Event]) -> Result<(), Failure> {
    let mut orders = Orders::default();
    let mut first = None;
    for _ in 0..MAX_ORDERS {
        let mut simulation = Simulation::new(setup)?;
        simulation.orders = orders;
        let Err(failure) = history.iter().try_for_each(|event| apply(&mut simulation, event))
        else {
            return Ok(());
        };
        let next = simulation.orders.next_to_try(&failure);
        first = first.or(Some(failure));
        match next {
            Some(next) => orders = next,
            None => break,
        }
    }
    Err(first.expect("`MAX_ORDERS` is not 0"))
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

/// Runs without the messages of panics: each trial may panic.
pub fn silently<T>(run: impl FnOnce() -> T) -> T {
    std::panic::set_hook(Box::new(|_| {}));
    let result = run();
    let _ = std::panic::take_hook();
    result
}

/// Shortens a history that fails. Returns it as text, and its failure.
pub fn shortest(setup: Setup, history: &[Event]) -> (String, Failure) {
    silently(|| {
        let shortest = shrink(setup, history);
        let failure = replay(setup, &shortest).expect_err("it has just failed");
        (text_of(setup, &shortest), failure)
    })
}

/// Returns a history as the text of a file.
pub fn text_of(setup: Setup, history: &[Event]) -> String {
    let events = history.iter().map(|event| format!("{event}\n"));
    [format!("{setup}\n")].into_iter().chain(events).collect()
}

/// Returns a part of `history` that fails too, and from which no single event and no single line can
/// be removed. It may fail in another way.
fn shrink(setup: Setup, history: &[Event]) -> Vec<Event> {
    let mut trials = 0;
    let mut fails = |history: &[Event]| {
        trials += 1;
        trials < MAX_TRIALS && replay(setup, history).is_err()
    };
    let mut history = shrink_list(history.to_vec(), &mut fails);
    for index in 0..history.len() {
        let Event::Send(client, bytes) = &history[index] else { continue };
        let client = *client;
        let lines: Vec<Vec<u8>> =
            bytes.split_inclusive(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
        let mut shorter = history.clone();
        let lines = shrink_list(lines, &mut |lines: &[Vec<u8>]| {
            shorter[index] = Event::Send(client, lines.concat());
            fails(&shorter)
        });
        history[index] = Event::Send(client, lines.concat());
    }
    history
}

/// Removes ever smaller ranges of items, as long as `fails` returns `true` for the rest.
fn shrink_list<T: Clone>(mut items: Vec<T>, fails: &mut impl FnMut(&[T]) -> bool) -> Vec<T> {
    let mut size = items.len().div_ceil(2).max(1);
    loop {
        let before = items.len();
        let mut at = 0;
        while at < items.len() {
            let end = (at + size).min(items.len());
            let rest = [&items[..at], &items[end..]].concat();
            if fails(&rest) {
                items = rest;
            } else {
                at = end;
            }
        }
        if size == 1 && items.len() == before {
            return items;
        }
        size = size.div_ceil(2);
    }
}
