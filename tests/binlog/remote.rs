//! A remote disk, which acknowledges changes late: which replies wait for which acknowledgement, and
//! how a limit of the binlog bounds puts.

use crate::harness::engine::Engine;
use crate::harness::event_loop::{ClientId, EventLoop};
use crate::harness::fake_disk::FakeDisk;
use crate::harness::fixtures::START;
use crate::harness::remote_disk::RemoteDisk;
use crate::harness::reply::frame;
use crate::harness::request::{numbered_body, put};
use beanstalkd::testing::{ConnKey, Disk, Nanos, Settings, Syncing};

const SETTINGS: Settings =
    Settings { max_job_size: 1 << 20, binlog_file_size: 64 * 1024, ..Settings::DEFAULT };
/// A record takes several chunks.
const CHUNK_LEN: usize = 30;
const READ_LEN: usize = 16 * 1024;

/// Starts a server on the disk, and acknowledges all changes of the start.
fn start(disk: &RemoteDisk) -> EventLoop {
    let mut engine = Engine::new(SETTINGS, START);
    engine.recover_from(disk.boxed(), Syncing::Never).unwrap();
    let mut server = EventLoop::new(engine, READ_LEN, Nanos::from_millis(1));
    settle(&mut server);
    // Old files are removed after the first commit.
    while disk.waiting() > 0 {
        disk.acknowledge_all();
        settle(&mut server);
    }
    server
}

fn settle(server: &mut EventLoop) {
    server.settle();
    server.server.check();
}

/// Sends a request and lets the server do all that it can do now.
fn send(server: &mut EventLoop, client: ClientId, request: impl AsRef<[u8]>) {
    server.send(client, request);
    settle(server);
}

/// Sends a request and returns the reply, which waits for nothing or for this acknowledgement.
fn ask(
    server: &mut EventLoop,
    disk: &RemoteDisk,
    client: ClientId,
    request: impl AsRef<[u8]>,
) -> String {
    send(server, client, request);
    disk.acknowledge_all();
    settle(server);
    text(server, client)
}

/// Takes what the client has received, as text.
fn text(server: &mut EventLoop, client: ClientId) -> String {
    String::from_utf8_lossy(&server.take(client)).into_owned()
}

/// Returns whether a server that starts with these changes has the job.
fn has_job(disk: &RemoteDisk, changes: usize, id: u64) -> bool {
    let disk = RemoteDisk::with_files(disk.files_after(changes), CHUNK_LEN);
    let mut server = start(&disk);
    let client = server.connect();
    ask(&mut server, &disk, client, format!("peek {id}\r\n")).starts_with("FOUND")
}

#[test]
fn replies_wait_for_all_changes_before_them() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [producer, worker, later] = [(); 3].map(|()| server.connect());
    send(&mut server, producer, put(0, 0, 9, "job"));
    let of_the_put = disk.waiting();
    assert!(of_the_put > 2, "the record has {of_the_put} chunks");
    // The reserve changes nothing on the disk, but depends on the put.
    send(&mut server, worker, "reserve\r\n");
    assert_eq!(disk.waiting(), of_the_put);
    send(&mut server, later, put(0, 0, 9, "another job"));
    for waiting in (0..of_the_put).rev() {
        let received = [producer, worker, later].map(|client| server.take(client));
        assert_eq!(received, [b""; 3], "{waiting} changes wait");
        // The next server has the job only with all its chunks.
        assert!(!has_job(&disk, waiting, 1) && has_job(&disk, waiting + 1, 1));
        disk.acknowledge(1);
        settle(&mut server);
    }
    assert_eq!(text(&mut server, producer), "INSERTED 1\r\n");
    assert_eq!(text(&mut server, worker), "RESERVED 1 3\r\njob\r\n");
    assert_eq!(text(&mut server, later), "");
    disk.acknowledge_all();
    settle(&mut server);
    assert_eq!(text(&mut server, later), "INSERTED 2\r\n");
}

#[test]
fn a_job_that_was_put_for_a_waiting_worker_waits_too() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [producer, worker] = [(); 2].map(|()| server.connect());
    send(&mut server, worker, "reserve\r\n");
    send(&mut server, producer, put(0, 0, 9, "job"));
    assert_eq!((text(&mut server, producer), text(&mut server, worker)), Default::default());
    disk.acknowledge_all();
    settle(&mut server);
    assert_eq!(text(&mut server, producer), "INSERTED 1\r\n");
    assert_eq!(text(&mut server, worker), "RESERVED 1 3\r\njob\r\n");
}

#[test]
fn commands_that_only_read_are_answered_at_once_unless_changes_wait() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [producer, reader] = [(); 2].map(|()| server.connect());
    let inserted = ask(&mut server, &disk, producer, put(0, 0, 9, "job"));
    assert_eq!(inserted, "INSERTED 1\r\n");
    let requests = [
        ("peek 1\r\n", "FOUND 1 3\r\njob\r\n"),
        ("list-tube-used\r\n", "USING default\r\n"),
        ("delete 7\r\n", "NOT_FOUND\r\n"),
        ("reserve-with-timeout 0\r\n", "RESERVED 1 3\r\njob\r\n"),
        ("touch 1\r\n", "TOUCHED\r\n"),
    ];
    for (request, reply) in requests {
        send(&mut server, reader, request);
        assert_eq!((text(&mut server, reader), disk.waiting()), (reply.to_owned(), 0), "{request}");
    }
    // The body that the reader would see is that of a job that may be lost.
    send(&mut server, producer, put(0, 0, 9, "new"));
    send(&mut server, reader, "peek 2\r\n");
    assert_eq!(text(&mut server, reader), "");
    disk.acknowledge_all();
    settle(&mut server);
    assert_eq!(text(&mut server, reader), "FOUND 2 3\r\nnew\r\n");
}

#[test]
fn a_server_that_has_lost_the_leadership_sends_nothing_more() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [producer, worker] = [(); 2].map(|()| server.connect());
    let inserted = ask(&mut server, &disk, producer, put(0, 0, 9, "job"));
    assert_eq!(inserted, "INSERTED 1\r\n");
    send(&mut server, producer, put(0, 0, 9, "lost"));
    disk.refuse(&mut fastrand::Rng::with_seed(0));
    for _ in 0..10 {
        disk.acknowledge_all();
        send(&mut server, worker, "reserve-with-timeout 0\r\nput 0 0 9 1\r\nx\r\n");
        send(&mut server, producer, put(0, 0, 9, "lost too"));
        assert_eq!((text(&mut server, producer), text(&mut server, worker)), Default::default());
    }
    assert!(has_job(&disk, disk.waiting(), 1));
    assert!(!has_job(&disk, disk.waiting(), 3));
}

#[test]
fn a_connection_that_quits_is_closed_after_its_replies() {
    for end in ["quit\r\n", ""] {
        let disk = RemoteDisk::new(CHUNK_LEN);
        let mut server = start(&disk);
        let client = server.connect();
        server.send(client, [&put(0, 0, 9, "job")[..], end.as_bytes()].concat());
        if end.is_empty() {
            server.half_close(client);
        }
        settle(&mut server);
        while disk.waiting() > 0 {
            assert!(server.key(client).is_some(), "closed before the reply");
            assert_eq!(text(&mut server, client), "");
            disk.acknowledge(1);
            settle(&mut server);
        }
        assert_eq!(text(&mut server, client), "INSERTED 1\r\n");
        assert!(server.key(client).is_none(), "not closed after the reply");
    }
}

#[test]
fn a_connection_that_breaks_drops_the_replies_that_wait() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [producer, worker] = [(); 2].map(|()| server.connect());
    let body = numbered_body(1, 60_000);
    let inserted = ask(&mut server, &disk, producer, put(0, 0, 9, &body));
    assert_eq!(inserted, "INSERTED 1\r\n");
    send(&mut server, producer, put(0, 0, 9, "job"));
    send(&mut server, worker, "reserve\r\nreserve\r\n");
    let old_key = server.key(worker);
    server.disconnect(worker);
    settle(&mut server);
    // A new client gets the key, and nothing of what the old one was to get.
    let new = server.connect();
    assert_eq!(server.key(new), old_key);
    send(&mut server, new, "list-tube-used\r\n");
    assert_eq!(text(&mut server, new), "");
    disk.acknowledge_all();
    settle(&mut server);
    assert_eq!(text(&mut server, new), "USING default\r\n");
    assert_eq!(text(&mut server, producer), "INSERTED 2\r\n");
    // Its jobs came back.
    send(&mut server, new, "reserve-batch 2\r\n");
    let reply = server.take(new);
    assert!(
        reply.starts_with(b"RESERVED_BATCH 2\r\nRESERVED 1 60000\r\n"),
        "{} bytes",
        reply.len()
    );
}

#[test]
fn a_key_is_used_again_and_again_while_replies_wait() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let observer = server.connect();
    let mut last = server.connect();
    let key = server.key(last);
    for _ in 0..1_000 {
        send(&mut server, last, "put 0 0 9 1\r\nx\r\n");
        server.disconnect(last);
        last = server.connect();
        assert_eq!(server.key(last), key);
    }
    send(&mut server, last, "put 0 0 9 1\r\nx\r\n");
    send(&mut server, observer, "list-tube-used\r\n");
    disk.acknowledge_all();
    settle(&mut server);
    assert_eq!(text(&mut server, last), "INSERTED 1001\r\n");
    assert_eq!(text(&mut server, observer), "USING default\r\n");
}

/// The tubes of a list that is made in steps, and whose text several outputs share.
const TUBES: usize = 1_100;

/// A server with a large job and a long list, and one connection.
fn server_with_shared_replies(disk: &RemoteDisk) -> (Engine, ConnKey) {
    let mut server = start(disk);
    let client = server.connect();
    ask(&mut server, disk, client, put(0, u32::MAX, 9, numbered_body(1, 30_000)));
    let tubes = (0..TUBES).map(|index| format!("watch tube{index}\r\n"));
    let reply = ask(&mut server, disk, client, tubes.collect::<String>());
    assert!(reply.ends_with(&format!("WATCHING {}\r\n", TUBES + 1)), "{reply}");
    let key = server.key(client).unwrap();
    (server.into_engine(), key)
}

/// Runs a request until nothing of it is left to run, and commits. The output stays.
fn run(engine: &mut Engine, conn: ConnKey, request: &[u8]) {
    engine.receive(conn, request);
    loop {
        engine.tick();
        if engine.server.actions(conn).run {
            engine.resume(conn);
        }
        engine.commit();
        engine.server.take_dirty(&mut Vec::new());
        engine.take_output(conn, 0);
        engine.server.check();
        let is_idle = engine.server.next_due().is_none_or(|due| due > engine.now);
        if is_idle && !engine.server.actions(conn).run {
            return;
        }
    }
}

#[test]
fn large_bodies_and_lists_are_cut_exactly_where_changes_wait() {
    let requests: [&[u8]; 4] = [
        b"put 0 0 9 1\r\nx\r\npeek 1\r\nlist-tube-used\r\n",
        b"list-tubes\r\npeek 1\r\nput 0 0 9 1\r\nx\r\n",
        b"put 0 0 9 1\r\nx\r\nlist-tubes-watched\r\npeek 1\r\npeek 1\r\n",
        b"list-jobs default any 2\r\nput 0 0 9 1\r\nx\r\nlist-tubes\r\n",
    ];
    // The replies of each request, when all changes are acknowledged.
    let disk = RemoteDisk::new(CHUNK_LEN);
    let (mut engine, conn) = server_with_shared_replies(&disk);
    let expected = requests.map(|request| {
        run(&mut engine, conn, request);
        disk.acknowledge_all();
        engine.commit();
        engine.output(conn)
    });
    assert!(expected.iter().all(|replies| replies.len() > 10_000), "the replies are short");

    for limit in [1_000, 7_777, 65_536, usize::MAX] {
        let disk = RemoteDisk::new(CHUNK_LEN);
        let (mut engine, conn) = server_with_shared_replies(&disk);
        let changes = requests.map(|request| {
            let before = disk.waiting();
            run(&mut engine, conn, request);
            assert_eq!(engine.take_output(conn, 1), b"", "nothing is acknowledged");
            disk.waiting() - before
        });
        // The first replies wait for the first changes. All others wait for the last.
        let mut sent = Vec::new();
        for (index, changes) in changes.into_iter().enumerate() {
            for left in (0..changes).rev() {
                disk.acknowledge(1);
                engine.commit();
                loop {
                    let part = engine.take_output(conn, limit);
                    engine.server.check();
                    sent.extend_from_slice(&part);
                    if part.is_empty() {
                        break;
                    }
                }
                let groups = match index {
                    0 if left > 0 => 0,
                    3 if left == 0 => 4,
                    _ => 1,
                };
                let allowed = expected[..groups].concat();
                assert!(sent == allowed, "{} bytes instead of {}", sent.len(), allowed.len());
            }
        }
    }
}

#[test]
fn what_a_slow_client_may_read_is_not_held_back_again() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let (mut engine, conn) = server_with_shared_replies(&disk);
    let other = engine.connect();
    run(&mut engine, conn, b"peek 1\r\nlist-tubes\r\n");
    let (output, _) = engine.server.unsent(conn);
    let len = output.len();
    assert_eq!(engine.take_output(conn, 100).len(), 100);
    // The client reads slowly. Meanwhile it and another client change something.
    for round in 1..=5 {
        run(&mut engine, other, &put(0, 0, 9, "job"));
        run(&mut engine, conn, &put(0, 0, 9, "job"));
        assert_eq!(engine.server.unsent(conn).0.sendable_len(), len - 100 * round, "round {round}");
        assert_eq!(engine.take_output(conn, 100).len(), 100);
    }
    let rest = engine.output(conn);
    assert_eq!(rest.len(), len - 600);
    disk.acknowledge_all();
    engine.commit();
    let inserted = engine.output(conn);
    assert_eq!(String::from_utf8_lossy(&inserted).matches("INSERTED").count(), 5);
}

#[test]
fn a_client_that_writes_on_and_on_gets_replies_with_each_acknowledgement() {
    /// An acknowledgement comes this many iterations after the change.
    const LATE: usize = 4;
    const ITERATIONS: usize = 200;
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [client, reader] = [(); 2].map(|()| server.connect());
    let mut changes = Vec::new();
    let (mut replies, mut reads) = (0, 0);
    for iteration in 1..=ITERATIONS {
        server.send(client, put(0, 0, 9, "job"));
        server.send(reader, "list-tube-used\r\n");
        let before = disk.waiting();
        server.iterate();
        server.server.check();
        changes.push(disk.waiting() - before);
        if let Some(index) = iteration.checked_sub(LATE + 1) {
            disk.acknowledge(changes[index]);
        }
        replies += text(&mut server, client).lines().count();
        reads += text(&mut server, reader).lines().count();
        // A reply waits for its own change, and then for later ones that wait at that moment.
        let least = iteration.saturating_sub(2 * LATE + 3);
        let most = iteration.saturating_sub(LATE);
        for count in [replies, reads] {
            assert!(
                (least..=most).contains(&count),
                "{count} replies in iteration {iteration}, expected {least} to {most}"
            );
        }
    }
}

#[test]
fn nothing_more_is_run_while_too_many_changes_wait() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [producer, other] = [(); 2].map(|()| server.connect());
    disk.set_congested_above(500);
    let job = put(0, 0, 9, [b'x'; 300]);
    server.send(producer, job.repeat(10_000));
    settle(&mut server);
    assert!(server.server.is_congested());
    let waiting = disk.waiting();
    send(&mut server, other, "list-tube-used\r\n");
    send(&mut server, other, put(0, 0, 9, "job"));
    assert_eq!(disk.waiting(), waiting, "commands have run");
    assert_eq!((text(&mut server, producer), text(&mut server, other)), Default::default());
    // Each acknowledgement lets some commands run, of both clients.
    let (mut puts, mut rounds) = (0, 0);
    let mut replies = String::new();
    while puts < 10_000 {
        disk.acknowledge_all();
        settle(&mut server);
        puts += text(&mut server, producer).lines().count();
        replies += &text(&mut server, other);
        rounds += 1;
        assert!(rounds < 5_000, "{puts} replies after {rounds} acknowledgements");
        assert!(rounds < 5 || replies.lines().count() == 2, "{replies:?}");
    }
    assert!(rounds > 10, "{rounds} acknowledgements for 10,000 puts");
}

/// Fills and empties a binlog of limited size. `used` returns the bytes of all files.
fn fill_to_the_limit(disk: Box<dyn Disk>, used: impl Fn() -> u64) {
    const LIMIT: u64 = 5 * 64 * 1024;
    const ROUNDS: usize = 3;
    let mut engine = Engine::new(Settings { max_binlog_bytes: LIMIT, ..SETTINGS }, START);
    engine.recover_from(disk, Syncing::Never).unwrap();
    let conn = engine.connect();
    let mut ask = |request: &[u8]| {
        engine.advance(Nanos::from_millis(1));
        engine.tick();
        engine.receive(conn, request);
        engine.commit();
        let used = used();
        assert!(used <= LIMIT, "{used} bytes are used");
        engine.commit();
        engine.server.take_dirty(&mut Vec::new());
        engine.server.check();
        String::from_utf8(engine.output(conn)).unwrap()
    };
    let job = put(0, 0, 9, [b'x'; 1_000]);
    let mut last_id = 0;
    for round in 0..ROUNDS {
        let first_id = last_id + 1;
        loop {
            let reply = ask(&job);
            if reply == "OUT_OF_MEMORY\r\n" {
                break;
            }
            last_id = reply.trim_end().strip_prefix("INSERTED ").unwrap().parse().unwrap();
        }
        let count = last_id + 1 - first_id;
        assert!(count * 1_100 > LIMIT / 2, "{count} jobs in round {round}");
        for id in first_id..=last_id {
            assert_eq!(ask(format!("delete {id}\r\n").as_bytes()), "DELETED\r\n", "{id}");
        }
        // The put that was refused has used up an id.
        last_id += 1;
    }
}

#[test]
fn a_limit_of_the_binlog_refuses_puts_and_never_deletes() {
    let disk = FakeDisk::default();
    fill_to_the_limit(disk.boxed(), || disk.used());
    let disk = RemoteDisk::new(4096);
    fill_to_the_limit(disk.boxed(), || {
        disk.acknowledge_all();
        disk.used()
    });
}

#[test]
fn a_whole_reply_is_held_back_though_its_header_is_in_the_buffer() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let [producer, worker] = [(); 2].map(|()| server.connect());
    let body = numbered_body(1, 60_000);
    send(&mut server, producer, put(0, 0, 9, &body));
    send(&mut server, worker, "reserve\r\n");
    while disk.waiting() > 0 {
        assert_eq!(server.take(worker), b"");
        disk.acknowledge(100);
        settle(&mut server);
    }
    let reply = server.take(worker);
    let frame = frame(&reply).expect("the reply is whole");
    assert_eq!((frame.line, frame.body), (&b"RESERVED 1 60000"[..], Some(&body[..])));
}

#[test]
fn a_server_that_ends_sends_the_replies_that_wait() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    disk.set_batched();
    let mut server = start(&disk);
    let [first, second] = [(); 2].map(|()| server.connect());
    send(&mut server, first, put(0, 0, 9, "job"));
    // It is handed over when the first one is acknowledged.
    send(&mut server, second, put(0, 0, 9, "another job"));
    let keys = [first, second].map(|client| server.key(client).unwrap());
    let mut engine = server.into_engine();
    let now = engine.now;
    engine.server.close(now).unwrap();
    let mut received = [String::new(), String::new()];
    while !engine.server.is_acknowledged() {
        assert_eq!(received[1], "", "a reply without its acknowledgement");
        disk.acknowledge(1);
        engine.server.hand_over();
        for (key, received) in keys.into_iter().zip(&mut received) {
            received.push_str(&String::from_utf8(engine.output(key)).unwrap());
        }
        assert!(!engine.server.has_replies());
    }
    assert_eq!(received, ["INSERTED 1\r\n", "INSERTED 2\r\n"]);
    assert!(has_job(&disk, 0, 1) && has_job(&disk, 0, 2));
}

#[test]
fn a_remote_disk_without_space_refuses_puts_only() {
    let disk = RemoteDisk::new(CHUNK_LEN);
    let mut server = start(&disk);
    let client = server.connect();
    let job = put(0, 0, 9, "job");
    assert_eq!(ask(&mut server, &disk, client, job.repeat(2)), "INSERTED 1\r\nINSERTED 2\r\n");
    disk.set_refusing_puts(true);
    assert_eq!(ask(&mut server, &disk, client, &job), "OUT_OF_MEMORY\r\n");
    let others = "reserve\r\nbury 1 0\r\nkick 1\r\nreserve\r\nrelease 1 0 0\r\ndelete 2\r\n";
    let replies =
        "RESERVED 1 3\r\njob\r\nBURIED\r\nKICKED 1\r\nRESERVED 1 3\r\njob\r\nRELEASED\r\n";
    let replies = format!("{replies}DELETED\r\n");
    assert_eq!(ask(&mut server, &disk, client, others), replies);
    disk.set_refusing_puts(false);
    assert_eq!(ask(&mut server, &disk, client, &job), "INSERTED 4\r\n");
}
