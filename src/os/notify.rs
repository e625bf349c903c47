//! Notifies the service manager, by the protocol of sd_notify(3): the server is ready, its status, the
//! watchdog, the server stops. A message is a datagram of `NAME=value` lines.
//!
//! The server never waits for the manager: a message that finds no room in the socket is sent later or
//! not at all. `NotifySchedule` decides what is sent and when, and has no socket. Without a manager
//! nothing is due.

use crate::engine::binlog::disk::FileNumber;
use crate::engine::protocol::stats::StatusLine;
use crate::engine::time::Nanos;
use log::{Level, debug, log, warn};
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

/// The connection to the service manager, if there is one.
#[derive(Debug)]
pub struct Notifier(Option<(NotifySocket, NotifySchedule)>);

/// The status for humans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The server does not lead its cluster, for this reason. It is ready then, or the manager would end it.
    StandingBy(String),
    Serving(StatusLine),
}

/// The messages to send, and when.
#[derive(Debug, Default)]
struct NotifySchedule {
    /// The interval of watchdog messages, if the manager has a watchdog.
    ping_interval: Option<Nanos>,
    /// When the last watchdog message was sent.
    last_ping: Nanos,
    /// The message that the server is ready has been sent.
    is_ready: bool,
    /// The current status; `None` before the first one.
    status: Option<Status>,
    /// The status that was sent last.
    sent_status: Option<Status>,
    /// When the status may be sent again.
    status_from: Nanos,
    /// When to retry a message that found no room.
    retry_at: Nanos,
    /// When the next file of the binlog may be reported.
    progress_from: Nanos,
}

/// Our socket, and the address of the service manager.
#[derive(Debug)]
struct NotifySocket {
    socket: UnixDatagram,
    manager: SocketAddr,
    /// A message has been sent. Some managers read until the server is ready, and no longer.
    ever_sent: bool,
    /// The failure has been logged.
    has_warned: bool,
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
    pub fn from_environment(now: Nanos) -> Notifier {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Notifier(None) };
        let socket = NotifySocket::to(&name).inspect_err(|error| {
            let name = name.display();
            warn!(
                "cannot notify the service manager: NOTIFY_SOCKET={name}: {error}; sending nothing"
            );
        });
        let [micros, pid] = ["WATCHDOG_USEC", "WATCHDOG_PID"].map(|name| std::env::var(name).ok());
        let ping_interval = ping_interval(micros, pid, std::process::id());
        Notifier(socket.ok().map(|socket| (socket, NotifySchedule::new(ping_interval, now))))
    }

    /// Reports that a file of the binlog is about to be read. That happens before the first iteration,
    /// and all files together can take minutes.
    pub fn reading(&mut self, file: FileNumber, now: Nanos) {
        if let Some((socket, schedule)) = &mut self.0
            && let Some(message) = schedule.progress(file, now)
        {
            socket.send(&message);
        }
    }

    /// Sends the messages that are due. `status` is called only if there is a service manager.
    pub fn update(&mut self, now: Nanos, status: impl FnOnce() -> Status) {
        let Some((socket, schedule)) = &mut self.0 else { return };
        schedule.note(status());
        schedule.send(now, |message| socket.send(message));
    }

    /// Returns when the next message is due without an event.
    pub fn next_due(&self) -> Nanos {
        let schedule = self.0.as_ref().map(|(_, schedule)| schedule);
        schedule.and_then(NotifySchedule::next_due).unwrap_or(Nanos::NEVER)
    }

    /// Reports that the server stops.
    pub fn stopping(&mut self) {
        if let Some((socket, _)) = &mut self.0 {
            socket.send("STOPPING=1\nSTATUS=stopping");
        }
    }
}

impl NotifySchedule {
    fn new(ping_interval: Option<Nanos>, now: Nanos) -> NotifySchedule {
        NotifySchedule { ping_interval, last_ping: now, ..NotifySchedule::default() }
    }

    /// Returns the message before this file of the binlog is read, if one is due.
    fn progress(&mut self, file: FileNumber, now: Nanos) -> Option<String> {
        if now < self.progress_from {
            return None;
        }
        self.progress_from = now + PROGRESS_PAUSE;
        // The watchdog runs already if the server has stood by.
        let ping = if self.is_ready && self.ping_interval.is_some() { "WATCHDOG=1\n" } else { "" };
        Some(format!("{ping}EXTEND_TIMEOUT_USEC={START_TIMEOUT_US}\nSTATUS=reading binlog.{file}"))
    }

    /// Notes the current status. Another one of a server that stands by is sent at once.
    fn note(&mut self, status: Status) {
        let status = Some(status);
        if matches!(status, Some(Status::StandingBy(_))) && self.status != status {
            (self.is_ready, self.status_from) = (false, Nanos::ZERO);
        }
        self.status = status;
    }

    fn next_ping(&self) -> Option<Nanos> {
        self.ping_interval.map(|every| self.last_ping + every)
    }

    fn has_new_status(&self) -> bool {
        self.sent_status != self.status
    }

    /// Returns when the next message is due if the status does not change.
    fn next_due(&self) -> Option<Nanos> {
        let ready = (!self.is_ready).then_some(Nanos::ZERO);
        let status = self.has_new_status().then_some(self.status_from);
        let next = [ready, status, self.next_ping()].into_iter().flatten().min()?;
        Some(next.max(self.retry_at))
    }

    /// Sends the message that is due now. `send` returns `false` if there is no room for it.
    fn send(&mut self, now: Nanos, send: impl FnOnce(&str) -> bool) {
        if self.next_due().is_none_or(|due| due > now) {
            return;
        }
        let is_status_due = self.has_new_status() && self.status_from <= now;
        let status = self.status.as_ref().filter(|_| is_status_due);
        let has_ping = self.next_ping().is_some_and(|due| due <= now);
        let lines = [
            (!self.is_ready).then(|| "READY=1".to_owned()),
            status.map(|status| match status {
                Status::StandingBy(why) => format!("STATUS={why}"),
                Status::Serving(line) => format!("STATUS={line}"),
            }),
            has_ping.then(|| "WATCHDOG=1".to_owned()),
        ];
        if !send(&lines.into_iter().flatten().collect::<Vec<String>>().join("\n")) {
            self.retry_at = now + RETRY_AFTER;
            return;
        }
        self.is_ready = true;
        if is_status_due {
            self.status_from = now + STATUS_PAUSE;
            self.sent_status.clone_from(&self.status);
        }
        if has_ping {
            self.last_ping = now;
        }
    }
}

impl NotifySocket {
    fn to(name: &OsStr) -> io::Result<NotifySocket> {
        let manager = match name.as_bytes() {
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
            [b'/', ..] => SocketAddr::from_pathname(Path::new(name))?,
            _ => return Err(io::Error::other("neither a path nor an abstract name")),
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(NotifySocket { socket, manager, ever_sent: false, has_warned: false })
    }

    /// Sends a message. Returns `false` if there is no room for it now. Another error is logged once,
    /// and the message is dropped.
    fn send(&mut self, message: &str) -> bool {
        loop {
            match self.socket.send_to_addr(message.as_bytes(), &self.manager) {
                Ok(_) => {
                    self.ever_sent = true;
                    return true;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_full(&error) => {
                    debug!(
                        "cannot notify the service manager: its socket is full; retrying in 1 s"
                    );
                    return false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.has_warned, true) {
                        let level = if self.ever_sent { Level::Debug } else { Level::Warn };
                        log!(
                            level,
                            "cannot notify the service manager: {error}; dropping the message"
                        );
                    }
                    return true;
                }
            }
        }
    }
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM))
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

    /// Returns the message of one iteration, with a manager that reads at once.
    fn update(schedule: &mut NotifySchedule, now: Nanos, status: Status) -> Option<String> {
        schedule.note(status);
        send(schedule, now, true)
    }

    /// Returns the message that is due now, for which there is room or not.
    fn send(schedule: &mut NotifySchedule, now: Nanos, has_room: bool) -> Option<String> {
        let mut sent = None;
        schedule.send(now, |message| {
            sent = Some(message.to_owned());
            has_room
        });
        sent
    }

    fn message(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn progress_is_reported_every_five_seconds() {
        let mut schedule = NotifySchedule::new(None, START);
        let messages: Vec<Option<String>> = (0..11)
            .map(|second| schedule.progress(second, millis(u64::from(second) * 1000)))
            .collect();
        let sent: Vec<usize> = (0..11).filter(|&second| messages[second].is_some()).collect();
        assert_eq!(sent, [0, 5, 10]);
        assert_eq!(messages[5], message("EXTEND_TIMEOUT_USEC=120000000\nSTATUS=reading binlog.5"));
        assert_eq!(schedule.next_due(), Some(Nanos::ZERO), "READY is still due");
    }

    #[test]
    fn ready_is_sent_first_and_once() {
        let mut schedule = NotifySchedule::new(None, START);
        assert_eq!(
            update(&mut schedule, START, jobs(0)),
            message("READY=1\nSTATUS=0 jobs, 0 connections")
        );
        assert_eq!(update(&mut schedule, millis(60_000), jobs(0)), None);
        assert_eq!(schedule.next_due(), None, "nothing is due");
    }

    #[test]
    fn a_changed_status_is_sent_every_three_seconds_at_most() {
        let mut schedule = NotifySchedule::new(None, START);
        update(&mut schedule, START, jobs(0));
        assert_eq!(update(&mut schedule, millis(1), jobs(1)), None);
        assert_eq!(update(&mut schedule, millis(2), jobs(2)), None);
        assert_eq!(schedule.next_due(), Some(START + STATUS_PAUSE));
        let late = message("STATUS=2 jobs (2 ready), 0 connections");
        assert_eq!(update(&mut schedule, START + STATUS_PAUSE, jobs(2)), late);
        assert_eq!(schedule.next_due(), None);
        // After a long pause it is sent at once.
        let early = message("STATUS=3 jobs (3 ready), 0 connections");
        assert_eq!(update(&mut schedule, millis(60_000), jobs(3)), early);
        // A change that is undone before the pause ends is not sent.
        assert_eq!(update(&mut schedule, millis(60_001), jobs(4)), None);
        assert_eq!(update(&mut schedule, millis(60_002), jobs(3)), None);
        assert_eq!(schedule.next_due(), None);
    }

    #[test]
    fn the_watchdog_gets_two_messages_in_its_timeout() {
        let mut schedule =
            NotifySchedule::new(ping_interval(Some("2000000".into()), None, 1), START);
        update(&mut schedule, START, jobs(0));
        assert_eq!(schedule.next_due(), Some(millis(1000)));
        assert_eq!(update(&mut schedule, millis(999), jobs(0)), None);
        assert_eq!(update(&mut schedule, millis(1003), jobs(0)), message("WATCHDOG=1"));
        assert_eq!(schedule.next_due(), Some(millis(2003)));
        // A late iteration, with a new status.
        let both = message("STATUS=1 job (1 ready), 0 connections\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, millis(9000), jobs(1)), both);
        assert_eq!(schedule.next_due(), Some(millis(10_000)));
    }

    #[test]
    fn a_message_that_finds_no_room_is_sent_later() {
        let mut schedule = NotifySchedule::new(Some(Nanos::from_millis(10)), START);
        schedule.note(jobs(0));
        assert!(send(&mut schedule, START, false).is_some());
        assert_eq!(send(&mut schedule, millis(999), true), None);
        assert_eq!(schedule.next_due(), Some(START + RETRY_AFTER), "the loop sleeps until then");
        let all = message("READY=1\nSTATUS=1 job (1 ready), 0 connections\nWATCHDOG=1");
        assert_eq!(update(&mut schedule, START + RETRY_AFTER, jobs(1)), all);
        assert_eq!(schedule.next_due(), Some(millis(1010)));
    }

    #[test]
    fn a_server_that_stands_by_is_ready_and_sends_each_status_at_once() {
        let mut schedule = NotifySchedule::new(Some(Nanos::from_secs(10)), START);
        let waiting = || Status::StandingBy("waiting for etcd".to_owned());
        let first = message("READY=1\nSTATUS=waiting for etcd");
        assert_eq!(update(&mut schedule, START, waiting()), first);
        assert_eq!(update(&mut schedule, millis(1), waiting()), None);
        let other = Status::StandingBy("standing by: b leads".to_owned());
        let second = message("READY=1\nSTATUS=standing by: b leads");
        assert_eq!(update(&mut schedule, millis(2), other.clone()), second);
        let ping = message("WATCHDOG=1");
        assert_eq!(update(&mut schedule, millis(10_000), other), ping);
        let serving = message("STATUS=1 job (1 ready), 0 connections");
        assert_eq!(update(&mut schedule, millis(10_001), jobs(1)), serving);
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
            assert!(NotifySocket::to(OsStr::new(name)).is_ok());
        }
        let too_long = format!("/{}", "x".repeat(200));
        for name in ["", "notify", "vsock:2:1", &too_long] {
            assert!(NotifySocket::to(OsStr::new(name)).is_err());
        }
    }
}
