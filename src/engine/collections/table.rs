//! Entries under keys, found by hash too: pages and an index over them.
//!
//! Tubes are found by name, watches by whom they concern and jobs, eight together, by id;
//! what is looked for is up to them.

use super::index::{Chain, LinearHash};
use super::pages::Pages;
use crate::engine::keys::Key;
use std::collections::TryReserveError;
use std::fmt;

/// An entry that can be found by hash.
pub trait Keyed {
    /// The hash; always the same.
    fn hash(&self) -> u64;

    /// The number of the next entry in the same bucket, kept for the table.
    fn next_in_bucket(&self) -> u32;

    /// The same, to be changed.
    fn next_in_bucket_mut(&mut self) -> &mut u32;
}

/// Entries of type `T` under keys of type `K`.
#[derive(Debug)]
pub struct HashSlab<K, T> {
    pages: Pages<K, T>,
    by_hash: LinearHash,
}

impl<K, T> Default for HashSlab<K, T> {
    fn default() -> HashSlab<K, T> {
        HashSlab { pages: Pages::default(), by_hash: LinearHash::default() }
    }
}

impl<K: Key, T: Keyed> HashSlab<K, T> {
    /// The key of the entry with this hash for which `is_it` holds.
    pub fn find_by(&self, hash: u64, is_it: impl Fn(&T) -> bool) -> Option<K> {
        let is_it = |pages: &Pages<K, T>, number| is_it(&pages[K::from_number(number)]);
        self.by_hash.find(&self.pages, hash, is_it).map(K::from_number)
    }

    /// Makes sure that the next [`HashSlab::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.pages.try_reserve_one()?;
        self.by_hash.try_reserve_one()
    }

    /// Adds `entry`, which must not be there already, and says under which key.
    ///
    /// # Panics
    /// There was no successful [`HashSlab::try_reserve_one`] before.
    pub fn insert(&mut self, entry: T) -> K {
        let key = self.pages.insert(entry);
        self.by_hash.insert(&mut self.pages, key.number());
        key
    }

    /// Takes out an entry to which nothing refers any more.
    ///
    /// # Panics
    /// There is none under this key.
    pub fn remove(&mut self, key: K) -> T {
        self.by_hash.remove(&mut self.pages, key.number());
        self.pages.remove(key).expect("it was just taken out of the index")
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Returns how many bytes of memory the entries take, with what stands empty between them.
    pub fn taken_bytes(&self) -> u64 {
        self.pages.taken_bytes()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// The entry under `key`, if there is one.
    pub fn get(&self, key: K) -> Option<&T> {
        self.pages.get(key)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        self.pages.get_mut(key)
    }

    /// All entries, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        self.pages.iter()
    }

    /// Every entry is found by its hash, and nothing else is found.
    ///
    /// # Panics
    /// It is not so. `what` says what the entries are.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        self.pages.check(what);
        let keys = self.pages.iter().map(|(key, _)| key.number());
        self.by_hash.check(&self.pages, keys, what);
    }
}

impl<K: Key, T> std::ops::Index<K> for HashSlab<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        &self.pages[key]
    }
}

impl<K: Key, T> std::ops::IndexMut<K> for HashSlab<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        &mut self.pages[key]
    }
}

impl<K: Key, T: Keyed> Chain for Pages<K, T> {
    fn hash(&self, number: u32) -> u64 {
        self[K::from_number(number)].hash()
    }

    fn next(&self, number: u32) -> u32 {
        self[K::from_number(number)].next_in_bucket()
    }

    fn set_next(&mut self, number: u32, next: u32) {
        *self[K::from_number(number)].next_in_bucket_mut() = next;
    }
}

/// Spreads numbers that lie close together over all hashes.
pub fn mix(number: u64) -> u64 {
    let product = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}
