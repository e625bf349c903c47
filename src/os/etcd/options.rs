//! The operator's choices for a binlog in etcd: nodes, prefix, TLS, lease.

use std::path::PathBuf;

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
}

/// The files for TLS, in PEM format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificates of the authorities that sign the certificates of nodes.
    pub authorities: PathBuf,
    /// The certificate of the server and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}
