//! The values of tubes, and a scan of all tubes in slices that collects them, for the metrics page and the
//! status page.
//!
//! A scan knows nothing of the pages. A slice has a budget, so that it takes well below 0.1 ms for any
//! number of tubes and jobs. Tubes are added and removed between two slices.

use super::http_conn::View;
use super::measurements::Rates;
use super::table::{Column, Value};
use crate::attention::TubeFacts;
use crate::engine::keys::{JobKey, Key, TubeKey};
use crate::engine::queue::groups::MemberRank;
use crate::engine::queue::job::{self, Job};
use crate::engine::queue::outcomes::Outcomes;
use crate::engine::queue::tube::Tubes;
use crate::engine::time::Nanos;
use std::cmp::Ordering;
use std::ops::Range;

/// The values of a tube.
#[derive(Debug, Default)]
pub struct TubeStats {
    /// Set by the page that keeps the values.
    pub name: String,
    pub facts: TubeFacts,
    pub delayed: u64,
    pub urgent: u64,
    pub total_jobs: u64,
    pub deletes: u64,
    pub pauses: u64,
    pub buried_after_returns: u64,
    /// The number of jobs whose bodies are only in the binlog.
    pub cold: u64,
    pub using: u64,
    pub pause: Nanos,
    pub oldest_ready_age: Nanos,
    /// The id of the oldest ready job; 0 without one.
    pub oldest_ready: u64,
    /// `None` until the tube was sampled twice.
    pub rates: Option<Rates>,
    pub outcomes: Outcomes,
}

/// The columns of tubes: first those of the table of all tubes.
static COLUMNS: [Column<TubeStats>; 20] = [
    ("ready", "ready", |tube| Value::Count(tube.facts.ready)),
    ("reserved", "held", |tube| Value::Count(tube.facts.held)),
    ("delayed", "delayed", |tube| Value::Count(tube.delayed)),
    ("buried", "buried", |tube| Value::Count(tube.facts.buried)),
    OLDEST,
    ("watching", "workers", |tube| Value::Count(tube.facts.watching)),
    ("puts_per_second", "in/s", |tube| Value::Rate(tube.rates.map(|rates| rates.puts))),
    ("deletes_per_second", "out/s", |tube| Value::Rate(tube.rates.map(|rates| rates.deletes))),
    ("recent_failures", "failed", |tube| Value::Count(tube.facts.reservations_failed)),
    ("recent_ends", "ended", |tube| Value::Count(tube.facts.reservations_ended)),
    ("urgent", "urgent", |tube| Value::Count(tube.urgent)),
    ("waiting", "idle workers", |tube| Value::Count(tube.facts.waiting)),
    ("using", "using", |tube| Value::Count(tube.using)),
    ("pause_left_seconds", "paused", |tube| Value::Span(tube.facts.pause_left)),
    ("oldest_ready_seconds", "oldest age", |tube| Value::Span(tube.oldest_ready_age)),
    ("oldest_ready_id", "oldest job", |tube| Value::Id(tube.oldest_ready)),
    ("puts", "puts", |tube| Value::Count(tube.total_jobs)),
    ("deletes", "deletes", |tube| Value::Count(tube.deletes)),
    ("pauses", "pauses", |tube| Value::Count(tube.pauses)),
    ("cold", "cold", |tube| Value::Count(tube.cold)),
];

/// The time since the put of the oldest ready job, without its delay.
pub const OLDEST: Column<TubeStats> =
    ("oldest_wait_seconds", "oldest", |tube| Value::Span(tube.facts.oldest));

/// The number of columns in the table of all tubes.
pub const IN_TABLE: usize = 9;

/// Returns the columns of a tube. Without a body cache no job is cold.
pub fn columns(view: &View<'_>) -> &'static [Column<TubeStats>] {
    let has_cache = view.queue.settings.body_cache_bytes.is_some();
    &COLUMNS[..COLUMNS.len() - usize::from(!has_cache)]
}

/// Sorts tubes. Sorting is compiled once for all orders.
pub fn sort(tubes: &mut [TubeStats], order: &dyn Fn(&TubeStats, &TubeStats) -> Ordering) {
    tubes.sort_unstable_by(order);
}

/// Removes duplicates: a tube that moved to a lower index during the scan was scanned twice. Sorts the tubes
/// by their names.
pub fn dedup(tubes: &mut Vec<TubeStats>) {
    sort(tubes, &|a, b| a.name.cmp(&b.name));
    tubes.dedup_by(|a, b| a.name == b.name);
}

/// A scan of all tubes, from the last to the first. When a tube is removed, the last one takes its
/// index: that one was scanned before.
pub struct TubeScan {
    /// The number of tubes to scan.
    left: usize,
    /// The position in the last of these tubes.
    cursor: Option<Box<Cursor>>,
}

/// A position in the scan of one tube.
pub struct Cursor {
    pub tube: TubeKey,
    pub stats: TubeStats,
    /// The number of ready jobs out of order to scan, from the last index to the first. When the first entry is
    /// removed, the last one moves forward: that one was scanned before.
    ready_left: usize,
    /// The number of waiters to scan, in the same order.
    waiters_left: usize,
    /// The next ready job to scan for which the heap had no memory.
    next_in_tree: Option<job::Rank>,
    /// The next ready job of a group to scan, if some are not among the others.
    next_of_group: Option<MemberRank>,
}

/// The costs of scanning one of each, in units of about 10 ns. The jobs of groups are in a tree too.
const READY_COST: usize = 4;
const TREE_COST: usize = 32;
const WAITER_COST: usize = 16;
const TUBE_COST: usize = 64;

impl TubeScan {
    /// Begins a scan.
    pub fn new(tubes: &Tubes) -> TubeScan {
        TubeScan { left: tubes.len(), cursor: None }
    }

    /// Scans tubes until the budget of a slice is used up, and calls `found` with the index, the key and
    /// the values of each tube. Returns whether all tubes were scanned.
    pub fn advance(
        &mut self,
        view: &View<'_>,
        mut found: impl FnMut(usize, TubeKey, TubeStats),
    ) -> bool {
        let tubes = &view.queue.tubes;
        let mut budget = view.queue.limits.jobs_per_page_slice;
        while budget > 0 {
            self.left = self.left.min(tubes.len());
            let Some(index) = self.left.checked_sub(1) else { return true };
            let key = tubes.at(index);
            // Since the last slice another tube may have taken this index.
            let mut cursor = match self.cursor.take().filter(|cursor| cursor.tube == key) {
                Some(cursor) => *cursor,
                None => {
                    budget = budget.saturating_sub(TUBE_COST);
                    Cursor::at(key, view)
                }
            };
            if cursor.advance(view, &mut budget) {
                self.left = index;
                found(index, key, cursor.stats);
            } else {
                self.cursor = Some(Box::new(cursor));
            }
        }
        false
    }
}

impl Cursor {
    /// Returns a position before the first job and waiter of a tube.
    pub fn at(key: TubeKey, view: &View<'_>) -> Cursor {
        let (tube, jobs) = (&view.queue.tubes[key], &view.queue.jobs);
        let first_buried = tube.jobs.buried.iter(jobs).next().map(JobKey::from_number);
        let mut stats = TubeStats {
            facts: TubeFacts {
                ready: tube.jobs.ready_count() as u64,
                held: tube.jobs.reserved.into(),
                buried: tube.jobs.buried.len().into(),
                first_buried: first_buried.map(|first| jobs[first].id),
                watching: tube.watching.into(),
                ..TubeFacts::default()
            },
            delayed: tube.jobs.delayed.len() as u64,
            urgent: tube.jobs.urgent.into(),
            total_jobs: tube.total_jobs,
            deletes: tube.deletes,
            pauses: tube.pauses,
            buried_after_returns: tube.buried_after_returns,
            cold: tube.cold.into(),
            using: tube.using.into(),
            outcomes: tube.outcomes.as_deref().cloned().unwrap_or_default(),
            ..TubeStats::default()
        };
        if let Some(pause) = &tube.pause {
            stats.pause = Nanos::from_secs(pause.secs);
            stats.facts.pause_left = pause.until.since(view.now);
        }
        stats.rates = view.measurements.add_recent(key, tube, &mut stats.facts);
        let (ready_left, waiters_left) = (tube.jobs.ready.heap.len(), tube.waiters.len());
        let next_of_group = (tube.jobs.behind > 0).then(|| MemberRank::first(key, tube.epoch));
        let next_in_tree = (tube.jobs.ready.tree.len() > 0).then_some((0, 0));
        Cursor { tube: key, stats, ready_left, waiters_left, next_in_tree, next_of_group }
    }

    /// Scans ready jobs and waiters, and subtracts their cost from `budget`. Returns whether the
    /// scan of the tube is complete.
    pub fn advance(&mut self, view: &View<'_>, budget: &mut usize) -> bool {
        let tube = &view.queue.tubes[self.tube];
        let ready_heap = &tube.jobs.ready.heap;
        let part = next_part(&mut self.ready_left, ready_heap.len(), READY_COST, budget);
        // The first job of a run is its oldest.
        let run = tube.jobs.ready.first_of_run();
        let scanned = ready_heap[part].iter().map(|entry| entry.job).chain(run);
        let rank = |key| view.queue.jobs[JobKey::from_number(key)].rank();
        let mut in_tree = self.next_in_tree.take().into_iter().flat_map(|from| {
            tube.jobs.ready.tree.iter_from(&view.queue.jobs, move |key| rank(key) < from)
        });
        let (most, mut of_tree, mut of_group) = (budget.div_ceil(TREE_COST), 0, 0);
        let next_ones = in_tree.by_ref().take(most).inspect(|_| of_tree += 1);
        let scanned = scanned.chain(next_ones.map(JobKey::from_number));
        let groups = &view.queue.unique.groups;
        let from = self.next_of_group.take();
        let mut of_groups = from.into_iter().flat_map(|place| groups.ready_from(place));
        let next_ones = of_groups.by_ref().take(most).inspect(|_| of_group += 1);
        let scanned = scanned.chain(next_ones.map(|member| member.job));
        let oldest = scanned.map(|key| &view.queue.jobs[key]).min_by_key(|job| job.created_at);
        if let Some(&Job { id, created_at, delay_secs, .. }) = oldest {
            let age = view.now.since(created_at);
            let stats = &mut self.stats;
            if age >= stats.oldest_ready_age {
                (stats.oldest_ready, stats.oldest_ready_age) = (id, age);
                stats.facts.oldest = view.now.since(created_at + Nanos::from_secs(delay_secs));
            }
        }
        self.next_in_tree = in_tree.next().map(rank);
        self.next_of_group = of_groups.next().map(|member| member.rank);
        *budget = budget.saturating_sub((of_tree + of_group) * TREE_COST);
        let part = next_part(&mut self.waiters_left, tube.waiters.len(), WAITER_COST, budget);
        let waiting = tube.waiters[part].iter().filter(|&&waiter| view.queue.is_waiting(waiter));
        self.stats.facts.waiting += waiting.count() as u64;
        let are_left = self.next_in_tree.is_some() || self.next_of_group.is_some();
        self.ready_left == 0 && self.waiters_left == 0 && !are_left
    }
}

/// Returns the next indices to scan of a list with `len` entries of which `left` are not scanned yet, and
/// subtracts their cost from `budget`.
fn next_part(left: &mut usize, len: usize, cost: usize, budget: &mut usize) -> Range<usize> {
    let end = len.min(*left);
    *left = end - end.min(budget.div_ceil(cost));
    *budget = budget.saturating_sub((end - *left) * cost);
    *left..end
}

impl TubeStats {
    /// Adds the counts of `other`, and keeps the longer of each duration.
    pub fn add(&mut self, other: &TubeStats) {
        let (facts, others) = (&mut self.facts, &other.facts);
        facts.ready += others.ready;
        facts.held += others.held;
        facts.buried += others.buried;
        facts.watching += others.watching;
        facts.waiting += others.waiting;
        facts.pause_left = facts.pause_left.max(others.pause_left);
        self.delayed += other.delayed;
        self.urgent += other.urgent;
        self.total_jobs += other.total_jobs;
        self.deletes += other.deletes;
        self.pauses += other.pauses;
        self.buried_after_returns += other.buried_after_returns;
        self.cold += other.cold;
        self.using += other.using;
        self.pause = self.pause.max(other.pause);
        self.oldest_ready_age = self.oldest_ready_age.max(other.oldest_ready_age);
        self.outcomes.add(&other.outcomes);
    }
}
