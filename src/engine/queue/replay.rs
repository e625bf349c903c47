//! Rebuilds a queue from the files of its binlog.
//!
//! Records are applied in the order in which they were made. Then each job enters the structure of
//! the state in its last record. Damage is logged with its file and offset. A job whose full record
//! is damaged stays as an older file has it, or is lost. A damaged file is renamed when its intact
//! jobs are in a new one.
//!
//! The bytes that a crash has left behind the very last record are no damage. They may be an
//! acknowledged record only if the operator chose not to sync each iteration.
//!
//! A function that returns `TryReserveError` found too little memory for the jobs.

mod flushes;
mod keys;

use super::Queue;
use super::flush::Decision;
use super::job::{Job, JobParams, LogRef, Target};
use super::tube::Tubes;
use crate::engine::binlog::disk::{Disk, FileNumber};
use crate::engine::binlog::gaps::Gaps;
use crate::engine::binlog::key_record::{self, KeyRecord};
use crate::engine::binlog::reader::{Damage, Item, ReadError, Reader, Record, TornTail};
use crate::engine::binlog::record::{
    self, Fields, FlushCounts, FlushKind, HIGHEST_ID, Layout, Mark, RecordState,
};
use crate::engine::binlog::segments::{Segment, Segments};
use crate::engine::binlog::{BeginError, Binlog, IoFailed, Policy, Resume};
use crate::engine::collections::secondary_map::SecondaryMap;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, TubeKey};
use crate::engine::time::Nanos;
use flushes::Flushes;
use keys::KEY_LEN;
use log::{error, info, warn};
use std::collections::{HashSet, TryReserveError};
use std::fmt;
use std::io;

/// The result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The number of jobs.
    pub jobs: u64,
    /// The number of files.
    pub files: usize,
    /// The bytes of all records.
    pub used_bytes: u64,
    /// The highest id that was given out.
    pub last_id: u64,
}

/// Why the queue cannot be rebuilt.
#[derive(Debug)]
pub enum ReplayError {
    /// The directory cannot be listed.
    List(io::Error),
    /// A file cannot be read.
    Read(FileNumber, ReadError),
    /// There is too little memory for all jobs.
    NoMemory(TryReserveError),
    /// No new file can be created.
    Begin(io::Error),
    /// A write or a sync has failed.
    Failed(IoFailed),
}

/// A queue that is being rebuilt, file by file.
#[derive(Debug)]
pub struct Replay<'q> {
    disk: Box<dyn Disk>,
    numbers: Vec<FileNumber>,
    files_read: usize,
    state: ReplayState<'q>,
}

/// The jobs and files that were read so far.
#[derive(Debug)]
struct ReplayState<'q> {
    queue: &'q mut Queue,
    segments: Segments,
    gaps: Gaps,
    resume: Resume,
    /// The tube of the last full record.
    tube: TubeKey,
    used_bytes: u64,
    tail: TornTail,
    /// The state of each job in its last record.
    last_states: SecondaryMap<JobKey, LastState>,
    /// The flushes of each tube.
    flushes: Flushes,
    /// The flushes of its tube before the last record of a job. Jobs without an entry had none.
    flushes_before: SecondaryMap<JobKey, FlushCounts>,
    /// Flushed jobs whose deletes are not recorded, and their flushes.
    flushed: Vec<(JobKey, Decision)>,
    /// The record of a key, and its file, if that was the last record.
    key_before: Option<(FileNumber, KeyRecord)>,
    /// Buried jobs that workers had reserved.
    held: Vec<JobKey>,
    /// Jobs whose full record is written again at the end. For C beanstalkd they are deleted, because the
    /// record of their flush is lost; or C beanstalkd has moved them to a newer file without the record of
    /// their key.
    to_rewrite: HashSet<JobKey>,
    /// The ids of jobs with a damaged full record and no intact one.
    lost: HashSet<u64>,
    /// The number of damaged places.
    damages: u64,
}

/// The state of a job in its last record.
#[derive(Clone, Copy, Debug)]
struct LastState {
    state: RecordState,
    /// When the job was buried, or when it is due.
    moment: Nanos,
    /// A worker had reserved the job, which is buried.
    is_held: bool,
}

impl LastState {
    /// Returns whether the job is buried, and no worker had reserved it.
    fn is_buried(self) -> bool {
        self.state == RecordState::Buried && !self.is_held
    }
}

/// At most this many ids can be missing between two records. An id that is farther away is damaged.
const MAX_ID_GAP: u64 = 1 << 20;

/// At most this many damaged places are logged one by one. The rest is counted.
const MAX_LOGGED_DAMAGES: u64 = 100;

impl Queue {
    /// Begins to read the binlog on `disk`. There must be no job and no connection.
    pub fn begin_replay(&mut self, mut disk: Box<dyn Disk>) -> Result<Replay<'_>, ReplayError> {
        let numbers = disk.list().map_err(ReplayError::List)?;
        let state = ReplayState {
            queue: self,
            segments: Segments::default(),
            gaps: Gaps::default(),
            resume: Resume::default(),
            tube: Tubes::DEFAULT,
            used_bytes: 0,
            tail: TornTail::default(),
            last_states: SecondaryMap::default(),
            flushes: Flushes::default(),
            flushes_before: SecondaryMap::default(),
            flushed: Vec::new(),
            key_before: None,
            held: Vec::new(),
            to_rewrite: HashSet::new(),
            lost: HashSet::new(),
            damages: 0,
        };
        Ok(Replay { disk, numbers, files_read: 0, state })
    }

    /// Deletes jobs whose flush was recorded before the server ended.
    fn finish_flushes(&mut self, flushed: &[(JobKey, Decision)], now: Nanos) {
        for &(key, Decision { kind, decided_at }) in flushed {
            let job = self.jobs.remove(key);
            // The clock may have been set back since.
            let decision = Decision { kind, decided_at: decided_at.min(now) };
            self.record_flushed(key, &job, decision, now);
            self.drop_job(job);
        }
        if !flushed.is_empty() {
            info!("the server ended during a flush: deleted the {} jobs left", flushed.len());
        }
    }

    /// Records that buried jobs are not reserved any more: a flush of buried jobs deletes them. Without
    /// space for that, the next start keeps them if a crash interrupts such a flush.
    fn end_holds(&mut self, held: &[JobKey]) {
        for &key in held {
            let _ = self.record_hold(key, false);
        }
    }

    fn quarantine_damaged_files(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.empty_damaged_files();
        let Some(binlog) = self.binlog.as_mut().filter(|binlog| binlog.has_damaged()) else {
            return Ok(());
        };
        binlog.remove_all(now)?;
        if binlog.has_damaged() {
            warn!("damaged files are still needed or cannot be renamed; keeping them");
        }
        Ok(())
    }
}

impl Replay<'_> {
    /// Returns the file that is read next.
    pub fn next_file(&self) -> Option<FileNumber> {
        self.numbers.get(self.files_read).copied()
    }

    /// Reads the next file, if there is one. After an error the replay cannot continue.
    pub fn read_file(&mut self) -> Result<(), ReplayError> {
        let Some(number) = self.next_file() else { return Ok(()) };
        self.state.read_file(&mut *self.disk, number)?;
        self.files_read += 1;
        let (files_read, files) = (self.files_read, self.numbers.len());
        let jobs = self.state.segments.job_count();
        info!("binlog.{number}: read, {files_read} of {files} files, {jobs} jobs");
        Ok(())
    }

    /// Moves all jobs to their states, after all files were read, and opens the binlog for new
    /// records. After an error no record is lost.
    pub fn finish(self, policy: Policy, now: Nanos) -> Result<Recovered, ReplayError> {
        let Replay { disk, numbers, files_read, mut state } = self;
        for (before, after) in state.gaps.lost(&numbers) {
            error!(
                "no file between binlog.{before} and binlog.{after}: their records are lost; \
                 continuing without them, so deleted jobs may be back"
            );
        }
        state.log_torn_tail();
        state.place_jobs(now).map_err(ReplayError::NoMemory)?;
        let ReplayState {
            queue,
            segments,
            gaps,
            resume,
            used_bytes,
            lost,
            damages,
            flushed,
            held,
            to_rewrite,
            ..
        } = state;
        let jobs = segments.job_count();
        assert_eq!(jobs, queue.jobs.len() as u64, "jobs with an entry in the binlog, and all jobs");
        let jobs = jobs - flushed.len() as u64;
        let recovered = Recovered { jobs, files: files_read, used_bytes, last_id: resume.id };
        if damages > 0 {
            error!(
                "the binlog is damaged in {damages} places: {} jobs lost, {} kept",
                lost.len(),
                recovered.jobs
            );
        }
        let binlog = Binlog::begin(disk, policy, (segments, gaps), resume, now);
        queue.binlog = Some(binlog.map_err(|error| match error {
            BeginError::NoFile(error) => ReplayError::Begin(error),
            BeginError::Failed(failure) => ReplayError::Failed(failure),
        })?);
        queue.finish_flushes(&flushed, now);
        queue.end_holds(&held);
        // A later flush may have deleted some of them.
        let to_rewrite = to_rewrite.into_iter().filter(|&key| queue.jobs.get(key).is_some());
        let to_rewrite: Vec<JobKey> = to_rewrite.collect();
        queue.rewrite(&to_rewrite);
        queue.quarantine_damaged_files(now).map_err(ReplayError::Failed)?;
        Ok(recovered)
    }
}

impl ReplayState<'_> {
    // ---- One file ----

    fn read_file(&mut self, disk: &mut dyn Disk, number: FileNumber) -> Result<(), ReplayError> {
        let failed = |error| ReplayError::Read(number, error);
        let mut reader = Reader::open(disk, number).map_err(failed)?;
        self.segments.try_reserve_file().map_err(ReplayError::NoMemory)?;
        let mut segment = Segment::new(number, reader.size(), 0);
        segment.nonce = reader.nonce();
        segment.layout = reader.layout();
        self.segments.push(segment);
        let (last_id, layout) = (reader.last_id(), reader.layout());
        self.note_id(last_id);
        loop {
            match reader.next_item().map_err(failed)? {
                Item::Record(record) => {
                    self.count_tail_as_damage();
                    self.apply(number, layout, &record).map_err(ReplayError::NoMemory)?;
                }
                Item::Damage(damage) => {
                    self.key_before = None;
                    self.count_tail_as_damage();
                    self.note_damage(number, &damage);
                }
                Item::End(end) => {
                    if end.tail.is_some() {
                        self.key_before = None;
                    }
                    self.used_bytes += end.used;
                    self.segments.by_number(number).used = end.used;
                    self.segments.close_file(self.segments.len() - 1);
                    let damage = end.tail.and_then(|tail| self.tail.begins(number, tail));
                    if let Some((number, damage)) = damage {
                        self.note_damage(number, &damage);
                    }
                    return Ok(());
                }
            }
        }
    }

    fn count_tail_as_damage(&mut self) {
        if let Some((number, damage)) = self.tail.take() {
            self.note_damage(number, &damage);
        }
    }

    fn note_damage(&mut self, number: FileNumber, damage: &Damage) {
        self.segments.by_number(number).is_damaged = true;
        self.damages += 1;
        let effect = match damage.id {
            Some(id) if record::flush_kind(id).is_some() => {
                "; it was the record of a flush: some of the flushed jobs may be back".to_owned()
            }
            Some(id) if key_record::is_key(id) => {
                "; it was the key of a job: another job with this key may be put".to_owned()
            }
            Some(id) if self.queue.jobs.find(id).is_some() => {
                format!("; keeping job {id} as it was before")
            }
            Some(id) if damage.is_full => {
                // The id itself may be damaged.
                if self.is_near(id) {
                    self.note_id(id);
                }
                // Without memory for the id, the job is not counted.
                if headroom::leave(Headroom::Quarter, || self.lost.try_reserve(1)).is_ok() {
                    self.lost.insert(id);
                }
                format!("; job {id} is lost, unless a newer record has it")
            }
            Some(id) => format!("; ignoring it: there is no job {id}"),
            None => String::new(),
        };
        if self.damages <= MAX_LOGGED_DAMAGES {
            let Damage { offset, len, cause, .. } = damage;
            error!("binlog.{number}:{offset}: {cause} ({len} bytes){effect}");
        }
    }

    /// Logs the bytes that a crash has left. They are cut off when the binlog begins.
    fn log_torn_tail(&mut self) {
        if let Some((number, Damage { offset, len, cause, .. })) = self.tail.take() {
            warn!(
                "binlog.{number}:{offset}: the last record is torn: {cause}; cutting {len} bytes"
            );
        }
    }

    /// Notes that an id was given out. Huge ids are ignored unless they are near the last one, because
    /// few ids are left behind them.
    fn note_id(&mut self, id: u64) {
        if id <= HIGHEST_ID || self.is_near(id) {
            self.resume.id = self.resume.id.max(id);
        }
    }

    fn is_near(&self, id: u64) -> bool {
        id.saturating_sub(self.resume.id) < MAX_ID_GAP
    }

    // ---- One record ----

    fn apply(
        &mut self,
        number: FileNumber,
        layout: Layout,
        record: &Record<'_>,
    ) -> Result<(), TryReserveError> {
        let Record { fields, tube, body, .. } = *record;
        // They are also between the record of a kept key and that of the delete, in the next file.
        if let Some(gap) = record.gap {
            self.gaps.add(gap);
            return Ok(());
        }
        if let Some(key) = record.key {
            return self.apply_key(number, key);
        }
        let key_before = self.key_before.take().filter(|(_, key)| key.id == fields.id);
        if let Some(kind) = record.flush {
            self.segments.supersede_file(0);
            return self.apply_flush(kind, tube, fields.created_at);
        }
        self.note_id(fields.id);
        let known = self.queue.jobs.find(fields.id);
        if fields.state == RecordState::Deleted {
            if let Some(key) = known
                && !self.allows_delete(key, fields.mark)
            {
                // The record of the flush is lost, so the flush has not happened.
                headroom::leave(Headroom::Quarter, || self.to_rewrite.try_reserve(1))?;
                self.to_rewrite.insert(key);
                return Ok(());
            }
            self.lost.remove(&fields.id);
            if let Some(key) = known {
                self.to_rewrite.remove(&key);
                self.flushes_before.remove(key);
                self.last_states.remove(key);
                let job = self.queue.jobs.remove(key);
                self.supersede(job.log);
                self.remove_job(key, &job);
                self.queue.drop_job(job);
                if let Some((number, key)) = key_before {
                    self.keep_key(number, &key)?;
                }
            }
            return Ok(());
        }
        let is_full = tube.is_some();
        let key = match (known, tube.zip(body)) {
            (Some(key), None) => key,
            (known, Some((tube, body))) => {
                self.lost.remove(&fields.id);
                let place = (number, record.offset);
                let key = self.apply_full(place, known, &fields, tube, body)?;
                let key_before = key_before.filter(|(_, key)| key.kept_until.is_none());
                if let Some((_, record)) = key_before {
                    self.give_key(key, &record)?;
                }
                key
            }
            // Its full record was in a file that is removed.
            (None, None) => return Ok(()),
        };
        self.supersede(self.queue.jobs[key].log);
        let job = &mut self.queue.jobs[key];
        job.pri = fields.pri;
        job.delay_secs = fields.delay_secs;
        job.ttr_secs = fields.ttr_secs.max(1);
        job.created_at = fields.created_at;
        self.queue.jobs.set_counts(key, fields.counts);
        self.apply_state(key, &fields, is_full, layout.has_checksums())?;
        self.note_flushes(key)
    }

    /// Notes that the present record supersedes that of a job.
    fn supersede(&mut self, log: LogRef) {
        self.segments.supersede(self.queue.unique.log_of(log));
    }

    /// Applies the full record at this place. It adds a job, or replaces the tube and the body of a
    /// known one.
    fn apply_full(
        &mut self,
        (number, offset): (FileNumber, u64),
        known: Option<JobKey>,
        fields: &Fields,
        tube: &str,
        body: &[u8],
    ) -> Result<JobKey, TryReserveError> {
        // Its length when compaction writes it.
        let mut len = record::full_len(tube, body.len()) as u64;
        let tube = self.find_tube(tube)?;
        if let Some(key) = known {
            self.queue.replace_body(key, tube, body, offset)?;
            self.to_rewrite.remove(&key);
            let log = self.queue.jobs[key].log;
            if log.unique().is_some() {
                // A record of C beanstalkd, which has moved the job, has no key before it.
                len += KEY_LEN;
                headroom::leave(Headroom::Quarter, || self.to_rewrite.try_reserve(1))?;
                self.to_rewrite.insert(key);
            }
            self.segments.move_job(self.queue.unique.log_of(log), number, offset, len);
            return Ok(key);
        }
        self.queue.jobs.try_reserve_one()?;
        self.segments.try_reserve_one()?;
        let Fields { id, pri, delay_secs, ttr_secs, created_at, .. } = *fields;
        let params = JobParams { pri, delay_secs, ttr_secs };
        let body = self.queue.body_of_record(tube, body, offset)?;
        let key = self.queue.jobs.insert(Job::new(id, tube, params, body, created_at));
        self.queue.jobs[key].log = self.segments.add_job(key, number, offset, len).into();
        Ok(key)
    }

    /// Applies the record of a flush. The jobs are still needed: their deletes may not be recorded.
    fn apply_flush(
        &mut self,
        kind: FlushKind,
        tube: Option<&str>,
        decided_at: Nanos,
    ) -> Result<(), TryReserveError> {
        // In a tube without jobs there is nothing to flush.
        let Some(key) = tube.and_then(|tube| self.queue.tubes.find(tube)) else { return Ok(()) };
        self.flushes.add(key, kind, decided_at)
    }

    /// Notes how many flushes of its tube were before a record of the job. After it, none of them deletes
    /// the job: the server records nothing of a flushed job but its delete, so C beanstalkd, which skips
    /// the record of a flush, has made this record.
    fn note_flushes(&mut self, key: JobKey) -> Result<(), TryReserveError> {
        let now = self.flushes.counts(self.queue.jobs[key].tube);
        match self.flushes_before.get_mut(key) {
            Some(before) => *before = now,
            None if now == FlushCounts::default() => {}
            None => self.flushes_before.try_insert(key, now)?,
        }
        Ok(())
    }

    /// Returns the flush that has deleted the job, or `None`.
    fn flush_of(&self, key: JobKey) -> Option<Decision> {
        let before = self.flushes_before.get(key).copied().unwrap_or_default();
        let tube = self.queue.jobs[key].tube;
        self.flushes.first_after(tube, before, self.last_states[key].is_buried())
    }

    /// Returns whether the record of a delete of the job with this mark counts.
    fn allows_delete(&self, key: JobKey, mark: Mark) -> bool {
        let before = self.flushes_before.get(key).copied().unwrap_or_default();
        let flushes = self.flushes.counts(self.queue.jobs[key].tube);
        flushes.allow(mark, before, self.last_states[key].is_buried())
    }

    /// Returns the tube with this name. Most jobs are in the tube of the job before.
    fn find_tube(&mut self, name: &str) -> Result<TubeKey, TryReserveError> {
        if *self.queue.tubes[self.tube].name != *name {
            self.tube = self.queue.find_or_create_tube(name)?;
        }
        Ok(self.tube)
    }

    /// Notes the state in a record. A record of C beanstalkd, without checksum, does not have the
    /// moment of a bury, which was later than that of the bury before.
    fn apply_state(
        &mut self,
        key: JobKey,
        fields: &Fields,
        is_full: bool,
        has_moment: bool,
    ) -> Result<(), TryReserveError> {
        let state = fields.state;
        let moment = match self.last_states.get(key) {
            _ if state != RecordState::Buried || has_moment => fields.due_or_buried_at,
            // Compaction has moved the job to a newer file.
            Some(before) if is_full && before.state == RecordState::Buried => before.moment,
            Some(_) | None => self.resume.buried_at + Nanos::ONE,
        };
        if state == RecordState::Buried {
            self.resume.buried_at = self.resume.buried_at.max(moment);
        }
        let last = LastState { state, moment, is_held: fields.mark == Mark::Held };
        match self.last_states.get_mut(key) {
            Some(before) => *before = last,
            None => self.last_states.try_insert(key, last)?,
        }
        Ok(())
    }

    // ---- All records ----

    /// Moves each job to the state in its last record.
    fn place_jobs(&mut self, now: Nanos) -> Result<(), TryReserveError> {
        let mut buried = Vec::new();
        for key in self.segments.jobs() {
            if let Some(decision) = self.flush_of(key) {
                headroom::leave(Headroom::Quarter, || self.flushed.try_reserve(1))?;
                self.flushed.push((key, decision));
                continue;
            }
            let LastState { state, moment, is_held } = self.last_states[key];
            match state {
                RecordState::Buried => {
                    headroom::leave(Headroom::Quarter, || {
                        buried.try_reserve(1)?;
                        self.held.try_reserve(1)
                    })?;
                    buried.push((moment, key));
                    self.held.extend(is_held.then_some(key));
                }
                // If the clock was set back, the rest of the delay is at most the delay.
                RecordState::Delayed if moment > now && self.queue.jobs[key].delay_secs > 0 => {
                    let latest = now + Nanos::from_secs(self.queue.jobs[key].delay_secs);
                    self.queue.attach(key, Target::Delayed { due: moment.min(latest) }, now);
                }
                RecordState::Delayed | RecordState::Ready | RecordState::Reserved => {
                    self.queue.attach(key, Target::Ready, now);
                }
                RecordState::Deleted => unreachable!("deleted jobs are removed"),
            }
        }
        buried.sort_unstable();
        for (moment, key) in buried {
            let log = self.queue.unique.log_of(self.queue.jobs[key].log);
            self.segments.set_buried_at(log, Some(moment))?;
            self.queue.attach(key, Target::Buried, now);
        }
        // If the clock was set back, the rest of the time of a kept key is at most its TTL.
        self.queue.unique.limit_kept(now);
        self.queue.remove_idle_tubes();
        Ok(())
    }
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplayError::List(error) => write!(f, "cannot list it: {error}"),
            ReplayError::Read(number, error) => write!(
                f,
                "cannot read binlog.{number}: {error}; make it readable, or move it away to start \
                 without its jobs"
            ),
            ReplayError::NoMemory(error) => write!(f, "too little memory for its jobs: {error}"),
            ReplayError::Begin(error) => write!(f, "cannot create a file: {error}"),
            ReplayError::Failed(failure) => write!(f, "{failure}"),
        }
    }
}
