//! The whole server without sockets, clock and disk: plain structs, mutated in place,
//! driven by calls.
//!
//! Nothing in here may name the operating system; `tests/tidy.rs` sees to that.

pub mod binlog;
pub mod bytes;
pub mod collections;
pub mod conn;
pub mod headroom;
pub mod json;
pub mod keys;
pub mod monitor;
pub mod protocol;
pub mod queue;
pub mod server;
pub mod time;
