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
//! | [`membership`] | what options, startup and the event loop know of etcd |
//! | [`disk`] | files for the engine; gathers changes |
//! | [`shared`] | the state that both threads see |
//! | [`thread`] | serves requests of the event loop, one after the other |
//! | [`lease`] | becomes the leader and stays it |
//! | [`log`] | transactions that read and change chunks |
//! | [`keys`] | names and values of the keys |
//! | [`nodes`] | requests to nodes, and the kinds of their failures |
//! | [`api`] | etcd's interface: the seam at which tests put a fake |
//! | [`client`] | the real etcd behind it |
//!
//! Without the feature there is only what the rest of the program names.

#![allow(missing_docs, reason = "only tests see it from outside")]
#![allow(rustdoc::broken_intra_doc_links, reason = "the feature leaves out some of the files")]
#![cfg_attr(not(feature = "etcd"), expect(dead_code, reason = "there is no cluster without etcd"))]

mod disk;
mod membership;
mod shared;

#[cfg(feature = "etcd")]
pub mod api;
#[cfg(feature = "etcd")]
mod client;
#[cfg(feature = "etcd")]
mod keys;
#[cfg(feature = "etcd")]
mod lease;
#[cfg(feature = "etcd")]
mod log;
#[cfg(feature = "etcd")]
mod nodes;
#[cfg(feature = "etcd")]
mod thread;

pub use membership::{
    Duty, EXIT_LOST, EtcdOptions, LeaseNote, Membership, MembershipError, Standing, TlsFiles,
};
// For tests.
#[cfg(feature = "etcd")]
pub use {
    disk::{EtcdDisk, Request},
    keys::Keys,
    lease::Candidate,
    nodes::Nodes,
    shared::Shared,
    thread::serve,
};
