//! The state and the buffers of one client connection.
//!
//! [`Conn::next_step`] splits the bytes that arrive into lines and bodies, in any chunks. The
//! module `server` runs the lines as commands. Memory is bounded: an incomplete line or small body
//! is buffered, and anything longer than allowed is dropped as it arrives. While a client's
//! commands cannot run, its socket is not read: at most the rest of one read, 68 KiB, is buffered.
//! A large body is not buffered: its bytes go straight to its slot among the bodies of jobs.

use super::binlog::disk::Progress;
use super::collections::secondary_map::SecondaryMap;
use super::keys::{ConnKey, JobKey, WatchKey};
use super::protocol::batch::{Batch, ReplySize};
use super::protocol::command::{LINE_MAX, LineTail, TAGGED_LINE_MAX, line_max, may_be_long};
use super::protocol::input::Input;
use super::protocol::output::{Output, Pool};
use super::protocol::reply::Reply;
use super::queue::Kick;
use super::queue::body::{Bodies, Body, LARGE};
use super::queue::browse::SelectionScan;
use super::queue::job::JobParams;
use super::queue::listing::ListText;
use super::queue::read_body::{BodyRef, Grant, ReadBody, ReplyClass};
use super::queue::touch::TouchAll;
use super::queue::unique::NewKey;
use super::queue::waiters::Wait;
use super::text;
use super::text::CR_LF;
use super::time::Nanos;
use std::collections::TryReserveError;
use std::io::IoSlice;
use std::ops::{Index, IndexMut, Range};
use std::rc::Rc;

/// All connections.
#[derive(Debug)]
pub struct Conns {
    /// By the keys of the queue's clients.
    by_key: SecondaryMap<ConnKey, Conn>,
    pool: Pool,
    /// The connections that the loop must serve at the end of the iteration.
    dirty: Vec<ConnKey>,
    /// The connections with output that is held back.
    held: Vec<ConnKey>,
    /// The memory of unused input and unsent text, in bytes.
    buffered_bytes: usize,
    /// The connections are crowded when `buffered_bytes` reaches this.
    buffer_limit: usize,
    /// The cost of the replies since it was charged last.
    reply_cost: usize,
}

#[derive(Debug, Default)]
pub struct Conn {
    /// The part of a command that the connection is reading or running.
    pub phase: Phase,
    /// Bytes that have arrived and are not used yet.
    pub input: Input,
    /// The input has commands that could not run: the client waits or does not read its replies, or
    /// its share of the iteration is used up.
    pub has_backlog: bool,
    /// Bytes for the client.
    pub output: Output,
    /// The client has shut down its sending side. It does not wait any more.
    pub is_half_closed: bool,
    /// Everything that the client sent has arrived.
    pub input_ended: bool,
    /// The last put had a body of at least [`Conn::WORTH_TWO_READS`] bytes.
    pub sends_large_bodies: bool,
    /// The unsent bytes, when [`Conns::next_stalled`] last looked, of an output with bodies that were read back.
    unread: usize,
    /// The connection is in [`Conns::dirty`].
    is_dirty: bool,
    /// The number of bytes at the front of the input that have no end of a line.
    searched: u16,
}

/// The activity of a connection, as metrics show it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Between two commands.
    Idle,
    /// In the middle of a command, or with commands to run.
    Receiving,
    /// Waiting for a job.
    Waiting,
    /// With replies that the client has not read yet.
    Sending,
    /// About to be closed.
    Closing,
}

impl Activity {
    /// All variants, in their order.
    pub const ALL: [Activity; 5] = [
        Activity::Idle,
        Activity::Receiving,
        Activity::Waiting,
        Activity::Sending,
        Activity::Closing,
    ];

    /// Returns the name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Activity::Idle => "idle",
            Activity::Receiving => "receiving",
            Activity::Waiting => "waiting",
            Activity::Sending => "sending",
            Activity::Closing => "closing",
        }
    }
}

/// The part of a command that a connection is reading or running.
#[derive(Debug, Default)]
pub enum Phase {
    /// A command line.
    #[default]
    ReadingLine,
    /// The rest of a line that is too long. Only its tail is kept.
    SkippingLine(LineTail),
    /// The rest of a long line for which there is no memory.
    SkippingLongLine,
    /// The body of a job.
    ReadingBody(Put),
    /// The body of a job, which is read straight into its slot.
    ReadingLargeBody(LargePut),
    /// A body that is dropped.
    SkippingBody {
        /// The number of bytes that are still to arrive.
        left: usize,
        /// The reply at the end of the body.
        reason: Refusal,
    },
    /// A command that runs in steps, which need no input.
    InSteps(Continuation),
    /// A list of more than 1,024 tubes, which is shared by several connections.
    ListingTubes,
    /// A reserve that has no reply yet, and the end of its timeout.
    Waiting(ReserveKind, Nanos),
    /// A reply whose bodies wait for memory or for the disk.
    ReadingBodies(Box<WantedBodies>),
    /// A `flush-tube` or `flush-buried` of more jobs than one step allows.
    Flushing,
    /// Nothing: the connection is closed when its output is sent.
    Closing,
}

impl Phase {
    /// Returns whether the connection reads a command or runs one in steps. It waits for no job, list
    /// or flush.
    fn is_runnable(&self) -> bool {
        match self {
            Phase::ReadingLine
            | Phase::SkippingLine(_)
            | Phase::SkippingLongLine
            | Phase::ReadingBody(_)
            | Phase::ReadingLargeBody(_)
            | Phase::SkippingBody { .. }
            | Phase::InSteps(_) => true,
            Phase::ListingTubes
            | Phase::Waiting(..)
            | Phase::ReadingBodies(_)
            | Phase::Flushing
            | Phase::Closing => false,
        }
    }
}

/// The rest of a command that does more than one step allows. It runs in the next iterations.
#[derive(Debug)]
pub enum Continuation {
    /// A kick of many jobs.
    Kick(Kick),
    /// A reserve over many tubes.
    Reserve(Wait, ReserveKind),
    /// A `reserve-batch` that has reserved some jobs, and the end of its timeout.
    FillBatch(Batch, Nanos),
    /// A `touch-all` of many jobs.
    TouchAll(TouchAll),
    /// A `list-jobs` or `peek-batch` that compares many jobs.
    Select(Box<SelectionScan>, JobPart),
    /// A list of more than 1,024 watched tubes, with the watch that is listed next.
    ListWatched(ListText, WatchKey),
}

/// The kind of a reserve, which determines its replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveKind {
    /// `reserve` and `reserve-with-timeout`: one job.
    Job,
    /// `reserve-batch`: at most this number of jobs, in one reply.
    Batch(usize),
}

impl ReserveKind {
    /// Returns the reply if no job comes before the timeout.
    pub fn timeout_reply(self) -> Reply<'static> {
        match self {
            ReserveKind::Job => Reply::TimedOut,
            ReserveKind::Batch(_) => Reply::ReservedBatch { count: 0 },
        }
    }
}

/// A reply whose bodies are not all in memory. It waits until there is memory for it, then for the disk.
#[derive(Debug)]
pub struct WantedBodies {
    pub answer: Answer,
    pub bodies: Vec<WantedBody>,
    pub class: ReplyClass,
    /// The bytes of the cold bodies.
    pub cold_bytes: u64,
    /// The memory for the bodies that are not read yet, once there was enough for all.
    pub grant: Option<Grant>,
    /// All bodies before this one are read or with the disk.
    pub next: usize,
    /// The bodies that are with the disk.
    pub reading: usize,
    /// The connection is in the list of turns.
    pub has_turn: bool,
    /// The bytes that may be read for it in this turn.
    pub turn_bytes: usize,
    /// When the client has asked for them.
    pub asked_at: Nanos,
    /// The reply was not made at once. The TTRs of its jobs begin with it.
    pub has_waited: bool,
}

/// One of these bodies.
#[derive(Debug)]
pub struct WantedBody {
    pub job: JobKey,
    pub id: u64,
    pub source: BodySource,
}

/// Where a reply gets a body from.
#[derive(Debug)]
pub enum BodySource {
    /// From the job, if that is still there.
    Job,
    /// From its record, which must be read.
    Disk,
    Read(Rc<ReadBody>),
    /// It cannot be read.
    Nowhere,
}

/// A reply with bodies.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    /// To `peek` and its variants.
    Found,
    /// To `peek-batch`, with the id for the next page.
    FoundBatch { next: u64 },
    /// To `reserve-job`.
    ReservedById,
    /// To the other reserves. If no body can be read, they go on until their timeout ends.
    Reserved { kind: ReserveKind, until: Nanos },
}

impl Answer {
    /// Returns whether the client has reserved the jobs.
    pub fn is_reserved(self) -> bool {
        match self {
            Answer::Found | Answer::FoundBatch { .. } => false,
            Answer::ReservedById | Answer::Reserved { .. } => true,
        }
    }

    /// Returns the part of the reply that has this job.
    pub fn reply(self, id: u64, body: BodyRef<'_>) -> Reply<'_> {
        if self.is_reserved() { Reply::Reserved { id, body } } else { Reply::Found { id, body } }
    }
}

/// The part of each selected job that the reply has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobPart {
    /// The values that `list-jobs` and `stats-job` show.
    Stats,
    /// The body, as in `peek-batch`.
    Body,
}

/// The reason for which a body is dropped.
#[derive(Clone, Copy, Debug)]
pub enum Refusal {
    JobTooBig,
    OutOfMemory,
    /// There is no memory, and the server would refuse the job anyway.
    Draining,
}

impl From<Refusal> for Reply<'_> {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::JobTooBig => Reply::JobTooBig,
            Refusal::OutOfMemory => Reply::OutOfMemory,
            Refusal::Draining => Reply::Draining,
        }
    }
}

/// A put whose body is arriving.
#[derive(Debug)]
pub struct Put {
    /// The id of the new job.
    pub id: u64,
    pub params: JobParams,
    /// The length of the body with CR LF, in bytes.
    pub full_len: u32,
    /// The tube of a `put-in-tube`, or `None` for the tube that the connection uses.
    pub tube: Option<Box<str>>,
    /// The key of a unique job.
    pub unique: Option<NewKey>,
}

/// A put whose body is at least [`LARGE`] bytes long and is arriving.
#[derive(Debug)]
pub struct LargePut {
    pub put: Put,
    /// The slot of the body.
    pub body: Body,
    /// The number of bytes that have arrived.
    pub filled: usize,
}

/// Access to the output of a connection.
#[derive(Debug)]
pub struct OutputHandle<'a> {
    conn: &'a mut Conn,
    pool: &'a mut Pool,
    bodies: &'a mut Bodies,
    buffered_bytes: &'a mut usize,
    output_limit: usize,
    /// The output was held back for too long.
    is_overdue: bool,
}

/// The actions that the event loop takes for a connection.
#[derive(Clone, Copy, Debug)]
pub struct Actions {
    /// Read from the socket.
    pub read: bool,
    /// Run buffered commands.
    pub run: bool,
    /// Write to the socket.
    pub write: bool,
    /// Close the connection.
    pub close: bool,
}

/// The next step for the input of a connection.
#[derive(Debug)]
pub enum Step<'a> {
    /// A whole line, without its CR LF.
    Line(&'a [u8]),
    /// The end of a line that was too long.
    TooLongLine(LineTail),
    /// The end of a long line for which there was no memory.
    SkippedLongLine,
    /// A whole body, which may not end in CR LF.
    Put(Put, &'a [u8]),
    /// The beginning of a large body, which has no slot yet.
    BeginBody(Put),
    /// The next bytes of a large body.
    BodyPart(&'a [u8]),
    /// The end of a dropped body, and the reply to it.
    SkippedBody(Refusal),
    /// The rest of a command that runs in steps. It was taken out of the phase.
    Continue(Continuation),
}

impl Conn {
    /// A client with this many unsent bytes does not read its replies: its commands do not run.
    const OUTPUT_LIMIT: usize = 256 * 1024;

    /// Copying a body of this length costs more than a second read, which goes straight to its
    /// slot.
    pub const WORTH_TWO_READS: usize = 16 * 1024;

    /// Returns the memory of the input and the output in bytes, without bodies and lists, which are
    /// shared.
    fn buffered_bytes(&self) -> usize {
        self.input.capacity() + self.output.text_len()
    }

    fn mark_dirty(&mut self, own_key: ConnKey, dirty: &mut Vec<ConnKey>) {
        if !std::mem::replace(&mut self.is_dirty, true) {
            dirty.push(own_key);
        }
    }

    /// Returns the actions for the connection. Its commands run while fewer than `output_limit`
    /// bytes are unsent.
    pub fn actions(&self, output_limit: usize) -> Actions {
        let is_runnable = self.can_run(output_limit);
        Actions {
            read: is_runnable && !self.has_backlog && !self.input_ended,
            run: is_runnable && self.has_backlog,
            write: self.output.sendable_len() > 0,
            close: self.is_finished(),
        }
    }

    /// Returns the activity of the connection.
    pub fn activity(&self) -> Activity {
        match self.phase {
            Phase::Closing => Activity::Closing,
            _ if !self.output.is_empty() => Activity::Sending,
            Phase::Waiting(..) => Activity::Waiting,
            Phase::ReadingLine if self.input.is_empty() => Activity::Idle,
            Phase::ReadingLine
            | Phase::SkippingLine(_)
            | Phase::SkippingLongLine
            | Phase::ReadingBody(_)
            | Phase::ReadingLargeBody(_)
            | Phase::SkippingBody { .. }
            | Phase::InSteps(_)
            | Phase::ListingTubes
            | Phase::ReadingBodies(_)
            | Phase::Flushing => Activity::Receiving,
        }
    }

    /// Returns whether commands of the connection can run.
    pub fn can_run(&self, output_limit: usize) -> bool {
        self.phase.is_runnable() && self.output.len() < output_limit
    }

    /// Returns whether the connection can be closed: it has no more input, no command and no
    /// output.
    fn is_finished(&self) -> bool {
        let has_ended = self.phase.is_runnable() && self.input_ended && !self.has_backlog;
        (has_ended || matches!(self.phase, Phase::Closing)) && self.output.is_empty()
    }

    /// Returns whether there is a step to run, given this input.
    pub fn has_step(&self, input: &[u8]) -> bool {
        !input.is_empty() || matches!(self.phase, Phase::InSteps(_))
    }

    /// Takes the bytes of one step from the front of `input`. Returns `None` if the step needs more
    /// bytes, or if no command can run.
    ///
    /// Without `has_memory`, a line of more than 512 bytes is skipped unless all of it has arrived.
    pub fn next_step<'a>(
        &mut self,
        input: &mut &'a [u8],
        output_limit: usize,
        has_memory: bool,
    ) -> Option<Step<'a>> {
        if !self.can_run(output_limit) {
            return None;
        }
        match &mut self.phase {
            Phase::ReadingLine => self.next_line(input, has_memory),
            Phase::SkippingLine(tail) => {
                let tail = *tail;
                self.skip_line(tail, input)
            }
            Phase::SkippingLongLine => self.skip_long_line(input),
            Phase::ReadingBody(put) if put.full_len as usize >= LARGE => {
                Some(Step::BeginBody(self.take_put()))
            }
            Phase::ReadingLargeBody(large) => {
                let missing = large.put.full_len as usize - large.filled;
                let (part, rest) = input.split_at(input.len().min(missing));
                *input = rest;
                Some(Step::BodyPart(part))
            }
            Phase::ReadingBody(put) => {
                let (body, rest) = input.split_at_checked(put.full_len as usize)?;
                *input = rest;
                Some(Step::Put(self.take_put(), body))
            }
            Phase::SkippingBody { left, reason } => {
                let dropped = input.len().min(*left);
                *input = &input[dropped..];
                *left -= dropped;
                if *left > 0 {
                    return None;
                }
                let reason = *reason;
                self.phase = Phase::ReadingLine;
                Some(Step::SkippedBody(reason))
            }
            Phase::InSteps(_) => Some(Step::Continue(self.take_continuation())),
            Phase::ListingTubes
            | Phase::Waiting(..)
            | Phase::ReadingBodies(_)
            | Phase::Flushing
            | Phase::Closing => None,
        }
    }

    /// Takes the put whose body is arriving. The connection reads a line next.
    fn take_put(&mut self) -> Put {
        let Phase::ReadingBody(put) = std::mem::take(&mut self.phase) else {
            unreachable!("the phase was just matched")
        };
        put
    }

    /// Takes the command that runs in steps. The connection reads a line next.
    fn take_continuation(&mut self) -> Continuation {
        let Phase::InSteps(continuation) = std::mem::take(&mut self.phase) else {
            unreachable!("the phase was just matched")
        };
        continuation
    }

    fn next_line<'a>(&mut self, input: &mut &'a [u8], has_memory: bool) -> Option<Step<'a>> {
        let line_max = line_max(input);
        let window = &input[..input.len().min(line_max)];
        // The last byte that was searched may be the CR.
        let from = usize::from(std::mem::take(&mut self.searched)).saturating_sub(1);
        if let Some(length) = find_line_end(&window[from..]) {
            let (line, rest) = input.split_at(from + length);
            *input = &rest[CR_LF.len()..];
            if line.len() + CR_LF.len() > LINE_MAX && !may_be_long(line) {
                return Some(Step::TooLongLine(line.into()));
            }
            return Some(Step::Line(line));
        }
        if window.len() < line_max {
            if window.len() >= TAGGED_LINE_MAX && !has_memory {
                return self.skip_long_line(input);
            }
            self.searched = u16::try_from(window.len()).expect("a line has at most 21,015 bytes");
            return None;
        }
        self.skip_line(LineTail::default(), input)
    }

    /// `tail` is the tail of the bytes that were dropped.
    fn skip_line<'a>(&mut self, mut tail: LineTail, input: &mut &'a [u8]) -> Option<Step<'a>> {
        if let Some(length) = find_line_end(input) {
            tail.add(&input[..length]);
            *input = &input[length + CR_LF.len()..];
            self.phase = Phase::ReadingLine;
            return Some(Step::TooLongLine(tail));
        }
        // A CR at the end may be the first half of the line's end.
        let kept = usize::from(input.ends_with(b"\r"));
        let (dropped, rest) = input.split_at(input.len() - kept);
        tail.add(dropped);
        *input = rest;
        self.phase = Phase::SkippingLine(tail);
        None
    }

    /// Skips a line up to its end.
    fn skip_long_line<'a>(&mut self, input: &mut &'a [u8]) -> Option<Step<'a>> {
        self.phase = Phase::SkippingLongLine;
        if let Some(length) = find_line_end(input) {
            *input = &input[length + CR_LF.len()..];
            self.phase = Phase::ReadingLine;
            return Some(Step::SkippedLongLine);
        }
        *input = &input[input.len() - usize::from(input.ends_with(b"\r"))..];
        None
    }

    /// Checks that the buffered input is an incomplete line or body, unless the connection has a
    /// backlog: then it has a step to run.
    fn check(&self, index: usize) {
        self.output.check(format_args!("the output of connection {index}"));
        assert!(
            self.is_half_closed || !self.input_ended,
            "the input of connection {index} has ended, but it is not half-closed"
        );
        let Conn { phase, has_backlog, .. } = self;
        let input = self.input.unused();
        let is_consistent = match phase {
            Phase::Closing => true,
            // Its input may have been dropped for lack of memory.
            Phase::SkippingBody { reason: Refusal::OutOfMemory, .. } => {
                *has_backlog || input.is_empty()
            }
            _ if *has_backlog => self.has_step(input),
            Phase::ReadingLine => input.len() < line_max(input) && find_line_end(input).is_none(),
            Phase::SkippingLine(_) | Phase::SkippingLongLine => input.is_empty() || input == b"\r",
            Phase::ReadingBody(put) => input.len() < (put.full_len as usize).min(LARGE),
            Phase::ReadingLargeBody(large) => {
                input.is_empty() && large.filled < large.put.full_len as usize
            }
            Phase::SkippingBody { .. }
            | Phase::ListingTubes
            | Phase::Waiting(..)
            | Phase::ReadingBodies(_)
            | Phase::Flushing => input.is_empty(),
            Phase::InSteps(_) => false,
        };
        assert!(
            is_consistent,
            "connection {index} buffers {} bytes in {phase:?}, backlog: {has_backlog}",
            input.len()
        );
        let waits = self.is_half_closed && matches!(phase, Phase::Waiting(..));
        assert!(!waits, "connection {index} is half-closed, but it waits");
    }

    /// Skips the body that is arriving, of which `arrived` bytes were dropped for lack of memory.
    /// Returns `false` if no body is arriving, or if all of its bytes have arrived.
    pub fn skip_body(&mut self, arrived: usize) -> bool {
        let Phase::ReadingBody(put) = &self.phase else { return false };
        match (put.full_len as usize).checked_sub(arrived) {
            None | Some(0) => false,
            Some(left) => {
                self.phase = Phase::SkippingBody { left, reason: Refusal::OutOfMemory };
                true
            }
        }
    }
}

impl Conns {
    /// Returns an empty set. Connections are crowded from `buffer_limit` bytes of unused input and
    /// unsent text on.
    pub fn new(buffer_limit: usize) -> Conns {
        Conns {
            by_key: SecondaryMap::default(),
            pool: Pool::default(),
            dirty: Vec::new(),
            held: Vec::new(),
            buffered_bytes: 0,
            buffer_limit,
            reply_cost: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Adds a connection.
    pub fn try_insert(&mut self, key: ConnKey) -> Result<(), TryReserveError> {
        // Each connection is in each list at most once. Closed ones may be in them too.
        self.dirty.try_reserve(self.len() + 1)?;
        self.held.try_reserve(self.len() + 1)?;
        self.by_key.try_insert(key, Conn::default())
    }

    /// Returns whether a connection has this key.
    pub fn has(&self, key: ConnKey) -> bool {
        self.by_key.get(key).is_some()
    }

    /// Removes a connection, after [`Conns::drop_buffers`].
    pub fn remove(&mut self, key: ConnKey) {
        self.by_key.remove(key);
    }

    /// Drops the input and the output of a connection, and begins to close it.
    pub fn drop_buffers(&mut self, key: ConnKey, bodies: &mut Bodies) {
        let conn = &mut self.by_key[key];
        self.buffered_bytes -= conn.buffered_bytes();
        conn.input = Input::default();
        conn.output.clear(&mut self.pool, bodies);
        if let Phase::ReadingLargeBody(large) = std::mem::replace(&mut conn.phase, Phase::Closing) {
            bodies.remove(large.body);
        }
    }

    /// Returns the bodies for which a connection waits; `None` if it waits for none, or if there is no
    /// such connection.
    pub fn wanted_bodies(&mut self, key: ConnKey) -> Option<&mut WantedBodies> {
        let phase = &mut self.by_key.get_mut(key)?.phase;
        if let Phase::ReadingBodies(wanted) = phase { Some(wanted) } else { None }
    }

    /// Appends a reply to the output of a connection. After an error a part of it may be there.
    pub fn reply(
        &mut self,
        key: ConnKey,
        reply: Reply<'_>,
        bodies: &mut Bodies,
    ) -> Result<(), TryReserveError> {
        let conn = &mut self.by_key[key];
        self.reply_cost += reply.cost();
        let before = conn.output.text_len();
        let written = reply.write(&mut conn.output, &mut self.pool, bodies);
        self.buffered_bytes += conn.output.text_len() - before;
        written?;
        conn.mark_dirty(key, &mut self.dirty);
        Ok(())
    }

    /// Returns whether `text_len` more bytes of text exceed the limit for unused input and unsent text
    /// of all connections. Without such input and text, one reply may exceed it.
    pub fn are_crowded_by(&self, text_len: usize) -> bool {
        self.buffered_bytes > 0 && self.buffered_bytes.saturating_add(text_len) > self.buffer_limit
    }

    /// Ensures that a reply of this size allocates nothing.
    pub fn try_reserve_output(
        &mut self,
        key: ConnKey,
        size: ReplySize,
    ) -> Result<(), TryReserveError> {
        self.by_key[key].output.try_reserve(size.text_len, size.parts, &mut self.pool)
    }

    /// Returns access to the output of a connection, which is not dirty any more.
    pub fn output_handle<'a>(
        &'a mut self,
        key: ConnKey,
        progress: Option<&Progress>,
        bodies: &'a mut Bodies,
    ) -> OutputHandle<'a> {
        let output_limit = self.output_limit();
        let conn = &mut self.by_key[key];
        conn.is_dirty = false;
        let mut is_overdue = false;
        if let Some(progress) = progress {
            if conn.output.hold(*progress) {
                self.held.push(key);
            }
            is_overdue = progress.has_overdue() && conn.output.waits_for(progress.overdue);
        }
        let (pool, buffered_bytes) = (&mut self.pool, &mut self.buffered_bytes);
        OutputHandle { conn, pool, bodies, buffered_bytes, output_limit, is_overdue }
    }

    /// Marks all connections as dirty whose output was held back: more of it may be sent.
    pub fn wake_held(&mut self) {
        for key in self.held.drain(..) {
            // The connection may have been closed, and its key given to a new one.
            if let Some(conn) = self.by_key.get_mut(key) {
                conn.output.wake();
                conn.mark_dirty(key, &mut self.dirty);
            }
        }
    }

    /// Returns the next connection from this number on that has taken nothing, since the last look, of an
    /// output with bodies that were read back. The first look finds none.
    pub fn next_stalled(&mut self, from: usize, is_first: bool) -> Option<ConnKey> {
        for key in (from..self.numbers_end()).map(ConnKey::from_index) {
            let Some(conn) = self.by_key.get_mut(key) else { continue };
            let len = if conn.output.has_read_bodies() { conn.output.len() } else { 0 };
            if std::mem::replace(&mut conn.unread, len) == len && len > 0 && !is_first {
                return Some(key);
            }
        }
        None
    }

    /// Returns the references of all connections to large bodies, arriving or unsent.
    pub fn bodies(&self) -> impl Iterator<Item = &Body> + '_ {
        self.iter().flat_map(|(_, conn)| {
            let large = if let Phase::ReadingLargeBody(large) = &conn.phase {
                Some(&large.body)
            } else {
                None
            };
            conn.output.bodies().chain(large)
        })
    }

    /// Returns the cost of the replies since the previous call, by [`Reply::cost`].
    pub fn take_reply_cost(&mut self) -> usize {
        std::mem::take(&mut self.reply_cost)
    }

    /// Marks a connection as dirty: the next [`Conns::take_dirty`] returns it.
    pub fn mark_dirty(&mut self, key: ConnKey) -> Actions {
        let conn = &mut self.by_key[key];
        conn.mark_dirty(key, &mut self.dirty);
        self.actions(key)
    }

    /// Returns the actions for a connection.
    pub fn actions(&self, key: ConnKey) -> Actions {
        self.by_key[key].actions(self.output_limit())
    }

    // ---- Buffers ----

    /// Returns whether unused input and unsent text of all connections have reached their limit.
    /// Then at most 1 KiB is read from each connection, and commands run only for clients that have
    /// read all replies.
    pub fn are_crowded(&self) -> bool {
        self.buffered_bytes >= self.buffer_limit
    }

    /// Returns the number of unsent bytes at which the commands of a connection stop running.
    pub fn output_limit(&self) -> usize {
        if self.are_crowded() { 1 } else { Conn::OUTPUT_LIMIT }
    }

    /// Buffers bytes that a client has sent.
    pub fn push_input(&mut self, key: ConnKey, bytes: &[u8]) -> Result<(), TryReserveError> {
        let conn = &mut self.by_key[key];
        let before = conn.input.capacity();
        let pushed = conn.input.push(bytes);
        self.buffered_bytes += conn.input.capacity() - before;
        pushed
    }

    /// Takes the buffered input of a connection.
    pub fn take_input(&mut self, key: ConnKey) -> Input {
        let input = std::mem::take(&mut self.by_key[key].input);
        self.buffered_bytes -= input.capacity();
        input
    }

    /// Puts back the rest of the input that [`Conns::take_input`] returned.
    pub fn put_back_input(&mut self, key: ConnKey, input: Input) {
        self.buffered_bytes += input.capacity();
        self.by_key[key].input = input;
    }

    pub fn iter(&self) -> impl Iterator<Item = (ConnKey, &Conn)> + '_ {
        self.by_key.iter()
    }

    /// Returns the connections whose keys have these numbers.
    pub fn numbered(&self, numbers: Range<usize>) -> impl Iterator<Item = &Conn> + '_ {
        let numbers = numbers.start..numbers.end.min(self.numbers_end());
        numbers.filter_map(|number| self.by_key.get(ConnKey::from_index(number)))
    }

    /// Returns a number that is above those of all keys.
    pub fn numbers_end(&self) -> usize {
        self.by_key.numbers_end()
    }

    /// Checks the state and the buffers of each connection. The set of dirty connections is not
    /// checked: it depends on the event loop.
    ///
    /// # Panics
    /// The check fails.
    pub fn check(&self) {
        self.by_key.check(format_args!("the connections"));
        self.pool.check();
        let mut buffered_bytes = 0;
        for (key, conn) in self.iter() {
            conn.check(key.index());
            buffered_bytes += conn.buffered_bytes();
        }
        assert_eq!(self.buffered_bytes, buffered_bytes, "stored and actual bytes of buffers");
    }

    /// Moves the keys of dirty connections to `keys`. Some of these connections may have been
    /// removed, and their keys given to new ones.
    pub fn take_dirty(&mut self, keys: &mut Vec<ConnKey>) {
        keys.append(&mut self.dirty);
    }

    /// Returns whether there are dirty connections.
    pub fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }
}

impl OutputHandle<'_> {
    /// Puts the next bytes for the client into `slices`. Returns the number of slices used.
    pub fn next_slices<'s>(&'s self, slices: &mut [IoSlice<'s>]) -> usize {
        self.conn.output.next_slices(slices, self.bodies)
    }

    /// Returns whether the output is more than one slice of text.
    pub fn has_parts(&self) -> bool {
        self.conn.output.has_parts()
    }

    /// Returns the number of unsent bytes.
    pub fn len(&self) -> usize {
        self.conn.output.len()
    }

    pub fn is_empty(&self) -> bool {
        self.conn.output.is_empty()
    }

    /// Removes the first `count` unsent bytes: the kernel has accepted them. The connection may be
    /// able to run commands again.
    #[inline]
    pub fn sent(&mut self, count: usize) {
        let before = self.conn.output.text_len();
        self.conn.output.sent(count, self.pool, self.bodies);
        *self.buffered_bytes -= before - self.conn.output.text_len();
    }

    /// Returns the actions for the connection.
    pub fn actions(&self) -> Actions {
        let actions = self.conn.actions(self.output_limit);
        Actions { close: actions.close || self.is_overdue, ..actions }
    }
}

impl Index<ConnKey> for Conns {
    type Output = Conn;

    fn index(&self, key: ConnKey) -> &Conn {
        &self.by_key[key]
    }
}

impl IndexMut<ConnKey> for Conns {
    fn index_mut(&mut self, key: ConnKey) -> &mut Conn {
        &mut self.by_key[key]
    }
}

/// Returns the length of the first line, if its end is in `bytes`.
fn find_line_end(bytes: &[u8]) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + text::find_byte(b'\n', &bytes[from..])?;
        if bytes[..at].ends_with(b"\r") {
            return Some(at - 1);
        }
        from = at + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_body_that_is_still_arriving_is_skipped() {
        let params = JobParams { pri: 0, delay_secs: 0, ttr_secs: 1 };
        for (arrived, is_skipped) in [(0, true), (11, true), (12, false), (400, false)] {
            let put = Put { id: 1, params, full_len: 12, tube: None, unique: None };
            let mut conn = Conn { phase: Phase::ReadingBody(put), ..Conn::default() };
            assert_eq!(conn.skip_body(arrived), is_skipped, "{arrived} bytes have arrived");
            let mut rest = &b"123456789012"[arrived.min(12)..];
            let step = conn.next_step(&mut rest, Conn::OUTPUT_LIMIT, true);
            assert_eq!(matches!(step, Some(Step::SkippedBody(Refusal::OutOfMemory))), is_skipped);
        }
        assert!(!Conn::default().skip_body(5));
    }

    #[test]
    fn the_end_of_a_too_long_line_is_found_in_any_chunks() {
        for (end, is_http) in [
            (&b" HTTP/1.1\r\n"[..], true),
            (b"\r HTTP/2.0\r\n", true),
            (b" HTTP/1.1\r\r\n", false),
            (b" HTTP/1.1x\r\n", false),
        ] {
            let line = [&[b'x'; LINE_MAX], end].concat();
            for first in 0..line.len() {
                for second in first..line.len() {
                    let pieces = [&line[..first], &line[first..second], &line[second..]];
                    assert_eq!(
                        ends(&pieces),
                        [is_http],
                        "{first}, {second}, {}",
                        end.escape_ascii()
                    );
                }
            }
        }
    }

    /// Returns for each too long line whether it ends as an HTTP request does.
    fn ends(pieces: &[&[u8]]) -> Vec<bool> {
        let (mut conn, mut kept, mut ends) = (Conn::default(), Vec::new(), Vec::new());
        for piece in pieces {
            kept.extend_from_slice(piece);
            let mut rest = &kept[..];
            match conn.next_step(&mut rest, Conn::OUTPUT_LIMIT, true) {
                None => {}
                Some(Step::TooLongLine(tail)) => ends.push(tail.is_http()),
                Some(step) => panic!("the end of a too long line gave {step:?}"),
            }
            kept = rest.to_vec();
        }
        ends
    }
}
