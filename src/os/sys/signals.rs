//! Signals, read from a descriptor.

use super::check;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The meaning of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Stop the server.
    Stop(Stop),
    /// SIGUSR1: reject puts from now on.
    Drain,
    /// SIGUSR2: accept puts again.
    StopDraining,
    /// SIGHUP: reopen files, as some servers do.
    Reopen,
}

/// The signals that stop the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// SIGTERM.
    Terminate,
    /// SIGINT.
    Interrupt,
}

/// A descriptor that becomes readable when a signal has arrived.
#[derive(Debug)]
pub struct Signals(OwnedFd);

impl Signals {
    /// Blocks the signals that the server handles, so that they arrive at the descriptor. Rust's
    /// runtime ignores SIGPIPE before `main`. SIGINT stays ignored if it was, so that Ctrl-C does not
    /// stop a background job of a shell.
    pub fn take() -> io::Result<Signals> {
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: `sigemptyset` initialises the set before it is read. The numbers are those of real
        // signals, ignoring one runs no code, and -1 means a new descriptor.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM);
            for signal in [libc::SIGUSR1, libc::SIGUSR2, libc::SIGHUP] {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            if !is_ignored(libc::SIGINT) {
                libc::sigaddset(set.as_mut_ptr(), libc::SIGINT);
            }
            check(libc::sigprocmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut()))?;
            // A file that exceeds its size limit is then an error of the write.
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            libc::signalfd(-1, set.as_ptr(), libc::SFD_NONBLOCK | libc::SFD_CLOEXEC)
        };
        check(fd)?;
        // SAFETY: the descriptor was just made and has no other owner.
        Ok(Signals(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Returns a stop signal that has arrived, without consuming it.
    pub fn pending_stop(&self) -> Option<Stop> {
        let mut set = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the pointer is to a live value.
        if unsafe { libc::sigpending(set.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: the call has initialised the set, and the numbers are those of real signals.
        let is_pending = |signal| unsafe { libc::sigismember(set.as_ptr(), signal) == 1 };
        let signals = [(libc::SIGTERM, Stop::Terminate), (libc::SIGINT, Stop::Interrupt)];
        signals.into_iter().find(|&(signal, _)| is_pending(signal)).map(|(_, stop)| stop)
    }

    /// Returns the next signal that has arrived.
    pub fn next(&self) -> Option<Signal> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the pointer and the length are those of a live value, for which all bytes are valid.
        let (count, info) = unsafe {
            let count = libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size);
            (count, info.assume_init())
        };
        if usize::try_from(count) != Ok(size) {
            return None;
        }
        match libc::c_int::try_from(info.ssi_signo) {
            Ok(libc::SIGTERM) => Some(Signal::Stop(Stop::Terminate)),
            Ok(libc::SIGINT) => Some(Signal::Stop(Stop::Interrupt)),
            Ok(libc::SIGUSR1) => Some(Signal::Drain),
            Ok(libc::SIGUSR2) => Some(Signal::StopDraining),
            Ok(libc::SIGHUP) => Some(Signal::Reopen),
            _ => None,
        }
    }
}

fn is_ignored(signal: libc::c_int) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: a null pointer means no new action. The present one is written to a live value, for
    // which zeros are valid if the call fails.
    let action = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
