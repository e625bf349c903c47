//! Bytes to be sent to a client.
//!
//! Replies are appended to one buffer. Large bodies and long lists are not copied:
//! the output has a shared reference to each, and its position in the buffer. References are
//! counted, so dropping an output leaks bodies: [`Output::clear`] releases the references.
//!
//! ```text
//! text    RESERVED 7 60000 CR LF INSERTED 8 CR LF ...
//!                               ^
//! parts                         60000 bytes and CR LF
//! ```
//!
//! A reply must not be sent before a remote disk has synced its record. [`Output::hold_back`] marks
//! the bytes that wait. There are two marks: for the sync in progress, and for the next one. So
//! a client that sends on and on gets replies with each sync.
//!
//! The event loop writes the next slices, and reports with [`Output::sent`] how many bytes the
//! kernel has accepted. Most connections are idle, so an empty output is a null pointer. Buffers of
//! sent outputs are reused from a pool.

use super::batch::ReplySize;
use crate::engine::binlog::{Progress, Seq};
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::JobKey;
use crate::engine::queue::body::{Bodies, Body};
use crate::engine::queue::listing::ListText;
use crate::engine::queue::read_body::ReadBody;
use crate::engine::time::Nanos;
use std::collections::VecDeque;
use std::fmt;
use std::io::IoSlice;
use std::rc::Rc;

/// The bytes to be sent to one client.
#[derive(Default)]
pub struct Output(Option<Boxed>);

type Boxed = Box<[Pending; 1]>;

#[derive(Default)]
struct Pending {
    text: Vec<u8>,
    /// The number of bytes of `text` that were sent.
    text_sent: usize,
    parts: VecDeque<SharedPart>,
    /// The number of bytes of the first part that were sent.
    part_sent: usize,
    /// The number of bytes of all parts that were not sent yet.
    parts_len: usize,
    /// The number of bytes of all this that were sent: the position of the first unsent byte.
    sent: usize,
    /// The jobs whose TTR begins when the replies with them may be sent, and the positions behind these.
    reserved: VecDeque<(JobKey, usize)>,
    /// What is held back. `None` if the disk is local, and before [`Output::hold_back`]: then all bytes may
    /// be sent.
    held_back: Option<HeldBack>,
}

/// Which bytes of an output may be sent, and which wait for a sync.
#[derive(Clone, Copy, Debug)]
struct HeldBack {
    /// The position up to which bytes may be sent.
    sendable: usize,
    /// The bytes that wait longest, if any wait.
    first: Option<Mark>,
    /// Those that wait for the sync after that.
    last: Option<Mark>,
}

/// The position up to which bytes may be sent once a sync has ended.
#[derive(Clone, Copy, Debug)]
struct Mark {
    end: usize,
    sync: Seq,
    /// When the first of them were held back.
    since: Nanos,
}

struct SharedPart {
    /// The part is sent before the byte of `text` at this index.
    at: usize,
    part: Part,
}

/// Bytes that are shared instead of copied.
enum Part {
    /// A large body.
    Body(Body),
    /// A large body that was read back.
    ReadBody(Rc<ReadBody>),
    List(Rc<ListText>),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Body(body) => body.full_len() as usize,
            Part::ReadBody(body) => body.bytes().len(),
            Part::List(list) => list.bytes().len(),
        }
    }

    fn bytes<'a>(&'a self, bodies: &'a Bodies) -> &'a [u8] {
        match self {
            Part::Body(body) => bodies.bytes(body),
            Part::ReadBody(body) => body.bytes(),
            Part::List(list) => list.bytes(),
        }
    }

    fn release(self, bodies: &mut Bodies) {
        if let Part::Body(body) = self {
            bodies.remove(body);
        }
    }
}

/// What all outputs share.
#[derive(Default)]
pub struct Pool {
    /// Buffers of completely sent outputs, for reuse.
    spare: Vec<Boxed>,
    /// The lengths of all buffers in bytes, including sent bytes that were not removed yet.
    text_len: usize,
}

/// The maximum number of bytes in one system call, so that a long output does not delay other
/// clients.
const MAX_WRITE_LEN: usize = 512 * 1024;

impl Output {
    /// Returns the number of bytes to be sent.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |pending| pending[0].len())
    }

    /// Returns the length of the buffer in bytes, including sent bytes that were not removed yet.
    pub fn text_len(&self) -> usize {
        self.0.as_ref().map_or(0, |pending| pending[0].text.len())
    }

    /// Returns whether all bytes were sent.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes that may be sent now.
    pub fn sendable_len(&self) -> usize {
        self.0.as_ref().map_or(0, |pending| pending[0].sendable_len())
    }

    /// Holds back bytes until the changes before them are synced, and releases those whose changes are.
    /// Returns whether some are held back.
    pub fn hold_back(&mut self, progress: Progress) -> bool {
        let Some(pending) = &mut self.0 else { return false };
        let (sendable, end) = (pending[0].sent, pending[0].end());
        let none = HeldBack { sendable, first: None, last: None };
        pending[0].held_back.get_or_insert(none).update(end, progress)
    }

    /// Notes that the last reply has this reserved job: [`Output::next_sendable_job`] returns it once.
    pub fn note_reserved(&mut self, job: JobKey) -> Result<(), NoMemory> {
        let Some(pending) = &mut self.0 else { return Ok(()) };
        headroom::keeping(Headroom::Quarter, || pending[0].reserved.try_reserve(1))?;
        let end = pending[0].end();
        pending[0].reserved.push_back((job, end));
        Ok(())
    }

    /// Returns the next reserved job whose reply may be sent.
    pub fn next_sendable_job(&mut self) -> Option<JobKey> {
        let Pending { reserved, held_back, .. } = &mut self.0.as_mut()?[0];
        let may_be_sent =
            |&mut (_, end): &mut _| held_back.is_none_or(|held_back| end <= held_back.sendable);
        reserved.pop_front_if(may_be_sent).map(|(job, _)| job)
    }

    /// Returns since when bytes are held back, if some are.
    pub fn held_back_since(&self) -> Option<Nanos> {
        Some(self.0.as_ref()?[0].held_back?.first?.since)
    }

    /// Ensures that a reply of this size allocates nothing.
    pub fn try_reserve(&mut self, size: ReplySize, pool: &mut Pool) -> Result<(), NoMemory> {
        let pending = self.pending(pool)?;
        headroom::keeping(Headroom::Quarter, || {
            pending.text.try_reserve(size.text_len)?;
            pending.parts.try_reserve(size.parts)
        })
    }

    /// Appends `bytes`.
    #[inline(always)]
    pub fn push(&mut self, bytes: &[u8], pool: &mut Pool) -> Result<(), NoMemory> {
        let text = &mut self.pending(pool)?.text;
        if text.capacity() - text.len() < bytes.len() {
            headroom::keeping(Headroom::Quarter, || text.try_reserve(bytes.len()))?;
        }
        text.extend_from_slice(bytes);
        pool.text_len += bytes.len();
        Ok(())
    }

    /// Appends a body with its CR LF, which may have been `read` back. A large body is shared.
    #[inline(always)]
    pub fn push_body(
        &mut self,
        body: &Body,
        read: Option<&Rc<ReadBody>>,
        pool: &mut Pool,
        bodies: &mut Bodies,
    ) -> Result<(), NoMemory> {
        if !body.is_large() {
            return self.push(read.map_or_else(|| bodies.bytes(body), |read| read.bytes()), pool);
        }
        self.push_part(pool, || match read {
            None => Part::Body(bodies.share(body)),
            Some(read) => Part::ReadBody(Rc::clone(read)),
        })
    }

    /// Appends a complete list, which is shared.
    pub fn push_list(&mut self, list: &Rc<ListText>, pool: &mut Pool) -> Result<(), NoMemory> {
        self.push_part(pool, || Part::List(Rc::clone(list)))
    }

    fn push_part(&mut self, pool: &mut Pool, share: impl FnOnce() -> Part) -> Result<(), NoMemory> {
        let pending = self.pending(pool)?;
        headroom::keeping(Headroom::Quarter, || pending.parts.try_reserve(1))?;
        let part = share();
        pending.parts_len += part.len();
        pending.parts.push_back(SharedPart { at: pending.text.len(), part });
        Ok(())
    }

    #[inline(always)]
    fn pending(&mut self, pool: &mut Pool) -> Result<&mut Pending, NoMemory> {
        let pending = match &mut self.0 {
            Some(pending) => pending,
            none => none.insert(pool.alloc()?),
        };
        Ok(&mut pending[0])
    }

    /// Returns the bytes that may be sent now; `None` if large bodies or lists are among them.
    pub fn text(&self) -> Option<&[u8]> {
        let Some(pending) = &self.0 else { return Some(&[]) };
        let Pending { text, text_sent, parts, .. } = &pending[0];
        parts.is_empty().then(|| &text[*text_sent..][..pending[0].sendable_len()])
    }

    /// Stores the next bytes to be sent in `slices`, and returns the number of slices with bytes.
    pub fn next_slices<'a>(&'a self, slices: &mut [IoSlice<'a>], bodies: &'a Bodies) -> usize {
        let Some(pending) = &self.0 else { return 0 };
        pending[0].next_slices(pending[0].sendable_len(), MAX_WRITE_LEN, slices, bodies)
    }

    /// Returns the bytes that were not sent, also those that are held back, without the first `known` ones,
    /// for tests.
    pub fn unsent(&self, known: usize, bodies: &Bodies) -> Vec<u8> {
        let Some(pending) = &self.0 else { return Vec::new() };
        let mut slices = vec![IoSlice::new(&[]); 2 * pending[0].parts.len() + 1];
        let filled = pending[0].next_slices(pending[0].len(), usize::MAX, &mut slices, bodies);
        let mut unsent = &mut slices[..filled];
        IoSlice::advance_slices(&mut unsent, known);
        unsent.iter().map(|slice| &**slice).collect::<Vec<_>>().concat()
    }

    /// Returns the large bodies that were not sent completely.
    pub fn bodies(&self) -> impl Iterator<Item = &Body> + '_ {
        let pending = self.0.as_ref();
        pending.into_iter().flat_map(|pending| pending[0].parts.iter()).filter_map(|shared| {
            match &shared.part {
                Part::Body(body) => Some(body),
                Part::ReadBody(_) | Part::List(_) => None,
            }
        })
    }

    /// Returns whether bodies that were read back are to be sent.
    pub fn has_read_bodies(&self) -> bool {
        let parts = self.0.iter().flat_map(|pending| &pending[0].parts);
        parts.into_iter().any(|shared| matches!(shared.part, Part::ReadBody(_)))
    }

    /// Checks the stored counts and the positions of the parts.
    ///
    /// # Panics
    /// An invariant is broken. `what` names the output in the message.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        if let Some(pending) = &self.0 {
            pending[0].check(what);
        }
    }

    /// Removes the first `count` bytes, which were sent.
    #[inline]
    pub fn sent(&mut self, count: usize, pool: &mut Pool, bodies: &mut Bodies) {
        match &mut self.0 {
            Some(pending) if count < pending[0].len() => {
                let before = pending[0].text.len();
                pending[0].sent(count, bodies);
                pool.text_len -= before - pending[0].text.len();
            }
            _ => self.clear(pool, bodies),
        }
    }

    /// Removes all bytes and releases the shared bodies.
    pub fn clear(&mut self, pool: &mut Pool, bodies: &mut Bodies) {
        let Some(mut pending) = self.0.take() else { return };
        while let Some(shared) = pending[0].parts.pop_front() {
            shared.part.release(bodies);
        }
        pool.free(pending);
    }
}

impl Pending {
    fn len(&self) -> usize {
        self.text.len() - self.text_sent + self.parts_len
    }

    /// Returns the position behind the last byte.
    fn end(&self) -> usize {
        self.sent + self.len()
    }

    fn sendable_len(&self) -> usize {
        self.held_back.map_or_else(|| self.len(), |held_back| held_back.sendable - self.sent)
    }

    /// Stores the first `len` bytes in `slices`, or about `most` of them if some are in parts.
    fn next_slices<'a>(
        &'a self,
        len: usize,
        most: usize,
        slices: &mut [IoSlice<'a>],
        bodies: &'a Bodies,
    ) -> usize {
        let mut filled = 0;
        let mut left = most.min(len);
        let mut text_at = self.text_sent;
        let mut part_from = self.part_sent;
        let mut parts = self.parts.iter().peekable();
        let mut ends_in_header = false;
        while filled < slices.len() && left > 0 {
            let text_end = parts.peek().map_or(self.text.len(), |shared| shared.at);
            let bytes = if text_at < text_end {
                let text = &self.text[text_at..text_end];
                text_at = text_end;
                ends_in_header = parts.peek().is_some();
                text
            } else if let Some(shared) = parts.next() {
                ends_in_header = false;
                &shared.part.bytes(bodies)[std::mem::take(&mut part_from)..]
            } else {
                break;
            };
            let bytes = &bytes[..bytes.len().min(left)];
            left -= bytes.len();
            slices[filled] = IoSlice::new(bytes);
            filled += 1;
        }
        // A header is sent together with its body: some clients read once for each reply.
        if ends_in_header && filled > 1 { filled - 1 } else { filled }
    }

    fn sent(&mut self, mut count: usize, bodies: &mut Bodies) {
        self.sent += count;
        while count > 0 {
            let text_end = self.parts.front().map_or(self.text.len(), |shared| shared.at);
            let text = (text_end - self.text_sent).min(count);
            self.text_sent += text;
            count -= text;
            if self.text_sent == text_end {
                count -= self.part_sent(count, bodies);
            }
        }
        self.compact();
    }

    /// Removes up to `limit` bytes of the first part, and returns their number.
    fn part_sent(&mut self, limit: usize, bodies: &mut Bodies) -> usize {
        let Some(first) = self.parts.front() else { return 0 };
        let len = first.part.len();
        let count = (len - self.part_sent).min(limit);
        self.part_sent += count;
        self.parts_len -= count;
        if self.part_sent == len
            && let Some(first) = self.parts.pop_front()
        {
            first.part.release(bodies);
            self.part_sent = 0;
        }
        count
    }

    fn check(&self, what: fmt::Arguments<'_>) {
        let Pending { text, text_sent, parts, part_sent, parts_len, sent, reserved, held_back } =
            self;
        if let Some(HeldBack { sendable, first, last }) = held_back {
            let marks = [first, last].into_iter().flatten().map(|mark| mark.end);
            let ends = [*sent, *sendable].into_iter().chain(marks).chain([self.end()]);
            assert!(ends.is_sorted(), "{what}: {held_back:?} of bytes {sent} to {}", self.end());
        }
        let ends = reserved.iter().map(|&(_, end)| end).chain([self.end()]);
        assert!(ends.is_sorted(), "{what}: {reserved:?} up to byte {}", self.end());
        let mut before = *text_sent;
        let mut len = 0;
        for SharedPart { at, part } in parts {
            assert!(*at >= before, "{what}: a part at byte {at} follows byte {before}");
            (before, len) = (*at, len + part.len());
        }
        assert!(
            before <= text.len(),
            "{what}: position {before} in a text of {} bytes",
            text.len()
        );
        let first = parts.front().map_or(1, |first| first.part.len());
        assert!(*part_sent < first, "{what}: {part_sent} of {first} bytes of a part were sent");
        assert_eq!(parts_len + part_sent, len, "{what}: stored and real bytes of parts");
    }

    /// Moves the unsent text to the front once that is worth it. A client that never reads
    /// everything must not make the buffer grow without bound.
    fn compact(&mut self) {
        const MIN_SENT_LEN: usize = 16 * 1024;
        if self.text_sent < MIN_SENT_LEN || self.text_sent < self.text.len() / 2 {
            return;
        }
        self.text.drain(..self.text_sent);
        for shared in &mut self.parts {
            shared.at -= self.text_sent;
        }
        self.text_sent = 0;
    }
}

impl HeldBack {
    /// Releases the bytes whose changes are synced, and holds back those up to `end` that are new. Returns whether
    /// some are held back.
    fn update(&mut self, end: usize, progress: Progress) -> bool {
        let Progress { wanted, ended, now, .. } = progress;
        while let Some(done) = self.first.take_if(|mark| mark.sync <= ended) {
            self.sendable = done.end;
            self.first = self.last.take();
        }
        if progress.is_complete() {
            self.sendable = end;
        }
        let newest = if self.last.is_some() { &mut self.last } else { &mut self.first };
        match newest {
            None if self.sendable == end => {}
            Some(newest) if newest.sync == wanted || newest.end == end => newest.end = end,
            Some(_) => self.last = Some(Mark { end, sync: wanted, since: now }),
            None => self.first = Some(Mark { end, sync: wanted, since: now }),
        }
        self.sendable < end
    }
}

impl Pool {
    /// The pool keeps at most 64 buffers of at most 16 KiB, or 1 MiB.
    const MAX_LEN: usize = 64;
    const MAX_TEXT_CAPACITY: usize = 16 * 1024;

    /// Returns the lengths of the buffers of all outputs.
    pub fn text_len(&self) -> usize {
        self.text_len
    }

    fn alloc(&mut self) -> Result<Boxed, NoMemory> {
        if let Some(pending) = self.spare.pop() {
            return Ok(pending);
        }
        headroom::try_box(Headroom::Quarter, Pending::default())
    }

    /// Checks that the buffers are empty and small.
    ///
    /// # Panics
    /// An invariant is broken.
    pub fn check(&self) {
        assert!(self.spare.len() <= Pool::MAX_LEN, "the pool has {} buffers", self.spare.len());
        for pending in &self.spare {
            let Pending { text, text_sent, parts, part_sent, parts_len, sent, reserved, held_back } =
                &pending[0];
            assert!(held_back.is_none(), "a buffer of the pool is held back");
            let is_empty = text.is_empty() && parts.is_empty() && reserved.is_empty();
            assert!(is_empty, "a buffer of the pool has bytes or jobs");
            assert!(
                text.capacity() <= Pool::MAX_TEXT_CAPACITY,
                "a buffer of the pool is too large"
            );
            let counts = [*text_sent, *part_sent, *parts_len, *sent];
            assert_eq!(counts, [0; 4], "counts of a buffer of the pool");
        }
    }

    fn free(&mut self, mut boxed: Boxed) {
        let pending = &mut boxed[0];
        self.text_len -= pending.text.len();
        if pending.text.capacity() > Pool::MAX_TEXT_CAPACITY || self.spare.len() == Pool::MAX_LEN {
            return;
        }
        pending.text.clear();
        (pending.text_sent, pending.sent) = (0, 0);
        pending.held_back = None;
        pending.reserved.clear();
        pending.reserved.shrink_to(Pool::MAX_LEN);
        if pending.parts.capacity() > 0 {
            pending.parts = VecDeque::new();
            (pending.part_sent, pending.parts_len) = (0, 0);
        }
        self.spare.push(boxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::queue::body::LARGE;

    #[test]
    fn partial_writes_send_all_bytes_in_order() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut bodies = Bodies::default();
        let mut pool = Pool::default();
        let mut output = Output::default();
        let (mut expected, mut arrived) = (Vec::new(), Vec::new());
        for round in 0..2_000_u32 {
            if random.bool() {
                let bytes = vec![b'a' + random.u8(..26); random.usize(2..2 * LARGE)];
                let body = bodies.add(&bytes).unwrap();
                output.push_body(&body, None, &mut pool, &mut bodies).unwrap();
                bodies.remove(body);
                expected.extend_from_slice(&bytes);
            } else {
                let text = vec![b'0' + random.u8(..10); random.usize(..300)];
                output.push(&text, &mut pool).unwrap();
                expected.extend_from_slice(&text);
            }
            while !output.is_empty() && (round % 50 == 0 || random.u8(..3) == 0) {
                let mut slices = [IoSlice::new(&[]); 4];
                let filled = output.next_slices(&mut slices, &bodies);
                let next: Vec<u8> =
                    slices[..filled].iter().flat_map(|slice| slice.iter().copied()).collect();
                let taken = random.usize(1..=next.len());
                arrived.extend_from_slice(&next[..taken]);
                output.sent(taken, &mut pool, &mut bodies);
            }
            assert_eq!(arrived.len() + output.len(), expected.len());
            output.check(format_args!("round {round}"));
            pool.check();
            assert_eq!(pool.text_len(), output.text_len(), "round {round}");
            bodies.check(output.bodies().map(|body| (0, body)));
        }
        assert!(expected.starts_with(&arrived));
    }

    #[test]
    fn a_header_is_sent_together_with_its_body() {
        let (mut bodies, mut pool) = (Bodies::default(), Pool::default());
        let mut output = Output::default();
        for _ in 0..3 {
            output.push(b"FOUND 1 4094\r\n", &mut pool).unwrap();
            let body = bodies.add(&[b'x'; LARGE]).unwrap();
            output.push_body(&body, None, &mut pool, &mut bodies).unwrap();
        }
        for (slices, filled) in [(2, 2), (3, 2), (4, 4), (5, 4), (6, 6), (7, 6)] {
            assert_eq!(output.next_slices(&mut vec![IoSlice::new(&[]); slices], &bodies), filled);
        }
    }

    #[test]
    fn a_completely_sent_output_returns_its_buffer_to_the_pool() {
        let (mut bodies, mut pool) = (Bodies::default(), Pool::default());
        let mut output = Output::default();
        output.push(b"TOUCHED\r\n", &mut pool).unwrap();
        output.sent(9, &mut pool, &mut bodies);
        assert!(output.0.is_none());
        assert_eq!((pool.spare.len(), pool.text_len()), (1, 0));
    }

    #[test]
    fn sent_bytes_are_removed_while_some_are_unsent() {
        let (mut bodies, mut pool) = (Bodies::default(), Pool::default());
        let mut output = Output::default();
        output.push(&[b'x'; 1000], &mut pool).unwrap();
        for _ in 0..10_000 {
            output.push(&[b'x'; 1000], &mut pool).unwrap();
            output.sent(1000, &mut pool, &mut bodies);
        }
        assert!(output.0.is_some_and(|pending| pending[0].text.capacity() < 100_000));
    }
}
