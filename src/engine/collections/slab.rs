//! A slab that returns memory to the system page by page, and whose allocations can fail.
//!
//! The crate `slab` keeps its entries in one vector. That vector moves when it grows, shrinks only
//! at its end, and aborts the process when there is no memory. Measured with ten million entries of
//! 80 bytes of which the last ten stay: the crate keeps 841 MB, also after `shrink_to_fit`, and
//! this slab 3 MB. The price: with a million entries, replacing a random one costs 300 ns instead
//! of 63 ns.
//!
//! A page is mapped when all others are full, and unmapped when its last entry is removed. Entries
//! are never moved. [`SlotAllocator`] records which slots of which pages are used; it has no memory
//! for the entries. [`PagedSlab`] and the bodies of jobs have their pages next to it.
//!
//! ```text
//! number of a slot    | page ............ | slot in its page |
//! ```
//!
//! The lowest vacant slot of a page is allocated first, so a page fills from its start. Numbers
//! have 32 bits; the largest is [`NIL`](crate::engine::keys::NIL). When all pages below it are
//! full, an allocation fails with the same error as without memory.
//!
//! Slabs are for jobs, tubes, watches and bodies. Sockets are in a `slab::Slab` of the event loop.

use super::list::{Linked, Links, List};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::Key;
use std::collections::TryReserveError;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Entries of type `T` under keys of type `K`. The key of a removed entry is reused.
#[derive(Debug)]
pub struct PagedSlab<K, T> {
    slots: SlotAllocator,
    /// The capacity of each is that of a whole page, or 0 while the page is unmapped.
    pages: Vec<Vec<Option<T>>>,
    /// The number of slots of mapped pages up to the highest that was ever used in each.
    touched: usize,
    keys: PhantomData<K>,
}

impl<K, T> Default for PagedSlab<K, T> {
    fn default() -> PagedSlab<K, T> {
        PagedSlab {
            slots: SlotAllocator::new(Self::PAGE_BITS),
            pages: Vec::new(),
            touched: 0,
            keys: PhantomData,
        }
    }
}

impl<K, T> PagedSlab<K, T> {
    const PAGE_BITS: u32 = page_bits(size_of::<Option<T>>());
}

impl<K, T> PagedSlab<K, T> {
    /// Returns a slab whose keys have numbers below `2^31 - 1`.
    pub fn with_31_bits() -> PagedSlab<K, T> {
        let mut slab = PagedSlab::default();
        slab.slots.pages_max /= 2;
        slab
    }
}

impl<K: Key, T> PagedSlab<K, T> {
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Returns the memory of the entries and of the vacant slots between them, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        (self.touched * size_of::<Option<T>>()) as u64
    }

    pub fn get(&self, key: K) -> Option<&T> {
        let key = key.number();
        self.pages.get(Self::page_of(key))?.get(Self::slot_of(key))?.as_ref()
    }

    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let key = key.number();
        self.pages.get_mut(Self::page_of(key))?.get_mut(Self::slot_of(key))?.as_mut()
    }

    /// Ensures that the next [`PagedSlab::insert`] allocates nothing.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.slots.try_reserve_one(&mut self.pages, 1 << Self::PAGE_BITS)
    }

    /// Adds `entry` and returns its key.
    ///
    /// # Panics
    /// [`PagedSlab::try_reserve_one`] has not succeeded since the last insertion.
    pub fn insert(&mut self, entry: T) -> K {
        let number = self.slots.alloc();
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

    /// Removes and returns the entry under `key`. Unmaps its page if that becomes empty and another one has
    /// vacant slots.
    pub fn remove(&mut self, key: K) -> Option<T> {
        let removed = self.take(key)?;
        if let Some(page) = self.slots.free(key.number()) {
            self.free_page(page);
        }
        Some(removed)
    }

    /// As [`PagedSlab::remove`], but unmaps no page: the vacant slot can be used without a reservation
    /// until [`PagedSlab::unmap_surplus`] is called.
    pub fn remove_keeping_page(&mut self, key: K) -> Option<T> {
        let removed = self.take(key)?;
        self.slots.free_keeping_page(key.number());
        Some(removed)
    }

    /// Unmaps pages without entries. One or two of them stay.
    pub fn unmap_surplus(&mut self) {
        while self.slots.empty_count() > 1
            && let Some(page) = self.slots.unmap_empty()
        {
            self.free_page(page);
        }
    }

    /// Empties the slot of `key`, which stays used.
    fn take(&mut self, key: K) -> Option<T> {
        let page = self.pages.get_mut(Self::page_of(key.number()))?;
        page.get_mut(Self::slot_of(key.number()))?.take()
    }

    /// Frees the memory of a page that was unmapped.
    fn free_page(&mut self, page: usize) {
        self.touched -= std::mem::take(&mut self.pages[page]).len();
    }

    /// Returns all entries in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        (0..self.pages.len()).flat_map(|page| self.in_page(page))
    }

    /// Returns the entries of a page in the order of their keys. An entry stays in its page.
    pub fn in_page(&self, page: usize) -> impl Iterator<Item = (K, &T)> + '_ {
        let first = u32::try_from(page << Self::PAGE_BITS).expect("keys are numbers of 32 bits");
        let entries = (first..).zip(&self.pages[page]);
        entries.filter_map(|(number, it)| Some((K::from_number(number), it.as_ref()?)))
    }

    /// Returns the number of pages.
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// Checks that the used slots have entries, and no others, and that mapped pages have memory,
    /// and no others.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the slab in the message.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        self.slots.check(what);
        assert_eq!(
            self.pages.len(),
            self.slots.page_count(),
            "{what}: pages of memory, and pages of slots"
        );
        let touched = self.pages.iter().map(Vec::len).sum::<usize>();
        assert_eq!(self.touched, touched, "{what}: stored and real number of touched slots");
        for (page, entries) in self.pages.iter().enumerate() {
            let mut count = 0;
            for (word, slots) in entries.chunks(u64::BITS as usize).enumerate() {
                let has_entry =
                    |bits, (bit, it): (usize, &Option<T>)| bits | u64::from(it.is_some()) << bit;
                let present = slots.iter().enumerate().fold(0, has_entry);
                let wrong = present ^ self.slots.used_bits(page, word);
                assert!(
                    wrong == 0,
                    "{what}: slot {} of page {page} is used without an entry, or vacant with one",
                    word * u64::BITS as usize + wrong.trailing_zeros() as usize
                );
                count += present.count_ones() as usize;
            }
            let used = self.slots.used_in(page);
            assert_eq!(used.unwrap_or(0), count, "{what}: used slots and entries of page {page}");
            let has_memory = entries.capacity() >= 1 << Self::PAGE_BITS;
            assert!(
                has_memory == used.is_some() && (has_memory || entries.capacity() == 0),
                "{what}: page {page} has memory for {} entries, and {used:?} used slots",
                entries.capacity()
            );
        }
    }

    // As in `SlotAllocator`, with a constant instead of a field: shifts by a constant are faster.
    fn page_of(number: u32) -> usize {
        (number >> Self::PAGE_BITS) as usize
    }

    fn slot_of(number: u32) -> usize {
        number as usize & ((1 << Self::PAGE_BITS) - 1)
    }
}

impl<K: Key, T> Index<K> for PagedSlab<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        self.get(key).expect(NO_ENTRY)
    }
}

impl<K: Key, T> IndexMut<K> for PagedSlab<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        self.get_mut(key).expect(NO_ENTRY)
    }
}

const NO_ENTRY: &str = "no entry for this key";

/// A record of the used slots, in pages of a power of two.
#[derive(Debug)]
pub struct SlotAllocator {
    page_bits: u32,
    /// The number of pages whose slots all have numbers below [`NIL`](crate::engine::keys::NIL).
    pages_max: usize,
    pages: PageTable,
    /// Mapped pages with vacant slots. The front page is filled first.
    partial: List,
    /// The numbers of mapped pages without used slots, except for pages in `partial`.
    empty: Vec<u32>,
    /// The numbers of pages without memory.
    unmapped: Vec<u32>,
    len: usize,
}

#[derive(Debug)]
struct PageTable(Vec<Page>);

#[derive(Debug)]
struct Page {
    /// A bit for each vacant slot. Empty while the page is unmapped.
    vacant: Vec<u64>,
    /// All words of `vacant` before this one are zero.
    first_word: u32,
    used: u32,
    /// The links of `partial`.
    links: Links,
}

/// The least size of a page, in bytes; most pages have less than twice as many. From this size on
/// the allocator maps each block by itself (`os/sys/memory.rs` configures that), so freeing a page
/// returns its memory to the system.
pub const PAGE_BYTES: usize = 128 * 1024;

/// Returns the binary logarithm of the number of slots in a page of entries of `width` bytes.
pub const fn page_bits(width: usize) -> u32 {
    PAGE_BYTES.div_ceil(width).next_power_of_two().ilog2()
}

impl SlotAllocator {
    /// Returns an allocator of pages of `1 << page_bits` slots.
    pub fn new(page_bits: u32) -> SlotAllocator {
        SlotAllocator {
            page_bits,
            // The page with the highest number has the slot `NIL`.
            pages_max: (1 << (u32::BITS - page_bits)) - 1,
            pages: PageTable(Vec::new()),
            partial: List::default(),
            empty: Vec::new(),
            unmapped: Vec::new(),
            len: 0,
        }
    }

    /// Returns the number of used slots.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of slots in a page.
    pub fn page_len(&self) -> usize {
        1 << self.page_bits
    }

    /// Returns the page of a slot.
    pub fn page_of(&self, number: u32) -> usize {
        (number >> self.page_bits) as usize
    }

    /// Returns the index of a slot in its page.
    pub fn slot_of(&self, number: u32) -> usize {
        number as usize & (self.page_len() - 1)
    }

    /// Ensures that the next [`SlotAllocator::alloc`] finds a slot with memory. `memory` has a
    /// vector for each page. If a page is mapped, its vector reserves capacity for `page_len`
    /// elements.
    pub fn try_reserve_one<E>(
        &mut self,
        memory: &mut Vec<Vec<E>>,
        page_len: usize,
    ) -> Result<(), TryReserveError> {
        if !self.partial.is_empty() || !self.empty.is_empty() {
            return Ok(());
        }
        headroom::leave(Headroom::Quarter, || self.map_page(memory, page_len))
    }

    fn map_page<E>(
        &mut self,
        memory: &mut Vec<Vec<E>>,
        page_len: usize,
    ) -> Result<(), TryReserveError> {
        if self.unmapped.is_empty() {
            if self.pages.0.len() == self.pages_max {
                return capacity_overflow();
            }
            self.pages.0.try_reserve(1)?;
            memory.try_reserve(1)?;
            // Freeing a slot and unmapping a page must not allocate, so both lists have capacity
            // for all pages.
            self.empty.try_reserve(self.pages.0.len() + 1)?;
            self.unmapped.try_reserve(self.pages.0.len() + 1)?;
            self.unmapped.push(to_u32(self.pages.0.len()));
            let page = Page { vacant: Vec::new(), first_word: 0, used: 0, links: Links::LOOSE };
            self.pages.0.push(page);
            memory.push(Vec::new());
        }
        let number = *self.unmapped.last().expect("an unmapped page was just pushed");
        let words = self.page_len().div_ceil(u64::BITS as usize);
        let all_vacant = self.all_vacant();
        let page = &mut self.pages.0[number as usize];
        page.vacant.try_reserve_exact(words)?;
        memory[number as usize].try_reserve_exact(page_len)?;
        page.vacant.resize(words, all_vacant);
        page.first_word = 0;
        self.unmapped.pop();
        self.empty.push(number);
        Ok(())
    }

    /// Returns a word of vacant slots. A page may have fewer slots than a word has bits.
    fn all_vacant(&self) -> u64 {
        if self.page_len() < u64::BITS as usize { (1 << self.page_len()) - 1 } else { u64::MAX }
    }

    /// Returns the number of a vacant slot, which is used from now on.
    ///
    /// # Panics
    /// [`SlotAllocator::try_reserve_one`] has not succeeded since the last allocation.
    pub fn alloc(&mut self) -> u32 {
        let number = self.partial.front().unwrap_or_else(|| {
            let number = self.empty.pop().expect("a slot was reserved");
            self.partial.push_back(&mut self.pages, number);
            number
        });
        let page = &mut self.pages.0[number as usize];
        let mut word = page.first_word as usize;
        while page.vacant[word] == 0 {
            word += 1;
        }
        let bit = page.vacant[word].trailing_zeros();
        page.vacant[word] &= page.vacant[word] - 1;
        page.first_word = to_u32(word);
        page.used += 1;
        if page.used == 1 << self.page_bits {
            self.partial.remove(&mut self.pages, number);
        }
        self.len += 1;
        number << self.page_bits | to_u32(word) << u64::BITS.ilog2() | bit
    }

    /// Frees a used slot. If its page becomes empty and is not the only one with vacant slots,
    /// unmaps and returns that page: the caller must free its memory.
    pub fn free(&mut self, number: u32) -> Option<usize> {
        let (page, was_full, is_empty) = self.clear(number);
        if !was_full && !is_empty {
            return None;
        }
        if was_full {
            self.partial.push_back(&mut self.pages, page);
        }
        // One page with vacant slots stays mapped, so that a queue of few jobs allocates nothing.
        if !is_empty || self.partial.len() == 1 {
            return None;
        }
        self.partial.remove(&mut self.pages, page);
        self.empty.push(page);
        self.unmap_empty()
    }

    /// Frees a used slot. Its page stays mapped, even if it becomes empty.
    pub fn free_keeping_page(&mut self, number: u32) {
        match self.clear(number) {
            (page, true, false) => self.partial.push_back(&mut self.pages, page),
            (page, true, true) => self.empty.push(page),
            (page, false, true) => {
                self.partial.remove(&mut self.pages, page);
                self.empty.push(page);
            }
            (_, false, false) => {}
        }
    }

    /// Marks a slot as vacant. Returns its page, whether the page was full, and whether it is now
    /// empty.
    fn clear(&mut self, number: u32) -> (u32, bool, bool) {
        let (page_number, slot) = (number >> self.page_bits, number % (1 << self.page_bits));
        let page = &mut self.pages.0[page_number as usize];
        let word = slot / u64::BITS;
        page.vacant[word as usize] |= 1 << (slot % u64::BITS);
        page.first_word = page.first_word.min(word);
        let was_full = page.used == 1 << self.page_bits;
        page.used -= 1;
        self.len -= 1;
        (page_number, was_full, page.used == 0)
    }

    /// Returns the number of mapped pages without used slots, except for one that may be partial.
    pub fn empty_count(&self) -> usize {
        self.empty.len()
    }

    /// Unmaps and returns a page without used slots: the caller must free its memory.
    pub fn unmap_empty(&mut self) -> Option<usize> {
        let number = match self.empty.pop() {
            Some(number) => number,
            None => {
                let first = self.partial.front()?;
                if self.pages.0[first as usize].used > 0 {
                    return None;
                }
                self.partial.remove(&mut self.pages, first);
                first
            }
        };
        self.pages.0[number as usize].vacant = Vec::new();
        self.unmapped.push(number);
        Some(number as usize)
    }

    /// Returns the page of the next allocation, and the number of its used slots. Returns `None` if
    /// that page must be mapped first.
    pub fn next_page(&self) -> Option<(usize, usize)> {
        let number = self.partial.front().or_else(|| self.empty.last().copied())? as usize;
        Some((number, self.pages.0[number].used as usize))
    }

    // ---- Checking ----

    /// Returns the number of pages, mapped or not.
    pub fn page_count(&self) -> usize {
        self.pages.0.len()
    }

    /// Returns the number of used slots of a page, or `None` while the page is unmapped.
    pub fn used_in(&self, page: usize) -> Option<usize> {
        let page = &self.pages.0[page];
        (!page.vacant.is_empty()).then_some(page.used as usize)
    }

    /// Returns a bit for each used slot of 64 adjacent ones.
    fn used_bits(&self, page: usize, word: usize) -> u64 {
        self.pages.0[page].vacant.get(word).map_or(0, |vacant| !vacant & self.all_vacant())
    }

    /// Returns the numbers of all used slots.
    pub fn used_slots(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.pages.0).flat_map(move |(page, it)| {
            let words = (0..).step_by(u64::BITS as usize).zip(&it.vacant);
            let bits = words.flat_map(|(first, vacant)| bits(!vacant).map(move |bit| first | bit));
            bits.take(it.used as usize).map(move |slot: u32| page << self.page_bits | slot)
        })
    }

    /// Returns whether the slot with this number exists and is used.
    pub fn is_used(&self, number: u32) -> bool {
        let (page, slot) = (self.page_of(number), self.slot_of(number));
        page < self.page_count()
            && self.used_bits(page, slot / u64::BITS as usize) >> (slot % u64::BITS as usize) & 1
                != 0
    }

    /// Checks the stored counts, and that each page is in the right list.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the allocator in the message.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        let (mut len, mut partial, mut empty, mut unmapped) = (0, 0, 0, 0);
        for (number, page) in self.pages.0.iter().enumerate() {
            len += page.used as usize;
            if page.vacant.is_empty() {
                unmapped += 1;
                assert_eq!(page.used, 0, "{what}: used slots of the unmapped page {number}");
                continue;
            }
            page.check(self.page_len(), number, what);
            let is_empty = page.used == 0 && self.empty.contains(&to_u32(number));
            partial += u32::from(!is_empty && (page.used as usize) < self.page_len());
            empty += usize::from(is_empty);
        }
        assert_eq!(self.len, len, "{what}: stored and real number of used slots");
        assert_eq!(self.partial.len(), partial, "{what}: listed and real partial pages");
        assert_eq!(self.empty.len(), empty, "{what}: listed and real empty pages");
        let is_empty = |number: &u32| self.used_in(*number as usize) == Some(0);
        assert!(self.empty.iter().all(is_empty), "{what}: a page of {:?} is not empty", self.empty);
        self.partial.check(&self.pages, what, |number| {
            let page = &self.pages.0[number as usize];
            let is_partial = !page.vacant.is_empty() && (page.used as usize) < self.page_len();
            assert!(
                is_partial,
                "{what}: page {number} is listed as partial, but has no vacant slot"
            );
        });
        assert_eq!(self.unmapped.len(), unmapped, "{what}: listed and real unmapped pages");
        for (index, number) in self.unmapped.iter().enumerate() {
            let is_unmapped = self.pages.0[*number as usize].vacant.is_empty();
            let is_repeated = self.unmapped[..index].contains(number);
            assert!(
                is_unmapped && !is_repeated,
                "{what}: page {number} is listed as unmapped twice, or is mapped"
            );
        }
    }
}

impl Page {
    fn check(&self, page_len: usize, number: usize, what: fmt::Arguments<'_>) {
        let words = page_len.div_ceil(u64::BITS as usize);
        assert_eq!(self.vacant.len(), words, "{what}: words of page {number}");
        let bits_beyond = to_u32(words * u64::BITS as usize - page_len);
        let used = self.vacant.chunks(16).map(count_zeros).sum::<u32>() - bits_beyond;
        assert_eq!(
            self.used, used,
            "{what}: stored and real number of used slots of page {number}"
        );
        let before = &self.vacant[..self.first_word as usize];
        let is_first = before.iter().all(|&word| word == 0);
        assert!(
            is_first,
            "{what}: page {number} has a vacant slot before word {}",
            self.first_word
        );
    }
}

/// Returns the positions of the set bits, lowest first.
fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros());
        word &= word.wrapping_sub(1);
        bit
    })
}

/// Returns the number of zero bits. Most slots are vacant, so words of ones are skipped together.
fn count_zeros(words: &[u64]) -> u32 {
    let all = words.iter().fold(u64::MAX, |all, word| all & word);
    if all == u64::MAX { 0 } else { words.iter().map(|word| word.count_zeros()).sum() }
}

impl Linked for PageTable {
    fn links(&self, key: u32) -> Links {
        self.0[key as usize].links
    }

    fn set_links(&mut self, key: u32, links: Links) {
        self.0[key as usize].links = links;
    }
}

fn to_u32(number: usize) -> u32 {
    u32::try_from(number).expect("the numbers of slots have 32 bits")
}

/// Returns the error of a collection that cannot have more entries.
pub fn capacity_overflow() -> Result<(), TryReserveError> {
    Vec::<u8>::new().try_reserve(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::JobKey;
    use std::collections::{BTreeMap, BTreeSet};

    fn alloc(slots: &mut SlotAllocator, memory: &mut Vec<Vec<u8>>) -> u32 {
        slots.try_reserve_one(memory, 10).expect("the test has memory");
        slots.alloc()
    }

    #[test]
    fn random_operations_match_a_btree_set() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut slots = SlotAllocator::new(7);
        let mut model: BTreeSet<u32> = BTreeSet::new();
        let mut memory = Vec::new();
        for step in 0..100_000_u32 {
            let filling = (step / 10_000) % 2 == 0;
            if random.u8(..10) < if filling { 8 } else { 2 } {
                let number = alloc(&mut slots, &mut memory);
                assert!(memory[slots.page_of(number)].capacity() >= 10);
                assert!(model.insert(number), "slot {number} is allocated twice");
            } else if let Some(number) = random.choice(model.iter().copied()) {
                model.remove(&number);
                if let Some(page) = slots.free(number) {
                    memory[page] = Vec::new();
                    assert!(model.iter().all(|&number| slots.page_of(number) != page));
                }
            }
            assert_eq!(slots.len(), model.len());
            slots.check(format_args!("step {step}"));
            let number = random.u32(..40_000);
            assert_eq!(slots.is_used(number), model.contains(&number));
            if step % 1_000 == 0 {
                let mut used: Vec<u32> = slots.used_slots().collect();
                used.sort_unstable();
                assert!(used.iter().eq(&model));
            }
        }
    }

    #[test]
    fn a_page_fills_from_its_start_and_is_unmapped_when_empty() {
        let mut slots = SlotAllocator::new(6);
        let mut memory = Vec::new();
        let numbers: Vec<u32> = (0..64 * 4).map(|_| alloc(&mut slots, &mut memory)).collect();
        assert!(numbers.iter().copied().eq(0..64 * 4));
        slots.free(5);
        slots.free(3);
        assert_eq!((slots.alloc(), slots.alloc()), (3, 5));
        let unmapped = numbers.iter().filter_map(|&number| slots.free(number)).count();
        assert_eq!((slots.len(), unmapped), (0, 3));
    }

    #[test]
    fn without_free_numbers_allocation_fails_until_a_page_is_empty() {
        for page_bits in [6, 17, 31] {
            let numbers = (SlotAllocator::new(page_bits).pages_max as u64) << page_bits;
            let largest = u64::from(u32::MAX);
            assert!(numbers < largest && numbers + (1 << page_bits) > largest, "{page_bits}");
        }
        let slots = PagedSlab::<JobKey, u64>::with_31_bits().slots;
        let numbers = (slots.pages_max as u64) << slots.page_bits;
        assert_eq!(numbers + slots.page_len() as u64, 1 << 31);
        let mut slots = SlotAllocator { pages_max: 2, ..SlotAllocator::new(6) };
        let mut memory = Vec::new();
        let numbers: Vec<u32> = (0..128).map(|_| alloc(&mut slots, &mut memory)).collect();
        assert!(slots.try_reserve_one(&mut memory, 10).is_err());
        slots.check(format_args!("full"));
        assert!(numbers.iter().take(64).all(|&number| slots.free(number).is_none()));
        assert!(numbers.iter().take(64).all(|&number| alloc(&mut slots, &mut memory) == number));
        assert!(slots.try_reserve_one(&mut memory, 10).is_err());
    }

    #[test]
    fn pages_are_large_enough_to_be_mapped_separately() {
        for width in [1, 8, 66, 100, 4_096, 4_098] {
            let bytes = width << page_bits(width);
            assert!((PAGE_BYTES..=4 * PAGE_BYTES).contains(&bytes), "{width}: {bytes}");
        }
    }

    type TestPages = PagedSlab<JobKey, [u64; 256]>;

    fn insert(pages: &mut TestPages, entry: u64) -> JobKey {
        pages.try_reserve_one().expect("the test has memory");
        pages.insert([entry; 256])
    }

    #[test]
    fn random_operations_match_a_btree_map() {
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
    fn empty_pages_are_freed_and_reused() {
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
