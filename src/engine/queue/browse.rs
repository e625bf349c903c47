//! Selects jobs of a tube in the order of their ids, for `list-jobs` and `peek-batch`.
//!
//! No structure has the jobs of a tube in the order of their ids, because it would cost memory for
//! each job. So a scan finds the jobs of one reply in the first of these ways that suffices:
//!
//! 1. It compares all jobs of the tube in the requested states, if these are at most 2,048 and none of them
//!    is reserved.
//! 2. It looks up the next 4,096 ids. That is enough for most replies about a large tube.
//! 3. It compares all jobs of the server, some in each iteration. A job keeps its slot in memory as
//!    long as it exists, so no job is missed or found twice. Ten million jobs take 0.15 s.

use super::Queue;
use super::job::Job;
use super::tube::TubeJobs;
use crate::engine::binlog::record::JobState;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{JobKey, Key, TubeKey};
use crate::engine::text;
use std::collections::BinaryHeap;
use std::rc::Rc;

/// A scan for the jobs of `list-jobs` and `peek-batch`, in steps.
#[derive(Debug)]
pub struct SelectionScan {
    tube: TubeKey,
    /// The tube may be removed between two steps, and its key be given to another one.
    tube_name: Box<str>,
    /// Only jobs in this state are selected, or all.
    state: Option<JobState>,
    /// Only jobs with higher ids are selected.
    after: u64,
    /// The maximum number of jobs.
    count: usize,
    /// The lowest ids that were found: at most one more than `count`.
    lowest: BinaryHeap<u64>,
    /// The memory page of jobs that is compared next.
    next_page: usize,
    /// Its copies count the scans.
    _counted: Rc<()>,
}

/// The result of a step of a scan.
pub enum ScanStep {
    /// Jobs in the order of their ids. `next` is the last id if there are more, and otherwise 0.
    Jobs { keys: Vec<JobKey>, next: u64 },
    /// There is no such tube.
    NoTube,
    /// More jobs must be compared.
    Unfinished,
}

/// Units of work to compare a memory page of jobs.
const WORK_PER_SCANNED_PAGE: usize = 160;
/// The number of jobs that are compared in one unit of work (0.25 us).
const COMPARED_PER_WORK: usize = 4;
/// Comparing a job of a list costs as much as this many others, which are adjacent in memory.
const LISTED_COST: usize = 4;
/// The number of ids that are looked up in one unit of work.
const LOOKED_UP_PER_WORK: usize = 2;
/// Units of work for each selected job, which is looked up once more.
const WORK_PER_SELECTED: usize = 2;
/// Units of work to write its line or its body.
const WORK_PER_SHOWN: usize = 2;

impl Queue {
    /// Returns a scan for at most `count` jobs of a tube with ids above `after`, in the order of their ids: jobs in this
    /// state, or in all states. Returns `None` if there is no such tube. As long as the scan exists, it has a copy of
    /// `scans`.
    pub fn select(
        &self,
        name: &str,
        state: Option<JobState>,
        count: usize,
        after: u64,
        scans: &Rc<()>,
    ) -> Result<Option<SelectionScan>, NoMemory> {
        let Some(tube) = self.tubes.find(name) else { return Ok(None) };
        let mut lowest = BinaryHeap::new();
        headroom::keeping(Headroom::Quarter, || lowest.try_reserve_exact(count + 1))?;
        let tube_name = text::try_boxed(name)?;
        Ok(Some(SelectionScan {
            tube,
            tube_name,
            state,
            after,
            count,
            lowest,
            next_page: 0,
            _counted: Rc::clone(scans),
        }))
    }

    /// Calls `each` with the jobs of the next memory pages that no flush has taken. Returns whether these pages are the
    /// last ones.
    pub fn scan_jobs(&self, next_page: &mut usize, mut each: impl FnMut(&Job)) -> bool {
        let end = (*next_page + self.limits.memory_pages_per_step).min(self.jobs.page_count());
        let jobs = (*next_page..end).flat_map(|page| self.jobs.in_page(page)).map(|(_, job)| job);
        jobs.filter(|job| !job.is_kept() && !self.is_flushed(job)).for_each(&mut each);
        *next_page = end;
        end == self.jobs.page_count()
    }
}

impl SelectionScan {
    /// Returns about how many units of work the first step takes, with the reply.
    pub fn first_work(&self, queue: &Queue) -> usize {
        let number = |number| usize::try_from(number).unwrap_or(usize::MAX);
        let jobs = number(queue.tubes[self.tube].jobs.count());
        let scan = match self.listed(queue) {
            Some(listed) => listed * LISTED_COST / COMPARED_PER_WORK,
            None => {
                let ids = number(queue.last_id.saturating_sub(self.after));
                let needed = ids.saturating_mul(self.count + 1) / jobs.max(1);
                needed.min(queue.limits.ids_looked_up_at_once) / LOOKED_UP_PER_WORK
            }
        };
        scan + jobs.min(self.count) * (WORK_PER_SELECTED + WORK_PER_SHOWN)
    }

    /// Continues the scan.
    pub fn step(&mut self, queue: &mut Queue) -> Result<ScanStep, NoMemory> {
        if queue.tubes.find(&self.tube_name) != Some(self.tube) {
            return Ok(ScanStep::NoTube);
        }
        if self.next_page == 0 && (self.compare_tube(queue) || self.look_up_window(queue)) {
            return self.finish(queue);
        }
        let mut next_page = self.next_page;
        let is_done = queue.scan_jobs(&mut next_page, |job| self.compare(job, queue));
        queue.work.spend(WORK_PER_SCANNED_PAGE * (next_page - self.next_page));
        self.next_page = next_page;
        if is_done { self.finish(queue) } else { Ok(ScanStep::Unfinished) }
    }

    fn takes(&self, state: JobState) -> bool {
        self.state.is_none_or(|only| only == state)
    }

    /// Returns whether the job is in the tube and matches the state.
    fn selects(&self, job: &Job, queue: &Queue) -> bool {
        job.tube == self.tube && self.takes(job.state.shown()) && !queue.is_flushed(job)
    }

    /// Returns the number of jobs to compare in the lists of the tube; `None` if these are too many, or lack some jobs.
    fn listed(&self, queue: &Queue) -> Option<usize> {
        let jobs = &queue.tubes[self.tube].jobs;
        // Only the connections that hold reserved jobs know them.
        if self.takes(JobState::Reserved) && jobs.reserved > 0 {
            return None;
        }
        let listed = usize::from(self.takes(JobState::Ready)) * jobs.ready_count()
            + usize::from(self.takes(JobState::Delayed)) * jobs.delayed.len()
            + usize::from(self.takes(JobState::Buried)) * jobs.buried.len() as usize;
        (listed * LISTED_COST <= queue.limits.jobs_compared_at_once).then_some(listed)
    }

    /// Compares all jobs of the tube. Returns `false` if it has too many.
    fn compare_tube(&mut self, queue: &mut Queue) -> bool {
        let Some(listed) = self.listed(queue) else { return false };
        queue.work.spend(listed * LISTED_COST / COMPARED_PER_WORK);
        let TubeJobs { ready, delayed, buried, .. } = &queue.tubes[self.tube].jobs;
        if self.takes(JobState::Ready) {
            self.compare_all(ready.keys(&queue.jobs), queue);
            self.compare_all(queue.ready_behind(self.tube), queue);
        }
        if self.takes(JobState::Delayed) {
            self.compare_all(delayed.keys(&queue.jobs), queue);
        }
        if self.takes(JobState::Buried) {
            self.compare_all(buried.iter(&queue.jobs).map(JobKey::from_number), queue);
        }
        true
    }

    /// Looks up the next ids. Returns `false` if jobs with higher ids may be missing.
    fn look_up_window(&mut self, queue: &mut Queue) -> bool {
        let window = queue.limits.ids_looked_up_at_once as u64;
        let end = self.after.saturating_add(window).min(queue.highest_id);
        let mut looked_up = 0;
        for id in self.after.saturating_add(1)..=end {
            looked_up += 1;
            if let Some(key) = queue.jobs.find(id) {
                self.compare(&queue.jobs[key], queue);
            }
            if self.lowest.len() > self.count {
                break;
            }
        }
        queue.work.spend(looked_up / LOOKED_UP_PER_WORK);
        let is_complete = self.lowest.len() > self.count || end == queue.highest_id;
        if !is_complete {
            self.lowest.clear();
        }
        is_complete
    }

    fn compare_all(&mut self, keys: impl Iterator<Item = JobKey>, queue: &Queue) {
        keys.for_each(|key| self.compare(&queue.jobs[key], queue));
    }

    /// Adds the id of a job if it matches and is among the lowest ones.
    fn compare(&mut self, job: &Job, queue: &Queue) {
        let id = job.id;
        if id <= self.after || !self.selects(job, queue) {
            return;
        }
        if self.lowest.len() <= self.count {
            self.lowest.push(id);
        } else if let Some(mut highest) = self.lowest.peek_mut()
            && id < *highest
        {
            *highest = id;
        }
    }

    /// Returns the found jobs that still exist and match.
    fn finish(&mut self, queue: &mut Queue) -> Result<ScanStep, NoMemory> {
        let mut ids = std::mem::take(&mut self.lowest).into_sorted_vec();
        let has_more = ids.len() > self.count;
        queue.work.spend(ids.len() * WORK_PER_SELECTED);
        ids.truncate(self.count);
        let next = ids.last().copied().filter(|_| has_more).unwrap_or(0);
        let mut keys = Vec::new();
        headroom::keeping(Headroom::Quarter, || keys.try_reserve_exact(ids.len()))?;
        let found = ids.into_iter().filter_map(|id| queue.jobs.find(id));
        keys.extend(found.filter(|&key| self.selects(&queue.jobs[key], queue)));
        Ok(ScanStep::Jobs { keys, next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::ConnKey;
    use crate::engine::limits::{Limits, Settings};
    use crate::engine::queue::client::Client;
    use crate::engine::queue::job::JobParams;
    use crate::engine::time::Nanos;
    use std::collections::{BTreeMap, BTreeSet};

    const NOW: Nanos = Nanos::from_secs(100);
    const STATES: [Option<JobState>; 5] = [
        Some(JobState::Ready),
        Some(JobState::Reserved),
        Some(JobState::Delayed),
        Some(JobState::Buried),
        None,
    ];

    /// Puts `count` jobs with random gaps of up to `gap` between their ids, in random states, into
    /// two tubes. Tube `many` has most of them.
    fn fill(queue: &mut Queue, random: &mut fastrand::Rng, count: usize, gap: u64) -> Client {
        let mut client = queue.connect(ConnKey::from_index(0)).unwrap();
        for _ in 0..count {
            let id = queue.highest_id + random.u64(1..=gap);
            put(queue, &mut client, random, id);
        }
        client
    }

    fn put(queue: &mut Queue, client: &mut Client, random: &mut fastrand::Rng, id: u64) {
        let name = if random.u8(..10) == 0 { "few" } else { "many" };
        let tube = queue.find_or_create_tube(name).unwrap();
        let delay_secs = u32::from(random.u8(..4) == 0) * 60;
        let params = JobParams { pri: random.u32(..9), delay_secs, ttr_secs: 60 };
        let body = queue.bodies.add(b"body\r\n").unwrap();
        queue.put(tube, id, params, None, body).unwrap();
        if random.bool() {
            client.held.try_reserve_one().unwrap();
            let job = queue.find(id).unwrap();
            queue.reserve_job(client, job).unwrap();
            if random.bool() {
                queue.bury(client, job, 1).unwrap();
            }
        }
    }

    /// Returns the ids of a tube, with the state of each.
    fn ids(queue: &Queue, tube: &str) -> BTreeMap<u64, JobState> {
        let tube = queue.tubes.find(tube);
        let jobs = queue.jobs.iter().map(|(_, job)| job).filter(|job| Some(job.tube) == tube);
        jobs.map(|job| (job.id, job.state.shown())).collect()
    }

    /// Returns a page, and the number of its steps. Calls `between` between two steps.
    fn page(
        queue: &mut Queue,
        (tube, state, count, after): (&str, Option<JobState>, usize, u64),
        mut between: impl FnMut(&mut Queue),
    ) -> (Vec<u64>, u64, usize) {
        let scan = queue.select(tube, state, count, after, &Rc::default());
        let mut scan = scan.unwrap().expect("the tube exists");
        let mut steps = 1;
        loop {
            match scan.step(queue).unwrap() {
                ScanStep::Jobs { keys, next } => {
                    return (keys.iter().map(|&key| queue.jobs[key].id).collect(), next, steps);
                }
                ScanStep::Unfinished => between(queue),
                ScanStep::NoTube => panic!("the tube is gone"),
            }
            steps += 1;
        }
    }

    #[test]
    fn pages_have_all_jobs_in_the_order_of_their_ids() {
        // Few jobs, many jobs with close ids, and many jobs with ids that are far apart.
        for (count, gap, most_steps) in [(300, 3, 1), (12_000, 2, 9), (12_000, 60, 9)] {
            let mut random = fastrand::Rng::with_seed(5);
            let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
            queue.now = NOW;
            fill(&mut queue, &mut random, count, gap);
            let mut max_steps = 0;
            for (tube, state) in ["few", "many"].into_iter().flat_map(|it| STATES.map(|s| (it, s)))
            {
                let expected = ids(&queue, tube)
                    .into_iter()
                    .filter(|&(_, it)| state.is_none_or(|state| it == state));
                let expected: Vec<u64> = expected.map(|(id, _)| id).collect();
                let (mut found, mut after) = (Vec::new(), 0);
                loop {
                    let count = random.usize(500..=1000);
                    let selection = (tube, state, count, after);
                    let (ids, next, steps) = page(&mut queue, selection, |_| {});
                    assert!(ids.len() == count || next == 0, "{} of {count} jobs", ids.len());
                    assert!(next == 0 || Some(&next) == ids.last());
                    found.extend(ids);
                    max_steps = steps.max(max_steps);
                    after = next;
                    if next == 0 {
                        break;
                    }
                }
                assert_eq!(found, expected, "{state:?} jobs of tube {tube}, {count} jobs");
            }
            assert!(max_steps <= most_steps && (max_steps > 1) == (most_steps > 1), "{max_steps}");
        }
    }

    #[test]
    fn a_job_that_stays_is_in_exactly_one_page() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
        queue.now = NOW;
        let mut client = fill(&mut queue, &mut random, 12_000, 60);
        let mut staying: BTreeSet<u64> = ids(&queue, "many").into_keys().collect();
        let (mut found, mut after, mut changes) = (Vec::new(), 0, 0);
        loop {
            let selection = ("many", None, 1000, after);
            let (ids, next, _) = page(&mut queue, selection, |queue| {
                for _ in 0..50 {
                    let gone = *random.choice(&staying).expect("some jobs stay");
                    let job = queue.find(gone).expect("it stays");
                    queue.delete(&mut client, job).unwrap();
                    staying.remove(&gone);
                    let new = queue.highest_id + 1;
                    put(queue, &mut client, &mut random, new);
                }
                changes += 1;
            });
            found.extend(ids);
            after = next;
            if next == 0 {
                break;
            }
        }
        assert!(changes > 5, "{changes} steps were followed by changes");
        assert!(found.is_sorted_by(|a, b| a < b), "a job is in two pages");
        let found: BTreeSet<u64> = found.into_iter().collect();
        let missed: Vec<&u64> = staying.difference(&found).collect();
        assert!(missed.is_empty(), "{} jobs are in no page", missed.len());
    }
}
