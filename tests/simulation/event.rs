//! What happens in a simulated world, as values: a history of them is all that is needed to see
//! it happen again. One event is a line of text, so that a history can be read, cut and kept.

use super::model::ClientNumber;
use std::fmt;
use std::str::FromStr;

/// How the server is started, and on what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The largest job allowed, in bytes.
    pub max_job_size: u32,
    pub binlog: Option<BinlogSetup>,
    /// Among how many connections each turn is shared.
    pub sharers: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinlogSetup {
    /// In bytes.
    pub file_size: u32,
    /// At most so many nanoseconds after a write; 0 is before each reply, none is never.
    pub sync_within: Option<u64>,
}

/// One step of a history. Clients have numbers of their own, which are used again; what concerns
/// a client that is not there does not happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Connect(ClientNumber),
    /// It sends these bytes.
    Send(ClientNumber, Vec<u8>),
    /// It sends nothing more; the server is told before it has read everything, or is not.
    HalfClose(ClientNumber, bool),
    /// Its connection breaks.
    HangUp(ClientNumber),
    /// From now on it takes no more than so many bytes of what it is told, or everything.
    Take(ClientNumber, Option<usize>),
    /// The turn is over: what it has brought is committed and sent.
    Turn,
    /// So many nanoseconds pass.
    Wait(u64),
    /// Time passes until the server wants to be called.
    WaitUntilDue,
    /// So many nanoseconds pass in which the process does not run.
    Sleep(u64),
    /// The time of day is set so many nanoseconds ahead of the time that never jumps.
    ClockOffset(i64),
    /// Puts are refused, or taken again.
    Drain(bool),
    /// No more than so many bytes fit on the disk, or any number.
    Capacity(Option<u64>),
    /// After so many more changes the disk fails, and then the process crashes.
    FailAfter(u64, Crash),
    Crash(Crash),
    /// The server ends in good order and is started again.
    Restart,
}

/// How a process ends that has not been asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// What is not synced is lost, in part or in whole, as this seed says; if none, nothing is.
    pub power_cut: Option<u64>,
    /// So many bits of the files are not what they were.
    pub flipped_bits: u32,
}

/// A line that is no event.
#[derive(Debug)]
pub struct NoEvent(#[expect(dead_code, reason = "to be told when it is unwrapped")] String);

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setup {}", self.max_job_size)?;
        if let Some(BinlogSetup { file_size, sync_within }) = self.binlog {
            write!(f, " {file_size} {}", Optional(sync_within))?;
        }
        if self.sharers > 1 {
            write!(f, " shared {}", self.sharers)?;
        }
        Ok(())
    }
}

struct Optional<T>(Option<T>);

impl<T: fmt::Display> fmt::Display for Optional<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("-"),
        }
    }
}

impl<T: FromStr> FromStr for Optional<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Optional<T>, T::Err> {
        if text == "-" { Ok(Optional(None)) } else { Ok(Optional(Some(text.parse()?))) }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Connect(client) => write!(f, "connect {client}"),
            Event::Send(client, bytes) => write!(f, "send {client} {}", bytes.escape_ascii()),
            Event::HalfClose(client, true) => write!(f, "half-close {client} noticed"),
            Event::HalfClose(client, false) => write!(f, "half-close {client} unnoticed"),
            Event::HangUp(client) => write!(f, "hang-up {client}"),
            Event::Take(client, limit) => write!(f, "take {client} {}", Optional(*limit)),
            Event::Turn => write!(f, "turn"),
            Event::Wait(nanos) => write!(f, "wait {nanos}"),
            Event::WaitUntilDue => write!(f, "wait-until-due"),
            Event::Sleep(nanos) => write!(f, "sleep {nanos}"),
            Event::ClockOffset(nanos) => write!(f, "drift {nanos}"),
            Event::Drain(true) => write!(f, "drain"),
            Event::Drain(false) => write!(f, "take-puts"),
            Event::Capacity(bytes) => write!(f, "capacity {}", Optional(*bytes)),
            Event::FailAfter(changes, crash) => write!(f, "fail-after {changes} {crash}"),
            Event::Crash(crash) => write!(f, "crash {crash}"),
            Event::Restart => write!(f, "restart"),
        }
    }
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", Optional(self.power_cut), self.flipped_bits)
    }
}

impl FromStr for Setup {
    type Err = NoEvent;

    fn from_str(line: &str) -> Result<Setup, NoEvent> {
        let mut words = Words::of(line);
        words.next().filter(|word| *word == "setup").ok_or_else(|| NoEvent(line.to_owned()))?;
        let max_job_size = words.value()?;
        let mut setup = Setup { max_job_size, binlog: None, sharers: 1 };
        while !words.is_over() {
            if words.rest.starts_with("shared ") {
                words.next();
                setup.sharers = words.value()?;
            } else {
                let (file_size, sync_within) = (words.value()?, words.optional()?);
                setup.binlog = Some(BinlogSetup { file_size, sync_within });
            }
        }
        Ok(setup)
    }
}

impl FromStr for Event {
    type Err = NoEvent;

    fn from_str(line: &str) -> Result<Event, NoEvent> {
        let mut words = Words::of(line);
        let word = words.next().unwrap_or_default();
        Ok(match word {
            "connect" => Event::Connect(words.value()?),
            "send" => Event::Send(words.value()?, unescape(words.rest)),
            "half-close" => Event::HalfClose(words.value()?, words.next() == Some("noticed")),
            "hang-up" => Event::HangUp(words.value()?),
            "take" => Event::Take(words.value()?, words.optional()?),
            "turn" => Event::Turn,
            "wait" => Event::Wait(words.value()?),
            "wait-until-due" => Event::WaitUntilDue,
            "sleep" => Event::Sleep(words.value()?),
            "drift" => Event::ClockOffset(words.value()?),
            "drain" => Event::Drain(true),
            "take-puts" => Event::Drain(false),
            "capacity" => Event::Capacity(words.optional()?),
            "fail-after" => Event::FailAfter(words.value()?, words.crash()?),
            "crash" => Event::Crash(words.crash()?),
            "restart" => Event::Restart,
            _ => return Err(NoEvent(line.to_owned())),
        })
    }
}

/// The words of a line.
struct Words<'l> {
    line: &'l str,
    rest: &'l str,
}

impl<'l> Words<'l> {
    fn of(line: &'l str) -> Words<'l> {
        Words { line, rest: line }
    }

    fn is_over(&self) -> bool {
        self.rest.is_empty()
    }

    fn next(&mut self) -> Option<&'l str> {
        if self.is_over() {
            return None;
        }
        let (word, rest) = self.rest.split_once(' ').unwrap_or((self.rest, ""));
        self.rest = rest;
        Some(word)
    }

    fn value<T: FromStr>(&mut self) -> Result<T, NoEvent> {
        let value = self.next().and_then(|word| word.parse().ok());
        value.ok_or_else(|| NoEvent(self.line.to_owned()))
    }

    fn optional<T: FromStr>(&mut self) -> Result<Option<T>, NoEvent> {
        self.value().map(|Optional(value)| value)
    }

    fn crash(&mut self) -> Result<Crash, NoEvent> {
        Ok(Crash { power_cut: self.optional()?, flipped_bits: self.value()? })
    }
}

/// Takes back what `escape_ascii` does.
fn unescape(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let (byte, used) = match (first, after) {
            (b'\\', [b'r', ..]) => (b'\r', 2),
            (b'\\', [b'n', ..]) => (b'\n', 2),
            (b'\\', [b't', ..]) => (b'\t', 2),
            (b'\\', [b'x', high, low, ..]) => {
                let digits = [*high, *low];
                let text = str::from_utf8(&digits).unwrap_or("00");
                (u8::from_str_radix(text, 16).unwrap_or(0), 4)
            }
            (b'\\', [other, ..]) => (*other, 2),
            _ => (first, 1),
        };
        bytes.push(byte);
        rest = &rest[used..];
    }
    bytes
}
