//! The rules: how jobs are put, change state, and are deleted.
//!
//! ```text
//!    put with delay               release with delay
//!   ----------------> [delayed] <--------------------.
//!                       |                             |
//!                       | time passes, kick           |
//!   put                 v              reserve        |        delete
//!   ----------------> [ready] --------------------> [reserved] --------> deleted
//!                       ^  ^                          |  |
//!                       |   `---- release, timeout ---'  |
//!                       | kick                           |
//!                    [buried] <------------------- bury -'
//! ```
//!
//! Delete also takes ready, delayed and buried jobs, and reserve-job reserves them. A deleted job whose key is kept
//! stays for that alone ([`unique`]).
//!
//! A job that comes back needs no memory: the links of all its places are in the job.
//!
//! Every change of state has two steps: the job is detached from the jobs of its state,
//! then attached to that of the next state. The counts change in these steps and nowhere else. A
//! job that becomes ready is given to the connection that has waited longest at its tube
//! ([`waiters`]). Such a job is in [`Queue::woken`] until the loop delivers it. A rule gets the connection for
//! which it acts from its caller, and knows others only by key.
//!
//! The rules that each job passes are always inlined: one with several callers would not be, and the calls cost 55
//! instructions an operation.
//!
//! No client can observe that a call that failed for want of memory changed anything.
//!
//! | file | owns |
//! |---|---|
//! | [`job`] | jobs, by key and by id |
//! | [`counts`] | how often each job was reserved, timed out, released, buried and kicked |
//! | [`tube`] | tubes, by key and by name |
//! | [`ordered`] | the ready or delayed jobs of a tube: a run of those that came in order, and a heap |
//! | [`body`] | the bytes of jobs |
//! | [`body_cache`] | which bodies are in memory, and which are read back from the binlog |
//! | [`read_body`] | bodies that were read back, until their replies are sent |
//! | [`waiters`] | which waiting worker gets which job |
//! | [`listing`] | lists of more than 1,024 tubes, made in steps |
//! | [`browse`] | selects jobs of a tube in the order of their ids |
//! | [`flush`] | deletes all jobs of a tube at one moment |
//! | [`unique`] | keys of jobs, so that no other job with the same key is put |
//! | [`groups`] | groups of jobs of which only a limited number may be reserved |
//! | [`con`] | which of their jobs can be reserved |
//! | [`take_back`] | jobs that come back from their workers, and `--bury-after` |
//! | [`outcomes`] | how long jobs wait and run, and how reservations end, for metrics |
//! | [`touch`] | renews the deadlines of all jobs of a connection |
//! | [`log`] | what is recorded in the binlog, and when |
//! | [`memory`] | how much memory jobs take |
//! | [`replay`] | rebuilds the queue from the files of a binlog |
//! | [`client`] | the rules' part of a connection, and closing it in steps |
//! | [`due`] | waiting, and what happens when time passes |
//! | [`check`] | counts everything again and compares, for tests |

pub mod body;
pub mod body_cache;
pub mod browse;
pub mod check;
pub mod client;
pub mod con;
pub mod counts;
pub mod due;
pub mod flush;
pub mod groups;
pub mod job;
pub mod listing;
pub mod log;
mod memory;
pub mod ordered;
pub mod outcomes;
pub mod read_body;
pub mod replay;
pub mod take_back;
pub mod touch;
pub mod tube;
pub mod unique;
pub mod waiters;

use super::binlog::record::Counts;
use super::binlog::{Binlog, NoSpace};
use super::collections::list::Links;
use super::collections::timers::Timers;
use super::headroom::{self, Headroom};
use super::keys::{ConnKey, JobKey, Key, NIL, TubeKey};
use super::limits::{Limits, Settings};
use super::time::{ClockOffset, Nanos};
use super::work::Work;
use crate::engine::headroom::NoMemory;
use body::{Bodies, Body};
use body_cache::BodyCache;
use client::Client;
use counts::{CountedEvent, LargeCounts};
use flush::Flush;
use job::{Holder, Job, JobParams, Jobs, State, Target};
use outcomes::End;
use std::collections::VecDeque;
use take_back::BuryLog;
use tube::Tubes;
use unique::{NewKey, UniqueKeys};
use waiters::{WaitSeq, Watchers, Watches};

/// All jobs, tubes and clients, and the rules for them.
pub struct Queue {
    pub jobs: Jobs,
    /// The counts of jobs of which one is above 63.
    large_counts: LargeCounts,
    /// The highest id of a job that was ever inserted. It is not [`Queue::last_id`]: a put gets its id with its line,
    /// and a damaged binlog may have jobs with ids that are never given out.
    pub highest_id: u64,
    pub bodies: Bodies,
    pub body_cache: BodyCache,
    pub tubes: Tubes,
    pub watches: Watches,
    pub watchers: Watchers,
    /// The keys of jobs.
    pub unique: UniqueKeys,
    /// The highest id that was given to a job.
    pub last_id: u64,
    pub settings: Settings,
    /// The bounds of steps and iterations.
    pub limits: Limits,
    /// The work that is left to what runs.
    pub work: Work,
    /// The time of what runs. Each command is later than the one before, so that jobs that one read delays by
    /// the same time become ready in their order.
    pub now: Nanos,
    /// Jobs for connections that have waited, the oldest first, until the loop delivers them.
    pub woken: VecDeque<(ConnKey, JobKey)>,
    /// The counts for `stats`.
    pub totals: Totals,
    /// `None` if jobs are not recorded.
    pub binlog: Option<Binlog>,
    /// Wall-clock time minus the engine's time.
    pub clock_offset: ClockOffset,
    next_wait_seq: WaitSeq,
    next_reserve_seq: u32,
    /// The moment of the last bury, here or in the binlog.
    last_buried_at: Nanos,
    tube_timers: Timers<TubeKey>,
    conn_timers: Timers<ConnKey>,
    /// Due work was postponed by more than 20 ms.
    pub is_late: bool,
    bury_log: BuryLog,
    /// Flushes whose jobs are not freed yet, the oldest first.
    flushes: VecDeque<Flush>,
}

/// The reason for which a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitResult {
    /// The connection has reserved this job.
    Reserved(JobKey),
    /// A job that the connection has reserved reaches its deadline in at most 1 s.
    DeadlineSoon,
    /// The timeout of the reserve has passed.
    TimedOut,
}

/// The progress of a `kick`.
#[derive(Clone, Copy, Debug)]
pub struct Kick {
    /// The command kicks buried jobs; otherwise it kicks delayed ones.
    takes_buried: bool,
    /// The number of jobs to kick.
    pub left: u32,
    /// The number of jobs kicked.
    pub kicked: u32,
}

/// Counts of jobs by state, of events, and of connections by role.
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

/// Jobs with a priority below this are urgent.
const URGENT_BELOW: u32 = 1024;

/// Units of work to free a page of bodies together with its jobs.
const WORK_PER_FREED_PAGE: usize = 32;

/// A sync that takes no longer does not matter for the TTR of a job.
const SHORT_SYNC: Nanos = Nanos::from_millis(1);

/// Units of work to move a job, and to reply to a connection that waited.
pub const WORK_PER_MOVE: usize = 2;
const WORK_PER_WAKE: usize = 16;

impl Queue {
    /// Returns an empty queue with the `default` tube.
    pub fn new(settings: Settings, limits: Limits) -> Queue {
        let mut queue = Queue {
            jobs: Jobs::default(),
            large_counts: LargeCounts::default(),
            highest_id: 0,
            bodies: Bodies::default(),
            body_cache: BodyCache::default(),
            tubes: Tubes::default(),
            watches: Watches::default(),
            watchers: Watchers::default(),
            unique: UniqueKeys::default(),
            last_id: 0,
            settings,
            limits,
            work: Work::new(&limits),
            now: Nanos::ZERO,
            woken: VecDeque::new(),
            totals: Totals::default(),
            binlog: None,
            clock_offset: ClockOffset::default(),
            next_wait_seq: WaitSeq::MIN,
            next_reserve_seq: 0,
            last_buried_at: Nanos::ZERO,
            tube_timers: Timers::default(),
            conn_timers: Timers::default(),
            is_late: false,
            bury_log: BuryLog::default(),
            flushes: VecDeque::new(),
        };
        let default = queue.find_or_create_tube("default");
        assert_eq!(
            default.ok(),
            Some(TubeKey::DEFAULT),
            "the default tube has another key than `DEFAULT`"
        );
        queue
    }

    // ---- Tubes ----

    /// Sets the tube of the connection's puts; creates it if there is none of this name.
    pub fn use_tube(&mut self, client: &mut Client, name: &str) -> Result<(), NoMemory> {
        let tube = self.find_or_create_tube(name)?;
        self.tubes[tube].using += 1;
        let previous = std::mem::replace(&mut client.used, tube);
        self.tubes[previous].using -= 1;
        self.remove_tube_if_idle(previous);
        Ok(())
    }

    /// Adds a tube to those from which the connection reserves; creates it if there is none of this
    /// name.
    pub fn watch(&mut self, client: &mut Client, name: &str) -> Result<(), NoMemory> {
        let tube = self.find_or_create_tube(name)?;
        let added = self.add_watch(client, tube);
        self.remove_tube_if_idle(tube);
        added
    }

    /// Removes a tube from those from which the connection reserves. Returns `false` if it is the
    /// only one: it stays.
    pub fn ignore(&mut self, client: &mut Client, name: &str) -> bool {
        let Some(tube) = self.tubes.find(name) else { return true };
        let Some(watch) = self.find_watch(client.key, tube) else { return true };
        if client.watching.len() == 1 {
            return false;
        }
        self.remove_watch(client, watch);
        self.remove_tube_if_idle(tube);
        true
    }

    /// Returns the tube of this name; creates it if there is none. If the caller neither puts a job
    /// into it, nor uses or watches it, it calls [`Queue::remove_tube_if_idle`].
    pub fn find_or_create_tube(&mut self, name: &str) -> Result<TubeKey, NoMemory> {
        if let Some(tube) = self.tubes.find(name) {
            return Ok(tube);
        }
        self.tube_timers.try_reserve(self.tubes.try_reserve_key()?)?;
        let tube = self.tubes.create(name)?;
        self.tube_timers.add(tube);
        Ok(tube)
    }

    fn remove_tube_if_idle(&mut self, tube: TubeKey) {
        if self.tubes.remove_if_idle(tube) {
            self.tube_timers.remove(tube);
        }
    }

    // ---- Jobs ----

    /// Returns the key of the job with this id.
    pub fn find(&self, id: u64) -> Option<JobKey> {
        self.find_if(id, |_| true)
    }

    /// Returns the key of the job with this id, if it is such a job.
    // The compiler inlines a function into every command only if it has one caller.
    #[inline(always)]
    pub(super) fn find_if(&self, id: u64, is_such: impl Fn(&Job) -> bool) -> Option<JobKey> {
        let (key, job) = self.jobs.find_entry(id)?;
        (!self.is_flushed(job) && is_such(job)).then_some(key)
    }

    /// Puts a job with a complete body into a tube, perhaps with a key that is not in force:
    /// [`Queue::find_unique`] finds no job. On an error the body is dropped, and the tube is removed if it is
    /// idle.
    pub fn put(
        &mut self,
        key: TubeKey,
        id: u64,
        params: JobParams,
        unique: Option<&NewKey>,
        body: Body,
    ) -> Result<(), NoSpace> {
        let fits = headroom::keeping(Headroom::Whole, || {
            self.jobs.try_reserve_one()?;
            if let Some(unique) = unique {
                // First, since a removal may use memory that was reserved for an insertion.
                self.forget_expired(unique.digest);
                self.unique.try_reserve_one(unique.con)?;
            }
            self.reserve_put(key, body.full_len() as usize, unique)
        });
        if let Err(no_space) = fits {
            self.drop_body(body);
            self.remove_tube_if_idle(key);
            return Err(no_space);
        }
        let tube = &mut self.tubes[key];
        tube.total_jobs += 1;
        self.totals.total_jobs += 1;
        self.body_cache.warm_bytes += u64::from(body.full_len());
        let mut job = Job::new(id, key, params, body, self.now);
        job.epoch = tube.epoch;
        let target = job.target(self.now);
        let job = self.insert(job);
        if let Some(unique) = unique {
            self.add_unique(job, *unique);
        }
        self.record_put(job, target);
        self.attach(job, target);
        self.make_cold_if_full(job);
        Ok(())
    }

    /// Adds a detached job with a new id. There must be memory for it.
    fn insert(&mut self, job: Job) -> JobKey {
        self.highest_id = self.highest_id.max(job.id);
        self.jobs.insert(job)
    }

    /// Counts an event of a job.
    fn count_event(&mut self, key: JobKey, event: CountedEvent) {
        self.large_counts.count_event(&mut self.jobs[key].counts, event);
    }

    /// Returns how often a job was reserved, timed out, released, buried and kicked.
    pub fn counts(&self, job: &Job) -> Counts {
        self.large_counts.get(&job.counts)
    }

    /// Drops a reference to a body.
    pub fn drop_body(&mut self, body: Body) {
        if self.bodies.remove(body) {
            self.work.spend(WORK_PER_FREED_PAGE);
        }
    }

    /// Returns whether `reserve-job` may take the job: no connection has reserved it, and no limit of its key
    /// blocks it.
    pub fn is_reservable(&self, key: JobKey) -> bool {
        match self.jobs[key].state {
            State::Reserved(_) => false,
            State::Ready(_) => !self.is_blocked(key),
            State::Delayed(_) | State::Buried(_) | State::Detached | State::Kept(_) => true,
        }
    }

    /// Reserves a job that may be reserved.
    pub fn reserve_job(&mut self, client: &mut Client, key: JobKey) -> Result<(), NoSpace> {
        if matches!(self.jobs[key].state, State::Buried(_)) {
            // A flush of buried jobs must not delete it, not even after a restart.
            self.record_hold(key, true)?;
        }
        self.make_reserved(key, client);
        Ok(())
    }

    /// Deletes a job that no other connection has reserved.
    pub fn delete(&mut self, client: &mut Client, key: JobKey) -> Result<(), NoSpace> {
        self.reserve_delete(key)?;
        self.take(client, key, Some(End::Delete));
        let tube = self.jobs[key].tube;
        self.tubes[tube].deletes += 1;
        self.end_job(key, None);
        self.remove_tube_if_idle(tube);
        self.offer_parked();
        Ok(())
    }

    /// Releases a job that the connection holds, with a new priority and delay.
    pub fn release(
        &mut self,
        client: &mut Client,
        key: JobKey,
        pri: u32,
        delay_secs: u32,
    ) -> Result<(), NoSpace> {
        self.reserve_update()?;
        self.count_event(key, CountedEvent::Release);
        let job = &mut self.jobs[key];
        job.pri = pri;
        job.delay_secs = delay_secs;
        let target = job.target(self.now);
        self.transition(client, key, target, End::Release);
        if target == Target::Ready {
            self.binlog.iter_mut().for_each(Binlog::uncount_record);
        }
        Ok(())
    }

    /// Buries a job that the connection holds, with a new priority.
    pub fn bury(&mut self, client: &mut Client, key: JobKey, pri: u32) -> Result<(), NoSpace> {
        self.reserve_update()?;
        self.count_event(key, CountedEvent::Bury);
        self.jobs[key].pri = pri;
        let target = self.next_burial();
        self.transition(client, key, target, End::Bury);
        Ok(())
    }

    /// Moves the deadline of a job that the connection holds to a full TTR from now.
    pub fn touch(&mut self, client: &mut Client, key: JobKey) {
        let deadline = self.now + Nanos::from_secs(self.jobs[key].ttr_secs);
        self.set_deadline(client, key, deadline);
        self.set_client_timer(client);
    }

    /// Stops the TTR of a held job, whose body the connection does not have yet. It begins with
    /// [`Queue::touch`].
    pub fn stop_ttr(&mut self, client: &mut Client, key: JobKey) {
        self.set_deadline(client, key, Nanos::NEVER);
    }

    /// Returns whether replies wait for the binlog, so that the TTR of a job begins later than it is reserved.
    pub fn holds_replies(&self) -> bool {
        self.binlog.as_ref().is_some_and(Binlog::holds_replies)
    }

    /// Handles that the reply with a held job waits for the binlog. Before a sync nothing is due meanwhile.
    pub fn hold_ttr(&mut self, client: &mut Client, key: JobKey) {
        if !self.syncs_each_iteration() {
            self.stop_ttr(client, key);
        }
    }

    /// Begins the TTR of a job that was reserved, unless the connection does not hold it any more: the reply
    /// may be sent.
    pub fn begin_ttr(&mut self, client: &mut Client, key: JobKey) {
        let index = self.jobs.get(key).and_then(|job| client.index_of(job));
        let Some(index) = index else { return };
        let reserved_at = client.held[index as usize].reserved_at;
        if !self.syncs_each_iteration() || self.now.since(reserved_at) > SHORT_SYNC {
            self.touch(client, key);
        }
    }

    /// Returns the plan of a `kick`: buried jobs if there are any, else delayed ones; at most
    /// `bound`.
    pub fn plan_kick(&self, tube: TubeKey, bound: u32) -> Kick {
        let tube = &self.tubes[tube];
        let takes_buried = !tube.jobs.buried.is_empty();
        let count =
            if takes_buried { tube.jobs.buried.len() as usize } else { tube.jobs.delayed.len() };
        let left = bound.min(u32::try_from(count).unwrap_or(u32::MAX));
        Kick { takes_buried, left, kicked: 0 }
    }

    /// Kicks jobs of a tube until `kick.left` is 0, or the work of a step is used up. Returns an error only if the binlog
    /// has no space for the first one.
    pub fn kick(&mut self, tube: TubeKey, kick: &mut Kick) -> Result<(), NoSpace> {
        let rest = self.work.give(self.limits.jobs_per_kick_step * WORK_PER_MOVE);
        let mut result = Ok(());
        while kick.left > 0 && self.work.is_left() {
            let tube = &self.tubes[tube];
            let next = if kick.takes_buried {
                tube.first_buried()
            } else {
                tube.first_delayed(&self.jobs)
            };
            self.work.spend(WORK_PER_MOVE);
            match next.map(|job| self.kick_one(job)) {
                Some(Ok(())) => (kick.left, kick.kicked) = (kick.left - 1, kick.kicked + 1),
                Some(Err(no_space)) => {
                    kick.left = 0;
                    if kick.kicked == 0 {
                        result = Err(no_space);
                    }
                }
                None => kick.left = 0,
            }
        }
        self.work.end(rest);
        result
    }

    /// Makes a buried or delayed job ready.
    pub fn kick_one(&mut self, key: JobKey) -> Result<(), NoSpace> {
        self.reserve_update()?;
        self.count_kick(key);
        self.count_event(key, CountedEvent::Kick);
        self.jobs[key].returns = 0;
        self.body_cache.unreadable.remove(&self.jobs[key].id);
        self.record_update(key, Target::Ready);
        self.detach(key);
        self.attach(key, Target::Ready);
        Ok(())
    }

    /// Returns whether the connection has reserved the job `id`, whose key is or was `job`.
    pub fn is_held(&self, client: &Client, job: JobKey, id: u64) -> bool {
        let job = self.jobs.get(job).filter(|job| job.id == id && !self.is_flushed(job));
        job.is_some_and(|job| client.holds(job))
    }

    /// Returns the deadline of a reserved job or the end of a delay; `None` in other states, and while the
    /// disk reads the body for the connection that has reserved the job.
    pub fn due(&self, job: &Job) -> Option<Nanos> {
        match job.state {
            State::Reserved(_) => Some(job.due).filter(|&deadline| deadline != Nanos::NEVER),
            State::Delayed(_) => Some(job.due),
            State::Ready(_) | State::Buried(_) | State::Detached | State::Kept(_) => None,
        }
    }

    /// Returns the time to the deadline of a reserved job or the end of a delay, or zero. A TTR that has not
    /// begun is left as a whole.
    pub fn time_left(&self, job: &Job) -> Nanos {
        match (self.due(job), job.state) {
            (Some(due), _) => due.since(self.now),
            (None, State::Reserved { .. }) => Nanos::from_secs(job.ttr_secs),
            (None, _) => Nanos::ZERO,
        }
    }

    // ---- State changes ----

    /// Returns the state of a job that is buried now: later than all others, even if the clock of the system was set
    /// back.
    fn next_burial(&mut self) -> Target {
        self.last_buried_at = self.now.max(self.last_buried_at + Nanos::ONE);
        Target::Buried { at: self.last_buried_at }
    }

    /// Records the new state of a job that the connection holds in the binlog, and changes it.
    fn transition(&mut self, client: &mut Client, key: JobKey, target: Target, end: End) {
        self.record_update(key, target);
        self.take(client, key, Some(end));
        self.attach(key, target);
    }

    /// Adds a detached job to those of its new state. If it becomes ready, it is reserved for the connection that has
    /// waited longest, if one waits for it.
    #[inline(always)]
    fn attach(&mut self, key: JobKey, target: Target) {
        let job = &mut self.jobs[key];
        let tube_key = job.tube;
        match target {
            Target::Ready => {
                job.state = State::Ready(Links::LOOSE);
                let urgent = u32::from(job.pri < URGENT_BELOW);
                self.tubes[tube_key].jobs.urgent += urgent;
                self.totals.urgent += u64::from(urgent);
                self.totals.ready += 1;
                self.add_ready(key, tube_key);
                self.announce(key, tube_key);
            }
            Target::Delayed { due } => {
                job.due = due;
                job.state = State::Delayed(Links::LOOSE);
                self.tubes[tube_key].jobs.delayed.insert(key, &mut self.jobs);
                self.tube_timers.set_no_later_than(tube_key, due);
                self.totals.delayed += 1;
            }
            Target::Buried { at } => {
                job.due = at;
                job.state = State::Buried(Links::LOOSE);
                self.tubes[tube_key].jobs.buried.push_back(&mut self.jobs, key.number());
                self.totals.buried += 1;
            }
        }
        self.offer_parked();
    }

    /// Removes a job from those of its state, which the caller replaces. A connection that holds it has given it
    /// up: see [`Queue::take`].
    #[inline(always)]
    fn detach(&mut self, key: JobKey) {
        let Job { state, tube: tube_key, pri, .. } = self.jobs[key];
        let tube = &mut self.tubes[tube_key];
        match state {
            State::Detached | State::Kept(_) => {}
            State::Ready(_) => {
                let urgent = u32::from(pri < URGENT_BELOW);
                tube.jobs.urgent -= urgent;
                self.totals.urgent -= u64::from(urgent);
                self.totals.ready -= 1;
                self.remove_ready(key, tube_key);
            }
            State::Delayed(_) => {
                tube.jobs.delayed.remove(key, &mut self.jobs);
                self.totals.delayed -= 1;
            }
            State::Reserved(_) => {
                tube.jobs.reserved -= 1;
                self.totals.reserved -= 1;
                self.free_slot(key);
            }
            State::Buried(_) => {
                tube.jobs.buried.remove(&mut self.jobs, key.number());
                self.totals.buried -= 1;
            }
        }
    }

    /// Gives a job that has become the best one of its tube to a connection that waits, if there is one.
    pub(super) fn announce(&mut self, key: JobKey, tube_key: TubeKey) {
        let tube = &self.tubes[tube_key];
        if tube.waiters.is_empty() && tube.clean.is_empty() {
            return;
        }
        // No connection waits while the tube has a job, so only the best one is offered.
        if tube.best_job(&self.jobs) == Some(key) && !self.serve_waiter(tube_key) {
            self.invalidate(tube_key);
        }
    }

    /// Reserves the first ready job of the tube for the connection that has waited longest. Returns `false` if there
    /// is no such job or connection.
    fn serve_waiter(&mut self, tube: TubeKey) -> bool {
        let Some(job) = self.tubes[tube].first_ready(&self.jobs) else { return false };
        let Some(conn) = self.longest_waiting(tube) else { return false };
        self.stop_waiting(conn);
        self.assign(job, conn);
        self.woken.push_back((conn, job));
        self.work.spend(WORK_PER_WAKE);
        true
    }

    /// Reserves a job that no connection holds.
    pub fn make_reserved(&mut self, key: JobKey, client: &mut Client) {
        self.assign(key, client.key);
        self.hold(client, key);
        self.offer_parked();
    }

    /// Reserves a job for a connection, which must then hold it: [`Queue::hold`].
    #[inline(always)]
    fn assign(&mut self, key: JobKey, by: ConnKey) {
        self.detach(key);
        self.take_slot(key);
        self.count_wait(key);
        let job = &mut self.jobs[key];
        let tube = &mut self.tubes[job.tube];
        self.large_counts.count_event(&mut job.counts, CountedEvent::Reserve);
        job.state = State::Reserved(Holder { by, index: NIL });
        job.due = self.now + Nanos::from_secs(job.ttr_secs);
        tube.jobs.reserved += 1;
        self.totals.reserved += 1;
    }
}
