//! The timer wheel: who wants to be called when.
//!
//! Eight levels of 64 slots. A slot of the lowest level is one tick (2^16 ns, about
//! 66 us), a slot of each level above is 64 slots of the level below, and the eight
//! together span every [`Nanos`] there is:
//!
//! ```text
//! level 7   |. . . . . . . . . . . . . . . .|   1 slot =  9 years
//!    ...
//! level 1   |. . . x . . . . . . . . . . . .|   1 slot =  4.2 ms
//! level 0   |. x . . . x . . . . . . . . . .|   1 slot = 66 us
//! ```
//!
//! A timer stands on the level of the highest digit, in base 64, in which its tick differs
//! from the present one. When the present reaches a slot above level 0, the slot's timers
//! move down; each timer moves at most seven times from when it is set. Setting and
//! cancelling cost a few writes, whatever the number of timers.
//!
//! Moments are rounded up to the tick, so a timer is never early. The wheel knows nothing
//! of what it wakes: an owner is a value that it hands back.

use super::list::{Linked, Links, List};
use super::slab::PagedSlab;
use crate::engine::keys::{Key, TimerKey};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// A set of timers, each with an owner of type `T`.
#[derive(Debug)]
pub struct Wheel<T> {
    /// The present, in ticks: everything before it has been handed out or is in `due`.
    present: u64,
    /// Apart, as they are thirteen thousand bytes, which would pass through the stack with
    /// everything that has a wheel.
    levels: Box<[Level]>,
    /// A bit for each level: whether it has a timer.
    occupied: u32,
    /// Timers whose moment has come, in the order in which they are handed out.
    due: List,
    timers: Timers<T>,
}

const TICK_BITS: u32 = 16;
const SLOT_BITS: u32 = 6;
const SLOTS: usize = 1 << SLOT_BITS;
const LEVELS: usize = 8;

#[derive(Debug)]
struct Timers<T>(PagedSlab<TimerKey, Timer<T>>);

#[derive(Debug)]
struct Timer<T> {
    owner: T,
    /// The tick for which it is set, or [`IDLE`], or [`DUE`]. One number, since there is a timer
    /// for each connection and each tube.
    tick: u64,
    links: Links,
}

/// Instead of a tick: the timer is not set.
const IDLE: u64 = u64::MAX;
/// Instead of a tick: it stands in the list of those to be handed out.
const DUE: u64 = u64::MAX - 1;

#[derive(Debug)]
struct Level {
    /// A bit for each slot: whether it has a timer.
    occupied: u64,
    slots: [Slot; SLOTS],
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    timers: List,
    /// No timer of this slot is sooner than this tick. A cancelled timer may leave it too
    /// low: that costs a wake-up for nothing, once.
    earliest: u64,
}

impl<T: Copy> Wheel<T> {
    /// A wheel without timers that starts at `now`.
    pub fn new(now: Nanos) -> Wheel<T> {
        Wheel {
            present: tick_at_or_before(now),
            levels: (0..LEVELS).map(|_| Level::new()).collect(),
            occupied: 0,
            due: List::default(),
            timers: Timers(PagedSlab::default()),
        }
    }

    /// A new timer of `owner`, not set.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn create(&mut self, owner: T) -> Result<TimerKey, TryReserveError> {
        self.timers.0.try_reserve_one()?;
        let timer = Timer { owner, tick: IDLE, links: Links::LOOSE };
        Ok(self.timers.0.insert(timer))
    }

    /// The timer has another owner from now on.
    pub fn give_to(&mut self, timer: TimerKey, owner: T) {
        self.timers.0[timer].owner = owner;
    }

    /// Cancels the timer and forgets it.
    pub fn destroy(&mut self, timer: TimerKey) {
        self.cancel(timer);
        self.timers.0.remove(timer);
    }

    /// Sets the timer to `at`, instead of what it was set to.
    #[cfg(test)]
    fn set(&mut self, timer: TimerKey, at: Nanos) {
        self.cancel(timer);
        self.enter(timer, tick_at_or_after(at));
    }

    /// Sets the timer so that it goes off at `at` or sooner. Leaving a timer too soon is
    /// cheaper than moving it each time the moment moves back; who is woken early looks,
    /// finds nothing due, and sets it anew.
    pub fn set_no_later_than(&mut self, timer: TimerKey, at: Nanos) {
        let tick = tick_at_or_after(at);
        let present = self.timers.0[timer].tick;
        if present != DUE && present > tick {
            self.cancel(timer);
            self.enter(timer, tick);
        }
    }

    /// The timer will not go off.
    pub fn cancel(&mut self, timer: TimerKey) {
        match std::mem::replace(&mut self.timers.0[timer].tick, IDLE) {
            IDLE => {}
            DUE => self.due.remove(&mut self.timers, timer.number()),
            tick => {
                let (level, slot) = position(self.present, tick);
                let list = &mut self.levels[level].slots[slot].timers;
                list.remove(&mut self.timers, timer.number());
                if list.is_empty() {
                    self.note_empty(level, slot);
                }
            }
        }
    }

    /// Takes out one timer that is due at `now` and says whose it is; soonest first, but
    /// for those that lie within one tick.
    pub fn pop_due(&mut self, now: Nanos) -> Option<T> {
        self.advance(tick_at_or_before(now));
        let key = self.due.pop_front(&mut self.timers)?;
        let timer = &mut self.timers.0[TimerKey::from_number(key)];
        timer.tick = IDLE;
        Some(timer.owner)
    }

    /// When to ask [`Wheel::pop_due`] again: at or before the soonest timer, never after
    /// it. `None` without timers.
    pub fn next_due(&self) -> Option<Nanos> {
        if !self.due.is_empty() {
            return Some(moment(self.present));
        }
        let (level, slot) = self.first_occupied()?;
        Some(moment(self.levels[level].slots[slot].earliest))
    }

    /// Moves the present to `tick` or to the first tick that makes a timer due, whichever
    /// is sooner.
    fn advance(&mut self, tick: u64) {
        while self.due.is_empty() {
            let Some((level, slot)) = self.first_occupied() else { break };
            let start = slot_start(self.present, level, slot);
            if start > tick {
                break;
            }
            self.present = start;
            self.empty_slot(level, slot);
        }
        if self.due.is_empty() {
            self.present = self.present.max(tick);
        }
    }

    /// Moves the timers of a slot that the present has reached to where they stand now: a
    /// level below, or among the due.
    fn empty_slot(&mut self, level: usize, slot: usize) {
        let mut timers = std::mem::take(&mut self.levels[level].slots[slot].timers);
        self.note_empty(level, slot);
        while let Some(key) = timers.pop_front(&mut self.timers) {
            let key = TimerKey::from_number(key);
            self.enter(key, self.timers.0[key].tick);
        }
    }

    /// A slot has no timer any more.
    fn note_empty(&mut self, level: usize, slot: usize) {
        let occupied = &mut self.levels[level].occupied;
        *occupied &= !(1 << slot);
        if *occupied == 0 {
            self.occupied &= !(1 << level);
        }
    }

    /// Puts a timer that stands nowhere to where its tick belongs.
    fn enter(&mut self, key: TimerKey, tick: u64) {
        if tick <= self.present {
            self.timers.0[key].tick = DUE;
            self.due.push_back(&mut self.timers, key.number());
            return;
        }
        let (level, index) = position(self.present, tick);
        self.occupied |= 1 << level;
        let level = &mut self.levels[level];
        let slot = &mut level.slots[index];
        let known = if slot.timers.is_empty() { u64::MAX } else { slot.earliest };
        slot.earliest = known.min(tick);
        slot.timers.push_back(&mut self.timers, key.number());
        level.occupied |= 1 << index;
        self.timers.0[key].tick = tick;
    }

    // ---- Checking ----

    /// How many timers there are.
    pub fn len(&self) -> usize {
        self.timers.0.len()
    }

    /// Whose timer it is.
    pub fn owner(&self, timer: TimerKey) -> T {
        self.timers.0[timer].owner
    }

    /// Whether the timer goes off at `at` or sooner. One whose moment was over when it was set goes
    /// off in the next tick; which one that is cannot be told while timers are due, since the
    /// present stands still for them.
    pub fn is_set_no_later_than(&self, timer: TimerKey, at: Nanos) -> bool {
        match self.timers.0[timer].tick {
            DUE => true,
            IDLE => false,
            tick => !self.due.is_empty() || tick <= tick_at_or_after(at).max(self.present + 1),
        }
    }

    /// Each timer that is set stands in the slot of its tick or among the due, and nowhere else.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(&self) {
        self.timers.0.check(format_args!("the timers"));
        let mut standing = self.due.len();
        self.due.check(&self.timers, format_args!("the timers that are due"), |key| {
            let tick = self.timers.0[TimerKey::from_number(key)].tick;
            assert_eq!(tick, DUE, "timer {key} is among the due: its tick, and what it should be");
        });
        for (number, level) in self.levels.iter().enumerate() {
            let has_timers =
                |bits, (slot, it): (usize, &Slot)| bits | u64::from(!it.timers.is_empty()) << slot;
            let occupied = level.slots.iter().enumerate().fold(0, has_timers);
            assert_eq!(
                level.occupied, occupied,
                "level {number} of the wheel: a bit for each slot with timers, noted and counted"
            );
            let is_noted = self.occupied >> number & 1 != 0;
            assert_eq!(is_noted, occupied != 0, "whether level {number} of the wheel has timers");
            for slot in (0..SLOTS).filter(|slot| occupied >> slot & 1 != 0) {
                standing += self.check_slot(number, slot);
            }
        }
        let is_set = self.timers.0.iter().filter(|(_, timer)| timer.tick != IDLE).count();
        assert_eq!(standing as usize, is_set, "timers that stand somewhere, and that are set");
    }

    /// Says how many timers stand in the slot.
    fn check_slot(&self, level: usize, slot: usize) -> u32 {
        let Slot { timers, earliest } = self.levels[level].slots[slot];
        timers.check(&self.timers, format_args!("slot {slot} of level {level}"), |key| {
            let tick = self.timers.0[TimerKey::from_number(key)].tick;
            let present = self.present;
            assert!(
                tick > present && tick < DUE && position(present, tick) == (level, slot),
                "timer {key}, for tick {tick}, stands at {:?}: the present is {present}",
                (level, slot)
            );
            assert!(
                earliest <= tick,
                "timer {key}, for tick {tick}, is sooner than any in its slot: {earliest}"
            );
        });
        timers.len()
    }

    /// The slot that the present reaches first. Lower levels come first: their timers
    /// share all higher digits with the present.
    fn first_occupied(&self) -> Option<(usize, usize)> {
        if self.occupied == 0 {
            return None;
        }
        let level = self.occupied.trailing_zeros() as usize;
        Some((level, self.levels[level].occupied.trailing_zeros() as usize))
    }
}

impl Level {
    fn new() -> Level {
        Level { occupied: 0, slots: [Slot::default(); SLOTS] }
    }
}

impl<T> Linked for Timers<T> {
    fn links(&self, key: u32) -> Links {
        self.0[TimerKey::from_number(key)].links
    }

    fn set_links(&mut self, key: u32, links: Links) {
        self.0[TimerKey::from_number(key)].links = links;
    }
}

/// The level and slot of a later `tick`.
fn position(present: u64, tick: u64) -> (usize, usize) {
    let highest_difference = 63 - (present ^ tick).leading_zeros();
    let level = highest_difference / SLOT_BITS;
    (level as usize, digit(tick, level))
}

/// The digit of `tick` that names its slot on `level`.
fn digit(tick: u64, level: u32) -> usize {
    let digit = (tick >> (level * SLOT_BITS)) % SLOTS as u64;
    usize::try_from(digit).expect("a digit in base 64 is small")
}

/// The first tick of a slot: the present with this digit on `level` and zeros below.
fn slot_start(present: u64, level: usize, slot: usize) -> u64 {
    let shift = level * SLOT_BITS as usize;
    let above = present >> shift >> SLOT_BITS << SLOT_BITS;
    (above | slot as u64) << shift
}

fn tick_at_or_before(at: Nanos) -> u64 {
    at.as_nanos() >> TICK_BITS
}

fn tick_at_or_after(at: Nanos) -> u64 {
    // Rounding up the very latest moments would leave the wheel; they stand for never.
    at.as_nanos().div_ceil(1 << TICK_BITS).min(u64::MAX >> TICK_BITS)
}

fn moment(tick: u64) -> Nanos {
    Nanos::from_nanos(tick.saturating_mul(1 << TICK_BITS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn due_now(wheel: &mut Wheel<u32>, now: Nanos) -> Vec<u32> {
        std::iter::from_fn(|| wheel.pop_due(now)).collect()
    }

    #[test]
    fn never_early_and_at_most_one_tick_late() {
        let mut wheel = Wheel::new(Nanos::ZERO);
        let timer = wheel.create(1).unwrap();
        let at = Nanos::from_millis(5);
        wheel.set(timer, at);
        assert_eq!(due_now(&mut wheel, at), []);
        let wake = wheel.next_due().expect("a timer is set");
        assert!(wake >= at && wake.since(at) < Nanos::from_nanos(1 << TICK_BITS));
        assert_eq!(due_now(&mut wheel, wake), [1]);
        assert_eq!(wheel.next_due(), None);
    }

    #[test]
    fn reaches_the_latest_moment_there_is() {
        let mut wheel = Wheel::new(Nanos::ZERO);
        let timer = wheel.create(1).unwrap();
        for secs in [1, 60, 86_400, u32::MAX] {
            let at = Nanos::from_secs(secs);
            wheel.set(timer, at);
            assert_eq!(due_now(&mut wheel, Nanos::from_nanos(at.as_nanos() - 1)), []);
            assert_eq!(due_now(&mut wheel, at + Nanos::from_millis(1)), [1]);
        }
        wheel.set(timer, Nanos::from_nanos(u64::MAX));
        assert_eq!(due_now(&mut wheel, Nanos::from_secs(u32::MAX)), []);
    }

    #[test]
    fn a_moment_in_the_past_is_due_at_once() {
        let now = Nanos::from_secs(100);
        let mut wheel = Wheel::new(now);
        let timer = wheel.create(1).unwrap();
        wheel.set(timer, Nanos::from_secs(3));
        assert!(wheel.next_due().is_some_and(|due| due <= now));
        assert_eq!(due_now(&mut wheel, now), [1]);
    }

    #[test]
    fn set_no_later_than_only_ever_brings_forward() {
        let mut wheel = Wheel::new(Nanos::ZERO);
        let timer = wheel.create(1).unwrap();
        wheel.set_no_later_than(timer, Nanos::from_secs(2));
        wheel.set_no_later_than(timer, Nanos::from_secs(9));
        let late = |secs| Nanos::from_secs(secs) + Nanos::from_millis(1);
        assert_eq!(due_now(&mut wheel, late(2)), [1]);
        wheel.set_no_later_than(timer, Nanos::from_secs(9));
        wheel.set_no_later_than(timer, Nanos::from_secs(5));
        assert_eq!(due_now(&mut wheel, late(5)), [1]);
    }

    #[test]
    fn behaves_as_a_sorted_map_under_random_steps() {
        const TIMERS: usize = 60;
        let mut random = fastrand::Rng::with_seed(3);
        let mut now = Nanos::from_secs(1_000);
        let mut wheel = Wheel::new(now);
        let names: Vec<u32> = (0..).take(TIMERS).collect();
        let keys: Vec<TimerKey> = names.iter().map(|&name| wheel.create(name).unwrap()).collect();
        let mut model: BTreeMap<u32, u64> = BTreeMap::new();
        for _ in 0..60_000 {
            let name = random.u32(..60);
            let key = keys[name as usize];
            match random.u8(..8) {
                0 => {
                    wheel.cancel(key);
                    model.remove(&name);
                }
                1..5 => {
                    // From nanoseconds to decades, so that every level is used.
                    let span = random.u64(..) >> random.u32(4..64);
                    let at = now + Nanos::from_nanos(span);
                    wheel.set(key, at);
                    model.insert(name, tick_at_or_after(at));
                }
                _ => {
                    now = now + Nanos::from_nanos(random.u64(..) >> random.u32(20..64));
                    let mut fired = due_now(&mut wheel, now);
                    fired.sort_unstable();
                    let tick = tick_at_or_before(now);
                    let expected: Vec<u32> = model
                        .iter()
                        .filter(|&(_, &at)| at <= tick)
                        .map(|(&name, _)| name)
                        .collect();
                    assert_eq!(fired, expected);
                    model.retain(|_, at| *at > tick);
                }
            }
            wheel.check();
            let soonest = model.values().min().copied();
            for (&name, &tick) in &model {
                assert!(wheel.is_set_no_later_than(keys[name as usize], moment(tick)));
            }
            assert_eq!(wheel.next_due().is_some(), soonest.is_some());
            if let (Some(wake), Some(soonest)) = (wheel.next_due(), soonest) {
                assert!(wake <= moment(soonest));
            }
        }
    }

    #[test]
    fn timers_that_are_due_come_out_in_order_of_time() {
        let mut wheel = Wheel::new(Nanos::ZERO);
        for name in [5, 3, 900, 70, 64, 4_096] {
            let timer = wheel.create(name).unwrap();
            wheel.set(timer, Nanos::from_millis(u64::from(name)));
        }
        assert_eq!(due_now(&mut wheel, Nanos::from_secs(60)), [3, 5, 64, 70, 900, 4_096]);
    }
}
