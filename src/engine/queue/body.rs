//! The bytes of jobs, as clients sent them: opaque, and never changed once complete.
//!
//! A body is stored with the CR LF that ends it on the wire. A reply is a header and then these
//! bytes.
//!
//! Bodies are stored in the slots of pages. All slots of a page have the same width: a size class.
//! So a body takes little more memory than its bytes, and a large one is read from the socket into
//! its slot. The memory of a backlog goes back to the system page by page, whatever the allocator
//! does.
//!
//! Small bodies are copied into replies. A large body is shared with the replies that carry it: its
//! slot is freed with the last reference, of a job or of a reply. So a job can be deleted while a
//! slow client still receives its body.
//!
//! A page of small bodies is freed with its last slot. Pages of large bodies are expensive to
//! allocate and to free, so they are kept for the next bodies. Each [`REAP_INTERVAL`], the pages
//! that stayed empty since the last check become surplus. Each iteration then frees a bounded
//! part of them.

use crate::engine::collections::slab::{self, Slots};
use crate::engine::headroom::NoMemory;
use crate::engine::keys::{BodyKey, Key};
use crate::engine::text::CR_LF;
use crate::engine::time::Nanos;
use std::collections::BTreeMap;

/// A reference to the bytes of one job. Each one must be passed to [`Bodies::remove`] in the end.
#[derive(Debug)]
pub struct Body {
    /// With CR LF.
    len: u32,
    /// The key in the size class of `len`; [`BodyKey::COLD`] if the bytes are only in the binlog.
    key: BodyKey,
}

/// All bodies.
pub struct Bodies {
    /// In the order of their widths.
    classes: Vec<SizeClass>,
    /// The bytes of all pages that bodies have ever filled.
    taken_bytes: u64,
    /// The time of the next check for surplus pages; [`Nanos::NEVER`] while no page of large bodies is empty.
    reap_at: Nanos,
    /// Pages that are freed in parts; no other count includes them.
    pages_to_free: Vec<Vec<u8>>,
}

/// The bodies of up to `width` bytes that are longer than the previous class allows.
struct SizeClass {
    width: usize,
    slots: Slots,
    pages: Vec<Page>,
    /// The minimum number of empty pages since the last check.
    min_empty: usize,
}

#[derive(Debug, Default)]
struct Page {
    /// The capacity is that of the whole page, or 0 while it is unmapped. The bytes up to the length
    /// were written.
    bytes: Vec<u8>,
    /// The bytes that [`Bodies::taken_bytes`] includes.
    taken_bytes: usize,
    /// The number of references to each slot; empty if the bodies are small.
    ref_counts: Vec<u32>,
}

/// From this length on, with CR LF, sharing a body costs less than copying it into a reply. No size
/// class has bodies of both kinds.
pub const LARGE: usize = 4096 + CR_LF.len() + 1;

/// The interval between two checks for surplus pages of large bodies.
const REAP_INTERVAL: Nanos = Nanos::from_millis(200);

/// A check unmaps at most this many pages, in 0.1 ms. The next one follows when they are freed.
const MOST_UNMAPPED: usize = 1024;

/// Widths grow by 8 bytes, and above [`LINEAR_UP_TO`] by 1/32 to 1/16.
const STEP: usize = 8;
const STEPS_PER_DOUBLING: usize = 16;
/// Up to this width all steps are 8 bytes.
const LINEAR_UP_TO: usize = STEP * STEPS_PER_DOUBLING;
/// A longer body has a page of its own. Each of these widths is twice the previous one: the end of
/// the page is never written and takes no memory.
const OWN_PAGE_ABOVE: usize = slab::PAGE_BYTES;
/// The length of the CR LF at the end of each body, in bytes.
const CR_LF_LEN: u32 = 2;
/// The maximum length of a body in bytes, without CR LF: the maximum of `-z`.
const MAX_BODY_LEN: usize = 1 << 30;

impl Body {
    /// Returns a body whose bytes are only in the binlog. `full_len` includes the CR LF.
    pub fn cold(full_len: u32) -> Body {
        Body { len: full_len, key: BodyKey::COLD }
    }

    /// Returns whether its bytes are only in the binlog.
    pub fn is_cold(&self) -> bool {
        self.key == BodyKey::COLD
    }

    /// Returns the length with CR LF, in bytes.
    pub fn full_len(&self) -> u32 {
        self.len
    }

    /// Returns the length without CR LF, in bytes.
    pub fn content_len(&self) -> u32 {
        self.len - CR_LF_LEN
    }

    /// Returns whether replies share the body instead of copying it.
    pub fn is_large(&self) -> bool {
        self.len as usize >= LARGE
    }
}

impl Default for Bodies {
    fn default() -> Bodies {
        let mut classes = vec![SizeClass::new(CR_LF.len())];
        let mut len = 0;
        // Typical lengths are round numbers without CR LF.
        while len < MAX_BODY_LEN {
            len += class_step(len);
            classes.push(SizeClass::new(len + CR_LF.len()));
        }
        Bodies { classes, taken_bytes: 0, reap_at: Nanos::NEVER, pages_to_free: Vec::new() }
    }
}

impl Bodies {
    /// Stores a complete body, with its CR LF.
    pub fn add(&mut self, bytes: &[u8]) -> Result<Body, NoMemory> {
        self.free_behind(bytes.len());
        let (body, class) = self.alloc(bytes.len())?;
        class.bytes_mut(body.key, 0, bytes.len()).copy_from_slice(bytes);
        Ok(body)
    }

    /// Allocates the slot of a body that is about to arrive; [`Bodies::bytes_mut`] returns its
    /// bytes.
    ///
    /// # Panics
    /// `full_len` is above `2^30 + 2`.
    pub fn begin(&mut self, full_len: usize) -> Result<Body, NoMemory> {
        Ok(self.alloc(full_len)?.0)
    }

    fn alloc(&mut self, full_len: usize) -> Result<(Body, &mut SizeClass), NoMemory> {
        let class = &mut self.classes[class_of(full_len)];
        let (key, growth) = class.alloc(full_len)?;
        self.taken_bytes += growth;
        let len = u32::try_from(full_len).expect("a body of more than 2^30 bytes");
        Ok((Body { len, key }, class))
    }

    /// Returns the bytes `from` to `to` of a body that is still arriving. Their values are
    /// arbitrary until they are written.
    pub fn bytes_mut(&mut self, body: &Body, from: usize, to: usize) -> &mut [u8] {
        self.classes[class_of(body.len as usize)].bytes_mut(body.key, from, to)
    }

    /// Returns the bytes, with CR LF.
    ///
    /// # Panics
    /// The body is cold.
    pub fn bytes(&self, body: &Body) -> &[u8] {
        let len = body.len as usize;
        self.classes[class_of(len)].bytes(body.key, len)
    }

    /// Returns another reference to a large body.
    pub fn share(&mut self, body: &Body) -> Body {
        let Body { len, key } = *body;
        *self.classes[class_of(len as usize)].ref_count_mut(key) += 1;
        Body { len, key }
    }

    /// Drops a reference to a body. Returns whether this freed a page, which takes about 32 units
    /// of work.
    pub fn remove(&mut self, body: Body) -> bool {
        if body.is_cold() {
            return false;
        }
        let class = &mut self.classes[class_of(body.len as usize)];
        let number = body.key.number();
        let (page, slot) = class.slots.position(number);
        if body.is_large() {
            let ref_count = &mut class.pages[page].ref_counts[slot];
            *ref_count -= 1;
            if *ref_count == 0 {
                class.slots.free(number);
                if class.slots.set_aside(page) && self.reap_at == Nanos::NEVER {
                    self.reap_at = Nanos::ZERO;
                }
            }
            return false;
        }
        let is_surplus = class.slots.free(number);
        if is_surplus {
            class.slots.unmap(page);
            self.taken_bytes -= std::mem::take(&mut class.pages[page]).taken_bytes as u64;
        }
        is_surplus
    }

    // ---- Memory ----

    /// Returns the memory of all bodies in bytes, with the free slots between them.
    pub fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// Returns the bytes by which a body of `full_len` bytes, with CR LF, would increase
    /// [`Bodies::taken_bytes`]: 0 if there is a free slot for it.
    pub fn growth_for(&self, full_len: usize) -> u64 {
        self.classes[class_of(full_len)].growth_for(full_len) as u64
    }

    /// Unmaps empty pages until bodies take at least `bytes` less, or no page is empty. Returns
    /// whether it unmapped any. They are freed in parts, faster than bodies arrive.
    pub fn free_empty(&mut self, bytes: u64) -> bool {
        let before = self.taken_bytes;
        for class in 0..self.classes.len() {
            while before - self.taken_bytes < bytes && self.unmap_empty(class) {}
        }
        self.taken_bytes < before
    }

    /// Unmaps an empty page of a class, which is freed in parts. Returns `false` if there is none.
    fn unmap_empty(&mut self, class: usize) -> bool {
        let class = &mut self.classes[class];
        let Some(page) = class.slots.unmap_empty() else { return false };
        let Page { bytes, taken_bytes, .. } = std::mem::take(&mut class.pages[page]);
        class.min_empty = class.min_empty.min(class.slots.empty_count());
        self.taken_bytes -= taken_bytes as u64;
        self.free_in_steps(bytes);
        true
    }

    /// Returns the time when [`Bodies::reap`] has something to do.
    pub fn next_due(&self) -> Nanos {
        if self.pages_to_free.is_empty() { self.reap_at } else { Nanos::ZERO }
    }

    /// Frees at most `most_bytes` of unmapped pages, or looks for surplus pages if that is due.
    pub fn reap(&mut self, most_bytes: usize, now: Nanos) {
        if self.reap_at <= now && self.pages_to_free.is_empty() {
            self.unmap_surplus(now);
        }
        self.free_step(most_bytes);
    }

    /// Frees more of what is freed in parts than has arrived, so that both together take no more than before.
    #[inline]
    pub fn free_behind(&mut self, arrived: usize) {
        if !self.pages_to_free.is_empty() {
            self.free_step(2 * arrived);
        }
    }

    /// Frees memory in parts, in the next iterations.
    pub fn free_in_steps(&mut self, bytes: Vec<u8>) {
        // Without memory for the list it is freed at once.
        if self.pages_to_free.try_reserve(1).is_ok() {
            self.pages_to_free.push(bytes);
        }
    }

    /// Unmaps the pages that stayed empty since the last check.
    fn unmap_surplus(&mut self, now: Nanos) {
        let mut left = MOST_UNMAPPED;
        let mut has_empty = false;
        for number in class_of(LARGE)..self.classes.len() {
            let stayed = self.classes[number].min_empty;
            let surplus = stayed.min(left);
            (0..surplus).for_each(|_| _ = self.unmap_empty(number));
            left -= surplus;
            let class = &mut self.classes[number];
            let empty = class.slots.empty_count();
            class.min_empty = if left > 0 { empty } else { stayed - surplus };
            has_empty |= empty > 0;
        }
        let next = if left > 0 { now + REAP_INTERVAL } else { now };
        self.reap_at = if has_empty { next } else { Nanos::NEVER };
    }

    /// Frees at most `left` bytes. A page is freed from its end, because freeing 1 GiB at once would
    /// take 0.1 s.
    fn free_step(&mut self, mut left: usize) {
        while left > 0
            && let Some(mut page) = self.pages_to_free.pop()
        {
            let freed = page.len().min(left);
            page.truncate(page.len() - freed);
            // Freeing a page costs something even if few of its bytes were written.
            left -= freed.max(slab::PAGE_BYTES / 4).min(left);
            if !page.is_empty() {
                page.shrink_to_fit();
                self.free_in_steps(page);
            }
        }
    }

    // ---- Checking ----

    /// Checks that `references` are all references to bodies. Each comes with the id of its job, or
    /// with 0 for a reply.
    ///
    /// # Panics
    /// The check fails.
    pub fn check<'a>(&self, references: impl Iterator<Item = (u64, &'a Body)>) {
        let mut counted: BTreeMap<(usize, u32), u32> = BTreeMap::new();
        for (id, body) in references.filter(|(_, body)| !body.is_cold()) {
            *counted.entry((self.check_one(id, body), body.key.number())).or_default() += 1;
        }
        let (mut taken_bytes, mut used) = (0, 0);
        // Most classes never had a body.
        let classes = self.classes.iter().enumerate().filter(|(_, class)| !class.pages.is_empty());
        for (number, class) in classes {
            taken_bytes += class.check();
            for key in class.slots.used_slots() {
                let (stored, actual) = (class.ref_count(key), counted.get(&(number, key)));
                assert_eq!(
                    Some(&stored),
                    actual,
                    "stored and actual references to {key} of {number}"
                );
                used += 1;
            }
        }
        assert_eq!(used, counted.len(), "used slots, and those with references");
        assert_eq!(self.taken_bytes, taken_bytes, "stored and actual bytes of bodies");
        let is_empty = |class: &SizeClass| class.slots.empty_count() > 0;
        let is_noted = self.reap_at < Nanos::NEVER || !self.classes.iter().any(is_empty);
        assert!(is_noted, "empty pages are not noted");
    }

    /// Returns the number of the size class.
    fn check_one(&self, id: u64, body: &Body) -> usize {
        let Body { len, key } = body;
        let number = class_of(*len as usize);
        let is_used = self.classes[number].slots.is_used(key.number());
        assert!(is_used, "no body {key:?} of {len} bytes, which job {id} has");
        let ends_in_cr_lf = id == 0 || self.bytes(body).ends_with(CR_LF);
        assert!(ends_in_cr_lf, "the body of job {id} does not end in CR LF");
        number
    }
}

impl SizeClass {
    fn new(width: usize) -> SizeClass {
        let page_bits = if width > OWN_PAGE_ABOVE { 0 } else { slab::page_bits(width) };
        SizeClass { width, slots: Slots::new(page_bits), pages: Vec::new(), min_empty: 0 }
    }

    fn is_large(&self) -> bool {
        self.width >= LARGE
    }

    /// Allocates a slot. Returns also the bytes by which the taken memory grows.
    fn alloc(&mut self, full_len: usize) -> Result<(BodyKey, u64), NoMemory> {
        let (is_large, width) = (self.is_large(), self.width);
        let page_len = self.slots.page_len();
        self.slots.try_reserve_one(&mut self.pages, |page| {
            if is_large {
                page.ref_counts.try_reserve_exact(page_len)?;
                page.ref_counts.resize(page_len, 0);
            }
            page.bytes.try_reserve_exact(page_len * width)
        })?;
        let number = self.slots.alloc();
        let (page, slot) = self.slots.position(number);
        let end = slot * width + self.extent(full_len);
        let page = &mut self.pages[page];
        if is_large {
            page.ref_counts[slot] = 1;
            self.min_empty = self.min_empty.min(self.slots.empty_count());
        }
        let growth = end.saturating_sub(page.taken_bytes);
        page.taken_bytes += growth;
        Ok((BodyKey::from_number(number), growth as u64))
    }

    /// Returns the number of bytes of its slot that a body writes.
    fn extent(&self, full_len: usize) -> usize {
        if self.is_large() { full_len } else { self.width }
    }

    fn growth_for(&self, full_len: usize) -> usize {
        // Freed slots come before slots that were never used.
        let (slots, taken_bytes) = self
            .slots
            .next_page()
            .map_or((0, 0), |page| (self.slots.used_in(page), self.pages[page].taken_bytes));
        (slots * self.width + self.extent(full_len)).saturating_sub(taken_bytes)
    }

    fn bytes_mut(&mut self, key: BodyKey, from: usize, to: usize) -> &mut [u8] {
        let (page, slot) = self.slots.position(key.number());
        let (bytes, at) = (&mut self.pages[page].bytes, slot * self.width);
        if at + to > bytes.len() {
            // The capacity was reserved. A vector cannot know that the kernel has zeroed the page
            // already.
            bytes.resize(at + to, 0);
        }
        &mut bytes[at + from..at + to]
    }

    fn bytes(&self, key: BodyKey, len: usize) -> &[u8] {
        let (page, slot) = self.slots.position(key.number());
        &self.pages[page].bytes[slot * self.width..][..len]
    }

    fn ref_count(&self, number: u32) -> u32 {
        let (page, slot) = self.slots.position(number);
        self.pages[page].ref_counts.get(slot).copied().unwrap_or(1)
    }

    fn ref_count_mut(&mut self, key: BodyKey) -> &mut u32 {
        let (page, slot) = self.slots.position(key.number());
        &mut self.pages[page].ref_counts[slot]
    }

    /// Returns the bytes taken.
    fn check(&self) -> u64 {
        let (width, pages) = (self.width, &self.pages);
        let capacities = pages.iter().map(|page| page.bytes.capacity());
        let what = format_args!("the bodies of up to {width} bytes");
        self.slots.check(capacities, self.slots.page_len() * width, what);
        let is_counted = |page: &Page| page.bytes.len() <= page.taken_bytes;
        assert!(pages.iter().all(is_counted), "bytes in use are not counted, for {width} bytes");
        let is_held = |slot| self.ref_count(slot) > 0;
        assert!(self.slots.used_slots().all(is_held), "a slot without reference, {width} bytes");
        let (least, empty) = (self.min_empty, self.slots.empty_count());
        assert!(least <= empty, "{empty} empty pages, and at least {least}, for {width} bytes");
        pages.iter().map(|page| page.taken_bytes as u64).sum()
    }
}

/// Returns the difference between `len`, the maximum of a size class without CR LF, and that of the
/// next class.
fn class_step(len: usize) -> usize {
    match len {
        0..=LINEAR_UP_TO => STEP,
        OWN_PAGE_ABOVE.. => len,
        _ => (1 << len.ilog2()) / STEPS_PER_DOUBLING,
    }
}

/// Returns the size class for bodies of this length with CR LF.
fn class_of(full_len: usize) -> usize {
    let len = full_len - CR_LF.len();
    if len <= LINEAR_UP_TO {
        return len.div_ceil(STEP);
    }
    let step = class_step((len - 1).min(OWN_PAGE_ABOVE - 1));
    let doublings = (step / STEP).ilog2() as usize;
    // The steps below this doubling, and the steps within it.
    let within = (doublings * STEPS_PER_DOUBLING) + len.min(OWN_PAGE_ABOVE).div_ceil(step);
    let alone = len.div_ceil(OWN_PAGE_ABOVE).next_power_of_two().ilog2() as usize;
    within + alone
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const MOST_FREED: usize = 1024 * 1024;

    #[test]
    fn every_length_maps_to_the_smallest_class_that_fits() {
        let bodies = Bodies::default();
        let width_of = |class: usize| bodies.classes[class].width;
        let check = |full_len: usize| {
            let class = class_of(full_len);
            assert!(width_of(class) >= full_len, "{full_len} bytes in class {class}");
            assert!(class == 0 || width_of(class - 1) < full_len, "{full_len} bytes in {class}");
            let wasted = width_of(class) - full_len;
            let has_own_page = width_of(class) > OWN_PAGE_ABOVE + CR_LF.len();
            assert!(has_own_page || wasted < STEP.max(full_len / STEPS_PER_DOUBLING + 1));
        };
        (2..2 * OWN_PAGE_ABOVE).for_each(check);
        for bits in OWN_PAGE_ABOVE.ilog2()..=30 {
            for less in 0..4 {
                check((1 << bits) + 2 - less);
            }
        }
        assert_eq!(bodies.classes.len(), class_of(MAX_BODY_LEN + CR_LF.len()) + 1);
        assert_eq!(width_of(class_of(64 + 2)), 64 + 2);
        assert_eq!(width_of(class_of(1024 + 2)), 1024 + 2);
    }

    #[test]
    fn bodies_keep_their_bytes_under_random_steps() {
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
                let body = bodies.add(&bytes).expect("no memory");
                assert!(bodies.taken_bytes() <= before + growth);
                model.insert(step, (body, bytes));
            } else if let Some(name) = random.choice(model.keys().copied()) {
                let (body, bytes) = model.remove(&name).expect("no body under a chosen key");
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
                bodies.reap(MOST_FREED, Nanos::from_millis(u64::from(step)));
                bodies.check(model.iter().map(|(_, (body, _))| (1, body)));
            }
        }
        for (_, (body, bytes)) in std::mem::take(&mut model) {
            assert_eq!(bodies.bytes(&body), bytes);
            bodies.remove(body);
        }
        let mut now = Nanos::from_secs(1_000);
        while bodies.next_due() != Nanos::NEVER {
            now = now.max(bodies.next_due());
            bodies.reap(MOST_FREED, now);
            bodies.check(std::iter::empty());
        }
        let pages = bodies.classes.iter().flat_map(|class| &class.pages);
        let left = pages.filter(|page| page.bytes.capacity() > 0).count();
        assert!(left <= class_of(LARGE), "{left} pages are left");
    }

    #[test]
    fn a_body_is_written_in_parts() {
        let mut bodies = Bodies::default();
        let first = bodies.begin(3 * LARGE).expect("no memory");
        let second = bodies.begin(3 * LARGE).expect("no memory");
        for (from, to) in [(0, 10), (10, LARGE), (LARGE, 3 * LARGE)] {
            bodies.bytes_mut(&second, from, to).fill(b'b');
            bodies.bytes_mut(&first, from, to).fill(b'a');
        }
        assert_eq!(bodies.bytes(&first), [b'a'; 3 * LARGE]);
        assert_eq!(bodies.bytes(&second), [b'b'; 3 * LARGE]);
        bodies.check([(0, &first), (0, &second)].into_iter());
    }

    #[test]
    fn surplus_pages_are_freed_in_steps_and_reused_pages_are_kept() {
        const LEN: usize = 500_000;
        let mut bodies = Bodies::default();
        let mut now = Nanos::from_secs(1);
        let mut held: Vec<Body> = (0..40).map(|_| touched(&mut bodies, LEN)).collect();
        held.drain(..).for_each(|body| assert!(!bodies.remove(body)));
        assert_eq!(bodies.taken_bytes(), 40 * LEN as u64);
        // Half of the pages are used again in each interval.
        for _ in 0..10 {
            held.extend((0..20).map(|_| touched(&mut bodies, LEN)));
            let before = mapped(&bodies);
            bodies.reap(MOST_FREED, now);
            assert!(before - mapped(&bodies) <= MOST_FREED);
            held.drain(..).for_each(|body| assert!(!bodies.remove(body)));
            now = now + REAP_INTERVAL;
            bodies.check(std::iter::empty());
        }
        while bodies.next_due() == Nanos::ZERO {
            bodies.reap(MOST_FREED, now);
        }
        assert_eq!(bodies.taken_bytes(), 20 * LEN as u64);
        assert!(bodies.free_empty(1));
        assert_eq!(bodies.taken_bytes(), 19 * LEN as u64);
        assert_eq!(bodies.next_due(), Nanos::ZERO);
    }

    /// Returns the bytes of all pages, and of those that are freed in parts.
    fn mapped(bodies: &Bodies) -> usize {
        let pages = bodies.classes.iter().flat_map(|class| &class.pages).map(|page| &page.bytes);
        pages.chain(&bodies.pages_to_free).map(Vec::len).sum()
    }

    fn touched(bodies: &mut Bodies, len: usize) -> Body {
        let body = bodies.begin(len).expect("no memory");
        bodies.bytes_mut(&body, 0, len).fill(b'x');
        body
    }
}
