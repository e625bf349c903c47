//! Crashes at every step of the disk, and the syncs that bound what they lose.

use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::fixtures::START;
use crate::worker::Worker;
use beanstalkd::testing::{Nanos, Syncing};

/// The ways in which a server can end unexpectedly.
#[derive(Clone, Copy, Debug)]
enum Crash {
    /// Only the process ends: the system still has all that was written.
    Kill,
    /// Only synced bytes are sure to be there.
    PowerCut,
}

/// Runs random commands in three instances on one disk, and starts the server on the files that a
/// crash at each step would have left.
fn crash_everywhere(seed: u64, policy: Policy, crashes: &[Crash]) {
    let disk = FakeDisk::default();
    let mut worker = Worker::new(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut now = START;
    let mut count = 0;
    disk.remember();
    for iterations in [20, 10, 30] {
        let mut engine = Instance::start(&disk, policy, now);
        worker.reconnect(&mut engine);
        for iteration in 0..iterations {
            let before = worker.journal.safe.clone();
            worker.work(&disk, &mut engine);
            // Between two milliseconds, so that all instances round to the same second.
            let now = engine.now + Nanos::from_nanos(500_000);
            for (index, image) in disk.take_history().iter().enumerate() {
                for crash in crashes {
                    let when = format!(
                        "seed {seed}, iteration {iteration}/{iterations}, step {index}, {crash:?}"
                    );
                    let (files, safe) = match crash {
                        Crash::Kill => (image.live_files(), &before.acknowledged),
                        Crash::PowerCut => {
                            (image.files_after_power_cut(&mut random), &before.durable)
                        }
                    };
                    let mut engine = Instance::on_files(&files, policy, now);
                    worker.journal.judge(safe, &mut engine, &when);
                    count += 1;
                }
            }
        }
        engine.close();
        now = engine.now;
        disk.take_history();
    }
    assert!(count > 100, "only {count} crashes were tried");
}

/// Seeds to try; `BINLOG_SEEDS` is a factor for their number.
fn seeds(range: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
    let times = std::env::var("BINLOG_SEEDS").map_or(1, |times| times.parse().unwrap());
    let more = move |seed: u64| (0..times).map(move |round: u64| seed + 1000 * round);
    range.flat_map(more)
}

#[test]
fn a_power_cut_loses_nothing_acknowledged_with_a_sync_in_each_iteration() {
    for seed in seeds(0..4) {
        let policy = Policy::synced(4096);
        crash_everywhere(seed, policy, &[Crash::Kill, Crash::PowerCut, Crash::PowerCut]);
    }
}

#[test]
fn a_power_cut_loses_nothing_synced_with_later_syncs() {
    for seed in seeds(4..12) {
        let policy = Policy::new(8192, Syncing::Within(Nanos::from_millis(8)));
        crash_everywhere(seed, policy, &[Crash::Kill, Crash::PowerCut, Crash::PowerCut]);
    }
}

#[test]
fn a_kill_loses_nothing_acknowledged_without_syncs() {
    for seed in seeds(12..16) {
        crash_everywhere(seed, Policy::new(4096, Syncing::Never), &[Crash::Kill]);
    }
}

#[test]
fn records_are_synced_in_time_on_an_idle_server() {
    let span = Nanos::from_millis(50);
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, Policy::new(65_536, Syncing::Within(span)), START);
    engine.put("first").unwrap();
    for _ in 0..20 {
        engine.idle(5);
        let (syncs, put_at) = (disk.syncs(), engine.now);
        assert!(engine.put("job").is_some());
        let due = engine.server.next_due().expect("a sync is due");
        assert!(due > engine.now && due <= put_at + span, "{due:?} for {put_at:?}");
        assert_eq!(disk.syncs(), syncs);
        engine.idle(1);
        assert_eq!(disk.syncs(), syncs + 1);
    }
}

#[test]
fn one_sync_serves_a_whole_iteration() {
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, Policy::synced(1 << 20), START);
    engine.ask("put 0 0 9 1\r\nx\r\n");
    let (writes, syncs) = (disk.writes(), disk.syncs());
    engine.ask("put 0 0 9 1\r\nx\r\n".repeat(500));
    assert_eq!((disk.writes() - writes, disk.syncs() - syncs), (1, 1));
    engine.ask("stats\r\n");
    assert_eq!(disk.syncs() - syncs, 1);
}
