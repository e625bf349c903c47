//! The bytes that a client has sent, split into lines and bodies.

use super::super::request::{Arguments, is_tagged_put};
use super::{Client, ClientNumber, Model, UNREAD_LIMIT};

/// The next unit that a client has sent completely.
pub(super) enum Item {
    /// A line without its CR LF.
    Line(Vec<u8>),
    /// A line of more bytes than its command may have.
    TooLongLine(Vec<u8>),
    /// A body with the two bytes behind it.
    Body(Vec<u8>),
    /// A body over the size limit.
    TooLargeBody,
}

/// What the client sends next.
#[derive(Clone, Debug, Default)]
pub(super) enum Expects {
    #[default]
    Line,
    /// The body of a put. Lengths are without the two bytes behind it.
    Body {
        id: u64,
        put: Arguments,
    },
    TooLargeBody {
        len: usize,
    },
}

const CR_LF: &[u8] = b"\r\n";
/// The longest line that is a command, in bytes with CR LF.
const LINE_LIMIT: usize = 224;
/// The same for `delete-batch`.
const DELETE_BATCH_LINE_LIMIT: usize = 21_015;
/// The same for a put with a tag, and for a list; and for a put with `con:`.
const TAGGED_LINE_LIMIT: usize = 512;
const CON_LINE_LIMIT: usize = 720;

fn is_list(line: &[u8]) -> bool {
    [&b"list-jobs "[..], b"list-clients ", b"peek-batch "].iter().any(|word| line.starts_with(word))
}

impl Model {
    /// Returns whether the client has sent a complete line or body, and the server may use it, or
    /// whether its batch is to be filled.
    pub fn can_run(&self, number: ClientNumber) -> bool {
        let client = &self.clients[&number];
        let has_more = client.has_batch() || client.step.is_some() || client.next_item().is_some();
        self.is_free(number) && has_more
    }

    /// Returns whether commands of the client may be run: it does not wait for a job, for a flush or for
    /// bodies, it is not being closed, and it reads its replies.
    pub fn is_free(&self, number: ClientNumber) -> bool {
        let client = &self.clients[&number];
        !self.is_waiting(number)
            && !self.is_flushing(number)
            && client.reading.is_none()
            && !self.is_listing(number)
            && !client.is_closing
            && client.output.len() < UNREAD_LIMIT
    }
}

impl Client {
    pub fn has_batch(&self) -> bool {
        self.batch.is_some()
    }

    /// Returns the next item, and its length in the input.
    pub(super) fn next_item(&self) -> Option<(Item, usize)> {
        match &self.expects {
            Expects::Line => {
                // Most inputs are parts of lines, and this search is much faster.
                if !self.input.contains(&b'\n') {
                    return None;
                }
                let len = self.input.windows(2).position(|pair| pair == CR_LF)?;
                let line = self.input[..len].to_vec();
                let used = len + CR_LF.len();
                let limit = match &line {
                    line if line.starts_with(b"delete-batch ") => DELETE_BATCH_LINE_LIMIT,
                    line if is_list(line) => TAGGED_LINE_LIMIT,
                    line if !is_tagged_put(line) => LINE_LIMIT,
                    line if line.windows(4).any(|word| word == b"con:") => CON_LINE_LIMIT,
                    _ => TAGGED_LINE_LIMIT,
                };
                let is_too_long = used > limit;
                Some((if is_too_long { Item::TooLongLine(line) } else { Item::Line(line) }, used))
            }
            Expects::Body { put, .. } => {
                let bytes = self.input.get(..put.len as usize + CR_LF.len())?;
                Some((Item::Body(bytes.to_vec()), bytes.len()))
            }
            Expects::TooLargeBody { len } => {
                let used = len + CR_LF.len();
                (self.input.len() >= used).then_some((Item::TooLargeBody, used))
            }
        }
    }

    /// Returns whether the next item is the line of a put, which is not answered before its body.
    pub fn sends_put_line(&self) -> bool {
        let is_put = |line: &[u8]| line.starts_with(b"put ") || line.starts_with(b"put-in-tube ");
        let is_busy = self.has_batch() || self.step.is_some();
        let next = self.next_item().filter(|_| !is_busy);
        matches!(next, Some((Item::Line(line), _)) if is_put(&line))
    }

    /// Returns whether the client keeps the tube.
    pub(super) fn needs(&self, tube: &str) -> bool {
        *self.used == *tube || self.watches(tube)
    }

    pub(super) fn watches(&self, tube: &str) -> bool {
        self.watched.iter().any(|name| **name == *tube)
    }
}
