//! Which slots are taken: the bookkeeping of things that are kept in pages.
//!
//! A slab in one vector is moved when it grows, never gets smaller, and cannot fail. Ten
//! million jobs want neither: here a page is opened when all others are full and given up
//! when its last slot is left, so that nothing is ever moved and a drained backlog leaves
//! nothing of itself behind. Pages that are expensive to make stay until their owner gives them
//! up ([`Slots::vacate`], [`Slots::give_up_empty`]). The memory of a page belongs to the module that
//! keeps the entries (`pages.rs`, `body.rs`); this one knows numbers only:
//!
//! ```text
//! number of a slot    | page ............ | slot in its page |
//! ```
//!
//! The lowest vacant slot of a page is taken first, so that a page fills from its start.
//!
//! Numbers have 32 bits, and the largest one means none (`list.rs`). When all pages with other
//! numbers are full, there is no room, as if there were no memory. So whatever is numbered by
//! slots, or counts entries with such numbers, needs no check of its own.

use super::list::{Linked, Links, List};
use crate::engine::headroom::{self, Headroom};
use std::collections::TryReserveError;
use std::fmt;

/// Which slots are taken, in pages of a power of two.
#[derive(Debug)]
pub struct Slots {
    page_bits: u32,
    /// There are no more pages than that.
    pages_max: usize,
    pages: PageTable,
    /// The pages that have room, the one to be filled next at the front.
    open: List,
    /// The numbers of pages that have memory and no slot taken, but for one that stays open.
    empty: Vec<u32>,
    /// The numbers of pages that have no memory at present.
    absent: Vec<u32>,
    len: usize,
}

#[derive(Debug)]
struct PageTable(Vec<Page>);

#[derive(Debug)]
struct Page {
    /// A bit for each slot: whether it is vacant. No words while the page is absent.
    vacant: Vec<u64>,
    /// All words before this one are zero.
    first_word: u32,
    used: u32,
    /// The place among the open pages.
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

impl Slots {
    /// No slots yet, in pages of `1 << page_bits` slots.
    pub fn new(page_bits: u32) -> Slots {
        Slots {
            page_bits,
            // The last page of all would have the largest number.
            pages_max: (1 << (u32::BITS - page_bits)) - 1,
            pages: PageTable(Vec::new()),
            open: List::default(),
            empty: Vec::new(),
            absent: Vec::new(),
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

    /// Makes sure that the next [`Slots::take`] finds a slot, which has its memory. `memory` has the
    /// pages of what is kept, as vectors with room for `page_len` elements each while they are open.
    ///
    /// # Errors
    /// There is no memory for a page, or no number.
    pub fn try_reserve_one<E>(
        &mut self,
        memory: &mut Vec<Vec<E>>,
        page_len: usize,
    ) -> Result<(), TryReserveError> {
        if !self.open.is_empty() || !self.empty.is_empty() {
            return Ok(());
        }
        headroom::leave(Headroom::Quarter, || self.open_page(memory, page_len))
    }

    fn open_page<E>(
        &mut self,
        memory: &mut Vec<Vec<E>>,
        page_len: usize,
    ) -> Result<(), TryReserveError> {
        if self.absent.is_empty() {
            if self.pages.0.len() == self.pages_max {
                return no_number();
            }
            self.pages.0.try_reserve(1)?;
            memory.try_reserve(1)?;
            // A page that loses its slots or its memory must find room in these lists.
            self.empty.try_reserve(self.pages.0.len() + 1)?;
            self.absent.try_reserve(self.pages.0.len() + 1)?;
            self.absent.push(small(self.pages.0.len()));
            let page = Page { vacant: Vec::new(), first_word: 0, used: 0, links: Links::LOOSE };
            self.pages.0.push(page);
            memory.push(Vec::new());
        }
        let number = *self.absent.last().expect("one was just pushed where there was none");
        let words = self.page_len().div_ceil(u64::BITS as usize);
        let all_vacant = self.all_vacant();
        let page = &mut self.pages.0[number as usize];
        page.vacant.try_reserve_exact(words)?;
        memory[number as usize].try_reserve_exact(page_len)?;
        page.vacant.resize(words, all_vacant);
        page.first_word = 0;
        self.absent.pop();
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
    pub fn take(&mut self) -> u32 {
        let number = self.open.front().unwrap_or_else(|| {
            let number = self.empty.pop().expect("room was reserved");
            self.open.push_back(&mut self.pages, number);
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
            self.open.remove(&mut self.pages, number);
        }
        self.len += 1;
        number << self.page_bits | small(word) << u64::BITS.ilog2() | bit
    }

    /// Leaves a slot that is taken. If a page is empty now and not the only one with room, it
    /// is given up: its number is returned, and its memory is to be freed.
    pub fn leave(&mut self, number: u32) -> Option<usize> {
        let (page, was_full, is_empty) = self.clear(number);
        if !was_full && !is_empty {
            return None;
        }
        if was_full {
            self.open.push_back(&mut self.pages, page);
        }
        // One page with room stays, so that a queue that hovers around empty allocates nothing.
        if !is_empty || self.open.len() == 1 {
            return None;
        }
        self.open.remove(&mut self.pages, page);
        self.empty.push(page);
        self.give_up_empty()
    }

    /// Leaves a slot that is taken. A page that is empty now keeps its memory.
    pub fn vacate(&mut self, number: u32) {
        match self.clear(number) {
            (page, true, false) => self.open.push_back(&mut self.pages, page),
            (page, true, true) => self.empty.push(page),
            (page, false, true) => {
                self.open.remove(&mut self.pages, page);
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
    pub fn give_up_empty(&mut self) -> Option<usize> {
        let number = match self.empty.pop() {
            Some(number) => number,
            None => {
                let first = self.open.front()?;
                if self.pages.0[first as usize].used > 0 {
                    return None;
                }
                self.open.remove(&mut self.pages, first);
                first
            }
        };
        self.pages.0[number as usize].vacant = Vec::new();
        self.absent.push(number);
        Some(number as usize)
    }

    /// Returns the page in which the next slot is taken, and how many of its slots are taken; none
    /// if that page needs memory first.
    pub fn next_page(&self) -> Option<(usize, usize)> {
        let number = self.open.front().or_else(|| self.empty.last().copied())? as usize;
        Some((number, self.pages.0[number].used as usize))
    }

    // ---- Checking ----

    /// How many pages there are, with those that are absent.
    pub fn page_count(&self) -> usize {
        self.pages.0.len()
    }

    /// How many slots of a page are taken; none while it is absent.
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
        let (mut len, mut open, mut empty, mut absent) = (0, 0, 0, 0);
        for (number, page) in self.pages.0.iter().enumerate() {
            len += page.used as usize;
            if page.vacant.is_empty() {
                absent += 1;
                assert_eq!(
                    page.used, 0,
                    "{what}: slots are taken in page {number}, but it is absent"
                );
                continue;
            }
            page.check(self.page_len(), number, what);
            let is_empty = page.used == 0 && self.empty.contains(&small(number));
            open += u32::from(!is_empty && (page.used as usize) < self.page_len());
            empty += usize::from(is_empty);
        }
        assert_eq!(self.len, len, "{what}: slots that are taken, as noted and as counted");
        assert_eq!(self.open.len(), open, "{what}: open pages, and pages with room");
        assert_eq!(self.empty.len(), empty, "{what}: empty pages, noted and counted");
        let is_empty = |number: &u32| self.taken_in(*number as usize) == Some(0);
        assert!(self.empty.iter().all(is_empty), "{what}: not all of {:?} are empty", self.empty);
        self.open.check(&self.pages, what, |number| {
            let page = &self.pages.0[number as usize];
            let is_open = !page.vacant.is_empty() && (page.used as usize) < self.page_len();
            assert!(is_open, "{what}: page {number} is among the open ones, and has no room");
        });
        assert_eq!(self.absent.len(), absent, "{what}: absent pages, and those without memory");
        for (index, number) in self.absent.iter().enumerate() {
            let is_absent = self.pages.0[*number as usize].vacant.is_empty();
            let is_again = self.absent[..index].contains(number);
            assert!(is_absent && !is_again, "{what}: page {number} should not be among the absent");
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
    use std::collections::BTreeSet;

    fn take(slots: &mut Slots, memory: &mut Vec<Vec<u8>>) -> u32 {
        slots.try_reserve_one(memory, 10).expect("the test needs little memory");
        slots.take()
    }

    #[test]
    fn behaves_as_a_set_under_random_steps() {
        let mut random = fastrand::Rng::with_seed(5);
        let mut slots = Slots::new(7);
        let mut model: BTreeSet<u32> = BTreeSet::new();
        let mut memory = Vec::new();
        for step in 0..100_000_u32 {
            let filling = (step / 10_000) % 2 == 0;
            if random.u8(..10) < if filling { 8 } else { 2 } {
                let number = take(&mut slots, &mut memory);
                assert!(memory[slots.page_of(number)].capacity() >= 10);
                assert!(model.insert(number), "slot {number} was taken already");
            } else if let Some(number) = random.choice(model.iter().copied()) {
                model.remove(&number);
                if let Some(page) = slots.leave(number) {
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
        let mut slots = Slots::new(6);
        let mut memory = Vec::new();
        let numbers: Vec<u32> = (0..64 * 4).map(|_| take(&mut slots, &mut memory)).collect();
        assert!(numbers.iter().copied().eq(0..64 * 4));
        slots.leave(5);
        slots.leave(3);
        assert_eq!((slots.take(), slots.take()), (3, 5));
        let given_up = numbers.iter().filter_map(|&number| slots.leave(number)).count();
        assert_eq!((slots.len(), given_up), (0, 3));
    }

    #[test]
    fn without_a_number_there_is_no_room_until_a_page_goes() {
        for page_bits in [6, 17, 31] {
            let numbers = (Slots::new(page_bits).pages_max as u64) << page_bits;
            let largest = u64::from(u32::MAX);
            assert!(numbers < largest && numbers + (1 << page_bits) > largest, "{page_bits}");
        }
        let mut slots = Slots { pages_max: 2, ..Slots::new(6) };
        let mut memory = Vec::new();
        let numbers: Vec<u32> = (0..128).map(|_| take(&mut slots, &mut memory)).collect();
        assert!(slots.try_reserve_one(&mut memory, 10).is_err());
        slots.check(format_args!("full"));
        assert!(numbers.iter().take(64).all(|&number| slots.leave(number).is_none()));
        assert!(numbers.iter().take(64).all(|&number| take(&mut slots, &mut memory) == number));
        assert!(slots.try_reserve_one(&mut memory, 10).is_err());
    }

    #[test]
    fn pages_are_as_large_as_the_allocator_wants_them() {
        for width in [1, 8, 66, 100, 4_096, 4_098] {
            let bytes = width << page_bits(width);
            assert!((PAGE_BYTES..=4 * PAGE_BYTES).contains(&bytes), "{width}: {bytes}");
        }
    }
}
