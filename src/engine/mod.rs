//! The whole server without sockets, clock and disk: plain structs, mutated in place, driven by
//! calls. Nothing in here may name the operating system; `tests/tidy.rs` checks that. The layers
//! are in the map at the head of the crate.

pub mod binlog;
pub mod collections;
pub mod commands;
pub mod conn;
pub mod digest;
pub mod headroom;
pub mod keys;
pub mod limits;
pub mod lists;
pub mod monitor;
pub mod protocol;
pub mod queue;
pub mod reads;
pub mod server;
pub mod store;
pub mod text;
pub mod time;
pub mod work;
