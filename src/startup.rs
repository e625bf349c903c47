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
use crate::engine::protocol::stats::ProcessInfo;
use crate::engine::queue::replay::{Recovered, ReplayError};
use crate::engine::server::{Server, Settings};
use crate::options::{BinlogPlace, EtcdOptions, MetricsAddress, Options, Port, UsageError};
use crate::os::disk::{Directory, OpenError};
use crate::os::etcd::{Duty, Membership, MembershipError};
use crate::os::event_loop::{EventLoop, LoopWakers};
use crate::os::init::{self, Machine, MachineError};
use crate::os::listen::{self, Address, ListenError, Listener};
use crate::os::metrics_server::MetricsServer;
use crate::os::monitor::Monitor;
use crate::os::notify::Notifier;
use crate::os::resolve::{self, UserError};
use crate::os::sys::clock::Clock;
use crate::os::sys::signals::{Signals, Stop};
use crate::os::sys::user::{self, Identity};
use crate::os::sys::{files, machine, memory, sockets};
use log::{info, warn};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Why the server does not start.
#[derive(Debug)]
pub enum StartupError {
    /// The command line is wrong.
    Usage(UsageError),
    /// The machine, of which this is the first process, cannot be set up.
    Machine(MachineError),
    /// The directory of the binlog cannot be used.
    OpenBinlog(PathBuf, OpenError),
    /// The binlog cannot be read, or there is no space to continue it.
    Replay(PathBuf, ReplayError),
    /// The server cannot lead with the binlog at this URL.
    Etcd(String, MembershipError),
    /// A flag or an inherited socket does not go with the binlog at this URL.
    EtcdSockets(String, &'static str),
    /// A system call fails that the server needs.
    System(&'static str, io::Error),
    /// Fewer descriptors are free than the flags need.
    FileLimit { limit: u64, free: usize, needed: usize },
    /// A socket cannot be opened.
    Listen(ListenError),
    /// The user of `-u` cannot be found.
    FindUser(String, UserError),
    /// The user cannot be changed.
    BecomeUser(String, io::Error),
}

/// The descriptors of any server: for events, signals, time, two sockets to listen on, messages to the
/// service manager, reading `/proc`, and a few clients.
const LEAST_DESCRIPTORS: usize = 12;
/// For events, two sockets to listen on, and two clients.
const DESCRIPTORS_FOR_METRICS: usize = 5;
/// For connections to the nodes, name resolution and events.
const DESCRIPTORS_FOR_ETCD: usize = 16;

impl StartupError {
    /// Returns the exit code; that of C beanstalkd where it has one.
    pub fn exit_code(&self) -> u8 {
        match self {
            StartupError::Replay(_, ReplayError::Failed(_)) => 74,
            StartupError::Replay(_, ReplayError::Begin(error)) if is_io_error(error) => 74,
            StartupError::System(..)
            | StartupError::FileLimit { .. }
            | StartupError::Machine(_)
            | StartupError::Replay(..) => 1,
            StartupError::Usage(_) | StartupError::EtcdSockets(..) => 5,
            StartupError::Etcd(_, error) => error.exit_code(),
            StartupError::OpenBinlog(..) => 10,
            StartupError::FindUser(_, UserError::Database(_)) => 32,
            StartupError::FindUser(_, UserError::Unknown) => 33,
            StartupError::BecomeUser(..) => 34,
            StartupError::Listen(_) => 111,
        }
    }
}

/// The result of a start.
#[derive(Debug)]
pub enum Started {
    /// The server is ready to serve.
    Serving(Box<EventLoop>),
    /// A signal has stopped the server before that.
    Stopped(Stop),
}

/// Returns whether the disk itself fails, unlike a lack of space or permission.
fn is_io_error(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EIO)
}

/// Starts the server, up to the moment before the first client is served. `machine` is set up too, if
/// this is its first process.
#[expect(clippy::too_many_lines, reason = "one step after the other")]
pub fn start(options: &Options, machine: Option<&mut Machine>) -> Result<Started, StartupError> {
    for warning in &options.warnings {
        warn!("{warning}");
    }
    memory::return_large_blocks(PAGE_BYTES);
    memory::keep_headroom();
    // Before anything else opens a descriptor.
    let inherited = sockets::inherited_sockets().map_err(ListenError::Environment);
    let inherited = inherited.map_err(StartupError::Listen)?;
    init::reap_orphans();
    if let Some(machine) = machine {
        machine.prepare(options.user.as_deref()).map_err(StartupError::Machine)?;
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
    let signals = Signals::take().map_err(|error| StartupError::System("block signals", error))?;
    let user = options.user.as_deref().map(find_user).transpose()?;
    if let Some(BinlogPlace::Etcd(etcd)) = &options.binlog {
        check_sockets(etcd, options, !inherited.is_empty())?;
    }
    let early = early_listeners(options, inherited, user).map_err(StartupError::Listen)?;
    let (directory, etcd) = match &options.binlog {
        Some(BinlogPlace::Directory(path)) => (Some((path, lock(path, options, user)?)), None),
        Some(BinlogPlace::Etcd(etcd)) => (None, Some(etcd)),
        None => (None, None),
    };
    let mut listeners = match (early.queue, etcd) {
        (Some(listeners), _) => listeners,
        (None, Some(_)) => Vec::new(),
        (None, None) => open_listeners(options, user)?,
    };
    log_listeners(&listeners);
    let open_metrics = |at: &MetricsAddress| {
        early.metrics.map_or_else(|| listen::open(&at.address, at.port, user), Ok)
    };
    let metrics = options.metrics.as_ref().map(open_metrics).transpose();
    let metrics = metrics.map_err(StartupError::Listen)?;
    let metrics_server = metrics.map(|listeners| metrics_server(listeners, options)).transpose()?;
    if let (Some(name), Some(identity)) = (&options.user, user) {
        become_user(name, identity)?;
    }
    let clock = Clock::start();
    let notifier = Notifier::from_environment(clock.now());
    let mut monitor = Monitor::new(notifier, metrics_server);
    let facts = facts(&clock).map_err(|error| StartupError::System("get random bytes", error))?;
    let settings = Settings {
        max_job_size: options.max_job_size,
        binlog_file_size: options.binlog_file_size,
        max_binlog_bytes: options.max_binlog_bytes.unwrap_or(u64::MAX),
        max_memory_bytes: options.max_memory_bytes,
        bury_after: options.bury_after,
        body_cache_bytes: options.body_cache_bytes,
    };
    let mut server = Server::new(settings, Limits::DEFAULT, facts, clock.now());
    let membership = match etcd {
        None => None,
        Some(etcd) => match lead(etcd, &signals, &mut monitor, &clock)? {
            Ok(membership) => {
                listeners = open_listeners(options, user)?;
                log_listeners(&listeners);
                Some(membership)
            }
            Err(stop) => return Ok(Started::Stopped(stop)),
        },
    };
    let mut disk_waker = None;
    let binlog = match (directory, etcd.zip(membership.as_ref())) {
        (Some((path, mut directory)), _) => {
            if options.body_cache_bytes.is_some() {
                let started = directory.start_threads();
                let no_thread = |error| StartupError::System("start a thread", error);
                disk_waker = Some(started.map_err(no_thread)?);
            }
            Some(Binlog::new(path.clone(), Box::new(directory), options.fsync))
        }
        // The disk keeps the order of changes, and a reply waits for them.
        (None, Some((etcd, membership))) => {
            let disk = Box::new(membership.disk());
            Some(Binlog::new(PathBuf::from(&etcd.url), disk, Syncing::Never))
        }
        (None, None) => None,
    };
    if let Some(binlog) = binlog {
        let is_to_stop = || signals.pending_stop();
        let recovered = recover(&mut server, binlog, &clock, &mut monitor, is_to_stop);
        // Nothing can be read or written after the lease has ended, or if etcd has lost something.
        if let Some((etcd, membership)) = etcd.zip(membership.as_ref()) {
            let lost = membership.check();
            lost.map_err(|error| StartupError::Etcd(etcd.url.clone(), error))?;
        }
        if let Some(stop) = recovered? {
            monitor.stopping();
            return Ok(Started::Stopped(stop));
        }
    }
    let wakers = LoopWakers { membership, disk: disk_waker };
    EventLoop::new(server, clock, signals, monitor, listeners, options.max_connections, wakers)
        .map(|event_loop| Started::Serving(Box::new(event_loop)))
        .map_err(cannot_wait)
}

/// Fails if the limit of open files is too low for the flags: the server would not answer.
fn check_descriptors(options: &Options, limit: u64) -> Result<(), StartupError> {
    let binlog = match &options.binlog {
        Some(BinlogPlace::Directory(_)) => {
            Directory::descriptors(options.body_cache_bytes.is_some())
        }
        Some(BinlogPlace::Etcd(_)) => DESCRIPTORS_FOR_ETCD,
        None => 0,
    };
    let metrics = if options.metrics.is_some() { DESCRIPTORS_FOR_METRICS } else { 0 };
    let needed = LEAST_DESCRIPTORS + binlog + metrics;
    let standard_error = io::stderr();
    let free = std::iter::from_fn(|| standard_error.as_fd().try_clone_to_owned().ok());
    let free = free.take(needed).collect::<Vec<OwnedFd>>().len();
    if free < needed { Err(StartupError::FileLimit { limit, free, needed }) } else { Ok(()) }
}

/// The files of a binlog, where they are, and when they are synced.
struct Binlog {
    place: PathBuf,
    disk: Box<dyn Disk>,
    syncing: Syncing,
}

impl Binlog {
    fn new(place: PathBuf, disk: Box<dyn Disk>, syncing: Syncing) -> Binlog {
        Binlog { place, disk, syncing }
    }
}

/// Joins a cluster, and waits until this server leads it or a signal stops it.
fn lead(
    etcd: &EtcdOptions,
    signals: &Signals,
    monitor: &mut Monitor,
    clock: &Clock,
) -> Result<Result<Membership, Stop>, StartupError> {
    let membership = Membership::join(etcd, Duty::Lead);
    let membership = membership.map_err(|error| StartupError::Etcd(etcd.url.clone(), error))?;
    match standby::wait_to_lead(&membership, etcd, signals, monitor, clock)? {
        None => Ok(Ok(membership)),
        Some(stop) => {
            monitor.stopping();
            Ok(Err(stop))
        }
    }
}

/// Refuses what cannot be done with a binlog in etcd, because the sockets are bound when this server
/// leads.
fn check_sockets(
    etcd: &EtcdOptions,
    options: &Options,
    has_inherited: bool,
) -> Result<(), StartupError> {
    let refused = |why| Err(StartupError::EtcdSockets(etcd.url.clone(), why));
    if has_inherited {
        return refused("socket activation lets clients connect to a server that stands by");
    }
    let is_low = matches!(options.port, Port::Number(1..1024));
    if is_low && options.user.is_some() && !matches!(options.listen, Address::Unix { .. }) {
        return refused("-u gives up the right to bind a port below 1024 when this server leads");
    }
    Ok(())
}

fn log_listeners(listeners: &[Listener]) {
    for listener in listeners {
        info!("listening on {listener}");
    }
}

/// Opens the sockets for clients.
fn open_listeners(
    options: &Options,
    user: Option<Identity>,
) -> Result<Vec<Listener>, StartupError> {
    let port = match options.listen {
        Address::Unix { .. } => Ok(0),
        Address::All | Address::Host(_) => port_number(&options.port),
    };
    port.and_then(|port| listen::open(&options.listen, port, user)).map_err(StartupError::Listen)
}

fn cannot_wait(error: io::Error) -> StartupError {
    StartupError::System("poll for events", error)
}

/// Recovers the jobs from the binlog. A stop signal ends that between two files, and leaves the files
/// unchanged.
fn recover(
    server: &mut Server,
    Binlog { place, disk, syncing }: Binlog,
    clock: &Clock,
    monitor: &mut Monitor,
    pending_stop: impl Fn() -> Option<Stop>,
) -> Result<Option<Stop>, StartupError> {
    let failed = |error| StartupError::Replay(place.clone(), error);
    let begun_at = clock.now();
    let mut recovery = server.begin_recovery(disk, syncing).map_err(failed)?;
    while let Some(file) = recovery.next_file() {
        if let Some(stop) = pending_stop() {
            return Ok(Some(stop));
        }
        monitor.reading(file, clock.now()).map_err(cannot_wait)?;
        recovery.read_file().map_err(failed)?;
    }
    if let Some(stop) = pending_stop() {
        return Ok(Some(stop));
    }
    let recovered = recovery.finish(clock.now()).map_err(failed)?;
    let Recovered { jobs, files, used_bytes, .. } = recovered;
    let took_ms = clock.now().since(begun_at).as_nanos() / 1_000_000;
    info!(
        "recovered {jobs} jobs from {files} files with {used_bytes} bytes in use, in {took_ms} ms"
    );
    Ok(None)
}

/// The sockets that are bound without taking anything from another server. The others are bound once
/// the binlog is locked.
struct EarlyListeners {
    queue: Option<Vec<Listener>>,
    metrics: Option<Vec<Listener>>,
}

fn early_listeners(
    options: &Options,
    inherited: Vec<OwnedFd>,
    user: Option<Identity>,
) -> Result<EarlyListeners, ListenError> {
    let early = |address: &Address, port: &Port| match address {
        Address::Unix { .. } => listen::check_unused(address).map(|()| None),
        Address::All | Address::Host(_) => {
            listen::open(address, port_number(port)?, user).map(Some)
        }
    };
    let is_in_etcd = matches!(options.binlog, Some(BinlogPlace::Etcd(_)));
    let queue = if !inherited.is_empty() {
        Some(adopt(options, inherited)?)
    } else if is_in_etcd {
        None
    } else {
        early(&options.listen, &options.port)?
    };
    let metrics = options.metrics.as_ref();
    let metrics = metrics.map(|at| early(&at.address, &Port::Number(at.port))).transpose()?;
    Ok(EarlyListeners { queue, metrics: metrics.flatten() })
}

fn port_number(port: &Port) -> Result<u16, ListenError> {
    match port {
        Port::Number(number) => Ok(*number),
        Port::Service(name) => {
            resolve::port(name).map_err(|error| ListenError::Service(name.clone(), error))
        }
    }
}

fn adopt(options: &Options, inherited: Vec<OwnedFd>) -> Result<Vec<Listener>, ListenError> {
    let inherited = listen::adopt(inherited)?;
    let port = port_number(&options.port).ok();
    let is_there =
        |listener: &Listener| port.is_some_and(|port| listener.is_at(&options.listen, port));
    if options.names_address && !inherited.iter().any(is_there) {
        warn!("-l, -p and --socket-mode have no effect: the sockets are inherited");
    }
    Ok(inherited)
}

/// Locks the directory of the binlog, with a lock file that belongs to `user`.
fn lock(path: &Path, options: &Options, user: Option<Identity>) -> Result<Directory, StartupError> {
    let directory = match (&options.user, user) {
        (Some(name), Some(identity)) => {
            let locked = user::as_user(identity, || Directory::lock(path));
            locked.map_err(|error| StartupError::BecomeUser(name.clone(), error))?
        }
        _ => Directory::lock(path),
    };
    directory.map_err(|error| StartupError::OpenBinlog(path.to_owned(), error))
}

/// Creates the metrics server on bound sockets.
fn metrics_server(
    listeners: Vec<Listener>,
    options: &Options,
) -> Result<MetricsServer, StartupError> {
    for listener in &listeners {
        info!("serving metrics on {listener}");
    }
    MetricsServer::new(listeners, options.metrics_tubes).map_err(cannot_wait)
}

fn find_user(name: &str) -> Result<Identity, StartupError> {
    resolve::user(name).map_err(|error| StartupError::FindUser(name.to_owned(), error))
}

fn become_user(name: &str, identity: Identity) -> Result<(), StartupError> {
    let became = user::become_user(identity);
    if !became.map_err(|error| StartupError::BecomeUser(name.to_owned(), error))? {
        warn!("-u {name}: cannot drop supplementary groups: only root may; keeping them");
    }
    Ok(())
}

fn facts(clock: &Clock) -> io::Result<ProcessInfo> {
    let names = machine::uname();
    Ok(ProcessInfo {
        pid: std::process::id(),
        instance_id: machine::instance_id()?,
        hostname: names.hostname,
        os_version: names.version,
        platform: names.machine,
        started_at: clock.now(),
        processor_time: machine::processor_time,
        resident_bytes: memory::resident_bytes,
        has_headroom: memory::has_headroom,
    })
}

impl fmt::Display for StartupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartupError::Usage(error) => write!(f, "{error}"),
            StartupError::Machine(error) => write!(f, "{error}"),
            StartupError::OpenBinlog(path, error) => write!(f, "-b {}: {error}", path.display()),
            StartupError::Replay(path, error) => write!(f, "-b {}: {error}", path.display()),
            StartupError::Etcd(url, error) => write!(f, "-b {url}: {error}"),
            StartupError::EtcdSockets(url, why) => write!(f, "-b {url}: {why}"),
            StartupError::System(what, error) => write!(f, "cannot {what}: {error}"),
            StartupError::FileLimit { limit, free, needed } => write!(
                f,
                "the limit of open files is {limit}, which leaves {free}, and {needed} are needed with these \
                 flags; raise it with ulimit -n or LimitNOFILE="
            ),
            StartupError::Listen(error) => write!(f, "{error}"),
            StartupError::FindUser(user, UserError::Unknown) => {
                write!(f, "-u {user}: no such user")
            }
            StartupError::FindUser(user, UserError::Database(error)) => {
                write!(
                    f,
                    "-u {user}: cannot read the user database, give a number instead: {error}"
                )
            }
            StartupError::BecomeUser(user, error) => {
                write!(f, "-u {user}: cannot become this user: {error}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::sys::sockets::InheritedError;

    /// The exit codes are those of C beanstalkd where it has one, and of beanstalkd(1) elsewhere.
    #[test]
    fn each_failure_has_its_exit_code() {
        let path = PathBuf::new;
        let error = || io::Error::other("of the test");
        let os_error = io::Error::from_raw_os_error;
        let user = String::new;
        for (failure, code) in [
            (StartupError::Replay(path(), ReplayError::List(error())), 1),
            (StartupError::Replay(path(), ReplayError::Begin(error())), 1),
            (StartupError::Replay(path(), ReplayError::Begin(os_error(libc::EACCES))), 1),
            (StartupError::Replay(path(), ReplayError::Begin(os_error(libc::EIO))), 74),
            (StartupError::System("do this", error()), 1),
            (StartupError::FileLimit { limit: 9, free: 6, needed: 12 }, 1),
            (StartupError::FindUser(user(), UserError::Database(error())), 32),
            (StartupError::FindUser(user(), UserError::Unknown), 33),
            (StartupError::BecomeUser(user(), error()), 34),
            (StartupError::Listen(ListenError::Environment(InheritedError::NotOpen(3))), 111),
        ] {
            assert_eq!(failure.exit_code(), code, "{failure}");
        }
    }
}
