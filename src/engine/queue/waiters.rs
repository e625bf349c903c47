//! The story of waiting: how workers and tubes find each other.
//!
//! Two questions are asked all day. A job became ready: which of the connections that
//! watch its tube has waited longest? And a worker asks for a job: which of the tubes it
//! watches offers the best one? A worker may watch a thousand tubes and a tube may have a
//! thousand workers, so neither side can afford to keep the other up to date at each
//! step. Both answers are therefore kept lazily, for each pair of a connection and a tube
//! it watches, in a [`Watch`]:
//!
//! ```text
//!      connection                     watch                        tube
//!   out_of_line  ──(not in line)──  place in line  ──(in line)──  line     (oldest ticket first)
//!   unsure       ──(look again)───  view           ──(settled)──  settled
//!   offers  (best first)  ────────  place in offers
//! ```
//!
//! **The line.** A connection that begins to wait draws a ticket and joins the line of each
//! watched tube in which it does not stand already. When it stops waiting, it stays where
//! it stands. Who looks for the longest-waiting one takes the front of the line: somebody
//! who no longer waits is sent out of the line, somebody who waits with a newer ticket is
//! moved back to where that belongs. A ticket in line is never newer than the one its
//! holder has, so the first that is true is the oldest. Each step of that work was paid
//! for by an earlier wait.
//!
//! **The offers.** A connection files each watched tube under the best job it offered when
//! last looked at. When a tube's offer gets worse or goes, nothing is done: the connection
//! finds out when it comes to it. When it gets better, all connections that were settled
//! about that tube become unsure of it, once, and look again when they next ask. So what
//! is filed is never worse than what is there, and the first that is true is the best.
//!
//! After each command this holds: nobody waits while a tube that he watches has an offer.

use super::Queue;
use super::job::ReadyEntry;
use super::tube::Tube;
use crate::engine::collections::hash_index::{HashSlab, Keyed};
use crate::engine::collections::heap::{Entry, Heap, rank};
use crate::engine::collections::list::{Linked, Links, List};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::NIL;
use crate::engine::keys::{ConnKey, Key, TubeKey, WatchKey};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::num::NonZero;

/// One connection watching one tube.
#[derive(Debug)]
pub struct Watch {
    conn: ConnKey,
    tube: TubeKey,
    /// The neighbours in the connection's lists and in the tube's, by [`ALL`] and the others.
    links: [Links; 3],
    /// Half of the hash: as many bits as there can be watches.
    hash: u32,
    /// The next watch in the same bucket of the index.
    next_in_bucket: u32,
    /// The place in the tube's line; [`NIL`] out of line.
    place_in_line: u32,
    /// The place among the connection's offers; [`NIL`] when it filed none.
    place_in_offers: u32,
    /// Whether the connection must look again before it trusts what it filed.
    is_dirty: bool,
}

/// The lists in which a watch stands: all of its connection; those of its connection that stand
/// in no line; and the tube's `clean` or else the connection's `dirty`.
const ALL: usize = 0;
const OUT_OF_LINE: usize = 1;
pub(super) const FRESHNESS: usize = 2;

/// All watches.
pub type Watches = HashSlab<WatchKey, Watch>;

/// What a connection knows of the tubes that it watches.
#[derive(Debug, Default)]
pub struct Watching {
    /// Its watches, as `list-tubes-watched` lists them.
    all: List<ALL>,
    /// Those that do not stand in their tube's line.
    not_queued: List<OUT_OF_LINE>,
    /// Those whose tube may offer something better than what was filed.
    dirty: List<FRESHNESS>,
    /// What the others offered when last looked at; nothing for who never watched a second tube.
    offers: Option<Box<Heap<Offer>>>,
    /// None while not waiting.
    pub(super) wait: Option<Wait>,
}

/// What the tubes that a connection watches offer it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Offered {
    /// The best of their ready jobs.
    Job(ReadyEntry),
    /// No job.
    Nothing,
    /// The step limit was reached before all tubes were checked.
    Unknown,
}

impl From<Option<ReadyEntry>> for Offered {
    fn from(offer: Option<ReadyEntry>) -> Offered {
        offer.map_or(Offered::Nothing, Offered::Job)
    }
}

/// Counts one step down, if any is left.
fn take_step(steps_left: &mut usize) -> bool {
    let has_one = *steps_left > 0;
    *steps_left -= usize::from(has_one);
    has_one
}

/// A wait for a job.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// Drawn at its beginning.
    pub ticket: WaitSeq,
    /// When it ends in vain; never, if it is [`Nanos::NEVER`].
    pub until: Nanos,
}

/// The order in which connections began to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitSeq(NonZero<u64>);

impl WaitSeq {
    pub(super) const FIRST: WaitSeq = WaitSeq(NonZero::<u64>::MIN);

    fn next(self) -> WaitSeq {
        WaitSeq(self.0.saturating_add(1))
    }
}

/// A watch in a tube's line, under the ticket that its connection had when last looked at.
#[derive(Clone, Copy, Debug)]
pub struct Waiter {
    ticket: WaitSeq,
    watch: WatchKey,
}

/// A watch under the best job that its tube offered when last looked at.
#[derive(Clone, Copy, Debug)]
struct Offer {
    pri: u32,
    id: u64,
    watch: WatchKey,
}

impl Queue {
    /// Looks for the best job that the tubes watched by `conn` offer. A connection may watch a million
    /// tubes that have all changed, so it takes at most `steps_left` steps, and counts them down.
    ///
    /// # Errors
    /// There is no memory to file what they offer.
    pub(super) fn best_offer(
        &mut self,
        conn: ConnKey,
        steps_left: &mut usize,
    ) -> Result<Offered, TryReserveError> {
        let watching = &mut self.clients[conn].watching;
        // Most watch one tube only: there is nothing to compare, and nothing to be filed.
        if watching.len() == 1 {
            let only = watching.first(&self.watches);
            return Ok(only.and_then(|only| self.tubes[only].offer()).into());
        }
        while !watching.dirty.is_empty() {
            if !take_step(steps_left) {
                return Ok(Offered::Unknown);
            }
            headroom::leave(Headroom::ThreeQuarters, || watching.offers().try_reserve(1))?;
            let Some(key) = watching.dirty.pop_front(&mut self.watches) else { break };
            let watch = &mut self.watches[WatchKey::from_number(key)];
            watch.is_dirty = false;
            let (tube, place) = (&mut self.tubes[watch.tube], watch.place_in_offers);
            tube.clean.push_back(&mut self.watches, key);
            watching.file(WatchKey::from_number(key), place, tube.offer(), &mut self.watches);
        }
        while let Some(filed) = watching.offers().first() {
            let watch = &self.watches[filed.watch];
            let offer = self.tubes[watch.tube].offer();
            if let Some(offer) =
                offer.filter(|offer| (offer.pri, offer.id) == (filed.pri, filed.id))
            {
                return Ok(Offered::Job(offer));
            }
            if !take_step(steps_left) {
                return Ok(Offered::Unknown);
            }
            watching.file(filed.watch, watch.place_in_offers, offer, &mut self.watches);
        }
        Ok(Offered::Nothing)
    }

    /// The tube offers something better than before: whoever was settled about it must
    /// look again.
    pub(super) fn invalidate(&mut self, tube: TubeKey) {
        let clean = &mut self.tubes[tube].clean;
        while let Some(key) = clean.pop_front(&mut self.watches) {
            let watch = &mut self.watches[WatchKey::from_number(key)];
            watch.is_dirty = true;
            self.invalidated += 1;
            let conn = watch.conn;
            let dirty = &mut self.clients[conn].watching.dirty;
            dirty.push_back(&mut self.watches, key);
        }
    }

    /// Returns the ticket of a connection that begins to look for a job.
    pub fn next_wait_seq(&mut self) -> WaitSeq {
        let ticket = self.next_ticket;
        self.next_ticket = ticket.next();
        ticket
    }

    /// Enters the connection in the lines of all tubes that it watches. Returns `false` if
    /// `steps_left` was too small: then it does not wait yet, and may be removed from the lines that
    /// it has joined.
    ///
    /// # Errors
    /// There is no memory for one of the lines: the connection does not wait. It stays in those that
    /// it has joined, as after a wait.
    pub(super) fn enqueue_waiter(
        &mut self,
        conn: ConnKey,
        wait: Wait,
        steps_left: &mut usize,
    ) -> Result<bool, TryReserveError> {
        let watching = &mut self.clients[conn].watching;
        while let Some(key) = watching.not_queued.front() {
            if !take_step(steps_left) {
                return Ok(false);
            }
            let place = Waiter { ticket: wait.ticket, watch: WatchKey::from_number(key) };
            let line = &mut self.tubes[self.watches[place.watch].tube].line;
            line.try_reserve(1)?;
            watching.not_queued.pop_front(&mut self.watches);
            line.insert(place, &mut self.watches);
        }
        watching.wait = Some(wait);
        Ok(true)
    }

    /// The connection waits no more, wherever it still stands in line.
    pub(super) fn clear_wait(&mut self, conn: ConnKey) {
        self.clients[conn].watching.wait = None;
    }

    /// The connection that has waited longest of those that watch the tube.
    pub(super) fn longest_waiting(&mut self, tube: TubeKey) -> Option<ConnKey> {
        let line = &mut self.tubes[tube].line;
        while let Some(front) = line.first() {
            let conn = self.watches[front.watch].conn;
            let watching = &mut self.clients[conn].watching;
            match watching.wait {
                Some(Wait { ticket, .. }) if ticket == front.ticket => return Some(conn),
                Some(Wait { ticket, .. }) => {
                    line.replace(0, Waiter { ticket, ..front }, &mut self.watches);
                }
                None => {
                    line.remove(0, &mut self.watches);
                    self.watches[front.watch].place_in_line = NIL;
                    let out = &mut watching.not_queued;
                    out.push_back(&mut self.watches, front.watch.number());
                }
            }
        }
        None
    }

    /// The tube of a watch.
    pub fn watched_tube(&self, watch: WatchKey) -> &Tube {
        &self.tubes[self.watches[watch].tube]
    }

    /// How many of the connections that watch the tube wait.
    pub fn count_waiting(&self, tube: TubeKey) -> usize {
        self.tubes[tube].line.iter().filter(|&place| self.waits_at(place)).count()
    }

    /// Whether the connection waits that stands at this place in the line of a tube. All who wait
    /// stand in line; some who stand there do not wait.
    pub fn waits_at(&self, place: Waiter) -> bool {
        self.clients[self.watches[place.watch].conn].watching.is_waiting()
    }

    /// The connection watches the tube from now on, if it did not already.
    ///
    /// # Errors
    /// There is no memory for it.
    pub(super) fn add_watch(
        &mut self,
        conn: ConnKey,
        tube: TubeKey,
    ) -> Result<(), TryReserveError> {
        if self.find_watch(conn, tube).is_some() {
            return Ok(());
        }
        let watching = &mut self.clients[conn].watching;
        self.watches.try_reserve_one()?;
        let key = self.watches.insert(Watch {
            conn,
            tube,
            links: [Links::LOOSE; 3],
            hash: self.tubes[tube].hash_with(conn),
            next_in_bucket: NIL,
            place_in_line: NIL,
            place_in_offers: NIL,
            is_dirty: true,
        });
        watching.all.push_back(&mut self.watches, key.number());
        watching.not_queued.push_back(&mut self.watches, key.number());
        watching.dirty.push_back(&mut self.watches, key.number());
        self.tubes[tube].watching += 1;
        Ok(())
    }

    /// The watch of the tube by the connection.
    pub(super) fn find_watch(&self, conn: ConnKey, tube: TubeKey) -> Option<WatchKey> {
        let hash = self.tubes[tube].hash_with(conn);
        self.watches.find_by(hash.into(), |watch| (watch.conn, watch.tube) == (conn, tube))
    }

    /// Ends a watch, and returns the tube.
    pub(super) fn remove_watch(&mut self, key: WatchKey) -> TubeKey {
        let Watch { conn, tube: tube_key, place_in_line, place_in_offers, is_dirty, .. } =
            self.watches[key];
        let tube = tube_key;
        let watching = &mut self.clients[conn].watching;
        let tube = &mut self.tubes[tube];
        if place_in_line == NIL {
            watching.not_queued.remove(&mut self.watches, key.number());
        } else {
            tube.line.remove(place_in_line, &mut self.watches);
        }
        if place_in_offers != NIL {
            watching.offers().remove(place_in_offers, &mut self.watches);
        }
        let view = if is_dirty { &mut watching.dirty } else { &mut tube.clean };
        view.remove(&mut self.watches, key.number());
        tube.watching -= 1;
        // Quirk: the last of the list takes the place of the one that goes; pinned by
        // tests/conversations/list-tubes-order.txt.
        watching.all.swap_remove(&mut self.watches, key.number());
        self.watches.remove(key);
        tube_key
    }

    // ---- Checking ----

    /// Every watch stands in the lists and heaps of its connection and of its tube in which it says
    /// that it stands, and in no others; who waits is found by every tube that has something for
    /// him, and no tube has.
    pub(super) fn check_watches(&self) {
        self.watches.check(format_args!("the watches"));
        // Nothing stands in two places that exclude each other: so much is looked at one by one.
        // With as many in both together as there are watches, each stands in one of them.
        let (mut all, mut not_queued, mut dirty, mut filed) = (0, 0, 0, 0);
        for (conn, client) in self.clients.iter() {
            let watching = &client.watching;
            self.check_watching(conn, watching);
            all += watching.len();
            not_queued += watching.not_queued.len() as usize;
            dirty += watching.dirty.len() as usize;
            filed += watching.offers.as_ref().map_or(0, |offers| offers.len());
        }
        let (mut in_line, mut clean) = (0, 0);
        for (key, tube) in self.tubes.entries() {
            self.check_line(key, tube);
            in_line += tube.line.len();
            clean += tube.clean.len() as usize;
        }
        let len = self.watches.len();
        assert_eq!(all, len, "watches of all connections, and watches");
        assert_eq!(in_line + not_queued, len, "watches in line and out of line, and watches");
        assert_eq!(clean + dirty, len, "watches settled and unsure, and watches");
        let is_filed = |(_, watch): &(WatchKey, &Watch)| watch.place_in_offers != NIL;
        let noted = self.watches.iter().filter(is_filed).count();
        assert_eq!(filed, noted, "offers that are filed, and watches that say so");
    }

    fn check_watching(&self, conn: ConnKey, watching: &Watching) {
        let index = conn.index();
        let watch = |key| {
            let found = self.watches.get(WatchKey::from_number(key));
            found.unwrap_or_else(|| panic!("{index} has watch {key}, which is not there"))
        };
        assert!(!watching.is_empty(), "connection {index} watches nothing");
        watching.all.check(&self.watches, format_args!("what {index} watches"), |key| {
            let Watch { conn: by, tube, .. } = *watch(key);
            let found = self.find_watch(by, tube);
            assert_eq!(by, conn, "whose watch {key} is, and by whom it is kept");
            assert_eq!(found, Some(WatchKey::from_number(key)), "the watch of {tube:?} by {index}");
        });
        let not_queued = format_args!("what {index} watches out of line");
        watching.not_queued.check(&self.watches, not_queued, |key| {
            let is_so = watch(key).conn == conn && watch(key).place_in_line == NIL;
            assert!(is_so, "watch {key} of {index} is out of line: {:?}", watch(key));
        });
        watching.dirty.check(&self.watches, format_args!("what {index} is unsure of"), |key| {
            let is_so = watch(key).conn == conn && watch(key).is_dirty;
            assert!(is_so, "{index} is unsure of watch {key}: {:?}", watch(key));
        });
        if let Some(offers) = &watching.offers {
            offers.check(&self.watches, format_args!("what {index} has filed"));
            for offer in offers.iter() {
                assert_eq!(
                    self.watches[offer.watch].conn, conn,
                    "whose {offer:?} is, and who has it"
                );
            }
        }
        if let Some(wait) = watching.wait {
            self.check_wait(conn, watching, wait);
        }
    }

    fn check_wait(&self, conn: ConnKey, watching: &Watching, wait: Wait) {
        let index = conn.index();
        let (drawn, next) = (wait.ticket.0, self.next_ticket.0);
        assert!(drawn < next, "{index} waits with ticket {drawn}, but {next} is the next one");
        let out = watching.not_queued.len();
        assert_eq!(out, 0, "lines in which {index} does not stand, though it waits");
        for tube in watching.tubes(&self.watches) {
            let Tube { name, .. } = &self.tubes[tube];
            let offer = self.tubes[tube].offer();
            assert!(offer.is_none(), "{index} waits, but tube {name} has {offer:?}");
        }
    }

    fn check_line(&self, key: TubeKey, tube: &Tube) {
        let Tube { name, line, clean, .. } = tube;
        line.check(&self.watches, format_args!("the line of tube {name}"));
        for place in line.iter() {
            let watch = &self.watches[place.watch];
            assert_eq!(watch.tube, key, "the tube of {watch:?}, and the one where it is in line");
            let wait = self.clients[watch.conn].watching.wait;
            let is_old = wait.map_or(place.ticket.0 < self.next_ticket.0, |wait| {
                place.ticket.0 <= wait.ticket.0
            });
            assert!(is_old, "{place:?} is in the line of tube {name}, but its holder has {wait:?}");
        }
        clean.check(&self.watches, format_args!("those settled about tube {name}"), |number| {
            let watch = self.watches.get(WatchKey::from_number(number)).unwrap_or_else(|| {
                panic!("watch {number} is settled about tube {name}, but not there")
            });
            let is_so = watch.tube == key && !watch.is_dirty;
            assert!(is_so, "watch {number} is settled about tube {name}: {watch:?}");
            let offers = self.clients[watch.conn].watching.offers.as_ref();
            let filed = offers.and_then(|offers| offers.get(watch.place_in_offers));
            let is_better = tube.offer().is_some_and(|offer| {
                filed.is_none_or(|filed| (offer.pri, offer.id) < (filed.pri, filed.id))
            });
            assert!(!is_better, "tube {name} has better than {filed:?}: {:?}", tube.offer());
        });
    }
}

impl Watching {
    /// How many tubes are watched.
    pub fn len(&self) -> usize {
        self.all.len() as usize
    }

    /// Whether no tube is watched; never while the connection lives.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether the connection waits for a job.
    pub fn is_waiting(&self) -> bool {
        self.wait.is_some()
    }

    /// The first of the watches.
    pub fn first_watch(&self) -> Option<WatchKey> {
        self.all.front().map(WatchKey::from_number)
    }

    /// The first of the watched tubes.
    pub fn first(&self, watches: &Watches) -> Option<TubeKey> {
        self.first_watch().map(|watch| watches[watch].tube)
    }

    /// The watch that comes after another one, in the order of `list-tubes-watched`.
    pub fn watch_after(&self, watch: WatchKey, watches: &Watches) -> Option<WatchKey> {
        self.all.after(watches, watch.number()).map(WatchKey::from_number)
    }

    /// The watched tubes, in the order of `list-tubes-watched`.
    pub fn tubes<'a>(&'a self, watches: &'a Watches) -> impl Iterator<Item = TubeKey> + Clone + 'a {
        self.all.iter(watches).map(|watch| watches[WatchKey::from_number(watch)].tube)
    }

    /// Makes what is needed to compare tubes, which cannot fail: from the second tube on.
    pub fn prepare_to_compare(&mut self) {
        self.offers();
    }

    fn offers(&mut self) -> &mut Heap<Offer> {
        self.offers.get_or_insert_default()
    }

    /// Files what the tube of `watch` offers, in the stead of what stands at `place`.
    fn file(
        &mut self,
        watch: WatchKey,
        place: u32,
        offer: Option<ReadyEntry>,
        watches: &mut Watches,
    ) {
        match offer.map(|ReadyEntry { pri, id, .. }| Offer { pri, id, watch }) {
            Some(offer) if place == NIL => self.offers().insert(offer, watches),
            Some(offer) => self.offers().replace(place, offer, watches),
            None if place == NIL => {}
            None => {
                self.offers().remove(place, watches);
                watches[watch].place_in_offers = NIL;
            }
        }
    }
}

impl Keyed for Watch {
    fn hash(&self) -> u64 {
        self.hash.into()
    }

    fn next_in_bucket(&self) -> u32 {
        self.next_in_bucket
    }

    fn next_in_bucket_mut(&mut self) -> &mut u32 {
        &mut self.next_in_bucket
    }
}

impl Entry for Waiter {
    type Store = Watches;

    fn rank(self) -> u128 {
        rank(self.ticket.0.get(), self.watch.number())
    }

    fn set_index(self, place: u32, watches: &mut Watches) {
        watches[self.watch].place_in_line = place;
    }

    fn index(self, watches: &Watches) -> Option<u32> {
        Some(watches[self.watch].place_in_line)
    }
}

impl Entry for Offer {
    type Store = Watches;

    fn rank(self) -> u128 {
        rank(self.pri, self.id)
    }

    fn set_index(self, place: u32, watches: &mut Watches) {
        watches[self.watch].place_in_offers = place;
    }

    fn index(self, watches: &Watches) -> Option<u32> {
        Some(watches[self.watch].place_in_offers)
    }
}

impl<const LIST: usize> Linked<LIST> for Watches {
    fn links(&self, key: u32) -> Links {
        self[WatchKey::from_number(key)].links[LIST]
    }

    fn set_links(&mut self, key: u32, links: Links) {
        self[WatchKey::from_number(key)].links[LIST] = links;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::queue::job::JobParams;
    use crate::engine::queue::{Outcome, StepResult, WaitResult};
    use crate::engine::text::CR_LF;
    use std::collections::{BTreeMap, BTreeSet};

    const TUBES: [&str; 6] = ["default", "a", "b", "c", "d", "e"];
    const NOW: Nanos = Nanos::from_secs(100);
    const LONG: u32 = 1_000_000;

    /// The same rules, with everything looked up anew each time.
    #[derive(Default)]
    struct Model {
        /// By id: the tube and the priority.
        ready: BTreeMap<u64, (usize, u32)>,
        held: BTreeMap<u64, (ConnKey, usize)>,
        watched: BTreeMap<ConnKey, BTreeSet<usize>>,
        /// The longest-waiting one first.
        waiting: Vec<ConnKey>,
        paused: BTreeSet<usize>,
        wait_results: Vec<(ConnKey, u64)>,
    }

    impl Model {
        fn best(&self, offered: impl Fn(usize) -> bool) -> Option<u64> {
            let offers = self
                .ready
                .iter()
                .filter(|(_, (tube, _))| offered(*tube) && !self.paused.contains(tube));
            offers.min_by_key(|&(&id, &(_, pri))| (pri, id)).map(|(&id, _)| id)
        }

        fn hold(&mut self, conn: ConnKey, id: u64) {
            let (tube, _) = self.ready.remove(&id).expect("only ready jobs are taken");
            self.held.insert(id, (conn, tube));
        }

        fn reserve(&mut self, conn: ConnKey) -> Option<u64> {
            let id = self.best(|tube| self.watched[&conn].contains(&tube))?;
            self.hold(conn, id);
            Some(id)
        }

        fn make_ready(&mut self, id: u64, tube: usize, pri: u32) {
            self.ready.insert(id, (tube, pri));
            self.serve(tube);
        }

        fn serve(&mut self, tube: usize) {
            while let Some(id) = self.best(|other| other == tube) {
                let first = self.waiting.iter().position(|conn| self.watched[conn].contains(&tube));
                let Some(first) = first else { break };
                let conn = self.waiting.remove(first);
                self.hold(conn, id);
                self.wait_results.push((conn, id));
            }
        }
    }

    fn put(queue: &mut Queue, conn: ConnKey, id: u64, tube: usize, pri: u32) {
        let terms = JobParams { pri, delay_secs: 0, ttr_secs: LONG };
        queue.use_tube(conn, TUBES[tube]).unwrap();
        let body = queue.bodies.add(CR_LF).unwrap();
        queue.put(conn, id, terms, body, NOW).unwrap();
    }

    fn reserve(queue: &mut Queue, conn: ConnKey) -> Option<u64> {
        match queue.reserve(conn, &mut usize::MAX.clone(), NOW).unwrap() {
            StepResult::Reserved(job) => Some(queue.jobs[job].id),
            StepResult::Nothing => None,
            StepResult::Unfinished => panic!("there were enough steps"),
        }
    }

    /// One random step in both worlds.
    #[expect(clippy::too_many_lines, reason = "one arm for each kind of step")]
    fn step(random: &mut fastrand::Rng, queue: &mut Queue, model: &mut Model, last_id: &mut u64) {
        let conns: Vec<ConnKey> = model.watched.keys().copied().collect();
        let tube = random.usize(..TUBES.len());
        let pri = random.u32(..4);
        let Some(&conn) = random.choice(&conns) else {
            let conn = queue.connect().unwrap();
            model.watched.insert(conn, BTreeSet::from([0]));
            return;
        };
        let is_waiting = model.waiting.contains(&conn);
        let held =
            model.held.iter().find(|(_, (by, _))| *by == conn).map(|(&id, &(_, tube))| (id, tube));
        match random.u8(..20) {
            0 if conns.len() < 12 => {
                let conn = queue.connect().unwrap();
                model.watched.insert(conn, BTreeSet::from([0]));
            }
            1 => {
                if !queue.disconnect(conn, NOW) {
                    assert_eq!(queue.close_next(&mut usize::MAX.clone(), NOW), Some(conn));
                }
                model.waiting.retain(|&waiting| waiting != conn);
                model.watched.remove(&conn);
                let mut given_up: Vec<(u64, usize)> = Vec::new();
                model.held.retain(|&id, &mut (by, tube)| {
                    given_up.extend((by == conn).then_some((id, tube)));
                    by != conn
                });
                assert!(given_up.len() <= 1, "the test holds one job at a time");
                for (id, tube) in given_up {
                    model.make_ready(id, tube, queue.jobs[queue.jobs.find(id).unwrap()].pri);
                }
            }
            2..5 if !is_waiting => {
                queue.watch(conn, TUBES[tube]).unwrap();
                model.watched.get_mut(&conn).unwrap().insert(tube);
            }
            5 if !is_waiting => {
                let watched = model.watched.get_mut(&conn).unwrap();
                let is_last = watched.len() == 1 && watched.contains(&tube);
                assert_eq!(queue.ignore(conn, TUBES[tube]), !is_last);
                if !is_last {
                    watched.remove(&tube);
                }
            }
            6 if queue.pause(TUBES[tube], LONG, NOW) => {
                model.paused.insert(tube);
            }
            7 | 8 => {
                queue.pause(TUBES[tube], 0, NOW);
                model.paused.remove(&tube);
                model.serve(tube);
            }
            9..13 if !is_waiting => {
                *last_id += 1;
                put(queue, conn, *last_id, tube, pri);
                model.make_ready(*last_id, tube, pri);
            }
            13..16 if held.is_some() && !is_waiting => {
                let (id, tube) = held.unwrap();
                model.held.remove(&id);
                if random.bool() {
                    assert_eq!(queue.release(conn, id, pri, 0, NOW), Outcome::Done);
                    model.make_ready(id, tube, pri);
                } else {
                    assert_eq!(queue.delete(conn, id), Outcome::Done);
                }
            }
            _ if held.is_none() && !is_waiting => {
                let reserved = reserve(queue, conn);
                assert_eq!(reserved, model.reserve(conn));
                if reserved.is_none() {
                    let until = Nanos::NEVER;
                    let wait = Wait { ticket: queue.next_wait_seq(), until };
                    assert!(queue.wait(conn, wait, &mut usize::MAX.clone(), NOW).unwrap());
                    model.waiting.push(conn);
                }
            }
            _ => {}
        }
        // A tube that is gone comes back without a pause.
        model.paused.retain(|&tube| queue.tubes.find(TUBES[tube]).is_some());
    }

    /// Otherwise a client could choose tubes whose watches are all in one bucket of the index.
    #[test]
    fn the_hash_of_a_watch_has_a_secret() {
        let hashes = || {
            let mut queue = Queue::new(NOW);
            let conn = queue.connect().unwrap();
            TUBES.iter().for_each(|name| queue.watch(conn, name).unwrap());
            let watches = queue.watches.iter().map(|(_, watch)| watch.hash);
            watches.collect::<Vec<u32>>()
        };
        assert_ne!(hashes(), hashes());
    }

    #[test]
    fn workers_get_the_best_jobs_in_the_order_of_their_waiting() {
        for seed in 0..30 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::new(NOW);
            let mut model = Model::default();
            let mut last_id = 0;
            for _ in 0..4_000 {
                step(&mut random, &mut queue, &mut model, &mut last_id);
                let wait_results: Vec<(ConnKey, u64)> = std::mem::take(&mut queue.wait_results)
                    .into_iter()
                    .map(|(conn, answer)| match answer {
                        WaitResult::Reserved(job) => (conn, queue.jobs[job].id),
                        WaitResult::DeadlineSoon | WaitResult::TimedOut => {
                            panic!("no time passes here")
                        }
                    })
                    .collect();
                assert_eq!(wait_results, std::mem::take(&mut model.wait_results), "seed {seed}");
                for (index, name) in TUBES.iter().enumerate() {
                    let Some(tube) = queue.tubes.find(name) else { continue };
                    let is_counted = |conn: &&ConnKey| model.watched[conn].contains(&index);
                    let waiting = model.waiting.iter().filter(is_counted).count();
                    assert_eq!(queue.count_waiting(tube), waiting);
                }
                assert_eq!(queue.totals.ready, model.ready.len() as u64);
                assert_eq!(queue.totals.reserved, model.held.len() as u64);
                assert_eq!(queue.totals.waiting, model.waiting.len() as u64);
                queue.check();
            }
            assert!(last_id > 100, "the test puts jobs");
        }
    }
}
