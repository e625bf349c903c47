//! A sorted tree whose links are inside the entries of a slab.
//!
//! Adding an entry allocates nothing and cannot fail, and each entry can be removed. A heap has memory of its own
//! for each entry, and a `BTreeSet` nodes: both can be refused when a job comes back.
//!
//! This is a treap ("Randomized search trees" by C. R. Aragon and R. G. Seidel): an entry comes after all to
//! its left and before all to its right, and none has a greater weight than its parent. The weights are hashes,
//! so the depth is O(log n) whatever the order in which entries come:
//!
//! ```text
//!              7 (weight 90)
//!             /             \
//!     3 (weight 60)    12 (weight 85)
//!             \         /
//!           5 (20)   9 (40)
//! ```
//!
//! The tree owns its root and its length, 8 bytes.

use super::list::{Linked, Links, some};
use crate::engine::keys::NIL;
use std::fmt;
use std::marker::PhantomData;

/// The order of entries. Ranks of entries in a tree do not change, and no two are equal.
pub trait Order<const LIST: usize = 0> {
    /// The entries.
    type Store: Linked<LIST>;

    /// Returns whether the entry `key` comes before `other`.
    fn precedes(key: u32, other: u32, store: &Self::Store) -> bool;

    /// Returns a hash that clients cannot choose.
    fn weight(key: u32, store: &Self::Store) -> u32;
}

/// Entries of a store in the order `O`. Their links are left and right children.
#[derive(Debug)]
pub struct Tree<O, const LIST: usize = 0> {
    root: u32,
    len: u32,
    order: PhantomData<O>,
}

/// A link of the tree.
#[derive(Clone, Copy, Debug)]
enum Place {
    Root,
    LeftOf(u32),
    RightOf(u32),
}

impl<O, const LIST: usize> Default for Tree<O, LIST> {
    fn default() -> Tree<O, LIST> {
        Tree { root: NIL, len: 0, order: PhantomData }
    }
}

impl<O: Order<LIST>, const LIST: usize> Tree<O, LIST> {
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns the key of the entry that comes before all others.
    #[inline]
    pub fn first(&self, store: &O::Store) -> Option<u32> {
        self.first_from(store, |_| false)
    }

    /// Adds the entry `key`, which must be in no list and no tree with these links.
    pub fn insert(&mut self, key: u32, store: &mut O::Store) {
        let weight = O::weight(key, store);
        let (mut place, mut node) = (Place::Root, self.root);
        while node != NIL && O::weight(node, store) >= weight {
            (place, node) = Self::descend(key, node, store);
        }
        self.set(place, key, store);
        // The entries below are divided: those before the new one go to its left.
        let (mut before, mut after) = (Place::LeftOf(key), Place::RightOf(key));
        while node != NIL {
            let Links { previous: left, next: right } = store.links(node);
            if O::precedes(node, key, store) {
                self.set(before, node, store);
                (before, node) = (Place::RightOf(node), right);
            } else {
                self.set(after, node, store);
                (after, node) = (Place::LeftOf(node), left);
            }
        }
        self.set(before, NIL, store);
        self.set(after, NIL, store);
        self.len += 1;
    }

    /// Removes the entry `key`. Returns `false` if it is not here.
    pub fn remove(&mut self, key: u32, store: &mut O::Store) -> bool {
        let (mut place, mut node) = (Place::Root, self.root);
        while node != key {
            if node == NIL {
                return false;
            }
            (place, node) = Self::descend(key, node, store);
        }
        let Links { previous: mut left, next: mut right } = store.links(key);
        while left != NIL && right != NIL {
            if O::weight(left, store) >= O::weight(right, store) {
                self.set(place, left, store);
                (place, left) = (Place::RightOf(left), store.links(left).next);
            } else {
                self.set(place, right, store);
                (place, right) = (Place::LeftOf(right), store.links(right).previous);
            }
        }
        self.set(place, if left == NIL { right } else { left }, store);
        self.len -= 1;
        true
    }

    /// Removes and returns the first key.
    pub fn pop_first(&mut self, store: &mut O::Store) -> Option<u32> {
        let first = self.first(store)?;
        self.remove(first, store);
        Some(first)
    }

    /// Returns the first key for which `is_before`, true for the first ones, returns false.
    pub fn first_from(&self, store: &O::Store, is_before: impl Fn(u32) -> bool) -> Option<u32> {
        let (mut first, mut node) = (NIL, self.root);
        while node != NIL {
            let Links { previous: left, next: right } = store.links(node);
            (first, node) = if is_before(node) { (first, right) } else { (node, left) };
        }
        some(first)
    }

    /// Returns the keys in order, without the first ones for which `is_before` returns true.
    pub fn iter_from(
        &self,
        store: &O::Store,
        is_before: impl Fn(u32) -> bool,
    ) -> impl Iterator<Item = u32> {
        // The next key and those above it that follow.
        let (mut path, mut node) = (Vec::new(), self.root);
        while node != NIL {
            let Links { previous: left, next: right } = store.links(node);
            node = if is_before(node) {
                right
            } else {
                path.push(node);
                left
            };
        }
        std::iter::from_fn(move || {
            let key = path.pop()?;
            let mut node = store.links(key).next;
            while node != NIL {
                path.push(node);
                node = store.links(node).previous;
            }
            Some(key)
        })
    }

    /// Returns all keys in order.
    pub fn iter(&self, store: &O::Store) -> impl Iterator<Item = u32> {
        self.iter_from(store, |_| false)
    }

    /// Returns the link below `node` that leads to the entry `key`, and what is there.
    #[inline]
    fn descend(key: u32, node: u32, store: &O::Store) -> (Place, u32) {
        let Links { previous: left, next: right } = store.links(node);
        if O::precedes(key, node, store) {
            (Place::LeftOf(node), left)
        } else {
            (Place::RightOf(node), right)
        }
    }

    fn set(&mut self, place: Place, key: u32, store: &mut O::Store) {
        match place {
            Place::Root => self.root = key,
            Place::LeftOf(parent) => store.links_mut(parent).previous = key,
            Place::RightOf(parent) => store.links_mut(parent).next = key,
        }
    }

    /// Checks the order, the weights and the length, and calls `each` with all keys in order.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the tree in the message.
    pub fn check(&self, store: &O::Store, what: fmt::Arguments<'_>, mut each: impl FnMut(u32)) {
        let (mut last, mut count) = (NIL, 0);
        for key in self.iter(store) {
            assert!(count < self.len, "{what}: {key} follows all {count} entries");
            let is_in_order = last == NIL || O::precedes(last, key, store);
            assert!(is_in_order, "{what}: {key} is after {last}");
            let Links { previous, next } = store.links(key);
            for child in [previous, next].into_iter().filter(|&child| child != NIL) {
                let weights = [child, key].map(|it| O::weight(it, store));
                assert!(weights.is_sorted(), "{what}: {child}, below {key}, is heavier");
            }
            each(key);
            (last, count) = (key, count + 1);
        }
        assert_eq!(self.len, count, "{what}: stored length, and entries");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::collections::chains::{low_half, mix};
    use std::collections::BTreeSet;

    /// The rank and the links of each number.
    type Store = Vec<(u32, Links)>;

    struct ByNumber;

    impl Linked for Store {
        fn links(&self, key: u32) -> Links {
            self[key as usize].1
        }

        fn links_mut(&mut self, key: u32) -> &mut Links {
            &mut self[key as usize].1
        }
    }

    impl Order for ByNumber {
        type Store = Store;

        fn precedes(key: u32, other: u32, store: &Store) -> bool {
            (store[key as usize].0, key) < (store[other as usize].0, other)
        }

        fn weight(key: u32, _: &Store) -> u32 {
            low_half(mix(key.into()))
        }
    }

    #[test]
    fn random_operations_match_a_btree_set() {
        const KEYS: u32 = 300;
        let mut random = fastrand::Rng::with_seed(5);
        let mut store: Store = vec![(0, Links::LOOSE); KEYS as usize];
        let mut tree = Tree::<ByNumber>::default();
        let mut model: BTreeSet<(u32, u32)> = BTreeSet::new();
        for step in 0..40_000 {
            let key = random.u32(..KEYS);
            let present = model.iter().find(|(_, it)| *it == key).copied();
            assert_eq!(tree.remove(key, &mut store), present.is_some());
            match present {
                Some(entry) => _ = model.remove(&entry),
                None => {
                    store[key as usize].0 = random.u32(..100);
                    tree.insert(key, &mut store);
                    model.insert((store[key as usize].0, key));
                }
            }
            if random.u8(..200) == 0 {
                assert_eq!(tree.pop_first(&mut store), model.pop_first().map(|(_, key)| key));
            }
            assert_eq!(tree.len(), model.len());
            assert_eq!(tree.first(&store), model.first().map(|&(_, key)| key));
            let mut seen = BTreeSet::new();
            tree.check(&store, format_args!("step {step}"), |key| {
                seen.insert((store[key as usize].0, key));
            });
            assert_eq!(seen, model);
            let from = random.u32(..100);
            let is_before = |key| store[key as usize].0 < from;
            let first = tree.first_from(&store, is_before);
            let rest: Vec<u32> = tree.iter_from(&store, is_before).collect();
            assert_eq!(rest.first(), first.as_ref());
            assert!(
                rest.into_iter().eq(model.range((from, 0)..).map(|&(_, key)| key)),
                "step {step}"
            );
        }
        while tree.pop_first(&mut store).is_some() {}
        assert_eq!(tree.len(), 0);
    }

    #[test]
    fn the_depth_is_small_in_whatever_order_entries_come() {
        const KEYS: u32 = 100_000;
        let mut random = fastrand::Rng::with_seed(6);
        let orders: [&mut dyn FnMut(u32) -> u32; 3] =
            [&mut |key| key, &mut |key| KEYS - key, &mut |_| random.u32(..)];
        for rank in orders {
            let mut store: Store = (0..KEYS).map(|key| (rank(key), Links::LOOSE)).collect();
            let mut tree = Tree::<ByNumber>::default();
            (0..KEYS).for_each(|key| tree.insert(key, &mut store));
            let (mut level, mut depth) = (vec![tree.root], 0);
            while !level.is_empty() {
                let children = level.iter().flat_map(|&key| {
                    let Links { previous, next } = store.links(key);
                    [previous, next]
                });
                level = children.filter(|&child| child != NIL).collect();
                depth += 1;
            }
            assert!(depth < 60, "{depth} levels of {KEYS} entries");
        }
    }
}
