//! Continues the replies that wait for memory or for the disk, in the order that
//! [`reads`](crate::engine::reads) describes.
//!
//! When the system has too little memory or too many open files for a read, replies wait for 0.1 s, and
//! those that wait for longer than 10 s are refused.

use super::Server;
use crate::engine::binlog::reads::RecordRead;
use crate::engine::conn::{Conn, Doing, ReserveKind, Steps};
use crate::engine::keys::ConnKey;
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::queue::body_cache::{Begun, is_passing};
use crate::engine::queue::read_body::{ReadBody, ReplyClass};
use crate::engine::queue::waiters::Wait;
use crate::engine::reads::{
    BodiesFor, BodySource, WORK_PER_BODY, WantedBodies, WantedBody, forget, refuse,
};
use crate::engine::store::Store;
use crate::engine::time::Nanos;
use log::debug;
use std::io;
use std::rc::Rc;

/// Units of work to take a record that the disk has read.
const WORK_PER_READ: usize = 8;
/// The time until reads are tried again after one had too little memory.
const RETRY_PAUSE: Nanos = Nanos::from_millis(100);
/// A reply that has waited for this time is refused when the system has no memory for it. From then on clients that
/// take nothing are disconnected when their memory is wanted.
const PATIENCE: Nanos = Nanos::from_secs(10);
/// The time between two looks for such clients.
const LOOK_PAUSE: Nanos = Nanos::from_secs(1);

impl<S> Server<S> {
    /// Returns when a reply can be started or tried again, or what was read can be freed.
    pub(super) fn reads_due(&self) -> Nanos {
        let Store { reads, queue, settings, .. } = &self.store;
        if settings.body_cache_bytes.is_none() {
            return Nanos::NEVER;
        }
        let can_go_on = |class| self.next_to_start(class).is_some() || self.needs_cache(class);
        let has_freed = queue.body_cache.read_bodies.has_freed();
        if has_freed || ReplyClass::ALL.into_iter().any(can_go_on) {
            return Nanos::ZERO;
        }
        reads.retry_at.unwrap_or_else(|| self.look_due())
    }

    /// Begins further reads, if the time has come, and frees what was sent.
    pub(super) fn tick_reads(&mut self) {
        let s = &mut self.store;
        while let Some(record) = s.queue.body_cache.read_bodies.take_freed() {
            s.queue.bodies.free_in_steps(record);
        }
        let now = s.queue.now;
        s.reads.retry_at.take_if(|at| *at <= now);
        self.finish_reads();
        self.start_replies();
        // Replies that were refused have given jobs to workers.
        self.deliver();
        self.close_stalled();
    }

    /// Returns the replies that wait for memory first.
    fn fronts(&self) -> impl Iterator<Item = &WantedBodies> {
        ReplyClass::ALL.into_iter().filter_map(|class| Some(self.wanted(self.front(class)?)))
    }

    /// Returns when to look for connections that take nothing; [`Nanos::NEVER`] while no reply waits for memory.
    fn look_due(&self) -> Nanos {
        let asked_at = self.fronts().map(|wanted| wanted.asked_at).min();
        let next = self.store.reads.looked_at + LOOK_PAUSE;
        asked_at.map_or(Nanos::NEVER, |at| (at + PATIENCE.before(LOOK_PAUSE)).max(next))
    }

    /// Closes connections that take nothing of a reply for a second while another one has waited for its memory for
    /// 10 s: otherwise clients that never read could keep all workers from their jobs.
    fn close_stalled(&mut self) {
        if self.look_due() > self.store.queue.now {
            return;
        }
        self.store.reads.looked_at = self.store.queue.now;
        let is_short = self.fronts().any(|wanted| !wanted.fits(&self.store));
        let takes_text = self.fronts().any(|wanted| wanted.is_crowded_out(&self.store));
        for index in 0..self.links.numbers_end() {
            self.with(ConnKey::from_index(index), |c, s| {
                if c.is_stalled(takes_text) && is_short {
                    debug!("connection {index}: its reply is unread, and its memory wanted");
                    c.fail(s);
                }
            });
        }
    }

    // ---- Memory ----

    /// Starts the replies for which there is memory.
    pub(super) fn start_replies(&mut self) {
        for class in ReplyClass::ALL {
            self.refuse_impatient(class);
            // At least one, and no more than an iteration has time for.
            let mut may_start = true;
            while may_start && let Some(key) = self.next_to_start(class) {
                self.store.reads.waiting[class as usize].pop_front();
                self.with(key, start_reply);
                may_start = self.store.queue.work.is_left_outside();
            }
            if self.needs_cache(class) {
                self.store.queue.evict_page();
            }
        }
        self.begin_reads();
    }

    /// Refuses those that have waited for too long while the system has no memory.
    fn refuse_impatient(&mut self, class: ReplyClass) {
        while self.store.reads.retry_at.is_some()
            && let Some(&key) = self.store.reads.waiting[class as usize].front()
            && self.store.queue.now.since(self.wanted(key).asked_at) >= PATIENCE
        {
            self.with(key, give_up_waiting);
        }
    }

    fn wanted(&self, key: ConnKey) -> &WantedBodies {
        match self.conn_ref(key).map(|c| &c.doing) {
            Some(Doing::Bodies(wanted)) => wanted,
            _ => unreachable!("connection {} does not wait for bodies", key.id()),
        }
    }

    /// Returns the connection of this class that waits for memory first, unless all wait for the next try.
    fn front(&self, class: ReplyClass) -> Option<ConnKey> {
        let reads = &self.store.reads;
        reads.waiting[class as usize].front().copied().filter(|_| reads.retry_at.is_none())
    }

    /// Returns the next connection of this class if there is memory for its reply.
    fn next_to_start(&self, class: ReplyClass) -> Option<ConnKey> {
        self.front(class).filter(|&key| self.wanted(key).fits(&self.store))
    }

    /// Returns whether the next reply of this class waits for memory that the cache has.
    fn needs_cache(&self, class: ReplyClass) -> bool {
        self.front(class).is_some_and(|key| self.wanted(key).needs_cache(&self.store))
    }

    // ---- Reads ----

    /// Begins reads while the disk has few.
    fn begin_reads(&mut self) {
        while self.store.queue.may_begin_read(0)
            && let Some(key) = self.store.reads.take_turn()
        {
            let has_begun = self.with(key, take_turn).expect("it is removed when it is closed");
            if !has_begun {
                return;
            }
        }
    }

    /// Passes what the disk has read to the replies that wait for it.
    fn finish_reads(&mut self) {
        while let Some((Begun { read, readers }, record)) = self.store.queue.finished_read() {
            self.store.queue.work.spend(WORK_PER_READ);
            let Some(&first) = readers.first() else {
                record.into_iter().for_each(|it| self.store.queue.bodies.free_in_steps(it));
                continue;
            };
            // Compaction may have moved the record meanwhile, and its old file may be gone.
            let is_gone = record.is_err() && self.store.queue.has_moved(read);
            let body = self.with(first, |c, s| {
                let Doing::Bodies(wanted) = &mut c.doing else { return None };
                let grant = wanted.grant.as_mut().filter(|_| !is_gone)?;
                Some(s.queue.read_body(read, record, grant))
            });
            for key in readers {
                self.with(key, |c, s| {
                    let mut wanted = take_wanted(c);
                    let next = wanted.next().expect("the disk has read for it");
                    let body = body.as_ref().and_then(Option::as_ref);
                    let can_go_on =
                        body.is_none_or(|body| take_body(c, s, &mut wanted.bodies[next], body));
                    if can_go_on { go_on(c, s, wanted) } else { retry_later(c, s, wanted) }
                });
            }
        }
    }
}

/// What a reply needs for its next body.
enum Next {
    /// Nothing: it has the body, or goes without it.
    Nothing,
    Read(RecordRead),
    /// More memory.
    Memory,
}

fn take_wanted(c: &mut Conn) -> Box<WantedBodies> {
    let Doing::Bodies(wanted) = std::mem::take(&mut c.doing) else {
        unreachable!("connection {} does not wait for bodies", c.id())
    };
    wanted
}

/// Takes what needs no waiting for the disk, and replies if that is all.
fn start_reply(c: &mut Conn, s: &mut Store) {
    let mut wanted = take_wanted(c);
    s.queue.work.spend(WORK_PER_BODY * wanted.bodies.len());
    let WantedBodies { cold_bytes, copied_bytes, class, .. } = *wanted;
    let read_bodies = &s.queue.body_cache.read_bodies;
    wanted.grant.get_or_insert_with(|| read_bodies.grant(cold_bytes, copied_bytes, class));
    for index in 0..wanted.bodies.len() {
        if matches!(wanted.bodies[index].source, BodySource::Disk)
            && matches!(fetch(c, s, &mut wanted, index), Next::Memory)
        {
            return retry_later(c, s, wanted);
        }
    }
    go_on(c, s, wanted);
}

/// Sets where a reply gets a body from, if that needs no waiting for the disk.
fn fetch(c: &mut Conn, s: &mut Store, wanted: &mut WantedBodies, index: usize) -> Next {
    let one = &mut wanted.bodies[index];
    if !s.queue.is_cold(one.job, one.id) {
        one.source = BodySource::Job;
        return Next::Nothing;
    }
    if let Some(body) = s.queue.body_cache.read_bodies.find(one.id) {
        one.source = BodySource::Read(body);
        return Next::Nothing;
    }
    let read = s.queue.record_of(one.job);
    let Some(record) = s.queue.read_now(read).transpose() else { return Next::Read(read) };
    let grant = wanted.grant.as_mut().expect("it was granted before");
    let body = s.queue.read_body(read, record, grant);
    if take_body(c, s, one, &body) { Next::Nothing } else { Next::Memory }
}

/// Gives a reply the body that was read for it. A job is buried whose body cannot be read. Returns `false` if it
/// can be read later.
fn take_body(
    c: &mut Conn,
    s: &mut Store,
    one: &mut WantedBody,
    body: &io::Result<Rc<ReadBody>>,
) -> bool {
    one.source = match body {
        Ok(body) => BodySource::Read(Rc::clone(body)),
        Err(error) if is_passing(error) => return false,
        Err(_) => {
            s.queue.bury_unreadable(&mut c.client, one.job, one.id);
            BodySource::Nowhere
        }
    };
    true
}

/// Lets a reply wait for 0.1 s, because there was no memory for a read, and all others with it.
fn retry_later(c: &mut Conn, s: &mut Store, wanted: Box<WantedBodies>) {
    s.reads.retry_at = Some(s.queue.now + RETRY_PAUSE);
    s.reads.waiting[wanted.class as usize].push_front(c.client.key);
    c.doing = Doing::Bodies(wanted);
}

/// Lets a connection wait for its next turn, or replies.
fn go_on(c: &mut Conn, s: &mut Store, mut wanted: Box<WantedBodies>) {
    if wanted.next().is_none() {
        want_evicted(s, &mut wanted);
    }
    if wanted.next().is_none() {
        return finish_reply(c, s, *wanted);
    }
    s.reads.turns[wanted.class as usize].push_back(c.client.key);
    c.doing = Doing::Bodies(wanted);
}

/// Reads bodies that have become cold while others were read.
fn want_evicted(s: &Store, wanted: &mut WantedBodies) {
    for one in &mut wanted.bodies {
        if matches!(one.source, BodySource::Job) && s.queue.is_cold(one.job, one.id) {
            one.source = BodySource::Disk;
            let grant = wanted.grant.as_mut().expect("it was granted before");
            grant.extend(s.queue.jobs[one.job].body.full_len());
        }
    }
}

/// Begins the next read of the connection whose turn it is, or joins one that was begun. Returns `false` if
/// the disk has enough to do.
fn take_turn(c: &mut Conn, s: &mut Store) -> bool {
    let mut wanted = take_wanted(c);
    let next = wanted.next().expect("it has turns until all bodies are read");
    let id = wanted.bodies[next].id;
    let begun = s.queue.body_cache.begun.iter_mut().find(|begun| begun.read.id == id);
    let has_joined = match begun {
        Some(begun) => begun.join(c.client.key).is_ok(),
        // Another connection may have read it, and the system may have read ahead.
        None => match fetch(c, s, &mut wanted, next) {
            Next::Nothing => {
                go_on(c, s, wanted);
                return true;
            }
            Next::Memory => false,
            Next::Read(read) if !s.queue.may_begin_read(read.len) => {
                s.reads.turns[wanted.class as usize].push_front(c.client.key);
                c.doing = Doing::Bodies(wanted);
                return false;
            }
            Next::Read(read) => {
                let mut begun = Begun::new(read);
                let has_joined = begun.join(c.client.key).is_ok();
                if has_joined {
                    s.reads.count_turn(wanted.class, read.len);
                    s.queue.begin_read(begun);
                }
                has_joined
            }
        },
    };
    if has_joined {
        c.doing = Doing::Bodies(wanted);
    } else {
        retry_later(c, s, wanted);
    }
    true
}

/// Refuses a reply that has waited for too long, or whose client is gone.
pub(super) fn give_up_waiting(c: &mut Conn, s: &mut Store) {
    let wanted = take_wanted(c);
    give_up(c, s, &wanted);
}

/// Refuses a reply.
fn give_up(c: &mut Conn, s: &mut Store, wanted: &WantedBodies) {
    forget(s, c.client.key);
    let jobs = wanted.bodies.iter().map(|one| (one.job, one.id));
    let answer = refuse(c, s, wanted.reply, jobs);
    c.answer_later(s, answer);
}

/// Replies with the bodies that could be read. A job that the client has reserved may have come back
/// meanwhile, or was deleted. The TTR of the others begins now.
fn finish_reply(c: &mut Conn, s: &mut Store, mut wanted: WantedBodies) {
    let now = s.queue.now;
    let reply = wanted.reply;
    let has_waited = wanted.asked_at < now;
    if has_waited {
        s.queue.note_wait(now.since(wanted.asked_at));
    }
    for one in &mut wanted.bodies {
        let is_there = s.queue.find(one.id) == Some(one.job);
        let is_lost = match one.source {
            _ if reply.is_reserved() => !s.queue.is_held(&c.client, one.job, one.id),
            BodySource::Job => !is_there,
            BodySource::Disk | BodySource::Read(_) | BodySource::Nowhere => false,
        };
        if is_lost {
            one.source = BodySource::Nowhere;
        }
    }
    wanted.bodies.retain(|one| !matches!(one.source, BodySource::Nowhere));
    let size = wanted.size(s);
    if c.try_reserve_output(s, size).is_err() {
        return give_up(c, s, &wanted);
    }
    if reply.is_reserved() {
        for one in &wanted.bodies {
            s.queue.touch(&mut c.client, one.job);
        }
    }
    let answer = send(c, s, reply, &wanted.bodies);
    c.answer_later(s, answer);
    if has_waited
        && reply.is_reserved()
        && let Some(job) = wanted.bodies.last().and_then(|one| s.queue.jobs.get(one.job))
    {
        let tube = job.tube;
        s.queue.read_ahead(tube);
    }
}

/// Replies with these bodies. A reserve without any goes on.
fn send(c: &mut Conn, s: &mut Store, reply: BodiesFor, bodies: &[WantedBody]) -> Answer {
    let count = bodies.len();
    match reply {
        BodiesFor::Found | BodiesFor::ReservedById if count == 0 => return Err(Word::NotFound),
        BodiesFor::Reserved { kind, until } if count == 0 => {
            let wait = Wait { seq: s.queue.next_wait_seq(), until };
            return c.later(Steps::Reserve(wait, kind));
        }
        BodiesFor::FoundBatch { next } => {
            c.reply(s, &Reply::Numbers("FOUND_BATCH ", count as u64, next));
        }
        BodiesFor::Reserved { kind: ReserveKind::Batch(_), .. } => {
            c.reply(s, &Reply::Number("RESERVED_BATCH ", count as u64));
        }
        BodiesFor::Found | BodiesFor::ReservedById | BodiesFor::Reserved { .. } => {}
    }
    for one in bodies {
        let read = if let BodySource::Read(body) = &one.source { Some(body) } else { None };
        if !c.reply_body(s, reply.word(), (one.job, one.id), read) {
            break;
        }
    }
    Ok(Reply::Later)
}
