//! Checks the invariants of the queue from scratch.
//!
//! Each module checks its own structures. This one checks that they agree: that each job is in the
//! heap or list of its state, that the counts are right, and that no timer is late. It changes
//! nothing.
//!
//! Only tests call it, after each of their steps. It takes time in proportion to the number of
//! jobs, tubes, connections and watches.

use super::body::Body;
use super::job::{Job, State};
use super::tube::Tube;
use super::{Client, Queue, SAFETY_MARGIN, TimerOwner, Totals, URGENT_BELOW};
use crate::engine::binlog::Binlog;
use crate::engine::binlog::record;
use crate::engine::binlog::segments::Owner;
use crate::engine::keys::{ConnKey, JobKey, Key, LogKey, TimerKey, TubeKey};
use crate::engine::time::Nanos;
use std::fmt;

/// The counts of a tube, computed from its jobs and connections.
#[derive(Clone, Debug, Default)]
struct Counted {
    urgent: usize,
    ready: usize,
    reserved: usize,
    delayed: usize,
    buried: usize,
    using: usize,
    watching: usize,
}

impl Queue {
    /// Checks all invariants. They hold between two commands; within a command a job may be
    /// detached.
    ///
    /// # Panics
    /// A check fails.
    pub fn check(&self) {
        self.check_with(std::iter::empty());
    }

    /// As [`Queue::check`], with the references of connections to bodies.
    pub fn check_with<'a>(&'a self, conn_bodies: impl Iterator<Item = &'a Body>) {
        self.jobs.check();
        self.tubes.check();
        self.clients.check(format_args!("the clients"));
        self.wheel.check();
        let jobs = self.jobs.iter().map(|(_, job)| (job.id, &job.body));
        self.bodies.check(jobs.chain(conn_bodies.map(|body| (0, body))));
        self.check_watches();

        let mut counted = vec![Counted::default(); self.tubes.len()];
        for (key, job) in self.jobs.iter().filter(|(_, job)| !self.is_flushed(job)) {
            self.check_job(key, job);
            self.tube_of(job).count_job(job, &mut counted);
        }
        self.check_flushes();
        self.check_unique();
        for (key, client) in self.clients.iter() {
            self.check_client(key, client);
            self.count_client(client, &mut counted);
        }
        for (key, tube) in self.tubes.entries() {
            self.check_tube(key, tube, &counted[tube.list_index()]);
        }
        self.check_totals(&counted);
        self.check_binlog();
        self.check_body_cache();
    }

    // ---- Jobs ----

    /// Checks that the job is at the position that its state names.
    fn check_job(&self, key: JobKey, job: &Job) {
        let Job { id, state, .. } = job;
        self.tube_of(job);
        let found = match *state {
            State::Detached => panic!("job {id} is detached between two commands"),
            State::Reserved { by, index } => {
                let client = self.clients.get(by);
                client.and_then(|client| client.reserved.get(index)).map(|entry| entry.job)
            }
            // `check_tube` walks these. The counts agree, so each job is in one of them.
            State::Ready(_) | State::Delayed(_) | State::Postponed(_) | State::Buried(_) => {
                Some(key)
            }
        };
        assert_eq!(found, Some(key), "job found at {state:?}, and job {id}");
    }

    fn tube_of(&self, job: &Job) -> &Tube {
        let Job { id, tube, .. } = job;
        let found = self.tubes.get(*tube);
        found.unwrap_or_else(|| panic!("no tube {tube:?}, in which job {id} is"))
    }

    // ---- Connections ----

    /// Checks the reserved jobs of a connection, and that its timer fires in time.
    fn check_client(&self, key: ConnKey, client: &Client) {
        let (index, reserved) = (key.index(), &client.reserved);
        reserved.check(&self.jobs, format_args!("the reserved jobs of connection {index}"));
        for entry in reserved.iter() {
            let state = self.jobs[entry.job].state;
            let is_own = matches!(state, State::Reserved { by, .. } if by == key);
            assert!(is_own, "connection {index} has {entry:?}, whose job is {state:?}");
        }
        let wait = client.watching.wait;
        let deadline = reserved.first().map(|entry| entry.deadline);
        let deadline = deadline.filter(|&deadline| deadline != Nanos::NEVER);
        let warning = deadline.filter(|_| wait.is_some()).map(|it| it.before(SAFETY_MARGIN));
        let timeout = wait.map(|wait| wait.until).filter(|&until| until != Nanos::NEVER);
        let what = format_args!("connection {index}");
        if !client.is_overdue {
            let moments = [deadline, warning, timeout];
            self.check_timer(client.timer, TimerOwner::Client(key), what, moments);
        }
    }

    fn count_client(&self, client: &Client, counted: &mut [Counted]) {
        let used = self.tubes.get(client.used);
        let used = used.unwrap_or_else(|| panic!("no tube {:?}, which is used", client.used));
        counted[used.list_index()].using += 1;
        for tube in client.watching.tubes(&self.watches) {
            counted[self.tubes[tube].list_index()].watching += 1;
        }
    }

    // ---- Tubes ----

    /// Checks the heaps, list and counts of a tube, and that its timer fires in time.
    fn check_tube(&self, key: TubeKey, tube: &Tube, counted: &Counted) {
        let Tube { name, ready, delayed, postponed, buried, pause, .. } = tube;
        let check = |number, is_state: fn(State) -> bool| {
            let job = self.jobs.get(JobKey::from_number(number));
            let job = job.unwrap_or_else(|| panic!("no job {number}, listed in tube {name}"));
            let Job { id, tube: own, state, .. } = job;
            let is_here = *own == key && is_state(*state);
            assert!(is_here, "job {id} in a wrong list of tube {name}: {state:?} in {own:?}");
        };
        ready.check(&self.jobs, format_args!("the ready jobs of tube {name}"), |number| {
            check(number, |state| matches!(state, State::Ready(_)));
        });
        delayed.check(&self.jobs, format_args!("the delayed jobs of tube {name}"), |number| {
            check(number, |state| matches!(state, State::Delayed(_)));
        });
        postponed.check(&self.jobs, format_args!("the postponed jobs of tube {name}"), |number| {
            check(number, |state| matches!(state, State::Postponed(_)));
        });
        buried.check(&self.jobs, format_args!("the buried jobs of tube {name}"), |number| {
            check(number, |state| matches!(state, State::Buried(_)));
        });
        let pairs = [
            ("ready jobs", ready.len(), counted.ready),
            ("delayed jobs", tube.delayed_count(), counted.delayed),
            ("buried jobs", buried.len() as usize, counted.buried),
            ("urgent jobs", tube.urgent as usize, counted.urgent),
            ("reserved jobs", tube.reserved as usize, counted.reserved),
            ("using connections", tube.using as usize, counted.using),
            ("watching connections", tube.watching as usize, counted.watching),
        ];
        for (what, stored, counted) in pairs {
            assert_eq!(stored, counted, "stored and actual count of {what} of tube {name}");
        }
        let delay_end = self.next_delayed(tube).map(|(_, due)| due);
        // Postponed jobs are tried again, whenever that is.
        let retry_at = postponed.front().map(|_| Nanos::NEVER);
        let pause_end = pause.as_ref().map(|pause| pause.until);
        let what = format_args!("tube {name}");
        if !tube.is_overdue {
            self.check_timer(
                tube.timer,
                TimerOwner::Tube(key),
                what,
                [delay_end, pause_end, retry_at],
            );
        }
    }

    // ---- Timers ----

    /// Checks that the timer fires not later than the first of these times; it may fire earlier.
    pub(super) fn check_timer<const COUNT: usize>(
        &self,
        timer: TimerKey,
        owner: TimerOwner,
        what: fmt::Arguments<'_>,
        moments: [Option<Nanos>; COUNT],
    ) {
        assert_eq!(
            self.wheel.owner(timer),
            owner,
            "stored and actual owner of the timer of {what}"
        );
        for at in moments.into_iter().flatten() {
            let is_in_time = self.wheel.is_set_no_later_than(timer, at);
            assert!(is_in_time, "the timer of {what} fires after {at:?}, or never");
        }
    }

    // ---- Totals ----

    fn check_totals(&self, counted: &[Counted]) {
        let sum = |of: fn(&Counted) -> usize| counted.iter().map(of).sum::<usize>();
        let clients = |has: fn(&Client) -> bool| {
            self.clients.iter().filter(|(_, client)| has(client)).count()
        };
        let Totals { urgent, ready, reserved, delayed, buried, .. } = self.totals;
        let Totals { producers, workers, waiting, total_jobs, .. } = self.totals;
        let pairs = [
            ("urgent jobs", urgent, sum(|tube| tube.urgent)),
            ("ready jobs", ready, sum(|tube| tube.ready)),
            ("reserved jobs", reserved, sum(|tube| tube.reserved)),
            ("delayed jobs", delayed, sum(|tube| tube.delayed)),
            ("buried jobs", buried, sum(|tube| tube.buried)),
            ("producers", producers, clients(|client| client.is_producer)),
            ("workers", workers, clients(|client| client.is_worker)),
            ("waiting", waiting, clients(|client| client.watching.is_waiting())),
        ];
        for (what, stored, counted) in pairs {
            assert_eq!(stored, counted as u64, "stored and actual count of {what}");
        }
        // Removed tubes count in `total_jobs` and not in this sum.
        let put = self.tubes.iter().map(|tube| tube.total_jobs).sum::<u64>();
        assert!(put <= total_jobs, "{put} jobs put into present tubes, {total_jobs} put in all");
        let owners = self.tubes.len() + self.clients.len();
        assert_eq!(self.wheel.len(), owners, "timers, and tubes and connections");
    }

    // ---- Binlog ----

    /// Checks that the binlog, if there is one, has an entry for each job and no other.
    fn check_binlog(&self) {
        self.binlog.as_ref().inspect(|binlog| binlog.check());
        let logged = self.binlog.as_ref().map(Binlog::job_count);
        let len = self.jobs.len() as u64;
        assert_eq!(logged.unwrap_or(len), len, "jobs in the binlog, and jobs");
        for (key, Job { id, log, tube, body, .. }) in self.jobs.iter() {
            let full_len = record::full_len(&self.tubes[*tube].name, body.full_len() as usize);
            let key_len = log.unique().map_or(0, |_| record::SHORT_LEN);
            let log = self.unique.log_of(*log);
            self.check_log(log, Owner::Job(key), *id, full_len + key_len);
        }
    }

    /// Checks the entry of a job or kept key in the binlog, whose records have `len` bytes.
    pub(super) fn check_log(&self, log: LogKey, owner: Owner, id: u64, len: usize) {
        match &self.binlog {
            Some(binlog) => binlog.check_entry(log, owner, id, len),
            None => assert_eq!(log, LogKey::NONE, "log key of job {id} without a binlog"),
        }
    }
}

impl Tube {
    /// Counts one job of the tube.
    fn count_job(&self, job: &Job, counted: &mut [Counted]) {
        let counted = &mut counted[self.list_index()];
        match job.state {
            State::Detached => {}
            State::Ready { .. } => {
                counted.ready += 1;
                counted.urgent += usize::from(job.pri < URGENT_BELOW);
            }
            State::Delayed(_) | State::Postponed(_) => counted.delayed += 1,
            State::Reserved { .. } => counted.reserved += 1,
            State::Buried(_) => counted.buried += 1,
        }
    }
}
