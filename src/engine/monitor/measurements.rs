//! What a server with `--metrics` measures while it runs: the durations of iterations, its counts of the last
//! ten minutes, and the rates of each tube.
//!
//! The server keeps them, so that the plots of the status page are complete when a browser opens it. All
//! have a fixed size: 121 samples of the server, taken every 5 s, and one sample of each of 32,768 tubes, in
//! 3 MiB. Other tubes have no rates.

use super::table::Rate;
use crate::attention::TubeFacts;
use crate::engine::collections::histogram::Histogram;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{Key, TubeKey};
use crate::engine::queue::outcomes::Outcomes;
use crate::engine::queue::tube::Tube;
use crate::engine::queue::{Queue, Totals};
use crate::engine::server::Observed;
use crate::engine::time::Nanos;
use std::collections::VecDeque;

/// The measurements that pages show in addition to the state of the server.
#[derive(Debug, Default)]
pub struct Measurements {
    /// The durations of loop iterations.
    pub iterations: Histogram,
    /// The samples of the server with their times, the oldest first.
    history: VecDeque<(Nanos, Totals)>,
    /// The time of the next one.
    sample_due: Nanos,
    /// The last sample of each tube, by the number of its key. The list grows without moving.
    tubes: Vec<TubeSample>,
    /// The number of tubes that are left in the round of samples. The last one is sampled first,
    /// because it takes the place of a tube that is removed.
    tubes_left: usize,
}

/// A point of the plots: counts at its time, and rates since the point before it.
#[derive(Clone, Copy)]
pub struct Point {
    pub age: Nanos,
    pub totals: Totals,
    pub rates: Rates,
}

/// The rates of puts and deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rates {
    pub puts: Rate,
    pub deletes: Rate,
}

/// The counts of a tube at one time.
#[derive(Clone, Debug, Default)]
struct TubeSample {
    at: Nanos,
    puts: u64,
    deletes: u64,
    /// A hash of the name: the key of a removed tube is given to a new one.
    name_hash: u32,
    /// `None` after the first sample of a tube.
    rates: Option<Rates>,
    /// The reservations that had ended, and those that had failed, at the last two times about 5 minutes apart.
    ends: [(u64, u64); 2],
    /// The second of these times.
    ends_at: Nanos,
}

/// The least time between two samples of the ends of reservations. Each is late by up to [`INTERVAL`], and two are
/// no longer than the ten minutes that are named.
const ENDS_INTERVAL: Nanos = Nanos::from_secs(295);

/// The time between two samples.
pub const INTERVAL: Nanos = Nanos::from_secs(5);
/// The number of samples: one more than intervals in ten minutes.
pub const SAMPLES: usize = 121;
/// The number of tubes that are sampled.
const TUBES: usize = 32_768;

impl Measurements {
    /// Returns when [`Measurements::update`] has something to do.
    pub fn next_due(&self) -> Nanos {
        if self.tubes_left == 0 { self.sample_due } else { Nanos::ZERO }
    }

    /// Takes the sample of the server if it is due, and samples the next tubes. Without memory there is
    /// no history, and tubes that cannot be sampled have no rates or keep their last ones.
    pub fn update(&mut self, server: &dyn Observed, now: Nanos) {
        let queue = &server.store().queue;
        if self.sample_due <= now {
            let _ = self.sample(queue, now);
            if self.tubes_left == 0 {
                self.tubes_left = queue.tubes.len();
            }
            self.sample_due = now + INTERVAL;
        }
        // After an error the round has ended.
        let end = std::mem::take(&mut self.tubes_left).min(queue.tubes.len());
        self.tubes_left = self.sample_tubes(queue, end, now).unwrap_or(0);
    }

    /// Adds a sample of the server, in place of the oldest one if there are [`SAMPLES`].
    fn sample(&mut self, queue: &Queue, now: Nanos) -> Result<(), NoMemory> {
        headroom::keeping(Headroom::Half, || {
            self.history.try_reserve_exact(SAMPLES - self.history.len())
        })?;
        if self.history.len() == SAMPLES {
            self.history.pop_front();
        }
        self.history.push_back((now, queue.totals));
        Ok(())
    }

    /// Samples the last of the first `end` tubes. Returns the number of those that are left.
    fn sample_tubes(&mut self, queue: &Queue, end: usize, now: Nanos) -> Result<usize, NoMemory> {
        let start = end.saturating_sub(queue.limits.rates_per_iteration);
        for key in (start..end).map(|index| queue.tubes.at(index)) {
            let number = key.number() as usize;
            if number >= TUBES {
                continue;
            }
            if number >= self.tubes.len() {
                // What is not written yet takes no memory.
                let missing = TUBES - self.tubes.len();
                headroom::keeping(Headroom::Half, || self.tubes.try_reserve_exact(missing))?;
                self.tubes.resize(number + 1, TubeSample::default());
            }
            self.tubes[number].update(&queue.tubes[key], now);
        }
        Ok(start)
    }

    /// Returns the points of the plots at `now`, the oldest first: one fewer than samples.
    pub fn points(&self, now: Nanos) -> impl Iterator<Item = Point> + '_ {
        let jobs = |all: &Totals| all.ready + all.reserved + all.delayed + all.buried;
        let pairs = self.history.iter().zip(self.history.iter().skip(1));
        pairs.map(move |((before_at, before), (at, sample))| {
            let puts = sample.total_jobs - before.total_jobs;
            // A job that was put and does not exist any more was deleted.
            let deletes = (jobs(before) + puts).saturating_sub(jobs(sample));
            let rates = Rates::of(puts, deletes, at.since(*before_at));
            Point { age: now.since(*at), totals: *sample, rates }
        })
    }

    /// Sets what happened to a tube in the last 5 to 10 minutes, or since its creation without a sample of that
    /// time. Returns its rates, if it was sampled twice.
    pub fn add_recent(&self, key: TubeKey, tube: &Tube, to: &mut TubeFacts) -> Option<Rates> {
        let sample = self.tubes.get(key.number() as usize).filter(|sample| sample.is_of(tube));
        let (ended, failed) = ends(tube);
        let (ended_before, failed_before) = sample.map_or((0, 0), |sample| sample.ends[0]);
        let rates = sample.and_then(|sample| sample.rates);
        let deletes_before = sample.map_or(0, |sample| sample.deletes);
        to.has_recent_delete = tube.deletes > deletes_before
            || rates.is_some_and(|rates| rates.deletes > Rate::default());
        // A tube that was removed and created again has fewer.
        to.reservations_ended = ended.saturating_sub(ended_before);
        to.reservations_failed = failed.saturating_sub(failed_before);
        rates
    }
}

impl Rates {
    fn of(puts: u64, deletes: u64, span: Nanos) -> Rates {
        Rates { puts: Rate::of(puts, span), deletes: Rate::of(deletes, span) }
    }
}

impl TubeSample {
    fn update(&mut self, tube: &Tube, now: Nanos) {
        let (puts, deletes, name_hash) = (tube.total_jobs, tube.deletes, name_hash(tube));
        let span = now.since(self.at);
        let is_second = self.is_of(tube);
        let rates = is_second.then(|| Rates::of(puts - self.puts, deletes - self.deletes, span));
        let (mut ends, mut ends_at) = (self.ends, self.ends_at);
        if !is_second {
            (ends, ends_at) = ([(0, 0); 2], now);
        } else if now.since(ends_at) >= ENDS_INTERVAL {
            (ends, ends_at) = ([ends[1], self::ends(tube)], now);
        }
        *self = TubeSample { at: now, puts, deletes, name_hash, rates, ends, ends_at };
    }

    /// Returns whether this is a sample of `tube`. Counts never fall, so a tube with lower ones was
    /// removed and created again.
    fn is_of(&self, tube: &Tube) -> bool {
        self.at > Nanos::ZERO
            && self.name_hash == name_hash(tube)
            && self.puts <= tube.total_jobs
            && self.deletes <= tube.deletes
    }
}

/// Returns the number of reservations that have ended, and of those that have failed.
fn ends(tube: &Tube) -> (u64, u64) {
    tube.outcomes.as_deref().map_or((0, 0), Outcomes::ends)
}

fn name_hash(tube: &Tube) -> u32 {
    crc32fast::hash(tube.name.as_bytes())
}
