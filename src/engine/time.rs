//! Times and durations in nanoseconds. The engine reads no clock: each time is a parameter.
//!
//! The caller of the engine chooses the zero. With a binlog it must be the Unix epoch, since the
//! binlog stores wall-clock times. The event loop counts from the epoch on a clock that never
//! jumps.

use std::ops::Add;

const NANOS_PER_SEC: u64 = 1_000_000_000;

/// A time, in nanoseconds since the zero of the caller, or a duration in nanoseconds. Sums
/// saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(u64);

impl Nanos {
    /// The zero time, and the duration zero.
    pub const ZERO: Nanos = Nanos(0);

    /// The latest time, which is never reached.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// One nanosecond.
    pub const ONE: Nanos = Nanos(1);

    /// Returns a time or duration of `nanos` nanoseconds.
    pub const fn from_nanos(nanos: u64) -> Nanos {
        Nanos(nanos)
    }

    /// Returns a duration of `millis` milliseconds.
    pub const fn from_millis(millis: u64) -> Nanos {
        Nanos(millis.saturating_mul(1_000_000))
    }

    /// Returns a duration of `secs` seconds.
    pub const fn from_secs(secs: u32) -> Nanos {
        Nanos(secs as u64 * NANOS_PER_SEC)
    }

    /// Returns the number of nanoseconds.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the number of seconds, rounded down.
    pub const fn whole_secs(self) -> u64 {
        self.0 / NANOS_PER_SEC
    }

    /// Returns the duration from `earlier` to this time, or zero if `earlier` is later.
    pub const fn since(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time that is `span` earlier, or the zero time.
    pub const fn before(self, span: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(span.0))
    }

    /// Returns this time of the engine as a wall-clock time since 1970.
    pub const fn to_wall_clock(self, offset: ClockOffset) -> Nanos {
        Nanos(self.0.saturating_add_signed(offset.0))
    }
}

/// The difference of the wall clock and the engine's time, in nanoseconds. It changes when the wall
/// clock is set: the engine's time never jumps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockOffset(i64);

impl ClockOffset {
    /// Returns the offset of `time_of_day`, since 1970, from `now`. The two clocks are read one
    /// after the other, so a difference below 10 ms counts as none.
    pub fn between(now: Nanos, time_of_day: Nanos) -> ClockOffset {
        const MIN_OFFSET_NS: u64 = 10_000_000;
        if now.0.abs_diff(time_of_day.0) < MIN_OFFSET_NS {
            return ClockOffset(0);
        }
        let offset = i128::from(time_of_day.0) - i128::from(now.0);
        ClockOffset(i64::try_from(offset).unwrap_or(0))
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
        assert_eq!(Nanos::from_secs(15).since(now).whole_secs(), 9);
        assert_eq!(Nanos::from_secs(5).since(now).whole_secs(), 0);
    }

    #[test]
    fn sums_saturate() {
        let never = Nanos::from_nanos(u64::MAX);
        assert_eq!(never + Nanos::from_secs(u32::MAX), never);
        assert_eq!(Nanos::from_secs(u32::MAX).whole_secs(), u64::from(u32::MAX));
    }
}
