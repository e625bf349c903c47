//! A remote disk, which acknowledges changes late: congestion, and what is refused for lack of space. The
//! simulation tests which replies wait for which acknowledgement.

use crate::harness::driver::{Client, Disk, Driver, Nanos, Options, START, Settings, Syncing};
use crate::harness::fake_disk::{FakeDisk, Files};
use crate::harness::request::put;

const OPTIONS: Options = Options {
    settings: Settings { max_job_size: 1 << 20, binlog_file_size: 64 * 1024, ..Settings::DEFAULT },
    syncing: Syncing::Never,
    period: Nanos::from_millis(1),
    ..Options::DEFAULT
};
/// A record takes several chunks.
const CHUNK_LEN: usize = 30;
/// Acknowledges all changes.
const ALL: usize = usize::MAX;

struct World {
    server: Driver,
    disk: FakeDisk,
}

impl World {
    fn new() -> World {
        let disk = FakeDisk::remote(&Files::new(), CHUNK_LEN);
        let server = Driver::start(OPTIONS, Some(disk.boxed()), START).unwrap();
        let mut world = World { server, disk };
        world.acknowledge();
        world
    }

    /// Sends a request and lets the server do all that it can do now.
    fn send(&mut self, client: Client, request: impl AsRef<[u8]>) {
        self.server.receive(client, request);
        self.server.settle();
        self.server.check();
    }

    /// Acknowledges all changes.
    fn acknowledge(&mut self) {
        self.disk.acknowledge(ALL);
        self.server.settle();
        self.server.check();
    }

    /// Sends a request and returns the reply, which waits for nothing or for this acknowledgement.
    fn ask(&mut self, client: Client, request: impl AsRef<[u8]>) -> String {
        self.send(client, request);
        self.acknowledge();
        self.server.take_text(client)
    }
}

#[test]
fn nothing_more_is_run_while_too_many_changes_wait() {
    let mut world = World::new();
    let [producer, other] = [(); 2].map(|()| world.server.connect());
    world.disk.set_congested_above(500);
    world.send(producer, put(0, 0, 9, [b'x'; 300]).repeat(10_000));
    assert!(world.server.is_congested());
    let waiting = world.disk.waiting();
    world.send(other, "list-tube-used\r\n");
    world.send(other, put(0, 0, 9, "job"));
    assert_eq!(world.disk.waiting(), waiting, "commands have run");
    for client in [producer, other] {
        assert_eq!(world.server.take_text(client), "");
    }
    // Each acknowledgement lets some commands run, of both clients.
    let (mut puts, mut rounds) = (0, 0);
    let mut replies = String::new();
    while puts < 10_000 {
        world.acknowledge();
        puts += world.server.take_text(producer).lines().count();
        replies += &world.server.take_text(other);
        rounds += 1;
        assert!(rounds < 5_000, "{puts} replies after {rounds} acknowledgements");
        assert!(rounds < 5 || replies.lines().count() == 2, "{replies:?}");
    }
    assert!(rounds > 10, "{rounds} acknowledgements for 10,000 puts");
}

/// Fills and empties a binlog of limited size. `used` returns the bytes of all files.
fn fill_to_the_limit(disk: Box<dyn Disk>, used: impl Fn() -> u64) {
    const LIMIT: u64 = 5 * 64 * 1024;
    let settings = Settings { max_binlog_bytes: LIMIT, ..OPTIONS.settings };
    let mut server = Driver::start(Options { settings, ..OPTIONS }, Some(disk), START).unwrap();
    let client = server.connect();
    let mut ask = |request: &[u8]| {
        server.receive(client, request);
        server.settle();
        let used = used();
        assert!(used <= LIMIT, "{used} bytes are used");
        server.iterate();
        server.check();
        server.take_text(client)
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
fn a_limit_of_the_binlog_refuses_puts_and_never_deletes() {
    let disk = FakeDisk::default();
    fill_to_the_limit(disk.boxed(), || disk.used());
    let disk = FakeDisk::remote(&Files::new(), 4096);
    fill_to_the_limit(disk.boxed(), || {
        disk.acknowledge(ALL);
        disk.used()
    });
}

#[test]
fn a_remote_disk_without_space_refuses_puts_only() {
    let mut world = World::new();
    let client = world.server.connect();
    let job = put(0, 0, 9, "job");
    assert_eq!(world.ask(client, job.repeat(2)), "INSERTED 1\r\nINSERTED 2\r\n");
    world.disk.set_capacity(Some(0));
    for (request, reply) in [
        ("put 0 0 9 3\r\njob\r\n", "OUT_OF_MEMORY\r\n"),
        ("reserve-job 1\r\nbury 1 0\r\n", "RESERVED 1 3\r\njob\r\nBURIED\r\n"),
        ("kick 1\r\nreserve\r\n", "KICKED 1\r\nRESERVED 1 3\r\njob\r\n"),
        ("release 1 0 0\r\ndelete 2\r\n", "RELEASED\r\nDELETED\r\n"),
    ] {
        assert_eq!(world.ask(client, request), reply);
    }
    world.disk.set_capacity(None);
    assert_eq!(world.ask(client, &job), "INSERTED 4\r\n");
}

#[test]
fn a_connection_whose_output_waits_for_too_long_is_closed() {
    let mut world = World::new();
    let [putting, idle] = [(); 2].map(|()| world.server.connect());
    world.send(putting, put(0, 0, 9, "job"));
    let are_closed = |world: &World| [putting, idle].map(|client| world.server.is_closed(client));
    assert_eq!(are_closed(&world), [false, false]);
    world.disk.set_overdue(true);
    world.server.settle();
    assert_eq!(are_closed(&world), [true, false], "a reply waits for a change");
    assert_eq!(world.server.take_text(putting), "");
    // A later command of another connection waits for the same change.
    world.send(idle, "list-tube-used\r\n");
    assert_eq!(are_closed(&world), [true, true]);
    world.disk.set_overdue(false);
    world.acknowledge();
    let client = world.server.connect();
    assert_eq!(world.ask(client, "peek 1\r\n"), "FOUND 1 3\r\njob\r\n");
}

#[test]
fn a_last_record_with_a_wrong_checksum_is_damage() {
    let mut world = World::new();
    let client = world.server.connect();
    world.ask(client, put(0, 0, 9, "kept"));
    world.ask(client, put(0, 0, 9, "lost"));
    world.disk.flip_byte("binlog.1", "lost");
    let files = world.disk.live_files();
    let disk = FakeDisk::remote(&files, CHUNK_LEN);
    let mut server = Driver::start(OPTIONS, Some(disk.boxed()), START).unwrap();
    disk.acknowledge(ALL);
    server.settle();
    let names: Vec<String> = disk.live_files().into_keys().collect();
    assert_eq!(names, ["binlog.1.damaged", "binlog.2"]);
}
