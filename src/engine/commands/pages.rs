//! `list-jobs` and `peek-batch`: pages of the jobs of a tube. A page for which many jobs must be
//! compared is made in steps. `list-clients`: pages of connections.
//!
//! No handler knows other connections. A page with their facts is left to the server, as a [`Report`].

use crate::engine::conn::{Conn, Doing, Steps, WaitFor};
use crate::engine::keys::JobKey;
use crate::engine::protocol::batch::Batch;
use crate::engine::protocol::parse::Args;
use crate::engine::protocol::reply::{Answer, Word};
use crate::engine::protocol::stats;
use crate::engine::queue::browse::{ScanStep, SelectionScan};
use crate::engine::reads::{self, BodiesFor};
use crate::engine::store::Store;
use crate::engine::text;
use std::rc::Rc;

/// A page with facts of other connections, which the server writes.
#[derive(Debug)]
pub enum Report {
    /// `list-jobs`: the jobs, and the id after which the next page begins, or 0.
    Jobs(Vec<JobKey>, u64),
    /// A step of `list-clients`.
    Clients(Box<ClientPage>),
}

/// A `list-clients` that is being made.
#[derive(Debug)]
pub struct ClientPage {
    /// The number of clients that may be added.
    pub left: usize,
    /// Only clients with higher ids are added.
    pub after: u64,
    /// The id of the last client that was added.
    pub last: u64,
    /// The name of the tube that they watch; empty for all clients.
    pub tube: Box<str>,
    /// The lines of clients.
    pub lines: String,
}

/// A step of `list-clients` looks at this many connections, and takes less than 0.1 ms.
pub const CONNECTIONS_PER_STEP: usize = 64;
/// Units of work to look at all of them, and to write the line of one.
pub const WORK_PER_LOOK: usize = 32;
pub const WORK_PER_CLIENT: usize = 4;
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

/// `list-clients <count> [<after> [<tube>]]`
pub fn list_clients(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let (left, after) = (args.count(), args.second_id());
    let tube = text::try_boxed(args.tube)?;
    let page = ClientPage { left, after, last: 0, tube, lines: String::new() };
    let units = WORK_PER_LOOK + CONNECTIONS_PER_STEP * WORK_PER_CLIENT;
    c.begin_steps(s, units, Steps::ListClients(Box::new(page)))
}

fn begin(c: &mut Conn, s: &mut Store, args: &Args<'_>, shows_bodies: bool) -> Answer {
    let (count, after) = (args.count(), args.second_id());
    let scan = s.queue.select(args.tube, args.state, count, after, &s.selections)?;
    let scan = Box::new(scan.ok_or(Word::NOT_FOUND)?);
    let units = scan.first_work(&s.queue);
    c.begin_steps(s, units, Steps::Select { scan, shows_bodies })
}

/// Searches the jobs of a page, or continues to.
pub fn select_step(
    c: &mut Conn,
    s: &mut Store,
    mut scan: Box<SelectionScan>,
    shows_bodies: bool,
) -> Answer {
    match scan.step(&mut s.queue)? {
        // The store has a copy too.
        ScanStep::Unfinished if Rc::strong_count(&s.selections) > 1 + MAX_SELECTIONS => {
            Err(Word::OUT_OF_MEMORY)
        }
        ScanStep::Unfinished => c.later(Steps::Select { scan, shows_bodies }),
        ScanStep::Jobs { keys, next } if shows_bodies => reply_bodies(c, s, &keys, next),
        ScanStep::Jobs { keys, .. } if s.is_crowded_by(stats::longest_jobs_len(keys.len())) => {
            Err(Word::OUT_OF_MEMORY)
        }
        ScanStep::Jobs { keys, next } => report(c, Report::Jobs(keys, next)),
        ScanStep::NoTube => Err(Word::NOT_FOUND),
    }
}

/// Replies to a `peek-batch`, with as many jobs as the reply may have.
fn reply_bodies(c: &mut Conn, s: &mut Store, keys: &[JobKey], mut next: u64) -> Answer {
    let mut batch = Batch::new(keys.len());
    for &job in keys {
        if !fits_reply(s, &batch, job) {
            next = batch.jobs.last().map_or(0, |&(_, id)| id);
            break;
        }
        batch.try_push(job, &s.queue.jobs[job])?;
    }
    reads::reply_batch(c, s, batch, BodiesFor::FoundBatch { next })
}

/// Leaves the next step of a page to the server.
pub fn report(c: &mut Conn, report: Report) -> Answer {
    c.then(Doing::Wait(WaitFor::Report(report)))
}

/// Returns whether one more job may be in a reply.
pub fn fits_reply(s: &Store, batch: &Batch, job: JobKey) -> bool {
    let body = &s.queue.jobs[job].body;
    let fits_memory =
        || s.queue.settings.can_hold(body) && !s.is_crowded_by(batch.size_with(body).text_len);
    batch.fits(body) && (batch.is_empty() || fits_memory())
}
