//! Long lists of tubes: the list of all tubes that several connections share, and the memory of all
//! lists. [`commands::show`](super::commands::show) has the commands.

use super::headroom::{self, Headroom};
use super::keys::{ConnKey, TubeKey};
use super::limits::Limits;
use super::protocol::reply::{Reply, Word};
use super::queue::listing::ListText;
use super::queue::tube::Tubes;
use super::store::{BUFFERS_DIVISOR, Store};
use crate::engine::headroom::NoMemory;
use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

/// The lists that are being made or sent.
#[derive(Debug, Default)]
pub struct Lists {
    /// The connections that get the present list of all tubes, of which it is made or complete.
    recipients: Vec<ConnKey>,
    /// The present list of all tubes, while it is made. `None` without memory for it.
    listing: Option<Listing>,
    /// The same list, when it is complete.
    complete: Option<Rc<ListText>>,
    /// The connections that requested a list since the present one was begun. They get the next one,
    /// because a list must not be older than its request.
    requested_by: Vec<ConnKey>,
    /// The bytes of all long lists that are being made, or that some client has not read completely.
    pub bytes: Rc<Cell<u64>>,
}

/// A list of all tubes that is made in steps, while tubes are created and removed.
#[derive(Debug)]
struct Listing {
    /// The tubes that there were when it was begun, without those that were listed or are gone.
    tubes: VecDeque<TubeKey>,
    text: ListText,
}

/// All long lists take at most this many bytes of memory, or a part of `--max-memory`.
const MAX_LIST_BYTES: u64 = 64 * 1024 * 1024;

impl Lists {
    pub fn is_idle(&self) -> bool {
        self.recipients.is_empty() && self.requested_by.is_empty()
    }

    /// Adds a connection that requests a list.
    pub fn request(&mut self, key: ConnKey) -> Result<(), NoMemory> {
        headroom::keeping(Headroom::ThreeQuarters, || self.requested_by.try_reserve(1))?;
        self.requested_by.push(key);
        Ok(())
    }

    /// Forgets a connection.
    pub fn remove(&mut self, key: ConnKey) {
        self.recipients.retain(|&other| other != key);
        self.requested_by.retain(|&other| other != key);
        if self.recipients.is_empty() {
            (self.listing, self.complete) = (None, None);
        }
    }

    /// Returns how often a connection has requested a list, for checks.
    pub fn requests_of(&self, key: ConnKey) -> usize {
        let requests = self.recipients.iter().chain(&self.requested_by);
        requests.filter(|&&other| other == key).count()
    }

    /// Returns the next connection that gets its reply. With the last one the list is forgotten.
    pub fn next_reply(&mut self) -> Option<(ConnKey, Reply)> {
        let key = self.recipients.pop()?;
        let is_last = self.recipients.is_empty();
        let complete = if is_last { self.complete.take() } else { self.complete.clone() };
        Some((key, complete.map_or(Reply::Word(Word::OUT_OF_MEMORY), Reply::LongList)))
    }
}

/// Returns the number of names that a list may have that is made at once.
pub fn names_per_step(s: &Store) -> usize {
    let Limits { names_per_crowded_list, names_per_list_step, .. } = s.queue.limits;
    if s.is_crowded() { names_per_crowded_list } else { names_per_list_step }
}

/// Ensures that there is memory for a long list of which `own_bytes` are made.
pub fn ensure_fits(s: &Store, own_bytes: u64) -> Result<(), Word> {
    let max = MAX_LIST_BYTES.min(s.queue.settings.max_memory_bytes / BUFFERS_DIVISOR);
    let bytes = s.lists.bytes.get();
    if bytes == own_bytes || bytes < max { Ok(()) } else { Err(Word::OUT_OF_MEMORY) }
}

/// Adds tubes to the list of all tubes. Returns whether it is complete, or has failed: then
/// [`Lists::next_reply`] returns the connections that wait for it.
pub fn list_step(s: &mut Store) -> bool {
    let Store { lists, queue, .. } = s;
    if lists.is_idle() {
        return false;
    }
    if lists.recipients.is_empty() {
        // The connections that requested a list until now get this one.
        lists.recipients = std::mem::take(&mut lists.requested_by);
        lists.listing = Listing::begin(&queue.tubes, &lists.bytes).ok();
    }
    let Some(mut listing) = lists.listing.take() else { return true };
    match listing.step(&queue.tubes, queue.limits.names_per_list_step) {
        Ok(true) => lists.complete = Some(Rc::new(listing.text)),
        Ok(false) => lists.listing = Some(listing),
        Err(_) => {}
    }
    lists.listing.is_none()
}

impl Listing {
    fn begin(tubes: &Tubes, all_bytes: &Rc<Cell<u64>>) -> Result<Listing, NoMemory> {
        let mut keys = Vec::new();
        headroom::keeping(Headroom::ThreeQuarters, || keys.try_reserve_exact(tubes.len()))?;
        keys.extend((0..tubes.len()).map(|index| tubes.at(index)));
        Ok(Listing { tubes: keys.into(), text: ListText::new(all_bytes)? })
    }

    /// Lists at most `most` tubes. A tube that exists during all steps is listed once. Returns whether the list is
    /// complete.
    fn step(&mut self, tubes: &Tubes, most: usize) -> Result<bool, NoMemory> {
        let count = self.tubes.len().min(most);
        for key in self.tubes.drain(..count) {
            tubes.get(key).map_or(Ok(()), |tube| self.text.push_name(&tube.name))?;
        }
        Ok(self.tubes.is_empty())
    }
}
