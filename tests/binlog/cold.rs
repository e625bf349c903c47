//! Bodies that are not in memory, and are read back late, with errors, or with flipped bits.

use crate::harness::engine::{Engine, Instance, Policy};
use crate::harness::event_loop::{ClientId, EventLoop};
use crate::harness::fake_disk::{FakeDisk, ReadFault};
use crate::harness::fixtures::START;
use crate::harness::request::put;
use crate::harness::yaml;
use crate::original::{fixture, record_v5};
use beanstalkd::testing::{Nanos, Settings, Syncing};
use std::collections::BTreeMap;

const FILE_SIZE: u32 = 16 * 1024;

/// A server that keeps no body in memory, and a client that is never late.
struct World {
    engine: EventLoop,
    disk: FakeDisk,
    other: ClientId,
    /// The id of the last job.
    last_id: u64,
}

impl World {
    fn new(disk: FakeDisk) -> World {
        World::at(disk, START)
    }

    fn at(disk: FakeDisk, now: Nanos) -> World {
        let settings = Settings {
            max_job_size: 1 << 20,
            binlog_file_size: FILE_SIZE,
            body_cache_bytes: Some(0),
            ..Settings::DEFAULT
        };
        let mut engine = Engine::new(settings, now);
        engine.recover(&disk, Syncing::EachIteration).unwrap();
        let mut engine = EventLoop::new(engine, usize::MAX, Nanos::from_millis(1));
        let other = engine.connect();
        World { engine, disk, other, last_id: 0 }
    }

    /// Runs until nothing is left but reads that may not end.
    fn settle(&mut self) {
        self.engine.settle();
        while self.disk.has_reads() {
            self.engine.settle();
        }
        self.engine.server.check();
    }

    fn send(&mut self, client: ClientId, commands: impl AsRef<[u8]>) -> String {
        self.engine.send(client, commands);
        self.settle();
        self.take(client)
    }

    fn ask(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.send(self.other, commands)
    }

    fn take(&mut self, client: ClientId) -> String {
        String::from_utf8(self.engine.take(client)).unwrap()
    }

    /// Puts a job whose body no other job has, and returns its id.
    fn put(&mut self, len: usize) -> u64 {
        self.last_id += 1;
        let id = self.last_id;
        let reply = self.ask(put(10, 0, 60, body(id, len)));
        assert_eq!(reply, format!("INSERTED {id}\r\n"));
        id
    }

    /// Puts and deletes jobs until compaction has moved all others.
    fn make_garbage(&mut self) {
        for _ in 0..200 {
            let id = self.put(1000);
            assert_eq!(self.ask(format!("delete {id}\r\n")), "DELETED\r\n");
        }
        for _ in 0..200 {
            self.engine.advance(Nanos::from_millis(10));
            self.settle();
        }
    }

    fn state(&mut self, id: u64) -> String {
        yaml::field(&self.ask(format!("stats-job {id}\r\n")), "state").unwrap().to_owned()
    }

    fn restart(self) -> World {
        let disk = FakeDisk::with_files(&self.disk.live_files());
        let now = self.engine.now;
        World::at(disk, now)
    }
}

/// Returns a body that only the job `id` has.
fn body(id: u64, len: usize) -> String {
    let text = format!("body {id} ");
    text.chars().cycle().take(len.max(text.len())).collect()
}

fn reserved(id: u64, len: usize) -> String {
    let body = body(id, len);
    format!("RESERVED {id} {}\r\n{body}\r\n", body.len())
}

fn found(id: u64, len: usize) -> String {
    reserved(id, len).replacen("RESERVED", "FOUND", 1)
}

/// A world with late reads that do not end.
fn world_with_late_reads() -> World {
    let disk = FakeDisk::default();
    disk.delay_reads();
    disk.let_reads_end(Some(0));
    World::new(disk)
}

#[test]
fn a_client_that_waits_for_the_disk_delays_no_other_and_gets_its_replies_in_order() {
    let mut world = world_with_late_reads();
    let [first, second] = [world.put(10), world.put(9000)];
    let worker = world.engine.connect();
    assert_eq!(world.send(worker, "reserve\r\npeek 1000\r\nreserve\r\nlist-tube-used\r\n"), "");
    assert_eq!(world.ask("peek 1000\r\nlist-tube-used\r\n"), "NOT_FOUND\r\nUSING default\r\n");
    assert_eq!(world.state(first), "reserved");
    assert_eq!(world.state(second), "ready", "a command ran before the reply of the one before it");
    world.disk.let_reads_end(None);
    world.settle();
    let expected =
        [reserved(first, 10), "NOT_FOUND\r\n".to_owned(), reserved(second, 9000)].concat();
    assert_eq!(world.take(worker), expected + "USING default\r\n");
}

#[test]
fn a_body_that_is_not_what_was_written_is_given_to_nobody() {
    for fault in [ReadFault::FlippedBit, ReadFault::Error] {
        for is_late in [false, true] {
            let mut world = World::new(FakeDisk::default());
            let [bad, good] = [world.put(700), world.put(800)];
            if is_late {
                world.disk.delay_reads();
            }
            let worker = world.engine.connect();
            world.disk.add_read_fault(fault);
            assert_eq!(world.send(worker, "reserve\r\n"), reserved(good, 800), "{fault:?}");
            assert_eq!(world.state(bad), "buried");
            world.disk.add_read_fault(fault);
            assert_eq!(world.ask(format!("peek {bad}\r\n")), "NOT_FOUND\r\n");
            world.disk.add_read_fault(fault);
            assert_eq!(world.ask(format!("reserve-job {bad}\r\n")), "NOT_FOUND\r\n");
            assert_eq!(world.state(bad), "buried");
            // The next read succeeds.
            assert_eq!(world.ask(format!("peek {bad}\r\n")), found(bad, 700));
            // Until its timeout ends, the worker waits for another job.
            world.ask(format!("kick-job {bad}\r\n"));
            world.disk.add_read_fault(fault);
            assert_eq!(world.send(worker, "reserve-with-timeout 5\r\n"), "");
            assert_eq!(world.state(bad), "buried");
            world.engine.advance(Nanos::from_secs(6));
            world.settle();
            assert_eq!(world.take(worker), "TIMED_OUT\r\n");
            // The bury is recorded.
            let mut world = world.restart();
            assert_eq!(world.state(bad), "buried");
        }
    }
}

#[test]
fn a_body_that_cannot_be_read_now_is_kept_and_its_client_disconnected() {
    for is_late in [false, true] {
        let mut world = World::new(FakeDisk::default());
        let id = world.put(700);
        if is_late {
            world.disk.delay_reads();
        }
        let worker = world.engine.connect();
        world.disk.add_read_fault(ReadFault::TooManyFiles);
        assert_eq!(world.send(worker, "reserve\r\n"), "");
        assert_eq!(world.engine.key(worker), None);
        let worker = world.engine.connect();
        assert_eq!(world.send(worker, "reserve\r\n"), reserved(id, 700));
        // Another client cannot take it away.
        world.disk.add_read_fault(ReadFault::Error);
        assert_eq!(world.ask(format!("peek {id}\r\n")), "NOT_FOUND\r\n");
        assert_eq!(world.state(id), "reserved");
    }
}

#[test]
fn a_batch_leaves_out_what_cannot_be_read() {
    for is_late in [false, true] {
        let mut world = World::new(FakeDisk::default());
        let [first, bad, last] = [world.put(20), world.put(30), world.put(5000)];
        if is_late {
            world.disk.delay_reads();
        }
        let faults = [ReadFault::None, ReadFault::FlippedBit, ReadFault::None];
        let both = |reply: fn(u64, usize) -> String| [reply(first, 20), reply(last, 5000)].concat();
        faults.iter().for_each(|&fault| world.disk.add_read_fault(fault));
        let page = world.ask("peek-batch default ready 10\r\n");
        assert_eq!(page, format!("FOUND_BATCH 2 0\r\n{}", both(found)));
        assert_eq!(world.state(bad), "buried");
        world.ask(format!("kick-job {bad}\r\n"));
        faults.iter().for_each(|&fault| world.disk.add_read_fault(fault));
        let batch = world.ask("reserve-batch 10\r\n");
        assert_eq!(batch, format!("RESERVED_BATCH 2\r\n{}", both(reserved)));
        assert_eq!(world.state(bad), "buried");
    }
}

#[test]
fn a_record_that_was_moved_while_it_was_read_is_read_again() {
    let mut world = world_with_late_reads();
    let id = world.put(500);
    let reader = world.engine.connect();
    assert_eq!(world.send(reader, format!("peek {id}\r\n")), "");
    // The next reads are done at once, so compaction moves the record and its file goes.
    world.disk.set_reads_late(false);
    let before = world.disk.names();
    world.make_garbage();
    assert!(!world.disk.names().contains("binlog.1 "), "{before}, then {}", world.disk.names());
    world.disk.let_reads_end(None);
    world.settle();
    assert_eq!(world.take(reader), found(id, 500));
}

#[test]
fn a_job_that_was_deleted_while_its_body_was_read_is_not_found_or_was_found_before() {
    for is_file_gone in [false, true] {
        let mut world = world_with_late_reads();
        let id = world.put(500);
        let reader = world.engine.connect();
        assert_eq!(world.send(reader, format!("peek {id}\r\n")), "");
        assert_eq!(world.ask(format!("delete {id}\r\n")), "DELETED\r\n");
        if is_file_gone {
            world.make_garbage();
        }
        world.disk.let_reads_end(None);
        world.settle();
        let expected = if is_file_gone { "NOT_FOUND\r\n".to_owned() } else { found(id, 500) };
        assert_eq!(world.take(reader), expected);
    }
}

#[test]
fn what_was_read_for_a_closed_connection_is_dropped() {
    let mut world = world_with_late_reads();
    let [first, second] = [world.put(100), world.put(6000)];
    let worker = world.engine.connect();
    assert_eq!(world.send(worker, "reserve-batch 2\r\n"), "");
    world.disk.let_reads_end(Some(1));
    world.settle();
    world.engine.disconnect(worker);
    world.settle();
    assert_eq!(world.state(first), "ready");
    // The next connection has the same key, and asks for other bodies.
    let next = world.engine.connect();
    assert_eq!(world.send(next, format!("peek {first}\r\npeek {second}\r\n")), "");
    world.disk.let_reads_end(None);
    world.settle();
    assert_eq!(world.take(next), found(first, 100) + &found(second, 6000));
}

#[test]
fn the_ttr_begins_with_the_reply() {
    let mut world = world_with_late_reads();
    let id = world.put(100);
    let worker = world.engine.connect();
    assert_eq!(world.send(worker, "reserve\r\n"), "");
    world.engine.advance(Nanos::from_secs(50));
    world.disk.let_reads_end(None);
    world.settle();
    assert_eq!(world.take(worker), reserved(id, 100));
    world.engine.advance(Nanos::from_secs(50));
    world.settle();
    assert_eq!(world.state(id), "reserved");
}

/// A flush frees its jobs in several iterations.
#[test]
fn a_tube_is_flushed_while_a_body_of_it_is_read_and_cannot_be() {
    for command in ["peek 1\r\n", "reserve\r\n"] {
        let mut world = world_with_late_reads();
        for _ in 0..600 {
            world.put(1);
        }
        let [reader, flusher] = [(); 2].map(|()| world.engine.connect());
        assert_eq!(world.send(reader, command), "");
        world.engine.send(flusher, "flush-tube default\r\n");
        world.engine.iterate();
        world.disk.add_read_fault(ReadFault::FlippedBit);
        world.disk.let_reads_end(None);
        world.settle();
        assert_eq!(world.take(flusher), "FLUSHED 600\r\n");
        let reply = world.take(reader);
        assert_eq!(reply, if command.starts_with("peek") { "NOT_FOUND\r\n" } else { "" });
        let mut world = world.restart();
        assert_eq!(yaml::number(&world.ask("stats\r\n"), "current-jobs-ready"), 0);
    }
}

/// The system does not report errors of the disk to who does not wait for it.
#[test]
fn a_record_that_compaction_cannot_read_is_lost_and_the_next_ones_are_moved() {
    let mut world = World::new(FakeDisk::default());
    let [bad, good] = [world.put(300), world.put(400)];
    world.disk.add_read_fault(ReadFault::Error);
    world.make_garbage();
    assert_eq!(world.ask(format!("stats-job {bad}\r\n")), "NOT_FOUND\r\n");
    assert_eq!(world.ask(format!("peek {good}\r\n")), found(good, 400));
    assert!(world.disk.names().contains("binlog.1.damaged"), "{}", world.disk.names());
}

#[test]
fn a_record_whose_file_cannot_be_opened_is_not_lost() {
    for is_late in [false, true] {
        let mut world = World::new(FakeDisk::default());
        let [first, second] = [world.put(300), world.put(400)];
        if is_late {
            world.disk.delay_reads();
        }
        for _ in 0..10_000 {
            world.disk.add_read_fault(ReadFault::NotOpened);
        }
        world.make_garbage();
        assert_eq!(world.state(first), "ready");
        assert_eq!(world.state(second), "ready");
        assert!(world.disk.names().contains("binlog.1:"), "{}", world.disk.names());
        world.disk.end_read_faults();
        world.make_garbage();
        assert!(!world.disk.names().contains("binlog.1:"), "{}", world.disk.names());
        assert_eq!(world.ask(format!("peek {first}\r\n")), found(first, 300));
        assert_eq!(world.ask(format!("peek {second}\r\n")), found(second, 400));
    }
}

#[test]
fn the_ttr_does_not_run_while_the_disk_reads() {
    let mut world = world_with_late_reads();
    let id = world.put(100);
    let worker = world.engine.connect();
    assert_eq!(world.send(worker, "reserve\r\n"), "");
    world.engine.advance(Nanos::from_secs(500));
    world.settle();
    let stats = world.ask(format!("stats-job {id}\r\n"));
    assert!(stats.contains("state: reserved\n") && stats.contains("time-left: 60\n"), "{stats}");
    world.disk.let_reads_end(None);
    world.settle();
    assert_eq!(world.take(worker), reserved(id, 100));
    let stats = world.ask(format!("stats-job {id}\r\n"));
    assert!(stats.contains("time-left: 59\n"), "{stats}");
    assert!(stats.contains("timeouts: 0\n"), "{stats}");
    world.engine.advance(Nanos::from_secs(61));
    world.settle();
    assert_eq!(world.state(id), "ready");
}

#[test]
fn many_finished_reads_take_several_iterations() {
    let mut world = world_with_late_reads();
    let ids: Vec<u64> = (0..400).map(|_| world.put(50)).collect();
    let workers: Vec<ClientId> = ids.iter().map(|_| world.engine.connect()).collect();
    for &worker in &workers {
        world.engine.send(worker, "reserve\r\n");
    }
    world.engine.settle();
    world.disk.let_reads_end(None);
    let mut iterations = 0;
    while workers.iter().any(|&worker| world.engine.received(worker).is_empty()) {
        world.engine.iterate();
        iterations += 1;
        assert!(iterations < 100, "some worker has no reply");
    }
    assert!(iterations > 2, "{iterations} iterations for 400 replies");
    world.engine.server.check();
}

/// Compaction becomes due in the middle of a command that has just given the job to a client.
#[test]
fn compaction_loses_no_job_that_a_waiting_client_is_about_to_get() {
    let mut world = World::new(FakeDisk::default());
    let bad = world.put(300);
    let worker = world.engine.connect();
    world.ask(format!("reserve-job {bad}\r\nbury {bad} 1\r\n"));
    world.disk.flip_byte("binlog.1", &body(bad, 300));
    assert_eq!(world.send(worker, "reserve\r\n"), "");
    let mut kicks = 0;
    while world.ask(format!("kick-job {bad}\r\n")) == "KICKED\r\n" {
        kicks += 1;
        assert!(kicks < 10_000, "compaction never comes to the record");
        world.engine.advance(Nanos::from_millis(1));
        world.settle();
    }
    assert_eq!(world.ask(format!("stats-job {bad}\r\n")), "NOT_FOUND\r\n");
    assert_eq!(world.take(worker), "");
    let good = world.put(10);
    assert_eq!(world.take(worker), reserved(good, 10));
}

#[test]
fn compaction_moves_cold_records_and_the_disk_use_stays_bounded() {
    for is_late in [false, true] {
        let disk = FakeDisk::default();
        if is_late {
            disk.delay_reads();
        }
        let mut world = World::new(disk);
        let ids: Vec<u64> = (0..30).map(|_| world.put(600)).collect();
        world.make_garbage();
        let live: u64 = 30 * (84 + 7 + 602);
        let used = world.disk.used_by_binlog();
        assert!(used <= 3 * live + 2 * u64::from(FILE_SIZE), "{used} bytes for {live} live ones");
        let migrated = yaml::number(&world.ask("stats\r\n"), "binlog-records-migrated");
        assert!(migrated >= 30, "{migrated} records moved");
        let mut world = world.restart();
        for id in ids {
            assert_eq!(world.ask(format!("peek {id}\r\n")), found(id, 600));
        }
    }
}

/// All records have the same length.
#[test]
fn a_job_is_deleted_while_compaction_reads_its_record() {
    let mut world = World::new(FakeDisk::default());
    let ids: Vec<u64> = (0..40).map(|_| world.put(1000)).collect();
    world.disk.delay_reads();
    world.disk.let_reads_end(Some(0));
    world.make_garbage();
    let migrated = yaml::number(&world.ask("stats\r\n"), "binlog-records-migrated");
    assert_eq!(migrated, 0, "a record was moved that was not read");
    // Compaction waits for the first one, and asks for the next one.
    assert_eq!(world.ask(format!("delete {}\r\n", ids[0])), "DELETED\r\n");
    world.make_garbage();
    world.disk.let_reads_end(None);
    world.make_garbage();
    for &id in &ids[1..] {
        assert_eq!(world.ask(format!("peek {id}\r\n")), found(id, 1000));
    }
}

#[test]
fn a_record_that_cannot_be_moved_is_lost_and_its_file_is_kept() {
    for is_late in [false, true] {
        let mut world = World::new(FakeDisk::default());
        let [bad, good] = [world.put(300), world.put(400)];
        world.disk.flip_byte("binlog.1", &body(bad, 300));
        if is_late {
            world.disk.delay_reads();
        }
        world.make_garbage();
        assert_eq!(world.ask(format!("stats-job {bad}\r\n")), "NOT_FOUND\r\n");
        assert_eq!(world.ask(format!("peek {good}\r\n")), found(good, 400));
        assert!(world.disk.names().contains("binlog.1.damaged"), "{}", world.disk.names());
        let mut world = world.restart();
        assert_eq!(world.ask(format!("peek {good}\r\n")), found(good, 400));
    }
}

#[test]
fn a_kill_in_the_middle_of_a_flush_leaves_no_cold_job() {
    let mut world = World::new(FakeDisk::default());
    world.ask("use flushed\r\n");
    for _ in 0..600 {
        world.ask(put(0, 0, 60, "x"));
    }
    let flusher = world.engine.connect();
    world.engine.send(flusher, "flush-tube flushed\r\n");
    world.engine.iterate();
    let mut world = world.restart();
    world.engine.server.check();
    assert_eq!(world.ask("stats-tube flushed\r\n"), "NOT_FOUND\r\n");
}

#[test]
#[cfg(target_endian = "little")]
fn cold_bodies_in_files_of_c_beanstalkd_are_read() {
    // A day in the year of the fixtures.
    let now = Nanos::from_secs(1_796_000_000);
    let mut version_5 = 5_i32.to_ne_bytes().to_vec();
    for id in 1..=3 {
        version_5.extend(record_v5(id, "old", 1, 10, 0, &body(id, 700)));
    }
    let all = [
        fixture("c-1.12/records").live_files(),
        fixture("c-1.12/moved").live_files(),
        BTreeMap::from([("binlog.4".to_owned(), version_5)]),
    ];
    for files in all {
        let names = FakeDisk::with_files(&files).names();
        let mut world = World::at(FakeDisk::with_files(&files), now);
        let mut warm = Instance::on_files(&files, Policy::synced(FILE_SIZE), now);
        let mut bodies = 0;
        for id in 1..100 {
            let peek = format!("peek {id}\r\n");
            world.engine.send(world.other, &peek);
            world.settle();
            let cold = world.engine.take(world.other);
            let conn = warm.conn;
            assert_eq!(cold, warm.ask_bytes(conn, &peek), "{names}, job {id}");
            bodies += usize::from(cold.starts_with(b"FOUND"));
        }
        assert!(bodies > 1, "{names}: {bodies} jobs");
    }
}

/// Clients with random commands, and reads that end at random moments, some of them with errors.
#[test]
fn every_client_gets_the_right_bodies_in_order() {
    const CLIENTS: usize = 6;
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..30 {
        let disk = FakeDisk::default();
        disk.delay_reads();
        disk.let_reads_end(Some(0));
        let mut world = World::new(disk);
        let clients: Vec<ClientId> = (0..CLIENTS).map(|_| world.engine.connect()).collect();
        let mut lens = BTreeMap::new();
        let mut asked = vec![0_usize; CLIENTS];
        let mut jobs = 0_u64;
        for _ in 0..300 {
            let client = random.usize(..CLIENTS);
            let id = random.u64(..=jobs) + 1;
            let command = match random.u8(..10) {
                0..=3 => {
                    jobs += 1;
                    let len = [1, 20, 300, 5000][random.usize(..4)];
                    let body = body(jobs, len);
                    lens.insert(jobs, body.len());
                    // Ids are given in the order of puts: no other client may put before.
                    let reply = world.ask(put(random.u32(..3), 0, 60, &body));
                    assert_eq!(reply, format!("INSERTED {jobs}\r\n"));
                    continue;
                }
                4 => format!("peek {id}\r\n"),
                5 => "reserve-with-timeout 0\r\n".to_owned(),
                6 => format!("reserve-job {id}\r\n"),
                7 => format!("delete {id}\r\n"),
                8 => format!("release {id} 1 0\r\n"),
                _ => "peek-ready\r\n".to_owned(),
            };
            asked[client] += 1;
            world.engine.send(clients[client], command);
            if random.u8(..20) == 0 {
                let faults = [ReadFault::Error, ReadFault::FlippedBit, ReadFault::None];
                world.disk.add_read_fault(faults[random.usize(..3)]);
            }
            world.disk.let_reads_end(Some(random.usize(..3)));
            world.engine.advance(Nanos::from_millis(random.u64(..2000)));
            world.settle();
        }
        world.disk.let_reads_end(None);
        world.settle();
        for (client, asked) in clients.into_iter().zip(asked) {
            check_replies(&world.take(client), asked, &lens);
        }
    }
}

/// Each command has one reply, and each body is that of its job.
fn check_replies(replies: &str, asked: usize, lens: &BTreeMap<u64, usize>) {
    let mut rest = replies;
    let mut count = 0;
    while let Some((line, after)) = rest.split_once("\r\n") {
        count += 1;
        rest = after;
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["FOUND" | "RESERVED", id, len] => {
                let id: u64 = id.parse().unwrap();
                let body = body(id, lens[&id]);
                assert_eq!(len.parse(), Ok(body.len()), "{line}");
                rest = after.strip_prefix(&(body + "\r\n")).expect("the body of another job");
            }
            ["NOT_FOUND" | "TIMED_OUT" | "DELETED" | "RELEASED" | "DEADLINE_SOON"] => {}
            _ => panic!("{line}"),
        }
    }
    assert_eq!((count, rest), (asked, ""), "replies, and the end of them");
}
