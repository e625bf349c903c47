//! Decides when live jobs are moved out of the oldest files, and how many bytes of them.
//!
//! Superseded records are garbage. When there is too much of it, full records of live jobs are
//! written again to the current file, the oldest first, until their old files are removable.
//! For each byte of garbage that a command makes, it moves [`MOVE_RATIO`] bytes. So all files
//! together stay below three times the live bytes plus two files; a removed file leaves that
//! sum a few iterations later. The queue brings the jobs (`queue/log.rs`).

use super::files::{Files, HEAD, SHORT};
use super::segments::Segment;
use crate::engine::keys::LogKey;
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
    records_migrated: u64,
}

/// For each byte of garbage this many are moved while there is too much of it.
const MOVE_RATIO: u64 = 4;
/// At most this many bytes are to be moved at once. A command that makes more garbage, such as a
/// kick of a million jobs, leaves the rest to idle steps.
const MAX_DEBT: u64 = 4 * 1024 * 1024;
/// An idle step moves this many bytes.
const IDLE_STEP: u64 = 64 * 1024;
/// The time between idle steps.
const IDLE_PAUSE: Nanos = Nanos::from_millis(1);
/// The time until the next idle step when no job could be moved.
const BLOCKED_PAUSE: Nanos = Nanos::from_secs(1);

/// Returns whether there is too much garbage.
///
/// All files together hold live records, headroom for deletes, the rest of the headroom, and
/// garbage. The sum stays below three times the live bytes plus two files if the garbage stays
/// below twice the live bytes minus the headroom for deletes. While all live bytes are moved,
/// half as many bytes of garbage are made, so compaction begins that much earlier.
fn is_wanted(files: &Files) -> bool {
    if files.closed_count() == 0 || files.disk().has_failed() {
        return false;
    }
    let live = files.segments().live_bytes();
    let file_size = files.file_size();
    if files.is_full() {
        // Only garbage counts whose removal frees space, not the rests of blocks.
        let used: u64 = files.kept_closed().map(|closed| closed.used.saturating_sub(HEAD)).sum();
        return used.saturating_sub(live) > live / 4 + file_size / 8;
    }
    let closed = files.kept_closed_bytes();
    let garbage = (closed + files.current().used).saturating_sub(live);
    let for_deletes = files.segments().deletes() * SHORT;
    let limit = (live + live / 2).saturating_sub(for_deletes).max(live / 4) + file_size / 2;
    // After a start the new files take space too, so that even this may be too much.
    garbage > limit || (files.takes_too_much() && closed > 3 * live)
}

/// Returns the job that is moved next, if its file can then be removed. On a full disk only a
/// file is begun whose jobs all fit in `free` bytes.
pub fn oldest_job(files: &mut Files, free: u64) -> Option<LogKey> {
    files.count_removable();
    let is_full = files.is_full();
    let oldest = files.kept_closed().next();
    let oldest = oldest.filter(|segment| !is_full || segment.live_bytes() <= free);
    oldest.and_then(Segment::first_job)
}

impl Compaction {
    /// Notes that `bytes` of garbage were made.
    pub fn charge(&mut self, files: &mut Files, bytes: u64) {
        files.count_removable();
        let debt = if is_wanted(files) { self.debt_bytes + MOVE_RATIO * bytes } else { 0 };
        self.debt_bytes = debt.min(MAX_DEBT);
    }

    /// Returns whether a job is to be moved now.
    pub fn is_due(&self, files: &Files) -> bool {
        self.debt_bytes > 0 && is_wanted(files)
    }

    /// Notes whether a job can be moved now.
    pub fn set_blocked(&mut self, is_blocked: bool) {
        self.is_blocked = is_blocked;
        if is_blocked {
            self.debt_bytes = 0;
        }
    }

    /// Notes that a job was moved, whose full record has `len` bytes.
    pub fn note_moved(&mut self, len: u64) {
        self.records_migrated += 1;
        self.debt_bytes = self.debt_bytes.saturating_sub(len);
    }

    /// Returns when the next idle step is due.
    pub fn next_due(&self, files: &Files) -> Option<Nanos> {
        is_wanted(files).then_some(self.idle_step_at)
    }

    /// Begins an idle step if one is due.
    pub fn tick(&mut self, files: &Files, now: Nanos) {
        if self.idle_step_at <= now && is_wanted(files) {
            self.idle_step_at = now + if self.is_blocked { BLOCKED_PAUSE } else { IDLE_PAUSE };
            self.debt_bytes = self.debt_bytes.max(IDLE_STEP.min(files.file_size()));
        }
    }

    /// Returns how many jobs were moved since the start.
    pub fn records_migrated(&self) -> u64 {
        self.records_migrated
    }
}
