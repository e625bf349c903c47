//! Crashes at every step of the disk, and the syncs that bound what they lose.

use crate::harness::driver::{Nanos, Options, START, Syncing, damage};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::instance::Instance;
use crate::harness::request::put;
use crate::start;
use std::collections::BTreeSet;
use std::io::ErrorKind;

/// The jobs that there are, and the highest id.
#[derive(Clone, Default)]
struct Jobs {
    live: BTreeSet<u64>,
    last_id: u64,
    /// The ids up to this one are seldom used.
    old: u64,
}

impl Jobs {
    /// Asserts that a server has these jobs, except those that were deleted since, and none of those that
    /// were deleted before.
    fn judge(&self, since: &Jobs, server: &mut Instance, when: &str) {
        for id in 1..=self.last_id {
            let found = server.ask_now(format!("peek {id}\r\n"));
            let is_found = found.ends_with(&format!("\r\n{}\r\n", body(id)));
            assert!(is_found || found == "NOT_FOUND\r\n", "{when}: job {id}: {found}");
            let is_allowed = match self.live.contains(&id) {
                true => is_found || !since.live.contains(&id),
                false => !is_found,
            };
            assert!(is_allowed, "{when}: job {id} is {}", if is_found { "back" } else { "lost" });
        }
        assert!(server.put("next") > Some(self.last_id), "{when}: an id is assigned again");
    }
}

/// A body that only this job has, sometimes so long that a file has one of them.
fn body(id: u64) -> String {
    format!("body-{id}-").repeat(if id.is_multiple_of(9) { 300 } else { 5 })
}

/// The ways in which a server can end unexpectedly.
#[derive(Clone, Copy, Debug)]
enum Crash {
    /// Only the process ends: the system still has all that was written.
    Kill,
    /// Only synced bytes are sure to be there.
    PowerCut,
}

/// Changes one to three jobs in one iteration.
fn work(jobs: &mut Jobs, random: &mut fastrand::Rng, server: &mut Instance) {
    let mut commands = Vec::new();
    for _ in 0..random.usize(1..4) {
        let from = if random.u8(..40) == 0 { 0 } else { jobs.old };
        match (
            random.u8(..10),
            random.choice(jobs.live.range(from + 1..).copied().collect::<Vec<_>>()),
        ) {
            (0..=3, _) | (_, None) => {
                jobs.last_id += 1;
                jobs.live.insert(jobs.last_id);
                commands.extend(put(0, 0, 1000, body(jobs.last_id)));
            }
            (4..=6, Some(id)) => {
                jobs.live.remove(&id);
                commands.extend(format!("delete {id}\r\n").bytes());
            }
            (_, Some(id)) => {
                commands.extend(format!("reserve-job {id}\r\nrelease {id} 0 0\r\n").bytes());
            }
        }
    }
    server.ask(commands);
}

/// Works in two instances on one disk beside some old jobs, and starts the server on the files that a crash at
/// each step would have left.
fn crash_everywhere(disk: &FakeDisk, seed: u64, options: Options, old: u64, crashes: &[Crash]) {
    let mut random = fastrand::Rng::with_seed(seed);
    // What is acknowledged, what was acknowledged when the background sync was begun, and what is synced.
    let (mut now, mut begun, mut durable) = (START, Jobs::default(), Jobs::default());
    let mut count = 0;
    let mut server = Instance::start(disk, options, now);
    for id in 1..=old {
        assert_eq!(server.put(body(id)), Some(id));
    }
    server.close();
    let mut jobs = Jobs { live: (1..=old).collect(), last_id: old, old };
    durable.clone_from(&jobs);
    disk.take_history();
    for iterations in [20, 40] {
        let mut server = Instance::start(disk, options, now);
        disk.take_history();
        for iteration in 0..iterations {
            if random.u8(..3) == 0 {
                disk.let_sync_end();
            }
            let (acknowledged, before) = (jobs.clone(), disk.counts());
            work(&mut jobs, &mut random, &mut server);
            for (step, image) in disk.take_history().iter().enumerate() {
                for crash in crashes {
                    let when = format!("seed {seed}, iteration {iteration}, {step}, {crash:?}");
                    let (files, safe) = match crash {
                        Crash::Kill => (image.live_files(), &acknowledged),
                        Crash::PowerCut => (image.files_after_power_cut(&mut random), &durable),
                    };
                    let mut next = Instance::on_files(&files, options, server.now);
                    safe.judge(&jobs, &mut next, &when);
                    if matches!(crash, Crash::Kill) {
                        let damage = damage(&mut FakeDisk::with_files(&files));
                        assert_eq!(damage, None, "{when}");
                    }
                    count += 1;
                }
            }
            let after = disk.counts();
            if after.background_syncs.1 > before.background_syncs.1 {
                durable.clone_from(&begun);
            }
            if after.background_syncs.0 > before.background_syncs.0 {
                // It may have begun before the last record of this iteration.
                begun = acknowledged;
            }
            if after.syncs > before.syncs {
                durable.clone_from(&jobs);
            }
        }
        server.close();
        durable.clone_from(&jobs);
        now = server.now;
    }
    assert!(count > 100, "only {count} crashes were tried");
}

#[test]
fn a_crash_at_each_step_loses_nothing_acknowledged_or_synced() {
    use Crash::{Kill, PowerCut};
    let both = &[Kill, PowerCut, PowerCut][..];
    let within_8_ms = Options::binlog(8192, Syncing::Within(Nanos::from_millis(8)));
    for (seeds, options, old, is_in_background, crashes) in [
        (0..4, Options::synced(4096), 0, false, both),
        (4..8, within_8_ms, 0, false, both),
        (8..10, Options::binlog(4096, Syncing::Never), 0, false, &[Kill]),
        (40..52, within_8_ms, 0, true, both),
        // Files are removed before older ones.
        (52..56, Options::synced(4096), 60, false, both),
        (56..60, within_8_ms, 60, true, both),
    ] {
        for seed in seeds {
            let disk = FakeDisk::default();
            if is_in_background {
                disk.faults().syncs_in_background = true;
            }
            crash_everywhere(&disk, seed, options, old, crashes);
            let (begun, ended) = disk.counts().background_syncs;
            assert!(begun == ended && (begun > 5) == is_in_background, "{begun} and {ended} syncs");
        }
    }
}

// ---- Syncs ----

/// A disk that syncs in the background, and a server on it that has put a job and begun to sync it.
fn start_with_background_sync() -> (FakeDisk, Instance) {
    let disk = FakeDisk::default();
    disk.faults().syncs_in_background = true;
    let options = Options::binlog(65_536, Syncing::Within(Nanos::from_millis(50)));
    let mut server = Instance::start(&disk, options, START);
    assert!(server.put("first").is_some());
    server.idle(10);
    assert_eq!(disk.counts().background_syncs, (1, 0));
    (disk, server)
}

/// Beyond the bound the commit waits for the sync.
#[test]
fn files_are_removed_although_a_background_sync_does_not_end() {
    const FILE_SIZE: u32 = 16_384;
    let disk = FakeDisk::default();
    disk.faults().syncs_in_background = true;
    let options = Options::binlog(FILE_SIZE, Syncing::Within(Nanos::from_millis(50)));
    let mut server = Instance::start(&disk, options, START);
    for _ in 0..500 {
        let id = server.put("x".repeat(1000)).expect("there is space");
        server.delete(id);
        // One more is about to be removed, or was just created.
        assert!(disk.take_peak() <= 4 * u64::from(FILE_SIZE), "{}", disk.names());
    }
    assert!(server.stat("binlog-oldest-index") > 20);
}

/// The disk has few descriptors for files that are not synced.
#[test]
fn files_are_closed_although_a_background_sync_does_not_end() {
    let (_, mut server) = start_with_background_sync();
    let ids: Vec<u64> = (0..500).filter_map(|_| server.put("x".repeat(1000))).collect();
    assert_eq!(ids.len(), 500);
    assert!(server.stat("binlog-current-index") > 7);
}

#[test]
fn a_background_sync_that_fails_stops_the_server() {
    // The first sync is also of the names of new files.
    for (syncs, expected) in [(0, "cannot sync the directory: "), (1, "cannot sync binlog.1: ")] {
        let (disk, mut server) = start_with_background_sync();
        for _ in 0..syncs {
            disk.let_sync_end();
            server.iterate();
            assert!(server.put("next").is_some());
            server.idle(10);
        }
        assert_eq!(disk.counts().background_syncs, (syncs + 1, syncs));
        disk.faults().fail_from = Some((disk.counts().changes + 1, ErrorKind::Other));
        disk.let_sync_end();
        let failure = server.try_iterate().expect_err("the sync has failed").to_string();
        assert!(failure.starts_with(expected), "{failure}");
        assert!(server.try_ask("delete 1\r\n").is_none());
    }
}

/// A file may be removed only when the new records of its jobs are synced.
#[test]
fn no_file_is_removed_after_the_sync_before_it_has_failed() {
    let options = Options::binlog(8192, Syncing::Within(Nanos::from_millis(50)));
    let mut random = fastrand::Rng::with_seed(9);
    for syncs in 0..40 {
        let disk = FakeDisk::default();
        if syncs % 2 == 0 {
            disk.faults().syncs_in_background = true;
        }
        let mut server = Instance::start(&disk, options, START);
        let kept = ["one", "two", "three"].map(|body| server.put(body).expect("there is space"));
        for _ in 0..2 {
            server.advance(Nanos::from_secs(1));
            disk.let_sync_end();
        }
        disk.faults().syncs_left = Some(syncs / 2);
        let body = "x".repeat(1000);
        // Compaction moves the kept jobs again and again.
        let mut puts = 0;
        while let Some(reply) = server.try_ask(put(0, 0, 9, &body)) {
            puts += 1;
            assert!(puts < 10_000, "no sync fails");
            let id = reply.trim_end().strip_prefix("INSERTED ").expect("there is space").to_owned();
            server.try_ask(format!("delete {id}\r\n"));
            disk.let_sync_end();
        }
        for _ in 0..10 {
            let files = disk.files_after_power_cut(&mut random);
            let mut again = Instance::on_files(&files, options, server.now);
            for id in kept {
                let found = again.ask(format!("peek {id}\r\n"));
                assert!(found.starts_with("FOUND"), "{syncs}: {id} is lost: {}", disk.names());
            }
        }
    }
}

#[test]
fn a_server_that_ends_waits_for_the_sync() {
    let (disk, mut server) = start_with_background_sync();
    server.close();
    assert_eq!(disk.counts().background_syncs, (1, 1));
}

#[test]
fn one_sync_serves_a_whole_iteration() {
    let (disk, mut server) = start(Options::synced(1 << 20));
    server.ask("put 0 0 9 1\r\nx\r\n");
    let before = disk.counts();
    server.ask("put 0 0 9 1\r\nx\r\n".repeat(500));
    server.ask("stats\r\n");
    let after = disk.counts();
    assert_eq!((after.writes - before.writes, after.syncs - before.syncs), (1, 1));
}
