//! Signals, read from a descriptor.

use super::check;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// The signals that stop the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// SIGTERM.
    Terminate,
    /// SIGINT.
    Interrupt,
}

/// The signals that the server handles.
const SIGNALS: [libc::c_int; 5] =
    [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGHUP];

/// The exit status of a tool that SIGINT has ended before it has changed anything.
const INTERRUPTED: libc::c_int = 1;

/// A descriptor that becomes readable when a signal has arrived.
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
            for number in SIGNALS {
                if number != libc::SIGINT || !is_ignored(number) {
                    libc::sigaddset(set.as_mut_ptr(), number);
                }
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

    /// Returns the number of the next signal that has arrived.
    pub fn next(&self) -> Option<libc::c_int> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        let len = rustix::io::read(&self.0, &mut info).ok()?;
        // The number of the signal is the first field.
        Some(libc::c_int::from_ne_bytes(*info[..len].first_chunk()?))
    }
}

/// Makes SIGINT end the process with exit code 1, until [`Signals::take`] blocks it.
pub fn exit_on_interrupt() {
    extern "C" fn exit(_: libc::c_int) {
        // SAFETY: `_exit` runs no code of the process, and may be called in a signal handler.
        unsafe { libc::_exit(INTERRUPTED) }
    }
    if !is_ignored(libc::SIGINT) {
        let handler = exit as extern "C" fn(libc::c_int);
        // SAFETY: the handler does nothing but end the process.
        unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
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

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
