//! Sockets inherited from a service manager, and the readiness of a socket.

use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};

/// Returns the descriptors that a service manager has passed to this process, by the protocol of
/// sd_listen_fds(3). The caller calls it once, before the process opens any descriptor.
///
/// # Errors
/// `LISTEN_PID` is this process, but its descriptors do not match `LISTEN_FDS`. The message names the cause.
pub fn inherited_sockets() -> Result<Vec<OwnedFd>, String> {
    const FIRST: RawFd = 3;
    let pid = std::env::var("LISTEN_PID").ok().and_then(|pid| pid.parse().ok());
    let Some(count) = std::env::var_os("LISTEN_FDS").filter(|_| pid == Some(std::process::id()))
    else {
        return Ok(Vec::new());
    };
    let number = count.to_str().and_then(|count| count.parse().ok());
    let Some(number) = number.filter(|&number: &RawFd| number >= 0) else {
        return Err(format!(
            "cannot listen on inherited descriptors: LISTEN_FDS={}: not a number of descriptors",
            count.display()
        ));
    };
    let range = FIRST..FIRST.saturating_add(number);
    // All are checked before any is taken, so that an error closes none of them.
    if let Some(closed) = range.clone().find(|&fd| !set_close_on_exec(fd)) {
        return Err(format!("cannot listen on inherited descriptor {closed}: it is not open"));
    }
    // SAFETY: they are open, and LISTEN_PID shows that they were passed to this process. The caller
    // ensures that nothing else in the process owns a descriptor yet.
    Ok(range.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect())
}

/// Sets the flag that closes a descriptor in child processes. Returns `false` if it is not open.
fn set_close_on_exec(fd: RawFd) -> bool {
    // SAFETY: setting the only flag of a descriptor is sound for every number.
    unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) >= 0 }
}

/// Returns whether a socket has bytes to read, or a connection to accept.
pub fn is_readable(socket: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&socket, PollFlags::IN)];
    rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}
