//! The membership of a server in a cluster: what options, startup and the event loop know of a binlog in etcd.
//!
//! In a program without the feature `etcd` no server is a member, because options refuse a URL of etcd.

#![cfg_attr(not(feature = "etcd"), expect(dead_code, reason = "there is no cluster without etcd"))]

use std::path::PathBuf;
#[cfg(not(feature = "etcd"))]
use {
    super::failure::Failure, crate::engine::binlog::disk::Disk, mio::Waker, std::io,
    std::path::Path,
};

#[cfg(feature = "etcd")]
pub use super::etcd::Membership;

/// How to reach a binlog in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdOptions {
    /// The text of the URL, for messages.
    pub url: String,
    /// The addresses of the nodes: `HOST:PORT`.
    pub nodes: Vec<String>,
    /// All keys begin with it and a slash. It begins with a slash and does not end in one.
    pub prefix: String,
    /// The files for TLS; `None` means no TLS.
    pub tls: Option<TlsFiles>,
    /// The size of a file in bytes.
    pub file_size: u32,
    /// The time in seconds after which another server leads when this one is gone.
    pub lease_ttl_secs: u32,
    /// The quota of etcd in bytes.
    pub quota: u64,
}

/// Returns how many bytes in etcd may be in use before puts are refused: the rest of its quota is for deletes.
pub fn puts_end(quota: u64) -> u64 {
    quota / 8 * 7
}

/// The files for TLS, in PEM format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificates of the authorities that sign the certificates of nodes.
    pub authorities: PathBuf,
    /// The certificate of the server and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Why a process is a member of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// It leads, as soon as no other server does.
    Lead,
    /// The same, to import a binlog: the prefix must have none.
    Import,
    /// It only reads the log. Another server may lead.
    Read,
}

/// The part of a server in its cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Standing {
    /// It is not known yet whether another server leads.
    #[default]
    Undecided,
    /// The server with this name leads.
    Standby(String),
    /// This server leads.
    Leader,
}

/// The exit code of a server that led and does not any more: EX_TEMPFAIL of sysexits(3).
pub const EXIT_LOST: u8 = 75;

/// A server that leads, or waits until it can.
#[cfg(not(feature = "etcd"))]
pub enum Membership {}

#[cfg(not(feature = "etcd"))]
impl Membership {
    pub fn join(_: &EtcdOptions, _: Duty) -> Result<Membership, Failure> {
        Err(Failure::new(super::failure::EXIT_REFUSED, "this program was built without etcd"))
    }

    pub fn leave(etcd: &EtcdOptions, _: &Path) -> Result<(), Failure> {
        Membership::join(etcd, Duty::Lead).map(drop)
    }

    pub fn set_waker(&self, _: Waker) {
        match *self {}
    }

    pub fn standing(&self) -> Result<Standing, Failure> {
        match *self {}
    }

    pub fn check(&self) -> Result<(), Failure> {
        match *self {}
    }

    pub fn disk(&self) -> Box<dyn Disk> {
        match *self {}
    }

    pub fn end_import(&self) -> io::Result<()> {
        match *self {}
    }
}
