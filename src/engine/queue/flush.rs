//! Deletes all jobs of a tube, or all of its buried jobs, at one moment.
//!
//! A tube may have millions of jobs, and deleting them one by one takes seconds. So a flush has two
//! parts. The first part takes the same time for any number of jobs. It records the flush in the
//! binlog, takes the jobs of the tube, and changes the epoch of the tube, or notes until when buried jobs are
//! deleted. A job notes the epoch of its tube when it is put, and the moment when it is buried. If its epoch is
//! another one, or it was buried before, it is flushed: no command finds it. The second part frees the flushed jobs,
//! some in each iteration.
//!
//! Flushed jobs that connections had reserved stay in the heaps of these connections until they are
//! found there: the loop searches the connections one after the other.

use super::client::Client;
use super::job::{Job, ReservedEntry, State};
use super::outcomes::End;
use super::tube::TubeJobs;
use super::{Queue, WORK_PER_FREED_PAGE};
use crate::engine::binlog::NoSpace;
use crate::engine::collections::slab::PAGE_BYTES;
use crate::engine::keys::{ConnKey, JobKey, Key, TubeKey};
use crate::engine::time::Nanos;

use crate::engine::binlog::record::{Decision, FlushKind};

/// A flush whose jobs are not freed yet.
pub(super) struct Flush {
    pub tube: TubeKey,
    /// The connection that waits for the reply; `None` if it was closed.
    conn: Option<ConnKey>,
    /// The number of flushed jobs.
    count: u64,
    /// Those of them that are not freed.
    jobs: TubeJobs,
    decision: Decision,
    /// The epoch of these jobs, and the moment before which they were buried, by which a flushed job finds its flush.
    epoch: u8,
    buried_before: Nanos,
}

/// A tube has at most this many flushes whose jobs are not freed: an epoch has 256 values, and each of
/// these flushes needs another one.
const MAX_PENDING: u8 = 200;
/// All tubes together have at most this many, because the flush of a job is found by a linear search.
const MAX_PENDING_IN_ALL: usize = 1024;
/// Units of work to free a flushed job, or to forget one whose key was kept, without the memory pages that are freed
/// with it.
const WORK_PER_FREE: usize = 3;
/// A search for reserved jobs checks this many jobs or connections in one unit of work.
const CHECKS_PER_WORK: usize = 4;

impl Queue {
    /// Returns whether the job was deleted by a flush and is not freed yet.
    pub fn is_flushed(&self, job: &Job) -> bool {
        if self.flushes.is_empty() {
            return false;
        }
        let tube = &self.tubes[job.tube];
        let is_buried = matches!(job.state, State::Buried(_));
        let is_older = job.epoch != tube.epoch || (is_buried && job.due < tube.flushed_before);
        is_older && !job.is_kept()
    }

    /// Flushes a tube. Returns the number of deleted jobs, or `None` if jobs are left to be freed: then
    /// [`Queue::flush_step`] returns the connection later. On an error nothing has changed.
    pub fn flush(
        &mut self,
        conn: ConnKey,
        tube_key: TubeKey,
        kind: FlushKind,
    ) -> Result<Option<u64>, NoSpace> {
        let tube = &self.tubes[tube_key];
        let count = match kind {
            FlushKind::Buried => u64::from(tube.jobs.buried.len()),
            FlushKind::All => tube.jobs.count(),
        };
        if count == 0 {
            return Ok(Some(0));
        }
        if tube.flushes == MAX_PENDING || self.flushes.len() == MAX_PENDING_IN_ALL {
            return Err(NoSpace);
        }
        self.flushes.try_reserve(1)?;
        self.record_flush(tube_key, kind)?;

        let tube = &mut self.tubes[tube_key];
        tube.flushes += 1;
        tube.deletes += count;
        let epoch = tube.epoch;
        let jobs = match kind {
            FlushKind::Buried => {
                let buried = std::mem::take(&mut tube.jobs.buried);
                TubeJobs { buried, ..TubeJobs::default() }
            }
            FlushKind::All => std::mem::take(&mut tube.jobs),
        };
        self.totals.urgent -= u64::from(jobs.urgent);
        self.totals.ready -= jobs.ready_count() as u64;
        self.totals.delayed -= jobs.delayed.len() as u64;
        self.totals.reserved -= u64::from(jobs.reserved);
        self.totals.buried -= u64::from(jobs.buried.len());
        let flush = Flush {
            tube: tube_key,
            conn: Some(conn),
            count,
            jobs,
            decision: Decision { kind, decided_at: self.now },
            epoch,
            buried_before: self.last_buried_at + Nanos::ONE,
        };
        match kind {
            FlushKind::Buried => tube.flushed_before = flush.buried_before,
            FlushKind::All => tube.epoch = tube.epoch.wrapping_add(1),
        }
        self.flushes.push_back(flush);

        if kind == FlushKind::All {
            self.free_flushed_slots(tube_key, epoch);
        }
        // The flushes of a tube end in their order, so their epochs are adjacent and differ.
        let is_only = self.tubes[tube_key].flushes == 1;
        let newest = self.flushes.len() - 1;
        let rest = self.work.give(self.limits.first_flush_work);
        let is_complete =
            is_only && self.free_flushed(newest) && self.flushes[newest].jobs.reserved == 0;
        self.work.end(rest);
        Ok(is_complete.then(|| self.end_flush(newest).count))
    }

    /// Returns whether flushed jobs are left to be freed.
    pub fn has_flushes(&self) -> bool {
        !self.flushes.is_empty()
    }

    /// Frees jobs of the oldest flushes. Returns the first connection whose flush is complete, and the number of deleted
    /// jobs; `None` if no flush is left, or no work. `search` frees jobs that some connection holds
    /// ([`Queue::free_all_held`]).
    pub fn flush_step(&mut self, mut search: impl FnMut(&mut Queue)) -> Option<(ConnKey, u64)> {
        while self.has_flushes() && self.free_flushed(0) {
            if self.flushes[0].jobs.reserved > 0 {
                search(self);
                continue;
            }
            let Flush { conn, count, .. } = self.end_flush(0);
            if let Some(conn) = conn {
                return Some((conn, count));
            }
        }
        None
    }

    /// Forgets a connection that waits for the reply to a flush.
    pub fn abandon_flush(&mut self, conn: ConnKey) {
        for flush in &mut self.flushes {
            flush.conn.take_if(|waiting| *waiting == conn);
        }
    }

    fn end_flush(&mut self, index: usize) -> Flush {
        let flush = self.flushes.remove(index).expect("the caller has used this flush");
        self.tubes[flush.tube].flushes -= 1;
        self.remove_tube_if_idle(flush.tube);
        flush
    }

    /// Frees the jobs of a flush that no connection holds. Returns `false` without work left for all of them.
    fn free_flushed(&mut self, index: usize) -> bool {
        let is_done = loop {
            let Flush { tube, epoch, decision, ref mut jobs, .. } = self.flushes[index];
            let TubeJobs { ready, delayed, buried, behind, .. } = jobs;
            if !self.work.is_left() {
                break false;
            }
            let jobs = &mut self.jobs;
            let job = ready.pop_any(jobs).or_else(|| delayed.pop_any(jobs));
            match job.or_else(|| buried.pop_front(jobs).map(JobKey::from_number)) {
                Some(job) => self.free_flushed_job(job, decision),
                None if *behind > 0 => {
                    *behind -= 1;
                    let job = self.flushed_behind(tube, epoch);
                    let job = job.expect("a job behind others is among those of its group");
                    self.free_flushed_job(job, decision);
                }
                None if decision.kind == FlushKind::All && self.free_flushed_slot(tube, epoch) => {
                    self.work.spend(WORK_PER_FREE);
                }
                None => break true,
            }
        };
        self.offer_parked();
        is_done
    }

    /// Frees flushed jobs that a connection holds, from this index of its heap on. A job that moves within its
    /// heap may be missed. Returns `false` without work left for all of them.
    pub fn free_all_held(&mut self, client: &mut Client, index: &mut usize) -> bool {
        while let Some(&ReservedEntry { job, .. }) = client.held.get(*index) {
            if !self.work.is_left() {
                return false;
            }
            self.work.spend_for(1, CHECKS_PER_WORK);
            if self.is_flushed(&self.jobs[job]) {
                self.free_held(client, job);
            } else {
                *index += 1;
            }
        }
        self.work.spend(1);
        true
    }

    /// Frees flushed jobs at the top of a connection's heap of reserved jobs. Returns `false` without work left
    /// for all of them; otherwise the top is a job whose deadline counts.
    pub fn free_flushed_tops(&mut self, client: &mut Client) -> bool {
        while self.has_flushes()
            && let Some(&ReservedEntry { job, .. }) = client.held.first()
            && self.is_flushed(&self.jobs[job])
        {
            if !self.work.is_left() {
                return false;
            }
            self.free_held(client, job);
        }
        true
    }

    /// Frees a flushed job that a connection holds.
    pub(super) fn free_held(&mut self, client: &mut Client, key: JobKey) {
        let Job { tube, epoch, .. } = self.jobs[key];
        self.give_up(client, key, Some(End::Delete));
        let mut pending = self.flushes.iter_mut();
        let flush = pending
            .find(|flush| flush.jobs.reserved > 0 && (flush.tube, flush.epoch) == (tube, epoch));
        let flush = flush.expect("a flushed job belongs to a flush");
        flush.jobs.reserved -= 1;
        let decision = flush.decision;
        self.free_flushed_job(key, decision);
    }

    /// Returns the moment at which a flush has deleted the job. Only the keys of jobs need it.
    pub(super) fn flushed_at(&self, job: &Job) -> Nanos {
        let is_buried = matches!(job.state, State::Buried(_));
        // If two have deleted it, the first one counts.
        let flush = self.flushes.iter().find(|flush| {
            flush.tube == job.tube
                && flush.epoch == job.epoch
                && match flush.decision.kind {
                    FlushKind::All => true,
                    FlushKind::Buried => is_buried && job.due < flush.buried_before,
                }
        });
        flush.expect("a flushed job belongs to a flush").decision.decided_at
    }

    /// Frees a job of this flush that is among no others any more.
    fn free_flushed_job(&mut self, key: JobKey, decision: Decision) {
        let mapped_before = self.mapped_bytes();
        self.free_slot(key);
        self.jobs[key].state = State::Detached;
        self.end_job(key, Some(decision));
        self.spend_for_freed(mapped_before);
    }

    /// Spends the price of freeing a job, before which the pages of jobs took this many bytes.
    pub(super) fn spend_for_freed(&mut self, mapped_before: u64) {
        let freed = mapped_before.saturating_sub(self.mapped_bytes()).div_ceil(PAGE_BYTES as u64);
        let pages = usize::try_from(freed).unwrap_or(usize::MAX);
        self.work.spend(WORK_PER_FREE + pages * WORK_PER_FREED_PAGE);
    }

    // ---- Checking ----

    /// Checks that each flushed job belongs to a flush.
    pub(super) fn check_flushes(&self) {
        let mut stored = [0; 4];
        for flush in &self.flushes {
            let Flush { tube, jobs, .. } = flush;
            jobs.check(&self.jobs, format_args!("jobs of a flush"), |job| self.is_flushed(job));
            let (ready, delayed) = (jobs.ready_count(), jobs.delayed.len());
            let lens = [ready, delayed, jobs.buried.len() as usize, jobs.reserved as usize];
            stored = std::array::from_fn(|state| stored[state] + lens[state]);
            assert!(self.tubes.get(*tube).is_some(), "a flush is of {tube:?}, which is gone");
        }
        let mut counted = [0; 4];
        for (_, job) in self.jobs.iter().filter(|(_, job)| self.is_flushed(job)) {
            let state = match job.state {
                State::Ready { .. } => 0,
                State::Delayed(_) => 1,
                State::Buried(_) => 2,
                State::Reserved { .. } => 3,
                State::Detached | State::Kept(_) => panic!("flushed job {} is detached", job.id),
            };
            counted[state] += 1;
        }
        assert_eq!(
            stored, counted,
            "ready, delayed, buried and reserved jobs in flushes, and flushed"
        );
        for (key, tube) in self.tubes.entries() {
            let of_tube = self.flushes.iter().filter(|flush| flush.tube == key).count();
            assert_eq!(usize::from(tube.flushes), of_tube, "flushes of tube {}", tube.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::limits::{Limits, Settings};
    use crate::engine::queue::Totals;
    use crate::engine::queue::job::JobParams;
    use std::collections::BTreeMap;

    const NOW: Nanos = Nanos::from_secs(100);
    const TUBES: [&str; 3] = ["a", "b", "c"];

    fn put(queue: &mut Queue, id: u64, tube: &str, delay_secs: u32) {
        let tube = queue.find_or_create_tube(tube).unwrap();
        let params = JobParams { pri: 7, delay_secs, ttr_secs: 60 };
        let body = queue.bodies.add(b"body\r\n").unwrap();
        queue.put(tube, id, params, None, body).unwrap();
    }

    fn connect(queue: &mut Queue, index: usize) -> Client {
        queue.connect(ConnKey::from_index(index)).unwrap()
    }

    fn reserve(queue: &mut Queue, client: &mut Client, id: u64) -> JobKey {
        client.held.try_reserve_one().unwrap();
        let job = queue.find(id).unwrap();
        queue.reserve_job(client, job).unwrap();
        job
    }

    /// Frees flushed jobs, and returns the replies in their order.
    fn free(queue: &mut Queue, clients: &mut [Client], work: usize) -> Vec<(ConnKey, u64)> {
        let mut replies = Vec::new();
        let rest = queue.work.give(work);
        let mut search = |queue: &mut Queue| {
            for client in &mut *clients {
                queue.free_all_held(client, &mut 0);
            }
        };
        replies.extend(std::iter::from_fn(|| queue.flush_step(&mut search)));
        queue.work.end(rest);
        replies
    }

    fn finish(queue: &mut Queue, clients: &mut [Client]) -> Vec<(ConnKey, u64)> {
        let replies = free(queue, clients, 1 << 30);
        assert!(!queue.has_flushes(), "flushed jobs are left");
        replies
    }

    fn check<'a>(queue: &'a Queue, clients: impl IntoIterator<Item = &'a Client>) {
        queue.check(clients.into_iter(), std::iter::empty());
    }

    #[test]
    fn flushed_jobs_are_gone_at_once_and_others_stay() {
        for seed in 0..12 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
            queue.now = NOW;
            let mut clients: Vec<Client> = (0..4).map(|at| connect(&mut queue, at)).collect();
            // The tube of each job, and whether it is buried.
            let mut model: BTreeMap<u64, (&str, bool)> = BTreeMap::new();
            let (mut last_id, mut asked) = (0, 0);
            for _ in 0..random.usize(5..60) {
                for _ in 0..random.usize(..400) {
                    last_id += 1;
                    let tube = *random.choice(&TUBES).expect("there are tubes");
                    put(&mut queue, last_id, tube, u32::from(random.bool()) * 9);
                    let client = random.choice(&mut clients).expect("there are connections");
                    let is_reserved = random.u8(..3) == 0;
                    let is_buried = is_reserved && random.bool();
                    if is_reserved {
                        let job = reserve(&mut queue, client, last_id);
                        assert!(!is_buried || queue.bury(client, job, 7).is_ok());
                    }
                    model.insert(last_id, (tube, is_buried));
                }
                let at = random.usize(..clients.len());
                let conn = clients[at].key;
                match random.u8(..6) {
                    0..3 => {
                        let kind = if random.bool() { FlushKind::All } else { FlushKind::Buried };
                        let name = *random.choice(&TUBES).expect("there are tubes");
                        let Some(tube) = queue.tubes.find(name) else { continue };
                        let before = model.len();
                        model.retain(|_, (tube, is_buried)| {
                            *tube != name || (kind == FlushKind::Buried && !*is_buried)
                        });
                        let count = (before - model.len()) as u64;
                        match queue.flush(conn, tube, kind).unwrap() {
                            Some(flushed) => assert_eq!(flushed, count, "seed {seed}"),
                            None => asked += 1,
                        }
                    }
                    3 => {
                        asked -= free(&mut queue, &mut clients, random.usize(..600)).len();
                    }
                    4 if clients.len() > 1 => {
                        let mut client = clients.swap_remove(at);
                        let mut order = queue.disconnect(&mut client);
                        queue.abandon_flush(conn);
                        asked = queue.flushes.iter().filter(|it| it.conn.is_some()).count();
                        assert!(queue.leave(&mut client, &mut order));
                    }
                    _ => {
                        let id = random.u64(..=last_id);
                        let expected = model.contains_key(&id);
                        assert_eq!(queue.find(id).is_some(), expected, "seed {seed}, job {id}");
                        if let Some(job) = queue.find_own(&clients[at], id) {
                            assert_eq!(queue.delete(&mut clients[at], job), Ok(()));
                            assert!(model.remove(&id).is_some(), "seed {seed}, job {id}");
                        }
                    }
                }
                check(&queue, &clients);
                let Totals { ready, reserved, delayed, buried, .. } = queue.totals;
                assert_eq!(ready + reserved + delayed + buried, model.len() as u64, "seed {seed}");
            }
            assert_eq!(finish(&mut queue, &mut clients).len(), asked, "seed {seed}: replies");
            check(&queue, &clients);
            assert_eq!(queue.jobs.len(), model.len(), "seed {seed}");
        }
    }

    #[test]
    fn the_deadline_of_a_flushed_job_does_not_count() {
        let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
        queue.now = NOW;
        let mut worker = connect(&mut queue, 0);
        let other = connect(&mut queue, 1).key;
        for id in 1..=1_000 {
            put(&mut queue, id, "a", 0);
            reserve(&mut queue, &mut worker, id);
        }
        queue.now = NOW + Nanos::from_millis(59_500);
        assert!(queue.is_deadline_soon(&worker));
        let tube = queue.tubes.find("a").unwrap();
        assert_eq!(queue.flush(other, tube, FlushKind::All), Ok(None));
        assert!(!queue.is_deadline_soon(&worker));
        // The TTR of flushed jobs runs out without effect.
        queue.now = NOW + Nanos::from_secs(61);
        queue.run_due_client(&mut worker);
        assert_eq!(queue.totals.timeouts, 0);
        assert_eq!(finish(&mut queue, &mut []), [(other, 1_000)]);
        assert!(queue.tubes.find("a").is_none(), "an idle tube is kept");
        assert_eq!(queue.jobs.len(), 0);
    }

    #[test]
    fn a_tube_has_a_bounded_number_of_flushes() {
        let limits = Limits { first_flush_work: 1, ..Limits::DEFAULT };
        let mut queue = Queue::new(Settings::DEFAULT, limits);
        queue.now = NOW;
        let client = connect(&mut queue, 0);
        let mut id = 0;
        for round in 0..=u64::from(MAX_PENDING) {
            for _ in 0..2 {
                id += 1;
                put(&mut queue, id, "a", 0);
            }
            let tube = queue.tubes.find("a").unwrap();
            let flushed = queue.flush(client.key, tube, FlushKind::All);
            let is_refused = round == u64::from(MAX_PENDING);
            assert_eq!(flushed, if is_refused { Err(NoSpace) } else { Ok(None) });
        }
        assert_eq!(queue.totals.ready, 2);
        assert_eq!(finish(&mut queue, &mut []).len(), usize::from(MAX_PENDING));
        assert_eq!(queue.totals.ready, 2);
        check(&queue, &[client]);
    }

    /// The epochs of a tube have eight bits.
    #[test]
    fn small_flushes_during_a_large_one_bring_no_job_back() {
        for kind in [FlushKind::All, FlushKind::Buried] {
            let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
            queue.now = NOW;
            let mut client = connect(&mut queue, 0);
            let conn = client.key;
            let mut add = |queue: &mut Queue, id| {
                put(queue, id, "a", 0);
                if kind == FlushKind::Buried {
                    let job = reserve(queue, &mut client, id);
                    assert_eq!(queue.bury(&mut client, job, 7), Ok(()));
                }
            };
            (1..=5_000).for_each(|id| add(&mut queue, id));
            let tube = queue.tubes.find("a").unwrap();
            assert_eq!(queue.flush(conn, tube, kind), Ok(None));
            for id in 5_001..=5_600 {
                add(&mut queue, id);
                let is_refused = queue.flush(conn, tube, kind).is_err();
                assert_eq!(is_refused, id >= 5_000 + u64::from(MAX_PENDING));
                assert_eq!(queue.find(1), None, "after {id} jobs");
            }
            let mut clients = [client];
            check(&queue, &clients);
            finish(&mut queue, &mut clients);
            check(&queue, &clients);
        }
    }
}
