//! A slab in pages: entries under small integer keys, in memory that comes and goes.
//!
//! A slab in one vector is moved when it grows, never gets smaller, and cannot fail.
//! Ten million jobs want neither: here a page of entries is allocated when the others are
//! full and freed when its last entry goes, so that nothing is ever moved and a drained
//! backlog leaves nothing of it behind. It must not know what it holds.

use super::keys::Key;
use super::list::{Linked, Links, List};
use std::collections::TryReserveError;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

const PAGE_BITS: u32 = 9;
const PAGE_LEN: usize = 1 << PAGE_BITS;

/// Entries of type `T` under keys of type `K`, which are used again.
#[derive(Debug)]
pub struct Pages<K, T> {
    pages: PageTable<T>,
    /// The pages that have room, the one to be filled next at the front.
    open: List,
    /// The numbers of pages that have no memory at present.
    absent: Vec<u32>,
    len: usize,
    keys: PhantomData<K>,
}

#[derive(Debug)]
struct PageTable<T>(Vec<Page<T>>);

#[derive(Debug)]
struct Page<T> {
    /// Room for exactly [`PAGE_LEN`], or for none while the page is absent.
    slots: Vec<Slot<T>>,
    used: u32,
    /// The vacant slot that was left last, or the length of `slots`.
    vacant: u32,
    /// The place among the open pages.
    links: Links,
}

#[derive(Debug)]
enum Slot<T> {
    Used(T),
    /// The next vacant slot.
    Vacant(u32),
}

impl<K, T> Default for Pages<K, T> {
    fn default() -> Pages<K, T> {
        Pages {
            pages: PageTable(Vec::new()),
            open: List::default(),
            absent: Vec::new(),
            len: 0,
            keys: PhantomData,
        }
    }
}

impl<K: Key, T> Pages<K, T> {
    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The entry under `key`, if there is one.
    pub fn get(&self, key: K) -> Option<&T> {
        let key = key.number();
        match self.pages.0.get(page_of(key))?.slots.get(slot_of(key))? {
            Slot::Used(entry) => Some(entry),
            Slot::Vacant(_) => None,
        }
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: K) -> Option<&mut T> {
        let key = key.number();
        match self.pages.0.get_mut(page_of(key))?.slots.get_mut(slot_of(key))? {
            Slot::Used(entry) => Some(entry),
            Slot::Vacant(_) => None,
        }
    }

    /// Makes sure that the next [`Pages::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        if !self.open.is_empty() {
            return Ok(());
        }
        if self.absent.is_empty() {
            self.pages.0.try_reserve(1)?;
            // A page that is freed must find room among the absent ones.
            self.absent.try_reserve(self.pages.0.len() + 1)?;
            self.absent.push(small(self.pages.0.len()));
            self.pages.0.push(Page { slots: Vec::new(), used: 0, vacant: 0, links: Links::LOOSE });
        }
        let number = *self.absent.last().expect("one was just pushed where there was none");
        self.pages.0[number as usize].slots.try_reserve_exact(PAGE_LEN)?;
        self.absent.pop();
        self.open.push_back(&mut self.pages, number);
        Ok(())
    }

    /// Adds `entry` and says under which key.
    ///
    /// # Panics
    /// There was no successful [`Pages::try_reserve_one`] before.
    pub fn insert(&mut self, entry: T) -> K {
        let number = self.open.front().expect("room was reserved");
        let page = &mut self.pages.0[number as usize];
        let slot = page.vacant;
        match page.slots.get_mut(slot as usize) {
            None => {
                page.slots.push(Slot::Used(entry));
                page.vacant += 1;
            }
            Some(vacant) => match std::mem::replace(vacant, Slot::Used(entry)) {
                Slot::Vacant(next) => page.vacant = next,
                Slot::Used(_) => unreachable!("the chain of vacant slots has only vacant ones"),
            },
        }
        page.used += 1;
        if page.used as usize == PAGE_LEN {
            self.open.remove(&mut self.pages, number);
        }
        self.len += 1;
        K::from_number(number << PAGE_BITS | slot)
    }

    /// Takes out the entry under `key`, if there is one.
    pub fn remove(&mut self, key: K) -> Option<T> {
        let key = key.number();
        let number = small(page_of(key));
        let page = self.pages.0.get_mut(page_of(key))?;
        let slot = page.slots.get_mut(slot_of(key))?;
        if matches!(slot, Slot::Vacant(_)) {
            return None;
        }
        let removed = std::mem::replace(slot, Slot::Vacant(page.vacant));
        page.vacant = small(slot_of(key));
        let was_full = page.used as usize == PAGE_LEN;
        page.used -= 1;
        let is_empty = page.used == 0;
        if was_full {
            self.open.push_back(&mut self.pages, number);
        }
        self.len -= 1;
        // One open page stays, so that a queue that hovers around empty allocates nothing.
        if is_empty && self.open.len() > 1 {
            self.free_page(number);
        }
        match removed {
            Slot::Used(entry) => Some(entry),
            Slot::Vacant(_) => unreachable!("it was just seen to be used"),
        }
    }

    fn free_page(&mut self, number: u32) {
        self.open.remove(&mut self.pages, number);
        let page = &mut self.pages.0[number as usize];
        page.slots = Vec::new();
        page.vacant = 0;
        self.absent.push(number);
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

impl<T> Linked for PageTable<T> {
    fn links(&self, key: u32) -> Links {
        self.0[key as usize].links
    }

    fn set_links(&mut self, key: u32, links: Links) {
        self.0[key as usize].links = links;
    }
}

fn page_of(key: u32) -> usize {
    (key >> PAGE_BITS) as usize
}

fn slot_of(key: u32) -> usize {
    key as usize % PAGE_LEN
}

fn small(index: usize) -> u32 {
    u32::try_from(index).expect("keys are u32")
}

#[cfg(test)]
mod tests {
    use super::super::keys::JobKey;
    use super::*;
    use std::collections::BTreeMap;

    type TestPages = Pages<JobKey, u64>;

    fn insert(pages: &mut TestPages, entry: u64) -> JobKey {
        pages.try_reserve_one().expect("the test needs little memory");
        pages.insert(entry)
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
                assert_eq!(pages.remove(key), model.remove(&key));
            }
            let key = JobKey::from_number(random.u32(..6_000));
            assert_eq!(pages.get(key), model.get(&key));
            assert_eq!(pages.get_mut(key).copied(), model.get(&key).copied());
            assert_eq!(pages.len(), model.len());
        }
    }

    #[test]
    fn empty_pages_are_freed_and_used_again() {
        let mut pages = TestPages::default();
        let keys: Vec<JobKey> =
            (0..PAGE_LEN as u64 * 4).map(|entry| insert(&mut pages, entry)).collect();
        for &key in &keys {
            pages.remove(key);
        }
        assert!(pages.is_empty());
        let allocated = |pages: &TestPages| {
            pages.pages.0.iter().filter(|page| page.slots.capacity() > 0).count()
        };
        assert_eq!(allocated(&pages), 1);
        let again: Vec<JobKey> = keys.iter().map(|_| insert(&mut pages, 0)).collect();
        assert_eq!(allocated(&pages), 4);
        assert!(again.iter().all(|&key| (key.number() as usize) < PAGE_LEN * 4));
    }
}
