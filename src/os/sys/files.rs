//! Files: locks, space on the disk, modes, and how many may be open.

use super::check;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Locks the whole file against other processes that do the same, for as long as this process
/// keeps it open; `false` when another one has it. As C beanstalkd does, so that the two keep
/// out of each other's way.
///
/// # Errors
/// The file cannot be locked.
#[expect(clippy::cast_possible_truncation, reason = "libc gives small constants a large type")]
pub fn lock_file(file: &File) -> io::Result<bool> {
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open, and the pointer is to a live `flock`.
    match check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const whole) }) {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            Some(libc::EACCES | libc::EAGAIN) => Ok(false),
            _ => Err(error),
        },
    }
}

/// Sets space aside for `len` bytes of a file from `offset` on, and lengthens the file so that
/// it has them; `false` when the file system has no means for that.
///
/// # Errors
/// There is no space, or the file cannot be written to.
pub fn allocate(file: &File, offset: u64, len: u64) -> io::Result<bool> {
    let too_large = |_| io::Error::from_raw_os_error(libc::EFBIG);
    let offset = libc::off_t::try_from(offset).map_err(too_large)?;
    let len = libc::off_t::try_from(len).map_err(too_large)?;
    loop {
        // SAFETY: the descriptor is open; the rest are plain numbers.
        match check(unsafe { libc::fallocate(file.as_raw_fd(), 0, offset, len) }) {
            Ok(()) => return Ok(true),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EOPNOTSUPP | libc::ENOSYS) => return Ok(false),
                _ => return Err(error),
            },
        }
    }
}

/// Lets the system begin to write that part of a file to the disk; it waits for none of it, but for
/// its turn if very much is on the way. Errors are told by the sync that follows.
pub fn begin_writing_out(file: &File, offset: u64, len: u64) {
    if let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) {
        // SAFETY: the descriptor is open; the rest are plain numbers.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE);
        }
    }
}

/// Lets `make` make files that nobody may do more with than `mode` says, from their first moment
/// on, and as much as that. The mask is the process's, so no other thread may make files then:
/// there is none.
pub fn with_file_mode<T>(mode: u32, make: impl FnOnce() -> T) -> T {
    const ALL: libc::mode_t = 0o777;
    // SAFETY: it cannot fail and touches no memory.
    let before = unsafe { libc::umask(ALL & !mode) };
    let made = make();
    // SAFETY: as above.
    unsafe { libc::umask(before) };
    made
}

/// Raises the soft limit of open files to the hard one; says what it is now.
///
/// # Errors
/// The kernel refuses.
pub fn raise_file_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a live `rlimit`.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    if limit.rlim_cur < limit.rlim_max {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the pointer is to a live `rlimit`.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    }
    Ok(limit.rlim_cur)
}

/// Lets this process open so many files, if the kernel allows it to anybody.
///
/// # Errors
/// Only a privileged process may, and never more than the kernel can hold.
pub fn set_file_limit(files: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    // SAFETY: the pointer is to a live `rlimit`.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
}

/// Rust's runtime wants descriptors 0 to 2 open, so that no file gets one of these numbers, and
/// ends the process without a word where one is closed and there is no `/dev/null`, as in an empty
/// root. So they are opened before it looks.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_THE_RUNTIME: extern "C" fn() = open_standard_descriptors;

extern "C" fn open_standard_descriptors() {
    for fd in 0..=2 {
        // SAFETY: asking is sound whatever the number, both paths are strings that end with a zero
        // byte, and whoever comes first gets the lowest number that is free, which is this one.
        unsafe {
            if libc::fcntl(fd, libc::F_GETFD) < 0
                && libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) < 0
            {
                // What is written there is refused, and nobody minds.
                libc::open(c"/".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY);
            }
        }
    }
}
