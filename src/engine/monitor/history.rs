//! The counts of the last ten minutes, sampled every 5 s into a ring of fixed size.
//!
//! The server keeps them, so that the plots of the status page are complete when a browser opens it.

use super::value::Rate;
use crate::engine::headroom::{self, Headroom};
use crate::engine::queue::{Queue, Totals};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// The time between two samples.
pub const INTERVAL: Nanos = Nanos::from_secs(5);
/// The number of samples: one more than intervals in ten minutes.
pub const SAMPLES: usize = 121;

/// The counts of the queue at one time.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Nanos,
    ready: u64,
    reserved: u64,
    /// The number of jobs in all states.
    jobs: u64,
    /// The number of puts since the start.
    puts: u64,
}

/// A point of the plots: counts at its time, and rates since the point before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub age: Nanos,
    pub ready: u64,
    pub reserved: u64,
    pub puts: Rate,
    pub deletes: Rate,
}

/// The ring of samples.
#[derive(Debug, Default)]
pub struct History {
    /// At most [`SAMPLES`]. It is allocated once, with the first sample.
    samples: Vec<Sample>,
    /// The index of the oldest sample.
    oldest: usize,
}

impl History {
    /// Adds a sample, in place of the oldest one if the ring is full. It allocates only once.
    pub fn sample(&mut self, queue: &Queue, now: Nanos) -> Result<(), TryReserveError> {
        let sample = Sample::of(queue, now);
        if self.samples.len() == SAMPLES {
            self.samples[self.oldest] = sample;
            self.oldest = (self.oldest + 1) % SAMPLES;
            return Ok(());
        }
        if self.samples.capacity() == 0 {
            headroom::leave(Headroom::Half, || self.samples.try_reserve_exact(SAMPLES))?;
        }
        self.samples.push(sample);
        Ok(())
    }

    /// Returns the points of the plots at `now`, the oldest first: one fewer than samples.
    pub fn points(&self, now: Nanos) -> impl Iterator<Item = Point> + '_ {
        let (newer, older) = self.samples.split_at(self.oldest);
        let samples = older.iter().chain(newer);
        samples.clone().zip(samples.skip(1)).map(move |(before, sample)| {
            let span = sample.at.since(before.at);
            let puts = sample.puts - before.puts;
            // A job that was put and does not exist any more was deleted.
            let deletes = (before.jobs + puts).saturating_sub(sample.jobs);
            Point {
                age: now.since(sample.at),
                ready: sample.ready,
                reserved: sample.reserved,
                puts: Rate::of(puts, span),
                deletes: Rate::of(deletes, span),
            }
        })
    }
}

impl Sample {
    fn of(queue: &Queue, now: Nanos) -> Sample {
        let Totals { ready, reserved, delayed, buried, total_jobs: puts, .. } = queue.totals;
        let jobs = ready + reserved + delayed + buried;
        Sample { at: now, ready, reserved, jobs, puts }
    }
}
