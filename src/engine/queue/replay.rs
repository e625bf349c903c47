//! A chapter of the rules: how a queue comes back from the files of its binlog.
//!
//! Records are applied in the order in which they were made. Until all are, jobs are in no
//! place; then each is put where its last record sent it. Damage is told, with the file and the
//! offset, and never guessed away: a job whose full record is damaged stays as an older file
//! has it, or is lost. A file with damage is set aside once its sound jobs are in a new one.
//!
//! The bytes that a crash has left behind the last record of all are no damage: what was
//! acknowledged can be in them only if the operator did not have it synced first.

use super::Queue;
use super::job::{Job, JobParams, Target};
use super::tube::Tubes;
use crate::engine::binlog::disk::{Disk, FileNumber};
use crate::engine::binlog::reader::{self, Damage, Item, ReadError, Reader, Record, TornTail};
use crate::engine::binlog::record::{self, Fields, HIGHEST_ID, Layout, RecordState};
use crate::engine::binlog::segments::{Segment, Segments};
use crate::engine::binlog::{BeginError, Binlog, IoFailed, Policy, Resume};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, TubeKey};
use crate::engine::time::Nanos;
use log::{error, info, warn};
use std::collections::{HashSet, TryReserveError};
use std::fmt;
use std::io;

/// What came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// How many jobs there are.
    pub jobs: u64,
    /// How many files were read.
    pub files: usize,
    /// How many bytes of them are in use.
    pub used_bytes: u64,
    /// The highest id that was ever given out.
    pub last_id: u64,
}

/// Why the queue cannot come back.
#[derive(Debug)]
pub enum ReplayError {
    /// The directory cannot be listed.
    List(io::Error),
    /// A file cannot be read.
    Read(FileNumber, ReadError),
    /// There is too little memory for all jobs.
    NoMemory(TryReserveError),
    /// There is no space for new files.
    Begin(io::Error),
    /// The disk fails.
    Failed(IoFailed),
}

/// A queue that is coming back, file by file.
#[derive(Debug)]
pub struct Replay<'q> {
    disk: Box<dyn Disk>,
    numbers: Vec<FileNumber>,
    files_read: usize,
    gathered: ReplayState<'q>,
}

/// What has been read so far.
#[derive(Debug)]
struct ReplayState<'q> {
    queue: &'q mut Queue,
    segments: Segments,
    last: Resume,
    /// That of the full record read last.
    tube: TubeKey,
    used_bytes: u64,
    tail: TornTail,
    /// The jobs that had a damaged full record and no other one.
    missing: HashSet<u64>,
    /// How many damaged places were found.
    damages: u64,
}

/// No more ids than these can be missing between two records.
const MAX_ID_GAP: u64 = 1 << 20;

/// More damaged places than that are counted and not told one by one.
const DAMAGES_TOLD: u64 = 100;

impl Queue {
    /// Begins to read what there is on `disk`. To be called while there is neither a job nor a
    /// connection.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn begin_replay(&mut self, mut disk: Box<dyn Disk>) -> Result<Replay<'_>, ReplayError> {
        let numbers = disk.list().map_err(ReplayError::List)?;
        for (before, after) in reader::gaps(&numbers) {
            error!(
                "there is a binlog.{before} and a binlog.{after} but no file between them: \
                 what was recorded there is lost, and deleted jobs may be back"
            );
        }
        let gathered = ReplayState {
            queue: self,
            segments: Segments::default(),
            last: Resume::default(),
            tube: Tubes::DEFAULT,
            used_bytes: 0,
            tail: TornTail::default(),
            missing: HashSet::new(),
            damages: 0,
        };
        Ok(Replay { disk, numbers, files_read: 0, gathered })
    }

    fn set_damaged_files_aside(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.empty_damaged_files();
        let Some(binlog) = self.binlog.as_mut().filter(|binlog| binlog.has_damaged()) else {
            return Ok(());
        };
        binlog.remove_all(now)?;
        if binlog.has_damaged() {
            warn!("damaged files cannot be set aside yet: they stay as they are");
        }
        Ok(())
    }
}

impl Replay<'_> {
    /// The file that is read next.
    pub fn next_file(&self) -> Option<FileNumber> {
        self.numbers.get(self.files_read).copied()
    }

    /// Reads the next file, if there is one.
    ///
    /// # Errors
    /// It cannot be read: there is no way to go on without it.
    pub fn read_file(&mut self) -> Result<(), ReplayError> {
        let Some(number) = self.next_file() else { return Ok(()) };
        self.gathered.read_file(&mut *self.disk, number)?;
        self.files_read += 1;
        let (files_read, files) = (self.files_read, self.numbers.len());
        let jobs = self.gathered.segments.job_count();
        info!("binlog.{number}: read, {files_read} of {files} files, {jobs} jobs");
        Ok(())
    }

    /// Ends with the jobs in their places, once all files have been read, and keeps the binlog
    /// there from then on.
    ///
    /// # Errors
    /// There is no way to go on; no record is lost.
    pub fn finish(self, policy: Policy, now: Nanos) -> Result<Recovered, ReplayError> {
        let Replay { disk, files_read, mut gathered, .. } = self;
        gathered.cut_tail();
        gathered.place_jobs(now).map_err(ReplayError::NoMemory)?;
        let ReplayState { queue, segments, last, used_bytes, missing, damages, .. } = gathered;
        let recovered = Recovered {
            jobs: segments.job_count(),
            files: files_read,
            used_bytes,
            last_id: last.id,
        };
        if damages > 0 {
            error!(
                "the binlog is damaged in {damages} places: {} jobs lost, {} kept",
                missing.len(),
                recovered.jobs
            );
        }
        let binlog = Binlog::begin(disk, policy, segments, last, now);
        queue.binlog = Some(binlog.map_err(|error| match error {
            BeginError::NoFile(error) => ReplayError::Begin(error),
            BeginError::Failed(failure) => ReplayError::Failed(failure),
        })?);
        queue.set_damaged_files_aside(now).map_err(ReplayError::Failed)?;
        Ok(recovered)
    }
}

impl ReplayState<'_> {
    // ---- One file ----

    fn read_file(&mut self, disk: &mut dyn Disk, number: FileNumber) -> Result<(), ReplayError> {
        let failed = |error| ReplayError::Read(number, error);
        let mut scan = Reader::open(disk, number).map_err(failed)?;
        self.segments.try_reserve_file().map_err(ReplayError::NoMemory)?;
        let mut segment = Segment::new(number, scan.size(), 0);
        segment.nonce = scan.nonce();
        self.segments.push(segment);
        let (last_id, layout) = (scan.last_id(), scan.layout());
        self.note_id(last_id);
        loop {
            match scan.next_item().map_err(failed)? {
                Item::Record(found) => {
                    self.count_tail_as_damage();
                    self.apply(number, layout, found).map_err(ReplayError::NoMemory)?;
                }
                Item::Damage(damage) => {
                    self.count_tail_as_damage();
                    self.note_damage(number, &damage);
                }
                Item::End(end) => {
                    self.used_bytes += end.used;
                    self.segments.numbered(number).used = end.used;
                    let damage = end.rest.and_then(|rest| self.tail.begins(number, rest));
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
        self.segments.numbered(number).is_damaged = true;
        self.damages += 1;
        let fate = match damage.id {
            Some(id) if self.queue.jobs.find(id).is_some() => {
                format!("; job {id} stays as it was before")
            }
            Some(id) if damage.is_full => {
                // Unless it is the id that is damaged.
                if self.is_near(id) {
                    self.note_id(id);
                }
                // Without memory for its id it is not counted.
                if headroom::leave(Headroom::Quarter, || self.missing.try_reserve(1)).is_ok() {
                    self.missing.insert(id);
                }
                format!("; job {id} is lost, unless a newer record has it")
            }
            Some(id) => format!("; it seems to be of job {id}, which is not there"),
            None => String::new(),
        };
        if self.damages <= DAMAGES_TOLD {
            let Damage { offset, len, what, .. } = damage;
            error!("binlog.{number}:{offset}: {what} ({len} bytes){fate}");
        }
    }

    /// What a crash has left is cut off when the binlog begins.
    fn cut_tail(&mut self) {
        if let Some((number, Damage { offset, len, what, .. })) = self.tail.take() {
            warn!("binlog.{number}:{offset}: the last record is torn, {len} bytes are cut: {what}");
        }
    }

    /// The id was given out, or else is absurd: if ids went on from there, they would end soon.
    fn note_id(&mut self, id: u64) {
        if id <= HIGHEST_ID || self.is_near(id) {
            self.last.id = self.last.id.max(id);
        }
    }

    fn is_near(&self, id: u64) -> bool {
        id.saturating_sub(self.last.id) < MAX_ID_GAP
    }

    // ---- One record ----

    fn apply(
        &mut self,
        number: FileNumber,
        layout: Layout,
        found: Record<'_>,
    ) -> Result<(), TryReserveError> {
        let Record { fields, tube, body, .. } = found;
        self.note_id(fields.id);
        let known = self.queue.jobs.find(fields.id);
        if fields.state == RecordState::Deleted {
            self.missing.remove(&fields.id);
            if let Some(key) = known {
                let job = self.queue.jobs.remove(key);
                self.segments.remove_job(job.log);
                self.queue.bodies.remove(job.body);
            }
            return Ok(());
        }
        let is_full = tube.is_some();
        let key = match (known, tube.zip(body)) {
            (Some(key), None) => key,
            (known, Some((tube, body))) => {
                self.missing.remove(&fields.id);
                self.apply_full(number, known, &fields, tube, body)?
            }
            // Its full record was in a file that is not needed any more.
            (None, None) => return Ok(()),
        };
        let job = &mut self.queue.jobs[key];
        job.pri = fields.pri;
        job.delay_secs = fields.delay_secs;
        job.ttr_secs = fields.ttr_secs.max(1);
        job.created_at = fields.created_at;
        job.counts = fields.counts;
        self.apply_state(key, &fields, is_full, layout.is_checked());
        Ok(())
    }

    /// A full record makes a job, or makes it anew.
    fn apply_full(
        &mut self,
        number: FileNumber,
        known: Option<JobKey>,
        fields: &Fields,
        tube: &str,
        body: &[u8],
    ) -> Result<JobKey, TryReserveError> {
        // As long as it will be when it is written anew.
        let len = record::full_len(tube, body.len()) as u64;
        let tube = self.find_tube(tube)?;
        if let Some(key) = known {
            let body = self.queue.bodies.add(body)?;
            let job = &mut self.queue.jobs[key];
            job.tube = tube;
            let old_body = std::mem::replace(&mut job.body, body);
            self.queue.bodies.remove(old_body);
            let job = &self.queue.jobs[key];
            self.segments.move_job(job.log, number, len);
            return Ok(key);
        }
        self.queue.jobs.try_reserve_one()?;
        self.segments.try_reserve_one()?;
        let Fields { id, pri, delay_secs, ttr_secs, created_at, .. } = *fields;
        let terms = JobParams { pri, delay_secs, ttr_secs };
        let body = self.queue.bodies.add(body)?;
        let key = self.queue.jobs.insert(Job::new(id, tube, terms, body, created_at));
        self.queue.jobs[key].log = self.segments.add_job(key, number, len);
        Ok(key)
    }

    /// Most jobs are in the tube of the job before.
    fn find_tube(&mut self, name: &str) -> Result<TubeKey, TryReserveError> {
        if *self.queue.tubes[self.tube].name != *name {
            self.tube = self.queue.find_or_create_tube(name)?;
        }
        Ok(self.tube)
    }

    /// C beanstalkd, whose records are not checked, does not say when a job was buried: it was
    /// later than the one before.
    fn apply_state(&mut self, key: JobKey, fields: &Fields, is_full: bool, is_checked: bool) {
        let entry = self.segments.entry_mut(self.queue.jobs[key].log);
        entry.due_or_buried_at = if fields.state != RecordState::Buried || is_checked {
            fields.due_or_buried_at
        } else if is_full && entry.state == RecordState::Buried {
            // It was only moved to a newer file.
            entry.due_or_buried_at
        } else {
            self.last.buried_at + Nanos::ONE
        };
        entry.state = fields.state;
        if fields.state == RecordState::Buried {
            self.last.buried_at = self.last.buried_at.max(entry.due_or_buried_at);
        }
    }

    // ---- All records ----

    /// Puts every job where its last record sent it.
    fn place_jobs(&mut self, now: Nanos) -> Result<(), TryReserveError> {
        let mut buried = Vec::new();
        for key in self.segments.jobs() {
            let entry = self.segments.entry(self.queue.jobs[key].log);
            let moment = entry.due_or_buried_at;
            match entry.state {
                RecordState::Buried => {
                    headroom::leave(Headroom::Quarter, || buried.try_reserve(1))?;
                    buried.push((moment, key));
                }
                // If the clock was set back, nobody has asked for as much more delay.
                RecordState::Delayed if moment > now && self.queue.jobs[key].delay_secs > 0 => {
                    let latest = now + Nanos::from_secs(self.queue.jobs[key].delay_secs);
                    self.queue.place(key, Target::Delayed { due: moment.min(latest) }, now);
                }
                RecordState::Delayed | RecordState::Ready | RecordState::Reserved => {
                    self.queue.place(key, Target::Ready, now);
                }
                RecordState::Deleted => unreachable!("deleted jobs are not kept"),
            }
        }
        buried.sort_unstable();
        for (_, key) in buried {
            self.queue.place(key, Target::Buried, now);
        }
        self.queue.remove_idle_tubes();
        Ok(())
    }
}

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReplayError::List(error) => write!(f, "cannot be listed: {error}"),
            ReplayError::Read(number, error) => write!(
                f,
                "binlog.{number} cannot be read: {error}; without it jobs would be lost, \
                 so make it readable, or move it away to go on without it"
            ),
            ReplayError::NoMemory(error) => write!(f, "too little memory for its jobs: {error}"),
            ReplayError::Begin(error) => write!(f, "no new file can be made: {error}"),
            ReplayError::Failed(failure) => write!(f, "{failure}"),
        }
    }
}
