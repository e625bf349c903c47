//! The membership in a cluster, and its thread, which talks to etcd: it reads and changes the log for the
//! event loop, one request after the other, while a task keeps the lease.
//!
//! A change is tried until it is made or the lease is lost. The event loop does not wait for it.

use super::api::{Failure, Kind};
use super::disk::{Change, EtcdDisk, Request, Requests, ask};
use super::keys::Keys;
use super::lease::Member;
use super::log::Log;
use super::nodes::{Nodes, ask_each};
use super::shared::Shared;
use crate::engine::binlog::disk::Disk;
use crate::os::failure::{self, EXIT_REFUSED};
use crate::os::membership::{Duty, EXIT_LOST, EtcdOptions, Standing};
use crate::os::sys::{clock::monotonic, machine};
use mio::Waker;
use std::env;
use std::fmt::Display;
use std::future::{pending, poll_fn};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::task::Poll;
use std::thread;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// A server that leads, or waits until it can, or only reads the log.
pub struct Membership {
    shared: Arc<Shared>,
    requests: Requests,
    /// Ends the thread, whatever it does.
    end: Option<oneshot::Sender<Sender<()>>>,
    etcd: EtcdOptions,
}

/// The longest wait for the end of the lease. Without it the lease ends by itself.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);
/// The pauses between two steps of what a server does that has no request: to delete chunks of removed
/// files, and to look for more to do.
const GARBAGE_PAUSE: Duration = Duration::from_millis(20);
const IDLE_PAUSE: Duration = Duration::from_millis(500);

impl Membership {
    /// Joins the servers with this URL.
    pub fn join(etcd: &EtcdOptions, duty: Duty) -> Result<Membership, failure::Failure> {
        let [hostname, ..] = machine::uname();
        let shared = Arc::new(Shared::new(monotonic));
        let member = Member {
            etcd: etcd.clone(),
            duty,
            name: format!("{hostname}:{}", std::process::id()),
            nodes: Nodes::new(etcd).map_err(cannot_start(etcd))?,
            keys: Keys::new(&etcd.prefix),
            shared: Arc::clone(&shared),
            lease_file: env::var_os("RUNTIME_DIRECTORY")
                .filter(|_| duty == Duty::Lead)
                .and_then(|path| env::split_paths(&path).next())
                .map(|path| path.join("lease")),
        };
        let runtime = runtime().map_err(cannot_start(etcd))?;
        let (requests, received) = unbounded_channel();
        let (end, ended) = oneshot::channel();
        let serve = move || runtime.block_on(serve(member, received, ended));
        let started = thread::Builder::new().name("etcd".to_owned()).spawn(serve);
        started.map_err(cannot_start(etcd))?;
        Ok(Membership { shared, requests, end: Some(end), etcd: etcd.clone() })
    }

    /// Ends the lease of a process that was killed, so that the next server leads at once. One that has
    /// ended already is as good.
    pub fn leave(etcd: &EtcdOptions, lease: i64) -> Result<(), failure::Failure> {
        let mut nodes = Nodes::new(etcd).map_err(cannot_start(etcd))?;
        let runtime = runtime().map_err(cannot_start(etcd))?;
        let revoke = ask_each(nodes.count(), async || nodes.ask(|node| node.revoke(lease)).await);
        match runtime.block_on(revoke) {
            Err(failure) if failure.kind != Kind::Lost => Err(failure.of_server(etcd)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Sets what wakes the caller when [`Membership::standing`] changes or a sync has ended,
    /// and wakes it.
    pub fn set_waker(&self, waker: Waker) {
        self.shared.set_waker(waker);
    }

    /// Returns the part of this server in the cluster. A leader has read the log.
    pub fn standing(&self) -> Result<Standing, failure::Failure> {
        self.shared.standing().map_err(|failure| failure.of_server(&self.etcd))
    }

    /// Fails if no reply may leave any more.
    pub fn check(&self) -> Result<(), failure::Failure> {
        self.shared.check().map_err(|failure| failure.of_server(&self.etcd))
    }

    /// Returns the files of the binlog.
    pub fn disk(&self) -> Box<dyn Disk> {
        let (shared, requests) = (Arc::clone(&self.shared), self.requests.clone());
        Box::new(EtcdDisk::new(shared, requests))
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
        if self.end.take().is_some_and(|end| end.send(done).is_ok()) {
            let _ = wait.recv_timeout(LEAVE_TIMEOUT);
        }
    }
}

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

fn cannot_start<E: Display>(etcd: &EtcdOptions) -> impl Fn(E) -> failure::Failure + '_ {
    |error| Failure::lasting(error.to_string()).of_server(etcd)
}

impl Failure {
    /// Returns it with the exit code: that of a binlog that cannot be used, unless the server is to be
    /// started again, to stand by.
    fn of_server(self, EtcdOptions { url, .. }: &EtcdOptions) -> failure::Failure {
        let (exit_code, lost) = match self.kind {
            Kind::Lost => (EXIT_LOST, "not leading any more: "),
            Kind::Passing | Kind::NoSpace | Kind::TooLarge | Kind::Lasting => (EXIT_REFUSED, ""),
        };
        failure::Failure::new(exit_code, format!("-b {url}: {lost}{}", self.text))
    }

    /// Returns it for a caller of the disk.
    fn of_read(self) -> io::Error {
        io::Error::other(self.text)
    }
}

/// Serves requests, and leads meanwhile, until its end: then it gives back the lease, and reports that. A change that
/// is not stored by then may be lost or not, as at the end of the process.
pub async fn serve(
    member: Member,
    requests: UnboundedReceiver<Request>,
    ended: oneshot::Receiver<Sender<()>>,
) {
    let (shared, mut nodes) = (Arc::clone(&member.shared), member.nodes.clone());
    let count = nodes.count();
    let work = beside(member.clone().lead(), answer(member, requests));
    let done = beside(work, ended).await;
    let lease = shared.state().lease;
    if lease != 0 {
        nodes.ask_answering();
        let revoke = async || nodes.ask(|node| node.revoke(lease)).await;
        let _ = ask_each(count, revoke).await;
    }
    let _ = done.map(|done| done.send(()));
}

/// Serves requests, one after the other. Has no end.
async fn answer(member: Member, mut requests: UnboundedReceiver<Request>) {
    let (shared, duty) = (Arc::clone(&member.shared), member.duty);
    let mut log = Log::new(member);
    loop {
        let request = beside(log.idle(), poll_fn(|context| requests.poll_recv(context))).await;
        let Some(request) = request else { return pending().await };
        // A caller that does not wait for the answer any more does not need it.
        match request {
            Request::Read(to) => {
                let read = if duty == Duty::Read { log.read_unled().await } else { Ok(()) };
                let _ = to.send(read.map(|()| log.cache.clone()).map_err(Failure::of_read));
                // A server reads the log once.
                log.cache.retain(|_, _| duty == Duty::Read);
            }
            Request::Store(changes) => {
                let len = changes.iter().map(Change::len).sum();
                match log.store(changes).await {
                    Ok(()) => {
                        shared.note_stored(len);
                        let _ = log.delete_garbage().await;
                        let _ = log.note_last().await;
                    }
                    Err(failure) => shared.set_standing(Err(failure)),
                }
            }
            Request::EndImport(to) => {
                let ended = log.store(vec![Change::EndImport]).await;
                let _ = to.send(ended.map_err(Failure::of_read));
            }
        }
    }
}

impl Log {
    /// What a server does that has no request: a leader deletes chunks of removed files and notes the last one, and a
    /// server that stands by reads the log, so that it can take over soon.
    async fn idle(&mut self) {
        let shared = Arc::clone(&self.member.shared);
        let mut pause = GARBAGE_PAUSE;
        loop {
            let _ = timeout(pause, shared.won.notified()).await;
            let has_won = shared.state().has_won;
            // A failure is that of the next request too, or passes.
            pause = match shared.standing() {
                Ok(Standing::Leader) if self.delete_garbage().await.unwrap_or(true) => {
                    GARBAGE_PAUSE
                }
                Ok(Standing::Leader) => {
                    let _ = self.note_last().await;
                    IDLE_PAUSE
                }
                Ok(Standing::Standby(_) | Standing::Undecided) if has_won => {
                    let read = self.take_over().await;
                    shared.set_standing(read.map(|()| Standing::Leader));
                    GARBAGE_PAUSE
                }
                Ok(Standing::Standby(_)) => {
                    let _ = self.read(false).await;
                    IDLE_PAUSE
                }
                Ok(Standing::Undecided) | Err(_) => IDLE_PAUSE,
            };
        }
    }
}

/// Waits for `work`. Meanwhile does what has no end.
async fn beside<T>(endless: impl Future<Output = ()>, work: impl Future<Output = T>) -> T {
    let (mut endless, mut work) = (pin!(endless), pin!(work));
    poll_fn(|context| {
        let done = work.as_mut().poll(context);
        if done.is_pending() {
            let _: Poll<()> = endless.as_mut().poll(context);
        }
        done
    })
    .await
}
