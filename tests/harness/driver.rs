//! The seam: the only test file that names the core. All tests of behaviour drive the server through
//! [`Driver`], with bytes, time and a disk.
//!
//! A client is a queue of bytes in each direction. One iteration is the one of the event loop:
//!
//! ```text
//! begin: tick -> visit: each ready connection once, read and run -> commit -> flush: write, close
//! ```
//!
//! [`Driver::iterate`] does all of it. A test that follows each step calls [`Driver::begin`],
//! [`Driver::visit`], [`Driver::commit`] and [`Driver::flush`]. What a client sends in one call of
//! [`Driver::receive`] arrives at once, and is read in pieces of a bounded length.
//! The end of the input is reported once. There is room for output until a write has filled it, and
//! again when the client has read.
//!
//! Until the core owns its streams, this file also has an adapter: the order of visits and flushes
//! as `os/event_loop.rs` has it.

use beanstalkd::testing::{
    Address, ClockOffset, ConnKey, Counter, Histogram, HttpConn, JobKey, Key, Measurements,
    MetricsServer, Phase, ProcessInfo, ProcessorTime, Server, ServerState, inspect, listen,
};
use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::path::PathBuf;

pub use beanstalkd::testing::{
    Disk, FileNumber, FinishedRead, IoFailed, Limits, Nanos, Progress, ReadToken, Recovered,
    ReplayError, Settings, SyncError, Syncing,
};

/// Returns what `--check` prints about files, if some are damaged or missing.
pub fn damage(disk: &mut dyn Disk) -> Option<String> {
    let mut report = Vec::new();
    let is_sound = inspect::check(disk, &mut report).expect("a fake disk can be read");
    (!is_sound).then(|| String::from_utf8_lossy(&report).into_owned())
}

/// Identifies a client of one driver. It is never used again, unlike the key of its connection.
pub type Client = usize;

/// When the virtual time of most tests begins.
pub const START: Nanos = Nanos::from_secs(1_700_000_000);

/// How the server runs.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub settings: Settings,
    pub limits: Limits,
    pub syncing: Syncing,
    /// The virtual time from one iteration to the next.
    pub period: Nanos,
    /// The host that the server believes to run on.
    pub hostname: &'static str,
    /// Whether the server takes samples for the pages, which are due every 5 s.
    pub has_metrics: bool,
}

impl Options {
    pub const DEFAULT: Options = Options {
        settings: Settings { binlog_file_size: 10 * 1024 * 1024, ..Settings::DEFAULT },
        limits: Limits::DEFAULT,
        syncing: Syncing::EachIteration,
        period: Nanos::ZERO,
        hostname: "host",
        has_metrics: false,
    };
}

/// How a client ends its side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// It sends nothing more. The kernel reports that before the server has read everything.
    HalfClose,
    /// The same, and the server learns it when it reads the end.
    SilentHalfClose,
    /// The connection is gone, with all that was not read.
    HangUp,
}

/// What a test may know of the server without a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    pub ready: u64,
    pub reserved: u64,
    pub delayed: u64,
    pub buried: u64,
    pub tubes: u64,
    pub connections: u64,
    /// Closed connections that have not given back all jobs and watches.
    pub closing: u64,
    /// Lines of puts that were parsed: their bodies may not have arrived.
    pub puts_begun: u64,
}

/// What one visit has read.
#[derive(Debug)]
pub struct Visit {
    pub client: Client,
    /// The server has learned that the client sends nothing more, before it read these bytes.
    pub is_half_close_reported: bool,
    pub read: Vec<u8>,
    /// It has read the end of the input instead.
    pub is_end_read: bool,
}

/// What one flush has done.
#[derive(Debug, Default)]
pub struct Flushed {
    /// The bytes that each client has received.
    pub sent: Vec<(Client, Vec<u8>)>,
    /// The connections that the server has closed, in this order.
    pub closed: Vec<Client>,
}

#[derive(Debug)]
pub struct Driver {
    server: Server,
    options: Options,
    pub now: Nanos,
    /// Of the start; all zero without a binlog.
    pub recovered: Recovered,
    links: Vec<Link>,
    by_key: BTreeMap<ConnKey, Client>,
    /// To be visited in this iteration, and in the next one.
    ready: VecDeque<Client>,
    next_ready: VecDeque<Client>,
    to_flush: Vec<Client>,
    /// How many bytes a visit of this iteration reads.
    read_len: usize,
    is_iteration_open: bool,
    /// How many iterations have begun.
    pub iterations: usize,
    measurements: Measurements,
}

/// The kernel's side of a connection.
#[derive(Debug, Default)]
struct Link {
    /// `None` once the connection is closed.
    key: Option<ConnKey>,
    /// Sent by the client and not read by the server.
    unread: VecDeque<u8>,
    end: Option<End>,
    is_end_read: bool,
    /// Replies that the server has made. The first `made_sent` bytes were sent.
    made: Vec<u8>,
    made_sent: usize,
    /// Sent by the server and not taken by the test.
    received: Vec<u8>,
    /// How many more bytes the client reads. `None`: all.
    room: Option<usize>,
    is_queued: bool,
    /// The last iteration that has visited the connection.
    visited_in: usize,
}

impl Link {
    fn unsent(&self) -> &[u8] {
        &self.made[self.made_sent..]
    }

    fn send(&mut self, bytes: &[u8]) {
        assert!(self.unsent().starts_with(bytes), "what is sent is not what was made");
        self.made_sent += bytes.len();
        if self.made_sent > self.made.len() / 2 {
            self.made.drain(..self.made_sent);
            self.made_sent = 0;
        }
        self.received.extend_from_slice(bytes);
    }
}

/// The slices of one write, as in the event loop.
const SLICES_PER_WRITE: usize = 16;
/// The parts of all output of a connection: a batch has two for each large body.
const MOST_PARTS: usize = 4_096;
/// A server that is not idle after this many iterations never is.
const MOST_ITERATIONS: usize = 10_000_000;

impl Driver {
    /// Starts a server without a binlog.
    pub fn new(options: Options, now: Nanos) -> Driver {
        Driver::start(options, None, now).expect("there is no binlog")
    }

    /// Starts a server on the files of the disk.
    pub fn start(
        options: Options,
        disk: Option<Box<dyn Disk>>,
        now: Nanos,
    ) -> Result<Driver, ReplayError> {
        let process = process_info(options.hostname, now);
        let mut server = Server::new(options.settings, options.limits, process, now);
        let recovered = match disk {
            Some(disk) => server.recover(disk, options.syncing, now)?,
            None => Recovered::default(),
        };
        Ok(Driver {
            server,
            options,
            now,
            recovered,
            links: Vec::new(),
            by_key: BTreeMap::new(),
            ready: VecDeque::new(),
            next_ready: VecDeque::new(),
            to_flush: Vec::new(),
            read_len: options.limits.read_bytes,
            is_iteration_open: false,
            iterations: 0,
            measurements: Measurements::default(),
        })
    }

    // ---- Clients ----

    pub fn connect(&mut self) -> Client {
        let key = self.server.connect().expect("a connection needs little memory");
        self.by_key.insert(key, self.links.len());
        self.links.push(Link { key: Some(key), ..Link::default() });
        self.links.len() - 1
    }

    /// The client sends bytes, unless the connection is closed.
    pub fn receive(&mut self, client: Client, bytes: impl AsRef<[u8]>) {
        self.links[client].unread.extend(bytes.as_ref());
        self.queue(client);
    }

    /// The client ends its side of the connection.
    pub fn end(&mut self, client: Client, end: End) {
        if end == End::HangUp {
            return self.close(client);
        }
        self.links[client].end.get_or_insert(end);
        self.queue(client);
    }

    /// From now on the client reads this many bytes. `None`: all.
    pub fn set_room(&mut self, client: Client, room: Option<usize>) {
        self.links[client].room = room;
        self.queue(client);
    }

    /// Returns how many more bytes the client reads. `None`: all.
    pub fn room(&self, client: Client) -> Option<usize> {
        self.links[client].room
    }

    /// Each client that has read all that there was room for reads `room` bytes more, or a part of a
    /// long reply. Returns whether there is one.
    pub fn give_room(&mut self, room: usize) -> bool {
        const PARTS: usize = 64;
        let is_blocked = |link: &Link| link.room == Some(0) && link.key.is_some();
        let blocked: Vec<Client> =
            (0..self.links.len()).filter(|client| is_blocked(&self.links[*client])).collect();
        for &client in &blocked {
            self.set_room(client, Some(room.max(self.made(client).len() / PARTS)));
        }
        !blocked.is_empty()
    }

    /// Returns how many bytes the server has not read.
    pub fn unread(&self, client: Client) -> usize {
        self.links[client].unread.len()
    }

    /// Returns whether the server has closed the connection.
    pub fn is_closed(&self, client: Client) -> bool {
        self.links[client].key.is_none()
    }

    /// Returns whether the server has commands of the client left to run without further input.
    pub fn has_commands_left(&self, client: Client) -> bool {
        self.links[client].key.is_some_and(|key| self.server.actions(key).run)
    }

    /// Returns whether the server has done a part of the command that it runs, and has more to do for it.
    pub fn is_in_steps(&self, client: Client) -> bool {
        let iterations = Histogram::default();
        let Some(key) = self.links[client].key else { return false };
        let phase = &self.server.view(&iterations, self.now).conns[key].phase;
        matches!(phase, Phase::InSteps(_) | Phase::ListingTubes)
    }

    /// Returns the replies that the server has made and not sent. Some may wait for a disk.
    pub fn made(&self, client: Client) -> &[u8] {
        self.links[client].unsent()
    }

    /// Returns what the client has received and the test has not taken.
    pub fn received(&self, client: Client) -> &[u8] {
        &self.links[client].received
    }

    /// Takes what the client has received.
    pub fn take(&mut self, client: Client) -> Vec<u8> {
        std::mem::take(&mut self.links[client].received)
    }

    pub fn take_text(&mut self, client: Client) -> String {
        String::from_utf8_lossy(&self.take(client)).into_owned()
    }

    // ---- One iteration ----

    /// Begins an iteration, unless it has begun: does what is due.
    pub fn begin(&mut self) {
        if std::mem::replace(&mut self.is_iteration_open, true) {
            return;
        }
        self.iterations += 1;
        self.ready.append(&mut self.next_ready);
        self.server.begin_iteration(self.ready.len());
        self.server.tick(self.now);
        if self.options.has_metrics {
            self.measurements.update(&self.server, self.now);
        }
        self.server.share_budget(self.ready.len());
        let Limits { long_reads_per_iteration, read_bytes, short_read_bytes, .. } =
            self.options.limits;
        let is_long = self.ready.len() <= long_reads_per_iteration;
        self.read_len = if is_long { read_bytes } else { short_read_bytes };
        self.note_made();
    }

    pub fn is_iteration_open(&self) -> bool {
        self.is_iteration_open
    }

    /// Visits the next ready connection, each at most once in an iteration: runs what it has sent, and
    /// reads once. Returns `None` if all were visited, or the work of the iteration is used up.
    pub fn visit(&mut self) -> Option<Visit> {
        loop {
            if !self.server.has_budget() {
                return None;
            }
            let client = self.ready.pop_front()?;
            let link = &mut self.links[client];
            link.is_queued = false;
            link.visited_in = self.iterations;
            if let Some(key) = link.key {
                let visit = self.visit_one(client, key);
                self.note_made();
                return Some(visit);
            }
        }
    }

    fn visit_one(&mut self, client: Client, key: ConnKey) -> Visit {
        let link = &mut self.links[client];
        let is_half_close_reported = link.end == Some(End::HalfClose);
        let mut visit =
            Visit { client, is_half_close_reported, read: Vec::new(), is_end_read: false };
        if is_half_close_reported {
            link.end = Some(End::SilentHalfClose);
            self.server.half_close(key);
        }
        let mut actions = self.server.mark_dirty(key);
        if actions.run {
            self.server.resume(key, self.now);
            actions = self.server.actions(key);
        }
        if !actions.read {
            return visit;
        }
        if link.unread.is_empty() {
            if link.end.is_some() && !std::mem::replace(&mut link.is_end_read, true) {
                self.server.end_input(key);
                visit.is_end_read = true;
            }
            return visit;
        }
        let most = link.unread.len().min(self.read_len);
        if let Some(space) = self.server.body_space(key, most) {
            let count = most.min(space.len());
            visit.read = link.unread.drain(..count).collect();
            space[..count].copy_from_slice(&visit.read);
            self.server.receive_body(key, count, self.now);
        } else {
            visit.read = link.unread.drain(..most).collect();
            self.server.receive(key, &visit.read, self.now);
        }
        visit
    }

    /// Writes the records of the iteration. After an error nothing may be sent any more.
    pub fn commit(&mut self) -> Result<(), IoFailed> {
        self.server.commit(self.now)
    }

    /// Sends what may be sent, closes what has ended, and ends the iteration.
    pub fn flush(&mut self) -> Flushed {
        let mut flushed = Flushed::default();
        self.note_made();
        for client in std::mem::take(&mut self.to_flush) {
            let Some(key) = self.links[client].key else { continue };
            let link = &mut self.links[client];
            let mut output = self.server.output_handle(key);
            let mut slices = [IoSlice::new(&[]); SLICES_PER_WRITE];
            let filled = output.next_slices(&mut slices);
            let mut bytes: Vec<u8> =
                slices[..filled].iter().flat_map(|it| it.iter().copied()).collect();
            bytes.truncate(link.room.unwrap_or(usize::MAX));
            output.sent(bytes.len());
            link.send(&bytes);
            link.room = link.room.map(|room| room - bytes.len());
            let actions = output.actions();
            let has_input = !link.unread.is_empty() || link.end.is_some() && !link.is_end_read;
            let can_write = actions.write && link.room != Some(0);
            if actions.close {
                flushed.closed.push(client);
            } else if can_write || actions.run || (actions.read && has_input) {
                self.queue(client);
            }
            flushed.sent.push((client, bytes));
        }
        if self.server.is_congested() {
            self.mark_writable();
        }
        self.is_iteration_open = false;
        flushed.closed.iter().for_each(|client| self.close(*client));
        self.note_made();
        flushed
    }

    /// Makes the next iteration flush connections that are not visited while the disk is congested.
    fn mark_writable(&mut self) {
        for client in self.ready.iter().chain(&self.next_ready) {
            let Link { key: Some(key), room, .. } = self.links[*client] else { continue };
            if self.server.actions(key).write && room != Some(0) {
                self.server.mark_dirty(key);
            }
        }
    }

    fn queue(&mut self, client: Client) {
        let link = &mut self.links[client];
        if link.key.is_none() || std::mem::replace(&mut link.is_queued, true) {
            return;
        }
        let is_visited = self.is_iteration_open && link.visited_in == self.iterations;
        if is_visited { &mut self.next_ready } else { &mut self.ready }.push_back(client);
    }

    fn close(&mut self, client: Client) {
        let Some(key) = self.links[client].key.take() else { return };
        self.by_key.remove(&key);
        self.server.disconnect(key, self.now);
        self.note_made();
    }

    /// Takes over the replies that were made since the last call.
    fn note_made(&mut self) {
        let mut keys = Vec::new();
        self.server.take_dirty(&mut keys);
        for key in keys {
            let client = self.by_key.get(&key).copied();
            self.to_flush.extend(client.filter(|client| !self.to_flush.contains(client)));
        }
        for &client in &self.to_flush {
            let link = &mut self.links[client];
            let Some(key) = link.key else { continue };
            let (output, bodies) = self.server.unsent(key);
            let mut known = link.unsent().len();
            if output.len() == known {
                continue;
            }
            let mut slices = [IoSlice::new(&[]); MOST_PARTS];
            let filled = output.unsent_slices(&mut slices, bodies);
            for slice in &slices[..filled] {
                let skipped = known.min(slice.len());
                known -= skipped;
                link.made.extend_from_slice(&slice[skipped..]);
            }
        }
    }

    // ---- Many iterations ----

    /// Runs one iteration. An error is that of the disk.
    pub fn try_iterate(&mut self) -> Result<Flushed, IoFailed> {
        self.now = self.now + self.options.period;
        self.begin();
        while self.visit().is_some() {}
        self.commit()?;
        Ok(self.flush())
    }

    /// Runs one iteration on a disk that works.
    pub fn iterate(&mut self) -> Flushed {
        self.try_iterate().expect("the disk works")
    }

    /// Returns whether the next iteration has something to do at once, without a timer.
    pub fn is_busy(&self) -> bool {
        let has_ready = !self.ready.is_empty() || !self.next_ready.is_empty();
        let can_visit = has_ready && !self.server.is_congested();
        self.is_iteration_open || can_visit || !self.to_flush.is_empty() || self.server.has_dirty()
    }

    /// Iterates until nothing is left to do at this moment.
    pub fn settle(&mut self) {
        self.try_settle().expect("the disk works");
    }

    pub fn try_settle(&mut self) -> Result<(), IoFailed> {
        for _ in 0..MOST_ITERATIONS {
            self.try_iterate()?;
            if !self.is_busy() {
                return Ok(());
            }
        }
        panic!("the server does not become idle in {MOST_ITERATIONS} iterations");
    }

    /// Lets time pass, and does what comes due meanwhile at its moment.
    pub fn advance(&mut self, span: Nanos) {
        let end = self.now + span;
        pass_until(self, end, |it| it, Driver::settle);
    }

    /// Sends commands, lets the server do all that it can do now, and returns what has come. An error
    /// is that of the disk.
    pub fn try_ask(
        &mut self,
        client: Client,
        commands: impl AsRef<[u8]>,
    ) -> Result<String, IoFailed> {
        self.receive(client, commands);
        self.try_settle()?;
        Ok(self.take_text(client))
    }

    /// Does the same on a disk that works.
    pub fn ask(&mut self, client: Client, commands: impl AsRef<[u8]>) -> String {
        self.try_ask(client, commands).expect("the disk works")
    }

    /// Runs commands without an iteration: nothing that is due is done, and nothing is committed.
    /// Returns the replies.
    pub fn ask_at_once(&mut self, client: Client, commands: impl AsRef<[u8]>) -> Vec<u8> {
        self.receive(client, commands);
        let key = self.links[client].key.expect("the connection is open");
        let mut replies = Vec::new();
        while self.unread(client) > 0 || self.has_commands_left(client) {
            self.server.begin_iteration(1);
            self.visit_one(client, key);
            self.note_made();
            let bytes = self.made(client).to_vec();
            self.server.output_handle(key).sent(bytes.len());
            self.links[client].send(&bytes);
            replies.extend(self.take(client));
        }
        replies
    }

    // ---- The server ----

    /// Returns a moment that is not after the one when something is due.
    pub fn next_due(&self) -> Option<Nanos> {
        let sample = self.options.has_metrics.then(|| self.measurements.next_due());
        self.server.next_due().into_iter().chain(sample).min()
    }

    pub fn set_draining(&mut self, is_draining: bool) {
        self.server.set_draining(is_draining);
    }

    /// Sets the wall clock ahead of virtual time.
    pub fn set_wall_clock(&mut self, wall_clock: Nanos) {
        self.server.set_clock_offset(ClockOffset::between(self.now, wall_clock));
    }

    /// Ends the server as an operator does. What may still be sent is sent by [`Driver::flush_last`].
    pub fn stop(&mut self) -> Result<(), IoFailed> {
        self.server.close(self.now)
    }

    /// Hands what remains to a remote disk. Returns whether it has acknowledged everything.
    pub fn hand_over(&mut self) -> bool {
        self.server.hand_over();
        self.server.is_acknowledged()
    }

    /// Sends what may be sent without another command, once to each client: for a server that has stopped.
    pub fn flush_last(&mut self) -> Flushed {
        for key in self.by_key.keys() {
            self.server.mark_dirty(*key);
        }
        self.flush()
    }

    /// Returns whether too many changes wait for a remote disk: no connection is visited.
    pub fn is_congested(&self) -> bool {
        self.server.is_congested()
    }

    pub fn has_tube(&self, name: &str) -> bool {
        self.server.has_tube(name)
    }

    /// Returns the names of all tubes in the order of `list-tubes`.
    pub fn tubes(&self) -> Vec<String> {
        let iterations = Histogram::default();
        let tubes = &self.server.view(&iterations, self.now).queue.tubes;
        tubes.iter().map(|tube| tube.name.to_string()).collect()
    }

    pub fn facts(&self) -> Facts {
        let (line, iterations) = (self.server.summary(), Histogram::default());
        let view = self.server.view(&iterations, self.now);
        let (queue, puts) = (view.queue, [Counter::Put, Counter::PutInTube]);
        Facts {
            ready: line.ready,
            reserved: line.reserved,
            delayed: line.delayed,
            buried: line.buried,
            tubes: queue.tubes.len() as u64,
            connections: line.connections as u64,
            closing: queue.closing().len() as u64,
            puts_begun: puts.iter().map(|put| view.server.commands[*put as usize]).sum(),
        }
    }

    /// Returns the buried jobs of a tube in the order of their burials.
    pub fn buried(&self, tube: &str) -> Vec<u64> {
        let iterations = Histogram::default();
        let queue = self.server.view(&iterations, self.now).queue;
        let tube = queue.tubes.find(tube).and_then(|key| queue.tubes.get(key));
        let numbers = tube.into_iter().flat_map(|tube| tube.buried.iter(&queue.jobs));
        numbers.map(|number| queue.jobs[JobKey::from_number(number)].id).collect()
    }

    /// Checks the invariants of the server.
    ///
    /// # Panics
    /// One is broken.
    pub fn check(&self) {
        self.server.check();
    }
}

// ---- HTTP ----

/// What a connection to the port for metrics and the status page describes.
#[derive(Clone, Copy, Debug)]
pub enum Subject<'d> {
    /// A server that reads its binlog.
    Starting,
    /// A server of a cluster in which another one leads.
    StandingBy,
    Serving(&'d Driver),
}

impl<'d> Subject<'d> {
    fn state(self) -> ServerState<'d> {
        match self {
            Subject::Starting => ServerState::Starting,
            Subject::StandingBy => ServerState::StandingBy,
            Subject::Serving(driver) => ServerState::Serving(&driver.server, &driver.measurements),
        }
    }
}

/// An HTTP connection: request bytes in, response bytes out.
#[derive(Debug)]
pub struct Http {
    conn: HttpConn,
    pub now: Nanos,
}

impl Http {
    /// Opens a connection. On its page `tubes_max` tubes have metrics of their own.
    pub fn open(tubes_max: usize, now: Nanos) -> Http {
        Http { conn: HttpConn::new(tubes_max, now), now }
    }

    pub fn receive(&mut self, subject: Subject<'_>, bytes: impl AsRef<[u8]>) {
        let received = self.conn.receive(bytes.as_ref(), subject.state(), self.now);
        received.expect("a request needs little memory");
    }

    /// Does the work of the next slice, if all bytes were sent, and returns what is to be sent.
    pub fn make_piece(&mut self, subject: Subject<'_>) -> &[u8] {
        let made = self.conn.write_slice(subject.state(), self.now);
        made.expect("a slice needs little memory");
        self.conn.to_send()
    }

    /// The client has received the first `count` bytes of the piece.
    pub fn sent(&mut self, count: usize) {
        self.conn.sent(count, self.now);
    }

    /// Makes and sends the next piece. It is empty if the work of its slice makes no bytes.
    pub fn next_piece(&mut self, subject: Subject<'_>) -> Vec<u8> {
        let piece = self.make_piece(subject).to_vec();
        self.sent(piece.len());
        piece
    }

    /// Returns whether the whole response was sent.
    pub fn is_done(&self) -> bool {
        self.conn.is_lingering()
    }

    /// Returns when the connection is closed if nothing happens.
    pub fn deadline(&self) -> Nanos {
        self.conn.deadline()
    }

    pub fn is_expired(&self) -> bool {
        self.conn.is_expired(self.now)
    }
}

/// Sockets that answer over HTTP, with virtual time.
#[derive(Debug)]
pub struct HttpSockets(MetricsServer);

impl HttpSockets {
    /// Listens at a Unix socket, and at a port of loopback, which is returned.
    pub fn open(path: PathBuf) -> (HttpSockets, SocketAddr) {
        let at_path = Address::Unix { path, mode: None };
        let open = |address| listen::open(&address, 0, None).expect("it can listen");
        let mut listeners = open(at_path);
        listeners.extend(open(Address::Host("127.0.0.1".into())));
        let port = listeners[1].to_string().parse().expect("it is an address");
        (HttpSockets(MetricsServer::new(listeners, 1000).expect("it can poll")), port)
    }

    /// Serves each connection without waiting.
    pub fn iterate(&mut self, driver: &Driver) {
        self.0.turn(Subject::Serving(driver).state(), driver.now).expect("it can poll");
    }

    pub fn next_due(&self) -> Option<Nanos> {
        self.0.next_due()
    }
}

/// Lets time pass until `end`. At each moment when something is due, and at the end, calls `settle` on the
/// world that has the driver.
pub fn pass_until<W>(
    world: &mut W,
    end: Nanos,
    driver: impl Fn(&mut W) -> &mut Driver,
    settle: impl Fn(&mut W),
) {
    for _ in 0..MOST_ITERATIONS {
        let it = driver(world);
        let next = it.next_due().filter(|&next| next <= end);
        it.now = next.unwrap_or(end).max(it.now);
        settle(world);
        if next.is_none() {
            return;
        }
    }
    panic!("something is due again and again");
}

/// The facts of a process that started at `started_at`.
fn process_info(hostname: &str, started_at: Nanos) -> ProcessInfo {
    ProcessInfo {
        pid: 7,
        instance_id: "0123456789abcdef".to_owned(),
        hostname: hostname.to_owned(),
        os_version: "version".to_owned(),
        platform: "machine".to_owned(),
        started_at,
        processor_time: ProcessorTime::default,
        resident_bytes: || None,
        has_headroom: |_| true,
    }
}
