//! The binlog in etcd, for two or more servers of which one leads. `dist/README.md` is for operators.
//!
//! etcd takes the place of the disk: [`disk`] is an implementation of
//! [`Disk`](crate::engine::binlog::disk::Disk). The client of etcd runs on a thread of its own, so
//! that the event loop never waits for it. A reply waits in the output of its connection until its
//! record is stored.
//!
//! What makes it safe: only the leader answers ([`lease`]), and only the leader can change the log
//! ([`log`]).
//!
//! | file | owns |
//! |---|---|
//! | [`disk`] | files for the engine; gathers changes |
//! | [`shared`] | the state that both threads see |
//! | [`thread`] | the membership: serves requests of the event loop, one after the other |
//! | [`lease`] | becomes the leader and stays it |
//! | [`log`] | transactions that read and change chunks |
//! | [`keys`] | names and values of the keys |
//! | [`nodes`] | requests to nodes, and the kinds of their failures |
//! | [`api`] | etcd's interface: the seam at which tests put a fake |
//! | [`client`] | the real etcd behind it |

#![allow(missing_docs, reason = "only tests see it from outside")]

pub mod api;
mod client;
mod disk;
mod keys;
mod lease;
mod log;
mod nodes;
mod shared;
mod thread;

pub use thread::Membership;
// For tests.
pub use {
    disk::{EtcdDisk, Request},
    keys::Keys,
    lease::Member,
    nodes::Nodes,
    shared::Shared,
    thread::serve,
};
