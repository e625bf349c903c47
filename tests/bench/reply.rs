//! Parses replies from reads that end anywhere. Bodies of jobs are skipped; their length comes from
//! the framing of the harness.

use crate::harness::reply::{body_len, decimal};

/// A reply to the benchmark; any other reply ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// `INSERTED id`
    Inserted(u64),
    /// `RESERVED id bytes`, with its body
    Reserved(u64),
    /// `TIMED_OUT`
    TimedOut,
    /// `NOT_FOUND`
    NotFound,
    /// `OK bytes`, with the statistics of a tube: the number of its ready jobs
    ReadyJobs(u64),
    /// `OK bytes`, with a page of `list-jobs`: the number of its jobs
    Listed(u64),
    /// `RESERVED_BATCH count`: this number of `Reserved` follows
    Batch(u64),
    /// `DELETED_BATCH deleted missing`: the number of deleted jobs
    DeletedBatch(u64),
    /// The command has succeeded.
    Done,
}

/// The state of the parser between two reads.
#[derive(Debug, Default)]
pub struct Framing {
    /// The beginning of a line or of statistics.
    line: Vec<u8>,
    /// A reply whose body is incomplete, and the number of missing bytes.
    unfinished: Option<(Reply, usize)>,
}

impl Framing {
    /// Calls `receive` with each reply that these bytes complete.
    pub fn cut(&mut self, mut bytes: &[u8], mut receive: impl FnMut(Reply)) {
        while !bytes.is_empty() {
            if let Some((reply, missing)) = self.unfinished {
                let (body, rest) = bytes.split_at(missing.min(bytes.len()));
                bytes = rest;
                let is_document = matches!(reply, Reply::ReadyJobs(_));
                if is_document {
                    self.line.extend_from_slice(body);
                }
                let missing = missing - body.len();
                self.unfinished = (missing > 0).then_some((reply, missing));
                if missing == 0 {
                    receive(if is_document { document(&self.line) } else { reply });
                    self.line.clear();
                }
                continue;
            }
            let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
                self.line.extend_from_slice(bytes);
                return;
            };
            let (reply, body_len) = if self.line.is_empty() {
                parse(&bytes[..end])
            } else {
                self.line.extend_from_slice(&bytes[..end]);
                let parsed = parse(&self.line);
                self.line.clear();
                parsed
            };
            bytes = &bytes[end + 1..];
            match body_len {
                None => receive(reply),
                Some(len) => self.unfinished = Some((reply, len + b"\r\n".len())),
            }
        }
    }
}

/// Parses a line without its LF; returns the reply and the length of its body, if it has one.
fn parse(line: &[u8]) -> (Reply, Option<usize>) {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut words = line.split(|&byte| byte == b' ');
    let word = words.next().unwrap_or_default();
    let mut number = || words.next().and_then(decimal).unwrap_or_else(|| refuse(line));
    let reply = match word {
        b"INSERTED" => Reply::Inserted(number()),
        b"RESERVED" => Reply::Reserved(number()),
        b"RESERVED_BATCH" => Reply::Batch(number()),
        b"DELETED_BATCH" => Reply::DeletedBatch(number()),
        // The number is known when the document is.
        b"OK" => Reply::ReadyJobs(0),
        b"TIMED_OUT" => Reply::TimedOut,
        b"NOT_FOUND" => Reply::NotFound,
        b"FOUND" | b"DELETED" | b"TOUCHED" | b"RELEASED" | b"BURIED" | b"KICKED" | b"USING"
        | b"WATCHING" | b"FLUSHED" => Reply::Done,
        _ => refuse(line),
    };
    (reply, body_len(line))
}

/// A page of `list-jobs`, or the statistics of a tube.
fn document(text: &[u8]) -> Reply {
    let lines = text.split(|&byte| byte == b'\n');
    if text.starts_with(b"---\nnext: ") {
        return Reply::Listed(lines.filter(|line| line.starts_with(b"- {")).count() as u64);
    }
    ready_jobs(text)
}

fn ready_jobs(statistics: &[u8]) -> Reply {
    let mut lines = statistics.split(|&byte| byte == b'\n');
    let count = lines.find_map(|line| decimal(line.strip_prefix(b"current-jobs-ready: ")?));
    Reply::ReadyJobs(count.unwrap_or_else(|| refuse(statistics)))
}

fn refuse(line: &[u8]) -> ! {
    panic!("unexpected reply {}", line.escape_ascii());
}
