//! Replies with bodies of which some are only on the disk: what they want, and in which order.
//!
//! A client whose body must come from the disk waits for it, and only that client. Its next commands
//! run after the reply.
//!
//! ```text
//! waiting: small, large      until there is memory for all bodies of the reply, in order
//!   -> turns                 each connection reads one body, then the next one does
//!   -> reading               at most 4 reads are with the disk, in their order: 512 KiB and one body
//!   -> the reply
//! ```
//!
//! So a worker waits for about 1 MiB, and for one body of each other connection, whatever those have asked for. While
//! small and large replies want turns, a large body is followed by as many bytes of small replies, so that many small
//! ones wait together for one large body. What is not begun is forgotten when its connection is closed. A body for
//! which several connections wait is read once for as many as may wait for the disk, also if one of them is
//! compaction, which needs no turn. [`server::reading`](super::server), which has the connections, lets them go on.

use super::binlog::reads::RecordRead;
use super::commands::reserve::Reserve;
use super::conn::{Conn, Doing, Steps, WaitFor};
use super::headroom::{self, Headroom};
use super::keys::{ConnKey, JobKey};
use super::protocol::batch::{Batch, ReplySize};
use super::protocol::reply::{Answer, Reply, Word};
use super::queue::body::LARGE;
use super::queue::client::Client;
use super::queue::read_body::{Grant, ReadBody, ReplyClass};
use super::store::Store;
use super::time::Nanos;
use crate::engine::headroom::NoMemory;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;

/// The connections that wait for bodies, each in one of the lists.
#[derive(Debug, Default)]
pub struct Reads {
    /// Those for whose replies there was no memory yet, by class.
    pub waiting: [VecDeque<ConnKey>; 2],
    /// The others in the order of their turns, by class.
    pub turns: [VecDeque<ConnKey>; 2],
    /// Those that wait for a read that is with the disk.
    pub reading: VecDeque<ConnKey>,
    /// Bytes of small replies that are read before the next body of a large one.
    pub large_lead: u32,
    /// No reply of the class is started before this moment: the last one had too little memory.
    pub retry_at: [Nanos; 2],
    /// A connection has begun to wait since the last look.
    pub has_new: bool,
    /// When all connections had last been looked at, for those that take nothing while replies wait for memory.
    pub looked_at: Nanos,
    /// The number of the connection that is looked at next.
    pub look_at: usize,
}

/// A reply whose bodies are not all in memory. It waits until there is memory for it, then for the disk.
#[derive(Debug)]
pub struct WantedBodies {
    reply: BodiesFor,
    bodies: Vec<WantedBody>,
    /// The index of the body that is read in the next turn. If the disk reads for the reply, it is this one.
    pub next: usize,
    class: ReplyClass,
    /// The bytes of all bodies: those in memory may become cold meanwhile.
    bytes: u64,
    /// The room that the reply needs in an output.
    size: ReplySize,
    /// The memory for the bodies that are not read yet, once there was enough for all.
    grant: Option<Grant>,
    /// When the client has asked for them.
    pub asked_at: Nanos,
}

/// One of these bodies.
#[derive(Debug)]
pub struct WantedBody {
    job: JobKey,
    id: u64,
    /// With CR LF, in bytes.
    full_len: u32,
    /// The body that was read. Otherwise the reply has that of the job, which must not be cold then.
    read: Option<Rc<ReadBody>>,
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
    Reserved(Reserve),
}

/// Units of work to read a body from the page cache, and so are each this many bytes of it.
const WORK_PER_BODY: usize = 8;
const READ_BYTES_PER_WORK: usize = 512;
/// At most this many replies wait for the disk, because one iteration makes all that wait for one read.
const MOST_READERS: usize = 64;
/// The time until the next reply of a class is tried after one had too little memory.
const RETRY_PAUSE: Nanos = Nanos::from_millis(100);
/// A reply that has waited for this time is refused when the system has no memory for it. From then on clients that
/// take nothing are disconnected when their memory is wanted.
pub const PATIENCE: Nanos = Nanos::from_secs(10);
/// A shorter read takes as long as one of this many bytes.
const LEAST_READ: u32 = 4096;
/// A reply with more bytes of bodies is large.
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
            BodiesFor::ReservedById | BodiesFor::Reserved(_) => true,
        }
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
    c.reply_body(s, reply.is_reserved(), (job, id), None);
    Ok(Reply::Later)
}

/// Replies with the jobs of a batch, which takes room in the output once all bodies are there.
pub fn reply_batch(c: &mut Conn, s: &mut Store, batch: Batch, reply: BodiesFor) -> Answer {
    let jobs = batch.jobs;
    if jobs.iter().any(|&(job, _)| s.queue.jobs[job].body.is_cold()) {
        return want(c, s, &jobs, reply);
    }
    if c.output.try_reserve(batch.size, &mut s.pool).is_err() {
        return refuse(c, s, reply, jobs.into_iter());
    }
    write(c, s, reply, jobs.into_iter().map(|(job, id)| (job, id, None)))
}

/// Replies with these jobs, for which the output has room. Their TTRs begin, if they have not. A reserve without any
/// continues.
fn write(
    c: &mut Conn,
    s: &mut Store,
    reply: BodiesFor,
    bodies: impl ExactSizeIterator<Item = (JobKey, u64, Option<Rc<ReadBody>>)>,
) -> Answer {
    let count = bodies.len() as u64;
    match reply {
        BodiesFor::Found | BodiesFor::ReservedById if count == 0 => return Err(Word::NOT_FOUND),
        BodiesFor::Reserved(reserve) if count == 0 => return c.later(Steps::Reserve(reserve)),
        BodiesFor::FoundBatch { next } => c.reply(s, &Reply::Numbers("FOUND_BATCH ", count, next)),
        BodiesFor::Reserved(Reserve { batch: Some(_), .. }) => {
            c.reply(s, &Reply::Number("RESERVED_BATCH ", count))
        }
        BodiesFor::Found | BodiesFor::ReservedById | BodiesFor::Reserved(_) => {}
    }
    for (job, id, read) in bodies {
        if reply.is_reserved() && s.queue.due(&s.queue.jobs[job]).is_none() {
            s.queue.touch(&mut c.client, job);
        }
        c.reply_body(s, reply.is_reserved(), (job, id), read.as_ref());
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
        next: 0,
        class: ReplyClass::Small,
        bytes: 0,
        size: ReplySize::HEADING,
        grant: None,
        asked_at: s.queue.now,
    };
    let has_room = headroom::keeping(Headroom::Quarter, || wanted.bodies.try_reserve(jobs.len()));
    let can_hold = |&(job, _): &(JobKey, u64)| s.queue.settings.can_hold(&s.queue.jobs[job].body);
    if has_room.is_err() || !jobs.iter().all(can_hold) {
        return refuse(c, s, reply, jobs.iter().copied());
    }
    for &(job, id) in jobs {
        let full_len = s.queue.jobs[job].body.full_len();
        wanted.bytes += u64::from(full_len);
        wanted.size = wanted.size.with(full_len as usize);
        wanted.bodies.push(WantedBody { job, id, full_len, read: None });
    }
    if wanted.bytes > LARGE_REPLY {
        wanted.class = ReplyClass::Large;
    }
    if reply.is_reserved() {
        jobs.iter().for_each(|&(job, _)| s.queue.stop_ttr(&mut c.client, job));
    }
    s.waiting_bytes += wanted.own_bytes();
    s.reads.waiting[wanted.class as usize].push_back(c.client.key);
    s.reads.has_new = true;
    c.then(Doing::Wait(WaitFor::Bodies(Box::new(wanted))))
}

/// Refuses a reply because there is no memory for the bodies. Jobs that were reserved for it are ready
/// again.
fn refuse(
    c: &mut Conn,
    s: &mut Store,
    reply: BodiesFor,
    jobs: impl Iterator<Item = (JobKey, u64)>,
) -> Answer {
    if reply.is_reserved() {
        jobs.for_each(|(job, id)| s.queue.give_back(&mut c.client, job, id));
    }
    Err(Word::OUT_OF_MEMORY)
}

impl Reads {
    /// Ensures that this number of connections can wait without further memory.
    pub fn try_reserve(&mut self, connections: usize) -> Result<(), NoMemory> {
        let mut lists = self.lists();
        lists.try_for_each(|list| list.try_reserve(connections.saturating_sub(list.len())))
    }

    fn lists(&mut self) -> impl Iterator<Item = &mut VecDeque<ConnKey>> {
        self.waiting.iter_mut().chain(&mut self.turns).chain([&mut self.reading])
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

    /// Notes that it is the turn of a body of this length, for a reply of this class.
    pub fn count_turn(&mut self, class: ReplyClass, len: u32) {
        self.large_lead = match class {
            ReplyClass::Small => self.large_lead.saturating_sub(len.max(LEAST_READ)),
            ReplyClass::Large => len,
        };
    }
}

/// Forgets a connection that waits for these bodies.
pub fn forget(s: &mut Store, key: ConnKey, wanted: &WantedBodies) {
    s.waiting_bytes -= wanted.own_bytes();
    s.reads.lists().for_each(|list| list.retain(|&other| other != key));
}

impl WantedBodies {
    /// Returns the memory of the list itself, in bytes.
    pub fn own_bytes(&self) -> usize {
        self.bodies.capacity() * size_of::<WantedBody>()
    }

    /// Returns the index of the first body from `index` on that must be read.
    fn next_cold(&self, s: &Store, index: usize) -> Option<usize> {
        let is_cold = |one: &WantedBody| one.read.is_none() && s.queue.is_cold(one.job, one.id);
        Some(index + self.bodies[index..].iter().position(is_cold)?)
    }

    /// Returns the memory that it was granted.
    pub fn grant(&mut self) -> &mut Grant {
        self.grant.as_mut().expect("it was granted before")
    }

    /// Returns the id of the job whose body is read next, or by the disk.
    pub fn next_id(&self) -> u64 {
        self.bodies[self.next].id
    }

    /// Checks that a connection that waits for bodies is where it will go on, once.
    pub fn check(&self, key: ConnKey, s: &Store) {
        let count = |list: &VecDeque<ConnKey>| list.iter().filter(|it| **it == key).count();
        let waiting = count(&s.reads.waiting[self.class as usize]);
        let turns = count(&s.reads.turns[self.class as usize]);
        let reading = count(&s.reads.reading);
        let is_right = waiting + turns + reading == 1
            && (waiting == 1) == self.grant.is_none()
            && (reading == 0 || s.queue.is_begun(self.next_id()));
        assert!(is_right, "{waiting} {turns} {reading} of {self:?}");
    }

    /// Returns whether the reply is refused when the system has no memory for it.
    pub fn is_impatient(&self, s: &Store) -> bool {
        s.queue.now.since(self.asked_at) >= PATIENCE
    }

    /// Returns whether the replies of other clients leave memory for this one.
    pub fn fits(&self, s: &Store) -> bool {
        let memory = &s.queue.body_cache.read_bodies;
        if matches!(&self.bodies[..], [one] if memory.find(one.id).is_some()) {
            return true;
        }
        if self.is_crowded_out(s) || self.needs_cache(s) {
            return false;
        }
        let granted = memory.granted(self.class);
        let jobs = s.queue.job_bytes().saturating_sub(memory.all_granted());
        let left = s.queue.settings.max_memory_bytes.saturating_sub(jobs) / MEMORY_DIVISOR;
        let most = left.min(MOST_MEMORY);
        let share = most / 4 * if self.class == ReplyClass::Small { 1 } else { 3 };
        // One that is too large for it waits until two thirds of it are free.
        granted == 0 || granted + self.bytes.min(share / 3 * 2) <= share
    }

    /// Returns whether the bodies would exceed what `--max-memory` allows with those of jobs that are in memory. These
    /// can be read back, so they make room.
    pub fn needs_cache(&self, s: &Store) -> bool {
        let limit = s.queue.settings.max_memory_bytes;
        let most = limit.saturating_add(limit / MEMORY_DIVISOR);
        s.queue.body_cache.warm_bytes > 0 && s.queue.job_bytes().saturating_add(self.bytes) > most
    }

    /// Returns whether unread replies, and those whose bodies are being read, leave no memory for the text of this one.
    /// As in memory, there is always some for a single job.
    pub fn is_crowded_out(&self, s: &Store) -> bool {
        let most_of_one = ReplySize::HEADING.with(LARGE - 1).text_len;
        self.size.text_len > most_of_one && s.is_text_crowded_by(self.size.text_len)
    }
}

// ---- Continuing ----

/// Returns the client of a connection, and what that waits for, which must be bodies.
pub fn wanted_of(c: &mut Conn) -> (&mut Client, &mut WantedBodies) {
    let Conn { client, doing, .. } = c;
    let Doing::Wait(WaitFor::Bodies(wanted)) = doing else {
        unreachable!("connection {} does not wait for bodies", client.key.id())
    };
    (client, wanted)
}

/// Takes what needs no waiting for the disk, and replies if that is all.
pub fn start_reply(c: &mut Conn, s: &mut Store) {
    let (_, wanted) = wanted_of(c);
    let WantedBodies { bytes, size, class, .. } = *wanted;
    wanted.grant = Some(s.queue.body_cache.read_bodies.grant(bytes, size.text_len, class));
    let rest = s.queue.work.give(s.queue.limits.cached_bodies_work);
    let (mut index, mut fetched) = (0, Ok(None));
    // Further bodies take turns with the replies of others.
    while fetched.is_ok()
        && s.queue.work.is_left()
        && let Some(cold) = wanted_of(c).1.next_cold(s, index)
    {
        fetched = fetch(c, s, cold);
        index = cold + usize::from(matches!(fetched, Ok(Some(_))));
    }
    s.queue.work.end(rest);
    go_on(c, s, fetched.is_ok());
}

/// Returns whether the next connection may have its turn.
pub fn may_take_turn(s: &Store) -> bool {
    s.reads.reading.len() < MOST_READERS && s.queue.may_begin_read()
}

/// Begins the next read of the connection whose turn it is, or joins one that was begun.
pub fn take_turn(c: &mut Conn, s: &mut Store) {
    let (_, wanted) = wanted_of(c);
    let next = wanted.next;
    s.reads.count_turn(wanted.class, wanted.bodies[next].full_len);
    match fetch(c, s, next) {
        Ok(Some(read)) => {
            s.queue.begin_read(read);
            s.reads.reading.push_back(c.client.key);
        }
        // Another connection may have read it, and the system may have read ahead.
        fetched => go_on(c, s, fetched.is_ok()),
    }
}

/// Gives a body to a reply, or returns the record if that needs waiting for the disk. After an error it can be read
/// later.
fn fetch(c: &mut Conn, s: &mut Store, index: usize) -> io::Result<Option<RecordRead>> {
    s.queue.work.spend(WORK_PER_BODY);
    let (_, wanted) = wanted_of(c);
    let one = &mut wanted.bodies[index];
    if !s.queue.is_cold(one.job, one.id) {
        return Ok(None);
    }
    one.read = s.queue.body_cache.read_bodies.find(one.id);
    if one.read.is_some() {
        return Ok(None);
    }
    let read = s.queue.record_of(one.job);
    let Some(record) = s.queue.read_now(read).transpose() else { return Ok(Some(read)) };
    s.queue.work.spend(read.len as usize / READ_BYTES_PER_WORK);
    let body = s.queue.read_body(read, record, wanted.grant())?;
    take_body(c, s, index, body);
    Ok(None)
}

/// Gives a reply the body that was read for it. Without one, it leaves out the job, which is buried.
pub fn take_body(c: &mut Conn, s: &mut Store, index: usize, body: Option<Rc<ReadBody>>) {
    let (client, wanted) = wanted_of(c);
    if body.is_some() {
        wanted.bodies[index].read = body;
    } else {
        let WantedBody { job, id, .. } = wanted.bodies.remove(index);
        s.queue.bury_unreadable(client, job, id);
    }
}

/// Lets a connection wait for its next turn, or replies. If it `has_memory` for no more, it is tried again later.
pub fn go_on(c: &mut Conn, s: &mut Store, has_memory: bool) {
    if !has_memory {
        return retry_later(c, s);
    }
    let (client, wanted) = wanted_of(c);
    // One before it may have become cold meanwhile.
    match wanted.next_cold(s, wanted.next).or_else(|| wanted.next_cold(s, 0)) {
        Some(next) => {
            wanted.next = next;
            s.reads.turns[wanted.class as usize].push_back(client.key);
        }
        None => finish_reply(c, s),
    }
}

/// Lets a reply wait behind all others of its class, because there was no memory for a read. The next one is tried in
/// 0.1 s.
fn retry_later(c: &mut Conn, s: &mut Store) {
    let (client, wanted) = wanted_of(c);
    s.reads.retry_at[wanted.class as usize] = s.queue.now + RETRY_PAUSE;
    if wanted.is_impatient(s) {
        return give_up(c, s);
    }
    // The others need its memory.
    wanted.grant = None;
    wanted.bodies.iter_mut().for_each(|one| one.read = None);
    wanted.next = 0;
    s.reads.waiting[wanted.class as usize].push_back(client.key);
}

fn take_wanted(c: &mut Conn) -> Box<WantedBodies> {
    let Doing::Wait(WaitFor::Bodies(wanted)) = std::mem::take(&mut c.doing) else {
        unreachable!("connection {} does not wait for bodies", c.id())
    };
    wanted
}

/// Refuses a reply that has waited for too long, or whose client is gone.
pub fn give_up(c: &mut Conn, s: &mut Store) {
    let wanted = take_wanted(c);
    forget(s, c.client.key, &wanted);
    let jobs = wanted.bodies.iter().map(|one| (one.job, one.id));
    let answer = refuse(c, s, wanted.reply, jobs);
    c.answer_later(s, answer);
}

/// Replies with the bodies that could be read. A job that the client has reserved may have come back
/// meanwhile, or was deleted.
fn finish_reply(c: &mut Conn, s: &mut Store) {
    let (client, wanted) = wanted_of(c);
    let (reply, size, asked_at) = (wanted.reply, wanted.size, wanted.asked_at);
    let has_waited = asked_at < s.queue.now;
    if has_waited {
        s.queue.body_cache.stats.wait_times.count(s.queue.now.since(asked_at));
    }
    wanted.bodies.retain(|one| {
        if reply.is_reserved() {
            s.queue.is_held(client, one.job, one.id)
        } else {
            one.read.is_some() || s.queue.find(one.id) == Some(one.job)
        }
    });
    if c.output.try_reserve(size, &mut s.pool).is_err() {
        return give_up(c, s);
    }
    let wanted = take_wanted(c);
    s.waiting_bytes -= wanted.own_bytes();
    let last = wanted.bodies.last().map(|one| one.job);
    let answer =
        write(c, s, reply, wanted.bodies.into_iter().map(|one| (one.job, one.id, one.read)));
    c.answer_later(s, answer);
    if has_waited
        && reply.is_reserved()
        && let Some(job) = last.and_then(|job| s.queue.jobs.get(job))
    {
        let tube = job.tube;
        s.queue.read_ahead(tube);
    }
}
