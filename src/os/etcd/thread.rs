//! The thread that talks to etcd: reads and changes the log for the event loop, one request after the
//! other, and runs the tasks that lead.
//!
//! A change is tried until it is made or the lease is lost. The event loop does not wait for it.

use super::lease::{Candidate, Leader, RETRY_PAUSE, check_prefix, check_used, check_version};
use super::log::{Bytes, Change, Log};
use super::membership::{Duty, MembershipError, Standing};
use super::nodes::{Error, Kind, Nodes};
use super::shared::Shared;
use crate::engine::binlog::disk::FileNumber;
use log::warn;
use std::io;
use std::sync::mpsc::Sender;
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
    /// The bytes of a file.
    Read(FileNumber, Sender<io::Result<Bytes>>),
    /// Changes, and the number of the last one.
    Store(Vec<Change>, u64),
    /// The lease is given back, and the thread ends.
    End(Sender<()>),
}

/// The pause between two steps that delete chunks of removed files, if nothing else is to be done.
const GARBAGE_PAUSE: Duration = Duration::from_millis(20);
/// While a server stands by: the pause after a file, and the time after which it looks for new ones.
const PREFETCH_PAUSE: Duration = Duration::from_millis(10);
const PREFETCH_INTERVAL: Duration = Duration::from_millis(500);

/// Starts the thread.
pub fn start(candidate: Candidate) -> io::Result<UnboundedSender<Request>> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let (requests, received) = unbounded_channel();
    thread::Builder::new().name("etcd".to_owned()).spawn(move || {
        runtime.block_on(serve(candidate, received));
    })?;
    Ok(requests)
}

/// Ends a lease. One that has ended already is as good.
pub fn revoke(mut nodes: Nodes, lease: i64) -> Result<(), String> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| error.to_string())?;
    runtime.block_on(async {
        let mut tries = 2 * nodes.count();
        loop {
            tries -= 1;
            match nodes.ask(|node| node.revoke(lease)).await {
                Err(error) if error.kind == Kind::Passing && tries > 0 => {}
                Err(error) if error.kind != Kind::Lost => return Err(error.text),
                Ok(()) | Err(_) => return Ok(()),
            }
        }
    })
}

/// Serves requests until one ends it.
pub async fn serve(mut candidate: Candidate, mut requests: UnboundedReceiver<Request>) {
    let Candidate { nodes, keys, shared, duty, .. } = candidate.clone();
    let mut log = Log::new(nodes, keys, shared.clone());
    let mut leading = (duty != Duty::Read).then(|| tokio::spawn(candidate.clone().lead()));
    let standing_by = tokio::spawn(stand_by(log.clone(), shared.clone()));
    let mut leader = None;
    while let Some(request) = next(&mut requests, &mut log, leader.as_ref()).await {
        standing_by.abort();
        // A caller that does not wait for the answer any more does not need it.
        match request {
            Request::List(to) => {
                let listed = match duty {
                    Duty::Lead | Duty::Import => log.list_to_lead().await,
                    Duty::Read => match check(&mut candidate).await {
                        Ok(()) => log.list_whole().await,
                        Err(error) => Err(error),
                    },
                };
                let _ = to.send(listed.map_err(|error| failure(&shared, error)));
            }
            Request::Read(file, to) => {
                let bytes = log.file(file).await.map_err(|error| failure(&shared, error));
                let bytes = bytes.and_then(|it| it.ok_or_else(|| io::ErrorKind::NotFound.into()));
                let _ = to.send(bytes);
                if duty != Duty::Read {
                    // The caller works on this file meanwhile.
                    log.forget(file);
                    log.read_ahead(file).await;
                }
            }
            Request::Store(changes, last) => {
                if leader.is_none()
                    && let Some(leading) = &mut leading
                {
                    leader = leading.await.ok().flatten();
                    log.forget(FileNumber::MAX);
                }
                let Some(leader) = &leader else { continue };
                if store(&mut log, leader, &shared, changes).await {
                    shared.acknowledge(last);
                    let _ = log.delete_garbage(leader).await;
                }
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

/// Waits for a request. Meanwhile a leader deletes chunks of removed files.
async fn next(
    requests: &mut UnboundedReceiver<Request>,
    log: &mut Log,
    leader: Option<&Leader>,
) -> Option<Request> {
    while let Some(leader) = leader.filter(|_| log.has_garbage()) {
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

/// Reads the log while another server leads, so that this server can take over soon.
async fn stand_by(mut log: Log, shared: std::sync::Arc<Shared>) {
    loop {
        let is_standby = matches!(shared.standing(), Ok(Standing::Standby(_)));
        let has_read = is_standby && log.prefetch().await.unwrap_or(false);
        sleep(if has_read { PREFETCH_PAUSE } else { PREFETCH_INTERVAL }).await;
    }
}

/// Fails if there is no binlog to be read.
async fn check(Candidate { nodes, keys, .. }: &mut Candidate) -> Result<(), Error> {
    for left in (0..2 * nodes.count()).rev() {
        let checked = async {
            check_version(nodes).await?;
            check_prefix(nodes, keys, None).await?;
            check_used(nodes, keys).await
        };
        match checked.await {
            Err(error) if error.kind == Kind::Passing && left > 0 => sleep(RETRY_PAUSE).await,
            checked => return checked,
        }
    }
    Ok(())
}

/// Returns the failure of a read for the caller. A log that has lost something cannot be served.
fn failure(shared: &Shared, error: Error) -> io::Error {
    if error.kind == Kind::Lasting {
        shared.set_standing(Err(MembershipError::Refused(error.text.clone())));
    }
    io::Error::new(io::ErrorKind::InvalidData, error.text)
}

/// Makes all changes, in their order. Returns `false` if the server does not lead any more.
async fn store(log: &mut Log, leader: &Leader, shared: &Shared, changes: Vec<Change>) -> bool {
    for mut change in changes {
        loop {
            let mut changed = log.change(leader, &mut change).await;
            if let Err(error) = &changed
                && error.kind == Kind::TooLarge
            {
                changed = log.shorten_chunks(error).map(|()| false);
            }
            if shared.standing().is_err() {
                return false;
            }
            let error = match changed {
                Ok(is_done) => {
                    if std::mem::take(&mut shared.state().is_full) {
                        warn!("etcd has space again: accepting puts");
                    }
                    if is_done {
                        break;
                    }
                    continue;
                }
                Err(error) => error,
            };
            match error.kind {
                Kind::Lost => {
                    shared.set_standing(Err(MembershipError::Lost(error.text)));
                    return false;
                }
                Kind::Lasting | Kind::TooLarge => {
                    shared.set_standing(Err(MembershipError::Refused(error.text)));
                    return false;
                }
                Kind::NoSpace if !std::mem::replace(&mut shared.state().is_full, true) => warn!(
                    "{error}; refusing puts, and trying again; compact and defragment etcd, \
                     then disarm its alarm"
                ),
                Kind::NoSpace | Kind::Passing => {}
            }
            sleep(RETRY_PAUSE).await;
        }
    }
    true
}
