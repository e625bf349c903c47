//! Keys: 32-bit integers with a type for each kind of object.
//!
//! A key is valid until its object is removed. Then the number is reused. Job ids are not keys:
//! clients store them, so they are never reused.

use std::marker::PhantomData;

/// A number that no key has.
pub const NIL: u32 = u32::MAX;

/// The key of one kind of object.
pub trait Key: Copy {
    /// Returns the key with this number.
    fn from_number(number: u32) -> Self;

    /// Returns the number of the key.
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
    /// A connection. The queue, the server and the event loop use the same number.
    ConnKey;
    /// One connection watching one tube.
    WatchKey;
    /// A timer of a wheel.
    TimerKey;
    /// A job in the binlog.
    LogKey;
    /// A body of a job, in the slab of its size class.
    BodyKey;
    /// The counts of a job of which one is above 63.
    LargeCountsKey;
    /// A block of eight consecutive job ids.
    BlockKey;
    /// An overflow bucket of a hash index.
    BucketKey;
    /// The key of a unique job that is not freed.
    UniqueKey;
    /// A key of a deleted job that is kept for some time.
    KeptKey;
}

/// A key of one of two kinds, in 32 bits. The numbers of both kinds are below `2^31 - 1`
/// ([`with_31_bits`](crate::engine::collections::slab::PagedSlab::with_31_bits)); a key of the first kind
/// may also be [`NIL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EitherKey<A, B>(u32, PhantomData<(A, B)>);

/// The key in an [`EitherKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Either<A, B> {
    First(A),
    Second(B),
}

/// The bit of a key of the second kind.
const SECOND: u32 = 1 << 31;

impl<A: Key, B: Key> EitherKey<A, B> {
    pub fn from_first(key: A) -> EitherKey<A, B> {
        EitherKey(key.number(), PhantomData)
    }

    pub fn from_second(key: B) -> EitherKey<A, B> {
        EitherKey(key.number() | SECOND, PhantomData)
    }

    /// Returns both kinds as one number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Returns the key with this [`EitherKey::number`].
    pub fn from_number(number: u32) -> EitherKey<A, B> {
        EitherKey(number, PhantomData)
    }

    /// Returns the key, with its kind.
    pub fn split(self) -> Either<A, B> {
        if self.0 & SECOND == 0 || self.0 == NIL {
            Either::First(A::from_number(self.0))
        } else {
            Either::Second(B::from_number(self.0 ^ SECOND))
        }
    }

    /// Returns the key if it is of the second kind.
    pub fn second(self) -> Option<B> {
        match self.split() {
            Either::First(_) => None,
            Either::Second(key) => Some(key),
        }
    }
}

impl ConnKey {
    /// Returns the key of the connection with this index in a slab.
    ///
    /// # Panics
    /// The index is 2^32 - 1 or more, which exceeds the descriptors of a process.
    pub fn from_index(index: usize) -> ConnKey {
        let number = u32::try_from(index).ok().filter(|&number| number != NIL);
        ConnKey(number.expect("there are fewer than 2^32 - 1 connections"))
    }

    /// Returns the index of the connection in a slab.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl LogKey {
    /// The key of a job that is not in the binlog.
    pub const NONE: LogKey = LogKey(NIL);
}

impl BodyKey {
    /// The key of a body that is not in memory.
    pub const NONE: BodyKey = BodyKey(NIL);
}

impl TubeKey {
    /// The key of the tube that is created first and never removed.
    pub const FIRST: TubeKey = TubeKey(0);
}
