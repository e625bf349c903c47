//! One HTTP connection over a stream of bytes: a socket, and in tests a pair of buffers.
//!
//! A connection has one request. Timeouts are 5 s for the request, 10 s for each write of the
//! response, and 30 s for the whole connection. At the connection limit, a connection without a
//! complete request is evicted at once, and a connection with a response after 2 s.

use super::html;
use super::http::{self, HEAD_MAX, MediaType, OK, Request, Response, TEXT_TYPE, UNAVAILABLE};
use super::measurements::{Measurements, Rates};
use super::metrics::{MetricsPage, standby_metrics};
use super::status_page::StatusPage;
use super::table::{Out, Rate, Value};
use super::tube_page::TubePage;
use crate::engine::headroom::Headroom;
use crate::engine::queue::Queue;
use crate::engine::server::Observed;
use crate::engine::store::Store;
use crate::engine::text::JsonText;
use crate::engine::time::Nanos;
use percent_encoding::percent_decode_str;
use std::io::{self, ErrorKind, Read, Write};

/// A stream that does not block, and whose output can be ended.
pub trait Stream: Read + Write {
    /// Ends the output: nothing more is written.
    fn end_output(&mut self) -> io::Result<()>;
}

/// One HTTP connection.
pub struct HttpConn<S> {
    /// The bytes from and to the client.
    pub stream: S,
    /// The last read has returned bytes, so there may be more.
    can_go_on: bool,
    phase: Phase,
    /// The bytes of the current part of the response that are not sent yet.
    response: Vec<u8>,
    /// When the current phase times out.
    deadline: Nanos,
    opened_at: Nanos,
}

enum Phase {
    /// The request head is incomplete. This part of it was received.
    ReadingRequest { head: Vec<u8> },
    /// A page is made and sent slice by slice.
    Streaming { page: Box<dyn Page>, format: MediaType, in_chunks: bool },
    /// The last bytes of the response are sent.
    Sending,
    /// Received bytes are dropped until the client closes. Closing with unread bytes resets the
    /// connection, and the client could lose the response.
    Lingering,
}

/// A page that is made in slices, at most one in each iteration of the loop: its work and its length are
/// not bounded.
pub trait Page {
    /// Does the work of the next slice, and writes its text, if any, to `out`, which is empty. Returns whether
    /// the page is complete. A slice allocates a few 100 KiB at most, which need not succeed in small steps: it is made
    /// only while most of the headroom is left.
    fn write_slice(&mut self, view: &View<'_>, out: &mut Out<'_>) -> bool;
}

/// What the pages show.
pub struct View<'a> {
    pub server: &'a Store,
    pub queue: &'a Queue,
    pub conns: &'a dyn Observed,
    pub measurements: &'a Measurements,
    pub now: Nanos,
}

impl<'a> View<'a> {
    fn of(conns: &'a dyn Observed, measurements: &'a Measurements, now: Nanos) -> View<'a> {
        let store = conns.store();
        View { server: store, queue: &store.queue, conns, measurements, now }
    }

    /// Returns one of the rates of the server in the last interval, if two samples were taken.
    pub fn rate(&self, of: fn(Rates) -> Rate) -> Value {
        Value::Rate(self.measurements.points(self.now).last().map(|point| of(point.rates)))
    }
}

/// The state that responses describe.
#[derive(Clone, Copy)]
pub enum ServerState<'a> {
    /// The server reads its binlog and accepts no clients yet.
    Starting,
    /// This server accepts no clients: another one leads its cluster, whose name is known, or no one yet.
    StandingBy(Option<&'a str>),
    /// The server serves clients.
    Serving(&'a dyn Observed, &'a Measurements),
}

/// For the complete request head.
const REQUEST_TIMEOUT: Nanos = Nanos::from_secs(5);
/// For the next write of the response.
const WRITE_TIMEOUT: Nanos = Nanos::from_secs(10);
/// For the client to close after the response.
const LINGER_TIMEOUT: Nanos = Nanos::from_secs(2);
/// For the whole connection, even if it makes progress.
const TOTAL_TIMEOUT: Nanos = Nanos::from_secs(30);
/// The age at which a connection with a response can be evicted.
const EVICTION_AGE: Nanos = Nanos::from_secs(2);

/// The media type of the Prometheus text format.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

const NOT_FOUND: &str = "404 Not Found";
const UNKNOWN_PATH: Response =
    (NOT_FOUND, "The paths are /, /tube/NAME, /metrics, /healthz and /readyz.\n");

impl<S: Stream> HttpConn<S> {
    /// Returns a connection that was accepted at `now`.
    pub fn new(stream: S, now: Nanos) -> HttpConn<S> {
        HttpConn {
            stream,
            can_go_on: true,
            phase: Phase::ReadingRequest { head: Vec::new() },
            response: Vec::new(),
            deadline: now + REQUEST_TIMEOUT,
            opened_at: now,
        }
    }

    /// Reads and writes what it can without waiting, with or without an event of the stream.
    ///
    /// # Errors
    /// The reason to close the connection, also if that is the end of the answer.
    pub fn serve(&mut self, state: ServerState<'_>, now: Nanos) -> io::Result<()> {
        let mut buffer = [0; HEAD_MAX];
        match self.stream.read(&mut buffer) {
            Ok(0) if matches!(self.phase, Phase::ReadingRequest { .. } | Phase::Lingering) => {
                return Err(io::Error::other("the client closed it"));
            }
            Ok(count) => {
                self.can_go_on = count > 0;
                self.receive(&buffer[..count], state, now);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.can_go_on = false,
            Err(error) => return Err(error),
        }
        self.send(now)?;
        if self.deadline() <= now { Err(ErrorKind::TimedOut.into()) } else { Ok(()) }
    }

    /// Returns whether [`HttpConn::serve`] may have something to read without an event.
    pub fn can_go_on(&self) -> bool {
        self.can_go_on
    }

    /// Returns whether a part of the response was not sent yet.
    pub fn has_output(&self) -> bool {
        !self.response.is_empty()
    }

    /// Returns whether [`HttpConn::write_slice`] is to be called: all earlier bytes were sent.
    pub fn wants_slice(&self) -> bool {
        matches!(self.phase, Phase::Streaming { .. }) && !self.has_output()
    }

    /// Returns when the current phase or the whole connection times out.
    pub fn deadline(&self) -> Nanos {
        self.deadline.min(self.opened_at + TOTAL_TIMEOUT)
    }

    /// Returns the time from which the connection can be evicted at the connection limit.
    /// Incomplete requests are evicted first, then connections whose response was sent.
    pub fn evictable_at(&self) -> Nanos {
        match self.phase {
            Phase::ReadingRequest { .. } => Nanos::ZERO,
            Phase::Lingering => Nanos::ONE,
            Phase::Streaming { .. } | Phase::Sending => self.opened_at + EVICTION_AGE,
        }
    }

    /// Writes what the stream takes without waiting.
    fn send(&mut self, now: Nanos) -> io::Result<()> {
        while self.has_output() {
            match self.stream.write(&self.response) {
                Ok(count) => {
                    self.response.drain(..count);
                    self.deadline = now + WRITE_TIMEOUT;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        // The last slice of a page may have no text.
        if matches!(self.phase, Phase::Sending) && !self.has_output() {
            self.phase = Phase::Lingering;
            self.deadline = now + LINGER_TIMEOUT;
            self.stream.end_output()?;
        }
        Ok(())
    }

    /// Adds received bytes to the request, and starts the response once the request is complete.
    fn receive(&mut self, bytes: &[u8], state: ServerState<'_>, now: Nanos) {
        let Phase::ReadingRequest { head } = &mut self.phase else { return };
        let mut head = std::mem::take(head);
        head.extend_from_slice(&bytes[..bytes.len().min(HEAD_MAX - head.len())]);
        match http::parse(&head) {
            Ok(None) => {
                self.phase = Phase::ReadingRequest { head };
                return;
            }
            Ok(Some(request)) => self.respond_to(request, state, now),
            Err((status, text)) => self.respond(status, TEXT_TYPE, text, false),
        }
        self.deadline = now + WRITE_TIMEOUT;
    }

    // ---- Responses ----

    fn respond_to(&mut self, request: Request<'_>, state: ServerState<'_>, now: Nanos) {
        let Request { path, query, .. } = request;
        let tube = path.strip_prefix("/tube/");
        let is_known = tube.is_some() || ["/", "/metrics", "/readyz"].contains(&path);
        let (status, text) = match state {
            _ if path == "/healthz" => (OK, "ok\n"),
            _ if !is_known => UNKNOWN_PATH,
            ServerState::Starting => (UNAVAILABLE, "reading the binlog\n"),
            ServerState::StandingBy(leader) if path == "/metrics" => {
                let text = standby_metrics(leader);
                return self.respond(OK, METRICS_TYPE, &text, request.head_only);
            }
            ServerState::StandingBy(Some(leader)) if path != "/readyz" => {
                let (media_type, text) = match request.media_type {
                    MediaType::Json => (
                        MediaType::Json.names().1,
                        format!("{{\"leader\":\"{}\"}}\n", JsonText(leader)),
                    ),
                    MediaType::Html | MediaType::Text => (TEXT_TYPE, format!("{leader} leads\n")),
                };
                return self.respond(UNAVAILABLE, media_type, &text, request.head_only);
            }
            ServerState::StandingBy(_) => (UNAVAILABLE, "standing by\n"),
            ServerState::Serving(server, measurements) => match (path, tube) {
                ("/metrics", _) => return self.start_page(MetricsPage::new(), request),
                ("/readyz", _) if server.store().is_draining => (UNAVAILABLE, "draining\n"),
                ("/readyz", _) if server.store().is_stalled() => {
                    (UNAVAILABLE, "changes are not stored\n")
                }
                ("/readyz", _) => (OK, "ok\n"),
                (_, None) => {
                    let view = View::of(server, measurements, now);
                    return self.start_page(StatusPage::new(query, &view), request);
                }
                (_, Some(name)) => match percent_decode_str(name).decode_utf8() {
                    Ok(name) if server.store().queue.tubes.find(&name).is_some() => {
                        return self.start_page(TubePage::new(&name), request);
                    }
                    _ => (NOT_FOUND, "There is no such tube.\n"),
                },
            },
        };
        self.respond(status, TEXT_TYPE, text, request.head_only);
    }

    fn respond(&mut self, status: &str, media_type: &str, text: &str, head_only: bool) {
        let framing = format_args!("Content-Length: {}\r\n", text.len());
        let body = if head_only { "" } else { text };
        self.response = (http::head(status, media_type, framing, "") + body).into_bytes();
        self.phase = Phase::Sending;
    }

    fn start_page(&mut self, page: impl Page + 'static, request: Request<'_>) {
        let (media_type, fields) = match request.path {
            "/metrics" => (METRICS_TYPE, ""),
            _ => (request.media_type.names().1, html::HEADER_FIELDS),
        };
        let (format, in_chunks) = (request.media_type, request.takes_chunks);
        // Without chunks the end of the page is the end of the connection.
        let framing = if in_chunks { "Transfer-Encoding: chunked\r\n" } else { "" };
        self.response = http::head(OK, media_type, framing, fields).into_bytes();
        self.phase = match request.head_only {
            true => Phase::Sending,
            false => Phase::Streaming { page: Box::new(page), format, in_chunks },
        };
    }

    /// Makes the next slice of the page, after [`HttpConn::wants_slice`], and writes it.
    ///
    /// # Errors
    /// There is no memory for a slice, or the stream fails.
    pub fn write_slice(&mut self, state: ServerState<'_>, now: Nanos) -> io::Result<()> {
        let Phase::Streaming { page, format, in_chunks } = &mut self.phase else { return Ok(()) };
        let ServerState::Serving(server, measurements) = state else { return Ok(()) };
        let view = View::of(server, measurements, now);
        if !view.server.has_headroom(Headroom::ThreeQuarters) {
            return Err(ErrorKind::OutOfMemory.into());
        }
        let mut text = String::new();
        let is_done = page.write_slice(&view, &mut Out { format: *format, text: &mut text });
        // A chunk without bytes would be the last one.
        if *in_chunks && !text.is_empty() {
            text = format!("{:x}\r\n{text}\r\n", text.len());
        }
        if *in_chunks && is_done {
            text.push_str("0\r\n\r\n");
        }
        self.response = text.into_bytes();
        if is_done {
            self.phase = Phase::Sending;
        }
        self.deadline = now + WRITE_TIMEOUT;
        self.send(now)
    }
}
