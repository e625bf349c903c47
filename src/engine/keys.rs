//! Keys: 32-bit integers with a type for each kind of object.
//!
//! A key is valid until its object is removed. Then the number is reused. Job ids are not keys:
//! clients store them, so they are never reused.

use std::num::NonZero;

/// A number that no key has. A default key has the number 0, which others have too.
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
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
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
    /// A body of a job, in the slab of its size class.
    BodyKey;
    /// The counts of a job of which one is above 63.
    LargeCountsKey;
    /// The key of a unique job that is not freed.
    UniqueKey;
    /// A group of jobs of which only a limited number may be reserved.
    GroupKey;
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

    /// Returns the number by which clients and log lines name the connection, from 1 on.
    pub fn id(self) -> u64 {
        u64::from(self.0) + 1
    }
}

/// A job in its group. It is not 0, so that a slot with one needs no mark that it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberKey(NonZero<u32>);

impl MemberKey {
    /// In the place of the key of a job without a group.
    pub const NONE: MemberKey = MemberKey(NonZero::<u32>::MAX);

    /// Returns the key if there is a group.
    pub fn in_group(self) -> Option<MemberKey> {
        (self != MemberKey::NONE).then_some(self)
    }
}

impl Key for MemberKey {
    fn from_number(number: u32) -> MemberKey {
        MemberKey(NonZero::<u32>::MIN.saturating_add(number))
    }

    fn number(self) -> u32 {
        self.0.get() - 1
    }
}

impl UniqueKey {
    /// In the place of the key of a job without one.
    pub const NONE: UniqueKey = UniqueKey(NIL);
}

impl BodyKey {
    /// The key of a body that is not in memory.
    pub const COLD: BodyKey = BodyKey(NIL);
}

impl TubeKey {
    /// The key of the tube `default`, which is created first and never removed.
    pub const DEFAULT: TubeKey = TubeKey(0);
}
