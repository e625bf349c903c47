//! Syncs records, and knows which files have records that are not synced.
//!
//! A closed file with such records stays open until the next sync. With an interval between
//! syncs, the disk is asked early to start writing, so that the sync itself is short.

use super::disk::FileNumber;
use super::files::{BLOCK, Files};
use super::segments::Segment;
use crate::engine::time::Nanos;

/// The moment at which records are made to survive a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syncing {
    /// Before the replies of the same iteration leave.
    EachIteration,
    /// At most this long after they were made.
    Within(Nanos),
    /// Never: the system decides.
    Never,
}

/// The policy, and what is not synced yet.
#[derive(Debug)]
pub struct SyncState {
    policy: Syncing,
    /// The moment of the oldest record that is not synced.
    unsynced_since: Option<Nanos>,
    /// The file, and the offset up to which the disk was asked to start writing it.
    begun: (FileNumber, u64),
    /// Closed files with records that are not synced.
    unsynced_closed: Vec<FileNumber>,
}

/// At most this many closed files stay open for the next sync.
const MAX_UNSYNCED_CLOSED: usize = 2;

/// The disk is asked to start writing when this many bytes wait for a sync.
const LONG_SYNC: u64 = 128 * 1024;

/// A sync begins this much before it is due, because it takes time; but at most a quarter of the
/// interval before.
const SYNC_MARGIN: Nanos = Nanos::from_millis(5);

impl SyncState {
    /// Returns the state of a binlog without records.
    pub fn new(policy: Syncing) -> SyncState {
        SyncState { policy, unsynced_since: None, begun: (0, 0), unsynced_closed: Vec::new() }
    }

    /// Returns whether each iteration with records ends in a sync.
    pub fn is_each_iteration(&self) -> bool {
        self.policy == Syncing::EachIteration
    }

    fn is_enabled(&self) -> bool {
        self.policy != Syncing::Never
    }

    /// Notes that a record was made at `now`.
    pub fn note_record(&mut self, now: Nanos) {
        self.unsynced_since.get_or_insert(now);
    }

    /// Returns when the next sync is due, or `None` if there is nothing to sync.
    pub fn due(&self) -> Option<Nanos> {
        let since = self.unsynced_since?;
        match self.policy {
            Syncing::EachIteration => Some(since),
            Syncing::Within(span) => {
                let quarter = Nanos::from_nanos(span.as_nanos() / 4);
                Some(since + span.since(quarter.min(SYNC_MARGIN)))
            }
            Syncing::Never => None,
        }
    }

    /// Asks the disk to start writing if many bytes wait for a sync that is not due yet.
    pub fn begin_if_long(&mut self, files: &mut Files) {
        let is_due_later = matches!(self.policy, Syncing::Within(_));
        let Segment { number, used, .. } = *files.current();
        let (begun_in, begun) = self.begun;
        let begun = if begun_in == number { begun } else { 0 };
        // The last block will be written again.
        let end = used - used % BLOCK;
        if is_due_later && end.saturating_sub(begun) >= LONG_SYNC && !files.disk().has_failed() {
            files.disk_mut().begin_sync(number, begun, end - begun);
            self.begun = (number, end);
        }
    }

    /// Syncs all files with records that are not synced.
    pub fn sync(&mut self, files: &mut Files) {
        if self.unsynced_since.take().is_none() || !self.is_enabled() || files.disk().has_failed() {
            return;
        }
        for number in self.unsynced_closed.drain(..) {
            files.disk_mut().sync(number);
            files.disk_mut().raw().close(number);
        }
        let Segment { number, used, .. } = *files.current();
        files.disk_mut().sync(number);
        self.begun = (number, used);
    }

    /// Closes the current file, now or after the next sync. It will not be written any more.
    pub fn close_current(&mut self, files: &mut Files) {
        if self.unsynced_closed.len() == MAX_UNSYNCED_CLOSED {
            self.sync(files);
        }
        let number = files.current().number;
        if self.unsynced_since.is_some() && self.is_enabled() {
            self.unsynced_closed.push(number);
        } else {
            files.disk_mut().raw().close(number);
        }
    }

    /// Checks that the files to be synced exist, and that something is to be synced if `must_sync`.
    pub fn check(&self, files: &Files, must_sync: bool) {
        assert!(
            !must_sync || self.unsynced_since.is_some(),
            "records wait to be written, but nothing is to be synced"
        );
        let Segment { number: current, used, .. } = *files.current();
        let (begun_in, begun) = self.begun;
        assert!(
            begun_in < current || (begun_in == current && begun <= used),
            "a sync of binlog.{begun_in} was begun up to {begun}: binlog.{current} ends at {used}"
        );
        let closed = &self.unsynced_closed;
        let oldest = files.segments()[0].number;
        let numbers = closed.iter().copied().chain([current]);
        assert!(
            numbers.is_sorted_by(|before, after| before < after)
                && closed.first().is_none_or(|&first| first >= oldest),
            "{closed:?} are to be synced, from binlog.{oldest} to before binlog.{current}"
        );
        let is_wanted = self.is_enabled()
            && (self.unsynced_since.is_some() || files.disk().has_failed())
            && closed.len() <= MAX_UNSYNCED_CLOSED;
        assert!(closed.is_empty() || is_wanted, "{closed:?} are kept to be synced, but never are");
    }
}
