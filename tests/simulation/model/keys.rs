//! Unique jobs: whether a put with a key finds a job with this key. Jobs of which only some may be reserved
//! at the same time: whether one is blocked.

use super::{Call, Job, Model, SECOND, State};
use std::rc::Rc;

/// The key of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobKey {
    pub key: Rc<str>,
    /// In seconds.
    pub ttl: u32,
    /// A damaged disk may have lost it.
    pub is_unsure: bool,
}

/// The key of jobs of which only some may be reserved at the same time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Con {
    pub key: Rc<str>,
    pub limit: u32,
}

/// The key of a deleted job that is kept.
#[derive(Clone, Debug)]
pub struct KeptKey {
    pub id: u64,
    pub tube: Rc<str>,
    pub key: Rc<str>,
    pub until: u64,
    /// In seconds.
    pub ttl: u32,
    /// It may not be kept, or not so long.
    pub is_unsure: bool,
}

impl Model {
    /// Returns the reply to a put if a job has its key already.
    pub(super) fn find_key(&mut self, call: &Call<'_>, tube: &str, key: &str) -> Option<String> {
        self.kept_keys.retain(|kept| kept.until > call.now);
        let holders = self.holders(tube, key);
        let sure = holders.iter().find(|(_, is_unsure)| !is_unsure);
        let seen = holders.iter().find(|(reply, _)| call.has_seen(reply));
        // A power cut that undoes a delete may leave two jobs with the key.
        let found = seen.or(sure).map(|(reply, _)| reply.clone());
        if found.is_none() {
            // None of them has the key any more.
            for job in self.jobs.iter_mut().filter(|job| has_key(job, tube, key)) {
                job.key = None;
            }
            self.kept_keys.retain(|kept| (&*kept.tube, &*kept.key) != (tube, key));
        }
        found
    }

    /// Returns the replies for all jobs that have or had the key, and whether each is unsure.
    fn holders(&self, tube: &str, key: &str) -> Vec<(String, bool)> {
        let jobs = self.jobs.iter().filter(|job| has_key(job, tube, key)).map(|job| {
            let state = match job.state {
                State::Ready => "READY",
                State::Reserved { .. } => "RESERVED",
                State::Delayed { .. } => "DELAYED",
                State::Buried { .. } => "BURIED",
            };
            let is_unsure = job.key.as_ref().is_some_and(|key| key.is_unsure);
            (format!("INSERTED {} {state}", job.id), is_unsure)
        });
        let kept = self.kept_keys.iter().filter(|kept| (&*kept.tube, &*kept.key) == (tube, key));
        let kept = kept.map(|kept| (format!("INSERTED {} DELETED", kept.id), kept.is_unsure));
        jobs.chain(kept).collect()
    }

    /// Keeps the key of a job that is deleted now, if it has a TTL.
    pub(super) fn keep_key(&mut self, job: &Job, now: u64, is_unsure: bool) {
        let Some(JobKey { key, ttl: ttl @ 1.., is_unsure: was_unsure }) = &job.key else { return };
        self.kept_keys.push(KeptKey {
            id: job.id,
            tube: Rc::clone(&job.tube),
            key: Rc::clone(key),
            until: now + u64::from(*ttl) * SECOND,
            ttl: *ttl,
            is_unsure: is_unsure || *was_unsure,
        });
    }
}

impl Model {
    pub(super) fn can_be_reserved(&self, job: &Job) -> bool {
        job.state == State::Ready && !self.is_blocked(job)
    }

    /// Returns whether as many jobs with the same key are reserved as the largest of their limits allows.
    pub(super) fn is_blocked(&self, job: &Job) -> bool {
        let Some(Con { key, .. }) = &job.con else { return false };
        let with_key = |other: &&Job| other.con.as_ref().is_some_and(|con| con.key == *key);
        let others = || self.jobs.iter().filter(with_key);
        let reserved = others().filter(|it| matches!(it.state, State::Reserved { .. })).count();
        let limit = others().filter_map(|it| it.con.as_ref()).map(|con| con.limit).max();
        limit.is_some_and(|limit| reserved >= limit as usize)
    }

    /// Hands jobs that are not blocked any more to the clients that wait for them, the best one first.
    pub(super) fn serve_unblocked(&mut self, now: u64) {
        loop {
            let can_be_served = |job: &&Job| job.con.is_some() && self.can_be_reserved(job);
            let mut ids: Vec<(u32, u64)> =
                self.jobs.iter().filter(can_be_served).map(|job| (job.pri, job.id)).collect();
            ids.sort_unstable();
            let served = ids.into_iter().find_map(|(_, id)| {
                let (waiter, first) = self.next_served(&self.find(id)?.tube)?;
                (first == id).then_some((waiter, id))
            });
            let Some((waiter, id)) = served else { return };
            self.serve_waiter(waiter, id, now);
        }
    }
}

fn has_key(job: &Job, tube: &str, key: &str) -> bool {
    *job.tube == *tube && job.key.as_ref().is_some_and(|own| *own.key == *key)
}
