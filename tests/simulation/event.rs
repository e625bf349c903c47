//! The events of a simulated run, as values. A list of them is a history: replaying it repeats the
//! run. One event is one line of text, so that a history can be read, shortened and kept in a file.

use super::model::ClientNumber;
use crate::harness::driver::Limits;
pub use crate::harness::fake_disk::RemoteSetup;
use crate::harness::script;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

/// The options of the server in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// The largest job allowed, in bytes.
    pub max_job_size: u32,
    /// `None`: jobs are kept in memory only.
    pub binlog: Option<BinlogSetup>,
    /// The bounds of steps and iterations.
    pub limits: Limits,
    /// A job that came back this many times is buried.
    pub bury_after: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BinlogSetup {
    /// In bytes.
    pub file_size: u32,
    /// The longest time from a write to its sync, in nanoseconds. 0: before each reply; `None`:
    /// never.
    pub sync_within: Option<u64>,
    /// The most bytes that all files may take. `None`: any number.
    pub limit: Option<u64>,
    /// `None`: the disk is local.
    pub remote: Option<RemoteSetup>,
    /// The bytes of bodies that stay in memory. `None`: all do. The others are read back: at
    /// once, or in the background with `has_threads`.
    pub body_cache: Option<u64>,
    /// Reads of bodies and syncs that no reply waits for are done in the background.
    pub has_threads: bool,
}

/// A limit that a seed may draw.
pub struct Drawn {
    pub name: &'static str,
    pub of: fn(&mut Limits) -> &mut usize,
    pub range: RangeInclusive<usize>,
}

/// Steps of 2 to 8 jobs, names or comparisons, and shares of a few commands: so commands take many
/// iterations, and others run between their steps.
pub const DRAWN: [Drawn; 17] = [
    Drawn { name: "kick-step", of: |it| &mut it.jobs_per_kick_step, range: 1..=8 },
    Drawn { name: "reserve-step", of: |it| &mut it.jobs_per_reserve_step, range: 1..=8 },
    Drawn { name: "wakes", of: |it| &mut it.wakes_per_step, range: 1..=3 },
    Drawn { name: "touch-step", of: |it| &mut it.jobs_per_touch_step, range: 1..=8 },
    Drawn { name: "watch-step", of: |it| &mut it.watches_per_step, range: 1..=6 },
    Drawn { name: "list-step", of: |it| &mut it.names_per_list_step, range: 1..=8 },
    Drawn { name: "lists-sent", of: |it| &mut it.lists_sent_per_tick, range: 1..=2 },
    Drawn { name: "flush-work", of: |it| &mut it.first_flush_work, range: 1..=60 },
    Drawn { name: "jobs-compared", of: |it| &mut it.jobs_compared_at_once, range: 1..=8 },
    Drawn { name: "ids-looked-up", of: |it| &mut it.ids_looked_up_at_once, range: 1..=8 },
    Drawn { name: "pages-per-step", of: |it| &mut it.memory_pages_per_step, range: 1..=2 },
    Drawn { name: "closing-work", of: |it| &mut it.closing_work, range: 1..=16 },
    Drawn { name: "closing-slice", of: |it| &mut it.closing_slice_work, range: 1..=8 },
    Drawn { name: "shared-work", of: |it| &mut it.shared_work, range: 1..=64 },
    Drawn { name: "least-share", of: |it| &mut it.least_share_work, range: 1..=20 },
    Drawn { name: "due-work", of: |it| &mut it.most_due_work, range: 1..=16 },
    Drawn { name: "read-bytes", of: |it| &mut it.read_bytes, range: 20..=400 },
];

/// One event. The numbers of clients are used again. An event for a client that is not connected
/// has no effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Connect(ClientNumber),
    /// The client sends bytes.
    Send(ClientNumber, Vec<u8>),
    /// The client shuts down its sending side. `true`: the kernel reports it to the server before
    /// the server has read everything.
    HalfClose(ClientNumber, bool),
    /// The connection breaks.
    Disconnect(ClientNumber),
    /// From now on the client reads at most this many bytes of its replies. `None`: all.
    ReadLimit(ClientNumber, Option<usize>),
    /// The iteration of the event loop ends with a commit and a flush.
    EndIteration,
    /// This many nanoseconds pass.
    Advance(u64),
    /// Time passes until the engine's next timer is due.
    AdvanceUntilDue,
    /// This many nanoseconds pass while the process is suspended.
    Suspend(u64),
    /// The wall clock is set: from now on it is this many nanoseconds ahead of the monotonic clock.
    ClockOffset(i64),
    /// Drain mode is switched on or off.
    Drain(bool),
    /// At most this many bytes fit on a local disk. A remote one refuses puts. `None`: any number
    /// fits.
    DiskCapacity(Option<u64>),
    /// The disk fails after this number of further changes, and then the process crashes.
    FailDiskAfter(u64, Crash),
    /// The remote disk stores and acknowledges at most this many changes.
    Acknowledge(usize),
    /// The disk ends at most this many of the reads of bodies that were begun.
    EndReads(usize),
    /// The disk ends the background sync.
    EndSync,
    /// Another server leads: the remote disk refuses all changes from now on. The seed decides how
    /// many of those that wait were stored before.
    LoseLeadership(u64),
    Crash(Crash),
    /// The server exits and is started again.
    Restart,
}

/// What a crash does to the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// The seed that decides which bytes without a sync, or which changes without an
    /// acknowledgement, are lost. `None`: none.
    pub power_cut: Option<u64>,
    /// The number of bits that change.
    pub flipped_bits: u32,
}

/// A line that is not an event.
#[derive(Debug)]
pub struct InvalidLine(#[expect(dead_code, reason = "printed by unwrap")] String);

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setup {}", self.max_job_size)?;
        if let Some(BinlogSetup {
            file_size,
            sync_within,
            limit,
            remote,
            body_cache,
            has_threads,
        }) = self.binlog
        {
            write!(f, " {file_size} {}", Optional(sync_within))?;
            if let Some(limit) = limit {
                write!(f, " limit {limit}")?;
            }
            if let Some(RemoteSetup { chunk_len, congested_above, is_batched, eager }) = remote {
                let (congested_above, eager) = (Optional(congested_above), Optional(eager));
                write!(f, " remote {chunk_len} {congested_above} {is_batched} {eager}")?;
            }
            if let Some(bytes) = body_cache {
                write!(f, " body-cache {bytes}")?;
            }
            if has_threads {
                write!(f, " threads")?;
            }
        }
        for Drawn { name, of, .. } in DRAWN {
            let (mut own, mut default) = (self.limits, Limits::DEFAULT);
            if of(&mut own) != of(&mut default) {
                write!(f, " {name} {}", of(&mut own))?;
            }
        }
        if let Some(limit) = self.bury_after {
            write!(f, " bury-after {limit}")?;
        }
        Ok(())
    }
}

/// A value, or `-` for `None`.
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
            Event::Send(client, bytes) => write!(f, "send {client} {}", escape(bytes)),
            Event::HalfClose(client, true) => write!(f, "half-close {client} reported"),
            Event::HalfClose(client, false) => write!(f, "half-close {client} unreported"),
            Event::Disconnect(client) => write!(f, "disconnect {client}"),
            Event::ReadLimit(client, limit) => {
                write!(f, "read-limit {client} {}", Optional(*limit))
            }
            Event::EndIteration => write!(f, "end-iteration"),
            Event::Advance(nanos) => write!(f, "advance {nanos}"),
            Event::AdvanceUntilDue => write!(f, "advance-until-due"),
            Event::Suspend(nanos) => write!(f, "suspend {nanos}"),
            Event::ClockOffset(nanos) => write!(f, "clock-offset {nanos}"),
            Event::Drain(true) => write!(f, "drain"),
            Event::Drain(false) => write!(f, "accept-puts"),
            Event::DiskCapacity(bytes) => write!(f, "disk-capacity {}", Optional(*bytes)),
            Event::FailDiskAfter(changes, crash) => write!(f, "fail-disk-after {changes} {crash}"),
            Event::Acknowledge(changes) => write!(f, "acknowledge {changes}"),
            Event::EndReads(count) => write!(f, "end-reads {count}"),
            Event::EndSync => write!(f, "end-sync"),
            Event::LoseLeadership(seed) => write!(f, "lose-leadership {seed}"),
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
    type Err = InvalidLine;

    fn from_str(line: &str) -> Result<Setup, InvalidLine> {
        let mut words = Words::of(line);
        words.next().filter(|word| *word == "setup").ok_or_else(|| InvalidLine(line.to_owned()))?;
        let max_job_size = words.value()?;
        let limits = Limits::DEFAULT;
        let mut setup = Setup { max_job_size, binlog: None, limits, bury_after: None };
        while !words.rest.is_empty() {
            let word = words.rest.split(' ').next().unwrap_or_default();
            if let Some(drawn) = DRAWN.iter().find(|drawn| drawn.name == word) {
                words.next();
                *(drawn.of)(&mut setup.limits) = words.value()?;
            } else if words.rest.starts_with("bury-after ") {
                words.next();
                setup.bury_after = Some(words.value()?);
            } else {
                setup.binlog = Some(words.binlog()?);
            }
        }
        Ok(setup)
    }
}

impl FromStr for Event {
    type Err = InvalidLine;

    fn from_str(line: &str) -> Result<Event, InvalidLine> {
        let mut words = Words::of(line);
        let word = words.next().unwrap_or_default();
        Ok(match word {
            "connect" => Event::Connect(words.value()?),
            "send" => Event::Send(words.value()?, words.bytes()?),
            "half-close" => Event::HalfClose(words.value()?, words.next() == Some("reported")),
            "disconnect" => Event::Disconnect(words.value()?),
            "read-limit" => Event::ReadLimit(words.value()?, words.optional()?),
            "end-iteration" => Event::EndIteration,
            "advance" => Event::Advance(words.value()?),
            "advance-until-due" => Event::AdvanceUntilDue,
            "suspend" => Event::Suspend(words.value()?),
            "clock-offset" => Event::ClockOffset(words.value()?),
            "drain" => Event::Drain(true),
            "accept-puts" => Event::Drain(false),
            "disk-capacity" => Event::DiskCapacity(words.optional()?),
            "fail-disk-after" => Event::FailDiskAfter(words.value()?, words.crash()?),
            "acknowledge" => Event::Acknowledge(words.value()?),
            "end-reads" => Event::EndReads(words.value()?),
            "end-sync" => Event::EndSync,
            "lose-leadership" => Event::LoseLeadership(words.value()?),
            "crash" => Event::Crash(words.crash()?),
            "restart" => Event::Restart,
            _ => return Err(InvalidLine(line.to_owned())),
        })
    }
}

/// Splits a line into words.
struct Words<'l> {
    line: &'l str,
    rest: &'l str,
}

impl<'l> Words<'l> {
    fn of(line: &'l str) -> Words<'l> {
        Words { line, rest: line }
    }

    fn next(&mut self) -> Option<&'l str> {
        if self.rest.is_empty() {
            return None;
        }
        let (word, rest) = self.rest.split_once(' ').unwrap_or((self.rest, ""));
        self.rest = rest;
        Some(word)
    }

    fn value<T: FromStr>(&mut self) -> Result<T, InvalidLine> {
        let value = self.next().and_then(|word| word.parse().ok());
        value.ok_or_else(|| InvalidLine(self.line.to_owned()))
    }

    fn optional<T: FromStr>(&mut self) -> Result<Option<T>, InvalidLine> {
        self.value().map(|Optional(value)| value)
    }

    fn binlog(&mut self) -> Result<BinlogSetup, InvalidLine> {
        let (file_size, sync_within) = (self.value()?, self.optional()?);
        let mut setup = BinlogSetup {
            file_size,
            sync_within,
            limit: None,
            remote: None,
            body_cache: None,
            has_threads: false,
        };
        if self.rest.starts_with("limit ") {
            self.next();
            setup.limit = Some(self.value()?);
        }
        if self.rest.starts_with("remote ") {
            self.next();
            setup.remote = Some(RemoteSetup {
                chunk_len: self.value()?,
                congested_above: self.optional()?,
                is_batched: self.value()?,
                eager: self.optional()?,
            });
        }
        if self.rest.starts_with("body-cache ") {
            self.next();
            setup.body_cache = Some(self.value()?);
        }
        if self.rest.starts_with("threads") {
            self.next();
            setup.has_threads = true;
        }
        Ok(setup)
    }

    fn bytes(&self) -> Result<Vec<u8>, InvalidLine> {
        script::unescape(self.rest).map_err(|_| InvalidLine(self.line.to_owned()))
    }

    fn crash(&mut self) -> Result<Crash, InvalidLine> {
        Ok(Crash { power_cut: self.optional()?, flipped_bits: self.value()? })
    }
}

/// The shortest run of equal bytes that is written as a count.
const SHORTEST_RUN: usize = 12;
/// The longest piece of text that is looked for in a repetition.
const LONGEST_PIECE: usize = 32;

/// Writes bytes as conversations do. A piece that is repeated is written once: `\(300*x)`.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, count) = repetition(rest);
        let written = script::escape(&rest[..piece]);
        text += &match count {
            1 => written,
            _ => format!("\\({count}*{})", written.replace(')', "\\x29")),
        };
        rest = &rest[piece * count..];
    }
    text
}

/// Returns the length of a piece with which `bytes` begin, and how often it is repeated there.
fn repetition(bytes: &[u8]) -> (usize, usize) {
    for piece in 1..=LONGEST_PIECE.min(bytes.len() / 2) {
        let count = bytes.chunks_exact(piece).take_while(|it| *it == &bytes[..piece]).count();
        if count > 1 && count * piece >= SHORTEST_RUN {
            return (piece, count);
        }
    }
    (1, 1)
}
