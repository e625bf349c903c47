//! Which allocations may use the memory that the process keeps back: the headroom.
//!
//! The allocator of the process gives the headroom up piece by piece when the system refuses an
//! allocation (`os/memory.rs`). An allocation that cannot fail ends the process when there is no
//! memory. So an allocation whose failure is handled must leave some of the headroom: it is made in
//! [`leave`], with the part that must remain:
//!
//! | part that remains | allocations |
//! |---|---|
//! | [`Headroom::Whole`] | puts, and bodies that are arriving |
//! | [`Headroom::ThreeQuarters`] | tubes, watches, pauses; waiting for a job; lists of tubes |
//! | [`Headroom::Half`] | clients |
//! | [`Headroom::Quarter`] | replies, command lines, the queues of existing jobs |
//! | [`Headroom::None`] | those that cannot fail: they are made outside of [`leave`] |
//!
//! Everything that grows with the number of clients, tubes, watches, jobs or files, or with the
//! length of what a client sends or receives, is allocated in [`leave`]. Three kinds are not:
//!
//! - texts of a few KiB that are freed in the same iteration of the loop;
//! - lists with a fixed bound of at most 160 KiB;
//! - boxes of at most 64 bytes for each large body, each pause and each client with several tubes.
//!   They are made only while half of the headroom is there.

use std::cell::Cell;

/// A part of the headroom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Headroom {
    None,
    Quarter,
    Half,
    ThreeQuarters,
    Whole,
}

thread_local! {
    static LEAST: Cell<Headroom> = const { Cell::new(Headroom::None) };
}

/// Runs `allocate`. An allocation in it fails if it would leave less than `least` of the headroom.
/// In nested calls the greater of the two parts counts.
pub fn leave<R>(least: Headroom, allocate: impl FnOnce() -> R) -> R {
    let outer = LEAST.replace(least.max(LEAST.get()));
    let result = allocate();
    LEAST.set(outer);
    result
}

/// Returns the part of the headroom that the present allocation must leave.
pub fn to_be_left() -> Headroom {
    LEAST.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greater_holds_and_ends_with_its_call() {
        assert_eq!(to_be_left(), Headroom::None);
        leave(Headroom::Half, || {
            assert_eq!(to_be_left(), Headroom::Half);
            leave(Headroom::Quarter, || assert_eq!(to_be_left(), Headroom::Half));
            leave(Headroom::Whole, || assert_eq!(to_be_left(), Headroom::Whole));
            assert_eq!(to_be_left(), Headroom::Half);
        });
        assert_eq!(to_be_left(), Headroom::None);
    }
}
