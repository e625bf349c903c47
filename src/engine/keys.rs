//! The names of things: small integers that only their own kind can be mistaken for.
//!
//! A key is good from the moment its thing is made until the thing goes; then the number
//! is used again. Only job ids, which clients hold, are never used twice.

/// The number of no key.
pub const NIL: u32 = u32::MAX;

/// A small integer that names one kind of thing.
pub trait Key: Copy {
    /// The key with this number.
    fn from_number(number: u32) -> Self;

    /// The number of this key.
    fn number(self) -> u32;
}

macro_rules! keys {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);

        impl Key for $name {
            fn from_number(number: u32) -> $name {
                $name(number)
            }

            fn number(self) -> u32 {
                self.0
            }
        }
    )*};
}

keys! {
    /// A job in memory.
    JobKey;
    /// A tube.
    TubeKey;
    /// A connection: the same number in the rules, in `server.rs` and in the event loop.
    ConnKey;
    /// One connection watching one tube.
    WatchKey;
    /// A timer of a wheel.
    TimerKey;
    /// What the binlog knows of a job.
    LogKey;
    /// A body among those of its width, or among the large ones.
    BodyKey;
    /// Eight ids in a row.
    BlockKey;
}

impl ConnKey {
    /// The key of the connection with this index.
    ///
    /// # Panics
    /// The index is not below 2^32 - 1; no machine has as many descriptors.
    pub fn from_index(index: usize) -> ConnKey {
        let number = u32::try_from(index).ok().filter(|&number| number != NIL);
        ConnKey(number.expect("there are fewer than 2^32 - 1 connections"))
    }

    /// The index of the connection, wherever connections are kept.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl LogKey {
    /// The key of a job that the binlog does not know.
    pub const NONE: LogKey = LogKey(NIL);
}

impl TubeKey {
    /// The first tube that was made; it stays for ever.
    pub const FIRST: TubeKey = TubeKey(0);
}
