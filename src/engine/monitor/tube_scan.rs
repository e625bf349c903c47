//! Scans all tubes in slices, for the metrics page and the status page, and collects the values of
//! each.
//!
//! A scan knows nothing of the pages. A slice has a budget, so that it takes well below 0.1 ms for any
//! number of tubes and jobs. Tubes are added and removed between two slices.

use crate::engine::keys::{JobKey, Key, TubeKey};
use crate::engine::queue::tube::{Tube, Tubes};
use crate::engine::server::View;
use crate::engine::time::Nanos;

/// A scan of all tubes, from the last to the first. When a tube is removed, the last one takes its
/// index: that one was scanned before.
#[derive(Debug)]
pub struct TubeScan {
    /// The number of tubes to scan.
    left: usize,
    /// The position in the last of these tubes.
    cursor: Option<Cursor>,
}

/// The result of a step of a scan.
#[derive(Debug)]
pub enum ScanStep {
    /// The values of the next tube, without its name.
    Tube { index: usize, key: TubeKey, stats: TubeStats },
    /// The budget is used up.
    Unfinished,
    /// All tubes were scanned.
    Done,
}

/// A position in the scan of one tube.
#[derive(Debug)]
pub struct Cursor {
    pub tube: TubeKey,
    pub stats: TubeStats,
    /// The number of ready jobs out of order to scan, from the last index to the first. When the first entry is
    /// removed, the last one moves forward: that one was scanned before.
    ready_left: usize,
    /// The number of waiters to scan, in the same order.
    waiters_left: usize,
}

/// The values of a tube.
#[derive(Debug, Default)]
pub struct TubeStats {
    pub name: String,
    pub ready: u64,
    pub reserved: u64,
    pub delayed: u64,
    pub buried: u64,
    pub urgent: u64,
    pub total_jobs: u64,
    pub deletes: u64,
    pub pauses: u64,
    pub buried_after_returns: u64,
    /// The number of jobs whose bodies are only in the binlog.
    pub cold: u64,
    pub using: u64,
    pub watching: u64,
    pub waiting: u64,
    pub pause: Nanos,
    pub pause_left: Nanos,
    pub oldest_ready_age: Nanos,
}

/// The costs of scanning one of each, in units of about 10 ns.
const READY_COST: usize = 4;
const WAITER_COST: usize = 16;
const TUBE_COST: usize = 64;

impl TubeScan {
    /// Begins a scan.
    pub fn new(tubes: &Tubes) -> TubeScan {
        TubeScan { left: tubes.len(), cursor: None }
    }

    /// Scans until the values of a tube whose name `is_wanted` are complete, and subtracts the cost
    /// from `budget`.
    pub fn step(
        &mut self,
        view: &View<'_>,
        budget: &mut usize,
        is_wanted: impl Fn(&str) -> bool,
    ) -> ScanStep {
        let tubes = &view.queue.tubes;
        while *budget > 0 {
            self.left = self.left.min(tubes.len());
            let Some(index) = self.left.checked_sub(1) else { return ScanStep::Done };
            let key = tubes.at(index);
            let tube = &tubes[key];
            // Since the last slice another tube may have taken this index.
            let mut cursor = match self.cursor.take().filter(|cursor| cursor.tube == key) {
                Some(cursor) => cursor,
                None => {
                    *budget = budget.saturating_sub(TUBE_COST);
                    if !is_wanted(&tube.name) {
                        self.left = index;
                        continue;
                    }
                    Cursor::at(key, tube, view.now)
                }
            };
            if cursor.advance(view, budget) {
                self.left = index;
                return ScanStep::Tube { index, key, stats: cursor.stats };
            }
            self.cursor = Some(cursor);
        }
        ScanStep::Unfinished
    }
}

impl Cursor {
    /// Returns a position before the first job and waiter of a tube.
    pub fn at(key: TubeKey, tube: &Tube, now: Nanos) -> Cursor {
        Cursor {
            tube: key,
            stats: TubeStats::of(tube, now),
            ready_left: tube.ready.heap().len(),
            waiters_left: tube.waiters.len(),
        }
    }

    /// Scans ready jobs and waiters, and subtracts their cost from `budget`. Returns whether the
    /// scan of the tube is complete.
    pub fn advance(&mut self, view: &View<'_>, budget: &mut usize) -> bool {
        let tube = &view.queue.tubes[self.tube];
        let ready_heap = tube.ready.heap();
        self.ready_left = self.ready_left.min(ready_heap.len());
        let ready = self.ready_left.min(budget.div_ceil(READY_COST));
        // The first job of a run is its oldest.
        let run = tube.ready.first_of_run().map(JobKey::from_number);
        let others = ready_heap.slice(self.ready_left - ready..self.ready_left);
        let created_at = |key| view.queue.jobs[key].created_at;
        if let Some(oldest) = others.map(|entry| entry.job).chain(run).map(created_at).min() {
            let age = view.now.since(oldest);
            self.stats.oldest_ready_age = self.stats.oldest_ready_age.max(age);
        }
        self.ready_left -= ready;
        *budget = budget.saturating_sub(ready * READY_COST);

        self.waiters_left = self.waiters_left.min(tube.waiters.len());
        let waiters = self.waiters_left.min(budget.div_ceil(WAITER_COST));
        let waiting = tube.waiters.slice(self.waiters_left - waiters..self.waiters_left);
        let waiting = waiting.filter(|&waiter| view.queue.is_waiting(waiter)).count();
        self.stats.waiting += waiting as u64;
        self.waiters_left -= waiters;
        *budget = budget.saturating_sub(waiters * WAITER_COST);
        self.ready_left == 0 && self.waiters_left == 0
    }
}

impl TubeStats {
    /// Returns the values that need no scan, without the name.
    fn of(tube: &Tube, now: Nanos) -> TubeStats {
        let pause = tube.pause.as_deref();
        TubeStats {
            name: String::new(),
            ready: tube.ready.len() as u64,
            reserved: tube.reserved.into(),
            delayed: tube.delayed_count() as u64,
            buried: tube.buried.len().into(),
            urgent: tube.urgent.into(),
            total_jobs: tube.total_jobs,
            deletes: tube.deletes,
            pauses: tube.pauses,
            buried_after_returns: tube.buried_after_returns,
            cold: tube.cold.into(),
            using: tube.using.into(),
            watching: tube.watching.into(),
            waiting: 0,
            pause: pause.map_or(Nanos::ZERO, |pause| Nanos::from_secs(pause.secs)),
            pause_left: pause.map_or(Nanos::ZERO, |pause| pause.until.since(now)),
            oldest_ready_age: Nanos::ZERO,
        }
    }

    /// Adds the counts of `other`, and keeps the longer of each duration.
    pub fn add(&mut self, other: TubeStats) {
        let TubeStats { ready, reserved, delayed, buried, urgent, .. } = other;
        let TubeStats { total_jobs, deletes, pauses, using, watching, waiting, .. } = other;
        let TubeStats {
            name: _,
            buried_after_returns,
            cold,
            pause,
            pause_left,
            oldest_ready_age,
            ..
        } = other;
        self.ready += ready;
        self.reserved += reserved;
        self.delayed += delayed;
        self.buried += buried;
        self.urgent += urgent;
        self.total_jobs += total_jobs;
        self.deletes += deletes;
        self.pauses += pauses;
        self.buried_after_returns += buried_after_returns;
        self.cold += cold;
        self.using += using;
        self.watching += watching;
        self.waiting += waiting;
        self.pause = self.pause.max(pause);
        self.pause_left = self.pause_left.max(pause_left);
        self.oldest_ready_age = self.oldest_ready_age.max(oldest_ready_age);
    }
}
