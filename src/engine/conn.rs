//! One client's end of the conversation: what it is in the middle of saying, and what it
//! is still to be told.
//!
//! [`Conn::next_step`] cuts the bytes that arrive into lines and bodies, however they are
//! chunked; what the lines mean is for `server.rs`. Memory is bounded whatever arrives: at
//! most a line or a body of allowed size is kept while incomplete, anything longer is
//! dropped as it comes, and a client whose commands are held up is not read from.

use super::body::{Body, CR_LF, Upload};
use super::command::LINE_MAX;
use super::job::Terms;
use super::output::Output;
use super::reply::Reply;

/// One connection.
#[derive(Debug, Default)]
pub struct Conn {
    /// What the connection is in the middle of.
    pub phase: Phase,
    /// Bytes that have arrived and were not used yet.
    pub input: Vec<u8>,
    /// Whether commands among them could not be run, because the client waits, does not read
    /// its replies, or has used up its share of the turn.
    pub is_held_up: bool,
    /// Bytes for the client.
    pub output: Output,
    /// The client has shut down its sending side: it will not wait any more.
    pub is_half_closed: bool,
    /// Everything that the client sent has arrived.
    pub input_ended: bool,
    /// Whether the loop will look at the connection at the end of the turn.
    pub has_attention: bool,
}

/// What a connection is in the middle of.
#[derive(Debug, Default)]
pub enum Phase {
    /// A command line.
    #[default]
    Line,
    /// A line that is too long, up to its end.
    TooLongLine,
    /// The body of a job.
    Body(Put),
    /// A body that is not wanted.
    UnwantedBody {
        /// How many bytes are still to come.
        left: u64,
        /// What to say then.
        reply: Reply<'static>,
    },
    /// A reserve that has not been answered.
    Waiting,
    /// Nothing more: what has been said is sent, then the connection is closed.
    Closing,
}

/// A put whose body is arriving.
#[derive(Debug)]
pub struct Put {
    /// The id that the job will have.
    pub id: u64,
    /// Its numbers.
    pub terms: Terms,
    /// Its body.
    pub upload: Upload,
}

/// What the next bytes of input amount to.
#[derive(Debug)]
pub enum Step<'a> {
    /// A whole line, without its CR LF.
    Line(&'a [u8]),
    /// The end of a line that was too long.
    TooLongLine,
    /// The end of a body; none if it does not end as it must.
    Put(u64, Terms, Option<Body>),
    /// The end of a body that was not wanted, and what to say.
    Unwanted(Reply<'static>),
    /// More bytes are needed, or none are wanted at present.
    Pause,
}

impl Conn {
    /// A client that does not read its replies is not listened to either, once this many
    /// bytes are on their way to it.
    const OUTPUT_LIMIT: usize = 256 * 1024;

    /// Whether commands of this client can be run now.
    pub fn takes_commands(&self) -> bool {
        let is_free = match self.phase {
            Phase::Line | Phase::TooLongLine | Phase::Body(_) | Phase::UnwantedBody { .. } => true,
            Phase::Waiting | Phase::Closing => false,
        };
        is_free && self.output.len() < Conn::OUTPUT_LIMIT
    }

    /// Whether the connection is to be closed: there is nothing more to hear, nothing
    /// more to do and nothing more to say.
    pub fn is_finished(&self) -> bool {
        let is_over = match self.phase {
            Phase::Closing => true,
            Phase::Waiting => false,
            Phase::Line | Phase::TooLongLine | Phase::Body(_) | Phase::UnwantedBody { .. } => {
                self.input_ended && !self.is_held_up
            }
        };
        is_over && self.output.is_empty()
    }

    /// Takes one step's worth of bytes from the front of `input`.
    pub fn next_step<'a>(&mut self, input: &mut &'a [u8]) -> Step<'a> {
        if !self.takes_commands() {
            return Step::Pause;
        }
        match &mut self.phase {
            Phase::Line => self.line(input),
            Phase::TooLongLine => self.end_of_line(input),
            Phase::Body(put) => {
                let taken = put.upload.take(input);
                *input = &input[taken..];
                if put.upload.is_complete() { self.end_of_body() } else { Step::Pause }
            }
            Phase::UnwantedBody { left, reply } => {
                let dropped = usize::try_from(*left).unwrap_or(usize::MAX).min(input.len());
                *input = &input[dropped..];
                *left -= dropped as u64;
                if *left > 0 {
                    return Step::Pause;
                }
                let reply = *reply;
                self.phase = Phase::Line;
                Step::Unwanted(reply)
            }
            Phase::Waiting | Phase::Closing => Step::Pause,
        }
    }

    fn line<'a>(&mut self, input: &mut &'a [u8]) -> Step<'a> {
        let window = &input[..input.len().min(LINE_MAX)];
        if let Some(length) = find_line_end(window) {
            let line = &input[..length];
            *input = &input[length + CR_LF.len()..];
            return Step::Line(line);
        }
        if window.len() < LINE_MAX {
            return Step::Pause;
        }
        self.phase = Phase::TooLongLine;
        self.end_of_line(input)
    }

    fn end_of_line<'a>(&mut self, input: &mut &'a [u8]) -> Step<'a> {
        if let Some(length) = find_line_end(input) {
            *input = &input[length + CR_LF.len()..];
            self.phase = Phase::Line;
            return Step::TooLongLine;
        }
        // A CR at the very end may be half of the end of the line.
        let kept = usize::from(input.ends_with(b"\r"));
        *input = &input[input.len() - kept..];
        Step::Pause
    }

    fn end_of_body<'a>(&mut self) -> Step<'a> {
        match std::mem::take(&mut self.phase) {
            Phase::Body(put) => Step::Put(put.id, put.terms, put.upload.finish()),
            Phase::Line
            | Phase::TooLongLine
            | Phase::UnwantedBody { .. }
            | Phase::Waiting
            | Phase::Closing => {
                unreachable!("only a body ends as one")
            }
        }
    }
}

/// The length of the line that `bytes` begin with, if its end is there.
fn find_line_end(bytes: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + bytes[from..].iter().position(|&byte| byte == b'\n')?;
        if bytes[..at].ends_with(b"\r") {
            return Some(at - 1);
        }
        from = at + 1;
    }
}
