//! One visitor's end of an HTTP connection: bytes to a request, and an answer in pieces.
//!
//! A visitor has a limited time to ask, to take each piece of what is told, and for all of it; there
//! is one answer, and then the connection is over. Where all places are taken, a connection without
//! a complete request makes room at once, and one that is answered after a fair while. Sockets are
//! not known here.

use super::http::{self, HEAD_MAX, Length, Request, Status};
use super::metrics::{LONGEST_SAMPLE, Page, SLICE_LEN};
use crate::engine::collections::histogram::Histogram;
use crate::engine::headroom::{self, Headroom};
use crate::engine::server::Server;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// One visitor.
#[derive(Debug)]
pub struct HttpConn {
    phase: Phase,
    /// As many tubes are told of one by one.
    tubes_max: usize,
    /// What has been asked so far.
    head: Vec<u8>,
    /// The part of the answer that is to be sent, and how much of that has been.
    answer: String,
    sent: usize,
    /// When the visitor must have gone on.
    deadline: Nanos,
    began_at: Nanos,
}

#[derive(Debug)]
enum Phase {
    /// The request is not complete.
    ReadingRequest,
    /// There is more of the answer than has been made.
    Streaming { page: Box<Page>, in_chunks: bool },
    /// The rest of the answer is to be sent.
    Sending,
    /// Whatever the visitor still sends is dropped: to close at once could keep the answer from arriving.
    Lingering,
    /// The connection is to be closed.
    Done,
}

/// What visitors are told of.
#[derive(Clone, Copy, Debug)]
pub enum ServerState<'a> {
    /// The server reads its binlog, and serves nobody yet.
    Starting,
    /// It serves.
    Serving(&'a Server, &'a Histogram),
}

/// For the whole of a request.
const TO_ASK: Nanos = Nanos::from_secs(5);
/// To take more of the answer, after each time that some was taken.
const TO_TAKE: Nanos = Nanos::from_secs(10);
/// For the end of the connection.
const TO_LEAVE: Nanos = Nanos::from_secs(2);
/// For the visit, however steadily it goes on.
const IN_ALL: Nanos = Nanos::from_secs(30);
/// To take the answer, where others wait for a place.
const BESIDE_OTHERS: Nanos = Nanos::from_secs(2);

/// In the text format of Prometheus.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// In words.
const TEXT_TYPE: &str = "text/plain; charset=utf-8";

impl HttpConn {
    /// A visitor has come, who will be told of `tubes_max` tubes one by one.
    pub fn new(tubes_max: usize, now: Nanos) -> HttpConn {
        HttpConn {
            phase: Phase::ReadingRequest,
            tubes_max,
            head: Vec::new(),
            answer: String::new(),
            sent: 0,
            deadline: now + TO_ASK,
            began_at: now,
        }
    }

    // ---- What the visitor does ----

    /// Bytes have arrived.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        subject: ServerState<'_>,
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
            Ok(Some(request)) => self.answer(request, subject),
            Err(status) => self.say(status, explanation(status), false),
        }
        self.deadline = now + TO_TAKE;
        Ok(())
    }

    /// The visitor will send no more.
    pub fn end_input(&mut self) {
        if matches!(self.phase, Phase::ReadingRequest | Phase::Lingering) {
            self.phase = Phase::Done;
        }
    }

    /// So many bytes of the answer were sent.
    pub fn sent(&mut self, count: usize, now: Nanos) {
        self.sent += count;
        self.deadline = now + TO_TAKE;
        if self.sent == self.answer.len() {
            self.answer.clear();
            self.sent = 0;
            if matches!(self.phase, Phase::Sending) {
                self.phase = Phase::Lingering;
                self.deadline = now + TO_LEAVE;
            }
        }
    }

    // ---- What there is to do ----

    /// What is to be sent.
    pub fn to_send(&self) -> &[u8] {
        &self.answer.as_bytes()[self.sent..]
    }

    /// Whether more of the answer can be made: what was made before has been sent.
    pub fn wants_slice(&self) -> bool {
        matches!(self.phase, Phase::Streaming { .. }) && self.answer.is_empty()
    }

    /// Whether all of the answer has been sent, so that no more will be.
    pub fn is_leaving(&self) -> bool {
        matches!(self.phase, Phase::Lingering)
    }

    /// Whether the connection is to be closed.
    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// When the visitor is to be turned out.
    pub fn deadline(&self) -> Nanos {
        self.deadline.min(self.began_at + IN_ALL)
    }

    /// Whether that is over.
    pub fn is_late(&self, now: Nanos) -> bool {
        self.deadline() <= now
    }

    /// From when on the visitor makes room for others, if there is no other place for them: at
    /// once while the request is not complete, and nearly so when all of the answer has been sent.
    pub fn evictable_at(&self) -> Nanos {
        match self.phase {
            Phase::ReadingRequest => Nanos::ZERO,
            Phase::Lingering | Phase::Done => Nanos::ONE,
            Phase::Streaming { .. } | Phase::Sending => self.began_at + BESIDE_OTHERS,
        }
    }

    // ---- Answering ----

    fn answer(&mut self, request: Request<'_>, subject: ServerState<'_>) {
        let Request { path, head_only, takes_chunks } = request;
        let (status, text) = match (path, subject) {
            ("/healthz", _) => (Status::Ok, "ok\n"),
            ("/readyz" | "/metrics", ServerState::Starting) => {
                (Status::ServiceUnavailable, "the binlog is being read\n")
            }
            ("/readyz", ServerState::Serving(server, _)) if server.is_draining() => {
                (Status::ServiceUnavailable, "draining\n")
            }
            ("/readyz", ServerState::Serving(..)) => (Status::Ok, "ok\n"),
            ("/metrics", ServerState::Serving(..)) => {
                return self.begin_telling(head_only, takes_chunks);
            }
            _ => (Status::NotFound, explanation(Status::NotFound)),
        };
        self.say(status, text, head_only);
    }

    fn say(&mut self, status: Status, text: &str, head_only: bool) {
        self.answer = http::head(status, TEXT_TYPE, Length::Bytes(text.len()));
        if !head_only {
            self.answer.push_str(text);
        }
        self.phase = Phase::Sending;
    }

    fn begin_telling(&mut self, head_only: bool, in_chunks: bool) {
        let length = if in_chunks { Length::Chunks } else { Length::ToTheEnd };
        self.answer = http::head(Status::Ok, METRICS_TYPE, length);
        self.phase = if head_only {
            Phase::Sending
        } else {
            Phase::Streaming { page: Box::new(Page::new(self.tubes_max)), in_chunks }
        };
    }

    /// Makes the next slice of the answer, if it is time for it.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn tell(&mut self, subject: ServerState<'_>, now: Nanos) -> Result<(), TryReserveError> {
        if !self.wants_slice() {
            return Ok(());
        }
        let (Phase::Streaming { page, in_chunks }, ServerState::Serving(server, iterations)) =
            (&mut self.phase, subject)
        else {
            return Ok(());
        };
        let len = SLICE_LEN + LONGEST_SAMPLE + CHUNK_FRAME;
        headroom::leave(Headroom::Quarter, || self.answer.try_reserve(len))?;
        if *in_chunks {
            self.answer.push_str(CHUNK_HEAD);
        }
        let begins_at = self.answer.len();
        self.deadline = now + TO_TAKE;
        page.go_on(&server.view(iterations, now), &mut self.answer)?;
        let told = self.answer.len() - begins_at;
        let is_done = page.is_done();
        if *in_chunks {
            if told == 0 {
                // That would be the end.
                self.answer.clear();
            } else {
                self.answer.replace_range(..CHUNK_HEAD.len(), &format!("{told:08x}\r\n"));
                self.answer.push_str("\r\n");
            }
            if is_done {
                self.answer.push_str("0\r\n\r\n");
            }
        }
        if is_done {
            self.phase = Phase::Sending;
        }
        Ok(())
    }
}

/// What a person reads who asks for something else than there is.
fn explanation(status: Status) -> &'static str {
    match status {
        Status::BadRequest => "This is no request of HTTP/1.0 or 1.1.\n",
        Status::NotFound => "There are /metrics, /healthz and /readyz.\n",
        Status::MethodNotAllowed => "Only GET and HEAD are answered.\n",
        Status::HeadTooLarge => "The head of the request is too long.\n",
        Status::Ok | Status::ServiceUnavailable => "",
    }
}

/// The length of a chunk, which is put in when it is known.
const CHUNK_HEAD: &str = "00000000\r\n";
/// That, the end of a chunk and the end of all.
const CHUNK_FRAME: usize = CHUNK_HEAD.len() + "\r\n0\r\n\r\n".len();
