//! Files: locks, disk space, modes, and the limit of open files.

use super::check;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

/// Locks the whole file for as long as this process has it open. Returns `false` if another process
/// holds the lock. C beanstalkd takes the same lock, so the two exclude each other.
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

/// Allocates disk space for `len` bytes of a file from `offset` on, and extends the file if it is
/// shorter. Returns `false` if the file system does not support that.
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

/// Returns how many bytes a user without privileges can still write to the file system of a file.
pub fn free_bytes(file: &File) -> io::Result<u64> {
    let mut system = MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: the descriptor is open, and the pointer is to memory for a `statvfs`.
    check(unsafe { libc::fstatvfs(file.as_raw_fd(), system.as_mut_ptr()) })?;
    // SAFETY: the call has succeeded, and so has written all of it.
    let system = unsafe { system.assume_init() };
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Returns whether a directory could not be synced because its file system cannot do that.
pub fn is_unsyncable(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EINVAL)
}

/// Starts writing a part of a file to the disk, without waiting for the disk unless its request queue
/// is full. The next sync returns the errors.
pub fn begin_writing_out(file: &File, offset: u64, len: u64) {
    if let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) {
        // SAFETY: the descriptor is open; the rest are plain numbers.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), offset, len, libc::SYNC_FILE_RANGE_WRITE);
        }
    }
}

/// Fills `bytes` from `offset` on if all of them are in the page cache. Returns whether it did. Any error
/// counts as bytes that are not there: the kernel, the file system or a sandbox may not support the call.
/// A read that waits for the disk returns real errors.
pub fn read_cached(file: &File, offset: u64, bytes: &mut [u8]) -> bool {
    let Ok(offset) = libc::c_long::try_from(offset) else { return false };
    let part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: the descriptor is open, and the only part is a live slice, which the call writes. Not all C
    // libraries have a function for it. The upper half of the offset is 0, because it fits in a register.
    let read = unsafe {
        libc::syscall(
            libc::SYS_preadv2,
            file.as_raw_fd(),
            &raw const part,
            1_usize,
            offset,
            0_usize,
            libc::RWF_NOWAIT,
        )
    };
    usize::try_from(read) == Ok(bytes.len())
}

/// Gives the error of a read that the device has failed the kind [`io::ErrorKind::InvalidData`].
pub fn name_loss(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(libc::EIO) => io::Error::new(io::ErrorKind::InvalidData, error),
        _ => error,
    }
}

/// Starts to read a part of a file into the page cache.
pub fn begin_reading_in(file: &File, offset: u64, len: u64) {
    if let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) {
        // SAFETY: the descriptor is open; the rest are plain numbers.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, libc::POSIX_FADV_WILLNEED) };
    }
}

/// Runs `make`, whose files have the permissions `mode` from the moment they are created. The umask
/// belongs to the process, and no other thread could create files meanwhile: there is none.
pub fn with_file_mode<T>(mode: u32, make: impl FnOnce() -> T) -> T {
    const ALL: libc::mode_t = 0o777;
    // SAFETY: it cannot fail and touches no memory.
    let before = unsafe { libc::umask(ALL & !mode) };
    let made = make();
    // SAFETY: as above.
    unsafe { libc::umask(before) };
    made
}

/// Raises the soft limit of open files to the hard limit, and returns it.
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

/// Sets both limits of open files. That needs privileges, and the kernel has a maximum.
pub fn set_file_limit(files: u64) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    // SAFETY: the pointer is to a live `rlimit`.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
}

/// Opens descriptors 0 to 2 before Rust's runtime starts. The runtime opens closed ones too, but
/// aborts without a message if there is no `/dev/null`, as in an empty root.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_THE_RUNTIME: extern "C" fn() = open_standard_descriptors;

extern "C" fn open_standard_descriptors() {
    for fd in 0..=2 {
        // SAFETY: reading the flags is sound for every number, and both paths end with a zero byte. A
        // new descriptor gets the lowest free number, which is this one.
        unsafe {
            if libc::fcntl(fd, libc::F_GETFD) < 0
                && libc::open(c"/dev/null".as_ptr(), libc::O_RDWR) < 0
            {
                // Writing to a directory fails, and the runtime ignores that.
                libc::open(c"/".as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY);
            }
        }
    }
}
