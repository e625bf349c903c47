//! Replies cut out of the bytes of a connection, wherever the reads end. Bodies of jobs are
//! skipped.

/// What a server may say to a benchmark; anything else ends it.
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
    /// `OK bytes`, with the statistics of a tube: so many of its jobs are ready
    ReadyJobs(u64),
    /// What was asked has been done, or found.
    Done,
}

/// Where the bytes that were read have ended.
#[derive(Debug, Default)]
pub struct Framing {
    /// The beginning of a line, or of statistics, whose end has not come yet.
    line: Vec<u8>,
    /// A reply whose body has not come yet, and how many bytes of that are missing.
    unfinished: Option<(Reply, usize)>,
}

impl Framing {
    /// Calls `hear` with each reply that these bytes complete.
    pub fn cut(&mut self, mut bytes: &[u8], mut hear: impl FnMut(Reply)) {
        while !bytes.is_empty() {
            if let Some((reply, missing)) = self.unfinished {
                let (body, rest) = bytes.split_at(missing.min(bytes.len()));
                bytes = rest;
                let is_told = matches!(reply, Reply::ReadyJobs(_));
                if is_told {
                    self.line.extend_from_slice(body);
                }
                let missing = missing - body.len();
                self.unfinished = (missing > 0).then_some((reply, missing));
                if missing == 0 {
                    hear(if is_told { ready_jobs(&self.line) } else { reply });
                    self.line.clear();
                }
                continue;
            }
            let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
                self.line.extend_from_slice(bytes);
                return;
            };
            let (reply, body_size) = if self.line.is_empty() {
                parse(&bytes[..end])
            } else {
                self.line.extend_from_slice(&bytes[..end]);
                let parsed = parse(&self.line);
                self.line.clear();
                parsed
            };
            bytes = &bytes[end + 1..];
            match body_size {
                None => hear(reply),
                Some(size) => self.unfinished = Some((reply, size + b"\r\n".len())),
            }
        }
    }
}

/// A line without its LF to a reply, and the size of the body if it has one.
fn parse(line: &[u8]) -> (Reply, Option<usize>) {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut words = line.split(|&byte| byte == b' ');
    let word = words.next().unwrap_or_default();
    let mut number = || words.next().and_then(decimal).unwrap_or_else(|| refuse(line));
    match word {
        b"INSERTED" => (Reply::Inserted(number()), None),
        b"RESERVED" => (Reply::Reserved(number()), Some(size(number()))),
        b"FOUND" => {
            number();
            (Reply::Done, Some(size(number())))
        }
        // How many is known when the body is.
        b"OK" => (Reply::ReadyJobs(0), Some(size(number()))),
        b"TIMED_OUT" => (Reply::TimedOut, None),
        b"NOT_FOUND" => (Reply::NotFound, None),
        b"DELETED" | b"TOUCHED" | b"RELEASED" | b"BURIED" | b"KICKED" | b"USING" | b"WATCHING" => {
            (Reply::Done, None)
        }
        _ => refuse(line),
    }
}

fn ready_jobs(statistics: &[u8]) -> Reply {
    let mut lines = statistics.split(|&byte| byte == b'\n');
    let count = lines.find_map(|line| decimal(line.strip_prefix(b"current-jobs-ready: ")?));
    Reply::ReadyJobs(count.unwrap_or_else(|| refuse(statistics)))
}

fn decimal(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0_u64, |value, &byte| {
        byte.is_ascii_digit().then(|| value * 10 + u64::from(byte - b'0'))
    })
}

fn size(number: u64) -> usize {
    usize::try_from(number).expect("a body fits into memory")
}

fn refuse(line: &[u8]) -> ! {
    panic!("the server says {:?}", String::from_utf8_lossy(line));
}
