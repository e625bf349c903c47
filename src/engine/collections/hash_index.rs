//! A hash index that is never rebuilt, and a slab with such an index.
//!
//! A `HashMap` doubles its table. Measured with insertions up to ten million entries: the slowest
//! insertion stalls the loop for 331 ms in a `HashMap`, and for less than 4 ms here.
//!
//! This is linear hashing: the number of chains changes by one at a time. The first insertion makes 64
//! chains. Each later insertion splits at most one, and each removal merges at most one into another:
//!
//! ```text
//! chains    0   1   2   3 | 4   5        hash h belongs to chain h mod 8, or to chain h mod 4
//!           └───┴── split ─┘   ^          while chain h mod 8 does not exist
//!                              next split: 2 into 2 and 6
//! ```
//!
//! A bucket has up to 15 numbers with their hashes, in two cache lines. A chain is a bucket and, if that
//! is full, overflow buckets. Only the first bucket of a chain can have vacant slots, and it is empty only
//! if the chain is. With a million numbers, the first read of a bucket or an entry is a cache miss of about
//! 0.2 us. Splits and failed searches read no entries, and on average at most one of seven chains has an
//! overflow bucket.
//!
//! A number takes 14 to 15 bytes while the index grows, and about twice as much after removals.

use super::slab::{PAGE_BYTES, PagedSlab};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{BucketKey, Key};
use std::collections::TryReserveError;
use std::fmt;
use std::num::NonZero;

/// An entry of a [`HashSlab`].
pub trait Hashed {
    /// Returns the hash, which must not change.
    fn hash(&self) -> u32;
}

/// Entries of type `T` under keys of type `K`, found by hash.
#[derive(Debug)]
pub struct HashSlab<K, T> {
    entries: PagedSlab<K, T>,
    index: HashIndex,
}

impl<K, T> Default for HashSlab<K, T> {
    fn default() -> HashSlab<K, T> {
        HashSlab { entries: PagedSlab::default(), index: HashIndex::default() }
    }
}

impl<K: Key, T: Hashed> HashSlab<K, T> {
    /// Returns the key of an entry with this hash for which `matches` returns true.
    pub fn find_by(&self, hash: u32, matches: impl Fn(&T) -> bool) -> Option<K> {
        let matches = |number| matches(&self.entries[K::from_number(number)]);
        self.index.find(hash, matches).map(K::from_number)
    }

    /// Ensures that the next [`HashSlab::insert`] allocates nothing, if nothing is removed before it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.entries.try_reserve_one()?;
        self.index.try_reserve_one()
    }

    /// Adds `entry` and returns its key.
    ///
    /// # Panics
    /// [`HashSlab::try_reserve_one`] has not succeeded since the last insertion or removal.
    pub fn insert(&mut self, entry: T) -> K {
        let hash = entry.hash();
        let key = self.entries.insert(entry);
        self.index.insert(hash, key.number());
        key
    }

    /// Removes and returns the entry under `key`.
    ///
    /// # Panics
    /// There is no such entry.
    pub fn remove(&mut self, key: K) -> T {
        let removed = self.entries.remove(key).expect("no entry for this key");
        self.index.remove(removed.hash(), key.number());
        removed
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the memory of the entries and of the vacant slots between them, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.entries.taken_bytes()
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
        let numbers = self.entries.iter().map(|(key, entry)| (entry.hash(), key.number()));
        self.index.check(numbers, what);
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

/// Returns a hash of `number`. Its bit i depends on bits 0 to i + 32 of `number`, so numbers should differ
/// in their low bits.
pub fn mix(number: u64) -> u64 {
    let product = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// Returns the low 32 bits of a hash.
#[expect(clippy::cast_possible_truncation, reason = "an index has fewer than 2^32 numbers")]
pub fn low_half(hash: u64) -> u32 {
    hash as u32
}

/// An index of numbers by hash. Several numbers may have the same hash.
#[derive(Debug, Default)]
pub struct HashIndex {
    /// The first buckets of all chains. All pages are full, except for the last one with buckets.
    pages: Vec<Vec<Bucket>>,
    /// The number of chains.
    chains: usize,
    /// The further buckets of chains.
    overflow: PagedSlab<BucketKey, Bucket>,
    /// How many numbers there are.
    len: usize,
}

/// Numbers with their hashes. A search reads the second cache line only if a hash matches.
#[derive(Debug)]
#[repr(C, align(128))]
struct Bucket {
    hashes: [u32; BUCKET_LEN],
    link: Link,
    numbers: [u32; BUCKET_LEN],
}

/// The number of used slots of a bucket in the low [`LEN_BITS`] bits, and above them the key of the next
/// bucket of the chain, or [`NO_NEXT`]. All bits are inverted: the result is not zero, so that an
/// `Option<Bucket>` takes no more memory than a bucket.
#[derive(Clone, Copy, Debug)]
struct Link(NonZero<u32>);

/// A bucket of a chain.
#[derive(Clone, Copy, Debug)]
enum Place {
    First(usize),
    Overflow(BucketKey),
}

const BUCKET_LEN: usize = 15;
const LEN_BITS: u32 = 4;
/// Not all ones: inverted, these and 15 used slots would be zero.
const NO_NEXT: u32 = (1 << (u32::BITS - LEN_BITS)) - 2;

/// The most numbers for each chain, on average.
const MAX_LOAD: usize = 10;
/// The fewest numbers for each chain, on average, before chains are merged.
const MIN_LOAD: usize = 5;
/// The least number of chains after the first insertion. A queue of few jobs splits and merges none.
const MIN_CHAINS: usize = 64;
/// The number of buckets in a page of 128 KiB: see [`PAGE_BYTES`].
const PAGE_LEN: usize = PAGE_BYTES / size_of::<Bucket>();

const _: () = assert!(size_of::<Option<Bucket>>() == 128, "a bucket has two cache lines");

impl HashIndex {
    /// The most by which an insertion grows the index, in bytes: one bucket for a new chain, one for the new
    /// number, and two for slots that a split uses in other pages than it frees. Longer chains are left
    /// out, and the first insertion.
    pub const MOST_GROWTH: u64 = 4 * size_of::<Bucket>() as u64;

    /// Returns the memory of the index, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        (self.chains * size_of::<Bucket>()) as u64 + self.overflow.taken_bytes()
    }

    /// Returns a number with this hash for which `matches` returns true.
    pub fn find(&self, hash: u32, matches: impl FnMut(u32) -> bool) -> Option<u32> {
        let (place, slot) = self.position(hash, matches)?;
        Some(self.bucket(place).numbers[slot])
    }

    /// Ensures that the next [`HashIndex::insert`] allocates nothing, if nothing is removed before it: a
    /// removal may use what was reserved.
    #[inline]
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.overflow.try_reserve_one()?;
        let has_room = self.chains < self.pages.len() * PAGE_LEN;
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

    /// Adds a number, which must be new among those with this hash.
    ///
    /// # Panics
    /// [`HashIndex::try_reserve_one`] has not succeeded since the last insertion or removal.
    pub fn insert(&mut self, hash: u32, number: u32) {
        self.len += 1;
        while self.chains < self.len.div_ceil(MAX_LOAD).max(MIN_CHAINS) {
            self.split();
        }
        self.push(self.chain_of(hash), (hash, number));
        self.overflow.unmap_surplus();
    }

    /// Replaces a number by another one with the same hash.
    ///
    /// # Panics
    /// The index does not have the first one.
    pub fn replace(&mut self, hash: u32, number: u32, by: u32) {
        let (place, slot) = self.position(hash, |other| other == number).expect(NO_NUMBER);
        self.bucket_mut(place).numbers[slot] = by;
    }

    /// Removes a number.
    ///
    /// # Panics
    /// The index does not have it.
    pub fn remove(&mut self, hash: u32, number: u32) {
        let (place, slot) = self.position(hash, |other| other == number).expect(NO_NUMBER);
        let chain = self.chain_of(hash);
        let last = self.bucket(Place::First(chain)).last().expect("the chain has a number");
        self.bucket_mut(place).set(slot, last);
        self.pop(chain);
        self.len -= 1;
        let most = (self.len / MIN_LOAD + 1).max(MIN_CHAINS);
        // Without memory for a chain that becomes longer, chains stay as they are.
        if self.chains > most && self.overflow.try_reserve_one().is_ok() {
            self.merge();
        }
        self.overflow.unmap_surplus();
    }

    /// Checks that the chains have exactly these hashes with numbers.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the index in the message.
    pub fn check(&self, numbers: impl Iterator<Item = (u32, u32)>, what: fmt::Arguments<'_>) {
        let least = self.len.div_ceil(MAX_LOAD).max(if self.chains == 0 { 0 } else { MIN_CHAINS });
        assert!(self.chains >= least, "{what}: {} chains for {} numbers", self.chains, self.len);
        let mut left = self.chains;
        for page in &self.pages {
            assert_eq!(page.len(), left.min(PAGE_LEN), "{what}: buckets of a page");
            left -= page.len();
        }
        assert_eq!(left, 0, "{what}: chains without a page");
        let (mut len, mut overflow) = (0, 0);
        for chain in 0..self.chains {
            let mut link = self.bucket(Place::First(chain)).link;
            len += link.len();
            let is_empty = link.len() == 0 && link.next().is_some();
            assert!(!is_empty, "{what}: chain {chain} begins with an empty bucket");
            while let Some(next) = link.next() {
                overflow += 1;
                assert!(overflow <= self.overflow.len(), "{what}: chain {chain} is a cycle");
                link = self.overflow[next].link;
                assert_eq!(link.len(), BUCKET_LEN, "{what}: numbers in an overflow bucket");
                len += BUCKET_LEN;
            }
        }
        assert_eq!(overflow, self.overflow.len(), "{what}: overflow buckets of chains, and all");
        assert_eq!(len, self.len, "{what}: numbers in chains, and their noted number");
        for (hash, number) in numbers {
            let found = self.find(hash, |other| other == number);
            assert!(found.is_some(), "{what}: {number} is not found");
            len -= 1;
        }
        assert_eq!(len, 0, "{what}: numbers in chains without an entry");
    }

    /// Returns where a number with this hash is for which `matches` returns true: its bucket and slot.
    fn position(&self, hash: u32, mut matches: impl FnMut(u32) -> bool) -> Option<(Place, usize)> {
        if self.chains == 0 {
            return None;
        }
        let mut place = Place::First(self.chain_of(hash));
        loop {
            let bucket = self.bucket(place);
            if bucket.has(hash) {
                // From the last slot, because the newest number of a hash is usually wanted. This is for
                // speed only: removals, splits and merges change the order.
                for slot in (0..bucket.link.len()).rev() {
                    if bucket.hashes[slot] == hash && matches(bucket.numbers[slot]) {
                        return Some((place, slot));
                    }
                }
            }
            place = Place::Overflow(bucket.link.next()?);
        }
    }

    /// Adds a chain and moves the numbers that belong there.
    fn split(&mut self) {
        let new = self.chains;
        self.chains += 1;
        if new == 0 {
            return self.pages[0].push(Bucket::empty());
        }
        let from = self.bucket_mut(Place::First(split_from(new)));
        // An index instead of a branch, which would be mispredicted every other time.
        let mut parts = [Bucket::empty(), Bucket::empty()];
        for (hash, number) in from.pairs() {
            let moves = hash as usize & highest_power(new) != 0;
            parts[usize::from(moves)].push((hash, number));
        }
        let mut next = from.link.next();
        let [stays, moves] = parts;
        *from = stays;
        self.pages[new / PAGE_LEN].push(moves);
        // Each overflow bucket is free before its numbers are moved, so they need no other memory.
        while let Some(key) = next {
            let bucket = self.overflow.remove_keeping_page(key).expect(BROKEN_CHAIN);
            for (hash, number) in bucket.pairs() {
                self.push(self.chain_of(hash), (hash, number));
            }
            next = bucket.link.next();
        }
    }

    /// Removes the last chain and moves its numbers back. There must be memory for one overflow bucket.
    fn merge(&mut self) {
        let last = self.chains - 1;
        let to = split_from(last);
        // One by one, so that one overflow bucket more than now suffices.
        while let Some(pair) = self.pop(last) {
            self.push(to, pair);
        }
        self.pages[last / PAGE_LEN].pop();
        self.chains = last;
        // One empty page stays, so that adding and removing one chain again and again allocates
        // nothing.
        if self.pages.len() > last / PAGE_LEN + 2 {
            self.pages.pop();
        }
    }

    /// Adds a hash with its number to a chain.
    fn push(&mut self, chain: usize, pair: (u32, u32)) {
        let first = self.bucket_mut(Place::First(chain));
        if first.push(pair) {
            return;
        }
        let mut new = Bucket::empty();
        new.push(pair);
        let full = std::mem::replace(first, new);
        let next = self.overflow.insert(full);
        let first = self.bucket_mut(Place::First(chain));
        first.link = Link::new(first.link.len(), Some(next));
    }

    /// Removes and returns the last hash with its number of the first bucket of a chain.
    fn pop(&mut self, chain: usize) -> Option<(u32, u32)> {
        let first = self.bucket_mut(Place::First(chain));
        let last = first.last()?;
        let (len, next) = (first.link.len() - 1, first.link.next());
        first.link = Link::new(len, next);
        if len == 0
            && let Some(next) = next
        {
            let full = self.overflow.remove_keeping_page(next).expect(BROKEN_CHAIN);
            *self.bucket_mut(Place::First(chain)) = full;
        }
        Some(last)
    }

    fn chain_of(&self, hash: u32) -> usize {
        let hash = hash as usize;
        // Masks instead of remainders: the compiler does not know that the divisors are powers of
        // two.
        let round = highest_power(self.chains);
        let wide = hash & (round * 2 - 1);
        if wide < self.chains { wide } else { hash & (round - 1) }
    }

    fn bucket(&self, place: Place) -> &Bucket {
        match place {
            Place::First(chain) => &self.pages[chain / PAGE_LEN][chain % PAGE_LEN],
            Place::Overflow(key) => &self.overflow[key],
        }
    }

    fn bucket_mut(&mut self, place: Place) -> &mut Bucket {
        match place {
            Place::First(chain) => &mut self.pages[chain / PAGE_LEN][chain % PAGE_LEN],
            Place::Overflow(key) => &mut self.overflow[key],
        }
    }
}

const NO_NUMBER: &str = "no such number with this hash";
const BROKEN_CHAIN: &str = "a bucket refers to one that is gone";

impl Bucket {
    fn empty() -> Bucket {
        Bucket { hashes: [0; BUCKET_LEN], link: Link::new(0, None), numbers: [0; BUCKET_LEN] }
    }

    /// Returns whether a slot has this hash. A slot that is not used any more may have it, too.
    fn has(&self, hash: u32) -> bool {
        // Without an end at the first such slot, so that the compiler compares several at once.
        self.hashes.iter().fold(false, |has, of| has | (*of == hash))
    }

    /// Adds a hash with its number. Returns `false` if there is no free slot.
    fn push(&mut self, pair: (u32, u32)) -> bool {
        let len = self.link.len();
        let has_room = len < BUCKET_LEN;
        if has_room {
            self.set(len, pair);
            self.link = Link::new(len + 1, self.link.next());
        }
        has_room
    }

    /// Returns the hashes with their numbers.
    fn pairs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let numbers = self.numbers.iter().copied();
        self.hashes.iter().copied().zip(numbers).take(self.link.len())
    }

    /// Returns the hash with its number in the last used slot.
    fn last(&self) -> Option<(u32, u32)> {
        let last = self.link.len().checked_sub(1)?;
        Some((self.hashes[last], self.numbers[last]))
    }

    fn set(&mut self, slot: usize, (hash, number): (u32, u32)) {
        self.hashes[slot] = hash;
        self.numbers[slot] = number;
    }
}

impl Link {
    fn new(len: usize, next: Option<BucketKey>) -> Link {
        let len = u32::try_from(len).expect("a bucket has at most 15 numbers");
        let next = next.map_or(NO_NEXT, |key| {
            // All of them are full, and there are at most 2^32 numbers.
            assert!(key.number() < NO_NEXT, "an overflow bucket with a key above 28 bits");
            key.number()
        });
        Link(NonZero::new(!(next << LEN_BITS | len)).expect("NO_NEXT has a zero"))
    }

    /// Returns the number of used slots.
    fn len(self) -> usize {
        (!self.0.get() & ((1 << LEN_BITS) - 1)) as usize
    }

    /// Returns the next bucket of the chain.
    fn next(self) -> Option<BucketKey> {
        let next = !self.0.get() >> LEN_BITS;
        (next != NO_NEXT).then(|| BucketKey::from_number(next))
    }
}

/// Returns the highest power of two up to `count`, which must not be 0.
fn highest_power(count: usize) -> usize {
    1 << count.ilog2()
}

/// Returns the chain from which a chain is split.
fn split_from(chain: usize) -> usize {
    chain - highest_power(chain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Returns the hash of a number. Twenty numbers share each hash, so that there are overflow buckets.
    fn hash(number: u32) -> u32 {
        low_half(mix(u64::from(number / 20)))
    }

    fn insert(index: &mut HashIndex, number: u32) {
        index.try_reserve_one().expect("the test has memory");
        index.insert(hash(number), number);
    }

    fn check(index: &HashIndex, model: &BTreeSet<u32>) {
        index.check(model.iter().map(|&number| (hash(number), number)), format_args!("the index"));
    }

    #[test]
    fn random_operations_match_a_btree_set() {
        const NUMBERS: u32 = 20_000;
        let mut random = fastrand::Rng::with_seed(9);
        let mut index = HashIndex::default();
        let mut model = BTreeSet::new();
        let mut most_overflow = 0;
        for step in 0..200_000 {
            let filling = (step / 40_000) % 2 == 0;
            let number = random.u32(..NUMBERS);
            let is_there = model.contains(&number);
            if is_there && (!filling || random.u8(..8) == 0) {
                index.remove(hash(number), number);
                model.remove(&number);
            } else if !is_there && (filling || random.u8(..8) == 0) {
                insert(&mut index, number);
                model.insert(number);
            }
            let wanted = random.u32(..NUMBERS);
            let found = index.find(hash(wanted), |number| number == wanted);
            assert_eq!(found, model.get(&wanted).copied());
            assert!(index.chains <= (index.len / MIN_LOAD + 1).max(MIN_CHAINS));
            most_overflow = most_overflow.max(index.overflow.len());
            if step % 256 == 0 {
                check(&index, &model);
            }
        }
        assert!(most_overflow > 500, "{most_overflow} overflow buckets");
        while let Some(number) = model.pop_first() {
            index.remove(hash(number), number);
        }
        check(&index, &model);
    }

    #[test]
    fn after_an_insertion_the_new_number_is_found_first() {
        let mut index = HashIndex::default();
        for number in 0..1_000 {
            index.try_reserve_one().expect("the test has memory");
            index.insert(7, number);
            assert_eq!(index.find(7, |_| true), Some(number));
        }
    }

    #[test]
    fn a_number_is_replaced() {
        let mut index = HashIndex::default();
        let mut model: BTreeSet<u32> = (0..100).collect();
        model.iter().for_each(|&number| insert(&mut index, number));
        index.replace(hash(47), 47, 47 + 1_000_000);
        assert_eq!(index.find(hash(47), |number| number == 47), None);
        assert_eq!(index.find(hash(47), |number| number > 1_000), Some(47 + 1_000_000));
        index.replace(hash(47), 47 + 1_000_000, 47);
        check(&index, &model);
        index.remove(hash(47), 47);
        model.remove(&47);
        check(&index, &model);
    }

    /// Returns an index and its numbers. The second page of overflow buckets has one bucket, and the
    /// first one has one vacant slot. 16 numbers have the hash `long`, and 15 the hash `full`.
    fn with_two_overflow_pages(long: u32, full: u32) -> (HashIndex, Vec<(u32, u32)>) {
        let mut index = HashIndex::default();
        let mut entries: Vec<(u32, u32)> = Vec::new();
        let others = PAGE_LEN * BUCKET_LEN + BUCKET_LEN;
        for (hash, count) in [(0, others), (long, BUCKET_LEN + 1), (full, BUCKET_LEN)] {
            for _ in 0..count {
                entries.push((hash, u32::try_from(entries.len()).unwrap()));
                index.try_reserve_one().expect("the test has memory");
                index.insert(hash, entries.last().unwrap().1);
            }
        }
        for (hash, number) in entries.drain(..BUCKET_LEN) {
            index.remove(hash, number);
        }
        assert_eq!((index.overflow.len(), index.overflow.page_count()), (PAGE_LEN, 2));
        (index, entries)
    }

    /// The number of chains of this index.
    const CHAINS: usize = (PAGE_LEN * BUCKET_LEN + 3 * BUCKET_LEN + 1).div_ceil(MAX_LOAD);

    fn to_hash(chain: usize) -> u32 {
        u32::try_from(chain).unwrap()
    }

    #[test]
    fn a_split_uses_the_overflow_buckets_that_it_frees() {
        let long = to_hash(split_from(CHAINS));
        let full = long + 1;
        let (mut index, mut entries) = with_two_overflow_pages(long, full);
        assert_eq!(index.chains, CHAINS);
        // Others, up to the number with which the chain is split.
        while index.chains == CHAINS {
            let is_last = index.len == CHAINS * MAX_LOAD;
            let number = 1_000_000 + u32::try_from(index.len).unwrap();
            let hash = if is_last { full } else { full + 1 + number % 100 };
            index.try_reserve_one().expect("the test has memory");
            index.insert(hash, number);
            entries.push((hash, number));
        }
        assert_eq!(index.overflow.len(), PAGE_LEN + 1);
        index.check(entries.into_iter(), format_args!("the index"));
    }

    #[test]
    fn a_merge_uses_the_overflow_buckets_that_it_frees() {
        let last = CHAINS - 1;
        let (mut index, entries) =
            with_two_overflow_pages(to_hash(last), to_hash(split_from(last)));
        index.overflow.try_reserve_one().expect("the test has memory");
        index.merge();
        assert_eq!(index.overflow.len(), PAGE_LEN + 1);
        for (hash, number) in entries {
            assert_eq!(index.find(hash, |other| other == number), Some(number));
        }
    }

    #[test]
    fn removing_all_numbers_frees_the_pages() {
        const NUMBERS: u32 = 200_000;
        let hash = |number| low_half(mix(u64::from(number)));
        let mut index = HashIndex::default();
        for number in 0..NUMBERS {
            index.try_reserve_one().expect("the test has memory");
            index.insert(hash(number), number);
            assert!(index.taken_bytes() <= 16 * u64::from(number) + 9_000);
        }
        assert!(index.pages.len() >= 19);
        for number in 0..NUMBERS {
            index.remove(hash(number), number);
        }
        assert!(index.pages.len() <= 2);
        assert!(index.overflow.is_empty());
    }
}
