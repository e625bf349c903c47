//! Appends records to the current file.
//!
//! Records gather in a batch, which is written once per loop iteration, or when it is full. The
//! module `space` reserves the space of a record before it is appended.

use super::Binlog;
use super::disk::FileNumber;
use super::files::{File, SHORT};
use super::gaps::Gap;
use super::record::{self, Content, Fields, Layout};
use crate::engine::limits::Limits;

impl Binlog {
    /// Appends a record of a job, for which there is space in the current file.
    pub(super) fn append_job(&mut self, fields: &Fields, tube: &str, body: &[u8]) {
        self.append_any(&Content::Job(*fields), tube, body);
        self.records_written += 1;
    }

    /// Appends another record, which C beanstalkd does not make, and for which there is space in the current file.
    pub(super) fn append(&mut self, content: &Content, tube: &str) {
        self.append_any(content, tube, &[]);
    }

    /// Appends a record of any kind.
    #[inline(always)]
    fn append_any(&mut self, content: &Content, tube: &str, body: &[u8]) {
        let copied = if body.len() <= self.limits.batch_bytes / 2 { body.len() } else { 0 };
        let len = Layout::V7_WITH_CRC.head_len(tube) + copied;
        if self.batch.len() + len > self.limits.batch_bytes {
            self.write_batch();
        }
        record::write(&mut self.batch, content, tube, body, copied, self.nonce);
        self.use_bytes(len);
        if copied < body.len() {
            self.write_batch();
            self.use_bytes(body.len());
            self.write_end(Some(body));
        }
        if !content.is_implied() || self.disk.is_remote() {
            self.sync.unsynced_since.get_or_insert(self.now);
        }
        self.recorded_at = self.now;
    }

    /// Appends the file header record and those of all gaps.
    pub(super) fn begin_file(&mut self) {
        let number = self.files.current().number;
        let end = |file: &File| (file.used, file.nonce.unwrap_or(self.nonce));
        let before = self.files.closed().last().map_or((0, 0), end);
        self.append(&Content::FileHeader(number, self.last_id, before), "");
        let gaps: Vec<Gap> = self.files.carried_gaps().collect();
        gaps.into_iter().for_each(|gap| self.append(&Content::Gap(gap), ""));
    }

    /// Makes sure that a free file can be removed without being missed: if older ones are left, the gap is
    /// recorded, here and at the start of each later file. Returns `false` if there is no room for that.
    pub(super) fn record_gap(&mut self, index: usize) -> bool {
        if self.files.is_recorded_gap(index) {
            return true;
        }
        let records = 1 + self.files.prepared().len() as u64;
        if self.room() < self.kept_deletes() + records {
            return false;
        }
        while self.files.current().left() < SHORT {
            self.advance();
        }
        let file = &mut self.files.list[index];
        let gap = (file.number, file.number);
        file.free_since = Some(self.sync.begun);
        self.files.gaps.add(gap);
        self.files.recount();
        self.append(&Content::Gap(gap), "");
        true
    }

    /// Closes the current file, which is full, and begins the oldest prepared one.
    pub(super) fn advance(&mut self) {
        self.write_batch();
        self.truncate(self.files.current);
        self.close_after_sync(self.files.current().number);
        self.files.advance();
        self.begin_file();
    }

    /// Counts the next `len` bytes of the current file as used.
    fn use_bytes(&mut self, len: usize) {
        let file = &mut self.files.list[self.files.current];
        file.used += len as u64;
        assert!(file.used <= file.size, "a record without space in binlog.{}", file.number);
    }

    /// Writes the batch.
    pub(super) fn write_batch(&mut self) {
        if !self.batch.is_empty() {
            self.write_end(None);
            self.batch.clear();
        }
    }

    /// Writes a long body or else the batch, which is already counted as the last used bytes of the current file.
    fn write_end(&mut self, long_body: Option<&[u8]>) {
        let File { number, used, .. } = *self.files.current();
        let bytes = long_body.unwrap_or(&self.batch);
        let offset = used.checked_sub(bytes.len() as u64).expect("the bytes count as used");
        if !self.has_failed() {
            self.sync.unsynced_bytes += bytes.len();
            let written = self.disk.write(number, offset, bytes);
            self.keep_error(written, || format!("cannot write binlog.{number}"));
        }
    }

    /// Returns the bytes at this place if they are not written yet.
    pub(super) fn unwritten(&self, file: FileNumber, offset: u64, len: u32) -> Option<&[u8]> {
        let File { number, used, .. } = *self.files.current();
        let batch_at = used - self.batch.len() as u64;
        let start = offset.checked_sub(batch_at).filter(|_| file == number)?;
        let start = usize::try_from(start).expect("a batch is short");
        self.batch.get(start..start + len as usize)
    }

    /// Panics unless the batch is the end of the current file.
    pub(super) fn check_batch(&self) {
        let File { number, used, .. } = *self.files.current();
        let waiting = self.batch.len();
        assert!(
            waiting <= longest_batch(&self.limits) && waiting as u64 <= used,
            "{waiting} bytes wait to be written, of {used} that are used in binlog.{number}"
        );
        self.check_sync();
    }
}

/// Returns the most bytes of a batch. A head that is longer than a batch is one alone.
pub fn longest_batch(limits: &Limits) -> usize {
    limits.batch_bytes + Layout::LONGEST_HEAD
}
