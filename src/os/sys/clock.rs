//! Clocks, and an alarm that counts the time in which the machine is suspended.

use crate::engine::time::Nanos;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

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

    /// Converts a time of this clock to one of [`monotonic`].
    pub fn to_monotonic(self, moment: Nanos) -> Nanos {
        moment.since(self.ahead)
    }
}

/// A descriptor that becomes readable at a given time. It counts the time in which the machine is
/// suspended, unlike the timeout of a poll.
pub struct Alarm {
    timer: OwnedFd,
    /// The time of [`monotonic`] at which it becomes readable.
    set_to: Nanos,
}

impl Alarm {
    /// Creates an alarm that is not set.
    pub fn new() -> io::Result<Alarm> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Boottime, flags)?;
        Ok(Alarm { timer, set_to: Nanos::NEVER })
    }

    /// Sets the alarm to a time of [`monotonic`], unless it is already set to an earlier one: most
    /// calls need no system call. Returns whether it is set.
    pub fn set(&mut self, moment: Nanos) -> bool {
        if moment >= self.set_to {
            return true;
        }
        let at = Duration::from_nanos(moment.as_nanos());
        let at = Timespec::try_from(at).expect("2^64 ns are few seconds");
        let once = Itimerspec { it_interval: Timespec::default(), it_value: at };
        let is_set = timerfd_settime(&self.timer, TimerfdTimerFlags::ABSTIME, &once).is_ok();
        if is_set {
            self.set_to = moment;
        }
        is_set
    }

    /// The descriptor has become readable: the alarm is not set any more.
    pub fn on_readable(&mut self) {
        self.set_to = Nanos::NEVER;
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
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
