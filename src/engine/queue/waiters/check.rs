//! Checks the watches, the waiters and the cached best jobs, for tests.

use super::{BestJob, Waiter, Watch, Watcher, Watching};
use crate::engine::collections::list::List;
use crate::engine::keys::{ConnKey, Key, NIL, TubeKey, WatchKey};
use crate::engine::queue::Queue;
use crate::engine::queue::client::Client;
use crate::engine::queue::tube::Tube;
use std::collections::BTreeMap;
use std::fmt;

impl Queue {
    /// Checks that each watch is in exactly the lists and heaps that its fields name, and that no
    /// connection waits while a watched tube has a job for it.
    pub(in crate::engine::queue) fn check_watches(&self, clients: &BTreeMap<ConnKey, &Client>) {
        self.watchers.check(format_args!("the watchers"));
        assert_eq!(self.watchers.len(), clients.len(), "watchers, and clients");
        self.watches.check(format_args!("the watches"));
        // The lists and heaps are checked one by one. Two that exclude each other have together as
        // many entries as there are watches, so each watch is in one of them.
        let (mut all, mut queueing, mut freshness, mut cached) = (0, 0, 0, 0);
        for (&conn, client) in clients {
            let index = conn.index();
            let Watching { all: own, best_jobs } = &client.watching;
            let Watcher { not_queued, dirty, wait } = &self.watchers[conn];
            assert!(!own.is_empty(), "connection {index} watches no tube");
            self.check_list(own, format_args!("the watches of {index}"), |key, watch| {
                watch.conn == conn && self.find_watch(conn, watch.tube) == Some(key)
            });
            let what = format_args!("the watches of connection {index} that are not queued");
            self.check_list(not_queued, what, |_, it| it.conn == conn && it.waiter_index == NIL);
            let what = format_args!("the dirty watches of connection {index}");
            self.check_list(dirty, what, |_, watch| watch.conn == conn && watch.is_dirty);
            if let Some(best_jobs) = best_jobs {
                let what = format_args!("the best jobs of connection {index}");
                let index_of = |best: BestJob| Some(self.watches[best.watch].best_index);
                best_jobs.check(&self.watches, what, index_of);
                let is_own = |best: &BestJob| self.watches[best.watch].conn == conn;
                assert!(best_jobs.iter().all(is_own), "{what} have one of another");
                cached += best_jobs.len();
            }
            all += own.len();
            queueing += not_queued.len() as usize;
            freshness += dirty.len();
            let Some(wait) = wait else { continue };
            let is_queued = wait.seq < self.next_wait_seq && not_queued.is_empty();
            assert!(is_queued, "connection {index} waits with {wait:?}: {not_queued:?}");
            for tube in client.watching.tubes(&self.watches).map(|tube| &self.tubes[tube]) {
                let best = tube.best_job(&self.jobs);
                assert!(best.is_none(), "{index} waits, but tube {} has {best:?}", tube.name);
            }
        }
        for (key, tube) in self.tubes.entries() {
            self.check_waiters(key, tube, clients);
            queueing += tube.waiters.len();
            freshness += tube.clean.len();
        }
        let len = self.watches.len();
        let stored = (all as usize, queueing, freshness as usize);
        assert_eq!(stored, (len, len, len), "watches in lists and heaps, and all of them");
        let is_cached = |(_, watch): &(WatchKey, &Watch)| watch.best_index != NIL;
        let indexed = self.watches.iter().filter(is_cached).count();
        assert_eq!(cached, indexed, "cached best jobs, and watches with an index of one");
    }

    fn check_list<const LIST: usize>(
        &self,
        list: &List<LIST>,
        what: fmt::Arguments<'_>,
        is_right: impl Fn(WatchKey, &Watch) -> bool,
    ) {
        list.check(&self.watches, what, |key| {
            let key = WatchKey::from_number(key);
            let watch = &self.watches[key];
            assert!(is_right(key, watch), "{what} have {key:?}: {watch:?}");
        });
    }

    fn check_waiters(&self, key: TubeKey, tube: &Tube, clients: &BTreeMap<ConnKey, &Client>) {
        let Tube { name, waiters, clean, .. } = tube;
        let index_of = |waiter: Waiter| Some(self.watches[waiter.watch].waiter_index);
        waiters.check(&self.watches, format_args!("the waiters of tube {name}"), index_of);
        for waiter in waiters.iter() {
            let watch = &self.watches[waiter.watch];
            let wait = self.watchers[watch.conn].wait;
            let is_old =
                wait.map_or(waiter.seq < self.next_wait_seq, |wait| waiter.seq <= wait.seq);
            assert!(watch.tube == key && is_old, "tube {name} queues {waiter:?} for {wait:?}");
        }
        let best = tube.best_job(&self.jobs).map(|job| self.jobs[job].rank());
        let what = format_args!("the clean watches of tube {name}, which has {best:?}");
        self.check_list(clean, what, |_, watch| {
            let best_jobs = clients[&watch.conn].watching.best_jobs.as_ref();
            let cached = best_jobs.and_then(|best_jobs| best_jobs.get(watch.best_index as usize));
            let is_better = |best| cached.is_none_or(|cached| best < cached.rank());
            watch.tube == key && !watch.is_dirty && !best.is_some_and(is_better)
        });
    }
}
