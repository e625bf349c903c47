//! The whole server as one value: bytes in, bytes out, and time as a parameter.
//!
//! The event loop (or a test) says what happened to a connection: [`Server::connect`],
//! [`Server::receive`], [`Server::half_close`], [`Server::end_input`], [`Server::disconnect`]; that
//! time has passed: [`Server::tick`]; and then looks after the connections in
//! [`Server::take_dirty`]: what is to be sent comes from their [`Server::output_handle`], and
//! [`Server::actions`] says whether they may be read from again, or are to be closed. The server
//! calls nobody back.
//!
//! A command may answer other connections than its own: those that waited. What these had sent
//! behind their `reserve` is not run inside that command: they are marked as dirty, want to
//! resume, and run in the next iteration of the loop, each with its own share.
//!
//! One iteration of the loop is bounded, whatever clients send. Work is counted in units of about a
//! quarter of a microsecond, not timed, so that tests can assert it: [`Server::begin_iteration`]
//! sets the budget, each command is charged to it, and [`Server::has_budget`] says when what is
//! left must wait for the next iteration.

use super::binlog::disk::{Disk, FileNumber};
use super::binlog::record;
use super::binlog::{IoFailed, NoSpace, Policy, Syncing};
use super::collections::histogram::Histogram;
use super::conn::{Actions, Arriving, Conn, Conns, OutputHandle, Phase, Put, Refusal, Step};
use super::headroom::{self, Headroom};
use super::keys::{ConnKey, JobKey};
use super::protocol::command::{self, Command, Counter, LineTail, Rejection};
use super::protocol::reply::Reply;
use super::protocol::stats::{self, ProcessInfo, ServerStats, StatusLine};
use super::queue::body::Body;
use super::queue::job::JobParams;
use super::queue::listing::{LISTED_AT_ONCE, ListText};
use super::queue::replay::{Recovered, Replay, ReplayError};
use super::queue::tube::{Listed, Tube};
use super::queue::waiters::Wait;
use super::queue::{
    Kick, LATE_DUE_WORK, LEAST_DUE_WORK, MOST_DUE_WORK, Outcome, Queue, StepResult, Totals,
    WORK_PER_WAKE, WaitResult,
};
use super::text::CR_LF;
use super::time::{ClockOffset, Nanos};
use log::{debug, trace, warn};
use std::collections::TryReserveError;
use std::rc::{Rc, Weak};

/// What the operator chose.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The largest body allowed, in bytes without CR LF.
    pub max_job_size: u32,
    /// The size of a binlog file, in bytes.
    pub binlog_file_size: u32,
    /// Puts are refused while jobs take this many bytes of memory.
    pub max_memory_bytes: u64,
}

impl Settings {
    /// As if he had chosen nothing.
    pub const DEFAULT: Settings = Settings {
        max_job_size: 65_535,
        binlog_file_size: 10 * 1024 * 1024,
        max_memory_bytes: u64::MAX,
    };
}

/// The server.
#[derive(Debug)]
pub struct Server {
    queue: Queue,
    /// Under the same keys as the clients of the queue.
    conns: Conns,
    settings: Settings,
    facts: ProcessInfo,
    commands: [u64; Counter::COUNT],
    total_connections: u64,
    last_id: u64,
    is_draining: bool,
    /// When the operator was told last that jobs take as much memory as they may.
    memory_warned_at: Option<Nanos>,
    /// The units of work that each connection may use in this iteration.
    share: usize,
    /// Units of its share that are left to the connection whose commands are run.
    share_left: usize,
    /// Units of work that are left to all connections in this iteration.
    budget_left: usize,
    /// The moment of the last command.
    last_moment: Nanos,
    /// Lists of very many tubes.
    lists: Lists,
    /// Units of work that a tick may use for each kind of thing that is due.
    due_work: usize,
}

/// What the page of metrics reads.
#[derive(Debug)]
pub struct View<'a> {
    pub server: ServerStats<'a>,
    pub queue: &'a Queue,
    pub conns: &'a Conns,
    /// How long the iterations of the loop took.
    pub iterations: &'a Histogram,
    pub now: Nanos,
}

/// The work of one iteration that many connections cause together: about 1 ms.
pub const ITERATION_WORK: usize = 4096;
/// The work that pipelined commands of all ready connections may cause together in one iteration,
/// unless the smallest share for each is more: some 15 us, so that a client that sends one command
/// at a time waits little behind one that sends thousands.
pub const SHARED_WORK: usize = 64;
/// The same where each iteration ends in a sync of the disk, which takes longer than all commands.
pub const SHARED_WORK_BEFORE_SYNC: usize = 1024;
const SMALLEST_SHARE: usize = 16;
/// The work of one connection that is served: it is read from and written to.
const WORK_PER_CONN: usize = 16;
/// A command is one unit, and so are this many bytes of its reply: a `stats` takes as long as
/// several `delete`s. A large body is not copied, and costs less for each byte.
const OUTPUT_PER_WORK: usize = 128;
/// A reserve checks at most this many watches in an iteration, and charges one unit for each two.
const WATCHES_AT_ONCE: usize = 2048;
const WATCHES_PER_WORK: usize = 2;
/// So many watches that are looked at, or names that are listed, are a part of any command.
const STEPS_FREE: usize = 32;
/// One unit for this many names in a list.
const LISTED_PER_WORK: usize = 4;
const LISTED_WHEN_CROWDED: usize = 16;
/// A list that several connections have asked for is sent to this many of them in an iteration.
const LISTS_SENT_AT_ONCE: usize = 64;
/// An eighth of what `--max-memory` allows is for commands that wait and unread replies.
const BUFFERS_PART: u64 = 8;
/// Limits the memory of long lists that are being made or were not read yet, as does an eighth of what
/// `--max-memory` allows. A list beyond that is refused, unless it is the only one.
const LISTS_MOST_BYTES: u64 = 64 * 1024 * 1024;
/// One unit for this many waiters of a tube that are counted.
const IN_LINE_PER_WORK: usize = 8;
/// Puts may be refused all the time; that is told only so often.
const WARN_AGAIN: Nanos = Nanos::from_secs(60);
/// A kick moves at most this many jobs in an iteration, or wakes 128 connections: a
/// fraction of a millisecond.
const KICKED_AT_ONCE: u32 = 1024;

impl Server {
    /// A server without jobs and connections.
    pub fn new(settings: Settings, facts: ProcessInfo, now: Nanos) -> Server {
        let buffer_limit = settings.max_memory_bytes / BUFFERS_PART;
        let buffer_limit = usize::try_from(buffer_limit).unwrap_or(usize::MAX);
        Server {
            queue: Queue::new(now),
            conns: Conns::new(buffer_limit),
            settings,
            facts,
            commands: [0; Counter::COUNT],
            total_connections: 0,
            last_id: 0,
            is_draining: false,
            memory_warned_at: None,
            share: SHARED_WORK,
            share_left: 0,
            budget_left: ITERATION_WORK,
            last_moment: now,
            lists: Lists::default(),
            due_work: MOST_DUE_WORK,
        }
    }

    /// Begins to take the jobs from the binlog on `disk`, which is kept from then on. To be called
    /// before anybody connects.
    ///
    /// # Errors
    /// The jobs cannot be had.
    pub fn begin_recovery(
        &mut self,
        disk: Box<dyn Disk>,
        syncing: Syncing,
    ) -> Result<Recovery<'_>, ReplayError> {
        let policy = Policy { file_size: self.settings.binlog_file_size, syncing };
        let replay = self.queue.begin_replay(disk)?;
        Ok(Recovery { replay, policy, last_id: &mut self.last_id })
    }

    /// Takes the jobs from the binlog on `disk`, all at once, and keeps it from then on. To be called
    /// before anybody connects.
    ///
    /// # Errors
    /// The jobs cannot be had, or the disk has failed; no record is lost.
    pub fn recover(
        &mut self,
        disk: Box<dyn Disk>,
        syncing: Syncing,
        now: Nanos,
    ) -> Result<Recovered, ReplayError> {
        let mut recovery = self.begin_recovery(disk, syncing)?;
        while recovery.next_file().is_some() {
            recovery.read_file()?;
        }
        recovery.finish(now)
    }

    // ---- What happens to connections ----

    /// Whether there is memory for one more client. Who is taken in all the same may have to be
    /// turned away.
    pub fn has_room(&self) -> bool {
        (self.facts.has_headroom)(Headroom::Half)
    }

    /// A client has connected.
    ///
    /// # Errors
    /// There is no memory for it: the client is to be turned away.
    pub fn connect(&mut self) -> Result<ConnKey, TryReserveError> {
        headroom::leave(Headroom::Half, || self.try_connect())
    }

    fn try_connect(&mut self) -> Result<ConnKey, TryReserveError> {
        self.queue.try_reserve_closing()?;
        let key = self.queue.connect()?;
        if let Err(no_memory) = self.conns.try_insert(key) {
            self.queue.undo_connect(key, self.last_moment);
            return Err(no_memory);
        }
        self.total_connections += 1;
        Ok(key)
    }

    /// Bytes have arrived from a client: runs every command that is complete.
    pub fn receive(&mut self, key: ConnKey, bytes: &[u8], now: Nanos) {
        if self.conns[key].input.is_empty() {
            self.run_fresh(key, bytes, now);
        } else if self.conns.push_input(key, bytes).is_ok() {
            self.run_buffered(key, now);
        } else {
            let arrived = self.conns.take_input(key).len();
            if self.drop_input(key, arrived) {
                self.run_fresh(key, bytes, now);
            }
        }
    }

    /// A client has shut down its sending side, though not all that it sent may have
    /// arrived yet: it will not wait any more.
    pub fn half_close(&mut self, key: ConnKey) {
        let conn = &mut self.conns[key];
        conn.is_half_closed = true;
        if matches!(conn.phase, Phase::Waiting) {
            self.queue.give_up_waiting(key, WaitResult::TimedOut);
        }
        self.settle();
    }

    /// Everything that a client sent has arrived; nothing more will.
    pub fn end_input(&mut self, key: ConnKey) {
        self.conns[key].input_ended = true;
        self.conns.mark_dirty(key);
        self.half_close(key);
    }

    /// Runs what a client sent and could not be run yet, because its replies were not taken
    /// or others had their turn: for connections that want to resume.
    pub fn resume(&mut self, key: ConnKey, now: Nanos) {
        self.run_buffered(key, now);
    }

    /// A connection is gone; its key may be used again.
    pub fn disconnect(&mut self, key: ConnKey, now: Nanos) {
        self.forget_list(key);
        self.conns.drop_buffers(key, &mut self.queue.bodies);
        if self.queue.disconnect(key, now) {
            self.conns.remove(key);
        }
        self.settle();
    }

    /// Gives back some of the jobs and watches of closed connections.
    fn drain_closing(&mut self, now: Nanos) {
        let mut work_left = self.due_work;
        while let Some(key) = self.queue.close_next(&mut work_left, now) {
            self.conns.remove(key);
        }
    }

    /// Time has passed: does what is due, though perhaps not all of it at once.
    pub fn tick(&mut self, now: Nanos) {
        self.queue.tick(self.due_work, now);
        self.drain_closing(now);
        self.list_step();
        self.settle();
    }

    /// Whether jobs are recorded in a binlog.
    pub fn has_binlog(&self) -> bool {
        self.queue.has_binlog()
    }

    /// The time of day is so far ahead of the engine's: what is recorded in the binlog must be
    /// true after a restart, when there is only the time of day to go by.
    pub fn set_clock_offset(&mut self, drift: ClockOffset) {
        self.queue.drift = drift;
    }

    /// An iteration of the loop begins, with a whole budget of work; `ready` connections want to be
    /// served.
    ///
    /// What is due gets about half of what clients have used in the iteration before: little when they
    /// want short iterations, more when something is late or iterations are long anyway, and as much
    /// as may be when no client wants to be served.
    pub fn begin_iteration(&mut self, ready: usize) {
        let used = ITERATION_WORK - self.budget_left;
        let least = if self.queue.is_late() { LATE_DUE_WORK } else { LEAST_DUE_WORK };
        self.due_work =
            if ready == 0 { MOST_DUE_WORK } else { (used / 2).clamp(least, MOST_DUE_WORK) };
        self.budget_left = ITERATION_WORK;
    }

    /// `connections` are to be served in this iteration, and share its budget: a client that sends
    /// thousands of commands at once has some of them run before others are served.
    pub fn share_budget(&mut self, connections: usize) {
        let shared =
            if self.queue.syncs_each_iteration() { SHARED_WORK_BEFORE_SYNC } else { SHARED_WORK };
        self.share = (shared / connections.max(1)).max(SMALLEST_SHARE);
    }

    /// Returns whether another connection may be served in this iteration.
    pub fn has_budget(&self) -> bool {
        self.budget_left > 0
    }

    /// Charges `work` units to this iteration.
    pub fn charge(&mut self, work: usize) {
        self.budget_left = self.budget_left.saturating_sub(work);
    }

    /// Writes what the turn has brought to the binlog, and syncs it if it is time for that. To
    /// be called before any output of the turn is sent.
    ///
    /// # Errors
    /// The disk has failed: nothing of the turn may be sent, and no more can be served.
    pub fn commit(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.queue.commit(now)
    }

    /// The server ends: whatever was recorded is synced, unless that is never wanted.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn close(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.queue.close_binlog(now)
    }

    /// When [`Server::tick`] or [`Server::commit`] has something to do; at or before that, never
    /// after.
    pub fn next_due(&self) -> Option<Nanos> {
        let is_busy = self.queue.closing().len() > 0 || !self.lists.is_idle();
        let at_once = is_busy.then_some(Nanos::ZERO);
        at_once.or_else(|| self.queue.next_due())
    }

    /// Whether puts are refused from now on, so that the queue runs empty.
    pub fn set_draining(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
    }

    // ---- What the loop asks ----

    /// The connection is to be among the next that [`Server::take_dirty`] names. Says what
    /// there is to do for it.
    pub fn mark_dirty(&mut self, key: ConnKey) -> Actions {
        self.conns.mark_dirty(key)
    }

    /// Moves the keys of the connections that are to be looked after to `keys`. Some may
    /// have been disconnected meanwhile, and their keys given to new ones.
    pub fn take_dirty(&mut self, keys: &mut Vec<ConnKey>) {
        self.conns.take_dirty(keys);
    }

    /// Whether there are such connections.
    pub fn has_dirty(&self) -> bool {
        self.conns.has_dirty()
    }

    /// What there is to do for a connection.
    pub fn actions(&self, key: ConnKey) -> Actions {
        self.conns.actions(key)
    }

    /// Returns whether little should be read of each connection, since what they have sent and not
    /// read takes as much memory as it may.
    pub fn is_crowded(&self) -> bool {
        self.conns.are_crowded()
    }

    /// Returns whether the client probably sends a large body next.
    pub fn sends_large_bodies(&self, key: ConnKey) -> bool {
        self.conns[key].sends_large_bodies
    }

    /// The way out of a connection, which has been looked after with that.
    pub fn output_handle(&mut self, key: ConnKey) -> OutputHandle<'_> {
        self.conns.output_handle(key, &mut self.queue.bodies)
    }

    /// How many connections there are.
    pub fn connection_count(&self) -> usize {
        self.conns.len() - self.queue.closing().len()
    }

    /// Returns what the page of metrics reads. `iterations` is how long those of the loop took.
    pub fn view<'a>(&'a self, iterations: &'a Histogram, now: Nanos) -> View<'a> {
        let server = self.own_stats();
        View { server, queue: &self.queue, conns: &self.conns, iterations, now }
    }

    /// Whether puts are refused so that the queue runs empty.
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// How the server does.
    pub fn summary(&self) -> StatusLine {
        let Totals { ready, reserved, delayed, buried, .. } = self.queue.totals;
        let (connections, is_draining) = (self.connection_count(), self.is_draining);
        StatusLine { ready, reserved, delayed, buried, connections, is_draining }
    }

    // ---- Checking ----

    /// Counts everything anew that the server knows, and compares; for tests, which call it between
    /// any two of the calls above. Only there does all of it hold, and no more once
    /// [`Server::recover`] has failed or [`Server::close`] was called; after a failed
    /// [`Server::commit`] it does.
    ///
    /// # Panics
    /// Something does not agree.
    pub fn check(&self) {
        self.queue.check_with(self.conns.bodies());
        self.conns.check();
        assert_eq!(self.queue.wait_results.len(), 0, "answers that were not delivered");
        let (conns, clients) = (self.conns.len(), self.queue.clients.len());
        assert_eq!(conns, clients, "connections, and what the rules know of them");
        assert!(
            conns as u64 <= self.total_connections,
            "{conns} connections, but {} since the start",
            self.total_connections
        );
        for (key, conn) in self.conns.iter() {
            self.check_conn(key, conn);
        }
        for key in self.queue.closing() {
            let conn = &self.conns[key];
            let is_gone = matches!(conn.phase, Phase::Closing)
                && conn.input.is_empty()
                && conn.output.is_empty();
            assert!(is_gone, "connection {} is gone, but not all of it: {conn:?}", key.index());
        }
        for (_, job) in self.queue.jobs.iter() {
            // What damage has made of an id is none that was given out.
            let is_given_out = job.id <= self.last_id || job.id > record::HIGHEST_ID;
            assert!(is_given_out, "job {}, but {} was given out last", job.id, self.last_id);
        }
    }

    fn check_conn(&self, key: ConnKey, conn: &Conn) {
        let (index, phase) = (key.index(), &conn.phase);
        let client = self.queue.clients.get(key);
        let client = client.unwrap_or_else(|| panic!("no rules know connection {index}"));
        assert_eq!(
            matches!(phase, Phase::Waiting),
            client.watching.is_waiting(),
            "whether connection {index} waits, {phase:?}, and whether the rules know of it"
        );
        match phase {
            Phase::Body(put) => {
                let longest = self.settings.max_job_size as usize + CR_LF.len();
                let is_new = put.id <= self.last_id && self.queue.jobs.find(put.id).is_none();
                assert!(
                    is_new && put.full_len as usize <= longest,
                    "connection {index} puts {put:?}: ids up to {} are given out",
                    self.last_id
                );
            }
            Phase::Kicking(kick) => assert!(
                kick.tube == client.used && kick.left > 0,
                "connection {index} kicks {kick:?}, but uses {:?}",
                client.used
            ),
            Phase::LargeBody(Arriving { put, body, .. }) => assert!(
                put.id <= self.last_id && put.full_len == body.full_len(),
                "connection {index} puts {put:?} into {body:?}"
            ),
            Phase::Listing => {
                let asked = self.lists.made_for.iter().chain(&self.lists.wanted_by);
                let count = asked.filter(|&&other| other == key).count();
                assert_eq!(count, 1, "lists for which connection {index} waits");
            }
            Phase::Line
            | Phase::TooLongLine(_)
            | Phase::UnwantedBody { .. }
            | Phase::Looking(_)
            | Phase::ListingWatched(..)
            | Phase::Waiting
            | Phase::Closing => {}
        }
    }

    // ---- Running commands ----

    /// Runs what has just arrived, and keeps what is left of it.
    fn run_fresh(&mut self, key: ConnKey, bytes: &[u8], now: Nanos) {
        let rest = self.run(key, bytes, now);
        if !rest.is_empty()
            && !matches!(self.conns[key].phase, Phase::Closing)
            && self.conns.push_input(key, rest).is_err()
        {
            self.drop_input(key, rest.len());
        }
    }

    /// Runs what a connection sent earlier.
    fn run_buffered(&mut self, key: ConnKey, now: Nanos) {
        let mut input = self.conns.take_input(key);
        let left = self.run(key, input.unused(), now).len();
        if !matches!(self.conns[key].phase, Phase::Closing) {
            input.keep_last(left);
            self.conns.put_back_input(key, input);
        }
    }

    /// There is no memory to keep what a client sends. Says whether it goes on all the same: it
    /// does when the `arrived` bytes are the beginning of a body and nothing else.
    fn drop_input(&mut self, key: ConnKey, arrived: usize) -> bool {
        let goes_on = self.conns[key].give_up_body(arrived);
        if !goes_on {
            self.close_now(key);
        }
        goes_on
    }

    /// Runs the complete commands of `input`, up to the connection's share of the turn, and
    /// returns what is left of it.
    fn run<'a>(&mut self, key: ConnKey, mut input: &'a [u8], now: Nanos) -> &'a [u8] {
        self.charge(WORK_PER_CONN);
        self.share_left = self.share;
        while self.share_left > 0 && self.conns[key].has_step(input) {
            let output_limit = self.conns.output_limit();
            let Some(step) = self.conns[key].next_step(&mut input, output_limit) else { break };
            let now = self.moment(now);
            match step {
                Step::Line(line) => self.run_line(key, line, now),
                Step::TooLongLine(tail) => self.reject(key, tail, Rejection::BadFormat),
                Step::Put(put, body) => self.finish_small_put(key, put, body, now),
                Step::BeginBody(put) => self.begin_body(key, put),
                Step::BodyPart(part) => self.add_to_body(key, part, now),
                Step::Unwanted(why) => self.reply(key, why.into()),
                Step::Kick(kick) => self.go_on_kicking(key, kick, now),
                Step::Look(wait) => self.look_for_job(key, wait, now),
                Step::ListWatched => self.go_on_listing_watched(key),
            }
            self.after_command();
        }
        let output_limit = self.conns.output_limit();
        let conn = &mut self.conns[key];
        conn.has_backlog =
            conn.has_step(input) && (self.share_left == 0 || !conn.takes_commands(output_limit));
        if conn.has_backlog {
            self.conns.mark_dirty(key);
        }
        input
    }

    /// Answers the connections that waited, and charges what the step has cost.
    fn after_command(&mut self) {
        let wakes =
            if self.queue.wait_results.is_empty() { 0 } else { self.deliver_wait_results() };
        let said = self.conns.take_said_bytes() / OUTPUT_PER_WORK;
        let unsettling = self.queue.take_unsettling_work();
        self.charge(unsettling);
        let done = self.queue.take_work();
        self.charge_share(1 + said + wakes + done);
    }

    fn charge_share(&mut self, work: usize) {
        self.share_left = self.share_left.saturating_sub(work);
        self.charge(work);
    }

    /// Every command has a moment of its own, as if the clock were read for each, so that
    /// what many commands of one read set to the same delay comes due in their order.
    fn moment(&mut self, now: Nanos) -> Nanos {
        self.last_moment = now.max(self.last_moment + Nanos::ONE);
        self.last_moment
    }

    /// Answers the connections that waited, in an iteration but in no command.
    fn settle(&mut self) {
        let work = self.deliver_wait_results();
        let said = self.conns.take_said_bytes() / OUTPUT_PER_WORK;
        self.charge(work + said);
    }

    fn run_line(&mut self, key: ConnKey, line: &[u8], now: Nanos) {
        trace!("connection {}: {}", key.index(), line.escape_ascii());
        match command::parse(line) {
            Ok(command) => {
                if let Some(counter) = command.counter() {
                    self.commands[counter as usize] += 1;
                }
                self.execute(key, command, now);
            }
            Err(rejection) => self.reject(key, line.into(), rejection),
        }
    }

    /// What is no command is answered, and no more is heard from who speaks HTTP.
    fn reject(&mut self, key: ConnKey, line: LineTail, rejection: Rejection) {
        if line.is_http() {
            debug!("connection {}: an HTTP request, nothing behind it is read", key.index());
            self.reply(key, Reply::UnknownCommand);
            return self.close_after_write(key);
        }
        self.reply(key, rejection.into());
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each command, and nothing else")]
    fn execute(&mut self, key: ConnKey, command: Command<'_>, now: Nanos) {
        match command {
            Command::Put { pri, delay_secs, ttr_secs, body_len, trailing } => {
                self.begin_put(key, JobParams { pri, delay_secs, ttr_secs }, body_len, trailing);
            }
            Command::Reserve => self.reserve(key, None, now),
            Command::ReserveWithTimeout { timeout_secs } => {
                self.reserve(key, Some(timeout_secs), now)
            }
            Command::ReserveJob { id } => self.reserve_job(key, id, now),
            Command::Delete { id } => {
                let outcome = self.queue.delete(key, id);
                self.reply_outcome(key, outcome, Reply::Deleted);
            }
            Command::Release { id, pri, delay_secs } => {
                let outcome = self.queue.release(key, id, pri, delay_secs, now);
                self.reply_outcome(key, outcome, Reply::Released);
            }
            Command::Bury { id, pri } => {
                let outcome = self.queue.bury(key, id, pri, now);
                self.reply_outcome(key, outcome, Reply::Buried);
            }
            Command::Touch { id } => {
                let is_done = self.queue.touch(key, id, now);
                self.reply_if(key, is_done, Reply::Touched);
            }
            Command::Kick { bound } => {
                let kick = self.queue.plan_kick(self.queue.clients[key].used, bound);
                self.go_on_kicking(key, kick, now);
            }
            Command::KickJob { id } => {
                let outcome = self.queue.kick_job(id, now);
                self.reply_outcome(key, outcome, Reply::KickedJob);
            }

            Command::Use { tube } => self.use_tube(key, tube),
            Command::Watch { tube } => self.watch(key, tube),
            Command::Ignore { tube } => self.ignore(key, tube),
            Command::PauseTube { tube: Some(_), pause_secs: 1.. } if !self.has_room_for_tubes() => {
                self.reply(key, Reply::OutOfMemory);
            }
            Command::PauseTube { tube: Some(tube), pause_secs } => {
                let is_done = self.queue.pause(tube, pause_secs, now);
                self.reply_if(key, is_done, Reply::Paused);
            }
            Command::PauseTube { tube: None, .. } => self.reply(key, Reply::BadFormat),

            Command::Peek { id } => self.say_found(key, self.queue.jobs.find(id)),
            Command::PeekReady => {
                self.say_found(key, self.used_tube(key).first_ready());
            }
            Command::PeekDelayed => {
                self.say_found(key, self.used_tube(key).first_delayed());
            }
            Command::PeekBuried => {
                self.say_found(key, self.used_tube(key).first_buried());
            }

            Command::Stats => {
                let text = self.stats(now);
                self.reply(key, Reply::Document { text: &text });
            }
            Command::StatsJob { id } => {
                let queue = &self.queue;
                match queue.jobs.find(id).map(|job| stats::job(&queue.jobs[job], queue, now)) {
                    Some(text) => self.reply(key, Reply::Document { text: &text }),
                    None => self.reply(key, Reply::NotFound),
                }
            }
            Command::StatsTube { tube } => self.stats_tube(key, tube, now),
            Command::ListTubes => self.list_tubes(key),
            Command::ListTubesWatched => self.list_tubes_watched(key),
            Command::ListTubeUsed => {
                let tube = self.used_tube(key).name.clone();
                self.reply(key, Reply::Using { tube: &tube });
            }

            Command::Quit => self.close_after_write(key),
        }
    }

    // ---- Putting ----

    fn begin_put(&mut self, key: ConnKey, terms: JobParams, body_len: u32, trailing: bool) {
        let full_len = body_len as usize + CR_LF.len();
        if body_len > self.settings.max_job_size {
            return self.refuse_body(key, full_len, Refusal::JobTooBig);
        }
        if trailing {
            // Quirk: the body is read as commands; pinned by tests/conversations/put-bad-format.txt.
            return self.reply(key, Reply::BadFormat);
        }
        self.queue.becomes_producer(key);
        // In drain mode that is what the client is to hear, at the end of the body.
        let has_memory = self.is_draining || self.has_memory_for(full_len);
        if !has_memory || !(self.facts.has_headroom)(Headroom::Whole) {
            return self.refuse_body(key, full_len, Refusal::OutOfMemory);
        }
        self.last_id += 1;
        let full_len = u32::try_from(full_len).expect("the largest size allowed is 2^30");
        let conn = &mut self.conns[key];
        conn.sends_large_bodies = full_len as usize >= Conn::WORTH_TWO_READS;
        conn.phase = Phase::Body(Put { id: self.last_id, terms, full_len });
    }

    /// Whether the operator allows jobs as much memory as one more with such a body takes.
    fn has_memory_for(&mut self, full_len: usize) -> bool {
        let limit = self.settings.max_memory_bytes;
        // As with most servers; adding up would take a twentieth of the time of a put.
        if limit == u64::MAX {
            return true;
        }
        let is_over = |queue: &Queue| {
            let taken = queue.job_bytes().saturating_add(queue.bytes_of_a_job(full_len));
            taken.checked_sub(limit).filter(|&over| over > 0)
        };
        // Pages that are kept for the next bodies are the first to go.
        let has_memory = loop {
            let Some(over) = is_over(&self.queue) else { break true };
            if !self.queue.bodies.free_empty(over) {
                break false;
            }
        };
        let taken = self.queue.job_bytes();
        let now = self.last_moment;
        if !has_memory && self.memory_warned_at.is_none_or(|at| at + WARN_AGAIN <= now) {
            self.memory_warned_at = Some(now);
            warn!(
                "a put is answered OUT_OF_MEMORY: jobs, arriving bodies and unread replies take \
                 {taken} bytes of memory, and {limit} are allowed"
            );
        }
        has_memory
    }

    /// Returns the reply to a put for which there is no memory.
    fn refusal(&self) -> Refusal {
        if self.is_draining { Refusal::Draining } else { Refusal::OutOfMemory }
    }

    fn refuse_body(&mut self, key: ConnKey, left: usize, why: Refusal) {
        self.conns[key].phase = Phase::UnwantedBody { left, why };
    }

    /// Allocates the place for a large body that is about to arrive.
    fn begin_body(&mut self, key: ConnKey, put: Put) {
        let full_len = put.full_len as usize;
        let body = if self.has_memory_for(full_len) {
            headroom::leave(Headroom::Whole, || self.queue.bodies.begin(full_len)).ok()
        } else {
            None
        };
        match body {
            Some(body) => {
                self.conns[key].phase = Phase::LargeBody(Arriving { put, body, filled: 0 });
            }
            None => self.refuse_body(key, full_len, self.refusal()),
        }
    }

    /// Returns where the next bytes of a large body that is arriving may be read to, at most `limit`
    /// of them; nothing if the client is to send something else, or is not to be read from.
    pub fn body_space(&mut self, key: ConnKey, limit: usize) -> Option<&mut [u8]> {
        let conn = &self.conns[key];
        if !conn.actions(self.conns.output_limit()).read {
            return None;
        }
        let Phase::LargeBody(Arriving { body, filled, .. }) = &conn.phase else { return None };
        let end = (*filled + limit).min(body.full_len() as usize);
        Some(self.queue.bodies.space(body, *filled, end))
    }

    /// The first `count` bytes of what [`Server::body_space`] returned have been read.
    pub fn receive_body(&mut self, key: ConnKey, count: usize, now: Nanos) {
        self.charge(WORK_PER_CONN);
        self.share_left = self.share;
        let now = self.moment(now);
        self.body_grows(key, count, now);
        self.after_command();
    }

    fn add_to_body(&mut self, key: ConnKey, part: &[u8], now: Nanos) {
        let Phase::LargeBody(Arriving { body, filled, .. }) = &self.conns[key].phase else {
            return;
        };
        let (from, to) = (*filled, *filled + part.len());
        self.queue.bodies.space(body, from, to).copy_from_slice(part);
        self.body_grows(key, part.len(), now);
    }

    fn body_grows(&mut self, key: ConnKey, count: usize, now: Nanos) {
        let phase = &mut self.conns[key].phase;
        let Phase::LargeBody(arriving) = phase else { return };
        arriving.filled += count;
        if arriving.filled < arriving.put.full_len as usize {
            return;
        }
        if let Phase::LargeBody(Arriving { put, body, .. }) = std::mem::take(phase) {
            let ends_well = self.queue.bodies.bytes(&body).ends_with(CR_LF);
            self.finish_put(key, put, ends_well, Ok(body), now);
        }
    }

    fn finish_small_put(&mut self, key: ConnKey, put: Put, bytes: &[u8], now: Nanos) {
        // Other clients may have put jobs while this body arrived.
        let body = if self.has_memory_for(bytes.len()) && self.has_room() {
            headroom::leave(Headroom::Whole, || self.queue.bodies.add(bytes)).map_err(NoSpace::from)
        } else {
            Err(NoSpace::Space)
        };
        self.finish_put(key, put, bytes.ends_with(CR_LF), body, now);
    }

    fn finish_put(
        &mut self,
        key: ConnKey,
        put: Put,
        ends_well: bool,
        body: Result<Body, NoSpace>,
        now: Nanos,
    ) {
        let Put { id, terms, .. } = put;
        let refusal = if !ends_well {
            Some(Reply::ExpectedCrLf)
        } else if self.is_draining {
            Some(Reply::Draining)
        } else {
            None
        };
        if let Some(reply) = refusal {
            body.into_iter().for_each(|body| self.queue.drop_body(body));
            return self.reply(key, reply);
        }
        let mut put = |body| self.queue.put(key, id, terms, body, now);
        let reply = match body.and_then(|body| headroom::leave(Headroom::Whole, || put(body))) {
            Ok(()) => Reply::Inserted { id },
            Err(NoSpace::Space | NoSpace::Memory) => Reply::OutOfMemory,
        };
        self.reply(key, reply);
    }

    // ---- Reserving and giving back ----

    fn reserve(&mut self, key: ConnKey, timeout_secs: Option<u32>, now: Nanos) {
        self.queue.becomes_worker(key);
        // Also for the job that comes while the connection waits.
        if self.queue.try_reserve_room(key).is_err() {
            return self.reply(key, Reply::OutOfMemory);
        }
        let until = timeout_secs.map_or(Nanos::NEVER, |secs| now + Nanos::from_secs(secs));
        let ticket = self.queue.next_wait_seq();
        self.look_for_job(key, Wait { ticket, until }, now);
    }

    /// Reserves a job, or waits if there is none. With very many watched tubes this takes several
    /// iterations; tubes that change in between are checked again.
    fn look_for_job(&mut self, key: ConnKey, wait: Wait, now: Nanos) {
        // A reply that finds no memory closes the connection: the phase is set before it is made.
        self.conns[key].phase = Phase::Line;
        let mut steps_left = WATCHES_AT_ONCE;
        let looked = self.look_once(key, wait, &mut steps_left, now);
        let steps = WATCHES_AT_ONCE - steps_left;
        self.charge_share(steps.saturating_sub(STEPS_FREE) / WATCHES_PER_WORK);
        match looked {
            Ok(Some(phase)) => self.conns[key].phase = phase,
            Ok(None) => {}
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Returns what the connection does next if it is not answered.
    fn look_once(
        &mut self,
        key: ConnKey,
        wait: Wait,
        steps_left: &mut usize,
        now: Nanos,
    ) -> Result<Option<Phase>, TryReserveError> {
        match self.queue.reserve(key, steps_left, now)? {
            StepResult::Reserved(job) => {
                self.reply_reserved(key, job);
                return Ok(None);
            }
            StepResult::Unfinished => return Ok(Some(Phase::Looking(wait))),
            StepResult::Nothing => {}
        }
        if self.queue.is_deadline_soon(key, now) {
            self.reply(key, Reply::DeadlineSoon);
            return Ok(None);
        }
        if wait.until <= now || self.conns[key].is_half_closed {
            self.reply(key, Reply::TimedOut);
            return Ok(None);
        }
        let waits = self.queue.wait(key, wait, steps_left, now)?;
        Ok(Some(if waits { Phase::Waiting } else { Phase::Looking(wait) }))
    }

    fn reserve_job(&mut self, key: ConnKey, id: u64, now: Nanos) {
        if self.queue.try_reserve_room(key).is_err() {
            return self.reply(key, Reply::OutOfMemory);
        }
        match self.queue.reserve_job(key, id, now) {
            Some(job) => {
                self.queue.becomes_worker(key);
                self.reply_reserved(key, job);
            }
            None => self.reply(key, Reply::NotFound),
        }
    }

    /// A kick of very many jobs lets others have their turn in between.
    fn go_on_kicking(&mut self, key: ConnKey, mut kick: Kick, now: Nanos) {
        let before = kick.kicked;
        let outcome = self.queue.kick(&mut kick, KICKED_AT_ONCE, now);
        self.charge_share((kick.kicked - before) as usize);
        self.conns[key].phase = if kick.left > 0 { Phase::Kicking(kick) } else { Phase::Line };
        match outcome {
            Ok(()) if kick.left > 0 => {}
            Ok(()) => self.reply(key, Reply::Kicked { count: kick.kicked }),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    // ---- Tubes ----

    /// Returns whether there is memory for more tubes and watches.
    fn has_room_for_tubes(&self) -> bool {
        (self.facts.has_headroom)(Headroom::ThreeQuarters)
    }

    fn use_tube(&mut self, key: ConnKey, tube: &str) {
        let is_used = self.has_room_for_tubes()
            && headroom::leave(Headroom::ThreeQuarters, || self.queue.use_tube(key, tube)).is_ok();
        self.reply(key, if is_used { Reply::Using { tube } } else { Reply::OutOfMemory });
    }

    fn watch(&mut self, key: ConnKey, tube: &str) {
        self.queue.clients[key].watching.prepare_to_compare();
        let is_watched = self.has_room_for_tubes()
            && headroom::leave(Headroom::ThreeQuarters, || self.queue.watch(key, tube)).is_ok();
        if is_watched {
            self.say_watching(key);
        } else {
            self.reply(key, Reply::OutOfMemory);
        }
    }

    fn ignore(&mut self, key: ConnKey, tube: &str) {
        if self.queue.ignore(key, tube) {
            self.say_watching(key);
        } else {
            self.reply(key, Reply::NotIgnored);
        }
    }

    fn say_watching(&mut self, key: ConnKey) {
        let count = self.queue.clients[key].watching.len();
        self.reply(key, Reply::Watching { count });
    }

    // ---- Lists ----

    fn list_tubes(&mut self, key: ConnKey) {
        let tubes = &self.queue.tubes;
        if tubes.len() <= self.listed_at_once() {
            let text = stats::list(tubes.iter().map(|tube| &*tube.name));
            self.charge_share(tubes.len().saturating_sub(STEPS_FREE) / LISTED_PER_WORK);
            return self.say_list(key, text);
        }
        let has_memory = headroom::leave(Headroom::ThreeQuarters, || self.lists.try_reserve());
        if has_memory.is_err() || !self.may_list(0) {
            return self.reply(key, Reply::OutOfMemory);
        }
        self.lists.wanted_by.push(key);
        self.conns[key].phase = Phase::Listing;
    }

    fn list_tubes_watched(&mut self, key: ConnKey) {
        let queue = &self.queue;
        let watching = &queue.clients[key].watching;
        let count = watching.len();
        if count <= self.listed_at_once() {
            let watched = watching.tubes(&queue.watches);
            let text = stats::list(watched.map(|tube| &*queue.tubes[tube].name));
            self.charge_share(count.saturating_sub(STEPS_FREE) / LISTED_PER_WORK);
            return self.say_list(key, text);
        }
        let first = watching.first_watch();
        match (ListText::new(), first) {
            (Ok(text), Some(first)) if self.may_list(0) => {
                self.lists.incomplete_bytes += text.len() as u64;
                self.conns[key].phase = Phase::ListingWatched(text, first);
            }
            _ => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Adds some more tubes to the list of those that a connection watches.
    fn go_on_listing_watched(&mut self, key: ConnKey) {
        let phase = std::mem::take(&mut self.conns[key].phase);
        let Phase::ListingWatched(mut text, first) = phase else { return };
        self.charge_share(LISTED_AT_ONCE / LISTED_PER_WORK);
        self.lists.incomplete_bytes -= text.len() as u64;
        let mut next = Some(first);
        for _ in 0..LISTED_AT_ONCE {
            let Some(watch) = next else { break };
            if text.push_name(&self.queue.watched_tube(watch).name).is_err() {
                return self.reply(key, Reply::OutOfMemory);
            }
            next = self.queue.clients[key].watching.watch_after(watch, &self.queue.watches);
        }
        let has_memory = headroom::leave(Headroom::ThreeQuarters, || self.lists.try_reserve());
        if has_memory.is_err() || !self.may_list(text.len() as u64) {
            return self.reply(key, Reply::OutOfMemory);
        }
        if let Some(next) = next {
            self.lists.incomplete_bytes += text.len() as u64;
            self.conns[key].phase = Phase::ListingWatched(text, next);
        } else if text.finish().is_ok() {
            let text = Rc::new(text);
            self.lists.note(&text);
            self.reply(key, Reply::LongList { text: &text });
        } else {
            self.reply(key, Reply::OutOfMemory);
        }
    }

    /// Returns how many names are listed at once, in a reply of its own. When memory for replies is
    /// short, they are few, and longer lists are shared.
    fn listed_at_once(&self) -> usize {
        if self.conns.are_crowded() { LISTED_WHEN_CROWDED } else { LISTED_AT_ONCE }
    }

    /// Returns whether a list of `own_bytes` bytes may be made and sent beside the others that there
    /// are. One list may always be, however long it is.
    fn may_list(&mut self, own_bytes: u64) -> bool {
        let most = LISTS_MOST_BYTES.min(self.settings.max_memory_bytes / BUFFERS_PART);
        let others = self.lists.bytes();
        others == 0 || others + own_bytes < most
    }

    /// The connection does not get the list for which it waits.
    fn forget_list(&mut self, key: ConnKey) {
        let phase = &self.conns[key].phase;
        if matches!(phase, Phase::Listing) {
            self.lists.forget(key);
            if self.lists.made_for.is_empty() {
                self.queue.tubes.give_up_listing();
            }
        } else if let Phase::ListingWatched(text, _) = phase {
            self.lists.incomplete_bytes -= text.len() as u64;
        }
    }

    /// Adds the next tubes to the list of all tubes, and sends a complete list to some of the
    /// connections that wait for it.
    fn list_step(&mut self) {
        if self.lists.is_idle() {
            return;
        }
        if self.lists.made.is_none() {
            if self.lists.made_for.is_empty() {
                // All connections that have asked until now get the next list.
                self.lists.made_for = std::mem::take(&mut self.lists.wanted_by);
                // Without memory for its beginning, the next call returns `NoMemory`.
                let _ = self.queue.tubes.begin_listing();
            }
            let mut steps_left = LISTED_AT_ONCE;
            match self.queue.tubes.list_step(&mut steps_left) {
                Listed::Unfinished => return,
                Listed::NoMemory => {}
                Listed::Whole(text) => {
                    let text = Rc::new(text);
                    self.lists.note(&text);
                    self.lists.made = Some(text);
                }
            }
        }
        for _ in 0..LISTS_SENT_AT_ONCE {
            let Some(key) = self.lists.made_for.pop() else { break };
            self.conns[key].phase = Phase::Line;
            match self.lists.made.clone() {
                Some(text) => self.reply(key, Reply::LongList { text: &text }),
                None => self.reply(key, Reply::OutOfMemory),
            }
        }
        if self.lists.made_for.is_empty() {
            self.lists.made = None;
        }
    }

    fn used_tube(&self, key: ConnKey) -> &Tube {
        &self.queue.tubes[self.queue.clients[key].used]
    }

    fn stats(&self, now: Nanos) -> String {
        stats::server(&self.own_stats(), &self.queue, now)
    }

    fn own_stats(&self) -> ServerStats<'_> {
        let max_memory_bytes = self.settings.max_memory_bytes;
        ServerStats {
            facts: &self.facts,
            commands: &self.commands,
            max_job_size: self.settings.max_job_size,
            binlog_file_size: self.settings.binlog_file_size,
            max_memory_bytes: (max_memory_bytes < u64::MAX).then_some(max_memory_bytes),
            connections: self.connection_count(),
            total_connections: self.total_connections,
            is_draining: self.is_draining,
        }
    }

    fn stats_tube(&mut self, key: ConnKey, name: &str, now: Nanos) {
        let Some(tube) = self.queue.tubes.find(name) else {
            return self.reply(key, Reply::NotFound);
        };
        let text = stats::tube(&self.queue.tubes[tube], self.queue.count_waiting(tube), now);
        // Everybody in line was looked at.
        self.charge_share(self.queue.tubes[tube].line.len() / IN_LINE_PER_WORK);
        self.reply(key, Reply::Document { text: &text });
    }

    // ---- Speaking ----

    /// Sends the results of waits to the connections that waited. Returns the work that this makes.
    fn deliver_wait_results(&mut self) -> usize {
        let work = self.queue.wait_results.len() * WORK_PER_WAKE;
        while let Some((key, answer)) = self.queue.wait_results.pop_front() {
            self.conns[key].phase = Phase::Line;
            match answer {
                WaitResult::Reserved(job) => self.reply_reserved(key, job),
                WaitResult::DeadlineSoon => self.reply(key, Reply::DeadlineSoon),
                WaitResult::TimedOut => self.reply(key, Reply::TimedOut),
            }
        }
        work
    }

    fn reply(&mut self, key: ConnKey, reply: Reply<'_>) {
        if self.conns.reply(key, reply, &mut self.queue.bodies).is_err() {
            self.close_now(key);
        }
    }

    fn say_list(&mut self, key: ConnKey, list: Result<String, TryReserveError>) {
        match list {
            Ok(text) => self.reply(key, Reply::Document { text: &text }),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    fn reply_if(&mut self, key: ConnKey, is_done: bool, reply: Reply<'_>) {
        self.reply(key, if is_done { reply } else { Reply::NotFound });
    }

    fn reply_outcome(&mut self, key: ConnKey, outcome: Outcome, done: Reply<'_>) {
        let reply = match outcome {
            Outcome::Done => done,
            Outcome::Buried => Reply::Buried,
            Outcome::NotFound => Reply::NotFound,
            Outcome::NoSpace => Reply::OutOfMemory,
        };
        self.reply(key, reply);
    }

    fn say_found(&mut self, key: ConnKey, job: Option<JobKey>) {
        match job {
            Some(job) => self.say_job(key, job, |id, body| Reply::Found { id, body }),
            None => self.reply(key, Reply::NotFound),
        }
    }

    fn reply_reserved(&mut self, key: ConnKey, job: JobKey) {
        self.say_job(key, job, |id, body| Reply::Reserved { id, body });
    }

    fn say_job(&mut self, key: ConnKey, job: JobKey, reply: fn(u64, &Body) -> Reply<'_>) {
        let Queue { jobs, bodies, .. } = &mut self.queue;
        let job = &jobs[job];
        if self.conns.reply(key, reply(job.id, &job.body), bodies).is_err() {
            self.close_now(key);
        }
    }

    /// Nothing more is heard from this client; what it was told is still sent.
    fn close_after_write(&mut self, key: ConnKey) {
        self.conns[key].phase = Phase::Closing;
        self.conns.mark_dirty(key);
    }

    /// There is no memory to go on with this client: what it has not been sent is
    /// dropped, so that it cannot mistake half a reply for a whole one.
    fn close_now(&mut self, key: ConnKey) {
        self.forget_list(key);
        self.queue.stop_waiting(key);
        self.conns.drop_buffers(key, &mut self.queue.bodies);
        self.close_after_write(key);
    }
}

/// Lists of very many tubes.
#[derive(Debug, Default)]
struct Lists {
    /// The connections that get the list that is being made, or sent.
    made_for: Vec<ConnKey>,
    /// The list, once it is complete.
    made: Option<Rc<ListText>>,
    /// The connections that have asked since that list was begun.
    wanted_by: Vec<ConnKey>,
    /// All complete lists of which a connection may still have to be sent a part.
    unread: Vec<Weak<ListText>>,
    /// The bytes of all lists of watched tubes that are not complete yet.
    incomplete_bytes: u64,
}

impl Lists {
    fn is_idle(&self) -> bool {
        self.made_for.is_empty() && self.wanted_by.is_empty()
    }

    /// Makes sure that one more connection can ask, and one more list be noted.
    fn try_reserve(&mut self) -> Result<(), TryReserveError> {
        self.unread.try_reserve(1)?;
        self.wanted_by.try_reserve(1)
    }

    /// A list is about to be sent.
    fn note(&mut self, text: &Rc<ListText>) {
        self.unread.push(Rc::downgrade(text));
    }

    /// Returns how many bytes all lists have that are being made or are still to be sent.
    fn bytes(&mut self) -> u64 {
        self.unread.retain(|text| text.strong_count() > 0);
        let lens =
            self.unread.iter().filter_map(|text| text.upgrade().map(|text| text.len() as u64));
        lens.sum::<u64>() + self.incomplete_bytes
    }

    /// The connection is gone.
    fn forget(&mut self, key: ConnKey) {
        self.made_for.retain(|&other| other != key);
        self.wanted_by.retain(|&other| other != key);
        if self.made_for.is_empty() {
            self.made = None;
        }
    }
}

/// Jobs that are coming back from a binlog, file by file.
#[derive(Debug)]
pub struct Recovery<'s> {
    replay: Replay<'s>,
    policy: Policy,
    last_id: &'s mut u64,
}

impl Recovery<'_> {
    /// The file that is read next; none when all have been.
    pub fn next_file(&self) -> Option<FileNumber> {
        self.replay.next_file()
    }

    /// Reads that file.
    ///
    /// # Errors
    /// It cannot be read: there is no way to go on without it.
    pub fn read_file(&mut self) -> Result<(), ReplayError> {
        self.replay.read_file()
    }

    /// All files have been read: puts every job in its place.
    ///
    /// # Errors
    /// There is no way to go on; no record is lost.
    pub fn finish(self, now: Nanos) -> Result<Recovered, ReplayError> {
        let recovered = self.replay.finish(self.policy, now)?;
        *self.last_id = recovered.last_id;
        Ok(recovered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::protocol::stats::ProcessorTime;
    use std::io::IoSlice;

    const START: Nanos = Nanos::from_secs(1_000);

    fn server() -> Server {
        server_with(Settings::DEFAULT)
    }

    fn server_with(settings: Settings) -> Server {
        let facts = ProcessInfo {
            pid: 1,
            instance_id: String::new(),
            hostname: String::new(),
            os_version: String::new(),
            platform: String::new(),
            started_at: START,
            processor_time: ProcessorTime::default,
            resident_bytes: || None,
            has_headroom: |_| true,
        };
        Server::new(settings, facts, START)
    }

    /// What the connection is to be sent, taken as sent.
    fn replies(server: &mut Server, key: ConnKey) -> String {
        let mut slices = [IoSlice::new(&[]); 64];
        let mut output_handle = server.output_handle(key);
        let filled = output_handle.next_slices(&mut slices);
        let bytes: Vec<u8> = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect();
        output_handle.sent(bytes.len());
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_burst_of_commands_has_its_share_of_the_turn() {
        const COMMANDS: usize = 100;
        let mut server = server();
        let key = server.connect().unwrap();
        server.share_budget(1_000);
        server.receive(key, &b"list-tube-used\r\n".repeat(COMMANDS), START);
        server.end_input(key);
        let mut iterations = 0;
        let mut answered = 0;
        loop {
            iterations += 1;
            server.check();
            let count = replies(&mut server, key).lines().count();
            assert!((1..=SMALLEST_SHARE).contains(&count), "{count} replies in one turn");
            answered += count;
            if !server.actions(key).run {
                break;
            }
            assert!(!server.actions(key).read && !server.actions(key).close);
            server.resume(key, START);
        }
        assert_eq!(answered, COMMANDS);
        assert_eq!(iterations, COMMANDS.div_ceil(SMALLEST_SHARE));
        assert!(server.actions(key).close);
    }

    #[test]
    fn commands_that_take_long_use_more_of_the_share() {
        let mut server = server();
        let key = server.connect().unwrap();
        server.share_budget(1_000);
        server.receive(key, &b"stats\r\n".repeat(20), START);
        let documents = replies(&mut server, key).matches("OK ").count();
        assert!((1..=3).contains(&documents), "{documents} documents in one turn");
        assert!(server.actions(key).run);
    }

    /// More than are moved at once.
    const MANY: usize = 20_000;

    fn say_often(server: &mut Server, key: ConnKey, command: &[u8], reply: &str) {
        for _ in 0..MANY {
            server.receive(key, command, START);
            assert!(replies(server, key).starts_with(reply));
        }
    }

    #[test]
    fn a_kick_of_very_many_jobs_leaves_others_their_turn() {
        let mut server = server();
        let (operator, other) = (server.connect().unwrap(), server.connect().unwrap());
        say_often(&mut server, operator, b"put 0 9 9 0\r\n\r\n", "INSERTED ");
        server.receive(operator, b"kick 100000\r\nlist-tube-used\r\n", START);
        let mut iterations = 1;
        let mut said = replies(&mut server, operator);
        while said.is_empty() {
            assert_eq!(server.queue.totals.ready, u64::from(KICKED_AT_ONCE) * iterations);
            server.receive(other, b"list-tube-used\r\n", START);
            assert_eq!(replies(&mut server, other), "USING default\r\n");
            server.check();
            server.resume(operator, START);
            iterations += 1;
            said = replies(&mut server, operator);
        }
        assert_eq!(iterations, MANY.div_ceil(KICKED_AT_ONCE as usize) as u64);
        server.resume(operator, START);
        said += &replies(&mut server, operator);
        assert_eq!(said, "KICKED 20000\r\nUSING default\r\n");
    }

    #[test]
    fn a_connection_with_very_many_jobs_hands_them_back_step_by_step() {
        let mut server = server();
        let (worker, other) = (server.connect().unwrap(), server.connect().unwrap());
        say_often(&mut server, worker, b"put 0 0 9 0\r\n\r\n", "INSERTED ");
        say_often(&mut server, worker, b"reserve\r\n", "RESERVED ");
        server.disconnect(worker, START);
        assert_eq!(server.connection_count(), 1);
        let mut iterations = 1;
        while server.queue.totals.reserved > 0 {
            assert!(server.next_due().is_some_and(|due| due <= START), "nobody would go on");
            server.receive(other, b"reserve-with-timeout 0\r\nrelease 1 0 0\r\n", START);
            assert!(replies(&mut server, other).ends_with("RELEASED\r\n"));
            server.disconnect(other, START);
            assert_eq!(server.connect().unwrap(), other, "the other key is not free yet");
            server.check();
            server.tick(START);
            iterations += 1;
        }
        assert!(iterations > 3, "it took {iterations} turns");
        server.check();
        assert_eq!(server.connect().unwrap(), worker);
    }

    #[test]
    fn a_backlog_of_due_jobs_holds_up_no_timeout() {
        let mut server = server();
        let (producer, worker) = (server.connect().unwrap(), server.connect().unwrap());
        server.receive(producer, b"use backlog\r\n", START);
        assert_eq!(replies(&mut server, producer), "USING backlog\r\n");
        say_often(&mut server, producer, b"put 0 1 9 0\r\n\r\n", "INSERTED ");
        server.receive(worker, b"reserve-with-timeout 1\r\n", START);
        let due = START + Nanos::from_secs(1) + Nanos::from_millis(1);
        server.tick(due);
        assert_eq!(replies(&mut server, worker), "TIMED_OUT\r\n");
        let ready = |server: &Server| server.queue.totals.ready;
        assert!(ready(&server) < MANY as u64, "the backlog takes several turns");
        let mut now = due;
        while let Some(next) = server.next_due() {
            now = now.max(next);
            server.tick(now);
            server.check();
        }
        assert_eq!(ready(&server), MANY as u64);
    }

    #[test]
    fn puts_are_refused_while_jobs_take_too_much_memory() {
        let mut server = server_with(Settings { max_memory_bytes: 100_000, ..Settings::DEFAULT });
        let (first, second) = (server.connect().unwrap(), server.connect().unwrap());
        let put = [&b"put 0 0 9 1000\r\n"[..], &[b'x'; 1000], b"\r\n"].concat();
        let mut count = 0;
        loop {
            server.receive(first, &put, START);
            server.check();
            assert!(server.queue.job_bytes() <= 100_000);
            let reply = replies(&mut server, first);
            if reply == "OUT_OF_MEMORY\r\n" {
                break;
            }
            count += 1;
            assert_eq!(reply, format!("INSERTED {count}\r\n"));
        }
        assert!((80..100).contains(&count), "{count} jobs of 1000 bytes");
        let reply = |server: &mut Server, key: ConnKey, what: &[u8]| {
            server.receive(key, what, START);
            replies(server, key)
        };
        // Everything else goes on, and a smaller job may still find its place.
        assert!(reply(&mut server, second, b"reserve\r\n").starts_with("RESERVED 1 1000\r\n"));
        let small = reply(&mut server, second, b"put 0 0 9 1\r\nx\r\n");
        assert_eq!(small, format!("INSERTED {}\r\n", count + 1));
        assert_eq!(reply(&mut server, second, b"delete 1\r\n"), "DELETED\r\n");
        // Two whose bodies arrive at the same time, and room for one.
        let (head, rest) = put.split_at(100);
        assert_eq!(reply(&mut server, first, head), "");
        assert_eq!(reply(&mut server, second, head), "");
        assert_eq!(reply(&mut server, second, rest), format!("INSERTED {}\r\n", count + 3));
        assert_eq!(reply(&mut server, first, rest), "OUT_OF_MEMORY\r\n");
        server.check();
    }

    #[test]
    fn who_is_abandoned_while_waiting_gets_no_job() {
        let mut server = server();
        let (worker, producer) = (server.connect().unwrap(), server.connect().unwrap());
        server.receive(worker, b"reserve\r\n", START);
        // As when there is no memory to keep what else the worker has sent.
        server.close_now(worker);
        server.check();
        server.receive(producer, b"put 0 0 9 0\r\n\r\n", START);
        server.check();
        assert_eq!(replies(&mut server, worker), "");
        assert!(server.actions(worker).close);
        assert_eq!(server.queue.totals.ready, 1);
    }

    #[test]
    fn a_backlog_of_ttrs_that_run_out_comes_to_its_end() {
        let mut server = server();
        let worker = server.connect().unwrap();
        say_often(&mut server, worker, b"put 0 0 1 0\r\n\r\n", "INSERTED ");
        say_often(&mut server, worker, b"reserve\r\n", "RESERVED ");
        let mut now = START;
        while let Some(next) = server.next_due() {
            now = now.max(next);
            server.tick(now);
            server.check();
        }
        let totals = &server.queue.totals;
        assert_eq!((totals.ready, totals.timeouts), (MANY as u64, MANY as u64));
    }

    #[test]
    fn however_many_are_ready_each_has_a_share() {
        let mut server = server();
        let key = server.connect().unwrap();
        server.share_budget(100_000);
        server.receive(key, b"list-tube-used\r\n", START);
        assert_eq!(replies(&mut server, key), "USING default\r\n");
    }

    #[test]
    fn half_a_line_does_not_keep_the_memory_of_a_burst() {
        let mut server = server();
        let key = server.connect().unwrap();
        server.receive(key, b"us", START);
        let mut burst = b"e a\r\n".to_vec();
        burst.extend_from_slice(&b"use a\r\n".repeat(5_000));
        burst.extend_from_slice(b"list-tu");
        server.receive(key, &burst, START);
        while server.actions(key).run {
            server.check();
            replies(&mut server, key);
            server.resume(key, START);
        }
        let input = &server.conns[key].input;
        assert_eq!(input.unused(), b"list-tu");
        assert!(input.capacity() <= 2048, "{} bytes are kept", input.capacity());
    }
}
