//! What a start restores: order, ids, counters and due times.

use crate::disk_with_file;
use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::fixtures::START;
use crate::harness::yaml::{field, number};
use beanstalkd::testing::record::{
    self, Counts, Fields, FlushKind, HIGHEST_ID, Mark, RecordState, VERSION,
};
use beanstalkd::testing::{Nanos, Syncing};
use std::collections::BTreeMap;

#[test]
fn files_without_records_are_removed() {
    let mut files = BTreeMap::new();
    files.insert("binlog.3".to_owned(), Vec::new());
    files.insert("binlog.4".to_owned(), vec![0; 4096]);
    files.insert("binlog.5".to_owned(), 7_i32.to_ne_bytes().to_vec());
    files.insert("binlog.6".to_owned(), 5_i32.to_ne_bytes().to_vec());
    files.insert("notes.txt".to_owned(), b"mine".to_vec());
    let disk = FakeDisk::with_files(&files);
    let mut engine = Instance::start(&disk, Policy::synced(65_536), START);
    assert_eq!(engine.recovered.jobs, 0);
    assert_eq!(engine.put("first"), Some(1));
    assert_eq!(engine.stat("binlog-current-index"), 7);
    engine.ask("delete 1\r\n");
    engine.idle(10);
    let names: Vec<String> = disk.live_files().into_keys().collect();
    assert_eq!(names, ["binlog.7", "notes.txt"]);
}

#[test]
fn buried_jobs_keep_their_order_after_compaction_and_restarts() {
    let disk = FakeDisk::default();
    let policy = Policy::new(4096, Syncing::Never);
    let mut now = START;
    for (round, id) in [5_u64, 2, 9, 1, 7].into_iter().enumerate() {
        // The wall clock is set back before each start.
        let mut engine = Instance::start(&disk, policy, now);
        if round == 0 {
            (0..10).for_each(|_| assert!(engine.put("job").is_some()));
        }
        engine.ask(format!("reserve-job {id}\r\nbury {id} 0\r\n"));
        // Many short records, so that compaction moves all jobs.
        for _ in 0..200 {
            let reply = engine.ask("reserve-job 10\r\nrelease 10 0 0\r\n");
            assert!(reply.ends_with("RELEASED\r\n"));
        }
        assert!(engine.stat("binlog-records-migrated") > 0);
        now = now.before(Nanos::from_secs(1000));
    }
    let mut engine = Instance::start(&disk, policy, now);
    for id in [5, 2, 9, 1, 7] {
        assert!(engine.ask("peek-buried\r\n").starts_with(&format!("FOUND {id} ")));
        engine.expect("kick 1\r\n", "KICKED 1\r\n");
    }
}

#[test]
fn large_counts_are_shown_and_come_back() {
    let disk = FakeDisk::default();
    let policy = Policy::synced(65_536);
    let mut engine = Instance::start(&disk, policy, START);
    (0..2).for_each(|_| assert!(engine.put("job").is_some()));
    for _ in 0..100 {
        engine.expect("reserve-job 2\r\nrelease 2 0 0\r\n", "RESERVED 2 3\r\njob\r\nRELEASED\r\n");
    }
    engine.expect(
        "reserve-job 2\r\nbury 2 0\r\nkick-job 2\r\n",
        "RESERVED 2 3\r\njob\r\nBURIED\r\nKICKED\r\n",
    );
    let now = engine.now;
    let mut again = Instance::start(&disk, policy, now);
    for engine in [&mut engine, &mut again] {
        let jobs = [1, 2].map(|id| engine.ask(format!("stats-job {id}\r\n")));
        let counts = jobs.map(|job| {
            ["reserves", "timeouts", "releases", "buries", "kicks"].map(|name| number(&job, name))
        });
        assert_eq!(counts, [[0; 5], [101, 0, 100, 1, 1]]);
    }
    again.expect("delete 2\r\ndelete 1\r\n", "DELETED\r\nDELETED\r\n");
}

#[test]
fn an_absurd_last_id_in_a_file_header_is_ignored() {
    for last_id in [u64::MAX, u64::MAX - 1, HIGHEST_ID + 1] {
        let mut bytes = VERSION.to_vec();
        record::write_file_header(&mut bytes, last_id, 7);
        let disk = disk_with_file(bytes);
        let policy = Policy::synced(65_536);
        let mut engine = Instance::start(&disk, policy, START);
        assert_eq!(engine.put("first"), Some(1));
        let mut again = Instance::start(&disk, policy, engine.now);
        again.expect("peek 1\r\n", "FOUND 1 5\r\nfirst\r\n");
    }
}

#[test]
fn due_times_follow_the_wall_clock_after_a_suspend() {
    let policy = Policy::synced(65_536);
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, policy, START);
    // The machine was suspended for an hour.
    let hour = Nanos::from_secs(3600);
    engine.set_wall_clock_ahead(hour);
    engine.ask("put 0 100 9 1\r\nx\r\n");
    let mut again = Instance::start(&disk, policy, engine.now + hour);
    let job = again.ask("stats-job 1\r\n");
    assert_eq!((field(&job, "time-left"), field(&job, "age")), (Some("99"), Some("0")));
}

/// See beanstalkd(1), THE BINLOG.
#[test]
fn a_delay_ends_by_the_new_clock_after_a_restart() {
    let policy = Policy::synced(65_536);
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, policy, START);
    engine.ask("put 0 100 9 1\r\nx\r\n");
    let time_left = |engine: &mut Instance| -> u64 {
        let job = engine.ask("stats-job 1\r\n");
        number(&job, "time-left")
    };
    // Set forward by 40 seconds: no effect before the restart.
    let ahead = Nanos::from_secs(40);
    engine.set_wall_clock_ahead(ahead);
    assert_eq!(time_left(&mut engine), 99);
    let mut again = Instance::start(&disk, policy, engine.now + ahead);
    assert_eq!(time_left(&mut again), 59);
    // Set back by 40 seconds: later, but at most the full delay after the start.
    let mut again = Instance::start(&disk, policy, engine.now.before(ahead));
    assert_eq!(time_left(&mut again), 99);
}

#[test]
fn a_clock_that_was_set_back_extends_no_delay() {
    let disk = FakeDisk::default();
    let policy = Policy::synced(1 << 20);
    let mut engine = Instance::start(&disk, policy, START);
    engine.expect("put 0 100 9 1\r\na\r\n", "INSERTED 1\r\n");
    engine.expect("put 0 300 9 1\r\nb\r\n", "INSERTED 2\r\n");
    let hours_before = Nanos::from_nanos(START.as_nanos() - Nanos::from_secs(10_000).as_nanos());
    for now in [hours_before, Nanos::from_secs(1)] {
        let mut again = Instance::start(&disk, policy, now);
        assert_eq!(field(&again.ask("stats-job 1\r\n"), "time-left"), Some("99"));
        assert_eq!(field(&again.ask("stats-job 2\r\n"), "time-left"), Some("299"));
        again.advance(Nanos::from_secs(100));
        assert_eq!(field(&again.ask("stats-job 1\r\n"), "state"), Some("ready"));
    }
    // With the right clock the recorded times are in effect.
    let mut again = Instance::start(&disk, policy, START + Nanos::from_secs(50));
    assert_eq!(field(&again.ask("stats-job 1\r\n"), "time-left"), Some("50"));
}

#[test]
fn a_flush_that_was_recorded_is_finished_by_the_next_start() {
    for (flush, left) in [("flush-tube default\r\n", 0), ("flush-buried default\r\n", 1_500)] {
        let disk = FakeDisk::default();
        let policy = Policy::synced(65_536);
        let mut engine = Instance::start(&disk, policy, START);
        for id in 1..=2_000 {
            assert_eq!(engine.put("job"), Some(id));
            if id % 4 == 0 {
                engine.ask(format!("reserve-job {id}\r\nbury {id} 0\r\n"));
            }
        }
        engine.ask("use kept\r\nput 0 0 9 1\r\nx\r\n");
        // The flush is decided and committed, and most of its jobs are not freed yet.
        assert_eq!(engine.ask(flush), "");
        let mut again = Instance::start(&disk, policy, engine.now);
        assert_eq!(again.recovered.jobs, left + 1);
        again.expect("peek 4\r\n", "NOT_FOUND\r\n");
        again.expect("peek 2001\r\n", "FOUND 2001 1\r\nx\r\n");
        again.expect("put 0 0 9 1\r\ny\r\n", "INSERTED 2002\r\n");
    }
}

#[test]
fn a_buried_job_that_a_worker_has_reserved_survives_a_flush_of_buried_jobs() {
    let disk = FakeDisk::default();
    let policy = Policy::synced(65_536);
    let mut engine = Instance::start(&disk, policy, START);
    for id in 1..=2 {
        engine.put("job");
        engine.ask(format!("reserve-job {id}\r\nbury {id} 0\r\n"));
    }
    let written = engine.stat("binlog-records-written");
    engine.expect("reserve-job 1\r\n", "RESERVED 1 3\r\njob\r\n");
    assert_eq!(engine.stat("binlog-records-written"), written, "C beanstalkd writes no record");
    engine.expect("flush-buried default\r\n", "FLUSHED 1\r\n");
    let mut again = Instance::start(&disk, policy, engine.now);
    assert_eq!(again.recovered.jobs, 1);
    again.expect("peek-buried\r\n", "FOUND 1 3\r\njob\r\n");
    // It is an ordinary buried job now.
    again.expect("flush-buried default\r\n", "FLUSHED 1\r\n");
    assert_eq!(Instance::start(&disk, policy, again.now).recovered.jobs, 0);
}

const NONCE: u32 = 7;

fn fields_of(id: u64, state: RecordState) -> Fields {
    Fields {
        id,
        pri: 0,
        delay_secs: 0,
        ttr_secs: 9,
        body_len: 3,
        created_at: START,
        due_or_buried_at: START + Nanos::from_nanos(id),
        counts: Counts::default(),
        state,
        mark: Mark::None,
    }
}

/// Appends the full record of a job with the body `x`.
fn write_job(bytes: &mut Vec<u8>, id: u64, tube: &str, state: RecordState) {
    record::write(bytes, &fields_of(id, state), tube, b"x\r\n", NONCE);
    bytes.extend_from_slice(b"x\r\n");
}

fn write_flush(bytes: &mut Vec<u8>, kind: FlushKind, tube: &str) {
    record::write(bytes, &record::flush(kind, START), tube, b"", NONCE);
}

/// The epochs of a tube have eight bits.
#[test]
fn jobs_stay_flushed_after_hundreds_of_further_flushes() {
    let mut bytes = VERSION.to_vec();
    record::write_file_header(&mut bytes, 9, NONCE);
    write_job(&mut bytes, 1, "all", RecordState::Ready);
    write_job(&mut bytes, 2, "buried", RecordState::Buried);
    write_job(&mut bytes, 3, "buried", RecordState::Ready);
    write_job(&mut bytes, 4, "other", RecordState::Buried);
    for _ in 0..256 {
        write_flush(&mut bytes, FlushKind::All, "all");
        write_flush(&mut bytes, FlushKind::Buried, "buried");
    }
    write_job(&mut bytes, 5, "all", RecordState::Ready);
    write_job(&mut bytes, 6, "buried", RecordState::Buried);
    let disk = disk_with_file(bytes);
    for _ in 0..2 {
        let mut engine = Instance::start(&disk, Policy::synced(65_536), START);
        assert_eq!(engine.recovered.jobs, 4);
        for id in 1..=6 {
            let found = !engine.ask(format!("peek {id}\r\n")).starts_with("NOT_FOUND");
            assert_eq!(found, id > 2, "job {id}");
        }
    }
}

/// Without space a bury, or the end of a hold, may have no record.
#[test]
fn a_flushed_job_stays_deleted_although_it_is_not_buried_in_its_last_record() {
    for mark in [Mark::Held, Mark::None] {
        let state = if mark == Mark::Held { RecordState::Buried } else { RecordState::Ready };
        let mut bytes = VERSION.to_vec();
        record::write_file_header(&mut bytes, 9, NONCE);
        write_job(&mut bytes, 1, "a", state);
        let fields = Fields { mark, ..fields_of(1, state) };
        record::write(&mut bytes, &fields, "", b"", NONCE);
        write_flush(&mut bytes, FlushKind::Buried, "a");
        let end = Fields { mark: Mark::FlushedBuried, ..fields_of(1, RecordState::Deleted) };
        record::write(&mut bytes, &end, "", b"", NONCE);
        let engine = Instance::start(&disk_with_file(bytes), Policy::synced(65_536), START);
        assert_eq!(engine.recovered.jobs, 0, "{state:?}");
    }
}

/// A crash has interrupted a flush of which no client has seen the end, and C beanstalkd, which skips
/// the record of the flush, has moved one of its jobs to a newer file.
#[test]
fn a_job_that_c_beanstalkd_has_moved_after_a_flush_is_there_at_each_start() {
    for kind in [FlushKind::All, FlushKind::Buried] {
        let mut flushed = VERSION.to_vec();
        record::write_file_header(&mut flushed, 9, NONCE);
        write_job(&mut flushed, 1, "a", RecordState::Buried);
        write_job(&mut flushed, 2, "a", RecordState::Buried);
        write_flush(&mut flushed, kind, "a");
        let mut moved = VERSION.to_vec();
        write_job(&mut moved, 1, "a", RecordState::Buried);
        let files = [("binlog.1", flushed), ("binlog.2", moved)];
        let files = files.map(|(name, bytes)| (name.to_owned(), bytes));
        let disk = FakeDisk::with_files(&BTreeMap::from(files));
        for start in 0..3 {
            let mut engine = Instance::start(&disk, Policy::synced(65_536), START);
            assert_eq!(engine.recovered.jobs, 1, "{kind:?}, start {start}");
            engine.expect("peek 1\r\n", "FOUND 1 1\r\nx\r\n");
            engine.idle(10);
        }
        assert!(
            !disk.live_files().contains_key("binlog.1"),
            "the record of the flush is still there"
        );
    }
}
