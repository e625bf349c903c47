//! The load generator: many connections on one thread, driven by readiness.
//!
//! A [`Pool`] keeps the connections; a [`Script`] makes their requests. It is a closed
//! loop: a connection sends its next requests as soon as all replies to the last ones are
//! in, with one write straight after the read. During the load a [`Probe`] may send a cheap
//! question every millisecond, on a connection of its own, and note how long it waited; and a
//! [`Scraper`] may ask for metrics.
//! This file knows nothing of scenarios, and of servers only their address.

use crate::figures::Figures;
use crate::reply::{Framing, Reply};
use crate::scrape::{Scraper, Scrapes};
use crate::waits::Waits;
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token};
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Makes the requests of a pool and takes the replies.
pub trait Script {
    /// Appends the next requests of a connection; returns the number of their replies, or 0 if the
    /// connection has no more requests in this run. Once the run `is_over` a script only completes
    /// what it has begun.
    fn ask(&mut self, connection: usize, is_over: bool, output: &mut Vec<u8>) -> usize;

    /// A whole reply has come in on this connection.
    fn receive(&mut self, connection: usize, reply: Reply);

    /// Returns whether the run can end while `busy` connections await replies.
    fn is_finished(&self, busy: usize) -> bool {
        busy == 0
    }
}

/// The server has not done in time what was asked of it.
#[derive(Debug, Clone, Copy)]
pub struct TooSlow;

/// What a server may be too slow for.
pub type Outcome<T> = Result<T, TooSlow>;

/// When a run ends.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// From now on scripts only end what they have begun.
    over_at: Instant,
    /// A client that has not ended by now is too slow.
    deadline: Instant,
}

impl Limits {
    /// Until the script has no more requests, and at most this long.
    pub fn within(patience: Duration) -> Limits {
        let deadline = Instant::now() + patience;
        Limits { over_at: deadline, deadline }
    }

    /// For so long, and then until what was begun is done.
    pub fn lasting(duration: Duration) -> Limits {
        /// Far more than it takes to end what has begun.
        const PATIENCE: Duration = Duration::from_secs(10);
        let over_at = Instant::now() + duration;
        Limits { over_at, deadline: over_at + PATIENCE }
    }
}

/// What a run has come to.
#[derive(Debug)]
pub struct Run {
    pub replies: u64,
    /// From the write of requests to the last of their replies, in nanoseconds.
    pub latencies: Vec<u64>,
}

/// Connections that are driven together.
pub struct Pool {
    poll: Poll,
    connections: Vec<Connection>,
    probe: Option<Probe>,
    scraper: Option<Scraper>,
    /// What is not counted as latency.
    waits: Option<Waits>,
    /// How many connections await replies.
    busy: usize,
    /// What is read, from whichever connection.
    buffer: Vec<u8>,
}

impl Pool {
    /// Opens connections.
    pub fn connect(address: SocketAddr, count: usize) -> Pool {
        /// Enough for four of the largest bodies.
        const BUFFER_SIZE: usize = 256 << 10;
        let poll = Poll::new().expect("there is epoll");
        let connections = (0..count).map(|index| Connection::open(&poll, address, Token(index)));
        let connections = connections.collect();
        Pool {
            poll,
            connections,
            probe: None,
            scraper: None,
            waits: None,
            busy: 0,
            buffer: vec![0; BUFFER_SIZE],
        }
    }

    /// Opens connections, and leaves out of latencies the time in which server or client waited
    /// for a core. To find that out takes the client a microsecond or two for each reply.
    pub fn without_noise(address: SocketAddr, count: usize, waits: Waits) -> Pool {
        Pool { waits: Some(waits), ..Pool::connect(address, count) }
    }

    /// Opens connections, and one more for a probe.
    pub fn with_probe(address: SocketAddr, count: usize, question: Question, waits: Waits) -> Pool {
        let mut pool = Pool::connect(address, count);
        let connection = Connection::open(&pool.poll, address, PROBE);
        pool.probe = Some(Probe::new(connection, question, waits));
        pool
    }

    /// Runs the script on the connections until it or the time ends.
    pub fn run(&mut self, script: &mut impl Script, limits: Limits) -> Outcome<Run> {
        let mut run = Run { replies: 0, latencies: Vec::with_capacity(1 << 16) };
        let mut events = Events::with_capacity(1024);
        for index in 0..self.connections.len() {
            if self.connections[index].awaited == 0 {
                let waited = self.waited();
                self.ask(index, script, Instant::now(), waited, limits);
            }
        }
        while !script.is_finished(self.busy) {
            let now = Instant::now();
            if now >= limits.deadline {
                return Err(TooSlow);
            }
            self.wait(&mut events, now, limits.deadline);
            for event in &events {
                if event.token() == PROBE {
                    self.receive_probe();
                    continue;
                }
                if event.token() == SCRAPER {
                    self.scraper.iter_mut().for_each(|scraper| scraper.is_ready = true);
                    continue;
                }
                let Token(index) = event.token();
                if event.is_writable() {
                    self.connections[index].flush();
                }
                if event.is_readable() {
                    self.receive(index, script, limits, &mut run);
                }
            }
            if let Some(scraper) = self.scraper.as_mut().filter(|scraper| scraper.is_ready) {
                scraper.go_on(&mut self.buffer);
            }
        }
        Ok(run)
    }

    /// A client scrapes metrics there during the next runs.
    pub fn start_scraping(&mut self, address: SocketAddr) {
        let registry = self.poll.registry().try_clone().expect("the system has a descriptor");
        self.scraper = Some(Scraper::start(registry, SCRAPER, address));
    }

    /// He goes; what he has got.
    pub fn stop_scraping(&mut self) -> Scrapes {
        self.scraper.take().map(Scraper::end).unwrap_or_default()
    }

    /// Lets only the probe send requests for this time.
    pub fn watch(&mut self, duration: Duration) {
        let end = Instant::now() + duration;
        self.watch_until(end, |_| false);
    }

    /// The same, until the probe receives NOT_FOUND.
    pub fn watch_for_none(&mut self, patience: Duration) {
        self.watch_until(Instant::now() + patience, |probe| probe.stalls.none_found_at.is_some());
    }

    /// The same, until this number of jobs is ready.
    pub fn watch_for_ready(&mut self, jobs: u64, patience: Duration) {
        self.watch_until(Instant::now() + patience, |probe| probe.stalls.ready_jobs >= jobs);
    }

    /// The same, until the probe finds no ready job. Returns whether that was in time.
    pub fn watch_for_no_ready(&mut self, patience: Duration) -> bool {
        let is_empty = |probe: &Probe| probe.stalls.is_known && probe.stalls.ready_jobs == 0;
        self.watch_until(Instant::now() + patience, is_empty);
        self.probe.as_ref().is_some_and(is_empty)
    }

    /// The same, until another thread ends it.
    pub fn watch_while(&mut self, goes_on: impl Fn() -> bool, patience: Duration) {
        self.watch_until(Instant::now() + patience, |_| !goes_on());
    }

    fn watch_until(&mut self, end: Instant, mut is_enough: impl FnMut(&Probe) -> bool) {
        let mut events = Events::with_capacity(1);
        loop {
            let now = Instant::now();
            if now >= end || self.probe.as_ref().is_some_and(&mut is_enough) {
                return;
            }
            self.wait(&mut events, now, end);
            if events.iter().any(|event| event.token() == PROBE) {
                self.receive_probe();
            }
        }
    }

    /// What the probe has noted since this was last called. The reply to a question that is
    /// under way is waited for; one that does not come counts as a stall until now.
    pub fn take_stalls(&mut self) -> Stalls {
        /// Long enough for the worst of stalls.
        const PATIENCE: Duration = Duration::from_secs(60);
        let end = Instant::now() + PATIENCE;
        self.watch_until(end, |probe| probe.connection.awaited == 0);
        let probe = self.probe.as_mut().expect("the pool has a probe");
        if probe.connection.awaited > 0 {
            probe.note(Instant::now());
        }
        std::mem::take(&mut probe.stalls)
    }

    /// Asks what the probe has to ask, and waits for something to happen.
    fn wait(&mut self, events: &mut Events, now: Instant, end: Instant) {
        let mut timeout = end - now;
        if let Some(probe) = &mut self.probe {
            timeout = timeout.min(probe.ask_if_due(now));
        }
        if self.scraper.as_ref().is_some_and(|scraper| scraper.is_ready) {
            timeout = Duration::ZERO;
        }
        match self.poll.poll(events, Some(timeout)) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => result.expect("epoll works"),
        }
    }

    /// How long server and client have waited for a core so far, and the clients for the scraper.
    fn waited(&self) -> Duration {
        let scraper = self.scraper.as_ref().map(|scraper| scraper.time).unwrap_or_default();
        self.waits.as_ref().map(|waits| waits.total() + scraper).unwrap_or_default()
    }

    fn ask(
        &mut self,
        index: usize,
        script: &mut impl Script,
        now: Instant,
        waited: Duration,
        limits: Limits,
    ) {
        let connection = &mut self.connections[index];
        let is_over = now >= limits.over_at;
        let awaited = script.ask(index, is_over, &mut connection.output);
        if awaited > 0 {
            self.busy += 1;
            connection.waited_before = waited;
            connection.send(awaited, now);
        }
    }

    fn receive(&mut self, index: usize, script: &mut impl Script, limits: Limits, run: &mut Run) {
        let connection = &mut self.connections[index];
        let before = connection.awaited;
        connection.receive(&mut self.buffer, |reply| {
            run.replies += 1;
            script.receive(index, reply);
        });
        if before > 0 && connection.awaited == 0 {
            let (now, asked_at) = (Instant::now(), connection.asked_at);
            let waited_before = connection.waited_before;
            let waited = self.waited();
            let latency = (now - asked_at).saturating_sub(waited - waited_before);
            run.latencies.push(nanoseconds(latency));
            self.busy -= 1;
            self.ask(index, script, now, waited, limits);
        }
    }

    fn receive_probe(&mut self) {
        let probe = self.probe.as_mut().expect("only a probe has this token");
        probe.receive(&mut self.buffer);
    }
}

/// The token of the probe; all others but the next count from nought.
const PROBE: Token = Token(usize::MAX - 1);
const SCRAPER: Token = Token(usize::MAX - 2);

/// What a probe asks; each costs a server next to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// `use default`
    Use,
    /// A job is put, and deleted the next time.
    PutAndDelete,
    /// `peek-delayed`: shows at the same time when no job is delayed any more.
    PeekDelayed,
    /// `stats-tube default`: shows at the same time how many jobs are ready.
    ReadyJobs,
}

/// Asks a question every millisecond or so.
struct Probe {
    connection: Connection,
    question: Question,
    due: Instant,
    stalls: Stalls,
    /// The job it has put and not yet deleted.
    job: Option<u64>,
    waits: Waits,
    /// What they were when the question was asked.
    waited_before: Duration,
}

impl Probe {
    const PERIOD: Duration = Duration::from_millis(1);

    fn new(connection: Connection, question: Question, waits: Waits) -> Probe {
        let (due, stalls, waited_before) = (Instant::now(), Stalls::default(), waits.total());
        let mut probe =
            Probe { connection, question, due, stalls, job: None, waits, waited_before };
        if question == Question::PutAndDelete {
            // So that no other client reserves its jobs.
            probe.connection.output.extend_from_slice(b"use probe\r\n");
            probe.connection.send(1, due);
        }
        probe
    }

    /// Asks if it is time to; returns how long until there is something to do.
    fn ask_if_due(&mut self, now: Instant) -> Duration {
        if self.connection.awaited > 0 {
            return Duration::MAX;
        }
        if now < self.due {
            return self.due - now;
        }
        let output = &mut self.connection.output;
        match (self.question, self.job.take()) {
            (Question::Use, _) => output.extend_from_slice(b"use default\r\n"),
            (Question::PeekDelayed, _) => output.extend_from_slice(b"peek-delayed\r\n"),
            (Question::ReadyJobs, _) => output.extend_from_slice(b"stats-tube default\r\n"),
            (Question::PutAndDelete, None) => {
                output.extend_from_slice(b"put 0 0 60 5\r\nprobe\r\n");
            }
            (Question::PutAndDelete, Some(id)) => {
                write!(output, "delete {id}\r\n").expect("memory takes it");
            }
        }
        self.waited_before = self.waits.total();
        self.connection.send(1, now);
        self.due = now + Probe::PERIOD;
        Duration::MAX
    }

    fn receive(&mut self, buffer: &mut [u8]) {
        let mut received = None;
        self.connection.receive(buffer, |reply| received = Some(reply));
        let Some(reply) = received else { return };
        let now = Instant::now();
        self.note(now);
        match reply {
            Reply::Inserted(id) => self.job = Some(id),
            Reply::NotFound => _ = self.stalls.none_found_at.get_or_insert(now),
            Reply::ReadyJobs(count) => {
                self.stalls.ready_jobs = count;
                self.stalls.is_known = true;
            }
            Reply::Reserved(_)
            | Reply::TimedOut
            | Reply::Listed(_)
            | Reply::Batch(_)
            | Reply::DeletedBatch(_)
            | Reply::Done => {}
        }
    }

    /// Notes how long the question has been under way.
    fn note(&mut self, now: Instant) {
        let waited = self.waits.total() - self.waited_before;
        self.stalls.add(now - self.connection.asked_at, waited);
    }
}

/// What a probe has noted.
#[derive(Default)]
pub struct Stalls {
    /// The longest that a question had to wait.
    worst: Duration,
    /// The longest of all questions, each less the time in which server or client waited for
    /// a core. The stall is at least this, and at most `worst`.
    worst_of_server: Duration,
    /// When it first received NOT_FOUND.
    pub none_found_at: Option<Instant>,
    /// The last known number of ready jobs.
    pub ready_jobs: u64,
    /// Whether it is known.
    is_known: bool,
}

impl Stalls {
    fn add(&mut self, latency: Duration, waited: Duration) {
        self.worst = self.worst.max(latency);
        self.worst_of_server = self.worst_of_server.max(latency.saturating_sub(waited));
    }

    /// The figures, with this before their names.
    pub fn figures(&self, prefix: &str) -> Figures {
        let mut figures = Figures::default();
        figures.add(&format!("{prefix}stall_ms"), self.worst_of_server.as_secs_f64() * 1e3);
        figures.add(&format!("{prefix}stall_with_noise_ms"), self.worst.as_secs_f64() * 1e3);
        figures
    }
}

/// One connection, and what is on its way through it.
struct Connection {
    stream: TcpStream,
    framing: Framing,
    output: Vec<u8>,
    /// The bytes of the output that were written.
    written: usize,
    /// The number of replies that are still to come.
    awaited: usize,
    asked_at: Instant,
    /// How long server and client had waited for a core by then.
    waited_before: Duration,
}

impl Connection {
    fn open(poll: &Poll, address: SocketAddr, token: Token) -> Connection {
        let stream = std::net::TcpStream::connect(address).expect("the server listens");
        stream.set_nodelay(true).expect("the option can be set");
        stream.set_nonblocking(true).expect("the option can be set");
        let mut stream = TcpStream::from_std(stream);
        let interest = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut stream, token, interest).expect("epoll takes it");
        let asked_at = Instant::now();
        let (framing, output) = (Framing::default(), Vec::new());
        Connection {
            stream,
            framing,
            output,
            written: 0,
            awaited: 0,
            asked_at,
            waited_before: Duration::ZERO,
        }
    }

    fn send(&mut self, awaited: usize, now: Instant) {
        self.awaited = awaited;
        self.asked_at = now;
        self.flush();
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
    fn receive(&mut self, buffer: &mut [u8], mut take: impl FnMut(Reply)) {
        loop {
            let count = match self.stream.read(buffer) {
                Ok(0) => panic!("the server has closed a connection"),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => panic!("reading from the server: {error}"),
            };
            let awaited = &mut self.awaited;
            self.framing.cut(&buffer[..count], |reply| {
                *awaited = awaited.checked_sub(1).expect("no reply comes unasked");
                if let Reply::Batch(count) = reply {
                    *awaited += usize::try_from(count).expect("a batch has at most 1000 jobs");
                }
                take(reply);
            });
            if count < buffer.len() {
                return;
            }
        }
    }
}

/// A length of time as a whole number.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("no run takes centuries")
}
