//! Makes sure that records have space on the disk before they are made.
//!
//! Space is taken in whole files, ahead of need. For each live job there is room for one more short
//! record, that of its delete, so that a delete never fails. If its key is kept after the delete, there is
//! room for one more. In addition there is headroom: room for one or two whole files of records. When
//! the disk has no space for a whole file, the newest file takes a small piece. Puts are refused when
//! the headroom falls to [`Binlog::min_headroom`]. A quarter of that is for releases, buries and kicks, and
//! the rest for compaction, which frees space: it should hold the jobs of the oldest file.
//!
//! Room is counted in short records: how many more of them fit. A reservation that fails changes
//! nothing.

use super::disk::{FileNumber, LAST_NUMBER};
use super::files::{BLOCK, File, Files, HEAD, SHORT, on_disk};
use super::record::{VERSION, VERSION_LEN};
use super::refusal_log::RefusalLog;
use super::syncing::RETRY_PAUSE;
use super::{Binlog, NoSpace};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::JobKey;
use log::{debug, warn};
use std::io;

/// The size of files, and the state of a full disk.
#[derive(Default)]
pub struct Space {
    /// The size of a whole file in bytes: that of the next file that is created, unless there is too little
    /// space.
    pub file_size: u64,
    /// The bytes that all files together could take when the disk was measured last.
    capacity: u64,
    /// While files take more than `--binlog-limit`, as after a start with a lower one, they may take this many
    /// bytes: otherwise no job could be moved out of the files that must go.
    ceiling: u64,
    /// The last attempt to take space, if that failed and no file was removed since: the disk is full.
    pub refusal: Option<Refusal>,
    /// It began without headroom.
    began_short: bool,
    pub log: RefusalLog,
}

/// An attempt to take space that failed.
pub struct Refusal {
    pub file: FileNumber,
    pub error: io::Error,
    /// It was made in this iteration: there is no other one before the next.
    pub is_new: bool,
}

/// This many short records always fit, even on a full disk, so that the next start finds a block
/// for its first file. Each start takes one block more.
const LAST_HEADROOM: u64 = (BLOCK + HEAD).div_ceil(SHORT);

/// On a full disk the headroom is at least this share of the space that all files take.
const HEADROOM_SHARE: u64 = 32;
/// It is at least this many bytes, or all of the headroom if that is less.
const SMALL_HEADROOM: u64 = 32 * 1024;

/// If there is no space for a whole file, this share of one is taken at a time.
const MIN_PIECE_SHARE: u64 = 32;

/// The size of a file is halved until this many files fit in the space that the binlog can use.
const MIN_FILES: u64 = 64;
/// At most this many gaps, so that their records are a small part of a file, and fit in the smallest one, of a block.
const MOST_GAPS: usize = 32;
/// More than a full record has besides the body: fields, the name of the tube, and the record of its key.
const MAX_RECORD_HEAD: u64 = BLOCK;

impl Binlog {
    // ---- The first space ----

    /// Takes over the files that replay has read: each is truncated to its records and synced. The newest ones are
    /// removed as long as they have no record, to use their space again. None of them is the current one yet.
    fn open_files(&mut self) -> io::Result<()> {
        // The server before may have been killed after a change of names, and files that it has removed may still
        // take space.
        self.sync.has_new_names = true;
        self.sync.is_truncating = true;
        // A remote disk takes a missing file for a lost one.
        self.files.most_gaps = if self.disk.is_remote() { 0 } else { MOST_GAPS };
        self.files.gaps.forget_before(self.files.oldest_number());
        self.files.current = self.files.list.len();
        for index in 0..self.files.current {
            self.truncate(index);
            // The server that wrote it may have ended before its last sync.
            self.close_after_sync(self.files.list[index].number);
            self.sync.unsynced_since = Some(self.now);
            self.sync();
        }
        self.files.recount();
        self.choose_file_size();
        self.files.number_before = self.files.last_number();
        while self.files.list.last().is_some_and(File::is_unused) {
            self.remove_newest()?;
        }
        Ok(())
    }

    /// Creates the first file of this start, and more for the deletes of all jobs. When there is
    /// too little space for that, the newest old file is continued if it is intact. So a start
    /// needs no more space than the server had when it ended. A limit that is lower than at an earlier start
    /// is exceeded, so that deletes work.
    pub(super) fn begin_files(&mut self) -> io::Result<()> {
        self.open_files()?;
        let records = self.files.delete_records();
        let mut may_reopen = true;
        while !self.files.has_current() || self.room() < records {
            let Err(error) = self.grow_at_start() else { continue };
            if !is_want_of_space(&error) {
                return Err(error);
            }
            self.files.count_free(self.sync.begun);
            if std::mem::take(&mut may_reopen) {
                while self.files.has_current() {
                    self.remove_newest()?;
                }
                self.batch.clear();
                self.reopen_newest();
            } else if self.files.last_number() < LAST_NUMBER
                && self.files.current > 1
                && self.next_to_remove() == Some(0)
            {
                // The newest old file knows which ids were given out, and is kept. After the highest
                // number a removal would not help.
                self.remove_next(false);
            } else if self.exceeds_limit() && self.space.ceiling == 0 {
                // The next attempt fails only if the disk itself has no space.
                self.space.ceiling = u64::MAX;
            } else if !self.files.has_current() {
                return Err(error);
            } else {
                warn!(
                    "no space in binlog.{} for the deletes of all jobs: {error}; only {} of {records} \
                     records of deletes fit until there is",
                    self.files.last_number(),
                    self.room()
                );
                break;
            }
        }
        let room = self.room() + self.measure_space() / SHORT;
        self.space.began_short = room < records + self.min_headroom();
        self.space.ceiling = self.files.sums.disk_bytes + self.space.file_size;
        if self.exceeds_limit() {
            warn!(
                "the binlog takes {} bytes, more than --binlog-limit {}; refusing puts until it \
                 takes less",
                self.files.sums.disk_bytes, self.settings.max_binlog_bytes
            );
        }
        self.sync();
        Ok(())
    }

    /// Takes a block at least. On a remote disk, where no file of the leader before may grow, the limit is exceeded.
    fn grow_at_start(&mut self) -> io::Result<()> {
        let grown = self.grow(BLOCK);
        if grown.is_ok() || !self.disk.is_remote() {
            return grown;
        }
        self.with_limit(self.files.sums.disk_bytes + BLOCK, |binlog| binlog.grow(BLOCK))
    }

    /// Lets the files take up to `most_bytes` meanwhile, instead of what the settings allow.
    fn with_limit<T>(&mut self, most_bytes: u64, take: impl FnOnce(&mut Binlog) -> T) -> T {
        let limit = std::mem::replace(&mut self.settings.max_binlog_bytes, most_bytes);
        let taken = take(self);
        self.settings.max_binlog_bytes = limit;
        taken
    }

    /// Makes the newest closed file the current one if records can be appended to it, and it can be lengthened:
    /// it is intact, was written by this server, and is shorter than `-s` sets. Nothing is behind its last
    /// record, because it was truncated there and synced.
    fn reopen_newest(&mut self) {
        let Some(newest) = self.files.list.last() else { return };
        let can_grow = newest.size < self.settings.binlog_file_size.into();
        let is_reopenable = !newest.is_damaged && newest.used == newest.size && can_grow;
        let Some(nonce) = newest.nonce.filter(|_| is_reopenable) else { return };
        // The rest of its last block is always there.
        let lengthened = self.try_sizes(BLOCK, Binlog::lengthen);
        if lengthened.or_else(|_| self.lengthen(1)).is_ok() {
            self.nonce = nonce;
            self.files.current -= 1;
            self.files.list[self.files.current].free_since = None;
            self.files.recount();
        }
    }

    // ---- Sizes ----

    /// Measures the disk. Returns how many bytes more all files can take.
    pub(super) fn measure_space(&mut self) -> u64 {
        let free = self.disk.free_bytes().unwrap_or(u64::MAX);
        let taken = self.files.sums.disk_bytes;
        self.space.capacity = taken.saturating_add(free).min(self.limit());
        self.space.capacity.saturating_sub(taken)
    }

    /// Chooses the size of the next files. When the disk becomes full, a file with jobs can be removed only
    /// after its jobs were copied, so it should be a small part of the disk.
    fn choose_file_size(&mut self) {
        self.measure_space();
        let most = u64::from(self.settings.binlog_file_size);
        let capacity = self.space.capacity.min(self.settings.max_binlog_bytes);
        let least = u64::from(self.settings.max_job_size) + MAX_RECORD_HEAD;
        // The headroom holds the jobs of such a file. A longer record has a file of its own.
        let movable = SMALL_HEADROOM.max(capacity / HEADROOM_SHARE);
        // By halves, so that it does not change with every block that other programs write.
        let mut size = most;
        while size > movable || (size > capacity / MIN_FILES && size / 2 >= least) {
            size /= 2;
        }
        self.space.file_size = size.next_multiple_of(BLOCK).min(most);
    }

    /// Returns how many bytes of records fit in a whole file.
    fn whole_len(&self) -> u64 {
        self.space.file_size.saturating_sub(self.files.sums.head_len)
    }

    /// Returns the headroom beyond a whole file, in bytes: another whole file, so that a file can be moved on
    /// a full disk, but at most a quarter of the live bytes.
    pub(super) fn more_headroom(&self) -> u64 {
        self.whole_len().min(self.files.live_bytes / 4)
    }

    /// Returns for how many short records there should be room in addition to the deletes of all
    /// jobs: a whole file, and up to one more if there are many jobs.
    fn headroom(&self) -> u64 {
        (self.whole_len() + self.more_headroom()) / SHORT
    }

    /// Returns the headroom at which puts are refused when there is no space for a whole file. On a
    /// small disk it is smaller, because such a disk could otherwise take few jobs or none.
    fn min_headroom(&self) -> u64 {
        let bytes = (self.files.sums.disk_bytes / HEADROOM_SHARE).max(SMALL_HEADROOM);
        self.headroom().min(bytes / SHORT)
    }

    /// Returns how many short records fit in the current file and the prepared ones.
    pub(super) fn room(&self) -> u64 {
        self.files.current().left() / SHORT + self.files.sums.prepared_room
    }

    /// Returns how many short records fit behind a record of `len` bytes, or `None` if that
    /// record does not fit.
    fn room_behind(&self, len: u64) -> Option<u64> {
        let mut room = self.files.sums.prepared_room;
        if let Some(left) = self.files.current().left().checked_sub(len) {
            return Some(left / SHORT + room);
        }
        if len > self.whole_len() {
            // It gets a file of its own.
            let index = self.file_for_long()?;
            let lost = self.files.fresh_room(&self.files.list[index]);
            return Some(if index == self.files.current { room } else { room - lost });
        }
        // Files that are too short are passed over. Only on a full disk there are any.
        for next in self.files.prepared() {
            room -= self.files.fresh_room(next);
            if let Some(left) = next.size.checked_sub(self.files.sums.head_len + len) {
                return Some(left / SHORT + room);
            }
        }
        None
    }

    /// Returns the index of the file that is lengthened for a record that is longer than a file: one without records, so
    /// that no file grows without end.
    fn file_for_long(&self) -> Option<usize> {
        let Files { current, list, sums, .. } = &self.files;
        let index = current + usize::from(self.files.current().used > sums.head_len);
        (index < list.len()).then_some(index)
    }

    /// Returns how many bytes of records compaction can write to the files that exist.
    pub(super) fn room_for_moves(&self) -> u64 {
        self.room().saturating_sub(self.kept_deletes() + LAST_HEADROOM) * SHORT
    }

    /// Returns for how many deletes compaction leaves room. A server that began short borrows some of it until the
    /// file that it empties is removed.
    pub(super) fn kept_deletes(&self) -> u64 {
        self.files.delete_records() / if self.space.began_short { 2 } else { 1 }
    }

    /// Returns three times the live bytes and two files.
    fn bound(&self) -> u64 {
        3 * self.files.live_bytes + 2 * self.space.file_size
    }

    /// Returns whether all files together take more than that. Free ones do not count.
    pub(super) fn takes_too_much(&self) -> bool {
        self.files.sums.disk_bytes - self.files.sums.free_bytes > self.bound()
    }

    /// Returns whether the disk had no space when it was last asked, and no file was removed since.
    pub(super) fn is_full(&self) -> bool {
        self.space.refusal.is_some()
    }

    /// Returns whether all files, with the free ones, are within the bound, and the disk is not full.
    pub(super) fn is_within_bound(&self) -> bool {
        self.files.sums.disk_bytes <= self.bound() && !self.is_full()
    }

    /// Returns whether one more file would exceed the bound on all files, on a disk that is not full.
    fn is_at_bound(&self) -> bool {
        !self.is_full() && self.files.sums.disk_bytes + self.space.file_size > self.bound()
    }

    /// Returns whether the disk is full, or had no space for two more files when it was measured last.
    pub(super) fn is_nearly_full(&self) -> bool {
        let more = self.files.sums.disk_bytes.saturating_add(2 * self.space.file_size);
        self.is_full() || self.exceeds_limit() || more > self.space.capacity
    }

    /// Returns how many bytes all files may take.
    fn limit(&self) -> u64 {
        let max_bytes = self.settings.max_binlog_bytes;
        if self.exceeds_limit() { max_bytes.max(self.space.ceiling) } else { max_bytes }
    }

    /// Returns whether all files take more than the limit: it was higher at an earlier start, or there was none.
    fn exceeds_limit(&self) -> bool {
        self.files.sums.disk_bytes > self.settings.max_binlog_bytes
    }

    /// Returns whether no put has space, however short it is: it would exceed a limit, or the disk refuses it.
    fn refuses_all_puts(&self) -> bool {
        self.disk.refuses_puts() || self.exceeds_limit()
    }

    /// Returns whether puts are refused for want of space.
    pub fn refuses_puts(&self) -> bool {
        self.refuses_all_puts() || (self.is_full() && self.space.log.is_refusing)
    }

    // ---- Reserving ----

    /// Reserves memory and space for this new job with a full record of `len` bytes, and for its
    /// delete. `keeps_key` is `None` if it has no key, and otherwise whether that is kept after the delete.
    pub fn reserve_put(
        &mut self,
        job: JobKey,
        len: usize,
        keeps_key: Option<bool>,
    ) -> Result<(), NoSpace> {
        self.files.try_reserve(job)?;
        if self.refuses_all_puts() {
            return Err(NoSpace);
        }
        self.ensure_memory(Headroom::Whole, len)?;
        let len = len as u64 + keeps_key.map_or(0, |_| SHORT);
        let own_deletes = 1 + u64::from(keeps_key == Some(true));
        let delete_records = self.files.delete_records() + own_deletes;
        let reserved = self.reserve(len, delete_records, 4);
        self.log_refusal(reserved.is_ok());
        reserved
    }

    /// Reserves space for a short record of a job that exists.
    pub fn reserve_update(&mut self) -> Result<(), NoSpace> {
        self.reserve(SHORT, self.files.delete_records(), 3)
    }

    /// Reserves space for records of `len` bytes that may use the headroom of compaction.
    pub(super) fn reserve_from_headroom(&mut self, len: u64) -> Result<(), NoSpace> {
        self.reserve(len, self.kept_deletes(), 0)
    }

    /// Reserves space for a record of `len` bytes. There must be room behind it for these short records of
    /// deletes and, when the disk has no more space, for these quarters of [`Binlog::min_headroom`].
    fn reserve(&mut self, len: u64, deletes: u64, quarters: u64) -> Result<(), NoSpace> {
        loop {
            let room = self.room_behind(len).and_then(|room| room.checked_sub(deletes));
            let has = |headroom: u64| room.is_some_and(|room| room >= headroom);
            let headroom = self.headroom();
            // While old files are about to be removed, less headroom is better than more files.
            let quarter = headroom / 4;
            let is_enough = has(headroom + LAST_HEADROOM)
                || (has(quarter + LAST_HEADROOM.min(quarter) / 2) && self.is_at_bound());
            if is_enough || !self.prepare() {
                let least = (self.min_headroom() * quarters).div_ceil(4);
                let fits = is_enough || has(least + LAST_HEADROOM);
                return if fits { self.ensure_fits(len) } else { Err(NoSpace) };
            }
        }
    }

    /// Reserves space for [`Binlog::move_to_current`] or [`Binlog::move_kept_key`]. Returns `false` if there is
    /// none.
    pub fn reserve_move(&mut self, job: JobKey) -> bool {
        let len = self.files.entry(job).live_bytes();
        let bytes = usize::try_from(len).unwrap_or(usize::MAX);
        let has_memory = self.ensure_memory(Headroom::ThreeQuarters, bytes);
        has_memory.and_then(|()| self.reserve_from_headroom(len)).is_ok()
    }

    /// Makes sure that there is memory for a copy of a record on a remote disk, which waits there to be stored.
    fn ensure_memory(&self, least: Headroom, len: usize) -> Result<(), NoSpace> {
        if self.disk.is_remote() {
            headroom::ensure_free(least, len)?;
        }
        Ok(())
    }

    /// Reserves space for [`Binlog::delete`] of a job, whose key is then kept or not. The space exists since the
    /// put: only a server may lack it that was started on a full disk, or on files that take as much as they may.
    pub fn reserve_delete(&mut self, keeps_key: bool) -> Result<(), NoSpace> {
        while self.room() < 1 + u64::from(keeps_key) {
            if !self.prepare() && !self.prepare_beyond_limit() {
                return Err(NoSpace);
            }
        }
        self.ensure_fits(SHORT)
    }

    /// Takes space for a delete although the files take as much as they may: it frees more than that.
    fn prepare_beyond_limit(&mut self) -> bool {
        let Some(refusal) = &mut self.space.refusal else { return false };
        // On a full disk another attempt would not help.
        refusal.is_new = refusal.error.kind() != io::ErrorKind::QuotaExceeded;
        self.with_limit(u64::MAX, Binlog::prepare)
    }

    /// Takes space until `bytes` of moved records fit in newer files. Returns `false` if they cannot.
    pub(super) fn make_room_for_moves(&mut self, bytes: u64) -> bool {
        while self.room_for_moves() < bytes {
            if !self.prepare() {
                return false;
            }
        }
        true
    }

    /// Makes sure that the next record, of `len` bytes, fits in the current file.
    fn ensure_fits(&mut self, len: u64) -> Result<(), NoSpace> {
        if self.files.current().left() >= len { Ok(()) } else { self.advance_for(len) }
    }

    #[cold]
    fn advance_for(&mut self, len: u64) -> Result<(), NoSpace> {
        if len > self.whole_len() {
            let index = self.file_for_long().ok_or(NoSpace)?;
            let File { number, size, used, .. } = self.files.list[index];
            let used = used.max(self.files.sums.head_len);
            self.resize(index, size.max(used + len)).map_err(|error| {
                self.note_full(number, error);
                NoSpace
            })?;
            if index > self.files.current {
                self.advance();
            }
        }
        while self.files.current().left() < len {
            self.advance();
        }
        Ok(())
    }

    // ---- Taking space ----

    /// Takes space ahead of need. Returns `false` when there is none.
    fn prepare(&mut self) -> bool {
        if self.space.refusal.as_ref().is_some_and(|it| it.is_new) || self.has_failed() {
            return false;
        }
        self.files.count_free(self.sync.begun);
        let mut grown = self.grow(self.min_piece());
        if grown.is_err() && self.next_to_remove().is_some() {
            self.remove_some(false);
            grown = self.grow(self.min_piece());
        }
        match grown {
            Ok(()) => self.space.refusal = None,
            Err(error) => self.note_full(self.files.last_number() + 1, error),
        }
        self.space.refusal.is_none() && !self.has_failed()
    }

    /// Returns the size of the smallest piece that is taken.
    pub(super) fn min_piece(&self) -> u64 {
        if self.space.began_short {
            return BLOCK;
        }
        (self.space.file_size / MIN_PIECE_SHARE).next_multiple_of(BLOCK)
    }

    /// Lengthens the newest file if it is shorter than a whole one, or creates a file: by as much as a whole one,
    /// or by `least` bytes if there is too little space for that.
    fn grow(&mut self, least: u64) -> io::Result<()> {
        let is_short = |newest: &File| newest.size < self.space.file_size;
        let is_open = self.files.has_current() && self.files.list.last().is_some_and(is_short);
        self.try_sizes(least, if is_open { Binlog::lengthen } else { Binlog::create })
    }

    /// Calls `take` with the size of a whole file, and if there is no space for it with `least`. A disk that was
    /// full a moment ago probably still is.
    pub(super) fn try_sizes(
        &mut self,
        least: u64,
        take: fn(&mut Binlog, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let whole = self.space.file_size;
        if !self.is_full() {
            match take(self, whole) {
                Err(error) if least < whole && is_want_of_space(&error) => {}
                done => return done,
            }
        }
        take(self, least.min(whole))
    }

    /// Creates a prepared file, or the current one if there is none, and begins that.
    pub(super) fn create(&mut self, size: u64) -> io::Result<()> {
        let number = self.files.last_number() + 1;
        if number > LAST_NUMBER {
            let message = "the highest file number is used";
            return Err(io::Error::new(io::ErrorKind::StorageFull, message));
        }
        self.files.try_reserve_file().map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.check_limit(0, size)?;
        self.disk.create(number, size)?;
        self.files.push(File::new(number, size, VERSION_LEN as u64));
        let written = self.disk.write(number, 0, &VERSION);
        self.keep_error(written, || format!("cannot write binlog.{number}"));
        self.disk.close(number);
        self.sync.has_new_names = true;
        self.files.recount();
        debug!("binlog.{number}: created, {size} bytes");
        self.choose_file_size();
        if self.files.prepared().len() == 0 {
            self.begin_file();
        }
        Ok(())
    }

    /// Lengthens the newest file by up to `piece` bytes, but not beyond the size of a whole one or the end of
    /// its last block. It is the current file or a prepared one or, at the start, the closed one that is
    /// reopened.
    fn lengthen(&mut self, piece: u64) -> io::Result<()> {
        let index = self.files.list.len() - 1;
        let old = self.files.list[index].size;
        let longest = self.space.file_size.max(on_disk(old));
        self.resize(index, (old + piece).next_multiple_of(BLOCK).min(longest))
    }

    /// Lengthens a file.
    fn resize(&mut self, index: usize, size: u64) -> io::Result<()> {
        let File { number, size: old, .. } = self.files.list[index];
        self.check_limit(old, size)?;
        let extended = self.disk.extend(number, size);
        if index > self.files.current {
            self.disk.close(number);
        }
        extended?;
        self.files.list[index].size = size;
        self.files.recount();
        debug!("binlog.{number}: lengthened from {old} to {size} bytes");
        Ok(())
    }

    /// Fails if all files together would take too much with a file that grows from `old` to `new`
    /// bytes, and after an error of the disk.
    fn check_limit(&self, old: u64, new: u64) -> io::Result<()> {
        if let Some(failure) = &self.failure {
            return Err(io::Error::new(io::ErrorKind::StorageFull, failure.to_string()));
        }
        let taken = self.files.sums.disk_bytes + (on_disk(new) - on_disk(old));
        if taken <= self.limit() {
            return Ok(());
        }
        let message = format!("--binlog-limit {} is reached", self.settings.max_binlog_bytes);
        Err(io::Error::new(io::ErrorKind::QuotaExceeded, message))
    }

    /// Notes that a file could not be created or lengthened. Unless that is for want of space, the
    /// disk fails.
    pub(super) fn note_full(&mut self, file: FileNumber, error: io::Error) {
        if !is_want_of_space(&error) {
            let what = || format!("cannot create or lengthen binlog.{file}");
            return self.keep_error(Err(error), what);
        }
        self.space.refusal = Some(Refusal { file, error, is_new: true });
    }

    // ---- Freeing space ----

    /// Truncates a file to its records. Without space or permission for that the file stays
    /// longer, which is harmless. Any other error means that the disk fails.
    pub(super) fn truncate(&mut self, index: usize) {
        let File { number, size, used, is_damaged, .. } = self.files.list[index];
        if size == used || is_damaged || self.has_failed() {
            return;
        }
        match self.disk.truncate(number, used) {
            Ok(()) => {
                self.files.list[index].size = used;
                self.files.recount();
            }
            Err(error) if is_want_of_space(&error) => {
                debug!("cannot truncate binlog.{number}: {error}; it stays longer");
            }
            Err(error) => {
                self.keep_error(Err(error), || format!("cannot truncate binlog.{number}"))
            }
        }
    }

    /// Removes all prepared files.
    pub(super) fn remove_all_prepared(&mut self) {
        while self.files.prepared().len() > 0 && self.remove_newest().is_ok() {}
    }

    /// Removes a prepared file if there are several and the rest has enough room. When most live
    /// records are gone, fewer prepared files suffice.
    pub(super) fn remove_excess(&mut self) {
        let may_try = self.sync.retry_at <= self.now;
        if self.files.prepared().len() < 2 || !self.takes_too_much() || !may_try {
            return;
        }
        // More than what a reservation takes space for at the bound. Otherwise the file would be
        // created again.
        let least = self.files.delete_records() + self.headroom() / 4 + LAST_HEADROOM;
        let newest = self.files.prepared().next_back();
        if self.room() - newest.map_or(0, |newest| self.files.fresh_room(newest)) >= least {
            let _ = self.remove_newest();
        }
    }

    /// Removes the newest file, which must be a prepared one or, at the start, one without a record. If that
    /// fails, it is tried again later. A file that a power cut brings back has no record, so the directory need
    /// not be synced.
    fn remove_newest(&mut self) -> io::Result<()> {
        let number = self.files.last_number();
        if let Err(error) = self.disk.remove(number) {
            self.sync.retry_at = self.now + RETRY_PAUSE;
            debug!("cannot remove binlog.{number}: {error}; retrying in 60 s");
            return Err(error);
        }
        self.forget_file(self.files.list.len() - 1);
        Ok(())
    }

    /// Panics unless there is room for the deletes of all jobs.
    pub(super) fn check_space(&self) {
        let (room, records) = (self.room(), self.files.delete_records());
        assert!(
            room >= records || self.space.began_short,
            "there is room for {room} short records, but the deletes of all jobs need {records}"
        );
    }
}

/// Returns whether an error of the disk passes when space is freed or permission is given.
fn is_want_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, OutOfMemory, PermissionDenied, QuotaExceeded, StorageFull};
    matches!(
        error.kind(),
        StorageFull | QuotaExceeded | FileTooLarge | OutOfMemory | PermissionDenied
    )
}
