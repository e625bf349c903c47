//! Clocks, and an alarm that counts the time in which the machine is suspended.

use super::check;
use crate::engine::time::{ClockOffset, Nanos};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

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
        Clock { ahead: nanos(time_of_day()).since(monotonic()) }
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
#[derive(Debug)]
pub struct Alarm {
    timer: OwnedFd,
    /// The time of [`monotonic`] at which it becomes readable.
    set_to: Nanos,
}

impl Alarm {
    /// Creates an alarm that is not set.
    pub fn new() -> io::Result<Alarm> {
        // SAFETY: plain numbers.
        let fd = unsafe {
            libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC)
        };
        check(fd)?;
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Alarm { timer: unsafe { OwnedFd::from_raw_fd(fd) }, set_to: Nanos::NEVER })
    }

    /// Sets the alarm to a time of [`monotonic`], unless it is already set to an earlier one: most
    /// calls need no system call.
    pub fn set(&mut self, moment: Nanos) {
        if moment >= self.set_to {
            return;
        }
        self.set_to = moment;
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let mut at = libc::itimerspec { it_interval: never, it_value: never };
        let (secs, nanos) = (moment.whole_secs(), moment.as_nanos() % 1_000_000_000);
        at.it_value.tv_sec = secs.try_into().unwrap_or(libc::time_t::MAX);
        at.it_value.tv_nsec = nanos.try_into().expect("nanoseconds of a second fit");
        // SAFETY: the descriptor is open, the first pointer is to a live value, and a null pointer
        // means that the old setting is not returned. If the call fails, the poll still has a timeout.
        unsafe {
            libc::timerfd_settime(
                self.timer.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const at,
                std::ptr::null_mut(),
            );
        }
    }

    /// The descriptor has become readable: the alarm is not set any more.
    pub fn on_readable(&mut self) {
        self.set_to = Nanos::NEVER;
    }
}

impl AsRawFd for Alarm {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

/// Returns the time since some moment before the start of the process. It includes the time in which
/// the machine was suspended, so that delays and TTRs go on meanwhile, as in C beanstalkd. `Instant`
/// does not, and its checks would make reading a command take a tenth longer.
pub fn monotonic() -> Nanos {
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the pointer is to a live value of the right type, for which zeros are valid.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_BOOTTIME, time.as_mut_ptr());
        time.assume_init()
    };
    const NOT_NEGATIVE: &str = "the monotonic clock is never negative";
    let secs = u64::try_from(time.tv_sec).expect(NOT_NEGATIVE);
    let nanos = u64::try_from(time.tv_nsec).expect(NOT_NEGATIVE);
    Nanos::from_nanos(secs * 1_000_000_000 + nanos)
}

/// Returns the time of day minus `now`, the time of a [`Clock`]: not zero if the system's clock was set.
pub fn offset(now: Nanos) -> ClockOffset {
    ClockOffset::between(now, nanos(time_of_day()))
}

/// Returns the time of day of the system, since 1970.
#[expect(clippy::disallowed_methods, reason = "the one place where clocks are read")]
pub fn time_of_day() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn nanos(span: Duration) -> Nanos {
    Nanos::from_nanos(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
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
