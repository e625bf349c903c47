//! Clocks.

use crate::engine::time::Nanos;
use std::mem::MaybeUninit;

/// A clock that shows the time of day at the start plus the time that has passed since. Its times
/// compare across restarts, and setting the system's clock does not change it.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// The time of day minus [`monotonic`], at the start.
    ahead: Nanos,
}

impl Clock {
    /// Starts the clock.
    pub fn start() -> Clock {
        Clock { ahead: time_of_day().since(monotonic()) }
    }

    /// Returns the current time, which never decreases.
    pub fn now(&self) -> Nanos {
        self.ahead + monotonic()
    }
}

/// Returns the time since some moment before the start of the process. It includes the time in which
/// the machine was suspended, so that delays and TTRs go on meanwhile, as in C beanstalkd. `Instant`
/// does not, and its checks would make reading a command take a tenth longer.
pub fn monotonic() -> Nanos {
    // It counts from the start of the machine.
    Nanos::from_nanos(read_ns(libc::CLOCK_BOOTTIME).cast_unsigned())
}

/// Returns the time of day of the system, since 1970.
pub fn time_of_day() -> Nanos {
    // One that was set to a moment before 1970 is negative.
    Nanos::from_nanos(read_ns(libc::CLOCK_REALTIME).max(0).cast_unsigned())
}

fn read_ns(clock: libc::clockid_t) -> i64 {
    // Not by rustix: under valgrind, which counts the instructions of the benchmark, its reader of the vDSO
    // crashes.
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the pointer is to a live value of the right type, for which zeros are valid.
    let time = unsafe {
        libc::clock_gettime(clock, time.as_mut_ptr());
        time.assume_init()
    };
    #[expect(clippy::useless_conversion, reason = "on some machines they have 32 bits")]
    let (secs, nanos) = (i64::from(time.tv_sec), i64::from(time.tv_nsec));
    secs * 1_000_000_000 + nanos
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_never_go_back() {
        let clock = Clock::start();
        assert!(clock.now() <= clock.now());
    }
}
