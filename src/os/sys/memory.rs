//! The allocator of the process: the system's, with a reserve for when the system has no memory.
//!
//! Most of Rust's library aborts the process when an allocation fails. So 4 MiB are kept back, in 32
//! pieces of 128 KiB. When the system refuses an allocation, pieces are released until it succeeds.
//!
//! An allocation whose failure is handled must leave a part of the pieces (`engine/headroom.rs`).
//! If it is larger than the rest, it fails and no piece is released. While fewer than a quarter of
//! the pieces are held, it fails even if the system has memory: the last pieces were released for
//! allocations that cannot fail.
//!
//! [`has_headroom`] refills the reserve before it returns `false`. An attempt ends with the first
//! piece that the system refuses. Attempts are made once in 10 ms, so that a flood of commands does not become a flood
//! of system calls.
//!
//! A piece is a block of the system's allocator that is never written to. So it is address space from the kernel
//! or, where the kernel refuses, free memory in the heap. Under a limit of address space (`ulimit -v`) a
//! drained backlog may leave free memory only there.
//!
//! Every block is the system's own. In a program that does not call [`keep_headroom`] this is the
//! system's allocator.

use super::clock::monotonic;
use crate::engine::headroom::{self, Headroom};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The system's allocator, with the headroom of the process.
pub struct Allocator;

static RESERVE: MemoryReserve = MemoryReserve::new();

/// Begins to keep memory back: the whole reserve, or as much as the system has.
pub fn keep_headroom() {
    RESERVE.is_kept.store(true, Relaxed);
    RESERVE.refill();
}

/// Returns whether at least this part of the headroom is held, after an attempt to refill it.
pub fn has_headroom(least: Headroom) -> bool {
    RESERVE.has(least)
}

/// Makes the C library return blocks of `bytes` bytes or more to the system as soon as they are freed.
/// By default glibc raises that limit to the size of the largest block freed so far.
pub fn return_large_blocks(bytes: usize) {
    // Other C libraries return large blocks by default.
    #[cfg(not(target_env = "gnu"))]
    let _ = bytes;
    #[cfg(target_env = "gnu")]
    // SAFETY: two plain numbers; the allocator changes nothing about the blocks it has given out.
    unsafe {
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        libc::mallopt(libc::M_MMAP_THRESHOLD, bytes);
        // By default glibc maps at most 65,536 blocks, and takes further ones from the heap.
        libc::mallopt(libc::M_MMAP_MAX, libc::c_int::MAX);
    }
}

/// Returns the resident memory of this process, or `None` if /proc is missing.
pub fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split(' ').nth(1)?.parse().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}

const PIECES: usize = 32;
/// Small enough to be found in a heap with many holes.
const PIECE_BYTES: usize = 128 * 1024;
const PIECE: Layout = Layout::new::<[u64; PIECE_BYTES / size_of::<u64>()]>();
const REFILL_PAUSE_NANOS: u64 = 10_000_000;

/// Returns the number of pieces in a part of the headroom.
const fn pieces(headroom: Headroom) -> usize {
    PIECES / 4 * headroom as usize
}

/// The memory that is kept back.
struct MemoryReserve {
    is_kept: AtomicBool,
    /// The number of pieces that are held.
    held: AtomicUsize,
    /// The pieces, or null.
    pieces: [AtomicPtr<u8>; PIECES],
    /// The time of the last attempt to refill, in nanoseconds.
    tried_at: AtomicU64,
}

impl MemoryReserve {
    const fn new() -> MemoryReserve {
        MemoryReserve {
            is_kept: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            pieces: [const { AtomicPtr::new(ptr::null_mut()) }; PIECES],
            tried_at: AtomicU64::new(0),
        }
    }

    fn held(&self) -> usize {
        self.held.load(Relaxed)
    }

    fn has(&self, least: Headroom) -> bool {
        let least = pieces(least);
        self.held() >= least || !self.is_kept.load(Relaxed) || {
            self.refill_if_due();
            self.held() >= least
        }
    }

    // ---- Allocating ----

    /// Allocates `bytes` bytes, and releases pieces if the system refuses.
    #[inline]
    fn allocate(&self, bytes: usize, from_system: impl Fn() -> *mut u8) -> *mut u8 {
        if self.held() < pieces(Headroom::Quarter) && self.is_refused() {
            return ptr::null_mut();
        }
        let block = from_system();
        if block.is_null() { self.allocate_after_release(bytes, from_system) } else { block }
    }

    /// Returns whether the present allocation is refused because too few pieces are held. Without a reserve tests
    /// may refuse it.
    #[cold]
    fn is_refused(&self) -> bool {
        headroom::required() != Headroom::None
            && (headroom::is_refused() || !self.has(Headroom::Quarter))
    }

    #[cold]
    fn allocate_after_release(&self, bytes: usize, from_system: impl Fn() -> *mut u8) -> *mut u8 {
        let left = pieces(headroom::required());
        if bytes > self.held().saturating_sub(left) * PIECE_BYTES {
            return ptr::null_mut();
        }
        while self.held() > left && self.release_one() {
            let block = from_system();
            if !block.is_null() {
                return block;
            }
        }
        // Releasing them did not help.
        self.refill();
        ptr::null_mut()
    }

    // ---- Pieces ----

    fn refill_if_due(&self) {
        let passed = monotonic().as_nanos().saturating_sub(self.tried_at.load(Relaxed));
        if passed >= REFILL_PAUSE_NANOS {
            self.refill();
        }
    }

    /// Takes missing pieces until the system refuses.
    fn refill(&self) {
        self.tried_at.store(monotonic().as_nanos(), Relaxed);
        while self.held() < PIECES && self.hold_one() {
            self.held.fetch_add(1, Relaxed);
        }
    }

    fn hold_one(&self) -> bool {
        // SAFETY: the length of a piece is not zero.
        let piece = unsafe { System.alloc(PIECE) };
        let hold = |slot: &AtomicPtr<u8>| {
            slot.compare_exchange(ptr::null_mut(), piece, Relaxed, Relaxed).is_ok()
        };
        let is_held = !piece.is_null() && self.pieces.iter().any(hold);
        if !is_held && !piece.is_null() {
            free(piece);
        }
        is_held
    }

    fn release_one(&self) -> bool {
        let mut pieces = self.pieces.iter().map(|slot| slot.swap(ptr::null_mut(), Relaxed));
        let Some(piece) = pieces.find(|piece| !piece.is_null()) else { return false };
        free(piece);
        self.held.fetch_sub(1, Relaxed);
        true
    }
}

// SAFETY: each block is from the system's allocator, and goes back to it, with the layout that the
// caller gives. A failed `realloc` leaves the block as it was, so it can be tried again.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller ensures what this call requires.
        RESERVE.allocate(layout.size(), || unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller ensures what this call requires.
        RESERVE.allocate(layout.size(), || unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller ensures what this call requires.
        RESERVE.allocate(bytes, || unsafe { System.realloc(block, layout, bytes) })
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller ensures what this call requires.
        unsafe { System.dealloc(block, layout) }
    }
}

fn free(piece: *mut u8) {
    // SAFETY: it was allocated with this layout, and the caller has the only pointer to it.
    unsafe { System.dealloc(piece, PIECE) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::headroom::keeping;
    use std::cell::Cell;

    fn kept() -> MemoryReserve {
        let reserve = MemoryReserve::new();
        assert!(reserve.has(Headroom::Whole), "without a reserve nothing is refused");
        reserve.is_kept.store(true, Relaxed);
        reserve.refill();
        assert_eq!(reserve.held(), PIECES);
        reserve
    }

    /// A system that refuses the first `times` allocations.
    fn refusing(times: usize) -> impl Fn() -> *mut u8 {
        let left = Cell::new(times);
        move || match left.get() {
            0 => ptr::dangling_mut(),
            some => {
                left.set(some - 1);
                ptr::null_mut()
            }
        }
    }

    fn drop_pieces(reserve: &MemoryReserve) {
        while reserve.release_one() {}
    }

    #[test]
    fn pieces_are_released_until_the_system_has_memory() {
        let reserve = kept();
        assert!(!reserve.allocate(100, refusing(0)).is_null());
        assert_eq!(reserve.held(), PIECES);
        assert!(!reserve.allocate(100, refusing(3)).is_null());
        assert_eq!(reserve.held(), PIECES - 3);
        assert!(!reserve.allocate(100, refusing(PIECES - 3)).is_null());
        assert_eq!(reserve.held(), 0);
    }

    #[test]
    fn allocations_that_can_fail_leave_their_part() {
        let reserve = kept();
        let fails = |least| {
            keeping(least, || reserve.allocate(100, refusing(PIECES - pieces(least) + 1)).is_null())
        };
        for least in [Headroom::Whole, Headroom::ThreeQuarters, Headroom::Half, Headroom::Quarter] {
            assert!(fails(least));
            assert_eq!(reserve.held(), PIECES, "pieces that did not help are taken back");
            let times = PIECES - pieces(least);
            assert!(!keeping(least, || reserve.allocate(100, refusing(times))).is_null());
            assert_eq!(reserve.held(), pieces(least));
            reserve.refill();
        }
        drop_pieces(&reserve);
    }

    #[test]
    fn below_a_quarter_only_allocations_that_cannot_fail_succeed() {
        let reserve = kept();
        assert!(!reserve.allocate(100, refusing(PIECES - 1)).is_null());
        assert_eq!(reserve.held(), 1);
        // The last attempt to refill is recent.
        reserve.tried_at.store(u64::MAX / 2, Relaxed);
        let has_memory =
            || keeping(Headroom::Quarter, || !reserve.allocate(100, refusing(0)).is_null());
        assert!(!has_memory());
        assert!(!reserve.allocate(100, refusing(0)).is_null());
        reserve.tried_at.store(0, Relaxed);
        assert!(has_memory());
        assert_eq!(reserve.held(), PIECES);
        drop_pieces(&reserve);
    }

    #[test]
    fn allocations_larger_than_the_headroom_fail_at_once() {
        let reserve = kept();
        let all = PIECES * PIECE_BYTES;
        assert!(reserve.allocate(all + 1, refusing(1)).is_null());
        assert_eq!(reserve.held(), PIECES);
        let half = keeping(Headroom::Half, || reserve.allocate(all / 2 + 1, refusing(1)));
        assert!(half.is_null());
        assert_eq!(reserve.held(), PIECES);
        drop_pieces(&reserve);
    }
}
