//! What the process waits for, before and while it serves clients: signals, time, HTTP connections, and the
//! descriptors that others register.
//!
//! It exists before the binlog is read, so that a server that starts or stands by can be stopped, answers
//! HTTP requests and reports to the service manager.

use super::failure::{EXIT_SYSTEM, Failure, Result};
use super::metrics_server::MetricsServer;
use super::notify::Notifier;
use super::sys::clock::Clock;
use super::sys::signals::{Signals, Stop};
use crate::engine::monitor::http_conn::ServerState;
use crate::engine::time::Nanos;
use log::{info, warn};
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Registry, Token, Waker};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// The poll, and what is served by it in every state of the server.
pub struct Poller {
    poll: Poll,
    events: Events,
    pub clock: Clock,
    signals: Signals,
    pub notifier: Notifier,
    pub metrics: Option<MetricsServer>,
    /// The time when the clock was last read.
    pub now: Nanos,
    /// The signal that stops the server, if one has arrived.
    pub stop: Option<Stop>,
    /// Whether the last signal of this kind has asked to reject puts.
    pub is_draining: bool,
}

/// The clock is read again before a shorter wait. A longer one may count from the last reading.
const SHORT_WAIT: Nanos = Nanos::from_millis(5);
/// The longest wait while something is due. The timeout of a poll does not count the time in which the machine is
/// suspended, so a suspend delays what is due by at most this.
const LONGEST_WAIT: Nanos = Nanos::from_secs(10);

// All other tokens are keys of clients, which are below.
const SIGNALS: Token = Token(usize::MAX);
const WAKER: Token = Token(usize::MAX - 1);
/// The token of all sockets of the metrics server.
pub const METRICS: Token = Token(usize::MAX - 2);
/// The token of the listeners for clients.
pub const LISTENERS: Token = Token(usize::MAX - 3);

impl Poller {
    /// Starts the clock. At most `capacity` events are taken at once.
    pub fn new(signals: Signals, capacity: usize) -> io::Result<Poller> {
        let (poll, clock) = (Poll::new()?, Clock::start());
        let mut source = SourceFd(&signals.as_fd().as_raw_fd());
        poll.registry().register(&mut source, SIGNALS, Interest::READABLE)?;
        Ok(Poller {
            poll,
            events: Events::with_capacity(capacity),
            clock,
            signals,
            notifier: Notifier::from_environment(),
            metrics: None,
            now: clock.now(),
            stop: None,
            is_draining: false,
        })
    }

    pub fn registry(&self) -> &Registry {
        self.poll.registry()
    }

    /// Returns what ends a wait from another thread.
    pub fn waker(&self) -> io::Result<Waker> {
        Waker::new(self.registry(), WAKER)
    }

    /// Reads the clock.
    pub fn read_clock(&mut self) -> Nanos {
        self.now = self.clock.now();
        self.now
    }

    /// Returns when something is due without an event.
    pub fn next_due(&self) -> Nanos {
        let metrics = self.metrics.as_ref().map_or(Nanos::NEVER, MetricsServer::next_due);
        metrics.min(self.notifier.next_due())
    }

    /// Returns the timeout with which a wait ends at `due`, or earlier.
    pub fn timeout(&mut self, due: Nanos) -> Option<Duration> {
        if due == Nanos::NEVER {
            return None;
        }
        // The poll rounds up to milliseconds, so only a short wait needs the exact time.
        let is_short = due > self.now && due.since(self.now) < SHORT_WAIT;
        let now = if is_short { self.read_clock() } else { self.now };
        Some(Duration::from_nanos(due.since(now).min(LONGEST_WAIT).as_nanos()))
    }

    /// Waits for events, and reads the clock. `note` gets the events that are not known here.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        mut note: impl FnMut(&Event),
    ) -> io::Result<()> {
        let polled = self.poll.poll(&mut self.events, timeout);
        self.read_clock();
        if let Err(error) = polled {
            let is_interrupted = error.kind() == ErrorKind::Interrupted;
            return if is_interrupted { Ok(()) } else { Err(error) };
        }
        for event in &self.events {
            match event.token() {
                SIGNALS => {
                    while let Some(signal) = self.signals.next() {
                        match signal {
                            libc::SIGUSR1 => {
                                warn!("SIGUSR1: draining: puts are rejected from now on");
                                self.is_draining = true;
                            }
                            libc::SIGUSR2 => {
                                warn!("SIGUSR2: not draining: puts are accepted from now on");
                                self.is_draining = false;
                            }
                            libc::SIGHUP => info!("SIGHUP: ignored: there is no file to reopen"),
                            libc::SIGINT => self.stop = Some(Stop::Interrupt),
                            _ => self.stop = Some(Stop::Terminate),
                        }
                    }
                }
                WAKER => {}
                METRICS => self.metrics.iter_mut().for_each(MetricsServer::on_event),
                _ => note(event),
            }
        }
        Ok(())
    }

    /// Waits until `due` for events, and answers HTTP requests of a server that serves no clients yet. Returns
    /// whether its start continues: no signal has stopped it.
    pub fn go_on_starting(&mut self, due: Nanos, state: ServerState<'_>) -> Result<bool> {
        let timeout = self.timeout(due);
        self.wait(timeout, |_| {}).map_err(cannot_wait)?;
        if let Some(metrics) = &mut self.metrics {
            metrics.turn(state, self.now, Nanos::NEVER);
        }
        if self.stop.is_some() {
            self.notifier.stopping();
        }
        Ok(self.stop.is_none())
    }
}

/// Returns the failure to wait for events.
pub fn cannot_wait(error: io::Error) -> Failure {
    Failure::new(EXIT_SYSTEM, format!("cannot wait for events: {error}; the server exits"))
}
