//! The sockets where the server tells of itself over HTTP: who comes, who is slow, who goes.
//!
//! They have a poll of their own, of which the event loop sees one descriptor, so that visitors cost
//! nothing while there are none, and can be answered before the loop begins. What they ask and are
//! told is in `engine/visit.rs`; here are only bytes and time.

use super::acceptor::Acceptor;
use super::listen::Listener;
use super::stream::Stream;
use crate::engine::monitor::http_conn::{HttpConn, ServerState};
use crate::engine::time::Nanos;
use log::trace;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Listening sockets and visitors.
#[derive(Debug)]
pub struct MetricsServer {
    poll: Poll,
    events: Events,
    acceptor: Acceptor,
    /// Descriptors that are given up for visitors, so that a server whose clients have all others can
    /// still say that it lives.
    spare: Vec<OwnedFd>,
    conns: Vec<Option<HttpSocket>>,
    /// How many connections have been accepted.
    accepted: u64,
    /// Who comes first when the next slice of an answer is made.
    next_turn: usize,
    /// As many tubes are told of one by one.
    tubes_max: usize,
}

#[derive(Debug)]
struct HttpSocket {
    /// How many connections were accepted before.
    seq: u64,
    stream: Stream,
    visit: HttpConn,
    is_readable: bool,
    is_writable: bool,
}

/// Other connections wait in the kernel until one ends, times out or is replaced. A connection
/// without a complete request is replaced at once, so its request must arrive before this many
/// others connect.
const VISITORS_MAX: usize = 64;
/// At most this many connections are accepted in one iteration, so that a stream
/// of them does not delay clients.
const ACCEPTS_PER_ITERATION: usize = 32;
/// So many of them find a descriptor whatever clients have taken.
const SPARE: usize = 4;
const FIRST_LISTENER: usize = usize::MAX - 1;
/// What is read at once.
const READ_LEN: usize = 1024;
/// Of somebody who sends and sends, so much is read in one turn.
const READS_PER_TURN: usize = 8;

impl MetricsServer {
    /// Serves these sockets, and tells of `tubes_max` tubes one by one.
    ///
    /// # Errors
    /// The system has no means for it.
    pub fn new(listeners: Vec<Listener>, tubes_max: usize) -> io::Result<MetricsServer> {
        let poll = Poll::new()?;
        let events = Events::with_capacity(VISITORS_MAX + listeners.len());
        let (what, registry) = ("metrics connections", poll.registry());
        let acceptor = Acceptor::new(what, listeners, usize::MAX, registry, FIRST_LISTENER)?;
        let mut metrics_server = MetricsServer {
            poll,
            events,
            acceptor,
            spare: Vec::new(),
            conns: (0..VISITORS_MAX).map(|_| None).collect(),
            accepted: 0,
            next_turn: 0,
            tubes_max,
        };
        metrics_server.keep_spare();
        Ok(metrics_server)
    }

    /// Does what can be done at once, and makes one slice of an answer at most.
    ///
    /// # Errors
    /// The system does not let it look for events any more.
    pub fn turn(&mut self, subject: ServerState<'_>, now: Nanos) -> io::Result<()> {
        self.look()?;
        self.accept(subject, now);
        for index in 0..self.conns.len() {
            let Some(visitor) = &mut self.conns[index] else { continue };
            if let Err(why) = visitor.go_on(subject, now) {
                trace!("a visitor is gone: {why}");
                self.conns[index] = None;
                self.acceptor.on_close();
            }
        }
        self.make_slice(subject, now);
        self.keep_spare();
        Ok(())
    }

    /// As many as can be, and as many visitors are inside, are no fewer than [`SPARE`].
    fn keep_spare(&mut self) {
        let conns = self.conns.iter().flatten().count();
        while self.spare.len() + conns < SPARE {
            match self.acceptor.try_clone_descriptor() {
                Ok(descriptor) => self.spare.push(descriptor),
                Err(_) => return,
            }
        }
    }

    /// When there is something to do though nothing happens.
    pub fn next_due(&self) -> Option<Nanos> {
        let metrics_server = || self.conns.iter().flatten();
        if metrics_server().any(|visitor| visitor.visit.wants_slice() || visitor.can_go_on()) {
            return Some(Nanos::ZERO);
        }
        let accept = self.acceptor.next_due().map(|due| due.max(self.next_room_at()));
        metrics_server().map(|visitor| visitor.visit.deadline()).chain(accept).min()
    }

    /// Finds out what has happened.
    fn look(&mut self) -> io::Result<()> {
        match self.poll.poll(&mut self.events, Some(Duration::ZERO)) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error),
            Ok(()) | Err(_) => {}
        }
        for event in &self.events {
            if self.acceptor.on_event(event.token()) {
                continue;
            }
            let Token(index) = event.token();
            let Some(visitor) = &mut self.conns[index] else { continue };
            visitor.is_readable |=
                event.is_readable() || event.is_read_closed() || event.is_error();
            visitor.is_writable |= event.is_writable() || event.is_write_closed();
        }
        Ok(())
    }

    /// When there is a place for one more: at once, or when the first one has to make room.
    fn next_room_at(&self) -> Nanos {
        match MetricsServer::oldest(&self.conns) {
            Some((room_at, _)) if self.conns.iter().all(Option::is_some) => room_at,
            _ => Nanos::ZERO,
        }
    }

    /// Returns the place of the connection to be replaced first, and from when on. The oldest one
    /// without a complete request comes first.
    fn oldest(conns: &[Option<HttpSocket>]) -> Option<(Nanos, usize)> {
        let conns = conns.iter().enumerate();
        let room = conns.filter_map(|(place, visitor)| {
            let visitor = visitor.as_ref()?;
            Some((visitor.visit.evictable_at(), visitor.seq, place))
        });
        room.min().map(|(room_at, _, place)| (room_at, place))
    }

    /// Returns a free place, or the place of the first connection that may be replaced by now. Without
    /// replacement a few silent or slow connections could take all places.
    fn place(metrics_server: &[Option<HttpSocket>], now: Nanos) -> Option<usize> {
        if let Some(free) = metrics_server.iter().position(Option::is_none) {
            return Some(free);
        }
        let first = MetricsServer::oldest(metrics_server).filter(|&(room_at, _)| room_at <= now);
        first.map(|(_, place)| place)
    }

    fn accept(&mut self, subject: ServerState<'_>, now: Nanos) {
        for _ in 0..ACCEPTS_PER_ITERATION {
            let place = MetricsServer::place(&self.conns, now);
            let Some(place) = place.filter(|_| self.acceptor.is_due(now)) else { return };
            self.spare.pop();
            let open = self.conns.iter().flatten().count();
            match self.acceptor.accept(open, now) {
                Ok(Some(stream)) => self.let_in(stream, place, subject, now),
                Ok(None) => {}
                Err(error) => {
                    // A connection that may be replaced has a descriptor too.
                    match MetricsServer::oldest(&self.conns) {
                        Some((room_at, place)) if room_at <= now => self.conns[place] = None,
                        _ => self.acceptor.back_off(&error, open, now),
                    }
                }
            }
        }
    }

    /// Gives a new connection a place. What it has sent is read at once, so that a connection without
    /// a request cannot replace it.
    fn let_in(&mut self, stream: Stream, place: usize, subject: ServerState<'_>, now: Nanos) {
        let interest = Interest::READABLE | Interest::WRITABLE;
        let mut source = SourceFd(&stream.as_raw_fd());
        if let Err(error) = self.poll.registry().register(&mut source, Token(place), interest) {
            return trace!("a visitor cannot be let in: {error}");
        }
        self.accepted += 1;
        let mut visitor = HttpSocket::new(stream, self.accepted, self.tubes_max, now);
        let went_on = visitor.go_on(subject, now);
        if self.conns[place].take().is_some() {
            trace!("a visitor has made room for another");
        }
        match went_on {
            Ok(()) => self.conns[place] = Some(visitor),
            Err(why) => trace!("a visitor is gone: {why}"),
        }
    }

    /// Makes a slice of the answer of one visitor, and of another the next time.
    fn make_slice(&mut self, subject: ServerState<'_>, now: Nanos) {
        let count = self.conns.len();
        let mut places = (0..count).map(|step| (self.next_turn + step) % count);
        let wants_slice = |place: &usize| {
            self.conns[*place].as_ref().is_some_and(|visitor| visitor.visit.wants_slice())
        };
        let Some(place) = places.find(wants_slice) else { return };
        self.next_turn = place + 1;
        let Some(visitor) = &mut self.conns[place] else { return };
        let told =
            visitor.visit.write_slice(subject, now).map_err(|_| ErrorKind::OutOfMemory.into());
        if let Err(error) = told.and_then(|()| visitor.send(now)) {
            trace!("a visitor is gone: {error}");
            self.conns[place] = None;
            self.acceptor.on_close();
        }
    }
}

impl HttpSocket {
    fn new(stream: Stream, seq: u64, tubes_max: usize, now: Nanos) -> HttpSocket {
        let visit = HttpConn::new(tubes_max, now);
        HttpSocket { seq, stream, visit, is_readable: true, is_writable: true }
    }

    /// Whether the next turn brings it further.
    fn can_go_on(&self) -> bool {
        self.is_readable || (self.is_writable && !self.visit.to_send().is_empty())
    }

    /// Reads and sends what can be.
    ///
    /// # Errors
    /// The visit is over, and why.
    fn go_on(&mut self, subject: ServerState<'_>, now: Nanos) -> io::Result<()> {
        let mut buffer = [0; READ_LEN];
        for _ in 0..READS_PER_TURN {
            if !self.is_readable {
                break;
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    self.is_readable = false;
                    self.visit.end_input();
                }
                Ok(count) => {
                    let received = self.visit.receive(&buffer[..count], subject, now);
                    received.map_err(|_| io::Error::from(ErrorKind::OutOfMemory))?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.send(now)?;
        if self.visit.is_done() {
            return Err(io::Error::other("it was told everything"));
        }
        if self.visit.is_expired(now) {
            return Err(ErrorKind::TimedOut.into());
        }
        Ok(())
    }

    /// Sends what the system takes at once.
    fn send(&mut self, now: Nanos) -> io::Result<()> {
        while self.is_writable && !self.visit.to_send().is_empty() {
            match self.stream.write(&[IoSlice::new(self.visit.to_send())]) {
                Ok(count) => {
                    self.visit.sent(count, now);
                    if self.visit.is_lingering() {
                        self.stream.end_output()?;
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

/// The descriptor that becomes readable when something has happened.
impl AsRawFd for MetricsServer {
    fn as_raw_fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }
}
