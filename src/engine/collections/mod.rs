//! Containers of the engine. The head of each says what std and `slab` lack.
//!
//! | file | owns |
//! |---|---|
//! | [`slab`] | entries under keys, in pages that come and go |
//! | [`secondary_map`] | entries under the keys of another slab |
//! | [`hash_index`] | a hash index that never rebuilds; a slab with one |
//! | [`job_index`] | jobs by id, in blocks of eight ids |
//! | [`list`] | a linked list through entries |
//! | [`heap`] | an indexed heap |
//! | [`wheel`] | a timer wheel |
//! | [`histogram`] | counts of durations |

pub mod hash_index;
pub mod heap;
pub mod histogram;
pub mod job_index;
pub mod list;
pub mod secondary_map;
pub mod slab;
pub mod wheel;
