//! Time as numbers: nanoseconds, and nothing that could read a clock.
//!
//! Every moment in the engine comes in as a parameter. Who calls the engine decides what
//! the zero is; the real loop counts from the Unix epoch on a clock that never jumps, and so must
//! whoever wants a binlog; other tests count from wherever they like.

use std::ops::Add;

const NANOS_PER_SEC: u64 = 1_000_000_000;

/// Nanoseconds: a moment, counted from the zero of whoever drives the engine, or a span
/// between two moments. Sums saturate, so the latest moment stands for "never".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(u64);

impl Nanos {
    /// The zero moment and the empty span.
    pub const ZERO: Nanos = Nanos(0);

    /// The latest moment: it does not come.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// The smallest span there is.
    pub const ONE: Nanos = Nanos(1);

    /// A span or moment of `nanos` nanoseconds.
    pub const fn from_nanos(nanos: u64) -> Nanos {
        Nanos(nanos)
    }

    /// A span of `millis` milliseconds.
    pub const fn from_millis(millis: u64) -> Nanos {
        Nanos(millis.saturating_mul(1_000_000))
    }

    /// A span of `secs` seconds. Every `u32` of seconds fits.
    pub const fn from_secs(secs: u32) -> Nanos {
        Nanos(secs as u64 * NANOS_PER_SEC)
    }

    /// The count of nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Whole seconds in this span, rounded down.
    pub const fn whole_secs(self) -> u64 {
        self.0 / NANOS_PER_SEC
    }

    /// The span from `earlier` until this moment; empty when `earlier` is not earlier.
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }

    /// The moment that lies `span` before this one, or the zero moment.
    pub const fn before(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(span.0))
    }

    /// Whole seconds from `now` until this moment, rounded down and never negative.
    pub const fn secs_left(self, now: Nanos) -> u64 {
        self.since(now).whole_secs()
    }
}

/// How far the time of day is ahead of the engine's time, which never jumps, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffset(i64);

impl ClockOffset {
    /// That of a moment of the engine and the time of day, since 1970, at that moment. The two
    /// are read one after the other, so a little is nothing.
    pub fn between(now: Nanos, time_of_day: Nanos) -> ClockOffset {
        const LITTLE_NS: u64 = 10_000_000;
        if now.0.abs_diff(time_of_day.0) < LITTLE_NS {
            return ClockOffset(0);
        }
        let span = i128::from(time_of_day.0) - i128::from(now.0);
        ClockOffset(i64::try_from(span).unwrap_or(0))
    }
}

impl Nanos {
    /// A moment of the engine as the time of day.
    pub const fn to_wall_clock(self, drift: ClockOffset) -> Nanos {
        Nanos(self.0.saturating_add_signed(drift.0))
    }
}

impl Add for Nanos {
    type Output = Nanos;

    fn add(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(span.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_left_are_rounded_down_and_never_negative() {
        let now = Nanos::from_millis(5_001);
        assert_eq!(Nanos::from_secs(15).secs_left(now), 9);
        assert_eq!(Nanos::from_secs(5).secs_left(now), 0);
    }

    #[test]
    fn sums_saturate() {
        let never = Nanos::from_nanos(u64::MAX);
        assert_eq!(never + Nanos::from_secs(u32::MAX), never);
        assert_eq!(Nanos::from_secs(u32::MAX).whole_secs(), u64::from(u32::MAX));
    }
}
