//! A hash index that is never rebuilt, and a slab with such an index.
//!
//! A `HashMap` doubles its table. Measured with insertions up to ten million entries: the slowest
//! insertion stalls the loop for 331 ms in a `HashMap`, and for less than 1 ms here.
//!
//! This is linear hashing: the number of buckets changes by one at a time. The first insertion
//! makes 1024 buckets. Each later insertion splits at most one bucket, and each removal merges at
//! most two:
//!
//! ```text
//! buckets   0   1   2   3 | 4   5        hash h belongs to bucket h mod 8, or to bucket h mod 4
//!           └───┴── split ─┘   ^          while bucket h mod 8 does not exist
//!                              next split: 2 into 2 and 6
//! ```
//!
//! A bucket is the head of a chain that is linked through the entries. [`LinearHash`] has the heads
//! of the chains, and [`HashSlab`] the entries in a [`PagedSlab`]. A head has the hash of the first entry
//! and a bit that shows whether there is another one. With a million entries, each read of an entry is a
//! cache miss of about 0.2 us; most failed searches and most splits read none.

use super::slab::{PAGE_BYTES, PagedSlab};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{Key, NIL};
use std::collections::TryReserveError;
use std::fmt;

/// An entry of a [`HashSlab`].
pub trait Keyed {
    /// Returns the hash, which must not change.
    fn hash(&self) -> u64;

    /// Returns the link of the chain, which the index has set last.
    fn next_in_bucket(&self) -> u32;

    /// Returns the link of the chain for writing.
    fn next_in_bucket_mut(&mut self) -> &mut u32;
}

/// Entries of type `T` under keys of type `K`, found by hash.
#[derive(Debug)]
pub struct HashSlab<K, T> {
    entries: PagedSlab<K, T>,
    by_hash: LinearHash,
}

impl<K, T> Default for HashSlab<K, T> {
    /// Returns an empty slab. Its keys have numbers below `2^31 - 1`.
    fn default() -> HashSlab<K, T> {
        HashSlab { entries: PagedSlab::with_31_bits(), by_hash: LinearHash::default() }
    }
}

impl<K: Key, T: Keyed> HashSlab<K, T> {
    /// Returns the key of an entry in the bucket of `hash` for which `matches` returns true.
    pub fn find_by(&self, hash: u64, matches: impl Fn(&T) -> bool) -> Option<K> {
        let matches = |pages: &PagedSlab<K, T>, number| matches(&pages[K::from_number(number)]);
        self.by_hash.find(&self.entries, hash, matches).map(K::from_number)
    }

    /// Ensures that the next [`HashSlab::insert`] allocates nothing.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.entries.try_reserve_one()?;
        self.by_hash.try_reserve_one()
    }

    /// Adds `entry` and returns its key.
    ///
    /// # Panics
    /// [`HashSlab::try_reserve_one`] has not succeeded since the last insertion.
    pub fn insert(&mut self, entry: T) -> K {
        let key = self.entries.insert(entry);
        self.by_hash.insert(&mut self.entries, key.number());
        key
    }

    /// Removes and returns the entry under `key`.
    ///
    /// # Panics
    /// There is no such entry.
    pub fn remove(&mut self, key: K) -> T {
        self.by_hash.remove(&mut self.entries, key.number());
        self.entries.remove(key).expect("the index had the key")
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the memory of the entries and of the vacant slots between them, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.entries.taken_bytes()
    }

    /// The bytes by which the index grows for one more entry.
    pub const INDEX_BYTES_PER_ENTRY: u64 = size_of::<Head>() as u64;

    /// Returns the memory of the index of the entries, in bytes.
    pub fn index_bytes(&self) -> u64 {
        (self.by_hash.buckets * size_of::<Head>()) as u64
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn get(&self, key: K) -> Option<&T> {
        self.entries.get(key)
    }

    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        self.entries.get_mut(key)
    }

    /// Returns all entries in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        self.entries.iter()
    }

    /// Checks the entries and the index.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the slab in the message.
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

/// Returns a hash of `number` whose low bits depend on all bits of `number`.
pub fn mix(number: u64) -> u64 {
    let product = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// The number of heads in a page of 128 KiB: see [`PAGE_BYTES`].
const PAGE_LEN: usize = PAGE_BYTES / size_of::<Head>();
/// The least number of buckets after the first insertion. A queue of few jobs splits and merges
/// none.
const MIN_BUCKETS: usize = 1024;

/// A store whose entries carry their hash and the next key of their chain.
trait Chain {
    /// Returns the hash of the entry under `key`, which must not change.
    fn hash(&self, key: u32) -> u64;

    /// Returns the key after `key` in its chain, or [`NIL`].
    fn next(&self, key: u32) -> u32;

    /// Sets the key after `key` in its chain.
    fn set_next(&mut self, key: u32, next: u32);
}

/// An index of the keys of a [`Chain`] store by hash. The keys are below `2^31 - 1`.
#[derive(Debug, Default)]
struct LinearHash {
    /// The heads of the chains. All pages are full, except for the last one with heads.
    pages: Vec<Vec<Head>>,
    buckets: usize,
    len: usize,
}

/// The head of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    /// The first key, with [`HAS_MORE`] if there is another one, or [`NIL`].
    first: u32,
    /// The low 32 bits of the hash of the first key. They suffice, as there are at most `2^32` buckets.
    hash: u32,
}

const HAS_MORE: u32 = 1 << 31;

impl Head {
    const EMPTY: Head = Head { first: NIL, hash: 0 };

    fn new(first: u32, hash: u32, has_more: bool) -> Head {
        let more = if has_more { HAS_MORE } else { 0 };
        Head { first: first | more, hash }
    }

    fn is_empty(self) -> bool {
        self.first == NIL
    }

    /// Returns the first key, or [`NIL`].
    fn key(self) -> u32 {
        if self.is_empty() { NIL } else { self.first & !HAS_MORE }
    }

    /// Returns the second key, or [`NIL`].
    fn second<S: Chain>(self, store: &S) -> u32 {
        if self.has_more() { store.next(self.key()) } else { NIL }
    }

    fn has_more(self) -> bool {
        self.first & HAS_MORE != 0 && !self.is_empty()
    }
}

fn low_bits(hash: u64) -> u32 {
    u32::try_from(hash & u64::from(u32::MAX)).expect("it has 32 bits")
}

impl LinearHash {
    #[cfg(test)]
    fn len(&self) -> usize {
        self.len
    }

    /// Returns a key in the bucket of `hash` for which `matches` returns true.
    fn find<S: Chain>(
        &self,
        store: &S,
        hash: u64,
        matches: impl Fn(&S, u32) -> bool,
    ) -> Option<u32> {
        if self.buckets == 0 {
            return None;
        }
        let head = self.head(self.bucket_of(low_bits(hash)));
        if head.hash == low_bits(hash) && !head.is_empty() && matches(store, head.key()) {
            return Some(head.key());
        }
        let mut key = head.second(store);
        while key != NIL {
            if matches(store, key) {
                return Some(key);
            }
            key = store.next(key);
        }
        None
    }

    /// Ensures that the next [`LinearHash::insert`] allocates nothing.
    fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
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
    /// [`LinearHash::try_reserve_one`] has not succeeded since the last insertion.
    fn insert<S: Chain>(&mut self, store: &mut S, key: u32) {
        self.len += 1;
        while self.buckets < self.len.max(MIN_BUCKETS) {
            self.split(store);
        }
        let hash = store.hash(key);
        self.link(store, key, low_bits(hash));
    }

    /// Removes `key`, whose entry must still be in `store`.
    fn remove<S: Chain>(&mut self, store: &mut S, key: u32) {
        let bucket = self.bucket_of(low_bits(store.hash(key)));
        let next = store.next(key);
        let head = self.head(bucket);
        let first = head.key();
        if first == key {
            *self.head_mut(bucket) = if next == NIL {
                Head::EMPTY
            } else {
                Head::new(next, low_bits(store.hash(next)), store.next(next) != NIL)
            };
        } else {
            let mut current = first;
            while store.next(current) != key {
                current = store.next(current);
            }
            store.set_next(current, next);
            if current == first && next == NIL {
                self.head_mut(bucket).first = first;
            }
        }
        self.len -= 1;
        // Twice, since each removal lowers the maximum number of buckets by two.
        self.shrink(store);
        self.shrink(store);
    }

    /// Checks that the chains have exactly these keys in the buckets of their hashes, and that the
    /// number of buckets fits the number of keys.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the index in the message.
    fn check<S: Chain>(
        &self,
        store: &S,
        keys: impl Iterator<Item = u32>,
        what: fmt::Arguments<'_>,
    ) {
        let most = (2 * self.len).max(MIN_BUCKETS) + 2;
        let is_unused = self.buckets == 0 && self.len == 0;
        assert!(
            is_unused || (self.len.max(MIN_BUCKETS)..=most).contains(&self.buckets),
            "{what}: {} buckets for {} keys",
            self.buckets,
            self.len
        );
        // Each key must be found, and needs one link: from a head or from another key. If there are
        // no more links than keys, the chains have no other keys.
        let mut links = 0;
        let mut buckets_left = self.buckets;
        for page in &self.pages {
            let expected = buckets_left.min(PAGE_LEN);
            assert_eq!(page.len(), expected, "{what}: buckets of a page");
            buckets_left -= expected;
            links += page.iter().filter(|head| !head.is_empty()).count();
            for head in page.iter().filter(|head| !head.is_empty()) {
                let key = head.key();
                let expected = Head::new(key, low_bits(store.hash(key)), store.next(key) != NIL);
                assert_eq!(*head, expected, "{what}: the head of a chain, and its first entry");
            }
        }
        assert_eq!(buckets_left, 0, "{what}: buckets without a page");
        let mut len = 0;
        for key in keys {
            let bucket = self.bucket_of(low_bits(store.hash(key)));
            assert!(
                self.is_in_chain(store, key, bucket),
                "{what}: {key} is not in bucket {bucket}"
            );
            links += usize::from(store.next(key) != NIL);
            len += 1;
        }
        assert_eq!(self.len, len, "{what}: stored and real number of keys");
        assert_eq!(self.len, links, "{what}: keys, and links to keys");
    }

    fn is_in_chain<S: Chain>(&self, store: &S, key: u32, bucket: usize) -> bool {
        let mut current = self.head(bucket).key();
        // The limit ends the search if the chain is a cycle.
        for _ in 0..self.len {
            if current == key || current == NIL {
                break;
            }
            current = store.next(current);
        }
        current == key
    }

    /// Adds one bucket and moves its keys there.
    fn split<S: Chain>(&mut self, store: &mut S) {
        let new = self.buckets;
        self.pages[new / PAGE_LEN].push(Head::EMPTY);
        let split = if new == 0 { 0 } else { new - highest_power(new) };
        let head = std::mem::replace(self.head_mut(split), Head::EMPTY);
        self.buckets += 1;
        self.move_chain(store, head);
    }

    /// Removes the last bucket and moves its keys back, if there are more than [`MIN_BUCKETS`]
    /// buckets and more than two for each key.
    fn shrink<S: Chain>(&mut self, store: &mut S) {
        if self.buckets < (2 * self.len).max(MIN_BUCKETS) + 2 {
            return;
        }
        let last = self.buckets - 1;
        let head = self.head(last);
        self.pages[last / PAGE_LEN].pop();
        self.buckets = last;
        // One empty page stays, so that adding and removing one bucket again and again allocates
        // nothing.
        if self.pages.len() > last / PAGE_LEN + 2 {
            self.pages.pop();
        }
        self.move_chain(store, head);
    }

    /// Moves the keys of a chain that was removed to the buckets of their hashes.
    fn move_chain<S: Chain>(&mut self, store: &mut S, head: Head) {
        if head.is_empty() {
            return;
        }
        let mut next = head.second(store);
        let target = self.bucket_of(head.hash);
        if next == NIL && self.head(target).is_empty() {
            *self.head_mut(target) = head;
            return;
        }
        self.link(store, head.key(), head.hash);
        while next != NIL {
            let key = next;
            next = store.next(key);
            let hash = store.hash(key);
            self.link(store, key, low_bits(hash));
        }
    }

    fn link<S: Chain>(&mut self, store: &mut S, key: u32, hash: u32) {
        let head = self.head_mut(self.bucket_of(hash));
        store.set_next(key, head.key());
        *head = Head::new(key, hash, !head.is_empty());
    }

    fn bucket_of(&self, hash: u32) -> usize {
        let hash = u64::from(hash);
        // Masks instead of remainders: the compiler does not know that the divisors are powers of
        // two.
        let round = highest_power(self.buckets) as u64;
        let wide = hash & (round * 2 - 1);
        let bucket = if wide < self.buckets as u64 { wide } else { hash & (round - 1) };
        usize::try_from(bucket).expect("it is below the number of buckets")
    }

    fn head(&self, bucket: usize) -> Head {
        self.pages[bucket / PAGE_LEN][bucket % PAGE_LEN]
    }

    fn head_mut(&mut self, bucket: usize) -> &mut Head {
        &mut self.pages[bucket / PAGE_LEN][bucket % PAGE_LEN]
    }
}

/// Returns the highest power of two up to `count`, which must not be 0.
fn highest_power(count: usize) -> usize {
    1 << count.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A store in which three keys share each hash, so that chains are long.
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
    fn random_operations_match_a_btree_map() {
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
                index.try_reserve_one().expect("the test has memory");
                index.insert(&mut store, key);
                model.insert(key, ());
            }
            let wanted = random.u32(..KEYS);
            let found = index.find(&store, store.hash(wanted), |_, key| key == wanted);
            assert_eq!(found.is_some(), model.contains_key(&wanted));
            assert_eq!(index.len(), model.len());
            assert!(index.buckets <= (2 * index.len()).max(MIN_BUCKETS) + 2);
            if step % 64 == 0 {
                index.check(&store, model.keys().copied(), format_args!("step {step}"));
            }
        }
    }

    #[test]
    fn removing_all_keys_frees_the_pages() {
        const KEYS: u32 = 200_000;
        let mut store = Store(vec![NIL; KEYS as usize]);
        let mut index = LinearHash::default();
        for key in 0..KEYS {
            index.try_reserve_one().expect("the test has memory");
            index.insert(&mut store, key);
        }
        assert!(index.pages.len() >= 12);
        for key in 0..KEYS {
            index.remove(&mut store, key);
        }
        assert!(index.pages.len() <= 2);
    }
}
