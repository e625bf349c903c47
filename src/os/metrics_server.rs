//! Serves metrics and the status page over HTTP: accepts connections, reads requests, writes answers,
//! evicts slow connections.
//!
//! Requests are answered before clients are served too, while the binlog is read. An idle metrics server
//! costs an iteration one comparison. `engine/monitor/http_conn.rs` decides what is read and written; this
//! module has the bytes and the time.

use super::acceptor::Acceptor;
use super::poller::METRICS;
use crate::engine::monitor::http_conn::{HttpConn, ServerState, Stream};
use crate::engine::time::Nanos;
use log::trace;
use mio::unix::SourceFd;
use mio::{Interest, Registry};
use socket2::Socket;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;

/// Listening sockets and HTTP connections.
pub struct MetricsServer {
    registry: Registry,
    acceptor: Acceptor,
    /// The oldest first.
    conns: Vec<HttpConn<Socket>>,
    /// At most this many. Others wait in the kernel until one ends, times out or is evicted. A connection without a
    /// complete request is evicted at once, so its request must arrive before this many others connect.
    max_conns: usize,
    /// When [`MetricsServer::turn`] has something to do without an event.
    due: Nanos,
}

/// At most this many connections are accepted in one iteration, so that a stream of them does not
/// delay clients.
const ACCEPTS_PER_ITERATION: usize = 32;

impl MetricsServer {
    /// Serves these listeners. All sockets have the token [`METRICS`].
    pub fn new(
        listeners: Vec<Socket>,
        max_conns: usize,
        registry: &Registry,
    ) -> io::Result<MetricsServer> {
        let what = "metrics connections";
        Ok(MetricsServer {
            registry: registry.try_clone()?,
            acceptor: Acceptor::new(what, listeners, usize::MAX, registry, METRICS)?,
            conns: Vec::new(),
            max_conns,
            due: Nanos::ZERO,
        })
    }

    /// Notes an event of one of the sockets: there are few, so each of them is tried.
    pub fn on_event(&mut self) {
        self.acceptor.on_event();
        self.due = Nanos::ZERO;
    }

    /// Serves each connection without waiting, and makes at most one slice of an answer. The next turn is due at
    /// `next` at the latest.
    pub fn turn(&mut self, state: ServerState<'_>, now: Nanos, next: Nanos) {
        self.accept(state, now);
        self.serve(|conn| conn.serve(state, now));
        // Of the answer of the oldest connection that has sent what was made before.
        let mut is_made = false;
        self.serve(|conn| match conn.wants_slice() && !std::mem::replace(&mut is_made, true) {
            true => conn.write_slice(state, now),
            false => Ok(()),
        });
        let accept = self.acceptor.next_due().max(self.has_room_at());
        self.due = match self.conns.iter().any(|conn| conn.wants_slice() || conn.can_go_on()) {
            true => Nanos::ZERO,
            false => self.conns.iter().map(HttpConn::deadline).fold(accept.min(next), Nanos::min),
        };
    }

    /// Returns when [`MetricsServer::turn`] has something to do.
    pub fn next_due(&self) -> Nanos {
        self.due
    }

    /// Serves each connection, and closes those that have failed or ended.
    fn serve(&mut self, mut serve: impl FnMut(&mut HttpConn<Socket>) -> io::Result<()>) {
        let count = self.conns.len();
        self.conns.retain_mut(|conn| {
            let served = serve(conn);
            served.inspect_err(|why| trace!("metrics connection closed: {why}")).is_ok()
        });
        if self.conns.len() < count {
            self.acceptor.on_close();
        }
    }

    // ---- Accepting ----

    /// Returns from when on one more connection can be accepted: at once, or when one may be evicted.
    fn has_room_at(&self) -> Nanos {
        let oldest = self.oldest().filter(|_| self.conns.len() == self.max_conns);
        oldest.map_or(Nanos::ZERO, |(_, evictable_at)| evictable_at)
    }

    /// Returns the index of the connection that is evicted next, and from when on. The oldest one without a
    /// complete request comes first.
    fn oldest(&self) -> Option<(usize, Nanos)> {
        let conns = self.conns.iter().map(HttpConn::evictable_at).enumerate();
        conns.min_by_key(|&(_, evictable_at)| evictable_at)
    }

    /// Closes the oldest connection if it may be evicted by now. Without eviction a few silent or slow
    /// connections could keep all others out.
    fn evict(&mut self, now: Nanos) -> bool {
        let oldest = self.oldest().filter(|&(_, evictable_at)| evictable_at <= now);
        let Some((index, _)) = oldest else { return false };
        trace!("metrics connection closed: evicted for a new one");
        self.conns.remove(index);
        self.acceptor.on_close();
        true
    }

    fn accept(&mut self, state: ServerState<'_>, now: Nanos) {
        for _ in 0..ACCEPTS_PER_ITERATION {
            if self.acceptor.next_due().max(self.has_room_at()) > now {
                return;
            }
            match self.acceptor.accept(self.conns.len(), now) {
                Ok(Some((stream, _))) => self.connect(stream, state, now),
                Ok(None) => {}
                Err(error) => self.acceptor.back_off(&error, self.conns.len(), now),
            }
        }
    }

    /// Adds a connection. Its request is read at once, so that a connection without a request cannot
    /// evict it.
    fn connect(&mut self, stream: Socket, state: ServerState<'_>, now: Nanos) {
        if self.conns.len() == self.max_conns && !self.evict(now) {
            return;
        }
        let mut source = SourceFd(&stream.as_raw_fd());
        let interest = Interest::READABLE | Interest::WRITABLE;
        let registered = self.registry.register(&mut source, METRICS, interest);
        let mut conn = HttpConn::new(stream, now);
        match registered.and_then(|()| conn.serve(state, now)) {
            Ok(()) => self.conns.push(conn),
            Err(why) => trace!("metrics connection closed: {why}"),
        }
    }
}

impl Stream for Socket {
    fn end_output(&mut self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}
