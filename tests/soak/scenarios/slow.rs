//! Clients that are slow to write or to read: what they ask for arrives whole and in order, others
//! are served meanwhile, and the server keeps little for them.

use super::{Outcome, Run};
use crate::harness::client::Client;
use crate::harness::process::Daemon;
use crate::harness::request::{numbered_body, put};
use crate::harness::wait_until;
use fastrand::Rng;
use std::io::Write;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

pub fn clients(run: &Run) -> Outcome {
    let (daemon, address) = Daemon::on_own_port(&[]);
    let mut random = Rng::with_seed(run.seed);
    let mut rounds = 0;
    let mut worst = Memory::default();
    loop {
        write_slowly(run, address, &mut random);
        let memory = read_slowly(run, &daemon, address, &mut random);
        if memory.most_kib * worst.limit_kib >= worst.most_kib * memory.limit_kib {
            worst = memory;
        }
        rounds += 1;
        if !run.has_time() {
            let Memory { asked_kib, most_kib, limit_kib } = worst;
            // The pages of large bodies are freed when they have been empty for 0.2 to 0.4 s.
            thread::sleep(Duration::from_millis(500));
            return Ok(format!(
                "{rounds} rounds; at most {most_kib} KiB for {asked_kib} KiB of unread replies, \
                 where {limit_kib} were allowed; {} KiB at the end",
                daemon.rss_kib()
            ));
        }
    }
}

// ---- Writers ----

/// All clients send byte by byte, in turns.
fn write_slowly(run: &Run, address: SocketAddr, random: &mut Rng) {
    struct Writer {
        client: Client,
        tube: String,
        body: Vec<u8>,
        bytes: Vec<u8>,
    }
    let writer = |index: usize| {
        let tube = format!("slow-{index}");
        let body = numbered_body(index as u64, random.usize(..run.size(100, 2_000)));
        let end = format!("peek-ready\r\nwatch {tube}\r\nreserve\r\n");
        let bytes = [format!("use {tube}\r\n").into_bytes(), put(0, 0, 60, &body), end.into()];
        Writer { client: Client::connect(address), tube, body, bytes: bytes.concat() }
    };
    let mut writers: Vec<Writer> = (0..run.size(10, 50)).map(writer).collect();
    let longest = writers.iter().map(|writer| writer.bytes.len()).max().unwrap_or_default();
    for place in 0..longest {
        for writer in &mut writers {
            if let Some(byte) = writer.bytes.get(place) {
                writer.client.send([*byte]);
            }
        }
    }
    for Writer { mut client, tube, body, .. } in writers {
        assert_eq!(client.reply().line, format!("USING {tube}"));
        let id = client.reply().number("INSERTED").expect("the put is whole");
        for (word, is_before_watch) in [("FOUND", true), ("RESERVED", false)] {
            let reply = client.reply();
            assert_eq!(reply.number(word), Some(id));
            assert!(reply.body == body, "the body of {tube} is another one");
            if is_before_watch {
                assert_eq!(client.reply().line, "WATCHING 2");
            }
        }
        client.expect(format!("delete {id}\r\n"), "DELETED");
    }
}

// ---- Readers ----

/// What the server had to hold, and how much of it that took.
#[derive(Clone, Copy, Default)]
struct Memory {
    asked_kib: u64,
    most_kib: u64,
    limit_kib: u64,
}

/// A client with many requests and puts.
struct Reader {
    client: Client,
    requests: Vec<u8>,
    expected: Vec<Expected>,
}

enum Expected {
    /// A job that all know.
    Found(usize),
    Inserted,
}

/// The number of jobs that are peeked again and again.
const KNOWN: u64 = 40;

/// One of them.
struct Known {
    id: u64,
    body: Vec<u8>,
}

/// All ask for megabytes and do not read, until the server has nothing more to do; then they do.
fn read_slowly(run: &Run, daemon: &Daemon, address: SocketAddr, random: &mut Rng) -> Memory {
    let mut observer = Client::connect(address);
    observer.expect("use known\r\n", "USING known");
    let known: Vec<Known> = (0..KNOWN)
        .map(|number| {
            // Most are copied into the output, which must not hold many; large ones are shared.
            let is_large = number < KNOWN / 20;
            let len = if is_large { random.usize(4_096..=65_535) } else { random.usize(..4_096) };
            let body = numbered_body(number, len);
            Known { id: observer.put(&body), body }
        })
        .collect();
    let count = run.size(4, 30);
    let readers: Vec<Reader> = (0..count).map(|_| Reader::new(address, &known, random)).collect();
    let asked: usize = readers.iter().map(|reader| reader.asked_bytes(&known)).sum();
    let put: usize = readers.iter().map(|reader| reader.requests.len()).sum();
    let before_kib = daemon.rss_kib();
    daemon.reset_peak_rss();
    thread::scope(|scope| {
        let mut reading = Vec::new();
        for Reader { client, requests, expected } in readers {
            let mut writing = client.socket().try_clone().expect("a descriptor is free");
            // The requests are sent when the client reads the replies.
            scope.spawn(move || writing.write_all(&requests).expect("the server reads"));
            reading.push((client, expected));
        }
        wait_for_rest(daemon);
        // Others are served.
        observer.expect("list-tube-used\r\n", "USING known");
        for (client, expected) in reading {
            let known = &known;
            scope.spawn(move || check_replies(client, &expected, known));
        }
    });
    let most_kib = daemon.peak_rss_kib().saturating_sub(before_kib);
    observer.expect("watch put-slowly\r\n", "WATCHING 2");
    observer.expect("watch known\r\n", "WATCHING 3");
    while let Some(id) = observer.ask("reserve-with-timeout 0\r\n").number("RESERVED") {
        observer.expect(format!("delete {id}\r\n"), "DELETED");
    }
    // For each client: 256 KiB of replies on their way and as much that was sent and not yet moved
    // out, in a buffer that may have doubled; 68 KiB that it sent before; the rest is what they put.
    let limit_kib = count as u64 * (2 * 2 * 256 + 2 * 68) + (put as u64 >> 10) * 3 / 2 + 1024;
    let asked_kib = asked as u64 >> 10;
    assert!(
        most_kib <= limit_kib,
        "{most_kib} KiB for {count} clients that do not read, {limit_kib} are allowed"
    );
    Memory { asked_kib, most_kib, limit_kib }
}

impl Reader {
    fn new(address: SocketAddr, known: &[Known], random: &mut Rng) -> Reader {
        // What the kernel takes, the server need not hold.
        let window_bytes = [4 * 1024, 64 * 1024][random.usize(..2)];
        let client = Client::connect_with_window(address, window_bytes);
        let mut reader =
            Reader { client, requests: b"use put-slowly\r\n".to_vec(), expected: vec![] };
        for number in 0..4_000_u64 {
            let expected = if random.u32(..10) == 0 {
                let body = numbered_body(number, random.usize(..2_000));
                reader.requests.extend_from_slice(&put(0, 0, 60, &body));
                Expected::Inserted
            } else {
                let index = random.usize(..known.len());
                write!(reader.requests, "peek {}\r\n", known[index].id).expect("memory takes it");
                Expected::Found(index)
            };
            reader.expected.push(expected);
        }
        reader
    }

    fn asked_bytes(&self, known: &[Known]) -> usize {
        let bytes = |expected: &Expected| match expected {
            Expected::Found(index) => known[*index].body.len(),
            Expected::Inserted => 0,
        };
        self.expected.iter().map(bytes).sum()
    }
}

/// The replies, whole and in order.
fn check_replies(mut client: Client, expected: &[Expected], known: &[Known]) {
    assert_eq!(client.reply().line, "USING put-slowly");
    for expected in expected {
        let reply = client.reply();
        match expected {
            Expected::Found(index) => {
                let Known { id, body } = &known[*index];
                assert_eq!(reply.line, format!("FOUND {id} {}", body.len()));
                assert!(reply.body == *body, "the body of {id} is another one");
            }
            Expected::Inserted => assert!(reply.number("INSERTED").is_some(), "{}", reply.line),
        }
    }
}

/// Waits until the server sleeps and has used no processor time between two looks: then there is
/// nothing to do until a client reads.
fn wait_for_rest(daemon: &Daemon) {
    const PAUSE: Duration = Duration::from_millis(100);
    wait_until("the server rests", || {
        let before = daemon.processor_time();
        thread::sleep(PAUSE);
        daemon.is_asleep() && daemon.processor_time() == before
    });
}
