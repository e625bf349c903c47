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
//! record that supersedes it. A deleted job counts as long as its key is kept.
//!
//! The first error of a write or sync is final: nothing is written after it, and
//! [`Binlog::commit`] returns it. A function that returns [`NoSpace`] has changed nothing.
//! A function panics if it is called with a key of a job that was deleted.
//!
//! | file | owns |
//! |---|---|
//! | [`disk`] | the trait for files in a directory |
//! | [`error`] | why a binlog cannot be used |
//! | [`record`] | one record to and from bytes |
//! | [`reader`] | reads one file, however damaged it is |
//! | [`history`] | what the records of all files mean together |
//! | [`files`] | the table of files, and of the jobs that belong to them |
//! | [`gaps`] | numbers of files that were removed before older ones |
//! | [`writer`] | appends records to the current file |
//! | [`syncing`] | syncs records, removes files without jobs, stops at the first error |
//! | [`space`] | reserves space for records |
//! | [`refusal_log`] | limits the log lines about refused puts |
//! | [`compaction`] | decides when live jobs are moved, and out of which files |
//! | [`reads`] | reads full records back |
//! | [`inspect`] | `--check` and `--dump` |
//! | [`copy`] | `--import` and `--export` |

mod compaction;
pub mod copy;
pub mod disk;
pub mod error;
pub mod files;
pub mod gaps;
pub mod history;
pub mod inspect;
pub mod reader;
pub mod reads;
pub mod record;
mod refusal_log;
mod space;
mod syncing;
mod writer;

use super::collections::chains::low_half;
use super::keys::JobKey;
use super::limits::{Limits, Settings};
use super::time::Nanos;
use crate::engine::headroom::NoMemory;
use compaction::Compaction;
use disk::{Disk, FileNumber};
use error::{BinlogError, Step};
use files::{Entry, File, Files, SHORT};
use record::{Content, Decision, Fields, FlushKind, KeyRecord};
use space::Space;
use std::hash::{BuildHasher, RandomState};
use std::io;
use syncing::SyncState;
pub use syncing::{Progress, Seq, Syncing};

/// The files of a binlog, and the records that are not written yet.
pub struct Binlog {
    /// Other modules only let it read, and ask for its figures.
    pub disk: Box<dyn Disk>,
    /// The first error of the disk: after it nothing is changed.
    failure: Option<BinlogError>,
    settings: Settings,
    /// The moment of syncs.
    syncing: Syncing,
    limits: Limits,
    /// Other modules only read the table.
    pub files: Files,
    space: Space,
    sync: SyncState,
    compaction: Compaction,
    /// Records at the end of the current file that are not written yet.
    batch: Vec<u8>,
    /// The nonce of all records that are written.
    nonce: u32,
    /// The highest id that was given out.
    last_id: u64,
    /// The moment at which the present iteration began.
    now: Nanos,
    /// The moment of the last record.
    recorded_at: Nanos,
    /// The numbers of records of jobs that were made since the start, and of those that moved a job to a newer
    /// file. Other modules only read them.
    pub records_written: u64,
    pub records_migrated: u64,
}

/// The full record of a job, and that of its key, which is directly before it.
#[derive(Clone, Copy, Debug)]
pub struct FullRecords<'r> {
    pub unique: Option<KeyRecord>,
    pub fields: Fields,
    pub tube: &'r str,
    /// With CR LF.
    pub body: &'r [u8],
}

/// A record cannot be made: there is too little memory, or space on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoSpace;

impl Binlog {
    /// The bytes of memory that the binlog needs for one job.
    pub const BYTES_PER_JOB: u64 = size_of::<Entry>() as u64;

    /// Returns a binlog with these files, which were just read, and a new current one with space
    /// for the deletes of all jobs. The highest id is that of all records.
    pub fn begin(
        disk: Box<dyn Disk>,
        settings: Settings,
        syncing: Syncing,
        limits: Limits,
        files: Files,
        last_id: u64,
        now: Nanos,
    ) -> Result<Binlog, BinlogError> {
        let mut batch = Vec::new();
        let reserved = batch.try_reserve_exact(writer::longest_batch(&limits));
        let no_file = |error| BinlogError::new(Step::Begin, "cannot create a file", error);
        reserved.map_err(|error| no_file(io::Error::from(error)))?;
        let mut binlog = Binlog {
            disk,
            failure: None,
            settings,
            syncing,
            limits,
            files,
            space: Space::default(),
            sync: SyncState::default(),
            compaction: Compaction::default(),
            batch,
            // A hash with random keys.
            nonce: low_half(RandomState::new().hash_one(())),
            last_id,
            now,
            recorded_at: now,
            records_written: 0,
            records_migrated: 0,
        };
        let begun = binlog.begin_files();
        // A disk that has failed creates no file either.
        binlog.status()?;
        begun.map_err(no_file)?;
        Ok(binlog)
    }

    // ---- Records ----

    /// Appends the records of a new job, after [`Binlog::reserve_put`].
    pub fn put(&mut self, job: JobKey, records: &FullRecords<'_>) {
        self.last_id = self.last_id.max(records.fields.id);
        let keeps_key = records.unique.is_some_and(|unique| unique.ttl_secs > 0);
        let (place, len) = self.append_full(records);
        self.files.add(job, place, len, keeps_key);
        self.charge_put(len);
    }

    /// Appends a short record of a job, after [`Binlog::reserve_update`].
    pub fn update(&mut self, key: JobKey, fields: &Fields) {
        self.files.supersede(key);
        self.append_job(fields, "", &[]);
        self.charge(SHORT);
    }

    /// Appends the record of a delete, after [`Binlog::reserve_delete`], with that of the key before it if it is
    /// kept.
    pub fn delete(&mut self, job: JobKey, fields: &Fields, kept: Option<&KeyRecord>) {
        let is_flushed = fields.mark.is_flushed();
        let entry = self.files.entry(job);
        let (older, len) = (entry.file(), entry.live_bytes());
        if let Some(key) = kept {
            self.append_kept(job, key);
        }
        // Only a server that was started on a full disk may lack space for the delete of a flushed job.
        let is_reserved = !is_flushed && kept.is_none();
        let has_room = is_reserved || self.reserve_delete(false).is_ok();
        assert!(has_room || kept.is_none(), "there was room for two records, and is none for one");
        if has_room {
            // It may be in another file than the key.
            self.files.supersede_file(older);
            self.append_job(fields, "", &[]);
        }
        if kept.is_none() {
            self.files.remove(job);
        }
        if !is_flushed {
            self.charge(SHORT + len);
        }
    }

    fn append_kept(&mut self, job: JobKey, key: &KeyRecord) {
        self.append(&Content::Key(*key), "");
        self.files.keep(job);
    }

    /// Forgets a deleted job whose key was kept: the record of the key is garbage from now on.
    pub fn forget(&mut self, job: JobKey) {
        self.files.remove(job);
        self.charge(SHORT);
    }

    /// Appends the record of a flush. After it the jobs of the tube are deleted, even if their own deletes are
    /// not recorded yet. It may use the space of compaction, because it frees space.
    pub fn flush(&mut self, tube: &str, kind: FlushKind, decided_at: Nanos) -> Result<(), NoSpace> {
        self.reserve_from_headroom(record::full_len(tube, 0) as u64)?;
        self.files.supersede_file(0);
        self.append(&Content::Flush(Decision { kind, decided_at }), tube);
        Ok(())
    }

    /// Does not count the last record in `stats`, because C beanstalkd does not make such a record.
    pub fn uncount_record(&mut self) {
        self.records_written -= 1;
    }

    /// Appends the record of a buried job that was reserved. It may use the space of compaction.
    pub fn hold(&mut self, key: JobKey, fields: &Fields) -> Result<(), NoSpace> {
        self.reserve_from_headroom(SHORT)?;
        self.update(key, fields);
        self.uncount_record();
        Ok(())
    }

    /// Appends new records of a job that is to be moved. Returns their length in bytes.
    pub fn move_to_current(&mut self, key: JobKey, records: &FullRecords<'_>) -> usize {
        let (place, len) = self.append_full(records);
        self.files.move_to(key, place, len);
        self.records_migrated += 1;
        self.note_moved(len)
    }

    /// Appends a new record of the kept key of a deleted job that is to be moved. Returns its length in bytes.
    pub fn move_kept_key(&mut self, job: JobKey, key: &KeyRecord) -> usize {
        self.append_kept(job, key);
        self.note_moved(SHORT)
    }

    /// Returns the file and the offset of the full record, and the length of both records.
    #[inline(always)]
    fn append_full(&mut self, records: &FullRecords<'_>) -> ((FileNumber, u64), u64) {
        let File { number, used: start, .. } = *self.files.current();
        if let Some(unique) = records.unique {
            self.append(&Content::Key(unique), "");
        }
        let offset = self.files.current().used;
        self.append_job(&records.fields, records.tube, records.body);
        ((number, offset), self.files.current().used - start)
    }

    /// Notes that the full record of a job is damaged: its file is not removed, but renamed.
    pub fn note_damage(&mut self, key: JobKey) {
        self.files.by_number(self.file_of(key)).is_damaged = true;
        self.files.recount();
    }

    // ---- Time ----

    /// Returns when [`Binlog::tick`] or [`Binlog::commit`] has something to do.
    pub fn next_due(&self) -> Nanos {
        let disk = self.sync_due().min(self.removal_due());
        disk.min(self.compaction_due()).min(self.drained_due())
    }

    /// Writes the records of the iteration, and syncs them if a sync is due: see [`Syncing`]. The replies
    /// of the iteration may leave only after it returns `Ok`, and with a remote disk when
    /// [`Binlog::progress`] is complete.
    pub fn commit(&mut self, now: Nanos) -> Result<(), BinlogError> {
        self.status()?;
        self.now = self.now.max(now);
        self.space.refusal.iter_mut().for_each(|refusal| refusal.is_new = false);
        if self.drained_due() <= now {
            self.rewind();
        }
        self.write_batch();
        self.end_sync(false);
        self.status()?;
        self.files.count_free(self.sync.begun);
        // It waits until the space of earlier files is freed, unless the disk is full. Beyond the bound the commit
        // waits for the sync, so that files cannot be written faster than they are removed.
        if self.is_full() || !self.sync.is_truncating {
            self.remove_some(self.is_within_bound());
        }
        self.remove_excess();
        self.sync.is_truncating = self.sync.is_truncating && self.disk.truncate_step();
        self.disk.note_deletes(self.files.delete_records() * SHORT);
        self.sync_if_due();
        self.status()
    }

    /// Syncs all records and frees the space that is not used. Nothing may be recorded after it.
    pub fn close(&mut self, now: Nanos) -> Result<(), BinlogError> {
        self.remove_all(now)?;
        self.remove_all_prepared();
        self.truncate(self.files.current);
        self.disk.close(self.files.current().number);
        self.sync();
        self.status()
    }

    /// Removes all files that can be removed without the record of a gap, and renames damaged ones.
    pub fn remove_all(&mut self, now: Nanos) -> Result<(), BinlogError> {
        self.commit(now)?;
        self.sync();
        while self.next_to_remove().is_some_and(|index| self.files.is_recorded_gap(index))
            && self.remove_next(false)
        {}
        self.status()
    }

    // ---- Checking ----

    /// Panics unless all sums and lists agree. They also agree after an error of the disk, but not
    /// after [`Binlog::close`].
    pub fn check(&self) {
        self.files.check();
        self.check_batch();
        self.check_space();
    }

    /// Panics unless this job has records of `len` bytes.
    pub fn check_entry(&self, job: JobKey, len: usize) {
        let known = self.files.entry(job).live_bytes();
        assert_eq!(known, len as u64, "{job:?}, as the binlog knows it, and as it is");
    }

    // ---- Numbers ----

    /// Returns the bytes of all records but those in [`Files::live_bytes`].
    pub fn dead_bytes(&self) -> u64 {
        let written: u64 = self.files.list.iter().map(File::records_len).sum();
        written.saturating_sub(self.files.live_bytes)
    }

    /// Returns whether a file is damaged.
    pub fn has_damaged(&self) -> bool {
        self.files.list.iter().any(|file| file.is_damaged)
    }

    /// Returns the number of the file that has the full record of a job.
    pub fn file_of(&self, key: JobKey) -> FileNumber {
        self.files.entry(key).file()
    }
}

impl From<NoMemory> for NoSpace {
    fn from(_: NoMemory) -> NoSpace {
        NoSpace
    }
}
