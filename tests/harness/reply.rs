//! Reply framing: where a reply ends. A reply is a line with CR LF. `RESERVED`, `FOUND` and `OK`
//! lines end with the length of a body, which follows with a CR LF of its own.

use super::yaml;

const END: &[u8] = b"\r\n";

/// Returns the length of the body that follows `line` (given without CR LF), without the CR LF of
/// the body. The benchmark calls this for each reply: it takes a few nanoseconds.
#[inline]
pub fn body_len(line: &[u8]) -> Option<usize> {
    let rest = match line.first() {
        Some(b'R') => line.strip_prefix(b"RESERVED ")?,
        Some(b'F') => line.strip_prefix(b"FOUND ")?,
        Some(b'O') => line.strip_prefix(b"OK ")?,
        _ => return None,
    };
    let digits = rest.iter().rposition(|&byte| byte == b' ').map_or(rest, |at| &rest[at + 1..]);
    let len = decimal(digits).and_then(|len| usize::try_from(len).ok());
    Some(len.unwrap_or_else(|| panic!("the reply {} has no length", line.escape_ascii())))
}

/// Parses 1 to 19 digits and nothing else.
#[inline]
pub fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || digits.len() > 19 {
        return None;
    }
    digits.iter().try_fold(0, |value, &byte| {
        byte.is_ascii_digit().then(|| value * 10 + u64::from(byte - b'0'))
    })
}

/// The first reply in received bytes.
#[derive(Debug)]
pub struct Frame<'b> {
    /// Without CR LF.
    pub line: &'b [u8],
    /// Without CR LF; `None` if the line has no length.
    pub body: Option<&'b [u8]>,
    /// The bytes of the whole reply.
    pub len: usize,
}

/// Returns the first reply, or `None` while it is incomplete.
pub fn frame(bytes: &[u8]) -> Option<Frame<'_>> {
    let line_len = bytes.windows(END.len()).position(|window| window == END)?;
    let (line, after) = (&bytes[..line_len], &bytes[line_len + END.len()..]);
    let mut len = line_len + END.len();
    let body = match body_len(line) {
        None => None,
        Some(body_len) => {
            let ended = after.get(..body_len + END.len())?;
            len += ended.len();
            Some(without_end(ended))
        }
    };
    Some(Frame { line, body, len })
}

/// Returns the numbers that follow a word at the beginning of lines.
pub fn numbers(text: &str, word: &str) -> Vec<u64> {
    let number = |line: &str| line.strip_prefix(word)?.split([' ', ',']).next()?.parse().ok();
    text.lines().filter_map(number).collect()
}

/// Removes the CR LF, which must be there.
pub fn without_end(bytes: &[u8]) -> &[u8] {
    let end = &bytes[bytes.len().saturating_sub(20)..];
    bytes.strip_suffix(END).unwrap_or_else(|| panic!("no CR LF after {}", end.escape_ascii()))
}

/// A reply as a client keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Without CR LF.
    pub line: String,
    /// Without CR LF; empty if the reply has no body.
    pub body: Vec<u8>,
}

impl Reply {
    /// Returns the first number after `word`, if the line begins with `word`.
    pub fn number(&self, word: &str) -> Option<u64> {
        let rest = self.line.strip_prefix(word)?.strip_prefix(' ')?;
        rest.split(' ').next()?.parse().ok()
    }

    /// Returns the id of the job, if this is the reply to a put that was taken.
    #[track_caller]
    pub fn inserted(&self) -> u64 {
        let id = self.number("INSERTED");
        id.unwrap_or_else(|| panic!("the reply to a put is {}", self.line))
    }

    pub fn field(&self, key: &str) -> Option<&str> {
        yaml::field(self.text(), key)
    }

    pub fn value(&self, key: &str) -> Option<u64> {
        self.field(key)?.parse().ok()
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }
}
