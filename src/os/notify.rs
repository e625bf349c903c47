//! Notifies the service manager, by the protocol of sd_notify(3): the server is ready, its status, the
//! watchdog, the server stops. A message is a datagram of `NAME=value` lines.
//!
//! Each message of a server that has started is whole: it is ready, its status, and that it lives. So it does
//! not matter which one of them is lost.
//!
//! The server never waits for the manager: a message that finds no room in the socket is sent later or
//! not at all. `Schedule` decides what is sent and when, and has no socket. Without a manager nothing is due.

use crate::engine::binlog::disk::FileNumber;
use crate::engine::protocol::stats::StatusLine;
use crate::engine::time::Nanos;
use log::{Level, debug, log, warn};
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

/// The connection to the service manager, if there is one.
pub struct Notifier(Option<Manager>);

/// The status for humans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The server does not lead its cluster, for this reason. It is ready then, or the manager would end it.
    StandingBy(String),
    Serving(StatusLine),
}

/// The service manager: our socket, and its address.
struct Manager {
    socket: UnixDatagram,
    address: SocketAddr,
    schedule: Schedule,
    /// A failure has been logged.
    has_warned: bool,
}

/// What was sent and when, and so what is due.
#[derive(Debug, Default)]
struct Schedule {
    /// The interval of watchdog messages, if the manager has a watchdog.
    ping_interval: Option<Nanos>,
    /// The current status; `None` before the first one.
    status: Option<Status>,
    /// The status that was sent last. With the first one the server is ready.
    sent: Option<Status>,
    /// When the last message was sent.
    sent_at: Nanos,
    /// When to retry a message that found no room.
    retry_at: Nanos,
}

/// The status is for humans, so it changes at most this often.
const STATUS_PAUSE: Nanos = Nanos::from_secs(3);
/// When to write to a full socket again.
const RETRY_AFTER: Nanos = Nanos::from_secs(1);
/// While the binlog is read, progress is reported at this interval, and the manager is asked to wait
/// this long for the next report. Reading one file takes less, and so do the steps after the last.
const PROGRESS_PAUSE: Nanos = Nanos::from_secs(5);
const START_TIMEOUT_US: u32 = 120_000_000;
/// A shorter watchdog would keep the loop busy with messages.
const MIN_PING_INTERVAL: Nanos = Nanos::from_millis(1);

impl Notifier {
    /// Finds the service manager by `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`. If the socket
    /// cannot be used, a warning is logged and nothing is sent.
    pub fn from_environment() -> Notifier {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Notifier(None) };
        let manager = Manager::at(&name).inspect_err(|error| {
            let name = name.display();
            warn!(
                "cannot notify the service manager: NOTIFY_SOCKET={name}: {error}; sending nothing"
            );
        });
        Notifier(manager.ok())
    }

    /// Reports that a file of the binlog is about to be read. That happens before the first iteration,
    /// and all files together can take minutes.
    pub fn reading(&mut self, file: FileNumber, now: Nanos) {
        if let Some(manager) = &mut self.0
            && let Some(message) = manager.schedule.progress(file, now)
        {
            manager.send(&message);
        }
    }

    /// Sends the message that is due. `status` is called only if there is a service manager.
    pub fn update(&mut self, now: Nanos, status: impl FnOnce() -> Status) {
        let Some(manager) = &mut self.0 else { return };
        manager.schedule.status = Some(status());
        if let Some(message) = manager.schedule.message(now) {
            let is_sent = manager.send(&message);
            manager.schedule.note(is_sent, now);
        }
    }

    /// Returns when the next message is due without an event.
    pub fn next_due(&self) -> Nanos {
        self.0.as_ref().map_or(Nanos::NEVER, |manager| manager.schedule.next_due())
    }

    /// Reports that the server stops.
    pub fn stopping(&mut self) {
        if let Some(manager) = &mut self.0 {
            manager.send("STOPPING=1\nSTATUS=stopping");
        }
    }
}

impl Schedule {
    /// Returns the message before this file of the binlog is read, if one is due.
    fn progress(&mut self, file: FileNumber, now: Nanos) -> Option<String> {
        if now < self.sent_at + PROGRESS_PAUSE {
            return None;
        }
        self.sent_at = now;
        // The watchdog runs already if the server has stood by.
        let ping = if self.sent.is_some() { self.ping() } else { "" };
        Some(format!("EXTEND_TIMEOUT_USEC={START_TIMEOUT_US}\nSTATUS=reading binlog.{file}{ping}"))
    }

    fn ping(&self) -> &'static str {
        if self.ping_interval.is_some() { "\nWATCHDOG=1" } else { "" }
    }

    /// Returns when the next message is due if the status does not change. The first one, and another status
    /// of a server that stands by, are due at once.
    fn next_due(&self) -> Nanos {
        let status = match (&self.status, &self.sent) {
            (status, sent) if status == sent => Nanos::NEVER,
            (Some(Status::Serving(_)), Some(_)) => self.sent_at + STATUS_PAUSE,
            _ => Nanos::ZERO,
        };
        let ping = self.ping_interval.map_or(Nanos::NEVER, |every| self.sent_at + every);
        status.min(ping).max(self.retry_at)
    }

    /// Returns the message that is due now.
    fn message(&self, now: Nanos) -> Option<String> {
        let status = self.status.as_ref().filter(|_| self.next_due() <= now)?;
        Some(format!("READY=1\nSTATUS={status}{}", self.ping()))
    }

    /// Notes whether there was room for the message.
    fn note(&mut self, is_sent: bool, now: Nanos) {
        if is_sent {
            self.sent.clone_from(&self.status);
            self.sent_at = now;
        } else {
            self.retry_at = now + RETRY_AFTER;
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Status::StandingBy(why) => f.write_str(why),
            Status::Serving(line) => line.fmt(f),
        }
    }
}

impl Manager {
    fn at(name: &OsStr) -> io::Result<Manager> {
        let address = match name.as_bytes() {
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
            [b'/', ..] => SocketAddr::from_pathname(Path::new(name))?,
            _ => return Err(io::Error::other("neither a path nor an abstract name")),
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        let [micros, pid] = ["WATCHDOG_USEC", "WATCHDOG_PID"].map(|name| std::env::var(name).ok());
        let ping_interval = ping_interval(micros, pid, std::process::id());
        let schedule = Schedule { ping_interval, ..Schedule::default() };
        Ok(Manager { socket, address, schedule, has_warned: false })
    }

    /// Sends a message. Returns `false` if there is no room for it now. Another error is logged once,
    /// and the message is dropped.
    fn send(&mut self, message: &str) -> bool {
        // The socket does not block, so no signal interrupts the call.
        let sent = self.socket.send_to_addr(message.as_bytes(), &self.address);
        let Err(error) = sent else { return true };
        if let Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) = error.raw_os_error() {
            debug!("cannot notify the service manager: its socket is full; retrying in 1 s");
            return false;
        }
        if !std::mem::replace(&mut self.has_warned, true) {
            // Some managers read until the server is ready, and no longer.
            let level = if self.schedule.sent.is_some() { Level::Debug } else { Level::Warn };
            log!(level, "cannot notify the service manager: {error}; dropping the message");
        }
        true
    }
}

/// Returns the interval of watchdog messages for process `own_pid`: half of the watchdog's timeout.
fn ping_interval(micros: Option<String>, pid: Option<String>, own_pid: u32) -> Option<Nanos> {
    let is_ours = pid.is_none_or(|pid| pid.parse() == Ok(own_pid));
    let micros = micros?.parse::<u64>().ok().filter(|&micros| is_ours && micros > 0)?;
    Some(Nanos::from_nanos(micros.saturating_mul(1000) / 2).max(MIN_PING_INTERVAL))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = Nanos::from_secs(1000);

    fn jobs(ready: u64) -> Status {
        Status::Serving(StatusLine { ready, ..StatusLine::default() })
    }

    fn millis(millis: u64) -> Nanos {
        START + Nanos::from_millis(millis)
    }

    /// Returns the message of one iteration, for which there is room.
    fn update(schedule: &mut Schedule, now: Nanos, status: Status) -> Option<String> {
        schedule.status = Some(status);
        let message = schedule.message(now)?;
        schedule.note(true, now);
        Some(message)
    }

    fn message(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn with_ping(interval: Nanos) -> Schedule {
        Schedule { ping_interval: Some(interval), ..Schedule::default() }
    }

    #[test]
    fn progress_is_reported_every_five_seconds() {
        let mut schedule = Schedule::default();
        let messages: Vec<Option<String>> = (0..11)
            .map(|second| schedule.progress(second, millis(u64::from(second) * 1000)))
            .collect();
        let sent: Vec<usize> = (0..11).filter(|&second| messages[second].is_some()).collect();
        assert_eq!(sent, [0, 5, 10]);
        assert_eq!(messages[5], message("EXTEND_TIMEOUT_USEC=120000000\nSTATUS=reading binlog.5"));
        schedule.status = Some(jobs(0));
        assert_eq!(schedule.next_due(), Nanos::ZERO, "READY is still due");
        // A watchdog that has not begun yet must not begin while the binlog is read.
        let mut schedule = with_ping(Nanos::from_secs(10));
        assert!(!schedule.progress(1, START).unwrap().contains("WATCHDOG"));
        update(&mut schedule, START, Status::StandingBy("waiting".into()));
        assert!(schedule.progress(1, millis(9_000)).unwrap().ends_with("\nWATCHDOG=1"));
    }

    #[test]
    fn the_first_status_is_sent_at_once() {
        let mut schedule = Schedule::default();
        assert_eq!(
            update(&mut schedule, START, jobs(0)),
            message("READY=1\nSTATUS=0 jobs, 0 connections")
        );
        assert_eq!(update(&mut schedule, millis(60_000), jobs(0)), None);
        assert_eq!(schedule.next_due(), Nanos::NEVER, "nothing is due");
    }

    #[test]
    fn a_changed_status_is_sent_every_three_seconds_at_most() {
        let mut schedule = Schedule::default();
        update(&mut schedule, START, jobs(0));
        assert_eq!(update(&mut schedule, millis(1), jobs(1)), None);
        assert_eq!(update(&mut schedule, millis(2), jobs(2)), None);
        assert_eq!(schedule.next_due(), START + STATUS_PAUSE);
        let late = message("READY=1\nSTATUS=2 jobs (2 ready), 0 connections");
        assert_eq!(update(&mut schedule, START + STATUS_PAUSE, jobs(2)), late);
        assert_eq!(schedule.next_due(), Nanos::NEVER);
        // After a long pause it is sent at once.
        let early = message("READY=1\nSTATUS=3 jobs (3 ready), 0 connections");
        assert_eq!(update(&mut schedule, millis(60_000), jobs(3)), early);
        // A change that is undone before the pause ends is not sent.
        assert_eq!(update(&mut schedule, millis(60_001), jobs(4)), None);
        assert_eq!(update(&mut schedule, millis(60_002), jobs(3)), None);
        assert_eq!(schedule.next_due(), Nanos::NEVER);
    }

    #[test]
    fn the_watchdog_gets_two_messages_in_its_timeout() {
        let mut schedule = with_ping(ping_interval(Some("2000000".into()), None, 1).unwrap());
        update(&mut schedule, START, jobs(0));
        assert_eq!(schedule.next_due(), millis(1000));
        assert_eq!(update(&mut schedule, millis(999), jobs(0)), None);
        let same = message("READY=1\nSTATUS=0 jobs, 0 connections\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, millis(1003), jobs(0)), same);
        assert_eq!(schedule.next_due(), millis(2003));
        // A late iteration, with a new status.
        let new = message("READY=1\nSTATUS=1 job (1 ready), 0 connections\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, millis(9000), jobs(1)), new);
        assert_eq!(schedule.next_due(), millis(10_000));
    }

    #[test]
    fn a_message_that_finds_no_room_is_sent_later() {
        let mut schedule = with_ping(Nanos::from_millis(10));
        schedule.status = Some(jobs(0));
        assert!(schedule.message(START).is_some());
        schedule.note(false, START);
        assert_eq!(schedule.message(millis(999)), None);
        assert_eq!(schedule.next_due(), START + RETRY_AFTER, "the loop sleeps until then");
        let whole = message("READY=1\nSTATUS=1 job (1 ready), 0 connections\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, START + RETRY_AFTER, jobs(1)), whole);
        assert_eq!(schedule.next_due(), millis(1010));
    }

    #[test]
    fn a_server_that_stands_by_is_ready_and_sends_each_status_at_once() {
        let mut schedule = with_ping(Nanos::from_secs(10));
        let waiting = || Status::StandingBy("waiting for etcd".to_owned());
        let first = message("READY=1\nSTATUS=waiting for etcd\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, START, waiting()), first);
        assert_eq!(update(&mut schedule, millis(1), waiting()), None);
        let other = Status::StandingBy("standing by: b leads".to_owned());
        let second = message("READY=1\nSTATUS=standing by: b leads\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, millis(2), other.clone()), second);
        assert_eq!(update(&mut schedule, millis(10_001), other.clone()), None);
        assert_eq!(update(&mut schedule, millis(10_002), other), second);
        let serving = message("READY=1\nSTATUS=1 job (1 ready), 0 connections\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, millis(13_002), jobs(1)), serving);
    }

    #[test]
    fn the_watchdog_of_another_process_gets_nothing() {
        let every = |micros: &str, pid: Option<&str>| {
            ping_interval(Some(micros.to_owned()), pid.map(str::to_owned), 7)
        };
        assert_eq!(every("30000000", None), Some(Nanos::from_secs(15)));
        assert_eq!(every("30000000", Some("7")), Some(Nanos::from_secs(15)));
        assert_eq!(every("1", None), Some(MIN_PING_INTERVAL));
        assert_eq!(every("30000000", Some("8")), None);
        assert_eq!(every("30000000", Some("")), None);
        for nothing in ["0", "", "-1", "soon"] {
            assert_eq!(every(nothing, None), None);
        }
        assert_eq!(ping_interval(None, None, 7), None);
    }

    #[test]
    fn a_manager_has_a_path_or_an_abstract_name() {
        for name in ["/run/notify", "@notify"] {
            assert!(Manager::at(OsStr::new(name)).is_ok());
        }
        let too_long = format!("/{}", "x".repeat(200));
        for name in ["", "notify", "vsock:2:1", &too_long] {
            assert!(Manager::at(OsStr::new(name)).is_err());
        }
    }
}
