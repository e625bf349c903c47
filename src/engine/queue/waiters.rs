//! Matches waiting workers with tubes.
//!
//! Two questions must be answered fast. A job became ready: which connection that watches its tube
//! has waited longest? A worker reserves: which of its watched tubes has the best job? A worker may
//! watch a thousand tubes, and a tube may have a thousand workers. So neither side can update the
//! other at each change. Both answers are cached for each pair of a connection and a watched tube,
//! in a [`Watch`], and corrected on the next search:
//!
//! ```text
//!      connection                  watch                     tube
//!   not_queued  ──(not queued)──  waiter_index ──(queued)── waiters  (lowest number first)
//!   dirty       ──(dirty)───────  is_dirty     ──(clean)─── clean
//!   best_jobs   ────────────────  best_index                         (best job first)
//! ```
//!
//! **Waiters.** A connection that begins to wait gets the next sequence number. It is queued at
//! each watched tube at which it is not queued yet. When its wait ends, its entries stay. A search
//! for the longest waiting connection corrects the front of the heap: it removes an entry whose
//! connection does not wait, and re-inserts an entry with an old number under the new one. The
//! number of an entry is never higher than that of its connection. So the first correct entry is
//! the longest waiting connection. Each correction is paid for by an earlier wait.
//!
//! **Best jobs.** A connection caches the best job of each watched tube. When the best job of a
//! tube is reserved or deleted, the caches stay: the next search corrects them. When a better job
//! becomes ready, all clean watches of the tube become dirty, once, and are checked by the next
//! search. So a cached job is never worse than the actual one, and the first correct one is the
//! best.
//!
//! Between two commands no connection waits while a watched tube has a job for it.

mod check;

use super::Queue;
use super::client::Client;
use super::job::Rank;
use super::tube::Tube;
use crate::engine::collections::chains::{HashSlab, Hashed};
use crate::engine::collections::heap::{Entry, Heap};
use crate::engine::collections::list::{Linked, Links, List};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::headroom::{self, NoMemory};
use crate::engine::keys::{ConnKey, JobKey, Key, NIL, TubeKey, WatchKey};
use crate::engine::time::Nanos;
use crate::engine::work::Rest;
use std::cell::Cell;
use std::num::NonZero;

/// A connection's watch of a tube.
#[derive(Debug)]
pub struct Watch {
    conn: ConnKey,
    tube: TubeKey,
    /// The links in three lists; see [`ALL`].
    links: [Links; 3],
    /// Half of the hash: as many bits as there can be watches.
    hash: u32,
    /// The next watch in its chain of [`Queue::find_watch`].
    next: Cell<u32>,
    /// The index in the tube's waiters; [`NIL`] if not queued.
    waiter_index: u32,
    /// The index in the connection's best jobs; [`NIL`] if none is cached.
    best_index: u32,
    /// The cached best job must be checked: the tube may have a better one.
    is_dirty: bool,
}

/// The lists of a watch: all of its connection; the connection's `not_queued`; and the tube's
/// `clean` or else the connection's `dirty`.
const ALL: usize = 0;
const NOT_QUEUED: usize = 1;
pub(super) const FRESHNESS: usize = 2;

/// All watches.
pub type Watches = HashSlab<WatchKey, Watch>;

/// The watches of a connection, and its cached best jobs.
#[derive(Debug, Default)]
pub struct Watching {
    /// All watches, in the order of `list-tubes-watched`.
    all: List<ALL>,
    /// The cached best jobs; `None` until the connection watches a second tube.
    best_jobs: Option<Box<Heap<BestJob>>>,
}

/// What commands of other connections change of a connection: its wait, and two lists of its watches.
#[derive(Debug, Default)]
pub struct Watcher {
    /// The watches that are not among their tube's waiters.
    not_queued: List<NOT_QUEUED>,
    /// The watches whose tube may have a better job than the cached one.
    dirty: List<FRESHNESS>,
    /// `None` while the connection does not wait.
    pub(super) wait: Option<Wait>,
}

/// All of these, by connection.
pub type Watchers = PagedSlab<ConnKey, Watcher>;

/// The result of a search for the best job of the tubes that a connection watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Search {
    /// The best job.
    Found(JobKey),
    /// No tube that is not paused has a ready job.
    Nothing,
    /// The step limit was reached before all tubes were checked.
    Unfinished,
}

/// Watches that are checked, or invalidated, in one unit of work.
const WATCHES_PER_WORK: usize = 2;
const INVALIDATIONS_PER_WORK: usize = 4;

/// A connection's wait for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The position in the order of waits.
    pub seq: WaitSeq,
    /// The end of the timeout; [`Nanos::NEVER`] without one.
    pub until: Nanos,
}

/// A sequence number: the order in which connections began to wait.
pub type WaitSeq = NonZero<u64>;

/// A watch among the waiters of its tube, with the number of the connection's wait at the last
/// check.
#[derive(Clone, Copy, Debug)]
pub struct Waiter {
    seq: WaitSeq,
    watch: WatchKey,
}

/// A watch in the cache of its connection, with the best job of the tube at the last check.
#[derive(Clone, Copy, Debug)]
struct BestJob {
    pri: u32,
    id: u64,
    watch: WatchKey,
}

impl Queue {
    /// Searches the watched tubes for the best job. A connection may watch a million tubes that
    /// have all changed, so the search ends when no work is left for it.
    // The compiler inlines a function into every command only if it has one caller.
    #[inline(always)]
    pub fn best_job(&mut self, client: &mut Client) -> Result<Search, NoMemory> {
        if !self.offer_parked() {
            return Ok(Search::Unfinished);
        }
        let least = client.headroom_for_watches();
        let watching = &mut client.watching;
        // Most connections watch one tube: there is nothing to compare and nothing to cache.
        if watching.len() == 1 {
            let Some(only) = watching.first_watch() else { return Ok(Search::Nothing) };
            let only = self.watches[only].tube;
            if !self.park_blocked(only) {
                return Ok(Search::Unfinished);
            }
            let best = self.tubes[only].best_job(&self.jobs);
            return Ok(best.map_or(Search::Nothing, Search::Found));
        }
        while let Some(front) = self.watchers[client.key].dirty.front() {
            let tube = self.watches[WatchKey::from_number(front)].tube;
            if !self.park_blocked(tube) || !self.check_watch() {
                return Ok(Search::Unfinished);
            }
            headroom::keeping(least, || watching.best_jobs().try_reserve_one())?;
            let dirty = &mut self.watchers[client.key].dirty;
            let Some(key) = dirty.pop_front(&mut self.watches) else { break };
            let watch = &mut self.watches[WatchKey::from_number(key)];
            watch.is_dirty = false;
            let (tube, index) = (&mut self.tubes[watch.tube], watch.best_index);
            tube.clean.push_back(&mut self.watches, key);
            let watch = WatchKey::from_number(key);
            let best = tube.best_job(&self.jobs).map(|job| self.jobs[job].rank());
            watching.cache_best(watch, index, best, &mut self.watches);
        }
        while let Some(cached) = watching.best_jobs().first().copied() {
            if !self.park_blocked(self.watches[cached.watch].tube) {
                return Ok(Search::Unfinished);
            }
            let watch = &self.watches[cached.watch];
            let best = self.tubes[watch.tube].best_job(&self.jobs);
            let rank = best.map(|job| self.jobs[job].rank());
            if let Some(best) = best.filter(|_| rank == Some(cached.rank())) {
                return Ok(Search::Found(best));
            }
            if !self.check_watch() {
                return Ok(Search::Unfinished);
            }
            let index = self.watches[cached.watch].best_index;
            watching.cache_best(cached.watch, index, rank, &mut self.watches);
        }
        Ok(Search::Nothing)
    }

    /// Gives a step of a reserve the work to check as many watches as it may.
    pub fn give_search(&mut self) -> Rest {
        self.work.give(self.limits.watches_per_step.div_ceil(WATCHES_PER_WORK))
    }

    /// Spends the work to check a watch. Returns `false` if none was left.
    fn check_watch(&mut self) -> bool {
        let is_left = self.work.is_left();
        self.work.spend_for(usize::from(is_left), WATCHES_PER_WORK);
        is_left
    }

    /// Marks all clean watches of the tube as dirty: it has a better job than before.
    pub(super) fn invalidate(&mut self, tube: TubeKey) {
        let clean = &mut self.tubes[tube].clean;
        while let Some(key) = clean.pop_front(&mut self.watches) {
            let watch = &mut self.watches[WatchKey::from_number(key)];
            watch.is_dirty = true;
            self.work.spend_outside(1, INVALIDATIONS_PER_WORK);
            let dirty = &mut self.watchers[watch.conn].dirty;
            dirty.push_back(&mut self.watches, key);
        }
    }

    /// Returns the next number in the order of waits.
    pub fn next_wait_seq(&mut self) -> WaitSeq {
        let seq = self.next_wait_seq;
        self.next_wait_seq = seq.saturating_add(1);
        seq
    }

    /// Queues the connection at all tubes that it watches. Returns `false` without work left for that:
    /// the connection does not wait, but keeps its new entries. The same holds without memory.
    pub(super) fn enqueue_waiter(&mut self, conn: ConnKey, wait: Wait) -> Result<bool, NoMemory> {
        while let Some(key) = self.watchers[conn].not_queued.front() {
            if !self.check_watch() {
                return Ok(false);
            }
            let waiter = Waiter { seq: wait.seq, watch: WatchKey::from_number(key) };
            let waiters = &mut self.tubes[self.watches[waiter.watch].tube].waiters;
            waiters.try_reserve_one()?;
            self.watchers[conn].not_queued.pop_front(&mut self.watches);
            waiters.insert(waiter, &mut self.watches);
        }
        self.watchers[conn].wait = Some(wait);
        Ok(true)
    }

    /// Returns the connection that has waited longest for a job of the tube.
    pub(super) fn longest_waiting(&mut self, tube: TubeKey) -> Option<ConnKey> {
        let waiters = &mut self.tubes[tube].waiters;
        while let Some(&front) = waiters.first() {
            let conn = self.watches[front.watch].conn;
            let watcher = &mut self.watchers[conn];
            match watcher.wait {
                Some(Wait { seq, .. }) if seq == front.seq => return Some(conn),
                Some(Wait { seq, .. }) => {
                    waiters.replace(0, Waiter { seq, ..front }, &mut self.watches);
                }
                None => {
                    waiters.remove(0, &mut self.watches);
                    self.watches[front.watch].waiter_index = NIL;
                    let not_queued = &mut watcher.not_queued;
                    not_queued.push_back(&mut self.watches, front.watch.number());
                }
            }
        }
        None
    }

    /// Returns the tube of a watch.
    pub fn watched_tube(&self, watch: WatchKey) -> &Tube {
        &self.tubes[self.watches[watch].tube]
    }

    /// Returns the number of connections that wait for a job of the tube.
    pub fn count_waiting(&self, tube: TubeKey) -> usize {
        // All waiting connections have an entry; some entries are of connections that do not wait.
        let conns = self.tubes[tube].waiters.iter().map(|waiter| self.watches[waiter.watch].conn);
        conns.filter(|&conn| self.waits(conn)).count()
    }

    /// Returns whether the connection waits for a job.
    pub fn waits(&self, conn: ConnKey) -> bool {
        self.watchers[conn].wait.is_some()
    }

    /// Adds a watch of the tube, unless the connection has one.
    pub(super) fn add_watch(&mut self, client: &mut Client, tube: TubeKey) -> Result<(), NoMemory> {
        let conn = client.key;
        if self.find_watch(conn, tube).is_some() {
            return Ok(());
        }
        self.watches.try_reserve_one()?;
        let key = self.watches.insert(Watch {
            conn,
            tube,
            links: [Links::LOOSE; 3],
            hash: self.tubes[tube].hash_with(conn),
            next: Cell::default(),
            waiter_index: NIL,
            best_index: NIL,
            is_dirty: true,
        });
        let watcher = &mut self.watchers[conn];
        client.watching.all.push_back(&mut self.watches, key.number());
        watcher.not_queued.push_back(&mut self.watches, key.number());
        watcher.dirty.push_back(&mut self.watches, key.number());
        self.tubes[tube].watching += 1;
        Ok(())
    }

    /// Returns the connection's watch of the tube.
    pub fn find_watch(&self, conn: ConnKey, tube: TubeKey) -> Option<WatchKey> {
        let hash = self.tubes[tube].hash_with(conn);
        Some(self.watches.find_by(hash, |watch| (watch.conn, watch.tube) == (conn, tube))?.0)
    }

    /// Removes a watch, and returns its tube.
    pub(super) fn remove_watch(&mut self, client: &mut Client, key: WatchKey) -> TubeKey {
        let Watch { conn, tube: tube_key, waiter_index, best_index, is_dirty, .. } =
            self.watches[key];
        let (watching, watcher) = (&mut client.watching, &mut self.watchers[conn]);
        let tube = &mut self.tubes[tube_key];
        if waiter_index == NIL {
            watcher.not_queued.remove(&mut self.watches, key.number());
        } else {
            let removed = tube.waiters.remove(waiter_index, &mut self.watches);
            assert_eq!(removed.watch, key, "the index of a waiter belongs to another watch");
        }
        if best_index != NIL {
            watching.best_jobs().remove(best_index, &mut self.watches);
        }
        let list = if is_dirty { &mut watcher.dirty } else { &mut tube.clean };
        list.remove(&mut self.watches, key.number());
        tube.watching -= 1;
        // Quirk: the last watch of the list moves to the index of the removed one; pinned by
        // tests/conversations/list-tubes-order.txt.
        watching.all.swap_remove(&mut self.watches, key.number());
        self.watches.remove(key);
        tube_key
    }
}

impl Watching {
    pub fn len(&self) -> usize {
        self.all.len() as usize
    }

    /// Returns the first watch in the order of `list-tubes-watched`.
    pub fn first_watch(&self) -> Option<WatchKey> {
        self.all.front().map(WatchKey::from_number)
    }

    /// Returns the next watch in the order of `list-tubes-watched`.
    pub fn watch_after(&self, watch: WatchKey, watches: &Watches) -> Option<WatchKey> {
        self.all.after(watches, watch.number()).map(WatchKey::from_number)
    }

    /// Returns the watched tubes in the order of `list-tubes-watched`.
    pub fn tubes<'a>(&'a self, watches: &'a Watches) -> impl Iterator<Item = TubeKey> + Clone + 'a {
        self.all.iter(watches).map(|watch| watches[WatchKey::from_number(watch)].tube)
    }

    /// Allocates the heap of best jobs, which the second watched tube needs. This allocation cannot
    /// fail.
    pub fn prepare_to_compare(&mut self) {
        self.best_jobs();
    }

    fn best_jobs(&mut self) -> &mut Heap<BestJob> {
        self.best_jobs.get_or_insert_default()
    }

    /// Caches the best job of the tube of `watch`, in place of the one at `index`.
    fn cache_best(
        &mut self,
        watch: WatchKey,
        index: u32,
        best: Option<Rank>,
        watches: &mut Watches,
    ) {
        match best.map(|(pri, id)| BestJob { pri, id, watch }) {
            Some(best) if index == NIL => self.best_jobs().insert(best, watches),
            Some(best) => self.best_jobs().replace(index, best, watches),
            None if index == NIL => {}
            None => {
                self.best_jobs().remove(index, watches);
                watches[watch].best_index = NIL;
            }
        }
    }
}

impl Hashed for Watch {
    fn hash(&self) -> u32 {
        self.hash
    }

    fn next(&self) -> &Cell<u32> {
        &self.next
    }
}

impl Entry for Waiter {
    type Store = Watches;

    fn is_before(self, other: Waiter, _: &Watches) -> bool {
        self.seq < other.seq
    }

    fn set_index(self, index: u32, watches: &mut Watches) {
        watches[self.watch].waiter_index = index;
    }
}

impl BestJob {
    fn rank(self) -> Rank {
        (self.pri, self.id)
    }
}

impl Entry for BestJob {
    type Store = Watches;

    fn is_before(self, other: BestJob, _: &Watches) -> bool {
        self.rank() < other.rank()
    }

    fn set_index(self, index: u32, watches: &mut Watches) {
        watches[self.watch].best_index = index;
    }
}

impl<const LIST: usize> Linked<LIST> for Watches {
    fn links(&self, key: u32) -> Links {
        self[WatchKey::from_number(key)].links[LIST]
    }

    fn links_mut(&mut self, key: u32) -> &mut Links {
        &mut self[WatchKey::from_number(key)].links[LIST]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::limits::{Limits, Settings};
    use crate::engine::queue::job::JobParams;
    use crate::engine::text::CR_LF;
    use std::collections::{BTreeMap, BTreeSet};

    const TUBES: [&str; 6] = ["default", "a", "b", "c", "d", "e"];
    const NOW: Nanos = Nanos::from_secs(100);
    const LONG: u32 = 1_000_000;

    /// The same rules, with each answer computed from scratch.
    #[derive(Default)]
    struct Model {
        /// The tube and the priority, by id.
        ready: BTreeMap<u64, (usize, u32)>,
        reserved: BTreeMap<u64, (ConnKey, usize)>,
        watched: BTreeMap<ConnKey, BTreeSet<usize>>,
        /// The longest waiting connection first.
        waiting: Vec<ConnKey>,
        paused: BTreeSet<usize>,
        woken: Vec<(ConnKey, u64)>,
    }

    impl Model {
        fn best(&self, is_searched: impl Fn(usize) -> bool) -> Option<u64> {
            let jobs = self
                .ready
                .iter()
                .filter(|(_, (tube, _))| is_searched(*tube) && !self.paused.contains(tube));
            jobs.min_by_key(|&(&id, &(_, pri))| (pri, id)).map(|(&id, _)| id)
        }

        fn make_reserved(&mut self, conn: ConnKey, id: u64) {
            let (tube, _) =
                self.ready.remove(&id).expect("the model reserves a job that is not ready");
            self.reserved.insert(id, (conn, tube));
        }

        fn reserve(&mut self, conn: ConnKey) -> Option<u64> {
            let id = self.best(|tube| self.watched[&conn].contains(&tube))?;
            self.make_reserved(conn, id);
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
                self.make_reserved(conn, id);
                self.woken.push((conn, id));
            }
        }
    }

    type Clients = BTreeMap<ConnKey, Client>;

    fn put(queue: &mut Queue, client: &mut Client, id: u64, tube: usize, pri: u32) {
        let params = JobParams { pri, delay_secs: 0, ttr_secs: LONG };
        queue.use_tube(client, TUBES[tube]).unwrap();
        let body = queue.bodies.add(CR_LF).unwrap();
        queue.put(client.used, id, params, None, body).unwrap();
    }

    fn reserve(queue: &mut Queue, client: &mut Client) -> Option<u64> {
        client.held.try_reserve_one().unwrap();
        match queue.best_job(client).unwrap() {
            Search::Found(job) => {
                queue.make_reserved(job, client);
                Some(queue.jobs[job].id)
            }
            Search::Nothing => None,
            Search::Unfinished => panic!("a reserve without a step limit is unfinished"),
        }
    }

    /// Adds a connection under the lowest free key.
    fn connect(queue: &mut Queue, clients: &mut Clients) -> ConnKey {
        let mut keys = (0..).map(ConnKey::from_index);
        let key = keys.find(|key| !clients.contains_key(key)).expect("some key is free");
        clients.insert(key, queue.connect(key).unwrap());
        key
    }

    /// Applies one random step to the queue and to the model.
    #[expect(clippy::too_many_lines, reason = "one arm for each kind of step")]
    fn step(
        random: &mut fastrand::Rng,
        queue: &mut Queue,
        clients: &mut Clients,
        model: &mut Model,
        last_id: &mut u64,
    ) {
        let conns: Vec<ConnKey> = model.watched.keys().copied().collect();
        let tube = random.usize(..TUBES.len());
        let pri = random.u32(..4);
        let Some(&conn) = random.choice(&conns) else {
            let conn = connect(queue, clients);
            model.watched.insert(conn, BTreeSet::from([0]));
            return;
        };
        let client = clients.get_mut(&conn).expect("the model has the same connections");
        let is_waiting = model.waiting.contains(&conn);
        let reserved = model.reserved.iter().find(|(_, (by, _))| *by == conn);
        let reserved = reserved.map(|(&id, &(_, tube))| (id, tube));
        match random.u8(..20) {
            0 if conns.len() < 12 => {
                let conn = connect(queue, clients);
                model.watched.insert(conn, BTreeSet::from([0]));
            }
            1 => {
                let mut client = clients.remove(&conn).expect("it was just found");
                queue.stop_waiting(conn);
                let mut order = queue.disconnect(&mut client);
                assert!(queue.leave(&mut client, &mut order));
                model.waiting.retain(|&waiting| waiting != conn);
                model.watched.remove(&conn);
                let mut released: Vec<(u64, usize)> = Vec::new();
                model.reserved.retain(|&id, &mut (by, tube)| {
                    released.extend((by == conn).then_some((id, tube)));
                    by != conn
                });
                assert!(released.len() <= 1, "a connection of the test reserves one job at a time");
                for (id, tube) in released {
                    model.make_ready(id, tube, queue.jobs[queue.jobs.find(id).unwrap()].pri);
                }
            }
            2..5 if !is_waiting => {
                queue.watch(client, TUBES[tube]).unwrap();
                model.watched.get_mut(&conn).unwrap().insert(tube);
            }
            5 if !is_waiting => {
                let watched = model.watched.get_mut(&conn).unwrap();
                let is_last = watched.len() == 1 && watched.contains(&tube);
                assert_eq!(queue.ignore(client, TUBES[tube]), !is_last);
                if !is_last {
                    watched.remove(&tube);
                }
            }
            6 => {
                if let Some(key) = queue.tubes.find(TUBES[tube]) {
                    queue.pause(key, LONG);
                    model.paused.insert(tube);
                }
            }
            7 | 8 => {
                queue.tubes.find(TUBES[tube]).iter().for_each(|&key| queue.pause(key, 0));
                model.paused.remove(&tube);
                model.serve(tube);
            }
            9..13 if !is_waiting => {
                *last_id += 1;
                put(queue, client, *last_id, tube, pri);
                model.make_ready(*last_id, tube, pri);
            }
            13..16 if reserved.is_some() && !is_waiting => {
                let (id, tube) = reserved.unwrap();
                model.reserved.remove(&id);
                let job = queue.find_held(client, id).unwrap();
                if random.bool() {
                    assert_eq!(queue.release(client, job, pri, 0), Ok(()));
                    model.make_ready(id, tube, pri);
                } else {
                    assert_eq!(queue.delete(client, job), Ok(()));
                }
            }
            _ if reserved.is_none() && !is_waiting => {
                let job = reserve(queue, client);
                assert_eq!(job, model.reserve(conn));
                if job.is_none() {
                    let wait = Wait { seq: queue.next_wait_seq(), until: Nanos::NEVER };
                    assert!(queue.wait(client, wait).unwrap());
                    model.waiting.push(conn);
                }
            }
            _ => {}
        }
        // A tube that was removed is created again without a pause.
        model.paused.retain(|&tube| queue.tubes.find(TUBES[tube]).is_some());
    }

    /// Otherwise a client could choose tubes whose watches share a bucket of the index.
    #[test]
    fn watch_hashes_differ_between_servers() {
        let hashes = || {
            let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
            queue.now = NOW;
            let mut client = queue.connect(ConnKey::from_index(0)).unwrap();
            TUBES.iter().for_each(|name| queue.watch(&mut client, name).unwrap());
            let watches = queue.watches.iter().map(|(_, watch)| watch.hash);
            watches.collect::<Vec<u32>>()
        };
        assert_ne!(hashes(), hashes());
    }

    #[test]
    fn workers_get_the_best_job_in_the_order_in_which_they_began_to_wait() {
        for seed in 0..30 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
            queue.now = NOW;
            let (mut clients, mut model) = (Clients::new(), Model::default());
            let mut last_id = 0;
            for round in 0..4_000 {
                step(&mut random, &mut queue, &mut clients, &mut model, &mut last_id);
                let mut woken = Vec::new();
                for (conn, job) in std::mem::take(&mut queue.woken) {
                    let client =
                        clients.get_mut(&conn).expect("a connection waits until it closes");
                    queue.hold(client, job);
                    woken.push((conn, queue.jobs[job].id));
                }
                assert_eq!(woken, std::mem::take(&mut model.woken), "seed {seed}");
                for (index, name) in TUBES.iter().enumerate() {
                    let Some(tube) = queue.tubes.find(name) else { continue };
                    let is_counted = |conn: &&ConnKey| model.watched[conn].contains(&index);
                    let waiting = model.waiting.iter().filter(is_counted).count();
                    assert_eq!(queue.count_waiting(tube), waiting);
                }
                assert_eq!(queue.totals.ready, model.ready.len() as u64);
                assert_eq!(queue.totals.reserved, model.reserved.len() as u64);
                assert_eq!(queue.totals.waiting, model.waiting.len() as u64);
                if round % 8 == 0 {
                    queue.check(clients.values(), std::iter::empty());
                }
            }
            assert!(last_id > 100, "the test put {last_id} jobs only");
        }
    }
}
