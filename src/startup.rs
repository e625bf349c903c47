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
//! connect to one that stands by. They are bound at the start too, and closed at once: a port that another
//! program has is found before a failover needs it.

use crate::engine::binlog::Syncing;
use crate::engine::binlog::disk::Disk;
use crate::engine::binlog::error::{BinlogError, Step};
use crate::engine::collections::slab::PAGE_BYTES;
use crate::engine::limits::Limits;
use crate::engine::monitor::http_conn::ServerState;
use crate::engine::protocol::stats::ProcessInfo;
use crate::engine::queue::replay::Recovered;
use crate::engine::server::Server;
use crate::engine::time::Nanos;
use crate::options::{self, BinlogPlace, EtcdOptions, Options};
use crate::os::disk::Directory;
use crate::os::event_loop::EventLoop;
use crate::os::failure::{EXIT_DISK, EXIT_REFUSED, EXIT_SYSTEM, Failure, Result, remedy};
use crate::os::init::Machine;
use crate::os::listen::{self, Address, Port};
use crate::os::membership::{Duty, Membership, Standing};
use crate::os::metrics_server::MetricsServer;
use crate::os::notify::Status;
use crate::os::poller::{Poller, cannot_wait};
use crate::os::resolve;
use crate::os::sys::signals::{Signals, Stop};
use crate::os::sys::user::{self, Identity};
use crate::os::sys::{files, machine, memory};
use log::{info, warn};
use socket2::Socket;
use std::fmt::Display;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

/// The exit codes of a user database that cannot be read, of a user that it lacks, and of a user that this
/// process cannot become.
const EXIT_DATABASE: u8 = 32;
const EXIT_UNKNOWN_USER: u8 = 33;
const EXIT_USER: u8 = 34;
/// The exit code for wrong flags.
pub const EXIT_USAGE: u8 = 5;

/// The descriptors of any server: for events, signals, two sockets to listen on, messages to the service manager,
/// reading `/proc`, and a few more.
const LEAST_DESCRIPTORS: usize = 12;
/// For two sockets to listen on.
const DESCRIPTORS_FOR_METRICS: usize = 2;
/// At most this many HTTP connections are served at once, and a 16th of the limit of open files, but this many at least.
const MAX_HTTP_CONNECTIONS: usize = 64;
const LEAST_HTTP_CONNECTIONS: usize = 4;
/// For connections to the nodes, name resolution and events.
const DESCRIPTORS_FOR_ETCD: usize = 16;

/// Starts the server, and serves until a signal stops it, which is returned. `machine` is set up too, if this
/// is its first process.
pub fn run(options: &Options, machine: Option<&mut Machine>) -> Result<Stop> {
    for warning in &options.warnings {
        warn!("{warning}");
    }
    memory::return_large_blocks(PAGE_BYTES);
    memory::keep_headroom();
    // Before anything else opens a descriptor.
    let inherited = listen::inherited()?;
    if machine::is_first_process() {
        machine::reap_orphans();
    }
    if let Some(machine) = machine {
        machine.prepare(options.user.as_deref()).map_err(|why| Failure::new(1, why))?;
    }
    let limit = files::raise_file_limit();
    let (max_clients, max_http) = share_descriptors(options, limit)?;
    info!("the limit of open files is {limit}");
    let signals = Signals::take().map_err(Failure::of_system("block signals"))?;
    let user = options.user.as_deref().map(find_user).transpose()?;
    // The sockets for clients. A Unix socket is bound later, once the binlog is locked: until then it is `None`.
    let early = if let Some(BinlogPlace::Etcd(etcd)) = &options.binlog {
        check_sockets(etcd, options, !inherited.is_empty())?;
        // They are closed at once, and bound again when this server leads.
        listen::open_early(&options.listen)?;
        Some(Vec::new())
    } else if inherited.is_empty() {
        listen::open_early(&options.listen)?
    } else {
        let is_there = |listener| listen::is_at(listener, &options.listen);
        if options.names_address && !inherited.iter().any(is_there) {
            warn!("-l, -p and --socket-mode have no effect: the sockets are inherited");
        }
        Some(inherited)
    };
    let early_metrics = options.metrics.as_ref().map(listen::open_early).transpose()?;
    let directory = match &options.binlog {
        Some(BinlogPlace::Directory(path)) => Some(lock(path, options, user)?),
        Some(BinlogPlace::Etcd(_)) | None => None,
    };
    let open = |what, at, early: Option<Vec<Socket>>| {
        let listeners = early.map_or_else(|| listen::open(at, user), Ok)?;
        log_listeners(what, &listeners);
        Ok::<_, Failure>(listeners)
    };
    let listeners = open("listening on", &options.listen, early)?;
    let metrics = options.metrics.as_ref().zip(early_metrics);
    let metrics = metrics.map(|(at, early)| open("serving metrics on", at, early)).transpose()?;
    if let (Some(name), Some(identity)) = (&options.user, user)
        && !user::become_user(identity).map_err(cannot_become(name))?
    {
        warn!("-u {name}: cannot drop supplementary groups: only root may; keeping them");
    }
    let mut poller = Poller::new(signals, Limits::DEFAULT.events_per_iteration)
        .map_err(Failure::of_system("poll for events"))?;
    if let Some(listeners) = metrics {
        let server = MetricsServer::new(listeners, max_http, poller.registry());
        poller.metrics = Some(server.map_err(cannot_wait)?);
    }
    let facts = facts(options.max_connections.unwrap_or(usize::MAX).min(max_clients), poller.now);
    serve(options, facts, poller, listeners, directory, user)
}

/// Recovers the jobs, as soon as this server leads its cluster, and serves them. A stop signal ends that
/// earlier.
fn serve(
    options: &Options,
    facts: ProcessInfo,
    mut poller: Poller,
    mut listeners: Vec<Socket>,
    directory: Option<Directory>,
    user: Option<Identity>,
) -> Result<Stop> {
    let mut server = Server::new(options.settings, Limits::DEFAULT, facts, poller.now);
    let mut membership = None;
    if let Some(BinlogPlace::Etcd(etcd)) = &options.binlog {
        let member = Membership::join(etcd, Duty::Lead)?;
        member.set_waker(poller.waker().map_err(cannot_wait)?);
        if let Some(stop) = wait_to_lead(&mut poller, &member)? {
            return Ok(stop);
        }
        listeners = listen::open(&options.listen, user)?;
        log_listeners("listening on", &listeners);
        let syncing = Syncing::Remote(Nanos::from_secs(etcd.lease_ttl_secs));
        let recovered = recover(&mut poller, &mut server, &etcd.url, member.disk(), syncing);
        // Nothing can be read or written after the lease has ended, or if etcd has lost something.
        member.check()?;
        recovered?;
        membership = Some(member);
    }
    if let (Some(BinlogPlace::Directory(path)), Some(mut directory)) = (&options.binlog, directory)
    {
        let reads_back = options.settings.body_cache_bytes.is_some();
        if reads_back || matches!(options.fsync, Syncing::Within(_)) {
            let waker = poller.waker().map_err(cannot_wait)?;
            match directory.start_threads(waker, reads_back) {
                Err(error) if !reads_back => {
                    warn!(
                        "cannot start a thread: {error}; clients wait while the binlog is synced"
                    );
                }
                started => started.map_err(Failure::of_system("start a thread"))?,
            }
        }
        let disk = Box::new(directory);
        recover(&mut poller, &mut server, &path.display(), disk, options.fsync)?;
    }
    if let Some(stop) = poller.stop {
        return Ok(stop);
    }
    server.store.process.tool_server = listeners.first().and_then(tool_server);
    EventLoop::new(poller, server, listeners, membership).map_err(cannot_wait)?.run()
}

/// Waits until this server leads. Meanwhile it answers health checks, and notifies the service manager. Returns
/// the signal that has ended that.
fn wait_to_lead(poller: &mut Poller, membership: &Membership) -> Result<Option<Stop>> {
    // A signal may have arrived before.
    let mut due = Nanos::ZERO;
    loop {
        let leader = match membership.standing()? {
            Standing::Leader => return Ok(None),
            Standing::Undecided => None,
            Standing::Standby(leader) => Some(leader),
        };
        let leads = |leader| format!("standing by: {leader} leads");
        let status = leader.as_ref().map_or_else(|| "waiting for etcd".to_owned(), leads);
        poller.notifier.update(poller.now, || Status::StandingBy(status));
        if !poller.go_on_starting(due, ServerState::StandingBy(leader.as_deref()))? {
            return Ok(poller.stop);
        }
        due = poller.next_due();
    }
}

/// Recovers the jobs from the binlog. A stop signal ends that between two files, and leaves the files
/// unchanged.
fn recover(
    poller: &mut Poller,
    server: &mut Server<Socket>,
    place: &dyn Display,
    disk: Box<dyn Disk>,
    syncing: Syncing,
) -> Result {
    let failed = |error| failure_of_replay(place, &error);
    let begun_at = poller.read_clock();
    let mut replay = server.store.queue.begin_replay(disk, syncing).map_err(failed)?;
    loop {
        if !poller.go_on_starting(Nanos::ZERO, ServerState::Starting)? {
            return Ok(());
        }
        let Some(file) = replay.next_file() else { break };
        poller.notifier.reading(file, poller.now);
        replay.read_file().map_err(failed)?;
    }
    let Recovered { jobs, files, used_bytes, .. } = replay.finish(poller.now).map_err(failed)?;
    let took_ms = poller.read_clock().since(begun_at).as_nanos() / 1_000_000;
    info!(
        "recovered {jobs} jobs from {files} files with {used_bytes} bytes in use, in {took_ms} ms"
    );
    Ok(())
}

/// Returns how many clients and how many HTTP connections there can be at once: what others need is not given to them.
/// Fails if the limit of open files is too low for the flags: the server would not answer.
fn share_descriptors(options: &Options, limit: usize) -> Result<(usize, usize)> {
    let max_http = (limit / 16).clamp(LEAST_HTTP_CONNECTIONS, MAX_HTTP_CONNECTIONS);
    let binlog = match &options.binlog {
        Some(BinlogPlace::Directory(_)) => {
            Directory::descriptors(options.settings.body_cache_bytes.is_some())
        }
        Some(BinlogPlace::Etcd(_)) => DESCRIPTORS_FOR_ETCD,
        None => 0,
    };
    let metrics = options.metrics.as_ref().map_or(0, |_| DESCRIPTORS_FOR_METRICS + max_http);
    let needed = LEAST_DESCRIPTORS + binlog + metrics;
    let free = limit.saturating_sub(files::open_descriptors().unwrap_or(limit));
    if free > needed {
        return Ok((free - needed, max_http));
    }
    let message = format!(
        "the limit of open files is {limit}, which leaves {free}, and {} are needed with these \
         flags; raise it with ulimit -n or LimitNOFILE=",
        needed + 1
    );
    Err(Failure::new(EXIT_SYSTEM, message))
}

/// Refuses what cannot be done with a binlog in etcd, because the sockets are bound when this server
/// leads.
fn check_sockets(etcd: &EtcdOptions, options: &Options, has_inherited: bool) -> Result {
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

/// Returns the failure to recover the jobs. It has an exit code of its own if the disk itself fails, unlike a
/// lack of space or permission.
fn failure_of_replay(place: &dyn Display, error: &BinlogError) -> Failure {
    let os_error = error.os_error.map(io::Error::from_raw_os_error);
    let (exit_code, remedy) = match error.step {
        Step::Read if error.kind == io::ErrorKind::Unsupported => {
            (EXIT_REFUSED, "; start the newer server that wrote it, or move the files away")
        }
        Step::Read if error.kind == io::ErrorKind::OutOfMemory => (1, ""),
        Step::Read => (1, "; make it readable, or move it away to start without its jobs"),
        Step::Begin if error.os_error == Some(libc::EIO) => (EXIT_DISK, ""),
        Step::Begin => (1, os_error.as_ref().map_or("", remedy)),
        Step::Write => (EXIT_DISK, ""),
        Step::Output => (1, ""),
    };
    Failure::new(exit_code, format!("-b {place}: {error}{remedy}"))
}

fn log_listeners(what: &str, listeners: &[Socket]) {
    for listener in listeners {
        info!("{what} {}", listen::name_of(listener));
    }
}

fn find_user(name: &str) -> Result<Identity> {
    match resolve::user(name) {
        Ok(Some(identity)) => Ok(identity),
        Ok(None) => Err(Failure::new(
            EXIT_UNKNOWN_USER,
            format!("-u {name}: no such user; create it, or give the numbers UID:GID"),
        )),
        Err(error) => Err(Failure::new(
            EXIT_DATABASE,
            format!("-u {name}: cannot read the user database, give a number instead: {error}"),
        )),
    }
}

fn cannot_become(name: &str) -> impl Fn(io::Error) -> Failure + '_ {
    move |error| Failure::new(EXIT_USER, format!("-u {name}: cannot become this user: {error}"))
}

/// Locks the directory of the binlog, with a lock file that belongs to `user`.
fn lock(path: &Path, options: &Options, user: Option<Identity>) -> Result<Directory> {
    match (&options.user, user) {
        (Some(name), Some(identity)) => {
            user::as_user(identity, || Directory::lock(path)).map_err(cannot_become(name))?
        }
        _ => Directory::lock(path),
    }
}

/// Returns the argument of `-s` with which `beanstalkctl` finds this socket from its own machine, or `None`
/// if it finds it without.
fn tool_server(listener: &Socket) -> Option<String> {
    match listener.local_addr().ok()?.as_socket() {
        Some(address) => tool_address(address),
        None => Some(listen::name_of(listener)),
    }
}

fn tool_address(mut address: SocketAddr) -> Option<String> {
    if address.ip().is_unspecified() {
        address.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    let is_default = address == (Ipv4Addr::LOCALHOST, options::DEFAULT_PORT).into();
    (!is_default).then(|| address.to_string())
}

fn facts(max_connections: usize, started_at: Nanos) -> ProcessInfo {
    let [hostname, os_version, platform] = machine::uname();
    ProcessInfo {
        pid: std::process::id(),
        instance_id: machine::instance_id(),
        hostname,
        os_version,
        platform,
        started_at,
        tool_server: None,
        max_connections: Some(max_connections),
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
        for (step, error, code) in [
            (Step::Read, os_error(libc::EIO), 1),
            (Step::Begin, io::Error::other("of the test"), 1),
            (Step::Begin, os_error(libc::EACCES), 1),
            (Step::Begin, os_error(libc::EIO), 74),
        ] {
            let failure = BinlogError::new(step, "tried", error);
            assert_eq!(failure_of_replay(&"jobs", &failure).exit_code, code, "{failure}");
        }
    }

    #[test]
    fn the_tool_needs_the_address_of_a_socket_that_it_would_not_find() {
        for (address, argument) in [
            ("0.0.0.0:11300", None),
            ("[::]:11300", None),
            ("127.0.0.1:11300", None),
            ("[::]:11301", Some("127.0.0.1:11301")),
            ("127.0.0.2:11300", Some("127.0.0.2:11300")),
            ("[::1]:11300", Some("[::1]:11300")),
        ] {
            assert_eq!(tool_address(address.parse().unwrap()).as_deref(), argument);
        }
    }
}
