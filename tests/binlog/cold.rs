//! Bodies that are not in memory, and are read back late, with errors, or with flipped bits.

use crate::begin_flush;
use crate::harness::driver::{Client, End, Nanos, Options, START, Settings};
use crate::harness::fake_disk::{FakeDisk, ReadFault};
use crate::harness::instance::Instance;
use crate::harness::record::READY;
use crate::harness::request::put;
use crate::harness::yaml;
use crate::original::{FIXTURE_DAY, fixture, old, old_file};

const FILE_SIZE: u32 = 16 * 1024;

/// Keeps no body in memory.
const OPTIONS: Options = Options::synced(FILE_SIZE).cold();

fn start() -> Instance {
    start_with(|_| {})
}

/// The options with other settings.
fn options(change: impl FnOnce(&mut Settings)) -> Options {
    let mut options = OPTIONS;
    change(&mut options.settings);
    options
}

fn start_with(change: impl FnOnce(&mut Settings)) -> Instance {
    Instance::start(&FakeDisk::default(), options(change), START)
}

/// Reads of bodies end when the test lets them.
fn start_with_late_reads() -> Instance {
    let server = start();
    server.disk.hold_reads(true);
    server
}

impl Instance {
    /// Lets this number of reads end, or all.
    fn let_reads_end(&mut self, count: Option<usize>) {
        self.disk.faults().reads_left = count;
        self.settle();
    }

    fn end_reads(&mut self) {
        self.let_reads_end(None);
    }

    /// Lets the next reads fail.
    fn fail_reads(&self, faults: impl IntoIterator<Item = ReadFault>) {
        self.disk.faults().of_reads.extend(faults);
    }

    /// Sends the request of a client that does not read, or no more than this number of bytes.
    fn ask_unread(&mut self, client: Client, room: usize, request: impl AsRef<[u8]>) {
        self.set_room(client, Some(room));
        self.receive(client, request);
    }

    /// Each of these clients asks, and waits for a body.
    #[track_caller]
    fn wait_each(&mut self, clients: &[Client], request: impl AsRef<[u8]>) {
        for &client in clients {
            assert_eq!(self.send(client, &request), "");
        }
    }

    /// The bytes of the replies that the server has made and these clients have not taken.
    fn made_for(&self, clients: &[Client]) -> usize {
        clients.iter().map(|&client| self.made(client).len()).sum()
    }

    #[track_caller]
    fn expect_found(&mut self, id: u64, len: usize) {
        self.expect(format!("peek {id}\r\n"), &found(id, len));
    }

    /// Iterates until each of these clients has a reply; returns how many iterations that took.
    fn iterate_until_replied(&mut self, clients: &[Client], most: usize) -> usize {
        let begun = self.iterations;
        while clients.iter().any(|&client| self.received(client).is_empty()) {
            let is_due = self.next_due().is_some_and(|due| due <= self.now);
            assert!(is_due || self.disk.has_reads() || self.is_busy(), "the server rests");
            self.iterate();
            assert!(self.iterations - begun < most, "some client has no reply");
        }
        self.check();
        self.iterations - begun
    }

    /// Puts a job whose body no other job has, and returns its id.
    fn put_of(&mut self, len: usize) -> u64 {
        let id = self.facts().puts_begun + 1;
        self.expect(put(10, 0, 60, body(id, len)), &format!("INSERTED {id}\r\n"));
        id
    }

    /// Puts and deletes jobs until compaction has moved all others.
    fn make_garbage(&mut self) {
        for _ in 0..200 {
            let id = self.put_of(1000);
            self.delete(id);
        }
        for _ in 0..200 {
            self.advance(Nanos::from_millis(10));
        }
    }

    fn state(&mut self, id: u64) -> String {
        yaml::field(&self.ask(format!("stats-job {id}\r\n")), "state").unwrap().to_owned()
    }

    fn stat_of(&mut self, id: u64, key: &str) -> u64 {
        yaml::number(&self.ask(format!("stats-job {id}\r\n")), key)
    }
}

/// Returns a body that only the job `id` has.
fn body(id: u64, len: usize) -> String {
    let text = format!("body {id} ");
    let mut body = text.repeat(len.max(text.len()).div_ceil(text.len()));
    body.truncate(len.max(text.len()));
    body
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
            let mut server = start();
            let [bad, good] = [server.put_of(700), server.put_of(800)];
            server.disk.faults().reads_late = is_late;
            let [worker] = server.clients();
            server.fail_reads([fault]);
            assert_eq!(server.send(worker, "reserve\r\n"), reserved(good, 800), "{fault:?}");
            assert_eq!(server.state(bad), "buried");
            assert_eq!(server.stat_of(bad, "buries"), 1);
            for command in ["peek", "reserve-job"] {
                server.fail_reads([fault]);
                server.expect(format!("{command} {bad}\r\n"), "NOT_FOUND\r\n");
            }
            assert_eq!(server.state(bad), "buried");
            // No worker got it.
            assert_eq!(server.stat_of(bad, "reserves"), 0);
            // The next read succeeds.
            server.expect_found(bad, 700);
            // Until its timeout ends, the worker waits for another job.
            server.ask(format!("kick-job {bad}\r\n"));
            server.fail_reads([fault]);
            assert_eq!(server.send(worker, "reserve-with-timeout 5\r\n"), "");
            assert_eq!(server.state(bad), "buried");
            server.advance(Nanos::from_secs(6));
            assert_eq!(server.take_text(worker), "TIMED_OUT\r\n");
            // The bury is recorded.
            let mut server = server.after_crash(OPTIONS);
            assert_eq!(server.state(bad), "buried");
        }
    }
}

#[test]
fn a_worker_waits_for_a_body_that_cannot_be_read_now() {
    for is_late in [false, true] {
        let mut server = start();
        let id = server.put_of(700);
        server.disk.faults().reads_late = is_late;
        let [worker, next] = server.clients();
        server.fail_reads([ReadFault::TooManyFiles; 3]);
        assert_eq!(server.send(worker, "reserve\r\n"), "");
        assert_eq!(server.state(id), "reserved");
        (0..5).for_each(|_| server.advance(Nanos::from_millis(100)));
        assert_eq!(server.take_text(worker), reserved(id, 700));
        // Another client cannot take it away.
        server.fail_reads([ReadFault::Error]);
        server.expect(format!("peek {id}\r\n"), "NOT_FOUND\r\n");
        assert_eq!(server.state(id), "reserved");
        // One that waits too long is told, and the job is ready as if it had not been reserved.
        server.send(worker, format!("release {id} 10 0\r\n"));
        server.fail_reads([ReadFault::TooManyFiles; 1000]);
        assert_eq!(server.send(next, "reserve\r\n"), "");
        (0..110).for_each(|_| server.advance(Nanos::from_millis(100)));
        assert_eq!(server.take_text(next), "OUT_OF_MEMORY\r\n");
        assert_eq!(server.state(id), "ready");
        assert_eq!(server.stat_of(id, "reserves"), 1);
    }
}

/// Only one of them is tried each 0.1 s.
#[test]
fn all_clients_whose_bodies_cannot_be_read_for_too_long_are_refused() {
    let mut server = start();
    let id = server.put_of(700);
    server.fail_reads([ReadFault::TooManyFiles; 1000]);
    let clients: [Client; 20] = server.clients();
    server.wait_each(&clients, format!("peek {id}\r\n"));
    server.advance(Nanos::from_millis(10_100));
    for client in clients {
        assert_eq!(server.take_text(client), "OUT_OF_MEMORY\r\n");
    }
}

/// As after a restart with less memory.
#[test]
fn a_body_that_never_fits_in_memory_is_refused_and_stays_ready() {
    let mut before = start();
    before.put_of(60_000);
    before.put_of(100);
    let mut server = before.again_on(&before.disk, options(|it| it.max_memory_bytes = 50_000));
    for command in
        ["reserve", "reserve-with-timeout 1", "reserve-job 1", "reserve-batch 2", "peek 1"]
    {
        let [client] = server.clients();
        assert_eq!(server.send(client, format!("{command}\r\n")), "OUT_OF_MEMORY\r\n", "{command}");
        assert!(!server.is_closed(client));
        assert_eq!(server.state(1), "ready");
    }
    assert_eq!(server.stat_of(1, "reserves"), 0);
    server.expect_found(2, 100);
    // A batch ends before it.
    let batch = format!("FOUND_BATCH 1 0\r\n{}", found(2, 100));
    server.expect("peek-batch default ready 10 1\r\n", &batch);
}

/// The cache has them in the memory pages of the jobs, from the first to the last and again.
#[test]
fn the_memory_of_the_cache_is_taken_again_when_it_has_filled_again() {
    let mut before = start();
    let mut small: Vec<u64> = (0..14).map(|_| before.put_of(100_000)).collect();
    before.ask_now("put 9 0 60 0\r\n\r\n".repeat(2_100));
    let large = before.put_of(LEN);
    let with_cache = options(|it| {
        (it.max_memory_bytes, it.body_cache_bytes) = (2_000_000, Some(1_500_000));
    });
    let mut server = before.again_on(&before.disk, with_cache);
    for round in 0..3 {
        let taken = server.job_bytes();
        assert!(taken > 1_600_000, "{taken} bytes in round {round}");
        let client = server.client;
        server.receive(client, format!("peek {large}\r\n"));
        (0..20).for_each(|_| _ = server.iterate());
        assert!(server.take_text(client) == found(large, LEN), "in round {round}");
        for id in &mut small {
            server.delete(*id);
            *id = server.put([b'x'; 100_000]).expect("there is memory");
        }
    }
}

/// Eight other clients ask for all jobs of a tube each, in small replies and in large ones.
#[test]
fn a_worker_waits_for_few_reads_of_other_clients() {
    for (batched, len) in [(50, 100), (300, 100), (50, 300_000), (300, 300_000)] {
        let mut server = start_with_late_reads();
        let busy: [Client; 8] = server.clients();
        for client in busy {
            server.ask(format!("use many-{client}\r\n"));
            (0..batched).for_each(|_| _ = server.put_of(1000));
            server.wait_each(&[client], format!("peek-batch many-{client} any 1000\r\n"));
        }
        server.ask("use one\r\n");
        let id = server.put_of(len);
        server.let_reads_end(Some(20));
        let [worker] = server.clients();
        let lines = server.send(worker, "watch one\r\nignore default\r\nreserve\r\n");
        assert_eq!(lines.lines().count(), 2);
        let mut reads = 0;
        while server.received(worker).is_empty() {
            reads += 1;
            assert!(reads <= 4 + busy.len() + 1, "{len} bytes wait for {reads} reads");
            server.let_reads_end(Some(1));
        }
        assert_eq!(server.take_text(worker), reserved(id, len));
        server.end_reads();
    }
}

/// Each of these has a large body in its turn, which takes as long as many small ones.
#[test]
fn small_replies_wait_for_one_large_body_together() {
    let mut server = start_with_late_reads();
    let busy: [Client; 4] = server.clients();
    for client in busy {
        server.ask(format!("use many-{client}\r\n"));
        (0..3).for_each(|_| _ = server.put_of(300_000));
        server.wait_each(&[client], format!("peek-batch many-{client} any 3\r\n"));
    }
    server.ask("use small\r\n");
    let ids = [(); 20].map(|()| server.put_of(100));
    let workers: [Client; 20] = server.clients();
    for (client, id) in workers.into_iter().zip(ids) {
        server.wait_each(&[client], format!("peek {id}\r\n"));
    }
    // Those that are with the disk already, and one more.
    server.let_reads_end(Some(4 + 1 + workers.len()));
    for (client, id) in workers.into_iter().zip(ids) {
        assert_eq!(server.take_text(client), found(id, 100));
    }
    server.end_reads();
}

#[test]
fn reads_for_closed_connections_are_not_begun() {
    let mut server = start_with_late_reads();
    let ids: Vec<u64> = (0..300).map(|_| server.put_of(1000)).collect();
    for &id in &ids[..200] {
        let [client] = server.clients();
        server.wait_each(&[client], format!("peek {id}\r\n"));
        if id % 2 == 0 {
            server.end(client, End::HangUp);
        }
    }
    let [batch, worker] = server.clients();
    server.wait_each(&[batch], "peek-batch default any 1000\r\n");
    assert_eq!(server.disk.begun_reads(), 4);
    for client in 0..=batch {
        if !server.is_closed(client) && client != server.client {
            server.end(client, End::HangUp);
        }
    }
    // Another one has the number of one whose read was begun.
    server.settle();
    let [other] = server.clients();
    assert_eq!(server.id(other), 2);
    server.wait_each(&[worker], format!("peek {}\r\n", ids[250]));
    server.let_reads_end(Some(5));
    assert_eq!(server.take_text(worker), found(ids[250], 1000));
    assert_eq!(server.disk.begun_reads(), 0);
}

#[test]
fn a_large_reply_is_made_when_the_client_of_another_is_gone() {
    const LEN: usize = 300_000;
    let mut server = start_with_late_reads();
    let ids: Vec<u64> = (0..3).map(|_| server.put_of(LEN)).collect();
    let [unread, gone, other] = server.clients();
    server.ask_unread(unread, 0, format!("peek {}\r\n", ids[0]));
    server.let_reads_end(Some(1));
    for (client, id) in [(gone, ids[1]), (other, ids[2])] {
        server.wait_each(&[client], format!("peek {id}\r\n"));
    }
    server.end(gone, End::HangUp);
    server.end_reads();
    assert_eq!(server.take_text(other), found(ids[2], LEN));
}

/// The job came while the worker waited, with its body in memory.
#[test]
fn a_body_that_a_closed_worker_was_about_to_get_is_cold_again() {
    let mut server = start();
    let [worker, producer] = server.clients();
    assert_eq!(server.send(worker, "reserve-batch 5 9\r\n"), "");
    server.receive(producer, put(0, 0, 9, "hello"));
    server.iterate();
    assert_eq!(server.received(worker), b"", "its batch is made in several iterations");
    server.end(worker, End::HangUp);
    server.settle();
    server.check();
}

#[test]
fn a_body_for_which_many_wait_is_read_once() {
    for len in [50, 6000, 400_000] {
        let mut server = start_with_late_reads();
        let id = server.put_of(len);
        let clients: [Client; 20] = server.clients();
        server.wait_each(&clients, format!("peek {id}\r\n"));
        assert_eq!(server.disk.begun_reads(), 1);
        server.let_reads_end(Some(1));
        for client in clients {
            assert_eq!(server.take_text(client), found(id, len), "of {len} bytes");
        }
    }
}

const LEN: usize = 1_000_000;

/// Returns jobs, and clients of which each has peeked one and does not read the reply.
fn start_with_unread_replies() -> (Instance, Vec<u64>, Vec<Client>) {
    let mut server = start();
    let ids: Vec<u64> = (0..30).map(|_| server.put_of(LEN)).collect();
    let clients: Vec<Client> = ids.iter().map(|_| server.connect()).collect();
    for (&client, id) in clients.iter().zip(&ids) {
        server.ask_unread(client, 0, format!("peek {id}\r\n"));
        server.settle();
    }
    (server, ids, clients)
}

#[test]
fn unread_replies_take_bounded_memory_and_keep_no_worker_from_its_job() {
    let (mut server, ids, clients) = start_with_unread_replies();
    let small = server.put_of(100);
    let made = server.made_for(&clients);
    assert!((8 * LEN..16 << 20).contains(&made), "{made} bytes are made");
    server.expect_found(small, 100);
    // A large one waits until those are disconnected that take nothing.
    let [worker, quick, slow] = [server.connect(), server.connect(), clients[0]];
    server.wait_each(&[worker], format!("reserve-job {}\r\n", ids[29]));
    // One whose reply has the same length each second has taken the one before.
    let short = server.put_of(100_000);
    server.ask_unread(quick, 10, format!("peek {short}\r\n"));
    for _ in 0..9 {
        assert!(server.received(worker).is_empty());
        server.set_room(slow, Some(10));
        server.advance(Nanos::from_secs(1));
    }
    for _ in 0..60 {
        server.set_room(slow, Some(10));
        server.set_room(quick, None);
        server.settle();
        assert_eq!(server.take_text(quick), found(short, 100_000));
        server.ask_unread(quick, 10, format!("peek {short}\r\n"));
        server.settle();
        server.advance(Nanos::from_secs(1));
    }
    assert_eq!(server.take_text(worker), reserved(ids[29], LEN));
    assert!(!server.is_closed(slow) && server.is_closed(clients[1]));
}

/// All connections are looked at, so this takes more iterations with more of them.
#[test]
fn unread_replies_are_searched_in_steps() {
    let mut options = OPTIONS;
    options.limits.most_due_work = 4;
    let mut server = Instance::start(&FakeDisk::default(), options, START);
    let clients = [(); 20].map(|()| {
        let (id, client) = (server.put_of(LEN), server.connect());
        server.ask_unread(client, 0, format!("peek {id}\r\n"));
        client
    });
    let (id, worker) = (server.put_of(LEN), server.connect());
    server.wait_each(&[worker], format!("reserve-job {id}\r\n"));
    let mut closed = 0;
    while server.received(worker).is_empty() {
        server.now = server.now + Nanos::from_millis(100);
        server.iterate();
        let before = closed;
        closed = clients.iter().filter(|&&client| server.is_closed(client)).count();
        assert!(closed - before <= 4, "{closed} are closed, before the iteration {before}");
        assert!(server.now < START + Nanos::from_secs(60), "{closed} are closed");
    }
}

/// Their replies have memory one after the other.
#[test]
fn many_clients_that_take_nothing_keep_no_worker_from_its_job() {
    let mut server = start();
    let id = server.put_of(LEN);
    for _ in 0..100 {
        let (unread, client) = (server.put_of(LEN), server.connect());
        server.ask_unread(client, 0, format!("peek {unread}\r\n"));
    }
    let [worker] = server.clients();
    server.wait_each(&[worker], format!("reserve-job {id}\r\n"));
    (0..40).for_each(|_| server.advance(Nanos::from_secs(1)));
    assert!(server.take_text(worker) == reserved(id, LEN));
}

/// Each takes its reply in less than a second, and asks again. There is memory for three of them.
#[test]
fn clients_that_take_their_replies_stay_connected_while_others_wait() {
    let mut server = start_with(|it| it.max_memory_bytes = 17 << 20);
    let clients: [Client; 5] = server.clients();
    let ids = clients.map(|_| server.put_of(LEN));
    let (mut replies, mut held) = (0, [0; 5]);
    for (client, id) in clients.into_iter().zip(ids) {
        server.ask_unread(client, 10, format!("peek {id}\r\n"));
        server.settle();
    }
    for step in 0..400 {
        for (index, (&client, &id)) in clients.iter().zip(&ids).enumerate() {
            assert!(!server.is_closed(client), "client {index} in step {step}");
            held[index] += u32::from(!server.made(client).is_empty());
            if held[index] == 6 {
                held[index] = 0;
                replies += 1;
                server.set_room(client, None);
                server.settle();
                assert!(server.take_text(client) == found(id, LEN));
                server.ask_unread(client, 10, format!("peek {id}\r\n"));
                server.settle();
            }
        }
        server.advance(Nanos::from_millis(100));
    }
    assert!(replies > 100, "{replies} replies");
}

/// The bodies of such a reply are copied to its text.
#[test]
fn unread_batches_of_small_bodies_take_bounded_memory() {
    let mut server = start_with(|it| it.max_memory_bytes = 16 << 20);
    server.disk.hold_reads(true);
    let ids: Vec<u64> = (0..250).map(|_| server.put_of(4000)).collect();
    let clients: [Client; 40] = server.clients();
    for client in clients {
        server.ask_unread(client, 0, "peek-batch default ready 1000\r\n");
    }
    server.end_reads();
    // An eighth of the memory, or little more, is for text.
    let is_bounded = |server: &Instance| {
        let made = server.made_for(&clients);
        assert!((1 << 20..3 << 20).contains(&made), "{made} bytes are made");
    };
    is_bounded(&server);
    // A worker gets its job at once. A batch waits for a client that reads.
    let [worker] = server.clients();
    assert_eq!(server.send(worker, "reserve\r\n"), reserved(ids[0], 4000));
    let reader = *clients.iter().find(|&&client| server.made(client).len() > 1 << 19).unwrap();
    server.set_room(reader, None);
    server.advance(Nanos::from_millis(1));
    is_bounded(&server);
    // Or until a client that takes nothing is disconnected.
    for _ in 0..1000 {
        server.advance(Nanos::from_secs(1));
    }
    let is_open = |&&it: &&Client| it != reader && !server.is_closed(it);
    let waiting = clients.iter().filter(is_open).filter(|&&it| server.made(it).is_empty());
    assert_eq!(waiting.count(), 0, "batches that wait");
}

/// Otherwise the reply waits for itself, and all others behind it.
#[test]
fn a_reply_that_waits_for_memory_keeps_no_body_that_another_client_has_got() {
    let mut server = start_with(|it| it.max_memory_bytes = 1 << 20);
    let [first, second] = [40_000; 2].map(|len| server.put_of(len));
    let [slow, batch] = server.clients();
    server.ask_unread(slow, 0, format!("peek {first}\r\n"));
    server.settle();
    server.wait_each(&[batch], "peek-batch default ready 10\r\n");
    server.end(slow, End::HangUp);
    server.settle();
    let both = [first, second].map(|id| found(id, 40_000)).concat();
    assert_eq!(server.take_text(batch), format!("FOUND_BATCH 2 0\r\n{both}"));
}

#[test]
fn a_client_that_goes_away_makes_room_for_unread_replies_and_so_does_one_that_reads() {
    let (mut server, ids, clients) = start_with_unread_replies();
    for (&client, &id) in clients.iter().zip(&ids) {
        if id % 2 == 0 {
            server.end(client, End::HangUp);
        } else {
            server.set_room(client, None);
        }
        server.settle();
        if id % 2 == 1 {
            assert_eq!(server.take_text(client), found(id, LEN));
        }
    }
}

#[test]
fn a_batch_leaves_out_what_cannot_be_read() {
    for is_late in [false, true] {
        let mut server = start();
        let [first, bad, last] = [server.put_of(20), server.put_of(30), server.put_of(5000)];
        server.disk.faults().reads_late = is_late;
        let faults = [ReadFault::None, ReadFault::FlippedBit, ReadFault::None];
        let both = |reply: fn(u64, usize) -> String| [reply(first, 20), reply(last, 5000)].concat();
        server.fail_reads(faults);
        let page = server.ask("peek-batch default ready 10\r\n");
        assert_eq!(page, format!("FOUND_BATCH 2 0\r\n{}", both(found)));
        assert_eq!(server.state(bad), "buried");
        server.ask(format!("kick-job {bad}\r\n"));
        server.fail_reads(faults);
        let batch = server.ask("reserve-batch 10\r\n");
        assert_eq!(batch, format!("RESERVED_BATCH 2\r\n{}", both(reserved)));
        assert_eq!(server.state(bad), "buried");
    }
}

#[test]
fn a_record_is_moved_or_its_job_deleted_while_it_is_read() {
    // It is read again from its new place. After a delete the body is in the file until that is removed.
    for (is_deleted, is_file_gone) in [(false, true), (true, false), (true, true)] {
        let mut server = start_with_late_reads();
        let id = server.put_of(500);
        let [reader] = server.clients();
        server.wait_each(&[reader], format!("peek {id}\r\n"));
        if is_deleted {
            server.delete(id);
        }
        if is_file_gone {
            // The next reads are done at once, so compaction moves records.
            server.disk.faults().reads_late = false;
            server.make_garbage();
            assert!(!server.disk.names().contains("binlog.1:"), "{}", server.disk.names());
        }
        server.end_reads();
        let is_found = !(is_deleted && is_file_gone);
        let expected = if is_found { found(id, 500) } else { "NOT_FOUND\r\n".to_owned() };
        assert_eq!(server.take_text(reader), expected);
    }
}

/// A flush frees its jobs in several iterations.
#[test]
fn a_tube_is_flushed_while_a_body_of_it_is_read_and_cannot_be() {
    for command in ["peek 1\r\n", "reserve\r\n"] {
        let mut server = start_with_late_reads();
        (0..600).for_each(|_| _ = server.put_of(1));
        let [reader, flusher] = server.clients();
        server.wait_each(&[reader], command);
        server.receive(flusher, "flush-tube default\r\n");
        server.iterate();
        server.fail_reads([ReadFault::FlippedBit]);
        server.end_reads();
        assert_eq!(server.take_text(flusher), "FLUSHED 600\r\n");
        let reply = server.take_text(reader);
        assert_eq!(reply, if command.starts_with("peek") { "NOT_FOUND\r\n" } else { "" });
        assert_eq!(server.after_crash(OPTIONS).facts().ready, 0);
    }
}

/// The flush frees delayed jobs last. A record after that of the flush would bring the job back.
#[test]
fn a_job_that_is_flushed_while_compaction_reads_its_record_is_not_moved() {
    let mut server = start_with_late_reads();
    let put = format!("put-in-tube a 10 900 60 1000\r\n{}\r\n", body(1, 1000));
    server.expect(put, "INSERTED 1\r\n");
    for _ in 0..20 {
        let id = server.put_of(1000);
        server.delete(id);
    }
    server.ask_now("put-in-tube a 0 0 60 0\r\n\r\n".repeat(1_000));
    server.make_garbage();
    assert_eq!(server.disk.begun_reads(), 1, "compaction reads no record");
    let [flusher] = server.clients();
    begin_flush(&mut server, flusher, "flush-tube a\r\n");
    server.disk.faults().reads_left = None;
    server.iterate();
    assert_eq!(server.disk.begun_reads(), 0);
    // A crash before the job is freed.
    assert_eq!(server.after_crash(OPTIONS).recovered.jobs, 0);
}

#[test]
fn a_record_whose_file_cannot_be_opened_is_not_lost() {
    for is_late in [false, true] {
        let mut server = start();
        let [first, second] = [server.put_of(300), server.put_of(400)];
        server.disk.faults().reads_late = is_late;
        server.fail_reads([ReadFault::NotOpened; 10_000]);
        server.make_garbage();
        assert_eq!(server.state(first), "ready");
        assert_eq!(server.state(second), "ready");
        assert!(server.disk.names().contains("binlog.1:"), "{}", server.disk.names());
        server.disk.faults().of_reads.clear();
        server.make_garbage();
        assert!(!server.disk.names().contains("binlog.1:"), "{}", server.disk.names());
        server.expect_found(first, 300);
        server.expect_found(second, 400);
    }
}

#[test]
fn other_files_are_compacted_while_one_is_moved_away() {
    for is_late in [false, true] {
        let mut server = start();
        server.disk.faults().reads_late = is_late;
        let ids: Vec<u64> = (0..1000).map(|_| server.put_of(100)).collect();
        server.disk.rename("binlog.1", "away");
        for id in ids.iter().filter(|&id| id % 10 > 0) {
            server.delete(*id);
        }
        server.make_garbage();
        let names = server.disk.names();
        assert!(!names.contains("binlog.2:") && names.contains("away"), "{names}");
        server.disk.rename("away", "binlog.1");
        server.make_garbage();
        assert!(!server.disk.names().contains("binlog.1:"), "{}", server.disk.names());
        for id in ids.into_iter().filter(|id| id % 10 == 0) {
            server.expect_found(id, 100);
        }
    }
}

/// Each waits for the disk, all wait for one read, or for the next try.
#[test]
fn many_waiting_replies_take_several_iterations() {
    for (most, command, faults) in
        [(4, "reserve\r\n", 0), (64, "peek 1\r\n", 0), (256, "peek 1\r\n", 1)]
    {
        let mut server = start();
        server.disk.hold_reads(faults == 0);
        server.fail_reads(vec![ReadFault::TooManyFiles; faults]);
        (0..600).for_each(|_| _ = server.put_of(50));
        let workers: Vec<Client> = (0..600).map(|_| server.connect()).collect();
        for &worker in &workers {
            server.receive(worker, command);
        }
        server.settle();
        server.disk.faults().reads_left = None;
        server.now = server.now + Nanos::from_millis(101);
        let iterations = server.iterate_until_replied(&workers, 200);
        assert!(iterations >= 600 / most, "{iterations} iterations for 600 replies");
    }
}

/// The disk was busy when they asked, and the system has read ahead meanwhile; or each read costs 2 us at once.
#[test]
fn bodies_in_the_page_cache_are_read_in_several_iterations() {
    for (count, jobs, is_held) in [(20, 500, true), (1, 800, false)] {
        let mut server = start();
        (0..jobs).for_each(|_| _ = server.put_of(10));
        let clients: Vec<Client> = (0..count).map(|_| server.connect()).collect();
        for &client in &clients {
            server.receive(client, "peek-batch default any 1000\r\n");
        }
        if is_held {
            server.disk.hold_reads(true);
            server.settle();
            server.disk.hold_reads(false);
        }
        let iterations = server.iterate_until_replied(&clients, jobs * count);
        assert!(iterations > jobs * count / 512, "all was read in {iterations} iterations");
        let batch = format!("FOUND_BATCH {jobs} ");
        assert!(clients.into_iter().all(|client| server.take_text(client).starts_with(&batch)));
    }
}

/// Other replies of its class are tried next, and those of the other class do not wait.
#[test]
fn a_body_for_which_there_is_no_memory_delays_no_other_reply() {
    // Of this, 768 KiB are for large replies.
    let mut server = start_with(|it| it.max_memory_bytes = 4 << 20);
    let [too_long, long, short] = [700_000, 300_000, 100].map(|len| server.put_of(len));
    server.disk.faults().longest_read = Some(500_000);
    let [unlucky, client] = server.clients();
    server.wait_each(&[unlucky], format!("reserve-job {too_long}\r\n"));
    for _ in 0..32 {
        assert!(server.received(unlucky).is_empty());
        assert_eq!(server.send(client, format!("peek {short}\r\n")), found(short, 100));
        server.receive(client, format!("peek {long}\r\n"));
        // Both want the same memory, and one of them is tried each 0.1 s.
        (0..3).for_each(|_| server.advance(Nanos::from_millis(100)));
        assert!(server.take_text(client) == found(long, 300_000), "a large reply waits");
    }
    (0..6).for_each(|_| server.advance(Nanos::from_millis(100)));
    assert_eq!(server.take_text(unlucky), "OUT_OF_MEMORY\r\n");
    assert_eq!(server.state(too_long), "ready");
    // With memory it is read at the next try.
    server.wait_each(&[unlucky], format!("reserve-job {too_long}\r\n"));
    server.disk.faults().longest_read = None;
    server.advance(Nanos::from_millis(100));
    assert!(server.take_text(unlucky) == reserved(too_long, 700_000));
}

/// Otherwise the reply before it waits for this memory, and this one for that reply.
#[test]
fn a_batch_that_waits_for_the_next_try_keeps_no_body() {
    // Of this, 768 KiB are for large replies.
    let mut server = start_with(|it| it.max_memory_bytes = 4 << 20);
    let [first, second, other] = [400_000, 350_000, 390_000].map(|len| server.put_of(len));
    let [batch, client] = server.clients();
    server.disk.hold_reads(true);
    server.fail_reads([ReadFault::None, ReadFault::TooManyFiles]);
    server.wait_each(&[batch], "peek-batch default ready 2\r\n");
    server.wait_each(&[client], format!("peek {other}\r\n"));
    server.disk.hold_reads(false);
    server.end_reads();
    assert!(server.received(batch).is_empty() && server.received(client).is_empty());
    server.advance(Nanos::from_millis(100));
    assert!(server.take_text(client) == found(other, 390_000));
    let both = [found(first, 400_000), found(second, 350_000)].concat();
    assert!(server.take_text(batch) == format!("FOUND_BATCH 2 2\r\n{both}"));
}

/// What they have found counts while they wait for the bodies.
#[test]
fn batches_of_many_waiting_clients_are_shorter() {
    const CLIENTS: usize = 40;
    let mut server = start_with(|it| it.max_memory_bytes = 1 << 20);
    server.disk.hold_reads(true);
    (0..1000).for_each(|_| _ = server.put_of(10));
    let clients: [Client; CLIENTS] = server.clients();
    server.wait_each(&clients, "peek-batch default any 1000\r\n");
    server.end(clients[0], End::HangUp);
    server.end_reads();
    let replies = clients[1..].iter().map(|&client| server.take_text(client));
    let found: usize = replies.map(|reply| reply.matches("FOUND ").count()).sum();
    // An eighth of the memory is for them, and each has one.
    assert!((2_000..(1 << 17) / 24 + CLIENTS).contains(&found), "{found} jobs wait");
    // They do not count any more.
    let batch = server.ask("peek-batch default any 1000\r\n");
    assert!(batch.starts_with("FOUND_BATCH 1000 "), "{}", batch.len());
}

/// Compaction becomes due in the middle of a command that has just given the job to a client.
#[test]
fn compaction_loses_no_job_that_a_waiting_client_is_about_to_get() {
    let mut server = start();
    let bad = server.put_of(300);
    let [worker] = server.clients();
    server.ask(format!("reserve-job {bad}\r\nbury {bad} 1\r\n"));
    server.disk.flip_byte("binlog.1", &body(bad, 300));
    assert_eq!(server.send(worker, "reserve\r\n"), "");
    let mut kicks = 0;
    while server.ask(format!("kick-job {bad}\r\n")) == "KICKED\r\n" {
        kicks += 1;
        assert!(kicks < 10_000, "compaction never comes to the record");
        server.advance(Nanos::from_millis(1));
    }
    server.expect(format!("stats-job {bad}\r\n"), "NOT_FOUND\r\n");
    assert_eq!(server.take_text(worker), "");
    let good = server.put_of(10);
    assert_eq!(server.take_text(worker), reserved(good, 10));
}

/// All records have the same length.
#[test]
fn a_job_is_deleted_while_compaction_reads_its_record() {
    let mut server = start();
    let mut ids: Vec<u64> = (0..40).map(|_| server.put_of(1000)).collect();
    server.disk.hold_reads(true);
    // Their file has little else than garbage.
    ids.split_off(10).into_iter().for_each(|id| server.delete(id));
    server.make_garbage();
    let migrated = server.stat("binlog-records-migrated");
    assert_eq!(migrated, 0, "a record was moved that was not read");
    // It is woken by the end of the read, and does not look for it.
    let iterations = server.iterations;
    server.advance(Nanos::from_secs(1));
    assert!(server.iterations - iterations < 20, "compaction does not rest");
    // Compaction waits for the first one, and asks for the next one.
    server.delete(ids[0]);
    server.make_garbage();
    server.disk.faults().reads_left = None;
    server.make_garbage();
    assert!(server.stat("binlog-records-migrated") > 0, "no record was moved");
    ids[1..].iter().for_each(|&id| server.expect_found(id, 1000));
}

/// The system does not report errors of the disk to a caller that does not wait for it.
#[test]
fn a_record_that_cannot_be_moved_is_lost_and_its_file_is_kept() {
    for (is_late, fault) in [(false, None), (true, None), (false, Some(ReadFault::Error))] {
        let mut server = start();
        let put = format!("put-in-tube gone 10 0 60 300 idp:key\r\n{}\r\n", body(1, 300));
        server.expect(&put, "INSERTED 1\r\n");
        let [bad, good] = [1, server.put_of(400)];
        match fault {
            Some(fault) => server.fail_reads([fault]),
            None => server.disk.flip_byte("binlog.1", &body(bad, 300)),
        }
        server.disk.faults().reads_late = is_late;
        server.make_garbage();
        server.expect(format!("stats-job {bad}\r\n"), "NOT_FOUND\r\n");
        assert_eq!(server.tubes(), ["default"]);
        server.expect(&put, &format!("INSERTED {}\r\n", server.facts().puts_begun + 1));
        server.expect_found(good, 400);
        assert!(server.disk.names().contains("binlog.1.damaged"), "{}", server.disk.names());
        server.after_crash(OPTIONS).expect_found(good, 400);
    }
}

/// A batch that waits for the disk has a body in memory beyond the limit, so another worker's is dropped.
#[test]
fn a_body_that_becomes_cold_while_others_are_read_is_read_too() {
    let mut server = start_with(|it| it.body_cache_bytes = Some(1000));
    let [warm, cold] = [server.put_of(900), server.put_of(800)];
    let [batcher, worker, reader] = server.clients();
    server.disk.hold_reads(true);
    server.wait_each(&[reader], "peek-batch default ready 2\r\n");
    let waits = "watch other\r\nignore default\r\nreserve-batch 2 10\r\n";
    assert_eq!(server.send(batcher, waits), "WATCHING 2\r\nWATCHING 1\r\n");
    let puts = [3, 4].map(|id| format!("put-in-tube other 0 0 60 700\r\n{}\r\n", body(id, 700)));
    server.expect(puts.concat(), "INSERTED 3\r\nINSERTED 4\r\n");
    assert_eq!(server.send(worker, "reserve\r\n"), reserved(warm, 900));
    server.end_reads();
    let jobs = [found(warm, 900), found(cold, 800)].concat();
    assert_eq!(server.take_text(reader), format!("FOUND_BATCH 2 0\r\n{jobs}"));
    let jobs = [reserved(3, 700), reserved(4, 700)].concat();
    assert_eq!(server.take_text(batcher), format!("RESERVED_BATCH 2\r\n{jobs}"));
}

/// Another one may have its place in memory.
#[test]
fn a_job_that_is_deleted_while_the_bodies_of_others_are_read_is_in_no_reply() {
    let mut server = start_with(|it| it.body_cache_bytes = Some(1000));
    let [warm, cold] = [server.put_of(900), server.put_of(800)];
    let [reader] = server.clients();
    server.disk.hold_reads(true);
    server.wait_each(&[reader], "peek-batch default ready 2\r\n");
    server.delete(warm);
    server.put_of(700);
    server.end_reads();
    let reply = format!("FOUND_BATCH 1 0\r\n{}", found(cold, 800));
    assert_eq!(server.take_text(reader), reply);
}

/// Compaction waits for one of the reads too. Both clients get their replies.
#[test]
fn compaction_goes_on_beside_reads_that_do_not_end() {
    let mut server = start_with_late_reads();
    let ids = [server.put_of(300), server.put_of(400)];
    let readers: [Client; 2] = server.clients();
    for (reader, id) in readers.into_iter().zip(ids) {
        server.wait_each(&[reader], format!("peek {id}\r\n"));
    }
    server.make_garbage();
    server.disk.hold_reads(false);
    server.end_reads();
    server.make_garbage();
    assert!(!server.disk.names().contains("binlog.1:"), "{}", server.disk.names());
    for (reader, (id, len)) in readers.into_iter().zip(ids.into_iter().zip([300, 400])) {
        assert_eq!(server.take_text(reader), found(id, len));
    }
}

#[test]
fn a_worker_keeps_a_job_whose_record_is_lost() {
    let mut server = start();
    let job = server.put_of(300);
    server.expect("reserve\r\n", &reserved(job, 300));
    server.disk.flip_byte("binlog.1", &body(job, 300));
    server.make_garbage();
    server.expect(format!("touch {job}\r\n"), "TOUCHED\r\n");
    assert_eq!(server.state(job), "reserved");
    server.delete(job);
    server.make_garbage();
    assert!(!server.disk.names().contains("binlog.1"), "{}", server.disk.names());
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
        let cold = Instance::on_files(&files, OPTIONS, FIXTURE_DAY);
        let warm = Instance::on_files(&files, Options::synced(FILE_SIZE), FIXTURE_DAY);
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
