//! `list-tubes` and `list-tubes-watched`. A list of more than 1,024 tubes is made in steps, and shared
//! by all connections that asked for it.

use super::{BUFFERS_PART, STEPS_FREE, Server};
use crate::engine::conn::Phase;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::ConnKey;
use crate::engine::protocol::reply::Reply;
use crate::engine::protocol::stats::{self};
use crate::engine::queue::listing::{LISTED_AT_ONCE, ListText};
use crate::engine::queue::tube::Listed;
use std::collections::TryReserveError;
use std::rc::{Rc, Weak};

/// One unit for this many names in a list.
const LISTED_PER_WORK: usize = 4;
const LISTED_WHEN_CROWDED: usize = 16;
/// A list that several connections have asked for is sent to this many of them in an iteration.
const LISTS_SENT_AT_ONCE: usize = 64;
/// Limits the memory of long lists that are being made or were not read yet, as does an eighth of what
/// `--max-memory` allows. A list beyond that is refused, unless it is the only one.
const LISTS_MOST_BYTES: u64 = 64 * 1024 * 1024;

/// Lists of very many tubes.
#[derive(Debug, Default)]
pub(super) struct Lists {
    /// The connections that get the list that is being made, or sent.
    pub(super) made_for: Vec<ConnKey>,
    /// The list, once it is complete.
    made: Option<Rc<ListText>>,
    /// The connections that have asked since that list was begun.
    pub(super) wanted_by: Vec<ConnKey>,
    /// All complete lists of which a connection may still have to be sent a part.
    unread: Vec<Weak<ListText>>,
    /// The bytes of all lists of watched tubes that are not complete yet.
    incomplete_bytes: u64,
}

impl Lists {
    pub(super) fn is_idle(&self) -> bool {
        self.made_for.is_empty() && self.wanted_by.is_empty()
    }

    /// Makes sure that one more connection can ask, and one more list be noted.
    fn try_reserve(&mut self) -> Result<(), TryReserveError> {
        self.unread.try_reserve(1)?;
        self.wanted_by.try_reserve(1)
    }

    /// A list is about to be sent.
    fn note(&mut self, text: &Rc<ListText>) {
        self.unread.push(Rc::downgrade(text));
    }

    /// Returns how many bytes all lists have that are being made or are still to be sent.
    fn bytes(&mut self) -> u64 {
        self.unread.retain(|text| text.strong_count() > 0);
        let lens =
            self.unread.iter().filter_map(|text| text.upgrade().map(|text| text.len() as u64));
        lens.sum::<u64>() + self.incomplete_bytes
    }

    /// The connection is gone.
    fn forget(&mut self, key: ConnKey) {
        self.made_for.retain(|&other| other != key);
        self.wanted_by.retain(|&other| other != key);
        if self.made_for.is_empty() {
            self.made = None;
        }
    }
}

impl Server {
    // ---- Lists ----

    pub(super) fn list_tubes(&mut self, key: ConnKey) {
        let tubes = &self.queue.tubes;
        if tubes.len() <= self.listed_at_once() {
            let text = stats::list(tubes.iter().map(|tube| &*tube.name));
            self.budget.charge_share(tubes.len().saturating_sub(STEPS_FREE) / LISTED_PER_WORK);
            return self.say_list(key, text);
        }
        let has_memory = headroom::leave(Headroom::ThreeQuarters, || self.lists.try_reserve());
        if has_memory.is_err() || !self.may_list(0) {
            return self.reply(key, Reply::OutOfMemory);
        }
        self.lists.wanted_by.push(key);
        self.conns[key].phase = Phase::Listing;
    }

    pub(super) fn list_tubes_watched(&mut self, key: ConnKey) {
        let queue = &self.queue;
        let watching = &queue.clients[key].watching;
        let count = watching.len();
        if count <= self.listed_at_once() {
            let watched = watching.tubes(&queue.watches);
            let text = stats::list(watched.map(|tube| &*queue.tubes[tube].name));
            self.budget.charge_share(count.saturating_sub(STEPS_FREE) / LISTED_PER_WORK);
            return self.say_list(key, text);
        }
        let first = watching.first_watch();
        match (ListText::new(), first) {
            (Ok(text), Some(first)) if self.may_list(0) => {
                self.lists.incomplete_bytes += text.len() as u64;
                self.conns[key].phase = Phase::ListingWatched(text, first);
            }
            _ => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Adds some more tubes to the list of those that a connection watches.
    pub(super) fn go_on_listing_watched(&mut self, key: ConnKey) {
        let phase = std::mem::take(&mut self.conns[key].phase);
        let Phase::ListingWatched(mut text, first) = phase else { return };
        self.budget.charge_share(LISTED_AT_ONCE / LISTED_PER_WORK);
        self.lists.incomplete_bytes -= text.len() as u64;
        let mut next = Some(first);
        for _ in 0..LISTED_AT_ONCE {
            let Some(watch) = next else { break };
            if text.push_name(&self.queue.watched_tube(watch).name).is_err() {
                return self.reply(key, Reply::OutOfMemory);
            }
            next = self.queue.clients[key].watching.watch_after(watch, &self.queue.watches);
        }
        let has_memory = headroom::leave(Headroom::ThreeQuarters, || self.lists.try_reserve());
        if has_memory.is_err() || !self.may_list(text.len() as u64) {
            return self.reply(key, Reply::OutOfMemory);
        }
        if let Some(next) = next {
            self.lists.incomplete_bytes += text.len() as u64;
            self.conns[key].phase = Phase::ListingWatched(text, next);
        } else if text.finish().is_ok() {
            let text = Rc::new(text);
            self.lists.note(&text);
            self.reply(key, Reply::LongList { text: &text });
        } else {
            self.reply(key, Reply::OutOfMemory);
        }
    }

    /// Returns how many names are listed at once, in a reply of its own. When memory for replies is
    /// short, they are few, and longer lists are shared.
    fn listed_at_once(&self) -> usize {
        if self.conns.are_crowded() { LISTED_WHEN_CROWDED } else { LISTED_AT_ONCE }
    }

    /// Returns whether a list of `own_bytes` bytes may be made and sent beside the others that there
    /// are. One list may always be, however long it is.
    fn may_list(&mut self, own_bytes: u64) -> bool {
        let most = LISTS_MOST_BYTES.min(self.settings.max_memory_bytes / BUFFERS_PART);
        let others = self.lists.bytes();
        others == 0 || others + own_bytes < most
    }

    /// The connection does not get the list for which it waits.
    pub(super) fn forget_list(&mut self, key: ConnKey) {
        let phase = &self.conns[key].phase;
        if matches!(phase, Phase::Listing) {
            self.lists.forget(key);
            if self.lists.made_for.is_empty() {
                self.queue.tubes.give_up_listing();
            }
        } else if let Phase::ListingWatched(text, _) = phase {
            self.lists.incomplete_bytes -= text.len() as u64;
        }
    }

    /// Adds the next tubes to the list of all tubes, and sends a complete list to some of the
    /// connections that wait for it.
    pub(super) fn list_step(&mut self) {
        if self.lists.is_idle() {
            return;
        }
        if self.lists.made.is_none() {
            if self.lists.made_for.is_empty() {
                // All connections that have asked until now get the next list.
                self.lists.made_for = std::mem::take(&mut self.lists.wanted_by);
                // Without memory for its beginning, the next call returns `NoMemory`.
                let _ = self.queue.tubes.begin_listing();
            }
            let mut steps_left = LISTED_AT_ONCE;
            match self.queue.tubes.list_step(&mut steps_left) {
                Listed::Unfinished => return,
                Listed::NoMemory => {}
                Listed::Whole(text) => {
                    let text = Rc::new(text);
                    self.lists.note(&text);
                    self.lists.made = Some(text);
                }
            }
        }
        for _ in 0..LISTS_SENT_AT_ONCE {
            let Some(key) = self.lists.made_for.pop() else { break };
            self.conns[key].phase = Phase::Line;
            match self.lists.made.clone() {
                Some(text) => self.reply(key, Reply::LongList { text: &text }),
                None => self.reply(key, Reply::OutOfMemory),
            }
        }
        if self.lists.made_for.is_empty() {
            self.lists.made = None;
        }
    }
}
