//! The thread that talks to etcd: reads and changes the log for the event loop, one request after the
//! other, and runs the tasks that lead.
//!
//! A change is tried until it is made or the lease is lost. The event loop does not wait for it.

use super::keys::Keys;
use super::lease::{Candidate, Hindrance, RETRY_PAUSE, check_prefix, check_used, check_version};
use super::log::{Change, ChangeError, Log, ReadError};
use super::nodes::{Nodes, RequestError};
use super::shared::{Leader, Role, Shared};
use crate::engine::binlog::disk::FileNumber;
use log::warn;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::Poll;
use std::thread;
use std::time::Duration;
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{sleep, timeout};

/// What the event loop wants.
#[derive(Debug)]
pub enum Request {
    /// The numbers of all files.
    List(Sender<io::Result<Vec<FileNumber>>>),
    /// The size of a file.
    Size(FileNumber, Sender<io::Result<u64>>),
    /// Bytes of a file from some offset on, at most this one.
    Page(FileNumber, u64, Sender<io::Result<(u64, Vec<u8>)>>),
    /// Changes, and the number of the last one.
    Store(Vec<Change>, u64),
    /// The lease is given back, and the thread ends.
    End(Sender<()>),
}

/// What the thread does while there is no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Duty {
    /// It leads, as soon as no other server does.
    Lead,
    /// Nothing: the log is only read.
    Read,
}

/// The pause between two steps that delete chunks of removed files, if nothing else is to be done.
const GARBAGE_PAUSE: Duration = Duration::from_millis(20);

/// The pause between two looks whether another server leads.
const STANDBY_PAUSE: Duration = Duration::from_millis(100);

/// Starts the thread.
pub fn start(
    candidate: Candidate,
    duty: Duty,
) -> io::Result<(Arc<Shared>, UnboundedSender<Request>)> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (requests, received) = unbounded_channel();
    let shared = Arc::clone(&candidate.shared);
    thread::Builder::new().name("etcd".to_owned()).spawn(move || {
        runtime.block_on(serve(candidate, duty, received));
    })?;
    Ok((shared, requests))
}

/// Serves requests until one ends it.
pub async fn serve(candidate: Candidate, duty: Duty, mut requests: UnboundedReceiver<Request>) {
    let Candidate { mut nodes, keys, shared, .. } = candidate.clone();
    let mut log = Log::new(nodes.clone(), keys.clone());
    let mut is_checked = duty == Duty::Lead;
    let leading = (duty == Duty::Lead).then(|| tokio::spawn(candidate.lead()));
    let mut leader = None;
    // A node that does not answer is asked again once.
    let tries = 2 * nodes.count();
    loop {
        let received = match &leader {
            Some(leader) => next_for_leader(&mut requests, &mut log, leader).await,
            None if duty == Duty::Lead => next_for_standby(&mut requests, &mut log, &shared).await,
            None => requests.recv().await,
        };
        let Some(request) = received else { return };
        if !std::mem::replace(&mut is_checked, true)
            && let Err(hindrance) = check(&mut nodes, &keys).await
        {
            shared.set_role(Role::Refused(hindrance.to_string()));
        }
        // A caller that does not wait for the answer any more does not need it.
        match request {
            Request::List(to) => {
                let is_pinned = duty == Duty::Read;
                let _ = to.send(again(&shared, tries, async || log.list(is_pinned).await).await);
            }
            Request::Size(file, to) => {
                let size = again(&shared, tries, async || log.size(file).await).await;
                let _ = to.send(size.and_then(|size| size.ok_or(io::ErrorKind::NotFound.into())));
            }
            Request::Page(file, offset, to) => {
                let _ = to.send(again(&shared, tries, async || log.page(file, offset).await).await);
                // The caller works on this page meanwhile. A failure is that of the next page too.
                let _ = log.read_ahead().await;
            }
            Request::Store(changes, last) => {
                if leader.is_none()
                    && let Role::Leading(begun) = shared.role()
                {
                    leader = Some(begun);
                    // What is not found now is found at the next start.
                    let _ = log.find_garbage().await;
                    log.end_reading();
                }
                let Some(leader) = &mut leader else { continue };
                if store(&mut log, leader, &shared, changes).await {
                    shared.acknowledge(last);
                    let _ = log.delete_garbage(leader).await;
                }
            }
            Request::End(done) => {
                if let Some(leading) = leading {
                    leading.abort();
                }
                if shared.lease() != 0 {
                    let _ = nodes.revoke_lease(shared.lease()).await;
                }
                let _ = done.send(());
                return;
            }
        }
    }
}

/// Waits for a request. Meanwhile chunks of removed files are deleted.
async fn next_for_leader(
    requests: &mut UnboundedReceiver<Request>,
    log: &mut Log,
    leader: &Leader,
) -> Option<Request> {
    while log.has_garbage() {
        match timeout(GARBAGE_PAUSE, requests.recv()).await {
            Ok(received) => return received,
            // A failure is that of the next change too, or passes.
            Err(_) => {
                let _ = log.delete_garbage(leader).await;
            }
        }
    }
    requests.recv().await
}

/// Waits for a request. While another server leads, its log is read, so that this server can take over
/// soon.
async fn next_for_standby(
    requests: &mut UnboundedReceiver<Request>,
    log: &mut Log,
    shared: &Shared,
) -> Option<Request> {
    let mut pause = STANDBY_PAUSE;
    loop {
        let step = async {
            sleep(pause).await;
            match shared.role() {
                Role::StandingBy(_) => Some(log.prefetch().await),
                Role::Starting => Some(STANDBY_PAUSE),
                Role::Leading(_) | Role::Refused(_) | Role::Lost(_) => None,
            }
        };
        match either(requests.recv(), step).await {
            Either::First(received) => return received,
            Either::Second(Some(until_next)) => pause = until_next,
            Either::Second(None) => return requests.recv().await,
        }
    }
}

/// The result of the first one of two futures that is complete.
enum Either<A, B> {
    First(A),
    Second(B),
}

/// Waits for one of two futures, and drops the other one.
async fn either<A, B>(
    first: impl Future<Output = A>,
    second: impl Future<Output = B>,
) -> Either<A, B> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    poll_fn(|context| match first.as_mut().poll(context) {
        Poll::Ready(result) => Poll::Ready(Either::First(result)),
        Poll::Pending => second.as_mut().poll(context).map(Either::Second),
    })
    .await
}

/// Fails if there is no binlog to be read.
async fn check(nodes: &mut Nodes, keys: &Keys) -> Result<(), Hindrance> {
    for left in (0..2 * nodes.count()).rev() {
        let checked = async {
            check_version(nodes).await?;
            check_prefix(nodes, keys, None).await?;
            check_used(nodes, keys).await
        };
        match checked.await {
            Err(Hindrance::Passing(_)) if left > 0 => sleep(RETRY_PAUSE).await,
            checked => return checked,
        }
    }
    Ok(())
}

/// Reads until there is an answer. A leader tries as long as it leads, and others this often.
async fn again<T>(
    shared: &Shared,
    mut tries: usize,
    mut read: impl AsyncFnMut() -> Result<T, ReadError>,
) -> io::Result<T> {
    loop {
        let answer = read().await;
        tries = tries.saturating_sub(1);
        match (answer, shared.role()) {
            (_, Role::Lost(reason) | Role::Refused(reason)) => {
                return Err(io::Error::other(reason));
            }
            (Ok(answer), _) => return Ok(answer),
            (Err(ReadError::Request(RequestError::Unavailable(_))), role)
                if tries > 0 || matches!(role, Role::Leading(_)) =>
            {
                sleep(RETRY_PAUSE).await;
            }
            (Err(error), _) => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, error.to_string()));
            }
        }
    }
}

/// Makes all changes, in their order. Returns `false` if the server does not lead any more.
async fn store(log: &mut Log, leader: &mut Leader, shared: &Shared, changes: Vec<Change>) -> bool {
    for mut change in changes {
        loop {
            let len = change.next_len();
            let begun_at = shared.now();
            match log.change(leader, &mut change).await {
                Ok(is_done) => {
                    shared.count_transaction(shared.now().since(begun_at), len);
                    if shared.has_no_space() {
                        warn!("etcd has space again: accepting puts");
                        shared.set_no_space(false);
                    }
                    if is_done {
                        break;
                    }
                }
                Err(ChangeError::NotLeading(reason)) => {
                    shared.set_role(Role::Lost(reason));
                    return false;
                }
                Err(ChangeError::Unknown(error)) => {
                    if matches!(shared.role(), Role::Lost(_)) {
                        return false;
                    }
                    if matches!(error, RequestError::NoSpace(_)) && !shared.has_no_space() {
                        warn!(
                            "{error}; refusing puts, and trying again; compact and defragment etcd, \
                             then disarm its alarm"
                        );
                        shared.set_no_space(true);
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
    }
    true
}

impl std::fmt::Display for Hindrance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Hindrance::Passing(error) => write!(f, "{error}"),
            Hindrance::Lasting(reason) => f.write_str(reason),
        }
    }
}
