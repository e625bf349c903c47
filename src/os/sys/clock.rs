//! Clocks, and an alarm that goes on while the machine is suspended.

use super::check;
use crate::engine::time::{ClockOffset, Nanos};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A clock that shows the time of day as it was at the start plus what has passed since:
/// moments compare across restarts, and setting the system's clock moves nothing.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// How far the time of day was ahead of [`monotonic`] at the start.
    ahead: Nanos,
}

impl Clock {
    /// Starts the clock.
    pub fn start() -> Clock {
        Clock { ahead: nanos(time_of_day()).since(monotonic()) }
    }

    /// The present moment; never before an earlier one.
    pub fn now(&self) -> Nanos {
        self.ahead + monotonic()
    }

    /// What [`monotonic`] shows at a moment of this clock.
    pub fn to_monotonic(self, moment: Nanos) -> Nanos {
        moment.since(self.ahead)
    }
}

/// A descriptor that becomes readable at a moment. The timeout of a poll stands still while the
/// machine is suspended; this does not.
#[derive(Debug)]
pub struct Alarm {
    timer: OwnedFd,
    /// The moment, as [`monotonic`] shows it.
    set_to: Nanos,
}

impl Alarm {
    /// An alarm that is not set.
    ///
    /// # Errors
    /// The kernel gives no timer.
    pub fn new() -> io::Result<Alarm> {
        // SAFETY: plain numbers.
        let fd = unsafe {
            libc::timerfd_create(libc::CLOCK_BOOTTIME, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC)
        };
        check(fd)?;
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Alarm { timer: unsafe { OwnedFd::from_raw_fd(fd) }, set_to: Nanos::NEVER })
    }

    /// Sets it to a moment of [`monotonic`], unless it goes off before that anyway: most calls
    /// need no system call.
    pub fn set(&mut self, moment: Nanos) {
        if moment >= self.set_to {
            return;
        }
        self.set_to = moment;
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let mut at = libc::itimerspec { it_interval: never, it_value: never };
        let (secs, nanos) = (moment.whole_secs(), moment.as_nanos() % 1_000_000_000);
        at.it_value.tv_sec = secs.try_into().unwrap_or(libc::time_t::MAX);
        at.it_value.tv_nsec = nanos.try_into().expect("it is less than a second");
        // SAFETY: the descriptor is open, and the pointer is to a live value; the old setting is
        // not asked for. If it fails, the timeout of the poll is what remains.
        unsafe {
            libc::timerfd_settime(
                self.timer.as_raw_fd(),
                libc::TFD_TIMER_ABSTIME,
                &raw const at,
                std::ptr::null_mut(),
            );
        }
    }

    /// It has gone off.
    pub fn went_off(&mut self) {
        self.set_to = Nanos::NEVER;
    }
}

impl AsRawFd for Alarm {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

/// What has passed since some moment before the start of the process, with the time in which the
/// machine was suspended: delays and times to run go on meanwhile, as in C. `Instant` has it too, but
/// tells it with so many checks that reading a command would take a tenth longer.
pub fn monotonic() -> Nanos {
    let mut time = MaybeUninit::<libc::timespec>::zeroed();
    // SAFETY: the pointer is to a live value of the right type, for which zeros are valid.
    let time = unsafe {
        libc::clock_gettime(libc::CLOCK_BOOTTIME, time.as_mut_ptr());
        time.assume_init()
    };
    const BEFORE_THE_START: &str = "the monotonic clock is never negative";
    let secs = u64::try_from(time.tv_sec).expect(BEFORE_THE_START);
    let nanos = u64::try_from(time.tv_nsec).expect(BEFORE_THE_START);
    Nanos::from_nanos(secs * 1_000_000_000 + nanos)
}

/// How far the time of day is ahead of a [`Clock`] that shows `now`, because the system's clock was
/// set.
pub fn clock_offset(now: Nanos) -> ClockOffset {
    ClockOffset::between(now, nanos(time_of_day()))
}

/// The time of day as the system has it, since 1970.
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
