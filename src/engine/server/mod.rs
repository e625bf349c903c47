//! The whole server as one value, over any streams: sockets in the program, buffers in tests.
//!
//! Its owner says which streams are ready and what time it is. One iteration:
//!
//! ```text
//! note ...      what has changed on streams
//! begin         what is due: timers, closed connections, long lists, flushes, bodies from the disk
//! visit_next    each ready connection once: read, run commands; then the waits that they have ended
//! commit        the records of the iteration in one write
//! send          one write for each connection with output; close those that have ended
//! ```
//!
//! A connection is borrowed once for its visit, and handed down with the store. A command may end the
//! waits of other connections: [`Server::deliver`] replies to them right after the visit. The commands
//! that these sent after their `reserve` run in the next iteration, within their own shares.
//!
//! One iteration is bounded, whatever clients send: each part of it has some [work](crate::engine::work).
//!
//! | file | owns |
//! |---|---|
//! | [`link`] | a connection with its stream: reads and writes |
//! | [`visits`] | which connection is visited next |
//! | [`sending`] | the end of an iteration: replies are sent, connections closed |
//! | [`reading`] | replies whose bodies come from the disk |
//! | [`report`] | replies that show other connections |
//! | [`check`] | counts everything again and compares, for tests |

mod check;
mod link;
mod reading;
mod report;
mod sending;
mod visits;

pub use link::Readiness;

use crate::engine::binlog::error::BinlogError;
use crate::engine::binlog::{Binlog, Progress};
use crate::engine::collections::slab::{PAGE_BYTES, PagedSlab};
use crate::engine::conn::{Conn, Doing, WaitFor};
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::ConnKey;
use crate::engine::limits::{Limits, Settings};
use crate::engine::lists::list_step;
use crate::engine::protocol::reply::Reply;
use crate::engine::protocol::stats::{ProcessInfo, StatusLine};
use crate::engine::queue::{Totals, WaitResult};
use crate::engine::reads::give_up;
use crate::engine::store::Store;
use crate::engine::time::Nanos;
use link::Link;
use log::{debug, warn};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use visits::Visits;

/// The queue and the connections of one server.
pub struct Server<S> {
    /// All connections, also closed ones that have not given back all jobs and watches.
    links: Links<S>,
    /// What connections share. Its owner sets what is known outside: whether the server drains, the wall clock.
    pub store: Store,
    visits: Visits,
    /// Connections whose commands may have to wait until memory for replies is not short.
    postponed: Vec<ConnKey>,
    /// The bytes of the last read, of whatever connection. Longer than a read, because the system maps
    /// only the written pages of a block of this size.
    scratch: Box<[u8]>,
    /// How many bytes one read takes in this iteration.
    read_len: usize,
    /// The closed ones.
    leaving: VecDeque<ConnKey>,
    /// Where the next held job of a flush is searched: the number of a connection, and an index in its heap.
    search_at: (usize, usize),
    is_stopping: bool,
}

type Links<S> = PagedSlab<ConnKey, Link<S>>;

/// A server as metrics and pages see it, whatever its streams are.
pub trait Observed {
    /// Returns the queue, the settings and the counters.
    fn store(&self) -> &Store;
    /// Returns the connection of this number, if there is one. It may be closed, and have jobs to give back.
    fn conn(&self, number: usize) -> Option<&Conn>;
    /// Returns a number that is above those of all keys.
    fn numbers_end(&self) -> usize;
}

/// This number of clients takes less than a quarter of the headroom.
const FEW_CLIENTS: usize = 256;
/// Units of work to read from a connection and to write to it.
const WORK_PER_VISIT: usize = 16;

impl<S> Server<S> {
    /// Returns a server without jobs and connections.
    pub fn new(settings: Settings, limits: Limits, process: ProcessInfo, now: Nanos) -> Server<S> {
        let Limits { read_bytes, short_read_bytes, crowded_read_bytes, head_read_bytes, .. } =
            limits;
        let reads = [read_bytes, short_read_bytes, crowded_read_bytes, head_read_bytes];
        let scratch_len = reads.into_iter().fold(PAGE_BYTES, usize::max);
        Server {
            links: Links::default(),
            store: Store::new(settings, limits, process, now),
            visits: Visits::default(),
            postponed: Vec::new(),
            scratch: vec![0; scratch_len].into_boxed_slice(),
            read_len: read_bytes,
            leaving: VecDeque::new(),
            search_at: (0, 0),
            is_stopping: false,
        }
    }

    // ---- Connections ----

    /// Returns the key that the next connection gets, after [`Server::try_reserve_one`].
    pub fn vacant_key(&self) -> ConnKey {
        self.links.next_key()
    }

    /// Reserves memory for one more client. A client that is not accepted waits in the kernel.
    pub fn try_reserve_one(&mut self) -> Result<(), NoMemory> {
        headroom::keeping(self.headroom_for_one(), || {
            // Each client is named once in each list, and those that were just closed may still be.
            let clients =
                self.store.connections + self.store.queue.limits.accepts_per_iteration + 1;
            self.visits.try_reserve(clients)?;
            self.store.dirty.try_reserve(clients)?;
            self.store.held_back.try_reserve(clients)?;
            if self.store.queue.settings.body_cache_bytes.is_some() {
                self.store.reads.try_reserve(clients)?;
            }
            self.leaving.try_reserve(self.links.len() + 1)?;
            self.links.try_reserve_one()
        })
    }

    /// Returns whether there is memory for another client.
    pub fn has_room(&self) -> bool {
        self.store.has_headroom(self.headroom_for_one())
    }

    /// Returns what another client must leave. Only a worker can free the memory that jobs take, so a few
    /// clients need no more of it than their replies.
    fn headroom_for_one(&self) -> Headroom {
        if self.store.connections < FEW_CLIENTS { Headroom::Quarter } else { Headroom::Half }
    }

    /// Adds a connection, after [`Server::try_reserve_one`]. On an error the caller rejects the client.
    /// The address of a Unix socket is `None`: such a stream is read until it has no more bytes, because its end may
    /// come without an event.
    pub fn connect(&mut self, stream: S, address: Option<SocketAddr>) -> Result<ConnKey, NoMemory> {
        let key = self.vacant_key();
        let client = headroom::keeping(self.headroom_for_one(), || self.store.queue.connect(key))?;
        let conn = Conn::new(client, address, self.store.queue.now);
        let reads_to_the_end = address.is_none();
        self.links.insert(Link {
            stream: Some(stream),
            conn,
            seen: Readiness { is_writable: true, reads_to_the_end, ..Readiness::default() },
            is_queued: false,
            delayed_sends: 0,
            is_postponed: false,
        });
        self.store.total_connections += 1;
        self.store.connections += 1;
        debug!("connection {} opened", key.id());
        Ok(key)
    }

    /// Notes what has changed on the stream of a connection, which is visited in the next iteration.
    pub fn note(&mut self, key: ConnKey, change: impl FnOnce(&mut Readiness)) {
        if let Some(link) = link_of(&mut self.links, key) {
            change(&mut link.seen);
            self.visits.add(link);
        }
    }

    /// Closes a connection. Its key is free at once, or after some ticks if the connection has many jobs
    /// and watches to give back.
    pub fn close(&mut self, key: ConnKey, why: Option<&io::Error>) {
        let Some(link) = link_of(&mut self.links, key) else { return };
        link.close(&mut self.store, why);
        let rest = self.store.queue.work.give(self.store.queue.limits.closing_slice_work);
        self.leave_step(key);
        self.deliver();
        self.store.queue.work.end(rest);
    }

    /// Lets closed connections give back a slice each, in turn, so that the jobs of one delay no other.
    #[cold]
    fn leave(&mut self) {
        while self.store.queue.work.is_left()
            && let Some(key) = self.leaving.pop_front()
        {
            self.leave_step(key);
        }
    }

    /// Lets a closed connection give back a slice, and forgets it if that is all.
    fn leave_step(&mut self, key: ConnKey) {
        let Server { links, store: Store { queue, .. }, leaving, .. } = self;
        let Conn { client, doing, .. } = &mut links[key].conn;
        let Doing::Leaving(release_order) = doing else { return };
        let rest = queue.work.give_at_most(queue.limits.closing_slice_work);
        let is_done = queue.leave(client, release_order);
        queue.work.end(rest);
        if is_done {
            links.remove(key);
        } else {
            leaving.push_back(key);
        }
    }

    fn conn_ref(&self, key: ConnKey) -> Option<&Conn> {
        let open = self.links.get(key).filter(|link| link.stream.is_some());
        open.map(|link| &link.conn)
    }

    /// Calls `run` with a connection and the store.
    fn with<R>(&mut self, key: ConnKey, run: impl FnOnce(&mut Conn, &mut Store) -> R) -> Option<R> {
        let link = link_of(&mut self.links, key)?;
        Some(run(&mut link.conn, &mut self.store))
    }

    // ---- One iteration ----

    /// Begins an iteration: does due work, or a part of it that fits into the iteration. `next_due` is what
    /// [`Server::next_due`] has returned since the last one.
    // A call costs less than what it would make the loop keep in memory: 70 instructions an operation.
    #[inline(never)]
    pub fn begin(&mut self, now: Nanos, next_due: Nanos) {
        let s = &mut self.store;
        s.advance(now);
        self.visits.begin();
        s.queue.tick_binlog();
        // No time is known for the end of a read.
        if s.queue.settings.body_cache_bytes.is_some() || next_due <= now {
            self.tick();
        }
        let s = &mut self.store;
        let syncs = s.queue.syncs_each_iteration();
        let to_visit = self.visits.len();
        s.queue.work.begin_visits(to_visit, syncs, &s.queue.limits);
        self.read_len = if s.is_crowded() {
            s.queue.limits.crowded_read_bytes
        } else if to_visit <= s.queue.limits.long_reads_per_iteration {
            s.queue.limits.read_bytes
        } else {
            s.queue.limits.short_read_bytes
        };
    }

    fn tick(&mut self) {
        let queue = &mut self.store.queue;
        queue.work.begin_tick(self.visits.len(), queue.is_late, &queue.limits);
        self.tick_reads();
        self.store.queue.tick();
        self.run_due_conns();
        self.store.queue.work.begin_due();
        self.leave();
        if list_step(&mut self.store) {
            self.send_lists();
        }
        if self.store.queue.has_flushes() && !self.store.is_congested() {
            self.end_flushes();
        }
        self.store.queue.work.begin_due();
        self.deliver();
    }

    /// Does what is due for connections, and ends their waits.
    fn run_due_conns(&mut self) {
        let Server { links, store: s, .. } = self;
        s.queue.work.begin_due();
        while s.queue.work.is_left()
            && let Some(key) = s.queue.next_due_conn()
        {
            let Some(Link { conn, .. }) = links.get_mut(key) else { continue };
            let others = s.queue.work.give_at_most(s.queue.limits.due_slice_work);
            if let Some(result) = s.queue.run_due_client(&mut conn.client) {
                conn.end_wait(s, result);
            }
            s.queue.work.end(others);
        }
        s.queue.end_tick();
    }

    /// Sends the list of all tubes to connections that have requested it.
    #[cold]
    fn send_lists(&mut self) {
        for _ in 0..self.store.queue.limits.lists_sent_per_tick {
            let Some((key, reply)) = self.store.lists.next_reply() else { break };
            self.finish(key, reply);
        }
    }

    /// Frees flushed jobs, and replies to the connections whose flush is complete.
    #[cold]
    fn end_flushes(&mut self) {
        let queue = &mut self.store.queue;
        if queue.syncs_each_iteration() {
            // Clients wait for the sync of the iteration, which takes longer than this work.
            queue.work.begin(queue.limits.most_due_work);
        } else {
            queue.work.begin_due();
        }
        while let Some((key, count)) = self.flush_step() {
            self.finish(key, Reply::Number("FLUSHED ", count));
        }
    }

    /// Frees flushed jobs, also those that connections hold. Returns the first connection whose flush is
    /// complete, and the number of deleted jobs.
    fn flush_step(&mut self) -> Option<(ConnKey, u64)> {
        let Server { links, store: Store { queue, .. }, search_at, .. } = self;
        queue.flush_step(|queue| {
            let (number, index) = search_at;
            let link = links.get_mut(ConnKey::from_index(*number));
            if link.is_none_or(|link| queue.free_all_held(&mut link.conn.client, index)) {
                let next = *number + 1;
                *search_at = (if next < links.numbers_end() { next } else { 0 }, 0);
            }
        })
    }

    /// Replies to a connection that has waited for this.
    fn finish(&mut self, key: ConnKey, reply: Reply) {
        self.with(key, |c, s| {
            c.doing = Doing::Line;
            c.answer_later(s, Ok(reply));
        });
    }

    /// Replies to the connections whose waits have ended, and starts replies whose bodies are in memory.
    fn deliver(&mut self) {
        loop {
            // A reply that is refused gives its jobs to other workers.
            if let Some((key, job)) = self.store.queue.woken.pop_front() {
                self.with(key, |c, s| c.end_wait(s, WaitResult::Reserved(job)));
            } else if std::mem::take(&mut self.store.reads.has_new) {
                self.start_replies();
            } else {
                return;
            }
        }
    }

    /// Writes the records of the iteration to the binlog, and syncs it if that is due. After an error no
    /// output may be sent, and the server must exit.
    ///
    /// A remote disk acknowledges the records later. Until then the output of the iteration is held back.
    pub fn commit(&mut self, now: Nanos) -> Result<(), BinlogError> {
        if let Some(binlog) = &mut self.store.queue.binlog {
            binlog.commit(now)?;
            if binlog.holds_replies() {
                self.note_progress();
            }
        }
        Ok(())
    }

    /// Begins to sync what remains on a remote disk, and looks how far it is: for a server that was closed.
    pub fn sync_rest(&mut self) {
        self.store.queue.binlog.iter_mut().for_each(Binlog::sync_if_due);
        self.note_progress();
    }

    /// Wakes the connections with output that was held back, if the disk has acknowledged more.
    fn note_progress(&mut self) {
        let s = &mut self.store;
        let progress = s.queue.binlog.as_ref().and_then(Binlog::progress);
        let Some(progress) = progress else { return };
        let before = s.progress.replace(progress).unwrap_or_default();
        match (before.is_stalled(), progress.is_stalled()) {
            (false, true) => warn!(
                "the binlog has not stored a change for more than 1 s; replies wait, and the server \
                 reports that it is not ready"
            ),
            (true, false) if progress.ended > before.ended => {
                warn!("the binlog stores changes again");
            }
            (true, false) | (false, false) | (true, true) => {}
        }
        if progress.ended > before.ended || (progress.has_overdue() && progress.now > before.now) {
            for at in 0..s.held_back.len() {
                // The connection may have been closed, and its key given to a new one.
                self.with(self.store.held_back[at], |c, s| {
                    c.is_held_back = false;
                    c.mark_dirty(s);
                });
            }
            self.store.held_back.clear();
        }
    }

    /// Writes and syncs all records before the server exits; does not sync with `-F`.
    pub fn stop(&mut self, now: Nanos) -> Result<(), BinlogError> {
        self.is_stopping = true;
        self.store.advance(now);
        // C beanstalkd ignores the record of a flush. It needs the deletes of all flushed jobs.
        while self.store.queue.has_flushes() {
            self.store.queue.work.begin_due();
            self.flush_step();
        }
        let queue = &mut self.store.queue;
        queue.binlog.as_mut().map_or(Ok(()), |binlog| binlog.close(now))?;
        self.note_progress();
        Ok(())
    }

    /// Returns whether the next iteration has something to do at once.
    pub fn is_busy(&self) -> bool {
        let can_visit = self.visits.len() > 0 && !self.store.is_congested();
        can_visit || !self.store.dirty.is_empty()
    }

    /// Returns a time not after the one when [`Server::begin`] or [`Server::commit`] has something to do;
    /// [`Nanos::NEVER`] if nothing is due.
    pub fn next_due(&self) -> Nanos {
        let s = &self.store;
        let is_due = !self.leaving.is_empty()
            || !s.lists.is_idle()
            || (s.queue.has_flushes() && !s.is_congested());
        if is_due { Nanos::ZERO } else { s.queue.next_due().min(self.reads_due()) }
    }

    // ---- Facts ----

    /// Returns whether a remote disk has acknowledged all changes.
    pub fn is_acknowledged(&self) -> bool {
        self.store.progress.is_none_or(Progress::is_complete)
    }

    /// Returns whether some output may be sent.
    pub fn has_replies(&self) -> bool {
        self.links.iter().any(|(_, link)| link.conn.output.sendable_len() > 0)
    }

    /// Returns the number of closed connections that have not given back all jobs and watches.
    pub fn leaving_count(&self) -> usize {
        self.leaving.len()
    }

    /// Returns the counts that the service manager shows.
    pub fn summary(&self) -> StatusLine {
        let Totals { ready, reserved, delayed, buried, .. } = self.store.queue.totals;
        let (connections, is_draining) = (self.store.connections, self.store.is_draining);
        StatusLine { ready, reserved, delayed, buried, connections, is_draining }
    }
}

impl<S: Read + Write> Server<S> {
    /// Visits the next ready connection, each at most once in an iteration. Returns `None` if all were
    /// visited, if the work of the iteration is used up (the others come first in the next one), or if the binlog is
    /// congested.
    ///
    /// `clock` is read again after bytes have arrived: a timeout must not count from a moment before its
    /// command.
    pub fn visit_next(&mut self, clock: &mut dyn FnMut() -> Nanos) -> Option<ConnKey> {
        if self.store.is_congested() {
            return None;
        }
        let key = self.visits.next(self.store.queue.work.is_left())?;
        self.visit(key, clock);
        Some(key)
    }

    /// Runs buffered commands, reads once, and runs what has come. Closes a connection that has ended, unless it has
    /// output.
    // Within the loop it would take the registers that the loop needs.
    #[inline(never)]
    fn visit(&mut self, key: ConnKey, clock: &mut dyn FnMut() -> Nanos) {
        let Server { links, store: s, scratch, read_len, .. } = self;
        let Some(link) = link_of(links, key) else { return };
        link.is_queued = false;
        s.queue.work.spend(WORK_PER_VISIT);
        let others = s.queue.work.give_share();
        link.conn.mark_dirty(s);
        if link.seen.is_half_closed {
            link.conn.half_close(s);
        }
        if link.conn.has_backlog && link.conn.can_run(s) {
            s.advance(clock());
            link.conn.resume(s);
        }
        let mut read = Ok(());
        if link.seen.is_readable && link.conn.can_read(s) {
            read = link.read(s, scratch, *read_len, clock);
        }
        let goes_on = link.conn.has_backlog || !link.conn.doing.is_runnable();
        let may_end = goes_on || link.conn.input_ended;
        self.deliver();
        match read {
            Ok(()) if goes_on => self.run_rest(key),
            Ok(()) => {}
            Err(error) => self.close(key, Some(&error)),
        }
        // The commands of others that follow see that it is closed.
        if may_end && link_of(&mut self.links, key).is_some_and(|link| link.conn.is_finished()) {
            self.close(key, None);
        }
        self.store.queue.work.end(others);
    }

    /// Goes on with a connection that has ended the wait of another one, or whose reply had bodies that were
    /// in the page cache. One that is gone waits for no others: its jobs are for other clients, and its next commands
    /// run.
    fn run_rest(&mut self, key: ConnKey) {
        loop {
            self.report(key);
            self.deliver();
            let Server { links, store: s, .. } = self;
            let Some(Link { conn, seen, .. }) = link_of(links, key) else { return };
            if seen.is_hung_up && matches!(conn.doing, Doing::Wait(WaitFor::Bodies(_))) {
                give_up(conn, s);
            } else if conn.has_backlog && s.queue.work.is_left() && conn.can_run(s) {
                conn.resume(s);
            } else {
                return;
            }
        }
    }
}

impl<S> Observed for Server<S> {
    fn store(&self) -> &Store {
        &self.store
    }

    fn conn(&self, number: usize) -> Option<&Conn> {
        self.links.get(ConnKey::from_index(number)).map(|link| &link.conn)
    }

    fn numbers_end(&self) -> usize {
        self.links.numbers_end()
    }
}

/// Returns a connection, unless it is closed.
fn link_of<S>(links: &mut Links<S>, key: ConnKey) -> Option<&mut Link<S>> {
    links.get_mut(key).filter(|link| link.stream.is_some())
}
