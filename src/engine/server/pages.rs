//! `list-jobs` and `peek-batch`: pages of the jobs of a tube. A page for which many jobs must be
//! compared is made in steps.

use super::Server;
use crate::engine::conn::{Answer, Continuation, JobPart, Phase};
use crate::engine::keys::{ConnKey, JobKey};
use crate::engine::protocol::batch::Batch;
use crate::engine::protocol::reply::Reply;
use crate::engine::protocol::stats;
use crate::engine::queue::browse::{ScanStep, Selection, SelectionScan};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// At most this many pages are being made in steps. Each takes up to 8 KiB.
const MAX_SELECTIONS: usize = 256;

impl Server {
    /// Begins a page of jobs.
    pub(super) fn begin_page(
        &mut self,
        key: ConnKey,
        selection: Selection<'_>,
        part: JobPart,
        now: Nanos,
    ) {
        match self.queue.select(selection) {
            Ok(Some(scan)) => self.select_step(key, Box::new(scan), part, now),
            Ok(None) => self.reply(key, Reply::NotFound),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Compares the next jobs, and replies with the page once all were compared.
    pub(super) fn select_step(
        &mut self,
        key: ConnKey,
        mut scan: Box<SelectionScan>,
        part: JobPart,
        now: Nanos,
    ) {
        let step = scan.step(&self.queue);
        self.budget.charge_share(scan.take_work());
        match step {
            Ok(ScanStep::Unfinished) if self.selections >= MAX_SELECTIONS => {
                self.reply(key, Reply::OutOfMemory);
            }
            Ok(ScanStep::Unfinished) => {
                self.selections += 1;
                self.continue_later(key, Continuation::Select(scan, part));
            }
            Ok(ScanStep::Jobs { keys, next }) => match part {
                JobPart::Stats => {
                    if self.conns.are_crowded_by(stats::longest_jobs_len(keys.len())) {
                        return self.reply(key, Reply::OutOfMemory);
                    }
                    let text = stats::jobs(&keys, next, &self.queue, now);
                    self.reply_list(key, text);
                }
                JobPart::Body => self.reply_bodies(key, &keys, next),
            },
            Ok(ScanStep::NoTube) => self.reply(key, Reply::NotFound),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Forgets the page that a connection has requested.
    pub(super) fn cancel_page(&mut self, key: ConnKey) {
        if let Phase::InSteps(Continuation::Select(..)) = &self.conns[key].phase {
            self.selections -= 1;
        }
    }

    /// Replies with the bodies of as many jobs as fit into one reply.
    fn reply_bodies(&mut self, key: ConnKey, keys: &[JobKey], mut next: u64) {
        let Ok(batch) = self.batch_of_bodies(key, keys) else {
            return self.reply(key, Reply::OutOfMemory);
        };
        if batch.jobs.len() < keys.len() {
            next = batch.jobs.last().map_or(0, |&(_, id)| id);
        }
        if self.has_cold(&batch.jobs) {
            return self.answer(key, Answer::FoundBatch { next }, &batch.jobs);
        }
        self.reply(key, Reply::FoundBatch { count: batch.jobs.len(), next });
        for (job, _) in batch.jobs {
            self.reply_found(key, Some(job));
        }
    }

    /// Returns as many of the jobs as fit into one reply, for which it reserves memory.
    fn batch_of_bodies(&mut self, key: ConnKey, keys: &[JobKey]) -> Result<Batch, TryReserveError> {
        let mut batch = Batch::new(keys.len());
        for &job_key in keys {
            let job = &self.queue.jobs[job_key];
            let can_hold = batch.is_empty() || self.settings.can_hold(&job.body);
            if !can_hold || !batch.fits(&job.body) {
                break;
            }
            let size = batch.size_with(&job.body);
            if !batch.is_empty() && self.conns.are_crowded_by(size.text_len) {
                break;
            }
            batch.try_push(job_key, job)?;
        }
        self.conns.try_reserve_output(key, batch.size)?;
        Ok(batch)
    }
}
