//! System calls that neither std nor the other packages offer, each with the reason why it is sound.
//! All `unsafe` code of the project is in this folder. It imports nothing else of `os`.
//!
//! | file | owns |
//! |---|---|
//! | [`clock`] | the clock of the process, the time of day |
//! | [`files`] | locks, disk space, modes, the limit of open files |
//! | [`machine`] | names, processor time, and the calls of the first process of a machine |
//! | [`memory`] | the allocator, with a reserve for when the system has no memory |
//! | [`signals`] | signals as a descriptor |
//! | [`sockets`] | sockets inherited from a service manager, readiness |
//! | [`user`] | user, groups and capabilities of the process; the owner of a file |
#![allow(unsafe_code, reason = "the one folder for it")]

pub mod clock;
pub mod files;
pub mod machine;
pub mod memory;
pub mod signals;
pub mod sockets;
pub mod user;

use std::io;

fn check(result: impl Into<i64>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Replaces a function of a static glibc, which parses `/proc/self/maps` with sscanf(3): 100 KB of the
/// binary. Rust's runtime calls it for the end of the stack. Without that, an overflow of the stack still
/// ends the process, but the runtime prints no message before.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
#[unsafe(no_mangle)]
extern "C" fn pthread_getattr_np(_: libc::pthread_t, _: *mut libc::pthread_attr_t) -> libc::c_int {
    libc::ENOSYS
}
