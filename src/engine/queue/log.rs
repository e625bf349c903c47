//! Records what happens to jobs in the binlog.
//!
//! Each put, release, bury, kick and delete makes a record with the state that the job is sent to. A
//! flush makes one for all of its jobs. A reserve-job of a buried job makes one too. No other
//! command is recorded. After a restart a job is in the state of its last record, although it
//! may have been reserved or timed out since. Compaction writes the present state of a job; a
//! reserved job is ready after a restart. The key of a unique job is recorded before each full record of
//! the job, and once more when the job is deleted and the key is kept.
//!
//! Each of these commands first reserves space for its record. If there is none, it fails and nothing has
//! changed. A release, bury, kick or delete makes garbage, and ends with a step of
//! compaction. Without a binlog every reservation succeeds and nothing is recorded.

use super::Queue;
use super::counts::LargeCounts;
use super::job::{Job, State, Target};
use super::unique::NewKey;
use crate::engine::binlog::record::{self, Decision, Fields, FlushKind, JobState, Mark};
use crate::engine::binlog::{Binlog, FullRecords, NoSpace};
use crate::engine::keys::{JobKey, TubeKey};
use crate::engine::time::{ClockOffset, Nanos};

/// Bytes moved by compaction in one unit of work.
const MOVED_BYTES_PER_WORK: usize = 2048;

impl Queue {
    /// Returns whether each iteration that made records ends in a sync.
    pub fn syncs_each_iteration(&self) -> bool {
        self.binlog.as_ref().is_some_and(|binlog| binlog.syncs_each_iteration())
    }

    /// Reserves space for the records of a put. `body_len` includes the CR LF.
    pub(super) fn reserve_put(
        &mut self,
        tube: TubeKey,
        body_len: usize,
        unique: Option<&NewKey>,
    ) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        let keeps_key = unique.map(|unique| unique.ttl_secs > 0);
        let len = record::full_len(&self.tubes[tube].name, body_len);
        binlog.reserve_put(self.jobs.next_key(), len, keeps_key)
    }

    /// Reserves space for the record of a release, bury or kick.
    pub(super) fn reserve_update(&mut self) -> Result<(), NoSpace> {
        self.binlog.as_mut().map_or(Ok(()), Binlog::reserve_update)
    }

    /// Reserves space for the records of the delete of a job.
    pub(super) fn reserve_delete(&mut self, key: JobKey) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        binlog.reserve_delete(self.unique.ttl_secs(&self.jobs[key]).is_some())
    }

    /// Records a put. The job is sent to `to`.
    pub(super) fn record_put(&mut self, key: JobKey, to: Target) {
        let Some(binlog) = &mut self.binlog else { return };
        let job = &self.jobs[key];
        let fields = fields(job, &self.large_counts, to.record_state(), self.clock_offset);
        let (body, tube) = (self.bodies.bytes(&job.body), &self.tubes[job.tube].name);
        let unique = self.unique.record_of(job, self.clock_offset);
        binlog.put(key, &FullRecords { unique, fields, tube, body });
    }

    /// Records a release, bury or kick. The job is sent to `to`.
    pub(super) fn record_update(&mut self, key: JobKey, to: Target) {
        let Some(binlog) = &mut self.binlog else { return };
        let state = to.record_state();
        binlog.update(key, &fields(&self.jobs[key], &self.large_counts, state, self.clock_offset));
    }

    /// Records a flush. The deletes of its jobs follow: C beanstalkd skips the record of the flush.
    pub(super) fn record_flush(&mut self, tube: TubeKey, kind: FlushKind) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        let decided_at = self.now.to_wall_clock(self.clock_offset);
        binlog.flush(&self.tubes[tube].name, kind, decided_at)
    }

    /// Records that a buried job was reserved: then it `is_held`. It is buried again after a restart,
    /// but a flush of buried jobs before that does not delete it.
    pub(super) fn record_hold(&mut self, key: JobKey, is_held: bool) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        let mark = if is_held { Mark::Held } else { Mark::None };
        let job = &self.jobs[key];
        let state = (JobState::Buried, job.due);
        let fields = Fields { mark, ..fields(job, &self.large_counts, state, self.clock_offset) };
        binlog.hold(key, &fields)
    }

    /// Removes and records a detached job, after [`Queue::reserve_delete`], and frees what it has. If its key is kept
    /// for some time, only that stays. A flush has deleted the job before if `flushed_by` is not `None`.
    #[inline(always)]
    pub(super) fn end_job(&mut self, key: JobKey, flushed_by: Option<Decision>) {
        let kept_until = self.jobs[key].unique().and_then(|_| self.end_key(key, flushed_by));
        let job = match kept_until {
            Some(until) => self.keep_key(key, until),
            None => self.jobs.remove(key),
        };
        if let Some(binlog) = &mut self.binlog {
            let mark = match flushed_by.map(|flush| flush.kind) {
                None => Mark::None,
                Some(FlushKind::All) => Mark::Flushed,
                Some(FlushKind::Buried) => Mark::FlushedBuried,
            };
            let deleted = (JobState::Deleted, Nanos::ZERO);
            let fields = fields(&job, &self.large_counts, deleted, self.clock_offset);
            let kept =
                kept_until.and_then(|_| self.unique.record_of(&self.jobs[key], self.clock_offset));
            binlog.delete(key, &Fields { mark, ..fields }, kept.as_ref());
        }
        self.drop_job(job);
    }

    /// Moves jobs to the current file, if that is due. Further ones are moved by the next calls.
    #[inline]
    pub fn compact(&mut self) {
        if self.binlog.as_ref().is_some_and(Binlog::must_move) {
            self.move_jobs(self.limits.moved_at_once_bytes, false);
        }
    }

    /// Moves about `most_bytes` of what compaction moves now. A read is waited for only if it `may_wait`.
    pub(super) fn move_jobs(&mut self, most_bytes: usize, may_wait: bool) {
        let rest = self.work.give(most_bytes / MOVED_BYTES_PER_WORK);
        while self.work.is_left()
            && let Some(job) = self.binlog.as_mut().and_then(Binlog::next_to_move)
            // A record after that of the flush would bring the job back.
            && !self.is_flushed(&self.jobs[job])
            && self.move_in_binlog(job, may_wait)
        {}
        self.work.end(rest);
    }

    /// Writes the record of a job, or of its kept key, again. Returns `false` if that is not possible: the
    /// record must be read from the disk first, which is waited for only if it `may_wait`, or it cannot
    /// be read.
    pub(super) fn move_in_binlog(&mut self, key: JobKey, may_wait: bool) -> bool {
        let job = &self.jobs[key];
        if job.is_kept() {
            let kept = self.unique.record_of(job, self.clock_offset);
            let Some((binlog, kept)) = self.binlog.as_mut().zip(kept) else { return false };
            let moved = binlog.move_kept_key(key, &kept);
            self.work.spend_for(moved, MOVED_BYTES_PER_WORK);
        } else if job.body.is_cold() {
            return self.move_cold(key, may_wait);
        } else {
            self.write_moved(key, None);
        }
        true
    }

    /// Writes the record of a job again, in its present state, with a body that was read back or that of the job.
    pub(super) fn write_moved(&mut self, key: JobKey, body: Option<&[u8]>) {
        let job = &self.jobs[key];
        let moment = if let State::Buried(_) = job.state { Some(job.due) } else { self.due(job) };
        let state = (job.state.shown(), moment.unwrap_or(Nanos::ZERO));
        let Some(binlog) = &mut self.binlog else { return };
        let tube = &self.tubes[job.tube].name;
        let fields = fields(job, &self.large_counts, state, self.clock_offset);
        let body = body.unwrap_or_else(|| self.bodies.bytes(&job.body));
        let unique = self.unique.record_of(job, self.clock_offset);
        let moved = binlog.move_to_current(key, &FullRecords { unique, fields, tube, body });
        self.work.spend_for(moved, MOVED_BYTES_PER_WORK);
    }
}

impl Target {
    /// Returns the state for a record of a job that is sent to it, and its moment.
    fn record_state(self) -> (JobState, Nanos) {
        match self {
            Target::Ready => (JobState::Ready, Nanos::ZERO),
            Target::Delayed { due } => (JobState::Delayed, due),
            Target::Buried { at } => (JobState::Buried, at),
        }
    }
}

/// Returns the fields of a record. Moments of the engine are converted to wall-clock time.
fn fields(
    job: &Job,
    counts: &LargeCounts,
    (state, moment): (JobState, Nanos),
    clock_offset: ClockOffset,
) -> Fields {
    let due_or_buried_at = match state {
        JobState::Delayed | JobState::Reserved => moment.to_wall_clock(clock_offset),
        JobState::Ready | JobState::Buried | JobState::Deleted => moment,
    };
    Fields {
        id: job.id,
        pri: job.pri,
        delay_secs: job.delay_secs,
        ttr_secs: job.ttr_secs,
        body_len: job.body.full_len(),
        created_at: job.created_at.to_wall_clock(clock_offset),
        due_or_buried_at,
        counts: counts.get(&job.counts),
        state,
        mark: Mark::None,
    }
}
