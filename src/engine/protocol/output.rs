//! Bytes on their way to a client.
//!
//! Formatted replies gather in one buffer; large bodies and the pieces of long lists are not copied
//! into it but noted at their position and sent from where they are. An output has a hold on each
//! body, so dropping an output would leak bodies: [`Output::clear`] gives the holds back.
//!
//! ```text
//! text    RESERVED 7 60000 CR LF INSERTED 8 CR LF ...
//!                               ^
//! bodies                        60000 bytes and CR LF
//! ```
//!
//! The loop asks for the next slices and says how much of them the kernel took. Most connections
//! are idle, so an output with nothing in it is next to nothing: its first byte borrows what it
//! needs from a pool, and its last one gives that back.

use crate::engine::headroom::{self, Headroom};
use crate::engine::queue::body::{Bodies, Body};
use crate::engine::queue::listing::ListText;
use std::collections::{TryReserveError, VecDeque};
use std::fmt;
use std::io::IoSlice;
use std::rc::Rc;

/// What one client is still to be sent.
#[derive(Debug, Default)]
pub struct Output(Option<Boxed>);

/// An array of one is a box that can fail to be made.
type Boxed = Box<[Pending; 1]>;

#[derive(Debug, Default)]
struct Pending {
    text: Vec<u8>,
    /// How much of `text` has been sent.
    text_sent: usize,
    bodies: VecDeque<SharedPart>,
    /// How much of the first of `bodies` has been sent.
    body_sent: usize,
    /// How many bytes of all bodies are still to be sent.
    bodies_len: usize,
}

#[derive(Debug)]
struct SharedPart {
    /// The part goes before the byte of `text` at this index.
    at: usize,
    part: Part,
}

/// Bytes that are not copied.
#[derive(Debug)]
enum Part {
    /// A large body.
    Body(Body),
    /// One piece of a long list.
    List(Rc<ListText>, usize),
}

impl Part {
    fn len(&self) -> usize {
        match self {
            Part::Body(body) => body.full_len() as usize,
            Part::List(list, piece) => list.piece(*piece).len(),
        }
    }

    fn bytes<'a>(&'a self, bodies: &'a Bodies) -> &'a [u8] {
        match self {
            Part::Body(body) => bodies.bytes(body),
            Part::List(list, piece) => list.piece(*piece),
        }
    }

    fn give_back(self, bodies: &mut Bodies) {
        if let Part::Body(body) = self {
            bodies.remove(body);
        }
    }
}

/// What outputs needed that were sent whole, for the next ones.
#[derive(Debug, Default)]
pub struct Pool(Vec<Boxed>);

/// One system call sends no more, so that a client with much to be sent does not delay others.
const SENT_AT_ONCE: usize = 512 * 1024;

impl Output {
    /// How many bytes are still to be sent.
    pub fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |pending| pending[0].len())
    }

    /// Returns how many bytes of text are kept, sent ones that were not forgotten yet among them.
    pub fn text_len(&self) -> usize {
        self.0.as_ref().map_or(0, |pending| pending[0].text.len())
    }

    /// Whether everything has been sent.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn push(&mut self, bytes: &[u8], pool: &mut Pool) -> Result<(), TryReserveError> {
        let text = &mut self.pending(pool)?.text;
        if text.capacity() - text.len() < bytes.len() {
            headroom::leave(Headroom::Quarter, || text.try_reserve(bytes.len()))?;
        }
        text.extend_from_slice(bytes);
        Ok(())
    }

    /// Adds the bytes of a body, with its CR LF.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn push_body(
        &mut self,
        body: &Body,
        pool: &mut Pool,
        bodies: &mut Bodies,
    ) -> Result<(), TryReserveError> {
        if !body.is_large() {
            return self.push(bodies.bytes(body), pool);
        }
        let pending = self.pending(pool)?;
        headroom::leave(Headroom::Quarter, || pending.bodies.try_reserve(1))?;
        pending.bodies_len += body.full_len() as usize;
        let at = pending.text.len();
        pending.bodies.push_back(SharedPart { at, part: Part::Body(bodies.share(body)) });
        Ok(())
    }

    /// Adds the bytes of a list that is complete.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn push_list(
        &mut self,
        list: &Rc<ListText>,
        pool: &mut Pool,
    ) -> Result<(), TryReserveError> {
        let pending = self.pending(pool)?;
        let pieces = list.piece_count();
        headroom::leave(Headroom::Quarter, || pending.bodies.try_reserve(pieces))?;
        pending.bodies_len += list.len();
        let at = pending.text.len();
        for piece in 0..pieces {
            pending.bodies.push_back(SharedPart { at, part: Part::List(Rc::clone(list), piece) });
        }
        Ok(())
    }

    fn pending(&mut self, pool: &mut Pool) -> Result<&mut Pending, TryReserveError> {
        let pending = match &mut self.0 {
            Some(pending) => pending,
            none => none.insert(pool.lend()?),
        };
        Ok(&mut pending[0])
    }

    /// Puts the next bytes to be sent into `slices`; says how many slices.
    pub fn next_slices<'a>(&'a self, slices: &mut [IoSlice<'a>], bodies: &'a Bodies) -> usize {
        self.0.as_ref().map_or(0, |pending| pending[0].next_slices(slices, bodies))
    }

    /// Returns whether large bodies or lists are to be sent.
    pub fn has_parts(&self) -> bool {
        self.0.as_ref().is_some_and(|pending| pending[0].bodies_len > 0)
    }

    /// Returns the large bodies that are to be sent.
    pub fn bodies(&self) -> impl Iterator<Item = &Body> + '_ {
        let pending = self.0.as_ref();
        pending.into_iter().flat_map(|pending| pending[0].bodies.iter()).filter_map(|shared| {
            match &shared.part {
                Part::Body(body) => Some(body),
                Part::List(..) => None,
            }
        })
    }

    /// What is still to be sent is counted right, and each body has its place in the text.
    ///
    /// # Panics
    /// It is not so. `what` says whose output it is.
    pub fn check(&self, what: fmt::Arguments<'_>) {
        if let Some(pending) = &self.0 {
            pending[0].check(what);
        }
    }

    /// The first `count` of the bytes to be sent have been sent.
    pub fn sent(&mut self, count: usize, pool: &mut Pool, bodies: &mut Bodies) {
        match &mut self.0 {
            Some(pending) if count < pending[0].len() => pending[0].sent(count, bodies),
            _ => self.clear(pool, bodies),
        }
    }

    /// Nothing of it is to be sent any more.
    pub fn clear(&mut self, pool: &mut Pool, bodies: &mut Bodies) {
        let Some(mut pending) = self.0.take() else { return };
        for shared in pending[0].bodies.drain(..) {
            shared.part.give_back(bodies);
        }
        pool.take_back(pending);
    }
}

impl Pending {
    fn len(&self) -> usize {
        self.text.len() - self.text_sent + self.bodies_len
    }

    fn next_slices<'a>(&'a self, slices: &mut [IoSlice<'a>], shared: &'a Bodies) -> usize {
        if self.bodies.is_empty()
            && let Some(slice) = slices.first_mut()
        {
            // By far the most frequent.
            *slice = IoSlice::new(&self.text[self.text_sent..]);
            return usize::from(!slice.is_empty());
        }
        let mut filled = 0;
        let mut left = SENT_AT_ONCE;
        let mut text_at = self.text_sent;
        let mut body_from = self.body_sent;
        let mut bodies = self.bodies.iter().peekable();
        let mut ends_in_header = false;
        while filled < slices.len() && left > 0 {
            let text_end = bodies.peek().map_or(self.text.len(), |body| body.at);
            let bytes = if text_at < text_end {
                let text = &self.text[text_at..text_end];
                text_at = text_end;
                ends_in_header = bodies.peek().is_some();
                text
            } else if let Some(body) = bodies.next() {
                ends_in_header = false;
                &body.part.bytes(shared)[std::mem::take(&mut body_from)..]
            } else {
                break;
            };
            let bytes = &bytes[..bytes.len().min(left)];
            left -= bytes.len();
            slices[filled] = IoSlice::new(bytes);
            filled += 1;
        }
        // A header leaves together with its body: some clients read once for each reply.
        if ends_in_header && filled > 1 { filled - 1 } else { filled }
    }

    fn sent(&mut self, mut count: usize, shared: &mut Bodies) {
        while count > 0 {
            let text_end = self.bodies.front().map_or(self.text.len(), |body| body.at);
            let text = (text_end - self.text_sent).min(count);
            self.text_sent += text;
            count -= text;
            if self.text_sent == text_end {
                count -= self.sent_of_body(count, shared);
            }
        }
        self.forget_what_was_sent();
    }

    /// Up to `limit` bytes of the first body have been sent; says how many.
    fn sent_of_body(&mut self, limit: usize, shared: &mut Bodies) -> usize {
        let Some(first) = self.bodies.front() else { return 0 };
        let len = first.part.len();
        let count = (len - self.body_sent).min(limit);
        self.body_sent += count;
        self.bodies_len -= count;
        if self.body_sent == len
            && let Some(first) = self.bodies.pop_front()
        {
            first.part.give_back(shared);
            self.body_sent = 0;
        }
        count
    }

    fn check(&self, what: fmt::Arguments<'_>) {
        let Pending { text, text_sent, bodies, body_sent, bodies_len } = self;
        let mut before = *text_sent;
        let mut len = 0;
        for SharedPart { at, part } in bodies {
            assert!(*at >= before, "{what}: a body at {at} of the text comes after {before}");
            (before, len) = (*at, len + part.len());
        }
        assert!(before <= text.len(), "{what}: {before} bytes of text of {}", text.len());
        let first = bodies.front().map_or(1, |first| first.part.len());
        assert!(*body_sent < first, "{what}: {body_sent} bytes of a body of {first} were sent");
        assert_eq!(bodies_len + body_sent, len, "{what}: bytes of bodies, noted and counted");
    }

    /// A client that is always a little behind must not make its output grow for ever.
    fn forget_what_was_sent(&mut self) {
        const WORTH_MOVING: usize = 16 * 1024;
        if self.text_sent < WORTH_MOVING || self.text_sent < self.text.len() / 2 {
            return;
        }
        self.text.drain(..self.text_sent);
        for body in &mut self.bodies {
            body.at -= self.text_sent;
        }
        self.text_sent = 0;
    }
}

impl Pool {
    const MOST: usize = 64;
    const MOST_TEXT: usize = 16 * 1024;

    fn lend(&mut self) -> Result<Boxed, TryReserveError> {
        if let Some(pending) = self.0.pop() {
            return Ok(pending);
        }
        let mut pending = Vec::new();
        headroom::leave(Headroom::Quarter, || pending.try_reserve_exact(1))?;
        pending.push(Pending::default());
        Ok(pending.into_boxed_slice().try_into().expect("there is one"))
    }

    /// What is to be lent has nothing of anybody in it.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(&self) {
        assert!(self.0.len() <= Pool::MOST, "{} outputs wait to be lent", self.0.len());
        for pending in &self.0 {
            let Pending { text, text_sent, bodies, body_sent, bodies_len } = &pending[0];
            assert!(text.is_empty() && bodies.is_empty(), "an output is lent with bytes in it");
            assert!(text.capacity() <= Pool::MOST_TEXT, "a large output waits to be lent");
            let counts = (*text_sent, *body_sent, *bodies_len);
            assert_eq!(counts, (0, 0, 0), "what an output that is to be lent has been sent");
        }
    }

    fn take_back(&mut self, mut boxed: Boxed) {
        let pending = &mut boxed[0];
        if pending.text.capacity() > Pool::MOST_TEXT || self.0.len() == Pool::MOST {
            return;
        }
        pending.text.clear();
        pending.text_sent = 0;
        if pending.bodies.capacity() > 0 {
            pending.bodies = VecDeque::new();
            (pending.body_sent, pending.bodies_len) = (0, 0);
        }
        self.0.push(boxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::queue::body::LARGE;

    #[test]
    fn whatever_the_kernel_takes_the_bytes_arrive_in_order() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut bodies = Bodies::default();
        let mut pool = Pool::default();
        let mut output = Output::default();
        let (mut expected, mut arrived) = (Vec::new(), Vec::new());
        for round in 0..2_000_u32 {
            if random.bool() {
                let bytes = vec![b'a' + random.u8(..26); random.usize(2..2 * LARGE)];
                let body = bodies.add(&bytes).unwrap();
                output.push_body(&body, &mut pool, &mut bodies).unwrap();
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
            bodies.check(output.bodies().map(|body| (0, body)));
        }
        assert!(expected.starts_with(&arrived));
    }

    #[test]
    fn a_header_leaves_together_with_its_body() {
        let (mut bodies, mut pool) = (Bodies::default(), Pool::default());
        let mut output = Output::default();
        for _ in 0..3 {
            output.push(b"FOUND 1 4094\r\n", &mut pool).unwrap();
            let body = bodies.add(&[b'x'; LARGE]).unwrap();
            output.push_body(&body, &mut pool, &mut bodies).unwrap();
        }
        for (slices, filled) in [(2, 2), (3, 2), (4, 4), (5, 4), (6, 6), (7, 6)] {
            assert_eq!(output.next_slices(&mut vec![IoSlice::new(&[]); slices], &bodies), filled);
        }
    }

    #[test]
    fn an_empty_output_owns_nothing() {
        let (mut bodies, mut pool) = (Bodies::default(), Pool::default());
        let mut output = Output::default();
        output.push(b"TOUCHED\r\n", &mut pool).unwrap();
        output.sent(9, &mut pool, &mut bodies);
        assert!(output.0.is_none());
        assert_eq!(pool.0.len(), 1);
    }

    #[test]
    fn a_client_that_is_always_behind_costs_no_more() {
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
