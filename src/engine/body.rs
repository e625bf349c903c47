//! The bytes of jobs, as clients sent them: opaque, and never changed once complete.
//!
//! A body is kept together with the CR LF that ends it on the wire, so that a reply is a
//! header and then exactly these bytes.
//!
//! Small bodies stand side by side in pages, one kind of page for each width, and are copied
//! into replies. So a body costs little more than its bytes, and the memory of a backlog goes
//! back to the system page by page as it drains, without the allocator's having to tidy up. A
//! large body is an allocation of its own and is shared with the replies that carry it, so that
//! deleting the job while a slow client still receives it is harmless.

use super::keys::{BodyKey, Key};
use super::pages::Pages;
use super::slots::{self, Slots};
use super::table::scatter;
use std::borrow::Cow;
use std::collections::TryReserveError;
use std::rc::Rc;

/// The bytes of one job. Whoever has it gives it back to [`Bodies::remove`] in the end.
#[derive(Debug)]
pub struct Body {
    /// With CR LF.
    len: u32,
    /// Among those of its width, or among the large ones.
    key: BodyKey,
}

/// All bodies.
#[derive(Debug)]
pub struct Bodies {
    /// By width.
    small: Vec<Shelf>,
    large: Pages<BodyKey, Rc<Vec<u8>>>,
    freed_bytes: usize,
    kept_bytes: u64,
}

/// Bodies of up to a certain width.
#[derive(Debug)]
struct Shelf {
    width: usize,
    slots: Slots,
    /// Each has room for a whole page, or for nothing while it is absent.
    pages: Vec<Vec<u8>>,
}

/// What a body consists of.
#[derive(Clone, Copy, Debug)]
pub enum Content<'a> {
    /// To be copied.
    Small(&'a [u8]),
    /// To be shared.
    Large(&'a Rc<Vec<u8>>),
}

impl<'a> Content<'a> {
    /// The bytes, with CR LF.
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Content::Small(bytes) => bytes,
            Content::Large(bytes) => bytes,
        }
    }

    /// The length as clients count it: without CR LF.
    pub fn len(self) -> usize {
        self.bytes().len() - CR_LF.len()
    }

    /// Whether there is nothing before the CR LF.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// The end of lines and bodies.
pub const CR_LF: &[u8] = b"\r\n";

/// From this length on, sharing a body costs less than copying it into a reply.
pub const LARGE: usize = 4096;

/// From one width to the next it is eight bytes, or a sixteenth to a thirty-second.
const STEP: usize = 8;
const STEPS_PER_DOUBLING: usize = 16;
/// Up to here the steps are the same.
const EVEN: usize = STEP * STEPS_PER_DOUBLING;

impl Body {
    /// The length with CR LF, in bytes.
    pub fn full_len(&self) -> u32 {
        self.len
    }
}

impl Default for Bodies {
    fn default() -> Bodies {
        // People like round numbers, and there the CR LF does not count.
        let longest = LARGE - 1 - CR_LF.len();
        let mut lens = vec![0];
        while let Some(&len) = lens.last().filter(|&&len| len < longest) {
            lens.push(len + step_above(len));
        }
        let small = lens.into_iter().map(|len| Shelf::new(len + CR_LF.len()));
        Bodies { small: small.collect(), large: Pages::default(), freed_bytes: 0, kept_bytes: 0 }
    }
}

impl Bodies {
    /// Keeps the bytes of a complete body, CR LF and all. A large one that is owned is not
    /// copied.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn add(&mut self, bytes: Cow<'_, [u8]>) -> Result<Body, TryReserveError> {
        let full_len = bytes.len();
        let key = if full_len < LARGE {
            self.small[shelf_of(full_len)].add(&bytes)?
        } else {
            self.large.try_reserve_one()?;
            let bytes = match bytes {
                // What once held more than this body must not be kept for it.
                Cow::Owned(bytes) if bytes.capacity() - full_len <= full_len / 16 => bytes,
                Cow::Owned(_) | Cow::Borrowed(_) => {
                    let mut own = Vec::new();
                    own.try_reserve_exact(full_len)?;
                    own.extend_from_slice(&bytes);
                    own
                }
            };
            self.large.insert(Rc::new(bytes))
        };
        let len = u32::try_from(full_len).expect("a body is not much longer than 2^30 bytes");
        self.kept_bytes += self.memory_for(full_len);
        Ok(Body { len, key })
    }

    /// What the body consists of, CR LF and all.
    pub fn content(&self, body: &Body) -> Content<'_> {
        let len = body.len as usize;
        if len < LARGE {
            Content::Small(self.small[shelf_of(len)].bytes(body.key, len))
        } else {
            Content::Large(&self.large[body.key])
        }
    }

    /// The bytes, with CR LF.
    pub fn bytes(&self, body: &Body) -> &[u8] {
        self.content(body).bytes()
    }

    /// The body is not needed any more. Says whether a page of memory was freed, which takes a
    /// while.
    pub fn remove(&mut self, body: Body) -> bool {
        let len = body.len as usize;
        self.kept_bytes -= self.memory_for(len);
        if len < LARGE {
            return self.small[shelf_of(len)].remove(body.key);
        }
        self.large.remove(body.key);
        if len < slots::PAGE_BYTES {
            self.freed_bytes += len;
        }
        false
    }

    /// These are all bodies, and no two are the same one. Each comes with the id of its job.
    ///
    /// # Panics
    /// It is not so.
    pub fn check<'a>(&self, kept: impl Iterator<Item = (u64, &'a Body)>) {
        let (mut count, mut sum) = (0, 0_u64);
        for (number, shelf) in self.small.iter().enumerate() {
            // Most widths were never seen.
            if shelf.pages.is_empty() && shelf.slots.page_count() == 0 {
                continue;
            }
            shelf.check();
            count += shelf.slots.len();
            sum = shelf.slots.taken().fold(sum, |sum, key| sum.wrapping_add(mark(number, key)));
        }
        self.large.check(format_args!("the large bodies"));
        count += self.large.len();
        let large = self.large.iter().map(|(key, _)| mark(self.small.len(), key.number()));
        sum = large.fold(sum, u64::wrapping_add);

        let (mut kept_count, mut kept_sum, mut kept_bytes) = (0, 0_u64, 0);
        for (id, body) in kept {
            kept_bytes += self.memory_for(body.len as usize);
            let number = self.check_one(id, body);
            kept_count += 1;
            kept_sum = kept_sum.wrapping_add(mark(number, body.key.number()));
        }
        assert_eq!(count, kept_count, "bodies, and jobs that have one");
        assert_eq!(self.kept_bytes, kept_bytes, "bytes of bodies, as noted and as counted");
        // Without memory for a list of them: the sum of as many large numbers is the same.
        assert_eq!(sum, kept_sum, "two jobs have the same body, and one body has no job");
    }

    /// Says on which shelf it stands; behind all others, if it is large.
    fn check_one(&self, id: u64, body: &Body) -> usize {
        let Body { len, key } = body;
        let is_large = *len as usize >= LARGE;
        let number = if is_large { self.small.len() } else { shelf_of(*len as usize) };
        let is_there = match self.small.get(number) {
            Some(shelf) => shelf.slots.is_taken(key.number()),
            None => self.large.get(*key).is_some_and(|bytes| bytes.len() == *len as usize),
        };
        assert!(is_there, "the body of job {id}, of {len} bytes, is not there: {key:?}");
        assert!(self.bytes(body).ends_with(CR_LF), "the body of job {id} does not end in CR LF");
        number
    }

    /// How many bytes of memory all bodies take. Not counted is what stands empty between them.
    pub fn kept_bytes(&self) -> u64 {
        self.kept_bytes
    }

    /// How many bytes of memory a body of `full_len` bytes takes, CR LF included.
    pub fn memory_for(&self, full_len: usize) -> u64 {
        let bytes = if full_len < LARGE { self.small[shelf_of(full_len)].width } else { full_len };
        bytes as u64
    }

    /// How many bytes have been given to the allocator, not to the system, since this was last
    /// asked.
    pub fn take_freed_bytes(&mut self) -> usize {
        std::mem::take(&mut self.freed_bytes)
    }
}

impl Shelf {
    fn new(width: usize) -> Shelf {
        Shelf { width, slots: Slots::new(slots::page_bits(width)), pages: Vec::new() }
    }

    fn add(&mut self, bytes: &[u8]) -> Result<BodyKey, TryReserveError> {
        let page_bytes = self.slots.page_len() * self.width;
        self.slots.try_reserve_one(&mut self.pages, page_bytes)?;
        let number = self.slots.take();
        let at = self.slots.slot_of(number) * self.width;
        let page = &mut self.pages[self.slots.page_of(number)];
        if at == page.len() {
            // A page fills from its start.
            page.extend_from_slice(bytes);
            page.resize(at + self.width, 0);
        } else {
            page[at..at + bytes.len()].copy_from_slice(bytes);
        }
        Ok(BodyKey::from_number(number))
    }

    fn bytes(&self, key: BodyKey, len: usize) -> &[u8] {
        let number = key.number();
        let at = self.slots.slot_of(number) * self.width;
        &self.pages[self.slots.page_of(number)][at..at + len]
    }

    fn remove(&mut self, key: BodyKey) -> bool {
        let given_up = self.slots.leave(key.number());
        if let Some(page) = given_up {
            self.pages[page] = Vec::new();
        }
        given_up.is_some()
    }

    fn check(&self) {
        let width = self.width;
        self.slots.check(format_args!("the bodies of up to {width} bytes"));
        assert_eq!(self.pages.len(), self.slots.page_count(), "pages, and pages of slots: {width}");
        for (number, page) in self.pages.iter().enumerate() {
            let taken = self.slots.taken_in(number);
            let has_memory = page.capacity() >= self.slots.page_len() * width;
            assert!(
                has_memory == taken.is_some() && (has_memory || page.capacity() == 0),
                "page {number} of bodies of up to {width} bytes has {} bytes, {taken:?} are taken",
                page.capacity()
            );
            assert_eq!(page.len() % width, 0, "a part of a body of up to {width} bytes");
        }
        for key in self.slots.taken() {
            let page = &self.pages[self.slots.page_of(key)];
            let is_filled = (self.slots.slot_of(key) + 1) * width <= page.len();
            assert!(is_filled, "body {key} of up to {width} bytes is taken, but was never there");
        }
    }
}

/// A large number for each body, seldom the same for two.
fn mark(shelf: usize, key: u32) -> u64 {
    scatter((shelf as u64) << u32::BITS | u64::from(key))
}

/// How much longer than `len` bytes the longest body of the next shelf is.
fn step_above(len: usize) -> usize {
    if len <= EVEN { STEP } else { (1 << len.ilog2()) / STEPS_PER_DOUBLING }
}

/// The shelf for small bodies of this length with CR LF.
fn shelf_of(full_len: usize) -> usize {
    let len = full_len - CR_LF.len();
    if len <= EVEN {
        return len.div_ceil(STEP);
    }
    let step = step_above(len - 1);
    let doublings = (step / STEP).ilog2() as usize;
    // As many steps as have been made below this doubling, and those within it.
    (doublings * STEPS_PER_DOUBLING) + len.div_ceil(step)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn every_length_has_the_narrowest_shelf_that_is_wide_enough() {
        let bodies = Bodies::default();
        let width_of = |shelf: usize| bodies.small[shelf].width;
        for full_len in 2..LARGE {
            let shelf = shelf_of(full_len);
            assert!(width_of(shelf) >= full_len, "{full_len} bytes on shelf {shelf}");
            assert!(shelf == 0 || width_of(shelf - 1) < full_len, "{full_len} bytes on {shelf}");
            let wasted = width_of(shelf) - full_len;
            assert!(wasted < STEP.max(full_len / STEPS_PER_DOUBLING + 1));
        }
        assert_eq!(bodies.small.len(), shelf_of(LARGE - 1) + 1);
        assert_eq!(width_of(shelf_of(64 + 2)), 64 + 2);
        assert_eq!(width_of(shelf_of(1024 + 2)), 1024 + 2);
    }

    #[test]
    fn bodies_stay_what_they_are_while_others_come_and_go() {
        let mut random = fastrand::Rng::with_seed(8);
        let mut bodies = Bodies::default();
        let mut model: BTreeMap<u32, (Body, Vec<u8>)> = BTreeMap::new();
        for step in 0..40_000 {
            let filling = (step / 8_000) % 2 == 0;
            if random.u8(..10) < if filling { 8 } else { 2 } {
                let len = 2 + (random.usize(..6_000) >> random.u32(..10));
                let bytes = [vec![random.u8(..); len - 2], CR_LF.to_vec()].concat();
                let body = if random.bool() {
                    bodies.add(Cow::Borrowed(&bytes))
                } else {
                    bodies.add(Cow::Owned(bytes.clone()))
                };
                model.insert(step, (body.expect("the test needs little memory"), bytes));
            } else if let Some(name) = random.choice(model.keys().copied()) {
                let (body, bytes) = model.remove(&name).expect("it was just chosen");
                assert_eq!(bodies.bytes(&body), bytes);
                assert_eq!(bodies.content(&body).len(), bytes.len() - 2);
                bodies.remove(body);
            }
            if step % 100 == 0 {
                bodies.check(model.iter().map(|(&name, (body, _))| (name.into(), body)));
            }
        }
        for (_, (body, bytes)) in model {
            assert_eq!(bodies.bytes(&body), bytes);
            bodies.remove(body);
        }
        let pages = bodies.small.iter().flat_map(|shelf| &shelf.pages);
        let left = pages.filter(|page| page.capacity() > 0).count();
        assert!(left <= bodies.small.len(), "{left} pages are left");
    }

    #[test]
    fn an_owned_large_body_is_not_copied() {
        let bytes = vec![b'x'; LARGE];
        let address = bytes.as_ptr();
        let mut bodies = Bodies::default();
        let body = bodies.add(Cow::Owned(bytes)).expect("the test needs little memory");
        assert_eq!(bodies.bytes(&body).as_ptr(), address);
        bodies.remove(body);
        assert_eq!(bodies.take_freed_bytes(), LARGE);
    }

    #[test]
    fn a_body_keeps_no_memory_that_was_for_another() {
        let mut bytes = Vec::with_capacity(100 * LARGE);
        bytes.resize(LARGE, b'x');
        let mut bodies = Bodies::default();
        let body = bodies.add(Cow::Owned(bytes)).expect("the test needs little memory");
        assert!(bodies.large[body.key].capacity() < 2 * LARGE);
    }
}
