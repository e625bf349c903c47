//! How much of a scenario is played: one small round as a test, or rounds until a time is over.

use fastrand::Rng;
use std::time::{Duration, Instant};

/// How a scenario is to be played.
pub struct Run {
    /// Played for its time. Else it is one small round, in which nothing depends on the speed of the
    /// machine.
    pub is_whole: bool,
    pub seed: u64,
    pub lasts: Duration,
    started_at: Instant,
}

/// What was measured, in a line, or `None` if the scenario cannot be played here.
pub type Outcome = Option<String>;

impl Run {
    pub fn short() -> Run {
        Run { is_whole: false, seed: 1, lasts: Duration::ZERO, started_at: Instant::now() }
    }

    pub fn whole(seed: u64, lasts: Duration) -> Run {
        Run { is_whole: true, seed, lasts, started_at: Instant::now() }
    }

    /// Plays rounds until the time is over, at least one; returns how many.
    pub fn rounds(&self, mut round: impl FnMut(usize)) -> usize {
        let mut count = 0;
        while count == 0 || self.has_time() {
            round(count);
            count += 1;
        }
        count
    }

    pub fn has_time(&self) -> bool {
        self.started_at.elapsed() < self.lasts
    }

    /// Returns the number for this form.
    pub fn size(&self, short: usize, whole: usize) -> usize {
        if self.is_whole { whole } else { short }
    }

    pub fn random(&self) -> Rng {
        Rng::with_seed(self.seed)
    }
}
