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
use super::flush::Decision;
use super::job::{Job, Jobs, LogRef, LogTarget, State, Target};
use super::unique::{NewKey, UniqueKeys};
use crate::engine::binlog::disk::{FileNumber, Progress};
use crate::engine::binlog::key_record::KeyRecord;
use crate::engine::binlog::record::{self, Fields, FlushKind, Mark, RecordState};
use crate::engine::binlog::segments::Owner;
use crate::engine::binlog::{Binlog, BinlogStats, IoFailed, KeyNeeds, NoSpace};
use crate::engine::keys::{JobKey, KeptKey, LogKey, TubeKey};
use crate::engine::time::{ClockOffset, Nanos};

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

    /// Reserves space for the records of a put. `body_len` includes the CR LF.
    pub(super) fn reserve_put(
        &mut self,
        tube: TubeKey,
        body_len: usize,
        unique: Option<&NewKey>,
    ) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        let key = unique.map(|unique| KeyNeeds { is_kept: unique.ttl_secs > 0 });
        binlog.reserve_put(record::full_len(&self.tubes[tube].name, body_len), key)
    }

    /// Reserves space for the record of a release, bury or kick.
    pub(super) fn reserve_update(&mut self) -> Result<(), NoSpace> {
        self.binlog.as_mut().map_or(Ok(()), Binlog::reserve_update)
    }

    /// Reserves space for the records of a delete, and memory for a key that is kept.
    pub(super) fn reserve_delete(&mut self, log: LogRef) -> Result<(), NoSpace> {
        if log == LogRef::none() {
            return Ok(());
        }
        let is_kept = self.unique.will_keep(log);
        if is_kept {
            self.unique.try_reserve_kept()?;
        }
        self.binlog.as_mut().map_or(Ok(()), |binlog| binlog.reserve_delete(is_kept))
    }

    /// Records a put. The job is sent to `to`.
    pub(super) fn record_put(&mut self, key: JobKey, to: Target, now: Nanos) {
        let Some(binlog) = &mut self.binlog else { return };
        let job = &self.jobs[key];
        let fields = fields(job, &self.jobs, target_state(to, binlog, now), self.clock_offset);
        let body = self.bodies.bytes(&job.body);
        let unique = self.unique.record_of(job);
        let log = binlog.put(key, unique.as_ref(), &fields, &self.tubes[job.tube].name, body);
        self.unique.set_log(&mut self.jobs[key], log);
    }

    /// Records a release, bury or kick. The job is sent to `to`.
    pub(super) fn record_update(&mut self, key: JobKey, to: Target, now: Nanos) {
        let Some(binlog) = &mut self.binlog else { return };
        let job = &self.jobs[key];
        let state = target_state(to, binlog, now);
        binlog.update(
            self.unique.log_of(job.log),
            &fields(job, &self.jobs, state, self.clock_offset),
        );
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

    /// Records that a buried job was reserved: then it `is_held`. It is buried again after a restart,
    /// but a flush of buried jobs before that does not delete it.
    pub(super) fn record_hold(&mut self, key: JobKey, is_held: bool) -> Result<(), NoSpace> {
        let Some(binlog) = &mut self.binlog else { return Ok(()) };
        binlog.reserve_hold()?;
        let job = &self.jobs[key];
        let log = self.unique.log_of(job.log);
        let state = (RecordState::Buried, binlog.buried_at(log));
        let mark = if is_held { Mark::Held } else { Mark::None };
        let fields = Fields { mark, ..fields(job, &self.jobs, state, self.clock_offset) };
        binlog.hold(log, &fields);
        Ok(())
    }

    /// Records the delete of a job that was removed, and ends its key.
    pub(super) fn record_delete(&mut self, key: JobKey, job: &Job, now: Nanos) {
        if job.log == LogRef::none() {
            return;
        }
        match job.log.target() {
            LogTarget::Entry(log) => self.record_end(job, log, None),
            LogTarget::Unique(_) => self.end_unique(key, job, None, now),
        }
    }

    /// Records the delete of a job that a flush has deleted, and ends its key.
    pub(super) fn record_flushed(
        &mut self,
        key: JobKey,
        job: &Job,
        flushed_by: Decision,
        now: Nanos,
    ) {
        match job.log.target() {
            LogTarget::Entry(log) => self.record_end(job, log, Some(flushed_by.kind)),
            LogTarget::Unique(_) => self.end_unique(key, job, Some(flushed_by), now),
        }
    }

    /// Records the delete of a job whose key, if it had one, is not kept.
    pub(super) fn record_end(&mut self, job: &Job, log: LogKey, flushed_by: Option<FlushKind>) {
        let Some(binlog) = &mut self.binlog else { return };
        let fields = end_fields(job, &self.jobs, flushed_by, self.clock_offset);
        if flushed_by.is_some() {
            binlog.delete_flushed(log, &fields);
        } else {
            binlog.delete(log, &fields);
        }
    }

    /// Records the delete of a job whose key is kept, after [`Queue::reserve_delete`].
    pub(super) fn record_kept(&mut self, job: &Job, key: KeptKey, flushed_by: Option<FlushKind>) {
        let kept = self.kept_record(key);
        let log = self.unique.log_of_kept(key);
        let Some(binlog) = &mut self.binlog else { return };
        let fields = end_fields(job, &self.jobs, flushed_by, self.clock_offset);
        binlog.delete_and_keep(log, key, &kept, &fields, flushed_by.is_some());
    }

    /// Returns the record of a kept key.
    fn kept_record(&self, key: KeptKey) -> KeyRecord {
        let record = self.unique.record_of_kept(key);
        let kept_until = record.kept_until.map(|until| until.to_wall_clock(self.clock_offset));
        KeyRecord { kept_until, ..record }
    }

    /// Forgets the entry of a kept key.
    pub(super) fn forget_key(&mut self, log: LogKey) {
        if let Some(binlog) = &mut self.binlog {
            binlog.forget_key(log);
        }
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
        self.binlog.as_ref().map_or(0, |binlog| binlog.file_of(self.unique.log_of(job.log)))
    }

    /// Returns the numbers of the binlog for `stats`.
    pub fn binlog_stats(&self) -> BinlogStats {
        self.binlog.as_ref().map(Binlog::stats).unwrap_or_default()
    }

    /// Returns the bytes of memory that all jobs take. They include the entries in the binlog, bodies
    /// that are arriving or being sent, keys, and free space between them.
    pub fn job_bytes(&self) -> u64 {
        let entries = self.binlog.as_ref().map_or(0, |binlog| binlog.job_table_bytes());
        let keys = self.unique.taken_bytes();
        let read_back = self.body_cache.read_bodies.all_granted();
        self.jobs.taken_bytes() + self.bodies.taken_bytes() + read_back + entries + keys
    }

    /// Returns the bytes of the pages that jobs take without their bodies: a page is unmapped with its
    /// last entry.
    pub(super) fn mapped_bytes(&self) -> u64 {
        let entries = self.binlog.as_ref().map_or(0, |binlog| binlog.job_table_bytes());
        self.jobs.page_bytes() + self.unique.page_bytes() + entries
    }

    /// Returns at most how many bytes of memory one more job takes. Its body has `full_len` bytes with
    /// the CR LF.
    pub fn bytes_of_a_job(&self, full_len: usize, is_unique: bool) -> u64 {
        let entry = if self.has_binlog() { Binlog::BYTES_PER_JOB } else { 0 };
        let key = if is_unique { UniqueKeys::MOST_GROWTH_OF_A_KEY } else { 0 };
        Jobs::MOST_BYTES_OF_A_JOB + self.bodies.growth_for(full_len) + entry + key
    }

    /// Moves jobs to the current file, if that is due. Further ones are moved by the next calls.
    pub fn compact(&mut self) {
        if self.binlog.is_none() {
            return;
        }
        let most = self.moved_bytes + self.limits.moved_at_once_bytes;
        while self.moved_bytes < most
            && let Some((log, owner)) =
                self.binlog.as_mut().and_then(|binlog| binlog.next_to_move())
        {
            // A record after that of the flush would bring the job back.
            if let Owner::Job(job) = owner
                && self.is_flushed(&self.jobs[job])
            {
                break;
            }
            if !self.move_in_binlog(log, owner, false) {
                break;
            }
        }
    }

    /// Writes the full records of these jobs again, or of as many as there is space for.
    pub(super) fn rewrite(&mut self, jobs: &[JobKey]) {
        for &key in jobs {
            let log = self.unique.log_of(self.jobs[key].log);
            let reserved = self.binlog.as_mut().is_some_and(|binlog| binlog.reserve_move(log));
            if reserved {
                self.move_in_binlog(log, Owner::Job(key), true);
            }
        }
    }

    /// Moves all jobs out of damaged files, or as many as there is space for.
    pub(super) fn empty_damaged_files(&mut self) {
        while let Some((log, owner)) =
            self.binlog.as_mut().and_then(|binlog| binlog.next_in_damaged_file())
        {
            // A record that cannot be read is lost, or stays until the next start.
            let is_moved = self.move_in_binlog(log, owner, true);
            let stays = matches!(owner, Owner::Job(job) if self.jobs.get(job).is_some());
            if !is_moved && stays {
                break;
            }
        }
    }

    /// Writes the record of a job or of a kept key again. Returns `false` if that is not possible: the
    /// record must be read from the disk first, which is waited for only if it `may_wait`, or it cannot
    /// be read.
    fn move_in_binlog(&mut self, log: LogKey, owner: Owner, may_wait: bool) -> bool {
        let moved = match owner {
            Owner::Job(key) => self.move_job_in_binlog(log, key, may_wait),
            Owner::KeptKey(key) => {
                let kept = self.kept_record(key);
                self.binlog.as_mut().map(|binlog| binlog.move_kept_key(log, &kept))
            }
        };
        self.moved_bytes += usize::try_from(moved.unwrap_or(0)).unwrap_or(usize::MAX);
        moved.is_some()
    }

    fn move_job_in_binlog(&mut self, log: LogKey, key: JobKey, may_wait: bool) -> Option<u64> {
        let cold = if self.jobs[key].body.is_cold() {
            Some(self.record_to_move(key, may_wait)?)
        } else {
            None
        };
        let state = self.present_state(key);
        let binlog = self.binlog.as_mut()?;
        let job = &self.jobs[key];
        assert_eq!(self.unique.log_of(job.log), log, "the entry in the binlog of job {}", job.id);
        let tube = &self.tubes[job.tube].name;
        let fields = fields(job, &self.jobs, state, self.clock_offset);
        let body = match &cold {
            None => self.bodies.bytes(&job.body),
            Some(record) => {
                let place = binlog.place(log, tube, job.body.full_len());
                let place = place.expect("the record was just read there");
                match record::body_of(record, place.layout, job.id) {
                    Ok(body) => body,
                    Err(corruption) => {
                        self.lose(key, place, &corruption.to_string());
                        return None;
                    }
                }
            }
        };
        let unique = self.unique.record_of(job);
        Some(binlog.move_to_current(log, unique.as_ref(), &fields, tube, body))
    }

    /// Returns the present state of a job for a record, and its moment.
    fn present_state(&self, key: JobKey) -> (RecordState, Nanos) {
        let job = &self.jobs[key];
        let due = || self.due(job).unwrap_or(Nanos::ZERO);
        let log = self.unique.log_of(job.log);
        let buried_at = || self.binlog.as_ref().map_or(Nanos::ZERO, |binlog| binlog.buried_at(log));
        match job.state {
            State::Ready { .. } => (RecordState::Ready, Nanos::ZERO),
            State::Delayed(_) | State::Postponed(_) => (RecordState::Delayed, due()),
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

/// Returns the fields of the record of a delete.
fn end_fields(
    job: &Job,
    jobs: &Jobs,
    flushed_by: Option<FlushKind>,
    clock_offset: ClockOffset,
) -> Fields {
    let mark = match flushed_by {
        None => Mark::None,
        Some(FlushKind::All) => Mark::Flushed,
        Some(FlushKind::Buried) => Mark::FlushedBuried,
    };
    Fields { mark, ..fields(job, jobs, (RecordState::Deleted, Nanos::ZERO), clock_offset) }
}

/// Returns the fields of a record. Moments of the engine are converted to wall-clock time.
fn fields(
    job: &Job,
    jobs: &Jobs,
    (state, moment): (RecordState, Nanos),
    clock_offset: ClockOffset,
) -> Fields {
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
        counts: jobs.counts(job),
        state,
        mark: Mark::None,
    }
}
