//! Commands that change jobs that exist, and tubes.

use crate::engine::binlog::record::{FlushKind, JobState};
use crate::engine::conn::{Conn, Doing, Steps, WaitFor};
use crate::engine::headroom::{self, Headroom};
use crate::engine::protocol::parse::Args;
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::queue::touch::{TouchAll, WORK_PER_TOUCH};
use crate::engine::queue::{Kick, WORK_PER_MOVE};
use crate::engine::store::{Store, WORK_PER_BATCHED_JOB};
use std::collections::VecDeque;

/// The progress of a `delete-batch`.
#[derive(Debug)]
pub struct DeleteBatch {
    /// The ids that are left.
    pub ids: VecDeque<u64>,
    deleted: u64,
    not_found: u64,
}

// ---- Jobs ----

/// `delete <id>`
pub fn delete(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    delete_one(c, s, args.id())?;
    Ok(Reply::Word(Word::DELETED))
}

/// `delete-batch <id> ...`
pub fn delete_batch(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let mut ids = VecDeque::new();
    headroom::keeping(Headroom::Quarter, || ids.try_reserve_exact(args.rest.count()))?;
    ids.extend(args.rest);
    let units = WORK_PER_BATCHED_JOB * ids.len().min(s.queue.limits.jobs_per_batch_step);
    let batch = Box::new(DeleteBatch { ids, deleted: 0, not_found: 0 });
    c.begin_steps(s, units, Steps::DeleteBatch(batch))
}

/// Deletes the next jobs.
pub fn delete_batch_step(c: &mut Conn, s: &mut Store, mut batch: Box<DeleteBatch>) -> Answer {
    let mut is_refused = false;
    // The delete of a job with a group may offer many others.
    let rest = s.queue.work.give(s.queue.limits.jobs_per_batch_step * WORK_PER_BATCHED_JOB);
    while s.queue.work.is_left()
        && !is_refused
        && let Some(id) = batch.ids.pop_front()
    {
        match delete_one(c, s, id) {
            Ok(()) => batch.deleted += 1,
            Err(word) => {
                is_refused = word == Word::OUT_OF_MEMORY && batch.deleted + batch.not_found == 0;
                batch.not_found += 1;
            }
        }
        s.queue.work.spend(WORK_PER_BATCHED_JOB);
    }
    s.queue.work.end(rest);
    if is_refused {
        return Err(Word::OUT_OF_MEMORY);
    }
    if batch.ids.is_empty() {
        return Ok(Reply::Numbers("DELETED_BATCH ", batch.deleted, batch.not_found));
    }
    c.later(Steps::DeleteBatch(batch))
}

#[inline]
fn delete_one(c: &mut Conn, s: &mut Store, id: u64) -> Result<(), Word> {
    let job = s.queue.find_own(&c.client, id).ok_or(Word::NOT_FOUND)?;
    Ok(s.queue.delete(&mut c.client, job)?)
}

/// `release <id> <pri> <delay>`
pub fn release(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let job = s.queue.find_held(&c.client, args.id()).ok_or(Word::NOT_FOUND)?;
    s.queue.release(&mut c.client, job, args.number(1), args.number(2))?;
    Ok(Reply::Word(Word::RELEASED))
}

/// `bury <id> <pri>`
pub fn bury(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let job = s.queue.find_held(&c.client, args.id()).ok_or(Word::NOT_FOUND)?;
    s.queue.bury(&mut c.client, job, args.number(1))?;
    Ok(Reply::Word(Word::BURIED))
}

/// `touch <id>`
pub fn touch(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let job = s.queue.find_held(&c.client, args.id()).ok_or(Word::NOT_FOUND)?;
    // With a reply that is held back it begins later.
    if s.queue.due(&s.queue.jobs[job]).is_some() {
        s.queue.touch(&mut c.client, job);
    }
    Ok(Reply::Word(Word::TOUCHED))
}

/// `touch-all`
pub fn touch_all(c: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    let touch = TouchAll::new(s.queue.now);
    let units = c.client.held.len().min(s.queue.limits.jobs_per_touch_step) * WORK_PER_TOUCH;
    c.begin_steps(s, units, Steps::TouchAll(touch))
}

/// Renews the deadlines of the next jobs.
pub fn touch_all_step(c: &mut Conn, s: &mut Store, mut touch: TouchAll) -> Answer {
    if s.queue.touch_all_step(&mut c.client, &mut touch) {
        return Ok(Reply::Number("TOUCHED_ALL ", touch.touched as u64));
    }
    c.later(Steps::TouchAll(touch))
}

/// `kick <bound>`
pub fn kick(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let kick = s.queue.plan_kick(c.client.used, args.number(0));
    let units = (kick.left as usize).min(s.queue.limits.jobs_per_kick_step) * WORK_PER_MOVE;
    c.begin_steps(s, units, Steps::Kick(kick))
}

/// Kicks the next jobs.
pub fn kick_step(c: &mut Conn, s: &mut Store, mut kick: Kick) -> Answer {
    s.queue.kick(c.client.used, &mut kick)?;
    if kick.left == 0 {
        return Ok(Reply::Number("KICKED ", kick.kicked.into()));
    }
    c.later(Steps::Kick(kick))
}

/// `kick-job <id>`
pub fn kick_job(_: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let job = s.queue.find(args.id()).ok_or(Word::NOT_FOUND)?;
    match s.queue.jobs[job].state.shown() {
        JobState::Delayed | JobState::Buried => {}
        JobState::Ready | JobState::Reserved | JobState::Deleted => return Err(Word::NOT_FOUND),
    }
    s.queue.kick_one(job)?;
    Ok(Reply::Word(Word::KICKED_JOB))
}

// ---- Tubes ----

/// Returns the part of the headroom that must remain when the client uses or watches this tube, or an error if
/// it does not.
fn headroom_for(c: &Conn, s: &Store, tube: &str) -> Result<Headroom, Word> {
    let is_new = s.queue.tubes.find(tube).is_none();
    let least = if is_new { Headroom::ThreeQuarters } else { c.client.headroom_for_watches() };
    if s.has_headroom(least) { Ok(least) } else { Err(Word::OUT_OF_MEMORY) }
}

/// `use <tube>`
pub fn use_tube(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let least = headroom_for(c, s, args.tube)?;
    headroom::keeping(least, || s.queue.use_tube(&mut c.client, args.tube))?;
    Ok(Reply::Using(c.client.used))
}

/// `watch <tube>`
pub fn watch(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    c.client.watching.prepare_to_compare();
    let least = headroom_for(c, s, args.tube)?;
    headroom::keeping(least, || s.queue.watch(&mut c.client, args.tube))?;
    Ok(watching(c))
}

/// `ignore <tube>`
pub fn ignore(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    if s.queue.ignore(&mut c.client, args.tube) { Ok(watching(c)) } else { Err(Word::NOT_IGNORED) }
}

fn watching(c: &Conn) -> Reply {
    Reply::Number("WATCHING ", c.client.watching.len() as u64)
}

/// `pause-tube <tube> <seconds>`
pub fn pause_tube(_: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let secs = args.number(0);
    if args.tube.is_empty() {
        return Err(Word::BAD_FORMAT);
    }
    if secs > 0 && !s.has_headroom(Headroom::ThreeQuarters) {
        return Err(Word::OUT_OF_MEMORY);
    }
    let tube = s.queue.tubes.find(args.tube).ok_or(Word::NOT_FOUND)?;
    s.queue.pause(tube, secs);
    Ok(Reply::Word(Word::PAUSED))
}

/// `flush-tube <tube>`
pub fn flush_tube(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    flush(c, s, args.tube, FlushKind::All)
}

/// `flush-buried <tube>`
pub fn flush_buried(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    flush(c, s, args.tube, FlushKind::Buried)
}

/// Deletes the jobs at once. The client gets its reply when all of them are freed.
fn flush(c: &mut Conn, s: &mut Store, tube: &str, kind: FlushKind) -> Answer {
    let tube = s.queue.tubes.find(tube).ok_or(Word::NOT_FOUND)?;
    if let Some(count) = s.queue.flush(c.client.key, tube, kind)? {
        return Ok(Reply::Number("FLUSHED ", count));
    }
    c.then(Doing::Wait(WaitFor::Flush))
}
