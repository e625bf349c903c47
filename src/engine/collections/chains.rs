//! A hash index whose links are in the entries, and a slab with such an index.
//!
//! A `HashMap` doubles its table. Measured with insertions up to ten million entries: the slowest
//! insertion stalls the loop for 331 ms in a `HashMap`. Here no table is rebuilt: this is linear hashing.
//! Each insertion splits at most one chain, and each removal merges at most two into others:
//!
//! ```text
//! chains    0   1   2   3 | 4   5        hash h belongs to chain h mod 8, or to chain h mod 4
//!           └───┴── split ─┘   ^          while chain h mod 8 does not exist
//!                              next split: 2 into 2 and 6
//! ```
//!
//! An entry takes 4 bytes for its link, and 4 bytes for the head of a chain while the index grows (up to 8
//! after removals). Nothing but the heads is allocated.

use super::shrink_by_step;
use super::slab::{NO_ENTRY, PAGE_BYTES, PagedSlab};
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{Key, NIL};
use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// An entry of a [`HashSlab`].
pub trait Hashed {
    /// Returns the hash, which must not change.
    fn hash(&self) -> u32;

    /// Returns the field for the number of the next entry of its chain. The slab sets it.
    fn next(&self) -> &Cell<u32>;
}

/// Entries of type `T` under keys of type `K`, found by hash. Several may have the same hash.
pub struct HashSlab<K, T> {
    entries: PagedSlab<K, T>,
    /// The numbers of the first entries of all chains, or [`NIL`]. A large block is moved by remapping its pages.
    heads: Vec<u32>,
    /// The highest power of two up to the number of chains, less one.
    mask: usize,
}

/// The least number of chains, once there are as many. A queue of few jobs splits and merges none.
const MIN_CHAINS: usize = 1024;
/// The number of chains whose memory is allocated and freed at once.
const CHAINS_STEP: usize = PAGE_BYTES / size_of::<u32>();

impl<K, T> Default for HashSlab<K, T> {
    fn default() -> HashSlab<K, T> {
        HashSlab { entries: PagedSlab::default(), heads: Vec::new(), mask: 0 }
    }
}

impl<K: Key, T: Hashed> HashSlab<K, T> {
    /// The most memory that one more entry takes, in bytes.
    pub const MOST_GROWTH: u64 = (size_of::<Option<T>>() + size_of::<u32>()) as u64;

    /// Returns an entry with this hash for which `matches` returns true, and its key.
    #[inline]
    pub fn find_by(&self, hash: u32, matches: impl Fn(&T) -> bool) -> Option<(K, &T)> {
        let mut number = *self.heads.get(self.chain_of(hash))?;
        while number != NIL {
            let key = K::from_number(number);
            let entry = &self.entries[key];
            if matches(entry) {
                return Some((key, entry));
            }
            number = entry.next().get();
        }
        None
    }

    /// Ensures that the next [`HashSlab::insert`] allocates nothing.
    #[inline]
    pub fn try_reserve_one(&mut self) -> Result<(), NoMemory> {
        self.entries.try_reserve_one()?;
        if self.heads.len() < self.heads.capacity() {
            return Ok(());
        }
        headroom::keeping(Headroom::Quarter, || self.heads.try_reserve_exact(CHAINS_STEP))
    }

    /// Adds `entry` and returns its key.
    ///
    /// # Panics
    /// [`HashSlab::try_reserve_one`] has not succeeded since the last insertion.
    #[inline(always)]
    pub fn insert(&mut self, entry: T) -> K {
        let hash = entry.hash();
        let key = self.entries.insert(entry);
        if self.heads.len() < self.entries.len() {
            self.split();
        }
        self.push(self.chain_of(hash), key.number());
        key
    }

    /// Removes and returns the entry under `key`.
    ///
    /// # Panics
    /// There is no such entry.
    #[inline(always)]
    pub fn remove(&mut self, key: K) -> T {
        let removed = self.entries.remove(key).expect(NO_ENTRY);
        let next = removed.next().get();
        let chain = self.chain_of(removed.hash());
        let mut before = std::mem::replace(&mut self.heads[chain], next);
        if before != key.number() {
            self.heads[chain] = before;
            while self.entries[K::from_number(before)].next().get() != key.number() {
                before = self.entries[K::from_number(before)].next().get();
            }
            self.entries[K::from_number(before)].next().set(next);
        }
        for _ in 0..2 {
            if self.heads.len() > MIN_CHAINS && self.entries.len() < self.heads.len() / 2 {
                self.merge();
            }
        }
        removed
    }

    /// Returns the memory of the entries and of the vacant slots between them, in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.entries.taken_bytes()
    }

    /// Returns the memory of the entries, of the vacant slots between them, and of the chains, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.entries.taken_bytes() + size_of_val(&self.heads[..]) as u64
    }

    /// Checks the entries, and that the chains have exactly these.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the slab in the message.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        self.entries.check(what);
        let len = self.entries.len();
        let chains = self.heads.len();
        assert!(chains >= len, "{what}: {chains} chains for {len} entries");
        let mut linked = 0;
        for (chain, &head) in self.heads.iter().enumerate() {
            let mut number = head;
            while number != NIL {
                let entry = &self.entries[K::from_number(number)];
                let own = self.chain_of(entry.hash());
                assert_eq!(own, chain, "{what}: the chain of {number}, and the one that has it");
                linked += 1;
                assert!(linked <= len, "{what}: chain {chain} is a cycle");
                number = entry.next().get();
            }
        }
        assert_eq!(linked, len, "{what}: entries in chains, and entries");
    }

    /// Adds a chain and moves the entries that belong there.
    fn split(&mut self) {
        let from = self.heads.len() & self.mask;
        self.heads.push(NIL);
        if self.heads.len() == (self.mask + 1) * 2 {
            self.mask = self.mask * 2 + 1;
        }
        let first = std::mem::replace(&mut self.heads[from], NIL);
        self.link_all(first);
    }

    /// Removes the last chain and moves its entries back.
    fn merge(&mut self) {
        let Some(first) = self.heads.pop() else { return };
        if self.heads.len() == self.mask {
            self.mask /= 2;
        }
        shrink_by_step(&mut self.heads, CHAINS_STEP);
        self.link_all(first);
    }

    /// Adds an entry, and those that follow it in its old chain, to their chains.
    fn link_all(&mut self, mut number: u32) {
        while number != NIL {
            let entry = &self.entries[K::from_number(number)];
            let (chain, next) = (self.chain_of(entry.hash()), entry.next().get());
            self.push(chain, number);
            number = next;
        }
    }

    fn push(&mut self, chain: usize, number: u32) {
        let before = std::mem::replace(&mut self.heads[chain], number);
        self.entries[K::from_number(number)].next().set(before);
    }

    /// Returns the chain for a hash; 0 if there are no chains.
    fn chain_of(&self, hash: u32) -> usize {
        let wide = hash as usize & (self.mask << 1 | 1);
        if wide < self.heads.len() { wide } else { wide & self.mask }
    }
}

/// An entry under a key needs no index.
impl<K, T> Deref for HashSlab<K, T> {
    type Target = PagedSlab<K, T>;

    fn deref(&self) -> &PagedSlab<K, T> {
        &self.entries
    }
}

impl<K, T> DerefMut for HashSlab<K, T> {
    fn deref_mut(&mut self) -> &mut PagedSlab<K, T> {
        &mut self.entries
    }
}

/// Returns a hash of `number`. Its bit i depends on bits 0 to i + 32 of `number`, so numbers should differ
/// in their low bits.
pub fn mix(number: u64) -> u64 {
    let product = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

/// Returns a hash of a number that is given out in order. Blocks of 4,096 consecutive numbers have
/// consecutive hashes, so splits and merges read adjacent heads and entries.
pub fn mix_blocks(number: u64) -> u32 {
    low_half(number.wrapping_add(mix(number >> 12)))
}

/// Returns the low 32 bits of a hash.
#[expect(clippy::cast_possible_truncation, reason = "an index has fewer than 2^32 chains")]
pub fn low_half(hash: u64) -> u32 {
    hash as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::JobKey;
    use std::collections::BTreeMap;

    struct Item {
        id: u64,
        next: Cell<u32>,
    }

    impl Hashed for Item {
        fn hash(&self) -> u32 {
            hash(self.id)
        }

        fn next(&self) -> &Cell<u32> {
            &self.next
        }
    }

    /// Ids from 2^63 on share a hash in groups of twenty.
    fn hash(id: u64) -> u32 {
        mix_blocks(if id < 1 << 63 { id } else { id / 20 })
    }

    fn insert(slab: &mut HashSlab<JobKey, Item>, id: u64) -> JobKey {
        slab.try_reserve_one().expect("the test has memory");
        slab.insert(Item { id, next: Cell::default() })
    }

    #[test]
    fn random_operations_match_a_btree_map() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut slab = HashSlab::<JobKey, Item>::default();
        let mut model: BTreeMap<u64, JobKey> = BTreeMap::new();
        for step in 0..200_000 {
            let filling = (step / 40_000) % 2 == 0;
            let id = random.u64(..20_000) | u64::from(random.u8(..9) == 0) << 63;
            match model.get(&id) {
                Some(&key) if !filling || random.u8(..8) == 0 => {
                    assert_eq!(slab.remove(key).id, id);
                    model.remove(&id);
                }
                None if filling || random.u8(..8) == 0 => {
                    model.insert(id, insert(&mut slab, id));
                }
                Some(_) | None => {}
            }
            let id = random.u64(..20_000);
            let found = slab.find_by(hash(id), |it| it.id == id);
            assert_eq!(found.map(|(key, _)| key), model.get(&id).copied());
            if step % 1024 == 0 {
                slab.check(format_args!("step {step}"));
            }
        }
    }

    #[test]
    fn removing_all_entries_frees_the_chains() {
        let mut slab = HashSlab::default();
        let keys: Vec<JobKey> = (0..200_000).map(|id| insert(&mut slab, id)).collect();
        assert_eq!(slab.heads.len(), 200_000);
        keys.into_iter().for_each(|key| _ = slab.remove(key));
        assert_eq!(slab.heads.len(), MIN_CHAINS);
        assert!(slab.heads.capacity() <= MIN_CHAINS + 2 * CHAINS_STEP);
        slab.check(format_args!("the empty slab"));
    }
}
