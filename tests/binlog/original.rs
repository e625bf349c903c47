//! Files of C beanstalkd: versions 7 and 5.

use crate::disk_with_file;
use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::journal::View;
use crate::harness::yaml::field;
use beanstalkd::testing::Nanos;
use beanstalkd::testing::record::{self, Counts, Fields, Mark, RecordState};
use std::collections::BTreeMap;

/// The files of a fixture.
pub fn fixture(name: &str) -> FakeDisk {
    let directory =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
    let files = std::fs::read_dir(directory).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    });
    FakeDisk::with_files(&files.collect())
}

/// A job: state, tube, pri, delay, ttr, body and counts.
type Brief<'t> = (&'t str, &'t str, u32, u32, u32, &'t str, [u32; 5]);

fn check_jobs(engine: &mut Instance, expected: &[(u64, Brief<'_>)]) {
    for (id, (state, tube, pri, delay_secs, ttr_secs, body, counts)) in expected {
        let found = View::of(engine, *id).unwrap_or_else(|| panic!("job {id} is not there"));
        let expected = View {
            tube: (*tube).to_owned(),
            body: (*body).to_owned(),
            pri: *pri,
            delay_secs: *delay_secs,
            ttr_secs: *ttr_secs,
            state: (*state).to_owned(),
            due: found.due,
            counts: *counts,
        };
        assert_eq!(found, expected, "job {id}");
    }
}

/// A day in the year of the fixtures.
const FIXTURE_DAY: Nanos = Nanos::from_secs(1_796_000_000);

#[test]
#[cfg(target_endian = "little")]
fn files_of_c_beanstalkd_are_read() {
    let long = "x".repeat(2000);
    let jobs = [
        (1, ("ready", "first", 10, 0, 60, "ready", [0; 5])),
        (2, ("delayed", "first", 20, 4_000_000_000, 61, "delayed", [0; 5])),
        (3, ("buried", "first", 31, 0, 62, "buried", [1, 0, 0, 1, 0])),
        (5, ("delayed", "second-tube", 51, 4_000_000_000, 64, "released", [1, 0, 1, 0, 0])),
        (6, ("ready", "second-tube", 61, 0, 65, "kicked", [1, 0, 0, 1, 1])),
        (8, ("ready", "second-tube", 80, 0, 67, &long, [0; 5])),
    ];
    let policy = Policy::synced(8192);
    for name in ["c-1.12/records", "c-1.12/moved"] {
        let disk = fixture(name);
        let mut engine = Instance::start(&disk, policy, FIXTURE_DAY);
        // The body of job 7 is not text.
        assert_eq!(engine.recovered.jobs, 7);
        engine.expect("delete 7\r\n", "DELETED\r\n");
        check_jobs(&mut engine, &jobs);
        let highest = if name.ends_with("moved") { 68 } else { 8 };
        assert_eq!(engine.put("next"), Some(highest + 1));
        engine.ask(format!("delete {}\r\n", highest + 1));
        // The same from the files that this server has written.
        engine.ask("reserve-job 1\r\nrelease 1 11 0\r\n");
        engine.close();
        let mut again = Instance::start(&disk, policy, engine.now);
        assert_eq!(again.recovered.jobs, 6);
        check_jobs(&mut again, &jobs[1..]);
        let released = ("ready", "first", 11, 0, 60, "ready", [1, 0, 1, 0, 0]);
        check_jobs(&mut again, &[(1, released)]);
    }
}

/// A record of version 5. A short one has no tube.
pub fn record_v5(id: u64, tube: &str, state: u8, pri: u32, delay_secs: u64, body: &str) -> Vec<u8> {
    const SECOND_US: u64 = 1_000_000;
    let body = if tube.is_empty() || state == 0 { String::new() } else { format!("{body}\r\n") };
    let now_us = FIXTURE_DAY.as_nanos() / 1_000;
    let mut bytes = (tube.len() as u64).to_ne_bytes().to_vec();
    bytes.extend(tube.as_bytes());
    bytes.extend(id.to_ne_bytes());
    bytes.extend(pri.to_ne_bytes());
    bytes.extend([0xaa; 4]);
    bytes.extend((delay_secs * SECOND_US).to_ne_bytes());
    bytes.extend((90 * SECOND_US).to_ne_bytes());
    bytes.extend(i32::try_from(body.len()).unwrap().to_ne_bytes());
    bytes.extend([0xaa; 4]);
    bytes.extend((now_us - 5 * SECOND_US).to_ne_bytes());
    bytes.extend((now_us + delay_secs * SECOND_US).to_ne_bytes());
    for count in [1_u32, 2, 3, 4, 5] {
        bytes.extend(count.to_ne_bytes());
    }
    bytes.push(state);
    bytes.extend(body.as_bytes());
    bytes
}

#[test]
fn version_5_is_read_and_never_written() {
    let mut bytes = 5_i32.to_ne_bytes().to_vec();
    bytes.extend(record_v5(1, "old", 1, 10, 0, "ready"));
    bytes.extend(record_v5(2, "old", 4, 20, 1000, "delayed"));
    bytes.extend(record_v5(3, "old", 1, 30, 0, "buried"));
    bytes.extend(record_v5(3, "", 3, 31, 0, ""));
    bytes.extend(record_v5(4, "old", 1, 40, 0, "deleted"));
    bytes.extend(record_v5(4, "", 0, 40, 0, ""));
    bytes.extend(record_v5(5, "old", 2, 50, 0, "reserved"));
    bytes.extend(record_v5(9, "", 1, 50, 0, ""));
    bytes.resize(4096, 0);
    let counts = [1, 2, 3, 4, 5];
    let jobs = [
        (1, ("ready", "old", 10, 0, 90, "ready", counts)),
        (2, ("delayed", "old", 20, 1000, 90, "delayed", counts)),
        (3, ("buried", "old", 31, 0, 90, "buried", counts)),
        (5, ("ready", "old", 50, 0, 90, "reserved", counts)),
    ];
    let disk = FakeDisk::with_files(&BTreeMap::from([("binlog.4".to_owned(), bytes)]));
    let policy = Policy::synced(4096);
    let mut engine = Instance::start(&disk, policy, FIXTURE_DAY);
    assert_eq!(engine.recovered.jobs, 4);
    check_jobs(&mut engine, &jobs);
    let delayed = engine.ask("stats-job 2\r\n");
    assert_eq!((field(&delayed, "age"), field(&delayed, "time-left")), (Some("5"), Some("999")));
    assert_eq!(engine.put("next"), Some(10));
    engine.ask("delete 10\r\n");
    // Many short records, so that compaction moves all jobs.
    for _ in 0..200 {
        engine.ask("reserve-job 1\r\nrelease 1 10 0\r\n");
    }
    assert!(engine.stat("binlog-oldest-index") > 4, "the old file is still there");
    for bytes in disk.live_files().values() {
        assert_eq!(bytes[..4], 7_i32.to_ne_bytes());
    }
    let mut again = Instance::start(&disk, policy, engine.now);
    assert_eq!(again.recovered.jobs, 4);
    check_jobs(&mut again, &jobs[1..]);
}

#[test]
fn jobs_put_after_an_absurd_id_are_not_lost() {
    for id in [u64::MAX / 2, u64::MAX - (1 << 40), u64::MAX - 4] {
        let mut bytes = 5_i32.to_ne_bytes().to_vec();
        bytes.extend(record_v5(id, "old", 1, 10, 0, "absurd"));
        let disk = disk_with_file(bytes);
        let policy = Policy::synced(65_536);
        let mut engine = Instance::start(&disk, policy, FIXTURE_DAY);
        let ids = ["first", "second"].map(|body| engine.put(body).unwrap());
        let mut again = Instance::start(&disk, policy, engine.now);
        assert_eq!(again.recovered.jobs, 3);
        for id in ids {
            assert!(again.ask(format!("peek {id}\r\n")).starts_with("FOUND"), "{id}");
        }
        assert!(!ids.contains(&again.put("third").unwrap()));
    }
}

#[test]
fn job_counters_wrap_to_zero() {
    let mut bytes = 5_i32.to_ne_bytes().to_vec();
    bytes.extend(record_v5(1, "old", 1, 10, 0, "busy"));
    let counts_at = 4 + 8 + "old".len() + 56;
    bytes[counts_at..counts_at + 5 * 4].fill(0xff);
    let disk = disk_with_file(bytes);
    let mut engine = Instance::start(&disk, Policy::synced(4096), FIXTURE_DAY);
    engine.ask("reserve-job 1\r\nbury 1 10\r\nkick-job 1\r\nreserve-job 1\r\nrelease 1 10 0\r\n");
    assert_eq!(View::of(&mut engine, 1).unwrap().counts, [1, u32::MAX, 0, 0, 0]);
    engine.ask("reserve-job 1\r\n");
    engine.advance(Nanos::from_secs(90));
    assert_eq!(View::of(&mut engine, 1).unwrap().counts, [2, 0, 0, 0, 0]);
}

#[test]
fn due_times_of_version_5_beyond_version_7_stay_in_the_future() {
    let mut bytes = 5_i32.to_ne_bytes().to_vec();
    bytes.extend(record_v5(2, "old", 4, 20, 1000, "delayed"));
    let due_at = 4 + 8 + "old".len() + 48;
    bytes[due_at..due_at + 8].copy_from_slice(&i64::MAX.to_ne_bytes());
    bytes.extend(record_v5(1, "old", 1, 10, 0, "ready"));
    let disk = disk_with_file(bytes);
    let policy = Policy::synced(4096);
    let mut engine = Instance::start(&disk, policy, FIXTURE_DAY);
    // Many short records, so that compaction moves all jobs.
    for _ in 0..200 {
        engine.ask("reserve-job 1\r\nrelease 1 10 0\r\n");
    }
    assert!(engine.stat("binlog-oldest-index") > 1, "the old file is still there");
    let mut again = Instance::start(&disk, policy, engine.now);
    assert!(again.ask("stats-job 2\r\n").contains("\nstate: delayed\n"));
}

/// C moves the full record of a job to a newer file, and not the record of its key.
#[test]
fn the_key_of_a_job_that_c_has_moved_survives_the_next_starts() {
    // Compaction has no reason to move the job.
    let policy = Policy::synced(65_536);
    let body = "x".repeat(20_000) + "\r\n";
    let put = format!("put 7 0 60 20000 idp:key\r\n{body}");
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, policy, FIXTURE_DAY);
    engine.expect(&put, "INSERTED 1\r\n");
    engine.close();
    let mut files = disk.live_files();
    let fields = Fields {
        id: 1,
        pri: 7,
        delay_secs: 0,
        ttr_secs: 60,
        body_len: 20_002,
        created_at: FIXTURE_DAY,
        due_or_buried_at: Nanos::ZERO,
        counts: Counts::default(),
        state: RecordState::Ready,
        mark: Mark::None,
    };
    let mut moved = record::VERSION.to_vec();
    record::write(&mut moved, &fields, "default", body.as_bytes(), 0);
    moved.extend(body.as_bytes());
    let newest = files.keys().filter_map(|name| name.strip_prefix("binlog.")?.parse().ok()).max();
    let next: u32 = newest.unwrap_or(0) + 1;
    files.insert(format!("binlog.{next}"), moved);
    for _ in 0..3 {
        let disk = FakeDisk::with_files(&files);
        let mut engine = Instance::start(&disk, policy, FIXTURE_DAY);
        engine.expect(&put, "INSERTED 1 READY\r\n");
        engine.close();
        assert!(!disk.names().contains("binlog.1:"), "{}", disk.names());
        files = disk.live_files();
    }
}
