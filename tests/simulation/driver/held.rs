//! Replies that wait until a remote disk has stored all changes before them.
//!
//! The replies of an iteration wait for the last change of its commit. They may be sent once that
//! change is stored. They must be sent once the changes are stored that were made until then: the engine
//! may let them wait for later replies of the same client, but not without end.
//! On a local disk nothing waits.

use crate::harness::fake_disk::Stored;
use std::collections::VecDeque;

/// The unsent replies of a client, by the iterations that made them.
#[derive(Debug, Default)]
pub(super) struct HeldReplies {
    /// The number of bytes that were sent, since the connection began.
    sent: usize,
    /// The oldest first.
    groups: VecDeque<Group>,
}

/// The replies of an iteration.
#[derive(Debug)]
struct Group {
    /// Where they end in all output of the connection.
    end: usize,
    /// The last change of the commit.
    change: u64,
    /// Once this change is stored, the replies must be sent.
    due: Option<u64>,
}

impl HeldReplies {
    /// The server has committed with `unsent` bytes of output.
    pub(super) fn commit(&mut self, unsent: usize, progress: Stored) {
        let end = self.sent + unsent;
        if self.groups.back().map_or(self.sent, |last| last.end) < end {
            self.groups.push_back(Group { end, change: progress.made, due: None });
        }
        for group in &mut self.groups {
            if group.due.is_none() && group.change <= progress.stored {
                group.due = Some(progress.made);
            }
        }
    }

    /// Returns how many bytes may be sent.
    pub(super) fn allowed(&self, progress: Stored) -> usize {
        self.len_of(|group| group.change <= progress.stored)
    }

    /// Returns how many bytes must be sent.
    pub(super) fn required(&self, progress: Stored) -> usize {
        self.len_of(|group| group.due.is_some_and(|due| due <= progress.stored))
    }

    fn len_of(&self, is_it: impl Fn(&Group) -> bool) -> usize {
        let last = self.groups.iter().rfind(|group| is_it(group));
        last.map_or(0, |last| last.end - self.sent)
    }

    /// The client has received the next `count` bytes.
    pub(super) fn sent(&mut self, count: usize) {
        self.sent += count;
        while self.groups.pop_front_if(|first| first.end <= self.sent).is_some() {}
    }
}
