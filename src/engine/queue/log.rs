//! Records what happens to jobs in the binlog.
//!
//! Each put, release, bury, kick and delete makes a record with the state that the job is sent to.
//! Nothing else is recorded. After a restart a job is in the state of its last record, although it
//! may have been reserved or timed out since. Compaction writes the present state of a job; a
//! reserved job is ready after a restart.
//!
//! Each of these rules first reserves space for its record. If there is none, it fails and nothing
//! has changed. Each rule but put makes garbage, and ends with a step of compaction. Without a
//! binlog every reservation succeeds and nothing is recorded.

use super::Queue;
use super::job::{Job, Jobs, State, Target};
use crate::engine::binlog::disk::{FileNumber, Progress};
use crate::engine::binlog::record::{self, Fields, FlushKind, Mark, RecordState};
use crate::engine::binlog::{Binlog, BinlogStats, IoFailed, NoSpace};
use crate::engine::keys::{JobKey, LogKey, TubeKey};
use crate::engine::time::{ClockOffset, Nanos};

/// At most this many bytes of jobs, and the rest of one job, are moved at once, in about 0.2 ms.
const MAX_MOVED_PER_CALL: usize = 256 * 1024;

impl Queue {
    /// Returns whether there is a binlog.
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

    /// Reserves space for the record of a put. `body_len` includes the CR LF.
    pub(super) fn reserve_put(&mut self, tube: TubeKey, body_len: usize) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        binlog.reserve_put(record::full_len(&self.tubes[tube].name, body_len))
    }

    /// Reserves space for the record of a release, bury or kick.
    pub(super) fn reserve_update(&mut self) -> Result<(), NoSpace> {
        self.binlog.as_mut().map_or(Ok(()), Binlog::reserve_update)
    }

    /// Reserves space for the record of a delete.
    pub(super) fn reserve_delete(&mut self) -> Result<(), NoSpace> {
        self.binlog.as_mut().map_or(Ok(()), Binlog::reserve_delete)
    }

    /// Records a put. The job is sent to `to`.
    pub(super) fn record_put(&mut self, key: JobKey, to: Target, now: Nanos) {
        let Some(binlog) = &mut self.binlog else { return };
        let job = &mut self.jobs[key];
        let fields = fields(job, target_state(to, binlog, now), self.clock_offset);
        let body = self.bodies.bytes(&job.body);
        job.log = binlog.put(key, &fields, &self.tubes[job.tube].name, body);
    }

    /// Records a release, bury or kick. The job is sent to `to`.
    pub(super) fn record_update(&mut self, key: JobKey, to: Target, now: Nanos) {
        let Some(binlog) = &mut self.binlog else { return };
        let job = &self.jobs[key];
        let state = target_state(to, binlog, now);
        binlog.update(job.log, &fields(job, state, self.clock_offset));
    }

    /// Reserves space for the record of a flush.
    pub(super) fn reserve_flush(&mut self, tube: TubeKey) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        binlog.reserve_flush(record::full_len(&self.tubes[tube].name, 0))
    }

    /// Records a flush. The deletes of its jobs follow: C beanstalkd skips the record of the flush.
    pub(super) fn record_flush(&mut self, tube: TubeKey, kind: FlushKind, now: Nanos) {
        let Some(binlog) = &mut self.binlog else { return };
        let decided_at = now.to_wall_clock(self.clock_offset);
        binlog.flush(&self.tubes[tube].name, kind, decided_at);
    }

    /// Records the delete of a flushed job.
    pub(super) fn record_flushed(&mut self, job: &Job) {
        let Some(binlog) = &mut self.binlog else { return };
        let state = (RecordState::Deleted, Nanos::ZERO);
        let fields = Fields { mark: Mark::Flushed, ..fields(job, state, self.clock_offset) };
        binlog.delete_flushed(job.log, &fields);
    }

    /// Records that a buried job was reserved: then it `is_held`. It is buried again after a restart,
    /// but a flush of buried jobs before that does not delete it. On a full disk there is no record: a
    /// flush of buried jobs may delete the job if a crash interrupts the flush.
    pub(super) fn record_hold(&mut self, key: JobKey, is_held: bool) {
        let Some(binlog) = &mut self.binlog else { return };
        if binlog.reserve_hold().is_err() {
            return;
        }
        let job = &self.jobs[key];
        let state = (RecordState::Buried, binlog.buried_at(job.log));
        let mark = if is_held { Mark::Held } else { Mark::None };
        let fields = Fields { mark, ..fields(job, state, self.clock_offset) };
        binlog.hold(job.log, &fields);
    }

    /// Records a delete.
    pub(super) fn record_delete(&mut self, job: &Job) {
        let Some(binlog) = &mut self.binlog else { return };
        let state = (RecordState::Deleted, Nanos::ZERO);
        binlog.delete(job.log, &fields(job, state, self.clock_offset));
    }

    /// Writes the records of this iteration, and syncs them if a sync is due.
    pub fn commit(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.binlog.as_mut().map_or(Ok(()), |binlog| binlog.commit(now))
    }

    /// Hands over the changes to a remote disk.
    pub fn hand_over(&mut self) {
        if let Some(binlog) = &mut self.binlog {
            binlog.hand_over();
        }
    }

    /// Returns how far the disk is with the changes, if it is remote.
    pub fn disk_progress(&self) -> Option<Progress> {
        self.binlog.as_ref()?.progress()
    }

    /// Syncs all records and frees the space that is not used. Nothing may be recorded after it.
    pub fn close_binlog(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.binlog.as_mut().map_or(Ok(()), |binlog| binlog.close(now))
    }

    /// Returns the number of the file that has the full record of a job, or 0 without a binlog.
    pub fn file_of(&self, job: &Job) -> FileNumber {
        self.binlog.as_ref().map_or(0, |binlog| binlog.file_of(job.log))
    }

    /// Returns the numbers of the binlog for `stats`.
    pub fn binlog_stats(&self) -> BinlogStats {
        self.binlog.as_ref().map(Binlog::stats).unwrap_or_default()
    }

    /// Returns the bytes of memory that all jobs take. They include the entries in the binlog, bodies
    /// that are arriving or being sent, and free space between them.
    pub fn job_bytes(&self) -> u64 {
        let entries = self.binlog.as_ref().map_or(0, |binlog| binlog.job_table_bytes());
        self.jobs.taken_bytes() + self.bodies.taken_bytes() + entries
    }

    /// Returns the bytes of the pages that jobs take without their bodies: a page is unmapped with its
    /// last entry.
    pub(super) fn mapped_bytes(&self) -> u64 {
        let entries = self.binlog.as_ref().map_or(0, |binlog| binlog.job_table_bytes());
        self.jobs.page_bytes() + entries
    }

    /// Returns at most how many bytes of memory one more job takes. Its body has `full_len` bytes with
    /// the CR LF.
    pub fn bytes_of_a_job(&self, full_len: usize) -> u64 {
        let entry = if self.has_binlog() { Binlog::BYTES_PER_JOB } else { 0 };
        Jobs::MOST_BYTES_OF_A_JOB + self.bodies.growth_for(full_len) + entry
    }

    /// Moves jobs to the current file, if that is due. Further ones are moved by the next calls.
    pub fn compact(&mut self) {
        let most = self.moved_bytes + MAX_MOVED_PER_CALL;
        while self.moved_bytes < most
            && let Some((log, job)) = self.binlog.as_mut().and_then(|binlog| binlog.next_to_move())
        {
            // A record after that of the flush would bring the job back.
            if self.is_flushed(&self.jobs[job]) {
                break;
            }
            if !self.move_in_binlog(log, job, false) {
                break;
            }
        }
    }

    /// Writes the full records of these jobs again, or of as many as there is space for.
    pub(super) fn rewrite(&mut self, jobs: &[JobKey]) {
        for &key in jobs {
            let log = self.jobs[key].log;
            let reserved = self.binlog.as_mut().is_some_and(|binlog| binlog.reserve_move(log));
            if reserved {
                self.move_in_binlog(log, key, true);
            }
        }
        self.moved_bytes = 0;
    }

    /// Moves all jobs out of damaged files, or as many as there is space for.
    pub(super) fn empty_damaged_files(&mut self) {
        while let Some((log, job)) =
            self.binlog.as_mut().and_then(|binlog| binlog.next_in_damaged_file())
        {
            // Its record cannot be read: it is lost, or stays until the next start.
            if !self.move_in_binlog(log, job, true) && self.jobs.get(job).is_some() {
                break;
            }
        }
    }

    /// Writes the full record of a job again. Returns `false` if that is not possible: the record must
    /// be read from the disk first, which is waited for only if it `may_wait`, or it cannot be read.
    fn move_in_binlog(&mut self, log: LogKey, key: JobKey, may_wait: bool) -> bool {
        let cold = if self.jobs[key].body.is_cold() {
            let Some(record) = self.record_to_move(key, may_wait) else { return false };
            Some(record)
        } else {
            None
        };
        let state = self.present_state(key);
        let Some(binlog) = &mut self.binlog else { return false };
        let job = &self.jobs[key];
        assert_eq!(job.log, log, "the entry in the binlog of job {}", job.id);
        let tube = &self.tubes[job.tube].name;
        let fields = fields(job, state, self.clock_offset);
        let body = match &cold {
            None => self.bodies.bytes(&job.body),
            Some(record) => {
                let place = binlog.place(log, tube, job.body.full_len());
                let place = place.expect("the record was just read there");
                match record::body_of(record, place.layout, job.id) {
                    Ok(body) => body,
                    Err(corruption) => {
                        self.lose(key, place, &corruption.to_string());
                        return false;
                    }
                }
            }
        };
        self.moved_bytes += binlog.move_to_current(log, &fields, tube, body);
        true
    }

    /// Returns the present state of a job for a record, and its moment.
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
            State::Detached => unreachable!("compaction runs between two transitions"),
        }
    }
}

/// Returns the state for a record of a job that is sent to `to`, and its moment.
fn target_state(to: Target, binlog: &mut Binlog, now: Nanos) -> (RecordState, Nanos) {
    match to {
        Target::Ready => (RecordState::Ready, Nanos::ZERO),
        Target::Delayed { due } => (RecordState::Delayed, due),
        Target::Buried => (RecordState::Buried, binlog.next_burial(now)),
    }
}

/// Returns the fields of a record. Moments of the engine are converted to wall-clock time.
fn fields(job: &Job, (state, moment): (RecordState, Nanos), clock_offset: ClockOffset) -> Fields {
    let due_or_buried_at = match state {
        RecordState::Delayed | RecordState::Reserved => moment.to_wall_clock(clock_offset),
        RecordState::Ready | RecordState::Buried | RecordState::Deleted => moment,
    };
    Fields {
        id: job.id,
        pri: job.pri,
        delay_secs: job.delay_secs,
        ttr_secs: job.ttr_secs,
        body_len: job.body.full_len(),
        created_at: job.created_at.to_wall_clock(clock_offset),
        due_or_buried_at,
        counts: job.counts,
        state,
        mark: Mark::None,
    }
}
