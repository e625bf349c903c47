//! Containers of the engine. The head of each says what std and `slab` lack.
//!
//! | file | owns |
//! |---|---|
//! | [`slots`] | which slots of a page are taken |
//! | [`pages`] | entries in pages that come and go |
//! | [`beside`] | entries under the keys of another slab |
//! | [`index`] | a hash index that never rebuilds |
//! | [`table`] | entries in pages, found by hash |
//! | [`ids`] | jobs by id, in blocks of eight ids |
//! | [`list`] | a linked list through entries |
//! | [`heap`] | an indexed heap |
//! | [`wheel`] | a timer wheel |
//! | [`histogram`] | counts of durations |

pub mod beside;
pub mod heap;
pub mod histogram;
pub mod ids;
pub mod index;
pub mod list;
pub mod pages;
pub mod slots;
pub mod table;
pub mod wheel;
