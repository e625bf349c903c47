//! Clients that are slow to write or to read: what they ask for arrives whole and in order, others
//! are served meanwhile, and the server keeps little for them.

use crate::harness::client::Client;
use crate::harness::process::Daemon;
use crate::harness::request::{body_number, numbered_body, put};
use crate::harness::wait_until;
use crate::run::{Outcome, Run};
use fastrand::Rng;
use std::io::Write;
use std::net::{Shutdown, SocketAddr};
use std::thread;

pub fn clients(run: &Run) -> Outcome {
    let (daemon, address) = Daemon::on_own_port(&[]);
    let mut random = run.random();
    let mut worst = (0, String::new());
    let rounds = run.rounds(|_| {
        let memory = write_and_read_slowly(run, &daemon, address, &mut random);
        if memory.0 >= worst.0 {
            worst = memory;
        }
    });
    Some(format!("{rounds} rounds; at most {}", worst.1))
}

/// A client with many requests, whose replies it does not read at once.
struct Reader {
    client: Client,
    requests: Vec<u8>,
    /// The job that each request peeks, or `None` for a put.
    expected: Vec<Option<usize>>,
}

/// The number of bytes that each client sends one by one.
const SLOW_BYTES: usize = 3_000;

/// A job that is peeked again and again.
struct Known {
    id: u64,
    body: Vec<u8>,
}

/// All ask for megabytes, in single bytes at first, and do not read until the server has nothing more
/// to do; then they do.
/// Returns the part of the allowed memory that the server has used, in thousandths, and words for it.
fn write_and_read_slowly(
    run: &Run,
    daemon: &Daemon,
    address: SocketAddr,
    random: &mut Rng,
) -> (u64, String) {
    let mut observer = Client::in_tube(address, "known");
    let known: Vec<Known> = (0..40)
        .map(|number| {
            // Most are copied into the output, which must not hold many; large ones are shared.
            let len = if number < 2 { 4_096..65_536 } else { 0..4_096 };
            let body = numbered_body(number, random.usize(len));
            Known { id: observer.put(&body), body }
        })
        .collect();
    let count = run.size(4, 30);
    let readers: Vec<Reader> = (0..count).map(|_| Reader::new(address, &known, random)).collect();
    let peeks = readers.iter().flat_map(|reader| reader.expected.iter().flatten());
    let asked_kib = peeks.map(|&index| known[index].body.len()).sum::<usize>() >> 10;
    let sent_kib = readers.iter().map(|reader| reader.requests.len() as u64).sum::<u64>() >> 10;
    let before_kib = daemon.rss_kib();
    daemon.reset_peak_rss();
    thread::scope(|scope| {
        let mut reading = Vec::new();
        for Reader { client, requests, expected } in readers {
            let mut writing = client.socket().try_clone().expect("a descriptor is free");
            scope.spawn(move || {
                let (in_bytes, rest) = requests.split_at(SLOW_BYTES);
                for byte in in_bytes {
                    writing.write_all(&[*byte]).expect("the server reads");
                }
                // The rest is sent when the client reads the replies.
                writing.write_all(rest).expect("the server reads");
                writing.shutdown(Shutdown::Write).expect("the connection is open");
            });
            reading.push((client, expected));
        }
        wait_until("the server can send no more", || {
            let before = daemon.processor_time();
            thread::sleep(std::time::Duration::from_millis(100));
            daemon.is_asleep() && daemon.processor_time() == before
        });
        observer.expect("list-tube-used\r\n", "USING known");
        for (client, expected) in reading {
            let known = &known;
            scope.spawn(move || check_replies(client, &expected, known));
        }
    });
    let most_kib = daemon.peak_rss_kib().saturating_sub(before_kib);
    observer.expect("watch put-slowly\r\n", "WATCHING 2");
    observer.expect("ignore known\r\n", "WATCHING 1");
    loop {
        let reply = observer.ask("reserve-with-timeout 0\r\n");
        let Some(id) = reply.number("RESERVED") else { break };
        assert!(body_number(&reply.body).is_some(), "the body of job {id} is not whole");
        observer.delete_all(&[id]);
    }
    observer.delete_all(&known.iter().map(|known| known.id).collect::<Vec<u64>>());
    // For each client: 256 KiB of replies on their way and as much that was sent and not yet moved
    // out, in a buffer that may have doubled; 68 KiB that it sent before; the rest is what they put.
    let limit_kib = count as u64 * (2 * 2 * 256 + 2 * 68) + sent_kib * 3 / 2 + 1024;
    let words =
        format!("{most_kib} KiB of {limit_kib} allowed for {asked_kib} KiB of unread replies");
    assert!(most_kib <= limit_kib, "{words} of {count} clients");
    (most_kib * 1000 / limit_kib, words)
}

impl Reader {
    fn new(address: SocketAddr, known: &[Known], random: &mut Rng) -> Reader {
        // What the kernel takes, the server need not hold.
        let window_bytes = [4 * 1024, 64 * 1024][random.usize(..2)];
        let client = Client::connect_with_window(address, window_bytes);
        let mut requests = b"use put-slowly\r\n".to_vec();
        let expected = (0..4_000).map(|number| {
            if random.u32(..10) == 0 {
                requests.extend(put(0, 0, 60, numbered_body(number, random.usize(8..2_000))));
                return None;
            }
            let index = random.usize(..known.len());
            requests.extend(format!("peek {}\r\n", known[index].id).bytes());
            Some(index)
        });
        let expected = expected.collect();
        Reader { client, requests, expected }
    }
}

/// The replies, whole and in order.
fn check_replies(mut client: Client, expected: &[Option<usize>], known: &[Known]) {
    assert_eq!(client.line(), "USING put-slowly");
    for expected in expected {
        let reply = client.reply();
        if let Some(index) = *expected {
            let Known { id, body } = &known[index];
            assert_eq!(reply.line, format!("FOUND {id} {}", body.len()));
            assert!(reply.body == *body, "the body of {id} is another one");
        } else {
            reply.inserted();
        }
    }
    assert!(client.is_at_end(), "a half-closed connection is closed after the last reply");
}
