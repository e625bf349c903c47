//! Measurements that a server with `--metrics` takes while it runs, and when each is due.

use super::history::{History, INTERVAL};
use super::tube_rates::RateSamples;
use crate::engine::collections::histogram::Histogram;
use crate::engine::server::Server;
use crate::engine::time::Nanos;

/// The measurements that pages show in addition to the state of the server.
#[derive(Debug, Default)]
pub struct Measurements {
    /// The durations of loop iterations.
    pub iterations: Histogram,
    /// The counts of the last ten minutes.
    pub history: History,
    /// The puts and deletes per second of each tube.
    pub tube_rates: RateSamples,
    /// The time of the next sample of the server.
    sample_due: Nanos,
}

impl Measurements {
    /// Returns when [`Measurements::update`] has something to do.
    pub fn next_due(&self) -> Nanos {
        if self.tube_rates.is_complete() { self.sample_due } else { Nanos::ZERO }
    }

    /// Takes the sample of the server if it is due, and samples the next tubes. Without memory there is
    /// no history, and tubes that cannot be sampled have no rates or keep their last ones.
    pub fn update(&mut self, server: &Server, now: Nanos) {
        let queue = server.view(&self.iterations, now).queue;
        if self.sample_due <= now {
            let _ = self.history.sample(queue, now);
            if self.tube_rates.is_complete() {
                self.tube_rates.begin_round(&queue.tubes);
            }
            let next = self.sample_due + INTERVAL;
            // After a pause of the process the samples that were due then are skipped.
            self.sample_due = if next > now { next } else { now + INTERVAL };
        }
        if !self.tube_rates.is_complete() {
            let _ = self.tube_rates.sample_slice(queue, now);
        }
    }
}
