//! A chapter of the binlog: room for records, and the files that have it.
//!
//! Space is taken in whole segments, ahead of need. For every live job there is room for one
//! more short record, that of its delete. Beyond that a whole segment is prepared. When there is no
//! space for a whole one, the newest segment takes what there is. Puts are refused when the
//! headroom falls to `Binlog::least_spare`: half of that is for releases, buries and kicks,
//! and the rest for moves out of old segments, which free space.
//!
//! Room is counted in short records: how many more of them would fit. It is made before a record
//! is, and whoever asks for it in vain has changed nothing.

use super::disk::{FileNumber, LAST_NUMBER};
use super::record::{VERSION, VERSION_LEN};
use super::segments::Segment;
use super::{BLOCK, Binlog, Counters, HEAD, NoSpace, SHORT, on_disk};
use crate::engine::time::Nanos;
use log::{debug, warn};
use std::io;

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

/// On a full disk there remains room for so many short records, whatever happens, so that a
/// server that is started there finds a block for its first file. Each start takes one more.
const LAST_SPARE: u64 = (BLOCK + HEAD).div_ceil(SHORT);

/// On a full disk the headroom is at least this share of the space that all files take.
const SPARE_SHARE: u64 = 32;
/// It is at least this many bytes, so that small files keep a whole file of headroom.
const SMALL_SPARE: u64 = 32 * 1024;

/// If there is no space for a whole file, at least this share of one is taken at a time, and at least
/// [`LEAST_PIECE`] bytes, so that a full disk does not have many small files.
const LEAST_PIECE_SHARE: u64 = 32;
const LEAST_PIECE: u64 = 64 * 1024;

/// How long no job must have been there before space is given up.
const DRAINED_PAUSE: Nanos = Nanos::from_secs(1);

/// More files than that are not removed in one turn; it takes a few milliseconds.
const REMOVALS_PER_TURN: usize = 2;
const SMALL_REMOVALS_PER_TURN: usize = 16;
const SMALL_FILE: u32 = 1024 * 1024;
/// How long to wait when one cannot be.
const REMOVE_AGAIN: Nanos = Nanos::from_secs(60);

/// More files than that are not kept open to be synced later.
pub(super) const UNSYNCED_FILES: usize = 2;

impl Binlog {
    // ---- The first space ----

    /// Makes the first new segment and what else is needed for the deletes of all jobs. When there
    /// is too little space for that, the newest old segment is continued if it is sound: a start
    /// then needs no more space than the server had when it ended.
    pub(super) fn set_first_space_aside(&mut self) -> io::Result<()> {
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
        self.current = self.segments.len();
        self.sums.closed_bytes = self.sums.disk_bytes;
        let jobs = self.segments.job_count();
        let mut may_continue = true;
        while !self.has_current() || self.room() < jobs {
            match self.take_first_piece(number) {
                Ok(()) => {}
                Err(error) if !is_want_of_space(&error) => return Err(error),
                Err(_) if std::mem::take(&mut may_continue) => {
                    self.remove_first_pieces()?;
                    self.continue_newest();
                }
                // The newest of the old ones knows which ids were given out, and no other does yet.
                Err(_) if self.current > 1 && self.can_remove() => self.remove_one(),
                Err(error) if !self.has_current() => return Err(error),
                Err(error) => {
                    let (room, number) = (self.room(), self.last_number());
                    warn!(
                        "binlog.{number}: no space for the deletes of all jobs: {error}; only \
                         {room} of {jobs} can be deleted until there is"
                    );
                    self.began_short = true;
                    break;
                }
            }
        }
        self.write_batch();
        self.sync_if_wanted();
        Ok(())
    }

    fn has_current(&self) -> bool {
        self.current < self.segments.len()
    }

    /// Makes the first new segment, with this number; after that, takes more space.
    fn take_first_piece(&mut self, number: FileNumber) -> io::Result<()> {
        let whole = self.file_size();
        if self.has_current() {
            return self.try_pieces(whole, BLOCK, Binlog::take_piece);
        }
        self.try_pieces(whole, BLOCK, |binlog, piece| binlog.grow(number, piece))?;
        self.sums.room_ahead -= fresh_room(&self.segments[self.current]);
        // Ids go on from there, even if all older files go next.
        self.write_marker();
        Ok(())
    }

    /// Removes the new segments, of which nothing has been written but the version.
    fn remove_first_pieces(&mut self) -> io::Result<()> {
        self.batch.clear();
        while self.has_current() {
            self.disk.remove(self.last_number())?;
            let segment = self.segments.pop_newest();
            self.sums.disk_bytes -= on_disk(segment.size);
        }
        self.sums.room_ahead = 0;
        Ok(())
    }

    /// Makes the newest old segment the current one, unless it is not sound, was not made by this
    /// server, is as long as a whole one, or cannot be lengthened. Nothing is behind its last
    /// record: it was cut there and synced.
    fn continue_newest(&mut self) {
        let Some(&Segment { nonce: Some(nonce), size, used, is_damaged: false, .. }) =
            self.segments.newest()
        else {
            return;
        };
        if used != size || !self.can_lengthen() {
            return;
        }
        self.current -= 1;
        let lengthened = self.try_pieces(self.file_size(), BLOCK, Binlog::lengthen);
        // The rest of its last block is always there.
        if lengthened.or_else(|_| self.lengthen(1)).is_err() {
            self.current += 1;
            return;
        }
        self.sums.closed_bytes -= on_disk(size);
        self.nonce = nonce;
    }

    // ---- Checking ----

    /// What the files take and what room they have is what was counted as they came and went, and
    /// there is room for the deletes of all jobs.
    pub(super) fn check_space(&self) {
        let Counters { disk_bytes, closed_bytes, room_ahead, .. } = self.sums;
        let on_disk = |from: usize, to: usize| -> u64 {
            let some = self.segments.iter().take(to).skip(from);
            some.map(|segment| on_disk(segment.size)).sum()
        };
        let (current, len) = (self.current, self.segments.len());
        assert!(current < len, "the current file should be that at {current} of {len}");
        assert!(self.leaving <= current, "{} files leave, of {current} closed ones", self.leaving);
        assert_eq!(disk_bytes, on_disk(0, len), "bytes of all files, noted and counted");
        assert_eq!(closed_bytes, on_disk(0, current), "bytes of closed files, noted and counted");
        let leaving = on_disk(0, self.leaving);
        assert_eq!(self.leaving_bytes, leaving, "bytes of files that leave, noted and counted");
        for segment in self.segments.iter().take(self.leaving) {
            assert!(segment.is_empty(), "binlog.{} leaves with jobs", segment.number);
        }
        let ahead = self.segments.iter().skip(current + 1);
        let room = ahead.clone().map(fresh_room).sum::<u64>();
        assert_eq!(
            room_ahead, room,
            "short records with room in prepared files, noted and counted"
        );
        for (number, segment) in (self.current_number() + 1..).zip(ahead) {
            assert_eq!(
                segment.number, number,
                "the number of a prepared file, and what it should be"
            );
            assert!(
                is_unused(segment) && segment.is_empty(),
                "binlog.{number} is only prepared, but {} bytes of it are used",
                segment.used
            );
        }
        let Segment { number, used, is_damaged, .. } = self.segments[current];
        assert!(used >= HEAD && !is_damaged, "binlog.{number} is the current file without a head");
        let (room, jobs) = (self.room(), self.segments.job_count());
        assert!(
            room >= jobs || self.began_short,
            "there is room for {room} short records, but {jobs} jobs are to be deleted some day"
        );
    }

    // ---- Making room ----

    /// Sees to it that there is memory and space for a new job with a full record of `len`
    /// bytes, for its delete, and for a spare.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn reserve_put(&mut self, len: usize) -> Result<(), NoSpace> {
        self.segments.try_reserve_one()?;
        let deletes = self.segments.job_count() + 1;
        let made =
            self.make_room(Need { len: len as u64, deletes, least_spare: self.least_spare() });
        self.log_space(made.is_ok());
        made
    }

    /// Sees to it that there is space for one more short record.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn reserve_update(&mut self) -> Result<(), NoSpace> {
        let deletes = self.segments.job_count();
        self.make_room(Need { len: SHORT, deletes, least_spare: self.least_spare() / 2 })
    }

    /// Sees to it that there is space for a full record of `len` bytes that is there already, in
    /// an older segment.
    pub(super) fn reserve_move(&mut self, len: u64) -> Result<(), NoSpace> {
        let deletes = self.segments.job_count();
        self.make_room(Need { len, deletes, least_spare: 0 })
    }

    /// How many bytes there are for moves when no more space is to be had.
    pub(super) fn free_bytes(&self) -> u64 {
        self.room().saturating_sub(self.segments.job_count() + LAST_SPARE) * SHORT
    }

    /// Sees to it that there is space for the record of a delete. It was set aside when the job
    /// was put; only a server that was started on a full disk may lack it.
    ///
    /// # Errors
    /// There is not; nothing has happened.
    pub fn reserve_delete(&mut self) -> Result<(), NoSpace> {
        if self.room() == 0 && !self.prepare() {
            return Err(NoSpace::Space);
        }
        self.take_place(SHORT)
    }

    fn make_room(&mut self, need: Need) -> Result<(), NoSpace> {
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
                return if is_enough { self.take_place(need.len) } else { Err(NoSpace::Space) };
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
    fn take_place(&mut self, len: u64) -> Result<(), NoSpace> {
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
            return Err(NoSpace::Space);
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
                Err(NoSpace::Space)
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

    /// The same when there is no space for a whole file: less on a small disk, which could
    /// otherwise take few jobs or none.
    fn least_spare(&self) -> u64 {
        let bytes = (self.sums.disk_bytes / SPARE_SHARE).max(SMALL_SPARE);
        self.spare().min(bytes / SHORT)
    }

    /// Whether one more file would be too much.
    fn is_at_limit(&self) -> bool {
        !self.is_full && self.sums.disk_bytes > 3 * self.segments.live_bytes() + self.file_size()
    }

    // ---- Making files ----

    /// Makes room ahead of need: a new segment, or a longer newest one. `false` when there is no
    /// space.
    fn prepare(&mut self) -> bool {
        if self.has_failed_to_grow || self.failure.is_some() {
            return false;
        }
        let mut grown = self.prepare_piece();
        if grown.is_err() && self.can_remove() {
            self.write_batch();
            self.sync_if_wanted();
            self.remove_oldest();
            grown = self.prepare_piece();
        }
        match grown {
            Ok(()) => {
                self.is_full = false;
                true
            }
            Err(error) => {
                self.has_failed_to_grow = true;
                self.note_full(self.last_number() + 1, error);
                false
            }
        }
    }

    /// Makes a whole segment, or takes the largest piece for which there is space.
    fn prepare_piece(&mut self) -> io::Result<()> {
        let least = self.least_piece();
        // A disk that was full a moment ago probably still is.
        let first = if self.is_full { least } else { self.file_size() };
        self.try_pieces(first, least, Binlog::take_piece)
    }

    /// Lengthens the newest segment or makes a new one, by `piece` bytes.
    fn take_piece(&mut self, piece: u64) -> io::Result<()> {
        if self.can_lengthen() {
            self.lengthen(piece)
        } else {
            self.grow(self.last_number() + 1, piece)
        }
    }

    /// Calls `take` with ever smaller sizes until there is space for one.
    fn try_pieces(
        &mut self,
        first: u64,
        least: u64,
        mut take: impl FnMut(&mut Binlog, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut piece = first;
        loop {
            match take(self, piece) {
                Err(error) if piece > least && is_want_of_space(&error) => {
                    self.was_short = true;
                    piece = (piece / 2).next_multiple_of(BLOCK).max(least);
                }
                done => return done,
            }
        }
    }

    /// The size of the smallest piece that is taken.
    fn least_piece(&self) -> u64 {
        if self.began_short {
            return BLOCK;
        }
        let share = (self.file_size() / LEAST_PIECE_SHARE).next_multiple_of(BLOCK);
        share.max(LEAST_PIECE).min(self.file_size())
    }

    /// A file could not be made or lengthened. If that is not for want of space, the disk fails.
    fn note_full(&mut self, number: FileNumber, error: io::Error) {
        if !is_want_of_space(&error) {
            return self.latch_error(Err(error), || format!("binlog.{number}: cannot make it"));
        }
        self.is_full = true;
        self.full_error = Some((number, error));
    }

    /// Logs that puts are refused for want of space, or accepted again.
    fn log_space(&mut self, is_accepted: bool) {
        if is_accepted {
            if self.space_log.accepted(self.iteration_at) {
                warn!("there is space for the binlog again: puts are accepted");
            }
            return;
        }
        let Some((number, error)) = &self.full_error else { return };
        if self.failure.is_some() {
            return;
        }
        if let Some(earlier) = self.space_log.refused(self.iteration_at) {
            let times = if earlier == 0 {
                String::new()
            } else {
                format!(" (as {earlier} times since this was last logged)")
            };
            warn!("binlog.{number}: no space: {error}; refusing puts until there is{times}");
        }
    }

    /// Returns whether the newest segment is shorter than a whole one.
    fn can_lengthen(&self) -> bool {
        self.segments.newest().is_some_and(|newest| newest.size < self.file_size())
    }

    /// Lengthens the newest segment, which is the current one or a prepared one, by up to `piece`
    /// bytes, though not beyond the size of a whole one.
    fn lengthen(&mut self, piece: u64) -> io::Result<()> {
        let place = self.segments.len() - 1;
        let is_prepared = place > self.current;
        let Segment { number, size: old, .. } = self.segments[place];
        let new = (old + piece).next_multiple_of(BLOCK).min(self.file_size());
        let extended = self.disk.extend(number, new);
        if is_prepared {
            self.disk.close(number);
        }
        extended?;
        let room_before = fresh_room(&self.segments[place]);
        self.segments[place].size = new;
        self.sums.disk_bytes += on_disk(new) - on_disk(old);
        if is_prepared {
            self.sums.room_ahead += fresh_room(&self.segments[place]) - room_before;
        }
        debug!("binlog.{number}: lengthened from {old} to {new} bytes");
        Ok(())
    }

    fn grow(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        if self.failure.is_some() || number > LAST_NUMBER {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "no file can be made any more"));
        }
        self.segments.try_reserve_file().map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.disk.create(number, size)?;
        let written = self.disk.write(number, 0, &VERSION);
        self.latch_error(written, || format!("binlog.{number}: cannot write it"));
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
        self.truncate_segment(self.current);
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

    /// Cuts a segment to its used length. Without space or permission for that the file stays longer,
    /// which does no harm; any other error means that the disk fails.
    pub(super) fn truncate_segment(&mut self, place: usize) {
        let Segment { number, size, used, is_damaged, .. } = self.segments[place];
        if size == used || is_damaged || self.failure.is_some() {
            return;
        }
        match self.disk.cut(number, used) {
            Ok(()) => {}
            Err(error) if is_want_of_space(&error) => {
                return debug!("binlog.{number}: cannot be cut to {used} bytes: {error}");
            }
            Err(error) => {
                return self.latch_error(Err(error), || format!("binlog.{number}: cannot cut it"));
            }
        }
        self.segments[place].size = used;
        self.sums.disk_bytes -= on_disk(size) - on_disk(used);
    }

    // ---- Giving space up ----

    /// No job is left: one file with next to nothing in it will do.
    pub(super) fn rewind(&mut self) {
        if self.is_worn() {
            let has_next = self.current + 1 < self.segments.len();
            let made = if has_next { Ok(()) } else { self.make_next() };
            if let Err(error) = made {
                self.note_full(self.last_number() + 1, error);
                self.drop_again_at = self.iteration_at + REMOVE_AGAIN;
                return;
            }
            self.advance();
        }
        self.drop_prepared();
    }

    /// When it is time for that: not before it has been so for a while, or the next job would
    /// only need again what was given up.
    pub(super) fn drained_due(&self) -> Option<Nanos> {
        let is_too_much = self.current + 1 < self.segments.len() || self.is_worn();
        let is_drained = self.segments.job_count() == 0 && is_too_much;
        is_drained.then(|| self.drop_again_at.max(self.recorded_at + DRAINED_PAUSE))
    }

    fn make_next(&mut self) -> io::Result<()> {
        let (first, least) = (self.file_size(), self.least_piece());
        self.try_pieces(first, least, |binlog, piece| binlog.grow(binlog.last_number() + 1, piece))
    }

    /// Returns whether the current segment should be replaced: when half of a file is used, or an
    /// eighth on a disk that once had no space for a whole one.
    fn is_worn(&self) -> bool {
        let part = if self.was_short { 8 } else { 2 };
        self.segments[self.current].used > self.file_size() / part
    }

    pub(super) fn drop_prepared(&mut self) {
        while self.current + 1 < self.segments.len() && self.remove_prepared() {}
    }

    /// When most of what was live is gone, fewer files than are prepared will do.
    pub(super) fn drop_one_too_many(&mut self) {
        let prepared = self.segments.iter().skip(self.current + 1);
        let may_try = self.failure.is_none() && self.drop_again_at <= self.iteration_at;
        if prepared.len() < 2 || !self.takes_too_much() || !may_try {
            return;
        }
        // More than what room is made for at the limit, or the file would be made again.
        let least = self.segments.job_count() + self.spare() / 4 + LAST_SPARE;
        if self.room() - prepared.last().map_or(0, fresh_room) >= least {
            self.remove_prepared();
        }
    }

    /// Removes a prepared file. `false` if it stays, and is to be tried again later. Should a power
    /// cut bring it back, there is nothing in it: the directory need not be synced.
    fn remove_prepared(&mut self) -> bool {
        let number = self.last_number();
        if let Err(error) = self.disk.remove(number) {
            self.drop_again_at = self.iteration_at + REMOVE_AGAIN;
            debug!("binlog.{number}: cannot be removed: {error}");
            return false;
        }
        let segment = self.segments.pop_newest();
        self.is_full = false;
        self.sums.disk_bytes -= on_disk(segment.size);
        self.sums.room_ahead -= fresh_room(&segment);
        true
    }

    /// Whether a segment can be removed.
    pub(super) fn has_removable(&self) -> bool {
        self.current > 0 && self.segments[0].is_empty()
    }

    pub(super) fn can_remove(&self) -> bool {
        self.has_removable() && self.remove_again_at <= self.iteration_at && self.failure.is_none()
    }

    /// A segment that is not the current one never gets another job.
    pub(super) fn count_removable(&mut self) {
        while self.leaving < self.current && self.segments[self.leaving].is_empty() {
            self.leaving_bytes += on_disk(self.segments[self.leaving].size);
            self.leaving += 1;
        }
    }

    /// Removes the oldest segments as far as no job belongs to them, but no more at once than
    /// others can wait for.
    pub(super) fn remove_oldest(&mut self) {
        let is_small = self.policy.file_size <= SMALL_FILE;
        for _ in 0..if is_small { SMALL_REMOVALS_PER_TURN } else { REMOVALS_PER_TURN } {
            if !self.can_remove() {
                return;
            }
            self.remove_one();
        }
    }

    pub(super) fn remove_one(&mut self) {
        self.count_removable();
        let Segment { number, size, is_damaged, .. } = self.segments[0];
        let removed = if is_damaged {
            let name = self.disk.quarantine(number);
            name.map(|name| warn!("binlog.{number}: set aside as {name}"))
        } else {
            self.disk.remove(number)
        };
        if let Err(error) = removed {
            // No newer one may go before it.
            self.remove_again_at = self.iteration_at + REMOVE_AGAIN;
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
}

/// How many short records there is room for in a segment that is only prepared.
fn fresh_room(segment: &Segment) -> u64 {
    (segment.size - HEAD) / SHORT
}

fn is_unused(segment: &Segment) -> bool {
    segment.used <= VERSION_LEN as u64 && !segment.is_damaged
}

/// Returns whether an error of the disk passes when space is freed or permission is given.
fn is_want_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, OutOfMemory, PermissionDenied, QuotaExceeded, StorageFull};
    matches!(
        error.kind(),
        StorageFull | QuotaExceeded | FileTooLarge | OutOfMemory | PermissionDenied
    )
}

/// Limits the log lines about a full disk, on which puts may be refused and accepted thousands of
/// times a second, to one of each kind a minute.
#[derive(Debug, Default)]
pub(super) struct SpaceLog {
    /// The last put was refused.
    pub(super) is_refusing: bool,
    /// The last logged line is that puts are refused.
    is_refusal_logged: bool,
    /// How many times the server began to refuse puts since it last logged that.
    unlogged: u64,
    next_refusal_at: Nanos,
    next_recovery_at: Nanos,
}

impl SpaceLog {
    const PAUSE: Nanos = Nanos::from_secs(60);

    /// Counts a put that is refused. If that is to be logged, returns how many earlier times it
    /// was not.
    fn refused(&mut self, now: Nanos) -> Option<u64> {
        if !std::mem::replace(&mut self.is_refusing, true) {
            self.unlogged += 1;
        }
        if self.is_refusal_logged || now < self.next_refusal_at {
            return None;
        }
        self.is_refusal_logged = true;
        self.next_refusal_at = now + SpaceLog::PAUSE;
        Some(std::mem::take(&mut self.unlogged).saturating_sub(1))
    }

    /// Notes a put that is accepted. Returns whether to log that puts are accepted again.
    fn accepted(&mut self, now: Nanos) -> bool {
        self.is_refusing = false;
        if !self.is_refusal_logged || now < self.next_recovery_at {
            return false;
        }
        self.is_refusal_logged = false;
        self.next_recovery_at = now + SpaceLog::PAUSE;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_logged_once_a_minute() {
        let mut log = SpaceLog::default();
        let mut lines = Vec::new();
        // Refused and accepted in turn, every millisecond for two minutes and a half.
        for millis in 0..150_000 {
            let now = Nanos::from_millis(millis);
            if let Some(earlier) = log.refused(now) {
                lines.push((millis, Some(earlier)));
            }
            if log.accepted(now) {
                lines.push((millis, None));
            }
        }
        assert_eq!(
            lines,
            [
                (0, Some(0)),
                (0, None),
                (60_000, Some(59_999)),
                (60_000, None),
                (120_000, Some(59_999)),
                (120_000, None)
            ]
        );
    }

    #[test]
    fn a_disk_that_stays_full_is_logged_at_last() {
        let mut log = SpaceLog::default();
        assert_eq!(log.refused(Nanos::ZERO), Some(0));
        assert!(log.accepted(Nanos::ONE));
        for secs in 1..60 {
            assert_eq!(log.refused(Nanos::from_secs(secs)), None);
        }
        assert_eq!(log.refused(Nanos::from_secs(60)), Some(0));
        assert_eq!(log.refused(Nanos::from_secs(600)), None);
        assert!(log.accepted(Nanos::from_secs(700)));
    }
}
