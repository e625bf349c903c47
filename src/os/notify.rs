//! What a service manager is told: that the server is ready, how it does, that it is alive, that
//! it stops. The protocol is that of `sd_notify(3)`: datagrams of `NAME=value` lines.
//!
//! Nobody waits for the manager: what it has no room for is said later or not at all. What is to
//! be said, and when, is decided in `NotifySchedule`, which knows no socket; without a manager there
//! is nothing to say, and nobody is woken for it.

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

/// The way to the service manager, if there is one.
#[derive(Debug)]
pub struct Notifier(Option<(NotifySocket, NotifySchedule)>);

/// What is to be said, and when.
#[derive(Debug)]
struct NotifySchedule {
    /// How often to say that the loop turns, if anybody wants to hear it.
    ping_every: Option<Nanos>,
    /// When that was said last.
    pinged_at: Nanos,
    /// The manager has been told that the server is ready.
    is_ready: bool,
    /// How the server does.
    present: StatusLine,
    /// What was said of that.
    told: Option<StatusLine>,
    /// When the status may be said again.
    status_from: Nanos,
    /// When a message that found no room may be tried again.
    retry_at: Nanos,
    /// When it may be said again which file of the binlog is read.
    progress_from: Nanos,
}

/// The socket of the service manager, and ours.
#[derive(Debug)]
struct NotifySocket {
    socket: UnixDatagram,
    manager: SocketAddr,
    /// It has heard something. Some listen until the server is ready, and no longer.
    ever_sent: bool,
    /// Once is enough to say that it does not hear.
    has_complained: bool,
}

/// The status is no clock: so often a human can follow.
const STATUS_EVERY: Nanos = Nanos::from_secs(3);
/// When a full socket is tried again.
const AGAIN: Nanos = Nanos::from_secs(1);
/// While the binlog is read the manager is told so often, and asked for so much patience: a file
/// takes less, and so does what comes after the last.
const PROGRESS_EVERY: Nanos = Nanos::from_secs(5);
const PATIENCE_US: u32 = 120_000_000;
/// A watchdog of microseconds would keep the loop busy with nothing else.
const SHORTEST_PING: Nanos = Nanos::from_millis(1);

impl Notifier {
    /// Finds the service manager by `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`. Where it
    /// cannot be reached this is logged, and the server does without.
    pub fn from_environment(now: Nanos) -> Notifier {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Notifier(None) };
        match NotifySocket::to(&name) {
            Ok(voice) => {
                let watchdog = |name| std::env::var(name).ok();
                let ping_every = ping_every(
                    watchdog("WATCHDOG_USEC"),
                    watchdog("WATCHDOG_PID"),
                    std::process::id(),
                );
                Notifier(Some((voice, NotifySchedule::new(ping_every, now))))
            }
            Err(error) => {
                warn!("NOTIFY_SOCKET={}: cannot be told anything: {error}", name.display());
                Notifier(None)
            }
        }
    }

    /// A file of the binlog is about to be read, before the loop turns for the first time: all of
    /// them are, and that can take minutes.
    pub fn reading(&mut self, file: FileNumber, now: Nanos) {
        let Some((voice, herald)) = &mut self.0 else { return };
        if let Some(message) = herald.progress(file, now) {
            voice.say(&message);
        }
    }

    /// The loop has turned, and accepts clients: says what there is to say. `summary` is asked
    /// only if somebody wants to hear it.
    pub fn turn(&mut self, now: Nanos, summary: impl FnOnce() -> StatusLine) {
        let Some((voice, herald)) = &mut self.0 else { return };
        herald.note(summary());
        if let Some(message) = herald.message(now) {
            let is_heard = voice.say(&message);
            herald.said(now, is_heard);
        }
    }

    /// When there will be something to say though nothing happens.
    pub fn next_due(&self) -> Option<Nanos> {
        self.0.as_ref().and_then(|(_, herald)| herald.next_due())
    }

    /// The server stops.
    pub fn stopping(&mut self) {
        if let Some((voice, _)) = &mut self.0 {
            voice.say("STOPPING=1\nSTATUS=stopping");
        }
    }
}

impl NotifySchedule {
    fn new(ping_every: Option<Nanos>, now: Nanos) -> NotifySchedule {
        NotifySchedule {
            ping_every,
            pinged_at: now,
            is_ready: false,
            present: StatusLine::default(),
            told: None,
            status_from: Nanos::ZERO,
            retry_at: Nanos::ZERO,
            progress_from: Nanos::ZERO,
        }
    }

    /// What is to be said when this file of the binlog is about to be read.
    fn progress(&mut self, file: FileNumber, now: Nanos) -> Option<String> {
        if now < self.progress_from {
            return None;
        }
        self.progress_from = now + PROGRESS_EVERY;
        Some(format!("EXTEND_TIMEOUT_USEC={PATIENCE_US}\nSTATUS=reading binlog.{file}"))
    }

    fn note(&mut self, summary: StatusLine) {
        self.present = summary;
    }

    fn next_ping(&self) -> Option<Nanos> {
        self.ping_every.map(|every| self.pinged_at + every)
    }

    fn has_new_status(&self) -> bool {
        self.told != Some(self.present)
    }

    /// The moment of the next message, as things are.
    fn next_due(&self) -> Option<Nanos> {
        let ready = (!self.is_ready).then_some(Nanos::ZERO);
        let status = self.has_new_status().then_some(self.status_from);
        let next = [ready, status, self.next_ping()].into_iter().flatten().min()?;
        Some(next.max(self.retry_at))
    }

    /// What is to be said now.
    fn message(&self, now: Nanos) -> Option<String> {
        self.next_due().filter(|&due| due <= now)?;
        let mut lines = Vec::new();
        if !self.is_ready {
            lines.push("READY=1".to_owned());
        }
        // In company it costs nothing more.
        if self.has_new_status() && self.status_from <= now {
            lines.push(format!("STATUS={}", self.present));
        }
        if self.next_ping().is_some_and(|due| due <= now) {
            lines.push("WATCHDOG=1".to_owned());
        }
        Some(lines.join("\n"))
    }

    /// The message of this moment has been sent, or found no room.
    fn said(&mut self, now: Nanos, is_heard: bool) {
        if !is_heard {
            self.retry_at = now + AGAIN;
            return;
        }
        self.is_ready = true;
        if self.status_from <= now {
            if self.has_new_status() {
                self.status_from = now + STATUS_EVERY;
            }
            self.told = Some(self.present);
        }
        if self.next_ping().is_some_and(|due| due <= now) {
            self.pinged_at = now;
        }
    }
}

impl NotifySocket {
    fn to(name: &OsStr) -> io::Result<NotifySocket> {
        let manager = match name.as_bytes() {
            [b'@', rest @ ..] => SocketAddr::from_abstract_name(rest)?,
            [b'/', ..] => SocketAddr::from_pathname(Path::new(name))?,
            _ => return Err(io::Error::other("it is neither a path nor an abstract name")),
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        Ok(NotifySocket { socket, manager, ever_sent: false, has_complained: false })
    }

    /// Sends a message; `false` if there is no room for it at present. What goes wrong
    /// otherwise is told once, and is over: nobody listens.
    fn say(&mut self, message: &str) -> bool {
        loop {
            match self.socket.send_to_addr(message.as_bytes(), &self.manager) {
                Ok(_) => {
                    self.ever_sent = true;
                    return true;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_full(&error) => {
                    debug!("the service manager does not keep up");
                    return false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut self.has_complained, true) {
                        let level = if self.ever_sent { Level::Debug } else { Level::Warn };
                        log!(level, "the service manager cannot be told anything: {error}");
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

/// How often the watchdog of process `own_pid` is to be calmed: twice in its time.
fn ping_every(micros: Option<String>, pid: Option<String>, own_pid: u32) -> Option<Nanos> {
    let is_ours = pid.is_none_or(|pid| pid.parse() == Ok(own_pid));
    let micros = micros?.parse::<u64>().ok().filter(|&micros| is_ours && micros > 0)?;
    Some(Nanos::from_nanos(micros.saturating_mul(1000) / 2).max(SHORTEST_PING))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = Nanos::from_secs(1000);

    fn jobs(ready: u64) -> StatusLine {
        StatusLine { ready, ..StatusLine::default() }
    }

    fn millis(millis: u64) -> Nanos {
        START + Nanos::from_millis(millis)
    }

    /// What a manager hears who reads at once, in one turn of the loop.
    fn turn(herald: &mut NotifySchedule, now: Nanos, summary: StatusLine) -> Option<String> {
        herald.note(summary);
        let message = herald.message(now);
        if message.is_some() {
            herald.said(now, true);
        }
        message
    }

    fn said(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn while_the_binlog_is_read_patience_is_asked_for_now_and_then() {
        let mut herald = NotifySchedule::new(None, START);
        let told: Vec<Option<String>> = (0..11)
            .map(|second| herald.progress(second, millis(u64::from(second) * 1000)))
            .collect();
        let heard: Vec<usize> = (0..11).filter(|&second| told[second].is_some()).collect();
        assert_eq!(heard, [0, 5, 10]);
        assert_eq!(told[5], said("EXTEND_TIMEOUT_USEC=120000000\nSTATUS=reading binlog.5"));
        assert_eq!(herald.next_due(), Some(Nanos::ZERO), "readiness is still to be told");
    }

    #[test]
    fn readiness_is_told_first_and_once() {
        let mut herald = NotifySchedule::new(None, START);
        assert_eq!(
            turn(&mut herald, START, jobs(0)),
            said("READY=1\nSTATUS=0 jobs, 0 connections")
        );
        assert_eq!(turn(&mut herald, millis(60_000), jobs(0)), None);
        assert_eq!(herald.next_due(), None, "nobody is woken for nothing");
    }

    #[test]
    fn the_status_is_told_when_it_has_changed_and_not_too_often() {
        let mut herald = NotifySchedule::new(None, START);
        turn(&mut herald, START, jobs(0));
        assert_eq!(turn(&mut herald, millis(1), jobs(1)), None);
        assert_eq!(turn(&mut herald, millis(2), jobs(2)), None);
        assert_eq!(herald.next_due(), Some(START + STATUS_EVERY));
        let at_last = said("STATUS=2 jobs (2 ready), 0 connections");
        assert_eq!(turn(&mut herald, START + STATUS_EVERY, jobs(2)), at_last);
        assert_eq!(herald.next_due(), None);
        // After a long silence at once.
        let at_once = said("STATUS=3 jobs (3 ready), 0 connections");
        assert_eq!(turn(&mut herald, millis(60_000), jobs(3)), at_once);
        // What has come and gone needs no words.
        assert_eq!(turn(&mut herald, millis(60_001), jobs(4)), None);
        assert_eq!(turn(&mut herald, millis(60_002), jobs(3)), None);
        assert_eq!(herald.next_due(), None);
    }

    #[test]
    fn the_watchdog_is_calmed_twice_in_its_time() {
        let mut herald = NotifySchedule::new(ping_every(Some("2000000".into()), None, 1), START);
        turn(&mut herald, START, jobs(0));
        assert_eq!(herald.next_due(), Some(millis(1000)));
        assert_eq!(turn(&mut herald, millis(999), jobs(0)), None);
        assert_eq!(turn(&mut herald, millis(1003), jobs(0)), said("WATCHDOG=1"));
        assert_eq!(herald.next_due(), Some(millis(2003)));
        // A turn that came late, with news.
        let both = said("STATUS=1 job (1 ready), 0 connections\nWATCHDOG=1");
        assert_eq!(turn(&mut herald, millis(9000), jobs(1)), both);
        assert_eq!(herald.next_due(), Some(millis(10_000)));
    }

    #[test]
    fn what_finds_no_room_is_said_later() {
        let mut herald = NotifySchedule::new(Some(Nanos::from_millis(10)), START);
        herald.note(jobs(0));
        assert!(herald.message(START).is_some());
        herald.said(START, false);
        assert_eq!(herald.message(millis(999)), None);
        assert_eq!(herald.next_due(), Some(START + AGAIN), "the loop does not spin");
        let all = said("READY=1\nSTATUS=1 job (1 ready), 0 connections\nWATCHDOG=1");
        assert_eq!(turn(&mut herald, START + AGAIN, jobs(1)), all);
        assert_eq!(herald.next_due(), Some(millis(1010)));
    }

    #[test]
    fn the_watchdog_of_another_process_is_left_alone() {
        let every = |micros: &str, pid: Option<&str>| {
            ping_every(Some(micros.to_owned()), pid.map(str::to_owned), 7)
        };
        assert_eq!(every("30000000", None), Some(Nanos::from_secs(15)));
        assert_eq!(every("30000000", Some("7")), Some(Nanos::from_secs(15)));
        assert_eq!(every("1", None), Some(SHORTEST_PING));
        assert_eq!(every("30000000", Some("8")), None);
        assert_eq!(every("30000000", Some("")), None);
        for nothing in ["0", "", "-1", "soon"] {
            assert_eq!(every(nothing, None), None);
        }
        assert_eq!(ping_every(None, None, 7), None);
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
