//! The membership of this server in a cluster: what startup and the event loop call.

use super::disk::EtcdDisk;
use super::keys::Keys;
use super::lease::Candidate;
use super::nodes::Nodes;
use super::options::EtcdOptions;
use super::shared::{Role, Shared};
use super::standing::{MembershipError, Standing};
use super::thread::{self, Duty, Request};
use crate::os::sys::clock::monotonic;
use crate::os::sys::machine;
use mio::Waker;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

/// A server that leads, or waits until it can.
#[derive(Debug)]
pub struct Membership {
    shared: Arc<Shared>,
    requests: UnboundedSender<Request>,
}

/// The longest wait for the end of the lease. Without it the lease ends by itself.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

impl Membership {
    /// Joins the servers with this URL.
    pub fn join(etcd: &EtcdOptions) -> Result<Membership, MembershipError> {
        Membership::start(etcd, Duty::Lead, false)
    }

    /// Joins as the only server with this URL. The prefix must have no jobs.
    pub fn join_unused(etcd: &EtcdOptions) -> Result<Membership, MembershipError> {
        Membership::start(etcd, Duty::Lead, true)
    }

    /// Only reads the log. Another server may lead.
    pub fn read(etcd: &EtcdOptions) -> Result<Membership, MembershipError> {
        Membership::start(etcd, Duty::Read, false)
    }

    fn start(
        etcd: &EtcdOptions,
        duty: Duty,
        must_be_unused: bool,
    ) -> Result<Membership, MembershipError> {
        let nodes = Nodes::new(etcd);
        let refused = |error: &dyn Display| MembershipError::Refused(error.to_string());
        let nodes = nodes.map_err(|error| refused(&error))?;
        let hostname = machine::uname().hostname;
        let candidate = Candidate {
            nodes,
            keys: Keys::new(&etcd.prefix),
            shared: Arc::new(Shared::new(monotonic)),
            name: format!("{hostname}:{}", std::process::id()),
            file_size: etcd.file_size,
            ttl_secs: etcd.lease_ttl_secs,
            must_be_unused,
        };
        let (shared, requests) = thread::start(candidate, duty).map_err(|error| refused(&error))?;
        Ok(Membership { shared, requests })
    }

    /// Sets what wakes the caller when [`Membership::standing`] or the progress of the disk changes,
    /// and wakes it.
    pub fn set_waker(&self, waker: Waker) {
        self.shared.set_waker(waker);
    }

    /// Returns the part of this server in the cluster.
    pub fn standing(&self) -> Result<Standing, MembershipError> {
        match self.shared.role() {
            Role::Starting => Ok(Standing::Undecided),
            Role::StandingBy(leader) => Ok(Standing::Standby(leader)),
            Role::Leading(_) => Ok(Standing::Leader),
            Role::Refused(reason) => Err(MembershipError::Refused(reason)),
            Role::Lost(reason) => Err(MembershipError::Lost(reason)),
        }
    }

    /// Returns the files of the binlog.
    pub fn disk(&self) -> EtcdDisk {
        EtcdDisk::new(Arc::clone(&self.shared), self.requests.clone())
    }

    /// Ends an import, after all files were written: servers can use them from now on.
    pub fn end_import(&self, disk: &mut EtcdDisk) {
        disk.end_import();
    }

    /// Returns whether a reply may leave now.
    pub fn may_answer(&self) -> bool {
        self.shared.may_answer()
    }

    /// Fails if no reply may leave any more.
    pub fn check(&self) -> Result<(), MembershipError> {
        self.shared.loss().map_or(Ok(()), |reason| Err(MembershipError::Lost(reason)))
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
