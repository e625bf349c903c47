//! A histogram of durations with the bounds of a [`Scale`], as Prometheus expects it.
//!
//! It has a fixed size however many durations are counted, and counting one allocates nothing.

use crate::engine::time::Nanos;
use std::fmt::Debug;

/// Counts of durations by upper bound, and their sum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram<S: Scale = Fast> {
    /// Counts by bucket. The last bucket has the durations above all bounds.
    counts: S::Counts,
    sum_ns: u64,
}

/// The upper bounds of the buckets.
pub trait Scale {
    /// One more than bounds.
    type Counts: AsRef<[u64]> + AsMut<[u64]> + Clone + Debug + Default + PartialEq + Eq;

    /// In nanoseconds, and as text in seconds for Prometheus.
    const BOUNDS: &'static [(u64, &'static str)];
}

/// The bounds of the work of the server, from 10 us to 10 s.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fast;

impl Scale for Fast {
    type Counts = [u64; BOUNDS.len() + 1];

    const BOUNDS: &'static [(u64, &'static str)] = &BOUNDS;
}

const BOUNDS: [(u64, &str); 18] = [
    (10_000, "0.00001"),
    (25_000, "0.000025"),
    (50_000, "0.00005"),
    (100_000, "0.0001"),
    (250_000, "0.00025"),
    (500_000, "0.0005"),
    (1_000_000, "0.001"),
    (2_500_000, "0.0025"),
    (5_000_000, "0.005"),
    (10_000_000, "0.01"),
    (25_000_000, "0.025"),
    (50_000_000, "0.05"),
    (100_000_000, "0.1"),
    (250_000_000, "0.25"),
    (500_000_000, "0.5"),
    (1_000_000_000, "1"),
    (2_500_000_000, "2.5"),
    (10_000_000_000, "10"),
];

impl<S: Scale> Histogram<S> {
    /// Counts one duration.
    pub fn count(&mut self, span: Nanos) {
        let nanos = span.as_nanos();
        // Most durations are short, so that the first bounds are compared only.
        let bucket = S::BOUNDS.iter().take_while(|&&(bound, _)| nanos > bound).count();
        self.counts.as_mut()[bucket] += 1;
        self.sum_ns = self.sum_ns.saturating_add(nanos);
    }

    /// Returns each bound as text in seconds, with the number of durations up to it. The last bound
    /// is `+Inf`.
    pub fn cumulative(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let bounds = S::BOUNDS.iter().map(|&(_, text)| text).chain(["+Inf"]);
        bounds.zip(self.counts.as_ref()).scan(0, |sum, (bound, count)| {
            *sum += count;
            Some((bound, *sum))
        })
    }

    /// Adds the counts of another one.
    pub fn add(&mut self, other: &Histogram<S>) {
        let pairs = self.counts.as_mut().iter_mut().zip(other.counts.as_ref());
        pairs.for_each(|(sum, count)| *sum += count);
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }

    /// Returns the bound, as text in seconds, up to which at least this percentage of the durations is, or
    /// `None` if none was counted.
    pub fn percentile(&self, percent: u64) -> Option<&'static str> {
        let needed = self.total() * percent;
        let bound = self.cumulative().find(|&(_, count)| count * 100 >= needed);
        bound.filter(|_| needed > 0).map(|(bound, _)| bound)
    }

    /// Returns how many durations were counted.
    pub fn total(&self) -> u64 {
        self.cumulative().last().map_or(0, |(_, count)| count)
    }

    /// Returns the sum of all durations.
    pub fn sum(&self) -> Nanos {
        Nanos::from_nanos(self.sum_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_for_its_bound_and_all_above() {
        let mut histogram: Histogram = Histogram::default();
        for nanos in [0, 10_000, 10_001, 20_000_000_000] {
            histogram.count(Nanos::from_nanos(nanos));
        }
        let counts: Vec<(&str, u64)> = histogram.cumulative().collect();
        assert_eq!(counts[..2], [("0.00001", 2), ("0.000025", 3)]);
        assert_eq!(counts[BOUNDS.len() - 1..], [("10", 3), ("+Inf", 4)]);
        assert_eq!(histogram.sum(), Nanos::from_nanos(20_000_020_001));
        let percentiles = [50, 75, 76, 100].map(|percent| histogram.percentile(percent));
        assert_eq!(percentiles, [Some("0.00001"), Some("0.000025"), Some("+Inf"), Some("+Inf")]);
        assert_eq!(Histogram::<Fast>::default().percentile(50), None);
    }

    #[test]
    fn the_text_of_each_bound_equals_its_number() {
        for (nanos, text) in BOUNDS {
            let (whole, part) = text.split_once('.').unwrap_or((text, ""));
            let digits = format!("{whole}{part:0<9}");
            assert_eq!(digits.parse(), Ok(nanos), "{text}");
        }
        assert!(BOUNDS.is_sorted());
    }
}
