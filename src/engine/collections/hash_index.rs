//! A hash index that never rebuilds, and a slab whose entries it finds.
//!
//! This is linear hashing: it grows and shrinks by one bucket at a time. A table that doubles, as
//! that of `std`, stalls the loop for 0.3 s when ten million entries are moved. Here the first
//! insertion makes a few buckets, each later one splits at most one and each removal merges at most
//! two:
//!
//! ```text
//! buckets   0   1   2   3 | 4   5        a hash h belongs to  h mod 8  if that bucket
//!           └───┴── split ─┘   ^          exists already, and to  h mod 4  if not
//!                              next split: 2 into 2 and 6
//! ```
//!
//! A bucket is the head of a chain through the entries themselves. [`LinearHash`] knows the entries
//! only as a [`Chain`] store of hashes and next keys; [`HashSlab`] keeps them in a [`PagedSlab`].

use super::slab::{PAGE_BYTES, PagedSlab};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{Key, NIL};
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
    entries: PagedSlab<K, T>,
    by_hash: LinearHash,
}

impl<K, T> Default for HashSlab<K, T> {
    fn default() -> HashSlab<K, T> {
        HashSlab { entries: PagedSlab::default(), by_hash: LinearHash::default() }
    }
}

impl<K: Key, T: Keyed> HashSlab<K, T> {
    /// The key of the entry with this hash for which `is_it` holds.
    pub fn find_by(&self, hash: u64, is_it: impl Fn(&T) -> bool) -> Option<K> {
        let is_it = |pages: &PagedSlab<K, T>, number| is_it(&pages[K::from_number(number)]);
        self.by_hash.find(&self.entries, hash, is_it).map(K::from_number)
    }

    /// Makes sure that the next [`HashSlab::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.entries.try_reserve_one()?;
        self.by_hash.try_reserve_one()
    }

    /// Adds `entry`, which must not be there already, and says under which key.
    ///
    /// # Panics
    /// There was no successful [`HashSlab::try_reserve_one`] before.
    pub fn insert(&mut self, entry: T) -> K {
        let key = self.entries.insert(entry);
        self.by_hash.insert(&mut self.entries, key.number());
        key
    }

    /// Takes out an entry to which nothing refers any more.
    ///
    /// # Panics
    /// There is none under this key.
    pub fn remove(&mut self, key: K) -> T {
        self.by_hash.remove(&mut self.entries, key.number());
        self.entries.remove(key).expect("it was just taken out of the index")
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns how many bytes of memory the entries take, with what stands empty between them.
    pub fn taken_bytes(&self) -> u64 {
        self.entries.taken_bytes()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The entry under `key`, if there is one.
    pub fn get(&self, key: K) -> Option<&T> {
        self.entries.get(key)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        self.entries.get_mut(key)
    }

    /// All entries, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        self.entries.iter()
    }

    /// Every entry is found by its hash, and nothing else is found.
    ///
    /// # Panics
    /// It is not so. `what` says what the entries are.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        self.entries.check(what);
        let keys = self.entries.iter().map(|(key, _)| key.number());
        self.by_hash.check(&self.entries, keys, what);
    }
}

impl<K: Key, T> std::ops::Index<K> for HashSlab<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        &self.entries[key]
    }
}

impl<K: Key, T> std::ops::IndexMut<K> for HashSlab<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        &mut self.entries[key]
    }
}

impl<K: Key, T: Keyed> Chain for PagedSlab<K, T> {
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

/// 128 KiB of heads: see [`PAGE_BYTES`].
const PAGE_LEN: usize = PAGE_BYTES / size_of::<u32>();
/// There are at least so many buckets once there is a key, so that a queue that hovers around
/// empty splits and merges none.
const LEAST: usize = 1024;

/// A store whose entries carry their hash and the next key of their chain.
pub trait Chain {
    /// The hash of the entry under `key`; always the same.
    fn hash(&self, key: u32) -> u64;

    /// The key after `key` in its chain.
    fn next(&self, key: u32) -> u32;

    /// Sets it.
    fn set_next(&mut self, key: u32, next: u32);
}

/// Keys of entries in a [`Chain`] store, found by hash.
#[derive(Debug, Default)]
pub struct LinearHash {
    /// The heads of the chains, in pages that are all full but the last.
    pages: Vec<Vec<u32>>,
    buckets: usize,
    len: usize,
}

impl LinearHash {
    /// How many keys there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The key whose entry has `hash` and for which `is_it` holds.
    pub fn find<S: Chain>(
        &self,
        store: &S,
        hash: u64,
        is_it: impl Fn(&S, u32) -> bool,
    ) -> Option<u32> {
        if self.buckets == 0 {
            return None;
        }
        let mut key = self.head(self.bucket_of(hash));
        while key != NIL {
            if is_it(store, key) {
                return Some(key);
            }
            key = store.next(key);
        }
        None
    }

    /// Makes sure that the next [`LinearHash::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        let has_room = self.buckets < self.pages.len() * PAGE_LEN;
        if has_room {
            return Ok(());
        }
        let mut page = Vec::new();
        headroom::leave(Headroom::Quarter, || {
            self.pages.try_reserve(1)?;
            page.try_reserve_exact(PAGE_LEN)
        })?;
        self.pages.push(page);
        Ok(())
    }

    /// Adds `key`, whose entry is in `store`.
    ///
    /// # Panics
    /// There was no successful [`LinearHash::try_reserve_one`] before.
    pub fn insert<S: Chain>(&mut self, store: &mut S, key: u32) {
        self.len += 1;
        while self.buckets < self.len.max(LEAST) {
            self.split(store);
        }
        self.link(store, key);
    }

    /// Takes out `key`, whose entry is still in `store`.
    pub fn remove<S: Chain>(&mut self, store: &mut S, key: u32) {
        let bucket = self.bucket_of(store.hash(key));
        let next = store.next(key);
        let mut at = self.head(bucket);
        if at == key {
            *self.head_mut(bucket) = next;
        } else {
            while store.next(at) != key {
                at = store.next(at);
            }
            store.set_next(at, next);
        }
        self.len -= 1;
        // Two, since each removal makes the allowed number of buckets two smaller.
        self.shrink(store);
        self.shrink(store);
    }

    /// Each of these keys, and no other, is in the chain of its bucket, once; and there are neither
    /// more buckets nor fewer than their number allows.
    ///
    /// # Panics
    /// It is not so. `what` says of which index.
    pub fn check<S: Chain>(
        &self,
        store: &S,
        keys: impl Iterator<Item = u32>,
        what: fmt::Arguments<'_>,
    ) {
        let most = (2 * self.len).max(LEAST) + 2;
        let is_unused = self.buckets == 0 && self.len == 0;
        assert!(
            is_unused || (self.len.max(LEAST)..=most).contains(&self.buckets),
            "{what}: {} buckets for {} keys",
            self.buckets,
            self.len
        );
        // A key in a chain is one to which a head or another key leads. Since each one is found,
        // and nothing leads to any a second time, nothing else is in the chains.
        let mut leads = 0;
        let mut buckets_left = self.buckets;
        for page in &self.pages {
            let expected = buckets_left.min(PAGE_LEN);
            assert_eq!(
                page.len(),
                expected,
                "{what}: the buckets in a page, and how many are left"
            );
            buckets_left -= expected;
            // In numbers as wide as the heads this takes a third of the time.
            leads += page.iter().map(|&head| u32::from(head != NIL)).sum::<u32>() as usize;
        }
        assert_eq!(buckets_left, 0, "{what}: buckets without a page");
        let mut len = 0;
        for key in keys {
            let bucket = self.bucket_of(store.hash(key));
            assert!(
                self.is_in_chain(store, key, bucket),
                "{what}: {key} is not in bucket {bucket}"
            );
            leads += usize::from(store.next(key) != NIL);
            len += 1;
        }
        assert_eq!(self.len, len, "{what}: keys, as noted and as counted");
        assert_eq!(self.len, leads, "{what}: keys, and heads and keys that lead to one");
    }

    fn is_in_chain<S: Chain>(&self, store: &S, key: u32, bucket: usize) -> bool {
        let mut at = self.head(bucket);
        // If the chain is a circle, there is an end to it all the same.
        for _ in 0..self.len {
            if at == key || at == NIL {
                break;
            }
            at = store.next(at);
        }
        at == key
    }

    /// Adds one bucket and moves there what belongs there.
    fn split<S: Chain>(&mut self, store: &mut S) {
        let new = self.buckets;
        self.pages[new / PAGE_LEN].push(NIL);
        let split = if new == 0 { 0 } else { new - highest_power(new) };
        let mut key = std::mem::replace(self.head_mut(split), NIL);
        self.buckets += 1;
        while key != NIL {
            let next = store.next(key);
            self.link(store, key);
            key = next;
        }
    }

    /// Removes the last bucket once there are twice as many as keys and more than [`LEAST`], and
    /// moves what it has back to where it came from.
    fn shrink<S: Chain>(&mut self, store: &mut S) {
        if self.buckets < (2 * self.len).max(LEAST) + 2 {
            return;
        }
        let last = self.buckets - 1;
        let mut key = self.head(last);
        self.pages[last / PAGE_LEN].pop();
        self.buckets = last;
        // One empty page stays, so that hovering around a page's end allocates nothing.
        if self.pages.len() > last / PAGE_LEN + 2 {
            self.pages.pop();
        }
        while key != NIL {
            let next = store.next(key);
            self.link(store, key);
            key = next;
        }
    }

    fn link<S: Chain>(&mut self, store: &mut S, key: u32) {
        let bucket = self.bucket_of(store.hash(key));
        store.set_next(key, self.head(bucket));
        *self.head_mut(bucket) = key;
    }

    fn bucket_of(&self, hash: u64) -> usize {
        // Masks, since the compiler does not know that these are powers of two, and divides.
        let round = highest_power(self.buckets) as u64;
        let wide = hash & (round * 2 - 1);
        let bucket = if wide < self.buckets as u64 { wide } else { hash & (round - 1) };
        usize::try_from(bucket).expect("it is less than the count of buckets")
    }

    fn head(&self, bucket: usize) -> u32 {
        self.pages[bucket / PAGE_LEN][bucket % PAGE_LEN]
    }

    fn head_mut(&mut self, bucket: usize) -> &mut u32 {
        &mut self.pages[bucket / PAGE_LEN][bucket % PAGE_LEN]
    }
}

/// The highest power of two that is not above `count`, which is not 0.
fn highest_power(count: usize) -> usize {
    1 << count.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// Entries under their own number; the hash keeps few bits, so that chains are long.
    #[derive(Default)]
    struct Store(Vec<u32>);

    impl Chain for Store {
        fn hash(&self, key: u32) -> u64 {
            u64::from(key) / 3
        }
        fn next(&self, key: u32) -> u32 {
            self.0[key as usize]
        }
        fn set_next(&mut self, key: u32, next: u32) {
            self.0[key as usize] = next;
        }
    }

    #[test]
    fn finds_what_a_map_finds_under_random_steps() {
        const KEYS: u32 = 5_000;
        let mut random = fastrand::Rng::with_seed(9);
        let mut store = Store(vec![NIL; KEYS as usize]);
        let mut index = LinearHash::default();
        let mut model: BTreeMap<u32, ()> = BTreeMap::new();
        for step in 0..100_000 {
            let filling = (step / 20_000) % 2 == 0;
            let key = random.u32(..KEYS);
            let present = model.contains_key(&key);
            if present && (!filling || random.u8(..8) == 0) {
                index.remove(&mut store, key);
                model.remove(&key);
            } else if !present && (filling || random.u8(..8) == 0) {
                index.try_reserve_one().expect("the test needs little memory");
                index.insert(&mut store, key);
                model.insert(key, ());
            }
            let wanted = random.u32(..KEYS);
            let found = index.find(&store, store.hash(wanted), |_, key| key == wanted);
            assert_eq!(found.is_some(), model.contains_key(&wanted));
            assert_eq!(index.len(), model.len());
            assert!(index.buckets <= (2 * index.len()).max(LEAST) + 2);
            if step % 64 == 0 {
                index.check(&store, model.keys().copied(), format_args!("step {step}"));
            }
        }
    }

    #[test]
    fn gives_its_pages_back() {
        const KEYS: u32 = 200_000;
        let mut store = Store(vec![NIL; KEYS as usize]);
        let mut index = LinearHash::default();
        for key in 0..KEYS {
            index.try_reserve_one().expect("the test needs little memory");
            index.insert(&mut store, key);
        }
        assert!(index.pages.len() >= 6);
        for key in 0..KEYS {
            index.remove(&mut store, key);
        }
        assert!(index.pages.len() <= 2);
    }
}
