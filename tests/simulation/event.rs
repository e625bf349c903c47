//! The events of a simulated run, as values. A list of them is a history: replaying it repeats the
//! run. One event is one line of text, so that a history can be read, shortened and kept in a file.

use super::model::ClientNumber;
use crate::harness::driver::Limits;
use crate::harness::fake_disk::{RemoteSetup, to_usize};
use crate::harness::script;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::{FromStr, Split};

/// The options of the server in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Setup {
    /// The largest job allowed, in bytes.
    pub max_job_size: u32,
    /// A job that came back this many times is buried.
    pub bury_after: Option<u64>,
    /// The length of a file of the binlog, in bytes. `None`: jobs are kept in memory only.
    pub file_size: Option<u64>,
    /// The longest time from a write to its sync, in nanoseconds. 0: before each reply; `None`:
    /// never.
    pub sync_within: Option<u64>,
    /// The most bytes that all files may take. `None`: any number.
    pub limit: Option<u64>,
    /// Those of a remote disk: see [`RemoteSetup`]. Without a length of chunks it is local.
    pub chunk_len: Option<u64>,
    /// While this number of bytes waits for it, no command runs.
    pub congested_above: Option<u64>,
    pub eager: Option<u64>,
    /// The bytes of bodies that stay in memory. `None`: all do. The others are read back: at
    /// once, or in the background with `has_threads`.
    pub body_cache: Option<u64>,
    /// Reads of bodies and syncs that no reply waits for are done in the background.
    pub has_threads: bool,
    /// The bounds of steps and iterations.
    pub limits: Limits,
}

/// A part of a setup, by its name in a line.
pub struct Setting(&'static str, pub Of);

pub enum Of {
    Flag(fn(&mut Setup) -> &mut bool),
    Number(fn(&mut Setup) -> &mut Option<u64>),
    /// A limit that a seed may draw, and its range.
    Limit(fn(&mut Limits) -> &mut usize, RangeInclusive<usize>),
}

impl Setting {
    /// Closed connections get all jobs back in the same moment without these limits.
    pub fn is_of_closing(&self) -> bool {
        ["closing-work", "closing-slice", "due-work"].contains(&self.0)
    }
}

/// Steps of 2 to 8 jobs, names or comparisons, and shares of a few commands: so commands take many
/// iterations, and others run between their steps.
pub const SETTINGS: [Setting; 26] = [
    Setting("file-size", Of::Number(|it| &mut it.file_size)),
    Setting("sync-within", Of::Number(|it| &mut it.sync_within)),
    Setting("limit", Of::Number(|it| &mut it.limit)),
    Setting("chunk-len", Of::Number(|it| &mut it.chunk_len)),
    Setting("congested-above", Of::Number(|it| &mut it.congested_above)),
    Setting("eager", Of::Number(|it| &mut it.eager)),
    Setting("body-cache", Of::Number(|it| &mut it.body_cache)),
    Setting("threads", Of::Flag(|it| &mut it.has_threads)),
    Setting("kick-step", Of::Limit(|it| &mut it.jobs_per_kick_step, 1..=8)),
    Setting("batch-step", Of::Limit(|it| &mut it.jobs_per_batch_step, 1..=8)),
    Setting("wakes", Of::Limit(|it| &mut it.wakes_per_step, 1..=3)),
    Setting("touch-step", Of::Limit(|it| &mut it.jobs_per_touch_step, 1..=8)),
    Setting("watch-step", Of::Limit(|it| &mut it.watches_per_step, 1..=6)),
    Setting("list-step", Of::Limit(|it| &mut it.names_per_list_step, 1..=8)),
    Setting("lists-sent", Of::Limit(|it| &mut it.lists_sent_per_tick, 1..=2)),
    Setting("flush-work", Of::Limit(|it| &mut it.first_flush_work, 1..=60)),
    Setting("jobs-compared", Of::Limit(|it| &mut it.jobs_compared_at_once, 1..=8)),
    Setting("ids-looked-up", Of::Limit(|it| &mut it.ids_looked_up_at_once, 1..=8)),
    Setting("pages-per-step", Of::Limit(|it| &mut it.memory_pages_per_step, 1..=2)),
    Setting("closing-work", Of::Limit(|it| &mut it.closing_work, 1..=16)),
    Setting("closing-slice", Of::Limit(|it| &mut it.closing_slice_work, 1..=8)),
    Setting("shared-work", Of::Limit(|it| &mut it.shared_work, 1..=64)),
    Setting("least-share", Of::Limit(|it| &mut it.least_share_work, 1..=20)),
    Setting("due-work", Of::Limit(|it| &mut it.most_due_work, 1..=16)),
    Setting("read-bytes", Of::Limit(|it| &mut it.read_bytes, 20..=400)),
    Setting("bury-after", Of::Number(|it| &mut it.bury_after)),
];

impl Setup {
    /// Returns the setup of a server without a binlog.
    pub fn new(max_job_size: u32) -> Setup {
        Setup { max_job_size, ..Setup::default() }
    }

    /// Returns the same without a binlog.
    pub fn without_binlog(self) -> Setup {
        let Setup { bury_after, limits, .. } = self;
        Setup { bury_after, limits, ..Setup::new(self.max_job_size) }
    }

    pub fn has_binlog(&self) -> bool {
        self.file_size.is_some()
    }

    pub fn remote(&self) -> Option<RemoteSetup> {
        Some(RemoteSetup { chunk_len: to_usize(self.chunk_len?), eager: self.eager })
    }
}

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
    /// The same after this number of further syncs, which fail alone.
    FailSyncsAfter(u64, Crash),
    /// This number of reads of bodies fail: too many files are open.
    FailReads(usize),
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

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setup {}", self.max_job_size)?;
        let (mut it, mut default) = (*self, Limits::DEFAULT);
        for Setting(name, of) in SETTINGS {
            match of {
                Of::Flag(of) if *of(&mut it) => write!(f, " {name}")?,
                Of::Number(of) if let Some(number) = of(&mut it) => write!(f, " {name} {number}")?,
                Of::Limit(of, _) if of(&mut it.limits) != of(&mut default) => {
                    write!(f, " {name} {}", of(&mut it.limits))?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl FromStr for Setup {
    /// The line that is none.
    type Err = String;

    fn from_str(line: &str) -> Result<Setup, String> {
        let parse = || {
            let mut words = line.strip_prefix("setup ")?.split(' ');
            let mut setup = Setup::new(value(&mut words)?);
            while let Some(word) = words.next() {
                match SETTINGS.into_iter().find(|Setting(name, _)| *name == word)?.1 {
                    Of::Flag(of) => *of(&mut setup) = true,
                    Of::Number(of) => *of(&mut setup) = Some(value(&mut words)?),
                    Of::Limit(of, _) => *of(&mut setup.limits) = value(&mut words)?,
                }
            }
            Some(setup)
        };
        parse().ok_or_else(|| line.to_owned())
    }
}

/// Writes a value, or `-` for `None`.
fn text(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn value<T: FromStr>(words: &mut Split<'_, char>) -> Option<T> {
    words.next()?.parse().ok()
}

fn optional<T: FromStr>(words: &mut Split<'_, char>) -> Option<Option<T>> {
    match words.next()? {
        "-" => Some(None),
        word => word.parse().ok().map(Some),
    }
}

fn crash(words: &mut Split<'_, char>) -> Option<Crash> {
    Some(Crash { power_cut: optional(words)?, flipped_bits: value(words)? })
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Connect(client) => write!(f, "connect {client}"),
            Event::Send(client, bytes) => write!(f, "send {client} {}", escape(bytes)),
            Event::HalfClose(client, true) => write!(f, "half-close {client} reported"),
            Event::HalfClose(client, false) => write!(f, "half-close {client} unreported"),
            Event::Disconnect(client) => write!(f, "disconnect {client}"),
            Event::ReadLimit(client, limit) => write!(f, "read-limit {client} {}", text(*limit)),
            Event::EndIteration => write!(f, "end-iteration"),
            Event::Advance(nanos) => write!(f, "advance {nanos}"),
            Event::AdvanceUntilDue => write!(f, "advance-until-due"),
            Event::Suspend(nanos) => write!(f, "suspend {nanos}"),
            Event::ClockOffset(nanos) => write!(f, "clock-offset {nanos}"),
            Event::Drain(true) => write!(f, "drain"),
            Event::Drain(false) => write!(f, "accept-puts"),
            Event::DiskCapacity(bytes) => write!(f, "disk-capacity {}", text(*bytes)),
            Event::FailDiskAfter(changes, crash) => write!(f, "fail-disk-after {changes} {crash}"),
            Event::FailSyncsAfter(syncs, crash) => write!(f, "fail-syncs-after {syncs} {crash}"),
            Event::FailReads(count) => write!(f, "fail-reads {count}"),
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
        write!(f, "{} {}", text(self.power_cut), self.flipped_bits)
    }
}

impl FromStr for Event {
    /// The line that is none.
    type Err = String;

    fn from_str(line: &str) -> Result<Event, String> {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        let words = &mut rest.split(' ');
        let mut parse = || {
            Some(match word {
                "connect" => Event::Connect(value(words)?),
                "send" => {
                    let bytes = script::unescape(rest.split_once(' ')?.1).ok()?;
                    Event::Send(value(words)?, bytes)
                }
                "half-close" => Event::HalfClose(value(words)?, words.next() == Some("reported")),
                "disconnect" => Event::Disconnect(value(words)?),
                "read-limit" => Event::ReadLimit(value(words)?, optional(words)?),
                "end-iteration" => Event::EndIteration,
                "advance" => Event::Advance(value(words)?),
                "advance-until-due" => Event::AdvanceUntilDue,
                "suspend" => Event::Suspend(value(words)?),
                "clock-offset" => Event::ClockOffset(value(words)?),
                "drain" => Event::Drain(true),
                "accept-puts" => Event::Drain(false),
                "disk-capacity" => Event::DiskCapacity(optional(words)?),
                "fail-disk-after" => Event::FailDiskAfter(value(words)?, crash(words)?),
                "fail-syncs-after" => Event::FailSyncsAfter(value(words)?, crash(words)?),
                "fail-reads" => Event::FailReads(value(words)?),
                "acknowledge" => Event::Acknowledge(value(words)?),
                "end-reads" => Event::EndReads(value(words)?),
                "end-sync" => Event::EndSync,
                "lose-leadership" => Event::LoseLeadership(value(words)?),
                "crash" => Event::Crash(crash(words)?),
                "restart" => Event::Restart,
                _ => return None,
            })
        };
        parse().ok_or_else(|| line.to_owned())
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
