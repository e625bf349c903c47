//! A chapter of the rules: what holds between any two commands, counted anew.
//!
//! Each room looks after what it alone knows: that a heap is one, that a tube is found by its
//! name. Here is what they must agree about: every job stands where it says and nowhere else;
//! what was counted as jobs and connections came and went is what there is; and no timer is later
//! than what it is for. The story of each is told where it is kept so, above all in `queue.rs` and
//! `waiting.rs`; here it is only looked at, from scratch, and nothing is changed or mended.
//!
//! The server never does this: tests do, after each of their steps. It takes time in proportion to
//! all there is.

use super::body::Body;
use super::job::{Job, State};
use super::tube::Tube;
use super::{Client, Queue, SAFETY_MARGIN, TimerOwner, Totals, URGENT_BELOW};
use crate::engine::binlog::Binlog;
use crate::engine::binlog::record;
use crate::engine::keys::{ConnKey, JobKey, Key, LogKey, TimerKey, TubeKey};
use crate::engine::time::Nanos;
use std::fmt;

/// How many jobs and connections say of themselves that they belong to a tube.
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
    /// Everything that is known twice is the same both times. To be called between two commands
    /// only: in the middle of one a job may be on its way.
    ///
    /// # Panics
    /// Something does not agree.
    pub fn check(&self) {
        self.check_with(std::iter::empty());
    }

    /// The same, with the holds of connections on bodies.
    pub fn check_with<'a>(&'a self, held: impl Iterator<Item = &'a Body>) {
        self.jobs.check();
        self.tubes.check();
        self.clients.check(format_args!("the clients"));
        self.wheel.check();
        let jobs = self.jobs.iter().map(|(_, job)| (job.id, &job.body));
        self.bodies.check(jobs.chain(held.map(|body| (0, body))));
        self.check_watches();

        let mut counted = vec![Counted::default(); self.tubes.len()];
        for (key, job) in self.jobs.iter() {
            self.check_job(key, job);
            self.tube_of(job).count_job(job, &mut counted);
        }
        for (key, client) in self.clients.iter() {
            self.check_client(key, client);
            self.count_client(client, &mut counted);
        }
        for (key, tube) in self.tubes.entries() {
            self.check_tube(key, tube, &counted[tube.place()]);
        }
        self.check_totals(&counted);
        self.check_binlog();
    }

    // ---- Jobs ----

    /// The job stands where it says.
    fn check_job(&self, key: JobKey, job: &Job) {
        let Job { id, state, .. } = job;
        let tube = self.tube_of(job);
        let found = match *state {
            State::Moving => panic!("job {id} stands nowhere"),
            State::Ready { place } => tube.ready.get(place).map(|entry| entry.job),
            State::Delayed { place } => tube.delayed.get(place).map(|entry| entry.job),
            State::Reserved { by, place } => {
                let by = self.clients.get(by);
                by.and_then(|client| client.reserved.get(place)).map(|entry| entry.job)
            }
            // Its list is walked with its tube.
            State::Buried(_) => Some(key),
        };
        assert_eq!(found, Some(key), "what is found where job {id} says {state:?}, and the job");
    }

    fn tube_of(&self, job: &Job) -> &Tube {
        let Job { id, tube, .. } = job;
        let found = self.tubes.get(*tube);
        found.unwrap_or_else(|| panic!("job {id} is in {tube:?}, which is not there"))
    }

    // ---- Connections ----

    /// The connection holds what it says, and its timer goes off in time.
    fn check_client(&self, key: ConnKey, client: &Client) {
        let (index, reserved) = (key.index(), &client.reserved);
        reserved.check(&self.jobs, format_args!("the jobs that connection {index} holds"));
        for entry in reserved.iter() {
            let is_counted = entry.by == key && entry.turn < self.reservations;
            assert!(is_counted, "connection {index} holds {entry:?} of {}", self.reservations);
        }
        let wait = client.watching.wait;
        let deadline = reserved.first().map(|held| held.deadline);
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
        let used = used.unwrap_or_else(|| panic!("{:?} is used, but not there", client.used));
        counted[used.place()].using += 1;
        for tube in client.watching.tubes(&self.watches) {
            counted[self.tubes[tube].place()].watching += 1;
        }
    }

    // ---- Tubes ----

    /// The tube has the jobs that say so, and its timer goes off in time.
    fn check_tube(&self, key: TubeKey, tube: &Tube, counted: &Counted) {
        let Tube { name, ready, delayed, buried, pause, .. } = tube;
        ready.check(&self.jobs, format_args!("the ready jobs of tube {name}"));
        delayed.check(&self.jobs, format_args!("the delayed jobs of tube {name}"));
        buried.check(&self.jobs, format_args!("the buried jobs of tube {name}"), |number| {
            let job = self.jobs.get(JobKey::from_number(number));
            let Job { id, tube: own, state, .. } = job.unwrap_or_else(|| {
                panic!("{number} is among the buried of tube {name}, but no job")
            });
            let is_here = *own == key && matches!(state, State::Buried(_));
            assert!(is_here, "job {id} is among the buried of tube {name}: {state:?} in {own:?}");
        });
        let pairs = [
            ("ready jobs", ready.len(), counted.ready),
            ("delayed jobs", delayed.len(), counted.delayed),
            ("buried jobs", buried.len() as usize, counted.buried),
            ("urgent jobs", tube.urgent as usize, counted.urgent),
            ("reserved jobs", tube.reserved as usize, counted.reserved),
            ("connections that use it", tube.using as usize, counted.using),
            ("connections that watch it", tube.watching as usize, counted.watching),
        ];
        for (what, noted, counted) in pairs {
            assert_eq!(noted, counted, "{what} of tube {name}, as noted and as counted");
        }
        let due = delayed.first().map(|first| first.due);
        let pause_over = pause.as_ref().map(|pause| pause.until);
        let what = format_args!("tube {name}");
        if !tube.is_overdue {
            self.check_timer(tube.timer, TimerOwner::Tube(key), what, [due, pause_over]);
        }
    }

    // ---- Timers ----

    /// The timer goes off no later than the first of these moments; it may be sooner.
    fn check_timer<const COUNT: usize>(
        &self,
        timer: TimerKey,
        owner: TimerOwner,
        what: fmt::Arguments<'_>,
        moments: [Option<Nanos>; COUNT],
    ) {
        assert_eq!(self.wheel.owner(timer), owner, "whose the timer of {what} is");
        for at in moments.into_iter().flatten() {
            let is_in_time = self.wheel.is_set_no_later_than(timer, at);
            assert!(is_in_time, "the timer of {what} goes off after {at:?}, or not at all");
        }
    }

    // ---- Sums ----

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
        for (what, noted, counted) in pairs {
            assert_eq!(noted, counted as u64, "{what}, as noted and as counted");
        }
        // Tubes that are gone have taken theirs with them.
        let put = self.tubes.iter().map(|tube| tube.total_jobs).sum::<u64>();
        assert!(put <= total_jobs, "{total_jobs} jobs were put, but {put} in the tubes there are");
        let store = self.tubes.len() + self.clients.len();
        assert_eq!(self.wheel.len(), store, "timers, and tubes and connections");
    }

    // ---- Binlog ----

    /// If there is a binlog it knows every job, and no other.
    fn check_binlog(&self) {
        self.binlog.as_ref().inspect(|binlog| binlog.check());
        let known = self.binlog.as_ref().map(Binlog::job_count);
        let len = self.jobs.len() as u64;
        assert_eq!(known.unwrap_or(len), len, "jobs that the binlog knows, and jobs");
        for (key, Job { id, log, tube, body, .. }) in self.jobs.iter() {
            let Some(binlog) = &self.binlog else {
                assert_eq!(*log, LogKey::NONE, "job {id} is known to a binlog that is not there");
                continue;
            };
            let len = record::full_len(&self.tubes[*tube].name, body.full_len() as usize);
            binlog.check_job(*log, key, *id, len);
        }
    }
}

impl Tube {
    /// Counts one of its jobs.
    fn count_job(&self, job: &Job, counted: &mut [Counted]) {
        let counted = &mut counted[self.place()];
        match job.state {
            State::Moving => {}
            State::Ready { .. } => {
                counted.ready += 1;
                counted.urgent += usize::from(job.pri < URGENT_BELOW);
            }
            State::Delayed { .. } => counted.delayed += 1,
            State::Reserved { .. } => counted.reserved += 1,
            State::Buried(_) => counted.buried += 1,
        }
    }
}
