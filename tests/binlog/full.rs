//! Full disks: which commands work, and how space comes back. Disks that fail: what is fatal, and what
//! is retried.

use crate::harness::driver::{End, Nanos, Options, START, Syncing};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::instance::Instance;
use crate::harness::reply::numbers;
use crate::harness::yaml::field;
use crate::start;
use crate::{fill_and_drain, record_len};
use std::io::ErrorKind;
use std::num::NonZero;

const SMALL_FILES: Options = Options::synced(8192);
const LARGE_FILES: Options = Options::synced(1 << 20).with_max_job_size(2000);
const UNSYNCED: Options = Options::binlog(1 << 20, Syncing::Never).with_max_job_size(2000);
const BODY: &str = "0123456789";

/// Puts jobs until one is refused; returns how many were accepted.
fn fill(server: &mut Instance, body: &str) -> u64 {
    let count = (0..100_000).take_while(|_| server.put(body).is_some()).count() as u64;
    assert!(count < 100_000, "puts work without end");
    count
}

/// Fills a disk of this size; returns it, the server, and the number of jobs.
fn start_and_fill(capacity: u64, options: Options, body: &str) -> (FakeDisk, Instance, u64) {
    let disk = FakeDisk::with_capacity(capacity);
    let mut server = Instance::start(&disk, options, START);
    let count = fill(&mut server, body);
    assert!(count > 20, "{count} jobs in {capacity} bytes");
    (disk, server, count)
}

/// Deletes all jobs, of which each delete works, from files of 8192 bytes. Then their space is free.
fn delete_all(server: &mut Instance, disk: &FakeDisk, count: u64) {
    (1..=count).for_each(|id| server.delete(id));
    server.idle(100);
    assert!(server.put("again").is_some(), "the space of deleted jobs is not free");
    assert!(disk.used() <= 2 * 8192);
}

/// Reserves and releases job 1 until that is refused, and returns how often it worked. The job stays
/// reserved.
fn release_until_refused(server: &mut Instance) -> u32 {
    for count in 0..100_000 {
        server.ask("reserve-job 1\r\n");
        match &*server.ask("release 1 5 0\r\n") {
            "OUT_OF_MEMORY\r\n" => return count,
            reply => assert_eq!(reply, "RELEASED\r\n"),
        }
    }
    panic!("releases work without end");
}

/// The jobs that fit in C beanstalkd, which makes whole files only and keeps space for the delete of
/// each job in the same file.
fn jobs_that_c_takes(capacity: u64, file_size: u64, body: usize) -> u64 {
    (capacity / file_size) * ((file_size - 4) / (record_len("default", body) + 84))
}

#[test]
fn a_small_disk_holds_as_many_jobs_as_in_c() {
    const FILE_SIZE: u32 = 2 << 20;
    let options = Options::binlog(FILE_SIZE, Syncing::Never).with_max_job_size(65_535);
    // Space for one and a half files, two and a half, and exactly four.
    for (tenths, body) in [(16, 64), (16, 10_000), (24, 10_000), (40, 2_000), (40, 60_000)] {
        let capacity = u64::from(FILE_SIZE) * tenths / 10;
        let of_c = jobs_that_c_takes(capacity, FILE_SIZE.into(), body);
        let body = "x".repeat(body);
        let (disk, server, count) = start_and_fill(capacity, options, &body);
        let case = format!("{capacity} bytes, bodies of {}", body.len());
        assert!(count * 100 >= of_c * 95, "{case}: {count} jobs, {of_c} in C");
        // After a kill on the full disk every delete works, and then puts do.
        let mut server = server.again_on(&disk, options);
        assert_eq!(server.recovered.jobs, count, "{case}");
        (1..=count).for_each(|id| server.delete(id));
        server.idle(200);
        assert_eq!(disk.live_files().len(), 1, "{case}: {}", disk.names());
        let again = fill(&mut server, &body);
        assert!(again * 100 >= of_c * 90, "{case}: {again} jobs the second time, {of_c} in C");
    }
}

#[test]
fn a_full_disk_refuses_puts_first_and_deletes_never() {
    for capacity in [6 * 8192, 10 * 8192, 50 * 8192 + 4096] {
        let (disk, mut server, count) = start_and_fill(capacity, SMALL_FILES, BODY);
        let before = server.ask("stats\r\n");
        assert_eq!(server.put(BODY), None);
        for key in ["current-jobs-ready", "total-jobs", "current-tubes"] {
            assert_eq!(field(&before, key), field(&server.ask("stats\r\n"), key), "{key}");
        }
        // Some releases work; then the job stays reserved.
        let releases = release_until_refused(&mut server);
        assert!(releases >= 20, "only {releases} releases");
        server.expect("bury 1 9\r\n", "OUT_OF_MEMORY\r\n");
        let job = server.job(1, "state releases buries pri");
        assert_eq!(job.unwrap(), format!("reserved {releases} 0 5 0123456789"));
        delete_all(&mut server, &disk, count);
    }
}

/// Without space for the record of the bury it is ready, and its next return counts.
#[test]
fn a_job_that_comes_back_too_often_is_buried_when_there_is_space() {
    let mut options = SMALL_FILES;
    options.settings.bury_after = NonZero::new(1);
    let (disk, mut server, _) = start_and_fill(6 * 8192, options, BODY);
    release_until_refused(&mut server);
    for state in ["ready", "buried"] {
        let [worker] = server.clients();
        server.send(worker, "reserve-job 2\r\n");
        server.end(worker, End::HangUp);
        server.settle();
        assert_eq!(field(&server.ask("stats-job 2\r\n"), "state"), Some(state));
        disk.faults().capacity = None;
    }
}

/// A kick that has space for some of the jobs kicks these.
#[test]
fn a_kick_on_a_full_disk_counts_the_jobs_that_it_has_kicked() {
    let disk = FakeDisk::with_capacity(6 * 8192);
    let mut server = Instance::start(&disk, SMALL_FILES, START);
    let put = "put 0 900 9 1\r\nx\r\n";
    let count = (0..10_000).take_while(|_| server.ask(put) != "OUT_OF_MEMORY\r\n").count();
    let kicked = numbers(&server.ask("kick 10000\r\n"), "KICKED ")[0];
    assert!((1..count as u64).contains(&kicked), "{kicked} of {count} jobs");
    assert_eq!(server.facts().ready, kicked);
    server.expect("kick 10000\r\n", "OUT_OF_MEMORY\r\n");
}

/// In its last record it is buried.
#[test]
fn no_job_that_was_taken_on_a_full_disk_is_flushed_by_a_later_start() {
    let disk = FakeDisk::with_capacity(20 * 8192);
    let mut server = Instance::start(&disk, SMALL_FILES, START);
    for id in 1..=500 {
        assert_eq!(server.put("x"), Some(id));
        server.ask(format!("reserve-job {id}\r\nbury {id} 0\r\n"));
    }
    fill(&mut server, "x");
    let is_taken = |id: &u64| match server.ask(format!("reserve-job {id}\r\n")).as_str() {
        "OUT_OF_MEMORY\r\n" => false,
        reply => reply == format!("RESERVED {id} 1\r\nx\r\n"),
    };
    let taken: Vec<u64> = (1..=500).filter(is_taken).collect();
    let count = taken.len();
    assert!((20..480).contains(&count), "{count} jobs were taken");
    disk.faults().capacity = None;
    server.expect("flush-buried default\r\n", &format!("FLUSHED {}\r\n", 500 - count));
    server.close();
    let mut again = server.again_on(&disk, SMALL_FILES);
    for id in taken {
        again.expect(format!("peek {id}\r\n"), &format!("FOUND {id} 1\r\nx\r\n"));
    }
}

/// The size of files, and a few of them.
const SIZES: [(u32, u64); 3] = [(8192, 10 * 8192), (65_536, 150_000), (1 << 20, 250_000)];

/// A start must not take a block of its own, which would be missing for deletes later.
#[test]
fn starts_on_a_full_disk_take_no_space_from_deletes() {
    for (file_size, capacity) in SIZES {
        let options = Options::synced(file_size);
        let (disk, mut server, count) = start_and_fill(capacity, options, BODY);
        release_until_refused(&mut server);
        // The newest first, so that no file is removed before the last jobs.
        for id in (1..=count).rev() {
            if id % 7 == 0 {
                server = server.again_on(&disk, options);
            }
            server.delete(id);
        }
        let again = server.again_on(&disk, options);
        assert_eq!((again.recovered.jobs, again.recovered.last_id >= count), (0, true));
    }
}

/// A `delete-batch` whose first delete is refused deletes nothing. Behind others, a refused one is among those that
/// are not deleted, and the rest follows. The key that is kept takes a record of its own.
#[test]
fn a_delete_that_is_refused_in_a_batch_ends_no_other() {
    let (disk, mut server) = start(SMALL_FILES);
    // Together the records leave room for two more in the first block of the file.
    for (keys, len) in [("", 1), (" idp:a:60", 1), ("", 3475)] {
        server.ask(format!("put 0 0 9 {len}{keys}\r\n{}\r\n", "x".repeat(len)));
    }
    server.close();
    disk.faults().capacity = Some(4096);
    let mut server = server.again_on(&disk, SMALL_FILES);
    server.expect("delete-batch 1 2 3\r\n", "DELETED_BATCH 2 1\r\n");
    server.expect("delete-batch 2 1\r\n", "OUT_OF_MEMORY\r\n");
    disk.faults().capacity = None;
    server.expect("delete-batch 1 2 3\r\n", "DELETED_BATCH 1 2\r\n");
}

/// A damaged file cannot be continued, so there may be no space for the deletes of all jobs.
#[test]
fn a_start_does_not_exceed_a_limit_that_its_files_do_not_exceed() {
    let mut starts = 0;
    for (file_size, limit) in SIZES {
        let options = Options::synced(file_size).with_limit(limit);
        let (disk, mut server) = start(options);
        fill(&mut server, BODY);
        release_until_refused(&mut server);
        let files = disk.live_files();
        for (name, bytes) in &files {
            let used = bytes.iter().rposition(|&byte| byte != 0).unwrap();
            let mut files = files.clone();
            files.get_mut(name).unwrap()[used / 2] ^= 1;
            let damaged = FakeDisk::with_files(&files);
            let Ok(mut again) = Instance::try_start(&damaged, options, server.now) else {
                continue;
            };
            again.idle(10);
            let peak = damaged.take_peak();
            assert!(peak <= limit, "{peak} bytes after damage of {name}, with a limit of {limit}");
            starts += 1;
        }
    }
    assert!(starts > 10, "only {starts} starts");
}

/// The start keeps the limit, and leaves too little room for deletes. They go beyond it, and free more than that.
#[test]
fn deletes_work_after_a_start_with_a_limit_of_what_the_files_take() {
    const JOBS: u64 = 300;
    let (disk, mut server) = start(LARGE_FILES);
    server.put_all(JOBS, "x".repeat(100));
    server.close();
    let limit = disk.used_by_binlog();
    let mut server = server.again_on(&disk, LARGE_FILES.with_limit(limit));
    assert_eq!(server.recovered.jobs, JOBS);
    assert_eq!(disk.used_by_binlog(), limit);
    for id in 1..=JOBS {
        assert_eq!(server.put("x"), None, "a put before the delete of {id}");
        server.delete(id);
    }
    server.idle(100);
    assert!(server.put("x").is_some());
    assert!(disk.used_by_binlog() <= limit, "{}", disk.names());
}

/// C beanstalkd leaves space for the delete of each job, and no more.
#[test]
fn space_comes_back_on_a_disk_that_was_full_at_the_start() {
    const FILE_SIZE: u32 = 65_536;
    const JOBS: u64 = 4_000;
    let options = Options::binlog(FILE_SIZE, Syncing::Never).with_max_job_size(2000);
    for buried in [101, 20, 5] {
        let (disk, mut server) = start(options);
        for id in 1..=JOBS {
            assert!(server.put("x".repeat(800)).is_some());
            if id % buried == 0 {
                server.ask(format!("reserve-job {id}\r\n"));
                server.expect(format!("bury {id} 1\r\n"), "BURIED\r\n");
            }
        }
        server.close();
        let deletes = (JOBS * 84).next_multiple_of(4096) + 4096;
        disk.faults().capacity = Some(used_by_records(&disk) + deletes);
        let mut server = server.again_on(&disk, options);
        assert_eq!(server.put("x"), None, "the disk is not full");
        (1..=JOBS).filter(|id| id % buried != 0).for_each(|id| server.delete(id));
        server.idle(1_000);
        let live = JOBS / buried * 900;
        let (used, case) = (disk.used_by_binlog(), format!("every {buried}th job is buried"));
        assert!(server.put("x").is_some(), "{case}: puts are refused with {used} bytes of files");
        assert!(used < 3 * live + 3 * u64::from(FILE_SIZE), "{case}: {used} bytes for {live}");
    }
}

/// Returns the bytes of the blocks that the records take.
fn used_by_records(disk: &FakeDisk) -> u64 {
    let files = disk.live_files();
    let used = files.values().map(|bytes| bytes.iter().rposition(|&byte| byte != 0).unwrap_or(0));
    used.map(|last| (last as u64 + 1).next_multiple_of(4096)).sum()
}

#[test]
fn releases_on_a_small_full_disk_work_as_long_as_compaction_frees_their_records() {
    let (disk, mut server, count) = start_and_fill(3 * 8192, SMALL_FILES, BODY);
    for _ in 0..1000 {
        server.ask("reserve-job 1\r\n");
        server.expect("release 1 5 0\r\n", "RELEASED\r\n");
    }
    delete_all(&mut server, &disk, count);
}

/// Deletes every second job of each file, the newer half of the jobs, or every third job of each file when releases
/// have used what they may: that leaves enough to empty a file. In the last case a limit leaves space for few jobs of
/// the largest size, and some jobs of each file are deleted.
#[test]
fn space_comes_back_after_half_or_a_third_of_the_jobs_is_deleted() {
    type IsDeleted = fn(u64, u64) -> bool;
    let few_large = UNSYNCED.with_max_job_size(1 << 20).with_limit(8 << 20);
    let cases: [(u64, Options, usize, bool, IsDeleted, u64); 5] = [
        (6 << 20, UNSYNCED, 1000, false, |id, _| id % 2 == 0, 3),
        (6 << 20, UNSYNCED, 1000, false, |id, count| id > count / 2, 3),
        (12 * 8192, SMALL_FILES, 3, false, |id, _| id % 2 == 0, 4),
        (6 << 20, UNSYNCED, 1000, true, |id, _| id % 3 == 0, 5),
        (1 << 30, few_large, 6_000, false, |id, _| id * 40_503 % 65_536 < 32_768, 3),
    ];
    for (case, (capacity, options, body_len, releases, is_deleted, part)) in (1..).zip(cases) {
        let body = "x".repeat(body_len);
        let (_, mut server, count) = start_and_fill(capacity, options, &body);
        if releases {
            release_until_refused(&mut server);
        }
        (1..=count).filter(|&id| is_deleted(id, count)).for_each(|id| server.delete(id));
        server.idle(1_000);
        let more = fill(&mut server, &body);
        assert!(more > count / part, "case {case}: {more} puts when some of {count} jobs are gone");
        server.expect("kick-job 1\r\n", "NOT_FOUND\r\n");
        server.ask("reserve-job 1\r\n");
        server.expect("release 1 5 0\r\n", "RELEASED\r\n");
    }
}

/// The live jobs of one old file fit in no free space, but those of another do.
#[test]
fn space_comes_back_out_of_any_large_file_on_a_small_disk() {
    let (disk, mut server) = start(UNSYNCED);
    let body = "x".repeat(1000);
    server.put_all(5_000, &body);
    server.close();
    disk.faults().capacity = Some(disk.used() + (1 << 20));
    let mut server = server.again_on(&disk, UNSYNCED);
    fill(&mut server, &body);
    // All of these are in one file but for a few: half of it is live, and of the older ones nearly all.
    (1_900..2_900).filter(|id| id % 10 > 0).for_each(|id| server.delete(id));
    (1..1_900).step_by(10).for_each(|id| server.delete(id));
    server.idle(1_000);
    let more = fill(&mut server, &body);
    assert!(more > 500, "{more} puts after 900 jobs of one file were deleted");
}

/// And at most a 32nd in any case, unless that is very small.
#[test]
fn a_file_is_at_most_a_64th_of_the_disk_if_records_fit() {
    for (capacity, max_job_size, expected) in [
        (1 << 30, 60_000, 1 << 20),
        (64 << 20, 60_000, 1 << 20),
        ((64 << 20) - 1, 60_000, 512 << 10),
        (2 << 20, 60_000, 64 << 10),
        (1 << 20, 60_000, 32 << 10),
        (1 << 20, 1000, 16 << 10),
        (64 << 20, 1 << 20, 1 << 20),
        (16 << 20, 1 << 20, 512 << 10),
        (1 << 20, 1 << 20, 32 << 10),
    ] {
        let disk = FakeDisk::with_capacity(capacity);
        let options = Options::synced(1 << 20).with_max_job_size(max_job_size);
        let _server = Instance::start(&disk, options, START);
        let files = disk.live_files();
        let found = files.values().next().unwrap().len() as u64;
        assert_eq!(found, expected, "{capacity} bytes, bodies of {max_job_size}");
    }
}

// ---- Starts on a full disk ----

/// Files would be smaller now, but the newest one has space in its last block.
#[test]
fn a_large_newest_file_is_continued_on_a_disk_that_other_programs_have_filled() {
    let (disk, mut server) = start(LARGE_FILES);
    server.put_all(300, "x".repeat(1000));
    let mut files = disk.live_files();
    files.retain(|name, _| name == "binlog.1");
    let newest = files.get_mut("binlog.1").unwrap();
    newest.truncate(newest.iter().rposition(|&byte| byte != 0).unwrap() + 1);
    let full = FakeDisk::with_files(&files);
    full.faults().capacity = Some(full.used());
    let mut again = server.again_on(&full, LARGE_FILES);
    assert_eq!(again.recovered.jobs, 300);
    server.delete(1);
    again.delete(1);
}

/// Its intact jobs must leave it before.
#[test]
fn a_damaged_newest_file_is_not_continued_on_a_full_disk() {
    let (disk, mut server) = start(LARGE_FILES);
    server.put_all(300, "x".repeat(1000));
    server.close();
    disk.flip_byte("binlog.1", "xxx");
    let files = disk.live_files();
    disk.faults().capacity = Some(disk.used());
    assert!(Instance::try_start(&disk, LARGE_FILES, server.now).is_err());
    assert!(disk.live_files() == files, "the files have changed");
}

#[test]
fn a_file_without_jobs_that_is_continued_on_a_full_disk_is_not_removed() {
    let (disk, mut server) = start(LARGE_FILES);
    let last = fill_and_drain(&mut server);
    server.close();
    disk.faults().capacity = Some(disk.used());
    let mut again = server.again_on(&disk, LARGE_FILES);
    again.idle(10);
    disk.faults().capacity = None;
    again.advance(Nanos::from_secs(1));
    assert_eq!(again.put("next"), Some(last + 1));
}

/// All jobs are deleted, or some of each file stay.
#[test]
fn a_limit_that_is_lower_than_before_refuses_puts_until_enough_is_deleted() {
    const LIMIT: u64 = 300_000;
    for (file_size, deleted_of_10, least) in [(1 << 20, 10, 200), (64 * 1024, 9, 50)] {
        let options = Options::synced(file_size).with_max_job_size(2000);
        let (disk, mut server) = start(options);
        let body = "x".repeat(1000);
        server.put_all(1000, &body);
        let limited = options.with_limit(LIMIT);
        let first = server.again_on(&disk, limited);
        let mut server = first.again_on(&disk, limited);
        assert_eq!(server.recovered.jobs, 1000);
        assert!(disk.used_by_binlog() < 1_400_000, "{}", disk.names());
        let most = disk.used_by_binlog() + 64 * 1024;
        disk.take_peak();
        for id in (1..=1000).filter(|id| id % 10 < deleted_of_10) {
            if disk.used_by_binlog() > LIMIT {
                assert_eq!(server.put(&body), None, "{id}: {}", disk.names());
            }
            server.delete(id);
        }
        server.idle(1000);
        let peak = disk.take_peak();
        assert!(disk.used_by_binlog() < LIMIT && peak <= most, "{peak}: {}", disk.names());
        let again = fill(&mut server, &body);
        assert!(again > least, "only {again} jobs");
        assert!(disk.used_by_binlog() <= LIMIT, "{}", disk.names());
    }
}

#[test]
fn a_full_disk_that_cannot_be_compacted_is_left_alone() {
    let options = Options::synced(1 << 20).with_max_job_size(10_000);
    let (disk, mut server) = start(options);
    for id in 1..=150 {
        server.put_all(1, "x".repeat(9000));
        if id > 44 {
            server.delete(id);
        }
    }
    for capacity in (1_100_000..1_600_000).step_by(50_000) {
        let full = FakeDisk::with_files(&disk.live_files());
        full.faults().capacity = Some(capacity);
        let Ok(mut again) = Instance::try_start(&full, options, server.now) else { continue };
        again.idle(50);
        let before = full.counts().changes;
        again.idle(50);
        let changes = full.counts().changes - before;
        assert!(changes <= 1, "{changes} changes on a disk of {capacity} bytes");
    }
}

#[test]
fn a_start_that_fails_for_lack_of_space_keeps_the_last_id() {
    let (disk, mut server) = start(SMALL_FILES);
    let last = fill_and_drain(&mut server);
    disk.faults().capacity = Some(0);
    let started = Instance::try_start(&disk, SMALL_FILES, server.now);
    assert!(started.is_err(), "there is no space at all");
    disk.faults().capacity = None;
    assert_eq!(server.again_on(&disk, SMALL_FILES).put("next"), Some(last + 1));
}

#[test]
fn space_that_becomes_free_after_a_start_on_a_full_disk_is_not_wasted() {
    let options = Options::synced(65_536);
    let (disk, mut server) = start(options);
    server.put_all(900, "x");
    let mut starts = 0;
    for capacity in (150_000..400_000).step_by(4096) {
        let image = FakeDisk::with_files(&disk.live_files());
        image.faults().capacity = Some(capacity);
        let Ok(mut again) = Instance::try_start(&image, options, server.now) else { continue };
        starts += 1;
        image.faults().capacity = None;
        let before = image.used();
        again.put_all(8, "y".repeat(20_000));
        assert!(image.used() <= before + 8 * 65_536, "capacity {capacity}: {}", image.used());
    }
    assert!(starts > 10, "only {starts} starts");
}

// ---- Disks that fail ----

/// A prepared file, and files of jobs that are deleted.
#[test]
fn a_file_that_cannot_be_removed_is_tried_again_later() {
    for jobs in [10, 100] {
        let (disk, mut server) = start(Options::binlog(16384, Syncing::Never));
        server.put_all(jobs, "x".repeat(1000));
        (1..=jobs).for_each(|id| _ = server.ask_now(format!("delete {id}\r\n")));
        disk.faults().removals_fail = true;
        for _ in 0..2 {
            server.advance(Nanos::from_secs(25));
            let next = server.next_due();
            assert!(next.is_some_and(|due| due > server.now), "it is retried at {next:?}");
        }
        disk.faults().removals_fail = false;
        server.advance(Nanos::from_secs(80));
        server.idle(20);
        assert_eq!(disk.live_files().len(), 1);
    }
}

#[test]
fn a_failed_truncate_is_fatal_unless_space_or_permission_is_missing() {
    let puts_until_failure = |error: ErrorKind| {
        let (disk, mut server) = start(Options::binlog(8192, Syncing::Never));
        disk.faults().cut_error = Some(error);
        (0..200).find(|_| server.try_ask("put 0 0 9 3\r\njob\r\n").is_none())
    };
    assert_eq!(puts_until_failure(ErrorKind::StorageFull), None);
    assert_eq!(puts_until_failure(ErrorKind::PermissionDenied), None);
    assert!(puts_until_failure(ErrorKind::Other).is_some());
}
