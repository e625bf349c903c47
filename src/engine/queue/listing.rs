//! The text of `list-tubes` and `list-tubes-watched` for more than 1,024 tubes.
//!
//! A list of 100,000 tubes takes milliseconds to make and megabytes to store. So each iteration
//! adds at most 1,024 names, in pieces of memory that are never moved. All replies with the list
//! share it: a client that does not read its reply has no copy of its own.

use crate::engine::collections::slab::PAGE_BYTES;
use crate::engine::headroom::{self, Headroom};
use crate::engine::text::CR_LF;
use std::cell::Cell;
use std::collections::TryReserveError;
use std::rc::Rc;

/// The bytes of a list; the CR LF behind them is added when it is complete.
#[derive(Debug)]
pub struct ListText {
    /// All but the last one are full.
    pieces: Vec<Vec<u8>>,
    /// The bytes of all lists.
    all_bytes: Rc<Cell<u64>>,
}

impl ListText {
    /// Returns a list without names. Its bytes are counted in `all_bytes` as long as it exists.
    pub fn new(all_bytes: &Rc<Cell<u64>>) -> Result<ListText, TryReserveError> {
        let all_bytes = Rc::clone(all_bytes);
        let mut list = ListText { pieces: Vec::new(), all_bytes };
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
        self.pieces.iter().map(Vec::len).sum()
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
            self.all_bytes.update(|bytes| bytes + fitting.len() as u64);
            bytes = rest;
        }
        Ok(())
    }
}

impl Drop for ListText {
    fn drop(&mut self) {
        self.all_bytes.update(|bytes| bytes - self.len() as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_make_up_the_document() {
        let all_bytes = Rc::default();
        let mut list = ListText::new(&all_bytes).expect("no memory");
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
        assert_eq!(all_bytes.get(), expected.len() as u64);
        drop(list);
        assert_eq!(all_bytes.get(), 0);
    }
}
