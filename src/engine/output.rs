//! Bytes on their way to a client.
//!
//! Formatted replies gather in one buffer; large bodies are not copied into it but noted
//! at their position and sent from where they are:
//!
//! ```text
//! text    RESERVED 7 60000 CR LF INSERTED 8 CR LF ...
//!                               ^
//! bodies                        60000 bytes and CR LF
//! ```
//!
//! The loop asks for the next slices and says how much of them the kernel took. An output
//! with nothing in it owns no memory and is small, since most connections are idle: its first byte
//! borrows a buffer from a pool.

use super::body::Content;
use std::collections::{TryReserveError, VecDeque};
use std::io::IoSlice;
use std::rc::Rc;

/// What one client is still to be sent.
#[derive(Debug, Default)]
pub struct Output {
    text: Vec<u8>,
    /// How much of `text` has been sent.
    text_sent: usize,
    /// None until there is one, and again once all has been sent; its queue may run empty before.
    large: Option<Box<LargeBodies>>,
}

/// Bodies that are not copied into the text.
#[derive(Debug, Default)]
struct LargeBodies {
    queue: VecDeque<SharedBody>,
    /// How much of the first one has been sent.
    sent: usize,
    /// How many bytes of all of them are still to be sent.
    len: usize,
}

#[derive(Debug)]
struct SharedBody {
    /// The body goes before the byte of `text` at this index.
    at: usize,
    bytes: Rc<Vec<u8>>,
}

/// Buffers of outputs that were sent whole, for the next ones.
#[derive(Debug, Default)]
pub struct Pool(Vec<Vec<u8>>);

impl Output {
    /// How many bytes are still to be sent.
    pub fn len(&self) -> usize {
        self.text.len() - self.text_sent + self.large.as_ref().map_or(0, |large| large.len)
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
        if self.text.capacity() == 0 {
            self.text = pool.0.pop().unwrap_or_default();
        }
        self.text.try_reserve(bytes.len())?;
        self.text.extend_from_slice(bytes);
        Ok(())
    }

    /// Adds the bytes of a body, with its CR LF.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn push_body(&mut self, body: Content<'_>, pool: &mut Pool) -> Result<(), TryReserveError> {
        match body {
            Content::Small(bytes) => self.push(bytes, pool),
            Content::Large(bytes) => {
                let large = self.large.get_or_insert_default();
                large.queue.try_reserve(1)?;
                large.queue.push_back(SharedBody { at: self.text.len(), bytes: Rc::clone(bytes) });
                large.len += bytes.len();
                Ok(())
            }
        }
    }

    /// Puts the next bytes to be sent into `slices`; says how many slices.
    pub fn next_slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let Some(large) = &self.large else {
            if self.is_empty() || slices.is_empty() {
                return 0;
            }
            slices[0] = IoSlice::new(&self.text[self.text_sent..]);
            return 1;
        };
        let mut filled = 0;
        let mut text_at = self.text_sent;
        let mut body_from = large.sent;
        let mut bodies = large.queue.iter().peekable();
        let mut ends_in_header = false;
        while filled < slices.len() {
            let text_end = bodies.peek().map_or(self.text.len(), |body| body.at);
            slices[filled] = if text_at < text_end {
                let text = &self.text[text_at..text_end];
                text_at = text_end;
                ends_in_header = bodies.peek().is_some();
                IoSlice::new(text)
            } else if let Some(body) = bodies.next() {
                ends_in_header = false;
                IoSlice::new(&body.bytes[std::mem::take(&mut body_from)..])
            } else {
                break;
            };
            filled += 1;
        }
        // A header leaves together with its body: some clients read once for each reply.
        if ends_in_header && filled > 1 { filled - 1 } else { filled }
    }

    /// The first `count` of the bytes to be sent have been sent.
    pub fn sent(&mut self, count: usize, pool: &mut Pool) {
        if count < self.len() {
            self.skip(count);
            return self.forget_what_was_sent();
        }
        pool.give_back(std::mem::take(&mut self.text));
        self.text_sent = 0;
        if self.large.is_some() {
            self.large = None;
        }
    }

    fn skip(&mut self, mut count: usize) {
        while count > 0 {
            let first = self.large.as_deref_mut().filter(|large| !large.queue.is_empty());
            let text_end = first.as_ref().map_or(self.text.len(), |large| large.queue[0].at);
            let text = (text_end - self.text_sent).min(count);
            self.text_sent += text;
            count -= text;
            if let Some(large) = first.filter(|_| self.text_sent == text_end) {
                count -= large.sent(count);
            }
        }
    }

    /// A client that is always a little behind must not make its output grow for ever.
    fn forget_what_was_sent(&mut self) {
        const WORTH_MOVING: usize = 16 * 1024;
        if self.text_sent < WORTH_MOVING || self.text_sent < self.text.len() / 2 {
            return;
        }
        self.text.drain(..self.text_sent);
        for body in self.large.iter_mut().flat_map(|large| &mut large.queue) {
            body.at -= self.text_sent;
        }
        self.text_sent = 0;
    }
}

impl LargeBodies {
    /// Up to `limit` bytes of the first one have been sent; says how many.
    fn sent(&mut self, limit: usize) -> usize {
        let count = (self.queue[0].bytes.len() - self.sent).min(limit);
        self.sent += count;
        self.len -= count;
        if self.sent == self.queue[0].bytes.len() {
            self.queue.pop_front();
            self.sent = 0;
        }
        count
    }
}

impl Pool {
    const MAX_BUFFERS: usize = 64;
    const MAX_CAPACITY: usize = 16 * 1024;

    fn give_back(&mut self, mut buffer: Vec<u8>) {
        let is_welcome = (1..=Pool::MAX_CAPACITY).contains(&buffer.capacity());
        if is_welcome && self.0.len() < Pool::MAX_BUFFERS {
            buffer.clear();
            self.0.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::body::LARGE;

    #[test]
    fn whatever_the_kernel_takes_the_bytes_arrive_in_order() {
        let mut random = fastrand::Rng::with_seed(2);
        let mut pool = Pool::default();
        let mut output = Output::default();
        let (mut expected, mut arrived) = (Vec::new(), Vec::new());
        for round in 0..2_000_u32 {
            if random.bool() {
                let body = Rc::new(vec![b'a' + random.u8(..26); random.usize(..2 * LARGE)]);
                let is_small = body.len() < LARGE;
                let content = if is_small { Content::Small(&body) } else { Content::Large(&body) };
                output.push_body(content, &mut pool).unwrap();
                expected.extend_from_slice(&body);
            } else {
                let text = vec![b'0' + random.u8(..10); random.usize(..300)];
                output.push(&text, &mut pool).unwrap();
                expected.extend_from_slice(&text);
            }
            while !output.is_empty() && (round % 50 == 0 || random.u8(..3) == 0) {
                let mut slices = [IoSlice::new(&[]); 4];
                let filled = output.next_slices(&mut slices);
                let next: Vec<u8> =
                    slices[..filled].iter().flat_map(|slice| slice.iter().copied()).collect();
                let taken = random.usize(1..=next.len());
                arrived.extend_from_slice(&next[..taken]);
                output.sent(taken, &mut pool);
            }
            assert_eq!(arrived.len() + output.len(), expected.len());
        }
        assert!(expected.starts_with(&arrived));
    }

    #[test]
    fn an_empty_output_owns_nothing() {
        let mut pool = Pool::default();
        let mut output = Output::default();
        output.push(b"TOUCHED\r\n", &mut pool).unwrap();
        output.sent(9, &mut pool);
        assert_eq!(output.text.capacity(), 0);
        assert_eq!(pool.0.len(), 1);
    }

    #[test]
    fn a_client_that_is_always_behind_costs_no_more() {
        let mut pool = Pool::default();
        let mut output = Output::default();
        output.push(&[b'x'; 1000], &mut pool).unwrap();
        for _ in 0..10_000 {
            output.push(&[b'x'; 1000], &mut pool).unwrap();
            output.sent(1000, &mut pool);
        }
        assert!(output.text.capacity() < 100_000);
    }
}
