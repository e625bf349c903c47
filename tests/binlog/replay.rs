//! What a start restores: order, ids, counters, due times and flushes.

use crate::harness::driver::{Nanos, Options, START, Syncing, damage};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::instance::Instance;
use crate::harness::record::{
    BURIED, DELAYED, DELETED, FLUSH_ALL, FLUSH_BURIED, FLUSHED_BURIED, HELD, READY, Record,
    file_head,
};
use crate::{begin_flush, disk_with_file, start};

const OPTIONS: Options = Options::synced(65_536);

#[test]
fn files_without_records_are_removed() {
    let files = [
        ("binlog.3", Vec::new()),
        ("binlog.4", vec![0; 4096]),
        ("binlog.5", 7_i32.to_ne_bytes().to_vec()),
        ("binlog.6", 5_i32.to_ne_bytes().to_vec()),
        ("notes.txt", b"mine".to_vec()),
    ];
    let disk = FakeDisk::with_files(&files.map(|(name, bytes)| (name.to_owned(), bytes)).into());
    let mut server = Instance::start(&disk, OPTIONS, START);
    assert_eq!(server.recovered.jobs, 0);
    assert_eq!(server.put("first"), Some(1));
    assert_eq!(server.stat("binlog-current-index"), 7);
    server.delete(1);
    server.idle(10);
    let names: Vec<String> = disk.live_files().into_keys().collect();
    assert_eq!(names, ["binlog.7", "notes.txt"]);
}

#[test]
fn buried_jobs_keep_their_order_after_compaction_and_restarts() {
    const IDS: [u64; 5] = [5, 2, 9, 1, 7];
    let (disk, options) = (FakeDisk::default(), Options::binlog(4096, Syncing::Never));
    let mut now = START;
    for (round, id) in IDS.into_iter().enumerate() {
        // The wall clock is set back before each start.
        let mut server = Instance::start(&disk, options, now);
        if round == 0 {
            server.put_all(10, "job");
        }
        server.ask(format!("reserve-job {id}\r\nbury {id} 0\r\n"));
        // Many short records, so that compaction moves all jobs.
        for _ in 0..200 {
            server.ask("reserve-job 10\r\nrelease 10 0 0\r\n");
        }
        assert!(server.stat("binlog-records-migrated") > 0);
        now = now.before(Nanos::from_secs(1000));
    }
    let mut server = Instance::start(&disk, options, now);
    for id in IDS {
        server.expect("peek-buried\r\n", &format!("FOUND {id} 3\r\njob\r\n"));
        server.expect("kick 1\r\n", "KICKED 1\r\n");
    }
}

/// The last burial is not the one of the last record: compaction has moved a job that was buried before.
#[test]
fn a_job_that_is_buried_after_a_start_is_the_last_although_the_clock_was_set_back() {
    let buried = |id, seconds: u64| Record {
        moment_ns: START.as_nanos() + seconds * SECOND_NS,
        ..job(id, "a", BURIED)
    };
    let bytes = file(&[buried(1, 10), buried(2, 5), job(3, "a", READY)]);
    let disk = disk_with_file(bytes);
    let mut server = Instance::start(&disk, OPTIONS, START);
    server.ask("reserve-job 3\r\nbury 3 0\r\n");
    let again = server.after_crash(OPTIONS);
    assert_eq!(again.buried("a"), [2, 1, 3]);
    // So a flush deletes all of them.
    server.expect("flush-buried a\r\n", "FLUSHED 3\r\n");
    server.expect("peek 1\r\n", "NOT_FOUND\r\n");
}

// ---- Flushes ----

const NONCE: u32 = 7;
const SECOND_NS: u64 = 1_000_000_000;

/// The full record of a job with the body `x`.
fn job<'t>(id: u64, tube: &'t str, state: u8) -> Record<'t> {
    let (created_at_ns, moment_ns) = (START.as_nanos(), START.as_nanos() + id);
    let times = Record { ttr_ns: 30 * SECOND_NS, created_at_ns, moment_ns, ..Record::default() };
    Record { id, tube, state, body: b"x\r\n", ..times }
}

/// A short record of a job.
fn update(id: u64, state: u8, mark: u8) -> Record<'static> {
    Record { body: b"", body_len: Some(3), mark, ..job(id, "", state) }
}

fn flush(id: u64, tube: &str) -> Record<'_> {
    Record { id, tube, created_at_ns: START.as_nanos(), ..Record::default() }
}

fn file(records: &[Record<'_>]) -> Vec<u8> {
    let records = records.iter().flat_map(|record| record.v7(Some(NONCE)));
    file_head(1, 9, (0, 0), NONCE).into_iter().chain(records).collect()
}

/// The epochs of a tube have eight bits.
#[test]
fn jobs_stay_flushed_after_hundreds_of_further_flushes() {
    let jobs = [
        job(1, "all", READY),
        job(2, "buried", BURIED),
        job(3, "buried", READY),
        job(4, "other", BURIED),
    ];
    let flushes = [flush(FLUSH_ALL, "all"), flush(FLUSH_BURIED, "buried")].repeat(256);
    let more = [job(5, "all", READY), job(6, "buried", BURIED)];
    let disk = disk_with_file(file(&[&jobs[..], &flushes, &more].concat()));
    for _ in 0..2 {
        let mut server = Instance::start(&disk, OPTIONS, START);
        assert_eq!(server.recovered.jobs, 4);
        for id in 1..=6 {
            let found = !server.ask(format!("peek {id}\r\n")).starts_with("NOT_FOUND");
            assert_eq!(found, id > 2, "job {id}");
        }
    }
}

/// Without space a bury, or the end of a hold, may have no record.
#[test]
fn a_flushed_job_stays_deleted_although_it_is_not_buried_in_its_last_record() {
    for (state, mark) in [(BURIED, HELD), (READY, 0)] {
        let bytes = file(&[
            job(1, "a", state),
            update(1, state, mark),
            flush(FLUSH_BURIED, "a"),
            update(1, DELETED, FLUSHED_BURIED),
        ]);
        let server = Instance::start(&disk_with_file(bytes), OPTIONS, START);
        assert_eq!(server.recovered.jobs, 0, "{state:?}");
    }
}

/// C beanstalkd skips the record of a flush, and needs the delete of each job.
#[test]
fn a_stop_during_a_flush_leaves_no_job_to_be_deleted_by_the_next_start() {
    let (disk, mut server) = start(OPTIONS);
    server.ask("put 0 0 9 1\r\nx\r\n".repeat(5_000));
    let flusher = server.connect();
    begin_flush(&mut server, flusher, "flush-tube default\r\n");
    server.close();
    let mut again = server.again_on(&disk, OPTIONS);
    assert_eq!((again.recovered.jobs, again.stat("binlog-records-written")), (0, 0));
}

/// A server that was killed in the middle of a flush leaves the rest to the next one, whose clock may be set back.
#[test]
fn the_key_of_a_flushed_job_is_kept_for_its_ttl_after_the_clock_was_set_back() {
    let put = "put 0 0 9 1 idp:key:60\r\nx\r\n";
    let (disk, mut server) = start(OPTIONS);
    server.ask("put 0 0 9 1\r\nx\r\n".repeat(5_000) + put);
    let client = server.client;
    begin_flush(&mut server, client, "flush-tube default\r\n");
    let now = server.now.before(Nanos::from_secs(1_000));
    let mut again = Instance::on_files(&disk.live_files(), OPTIONS, now);
    assert_eq!(again.recovered.jobs, 0);
    again.expect(put, "INSERTED 5001 DELETED\r\n");
    again.advance(Nanos::from_secs(60));
    again.expect(put, "INSERTED 5003\r\n");
}

/// A job that two flushes have deleted was deleted by the first one.
#[test]
fn the_ttl_of_a_key_counts_from_the_first_flush_after_a_crash() {
    let put = "put 0 0 9 1 idp:key:60\r\nx\r\n";
    let (_, mut server) = start(OPTIONS);
    server.ask("put 0 0 900 1\r\nx\r\n".repeat(4_999) + put);
    server.ask("reserve-batch 1000\r\n".repeat(5));
    server.ask((1..=5_000).map(|id| format!("bury {id} 0\r\n")).collect::<String>());
    server.ask("put 0 0 900 1\r\nx\r\n");
    let [first, second] = server.clients();
    server.receive(first, "flush-buried default\r\n");
    server.iterate();
    server.now = server.now + Nanos::from_secs(30);
    server.receive(second, "flush-tube default\r\n");
    server.iterate();
    assert_eq!(server.take_text(first), "", "5,000 jobs are freed in two steps");
    let mut again = server.after_crash(OPTIONS);
    assert_eq!(again.recovered.jobs, 0);
    again.expect(put, "INSERTED 5000 DELETED\r\n");
    again.advance(Nanos::from_secs(30));
    again.expect(put, "INSERTED 5003\r\n");
}

/// After the start no worker holds the job any more.
#[test]
fn a_buried_job_that_was_reserved_before_a_restart_is_flushed_with_the_others() {
    let (_, mut server) = start(OPTIONS);
    server.ask("put 0 0 900 1\r\nx\r\n".repeat(1_000) + "reserve-batch 1000\r\n");
    server.ask((1..=1_000).map(|id| format!("bury {id} 0\r\n")).collect::<String>());
    server.expect("reserve-job 1000\r\n", "RESERVED 1000 1\r\nx\r\n");
    let mut server = server.after_crash(OPTIONS);
    let client = server.client;
    begin_flush(&mut server, client, "flush-buried default\r\n");
    let again = server.after_crash(OPTIONS);
    assert_eq!(again.recovered.jobs, 0);
}

// ---- The format ----

/// The server writes each record as the description says, byte for byte.
#[test]
fn records_are_written_as_described() {
    let (disk, mut server) = start(OPTIONS);
    let tick = server.now;
    let at = |ticks: u32| (tick + Nanos::from_millis(u64::from(ticks))).as_nanos() + 1;
    for (command, reply) in [
        ("put-in-tube a 7 0 30 1\r\nx\r\n", "INSERTED 1\r\n"),
        ("put-in-tube a 8 100 30 1\r\nx\r\n", "INSERTED 2\r\n"),
        ("reserve-job 1\r\nrelease 1 9 60\r\n", "RESERVED 1 1\r\nx\r\nRELEASED\r\n"),
        ("reserve-job 2\r\nbury 2 6\r\n", "RESERVED 2 1\r\nx\r\nBURIED\r\n"),
        ("delete 1\r\n", "DELETED\r\n"),
        ("flush-buried a\r\n", "FLUSHED 1\r\n"),
    ] {
        server.expect(command, reply);
    }
    let bytes = &disk.live_files()["binlog.1"];
    let nonce = u32::from_ne_bytes(*bytes[4 + 4 + 36..].first_chunk().unwrap());
    let first = Record { pri: 7, created_at_ns: at(1), moment_ns: 0, ..job(1, "a", READY) };
    let second = Record {
        pri: 8,
        delay_ns: 100 * SECOND_NS,
        created_at_ns: at(2),
        moment_ns: at(2) + 100 * SECOND_NS,
        ..job(2, "a", DELAYED)
    };
    let update = |record| Record { tube: "", body: b"", body_len: Some(3), ..record };
    let released = Record {
        state: DELAYED,
        pri: 9,
        delay_ns: 60 * SECOND_NS,
        moment_ns: at(3) + 60 * SECOND_NS,
        counts: [1, 0, 1, 0, 0],
        ..update(first)
    };
    let (moment_ns, counts) = (at(4), [1, 0, 0, 1, 0]);
    let buried = Record { state: BURIED, pri: 6, moment_ns, counts, ..update(second) };
    let records = [first, second, released, buried].map(|record| record.v7(Some(nonce)));
    let mut rest = &bytes[..];
    for expected in [file_head(1, 0, (0, 0), nonce)].into_iter().chain(records) {
        let (found, after) = rest.split_at(expected.len());
        assert_eq!(found, expected, "{} bytes before the end", rest.len());
        rest = after;
    }
    let again = server.again_on(&disk, OPTIONS);
    let [first, second] =
        ["binlog.1", "binlog.2"].map(|name| again.disk.live_files()[name].clone());
    let nonce_of_second = u32::from_ne_bytes(*second[4 + 4 + 36..].first_chunk().unwrap());
    let head = file_head(2, 2, (first.len() as u64, nonce), nonce_of_second);
    assert_eq!(&second[..head.len()], head);
}

/// An early server has written 0 for the number of a file, and for the end of the file before.
#[test]
fn a_file_need_not_know_the_one_before() {
    for number in [0, 2] {
        let record = |id| job(id, "a", READY).v7(Some(NONCE));
        let files = [(1, 1), (number, 2)].map(|(number, id)| {
            let name = format!("binlog.{id}");
            (name, [file_head(number, 0, (0, 0), NONCE), record(id)].concat())
        });
        let disk = FakeDisk::with_files(&files.into_iter().collect());
        assert_eq!(damage(&mut disk.clone()), None);
        let server = Instance::start(&disk, OPTIONS, START);
        assert_eq!(server.recovered.jobs, 2);
        assert_eq!(damage(&mut disk.clone()), None);
    }
}
