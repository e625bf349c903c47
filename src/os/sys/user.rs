//! The user of the process, and the owner of files.

use super::check;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// A user and a group.
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

/// Changes the user of the process for good: supplementary groups, group and user. The user comes
/// last, because it has the right to change the groups. The process drops all capabilities unless the
/// new user is root. It also sets `no_new_privs`, so that no program it starts has more rights.
///
/// Returns `false` if supplementary groups are kept: the process already had the group, and has no
/// right to drop others.
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

/// Runs `action` with the user and group of `identity`, and then restores those of the process.
///
/// # Errors
/// The user cannot be changed, and `action` was not run, or the user cannot be restored.
pub fn as_user<T>(identity: Identity, action: impl FnOnce() -> T) -> io::Result<T> {
    const UNCHANGED: libc::uid_t = libc::uid_t::MAX;
    // SAFETY: both return a number and cannot fail.
    let own = unsafe { Identity { uid: libc::geteuid(), gid: libc::getegid() } };
    let set_user = |uid| {
        // SAFETY: plain numbers. Changing one thread is enough, as there is only one.
        check(unsafe { libc::setresuid(UNCHANGED, uid, UNCHANGED) })
    };
    let set_group = |gid| {
        // SAFETY: as above.
        check(unsafe { libc::setresgid(UNCHANGED, gid, UNCHANGED) })
    };
    set_group(identity.gid)?;
    set_user(identity.uid)?;
    let done = action();
    // The user comes first, because only root may change the group.
    set_user(own.uid)?;
    set_group(own.gid)?;
    Ok(done)
}

fn supplementary_groups() -> io::Result<Vec<libc::gid_t>> {
    // SAFETY: with a length of 0 nothing is written.
    let count = unsafe { libc::getgroups(0, std::ptr::null_mut()) };
    check(count)?;
    let mut groups = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: the pointer is to `count` live values, and no other thread changes the groups.
    check(unsafe { libc::getgroups(count, groups.as_mut_ptr()) })?;
    Ok(groups)
}

/// Drops all capabilities. The kernel does that when root becomes another user, but not if `securebits`
/// keep them, and not if another user than root has them.
fn drop_capabilities() -> io::Result<()> {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: libc::c_int,
    }
    /// Effective, permitted and inheritable capabilities. Ambient ones are a part of the latter two.
    type Sets = [u32; 3];
    const VERSION_3: u32 = 0x2008_0522;
    let header = Header { version: VERSION_3, pid: 0 };
    // This version has 64 capabilities, in two halves.
    let none: [Sets; 2] = [[0; 3]; 2];
    // SAFETY: both pointers are to live values with the layout of this version. Changing one thread is
    // enough, as there is only one.
    check(unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) })
}

/// Changes the owner of a file. Its group changes too, unless it comes from the directory rather than
/// from this process.
pub fn change_owner(file: &File, to: Identity) -> io::Result<()> {
    // The kernel leaves the group unchanged.
    const UNCHANGED: libc::gid_t = libc::gid_t::MAX;
    // SAFETY: it returns a number and cannot fail.
    let own_gid = unsafe { libc::getegid() };
    let gid = if file.metadata()?.gid() == own_gid { to.gid } else { UNCHANGED };
    // SAFETY: the descriptor is open, and the empty path means the descriptor itself.
    check(unsafe {
        libc::fchownat(file.as_raw_fd(), c"".as_ptr(), to.uid, gid, libc::AT_EMPTY_PATH)
    })
}
