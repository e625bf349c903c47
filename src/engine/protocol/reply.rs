//! All replies of the protocol, and their bytes.

use super::command::Rejection;
use super::output::{Output, Pool};
use crate::engine::queue::body::Bodies;
use crate::engine::queue::listing::ListText;
use crate::engine::queue::read_body::BodyRef;
use crate::engine::queue::unique::{Hit, HitState};
use crate::engine::text;
use crate::engine::text::CR_LF;
use std::collections::TryReserveError;
use std::rc::Rc;

/// A reply. The variants are named after the first words of the protocol.
#[derive(Clone, Copy, Debug)]
pub enum Reply<'a> {
    Inserted {
        id: u64,
    },
    /// The reply to a put whose key a job has already.
    InsertedBefore(Hit),
    Using {
        tube: &'a str,
    },
    Reserved {
        id: u64,
        body: BodyRef<'a>,
    },
    Found {
        id: u64,
        body: BodyRef<'a>,
    },
    Watching {
        count: usize,
    },
    Kicked {
        count: u32,
    },
    /// The head of the reply to `reserve-batch`. `count` replies `Reserved` follow.
    ReservedBatch {
        count: usize,
    },
    /// The head of the reply to `peek-batch`. `count` replies `Found` follow.
    FoundBatch {
        count: usize,
        next: u64,
    },
    DeletedBatch {
        deleted: usize,
        not_found: usize,
    },
    TouchedAll {
        count: usize,
    },
    Flushed {
        count: u64,
    },
    /// The reply to `kick-job`.
    KickedJob,
    /// A YAML document: the reply to the `stats` and `list` commands.
    Document {
        text: &'a str,
    },
    /// A long YAML list. Its last bytes are the CR LF of the reply.
    LongList {
        text: &'a Rc<ListText>,
    },
    Deleted,
    Released,
    Buried,
    Touched,
    Paused,
    TimedOut,
    DeadlineSoon,
    NotFound,
    NotIgnored,
    BadFormat,
    UnknownCommand,
    ExpectedCrLf,
    JobTooBig,
    Draining,
    OutOfMemory,
}

/// The number of bytes of a large body that are shared in the time in which one byte is copied.
const SHARED_PER_COPIED: usize = 16;

impl Reply<'_> {
    /// Returns the approximate cost of the reply, in copied bytes.
    pub fn cost(self) -> usize {
        if let Reply::Reserved { body, .. } | Reply::Found { body, .. } = self {
            let len = body.full_len() as usize;
            if body.is_large() { len / SHARED_PER_COPIED } else { len }
        } else if let Reply::Document { text } = self {
            text.len()
        } else if let Reply::LongList { text } = self {
            text.len() / SHARED_PER_COPIED
        } else {
            0
        }
    }

    /// Appends the bytes of this reply to `output`. After an error part of the reply may be in
    /// `output`.
    pub fn write(
        self,
        output: &mut Output,
        pool: &mut Pool,
        bodies: &mut Bodies,
    ) -> Result<(), TryReserveError> {
        let mut out = Writer { output, pool };
        match self {
            Reply::Inserted { id } => out.word_and_number("INSERTED ", id),
            Reply::InsertedBefore(hit) => out.hit(hit),
            Reply::Using { tube } => {
                out.line("USING ")?;
                out.push(tube.as_bytes())?;
                out.push(CR_LF)
            }
            Reply::Reserved { id, body } => out.job("RESERVED ", id, body, bodies),
            Reply::Found { id, body } => out.job("FOUND ", id, body, bodies),
            Reply::Watching { count } => out.word_and_number("WATCHING ", count as u64),
            Reply::Kicked { count } => out.word_and_number("KICKED ", u64::from(count)),
            Reply::ReservedBatch { count } => out.word_and_number("RESERVED_BATCH ", count as u64),
            Reply::FoundBatch { count, next } => {
                out.word_and_numbers("FOUND_BATCH ", count as u64, next)
            }
            Reply::DeletedBatch { deleted, not_found } => {
                out.word_and_numbers("DELETED_BATCH ", deleted as u64, not_found as u64)
            }
            Reply::TouchedAll { count } => out.word_and_number("TOUCHED_ALL ", count as u64),
            Reply::Flushed { count } => out.word_and_number("FLUSHED ", count),
            Reply::LongList { text } => {
                out.word_and_number("OK ", (text.len() - CR_LF.len()) as u64)?;
                output.push_list(text, pool)
            }
            Reply::Document { text } => {
                out.word_and_number("OK ", text.len() as u64)?;
                out.push(text.as_bytes())?;
                out.push(CR_LF)
            }
            Reply::KickedJob => out.line("KICKED\r\n"),
            Reply::Deleted => out.line("DELETED\r\n"),
            Reply::Released => out.line("RELEASED\r\n"),
            Reply::Buried => out.line("BURIED\r\n"),
            Reply::Touched => out.line("TOUCHED\r\n"),
            Reply::Paused => out.line("PAUSED\r\n"),
            Reply::TimedOut => out.line("TIMED_OUT\r\n"),
            Reply::DeadlineSoon => out.line("DEADLINE_SOON\r\n"),
            Reply::NotFound => out.line("NOT_FOUND\r\n"),
            Reply::NotIgnored => out.line("NOT_IGNORED\r\n"),
            Reply::BadFormat => out.line("BAD_FORMAT\r\n"),
            Reply::UnknownCommand => out.line("UNKNOWN_COMMAND\r\n"),
            Reply::ExpectedCrLf => out.line("EXPECTED_CRLF\r\n"),
            Reply::JobTooBig => out.line("JOB_TOO_BIG\r\n"),
            Reply::Draining => out.line("DRAINING\r\n"),
            Reply::OutOfMemory => out.line("OUT_OF_MEMORY\r\n"),
        }
    }
}

impl From<Rejection> for Reply<'_> {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::BadFormat => Reply::BadFormat,
            Rejection::UnknownCommand => Reply::UnknownCommand,
        }
    }
}

struct Writer<'a> {
    output: &'a mut Output,
    pool: &'a mut Pool,
}

impl Writer<'_> {
    fn line(&mut self, line: &'static str) -> Result<(), TryReserveError> {
        self.push(line.as_bytes())
    }

    fn word_and_number(&mut self, word: &'static str, number: u64) -> Result<(), TryReserveError> {
        self.push(Line::new().number(number).word(word).bytes())
    }

    // The compiler inlines a function into every command only if it has one caller.
    #[inline(always)]
    fn word_and_numbers(
        &mut self,
        word: &'static str,
        first: u64,
        second: u64,
    ) -> Result<(), TryReserveError> {
        self.push(Line::new().number(second).word(" ").number(first).word(word).bytes())
    }

    fn hit(&mut self, hit: Hit) -> Result<(), TryReserveError> {
        let state = match hit.state {
            HitState::Ready => " READY",
            HitState::Reserved => " RESERVED",
            HitState::Delayed => " DELAYED",
            HitState::Buried => " BURIED",
            HitState::Deleted => " DELETED",
        };
        self.push(Line::new().word(state).number(hit.id).word("INSERTED ").bytes())
    }

    fn job(
        &mut self,
        word: &'static str,
        id: u64,
        body: BodyRef<'_>,
        bodies: &mut Bodies,
    ) -> Result<(), TryReserveError> {
        self.word_and_numbers(word, id, body.content_len() as u64)?;
        self.output.push_body(body, self.pool, bodies)
    }

    fn push(&mut self, bytes: &[u8]) -> Result<(), TryReserveError> {
        self.output.push(bytes, self.pool)
    }
}

/// The maximum length of a [`Line`] in bytes. `DELETED_BATCH`, two numbers of 20 digits, two spaces
/// and CR LF take 57.
pub const MAX_LINE_LEN: usize = 64;

/// A line of a word and at most two numbers, which is appended to an output in one piece. It is
/// written from its end to its start, because a division returns the last digit first.
struct Line {
    bytes: [u8; MAX_LINE_LEN],
    start: usize,
}

impl Line {
    /// Returns a line with its CR LF only.
    fn new() -> Line {
        Line { bytes: [0; MAX_LINE_LEN], start: MAX_LINE_LEN }.word("\r\n")
    }

    #[inline]
    fn word(mut self, word: &str) -> Line {
        let end = self.start;
        self.start -= word.len();
        self.bytes[self.start..end].copy_from_slice(word.as_bytes());
        self
    }

    fn number(mut self, number: u64) -> Line {
        self.start = text::write_decimal(number, &mut self.bytes, self.start);
        self
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}
