//! The whole server as one value: bytes in, bytes out, and time as a parameter.
//!
//! The event loop, or a test, reports what happened to a connection: [`Server::connect`],
//! [`Server::receive`], [`Server::half_close`], [`Server::end_input`], [`Server::disconnect`]. It
//! reports that time has passed: [`Server::tick`]. Then it serves the connections that
//! [`Server::take_dirty`] returns: [`Server::output_handle`] has their output, and
//! [`Server::actions`] returns whether to read from them or to close them. The server has no
//! callbacks.
//!
//! A command may end the waits of other connections. The commands that these sent after their
//! `reserve` do not run inside that command. They run in the next iteration, within the shares of
//! their own connections.
//!
//! One iteration of the loop is bounded, whatever clients send. Work is counted in units of about
//! 0.25 us, not timed, so that tests can assert it. [`Server::begin_iteration`] sets the budget,
//! each command is charged to it, and [`Server::has_budget`] returns whether another connection may
//! be served.
//!
//! A [`TryReserveError`] means in all modules that there is no memory.
//!
//! | file | owns |
//! |---|---|
//! | [`commands`] | runs parsed commands, and replies |
//! | [`bodies`] | replies whose bodies are not in memory |
//! | [`reads`] | the order in which their bodies are read, and their memory |
//! | [`batches`] | reserves, deletes and touches many jobs of one connection |
//! | [`pages`] | pages of the jobs of a tube, made in steps |
//! | [`flushes`] | deletes all jobs of a tube, in steps |
//! | [`lists`] | long lists of tubes, made in steps |
//! | [`budget`] | the units of work that an iteration may use |

mod batches;
mod bodies;
mod budget;
mod commands;
mod flushes;
mod lists;
mod pages;
mod reads;

use crate::engine::binlog::disk::{Disk, FileNumber, Progress};
use crate::engine::binlog::record;
use crate::engine::binlog::{IoFailed, Policy, Syncing};
use crate::engine::collections::histogram::Histogram;
use crate::engine::conn::{Actions, Conn, Conns, Continuation, LargePut, OutputHandle, Phase};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::ConnKey;
use crate::engine::limits::Limits;
use crate::engine::protocol::command::Counter;
use crate::engine::protocol::output::Output;
use crate::engine::protocol::stats::{ProcessInfo, ServerStats, StatusLine};
use crate::engine::queue::body::{Bodies, Body};
use crate::engine::queue::replay::{Recovered, Replay, ReplayError};
use crate::engine::queue::{Queue, Totals, WaitResult};
use crate::engine::text::CR_LF;
use crate::engine::time::{ClockOffset, Nanos};
use budget::Budget;
use lists::Lists;
use log::warn;
use reads::Reads;
use std::collections::TryReserveError;
use std::num::NonZero;

/// The settings of the operator.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The maximum length of a body in bytes, without CR LF.
    pub max_job_size: u32,
    /// The size of a binlog file in bytes.
    pub binlog_file_size: u32,
    /// The most bytes that the binlog may take.
    pub max_binlog_bytes: u64,
    /// Puts are refused while jobs take this much memory, in bytes.
    pub max_memory_bytes: u64,
    /// A job that came back this many times is buried; `None` for no limit.
    pub bury_after: Option<NonZero<u16>>,
    /// The bodies in memory may take this many bytes; the others are read back from the binlog. `None`:
    /// all bodies are in memory.
    pub body_cache_bytes: Option<u64>,
}

impl Settings {
    /// Returns whether there can be memory for a body that is read back.
    fn can_hold(&self, body: &Body) -> bool {
        !body.is_cold() || u64::from(body.full_len()) <= self.max_memory_bytes
    }

    /// The defaults of the command line.
    pub const DEFAULT: Settings = Settings {
        max_job_size: 65_535,
        binlog_file_size: 10 * 1024 * 1024,
        max_binlog_bytes: u64::MAX,
        max_memory_bytes: u64::MAX,
        bury_after: None,
        body_cache_bytes: None,
    };
}

/// The queue and the connections of one server.
#[derive(Debug)]
pub struct Server {
    queue: Queue,
    /// By the keys of the queue's clients.
    conns: Conns,
    /// The keys of connections whose jobs were released since [`Server::next_freed`] last
    /// returned `None`. Has room for all connections.
    freed: Vec<ConnKey>,
    settings: Settings,
    process: ProcessInfo,
    commands: [u64; Counter::COUNT],
    total_connections: u64,
    last_id: u64,
    is_draining: bool,
    /// The time of the last warning that jobs take the maximum of memory.
    memory_warned_at: Option<Nanos>,
    budget: Budget,
    /// The time of the last command.
    last_command_at: Nanos,
    /// The time of the last tick.
    ticked_at: Nanos,
    /// Lists of more than 1,024 tubes.
    lists: Lists,
    /// The number of pages of jobs that are being made in steps.
    selections: usize,
    /// The connections that wait for bodies from the disk.
    reads: Reads,
    /// How far a remote disk was at the end of the last commit. `None` for a local disk.
    progress: Option<Progress>,
}

/// The data of the metrics page.
#[derive(Debug)]
pub struct View<'a> {
    pub server: ServerStats<'a>,
    pub queue: &'a Queue,
    pub conns: &'a Conns,
    /// The durations of loop iterations.
    pub iterations: &'a Histogram,
    pub now: Nanos,
}

/// A command is one unit of work, and so are this many bytes of its reply. A large body is not
/// copied, so [`Reply::cost`](crate::engine::protocol::reply::Reply::cost) counts only a part of
/// it.
const REPLY_COST_PER_WORK: usize = 128;
/// Limits unused input and unsent text, and lists, to an eighth of `--max-memory` each.
const BUFFERS_DIVISOR: u64 = 8;
/// A warning that may recur with each put is logged at most once in this interval.
const WARN_INTERVAL: Nanos = Nanos::from_secs(60);

impl Server {
    /// Returns a server without jobs and connections.
    pub fn new(settings: Settings, limits: Limits, process: ProcessInfo, now: Nanos) -> Server {
        let buffer_limit = settings.max_memory_bytes / BUFFERS_DIVISOR;
        let buffer_limit = usize::try_from(buffer_limit).unwrap_or(usize::MAX);
        let mut queue = Queue::new(limits, now);
        queue.bury_after = settings.bury_after;
        queue.body_cache.limit = settings.body_cache_bytes;
        Server {
            queue,
            conns: Conns::new(buffer_limit),
            freed: Vec::new(),
            settings,
            process,
            commands: [0; Counter::COUNT],
            total_connections: 0,
            last_id: 0,
            is_draining: false,
            memory_warned_at: None,
            budget: Budget::new(&limits),
            last_command_at: now,
            ticked_at: now,
            lists: Lists::default(),
            selections: 0,
            reads: Reads::default(),
            progress: None,
        }
    }

    /// Begins to read the jobs from the binlog on `disk`, which the server then writes. Must be
    /// called before the first connection.
    pub fn begin_recovery(
        &mut self,
        disk: Box<dyn Disk>,
        syncing: Syncing,
    ) -> Result<Recovery<'_>, ReplayError> {
        let Settings {
            binlog_file_size: file_size,
            max_job_size: max_body_len,
            max_binlog_bytes: max_bytes,
            ..
        } = self.settings;
        let limits = self.queue.limits;
        let policy = Policy { file_size, max_body_len, max_bytes, syncing, limits };
        let replay = self.queue.begin_replay(disk)?;
        Ok(Recovery { replay, policy, last_id: &mut self.last_id })
    }

    /// Reads all jobs from the binlog on `disk`, which the server then writes. Must be called
    /// before the first connection. After an error no record is lost.
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

    // ---- Events of connections ----

    /// Returns whether there is memory for another client. Without it, [`Server::connect`] may
    /// fail.
    pub fn has_room(&self) -> bool {
        (self.process.has_headroom)(Headroom::Half)
    }

    /// Adds a connection under a key that no connection has. A key is free again once
    /// [`Server::next_freed`] has returned it. On an error the caller rejects the client.
    pub fn connect_as(&mut self, key: ConnKey) -> Result<(), TryReserveError> {
        headroom::leave(Headroom::Half, || self.try_connect(key))
    }

    /// Adds a connection under the lowest free key: for callers without keys of their own.
    pub fn connect(&mut self) -> Result<ConnKey, TryReserveError> {
        self.freed.clear();
        let mut keys = (0..).map(ConnKey::from_index);
        let key = keys.find(|key| !self.conns.has(*key)).expect("some key is free");
        self.connect_as(key).map(|()| key)
    }

    fn try_connect(&mut self, key: ConnKey) -> Result<(), TryReserveError> {
        self.queue.try_reserve_closing()?;
        self.freed.try_reserve(self.conns.len() + 1)?;
        if self.settings.body_cache_bytes.is_some() {
            self.reads.try_reserve(self.conns.len() + 1)?;
        }
        self.queue.connect(key)?;
        if let Err(no_memory) = self.conns.try_insert(key) {
            self.queue.undo_connect(key, self.last_command_at);
            return Err(no_memory);
        }
        self.total_connections += 1;
        Ok(())
    }

    /// Runs the complete commands of bytes that have arrived from a client, and buffers the rest.
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

    /// Ends the wait of a client that has shut down its sending side, now and for later commands.
    /// More input may still arrive.
    pub fn half_close(&mut self, key: ConnKey) {
        let conn = &mut self.conns[key];
        conn.is_half_closed = true;
        if matches!(conn.phase, Phase::Waiting(..)) {
            self.queue.end_wait(key, WaitResult::TimedOut);
        }
        self.after_event();
    }

    /// Handles the end of a client's input: all of it has arrived.
    pub fn end_input(&mut self, key: ConnKey) {
        self.conns[key].input_ended = true;
        self.conns.mark_dirty(key);
        self.half_close(key);
    }

    /// Runs buffered commands, for connections with [`Actions::run`].
    pub fn resume(&mut self, key: ConnKey, now: Nanos) {
        self.run_buffered(key, now);
    }

    /// Closes a connection. Its key is free once [`Server::next_freed`] returns it: at once, or after
    /// some ticks if the connection has many jobs and watches to give back.
    pub fn disconnect(&mut self, key: ConnKey, now: Nanos) {
        self.cancel_command(key);
        self.conns.drop_buffers(key, &mut self.queue.bodies);
        if self.queue.disconnect(key, now) {
            self.free(key);
        }
        self.after_event();
    }

    /// Releases jobs and removes watches of closed connections.
    fn drain_closing(&mut self, now: Nanos) {
        let mut work_left = self.budget.due_work();
        while let Some(key) = self.queue.close_next(&mut work_left, now) {
            self.free(key);
        }
    }

    fn free(&mut self, key: ConnKey) {
        self.conns.remove(key);
        self.freed.push(key);
    }

    /// Returns the key of a connection that has given back everything, each once.
    pub fn next_freed(&mut self) -> Option<ConnKey> {
        self.freed.pop()
    }

    /// Does due work, or a part of it that fits into the iteration.
    pub fn tick(&mut self, now: Nanos) {
        self.ticked_at = now;
        self.tick_reads(now);
        self.queue.tick(self.budget.due_work(), now);
        self.drain_closing(now);
        self.list_step();
        if !self.is_congested() {
            self.flush_step(now);
        }
        self.after_event();
    }

    /// Returns whether jobs are recorded in a binlog.
    pub fn has_binlog(&self) -> bool {
        self.queue.has_binlog()
    }

    /// Sets the difference between wall-clock time and the engine's time. Times in the binlog are
    /// wall-clock times, because they must be valid after a restart.
    pub fn set_clock_offset(&mut self, clock_offset: ClockOffset) {
        self.queue.clock_offset = clock_offset;
    }

    /// Begins an iteration of the loop in which `ready` connections are to be served.
    pub fn begin_iteration(&mut self, ready: usize) {
        self.budget.begin_iteration(ready, self.queue.is_late(), &self.queue.limits);
    }

    /// Divides the work of pipelined commands between `connections`, so that a client that sends
    /// thousands of commands at once delays no other client until they have all run.
    pub fn share_budget(&mut self, connections: usize) {
        let syncs = self.queue.syncs_each_iteration();
        self.budget.divide(connections, syncs, &self.queue.limits);
    }

    /// Returns whether another connection may be served in this iteration.
    pub fn has_budget(&self) -> bool {
        self.budget.is_left() && !self.is_congested()
    }

    /// Returns whether no connection is served because too many changes wait for a remote disk.
    /// Timers and deadlines still have their effects.
    pub fn is_congested(&self) -> bool {
        self.progress.is_some_and(|progress| progress.is_congested)
    }

    /// Returns whether a remote disk does not acknowledge changes in time, so that clients should find
    /// another server.
    pub fn is_stalled(&self) -> bool {
        self.progress.is_some_and(|progress| progress.is_stalled)
    }

    /// Returns whether no command runs, and none will soon: connections with commands are closed.
    pub fn has_given_up(&self) -> bool {
        self.progress.is_some_and(|progress| progress.is_congested && progress.has_overdue())
    }

    /// Returns whether a remote disk has acknowledged all changes.
    pub fn is_acknowledged(&self) -> bool {
        self.progress.is_none_or(Progress::is_complete)
    }

    /// Charges `work` units to this iteration.
    pub fn charge(&mut self, work: usize) {
        self.budget.charge(work);
    }

    /// Writes the records of the iteration to the binlog, and syncs it if that is due. Must be
    /// called before any output of the iteration is sent. After an error no output may be sent, and
    /// the server must exit.
    ///
    /// A remote disk acknowledges the records later. Until then [`Server::output_handle`] holds back
    /// the output of the iteration.
    pub fn commit(&mut self, now: Nanos) -> Result<(), IoFailed> {
        if !self.queue.has_binlog() {
            return Ok(());
        }
        self.queue.commit(now)?;
        self.note_progress();
        Ok(())
    }

    /// Hands over what remains to a remote disk, and looks how far it is: for a server that was closed.
    pub fn hand_over(&mut self) {
        self.queue.hand_over();
        self.note_progress();
    }

    /// Wakes the connections with output that was held back, if the disk has acknowledged more.
    fn note_progress(&mut self) {
        let Some(progress) = self.queue.disk_progress() else { return };
        let before = self.progress.replace(progress).unwrap_or_default();
        match (before.is_stalled, progress.is_stalled) {
            (false, true) => warn!(
                "the binlog has not stored a change for more than 1 s; replies wait, and the server \
                 reports that it is not ready"
            ),
            (true, false) => warn!("the binlog stores changes again"),
            (false, false) | (true, true) => {}
        }
        if progress.acknowledged > before.acknowledged || progress.overdue > before.overdue {
            self.conns.wake_held();
        }
    }

    /// Writes and syncs all records before the server exits; does not sync with `-F`.
    pub fn close(&mut self, now: Nanos) -> Result<(), IoFailed> {
        // C beanstalkd ignores the record of a flush. It needs the deletes of all flushed jobs.
        while self.queue.has_flushes() {
            self.queue.flush_step(&mut usize::MAX.clone(), now);
        }
        self.queue.close_binlog(now)?;
        self.note_progress();
        Ok(())
    }

    /// Returns a time not after the one when [`Server::tick`] or [`Server::commit`] has something
    /// to do.
    pub fn next_due(&self) -> Option<Nanos> {
        let is_flushing = self.queue.has_flushes() && !self.is_congested();
        let is_busy = self.queue.closing().len() > 0
            || !self.lists.is_idle()
            || is_flushing
            || self.has_reads_due();
        let immediate = is_busy.then_some(Nanos::ZERO);
        immediate.or_else(|| self.queue.next_due().into_iter().chain(self.reads.next_due()).min())
    }

    /// Sets drain mode, in which puts are refused so that the queue becomes empty.
    pub fn set_draining(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
    }

    // ---- Queries of the loop ----

    /// Marks a connection as dirty: the next [`Server::take_dirty`] returns it. Returns the actions
    /// for it.
    pub fn mark_dirty(&mut self, key: ConnKey) -> Actions {
        self.conns.mark_dirty(key)
    }

    /// Moves the keys of dirty connections to `keys`. Some of these connections may have been
    /// closed, and their keys given to new ones.
    pub fn take_dirty(&mut self, keys: &mut Vec<ConnKey>) {
        self.conns.take_dirty(keys);
    }

    /// Returns whether there are dirty connections.
    pub fn has_dirty(&self) -> bool {
        self.conns.has_dirty()
    }

    /// Returns the actions for a connection.
    pub fn actions(&self, key: ConnKey) -> Actions {
        self.conns.actions(key)
    }

    /// Returns whether the event loop should read at most 1 KiB from each connection: unused input
    /// and unsent text have reached their limit.
    pub fn is_crowded(&self) -> bool {
        self.conns.are_crowded()
    }

    /// Returns whether the client's last put had a body of at least 16 KiB, so that the next one
    /// probably has.
    pub fn sends_large_bodies(&self, key: ConnKey) -> bool {
        self.conns[key].sends_large_bodies
    }

    /// Returns access to the output of a connection, which is not dirty any more. Output whose records
    /// are not acknowledged is held back. Call this between [`Server::commit`] and the next event.
    pub fn output_handle(&mut self, key: ConnKey) -> OutputHandle<'_> {
        self.conns.output_handle(key, self.progress.as_ref(), &mut self.queue.bodies)
    }

    /// Returns whether some output of a connection may be sent.
    pub fn has_reply(&self, key: ConnKey) -> bool {
        self.conns[key].output.sendable_len() > 0
    }

    /// Returns whether some output may be sent.
    pub fn has_replies(&self) -> bool {
        self.conns.iter().any(|(_, conn)| conn.output.sendable_len() > 0)
    }

    /// Returns all output of a connection that was not sent, also what is held back, and the bodies
    /// that it shares. For tests: it can be read in the middle of an iteration.
    pub fn unsent(&self, key: ConnKey) -> (&Output, &Bodies) {
        (&self.conns[key].output, &self.queue.bodies)
    }

    /// Returns whether the connection waits for bodies.
    pub fn waits_for_bodies(&self, key: ConnKey) -> bool {
        matches!(self.conns[key].phase, Phase::ReadingBodies(_))
    }

    /// Returns the bounds of steps and iterations.
    pub fn limits(&self) -> &Limits {
        &self.queue.limits
    }

    /// Returns the number of open connections.
    pub fn connection_count(&self) -> usize {
        self.conns.len() - self.queue.closing().len()
    }

    /// Returns the data of the metrics page. `iterations` has the durations of loop iterations.
    pub fn view<'a>(&'a self, iterations: &'a Histogram, now: Nanos) -> View<'a> {
        let server = self.own_stats();
        View { server, queue: &self.queue, conns: &self.conns, iterations, now }
    }

    /// Returns whether there is a tube with this name.
    pub fn has_tube(&self, name: &str) -> bool {
        self.queue.tubes.find(name).is_some()
    }

    /// Returns whether the server is in drain mode.
    pub fn is_draining(&self) -> bool {
        self.is_draining
    }

    /// Returns the counts that the service manager shows.
    pub fn summary(&self) -> StatusLine {
        let Totals { ready, reserved, delayed, buried, .. } = self.queue.totals;
        let (connections, is_draining) = (self.connection_count(), self.is_draining);
        StatusLine { ready, reserved, delayed, buried, connections, is_draining }
    }

    fn own_stats(&self) -> ServerStats<'_> {
        let max_memory_bytes = self.settings.max_memory_bytes;
        ServerStats {
            process: &self.process,
            commands: &self.commands,
            max_job_size: self.settings.max_job_size,
            binlog_file_size: self.settings.binlog_file_size,
            max_memory_bytes: (max_memory_bytes < u64::MAX).then_some(max_memory_bytes),
            connections: self.connection_count(),
            total_connections: self.total_connections,
            is_draining: self.is_draining,
        }
    }

    /// Delivers the results of waits and charges their work, after an event that is no command.
    fn after_event(&mut self) {
        let work = self.deliver_wait_results();
        let replied = self.conns.take_reply_cost() / REPLY_COST_PER_WORK;
        self.charge(work + replied);
    }

    // ---- Checking ----

    /// Checks all invariants, for tests, between two calls of the methods above. They do not hold
    /// after [`Server::recover`] has failed or [`Server::close`] was called.
    ///
    /// # Panics
    /// A check fails.
    pub fn check(&self) {
        self.queue.check_with(self.conns.bodies());
        self.conns.check();
        assert_eq!(self.queue.wait_results.len(), 0, "wait results that were not delivered");
        let (conns, clients) = (self.conns.len(), self.queue.clients.len());
        assert_eq!(conns, clients, "connections, and clients of the queue");
        let is_selecting =
            |conn: &Conn| matches!(conn.phase, Phase::InSteps(Continuation::Select(..)));
        let selections = self.conns.iter().filter(|(_, conn)| is_selecting(conn)).count();
        assert_eq!(self.selections, selections, "stored and actual number of pages in steps");
        let total = self.total_connections;
        assert!(conns as u64 <= total, "{conns} connections, {total} since the start");
        for (key, conn) in self.conns.iter() {
            self.check_conn(key, conn);
        }
        for key in &self.freed {
            assert!(!self.conns.has(*key), "the key {} is free, and in use", key.index());
        }
        for key in self.queue.closing() {
            let conn = &self.conns[key];
            let is_closed = matches!(conn.phase, Phase::Closing)
                && conn.input.is_empty()
                && conn.output.is_empty();
            assert!(is_closed, "closed connection {} has buffers: {conn:?}", key.index());
        }
        for (_, job) in self.queue.jobs.iter() {
            // A damaged binlog may have ids above `HIGHEST_ID`, which were never assigned.
            let is_assigned = job.id <= self.last_id || job.id > record::HIGHEST_ID;
            assert!(is_assigned, "job {}, but the last assigned id is {}", job.id, self.last_id);
        }
    }

    fn check_conn(&self, key: ConnKey, conn: &Conn) {
        let (index, phase) = (key.index(), &conn.phase);
        let client = self.queue.clients.get(key);
        let client = client.unwrap_or_else(|| panic!("no client for connection {index}"));
        assert_eq!(
            matches!(phase, Phase::Waiting(..)),
            client.watching.is_waiting(),
            "whether connection {index} in {phase:?} waits, and whether the queue knows it"
        );
        match phase {
            Phase::ReadingBody(put) => {
                let max_len = self.settings.max_job_size as usize + CR_LF.len();
                let is_new = put.id <= self.last_id && self.queue.jobs.find(put.id).is_none();
                assert!(
                    is_new && put.full_len as usize <= max_len,
                    "connection {index} puts {put:?}, the last assigned id is {}",
                    self.last_id
                );
            }
            Phase::InSteps(Continuation::Kick(kick)) => assert!(
                kick.tube == client.used && kick.left > 0,
                "connection {index} kicks {kick:?}, but uses {:?}",
                client.used
            ),
            Phase::ReadingLargeBody(LargePut { put, body, .. }) => assert!(
                put.id <= self.last_id && put.full_len == body.full_len(),
                "connection {index} puts {put:?} into {body:?}"
            ),
            Phase::ListingTubes => {
                let requests = self.lists.recipients.iter().chain(&self.lists.requested_by);
                let count = requests.filter(|&&other| other == key).count();
                assert_eq!(count, 1, "list requests of connection {index}");
            }
            Phase::ReadingLine
            | Phase::SkippingLine(_)
            | Phase::SkippingLongLine
            | Phase::SkippingBody { .. }
            | Phase::InSteps(_)
            | Phase::Waiting(..)
            | Phase::Flushing
            | Phase::Closing => {}
            Phase::ReadingBodies(wanted) => self.reads.check(key, wanted, &self.queue.limits),
        }
    }
}

/// A recovery of jobs from a binlog, file by file.
#[derive(Debug)]
pub struct Recovery<'s> {
    replay: Replay<'s>,
    policy: Policy,
    last_id: &'s mut u64,
}

impl Recovery<'_> {
    /// Returns the file that is read next; `None` when all were read.
    pub fn next_file(&self) -> Option<FileNumber> {
        self.replay.next_file()
    }

    /// Reads the next file. After an error the recovery cannot continue.
    pub fn read_file(&mut self) -> Result<(), ReplayError> {
        self.replay.read_file()
    }

    /// Moves each job to its state, after all files were read. After an error no record is lost.
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
        limited_server(settings, Limits::DEFAULT)
    }

    fn limited_server(settings: Settings, limits: Limits) -> Server {
        let process = ProcessInfo {
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
        Server::new(settings, limits, process, START)
    }

    /// Returns the output of the connection, and marks it as sent.
    fn replies(server: &mut Server, key: ConnKey) -> String {
        let mut slices = [IoSlice::new(&[]); 64];
        let mut output_handle = server.output_handle(key);
        let filled = output_handle.next_slices(&mut slices);
        let bytes: Vec<u8> = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect();
        output_handle.sent(bytes.len());
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn pipelined_commands_run_within_the_share_of_an_iteration() {
        const COMMANDS: usize = 100;
        let mut server = server();
        let key = server.connect().unwrap();
        server.share_budget(1_000);
        server.receive(key, &b"list-tube-used\r\n".repeat(COMMANDS), START);
        server.end_input(key);
        let mut iterations = 0;
        let mut replied = 0;
        loop {
            iterations += 1;
            server.check();
            let count = replies(&mut server, key).lines().count();
            assert!(
                (1..=Limits::DEFAULT.least_share_work).contains(&count),
                "{count} replies in one iteration"
            );
            replied += count;
            if !server.actions(key).run {
                break;
            }
            assert!(!server.actions(key).read && !server.actions(key).close);
            server.resume(key, START);
        }
        assert_eq!(replied, COMMANDS);
        assert_eq!(iterations, COMMANDS.div_ceil(Limits::DEFAULT.least_share_work));
        assert!(server.actions(key).close);
    }

    /// An iteration may take longer than a TTR, or the client may not read its replies.
    #[test]
    fn a_job_that_is_lost_before_its_batch_is_complete_is_in_it_once() {
        let mut server = server();
        let [worker, producer] = [(); 2].map(|()| server.connect().unwrap());
        server.receive(worker, b"reserve-batch 5 60\r\n", START);
        server.receive(producer, b"put 0 0 1 1\r\nx\r\n", START);
        assert!(server.actions(worker).run);
        let later = START + Nanos::from_secs(2);
        server.tick(later);
        server.check();
        server.resume(worker, later);
        assert_eq!(replies(&mut server, worker), "RESERVED_BATCH 1\r\nRESERVED 1 1\r\nx\r\n");
        server.receive(producer, b"stats-job 1\r\n", later);
        let stats = replies(&mut server, producer);
        assert!(stats.contains("reserves: 2\ntimeouts: 1\n"), "{stats}");
    }

    #[test]
    fn a_batch_from_many_tubes_has_all_jobs_whatever_a_step_allows() {
        for watches_per_step in [1, 2, 3, 100] {
            let limits = Limits { watches_per_step, ..Limits::DEFAULT };
            let mut server = limited_server(Settings::DEFAULT, limits);
            let key = server.connect().unwrap();
            for tube in 1..=5 {
                let put = format!("watch {tube}\r\nput-in-tube {tube} 0 0 9 0\r\n\r\n");
                server.receive(key, put.as_bytes(), START);
            }
            server.receive(key, b"reserve-batch 9\r\n", START);
            while server.actions(key).run {
                server.resume(key, START);
                server.check();
            }
            let replies = replies(&mut server, key);
            assert!(replies.contains("RESERVED_BATCH 5\r\n"), "{watches_per_step}: {replies}");
        }
    }

    #[test]
    fn due_work_makes_progress_whatever_a_tick_allows() {
        let least =
            Limits { most_due_work: 1, due_slice_work: 1, timers_per_tick: 1, ..Limits::DEFAULT };
        let mut server = limited_server(Settings::DEFAULT, least);
        let [first, second] = [(); 2].map(|()| server.connect().unwrap());
        server.receive(first, b"put 0 1 9 0\r\n\r\nput 0 1 9 0\r\n\r\n", START);
        server.receive(first, b"put 0 0 1 0\r\n\r\nreserve\r\npause-tube default 1\r\n", START);
        server.receive(second, b"reserve\r\n", START);
        let due = START + Nanos::from_secs(1) + Nanos::from_millis(1);
        for _ in 0..20 {
            server.begin_iteration(2);
            server.tick(due);
            server.check();
        }
        let Totals { ready, delayed, reserved, .. } = server.queue.totals;
        assert_eq!((ready, delayed, reserved), (2, 0, 1));
    }

    #[test]
    fn long_replies_use_more_of_the_share() {
        let mut server = server();
        let key = server.connect().unwrap();
        server.share_budget(1_000);
        server.receive(key, &b"stats\r\n".repeat(20), START);
        let documents = replies(&mut server, key).matches("OK ").count();
        assert!((1..=3).contains(&documents), "{documents} documents in one iteration");
        assert!(server.actions(key).run);
    }

    /// More jobs than one step moves.
    const MANY: usize = 20_000;

    fn send_many(server: &mut Server, key: ConnKey, command: &[u8], reply: &str) {
        for _ in 0..MANY {
            server.receive(key, command, START);
            assert!(replies(server, key).starts_with(reply));
        }
    }

    #[test]
    fn a_kick_of_20000_jobs_runs_in_steps_between_other_clients() {
        let mut server = server();
        let (operator, other) = (server.connect().unwrap(), server.connect().unwrap());
        send_many(&mut server, operator, b"put 0 9 9 0\r\n\r\n", "INSERTED ");
        server.receive(operator, b"kick 100000\r\nlist-tube-used\r\n", START);
        let mut iterations = 1;
        let mut reply = replies(&mut server, operator);
        while reply.is_empty() {
            assert_eq!(
                server.queue.totals.ready,
                Limits::DEFAULT.jobs_per_kick_step as u64 * iterations
            );
            server.receive(other, b"list-tube-used\r\n", START);
            assert_eq!(replies(&mut server, other), "USING default\r\n");
            server.check();
            server.resume(operator, START);
            iterations += 1;
            reply = replies(&mut server, operator);
        }
        assert_eq!(iterations, MANY.div_ceil(Limits::DEFAULT.jobs_per_kick_step) as u64);
        server.resume(operator, START);
        reply += &replies(&mut server, operator);
        assert_eq!(reply, "KICKED 20000\r\nUSING default\r\n");
    }

    #[test]
    fn a_closed_connection_releases_20000_jobs_in_steps() {
        let mut server = server();
        let (worker, other) = (server.connect().unwrap(), server.connect().unwrap());
        send_many(&mut server, worker, b"put 0 0 9 0\r\n\r\n", "INSERTED ");
        send_many(&mut server, worker, b"reserve\r\n", "RESERVED ");
        server.disconnect(worker, START);
        assert_eq!(server.connection_count(), 1);
        let mut iterations = 1;
        while server.queue.totals.reserved > 0 {
            assert!(server.next_due().is_some_and(|due| due <= START), "no tick is due");
            server.receive(other, b"reserve-with-timeout 0\r\nrelease 1 0 0\r\n", START);
            assert!(replies(&mut server, other).ends_with("RELEASED\r\n"));
            server.disconnect(other, START);
            assert_eq!(server.connect().unwrap(), other, "the key of the closing worker is free");
            server.check();
            server.tick(START);
            iterations += 1;
        }
        assert!(iterations > 3, "all jobs were released in {iterations} iterations");
        server.check();
        assert_eq!(server.connect().unwrap(), worker);
    }

    #[test]
    fn a_backlog_of_due_jobs_delays_no_reserve_timeout() {
        let mut server = server();
        let (producer, worker) = (server.connect().unwrap(), server.connect().unwrap());
        server.receive(producer, b"use backlog\r\n", START);
        assert_eq!(replies(&mut server, producer), "USING backlog\r\n");
        send_many(&mut server, producer, b"put 0 1 9 0\r\n\r\n", "INSERTED ");
        server.receive(worker, b"reserve-with-timeout 1\r\n", START);
        let due = START + Nanos::from_secs(1) + Nanos::from_millis(1);
        server.tick(due);
        assert_eq!(replies(&mut server, worker), "TIMED_OUT\r\n");
        let ready = |server: &Server| server.queue.totals.ready;
        assert!(ready(&server) < MANY as u64, "one tick made the whole backlog ready");
        let mut now = due;
        while let Some(next) = server.next_due() {
            now = now.max(next);
            server.tick(now);
            server.check();
        }
        assert_eq!(ready(&server), MANY as u64);
    }

    #[test]
    fn puts_are_refused_above_max_memory() {
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
        // Other commands work, and a smaller job may still fit.
        assert!(reply(&mut server, second, b"reserve\r\n").starts_with("RESERVED 1 1000\r\n"));
        let small = reply(&mut server, second, b"put 0 0 9 1\r\nx\r\n");
        assert_eq!(small, format!("INSERTED {}\r\n", count + 1));
        assert_eq!(reply(&mut server, second, b"delete 1\r\n"), "DELETED\r\n");
        // Two bodies arrive at the same time, and one of them fits.
        let (head, rest) = put.split_at(100);
        assert_eq!(reply(&mut server, first, head), "");
        assert_eq!(reply(&mut server, second, head), "");
        assert_eq!(reply(&mut server, second, rest), format!("INSERTED {}\r\n", count + 3));
        assert_eq!(reply(&mut server, first, rest), "OUT_OF_MEMORY\r\n");
        server.check();
    }

    #[test]
    fn a_waiting_connection_that_is_closed_gets_no_job() {
        let mut server = server();
        let (worker, producer) = (server.connect().unwrap(), server.connect().unwrap());
        server.receive(worker, b"reserve\r\n", START);
        // The server does this when it has no memory to buffer the worker's next command.
        server.close_now(worker);
        server.check();
        server.receive(producer, b"put 0 0 9 0\r\n\r\n", START);
        server.check();
        assert_eq!(replies(&mut server, worker), "");
        assert!(server.actions(worker).close);
        assert_eq!(server.queue.totals.ready, 1);
    }

    #[test]
    fn a_backlog_of_20000_expired_jobs_becomes_ready() {
        let mut server = server();
        let worker = server.connect().unwrap();
        send_many(&mut server, worker, b"put 0 0 1 0\r\n\r\n", "INSERTED ");
        send_many(&mut server, worker, b"reserve\r\n", "RESERVED ");
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
    fn a_connection_has_a_share_among_100000_ready_ones() {
        let mut server = server();
        let key = server.connect().unwrap();
        server.share_budget(100_000);
        server.receive(key, b"list-tube-used\r\n", START);
        assert_eq!(replies(&mut server, key), "USING default\r\n");
    }

    #[test]
    fn the_input_buffer_shrinks_after_a_burst() {
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
        assert!(input.capacity() <= 2048, "input capacity of {} bytes", input.capacity());
    }
}
