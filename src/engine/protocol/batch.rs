//! The jobs of one reply to `reserve-batch` or `peek-batch`, and its limits. It does not reserve or
//! find jobs.

use super::reply::REPLY_LINE_MAX;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::JobKey;
use crate::engine::queue::body::{Body, LARGE};
use crate::engine::queue::job::{Job, Jobs};

/// The jobs of a reply that is being made.
#[derive(Debug)]
pub struct Batch {
    /// The keys and the ids. A job may be gone before the reply is complete.
    pub jobs: Vec<(JobKey, u64)>,
    /// The maximum number of jobs.
    max: usize,
    /// The length of their bodies without CR LF, in bytes.
    body_bytes: usize,
    /// The size of the reply.
    pub size: ReplySize,
    /// A body was only in the binlog when its job was added.
    pub has_cold: bool,
}

/// The size of a reply in the output of a connection.
#[derive(Clone, Copy, Debug)]
pub struct ReplySize {
    /// The maximum length of the lines and of the small bodies, in bytes.
    pub text_len: usize,
    /// The number of large bodies, which are shared.
    pub parts: usize,
}

/// A reply has at most this many bytes of bodies, unless it has one job: 1 MiB, which bounds the memory
/// for the output of a connection.
const MAX_BODY_BYTES: usize = 1024 * 1024;

impl ReplySize {
    /// The size of a reply without jobs.
    pub const HEADING: ReplySize = ReplySize { text_len: REPLY_LINE_MAX, parts: 0 };

    /// Returns the size with one more job, whose body has `full_len` bytes with CR LF.
    pub fn with(self, full_len: usize) -> ReplySize {
        let is_large = full_len >= LARGE;
        ReplySize {
            text_len: self.text_len + REPLY_LINE_MAX + if is_large { 0 } else { full_len },
            parts: self.parts + usize::from(is_large),
        }
    }
}

impl Batch {
    /// Returns a batch without jobs, for at most `max` jobs.
    pub fn new(max: usize) -> Batch {
        Batch { jobs: Vec::new(), max, body_bytes: 0, size: ReplySize::HEADING, has_cold: false }
    }

    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns whether one more job fits, whose body is `body`. The first one always does.
    pub fn fits(&self, body: &Body) -> bool {
        let body_bytes = self.body_bytes + body.content_len() as usize;
        self.is_empty() || (self.jobs.len() < self.max && body_bytes <= MAX_BODY_BYTES)
    }

    /// Returns the size of the reply with one more job, whose body is `body`.
    pub fn size_with(&self, body: &Body) -> ReplySize {
        self.size.with(body.full_len() as usize)
    }

    /// Removes the jobs that do not fulfil the condition.
    pub fn retain(&mut self, jobs: &Jobs, mut is_kept: impl FnMut(JobKey, u64) -> bool) {
        self.jobs.retain(|&(job, id)| is_kept(job, id));
        let kept = std::mem::take(&mut self.jobs);
        *self = Batch::new(self.max);
        kept.iter().for_each(|&(job, _)| self.count(&jobs[job].body));
        self.jobs = kept;
    }

    /// Returns whether the batch has its maximum number of jobs.
    pub fn is_full(&self) -> bool {
        self.jobs.len() >= self.max
    }

    /// Adds a job.
    pub fn try_push(&mut self, key: JobKey, job: &Job) -> Result<(), NoMemory> {
        headroom::keeping(Headroom::Quarter, || self.jobs.try_reserve(1))?;
        self.jobs.push((key, job.id));
        self.count(&job.body);
        Ok(())
    }

    fn count(&mut self, body: &Body) {
        self.size = self.size_with(body);
        self.body_bytes += body.content_len() as usize;
        self.has_cold |= body.is_cold();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::TubeKey;
    use crate::engine::queue::job::JobParams;
    use crate::engine::time::Nanos;

    #[test]
    fn a_job_that_is_removed_makes_room_for_another() {
        const LEN: u32 = 512 * 1024;
        let params = JobParams { pri: 0, delay_secs: 0, ttr_secs: 1 };
        let (mut jobs, mut batch) = (Jobs::default(), Batch::new(9));
        for id in 1..=2 {
            let body = Body::cold(LEN + 2);
            jobs.try_reserve_one().unwrap();
            let key = jobs.insert(Job::new(id, TubeKey::DEFAULT, params, body, Nanos::ZERO));
            batch.try_push(key, &jobs[key]).unwrap();
        }
        assert!(!batch.fits(&Body::cold(LEN + 2)));
        batch.retain(&jobs, |_, id| id == 2);
        assert!(batch.fits(&Body::cold(LEN + 2)) && batch.size.parts == 1);
        batch.retain(&jobs, |_, _| false);
        assert!(batch.is_empty() && batch.size.parts == 0);
    }
}
