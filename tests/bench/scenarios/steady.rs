//! The plain life of a queue: put, reserve, delete, by a few connections or many, one by
//! one or pipelined, by clients that stay and by clients that come and go.

use super::{ROUND, Round, Scenario, Settings};
use crate::client::{Limits, Outcome, Pool, Run, nanoseconds};
use crate::load::{Cycle, Drain, Fill, HandOff};
use crate::server::{Server, Setup};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

pub fn all() -> Vec<Scenario> {
    vec![
        cycle("ping-pong", 1, 1, 64),
        cycle("50-connections", 50, 1, 64),
        cycle("50-connections-1k", 50, 1, 1024),
        cycle("50-connections-60k", 50, 1, 60 << 10),
        cycle("50-connections-1m", 50, 1, 1 << 20),
        cycle("pipelined", 1, 100, 64),
        cycle("50-pipelined", 50, 100, 64),
        hand_off(),
        short_put(),
        short_work(),
    ]
}

/// Put, reserve, delete; each is an operation. Servers are started with the limit that the bodies
/// need; those above the default limit take so long that a round does, too.
fn cycle(name: &str, connections: usize, batch: usize, body_size: usize) -> Scenario {
    const DEFAULT_LIMIT: usize = 65_535;
    let is_large = body_size > DEFAULT_LIMIT;
    let round = if is_large { Duration::from_secs(1) } else { ROUND };
    let clients = if connections == 1 { "one connection" } else { "50 connections" };
    let how = if batch == 1 { "one by one" } else { "100 to a write (latencies are of those)" };
    let what = format!("put, reserve, delete of {body_size} bytes on {clients}, {how}");
    let prepare = move |server: &mut Server, _: &Settings| -> Outcome<Round> {
        let mut pool = Pool::connect(server.address, connections);
        Ok(Box::new(move |server| {
            let mut script = Cycle::new(connections, batch, body_size);
            let run = || pool.run(&mut script, Limits::lasting(round));
            Ok(server.measure(run)?.figures())
        }))
    };
    let flags = if is_large { vec![format!("-z{body_size}")] } else { Vec::new() };
    let setup = Setup { body_size, flags, ..Setup::default() };
    Scenario { setup, has_limit: true, ..Scenario::new(name, what, prepare) }
}

fn hand_off() -> Scenario {
    const WORKERS: usize = 1000;
    let what = "one producer, 1,000 workers waiting in reserve; \
                from put to RESERVED, an op is a job";
    let scenario = Scenario::new("hand-off", what, |server, _| {
        let mut pool = Pool::connect(server.address, 1 + WORKERS);
        let mut script = HandOff::new(WORKERS);
        Ok(Box::new(move |server| {
            let mut jobs = 0;
            let mut measured = server.measure(|| {
                let mut run = pool.run(&mut script, Limits::lasting(ROUND))?;
                run.latencies = script.take_latencies();
                jobs = run.latencies.len();
                Ok(run)
            })?;
            measured.ops = jobs as f64;
            Ok(measured.figures())
        }))
    });
    Scenario { open_files: 1 + WORKERS, ..scenario }
}

/// Sessions of a round: few enough for the ports that the kernel has to give away.
const SESSIONS: usize = 2000;

fn short_put() -> Scenario {
    let what = "short-lived clients: connect, use, put, quit; an op is a session";
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        Ok(Box::new(move |server| {
            let address = server.address;
            let requests = ["use default\r\n", PUT];
            let figures = server.measure(|| Ok(sessions(address, &requests)))?.figures();
            Pool::connect(address, 1)
                .run(&mut Drain::deleting(SESSIONS), Limits::within(patience))?;
            Ok(figures)
        }))
    };
    let setup = Setup { body_size: BODY_SIZE, ..Setup::default() };
    Scenario { setup, has_limit: true, ..Scenario::new("short-put", what, prepare) }
}

fn short_work() -> Scenario {
    let what = "short-lived clients: connect, watch, ignore, reserve, delete, quit; \
                an op is a session";
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        Ok(Box::new(move |server| {
            let address = server.address;
            let mut fill = Fill::new(SESSIONS, BODY_SIZE);
            Pool::connect(address, 1).run(&mut fill, Limits::within(patience))?;
            let requests = ["watch default\r\n", "ignore other\r\n", "reserve\r\n", DELETE];
            Ok(server.measure(|| Ok(sessions(address, &requests)))?.figures())
        }))
    };
    let setup = Setup { body_size: BODY_SIZE, ..Setup::default() };
    Scenario { setup, has_limit: true, ..Scenario::new("short-work", what, prepare) }
}

const BODY_SIZE: usize = 5;
const PUT: &str = "put 0 0 60 5\r\nhello\r\n";
/// Deletes the job that was reserved.
const DELETE: &str = "delete";

/// One session after the other.
fn sessions(address: SocketAddr, requests: &[&str]) -> Run {
    let mut latencies = Vec::with_capacity(SESSIONS);
    for _ in 0..SESSIONS {
        let start = Instant::now();
        session(address, requests);
        latencies.push(nanoseconds(start.elapsed()));
    }
    Run { replies: SESSIONS as u64, latencies }
}

/// Every reply here comes in one piece: it is short, and was written at once.
fn session(address: SocketAddr, requests: &[&str]) {
    let mut stream = TcpStream::connect(address).expect("the server listens");
    stream.set_nodelay(true).expect("the option can be set");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("the option can be set");
    let (mut buffer, mut length) = ([0; 256], 0);
    for &request in requests {
        if request == DELETE {
            let reply = str::from_utf8(&buffer[..length]).expect("replies are text");
            let id = reply.split(' ').nth(1).expect("a job has been reserved");
            let request = format!("delete {id}\r\n");
            stream.write_all(request.as_bytes()).expect("the server reads");
        } else {
            stream.write_all(request.as_bytes()).expect("the server reads");
        }
        length = stream.read(&mut buffer).expect("the server answers");
    }
    stream.write_all(b"quit\r\n").expect("the server reads");
    // The server closes first, so that no port of the client's stays occupied.
    let count = stream.read(&mut buffer).expect("the server closes the connection");
    assert_eq!(count, 0, "a reply after quit");
}
