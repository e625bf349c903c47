//! Memory held back for the time when there is no more.
//!
//! What clients send is allocated so that it can fail: they are told OUT_OF_MEMORY. But
//! much else that is small has no way to fail, from the list of connections to the heap of
//! reserved jobs, and a queue that ends because of that loses everything. So some memory
//! is held back while puts are taken; when a put finds no more, it is let go, for all the rest
//! to live on, and no put is taken before it could be held back again.
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
const BLOCKS: usize = 32;
const BLOCK_LEN: usize = 128 * 1024;

impl Spare {
    /// Holds all of it back, as far as it is not already.
    ///
    /// # Errors
    /// There is not enough memory; what could be had of it is let go.
    pub fn hold(&mut self) -> Result<(), TryReserveError> {
        while self.blocks.len() < BLOCKS {
            let held = self.hold_one_more();
            if held.is_err() {
                self.let_go();
                return held;
            }
        }
        Ok(())
    }

    /// Leaves the memory to others.
    pub fn let_go(&mut self) {
        self.blocks.clear();
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
            spare.hold().unwrap();
            assert_eq!(spare.blocks.iter().map(Vec::capacity).sum::<usize>(), BLOCKS * BLOCK_LEN);
            spare.let_go();
            assert!(spare.blocks.is_empty());
        }
    }
}
