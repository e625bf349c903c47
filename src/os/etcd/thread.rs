//! The membership in a cluster, and its thread, which talks to etcd: it reads and changes the log for the
//! event loop, one request after the other, while a task keeps the lease.
//!
//! A change is tried until it is made or the lease is lost. The event loop does not wait for it.

use super::api::{EtcdError, Kind};
use super::disk::{Change, EtcdDisk, Request, Requests, ask};
use super::keys::{IMPORTING, Keys, format_value};
use super::lease::{Member, noted_lease};
use super::log::Log;
use super::nodes::Nodes;
use super::shared::Shared;
use crate::engine::binlog::disk::Disk;
use crate::os::failure::{EXIT_REFUSED, EXIT_SYSTEM, Failure, Result, remedy};
use crate::os::membership::{Duty, EXIT_LOST, EtcdOptions, Standing};
use crate::os::sys::{clock::monotonic, machine};
use log::warn;
use mio::Waker;
use std::env;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::LocalSet;
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
/// The pauses of a server that has no request until it deletes more chunks of removed files, and until it looks for
/// more to do.
const GARBAGE_PAUSE: Duration = Duration::from_millis(20);
const IDLE_PAUSE: Duration = Duration::from_millis(500);

impl Membership {
    /// Joins the servers with this URL.
    pub fn join(etcd: &EtcdOptions, duty: Duty) -> Result<Membership> {
        let [hostname, ..] = machine::uname();
        let shared = Arc::new(Shared::new(monotonic, etcd.quota));
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

    /// Ends the lease that a killed process has left in a file, so that the next server leads at once. One that has
    /// ended already is as good, and so is a process that had none.
    pub fn leave(etcd: &EtcdOptions, path: &Path) -> Result {
        let file = path.display();
        let lease = match noted_lease(path) {
            Ok(lease) => lease,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                warn!("{file} is locked: its server runs, and keeps its lease");
                return Ok(());
            }
            Err(error) => {
                let help = remedy(&error);
                let message =
                    format!("cannot read {file}: {error}{help}; its lease ends by itself");
                return Err(Failure::new(EXIT_SYSTEM, message));
            }
        };
        let mut nodes = Nodes::new(etcd).map_err(cannot_start(etcd))?;
        let runtime = runtime().map_err(cannot_start(etcd))?;
        match runtime.block_on(nodes.revoke(lease)) {
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
    pub fn standing(&self) -> Result<Standing> {
        self.shared.standing().map_err(|failure| failure.of_server(&self.etcd))
    }

    /// Fails if no reply may leave any more.
    pub fn check(&self) -> Result {
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

fn cannot_start<E: Display>(etcd: &EtcdOptions) -> impl Fn(E) -> Failure + '_ {
    |error| EtcdError::lasting(error.to_string()).of_server(etcd)
}

impl EtcdError {
    /// Returns it with the exit code: that of a binlog that cannot be used, unless the server is to be
    /// started again, to stand by.
    fn of_server(self, EtcdOptions { url, .. }: &EtcdOptions) -> Failure {
        let (exit_code, lost) = match self.kind {
            Kind::Lost => (EXIT_LOST, "not leading any more: "),
            Kind::Passing | Kind::NoSpace | Kind::TooLarge | Kind::Lasting => (EXIT_REFUSED, ""),
        };
        Failure::new(exit_code, format!("-b {url}: {lost}{}", self.text))
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
    let tasks = LocalSet::new();
    if member.duty != Duty::Read {
        tasks.spawn_local(member.clone().lead());
    }
    tasks.spawn_local(answer(member, requests));
    let done = tasks.run_until(ended).await;
    drop(tasks);
    let lease = shared.state().lease;
    if lease != 0 {
        let _ = nodes.revoke(lease).await;
    }
    let _ = done.map(|done| done.send(()));
}

/// Follows the log until this server leads, and then serves requests, one after the other.
async fn answer(member: Member, mut requests: UnboundedReceiver<Request>) {
    let (shared, duty) = (Arc::clone(&member.shared), member.duty);
    let mut log = Log::new(member);
    if duty != Duty::Read {
        let read = log.follow().await;
        shared.set_standing(read.map(|()| Standing::Leader));
    }
    let mut pause = IDLE_PAUSE;
    loop {
        // A caller that does not wait for the answer any more does not need it.
        match timeout(pause, requests.recv()).await {
            Ok(Some(Request::Read(to))) => {
                let read = if duty == Duty::Read { log.read_unled().await } else { Ok(()) };
                // It is read once.
                let files = std::mem::take(&mut log.cache);
                let _ = to.send(read.map(|()| files).map_err(EtcdError::of_read));
            }
            Ok(Some(Request::Store(changes))) => {
                let len = changes.iter().map(Change::len).sum();
                match log.store(changes).await {
                    Ok(()) => shared.note_stored(len),
                    Err(failure) => shared.set_standing(Err(failure)),
                }
            }
            Ok(Some(Request::EndImport(to))) => {
                let value = format_value(log.member.etcd.file_size);
                let ended = log.store(vec![Change::Format { value }]).await;
                let _ = to.send(ended.map_err(EtcdError::of_read));
            }
            Ok(None) => return,
            // There is no request.
            Err(_) => {}
        }
        if shared.standing() == Ok(Standing::Leader) {
            // A failure is that of the next request too, or passes.
            let has_garbage = log.tidy().await.unwrap_or(false);
            pause = if has_garbage { GARBAGE_PAUSE } else { IDLE_PAUSE };
        }
    }
}

impl Log {
    /// Reads the closed files again and again while another server leads, so that this one can take over soon. Reads
    /// all when it has won the lead. Begins an import, if it is to do one.
    async fn follow(&mut self) -> Result<(), EtcdError> {
        let shared = Arc::clone(&self.member.shared);
        while timeout(IDLE_PAUSE, shared.won.notified()).await.is_err() {
            if matches!(shared.standing(), Ok(Standing::Standby(_))) {
                // A failure is that of the next try too, or passes.
                let _ = self.read(false).await;
            }
        }
        self.read(true).await?;
        if self.member.duty == Duty::Import {
            let value = IMPORTING.to_owned();
            self.store(vec![Change::Format { value }]).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::lease::note_lease;
    use super::*;
    use crate::options::{self, BinlogPlace, Mode};
    use std::fs;

    #[test]
    fn only_a_lease_that_cannot_be_read_is_a_failure() {
        let directory = env::temp_dir().join(format!("beanstalkd-leave-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        // No node is there.
        let arguments = ["-b", "etcd://127.0.0.1:1/jobs", "--leave", "lease"].map(Into::into);
        let Ok(Mode::Leave(_, Some(BinlogPlace::Etcd(etcd)))) = options::parse(arguments) else {
            panic!("it is no URL of etcd");
        };
        let leave = |path: &Path| {
            let left = Membership::leave(&etcd, path);
            left.map_or_else(
                |failure| (failure.exit_code, failure.message),
                |()| (0, String::new()),
            )
        };
        let path = directory.join("lease");
        assert_eq!(leave(&path).0, 0, "the process had no lease");
        let note = note_lease(&path, 31).unwrap();
        assert_eq!(leave(&path).0, 0, "the process runs");
        let second = note_lease(&path, 32).unwrap_err().to_string();
        assert_eq!(second, "another server has locked it");
        drop(note);
        assert_eq!(leave(&path).0, EXIT_REFUSED, "etcd is asked");
        for text in ["", "1f", "x\n", "1f\n1f\n"] {
            fs::write(&path, text).unwrap();
            let wanted = format!(
                "cannot read {}: there is no lease in it; its lease ends by itself",
                path.display()
            );
            assert_eq!(leave(&path), (EXIT_SYSTEM, wanted), "{text:?}");
        }
        let (exit_code, message) = leave(&directory);
        assert!(exit_code == EXIT_SYSTEM && message.contains("Is a directory"), "{message}");
        fs::remove_dir_all(directory).unwrap();
    }
}
