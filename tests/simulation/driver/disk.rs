//! The disk of a simulated server: local or remote.

use super::super::event::{BinlogSetup, Crash};
use crate::harness::fake_disk::{FakeDisk, Files};

/// Returns an empty disk.
pub(super) fn new(binlog: Option<BinlogSetup>) -> FakeDisk {
    let remote = binlog.and_then(|binlog| binlog.remote);
    let remote = remote.map(|setup| FakeDisk::remote_as(&Files::new(), setup));
    let disk = remote.unwrap_or_default();
    if binlog.is_some_and(|binlog| binlog.has_threads) {
        disk.sync_in_background();
    }
    disk
}

/// Returns the disk that the next process finds. `flip_seed` decides which bits change.
pub(super) fn after(disk: &FakeDisk, crash: Crash, flip_seed: u64) -> FakeDisk {
    let mut power_cut = crash.power_cut.map(fastrand::Rng::with_seed);
    let next = disk.after_end(power_cut.as_mut());
    next.flip_bits(&mut fastrand::Rng::with_seed(flip_seed), crash.flipped_bits);
    next
}

/// Decides whether reads of bodies are done in the background.
pub(super) fn set_reads_late(disk: &FakeDisk, are_late: bool) {
    disk.set_reads_late(are_late);
    disk.let_reads_end(are_late.then_some(0));
}
