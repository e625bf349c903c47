//! Syncs records, and knows which files have records that are not synced.
//!
//! A closed file with such records stays open until the next sync begins. With an interval between
//! syncs, the disk is asked early to start writing, so that the sync itself is short. A disk that can
//! sync in the background then does so, one sync at a time.
//!
//! A free file may be removed once the records that have made it free are synced.

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
    /// The file, and the offset up to which it was synced, or announced to be
    /// ([`Disk::will_sync`](super::disk::Disk::will_sync)).
    announced: (FileNumber, u64),
    /// Closed files with records that are not synced, and for which no sync was begun.
    unsynced_closed: Vec<FileNumber>,
    has_background_sync: bool,
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
        SyncState {
            policy,
            unsynced_since: None,
            announced: (0, 0),
            unsynced_closed: Vec::new(),
            has_background_sync: false,
        }
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

    /// Returns when the next sync is due, or `None` if there is nothing to sync, or if there is a background
    /// sync.
    pub fn due(&self) -> Option<Nanos> {
        let since = self.unsynced_since.filter(|_| !self.has_background_sync())?;
        match self.policy {
            Syncing::EachIteration => Some(since),
            Syncing::Within(span) => {
                let quarter = Nanos::from_nanos(span.as_nanos() / 4);
                Some(since + span.since(quarter.min(SYNC_MARGIN)))
            }
            Syncing::Never => None,
        }
    }

    /// Returns whether there is a background sync. When it has ended, the loop is woken.
    pub fn has_background_sync(&self) -> bool {
        self.has_background_sync
    }

    /// Asks the disk to start writing if many bytes wait for a sync that is not due yet.
    pub fn announce_if_long(&mut self, files: &mut Files) {
        let is_due_later = matches!(self.policy, Syncing::Within(_));
        let Segment { number, used, .. } = *files.current();
        let (announced_in, announced) = self.announced;
        let announced = if announced_in == number { announced } else { 0 };
        // The last block will be written again.
        let end = used - used % BLOCK;
        if is_due_later && end.saturating_sub(announced) >= LONG_SYNC && !files.disk().has_failed()
        {
            files.disk_mut().will_sync(number, announced, end - announced);
            self.announced = (number, end);
        }
    }

    /// Syncs the names of files, and all files with records that are not synced: in the background, if the
    /// disk can and replies do not wait for it. Then only one is begun at a time.
    pub fn request(&mut self, files: &mut Files) {
        if self.has_background_sync() {
            return;
        }
        let Segment { number, used, .. } = *files.current();
        let has_records = self.unsynced_since.is_some();
        let is_needed = has_records || files.disk().has_changed_names();
        let may_be_in_background = is_needed && matches!(self.policy, Syncing::Within(_));
        if has_records {
            self.unsynced_closed.push(number);
        }
        let is_begun = may_be_in_background && files.disk_mut().begin_sync(&self.unsynced_closed);
        if has_records {
            self.unsynced_closed.pop();
        }
        if !is_begun {
            return self.sync(files);
        }
        for number in self.unsynced_closed.drain(..) {
            files.disk_mut().raw().close(number);
        }
        self.unsynced_since = None;
        self.announced = (number, used);
        self.has_background_sync = true;
        files.note_sync_begun();
    }

    /// Takes the result of the background sync, if it has ended. Waits for its end if it `must_wait`.
    pub fn poll(&mut self, files: &mut Files, must_wait: bool) {
        if self.has_background_sync && files.disk_mut().poll_sync(must_wait) {
            self.has_background_sync = false;
            files.note_sync_ended();
        }
    }

    /// Syncs the names of files, and all files with records that are not synced, and waits for that.
    pub fn sync(&mut self, files: &mut Files) {
        self.poll(files, true);
        files.note_sync_begun();
        files.disk_mut().sync_names();
        if self.unsynced_since.take().is_some() && self.is_enabled() && !files.disk().has_failed() {
            self.sync_files(files);
        }
        files.note_sync_ended();
    }

    fn sync_files(&mut self, files: &mut Files) {
        for number in self.unsynced_closed.drain(..) {
            files.disk_mut().sync(number);
            files.disk_mut().raw().close(number);
        }
        let Segment { number, used, .. } = *files.current();
        files.disk_mut().sync(number);
        self.announced = (number, used);
    }

    /// Closes the current file, now or after the next sync. It will not be written any more.
    pub fn close_current(&mut self, files: &mut Files) {
        if self.unsynced_closed.len() == MAX_UNSYNCED_CLOSED {
            self.request(files);
        }
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
        let (announced_in, announced) = self.announced;
        assert!(
            announced_in < current || (announced_in == current && announced <= used),
            "a sync of binlog.{announced_in} was announced up to {announced}: binlog.{current} ends at \
             {used}"
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
