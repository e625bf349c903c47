//! The binlog: where records go, when they are safe, and what is told of it.
//!
//! ```text
//!   oldest                      current              prepared
//!   [binlog.3] [binlog.4] [binlog.5: records | free] [binlog.6: free]
//!    emptied first                   ^ new records        ^ space set aside
//! ```
//!
//! A file is a segment. New records go to the end of the current one; they gather in a batch
//! and leave in one write when the turn is over ([`Binlog::commit`]), before any reply does.
//! Each live job belongs to the segment that has its full record; a segment to which none
//! belongs goes, but only from the oldest on: what an older file says must never outlive the
//! record that takes it back. For the same reason a file goes only when the records that
//! replace its own are as safe as they are going to be.
//!
//! Two chapters are told apart: how room for records is made (`space.rs`), and how live jobs are
//! moved out of old segments so that these can go (`compaction.rs`).
//!
//! A write or sync that fails is final: nothing is written any more, and [`Binlog::commit`]
//! says so.
//!
//! | file | owns |
//! |---|---|
//! | [`disk`] | the trait for files in a directory |
//! | [`record`] | one record to and from bytes |
//! | [`reader`] | reads one file, in whatever state it is |
//! | [`segments`] | which jobs belong to which file |
//! | [`space`] | room for records, and the files that have it |
//! | [`compaction`] | moves live jobs out of the oldest files |
//! | [`inspect`] | `--check` and `--dump` |

pub mod compaction;
pub mod disk;
pub mod inspect;
pub mod reader;
pub mod record;
pub mod segments;
pub mod space;

use super::collections::histogram::Histogram;
use super::keys::{JobKey, LogKey};
use super::time::Nanos;
use disk::{Disk, FileNumber};
use record::{FILE_HEAD_LEN, Fields, Layout, SHORT_LEN};
use segments::{Segment, Segments};
use space::{SpaceLog, UNSYNCED_FILES};
use std::collections::TryReserveError;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io;

/// The files of a binlog and what is known of them.
#[derive(Debug)]
pub struct Binlog {
    disk: Box<dyn Disk>,
    policy: Policy,
    /// Those newer than the current one are prepared.
    segments: Segments,
    /// The place of the current one.
    current: usize,
    /// How many of the oldest are empty and wait to be removed, and what they take on disk.
    leaving: usize,
    leaving_bytes: u64,
    /// Records at the end of the current segment that are not written yet.
    batch: Vec<u8>,
    sums: Counters,
    /// How many bytes are to be moved to keep up with the garbage.
    debt_bytes: u64,
    /// When compaction goes on if nothing else happens.
    idle_step_at: Nanos,
    /// There was nothing that could be moved.
    is_blocked: bool,
    /// When the present turn began.
    iteration_at: Nanos,
    /// When the last record was made.
    recorded_at: Nanos,
    /// When the oldest record was made that may not survive a power cut.
    unsynced_since: Option<Nanos>,
    /// In which segment, and up to where, the disk has been told to begin with that.
    sync_begun: (FileNumber, u64),
    /// Segments before the current one with such records.
    unsynced_closed: Vec<FileNumber>,
    /// The disk still has something to do with those that were removed.
    is_removing: bool,
    /// A segment could not be removed; when that is tried again.
    remove_again_at: Nanos,
    /// The same for one that was only prepared.
    drop_again_at: Nanos,
    /// No more space was to be had in this turn.
    has_failed_to_grow: bool,
    /// No more space was to be had, and none has been given back since.
    is_full: bool,
    /// There was no space for a whole file at least once since the start.
    was_short: bool,
    /// The file for which there was no space last, and the error.
    full_error: Option<(FileNumber, io::Error)>,
    space_log: SpaceLog,
    /// At the start there was too little space for the deletes of all jobs.
    began_short: bool,
    last: Resume,
    /// In every record that is written.
    nonce: u32,
    failure: Option<IoFailed>,
}

/// What goes on from where it was, whenever the server starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Resume {
    /// The highest id that was given out.
    pub id: u64,
    /// The moment of the last record of a buried job.
    pub buried_at: Nanos,
}

/// What the operator chose.
#[derive(Clone, Copy, Debug)]
pub struct Policy {
    /// The size of a file in bytes.
    pub file_size: u32,
    /// When to sync.
    pub syncing: Syncing,
}

/// When records are made to survive a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syncing {
    /// Before the replies of the same turn leave.
    EachIteration,
    /// At most so long after they were made.
    Within(Nanos),
    /// When the system likes.
    Never,
}

/// The numbers that `stats` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BinlogStats {
    /// The number of the oldest file.
    pub oldest: FileNumber,
    /// The number of the file that is written to.
    pub current: FileNumber,
    /// How many records have been written, moved ones among them.
    pub records_written: u64,
    /// How many jobs have been moved to a newer file.
    pub records_migrated: u64,
}

/// What there is in the files of the binlog, and how much space they take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BinlogSizes {
    /// How many files there are.
    pub files: usize,
    /// How many bytes they take on the disk.
    pub disk_bytes: u64,
    /// How many bytes the full records of all live jobs have.
    pub live_bytes: u64,
    /// How many bytes else have been written.
    pub dead_bytes: u64,
    /// There is no space for the puts that were tried last.
    pub is_full: bool,
}

/// Why a binlog cannot begin.
#[derive(Debug)]
pub enum BeginError {
    /// No file can be made.
    NoFile(io::Error),
    /// A write or a sync has failed. The kernel reports that once, so the next start would not
    /// see it.
    Failed(IoFailed),
}

/// The disk has failed: nothing is safe any more.
#[derive(Clone, Debug)]
pub struct IoFailed(String);

/// Why a record cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSpace {
    /// There is no memory for it.
    Memory,
    /// There is no space on the disk.
    Space,
}

/// What is counted as it comes and goes.
#[derive(Debug, Default)]
struct Counters {
    /// How many bytes the segments take on disk.
    disk_bytes: u64,
    /// How many of those belong to segments before the current one.
    closed_bytes: u64,
    /// How many short records there is room for in the prepared segments.
    room_ahead: u64,
    records_written: u64,
    records_migrated: u64,
}

/// How much is written at once, at most.
const BATCH_LEN: usize = 256 * 1024;
/// Longer bodies are not copied into the batch.
const COPIED_LEN: usize = BATCH_LEN / 2;

/// Files take whole blocks of the disk.
const BLOCK: u64 = 4096;

/// When so many bytes wait for a sync, the disk is told to begin with them.
const LONG_SYNC: u64 = 128 * 1024;

/// A sync takes a while, and is begun so much earlier, though not by more than a quarter.
const SYNC_MARGIN: Nanos = Nanos::from_millis(5);

/// The length of a short record in bytes.
const SHORT: u64 = SHORT_LEN as u64;
/// That of the version and the marker.
const HEAD: u64 = FILE_HEAD_LEN as u64;

impl Binlog {
    /// A binlog with these segments, which were just read, and the first new one. Room is made
    /// for the deletes of all jobs.
    ///
    /// # Errors
    /// There is no space for that, or the directory cannot be written.
    pub fn begin(
        disk: Box<dyn Disk>,
        policy: Policy,
        segments: Segments,
        last: Resume,
        now: Nanos,
    ) -> Result<Binlog, BeginError> {
        let mut binlog = Binlog {
            disk,
            policy,
            segments,
            current: 0,
            leaving: 0,
            leaving_bytes: 0,
            batch: Vec::new(),
            sums: Counters::default(),
            debt_bytes: 0,
            idle_step_at: Nanos::ZERO,
            is_blocked: false,
            iteration_at: now,
            recorded_at: now,
            unsynced_since: None,
            sync_begun: (0, 0),
            unsynced_closed: Vec::new(),
            is_removing: true,
            remove_again_at: Nanos::ZERO,
            drop_again_at: Nanos::ZERO,
            has_failed_to_grow: false,
            is_full: false,
            was_short: false,
            full_error: None,
            space_log: SpaceLog::default(),
            began_short: false,
            last,
            nonce: random_nonce(),
            failure: None,
        };
        let reserved = binlog.batch.try_reserve_exact(BATCH_LEN);
        reserved.map_err(|_| BeginError::NoFile(io::ErrorKind::OutOfMemory.into()))?;
        for place in 0..binlog.segments.len() {
            binlog.sums.disk_bytes += on_disk(binlog.segments[place].size);
            binlog.truncate_segment(place);
            let number = binlog.segments[place].number;
            if binlog.is_synced() {
                // Who wrote it may not have come to that.
                binlog.sync(number);
            }
            binlog.disk.close(number);
        }
        let begun = binlog.set_first_space_aside();
        // A disk that has failed gives no file either.
        binlog.status().map_err(BeginError::Failed)?;
        begun.map_err(BeginError::NoFile)?;
        Ok(binlog)
    }

    fn file_size(&self) -> u64 {
        self.policy.file_size.into()
    }

    fn write_marker(&mut self) {
        record::write_marker(&mut self.batch, self.last.id, self.nonce);
        self.segments[self.current].used += SHORT;
        self.unsynced_since.get_or_insert(self.iteration_at);
    }

    // ---- Records ----

    /// Makes the full record of a new job, for which room was made.
    pub fn put(&mut self, job: JobKey, fields: &Fields, tube: &str, body: &[u8]) -> LogKey {
        self.last.id = self.last.id.max(fields.id);
        let len = record::full_len(tube, body.len()) as u64;
        let key = self.segments.add_job(job, self.current_number(), len);
        self.append(fields, tube, body);
        key
    }

    /// Makes a short record of what has become of a job, for which room was made.
    pub fn update(&mut self, key: LogKey, fields: &Fields) {
        self.segments.entry_mut(key).due_or_buried_at = fields.due_or_buried_at;
        self.append(fields, "", &[]);
        self.charge_compaction(SHORT);
    }

    /// The moment for a job that is buried now: later than that of the one before, whatever
    /// the clock of the system was set to since.
    pub fn next_burial(&mut self, now: Nanos) -> Nanos {
        self.last.buried_at = now.max(self.last.buried_at + Nanos::ONE);
        self.last.buried_at
    }

    /// When a buried job was buried.
    pub fn buried_at(&self, key: LogKey) -> Nanos {
        self.segments.entry(key).due_or_buried_at
    }

    /// Makes the record of a delete.
    pub fn delete(&mut self, key: LogKey, fields: &Fields) {
        self.append(fields, "", &[]);
        let entry = self.segments.remove_job(key);
        self.charge_compaction(SHORT + u64::from(entry.len));
    }

    fn append(&mut self, fields: &Fields, tube: &str, body: &[u8]) {
        let is_copied = body.len() <= COPIED_LEN;
        let copied_len = if is_copied { body.len() } else { 0 };
        if self.batch.len() + Layout::LONGEST_HEAD + copied_len > BATCH_LEN {
            self.write_batch();
        }
        record::write(&mut self.batch, fields, tube, body, self.nonce);
        self.segments[self.current].used += Layout::V7WithCrc.head_len(tube) as u64;
        if is_copied {
            self.batch.extend_from_slice(body);
            self.segments[self.current].used += body.len() as u64;
        } else {
            self.write_batch();
            self.segments[self.current].used += body.len() as u64;
            self.write_at_end(body);
        }
        self.sums.records_written += 1;
        self.unsynced_since.get_or_insert(self.iteration_at);
        self.recorded_at = self.iteration_at;
    }

    // ---- Time ----

    /// When [`Binlog::tick`] or [`Binlog::commit`] has something to do.
    pub fn next_due(&self) -> Option<Nanos> {
        let step = self.wants_compaction().then_some(self.idle_step_at);
        let sync = self.sync_due();
        let removal = if self.is_removing {
            Some(self.iteration_at)
        } else {
            self.has_removable().then_some(self.remove_again_at)
        };
        [step, sync, removal, self.drained_due()].into_iter().flatten().min()
    }

    // ---- The end of a turn ----

    /// Writes what the turn has brought, and syncs it if it is time for that. Only then may
    /// the replies of the turn leave.
    ///
    /// # Errors
    /// The disk has failed: they may not.
    pub fn commit(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.status()?;
        self.iteration_at = self.iteration_at.max(now);
        self.has_failed_to_grow = false;
        if self.drained_due().is_some_and(|due| due <= now) {
            self.rewind();
        }
        self.write_batch();
        self.begin_sync_if_long();
        // One after the other, unless space is short.
        let may_retire = self.can_remove() && (self.is_full || !self.is_removing);
        if may_retire || self.sync_due().is_some_and(|due| due <= now) {
            self.sync_if_wanted();
        }
        if may_retire {
            self.remove_oldest();
        }
        self.drop_one_too_many();
        self.is_removing = self.disk.truncate_step();
        self.status()
    }

    /// The server ends: syncs, and leaves no more space taken than is used.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn close(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.retire_all(now)?;
        self.drop_prepared();
        self.truncate_segment(self.current);
        self.disk.close(self.current_number());
        self.sync_directory();
        self.status()
    }

    /// Removes or sets aside all segments that are not needed, however many.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn retire_all(&mut self, now: Nanos) -> Result<(), IoFailed> {
        self.commit(now)?;
        self.sync_if_wanted();
        while self.can_remove() {
            self.remove_one();
        }
        self.is_removing = true;
        self.status()
    }

    fn status(&self) -> Result<(), IoFailed> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn sync_due(&self) -> Option<Nanos> {
        let since = self.unsynced_since?;
        match self.policy.syncing {
            Syncing::EachIteration => Some(since),
            Syncing::Within(span) => {
                let quarter = Nanos::from_nanos(span.as_nanos() / 4);
                Some(since + span.since(quarter.min(SYNC_MARGIN)))
            }
            Syncing::Never => None,
        }
    }

    /// A sync that is not due yet would stall everybody the longer, the more has gathered.
    fn begin_sync_if_long(&mut self) {
        let is_due_later = matches!(self.policy.syncing, Syncing::Within(_));
        let Segment { number, used, .. } = self.segments[self.current];
        let (begun_in, begun) = self.sync_begun;
        let begun = if begun_in == number { begun } else { 0 };
        // The last block will be written again.
        let end = used - used % BLOCK;
        if is_due_later && end.saturating_sub(begun) >= LONG_SYNC && self.failure.is_none() {
            self.disk.begin_sync(number, begun, end - begun);
            self.sync_begun = (number, end);
        }
    }

    fn sync_if_wanted(&mut self) {
        if self.unsynced_since.take().is_none() || !self.is_synced() || self.failure.is_some() {
            return;
        }
        for number in std::mem::take(&mut self.unsynced_closed) {
            self.sync(number);
            self.disk.close(number);
        }
        self.sync(self.current_number());
        self.sync_begun = (self.current_number(), self.segments[self.current].used);
    }

    fn sync(&mut self, number: FileNumber) {
        let synced = self.disk.sync(number);
        self.latch_error(synced, || format!("binlog.{number}: cannot sync it"));
    }

    fn sync_directory(&mut self) {
        if self.is_synced() {
            let synced = self.disk.sync_directory();
            self.latch_error(synced, || "the directory: cannot sync it".to_owned());
        }
    }

    fn is_synced(&self) -> bool {
        self.policy.syncing != Syncing::Never
    }

    // ---- Writing ----

    fn write_batch(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let batch = std::mem::take(&mut self.batch);
        self.write_at_end(&batch);
        self.batch = batch;
        self.batch.clear();
    }

    /// Writes bytes that are already counted as the last ones in use.
    fn write_at_end(&mut self, bytes: &[u8]) {
        if self.failure.is_some() {
            return;
        }
        let Segment { number, used, .. } = self.segments[self.current];
        let written = self.disk.write(number, used - bytes.len() as u64, bytes);
        self.latch_error(written, || format!("binlog.{number}: cannot write it"));
    }

    /// The disk fails unless that was done; `what` says what it was.
    fn latch_error(&mut self, done: io::Result<()>, what: impl FnOnce() -> String) {
        if let Err(error) = done {
            self.failure.get_or_insert_with(|| IoFailed(format!("{}: {error}", what())));
        }
    }

    fn current_number(&self) -> FileNumber {
        self.segments[self.current].number
    }

    fn last_number(&self) -> FileNumber {
        self.segments.newest().map_or(0, |segment| segment.number)
    }

    // ---- Checking ----

    /// Everything that was counted is counted anew. It holds after the disk has failed too, but not
    /// once the server has ended.
    ///
    /// # Panics
    /// Something does not agree.
    pub fn check(&self) {
        self.segments.check();
        self.check_space();
        let Segment { number, used, .. } = self.segments[self.current];
        let waiting = self.batch.len();
        assert!(
            waiting <= BATCH_LEN && waiting as u64 <= used,
            "{waiting} bytes wait to be written, of {used} that are used in binlog.{number}"
        );
        assert!(
            waiting == 0 || self.unsynced_since.is_some(),
            "{waiting} bytes wait to be written, and there is nothing to be synced"
        );
        let (begun_in, begun) = self.sync_begun;
        assert!(
            begun_in < number || (begun_in == number && begun <= used),
            "a sync of binlog.{begun_in} was begun up to {begun}: binlog.{number} ends at {used}"
        );
        self.check_unsynced();
    }

    fn check_unsynced(&self) {
        let closed = &self.unsynced_closed;
        let oldest = self.segments[0].number;
        let numbers = closed.iter().copied().chain([self.current_number()]);
        assert!(
            numbers.is_sorted_by(|before, after| before < after)
                && closed.first().is_none_or(|&first| first >= oldest),
            "{closed:?} are to be synced, from binlog.{oldest} to before binlog.{}",
            self.current_number()
        );
        let is_wanted = self.is_synced()
            && (self.unsynced_since.is_some() || self.failure.is_some())
            && closed.len() <= UNSYNCED_FILES;
        assert!(closed.is_empty() || is_wanted, "{closed:?} are kept to be synced, but never are");
    }

    /// The job is known under this key, with a full record of so many bytes.
    ///
    /// # Panics
    /// It is not so.
    pub fn check_job(&self, key: LogKey, job: JobKey, id: u64, len: usize) {
        let known = self.segments.find(key).map(|entry| (entry.job, entry.len as usize));
        assert_eq!(known, Some((job, len)), "job {id}, as the binlog knows it, and as it is");
    }

    /// How many jobs it knows.
    pub fn job_count(&self) -> u64 {
        self.segments.job_count()
    }

    // ---- Telling ----

    /// Returns whether each commit with records ends in a sync.
    pub fn syncs_each_iteration(&self) -> bool {
        self.policy.syncing == Syncing::EachIteration
    }

    /// Returns the bytes of memory that the table of records takes.
    pub fn segment_bytes(&self) -> u64 {
        self.segments.taken_bytes()
    }

    /// The numbers for `stats`.
    pub fn stats(&self) -> BinlogStats {
        BinlogStats {
            oldest: self.segments[0].number,
            current: self.current_number(),
            records_written: self.sums.records_written,
            records_migrated: self.sums.records_migrated,
        }
    }

    /// What the files take.
    pub fn sizes(&self) -> BinlogSizes {
        let live_bytes = self.segments.live_bytes();
        let written = self.segments.iter().map(|segment| segment.used.saturating_sub(HEAD));
        BinlogSizes {
            files: self.segments.len(),
            disk_bytes: self.sums.disk_bytes,
            live_bytes,
            dead_bytes: written.sum::<u64>().saturating_sub(live_bytes),
            is_full: self.is_full && self.space_log.is_refusing,
        }
    }

    /// How long syncs of files took.
    pub fn sync_times(&self) -> Histogram {
        self.disk.sync_times()
    }

    /// Whether a file is not sound.
    pub fn has_damaged(&self) -> bool {
        self.segments.iter().any(|segment| segment.is_damaged)
    }

    /// The number of the file that has the full record of a job.
    pub fn file_of(&self, key: LogKey) -> FileNumber {
        self.segments.entry(key).file
    }
}

/// The hash of nothing, under keys that std takes from the system.
fn random_nonce() -> u32 {
    let hash = RandomState::new().hash_one(());
    u32::from_ne_bytes(*hash.to_ne_bytes().first_chunk().expect("it is longer"))
}

/// How many bytes a file of `size` bytes takes.
fn on_disk(size: u64) -> u64 {
    size.next_multiple_of(BLOCK)
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
