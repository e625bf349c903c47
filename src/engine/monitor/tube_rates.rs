//! Puts and deletes per second of each tube, from two samples that are about 5 s apart.
//!
//! A round samples all tubes, 128 in each iteration of the loop. Samples of at most 32,768 tubes are
//! kept, in 1.75 MiB. Other tubes have no rates.

use super::value::Rate;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{Key, TubeKey};
use crate::engine::queue::Queue;
use crate::engine::queue::tube::{Tube, Tubes};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// The rates of one tube.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TubeRates {
    pub puts: Rate,
    pub deletes: Rate,
}

/// The last sample of each tube.
#[derive(Debug, Default)]
pub struct RateSamples {
    /// By the numbers of the tubes' keys. All blocks have the same length and are never moved.
    blocks: Vec<Vec<RateSample>>,
    /// The number of tubes that are left in the round. The last one is sampled first, because it
    /// takes the place of a tube that is removed.
    left: usize,
}

#[derive(Clone, Copy, Debug)]
struct RateSample {
    at: Nanos,
    puts: u64,
    deletes: u64,
    /// A hash of the name: the key of a removed tube is given to a new one.
    name_hash: u32,
    /// `None` after the first sample of a tube.
    rates: Option<TubeRates>,
}

/// The sample of a key that no tube has had yet.
const NO_SAMPLE: RateSample =
    RateSample { at: Nanos::ZERO, puts: 0, deletes: 0, name_hash: 0, rates: None };

const BLOCK_LEN: usize = 256;
/// The maximum number of blocks, which limits the memory.
const MAX_BLOCKS: usize = 128;

impl RateSamples {
    /// Begins a round.
    pub fn begin_round(&mut self, tubes: &Tubes) {
        self.left = tubes.len();
    }

    /// Returns whether all tubes of the round were sampled.
    pub fn is_complete(&self) -> bool {
        self.left == 0
    }

    /// Samples the next tubes of the round. After an error the round has ended.
    pub fn sample_slice(&mut self, queue: &Queue, now: Nanos) -> Result<(), TryReserveError> {
        let tubes = &queue.tubes;
        let end = self.left.min(tubes.len());
        let start = end.saturating_sub(queue.limits.rates_per_iteration);
        self.left = 0;
        for index in start..end {
            let key = tubes.at(index);
            if let Some(sample) = self.sample_mut(key)? {
                sample.update(&tubes[key], now);
            }
        }
        self.left = start;
        Ok(())
    }

    /// Returns the rates of a tube, if it was sampled twice.
    pub fn get(&self, key: TubeKey, tube: &Tube) -> Option<TubeRates> {
        let (block, slot) = position(key);
        let sample = self.blocks.get(block)?.get(slot)?;
        sample.is_of(tube).then_some(sample.rates)?
    }

    /// Returns the sample of a tube, or `None` beyond the limit.
    fn sample_mut(&mut self, key: TubeKey) -> Result<Option<&mut RateSample>, TryReserveError> {
        let (block, slot) = position(key);
        if block >= MAX_BLOCKS {
            return Ok(None);
        }
        while self.blocks.len() <= block {
            let mut samples = Vec::new();
            headroom::leave(Headroom::Half, || {
                self.blocks.try_reserve(1)?;
                samples.try_reserve_exact(BLOCK_LEN)
            })?;
            samples.resize(BLOCK_LEN, NO_SAMPLE);
            self.blocks.push(samples);
        }
        Ok(Some(&mut self.blocks[block][slot]))
    }
}

impl RateSample {
    fn update(&mut self, tube: &Tube, now: Nanos) {
        let (puts, deletes) = (tube.total_jobs, tube.deletes);
        let span = now.since(self.at);
        let rates = self.is_of(tube).then(|| TubeRates {
            puts: Rate::of(puts - self.puts, span),
            deletes: Rate::of(deletes - self.deletes, span),
        });
        *self = RateSample { at: now, puts, deletes, name_hash: name_hash(tube), rates };
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

fn name_hash(tube: &Tube) -> u32 {
    crc32fast::hash(tube.name.as_bytes())
}

fn position(key: TubeKey) -> (usize, usize) {
    let number = key.number() as usize;
    (number / BLOCK_LEN, number % BLOCK_LEN)
}
