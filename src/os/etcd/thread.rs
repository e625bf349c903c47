//! The thread that talks to etcd: reads and changes the log for the event loop, one request after the
//! other, while a task keeps the lease.
//!
//! A change is tried until it is made or the lease is lost. The event loop does not wait for it.

use super::api::{Failure, Kind};
use super::disk::Request;
use super::lease::Candidate;
use super::log::Log;
use super::membership::{Duty, Standing};
use super::nodes::{Nodes, ask_again};
use super::shared::Shared;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::task::Poll;
use std::thread;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::sleep;

/// The pauses between two steps of what a server does that has no request: to delete chunks of removed
/// files, to read closed files while it stands by, and to look for more to do.
const GARBAGE_PAUSE: Duration = Duration::from_millis(20);
const PREFETCH_PAUSE: Duration = Duration::from_millis(10);
const IDLE_PAUSE: Duration = Duration::from_millis(500);

fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}

/// Starts the thread.
pub fn start(candidate: Candidate) -> io::Result<UnboundedSender<Request>> {
    let runtime = runtime()?;
    let (requests, received) = unbounded_channel();
    thread::Builder::new().name("etcd".to_owned()).spawn(move || {
        runtime.block_on(serve(candidate, received));
    })?;
    Ok(requests)
}

/// Ends a lease. One that has ended already is as good.
pub fn revoke(mut nodes: Nodes, lease: i64) -> Result<(), String> {
    let runtime = runtime().map_err(|error| error.to_string())?;
    let count = nodes.count();
    let revoke = async || nodes.ask(|node| node.revoke(lease)).await;
    match runtime.block_on(ask_again(count, revoke)) {
        Err(failure) if failure.kind != Kind::Lost => Err(failure.text),
        Ok(()) | Err(_) => Ok(()),
    }
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
                            Err(failure) => Err(failure),
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
                Err(failure) => shared.fail(failure.into()),
            },
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
    let error = io::Error::new(io::ErrorKind::InvalidData, failure.text.clone());
    if failure.kind == Kind::Lasting {
        shared.fail(failure.into());
    }
    error
}
