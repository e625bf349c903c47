//! The whole server without sockets, clock and disk: plain structs, mutated in place,
//! driven by calls.
//!
//! Nothing in here may name the operating system; `tests/tidy.rs` sees to that.

pub mod beside;
pub mod binlog;
pub mod body;
pub mod bytes;
pub mod check;
pub mod command;
pub mod compaction;
pub mod conn;
pub mod disk;
pub mod durable;
pub mod headroom;
pub mod heap;
pub mod histogram;
pub mod http;
pub mod ids;
pub mod index;
pub mod input;
pub mod inspect;
pub mod job;
pub mod json;
pub mod keys;
pub mod list;
pub mod listing;
pub mod metrics;
pub mod output;
pub mod pages;
pub mod queue;
pub mod record;
pub mod replay;
pub mod reply;
pub mod scan;
pub mod segments;
pub mod server;
pub mod slots;
pub mod space;
pub mod stats;
pub mod table;
pub mod time;
pub mod tube;
pub mod visit;
pub mod waiting;
pub mod wheel;
