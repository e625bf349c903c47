//! The user of the process and of its files.

use super::check;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// A user and a group to become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    uid: libc::uid_t,
    gid: libc::gid_t,
}

impl Identity {
    /// Returns the identity with these numbers. The kernel reads the largest number as "unchanged",
    /// so no user and no group has it.
    pub fn new(uid: u32, gid: u32) -> Option<Identity> {
        (uid != u32::MAX && gid != u32::MAX).then_some(Identity { uid, gid })
    }
}

/// Returns the user with this name in the user database of the C library, with its first group.
pub fn find_by_name(name: &str) -> io::Result<Option<Identity>> {
    const LARGEST_ENTRY: usize = 1024 * 1024;
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut entry = MaybeUninit::<libc::passwd>::zeroed();
    let mut strings = vec![0; 4096];
    loop {
        let mut found = std::ptr::null_mut();
        // SAFETY: all pointers are to live values, and the length is that of the buffer.
        let error = unsafe {
            let buffer = (strings.as_mut_ptr(), strings.len());
            libc::getpwnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer.0, buffer.1, &raw mut found)
        };
        match error {
            libc::ERANGE if strings.len() < LARGEST_ENTRY => strings.resize(strings.len() * 4, 0),
            0 if found.is_null() => return Ok(None),
            // Some C libraries return these for a missing name or a missing database.
            libc::ENOENT | libc::ESRCH => return Ok(None),
            0 => {
                // SAFETY: the call has succeeded and `found` points to `entry`.
                let entry = unsafe { entry.assume_init() };
                return Ok(Identity::new(entry.pw_uid, entry.pw_gid));
            }
            error => return Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// Becomes another user for good: supplementary groups, group and user, in this order, since
/// the last step gives up the right to the first two. What privileges a process can have beside
/// its user go as well: unless that is root, whose they are, it keeps no capabilities, however it
/// came by them, and no program that it might run could have more rights than itself.
///
/// `false` when there are supplementary groups that may not be dropped: the process had the group
/// already and has no right to change it, so whoever started it wants them.
///
/// # Errors
/// The kernel refuses.
pub fn become_user(identity: Identity) -> io::Result<bool> {
    let Identity { uid, gid } = identity;
    // SAFETY: plain numbers; the list of groups has exactly one entry.
    let regrouped = check(unsafe { libc::setgroups(1, &raw const gid) });
    let has_no_others = match regrouped {
        Ok(()) => true,
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
            supplementary_groups()?.iter().all(|&group| group == gid)
        }
        Err(error) => return Err(error),
    };
    // SAFETY: plain numbers.
    unsafe {
        check(libc::setresgid(gid, gid, gid))?;
        check(libc::setresuid(uid, uid, uid))?;
    }
    if uid != 0 {
        drop_capabilities()?;
    }
    // SAFETY: plain numbers.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    Ok(has_no_others)
}

/// Runs `something` with the user and group of `identity`, and then restores those of the process.
///
/// # Errors
/// The kernel refuses to change the user: `something` was not run, or the user was not restored.
pub fn as_user<T>(identity: Identity, something: impl FnOnce() -> T) -> io::Result<T> {
    const UNCHANGED: libc::uid_t = libc::uid_t::MAX;
    // SAFETY: both only ask, and cannot fail.
    let own = unsafe { Identity { uid: libc::geteuid(), gid: libc::getegid() } };
    let set_user = |uid| {
        // SAFETY: plain numbers. That it is done for one thread is enough, as there is only one.
        check(unsafe { libc::setresuid(UNCHANGED, uid, UNCHANGED) })
    };
    let set_group = |gid| {
        // SAFETY: as above.
        check(unsafe { libc::setresgid(UNCHANGED, gid, UNCHANGED) })
    };
    set_group(identity.gid)?;
    set_user(identity.uid)?;
    let done = something();
    // The user comes first: the right to change the group is root's.
    set_user(own.uid)?;
    set_group(own.gid)?;
    Ok(done)
}

fn supplementary_groups() -> io::Result<Vec<libc::gid_t>> {
    // SAFETY: with a length of 0 nothing is written.
    let count = unsafe { libc::getgroups(0, std::ptr::null_mut()) };
    check(count)?;
    let mut groups = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the pointer is to so many live values; nobody else changes the groups meanwhile.
    check(unsafe { libc::getgroups(count, groups.as_mut_ptr()) })?;
    Ok(groups)
}

/// The kernel drops them itself when root becomes another user, but not if it was told to keep
/// them, and not when a user who is not root has them.
fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: libc::c_int,
    }
    /// Effective, permitted and inheritable ones; of the latter two the ambient ones are a part.
    type Sets = [u32; 3];
    const VERSION_3: u32 = 0x2008_0522;
    let header = Header { version: VERSION_3, pid: 0 };
    // In this version there are 64 capabilities, in two halves.
    let none: [Sets; 2] = [[0; 3]; 2];
    // SAFETY: both pointers are to live values of the form that this version has. That it is done
    // for one thread is enough, as there is only one.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) })
}

/// Gives a file to a user: its group too, unless the directory gave it another than that of this
/// process.
///
/// # Errors
/// The kernel refuses.
pub fn give_file(file: &File, to: Identity) -> io::Result<()> {
    // To the kernel this means "as it is".
    const UNCHANGED: libc::gid_t = libc::gid_t::MAX;
    // SAFETY: it only asks.
    let own_gid = unsafe { libc::getegid() };
    let gid = if file.metadata()?.gid() == own_gid { to.gid } else { UNCHANGED };
    // SAFETY: the descriptor is open, and the path is an empty string, which stands for it.
    check(unsafe {
        libc::fchownat(file.as_raw_fd(), c"".as_ptr(), to.uid, gid, libc::AT_EMPTY_PATH)
    })
}
