//! The text of `list-tubes` and `list-tubes-watched` for more than 1,024 tubes.
//!
//! A list of 100,000 tubes takes milliseconds to make and megabytes to store. So each iteration
//! adds at most 1,024 names, in pieces of memory that are never moved. All replies with the list
//! share it: a client that does not read its reply has no copy of its own.

use crate::engine::collections::slab::PAGE_BYTES;
use crate::engine::headroom::{self, Headroom};
use crate::engine::text::CR_LF;
use std::collections::TryReserveError;

/// The bytes of a list; the CR LF behind them is added when it is complete.
#[derive(Debug)]
pub struct ListText {
    /// All but the last one are full.
    pieces: Vec<Vec<u8>>,
    len: usize,
}

impl ListText {
    /// Returns a list without names.
    pub fn new() -> Result<ListText, TryReserveError> {
        let mut list = ListText { pieces: Vec::new(), len: 0 };
        list.push(b"---\n")?;
        Ok(list)
    }

    /// Adds a name. After an error a part of its line may have been added.
    pub fn push_name(&mut self, name: &str) -> Result<(), TryReserveError> {
        self.push(b"- ")?;
        self.push(name.as_bytes())?;
        self.push(b"\n")
    }

    /// Adds the CR LF that ends the reply.
    pub fn finish(&mut self) -> Result<(), TryReserveError> {
        self.push(CR_LF)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    pub fn piece(&self, index: usize) -> &[u8] {
        &self.pieces[index]
    }

    fn push(&mut self, mut bytes: &[u8]) -> Result<(), TryReserveError> {
        while !bytes.is_empty() {
            if self.pieces.last().is_none_or(|last| last.len() == PAGE_BYTES) {
                let mut piece = Vec::new();
                headroom::leave(Headroom::ThreeQuarters, || {
                    self.pieces.try_reserve(1)?;
                    piece.try_reserve_exact(PAGE_BYTES)
                })?;
                self.pieces.push(piece);
            }
            let Some(last) = self.pieces.last_mut() else { break };
            let (fitting, rest) = bytes.split_at(bytes.len().min(PAGE_BYTES - last.len()));
            last.extend_from_slice(fitting);
            self.len += fitting.len();
            bytes = rest;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_make_up_the_document() {
        let mut list = ListText::new().expect("no memory");
        let mut expected = String::from("---\n");
        for number in 0..40_000 {
            let name = format!("tube-{number}");
            list.push_name(&name).expect("no memory");
            expected += &format!("- {name}\n");
        }
        list.finish().expect("no memory");
        expected += "\r\n";
        let bytes: Vec<u8> =
            (0..list.piece_count()).flat_map(|index| list.piece(index).to_vec()).collect();
        assert_eq!(bytes, expected.as_bytes());
        assert_eq!(list.len(), expected.len());
        assert!(list.piece_count() > 3);
    }
}
