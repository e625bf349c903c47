//! The bytes of jobs, as clients sent them: opaque, and never changed once complete.
//!
//! A body is kept together with the CR LF that ends it on the wire, so that a reply is a
//! header and then exactly these bytes.
//!
//! Bodies stand side by side in pages, one kind of page for each width. So a body costs little
//! more than its bytes, a large one is read from the socket into its place, and the memory of a
//! backlog goes back to the system page by page as it drains, whatever the allocator does.
//!
//! Small bodies are copied into replies. A large one is shared with the replies that carry it: its
//! slot is left when the last of its holders, jobs and replies, is gone. So deleting the job while
//! a slow client still receives it is harmless.
//!
//! A page of small bodies is freed when its last slot is left. Pages of large bodies are expensive
//! to make and to free, and are kept for the next bodies. Every [`REAP_PAUSE`] the pages that stayed
//! empty since the last check are marked, and at most 1 MiB of them is freed in each iteration.

use crate::engine::collections::hash_index::mix;
use crate::engine::collections::slab::{self, SlotAllocator};
use crate::engine::keys::{BodyKey, Key};
use crate::engine::text::CR_LF;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// A hold on the bytes of one job. Each one is given back to [`Bodies::remove`] in the end.
#[derive(Debug)]
pub struct Body {
    /// With CR LF.
    len: u32,
    /// Its key in the shelf of its width.
    key: BodyKey,
}

/// All bodies.
#[derive(Debug)]
pub struct Bodies {
    /// By width.
    classes: Vec<SizeClass>,
    /// Bytes of all pages, as far as bodies have ever filled them.
    taken_bytes: u64,
    /// How many pages of large bodies have no body.
    empty_pages: usize,
    /// When the next check for empty pages is due; `None` while there are none.
    reap_at: Option<Nanos>,
    /// Empty pages that are to be freed.
    surplus_pages: usize,
    /// Pages that were given up and are freed piece by piece; they count no more.
    given_up: Vec<Vec<u8>>,
}

/// Bodies of up to a certain width.
#[derive(Debug)]
struct SizeClass {
    width: usize,
    slots: SlotAllocator,
    /// Each has room for a whole page, or for nothing while it is absent. The bytes up to the
    /// vector's length have been written to.
    pages: Vec<Vec<u8>>,
    /// For each of `pages`.
    uses: Vec<PageUse>,
    /// The smallest number of empty pages since the last check.
    least_empty: usize,
    /// Empty pages that are to be freed.
    surplus: usize,
}

#[derive(Debug, Default)]
struct PageUse {
    /// Bytes of the page that have a part in [`Bodies::taken_bytes`].
    taken_bytes: usize,
    /// How many holds there are on each slot, where bodies are shared.
    holds: Vec<u32>,
}

/// From this length on, with CR LF, sharing a body costs less than copying it into a reply. All
/// bodies of one width are on the same side.
pub const LARGE: usize = 4096 + CR_LF.len() + 1;

/// The interval between two checks for empty pages of large bodies.
pub const REAP_PAUSE: Nanos = Nanos::from_millis(200);
/// At most this many bytes of empty pages are freed in one iteration: about 0.1 ms.
const REAPED_AT_ONCE: usize = 1024 * 1024;

/// From one width to the next it is eight bytes, or a sixteenth to a thirty-second.
const STEP: usize = 8;
const STEPS_PER_DOUBLING: usize = 16;
/// Up to here the steps are the same.
const EVEN: usize = STEP * STEPS_PER_DOUBLING;
/// A body of more bytes has a page for itself. Each such width is twice the one before: the end of
/// the page is never written to and takes no memory.
const ALONE: usize = slab::PAGE_BYTES;
/// The largest body, without CR LF: the largest `-z`.
const LONGEST: usize = 1 << 30;

impl Body {
    /// The length with CR LF, in bytes.
    pub fn full_len(&self) -> u32 {
        self.len
    }

    /// Returns whether it is shared with replies, not copied.
    pub fn is_large(&self) -> bool {
        self.len as usize >= LARGE
    }
}

impl Default for Bodies {
    fn default() -> Bodies {
        let mut classes = vec![SizeClass::new(CR_LF.len())];
        let mut len = 0;
        // People like round numbers, and there the CR LF does not count.
        while len < LONGEST {
            len += class_step(len);
            classes.push(SizeClass::new(len + CR_LF.len()));
        }
        Bodies {
            classes,
            taken_bytes: 0,
            empty_pages: 0,
            reap_at: None,
            surplus_pages: 0,
            given_up: Vec::new(),
        }
    }
}

impl Bodies {
    /// Stores the bytes of a complete body, with its CR LF.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn add(&mut self, bytes: &[u8]) -> Result<Body, TryReserveError> {
        let body = self.begin(bytes.len())?;
        self.space(&body, 0, bytes.len()).copy_from_slice(bytes);
        Ok(body)
    }

    /// Allocates room for a body that is still to arrive; [`Bodies::space`] returns where.
    ///
    /// # Errors
    /// There is no memory for it.
    ///
    /// # Panics
    /// The body would have more than `2^30 + 2` bytes.
    pub fn begin(&mut self, full_len: usize) -> Result<Body, TryReserveError> {
        let class = &mut self.classes[class_of(full_len)];
        let empty_before = class.slots.empty_count();
        let taken = class.take(full_len);
        if class.is_shared() {
            // Where a page was made and then memory was short, there is one more.
            self.empty_pages = self.empty_pages + class.slots.empty_count() - empty_before;
        }
        let (key, growth) = taken?;
        self.taken_bytes += growth;
        let len = u32::try_from(full_len).expect("a body is not much longer than 2^30 bytes");
        Ok(Body { len, key })
    }

    /// Returns the bytes `from` to `to` of a body that is still arriving. What is in them is
    /// arbitrary until it was written to.
    pub fn space(&mut self, body: &Body, from: usize, to: usize) -> &mut [u8] {
        self.classes[class_of(body.len as usize)].space(body.key, from, to)
    }

    /// The bytes, with CR LF.
    pub fn bytes(&self, body: &Body) -> &[u8] {
        let len = body.len as usize;
        self.classes[class_of(len)].bytes(body.key, len)
    }

    /// Returns another hold on a large body.
    pub fn share(&mut self, body: &Body) -> Body {
        let Body { len, key } = *body;
        *self.classes[class_of(len as usize)].holds_mut(key) += 1;
        Body { len, key }
    }

    /// The body is not needed any more by this holder. Returns whether a page of memory was freed,
    /// which takes a while.
    pub fn remove(&mut self, body: Body) -> bool {
        let class = &mut self.classes[class_of(body.len as usize)];
        if body.is_large() {
            let holds = class.holds_mut(body.key);
            *holds -= 1;
            if *holds == 0 {
                let empty_before = class.slots.empty_count();
                class.slots.free_keeping_page(body.key.number());
                self.empty_pages += class.slots.empty_count() - empty_before;
            }
            return false;
        }
        let Some(page) = class.slots.free(body.key.number()) else { return false };
        let (_, taken_bytes) = class.free(page);
        self.taken_bytes -= taken_bytes;
        true
    }

    // ---- Memory ----

    /// How many bytes of memory all bodies take, with what stands empty between them.
    pub fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// How many bytes more a body of `full_len` bytes would take, CR LF included: none where one of
    /// its width has been.
    pub fn growth_for(&self, full_len: usize) -> u64 {
        self.classes[class_of(full_len)].growth_for(full_len) as u64
    }

    /// Gives up empty pages until bodies take at least `bytes` less, or none is left. Returns whether
    /// any was given up. Their memory is freed in the next iterations, faster than bodies arrive.
    pub fn free_empty(&mut self, bytes: u64) -> bool {
        let goal = self.taken_bytes.saturating_sub(bytes);
        let before = self.taken_bytes;
        for class in &mut self.classes {
            while self.taken_bytes > goal
                && let Some(page) = class.slots.unmap_empty()
            {
                let (bytes, taken_bytes) = class.free(page);
                if self.given_up.try_reserve(1).is_ok() {
                    self.given_up.push(bytes);
                }
                self.taken_bytes -= taken_bytes;
                self.empty_pages -= usize::from(class.is_shared());
                self.surplus_pages -= class.surplus.min(1);
                class.surplus = class.surplus.saturating_sub(1);
                class.least_empty = class.least_empty.min(class.slots.empty_count());
            }
        }
        self.taken_bytes < before
    }

    /// Returns when [`Bodies::reap`] has something to do.
    pub fn next_due(&self) -> Option<Nanos> {
        let is_freeing = self.surplus_pages > 0 || !self.given_up.is_empty();
        let is_news = self.reap_at.is_none() && self.empty_pages > 0;
        if is_freeing || is_news { Some(Nanos::ZERO) } else { self.reap_at }
    }

    /// Frees a part of the pages that have been empty for some time.
    pub fn reap(&mut self, now: Nanos) {
        if self.surplus_pages > 0 || !self.given_up.is_empty() {
            self.free_some();
        } else if self.reap_at.is_some_and(|at| at <= now) {
            self.look_for_surplus(now);
        } else if self.reap_at.is_none() && self.empty_pages > 0 {
            self.reap_at = Some(now + REAP_PAUSE);
        }
    }

    fn wide(&mut self) -> &mut [SizeClass] {
        &mut self.classes[class_of(LARGE)..]
    }

    /// Marks the pages that stayed empty since the last check as surplus.
    fn look_for_surplus(&mut self, now: Nanos) {
        let mut surplus = 0;
        for class in self.wide() {
            let empty = class.slots.empty_count();
            class.surplus = class.least_empty.min(empty);
            class.least_empty = empty - class.surplus;
            surplus += class.surplus;
        }
        self.surplus_pages = surplus;
        self.reap_at = (self.empty_pages > 0).then(|| now + REAP_PAUSE);
    }

    /// Frees at most [`REAPED_AT_ONCE`] bytes. A page is freed from its end: to free a gigabyte at
    /// once would take 0.1 s.
    fn free_some(&mut self) {
        let mut left = REAPED_AT_ONCE;
        let mut class = class_of(LARGE);
        while left > 0 {
            let Some(mut page) = self.given_up.pop().or_else(|| self.give_up_surplus(&mut class))
            else {
                break;
            };
            let freed = page.len().min(left);
            page.truncate(page.len() - freed);
            // A page of which nothing was touched costs little, but not nothing.
            left -= freed.max(slab::PAGE_BYTES / 4).min(left);
            if !page.is_empty() {
                page.shrink_to_fit();
                if self.given_up.try_reserve(1).is_ok() {
                    self.given_up.push(page);
                }
            }
        }
    }

    /// Gives up the next page that is surplus, looking from `class` on.
    fn give_up_surplus(&mut self, class: &mut usize) -> Option<Vec<u8>> {
        while self.surplus_pages > 0 {
            *class += self.classes[*class..].iter().take_while(|it| it.surplus == 0).count();
            let Some(found) = self.classes.get_mut(*class) else {
                self.surplus_pages = 0;
                break;
            };
            found.surplus -= 1;
            self.surplus_pages -= 1;
            let Some(page) = found.slots.unmap_empty() else { continue };
            self.empty_pages -= 1;
            found.least_empty = found.least_empty.min(found.slots.empty_count());
            let (bytes, taken_bytes) = found.free(page);
            self.taken_bytes -= taken_bytes;
            return Some(bytes);
        }
        None
    }

    // ---- Checking ----

    /// These are all holds on bodies, and no two are the same one unless it is shared. Each comes
    /// with the id of a job, or with 0.
    ///
    /// # Panics
    /// It is not so.
    pub fn check<'a>(&self, kept: impl Iterator<Item = (u64, &'a Body)>) {
        let (mut count, mut sum, mut taken_bytes) = (0, 0_u64, 0);
        for (number, class) in self.classes.iter().enumerate() {
            // Most widths were never seen.
            if class.pages.is_empty() && class.slots.page_count() == 0 {
                continue;
            }
            taken_bytes += class.check();
            for key in class.slots.used_slots() {
                let holds = class.holds(key);
                count += u64::from(holds);
                sum = sum.wrapping_add(fingerprint(number, key).wrapping_mul(holds.into()));
            }
        }
        assert_eq!(self.taken_bytes, taken_bytes, "bytes of bodies, as noted and as counted");
        let large = &self.classes[class_of(LARGE)..];
        let empty = large.iter().map(|class| class.slots.empty_count()).sum::<usize>();
        assert_eq!(self.empty_pages, empty, "empty pages, as noted and as counted");
        let surplus = self.classes.iter().map(|class| class.surplus).sum::<usize>();
        assert_eq!(self.surplus_pages, surplus, "surplus pages, as noted and as counted");

        let (mut kept_count, mut kept_sum) = (0, 0_u64);
        for (id, body) in kept {
            let number = self.check_one(id, body);
            kept_count += 1;
            kept_sum = kept_sum.wrapping_add(fingerprint(number, body.key.number()));
        }
        assert_eq!(count, kept_count, "holds on bodies, and jobs and replies that have one");
        // Without memory for a list of them: the sum of as many large numbers is the same.
        assert_eq!(sum, kept_sum, "two jobs have the same body, and one body has no job");
    }

    /// Returns the number of the shelf on which it stands.
    fn check_one(&self, id: u64, body: &Body) -> usize {
        let Body { len, key } = body;
        let number = class_of(*len as usize);
        let is_there = self.classes[number].slots.is_used(key.number());
        assert!(is_there, "the body of job {id}, of {len} bytes, is not there: {key:?}");
        let ends_well = id == 0 || self.bytes(body).ends_with(CR_LF);
        assert!(ends_well, "the body of job {id} does not end in CR LF");
        number
    }
}

impl SizeClass {
    fn new(width: usize) -> SizeClass {
        let page_bits = if width > ALONE { 0 } else { slab::page_bits(width) };
        let slots = SlotAllocator::new(page_bits);
        SizeClass { width, slots, pages: Vec::new(), uses: Vec::new(), least_empty: 0, surplus: 0 }
    }

    fn is_shared(&self) -> bool {
        self.width >= LARGE
    }

    /// Takes a slot; returns also how many bytes more are taken by that.
    fn take(&mut self, full_len: usize) -> Result<(BodyKey, u64), TryReserveError> {
        let page_len = self.slots.page_len();
        self.slots.try_reserve_one(&mut self.pages, page_len * self.width)?;
        let missing = self.pages.len() - self.uses.len();
        self.uses.try_reserve(missing)?;
        self.uses.resize_with(self.pages.len(), PageUse::default);
        if self.is_shared() {
            let (page, _) = self.slots.next_page().expect("a slot was just reserved");
            let holds = &mut self.uses[page].holds;
            holds.try_reserve_exact(page_len - holds.len())?;
            holds.resize(page_len, 0);
        }
        let number = self.slots.alloc();
        let (page, slot) = (self.slots.page_of(number), self.slots.slot_of(number));
        if self.is_shared() {
            self.uses[page].holds[slot] = 1;
            let empty = self.slots.empty_count();
            self.least_empty = self.least_empty.min(empty);
        }
        let end = slot * self.width + self.extent(full_len);
        let taken_bytes = &mut self.uses[page].taken_bytes;
        let growth = end.saturating_sub(*taken_bytes);
        *taken_bytes += growth;
        Ok((BodyKey::from_number(number), growth as u64))
    }

    /// How many bytes of its slot a body touches.
    fn extent(&self, full_len: usize) -> usize {
        if self.is_shared() { full_len } else { self.width }
    }

    fn growth_for(&self, full_len: usize) -> usize {
        let (taken_bytes, slots) = match self.slots.next_page() {
            Some((page, slots)) => (self.uses.get(page).map_or(0, |it| it.taken_bytes), slots),
            None => (0, 0),
        };
        // A slot that was left comes before those that were never taken.
        ((slots * self.width) + self.extent(full_len)).saturating_sub(taken_bytes)
    }

    fn space(&mut self, key: BodyKey, from: usize, to: usize) -> &mut [u8] {
        let number = key.number();
        let at = self.slots.slot_of(number) * self.width;
        let page = &mut self.pages[self.slots.page_of(number)];
        if at + to > page.len() {
            // Room was reserved. The system's zeros would do, but a vector must write its own.
            page.resize(at + to, 0);
        }
        &mut page[at + from..at + to]
    }

    fn bytes(&self, key: BodyKey, len: usize) -> &[u8] {
        let number = key.number();
        let at = self.slots.slot_of(number) * self.width;
        &self.pages[self.slots.page_of(number)][at..at + len]
    }

    fn holds(&self, number: u32) -> u32 {
        let holds = &self.uses[self.slots.page_of(number)].holds;
        holds.get(self.slots.slot_of(number)).copied().unwrap_or(1)
    }

    fn holds_mut(&mut self, key: BodyKey) -> &mut u32 {
        let number = key.number();
        &mut self.uses[self.slots.page_of(number)].holds[self.slots.slot_of(number)]
    }

    /// Takes out the memory of a page that was given up, and how much of it was counted.
    fn free(&mut self, page: usize) -> (Vec<u8>, u64) {
        let PageUse { taken_bytes, .. } = std::mem::take(&mut self.uses[page]);
        (std::mem::take(&mut self.pages[page]), taken_bytes as u64)
    }

    /// Returns how many bytes are taken.
    fn check(&self) -> u64 {
        let width = self.width;
        self.slots.check(format_args!("the bodies of up to {width} bytes"));
        assert_eq!(self.pages.len(), self.slots.page_count(), "pages, and pages of slots: {width}");
        for (number, page) in self.pages.iter().enumerate() {
            let taken = self.slots.used_in(number);
            let has_memory = page.capacity() >= self.slots.page_len() * width;
            assert!(
                has_memory == taken.is_some() && (has_memory || page.capacity() == 0),
                "page {number} of bodies of up to {width} bytes has {} bytes, {taken:?} are taken",
                page.capacity()
            );
            let counted = self.uses.get(number).map_or(0, |it| it.taken_bytes);
            assert!(page.len() <= counted, "{} bytes are used of {counted}: {width}", page.len());
        }
        let (least, empty) = (self.least_empty, self.slots.empty_count());
        assert!(
            least <= empty || !self.is_shared(),
            "{empty} empty pages, {least} at least: {width}"
        );
        for key in self.slots.used_slots() {
            assert!(self.holds(key) > 0, "body {key} of up to {width} bytes has no holder");
        }
        self.uses.iter().map(|it| it.taken_bytes as u64).sum()
    }
}

/// A large number for each body, seldom the same for two.
fn fingerprint(class: usize, key: u32) -> u64 {
    mix((class as u64) << u32::BITS | u64::from(key))
}

/// How much longer than `len` bytes the longest body of the next shelf is.
fn class_step(len: usize) -> usize {
    match len {
        0..=EVEN => STEP,
        ALONE.. => len,
        _ => (1 << len.ilog2()) / STEPS_PER_DOUBLING,
    }
}

/// The shelf for bodies of this length with CR LF.
fn class_of(full_len: usize) -> usize {
    let len = full_len - CR_LF.len();
    if len <= EVEN {
        return len.div_ceil(STEP);
    }
    let step = class_step((len - 1).min(ALONE - 1));
    let doublings = (step / STEP).ilog2() as usize;
    // As many steps as have been made below this doubling, and those within it.
    let within = (doublings * STEPS_PER_DOUBLING) + len.min(ALONE).div_ceil(step);
    let alone = len.div_ceil(ALONE).next_power_of_two().ilog2() as usize;
    within + alone
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn every_length_has_the_narrowest_shelf_that_is_wide_enough() {
        let bodies = Bodies::default();
        let width_of = |class: usize| bodies.classes[class].width;
        let check = |full_len: usize| {
            let class = class_of(full_len);
            assert!(width_of(class) >= full_len, "{full_len} bytes on shelf {class}");
            assert!(class == 0 || width_of(class - 1) < full_len, "{full_len} bytes on {class}");
            let wasted = width_of(class) - full_len;
            let is_alone = width_of(class) > ALONE + CR_LF.len();
            assert!(is_alone || wasted < STEP.max(full_len / STEPS_PER_DOUBLING + 1));
        };
        (2..2 * ALONE).for_each(check);
        for bits in ALONE.ilog2()..=30 {
            for less in 0..4 {
                check((1 << bits) + 2 - less);
            }
        }
        assert_eq!(bodies.classes.len(), class_of(LONGEST + CR_LF.len()) + 1);
        assert_eq!(width_of(class_of(64 + 2)), 64 + 2);
        assert_eq!(width_of(class_of(1024 + 2)), 1024 + 2);
    }

    #[test]
    fn bodies_stay_what_they_are_while_others_come_and_go() {
        let mut random = fastrand::Rng::with_seed(8);
        let mut bodies = Bodies::default();
        let mut model: BTreeMap<u32, (Body, Vec<u8>)> = BTreeMap::new();
        for step in 0..40_000 {
            let filling = (step / 8_000) % 2 == 0;
            if random.u8(..10) < if filling { 8 } else { 2 } {
                let len = 2 + (random.usize(..20_000) >> random.u32(..10));
                let bytes = [vec![random.u8(..); len - 2], CR_LF.to_vec()].concat();
                let growth = bodies.growth_for(len);
                let before = bodies.taken_bytes();
                let body = bodies.add(&bytes).expect("the test needs little memory");
                assert!(bodies.taken_bytes() <= before + growth);
                model.insert(step, (body, bytes));
            } else if let Some(name) = random.choice(model.keys().copied()) {
                let (body, bytes) = model.remove(&name).expect("it was just chosen");
                assert_eq!(bodies.bytes(&body), bytes);
                if body.is_large() && random.bool() {
                    let other = bodies.share(&body);
                    bodies.remove(body);
                    assert_eq!(bodies.bytes(&other), bytes);
                    bodies.remove(other);
                } else {
                    bodies.remove(body);
                }
            }
            if step % 100 == 0 {
                bodies.reap(Nanos::from_millis(u64::from(step)));
                bodies.check(model.iter().map(|(_, (body, _))| (1, body)));
            }
        }
        for (_, (body, bytes)) in std::mem::take(&mut model) {
            assert_eq!(bodies.bytes(&body), bytes);
            bodies.remove(body);
        }
        let mut now = Nanos::from_secs(1_000);
        while let Some(due) = bodies.next_due() {
            now = now.max(due);
            bodies.reap(now);
            bodies.check(std::iter::empty());
        }
        let pages = bodies.classes.iter().flat_map(|class| &class.pages);
        let left = pages.filter(|page| page.capacity() > 0).count();
        assert!(left <= class_of(LARGE), "{left} pages are left");
    }

    #[test]
    fn a_body_arrives_in_its_place() {
        let mut bodies = Bodies::default();
        let first = bodies.begin(3 * LARGE).expect("the test needs little memory");
        let second = bodies.begin(3 * LARGE).expect("the test needs little memory");
        for (from, to) in [(0, 10), (10, LARGE), (LARGE, 3 * LARGE)] {
            bodies.space(&second, from, to).fill(b'b');
            bodies.space(&first, from, to).fill(b'a');
        }
        assert_eq!(bodies.bytes(&first), [b'a'; 3 * LARGE]);
        assert_eq!(bodies.bytes(&second), [b'b'; 3 * LARGE]);
        bodies.check([(0, &first), (0, &second)].into_iter());
    }

    #[test]
    fn pages_that_are_needed_again_and_again_stay_and_others_go_in_steps() {
        const LEN: usize = 500_000;
        let mut bodies = Bodies::default();
        let mut now = Nanos::from_secs(1);
        let mut held: Vec<Body> = (0..40).map(|_| touched(&mut bodies, LEN)).collect();
        held.drain(..).for_each(|body| assert!(!bodies.remove(body)));
        assert_eq!(bodies.taken_bytes(), 40 * LEN as u64);
        // Half of them are in use time and again.
        for _ in 0..10 {
            held.extend((0..20).map(|_| touched(&mut bodies, LEN)));
            let before = bodies.taken_bytes();
            bodies.reap(now);
            assert!(before - bodies.taken_bytes() <= (REAPED_AT_ONCE + LEN) as u64);
            held.drain(..).for_each(|body| assert!(!bodies.remove(body)));
            now = now + REAP_PAUSE;
            bodies.check(std::iter::empty());
        }
        while bodies.next_due() == Some(Nanos::ZERO) {
            bodies.reap(now);
        }
        assert_eq!(bodies.taken_bytes(), 20 * LEN as u64);
        assert!(bodies.free_empty(1));
        assert_eq!(bodies.taken_bytes(), 19 * LEN as u64);
        assert_eq!(bodies.next_due(), Some(Nanos::ZERO));
    }

    fn touched(bodies: &mut Bodies, len: usize) -> Body {
        let body = bodies.begin(len).expect("the test needs little memory");
        bodies.space(&body, 0, len).fill(b'x');
        body
    }
}
