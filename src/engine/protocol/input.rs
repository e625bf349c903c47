//! Bytes of a client that have arrived and were not used yet.
//!
//! Used bytes are skipped, not moved: a burst of thousands of commands is used a few commands at a
//! time, and to move the rest forward each time would cost the square of its length. An input
//! without bytes owns no memory.

use crate::engine::headroom::{self, Headroom};
use std::collections::TryReserveError;

/// Bytes in the order in which they arrived.
#[derive(Debug, Default)]
pub struct Input {
    bytes: Vec<u8>,
    /// How many bytes at the front of `bytes` have been used.
    used: usize,
}

/// Memory of an input that has bytes at all. The C library keeps smaller pieces for itself once they
/// are freed: a few of them, cut off from large inputs, would hold back megabytes around them.
const LEAST_CAPACITY: usize = 1088;

impl Input {
    /// Returns the bytes that were not used yet.
    pub fn unused(&self) -> &[u8] {
        &self.bytes[self.used..]
    }

    /// Returns the number of bytes that were not used yet.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.used
    }

    /// Returns whether all bytes have been used.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes of memory that the input owns.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Adds bytes at the end.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), TryReserveError> {
        let more = bytes.len().max(LEAST_CAPACITY.saturating_sub(self.bytes.len()));
        headroom::leave(Headroom::Quarter, || self.bytes.try_reserve(more))?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Keeps only the last `len` bytes. Memory is given back once less than half of it is needed,
    /// so that each byte is moved once on average, however small the steps are.
    pub fn keep_last(&mut self, len: usize) {
        self.used = self.bytes.len() - len;
        if len == 0 {
            *self = Input::default();
        } else if self.used >= len {
            self.bytes.drain(..std::mem::take(&mut self.used));
            self.bytes.shrink_to((2 * len).max(LEAST_CAPACITY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_their_order_and_memory_shrinks_with_them() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut input, mut next_in, mut next_out) = (Input::default(), 0_u8, 0_u8);
        for _ in 0..10_000 {
            let pushed: Vec<u8> =
                (0..random.usize(..5_000)).map(|_| next_byte(&mut next_in)).collect();
            input.push(&pushed).expect("the test needs little memory");
            let kept = random.usize(..=input.len());
            for &byte in &input.unused()[..input.len() - kept] {
                assert_eq!(byte, next_byte(&mut next_out));
            }
            input.keep_last(kept);
            assert_eq!((input.len(), input.is_empty()), (kept, kept == 0));
            let most = if kept == 0 { 0 } else { 4 * kept.max(LEAST_CAPACITY) };
            assert!(input.capacity() <= most, "{} bytes are kept", input.capacity());
        }
    }

    #[test]
    fn small_steps_move_few_bytes() {
        const LEN: usize = 60_000;
        let mut input = Input::default();
        input.push(&[b'x'; LEN]).expect("the test needs little memory");
        let mut moves = 0;
        for left in (0..LEN).rev() {
            let used_before = input.used;
            input.keep_last(left);
            moves += usize::from(input.used < used_before);
        }
        assert!(moves <= 20, "the rest was moved {moves} times");
        assert_eq!(input.capacity(), 0);
    }

    fn next_byte(byte: &mut u8) -> u8 {
        *byte = byte.wrapping_add(1);
        *byte
    }
}
