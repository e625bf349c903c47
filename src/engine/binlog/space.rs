//! Makes sure that records have space on the disk before they are made.
//!
//! Space is taken in whole files, ahead of need. For each live job there is room for one more short
//! record, that of its delete, so that a delete never fails. If its key is kept after the delete, there is
//! room for one more. In addition there is headroom: room for one or two whole files of records. When
//! the disk has no space for a whole file, the newest file takes what there is. Puts are refused when
//! the headroom falls to [`min_headroom`]. A quarter of that is for releases, buries and kicks, and the
//! rest for compaction, which frees space: it should hold the jobs of the oldest file.
//!
//! Room is counted in short records: how many more of them fit. A reservation that fails changes
//! nothing.

use super::NoSpace;
use super::disk::{FileNumber, LAST_NUMBER};
use super::files::{BLOCK, Files, HEAD, SHORT, is_want_of_space};
use super::refusal_log::RefusalLog;
use super::removal::{RETRY_PAUSE, Removal};
use super::writer::Writer;
use crate::engine::time::Nanos;
use log::{debug, warn};
use std::io;

/// The state of a full disk, and of prepared files.
#[derive(Debug, Default)]
pub struct Space {
    /// An attempt to take space failed in this iteration.
    has_failed_to_grow: bool,
    /// At least once since the start there was no space for a whole file.
    was_short: bool,
    /// At the start there was too little space for the deletes of all jobs.
    began_short: bool,
    /// The file for which there was no space last, and the error.
    full_error: Option<(FileNumber, io::Error)>,
    log: RefusalLog,
    /// The moment of the next attempt, after a prepared file could not be created or removed.
    retry_at: Nanos,
}

/// The space that a record needs.
#[derive(Clone, Copy, Debug)]
pub struct Reservation {
    /// Its length in bytes.
    len: u64,
    /// The number of short records, for the deletes of all jobs, for which there must be room behind it.
    delete_records: u64,
    /// The number of further short records that must fit when the disk has no more space.
    min_headroom: u64,
}

/// This many short records always fit, even on a full disk, so that the next start finds a block
/// for its first file. Each start takes one block more.
const LAST_HEADROOM: u64 = (BLOCK + HEAD).div_ceil(SHORT);

/// On a full disk the headroom is at least this share of the space that all files take.
const HEADROOM_SHARE: u64 = 32;
/// It is at least this many bytes, or all of the headroom if that is less.
const SMALL_HEADROOM: u64 = 32 * 1024;

/// If there is no space for a whole file, at least this share of one is taken at a time, and at
/// least [`MIN_PIECE`] bytes or, if that is less, a quarter of a file, so that a full disk does not have
/// many small files.
const MIN_PIECE_SHARE: u64 = 32;
const MIN_PIECE: u64 = 64 * 1024;

/// Space is freed when there was no job for this time.
const DRAINED_PAUSE: Nanos = Nanos::from_secs(1);

impl Reservation {
    /// Returns the space for a short record of a job that exists.
    pub fn update(files: &Files) -> Reservation {
        let delete_records = files.segments().delete_records();
        let min_headroom = min_headroom(files);
        Reservation { len: SHORT, delete_records, min_headroom: min_headroom - min_headroom / 4 }
    }

    /// Returns the space for a record of `len` bytes that may use the headroom of compaction: a moved
    /// record, that of a flush, or that of a hold.
    pub fn from_headroom(files: &Files, len: u64) -> Reservation {
        Reservation { len, delete_records: files.segments().delete_records(), min_headroom: 0 }
    }
}

impl Space {
    // ---- The first space ----

    /// Creates the first file of this start, and more for the deletes of all jobs. When there is
    /// too little space for that, the newest old file is continued if it is intact. So a start
    /// needs no more space than the server had when it ended. A limit that is lower than at an earlier start
    /// is exceeded, so that deletes work.
    pub fn begin(&mut self, writer: &mut Writer, removal: &mut Removal) -> io::Result<()> {
        let number = writer.files_mut().remove_unused()?;
        let records = writer.files().segments().delete_records();
        let mut may_reopen = true;
        while !writer.files().has_current() || writer.files().room() < records {
            let Err(error) = self.begin_piece(writer, number) else { continue };
            let now = writer.now();
            let files = writer.files_mut();
            if !is_want_of_space(&error) {
                return Err(error);
            }
            files.count_free();
            if std::mem::take(&mut may_reopen) {
                while files.has_current() {
                    files.remove_newest()?;
                }
                writer.drop_batch();
                self.reopen_newest(writer);
            } else if files.last_number() < LAST_NUMBER
                && files.closed_count() > 1
                && removal.next(files, now) == Some(0)
            {
                // The newest old file knows which ids were given out, and is kept. After the highest
                // number a removal would not help.
                removal.remove(files, 0, now);
            } else if files.exceeded_limit().is_some() && files.lift_limit(true) {
                // The next attempt fails only if the disk itself has no space.
            } else if !files.has_current() {
                return Err(error);
            } else {
                warn!(
                    "no space in binlog.{} for the deletes of all jobs: {error}; only {} of {records} \
                     records of deletes fit until there is",
                    files.last_number(),
                    files.room()
                );
                self.began_short = true;
                break;
            }
        }
        writer.files_mut().lift_limit(false);
        let files = writer.files();
        if let Some(limit) = files.exceeded_limit() {
            warn!(
                "the binlog takes {} bytes, more than --binlog-limit {limit}; refusing puts until it \
                 takes less",
                files.disk_bytes()
            );
        }
        writer.sync();
        Ok(())
    }

    /// Creates the first file, with this number, or takes more space after it.
    fn begin_piece(&mut self, writer: &mut Writer, number: FileNumber) -> io::Result<()> {
        let files = writer.files_mut();
        let whole = files.file_size();
        if files.has_current() {
            return self.try_pieces(whole, BLOCK, |piece| files.grow(piece));
        }
        self.try_pieces(whole, BLOCK, |piece| files.create(number, piece))?;
        writer.begin_file();
        Ok(())
    }

    /// Makes the newest old file the current one, if that is possible.
    fn reopen_newest(&mut self, writer: &mut Writer) {
        let files = writer.files_mut();
        let Some(nonce) = files.reopenable() else { return };
        let whole = files.file_size();
        let lengthened = self.try_pieces(whole, BLOCK, |piece| files.lengthen(piece));
        // The rest of its last block is always there.
        if lengthened.or_else(|_| files.lengthen(1)).is_ok() {
            writer.reopen(nonce);
        }
    }

    // ---- Reserving ----

    /// Reserves memory and space for a new job with a full record of `len` bytes, and for its delete,
    /// which takes `own_delete_records` short records.
    pub fn reserve_put(
        &mut self,
        writer: &mut Writer,
        removal: &mut Removal,
        len: u64,
        own_delete_records: u64,
    ) -> Result<(), NoSpace> {
        writer.files_mut().try_reserve_job()?;
        let files = writer.files();
        if refuses_all_puts(files) {
            return Err(NoSpace::Space);
        }
        let delete_records = files.segments().delete_records() + own_delete_records;
        let need = Reservation { len, delete_records, min_headroom: min_headroom(files) };
        let reserved = self.reserve(writer, removal, need);
        self.log_refusal(writer, reserved.is_ok());
        reserved
    }

    /// Reserves space for the records of a delete, and makes sure that the first one fits in the
    /// current file. The space exists since the put; only a server that was started on a full disk may
    /// lack it.
    pub fn reserve_delete(
        &mut self,
        writer: &mut Writer,
        removal: &mut Removal,
        records: u64,
    ) -> Result<(), NoSpace> {
        while writer.files().room() < records {
            if !self.prepare(writer, removal) {
                return Err(NoSpace::Space);
            }
        }
        self.ensure_fits(writer, SHORT)
    }

    /// Reserves space for a record.
    pub fn reserve(
        &mut self,
        writer: &mut Writer,
        removal: &mut Removal,
        need: Reservation,
    ) -> Result<(), NoSpace> {
        loop {
            let files = writer.files();
            let room = files.room_behind(need.len);
            let has =
                |headroom: u64| room.is_some_and(|room| room >= need.delete_records + headroom);
            // While old files are about to be removed, less headroom is better than more files.
            let quarter = headroom(files) / 4;
            let is_enough = has(headroom(files) + LAST_HEADROOM)
                || (is_at_bound(files) && has(quarter + LAST_HEADROOM.min(quarter) / 2));
            if !is_enough && self.prepare(writer, removal) {
                continue;
            }
            let fits = is_enough || has(need.min_headroom + LAST_HEADROOM);
            return if fits { self.ensure_fits(writer, need.len) } else { Err(NoSpace::Space) };
        }
    }

    /// Returns how many bytes of full records compaction could write, in the files that exist and in those for
    /// which there is space.
    pub fn most_to_move(&self, files: &mut Files) -> u64 {
        room_for_moves(files).saturating_add(files.measure_space())
    }

    /// Takes space until `live_bytes` of full records fit in newer files. Returns `false` if they cannot.
    pub fn make_room_for(
        &mut self,
        writer: &mut Writer,
        removal: &mut Removal,
        live_bytes: u64,
    ) -> bool {
        while room_for_moves(writer.files()) < live_bytes {
            if !self.prepare(writer, removal) {
                return false;
            }
        }
        true
    }

    /// Makes sure that the next record, of `len` bytes, fits in the current file.
    fn ensure_fits(&mut self, writer: &mut Writer, len: u64) -> Result<(), NoSpace> {
        if len > writer.files().current().left() && len > writer.files().whole_len() {
            return writer.files_mut().lengthen_for(len).map_err(|error| {
                let number = writer.files().current().number;
                self.note_full(writer.files_mut(), number, error);
                NoSpace::Space
            });
        }
        while writer.files().current().left() < len {
            writer.advance();
        }
        Ok(())
    }

    // ---- Taking space ----

    /// Takes space ahead of need. Returns `false` when there is none.
    fn prepare(&mut self, writer: &mut Writer, removal: &mut Removal) -> bool {
        if self.has_failed_to_grow || writer.files().disk().has_failed() {
            return false;
        }
        let now = writer.now();
        let mut grown = self.prepare_piece(writer.files_mut());
        if grown.is_err() && removal.next(writer.files(), now).is_some() {
            removal.remove_some(writer, false, now);
            grown = self.prepare_piece(writer.files_mut());
        }
        let files = writer.files_mut();
        match grown {
            Ok(()) => {
                files.set_full(false);
                true
            }
            Err(error) => {
                self.has_failed_to_grow = true;
                self.note_full(files, files.last_number() + 1, error);
                false
            }
        }
    }

    /// Takes a whole file, or the largest piece for which there is space.
    fn prepare_piece(&mut self, files: &mut Files) -> io::Result<()> {
        let least = self.min_piece(files);
        // A disk that was full a moment ago probably still is.
        let first = if files.is_full() { least } else { files.file_size() };
        self.try_pieces(first, least, |piece| files.grow(piece))
    }

    /// Calls `take` with ever smaller sizes until there is space for one.
    fn try_pieces(
        &mut self,
        first: u64,
        least: u64,
        mut take: impl FnMut(u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut piece = first;
        loop {
            match take(piece) {
                Err(error) if piece > least && is_want_of_space(&error) => {
                    self.was_short = true;
                    piece = (piece / 2).next_multiple_of(BLOCK).max(least);
                }
                done => return done,
            }
        }
    }

    /// Returns the size of the smallest piece that is taken.
    fn min_piece(&self, files: &Files) -> u64 {
        if self.began_short {
            return BLOCK;
        }
        let whole = files.file_size();
        let piece = (whole / MIN_PIECE_SHARE).max(MIN_PIECE.min(whole / 4));
        piece.next_multiple_of(BLOCK).min(whole)
    }

    /// Notes that a file could not be created or lengthened. Unless that is for want of space, the
    /// disk fails.
    fn note_full(&mut self, files: &mut Files, number: FileNumber, error: io::Error) {
        if !is_want_of_space(&error) {
            let what = || format!("cannot create or lengthen binlog.{number}");
            return files.disk_mut().latch_error(Err(error), what);
        }
        files.set_full(true);
        self.full_error = Some((number, error));
    }

    /// Logs that puts are refused for want of space, or accepted again.
    fn log_refusal(&mut self, writer: &Writer, is_accepted: bool) {
        if is_accepted {
            if self.log.accepted(writer.now()) {
                warn!("there is space again: accepting puts");
            }
            return;
        }
        let Some((number, error)) = &self.full_error else { return };
        if writer.files().disk().has_failed() {
            return;
        }
        if let Some(earlier) = self.log.refused(writer.now()) {
            let times = if earlier == 0 {
                String::new()
            } else {
                format!(" (as {earlier} times since this was last logged)")
            };
            warn!("no space for binlog.{number}: {error}; refusing puts until there is{times}");
        }
    }

    /// Returns whether puts are refused for want of space.
    pub fn is_full(&self, files: &Files) -> bool {
        refuses_all_puts(files) || (files.is_full() && self.log.is_refusing())
    }

    // ---- Freeing space ----

    /// Begins an iteration: space may be there again.
    pub fn begin_iteration(&mut self) {
        self.has_failed_to_grow = false;
    }

    /// Returns when [`Space::rewind`] is due. There must have been no job for a while, or the next
    /// job would need again what was freed.
    pub fn drained_due(&self, writer: &Writer) -> Option<Nanos> {
        let files = writer.files();
        let is_too_much = files.prepared().len() > 0 || self.is_worn(files);
        let is_drained = files.segments().job_count() == 0 && is_too_much;
        is_drained.then(|| self.retry_at.max(writer.recorded_at() + DRAINED_PAUSE))
    }

    /// Frees the space of all files but one, which is nearly empty. There must be no job.
    pub fn rewind(&mut self, writer: &mut Writer) {
        if self.is_worn(writer.files()) {
            if let Err(error) = self.prepare_next(writer.files_mut()) {
                let files = writer.files_mut();
                self.note_full(files, files.last_number() + 1, error);
                self.retry_at = writer.now() + RETRY_PAUSE;
                return;
            }
            writer.advance();
        }
        self.remove_all_prepared(writer);
    }

    fn prepare_next(&mut self, files: &mut Files) -> io::Result<()> {
        if files.prepared().len() > 0 {
            return Ok(());
        }
        let (first, least) = (files.file_size(), self.min_piece(files));
        self.try_pieces(first, least, |piece| files.create(files.last_number() + 1, piece))
    }

    /// Returns whether a drained binlog needs another file: half of the current one is used, or an
    /// eighth on a disk that once had no space for a whole one.
    fn is_worn(&self, files: &Files) -> bool {
        let part = if self.was_short { 8 } else { 2 };
        files.current().used > files.file_size() / part
    }

    /// Removes all prepared files.
    pub fn remove_all_prepared(&mut self, writer: &mut Writer) {
        while writer.files().prepared().len() > 0 && self.remove_prepared(writer) {}
    }

    /// Removes a prepared file if there are several and the rest has enough room. When most live
    /// records are gone, fewer prepared files suffice.
    pub fn remove_excess(&mut self, writer: &mut Writer) {
        let files = writer.files();
        let may_try = !files.disk().has_failed() && self.retry_at <= writer.now();
        if files.prepared().len() < 2 || !files.takes_too_much() || !may_try {
            return;
        }
        // More than what a reservation takes space for at the bound. Otherwise the file would be
        // created again.
        let least = files.segments().delete_records() + headroom(files) / 4 + LAST_HEADROOM;
        if files.room() - files.prepared().next_back().map_or(0, |last| files.fresh_room(last))
            >= least
        {
            self.remove_prepared(writer);
        }
    }

    /// Removes the newest prepared file. Returns `false` if that failed; it is tried again later.
    fn remove_prepared(&mut self, writer: &mut Writer) -> bool {
        let number = writer.files().last_number();
        let removed = writer.files_mut().remove_newest();
        if let Err(error) = &removed {
            self.retry_at = writer.now() + RETRY_PAUSE;
            debug!("cannot remove binlog.{number}: {error}; retrying in 60 s");
        }
        removed.is_ok()
    }

    /// Panics unless there is room for the deletes of all jobs.
    pub fn check(&self, files: &Files) {
        let (room, records) = (files.room(), files.segments().delete_records());
        assert!(
            room >= records || self.began_short,
            "there is room for {room} short records, but the deletes of all jobs need {records}"
        );
    }
}

/// Returns for how many short records there should be room in addition to the deletes of all
/// jobs: a whole file, and up to one more if there are many jobs ([`Files::more_headroom`]).
fn headroom(files: &Files) -> u64 {
    (files.whole_len() + files.more_headroom()) / SHORT
}

/// Returns the headroom at which puts are refused when there is no space for a whole file. On a
/// small disk it is smaller, because such a disk could otherwise take few jobs or none.
fn min_headroom(files: &Files) -> u64 {
    let bytes = (files.disk_bytes() / HEADROOM_SHARE).max(SMALL_HEADROOM);
    headroom(files).min(bytes / SHORT)
}

/// Returns whether no put has space, however short it is: it would exceed a limit, or the disk refuses it.
fn refuses_all_puts(files: &Files) -> bool {
    files.disk().refuses_puts() || files.exceeded_limit().is_some()
}

/// Returns whether one more file would exceed the bound on all files, on a disk that is not full.
fn is_at_bound(files: &Files) -> bool {
    !files.is_full() && files.disk_bytes() + files.file_size() > files.bound()
}

/// Returns how many bytes of records compaction can write to the files that exist.
fn room_for_moves(files: &Files) -> u64 {
    files.room().saturating_sub(files.segments().delete_records() + LAST_HEADROOM) * SHORT
}
