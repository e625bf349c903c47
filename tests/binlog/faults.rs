//! Disks that fail: what is fatal, what is retried, and what is acknowledged.

use crate::fill_and_drain;
use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::fixtures::START;
use crate::worker::Worker;
use beanstalkd::testing::{Nanos, Syncing};
use std::io::ErrorKind;

#[test]
fn a_failed_remove_is_not_retried_at_once() {
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, Policy::new(8192, Syncing::Never), START);
    fill_and_drain(&mut engine);
    disk.fail_from(disk.changes() + 1, ErrorKind::Other);
    // A prepared file is no longer needed.
    engine.advance(Nanos::from_secs(2));
    engine.tick();
    engine.commit();
    let next = engine.server.next_due();
    assert!(next.is_some_and(|due| due > engine.now), "it is retried at {next:?}");
    disk.heal();
    engine.idle(10);
    assert_eq!(disk.live_files().len(), 1);
}

#[test]
fn a_failed_truncate_is_fatal_unless_space_or_permission_is_missing() {
    let puts_until_failure = |error: ErrorKind| {
        let disk = FakeDisk::default();
        let mut engine = Instance::start(&disk, Policy::new(8192, Syncing::Never), START);
        disk.fail_cuts(error);
        (0..200).find(|_| engine.try_ask("put 0 0 9 3\r\njob\r\n").is_none())
    };
    assert_eq!(puts_until_failure(ErrorKind::StorageFull), None);
    assert_eq!(puts_until_failure(ErrorKind::PermissionDenied), None);
    assert!(puts_until_failure(ErrorKind::Other).is_some());
}

#[test]
fn a_failed_write_is_not_acknowledged_and_loses_nothing_acknowledged() {
    for (seed, sync) in [(1, Syncing::EachIteration), (2, Syncing::Within(Nanos::from_millis(4)))] {
        for error in [ErrorKind::Other, ErrorKind::StorageFull] {
            let policy = Policy::new(4096, sync);
            let mut faults = 0;
            loop {
                let disk = FakeDisk::default();
                let mut engine = Instance::start(&disk, policy, START);
                let change = disk.changes() + 1 + faults;
                disk.fail_from(change, error);
                let mut worker = Worker::new(seed);
                let mut turns = 0;
                while turns < 60 && worker.try_work(&disk, &mut engine) {
                    turns += 1;
                }
                let image = FakeDisk::with_files(&disk.live_files());
                let mut again = Instance::start(&image, policy, engine.now);
                let when = format!("seed {seed}, {error}, change {change}");
                worker.journal.judge(&worker.journal.safe.acknowledged, &mut again, &when);
                if turns == 60 {
                    break;
                }
                faults += 1;
            }
            assert!(faults > 50, "only {faults} faults were tried");
        }
    }
}
