//! Continues the replies that wait for memory or for the disk, in the order that
//! [`reads`](crate::engine::reads) describes.
//!
//! When the system has too little memory or too many open files for a read, replies of its class wait for 0.1 s, and
//! those that wait for longer than 10 s are refused.

use super::Server;
use crate::engine::conn::{Doing, WaitFor};
use crate::engine::keys::ConnKey;
use crate::engine::queue::read_body::ReplyClass;
use crate::engine::reads::{
    PATIENCE, WantedBodies, give_up, go_on, may_take_turn, start_reply, take_body, take_turn,
    wanted_of,
};
use crate::engine::store::Store;
use crate::engine::time::Nanos;
use log::debug;

/// The time between two looks for clients that take nothing of a reply.
const LOOK_PAUSE: Nanos = Nanos::from_secs(1);

impl<S> Server<S> {
    /// Returns when a reply can be started or tried again, or what was read can be freed.
    pub(super) fn reads_due(&self) -> Nanos {
        let Store { reads, queue, .. } = &self.store;
        if queue.settings.body_cache_bytes.is_none() {
            return Nanos::NEVER;
        }
        let can_go_on = |it: &WantedBodies| it.fits(&self.store) || it.needs_cache(&self.store);
        let has_freed = !queue.body_cache.read_bodies.memory.freed.borrow().is_empty();
        let has_turns =
            may_take_turn(&self.store) && reads.turns.iter().any(|turns| !turns.is_empty());
        if has_freed || has_turns || self.fronts().any(can_go_on) {
            return Nanos::ZERO;
        }
        let retries = reads.retry_at.into_iter().filter(|&at| at > queue.now);
        retries.fold(self.look_due(), Nanos::min)
    }

    /// Begins further reads, if the time has come, and frees what was sent.
    pub(super) fn tick_reads(&mut self) {
        let s = &mut self.store;
        let freed = s.queue.body_cache.read_bodies.memory.freed.take();
        freed.into_iter().for_each(|record| s.queue.bodies.free_in_steps(record));
        s.queue.work.begin_due();
        self.finish_reads();
        self.start_replies();
        // Replies that were refused have given jobs to workers.
        self.deliver();
        self.close_unread();
    }

    /// Returns the replies that wait for memory first.
    fn fronts(&self) -> impl Iterator<Item = &WantedBodies> {
        ReplyClass::ALL.into_iter().filter_map(|class| self.front(class))
    }

    /// Returns the reply of this class that waits for memory first, unless all wait for the next try.
    fn front(&self, class: ReplyClass) -> Option<&WantedBodies> {
        let Store { reads, queue, .. } = &self.store;
        let is_tried = reads.retry_at[class as usize] <= queue.now;
        reads.waiting[class as usize].front().filter(|_| is_tried).map(|&key| self.wanted(key))
    }

    /// Returns when to look for connections that take nothing; [`Nanos::NEVER`] while no reply waits for memory.
    fn look_due(&self) -> Nanos {
        let asked_at = self.fronts().map(|wanted| wanted.asked_at).min();
        let next = self.store.reads.looked_at + LOOK_PAUSE;
        asked_at.map_or(Nanos::NEVER, |at| (at + PATIENCE.before(LOOK_PAUSE)).max(next))
    }

    /// Closes connections that take nothing of a reply for a second while another one has waited for its memory for
    /// 10 s: otherwise clients that never read could keep all workers from their jobs.
    fn close_unread(&mut self) {
        if self.look_due() > self.store.queue.now {
            return;
        }
        let is_short = self.fronts().any(|wanted| !wanted.fits(&self.store));
        let takes_text = self.fronts().any(|wanted| wanted.is_crowded_out(&self.store));
        self.store.queue.work.begin_due();
        while self.store.reads.look_at < self.links.numbers_end() {
            if !self.store.queue.work.is_left() {
                return;
            }
            self.store.queue.work.spend(1);
            self.with(ConnKey::from_index(self.store.reads.look_at), |c, s| {
                if c.is_unread(takes_text) && is_short {
                    debug!("connection {}: its reply is unread, and its memory wanted", c.id());
                    c.fail(s);
                }
            });
            self.store.reads.look_at += 1;
        }
        (self.store.reads.looked_at, self.store.reads.look_at) = (self.store.queue.now, 0);
    }

    // ---- Memory ----

    /// Starts the replies for which there is memory.
    pub(super) fn start_replies(&mut self) {
        for class in ReplyClass::ALL {
            // At least one, and no more than there is work for.
            let mut may_start = true;
            while may_start
                && self.front(class).is_some_and(|wanted| wanted.fits(&self.store))
                && let Some(key) = self.store.reads.waiting[class as usize].pop_front()
            {
                self.with(key, start_reply);
                may_start = self.store.queue.work.is_left();
            }
            // While the system has no memory, those are refused that have waited for too long.
            while self.store.reads.retry_at[class as usize] > self.store.queue.now
                && let Some(&key) = self.store.reads.waiting[class as usize].front()
                && self.wanted(key).is_impatient(&self.store)
            {
                self.with(key, give_up);
            }
            if self.front(class).is_some_and(|wanted| wanted.needs_cache(&self.store)) {
                self.store.queue.evict_page();
            }
        }
        self.begin_reads();
    }

    fn wanted(&self, key: ConnKey) -> &WantedBodies {
        match self.conn_ref(key).map(|c| &c.doing) {
            Some(Doing::Wait(WaitFor::Bodies(wanted))) => wanted,
            _ => unreachable!("connection {} does not wait for bodies", key.id()),
        }
    }

    // ---- Reads ----

    /// Begins reads while the disk has few, at least one. A turn may also read a body from the page cache, so there is
    /// work for some of them.
    fn begin_reads(&mut self) {
        let mut has_work = true;
        while has_work
            && may_take_turn(&self.store)
            && let Some(key) = self.store.reads.take_turn()
        {
            self.with(key, take_turn);
            has_work = self.store.queue.work.is_left();
        }
    }

    /// Passes what the disk has read to the replies that wait for it: few reads are with the disk, with few replies
    /// each.
    fn finish_reads(&mut self) {
        while let Some((read, record)) = self.store.queue.finished_read() {
            // Compaction may have moved the record meanwhile, and its old file may be gone.
            let is_gone = record.is_err() && self.store.queue.has_moved(read);
            let (mut record, mut body) = (Some(record), None);
            for _ in 0..self.store.reads.reading.len() {
                let Some(key) = self.store.reads.reading.pop_front() else { break };
                if self.wanted(key).next_id() != read.id {
                    self.store.reads.reading.push_back(key);
                    continue;
                }
                self.with(key, |c, s| {
                    let (_, wanted) = wanted_of(c);
                    let next = wanted.next;
                    if !is_gone && let Some(record) = record.take() {
                        body = Some(s.queue.read_body(read, record, wanted.grant()));
                    }
                    if let Some(Ok(body)) = &body {
                        take_body(c, s, next, body.clone());
                    }
                    go_on(c, s, !matches!(body, Some(Err(_))));
                });
            }
            if let Some(Ok(record)) = record {
                self.store.queue.bodies.free_in_steps(record);
            }
        }
    }
}
