//! Processor time per operation: our server beside any others, in one run.
//!
//! `make bench AGAINST=/usr/bin/beanstalkd`, or with several paths in quotes. 50
//! connections put, reserve and delete jobs of 64 bytes; every server gets its rounds in
//! turn with the others, so that whatever else the machine does falls on all of them; the
//! medians are told. Processor time is what the server says of itself in `stats`.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]
#![allow(clippy::disallowed_methods, reason = "a benchmark looks at the clock")]
#![allow(clippy::cast_precision_loss, reason = "figures are told with two digits")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const CONNECTIONS: usize = 50;
const ROUNDS: usize = 7;
/// In each round each connection puts, reserves and deletes so many jobs.
const JOBS_PER_ROUND: usize = 1000;
const BODY: [u8; 64] = [b'x'; 64];

fn main() {
    // cargo adds a flag of its own.
    let programs: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut servers: Vec<Server> = programs.iter().map(|program| Server::start(program)).collect();
    assert!(!servers.is_empty(), "name at least one server");
    for round in 0..=ROUNDS {
        for server in &mut servers {
            let figures = server.round();
            // The first round warms up.
            if round > 0 {
                server.rounds.push(figures);
            }
        }
    }
    println!(
        "put, reserve, delete of {} bytes on {CONNECTIONS} connections; medians of {ROUNDS} rounds\n",
        BODY.len()
    );
    println!("{:>12} {:>12} {:>10}  server", "CPU us/op", "of the first", "ops/s");
    let first = servers[0].median(|figures| figures.processor_us_per_op);
    for server in &servers {
        let processor = server.median(|figures| figures.processor_us_per_op);
        let rate = server.median(|figures| figures.ops_per_second);
        println!("{processor:>12.2} {:>12.2} {rate:>10.0}  {}", processor / first, server.program);
    }
}

/// A server under test; ended when it goes out of scope.
struct Server {
    program: String,
    child: Child,
    connections: Vec<TcpStream>,
    /// For questions about the server itself.
    control: TcpStream,
    rounds: Vec<Figures>,
}

#[derive(Clone, Copy)]
struct Figures {
    processor_us_per_op: f64,
    ops_per_second: f64,
}

impl Server {
    fn start(program: &str) -> Server {
        // Not every server takes an inherited socket, so a free port is looked for and
        // given up again; whoever starts a benchmark can start it anew.
        let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let port = address.port().to_string();
        let mut command = Command::new(program);
        command.args(["-l", "127.0.0.1", "-p", &port]).stdin(Stdio::null());
        let child = command.spawn().unwrap_or_else(|error| panic!("{program}: {error}"));
        let control = connect(address);
        let connections = (0..CONNECTIONS).map(|_| connect(address)).collect();
        Server { program: program.to_owned(), child, connections, control, rounds: Vec::new() }
    }

    fn round(&mut self) -> Figures {
        let put = [&b"put 0 0 60 64\r\n"[..], &BODY, b"\r\n"].concat();
        let (mut ids, mut operations) = (Vec::new(), 0);
        let (processor_before, start) = (self.processor_us(), Instant::now());
        for _ in 0..JOBS_PER_ROUND {
            self.all(|_| put.clone(), |reply| assert!(reply.starts_with(b"INSERTED ")));
            ids.clear();
            self.all(
                |_| b"reserve\r\n".to_vec(),
                |reply| {
                    let line = reply.split(|&byte| byte == b' ').nth(1).unwrap();
                    ids.push(String::from_utf8(line.to_vec()).unwrap());
                },
            );
            self.all(
                |index| format!("delete {}\r\n", ids[index]).into_bytes(),
                |reply| assert_eq!(reply, b"DELETED\r\n"),
            );
            operations += 3 * CONNECTIONS;
        }
        let (elapsed, processor) = (start.elapsed(), self.processor_us() - processor_before);
        Figures {
            processor_us_per_op: processor as f64 / operations as f64,
            ops_per_second: operations as f64 / elapsed.as_secs_f64(),
        }
    }

    /// Sends a request on every connection, then reads the reply on every one. Replies
    /// are short and end in CR LF, and so does a job's body.
    fn all(&mut self, request: impl Fn(usize) -> Vec<u8>, mut reply: impl FnMut(&[u8])) {
        for (index, connection) in self.connections.iter_mut().enumerate() {
            connection.write_all(&request(index)).unwrap();
        }
        for connection in &mut self.connections {
            let mut buffer = [0; 256];
            let mut length = 0;
            let is_whole = |reply: &[u8]| {
                let lines = reply.windows(2).filter(|pair| pair == b"\r\n").count();
                lines == if reply.starts_with(b"RESERVED") { 2 } else { 1 }
            };
            while !is_whole(&buffer[..length]) {
                let count = connection.read(&mut buffer[length..]).unwrap();
                assert!(count > 0, "the server has closed a connection");
                length += count;
            }
            reply(&buffer[..length]);
        }
    }

    /// The processor time that the server has had, by its own account.
    fn processor_us(&mut self) -> u64 {
        self.control.write_all(b"stats\r\n").unwrap();
        let mut document = String::new();
        while !document.ends_with("\n\r\n") {
            let mut buffer = [0; 4096];
            let count = self.control.read(&mut buffer).unwrap();
            document.push_str(str::from_utf8(&buffer[..count]).unwrap());
        }
        let value = |key: &str| {
            let seconds = document.lines().find_map(|line| line.strip_prefix(key)).unwrap();
            seconds.replace('.', "").parse::<u64>().unwrap()
        };
        value("rusage-utime: ") + value("rusage-stime: ")
    }

    fn median(&self, figure: impl Fn(&Figures) -> f64) -> f64 {
        let mut values: Vec<f64> = self.rounds.iter().map(figure).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    const TRIES: u32 = 500;
    for _ in 0..TRIES {
        if let Ok(stream) = TcpStream::connect(address) {
            stream.set_nodelay(true).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            return stream;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("nobody listens on {address}");
}
