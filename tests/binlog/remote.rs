//! A remote disk, which acknowledges changes late: congestion, and what is refused for lack of space. The
//! simulation tests which replies wait for which acknowledgement.

use crate::harness::driver::{Nanos, Options, START, Syncing};
use crate::harness::fake_disk::{FakeDisk, Files, RemoteSetup};
use crate::harness::instance::Instance;
use crate::harness::request::{delete_all, put};

const OPTIONS: Options =
    Options { period: Nanos::from_millis(1), ..Options::binlog(64 * 1024, Syncing::Never) };
/// A record takes several chunks.
fn setup(congested_above: Option<usize>) -> RemoteSetup {
    RemoteSetup { chunk_len: 30, congested_above, ..RemoteSetup::default() }
}

/// A server on a remote disk.
fn start(congested_above: Option<usize>) -> Instance {
    let disk = FakeDisk::remote(&Files::new(), setup(congested_above));
    let mut server = Instance::start(&disk, OPTIONS, START);
    server.acknowledge();
    server
}

impl Instance {
    /// Acknowledges all changes.
    fn acknowledge(&mut self) {
        self.disk.acknowledge(usize::MAX);
        self.settle();
    }

    /// Sends a request and returns the reply, which waits for nothing or for this acknowledgement.
    fn ask_remote(&mut self, request: impl AsRef<[u8]>) -> String {
        let reply = self.ask(request);
        self.acknowledge();
        let client = self.client;
        reply + &self.take_text(client)
    }
}

#[test]
fn nothing_more_is_run_while_too_many_changes_wait() {
    let mut server = start(Some(500));
    let [producer, other] = server.clients();
    assert_eq!(server.send(producer, put(0, 0, 9, [b'x'; 300]).repeat(10_000)), "");
    assert!(server.is_congested());
    let waiting = server.disk.waiting();
    assert_eq!(server.send(other, "list-tube-used\r\n"), "");
    assert_eq!(server.send(other, put(0, 0, 9, "job")), "");
    assert_eq!(server.disk.waiting(), waiting, "commands have run");
    // Each acknowledgement lets some commands run, of both clients.
    let (mut puts, mut rounds) = (0, 0);
    let mut replies = String::new();
    while puts < 10_000 {
        server.acknowledge();
        puts += server.take_text(producer).lines().count();
        replies += &server.take_text(other);
        rounds += 1;
        assert!(rounds < 5_000, "{puts} replies after {rounds} acknowledgements");
        assert!(rounds < 5 || replies.lines().count() == 2, "{replies:?}");
    }
    assert!(rounds > 10, "{rounds} acknowledgements for 10,000 puts");
}

/// Jobs pass through the queue next to a few that stay. The oldest file may then be one without jobs.
#[test]
fn files_without_jobs_leave_beside_kept_jobs() {
    let mut server = start(None);
    (0..50).for_each(|number| {
        server.ask_remote(put(0, 0, 9, format!("kept {number}")));
    });
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
    for disk in [FakeDisk::default(), FakeDisk::remote(&Files::new(), setup(None))] {
        fill_to_the_limit(&disk);
    }
}

/// Fills and empties a binlog of limited size.
fn fill_to_the_limit(disk: &FakeDisk) {
    const LIMIT: u64 = 5 * 64 * 1024;
    let mut server = Instance::start(disk, OPTIONS.with_limit(LIMIT), START);
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
    let mut server = start(None);
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
    let mut server = start(None);
    let [putting, idle] = server.clients();
    assert_eq!(server.send(putting, put(0, 0, 9, "job")), "");
    let are_closed = |server: &Instance| [putting, idle].map(|client| server.is_closed(client));
    assert_eq!(are_closed(&server), [false, false]);
    server.disk.faults().is_overdue = true;
    server.settle();
    assert_eq!(are_closed(&server), [true, false], "a reply waits for a change");
    assert_eq!(server.take_text(putting), "");
    // A later command of another connection waits for the same change.
    server.send(idle, "list-tube-used\r\n");
    assert_eq!(are_closed(&server), [true, true]);
    server.disk.faults().is_overdue = false;
    server.acknowledge();
    assert_eq!(server.ask_remote("peek 1\r\n"), "FOUND 1 3\r\njob\r\n");
}

#[test]
fn a_last_record_with_a_wrong_checksum_is_damage() {
    let mut server = start(None);
    server.ask_remote(put(0, 0, 9, "kept"));
    server.ask_remote(put(0, 0, 9, "lost"));
    server.disk.flip_byte("binlog.1", "lost");
    let files = server.disk.live_files();
    let disk = FakeDisk::remote(&files, setup(None));
    Instance::start(&disk, OPTIONS, START).acknowledge();
    let names: Vec<String> = disk.live_files().into_keys().collect();
    assert_eq!(names, ["binlog.1.damaged", "binlog.2"]);
}
