//! Entries under the keys of a slab that belongs to another module.
//!
//! Two slabs that are filled and emptied together would give out the same keys only as long as
//! neither ever fails for lack of memory. So this one gives out none. Unlike a vector it is never moved,
//! gives memory back by the page, and reports that there is no memory.

use super::slab;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::Key;
use std::collections::TryReserveError;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Entries of type `T` under keys of type `K`, which somebody else gives out.
#[derive(Debug)]
pub struct SecondaryMap<K, T> {
    pages: Vec<Page<T>>,
    len: usize,
    keys: PhantomData<K>,
}

#[derive(Debug)]
struct Page<T> {
    /// Up to the highest that was ever used; room for a whole page, or for nothing.
    slots: Vec<Option<T>>,
    used: usize,
}

impl<K, T> Default for SecondaryMap<K, T> {
    fn default() -> SecondaryMap<K, T> {
        SecondaryMap { pages: Vec::new(), len: 0, keys: PhantomData }
    }
}

impl<K: Key, T> SecondaryMap<K, T> {
    const PAGE_LEN: usize = 1 << slab::page_bits(size_of::<Option<T>>());

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// No key has this number, or a higher one.
    pub fn numbers_end(&self) -> usize {
        self.pages.len() * Self::PAGE_LEN
    }

    /// The entry under `key`, if there is one.
    pub fn get(&self, key: K) -> Option<&T> {
        let (page, slot) = Self::place_of(key);
        self.pages.get(page)?.slots.get(slot)?.as_ref()
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let (page, slot) = Self::place_of(key);
        self.pages.get_mut(page)?.slots.get_mut(slot)?.as_mut()
    }

    /// Adds `entry` under `key`, under which there is none.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_insert(&mut self, key: K, entry: T) -> Result<(), TryReserveError> {
        let (number, slot) = Self::place_of(key);
        if number >= self.pages.len() {
            let missing = number + 1 - self.pages.len();
            headroom::leave(Headroom::Quarter, || self.pages.try_reserve(missing))?;
            self.pages.resize_with(number + 1, || Page { slots: Vec::new(), used: 0 });
        }
        let page = &mut self.pages[number];
        if slot >= page.slots.len() {
            let missing = Self::PAGE_LEN - page.slots.len();
            headroom::leave(Headroom::Quarter, || page.slots.try_reserve_exact(missing))?;
            page.slots.resize_with(slot + 1, || None);
        }
        page.slots[slot] = Some(entry);
        page.used += 1;
        self.len += 1;
        Ok(())
    }

    /// Takes out the entry under `key`, if there is one.
    pub fn remove(&mut self, key: K) -> Option<T> {
        let (number, slot) = Self::place_of(key);
        let page = self.pages.get_mut(number)?;
        let removed = page.slots.get_mut(slot)?.take()?;
        page.used -= 1;
        self.len -= 1;
        // The first page stays, so that one thing that comes and goes allocates nothing.
        if page.used == 0 && number > 0 {
            page.slots = Vec::new();
        }
        Some(removed)
    }

    /// All entries, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        let pages = (0..).step_by(Self::PAGE_LEN).zip(&self.pages);
        pages.flat_map(|(first, page)| {
            let entries = (first..).zip(&page.slots);
            entries.filter_map(|(number, it)| Some((K::from_number(number), it.as_ref()?)))
        })
    }

    /// There are as many entries as were counted, and memory only where there are any.
    ///
    /// # Panics
    /// It is not so. `what` says what the entries are.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        for (number, page) in self.pages.iter().enumerate() {
            let used = page.slots.iter().flatten().count();
            assert_eq!(page.used, used, "{what}: entries of page {number}, noted and counted");
            let is_kept = used > 0 || number == 0 || page.slots.capacity() == 0;
            assert!(is_kept, "{what}: page {number} has memory for nothing");
        }
        let len = self.pages.iter().map(|page| page.used).sum::<usize>();
        assert_eq!(self.len, len, "{what}: entries, as noted and as counted");
    }

    fn place_of(key: K) -> (usize, usize) {
        let number = key.number() as usize;
        (number / Self::PAGE_LEN, number % Self::PAGE_LEN)
    }
}

impl<K: Key, T> Index<K> for SecondaryMap<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        self.get(key).expect(KEY_IS_GOOD)
    }
}

impl<K: Key, T> IndexMut<K> for SecondaryMap<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        self.get_mut(key).expect(KEY_IS_GOOD)
    }
}

const KEY_IS_GOOD: &str = "no entry for this key";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::ConnKey;
    use std::collections::BTreeMap;

    #[test]
    fn behaves_as_a_map_under_random_steps() {
        type Entries = SecondaryMap<ConnKey, [u64; 128]>;
        let mut random = fastrand::Rng::with_seed(12);
        let mut entries = Entries::default();
        let mut model = BTreeMap::new();
        for step in 0..40_000_u64 {
            let filling = (step / 8_000) % 2 == 0;
            let key = ConnKey::from_number(random.u32(..2_000));
            if model.contains_key(&key) != filling {
                if filling {
                    entries.try_insert(key, [step; 128]).expect("the test needs little memory");
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
        assert!(kept <= 1, "{kept} pages are kept");
    }
}
