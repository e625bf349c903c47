//! The event loop: waits for sockets, timers and signals, and drives the server.
//!
//! One iteration:
//!
//! ```text
//! monitor -> wait -> begin: what is due -> visit each ready connection once -> commit
//!   -> send: write, close connections that have ended -> accept
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
use super::failure::{EXIT_DISK, Failure, Result};
use super::membership::{EXIT_LOST, Membership};
use super::notify::Status;
use super::poller::{LISTENERS, Poller, cannot_wait};
use super::sys::clock;
use super::sys::signals::Stop;
use crate::engine::binlog::error::BinlogError;
use crate::engine::keys::ConnKey;
use crate::engine::monitor::http_conn::ServerState;
use crate::engine::monitor::measurements::Measurements;
use crate::engine::server::{Readiness, Server};
use crate::engine::time::{ClockOffset, Nanos};
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Interest, Token};
use socket2::Socket;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The loop with everything that it serves.
pub struct EventLoop {
    poller: Poller,
    server: Server<Socket>,
    acceptor: Acceptor,
    /// Empty without a metrics server, which is the only reader.
    measurements: Measurements,
    /// When this iteration began.
    iteration_at: Nanos,
    /// The membership in a cluster, if there is one. A reply is sent only while this server leads.
    membership: Option<Membership>,
}

/// The time after which changes that etcd has not acknowledged are checked again.
const LOOK_INTERVAL: Nanos = Nanos::from_millis(200);

/// A server that stops waits for acknowledgements at most this long. The end of its lease may take 1 s more, and
/// 10 s in all are promised.
const STOP_TIMEOUT: Nanos = Nanos::from_secs(9);
/// And at most this long for clients to take their last replies.
const LAST_REPLIES_TIMEOUT: Nanos = Nanos::from_millis(100);
/// A server that stops looks at least this often whether it is done.
const STOP_WAIT: Duration = Duration::from_millis(5);

impl EventLoop {
    /// Creates the loop.
    pub fn new(
        poller: Poller,
        server: Server<Socket>,
        listeners: Vec<Socket>,
        membership: Option<Membership>,
    ) -> io::Result<EventLoop> {
        let (registry, most) = (poller.registry(), server.store.process.max_connections);
        let most = most.unwrap_or(usize::MAX);
        let acceptor = Acceptor::new("connections", listeners, most, registry, LISTENERS)?;
        let (measurements, iteration_at) = (Measurements::default(), poller.now);
        Ok(EventLoop { poller, server, acceptor, measurements, iteration_at, membership })
    }

    /// Serves until a signal stops the server. Returns that signal.
    pub fn run(mut self) -> Result<Stop> {
        loop {
            self.monitor();
            let due = self.wait().map_err(cannot_wait)?;
            if let Some(stop) = self.poller.stop {
                self.poller.notifier.stopping();
                self.server.stop(self.poller.now).map_err(cannot_write)?;
                self.send_last_replies()?;
                return Ok(stop);
            }
            if self.server.store.queue.binlog.is_some() {
                let offset = ClockOffset::between(self.poller.now, clock::time_of_day());
                self.server.store.queue.clock_offset = offset;
            }
            let open = self.server.store.connections;
            self.server.begin(self.poller.now, due);
            // The first visit takes the time at which the wait has ended, unless more was done since.
            let mut waited_until = Some(self.poller.now).filter(|&now| now < due);
            let mut now = || waited_until.take().unwrap_or_else(|| self.poller.clock.now());
            while self.server.visit_next(&mut now).is_some() {}
            self.poller.now = self.server.store.queue.now;
            self.server.commit(self.poller.now).map_err(cannot_write)?;
            if self.server.store.queue.syncs_each_iteration() {
                // The TTR of a job begins with its reply, and the sync may have taken long.
                let now = self.poller.read_clock();
                self.server.store.advance(now);
            }
            self.send()?;
            if self.server.store.connections < open {
                self.acceptor.on_close();
            }
            self.accept();
        }
    }

    /// Waits until the cluster has acknowledged all changes, and sends the replies that have waited.
    /// No command runs any more.
    fn send_last_replies(&mut self) -> Result {
        if self.membership.is_none() {
            return Ok(());
        }
        let stopped_at = self.poller.now;
        while !self.server.is_acknowledged() {
            if self.poller.now.since(stopped_at) > STOP_TIMEOUT {
                let why = "etcd does not acknowledge the last changes; their replies are not sent";
                return Err(Failure::new(EXIT_LOST, why));
            }
            self.wait_for(Some(STOP_WAIT)).map_err(cannot_wait)?;
            self.server.sync_rest();
            self.send()?;
        }
        let acknowledged_at = self.poller.read_clock();
        self.send()?;
        while self.server.has_replies()
            && self.poller.now.since(acknowledged_at) < LAST_REPLIES_TIMEOUT
        {
            self.wait_for(Some(STOP_WAIT)).map_err(cannot_wait)?;
            self.send()?;
        }
        Ok(())
    }

    /// Sends replies while this server leads its cluster, if it has one.
    fn send(&mut self) -> Result {
        let EventLoop { server, membership, .. } = self;
        let check = || membership.as_ref().map_or(Ok(()), Membership::check);
        server.send(|| check().is_ok());
        check()
    }

    // ---- Monitoring and waiting ----

    /// Notifies the service manager if that is due, and makes at most one slice of the measurements and one
    /// slice of a page.
    fn monitor(&mut self) {
        let EventLoop { poller, server, measurements, .. } = self;
        poller.notifier.update(poller.now, || Status::Serving(server.summary()));
        let Some(metrics) = &mut poller.metrics else { return };
        if metrics.next_due() <= poller.now {
            measurements.update(server, poller.now);
            let next = measurements.next_due();
            metrics.turn(ServerState::Serving(server, measurements), poller.now, next);
        }
        measurements.iterations.count(poller.read_clock().since(self.iteration_at));
    }

    /// Waits for events, and until something is due. Returns when something is due for the server.
    fn wait(&mut self) -> io::Result<Nanos> {
        let due = self.server.next_due();
        let mut next = due.min(self.acceptor.next_due()).min(self.poller.next_due());
        // There is no event when etcd does not acknowledge changes for some time.
        if self.membership.is_some() && !self.server.is_acknowledged() {
            next = next.min(self.poller.now + LOOK_INTERVAL);
        }
        if self.server.is_busy() {
            next = Nanos::ZERO;
        }
        let timeout = self.poller.timeout(next);
        self.wait_for(timeout).map(|()| due)
    }

    fn wait_for(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let EventLoop { poller, server, acceptor, .. } = self;
        poller.wait(timeout, |event| match event.token() {
            LISTENERS => acceptor.on_event(),
            Token(index) => {
                server.note(ConnKey::from_index(index), |seen| note_event(seen, event));
            }
        })?;
        self.iteration_at = self.poller.now;
        self.server.store.is_draining = self.poller.is_draining;
        Ok(())
    }

    // ---- Accepting ----

    fn accept(&mut self) {
        for _ in 0..self.server.store.queue.limits.accepts_per_iteration {
            if self.acceptor.next_due() > self.poller.now {
                return;
            }
            let accepted = self.accept_one();
            self.server.store.is_accept_failing = accepted.is_err();
            if let Err(error) = accepted {
                self.acceptor.back_off(&error, self.server.store.connections, self.poller.now);
            }
        }
    }

    fn accept_one(&mut self) -> io::Result<()> {
        // A client that is not accepted waits in the kernel.
        if !self.server.has_room() || self.server.try_reserve_one().is_err() {
            return Err(ErrorKind::OutOfMemory.into());
        }
        let accepted = self.acceptor.accept(self.server.store.connections, self.poller.now)?;
        let Some((socket, client)) = accepted else { return Ok(()) };
        let token = Token(self.server.vacant_key().index());
        let mut source = SourceFd(&socket.as_raw_fd());
        let interest = Interest::READABLE | Interest::WRITABLE | Interest::PRIORITY;
        self.poller.registry().register(&mut source, token, interest)?;
        // The client of a Unix socket has no address.
        let connected = self.server.connect(socket, client.as_socket());
        connected.map(drop).map_err(|_| ErrorKind::OutOfMemory.into())
    }
}

/// Notes what has changed on a socket.
fn note_event(seen: &mut Readiness, event: &Event) {
    let is_half_closed = event.is_read_closed();
    seen.is_readable |= event.is_readable() || is_half_closed || event.is_error();
    seen.is_writable |= event.is_writable() || event.is_write_closed() || event.is_error();
    seen.is_half_closed |= is_half_closed;
    seen.is_hung_up |= event.is_error() || (is_half_closed && event.is_write_closed());
    seen.reads_to_the_end |= is_half_closed || event.is_priority();
}

/// Returns the failure of a disk to which nothing more can be written.
fn cannot_write(failure: BinlogError) -> Failure {
    let why = format!("{failure}; nothing more can be acknowledged, so the server exits");
    Failure::new(EXIT_DISK, why)
}
