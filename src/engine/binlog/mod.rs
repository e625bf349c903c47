//! The binlog: records of jobs in files, so that the jobs survive a restart.
//!
//! ```text
//!   oldest                      current              prepared
//!   [binlog.3] [binlog.4] [binlog.5: records | free] [binlog.6: free]
//!    emptied first                   ^ new records        ^ space for later ones
//! ```
//!
//! A file is a segment. New records go to the end of the current one. They gather in a batch, which
//! is written once per loop iteration ([`Binlog::commit`]), before the replies of that iteration
//! leave. Each live job belongs to the file that has its full record. A file without jobs is removed
//! when no older file has a record that one of its records supersedes: a record must never outlive the
//! record that supersedes it. The kept key of a deleted job counts as a job here.
//!
//! The first error of a write or sync is final: nothing is written after it, and
//! [`Binlog::commit`] returns it. A function that returns [`NoSpace`] has changed nothing.
//! A function panics if it is called with a key of a job that was deleted.
//!
//! | file | owns |
//! |---|---|
//! | [`disk`] | the trait for files in a directory |
//! | [`fail_stop`] | the disk, which stops at its first error |
//! | [`record`] | one record to and from bytes |
//! | [`key_record`] | the record of the key of a unique job |
//! | [`reader`] | reads one file, however damaged it is |
//! | [`segments`] | the table of files and jobs |
//! | [`gaps`] | numbers of files that were removed before older ones |
//! | [`files`] | the bytes that files take and have free |
//! | [`writer`] | appends records to the current file |
//! | [`syncing`] | syncs records |
//! | [`space`] | reserves space for records |
//! | [`refusal_log`] | limits the log lines about refused puts |
//! | [`compaction`] | decides when live jobs are moved out of the oldest files |
//! | [`removal`] | removes files without jobs |
//! | [`reads`] | reads full records back |
//! | [`inspect`] | `--check` and `--dump` |
//! | [`copy`] | `--import` and `--export` |

mod compaction;
pub mod copy;
pub mod disk;
mod fail_stop;
mod files;
pub mod gaps;
pub mod inspect;
pub mod key_record;
pub mod reader;
pub mod reads;
pub mod record;
mod refusal_log;
mod removal;
pub mod segments;
mod space;
mod syncing;
mod writer;

use super::collections::histogram::Histogram;
use super::keys::{JobKey, KeptKey, LogKey};
use super::limits::Limits;
use super::time::Nanos;
use compaction::Compaction;
use disk::{Disk, FileNumber, Progress, RemoteStats};
use fail_stop::FailStopDisk;
use files::{SHORT, records_len};
use gaps::Gaps;
use key_record::KeyRecord;
use record::{Fields, FlushKind, RecordState};
use removal::Removal;
use segments::{Owner, Segments};
use space::{Reservation, Space};
use std::collections::TryReserveError;
use std::fmt;
use std::io;
pub use syncing::Syncing;
use writer::Writer;

/// The files of a binlog, and the records that are not written yet.
#[derive(Debug)]
pub struct Binlog {
    writer: Writer,
    space: Space,
    removal: Removal,
    compaction: Compaction,
    /// Compaction continues when the disk has read a record for it.
    is_awaiting_read: bool,
    /// The moment of the last record of a buried job.
    last_buried_at: Nanos,
}

/// The values that continue from one start of the server to the next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Resume {
    /// The highest id that was given out.
    pub id: u64,
    /// The moment of the last record of a buried job.
    pub buried_at: Nanos,
}

/// The operator's choices.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The size of a file in bytes. On a small disk files are smaller.
    pub file_size: u32,
    /// The length of the longest body in bytes.
    pub max_body_len: u32,
    /// The most bytes that all files may take. Deletes have room within it.
    pub max_bytes: u64,
    /// The moment of syncs.
    pub syncing: Syncing,
    /// The bounds of steps and iterations.
    pub limits: Limits,
}

/// The numbers of `stats`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BinlogStats {
    /// The number of the oldest file.
    pub oldest: FileNumber,
    /// The number of the file that is written.
    pub current: FileNumber,
    /// The number of records that were written, moved ones included.
    pub records_written: u64,
    /// The number of jobs that were moved to a newer file.
    pub records_migrated: u64,
}

/// The number of files, and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BinlogSizes {
    /// The number of files.
    pub files: usize,
    /// The bytes that they take on the disk.
    pub disk_bytes: u64,
    /// The bytes of the full records of all jobs, with the records of their keys, and of kept keys.
    pub live_bytes: u64,
    /// The bytes of all other records.
    pub dead_bytes: u64,
    /// Puts are refused for want of space.
    pub is_full: bool,
}

/// What the key of a new job needs.
#[derive(Clone, Copy, Debug)]
pub struct KeyNeeds {
    /// It is kept after the delete of the job.
    pub is_kept: bool,
}

/// Why a binlog cannot begin.
#[derive(Debug)]
pub enum BeginError {
    /// No file can be created.
    NoFile(io::Error),
    /// A write or a sync has failed. The kernel reports that once, so the next start would not
    /// notice it.
    Failed(IoFailed),
}

/// The first error of the disk. Records may be lost.
#[derive(Clone, Debug)]
pub struct IoFailed(String);

/// Why a record cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSpace {
    /// There is too little memory.
    Memory,
    /// There is too little space on the disk.
    Space,
}

impl Binlog {
    /// The bytes of memory that the binlog needs for one job.
    pub const BYTES_PER_JOB: u64 = Segments::BYTES_PER_JOB;

    /// Returns a binlog with these files, which were just read, and a new current one with space
    /// for the deletes of all jobs.
    pub fn begin(
        disk: Box<dyn Disk>,
        policy: Policy,
        files: (Segments, Gaps),
        resume: Resume,
        now: Nanos,
    ) -> Result<Binlog, BeginError> {
        let disk = FailStopDisk::new(disk, policy.syncing != Syncing::Never);
        let mut writer = Writer::open(disk, policy, files, resume, now)
            .map_err(|_| BeginError::NoFile(io::ErrorKind::OutOfMemory.into()))?;
        let mut space = Space::default();
        let mut removal = Removal::new();
        let begun = space.begin(&mut writer, &mut removal);
        // A disk that has failed creates no file either.
        writer.status().map_err(BeginError::Failed)?;
        begun.map_err(BeginError::NoFile)?;
        Ok(Binlog {
            writer,
            space,
            removal,
            compaction: Compaction::default(),
            is_awaiting_read: false,
            last_buried_at: resume.buried_at,
        })
    }

    // ---- Reserving ----

    /// Reserves memory and space for a new job with a full record of `len` bytes, and for its
    /// delete. `key` is what its key needs, if it has one.
    pub fn reserve_put(&mut self, len: usize, key: Option<KeyNeeds>) -> Result<(), NoSpace> {
        let len = len as u64 + key.map_or(0, |_| SHORT);
        let records = delete_records(key.is_some_and(|key| key.is_kept));
        self.space.reserve_put(&mut self.writer, &mut self.removal, len, records)
    }

    /// Reserves space for [`Binlog::update`].
    pub fn reserve_update(&mut self) -> Result<(), NoSpace> {
        self.reserve(Reservation::update(self.writer.files()))
    }

    /// Reserves space for [`Binlog::delete`], or for [`Binlog::delete_and_keep`] of a job whose key
    /// `is_kept`. Only a server that was started on a full disk may lack it.
    pub fn reserve_delete(&mut self, is_kept: bool) -> Result<(), NoSpace> {
        let records = delete_records(is_kept);
        self.space.reserve_delete(&mut self.writer, &mut self.removal, records)
    }

    /// Reserves space for [`Binlog::flush`], whose record has `len` bytes. It may use the space of
    /// compaction, because it frees space.
    pub fn reserve_flush(&mut self, len: usize) -> Result<(), NoSpace> {
        self.reserve(Reservation::from_headroom(self.writer.files(), len as u64))
    }

    /// Reserves space for [`Binlog::hold`]. It may use the space of compaction.
    pub fn reserve_hold(&mut self) -> Result<(), NoSpace> {
        self.reserve(Reservation::from_headroom(self.writer.files(), SHORT))
    }

    fn reserve(&mut self, need: Reservation) -> Result<(), NoSpace> {
        self.space.reserve(&mut self.writer, &mut self.removal, need)
    }

    // ---- Records ----

    /// Appends the full record of a new job, after [`Binlog::reserve_put`], with the record of its key
    /// before it.
    pub fn put(
        &mut self,
        job: JobKey,
        unique: Option<&KeyRecord>,
        fields: &Fields,
        tube: &str,
        body: &[u8],
    ) -> LogKey {
        self.writer.note_id(fields.id);
        let len = len_in_file(unique, tube, body);
        let key_len = key_len(unique);
        let key = self.writer.files_mut().add_job(job, key_len, len);
        if let Some(unique) = unique {
            self.writer.files_mut().set_keeping(key, unique.ttl_secs > 0);
            self.writer.append_key(unique);
        }
        self.writer.append(fields, tube, body);
        self.compaction.charge_put(self.writer.files(), len);
        key
    }

    /// Appends a short record of a job, after [`Binlog::reserve_update`].
    pub fn update(&mut self, key: LogKey, fields: &Fields) {
        let is_buried = fields.state == RecordState::Buried;
        let buried_at = is_buried.then_some(fields.due_or_buried_at);
        // Without memory the moment is lost: after a compaction and a restart the job is the first of the
        // buried ones.
        let _ = self.writer.files_mut().set_buried_at(key, buried_at);
        self.writer.files_mut().supersede(key);
        self.writer.append(fields, "", &[]);
        self.compaction.charge(self.writer.files_mut(), SHORT);
    }

    /// Appends the record of a delete, after [`Binlog::reserve_delete`].
    pub fn delete(&mut self, key: LogKey, fields: &Fields) {
        self.writer.files_mut().supersede(key);
        self.writer.append(fields, "", &[]);
        let entry = self.writer.files_mut().remove_job(key);
        self.compaction.charge(self.writer.files_mut(), SHORT + u64::from(entry.live_bytes()));
    }

    /// Appends the records of a kept key and of the delete of its job, after
    /// [`Binlog::reserve_delete`]. The entry of the job becomes that of the key. A flush has deleted the
    /// job before if it `is_flushed`.
    pub fn delete_and_keep(
        &mut self,
        key: LogKey,
        owner: KeptKey,
        kept: &KeyRecord,
        fields: &Fields,
        is_flushed: bool,
    ) {
        self.writer.append_key(kept);
        let entry = self.segments().entry(key);
        let (file, garbage) = (entry.file(), u64::from(entry.live_bytes()));
        self.writer.files_mut().keep_key(key, owner);
        let reserved = self.reserve_delete(false);
        assert!(reserved.is_ok(), "there was room for two records, and no room is left for one");
        // The delete may be in another file than the key.
        self.writer.files_mut().supersede_file(file);
        if is_flushed {
            self.writer.append_without_sync(fields);
            self.writer.files_mut().count_free();
        } else {
            self.writer.append(fields, "", &[]);
            self.compaction.charge(self.writer.files_mut(), SHORT + garbage);
        }
    }

    /// Forgets a kept key: its record is garbage from now on.
    pub fn forget_key(&mut self, key: LogKey) {
        self.writer.files_mut().remove_job(key);
        self.compaction.charge(self.writer.files_mut(), SHORT);
    }

    /// Appends the record of a flush, after [`Binlog::reserve_flush`]. After it the jobs of the tube
    /// are deleted, even if their own deletes are not recorded yet. It is not counted in `stats`, because C
    /// beanstalkd does not make such a record.
    pub fn flush(&mut self, tube: &str, kind: FlushKind, decided_at: Nanos) {
        self.writer.files_mut().supersede_file(0);
        self.writer.append(&record::flush(kind, decided_at), tube, &[]);
        self.writer.uncount_record();
    }

    /// Appends the record of the delete of a flushed job. It is not synced by itself, because the
    /// record of the flush has deleted the job.
    pub fn delete_flushed(&mut self, key: LogKey, fields: &Fields) {
        // Only a server that was started on a full disk may lack space for it.
        if self.reserve_delete(false).is_ok() {
            self.writer.files_mut().supersede(key);
            self.writer.append_without_sync(fields);
        }
        self.writer.files_mut().remove_job(key);
        self.writer.files_mut().count_free();
    }

    /// Appends the record of a buried job that was reserved, after [`Binlog::reserve_hold`]. It
    /// is not counted in `stats`, because C beanstalkd does not make such a record.
    pub fn hold(&mut self, key: LogKey, fields: &Fields) {
        self.update(key, fields);
        self.writer.uncount_record();
    }

    /// Returns the moment for a job that is buried now. It is later than that of every job buried
    /// before, even if the clock of the system was set back.
    pub fn next_burial(&mut self, now: Nanos) -> Nanos {
        self.last_buried_at = now.max(self.last_buried_at + Nanos::ONE);
        self.last_buried_at
    }

    /// Returns when a buried job was buried.
    pub fn buried_at(&self, key: LogKey) -> Nanos {
        self.segments().buried_at(key)
    }

    // ---- Compaction ----

    /// Returns the job or kept key that compaction moves next, or `None` if no move is due or there is
    /// no space. The caller moves it with [`Binlog::move_to_current`] or [`Binlog::move_kept_key`].
    pub fn next_to_move(&mut self) -> Option<(LogKey, Owner)> {
        let cannot_move = self.is_congested() || self.is_awaiting_read;
        if cannot_move || !self.compaction.is_due(self.writer.files()) {
            return None;
        }
        self.writer.files_mut().count_free();
        // On a full or nearly full disk a file is begun only if all of its jobs fit in other files, with
        // the records of the gap that it leaves.
        let must_fit = self.compaction.is_freeing() || self.writer.files().is_full();
        let gap_bytes = (1 + self.writer.files().prepared().len() as u64) * SHORT;
        let most_live = if must_fit {
            self.space.most_to_move(self.writer.files_mut()).saturating_sub(gap_bytes)
        } else {
            u64::MAX
        };
        let file = self.compaction.choose_file(self.writer.files(), most_live);
        let file = file.map(|file| (file.number, file.live_bytes())).filter(|(_, live_bytes)| {
            let bytes = live_bytes + gap_bytes;
            !must_fit || self.space.make_room_for(&mut self.writer, &mut self.removal, bytes)
        });
        self.compaction.note_space(self.writer.files(), !must_fit || file.is_some());
        let found = file.and_then(|(number, _)| self.reserve_first_of(number));
        self.compaction.set_blocked(found.is_none());
        found
    }

    /// Returns a job or kept key to be moved out of damaged files, if there is space. The caller moves
    /// it with [`Binlog::move_to_current`] or [`Binlog::move_kept_key`].
    pub fn next_in_damaged_file(&mut self) -> Option<(LogKey, Owner)> {
        self.writer.files_mut().count_free();
        // A damaged file leaves only as the oldest one.
        let last = self.segments().iter().rfind(|segment| segment.is_damaged)?.number;
        let oldest = self.writer.files().kept_closed().next()?.number;
        self.reserve_first_of(oldest).filter(|_| oldest <= last)
    }

    /// Reserves space for the first job of a file.
    fn reserve_first_of(&mut self, file: FileNumber) -> Option<(LogKey, Owner)> {
        let key =
            self.segments().find_file(file)?.first_job().filter(|&key| self.reserve_move(key))?;
        Some((key, self.segments().entry(key).owner()))
    }

    /// Reserves space for [`Binlog::move_to_current`]. Returns `false` if there is none.
    pub fn reserve_move(&mut self, key: LogKey) -> bool {
        let len = self.segments().entry(key).live_bytes().into();
        self.reserve(Reservation::from_headroom(self.writer.files(), len)).is_ok()
    }

    /// Notes that the full record of a job is damaged: its file is not removed, but renamed.
    pub fn note_damage(&mut self, key: LogKey) {
        let file = self.segments().entry(key).file();
        self.writer.files_mut().note_damage(file);
    }

    /// Notes that the next job cannot be moved now.
    pub fn postpone_moves(&mut self) {
        self.compaction.set_blocked(true);
    }

    /// Appends a new full record of a job that is to be moved, with the record of its key before it.
    /// Returns their length in bytes.
    pub fn move_to_current(
        &mut self,
        key: LogKey,
        unique: Option<&KeyRecord>,
        fields: &Fields,
        tube: &str,
        body: &[u8],
    ) -> u64 {
        let len = len_in_file(unique, tube, body);
        self.writer.files_mut().move_job(key, key_len(unique), len);
        if let Some(unique) = unique {
            self.writer.append_key(unique);
        }
        self.writer.append(fields, tube, body);
        self.note_moved(key, len)
    }

    /// Appends a new record of a kept key that is to be moved. Returns its length in bytes.
    pub fn move_kept_key(&mut self, key: LogKey, kept: &KeyRecord) -> u64 {
        self.writer.files_mut().move_job(key, 0, SHORT);
        self.writer.append_key(kept);
        self.note_moved(key, SHORT)
    }

    fn note_moved(&mut self, key: LogKey, len: u64) -> u64 {
        let owner = self.segments().entry(key).owner();
        self.compaction.note_moved(owner, len);
        self.writer.files_mut().count_free();
        len
    }

    // ---- Time ----

    /// Begins an iteration: [`Binlog::next_to_move`] may return a job then.
    pub fn tick(&mut self, now: Nanos) {
        self.writer.set_now(now);
        self.compaction.tick(self.writer.files(), now);
    }

    /// Returns when [`Binlog::tick`] or [`Binlog::commit`] has something to do.
    pub fn next_due(&self) -> Option<Nanos> {
        let files = self.writer.files();
        let can_move = !self.is_congested() && !self.is_awaiting_read;
        let step = self.compaction.next_due(files).filter(|_| can_move);
        let sync = self.writer.syncing().due();
        let removal = self.removal.next_due(&self.writer);
        let rewind = self.space.drained_due(&self.writer);
        [step, sync, removal, rewind].into_iter().flatten().min()
    }

    /// Writes the records of the iteration, and syncs them if a sync is due: see [`Syncing`]. The replies
    /// of the iteration may leave only after it returns `Ok`, and with a remote disk when
    /// [`Binlog::progress`] is complete.
    pub fn commit(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.writer.status()?;
        let iteration_at = self.writer.now().max(now);
        self.writer.set_now(iteration_at);
        self.space.begin_iteration();
        if self.space.drained_due(&self.writer).is_some_and(|due| due <= now) {
            self.space.rewind(&mut self.writer);
        }
        self.writer.flush_early();
        self.writer.poll_sync();
        if self.writer.syncing().due().is_some_and(|due| due <= now) {
            self.writer.request_sync();
        }
        if self.removal.is_due(self.writer.files(), iteration_at) {
            // Beyond the bound the commit waits for the sync, so that files cannot be written faster than
            // they are removed.
            let may_wait = self.writer.files().is_within_bound();
            self.removal.remove_some(&mut self.writer, may_wait, iteration_at);
        }
        self.space.remove_excess(&mut self.writer);
        self.removal.truncate_step(self.writer.files_mut());
        self.writer.files_mut().disk_mut().hand_over();
        self.writer.status()
    }

    /// Syncs all records and frees the space that is not used. Nothing may be recorded after it.
    pub fn close(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.remove_all(now)?;
        self.space.remove_all_prepared(&mut self.writer);
        let files = self.writer.files_mut();
        files.truncate_current();
        let number = files.current().number;
        files.disk_mut().raw().close(number);
        files.disk_mut().sync_names();
        files.disk_mut().hand_over();
        self.writer.status()
    }

    /// Removes all files without jobs, and renames damaged ones.
    pub fn remove_all(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.commit(now)?;
        self.writer.sync();
        let now = self.writer.now();
        self.removal.remove_all(self.writer.files_mut(), now);
        self.writer.status()
    }

    // ---- Checking ----

    /// Panics unless all sums and lists agree. They also agree after an error of the disk, but not
    /// after [`Binlog::close`].
    pub fn check(&self) {
        self.writer.check();
        self.space.check(self.writer.files());
    }

    /// Panics unless the key is that of this job or kept key, with records of `len` bytes.
    pub fn check_entry(&self, key: LogKey, owner: Owner, id: u64, len: usize) {
        let known =
            self.segments().find(key).map(|entry| (entry.owner(), entry.live_bytes() as usize));
        assert_eq!(known, Some((owner, len)), "job {id}, as the binlog knows it, and as it is");
    }

    /// Returns how many jobs have a full record.
    pub fn job_count(&self) -> u64 {
        self.segments().job_count()
    }

    // ---- Numbers ----

    fn segments(&self) -> &Segments {
        self.writer.files().segments()
    }

    /// Returns whether each commit with records ends in a sync.
    pub fn syncs_each_iteration(&self) -> bool {
        self.writer.syncing().is_each_iteration()
    }

    /// Returns the bytes of memory that the table of jobs takes.
    pub fn job_table_bytes(&self) -> u64 {
        self.segments().taken_bytes()
    }

    /// Returns the numbers of `stats`.
    pub fn stats(&self) -> BinlogStats {
        BinlogStats {
            oldest: self.segments()[0].number,
            current: self.writer.files().current().number,
            records_written: self.writer.records_written(),
            records_migrated: self.compaction.records_migrated(),
        }
    }

    /// Returns the number of files, and their bytes.
    pub fn sizes(&self) -> BinlogSizes {
        let files = self.writer.files();
        let live_bytes = self.segments().live_bytes();
        let written = self.segments().iter().map(records_len);
        BinlogSizes {
            files: self.segments().len(),
            disk_bytes: files.disk_bytes(),
            live_bytes,
            dead_bytes: written.sum::<u64>().saturating_sub(live_bytes),
            is_full: self.space.is_full(files),
        }
    }

    /// Hands over what was written to a remote disk.
    pub fn hand_over(&mut self) {
        self.writer.files_mut().disk_mut().hand_over();
    }

    /// Returns how far the disk is with what was written, if it is remote.
    pub fn progress(&self) -> Option<Progress> {
        self.writer.files().disk().progress()
    }

    fn is_congested(&self) -> bool {
        self.progress().is_some_and(|progress| progress.is_congested)
    }

    /// Returns the numbers of a remote disk.
    pub fn remote_stats(&self) -> Option<RemoteStats> {
        self.writer.files().disk().remote_stats()
    }

    /// Returns how long syncs of files took.
    pub fn sync_times(&self) -> Histogram {
        self.writer.files().disk().sync_times()
    }

    /// Returns whether a file is damaged.
    pub fn has_damaged(&self) -> bool {
        self.segments().iter().any(|segment| segment.is_damaged)
    }

    /// Returns the number of the file that has the full record of a job.
    pub fn file_of(&self, key: LogKey) -> FileNumber {
        self.segments().entry(key).file()
    }
}

/// Returns how many short records the delete of a job needs.
fn delete_records(is_key_kept: bool) -> u64 {
    1 + u64::from(is_key_kept)
}

/// Returns the length of the record of a key before a full record in bytes.
fn key_len(unique: Option<&KeyRecord>) -> u64 {
    unique.map_or(0, |_| SHORT)
}

/// Returns the length in bytes of the full record of a job and of the record of its key.
fn len_in_file(unique: Option<&KeyRecord>, tube: &str, body: &[u8]) -> u64 {
    record::full_len(tube, body.len()) as u64 + key_len(unique)
}

impl From<TryReserveError> for NoSpace {
    fn from(_: TryReserveError) -> NoSpace {
        NoSpace::Memory
    }
}

impl fmt::Display for IoFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
