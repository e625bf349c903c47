//! Decides which bodies are in memory. The others are cold: their bytes are only in the binlog, and are
//! read back when a client is to get them.
//!
//! While the bodies in memory take more than the operator allows, a new body is cold as soon as its
//! record is made. If a worker waits for its job, it is cold once the worker has been given it. A body that
//! was read back goes to its client, and is not kept. When one has waited for the disk, the disk reads ahead
//! what is near the front of the tube.
//!
//! No client gets a body that does not match its checksum: the job is buried. The rules of the queue do
//! not depend on where a body is. This module knows no connections, and does not decide which body is read
//! next.

use super::Queue;
use super::body::Body;
use super::client::Client;
use super::counts::CountedEvent;
use super::job::{Job, State};
use super::read_body::{Grant, ReadBodies, ReadBody};
use crate::engine::binlog::Binlog;
use crate::engine::binlog::reads::RecordRead;
use crate::engine::collections::histogram::Histogram;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{JobKey, TubeKey};
use log::{error, warn};
use std::collections::{HashSet, VecDeque};
use std::io;
use std::rc::Rc;

/// The counts of bodies in memory and of cold ones, and the reads of these.
#[derive(Default)]
pub struct BodyCache {
    /// The bytes of the bodies of jobs that are in memory.
    pub warm_bytes: u64,
    /// Other modules only read the counts.
    pub cold: ColdBodies,
    /// The bodies that were read back for replies.
    pub read_bodies: ReadBodies,
    /// The records that the disk reads, in the order in which the reads end.
    begun: VecDeque<RecordRead>,
    /// The page of jobs of which [`Queue::evict_page`] drops the bodies next.
    next_page: usize,
    /// The ids of jobs whose bodies cannot be read, which was logged.
    pub unreadable: HashSet<u64>,
    pub stats: ReadStats,
}

/// The cold bodies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColdBodies {
    /// The number of their jobs.
    pub jobs: u64,
    /// Their bytes, with CR LF.
    pub bytes: u64,
}

/// How cold bodies were read back for clients.
#[derive(Clone, Debug, Default)]
pub struct ReadStats {
    /// The number of bodies that were read.
    pub reads: u64,
    /// How long clients have waited for the disk, for each reply.
    pub wait_times: Histogram,
    /// The number of bodies that could not be read.
    pub failures: u64,
}

/// The number of bodies that are dropped for a unit of work.
const EVICTIONS_PER_WORK: usize = 4;
/// The disk reads ahead this many bodies at the front of a tube.
const AHEAD: usize = 8;
/// Of this many jobs it is known that their bodies cannot be read: about 100 KiB.
const MOST_UNREADABLE: usize = 4096;

impl Queue {
    /// Returns whether bodies in memory, with this many bytes more, take more than they may.
    fn is_cache_exceeded(&self, more: u32) -> bool {
        let bytes = self.body_cache.warm_bytes + u64::from(more);
        self.settings.body_cache_bytes.is_some_and(|limit| bytes > limit)
    }

    // ---- Bodies of jobs that come and go ----

    /// Drops a job that was removed, with its counts and its body.
    pub(super) fn drop_job(&mut self, job: Job) {
        self.large_counts.remove(job.counts);
        self.drop_counted(job.tube, job.body);
    }

    /// Returns the body of a record that is replayed: a cold one if the bodies in memory take too much.
    pub(super) fn body_of_record(&mut self, tube: TubeKey, bytes: &[u8]) -> Result<Body, NoMemory> {
        let full_len = u32::try_from(bytes.len()).expect("a body has at most 2^30 bytes");
        if self.is_cache_exceeded(full_len) {
            return Ok(self.cold_body(tube, full_len));
        }
        let body = self.bodies.add(bytes)?;
        self.body_cache.warm_bytes += u64::from(full_len);
        Ok(body)
    }

    /// Replaces the tube and the body of a job during replay, after a newer full record.
    pub(super) fn replace_body(
        &mut self,
        key: JobKey,
        tube: TubeKey,
        bytes: &[u8],
    ) -> Result<(), NoMemory> {
        let body = self.body_of_record(tube, bytes)?;
        let job = &mut self.jobs[key];
        let old_tube = std::mem::replace(&mut job.tube, tube);
        let old_body = std::mem::replace(&mut job.body, body);
        self.drop_counted(old_tube, old_body);
        Ok(())
    }

    /// Drops the body of a job in this tube.
    fn drop_counted(&mut self, tube: TubeKey, body: Body) {
        let len = u64::from(body.full_len());
        if body.is_cold() {
            self.body_cache.cold.jobs -= 1;
            self.body_cache.cold.bytes -= len;
            // After a replay, a tube whose jobs were all flushed is gone.
            if let Some(tube) = self.tubes.get_mut(tube) {
                tube.cold -= 1;
            }
        } else {
            self.body_cache.warm_bytes -= len;
        }
        self.drop_body(body);
    }

    fn cold_body(&mut self, tube: TubeKey, full_len: u32) -> Body {
        self.body_cache.cold.jobs += 1;
        self.body_cache.cold.bytes += u64::from(full_len);
        self.tubes[tube].cold += 1;
        Body::cold(full_len)
    }

    // ---- Eviction ----

    /// Drops the body of a job that is new or comes back, if bodies in memory take too much and no connection
    /// is about to be given it.
    #[inline]
    pub(super) fn make_cold_if_full(&mut self, key: JobKey) {
        if self.is_cache_exceeded(0) && !matches!(self.jobs[key].state, State::Reserved { .. }) {
            self.evict(key);
        }
    }

    /// Drops the body of a job that a client has just been given, if bodies in memory take too much.
    #[inline]
    pub fn after_reserve(&mut self, key: JobKey) {
        if self.is_cache_exceeded(0) {
            self.evict(key);
        }
    }

    /// Drops the bodies of some jobs, for a body that needs their memory: of the next page of jobs with each call.
    /// Without memory for the list of these jobs it drops none.
    pub fn evict_page(&mut self) {
        let page = self.body_cache.next_page;
        self.body_cache.next_page = if page + 1 < self.jobs.page_count() { page + 1 } else { 0 };
        let mut warm = Vec::new();
        for (key, _) in self.jobs.in_page(page).filter(|(_, job)| !job.body.is_cold()) {
            if headroom::keeping(Headroom::Quarter, || warm.try_reserve(1)).is_err() {
                break;
            }
            warm.push(key);
        }
        self.work.spend_for(warm.len(), EVICTIONS_PER_WORK);
        warm.into_iter().for_each(|key| self.evict(key));
        self.bodies.free_empty(u64::MAX);
    }

    /// Drops the bytes of a job's body from memory: its record has them.
    fn evict(&mut self, key: JobKey) {
        let job = &self.jobs[key];
        let (tube, full_len) = (job.tube, job.body.full_len());
        if !job.body.is_cold() {
            let cold = self.cold_body(tube, full_len);
            let warm = std::mem::replace(&mut self.jobs[key].body, cold);
            self.drop_counted(tube, warm);
        }
    }

    // ---- Reading ----

    /// Returns whether the body of the job `id` is only on the disk.
    pub fn is_cold(&self, key: JobKey, id: u64) -> bool {
        let job = self.jobs.get(key).filter(|job| job.id == id && !job.is_kept());
        job.is_some_and(|job| job.body.is_cold())
    }

    /// Returns the full record of a job with a cold body.
    pub fn record_of(&self, key: JobKey) -> RecordRead {
        let job = &self.jobs[key];
        let binlog = self.binlog.as_ref().expect("a cold body is in the binlog");
        let tube = &self.tubes[job.tube].name;
        binlog.record_of(key, job.id, tube, job.body.full_len())
    }

    /// Returns the key of the job of a record, if the record is still at its place.
    fn job_of(&self, read: RecordRead) -> Option<JobKey> {
        let key = self.jobs.find(read.id)?;
        (self.jobs[key].body.is_cold() && self.record_of(key) == read).then_some(key)
    }

    /// Returns whether the record of a job is at another place than before.
    pub fn has_moved(&self, read: RecordRead) -> bool {
        self.jobs.find(read.id).is_some() && self.job_of(read).is_none()
    }

    /// Returns the record of a cold body if that needs no waiting for the disk.
    pub fn read_now(&mut self, read: RecordRead) -> io::Result<Option<Vec<u8>>> {
        if self.is_begun(read.id) {
            return Ok(None);
        }
        self.binlog.as_mut().expect("a cold body is in the binlog").read_now(read)
    }

    /// Returns whether the disk may be asked for one more record.
    pub fn may_begin_read(&self) -> bool {
        let begun = &self.body_cache.begun;
        let bytes: u32 = begun.iter().map(|read| read.len).sum();
        begun.len() < self.limits.reads_with_disk && (bytes as usize) < self.limits.bytes_with_disk
    }

    /// Returns whether the disk reads the record of the job `id`.
    pub fn is_begun(&self, id: u64) -> bool {
        self.body_cache.begun.iter().any(|read| read.id == id)
    }

    /// Begins to read a record, unless that was begun. [`Queue::finished_read`] returns it later.
    pub fn begin_read(&mut self, read: RecordRead) {
        if !self.is_begun(read.id) {
            self.binlog.as_mut().expect("a cold body is in the binlog").disk.begin_read(read);
            self.body_cache.begun.push_back(read);
        }
    }

    /// Returns the oldest read that has ended, once. If compaction waits for it, the record is moved before.
    pub fn finished_read(&mut self) -> Option<(RecordRead, io::Result<Vec<u8>>)> {
        let binlog = self.binlog.as_mut()?;
        let record = binlog.disk.finished_read()?;
        let read = self.body_cache.begun.pop_front().expect("it was begun");
        if binlog.end_wait(read.id) {
            self.move_read(read, &record);
            self.compact();
        }
        Some((read, record))
    }

    /// Returns the body of a record that was read for a reply, which has memory for it; `None` if it cannot be read.
    /// After an error it can be read later.
    pub fn read_body(
        &mut self,
        read: RecordRead,
        record: io::Result<Vec<u8>>,
        grant: &mut Grant,
    ) -> io::Result<Option<Rc<ReadBody>>> {
        match record {
            Ok(record) => {
                self.body_cache.stats.reads += 1;
                self.body_cache.unreadable.remove(&read.id);
                Ok(Some(self.body_cache.read_bodies.add(read.id, record, read.body_len, grant)))
            }
            Err(error) if is_passing(&error) => Err(error),
            Err(error) => {
                self.note_unreadable(read, &error);
                Ok(None)
            }
        }
    }

    /// Logs that a body cannot be read, once until the job is kicked. If the job is deleted, its record may be
    /// gone, and that is no failure.
    fn note_unreadable(&mut self, read: RecordRead, cause: &io::Error) {
        let id = read.id;
        if self.find(id).is_none() {
            return;
        }
        self.body_cache.stats.failures += 1;
        let known = &mut self.body_cache.unreadable;
        if known.len() == MOST_UNREADABLE {
            known.clear();
        }
        // Without memory it is logged again.
        let is_new = known.try_reserve(1).is_err() || known.insert(id);
        if is_new && self.bury_log.is_allowed(self.now) {
            error!(
                "{read}: the body of job {id} cannot be read: {cause}; burying the job, unless another \
                 client has reserved it"
            );
        }
    }

    /// Buries a job whose body this connection wants and that cannot be read, unless another one has
    /// reserved it: that one has the body.
    pub fn bury_unreadable(&mut self, client: &mut Client, key: JobKey, id: u64) {
        let Some(job) = self.jobs.get(key).filter(|job| job.id == id) else { return };
        // A record after that of the flush would bring the job back.
        if self.is_flushed(job) {
            return;
        }
        match job.state {
            State::Buried(_) | State::Kept(_) => return,
            State::Reserved(_) if !client.holds(job) => return,
            State::Reserved(_) if self.due(job).is_none() => self.uncount_reserve(key),
            State::Detached | State::Ready { .. } | State::Delayed(_) | State::Reserved { .. } => {}
        }
        self.count_event(key, CountedEvent::Bury);
        let target = self.next_burial();
        if self.reserve_update().is_ok() {
            self.record_update(key, target);
        }
        self.take(client, key, None);
        self.attach(key, target);
    }

    /// Begins to read ahead the bodies of the next jobs of a tube.
    pub fn read_ahead(&mut self, tube: TubeKey) {
        for key in self.tubes[tube].jobs.ready.first_keys(AHEAD, &self.jobs) {
            if self.jobs[key].body.is_cold() {
                let read = self.record_of(key);
                self.binlog.iter_mut().for_each(|binlog| binlog.disk.will_read(read));
            }
        }
    }

    // ---- Moving ----

    /// Moves the record of a cold body. Returns `false` if it must be read first, which is waited for only if it
    /// `may_wait`, or cannot be read.
    pub(super) fn move_cold(&mut self, key: JobKey, may_wait: bool) -> bool {
        let read = self.record_of(key);
        let Some(binlog) = &mut self.binlog else { return false };
        let record =
            if may_wait { binlog.read_and_wait(read).map(Some) } else { binlog.read_now(read) };
        if let Some(record) = record.transpose() {
            return self.move_record(key, read, &record);
        }
        binlog.wait_for(read.id);
        self.begin_read(read);
        false
    }

    /// Moves a record that the disk has read for compaction, if it is still at its place.
    fn move_read(&mut self, read: RecordRead, record: &io::Result<Vec<u8>>) {
        if let Some(key) = self.job_of(read)
            // A record after that of the flush would bring the job back.
            && !self.is_flushed(&self.jobs[key])
            && let Some(binlog) = &mut self.binlog
            && binlog.reserve_move(key)
        {
            self.move_record(key, read, record);
        }
    }

    /// Moves a record that was read. If the disk has lost it, the job is lost; otherwise its file waits.
    fn move_record(&mut self, key: JobKey, read: RecordRead, record: &io::Result<Vec<u8>>) -> bool {
        match record {
            Ok(record) => {
                self.write_moved(key, Some(&record[(read.len - read.body_len) as usize..]));
                return true;
            }
            Err(error) if is_loss(error) && self.jobs[key].state.holder().is_none() => {
                self.lose(key, read, error);
            }
            // A worker that has its body may still delete it.
            Err(error) if is_loss(error) => {
                self.binlog.iter_mut().for_each(Binlog::end_step);
            }
            Err(error) => {
                let RecordRead { id, file, .. } = read;
                let Some(binlog) = &mut self.binlog else { return false };
                // Then other files cannot be read either.
                if is_passing(error) {
                    binlog.end_step();
                }
                if binlog.pass_over(file) {
                    warn!(
                        "{read}: the record of job {id} cannot be read now: {error}; keeping \
                         binlog.{file} until it can"
                    );
                }
            }
        }
        false
    }

    /// Deletes a job whose record cannot be read, so that compaction can go on. The file is kept under
    /// another name.
    fn lose(&mut self, key: JobKey, read: RecordRead, cause: &io::Error) {
        let Some(binlog) = &mut self.binlog else { return };
        error!("{read}: the record of job {} cannot be read: {cause}; the job is lost", read.id);
        self.body_cache.stats.failures += 1;
        binlog.note_damage(key);
        // Without space for the record, the job is lost again at the next start.
        if binlog.reserve_delete(false).is_err() {
            return binlog.end_step();
        }
        self.detach(key);
        let tube = self.jobs[key].tube;
        self.drop_key(key);
        self.end_job(key, None);
        self.remove_tube_if_idle(tube);
    }

    // ---- Checking ----

    /// Checks the counts of bodies in memory and of cold ones.
    pub(super) fn check_body_cache(&self) {
        let (mut warm_bytes, mut cold) = (0, ColdBodies::default());
        for (_, job) in self.jobs.iter().filter(|(_, job)| !job.is_kept()) {
            let len = u64::from(job.body.full_len());
            if job.body.is_cold() {
                cold.jobs += 1;
                cold.bytes += len;
            } else {
                warm_bytes += len;
            }
        }
        assert_eq!(self.body_cache.warm_bytes, warm_bytes, "stored and actual bytes in memory");
        assert_eq!(self.body_cache.cold, cold, "stored and actual counts of cold bodies");
        let of_tubes = self.tubes.entries().map(|(_, tube)| u64::from(tube.cold)).sum::<u64>();
        assert_eq!(of_tubes, cold.jobs, "cold jobs of all tubes, and all cold jobs");
        assert!(
            cold.jobs == 0 || self.settings.body_cache_bytes.is_some(),
            "cold bodies without a limit"
        );
        let must_stay = |job: &Job| !job.body.is_cold() && job.state.holder().is_some();
        let is_explained = self.jobs.iter().any(|(_, job)| must_stay(job));
        assert!(!self.is_cache_exceeded(0) || is_explained, "{warm_bytes} bytes stay in memory");
    }
}

/// Returns whether an error means that the disk has lost what was to be read ([`Disk::read`]). Otherwise it may
/// still be there, as when a file was moved away.
///
/// [`Disk::read`]: crate::engine::binlog::disk::Disk::read
fn is_loss(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof)
}

/// Returns whether a read fails for a reason that passes: too many open files, or too little memory.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::OutOfMemory)
}
