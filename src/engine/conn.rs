//! One client's end of the conversation: what it is in the middle of saying, and what it
//! is still to be told.
//!
//! [`Conn::next_step`] cuts the bytes that arrive into lines and bodies, however they are
//! chunked; what the lines mean is for `server.rs`. Memory is bounded whatever arrives: at
//! most a line or a body of allowed size is kept while incomplete, and anything longer is
//! dropped as it comes. A client whose commands are held up is not read from, so that at most the
//! rest of one read, 68 KiB, waits for it. A large body is not kept here: it has its place among the
//! bodies of jobs from its first byte on.

use super::collections::secondary_map::SecondaryMap;
use super::keys::{ConnKey, WatchKey};
use super::protocol::command::{LINE_MAX, LineTail};
use super::protocol::input::Input;
use super::protocol::output::{Output, Pool};
use super::protocol::reply::Reply;
use super::queue::Kick;
use super::queue::body::{Bodies, Body, LARGE};
use super::queue::job::JobParams;
use super::queue::listing::ListText;
use super::queue::waiters::Wait;
use super::text;
use super::text::CR_LF;
use std::collections::TryReserveError;
use std::io::IoSlice;
use std::ops::{Index, IndexMut, Range};

/// All connections.
#[derive(Debug)]
pub struct Conns {
    /// Under the keys of the clients of the queue.
    by_key: SecondaryMap<ConnKey, Conn>,
    pool: Pool,
    /// Those that the loop must look at.
    dirty: Vec<ConnKey>,
    /// How many bytes of memory unused input and unsent text take.
    buffered_bytes: usize,
    /// The value of `buffered_bytes` from which on connections are crowded.
    buffer_limit: usize,
    /// How many bytes of replies were made since somebody last asked.
    said_bytes: usize,
}

/// One connection.
#[derive(Debug, Default)]
pub struct Conn {
    /// What the connection is in the middle of.
    pub phase: Phase,
    /// Bytes that have arrived and were not used yet.
    pub input: Input,
    /// Whether commands among them could not be run, because the client waits, does not read
    /// its replies, or has used up its share of the turn.
    pub has_backlog: bool,
    /// Bytes for the client.
    pub output: Output,
    /// The client has shut down its sending side: it will not wait any more.
    pub is_half_closed: bool,
    /// Everything that the client sent has arrived.
    pub input_ended: bool,
    /// The last put had a body that is better read to where it stays than copied there.
    pub sends_large_bodies: bool,
    /// Whether the loop will look at the connection at the end of the turn.
    is_dirty: bool,
}

/// What a connection is doing, as it is told to operators.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// It is between two commands.
    Idle,
    /// It is in the middle of one, or has more to be run.
    Receiving,
    /// It waits for a job.
    Waiting,
    /// It has replies that the client has not taken yet.
    Sending,
    /// It is at its end.
    Closing,
}

impl Activity {
    /// All there are, in their order.
    pub const ALL: [Activity; 5] = [
        Activity::Idle,
        Activity::Receiving,
        Activity::Waiting,
        Activity::Sending,
        Activity::Closing,
    ];

    /// What it is called.
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

/// What a connection is in the middle of.
#[derive(Debug, Default)]
pub enum Phase {
    /// A command line.
    #[default]
    Line,
    /// A line that is too long, up to its end. Only the last of what has come is remembered.
    TooLongLine(LineTail),
    /// The body of a job.
    Body(Put),
    /// The body of a job that is read into the place where it stays.
    LargeBody(Arriving),
    /// A body that is not wanted.
    UnwantedBody {
        /// How many bytes are still to come.
        left: usize,
        /// What to say then.
        why: Refusal,
    },
    /// A kick of more jobs than could be kicked at once.
    Kicking(Kick),
    /// A reserve over more tubes than could be checked in one iteration.
    Looking(Wait),
    /// A list of very many watched tubes that is being made, and the watch that comes next.
    ListingWatched(ListText, WatchKey),
    /// A list of very many tubes, which is made for several connections at a time.
    Listing,
    /// A reserve that has not been answered.
    Waiting,
    /// Nothing more: what has been said is sent, then the connection is closed.
    Closing,
}

/// Why a body is not wanted.
#[derive(Clone, Copy, Debug)]
pub enum Refusal {
    /// It is larger than is allowed.
    JobTooBig,
    /// There is no memory for it.
    OutOfMemory,
    /// There is no memory for it, and it would not be taken anyway.
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
#[derive(Clone, Copy, Debug)]
pub struct Put {
    /// The id that the job will have.
    pub id: u64,
    /// Its numbers.
    pub terms: JobParams,
    /// How many bytes its body has, with CR LF.
    pub full_len: u32,
}

/// A put whose large body is arriving.
#[derive(Debug)]
pub struct Arriving {
    /// The put.
    pub put: Put,
    /// The place of the body.
    pub body: Body,
    /// How many of its bytes have arrived.
    pub filled: usize,
}

/// The way out of a connection.
#[derive(Debug)]
pub struct OutputHandle<'a> {
    conn: &'a mut Conn,
    pool: &'a mut Pool,
    bodies: &'a mut Bodies,
    buffered_bytes: &'a mut usize,
    output_limit: usize,
}

/// What the event loop is to do for a connection.
#[derive(Clone, Copy, Debug)]
pub struct Actions {
    /// Read from the socket.
    pub read: bool,
    /// Run commands that were buffered.
    pub run: bool,
    /// Write to the socket.
    pub write: bool,
    /// Close the connection.
    pub close: bool,
}

/// What the next bytes of input amount to.
#[derive(Debug)]
pub enum Step<'a> {
    /// A whole line, without its CR LF.
    Line(&'a [u8]),
    /// The end of a line that was too long.
    TooLongLine(LineTail),
    /// A whole body, which may not end as it must.
    Put(Put, &'a [u8]),
    /// The beginning of a large body, which needs a place.
    BeginBody(Put),
    /// The next bytes of a large body, which has its place.
    BodyPart(&'a [u8]),
    /// The end of a body that was not wanted, and what to say.
    Unwanted(Refusal),
    /// More of the jobs that are to be kicked.
    Kick(Kick),
    /// More of the tubes that are to be looked at.
    Look(Wait),
    /// More of the watched tubes that are to be listed.
    ListWatched,
}

impl Conn {
    /// A client that does not read its replies is not listened to either, once this many
    /// bytes are on their way to it.
    const OUTPUT_LIMIT: usize = 256 * 1024;

    /// From this length on copying a body costs more than reading twice.
    pub const WORTH_TWO_READS: usize = 16 * 1024;

    /// How many bytes of memory its input and its output take, but for bodies and lists, which are
    /// shared.
    fn buffered_bytes(&self) -> usize {
        self.input.capacity() + self.output.text_len()
    }

    fn mark_dirty(&mut self, own_key: ConnKey, dirty: &mut Vec<ConnKey>) {
        if !std::mem::replace(&mut self.is_dirty, true) {
            dirty.push(own_key);
        }
    }

    /// What there is to do for it, when as many bytes may be on their way to it.
    pub fn actions(&self, output_limit: usize) -> Actions {
        let is_free = self.takes_commands(output_limit);
        Actions {
            read: is_free && !self.has_backlog && !self.input_ended,
            run: is_free && self.has_backlog,
            write: !self.output.is_empty(),
            close: self.is_finished(),
        }
    }

    /// What it is doing.
    pub fn activity(&self) -> Activity {
        match self.phase {
            Phase::Closing => Activity::Closing,
            _ if !self.output.is_empty() => Activity::Sending,
            Phase::Waiting => Activity::Waiting,
            Phase::Line if self.input.is_empty() => Activity::Idle,
            Phase::Line
            | Phase::TooLongLine(_)
            | Phase::Body(_)
            | Phase::LargeBody(_)
            | Phase::UnwantedBody { .. }
            | Phase::Kicking(_)
            | Phase::Looking(_)
            | Phase::ListingWatched(..)
            | Phase::Listing => Activity::Receiving,
        }
    }

    /// Whether commands of this client can be run now.
    pub fn takes_commands(&self, output_limit: usize) -> bool {
        let is_free = match self.phase {
            Phase::Line
            | Phase::TooLongLine(_)
            | Phase::Body(_)
            | Phase::LargeBody(_)
            | Phase::UnwantedBody { .. }
            | Phase::Kicking(_)
            | Phase::Looking(_)
            | Phase::ListingWatched(..) => true,
            Phase::Listing | Phase::Waiting | Phase::Closing => false,
        };
        is_free && self.output.len() < output_limit
    }

    /// Whether the connection is to be closed: there is nothing more to hear, nothing
    /// more to do and nothing more to say.
    fn is_finished(&self) -> bool {
        let is_over = match self.phase {
            Phase::Closing => true,
            Phase::Listing | Phase::Waiting => false,
            Phase::Line
            | Phase::TooLongLine(_)
            | Phase::Body(_)
            | Phase::LargeBody(_)
            | Phase::UnwantedBody { .. }
            | Phase::Kicking(_)
            | Phase::Looking(_)
            | Phase::ListingWatched(..) => self.input_ended && !self.has_backlog,
        };
        is_over && self.output.is_empty()
    }

    /// Returns whether a command is being run in steps, which needs no more input.
    fn is_amid_command(&self) -> bool {
        matches!(self.phase, Phase::Kicking(_) | Phase::Looking(_) | Phase::ListingWatched(..))
    }

    /// Whether there is anything left to do with what has arrived, so far as `input` goes.
    pub fn has_step(&self, input: &[u8]) -> bool {
        !input.is_empty() || self.is_amid_command()
    }

    /// Takes one step's worth of bytes from the front of `input`; none when more bytes are needed,
    /// or none are wanted at present.
    pub fn next_step<'a>(&mut self, input: &mut &'a [u8], output_limit: usize) -> Option<Step<'a>> {
        if !self.takes_commands(output_limit) {
            return None;
        }
        match &mut self.phase {
            Phase::Line => self.line(input),
            Phase::TooLongLine(tail) => {
                let tail = *tail;
                self.end_of_line(tail, input)
            }
            Phase::Body(put) if put.full_len as usize >= LARGE => Some(Step::BeginBody(*put)),
            Phase::LargeBody(arriving) => {
                let missing = arriving.put.full_len as usize - arriving.filled;
                let (part, rest) = input.split_at(input.len().min(missing));
                *input = rest;
                Some(Step::BodyPart(part))
            }
            Phase::Body(put) => {
                let put = *put;
                let (body, rest) = input.split_at_checked(put.full_len as usize)?;
                *input = rest;
                self.phase = Phase::Line;
                Some(Step::Put(put, body))
            }
            Phase::UnwantedBody { left, why } => {
                let dropped = input.len().min(*left);
                *input = &input[dropped..];
                *left -= dropped;
                if *left > 0 {
                    return None;
                }
                let why = *why;
                self.phase = Phase::Line;
                Some(Step::Unwanted(why))
            }
            Phase::Kicking(kick) => Some(Step::Kick(*kick)),
            Phase::Looking(wait) => Some(Step::Look(*wait)),
            Phase::ListingWatched(..) => Some(Step::ListWatched),
            Phase::Listing | Phase::Waiting | Phase::Closing => None,
        }
    }

    fn line<'a>(&mut self, input: &mut &'a [u8]) -> Option<Step<'a>> {
        let window = &input[..input.len().min(LINE_MAX)];
        if let Some(length) = find_line_end(window) {
            let line = &input[..length];
            *input = &input[length + CR_LF.len()..];
            return Some(Step::Line(line));
        }
        if window.len() < LINE_MAX {
            return None;
        }
        self.end_of_line(LineTail::default(), input)
    }

    /// `tail` is that of what was dropped already.
    fn end_of_line<'a>(&mut self, mut tail: LineTail, input: &mut &'a [u8]) -> Option<Step<'a>> {
        if let Some(length) = find_line_end(input) {
            tail.add(&input[..length]);
            *input = &input[length + CR_LF.len()..];
            self.phase = Phase::Line;
            return Some(Step::TooLongLine(tail));
        }
        // A CR at the very end may be half of the end of the line.
        let kept = usize::from(input.ends_with(b"\r"));
        let (dropped, rest) = input.split_at(input.len() - kept);
        tail.add(dropped);
        *input = rest;
        self.phase = Phase::TooLongLine(tail);
        None
    }

    /// What is kept is the beginning of something if nothing is held up, and whoever is held up has
    /// something to go on with.
    fn check(&self, index: usize) {
        self.output.check(format_args!("the output of connection {index}"));
        assert!(
            self.is_half_closed || !self.input_ended,
            "the input of connection {index} has ended, but its sending side is not shut down"
        );
        let Conn { phase, has_backlog, .. } = self;
        let input = self.input.unused();
        let can_be = match phase {
            Phase::Closing => true,
            // What it was held up with may have been given up for want of memory.
            Phase::UnwantedBody { why: Refusal::OutOfMemory, .. } => {
                *has_backlog || input.is_empty()
            }
            _ if *has_backlog => self.has_step(input),
            Phase::Line => input.len() < LINE_MAX && find_line_end(input).is_none(),
            Phase::TooLongLine(_) => input.is_empty() || input == b"\r",
            Phase::Body(put) => input.len() < (put.full_len as usize).min(LARGE),
            Phase::LargeBody(arriving) => {
                input.is_empty() && arriving.filled < arriving.put.full_len as usize
            }
            Phase::UnwantedBody { .. } | Phase::Listing | Phase::Waiting => input.is_empty(),
            Phase::Kicking(_) | Phase::Looking(_) | Phase::ListingWatched(..) => false,
        };
        assert!(
            can_be,
            "connection {index} keeps {} bytes, held up: {has_backlog}, in the middle of {phase:?}",
            input.len()
        );
        let is_shut = self.is_half_closed && matches!(phase, Phase::Waiting);
        assert!(!is_shut, "connection {index} has shut down its sending side, but it waits");
    }

    /// There is no memory for the body that is arriving, of which `arrived` bytes were kept. Returns
    /// `false` when none is, or when all of it and perhaps more than that has arrived.
    pub fn give_up_body(&mut self, arrived: usize) -> bool {
        let Phase::Body(put) = self.phase else { return false };
        match (put.full_len as usize).checked_sub(arrived) {
            None | Some(0) => false,
            Some(left) => {
                self.phase = Phase::UnwantedBody { left, why: Refusal::OutOfMemory };
                true
            }
        }
    }
}

impl Conns {
    /// Creates an empty set. From `buffer_limit` bytes of unused input and unsent text on, each
    /// connection gets as little as it needs.
    pub fn new(buffer_limit: usize) -> Conns {
        Conns {
            by_key: SecondaryMap::default(),
            pool: Pool::default(),
            dirty: Vec::new(),
            buffered_bytes: 0,
            buffer_limit,
            said_bytes: 0,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// A client has connected.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_insert(&mut self, key: ConnKey) -> Result<(), TryReserveError> {
        // Each of them may come up once before the list is taken.
        self.dirty.try_reserve(self.len() + 1)?;
        self.by_key.try_insert(key, Conn::default())
    }

    /// A connection is gone, of which nothing is left but the key.
    pub fn remove(&mut self, key: ConnKey) {
        self.by_key.remove(key);
    }

    /// Drops what the connection has sent and what it was to be sent.
    pub fn drop_buffers(&mut self, key: ConnKey, bodies: &mut Bodies) {
        let conn = &mut self.by_key[key];
        self.buffered_bytes -= conn.buffered_bytes();
        conn.input = Input::default();
        conn.output.clear(&mut self.pool, bodies);
        if let Phase::LargeBody(arriving) = std::mem::replace(&mut conn.phase, Phase::Closing) {
            bodies.remove(arriving.body);
        }
    }

    /// Adds a reply to what the client is to be sent.
    ///
    /// # Errors
    /// There is no memory for it; part of it may have been added.
    pub fn reply(
        &mut self,
        key: ConnKey,
        reply: Reply<'_>,
        bodies: &mut Bodies,
    ) -> Result<(), TryReserveError> {
        let conn = &mut self.by_key[key];
        self.said_bytes += reply.cost();
        let before = conn.output.text_len();
        let written = reply.write(&mut conn.output, &mut self.pool, bodies);
        self.buffered_bytes += conn.output.text_len() - before;
        written?;
        conn.mark_dirty(key, &mut self.dirty);
        Ok(())
    }

    /// The way out of a connection, which has been looked after with that.
    pub fn output_handle<'a>(
        &'a mut self,
        key: ConnKey,
        bodies: &'a mut Bodies,
    ) -> OutputHandle<'a> {
        let output_limit = self.output_limit();
        let conn = &mut self.by_key[key];
        conn.is_dirty = false;
        let buffered_bytes = &mut self.buffered_bytes;
        OutputHandle { conn, pool: &mut self.pool, bodies, buffered_bytes, output_limit }
    }

    /// Returns the holds of all connections on large bodies, arriving or to be sent.
    pub fn bodies(&self) -> impl Iterator<Item = &Body> + '_ {
        self.iter().flat_map(|(_, conn)| {
            let arriving = if let Phase::LargeBody(arriving) = &conn.phase {
                Some(&arriving.body)
            } else {
                None
            };
            conn.output.bodies().chain(arriving)
        })
    }

    /// How many bytes of replies were made since this was last asked, by [`Reply::cost`].
    pub fn take_said_bytes(&mut self) -> usize {
        std::mem::take(&mut self.said_bytes)
    }

    /// The connection is to be among the next that [`Conns::take_dirty`] names.
    pub fn mark_dirty(&mut self, key: ConnKey) -> Actions {
        let conn = &mut self.by_key[key];
        conn.mark_dirty(key, &mut self.dirty);
        self.actions(key)
    }

    /// What there is to do for a connection.
    pub fn actions(&self, key: ConnKey) -> Actions {
        self.by_key[key].actions(self.output_limit())
    }

    // ---- Buffers ----

    /// Returns whether unused input and unsent text of all connections have reached their limit. Then
    /// at most 1 KiB is read of each connection, and only those that have read all replies run commands.
    pub fn are_crowded(&self) -> bool {
        self.buffered_bytes >= self.buffer_limit
    }

    /// Returns from how many unsent bytes on no more commands of a connection are run.
    pub fn output_limit(&self) -> usize {
        if self.are_crowded() { 1 } else { Conn::OUTPUT_LIMIT }
    }

    /// Keeps bytes that a client has sent.
    ///
    /// # Errors
    /// There is no memory for them.
    pub fn push_input(&mut self, key: ConnKey, bytes: &[u8]) -> Result<(), TryReserveError> {
        let conn = &mut self.by_key[key];
        let before = conn.input.capacity();
        let pushed = conn.input.push(bytes);
        self.buffered_bytes += conn.input.capacity() - before;
        pushed
    }

    /// Takes out what is kept of what a client has sent.
    pub fn take_input(&mut self, key: ConnKey) -> Input {
        let input = std::mem::take(&mut self.by_key[key].input);
        self.buffered_bytes -= input.capacity();
        input
    }

    /// Puts back what is left of that.
    pub fn put_back_input(&mut self, key: ConnKey, input: Input) {
        self.buffered_bytes += input.capacity();
        self.by_key[key].input = input;
    }

    /// All connections, with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (ConnKey, &Conn)> + '_ {
        self.by_key.iter()
    }

    /// The connections with these numbers, of those below [`Conns::numbers_end`].
    pub fn numbered(&self, numbers: Range<usize>) -> impl Iterator<Item = &Conn> + '_ {
        let numbers = numbers.start..numbers.end.min(self.numbers_end());
        numbers.filter_map(|number| self.by_key.get(ConnKey::from_index(number)))
    }

    /// No connection has this number, or a higher one.
    pub fn numbers_end(&self) -> usize {
        self.by_key.numbers_end()
    }

    /// Every connection is in a state that its fields agree about. Whom the loop has already looked
    /// after is not known here, so nothing is said of that.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(&self) {
        self.by_key.check(format_args!("the connections"));
        self.pool.check();
        let mut buffered_bytes = 0;
        for (key, conn) in self.iter() {
            conn.check(key.index());
            buffered_bytes += conn.buffered_bytes();
        }
        assert_eq!(self.buffered_bytes, buffered_bytes, "bytes of buffers, noted and counted");
    }

    /// Moves the keys of the connections that are to be looked after to `keys`. Some may
    /// have been removed meanwhile, and their keys given to new ones.
    pub fn take_dirty(&mut self, keys: &mut Vec<ConnKey>) {
        keys.append(&mut self.dirty);
    }

    /// Whether there are such connections.
    pub fn has_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }
}

impl OutputHandle<'_> {
    /// Puts the next bytes for the client into `slices`; says how many slices.
    pub fn next_slices<'s>(&'s self, slices: &mut [IoSlice<'s>]) -> usize {
        self.conn.output.next_slices(slices, self.bodies)
    }

    /// Returns whether there is more to be sent than one slice of text.
    pub fn has_parts(&self) -> bool {
        self.conn.output.has_parts()
    }

    /// Returns the number of bytes that are to be sent.
    pub fn len(&self) -> usize {
        self.conn.output.len()
    }

    /// Returns whether there is nothing to be sent.
    pub fn is_empty(&self) -> bool {
        self.conn.output.is_empty()
    }

    /// The first `count` of those bytes have been sent. The connection may be able to resume
    /// then.
    pub fn sent(&mut self, count: usize) {
        let before = self.conn.output.text_len();
        self.conn.output.sent(count, self.pool, self.bodies);
        *self.buffered_bytes -= before - self.conn.output.text_len();
    }

    /// What there is to do for the connection.
    pub fn actions(&self) -> Actions {
        self.conn.actions(self.output_limit)
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

/// The length of the line that `bytes` begin with, if its end is there.
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
    fn only_what_is_still_to_come_of_a_body_is_given_up() {
        let terms = JobParams { pri: 0, delay_secs: 0, ttr_secs: 1 };
        let put = Put { id: 1, terms, full_len: 12 };
        for (arrived, is_given_up) in [(0, true), (11, true), (12, false), (400, false)] {
            let mut conn = Conn { phase: Phase::Body(put), ..Conn::default() };
            assert_eq!(conn.give_up_body(arrived), is_given_up, "{arrived} bytes have arrived");
            let mut rest = &b"123456789012"[arrived.min(12)..];
            let step = conn.next_step(&mut rest, Conn::OUTPUT_LIMIT);
            assert_eq!(matches!(step, Some(Step::Unwanted(Refusal::OutOfMemory))), is_given_up);
        }
        assert!(!Conn::default().give_up_body(5));
    }

    #[test]
    fn the_end_of_a_line_that_is_too_long_is_known_however_it_is_cut() {
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

    /// Of each line that is too long, whether it ends as an HTTP request does.
    fn ends(pieces: &[&[u8]]) -> Vec<bool> {
        let (mut conn, mut kept, mut ends) = (Conn::default(), Vec::new(), Vec::new());
        for piece in pieces {
            kept.extend_from_slice(piece);
            let mut rest = &kept[..];
            match conn.next_step(&mut rest, Conn::OUTPUT_LIMIT) {
                None => {}
                Some(Step::TooLongLine(tail)) => ends.push(tail.is_http()),
                Some(other) => panic!("{other:?}"),
            }
            kept = rest.to_vec();
        }
        ends
    }
}
