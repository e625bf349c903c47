//! Bodies that are not in memory, and are read back late, with errors, or with flipped bits.

use crate::harness::driver::{Client, End, Nanos, START};
use crate::harness::fake_disk::{FakeDisk, ReadFault};
use crate::harness::instance::{Instance, Policy, STEP};
use crate::harness::record::READY;
use crate::harness::request::put;
use crate::harness::yaml;
use crate::original::{FIXTURE_DAY, fixture, old, old_file};

const FILE_SIZE: u32 = 16 * 1024;

/// Keeps no body in memory.
const POLICY: Policy = Policy { body_cache: Some(0), ..Policy::synced(FILE_SIZE) };

/// A server, and a client of it that is never late.
struct World {
    server: Instance,
    disk: FakeDisk,
    /// The id of the last job.
    last_id: u64,
}

impl Default for World {
    fn default() -> World {
        World::on(FakeDisk::default(), START)
    }
}

impl World {
    fn on(disk: FakeDisk, now: Nanos) -> World {
        World { server: Instance::start(&disk, POLICY, now), disk, last_id: 0 }
    }

    /// Reads of bodies end when the test lets them.
    fn with_late_reads() -> World {
        let disk = FakeDisk::default();
        disk.set_reads_late(true);
        disk.let_reads_end(Some(0));
        World::on(disk, START)
    }

    fn connect<const CLIENTS: usize>(&mut self) -> [Client; CLIENTS] {
        [(); CLIENTS].map(|()| self.server.connect())
    }

    /// Runs until nothing is left but reads that may not end.
    fn settle(&mut self) {
        self.server.settle();
        while self.disk.has_reads() {
            self.server.settle();
        }
        self.server.check();
    }

    /// Lets all reads end.
    fn end_reads(&mut self) {
        self.disk.let_reads_end(None);
        self.settle();
    }

    fn advance(&mut self, span: Nanos) {
        self.server.advance(span);
        self.settle();
    }

    fn send(&mut self, client: Client, commands: impl AsRef<[u8]>) -> String {
        self.server.now = self.server.now + STEP;
        self.server.receive(client, commands);
        self.settle();
        self.server.take_text(client)
    }

    fn ask(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.send(self.server.client, commands)
    }

    #[track_caller]
    fn expect(&mut self, commands: impl AsRef<[u8]>, replies: &str) {
        assert_eq!(self.ask(commands), replies);
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
            self.advance(Nanos::from_millis(10));
        }
    }

    fn state(&mut self, id: u64) -> String {
        yaml::field(&self.ask(format!("stats-job {id}\r\n")), "state").unwrap().to_owned()
    }

    fn stat(&mut self, id: u64, key: &str) -> u64 {
        yaml::number(&self.ask(format!("stats-job {id}\r\n")), key)
    }

    fn restart(self) -> World {
        World::on(FakeDisk::with_files(&self.disk.live_files()), self.server.now)
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

#[test]
fn a_body_that_is_not_what_was_written_is_given_to_nobody() {
    for fault in [ReadFault::FlippedBit, ReadFault::Error] {
        for is_late in [false, true] {
            let mut world = World::default();
            let [bad, good] = [world.put(700), world.put(800)];
            world.disk.set_reads_late(is_late);
            let [worker] = world.connect();
            world.disk.add_read_fault(fault);
            assert_eq!(world.send(worker, "reserve\r\n"), reserved(good, 800), "{fault:?}");
            assert_eq!(world.state(bad), "buried");
            assert_eq!(world.stat(bad, "buries"), 1);
            world.disk.add_read_fault(fault);
            world.expect(format!("peek {bad}\r\n"), "NOT_FOUND\r\n");
            world.disk.add_read_fault(fault);
            world.expect(format!("reserve-job {bad}\r\n"), "NOT_FOUND\r\n");
            assert_eq!(world.state(bad), "buried");
            // The next read succeeds.
            world.expect(format!("peek {bad}\r\n"), &found(bad, 700));
            // Until its timeout ends, the worker waits for another job.
            world.ask(format!("kick-job {bad}\r\n"));
            world.disk.add_read_fault(fault);
            assert_eq!(world.send(worker, "reserve-with-timeout 5\r\n"), "");
            assert_eq!(world.state(bad), "buried");
            world.advance(Nanos::from_secs(6));
            assert_eq!(world.server.take_text(worker), "TIMED_OUT\r\n");
            // The bury is recorded.
            let mut world = world.restart();
            assert_eq!(world.state(bad), "buried");
        }
    }
}

#[test]
fn a_worker_waits_for_a_body_that_cannot_be_read_now() {
    for is_late in [false, true] {
        let mut world = World::default();
        let id = world.put(700);
        world.disk.set_reads_late(is_late);
        let [worker, next] = world.connect();
        (0..3).for_each(|_| world.disk.add_read_fault(ReadFault::TooManyFiles));
        assert_eq!(world.send(worker, "reserve\r\n"), "");
        assert_eq!(world.state(id), "reserved");
        (0..5).for_each(|_| world.advance(Nanos::from_millis(100)));
        assert_eq!(world.server.take_text(worker), reserved(id, 700));
        // Another client cannot take it away.
        world.disk.add_read_fault(ReadFault::Error);
        world.expect(format!("peek {id}\r\n"), "NOT_FOUND\r\n");
        assert_eq!(world.state(id), "reserved");
        // One that waits too long is told, and the job is ready as if it had not been reserved.
        world.send(worker, format!("release {id} 10 0\r\n"));
        (0..1000).for_each(|_| world.disk.add_read_fault(ReadFault::TooManyFiles));
        assert_eq!(world.send(next, "reserve\r\n"), "");
        (0..110).for_each(|_| world.advance(Nanos::from_millis(100)));
        assert_eq!(world.server.take_text(next), "OUT_OF_MEMORY\r\n");
        assert_eq!(world.state(id), "ready");
        assert_eq!(world.stat(id, "reserves"), 1);
    }
}

/// As after a restart with less memory.
#[test]
fn a_body_that_never_fits_in_memory_is_refused_and_stays_ready() {
    let disk = FakeDisk::default();
    let mut before = World::on(disk.clone(), START);
    before.put(60_000);
    before.put(100);
    let now = before.server.now;
    drop(before);
    let policy = Policy { max_memory: 50_000, ..POLICY };
    let mut world = World { server: Instance::start(&disk, policy, now), disk, last_id: 2 };
    for command in [
        "reserve",
        "reserve-with-timeout 1",
        "reserve-job 1",
        "reserve-batch 2",
        "peek 1",
        "peek-ready",
    ] {
        let [client] = world.connect();
        assert_eq!(world.send(client, format!("{command}\r\n")), "OUT_OF_MEMORY\r\n", "{command}");
        assert!(!world.server.is_closed(client));
        assert_eq!(world.state(1), "ready");
    }
    assert_eq!(world.stat(1, "reserves"), 0);
    world.expect("peek 2\r\n", &found(2, 100));
    // A batch ends before it.
    world.expect(
        "peek-batch default ready 10 1\r\n",
        &format!("FOUND_BATCH 1 0\r\n{}", found(2, 100)),
    );
}

/// Beside eight clients that ask for all jobs of a tube again and again.
#[test]
fn a_worker_waits_for_few_reads_of_other_clients() {
    let mut world = World::with_late_reads();
    world.ask("use many\r\n");
    for _ in 0..300 {
        world.put(1000);
    }
    world.ask("use one\r\n");
    let id = world.put(100);
    let busy: [Client; 8] = world.connect();
    for client in busy {
        assert_eq!(world.send(client, "peek-batch many any 1000\r\npeek 7\r\n"), "");
    }
    world.disk.let_reads_end(Some(20));
    world.settle();
    let [worker] = world.connect();
    assert_eq!(world.send(worker, "watch one\r\nignore default\r\nreserve\r\n").lines().count(), 2);
    let mut reads = 0;
    while world.server.received(worker).is_empty() {
        reads += 1;
        assert!(reads <= 4 + busy.len() + 1, "the worker waits for {reads} reads");
        world.disk.let_reads_end(Some(1));
        world.settle();
    }
    assert_eq!(world.server.take_text(worker), reserved(id, 100));
    world.end_reads();
}

#[test]
fn reads_for_closed_connections_are_not_begun() {
    let mut world = World::with_late_reads();
    let ids: Vec<u64> = (0..300).map(|_| world.put(1000)).collect();
    for &id in &ids[..200] {
        let [client] = world.connect();
        assert_eq!(world.send(client, format!("peek {id}\r\n")), "");
        if id % 2 == 0 {
            world.server.end(client, End::HangUp);
        }
    }
    let [batch, worker] = world.connect();
    assert_eq!(world.send(batch, "peek-batch default any 1000\r\n"), "");
    assert_eq!(world.disk.begun_reads(), 4);
    for client in 0..=batch {
        if !world.server.is_closed(client) && client != world.server.client {
            world.server.end(client, End::HangUp);
        }
    }
    assert_eq!(world.send(worker, format!("peek {}\r\n", ids[250])), "");
    world.disk.let_reads_end(Some(5));
    world.settle();
    assert_eq!(world.server.take_text(worker), found(ids[250], 1000));
    assert_eq!(world.disk.begun_reads(), 0);
}

#[test]
fn a_job_whose_worker_waits_is_ready_again_as_soon_as_the_connection_is_gone() {
    let mut world = World::with_late_reads();
    let ids: Vec<u64> = (0..10).map(|_| world.put(1000)).collect();
    let workers: [Client; 10] = world.connect();
    for worker in workers {
        assert_eq!(world.send(worker, "reserve\r\n"), "");
    }
    for (worker, &id) in workers.into_iter().zip(&ids) {
        world.server.end(worker, End::HangUp);
        world.settle();
        assert_eq!(world.state(id), "ready");
        assert_eq!(world.stat(id, "reserves"), 0);
    }
}

#[test]
fn a_body_for_which_many_wait_is_read_once() {
    for len in [50, 6000, 400_000] {
        let mut world = World::with_late_reads();
        let id = world.put(len);
        let clients: [Client; 20] = world.connect();
        for client in clients {
            assert_eq!(world.send(client, format!("peek {id}\r\n")), "");
        }
        assert_eq!(world.disk.begun_reads(), 1);
        world.disk.let_reads_end(Some(1));
        world.settle();
        for client in clients {
            assert_eq!(world.server.take_text(client), found(id, len), "of {len} bytes");
        }
    }
}

/// Clients that do not read their replies.
#[test]
fn unread_replies_take_bounded_memory_and_keep_no_worker_from_its_job() {
    const LEN: usize = 1_000_000;
    let mut world = World::default();
    let ids: Vec<u64> = (0..30).map(|_| world.put(LEN)).collect();
    let small = world.put(100);
    let clients: Vec<Client> = ids.iter().map(|_| world.server.connect()).collect();
    for (&client, id) in clients.iter().zip(&ids) {
        world.server.set_room(client, Some(0));
        world.server.receive(client, format!("peek {id}\r\n"));
        world.settle();
    }
    let made: usize = clients.iter().map(|&client| world.server.made(client).len()).sum();
    assert!((8 * LEN..16 << 20).contains(&made), "{made} bytes are made");
    world.expect(format!("peek {small}\r\n"), &found(small, 100));
    // A large one waits until those are disconnected that take nothing.
    let [worker, slow] = [world.server.connect(), clients[0]];
    assert_eq!(world.send(worker, format!("reserve-job {}\r\n", ids[29])), "");
    for _ in 0..9 {
        assert!(world.server.received(worker).is_empty());
        world.server.set_room(slow, Some(10));
        world.advance(Nanos::from_secs(1));
    }
    for _ in 0..60 {
        world.server.set_room(slow, Some(10));
        world.advance(Nanos::from_secs(1));
    }
    assert_eq!(world.server.take_text(worker), reserved(ids[29], LEN));
    assert!(!world.server.is_closed(slow) && world.server.is_closed(clients[1]));
}

#[test]
fn a_client_that_goes_away_makes_room_for_unread_replies_and_so_does_one_that_reads() {
    const LEN: usize = 1_000_000;
    let mut world = World::default();
    let ids: Vec<u64> = (0..30).map(|_| world.put(LEN)).collect();
    let clients: Vec<Client> = ids.iter().map(|_| world.server.connect()).collect();
    for (&client, id) in clients.iter().zip(&ids) {
        world.server.set_room(client, Some(0));
        world.server.receive(client, format!("peek {id}\r\n"));
        world.settle();
    }
    for (&client, &id) in clients.iter().zip(&ids) {
        if id % 2 == 0 {
            world.server.end(client, End::HangUp);
        } else {
            world.server.set_room(client, None);
        }
        world.settle();
        if id % 2 == 1 {
            assert_eq!(world.server.take_text(client), found(id, LEN));
        }
    }
}

#[test]
fn a_batch_leaves_out_what_cannot_be_read() {
    for is_late in [false, true] {
        let mut world = World::default();
        let [first, bad, last] = [world.put(20), world.put(30), world.put(5000)];
        world.disk.set_reads_late(is_late);
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
fn a_record_is_moved_or_its_job_deleted_while_it_is_read() {
    // It is read again from its new place. After a delete the body is in the file until that is removed.
    for (is_deleted, is_file_gone) in [(false, true), (true, false), (true, true)] {
        let mut world = World::with_late_reads();
        let id = world.put(500);
        let [reader] = world.connect();
        assert_eq!(world.send(reader, format!("peek {id}\r\n")), "");
        if is_deleted {
            world.expect(format!("delete {id}\r\n"), "DELETED\r\n");
        }
        if is_file_gone {
            // The next reads are done at once, so compaction moves records.
            world.disk.set_reads_late(false);
            world.make_garbage();
            assert!(!world.disk.names().contains("binlog.1:"), "{}", world.disk.names());
        }
        world.end_reads();
        let is_found = !(is_deleted && is_file_gone);
        let expected = if is_found { found(id, 500) } else { "NOT_FOUND\r\n".to_owned() };
        assert_eq!(world.server.take_text(reader), expected);
    }
}

#[test]
fn what_was_read_for_a_closed_connection_is_dropped() {
    let mut world = World::with_late_reads();
    let [first, second] = [world.put(100), world.put(6000)];
    let [worker] = world.connect();
    assert_eq!(world.send(worker, "reserve-batch 2\r\n"), "");
    world.disk.let_reads_end(Some(1));
    world.settle();
    world.server.end(worker, End::HangUp);
    world.settle();
    assert_eq!(world.state(first), "ready");
    // The next connection has the same key, and asks for other bodies.
    let [next] = world.connect();
    assert_eq!(world.send(next, format!("peek {first}\r\npeek {second}\r\n")), "");
    world.end_reads();
    assert_eq!(world.server.take_text(next), found(first, 100) + &found(second, 6000));
}

/// A flush frees its jobs in several iterations.
#[test]
fn a_tube_is_flushed_while_a_body_of_it_is_read_and_cannot_be() {
    for command in ["peek 1\r\n", "reserve\r\n"] {
        let mut world = World::with_late_reads();
        for _ in 0..600 {
            world.put(1);
        }
        let [reader, flusher] = world.connect();
        assert_eq!(world.send(reader, command), "");
        world.server.receive(flusher, "flush-tube default\r\n");
        world.server.iterate();
        world.disk.add_read_fault(ReadFault::FlippedBit);
        world.end_reads();
        assert_eq!(world.server.take_text(flusher), "FLUSHED 600\r\n");
        let reply = world.server.take_text(reader);
        assert_eq!(reply, if command.starts_with("peek") { "NOT_FOUND\r\n" } else { "" });
        let mut world = world.restart();
        assert_eq!(yaml::number(&world.ask("stats\r\n"), "current-jobs-ready"), 0);
    }
}

#[test]
fn a_record_whose_file_cannot_be_opened_is_not_lost() {
    for is_late in [false, true] {
        let mut world = World::default();
        let [first, second] = [world.put(300), world.put(400)];
        world.disk.set_reads_late(is_late);
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
        world.expect(format!("peek {first}\r\n"), &found(first, 300));
        world.expect(format!("peek {second}\r\n"), &found(second, 400));
    }
}

#[test]
fn many_finished_reads_take_several_iterations() {
    let mut world = World::with_late_reads();
    let ids: Vec<u64> = (0..400).map(|_| world.put(50)).collect();
    let workers: Vec<Client> = ids.iter().map(|_| world.server.connect()).collect();
    for &worker in &workers {
        world.server.receive(worker, "reserve\r\n");
    }
    world.server.settle();
    world.disk.let_reads_end(None);
    let mut iterations = 0;
    while workers.iter().any(|&worker| world.server.received(worker).is_empty()) {
        world.server.iterate();
        iterations += 1;
        assert!(iterations < 200, "some worker has no reply");
    }
    assert!(iterations >= 400 / 4, "{iterations} iterations for 400 replies");
    world.server.check();
}

/// Compaction becomes due in the middle of a command that has just given the job to a client.
#[test]
fn compaction_loses_no_job_that_a_waiting_client_is_about_to_get() {
    let mut world = World::default();
    let bad = world.put(300);
    let [worker] = world.connect();
    world.ask(format!("reserve-job {bad}\r\nbury {bad} 1\r\n"));
    world.disk.flip_byte("binlog.1", &body(bad, 300));
    assert_eq!(world.send(worker, "reserve\r\n"), "");
    let mut kicks = 0;
    while world.ask(format!("kick-job {bad}\r\n")) == "KICKED\r\n" {
        kicks += 1;
        assert!(kicks < 10_000, "compaction never comes to the record");
        world.advance(Nanos::from_millis(1));
    }
    world.expect(format!("stats-job {bad}\r\n"), "NOT_FOUND\r\n");
    assert_eq!(world.server.take_text(worker), "");
    let good = world.put(10);
    assert_eq!(world.server.take_text(worker), reserved(good, 10));
}

/// All records have the same length.
#[test]
fn a_job_is_deleted_while_compaction_reads_its_record() {
    let mut world = World::default();
    let mut ids: Vec<u64> = (0..40).map(|_| world.put(1000)).collect();
    world.disk.set_reads_late(true);
    world.disk.let_reads_end(Some(0));
    // Their file has little else than garbage.
    for id in ids.split_off(10) {
        world.expect(format!("delete {id}\r\n"), "DELETED\r\n");
    }
    world.make_garbage();
    let migrated = yaml::number(&world.ask("stats\r\n"), "binlog-records-migrated");
    assert_eq!(migrated, 0, "a record was moved that was not read");
    // It is woken by the end of the read, and does not look for it.
    let iterations = world.server.iterations;
    world.advance(Nanos::from_secs(1));
    assert!(world.server.iterations - iterations < 20, "compaction does not rest");
    // Compaction waits for the first one, and asks for the next one.
    world.expect(format!("delete {}\r\n", ids[0]), "DELETED\r\n");
    world.make_garbage();
    world.disk.let_reads_end(None);
    world.make_garbage();
    let migrated = yaml::number(&world.ask("stats\r\n"), "binlog-records-migrated");
    assert!(migrated > 0, "no record was moved");
    for &id in &ids[1..] {
        world.expect(format!("peek {id}\r\n"), &found(id, 1000));
    }
}

/// The system does not report errors of the disk to a caller that does not wait for it.
#[test]
fn a_record_that_cannot_be_moved_is_lost_and_its_file_is_kept() {
    for (is_late, fault) in [(false, None), (true, None), (false, Some(ReadFault::Error))] {
        let mut world = World::default();
        let [bad, good] = [world.put(300), world.put(400)];
        match fault {
            Some(fault) => world.disk.add_read_fault(fault),
            None => world.disk.flip_byte("binlog.1", &body(bad, 300)),
        }
        world.disk.set_reads_late(is_late);
        world.make_garbage();
        world.expect(format!("stats-job {bad}\r\n"), "NOT_FOUND\r\n");
        world.expect(format!("peek {good}\r\n"), &found(good, 400));
        assert!(world.disk.names().contains("binlog.1.damaged"), "{}", world.disk.names());
        world.restart().expect(format!("peek {good}\r\n"), &found(good, 400));
    }
}

#[test]
#[cfg(target_endian = "little")]
fn cold_bodies_in_files_of_c_beanstalkd_are_read() {
    let bodies = [1, 2, 3].map(|id| body(id, 700) + "\r\n");
    let records: Vec<_> =
        (1..).zip(&bodies).map(|(id, body)| old(id, READY, 10, 0, body)).collect();
    let version_5 = [("binlog.4".to_owned(), old_file(&records))].into();
    let fixtures = ["c-1.12/records", "c-1.12/moved"].map(|name| fixture(name).live_files());
    for files in fixtures.into_iter().chain([version_5]) {
        let cold = Instance::on_files(&files, POLICY, FIXTURE_DAY);
        let warm = Instance::on_files(&files, Policy::synced(FILE_SIZE), FIXTURE_DAY);
        let mut bodies = 0;
        let mut servers = [cold, warm];
        for id in 1..100 {
            let [cold, warm] = servers.each_mut().map(|server| {
                let client = server.client;
                server.receive(client, format!("peek {id}\r\n"));
                server.settle();
                server.take(client)
            });
            assert_eq!(cold, warm, "job {id} of {:?}", files.keys());
            bodies += usize::from(cold.starts_with(b"FOUND"));
        }
        assert!(bodies > 1, "{bodies} jobs of {:?}", files.keys());
    }
}
