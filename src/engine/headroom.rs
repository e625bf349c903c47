//! Limits for allocations on the use of the headroom: memory that the process keeps in reserve.
//!
//! When the system refuses an allocation, the allocator of the process releases the headroom piece
//! by piece (`os/sys/memory.rs`). An allocation that cannot fail aborts the process when no headroom is
//! left. An allocation whose failure is handled therefore leaves a part of the headroom. It is made
//! in [`keeping`], with the part that must remain:
//!
//! | part that remains | allocations |
//! |---|---|
//! | [`Headroom::Whole`] | puts, bodies that are arriving, and changes for etcd that grow |
//! | [`Headroom::ThreeQuarters`] | tubes, watches, pauses; waiting for a job; lists of tubes; moves on a remote disk |
//! | [`Headroom::Half`] | clients; chunks for etcd of more than 4 KiB |
//! | [`Headroom::Quarter`] | replies, command lines, room for reserved jobs; the first clients and watches |
//! | [`Headroom::None`] | allocations that cannot fail, made outside of [`keeping`] |
//!
//! Memory that grows with the number of clients, tubes, watches, jobs or files, or with the length
//! of requests and replies, is allocated in [`keeping`]. Five kinds of memory are not:
//!
//! - texts of a few KiB that are freed in the same loop iteration;
//! - blocks of 16 KiB of changes for etcd: while less than half of the headroom is left, no command adds to them
//!   before those in progress are stored;
//! - lists with a fixed bound of at most 160 KiB;
//! - at most 4 KiB for the request of each of 64 HTTP connections, and slices of pages. A slice has at most
//!   200 KiB, and is made only while three quarters of the headroom are left;
//! - boxes of at most 64 bytes for each large body, each pause and each client with several tubes.
//!   They are allocated only while half of the headroom is left, or for the first clients a quarter. And
//!   one for each `reserve-batch` and `delete-batch` in steps, for whose jobs or ids there was memory just
//!   before.

use std::cell::Cell;
use std::hint::black_box;

/// An allocation has failed, or would have left too little of the headroom.
pub type NoMemory = std::collections::TryReserveError;

/// A part of the headroom. As a number it is in quarters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Headroom {
    None,
    Quarter,
    Half,
    ThreeQuarters,
    Whole,
}

thread_local! {
    static REQUIRED: Cell<Headroom> = const { Cell::new(Headroom::None) };
    static LEFT: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Runs `allocate`, in which each allocation fails that would leave less than `least` of the
/// headroom. In nested calls the greater part counts.
pub fn keeping<R>(least: Headroom, allocate: impl FnOnce() -> R) -> R {
    let outer = REQUIRED.replace(least.max(REQUIRED.get()));
    let result = allocate();
    REQUIRED.set(outer);
    result
}

/// Returns `value` in a box. Unlike that of a `Box`, this allocation can fail.
pub fn try_box<T>(least: Headroom, value: T) -> Result<Box<[T; 1]>, NoMemory> {
    let mut one = Vec::new();
    keeping(least, || one.try_reserve_exact(1))?;
    one.push(value);
    Ok(one.into_boxed_slice().try_into().unwrap_or_else(|_| unreachable!("it has one entry")))
}

/// Ensures that `bytes` can be allocated now. A collection that cannot refuse to grow gets an entry only after that,
/// and outside of [`keeping`].
pub fn ensure_free(least: Headroom, bytes: usize) -> Result<(), NoMemory> {
    let mut free: Vec<u8> = Vec::new();
    keeping(least, || free.try_reserve_exact(bytes))?;
    // The compiler may remove an allocation that nothing uses.
    black_box(&mut free);
    Ok(())
}

/// Returns the part of the headroom that an allocation must leave now.
pub fn required() -> Headroom {
    REQUIRED.get()
}

/// Of the next allocations of this thread that must leave a part of the headroom, lets `count` succeed and refuses
/// the others, as if the system had no memory: tests cannot exhaust that.
pub fn refuse_after(count: usize) {
    LEFT.set(count);
}

/// Counts such an allocation. Returns whether it is refused.
pub fn is_refused() -> bool {
    let is_refused = are_refused();
    LEFT.set(LEFT.get().saturating_sub(1));
    is_refused
}

/// Returns whether all of them are refused.
pub fn are_refused() -> bool {
    LEFT.get() == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nested_calls_require_the_greater_part() {
        assert_eq!(required(), Headroom::None);
        keeping(Headroom::Half, || {
            assert_eq!(required(), Headroom::Half);
            keeping(Headroom::Quarter, || assert_eq!(required(), Headroom::Half));
            keeping(Headroom::Whole, || assert_eq!(required(), Headroom::Whole));
            assert_eq!(required(), Headroom::Half);
        });
        assert_eq!(required(), Headroom::None);
    }
}
