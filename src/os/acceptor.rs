//! Accepts connections from listening sockets, for clients and for metrics.
//!
//! Listeners are registered edge-triggered: after an event connections are accepted until the kernel returns
//! `WouldBlock` for each listener. Connections that are not accepted wait in the kernel.
//!
//! Two things hold accepting up:
//!
//! - A call fails because descriptors or memory are short. The next attempt is made when a
//!   connection closes, or after [`RETRY_AFTER`].
//! - The connection limit is reached. Accepting continues when a connection closes.
//!
//! Each is logged as a warning, at most once in [`WARN_EVERY`].

use super::listen;
use super::sys::sockets;
use crate::engine::time::Nanos;
use log::{debug, warn};
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use socket2::{SockAddr, Socket};
use std::fmt;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;

/// Listening sockets, and the state of accepting from them.
pub struct Acceptor {
    /// The name of the connections in the log.
    what: &'static str,
    listeners: Vec<Socket>,
    max_connections: usize,
    /// The index of the listener of the last attempt.
    last_listener: usize,
    /// Calls in a row that failed because of one client.
    failures: u32,
    /// The next attempt; [`Nanos::NEVER`] before an event, or at the connection limit.
    due: Nanos,
    /// Something holds accepting up, so there may be no event for the next connection.
    is_held_up: bool,
    /// No further warning is logged before this moment.
    warns_at: Nanos,
}

const RETRY_AFTER: Nanos = Nanos::from_secs(1);
const WARN_EVERY: Nanos = Nanos::from_secs(60);
/// If this many calls in a row fail because of one client, clients are not the cause.
const MAX_FAILURES: u32 = 256;

impl Acceptor {
    /// Registers the listeners, all with this token. At most `max_connections` are accepted at once. `what` is the
    /// name of the connections in the log.
    pub fn new(
        what: &'static str,
        listeners: Vec<Socket>,
        max_connections: usize,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Acceptor> {
        for listener in &listeners {
            let mut source = SourceFd(&listener.as_raw_fd());
            registry.register(&mut source, token, Interest::READABLE)?;
        }
        Ok(Acceptor {
            what,
            listeners,
            max_connections,
            last_listener: 0,
            failures: 0,
            due: Nanos::NEVER,
            is_held_up: false,
            warns_at: Nanos::ZERO,
        })
    }

    /// Connections may wait: the token of the listeners has an event.
    pub fn on_event(&mut self) {
        if self.due == Nanos::NEVER {
            self.due = Nanos::ZERO;
        }
    }

    /// A connection was closed: its descriptor and its memory are free.
    pub fn on_close(&mut self) {
        if self.is_held_up {
            self.due = Nanos::ZERO;
        }
    }

    /// Returns when to call [`Acceptor::accept`]; a moment in the past means now.
    pub fn next_due(&self) -> Nanos {
        self.due
    }

    /// Accepts a connection while `open` are open, and returns it with the address of the client. Returns `None` if
    /// none waits, the next one has failed, or the connection limit is reached.
    ///
    /// # Errors
    /// The system is short of descriptors or memory. The caller frees some, or backs off.
    pub fn accept(&mut self, open: usize, now: Nanos) -> io::Result<Option<(Socket, SockAddr)>> {
        if open >= self.max_connections {
            self.at_limit(open, now);
            return Ok(None);
        }
        for _ in 0..self.listeners.len() {
            // One from each listener in turn, so that a busy listener does not starve the others.
            self.last_listener = (self.last_listener + 1) % self.listeners.len();
            match listen::accept(&self.listeners[self.last_listener]) {
                Ok(accepted) => {
                    self.failures = 0;
                    return Ok(Some(accepted));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if !is_shortage(&error) && self.failures < MAX_FAILURES => {
                    debug!("cannot accept one of the {}: {error}; accepting the next", self.what);
                    self.failures += 1;
                    return Ok(None);
                }
                Err(error) => return Err(error),
            }
        }
        self.wait_for_event(false);
        Ok(None)
    }

    /// Makes no attempt before an event or, if accepting is held up, until a connection is closed.
    fn wait_for_event(&mut self, is_held_up: bool) {
        (self.due, self.is_held_up) = (Nanos::NEVER, is_held_up);
    }

    /// Makes no attempt for [`RETRY_AFTER`], or until a connection is closed. The edge of the event is gone.
    pub fn back_off(&mut self, error: &io::Error, open: usize, now: Nanos) {
        self.failures = 0;
        (self.due, self.is_held_up) = (now + RETRY_AFTER, true);
        self.warn(format_args!("{error}; {open} are open; retrying in 1 s"), now);
    }

    /// Makes no attempt before an event, or until a connection is closed.
    fn at_limit(&mut self, open: usize, now: Nanos) {
        self.wait_for_event(true);
        if self.listeners.iter().any(sockets::is_readable) {
            let why = "as many as --max-connections or the limit of open files allows; others wait";
            self.warn(format_args!("{open} are open, {why}"), now);
        }
    }

    fn warn(&mut self, why: fmt::Arguments<'_>, now: Nanos) {
        if self.warns_at <= now {
            self.warns_at = now + WARN_EVERY;
            warn!("cannot accept {}: {why}", self.what);
        }
    }
}

/// Returns whether accepting failed for want of descriptors or memory. Linux reports errors of a new connection in the
/// same way, as accept(2) lists: then others can be accepted.
fn is_shortage(error: &io::Error) -> bool {
    let number = error.raw_os_error();
    matches!(number, Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_comes_while_all_are_in_use_is_looked_at() {
        let poll = mio::Poll::new().expect("there are descriptors");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        let listeners = vec![listener.into()];
        let mut acceptor = Acceptor::new("connections", listeners, 1, poll.registry(), Token(7))
            .expect("there are descriptors");
        acceptor.on_event();
        assert!(acceptor.accept(1, Nanos::ZERO).is_ok_and(|accepted| accepted.is_none()));
        assert_eq!(acceptor.next_due(), Nanos::NEVER);
        acceptor.on_event();
        assert_eq!(acceptor.next_due(), Nanos::ZERO);
    }
}
