//! Lists of very many tubes, as a document that is made in steps and shared by all replies with it.
//!
//! A list of a hundred thousand tubes takes milliseconds to make and megabytes to keep. So it is made
//! a few names at a time while others are served, in pieces of memory that are never moved, and a
//! client that does not read its reply keeps no copy of its own.

use crate::engine::collections::slab::PAGE_BYTES;
use crate::engine::headroom::{self, Headroom};
use crate::engine::text::CR_LF;
use std::collections::TryReserveError;

/// The bytes of a list, with the CR LF behind it once it is complete.
#[derive(Debug)]
pub struct ListText {
    /// All but the last one are full.
    pieces: Vec<Vec<u8>>,
    len: usize,
}

/// A list with at most this many names is made in one step of about 0.1 ms.
pub const LISTED_AT_ONCE: usize = 1024;

impl ListText {
    /// Returns a list without names.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new() -> Result<ListText, TryReserveError> {
        let mut list = ListText { pieces: Vec::new(), len: 0 };
        list.push(b"---\n")?;
        Ok(list)
    }

    /// Adds a name.
    ///
    /// # Errors
    /// There is no memory for it: a part of the line may have been added.
    pub fn push_name(&mut self, name: &str) -> Result<(), TryReserveError> {
        self.push(b"- ")?;
        self.push(name.as_bytes())?;
        self.push(b"\n")
    }

    /// Adds what ends the reply, and returns the number of bytes before that.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn finish(&mut self) -> Result<usize, TryReserveError> {
        let document_len = self.len;
        self.push(CR_LF)?;
        Ok(document_len)
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes; never, since a list has a head.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of pieces.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the bytes of one piece.
    ///
    /// # Panics
    /// There are fewer pieces.
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
        let mut list = ListText::new().expect("the test needs little memory");
        let mut expected = String::from("---\n");
        for number in 0..40_000 {
            let name = format!("tube-{number}");
            list.push_name(&name).expect("the test needs little memory");
            expected += &format!("- {name}\n");
        }
        assert_eq!(list.finish().expect("the test needs little memory"), expected.len());
        expected += "\r\n";
        let bytes: Vec<u8> =
            (0..list.piece_count()).flat_map(|index| list.piece(index).to_vec()).collect();
        assert_eq!(bytes, expected.as_bytes());
        assert_eq!((list.len(), list.is_empty()), (expected.len(), false));
        assert!(list.piece_count() > 3);
    }
}
