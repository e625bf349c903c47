//! Timers: one for each connection, or for each tube.
//!
//! All timers of one kind are in a heap by their time. One that is not set has the time [`Nanos::NEVER`], so
//! setting a timer needs no memory. A timer is only moved to an earlier time. An early expiry at which nothing
//! is due costs less than moving the timer whenever a deadline is postponed: most settings compare two numbers.
//! They are set and expire seldom, so a heap is no slower than a timer wheel.

use super::heap::{Entry, Heap};
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{Key, NIL};
use crate::engine::time::Nanos;
use std::fmt;

/// The timers of all objects of one kind.
pub struct Timers<K> {
    heap: Heap<Timer<K>>,
    /// The index in the heap of each timer, by the number of its key.
    indexes: Vec<u32>,
    /// How often a timer was set, which wraps: the order of timers of one moment.
    last_seq: u32,
}

/// A timer in the heap: the first to expire first, then the first that was set.
#[derive(Clone, Copy, Debug)]
struct Timer<K> {
    at: Nanos,
    seq: u32,
    key: K,
}

impl<K> Default for Timers<K> {
    fn default() -> Timers<K> {
        Timers { heap: Heap::default(), indexes: Vec::new(), last_seq: 0 }
    }
}

impl<K: Key + fmt::Debug> Timers<K> {
    /// Ensures that [`Timers::add`] of this key needs no memory, until a timer is removed.
    pub fn try_reserve(&mut self, key: K) -> Result<(), NoMemory> {
        self.heap.try_reserve_one()?;
        let len = key.number() as usize + 1;
        if len > self.indexes.len() {
            let missing = len - self.indexes.len();
            headroom::keeping(Headroom::Quarter, || self.indexes.try_reserve(missing))?;
            self.indexes.resize(len, NIL);
        }
        Ok(())
    }

    /// Adds the timer of a new object. It is not set.
    ///
    /// # Panics
    /// [`Timers::try_reserve`] was not called before, or failed.
    pub fn add(&mut self, key: K) {
        self.heap.insert(Timer { at: Nanos::NEVER, seq: 0, key }, &mut self.indexes);
    }

    /// Removes the timer of an object.
    pub fn remove(&mut self, key: K) {
        let index = std::mem::replace(&mut self.indexes[key.number() as usize], NIL);
        self.heap.remove(index, &mut self.indexes);
        if self.heap.is_empty() {
            self.indexes = Vec::new();
        }
    }

    /// Sets the timer so that it expires at `at`, or earlier if it was set to an earlier time.
    #[inline]
    pub fn set_no_later_than(&mut self, key: K, at: Nanos) {
        let index = self.indexes[key.number() as usize];
        if at < self.heap[index as usize].at {
            self.last_seq = self.last_seq.wrapping_add(1);
            self.heap.replace(index, Timer { at, seq: self.last_seq, key }, &mut self.indexes);
        }
    }

    /// Returns the object of the first timer that has expired by `now`, and unsets that timer.
    pub fn pop_due(&mut self, now: Nanos) -> Option<K> {
        let first = *self.heap.first().filter(|first| first.at <= now)?;
        self.heap.replace(0, Timer { at: Nanos::NEVER, ..first }, &mut self.indexes);
        Some(first.key)
    }

    /// Returns the time of the first expiry; [`Nanos::NEVER`] if no timer is set.
    pub fn next_due(&self) -> Nanos {
        self.heap.first().map_or(Nanos::NEVER, |first| first.at)
    }

    // ---- Checking ----

    /// Returns the time at which the timer of an object expires.
    pub fn at(&self, key: K) -> Nanos {
        self.heap[self.indexes[key.number() as usize] as usize].at
    }

    /// Checks the heap of `count` timers.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the timers in the message.
    pub fn check(&self, count: usize, what: fmt::Arguments<'_>) {
        let index_of = |timer: Timer<K>| self.indexes.get(timer.key.number() as usize).copied();
        self.heap.check(&self.indexes, what, index_of);
        assert_eq!(self.heap.len(), count, "{what}, and their objects");
        let set = self.indexes.iter().filter(|index| **index != NIL);
        assert_eq!(set.count(), count, "{what}, and their indexes");
    }
}

impl<K: Key + fmt::Debug> Entry for Timer<K> {
    type Store = Vec<u32>;

    fn is_before(self, other: Timer<K>, _: &Vec<u32>) -> bool {
        (self.at, self.seq) < (other.at, other.seq)
    }

    fn set_index(self, index: u32, indexes: &mut Vec<u32>) {
        indexes[self.key.number() as usize] = index;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::TubeKey;
    use std::collections::BTreeMap;

    #[test]
    fn random_operations_match_a_map() {
        let mut random = fastrand::Rng::with_seed(3);
        let mut timers = Timers::default();
        // The time of each object.
        let mut model: BTreeMap<TubeKey, Nanos> = BTreeMap::new();
        let mut now = Nanos::from_secs(1_000);
        for step in 0..30_000 {
            let key = TubeKey::from_number(random.u32(..60));
            match (random.u8(..8), model.get_mut(&key)) {
                (0, Some(_)) => {
                    timers.remove(key);
                    model.remove(&key);
                }
                (1..5, Some(at)) => {
                    let new = now + Nanos::from_nanos(random.u64(..) >> random.u32(4..64));
                    timers.set_no_later_than(key, new);
                    *at = new.min(*at);
                }
                (0..5, None) => {
                    timers.try_reserve(key).expect("the test has memory");
                    timers.add(key);
                    model.insert(key, Nanos::NEVER);
                }
                _ => {
                    now = now + Nanos::from_nanos(random.u64(..) >> random.u32(20..64));
                    let mut last = Nanos::ZERO;
                    while let Some(key) = timers.pop_due(now) {
                        let at = model.get_mut(&key).expect("a timer has an object");
                        assert!(last <= *at && *at <= now, "step {step}: {at:?} after {last:?}");
                        last = std::mem::replace(at, Nanos::NEVER);
                    }
                }
            }
            timers.check(model.len(), format_args!("the timers of step {step}"));
            for (&key, &at) in &model {
                assert_eq!(timers.at(key), at, "step {step}");
            }
            let first = model.values().copied().min();
            assert_eq!(timers.next_due(), first.unwrap_or(Nanos::NEVER));
        }
    }
}
