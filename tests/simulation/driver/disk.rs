//! The disk of a simulated server: local or remote.

use super::super::event::{BinlogSetup, Crash, RemoteSetup};
use crate::harness::driver::{Disk, Progress};
use crate::harness::fake_disk::{FakeDisk, Files};
use std::io::ErrorKind;

#[derive(Debug)]
pub(super) enum SimulatedDisk {
    Local(FakeDisk),
    Remote(FakeDisk, RemoteSetup),
}

impl SimulatedDisk {
    /// Returns an empty disk.
    pub(super) fn new(binlog: Option<BinlogSetup>) -> SimulatedDisk {
        match binlog.and_then(|binlog| binlog.remote) {
            None => {
                let disk = FakeDisk::default();
                if binlog.is_some_and(|binlog| binlog.has_threads) {
                    disk.sync_in_background();
                }
                SimulatedDisk::Local(disk)
            }
            Some(setup) => remote(&Files::new(), setup),
        }
    }

    pub(super) fn boxed(&self) -> Box<dyn Disk> {
        match self {
            SimulatedDisk::Local(disk) => disk.boxed(),
            SimulatedDisk::Remote(disk, _) => disk.boxed(),
        }
    }

    pub(super) fn progress(&self) -> Progress {
        match self {
            SimulatedDisk::Local(_) => Progress::default(),
            SimulatedDisk::Remote(disk, _) => Disk::progress(disk).unwrap_or_default(),
        }
    }

    /// Returns whether the server has handed over all changes that it may.
    pub(super) fn has_all(&self) -> bool {
        match self {
            SimulatedDisk::Local(_) => true,
            SimulatedDisk::Remote(disk, _) => disk.has_all(),
        }
    }

    /// Returns the last change that a crash without a loss leaves.
    pub(super) fn last_handed_over(&self) -> u64 {
        match self {
            SimulatedDisk::Local(_) => 0,
            SimulatedDisk::Remote(disk, _) => disk.last_handed_over(),
        }
    }

    /// Returns the number of changes that are not acknowledged.
    pub(super) fn waiting(&self) -> usize {
        match self {
            SimulatedDisk::Local(_) => 0,
            SimulatedDisk::Remote(disk, _) => disk.waiting(),
        }
    }

    // ---- Faults ----

    /// Makes all changes fail after this number of them.
    pub(super) fn fail_after(&self, changes: u64) {
        if let SimulatedDisk::Local(disk) = self {
            disk.fail_from(disk.changes() + 1 + changes, ErrorKind::Other);
        }
    }

    /// Returns whether a change has failed.
    pub(super) fn has_failed(&self) -> bool {
        matches!(self, SimulatedDisk::Local(disk) if disk.has_failed())
    }

    pub(super) fn set_capacity(&self, bytes: Option<u64>) {
        match self {
            SimulatedDisk::Local(disk) => disk.set_capacity(bytes),
            SimulatedDisk::Remote(disk, _) => disk.set_refusing_puts(bytes.is_some()),
        }
    }

    pub(super) fn acknowledge(&self, changes: usize) {
        if let SimulatedDisk::Remote(disk, _) = self {
            disk.acknowledge(changes);
        }
    }

    pub(super) fn refuse(&self, seed: u64) {
        if let SimulatedDisk::Remote(disk, _) = self {
            disk.refuse(&mut fastrand::Rng::with_seed(seed));
        }
    }

    pub(super) fn is_refused(&self) -> bool {
        matches!(self, SimulatedDisk::Remote(disk, _) if disk.is_refused())
    }

    /// Returns the disk that the next process finds. `flip_seed` decides which bits change.
    pub(super) fn after(&self, crash: Crash, capacity: Option<u64>, flip_seed: u64) -> Self {
        let disk = match self {
            SimulatedDisk::Local(disk) => {
                disk.heal();
                disk.kill_process();
                disk.clone()
            }
            SimulatedDisk::Remote(disk, _) => {
                let most = disk.handed_over();
                let count = crash.power_cut.map(fastrand::Rng::with_seed);
                let count = count.map_or(most, |mut random| random.usize(..=most));
                FakeDisk::with_files(&disk.files_after(count))
            }
        };
        let disk = match (self, crash.power_cut) {
            (SimulatedDisk::Local(_), Some(seed)) => {
                let mut random = fastrand::Rng::with_seed(seed);
                let next = FakeDisk::with_files(&disk.files_after_power_cut(&mut random));
                if disk.are_syncs_in_background() {
                    next.sync_in_background();
                }
                next
            }
            _ => disk,
        };
        if crash.flipped_bits > 0 {
            disk.flip_bits(&mut fastrand::Rng::with_seed(flip_seed), crash.flipped_bits);
        }
        let next = match self {
            SimulatedDisk::Local(_) => SimulatedDisk::Local(disk),
            SimulatedDisk::Remote(_, setup) => remote(&disk.live_files(), *setup),
        };
        next.set_capacity(capacity);
        next
    }

    // ---- Threads ----

    /// Decides whether reads of bodies are done in the background.
    pub(super) fn set_reads_late(&self, are_late: bool) {
        if let SimulatedDisk::Local(disk) = self {
            disk.set_reads_late(are_late);
            disk.let_reads_end(are_late.then_some(0));
        }
    }

    /// Lets this many of the reads end that were begun.
    pub(super) fn end_reads(&self, count: usize) {
        if let SimulatedDisk::Local(disk) = self {
            disk.let_reads_end(Some(count));
        }
    }

    /// Returns whether reads of bodies were begun that have not ended.
    pub(super) fn has_begun_reads(&self) -> bool {
        matches!(self, SimulatedDisk::Local(disk) if disk.begun_reads() > 0)
    }

    /// Ends the background sync, if there is one.
    pub(super) fn end_sync(&self) {
        if let SimulatedDisk::Local(disk) = self {
            disk.let_sync_end();
        }
    }

    /// Returns how many background syncs were begun, and whether the last one has not ended.
    pub(super) fn background_sync(&self) -> (u64, bool) {
        match self {
            SimulatedDisk::Local(disk) => (disk.background_syncs().0, disk.is_syncing()),
            SimulatedDisk::Remote(..) => (0, false),
        }
    }

    /// Returns whether a file has records that were written and not synced.
    pub(super) fn has_unsynced_records(&self) -> bool {
        matches!(self, SimulatedDisk::Local(disk) if disk.has_unsynced_records())
    }

    // ---- Figures ----

    /// Returns the size of all files, in bytes.
    pub(super) fn used(&self) -> u64 {
        match self {
            SimulatedDisk::Local(disk) => disk.used(),
            SimulatedDisk::Remote(disk, _) => disk.used(),
        }
    }

    /// Returns the size of all files without those that were set aside, in bytes.
    pub(super) fn used_by_binlog(&self) -> u64 {
        match self {
            SimulatedDisk::Local(disk) => disk.used_by_binlog(),
            SimulatedDisk::Remote(disk, _) => disk.used_by_binlog(),
        }
    }

    /// Returns the names and the sizes of the files.
    pub(super) fn names(&self) -> String {
        match self {
            SimulatedDisk::Local(disk) => disk.names(),
            SimulatedDisk::Remote(disk, _) => FakeDisk::with_files(&disk.live_files()).names(),
        }
    }
}

fn remote(files: &Files, setup: RemoteSetup) -> SimulatedDisk {
    let disk = FakeDisk::remote(files, setup.chunk_len);
    if let Some(bytes) = setup.congested_above {
        disk.set_congested_above(bytes);
    }
    if setup.is_batched {
        disk.set_batched();
    }
    if let Some(seed) = setup.eager {
        disk.set_eager(fastrand::Rng::with_seed(seed));
    }
    SimulatedDisk::Remote(disk, setup)
}
