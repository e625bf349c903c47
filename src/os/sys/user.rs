//! The user of the process and of its files.

use super::super::resolve;
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

/// Why a user cannot be found.
#[derive(Debug)]
pub enum UserError {
    /// The user database has no such name.
    Unknown,
    /// The user database cannot be read.
    Database(io::Error),
}

/// Who `user` is: `UID`, `UID:GID` or a name. Numbers stand for themselves, and without a
/// GID the group has the number of the user; only names need the user database.
///
/// # Errors
/// There is no such user.
pub fn find_user(user: &str) -> Result<Identity, UserError> {
    let (uid, gid) = user.split_once(':').unwrap_or((user, user));
    match (uid.parse(), gid.parse()) {
        // To the kernel the largest number means "as it is": nobody would be changed.
        (Ok(u32::MAX), _) | (_, Ok(u32::MAX)) => Err(UserError::Unknown),
        (Ok(uid), Ok(gid)) => Ok(Identity { uid, gid }),
        _ if resolve::ARE_IN_FILES_ONLY => find_user_in_file(user),
        _ => find_user_by_name(user),
    }
}

fn find_user_in_file(name: &str) -> Result<Identity, UserError> {
    match resolve::user_and_group(name).map_err(UserError::Database)? {
        None | Some((u32::MAX, _) | (_, u32::MAX)) => Err(UserError::Unknown),
        Some((uid, gid)) => Ok(Identity { uid, gid }),
    }
}

fn find_user_by_name(name: &str) -> Result<Identity, UserError> {
    const LARGEST_ENTRY: usize = 1024 * 1024;
    let name = CString::new(name).map_err(|_| UserError::Unknown)?;
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
            0 if found.is_null() => return Err(UserError::Unknown),
            // What other systems say of a missing name, or of a missing database.
            libc::ENOENT | libc::ESRCH => return Err(UserError::Unknown),
            0 => {
                // SAFETY: the call has succeeded and `found` points to `entry`.
                let entry = unsafe { entry.assume_init() };
                return Ok(Identity { uid: entry.pw_uid, gid: entry.pw_gid });
            }
            error => return Err(UserError::Database(io::Error::from_raw_os_error(error))),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numeric_users_need_no_database() {
        assert_eq!(find_user("65534").ok(), Some(Identity { uid: 65534, gid: 65534 }));
        assert_eq!(find_user("12:34").ok(), Some(Identity { uid: 12, gid: 34 }));
        assert_eq!(find_user("root").ok(), Some(Identity { uid: 0, gid: 0 }));
        assert!(matches!(find_user("no such user"), Err(UserError::Unknown)));
        assert!(matches!(find_user("12:x"), Err(UserError::Unknown)));
        assert!(matches!(find_user("4294967295"), Err(UserError::Unknown)));
        assert!(matches!(find_user("0:4294967295"), Err(UserError::Unknown)));
    }
}
