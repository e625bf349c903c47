//! Continues the replies that wait for memory or for the disk, in the order that
//! [`reads`](crate::engine::reads) describes.
//!
//! When the system has too little memory or too many open files for a read, those of its class wait for
//! 0.1 s, and replies that wait for longer than 10 s are refused.

use super::Server;
use crate::engine::binlog::reads::RecordRead;
use crate::engine::conn::{Conn, Doing, ReserveKind, Steps};
use crate::engine::keys::ConnKey;
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::queue::body_cache::Fetched;
use crate::engine::queue::read_body::{Grant, ReadBody, ReplyClass};
use crate::engine::queue::waiters::Wait;
use crate::engine::reads::{
    Begun, BodiesFor, BodySource, WORK_PER_BODY, WantedBodies, WantedBody, refuse,
};
use crate::engine::store::Store;
use crate::engine::time::Nanos;
use log::debug;
use std::io;
use std::rc::Rc;

/// Units of work to take a record that the disk has read.
const WORK_PER_READ: usize = 8;
/// A longer body takes no more turns than one of this length.
const MOST_TURN_BYTES: usize = 1024 * 1024;
/// The time until reads are tried again after one had too little memory.
const RETRY_PAUSE: Nanos = Nanos::from_millis(100);
/// A reply that has waited for this time is refused when the system has no memory for it. A client that has
/// taken nothing for this time is disconnected when its memory is wanted.
const PATIENCE: Nanos = Nanos::from_secs(10);

impl<S> Server<S> {
    /// Returns when a reply can be started or tried again, or what was read can be freed.
    pub(super) fn reads_due(&self) -> Nanos {
        let Store { reads, queue, settings, .. } = &self.store;
        if settings.body_cache_bytes.is_none() {
            return Nanos::NEVER;
        }
        let is_due = queue.body_cache.read_bodies.has_freed()
            || ReplyClass::ALL.into_iter().any(|class| self.next_to_start(class).is_some());
        if is_due { Nanos::ZERO } else { reads.next_due() }
    }

    /// Begins further reads, if the time has come, and frees what was sent.
    pub(super) fn tick_reads(&mut self) {
        let s = &mut self.store;
        while let Some(record) = s.queue.body_cache.read_bodies.take_freed() {
            s.queue.bodies.free_in_steps(record);
        }
        let now = s.moment();
        for retry_at in &mut s.reads.retry_at {
            retry_at.take_if(|at| *at <= now);
        }
        self.finish_reads();
        self.start_replies();
        // Replies that were refused have given jobs to workers.
        self.deliver_and_charge();
        self.close_stalled();
    }

    /// Closes connections that have taken nothing of a reply for 10 s while others wait for its memory:
    /// otherwise clients that never read could keep all workers from their jobs.
    fn close_stalled(&mut self) {
        let now = self.store.moment();
        let reads = &mut self.store.reads;
        let is_short = |class: ReplyClass| {
            !reads.waiting[class as usize].is_empty()
                && reads.retry_at[class as usize].is_none()
                && (class == ReplyClass::Small || reads.large.is_none())
        };
        if !ReplyClass::ALL.into_iter().any(is_short) {
            reads.stalled_at = None;
        } else if reads.stalled_at.is_none_or(|at| at <= now) {
            let is_first = reads.stalled_at.replace(now + PATIENCE).is_none();
            let fronts =
                ReplyClass::ALL.map(|class| reads.waiting[class as usize].front().copied());
            let takes_text = fronts
                .into_iter()
                .flatten()
                .any(|key| self.wanted(key).is_crowded_out(&self.store));
            for index in 0..self.links.capacity() {
                self.with(ConnKey::from_index(index), |c, s| {
                    if c.is_stalled(takes_text) && !is_first {
                        debug!("connection {index}: its reply is unread, and its memory wanted");
                        c.fail(s);
                    }
                });
            }
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
                may_start = self.store.budget.is_left();
            }
        }
        self.begin_reads();
    }

    /// Refuses those that have waited for too long while the system has no memory.
    fn refuse_impatient(&mut self, class: ReplyClass) {
        while self.store.reads.retry_at[class as usize].is_some()
            && let Some(&key) = self.store.reads.waiting[class as usize].front()
        {
            let now = self.store.moment();
            if now.since(self.wanted(key).asked_at) < PATIENCE {
                return;
            }
            self.store.reads.waiting[class as usize].pop_front();
            self.with(key, |c, s| {
                let wanted = take_wanted(c);
                give_up(c, s, &wanted);
            });
        }
    }

    fn wanted(&self, key: ConnKey) -> &WantedBodies {
        match self.conn_ref(key).map(|c| &c.doing) {
            Some(Doing::Bodies(wanted)) => wanted,
            _ => unreachable!("connection {} does not wait for bodies", key.id()),
        }
    }

    /// Returns the next connection of this class if there is memory for its reply.
    fn next_to_start(&self, class: ReplyClass) -> Option<ConnKey> {
        let key = *self.store.reads.waiting[class as usize].front()?;
        let is_retried = self.store.reads.retry_at[class as usize].is_none();
        (is_retried && self.wanted(key).fits(&self.store)).then_some(key)
    }

    // ---- Turns ----

    /// Begins reads while the disk has few.
    fn begin_reads(&mut self) {
        let mut skipped = 0;
        while self.store.reads.begun.len() < self.store.queue.limits.reads_with_disk
            && skipped < self.store.reads.turns.len()
            && let Some(key) = self.store.reads.turns.pop_front()
        {
            let turn = self.with(key, take_turn).expect("it is removed when it is closed");
            match turn {
                Turn::Taken => skipped = 0,
                Turn::Skipped => {
                    skipped += 1;
                    self.store.budget.charge(1);
                }
                Turn::DiskIsBusy => return,
            }
        }
    }

    // ---- Ends of reads ----

    /// Passes what the disk has read to the replies that wait for it.
    fn finish_reads(&mut self) {
        while let Some(record) = self.store.queue.finished_read() {
            let begun = self.store.reads.begun.pop_front().expect("it was begun for clients");
            self.store.budget.charge(WORK_PER_READ);
            if let Some(&(first, _)) = begun.readers.first() {
                self.finish_read(begun, first, record);
            } else if let Ok(record) = record {
                self.store.queue.bodies.free_in_steps(record);
            }
        }
    }

    fn finish_read(
        &mut self,
        Begun { job, read, readers }: Begun,
        first: ConnKey,
        record: io::Result<Vec<u8>>,
    ) {
        // Compaction may have moved the record meanwhile, and its old file may be gone.
        let fetched = if record.is_err() && self.store.queue.has_moved(job, read) {
            Fetched::OnDisk(read)
        } else {
            let fetched = self.with(first, |c, s| {
                let Doing::Bodies(wanted) = &mut c.doing else { return None };
                let grant = wanted.grant.as_mut().expect("it was granted before its turn");
                Some(s.queue.read_body(read, record, grant))
            });
            fetched.flatten().expect("it is removed when it is closed")
        };
        for (key, index) in readers {
            self.with(key, |c, s| take_fetched(c, s, index, job, read, &fetched));
        }
        if let Fetched::Read(body) = fetched {
            self.share(read.id, &body);
        }
    }

    /// Replies to the connections that wait for memory, and want nothing but this body.
    fn share(&mut self, id: u64, body: &Rc<ReadBody>) {
        for class in ReplyClass::ALL {
            for _ in 0..self.store.reads.waiting[class as usize].len() {
                let Some(key) = self.store.reads.waiting[class as usize].pop_front() else { break };
                if !matches!(&self.wanted(key).bodies[..], [one] if one.id == id) {
                    self.store.reads.waiting[class as usize].push_back(key);
                    continue;
                }
                self.with(key, |c, s| {
                    if let Doing::Bodies(wanted) = &mut c.doing {
                        wanted.bodies[0].source = BodySource::Read(Rc::clone(body));
                    }
                    start_reply(c, s);
                });
            }
        }
    }
}

/// What became of the turn of a connection.
enum Turn {
    Taken,
    /// There is no memory for its read now.
    Skipped,
    /// The disk has enough to do.
    DiskIsBusy,
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
    s.budget.charge(WORK_PER_BODY * wanted.bodies.len());
    let mut grant = s.queue.body_cache.read_bodies.grant(wanted.cold_bytes, wanted.class);
    for one in &mut wanted.bodies {
        if matches!(one.source, BodySource::Disk) {
            fetch(c, s, one, &mut grant);
        }
    }
    wanted.grant = Some(grant);
    wanted.turn_bytes = s.queue.limits.read_turn_bytes;
    go_on(c, s, wanted);
}

/// Sets where a reply gets a body from. Returns the read if the disk must be asked for it.
fn fetch(
    c: &mut Conn,
    s: &mut Store,
    one: &mut WantedBody,
    grant: &mut Grant,
) -> Option<RecordRead> {
    one.source = match s.queue.fetch(one.job, one.id, grant) {
        Fetched::InJob => BodySource::Job,
        Fetched::Read(body) => BodySource::Read(body),
        Fetched::Unreadable => {
            s.queue.bury_unreadable(&mut c.client, one.job, one.id, s.moment());
            BodySource::Nowhere
        }
        Fetched::NotNow => {
            retry_later(s, grant.class());
            BodySource::Disk
        }
        Fetched::OnDisk(read) => return Some(read),
    };
    None
}

/// Begins no read of this class for 0.1 s, because there was no memory for one.
fn retry_later(s: &mut Store, class: ReplyClass) {
    s.reads.retry_at[class as usize] = Some(s.moment() + RETRY_PAUSE);
}

/// Lets a connection wait for its next turn or for the disk, or replies.
fn go_on(c: &mut Conn, s: &mut Store, mut wanted: Box<WantedBodies>) {
    let is_on_disk = |one: &WantedBody| matches!(one.source, BodySource::Disk);
    if !wanted.has_turn {
        let rest = &wanted.bodies[wanted.next..];
        wanted.next += rest.iter().position(is_on_disk).unwrap_or(rest.len());
        if wanted.next == wanted.bodies.len() && wanted.reading == 0 {
            want_evicted(s, &mut wanted);
        }
    }
    if wanted.next < wanted.bodies.len() && !wanted.has_turn {
        wanted.has_turn = true;
        s.reads.turns.push_back(c.key);
    }
    if !wanted.has_turn && wanted.reading == 0 {
        s.reads.large.take_if(|large| *large == c.key);
        return finish_reply(c, s, *wanted);
    }
    if wanted.class == ReplyClass::Large {
        s.reads.large = Some(c.key);
    }
    wanted.has_waited = true;
    c.doing = Doing::Bodies(wanted);
}

/// Reads bodies that have become cold while others were read.
fn want_evicted(s: &Store, wanted: &mut WantedBodies) {
    for (index, one) in wanted.bodies.iter_mut().enumerate().rev() {
        if matches!(one.source, BodySource::Job) && s.queue.is_cold(one.job, one.id) {
            one.source = BodySource::Disk;
            wanted.next = index;
            let grant = wanted.grant.as_mut().expect("it was granted before its turn");
            grant.extend(s.queue.jobs[one.job].body.full_len());
        }
    }
}

/// Begins the next read of the connection whose turn it is.
fn take_turn(c: &mut Conn, s: &mut Store) -> Turn {
    let mut wanted = take_wanted(c);
    if s.reads.retry_at[wanted.class as usize].is_some() {
        if s.moment().since(wanted.asked_at) >= PATIENCE {
            give_up(c, s, &wanted);
            return Turn::Taken;
        }
        s.reads.turns.push_back(c.key);
        c.doing = Doing::Bodies(wanted);
        return Turn::Skipped;
    }
    if !begin_one(c, s, &mut wanted) {
        s.reads.turns.push_front(c.key);
        c.doing = Doing::Bodies(wanted);
        return Turn::DiskIsBusy;
    }
    wanted.has_turn = false;
    go_on(c, s, wanted);
    Turn::Taken
}

/// Refuses a reply that has waited for too long.
fn give_up(c: &mut Conn, s: &mut Store, wanted: &WantedBodies) {
    s.reads.remove(c.key);
    let jobs = wanted.bodies.iter().map(|one| (one.job, one.id));
    let answer = refuse(c, s, wanted.reply, jobs);
    c.answer_later(s, answer);
}

/// Begins the next read for a connection, unless it has used up its turn. Returns `false` if the disk has
/// enough to do, or there is no memory to wait for it.
fn begin_one(c: &mut Conn, s: &mut Store, wanted: &mut WantedBodies) -> bool {
    let index = wanted.next;
    let WantedBody { job, id, .. } = wanted.bodies[index];
    if let Some(begun) = s.reads.begun.iter_mut().find(|begun| begun.read.id == id) {
        let has_joined = wanted.join(c.key, &mut begun.readers);
        if !has_joined {
            retry_later(s, wanted.class);
        }
        return has_joined;
    }
    let grant = wanted.grant.as_mut().expect("it was granted before its turn");
    // Another connection may have read it, and the system may have read ahead.
    let Some(read) = fetch(c, s, &mut wanted.bodies[index], grant) else { return true };
    let len = read.place.len as usize;
    let cost = len.min(MOST_TURN_BYTES);
    if cost > wanted.turn_bytes {
        wanted.turn_bytes += s.queue.limits.read_turn_bytes;
        return true;
    }
    let with_disk = s.reads.begun_bytes();
    if with_disk > 0 && with_disk + len > s.queue.limits.bytes_with_disk {
        return false;
    }
    let mut readers = Vec::new();
    if !wanted.join(c.key, &mut readers) {
        retry_later(s, wanted.class);
        return false;
    }
    wanted.turn_bytes -= cost;
    s.queue.begin_read(read);
    s.reads.begun.push_back(Begun { job, read, readers });
    true
}

/// Takes what a read for a connection has brought.
fn take_fetched(
    c: &mut Conn,
    s: &mut Store,
    index: usize,
    job: crate::engine::keys::JobKey,
    read: RecordRead,
    fetched: &Fetched,
) {
    let mut wanted = take_wanted(c);
    wanted.reading -= 1;
    let source = &mut wanted.bodies[index].source;
    match fetched {
        Fetched::Read(body) => *source = BodySource::Read(Rc::clone(body)),
        Fetched::Unreadable | Fetched::InJob => {
            s.queue.bury_unreadable(&mut c.client, job, read.id, s.moment());
            *source = BodySource::Nowhere;
        }
        Fetched::NotNow => {
            retry_later(s, wanted.class);
            wanted.next = wanted.next.min(index);
        }
        Fetched::OnDisk(_) => wanted.next = wanted.next.min(index),
    }
    go_on(c, s, wanted);
}

/// Replies with the bodies that could be read. A job that the client has reserved may have come back
/// meanwhile, or was deleted. The TTR of the others begins now.
fn finish_reply(c: &mut Conn, s: &mut Store, mut wanted: WantedBodies) {
    let now = s.moment();
    let reply = wanted.reply;
    let has_waited = wanted.has_waited || wanted.asked_at < now;
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
            s.queue.touch(&mut c.client, one.job, now);
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
