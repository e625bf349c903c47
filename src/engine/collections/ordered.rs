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
//! Only the heap needs memory. A job for which there is none comes into a tree, whose links are in the jobs
//! too, so no job is refused. Among a million jobs a place in the tree costs 2 us, and in the heap 0.1 us.

use super::heap::{Entry, Heap};
use super::list::{Linked, List};
use super::tree::{Order, Tree};
use std::cmp::Ordering;
use std::fmt;
use std::marker::PhantomData;

/// An entry of an [`Ordered`]. The links of an object have its index while it is in the heap.
pub trait Ranked: Entry<Store: Linked> {
    /// Returns the entry of the object `key`, with its present rank.
    fn of(key: u32, store: &Self::Store) -> Self;

    fn key(self) -> u32;

    /// Returns whether a run whose last entry is `last` can be continued with this one.
    fn follows(self, last: Self, store: &Self::Store) -> bool {
        last.is_before(self, store)
    }

    /// Returns a hash of the object `key` that clients cannot choose.
    fn weight(key: u32, store: &Self::Store) -> u32;
}

/// The heap may grow again for each entry at which the tree has a multiple of this number.
const ASKED_AGAIN: usize = 64;

/// The order of entries of this type in the tree.
pub struct ByRank<E>(PhantomData<E>);

impl<E: Ranked> Order for ByRank<E> {
    type Store = E::Store;

    fn precedes(key: u32, other: u32, store: &E::Store) -> bool {
        E::of(key, store).is_before(E::of(other, store), store)
    }

    fn weight(key: u32, store: &E::Store) -> u32 {
        E::weight(key, store)
    }
}

/// Entries in the order of their ranks.
pub struct Ordered<E> {
    run: List,
    heap: Heap<E>,
    /// The entries for which the heap could not grow.
    tree: Tree<ByRank<E>>,
}

impl<E> Default for Ordered<E> {
    fn default() -> Ordered<E> {
        Ordered { run: List::default(), heap: Heap::default(), tree: Tree::default() }
    }
}

impl<E: Ranked> Ordered<E> {
    pub fn len(&self) -> usize {
        self.run.len() as usize + self.heap.len() + self.tree.len()
    }

    /// Returns the key of the entry that comes before all others.
    #[inline]
    pub fn first(&self, store: &E::Store) -> Option<u32> {
        let first = match (self.run.front(), self.heap.first()) {
            (run, None) => run,
            (Some(run), Some(least)) if !least.is_before(E::of(run, store), store) => Some(run),
            (_, Some(least)) => Some(least.key()),
        };
        let Some(in_tree) = self.tree.first() else { return first };
        first.filter(|&first| ByRank::<E>::precedes(first, in_tree, store)).or(Some(in_tree))
    }

    /// Adds the object `key`.
    #[inline]
    pub fn insert(&mut self, key: u32, store: &mut E::Store) {
        let follows = |last| E::of(key, store).follows(E::of(last, store), store);
        if self.run.back().is_none_or(follows) {
            self.run.push_back(store, key);
        } else if self.heap.has_room() || self.try_grow() {
            self.heap.insert(E::of(key, store), store);
        } else {
            self.tree.insert(key, store);
        }
    }

    /// While the tree has entries, the system is asked again for some of them only.
    fn try_grow(&mut self) -> bool {
        self.tree.len().is_multiple_of(ASKED_AGAIN) && self.heap.try_reserve_one().is_ok()
    }

    /// Removes the object `key`, which must be here.
    #[inline]
    pub fn remove(&mut self, key: u32, store: &mut E::Store) {
        match store.links(key).index() {
            None if self.tree.len() > 0 && self.tree.remove(key, store) => {}
            None => self.run.remove(store, key),
            Some(index) => {
                let removed = self.heap.remove(index, store).key();
                assert_eq!(removed, key, "the heap index of a job belongs to another job");
            }
        }
    }

    /// Removes any entry, and returns its key.
    pub fn pop_any(&mut self, store: &mut E::Store) -> Option<u32> {
        let removed = self.run.pop_front(store).or_else(|| self.heap.pop_last().map(E::key));
        removed.or_else(|| self.tree.pop_first(store))
    }

    /// Returns all keys in arbitrary order.
    pub fn keys(&self, store: &E::Store) -> impl Iterator<Item = u32> {
        self.run
            .iter(store)
            .chain(self.heap.iter().map(|entry| entry.key()))
            .chain(self.tree.iter(store))
    }

    /// Returns the first key of the run.
    pub fn first_of_run(&self) -> Option<u32> {
        self.run.front()
    }

    pub fn heap(&self) -> &Heap<E> {
        &self.heap
    }

    pub fn tree(&self) -> &Tree<ByRank<E>> {
        &self.tree
    }

    /// Returns the first `count` keys, in order. The cost depends on `count` only.
    pub fn first_keys(&self, count: usize, store: &E::Store) -> impl Iterator<Item = u32> {
        let others = self.run.iter(store).take(count).chain(self.tree.iter(store).take(count));
        let mut first = self.heap.first_entries(count, store);
        first.extend(others.map(|key| E::of(key, store)));
        let order = |a: &E, b: &E| match a.is_before(*b, store) {
            true => Ordering::Less,
            false => Ordering::Greater,
        };
        first.sort_by(order);
        first.into_iter().take(count).map(E::key)
    }

    /// Checks the run, the heap and the tree, and calls `each` with all keys.
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
        self.heap.check(store, what, |entry| store.links(entry.key()).index());
        for &entry in self.heap.iter() {
            let now = E::of(entry.key(), store);
            let is_same = !entry.is_before(now, store) && !now.is_before(entry, store);
            assert!(is_same, "{what}: {entry:?} is in the heap, and the job has {now:?}");
            each(entry.key());
        }
        self.tree.check(store, what, each);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::collections::list::Links;
    use crate::engine::collections::tree::tests::{ByNumber, Store};
    use crate::engine::headroom;
    use std::collections::BTreeSet;

    #[derive(Clone, Copy, Debug)]
    struct Item(u32, u32);

    impl Entry for Item {
        type Store = Store;

        fn is_before(self, other: Item, _: &Store) -> bool {
            (self.0, self.1) < (other.0, other.1)
        }

        fn set_index(self, index: u32, store: &mut Store) {
            *store.links_mut(self.1) = Links::at_index(index);
        }
    }

    impl Ranked for Item {
        fn of(key: u32, store: &Store) -> Item {
            Item(store[key as usize].0, key)
        }

        fn key(self) -> u32 {
            self.1
        }

        fn weight(key: u32, store: &Store) -> u32 {
            ByNumber::weight(key, store)
        }
    }

    #[test]
    fn random_operations_match_a_btree_set() {
        const KEYS: u32 = 300;
        let mut random = fastrand::Rng::with_seed(5);
        let mut store: Store = vec![(0, Links::LOOSE); KEYS as usize];
        let mut ordered = Ordered::<Item>::default();
        let mut model: BTreeSet<(u32, u32)> = BTreeSet::new();
        let mut in_tree = 0;
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
                    headroom::refuse_after(usize::from(random.bool()));
                    ordered.insert(key, &mut store);
                    headroom::refuse_after(usize::MAX);
                    model.insert((rank, key));
                }
            }
            in_tree += ordered.tree.len();
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
        assert!(in_tree > 0, "the heap could always grow");
        while ordered.pop_any(&mut store).is_some() {}
        assert_eq!(ordered.len(), 0);
    }
}
