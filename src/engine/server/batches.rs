//! Commands for many jobs of one connection: `reserve-batch`, `delete-batch` and `touch-all`.

use super::Server;
use crate::engine::conn::{Answer, Continuation, ReserveKind};
use crate::engine::keys::{ConnKey, JobKey};
use crate::engine::protocol::batch::Batch;
use crate::engine::protocol::command::Ids;
use crate::engine::protocol::reply::Reply;
use crate::engine::queue::Outcome;
use crate::engine::queue::touch::TouchAll;
use crate::engine::queue::waiters::Search;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// Units of work to reserve or delete a job of a batch, and to touch one.
const WORK_PER_JOB: usize = 12;
const WORK_PER_TOUCH: usize = 2;

impl Server {
    // ---- Reserve ----

    /// Reserves ready jobs and adds them to a batch, at most those of one step. Returns
    /// whether the batch is complete: it is full, or no further job is found, or there is no memory for
    /// one. On an error the batch is empty.
    pub(super) fn fill_batch(
        &mut self,
        key: ConnKey,
        batch: &mut Batch,
        steps_left: &mut usize,
        now: Nanos,
    ) -> Result<bool, TryReserveError> {
        let before = batch.jobs.len();
        let most = before + self.queue.limits.jobs_per_reserve_step;
        let mut is_complete = false;
        while !is_complete && batch.jobs.len() < most {
            match self.reserve_into_batch(key, batch, steps_left, now) {
                Ok(Search::Found(_)) => is_complete = batch.is_full(),
                Ok(Search::Unfinished) => break,
                Ok(Search::Nothing) => is_complete = true,
                Err(no_memory) if batch.is_empty() => return Err(no_memory),
                Err(_) => is_complete = true,
            }
        }
        self.budget.charge_share((batch.jobs.len() - before) * WORK_PER_JOB);
        Ok(is_complete)
    }

    /// Reserves the best job and adds it to the batch, if there is room in the batch and memory for
    /// the reply.
    fn reserve_into_batch(
        &mut self,
        key: ConnKey,
        batch: &mut Batch,
        steps_left: &mut usize,
        now: Nanos,
    ) -> Result<Search, TryReserveError> {
        self.queue.ensure_can_reserve(key)?;
        let Server { queue, conns, settings, .. } = self;
        queue.reserve_if(key, steps_left, now, |job_key, job| {
            let can_hold = batch.is_empty() || settings.can_hold(&job.body);
            if !can_hold || !batch.fits(&job.body) {
                return Ok(false);
            }
            let size = batch.size_with(&job.body);
            if !batch.is_empty() && conns.are_crowded_by(size.text_len) {
                return Ok(false);
            }
            conns.try_reserve_output(key, size)?;
            batch.try_push(job_key, job)?;
            Ok(true)
        })
    }

    /// Replies with the jobs of a batch, before or after the timeout ends.
    pub(super) fn reply_reserved_batch(&mut self, key: ConnKey, batch: Batch, until: Nanos) {
        if self.conns.try_reserve_output(key, batch.size).is_err() {
            // The jobs become ready when the connection is closed.
            return self.close_now(key);
        }
        let answer = Answer::Reserved { kind: ReserveKind::Batch(batch.max()), until };
        if self.has_cold(&batch.jobs) {
            return self.answer(key, answer, &batch.jobs);
        }
        self.reply(key, Reply::ReservedBatch { count: batch.jobs.len() });
        for (job, _) in batch.jobs {
            self.reply_job(key, job, answer);
        }
    }

    /// Replies to a reserve whose wait has ended with this job. A batch is filled in the next
    /// iteration: one event can end many waits.
    pub(super) fn reply_awaited(
        &mut self,
        key: ConnKey,
        job: JobKey,
        kind: ReserveKind,
        until: Nanos,
    ) {
        let ReserveKind::Batch(max) = kind else {
            return self.reply_job(key, job, Answer::Reserved { kind, until });
        };
        let mut batch = Batch::new(max);
        if batch.try_push(job, &self.queue.jobs[job]).is_err() {
            return self.close_now(key);
        }
        self.continue_next(key, Continuation::FillBatch(batch, until));
    }

    /// Reserves more jobs for a batch, and replies once it is complete.
    pub(super) fn fill_batch_step(
        &mut self,
        key: ConnKey,
        mut batch: Batch,
        until: Nanos,
        now: Nanos,
    ) {
        // Since the previous step a TTR may have run out, and a flush may have deleted a job.
        batch.retain(&self.queue.jobs, |job, id| self.queue.is_reserved(job, id, key));
        let most = self.queue.limits.watches_per_step;
        let mut steps_left = most;
        let filled = self.fill_batch(key, &mut batch, &mut steps_left, now);
        self.charge_watches(most - steps_left);
        match filled {
            Ok(true) => self.reply_reserved_batch(key, batch, until),
            Ok(false) => self.continue_later(key, Continuation::FillBatch(batch, until)),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    // ---- Delete and touch ----

    /// Deletes jobs, all in one commit.
    pub(super) fn delete_batch(&mut self, key: ConnKey, ids: Ids<'_>, now: Nanos) {
        let (mut deleted, mut not_found) = (0, 0);
        for id in ids {
            match self.queue.delete_one(key, id, now) {
                Outcome::Done => deleted += 1,
                Outcome::NoSpace if deleted + not_found == 0 => {
                    return self.reply(key, Reply::OutOfMemory);
                }
                Outcome::NotFound | Outcome::NoSpace => not_found += 1,
            }
        }
        self.queue.compact();
        self.budget.charge_share((deleted + not_found) * WORK_PER_JOB);
        self.reply(key, Reply::DeletedBatch { deleted, not_found });
    }

    /// Touches the next jobs of a `touch-all`.
    pub(super) fn touch_all_step(&mut self, key: ConnKey, mut touch: TouchAll, now: Nanos) {
        let most = self.queue.limits.jobs_per_touch_step;
        let mut checks_left = most;
        let is_done = self.queue.touch_all_step(key, &mut touch, &mut checks_left, now);
        self.budget.charge_share((most - checks_left) * WORK_PER_TOUCH);
        if is_done {
            self.reply(key, Reply::TouchedAll { count: touch.touched });
        } else {
            self.continue_later(key, Continuation::TouchAll(touch));
        }
    }
}
