//! The order in which cold bodies are read for replies, and the memory of these replies.
//!
//! ```text
//! waiting: small, large      until there is memory for all bodies of the reply, in order
//!   -> turns                 each connection reads 64 KiB, then the next one does
//!   -> begun                 at most 4 reads or 1 MiB are with the disk, in their order
//!   -> `bodies` replies
//! ```
//!
//! So a worker waits for 1 MiB, and for 64 KiB of each other connection, whatever those have asked for.
//! At most one large reply has turns at a time. What is not begun is forgotten when its connection is
//! closed. A body for which several connections wait is read once.
//!
//! When the system has too little memory or too many open files for a read, those of its class wait for
//! 0.1 s, and replies that wait for longer than 10 s are refused. This module does not know the replies.

use super::Server;
use super::bodies::WORK_PER_BODY;
use crate::engine::binlog::reads::RecordRead;
use crate::engine::conn::{BodySource, Phase, WantedBodies, WantedBody};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{ConnKey, JobKey};
use crate::engine::limits::Limits;
use crate::engine::queue::body_cache::Fetched;
use crate::engine::queue::read_body::{Grant, ReadBody, ReplyClass};
use crate::engine::time::Nanos;
use log::debug;
use std::collections::{TryReserveError, VecDeque};
use std::io;
use std::rc::Rc;

/// The connections that wait for bodies.
#[derive(Debug, Default)]
pub(super) struct Reads {
    /// Those for whose replies there was no memory yet, by class.
    waiting: [VecDeque<ConnKey>; 2],
    /// Those with bodies that are not with the disk, in the order of their turns.
    turns: VecDeque<ConnKey>,
    begun: VecDeque<Begun>,
    /// The connection that waits for the disk with a large reply.
    large: Option<ConnKey>,
    /// For a class, no read begins before this moment: the last one had too little memory.
    retry_at: [Option<Nanos>; 2],
    /// While replies wait for memory, connections that have taken nothing before this moment are closed.
    stalled_at: Option<Nanos>,
}

/// A read that is with the disk.
#[derive(Debug)]
struct Begun {
    job: JobKey,
    read: RecordRead,
    /// The connections, and the index of the body in their replies.
    readers: Vec<(ConnKey, usize)>,
}

/// A reply with more cold bytes is large.
pub(super) const LARGE_REPLY: u64 = 256 * 1024;
/// The memory of replies with cold bodies that clients have not read. `--max-memory` may leave less.
const MOST_MEMORY: u64 = 16 * 1024 * 1024;
/// Of what `--max-memory` leaves, replies may take this part.
const MEMORY_DIVISOR: u64 = 4;
/// Units of work to take a record that the disk has read.
const WORK_PER_READ: usize = 8;
/// A longer body takes no more turns than one of this length.
const MOST_TURN_BYTES: usize = 1024 * 1024;
/// The time until reads are tried again after one had too little memory.
const RETRY_PAUSE: Nanos = Nanos::from_millis(100);
/// A reply that has waited for this time is refused when the system has no memory for it. A client that has
/// taken nothing for this time is disconnected when its memory is wanted.
const PATIENCE: Nanos = Nanos::from_secs(10);

impl Reads {
    /// Ensures that one more connection can wait without further memory.
    pub fn try_reserve(&mut self, connections: usize) -> Result<(), TryReserveError> {
        for queue in self.waiting.iter_mut().chain([&mut self.turns]) {
            queue.try_reserve(connections.saturating_sub(queue.len()))?;
        }
        Ok(())
    }

    /// Returns when reads are tried again that had too little memory, or clients are looked at that hold it.
    pub fn next_due(&self) -> Option<Nanos> {
        self.retry_at.into_iter().chain([self.stalled_at]).flatten().min()
    }

    /// Forgets a connection.
    pub fn remove(&mut self, key: ConnKey) {
        for queue in self.waiting.iter_mut().chain([&mut self.turns]) {
            if let Some(index) = queue.iter().position(|&other| other == key) {
                queue.remove(index);
            }
        }
        for begun in &mut self.begun {
            begun.readers.retain(|&(other, _)| other != key);
        }
        self.large.take_if(|large| *large == key);
    }

    /// Checks that a connection that waits for bodies is where it will go on.
    pub fn check(&self, key: ConnKey, wanted: &WantedBodies, limits: &Limits) {
        let count = |queue: &VecDeque<ConnKey>| queue.iter().filter(|it| **it == key).count();
        let waiting = count(&self.waiting[wanted.class as usize]);
        let turns = count(&self.turns);
        let readers = self.begun.iter().flat_map(|begun| &begun.readers);
        let reading = readers.filter(|(other, _)| *other == key).count();
        let is_started = wanted.grant.is_some();
        let is_right = waiting == usize::from(!is_started)
            && turns == usize::from(wanted.has_turn)
            && wanted.has_turn == (is_started && wanted.next < wanted.bodies.len())
            && reading == wanted.reading
            && waiting + turns + reading > 0;
        assert!(is_right, "{waiting} {turns} {reading} of {wanted:?}");
        let bytes: usize = self.begun.iter().map(|begun| begun.read.place.len as usize).sum();
        let Limits { reads_with_disk, bytes_with_disk, .. } = *limits;
        let is_within = self.begun.len() <= reads_with_disk && bytes <= bytes_with_disk;
        assert!(self.begun.len() <= 1 || is_within, "too many reads are begun: {:?}", self.begun);
    }
}

impl Server {
    /// Begins to wait for the bodies of a reply, or replies at once.
    pub(super) fn want_bodies(&mut self, key: ConnKey, wanted: WantedBodies, now: Nanos) {
        self.reads.waiting[wanted.class as usize].push_back(key);
        self.conns[key].phase = Phase::ReadingBodies(Box::new(wanted));
        self.start_replies(now);
    }

    /// Returns whether a reply can be started, or what was read can be freed.
    pub(super) fn has_reads_due(&self) -> bool {
        self.queue.body_cache.read_bodies.has_freed()
            || ReplyClass::ALL.into_iter().any(|class| self.next_to_start(class).is_some())
    }

    /// Begins further reads, if the time has come, and frees what was sent.
    pub(super) fn tick_reads(&mut self, now: Nanos) {
        while let Some(record) = self.queue.body_cache.read_bodies.take_freed() {
            self.queue.bodies.free_in_steps(record);
        }
        for retry_at in &mut self.reads.retry_at {
            retry_at.take_if(|at| *at <= now);
        }
        self.finish_reads(now);
        self.start_replies(now);
        self.close_stalled(now);
    }

    /// Closes connections that have taken nothing of a reply for 10 s while others wait for its memory:
    /// otherwise clients that never read could keep all workers from their jobs.
    fn close_stalled(&mut self, now: Nanos) {
        let is_short = |class: ReplyClass| {
            !self.reads.waiting[class as usize].is_empty()
                && self.reads.retry_at[class as usize].is_none()
                && (class == ReplyClass::Small || self.reads.large.is_none())
        };
        if !ReplyClass::ALL.into_iter().any(is_short) {
            self.reads.stalled_at = None;
        } else if self.reads.stalled_at.is_none_or(|at| at <= now) {
            let is_first = self.reads.stalled_at.replace(now + PATIENCE).is_none();
            let mut from = 0;
            while let Some(key) = self.conns.next_stalled(from, is_first) {
                from = key.index() + 1;
                debug!("connection {}: its reply is unread, and its memory wanted", key.index());
                self.close_now(key);
            }
        }
    }

    // ---- Memory ----

    /// Starts the replies for which there is memory.
    fn start_replies(&mut self, now: Nanos) {
        for class in ReplyClass::ALL {
            // At least one, and no more than an iteration has time for.
            let mut may_start = true;
            while may_start && let Some(key) = self.next_to_start(class) {
                self.reads.waiting[class as usize].pop_front();
                self.start_reply(key, now);
                may_start = self.budget.is_left();
            }
        }
        self.begin_reads(now);
    }

    /// Returns the next connection of this class if there is memory for its reply.
    fn next_to_start(&self, class: ReplyClass) -> Option<ConnKey> {
        let key = *self.reads.waiting[class as usize].front()?;
        let Phase::ReadingBodies(wanted) = &self.conns[key].phase else {
            unreachable!("connection {} does not wait for bodies", key.index())
        };
        let memory = &self.queue.body_cache.read_bodies;
        let jobs = self.queue.job_bytes().saturating_sub(memory.all_granted());
        let left = self.settings.max_memory_bytes.saturating_sub(jobs) / MEMORY_DIVISOR;
        let (granted, most) = (memory.granted(class), left.min(MOST_MEMORY));
        let fits = match class {
            ReplyClass::Small => granted + wanted.cold_bytes <= most / 4,
            // One that is too large for it waits until half of it is free.
            ReplyClass::Large => {
                let most = most / 4 * 3;
                self.reads.large.is_none() && granted + wanted.cold_bytes.min(most / 2) <= most
            }
        };
        let is_retried = self.reads.retry_at[class as usize].is_none();
        (is_retried && (fits || granted == 0)).then_some(key)
    }

    /// Takes what needs no waiting for the disk, and replies if that is all.
    fn start_reply(&mut self, key: ConnKey, now: Nanos) {
        let Some(mut wanted) = self.take_wanted(key) else { return };
        self.charge(WORK_PER_BODY * wanted.bodies.len());
        let memory = &self.queue.body_cache.read_bodies;
        let mut grant = memory.grant(wanted.cold_bytes, wanted.class);
        for one in &mut wanted.bodies {
            if matches!(one.source, BodySource::Disk) {
                self.fetch(key, one, &mut grant, now);
            }
        }
        wanted.grant = Some(grant);
        wanted.turn_bytes = self.queue.limits.read_turn_bytes;
        self.go_on(key, wanted, now);
    }

    /// Sets where a reply gets a body from. Returns the read if the disk must be asked for it.
    fn fetch(
        &mut self,
        key: ConnKey,
        one: &mut WantedBody,
        grant: &mut Grant,
        now: Nanos,
    ) -> Option<RecordRead> {
        let fetched = self.queue.fetch(one.job, one.id, grant);
        one.source = match fetched {
            Fetched::InJob => BodySource::Job,
            Fetched::Read(body) => BodySource::Read(body),
            Fetched::Unreadable => {
                self.queue.bury_unreadable(one.job, one.id, key, now);
                BodySource::Nowhere
            }
            Fetched::NotNow => {
                self.reads.retry_at[grant.class() as usize] = Some(now + RETRY_PAUSE);
                BodySource::Disk
            }
            Fetched::OnDisk(read) => return Some(read),
        };
        None
    }

    /// Lets a connection wait for its next turn or for the disk, or replies.
    fn go_on(&mut self, key: ConnKey, mut wanted: Box<WantedBodies>, now: Nanos) {
        let is_on_disk = |one: &WantedBody| matches!(one.source, BodySource::Disk);
        if !wanted.has_turn {
            let rest = &wanted.bodies[wanted.next..];
            wanted.next += rest.iter().position(is_on_disk).unwrap_or(rest.len());
            if wanted.next == wanted.bodies.len() && wanted.reading == 0 {
                // Bodies may have become cold while others were read.
                for (index, one) in wanted.bodies.iter_mut().enumerate().rev() {
                    let is_in_job = matches!(one.source, BodySource::Job);
                    if is_in_job && self.queue.is_cold(one.job, one.id) {
                        one.source = BodySource::Disk;
                        wanted.next = index;
                    }
                }
            }
        }
        if wanted.next < wanted.bodies.len() && !wanted.has_turn {
            wanted.has_turn = true;
            self.reads.turns.push_back(key);
        }
        if !wanted.has_turn && wanted.reading == 0 {
            self.reads.large.take_if(|large| *large == key);
            return self.finish_reply(key, *wanted, now);
        }
        if wanted.class == ReplyClass::Large {
            self.reads.large = Some(key);
        }
        self.conns[key].phase = Phase::ReadingBodies(wanted);
    }

    /// Takes a connection's reply out of its phase.
    pub(super) fn take_wanted(&mut self, key: ConnKey) -> Option<Box<WantedBodies>> {
        self.conns.wanted_bodies(key)?;
        let phase = std::mem::take(&mut self.conns[key].phase);
        if let Phase::ReadingBodies(wanted) = phase { Some(wanted) } else { None }
    }

    // ---- Turns ----

    /// Begins reads while the disk has few.
    fn begin_reads(&mut self, now: Nanos) {
        let mut skipped = 0;
        while self.reads.begun.len() < self.queue.limits.reads_with_disk
            && skipped < self.reads.turns.len()
            && let Some(key) = self.reads.turns.pop_front()
        {
            let Some(mut wanted) = self.take_wanted(key) else { continue };
            let is_blocked = self.reads.retry_at[wanted.class as usize].is_some();
            if is_blocked && now.since(wanted.asked_at) >= PATIENCE {
                self.reads.remove(key);
                let jobs = wanted.bodies.iter().map(|one| (one.job, one.id));
                self.refuse_answer(key, wanted.answer, jobs, now);
                continue;
            }
            if is_blocked {
                skipped += 1;
                self.reads.turns.push_back(key);
                self.conns[key].phase = Phase::ReadingBodies(wanted);
                continue;
            }
            skipped = 0;
            if !self.begin_one(key, &mut wanted, now) {
                self.conns[key].phase = Phase::ReadingBodies(wanted);
                return self.reads.turns.push_front(key);
            }
            wanted.has_turn = false;
            self.go_on(key, wanted, now);
        }
    }

    /// Begins the next read for a connection, unless it has used up its turn. Returns `false` if the disk has
    /// enough to do.
    fn begin_one(&mut self, key: ConnKey, wanted: &mut WantedBodies, now: Nanos) -> bool {
        let index = wanted.next;
        let id = wanted.bodies[index].id;
        if let Some(begun) = self.reads.begun.iter_mut().find(|begun| begun.read.id == id) {
            return wanted.join(key, &mut begun.readers);
        }
        let grant = wanted.grant.as_mut().expect("it was granted before its turn");
        // Another connection may have read it, and the system may have read ahead.
        let Some(read) = self.fetch(key, &mut wanted.bodies[index], grant, now) else {
            return true;
        };
        let len = read.place.len as usize;
        let cost = len.min(MOST_TURN_BYTES);
        if cost > wanted.turn_bytes {
            wanted.turn_bytes += self.queue.limits.read_turn_bytes;
            return true;
        }
        let begun = self.reads.begun.iter();
        let with_disk: usize = begun.map(|begun| begun.read.place.len as usize).sum();
        let mut readers = Vec::new();
        let is_too_much = with_disk > 0 && with_disk + len > self.queue.limits.bytes_with_disk;
        if is_too_much || !wanted.join(key, &mut readers) {
            return false;
        }
        wanted.turn_bytes -= cost;
        self.queue.begin_read(read);
        self.reads.begun.push_back(Begun { job: wanted.bodies[index].job, read, readers });
        true
    }

    // ---- Ends of reads ----

    /// Passes what the disk has read to the replies that wait for it.
    fn finish_reads(&mut self, now: Nanos) {
        while let Some(record) = self.queue.finished_read() {
            let begun = self.reads.begun.pop_front().expect("it was begun for clients");
            self.charge(WORK_PER_READ);
            if let Some(&(first, _)) = begun.readers.first() {
                self.finish_read(begun, first, record, now);
            } else if let Ok(record) = record {
                self.queue.bodies.free_in_steps(record);
            }
        }
    }

    fn finish_read(
        &mut self,
        Begun { job, read, readers }: Begun,
        first: ConnKey,
        record: io::Result<Vec<u8>>,
        now: Nanos,
    ) {
        let wanted = self.conns.wanted_bodies(first).expect("it is removed when it is closed");
        let grant = wanted.grant.as_mut().expect("it was granted before its turn");
        // Compaction may have moved the record meanwhile, and its old file may be gone.
        let fetched = if record.is_err() && self.queue.has_moved(job, read) {
            Fetched::OnDisk(read)
        } else {
            self.queue.read_body(read, record, grant)
        };
        for (key, index) in readers {
            let Some(mut wanted) = self.take_wanted(key) else { continue };
            wanted.reading -= 1;
            let source = &mut wanted.bodies[index].source;
            match &fetched {
                Fetched::Read(body) => *source = BodySource::Read(Rc::clone(body)),
                Fetched::Unreadable | Fetched::InJob => {
                    self.queue.bury_unreadable(job, read.id, key, now);
                    *source = BodySource::Nowhere;
                }
                Fetched::NotNow => {
                    self.reads.retry_at[wanted.class as usize] = Some(now + RETRY_PAUSE);
                    wanted.next = wanted.next.min(index);
                }
                Fetched::OnDisk(_) => wanted.next = wanted.next.min(index),
            }
            self.go_on(key, wanted, now);
        }
        if let Fetched::Read(body) = fetched {
            self.share(read.id, &body, now);
        }
    }

    /// Replies to the connections that wait for memory, and want nothing but this body.
    fn share(&mut self, id: u64, body: &Rc<ReadBody>, now: Nanos) {
        for class in ReplyClass::ALL {
            for _ in 0..self.reads.waiting[class as usize].len() {
                let Some(key) = self.reads.waiting[class as usize].pop_front() else { break };
                match self.conns.wanted_bodies(key) {
                    Some(WantedBodies { bodies, .. })
                        if bodies.len() == 1 && bodies[0].id == id =>
                    {
                        bodies[0].source = BodySource::Read(Rc::clone(body));
                        self.start_reply(key, now);
                    }
                    Some(_) | None => self.reads.waiting[class as usize].push_back(key),
                }
            }
        }
    }
}

impl WantedBodies {
    /// Waits for the next body together with these connections. Returns `false` if there is no memory for it.
    fn join(&mut self, key: ConnKey, readers: &mut Vec<(ConnKey, usize)>) -> bool {
        if headroom::leave(Headroom::Quarter, || readers.try_reserve(1)).is_err() {
            return false;
        }
        readers.push((key, self.next));
        (self.next, self.reading) = (self.next + 1, self.reading + 1);
        true
    }
}
