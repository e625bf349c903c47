//! `list-jobs` and `peek-batch`: pages of the jobs of a tube. A page for which many jobs must be
//! compared is made in steps.

pub use crate::engine::protocol::batch::Batch;

use crate::engine::conn::{Conn, Steps};
use crate::engine::keys::JobKey;
use crate::engine::protocol::parse::Args;
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::protocol::stats;
use crate::engine::queue::browse::{ScanStep, Selection, SelectionScan};
use crate::engine::reads::{self, BodiesFor};
use crate::engine::store::Store;
use std::collections::TryReserveError;

/// At most this many pages are made in steps at the same time. Each takes up to 16 KiB.
const MAX_SELECTIONS: usize = 256;

/// `list-jobs <tube> <state> <count> [<after>]`
pub fn list_jobs(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    begin(c, s, args, false)
}

/// `peek-batch <tube> <state> <count> [<after>]`
pub fn peek_batch(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    begin(c, s, args, true)
}

fn begin(c: &mut Conn, s: &mut Store, args: &Args<'_>, shows_bodies: bool) -> Answer {
    let (count, after) = (args.count(), args.second_id());
    let selection = Selection { tube: args.tube, state: args.state, count, after };
    let scan = s.queue.select(selection)?.ok_or(Word::NotFound)?;
    select_step(c, s, Box::new(scan), shows_bodies)
}

/// Continues to search the jobs of a page.
pub fn select_step(
    c: &mut Conn,
    s: &mut Store,
    mut scan: Box<SelectionScan>,
    shows_bodies: bool,
) -> Answer {
    let step = scan.step(&s.queue);
    s.budget.charge_share(scan.take_work());
    match step? {
        ScanStep::Unfinished if s.selections >= MAX_SELECTIONS => Err(Word::OutOfMemory),
        ScanStep::Unfinished => {
            s.selections += 1;
            c.later(Steps::Select { scan, shows_bodies })
        }
        ScanStep::Jobs { keys, next } if shows_bodies => reply_bodies(c, s, &keys, next),
        ScanStep::Jobs { keys, .. } if s.is_crowded_by(stats::longest_jobs_len(keys.len())) => {
            Err(Word::OutOfMemory)
        }
        ScanStep::Jobs { keys, next } => {
            Ok(Reply::Document(stats::jobs(&keys, next, &s.queue, s.now)?))
        }
        ScanStep::NoTube => Err(Word::NotFound),
    }
}

/// Replies to a `peek-batch`, with as many jobs as the reply may have.
fn reply_bodies(c: &mut Conn, s: &mut Store, keys: &[JobKey], mut next: u64) -> Answer {
    let batch = batch_of_bodies(c, s, keys)?;
    if batch.jobs.len() < keys.len() {
        next = batch.jobs.last().map_or(0, |&(_, id)| id);
    }
    let heading = Reply::Numbers("FOUND_BATCH ", batch.jobs.len() as u64, next);
    reads::reply_jobs(c, s, heading, batch.jobs, BodiesFor::FoundBatch { next })
}

/// Returns the first of these jobs, at most as many as one reply may have.
fn batch_of_bodies(c: &mut Conn, s: &mut Store, keys: &[JobKey]) -> Result<Batch, TryReserveError> {
    let mut batch = Batch::new(keys.len());
    for &job in keys {
        if !fits_reply(s, &batch, job) {
            break;
        }
        batch.try_push(job, &s.queue.jobs[job])?;
    }
    c.try_reserve_output(s, batch.size)?;
    Ok(batch)
}

/// Returns whether one more job may be in a reply.
pub fn fits_reply(s: &Store, batch: &Batch, job: JobKey) -> bool {
    let body = &s.queue.jobs[job].body;
    let fits_memory =
        || s.settings.can_hold(body) && !s.is_crowded_by(batch.size_with(body).text_len);
    batch.fits(body) && (batch.is_empty() || fits_memory())
}
