//! Files of C beanstalkd: versions 7 and 5.

use crate::disk_with_file;
use crate::harness::driver::{Nanos, Options};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::instance::Instance;
use crate::harness::record::{
    BURIED, DELAYED, DELETED, READY, RESERVED, Record, VERSION_5, VERSION_7,
};
use crate::harness::yaml::{COUNTS, field};

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

/// Compares state, tube, pri, delay, ttr, counts and body of jobs.
fn check_jobs(server: &mut Instance, expected: &[(u64, &str)]) {
    for (id, expected) in expected {
        let found = server.job(*id, &format!("state tube pri delay ttr {COUNTS}"));
        assert_eq!(found.as_deref(), Some(*expected), "job {id}");
    }
}

/// A day in the year of the fixtures.
pub const FIXTURE_DAY: Nanos = Nanos::from_secs(1_796_000_000);
const OPTIONS: Options = Options::synced(65_536);

#[test]
#[cfg(target_endian = "little")]
fn files_of_c_beanstalkd_are_read() {
    let long = format!("ready second-tube 80 0 67 0 0 0 0 0 {}", "x".repeat(2000));
    let jobs = [
        (1, "ready first 10 0 60 0 0 0 0 0 ready"),
        (2, "delayed first 20 4000000000 61 0 0 0 0 0 delayed"),
        (3, "buried first 31 0 62 1 0 0 1 0 buried"),
        (5, "delayed second-tube 51 4000000000 64 1 0 1 0 0 released"),
        (6, "ready second-tube 61 0 65 1 0 0 1 1 kicked"),
        (8, &long),
    ];
    let options = Options::synced(8192);
    for (name, highest) in [("c-1.12/records", 8), ("c-1.12/moved", 68)] {
        let disk = fixture(name);
        let mut server = Instance::start(&disk, options, FIXTURE_DAY);
        // The body of job 7 is not text.
        assert_eq!(server.recovered.jobs, 7);
        server.delete(7);
        check_jobs(&mut server, &jobs);
        assert_eq!(server.put("next"), Some(highest + 1));
        server.delete(highest + 1);
        // The same from the files that this server has written.
        server.ask("reserve-job 1\r\nrelease 1 11 0\r\n");
        server.close();
        let mut again = Instance::start(&disk, options, server.now);
        assert_eq!(again.recovered.jobs, 6);
        check_jobs(&mut again, &jobs[1..]);
        check_jobs(&mut again, &[(1, "ready first 11 0 60 1 0 1 0 0 ready")]);
    }
}

/// A job of version 5, put five seconds ago.
pub fn old(id: u64, state: u8, pri: u32, delay_secs: u64, body: &str) -> Record<'_> {
    const SECOND_NS: u64 = 1_000_000_000;
    let (now_ns, delay_ns) = (FIXTURE_DAY.as_nanos(), delay_secs * SECOND_NS);
    Record {
        id,
        tube: if body.is_empty() { "" } else { "old" },
        state,
        body: body.as_bytes(),
        pri,
        delay_ns,
        ttr_ns: 90 * SECOND_NS,
        created_at_ns: now_ns - 5 * SECOND_NS,
        moment_ns: now_ns + delay_ns,
        counts: [1, 2, 3, 4, 5],
        ..Record::default()
    }
}

/// Returns a file of version 5.
pub fn old_file(records: &[Record<'_>]) -> Vec<u8> {
    let records = records.iter().flat_map(Record::v5);
    VERSION_5.into_iter().chain(records).collect()
}

/// Many short records, so that compaction moves all jobs.
fn compact(server: &mut Instance) {
    let oldest = server.stat("binlog-oldest-index");
    for _ in 0..200 {
        server.ask("reserve-job 1\r\nrelease 1 10 0\r\n");
    }
    assert!(server.stat("binlog-oldest-index") > oldest, "the old file is still there");
}

#[test]
fn version_5_is_read_and_never_written() {
    let mut bytes = old_file(&[
        // The newer record of a job counts.
        old(1, BURIED, 9, 0, "steady\r\n"),
        old(1, READY, 10, 0, "ready\r\n"),
        old(2, DELAYED, 20, 1000, "delayed\r\n"),
        old(3, READY, 30, 0, "buried\r\n"),
        old(3, BURIED, 31, 0, ""),
        old(4, READY, 40, 0, "deleted\r\n"),
        old(4, DELETED, 40, 0, ""),
        Record { ttr_ns: 0, ..old(5, RESERVED, 50, 0, "reserved\r\n") },
        old(9, READY, 50, 0, ""),
    ]);
    bytes.resize(4096, 0);
    let jobs = [
        (1, "ready old 10 0 90 1 2 3 4 5 ready"),
        (2, "delayed old 20 1000 90 1 2 3 4 5 delayed"),
        (3, "buried old 31 0 90 1 2 3 4 5 buried"),
        (5, "ready old 50 0 1 1 2 3 4 5 reserved"),
    ];
    let disk = FakeDisk::with_files(&[("binlog.4".to_owned(), bytes)].into());
    let options = Options::synced(4096);
    let mut server = Instance::start(&disk, options, FIXTURE_DAY);
    assert_eq!(server.recovered.jobs, 4);
    check_jobs(&mut server, &jobs);
    let delayed = server.ask("stats-job 2\r\n");
    assert_eq!((field(&delayed, "age"), field(&delayed, "time-left")), (Some("5"), Some("999")));
    assert_eq!(server.put("next"), Some(10));
    server.delete(10);
    compact(&mut server);
    assert!(disk.live_files().values().all(|bytes| bytes[..4] == VERSION_7));
    let mut again = Instance::start(&disk, options, server.now);
    assert_eq!(again.recovered.jobs, 4);
    check_jobs(&mut again, &jobs[1..]);
}

/// Compaction of C writes the whole job again, and no moment of its bury.
#[test]
fn buried_jobs_that_c_has_moved_keep_their_order() {
    let disk = disk_with_file(old_file(&[
        old(1, READY, 10, 0, "one\r\n"),
        old(2, READY, 10, 0, "two\r\n"),
        old(1, BURIED, 10, 0, ""),
        old(2, BURIED, 10, 0, ""),
        old(1, BURIED, 10, 0, "one\r\n"),
    ]));
    let mut server = Instance::start(&disk, OPTIONS, FIXTURE_DAY);
    server.expect("use old\r\npeek-buried\r\n", "USING old\r\nFOUND 1 3\r\none\r\n");
}

#[test]
fn due_times_of_version_5_beyond_version_7_stay_in_the_future() {
    // The moment, the last 8 bytes before the counts, is the latest one of version 5.
    let mut bytes = old_file(&[old(2, DELAYED, 20, 1000, "delayed\r\n")]);
    let moment_at = 4 + 8 + "old".len() + 48;
    bytes[moment_at..moment_at + 8].copy_from_slice(&i64::MAX.to_ne_bytes());
    bytes.extend(old(1, READY, 10, 0, "ready\r\n").v5());
    let disk = disk_with_file(bytes);
    let mut server = Instance::start(&disk, Options::synced(4096), FIXTURE_DAY);
    compact(&mut server);
    let mut again = Instance::start(&disk, OPTIONS, server.now);
    assert!(again.ask("stats-job 2\r\n").contains("\nstate: delayed\n"));
}

/// C moves the full record of a job to a newer file, and not the record of its key.
#[test]
fn the_key_of_a_job_that_c_has_moved_survives_the_next_starts() {
    // Compaction has no reason to move the job.
    let body = "x".repeat(20_000) + "\r\n";
    let put = format!("put 7 0 60 20000 idp:key\r\n{body}");
    let disk = FakeDisk::default();
    let mut server = Instance::start(&disk, OPTIONS, FIXTURE_DAY);
    server.expect(&put, "INSERTED 1\r\n");
    server.close();
    let moved = Record { id: 1, tube: "default", ..old(1, READY, 7, 0, &body) };
    let mut files = disk.live_files();
    files.insert("binlog.9".to_owned(), [&VERSION_7[..], &moved.v7(None)].concat());
    for _ in 0..3 {
        let disk = FakeDisk::with_files(&files);
        let mut server = Instance::start(&disk, OPTIONS, FIXTURE_DAY);
        server.expect(&put, "INSERTED 1 READY\r\n");
        server.close();
        assert!(!disk.names().contains("binlog.1:"), "{}", disk.names());
        files = disk.live_files();
    }
}
