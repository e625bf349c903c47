//! All replies of the protocol, and their bytes.

use super::output::{Output, Pool};
use crate::engine::binlog::NoSpace;
use crate::engine::binlog::record::JobState;
use crate::engine::headroom::NoMemory;
use crate::engine::keys::TubeKey;
use crate::engine::queue::body::{Bodies, Body};
use crate::engine::queue::listing::ListText;
use crate::engine::queue::read_body::ReadBody;
use crate::engine::queue::tube::Tubes;
use crate::engine::queue::unique::Hit;
use crate::engine::text::{self, CR_LF};
use std::rc::Rc;

/// What a handler returns. A refusal is two registers, so that `?` costs little.
pub type Answer = Result<Reply, Word>;

/// A reply that is one line, always the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(&'static str);

impl Word {
    pub const BAD_FORMAT: Word = Word("BAD_FORMAT\r\n");
    pub const BURIED: Word = Word("BURIED\r\n");
    pub const DEADLINE_SOON: Word = Word("DEADLINE_SOON\r\n");
    pub const DELETED: Word = Word("DELETED\r\n");
    pub const DRAINING: Word = Word("DRAINING\r\n");
    pub const EXPECTED_CRLF: Word = Word("EXPECTED_CRLF\r\n");
    pub const JOB_TOO_BIG: Word = Word("JOB_TOO_BIG\r\n");
    pub const KICKED_JOB: Word = Word("KICKED\r\n");
    pub const NOT_FOUND: Word = Word("NOT_FOUND\r\n");
    pub const NOT_IGNORED: Word = Word("NOT_IGNORED\r\n");
    pub const OUT_OF_MEMORY: Word = Word("OUT_OF_MEMORY\r\n");
    pub const PAUSED: Word = Word("PAUSED\r\n");
    pub const RELEASED: Word = Word("RELEASED\r\n");
    pub const TIMED_OUT: Word = Word("TIMED_OUT\r\n");
    pub const TOUCHED: Word = Word("TOUCHED\r\n");
    pub const UNKNOWN_COMMAND: Word = Word("UNKNOWN_COMMAND\r\n");
}

pub enum Reply {
    /// None now: the connection is doing something or is closing, or the reply is in its output already.
    Later,
    Word(Word),
    /// A word and a number, as in `INSERTED 1`.
    Number(&'static str, u64),
    /// A word and two numbers, as in `DELETED_BATCH 1 0`.
    Numbers(&'static str, u64, u64),
    InsertedBefore(Hit),
    Using(TubeKey),
    Document(String),
    LongList(Rc<ListText>),
}

impl From<NoMemory> for Word {
    fn from(_: NoMemory) -> Word {
        Word::OUT_OF_MEMORY
    }
}

impl From<NoSpace> for Word {
    fn from(_: NoSpace) -> Word {
        Word::OUT_OF_MEMORY
    }
}

impl Reply {
    /// Appends the reply to the output. After an error a part of it may be there.
    #[inline]
    pub fn write(
        &self,
        output: &mut Output,
        pool: &mut Pool,
        tubes: &Tubes,
    ) -> Result<(), NoMemory> {
        match self {
            Reply::Later => Ok(()),
            Reply::Word(word) => output.push(word.0.as_bytes(), pool),
            Reply::Number(word, number) => {
                output.push(Line::new().number(*number).word(word).bytes(), pool)
            }
            Reply::Numbers(word, first, second) => output.push(
                Line::new().number(*second).word(" ").number(*first).word(word).bytes(),
                pool,
            ),
            Reply::InsertedBefore(hit) => output.push(
                Line::new().word(state_of(*hit)).number(hit.id).word("INSERTED ").bytes(),
                pool,
            ),
            Reply::Using(tube) => {
                output.push(b"USING ", pool)?;
                output.push(tubes[*tube].name.as_bytes(), pool)?;
                output.push(CR_LF, pool)
            }
            Reply::LongList(text) => {
                let len = text.bytes().len() as u64;
                output.push(Line::new().number(len).word("OK ").bytes(), pool)?;
                output.push_list(text, pool)?;
                output.push(CR_LF, pool)
            }
            Reply::Document(text) => {
                output.push(Line::new().number(text.len() as u64).word("OK ").bytes(), pool)?;
                output.push(text.as_bytes(), pool)?;
                output.push(CR_LF, pool)
            }
        }
    }
}

/// Appends a job with its body, which may have been `read` back and which the client `has_reserved` or looks at.
#[inline(always)]
pub fn write_job(
    has_reserved: bool,
    id: u64,
    body: &Body,
    read: Option<&Rc<ReadBody>>,
    output: &mut Output,
    pool: &mut Pool,
    bodies: &mut Bodies,
) -> Result<(), NoMemory> {
    let mut line = Line::new();
    line.number(body.content_len().into()).word(" ").number(id);
    if has_reserved {
        line.word("RESERVED ")
    } else {
        line.word("FOUND ")
    };
    output.push(line.bytes(), pool)?;
    output.push_body(body, read, pool, bodies)
}

fn state_of(hit: Hit) -> &'static str {
    match hit.state {
        JobState::Ready => " READY",
        JobState::Reserved => " RESERVED",
        JobState::Delayed => " DELAYED",
        JobState::Buried => " BURIED",
        JobState::Deleted => " DELETED",
    }
}

/// The maximum length of a [`Line`] in bytes. `DELETED_BATCH`, two numbers of 20 digits, two spaces
/// and CR LF take 57.
pub const REPLY_LINE_MAX: usize = 64;

/// A line of a word and at most two numbers, which is appended to an output in one piece. It is
/// written from its end to its start, because a division returns the last digit first.
struct Line {
    bytes: [u8; REPLY_LINE_MAX],
    start: usize,
}

impl Line {
    /// Returns a line with its CR LF only.
    fn new() -> Line {
        let mut line = Line { bytes: [0; REPLY_LINE_MAX], start: REPLY_LINE_MAX };
        line.word("\r\n");
        line
    }

    #[inline]
    fn word(&mut self, word: &str) -> &mut Line {
        let end = self.start;
        self.start -= word.len();
        self.bytes[self.start..end].copy_from_slice(word.as_bytes());
        self
    }

    fn number(&mut self, number: u64) -> &mut Line {
        self.start = text::write_decimal(number, &mut self.bytes, self.start);
        self
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }
}
