//! Replies with bodies of which some are not in memory.
//!
//! A client whose body must come from the disk waits for it, and only that client. Its next commands
//! run after the reply. When it is read is decided in [`reads`](super::reads).

use super::Server;
use super::reads::LARGE_REPLY;
use crate::engine::conn::{
    Answer, BodySource, Continuation, ReserveKind, WantedBodies, WantedBody,
};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{ConnKey, JobKey};
use crate::engine::protocol::batch::ReplySize;
use crate::engine::protocol::reply::{MAX_LINE_LEN, Reply};
use crate::engine::queue::read_body::{BodyRef, ReplyClass};
use crate::engine::queue::waiters::Wait;
use crate::engine::time::Nanos;

/// Units of work to read a body from the page cache.
pub(super) const WORK_PER_BODY: usize = 8;

impl Server {
    /// Replies with the bodies of these jobs, now or when the disk has read them.
    pub(super) fn answer(&mut self, key: ConnKey, answer: Answer, jobs: &[(JobKey, u64)]) {
        self.budget.charge_share(WORK_PER_BODY * jobs.len());
        // A tick may give a job to a connection long after the last command.
        let now = self.last_command_at.max(self.ticked_at);
        let mut wanted = WantedBodies {
            answer,
            bodies: Vec::new(),
            class: ReplyClass::Small,
            cold_bytes: 0,
            grant: None,
            next: 0,
            reading: 0,
            has_turn: false,
            turn_bytes: 0,
            asked_at: now,
            has_waited: false,
        };
        let has_room = headroom::leave(Headroom::Quarter, || wanted.bodies.try_reserve(jobs.len()));
        let mut fits = has_room.is_ok() && self.reserve_output(key, jobs);
        for &(job, id) in jobs.iter().filter(|_| has_room.is_ok()) {
            let body = &self.queue.jobs[job].body;
            let source = if !body.is_cold() {
                BodySource::Job
            } else if let Some(read) = self.queue.body_cache.read_bodies.find(id) {
                BodySource::Read(read)
            } else {
                fits &= self.settings.can_hold(body);
                wanted.cold_bytes += u64::from(body.full_len());
                BodySource::Disk
            };
            wanted.bodies.push(WantedBody { job, id, source });
        }
        if !fits {
            return self.refuse_answer(key, answer, jobs.iter().copied(), now);
        }
        if wanted.cold_bytes > LARGE_REPLY {
            wanted.class = ReplyClass::Large;
        }
        self.want_bodies(key, wanted, now);
        if let Some(wanted) = self.conns.wanted_bodies(key) {
            wanted.has_waited = true;
            if answer.is_reserved() {
                jobs.iter().for_each(|&(job, _)| self.queue.stop_ttr(job));
            }
        }
    }

    /// Ensures that the reply needs no memory once its bodies are read, unless that was done for a batch.
    fn reserve_output(&mut self, key: ConnKey, jobs: &[(JobKey, u64)]) -> bool {
        let [(job, _)] = jobs else { return true };
        let body = &self.queue.jobs[*job].body;
        let (copied, parts) = if body.is_large() { (0, 1) } else { (body.full_len() as usize, 0) };
        let size = ReplySize { text_len: MAX_LINE_LEN + copied, parts };
        self.conns.try_reserve_output(key, size).is_ok()
    }

    /// Replies that there is no memory for the bodies. Jobs that were reserved for the reply are ready again.
    pub(super) fn refuse_answer(
        &mut self,
        key: ConnKey,
        answer: Answer,
        jobs: impl Iterator<Item = (JobKey, u64)>,
        now: Nanos,
    ) {
        if answer.is_reserved() {
            for (job, id) in jobs {
                self.queue.give_back(key, job, id, now);
            }
        }
        self.reply(key, Reply::OutOfMemory);
    }

    /// Replies with the bodies that could be read. A job that the client has reserved may have come back
    /// meanwhile, or was deleted. The TTR of the others begins now.
    pub(super) fn finish_reply(&mut self, key: ConnKey, wanted: WantedBodies, now: Nanos) {
        let WantedBodies { answer, mut bodies, asked_at, has_waited, .. } = wanted;
        // Not before the commands that ran before: their jobs reach their deadlines first.
        let now = now.max(self.last_command_at);
        if has_waited {
            self.queue.note_wait(now.since(asked_at));
        }
        for one in &mut bodies {
            let is_there = self.queue.find(one.id) == Some(one.job);
            let is_lost = match one.source {
                _ if answer.is_reserved() => !self.queue.is_reserved(one.job, one.id, key),
                BodySource::Job => !is_there,
                BodySource::Disk | BodySource::Read(_) | BodySource::Nowhere => false,
            };
            if is_lost {
                one.source = BodySource::Nowhere;
            } else if has_waited
                && answer.is_reserved()
                && !matches!(one.source, BodySource::Nowhere)
            {
                self.queue.touch(key, one.id, now);
            }
        }
        bodies.retain(|one| !matches!(one.source, BodySource::Nowhere));
        self.send_answer(key, answer, &bodies);
        if has_waited
            && answer.is_reserved()
            && let Some(job) = bodies.last().and_then(|one| self.queue.jobs.get(one.job))
        {
            self.queue.read_ahead(job.tube);
        }
    }

    fn send_answer(&mut self, key: ConnKey, answer: Answer, bodies: &[WantedBody]) {
        let count = bodies.len();
        match answer {
            Answer::Found | Answer::ReservedById if count == 0 => {
                return self.reply(key, Reply::NotFound);
            }
            Answer::Reserved { kind, until } if count == 0 => {
                return self.reserve_again(key, kind, until);
            }
            Answer::FoundBatch { next } => self.reply(key, Reply::FoundBatch { count, next }),
            Answer::Reserved { kind: ReserveKind::Batch(_), .. } => {
                self.reply(key, Reply::ReservedBatch { count });
            }
            Answer::Found | Answer::ReservedById | Answer::Reserved { .. } => {}
        }
        for WantedBody { job, id, source } in bodies {
            let body = match source {
                BodySource::Read(body) => BodyRef::Read(body),
                BodySource::Job | BodySource::Disk | BodySource::Nowhere => {
                    BodyRef::Stored(&self.queue.jobs[*job].body)
                }
            };
            let reply = answer.reply(*id, body);
            if self.conns.reply(key, reply, &mut self.queue.bodies).is_err() {
                return self.close_now(key);
            }
        }
    }

    /// Continues a reserve none of whose jobs has a body that can be read.
    fn reserve_again(&mut self, key: ConnKey, kind: ReserveKind, until: Nanos) {
        let wait = Wait { seq: self.queue.next_wait_seq(), until };
        self.continue_next(key, Continuation::Reserve(wait, kind));
    }

    /// Returns whether the body of one of these jobs is not in memory.
    pub(super) fn has_cold(&self, jobs: &[(JobKey, u64)]) -> bool {
        jobs.iter().any(|&(job, _)| self.queue.jobs[job].body.is_cold())
    }

    /// Forgets the bodies for which a connection waits.
    pub(super) fn cancel_bodies(&mut self, key: ConnKey) {
        if self.take_wanted(key).is_some() {
            self.reads.remove(key);
        }
    }
}
