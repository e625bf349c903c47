//! The names of things: small integers that only their own kind can be mistaken for.
//!
//! A key is good from the moment its thing is made until the thing goes; then the number
//! is used again. Only job ids, which clients hold, are never used twice.

use super::list::NIL;

/// A job in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct JobKey(pub(super) u32);

/// A tube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TubeKey(pub(super) u32);

/// A connection: the same number in the rules, in `server.rs` and in the event loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnKey(u32);

/// One connection watching one tube.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WatchKey(pub(super) u32);

impl ConnKey {
    /// The key of the connection with this index.
    ///
    /// # Panics
    /// The index is not below 2^32 - 1; no machine has as many descriptors.
    pub fn from_index(index: usize) -> ConnKey {
        let key = u32::try_from(index).ok().filter(|&key| key != NIL);
        ConnKey(key.expect("there are fewer than 2^32 - 1 connections"))
    }

    pub(super) fn key(self) -> u32 {
        self.0
    }

    /// The index of the connection, wherever connections are kept.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
