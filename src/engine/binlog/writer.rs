//! Appends records to the current file.
//!
//! Records gather in a batch, which is written once per loop iteration, or when it is full. The
//! module `space` reserves the space of a record before it is appended.

use super::IoFailed;
use super::disk::FileNumber;
use super::fail_stop::FailStopDisk;
use super::files::{Files, SHORT};
use super::gaps::{Gap, Gaps};
use super::key_record::KeyRecord;
use super::record::{self, Fields, Layout, SHORT_LEN};
use super::segments::{Segment, Segments};
use super::syncing::SyncState;
use super::{Policy, Resume};
use crate::engine::limits::Limits;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::hash::{BuildHasher, RandomState};

/// The files, and the records that are not written to them yet.
#[derive(Debug)]
pub struct Writer {
    files: Files,
    syncing: SyncState,
    /// Records at the end of the current file that are not written yet.
    batch: Vec<u8>,
    /// The batch has records of [`Writer::append_without_sync`].
    has_exempt: bool,
    /// The nonce of all records that are written.
    nonce: u32,
    /// The highest id that was given out.
    last_id: u64,
    /// The moment at which the present iteration began.
    now: Nanos,
    /// The moment of the last record of a job.
    recorded_at: Nanos,
    records_written: u64,
}

impl Writer {
    /// Returns a writer without a current file.
    pub fn open(
        disk: FailStopDisk,
        policy: Policy,
        (segments, gaps): (Segments, Gaps),
        resume: Resume,
        now: Nanos,
    ) -> Result<Writer, TryReserveError> {
        let mut batch = Vec::new();
        batch.try_reserve_exact(longest_batch(&policy.limits))?;
        Ok(Writer {
            files: Files::open(disk, segments, gaps, policy),
            syncing: SyncState::new(policy.syncing),
            batch,
            has_exempt: false,
            nonce: random_nonce(),
            last_id: resume.id,
            now,
            recorded_at: now,
            records_written: 0,
        })
    }

    /// Returns the files.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Returns the files, to take or free space.
    pub fn files_mut(&mut self) -> &mut Files {
        &mut self.files
    }

    /// Returns when records are synced.
    pub fn syncing(&self) -> &SyncState {
        &self.syncing
    }

    /// Returns the first error of the disk, if there was one.
    pub fn status(&self) -> Result<(), IoFailed> {
        self.files.disk().status()
    }

    /// Returns when the present iteration began.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Sets when the present iteration began.
    pub fn set_now(&mut self, now: Nanos) {
        self.now = now;
    }

    /// Returns when the last record of a job was made.
    pub fn recorded_at(&self) -> Nanos {
        self.recorded_at
    }

    /// Returns how many records of jobs were made since the start.
    pub fn records_written(&self) -> u64 {
        self.records_written
    }

    /// Notes that an id was given out.
    pub fn note_id(&mut self, id: u64) {
        self.last_id = self.last_id.max(id);
    }

    // ---- Records ----

    /// Appends a record, for which there is space in the current file.
    pub fn append(&mut self, fields: &Fields, tube: &str, body: &[u8]) {
        let is_copied = body.len() <= longest_copied(self.files.limits());
        let copied_len = if is_copied { body.len() } else { 0 };
        self.make_room(Layout::LONGEST_HEAD + copied_len);
        record::write(&mut self.batch, fields, tube, body, self.nonce);
        self.files.use_bytes(Layout::V7WithCrc.head_len(tube) + copied_len);
        if is_copied {
            self.batch.extend_from_slice(body);
        } else {
            self.flush();
            self.files.use_bytes(body.len());
            self.files.write_end(body);
        }
        self.records_written += 1;
        self.syncing.note_record(self.now);
        self.recorded_at = self.now;
    }

    /// Appends a short record that makes no sync due.
    pub fn append_without_sync(&mut self, fields: &Fields) {
        self.make_room(SHORT_LEN);
        record::write(&mut self.batch, fields, "", &[], self.nonce);
        self.files.use_bytes(SHORT_LEN);
        self.records_written += 1;
        self.recorded_at = self.now;
        self.has_exempt = true;
    }

    /// Appends the record of a key, for which there is space in the current file. It is not counted,
    /// because C beanstalkd does not make such a record.
    pub fn append_key(&mut self, key: &KeyRecord) {
        self.make_room(SHORT_LEN);
        key.write(&mut self.batch, self.nonce);
        self.files.use_bytes(SHORT_LEN);
        self.syncing.note_record(self.now);
        self.recorded_at = self.now;
    }

    /// Removes the last record from the count of [`Writer::records_written`].
    pub fn uncount_record(&mut self) {
        self.records_written -= 1;
    }

    /// Appends the file header record and those of all gaps. It has the last id, so that ids continue from
    /// there even if all older files are removed.
    pub fn begin_file(&mut self) {
        record::write_file_header(&mut self.batch, self.last_id, self.nonce);
        self.files.use_bytes(SHORT_LEN);
        self.syncing.note_record(self.now);
        let gaps: Vec<Gap> = self.files.carried_gaps().collect();
        gaps.into_iter().for_each(|gap| self.append_gap(gap));
    }

    /// Appends the record of a gap, for which there is space in the current file. It is not counted.
    fn append_gap(&mut self, gap: Gap) {
        self.make_room(SHORT_LEN);
        record::write(&mut self.batch, &record::gap(gap), "", &[], self.nonce);
        self.files.use_bytes(SHORT_LEN);
        self.syncing.note_record(self.now);
    }

    /// Makes sure that a free file can be removed without being missed: if older ones are left, the gap is
    /// recorded. Returns `false` if there is no room for that.
    pub fn record_gap(&mut self, index: usize) -> bool {
        if self.files.is_recorded_gap(index) {
            return true;
        }
        let records = 1 + self.files.prepared().len() as u64;
        if self.files.room() < self.files.segments().delete_records() + records {
            return false;
        }
        while self.files.current().left() < SHORT {
            self.advance();
        }
        let gap = self.files.add_gap(index);
        self.append_gap(gap);
        true
    }

    /// Closes the current file, which is full, and begins the oldest prepared one.
    pub fn advance(&mut self) {
        self.flush();
        self.files.truncate_current();
        self.syncing.close_current(&mut self.files);
        self.files.advance();
        self.begin_file();
    }

    /// Makes the newest closed file the current one. Its records have this nonce.
    pub fn reopen(&mut self, nonce: u32) {
        self.files.reopen();
        self.nonce = nonce;
    }

    /// Drops the records that are not written yet, after their file was removed at the start.
    pub fn drop_batch(&mut self) {
        self.batch.clear();
    }

    /// Writes the batch unless `len` more bytes fit in it.
    fn make_room(&mut self, len: usize) {
        if self.batch.len() + len > self.files.limits().batch_bytes {
            self.flush();
        }
    }

    // ---- Writing ----

    /// Writes the batch.
    pub fn flush(&mut self) {
        if !self.batch.is_empty() {
            self.files.write_end(&self.batch);
            self.batch.clear();
            self.has_exempt = false;
        }
    }

    /// Returns the bytes at this place if they are not written yet.
    pub fn unwritten(&self, file: FileNumber, offset: u64, len: u32) -> Option<&[u8]> {
        let Segment { number, used, .. } = *self.files.current();
        let batch_at = used - self.batch.len() as u64;
        let start = offset.checked_sub(batch_at).filter(|_| file == number)?;
        let start = usize::try_from(start).expect("a batch is short");
        self.batch.get(start..start + len as usize)
    }

    /// Writes the batch and asks the disk to start writing it if a long sync is due later.
    pub fn flush_early(&mut self) {
        self.flush();
        self.syncing.announce_if_long(&mut self.files);
    }

    /// Writes the batch and syncs all records: in the background if that is possible, or else at once.
    pub fn request_sync(&mut self) {
        self.flush();
        self.syncing.request(&mut self.files);
    }

    /// Takes the result of the background sync, if it has ended.
    pub fn poll_sync(&mut self) {
        self.syncing.poll(&mut self.files, false);
    }

    /// Writes the batch, syncs all records, and waits for that.
    pub fn sync(&mut self) {
        self.flush();
        self.syncing.sync(&mut self.files);
    }

    /// Panics unless the batch is the end of the current file.
    pub fn check(&self) {
        self.files.check();
        let Segment { number, used, .. } = *self.files.current();
        let waiting = self.batch.len();
        assert!(
            waiting <= longest_batch(self.files.limits()) && waiting as u64 <= used,
            "{waiting} bytes wait to be written, of {used} that are used in binlog.{number}"
        );
        let must_sync = waiting > 0 && !self.has_exempt;
        self.syncing.check(&self.files, must_sync);
    }
}

/// Returns the length up to which a body is copied into the batch, in bytes.
fn longest_copied(limits: &Limits) -> usize {
    limits.batch_bytes / 2
}

/// Returns the most bytes of a batch. A record that is longer than a batch is one alone.
fn longest_batch(limits: &Limits) -> usize {
    limits.batch_bytes.max(Layout::LONGEST_HEAD + longest_copied(limits))
}

/// Returns a random number: a hash with the random keys of [`RandomState`].
fn random_nonce() -> u32 {
    let hash = RandomState::new().hash_one(());
    u32::from_ne_bytes(*hash.to_ne_bytes().first_chunk().expect("it is longer"))
}
