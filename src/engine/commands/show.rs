//! Commands that show something and change nothing: peeks, statistics, lists of tubes.
//!
//! A list of more than 1,024 tubes is made in steps. A long list of all tubes is shared by the
//! connections that requested it ([`lists`](crate::engine::lists)).

use crate::engine::conn::{Conn, Doing, Steps, WaitFor};
use crate::engine::keys::{JobKey, WatchKey};
use crate::engine::lists::{ensure_fits, names_per_step};
use crate::engine::protocol::parse::Args;
use crate::engine::protocol::reply::{Answer, Reply, Word};
use crate::engine::protocol::stats;
use crate::engine::queue::listing::ListText;
use crate::engine::queue::tube::Tube;
use crate::engine::reads::{self, BodiesFor};
use crate::engine::store::Store;
use std::rc::Rc;

/// Listing this many tubes is one unit of work.
const NAMES_PER_WORK: usize = 4;
/// Counting this many waiters of a tube is one unit of work.
const WAITERS_PER_WORK: usize = 8;

// ---- Peeks ----

/// `peek <id>`
pub fn peek(c: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let job = s.queue.find(args.id());
    found(c, s, job)
}

/// `peek-ready`
pub fn peek_ready(c: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    let job = s.queue.first_unblocked(c.client.used);
    found(c, s, job)
}

/// `peek-delayed`
pub fn peek_delayed(c: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    let job = used_tube(c, s).first_delayed(&s.queue.jobs);
    found(c, s, job)
}

/// `peek-buried`
pub fn peek_buried(c: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    let job = used_tube(c, s).first_buried();
    found(c, s, job)
}

fn found(c: &mut Conn, s: &mut Store, job: Option<JobKey>) -> Answer {
    reads::reply_job(c, s, job.ok_or(Word::NOT_FOUND)?, BodiesFor::Found)
}

fn used_tube<'s>(c: &Conn, s: &'s Store) -> &'s Tube {
    &s.queue.tubes[c.client.used]
}

// ---- Statistics ----

/// `stats`
pub fn stats(_: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    Ok(Reply::Document(stats::server(s)))
}

/// `stats-job <id>`
pub fn stats_job(_: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let job = s.queue.find(args.id()).ok_or(Word::NOT_FOUND)?;
    Ok(Reply::Document(stats::job(job, &s.queue)))
}

/// `stats-tube <tube>`
pub fn stats_tube(_: &mut Conn, s: &mut Store, args: &Args<'_>) -> Answer {
    let tube = s.queue.tubes.find(args.tube).ok_or(Word::NOT_FOUND)?;
    let text = stats::tube(&s.queue.tubes[tube], s.queue.count_waiting(tube), s.queue.now);
    // The count has checked each waiter.
    s.queue.work.spend_for(s.queue.tubes[tube].waiters.len(), WAITERS_PER_WORK);
    Ok(Reply::Document(text))
}

// ---- Lists of tubes ----

/// `list-tube-used`
pub fn list_tube_used(c: &mut Conn, _: &mut Store, _: &Args<'_>) -> Answer {
    Ok(Reply::Using(c.client.used))
}

/// `list-tubes`
pub fn list_tubes(c: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    let count = s.queue.tubes.len();
    if count <= names_per_step(s) {
        s.queue.work.spend_for(count, NAMES_PER_WORK);
        let names = s.queue.tubes.iter().map(|tube| &*tube.name);
        return Ok(Reply::Document(stats::list(names)?));
    }
    ensure_fits(s, 0)?;
    s.lists.request(c.client.key)?;
    c.then(Doing::Wait(WaitFor::List))
}

/// `list-tubes-watched`
pub fn list_tubes_watched(c: &mut Conn, s: &mut Store, _: &Args<'_>) -> Answer {
    let count = c.client.watching.len();
    if count <= names_per_step(s) {
        s.queue.work.spend_for(count, NAMES_PER_WORK);
        let queue = &s.queue;
        let watched = c.client.watching.tubes(&queue.watches);
        return Ok(Reply::Document(stats::list(watched.map(|tube| &*queue.tubes[tube].name))?));
    }
    ensure_fits(s, 0)?;
    let text = ListText::new(&s.lists.bytes)?;
    let first = c.client.watching.first_watch().expect("a connection watches a tube");
    let units = s.queue.limits.names_per_list_step / NAMES_PER_WORK;
    c.begin_steps(s, units, Steps::ListWatched(text, first))
}

/// Adds watched tubes to a long list.
pub fn list_watched_step(
    c: &mut Conn,
    s: &mut Store,
    mut text: ListText,
    first: WatchKey,
) -> Answer {
    let names_per_step = s.queue.limits.names_per_list_step;
    s.queue.work.spend_for(names_per_step, NAMES_PER_WORK);
    let mut next = Some(first);
    for _ in 0..names_per_step {
        let Some(watch) = next else { break };
        text.push_name(&s.queue.watched_tube(watch).name)?;
        next = c.client.watching.watch_after(watch, &s.queue.watches);
    }
    ensure_fits(s, text.bytes().len() as u64)?;
    if let Some(next) = next {
        return c.later(Steps::ListWatched(text, next));
    }
    Ok(Reply::LongList(Rc::new(text)))
}
