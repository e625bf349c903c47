//! The membership in a cluster, and its thread, which talks to etcd: it reads and changes the log for the
//! event loop, one request after the other, while a task keeps the lease.
//!
//! A change is tried until it is made or the lease is lost. The event loop does not wait for it.

use super::disk::{Change, EtcdDisk, Request, Requests, ask};
use super::keys::Keys;
use super::lease::Candidate;
use super::log::Log;
use super::nodes::{CHECK, Nodes, ask_again};
use super::shared::Shared;
use crate::engine::binlog::disk::Disk;
use crate::engine::time::Nanos;
use crate::os::membership::{Duty, EtcdOptions, Failure, Kind, Standing};
use crate::os::sys::{clock::monotonic, machine};
use mio::Waker;
use std::env;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::Poll;
use std::thread;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::sleep;

/// A server that leads, or waits until it can, or only reads the log.
#[derive(Debug)]
pub struct Membership {
    shared: Arc<Shared>,
    requests: Requests,
    lease_ttl: Nanos,
}

/// The longest wait for the end of the lease. Without it the lease ends by itself.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// The pauses between two steps of what a server does that has no request: to delete chunks of removed
/// files, to read closed files while it stands by, and to look for more to do.
const GARBAGE_PAUSE: Duration = Duration::from_millis(20);
const PREFETCH_PAUSE: Duration = Duration::from_millis(10);
const IDLE_PAUSE: Duration = Duration::from_millis(500);

impl Membership {
    /// Joins the servers with this URL.
    pub fn join(etcd: &EtcdOptions, duty: Duty) -> Result<Membership, Failure> {
        let [hostname, ..] = machine::uname();
        let shared = Arc::new(Shared::new(monotonic));
        let candidate = Candidate {
            nodes: Nodes::new(etcd).map_err(Failure::lasting)?,
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
        let runtime = runtime()?;
        let (requests, received) = unbounded_channel();
        let serve = move || runtime.block_on(serve(candidate, received));
        let started = thread::Builder::new().name("etcd".to_owned()).spawn(serve);
        started.map_err(|error| Failure::lasting(error.to_string()))?;
        Ok(Membership { shared, requests, lease_ttl: Nanos::from_secs(etcd.lease_ttl_secs) })
    }

    /// Ends the lease of a process that was killed, so that the next server leads at once. One that has
    /// ended already is as good.
    pub fn leave(etcd: &EtcdOptions, lease: i64) -> Result<(), Failure> {
        let mut nodes = Nodes::new(etcd).map_err(Failure::lasting)?;
        let revoke = ask_again(nodes.count(), async || nodes.ask(|node| node.revoke(lease)).await);
        let revoked = runtime()?.block_on(revoke);
        revoked.or_else(|failure| if failure.kind == Kind::Lost { Ok(()) } else { Err(failure) })
    }

    /// Sets what wakes the caller when [`Membership::standing`] or the progress of the disk changes,
    /// and wakes it.
    pub fn set_waker(&self, waker: Waker) {
        self.shared.set_waker(waker);
    }

    /// Returns the part of this server in the cluster.
    pub fn standing(&self) -> Result<Standing, Failure> {
        self.shared.standing()
    }

    /// Fails if no reply may leave any more.
    pub fn check(&self) -> Result<(), Failure> {
        self.shared.check()
    }

    /// Returns the files of the binlog.
    pub fn disk(&self) -> Box<dyn Disk> {
        let (shared, requests) = (Arc::clone(&self.shared), self.requests.clone());
        Box::new(EtcdDisk::new(shared, requests, self.lease_ttl))
    }

    /// Ends an import, after all changes are stored: servers can use the binlog from now on.
    pub fn end_import(&self) -> io::Result<()> {
        ask(&self.requests, Request::EndImport)
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

fn runtime() -> Result<Runtime, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::lasting(error.to_string()))
}

/// Serves requests until one ends it.
pub async fn serve(mut candidate: Candidate, mut requests: UnboundedReceiver<Request>) {
    let (shared, duty) = (candidate.shared.clone(), candidate.duty);
    let mut log = Log::new(&candidate);
    let leading = (duty != Duty::Read).then(|| tokio::spawn(candidate.clone().lead()));
    while let Some(request) = next(&mut requests, &mut log, &shared).await {
        // A caller that does not wait for the answer any more does not need it.
        match request {
            Request::List(to) => {
                let listed = match duty {
                    Duty::Lead | Duty::Import => log.list_to_lead().await,
                    Duty::Read => {
                        let nodes = candidate.nodes.count();
                        match ask_again(nodes, async || candidate.check().await).await {
                            Ok(_) => log.list_whole().await,
                            Err(mut failure) => {
                                if failure.kind == Kind::Passing {
                                    failure.text = format!("{}; {CHECK}", failure.text);
                                }
                                Err(failure)
                            }
                        }
                    }
                };
                let _ = to.send(listed.map_err(|failure| unreadable(&shared, failure)));
            }
            Request::Read(file, to) => {
                let bytes = log.file(file).await.map_err(|failure| unreadable(&shared, failure));
                let _ = to.send(bytes.and_then(|it| it.ok_or(io::ErrorKind::NotFound.into())));
                if duty != Duty::Read {
                    // The caller works on this file meanwhile.
                    log.read_ahead(file).await;
                }
            }
            Request::Store(changes, last) => match log.store(changes).await {
                Ok(()) => {
                    shared.acknowledge(last);
                    let _ = log.delete_garbage().await;
                }
                Err(failure) => shared.fail(failure),
            },
            Request::EndImport(to) => {
                let ended = log.store(vec![Change::EndImport]).await;
                let _ = to.send(ended.map_err(|failure| unreadable(&shared, failure)));
            }
            Request::End(done) => {
                if let Some(leading) = leading {
                    leading.abort();
                }
                let lease = shared.state().lease;
                if lease != 0 {
                    let _ = candidate.nodes.ask(|node| node.revoke(lease)).await;
                }
                let _ = done.send(());
                return;
            }
        }
    }
}

/// Waits for a request. Meanwhile a leader deletes chunks of removed files, and a server that stands by
/// reads the log, so that it can take over soon.
async fn next(
    requests: &mut UnboundedReceiver<Request>,
    log: &mut Log,
    shared: &Shared,
) -> Option<Request> {
    let mut idle = pin!(async {
        let mut pause = GARBAGE_PAUSE;
        loop {
            sleep(pause).await;
            // A failure is that of the next request too, or passes.
            pause = match shared.standing() {
                Ok(Standing::Standby(_)) if log.prefetch().await.unwrap_or(false) => PREFETCH_PAUSE,
                Ok(Standing::Leader) if log.delete_garbage().await.unwrap_or(true) => GARBAGE_PAUSE,
                _ => IDLE_PAUSE,
            };
        }
    });
    poll_fn(|context| {
        let received = requests.poll_recv(context);
        if received.is_pending() {
            let _: Poll<()> = idle.as_mut().poll(context);
        }
        received
    })
    .await
}

/// Returns the failure of a read for the caller. A log that has lost something cannot be served.
fn unreadable(shared: &Shared, failure: Failure) -> io::Error {
    let error = io::Error::new(io::ErrorKind::InvalidData, failure.to_string());
    if failure.kind == Kind::Lasting {
        shared.fail(failure);
    }
    error
}
