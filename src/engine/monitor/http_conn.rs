//! The state machine of one HTTP connection: request bytes in, response bytes out. It has no
//! socket.
//!
//! A connection has one request. Timeouts are 5 s for the request, 10 s for each write of the
//! response, and 30 s for the whole connection. At the connection limit, a connection without a
//! complete request is evicted at once, and a connection with a response after 2 s.

use super::html;
use super::http::{self, HEAD_MAX, Length, Request, Status};
use super::measurements::Measurements;
use super::metrics::{LONGEST_SAMPLE, Page, STANDBY_METRICS};
use super::status_page::StatusPage;
use super::tube_page::TubePage;
use super::url;
use crate::engine::headroom::{self, Headroom};
use crate::engine::server::{Server, View};
use crate::engine::text;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// One HTTP connection.
#[derive(Debug)]
pub struct HttpConn {
    phase: Phase,
    /// The maximum number of tubes with metrics of their own.
    tubes_max: usize,
    /// The received part of an incomplete request head.
    head: Vec<u8>,
    /// The current part of the response.
    response: String,
    /// The number of bytes of `response` that were sent.
    sent: usize,
    /// When the current phase times out.
    deadline: Nanos,
    opened_at: Nanos,
}

#[derive(Debug)]
enum Phase {
    /// The request head is incomplete.
    ReadingRequest,
    /// A page is made and sent slice by slice.
    Streaming { page: Box<AnyPage>, in_chunks: bool },
    /// The last bytes of the response are sent.
    Sending,
    /// Received bytes are dropped until the client closes. Closing with unread bytes resets the
    /// connection, and the client could lose the response.
    Lingering,
    /// The socket must be closed.
    Done,
}

/// A page that is being made.
#[derive(Debug)]
enum AnyPage {
    Metrics(Page),
    Status(StatusPage),
    Tube(TubePage),
}

/// The state that responses describe.
#[derive(Clone, Copy, Debug)]
pub enum ServerState<'a> {
    /// The server reads its binlog and accepts no clients yet.
    Starting,
    /// Another server of the cluster leads, and this one accepts no clients.
    StandingBy,
    /// The server serves clients.
    Serving(&'a Server, &'a Measurements),
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
/// The media type of all other responses.
const TEXT_TYPE: &str = "text/plain; charset=utf-8";

impl HttpConn {
    /// Returns a connection that was accepted at `now`. Its metrics page has at most `tubes_max`
    /// tubes with metrics of their own.
    pub fn new(tubes_max: usize, now: Nanos) -> HttpConn {
        HttpConn {
            phase: Phase::ReadingRequest,
            tubes_max,
            head: Vec::new(),
            response: String::new(),
            sent: 0,
            deadline: now + REQUEST_TIMEOUT,
            opened_at: now,
        }
    }

    // ---- Events of the socket ----

    /// Adds received bytes to the request, and starts the response once the request is complete.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        state: ServerState<'_>,
        now: Nanos,
    ) -> Result<(), TryReserveError> {
        if !matches!(self.phase, Phase::ReadingRequest) {
            return Ok(());
        }
        let mut head = std::mem::take(&mut self.head);
        let bytes = &bytes[..bytes.len().min(HEAD_MAX - head.len())];
        headroom::leave(Headroom::Quarter, || head.try_reserve(bytes.len()))?;
        head.extend_from_slice(bytes);
        match http::parse(&head) {
            Ok(None) => {
                self.head = head;
                return Ok(());
            }
            Ok(Some(request)) => self.respond_to(request, state),
            Err(status) => self.respond(status, explanation(status), false),
        }
        self.deadline = now + WRITE_TIMEOUT;
        Ok(())
    }

    /// Handles the end of the input: the client sends no more bytes.
    pub fn end_input(&mut self) {
        if matches!(self.phase, Phase::ReadingRequest | Phase::Lingering) {
            self.phase = Phase::Done;
        }
    }

    /// Removes the first `count` bytes of [`HttpConn::to_send`], which were sent.
    pub fn sent(&mut self, count: usize, now: Nanos) {
        self.sent += count;
        self.deadline = now + WRITE_TIMEOUT;
        if self.sent == self.response.len() {
            self.response.clear();
            self.sent = 0;
            if matches!(self.phase, Phase::Sending) {
                self.phase = Phase::Lingering;
                self.deadline = now + LINGER_TIMEOUT;
            }
        }
    }

    // ---- Work for the socket ----

    /// Returns the bytes to be sent.
    pub fn to_send(&self) -> &[u8] {
        &self.response.as_bytes()[self.sent..]
    }

    /// Returns whether [`HttpConn::write_slice`] is to be called: all earlier bytes were sent.
    pub fn wants_slice(&self) -> bool {
        matches!(self.phase, Phase::Streaming { .. }) && self.response.is_empty()
    }

    /// Returns whether the response was sent completely and the client may close.
    pub fn is_lingering(&self) -> bool {
        matches!(self.phase, Phase::Lingering)
    }

    /// Returns whether the socket must be closed.
    pub fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// Returns when the current phase or the whole connection times out.
    pub fn deadline(&self) -> Nanos {
        self.deadline.min(self.opened_at + TOTAL_TIMEOUT)
    }

    /// Returns whether the deadline has passed.
    pub fn is_expired(&self, now: Nanos) -> bool {
        self.deadline() <= now
    }

    /// Returns the time from which the connection can be evicted at the connection limit.
    /// Incomplete requests are evicted first, then connections whose response was sent.
    pub fn evictable_at(&self) -> Nanos {
        match self.phase {
            Phase::ReadingRequest => Nanos::ZERO,
            Phase::Lingering | Phase::Done => Nanos::ONE,
            Phase::Streaming { .. } | Phase::Sending => self.opened_at + EVICTION_AGE,
        }
    }

    // ---- Responses ----

    fn respond_to(&mut self, request: Request<'_>, state: ServerState<'_>) {
        let Request { path, query, media_type, head_only, .. } = request;
        let (status, text) = match (path, state) {
            ("/healthz", _) => (Status::Ok, "ok\n"),
            ("/readyz" | "/metrics" | "/", ServerState::Starting) => {
                (Status::ServiceUnavailable, STARTING)
            }
            ("/metrics", ServerState::StandingBy) => {
                return self.respond_with(Status::Ok, METRICS_TYPE, STANDBY_METRICS, head_only);
            }
            ("/readyz" | "/", ServerState::StandingBy) => (Status::ServiceUnavailable, STANDING_BY),
            ("/readyz", ServerState::Serving(server, _)) if server.is_draining() => {
                (Status::ServiceUnavailable, "draining\n")
            }
            ("/readyz", ServerState::Serving(server, _)) if server.is_stalled() => {
                (Status::ServiceUnavailable, "changes are not stored\n")
            }
            ("/readyz", ServerState::Serving(..)) => (Status::Ok, "ok\n"),
            ("/metrics", ServerState::Serving(..)) => {
                let head = |length| http::head(Status::Ok, METRICS_TYPE, length);
                return self.start_page(AnyPage::Metrics(Page::new(self.tubes_max)), request, head);
            }
            ("/", ServerState::Serving(..)) => {
                let page = StatusPage::new(media_type, query);
                return self.start_status_page(AnyPage::Status(page), request);
            }
            (path, state) => match (path.strip_prefix(TUBE_PREFIX), state) {
                (Some(_), ServerState::Starting) => (Status::ServiceUnavailable, STARTING),
                (Some(_), ServerState::StandingBy) => (Status::ServiceUnavailable, STANDING_BY),
                (Some(name), ServerState::Serving(server, _)) => {
                    let name = url::decode(name);
                    if let Some(name) = existing_tube(&name, server) {
                        let page = TubePage::new(media_type, name);
                        return self.start_status_page(AnyPage::Tube(page), request);
                    }
                    (Status::NotFound, "There is no such tube.\n")
                }
                (None, _) => (Status::NotFound, explanation(Status::NotFound)),
            },
        };
        self.respond(status, text, head_only);
    }

    fn respond(&mut self, status: Status, text: &str, head_only: bool) {
        self.respond_with(status, TEXT_TYPE, text, head_only);
    }

    fn respond_with(&mut self, status: Status, media_type: &str, text: &str, head_only: bool) {
        self.response = http::head(status, media_type, Length::Bytes(text.len()));
        if !head_only {
            self.response.push_str(text);
        }
        self.phase = Phase::Sending;
    }

    fn start_status_page(&mut self, page: AnyPage, request: Request<'_>) {
        let name = request.media_type.name();
        let head = |length| http::head_with(Status::Ok, name, length, html::HEADER_FIELDS);
        self.start_page(page, request, head);
    }

    fn start_page(
        &mut self,
        page: AnyPage,
        request: Request<'_>,
        head: impl FnOnce(Length) -> String,
    ) {
        let in_chunks = request.takes_chunks;
        self.response = head(if in_chunks { Length::Chunks } else { Length::UntilClose });
        self.phase = if request.head_only {
            Phase::Sending
        } else {
            Phase::Streaming { page: Box::new(page), in_chunks }
        };
    }

    /// Writes the next slice of the page, if [`HttpConn::wants_slice`].
    pub fn write_slice(
        &mut self,
        state: ServerState<'_>,
        now: Nanos,
    ) -> Result<(), TryReserveError> {
        if !self.wants_slice() {
            return Ok(());
        }
        let (Phase::Streaming { page, in_chunks }, ServerState::Serving(server, measurements)) =
            (&mut self.phase, state)
        else {
            return Ok(());
        };
        let slice_len = server.limits().metrics_per_page_slice_bytes;
        let len = slice_len + LONGEST_SAMPLE + CHUNK_FRAME;
        headroom::leave(Headroom::Quarter, || self.response.try_reserve(len))?;
        if *in_chunks {
            self.response.push_str(CHUNK_HEAD);
        }
        let start = self.response.len();
        self.deadline = now + WRITE_TIMEOUT;
        let view = server.view(&measurements.iterations, now);
        page.write_slice(&view, measurements, &mut self.response)?;
        let written = self.response.len() - start;
        let is_done = page.is_done();
        if *in_chunks {
            if written == 0 {
                // A chunk without bytes would be the last one.
                self.response.clear();
            } else {
                self.response.replace_range(..CHUNK_HEAD.len(), &format!("{written:08x}\r\n"));
                self.response.push_str("\r\n");
            }
            if is_done {
                self.response.push_str("0\r\n\r\n");
            }
        }
        if is_done {
            self.phase = Phase::Sending;
        }
        Ok(())
    }
}

impl AnyPage {
    fn write_slice(
        &mut self,
        view: &View<'_>,
        measurements: &Measurements,
        text: &mut String,
    ) -> Result<(), TryReserveError> {
        match self {
            AnyPage::Metrics(page) => page.write_slice(view, text),
            AnyPage::Status(page) => page.write_slice(view, measurements, text),
            AnyPage::Tube(page) => page.write_slice(view, measurements, text),
        }
    }

    fn is_done(&self) -> bool {
        match self {
            AnyPage::Metrics(page) => page.is_done(),
            AnyPage::Status(page) => page.is_done(),
            AnyPage::Tube(page) => page.is_done(),
        }
    }
}

/// Returns the name of a tube that exists.
fn existing_tube<'n>(name: &'n [u8], server: &Server) -> Option<&'n str> {
    let name = std::str::from_utf8(name).ok().filter(|name| text::is_tube_name(name.as_bytes()))?;
    server.has_tube(name).then_some(name)
}

/// The paths of the pages of tubes begin with this.
const TUBE_PREFIX: &str = "/tube/";

/// The body of a response while the server starts.
const STARTING: &str = "reading the binlog\n";

/// The body of a response while another server leads.
const STANDING_BY: &str = "standing by\n";

/// Returns the body of an error response, for people who use a browser.
fn explanation(status: Status) -> &'static str {
    match status {
        Status::BadRequest => "The request is not valid HTTP/1.0 or HTTP/1.1.\n",
        Status::NotFound => "The paths are /, /tube/NAME, /metrics, /healthz and /readyz.\n",
        Status::MethodNotAllowed => "The methods are GET and HEAD.\n",
        Status::HeadTooLarge => {
            "The request head is longer than 4096 bytes or has more than 64 fields.\n"
        }
        Status::Ok | Status::ServiceUnavailable => "",
    }
}

/// A placeholder for the length of a chunk, which is replaced when the length is known.
const CHUNK_HEAD: &str = "00000000\r\n";
/// The length of the bytes around a chunk that may be the last one.
const CHUNK_FRAME: usize = CHUNK_HEAD.len() + "\r\n0\r\n\r\n".len();
