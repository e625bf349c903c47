//! The user of the process, and the owner of files.

use rustix::fs::AtFlags;
use rustix::io::Errno;
use rustix::process::{self, Gid, Uid};
use rustix::thread::{self, CapabilitySet, CapabilitySets};
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;

/// A user and a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    uid: Uid,
    gid: Gid,
}

impl Identity {
    /// Returns the identity with these numbers. The kernel reads the largest number as "unchanged",
    /// so no user and no group has it.
    pub fn new(uid: u32, gid: u32) -> Option<Identity> {
        let is_one = uid != u32::MAX && gid != u32::MAX;
        is_one.then(|| Identity { uid: Uid::from_raw(uid), gid: Gid::from_raw(gid) })
    }
}

/// Returns the user with this name in the user database of the C library, with its first group.
pub fn find_by_name(name: &str) -> io::Result<Option<Identity>> {
    const LARGEST_ENTRY: usize = 1024 * 1024;
    let Ok(name) = CString::new(name) else { return Ok(None) };
    let mut entry = MaybeUninit::<libc::passwd>::zeroed();
    let mut strings = vec![0; LARGEST_ENTRY];
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are to live values, and the length is that of the buffer.
    let error = unsafe {
        let buffer = strings.as_mut_ptr();
        libc::getpwnam_r(name.as_ptr(), entry.as_mut_ptr(), buffer, LARGEST_ENTRY, &raw mut found)
    };
    match error {
        0 if !found.is_null() => {
            // SAFETY: the call has succeeded and `found` points to `entry`.
            let entry = unsafe { entry.assume_init() };
            Ok(Identity::new(entry.pw_uid, entry.pw_gid))
        }
        // Some C libraries return these for a missing name or a missing database.
        0 | libc::ENOENT | libc::ESRCH => Ok(None),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// Changes the user of the process for good: supplementary groups, group and user. The user comes
/// last, because it has the right to change the groups. The process drops all capabilities unless the
/// new user is root. It also sets `no_new_privs`, so that no program it starts has more rights. Changing
/// one thread is enough, as there is only one.
///
/// Returns `false` if supplementary groups are kept: the process already had the group, and has no
/// right to drop others.
pub fn become_user(identity: Identity) -> io::Result<bool> {
    let Identity { uid, gid } = identity;
    let has_no_others = match thread::set_thread_groups(&[gid]) {
        Ok(()) => true,
        Err(Errno::PERM) => process::getgroups()?.iter().all(|&group| group == gid),
        Err(error) => return Err(error.into()),
    };
    thread::set_thread_res_gid(gid, gid, gid)?;
    thread::set_thread_res_uid(uid, uid, uid)?;
    if !uid.is_root() {
        // The kernel does that when root becomes another user, but not if `securebits` keep them, and
        // not if another user than root has them.
        let none = CapabilitySet::empty();
        let none = CapabilitySets { effective: none, permitted: none, inheritable: none };
        thread::set_capabilities(None, none)?;
    }
    thread::set_no_new_privs(true)?;
    Ok(has_no_others)
}

/// Runs `action` with the user and group of `identity`, and then restores those of the process.
///
/// # Errors
/// The user cannot be changed, and `action` was not run, or the user cannot be restored.
pub fn as_user<T>(identity: Identity, action: impl FnOnce() -> T) -> io::Result<T> {
    let own = Identity { uid: process::geteuid(), gid: process::getegid() };
    // Changing one thread is enough, as there is only one.
    let set_user = |uid: Uid| thread::set_thread_res_uid(None, uid, None);
    let set_group = |gid: Gid| thread::set_thread_res_gid(None, gid, None);
    set_group(identity.gid)?;
    set_user(identity.uid)?;
    let done = action();
    // The user comes first, because only root may change the group.
    set_user(own.uid)?;
    set_group(own.gid)?;
    Ok(done)
}

/// Changes the owner of a file. Its group changes too, unless it comes from the directory rather than
/// from this process.
pub fn change_owner(file: &File, to: Identity) -> io::Result<()> {
    let is_own = file.metadata()?.gid() == process::getegid().as_raw();
    // The empty path means the descriptor itself.
    let group = is_own.then_some(to.gid);
    Ok(rustix::fs::chownat(file, c"", Some(to.uid), group, AtFlags::EMPTY_PATH)?)
}
