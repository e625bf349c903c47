//! The membership of a server in a cluster: what options, startup and the event loop know of etcd.
//!
//! In a program without the feature `etcd` there is no membership, because options refuse a URL of etcd.

use super::disk::{EtcdDisk, Request, Requests};
use super::shared::Shared;
#[cfg(feature = "etcd")]
use super::{keys::Keys, lease::Candidate, nodes::Nodes, thread};
use crate::engine::time::Nanos;
use crate::os::sys::machine;
use mio::Waker;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
#[cfg(feature = "etcd")]
use {crate::os::sys::clock::monotonic, std::env};

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

/// Why a server is no member, or no member any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MembershipError {
    /// etcd refuses what the server needs, or has lost it. Another start would fail too.
    Refused(String),
    /// The server does not lead any more.
    Lost(String),
}

impl MembershipError {
    /// Returns the exit code: that of a binlog that cannot be used, or EX_TEMPFAIL of sysexits(3). A server
    /// that led is to be started again, and stands by then.
    pub fn exit_code(&self) -> u8 {
        match self {
            MembershipError::Refused(_) => 10,
            MembershipError::Lost(_) => EXIT_LOST,
        }
    }
}

/// The lease of a server, in a file, so that `--leave` can end it after the process was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseNote {
    pub lease: i64,
    pid: u32,
    /// When the process was started, by which it differs from a later one with this id.
    started: u64,
}

impl LeaseNote {
    /// Returns the note of this process. Without `/proc` it cannot be found again.
    pub fn of_this_process(lease: i64) -> LeaseNote {
        let pid = std::process::id();
        LeaseNote { lease, pid, started: machine::process_start(pid).unwrap_or(0) }
    }

    pub fn write(self, file: &Path) -> io::Result<()> {
        let LeaseNote { lease, pid, started } = self;
        fs::write(file, format!("{lease:x} {pid} {started}\n"))
    }

    /// Returns the note in a file, or `None` if there is none.
    pub fn read(file: &Path) -> Option<LeaseNote> {
        let text = fs::read_to_string(file).ok()?;
        let mut words = text.strip_suffix('\n')?.split(' ');
        let lease = i64::from_str_radix(words.next()?, 16).ok()?;
        let (pid, started) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(LeaseNote { lease, pid, started })
    }

    /// Returns whether the process has ended. If that is not known, it has not.
    pub fn is_over(self) -> bool {
        let is_known = machine::process_start(std::process::id()).is_some() && self.started > 0;
        is_known && machine::process_start(self.pid) != Some(self.started)
    }
}

/// The exit code of a server that led and does not any more.
pub const EXIT_LOST: u8 = 75;

impl fmt::Display for MembershipError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MembershipError::Refused(reason) => f.write_str(reason),
            MembershipError::Lost(reason) => write!(f, "not leading any more: {reason}"),
        }
    }
}

/// A server that leads, or waits until it can.
#[derive(Debug)]
pub struct Membership {
    shared: Arc<Shared>,
    requests: Requests,
    lease_ttl: Nanos,
    /// There is no membership without etcd.
    #[cfg(not(feature = "etcd"))]
    never: std::convert::Infallible,
}

/// The longest wait for the end of the lease. Without it the lease ends by itself.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

#[cfg(feature = "etcd")]
impl Membership {
    /// Joins the servers with this URL.
    pub fn join(etcd: &EtcdOptions, duty: Duty) -> Result<Membership, MembershipError> {
        let [hostname, ..] = machine::uname();
        let shared = Arc::new(Shared::new(monotonic));
        let candidate = Candidate {
            nodes: Nodes::new(etcd).map_err(MembershipError::Refused)?,
            keys: Keys::new(&etcd.prefix),
            shared: Arc::clone(&shared),
            name: format!("{hostname}:{}", std::process::id()),
            file_size: etcd.file_size,
            ttl_secs: etcd.lease_ttl_secs,
            quota: etcd.quota,
            lease_file: env::var_os("RUNTIME_DIRECTORY")
                .filter(|_| duty == Duty::Lead)
                .and_then(|path| env::split_paths(&path).next())
                .map(|path| path.join("lease")),
            duty,
        };
        let requests = thread::start(candidate);
        let requests = requests.map_err(|error| MembershipError::Refused(error.to_string()))?;
        Ok(Membership { shared, requests, lease_ttl: Nanos::from_secs(etcd.lease_ttl_secs) })
    }

    /// Ends the lease of a process that was killed, so that the next server leads at once.
    pub fn leave(etcd: &EtcdOptions, lease: i64) -> Result<(), MembershipError> {
        let nodes = Nodes::new(etcd);
        let left = nodes.and_then(|nodes| thread::revoke(nodes, lease));
        left.map_err(MembershipError::Refused)
    }
}

#[cfg(not(feature = "etcd"))]
impl Membership {
    pub fn join(_: &EtcdOptions, _: Duty) -> Result<Membership, MembershipError> {
        Err(MembershipError::Refused("this program was built without etcd".to_owned()))
    }

    pub fn leave(_: &EtcdOptions, _: i64) -> Result<(), MembershipError> {
        Ok(())
    }
}

impl Membership {
    /// Sets what wakes the caller when [`Membership::standing`] or the progress of the disk changes,
    /// and wakes it.
    pub fn set_waker(&self, waker: Waker) {
        self.shared.set_waker(waker);
    }

    /// Returns the part of this server in the cluster.
    pub fn standing(&self) -> Result<Standing, MembershipError> {
        self.shared.standing()
    }

    /// Fails if no reply may leave any more.
    pub fn check(&self) -> Result<(), MembershipError> {
        self.shared.check()
    }

    /// Returns the files of the binlog.
    pub fn disk(&self) -> EtcdDisk {
        EtcdDisk::new(Arc::clone(&self.shared), self.requests.clone(), self.lease_ttl)
    }
}

/// Gives back the lease, so that the next server leads at once.
impl Drop for Membership {
    fn drop(&mut self) {
        let (done, wait) = channel();
        if self.requests.send(Request::End(done)).is_ok() {
            let _ = wait.recv_timeout(LEAVE_TIMEOUT);
        }
    }
}
