//! Serves metrics and the status page over HTTP: accepts connections, reads requests, writes answers,
//! evicts slow connections.
//!
//! Requests are answered before clients are served too, while the binlog is read. An idle metrics server
//! costs an iteration one comparison. `engine/monitor/http_conn.rs` decides what is read and written; this
//! module has the bytes and the time.

use super::acceptor::Acceptor;
use super::poller::FIRST_OTHER;
use crate::engine::monitor::http::HEAD_MAX;
use crate::engine::monitor::http_conn::{HttpConn, ServerState};
use crate::engine::time::Nanos;
use log::trace;
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use slab::Slab;
use socket2::Socket;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// Listening sockets and HTTP connections.
#[derive(Debug)]
pub struct MetricsServer {
    registry: Registry,
    acceptor: Acceptor,
    /// Descriptors that are closed when a connection is accepted. So health checks are answered even
    /// if clients have all other descriptors.
    reserved_fds: Vec<OwnedFd>,
    /// The token of a connection is its key above [`FIRST_OTHER`].
    conns: Slab<HttpSocket>,
    /// How many connections have been accepted.
    accepted: u64,
    /// The key of the connection that comes first when the next slice of an answer is made.
    next_slice: usize,
    /// At most this many tubes have metrics of their own.
    tubes_max: usize,
    /// When [`MetricsServer::turn`] has something to do without an event.
    due: Nanos,
}

#[derive(Debug)]
struct HttpSocket {
    /// How many connections were accepted before.
    seq: u64,
    stream: Socket,
    conn: HttpConn,
    is_readable: bool,
    is_writable: bool,
}

/// Other connections wait in the kernel until one ends, times out or is evicted. A connection without
/// a complete request is evicted at once, so its request must arrive before this many others connect.
const MAX_CONNS: usize = 64;
/// At most this many connections are accepted in one iteration, so that a stream of them does not
/// delay clients.
const ACCEPTS_PER_ITERATION: usize = 32;
/// This many connections find a descriptor even if clients have all others.
const RESERVED_FDS: usize = 4;
/// The tokens of listeners count down from here.
const FIRST_LISTENER: usize = FIRST_OTHER + usize::MAX / 4;

impl MetricsServer {
    /// Serves these listeners. At most `tubes_max` tubes have metrics of their own.
    pub fn new(
        listeners: Vec<Socket>,
        tubes_max: usize,
        registry: &Registry,
    ) -> io::Result<MetricsServer> {
        let what = "metrics connections";
        let mut metrics_server = MetricsServer {
            registry: registry.try_clone()?,
            acceptor: Acceptor::new(what, listeners, usize::MAX, registry, FIRST_LISTENER)?,
            reserved_fds: Vec::new(),
            conns: Slab::with_capacity(MAX_CONNS),
            accepted: 0,
            next_slice: 0,
            tubes_max,
            due: Nanos::ZERO,
        };
        metrics_server.reserve_fds();
        Ok(metrics_server)
    }

    /// Notes an event. Returns `false` if it is not one of these sockets.
    pub fn on_event(&mut self, event: &Event) -> bool {
        let key = event.token().0.checked_sub(FIRST_OTHER);
        if let Some(socket) = key.and_then(|key| self.conns.get_mut(key)) {
            socket.is_readable |= event.is_readable() || event.is_read_closed() || event.is_error();
            socket.is_writable |= event.is_writable() || event.is_write_closed();
        } else if !self.acceptor.on_event(event.token()) {
            return false;
        }
        self.due = Nanos::ZERO;
        true
    }

    /// Serves each connection without waiting, and makes at most one slice of an answer.
    pub fn turn(&mut self, state: ServerState<'_>, now: Nanos) {
        self.accept(state, now);
        for key in 0..MAX_CONNS {
            let Some(socket) = self.conns.get_mut(key) else { continue };
            if let Err(why) = socket.serve(state, now) {
                self.close(key, &why);
            }
        }
        self.make_slice(state, now);
        self.reserve_fds();
        self.due = self.due_after_turn();
    }

    /// Returns when [`MetricsServer::turn`] has something to do.
    pub fn next_due(&self) -> Nanos {
        self.due
    }

    /// Makes a turn due at this moment at the latest.
    pub fn turn_by(&mut self, due: Nanos) {
        self.due = self.due.min(due);
    }

    fn due_after_turn(&self) -> Nanos {
        let mut sockets = self.conns.iter().map(|(_, socket)| socket);
        if sockets.any(|socket| socket.conn.wants_slice() || socket.can_go_on()) {
            return Nanos::ZERO;
        }
        let deadlines = self.conns.iter().map(|(_, socket)| socket.conn.deadline());
        let accept = self.acceptor.next_due().max(self.has_room_at());
        deadlines.fold(accept, Nanos::min)
    }

    /// Takes descriptors until there are [`RESERVED_FDS`], counting those of connections.
    fn reserve_fds(&mut self) {
        while self.reserved_fds.len() + self.conns.len() < RESERVED_FDS {
            match io::stderr().as_fd().try_clone_to_owned() {
                Ok(descriptor) => self.reserved_fds.push(descriptor),
                Err(_) => return,
            }
        }
    }

    // ---- Accepting ----

    /// Returns from when on one more connection can be accepted: at once, or when one may be evicted.
    fn has_room_at(&self) -> Nanos {
        let oldest = self.oldest().filter(|_| self.conns.len() == MAX_CONNS);
        oldest.map_or(Nanos::ZERO, |(evictable_at, ..)| evictable_at)
    }

    /// Returns from when on the next connection may be evicted, its place in the order, and its key. The
    /// oldest one without a complete request comes first.
    fn oldest(&self) -> Option<(Nanos, u64, usize)> {
        let place = |(key, socket): (_, &HttpSocket)| (socket.conn.evictable_at(), socket.seq, key);
        self.conns.iter().map(place).min()
    }

    /// Closes the oldest connection if it may be evicted by now. Without eviction a few silent or slow
    /// connections could keep all others out.
    fn evict(&mut self, now: Nanos) -> bool {
        let oldest = self.oldest().filter(|&(evictable_at, ..)| evictable_at <= now);
        if let Some((.., key)) = oldest {
            self.close(key, &io::Error::other("evicted for a new one"));
        }
        oldest.is_some()
    }

    fn accept(&mut self, state: ServerState<'_>, now: Nanos) {
        for _ in 0..ACCEPTS_PER_ITERATION {
            if !self.acceptor.is_due(now) || now < self.has_room_at() {
                return;
            }
            self.reserved_fds.pop();
            match self.acceptor.accept(self.conns.len(), now) {
                Ok(Some((stream, _))) => self.connect(stream, state, now),
                Ok(None) => {}
                // The connection that is evicted has a descriptor too.
                Err(_) if self.evict(now) => {}
                Err(error) => self.acceptor.back_off(&error, self.conns.len(), now),
            }
        }
    }

    /// Adds a connection. Its request is read at once, so that a connection without a request cannot
    /// evict it.
    fn connect(&mut self, stream: Socket, state: ServerState<'_>, now: Nanos) {
        if self.conns.len() == MAX_CONNS && !self.evict(now) {
            return;
        }
        let entry = self.conns.vacant_entry();
        let interest = Interest::READABLE | Interest::WRITABLE;
        let mut source = SourceFd(&stream.as_raw_fd());
        let token = Token(FIRST_OTHER + entry.key());
        if let Err(error) = self.registry.register(&mut source, token, interest) {
            return trace!("metrics connection closed: {error}");
        }
        self.accepted += 1;
        let (seq, conn) = (self.accepted, HttpConn::new(self.tubes_max, now));
        let mut socket = HttpSocket { seq, stream, conn, is_readable: true, is_writable: true };
        match socket.serve(state, now) {
            Ok(()) => {
                entry.insert(socket);
            }
            Err(why) => trace!("metrics connection closed: {why}"),
        }
    }

    fn close(&mut self, key: usize, why: &io::Error) {
        trace!("metrics connection closed: {why}");
        self.conns.remove(key);
        self.acceptor.on_close();
    }

    // ---- Answering ----

    /// Makes a slice of the answer of one connection; the next call begins with the next connection.
    fn make_slice(&mut self, state: ServerState<'_>, now: Nanos) {
        let mut keys = (self.next_slice..MAX_CONNS).chain(0..self.next_slice);
        let wants_slice =
            |key: usize| self.conns.get(key).is_some_and(|socket| socket.conn.wants_slice());
        let Some(key) = keys.find(|&key| wants_slice(key)) else { return };
        self.next_slice = key + 1;
        let socket = &mut self.conns[key];
        let made = socket.conn.write_slice(state, now);
        if let Err(error) = made.and_then(|()| socket.send(now)) {
            self.close(key, &error);
        }
    }
}

impl HttpSocket {
    /// Returns whether there is something to read or to write.
    fn can_go_on(&self) -> bool {
        self.is_readable || (self.is_writable && !self.conn.to_send().is_empty())
    }

    /// Reads and writes what it can without waiting.
    ///
    /// # Errors
    /// The reason to close the connection, also if that is the end of the answer.
    fn serve(&mut self, state: ServerState<'_>, now: Nanos) -> io::Result<()> {
        if self.is_readable {
            let mut buffer = [0; HEAD_MAX];
            match self.stream.read(&mut buffer) {
                Ok(0) if self.conn.end_input() => {
                    return Err(io::Error::other("the client closed it"));
                }
                Ok(count) => {
                    self.is_readable = count > 0;
                    self.conn.receive(&buffer[..count], state, now);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.send(now)?;
        if self.conn.deadline() <= now { Err(ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    /// Writes what the kernel takes without waiting.
    fn send(&mut self, now: Nanos) -> io::Result<()> {
        while self.is_writable && !self.conn.to_send().is_empty() {
            match self.stream.write(self.conn.to_send()) {
                Ok(count) => {
                    self.conn.sent(count, now);
                    if self.conn.is_lingering() {
                        self.stream.shutdown(Shutdown::Write)?;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_writable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
