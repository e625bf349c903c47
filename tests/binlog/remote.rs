//! A remote disk, which stores changes late: congestion, stalls, and what is refused for lack of space. The
//! simulation tests which replies wait for which changes.

use crate::harness::driver::{
    Driver, End, Limits, Nanos, Options, START, Settings, Syncing, copy_binlog, damage,
};
use crate::harness::fake_disk::{FakeDisk, Files, RemoteSetup};
use crate::harness::instance::Instance;
use crate::harness::record::{READY, Record, VERSION_7};
use crate::harness::request::{delete_all, put};
use std::num::NonZero;

const PATIENCE: Nanos = Nanos::from_secs(5);
const OPTIONS: Options = Options {
    period: Nanos::from_millis(1),
    ..Options::binlog(64 * 1024, Syncing::Remote(PATIENCE))
};
/// Few changes may wait.
const CONGESTED_SOON: Options =
    Options { limits: Limits { congested_bytes: 500, ..Limits::DEFAULT }, ..OPTIONS };
/// A record takes several chunks.
const SETUP: RemoteSetup = RemoteSetup { chunk_len: 30, eager: None };

/// A server on a remote disk.
fn start(options: Options) -> Instance {
    let disk = FakeDisk::remote(&Files::new(), SETUP);
    let mut server = Instance::start(&disk, options, START);
    server.acknowledge();
    server
}

impl Instance {
    /// Ends the sync in progress. The next one may begin then.
    fn end_sync(&mut self) {
        self.disk.acknowledge(usize::MAX);
        self.settle();
    }

    /// Ends all syncs.
    fn acknowledge(&mut self) {
        while self.disk.waiting() > 0 {
            self.end_sync();
        }
    }

    /// Sends a request and returns the reply, which waits for nothing or for this sync.
    fn ask_remote(&mut self, request: impl AsRef<[u8]>) -> String {
        let reply = self.ask(request);
        self.acknowledge();
        let client = self.client;
        reply + &self.take_text(client)
    }
}

#[test]
fn nothing_more_is_run_while_too_many_changes_wait() {
    let mut server = start(CONGESTED_SOON);
    let [producer, other] = server.clients();
    assert_eq!(server.send(producer, put(0, 0, 9, [b'x'; 300]).repeat(10_000)), "");
    assert!(server.is_congested());
    let waiting = server.disk.waiting();
    assert_eq!(server.send(other, "list-tube-used\r\n"), "");
    assert_eq!(server.send(other, put(0, 0, 9, "job")), "");
    assert_eq!(server.disk.waiting(), waiting, "commands have run");
    // The end of each sync lets some commands run, of both clients.
    let (mut puts, mut rounds) = (0, 0);
    let mut replies = String::new();
    while puts < 10_000 {
        server.end_sync();
        puts += server.take_text(producer).lines().count();
        replies += &server.take_text(other);
        rounds += 1;
        assert!(rounds < 5_000, "{puts} replies after {rounds} syncs");
        assert!(rounds < 5 || replies.lines().count() == 2, "{replies:?}");
    }
    assert!(rounds > 10, "{rounds} syncs for 10,000 puts");
}

#[test]
fn nothing_more_is_run_while_changes_wait_and_memory_is_short() {
    let mut server = start(OPTIONS);
    let [producer, other] = server.clients();
    assert_eq!(server.ask_remote(put(0, 0, 9, "job").repeat(2)), "INSERTED 1\r\nINSERTED 2\r\n");
    Driver::refuse_memory_after(0);
    assert!(!server.is_congested(), "nothing waits");
    assert_eq!(server.send(producer, "delete 1\r\n"), "");
    assert!(server.is_congested());
    let waiting = server.disk.waiting();
    assert_eq!(server.send(other, "delete 2\r\n"), "");
    assert_eq!(server.disk.waiting(), waiting, "a command has run");
    server.acknowledge();
    assert_eq!([producer, other].map(|it| server.take_text(it)), ["DELETED\r\n"; 2]);
    Driver::refuse_memory_after(usize::MAX);
}

#[test]
fn who_reads_gets_what_is_stored_and_who_asks_is_closed_while_too_many_changes_wait() {
    let mut server = start(CONGESTED_SOON);
    let [reader, producer, other] = server.clients();
    server.set_room(reader, Some(0));
    assert_eq!(server.send(reader, "list-tube-used\r\n"), "");
    assert_eq!(server.send(producer, put(0, 0, 9, [b'x'; 300]).repeat(600)), "");
    assert!(server.is_congested());
    server.set_room(reader, None);
    server.settle();
    assert_eq!(server.take_text(reader), "USING default\r\n");
    assert_eq!(server.send(other, "list-tube-used\r\n"), "");
    server.advance(PATIENCE + Nanos::from_millis(200));
    assert_eq!([reader, producer, other].map(|it| server.is_closed(it)), [false, true, true]);
}

#[test]
fn one_iteration_makes_few_changes_whatever_many_clients_send() {
    let mut server = start(CONGESTED_SOON);
    let clients: [_; 20] = server.clients();
    for client in clients {
        server.receive(client, put(0, 0, 9, [b'x'; 300]));
    }
    server.settle();
    assert!(server.progress().waiting_bytes < 2_000, "{:?}", server.progress());
    server.acknowledge();
    assert!(clients.iter().all(|&client| server.take_text(client).starts_with("INSERTED")));
}

#[test]
fn no_connection_is_closed_while_a_slow_disk_stores_changes() {
    let mut server = start(CONGESTED_SOON);
    let [producer, other] = server.clients();
    assert_eq!(server.send(producer, put(0, 0, 9, [b'x'; 600])), "");
    assert_eq!(server.send(producer, put(0, 0, 9, [b'x'; 600])), "");
    assert!(server.is_congested());
    assert_eq!(server.send(other, "list-tube-used\r\n"), "");
    for _ in 0..10 {
        server.advance(Nanos::from_millis(900));
        server.disk.acknowledge(1);
        server.settle();
        assert!(!server.progress().is_stalled(), "{:?}", server.progress());
    }
    assert!(server.is_congested());
    server.acknowledge();
    assert_eq!(server.take_text(producer), "INSERTED 1\r\nINSERTED 2\r\n");
    assert_eq!(server.take_text(other), "USING default\r\n");
}

#[test]
fn a_client_that_comes_while_too_many_changes_wait_has_time_too() {
    let mut server = start(CONGESTED_SOON);
    let [producer] = server.clients();
    assert_eq!(server.send(producer, put(0, 0, 9, [b'x'; 600])), "");
    assert_eq!(server.send(producer, put(0, 0, 9, [b'x'; 600])), "");
    server.advance(PATIENCE + Nanos::from_millis(200));
    let [late] = server.clients();
    assert_eq!(server.send(late, "list-tube-used\r\n"), "");
    for (millis, is_closed) in [(100, false), (4_800, false), (400, true)] {
        server.advance(Nanos::from_millis(millis));
        assert_eq!(server.is_closed(late), is_closed, "after {millis} ms");
    }
}

/// Jobs pass through the queue next to a few that stay. The oldest file may then be one without jobs.
#[test]
fn files_without_jobs_leave_beside_kept_jobs() {
    let mut server = start(OPTIONS);
    (0..50).for_each(|_| _ = server.ask_remote(put(0, 0, 9, "kept")));
    for round in 0..200 {
        let first_id = 51 + 50 * round;
        server.ask_remote(put(0, 0, 9, [b'x'; 1_000]).repeat(50));
        server.ask_remote(delete_all(first_id..first_id + 50));
        let used = server.disk.used();
        assert!(used < 8 * 64 * 1024, "{used} bytes after round {round}");
    }
}

#[test]
fn a_limit_of_the_binlog_refuses_puts_and_never_deletes() {
    fill_to_the_limit(&FakeDisk::default(), Options { syncing: Syncing::Never, ..OPTIONS });
    fill_to_the_limit(&FakeDisk::remote(&Files::new(), SETUP), OPTIONS);
}

/// Fills and empties a binlog of limited size.
fn fill_to_the_limit(disk: &FakeDisk, options: Options) {
    const LIMIT: u64 = 5 * 64 * 1024;
    let mut server = Instance::start(disk, options.with_limit(LIMIT), START);
    let mut ask = |request: &[u8]| {
        let reply = server.ask_remote(request);
        assert!(disk.used() <= LIMIT, "{} bytes are used", disk.used());
        reply
    };
    let job = put(0, 0, 9, [b'x'; 1_000]);
    let mut last_id = 0;
    for round in 0..3 {
        let first_id = last_id + 1;
        loop {
            last_id += 1;
            // A put that is refused uses up an id.
            match ask(&job).as_str() {
                "OUT_OF_MEMORY\r\n" => break,
                reply => assert_eq!(reply, format!("INSERTED {last_id}\r\n")),
            }
        }
        let count = last_id - first_id;
        assert!(count * 1_100 > LIMIT / 2, "{count} jobs in round {round}");
        for id in first_id..last_id {
            assert_eq!(ask(format!("delete {id}\r\n").as_bytes()), "DELETED\r\n", "{id}");
        }
    }
}

#[test]
fn a_remote_disk_without_space_refuses_puts_only() {
    let mut server = start(OPTIONS);
    let job = put(0, 0, 9, "job");
    assert_eq!(server.ask_remote(job.repeat(2)), "INSERTED 1\r\nINSERTED 2\r\n");
    server.disk.faults().capacity = Some(0);
    for (request, reply) in [
        ("put 0 0 9 3\r\njob\r\n", "OUT_OF_MEMORY\r\n"),
        ("reserve-job 1\r\nbury 1 0\r\n", "RESERVED 1 3\r\njob\r\nBURIED\r\n"),
        ("kick 1\r\nreserve\r\n", "KICKED 1\r\nRESERVED 1 3\r\njob\r\n"),
        ("release 1 0 0\r\ndelete 2\r\n", "RELEASED\r\nDELETED\r\n"),
    ] {
        assert_eq!(server.ask_remote(request), reply);
    }
    server.disk.faults().capacity = None;
    assert_eq!(server.ask_remote(&job), "INSERTED 4\r\n");
}

#[test]
fn a_connection_whose_output_waits_for_too_long_is_closed() {
    let mut server = start(OPTIONS);
    let [first, later, idle] = server.clients();
    let state_in = |server: &mut Instance, span_ms: u64| {
        server.advance(Nanos::from_millis(span_ms));
        (
            server.progress().is_stalled(),
            [first, later, idle].map(|client| server.is_closed(client)),
        )
    };
    assert_eq!(server.send(first, put(0, 0, 9, "job")), "");
    assert!(server.progress().waiting_bytes > 0);
    assert_eq!(state_in(&mut server, 900), (false, [false, false, false]));
    assert_eq!(state_in(&mut server, 200), (true, [false, false, false]));
    assert_eq!(state_in(&mut server, 3_700), (true, [false, false, false]));
    assert_eq!(server.send(later, "list-tube-used\r\n"), "");
    assert_eq!(state_in(&mut server, 400), (true, [true, false, false]));
    assert_eq!(state_in(&mut server, 4_000), (true, [true, false, false]));
    assert_eq!(state_in(&mut server, 800), (true, [true, true, false]));
    server.acknowledge();
    assert_eq!(state_in(&mut server, 0), (false, [true, true, false]));
    assert_eq!(server.progress().waiting_bytes, 0);
    assert_eq!(server.ask_remote("peek 1\r\n"), "FOUND 1 3\r\njob\r\n");
}

/// Its reply waits for no change any more, but for the client.
#[test]
fn a_client_that_does_not_read_what_is_stored_is_not_closed_while_nothing_else_is_stored() {
    let mut server = start(OPTIONS);
    let [reader, other] = server.clients();
    server.set_room(reader, Some(0));
    server.send(reader, put(0, 0, 9, "job"));
    server.send(other, put(0, 0, 9, "job"));
    // The server looks at the reply once more.
    server.send(reader, "list-tube");
    server.end_sync();
    server.advance(PATIENCE + Nanos::from_millis(200));
    server.send(reader, "-used\r\n");
    assert_eq!([reader, other].map(|client| server.is_closed(client)), [false, true]);
    server.set_room(reader, None);
    server.settle();
    assert_eq!(server.take_text(reader), "INSERTED 1\r\n");
}

/// The deletes of its jobs are changes too.
#[test]
fn a_flush_frees_few_jobs_while_too_many_changes_wait() {
    const JOBS: usize = 3_000;
    // With a body cache, what is due is looked at in each iteration.
    let mut server = start(CONGESTED_SOON.cold());
    for _ in 0..JOBS / 10 {
        server.ask_remote(put(0, 0, 9, "job").repeat(10));
    }
    let flusher = server.client;
    server.receive(flusher, "flush-tube default\r\n");
    (0..100).for_each(|_| _ = server.iterate());
    // Two steps free more than that: the sync of the first one has begun.
    let waiting = server.progress().waiting_bytes;
    assert!(waiting < JOBS * 84 / 2, "{waiting} bytes wait");
    server.acknowledge();
    server.advance(Nanos::from_millis(1));
    while server.received(flusher).is_empty() {
        server.acknowledge();
        server.iterate();
    }
    assert_eq!(server.take_text(flusher), format!("FLUSHED {JOBS}\r\n"));
}

#[test]
fn a_job_whose_reply_was_not_sent_does_not_come_back_from_its_worker() {
    let settings = Settings { bury_after: NonZero::new(2), ..OPTIONS.settings };
    let mut server = start(Options { settings, ..OPTIONS });
    assert_eq!(server.ask_remote(put(0, 0, 3, "job")), "INSERTED 1\r\n");
    let [producer] = server.clients();
    assert_eq!(server.send(producer, put(9, 0, 99, "waits")), "");
    // The client goes away, the TTR runs out, or the server closes the connection first.
    for millis in [0, 700, 3_200, PATIENCE.as_nanos() / 1_000_000 + 200] {
        let [worker] = server.clients();
        assert_eq!(server.send(worker, "reserve\r\n"), "");
        server.advance(Nanos::from_millis(millis));
        server.end(worker, End::HangUp);
    }
    server.acknowledge();
    let reply = server.ask_remote("stats-job 1\r\n");
    for part in ["state: ready", "reserves: 0", "timeouts: 0", "buries: 0"] {
        assert!(reply.contains(part), "{reply}");
    }
    // A return counts once the reply has reached the worker.
    for state in ["ready", "buried"] {
        let [worker] = server.clients();
        assert_eq!(server.send(worker, "reserve\r\n"), "RESERVED 1 3\r\njob\r\n");
        server.end(worker, End::HangUp);
        let reply = server.ask_remote("stats-job 1\r\n");
        assert!(reply.contains(&format!("state: {state}")), "{reply}");
    }
}

/// Otherwise two workers have the job as soon as the disk has caught up.
#[test]
fn a_ttr_begins_when_the_reply_may_be_sent() {
    let mut server = start(OPTIONS);
    let [producer, worker, other] = server.clients();
    assert_eq!(server.send(worker, "reserve\r\n"), "");
    assert_eq!(server.send(other, "reserve\r\n"), "");
    assert_eq!(server.send(producer, put(0, 0, 1, "job")), "");
    assert_eq!(server.send(worker, "touch 1\r\n"), "");
    server.advance(Nanos::from_millis(2_500));
    assert_eq!(server.take_text(worker), "");
    server.acknowledge();
    assert_eq!(server.take_text(worker), "RESERVED 1 3\r\njob\r\nTOUCHED\r\n");
    server.advance(Nanos::from_millis(900));
    assert_eq!(server.take_text(other), "");
    server.advance(Nanos::from_millis(110));
    assert_eq!(server.take_text(other), "RESERVED 1 3\r\njob\r\n");
}

/// A killed server leaves prepared files, and a power cut leaves files without a version. C beanstalkd writes
/// behind them.
#[test]
fn a_copy_has_the_files_without_records_between_others() {
    let record =
        |id| Record { id, tube: "default", state: READY, body: b"x\r\n", ..Record::default() };
    let with_record = |id| [&VERSION_7[..], &record(id).v7(None)].concat();
    let version = VERSION_7.to_vec();
    let prepared = [version.clone(), vec![0; 4096], Vec::new()];
    let files = [with_record(1)].into_iter().chain(prepared).chain([with_record(2), version]);
    let names = (1..).map(|number| format!("binlog.{number}"));
    let mut from = FakeDisk::with_files(&names.zip(files).collect());
    let mut to = FakeDisk::remote(&Files::new(), SETUP);
    let etcd = to.clone();
    copy_binlog(&mut from, &mut to, || etcd.acknowledge(usize::MAX));
    let mut copy = to.after_end(None);
    let names: Vec<String> = copy.live_files().into_keys().collect();
    assert_eq!(names, ["binlog.1", "binlog.2", "binlog.3", "binlog.4", "binlog.5"]);
    assert_eq!(damage(&mut copy), None);
    let mut exported = FakeDisk::default();
    copy_binlog(&mut copy.clone(), &mut exported, || {});
    assert_eq!(damage(&mut exported), None);
    for disk in [copy, exported] {
        let mut server = Instance::start(&disk, OPTIONS, START);
        server.acknowledge();
        assert_eq!(server.recovered.jobs, 2);
        assert_eq!(damage(&mut disk.clone()), None);
    }
}

#[test]
fn a_last_record_with_a_wrong_checksum_is_damage() {
    let mut server = start(OPTIONS);
    server.ask_remote([put(0, 0, 9, "kept"), put(0, 0, 9, "lost")].concat());
    server.disk.flip_byte("binlog.1", "lost");
    let files = server.disk.live_files();
    let disk = FakeDisk::remote(&files, SETUP);
    Instance::start(&disk, OPTIONS, START).acknowledge();
    let names: Vec<String> = disk.live_files().into_keys().collect();
    assert_eq!(names, ["binlog.1.damaged", "binlog.2"]);
}
