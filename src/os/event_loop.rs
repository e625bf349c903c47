//! The event loop: polls sockets, timers and signals, and drives the server.
//!
//! One iteration:
//!
//! ```text
//! monitor -> poll -> begin: what is due -> visit each ready connection once -> commit
//!   -> flush: write, close connections that have ended -> accept
//! ```
//!
//! Clients are accepted last, so that a connection that ended makes room for one that came in
//! the same iteration. A new connection is read from in the next iteration.
//!
//! Sockets are registered once, for both directions and edge-triggered. The server remembers the
//! readiness of an event until the kernel returns `WouldBlock`. While connections have work left, the
//! loop does not sleep. Replies are written after all reads of the iteration, when its changes are in
//! the binlog: one write and one sync serve the whole iteration.
//!
//! The loop knows no command and no rule.

use super::acceptor::Acceptor;
use super::disk_thread::DiskWaker;
use super::failure::{EXIT_DISK, Failure};
use super::membership::{EXIT_LOST, Membership};
use super::monitor::Monitor;
use super::sys::clock::{self, Alarm, Clock};
use super::sys::signals::{Signal, Signals, Stop};
use crate::engine::binlog::IoFailed;
use crate::engine::keys::ConnKey;
use crate::engine::server::{Readiness, Server};
use crate::engine::time::Nanos;
use log::info;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use socket2::Socket;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The loop with everything that it serves.
#[derive(Debug)]
pub struct EventLoop {
    poll: Poll,
    server: Server<Socket>,
    clock: Clock,
    alarm: Alarm,
    signals: Signals,
    monitor: Monitor,
    acceptor: Acceptor,
    /// The time when the clock was last read.
    now: Nanos,
    /// When this iteration began.
    iteration_at: Nanos,
    /// When something is due for the server.
    due: Nanos,
    stop: Option<Stop>,
    /// The membership in a cluster, if there is one. No reply may leave without its leave.
    membership: Option<Membership>,
}

/// The clock is read again before a shorter wait. A longer one may count from the last reading.
const SHORT_WAIT: Nanos = Nanos::from_millis(5);

/// The time between two looks for changes that etcd has not acknowledged.
const LOOK_INTERVAL: Nanos = Nanos::from_millis(200);
/// For waits longer than this the alarm is set, which counts the time in which the machine is
/// suspended. The timeout of a poll does not, so a suspend delays a shorter wait by at most this.
const LONG_WAIT: Nanos = Nanos::from_secs(1);

const SIGNALS: Token = Token(usize::MAX);
const MONITOR: Token = Token(usize::MAX - 1);
const ALARM: Token = Token(usize::MAX - 2);
const MEMBERSHIP: Token = Token(usize::MAX - 3);
const DISK: Token = Token(usize::MAX - 4);
const FIRST_LISTENER: usize = usize::MAX - 5;

/// A server that stops waits for acknowledgements at most this long.
const STOP_TIMEOUT: Nanos = Nanos::from_secs(10);
/// And at most this long for clients to take their last replies.
const LAST_REPLIES_TIMEOUT: Nanos = Nanos::from_millis(100);
/// A server that stops looks at least this often whether it is done.
const STOP_WAIT: Duration = Duration::from_millis(5);

/// The threads that wake the loop.
#[derive(Debug)]
pub struct LoopWakers {
    /// The membership in a cluster.
    pub membership: Option<Membership>,
    /// Wakes the loop when a read or sync of a file has ended.
    pub disk: Option<DiskWaker>,
}

impl EventLoop {
    /// Creates the loop, which serves at most `max_connections` clients at once.
    pub fn new(
        server: Server<Socket>,
        clock: Clock,
        signals: Signals,
        monitor: Monitor,
        listeners: Vec<Socket>,
        max_connections: usize,
        LoopWakers { membership, disk }: LoopWakers,
    ) -> io::Result<EventLoop> {
        let poll = Poll::new()?;
        let registry = poll.registry();
        registry.register(&mut SourceFd(&signals.as_raw_fd()), SIGNALS, Interest::READABLE)?;
        let alarm = Alarm::new()?;
        registry.register(&mut SourceFd(&alarm.as_raw_fd()), ALARM, Interest::READABLE)?;
        let acceptor =
            Acceptor::new("connections", listeners, max_connections, registry, FIRST_LISTENER)?;
        if let Some(descriptor) = monitor.descriptor() {
            registry.register(&mut SourceFd(&descriptor), MONITOR, Interest::READABLE)?;
        }
        if let Some(membership) = &membership {
            membership.set_waker(Waker::new(registry, MEMBERSHIP)?);
        }
        if let Some(disk) = disk {
            disk.set(Waker::new(registry, DISK)?);
        }
        Ok(EventLoop {
            poll,
            server,
            clock,
            alarm,
            signals,
            monitor,
            acceptor,
            now: clock.now(),
            iteration_at: clock.now(),
            due: Nanos::NEVER,
            stop: None,
            membership,
        })
    }

    /// Serves until a signal stops the server. Returns that signal.
    pub fn run(mut self) -> Result<Stop, Failure> {
        let mut events = Events::with_capacity(self.server.limits().events_per_iteration);
        loop {
            self.monitor.update(&self.server, self.now).map_err(cannot_wait)?;
            self.wait(&mut events).map_err(cannot_wait)?;
            if let Some(stop) = self.stop {
                self.monitor.notifier.stopping();
                self.server.stop(self.now).map_err(cannot_write)?;
                self.send_last_replies(&mut events)?;
                return Ok(stop);
            }
            if self.server.has_binlog() {
                self.server.set_clock_offset(clock::offset(self.now));
            }
            self.server.begin(self.now, self.due);
            let clock = self.clock;
            while self.server.visit_next(|| clock.now()).is_some() {}
            self.now = self.server.clock();
            self.server.commit(self.now).map_err(cannot_write)?;
            self.server.flush(may_send(self.membership.as_ref()));
            self.check_membership()?;
            if self.server.take_has_closed() {
                self.acceptor.on_close();
            }
            self.accept();
        }
    }

    /// Fails if another server of the cluster may lead.
    fn check_membership(&self) -> Result<(), Failure> {
        let Some(membership) = &self.membership else { return Ok(()) };
        membership
            .check()
            .map_err(|error| Failure::new(error.exit_code(), format!("{error}; the server exits")))
    }

    /// Waits until the cluster has acknowledged all changes, and sends the replies that have waited.
    /// No command runs any more.
    fn send_last_replies(&mut self, events: &mut Events) -> Result<(), Failure> {
        if self.membership.is_none() {
            return Ok(());
        }
        let began_at = self.now;
        while !self.server.is_acknowledged() {
            if self.now.since(began_at) > STOP_TIMEOUT {
                let why = "etcd does not acknowledge the last changes; their replies are not sent";
                return Err(Failure::new(EXIT_LOST, why));
            }
            self.wait_for(events, Some(STOP_WAIT)).map_err(cannot_wait)?;
            self.server.hand_over();
            self.check_membership()?;
        }
        let began_at = self.read_clock();
        self.server.flush(may_send(self.membership.as_ref()));
        while self.server.has_replies() && self.now.since(began_at) < LAST_REPLIES_TIMEOUT {
            self.wait_for(events, Some(STOP_WAIT)).map_err(cannot_wait)?;
            self.server.flush_ready(may_send(self.membership.as_ref()));
        }
        self.check_membership()
    }

    // ---- Waiting ----

    fn wait(&mut self, events: &mut Events) -> io::Result<()> {
        self.monitor.iteration_took(|| self.clock.now().since(self.iteration_at));
        self.due = self.server.next_due();
        let timeout = self.timeout();
        self.wait_for(events, timeout)
    }

    fn wait_for(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        let polled = self.poll.poll(events, timeout);
        self.iteration_at = self.read_clock();
        match polled {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        }
        for event in events.iter() {
            match event.token() {
                SIGNALS => self.take_signals(),
                MONITOR => self.monitor.on_readable(),
                ALARM => self.alarm.on_readable(),
                MEMBERSHIP | DISK => {}
                token if self.acceptor.on_event(token) => {}
                Token(index) => self.server.note(ConnKey::from_index(index), readiness(event)),
            }
        }
        Ok(())
    }

    fn read_clock(&mut self) -> Nanos {
        self.now = self.clock.now();
        self.now
    }

    fn timeout(&mut self) -> Option<Duration> {
        if self.server.is_busy() {
            return Some(Duration::ZERO);
        }
        let mut next = self.due.min(self.acceptor.next_due()).min(self.monitor.next_due());
        // There is no event when etcd does not acknowledge changes for some time.
        if self.membership.is_some() && !self.server.is_acknowledged() {
            next = next.min(self.now + LOOK_INTERVAL);
        }
        if next == Nanos::NEVER {
            return None;
        }
        // The poll rounds up to milliseconds, so only a short wait needs the exact time.
        let now = if next.since(self.now) < SHORT_WAIT { self.read_clock() } else { self.now };
        let span = next.since(now);
        if span > LONG_WAIT && self.alarm.set(self.clock.to_monotonic(next)) {
            return None;
        }
        Some(Duration::from_nanos(span.as_nanos()))
    }

    fn take_signals(&mut self) {
        while let Some(signal) = self.signals.next() {
            match signal {
                Signal::Drain => {
                    info!("SIGUSR1: draining: puts are rejected from now on");
                    self.server.set_draining(true);
                }
                Signal::StopDraining => {
                    info!("SIGUSR2: not draining: puts are accepted from now on");
                    self.server.set_draining(false);
                }
                Signal::Reopen => info!("SIGHUP: ignored: there is no file to reopen"),
                Signal::Stop(stop) => self.stop = Some(stop),
            }
        }
    }

    // ---- Accepting ----

    fn accept(&mut self) {
        for _ in 0..self.server.limits().accepts_per_iteration {
            if !self.acceptor.is_due(self.now) {
                return;
            }
            if let Err(error) = self.accept_one() {
                self.acceptor.back_off(&error, self.server.connection_count(), self.now);
            }
        }
    }

    fn accept_one(&mut self) -> io::Result<()> {
        // A client that is not accepted waits in the kernel.
        if !self.server.has_room() || self.server.try_reserve_one().is_err() {
            return Err(ErrorKind::OutOfMemory.into());
        }
        match self.acceptor.accept(self.server.connection_count(), self.now)? {
            Some((socket, client)) => self.connect(socket, client.as_socket()),
            None => Ok(()),
        }
    }

    /// Adds a connection. That of a Unix socket has no address.
    fn connect(&mut self, socket: Socket, address: Option<SocketAddr>) -> io::Result<()> {
        let token = Token(self.server.vacant_key().index());
        let mut source = SourceFd(&socket.as_raw_fd());
        let interest = Interest::READABLE | Interest::WRITABLE | Interest::PRIORITY;
        self.poll.registry().register(&mut source, token, interest)?;
        let connected = self.server.connect(socket, address);
        connected.map(|_| ()).map_err(|_| ErrorKind::OutOfMemory.into())
    }
}

/// Returns what has changed on a socket.
fn readiness(event: &mio::event::Event) -> Readiness {
    let is_half_closed = event.is_read_closed();
    Readiness {
        is_readable: event.is_readable() || is_half_closed || event.is_error(),
        is_writable: event.is_writable() || event.is_write_closed() || event.is_error(),
        is_half_closed,
        is_hung_up: event.is_error() || (is_half_closed && event.is_write_closed()),
        reads_to_the_end: is_half_closed || event.is_priority(),
    }
}

/// Returns whether replies may be sent: no other server of the cluster leads.
fn may_send(membership: Option<&Membership>) -> impl Fn() -> bool {
    move || membership.is_none_or(|membership| membership.check().is_ok())
}

fn cannot_wait(error: io::Error) -> Failure {
    Failure::new(1, format!("cannot wait for events: {error}; the server exits"))
}

fn cannot_write(failure: IoFailed) -> Failure {
    let why = format!("{failure}; nothing more can be acknowledged, so the server exits");
    Failure::new(EXIT_DISK, why)
}
