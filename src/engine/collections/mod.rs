//! Containers of the engine. The head of each states what `std` and `slab` lack, and what it saves.
//!
//! After a [`NoMemory`](crate::engine::headroom::NoMemory) the entries are unchanged. `insert` and `alloc` are for
//! callers that have reserved memory before.
//!
//! The figures are CPU times and resident memory, measured with a release build on x86-64 Linux. What each job needs
//! is always inlined, as in [`queue`](super::queue).
//!
//! | file | owns |
//! |---|---|
//! | [`slab`] | entries under keys, in pages that are mapped and unmapped |
//! | [`chains`] | a slab with a hash index that is never rebuilt |
//! | [`list`] | a linked list with its links inside the entries |
//! | [`heap`] | a heap with removal by index |
//! | [`tree`] | a sorted tree with its links inside the entries |
//! | [`timers`] | timers, in a heap |
//! | [`histogram`] | counts of durations by bound |

pub mod chains;
pub mod heap;
pub mod histogram;
pub mod list;
pub mod slab;
pub mod timers;
pub mod tree;

/// Frees the memory behind the entries once there is room for two more steps. Room for one stays, so that adding
/// and removing entries in turn allocates nothing.
#[inline]
fn shrink_by_step<T>(entries: &mut Vec<T>, step: usize) {
    if entries.capacity() - entries.len() > 2 * step {
        entries.shrink_to(entries.len() + step);
    }
}
