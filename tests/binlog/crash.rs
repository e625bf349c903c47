//! The syncs that bound what a crash loses. The simulation crashes at each step of the disk.

use crate::harness::driver::{Nanos, Options, START, Syncing, damage};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::instance::Instance;
use crate::harness::request::put;
use crate::start;
use std::io::ErrorKind;

/// A disk that syncs in the background, and a server on it that has put a job and begun to sync it.
fn start_with_background_sync(file_size: u32) -> (FakeDisk, Instance) {
    let disk = FakeDisk::default();
    disk.faults().syncs_in_background = true;
    let options = Options::binlog(file_size, Syncing::Within(Nanos::from_millis(50)));
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
    let (disk, mut server) = start_with_background_sync(FILE_SIZE);
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
    let (_, mut server) = start_with_background_sync(65_536);
    server.put_all(500, "x".repeat(1000));
    assert!(server.stat("binlog-current-index") > 7);
}

#[test]
fn a_background_sync_that_fails_stops_the_server() {
    // The first sync is also of the names of new files.
    for (syncs, expected) in [(0, "cannot sync the directory: "), (1, "cannot sync binlog.1: ")] {
        let (disk, mut server) = start_with_background_sync(65_536);
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
    let (disk, mut server) = start_with_background_sync(65_536);
    server.close();
    assert_eq!(disk.counts().background_syncs, (1, 1));
}

/// The deletes of a flush are not synced by themselves, and may fill files.
#[test]
fn a_power_cut_between_commits_leaves_no_damage() {
    let mut random = fastrand::Rng::with_seed(9);
    let (disk, mut server) = start(Options::synced(4096));
    server.put_all(2000, "x");
    for command in ["flush-tube default\r\n", "put 0 0 9 1\r\nx\r\n"] {
        server.ask(command);
        for _ in 0..20 {
            let mut files = FakeDisk::with_files(&disk.files_after_power_cut(&mut random));
            assert_eq!(damage(&mut files), None, "after {command}");
        }
    }
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
