//! Received bytes of a client that were not used yet.
//!
//! Used bytes are skipped, not moved. A burst of thousands of commands is used a few commands at a
//! time: moving the rest each time would take the square of its length. An empty input owns no
//! memory.

use crate::engine::headroom::{self, Headroom, NoMemory};

/// Bytes in the order of arrival.
#[derive(Debug, Default)]
pub struct Input {
    bytes: Vec<u8>,
    /// The number of used bytes at the front of `bytes`.
    used: usize,
}

/// The least capacity of an input with bytes. The C library caches smaller freed blocks: a few of
/// them, left from large inputs, would keep megabytes around them from being freed.
const MIN_CAPACITY: usize = 1088;

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

    /// Returns the memory of the input, in bytes.
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// Appends `bytes`.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), NoMemory> {
        let more = bytes.len().max(MIN_CAPACITY.saturating_sub(self.bytes.len()));
        headroom::keeping(Headroom::Quarter, || self.bytes.try_reserve(more))?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Marks all but the last `len` bytes as used. Memory is freed once less than half of it is
    /// needed, so that each byte is moved once on average.
    pub fn keep_last(&mut self, len: usize) {
        self.used = self.bytes.len() - len;
        if len == 0 {
            *self = Input::default();
        } else if self.used >= len {
            self.bytes.drain(..std::mem::take(&mut self.used));
            self.bytes.shrink_to((2 * len).max(MIN_CAPACITY));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_in_order_and_memory_shrinks() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut input, mut next_in, mut next_out) = (Input::default(), 0_u8, 0_u8);
        for _ in 0..10_000 {
            let pushed: Vec<u8> =
                (0..random.usize(..5_000)).map(|_| next_byte(&mut next_in)).collect();
            input.push(&pushed).expect("the test has memory");
            let kept = random.usize(..=input.len());
            for &byte in &input.unused()[..input.len() - kept] {
                assert_eq!(byte, next_byte(&mut next_out));
            }
            input.keep_last(kept);
            assert_eq!((input.len(), input.is_empty()), (kept, kept == 0));
            let most = if kept == 0 { 0 } else { 4 * kept.max(MIN_CAPACITY) };
            assert!(input.capacity() <= most, "{} bytes are allocated", input.capacity());
        }
    }

    #[test]
    fn small_steps_move_the_rest_at_most_20_times() {
        const LEN: usize = 60_000;
        let mut input = Input::default();
        input.push(&[b'x'; LEN]).expect("the test has memory");
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
