//! Sockets inherited from a service manager, and whether a socket is readable.

use std::ffi::OsString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Why inherited descriptors cannot be used.
#[derive(Debug)]
pub enum InheritedError {
    /// `LISTEN_FDS` is this, which is not a number of descriptors.
    Count(OsString),
    /// This one is not open.
    NotOpen(RawFd),
}

/// The descriptors that a service manager handed to this process, by the protocol of
/// `sd_listen_fds(3)`. To be called once, before the process opens any descriptor.
///
/// # Errors
/// `LISTEN_PID` is this process, but the descriptors do not match `LISTEN_FDS`.
pub fn inherited_sockets() -> Result<Vec<OwnedFd>, InheritedError> {
    const FIRST: RawFd = 3;
    let pid = std::env::var("LISTEN_PID").ok().and_then(|pid| pid.parse().ok());
    let Some(count) = std::env::var_os("LISTEN_FDS").filter(|_| pid == Some(std::process::id()))
    else {
        return Ok(Vec::new());
    };
    let number = count.to_str().and_then(|count| count.parse().ok());
    let Some(number) = number.filter(|&number: &RawFd| number >= 0) else {
        return Err(InheritedError::Count(count));
    };
    let range = FIRST..FIRST.saturating_add(number);
    // All are looked at before any is taken: an error must not close what others gave.
    if let Some(closed) = range.clone().find(|&fd| !keep_to_ourselves(fd)) {
        return Err(InheritedError::NotOpen(closed));
    }
    // SAFETY: they are open, and who set LISTEN_PID to this process gave them to it; by the
    // contract of this function nothing else in the process owns a descriptor yet.
    Ok(range.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect())
}

/// Has the descriptor closed should this process ever run another; `false` if it is not
/// open.
fn keep_to_ourselves(fd: RawFd) -> bool {
    // SAFETY: asking for the flags of a descriptor is sound whatever the number.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    // SAFETY: as above; only a flag of the descriptor is set.
    flags >= 0 && unsafe { libc::fcntl(fd, libc::F_SETFD, flags | libc::FD_CLOEXEC) } >= 0
}

/// Returns whether there is something to read from a socket, or to accept.
pub fn is_readable(socket: &impl AsRawFd) -> bool {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one live `pollfd`, and the timeout is a plain number.
    unsafe { libc::poll(&raw mut poll, 1, 0) > 0 }
}
