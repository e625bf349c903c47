//! The load generator: many connections on one thread, driven by readiness.
//!
//! A [`Pool`] keeps the connections; a [`Load`] says what they send. It is a closed loop: a
//! connection sends its next requests as soon as all replies to the last ones are in, with one
//! write straight after the read. This file knows nothing of scenarios.

use crate::harness::reply::frame;
use crate::load::{Load, Run, Turn, Work};
use crate::machine::Waits;
use crate::server::PATIENCE;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The server has not done in time what was asked of it.
#[derive(Debug, Clone, Copy)]
pub struct TooSlow;

pub type Outcome<T> = Result<T, TooSlow>;

pub struct Pool {
    poll: Poll,
    connections: Vec<Connection>,
    /// What is not counted as latency.
    noise: Option<Waits>,
    /// How many connections await replies.
    busy: usize,
    /// From then on connections only end what they have begun.
    over_at: Instant,
}

impl Pool {
    pub fn connect(address: SocketAddr, count: usize) -> Pool {
        let poll = Poll::new().expect("there is epoll");
        let connections = (0..count).map(|index| Connection::open(&poll, address, Token(index)));
        let connections = connections.collect();
        Pool { poll, connections, noise: None, busy: 0, over_at: Instant::now() }
    }

    /// Leaves out of latencies the time in which the server or the calling thread waits for a
    /// core. To find that out takes the client a microsecond or two for each reply.
    pub fn without_noise(self, waits: Waits) -> Pool {
        Pool { noise: Some(waits), ..self }
    }

    /// Runs a load until all its jobs are done.
    pub fn run(&mut self, load: &Load) -> Outcome<Run> {
        /// Loads with more jobs may take five times as long.
        const MANY: usize = 300_000;
        self.over_at = Instant::now() + if load.jobs >= MANY { 5 * PATIENCE } else { PATIENCE };
        self.drive(load, self.over_at)
    }

    /// Runs a load for a time, and then until what was begun is done.
    pub fn run_for(&mut self, load: &Load, time: Duration) -> Outcome<Run> {
        self.over_at = Instant::now() + time;
        self.drive(load, self.over_at + PATIENCE)
    }

    /// Sends a line once on each connection.
    pub fn say(&mut self, line: &str) -> Outcome<()> {
        self.run(&Load::lines(vec![line.to_owned(); self.connections.len()])).map(drop)
    }

    /// The jobs that the connections have reserved in the last run.
    pub fn take_held(&mut self) -> Vec<u64> {
        self.connections.iter_mut().flat_map(|connection| connection.turn.held.drain(..)).collect()
    }

    /// A server that has not replied by the deadline is too slow.
    fn drive(&mut self, load: &Load, deadline: Instant) -> Outcome<Run> {
        let mut work = Work::new(load);
        let mut events = Events::with_capacity(1024);
        for index in 0..self.connections.len() {
            if self.connections[index].awaited == 0 {
                self.connections[index].turn = Turn::default();
                self.ask(index, &mut work);
            }
        }
        while self.busy > 0 {
            let now = Instant::now();
            if work.is_finished(now >= self.over_at) {
                break;
            }
            if now >= deadline {
                return Err(TooSlow);
            }
            match self.poll.poll(&mut events, Some(deadline - now)) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                result => result.expect("epoll works"),
            }
            for event in &events {
                let Token(index) = event.token();
                if event.is_writable() {
                    self.connections[index].flush();
                }
                if event.is_readable() {
                    self.receive(index, &mut work);
                }
            }
        }
        Ok(work.run)
    }

    /// How long server and client have waited for a core so far.
    fn noise(&self) -> Duration {
        self.noise.as_ref().map(Waits::total).unwrap_or_default()
    }

    fn ask(&mut self, index: usize, work: &mut Work<'_>) {
        let (now, noise) = (Instant::now(), self.noise());
        let connection = &mut self.connections[index];
        let Connection { turn, output, .. } = connection;
        connection.awaited = work.ask(index, turn, now >= self.over_at, output);
        if connection.awaited > 0 {
            self.busy += 1;
            connection.noise_before = noise;
            connection.asked_at = now;
            connection.flush();
        }
    }

    fn receive(&mut self, index: usize, work: &mut Work<'_>) {
        let connection = &mut self.connections[index];
        let before = connection.awaited;
        connection.receive(work);
        if before > 0 && connection.awaited == 0 {
            let (latency, noise_before) = (connection.asked_at.elapsed(), connection.noise_before);
            let latency = latency.saturating_sub(self.noise() - noise_before);
            work.run.latencies.push(nanoseconds(latency));
            self.busy -= 1;
            self.ask(index, work);
        }
    }
}

struct Connection {
    stream: TcpStream,
    /// What was read and not yet taken; longer than that.
    input: Vec<u8>,
    filled: usize,
    turn: Turn,
    output: Vec<u8>,
    /// The bytes of the output that were written.
    written: usize,
    /// The number of replies that are still to come.
    awaited: usize,
    asked_at: Instant,
    /// How long server and client had waited for a core by then.
    noise_before: Duration,
}

impl Connection {
    fn open(poll: &Poll, address: SocketAddr, token: Token) -> Connection {
        let stream = std::net::TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).expect("the option can be set");
        stream.set_nonblocking(true).expect("the option can be set");
        let mut stream = TcpStream::from_std(stream);
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut stream, token, interest).expect("epoll takes it");
        Connection {
            stream,
            input: Vec::new(),
            filled: 0,
            turn: Turn::default(),
            output: Vec::new(),
            written: 0,
            awaited: 0,
            asked_at: Instant::now(),
            noise_before: Duration::ZERO,
        }
    }

    /// Writes what the socket takes; the rest when it takes more.
    fn flush(&mut self) {
        while self.written < self.output.len() {
            match self.stream.write(&self.output[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("writing to the server: {error}"),
            }
        }
        self.output.clear();
        self.written = 0;
    }

    /// Reads what there is. A read that does not fill the buffer has taken all: what comes
    /// later is reported again.
    fn receive(&mut self, work: &mut Work<'_>) {
        const ROOM: usize = 64 << 10;
        loop {
            self.input.resize(self.input.len().max(self.filled + ROOM), 0);
            let free = &mut self.input[self.filled..];
            let room = free.len();
            let count = match self.stream.read(free) {
                Ok(0) => panic!("the server has closed a connection"),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("reading from the server: {error}"),
            };
            self.filled += count;
            let mut taken = 0;
            while let Some(reply) = frame(&self.input[taken..self.filled]) {
                taken += reply.len;
                self.awaited = self.awaited.checked_sub(1).expect("no reply comes unasked");
                self.awaited += work.receive(&mut self.turn, reply.line);
            }
            self.input.copy_within(taken..self.filled, 0);
            self.filled -= taken;
            if count < room {
                return;
            }
        }
    }
}

/// A length of time as a whole number.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("no run takes centuries")
}
