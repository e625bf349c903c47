//! Decides when live jobs are moved out of old files, out of which, and how many bytes of them.
//!
//! Superseded records are garbage. When there is too much of it, full records of live jobs are
//! written again to the current file, until their old files are free.
//! For each byte of garbage that a command makes, it moves [`MOVE_RATIO`] bytes. So all files
//! together stay below three times the live bytes plus two files; a removed file leaves that
//! sum a few iterations later. On a nearly full disk compaction begins earlier, and puts move jobs
//! too. The queue brings the jobs (`queue/log.rs`).

use super::disk::FileNumber;
use super::files::{Files, SHORT};
use super::segments::{Owner, Segment};
use crate::engine::time::Nanos;

/// The progress of compaction.
#[derive(Debug, Default)]
pub struct Compaction {
    /// The bytes to be moved now, to keep up with the garbage.
    debt_bytes: u64,
    /// The moment of the next step that is made although no command makes garbage.
    idle_step_at: Nanos,
    /// In the last step no job could be moved.
    is_blocked: bool,
    /// The bytes that all files took when the last step found no space for the jobs of the file;
    /// otherwise `None`.
    blocked_disk_bytes: Option<u64>,
    /// The disk was nearly full, and there is still much garbage. Compaction continues after the first
    /// removal, so that puts are not refused again at once.
    is_freeing: bool,
    /// The file whose jobs are moved.
    emptied: Option<FileNumber>,
    /// The number of jobs that were moved since the start.
    records_migrated: u64,
}

/// For each byte of garbage this many are moved while there is too much of it, and for each byte that is
/// put while a nearly full disk is freed.
const MOVE_RATIO: u64 = 4;
/// Choosing a file counts as moving this many bytes.
const CHOICE_BYTES: u64 = 4096;
/// The time between idle steps.
const IDLE_PAUSE: Nanos = Nanos::from_millis(1);
/// The time until the next idle step when no job could be moved.
const BLOCKED_PAUSE: Nanos = Nanos::from_secs(1);

impl Compaction {
    /// Returns whether there is too much garbage.
    ///
    /// All files together hold live records, room for deletes, headroom, and garbage. The sum stays below
    /// three times the live bytes plus two files if the garbage stays below twice the live bytes minus the
    /// room for deletes and the headroom beyond a file ([`Files::more_headroom`]). While all live bytes
    /// are moved, commands make a quarter as many bytes of garbage ([`MOVE_RATIO`]). Compaction begins half
    /// of the live bytes earlier, and on a nearly full disk still earlier.
    fn is_wanted(&self, files: &Files) -> bool {
        if files.closed_count() == 0 || files.disk().has_failed() {
            return false;
        }
        if self.must_free(files) {
            return true;
        }
        let live = files.segments().live_bytes();
        let closed = files.kept_closed_bytes();
        let garbage = (closed + files.current().used).saturating_sub(live);
        let reserved = files.segments().delete_records() * SHORT + files.more_headroom();
        let most = (live + live / 2).saturating_sub(reserved).max(live / 4) + files.file_size() / 2;
        // After a start the new files take space too, so that even this may be too much.
        garbage > most || (files.takes_too_much() && closed > 3 * live)
    }

    /// Returns whether there is much garbage, and the disk is nearly full, or was when freeing began. Only
    /// records count: the unused ends of blocks free no space.
    fn must_free(&self, files: &Files) -> bool {
        let live = files.segments().live_bytes();
        let garbage = files.kept_closed_records().saturating_sub(live);
        (self.is_freeing || files.is_nearly_full()) && garbage > live / 8 + files.file_size() / 8
    }

    /// Returns whether the disk was nearly full, and there is still much garbage.
    pub fn is_freeing(&self) -> bool {
        self.is_freeing
    }

    /// Notes that `bytes` of garbage were made.
    pub fn charge(&mut self, files: &mut Files, bytes: u64) {
        files.count_free();
        self.is_freeing = self.must_free(files);
        let debt = if self.is_wanted(files) { self.debt_bytes + MOVE_RATIO * bytes } else { 0 };
        self.set_debt(files, debt);
    }

    /// Notes that a record of `bytes` was put. While a nearly full disk is freed, each put moves jobs too.
    pub fn charge_put(&mut self, files: &Files, bytes: u64) {
        if self.is_freeing {
            self.set_debt(files, self.debt_bytes + MOVE_RATIO * bytes);
        }
    }

    /// Sets the bytes to be moved now. While there is no space for them, only idle steps try.
    fn set_debt(&mut self, files: &Files, debt: u64) {
        let has_space = self.blocked_disk_bytes.is_none_or(|bytes| files.disk_bytes() < bytes);
        self.debt_bytes =
            if has_space { debt.min(files.limits().move_debt_bytes as u64) } else { 0 };
    }

    /// Returns whether a job is to be moved now.
    pub fn is_due(&self, files: &Files) -> bool {
        self.debt_bytes > 0 && self.is_wanted(files)
    }

    /// Notes whether no job can be moved now.
    pub fn set_blocked(&mut self, is_blocked: bool) {
        self.is_blocked = is_blocked;
        if is_blocked {
            self.debt_bytes = 0;
        }
    }

    /// Returns the file whose jobs are moved next: one after the other, until it has none.
    /// Its live records have at most `most_live` bytes.
    pub fn choose_file<'f>(&mut self, files: &'f Files, most_live: u64) -> Option<&'f Segment> {
        let same = self.emptied.and_then(|number| files.find_with_jobs(number));
        let same = same.filter(|file| file.live_bytes() <= most_live);
        if same.is_none() {
            // A choice takes as long as moving this much.
            self.debt_bytes = self.debt_bytes.saturating_sub(CHOICE_BYTES);
        }
        let file = same.or_else(|| files.next_to_empty(most_live));
        self.emptied = file.map(|file| file.number);
        file
    }

    /// Notes whether there is space for the jobs of the file.
    pub fn note_space(&mut self, files: &Files, has_space: bool) {
        self.blocked_disk_bytes = (!has_space).then(|| files.disk_bytes());
        self.emptied.take_if(|_| !has_space);
    }

    /// Notes that the records of a job, or that of a kept key, were moved: `len` bytes.
    pub fn note_moved(&mut self, owner: Owner, len: u64) {
        self.records_migrated += u64::from(matches!(owner, Owner::Job(_)));
        self.debt_bytes = self.debt_bytes.saturating_sub(len);
    }

    /// Returns when the next idle step is due.
    pub fn next_due(&self, files: &Files) -> Option<Nanos> {
        self.is_wanted(files).then_some(self.idle_step_at)
    }

    /// Begins an idle step if one is due.
    pub fn tick(&mut self, files: &Files, now: Nanos) {
        self.is_freeing = self.must_free(files);
        if self.idle_step_at <= now && self.is_wanted(files) {
            self.idle_step_at = now + if self.is_blocked { BLOCKED_PAUSE } else { IDLE_PAUSE };
            let idle_bytes = files.limits().idle_move_bytes as u64;
            self.debt_bytes = self.debt_bytes.max(idle_bytes.min(files.file_size()));
        }
    }

    /// Returns how many jobs were moved since the start.
    pub fn records_migrated(&self) -> u64 {
        self.records_migrated
    }
}
