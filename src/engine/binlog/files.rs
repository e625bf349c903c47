//! The files of a binlog: how many bytes each takes and has free, which of them is written, and the size of
//! the next one.
//!
//! ```text
//!     closed          free      closed       current           prepared
//!   [jobs and garbage] [garbage] [jobs] [records | space] [space] [space]
//!   oldest                                                        newest
//! ```
//!
//! Only the current file is written. Files newer than it are prepared: they have a version and
//! no record. Older ones are closed. One of them is free when it has no jobs, and supersedes no record of an
//! older file that is needed: then it can be removed. If older files are left, the gap in the numbers must
//! be recorded before.
//!
//! This module keeps the sums of bytes equal to those of the files. The modules `space` and
//! `removal` decide when a file is created or removed.

use super::Policy;
use super::disk::{FileNumber, LAST_NUMBER};
use super::fail_stop::FailStopDisk;
use super::gaps::{Gap, Gaps};
use super::record::{FILE_HEAD_LEN, SHORT_LEN, VERSION_LEN};
use super::segments::{Entry, Segment, Segments};
use crate::engine::keys::{JobKey, KeptKey, LogKey};
use crate::engine::limits::Limits;
use crate::engine::time::Nanos;
use log::{debug, warn};
use std::collections::TryReserveError;
use std::io;

/// The length of a short record in bytes.
pub const SHORT: u64 = SHORT_LEN as u64;
/// The length of the version and the file header record in bytes.
pub const HEAD: u64 = FILE_HEAD_LEN as u64;
/// The disk gives space to files in blocks of this many bytes.
pub const BLOCK: u64 = 4096;

/// The size of a file is halved until this many files fit in the space that the binlog can use.
const MIN_FILES: u64 = 64;
/// At most this many gaps, so that their records are a small part of a file.
const MOST_GAPS: usize = 32;
/// At most this many files are looked at to compare runs.
const MOST_IN_RUN: usize = 16;
/// Files are removed before older ones only if all numbers are within this range: C beanstalkd logs each
/// missing file.
const MOST_NUMBERS: FileNumber = 1000;
/// More than a full record has besides the body: fields, the name of the tube, and the record of its key.
const MAX_RECORD_HEAD: u64 = BLOCK;

/// The files of a binlog.
#[derive(Debug)]
pub struct Files {
    disk: FailStopDisk,
    segments: Segments,
    /// The index of the current file; at the start, before there is one, the number of files.
    current: usize,
    /// The number of files known to be free, and the bytes that they take on the disk.
    free: usize,
    free_bytes: u64,
    /// The files that were removed before older ones, and those that soon will be.
    gaps: Gaps,
    /// How many syncs of all records were begun, and the number of the last one that has ended.
    syncs_begun: u64,
    syncs_ended: u64,
    /// The size of a whole file in bytes: that of the next file that is created, unless there is too little
    /// space.
    file_size: u64,
    /// The size that `-s` sets, and the least one to which it is halved on a small disk.
    max_file_size: u64,
    min_file_size: u64,
    /// The most bytes that all files may take.
    max_bytes: u64,
    limits: Limits,
    /// At the start, files may take more than that.
    is_limit_lifted: bool,
    /// The bytes that all files together could take when the disk was measured last.
    capacity: u64,
    /// The bytes that all files take on the disk.
    disk_bytes: u64,
    /// The bytes that closed files take on the disk.
    closed_bytes: u64,
    /// The bytes of records in closed files that are not known to be free.
    kept_records: u64,
    /// The number of short records that fit in the prepared files.
    prepared_room: u64,
    /// The last attempt to take space failed, and no file was removed since.
    is_full: bool,
}

impl Files {
    /// Returns the files that replay has read, each truncated to its records and synced. None of
    /// them is the current one yet.
    pub fn open(disk: FailStopDisk, segments: Segments, gaps: Gaps, policy: Policy) -> Files {
        let mut files = Files {
            disk,
            segments,
            current: 0,
            free: 0,
            free_bytes: 0,
            gaps,
            syncs_begun: 1,
            syncs_ended: 1,
            file_size: policy.file_size.into(),
            max_file_size: policy.file_size.into(),
            min_file_size: u64::from(policy.max_body_len) + MAX_RECORD_HEAD,
            max_bytes: policy.max_bytes,
            limits: policy.limits,
            is_limit_lifted: false,
            capacity: policy.max_bytes,
            disk_bytes: 0,
            closed_bytes: 0,
            kept_records: 0,
            prepared_room: 0,
            is_full: false,
        };
        for index in 0..files.segments.len() {
            files.disk_bytes += on_disk(files.segments[index].size);
            files.truncate(index);
            let number = files.segments[index].number;
            // The server that wrote it may have ended before its last sync.
            files.disk.sync(number);
            files.disk.raw().close(number);
        }
        files.gaps.forget_before(files.oldest_number());
        files.current = files.segments.len();
        files.closed_bytes = files.disk_bytes;
        files.kept_records = files.segments.iter().map(records_len).sum();
        files.choose_file_size();
        files
    }

    /// Returns the bounds of steps and iterations.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Measures the disk. Returns how many bytes more all files can take.
    pub fn measure_space(&mut self) -> u64 {
        let free = self.disk.raw().free_bytes().unwrap_or(u64::MAX);
        self.capacity = self.disk_bytes.saturating_add(free).min(self.max_bytes);
        self.capacity.saturating_sub(self.disk_bytes)
    }

    /// Chooses the size of the next files. When the disk becomes full, a file with jobs can be removed only
    /// after its jobs were copied, so it should be a small part of the disk.
    fn choose_file_size(&mut self) {
        self.measure_space();
        // By halves, so that it does not change with every block that other programs write.
        let mut size = self.max_file_size;
        while size > self.capacity / MIN_FILES && size / 2 >= self.min_file_size {
            size /= 2;
        }
        self.file_size = size.next_multiple_of(BLOCK).min(self.max_file_size);
    }

    /// Removes the newest files as long as they have no record, to use their space again. Returns
    /// the number of the next file.
    pub fn remove_unused(&mut self) -> io::Result<FileNumber> {
        let next = self.last_number() + 1;
        while self.segments.newest().is_some_and(is_unused) {
            let segment = self.segments.pop_newest();
            self.current -= 1;
            self.disk_bytes -= on_disk(segment.size);
            self.closed_bytes -= on_disk(segment.size);
            self.disk.raw().remove(segment.number)?;
        }
        // There must be no gap in the numbers.
        Ok(if self.segments.is_empty() { next } else { self.last_number() + 1 })
    }

    // ---- Numbers ----

    /// Returns the disk.
    pub fn disk(&self) -> &FailStopDisk {
        &self.disk
    }

    /// Returns the disk, to change files.
    pub fn disk_mut(&mut self) -> &mut FailStopDisk {
        &mut self.disk
    }

    /// Returns the files with their jobs.
    pub fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Returns whether there is a current file. Only at the start there is none.
    pub fn has_current(&self) -> bool {
        self.current < self.segments.len()
    }

    /// Returns the current file.
    pub fn current(&self) -> &Segment {
        &self.segments[self.current]
    }

    /// Returns the number of the newest file, or 0.
    pub fn last_number(&self) -> FileNumber {
        self.segments.newest().map_or(0, |segment| segment.number)
    }

    /// Returns the number of the oldest file, or 0.
    fn oldest_number(&self) -> FileNumber {
        self.segments.iter().next().map_or(0, |segment| segment.number)
    }

    /// Returns the prepared files, the oldest first.
    pub fn prepared(&self) -> impl ExactSizeIterator<Item = &Segment> + DoubleEndedIterator {
        self.segments.iter().skip(self.current + 1)
    }

    /// Returns the closed files that are not known to be free, the oldest first.
    pub fn kept_closed(&self) -> impl Iterator<Item = &Segment> {
        let closed = self.segments.iter().take(self.current);
        closed.filter(|segment| segment.free_since.is_none())
    }

    /// Returns how many files are closed.
    pub fn closed_count(&self) -> usize {
        self.current
    }

    /// Returns the size of a whole file in bytes.
    pub fn file_size(&self) -> u64 {
        self.file_size
    }

    /// Returns the bytes that all files take on the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    /// Returns the bytes that closed files take on the disk, without those known to be free.
    pub fn kept_closed_bytes(&self) -> u64 {
        self.closed_bytes - self.free_bytes
    }

    /// Returns the bytes of records in closed files that are not known to be free.
    pub fn kept_closed_records(&self) -> u64 {
        self.kept_records
    }

    /// Returns whether all files together take more than three times the live bytes and two
    /// files. Free ones do not count.
    pub fn takes_too_much(&self) -> bool {
        self.disk_bytes - self.free_bytes > self.bound()
    }

    /// Returns whether all files, with the free ones, are within the bound, and the disk is not full.
    pub fn is_within_bound(&self) -> bool {
        self.disk_bytes <= self.bound() && !self.is_full
    }

    /// Returns three times the live bytes and two files.
    pub fn bound(&self) -> u64 {
        3 * self.segments.live_bytes() + 2 * self.file_size
    }

    /// Returns whether the last attempt to take space failed, and no file was removed since.
    pub fn is_full(&self) -> bool {
        self.is_full
    }

    /// Returns whether the disk is full, or had no space for two more files when it was measured last.
    pub fn is_nearly_full(&self) -> bool {
        self.is_full || self.disk_bytes.saturating_add(2 * self.file_size) > self.capacity
    }

    /// Notes whether the last attempt to take space failed.
    pub fn set_full(&mut self, is_full: bool) {
        self.is_full = is_full;
    }

    // ---- Room ----

    /// Returns how many bytes of records fit in a whole file.
    pub fn whole_len(&self) -> u64 {
        self.file_size.saturating_sub(self.head_len())
    }

    /// Returns the length of the head of the next file in bytes, with the records of gaps.
    fn head_len(&self) -> u64 {
        HEAD + self.carried_gaps().len() as u64 * SHORT
    }

    /// Returns how many short records fit in a prepared file.
    pub fn fresh_room(&self, prepared: &Segment) -> u64 {
        prepared.size.saturating_sub(self.head_len()) / SHORT
    }

    /// Returns the headroom beyond a whole file, in bytes: another whole file, so that a file can be moved on
    /// a full disk, but at most a quarter of the live bytes.
    pub fn more_headroom(&self) -> u64 {
        self.whole_len().min(self.segments.live_bytes() / 4)
    }

    /// Returns how many short records fit in the current file and the prepared ones.
    pub fn room(&self) -> u64 {
        self.current().left() / SHORT + self.prepared_room
    }

    /// Returns how many short records fit behind a record of `len` bytes, or `None` if that
    /// record does not fit.
    pub fn room_behind(&self, len: u64) -> Option<u64> {
        let left = self.current().left();
        if len <= left {
            return Some((left - len) / SHORT + self.prepared_room);
        }
        if len > self.whole_len() {
            // The current file will be lengthened.
            return Some(self.prepared_room);
        }
        // Files that are too short are passed over. Only on a full disk there are any.
        let mut room = self.prepared_room;
        for next in self.prepared() {
            room -= self.fresh_room(next);
            if let Some(left) = next.size.checked_sub(self.head_len() + len) {
                return Some(left / SHORT + room);
            }
        }
        None
    }

    // ---- Growing ----

    /// Creates a prepared file, or the current one if there is none.
    pub fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        if number > LAST_NUMBER {
            return Err(io::Error::new(
                io::ErrorKind::StorageFull,
                "the highest file number is used",
            ));
        }
        self.check_limit(0, size)?;
        self.segments.try_reserve_file().map_err(|_| io::ErrorKind::OutOfMemory)?;
        self.disk.create(number, size)?;
        let segment = Segment::new(number, size, VERSION_LEN as u64);
        self.disk_bytes += on_disk(size);
        if self.has_current() {
            self.prepared_room += self.fresh_room(&segment);
        }
        self.segments.push(segment);
        self.disk.raw().close(number);
        debug!("binlog.{number}: created, {size} bytes");
        self.choose_file_size();
        Ok(())
    }

    /// Lengthens the newest file by `piece` bytes, or creates one of this size.
    pub fn grow(&mut self, piece: u64) -> io::Result<()> {
        if self.can_lengthen() {
            self.lengthen(piece)
        } else {
            self.create(self.last_number() + 1, piece)
        }
    }

    /// Returns whether the newest file is shorter than a whole one.
    fn can_lengthen(&self) -> bool {
        self.segments.newest().is_some_and(|newest| newest.size < self.file_size)
    }

    /// Lengthens the newest file by up to `piece` bytes, but not beyond the size of a whole one or the end of
    /// its last block. It is the current file or a prepared one or, at the start, the closed one that is
    /// reopened.
    pub fn lengthen(&mut self, piece: u64) -> io::Result<()> {
        let index = self.segments.len() - 1;
        let is_prepared = index > self.current;
        let Segment { number, size: old, .. } = self.segments[index];
        let longest = self.file_size.max(on_disk(old));
        let new = (old + piece).next_multiple_of(BLOCK).min(longest);
        self.check_limit(old, new)?;
        let extended = self.disk.extend(number, new);
        if is_prepared {
            self.disk.raw().close(number);
        }
        extended?;
        let room_before = self.fresh_room(&self.segments[index]);
        self.segments[index].size = new;
        self.disk_bytes += on_disk(new) - on_disk(old);
        if is_prepared {
            self.prepared_room += self.fresh_room(&self.segments[index]) - room_before;
        }
        debug!("binlog.{number}: lengthened from {old} to {new} bytes");
        Ok(())
    }

    /// Lengthens the current file so that a record of `len` bytes fits, however long it is.
    pub fn lengthen_for(&mut self, len: u64) -> io::Result<()> {
        let Segment { number, size: old, used, .. } = *self.current();
        let new = used + len;
        self.check_limit(old, new)?;
        self.disk.extend(number, new)?;
        self.segments[self.current].size = new;
        self.disk_bytes += on_disk(new) - on_disk(old);
        Ok(())
    }

    /// Fails if all files together would take too much with a file that grows from `old` to `new`
    /// bytes.
    fn check_limit(&self, old: u64, new: u64) -> io::Result<()> {
        let taken = self.disk_bytes + (on_disk(new) - on_disk(old));
        if taken <= self.max_bytes || self.is_limit_lifted {
            return Ok(());
        }
        let message = format!("--binlog-limit {} is reached", self.max_bytes);
        Err(io::Error::new(io::ErrorKind::QuotaExceeded, message))
    }

    /// Notes whether files may take more than the limit. Returns whether that is a change.
    pub fn lift_limit(&mut self, is_lifted: bool) -> bool {
        is_lifted != std::mem::replace(&mut self.is_limit_lifted, is_lifted)
    }

    /// Returns the limit if all files take more: it was higher at an earlier start, or there was none.
    pub fn exceeded_limit(&self) -> Option<u64> {
        Some(self.max_bytes).filter(|&limit| self.disk_bytes > limit)
    }

    /// Returns the nonce of the newest closed file if records can be appended to it: it is intact,
    /// was written by this server, and is shorter than `-s` sets. Nothing is behind its last record,
    /// because it was truncated there and synced.
    pub fn reopenable(&self) -> Option<u32> {
        let newest = self.segments.newest()?;
        let can_grow = newest.size < self.max_file_size;
        let is_reopenable = !newest.is_damaged && newest.used == newest.size && can_grow;
        newest.nonce.filter(|_| is_reopenable)
    }

    /// Makes the newest closed file the current one. It may have been lengthened.
    pub fn reopen(&mut self) {
        self.current -= 1;
        self.segments[self.current].is_closed = false;
        if self.segments[self.current].free_since.take().is_some() {
            self.free -= 1;
            self.free_bytes -= on_disk(self.current().size);
        }
        let closed = self.segments.iter().take(self.current);
        self.closed_bytes = closed.map(|segment| on_disk(segment.size)).sum();
        self.kept_records = self.kept_closed().map(records_len).sum();
    }

    // ---- Writing ----

    /// Counts the next `len` bytes of the current file as used.
    pub fn use_bytes(&mut self, len: usize) {
        let segment = &mut self.segments[self.current];
        segment.used += len as u64;
        assert!(
            segment.used <= segment.size,
            "a record without space in binlog.{}",
            segment.number
        );
    }

    /// Writes `bytes`, which are already counted as the last used ones of the current file.
    pub fn write_end(&mut self, bytes: &[u8]) {
        let Segment { number, used, .. } = *self.current();
        let offset = used.checked_sub(bytes.len() as u64).expect("the bytes count as used");
        self.disk.write(number, offset, bytes);
    }

    /// Closes the current file. The oldest prepared one, which must exist, becomes the current one.
    pub fn advance(&mut self) {
        self.closed_bytes += on_disk(self.current().size);
        self.kept_records += records_len(self.current());
        self.segments.close_file(self.current);
        self.current += 1;
        self.prepared_room -= self.fresh_room(self.current());
    }

    /// Truncates the current file to its records.
    pub fn truncate_current(&mut self) {
        self.truncate(self.current);
    }

    /// Truncates a file to its records. Without space or permission for that the file stays
    /// longer, which is harmless. Any other error means that the disk fails.
    fn truncate(&mut self, index: usize) {
        let Segment { number, size, used, is_damaged, .. } = self.segments[index];
        if size == used || is_damaged || self.disk.has_failed() {
            return;
        }
        match self.disk.raw().truncate(number, used) {
            Ok(()) => {}
            Err(error) if is_want_of_space(&error) => {
                return debug!("cannot truncate binlog.{number}: {error}; it stays longer");
            }
            Err(error) => {
                let what = || format!("cannot truncate binlog.{number}");
                return self.disk.latch_error(Err(error), what);
            }
        }
        self.segments[index].size = used;
        self.disk_bytes -= on_disk(size) - on_disk(used);
    }

    // ---- Removing ----

    /// Returns the index of the oldest free file.
    pub fn first_free(&self) -> Option<usize> {
        let is_free = |segment: &Segment| segment.free_since.is_some();
        if self.free == 0 { None } else { self.segments.iter().position(is_free) }
    }

    /// Counts the files that have become free. A closed file never gets another job.
    pub fn count_free(&mut self) {
        if !self.segments.take_emptied() {
            return;
        }
        let mut gaps_left = self.gaps_left();
        let mut needed = None;
        for index in 0..self.current {
            if needed.is_some() && gaps_left == 0 {
                return;
            }
            let segment = &mut self.segments[index];
            let may_go = needed.is_none_or(|older| segment.is_apart_from(older));
            if segment.free_since.is_none() && segment.is_empty() && may_go {
                gaps_left -= usize::from(needed.is_some());
                segment.free_since = Some(self.syncs_begun);
                self.free += 1;
                self.free_bytes += on_disk(segment.size);
                self.kept_records -= records_len(segment);
            }
            if segment.free_since.is_none() {
                needed = Some(segment.number);
            }
        }
    }

    /// Returns how many more files may be removed while older ones are needed.
    fn gaps_left(&self) -> usize {
        // A remote disk takes a missing file for a lost one.
        let is_remote = self.disk.progress().is_some();
        if is_remote || self.last_number() - self.oldest_number() >= MOST_NUMBERS {
            return 0;
        }
        let closed = self.segments.iter().take(self.current).skip(1);
        let unrecorded = closed
            .filter(|segment| segment.free_since.is_some() && !self.gaps.contains(segment.number));
        self.most_gaps().saturating_sub(self.gaps.iter().len() + unrecorded.count())
    }

    /// Returns how many gaps the head of a file can have: their records take at most half of a file.
    fn most_gaps(&self) -> usize {
        let most = (self.max_file_size / 2).saturating_sub(HEAD) / SHORT;
        MOST_GAPS.min(usize::try_from(most).unwrap_or(MOST_GAPS))
    }

    /// Returns the file with this number if it is closed and has jobs.
    pub fn find_with_jobs(&self, number: FileNumber) -> Option<&Segment> {
        self.segments.find_file(number).filter(|file| file.is_closed && !file.is_empty())
    }

    /// Returns the closed file whose jobs are moved next: the oldest one of an island with the most garbage for
    /// its live records. An island is a run of files that can be removed before older ones. The live records of
    /// the file have at most `most_live` bytes. Only the first files of a run are looked at.
    pub fn next_to_empty(&self, most_live: u64) -> Option<&Segment> {
        let mut best: Option<(u128, u128, &Segment)> = None;
        let mut older = None;
        let may_leave_gaps = self.gaps_left() > 0;
        for index in 0..self.current {
            let start = &self.segments[index];
            if start.free_since.is_some() {
                continue;
            }
            // A file without jobs waits for older ones.
            if !start.is_empty() && start.live_bytes() <= most_live {
                let run = self.segments.iter().take(self.current).skip(index).take(MOST_IN_RUN);
                let is_apart =
                    |&segment: &&Segment| older.is_none_or(|older| segment.is_apart_from(older));
                let (mut garbage, mut live) = (0, 0);
                for segment in run.filter(|it| it.free_since.is_none()).take_while(is_apart) {
                    live += u128::from(segment.live_bytes());
                    let rest = on_disk(segment.size).saturating_sub(segment.live_bytes());
                    garbage += u128::from(rest);
                    // An older one is better by an eighth: it leaves no gap.
                    if best.is_none_or(|(most, least, _)| 8 * garbage * least > 9 * most * live) {
                        best = Some((garbage, live, start));
                    }
                }
            }
            if !may_leave_gaps {
                break;
            }
            older = Some(start.number);
        }
        best.map(|(_, _, start)| start)
    }

    /// Notes that a sync of all records and names begins.
    pub fn note_sync_begun(&mut self) {
        self.count_free();
        self.syncs_begun += 1;
    }

    /// Notes that the last sync has ended.
    pub fn note_sync_ended(&mut self) {
        self.syncs_ended = self.syncs_begun;
    }

    /// Returns whether a free file may be removed: the records are synced that have made it free, and so is
    /// the removal of the file before.
    pub fn may_remove(&self, index: usize) -> bool {
        let is_synced =
            self.segments[index].free_since.is_some_and(|since| since < self.syncs_ended);
        is_synced && self.disk.has_synced_removals() && !self.disk.has_failed()
    }

    // ---- Gaps ----

    /// Returns the gaps that the next file begins with: all, unless the size of files is smaller than it was.
    pub fn carried_gaps(&self) -> impl ExactSizeIterator<Item = Gap> + '_ {
        self.gaps.iter().take(self.most_gaps())
    }

    /// Returns whether a file can be removed without the record of a gap: no older file is left, or the
    /// gap is recorded.
    pub fn is_recorded_gap(&self, index: usize) -> bool {
        index == 0 || self.gaps.contains(self.segments[index].number)
    }

    /// Notes that the record of a gap for a free file is made now. Each later file has it too.
    pub fn add_gap(&mut self, index: usize) -> Gap {
        let segment = &mut self.segments[index];
        let gap = (segment.number, segment.number);
        segment.free_since = Some(self.syncs_begun);
        self.gaps.add(gap);
        self.count_prepared_room();
        gap
    }

    fn count_prepared_room(&mut self) {
        self.prepared_room = self.prepared().map(|next| self.fresh_room(next)).sum();
    }

    /// Removes a free file. A damaged one is renamed instead.
    pub fn remove_free(&mut self, index: usize) -> io::Result<()> {
        let Segment { number, size, is_damaged, free_since, .. } = self.segments[index];
        assert!(free_since.is_some(), "binlog.{number} is needed or written");
        if is_damaged {
            match self.disk.quarantine(number) {
                Ok(name) => warn!("binlog.{number}: damaged; renamed to {name}"),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    warn!("binlog.{number}: damaged, and it was removed by someone else");
                }
                Err(error) => return Err(error),
            }
        } else {
            self.disk.remove(number)?;
        }
        debug!("binlog.{number}: removed");
        self.is_full = false;
        self.segments.remove_file(index);
        self.current -= 1;
        self.free -= 1;
        self.free_bytes -= on_disk(size);
        self.disk_bytes -= on_disk(size);
        self.closed_bytes -= on_disk(size);
        if index == 0 {
            self.gaps.forget_before(self.oldest_number());
            self.count_prepared_room();
            // There may be room for another gap.
            self.segments.look_for_free();
        }
        Ok(())
    }

    /// Removes the newest file, which must be a prepared one or, at the start, the current one.
    /// A file that a power cut brings back has no record, so the directory need not be synced.
    pub fn remove_newest(&mut self) -> io::Result<()> {
        let number = self.last_number();
        self.disk.raw().remove(number)?;
        let segment = self.segments.pop_newest();
        self.is_full = false;
        self.disk_bytes -= on_disk(segment.size);
        if self.has_current() {
            self.prepared_room -= self.fresh_room(&segment);
        }
        Ok(())
    }

    // ---- Jobs ----

    /// Makes sure that the next [`Files::add_job`] needs no memory.
    pub fn try_reserve_job(&mut self) -> Result<(), TryReserveError> {
        self.segments.try_reserve_one()
    }

    /// Notes that the next record supersedes one of a job or a kept key.
    pub fn supersede(&mut self, key: LogKey) {
        self.segments.supersede(key);
    }

    /// Notes that the next record supersedes one of a file, or of any for 0.
    pub fn supersede_file(&mut self, number: FileNumber) {
        self.segments.supersede_file(number);
    }

    /// Adds a job whose records are the next ones in the current file: `key_len` bytes of the record of
    /// its key, and the full record, `len` bytes together.
    pub fn add_job(&mut self, job: JobKey, key_len: u64, len: u64) -> LogKey {
        let Segment { number, used, .. } = *self.current();
        self.segments.add_job(job, number, used + key_len, len)
    }

    /// Notes whether the key of a job will be kept after its delete.
    pub fn set_keeping(&mut self, key: LogKey, is_keeping: bool) {
        self.segments.set_keeping(key, is_keeping);
    }

    /// Turns the entry of a deleted job into that of its kept key, whose record goes to the current
    /// file.
    pub fn keep_key(&mut self, key: LogKey, kept: KeptKey) {
        self.segments.keep_key(key, kept, self.current().number, SHORT);
    }

    /// Notes when a job was buried, by its last record. `None` is for a job that is not buried.
    pub fn set_buried_at(
        &mut self,
        key: LogKey,
        moment: Option<Nanos>,
    ) -> Result<(), TryReserveError> {
        self.segments.set_buried_at(key, moment)
    }

    /// Notes that a new record of a job or a kept key is the next one in the current file: `key_len` bytes
    /// of the record of the key before a full one, and `len` bytes together.
    pub fn move_job(&mut self, key: LogKey, key_len: u64, len: u64) {
        let Segment { number, used, .. } = *self.current();
        self.segments.move_job(key, number, used + key_len, len);
    }

    /// Notes that a record in a file is damaged.
    pub fn note_damage(&mut self, number: FileNumber) {
        self.segments.by_number(number).is_damaged = true;
    }

    /// Removes a job or a kept key and returns its entry.
    pub fn remove_job(&mut self, key: LogKey) -> Entry {
        self.segments.remove_job(key)
    }

    // ---- Checking ----

    /// Panics unless all sums are those of the files, and each file is in the state that its
    /// position requires.
    pub fn check(&self) {
        self.segments.check();
        let on_disk = |from: usize, to: usize| -> u64 {
            let some = self.segments.iter().take(to).skip(from);
            some.map(|segment| on_disk(segment.size)).sum()
        };
        let (current, len) = (self.current, self.segments.len());
        assert!(current < len, "the current file has index {current} of {len}");
        assert_eq!(self.disk_bytes, on_disk(0, len), "bytes of all files, noted and counted");
        let closed = on_disk(0, current);
        assert_eq!(self.closed_bytes, closed, "bytes of closed files, noted and counted");
        let free = || self.segments.iter().filter(|segment| segment.free_since.is_some());
        assert_eq!(self.free, free().count(), "free files, noted and counted");
        let free_bytes: u64 = free().map(|segment| self::on_disk(segment.size)).sum();
        assert_eq!(self.free_bytes, free_bytes, "bytes of free files, noted and counted");
        let records: u64 = self.kept_closed().map(records_len).sum();
        assert_eq!(
            self.kept_records, records,
            "bytes of records in closed files, noted and counted"
        );
        for segment in free() {
            assert!(segment.is_empty(), "binlog.{} is free and has jobs", segment.number);
        }
        let room = self.prepared().map(|next| self.fresh_room(next)).sum::<u64>();
        assert_eq!(self.prepared_room, room, "room in prepared files, noted and counted");
        for (number, segment) in (self.current().number + 1..).zip(self.prepared()) {
            assert_eq!(segment.number, number, "the number of a prepared file");
            assert!(
                is_unused(segment) && segment.is_empty(),
                "binlog.{number} is only prepared, but {} bytes of it are used",
                segment.used
            );
        }
        let Segment { number, used, is_damaged, .. } = *self.current();
        assert!(used >= HEAD && !is_damaged, "binlog.{number} is the current file without a head");
    }
}

/// Returns the bytes that a file of `size` bytes takes on the disk.
fn on_disk(size: u64) -> u64 {
    size.next_multiple_of(BLOCK)
}

/// Returns the bytes of the records in a file, without its head.
pub fn records_len(segment: &Segment) -> u64 {
    segment.used.saturating_sub(HEAD)
}

fn is_unused(segment: &Segment) -> bool {
    segment.used <= VERSION_LEN as u64 && !segment.is_damaged
}

/// Returns whether an error of the disk passes when space is freed or permission is given.
pub fn is_want_of_space(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, OutOfMemory, PermissionDenied, QuotaExceeded, StorageFull};
    matches!(
        error.kind(),
        StorageFull | QuotaExceeded | FileTooLarge | OutOfMemory | PermissionDenied
    )
}
