//! Crashes at every step of the disk, and the syncs that bound what they lose.

use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::{FakeDisk, Files};
use crate::harness::fixtures::START;
use crate::harness::request::put;
use crate::harness::yaml::number;
use crate::worker::Worker;
use beanstalkd::testing::{Nanos, Syncing};
use std::io::ErrorKind;

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
    crash_everywhere_on(&FakeDisk::default(), seed, policy, crashes);
}

/// Does the same on an empty disk.
fn crash_everywhere_on(disk: &FakeDisk, seed: u64, policy: Policy, crashes: &[Crash]) {
    let mut worker = Worker::new(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    let mut now = START;
    let mut count = 0;
    disk.remember();
    for iterations in [20, 10, 30] {
        let mut engine = Instance::start(disk, policy, now);
        worker.reconnect(&mut engine);
        for iteration in 0..iterations {
            let before = worker.journal.safe.clone();
            if random.u8(..3) == 0 {
                disk.let_sync_end();
            }
            worker.work(disk, &mut engine);
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
fn a_power_cut_loses_nothing_synced_while_the_server_goes_on() {
    for seed in seeds(40..52) {
        let disk = FakeDisk::default();
        disk.sync_in_background();
        let policy = Policy::new(8192, Syncing::Within(Nanos::from_millis(8)));
        crash_everywhere_on(&disk, seed, policy, &[Crash::Kill, Crash::PowerCut, Crash::PowerCut]);
        let (begun, ended) = disk.background_syncs();
        assert!(begun > 5 && ended == begun, "{begun} syncs were begun, {ended} have ended");
    }
}

/// A disk that syncs in the background, and a server on it that has put a job and begun to sync it.
fn start_with_background_sync() -> (FakeDisk, Instance) {
    let disk = FakeDisk::default();
    disk.sync_in_background();
    let policy = Policy::new(65_536, Syncing::Within(Nanos::from_millis(50)));
    let mut engine = Instance::start(&disk, policy, START);
    assert!(engine.put("first").is_some());
    engine.idle(10);
    assert_eq!(disk.background_syncs(), (1, 0));
    (disk, engine)
}

#[test]
fn records_that_come_during_a_sync_are_synced_by_the_next_one() {
    let (disk, mut engine) = start_with_background_sync();
    assert!(engine.put("second").is_some());
    // Nothing is due, although the moment of the next sync comes.
    assert_eq!(engine.server.next_due(), None);
    engine.advance(Nanos::from_secs(1));
    engine.idle(10);
    assert_eq!(disk.background_syncs(), (1, 0));
    disk.let_sync_end();
    engine.commit();
    assert_eq!(disk.background_syncs(), (2, 1));
    disk.let_sync_end();
    engine.commit();
    assert_eq!((disk.background_syncs(), engine.server.next_due()), ((2, 2), None));
    let mut random = fastrand::Rng::with_seed(1);
    let policy = Policy::synced(65_536);
    let files = disk.files_after_power_cut(&mut random);
    assert_eq!(Instance::on_files(&files, policy, engine.now).recovered.jobs, 2);
}

/// Beyond the bound the commit waits for the sync.
#[test]
fn files_are_removed_although_a_background_sync_does_not_end() {
    const FILE_SIZE: u32 = 16_384;
    let disk = FakeDisk::default();
    disk.sync_in_background();
    let policy = Policy::new(FILE_SIZE, Syncing::Within(Nanos::from_millis(50)));
    let mut engine = Instance::start(&disk, policy, START);
    for _ in 0..500 {
        let id = engine.put("x".repeat(1000)).expect("there is space");
        engine.delete(id);
        // One more is about to be removed, or was just created.
        assert!(disk.take_peak() <= 4 * u64::from(FILE_SIZE), "{}", disk.names());
    }
    assert!(engine.stat("binlog-oldest-index") > 20);
}

#[test]
fn a_background_sync_that_fails_stops_the_server() {
    // The first sync is also of the names of new files.
    for (syncs, expected) in [(0, "cannot sync the directory: "), (1, "cannot sync binlog.1: ")] {
        let (disk, mut engine) = start_with_background_sync();
        for _ in 0..syncs {
            disk.let_sync_end();
            engine.commit();
            assert!(engine.put("next").is_some());
            engine.idle(10);
        }
        assert_eq!(disk.background_syncs(), (syncs + 1, syncs));
        disk.fail_from(disk.changes() + 1, ErrorKind::Other);
        disk.let_sync_end();
        let now = engine.now;
        let failure = engine.server.commit(now).expect_err("the sync has failed").to_string();
        assert!(failure.starts_with(expected), "{failure}");
        assert!(engine.try_ask("delete 1\r\n").is_none());
    }
}

/// A file may be removed only when the new records of its jobs are synced.
#[test]
fn no_file_is_removed_after_the_sync_before_it_has_failed() {
    let policy = Policy::new(8192, Syncing::Within(Nanos::from_millis(50)));
    let mut random = fastrand::Rng::with_seed(9);
    for syncs in 0..40 {
        let disk = FakeDisk::default();
        if syncs % 2 == 0 {
            disk.sync_in_background();
        }
        let mut engine = Instance::start(&disk, policy, START);
        let kept = ["one", "two", "three"].map(|body| engine.put(body).expect("there is space"));
        for _ in 0..2 {
            engine.advance(Nanos::from_secs(1));
            engine.idle(10);
            disk.let_sync_end();
        }
        disk.fail_syncs_after(syncs / 2);
        let body = "x".repeat(1000);
        // Compaction moves the kept jobs again and again.
        while let Some(reply) = engine.try_ask(put(0, 0, 9, &body)) {
            let id = reply.trim_end().strip_prefix("INSERTED ").expect("there is space").to_owned();
            engine.try_ask(format!("delete {id}\r\n"));
            disk.let_sync_end();
        }
        for _ in 0..10 {
            let files = disk.files_after_power_cut(&mut random);
            let mut again = Instance::on_files(&files, policy, engine.now);
            for id in kept {
                let found = again.ask(format!("peek {id}\r\n"));
                assert!(found.starts_with("FOUND"), "{syncs}: {id} is lost: {}", disk.names());
            }
        }
    }
}

#[test]
fn a_server_that_ends_waits_for_the_sync() {
    let (disk, mut engine) = start_with_background_sync();
    engine.close();
    assert_eq!(disk.background_syncs(), (1, 1));
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

/// The ready, delayed and buried jobs of a tube.
fn jobs_of(engine: &mut Instance, tube: &str) -> [u64; 3] {
    let text = engine.ask_now(format!("stats-tube {tube}\r\n"));
    if text == "NOT_FOUND\r\n" {
        return [0; 3];
    }
    ["ready", "delayed", "buried"].map(|state| number(&text, &format!("current-jobs-{state}")))
}

/// Runs a command of which the reply may come in a later iteration. Calls `check` with the files that
/// a crash at each step of the disk would leave, and whether the client had the reply before.
fn crash_during(
    engine: &mut Instance,
    disk: &FakeDisk,
    command: &str,
    crash: Crash,
    mut check: impl FnMut(Files, bool),
) -> String {
    let mut random = fastrand::Rng::with_seed(1);
    let conn = engine.conn;
    let mut reply = engine.try_ask(command).unwrap();
    let mut is_acknowledged = false;
    // Some iterations after the reply, compaction has moved the other jobs.
    for iteration in 0..2_000 {
        for image in disk.take_history().into_iter().chain([disk.clone()]) {
            let files = match crash {
                Crash::Kill => image.live_files(),
                Crash::PowerCut => image.files_after_power_cut(&mut random),
            };
            check(files, is_acknowledged);
        }
        is_acknowledged = !reply.is_empty();
        if is_acknowledged && iteration > 30 {
            return reply;
        }
        engine.idle(1);
        reply += &String::from_utf8(engine.output(conn)).unwrap();
    }
    panic!("no reply to {command}");
}

/// Starts a server with jobs in the tubes `a` and `b`, a third of them in each state.
fn start_with_jobs(disk: &FakeDisk, policy: Policy, jobs: u64) -> Instance {
    let mut engine = Instance::start(disk, policy, START);
    let mut id = 0;
    for (tube, jobs) in [("a", jobs), ("b", 9)] {
        for index in 0..jobs {
            let delay = if index % 3 == 1 { 100_000 } else { 0 };
            id += 1;
            engine.ask_now(format!("put-in-tube {tube} 0 {delay} 9 20\r\n{}\r\n", "x".repeat(20)));
            if index % 3 == 2 {
                engine.ask_now(format!("reserve-job {id}\r\nbury {id} 0\r\n"));
            }
        }
    }
    disk.remember();
    disk.take_history();
    engine
}

/// Flushes a tube, of which a worker holds some jobs, or its buried jobs.
fn flush_and_crash(crash: Crash) {
    // The second number of jobs is freed in many iterations.
    for jobs in [30, 900] {
        let all = jobs / 3;
        for (command, after) in
            [("flush-tube a\r\n", [0; 3]), ("flush-buried a\r\n", [all, all, 0])]
        {
            let policy = Policy::synced(8192);
            let disk = FakeDisk::default();
            let mut engine = start_with_jobs(&disk, policy, jobs);
            engine.ask_now("watch a\r\nignore default\r\n");
            let is_tube = after == [0; 3];
            if is_tube {
                engine.ask_now("reserve-batch 5 0\r\n");
            }
            let (mut count, mut gone) = (0, 0);
            let now = engine.now;
            let reply =
                crash_during(&mut engine, &disk, command, crash, |files, is_acknowledged| {
                    let mut next = Instance::on_files(&files, policy, now);
                    let found = jobs_of(&mut next, "a");
                    let is_gone = found == after;
                    assert!(
                        is_gone || !is_acknowledged && found == [all; 3],
                        "{command}{found:?} jobs are left after crash {count}; \
                     the client has the reply: {is_acknowledged}"
                    );
                    assert_eq!(jobs_of(&mut next, "b"), [3; 3], "after {command}");
                    count += 1;
                    gone += u32::from(is_gone);
                });
            assert_eq!(reply, format!("FLUSHED {}\r\n", if is_tube { jobs } else { all }));
            assert!(gone > 0 && gone < count, "{gone} of {count} crashes were after the flush");
        }
    }
}

#[test]
fn a_flush_is_whole_or_absent_after_a_kill_at_each_step() {
    flush_and_crash(Crash::Kill);
}

#[test]
fn a_flush_is_whole_or_absent_after_a_power_cut_at_each_step() {
    flush_and_crash(Crash::PowerCut);
}

#[test]
fn a_delete_batch_is_acknowledged_when_all_its_jobs_are_gone() {
    let policy = Policy::synced(8192);
    let disk = FakeDisk::default();
    let mut engine = start_with_jobs(&disk, policy, 300);
    let ids: String = (1..=300).filter(|id| id % 2 == 0).map(|id| format!(" {id}")).collect();
    let command = format!("delete-batch{ids} 1000\r\n");
    let now = engine.now;
    let mut count = 0;
    let crash = Crash::PowerCut;
    let reply = crash_during(&mut engine, &disk, &command, crash, |files, is_acknowledged| {
        let mut next = Instance::on_files(&files, policy, now);
        let [ready, delayed, buried] = jobs_of(&mut next, "a");
        let left = ready + delayed + buried;
        assert!(left == 150 || !is_acknowledged && left > 150, "{left} jobs are left of 150");
        assert_eq!(jobs_of(&mut next, "b"), [3; 3]);
        count += 1;
    });
    assert_eq!(reply, "DELETED_BATCH 150 1\r\n");
    assert!(count > 0, "no crash was tried");
}
