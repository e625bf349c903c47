//! The seam: the only test file that names the core. All tests of behaviour drive the server through
//! [`Driver`], with bytes, time and a disk.
//!
//! The server runs over [`Pipe`]s instead of sockets. One iteration is the one of the event loop:
//!
//! ```text
//! begin: what is due -> visit: each ready connection once, read and run -> commit -> send: write, close
//! ```
//!
//! [`Driver::iterate`] does all of it. A test that follows each step calls [`Driver::begin`],
//! [`Driver::visit`], [`Driver::commit`] and [`Driver::send`]. What a client sends in one call of
//! [`Driver::receive`] arrives at once. An edge is told once: when bytes arrive, at the end of the input,
//! and when a client reads again.

use beanstalkd::testing::{
    Address, ClockOffset, Command, ConnKey, Doing, HttpConn, JobKey, Key, Measurements,
    MetricsServer, Observed, Port, ProcessInfo, ProcessorTime, Readiness, Server, ServerState,
    Steps, Stream, WaitFor, are_refused, copy, inspect, listen, refuse_after,
};
use std::cell::{Cell, RefCell, RefMut};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

pub use beanstalkd::testing::{
    BinlogError, Disk, FileNumber, Limits, Nanos, Progress, RecordRead, Recovered, Settings,
    Syncing,
};

/// Returns whether the first file of a start could not be created.
pub fn is_of_first_file(error: &BinlogError) -> bool {
    error.step == beanstalkd::testing::Step::Begin
}

/// Returns what `--check` prints about files, if some are damaged or missing.
pub fn damage(disk: &mut dyn Disk) -> Option<String> {
    let mut report = Vec::new();
    let is_sound = inspect::check(disk, &mut report).expect("a fake disk can be read");
    (!is_sound).then(|| String::from_utf8_lossy(&report).into_owned())
}

/// Returns what `--dump` prints about sound files, unless a server moves the jobs faster than they can be read.
pub fn dump(disk: &mut dyn Disk) -> Option<String> {
    let mut jobs = Vec::new();
    assert!(inspect::dump(disk, &mut jobs).ok()?, "they are damaged");
    Some(String::from_utf8(jobs).expect("it is JSON"))
}

/// Copies a binlog, as `--import` and `--export` do. `settle` waits until the disk has stored a piece.
pub fn copy_binlog(from: &mut dyn Disk, to: &mut dyn Disk, mut settle: impl FnMut()) {
    let files = copy::measure(from).expect("it is sound");
    let store = |to: &mut dyn Disk| {
        to.begin_sync(&[], false, true);
        settle();
        to.finished_sync(false).expect("it has settled").expect("no disk fails");
        Ok(())
    };
    copy::copy(from, &files, to, store).expect("the disk is empty");
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
}

impl Options {
    pub const DEFAULT: Options = Options {
        settings: Settings { binlog_file_size: 10 * 1024 * 1024, ..Settings::DEFAULT },
        limits: Limits::DEFAULT,
        syncing: Syncing::EachIteration,
        period: Nanos::ZERO,
        hostname: "host",
    };
}

impl Default for Options {
    fn default() -> Options {
        Options::DEFAULT
    }
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

impl Facts {
    /// Returns how many jobs are ready, reserved, delayed and buried.
    pub fn jobs(&self) -> [u64; 4] {
        [self.ready, self.reserved, self.delayed, self.buried]
    }
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
    /// It has closed the connection then.
    pub is_closed: bool,
}

/// What one send has done.
#[derive(Debug, Default)]
pub struct Sent {
    /// The bytes that each client has received.
    pub replies: Vec<(Client, Vec<u8>)>,
    /// The connections that the server has closed, in this order.
    pub closed: Vec<Client>,
}

pub struct Driver {
    server: Server<Pipe>,
    options: Options,
    pub now: Nanos,
    /// Of the start; all zero without a binlog.
    pub recovered: Recovered,
    links: Vec<Link>,
    by_key: BTreeMap<ConnKey, Client>,
    /// The numbers of the commands that put a job.
    puts: [usize; 2],
    is_iteration_open: bool,
    /// How many iterations have begun.
    pub iterations: usize,
    /// Those of this iteration, for [`Sent::closed`].
    closed_in_visits: Vec<Client>,
    measurements: Measurements,
}

/// A connection as the test sees it.
#[derive(Debug)]
struct Link {
    key: ConnKey,
    wire: Rc<RefCell<Wire>>,
    /// Sent by the server and not taken by the test.
    received: Vec<u8>,
    /// Replies that the server has made. The first `made_sent` bytes were sent.
    made: Vec<u8>,
    made_sent: usize,
}

/// The kernel's side of a connection.
#[derive(Debug, Default)]
struct Wire {
    /// Sent by the client and not read by the server.
    unread: VecDeque<u8>,
    end: Option<End>,
    /// What the server has read since it was last taken, and whether that was the end.
    read: Vec<u8>,
    is_end_read: bool,
    /// Sent by the server, and not taken as a part of a send.
    sent: Vec<u8>,
    /// How many more bytes the client reads. `None`: all.
    room: Option<usize>,
    /// The server has closed the connection: the number of this close among all.
    closed: Option<u64>,
}

/// The server's end of a wire.
#[derive(Debug)]
struct Pipe(Rc<RefCell<Wire>>);

impl Read for Pipe {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut wire = self.0.borrow_mut();
        if wire.unread.is_empty() {
            wire.is_end_read = wire.end.is_some();
            return if wire.is_end_read { Ok(0) } else { Err(ErrorKind::WouldBlock.into()) };
        }
        // Bytes are copied in pieces: one at a time takes a third of the time of a simulation.
        let count = wire.unread.len().min(buffer.len());
        wire.unread.read_exact(&mut buffer[..count])?;
        wire.read.extend_from_slice(&buffer[..count]);
        Ok(count)
    }

    fn read_vectored(&mut self, slices: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut count = 0;
        for slice in slices {
            if count == 0 || !self.0.borrow().unread.is_empty() {
                count += self.read(slice)?;
            }
        }
        Ok(count)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut wire = self.0.borrow_mut();
        if wire.room == Some(0) {
            return Err(ErrorKind::WouldBlock.into());
        }
        let mut count = 0;
        for slice in slices {
            let len = slice.len().min(wire.room.unwrap_or(usize::MAX));
            wire.sent.extend_from_slice(&slice[..len]);
            wire.room = wire.room.map(|room| room - len);
            count += len;
        }
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

thread_local! {
    /// How many connections servers have closed.
    static CLOSES: Cell<u64> = const { Cell::new(0) };
}

impl Stream for Pipe {
    fn end_output(&mut self) -> io::Result<()> {
        let number = CLOSES.replace(CLOSES.get() + 1);
        self.0.borrow_mut().closed = Some(number);
        Ok(())
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.end_output().expect("a pipe does not fail");
    }
}

impl Link {
    fn unsent(&self) -> &[u8] {
        &self.made[self.made_sent..]
    }

    fn is_closed(&self) -> bool {
        self.wire.borrow().closed.is_some()
    }

    /// Takes the bytes that the server has sent, and checks that they are those that it has made.
    fn take_sent(&mut self) -> Vec<u8> {
        let bytes = std::mem::take(&mut self.wire.borrow_mut().sent);
        assert!(self.unsent().starts_with(&bytes), "what is sent is not what was made");
        self.received.extend_from_slice(&bytes);
        self.made_sent += bytes.len();
        if self.made_sent > self.made.len() / 2 {
            self.made.drain(..self.made_sent);
            self.made_sent = 0;
        }
        bytes
    }
}

/// The invariants hold at the end of each test. Those of a binlog end with a stop or an error.
impl Drop for Driver {
    fn drop(&mut self) {
        if !std::thread::panicking() && self.server.store().queue.binlog.is_none() {
            self.check();
        }
    }
}

/// A server that is not idle after this many iterations never is.
const MOST_ITERATIONS: usize = 10_000_000;

/// The address of each client.
const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 7)), 51_514);

impl Driver {
    pub fn new(options: Options, now: Nanos) -> Driver {
        Driver::start(options, None, now).expect("there is no binlog")
    }

    pub fn start(
        options: Options,
        disk: Option<Box<dyn Disk>>,
        now: Nanos,
    ) -> Result<Driver, BinlogError> {
        let process = process_info(options.hostname, now);
        let mut server = Server::new(options.settings, options.limits, process, now);
        let recovered = match disk {
            Some(disk) => {
                let mut replay = server.store.queue.begin_replay(disk, options.syncing)?;
                while replay.next_file().is_some() {
                    replay.read_file()?;
                }
                replay.finish(now)?
            }
            None => Recovered::default(),
        };
        Ok(Driver {
            server,
            options,
            now,
            recovered,
            links: Vec::new(),
            by_key: BTreeMap::new(),
            puts: ["put", "put-in-tube"].map(Command::number_of),
            is_iteration_open: false,
            iterations: 0,
            closed_in_visits: Vec::new(),
            measurements: Measurements::default(),
        })
    }

    // ---- Clients ----

    pub fn connect(&mut self) -> Client {
        let wire = Rc::<RefCell<Wire>>::default();
        self.server.try_reserve_one().expect("a connection needs little memory");
        let key = self.server.connect(Pipe(Rc::clone(&wire)), Some(ADDRESS));
        let key = key.expect("a connection needs little memory");
        self.by_key.insert(key, self.links.len());
        self.links.push(Link { key, wire, received: Vec::new(), made: Vec::new(), made_sent: 0 });
        self.links.len() - 1
    }

    pub fn clients<const N: usize>(&mut self) -> [Client; N] {
        [(); N].map(|()| self.connect())
    }

    /// The client sends bytes, unless the connection is closed.
    pub fn receive(&mut self, client: Client, bytes: impl AsRef<[u8]>) {
        self.links[client].wire.borrow_mut().unread.extend(bytes.as_ref());
        self.note(client, |seen| seen.is_readable = true);
    }

    pub fn end(&mut self, client: Client, end: End) {
        if end == End::HangUp {
            return self.close(client);
        }
        self.links[client].wire.borrow_mut().end.get_or_insert(end);
        let is_half_closed = end == End::HalfClose;
        self.note(client, |seen| {
            seen.is_half_closed |= is_half_closed;
            (seen.is_readable, seen.reads_to_the_end) = (true, true);
        });
    }

    /// From now on the client reads this many bytes. `None`: all.
    pub fn set_room(&mut self, client: Client, room: Option<usize>) {
        self.links[client].wire.borrow_mut().room = room;
        self.note(client, |seen| seen.is_writable = true);
    }

    pub fn room(&self, client: Client) -> Option<usize> {
        self.links[client].wire.borrow().room
    }

    pub fn unread(&self, client: Client) -> usize {
        self.links[client].wire.borrow().unread.len()
    }

    pub fn is_closed(&self, client: Client) -> bool {
        self.links[client].is_closed()
    }

    /// Returns the id of an open connection.
    pub fn id(&self, client: Client) -> u64 {
        self.links[client].key.id()
    }

    /// Returns the key of an open connection.
    fn key(&self, client: Client) -> Option<ConnKey> {
        let link = &self.links[client];
        (!link.is_closed()).then_some(link.key)
    }

    /// Returns whether the server has commands of the client left to run without further input.
    pub fn has_commands_left(&self, client: Client) -> bool {
        let conn = self.key(client).and_then(|key| self.server.inspect(key));
        conn.is_some_and(|(conn, _)| conn.has_backlog && conn.can_run(&self.server.store))
    }

    /// Returns what the server does for an open connection.
    fn doing(&self, client: Client) -> Option<&Doing> {
        let conn = self.key(client).and_then(|key| self.server.inspect(key));
        conn.map(|(conn, _)| &conn.doing)
    }

    /// Returns whether the server has done a part of the command that it runs, and has more to do for it.
    pub fn is_in_steps(&self, client: Client) -> bool {
        self.doing(client)
            .is_some_and(|doing| doing.is_in_steps() || matches!(doing, Doing::Wait(WaitFor::List)))
    }

    /// Returns whether the client waits for a job.
    pub fn waits(&self, client: Client) -> bool {
        matches!(self.doing(client), Some(Doing::Wait(WaitFor::Job(_))))
    }

    /// Returns how many ids a `delete-batch` in steps has left.
    pub fn ids_left(&self, client: Client) -> usize {
        match self.doing(client) {
            Some(Doing::Steps(Steps::DeleteBatch(batch))) => batch.ids.len(),
            _ => 0,
        }
    }

    /// Returns the replies that the server has made and not sent. Some may wait for a disk.
    pub fn made(&self, client: Client) -> &[u8] {
        self.links[client].unsent()
    }

    /// Returns what the client has received and the test has not taken.
    pub fn received(&self, client: Client) -> &[u8] {
        &self.links[client].received
    }

    pub fn take(&mut self, client: Client) -> Vec<u8> {
        std::mem::take(&mut self.links[client].received)
    }

    pub fn take_text(&mut self, client: Client) -> String {
        String::from_utf8_lossy(&self.take(client)).into_owned()
    }

    fn note(&mut self, client: Client, change: impl FnOnce(&mut Readiness)) {
        if let Some(key) = self.key(client) {
            self.server.note(key, change);
        }
    }

    // ---- One iteration ----

    /// Begins an iteration, unless it has begun: does what is due.
    pub fn begin(&mut self) {
        if std::mem::replace(&mut self.is_iteration_open, true) {
            return;
        }
        self.iterations += 1;
        let next_due = self.server.next_due();
        self.server.begin(self.now, next_due);
        if self.has_metrics() {
            self.measurements.update(&self.server, self.now);
        }
        self.note_made();
    }

    pub fn is_iteration_open(&self) -> bool {
        self.is_iteration_open
    }

    /// Visits the next ready connection, each at most once in an iteration: runs what it has sent, and
    /// reads once. Returns `None` if all were visited, or the work of the iteration is used up.
    pub fn visit(&mut self) -> Option<Visit> {
        loop {
            let now = self.now;
            let key = self.server.visit_next(&mut || now)?;
            self.note_made();
            let Some(&client) = self.by_key.get(&key) else { continue };
            let mut wire = self.links[client].wire.borrow_mut();
            let is_half_close_reported = wire.end == Some(End::HalfClose);
            if is_half_close_reported {
                wire.end = Some(End::SilentHalfClose);
            }
            let visit = Visit {
                client,
                is_half_close_reported,
                read: std::mem::take(&mut wire.read),
                is_end_read: std::mem::take(&mut wire.is_end_read),
                is_closed: wire.closed.is_some(),
            };
            drop(wire);
            if visit.is_closed {
                self.forget_closed();
                self.closed_in_visits.push(client);
            }
            return Some(visit);
        }
    }

    /// Writes the records of the iteration. After an error nothing may be sent any more.
    pub fn commit(&mut self) -> Result<(), BinlogError> {
        self.server.commit(self.now)
    }

    /// Sends what may be sent, closes what has ended, and ends the iteration.
    pub fn send(&mut self) -> Sent {
        self.note_made();
        let dirty: Vec<Client> = self
            .server
            .store
            .dirty
            .iter()
            .filter_map(|key| self.by_key.get(key).copied())
            .collect();
        let before: Vec<Client> = self.by_key.values().copied().collect();
        self.server.send(|| true);
        self.is_iteration_open = false;
        let mut replies: Vec<(Client, Vec<u8>)> =
            before.iter().map(|&client| (client, self.links[client].take_sent())).collect();
        replies.retain(|(client, bytes)| dirty.contains(client) || !bytes.is_empty());
        let mut closed = before;
        closed.retain(|&client| self.is_closed(client));
        closed.append(&mut self.closed_in_visits);
        closed.sort_by_key(|&client| self.links[client].wire.borrow().closed);
        self.forget_closed();
        self.note_made();
        Sent { replies, closed }
    }

    fn close(&mut self, client: Client) {
        if let Some(key) = self.key(client) {
            self.server.close(key, None);
            self.forget_closed();
            self.note_made();
        }
    }

    fn forget_closed(&mut self) {
        let links = &self.links;
        self.by_key.retain(|_, client| !links[*client].is_closed());
    }

    /// Takes over the replies that were made since the last call.
    fn note_made(&mut self) {
        for key in &self.server.store.dirty {
            let Some(&client) = self.by_key.get(key) else { continue };
            let Some((c, bodies)) = self.server.inspect(*key) else { continue };
            let link = &mut self.links[client];
            let known = link.unsent().len();
            if c.output.len() > known {
                link.made.extend(c.output.unsent(known, bodies));
            }
        }
    }

    // ---- Many iterations ----

    /// Runs one iteration. An error is that of the disk.
    pub fn try_iterate(&mut self) -> Result<Sent, BinlogError> {
        self.now = self.now + self.options.period;
        self.begin();
        while self.visit().is_some() {}
        self.commit()?;
        Ok(self.send())
    }

    pub fn iterate(&mut self) -> Sent {
        self.try_iterate().expect("the disk works")
    }

    /// Returns whether the next iteration has something to do at once, without a timer.
    pub fn is_busy(&self) -> bool {
        self.is_iteration_open || self.server.is_busy()
    }

    /// Iterates until nothing is left to do at this moment.
    pub fn settle(&mut self) {
        self.try_settle().expect("the disk works");
    }

    pub fn try_settle(&mut self) -> Result<(), BinlogError> {
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
        for _ in 0..MOST_ITERATIONS {
            let next = self.next_due().filter(|&next| next <= end);
            self.now = next.unwrap_or(end).max(self.now);
            self.settle();
            if next.is_none() {
                return;
            }
        }
        panic!("something is due again and again");
    }

    /// Sends commands, lets the server do all that it can do now, and returns what has come.
    pub fn ask(&mut self, client: Client, commands: impl AsRef<[u8]>) -> String {
        self.receive(client, commands);
        self.settle();
        self.take_text(client)
    }

    /// Runs commands without an iteration: nothing that is due is done, and nothing is committed.
    /// Returns the replies.
    pub fn ask_at_once(&mut self, client: Client, commands: impl AsRef<[u8]>) -> Vec<u8> {
        self.receive(client, commands);
        let key = self.key(client).expect("the connection is open");
        let mut replies = Vec::new();
        while self.unread(client) > 0 || self.has_commands_left(client) {
            replies.extend(self.server.run_now(key, self.now));
            self.links[client].wire.borrow_mut().read.clear();
        }
        replies
    }

    // ---- The server ----

    /// Returns a moment that is not after the one when something is due.
    pub fn next_due(&self) -> Option<Nanos> {
        let sample = self.has_metrics().then(|| self.measurements.next_due());
        let due = Some(self.server.next_due()).filter(|&due| due != Nanos::NEVER);
        due.into_iter().chain(sample).min()
    }

    /// Returns whether the server takes samples for the pages, which are due every 5 s.
    fn has_metrics(&self) -> bool {
        self.options.settings.metrics_tubes.is_some()
    }

    pub fn set_draining(&mut self, is_draining: bool) {
        self.server.store.is_draining = is_draining;
    }

    pub fn set_tool_server(&mut self, argument: &str) {
        self.server.store.process.tool_server = Some(argument.to_owned());
    }

    pub fn set_wall_clock(&mut self, wall_clock: Nanos) {
        self.server.store.queue.clock_offset = ClockOffset::between(self.now, wall_clock);
    }

    /// Ends the server as an operator does. What may still be sent is sent by [`Driver::send_last`].
    pub fn stop(&mut self) -> Result<(), BinlogError> {
        self.server.stop(self.now)
    }

    /// Begins to sync what remains on a remote disk. Returns whether everything is stored.
    pub fn sync_rest(&mut self) -> bool {
        self.server.sync_rest();
        self.server.is_acknowledged()
    }

    /// Sends what may be sent without another command, once to each client: for a server that has stopped.
    pub fn send_last(&mut self) -> Sent {
        for key in self.by_key.keys() {
            self.server.note(*key, |_| {});
        }
        self.send()
    }

    /// Returns whether too many changes wait for a remote disk: no connection is visited.
    pub fn is_congested(&self) -> bool {
        self.server.store().is_congested()
    }

    /// Returns how far a remote disk is.
    pub fn progress(&self) -> Progress {
        self.server.store().progress.expect("the disk is remote")
    }

    pub fn has_tube(&self, name: &str) -> bool {
        self.server.store().queue.tubes.find(name).is_some()
    }

    /// Returns the names of all tubes in the order of `list-tubes`.
    pub fn tubes(&self) -> Vec<String> {
        self.server.store().queue.tubes.iter().map(|tube| tube.name.to_string()).collect()
    }

    /// Returns the memory that `--max-memory` limits, in bytes.
    pub fn job_bytes(&self) -> u64 {
        self.server.store().queue.job_bytes()
    }

    pub fn facts(&self) -> Facts {
        let (line, queue) = (self.server.summary(), &self.server.store().queue);
        Facts {
            ready: line.ready,
            reserved: line.reserved,
            delayed: line.delayed,
            buried: line.buried,
            tubes: queue.tubes.len() as u64,
            connections: line.connections as u64,
            closing: self.server.leaving_count() as u64,
            puts_begun: self.puts.iter().map(|put| self.server.store().commands[*put]).sum(),
        }
    }

    /// Returns the buried jobs of a tube in the order of their burials.
    pub fn buried(&self, tube: &str) -> Vec<u64> {
        let queue = &self.server.store().queue;
        let tube = queue.tubes.find(tube).and_then(|key| queue.tubes.get(key));
        let numbers = tube.into_iter().flat_map(|tube| tube.jobs.buried.iter(&queue.jobs));
        numbers.map(|number| queue.jobs[JobKey::from_number(number)].id).collect()
    }

    /// Returns the deadline of a job that a client has reserved; [`Nanos::NEVER`] if its TTR has not begun.
    pub fn deadline(&self, client: Client, id: u64) -> Option<Nanos> {
        let (_, job) = self.server.store().queue.jobs.find_entry(id)?;
        (job.state.holder()? == self.key(client)?).then_some(job.due)
    }

    /// Of the next allocations that may be refused, lets `count` succeed and refuses the others, until this is called
    /// again. Only tests with the allocator of the program can.
    pub fn refuse_memory_after(count: usize) {
        refuse_after(count);
    }

    pub fn is_memory_refused() -> bool {
        are_refused()
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
#[derive(Clone, Copy)]
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
            Subject::StandingBy => ServerState::StandingBy(Some("b:11300")),
            Subject::Serving(driver) => ServerState::Serving(&driver.server, &driver.measurements),
        }
    }
}

/// An HTTP connection: request bytes in, response bytes out. Its client reads when the test calls for it.
pub struct Http {
    conn: HttpConn<Pipe>,
    pub now: Nanos,
}

impl Http {
    /// Opens a connection.
    pub fn open(now: Nanos) -> Http {
        let wire = Wire { room: Some(0), ..Wire::default() };
        Http { conn: HttpConn::new(Pipe(Rc::new(RefCell::new(wire))), now), now }
    }

    fn wire(&self) -> RefMut<'_, Wire> {
        self.conn.stream.0.borrow_mut()
    }

    pub fn receive(&mut self, subject: Subject<'_>, bytes: impl AsRef<[u8]>) {
        self.wire().unread.extend(bytes.as_ref());
        self.conn.serve(subject.state(), self.now).expect("the stream does not fail");
    }

    /// Makes the next slice, if all bytes were sent. Returns whether there are bytes to be sent.
    pub fn make_piece(&mut self, subject: Subject<'_>) -> bool {
        if self.conn.wants_slice() {
            let made = self.conn.write_slice(subject.state(), self.now);
            made.expect("the stream does not fail");
        }
        self.conn.has_output()
    }

    /// Returns the next bytes, of which the client takes at most `count`.
    pub fn take(&mut self, subject: Subject<'_>, count: usize) -> Vec<u8> {
        self.wire().room = Some(count);
        self.conn.serve(subject.state(), self.now).expect("the stream does not fail");
        self.wire().room = Some(0);
        std::mem::take(&mut self.wire().sent)
    }

    /// Makes and sends the next piece. It is empty if the work of its slice makes no bytes.
    pub fn next_piece(&mut self, subject: Subject<'_>) -> Vec<u8> {
        self.make_piece(subject);
        self.take(subject, usize::MAX)
    }

    pub fn is_done(&self) -> bool {
        self.wire().closed.is_some()
    }

    pub fn deadline(&self) -> Nanos {
        self.conn.deadline()
    }
}

/// Sockets that answer over HTTP, with virtual time.
pub struct HttpSockets {
    poll: mio::Poll,
    server: MetricsServer,
}

impl HttpSockets {
    /// Listens at a Unix socket, and at a port of loopback, which is returned.
    pub fn open(path: PathBuf) -> (HttpSockets, SocketAddr) {
        let at_path = Address::Unix { path, mode: None };
        let open = |address| listen::open(&address, None).expect("it can listen");
        let mut listeners = open(at_path);
        let host = Some("127.0.0.1".to_owned());
        listeners.extend(open(Address::Tcp { host, port: Port::Number(0) }));
        let port = listen::name_of(&listeners[1]).parse().expect("it is an address");
        let poll = mio::Poll::new().expect("it can poll");
        let server = MetricsServer::new(listeners, 64, poll.registry()).expect("it can poll");
        (HttpSockets { poll, server }, port)
    }

    /// Serves each connection without waiting.
    pub fn iterate(&mut self, driver: &Driver) {
        let mut events = mio::Events::with_capacity(1024);
        self.poll.poll(&mut events, Some(Duration::ZERO)).expect("it can poll");
        events.iter().for_each(|_| self.server.on_event());
        self.server.turn(Subject::Serving(driver).state(), driver.now, Nanos::NEVER);
    }

    pub fn next_due(&self) -> Nanos {
        self.server.next_due()
    }
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
        tool_server: None,
        max_connections: None,
        processor_time: ProcessorTime::default,
        resident_bytes: || None,
        has_headroom: |_| !are_refused(),
    }
}
