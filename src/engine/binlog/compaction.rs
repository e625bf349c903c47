//! Decides when live jobs are moved out of old files, out of which, and how many bytes of them.
//!
//! Superseded records are garbage. When there is too much of it, full records of live jobs are
//! written again to the current file, until their old files are free.
//! For each byte of garbage that a command makes, it moves [`MOVE_RATIO`] bytes. So all files
//! together stay below three times the live bytes plus two files; a removed file leaves that
//! sum a few iterations later. On a nearly full disk compaction begins earlier, and puts move jobs
//! too. The queue brings the jobs (`queue/log.rs`).

use super::Binlog;
use super::disk::FileNumber;
use super::files::{Files, SHORT, on_disk};
use super::syncing::RETRY_PAUSE;
use crate::engine::keys::JobKey;
use crate::engine::time::Nanos;

/// The progress of compaction.
#[derive(Debug, Default)]
pub struct Compaction {
    /// The bytes to be moved now, to keep up with the garbage.
    debt_bytes: u64,
    /// The moment of the next step that is made although no command makes garbage.
    idle_step_at: Nanos,
    /// The bytes that all files took when the last step found no space for the jobs of the file;
    /// otherwise `None`.
    blocked_disk_bytes: Option<u64>,
    /// The disk was nearly full, and there is still much garbage. Compaction continues after the first
    /// removal, so that puts are not refused again at once.
    is_freeing: bool,
    /// The job whose record the disk reads for it. It continues then.
    awaited: Option<u64>,
    /// The file whose jobs are moved.
    emptied: Option<FileNumber>,
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
/// Space is freed when there was no job for this time.
const DRAINED_PAUSE: Nanos = Nanos::from_secs(1);

impl Binlog {
    // ---- When ----

    /// Returns whether there is too much garbage, or a file is damaged.
    ///
    /// All files together hold live records, room for deletes, headroom, and garbage. The sum stays below
    /// three times the live bytes plus two files if the garbage stays below twice the live bytes minus the
    /// room for deletes and the headroom beyond a file ([`Binlog::more_headroom`]). While all live bytes
    /// are moved, commands make a quarter as many bytes of garbage ([`MOVE_RATIO`]). Compaction begins half
    /// of the live bytes earlier, and on a nearly full disk still earlier.
    fn is_compaction_wanted(&self) -> bool {
        if self.files.current == 0 || self.has_failed() {
            return false;
        }
        if self.must_free() || self.files.sums.has_damaged {
            return true;
        }
        let (live, closed) = (self.files.live_bytes, self.files.sums.closed_bytes);
        let garbage = (closed + self.files.current().used).saturating_sub(live);
        let reserved = self.files.delete_records() * SHORT + self.more_headroom();
        let most = (live + live / 2).saturating_sub(reserved).max(live / 4);
        // After a start the new files take space too, so that even this may be too much.
        garbage > most + self.space.file_size / 2 || (self.takes_too_much() && closed > 3 * live)
    }

    /// Returns whether there is much garbage, and the disk is nearly full, or was when freeing began. Only
    /// records count: the unused ends of blocks free no space.
    fn must_free(&self) -> bool {
        let live = self.files.live_bytes;
        let garbage = self.files.sums.closed_records.saturating_sub(live);
        garbage > live / 8 + self.space.file_size / 8
            && (self.compaction.is_freeing || self.is_nearly_full())
    }

    /// Notes that `bytes` of garbage were made.
    pub(super) fn charge(&mut self, bytes: u64) {
        self.compaction.is_freeing = self.must_free();
        let debt = self.compaction.debt_bytes + MOVE_RATIO * bytes;
        self.set_debt(if self.is_compaction_wanted() { debt } else { 0 });
    }

    /// Notes that a record of `bytes` was put. While a nearly full disk is freed, each put moves jobs too.
    pub(super) fn charge_put(&mut self, bytes: u64) {
        if self.compaction.is_freeing {
            self.set_debt(self.compaction.debt_bytes + MOVE_RATIO * bytes);
        }
    }

    /// Sets the bytes to be moved now. While there is no space for them, only idle steps try.
    fn set_debt(&mut self, debt: u64) {
        let disk_bytes = self.files.sums.disk_bytes;
        let has_space = self.compaction.blocked_disk_bytes.is_none_or(|bytes| disk_bytes < bytes);
        let most = self.limits.move_debt_bytes as u64;
        self.compaction.debt_bytes = if has_space { debt.min(most) } else { 0 };
    }

    fn can_move(&self) -> bool {
        !self.is_congested() && self.compaction.awaited.is_none() && !self.disk.refuses_moves()
    }

    /// Returns when the next idle step is due.
    pub(super) fn compaction_due(&self) -> Nanos {
        let is_due = self.is_compaction_wanted() && self.can_move();
        if is_due { self.compaction.idle_step_at } else { Nanos::NEVER }
    }

    /// Begins an iteration: [`Binlog::next_to_move`] may return a job then.
    pub fn tick(&mut self, now: Nanos) {
        self.now = now;
        self.compaction.is_freeing = self.must_free();
        if self.compaction.idle_step_at <= now && self.is_compaction_wanted() {
            self.compaction.idle_step_at = now + IDLE_PAUSE;
            let idle_bytes = self.limits.idle_move_bytes as u64;
            let debt = idle_bytes.min(self.space.file_size);
            self.compaction.debt_bytes = self.compaction.debt_bytes.max(debt);
        }
    }

    // ---- Which ----

    /// Returns whether jobs are to be moved now.
    pub fn must_move(&self) -> bool {
        self.compaction.debt_bytes > 0
    }

    /// Returns the job that compaction moves next, or `None` if no move is due or there is
    /// no space. The caller moves it with [`Binlog::move_to_current`] or [`Binlog::move_kept_key`].
    pub fn next_to_move(&mut self) -> Option<JobKey> {
        // The last move may have freed a file, so that no further one is wanted; and a file that waits only for one
        // that is free by now can be emptied.
        self.files.count_free(self.sync.begun);
        if !self.must_move() || !self.is_compaction_wanted() || !self.can_move() {
            return None;
        }
        // On a full or nearly full disk a file is begun only if all of its jobs fit in other files, with
        // the records of the gap that it leaves.
        let must_fit = self.compaction.is_freeing || self.is_full();
        let gap_bytes = (1 + self.files.prepared().len() as u64) * SHORT;
        let most_live = if must_fit {
            (self.room_for_moves().saturating_add(self.measure_space())).saturating_sub(gap_bytes)
        } else {
            u64::MAX
        };
        let file = self.choose_file(most_live).filter(|&(_, live_bytes)| {
            !must_fit || self.make_room_for_moves(live_bytes + gap_bytes)
        });
        let has_space = !must_fit || file.is_some();
        self.compaction.blocked_disk_bytes = (!has_space).then_some(self.files.sums.disk_bytes);
        self.compaction.emptied.take_if(|_| !has_space);
        let found = file.and_then(|(number, _)| self.files.by_number(number).first_job());
        let found = found.filter(|&job| self.reserve_move(job));
        if found.is_none() {
            self.end_step();
        }
        found
    }

    /// Returns the file whose jobs are moved next, one after the other, until it has none, and the bytes of
    /// its live records: at most `most_live`.
    fn choose_file(&mut self, most_live: u64) -> Option<(FileNumber, u64)> {
        let files = &self.files;
        let same = self.compaction.emptied.and_then(|number| files.find_file(number));
        let same = same.filter(|&index| {
            let file = &files.list[index];
            index < files.current && !file.is_empty() && file.live_bytes <= most_live
        });
        if same.is_none() {
            // A choice takes as long as moving this much.
            self.compaction.debt_bytes = self.compaction.debt_bytes.saturating_sub(CHOICE_BYTES);
        }
        let file = same
            .or_else(|| files.next_to_empty(most_live, self.now))
            .map(|index| &files.list[index]);
        self.compaction.emptied = file.map(|file| file.number);
        file.map(|file| (file.number, file.live_bytes))
    }

    /// Lets jobs be moved at the start if a file is damaged. Idle steps move what would take too long.
    pub fn move_at_start(&mut self) {
        if self.files.sums.has_damaged {
            self.compaction.debt_bytes = self.limits.moved_at_start_bytes as u64;
        }
    }

    /// Passes over a file for a second, because a record of it cannot be read. Returns whether that is new: in the
    /// minute before it could be read, or was not needed.
    pub fn pass_over(&mut self, number: FileNumber) -> bool {
        self.compaction.emptied = None;
        let until = &mut self.files.by_number(number).unreadable_until;
        let before = std::mem::replace(until, self.now + BLOCKED_PAUSE);
        before + RETRY_PAUSE < self.now
    }

    /// Ends a step, because the next job cannot be moved now.
    pub fn end_step(&mut self) {
        self.compaction.debt_bytes = 0;
        self.compaction.idle_step_at = self.now + BLOCKED_PAUSE;
    }

    /// Stops compaction until the disk has read the record of this job.
    pub fn wait_for(&mut self, id: u64) {
        self.compaction.awaited = Some(id);
    }

    /// Lets compaction continue if it waits for the record of this job. Returns whether it does.
    pub fn end_wait(&mut self, id: u64) -> bool {
        self.compaction.awaited.take_if(|awaited| *awaited == id).is_some()
    }

    /// Notes that records of `len` bytes were moved. Returns their length.
    pub(super) fn note_moved(&mut self, len: u64) -> usize {
        self.compaction.debt_bytes = self.compaction.debt_bytes.saturating_sub(len);
        usize::try_from(len).unwrap_or(usize::MAX)
    }

    // ---- Without jobs ----

    /// Returns when [`Binlog::rewind`] is due. There must have been no job for a while, or the next
    /// job would need again what was freed.
    pub(super) fn drained_due(&self) -> Nanos {
        let is_empty = self.files.job_count() == 0;
        let is_drained = is_empty && (self.files.prepared().len() > 0 || self.is_worn());
        let due = self.sync.retry_at.max(self.recorded_at + DRAINED_PAUSE);
        if is_drained { due } else { Nanos::NEVER }
    }

    /// Frees the space of all files but one, which is nearly empty. There must be no job.
    pub(super) fn rewind(&mut self) {
        if self.is_worn() {
            if self.files.prepared().len() == 0
                && let Err(error) = self.try_sizes(self.min_piece(), Binlog::create)
            {
                self.note_full(self.files.last_number() + 1, error);
                self.sync.retry_at = self.now + RETRY_PAUSE;
                return;
            }
            self.advance();
        }
        self.remove_all_prepared();
    }

    /// Returns whether a drained binlog needs another file: an eighth of the current one is used.
    fn is_worn(&self) -> bool {
        self.files.current().used > self.space.file_size / 8
    }
}

impl Files {
    /// Returns the closed file whose jobs are moved next: of the oldest one and those that can be removed before older
    /// ones, that with the most garbage for its live records. These have at most `most_live` bytes, and can be read
    /// `now`.
    fn next_to_empty(&self, most_live: u64, now: Nanos) -> Option<usize> {
        let mut best: Option<(u128, u128, usize)> = None;
        let mut older = None;
        // A damaged file leaves only as the oldest one.
        let may_leave_gaps = self.gaps_left() > 0 && !self.sums.has_damaged;
        for (index, file) in self.closed().enumerate() {
            if file.free_since.is_some() {
                continue;
            }
            let is_possible = file.live_bytes <= most_live && file.unreadable_until <= now;
            let may_go = older.is_none_or(|older| file.is_apart_from(older));
            // A file without jobs waits for older ones.
            if is_possible && may_go && !file.is_empty() {
                let live = u128::from(file.live_bytes);
                let garbage = u128::from(on_disk(file.size).saturating_sub(file.live_bytes));
                // An older one is better by an eighth: it leaves no gap.
                if best.is_none_or(|(most, least, _)| 8 * garbage * least > 9 * most * live) {
                    best = Some((garbage, live, index));
                }
            }
            if !may_leave_gaps {
                break;
            }
            older = Some(file.number);
        }
        best.map(|(_, _, index)| index)
    }
}
