//! A connection: its input and output, and what it does.
//!
//! [`Conn::run`] splits the bytes that arrive into lines and bodies, in any chunks, and runs them. A
//! command that cannot finish leaves its rest in [`Conn::doing`], for one of two reasons: it has more
//! work than a step allows, or it waits for something. [`Conn::go_on`] continues it, and
//! [`Conn::cancel`] ends it.
//!
//! Memory is bounded: an incomplete line or small body is buffered, and anything longer than allowed is
//! dropped as it arrives. While a client's commands cannot run, its socket is not read: at most the rest
//! of one read, 68 KiB, is buffered. A large body is not buffered: its bytes go straight to its slot
//! among the bodies of jobs.

mod check;

use super::commands::change::DeleteBatch;
use super::commands::pages::{ClientPage, Report};
use super::commands::put::{self, LargePut, Put};
use super::commands::reserve::{self, Reserve};
use super::commands::{change, lines, pages, show};
use super::keys::{JobKey, WatchKey};
use super::protocol::batch::Batch;
use super::protocol::input::Input;
use super::protocol::output::Output;
use super::protocol::parse::LineTail;
use super::protocol::reply::{Answer, Reply, Word, write_job};
use super::queue::body::LARGE;
use super::queue::browse::SelectionScan;
use super::queue::client::Client;
use super::queue::listing::ListText;
use super::queue::read_body::ReadBody;
use super::queue::touch::TouchAll;
use super::queue::{Kick, Queue, WaitResult};
use super::reads::{self, WantedBodies};
use super::store::Store;
use super::time::Nanos;
use crate::engine::headroom::NoMemory;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::rc::Rc;

pub struct Conn {
    /// Its part in the rules.
    pub client: Client,
    /// The address and port of the client; `None` on a Unix socket.
    pub address: Option<(Ipv6Addr, u16)>,
    pub opened_at: Nanos,
    pub doing: Doing,
    /// Bytes that have arrived, not used yet.
    pub input: Input,
    /// Bytes for the client.
    pub output: Output,
    /// The input has commands that could not run: the client waits or does not read its replies, or
    /// its share of the iteration is used up.
    pub has_backlog: bool,
    /// The client has shut down its sending side. It does not wait any more.
    pub is_half_closed: bool,
    /// Everything that the client sent has arrived.
    pub input_ended: bool,
    /// The last put had a body of at least [`Conn::WORTH_TWO_READS`] bytes.
    pub sends_large_bodies: bool,
    /// It is in [`Store::dirty`].
    is_dirty: bool,
    /// It is in [`Store::held_back`].
    pub is_held_back: bool,
    /// The moment since which a remote disk holds back replies, or all commands; [`Nanos::NEVER`] if it does not.
    pub unsent_since: Nanos,
    /// The unsent bytes, when [`Conn::is_unread`] last looked, of an output with bodies that were read back; 0 if the
    /// client has taken some since.
    unread: u32,
}

const _: () =
    assert!(size_of::<Conn>() <= 192, "with its watch an idle connection takes 400 bytes");

/// The part of a command that a connection is reading, runs, or waits for.
#[derive(Debug, Default)]
pub enum Doing {
    /// A command line.
    #[default]
    Line,
    /// The rest of a line that is too long, of which only the tail is kept; `None` for a line for which there
    /// is no memory.
    SkipLine(Option<LineTail>),
    /// The body of a job, of which there is nothing in memory: a large one gets its slot with its first bytes.
    Body(Put),
    /// A large body of a job, which is read straight into its slot.
    LargeBody(Box<LargePut>),
    /// A body that is dropped: the number of bytes that are still to arrive, and the reply at its end.
    SkipBody(usize, Word),

    /// The rest of a command that has more work than a step allows. It needs no input.
    Steps(Steps),
    /// Waiting, while its input is not read.
    Wait(WaitFor),
    /// Nothing: it is closed when its output is sent, and its input is not read any more.
    Closing,
    /// Nothing: it is closed, and gives back its watches and these jobs: [`Queue::disconnect`].
    Leaving(Vec<JobKey>),
}

/// What a command waits for.
#[derive(Debug)]
pub enum WaitFor {
    /// A job.
    Job(Reserve),
    /// The bodies of a reply, which wait for memory or for the disk.
    Bodies(Box<WantedBodies>),
    /// A look at other connections, which follows in the same visit.
    Report(Report),
    /// A list of more than 1,024 tubes, which connections share.
    List,
    /// The end of a `flush-tube` or `flush-buried` of more jobs than one step allows.
    Flush,
}

/// The rest of a command that runs in steps. Other connections are served between two of them.
#[derive(Debug)]
pub enum Steps {
    /// A kick of many jobs.
    Kick(Kick),
    /// A reserve over many tubes.
    Reserve(Reserve),
    /// A `reserve-batch` that has reserved some jobs.
    FillBatch(Box<Batch>, Reserve),
    /// A `delete-batch` of many jobs.
    DeleteBatch(Box<DeleteBatch>),
    /// A `touch-all` of many jobs.
    TouchAll(TouchAll),
    /// A `list-jobs` or `peek-batch` that compares many jobs.
    Select {
        /// The jobs that were found.
        scan: Box<SelectionScan>,
        /// It is a `peek-batch`.
        shows_bodies: bool,
    },
    /// A `list-clients` that looks at many connections.
    ListClients(Box<ClientPage>),
    /// A list of more than 1,024 watched tubes, with the watch that is listed next.
    ListWatched(ListText, WatchKey),
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
    /// The names in metrics, in the order of the variants.
    pub const NAMES: [&str; 5] = ["idle", "receiving", "waiting", "sending", "closing"];

    /// Returns the name in metrics.
    pub fn name(self) -> &'static str {
        Activity::NAMES[self as usize]
    }
}

impl Doing {
    /// Returns whether the connection reads a command or runs one in steps. It waits for nothing.
    pub fn is_runnable(&self) -> bool {
        !matches!(self, Doing::Wait(_) | Doing::Closing | Doing::Leaving(_))
    }

    /// Returns whether it has jobs whose TTRs begin with its reply, which must not wait for the client to read.
    fn must_reply(&self) -> bool {
        matches!(self, Doing::Steps(Steps::FillBatch(..)))
    }

    /// Returns whether a command runs in steps.
    pub fn is_in_steps(&self) -> bool {
        matches!(self, Doing::Steps(_))
    }
}

/// A command is one unit of work, and so are each this many bytes of its reply.
const REPLY_BYTES_PER_WORK: usize = 128;

impl Conn {
    /// Copying a body of this length costs more than a second read, which goes straight to its
    /// slot.
    pub const WORTH_TWO_READS: usize = 16 * 1024;

    pub fn new(client: Client, address: Option<SocketAddr>, now: Nanos) -> Conn {
        Conn {
            client,
            address: address.map(|address| match address.ip() {
                IpAddr::V4(ip) => (ip.to_ipv6_mapped(), address.port()),
                IpAddr::V6(ip) => (ip, address.port()),
            }),
            opened_at: now,
            doing: Doing::Line,
            input: Input::default(),
            output: Output::default(),
            has_backlog: false,
            is_half_closed: false,
            input_ended: false,
            sends_large_bodies: false,
            is_dirty: false,
            is_held_back: false,
            unsent_since: Nanos::NEVER,
            unread: 0,
        }
    }

    /// Returns the number by which clients and log lines name the connection.
    pub fn id(&self) -> u64 {
        self.client.key.id()
    }

    /// Returns its activity.
    pub fn activity(&self) -> Activity {
        if matches!(self.doing, Doing::Closing | Doing::Leaving(_)) {
            Activity::Closing
        } else if !self.output.is_empty() {
            Activity::Sending
        } else if matches!(self.doing, Doing::Wait(WaitFor::Job(_))) {
            Activity::Waiting
        } else if matches!(self.doing, Doing::Line) && self.input.is_empty() {
            Activity::Idle
        } else {
            Activity::Receiving
        }
    }

    // ---- What the loop asks ----

    /// Returns whether its commands can run.
    pub fn can_run(&self, s: &Store) -> bool {
        let may_add = self.output.is_empty() || self.output.len() < s.output_limit();
        (may_add || self.doing.must_reply()) && self.doing.is_runnable()
    }

    /// Returns whether it should be read from.
    pub fn can_read(&self, s: &Store) -> bool {
        !self.has_backlog && !self.input_ended && self.can_run(s)
    }

    /// Returns whether it can be closed: it has no more input, no command and no output.
    pub fn is_finished(&self) -> bool {
        let has_ended = self.input_ended && !self.has_backlog && self.doing.is_runnable();
        (has_ended || matches!(self.doing, Doing::Closing)) && self.output.is_empty()
    }

    /// Notes that the loop must send the replies of the connection at the end of the iteration.
    pub fn mark_dirty(&mut self, s: &mut Store) {
        if !std::mem::replace(&mut self.is_dirty, true) {
            s.dirty.push(self.client.key);
        }
    }

    /// Begins to send: holds back output whose records are not acknowledged. Returns whether the client
    /// is to be disconnected.
    pub fn begin_send(&mut self, s: &mut Store) -> bool {
        self.is_dirty = false;
        s.queue.holds_replies() && self.release(s)
    }

    /// Releases what may be sent of a reply that waits for the binlog, and begins the TTRs of the jobs in it.
    #[inline(never)]
    fn release(&mut self, s: &mut Store) -> bool {
        let is_overdue = s.progress.is_some_and(|progress| {
            let holds_back = self.output.hold_back(progress);
            if holds_back && !std::mem::replace(&mut self.is_held_back, true) {
                s.held_back.push(self.client.key);
            }
            self.unsent_since = self.output.held_back_since().unwrap_or(Nanos::NEVER);
            progress.is_overdue(self.unsent_since)
        });
        while let Some(job) = self.output.next_sendable_job() {
            s.queue.begin_ttr(&mut self.client, job);
        }
        is_overdue
    }

    /// Removes the first `count` unsent bytes: the kernel has accepted them.
    #[inline]
    pub fn sent(&mut self, s: &mut Store, count: usize) {
        self.unread = 0;
        self.output.sent(count, &mut s.pool, &mut s.queue.bodies);
    }

    /// Returns whether the client has taken nothing, since the last call, of an output with bodies that
    /// were read back, or of any output if that `takes_text`.
    pub fn is_unread(&mut self, takes_text: bool) -> bool {
        let holds_memory = takes_text || self.output.has_read_bodies();
        let len = if holds_memory { self.output.len() } else { 0 };
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        std::mem::replace(&mut self.unread, len) == len && len > 0
    }

    // ---- Running ----

    /// Runs bytes that have arrived, after those that were buffered, and buffers the rest.
    #[inline(always)]
    pub fn receive(&mut self, s: &mut Store, bytes: &[u8]) {
        if !self.input.is_empty() {
            if self.push_input(s, bytes).is_ok() {
                return self.resume(s);
            }
            let arrived = self.take_input(s).len();
            if !self.drop_input(s, arrived) {
                return;
            }
        }
        let used = self.run(s, bytes);
        let rest = &bytes[used..];
        if !rest.is_empty()
            && !matches!(self.doing, Doing::Closing)
            && self.push_input(s, rest).is_err()
        {
            self.drop_input(s, rest.len());
        }
    }

    /// Runs buffered commands.
    pub fn resume(&mut self, s: &mut Store) {
        let mut input = self.take_input(s);
        let used = self.run(s, input.unused());
        if !matches!(self.doing, Doing::Closing) {
            input.keep_last(input.len() - used);
            s.input_bytes += input.capacity();
            self.input = input;
        }
    }

    /// Runs the complete commands of `input` within the connection's share of the iteration. Returns the
    /// number of bytes that were used.
    fn run(&mut self, s: &mut Store, input: &[u8]) -> usize {
        let mut rest = input;
        // A reply to a connection that waited comes before the next command, which may delete its job.
        let may_run = |c: &Conn, s: &Store| {
            s.queue.work.is_left() && c.can_run(s) && s.queue.woken.is_empty()
        };
        self.has_backlog = loop {
            if !self.has_step(rest) {
                break false;
            }
            if !may_run(self, s) {
                break true;
            }
            s.begin_command();
            let answer = if matches!(self.doing, Doing::Line) {
                lines::run_next(self, s, &mut rest)
            } else {
                self.step(s, &mut rest)
            };
            let Some(answer) = answer else { break false };
            self.answer(s, answer);
            s.end_command();
        };
        input.len() - rest.len()
    }

    /// Returns whether there is a step to run, given this input.
    fn has_step(&self, input: &[u8]) -> bool {
        !input.is_empty() || self.doing.is_in_steps()
    }

    /// Continues what the connection does, unless it reads a line, with bytes from the front of `input`. Returns `None`
    /// if it needs more of them. Meanwhile the connection does [`Doing::Line`]: what is left is set at the end.
    fn step(&mut self, s: &mut Store, input: &mut &[u8]) -> Option<Answer> {
        match std::mem::take(&mut self.doing) {
            Doing::Body(put) if put.full_len as usize >= LARGE => {
                Some(put::begin_body(self, s, put))
            }
            Doing::Body(put) => match input.split_at_checked(put.full_len as usize) {
                Some((body, rest)) => {
                    *input = rest;
                    Some(put::finish_small(self, s, &put, body))
                }
                None => self.wait_for_input(Doing::Body(put)),
            },
            Doing::LargeBody(large) => {
                let missing = large.put.full_len as usize - large.filled;
                let (part, rest) = input.split_at(input.len().min(missing));
                *input = rest;
                let (from, to) = (large.filled, large.filled + part.len());
                s.queue.bodies.bytes_mut(&large.body, from, to).copy_from_slice(part);
                Some(put::advance(self, s, large, part.len()))
            }
            Doing::SkipLine(tail) => lines::skip_line(self, tail, input),
            Doing::SkipBody(left, word) if left <= input.len() => {
                *input = &input[left..];
                Some(Err(word))
            }
            Doing::SkipBody(left, word) => {
                let dropped = std::mem::take(input).len();
                self.wait_for_input(Doing::SkipBody(left - dropped, word))
            }
            Doing::Steps(steps) => Some(self.go_on(s, steps)),
            waits @ (Doing::Line | Doing::Wait(_) | Doing::Closing | Doing::Leaving(_)) => {
                self.wait_for_input(waits)
            }
        }
    }

    fn wait_for_input(&mut self, doing: Doing) -> Option<Answer> {
        self.doing = doing;
        None
    }

    /// Runs the next step of a command.
    #[inline(never)]
    fn go_on(&mut self, s: &mut Store, steps: Steps) -> Answer {
        match steps {
            Steps::Kick(kick) => change::kick_step(self, s, kick),
            Steps::Reserve(reserve) => reserve::reserve_step(self, s, reserve),
            Steps::FillBatch(batch, reserve) => reserve::fill_batch_step(self, s, batch, reserve),
            Steps::DeleteBatch(batch) => change::delete_batch_step(self, s, batch),
            Steps::TouchAll(touch) => change::touch_all_step(self, s, touch),
            Steps::Select { scan, shows_bodies } => pages::select_step(self, s, scan, shows_bodies),
            Steps::ListClients(page) => {
                s.waiting_bytes -= page.lines.capacity();
                pages::report(self, Report::Clients(page))
            }
            Steps::ListWatched(text, next) => show::list_watched_step(self, s, text, next),
        }
    }

    /// Begins a command in steps, of which the first one may take this many units of work: at once, or after the short
    /// commands of others.
    pub fn begin_steps(&mut self, s: &mut Store, units: usize, steps: Steps) -> Answer {
        if s.queue.work.must_wait(units) { self.later(steps) } else { self.go_on(s, steps) }
    }

    /// Leaves the rest of a command for the next step.
    pub fn later(&mut self, steps: Steps) -> Answer {
        self.then(Doing::Steps(steps))
    }

    /// Continues with this, and replies later.
    #[inline]
    pub fn then(&mut self, doing: Doing) -> Answer {
        self.doing = doing;
        Ok(Reply::Later)
    }

    /// Ends what the connection does, and forgets it everywhere. It is closing from now on.
    pub fn cancel(&mut self, s: &mut Store) {
        match std::mem::replace(&mut self.doing, Doing::Closing) {
            Doing::Wait(WaitFor::Job(_)) => s.queue.stop_waiting(self.client.key),
            Doing::Wait(WaitFor::Bodies(wanted)) => reads::forget(s, self.client.key, &wanted),
            Doing::Wait(WaitFor::List) => s.lists.remove(self.client.key),
            Doing::Wait(WaitFor::Flush) => s.queue.abandon_flush(self.client.key),
            Doing::LargeBody(large) => s.queue.drop_body(large.body),
            Doing::Steps(Steps::ListClients(page)) => s.waiting_bytes -= page.lines.capacity(),
            Doing::Line
            | Doing::SkipLine(_)
            | Doing::Body(_)
            | Doing::SkipBody(..)
            | Doing::Steps(_)
            | Doing::Wait(WaitFor::Report(_))
            | Doing::Closing
            | Doing::Leaving(_) => {}
        }
        drop(self.take_input(s));
        self.output.clear(&mut s.pool, &mut s.queue.bodies);
    }

    /// Closes the connection, for which there is no memory, and drops its unsent output: the client
    /// must not take half a reply for a whole one.
    pub fn fail(&mut self, s: &mut Store) {
        self.cancel(s);
        self.mark_dirty(s);
    }

    /// Ends the wait of a client that has shut down its sending side, now and for later commands.
    /// More input may still arrive.
    pub fn half_close(&mut self, s: &mut Store) {
        self.is_half_closed = true;
        if matches!(self.doing, Doing::Wait(WaitFor::Job(_))) {
            s.queue.stop_waiting(self.client.key);
            self.end_wait(s, WaitResult::TimedOut);
        }
    }

    /// Replies to a connection whose wait has ended.
    pub fn end_wait(&mut self, s: &mut Store, result: WaitResult) {
        if let WaitResult::Reserved(job) = result {
            s.queue.hold(&mut self.client, job);
        }
        let Doing::Wait(WaitFor::Job(reserve)) = self.doing else {
            // It is closing, and gives the job back.
            return;
        };
        self.doing = Doing::Line;
        let answer = match result {
            WaitResult::Reserved(job) => reserve::awaited(self, s, job, reserve),
            WaitResult::DeadlineSoon => Err(Word::DEADLINE_SOON),
            WaitResult::TimedOut => Ok(reserve.timeout_reply()),
        };
        self.answer_later(s, answer);
    }

    // ---- Replies ----

    /// Appends the reply to the output, if there is one now.
    #[inline]
    fn answer(&mut self, s: &mut Store, answer: Answer) {
        match &answer {
            Ok(Reply::Later) => {}
            Ok(reply) => self.reply(s, reply),
            Err(word) => self.reply(s, &Reply::Word(*word)),
        }
    }

    /// Replies outside of a visit, or goes on in the next one.
    pub fn answer_later(&mut self, s: &mut Store, answer: Answer) {
        self.answer(s, answer);
        self.has_backlog |= self.doing.is_in_steps();
        self.mark_dirty(s);
    }

    /// Appends a reply to the output. Without memory for it the connection closes.
    #[inline]
    pub fn reply(&mut self, s: &mut Store, reply: &Reply) {
        let before = s.pool.text_len();
        let written = reply.write(&mut self.output, &mut s.pool, &s.queue.tubes);
        self.replied(s, before, written);
    }

    /// Appends a job with its body, which the client `has_reserved` or looks at: the one that was read back, or that of
    /// the job. Without memory for it the connection closes.
    #[inline(always)]
    pub fn reply_body(
        &mut self,
        s: &mut Store,
        has_reserved: bool,
        (job, id): (JobKey, u64),
        read: Option<&Rc<ReadBody>>,
    ) {
        let Queue { jobs, bodies, .. } = &mut s.queue;
        let body = read.map_or_else(|| &jobs[job].body, |read| &read.body);
        let before = s.pool.text_len();
        let written =
            write_job(has_reserved, id, body, read, &mut self.output, &mut s.pool, bodies);
        self.replied(s, before, written);
        if has_reserved {
            s.queue.after_reserve(job);
            if s.queue.holds_replies() && self.output.note_reserved(job).is_ok() {
                s.queue.hold_ttr(&mut self.client, job);
            }
        }
    }

    /// Handles that a reply was written behind a text of all outputs of this length.
    #[inline]
    fn replied(&mut self, s: &mut Store, before: usize, written: Result<(), NoMemory>) {
        s.queue.work.spend((s.pool.text_len() - before) / REPLY_BYTES_PER_WORK);
        if written.is_err() {
            self.fail(s);
        }
    }

    // ---- Input ----

    fn push_input(&mut self, s: &mut Store, bytes: &[u8]) -> Result<(), NoMemory> {
        let before = self.input.capacity();
        let pushed = self.input.push(bytes);
        s.input_bytes += self.input.capacity() - before;
        pushed
    }

    fn take_input(&mut self, s: &mut Store) -> Input {
        s.input_bytes -= self.input.capacity();
        std::mem::take(&mut self.input)
    }

    /// Handles that the input, for which there is no memory, was dropped. Returns whether the connection
    /// stays open: the `arrived` bytes were the beginning of a body and nothing else.
    fn drop_input(&mut self, s: &mut Store, arrived: usize) -> bool {
        if let Doing::Body(put) = &self.doing
            && let Some(left) = (put.full_len as usize).checked_sub(arrived)
            && left > 0
        {
            self.doing = Doing::SkipBody(left, Word::OUT_OF_MEMORY);
            return true;
        }
        self.fail(s);
        false
    }

    /// Returns the slot's next bytes, at most `limit`, for the loop to read a large body.
    /// Returns `None` if no large body is arriving, or if the connection must not be read.
    pub fn body_space<'s>(&self, s: &'s mut Store, limit: usize) -> Option<&'s mut [u8]> {
        let Doing::LargeBody(large) = &self.doing else { return None };
        let LargePut { body, filled, .. } = &**large;
        if !self.can_read(s) {
            return None;
        }
        let end = (*filled + limit).min(body.full_len() as usize);
        Some(s.queue.bodies.bytes_mut(body, *filled, end))
    }

    /// Accepts `count` bytes that were read into the slice of [`Conn::body_space`].
    pub fn receive_body(&mut self, s: &mut Store, count: usize) {
        let Doing::LargeBody(large) = std::mem::take(&mut self.doing) else {
            unreachable!("the connection had space for a large body")
        };
        s.begin_command();
        let answer = put::advance(self, s, large, count);
        self.answer(s, answer);
        s.end_command();
    }
}
