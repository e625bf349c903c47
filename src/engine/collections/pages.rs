//! Entries under small integer keys, in memory that comes and goes by the page.
//!
//! Which slots are taken is kept in `slots.rs`; here is the memory of the entries. This room
//! must not know what they are.

use super::slots::{self, Slots};
use crate::engine::keys::Key;
use std::collections::TryReserveError;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Entries of type `T` under keys of type `K`, which are used again.
#[derive(Debug)]
pub struct Pages<K, T> {
    slots: Slots,
    /// Each has room for a whole page, or for nothing while it is absent.
    pages: Vec<Vec<Option<T>>>,
    /// How many slots have memory that was written to.
    touched: usize,
    keys: PhantomData<K>,
}

impl<K, T> Default for Pages<K, T> {
    fn default() -> Pages<K, T> {
        Pages {
            slots: Slots::new(Self::PAGE_BITS),
            pages: Vec::new(),
            touched: 0,
            keys: PhantomData,
        }
    }
}

impl<K, T> Pages<K, T> {
    const PAGE_BITS: u32 = slots::page_bits(size_of::<Option<T>>());
}

impl<K: Key, T> Pages<K, T> {
    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns how many bytes of memory the entries take, with what stands empty between them.
    pub fn taken_bytes(&self) -> u64 {
        (self.touched * size_of::<Option<T>>()) as u64
    }

    /// The entry under `key`, if there is one.
    pub fn get(&self, key: K) -> Option<&T> {
        let key = key.number();
        self.pages.get(Self::page_of(key))?.get(Self::slot_of(key))?.as_ref()
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let key = key.number();
        self.pages.get_mut(Self::page_of(key))?.get_mut(Self::slot_of(key))?.as_mut()
    }

    /// Makes sure that the next [`Pages::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.slots.try_reserve_one(&mut self.pages, 1 << Self::PAGE_BITS)
    }

    /// Adds `entry` and says under which key.
    ///
    /// # Panics
    /// There was no successful [`Pages::try_reserve_one`] before.
    pub fn insert(&mut self, entry: T) -> K {
        let number = self.slots.take();
        let page = &mut self.pages[Self::page_of(number)];
        match page.get_mut(Self::slot_of(number)) {
            Some(slot) => *slot = Some(entry),
            // A page fills from its start.
            None => {
                page.push(Some(entry));
                self.touched += 1;
            }
        }
        K::from_number(number)
    }

    /// Takes out the entry under `key`, if there is one.
    pub fn remove(&mut self, key: K) -> Option<T> {
        let number = key.number();
        let page = self.pages.get_mut(Self::page_of(number))?;
        let removed = page.get_mut(Self::slot_of(number))?.take()?;
        if let Some(page) = self.slots.leave(number) {
            self.touched -= std::mem::take(&mut self.pages[page]).len();
        }
        Some(removed)
    }

    /// All entries, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        let pages = (0..).zip(&self.pages);
        pages.flat_map(|(page, entries)| {
            let numbers = page << Self::PAGE_BITS..;
            let entries = numbers.zip(entries);
            entries.filter_map(|(number, it)| Some((K::from_number(number), it.as_ref()?)))
        })
    }

    /// There is an entry in each slot that is taken and in no other, and memory for each page that
    /// is not absent.
    ///
    /// # Panics
    /// It is not so. `what` says what the entries are.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        self.slots.check(what);
        assert_eq!(self.pages.len(), self.slots.page_count(), "{what}: pages, and pages of slots");
        let touched = self.pages.iter().map(Vec::len).sum::<usize>();
        assert_eq!(self.touched, touched, "{what}: slots that were touched, noted and counted");
        for (page, entries) in self.pages.iter().enumerate() {
            let mut count = 0;
            for (word, some) in entries.chunks(u64::BITS as usize).enumerate() {
                let is_there =
                    |bits, (bit, it): (usize, &Option<T>)| bits | u64::from(it.is_some()) << bit;
                let there = some.iter().enumerate().fold(0, is_there);
                let wrong = there ^ self.slots.taken_bits(page, word);
                assert!(
                    wrong == 0,
                    "{what}: slot {} of page {page} is taken without an entry, or the reverse",
                    word * u64::BITS as usize + wrong.trailing_zeros() as usize
                );
                count += there.count_ones() as usize;
            }
            let taken = self.slots.taken_in(page);
            assert_eq!(taken.unwrap_or(0), count, "{what}: taken slots and entries of page {page}");
            let has_memory = entries.capacity() >= 1 << Self::PAGE_BITS;
            assert!(
                has_memory == taken.is_some() && (has_memory || entries.capacity() == 0),
                "{what}: page {page} has memory for {} entries, {taken:?} slots are taken",
                entries.capacity()
            );
        }
    }

    // As in `slots.rs`, with a number of bits that the compiler knows.
    fn page_of(number: u32) -> usize {
        (number >> Self::PAGE_BITS) as usize
    }

    fn slot_of(number: u32) -> usize {
        number as usize & ((1 << Self::PAGE_BITS) - 1)
    }
}

impl<K: Key, T> Index<K> for Pages<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        self.get(key).expect(KEY_IS_GOOD)
    }
}

impl<K: Key, T> IndexMut<K> for Pages<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        self.get_mut(key).expect(KEY_IS_GOOD)
    }
}

const KEY_IS_GOOD: &str = "who removes an entry sees to it that nobody keeps its key";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::JobKey;
    use std::collections::BTreeMap;

    type TestPages = Pages<JobKey, [u64; 256]>;

    fn insert(pages: &mut TestPages, entry: u64) -> JobKey {
        pages.try_reserve_one().expect("the test needs little memory");
        pages.insert([entry; 256])
    }

    #[test]
    fn behaves_as_a_map_under_random_steps() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut pages = TestPages::default();
        let mut model = BTreeMap::new();
        for step in 0..100_000_u64 {
            let filling = (step / 10_000) % 2 == 0;
            if random.u8(..10) < if filling { 8 } else { 2 } {
                let key = insert(&mut pages, step);
                assert_eq!(model.insert(key, step), None);
            } else {
                let key = JobKey::from_number(random.u32(..6_000));
                assert_eq!(pages.remove(key).map(|entry| entry[0]), model.remove(&key));
            }
            let key = JobKey::from_number(random.u32(..6_000));
            assert_eq!(pages.get(key).map(|entry| entry[9]), model.get(&key).copied());
            assert_eq!(pages.get_mut(key).map(|entry| entry[9]), model.get(&key).copied());
            assert_eq!(pages.len(), model.len());
            if step % 64 == 0 {
                pages.check(format_args!("step {step}"));
                assert!(pages.iter().map(|(key, entry)| (key, entry[9])).eq(model.clone()));
            }
        }
    }

    #[test]
    fn empty_pages_are_freed_and_used_again() {
        const PAGE_LEN: u64 = 1 << TestPages::PAGE_BITS;
        let mut pages = TestPages::default();
        let keys: Vec<JobKey> = (0..PAGE_LEN * 4).map(|entry| insert(&mut pages, entry)).collect();
        for &key in &keys {
            pages.remove(key);
        }
        assert!(pages.is_empty());
        let allocated =
            |pages: &TestPages| pages.pages.iter().filter(|page| page.capacity() > 0).count();
        assert_eq!(allocated(&pages), 1);
        let again: Vec<JobKey> = keys.iter().map(|_| insert(&mut pages, 0)).collect();
        assert_eq!(allocated(&pages), 4);
        assert!(again.iter().all(|&key| u64::from(key.number()) < PAGE_LEN * 4));
    }
}
