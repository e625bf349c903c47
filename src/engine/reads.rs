//! Replies with bodies of which some are only on the disk: what they want, and in which order.
//!
//! A client whose body must come from the disk waits for it, and only that client. Its next commands
//! run after the reply.
//!
//! ```text
//! waiting: small, large      until there is memory for all bodies of the reply, in order
//!   -> turns                 each connection reads one body, then the next one does
//!   -> begun                 at most 4 reads or 1 MiB are with the disk, in their order
//!   -> the reply
//! ```
//!
//! So a worker waits for 1 MiB, and for one body of each other connection, whatever those have asked for. While small
//! and large replies want turns, a large body is followed by as many bytes of small replies, so that many small ones
//! wait together for one large body. What is not begun is forgotten when its connection is
//! closed. A body for which several connections wait is read once, also if one of them is compaction, which
//! needs no turn. The server continues the replies ([`server::reading`](super::server)), because it knows
//! the connections.

use super::conn::{Conn, Doing, ReserveKind};
use super::headroom::{self, Headroom};
use super::keys::{ConnKey, JobKey};
use super::protocol::batch::ReplySize;
use super::protocol::reply::{Answer, JobWord, Reply, Word};
use super::queue::body::LARGE;
use super::queue::read_body::{Grant, ReadBody, ReplyClass};
use super::store::Store;
use super::time::Nanos;
use std::collections::{TryReserveError, VecDeque};
use std::rc::Rc;

/// The connections that wait for bodies. The queue has those that wait for a read that is with the disk.
#[derive(Debug, Default)]
pub struct Reads {
    /// Those for whose replies there was no memory yet, by class.
    pub waiting: [VecDeque<ConnKey>; 2],
    /// The others in the order of their turns, by class.
    pub turns: [VecDeque<ConnKey>; 2],
    /// Bytes of small replies that are read before the next body of a large one.
    pub large_lead: u32,
    /// No read begins before this moment: the last one had too little memory.
    pub retry_at: Option<Nanos>,
    /// A connection has begun to wait since the last look.
    pub has_new: bool,
    /// When connections were last looked at that take nothing while replies wait for memory.
    pub looked_at: Nanos,
}

/// A reply whose bodies are not all in memory. It waits until there is memory for it, then for the disk.
#[derive(Debug)]
pub struct WantedBodies {
    pub reply: BodiesFor,
    pub bodies: Vec<WantedBody>,
    pub class: ReplyClass,
    /// The bytes of the cold bodies.
    pub cold_bytes: u64,
    /// The bytes of those that are copied to the output.
    pub copied_bytes: usize,
    /// The memory for the bodies that are not read yet, once there was enough for all.
    pub grant: Option<Grant>,
    /// When the client has asked for them.
    pub asked_at: Nanos,
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

/// The reply that has the bodies.
#[derive(Clone, Copy, Debug)]
pub enum BodiesFor {
    /// To `peek` and its variants.
    Found,
    /// To `peek-batch`, with the id for the next page.
    FoundBatch { next: u64 },
    /// To `reserve-job`.
    ReservedById,
    /// To the other reserves. If no body can be read, they go on until their timeout ends.
    Reserved { kind: ReserveKind, until: Nanos },
}

/// Units of work to read a body from the page cache.
pub const WORK_PER_BODY: usize = 8;
/// A shorter read takes as long as one of this many bytes.
const LEAST_READ: u32 = 4096;
/// A reply with more cold bytes is large.
const LARGE_REPLY: u64 = 256 * 1024;
/// The memory of replies with cold bodies that clients have not read. `--max-memory` may leave less.
const MOST_MEMORY: u64 = 16 * 1024 * 1024;
/// Of what `--max-memory` leaves, replies may take this part.
const MEMORY_DIVISOR: u64 = 4;

impl BodiesFor {
    /// Returns whether the client has reserved the jobs.
    pub fn is_reserved(self) -> bool {
        match self {
            BodiesFor::Found | BodiesFor::FoundBatch { .. } => false,
            BodiesFor::ReservedById | BodiesFor::Reserved { .. } => true,
        }
    }

    pub fn word(self) -> JobWord {
        if self.is_reserved() { JobWord::Reserved } else { JobWord::Found }
    }
}

/// Replies with a job, now or when the disk has read its body.
#[inline]
pub fn reply_job(c: &mut Conn, s: &mut Store, job: JobKey, reply: BodiesFor) -> Answer {
    let it = &s.queue.jobs[job];
    let id = it.id;
    if it.body.is_cold() {
        return want(c, s, &[(job, id)], reply);
    }
    c.reply_body(s, reply.word(), (job, id), None);
    Ok(Reply::Later)
}

/// Replies with a line and these jobs, for which the output has room.
pub fn reply_jobs(
    c: &mut Conn,
    s: &mut Store,
    heading: Reply,
    jobs: Vec<(JobKey, u64)>,
    reply: BodiesFor,
) -> Answer {
    if jobs.iter().any(|&(job, _)| s.queue.jobs[job].body.is_cold()) {
        return want(c, s, &jobs, reply);
    }
    let mut is_written = c.reply(s, &heading);
    for job in jobs {
        is_written = is_written && c.reply_body(s, reply.word(), job, None);
    }
    Ok(Reply::Later)
}

/// Begins to wait for the bodies of a reply. Their TTRs begin when the reply is made.
#[cold]
fn want(c: &mut Conn, s: &mut Store, jobs: &[(JobKey, u64)], reply: BodiesFor) -> Answer {
    s.queue.work.spend(WORK_PER_BODY * jobs.len());
    let mut wanted = WantedBodies {
        reply,
        bodies: Vec::new(),
        class: ReplyClass::Small,
        cold_bytes: 0,
        copied_bytes: 0,
        grant: None,
        asked_at: s.queue.now,
    };
    let has_room = headroom::leave(Headroom::Quarter, || wanted.bodies.try_reserve(jobs.len()));
    let mut fits = has_room.is_ok();
    for &(job, id) in jobs.iter().filter(|_| has_room.is_ok()) {
        let body = &s.queue.jobs[job].body;
        // One that another reply has got is taken later: a reply that waits for memory holds none.
        let source = if !body.is_cold() {
            BodySource::Job
        } else {
            fits &= s.settings.can_hold(body);
            wanted.cold_bytes += u64::from(body.full_len());
            wanted.copied_bytes += if body.is_large() { 0 } else { body.full_len() as usize };
            BodySource::Disk
        };
        wanted.bodies.push(WantedBody { job, id, source });
    }
    if !fits {
        return refuse(c, s, reply, jobs.iter().copied());
    }
    if wanted.cold_bytes > LARGE_REPLY {
        wanted.class = ReplyClass::Large;
    }
    if reply.is_reserved() {
        jobs.iter().for_each(|&(job, _)| s.queue.stop_ttr(&mut c.client, job));
    }
    s.reads.waiting[wanted.class as usize].push_back(c.client.key);
    s.reads.has_new = true;
    c.doing = Doing::Bodies(Box::new(wanted));
    Ok(Reply::Later)
}

/// Refuses a reply because there is no memory for the bodies. Jobs that were reserved for it are ready
/// again.
pub fn refuse(
    c: &mut Conn,
    s: &mut Store,
    reply: BodiesFor,
    jobs: impl Iterator<Item = (JobKey, u64)>,
) -> Answer {
    if reply.is_reserved() {
        jobs.for_each(|(job, id)| s.queue.give_back(&mut c.client, job, id));
    }
    Err(Word::OutOfMemory)
}

impl Reads {
    /// Ensures that one more connection can wait without further memory.
    pub fn try_reserve(&mut self, connections: usize) -> Result<(), TryReserveError> {
        for queue in self.waiting.iter_mut().chain(&mut self.turns) {
            queue.try_reserve(connections.saturating_sub(queue.len()))?;
        }
        Ok(())
    }

    /// Removes and returns the connection that has the next turn.
    pub fn take_turn(&mut self) -> Option<ConnKey> {
        let [small, large] = &mut self.turns;
        if self.large_lead > 0 {
            small.pop_front().or_else(|| large.pop_front())
        } else {
            large.pop_front().or_else(|| small.pop_front())
        }
    }

    /// Notes that a body of this length is read for a reply of this class.
    pub fn count_turn(&mut self, class: ReplyClass, len: u32) {
        self.large_lead = match class {
            ReplyClass::Small => self.large_lead.saturating_sub(len.max(LEAST_READ)),
            ReplyClass::Large => len,
        };
    }
}

/// Forgets a connection that waits for bodies.
pub fn forget(s: &mut Store, key: ConnKey) {
    let queues = s.reads.waiting.iter_mut().chain(&mut s.reads.turns);
    queues.for_each(|queue| queue.retain(|&other| other != key));
    for begun in &mut s.queue.body_cache.begun {
        begun.readers.retain(|&other| other != key);
    }
}

impl WantedBodies {
    /// Returns the index of the first body that must be read. If the disk reads for the reply, it is this one.
    pub fn next(&self) -> Option<usize> {
        self.bodies.iter().position(|one| matches!(one.source, BodySource::Disk))
    }

    /// Checks that a connection that waits for bodies is where it will go on, once.
    pub fn check(&self, key: ConnKey, s: &Store) {
        let count =
            |keys: &mut dyn Iterator<Item = &ConnKey>| keys.filter(|it| **it == key).count();
        let waiting = count(&mut s.reads.waiting[self.class as usize].iter());
        let turns = count(&mut s.reads.turns[self.class as usize].iter());
        let reading = count(&mut s.queue.body_cache.begun.iter().flat_map(|it| &it.readers));
        let is_right = waiting + turns + reading == 1 && (waiting == 1 || self.grant.is_some());
        assert!(is_right, "{waiting} {turns} {reading} of {self:?}");
    }

    /// Returns whether the replies of other clients leave memory for this one.
    pub fn fits(&self, s: &Store) -> bool {
        let memory = &s.queue.body_cache.read_bodies;
        let is_read = matches!(&self.bodies[..], [one] if memory.find(one.id).is_some());
        if is_read || self.grant.is_some() {
            return true;
        }
        if self.is_crowded_out(s) || self.needs_cache(s) {
            return false;
        }
        let granted = memory.granted(self.class);
        let jobs = s.queue.job_bytes().saturating_sub(memory.all_granted());
        let left = s.settings.max_memory_bytes.saturating_sub(jobs) / MEMORY_DIVISOR;
        let most = left.min(MOST_MEMORY);
        let fits = match self.class {
            ReplyClass::Small => granted + self.cold_bytes <= most / 4,
            // One that is too large for it waits until half of it is free.
            ReplyClass::Large => {
                let most = most / 4 * 3;
                granted + self.cold_bytes.min(most / 2) <= most
            }
        };
        fits || granted == 0
    }

    /// Returns whether the bodies would exceed what `--max-memory` allows with those of jobs that are in memory. These
    /// can be read back, so they make room.
    pub fn needs_cache(&self, s: &Store) -> bool {
        if self.grant.is_some() || s.queue.body_cache.warm_bytes == 0 {
            return false;
        }
        let limit = s.settings.max_memory_bytes;
        let taken = s.queue.job_bytes().saturating_add(self.cold_bytes);
        taken > limit.saturating_add(limit / MEMORY_DIVISOR)
    }

    /// Returns whether unread replies, and those whose bodies are being read, leave no memory for the bodies that are
    /// copied to the output. As in memory, there is always some for a single one.
    pub fn is_crowded_out(&self, s: &Store) -> bool {
        self.copied_bytes > LARGE && s.is_text_crowded_by(self.copied_bytes)
    }

    /// Returns the room that the reply needs in an output.
    pub fn size(&self, s: &Store) -> ReplySize {
        let len = |one: &WantedBody| match &one.source {
            BodySource::Read(read) => Some(read.bytes().len()),
            BodySource::Job => s.queue.jobs.get(one.job).map(|job| job.body.full_len() as usize),
            BodySource::Disk | BodySource::Nowhere => None,
        };
        self.bodies.iter().filter_map(len).fold(ReplySize::HEADING, ReplySize::with)
    }
}
