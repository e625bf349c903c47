//! An indexed heap: the least entry at the top, and any entry found by its place.
//!
//! Entries carry their key inline, so that comparing two of them touches no other
//! memory, and tell their owner where they stand whenever they move; that is what makes
//! removing from the middle O(log n). Four children to a node: half the depth of a
//! binary heap, and the four keys lie side by side in memory.
//!
//! ```text
//!            0
//!    1     2     3     4
//!  5..8  9..12 13..16 17..20
//! ```
//!
//! The heap must not know what it orders: jobs, connections or tubes.

use crate::engine::headroom::{self, Headroom};
use std::collections::TryReserveError;
use std::fmt;
use std::ops::Range;

const CHILDREN: usize = 4;

/// What a heap holds: a key to order by, and the name of what it stands for.
pub trait Entry: Copy + fmt::Debug {
    /// Where the places of these entries are written down.
    type Store;

    /// The least comes first; one number, since comparing several takes the longer part of the
    /// time that a heap takes.
    fn rank(self) -> u128;

    /// The entry now stands at `place`.
    fn set_index(self, place: u32, store: &mut Self::Store);

    /// The place that was written down last; none if the entry stands in no heap of its kind.
    fn index(self, store: &Self::Store) -> Option<u32>;
}

/// The rank of what is ordered by one number first and then by another.
pub fn rank(first: impl Into<u64>, then: impl Into<u64>) -> u128 {
    u128::from(first.into()) << u64::BITS | u128::from(then.into())
}

/// A heap of entries, least first.
#[derive(Clone, Debug)]
pub struct Heap<E> {
    entries: Vec<E>,
}

impl<E> Default for Heap<E> {
    fn default() -> Heap<E> {
        Heap { entries: Vec::new() }
    }
}

impl<E: Entry> Heap<E> {
    /// The least entry.
    pub fn first(&self) -> Option<E> {
        self.entries.first().copied()
    }

    /// The entry that stands at `place`.
    ///
    /// # Panics
    /// Nothing stands there: the owner's note of the place is stale.
    pub fn at(&self, place: u32) -> E {
        self.entries[place as usize]
    }

    /// The entry that stands at `place`, if one does.
    pub fn get(&self, place: u32) -> Option<E> {
        self.entries.get(place as usize).copied()
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entries that stand at these places.
    ///
    /// # Panics
    /// There are fewer.
    pub fn between(&self, places: Range<usize>) -> &[E] {
        &self.entries[places]
    }

    /// All entries, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = E> + '_ {
        self.entries.iter().copied()
    }

    /// Makes sure that the next `additional` insertions need no memory.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn try_reserve(&mut self, additional: usize) -> Result<(), TryReserveError> {
        if self.entries.capacity() - self.entries.len() >= additional {
            return Ok(());
        }
        headroom::leave(Headroom::Quarter, || self.entries.try_reserve(additional))
    }

    /// Adds `entry`.
    pub fn insert(&mut self, entry: E, store: &mut E::Store) {
        let hole = self.entries.len();
        self.entries.push(entry);
        self.sift_up(hole, entry, store);
    }

    /// Takes out the entry that stands at `place`.
    ///
    /// # Panics
    /// Nothing stands there: the owner's note of the place is stale.
    pub fn remove(&mut self, place: u32, store: &mut E::Store) -> E {
        let place = place as usize;
        let removed = self.entries[place];
        let last = self.entries.pop().expect("an entry was just read from the heap");
        if place < self.entries.len() {
            self.settle(place, last, store);
        }
        self.give_memory_back();
        removed
    }

    /// Puts `entry` in the stead of the one that stands at `place`.
    ///
    /// # Panics
    /// Nothing stands there: the owner's note of the place is stale.
    pub fn replace(&mut self, place: u32, entry: E, store: &mut E::Store) {
        self.settle(place as usize, entry, store);
    }

    /// Brings `entry` to rest, starting from the hole at `place`.
    fn settle(&mut self, place: usize, entry: E, store: &mut E::Store) {
        let rises = place > 0 && entry.rank() < self.entries[(place - 1) / CHILDREN].rank();
        if rises {
            self.sift_up(place, entry, store);
        } else {
            self.sift_down(place, entry, store);
        }
    }

    fn sift_up(&mut self, mut hole: usize, entry: E, store: &mut E::Store) {
        while hole > 0 {
            let parent = (hole - 1) / CHILDREN;
            if self.entries[parent].rank() <= entry.rank() {
                break;
            }
            self.write(hole, self.entries[parent], store);
            hole = parent;
        }
        self.write(hole, entry, store);
    }

    fn sift_down(&mut self, mut hole: usize, entry: E, store: &mut E::Store) {
        while let Some((place, child)) = self.least_child(hole) {
            if entry.rank() <= child.rank() {
                break;
            }
            self.write(hole, child, store);
            hole = place;
        }
        self.write(hole, entry, store);
    }

    /// The least of the children of an entry, with its place.
    fn least_child(&self, parent: usize) -> Option<(usize, E)> {
        let first = parent * CHILDREN + 1;
        let (&child, others) = self.entries.get(first..)?.split_first()?;
        let (mut place, mut least, mut rank) = (first, child, child.rank());
        for (&other, other_place) in others.iter().zip(first + 1..first + CHILDREN) {
            if other.rank() < rank {
                (place, least, rank) = (other_place, other, other.rank());
            }
        }
        Some((place, least))
    }

    /// No entry comes before its parent, and each has its place written down.
    ///
    /// # Panics
    /// It is not so. `what` says of which heap.
    pub fn check(&self, store: &E::Store, what: fmt::Arguments<'_>) {
        for (place, &entry) in self.entries.iter().enumerate() {
            let noted = entry.index(store);
            assert!(
                noted.is_some_and(|noted| noted as usize == place),
                "{what}: {entry:?} stands at {place}, but is written down at {noted:?}"
            );
            if let Some(before) = place.checked_sub(1) {
                let parent = self.entries[before / CHILDREN];
                assert!(
                    parent.rank() <= entry.rank(),
                    "{what}: {entry:?}, at {place}, comes before its parent {parent:?}"
                );
            }
        }
    }

    fn write(&mut self, place: usize, entry: E, store: &mut E::Store) {
        self.entries[place] = entry;
        let place = u32::try_from(place).expect("a heap holds at most one entry for each u32 key");
        entry.set_index(place, store);
    }

    /// After a backlog has drained its heap must not stay as large as it once was.
    fn give_memory_back(&mut self) {
        const WORTH_KEEPING: usize = 64;
        let capacity = self.entries.capacity();
        if capacity > WORTH_KEEPING && self.entries.len() < capacity / 4 {
            self.entries.shrink_to(capacity / 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    struct Item {
        key: u32,
        name: u32,
    }

    impl Entry for Item {
        type Store = Vec<u32>;

        fn rank(self) -> u128 {
            rank(self.key, self.name)
        }

        fn set_index(self, place: u32, places: &mut Vec<u32>) {
            places[self.name as usize] = place;
        }

        fn index(self, places: &Vec<u32>) -> Option<u32> {
            places.get(self.name as usize).copied()
        }
    }

    #[test]
    fn behaves_as_an_ordered_set_under_random_steps() {
        const NAMES: u32 = 300;
        let mut random = fastrand::Rng::with_seed(11);
        let mut places = vec![0; NAMES as usize];
        let mut keys: Vec<Option<u32>> = vec![None; NAMES as usize];
        let mut heap = Heap::default();
        let mut model = BTreeSet::new();
        for step in 0..60_000 {
            // The set swings between nearly empty and nearly full.
            let filling = (step / 5_000) % 2 == 0;
            let name = if random.u8(..10) == 0 {
                heap.first().map_or(0, |item: Item| item.name)
            } else {
                random.u32(..NAMES)
            };
            let key = random.u32(..50);
            match keys[name as usize] {
                Some(old) if !filling || random.bool() => {
                    let removed = heap.remove(places[name as usize], &mut places);
                    assert_eq!(removed, Item { key: old, name });
                    model.remove(&removed);
                    keys[name as usize] = None;
                }
                Some(old) => {
                    heap.replace(places[name as usize], Item { key, name }, &mut places);
                    model.remove(&Item { key: old, name });
                    model.insert(Item { key, name });
                    keys[name as usize] = Some(key);
                }
                None if filling || random.u8(..4) == 0 => {
                    heap.insert(Item { key, name }, &mut places);
                    model.insert(Item { key, name });
                    keys[name as usize] = Some(key);
                }
                None => {}
            }
            assert_eq!(heap.first(), model.first().copied());
            assert_eq!(heap.len(), model.len());
            heap.check(&places, format_args!("step {step}"));
        }
        assert!(heap.iter().all(|item| model.contains(&item)));
    }

    #[test]
    fn a_drained_heap_gives_its_memory_back() {
        const COUNT: u32 = 10_000;
        let mut places = vec![0; COUNT as usize];
        let mut heap = Heap::default();
        for name in 0..COUNT {
            heap.insert(Item { key: name, name }, &mut places);
        }
        while heap.len() > 10 {
            heap.remove(0, &mut places);
        }
        assert!(heap.entries.capacity() <= 128);
    }
}
