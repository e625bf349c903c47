//! Waiting, and what is due: the ends of delays, pauses, TTRs and timeouts, and what ticks do besides.

use super::client::Client;
use super::job::Target;
use super::outcomes::End;
use super::tube::{Pause, Tube};
use super::waiters::Wait;
use super::{Queue, WORK_PER_MOVE, WORK_PER_WAKE, WaitResult};
use crate::engine::binlog::Binlog;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{ConnKey, JobKey, TubeKey};
use crate::engine::time::Nanos;

/// A wait ends with `DEADLINE_SOON` when a reserved job of the connection is this close to its
/// deadline.
pub(super) const SAFETY_MARGIN: Nanos = Nanos::from_secs(1);
/// When due work has waited this long, ticks do more.
pub(super) const LATE: Nanos = Nanos::from_millis(20);
/// Of this many pauses that end in the same tick, the best job is reserved first.
const PAUSES_AT_ONCE: usize = 16;

impl Queue {
    /// Pauses a tube: for `secs` seconds none of its jobs is reserved by `reserve`.
    pub fn pause(&mut self, key: TubeKey, secs: u32) {
        let until = self.now + Nanos::from_secs(secs);
        let tube = &mut self.tubes[key];
        tube.pauses += 1;
        if secs == 0 {
            // Quirk: 0 seconds end the pause in force, if any; pinned by
            // tests/conversations/pause-tube-anew.txt.
            let rest = self.work.give(self.limits.wakes_per_step * WORK_PER_WAKE);
            self.end_pauses(&[key]);
            self.work.end(rest);
        } else {
            tube.pause = Some(Box::new(Pause { secs, until }));
            self.tube_timers.set_no_later_than(key, until);
        }
    }

    /// Ends the pauses of tubes and serves the waiters, with the best job of all these tubes first. Without work left
    /// for all waiters of a tube, its pause stays in force until the next tick.
    fn end_pauses(&mut self, tubes: &[TubeKey]) {
        while self.work.is_left()
            && let Some(tube) = self.best_awaited(tubes)
            && self.serve_waiter(tube)
        {
            self.offer_parked();
        }
        for &key in tubes {
            let has_job = self.tubes[key].first_ready(&self.jobs).is_some();
            if has_job && self.longest_waiting(key).is_some() {
                self.tubes[key].pause.iter_mut().for_each(|pause| pause.until = self.now);
                self.tube_timers.set_no_later_than(key, self.now);
                continue;
            }
            self.tubes[key].pause = None;
            if has_job {
                self.invalidate(key);
            }
        }
    }

    /// Returns the one of these tubes that has the best job for which a connection waits.
    fn best_awaited(&mut self, tubes: &[TubeKey]) -> Option<TubeKey> {
        let mut best = None;
        for &tube in tubes {
            if self.park_blocked(tube)
                && let Some(job) = self.tubes[tube].first_ready(&self.jobs)
                && self.longest_waiting(tube).is_some()
            {
                let found = (self.jobs[job].rank(), tube);
                best = Some(best.map_or(found, |best| found.min(best)));
            }
        }
        best.map(|(_, tube)| tube)
    }

    /// Makes the connection wait for a job. The wait also ends with its timeout, or when a reserved
    /// job is near its deadline. Returns `false` without work left to queue it at all tubes: the connection does
    /// not wait, and must search again.
    pub fn wait(&mut self, client: &Client, wait: Wait) -> Result<bool, NoMemory> {
        let waits = headroom::keeping(Headroom::ThreeQuarters, || {
            // All waits may end at once.
            let waiting = usize::try_from(self.totals.waiting).unwrap_or(usize::MAX);
            self.woken.try_reserve(waiting.saturating_add(1))?;
            self.enqueue_waiter(client.key, wait)
        })?;
        if waits {
            self.totals.waiting += 1;
            self.set_client_timer(client);
        }
        Ok(waits)
    }

    /// Ends the wait of the connection, if it waits, without a result.
    pub fn stop_waiting(&mut self, conn: ConnKey) {
        if self.watchers[conn].wait.take().is_some() {
            self.totals.waiting -= 1;
        }
    }

    /// Returns whether a reserved job of the connection reaches its deadline in at most 1 s.
    pub fn is_deadline_soon(&self, client: &Client) -> bool {
        let soonest = client.held.first();
        let soonest = soonest.filter(|entry| entry.deadline <= self.now + SAFETY_MARGIN);
        soonest.is_some_and(|entry| !self.is_flushed(&self.jobs[entry.job]))
    }

    /// Returns a time not after the one when [`Queue::tick`] or [`Binlog::commit`] has something to
    /// do; [`Nanos::NEVER`] if nothing is due.
    pub fn next_due(&self) -> Nanos {
        let binlog = self.binlog.as_ref().map_or(Nanos::NEVER, Binlog::next_due);
        let timers = self.tube_timers.next_due().min(self.conn_timers.next_due());
        let keys = self.next_key_end().min(self.offers_due());
        timers.min(keys).min(binlog).min(self.bodies.next_due()).min(self.bury_log.next_due())
    }

    /// Lets the binlog count an iteration, and compacts it.
    pub fn tick_binlog(&mut self) {
        if let Some(binlog) = &mut self.binlog {
            binlog.tick(self.now);
            self.compact();
        }
    }

    /// Does due work, with its part for tubes. Connections follow ([`Queue::next_due_conn`]), so that a job that
    /// becomes ready wins over a timeout.
    pub fn tick(&mut self) {
        self.bodies.reap(self.limits.freed_per_tick_bytes, self.now);
        self.bury_log.tick(self.now);
        self.is_late = false;
        self.forget_ended();
        self.offer_parked();
        self.tick_tubes();
    }

    /// Ends delays and pauses, a part of each tube that is due at a time, and of others behind it.
    fn tick_tubes(&mut self) {
        self.work.begin_due();
        let mut ended = [TubeKey::DEFAULT; PAUSES_AT_ONCE];
        let mut count = 0;
        loop {
            let next = if self.work.is_left() { self.tube_timers.pop_due(self.now) } else { None };
            if let Some(tube) = next {
                let others = self.work.give_at_most(self.limits.due_slice_work);
                if self.run_due_tube(tube) {
                    ended[count] = tube;
                    count += 1;
                }
                // The check costs one unit even if nothing is due any more.
                self.work.spend(1);
                self.work.end(others);
            } else if count == 0 {
                return;
            }
            if next.is_none() || count == PAUSES_AT_ONCE {
                let others = self.work.give(self.limits.due_slice_work);
                self.end_pauses(&ended[..count]);
                self.work.end(others);
                count = 0;
            }
        }
    }

    /// Returns the next connection for which something is due.
    pub fn next_due_conn(&mut self) -> Option<ConnKey> {
        // A tube that has not had its turn is due before `now`, and its jobs win over later timeouts.
        self.conn_timers.pop_due(self.tube_timers.next_due().min(self.now))
    }

    /// Ends a tick: notes whether it has left something for too long.
    pub fn end_tick(&mut self) {
        let behind = self.tube_timers.next_due().min(self.conn_timers.next_due());
        self.is_late |= behind + LATE < self.now;
    }

    /// Ends the delays of a tube that have passed. Returns whether its pause has passed, which is left to
    /// [`Queue::end_pauses`].
    fn run_due_tube(&mut self, key: TubeKey) -> bool {
        while let Some((job, due)) = self.next_delayed(&self.tubes[key]) {
            if due > self.now || !self.work.is_left() {
                break;
            }
            self.work.spend(WORK_PER_MOVE);
            self.detach(job);
            self.attach(job, Target::Ready);
        }
        let tube = &self.tubes[key];
        let delay_end = self.next_delayed(tube).map(|(_, due)| due);
        let pause_end = tube.pause.as_ref().map(|pause| pause.until);
        let is_over = pause_end.is_some_and(|until| until <= self.now);
        let next = delay_end.into_iter().chain(pause_end.filter(|_| !is_over)).min();
        if let Some(next) = next {
            self.is_late |= next + LATE < self.now;
            self.tube_timers.set_no_later_than(key, next.max(self.now));
        }
        is_over
    }

    /// Returns the delayed job that is due first, and when it is due.
    pub(super) fn next_delayed(&self, tube: &Tube) -> Option<(JobKey, Nanos)> {
        let job = tube.first_delayed(&self.jobs)?;
        Some((job, self.jobs[job].due))
    }

    /// Does a part of the due work of a connection. What is left is due again behind others. Returns the
    /// result of its wait if that ends.
    pub fn run_due_client(&mut self, client: &mut Client) -> Option<WaitResult> {
        loop {
            self.free_flushed_tops(client);
            let first = client.held.first().copied();
            let Some(expired) = first.filter(|entry| entry.deadline <= self.now) else { break };
            if !self.work.is_left() {
                break;
            }
            self.take_back(client, expired.job, End::Timeout);
        }
        let result = match self.watchers[client.key].wait {
            Some(_) if self.is_deadline_soon(client) => Some(WaitResult::DeadlineSoon),
            Some(wait) if wait.until <= self.now => Some(WaitResult::TimedOut),
            Some(_) | None => None,
        };
        if result.is_some() {
            self.stop_waiting(client.key);
            self.work.spend(WORK_PER_WAKE);
        }
        // The check costs one unit even if nothing is due any more.
        self.work.spend(1);
        let first = client.held.first();
        self.is_late |= first.is_some_and(|first| first.deadline + LATE < self.now);
        self.set_client_timer(client);
        result
    }

    /// Sets the timer of a connection to the first of these: the deadline of a reserved job; and
    /// during a wait, 1 s before that deadline, and the timeout.
    pub(super) fn set_client_timer(&mut self, client: &Client) {
        let next = self.next_moment(client);
        if next != Nanos::NEVER {
            self.conn_timers.set_no_later_than(client.key, next.max(self.now));
        }
    }

    /// Returns the moment at which something is due for a connection; [`Nanos::NEVER`] if nothing is.
    pub(super) fn next_moment(&self, client: &Client) -> Nanos {
        let deadline = client.held.first().map_or(Nanos::NEVER, |entry| entry.deadline);
        match self.watchers[client.key].wait {
            None => deadline,
            Some(wait) if deadline == Nanos::NEVER => wait.until,
            Some(wait) => wait.until.min(deadline.before(SAFETY_MARGIN)),
        }
    }
}
