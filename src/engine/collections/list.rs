//! A doubly linked FIFO list whose links are inside the entries of a slab.
//!
//! A `VecDeque` cannot remove from the middle without moving entries. Measured with 100,000
//! entries, such a removal costs 2,800 ns in a `VecDeque` and 3 ns here. A `LinkedList` of `std`
//! removes only at its ends, and allocates for each entry.
//!
//! The list owns its two ends and its length, 12 bytes. A store that implements [`Linked`] has the
//! links of each key, so linking allocates nothing and cannot fail.

use crate::engine::keys::NIL;
use std::fmt;

/// The keys of the two neighbours of an entry in a list, or of its two children in a tree; [`NIL`] stands for
/// none. Packed, so that an enum with links takes 9 bytes and not 12.
#[derive(Clone, Copy, Debug)]
#[repr(Rust, packed)]
pub struct Links {
    pub(super) previous: u32,
    pub(super) next: u32,
}

impl Links {
    /// The links of an entry that is in no list.
    pub const LOOSE: Links = Links { previous: NIL, next: NIL };

    /// Returns the index of an entry of a heap, in the form of links.
    pub fn at_index(index: u32) -> Links {
        Links { previous: index, next: IN_HEAP }
    }

    /// Returns the index if these are no links: [`Links::at_index`].
    pub fn index(self) -> Option<u32> {
        (self.next == IN_HEAP).then_some(self.previous)
    }
}

/// Next to [`NIL`], so that no key is as high.
const IN_HEAP: u32 = NIL - 1;

impl Default for Links {
    fn default() -> Links {
        Links::LOOSE
    }
}

/// A store whose entries have the links of a list. An entry that can be in several lists at once
/// has one pair of links for each number `LIST`.
pub trait Linked<const LIST: usize = 0> {
    /// Returns the links of the entry under `key`, which is in a list.
    fn links(&self, key: u32) -> Links;

    fn links_mut(&mut self, key: u32) -> &mut Links;
}

/// The ends of a list whose links are in a [`Linked`] store.
#[derive(Clone, Copy, Debug)]
pub struct List<const LIST: usize = 0> {
    head: u32,
    tail: u32,
    len: u32,
}

impl<const LIST: usize> Default for List<LIST> {
    fn default() -> List<LIST> {
        List { head: NIL, tail: NIL, len: 0 }
    }
}

impl<const LIST: usize> List<LIST> {
    pub fn len(&self) -> u32 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the key that was added first.
    pub fn front(&self) -> Option<u32> {
        some(self.head)
    }

    /// Returns the key that was added last.
    pub fn back(&self) -> Option<u32> {
        some(self.tail)
    }

    /// Appends `key`, which must be in no list with these links.
    #[inline(always)]
    pub fn push_back<S: Linked<LIST>>(&mut self, store: &mut S, key: u32) {
        let previous = std::mem::replace(&mut self.tail, key);
        *store.links_mut(key) = Links { previous, next: NIL };
        match previous {
            NIL => self.head = key,
            previous => store.links_mut(previous).next = key,
        }
        self.len += 1;
    }

    /// Removes `key`, which must be in this list.
    #[inline(always)]
    pub fn remove<S: Linked<LIST>>(&mut self, store: &mut S, key: u32) {
        let Links { previous, next } = store.links(key);
        match previous {
            NIL => self.head = next,
            previous => store.links_mut(previous).next = next,
        }
        match next {
            NIL => self.tail = previous,
            next => store.links_mut(next).previous = previous,
        }
        self.len -= 1;
    }

    /// Removes `key`, which must be in this list, and moves the last entry to its position.
    pub fn swap_remove<S: Linked<LIST>>(&mut self, store: &mut S, key: u32) {
        let last = self.tail;
        self.remove(store, last);
        if last == key {
            return;
        }
        let Links { previous, next } = store.links(key);
        *store.links_mut(last) = Links { previous, next };
        match previous {
            NIL => self.head = last,
            previous => store.links_mut(previous).next = last,
        }
        match next {
            NIL => self.tail = last,
            next => store.links_mut(next).previous = last,
        }
    }

    /// Removes and returns the key that was added first.
    pub fn pop_front<S: Linked<LIST>>(&mut self, store: &mut S) -> Option<u32> {
        let key = self.front()?;
        self.remove(store, key);
        Some(key)
    }

    /// Returns the key after `key`, which must be in this list.
    pub fn after<S: Linked<LIST>>(&self, store: &S, key: u32) -> Option<u32> {
        some(store.links(key).next)
    }

    /// Returns the keys from front to back.
    pub fn iter<'a, S: Linked<LIST>>(
        &self,
        store: &'a S,
    ) -> impl Iterator<Item = u32> + Clone + 'a {
        std::iter::successors(some(self.head), move |&key| some(store.links(key).next))
    }

    /// Checks the links and the length, and calls `each` with the keys from front to back.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the list in the message.
    pub fn check<S: Linked<LIST>>(
        &self,
        store: &S,
        what: fmt::Arguments<'_>,
        mut each: impl FnMut(u32),
    ) {
        let (mut last, mut key, mut count) = (NIL, self.head, 0);
        while key != NIL {
            assert!(count < self.len, "{what}: {key} follows all {count} entries");
            each(key);
            let Links { previous, next } = store.links(key);
            assert_eq!(previous, last, "{what}: stored and real predecessor of {key}");
            (last, key) = (key, next);
            count += 1;
        }
        assert_eq!(self.len, count, "{what}: stored length, and entries");
        assert_eq!(self.tail, last, "{what}: stored tail, and last entry");
    }
}

pub(super) fn some(key: u32) -> Option<u32> {
    (key != NIL).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    impl Linked for Vec<Links> {
        fn links(&self, key: u32) -> Links {
            self[key as usize]
        }
        fn links_mut(&mut self, key: u32) -> &mut Links {
            &mut self[key as usize]
        }
    }

    #[test]
    fn random_operations_match_a_deque() {
        const KEYS: u32 = 40;
        let mut random = fastrand::Rng::with_seed(7);
        let mut store = vec![Links::LOOSE; KEYS as usize];
        let mut list = List::default();
        let mut model: VecDeque<u32> = VecDeque::new();
        for _ in 0..20_000 {
            let key = random.u32(..KEYS);
            match (random.u8(..4), model.iter().position(|&k| k == key)) {
                (0, _) => assert_eq!(list.pop_front(&mut store), model.pop_front()),
                (1, Some(index)) => {
                    list.swap_remove(&mut store, key);
                    model.swap_remove_back(index);
                }
                (_, Some(index)) => {
                    list.remove(&mut store, key);
                    model.remove(index);
                }
                (_, None) => {
                    list.push_back(&mut store, key);
                    model.push_back(key);
                }
            }
            assert_eq!(list.front(), model.front().copied());
            assert_eq!(list.len() as usize, model.len());
            assert!(list.iter(&store).eq(model.iter().copied()));
            let mut seen = VecDeque::new();
            list.check(&store, format_args!("the list"), |key| seen.push_back(key));
            assert_eq!(seen, model);
        }
    }
}
