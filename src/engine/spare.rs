//! Memory held back for the time when there is no more.
//!
//! What clients send is allocated so that it can fail: they are told OUT_OF_MEMORY. But
//! much else that is small has no way to fail, from the list of connections to the text of
//! `stats`, and a queue that ends because of that loses everything. So some memory is held back.
//!
//! Puts are taken only while all of it is; when one finds no more memory, most is let go, for
//! tubes, watches and connections to live on. These are taken only while the last part is held; when
//! one of them finds no more, that is let go too, for what cannot fail.
//!
//! It is address space rather than memory: nothing is ever written to it.

use std::collections::TryReserveError;

/// Memory held back.
#[derive(Debug, Default)]
pub struct Spare {
    /// All blocks, or some on the way to all.
    blocks: Vec<Vec<u8>>,
}

/// Together 4 MiB, in pieces that can be found in a heap with many holes.
pub const ALL: usize = 32;
/// The last part of it, in the same pieces.
pub const LAST: usize = 8;
const BLOCK_LEN: usize = 128 * 1024;

impl Spare {
    /// Holds so many blocks back, as far as it does not already.
    ///
    /// # Errors
    /// There is not enough memory: it holds as many as before.
    pub fn hold(&mut self, blocks: usize) -> Result<(), TryReserveError> {
        let before = self.blocks.len();
        while self.blocks.len() < blocks {
            let held = self.hold_one_more();
            if held.is_err() {
                self.blocks.truncate(before);
                return held;
            }
        }
        Ok(())
    }

    /// Leaves the memory to others, but for so many blocks.
    pub fn let_go(&mut self, but: usize) {
        self.blocks.truncate(but);
    }

    fn hold_one_more(&mut self) -> Result<(), TryReserveError> {
        self.blocks.try_reserve(1)?;
        let mut block = Vec::new();
        block.try_reserve_exact(BLOCK_LEN)?;
        self.blocks.push(block);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_let_go_can_be_held_again() {
        let mut spare = Spare::default();
        for _ in 0..3 {
            spare.hold(ALL).unwrap();
            assert_eq!(spare.blocks.iter().map(Vec::capacity).sum::<usize>(), ALL * BLOCK_LEN);
            spare.hold(LAST).unwrap();
            assert_eq!(spare.blocks.len(), ALL);
            spare.let_go(LAST);
            assert_eq!(spare.blocks.len(), LAST);
            spare.let_go(0);
            spare.let_go(LAST);
            assert!(spare.blocks.is_empty());
        }
    }
}
