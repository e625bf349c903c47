//! The commands that reserve jobs, from the search for a job to the reply with its body.
//!
//! ```text
//! reserve -> search: a job  -> found -> reply, or WaitFor::Bodies while the disk reads the body
//!              |     nothing -> WaitFor::Job -> awaited (by a put, kick, release, the end of a delay ...)
//!              `---- unfinished -> Steps::Reserve or Steps::FillBatch, the next step
//! ```

use super::pages::fits_reply;
use crate::engine::conn::{Conn, Doing, Steps, WaitFor};
use crate::engine::headroom::NoMemory;
use crate::engine::keys::JobKey;
use crate::engine::protocol::batch::Batch;
use crate::engine::protocol::parse::Args;
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::queue::waiters::{Search, Wait};
use crate::engine::reads::{self, BodiesFor};
use crate::engine::store::{Store, WORK_PER_BATCHED_JOB};
use crate::engine::time::Nanos;

/// A reserve that waits, or whose job or batch is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// The most jobs of a `reserve-batch`, in one reply. `None` for a reserve of one job.
    pub batch: Option<u32>,
    /// Its place among those that wait, which it keeps if its job is gone before its body is read.
    pub wait: Wait,
}

impl Reserve {
    /// Returns the reply if no job comes before the timeout.
    pub fn timeout_reply(self) -> Reply {
        self.batch.map_or(Reply::Word(Word::TIMED_OUT), |_| Reply::Number("RESERVED_BATCH ", 0))
    }
}

/// `reserve`
pub fn reserve(c: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    begin(c, s, None, Nanos::NEVER)
}

/// `reserve-with-timeout <seconds>`
pub fn reserve_with_timeout(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let until = s.queue.now + Nanos::from_secs(args.number(0));
    begin(c, s, None, until)
}

/// `reserve-batch <count> [<seconds>]`
pub fn reserve_batch(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let until = s.queue.now + Nanos::from_secs(args.number(1));
    begin(c, s, Some(args.number(0)), until)
}

/// `reserve-job <id>`
pub fn reserve_job(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    c.client.held.try_reserve_one()?;
    let job = s.queue.find(args.id()).ok_or(Word::NOT_FOUND)?;
    if !s.queue.is_reservable(job) {
        return Err(Word::NOT_FOUND);
    }
    if !s.queue.settings.can_hold(&s.queue.jobs[job].body) {
        return Err(Word::OUT_OF_MEMORY);
    }
    s.queue.reserve_job(&mut c.client, job)?;
    s.queue.mark_worker(&mut c.client);
    reads::reply_job(c, s, job, BodiesFor::ReservedById)
}

fn begin(c: &mut Conn, s: &mut Store, batch: Option<u32>, until: Nanos) -> Answer {
    s.queue.mark_worker(&mut c.client);
    // The job may also come while the connection waits, when it is too late to refuse it.
    c.client.held.try_reserve_one()?;
    let reserve = Reserve { batch, wait: Wait { seq: s.queue.next_wait_seq(), until } };
    let Some(max) = batch else { return reserve_step(c, s, reserve) };
    let units = WORK_PER_BATCHED_JOB * (max as usize).min(s.queue.limits.jobs_per_batch_step);
    c.begin_steps(s, units, Steps::Reserve(reserve))
}

/// Reserves jobs, or begins to wait. With more than 2,048 watched tubes this takes several
/// iterations; tubes that change between them are checked again.
pub fn reserve_step(c: &mut Conn, s: &mut Store, reserve: Reserve) -> Answer {
    let rest = s.queue.give_search();
    let answer = reserve_or_wait(c, s, reserve);
    s.queue.work.end(rest);
    answer
}

fn reserve_or_wait(c: &mut Conn, s: &mut Store, reserve: Reserve) -> Answer {
    match reserve.batch {
        None => match s.queue.best_job(&mut c.client)? {
            Search::Found(job) => {
                s.queue.make_reserved(job, &mut c.client);
                return reads::reply_job(c, s, job, BodiesFor::Reserved(reserve));
            }
            Search::Unfinished => return c.later(Steps::Reserve(reserve)),
            Search::Nothing => {}
        },
        Some(max) => {
            let mut batch = Batch::new(max as usize);
            match (fill_batch(c, s, &mut batch)?, batch.is_empty()) {
                (true, true) => {}
                (true, false) => {
                    return reads::reply_batch(c, s, batch, BodiesFor::Reserved(reserve));
                }
                (false, true) => return c.later(Steps::Reserve(reserve)),
                (false, false) => return c.later(Steps::FillBatch(Box::new(batch), reserve)),
            }
        }
    }
    let rest = s.queue.work.give(s.queue.limits.flushed_tops_work);
    let are_freed = s.queue.free_flushed_tops(&mut c.client);
    s.queue.work.end(rest);
    if !are_freed {
        return c.later(Steps::Reserve(reserve));
    }
    if s.queue.is_deadline_soon(&c.client) {
        return Err(Word::DEADLINE_SOON);
    }
    if reserve.wait.until <= s.queue.now || c.is_half_closed {
        return Ok(reserve.timeout_reply());
    }
    if !s.queue.wait(&c.client, reserve.wait)? {
        return c.later(Steps::Reserve(reserve));
    }
    c.then(Doing::Wait(WaitFor::Job(reserve)))
}

/// Replies to a connection that waited and was given a job.
pub fn awaited(c: &mut Conn, s: &mut Store, job: JobKey, reserve: Reserve) -> Answer {
    let Some(max) = reserve.batch else {
        return reads::reply_job(c, s, job, BodiesFor::Reserved(reserve));
    };
    let mut batch = Batch::new(max as usize);
    if batch.try_push(job, &s.queue.jobs[job]).is_err() {
        c.fail(s);
        return Ok(Reply::Later);
    }
    s.queue.stop_ttr(&mut c.client, job);
    c.later(Steps::FillBatch(Box::new(batch), reserve))
}

// ---- Batches ----

/// Continues a batch that has some jobs.
pub fn fill_batch_step(
    c: &mut Conn,
    s: &mut Store,
    mut batch: Box<Batch>,
    reserve: Reserve,
) -> Answer {
    // Since the previous step a TTR may have run out, and a flush may have deleted a job.
    batch.retain(&s.queue.jobs, |job, id| s.queue.is_held(&c.client, job, id));
    let rest = s.queue.give_search();
    let filled = fill_batch(c, s, &mut batch);
    s.queue.work.end(rest);
    match (filled?, batch.is_empty()) {
        (true, true) => Ok(reserve.timeout_reply()),
        (true, false) => reads::reply_batch(c, s, *batch, BodiesFor::Reserved(reserve)),
        (false, _) => c.later(Steps::FillBatch(batch, reserve)),
    }
}

/// Reserves ready jobs and adds them to a batch, at most those of one step. Returns whether the batch
/// is complete: it is full, or no further job is found, or there is no memory for one. Otherwise the TTRs of these jobs
/// begin with the reply. On an error the batch is empty.
fn fill_batch(c: &mut Conn, s: &mut Store, batch: &mut Batch) -> Result<bool, NoMemory> {
    let before = batch.jobs.len();
    let most = before + s.queue.limits.jobs_per_batch_step;
    let mut is_complete = false;
    // A reserve of a job with a group may offer and park many others.
    let may_go_on = |len, s: &Store| len == before || (len < most && s.queue.work.is_left());
    while !is_complete && may_go_on(batch.jobs.len(), s) {
        match reserve_into_batch(c, s, batch) {
            Ok(Search::Found(_)) => is_complete = batch.is_full(),
            Ok(Search::Unfinished) => break,
            Ok(Search::Nothing) => is_complete = true,
            Err(no_memory) if batch.is_empty() => return Err(no_memory),
            Err(_) => is_complete = true,
        }
    }
    let added = &batch.jobs[before..];
    s.queue.work.spend(added.len() * WORK_PER_BATCHED_JOB);
    if !is_complete {
        // A sync may come before the next step.
        added.iter().for_each(|&(job, _)| s.queue.stop_ttr(&mut c.client, job));
    }
    Ok(is_complete)
}

/// Reserves the best job and adds it to the batch, if there is room in the batch and memory for
/// the reply.
fn reserve_into_batch(c: &mut Conn, s: &mut Store, batch: &mut Batch) -> Result<Search, NoMemory> {
    c.client.held.try_reserve_one()?;
    let search = s.queue.best_job(&mut c.client)?;
    if let Search::Found(job) = search {
        if !fits_reply(s, batch, job) {
            return Ok(Search::Nothing);
        }
        // A reply that waits for bodies takes its room when it has them.
        if !batch.has_cold && !s.queue.jobs[job].body.is_cold() {
            c.output.try_reserve(batch.size_with(&s.queue.jobs[job].body), &mut s.pool)?;
        }
        batch.try_push(job, &s.queue.jobs[job])?;
        s.queue.make_reserved(job, &mut c.client);
    }
    Ok(search)
}
