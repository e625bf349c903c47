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
//!
//! | file | owns |
//! |---|---|
//! | [`commands`] | runs parsed commands, and replies |
//! | [`lists`] | long lists of tubes, made in steps |
//! | [`budget`] | the units of work that an iteration may use |

mod budget;
mod commands;
mod lists;

use crate::engine::binlog::disk::{Disk, FileNumber};
use crate::engine::binlog::record;
use crate::engine::binlog::{IoFailed, Policy, Syncing};
use crate::engine::collections::histogram::Histogram;
use crate::engine::conn::{Actions, Arriving, Conn, Conns, OutputHandle, Phase};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::ConnKey;
use crate::engine::protocol::command::Counter;
use crate::engine::protocol::stats::{ProcessInfo, ServerStats, StatusLine};
use crate::engine::queue::replay::{Recovered, Replay, ReplayError};
use crate::engine::queue::{Queue, Totals, WaitResult};
use crate::engine::text::CR_LF;
use crate::engine::time::{ClockOffset, Nanos};
use budget::Budget;
use lists::Lists;
use std::collections::TryReserveError;

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
    budget: Budget,
    /// The moment of the last command.
    last_moment: Nanos,
    /// Lists of very many tubes.
    lists: Lists,
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

/// A command is one unit, and so are this many bytes of its reply: a `stats` takes as long as
/// several `delete`s. A large body is not copied, and costs less for each byte.
const OUTPUT_PER_WORK: usize = 128;
/// So many watches that are looked at, or names that are listed, are a part of any command.
const STEPS_FREE: usize = 32;
/// An eighth of what `--max-memory` allows is for commands that wait and unread replies.
const BUFFERS_PART: u64 = 8;
/// Puts may be refused all the time; that is told only so often.
const WARN_AGAIN: Nanos = Nanos::from_secs(60);

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
            budget: Budget::default(),
            last_moment: now,
            lists: Lists::default(),
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
        let mut work_left = self.budget.due_work();
        while let Some(key) = self.queue.close_next(&mut work_left, now) {
            self.conns.remove(key);
        }
    }

    /// Time has passed: does what is due, though perhaps not all of it at once.
    pub fn tick(&mut self, now: Nanos) {
        self.queue.tick(self.budget.due_work(), now);
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
    pub fn set_clock_offset(&mut self, offset: ClockOffset) {
        self.queue.clock_offset = offset;
    }

    /// Begins an iteration of the loop in which `ready` connections are to be served.
    pub fn begin_iteration(&mut self, ready: usize) {
        self.budget.begin_iteration(ready, self.queue.is_late());
    }

    /// Divides the work for pipelined commands between `connections`, so that a client that sends
    /// thousands of commands at once has some of them run before others are served.
    pub fn share_budget(&mut self, connections: usize) {
        self.budget.divide(connections, self.queue.syncs_each_iteration());
    }

    /// Returns whether another connection may be served in this iteration.
    pub fn has_budget(&self) -> bool {
        self.budget.is_left()
    }

    /// Charges `work` units to this iteration.
    pub fn charge(&mut self, work: usize) {
        self.budget.charge(work);
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

    fn own_stats(&self) -> ServerStats<'_> {
        let max_memory_bytes = self.settings.max_memory_bytes;
        ServerStats {
            process: &self.facts,
            commands: &self.commands,
            max_job_size: self.settings.max_job_size,
            binlog_file_size: self.settings.binlog_file_size,
            max_memory_bytes: (max_memory_bytes < u64::MAX).then_some(max_memory_bytes),
            connections: self.connection_count(),
            total_connections: self.total_connections,
            is_draining: self.is_draining,
        }
    }

    /// Answers the connections that waited, in an iteration but in no command.
    fn settle(&mut self) {
        let work = self.deliver_wait_results();
        let said = self.conns.take_said_bytes() / OUTPUT_PER_WORK;
        self.charge(work + said);
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
    use super::budget::SMALLEST_SHARE;
    use super::commands::KICKED_AT_ONCE;
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
