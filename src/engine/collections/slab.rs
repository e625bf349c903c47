//! A slab whose memory comes and goes by the page: entries under small integer keys.
//!
//! A slab in one vector, as `std` and the crate `slab` have it, is moved when it grows, never
//! shrinks, and aborts the process when there is no memory. With ten million jobs, growing would stall
//! the loop for 0.1 s, and a drained backlog would leave a gigabyte behind. Here a page is mapped
//! when all others are full and unmapped when its last entry goes; entries are never moved.
//!
//! [`SlotAllocator`] knows numbers only: which slots of which pages are taken. The memory belongs to
//! those who use it: [`PagedSlab`], and the bodies of jobs.
//!
//! ```text
//! number of a slot    | page ............ | slot in its page |
//! ```
//!
//! The lowest vacant slot of a page is taken first, so a page fills from its start. Numbers have 32
//! bits; the largest is [`NIL`](crate::engine::keys::NIL). When all pages with other numbers are
//! full, an allocation fails as if memory were short, so users need no check of their own.

use super::list::{Linked, Links, List};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::Key;
use std::collections::TryReserveError;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Entries of type `T` under keys of type `K`, which are used again.
#[derive(Debug)]
pub struct PagedSlab<K, T> {
    slots: SlotAllocator,
    /// Each has room for a whole page, or for nothing while it is absent.
    pages: Vec<Vec<Option<T>>>,
    /// How many slots have memory that was written to.
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

impl<K: Key, T> PagedSlab<K, T> {
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

    /// Makes sure that the next [`PagedSlab::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.slots.try_reserve_one(&mut self.pages, 1 << Self::PAGE_BITS)
    }

    /// Adds `entry` and says under which key.
    ///
    /// # Panics
    /// There was no successful [`PagedSlab::try_reserve_one`] before.
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

    /// Takes out the entry under `key`, if there is one.
    pub fn remove(&mut self, key: K) -> Option<T> {
        let number = key.number();
        let page = self.pages.get_mut(Self::page_of(number))?;
        let removed = page.get_mut(Self::slot_of(number))?.take()?;
        if let Some(page) = self.slots.free(number) {
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

impl<K: Key, T> Index<K> for PagedSlab<K, T> {
    type Output = T;

    fn index(&self, key: K) -> &T {
        self.get(key).expect(KEY_IS_GOOD)
    }
}

impl<K: Key, T> IndexMut<K> for PagedSlab<K, T> {
    fn index_mut(&mut self, key: K) -> &mut T {
        self.get_mut(key).expect(KEY_IS_GOOD)
    }
}

const KEY_IS_GOOD: &str = "who removes an entry sees to it that nobody keeps its key";

/// Which slots are taken, in pages of a power of two.
#[derive(Debug)]
pub struct SlotAllocator {
    page_bits: u32,
    /// There are no more pages than that.
    pages_max: usize,
    pages: PageTable,
    /// The pages that have room, the one to be filled next at the front.
    partial: List,
    /// The numbers of pages that have memory and no slot taken, but for one that stays partial.
    empty: Vec<u32>,
    /// The numbers of pages that have no memory at present.
    unmapped: Vec<u32>,
    len: usize,
}

#[derive(Debug)]
struct PageTable(Vec<Page>);

#[derive(Debug)]
struct Page {
    /// A bit for each slot: whether it is vacant. No words while the page is unmapped.
    vacant: Vec<u64>,
    /// All words before this one are zero.
    first_word: u32,
    used: u32,
    /// The place among the partial pages.
    links: Links,
}

/// A page has at least so many bytes, and seldom more than twice as many: from this size on the
/// allocator gives every block memory of its own (`os/process.rs` sees to it), which goes back
/// to the system as soon as the block is freed.
pub const PAGE_BYTES: usize = 128 * 1024;

/// The number of bits for slots in a page of things that have `width` bytes each.
pub const fn page_bits(width: usize) -> u32 {
    PAGE_BYTES.div_ceil(width).next_power_of_two().ilog2()
}

impl SlotAllocator {
    /// No slots yet, in pages of `1 << page_bits` slots.
    pub fn new(page_bits: u32) -> SlotAllocator {
        SlotAllocator {
            page_bits,
            // The last page of all would have the largest number.
            pages_max: (1 << (u32::BITS - page_bits)) - 1,
            pages: PageTable(Vec::new()),
            partial: List::default(),
            empty: Vec::new(),
            unmapped: Vec::new(),
            len: 0,
        }
    }

    /// How many slots are taken.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no slot is taken.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many slots a page has.
    pub fn page_len(&self) -> usize {
        1 << self.page_bits
    }

    /// The page of a slot.
    pub fn page_of(&self, number: u32) -> usize {
        (number >> self.page_bits) as usize
    }

    /// The place of a slot in its page.
    pub fn slot_of(&self, number: u32) -> usize {
        number as usize & (self.page_len() - 1)
    }

    /// Makes sure that the next [`SlotAllocator::alloc`] finds a slot, which has its memory. `memory` has the
    /// pages of what is kept, as vectors with room for `page_len` elements each while they are partial.
    ///
    /// # Errors
    /// There is no memory for a page, or no number.
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
                return no_number();
            }
            self.pages.0.try_reserve(1)?;
            memory.try_reserve(1)?;
            // A page that loses its slots or its memory must find room in these lists.
            self.empty.try_reserve(self.pages.0.len() + 1)?;
            self.unmapped.try_reserve(self.pages.0.len() + 1)?;
            self.unmapped.push(small(self.pages.0.len()));
            let page = Page { vacant: Vec::new(), first_word: 0, used: 0, links: Links::LOOSE };
            self.pages.0.push(page);
            memory.push(Vec::new());
        }
        let number = *self.unmapped.last().expect("one was just pushed where there was none");
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

    /// A word of slots that are all vacant; a small page has fewer slots than a word has bits.
    fn all_vacant(&self) -> u64 {
        if self.page_len() < u64::BITS as usize { (1 << self.page_len()) - 1 } else { u64::MAX }
    }

    /// Takes a slot.
    ///
    /// # Panics
    /// There is no room.
    pub fn alloc(&mut self) -> u32 {
        let number = self.partial.front().unwrap_or_else(|| {
            let number = self.empty.pop().expect("room was reserved");
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
        page.first_word = small(word);
        page.used += 1;
        if page.used == 1 << self.page_bits {
            self.partial.remove(&mut self.pages, number);
        }
        self.len += 1;
        number << self.page_bits | small(word) << u64::BITS.ilog2() | bit
    }

    /// Leaves a slot that is taken. If a page is empty now and not the only one with room, it
    /// is given up: its number is returned, and its memory is to be freed.
    pub fn free(&mut self, number: u32) -> Option<usize> {
        let (page, was_full, is_empty) = self.clear(number);
        if !was_full && !is_empty {
            return None;
        }
        if was_full {
            self.partial.push_back(&mut self.pages, page);
        }
        // One page with room stays, so that a queue that hovers around empty allocates nothing.
        if !is_empty || self.partial.len() == 1 {
            return None;
        }
        self.partial.remove(&mut self.pages, page);
        self.empty.push(page);
        self.unmap_empty()
    }

    /// Leaves a slot that is taken. A page that is empty now keeps its memory.
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

    /// Marks a slot as vacant. Returns its page, whether that was full, and whether it is empty now.
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

    /// Returns how many pages have memory and no slot taken.
    pub fn empty_count(&self) -> usize {
        self.empty.len()
    }

    /// Gives up an empty page: its number is returned, and its memory is to be freed.
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

    /// Returns the page in which the next slot is taken, and how many of its slots are taken; none
    /// if that page needs memory first.
    pub fn next_page(&self) -> Option<(usize, usize)> {
        let number = self.partial.front().or_else(|| self.empty.last().copied())? as usize;
        Some((number, self.pages.0[number].used as usize))
    }

    // ---- Checking ----

    /// How many pages there are, with those that are unmapped.
    pub fn page_count(&self) -> usize {
        self.pages.0.len()
    }

    /// How many slots of a page are taken; none while it is unmapped.
    pub fn taken_in(&self, page: usize) -> Option<usize> {
        let page = &self.pages.0[page];
        (!page.vacant.is_empty()).then_some(page.used as usize)
    }

    /// A bit for each slot of 64 in a row: whether it is taken.
    pub fn taken_bits(&self, page: usize, word: usize) -> u64 {
        self.pages.0[page].vacant.get(word).map_or(0, |vacant| !vacant & self.all_vacant())
    }

    /// The numbers of all slots that are taken.
    pub fn taken(&self) -> impl Iterator<Item = u32> + '_ {
        (0..).zip(&self.pages.0).flat_map(move |(page, it)| {
            let words = (0..).step_by(u64::BITS as usize).zip(&it.vacant);
            let bits = words.flat_map(|(first, vacant)| bits(!vacant).map(move |bit| first | bit));
            bits.take(it.used as usize).map(move |slot: u32| page << self.page_bits | slot)
        })
    }

    /// Whether this is the number of a slot that is taken.
    pub fn is_taken(&self, number: u32) -> bool {
        let (page, slot) = (self.page_of(number), self.slot_of(number));
        page < self.page_count()
            && self.taken_bits(page, slot / u64::BITS as usize) >> (slot % u64::BITS as usize) & 1
                != 0
    }

    /// As many slots are taken as were counted, and each page is in the list where it belongs.
    ///
    /// # Panics
    /// It is not so. `what` says what is kept in the slots.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        let (mut len, mut partial, mut empty, mut unmapped) = (0, 0, 0, 0);
        for (number, page) in self.pages.0.iter().enumerate() {
            len += page.used as usize;
            if page.vacant.is_empty() {
                unmapped += 1;
                assert_eq!(
                    page.used, 0,
                    "{what}: slots are taken in page {number}, but it is unmapped"
                );
                continue;
            }
            page.check(self.page_len(), number, what);
            let is_empty = page.used == 0 && self.empty.contains(&small(number));
            partial += u32::from(!is_empty && (page.used as usize) < self.page_len());
            empty += usize::from(is_empty);
        }
        assert_eq!(self.len, len, "{what}: slots that are taken, as noted and as counted");
        assert_eq!(self.partial.len(), partial, "{what}: partial pages, and pages with room");
        assert_eq!(self.empty.len(), empty, "{what}: empty pages, noted and counted");
        let is_empty = |number: &u32| self.taken_in(*number as usize) == Some(0);
        assert!(self.empty.iter().all(is_empty), "{what}: not all of {:?} are empty", self.empty);
        self.partial.check(&self.pages, what, |number| {
            let page = &self.pages.0[number as usize];
            let is_open = !page.vacant.is_empty() && (page.used as usize) < self.page_len();
            assert!(is_open, "{what}: page {number} is among the partial ones, and has no room");
        });
        assert_eq!(
            self.unmapped.len(),
            unmapped,
            "{what}: unmapped pages, and those without memory"
        );
        for (index, number) in self.unmapped.iter().enumerate() {
            let is_absent = self.pages.0[*number as usize].vacant.is_empty();
            let is_again = self.unmapped[..index].contains(number);
            assert!(
                is_absent && !is_again,
                "{what}: page {number} should not be among the unmapped"
            );
        }
    }
}

impl Page {
    fn check(&self, page_len: usize, number: usize, what: fmt::Arguments<'_>) {
        let words = page_len.div_ceil(u64::BITS as usize);
        assert_eq!(self.vacant.len(), words, "{what}: the words of page {number}, and of a page");
        let bits_beyond = small(words * u64::BITS as usize - page_len);
        let taken = self.vacant.chunks(16).map(count_zeros).sum::<u32>() - bits_beyond;
        assert_eq!(self.used, taken, "{what}: slots taken in page {number}, noted and counted");
        let before = &self.vacant[..self.first_word as usize];
        let is_first = before.iter().all(|&word| word == 0);
        assert!(is_first, "{what}: page {number} has vacant slots before those it knows of");
    }
}

/// The places of the bits that are set.
fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros());
        word &= word.wrapping_sub(1);
        bit
    })
}

/// Most words of most pages never had a slot taken: they are passed over together.
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

fn small(number: usize) -> u32 {
    u32::try_from(number).expect("slots have numbers of 32 bits")
}

/// The error of a collection that cannot hold as many entries.
fn no_number() -> Result<(), TryReserveError> {
    Vec::<u8>::new().try_reserve(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::JobKey;
    use std::collections::{BTreeMap, BTreeSet};

    fn alloc(slots: &mut SlotAllocator, memory: &mut Vec<Vec<u8>>) -> u32 {
        slots.try_reserve_one(memory, 10).expect("the test needs little memory");
        slots.alloc()
    }

    #[test]
    fn behaves_as_a_set_under_random_steps() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut slots = SlotAllocator::new(7);
        let mut model: BTreeSet<u32> = BTreeSet::new();
        let mut memory = Vec::new();
        for step in 0..100_000_u32 {
            let filling = (step / 10_000) % 2 == 0;
            if random.u8(..10) < if filling { 8 } else { 2 } {
                let number = alloc(&mut slots, &mut memory);
                assert!(memory[slots.page_of(number)].capacity() >= 10);
                assert!(model.insert(number), "slot {number} was taken already");
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
            assert_eq!(slots.is_taken(number), model.contains(&number));
            if step % 1_000 == 0 {
                let mut taken: Vec<u32> = slots.taken().collect();
                taken.sort_unstable();
                assert!(taken.iter().eq(&model));
            }
        }
    }

    #[test]
    fn a_page_fills_from_its_start_and_is_given_up_when_it_is_empty() {
        let mut slots = SlotAllocator::new(6);
        let mut memory = Vec::new();
        let numbers: Vec<u32> = (0..64 * 4).map(|_| alloc(&mut slots, &mut memory)).collect();
        assert!(numbers.iter().copied().eq(0..64 * 4));
        slots.free(5);
        slots.free(3);
        assert_eq!((slots.alloc(), slots.alloc()), (3, 5));
        let given_up = numbers.iter().filter_map(|&number| slots.free(number)).count();
        assert_eq!((slots.len(), given_up), (0, 3));
    }

    #[test]
    fn without_a_number_there_is_no_room_until_a_page_goes() {
        for page_bits in [6, 17, 31] {
            let numbers = (SlotAllocator::new(page_bits).pages_max as u64) << page_bits;
            let largest = u64::from(u32::MAX);
            assert!(numbers < largest && numbers + (1 << page_bits) > largest, "{page_bits}");
        }
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
    fn pages_are_as_large_as_the_allocator_wants_them() {
        for width in [1, 8, 66, 100, 4_096, 4_098] {
            let bytes = width << page_bits(width);
            assert!((PAGE_BYTES..=4 * PAGE_BYTES).contains(&bytes), "{width}: {bytes}");
        }
    }

    type TestPages = PagedSlab<JobKey, [u64; 256]>;

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
