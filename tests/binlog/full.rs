//! Full disks: which commands work, and how space comes back.

use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::fixtures::START;
use crate::harness::yaml::field;
use crate::{fill_and_drain, record_len};
use beanstalkd::testing::Syncing;

/// Puts jobs until one is refused; returns how many were accepted.
fn fill(engine: &mut Instance, body: &str) -> u64 {
    let mut count = 0;
    while engine.put(body).is_some() {
        count += 1;
    }
    count
}

/// Deletes all jobs, of which each delete works, from files of 8192 bytes. Then their space is free.
fn delete_all(engine: &mut Instance, disk: &FakeDisk, count: u64) {
    for id in 1..=count {
        engine.delete(id);
    }
    engine.idle(100);
    assert!(engine.put("again").is_some(), "the space of deleted jobs is not free");
    assert!(disk.used() <= 2 * 8192);
}

/// The jobs that fit in C beanstalkd, which makes whole files only and keeps space for the delete of
/// each job in the same file.
fn jobs_that_c_takes(capacity: u64, file_size: u64, body: usize) -> u64 {
    (capacity / file_size) * ((file_size - 4) / (record_len("default", body) + 84))
}

#[test]
fn a_small_disk_holds_as_many_jobs_as_in_c() {
    const FILE_SIZE: u32 = 2 << 20;
    let policy = Policy::new(FILE_SIZE, Syncing::Never).with_max_job_size(65_535);
    // Space for one and a half files, two and a half, and exactly four.
    for (tenths, body) in [(16, 64), (16, 10_000), (24, 10_000), (40, 2_000), (40, 60_000)] {
        let capacity = u64::from(FILE_SIZE) * tenths / 10;
        let of_c = jobs_that_c_takes(capacity, FILE_SIZE.into(), body);
        let body = "x".repeat(body);
        let disk = FakeDisk::with_capacity(capacity);
        let mut engine = Instance::start(&disk, policy, START);
        let count = fill(&mut engine, &body);
        let case = format!("{capacity} bytes, bodies of {}", body.len());
        assert!(count * 100 >= of_c * 95, "{case}: {count} jobs, {of_c} in C");
        // After a kill on the full disk every delete works, and then puts do.
        let mut engine = Instance::start(&disk, policy, engine.now);
        assert_eq!(engine.recovered.jobs, count, "{case}");
        for id in 1..=count {
            assert_eq!(engine.ask(format!("delete {id}\r\n")), "DELETED\r\n", "{case}: {id}");
        }
        engine.idle(200);
        assert_eq!(disk.live_files().len(), 1, "{case}: {}", disk.names());
        let again = fill(&mut engine, &body);
        assert!(again * 100 >= of_c * 90, "{case}: {again} jobs the second time, {of_c} in C");
    }
}

#[test]
fn a_full_disk_refuses_puts_first_and_deletes_never() {
    for capacity in [6 * 8192, 10 * 8192, 50 * 8192 + 4096] {
        let disk = FakeDisk::with_capacity(capacity);
        let policy = Policy::synced(8192);
        let mut engine = Instance::start(&disk, policy, START);
        let count = fill(&mut engine, "0123456789");
        assert!(count > 20, "{count} jobs in {capacity} bytes");
        let before = engine.ask("stats\r\n");
        assert_eq!(engine.put("0123456789"), None);
        for key in ["current-jobs-ready", "total-jobs", "current-tubes"] {
            assert_eq!(field(&before, key), field(&engine.ask("stats\r\n"), key), "{key}");
        }
        // Some releases work; then the job stays reserved.
        assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        let mut releases = 0;
        loop {
            let reply = engine.ask("release 1 5 0\r\n");
            if reply == "OUT_OF_MEMORY\r\n" {
                break;
            }
            assert_eq!(reply, "RELEASED\r\n");
            releases += 1;
            assert!(releases < 100_000, "releases work without end");
            assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        }
        assert!(releases >= 20, "only {releases} releases");
        let job = engine.ask("stats-job 1\r\n");
        assert_eq!(field(&job, "state"), Some("reserved"));
        assert_eq!(field(&job, "releases").unwrap(), releases.to_string());
        engine.expect("bury 1 9\r\n", "OUT_OF_MEMORY\r\n");
        let job = engine.ask("stats-job 1\r\n");
        assert_eq!(
            (field(&job, "state"), field(&job, "buries"), field(&job, "pri")),
            (Some("reserved"), Some("0"), Some("5"))
        );
        delete_all(&mut engine, &disk, count);
    }
}

/// In its last record it is buried.
#[test]
fn no_job_that_was_taken_on_a_full_disk_is_flushed_by_a_later_start() {
    let disk = FakeDisk::with_capacity(20 * 8192);
    let policy = Policy::synced(8192);
    let mut engine = Instance::start(&disk, policy, START);
    let mut taken = Vec::new();
    for id in 1..=500 {
        assert_eq!(engine.put("x"), Some(id));
        engine.ask(format!("reserve-job {id}\r\nbury {id} 0\r\n"));
    }
    fill(&mut engine, "x");
    for id in 1..=500 {
        match engine.ask(format!("reserve-job {id}\r\n")).as_str() {
            "OUT_OF_MEMORY\r\n" => {}
            reply => {
                assert_eq!(reply, format!("RESERVED {id} 1\r\nx\r\n"));
                taken.push(id);
            }
        }
    }
    let count = taken.len();
    assert!((20..480).contains(&count), "{count} jobs were taken");
    disk.set_capacity(None);
    engine.expect("flush-buried default\r\n", &format!("FLUSHED {}\r\n", 500 - count));
    engine.close();
    let mut again = Instance::start(&disk, policy, engine.now);
    for id in taken {
        let found = again.ask(format!("peek {id}\r\n"));
        assert_eq!(found, format!("FOUND {id} 1\r\nx\r\n"));
    }
}

#[test]
fn a_kick_on_a_full_disk_counts_what_it_moved() {
    let disk = FakeDisk::with_capacity(40 * 8192);
    let policy = Policy::synced(8192);
    let mut engine = Instance::start(&disk, policy, START);
    let mut count = 0;
    while engine.ask("put 0 1000 9 1\r\nx\r\n").starts_with("INSERTED") {
        count += 1;
    }
    let mut kicked = 0;
    loop {
        let reply = engine.ask("kick 4294967295\r\n");
        if reply == "OUT_OF_MEMORY\r\n" {
            break;
        }
        let some: u64 = reply.trim().strip_prefix("KICKED ").unwrap().parse().unwrap();
        assert!(some > 0);
        kicked += some;
        assert_eq!(engine.stat("current-jobs-ready"), kicked);
        assert_eq!(engine.stat("current-jobs-delayed"), count - kicked);
    }
    assert!(kicked > 0 && kicked < count, "{kicked} of {count}");
    engine.expect("kick-job 1\r\n", "NOT_FOUND\r\n");
    let last = format!("kick-job {count}\r\n");
    assert_eq!(engine.ask(&last), "OUT_OF_MEMORY\r\n");
    let now = engine.now;
    let mut again = Instance::start(&disk, policy, now);
    assert_eq!(again.stat("current-jobs-ready"), kicked);
    assert_eq!(again.stat("current-jobs-delayed"), count - kicked);
}

/// A start must not take a block of its own, which would be missing for deletes later.
#[test]
fn starts_on_a_full_disk_take_no_space_from_deletes() {
    for (file_size, capacity) in [(8192, 10 * 8192), (65_536, 200_000), (1 << 20, 700_000)] {
        let policy = Policy::synced(file_size);
        let disk = FakeDisk::with_capacity(capacity);
        let mut engine = Instance::start(&disk, policy, START);
        let count = fill(&mut engine, "0123456789");
        assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        while engine.ask("release 1 5 0\r\n") == "RELEASED\r\n" {
            assert!(engine.ask("reserve-job 1\r\n").starts_with("RESERVED"));
        }
        // The newest first, so that no file is removed before the last jobs.
        for id in (1..=count).rev() {
            if id % 7 == 0 {
                engine = Instance::start(&disk, policy, engine.now);
            }
            let reply = engine.ask(format!("delete {id}\r\n"));
            assert_eq!(reply, "DELETED\r\n", "{id} of {count}, files of {file_size}");
        }
        let again = Instance::start(&disk, policy, engine.now);
        assert_eq!((again.recovered.jobs, again.recovered.last_id >= count), (0, true));
    }
}

#[test]
fn space_that_becomes_free_is_used() {
    let disk = FakeDisk::with_capacity(5 * 8192);
    let mut engine = Instance::start(&disk, Policy::synced(8192), START);
    let count = fill(&mut engine, "job");
    disk.set_capacity(Some(50 * 8192));
    assert!(engine.put("job").is_some());
    assert!(fill(&mut engine, "job") > count);
}

#[test]
fn a_full_disk_is_compacted_if_that_frees_space() {
    let disk = FakeDisk::with_capacity(12 * 8192);
    let mut engine = Instance::start(&disk, Policy::synced(8192), START);
    let count = fill(&mut engine, "job");
    // Every second job stays, so that no file is without one.
    for id in (1..=count).filter(|id| id % 2 != 0) {
        engine.delete(id);
    }
    engine.idle(100);
    let more = fill(&mut engine, "job");
    assert!(more > count / 4, "{more} jobs where there were {count}");
    assert_eq!(field(&engine.ask("stats-job 2\r\n"), "state"), Some("ready"));
}

#[test]
fn releases_on_a_small_full_disk_work_as_long_as_compaction_frees_their_records() {
    let disk = FakeDisk::with_capacity(3 * 8192);
    let mut engine = Instance::start(&disk, Policy::synced(8192), START);
    let count = fill(&mut engine, "0123456789");
    assert!(count > 20, "{count} jobs");
    for _ in 0..1000 {
        engine.ask("reserve-job 1\r\n");
        engine.expect("release 1 5 0\r\n", "RELEASED\r\n");
    }
    delete_all(&mut engine, &disk, count);
}

#[test]
fn space_comes_back_after_half_of_the_jobs_are_deleted() {
    // Deletes every second job of each file, or the newer half of the jobs.
    for is_first_half_kept in [false, true] {
        let disk = FakeDisk::with_capacity(6 << 20);
        let policy = Policy::new(1 << 20, Syncing::Never).with_max_job_size(2000);
        let mut engine = Instance::start(&disk, policy, START);
        let body = "x".repeat(1000);
        let count = fill(&mut engine, &body);
        for id in 1..=count {
            let is_deleted = if is_first_half_kept { id > count / 2 } else { id % 2 == 0 };
            if is_deleted {
                engine.delete(id);
            }
        }
        engine.idle(100);
        let more = fill(&mut engine, &body);
        let case = if is_first_half_kept { "the first half" } else { "every second one" };
        assert!(
            more > count / 3,
            "only {more} puts after half of {count} jobs were deleted; kept: {case}"
        );
        engine.expect("kick-job 1\r\n", "NOT_FOUND\r\n");
        engine.ask("reserve-job 1\r\n");
        engine.expect("release 1 5 0\r\n", "RELEASED\r\n");
    }
}

#[test]
fn a_file_is_at_most_a_64th_of_the_disk_if_records_fit() {
    for (capacity, max_job_size, expected) in [
        (1 << 30, 60_000, 1 << 20),
        (64 << 20, 60_000, 1 << 20),
        ((64 << 20) - 1, 60_000, 512 << 10),
        (1 << 20, 60_000, 64 << 10),
        (1 << 20, 1000, 16 << 10),
        (1 << 20, 1 << 20, 1 << 20),
    ] {
        let disk = FakeDisk::with_capacity(capacity);
        let policy = Policy::synced(1 << 20).with_max_job_size(max_job_size);
        let _engine = Instance::start(&disk, policy, START);
        let files = disk.live_files();
        let found = files.values().next().unwrap().len() as u64;
        assert_eq!(found, expected.min(capacity), "{capacity} bytes, bodies of {max_job_size}");
    }
}

/// Files would be smaller now, but the newest one has space in its last block.
#[test]
fn a_large_newest_file_is_continued_on_a_disk_that_other_programs_have_filled() {
    let policy = Policy::synced(1 << 20).with_max_job_size(2000);
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, policy, START);
    for _ in 0..300 {
        engine.put("x".repeat(1000)).unwrap();
    }
    let mut files = disk.live_files();
    files.retain(|name, _| name == "binlog.1");
    let newest = files.get_mut("binlog.1").unwrap();
    newest.truncate(newest.iter().rposition(|&byte| byte != 0).unwrap() + 1);
    let full = FakeDisk::with_files(&files);
    full.set_capacity(Some(full.used()));
    let mut again = Instance::start(&full, policy, engine.now);
    assert_eq!(again.recovered.jobs, 300);
    engine.expect("delete 1\r\n", "DELETED\r\n");
    again.expect("delete 1\r\n", "DELETED\r\n");
}

#[test]
fn a_limit_that_is_lower_than_before_refuses_puts_until_enough_is_deleted() {
    const LIMIT: u64 = 300_000;
    let disk = FakeDisk::default();
    let policy = Policy::synced(1 << 20).with_max_job_size(2000);
    let mut engine = Instance::start(&disk, policy, START);
    let body = "x".repeat(1000);
    for _ in 0..1000 {
        engine.put(&body).unwrap();
    }
    let limited = policy.with_limit(LIMIT);
    let first = Instance::start(&disk, limited, engine.now);
    let mut engine = Instance::start(&disk, limited, first.now);
    assert_eq!(engine.recovered.jobs, 1000);
    assert!(disk.used_by_binlog() < 1_400_000, "{}", disk.names());
    for id in 1..=1000 {
        if disk.used_by_binlog() > LIMIT {
            assert_eq!(engine.put(&body), None, "{id}: {}", disk.names());
        }
        engine.delete(id);
    }
    engine.idle(100);
    let again = fill(&mut engine, &body);
    assert!(again > 200, "only {again} jobs");
    assert!(disk.used_by_binlog() <= LIMIT, "{}", disk.names());
}

#[test]
fn a_full_disk_that_cannot_be_compacted_is_left_alone() {
    let policy = Policy::synced(1 << 20).with_max_job_size(10_000);
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, policy, START);
    let body = "x".repeat(9000);
    for id in 1..=150 {
        engine.put(&body).unwrap();
        if id > 44 {
            engine.delete(id);
        }
    }
    for capacity in (1_100_000..1_600_000).step_by(50_000) {
        let full = FakeDisk::with_files(&disk.live_files());
        full.set_capacity(Some(capacity));
        let Ok(mut again) = Instance::try_start(&full, policy, engine.now) else { continue };
        again.idle(50);
        let before = full.changes();
        again.idle(50);
        assert!(
            full.changes() - before <= 1,
            "{} changes on a disk of {capacity} bytes",
            full.changes() - before
        );
    }
}

#[test]
fn a_start_that_fails_for_lack_of_space_keeps_the_last_id() {
    let disk = FakeDisk::default();
    let policy = Policy::synced(8192);
    let mut engine = Instance::start(&disk, policy, START);
    let last = fill_and_drain(&mut engine);
    disk.set_capacity(Some(0));
    assert!(Instance::try_start(&disk, policy, engine.now).is_err(), "there is no space at all");
    disk.set_capacity(None);
    let mut again = Instance::start(&disk, policy, engine.now);
    assert_eq!(again.put("next"), Some(last + 1));
}

#[test]
fn space_that_becomes_free_after_a_start_on_a_full_disk_is_not_wasted() {
    let policy = Policy::synced(65_536);
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, policy, START);
    for _ in 0..900 {
        engine.put("x").unwrap();
    }
    let mut starts = 0;
    for capacity in (150_000..400_000).step_by(4096) {
        let image = FakeDisk::with_files(&disk.live_files());
        image.set_capacity(Some(capacity));
        let Ok(mut again) = Instance::try_start(&image, policy, engine.now) else { continue };
        starts += 1;
        image.set_capacity(None);
        let before = image.used();
        for _ in 0..8 {
            assert!(again.put("y".repeat(20_000)).is_some(), "capacity {capacity}");
        }
        assert!(image.used() <= before + 8 * 65_536, "capacity {capacity}: {}", image.used());
    }
    assert!(starts > 10, "only {starts} starts");
}

#[test]
fn deletes_work_on_a_disk_that_is_full_again_and_again() {
    for seed in 0..100 {
        let mut random = fastrand::Rng::with_seed(seed);
        let file_size = if random.bool() { 4096 } else { 16_384 };
        let policy = Policy::synced(file_size);
        let disk = FakeDisk::default();
        let mut engine = Instance::start(&disk, policy, START);
        disk.set_capacity(Some(u64::from(file_size) * random.u64(4..14)));
        let mut live = Vec::new();
        for step in 0..400 {
            let any = random.choice(&live).copied();
            match (random.u8(..10), any) {
                (0..=4, _) => {
                    let len = random.choice([0, 10, 300, 3000, 5000]).unwrap();
                    let before = engine.stat("total-jobs");
                    match engine.put("q".repeat(len)) {
                        Some(id) => live.push(id),
                        None => assert_eq!(engine.stat("total-jobs"), before),
                    }
                }
                (5 | 6, Some(id)) => {
                    let reply = engine.ask(format!("delete {id}\r\n"));
                    assert_eq!(reply, "DELETED\r\n", "seed {seed}, step {step}");
                    live.retain(|other| *other != id);
                }
                (7 | 8, Some(id)) => {
                    engine.ask(format!("reserve-job {id}\r\nrelease {id} 1 0\r\nbury {id} 1\r\n"));
                }
                _ => engine.idle(3),
            }
        }
        disk.set_capacity(None);
        let again = Instance::start(&disk, policy, engine.now);
        assert_eq!(again.recovered.jobs, live.len() as u64, "seed {seed}");
        drop(engine);
        // Compaction comes to an end.
        let mut engine = again;
        engine.idle(2_000);
        let rest = engine.server.next_due();
        assert!(rest.is_none_or(|due| due > engine.now), "seed {seed}: work is due without end");
    }
}
