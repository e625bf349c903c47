//! From options to a running loop: every step that can fail before the first client is served, in
//! their order, with the message and exit code of each failure.
//!
//! Sockets are bound before the user changes, so that ports below 1024 can be bound. The binlog is
//! opened after that, so that its files belong to the new user.
//!
//! A server that is started twice by mistake must not take anything from the first one. TCP ports are
//! bound first, which fails while another server has them. Before a Unix socket is replaced, no server
//! may listen there, and the binlog must be locked. The lock is taken with the rights of the new user.
//!
//! With a binlog in etcd the sockets for clients are bound when this server leads: a client must not
//! connect to one that stands by.

mod standby;

use crate::engine::binlog::Syncing;
use crate::engine::binlog::disk::Disk;
use crate::engine::collections::slab::PAGE_BYTES;
use crate::engine::limits::Limits;
use crate::engine::monitor::http_conn::ServerState;
use crate::engine::protocol::stats::ProcessInfo;
use crate::engine::queue::replay::{Recovered, ReplayError};
use crate::engine::server::Server;
use crate::options::{BinlogPlace, EtcdOptions, Options};
use crate::os::disk::Directory;
use crate::os::event_loop::{EventLoop, LoopWakers};
use crate::os::failure::{EXIT_DISK, EXIT_LIMITS, Failure, remedy};
use crate::os::init::{self, Machine};
use crate::os::listen::{self, Address, Port};
use crate::os::membership::{self, Duty, Membership};
use crate::os::metrics_server::MetricsServer;
use crate::os::monitor::Monitor;
use crate::os::notify::Notifier;
use crate::os::resolve;
use crate::os::sys::clock::Clock;
use crate::os::sys::signals::{Signals, Stop};
use crate::os::sys::user::{self, Identity};
use crate::os::sys::{files, machine, memory, sockets};
use log::{info, warn};
use socket2::Socket;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

/// The exit codes of a user database that cannot be read, of a user that it lacks, and of a user that this
/// process cannot become.
const EXIT_DATABASE: u8 = 32;
const EXIT_UNKNOWN_USER: u8 = 33;
const EXIT_USER: u8 = 34;
const EXIT_LISTEN: u8 = 111;
/// The exit code for wrong flags.
pub const EXIT_USAGE: u8 = 5;
/// The exit code when a binlog cannot be used.
pub const EXIT_REFUSED: u8 = 10;

/// The descriptors of any server: for events, signals, time, two sockets to listen on, messages to the
/// service manager, reading `/proc`, and a few clients.
const LEAST_DESCRIPTORS: usize = 12;
/// For events, two sockets to listen on, and two clients.
const DESCRIPTORS_FOR_METRICS: usize = 5;
/// For connections to the nodes, name resolution and events.
const DESCRIPTORS_FOR_ETCD: usize = 16;

/// Starts the server, and serves until a signal stops it, which is returned. `machine` is set up too, if this
/// is its first process.
pub fn run(options: &Options, machine: Option<&mut Machine>) -> Result<Stop, Failure> {
    for warning in &options.warnings {
        warn!("{warning}");
    }
    memory::return_large_blocks(PAGE_BYTES);
    memory::keep_headroom();
    // Before anything else opens a descriptor.
    let inherited = sockets::inherited_sockets().map_err(cannot_listen)?;
    init::reap_orphans();
    if let Some(machine) = machine {
        machine.prepare(options.user.as_deref()).map_err(|why| Failure::new(1, why))?;
    }
    match files::raise_file_limit() {
        Ok(limit) => {
            check_descriptors(options, limit)?;
            info!("the limit of open files is {limit}");
        }
        Err(error) => {
            warn!("cannot raise the limit of open files: {error}; keeping the present limit")
        }
    }
    let signals = Signals::take().map_err(Failure::of_system("block signals"))?;
    let user = options.user.as_deref().map(find_user).transpose()?;
    let is_in_etcd = matches!(options.binlog, Some(BinlogPlace::Etcd(_)));
    if let Some(BinlogPlace::Etcd(etcd)) = &options.binlog {
        check_sockets(etcd, options, !inherited.is_empty())?;
    }
    let early = match inherited.is_empty() {
        false => Some(adopt(options, inherited)?),
        true if is_in_etcd => Some(Vec::new()),
        true => open_early(&options.listen, user)?,
    };
    let early_metrics = options.metrics.as_ref().map(|at| open_early(at, user)).transpose()?;
    let directory = match &options.binlog {
        Some(BinlogPlace::Directory(path)) => Some(lock(path, options, user)?),
        Some(BinlogPlace::Etcd(_)) | None => None,
    };
    let listeners = early.map_or_else(|| open(&options.listen, user), Ok)?;
    log_listeners("listening on", &listeners);
    let metrics = options.metrics.as_ref().zip(early_metrics);
    let metrics =
        metrics.map(|(at, early)| early.map_or_else(|| open(at, user), Ok)).transpose()?;
    let metrics_server = metrics.map(|listeners| {
        log_listeners("serving metrics on", &listeners);
        MetricsServer::new(listeners, options.metrics_tubes).map_err(cannot_wait)
    });
    let metrics_server = metrics_server.transpose()?;
    if let (Some(name), Some(identity)) = (&options.user, user) {
        become_user(name, identity)?;
    }
    let clock = Clock::start();
    let monitor = Monitor::new(Notifier::from_environment(clock.now()), metrics_server);
    serve(options, user, signals, monitor, clock, listeners, directory)
}

/// Recovers the jobs, as soon as this server leads its cluster, and serves.
fn serve(
    options: &Options,
    user: Option<Identity>,
    signals: Signals,
    mut monitor: Monitor,
    clock: Clock,
    mut listeners: Vec<Socket>,
    directory: Option<Directory>,
) -> Result<Stop, Failure> {
    let mut server = Server::new(options.settings, Limits::DEFAULT, facts(&clock), clock.now());
    let mut wakers = LoopWakers { membership: None, disk: None };
    let mut recover = |place: &dyn Display, disk, syncing, monitor: &mut Monitor| {
        recover(&mut server, place, disk, syncing, &signals, monitor, &clock)
    };
    let stopped = match (&options.binlog, directory) {
        (Some(BinlogPlace::Etcd(etcd)), _) => {
            let membership = Membership::join(etcd, Duty::Lead).map_err(cannot_lead(etcd))?;
            let stopped = standby::wait_to_lead(&membership, etcd, &signals, &mut monitor, &clock)?;
            let stopped = if stopped.is_none() {
                listeners = open(&options.listen, user)?;
                log_listeners("listening on", &listeners);
                // The disk keeps the order of changes, and a reply waits for them.
                let disk = membership.disk();
                let recovered = recover(&etcd.url, disk, Syncing::Never, &mut monitor);
                // Nothing can be read or written after the lease has ended, or if etcd has lost something.
                membership.check().map_err(cannot_lead(etcd))?;
                recovered?
            } else {
                stopped
            };
            wakers.membership = Some(membership);
            stopped
        }
        (Some(BinlogPlace::Directory(path)), Some(mut directory)) => {
            if options.settings.body_cache_bytes.is_some() {
                let started = directory.start_threads();
                wakers.disk = Some(started.map_err(Failure::of_system("start a thread"))?);
            }
            recover(&path.display(), Box::new(directory), options.fsync, &mut monitor)?
        }
        _ => None,
    };
    if let Some(stop) = stopped {
        monitor.notifier.stopping();
        return Ok(stop);
    }
    EventLoop::new(server, clock, signals, monitor, listeners, options.max_connections, wakers)
        .map_err(cannot_wait)?
        .run()
}

/// Fails if the limit of open files is too low for the flags: the server would not answer.
fn check_descriptors(options: &Options, limit: u64) -> Result<(), Failure> {
    let binlog = match &options.binlog {
        Some(BinlogPlace::Directory(_)) => {
            Directory::descriptors(options.settings.body_cache_bytes.is_some())
        }
        Some(BinlogPlace::Etcd(_)) => DESCRIPTORS_FOR_ETCD,
        None => 0,
    };
    let metrics = if options.metrics.is_some() { DESCRIPTORS_FOR_METRICS } else { 0 };
    let needed = LEAST_DESCRIPTORS + binlog + metrics;
    let standard_error = io::stderr();
    let free = std::iter::from_fn(|| standard_error.as_fd().try_clone_to_owned().ok());
    let free = free.take(needed).collect::<Vec<OwnedFd>>().len();
    if free == needed {
        return Ok(());
    }
    let message = format!(
        "the limit of open files is {limit}, which leaves {free}, and {needed} are needed with these \
         flags; raise it with ulimit -n or LimitNOFILE="
    );
    Err(Failure::new(EXIT_LIMITS, message))
}

/// Refuses what cannot be done with a binlog in etcd, because the sockets are bound when this server
/// leads.
fn check_sockets(
    etcd: &EtcdOptions,
    options: &Options,
    has_inherited: bool,
) -> Result<(), Failure> {
    let is_low = matches!(options.listen, Address::Tcp { port: Port::Number(1..1024), .. });
    let why = if has_inherited {
        "socket activation lets clients connect to a server that stands by"
    } else if is_low && options.user.is_some() {
        "-u gives up the right to bind a port below 1024 when this server leads"
    } else {
        return Ok(());
    };
    Err(Failure::new(EXIT_USAGE, format!("-b {}: {why}", etcd.url)))
}

/// Recovers the jobs from the binlog. A stop signal ends that between two files, and leaves the files
/// unchanged.
fn recover(
    server: &mut Server<Socket>,
    place: &dyn Display,
    disk: Box<dyn Disk>,
    syncing: Syncing,
    signals: &Signals,
    monitor: &mut Monitor,
    clock: &Clock,
) -> Result<Option<Stop>, Failure> {
    let failed = |error: ReplayError| {
        let remedy = if let ReplayError::Begin(error) = &error { remedy(error) } else { "" };
        Failure::new(exit_code_of_replay(&error), format!("-b {place}: {error}{remedy}"))
    };
    let begun_at = clock.now();
    let mut replay = server.begin_replay(disk, syncing).map_err(failed)?;
    while let Some(file) = replay.next_file() {
        if let Some(stop) = signals.pending_stop() {
            return Ok(Some(stop));
        }
        monitor.notifier.reading(file, clock.now());
        monitor.answer(ServerState::Starting, clock.now()).map_err(cannot_wait)?;
        replay.read_file().map_err(failed)?;
    }
    if let Some(stop) = signals.pending_stop() {
        return Ok(Some(stop));
    }
    let Recovered { jobs, files, used_bytes, .. } = replay.finish(clock.now()).map_err(failed)?;
    let took_ms = clock.now().since(begun_at).as_nanos() / 1_000_000;
    info!(
        "recovered {jobs} jobs from {files} files with {used_bytes} bytes in use, in {took_ms} ms"
    );
    Ok(None)
}

/// Returns the exit code: another one if the disk itself fails, unlike a lack of space or permission.
fn exit_code_of_replay(error: &ReplayError) -> u8 {
    match error {
        ReplayError::Failed(_) => EXIT_DISK,
        ReplayError::Begin(error) if error.raw_os_error() == Some(libc::EIO) => EXIT_DISK,
        ReplayError::Read(error) if error.is_newer() => EXIT_REFUSED,
        ReplayError::List(_)
        | ReplayError::Read(_)
        | ReplayError::NoMemory(_)
        | ReplayError::Begin(_) => 1,
    }
}

fn cannot_wait(error: io::Error) -> Failure {
    Failure::of_system("poll for events")(error)
}

fn cannot_lead(etcd: &EtcdOptions) -> impl Fn(membership::Failure) -> Failure + '_ {
    |error| Failure::new(error.exit_code(), format!("-b {}: {error}", etcd.url))
}

fn cannot_listen(why: String) -> Failure {
    Failure::new(EXIT_LISTEN, why)
}

// ---- Sockets ----

/// Opens sockets without taking anything from another server. Returns `None` for a Unix socket, which is
/// opened once the binlog is locked.
fn open_early(at: &Address, user: Option<Identity>) -> Result<Option<Vec<Socket>>, Failure> {
    match at {
        Address::Unix { path, .. } => {
            listen::check_unused(path).map(|()| None).map_err(cannot_listen)
        }
        Address::Tcp { .. } => open(at, user).map(Some),
    }
}

fn open(at: &Address, user: Option<Identity>) -> Result<Vec<Socket>, Failure> {
    listen::open(at, user).map_err(cannot_listen)
}

fn adopt(options: &Options, inherited: Vec<OwnedFd>) -> Result<Vec<Socket>, Failure> {
    let inherited = listen::adopt(inherited).map_err(cannot_listen)?;
    let is_there = |listener| listen::is_at(listener, &options.listen);
    if options.names_address && !inherited.iter().any(is_there) {
        warn!("-l, -p and --socket-mode have no effect: the sockets are inherited");
    }
    Ok(inherited)
}

fn log_listeners(what: &str, listeners: &[Socket]) {
    for listener in listeners {
        info!("{what} {}", listen::name_of(listener));
    }
}

// ---- The user ----

fn find_user(name: &str) -> Result<Identity, Failure> {
    match resolve::user(name) {
        Ok(Some(identity)) => Ok(identity),
        Ok(None) => Err(Failure::new(EXIT_UNKNOWN_USER, format!("-u {name}: no such user"))),
        Err(error) => Err(Failure::new(
            EXIT_DATABASE,
            format!("-u {name}: cannot read the user database, give a number instead: {error}"),
        )),
    }
}

fn cannot_become(name: &str) -> impl Fn(io::Error) -> Failure + '_ {
    move |error| Failure::new(EXIT_USER, format!("-u {name}: cannot become this user: {error}"))
}

fn become_user(name: &str, identity: Identity) -> Result<(), Failure> {
    if !user::become_user(identity).map_err(cannot_become(name))? {
        warn!("-u {name}: cannot drop supplementary groups: only root may; keeping them");
    }
    Ok(())
}

/// Locks the directory of the binlog, with a lock file that belongs to `user`.
fn lock(path: &Path, options: &Options, user: Option<Identity>) -> Result<Directory, Failure> {
    let directory = match (&options.user, user) {
        (Some(name), Some(identity)) => {
            user::as_user(identity, || Directory::lock(path)).map_err(cannot_become(name))?
        }
        _ => Directory::lock(path),
    };
    directory.map_err(|error| Failure::new(EXIT_REFUSED, format!("-b {}: {error}", path.display())))
}

fn facts(clock: &Clock) -> ProcessInfo {
    let [hostname, os_version, platform] = machine::uname();
    ProcessInfo {
        pid: std::process::id(),
        instance_id: machine::instance_id(),
        hostname,
        os_version,
        platform,
        started_at: clock.now(),
        processor_time: machine::processor_time,
        resident_bytes: memory::resident_bytes,
        has_headroom: memory::has_headroom,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As beanstalkd(1) has them.
    #[test]
    fn a_disk_that_fails_has_its_own_exit_code() {
        let os_error = io::Error::from_raw_os_error;
        for (failure, code) in [
            (ReplayError::List(os_error(libc::EIO)), 1),
            (ReplayError::Begin(io::Error::other("of the test")), 1),
            (ReplayError::Begin(os_error(libc::EACCES)), 1),
            (ReplayError::Begin(os_error(libc::EIO)), 74),
        ] {
            assert_eq!(exit_code_of_replay(&failure), code, "{failure}");
        }
    }
}
