//! Unique jobs, as EXTENSIONS.md describes them: whether a put with a key finds a job with this key.

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
        let found = sure.or(seen).map(|(reply, _)| reply.clone());
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

fn has_key(job: &Job, tube: &str, key: &str) -> bool {
    *job.tube == *tube && job.key.as_ref().is_some_and(|own| *own.key == *key)
}
