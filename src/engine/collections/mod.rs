//! Containers of the engine. The head of each states what `std` and `slab` lack, and what it saves.
//!
//! A [`TryReserveError`](std::collections::TryReserveError) means that there is no memory; the
//! entries are unchanged. `insert` and `alloc` are for callers that have reserved memory before.
//!
//! The figures are CPU times and resident memory, measured with a release build on x86-64 Linux.
//!
//! | file | owns |
//! |---|---|
//! | [`slab`] | entries under keys, in pages that are mapped and unmapped |
//! | [`secondary_map`] | entries under the keys of another slab |
//! | [`hash_index`] | a hash index that is never rebuilt; a slab with such an index |
//! | [`job_index`] | keys of jobs by id, in blocks of eight ids |
//! | [`list`] | a linked list with its links inside the entries |
//! | [`heap`] | a heap with removal by index |
//! | [`ordered`] | entries by rank: a run of those that come in order, and a heap |
//! | [`wheel`] | a timer wheel |
//! | [`histogram`] | counts of durations by bound |

pub mod hash_index;
pub mod heap;
pub mod histogram;
pub mod job_index;
pub mod list;
pub mod ordered;
pub mod secondary_map;
pub mod slab;
pub mod wheel;
