//! The rules: how jobs come, move between their states, and go.
//!
//! ```text
//!    put with delay               release with delay
//!   ----------------> [delayed] <--------------------.
//!                       |                             |
//!                       | time passes, kick           |
//!   put                 v              reserve        |        delete
//!   ----------------> [ready] --------------------> [reserved] --------> gone
//!                       ^  ^                          |  |
//!                       |   `---- release, timeout ---'  |
//!                       | kick                           |
//!                    [buried] <------------------- bury -'
//! ```
//!
//! Delete also takes ready, delayed and buried jobs, and reserve-job reserves them.
//!
//! Every move is the same two steps: the job leaves where it stands, then it enters where
//! it goes; the counts are kept there and nowhere else. A job that becomes ready is
//! offered to whoever waits at its tube (`waiting.rs`), in a step that can be seen in
//! `make_ready`. Who got a job, or waited in vain, is told in [`Queue::wait_results`];
//! the rules know connections by key and never speak to them.
//!
//! | file | owns |
//! |---|---|
//! | [`job`] | jobs, by key and by id |
//! | [`tube`] | tubes, by key and by name |
//! | [`body`] | the bytes of jobs |
//! | [`waiters`] | which waiting worker gets which job |
//! | [`listing`] | lists of very many tubes, made in steps |
//! | [`log`] | what is recorded in the binlog, and when |
//! | [`replay`] | rebuilds the queue from the files of a binlog |
//! | [`check`] | counts everything again and compares, for tests |

pub mod body;
pub mod check;
pub mod job;
pub mod listing;
pub mod log;
pub mod replay;
pub mod tube;
pub mod waiters;

use super::binlog::{Binlog, NoSpace};
use super::collections::heap::Heap;
use super::collections::slab::PagedSlab;
use super::collections::wheel::Wheel;
use super::headroom::{self, Headroom};
use super::keys::{ConnKey, JobKey, Key, TimerKey, TubeKey};
use super::time::{ClockOffset, Nanos};
use body::{Bodies, Body};
use job::{DelayedEntry, Job, JobParams, Jobs, ReadyEntry, ReservedEntry, State, Target};
use std::collections::{TryReserveError, VecDeque};
use tube::{Pause, Tube, Tubes};
use waiters::{Offered, Wait, WaitSeq, Watches, Watching};

/// All jobs, tubes and clients, and the rules for them.
#[derive(Debug)]
pub struct Queue {
    /// The jobs.
    pub jobs: Jobs,
    /// What they carry.
    pub bodies: Bodies,
    /// The tubes.
    pub tubes: Tubes,
    /// What the rules know of the connections.
    pub clients: Clients,
    /// Who watches what.
    pub watches: Watches,
    /// What waiting connections are to be told, in the order in which it came to be.
    pub wait_results: VecDeque<(ConnKey, WaitResult)>,
    /// The sums for `stats`.
    pub totals: Totals,
    /// Where it is written down what becomes of jobs, if anywhere.
    binlog: Option<Binlog>,
    /// How far the time of day is ahead.
    pub clock_offset: ClockOffset,
    next_ticket: WaitSeq,
    reservations: u64,
    /// Tubes and connections whose timer went off and for which not all was done that is due, in the
    /// order in which they have their turns.
    overdue_tubes: VecDeque<TubeKey>,
    overdue_conns: VecDeque<ConnKey>,
    /// Something that is due was put off for longer than [`LATE`].
    is_late: bool,
    /// Closed connections that still have jobs or watches to give back.
    closing: VecDeque<Closing>,
    /// Units of work that are left in this iteration for connections that are closed in it.
    closing_work_left: usize,
    /// How many bytes compaction has moved, and how many pages of bodies were freed, since
    /// somebody last asked.
    moved_bytes: usize,
    /// How many watches must be looked at again, since somebody last asked.
    invalidated: usize,
    freed_pages: usize,
    wheel: Wheel<TimerOwner>,
}

/// Why a connection waits no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitResult {
    /// It now holds this job.
    Reserved(JobKey),
    /// A job that it holds has a second or less to its deadline.
    DeadlineSoon,
    /// Its own timeout is over.
    TimedOut,
}

/// The result of one step of a reserve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepResult {
    /// The connection now holds this job.
    Reserved(JobKey),
    /// There is none.
    Nothing,
    /// The step limit was reached before all watched tubes were checked.
    Unfinished,
}

/// A closed connection whose jobs and watches are given back in steps.
#[derive(Debug)]
struct Closing {
    conn: ConnKey,
    /// The jobs that it held, the first one last; empty when they are very many.
    held: Vec<JobKey>,
}

/// What came of a command for one job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is done.
    Done,
    /// The job went among the buried instead, for want of memory.
    Buried,
    /// There is no such job that it could be done to.
    NotFound,
    /// There is no space for it in the binlog, and nothing has happened.
    NoSpace,
}

/// How far a `kick` has come.
#[derive(Clone, Copy, Debug)]
pub struct Kick {
    pub tube: TubeKey,
    /// Buried jobs are kicked, not delayed ones.
    are_buried: bool,
    /// How many are still to be kicked.
    pub left: u32,
    /// How many have been.
    pub kicked: u32,
}

/// How many jobs are in which state, and how many did what.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub urgent: u64,
    pub ready: u64,
    pub reserved: u64,
    pub delayed: u64,
    pub buried: u64,
    pub timeouts: u64,
    pub total_jobs: u64,
    pub producers: u64,
    pub workers: u64,
    pub waiting: u64,
}

/// What the rules know of each connection.
pub type Clients = PagedSlab<ConnKey, Client>;

/// What the rules know of a connection.
#[derive(Debug)]
pub struct Client {
    /// The tube for its puts.
    pub used: TubeKey,
    /// The tubes from which it reserves.
    pub watching: Watching,
    /// The jobs that it holds.
    reserved: Heap<ReservedEntry>,
    /// Goes off when its next deadline, safety margin or timeout is due.
    timer: TimerKey,
    is_producer: bool,
    is_worker: bool,
    /// It is among those that are overdue.
    is_overdue: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimerOwner {
    Tube(TubeKey),
    Client(ConnKey),
}

/// Jobs with a priority below this count as urgent.
const URGENT_BELOW: u32 = 1024;

/// A waiting worker is warned when a job that it holds is this close to its deadline.
const SAFETY_MARGIN: Nanos = Nanos::from_secs(1);

/// What takes as long as a command: so many bytes moved by compaction, and so small a part of a
/// page that goes back to the system, with the jobs that its bodies belonged to.
const MOVED_PER_WORK: usize = 2048;
const WORK_PER_PAGE: usize = 32;
/// So many watches that must be looked at again take as long.
const INVALIDATED_PER_WORK: usize = 4;

/// A tick looks at no more timers.
const TIMERS_PER_TICK: usize = 1024;
/// One tube or connection for which something is due gets this many units at a time, so that a large
/// backlog of one delays no other.
const DUE_SLICE: usize = 256;
/// When something that is due has waited this long, ticks do more.
const LATE: Nanos = Nanos::from_millis(20);
/// The most and the fewest units of work, each about a quarter of a microsecond, that a tick does for
/// tubes, and again for connections. The rest is done in the next iterations.
pub const MOST_DUE_WORK: usize = 2048;
pub const LEAST_DUE_WORK: usize = 64;
/// The fewest while something is late.
pub const LATE_DUE_WORK: usize = 256;
/// The same for connections that end in an iteration, and for those that have ended.
const CLOSING_WORK: usize = 1024;
/// At most this much of that is for one connection at a time, so that one with many jobs delays no
/// other.
const CLOSING_SLICE: usize = 256;
/// To move a job, to end a watch, and to answer a connection.
const WORK_PER_MOVE: usize = 2;
const WORK_PER_WATCH: usize = 4;
pub const WORK_PER_WAKE: usize = 16;
/// Up to this many jobs of a closed connection become ready in the order in which they were
/// reserved.
const HELD_IN_ORDER: usize = 4096;

/// One step of the rules answers at most this many waiting connections: to each of them something
/// is sent, which takes some 5 us.
const WAKES_AT_ONCE: usize = 128;

impl Queue {
    /// An empty queue with the `default` tube.
    pub fn new(now: Nanos) -> Queue {
        let mut queue = Queue {
            jobs: Jobs::default(),
            bodies: Bodies::default(),
            tubes: Tubes::default(),
            clients: Clients::default(),
            watches: Watches::default(),
            wait_results: VecDeque::new(),
            totals: Totals::default(),
            binlog: None,
            clock_offset: ClockOffset::default(),
            next_ticket: WaitSeq::FIRST,
            reservations: 0,
            overdue_tubes: VecDeque::new(),
            overdue_conns: VecDeque::new(),
            is_late: false,
            closing: VecDeque::new(),
            closing_work_left: CLOSING_WORK,
            moved_bytes: 0,
            invalidated: 0,
            freed_pages: 0,
            wheel: Wheel::new(now),
        };
        let default = queue.find_or_create_tube("default");
        assert_eq!(default.ok(), Some(Tubes::DEFAULT), "the first tube has the first key");
        queue
    }

    // ---- Connections ----

    /// A new connection, which uses and watches `default`.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn connect(&mut self) -> Result<ConnKey, TryReserveError> {
        self.clients.try_reserve_one()?;
        // The timer needs to know the connection and the connection its timer.
        let timer = self.wheel.create(TimerOwner::Tube(Tubes::DEFAULT))?;
        let conn = self.clients.insert(Client {
            used: Tubes::DEFAULT,
            watching: Watching::default(),
            reserved: Heap::default(),
            timer,
            is_producer: false,
            is_worker: false,
            is_overdue: false,
        });
        self.wheel.set_owner(timer, TimerOwner::Client(conn));
        if let Err(no_memory) = self.add_watch(conn, Tubes::DEFAULT) {
            self.wheel.destroy(timer);
            self.clients.remove(conn);
            return Err(no_memory);
        }
        self.tubes[Tubes::DEFAULT].using += 1;
        Ok(conn)
    }

    /// Closes a connection: it stops waiting, its jobs become ready in the order in which they were
    /// reserved, and its watches end. Returns whether all of that is done; otherwise
    /// [`Queue::close_next`] does the rest. More than 4096 jobs become ready with the soonest deadlines
    /// first.
    pub fn disconnect(&mut self, conn: ConnKey, now: Nanos) -> bool {
        self.stop_waiting(conn);
        let client = &mut self.clients[conn];
        self.totals.producers -= u64::from(std::mem::take(&mut client.is_producer));
        self.totals.workers -= u64::from(std::mem::take(&mut client.is_worker));
        let mut held: Vec<ReservedEntry> = Vec::new();
        let count = client.reserved.len();
        if count <= HELD_IN_ORDER && held.try_reserve_exact(count).is_ok() {
            held.extend(client.reserved.iter());
            held.sort_unstable_by_key(|held| held.turn);
            held.reverse();
        }
        let held = held.into_iter().map(|held| held.job).collect();
        let mut closing = Closing { conn, held };
        let mut work_left = self.closing_work_left;
        let is_done = with_slice(&mut work_left, CLOSING_SLICE, |slice_left| {
            self.close_some(&mut closing, slice_left, now)
        });
        self.closing_work_left = work_left;
        if !is_done {
            self.closing.push_back(closing);
        }
        is_done
    }

    /// Takes back [`Queue::connect`], at once.
    pub fn undo_connect(&mut self, conn: ConnKey, now: Nanos) {
        let mut closing = Closing { conn, held: Vec::new() };
        self.close_some(&mut closing, &mut usize::MAX.clone(), now);
    }

    /// Gives back more jobs and watches of closed connections. Returns the next connection that has
    /// none left; its key may be used again.
    pub fn close_next(&mut self, work_left: &mut usize, now: Nanos) -> Option<ConnKey> {
        while *work_left > 0 {
            let mut closing = self.closing.pop_front()?;
            let is_done = with_slice(work_left, CLOSING_SLICE, |slice_left| {
                self.close_some(&mut closing, slice_left, now)
            });
            if is_done {
                return Some(closing.conn);
            }
            self.closing.push_back(closing);
        }
        None
    }

    /// Closed connections that still have jobs or watches to give back.
    pub fn closing(&self) -> impl ExactSizeIterator<Item = ConnKey> + '_ {
        self.closing.iter().map(|closing| closing.conn)
    }

    /// Makes sure that one more of the clients can be closed without need of memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_closing(&mut self) -> Result<(), TryReserveError> {
        self.closing.try_reserve(self.clients.len() + 1)
    }

    fn close_some(&mut self, closing: &mut Closing, work_left: &mut usize, now: Nanos) -> bool {
        let conn = closing.conn;
        while let Some(held) = self.clients[conn].reserved.first() {
            if *work_left == 0 {
                return false;
            }
            // Its TTR may have run out meanwhile, and the job may be gone.
            let is_held = |job: &JobKey| {
                let state = self.jobs.get(*job).map(|job| job.state);
                matches!(state, Some(State::Reserved { by, .. }) if by == conn)
            };
            let job = closing.held.pop().filter(is_held).unwrap_or(held.job);
            self.make_ready_at_cost(job, work_left, now);
        }
        while let Some(watch) = self.clients[conn].watching.first_watch() {
            if *work_left == 0 {
                return false;
            }
            *work_left = work_left.saturating_sub(WORK_PER_WATCH);
            let tube = self.remove_watch(watch);
            self.remove_tube_if_idle(tube);
        }
        self.forget(conn);
        true
    }

    /// Makes a job ready, and counts the work of that.
    fn make_ready_at_cost(&mut self, job: JobKey, work_left: &mut usize, now: Nanos) {
        let before = self.wait_results.len();
        self.make_ready(job, now);
        let wakes = self.wait_results.len() - before;
        *work_left = work_left.saturating_sub(WORK_PER_MOVE + wakes * WORK_PER_WAKE);
    }

    /// The connection, which holds no job, watches no tube and does not wait, is gone.
    fn forget(&mut self, conn: ConnKey) {
        let client = self.clients.remove(conn).expect("a connection ends once");
        self.wheel.destroy(client.timer);
        self.tubes[client.used].using -= 1;
        self.remove_tube_if_idle(client.used);
    }

    /// The connection counts as a producer from now on.
    pub fn becomes_producer(&mut self, conn: ConnKey) {
        let was_one = std::mem::replace(&mut self.clients[conn].is_producer, true);
        self.totals.producers += u64::from(!was_one);
    }

    /// The connection counts as a worker from now on.
    pub fn becomes_worker(&mut self, conn: ConnKey) {
        let was_one = std::mem::replace(&mut self.clients[conn].is_worker, true);
        self.totals.workers += u64::from(!was_one);
    }

    // ---- Tubes ----

    /// The connection puts into the tube of this name from now on.
    ///
    /// # Errors
    /// There is no memory for the tube.
    pub fn use_tube(&mut self, conn: ConnKey, name: &str) -> Result<(), TryReserveError> {
        let tube = self.find_or_create_tube(name)?;
        self.tubes[tube].using += 1;
        let left = std::mem::replace(&mut self.clients[conn].used, tube);
        self.tubes[left].using -= 1;
        self.remove_tube_if_idle(left);
        Ok(())
    }

    /// The connection reserves from the tube of this name too.
    ///
    /// # Errors
    /// There is no memory for the tube or the watch.
    pub fn watch(&mut self, conn: ConnKey, name: &str) -> Result<(), TryReserveError> {
        let tube = self.find_or_create_tube(name)?;
        let added = self.add_watch(conn, tube);
        self.remove_tube_if_idle(tube);
        added
    }

    /// The connection reserves from the tube of this name no more. `false` when it is the
    /// only one that it watches: then it stays.
    pub fn ignore(&mut self, conn: ConnKey, name: &str) -> bool {
        let Some(tube) = self.tubes.find(name) else { return true };
        let Some(watch) = self.find_watch(conn, tube) else { return true };
        if self.clients[conn].watching.len() == 1 {
            return false;
        }
        self.remove_watch(watch);
        self.remove_tube_if_idle(tube);
        true
    }

    /// No job of the tube of this name is reserved for so long. `false` when there is no
    /// such tube.
    pub fn pause(&mut self, name: &str, secs: u32, now: Nanos) -> bool {
        let Some(key) = self.tubes.find(name) else { return false };
        let until = now + Nanos::from_secs(secs);
        let tube = &mut self.tubes[key];
        tube.pauses += 1;
        if secs == 0 {
            // Quirk: no time at all, so it only ends what pause there was; pinned by
            // tests/conversations/pause-tube-anew.txt.
            self.end_pause(key, &mut (WAKES_AT_ONCE * WORK_PER_WAKE), now);
        } else {
            tube.pause = Some(Box::new(Pause { secs, until }));
            self.wheel.set_no_later_than(tube.timer, until);
        }
        true
    }

    /// Hands jobs to waiting connections, as far as `work_left` allows. If more of them could be
    /// served, the pause stays in force, and the next tick serves them.
    fn end_pause(&mut self, key: TubeKey, work_left: &mut usize, now: Nanos) {
        let pause = self.tubes[key].pause.take();
        while *work_left > 0 && self.serve_one(key, now) {
            *work_left = work_left.saturating_sub(WORK_PER_WAKE);
        }
        if self.tubes[key].offer().is_none() {
            return;
        }
        if self.longest_waiting(key).is_some() {
            let tube = &mut self.tubes[key];
            tube.pause = pause;
            tube.pause.iter_mut().for_each(|pause| pause.until = now);
            self.wheel.set_no_later_than(tube.timer, now);
        } else {
            self.invalidate(key);
        }
    }

    /// The tube of this name; made if there is none.
    fn find_or_create_tube(&mut self, name: &str) -> Result<TubeKey, TryReserveError> {
        if let Some(tube) = self.tubes.find(name) {
            return Ok(tube);
        }
        // The timer needs to know the tube and the tube its timer.
        let timer = self.wheel.create(TimerOwner::Tube(Tubes::DEFAULT))?;
        match self.tubes.create(name, timer) {
            Ok(tube) => {
                self.wheel.set_owner(timer, TimerOwner::Tube(tube));
                Ok(tube)
            }
            Err(no_memory) => {
                self.wheel.destroy(timer);
                Err(no_memory)
            }
        }
    }

    /// Removes the tubes that nobody needs.
    fn remove_idle_tubes(&mut self) {
        // From the end: the last one takes the place of one that goes, and has been seen then.
        for place in (0..self.tubes.len()).rev() {
            self.remove_tube_if_idle(self.tubes.at(place));
        }
    }

    fn remove_tube_if_idle(&mut self, tube: TubeKey) {
        if let Some(timer) = self.tubes.remove_if_idle(tube) {
            self.wheel.destroy(timer);
        }
    }

    // ---- Jobs ----

    /// A new job in the tube that the connection uses, with this body, which is complete.
    ///
    /// # Errors
    /// There is no room for it: nothing has happened.
    pub fn put(
        &mut self,
        conn: ConnKey,
        id: u64,
        terms: JobParams,
        body: Body,
        now: Nanos,
    ) -> Result<(), NoSpace> {
        let key = self.clients[conn].used;
        if let Err(no_room) = self.make_room_for_job(key, terms, &body) {
            self.drop_body(body);
            return Err(no_room);
        }
        self.tubes[key].total_jobs += 1;
        self.totals.total_jobs += 1;
        let job = self.jobs.insert(Job::new(id, key, terms, body, now));
        let to = self.jobs[job].destination(now);
        self.record_put(job, to, now);
        self.place(job, to, now);
        Ok(())
    }

    fn make_room_for_job(
        &mut self,
        key: TubeKey,
        terms: JobParams,
        body: &Body,
    ) -> Result<(), NoSpace> {
        let tube = &mut self.tubes[key];
        self.jobs.try_reserve_one()?;
        tube.ready.try_reserve(1)?;
        tube.delayed.try_reserve(usize::from(terms.delay_secs > 0))?;
        self.reserve_put(key, body.full_len() as usize)
    }

    /// A body is not needed any more.
    pub fn drop_body(&mut self, body: Body) {
        self.freed_pages += usize::from(self.bodies.remove(body));
    }

    /// Makes sure that the connection can hold one more job without need of memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_room(&mut self, conn: ConnKey) -> Result<(), TryReserveError> {
        self.clients[conn].reserved.try_reserve(1)
    }

    /// The best job for the connection, which holds it from then on. Looks at no more tubes than
    /// `steps_left` allows.
    ///
    /// # Errors
    /// There is no memory to compare what its tubes offer.
    pub fn reserve(
        &mut self,
        conn: ConnKey,
        steps_left: &mut usize,
        now: Nanos,
    ) -> Result<StepResult, TryReserveError> {
        match self.best_offer(conn, steps_left)? {
            Offered::Job(offer) => {
                self.make_reserved(offer.job, conn, now);
                Ok(StepResult::Reserved(offer.job))
            }
            Offered::Nothing => Ok(StepResult::Nothing),
            Offered::Unknown => Ok(StepResult::Unfinished),
        }
    }

    /// The job `id` for the connection, unless somebody holds it already.
    pub fn reserve_job(&mut self, conn: ConnKey, id: u64, now: Nanos) -> Option<JobKey> {
        let job = self.jobs.find(id)?;
        if matches!(self.jobs[job].state, State::Reserved { .. }) {
            return None;
        }
        self.make_reserved(job, conn, now);
        Some(job)
    }

    /// Removes the job `id`, unless somebody else holds it.
    pub fn delete(&mut self, conn: ConnKey, id: u64) -> Outcome {
        let Some(job) = self.jobs.find(id) else { return Outcome::NotFound };
        if matches!(self.jobs[job].state, State::Reserved { by, .. } if by != conn) {
            return Outcome::NotFound;
        }
        if self.reserve_delete().is_err() {
            return Outcome::NoSpace;
        }
        self.leave(job);
        let job = self.jobs.remove(job);
        self.record_delete(&job);
        self.tubes[job.tube].deletes += 1;
        self.remove_tube_if_idle(job.tube);
        self.drop_body(job.body);
        self.compact();
        Outcome::Done
    }

    /// Gives back a job that the connection holds, with a new priority and delay.
    pub fn release(
        &mut self,
        conn: ConnKey,
        id: u64,
        pri: u32,
        delay_secs: u32,
        now: Nanos,
    ) -> Outcome {
        let Some(key) = self.held(conn, id) else { return Outcome::NotFound };
        if self.reserve_update().is_err() {
            return Outcome::NoSpace;
        }
        let job = &mut self.jobs[key];
        job.pri = pri;
        job.delay_secs = delay_secs;
        job::count_one(&mut job.counts.releases);
        let to = job.destination(now);
        self.send(key, to, now);
        let is_buried = matches!(self.jobs[key].state, State::Buried(_));
        self.compact();
        if is_buried { Outcome::Buried } else { Outcome::Done }
    }

    /// Buries a job that the connection holds, with a new priority.
    pub fn bury(&mut self, conn: ConnKey, id: u64, pri: u32, now: Nanos) -> Outcome {
        let Some(key) = self.held(conn, id) else { return Outcome::NotFound };
        if self.reserve_update().is_err() {
            return Outcome::NoSpace;
        }
        let job = &mut self.jobs[key];
        job.pri = pri;
        job::count_one(&mut job.counts.buries);
        self.send(key, Target::Buried, now);
        self.compact();
        Outcome::Done
    }

    /// Moves the deadline of a job that the connection holds to a full TTR from now.
    /// `false` when it holds no such job.
    pub fn touch(&mut self, conn: ConnKey, id: u64, now: Nanos) -> bool {
        let Some(key) = self.held(conn, id) else { return false };
        let job = &self.jobs[key];
        let State::Reserved { place, .. } = job.state else { return false };
        let deadline = now + Nanos::from_secs(job.ttr_secs);
        let reserved = &mut self.clients[conn].reserved;
        let entry = ReservedEntry { deadline, ..reserved.at(place) };
        reserved.replace(place, entry, &mut self.jobs);
        self.set_client_timer(conn, now);
        true
    }

    /// What `kick` with this bound means for the tube: buried jobs if there are any, else delayed
    /// ones, and no more than there are.
    pub fn plan_kick(&self, tube: TubeKey, bound: u32) -> Kick {
        let Tube { buried, delayed, .. } = &self.tubes[tube];
        let are_buried = !buried.is_empty();
        let count = if are_buried { buried.len() as usize } else { delayed.len() };
        let left = bound.min(u32::try_from(count).unwrap_or(u32::MAX));
        Kick { tube, are_buried, left, kicked: 0 }
    }

    /// Makes jobs ready until `kick.left` or `limit` is reached, `WAKES_AT_ONCE` connections are
    /// woken, or the tube has no more of them.
    ///
    /// # Errors
    /// There is no space in the binlog for even one.
    pub fn kick(&mut self, kick: &mut Kick, limit: u32, now: Nanos) -> Result<(), NoSpace> {
        for _ in 0..limit.min(kick.left) {
            let tube = &self.tubes[kick.tube];
            let next = if kick.are_buried { tube.first_buried() } else { tube.first_delayed() };
            match next.map(|job| self.kick_one(job, now)) {
                Some(Ok(())) => {
                    kick.left -= 1;
                    kick.kicked += 1;
                }
                Some(Err(_)) if kick.kicked > 0 => kick.left = 0,
                Some(Err(no_room)) => {
                    kick.left = 0;
                    return Err(no_room);
                }
                None => kick.left = 0,
            }
            if kick.left == 0 || self.wait_results.len() >= WAKES_AT_ONCE {
                break;
            }
        }
        self.compact();
        Ok(())
    }

    /// Makes the job `id` ready, if it is buried or delayed.
    pub fn kick_job(&mut self, id: u64, now: Nanos) -> Outcome {
        let Some(job) = self.jobs.find(id) else { return Outcome::NotFound };
        if !matches!(self.jobs[job].state, State::Buried(_) | State::Delayed { .. }) {
            return Outcome::NotFound;
        }
        let kicked = self.kick_one(job, now);
        self.compact();
        if kicked.is_ok() { Outcome::Done } else { Outcome::NoSpace }
    }

    fn kick_one(&mut self, job: JobKey, now: Nanos) -> Result<(), NoSpace> {
        self.reserve_update()?;
        job::count_one(&mut self.jobs[job].counts.kicks);
        self.send(job, Target::Ready, now);
        Ok(())
    }

    /// How much work has been done since this was last asked, beside one step for each command.
    pub fn take_work(&mut self) -> usize {
        let moved = std::mem::take(&mut self.moved_bytes) / MOVED_PER_WORK;
        moved + std::mem::take(&mut self.freed_pages) * WORK_PER_PAGE
    }

    /// Returns how much work it was to note for other connections that a tube offers something better,
    /// since this was last asked.
    pub fn take_unsettling_work(&mut self) -> usize {
        std::mem::take(&mut self.invalidated) / INVALIDATED_PER_WORK
    }

    fn held(&self, conn: ConnKey, id: u64) -> Option<JobKey> {
        let is_held = |&job: &JobKey| matches!(self.jobs[job].state, State::Reserved { by, .. } if by == conn);
        self.jobs.find(id).filter(is_held)
    }

    /// How long the job may still be held, or is still delayed; no moment in other states.
    pub fn due(&self, job: &Job) -> Option<Nanos> {
        match job.state {
            State::Reserved { by, place } => Some(self.clients[by].reserved.at(place).deadline),
            State::Delayed { place } => Some(self.tubes[job.tube].delayed.at(place).due),
            State::Ready { .. } | State::Buried(_) | State::Moving => None,
        }
    }

    // ---- Moves ----

    /// The job goes there, and the binlog is told.
    fn send(&mut self, key: JobKey, to: Target, now: Nanos) {
        self.record_update(key, to, now);
        self.place(key, to, now);
    }

    /// The job goes there.
    fn place(&mut self, key: JobKey, to: Target, now: Nanos) {
        match to {
            Target::Ready => self.make_ready(key, now),
            Target::Delayed { due } => self.make_delayed(key, due),
            Target::Buried => self.make_buried(key),
        }
    }

    /// Takes the job out of where it stands.
    fn leave(&mut self, key: JobKey) {
        let Job { state, tube, .. } = self.jobs[key];
        let tube = &mut self.tubes[tube];
        match state {
            State::Moving => {}
            State::Ready { place } => {
                let entry = tube.ready.remove(place, &mut self.jobs);
                let urgent = u32::from(entry.pri < URGENT_BELOW);
                tube.urgent -= urgent;
                self.totals.urgent -= u64::from(urgent);
                self.totals.ready -= 1;
            }
            State::Delayed { place } => {
                tube.delayed.remove(place, &mut self.jobs);
                self.totals.delayed -= 1;
            }
            State::Reserved { by, place } => {
                self.clients[by].reserved.remove(place, &mut self.jobs);
                tube.reserved -= 1;
                self.totals.reserved -= 1;
            }
            State::Buried(_) => {
                tube.buried.remove(&mut self.jobs, key.number());
                self.totals.buried -= 1;
            }
        }
        self.jobs[key].state = State::Moving;
    }

    /// The job becomes ready, and is offered to whoever waits for it. Should there be no
    /// memory for that, it is buried.
    fn make_ready(&mut self, key: JobKey, now: Nanos) {
        self.leave(key);
        let Job { id, pri, tube: tube_key, .. } = self.jobs[key];
        let tube = &mut self.tubes[tube_key];
        if tube.ready.try_reserve(1).is_err() {
            return self.make_buried(key);
        }
        tube.ready.insert(ReadyEntry { pri, id, job: key }, &mut self.jobs);
        let urgent = u32::from(pri < URGENT_BELOW);
        tube.urgent += urgent;
        self.totals.urgent += u64::from(urgent);
        self.totals.ready += 1;

        self.serve_waiting(tube_key, now);
        if self.tubes[tube_key].offer().is_some_and(|offer| offer.job == key) {
            self.invalidate(tube_key);
        }
    }

    /// Hands jobs of the tube to those who wait for them, for as long as there are both.
    fn serve_waiting(&mut self, tube: TubeKey, now: Nanos) {
        while self.serve_one(tube, now) {}
    }

    /// Hands the best job of the tube to the connection that has waited longest. Returns `false` if
    /// there is no job or no such connection.
    fn serve_one(&mut self, tube: TubeKey, now: Nanos) -> bool {
        let Some(offer) = self.tubes[tube].offer() else { return false };
        let Some(conn) = self.longest_waiting(tube) else { return false };
        self.stop_waiting(conn);
        self.make_reserved(offer.job, conn, now);
        self.wait_results.push_back((conn, WaitResult::Reserved(offer.job)));
        true
    }

    /// The job is delayed. Should there be no memory for that, it is buried.
    fn make_delayed(&mut self, key: JobKey, due: Nanos) {
        self.leave(key);
        let Job { id, tube, .. } = self.jobs[key];
        let tube = &mut self.tubes[tube];
        if tube.delayed.try_reserve(1).is_err() {
            return self.make_buried(key);
        }
        tube.delayed.insert(DelayedEntry { due, id, job: key }, &mut self.jobs);
        self.wheel.set_no_later_than(tube.timer, due);
        self.totals.delayed += 1;
    }

    fn make_reserved(&mut self, key: JobKey, by: ConnKey, now: Nanos) {
        self.leave(key);
        let job = &mut self.jobs[key];
        job::count_one(&mut job.counts.reserves);
        let deadline = now + Nanos::from_secs(job.ttr_secs);
        let entry = ReservedEntry { deadline, turn: self.reservations, job: key, by };
        self.reservations += 1;
        self.tubes[job.tube].reserved += 1;
        self.totals.reserved += 1;
        self.clients[by].reserved.insert(entry, &mut self.jobs);
        self.set_client_timer(by, now);
    }

    /// The job stands behind all others that are buried.
    fn make_buried(&mut self, key: JobKey) {
        self.leave(key);
        let tube = self.jobs[key].tube;
        self.tubes[tube].buried.push_back(&mut self.jobs, key.number());
        self.totals.buried += 1;
    }

    // ---- Waiting and time ----

    /// Makes the connection wait, until a job comes, its timeout is over, or a job that it
    /// holds comes near its deadline. Returns `false` if `steps_left` was too small to join all
    /// lines: it does not wait yet, and must check again what its tubes offer.
    ///
    /// # Errors
    /// There is no memory for its places in the lines: it does not wait.
    pub fn wait(
        &mut self,
        conn: ConnKey,
        wait: Wait,
        steps_left: &mut usize,
        now: Nanos,
    ) -> Result<bool, TryReserveError> {
        let waits = headroom::leave(Headroom::ThreeQuarters, || {
            // All connections that wait may have to be answered at once.
            self.wait_results.try_reserve(self.clients_waiting() + 1)?;
            self.enqueue_waiter(conn, wait, steps_left)
        })?;
        if waits {
            self.totals.waiting += 1;
            self.set_client_timer(conn, now);
        }
        Ok(waits)
    }

    /// How many connections wait.
    pub fn clients_waiting(&self) -> usize {
        usize::try_from(self.totals.waiting).expect("there is memory for each")
    }

    /// The connection waits no more.
    pub fn stop_waiting(&mut self, conn: ConnKey) {
        if self.clients[conn].watching.is_waiting() {
            self.clear_wait(conn);
            self.totals.waiting -= 1;
        }
    }

    /// Whether a job that the connection holds has a second or less to its deadline.
    pub fn is_deadline_soon(&self, conn: ConnKey, now: Nanos) -> bool {
        let soonest = self.clients[conn].reserved.first();
        soonest.is_some_and(|held| held.deadline <= now + SAFETY_MARGIN)
    }

    /// When [`Queue::tick`] or [`Queue::commit`] has something to do; at or before that, never
    /// after.
    pub fn next_due(&self) -> Option<Nanos> {
        let binlog = self.binlog.as_ref().and_then(Binlog::next_due);
        let reap = self.bodies.next_due();
        let is_overdue = !self.overdue_tubes.is_empty() || !self.overdue_conns.is_empty();
        let overdue = is_overdue.then_some(Nanos::ZERO);
        self.wheel.next_due().into_iter().chain(binlog).chain(reap).chain(overdue).min()
    }

    /// Does what is due, but no more at once than others can wait for: `work` units for tubes, and as
    /// many for connections. Tubes come first: a job that is ready beats a timeout.
    pub fn tick(&mut self, work: usize, now: Nanos) {
        if let Some(binlog) = &mut self.binlog {
            binlog.tick(now);
            self.compact();
            // That was on nobody's behalf.
            self.moved_bytes = 0;
        }
        self.bodies.reap(now);
        self.closing_work_left = CLOSING_WORK;
        self.is_late = false;
        for _ in 0..TIMERS_PER_TICK {
            match self.wheel.pop_due(now) {
                Some(TimerOwner::Tube(tube)) => self.tube_becomes_overdue(tube, now),
                Some(TimerOwner::Client(conn)) => self.client_becomes_overdue(conn, now),
                None => break,
            }
        }
        let mut work_left = work;
        while work_left > 0
            && let Some(tube) = self.overdue_tubes.pop_front()
        {
            with_slice(&mut work_left, DUE_SLICE, |slice_left| {
                // A turn costs something even if nothing is due any more.
                *slice_left -= 1;
                if let Some(it) = self.tubes.get_mut(tube) {
                    it.is_overdue = false;
                    self.tube_is_due(tube, now, slice_left);
                }
            });
        }
        let mut work_left = work;
        while work_left > 0
            && let Some(conn) = self.overdue_conns.pop_front()
        {
            with_slice(&mut work_left, DUE_SLICE, |slice_left| {
                // A turn costs something even if nothing is due any more.
                *slice_left -= 1;
                if let Some(it) = self.clients.get_mut(conn) {
                    it.is_overdue = false;
                    self.client_is_due(conn, now, slice_left);
                }
            });
        }
    }

    /// The tube has its turn after the others. Without memory for that its timer goes off again.
    fn tube_becomes_overdue(&mut self, key: TubeKey, now: Nanos) {
        let tube = &mut self.tubes[key];
        if std::mem::replace(&mut tube.is_overdue, true) {
            return;
        }
        if self.overdue_tubes.try_reserve(1).is_ok() {
            self.overdue_tubes.push_back(key);
        } else {
            tube.is_overdue = false;
            self.wheel.set_no_later_than(tube.timer, now);
        }
    }

    /// The same for a connection.
    fn client_becomes_overdue(&mut self, conn: ConnKey, now: Nanos) {
        let client = &mut self.clients[conn];
        if std::mem::replace(&mut client.is_overdue, true) {
            return;
        }
        if self.overdue_conns.try_reserve(1).is_ok() {
            self.overdue_conns.push_back(conn);
        } else {
            client.is_overdue = false;
            self.wheel.set_no_later_than(client.timer, now);
        }
    }

    /// Returns whether something that is due is put off for longer than it should be.
    pub fn is_late(&self) -> bool {
        self.is_late
    }

    fn tube_is_due(&mut self, key: TubeKey, now: Nanos, work_left: &mut usize) {
        if self.tubes[key].pause.as_ref().is_some_and(|pause| pause.until <= now) {
            self.end_pause(key, work_left, now);
        }
        while let Some(first) = self.tubes[key].delayed.first().filter(|first| first.due <= now) {
            if *work_left == 0 {
                break;
            }
            self.make_ready_at_cost(first.job, work_left, now);
        }
        let tube = &self.tubes[key];
        let delay_over = tube.delayed.first().map(|first| first.due);
        let pause_over = tube.pause.as_ref().map(|pause| pause.until);
        match delay_over.into_iter().chain(pause_over).min() {
            Some(next) if next <= now => {
                self.is_late |= next + LATE < now;
                self.tube_becomes_overdue(key, now);
            }
            Some(next) => self.wheel.set_no_later_than(tube.timer, next),
            None => {}
        }
    }

    fn client_is_due(&mut self, conn: ConnKey, now: Nanos, work_left: &mut usize) {
        while let Some(held) =
            self.clients[conn].reserved.first().filter(|held| held.deadline <= now)
        {
            if *work_left == 0 {
                break;
            }
            job::count_one(&mut self.jobs[held.job].counts.timeouts);
            self.totals.timeouts += 1;
            self.make_ready_at_cost(held.job, work_left, now);
        }
        if let Some(Wait { until, .. }) = self.clients[conn].watching.wait {
            if self.is_deadline_soon(conn, now) {
                self.give_up_waiting(conn, WaitResult::DeadlineSoon);
                *work_left = work_left.saturating_sub(WORK_PER_WAKE);
            } else if until <= now {
                self.give_up_waiting(conn, WaitResult::TimedOut);
                *work_left = work_left.saturating_sub(WORK_PER_WAKE);
            }
        }
        match self.clients[conn].reserved.first() {
            Some(held) if held.deadline <= now => {
                self.is_late |= held.deadline + LATE < now;
                self.client_becomes_overdue(conn, now);
            }
            Some(_) | None => self.set_client_timer(conn, now),
        }
    }

    /// The connection waits no more and is told why.
    pub fn give_up_waiting(&mut self, conn: ConnKey, why: WaitResult) {
        self.stop_waiting(conn);
        self.wait_results.push_back((conn, why));
    }

    /// The timer of a connection goes off when the first of these is due: the deadline of
    /// a job that it holds; while it waits, a second before that, and the timeout.
    fn set_client_timer(&mut self, conn: ConnKey, now: Nanos) {
        let client = &self.clients[conn];
        let wait = client.watching.wait;
        let deadline = client.reserved.first().map(|held| held.deadline);
        let warning = deadline.filter(|_| wait.is_some()).map(|it| it.before(SAFETY_MARGIN));
        let timeout = wait.map(|wait| wait.until).filter(|&until| until != Nanos::NEVER);
        if let Some(next) = deadline.into_iter().chain(warning).chain(timeout).min() {
            self.wheel.set_no_later_than(client.timer, next.max(now));
        }
    }
}

/// Lets `step` use up to `most` units of `work_left`, and takes away what it has used.
fn with_slice<R>(work_left: &mut usize, most: usize, step: impl FnOnce(&mut usize) -> R) -> R {
    let slice = most.min(*work_left);
    let mut slice_left = slice;
    let result = step(&mut slice_left);
    *work_left -= slice - slice_left;
    result
}
