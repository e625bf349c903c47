//! Decides which bodies are in memory. The others are cold: their bytes are only in the binlog, and are
//! read back when a client is to get them.
//!
//! While the bodies in memory take more than the operator allows, a new body is cold as soon as its
//! record is made, and older ones become cold step by step: first those that are not about to be
//! reserved. A body that was read back goes to its client, and is not kept. The disk reads ahead what
//! is near the front of a tube, so that a worker seldom waits.
//!
//! No client gets a body that does not match its checksum: the job is buried. The rules of the queue do
//! not depend on where a body is. This module knows connections only by key.

use super::Queue;
use super::body::Body;
use super::job::{Job, Jobs, State, Target};
use super::tube::Tube;
use crate::engine::binlog::disk::{FileNumber, FinishedRead, ReadToken};
use crate::engine::binlog::reads::Place;
use crate::engine::binlog::record;
use crate::engine::binlog::segments;
use crate::engine::collections::histogram::Histogram;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{ConnKey, JobKey, Key, NIL, TubeKey};
use crate::engine::time::Nanos;
use log::{error, warn};
use std::collections::TryReserveError;
use std::io;

/// The counts of bodies in memory and of cold ones, and the state of eviction.
#[derive(Debug, Default)]
pub struct BodyCache {
    /// The bytes of bodies that may be in memory; `None` if all may.
    pub limit: Option<u64>,
    /// The bytes of the bodies of jobs that are in memory.
    warm_bytes: u64,
    cold: ColdBodies,
    /// The page of jobs that is looked at next for bodies that can become cold.
    hand: usize,
    /// A body has become cold since the hand was at the first page.
    has_evicted: bool,
    /// No body can become cold, until one more is in memory.
    is_stuck: bool,
    /// In the last round no body has become cold, so those at the front of a tube may too.
    takes_front: bool,
    /// The jobs of a page whose bodies can become cold.
    victims: Vec<JobKey>,
    /// A record that was just read.
    bytes: Vec<u8>,
    /// The record that compaction moves next.
    moving: Option<Moving>,
    /// The number of reads that were begun for compaction.
    move_reads: u32,
    /// The file of which compaction cannot read a record that is not lost.
    unmoved: Option<FileNumber>,
    stats: ReadStats,
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

/// The result of a request for a body.
#[derive(Debug)]
pub enum Fetched {
    /// A reference of its own, which must be dropped.
    Body(Body),
    /// The disk must be asked for it.
    OnDisk(Place),
    /// It cannot be read.
    Unreadable,
    /// There are too many open files, or there is too little memory, to read it now.
    NotNow,
}

/// A record that compaction has asked the disk for.
#[derive(Debug)]
struct Moving {
    token: ReadToken,
    place: Place,
    /// `None` until it was read, or could not be read.
    bytes: Option<io::Result<Vec<u8>>>,
}

/// The tokens of reads for compaction begin with this. No connection has this key.
const COMPACTION: u64 = (NIL as u64) << u32::BITS;
/// The first jobs in a heap, and in a run, are near the front.
const FRONT: u32 = 64;
/// The disk reads ahead this many bodies at the front of a tube.
const AHEAD: usize = 8;

impl BodyCache {
    /// Returns whether bodies in memory take more than they may.
    pub fn is_full(&self) -> bool {
        self.limit.is_some_and(|limit| self.warm_bytes > limit)
    }

    /// Returns the bytes of the bodies of jobs that are in memory.
    pub fn warm_bytes(&self) -> u64 {
        self.warm_bytes
    }

    /// Returns the counts of cold bodies.
    pub fn cold(&self) -> ColdBodies {
        self.cold
    }

    /// Returns how cold bodies were read back.
    pub fn stats(&self) -> &ReadStats {
        &self.stats
    }

    /// Counts the body of a new job, which is in memory. `full_len` includes the CR LF.
    pub fn add(&mut self, full_len: u32) {
        self.warm_bytes += u64::from(full_len);
        self.is_stuck = false;
    }

    /// Returns whether more bodies are to become cold at once.
    pub fn is_due(&self) -> bool {
        self.is_full() && !self.is_stuck
    }
}

impl Queue {
    // ---- Bodies of jobs that come and go ----

    /// Drops a job that was removed, with its counts and its body. Returns whether this freed a page of bodies.
    pub(super) fn drop_job(&mut self, job: Job) -> bool {
        self.jobs.drop_counts(job.counts);
        self.drop_counted(job.tube, job.body)
    }

    /// Returns the body of a record at `offset` that is replayed: a cold one if the bodies in memory
    /// take too much.
    pub(super) fn body_of_record(
        &mut self,
        tube: TubeKey,
        bytes: &[u8],
        offset: u64,
    ) -> Result<Body, TryReserveError> {
        let full_len = u32::try_from(bytes.len()).expect("a body has at most 2^30 bytes");
        let with_it = self.body_cache.warm_bytes + u64::from(full_len);
        if self.body_cache.limit.is_some_and(|limit| with_it > limit)
            && segments::is_known_offset(offset)
        {
            self.count_cold(tube, full_len);
            return Ok(Body::cold(full_len));
        }
        let body = self.bodies.add(bytes)?;
        self.body_cache.add(full_len);
        Ok(body)
    }

    /// Replaces the tube and the body of a job during replay, after a newer full record at `offset`.
    pub(super) fn replace_body(
        &mut self,
        key: JobKey,
        tube: TubeKey,
        bytes: &[u8],
        offset: u64,
    ) -> Result<(), TryReserveError> {
        let body = self.body_of_record(tube, bytes, offset)?;
        let job = &mut self.jobs[key];
        let old_tube = std::mem::replace(&mut job.tube, tube);
        let old_body = std::mem::replace(&mut job.body, body);
        self.drop_counted(old_tube, old_body);
        Ok(())
    }

    /// Drops the body of a job in this tube. Returns whether this freed a page of bodies.
    fn drop_counted(&mut self, tube: TubeKey, body: Body) -> bool {
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
        self.bodies.remove(body)
    }

    fn count_cold(&mut self, tube: TubeKey, full_len: u32) {
        self.body_cache.cold.jobs += 1;
        self.body_cache.cold.bytes += u64::from(full_len);
        self.tubes[tube].cold += 1;
    }

    // ---- Eviction ----

    /// Drops the bytes of a job's body from memory, if its record has them and no connection has
    /// reserved it: that one was just given the bytes, or is about to be.
    pub(super) fn make_cold(&mut self, key: JobKey) {
        if !matches!(self.jobs[key].state, State::Reserved { .. }) {
            self.evict(key);
        }
    }

    /// Drops the body of a job that a client has just been given, if bodies in memory take too much.
    #[inline]
    pub fn after_reserve(&mut self, key: JobKey) {
        if self.body_cache.is_full() {
            self.evict(key);
        }
    }

    /// Drops the bytes of a job's body from memory, if its record has them.
    fn evict(&mut self, key: JobKey) {
        let Some(binlog) = &self.binlog else { return };
        let job = &mut self.jobs[key];
        let full_len = job.body.full_len();
        let tube = job.tube;
        if job.body.is_cold() || !binlog.has_place(self.unique.log_of(job.log)) {
            return;
        }
        let body = std::mem::replace(&mut job.body, Body::cold(full_len));
        self.freed_pages += usize::from(self.drop_counted(tube, body));
        self.count_cold(tube, full_len);
        self.body_cache.has_evicted = true;
    }

    /// Makes some bodies cold if those in memory take too much.
    pub(super) fn evict_step(&mut self) {
        if !self.body_cache.is_full() || self.binlog.is_none() {
            self.body_cache.takes_front = false;
            return;
        }
        if self.body_cache.hand >= self.jobs.page_count() {
            self.body_cache.hand = 0;
            self.body_cache.is_stuck = self.body_cache.takes_front && !self.body_cache.has_evicted;
            self.body_cache.takes_front = !self.body_cache.has_evicted;
            self.body_cache.has_evicted = false;
        }
        let takes_front = self.body_cache.takes_front;
        let mut victims = std::mem::take(&mut self.body_cache.victims);
        let most = self.limits.evictions_per_tick;
        let is_at_front = |job: &Job| is_at_front(job, &self.tubes[job.tube], &self.jobs);
        let can_go = |job: &Job| !job.body.is_cold() && (takes_front || !is_at_front(job));
        // Without memory for the list, nothing becomes cold now.
        if victims.try_reserve(most).is_ok() {
            let jobs = self.jobs.in_page(self.body_cache.hand);
            let found = jobs.filter(|(_, job)| can_go(job)).map(|(key, _)| key);
            victims.extend(found.take(most));
        }
        if victims.len() < most {
            self.body_cache.hand += 1;
        }
        for key in victims.drain(..) {
            if !self.body_cache.is_full() {
                break;
            }
            self.evict(key);
        }
        self.body_cache.victims = victims;
    }

    // ---- Reading ----

    /// Returns the body of a job for a client: a reference of its own if the bytes are in memory, or can
    /// be read without waiting for the disk.
    pub fn fetch(&mut self, key: JobKey) -> Result<Fetched, TryReserveError> {
        let job = &self.jobs[key];
        if !job.body.is_cold() {
            return self.copy_of_body(key).map(Fetched::Body);
        }
        let place = self.place_of(key);
        let id = job.id;
        let mut bytes = std::mem::take(&mut self.body_cache.bytes);
        let binlog = self.binlog.as_mut().expect("a cold body is in the binlog");
        let fetched = match binlog.read_now(place, &mut bytes) {
            Ok(false) => Ok(Fetched::OnDisk(place)),
            Ok(true) => self.body_of_bytes(place, id, Ok(&bytes)),
            Err(error) => self.body_of_bytes(place, id, Err(error)),
        };
        // The memory for a huge record is not kept.
        if bytes.capacity() <= KEPT_BYTES {
            self.body_cache.bytes = bytes;
        }
        fetched
    }

    fn copy_of_body(&mut self, key: JobKey) -> Result<Body, TryReserveError> {
        let body = &self.jobs[key].body;
        if body.is_large() {
            return Ok(self.bodies.share(body));
        }
        let mut bytes = std::mem::take(&mut self.body_cache.bytes);
        bytes.clear();
        let copied = headroom::leave(Headroom::Quarter, || {
            bytes.try_reserve(body.full_len() as usize)?;
            bytes.extend_from_slice(self.bodies.bytes(body));
            self.bodies.add(&bytes)
        });
        self.body_cache.bytes = bytes;
        copied
    }

    /// Returns the place of the full record of a job with a cold body.
    fn place_of(&self, key: JobKey) -> Place {
        let job = &self.jobs[key];
        let binlog = self.binlog.as_ref().expect("a cold body is in the binlog");
        let log = self.unique.log_of(job.log);
        let place = binlog.place(log, &self.tubes[job.tube].name, job.body.full_len());
        place.expect("the body was made cold because its place is known")
    }

    /// Returns whether the record of a cold body is not at this place any more.
    pub fn has_moved(&self, key: JobKey, before: Place) -> bool {
        self.jobs[key].body.is_cold() && self.place_of(key) != before
    }

    /// Begins to read a record. [`Queue::finished_read`] returns it later.
    pub fn begin_read(&mut self, token: ReadToken, place: Place) {
        let binlog = self.binlog.as_mut().expect("a place is in the binlog");
        binlog.begin_read(token, place);
    }

    /// Returns a record that was read for a client, once. Those for compaction are moved.
    pub fn finished_read(&mut self) -> Option<FinishedRead> {
        self.body_cache.limit?;
        loop {
            let finished = self.binlog.as_mut()?.finished_read()?;
            if finished.token.0 < COMPACTION {
                return Some(finished);
            }
            self.finish_move(finished);
        }
    }

    /// Returns a body of the record that was read for the job `id`. If the job is deleted, its record
    /// may be gone, and that is no failure.
    pub fn body_of_bytes(
        &mut self,
        place: Place,
        id: u64,
        bytes: io::Result<&[u8]>,
    ) -> Result<Fetched, TryReserveError> {
        let Place { layout, .. } = place;
        let is_deleted = self.find(id).is_none();
        let cause = match bytes {
            Ok(bytes) => match record::body_of(bytes, layout, id) {
                Ok(body) => {
                    self.body_cache.stats.reads += 1;
                    let added = headroom::leave(Headroom::Quarter, || self.bodies.add(body));
                    return added.map(Fetched::Body);
                }
                Err(corruption) => corruption.to_string(),
            },
            Err(error) if is_passing(&error) => {
                warn!("{place}: the body of job {id} cannot be read now: {error}");
                return Ok(Fetched::NotNow);
            }
            Err(error) => error.to_string(),
        };
        if !is_deleted {
            self.body_cache.stats.failures += 1;
            error!("{place}: the body of job {id} cannot be read: {cause}");
        }
        Ok(Fetched::Unreadable)
    }

    /// Notes that a client has waited for the disk.
    pub fn note_wait(&mut self, span: Nanos) {
        self.body_cache.stats.wait_times.count(span);
    }

    /// Buries a job whose body this connection wants and that cannot be read, unless another one has
    /// reserved it: that one has the body.
    pub fn bury_unreadable(&mut self, key: JobKey, conn: ConnKey, now: Nanos) {
        let Job { id, state, .. } = self.jobs[key];
        // A record after that of the flush would bring the job back.
        if self.is_flushed(&self.jobs[key]) {
            return;
        }
        match state {
            State::Buried(_) => return,
            State::Reserved { by, .. } if by != conn => return,
            State::Detached
            | State::Ready { .. }
            | State::Delayed(_)
            | State::Postponed(_)
            | State::Reserved { .. } => {}
        }
        error!("job {id} is buried, because its body cannot be read");
        if self.reserve_update().is_ok() {
            self.transition(key, Target::Buried, now);
        } else {
            self.attach(key, Target::Buried, now);
        }
    }

    /// Begins to read ahead the cold bodies at the front of a tube.
    pub fn read_ahead(&mut self, tube: TubeKey) {
        let (Some(binlog), tube) = (&mut self.binlog, &self.tubes[tube]) else { return };
        if tube.cold == 0 {
            return;
        }
        for job in tube.ready.keys(&self.jobs).take(AHEAD) {
            let job = &self.jobs[JobKey::from_number(job)];
            if job.body.is_cold()
                && let Some(place) =
                    binlog.place(self.unique.log_of(job.log), &tube.name, job.body.full_len())
            {
                binlog.read_ahead(place);
            }
        }
    }

    // ---- Moving ----

    /// Reads the record of a cold body for compaction. Returns `None` if it waits for the disk, or if
    /// the record cannot be read. If the disk has lost the record, the job is lost; otherwise compaction
    /// waits.
    pub(super) fn record_to_move(&mut self, key: JobKey, may_wait: bool) -> Option<Vec<u8>> {
        let place = self.place_of(key);
        let binlog = self.binlog.as_mut()?;
        let mut bytes = Vec::new();
        let read = match self.body_cache.moving.take() {
            Some(moving) if moving.place == place && moving.bytes.is_none() && !may_wait => {
                self.body_cache.moving = Some(moving);
                return None;
            }
            Some(Moving { place: wanted, bytes: Some(read), .. }) if wanted == place => {
                read.map(|read| {
                    bytes = read;
                    true
                })
            }
            Some(_) | None if may_wait => binlog.read_and_wait(place, &mut bytes).map(|()| true),
            Some(_) | None => binlog.read_now(place, &mut bytes),
        };
        match read {
            Ok(true) => {
                self.body_cache.unmoved = None;
                Some(bytes)
            }
            Ok(false) => {
                let number = self.body_cache.move_reads;
                self.body_cache.move_reads = number.wrapping_add(1);
                let token = ReadToken(COMPACTION | u64::from(number));
                binlog.begin_read(token, place);
                self.body_cache.moving = Some(Moving { token, place, bytes: None });
                None
            }
            Err(error) if is_loss(&error) => {
                self.lose(key, place, &error.to_string());
                None
            }
            Err(error) => {
                binlog.postpone_moves();
                if self.body_cache.unmoved.replace(place.file) != Some(place.file) {
                    let id = self.jobs[key].id;
                    warn!(
                        "{place}: the record of job {id} cannot be read now: {error}; keeping \
                         binlog.{} until it can",
                        place.file
                    );
                }
                None
            }
        }
    }

    fn finish_move(&mut self, finished: FinishedRead) {
        // The job that was to be moved may be deleted, and another one be moved instead.
        let moving = self.body_cache.moving.take_if(|moving| moving.token == finished.token);
        let Some(Moving { token, place, .. }) = moving else { return };
        self.body_cache.moving = Some(Moving { token, place, bytes: Some(finished.bytes) });
        self.compact();
    }

    /// Deletes a job whose record cannot be read, so that compaction can go on. The file is kept under
    /// another name.
    pub(super) fn lose(&mut self, key: JobKey, place: Place, cause: &str) {
        // A client that has waited may be about to get the job. Its reply comes before the next step.
        if !self.wait_results.is_empty() {
            return;
        }
        let id = self.jobs[key].id;
        error!("{place}: the record of job {id} cannot be read: {cause}; the job is lost");
        self.body_cache.stats.failures += 1;
        let Some(binlog) = &mut self.binlog else { return };
        let log = self.unique.log_of(self.jobs[key].log);
        binlog.note_damage(log);
        // Without space for the record, the job is lost again at the next start.
        if binlog.reserve_delete(false).is_err() {
            return binlog.postpone_moves();
        }
        self.detach(key);
        let job = self.jobs.remove(key);
        if let Some(unique) = job.log.unique() {
            self.unique.remove(unique, key);
        }
        self.record_end(&job, log, None);
        let tube = job.tube;
        self.freed_pages += usize::from(self.drop_job(job));
        self.remove_tube_if_idle(tube);
    }

    // ---- Checking ----

    /// Checks the counts of bodies in memory and of cold ones.
    pub(super) fn check_body_cache(&self) {
        let (mut warm_bytes, mut cold) = (0, ColdBodies::default());
        for (_, job) in self.jobs.iter() {
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
        assert!(cold.jobs == 0 || self.body_cache.limit.is_some(), "cold bodies without a limit");
    }
}

/// A buffer for records keeps at most this much memory.
const KEPT_BYTES: usize = 1024 * 1024;

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

/// Returns whether a job of `tube` is probably reserved soon. A run has ids that are close to each other.
fn is_at_front(job: &Job, tube: &Tube, jobs: &Jobs) -> bool {
    let (links, run) = match job.state {
        State::Ready(links) => (links, tube.ready.first_of_run()),
        State::Delayed(links) => (links, tube.delayed.first_of_run()),
        State::Postponed(_) => return true,
        State::Detached | State::Reserved { .. } | State::Buried(_) => return false,
    };
    let first = run.map_or(job.id, |first| jobs[JobKey::from_number(first)].id);
    links.index().map_or(job.id < first.saturating_add(FRONT.into()), |index| index < FRONT)
}
