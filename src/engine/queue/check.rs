//! Checks the invariants of the queue from scratch.
//!
//! Each module checks its own structures. This one checks that they agree: that each job is among
//! those of its state, that the counts are right, and that no timer is late. It changes
//! nothing.
//!
//! Only tests call it, after each of their steps. It takes time in proportion to the number of
//! jobs, tubes, connections and watches.

use super::body::Body;
use super::client::Client;
use super::job::{Holder, Job, ReservedEntry, State};
use super::tube::Tube;
use super::{Queue, URGENT_BELOW};
use crate::engine::binlog::record;
use crate::engine::keys::{ConnKey, JobKey, TubeKey};
use crate::engine::time::Nanos;
use std::collections::BTreeMap;
use std::fmt;

/// The numbers of jobs of a tube by state, of its urgent jobs, and of the connections that use and watch it.
type Counts = [usize; 7];
const COUNTED: [&str; 7] =
    ["ready", "reserved", "delayed", "buried", "urgent", "using", "watching"];
const URGENT: usize = 4;
const USING: usize = 5;
const WATCHING: usize = 6;

impl Queue {
    /// Checks all invariants, with all clients and the references of connections to bodies. They hold between
    /// two commands; within a command a job may be detached.
    ///
    /// # Panics
    /// A check fails.
    pub fn check<'a>(
        &'a self,
        clients: impl Iterator<Item = &'a Client>,
        conn_bodies: impl Iterator<Item = &'a Body>,
    ) {
        let clients: BTreeMap<ConnKey, &Client> = clients.map(|it| (it.key, it)).collect();
        self.jobs.check(format_args!("the jobs"));
        let counts = self.jobs.iter().map(|(_, job)| &job.counts);
        self.large_counts.check(counts, format_args!("the large counts"));
        let live = || self.jobs.iter().filter(|(_, job)| !job.is_kept());
        for (key, job) in live() {
            let found = self.jobs.find(job.id);
            assert_eq!(found, Some(key), "key found for job {}, and its own", job.id);
            assert!(job.ttr_secs >= 1, "job {} has a TTR of 0 s", job.id);
        }
        self.tubes.check();
        self.tube_timers.check(self.tubes.len(), format_args!("the timers of tubes"));
        self.conn_timers.check(clients.len(), format_args!("the timers of connections"));
        let jobs = self.jobs.iter().map(|(_, job)| (job.id, &job.body));
        self.bodies.check(jobs.chain(conn_bodies.map(|body| (0, body))));
        self.check_watches(&clients);

        let mut counted: BTreeMap<TubeKey, Counts> = BTreeMap::new();
        for (key, job) in live().filter(|(_, job)| !self.is_flushed(job)) {
            let counts = counted.entry(job.tube).or_default();
            counts[self.state_number(key, job, &clients)] += 1;
            let is_urgent = matches!(job.state, State::Ready(_)) && job.pri < URGENT_BELOW;
            counts[URGENT] += usize::from(is_urgent);
        }
        self.check_flushes();
        self.check_unique();
        self.check_groups();
        for client in clients.values() {
            self.check_client(client);
            counted.entry(client.used).or_default()[USING] += 1;
            for tube in client.watching.tubes(&self.watches) {
                counted.entry(tube).or_default()[WATCHING] += 1;
            }
        }
        let mut sums = Counts::default();
        for (key, tube) in self.tubes.entries() {
            let counts = counted.remove(&key).unwrap_or_default();
            self.check_tube(key, tube, counts);
            sums = std::array::from_fn(|at| sums[at] + counts[at]);
        }
        assert!(counted.is_empty(), "jobs and connections of tubes that are gone: {counted:?}");
        self.check_totals(sums, &clients);
        self.check_binlog();
        self.check_body_cache();
    }

    /// Checks that the job is at the position that its state names. Returns the number of that state in
    /// [`Counts`].
    fn state_number(&self, key: JobKey, job: &Job, clients: &BTreeMap<ConnKey, &Client>) -> usize {
        match job.state {
            State::Detached | State::Kept(_) => {
                panic!("job {} is detached between two commands", job.id)
            }
            // `check_tube` walks these. The counts agree, so each job is in one of them.
            State::Ready(_) => 0,
            State::Delayed(_) => 2,
            State::Buried(_) => 3,
            State::Reserved(Holder { by, index }) => {
                let client = clients.get(&{ by });
                let entry = client.and_then(|client| client.held.get(index as usize));
                let stored = entry.map(|entry| (entry.job, entry.deadline));
                assert_eq!(stored, Some((key, job.due)), "job {} at {by:?}", job.id);
                1
            }
        }
    }

    /// Checks the jobs that a connection holds, and that its timer fires in time.
    fn check_client(&self, client: &Client) {
        let index = client.key.index();
        let what = format_args!("the reserved jobs of connection {index}");
        let index_of = |entry: ReservedEntry| client.index_of(&self.jobs[entry.job]);
        client.held.check(&self.jobs, what, index_of);
        let at = self.conn_timers.at(client.key);
        self.check_timer(at, format_args!("connection {index}"), self.next_moment(client));
    }

    /// Checks the jobs and counts of a tube, and that its timer fires in time.
    fn check_tube(&self, key: TubeKey, tube: &Tube, counted: Counts) {
        let Tube { name, jobs, .. } = tube;
        jobs.check(&self.jobs, format_args!("jobs of tube {name}"), |job| job.tube == key);
        let noted = [jobs.reserved, jobs.buried.len(), jobs.urgent, tube.using, tube.watching];
        let [reserved, buried, urgent, using, watching] = noted.map(|count| count as usize);
        let (ready, delayed) = (jobs.ready_count(), jobs.delayed.len());
        let stored = [ready, reserved, delayed, buried, urgent, using, watching];
        assert_eq!(stored, counted, "stored and actual {COUNTED:?} of tube {name}");
        let delay_end = self.next_delayed(tube).map(|(_, due)| due);
        let ends = delay_end.into_iter().chain(tube.pause.as_ref().map(|pause| pause.until));
        let first = ends.min().unwrap_or(Nanos::NEVER);
        self.check_timer(self.tube_timers.at(key), format_args!("tube {name}"), first);
    }

    // ---- Timers ----

    /// Checks that a timer fires not later than when something is due first, or now if a tick has left some of what was
    /// due; it may fire earlier.
    fn check_timer(&self, at: Nanos, what: fmt::Arguments<'_>, first: Nanos) {
        let is_in_time = at <= first.max(self.now);
        assert!(is_in_time, "the timer of {what} fires at {at:?}, after {first:?}");
    }

    // ---- Totals ----

    fn check_totals(
        &self,
        [ready, reserved, delayed, buried, urgent, ..]: Counts,
        clients: &BTreeMap<ConnKey, &Client>,
    ) {
        let producers = clients.values().filter(|it| it.is_producer).count();
        let workers = clients.values().filter(|it| it.is_worker).count();
        let waiting = self.watchers.iter().filter(|(_, watcher)| watcher.wait.is_some()).count();
        let actual = [ready, reserved, delayed, buried, urgent, producers, workers, waiting];
        let of = &self.totals;
        let jobs = [of.ready, of.reserved, of.delayed, of.buried, of.urgent];
        let stored = jobs.into_iter().chain([of.producers, of.workers, of.waiting]);
        assert!(
            stored.eq(actual.map(|count| count as u64)),
            "actual counts {actual:?} of {COUNTED:?}, producers, workers, waiting; stored {of:?}"
        );
        // Removed tubes count in `total_jobs` and not in this sum.
        let put = self.tubes.iter().map(|tube| tube.total_jobs).sum::<u64>();
        let total = of.total_jobs;
        assert!(put <= total, "{put} jobs put into present tubes, {total} put in all");
    }

    // ---- Binlog ----

    /// Checks that the binlog, if there is one, has an entry for each job and no other.
    fn check_binlog(&self) {
        let Some(binlog) = &self.binlog else { return };
        binlog.check();
        let count = self.jobs.iter().filter(|(_, job)| !job.is_kept()).count() as u64;
        assert_eq!(binlog.files.job_count(), count, "jobs in the binlog, and jobs");
        for (key, job) in self.jobs.iter() {
            let tube = &self.tubes[job.tube].name;
            let full_len = match job.is_kept() {
                true => 0,
                false => record::full_len(tube, job.body.full_len() as usize),
            };
            let key_len = job.unique().map_or(0, |_| record::SHORT_LEN);
            binlog.check_entry(key, full_len + key_len);
        }
    }
}
