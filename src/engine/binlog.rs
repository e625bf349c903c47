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
//! more short record, that of its delete; beyond that there is a spare, on which releases,
//! buries and kicks can go on for a while when the disk is full, and moves out of old
//! segments longer still.
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
use super::record::{self, Fields, Layout, SHORT_LEN, VERSION, VERSION_LEN};
use super::segments::{Segment, Segments};
use super::time::Nanos;
use log::{debug, warn};
use std::collections::TryReserveError;
use std::fmt;
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
    /// Records at the end of the current segment that are not written yet.
    batch: Vec<u8>,
    sums: Sums,
    /// How many bytes are to be moved to keep up with the garbage.
    owed: u64,
    /// When compaction goes on if nothing else happens.
    idle_step_at: Nanos,
    /// There was nothing that could be moved.
    is_stuck: bool,
    /// When the present turn began.
    turn_at: Nanos,
    /// When the oldest record was made that may not survive a power cut.
    unsynced_since: Option<Nanos>,
    /// Segments before the current one with such records.
    unsynced_closed: Vec<FileNumber>,
    /// A segment could not be removed; when that is tried again.
    keeps_segments_until: Nanos,
    /// No more space was to be had in this turn.
    has_failed_to_grow: bool,
    /// No more space was to be had, and none has been given back since.
    is_full: bool,
    /// The operator has been told so, and not yet that it is over.
    is_full_told: bool,
    last: Last,
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
    pub sync: Syncing,
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
    disk: u64,
    /// That of them which are before the current one.
    closed: u64,
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
    /// For how many short records there must be room behind it.
    slots: u64,
    /// And for how many more, even if no more space is to be had.
    floor: u64,
}

/// How much is written at once, at most.
const BATCH_LEN: usize = 256 * 1024;
/// Longer bodies are not copied into the batch.
const COPIED_LEN: usize = BATCH_LEN / 2;

/// Files take whole blocks of the disk.
const BLOCK: u64 = 4096;

/// For each byte of garbage that is made, so many are moved while there is too much of it.
const PACE: u64 = 4;
/// So much is moved at a time when nothing else happens, and so often.
const IDLE_STEP: u64 = 64 * 1024;
const IDLE_PAUSE: Nanos = Nanos::from_millis(1);
/// When that finds no space.
const STUCK_PAUSE: Nanos = Nanos::from_secs(1);

/// More files than that are not removed in one turn.
const REMOVALS_PER_TURN: usize = 4;
/// How long to wait when one cannot be.
const REMOVE_AGAIN: Nanos = Nanos::from_secs(60);

/// A sync takes a while, and is begun so much earlier, though not by more than a quarter.
const SYNC_MARGIN: Nanos = Nanos::from_millis(5);

const SHORT: u64 = SHORT_LEN as u64;
/// The version and the marker.
const HEAD: u64 = (VERSION_LEN + SHORT_LEN) as u64;

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
            batch: Vec::new(),
            sums: Sums::default(),
            owed: 0,
            idle_step_at: Nanos::ZERO,
            is_stuck: false,
            turn_at: now,
            unsynced_since: None,
            unsynced_closed: Vec::new(),
            keeps_segments_until: Nanos::ZERO,
            has_failed_to_grow: false,
            is_full: false,
            is_full_told: false,
            last,
            failure: None,
        };
        binlog.batch.try_reserve_exact(BATCH_LEN).map_err(|_| io::ErrorKind::OutOfMemory)?;
        for place in 0..binlog.segments.len() {
            binlog.sums.disk += on_disk(binlog.segments[place].size);
            binlog.cut_segment(place);
            let number = binlog.segments[place].number;
            if policy.sync != Syncing::Never {
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
            self.sums.disk -= on_disk(segment.size);
            self.disk.remove(segment.number)?;
        }
        if !self.segments.is_empty() {
            // There must be no gap.
            number = self.last_number() + 1;
        }
        self.sums.closed = self.sums.disk;
        self.current = self.segments.len();
        let jobs = self.segments.job_count();
        while self.segments.len() == self.current || self.sums.room_ahead < jobs {
            let least = HEAD + jobs.saturating_sub(self.sums.room_ahead).max(1) * SHORT;
            let grown = self.grow(number, self.file_size());
            let grown = grown.or_else(|_| self.grow(number, least));
            if let Err(error) = grown.or_else(|_| self.grow(number, BLOCK)) {
                if self.segments.len() == self.current {
                    return Err(error);
                }
                warn!("binlog.{number}: no space for it: {error}; deletes may be refused");
                break;
            }
            number += 1;
        }
        self.sums.room_ahead -= fresh_room(&self.segments[self.current]);
        self.write_marker();
        Ok(())
    }

    // ---- Making room ----

    /// Sees to it that there is memory and space for a new job with a full record of `len`
    /// bytes, for its delete, and for a spare.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn make_room_to_put(&mut self, len: usize) -> Result<(), NoRoom> {
        self.segments.try_reserve_one()?;
        let floor = self.spare();
        self.make_room(Need { len: len as u64, slots: self.segments.job_count() + 1, floor })
    }

    /// Sees to it that there is space for one more short record.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn make_room_to_update(&mut self) -> Result<(), NoRoom> {
        let floor = self.spare() / 4;
        self.make_room(Need { len: SHORT, slots: self.segments.job_count(), floor })
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
            let has = |slots: u64| room.is_some_and(|room| room >= need.slots + slots);
            // Rather a smaller spare than more files, while old ones are about to go.
            let is_enough = has(self.spare()) || (has(self.spare() / 2) && self.is_at_limit());
            if is_enough || (!self.prepare() && has(need.floor)) {
                return self.take_place(need.len);
            }
            if self.has_failed_to_grow {
                return Err(NoRoom::Space);
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
        let next = self.segments.iter().nth(self.current + 1)?;
        let in_next = (next.size - HEAD).checked_sub(len)? / SHORT;
        Some(in_next + self.sums.room_ahead - fresh_room(next))
    }

    /// Sees to it that the next record, of `len` bytes, fits in the current segment.
    fn take_place(&mut self, len: u64) -> Result<(), NoRoom> {
        if len <= self.segments[self.current].left() {
            return Ok(());
        }
        if len <= self.fresh_len() {
            self.advance();
            return Ok(());
        }
        let segment = &mut self.segments[self.current];
        let (old, new) = (segment.size, segment.used + len);
        match self.disk.extend(segment.number, new) {
            Ok(()) => {
                segment.size = new;
                self.sums.disk += on_disk(new) - on_disk(old);
                Ok(())
            }
            Err(error) => {
                self.tell_full(self.current_number(), &error);
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

    /// For how many short records there shall be room beyond those that must be.
    fn spare(&self) -> u64 {
        self.file_size() / 2 / SHORT
    }

    fn file_size(&self) -> u64 {
        self.policy.file_size.into()
    }

    /// Whether one more file would be too much, and old ones can go.
    fn is_at_limit(&self) -> bool {
        self.current > 0 && self.sums.disk > 3 * self.segments.live_bytes() + self.file_size()
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
            self.retire(REMOVALS_PER_TURN);
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
                self.tell_full(self.last_number() + 1, &error);
            }
        }
        !self.has_failed_to_grow
    }

    fn tell_full(&mut self, number: FileNumber, error: &io::Error) {
        self.is_full = true;
        if !std::mem::replace(&mut self.is_full_told, true) {
            warn!("binlog.{number}: no space for it: {error}; puts are refused until there is");
        }
    }

    fn grow(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        if number > LAST_NUMBER {
            return Err(io::Error::other("there are no more numbers for files"));
        }
        self.disk.create(number, size)?;
        if let Err(error) = self.disk.write(number, 0, &VERSION) {
            self.disk.remove(number)?;
            return Err(error);
        }
        if self.policy.sync != Syncing::Never {
            let synced = self.disk.sync_directory();
            self.check(number, "sync the directory of", synced);
        }
        let segment = Segment::new(number, size, VERSION_LEN as u64);
        self.sums.disk += on_disk(size);
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
        if self.unsynced_since.is_some() && self.policy.sync != Syncing::Never {
            self.unsynced_closed.push(number);
        } else {
            self.disk.close(number);
        }
        self.sums.closed += on_disk(self.segments[self.current].size);
        self.current += 1;
        self.sums.room_ahead -= fresh_room(&self.segments[self.current]);
        self.write_marker();
    }

    fn write_marker(&mut self) {
        record::write_marker(&mut self.batch, self.last.id);
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
        self.sums.disk -= on_disk(size) - on_disk(used);
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
        self.segments.entry_mut(key).moment = fields.moment;
        self.append(fields, "", &[]);
        self.owe(SHORT);
    }

    /// The moment for a job that is buried now: later than that of the one before, whatever
    /// the clock of the system was set to since.
    pub fn next_burial(&mut self, now: Nanos) -> Nanos {
        self.last.buried_at = now.max(self.last.buried_at + Nanos::ONE);
        self.last.buried_at
    }

    /// The moment of the last record of a job.
    pub fn moment_of(&self, key: LogKey) -> Nanos {
        self.segments.entry(key).moment
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
        record::write(&mut self.batch, fields, tube, body);
        self.segments[self.current].used += record::full_len(tube, &[]) as u64;
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
    }

    // ---- Compaction ----

    /// Garbage has been made.
    fn owe(&mut self, bytes: u64) {
        self.owed = if self.wants_compaction() { self.owed + PACE * bytes } else { 0 };
    }

    fn wants_compaction(&self) -> bool {
        if self.current == 0 || self.failure.is_some() {
            return false;
        }
        let live = self.segments.live_bytes();
        // What is empty goes soon anyway.
        let older = self.segments.iter().take(self.current);
        let going = older.take_while(|segment| segment.is_empty());
        let closed = self.sums.closed - going.map(|segment| on_disk(segment.size)).sum::<u64>();
        let garbage = (closed + self.segments[self.current].used).saturating_sub(live);
        let set_aside = self.segments.job_count() * SHORT;
        let file_size = self.file_size();
        let limit = if self.is_full {
            live / 4 + file_size / 8
        } else {
            (live + live / 2).saturating_sub(set_aside).max(live / 4) + file_size / 2
        };
        garbage > limit
    }

    /// The job that compaction moves next, if it is time for that and there is room. Its full
    /// record is to be made by [`Binlog::move_here`].
    pub fn next_to_move(&mut self) -> Option<(LogKey, JobKey)> {
        if self.owed == 0 || !self.wants_compaction() {
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
        let spare = self.room().saturating_sub(self.segments.job_count()) * SHORT;
        let oldest = self.segments.iter().take(self.current).find(|segment| !segment.is_empty());
        let oldest = oldest.filter(|segment| !self.is_full || segment.live_bytes() <= spare);
        let first = oldest.and_then(Segment::first_job);
        let found = first.filter(|&key| {
            let len = self.segments.entry(key).len.into();
            self.make_room(Need { len, slots: self.segments.job_count(), floor: 0 }).is_ok()
        });
        self.is_stuck = found.is_none();
        if self.is_stuck {
            self.owed = 0;
        }
        found.map(|key| (key, self.segments.entry(key).job))
    }

    /// Makes a new full record of a job that was named to be moved.
    pub fn move_here(&mut self, key: LogKey, fields: &Fields, tube: &str, body: &[u8]) {
        let len = record::full_len(tube, body) as u64;
        self.segments.move_job(key, self.current_number(), len);
        self.append(fields, tube, body);
        self.sums.records_migrated += 1;
        self.owed = self.owed.saturating_sub(len);
    }

    /// Time has passed: [`Binlog::next_to_move`] may have something.
    pub fn tick(&mut self, now: Nanos) {
        self.turn_at = now;
        if self.idle_step_at <= now && self.wants_compaction() {
            self.idle_step_at = now + if self.is_stuck { STUCK_PAUSE } else { IDLE_PAUSE };
            self.owed = self.owed.max(IDLE_STEP);
        }
    }

    /// When [`Binlog::tick`] or [`Binlog::commit`] has something to do.
    pub fn next_due(&self) -> Option<Nanos> {
        let step = self.wants_compaction().then_some(self.idle_step_at);
        let sync = self.sync_due();
        let removal = self.can_retire().then_some(self.keeps_segments_until);
        [step, sync, removal].into_iter().flatten().min()
    }

    // ---- The end of a turn ----

    /// Writes what the turn has brought, and syncs it if it is time for that. Only then may
    /// the replies of the turn leave.
    ///
    /// # Errors
    /// The disk has failed: they may not.
    pub fn commit(&mut self, now: Nanos) -> Result<(), Failure> {
        self.has_failed_to_grow = false;
        if self.segments.job_count() == 0 {
            self.start_afresh();
        }
        self.write_batch();
        let may_remove = self.can_retire() && self.keeps_segments_until <= now;
        if may_remove || self.sync_due().is_some_and(|due| due <= now) {
            self.sync_if_wanted();
        }
        if may_remove {
            self.retire(REMOVALS_PER_TURN);
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// The server ends: syncs, and leaves no more space taken than is used.
    ///
    /// # Errors
    /// The disk has failed.
    pub fn close(&mut self, now: Nanos) -> Result<(), Failure> {
        self.commit(now)?;
        self.sync_if_wanted();
        self.retire(usize::MAX);
        self.drop_prepared();
        self.cut_segment(self.current);
        self.disk.close(self.current_number());
        if self.policy.sync != Syncing::Never {
            let synced = self.disk.sync_directory();
            self.check(self.current_number(), "sync the directory of", synced);
        }
        self.failure.clone().map_or(Ok(()), Err)
    }

    /// No job is left: one file with next to nothing in it will do.
    fn start_afresh(&mut self) {
        if self.current + 1 < self.segments.len() {
            self.advance();
            self.drop_prepared();
        }
    }

    fn drop_prepared(&mut self) {
        while self.current + 1 < self.segments.len() {
            let number = self.last_number();
            if let Err(error) = self.disk.remove(number) {
                return debug!("binlog.{number}: cannot be removed: {error}");
            }
            let segment = self.segments.pop_newest();
            self.sums.disk -= on_disk(segment.size);
            self.sums.room_ahead -= fresh_room(&segment);
        }
    }

    fn sync_due(&self) -> Option<Nanos> {
        let since = self.unsynced_since?;
        match self.policy.sync {
            Syncing::EachTurn => Some(since),
            Syncing::Within(span) => {
                let quarter = Nanos::from_nanos(span.as_nanos() / 4);
                Some(since + span.since(quarter.min(SYNC_MARGIN)))
            }
            Syncing::Never => None,
        }
    }

    fn sync_if_wanted(&mut self) {
        if self.unsynced_since.take().is_none() || self.policy.sync == Syncing::Never {
            return;
        }
        for number in std::mem::take(&mut self.unsynced_closed) {
            let synced = self.disk.sync(number);
            self.check(number, "sync", synced);
            self.disk.close(number);
        }
        let number = self.current_number();
        let synced = self.disk.sync(number);
        self.check(number, "sync", synced);
    }

    fn can_retire(&self) -> bool {
        self.current > 0 && self.segments[0].is_empty()
    }

    /// Removes the oldest segments as far as no job belongs to them.
    fn retire(&mut self, limit: usize) {
        for _ in 0..limit {
            if !self.can_retire() || self.failure.is_some() {
                return;
            }
            let Segment { number, size, is_damaged, .. } = self.segments[0];
            let removed = if is_damaged {
                let name = self.disk.set_aside(number);
                name.map(|name| warn!("binlog.{number}: set aside as {name}"))
            } else {
                self.disk.remove(number)
            };
            if let Err(error) = removed {
                // No newer one may go before it.
                self.keeps_segments_until = self.turn_at + REMOVE_AGAIN;
                return warn!("binlog.{number}: not needed and cannot be removed: {error}");
            }
            debug!("binlog.{number}: removed");
            self.is_full = false;
            self.segments.pop_oldest();
            self.current -= 1;
            self.sums.disk -= on_disk(size);
            self.sums.closed -= on_disk(size);
            if self.policy.sync != Syncing::Never {
                let synced = self.disk.sync_directory();
                self.check(number, "sync the directory after the removal of", synced);
            }
        }
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
        self.check(number, "write", written);
    }

    fn check(&mut self, number: FileNumber, what: &str, result: io::Result<()>) {
        if let Err(error) = result {
            let failure = Failure(format!("binlog.{number}: cannot {what} it: {error}"));
            self.failure.get_or_insert(failure);
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

    /// How many files there are.
    pub fn file_count(&self) -> usize {
        self.segments.len()
    }

    /// How many files are not sound.
    pub fn damaged_files(&self) -> usize {
        self.segments.iter().filter(|segment| segment.is_damaged).count()
    }

    /// The number of the file that has the full record of a job.
    pub fn file_of(&self, key: LogKey) -> FileNumber {
        self.segments.entry(key).file
    }
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
