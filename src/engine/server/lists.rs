//! `list-tubes` and `list-tubes-watched`. A list of more than 1,024 tubes is made in steps. A long
//! list of all tubes is shared by the connections that requested it.

use super::{BUFFERS_DIVISOR, Server};
use crate::engine::conn::{Continuation, Phase};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{ConnKey, WatchKey};
use crate::engine::limits::Limits;
use crate::engine::protocol::reply::Reply;
use crate::engine::protocol::stats;
use crate::engine::queue::listing::ListText;
use crate::engine::queue::tube::Listed;
use std::collections::TryReserveError;
use std::rc::{Rc, Weak};

/// Listing this many names is one unit of work.
const NAMES_PER_WORK: usize = 4;
/// The maximum memory of long lists that are incomplete or unread; an eighth of `--max-memory` if
/// that is less. Further lists are refused, but one list is always allowed.
const MAX_LIST_BYTES: u64 = 64 * 1024 * 1024;

/// Lists of more than 1,024 tubes.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// The connections that get the list that is being made or sent.
    pub(super) recipients: Vec<ConnKey>,
    /// That list, once it is complete.
    complete: Option<Rc<ListText>>,
    /// The connections that requested a list after that one was begun.
    pub(super) requested_by: Vec<ConnKey>,
    /// The complete lists that connections may not have read.
    unread: Vec<Weak<ListText>>,
    /// The bytes of the incomplete lists of watched tubes.
    incomplete_bytes: u64,
}

impl Lists {
    pub(super) fn is_idle(&self) -> bool {
        self.recipients.is_empty() && self.requested_by.is_empty()
    }

    /// Ensures that one more request and one more complete list need no memory.
    fn try_reserve(&mut self) -> Result<(), TryReserveError> {
        self.unread.try_reserve(1)?;
        self.requested_by.try_reserve(1)
    }

    /// Counts a complete list until all connections have read it.
    fn track(&mut self, text: &Rc<ListText>) {
        self.unread.push(Rc::downgrade(text));
    }

    /// Returns the bytes of all lists that are incomplete or unread.
    fn bytes(&mut self) -> u64 {
        self.unread.retain(|text| text.strong_count() > 0);
        let lens =
            self.unread.iter().filter_map(|text| text.upgrade().map(|text| text.len() as u64));
        lens.sum::<u64>() + self.incomplete_bytes
    }

    /// Removes the requests of a connection.
    fn remove(&mut self, key: ConnKey) {
        self.recipients.retain(|&other| other != key);
        self.requested_by.retain(|&other| other != key);
        if self.recipients.is_empty() {
            self.complete = None;
        }
    }
}

impl Server {
    // ---- Lists ----

    pub(super) fn list_tubes(&mut self, key: ConnKey) {
        let tubes = &self.queue.tubes;
        if tubes.len() <= self.names_per_step() {
            let text = stats::list(tubes.iter().map(|tube| &*tube.name));
            self.charge_names(tubes.len());
            return self.reply_list(key, text);
        }
        let has_memory = headroom::leave(Headroom::ThreeQuarters, || self.lists.try_reserve());
        if has_memory.is_err() || !self.fits_list_limit(0) {
            return self.reply(key, Reply::OutOfMemory);
        }
        self.lists.requested_by.push(key);
        self.conns[key].phase = Phase::ListingTubes;
    }

    pub(super) fn list_tubes_watched(&mut self, key: ConnKey) {
        let queue = &self.queue;
        let watching = &queue.clients[key].watching;
        let count = watching.len();
        if count <= self.names_per_step() {
            let watched = watching.tubes(&queue.watches);
            let text = stats::list(watched.map(|tube| &*queue.tubes[tube].name));
            self.charge_names(count);
            return self.reply_list(key, text);
        }
        let first = watching.first_watch();
        match (ListText::new(), first) {
            (Ok(text), Some(first)) if self.fits_list_limit(0) => {
                self.lists.incomplete_bytes += text.len() as u64;
                self.continue_later(key, Continuation::ListWatched(text, first));
            }
            _ => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Adds the next tubes to a connection's list of watched tubes.
    pub(super) fn list_watched_step(&mut self, key: ConnKey, mut text: ListText, first: WatchKey) {
        let names_per_step = self.queue.limits.names_per_list_step;
        self.budget.charge_share(names_per_step / NAMES_PER_WORK);
        self.lists.incomplete_bytes -= text.len() as u64;
        let mut next = Some(first);
        for _ in 0..names_per_step {
            let Some(watch) = next else { break };
            if text.push_name(&self.queue.watched_tube(watch).name).is_err() {
                return self.reply(key, Reply::OutOfMemory);
            }
            next = self.queue.clients[key].watching.watch_after(watch, &self.queue.watches);
        }
        let has_memory = headroom::leave(Headroom::ThreeQuarters, || self.lists.try_reserve());
        if has_memory.is_err() || !self.fits_list_limit(text.len() as u64) {
            return self.reply(key, Reply::OutOfMemory);
        }
        if let Some(next) = next {
            self.lists.incomplete_bytes += text.len() as u64;
            self.continue_later(key, Continuation::ListWatched(text, next));
        } else if text.finish().is_ok() {
            let text = Rc::new(text);
            self.lists.track(&text);
            self.reply(key, Reply::LongList { text: &text });
        } else {
            self.reply(key, Reply::OutOfMemory);
        }
    }

    /// Returns the maximum number of names of a list that is made in one step, for one reply. It is
    /// low when memory for replies is short, so that longer lists are shared.
    fn names_per_step(&self) -> usize {
        let Limits { names_per_crowded_list, names_per_list_step, .. } = self.queue.limits;
        if self.conns.are_crowded() { names_per_crowded_list } else { names_per_list_step }
    }

    /// Charges a list that is made in one step.
    fn charge_names(&mut self, count: usize) {
        let charged = count.saturating_sub(self.queue.limits.free_steps);
        self.budget.charge_share(charged / NAMES_PER_WORK);
    }

    /// Returns whether a list of `own_bytes` bytes may be made next to the other lists. One list is
    /// always allowed.
    fn fits_list_limit(&mut self, own_bytes: u64) -> bool {
        let max = MAX_LIST_BYTES.min(self.settings.max_memory_bytes / BUFFERS_DIVISOR);
        let other_bytes = self.lists.bytes();
        other_bytes == 0 || other_bytes + own_bytes < max
    }

    /// Cancels the list that a connection requested.
    pub(super) fn cancel_list(&mut self, key: ConnKey) {
        let phase = &self.conns[key].phase;
        if matches!(phase, Phase::ListingTubes) {
            self.lists.remove(key);
            if self.lists.recipients.is_empty() {
                self.queue.tubes.drop_listing();
            }
        } else if let Phase::InSteps(Continuation::ListWatched(text, _)) = phase {
            self.lists.incomplete_bytes -= text.len() as u64;
        }
    }

    /// Adds the next tubes to the list of all tubes. Sends a complete list to some of the
    /// connections that requested it.
    pub(super) fn list_step(&mut self) {
        if self.lists.is_idle() {
            return;
        }
        if self.lists.complete.is_none() {
            if self.lists.recipients.is_empty() {
                // The connections that requested a list until now get this one.
                self.lists.recipients = std::mem::take(&mut self.lists.requested_by);
                // Without memory for its beginning, `list_step` returns `NoMemory`.
                let _ = self.queue.tubes.begin_listing();
            }
            let mut steps_left = self.queue.limits.names_per_list_step;
            match self.queue.tubes.list_step(&mut steps_left) {
                Listed::Unfinished => return,
                Listed::NoMemory => {}
                Listed::Complete(text) => {
                    let text = Rc::new(text);
                    self.lists.track(&text);
                    self.lists.complete = Some(text);
                }
            }
        }
        for _ in 0..self.queue.limits.lists_sent_per_tick {
            let Some(key) = self.lists.recipients.pop() else { break };
            self.conns[key].phase = Phase::ReadingLine;
            match self.lists.complete.clone() {
                Some(text) => self.reply(key, Reply::LongList { text: &text }),
                None => self.reply(key, Reply::OutOfMemory),
            }
        }
        if self.lists.recipients.is_empty() {
            self.lists.complete = None;
        }
    }
}
