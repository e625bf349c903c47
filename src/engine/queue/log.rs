//! A chapter of the rules: what the binlog is told of jobs, and when.
//!
//! A record is made of every put, release, bury, kick and delete: where the job is sent, not
//! who gets it there. Nothing else is recorded. A job that was reserved, timed out or came
//! back from a lost connection is, after a restart, where its last record sent it, unless
//! compaction has moved it meanwhile: that writes a job as it stands, and a reserved one comes
//! back ready.
//!
//! Each of these rules first asks for room, and is refused with nothing changed if there is
//! none. All but put make garbage, and end with a step of compaction, for which this chapter
//! brings the jobs. Without a binlog there is always room, and nobody is told.

use super::Queue;
use super::job::{Job, Jobs, State, Target};
use crate::engine::binlog::disk::FileNumber;
use crate::engine::binlog::record::{self, Fields, RecordState};
use crate::engine::binlog::{Binlog, BinlogStats, IoFailed, NoSpace};
use crate::engine::keys::{JobKey, LogKey, TubeKey};
use crate::engine::time::{ClockOffset, Nanos};

impl Queue {
    /// Whether there is a binlog.
    pub fn has_binlog(&self) -> bool {
        self.binlog.is_some()
    }

    /// Returns the binlog, if there is one.
    pub fn binlog(&self) -> Option<&Binlog> {
        self.binlog.as_ref()
    }

    /// Returns whether each iteration that made records ends in a sync.
    pub fn syncs_each_iteration(&self) -> bool {
        self.binlog.as_ref().is_some_and(|binlog| binlog.syncs_each_iteration())
    }

    /// Sees to it that the binlog can take a new job; `body_len` has the CR LF.
    pub(super) fn reserve_put(&mut self, tube: TubeKey, body_len: usize) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        binlog.reserve_put(record::full_len(&self.tubes[tube].name, body_len))
    }

    /// Sees to it that the binlog can take what becomes of a job.
    pub(super) fn reserve_update(&mut self) -> Result<(), NoSpace> {
        self.binlog.as_mut().map_or(Ok(()), Binlog::reserve_update)
    }

    /// Sees to it that the binlog can take the end of a job.
    pub(super) fn reserve_delete(&mut self) -> Result<(), NoSpace> {
        self.binlog.as_mut().map_or(Ok(()), Binlog::reserve_delete)
    }

    /// A new job is sent there.
    pub(super) fn record_put(&mut self, key: JobKey, to: Target, now: Nanos) {
        let Some(binlog) = &mut self.binlog else { return };
        let job = &mut self.jobs[key];
        let fields = fields(job, logged(to, binlog, now), self.drift);
        let body = self.bodies.bytes(&job.body);
        job.log = binlog.put(key, &fields, &self.tubes[job.tube].name, body);
    }

    /// A job is sent there anew.
    pub(super) fn record_update(&mut self, key: JobKey, to: Target, now: Nanos) {
        let Some(binlog) = &mut self.binlog else { return };
        let job = &self.jobs[key];
        let state = logged(to, binlog, now);
        binlog.update(job.log, &fields(job, state, self.drift));
    }

    /// A job is deleted.
    pub(super) fn record_delete(&mut self, job: &Job) {
        let Some(binlog) = &mut self.binlog else { return };
        binlog.delete(job.log, &fields(job, (RecordState::Deleted, Nanos::ZERO), self.drift));
    }

    /// Writes what has been recorded in this turn, and syncs it if it is time for that.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn commit(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.binlog.as_mut().map_or(Ok(()), |binlog| binlog.commit(now))
    }

    /// No more will be recorded.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn close_binlog(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.binlog.as_mut().map_or(Ok(()), |binlog| binlog.close(now))
    }

    /// The number of the file that has the job; 0 without a binlog.
    pub fn file_of(&self, job: &Job) -> FileNumber {
        self.binlog.as_ref().map_or(0, |binlog| binlog.file_of(job.log))
    }

    /// The numbers of the binlog for `stats`.
    pub fn binlog_figures(&self) -> BinlogStats {
        self.binlog.as_ref().map(Binlog::stats).unwrap_or_default()
    }

    /// How many bytes of memory all jobs take, with what the binlog knows of them, bodies that are
    /// arriving or still being sent, and what stands empty between them all.
    pub fn job_bytes(&self) -> u64 {
        let logged = self.binlog.as_ref().map_or(0, |binlog| binlog.segment_bytes());
        self.jobs.taken_bytes() + self.bodies.taken_bytes() + logged
    }

    /// How many one more takes at most whose body has `full_len` bytes with its CR LF.
    pub fn bytes_of_a_job(&self, full_len: usize) -> u64 {
        let logged = if self.has_binlog() { Binlog::BYTES_PER_JOB } else { 0 };
        Jobs::MOST_BYTES_OF_A_JOB + self.bodies.growth_for(full_len) + logged
    }

    /// Moves as many jobs to newer files as it is time for.
    pub(super) fn compact(&mut self) {
        while let Some((log, job)) = self.binlog.as_mut().and_then(|binlog| binlog.next_to_move()) {
            self.move_in_binlog(log, job);
        }
    }

    /// Moves all jobs out of files that are not sound, as far as there is room.
    pub fn empty_damaged_files(&mut self) {
        while let Some((log, job)) = self.binlog.as_mut().and_then(|binlog| binlog.next_in_danger())
        {
            self.move_in_binlog(log, job);
        }
    }

    fn move_in_binlog(&mut self, log: LogKey, key: JobKey) {
        let state = self.present_state(key);
        let Some(binlog) = &mut self.binlog else { return };
        let job = &self.jobs[key];
        let tube = &self.tubes[job.tube].name;
        let fields = fields(job, state, self.drift);
        let body = self.bodies.bytes(&job.body);
        self.moved_bytes += binlog.move_here(log, &fields, tube, body);
    }

    /// The state of a job as a record has it, and the moment that goes with it.
    fn present_state(&self, key: JobKey) -> (RecordState, Nanos) {
        let job = &self.jobs[key];
        let due = || self.due(job).unwrap_or(Nanos::ZERO);
        let buried_at =
            || self.binlog.as_ref().map_or(Nanos::ZERO, |binlog| binlog.buried_at(job.log));
        match job.state {
            State::Ready { .. } => (RecordState::Ready, Nanos::ZERO),
            State::Delayed { .. } => (RecordState::Delayed, due()),
            State::Reserved { .. } => (RecordState::Reserved, due()),
            State::Buried(_) => (RecordState::Buried, buried_at()),
            State::Moving => unreachable!("a step of compaction comes after a job has moved"),
        }
    }
}

/// How a record says where a job is sent, and the moment that goes with it.
fn logged(to: Target, binlog: &mut Binlog, now: Nanos) -> (RecordState, Nanos) {
    match to {
        Target::Ready => (RecordState::Ready, Nanos::ZERO),
        Target::Delayed { due } => (RecordState::Delayed, due),
        Target::Buried => (RecordState::Buried, binlog.next_burial(now)),
    }
}

/// Moments of the engine become the time of day.
fn fields(job: &Job, (state, moment): (RecordState, Nanos), drift: ClockOffset) -> Fields {
    let due_or_buried_at = match state {
        RecordState::Delayed | RecordState::Reserved => moment.to_wall_clock(drift),
        RecordState::Ready | RecordState::Buried | RecordState::Deleted => moment,
    };
    Fields {
        id: job.id,
        pri: job.pri,
        delay_secs: job.delay_secs,
        ttr_secs: job.ttr_secs,
        body_len: job.body.full_len(),
        created_at: job.created_at.to_wall_clock(drift),
        due_or_buried_at,
        counts: job.counts,
        state,
    }
}
