//! Replies with bodies of which some are not in memory.
//!
//! A client whose body must come from the disk waits for it, and only that client. Its next commands
//! run after the reply.

use super::Server;
use crate::engine::binlog::disk::{FinishedRead, ReadToken};
use crate::engine::conn::{Answer, Continuation, Phase, ReserveKind, WantedBodies, WantedBody};
use crate::engine::keys::{ConnKey, JobKey, Key};
use crate::engine::protocol::reply::Reply;
use crate::engine::queue::body_cache::Fetched;
use crate::engine::queue::waiters::Wait;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::io;

/// Units of work to read a body from the page cache.
const WORK_PER_READ: usize = 8;
/// Bytes of a body that are checked and copied in one unit of work.
const BYTES_PER_WORK: usize = 1024;
/// A reply with a body that the disk has read counts as this many bytes more, so that 128 short ones
/// are the most in an iteration.
const BYTES_OF_A_REPLY: usize = 8 * 1024;

impl Server {
    /// Replies with the bodies of these jobs, now or when the disk has read them.
    pub(super) fn answer(&mut self, key: ConnKey, answer: Answer, jobs: &[(JobKey, u64)]) {
        self.budget.charge_share(WORK_PER_READ * jobs.len());
        match self.fetch_all(key, answer, jobs) {
            Ok(Some(wanted)) if wanted.missing == 0 => self.send_answer(key, wanted),
            Ok(Some(wanted)) => self.conns[key].phase = Phase::ReadingBodies(Box::new(wanted)),
            // Jobs that it has reserved become ready when it is closed.
            Ok(None) | Err(_) => self.close_now(key),
        }
    }

    /// Fetches what is in memory or in the page cache, and begins to read the rest. Returns `None` if a
    /// body cannot be read now.
    fn fetch_all(
        &mut self,
        key: ConnKey,
        answer: Answer,
        jobs: &[(JobKey, u64)],
    ) -> Result<Option<WantedBodies>, TryReserveError> {
        let now = self.last_command_at;
        let first_read = self.next_read;
        let mut bodies = Vec::new();
        bodies.try_reserve_exact(jobs.len())?;
        let mut wanted = WantedBodies { answer, bodies, missing: 0, first_read, asked_at: now };
        for &(job, id) in jobs {
            let number = self.next_read;
            self.next_read = self.next_read.wrapping_add(1);
            let (body, place) = match self.queue.fetch(job) {
                Ok(Fetched::Body(body)) => (Some(body), None),
                Ok(Fetched::OnDisk(place)) => {
                    self.queue.begin_read(token(key, number), place);
                    wanted.missing += 1;
                    (None, Some(place))
                }
                Ok(Fetched::Unreadable) => {
                    self.queue.bury_unreadable(job, key, now);
                    (None, None)
                }
                Ok(Fetched::NotNow) => {
                    self.drop_wanted(wanted);
                    return Ok(None);
                }
                Err(no_memory) => {
                    self.drop_wanted(wanted);
                    return Err(no_memory);
                }
            };
            wanted.bodies.push(WantedBody { job, id, body, place });
        }
        if wanted.missing > 0 && answer.is_reserved() {
            wanted.bodies.iter().for_each(|one| self.queue.stop_ttr(one.job));
        }
        Ok(Some(wanted))
    }

    /// Passes the records that the disk has read to the clients that wait for them, as many as one
    /// iteration has time for.
    pub(super) fn finish_reads(&mut self, now: Nanos) {
        let mut bytes_left = self.queue.limits.read_back_per_tick_bytes;
        self.has_finished_reads = true;
        while bytes_left > 0 {
            let Some(FinishedRead { token, bytes }) = self.queue.finished_read() else {
                self.has_finished_reads = false;
                return;
            };
            let len = bytes.as_ref().map_or(0, Vec::len);
            bytes_left = bytes_left.saturating_sub(len + BYTES_OF_A_REPLY);
            self.charge(WORK_PER_READ + len / BYTES_PER_WORK);
            let (key, number) = of_token(token);
            self.finish_read(key, number, bytes, now);
        }
    }

    fn finish_read(&mut self, key: ConnKey, number: u32, bytes: io::Result<Vec<u8>>, now: Nanos) {
        // The connection may have been closed, and its key given to another one.
        let Some(wanted) = self.conns.wanted_bodies(key) else { return };
        let index = number.wrapping_sub(wanted.first_read) as usize;
        let Some(one) = wanted.bodies.get_mut(index) else { return };
        let Some(place) = one.place.take() else { return };
        let (job, id) = (one.job, one.id);
        let is_there = self.queue.find(id) == Some(job);
        // Compaction may have moved it meanwhile, and the old file may be gone.
        let has_moved = is_there && self.queue.has_moved(job, place);
        let bytes =
            bytes.as_deref().map_err(|error| io::Error::new(error.kind(), error.to_string()));
        let fetched = if has_moved {
            self.queue.fetch(job)
        } else {
            self.queue.body_of_bytes(place, id, bytes)
        };
        let Some(wanted) = self.conns.wanted_bodies(key) else { return };
        match fetched {
            Ok(Fetched::Body(body)) => wanted.bodies[index].body = Some(body),
            Ok(Fetched::OnDisk(place)) => {
                wanted.bodies[index].place = Some(place);
                return self.queue.begin_read(token(key, number), place);
            }
            Ok(Fetched::Unreadable) => {
                if is_there {
                    self.queue.bury_unreadable(job, key, now);
                }
            }
            Ok(Fetched::NotNow) | Err(_) => return self.close_now(key),
        }
        let Some(wanted) = self.conns.wanted_bodies(key) else { return };
        wanted.missing -= 1;
        if wanted.missing > 0 {
            return;
        }
        let asked_at = wanted.asked_at;
        self.queue.note_wait(now.since(asked_at));
        if let Phase::ReadingBodies(wanted) = std::mem::take(&mut self.conns[key].phase) {
            // Not before the commands that ran before: their jobs reach their deadlines first.
            let now = now.max(self.last_command_at);
            self.keep_reserved(key, *wanted, now);
        }
    }

    /// Replies after a client has waited. A job that it has reserved may have come back meanwhile, or
    /// was deleted. The TTR of the others begins now.
    fn keep_reserved(&mut self, key: ConnKey, mut wanted: WantedBodies, now: Nanos) {
        if wanted.answer.is_reserved() {
            for one in &mut wanted.bodies {
                if !self.queue.is_reserved(one.job, one.id, key) {
                    one.body.take().into_iter().for_each(|body| self.queue.drop_body(body));
                } else if one.body.is_some() {
                    self.queue.touch(key, one.id, now);
                }
            }
        }
        self.send_answer(key, wanted);
    }

    /// Replies with the bodies that could be read.
    fn send_answer(&mut self, key: ConnKey, wanted: WantedBodies) {
        let WantedBodies { answer, bodies, .. } = wanted;
        let count = bodies.iter().filter(|one| one.body.is_some()).count();
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
        let is_reserved = answer.is_reserved();
        let (mut last, mut is_closed) = (None, false);
        for WantedBody { job, id, body, .. } in bodies {
            let Some(body) = body else { continue };
            if is_closed {
                self.queue.drop_body(body);
                continue;
            }
            let written = self.conns.reply(key, answer.reply(id, &body), &mut self.queue.bodies);
            self.queue.drop_body(body);
            is_closed |= written.is_err();
            last = Some(job);
        }
        if is_closed {
            return self.close_now(key);
        }
        if is_reserved && let Some(job) = last.and_then(|job| self.queue.jobs.get(job)) {
            self.queue.read_ahead(job.tube);
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
        if let Phase::ReadingBodies(_) = &self.conns[key].phase
            && let Phase::ReadingBodies(wanted) = std::mem::take(&mut self.conns[key].phase)
        {
            self.drop_wanted(*wanted);
        }
    }

    fn drop_wanted(&mut self, wanted: WantedBodies) {
        let bodies = wanted.bodies.into_iter().filter_map(|one| one.body);
        bodies.for_each(|body| self.queue.drop_body(body));
    }
}

fn token(key: ConnKey, number: u32) -> ReadToken {
    ReadToken(u64::from(key.number()) << u32::BITS | u64::from(number))
}

/// Returns the connection and the number of the read.
#[expect(clippy::cast_possible_truncation, reason = "a token has two numbers of 32 bits")]
fn of_token(token: ReadToken) -> (ConnKey, u32) {
    (ConnKey::from_number((token.0 >> u32::BITS) as u32), token.0 as u32)
}
