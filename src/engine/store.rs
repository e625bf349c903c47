//! What all connections share: the queue with its rules, counters, and limits of work and memory.
//!
//! It knows connections only by key. What a command causes for another connection is noted here, and
//! the server delivers it after the visit.

use super::binlog::Progress;
use super::commands::COMMANDS;
use super::headroom::Headroom;
use super::keys::ConnKey;
use super::limits::{Limits, Settings};
use super::lists::Lists;
use super::protocol::output::Pool;
use super::protocol::stats::ProcessInfo;
use super::queue::Queue;
use super::queue::body::Body;
use super::reads::Reads;
use super::time::Nanos;
use log::warn;
use std::rc::Rc;

pub struct Store {
    pub queue: Queue,
    pub process: ProcessInfo,
    /// How many of each command ran.
    pub commands: [u64; COMMANDS.len()],
    /// Clients since the start.
    pub total_connections: u64,
    /// Open connections.
    pub connections: usize,
    /// The time of the last command.
    command_at: Nanos,
    pub is_accept_failing: bool,
    pub is_draining: bool,
    /// Connections whose replies are sent at the end of the iteration, each once.
    pub dirty: Vec<ConnKey>,
    /// Connections with output that is held back, each once.
    pub held_back: Vec<ConnKey>,
    /// Spare buffers of outputs.
    pub pool: Pool,
    /// The memory of the unused input of all connections, in bytes.
    pub input_bytes: usize,
    /// The memory of what all connections remember while they wait for bodies or make pages of clients, in bytes.
    pub waiting_bytes: usize,
    /// The connections are crowded when [`Store::buffered_bytes`] reaches this.
    buffer_limit: usize,
    /// Lists of more than 1,024 tubes.
    pub lists: Lists,
    /// Each page of jobs that is being made in steps has a copy.
    pub selections: Rc<()>,
    /// The connections that wait for bodies from the disk.
    pub reads: Reads,
    /// How far a remote disk was at the end of the last commit. `None` for a local disk.
    pub progress: Option<Progress>,
    /// Before this moment no further warning is logged that jobs take the maximum of memory.
    memory_warns_at: Nanos,
}

/// Units of work to reserve or delete a job of a batch.
pub const WORK_PER_BATCHED_JOB: usize = 12;
/// Limits unused input and unsent text, and lists, to an eighth of `--max-memory` each.
pub const BUFFERS_DIVISOR: u64 = 8;
/// A client with this many unsent bytes does not read its replies: its commands do not run.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// A warning that may recur with each put is logged at most once in this interval.
const WARN_INTERVAL: Nanos = Nanos::from_secs(60);

impl Settings {
    /// Returns whether there can be memory for a body that is read back.
    pub fn can_hold(&self, body: &Body) -> bool {
        !body.is_cold() || u64::from(body.full_len()) <= self.max_memory_bytes
    }
}

impl Store {
    pub fn new(settings: Settings, limits: Limits, process: ProcessInfo, now: Nanos) -> Store {
        let buffer_limit = settings.max_memory_bytes / BUFFERS_DIVISOR;
        let mut queue = Queue::new(settings, limits);
        queue.now = now;
        Store {
            queue,
            process,
            commands: [0; COMMANDS.len()],
            total_connections: 0,
            connections: 0,
            command_at: now,
            is_accept_failing: false,
            is_draining: false,
            dirty: Vec::new(),
            held_back: Vec::new(),
            pool: Pool::default(),
            input_bytes: 0,
            waiting_bytes: 0,
            buffer_limit: usize::try_from(buffer_limit).unwrap_or(usize::MAX),
            lists: Lists::default(),
            selections: Rc::default(),
            reads: Reads::default(),
            progress: None,
            memory_warns_at: Nanos::ZERO,
        }
    }

    /// Lets time pass until `now`, but not back.
    #[inline]
    pub fn advance(&mut self, now: Nanos) {
        self.queue.now = self.queue.now.max(now);
    }

    /// Begins a command, a step of one, or the search for one: each is a nanosecond later than the one before.
    #[inline]
    pub fn begin_command(&mut self) {
        self.advance(self.command_at + Nanos::ONE);
    }

    /// Ends a command, or a step of one. For the garbage that it made in the binlog, jobs are moved.
    #[inline]
    pub fn end_command(&mut self) {
        self.queue.compact();
        self.command_at = self.queue.now;
        self.queue.work.spend(1);
    }

    // ---- Memory ----

    /// Returns the memory of unused input and unsent text of all connections, and of their waits and pages, in bytes.
    fn buffered_bytes(&self) -> usize {
        self.input_bytes + self.waiting_bytes + self.pool.text_len()
    }

    /// Returns whether unused input and unsent text of all connections have reached their limit. Then at
    /// most 1 KiB is read from each connection, and commands run only for clients that have read all
    /// replies.
    pub fn is_crowded(&self) -> bool {
        self.buffered_bytes() >= self.buffer_limit
    }

    /// Returns whether `text_len` more bytes of text exceed this limit. Without such input and text, one
    /// reply may exceed it.
    pub fn is_crowded_by(&self, text_len: usize) -> bool {
        self.is_exceeded(self.buffered_bytes(), text_len)
    }

    /// Returns whether `text_len` more bytes of text exceed this limit, with those of replies whose bodies are being
    /// read, and whatever the input takes: replies that wait for the text of others to be sent would otherwise wait
    /// for their own input.
    pub fn is_text_crowded_by(&self, text_len: usize) -> bool {
        let promised = self.queue.body_cache.read_bodies.memory.text_len.get();
        self.is_exceeded(self.pool.text_len() + promised, text_len)
    }

    fn is_exceeded(&self, buffered: usize, more: usize) -> bool {
        buffered > 0 && buffered.saturating_add(more) > self.buffer_limit
    }

    /// Returns the number of unsent bytes at which the commands of a connection stop running.
    pub fn output_limit(&self) -> usize {
        if self.is_crowded() { 1 } else { OUTPUT_LIMIT }
    }

    /// Returns whether at least this part of the memory that the process keeps in reserve is left.
    pub fn has_headroom(&self, part: Headroom) -> bool {
        (self.process.has_headroom)(part)
    }

    /// Returns whether a job with a body of this length fits into `--max-memory`.
    #[inline]
    pub fn has_memory_for(&mut self, full_len: usize, is_unique: bool) -> bool {
        // The default. Adding up the memory would take a twentieth of the time of a put.
        self.queue.settings.max_memory().is_none_or(|limit| self.fits(full_len, is_unique, limit))
    }

    fn fits(&mut self, full_len: usize, is_unique: bool, limit: u64) -> bool {
        // Pages that are kept for the next bodies are freed first.
        loop {
            let queue = &mut self.queue;
            let taken = queue.job_bytes().saturating_add(queue.bytes_of_a_job(full_len, is_unique));
            if taken <= limit {
                return true;
            }
            if !queue.bodies.free_empty(taken - limit) {
                break;
            }
        }
        let taken = self.queue.job_bytes();
        let now = self.queue.now;
        if self.memory_warns_at <= now {
            self.memory_warns_at = now + WARN_INTERVAL;
            warn!(
                "a put is answered OUT_OF_MEMORY: jobs, arriving bodies and unread replies take \
                 {taken} bytes of memory, and {limit} are allowed"
            );
        }
        false
    }

    /// Returns whether no connection is served because too many changes wait for a remote disk, or any when memory
    /// is short: they take some. Timers and deadlines still have their effects.
    pub fn is_congested(&self) -> bool {
        let waits = || self.progress.is_some_and(|progress| progress.waiting_bytes > 0);
        self.queue.binlog.as_ref().is_some_and(|binlog| {
            binlog.is_congested() || (waits() && !self.has_headroom(Headroom::Half))
        })
    }

    /// Returns whether a remote disk does not acknowledge changes in time, so that clients should find
    /// another server.
    pub fn is_stalled(&self) -> bool {
        self.progress.is_some_and(Progress::is_stalled)
    }
}
