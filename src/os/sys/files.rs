//! Files: locks, disk space, modes, and the limit of open files.

use rustix::fs::{Advice, FallocateFlags, FlockOperation, Mode};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::process::{Resource, Rlimit};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZero;
use std::os::fd::{AsFd, AsRawFd};

/// Locks the whole file for as long as this process has it open. Returns `false` if another process
/// holds the lock. C beanstalkd takes the same lock, so the two exclude each other.
pub fn lock_file(file: &File) -> io::Result<bool> {
    match rustix::fs::fcntl_lock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::ACCESS | Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Allocates disk space for `len` bytes of a file from `offset` on, and extends the file if it is
/// shorter. Returns `false` if the file system does not support that.
pub fn allocate(file: &File, offset: u64, len: u64) -> io::Result<bool> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), offset, len) {
            Ok(()) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns how many bytes a user without privileges can still write to the file system of a file.
pub fn free_bytes(file: &File) -> io::Result<u64> {
    let system = rustix::fs::fstatvfs(file)?;
    Ok(system.f_bavail.saturating_mul(system.f_frsize))
}

/// Fills `bytes` from `offset` on if all of them are in the page cache. Returns whether it did. Any error
/// counts as bytes that are not there: the kernel, the file system or a sandbox may not support the call.
/// A read that waits for the disk returns real errors.
pub fn read_cached(file: &File, offset: u64, bytes: &mut [u8]) -> bool {
    let (len, part) = (bytes.len(), &mut [IoSliceMut::new(bytes)]);
    rustix::io::preadv2(file, part, offset, ReadWriteFlags::NOWAIT) == Ok(len)
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
    let _ = rustix::fs::fadvise(file, offset, NonZero::new(len), Advice::WillNeed);
}

/// Runs `make`, whose files have the permissions `mode` from the moment they are created. The umask belongs to the
/// process, and no other thread creates files meanwhile: that of etcd creates one before this server leads.
pub fn with_file_mode<T>(mode: u32, make: impl FnOnce() -> T) -> T {
    let before = rustix::process::umask(Mode::from_raw_mode(0o777 & !mode));
    let made = make();
    rustix::process::umask(before);
    made
}

/// Returns how many descriptors this process has open, if they have the lowest numbers.
pub fn open_descriptors() -> io::Result<usize> {
    let lowest_free = io::stderr().as_fd().try_clone_to_owned()?.as_raw_fd();
    usize::try_from(lowest_free).map_err(io::Error::other)
}

/// Raises the soft limit of open files to the hard limit, which only a sandbox forbids. Returns the limit.
pub fn raise_file_limit() -> usize {
    let limit = || rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit().maximum, maximum: limit().maximum };
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
    limit().current.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX)
}

/// Sets both limits of open files. That needs privileges, and the kernel has a maximum.
pub fn set_file_limit(files: u64) -> io::Result<()> {
    let limit = Rlimit { current: Some(files), maximum: Some(files) };
    Ok(rustix::process::setrlimit(Resource::Nofile, limit)?)
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
