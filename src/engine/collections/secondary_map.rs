//! A map under the keys of a slab that belongs to another module.
//!
//! Two slabs that are filled and emptied together have the same keys only while no allocation
//! fails. This map therefore takes its keys from the caller.
//!
//! A `Vec<Option<T>>` shrinks only at its end. Measured with a million entries of 80 bytes of which
//! the first ten stay: a vector keeps 84 MB, this map at most two pages of at least 128 KiB. Entries are
//! never moved, and an insertion can fail instead of aborting the process.

use super::slab;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::Key;
use std::collections::TryReserveError;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Entries of type `T` under keys of type `K`, which another slab allocates.
#[derive(Debug)]
pub struct SecondaryMap<K, T> {
    pages: Vec<Page<T>>,
    len: usize,
    /// The sum of the lengths of `slots` of all pages.
    touched: usize,
    /// The number of the page that became empty last. It keeps its memory, so that a single entry that
    /// comes and goes allocates nothing.
    last_emptied: usize,
    keys: PhantomData<K>,
}

#[derive(Debug)]
struct Page<T> {
    /// The slots up to the highest that was ever used. The capacity is that of a whole page, or 0.
    slots: Vec<Option<T>>,
    used: usize,
}

impl<K, T> Default for SecondaryMap<K, T> {
    fn default() -> SecondaryMap<K, T> {
        SecondaryMap { pages: Vec::new(), len: 0, touched: 0, last_emptied: 0, keys: PhantomData }
    }
}

impl<K: Key, T> SecondaryMap<K, T> {
    const PAGE_LEN: usize = 1 << slab::page_bits(size_of::<Option<T>>());

    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the memory of the entries and of the vacant slots between them, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        (self.touched * size_of::<Option<T>>()) as u64
    }

    /// Returns a number that is higher than the number of each key in the map.
    pub fn numbers_end(&self) -> usize {
        self.pages.len() * Self::PAGE_LEN
    }

    pub fn get(&self, key: K) -> Option<&T> {
        let (page, slot) = Self::position(key);
        self.pages.get(page)?.slots.get(slot)?.as_ref()
    }

    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let (page, slot) = Self::position(key);
        self.pages.get_mut(page)?.slots.get_mut(slot)?.as_mut()
    }

    /// Adds `entry` under `key`, which must have no entry.
    pub fn try_insert(&mut self, key: K, entry: T) -> Result<(), TryReserveError> {
        let (number, slot) = Self::position(key);
        if number >= self.pages.len() {
            let missing = number + 1 - self.pages.len();
            headroom::leave(Headroom::Quarter, || self.pages.try_reserve(missing))?;
            self.pages.resize_with(number + 1, || Page { slots: Vec::new(), used: 0 });
        }
        let page = &mut self.pages[number];
        if slot >= page.slots.len() {
            let missing = Self::PAGE_LEN - page.slots.len();
            headroom::leave(Headroom::Quarter, || page.slots.try_reserve_exact(missing))?;
            self.touched += slot + 1 - page.slots.len();
            page.slots.resize_with(slot + 1, || None);
        }
        page.slots[slot] = Some(entry);
        page.used += 1;
        self.len += 1;
        Ok(())
    }

    /// Removes and returns the entry under `key`.
    pub fn remove(&mut self, key: K) -> Option<T> {
        let (number, slot) = Self::position(key);
        let page = self.pages.get_mut(number)?;
        let removed = page.slots.get_mut(slot)?.take()?;
        page.used -= 1;
        self.len -= 1;
        if page.used == 0 {
            let before = std::mem::replace(&mut self.last_emptied, number);
            if before != number && self.pages[before].used == 0 {
                self.touched -= std::mem::take(&mut self.pages[before].slots).len();
            }
        }
        Some(removed)
    }

    /// Returns all entries in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        let pages = (0..).step_by(Self::PAGE_LEN).zip(&self.pages);
        pages.flat_map(|(first, page)| {
            let entries = (first..).zip(&page.slots);
            entries.filter_map(|(number, it)| Some((K::from_number(number), it.as_ref()?)))
        })
    }

    /// Checks the stored counts, and that only used pages and one more have memory.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the map in the message.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        for (number, page) in self.pages.iter().enumerate() {
            let used = page.slots.iter().flatten().count();
            assert_eq!(page.used, used, "{what}: stored count and entries of page {number}");
            let may_have_memory = used > 0 || number == self.last_emptied;
            assert!(
                may_have_memory || page.slots.capacity() == 0,
                "{what}: page {number} has memory, but no entry"
            );
        }
        let len = self.pages.iter().map(|page| page.used).sum::<usize>();
        assert_eq!(self.len, len, "{what}: stored length, and entries");
        let touched = self.pages.iter().map(|page| page.slots.len()).sum::<usize>();
        assert_eq!(self.touched, touched, "{what}: stored and real number of touched slots");
    }

    fn position(key: K) -> (usize, usize) {
        let number = key.number() as usize;
        (number / Self::PAGE_LEN, number % Self::PAGE_LEN)
    }
}

impl<K: Key, T> Index<K> for SecondaryMap<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        self.get(key).expect(NO_ENTRY)
    }
}

impl<K: Key, T> IndexMut<K> for SecondaryMap<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        self.get_mut(key).expect(NO_ENTRY)
    }
}

const NO_ENTRY: &str = "no entry for this key";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::ConnKey;
    use std::collections::BTreeMap;

    #[test]
    fn random_operations_match_a_btree_map() {
        type Entries = SecondaryMap<ConnKey, [u64; 128]>;
        let mut random = fastrand::Rng::with_seed(12);
        let mut entries = Entries::default();
        let mut model = BTreeMap::new();
        for step in 0..40_000_u64 {
            let filling = (step / 8_000) % 2 == 0;
            let key = ConnKey::from_number(random.u32(..2_000));
            if model.contains_key(&key) != filling {
                if filling {
                    entries.try_insert(key, [step; 128]).expect("the test has memory");
                    model.insert(key, step);
                } else {
                    assert_eq!(entries.remove(key).map(|entry| entry[0]), model.remove(&key));
                }
            }
            let key = ConnKey::from_number(random.u32(..2_000));
            assert_eq!(entries.get(key).map(|entry| entry[9]), model.get(&key).copied());
            assert_eq!(entries.get_mut(key).map(|entry| entry[9]), model.get(&key).copied());
            assert_eq!(entries.len(), model.len());
            if step % 64 == 0 {
                entries.check(format_args!("step {step}"));
                assert!(entries.iter().map(|(key, entry)| (key, entry[9])).eq(model.clone()));
            }
        }
        model.keys().for_each(|&key| assert!(entries.remove(key).is_some()));
        let kept = entries.pages.iter().filter(|page| page.slots.capacity() > 0).count();
        assert!(kept <= 1, "{kept} empty pages have memory");
    }
}
