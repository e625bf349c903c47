//! Damaged files: flipped bits, torn tails and records inside bodies cost at most what they hit.

use crate::harness::engine::{Instance, Policy};
use crate::harness::fake_disk::{FakeDisk, Files};
use crate::harness::fixtures::START;
use crate::harness::journal::View;
use crate::record_len;
use crate::worker::Worker;
use beanstalkd::testing::Nanos;
use std::collections::BTreeMap;

/// A log with all kinds of records in several files, the jobs in it, and when it was closed.
fn sample() -> (Files, BTreeMap<u64, Option<View>>, Nanos) {
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, Policy::synced(4096), START);
    let mut worker = Worker::new(21);
    for _ in 0..40 {
        worker.work(&disk, &mut engine);
    }
    engine.close();
    let files = disk.live_files();
    let now = engine.now + Nanos::from_nanos(500_000);
    let mut engine = Instance::on_files(&files, Policy::synced(4096), now);
    let ids = 1..worker.next_id;
    let views = ids.map(|id| (id, View::of(&mut engine, id))).collect();
    (files, views, now)
}

#[test]
fn a_flipped_bit_changes_no_body_and_loses_at_most_one_job() {
    let (files, views, now) = sample();
    assert!(files.len() >= 3, "{:?}", files.keys());
    let bodies: BTreeMap<u64, &str> = views
        .iter()
        .filter_map(|(&id, view)| view.as_ref().map(|view| (id, view.body.as_str())))
        .collect();
    let mut tried = 0;
    for (name, bytes) in &files {
        // Every bit of the version and the file header record, and one bit in every second byte of
        // the records.
        let head = (0..88 * 8).map(|bit| (bit / 8, bit % 8));
        let records = (88..bytes.len()).step_by(2).map(|at| (at, at / 2 % 8));
        for (at, bit) in head.chain(records) {
            let mut damaged = files.clone();
            damaged.get_mut(name).unwrap()[at] ^= 1 << bit;
            let disk = FakeDisk::with_files(&damaged);
            let mut engine = Instance::start(&disk, Policy::synced(4096), now);
            let mut changed = 0;
            for (id, before) in &views {
                let after = View::of(&mut engine, *id);
                if let (Some(after), Some(body)) = (&after, bodies.get(id)) {
                    assert_eq!(after.body, *body, "{name}:{at}");
                }
                // A second may have passed.
                let state = |view: &Option<View>| {
                    view.as_ref().map(|view| (view.state.clone(), view.pri, view.counts))
                };
                changed += usize::from(state(&after) != state(before));
            }
            assert!(changed <= 1, "{name}:{at}.{bit}: {changed} jobs have changed");
            let is_kept = disk.live_files().keys().any(|name| name.ends_with(".damaged"));
            let is_last = files.keys().last() == Some(name);
            assert!(is_kept || is_last, "{name}:{at}: the damaged file is not kept");
            tried += 1;
        }
    }
    assert!(tried > 2_000, "only {tried} bits were flipped");
}

#[test]
fn a_record_with_a_wrong_length_loses_no_other_record() {
    const JOBS: u64 = 40;
    let disk = FakeDisk::default();
    let policy = Policy::synced(16_384);
    let mut engine = Instance::start(&disk, policy, START);
    for id in 1..=JOBS {
        // Records of 128 bytes: a flipped bit skips exactly one record.
        assert_eq!(engine.put("x".repeat(35)), Some(id));
    }
    let files = disk.live_files();
    let (name, bytes) = files.first_key_value().unwrap();
    let name_len = "default".len();
    let third = 88 + 2 * 128;
    assert_eq!(bytes[third..][4..4 + name_len], *b"default");
    let lengths = [third..third + 4, third + 4 + name_len + 32..third + 4 + name_len + 36];
    for at in lengths.into_iter().flatten() {
        for bit in 0..8 {
            let mut damaged = files.clone();
            damaged.get_mut(name).unwrap()[at] ^= 1 << bit;
            let disk = FakeDisk::with_files(&damaged);
            let engine = Instance::start(&disk, policy, engine.now);
            assert_eq!(engine.recovered.jobs, JOBS - 1, "bit {bit} of byte {at}");
        }
    }
}

#[test]
fn the_server_starts_and_works_on_any_bytes() {
    let (files, ..) = sample();
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..2_000 {
        let mut mangled = files.clone();
        for bytes in mangled.values_mut() {
            for _ in 0..random.usize(..4) {
                mangle(bytes, &mut random);
            }
        }
        let disk = FakeDisk::with_files(&mangled);
        let mut engine = Instance::start(&disk, Policy::synced(4096), START);
        assert!(engine.put("still works").is_some(), "round {round}");
        let jobs = engine.stat("current-jobs-ready")
            + engine.stat("current-jobs-buried")
            + engine.stat("current-jobs-delayed");
        let mut again = Instance::start(&disk, Policy::synced(4096), engine.now);
        assert_eq!(again.recovered.jobs, jobs, "round {round}");
        assert!(again.put("still works").is_some());
    }
}

/// Damages the bytes in one of six ways.
fn mangle(bytes: &mut Vec<u8>, random: &mut fastrand::Rng) {
    if bytes.is_empty() {
        return;
    }
    let at = random.usize(..bytes.len());
    let len = random.usize(..=(bytes.len() - at).min(300));
    match random.u8(..6) {
        0 => bytes[at] ^= 1 << random.u8(..8),
        1 => bytes[at..at + len].fill(0),
        2 => bytes[at..at + len].iter_mut().for_each(|byte| *byte = random.u8(..)),
        3 => bytes.truncate(at),
        4 => {
            bytes.drain(at..at + len);
        }
        _ => {
            let piece = bytes[at..at + len].to_vec();
            let to = random.usize(..bytes.len());
            bytes.splice(to..to, piece);
        }
    }
}

#[test]
fn a_torn_tail_is_truncated_wherever_it_is_torn() {
    let (files, views, now) = sample();
    let (last, bytes) = files.last_key_value().unwrap();
    for len in 88..bytes.len() {
        let mut torn = files.clone();
        let torn_bytes = torn.get_mut(last).unwrap();
        torn_bytes.truncate(len);
        torn_bytes.resize(4096, 0);
        let disk = FakeDisk::with_files(&torn);
        let mut engine = Instance::start(&disk, Policy::synced(4096), now);
        let lost = views.iter().filter(|(id, before)| {
            let after = View::of(&mut engine, **id);
            if let (Some(after), Some(before)) = (&after, before) {
                assert_eq!(after.body, before.body, "truncated to {len}");
            }
            after.is_none() && before.is_some()
        });
        // At most one job for each torn record.
        let records_cut = records_from(bytes, len);
        let lost = lost.count();
        assert!(
            lost <= records_cut,
            "truncated to {len}: {lost} jobs of {records_cut} torn records are lost"
        );
        let left = disk.live_files().get(last).map_or(0, Vec::len);
        // A short record ends in three zeros.
        assert!(left <= len + 3, "torn at {len}, and {left} bytes are left");
    }
}

/// Counts the records of version 7 that end after `from`.
fn records_from(bytes: &[u8], from: usize) -> usize {
    let number = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().unwrap()) as usize;
    let mut at = 4;
    let mut count = 0;
    while at < bytes.len() {
        let name_len = number(at);
        let is_full = name_len > 0 && bytes[at + 4 + name_len + 76] != 0;
        at += 84 + name_len + if is_full { number(at + 4 + name_len + 32) } else { 0 };
        count += usize::from(at > from);
    }
    count
}

#[test]
fn records_inside_a_body_are_not_replayed() {
    let policy = Policy::synced(65_536);
    // The record of the delete of job 1 in another server's file.
    let other = FakeDisk::default();
    let mut engine = Instance::start(&other, policy, START);
    engine.put("precious").unwrap();
    engine.ask("delete 1\r\n");
    let files = other.live_files();
    let delete = &files["binlog.1"][88 + 101..88 + 101 + 84];

    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, policy, START);
    engine.put("precious").unwrap();
    assert_eq!(engine.put(delete), Some(2));
    engine.put("third").unwrap();
    let mut files = disk.live_files();
    let bytes = files.get_mut("binlog.1").unwrap();
    // The length of the body of job 2 is damaged, so that its end is unknown.
    bytes[88 + 101 + 4 + "default".len() + 32] ^= 0x40;
    let mut again = Instance::on_files(&files, policy, START);
    again.expect("peek 1\r\n", "FOUND 1 8\r\nprecious\r\n");
    again.expect("peek 2\r\n", "NOT_FOUND\r\n");
    again.expect("peek 3\r\n", "FOUND 3 5\r\nthird\r\n");
}

/// Returns a file with jobs of which the first has `body`, and the offset of the fields of its record.
fn file_with(body: &[u8], jobs: u64) -> (BTreeMap<String, Vec<u8>>, usize) {
    let disk = FakeDisk::default();
    let mut engine = Instance::start(&disk, Policy::synced(65_536), START);
    assert_eq!(engine.put(body), Some(1));
    for id in 2..=jobs {
        assert_eq!(engine.put("plain"), Some(id));
    }
    (disk.live_files(), 88 + 4 + "default".len())
}

/// Returns the number of jobs that these files restore.
fn recovered(files: &BTreeMap<String, Vec<u8>>) -> u64 {
    let policy = Policy::synced(65_536);
    Instance::on_files(files, policy, START).recovered.jobs
}

#[test]
fn a_damaged_body_full_of_record_heads_hides_no_later_record() {
    const JOBS: u64 = 101;
    // A full record of job 7 whose length claims a very long body.
    let mut head = b"\x01\0\0\0x\x07\0\0\0\0\0\0\0".to_vec();
    head.resize(85, 0);
    head[5 + 32..5 + 36].copy_from_slice(&60_000_u32.to_ne_bytes());
    head[5 + 76] = 1;
    let (mut files, fields) = file_with(&head.repeat(40), JOBS);
    assert_eq!(recovered(&files), JOBS);
    // The priority of the first job.
    files.get_mut("binlog.1").unwrap()[fields + 8] ^= 1;
    assert_eq!(recovered(&files), JOBS - 1);
}

#[test]
fn records_inside_a_body_are_not_replayed_with_a_damaged_file_header() {
    const PLAIN: usize = 100;
    let engine_with_jobs = |disk: &FakeDisk| {
        let mut engine = Instance::start(disk, Policy::synced(65_536), START);
        (0..PLAIN).for_each(|_| assert!(engine.put("plain").is_some()));
        engine
    };
    let end = 88 + PLAIN * usize::try_from(record_len("default", 5)).unwrap();
    // The records of the deletes in another server's file.
    let other = FakeDisk::default();
    let mut engine = engine_with_jobs(&other);
    (1..=PLAIN).for_each(|id| {
        engine.delete(id as u64);
    });
    let deletes = other.live_files()["binlog.1"][end..end + PLAIN * 84].to_vec();

    let disk = FakeDisk::default();
    let mut engine = engine_with_jobs(&disk);
    assert!(engine.put(&deletes).is_some());
    let mut files = disk.live_files();
    let bytes = files.get_mut("binlog.1").unwrap();
    // The nonce in the file header record, and the length of the body with the records.
    bytes[4 + 4 + 36] ^= 1;
    bytes[end + 4 + "default".len() + 32] ^= 0x40;
    assert_eq!(recovered(&files), PLAIN as u64);
}
