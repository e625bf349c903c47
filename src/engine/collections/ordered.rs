//! The jobs of a tube in one state, by rank: a run of those that came in order, and a heap of the others.
//!
//! Most jobs come in order. They are appended to the run, a linked list whose links are in the jobs, in
//! O(1) and without memory. The first entry of all is that of the run or that of the heap:
//!
//! ```text
//! run     7 -> 8 -> 9 -> 12      a new 13 is appended
//! heap    10  11                 a new 3 is inserted
//! ```
//!
//! Only the heap needs memory. The caller decides what becomes of a job for which there is none.

use super::heap::{Entry, Heap};
use super::list::{Linked, Links, List};
use std::collections::TryReserveError;
use std::fmt;

/// An entry of an [`Ordered`]. The links of an object have its index while it is in the heap.
pub trait Ranked: Copy + fmt::Debug {
    /// The objects.
    type Store: Linked;

    /// Returns the entry of the object `key`, with its present rank.
    fn of(key: u32, store: &Self::Store) -> Self;

    fn key(self) -> u32;

    /// Returns whether this entry comes before `other`.
    fn precedes(self, other: Self, store: &Self::Store) -> bool;

    /// Returns whether a run whose last entry is `last` can be continued with this one.
    fn follows(self, last: Self, store: &Self::Store) -> bool {
        last.precedes(self, store)
    }

    /// Stores the index in the heap with the object.
    fn store_index(self, index: u32, store: &mut Self::Store) {
        *store.links_mut(self.key()) = Links::at_index(index);
    }
}

impl<E: Ranked> Entry for E {
    type Store = E::Store;

    #[inline]
    fn is_before(self, other: E, store: &E::Store) -> bool {
        self.precedes(other, store)
    }

    fn set_index(self, index: u32, store: &mut E::Store) {
        self.store_index(index, store);
    }

    fn index(self, store: &E::Store) -> Option<u32> {
        store.links(self.key()).index()
    }
}

/// Entries in the order of their ranks.
#[derive(Clone, Debug)]
pub struct Ordered<E> {
    run: List,
    heap: Heap<E>,
}

impl<E> Default for Ordered<E> {
    fn default() -> Ordered<E> {
        Ordered { run: List::default(), heap: Heap::default() }
    }
}

impl<E: Ranked> Ordered<E> {
    pub fn len(&self) -> usize {
        self.run.len() as usize + self.heap.len()
    }

    /// Returns the key of the entry that comes before all others.
    #[inline]
    pub fn first(&self, store: &E::Store) -> Option<u32> {
        match (self.run.front(), self.heap.first()) {
            (run, None) => run,
            (Some(run), Some(least)) if !least.precedes(E::of(run, store), store) => Some(run),
            (_, Some(least)) => Some(least.key()),
        }
    }

    /// Ensures that the next insertion succeeds.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.heap.try_reserve_one()
    }

    /// Adds the object `key`. Returns `false` if there is no room for it, and the heap cannot grow or
    /// may not.
    #[inline]
    pub fn insert(&mut self, key: u32, may_grow: bool, store: &mut E::Store) -> bool {
        let follows = |last| E::of(key, store).follows(E::of(last, store), store);
        if self.run.back().is_none_or(follows) {
            self.run.push_back(store, key);
            return true;
        }
        let has_room = self.heap.has_room() || (may_grow && self.heap.try_reserve_one().is_ok());
        if has_room {
            self.heap.insert(E::of(key, store), store);
        }
        has_room
    }

    /// Removes the object `key`, which must be here.
    #[inline]
    pub fn remove(&mut self, key: u32, store: &mut E::Store) {
        match store.links(key).index() {
            None => self.run.remove(store, key),
            Some(index) => {
                let removed = self.heap.remove(index, store).key();
                assert_eq!(removed, key, "the heap index of a job belongs to another job");
            }
        }
    }

    /// Removes any entry, and returns its key.
    pub fn pop_any(&mut self, store: &mut E::Store) -> Option<u32> {
        self.run.pop_front(store).or_else(|| self.heap.pop_last().map(E::key))
    }

    /// Returns all keys in arbitrary order.
    pub fn keys(&self, store: &E::Store) -> impl Iterator<Item = u32> {
        self.run.iter(store).chain(self.heap.iter().map(E::key))
    }

    /// Returns the first key of the run.
    pub fn first_of_run(&self) -> Option<u32> {
        self.run.front()
    }

    /// Returns the entries that are not in the run.
    pub fn heap(&self) -> &Heap<E> {
        &self.heap
    }

    /// Returns the first `count` keys, in order. The cost depends on `count` only.
    pub fn first_keys(&self, count: usize, store: &E::Store) -> impl Iterator<Item = u32> {
        let mut heap = self.heap.first_entries(count, store).into_iter().peekable();
        let mut run = self.run.iter(store).map(|key| E::of(key, store)).peekable();
        let next = move || match (run.peek(), heap.peek()) {
            (Some(run), Some(least)) if least.precedes(*run, store) => heap.next(),
            (None, _) => heap.next(),
            (Some(_), _) => run.next(),
        };
        std::iter::from_fn(next).take(count).map(E::key)
    }

    /// Checks the run and the heap, and calls `each` with all keys.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the entries in the message.
    pub fn check(&self, store: &E::Store, what: fmt::Arguments<'_>, mut each: impl FnMut(u32)) {
        let mut last: Option<E> = None;
        self.run.check(store, what, |key| {
            let entry = E::of(key, store);
            assert_eq!(store.links(key).index(), None, "{what}: {entry:?} is in the run");
            let follows = last.is_none_or(|last| entry.follows(last, store));
            assert!(follows, "{what}: {entry:?} is after {last:?} in the run");
            last = Some(entry);
            each(key);
        });
        self.heap.check(store, what);
        for entry in self.heap.iter() {
            let now = E::of(entry.key(), store);
            let is_same = !entry.precedes(now, store) && !now.precedes(entry, store);
            assert!(is_same, "{what}: {entry:?} is in the heap, and the job has {now:?}");
            each(entry.key());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The rank and the links of each number.
    type Store = Vec<(u32, Links)>;

    #[derive(Clone, Copy, Debug)]
    struct Item(u32, u32);

    impl Linked for Store {
        fn links(&self, key: u32) -> Links {
            self[key as usize].1
        }

        fn links_mut(&mut self, key: u32) -> &mut Links {
            &mut self[key as usize].1
        }
    }

    impl Ranked for Item {
        type Store = Store;

        fn of(key: u32, store: &Store) -> Item {
            Item(store[key as usize].0, key)
        }

        fn key(self) -> u32 {
            self.1
        }

        fn precedes(self, other: Item, _: &Store) -> bool {
            (self.0, self.1) < (other.0, other.1)
        }
    }

    #[test]
    fn random_operations_match_a_btree_set() {
        const KEYS: u32 = 300;
        let mut random = fastrand::Rng::with_seed(5);
        let mut store: Store = vec![(0, Links::LOOSE); KEYS as usize];
        let mut ordered = Ordered::<Item>::default();
        let mut model: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut refused = 0;
        for step in 0..40_000 {
            // Ranks that rise with time join the run.
            let rank = if random.bool() { step } else { random.u32(..step + 1) };
            let key = random.u32(..KEYS);
            let present = model.iter().find(|(_, it)| *it == key).copied();
            match present {
                Some(entry) => {
                    ordered.remove(key, &mut store);
                    model.remove(&entry);
                }
                None => {
                    store[key as usize].0 = rank;
                    let may_grow = random.u8(..4) > 0;
                    if ordered.insert(key, may_grow, &mut store) {
                        model.insert((rank, key));
                    } else {
                        assert!(!may_grow);
                        refused += 1;
                    }
                }
            }
            assert_eq!(ordered.len(), model.len());
            assert_eq!(ordered.first(&store), model.first().map(|&(_, key)| key));
            let mut seen = BTreeSet::new();
            ordered.check(&store, format_args!("step {step}"), |key| {
                seen.insert((store[key as usize].0, key));
            });
            assert_eq!(seen, model);
            if step % 50 == 0 {
                let first = model.iter().map(|&(_, key)| key).take(9);
                assert!(ordered.first_keys(9, &store).eq(first), "step {step}");
            }
        }
        assert!(refused > 0, "no insertion was refused");
        while ordered.pop_any(&mut store).is_some() {}
        assert_eq!(ordered.len(), 0);
    }
}
