//! Rebuilds a queue from the files of its binlog.
//!
//! Records are applied in the order in which they were made; [`history`] decides what they mean together.
//! Then each job enters the structure of the state in its last record. Damage is logged with its file and
//! offset. A job whose full record is damaged stays as an older file has it, or is lost. A damaged file is
//! renamed when its intact jobs and those of older files are in a new one: at the start, or while clients are served.
//!
//! A function that returns `NoMemory` found too little memory for the jobs.
//!
//! [`history`]: crate::engine::binlog::history

mod keys;

use super::Queue;
use super::job::{Job, JobParams, Target};
use crate::engine::binlog::disk::{Disk, FileNumber};
use crate::engine::binlog::error::BinlogError;
use crate::engine::binlog::files::{File, Files, SHORT};
use crate::engine::binlog::gaps::Gap;
use crate::engine::binlog::history::{Event, Flushes, History};
use crate::engine::binlog::reader::{Damage, Record};
use crate::engine::binlog::record::{
    self, Content, Decision, FLUSH_ALL_ID, FLUSH_BURIED_ID, Fields, GAP_ID, JobState, KEY_ID,
    KeyRecord, Mark,
};
use crate::engine::binlog::{Binlog, Syncing};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{JobKey, TubeKey};
use crate::engine::text::CountOf;
use crate::engine::time::Nanos;
use log::{error, info, warn};
use std::collections::HashSet;

/// The result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The number of jobs.
    pub jobs: u64,
    /// The number of files.
    pub files: usize,
    /// The bytes of all records.
    pub used_bytes: u64,
    /// The highest id that was given to a job.
    pub last_id: u64,
}

/// A queue that is being rebuilt, file by file.
pub struct Replay<'q> {
    disk: Box<dyn Disk>,
    /// Of the binlog which begins after it.
    syncing: Syncing,
    numbers: Vec<FileNumber>,
    history: History,
    state: ReplayState<'q>,
}

/// The jobs and files that were read so far.
struct ReplayState<'q> {
    queue: &'q mut Queue,
    files: Files,
    /// The tube of the last full record.
    tube: TubeKey,
    /// The last record of each job.
    last_states: PagedSlab<JobKey, LastState>,
    flushes: Flushes<TubeKey>,
    /// The ids of jobs with a damaged full record and no intact one.
    lost: HashSet<u64>,
    /// The number of damaged places.
    damages: u64,
}

/// The last record of a job.
#[derive(Clone, Copy, Debug)]
struct LastState {
    state: JobState,
    /// When the job was buried, or when it is due.
    moment: Nanos,
    /// A worker had reserved the job, which is buried.
    is_held: bool,
    /// The number of flushes before the record.
    since: u32,
    /// The full record is written again at the end. For C beanstalkd the job is deleted, because the record of its
    /// flush is lost; or C beanstalkd has moved the job to a newer file without the record of its key.
    must_rewrite: bool,
}

/// At most this many damaged places are logged one by one. The rest is counted.
const MAX_LOGGED_DAMAGES: u64 = 100;

impl Queue {
    /// Begins to read the binlog on `disk`, which the queue then writes. There must be no job and no connection.
    pub fn begin_replay(
        &mut self,
        mut disk: Box<dyn Disk>,
        syncing: Syncing,
    ) -> Result<Replay<'_>, BinlogError> {
        let numbers = disk.list().map_err(BinlogError::of_list)?;
        let state = ReplayState {
            queue: self,
            files: Files::default(),
            tube: TubeKey::DEFAULT,
            last_states: PagedSlab::default(),
            flushes: Flushes::default(),
            lost: HashSet::new(),
            damages: 0,
        };
        let history = History::default();
        Ok(Replay { disk, syncing, numbers, history, state })
    }

    /// Records what happened to jobs before the server ended.
    fn finish_jobs(
        &mut self,
        last_states: &PagedSlab<JobKey, LastState>,
        flushes: &Flushes<TubeKey>,
    ) {
        for (key, last) in last_states.iter() {
            if let Some(flush) = last.flushed_by(flushes, self.jobs[key].tube) {
                // The clock may have been set back since.
                let flush = Decision { decided_at: flush.decided_at.min(self.now), ..flush };
                self.end_job(key, Some(flush));
                continue;
            }
            if last.is_held {
                // The job is not reserved any more: a flush of buried jobs deletes it. Without space for the
                // record, the next start keeps it if a crash interrupts such a flush.
                let _ = self.record_hold(key, false);
            }
            // Without space for the record, the next start tries it again.
            let binlog = self.binlog.as_mut().filter(|_| last.must_rewrite);
            if binlog.is_some_and(|binlog| binlog.reserve_move(key)) {
                self.move_in_binlog(key, true);
            }
        }
    }

    /// Moves jobs out of damaged files, as many as the start has time for, and renames those that are not needed.
    fn quarantine_damaged_files(&mut self) -> Result<(), BinlogError> {
        self.binlog.iter_mut().for_each(Binlog::move_at_start);
        self.move_jobs(self.limits.moved_at_start_bytes, true);
        let Some(binlog) = self.binlog.as_mut().filter(|binlog| binlog.has_damaged()) else {
            return Ok(());
        };
        binlog.remove_all(self.now)?;
        if binlog.has_damaged() {
            warn!("damaged files are still needed, or cannot be renamed; keeping them until then");
        }
        Ok(())
    }
}

impl Replay<'_> {
    /// Returns the file that is read next.
    pub fn next_file(&self) -> Option<FileNumber> {
        self.numbers.get(self.state.files.list.len()).copied()
    }

    /// Reads the next file, if there is one. After an error the replay cannot continue.
    pub fn read_file(&mut self) -> Result<(), BinlogError> {
        let Some(number) = self.next_file() else { return Ok(()) };
        let state = &mut self.state;
        self.history.read_file(&mut *self.disk, number, |event| state.visit(number, event))?;
        self.disk.close(number);
        let (files_read, files) = (self.state.files.list.len(), self.numbers.len());
        let jobs = self.state.files.job_count();
        info!("binlog.{number}: read, {files_read} of {files} files, {jobs} jobs");
        Ok(())
    }

    /// Moves all jobs to their states, after all files were read, and opens the binlog for new
    /// records. After an error no record is lost.
    pub fn finish(self, now: Nanos) -> Result<Recovered, BinlogError> {
        let Replay { disk, syncing, numbers, mut history, mut state } = self;
        let lost: Vec<Gap> = history.gaps.lost(&numbers).collect();
        for (before, after) in lost {
            error!(
                "no file between binlog.{before} and binlog.{after}: their records are lost; \
                 continuing without them, so deleted jobs may be back"
            );
            state.damages += 1;
            // The next start does not report it again.
            history.gaps.add((before + 1, after - 1));
        }
        // They are cut off when the binlog begins.
        if let Some((number, Damage { offset, len, cause, .. })) = history.torn {
            warn!(
                "binlog.{number}:{offset}: the last record is torn: {cause}; cutting {len} bytes"
            );
        }
        state.queue.now = now;
        let flushed = state.place_jobs()?;
        let ReplayState { queue, mut files, last_states, flushes, lost, damages, .. } = state;
        files.gaps = history.gaps;
        let jobs = files.job_count();
        let known = (queue.jobs.len() - queue.unique.kept.len()) as u64;
        assert_eq!(jobs, known, "jobs with an entry in the binlog, and all jobs");
        let recovered = Recovered {
            jobs: jobs - flushed,
            files: files.list.len(),
            used_bytes: files.list.iter().map(|file| file.used).sum(),
            last_id: history.last_id,
        };
        if damages > 0 {
            error!(
                "the binlog is damaged in {}: at least {} lost, {} kept",
                CountOf(damages, "place"),
                CountOf(lost.len() as u64, "job"),
                recovered.jobs
            );
        }
        queue.last_id = history.last_id;
        let (settings, limits, last_id) = (queue.settings, queue.limits, history.last_id);
        let binlog = Binlog::begin(disk, settings, syncing, limits, files, last_id, now);
        queue.binlog = Some(binlog?);
        queue.finish_jobs(&last_states, &flushes);
        if flushed > 0 {
            info!("the server ended during a flush: deleted the {flushed} jobs left");
        }
        drop(last_states);
        queue.quarantine_damaged_files()?;
        Ok(recovered)
    }
}

impl ReplayState<'_> {
    fn visit(&mut self, number: FileNumber, event: Event<'_>) -> Result<(), BinlogError> {
        match event {
            Event::Opened { size, layout, nonce } => {
                self.files.try_reserve_file()?;
                self.files.current = self.files.list.len();
                let mut file = File::new(number, size, 0);
                (file.nonce, file.layout) = (nonce, layout);
                self.files.push(file);
            }
            Event::Record(record, key) => self.apply(number, record, key)?,
            Event::Damage(number, damage) => self.note_damage(number, &damage),
            Event::End(used) => self.files.by_number(number).used = used,
        }
        Ok(())
    }

    fn note_damage(&mut self, number: FileNumber, damage: &Damage) {
        self.files.by_number(number).is_damaged = true;
        self.damages += 1;
        let effect = match damage.id {
            Some(FLUSH_ALL_ID | FLUSH_BURIED_ID) => {
                "; it was the record of a flush: some of the flushed jobs may be back".to_owned()
            }
            Some(KEY_ID) => {
                "; it was the key of a job: another job with this key may be put".to_owned()
            }
            Some(GAP_ID) => {
                "; it was the record of files that were removed: they are taken for lost".to_owned()
            }
            Some(id) if self.queue.jobs.find(id).is_some() => {
                format!("; keeping job {id} as it was before")
            }
            Some(id) if damage.is_full => {
                // Without memory for the id, the job is not counted.
                if headroom::keeping(Headroom::Quarter, || self.lost.try_reserve(1)).is_ok() {
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

    // ---- One record ----

    /// Applies a record, with that of its key before it.
    fn apply(
        &mut self,
        number: FileNumber,
        record: &Record<'_>,
        key_before: Option<(FileNumber, KeyRecord)>,
    ) -> Result<(), NoMemory> {
        match record.content {
            Content::Job(fields) if fields.state == JobState::Deleted => {
                self.apply_delete(&fields, key_before)
            }
            Content::Job(fields) => {
                let known = self.queue.jobs.find(fields.id);
                match known {
                    _ if !record.tube.is_empty() => {
                        self.lost.remove(&fields.id);
                        let key = self.apply_full(number, known, &fields, record)?;
                        if let Some((_, record)) = key_before {
                            self.give_key(key, &record)?;
                        }
                        self.apply_fields(key, &fields, true)
                    }
                    Some(key) => self.apply_fields(key, &fields, false),
                    // Its full record was in a file that is removed.
                    None => Ok(()),
                }
            }
            Content::Key(key) => self.apply_key(number, &key),
            Content::Flush(flush) => {
                self.files.supersede_file(0);
                // In a tube without jobs there is nothing to flush. The jobs are still needed: their
                // deletes may not be recorded.
                let tube = self.queue.tubes.find(record.tube);
                tube.map_or(Ok(()), |tube| self.flushes.add(tube, flush))
            }
            Content::Gap(_) | Content::FileHeader(..) => Ok(()),
        }
    }

    fn apply_delete(
        &mut self,
        fields: &Fields,
        kept: Option<(FileNumber, KeyRecord)>,
    ) -> Result<(), NoMemory> {
        self.lost.remove(&fields.id);
        let Some(key) = self.queue.jobs.find(fields.id) else { return Ok(()) };
        let last = self.last_states[key];
        let tube = self.queue.jobs[key].tube;
        if !self.flushes.allow(fields.mark, &tube, last.since, last.is_buried()) {
            // The record of the flush is lost, so the flush has not happened.
            self.last_states[key].must_rewrite = true;
            return Ok(());
        }
        self.last_states.remove(key);
        self.queue.drop_key(key);
        let job = self.queue.jobs.remove(key);
        self.files.supersede(key);
        self.files.remove(key);
        self.queue.drop_job(job);
        kept.map_or(Ok(()), |(number, kept)| self.apply_key(number, &kept))
    }

    /// Applies a full record. It adds a job, or replaces the tube and the body of a known one.
    fn apply_full(
        &mut self,
        number: FileNumber,
        known: Option<JobKey>,
        fields: &Fields,
        &Record { offset, tube, body, .. }: &Record<'_>,
    ) -> Result<JobKey, NoMemory> {
        // Its length when compaction writes it.
        let mut len = record::full_len(tube, body.len()) as u64;
        // Most jobs are in the tube of the job before.
        if *self.queue.tubes[self.tube].name != *tube {
            self.tube = self.queue.find_or_create_tube(tube)?;
        }
        let tube = self.tube;
        if let Some(key) = known {
            self.queue.replace_body(key, tube, body)?;
            // A record of C beanstalkd, which has moved the job, has no key before it.
            let has_key = self.queue.jobs[key].unique().is_some();
            len += if has_key { SHORT } else { 0 };
            self.last_states[key].must_rewrite = has_key;
            self.files.move_to(key, (number, offset), len);
            return Ok(key);
        }
        self.queue.jobs.try_reserve_one()?;
        self.files.try_reserve(self.queue.jobs.next_key())?;
        let Fields { id, pri, delay_secs, ttr_secs, created_at, .. } = *fields;
        let params = JobParams { pri, delay_secs, ttr_secs };
        let body = self.queue.body_of_record(tube, body)?;
        let key = self.queue.insert(Job::new(id, tube, params, body, created_at));
        self.files.add(key, (number, offset), len, false);
        Ok(key)
    }

    /// Applies the fields of a full or short record to its job.
    fn apply_fields(
        &mut self,
        key: JobKey,
        fields: &Fields,
        is_full: bool,
    ) -> Result<(), NoMemory> {
        self.files.supersede(key);
        let job = &mut self.queue.jobs[key];
        job.pri = fields.pri;
        job.delay_secs = fields.delay_secs;
        job.ttr_secs = fields.ttr_secs.max(1);
        job.created_at = fields.created_at;
        self.queue.set_counts(key, fields.counts);
        let state = fields.state;
        let has_moment = self.files.list.last().is_some_and(|file| file.layout.has_checksums);
        let before = self.last_states.get_mut(key);
        let moment = match &before {
            _ if state != JobState::Buried || has_moment => fields.due_or_buried_at,
            // Compaction has moved the job to a newer file.
            Some(before) if is_full && before.state == JobState::Buried => before.moment,
            // C beanstalkd does not record when it buried the job: after the bury before.
            Some(_) | None => self.queue.last_buried_at + Nanos::ONE,
        };
        if state == JobState::Buried {
            self.queue.last_buried_at = self.queue.last_buried_at.max(moment);
        }
        // Only a damaged record has this mark for a job that is not buried.
        let is_held = state == JobState::Buried && fields.mark == Mark::Held;
        let must_rewrite = before.as_ref().is_some_and(|before| before.must_rewrite);
        let last = LastState { state, moment, is_held, since: self.flushes.count, must_rewrite };
        match before {
            Some(before) => *before = last,
            None => self.last_states.try_insert(key, last)?,
        }
        Ok(())
    }

    // ---- All records ----

    /// Moves each job to the state in its last record. Returns how many are left in no state, because a flush has
    /// deleted them.
    fn place_jobs(&mut self) -> Result<u64, NoMemory> {
        let (now, mut buried, mut flushed) = (self.queue.now, Vec::new(), 0);
        for key in self.files.jobs() {
            let job = &mut self.queue.jobs[key];
            if job.is_kept() {
                // If the clock was set back, the rest of the time is at most the TTL.
                let ttl_secs = self.queue.unique.ttl_secs(job).unwrap_or(0);
                job.due = job.due.min(now + Nanos::from_secs(ttl_secs));
                self.queue.unique.kept.insert(key, &mut self.queue.jobs);
                continue;
            }
            let last = self.last_states[key];
            if last.flushed_by(&self.flushes, self.queue.jobs[key].tube).is_some() {
                flushed += 1;
                continue;
            }
            let LastState { state, moment, .. } = last;
            match state {
                JobState::Buried => {
                    headroom::keeping(Headroom::Quarter, || buried.try_reserve(1))?;
                    buried.push((moment, key));
                }
                // If the clock was set back, the rest of the delay is at most the delay.
                JobState::Delayed if moment > now && self.queue.jobs[key].delay_secs > 0 => {
                    let latest = now + Nanos::from_secs(self.queue.jobs[key].delay_secs);
                    self.queue.attach(key, Target::Delayed { due: moment.min(latest) });
                }
                JobState::Delayed | JobState::Ready | JobState::Reserved => {
                    self.queue.attach(key, Target::Ready);
                }
                JobState::Deleted => unreachable!("deleted jobs are removed"),
            }
        }
        buried.sort_unstable();
        for (at, key) in buried {
            self.queue.attach(key, Target::Buried { at });
        }
        // Backwards, because removing a tube moves the last one to its index.
        for index in (0..self.queue.tubes.len()).rev() {
            self.queue.remove_tube_if_idle(self.queue.tubes.at(index));
        }
        Ok(flushed)
    }
}

impl LastState {
    /// Returns the first flush that has deleted the job after its last record.
    fn flushed_by(&self, flushes: &Flushes<TubeKey>, tube: TubeKey) -> Option<Decision> {
        flushes.first_after(&tube, self.since, self.is_buried())
    }

    /// Returns whether the job is buried, and no worker had reserved it.
    fn is_buried(&self) -> bool {
        self.state == JobState::Buried && !self.is_held
    }
}
