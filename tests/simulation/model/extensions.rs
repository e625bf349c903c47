//! The commands that C beanstalkd does not have, as EXTENSIONS.md describes them. The engine divides
//! some of them into steps; here each is done at once.

use super::super::request::{Argument, Arguments, Command};
use super::{Batch, Call, Change, Client, ClientNumber, Flush, Job, Model, SECOND, State};
use std::rc::Rc;

/// A reply has at most this many bytes of bodies without their CR LF, unless it has one job.
const MAX_BODY_BYTES: usize = 1 << 20;

pub const EXTENSIONS: &[Command] = {
    use Argument::{
        After, AfterClient, AnyTube, BatchCount, Delay, Ids, LastTube, Len, PageCount, Pri, State,
        Tag, Ttr, Tube, Wait,
    };
    &[
        Command::new("put-in-tube", 40, &[Tube, Pri, Delay, Ttr, Len, Tag], Model::begin_put),
        Command::new("reserve-batch", 50, &[BatchCount, Wait], Model::reserve_batch),
        Command::new("delete-batch", 20, &[Ids], Model::delete_batch),
        Command::new("touch-all", 8, &[], |it, call, _| it.touch_all(call)),
        Command::new("flush-tube", 5, &[LastTube], |it, call, arguments| {
            it.flush_tube(call, arguments.tube(), |_| true);
        }),
        Command::new("flush-buried", 5, &[LastTube], |it, call, arguments| {
            it.flush_tube(call, arguments.tube(), |job| job.buried_in(&job.tube).is_some());
        }),
        Command::new("peek-batch", 10, &[Tube, State, PageCount, After], Model::peek_batch),
        Command::new("list-clients", 10, &[PageCount, AfterClient, AnyTube], Model::list_clients),
        Command::new("list-jobs", 15, &[Tube, State, PageCount, After], Model::list_jobs),
    ]
};

impl Model {
    // ---- See ----

    pub(super) fn list_jobs(&mut self, call: &Call<'_>, page: &Arguments) {
        let Some((ids, next)) = self.select(page, call.now) else {
            return self.reply(call.by, "NOT_FOUND");
        };
        self.reply_jobs(call, &ids, next);
    }

    pub(super) fn peek_batch(&mut self, call: &Call<'_>, page: &Arguments) {
        let Some((mut ids, mut next)) = self.select(page, call.now) else {
            return self.reply(call.by, "NOT_FOUND");
        };
        let mut bytes = 0;
        let mut fits = |id: &u64| {
            bytes += self.body_len(*id);
            bytes <= MAX_BODY_BYTES
        };
        let fitting = ids.iter().take_while(|id| fits(id)).count().max(1);
        if fitting < ids.len() {
            ids.truncate(fitting);
            next = ids[fitting - 1];
        }
        self.begin_body_reply(call.by);
        self.reply(call.by, &format!("FOUND_BATCH {} {next}", ids.len()));
        for id in ids {
            self.reply_job(call.by, "FOUND", id);
        }
    }

    /// Returns the ids of a page and that of the last one if there are more, or `None` if there is
    /// no such tube.
    pub(super) fn select(&self, page: &Arguments, now: u64) -> Option<(Vec<u64>, u64)> {
        let tube = page.tube();
        self.find_tube(tube)?;
        let is_asked_for = |job: &&Job| {
            let (state, _) = job.shown_state(now, || 0);
            *job.tube == *tube && job.id > page.after && ["any", state].contains(&page.state)
        };
        let mut ids: Vec<u64> = self.jobs.iter().filter(is_asked_for).map(|job| job.id).collect();
        let has_more = ids.len() > page.count;
        ids.truncate(page.count);
        let next = if has_more { ids[page.count - 1] } else { 0 };
        Some((ids, next))
    }

    pub(super) fn list_clients(&mut self, call: &Call<'_>, page: &Arguments) {
        let tube = page.tube.as_deref();
        if tube.is_some_and(|tube| self.find_tube(tube).is_none()) {
            return self.reply(call.by, "NOT_FOUND");
        }
        let watches = |it: &Client| tube.is_none_or(|tube| it.watches(tube));
        let listed = self.clients.iter().filter(|(_, it)| it.id > page.after && watches(it));
        let mut listed: Vec<(u64, ClientNumber)> =
            listed.map(|(number, it)| (it.id, *number)).collect();
        listed.sort_unstable();
        let has_more = listed.len() > page.count;
        listed.truncate(page.count);
        let next = listed.last().filter(|_| has_more).map_or(0, |(id, _)| *id);
        self.reply_clients(call, &listed, next);
    }

    // ---- Flush ----

    pub(super) fn flush_tube(
        &mut self,
        call: &Call<'_>,
        name: &str,
        is_flushed: impl Fn(&Job) -> bool,
    ) {
        let Some(tube) = self.find_tube(name).map(|tube| Rc::clone(&tube.name)) else {
            return self.reply(call.by, "NOT_FOUND");
        };
        let is_flushed = |job: &Job| *job.tube == *tube && is_flushed(job);
        let (gone, left) = std::mem::take(&mut self.jobs).into_iter().partition(is_flushed);
        self.jobs = left;
        let gone: Vec<Job> = gone;
        if !gone.is_empty() && self.is_refused(call) {
            self.jobs.extend(gone);
            self.jobs.sort_by_key(|job| job.id);
            return self.reply(call.by, "OUT_OF_MEMORY");
        }
        self.flush_count += 1;
        if !gone.is_empty() {
            self.last_flush_at = call.now;
        }
        for Job { id, .. } in &gone {
            let (job, flush) = (None, Some(self.flush_count));
            self.changes.push(Change { id: *id, job, is_logged: true, flush, at: call.now });
        }
        // Without space for their records, keys are lost.
        let is_unsure = self.may_refuse_deletes;
        gone.iter().for_each(|job| self.keep_key(job, call.now, is_unsure));
        self.tube(&tube).deletes += gone.len() as u64;
        self.serve_unblocked(call.now);
        self.flushes.push(Flush { client: Some(call.by), tube, count: gone.len() });
        // The reply may come later, but not for nothing.
        if gone.is_empty() || !call.seen.is_empty() {
            self.end_flush(self.flushes.len() - 1);
        }
    }

    pub fn end_flush(&mut self, index: usize) {
        let Flush { client, tube, count } = self.flushes.remove(index);
        self.remove_if_idle(&tube);
        if let Some(client) = client {
            self.reply(client, &format!("FLUSHED {count}"));
        }
    }

    pub fn is_flushing(&self, number: ClientNumber) -> bool {
        self.flushes.iter().any(|flush| flush.client == Some(number))
    }

    // ---- Many at once ----

    pub(super) fn reserve_batch(&mut self, call: &Call<'_>, it: &Arguments) {
        self.client(call.by).is_worker = true;
        let began = (self.next_seq(), call.now);
        self.begin_batch(call, it.count, it.secs, began);
    }

    /// Takes the jobs of a batch that has none, or waits for one.
    pub(super) fn begin_batch(
        &mut self,
        call: &Call<'_>,
        count: usize,
        secs: Option<u32>,
        began: (u64, u64),
    ) {
        let ids = self.reserve_more(call.by, Vec::new(), count, call.now);
        if ids.is_empty() {
            self.wait(call, Some(secs.unwrap_or(0)), Some(count), began);
        } else {
            self.reply_batch(call.by, &ids);
        }
    }

    /// Replies with the job for which a client has waited and the others that are there. If the job is
    /// gone meanwhile, the others are all.
    pub(super) fn fill_batch(&mut self, call: &Call<'_>, batch: Batch) {
        let Batch { mut first, taken, count, is_first_open } = batch;
        if is_first_open
            && taken.is_empty()
            && let Some(waited_for) = first
            && let Some(other) = call.seen_reserved()
            && self.find(other).is_some_and(|job| self.can_be_reserved(job))
        {
            self.swap_first(call.by, waited_for, other);
            first = Some(other);
        }
        let mut ids: Vec<u64> = first.into_iter().chain(taken).collect();
        ids.retain(|id| self.has_reserved(call.by, *id));
        let ids = self.reserve_more(call.by, ids, count, call.now);
        // The TTRs begin with the reply.
        for &id in &ids {
            let ttr = u64::from(self.job(id).ttr) * SECOND;
            self.set_deadline(id, call.now + ttr);
        }
        self.reply_batch(call.by, &ids);
    }

    /// Sets the deadline of a job, if it is reserved.
    pub(super) fn set_deadline(&mut self, id: u64, to: u64) {
        if let State::Reserved { deadline, .. } = &mut self.job(id).state {
            *deadline = to;
        }
    }

    /// The client has reserved `other` instead of `first`, at the same moment.
    fn swap_first(&mut self, by: ClientNumber, first: u64, other: u64) {
        if !self.has_reserved(by, first) {
            return;
        }
        let job = self.job(first);
        let State::Reserved { at, .. } = job.state else { return };
        job.counts.reserves -= 1;
        self.make_ready(first, at);
        self.reserve(other, by, at);
    }

    /// What becomes due at once does so in any order: any of its jobs may be the first of a batch.
    pub fn open_batches(&mut self) {
        let batches = self.clients.values_mut().filter_map(|client| client.batch.as_mut());
        batches.for_each(|batch| batch.is_first_open = true);
    }

    /// Reserves jobs in addition to `ids`, as many as one reply may have.
    pub(super) fn reserve_more(
        &mut self,
        by: ClientNumber,
        mut ids: Vec<u64>,
        count: usize,
        now: u64,
    ) -> Vec<u64> {
        let mut bytes: usize = ids.iter().map(|id| self.body_len(*id)).sum();
        while ids.len() < count {
            let client = &self.clients[&by];
            let Some(id) = self.first_ready(|tube| client.watches(tube)) else { break };
            bytes += self.body_len(id);
            if !ids.is_empty() && bytes > MAX_BODY_BYTES {
                break;
            }
            self.reserve(id, by, now);
            ids.push(id);
        }
        ids
    }

    fn reply_batch(&mut self, number: ClientNumber, ids: &[u64]) {
        self.begin_body_reply(number);
        self.reply(number, &format!("RESERVED_BATCH {}", ids.len()));
        for &id in ids {
            self.reply_job(number, "RESERVED", id);
        }
    }

    pub(super) fn delete_batch(&mut self, call: &Call<'_>, it: &Arguments) {
        let ids = &it.ids;
        let is_first_there = ids.first().is_some_and(|&id| self.can_delete(call.by, id));
        if is_first_there && self.may_refuse_deletes && self.is_refused(call) {
            return self.reply(call.by, "OUT_OF_MEMORY");
        }
        self.end_delete_batch(call, ids, ids.len(), 0);
    }

    /// Deletes the rest of `count` jobs, of which some are `deleted`, and replies.
    pub(super) fn end_delete_batch(
        &mut self,
        call: &Call<'_>,
        rest: &[u64],
        count: usize,
        mut deleted: usize,
    ) {
        let mut most = rest.len();
        if self.may_refuse_deletes
            && let Some(fewer) = call.seen_number(b"DELETED_BATCH ")
        {
            most = fewer.saturating_sub(deleted);
        }
        deleted += self.delete_jobs(call.by, rest, most);
        self.reply(call.by, &format!("DELETED_BATCH {deleted} {}", count - deleted));
    }

    /// Deletes up to `most` of these jobs. Returns how many.
    pub(super) fn delete_jobs(&mut self, by: ClientNumber, ids: &[u64], most: usize) -> usize {
        let mut deleted = 0;
        for &id in ids {
            if deleted < most && self.can_delete(by, id) {
                self.remove_job(id);
                deleted += 1;
            }
        }
        deleted
    }

    pub(super) fn touch_all(&mut self, call: &Call<'_>) {
        let held = self.in_order(|job| job.reserved_by(call.by));
        self.touch(call, &held);
        self.reply(call.by, &format!("TOUCHED_ALL {}", held.len()));
    }

    fn body_len(&self, id: u64) -> usize {
        self.find(id).map_or(0, |job| job.body.len())
    }
}
