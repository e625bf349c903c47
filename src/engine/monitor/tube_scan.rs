//! The values of tubes, and a scan of all tubes in slices that collects them, for the metrics page and the
//! status page.
//!
//! All jobs are scanned, because no structure has the oldest one of a tube: ten million take 0.15 s. A scan knows
//! nothing of the pages. A slice has a budget, so that it takes about 0.1 ms for any number of tubes and jobs. Tubes
//! and jobs are added and removed between two slices.

use super::http_conn::View;
use super::measurements::Rates;
use super::table::{Column, Value};
use crate::attention::TubeFacts;
use crate::engine::collections::slab::PagedSlab;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, TubeKey};
use crate::engine::queue::job::{Job, State};
use crate::engine::queue::outcomes::Outcomes;
use crate::engine::time::Nanos;

/// The values of a tube.
#[derive(Debug, Default)]
pub struct TubeStats {
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

/// Removes duplicates: a tube that was removed during the scan, and created again, may have been scanned twice. Sorts
/// the tubes by their names.
pub fn dedup(tubes: &mut Vec<TubeStats>) {
    tubes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    tubes.dedup_by(|a, b| a.name == b.name);
}

/// The oldest ready job of a tube. Older ones are less.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Oldest {
    created_at: Nanos,
    id: u64,
    delay_secs: u32,
}

/// A scan of all jobs, and then of all tubes, from the last to the first. When a tube is removed, the last one takes
/// its index: that one was scanned before.
#[derive(Default)]
pub struct TubeScan {
    /// The memory page of jobs to scan next.
    next_page: usize,
    /// Of each tube with a ready job. Without memory for it, a tube has none.
    oldest: Box<PagedSlab<TubeKey, Oldest>>,
    /// The tubes that were scanned. Without memory for it, a tube is scanned again if it moves to a lower index.
    scanned: Box<PagedSlab<TubeKey, ()>>,
    /// The number of tubes to scan, once all jobs were scanned.
    left: Option<usize>,
}

/// The costs of scanning one of each, in units of about 10 ns.
const WAITER_COST: usize = 16;
const TUBE_COST: usize = 64;

impl Oldest {
    /// Returns a job if it is ready.
    pub fn of(job: &Job) -> Option<Oldest> {
        let &Job { created_at, id, delay_secs, .. } = job;
        matches!(job.state, State::Ready(_)).then_some(Oldest { created_at, id, delay_secs })
    }
}

impl TubeScan {
    /// Scans jobs, or tubes until the budget of a slice is used up, and calls `found` with the index and the values of
    /// each tube. Returns whether all tubes were scanned.
    pub fn advance(&mut self, view: &View<'_>, mut found: impl FnMut(usize, TubeStats)) -> bool {
        let (tubes, TubeScan { next_page, oldest, scanned, left }) = (&view.queue.tubes, self);
        let Some(left) = left else {
            let is_done = view.queue.scan_jobs(next_page, |job| note_oldest(oldest, job));
            *left = is_done.then_some(tubes.len());
            return false;
        };
        let mut budget = view.queue.limits.work_per_page_slice;
        while budget > 0 {
            let Some(index) = tubes.len().min(*left).checked_sub(1) else { return true };
            *left = index;
            let key = tubes.at(index);
            if scanned.get(key).is_none() {
                let _ = headroom::keeping(Headroom::ThreeQuarters, || scanned.try_insert(key, ()));
                found(index, TubeStats::of(key, oldest.get(key).copied(), view));
            }
            budget = budget.saturating_sub(TUBE_COST + WAITER_COST * tubes[key].waiters.len());
        }
        false
    }
}

fn note_oldest(oldest: &mut PagedSlab<TubeKey, Oldest>, job: &Job) {
    let Some(ready) = Oldest::of(job) else { return };
    if let Some(oldest) = oldest.get_mut(job.tube) {
        *oldest = (*oldest).min(ready);
    } else {
        // Its page has a few thousand tubes. Without memory for it they have none.
        let _ = headroom::keeping(Headroom::ThreeQuarters, || oldest.try_insert(job.tube, ready));
    }
}

impl TubeStats {
    /// Returns the values of a tube.
    pub fn of(key: TubeKey, oldest: Option<Oldest>, view: &View<'_>) -> TubeStats {
        let tube = &view.queue.tubes[key];
        let id_of = |job: JobKey| view.queue.jobs[job].id;
        let mut stats = TubeStats {
            name: tube.name.to_string(),
            facts: TubeFacts {
                ready: tube.jobs.ready_count() as u64,
                held: tube.jobs.reserved.into(),
                buried: tube.jobs.buried.len().into(),
                first_buried: tube.first_buried().map(id_of),
                watching: tube.watching.into(),
                waiting: view.queue.count_waiting(key) as u64,
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
        // It may have been reserved since.
        if let Some(Oldest { created_at, id, delay_secs }) =
            oldest.filter(|_| stats.facts.ready > 0)
        {
            stats.oldest_ready = id;
            stats.oldest_ready_age = view.now.since(created_at);
            stats.facts.oldest = view.now.since(created_at + Nanos::from_secs(delay_secs));
        }
        stats.rates = view.measurements.add_recent(key, tube, &mut stats.facts);
        stats
    }

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
