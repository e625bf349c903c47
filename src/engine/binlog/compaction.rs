//! A chapter of the binlog: live jobs are moved out of the oldest files, so that those can go.
//!
//! Superseded records are garbage. When there is too much of it, compaction moves live jobs
//! from the oldest segment to the current one, in steps as large as a few times the garbage
//! that is made, so that all files together stay below three times the live bytes and two
//! files more; a file that was removed is gone from that a few turns later. The jobs themselves
//! are not known here: who asks for a step brings them (`durable.rs`).

use super::record::{self, Fields};
use super::segments::Segment;
use super::{Binlog, HEAD, SHORT};
use crate::engine::keys::{JobKey, LogKey};
use crate::engine::time::Nanos;

/// For each byte of garbage that is made, so many are moved while there is too much of it.
const MOVE_RATIO: u64 = 4;
/// A command that makes more garbage than that is worth, as a kick of a million jobs does,
/// leaves the rest to idle moments.
const MOST_OWED: u64 = 4 * 1024 * 1024;
/// So much is moved at a time when nothing else happens, and so often.
const IDLE_STEP: u64 = 64 * 1024;
const IDLE_PAUSE: Nanos = Nanos::from_millis(1);
/// When that finds no space.
const STUCK_PAUSE: Nanos = Nanos::from_secs(1);

impl Binlog {
    /// Garbage has been made.
    pub(super) fn charge_compaction(&mut self, bytes: u64) {
        self.count_removable();
        let owed = if self.wants_compaction() { self.debt_bytes + MOVE_RATIO * bytes } else { 0 };
        self.debt_bytes = owed.min(MOST_OWED);
    }

    /// All files together hold what is live, what is set aside for deletes, the spare, and
    /// garbage. That stays below three times the live bytes and two files if garbage stays
    /// below twice the live bytes less what is set aside; half as much as is live is made
    /// while compaction gets through all that is live, so it begins earlier by that.
    pub(super) fn wants_compaction(&self) -> bool {
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
        let quarantine = self.segments.job_count() * SHORT;
        let limit = (live + live / 2).saturating_sub(quarantine).max(live / 4) + file_size / 2;
        // SecondaryMap files that are new, as after a start, even that may be too much.
        garbage > limit || (self.takes_too_much() && closed > 3 * live)
    }

    /// Whether all files together take more than is promised.
    pub(super) fn takes_too_much(&self) -> bool {
        let taken = self.sums.disk_bytes - self.leaving_bytes;
        taken > 3 * self.segments.live_bytes() + 2 * self.file_size()
    }

    /// The job that compaction moves next, if it is time for that and there is room. Its full
    /// record is to be made by [`Binlog::move_here`].
    pub fn next_to_move(&mut self) -> Option<(LogKey, JobKey)> {
        if self.debt_bytes == 0 || !self.wants_compaction() {
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
        let spare = self.free_bytes();
        self.count_removable();
        let oldest = self.segments.iter().take(self.current).nth(self.leaving);
        let oldest = oldest.filter(|segment| !self.is_full || segment.live_bytes() <= spare);
        let first = oldest.and_then(Segment::first_job);
        let found = first.filter(|&key| {
            let len = self.segments.entry(key).len.into();
            self.reserve_move(len).is_ok()
        });
        self.is_blocked = found.is_none();
        if self.is_blocked {
            self.debt_bytes = 0;
        }
        found.map(|key| (key, self.segments.entry(key).job))
    }

    /// Makes a new full record of a job that was named to be moved; says how many bytes it has.
    pub fn move_here(&mut self, key: LogKey, fields: &Fields, tube: &str, body: &[u8]) -> usize {
        let bytes = record::full_len(tube, body.len());
        let len = bytes as u64;
        self.segments.move_job(key, self.current_number(), len);
        self.append(fields, tube, body);
        self.sums.records_migrated += 1;
        self.debt_bytes = self.debt_bytes.saturating_sub(len);
        self.count_removable();
        bytes
    }

    /// Time has passed: [`Binlog::next_to_move`] may have something.
    pub fn tick(&mut self, now: Nanos) {
        self.iteration_at = now;
        if self.idle_step_at <= now && self.wants_compaction() {
            self.idle_step_at = now + if self.is_blocked { STUCK_PAUSE } else { IDLE_PAUSE };
            self.debt_bytes = self.debt_bytes.max(IDLE_STEP.min(self.file_size()));
        }
    }
}
