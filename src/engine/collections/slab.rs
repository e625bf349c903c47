//! A slab that returns memory to the system page by page, and whose allocations can fail.
//!
//! The crate `slab` keeps its entries in one vector. That vector moves when it grows, shrinks only
//! at its end, and aborts the process when there is no memory. Measured with ten million entries of
//! 80 bytes of which the last ten stay: the crate keeps 841 MB, also after `shrink_to_fit`, and
//! this slab 3 MB. The price: with a million entries, replacing a random one costs 300 ns instead
//! of 63 ns.
//!
//! A page is mapped when all others are full, and unmapped when its last entry is removed. Entries
//! are never moved. [`Slots`] records which slots of which pages are used; it has no memory for the
//! entries. [`PagedSlab`] and the bodies of jobs have their pages next to it.
//!
//! ```text
//! number of a slot    | page ............ | slot in its page |
//! ```
//!
//! The lowest vacant slot of a page is allocated first, so a page fills from its start. Numbers
//! have 32 bits; the largest is [`NIL`](crate::engine::keys::NIL). When all pages below it are
//! full, an allocation fails with the same error as without memory.
//!
//! Slabs are for jobs, tubes, watches, bodies and connections.

use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::Key;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// Entries of type `T` under keys of type `K`. The key of a removed entry is reused.
///
/// The slab chooses the keys, or its owner does: [`PagedSlab::try_insert`] adds an entry under the
/// key of another slab. One slab has entries of one kind only.
pub struct PagedSlab<K, T> {
    slots: Slots,
    /// The capacity of each is that of a whole page, or 0 while the page is unmapped.
    pages: Vec<Vec<Option<T>>>,
    /// The number of slots of mapped pages up to the highest that was ever used in each.
    touched: usize,
    keys: PhantomData<K>,
}

impl<K, T> Default for PagedSlab<K, T> {
    fn default() -> PagedSlab<K, T> {
        let slots = Slots::new(page_bits(size_of::<Option<T>>()));
        PagedSlab { slots, pages: Vec::new(), touched: 0, keys: PhantomData }
    }
}

impl<K: Key, T> PagedSlab<K, T> {
    // As in `Slots`, with a constant instead of a field: shifts by a constant are faster.
    const PAGE_BITS: u32 = page_bits(size_of::<Option<T>>());
    const PAGE_LEN: usize = 1 << Self::PAGE_BITS;

    pub fn len(&self) -> usize {
        self.slots.len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory of the entries and of the vacant slots between them, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        (self.touched * size_of::<Option<T>>()) as u64
    }

    pub fn get(&self, key: K) -> Option<&T> {
        let (page, slot) = Self::position(key);
        self.pages.get(page)?.get(slot)?.as_ref()
    }

    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let (page, slot) = Self::position(key);
        self.pages.get_mut(page)?.get_mut(slot)?.as_mut()
    }

    /// Ensures that the next [`PagedSlab::insert`] allocates nothing.
    pub fn try_reserve_one(&mut self) -> Result<(), NoMemory> {
        self.slots.try_reserve_one(&mut self.pages, |page| page.try_reserve_exact(Self::PAGE_LEN))
    }

    /// Returns the key of the next inserted entry, after [`PagedSlab::try_reserve_one`].
    pub fn next_key(&self) -> K {
        let (page, slot) = self.slots.next();
        K::from_number(self.slots.number(page, slot))
    }

    /// Adds `entry` and returns its key.
    ///
    /// # Panics
    /// [`PagedSlab::try_reserve_one`] has not succeeded since the last insertion.
    #[inline(always)]
    pub fn insert(&mut self, entry: T) -> K {
        let key = K::from_number(self.slots.alloc());
        self.write(key, entry);
        key
    }

    /// Ensures that [`PagedSlab::try_insert`] under `key` succeeds.
    #[inline(always)]
    pub fn try_reserve(&mut self, key: K) -> Result<(), NoMemory> {
        let (page, _) = Self::position(key);
        if self.slots.is_mapped(page) {
            return Ok(());
        }
        let map = |page: &mut Vec<Option<T>>| page.try_reserve_exact(Self::PAGE_LEN);
        self.slots.try_map_page(page, &mut self.pages, map)
    }

    /// Adds `entry` under `key`, which must have no entry.
    pub fn try_insert(&mut self, key: K, entry: T) -> Result<(), NoMemory> {
        self.try_reserve(key)?;
        let (page, slot) = Self::position(key);
        self.slots.take(page, slot);
        self.write(key, entry);
        Ok(())
    }

    fn write(&mut self, key: K, entry: T) {
        let (page, slot) = Self::position(key);
        let page = &mut self.pages[page];
        if slot >= page.len() {
            self.touched += slot + 1 - page.len();
            page.resize_with(slot, || None);
            page.push(Some(entry));
        } else {
            page[slot] = Some(entry);
        }
    }

    /// Removes and returns the entry under `key`. Unmaps its page if that becomes empty and another one has
    /// vacant slots.
    #[inline(always)]
    pub fn remove(&mut self, key: K) -> Option<T> {
        let (page, slot) = Self::position(key);
        let removed = self.pages.get_mut(page)?.get_mut(slot)?.take()?;
        if self.slots.free(key.number()) {
            self.slots.unmap(page);
            self.touched -= std::mem::take(&mut self.pages[page]).len();
        }
        Some(removed)
    }

    /// Returns all entries in the order of their keys.
    pub fn iter(&self) -> impl Iterator<Item = (K, &T)> + '_ {
        (0..self.pages.len()).flat_map(|page| self.in_page(page))
    }

    /// Returns the entries of a page in the order of their keys. An entry stays in its page.
    pub fn in_page(&self, page: usize) -> impl Iterator<Item = (K, &T)> + '_ {
        let entries = (to_u32(page << Self::PAGE_BITS)..).zip(&self.pages[page]);
        entries.filter_map(|(number, it)| Some((K::from_number(number), it.as_ref()?)))
    }

    /// Returns the number of pages.
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    /// Returns a number that is higher than that of each key.
    pub fn numbers_end(&self) -> usize {
        let before = self.pages.len().saturating_sub(1) << Self::PAGE_BITS;
        before + self.pages.last().map_or(0, Vec::len)
    }

    /// Checks that the used slots have entries, and no others, and that mapped pages have memory,
    /// and no others.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the slab in the message.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        self.slots.check(self.pages.iter().map(Vec::capacity), Self::PAGE_LEN, what);
        let touched = self.pages.iter().map(Vec::len).sum::<usize>();
        assert_eq!(self.touched, touched, "{what}: stored and real number of touched slots");
        for (page, entries) in self.pages.iter().enumerate() {
            let is_right =
                |(slot, it): (usize, &Option<T>)| it.is_some() == self.slots.is_used_in(page, slot);
            let all_right = entries.iter().enumerate().all(is_right);
            assert!(
                all_right,
                "{what}: a used slot of page {page} without an entry, or the reverse"
            );
            let used = entries.iter().flatten().count();
            assert_eq!(used, self.slots.used_in(page), "{what}: entries of page {page}");
        }
    }

    fn position(key: K) -> (usize, usize) {
        let number = key.number();
        ((number >> Self::PAGE_BITS) as usize, number as usize & (Self::PAGE_LEN - 1))
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

pub(super) const NO_ENTRY: &str = "no entry for this key";

/// A record of the used slots, in pages of a power of two.
pub struct Slots {
    page_bits: u32,
    /// The number of pages whose slots all have numbers below [`NIL`](crate::engine::keys::NIL).
    pages_max: usize,
    /// The vacant slots of each page. Without memory while the page is unmapped.
    vacant: Vec<Bits>,
    /// Mapped pages with vacant slots, except for those in `empty`. The first is filled first.
    partial: Bits,
    /// Pages without used slots that the owner of the memory keeps for later: [`Slots::set_aside`].
    empty: Bits,
    /// Pages without memory.
    unmapped: Bits,
    len: usize,
}

/// A set of small numbers.
#[derive(Debug, Default)]
struct Bits {
    words: Vec<u64>,
    /// The first word that is not zero, or the number of words.
    first_word: usize,
    len: usize,
}

/// The least size of a page, in bytes; most pages have less than twice as many. From this size on
/// the allocator maps each block by itself (`os/sys/memory.rs` configures that), so freeing a page
/// returns its memory to the system.
pub const PAGE_BYTES: usize = 128 * 1024;

/// Returns the binary logarithm of the number of slots in a page of entries of `width` bytes.
pub const fn page_bits(width: usize) -> u32 {
    PAGE_BYTES.div_ceil(width).next_power_of_two().ilog2()
}

impl Slots {
    /// Returns a record of pages of `1 << page_bits` slots.
    pub fn new(page_bits: u32) -> Slots {
        Slots {
            page_bits,
            // The page with the highest number has the slot `NIL`.
            pages_max: (1 << (u32::BITS - page_bits)) - 1,
            vacant: Vec::new(),
            partial: Bits::default(),
            empty: Bits::default(),
            unmapped: Bits::default(),
            len: 0,
        }
    }

    /// Returns the number of slots in a page.
    pub fn page_len(&self) -> usize {
        1 << self.page_bits
    }

    /// Returns the page of a slot, and its index in the page.
    pub fn position(&self, number: u32) -> (usize, usize) {
        ((number >> self.page_bits) as usize, number as usize & (self.page_len() - 1))
    }

    /// Ensures that the next [`Slots::alloc`] finds a slot with memory. `pages` has the memory of each page.
    /// If a page is mapped, `map` allocates it.
    pub fn try_reserve_one<P: Default>(
        &mut self,
        pages: &mut Vec<P>,
        map: impl FnOnce(&mut P) -> Result<(), NoMemory>,
    ) -> Result<(), NoMemory> {
        if self.next_page().is_some() {
            return Ok(());
        }
        let number = self.unmapped.first().unwrap_or(self.vacant.len());
        self.try_map_page(number, pages, map)
    }

    /// Maps a page, which has no memory.
    #[cold]
    fn try_map_page<P: Default>(
        &mut self,
        number: usize,
        pages: &mut Vec<P>,
        map: impl FnOnce(&mut P) -> Result<(), NoMemory>,
    ) -> Result<(), NoMemory> {
        headroom::keeping(Headroom::Quarter, || {
            while self.vacant.len() <= number {
                pages.try_reserve(1)?;
                self.try_add_page()?;
                pages.push(P::default());
            }
            let vacant = Bits::try_full(self.page_len())?;
            map(&mut pages[number])?;
            self.vacant[number] = vacant;
            self.unmapped.remove(number);
            self.partial.add(number);
            Ok(())
        })
    }

    /// Adds a page, which has no memory.
    // Slabs of each type would have a copy of it.
    #[inline(never)]
    fn try_add_page(&mut self) -> Result<(), NoMemory> {
        let new = self.vacant.len();
        if new == self.pages_max {
            // The error of a collection that cannot have more entries.
            return Vec::<u8>::new().try_reserve(usize::MAX);
        }
        self.vacant.try_reserve(1)?;
        // Freeing a slot and unmapping a page must not allocate.
        for set in [&mut self.partial, &mut self.empty, &mut self.unmapped] {
            set.try_grow(new + 1)?;
        }
        self.vacant.push(Bits::default());
        self.unmapped.add(new);
        Ok(())
    }

    /// Returns the number of a vacant slot, which is used from now on.
    ///
    /// # Panics
    /// [`Slots::try_reserve_one`] has not succeeded since the last allocation.
    #[inline(always)]
    pub fn alloc(&mut self) -> u32 {
        let (page, slot) = self.next();
        if self.partial.len == 0 {
            self.empty.remove(page);
            self.partial.add(page);
        }
        self.take(page, slot);
        self.number(page, slot)
    }

    /// Returns the page and the index of the slot that [`Slots::alloc`] returns next.
    #[inline(always)]
    fn next(&self) -> (usize, usize) {
        let page = self.next_page().expect("a slot was reserved");
        (page, self.vacant[page].first().expect("the page has a vacant slot"))
    }

    fn number(&self, page: usize, slot: usize) -> u32 {
        to_u32(page << self.page_bits | slot)
    }

    /// Uses a vacant slot of a partial page.
    #[inline(always)]
    fn take(&mut self, page: usize, slot: usize) {
        self.vacant[page].remove(slot);
        self.len += 1;
        if self.vacant[page].len == 0 {
            self.partial.remove(page);
        }
    }

    /// Frees a used slot. Returns whether its page is now empty, and another partial one is there.
    #[inline(always)]
    pub fn free(&mut self, number: u32) -> bool {
        let (page, slot) = self.position(number);
        let vacant = &mut self.vacant[page];
        vacant.add(slot);
        self.len -= 1;
        let vacant = vacant.len;
        if vacant == 1 {
            self.partial.add(page);
        }
        // One page with vacant slots stays mapped, so that a queue of few jobs allocates nothing.
        vacant == self.page_len() && self.partial.len > 1
    }

    /// Keeps a partial page for later if it is empty. Returns whether it is.
    pub fn set_aside(&mut self, page: usize) -> bool {
        let is_empty = self.used_in(page) == 0;
        if is_empty {
            self.partial.remove(page);
            self.empty.add(page);
        }
        is_empty
    }

    /// Returns the number of pages that are set aside.
    pub fn empty_count(&self) -> usize {
        self.empty.len
    }

    /// Unmaps and returns a page that is set aside, the last one, or else a partial one without used
    /// slots: the caller must free its memory.
    pub fn unmap_empty(&mut self) -> Option<usize> {
        let page = match self.empty.last() {
            Some(last) => {
                self.empty.remove(last);
                self.partial.add(last);
                last
            }
            None => self.partial.first().filter(|&first| self.used_in(first) == 0)?,
        };
        self.unmap(page);
        Some(page)
    }

    /// Unmaps a partial page without used slots: the caller must free its memory.
    pub fn unmap(&mut self, page: usize) {
        self.vacant[page] = Bits::default();
        self.partial.remove(page);
        self.unmapped.add(page);
    }

    /// Returns the page of the next allocation. Returns `None` if that page must be mapped first.
    pub fn next_page(&self) -> Option<usize> {
        self.partial.first().or_else(|| self.empty.first())
    }

    /// Returns the number of used slots of a page.
    pub fn used_in(&self, page: usize) -> usize {
        if self.is_mapped(page) { self.page_len() - self.vacant[page].len } else { 0 }
    }

    fn is_mapped(&self, page: usize) -> bool {
        self.vacant.get(page).is_some_and(|vacant| !vacant.words.is_empty())
    }

    // ---- Checking ----

    /// Returns the numbers of all used slots.
    pub fn used_slots(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.vacant.len()).flat_map(move |page| {
            let used = (0..self.page_len()).filter(move |&slot| self.is_used_in(page, slot));
            used.take(self.used_in(page)).map(move |slot| self.number(page, slot))
        })
    }

    /// Returns whether the slot with this number exists and is used.
    pub fn is_used(&self, number: u32) -> bool {
        let (page, slot) = self.position(number);
        self.is_used_in(page, slot)
    }

    fn is_used_in(&self, page: usize, slot: usize) -> bool {
        self.is_mapped(page) && !self.vacant[page].has(slot)
    }

    /// Checks the sets, that each page is in the right one, and that mapped pages, and no others, have this
    /// capacity.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the slots in the message.
    pub fn check(
        &self,
        capacities: impl ExactSizeIterator<Item = usize>,
        capacity: usize,
        what: fmt::Arguments<'_>,
    ) {
        assert_eq!(self.vacant.len(), capacities.len(), "{what}: pages of slots, and of memory");
        let sets = [&self.unmapped, &self.empty, &self.partial];
        sets.into_iter().chain(&self.vacant).for_each(|set| set.check(what));
        for (page, found) in capacities.enumerate() {
            let (is_mapped, used) = (self.is_mapped(page), self.used_in(page));
            let [is_unmapped, is_empty, is_partial] = sets.map(|set| set.has(page));
            assert_eq!(is_unmapped, !is_mapped, "{what}: stored and real absence of page {page}");
            assert!(!is_empty || used == 0, "{what}: {used} used slots of the empty page {page}");
            let expected = is_mapped && !is_empty && used < self.page_len();
            assert_eq!(is_partial, expected, "{what}: is page {page}, with {used} slots, partial");
            let has_memory = if is_mapped { found >= capacity } else { found == 0 };
            assert!(has_memory, "{what}: page {page} has a capacity of {found}");
        }
        let len = (0..self.vacant.len()).map(|page| self.used_in(page)).sum::<usize>();
        assert_eq!(self.len, len, "{what}: stored and real number of used slots");
    }
}

impl Bits {
    /// Returns the numbers below `end`, a power of two.
    fn try_full(end: usize) -> Result<Bits, NoMemory> {
        let mut words = Vec::new();
        words.try_reserve_exact(end.div_ceil(WORD))?;
        words.resize(end.div_ceil(WORD), if end < WORD { (1 << end) - 1 } else { u64::MAX });
        Ok(Bits { words, first_word: 0, len: end })
    }

    /// Makes room for the numbers below `end`.
    fn try_grow(&mut self, end: usize) -> Result<(), NoMemory> {
        if end > self.words.len() * WORD {
            self.words.try_reserve(1)?;
            self.words.push(0);
            self.skip_zeros();
        }
        Ok(())
    }

    fn has(&self, number: usize) -> bool {
        self.words[number / WORD] >> (number % WORD) & 1 != 0
    }

    /// Adds a number, which must be new.
    fn add(&mut self, number: usize) {
        self.words[number / WORD] |= 1 << (number % WORD);
        self.first_word = self.first_word.min(number / WORD);
        self.len += 1;
    }

    /// Removes a number, which must be here.
    fn remove(&mut self, number: usize) {
        self.words[number / WORD] &= !(1 << (number % WORD));
        self.len -= 1;
        self.skip_zeros();
    }

    fn skip_zeros(&mut self) {
        while self.words.get(self.first_word) == Some(&0) {
            self.first_word += 1;
        }
    }

    #[inline(always)]
    fn first(&self) -> Option<usize> {
        let word = self.words.get(self.first_word)?;
        Some(self.first_word * WORD + word.trailing_zeros() as usize)
    }

    fn last(&self) -> Option<usize> {
        let word = self.words.iter().rposition(|&word| word != 0)?;
        Some(word * WORD + self.words[word].ilog2() as usize)
    }

    fn check(&self, what: fmt::Arguments<'_>) {
        // Most words are full, and counting the bits of a word takes a dozen instructions.
        const FULL: [u64; 32] = [u64::MAX; 32];
        let ones = |words: &[u64]| words.iter().map(|word| word.count_ones() as usize).sum();
        let count = |words: &[u64]| if words == FULL { FULL.len() * WORD } else { ones(words) };
        let len = self.words.chunks(FULL.len()).map(count).sum::<usize>();
        assert_eq!(self.len, len, "{what}: stored and real length of a set");
        let first = self.words.iter().take_while(|&&word| word == 0).count();
        assert_eq!(self.first_word, first, "{what}: stored and real first word of a set");
    }
}

const WORD: usize = u64::BITS as usize;

fn to_u32(number: usize) -> u32 {
    u32::try_from(number).expect("the numbers of slots have 32 bits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::JobKey;
    use std::collections::BTreeMap;
    use std::collections::btree_map::Entry;

    type TestSlab = PagedSlab<JobKey, [u64; 256]>;
    const PAGE_LEN: u64 = 1 << page_bits(256 * 8 + 8);

    fn insert(slab: &mut TestSlab, entry: u64) -> JobKey {
        slab.try_reserve_one().expect("the test has memory");
        slab.insert([entry; 256])
    }

    #[test]
    fn random_operations_match_a_btree_map() {
        for is_chosen in [false, true] {
            let mut random = fastrand::Rng::with_seed(5);
            let mut slab = TestSlab::default();
            let mut model = BTreeMap::new();
            for step in 0..50_000_u64 {
                let filling = (step / 10_000) % 2 == 0;
                let key = JobKey::from_number(random.u32(..6_000));
                if random.u8(..10) >= if filling { 8 } else { 2 } {
                    assert_eq!(slab.remove(key).map(|entry| entry[0]), model.remove(&key));
                } else if !is_chosen {
                    assert_eq!(model.insert(insert(&mut slab, step), step), None);
                } else if let Entry::Vacant(vacant) = model.entry(key) {
                    slab.try_insert(key, [step; 256]).expect("the test has memory");
                    vacant.insert(step);
                }
                let key = JobKey::from_number(random.u32(..6_000));
                assert_eq!(slab.get(key).map(|entry| entry[9]), model.get(&key).copied());
                assert_eq!(slab.get_mut(key).map(|entry| entry[9]), model.get(&key).copied());
                assert_eq!(slab.len(), model.len());
                if step % 64 == 0 {
                    slab.check(format_args!("step {step}"));
                    assert!(slab.iter().map(|(key, entry)| (key, entry[9])).eq(model.clone()));
                    let used: Vec<u32> = slab.slots.used_slots().collect();
                    assert!(used.iter().copied().eq(model.keys().map(|key| key.number())));
                }
            }
            model.keys().for_each(|&key| assert!(slab.remove(key).is_some()));
            slab.check(format_args!("the empty slab"));
            let mapped = slab.pages.iter().filter(|page| page.capacity() > 0).count();
            assert_eq!((mapped, slab.len()), (1, 0), "pages with memory, and entries");
        }
    }

    #[test]
    fn a_page_fills_from_its_start() {
        let mut slab = TestSlab::default();
        for number in 0..3 * PAGE_LEN {
            assert_eq!(u64::from(insert(&mut slab, number).number()), number);
        }
        for number in [5, 3] {
            slab.remove(JobKey::from_number(number));
        }
        assert_eq!([0; 2].map(|entry| insert(&mut slab, entry).number()), [3, 5]);
    }

    #[test]
    fn without_free_numbers_allocation_fails_until_a_slot_is_free() {
        for page_bits in [6, 17, 31] {
            let numbers = (Slots::new(page_bits).pages_max as u64) << page_bits;
            let largest = u64::from(u32::MAX);
            assert!(numbers < largest && numbers + (1 << page_bits) > largest, "{page_bits}");
        }
        let mut slab = TestSlab::default();
        slab.slots.pages_max = 2;
        (0..2 * PAGE_LEN).for_each(|entry| _ = insert(&mut slab, entry));
        assert!(slab.try_reserve_one().is_err());
        slab.check(format_args!("the full slab"));
        slab.remove(JobKey::from_number(7));
        assert_eq!(insert(&mut slab, 0).number(), 7);
    }

    #[test]
    fn pages_are_large_enough_to_be_mapped_separately() {
        for width in [1, 8, 66, 100, 4_096, 4_098] {
            let bytes = width << page_bits(width);
            assert!((PAGE_BYTES..=4 * PAGE_BYTES).contains(&bytes), "{width}: {bytes}");
        }
    }
}
