//! Drives the engine and the model through one history. Clients, time and the disk are simulated.
//!
//! Each event calls the engine as the event loop would. The model learns the order of commands from
//! the engine: after each call the driver takes the new replies, and lets the model run one command
//! of that client for each of them. A reply that the model does not give is a failure.
//!
//! How many commands the engine runs in an iteration is its own choice; `bounds.rs` checks that it
//! is fair. `follow.rs` has the comparison with the model, and `restart.rs` crashes and restarts.
//!
//! The disk is local or remote (`disk.rs`). On a remote one the model still runs each command when
//! the engine does, from the output that the engine holds back. `held.rs` determines how much of it
//! may be sent.
//!
//! The engine divides long commands into steps: a close with thousands of jobs, or a list of
//! thousands of tubes. Here all of them are small enough for one step, except flushes; `tests/fairness.rs`
//! tests the other steps.

use super::event::{BinlogSetup, Crash, Event, Setup};
use super::journal::{End, Journal};
use super::model::{ClientNumber, Model, Options};
use crate::harness::fixtures;
use beanstalkd::testing::{ClockOffset, ConnKey, Nanos, Server, Settings, Syncing};
use std::collections::BTreeMap;
use std::io::IoSlice;
use std::num::NonZero;

mod bounds;
mod bury_log;
mod disk;
mod follow;
mod held;
mod restart;

use disk::SimulatedDisk;
pub use follow::Orders;
use follow::difference;
use held::HeldReplies;

/// Describes a difference between what came and what was expected.
pub type Failure = String;

pub struct Simulation {
    setup: Setup,
    server: Server,
    disk: SimulatedDisk,
    model: Model,
    journal: Journal,
    /// The monotonic clock, in nanoseconds.
    now: u64,
    /// How far the wall clock is ahead of it.
    clock_offset: i64,
    capacity: Option<u64>,
    /// The most bytes that the binlog may take.
    limit: Option<u64>,
    /// The last change on the disk at the end of each commit since the start.
    commits: Vec<u64>,
    sockets: BTreeMap<ClientNumber, Socket>,
    numbers: BTreeMap<ConnKey, ClientNumber>,
    /// Clients to serve in the next iteration.
    ready: Vec<ClientNumber>,
    has_iteration_begun: bool,
    /// The disk was congested when the iteration began.
    is_congested: bool,
    /// The time of the last iteration that began with a congested disk.
    congested_at: u64,
    /// Clients to flush at the end of the iteration.
    to_flush: Vec<ClientNumber>,
    /// The crash that follows when the disk fails.
    crash_to_come: Option<Crash>,
    /// The disk was limited, failed or damaged: the bound of its use does not hold.
    had_disk_faults: bool,
    /// The number of iterations since the oldest flush became the oldest one.
    iterations_of_flush: usize,
    /// The orders of what is due at once.
    pub orders: Orders,
    /// How often the server was started.
    pub starts: u64,
    /// What each client has read, if the caller asks for it.
    sent: Option<Vec<(ClientNumber, Vec<u8>)>>,
}

/// The kernel's side of a connection.
struct Socket {
    key: ConnKey,
    /// Sent by the client and not read by the server.
    inbound: Vec<u8>,
    is_half_closed: bool,
    /// The server has read the end of the input.
    is_end_read: bool,
    /// How many more bytes the client reads.
    read_limit: Option<usize>,
    /// Replies of the engine that the client has not read.
    output: Vec<u8>,
    /// The engine may have more of them than it shows at once.
    is_output_cut: bool,
    held: HeldReplies,
    is_served: bool,
    /// The number of its commands that were run in this iteration.
    commands: usize,
    /// The server has read bytes or run commands of it in this iteration.
    has_progress: bool,
    /// The number of iterations without progress since it was ready.
    iterations_left_out: usize,
}

/// The resolution of the engine's timers: time passes in whole ticks, so that no timer is due
/// between two of them.
const TICK: u64 = 1 << 16;
const START: u64 = 1_700_000_000_000_000_000;
/// Timers after this time, a century later, are not waited for: times beyond them must fit in 64
/// bits.
const END_OF_TIME: u64 = START + 3_200_000_000_000_000_000;
/// The engine is idle after at most this many iterations without events: an iteration may run one
/// command, and some thousands may have been sent.
const MAX_ITERATIONS_UNTIL_IDLE: usize = 10_000;
/// The server reads at most this many bytes of a connection in one iteration.
const READ_LEN: usize = 16 * 1024;
const SLICES_PER_WRITE: usize = 16;

impl Simulation {
    pub fn new(setup: Setup) -> Result<Simulation, Failure> {
        bury_log::install();
        let now = START.next_multiple_of(TICK);
        let disk = SimulatedDisk::new(setup.binlog);
        let limit = setup.binlog.and_then(|binlog| binlog.limit);
        let mut server = server(&setup, limit, now);
        if setup.binlog.is_some() {
            let recovered = server.recover(disk.boxed(), syncing(&setup), nanos(now));
            recovered.map_err(|error| format!("cannot use an empty directory: {error}"))?;
        }
        let options = Options {
            max_job_size: setup.max_job_size,
            binlog_file_size: setup.binlog.map_or(0, |binlog| binlog.file_size),
            has_binlog: setup.binlog.is_some(),
            bury_after: setup.bury_after,
        };
        let mut model = Model::new(options, now);
        model.may_refuse_updates = limit.is_some();
        disk.set_reads_late(has_threads(&setup));
        Ok(Simulation {
            setup,
            server,
            disk,
            model,
            journal: Journal::default(),
            now,
            clock_offset: 0,
            capacity: None,
            limit,
            commits: Vec::new(),
            sockets: BTreeMap::new(),
            numbers: BTreeMap::new(),
            ready: Vec::new(),
            has_iteration_begun: false,
            is_congested: false,
            congested_at: 0,
            to_flush: Vec::new(),
            crash_to_come: None,
            had_disk_faults: false,
            iterations_of_flush: 0,
            orders: Orders::default(),
            starts: 1,
            sent: None,
        })
    }

    // ---- State, for the generator ----

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn clients(&self) -> Vec<ClientNumber> {
        self.sockets.keys().copied().collect()
    }

    /// Returns what clients have read since the last call.
    pub fn take_sent(&mut self) -> Vec<(ClientNumber, Vec<u8>)> {
        self.sent.replace(Vec::new()).unwrap_or_default()
    }

    /// Returns the size of all binlog files, in bytes.
    pub fn disk_use(&self) -> u64 {
        self.disk.used()
    }

    /// Returns whether the next iteration has something to do at once.
    pub fn is_busy(&self) -> bool {
        let can_serve = !self.ready.is_empty() && !self.server.is_congested();
        self.has_iteration_begun || can_serve || !self.to_flush.is_empty()
    }

    /// Returns the number of changes that the disk has not acknowledged.
    pub fn waiting_changes(&self) -> usize {
        self.disk.waiting()
    }

    /// Returns whether another server leads, so that this one must end.
    pub fn has_lost_leadership(&self) -> bool {
        self.disk.is_refused()
    }

    /// Returns how many bytes a client has sent that the server has not read.
    pub fn unread(&self, client: ClientNumber) -> usize {
        self.sockets.get(&client).map_or(0, |socket| socket.inbound.len())
    }

    pub fn can_send(&self, client: ClientNumber) -> bool {
        self.sockets.get(&client).is_some_and(|socket| !socket.is_half_closed)
    }

    // ---- Events ----

    /// Applies one event to the engine and to the model, and compares them.
    pub fn apply(&mut self, event: &Event) -> Result<(), Failure> {
        match event {
            Event::Connect(client) => self.connect(*client)?,
            Event::Send(client, bytes) => self.send(*client, bytes)?,
            Event::HalfClose(client, is_reported) => self.half_close(*client, *is_reported)?,
            Event::Disconnect(client) => self.break_connection(*client)?,
            Event::ReadLimit(client, limit) => self.set_read_limit(*client, *limit)?,
            Event::EndIteration => self.end_iteration()?,
            Event::Advance(span) => self.advance(*span)?,
            Event::AdvanceUntilDue => {
                self.run_until_idle()?;
                let due = self.server.next_due().map(Nanos::as_nanos);
                if let Some(due) = due.filter(|&due| due < END_OF_TIME) {
                    self.now = self.now.max(due.next_multiple_of(TICK));
                }
            }
            Event::Suspend(span) => {
                self.run_until_idle()?;
                self.now = (self.now + span).next_multiple_of(TICK);
            }
            Event::ClockOffset(offset) => {
                self.end_iteration()?;
                self.clock_offset = *offset;
                self.journal.set_clock_offset(*offset);
            }
            Event::Drain(is_draining) => {
                self.begin_iteration()?;
                self.server.set_draining(*is_draining);
                self.model.is_draining = *is_draining;
            }
            Event::DiskCapacity(bytes) => {
                self.end_iteration()?;
                self.set_capacity(*bytes);
            }
            Event::FailDiskAfter(changes, crash) => {
                let is_local = self.setup.binlog.is_some_and(|binlog| binlog.remote.is_none());
                if is_local && self.crash_to_come.is_none() {
                    self.disk.fail_after(*changes);
                    self.crash_to_come = Some(*crash);
                    self.had_disk_faults = true;
                    self.model.may_refuse_updates = true;
                    self.model.may_refuse_deletes = true;
                }
            }
            Event::Acknowledge(changes) => {
                self.disk.acknowledge(*changes);
                // The disk wakes the loop.
                self.begin_iteration()?;
            }
            Event::LoseLeadership(seed) => self.disk.refuse(*seed),
            Event::Crash(crash) => self.crash(*crash)?,
            Event::Restart => self.restart()?,
        }
        self.server.check();
        Ok(())
    }

    fn connect(&mut self, client: ClientNumber) -> Result<(), Failure> {
        if self.sockets.contains_key(&client) {
            return Ok(());
        }
        self.begin_iteration()?;
        let key = self.server.connect().expect("the test has memory");
        let socket = Socket {
            key,
            inbound: Vec::new(),
            is_half_closed: false,
            is_end_read: false,
            read_limit: None,
            output: Vec::new(),
            is_output_cut: false,
            held: HeldReplies::default(),
            is_served: false,
            commands: 0,
            has_progress: false,
            iterations_left_out: 0,
        };
        self.sockets.insert(client, socket);
        self.numbers.insert(key, client);
        self.model.connect(client);
        self.compare()
    }

    fn send(&mut self, client: ClientNumber, bytes: &[u8]) -> Result<(), Failure> {
        let socket = self.sockets.get_mut(&client).filter(|socket| !socket.is_half_closed);
        let Some(socket) = socket else { return Ok(()) };
        socket.inbound.extend_from_slice(bytes);
        self.begin_iteration()?;
        self.serve(client)
    }

    fn half_close(&mut self, client: ClientNumber, is_reported: bool) -> Result<(), Failure> {
        let socket = self.sockets.get_mut(&client).filter(|socket| !socket.is_half_closed);
        let Some(socket) = socket else { return Ok(()) };
        socket.is_half_closed = true;
        let key = socket.key;
        self.begin_iteration()?;
        if is_reported {
            self.server.half_close(key);
            self.model.half_close(client);
            self.compare()?;
        }
        self.serve(client)
    }

    fn break_connection(&mut self, client: ClientNumber) -> Result<(), Failure> {
        if self.sockets.contains_key(&client) {
            self.begin_iteration()?;
            self.disconnect(client)?;
        }
        Ok(())
    }

    fn set_read_limit(
        &mut self,
        client: ClientNumber,
        limit: Option<usize>,
    ) -> Result<(), Failure> {
        let Some(socket) = self.sockets.get_mut(&client) else { return Ok(()) };
        socket.read_limit = limit;
        self.begin_iteration()?;
        self.serve(client)
    }

    fn set_capacity(&mut self, bytes: Option<u64>) {
        self.had_disk_faults = true;
        self.capacity = bytes;
        self.disk.set_capacity(bytes);
        // A command that finds a failed disk may be refused: the commit fails then, and no client
        // gets the reply.
        let may_refuse = bytes.is_some() || self.crash_to_come.is_some();
        self.model.may_refuse_updates = may_refuse || self.limit.is_some();
        self.model.may_refuse_deletes &= may_refuse;
    }

    // ---- One iteration ----

    fn begin_iteration(&mut self) -> Result<(), Failure> {
        if std::mem::replace(&mut self.has_iteration_begun, true) {
            return Ok(());
        }
        if self.setup.binlog.is_some() {
            let wall_clock = self.now.saturating_add_signed(self.clock_offset);
            self.server.set_clock_offset(ClockOffset::between(nanos(self.now), nanos(wall_clock)));
        }
        self.is_congested = self.server.is_congested();
        if self.is_congested {
            self.congested_at = self.now;
        }
        self.server.begin_iteration(self.ready.len());
        bury_log::take();
        self.server.tick(nanos(self.now));
        self.follow_tick()?;
        self.server.share_budget(self.setup.sharers);
        for client in std::mem::take(&mut self.ready) {
            self.serve(client)?;
        }
        Ok(())
    }

    /// Serves a client as the event loop does, at most once in an iteration: runs commands that it
    /// sent earlier, then reads once.
    fn serve(&mut self, client: ClientNumber) -> Result<(), Failure> {
        let Some(socket) = self.sockets.get_mut(&client) else { return Ok(()) };
        if socket.is_served || !self.server.has_budget() {
            self.queue(client);
            return Ok(());
        }
        socket.is_served = true;
        let key = socket.key;
        let mut actions = self.server.mark_dirty(key);
        if actions.run {
            self.server.resume(key, nanos(self.now));
            self.follow(client)?;
            actions = self.server.actions(key);
        }
        if actions.read { self.read(client) } else { Ok(()) }
    }

    fn queue(&mut self, client: ClientNumber) {
        if !self.ready.contains(&client) {
            self.ready.push(client);
        }
    }

    fn read(&mut self, client: ClientNumber) -> Result<(), Failure> {
        let socket = self.sockets.get_mut(&client).expect("the client is served");
        let key = socket.key;
        let now = nanos(self.now);
        if socket.inbound.is_empty() {
            if socket.is_half_closed && !socket.is_end_read {
                socket.is_end_read = true;
                self.server.end_input(key);
                self.model.end_input(client);
                return self.compare();
            }
            return Ok(());
        }
        let mut count = socket.inbound.len().min(READ_LEN);
        // The event loop reads large bodies to their place; here it does so for every other client.
        let is_read_in_place = client % 2 == 1;
        if is_read_in_place && let Some(space) = self.server.body_space(key, READ_LEN) {
            count = count.min(space.len());
            space[..count].copy_from_slice(&socket.inbound[..count]);
            self.server.receive_body(key, count, now);
        } else {
            self.server.receive(key, &socket.inbound[..count], now);
        }
        socket.has_progress = true;
        let bytes: Vec<u8> = socket.inbound.drain(..count).collect();
        self.model.receive(client, &bytes);
        self.follow(client)
    }

    fn disconnect(&mut self, client: ClientNumber) -> Result<(), Failure> {
        let socket = self.sockets.remove(&client).expect("the client is connected");
        self.numbers.remove(&socket.key);
        self.server.disconnect(socket.key, nanos(self.now));
        self.model.disconnect(client, self.now);
        self.compare()
    }

    /// Commits and flushes.
    fn end_iteration(&mut self) -> Result<(), Failure> {
        self.begin_iteration()?;
        let mut committed = self.server.commit(nanos(self.now));
        // The background sync ends now; the next commit returns its error. If a disk fault is planned, commit
        // again, so that the error belongs to this iteration.
        self.disk.end_sync();
        if committed.is_ok() && self.crash_to_come.is_some() {
            committed = self.server.commit(nanos(self.now));
        }
        if let Err(failure) = committed {
            let crash = self.crash_to_come.take();
            return self
                .crash(crash.ok_or_else(|| format!("commit without a disk fault: {failure}"))?);
        }
        self.compare()?;
        let is_limited = self.capacity.is_some() || self.limit.is_some();
        if std::mem::take(&mut self.model.refusals) > 0 && !is_limited {
            return Err("OUT_OF_MEMORY, but the disk has no limit and works".to_owned());
        }
        self.note_commit()?;
        let finished = self.flush()?;
        self.has_iteration_begun = false;
        self.check_clients()?;
        for client in finished {
            self.disconnect(client)?;
        }
        Ok(())
    }

    fn note_commit(&mut self) -> Result<(), Failure> {
        if !self.disk.has_all() {
            return Err("changes are not handed over in the commit".to_owned());
        }
        self.commits.push(self.disk.progress().written);
        self.hold_replies();
        let worst_end = self.end(Some(0));
        self.journal.commit(self.now, worst_end);
        Ok(())
    }

    /// Notes which replies wait for the changes until now.
    fn hold_replies(&mut self) {
        let progress = self.disk.progress();
        for socket in self.sockets.values_mut() {
            let (output, _) = self.server.unsent(socket.key);
            socket.held.commit(output.len(), progress);
        }
    }

    /// Returns how the process ends with a crash now. A `power_cut` leaves on the disk what must be
    /// there.
    fn end(&self, power_cut: Option<u64>) -> End {
        let is_remote = self.setup.binlog.is_some_and(|binlog| binlog.remote.is_some());
        let is_lossless = power_cut.is_none() && !self.disk.is_refused();
        if is_remote {
            let acknowledged = self.disk.progress().acknowledged;
            let last = if is_lossless { self.disk.last_handed_over() } else { acknowledged };
            let commits = self.commits.partition_point(|&change| change <= last);
            return End::Unacknowledged { commits: commits as u64 };
        }
        if is_lossless {
            return End::Killed;
        }
        End::PowerCut { synced_within: self.setup.binlog.and_then(|binlog| binlog.sync_within) }
    }

    /// Sends replies as the event loop does. Returns the clients to disconnect.
    fn flush(&mut self) -> Result<Vec<ClientNumber>, Failure> {
        let mut finished = Vec::new();
        let progress = self.disk.progress();
        for client in std::mem::take(&mut self.to_flush) {
            let Some(socket) = self.sockets.get_mut(&client) else { continue };
            let mut slices = [IoSlice::new(&[]); SLICES_PER_WRITE];
            let mut output = self.server.output_handle(socket.key);
            let filled = output.next_slices(&mut slices);
            let mut sent = Vec::new();
            slices[..filled].iter().for_each(|slice| sent.extend_from_slice(slice));
            let allowed = socket.held.allowed(progress);
            if sent.len() > allowed {
                return Err(format!(
                    "client {client}: {} bytes are sent, of which {allowed} are acknowledged",
                    sent.len()
                ));
            }
            sent.truncate(socket.read_limit.unwrap_or(usize::MAX));
            if !socket.output.starts_with(&sent) {
                return Err(difference(client, &socket.output, &sent));
            }
            if !sent.is_empty() {
                output.sent(sent.len());
                socket.held.sent(sent.len());
            }
            socket.read_limit = socket.read_limit.map(|limit| limit - sent.len());
            let actions = output.actions();
            let has_more =
                !socket.inbound.is_empty() || socket.is_half_closed && !socket.is_end_read;
            let can_write = actions.write && socket.read_limit != Some(0);
            socket.output.drain(..sent.len());
            let known = self.model.clients.get_mut(&client).expect("the model has each client");
            known.output.drain(..sent.len());
            if actions.close {
                finished.push(client);
            } else if can_write || actions.run || (actions.read && has_more) {
                self.queue(client);
            }
            if let Some(all) = &mut self.sent {
                all.push((client, sent));
            }
        }
        if self.server.is_congested() {
            self.mark_writable();
        }
        Ok(finished)
    }

    /// Makes the next iteration flush clients that are not served while the disk is congested.
    fn mark_writable(&mut self) {
        for client in &self.ready {
            let Some(socket) = self.sockets.get(client) else { continue };
            if self.server.actions(socket.key).write && socket.read_limit != Some(0) {
                self.server.mark_dirty(socket.key);
            }
        }
        self.take_replies();
    }

    // ---- Time ----

    /// Runs iterations as long as there is something to do at once.
    fn run_until_idle(&mut self) -> Result<(), Failure> {
        for _ in 0..MAX_ITERATIONS_UNTIL_IDLE {
            self.end_iteration()?;
            self.server.check();
            let is_due = self.server.next_due().is_some_and(|due| due.as_nanos() <= self.now);
            if !self.is_busy() && !is_due {
                self.check_idle()?;
                return self.check_disk_use();
            }
        }
        Err(format!("the server does not become idle: next due {:?}", self.server.next_due()))
    }

    fn advance(&mut self, span: u64) -> Result<(), Failure> {
        let end = (self.now + span).next_multiple_of(TICK);
        let starts = self.starts;
        for _ in 0..MAX_ITERATIONS_UNTIL_IDLE {
            self.run_until_idle()?;
            let due = self.server.next_due().map(|due| due.as_nanos().next_multiple_of(TICK));
            if self.starts != starts {
                return Ok(());
            }
            match due.filter(|&due| due < end) {
                Some(due) => self.now = self.now.max(due),
                None => {
                    self.now = self.now.max(end);
                    return Ok(());
                }
            }
        }
        Err(format!("timers are due again and again: {}", self.disk.names()))
    }
}

fn server(setup: &Setup, limit: Option<u64>, now: u64) -> Server {
    let settings = Settings {
        max_job_size: setup.max_job_size,
        max_binlog_bytes: limit.unwrap_or(u64::MAX),
        binlog_file_size: setup.binlog.map_or(0, |binlog| binlog.file_size),
        body_cache_bytes: setup.binlog.and_then(|binlog| binlog.body_cache),
        bury_after: setup.bury_after.and_then(|limit| NonZero::new(u16::try_from(limit).ok()?)),
        ..Settings::DEFAULT
    };
    Server::new(settings, fixtures::facts(nanos(now)), nanos(now))
}

fn has_threads(setup: &Setup) -> bool {
    setup.binlog.is_some_and(|binlog| binlog.has_threads)
}

fn syncing(setup: &Setup) -> Syncing {
    match setup.binlog.and_then(|BinlogSetup { sync_within, .. }| sync_within) {
        None => Syncing::Never,
        Some(0) => Syncing::EachIteration,
        Some(span) => Syncing::Within(nanos(span)),
    }
}

fn nanos(nanos: u64) -> Nanos {
    Nanos::from_nanos(nanos)
}
