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
//! | [`membership`] | what startup and the event loop call |
//! | [`options`] | how to reach etcd |
//! | [`standing`] | the part of a server in its cluster |
//! | [`disk`] | files for the engine; gathers changes |
//! | [`shared`] | the state that both threads see |
//! | [`thread`] | serves requests of the event loop, one after the other |
//! | [`lease`] | becomes the leader and stays it |
//! | [`log`] | transactions that read and change chunks |
//! | [`pages`] | what was read of the files before it is wanted |
//! | [`keys`] | names and values of the keys |
//! | [`nodes`] | requests to nodes, and the kinds of their failures |
//! | [`api`] | etcd's interface: the seam at which tests put a fake |
//! | [`client`] | the real etcd behind it |
//! | [`absent`] | what stands for a membership without the feature `etcd` |
//!
//! Without the feature only [`options`], [`standing`] and [`absent`] are there.

#![allow(missing_docs, reason = "only tests see it from outside")]
#![allow(rustdoc::broken_intra_doc_links, reason = "the feature leaves out some of the files")]

#[cfg(not(feature = "etcd"))]
mod absent;
#[cfg(feature = "etcd")]
pub mod api;
#[cfg(feature = "etcd")]
mod client;
#[cfg(feature = "etcd")]
mod disk;
#[cfg(feature = "etcd")]
mod keys;
#[cfg(feature = "etcd")]
mod lease;
#[cfg(feature = "etcd")]
mod log;
#[cfg(feature = "etcd")]
mod membership;
#[cfg(feature = "etcd")]
mod nodes;
mod options;
#[cfg(feature = "etcd")]
mod pages;
#[cfg(feature = "etcd")]
mod shared;
mod standing;
#[cfg(feature = "etcd")]
mod thread;

#[cfg(not(feature = "etcd"))]
pub use absent::Membership;
#[cfg(feature = "etcd")]
pub use membership::Membership;
// For tests.
pub use options::{EtcdOptions, TlsFiles};
pub use standing::{EXIT_LOST, MembershipError, Standing};
#[cfg(feature = "etcd")]
pub use {
    disk::EtcdDisk,
    keys::Keys,
    lease::Candidate,
    nodes::Nodes,
    shared::{Role, Shared},
    thread::{Duty, Request, serve},
};
