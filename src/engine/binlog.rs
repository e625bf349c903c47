//! The binlog: where records go, what space they need, and when files come and go.
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
//! Space is taken in whole segments, ahead of need. For every live job there is room for one
//! more short record, that of its delete. Beyond that there is a whole segment to spare when
//! the disk is full and puts are refused: half of it for releases, buries and kicks, and what
//! is left for moves out of old segments, which make space again.
//!
//! Superseded records are garbage. When there is too much of it, compaction moves live jobs
//! from the oldest segment to the current one, in steps as large as a few times the garbage
//! that is made, so that all files together stay below three times the live bytes and two
//! files more. The jobs themselves are not known here: who asks for a step brings them
//! (`durable.rs`).
//!
//! A write or sync that fails is final: nothing is written any more, and [`Binlog::commit`]
//! says so.

use super::disk::{Disk, FileNumber, LAST_NUMBER};
use super::keys::{JobKey, LogKey};
use super::record::{self, FILE_HEAD_LEN, Fields, Layout, SHORT_LEN, VERSION, VERSION_LEN};
use super::segments::{Segment, Segments};
use super::time::Nanos;
use log::{debug, warn};
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
    sums: Sums,
    /// How many bytes are to be moved to keep up with the garbage.
    owed_bytes: u64,
    /// When compaction goes on if nothing else happens.
    idle_step_at: Nanos,
    /// There was nothing that could be moved.
    is_stuck: bool,
    /// When the present turn began.
    turn_at: Nanos,
    /// When the last record was made.
    recorded_at: Nanos,
    /// When the oldest record was made that may not survive a power cut.
    unsynced_since: Option<Nanos>,
    /// Segments before the current one with such records.
    unsynced_closed: Vec<FileNumber>,
    /// A segment could not be removed; when that is tried again.
    remove_again_at: Nanos,
    /// No more space was to be had in this turn.
    has_failed_to_grow: bool,
    /// No more space was to be had, and none has been given back since.
    is_full: bool,
    /// The operator has been told so, and not yet that it is over.
    is_full_told: bool,
    last: Last,
    /// In every record that is written.
    nonce: u32,
    failure: Option<Failure>,
}

/// What goes on from where it was, whenever the server starts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Last {
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
    EachTurn,
    /// At most so long after they were made.
    Within(Nanos),
    /// When the system likes.
    Never,
}

/// The numbers that `stats` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// The number of the oldest file.
    pub oldest: FileNumber,
    /// The number of the file that is written to.
    pub current: FileNumber,
    /// How many records have been written, moved ones among them.
    pub records_written: u64,
    /// How many jobs have been moved to a newer file.
    pub records_migrated: u64,
}

/// The disk has failed: nothing is safe any more.
#[derive(Clone, Debug)]
pub struct Failure(String);

/// Why a record cannot be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// There is no memory for it.
    Memory,
    /// There is no space on the disk.
    Space,
}

/// What is counted as it comes and goes.
#[derive(Debug, Default)]
struct Sums {
    /// How many bytes the segments take on disk.
    disk_bytes: u64,
    /// How many of those belong to segments before the current one.
    closed_bytes: u64,
    /// How many short records there is room for in the prepared segments.
    room_ahead: u64,
    records_written: u64,
    records_migrated: u64,
}

/// A record that needs room.
#[derive(Clone, Copy, Debug)]
struct Need {
    /// Its length in bytes.
    len: u64,
    /// For how many deletes there must be room behind it.
    deletes: u64,
    /// And for how many short records more, even if no more space is to be had.
    least_spare: u64,
}

/// How much is written at once, at most.
const BATCH_LEN: usize = 256 * 1024;
/// Longer bodies are not copied into the batch.
const COPIED_LEN: usize = BATCH_LEN / 2;

/// More files than that are not kept open to be synced later.
const UNSYNCED_FILES: usize = 2;

/// Files take whole blocks of the disk.
const BLOCK: u64 = 4096;

/// For each byte of garbage that is made, so many are moved while there is too much of it.
const PACE: u64 = 4;
/// So much is moved at a time when nothing else happens, and so often.
const IDLE_STEP: u64 = 64 * 1024;
const IDLE_PAUSE: Nanos = Nanos::from_millis(1);
/// When that finds no space.
const STUCK_PAUSE: Nanos = Nanos::from_secs(1);

/// How long no job must have been there before space is given up.
const DRAINED_PAUSE: Nanos = Nanos::from_secs(1);

/// More files than that are not removed in one turn; it takes a few milliseconds.
const REMOVALS_PER_TURN: usize = 2;
const SMALL_REMOVALS_PER_TURN: usize = 16;
const SMALL_FILE: u32 = 1024 * 1024;
/// How long to wait when one cannot be.
const REMOVE_AGAIN: Nanos = Nanos::from_secs(60);

/// A sync takes a while, and is begun so much earlier, though not by more than a quarter.
const SYNC_MARGIN: Nanos = Nanos::from_millis(5);

/// On a full disk there remains room for so many short records, whatever happens, so that a
/// server that is started there finds a block for its first file.
const LAST_SPARE: u64 = (BLOCK + HEAD).div_ceil(SHORT);

const SHORT: u64 = SHORT_LEN as u64;
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
        last: Last,
        now: Nanos,
    ) -> io::Result<Binlog> {
        let mut binlog = Binlog {
            disk,
            policy,
            segments,
            current: 0,
            leaving: 0,
            leaving_bytes: 0,
            batch: Vec::new(),
            sums: Sums::default(),
            owed_bytes: 0,
            idle_step_at: Nanos::ZERO,
            is_stuck: false,
            turn_at: now,
            recorded_at: now,
            unsynced_since: None,
            unsynced_closed: Vec::new(),
            remove_again_at: Nanos::ZERO,
            has_failed_to_grow: false,
            is_full: false,
            is_full_told: false,
            last,
            nonce: random_nonce(),
            failure: None,
        };
        binlog.batch.try_reserve_exact(BATCH_LEN).map_err(|_| io::ErrorKind::OutOfMemory)?;
        for place in 0..binlog.segments.len() {
            binlog.sums.disk_bytes += on_disk(binlog.segments[place].size);
            binlog.cut_segment(place);
            let number = binlog.segments[place].number;
            if binlog.is_synced() {
                // Who wrote it may not have come to that.
                binlog.disk.sync(number)?;
            }
            binlog.disk.close(number);
        }
        binlog.set_first_space_aside()?;
        Ok(binlog)
    }

    /// Makes the first new segment and what else is needed for the deletes of all jobs. When
    /// the disk is full the last one is no larger than it must be, or there is too little.
    fn set_first_space_aside(&mut self) -> io::Result<()> {
        // What was prepared and never used is space that is needed now.
        let mut number = self.last_number() + 1;
        while self.segments.newest().is_some_and(is_unused) {
            let segment = self.segments.pop_newest();
            self.sums.disk_bytes -= on_disk(segment.size);
            self.disk.remove(segment.number)?;
        }
        if !self.segments.is_empty() {
            // There must be no gap.
            number = self.last_number() + 1;
        }
        let jobs = self.segments.job_count();
        let mut made = 0;
        while made == 0 || self.sums.room_ahead < jobs {
            let least = HEAD + jobs.saturating_sub(self.sums.room_ahead).max(1) * SHORT;
            let grown = self.grow(number, self.file_size());
            let grown = grown.or_else(|_| self.grow(number, least));
            match grown.or_else(|_| self.grow(number, BLOCK)) {
                Ok(()) => {
                    made += 1;
                    number += 1;
                }
                Err(_) if self.remove_oldest_if_empty()? => {}
                Err(error) if made == 0 => return Err(error),
                Err(error) => {
                    warn!("binlog.{number}: no space for it: {error}; deletes may be refused");
                    break;
                }
            }
        }
        self.current = self.segments.len() - made;
        let older = self.segments.iter().take(self.current);
        self.sums.closed_bytes = older.map(|segment| on_disk(segment.size)).sum();
        self.sums.room_ahead -= fresh_room(&self.segments[self.current]);
        // Ids go on from there, even if all older files go next.
        self.write_marker();
        self.write_batch();
        self.sync_if_wanted();
        Ok(())
    }

    /// Makes space on a disk that is full already; says whether it could.
    fn remove_oldest_if_empty(&mut self) -> io::Result<bool> {
        let oldest = self.segments.iter().next();
        if oldest.is_none_or(|oldest| !oldest.is_empty() || oldest.is_damaged || is_unused(oldest))
        {
            return Ok(false);
        }
        let segment = self.segments.pop_oldest();
        self.sums.disk_bytes -= on_disk(segment.size);
        self.disk.remove(segment.number)?;
        self.sync_directory();
        Ok(true)
    }

    // ---- Making room ----

    /// Sees to it that there is memory and space for a new job with a full record of `len`
    /// bytes, for its delete, and for a spare.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn make_room_to_put(&mut self, len: usize) -> Result<(), NoRoom> {
        self.segments.try_reserve_one()?;
        let deletes = self.segments.job_count() + 1;
        self.make_room(Need { len: len as u64, deletes, least_spare: self.spare() })
    }

    /// Sees to it that there is space for one more short record.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn make_room_to_update(&mut self) -> Result<(), NoRoom> {
        let deletes = self.segments.job_count();
        self.make_room(Need { len: SHORT, deletes, least_spare: self.spare() / 2 })
    }

    /// Sees to it that there is space for the record of a delete. It was set aside when the job
    /// was put; only a server that was started on a full disk may lack it.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn make_room_to_delete(&mut self) -> Result<(), NoRoom> {
        if self.room() == 0 && !self.prepare() {
            return Err(NoRoom::Space);
        }
        self.take_place(SHORT)
    }

    fn make_room(&mut self, need: Need) -> Result<(), NoRoom> {
        loop {
            let room = self.room_behind(need.len);
            let has = |spare: u64| room.is_some_and(|room| room >= need.deletes + spare);
            // Rather a smaller spare than more files, while old ones are about to go.
            let quarter = self.spare() / 4;
            let is_enough = has(self.spare() + LAST_SPARE)
                || (self.is_at_limit() && has(quarter + LAST_SPARE.min(quarter) / 2));
            if is_enough {
                return self.take_place(need.len);
            }
            if !self.prepare() {
                let is_enough = has(need.least_spare + LAST_SPARE);
                return if is_enough { self.take_place(need.len) } else { Err(NoRoom::Space) };
            }
        }
    }

    /// How many short records there would be room for behind a record of `len` bytes; nothing
    /// when that itself has no room.
    fn room_behind(&self, len: u64) -> Option<u64> {
        let left = self.segments[self.current].left();
        if len <= left {
            return Some((left - len) / SHORT + self.sums.room_ahead);
        }
        if len > self.fresh_len() {
            // The current segment will be lengthened.
            return Some(self.sums.room_ahead);
        }
        // Those that are too small are passed over; only on a full disk are there any.
        let mut room = self.sums.room_ahead;
        for next in self.segments.iter().skip(self.current + 1) {
            room -= fresh_room(next);
            if let Some(left) = (next.size - HEAD).checked_sub(len) {
                return Some(left / SHORT + room);
            }
        }
        None
    }

    /// Sees to it that the next record, of `len` bytes, fits in the current segment.
    fn take_place(&mut self, len: u64) -> Result<(), NoRoom> {
        if len <= self.segments[self.current].left() {
            return Ok(());
        }
        if len <= self.fresh_len() {
            while self.segments[self.current].left() < len {
                self.advance();
            }
            return Ok(());
        }
        if self.failure.is_some() {
            return Err(NoRoom::Space);
        }
        let segment = &mut self.segments[self.current];
        let (old, new) = (segment.size, segment.used + len);
        match self.disk.extend(segment.number, new) {
            Ok(()) => {
                segment.size = new;
                self.sums.disk_bytes += on_disk(new) - on_disk(old);
                Ok(())
            }
            Err(error) => {
                self.note_full(self.current_number(), error);
                Err(NoRoom::Space)
            }
        }
    }

    /// How many short records there is room for.
    fn room(&self) -> u64 {
        self.segments[self.current].left() / SHORT + self.sums.room_ahead
    }

    /// How many bytes of records fit in a new segment.
    fn fresh_len(&self) -> u64 {
        self.file_size() - HEAD
    }

    /// For how many short records there shall be room beyond those that must be: a whole file.
    fn spare(&self) -> u64 {
        self.fresh_len() / SHORT
    }

    fn file_size(&self) -> u64 {
        self.policy.file_size.into()
    }

    /// Whether one more file would be too much.
    fn is_at_limit(&self) -> bool {
        !self.is_full && self.sums.disk_bytes > 3 * self.segments.live_bytes() + self.file_size()
    }

    /// Makes a segment ahead of need. `false` when there is no space.
    fn prepare(&mut self) -> bool {
        if self.has_failed_to_grow || self.failure.is_some() {
            self.has_failed_to_grow = true;
            return false;
        }
        let mut grown = self.grow(self.last_number() + 1, self.file_size());
        if grown.is_err() && self.can_retire() {
            self.write_batch();
            self.sync_if_wanted();
            self.retire();
            grown = self.grow(self.last_number() + 1, self.file_size());
        }
        match grown {
            Ok(()) => {
                self.is_full = false;
                if std::mem::take(&mut self.is_full_told) {
                    warn!("there is space for the binlog again");
                }
            }
            Err(error) => {
                self.has_failed_to_grow = true;
                self.note_full(self.last_number() + 1, error);
            }
        }
        !self.has_failed_to_grow
    }

    /// A file could not be made or lengthened. If that is not for want of space, the disk fails.
    fn note_full(&mut self, number: FileNumber, error: io::Error) {
        use io::ErrorKind::{
            FileTooLarge, OutOfMemory, PermissionDenied, QuotaExceeded, StorageFull,
        };
        let is_want_of_space = matches!(
            error.kind(),
            StorageFull | QuotaExceeded | FileTooLarge | OutOfMemory | PermissionDenied
        );
        if !is_want_of_space {
            return self.check(&format!("binlog.{number}: cannot make it"), Err(error));
        }
        self.is_full = true;
        if !std::mem::replace(&mut self.is_full_told, true) {
            warn!("binlog.{number}: no space for it: {error}; puts are refused until there is");
        }
    }

    fn grow(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        if self.failure.is_some() || number > LAST_NUMBER {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "no file can be made any more"));
        }
        self.disk.create(number, size)?;
        let written = self.disk.write(number, 0, &VERSION);
        self.check(&format!("binlog.{number}: cannot write it"), written);
        self.sync_directory();
        let segment = Segment::new(number, size, VERSION_LEN as u64);
        self.sums.disk_bytes += on_disk(size);
        self.sums.room_ahead += fresh_room(&segment);
        self.segments.push(segment);
        self.disk.close(number);
        debug!("binlog.{number}: made, {size} bytes");
        Ok(())
    }

    /// The current segment is full: the next one becomes the current one.
    fn advance(&mut self) {
        self.write_batch();
        self.cut_segment(self.current);
        let number = self.current_number();
        if self.unsynced_closed.len() == UNSYNCED_FILES {
            self.sync_if_wanted();
        }
        if self.unsynced_since.is_some() && self.is_synced() {
            self.unsynced_closed.push(number);
        } else {
            self.disk.close(number);
        }
        self.sums.closed_bytes += on_disk(self.segments[self.current].size);
        self.current += 1;
        self.sums.room_ahead -= fresh_room(&self.segments[self.current]);
        self.write_marker();
    }

    fn write_marker(&mut self) {
        record::write_marker(&mut self.batch, self.last.id, self.nonce);
        self.segments[self.current].used += SHORT;
        self.unsynced_since.get_or_insert(self.turn_at);
    }

    /// Cuts a segment to its used length. That it stays longer does no harm.
    fn cut_segment(&mut self, place: usize) {
        let Segment { number, size, used, is_damaged, .. } = self.segments[place];
        if size == used || is_damaged || self.failure.is_some() {
            return;
        }
        if let Err(error) = self.disk.cut(number, used) {
            return debug!("binlog.{number}: cannot be cut to {used} bytes: {error}");
        }
        self.segments[place].size = used;
        self.sums.disk_bytes -= on_disk(size) - on_disk(used);
    }

    // ---- Records ----

    /// Makes the full record of a new job, for which room was made.
    pub fn put(&mut self, job: JobKey, fields: &Fields, tube: &str, body: &[u8]) -> LogKey {
        self.last.id = self.last.id.max(fields.id);
        let len = record::full_len(tube, body) as u64;
        let key = self.segments.add_job(job, self.current_number(), len);
        self.append(fields, tube, body);
        key
    }

    /// Makes a short record of what has become of a job, for which room was made.
    pub fn update(&mut self, key: LogKey, fields: &Fields) {
        self.segments.entry_mut(key).due_or_buried_at = fields.due_or_buried_at;
        self.append(fields, "", &[]);
        self.owe(SHORT);
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
        self.owe(SHORT + u64::from(entry.len));
    }

    fn append(&mut self, fields: &Fields, tube: &str, body: &[u8]) {
        let is_copied = body.len() <= COPIED_LEN;
        let copied_len = if is_copied { body.len() } else { 0 };
        if self.batch.len() + Layout::LONGEST_HEAD + copied_len > BATCH_LEN {
            self.write_batch();
        }
        record::write(&mut self.batch, fields, tube, body, self.nonce);
        self.segments[self.current].used += Layout::V7Checked.head_len(tube) as u64;
        if is_copied {
            self.batch.extend_from_slice(body);
            self.segments[self.current].used += body.len() as u64;
        } else {
            self.write_batch();
            self.segments[self.current].used += body.len() as u64;
            self.write_at_end(body);
        }
        self.sums.records_written += 1;
        self.unsynced_since.get_or_insert(self.turn_at);
        self.recorded_at = self.turn_at;
    }

    // ---- Compaction ----

    /// Garbage has been made.
    fn owe(&mut self, bytes: u64) {
        self.count_leaving();
        self.owed_bytes = if self.wants_compaction() { self.owed_bytes + PACE * bytes } else { 0 };
    }

    /// A segment that is not the current one never gets another job.
    fn count_leaving(&mut self) {
        while self.leaving < self.current && self.segments[self.leaving].is_empty() {
            self.leaving_bytes += on_disk(self.segments[self.leaving].size);
            self.leaving += 1;
        }
    }

    fn wants_compaction(&self) -> bool {
        if self.current == 0 || self.failure.is_some() {
            return false;
        }
        let live = self.segments.live_bytes();
        let file_size = self.file_size();
        if self.is_full {
            // Only what makes space: not what is lost to whole blocks anyway.
            let older = self.segments.iter().take(self.current).skip(self.leaving);
            let used: u64 = older.map(|segment| segment.used.saturating_sub(HEAD)).sum();
            return used.saturating_sub(live) > live / 4 + file_size / 8;
        }
        let closed = self.sums.closed_bytes - self.leaving_bytes;
        let garbage = (closed + self.segments[self.current].used).saturating_sub(live);
        let set_aside = self.segments.job_count() * SHORT;
        let limit = (live + live / 2).saturating_sub(set_aside).max(live / 4) + file_size / 2;
        garbage > limit
    }

    /// The job that compaction moves next, if it is time for that and there is room. Its full
    /// record is to be made by [`Binlog::move_here`].
    pub fn next_to_move(&mut self) -> Option<(LogKey, JobKey)> {
        if self.owed_bytes == 0 || !self.wants_compaction() {
            return None;
        }
        self.oldest_to_move()
    }

    /// The job to be moved so that a segment that is not sound can be set aside, if there is
    /// room.
    pub fn next_in_danger(&mut self) -> Option<(LogKey, JobKey)> {
        let last = self.segments.iter().rfind(|segment| segment.is_damaged)?.number;
        self.oldest_to_move().filter(|(key, _)| self.segments.entry(*key).file <= last)
    }

    fn oldest_to_move(&mut self) -> Option<(LogKey, JobKey)> {
        // On a full disk it makes no sense to begin what cannot be finished.
        let spare = self.room().saturating_sub(self.segments.job_count() + LAST_SPARE) * SHORT;
        self.count_leaving();
        let oldest = self.segments.iter().take(self.current).nth(self.leaving);
        let oldest = oldest.filter(|segment| !self.is_full || segment.live_bytes() <= spare);
        let first = oldest.and_then(Segment::first_job);
        let found = first.filter(|&key| {
            let len = self.segments.entry(key).len.into();
            let deletes = self.segments.job_count();
            self.make_room(Need { len, deletes, least_spare: 0 }).is_ok()
        });
        self.is_stuck = found.is_none();
        if self.is_stuck {
            self.owed_bytes = 0;
        }
        found.map(|key| (key, self.segments.entry(key).job))
    }

    /// Makes a new full record of a job that was named to be moved.
    pub fn move_here(&mut self, key: LogKey, fields: &Fields, tube: &str, body: &[u8]) {
        let len = record::full_len(tube, body) as u64;
        self.segments.move_job(key, self.current_number(), len);
        self.append(fields, tube, body);
        self.sums.records_migrated += 1;
        self.owed_bytes = self.owed_bytes.saturating_sub(len);
        self.count_leaving();
    }

    /// Time has passed: [`Binlog::next_to_move`] may have something.
    pub fn tick(&mut self, now: Nanos) {
        self.turn_at = now;
        if self.idle_step_at <= now && self.wants_compaction() {
            self.idle_step_at = now + if self.is_stuck { STUCK_PAUSE } else { IDLE_PAUSE };
            self.owed_bytes = self.owed_bytes.max(IDLE_STEP.min(self.file_size()));
        }
    }

    /// When [`Binlog::tick`] or [`Binlog::commit`] has something to do.
    pub fn next_due(&self) -> Option<Nanos> {
        let step = self.wants_compaction().then_some(self.idle_step_at);
        let sync = self.sync_due();
        let removal = self.has_leaving().then_some(self.remove_again_at);
        [step, sync, removal, self.drained_due()].into_iter().flatten().min()
    }

    // ---- The end of a turn ----

    /// Writes what the turn has brought, and syncs it if it is time for that. Only then may
    /// the replies of the turn leave.
    ///
    /// # Errors
    /// The disk has failed: they may not.
    pub fn commit(&mut self, now: Nanos) -> Result<(), Failure> {
        if let Some(failure) = &self.failure {
            return Err(failure.clone());
        }
        self.turn_at = self.turn_at.max(now);
        self.has_failed_to_grow = false;
        if self.drained_due().is_some_and(|due| due <= now) {
            self.start_afresh();
        }
        self.write_batch();
        if self.can_retire() || self.sync_due().is_some_and(|due| due <= now) {
            self.sync_if_wanted();
        }
        if self.can_retire() {
            self.retire();
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// The server ends: syncs, and leaves no more space taken than is used.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn close(&mut self, now: Nanos) -> Result<(), Failure> {
        self.retire_all(now)?;
        self.drop_prepared();
        self.cut_segment(self.current);
        self.disk.close(self.current_number());
        self.sync_directory();
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// Removes or sets aside all segments that are not needed, however many.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn retire_all(&mut self, now: Nanos) -> Result<(), Failure> {
        self.commit(now)?;
        self.sync_if_wanted();
        while self.can_retire() {
            self.retire_one();
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// No job is left: one file with next to nothing in it will do.
    fn start_afresh(&mut self) {
        if self.segments[self.current].left() < self.file_size() / 2 {
            self.advance();
        }
        self.drop_prepared();
    }

    /// When it is time for that: not before it has been so for a while, or the next job would
    /// only need again what was given up.
    fn drained_due(&self) -> Option<Nanos> {
        let is_drained = self.segments.job_count() == 0 && self.current + 1 < self.segments.len();
        is_drained.then(|| self.recorded_at + DRAINED_PAUSE)
    }

    fn drop_prepared(&mut self) {
        while self.current + 1 < self.segments.len() {
            let number = self.last_number();
            if let Err(error) = self.disk.remove(number) {
                return debug!("binlog.{number}: cannot be removed: {error}");
            }
            let segment = self.segments.pop_newest();
            self.sums.disk_bytes -= on_disk(segment.size);
            self.sums.room_ahead -= fresh_room(&segment);
        }
    }

    fn sync_due(&self) -> Option<Nanos> {
        let since = self.unsynced_since?;
        match self.policy.syncing {
            Syncing::EachTurn => Some(since),
            Syncing::Within(span) => {
                let quarter = Nanos::from_nanos(span.as_nanos() / 4);
                Some(since + span.since(quarter.min(SYNC_MARGIN)))
            }
            Syncing::Never => None,
        }
    }

    fn sync_if_wanted(&mut self) {
        if self.unsynced_since.take().is_none() || !self.is_synced() || self.failure.is_some() {
            return;
        }
        for number in std::mem::take(&mut self.unsynced_closed) {
            let synced = self.disk.sync(number);
            self.check(&format!("binlog.{number}: cannot sync it"), synced);
            self.disk.close(number);
        }
        let number = self.current_number();
        let synced = self.disk.sync(number);
        self.check(&format!("binlog.{number}: cannot sync it"), synced);
    }

    fn sync_directory(&mut self) {
        if self.is_synced() {
            let synced = self.disk.sync_directory();
            self.check("the directory: cannot sync it", synced);
        }
    }

    fn is_synced(&self) -> bool {
        self.policy.syncing != Syncing::Never
    }

    /// Whether a segment can be removed.
    fn has_leaving(&self) -> bool {
        self.current > 0 && self.segments[0].is_empty()
    }

    fn can_retire(&self) -> bool {
        self.has_leaving() && self.remove_again_at <= self.turn_at && self.failure.is_none()
    }

    /// Removes the oldest segments as far as no job belongs to them, but no more at once than
    /// others can wait for.
    fn retire(&mut self) {
        let is_small = self.policy.file_size <= SMALL_FILE;
        for _ in 0..if is_small { SMALL_REMOVALS_PER_TURN } else { REMOVALS_PER_TURN } {
            if !self.can_retire() {
                return;
            }
            self.retire_one();
        }
    }

    fn retire_one(&mut self) {
        self.count_leaving();
        let Segment { number, size, is_damaged, .. } = self.segments[0];
        let removed = if is_damaged {
            let name = self.disk.set_aside(number);
            name.map(|name| warn!("binlog.{number}: set aside as {name}"))
        } else {
            self.disk.remove(number)
        };
        if let Err(error) = removed {
            // No newer one may go before it.
            self.remove_again_at = self.turn_at + REMOVE_AGAIN;
            return warn!("binlog.{number}: not needed and cannot be removed: {error}");
        }
        debug!("binlog.{number}: removed");
        self.is_full = false;
        self.segments.pop_oldest();
        self.current -= 1;
        self.leaving -= 1;
        self.leaving_bytes -= on_disk(size);
        self.sums.disk_bytes -= on_disk(size);
        self.sums.closed_bytes -= on_disk(size);
        self.sync_directory();
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
        self.check(&format!("binlog.{number}: cannot write it"), written);
    }

    fn check(&mut self, what: &str, result: io::Result<()>) {
        if let Err(error) = result {
            self.failure.get_or_insert(Failure(format!("{what}: {error}")));
        }
    }

    fn current_number(&self) -> FileNumber {
        self.segments[self.current].number
    }

    fn last_number(&self) -> FileNumber {
        self.segments.newest().map_or(0, |segment| segment.number)
    }

    // ---- Telling ----

    /// The numbers for `stats`.
    pub fn figures(&self) -> Figures {
        Figures {
            oldest: self.segments[0].number,
            current: self.current_number(),
            records_written: self.sums.records_written,
            records_migrated: self.sums.records_migrated,
        }
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

/// How many short records there is room for in a segment that is only prepared.
fn fresh_room(segment: &Segment) -> u64 {
    (segment.size - HEAD) / SHORT
}

fn is_unused(segment: &Segment) -> bool {
    segment.used <= VERSION_LEN as u64 && !segment.is_damaged
}

/// How many bytes a file of `size` bytes takes.
fn on_disk(size: u64) -> u64 {
    size.next_multiple_of(BLOCK)
}

impl From<TryReserveError> for NoRoom {
    fn from(_: TryReserveError) -> NoRoom {
        NoRoom::Memory
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
