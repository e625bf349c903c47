//! Disk use: bounded by the live records, whatever is put and deleted.

use crate::harness::driver::{Nanos, Options, Syncing, damage};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::instance::Instance;
use crate::harness::request::{delete_all, put};
use crate::{record_len, start};

const fn synced_soon(file_size: u32) -> Options {
    Options::binlog(file_size, Syncing::Within(Nanos::from_millis(50)))
}

/// The most bytes of the files for these bytes of live records.
fn limit(live: u64, file_size: u32) -> u64 {
    3 * live + 2 * u64::from(file_size)
}

#[test]
fn a_job_released_a_million_times_does_not_grow_the_log() {
    let (disk, mut server) = start(synced_soon(65_536));
    assert_eq!(server.put("job"), Some(1));
    let live = record_len("default", 3);
    let turn = "reserve\r\nrelease 1 7 0\r\n".repeat(100);
    for _ in 0..10_000 {
        let reply = server.ask(&turn);
        assert!(reply.ends_with("RELEASED\r\n"));
        assert!(disk.take_peak() <= limit(live, 65_536));
    }
    let mut again = server.again_on(&disk, Options::binlog(65_536, Syncing::Never));
    assert_eq!(again.job(1, "releases pri").as_deref(), Some("1000000 7 job"));
}

/// Puts and deletes many jobs next to long-lived jobs, and checks disk use after each step.
fn churn(file_size: u32, long_lived: u64, body_len: usize, in_order: bool) {
    let (disk, mut server) = start(synced_soon(file_size));
    let mut random = fastrand::Rng::with_seed(body_len as u64);
    let body = "x".repeat(body_len);
    let each = record_len("default", body_len);
    let rounds = 40 * u64::from(file_size) / each + 1_000;
    let mut short_lived = std::collections::VecDeque::new();
    let mut live = 0;
    let mut needed = 0;
    for round in 0..rounds {
        let id = server.put(&body).expect("there is space");
        live += each;
        needed += each;
        // The long-lived jobs are spread over many files.
        if round.is_multiple_of(10) && round / 10 < long_lived {
            continue;
        }
        short_lived.push_back(id);
        if short_lived.len() > 20 {
            let index = if in_order { 0 } else { random.usize(..short_lived.len()) };
            let id = short_lived.remove(index).unwrap();
            server.delete(id);
            live -= each;
            needed += 84;
        }
        let peak = disk.take_peak();
        assert!(peak <= limit(live + each, file_size), "round {round}: {peak} for {live} live");
    }
    let written = disk.counts().bytes_written;
    assert!(written * 10 < needed * 28, "{written} bytes are written for records of {needed}");
    // Without jobs one file is enough.
    let ids: Vec<u64> = (1..=rounds).collect();
    for some in ids.chunks(50) {
        server.ask(delete_all(some.iter().copied()));
    }
    server.idle(200);
    assert_eq!(disk.live_files().len(), 1, "{:?}", disk.live_files().keys());
    assert!(disk.used() <= u64::from(file_size));
}

#[test]
fn disk_use_is_bounded_with_long_lived_jobs() {
    for in_order in [true, false] {
        churn(16_384, 0, 100, in_order);
        churn(16_384, 10, 100, in_order);
        churn(16_384, 200, 10, in_order);
        churn(16_384, 2_000, 50, in_order);
        churn(65_536, 150, 10, in_order);
        churn(65_536, 40, 3_000, in_order);
    }
}

/// Old jobs that nobody takes are not written again and again to reach the garbage behind them.
#[test]
fn old_jobs_stay_in_their_files() {
    const OLD: u64 = 600;
    let options = synced_soon(16_384);
    let (disk, mut server) = start(options);
    let body = "x".repeat(100);
    server.put_all(OLD, &body);
    let each = record_len("default", 100);
    for id in OLD + 1..OLD + 20_000 {
        server.put(&body);
        server.delete(id);
        assert!(disk.take_peak() <= limit((OLD + 1) * each, 16_384), "after job {id}");
    }
    // Some share a file with garbage.
    let moved = server.stat("binlog-records-migrated");
    assert!(moved < OLD / 4, "{moved} of {OLD} jobs were moved");
    let numbers: Vec<u32> = numbers(&disk);
    let (first, last) = (numbers[0], numbers[numbers.len() - 1]);
    assert!(last - first > 100, "no file was removed between older and newer ones: {numbers:?}");
    assert_eq!(damage(&mut disk.clone()), None);
    let mut again = server.again_on(&disk, options);
    assert_eq!(again.recovered.jobs, OLD);
    again.ask(put(0, 0, 9, "next"));
    assert_eq!(damage(&mut disk.clone()), None);
    // A file that no record names is missed.
    assert!(numbers.contains(&(first + 1)), "{numbers:?}");
    let mut files = disk.live_files();
    files.remove(&format!("binlog.{}", first + 1));
    let report = damage(&mut FakeDisk::with_files(&files)).expect("a file is lost");
    let expected = format!("damage: nothing between binlog.{first} and binlog.{}\n", first + 2);
    assert!(report.contains(&expected), "{report}");
}

/// The record of a kept key may be the last of a file, and that of the delete the first of the next one, behind
/// the gaps.
#[test]
fn kept_keys_survive_beside_gaps() {
    let options = Options::synced(4096);
    let (disk, mut server) = start(options);
    server.put_all(100, "x".repeat(200));
    let put = |number: usize| {
        let body = "x".repeat(number * 7 % 100);
        format!("put 0 0 9 {} idp:key-{number}:3600\r\n{body}\r\n", body.len())
    };
    for number in 0..600 {
        let id = 101 + number;
        server.expect(put(number), &format!("INSERTED {id}\r\n"));
        server.ask(format!("delete {id}\r\n"));
        let mut again = server.after_crash(options);
        let reply = again.ask(put(number));
        assert!(reply.starts_with(&format!("INSERTED {id} ")), "key {number}: {reply}");
    }
    assert!(gaps(&disk) > 0, "there is no gap: {:?}", numbers(&disk));
}

/// Every second file loses all of its jobs at once. Only some of these files leave before older ones.
#[test]
fn the_number_of_gaps_is_bounded() {
    let options = Options::synced(4096);
    let (disk, mut server) = start(options);
    // A file has one of them.
    let body = "x".repeat(2_500);
    let mut short_lived = Vec::new();
    for _ in 0..60 {
        assert!(server.put(&body).is_some());
        short_lived.push(server.put(&body).unwrap());
    }
    server.ask(delete_all(short_lived));
    server.idle(200);
    let gaps = gaps(&disk);
    assert!((10..=32).contains(&gaps), "{gaps} gaps: {:?}", numbers(&disk));
    let live = 60 * record_len("default", 2_500);
    assert!(disk.used() <= limit(live, 4096), "{}", disk.used());
    put_and_delete(&mut server);
    assert_eq!(damage(&mut disk.clone()), None);
    assert_eq!(server.again_on(&disk, options).recovered.jobs, 60);
}

/// C beanstalkd logs each missing file at its start.
#[test]
fn files_leave_before_older_ones_only_as_long_as_their_numbers_are_near() {
    let options = Options::synced(4096);
    let (disk, mut server) = start(options);
    let body = "x".repeat(1_000);
    server.put_all(100, &body);
    let mut most = 0;
    for round in 0..4_000 {
        let id = server.put(&body).unwrap();
        server.delete(id);
        if round % 20 == 0 {
            let numbers = numbers(&disk);
            most = most.max(numbers[numbers.len() - 1] - numbers[0]);
        }
    }
    assert!((900..1_100).contains(&most), "{most} numbers");
}

/// The deletes of flushed jobs count only with the record of the flush, so it stays as long as their file.
#[test]
fn the_record_of_a_flush_stays_as_long_as_its_jobs() {
    let options = Options::synced(4096);
    for restarts in [false, true] {
        let (disk, mut server) = start(options);
        // There is too little garbage to empty the oldest file.
        server.ask(
            "put-in-tube t 5 0 9 5\r\nfirst\r\nput-in-tube t 9 0 9 7\r\nflushed\r\ndelete 1\r\n",
        );
        server.put_all(100, "x".repeat(200));
        put_and_delete(&mut server);
        // A flush frees first the jobs that came in order: their deletes fill the file with its record.
        server.ask("put-in-tube t 10 0 9 7\r\nflushed\r\n".repeat(60));
        server.ask("flush-tube t\r\n");
        if restarts {
            server = server.again_on(&disk, options);
        }
        put_and_delete(&mut server);
        let numbers = numbers(&disk);
        assert!(numbers[0] == 1 && numbers[numbers.len() - 1] > 20, "{numbers:?}");
        assert_eq!(server.again_on(&disk, options).recovered.jobs, 100);
    }
}

fn put_and_delete(server: &mut Instance) {
    for _ in 0..500 {
        let id = server.put("short-lived").unwrap();
        server.delete(id);
    }
}

/// It takes several steps, one in each iteration.
#[test]
fn an_idle_server_frees_the_space_of_removed_files() {
    let (disk, mut server) = start(Options::synced(4096));
    disk.faults().cuts_left = 10;
    assert!(server.put("job").is_some());
    server.idle(20);
    assert_eq!(disk.faults().cuts_left, 0);
}

/// The number of gaps in the numbers of files.
fn gaps(disk: &FakeDisk) -> usize {
    numbers(disk).windows(2).filter(|pair| pair[1] - pair[0] > 1).count()
}

/// The numbers of all files in ascending order.
fn numbers(disk: &FakeDisk) -> Vec<u32> {
    let files = disk.live_files();
    let numbers = files.keys().map(|name| name.trim_start_matches("binlog.").parse().unwrap());
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    numbers
}

#[test]
fn compaction_for_a_burst_is_shared_among_iterations() {
    const SHARE: u64 = 2 << 20;
    let (disk, mut server) = start(Options::binlog(1 << 20, Syncing::Never));
    let body = "b".repeat(20_000);
    let mut ids: Vec<u64> = (0..2_000).map(|_| server.put(&body).unwrap()).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut ids);
    let deletes = delete_all(ids[..1_500].iter().copied());
    let mut most = 0;
    let mut before = disk.counts().bytes_written;
    let client = server.client;
    server.receive(client, deletes);
    while server.is_busy() {
        server.iterate();
        most = most.max(disk.counts().bytes_written - before);
        before = disk.counts().bytes_written;
    }
    let moved = server.stat("binlog-records-migrated") * 20_000;
    assert!(moved > 2 * SHARE, "only {moved} bytes were moved");
    assert!(most <= SHARE + 200_000, "{most} bytes in one iteration");
    assert_eq!(server.stat("current-jobs-ready"), 500);
}

/// A file with several of them would be too long to be read after 4 GiB, and could not be emptied on a small disk.
#[test]
fn each_job_larger_than_a_file_has_one_of_its_own() {
    let options = Options::synced(4096);
    let (disk, mut server) = start(options);
    let body = "y".repeat(100_000);
    for round in 0..20 {
        let id = server.put(&body).unwrap();
        if round < 15 {
            server.put("small").unwrap();
            server.delete(id);
        }
        let lens: Vec<usize> = disk.live_files().values().map(Vec::len).collect();
        assert!(lens.iter().all(|&len| len < 110_000), "round {round}: {lens:?}");
        let live = if round < 15 { 3 } else { round - 12 };
        assert!(disk.used() <= limit(live * record_len("default", 100_000), 4096));
    }
    let mut again = Instance::start(&disk, options, server.now);
    assert_eq!(again.ask("peek 35\r\n"), format!("FOUND 35 100000\r\n{body}\r\n"));
    assert_eq!(again.recovered.jobs, 20);
}
