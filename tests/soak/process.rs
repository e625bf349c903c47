//! What the kernel says of a server under stress, and of the directory of its binlog.

use crate::support::{Daemon, status_kib};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

pub fn pid(daemon: &Daemon) -> u32 {
    daemon.child.id()
}

/// The memory it has.
pub fn rss_kib(daemon: &Daemon) -> u64 {
    status_kib(pid(daemon), "VmRSS:")
}

/// The most memory it has had, since it began or [`forget_peak`].
pub fn peak_rss_kib(daemon: &Daemon) -> u64 {
    status_kib(pid(daemon), "VmHWM:")
}

/// Where the kernel does not let it go, the peak is that of all rounds: nothing gets easier.
pub fn forget_peak(daemon: &Daemon) {
    // 5 is the peak; proc(5) has the list.
    let _ = std::fs::write(format!("/proc/{}/clear_refs", pid(daemon)), "5");
}

pub fn open_files(daemon: &Daemon) -> usize {
    let directory = format!("/proc/{}/fd", pid(daemon));
    std::fs::read_dir(directory).expect("the server runs").count()
}

/// What the files of a directory take on the disk.
pub fn disk_bytes(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).expect("the directory is there");
    // A file may go away while it is looked at; blocks are of 512 bytes, whatever the disk has.
    files.filter_map(|file| Some(file.ok()?.metadata().ok()?.blocks() * 512)).sum()
}
