//! Drives the engine and the model through one history. Clients, time and the disk are simulated.
//!
//! Each event calls the engine as the event loop would. The model learns the order of commands from
//! the engine: after each call the driver takes the new replies, and lets the model run one command
//! of that client for each of them. A reply that the model does not give is a failure.
//!
//! How many commands the engine runs in an iteration is its own choice; `bounds.rs` checks that it
//! is fair. `follow.rs` has the comparison with the model, and `restart.rs` crashes and restarts.
//!
//! The disk is local or remote. On a remote one the model still runs each command when
//! the engine does, from the output that the engine holds back. `held.rs` determines how much of it
//! may be sent.
//!
//! The engine divides long commands into steps. A seed may draw small limits, so that short commands
//! take many steps too. The model does as much of such a command as the facts show.

use super::event::{Crash, Event, Setup};
use super::journal::{End, Journal};
use super::model::{ClientNumber, Model};
use crate::harness::driver::{self, Client, Driver, Limits, Nanos, Sent, Settings, Syncing, Visit};
use crate::harness::fake_disk::{FakeDisk, Files, ReadFault, to_usize};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::num::NonZero;

mod bounds;
mod follow;
mod held;
mod restart;

pub use follow::Orders;
use follow::difference;
use held::HeldReplies;

/// Describes a difference between what came and what was expected.
pub type Failure = String;

pub struct Simulation {
    setup: Setup,
    pub driver: Driver,
    pub disk: FakeDisk,
    pub model: Model,
    journal: Journal,
    /// How far the wall clock is ahead of the monotonic clock.
    clock_offset: i64,
    /// Since the start.
    commits: Vec<Commit>,
    sockets: BTreeMap<ClientNumber, Socket>,
    numbers: BTreeMap<Client, ClientNumber>,
    /// The disk was congested when the iteration began.
    is_congested: bool,
    /// The time of the last iteration that began with a congested disk.
    congested_at: u64,
    /// The time of the last event that ended reads of bodies, and of the last iteration whose reads might fail.
    read_at: u64,
    /// A background sync has failed: the server must not acknowledge anything more.
    has_failed_sync: bool,
    /// The crash that follows when the disk fails.
    crash_to_come: Option<Crash>,
    /// The server was started on damaged files, and deletes may exceed the limit of the binlog.
    may_exceed_limit: bool,
    /// The disk was limited, failed or damaged: the bound of its use does not hold.
    had_disk_faults: bool,
    /// Reads of bodies have failed: the server may wait until it tries one again.
    had_read_faults: bool,
    /// The number of iterations since the oldest flush became the oldest one.
    iterations_of_flush: usize,
    /// The orders of what is due at once.
    pub orders: Orders,
    /// How often the server was started.
    pub starts: u64,
    /// What each client has read, if the caller asks for it.
    sent: Option<Vec<(ClientNumber, Vec<u8>)>>,
    /// A crash at each step of the disk is judged.
    pub judges_steps: bool,
}

struct Commit {
    at: u64,
    /// The last change on the disk at its end.
    change: u64,
}

/// What is known of a connection.
#[derive(Default)]
struct Socket {
    client: Client,
    held: HeldReplies,
    /// The number of unsent bytes that are known to be those of the model.
    compared: usize,
    is_half_closed: bool,
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
/// The engine is woken at most this often in one event: while the disk reads a body, compaction looks each
/// millisecond whether it has come.
const MAX_WAKES: usize = 40_000;

impl Simulation {
    pub fn new(setup: Setup) -> Result<Simulation, Failure> {
        let now = START.next_multiple_of(TICK);
        let disk =
            setup.remote().map(|setup| FakeDisk::remote(&Files::new(), setup)).unwrap_or_default();
        disk.faults().syncs_in_background = setup.has_threads;
        let options = options(&setup);
        let disk_of_server = setup.has_binlog().then(|| disk.boxed());
        let driver = Driver::start(options, disk_of_server, nanos(now));
        let driver = driver.map_err(|error| format!("cannot use an empty directory: {error}"))?;
        let mut model = Model::new(options, setup.has_binlog(), now);
        model.holds_replies = setup.chunk_len.is_some();
        model.may_refuse_updates = setup.limit.is_some();
        disk.hold_reads(setup.has_threads);
        Ok(Simulation {
            setup,
            driver,
            disk,
            model,
            journal: Journal::default(),
            clock_offset: 0,
            commits: Vec::new(),
            sockets: BTreeMap::new(),
            numbers: BTreeMap::new(),
            is_congested: false,
            congested_at: 0,
            read_at: 0,
            has_failed_sync: false,
            crash_to_come: None,
            may_exceed_limit: false,
            had_disk_faults: false,
            had_read_faults: false,
            iterations_of_flush: 0,
            orders: Orders::default(),
            starts: 1,
            sent: None,
            judges_steps: false,
        })
    }

    // ---- State, for the generator ----

    pub fn clients(&self) -> Vec<ClientNumber> {
        self.sockets.keys().copied().collect()
    }

    /// Returns what clients have read since the last call.
    pub fn take_sent(&mut self) -> Vec<(ClientNumber, Vec<u8>)> {
        self.sent.replace(Vec::new()).unwrap_or_default()
    }

    /// Returns a client that has read all that it was to read, and how many bytes the server has for it.
    #[allow(dead_code, reason = "the world of conversations uses it")]
    pub fn blocked_client(&self) -> Option<(ClientNumber, usize)> {
        let mut blocked =
            self.sockets.iter().filter(|(_, socket)| self.driver.room(socket.client) == Some(0));
        blocked.next().map(|(&number, socket)| (number, self.driver.made(socket.client).len()))
    }

    pub fn unread(&self, client: ClientNumber) -> usize {
        self.sockets.get(&client).map_or(0, |socket| self.driver.unread(socket.client))
    }

    pub fn can_send(&self, client: ClientNumber) -> bool {
        self.sockets.get(&client).is_some_and(|socket| !socket.is_half_closed)
    }

    fn now(&self) -> u64 {
        self.driver.now.as_nanos()
    }

    fn set_now(&mut self, now: u64) {
        self.driver.now = nanos(now);
    }

    fn made(&self, client: ClientNumber) -> &[u8] {
        self.driver.made(self.sockets[&client].client)
    }

    /// Returns the replies that the engine has made and the model does not know.
    fn unknown(&self, client: ClientNumber) -> &[u8] {
        self.made(client).get(self.model.clients[&client].output.len()..).unwrap_or_default()
    }

    fn has_capacity(&self) -> bool {
        self.disk.faults().capacity.is_some()
    }

    fn may_lack_space(&self) -> bool {
        self.has_capacity() || self.setup.limit.is_some()
    }

    // ---- Events ----

    /// Applies one event to the engine and to the model, and compares them. After a failed write the engine
    /// may make other replies, for instance because a body cannot be read back: no client gets them, because
    /// the commit fails too.
    pub fn apply(&mut self, event: &Event) -> Result<(), Failure> {
        let applied = self.apply_one(event);
        match (applied, self.crash_to_come) {
            (Err(_), Some(crash)) if self.disk.has_failed() && self.driver.commit().is_err() => {
                self.crash(crash)
            }
            (applied, _) => applied,
        }
    }

    fn apply_one(&mut self, event: &Event) -> Result<(), Failure> {
        match event {
            Event::Connect(client) => self.connect(*client)?,
            Event::Send(client, bytes) => {
                if let Some(socket) = self.sockets.get(client).filter(|it| !it.is_half_closed) {
                    self.driver.receive(socket.client, bytes);
                    self.visit_all()?;
                }
            }
            Event::HalfClose(client, is_reported) => self.half_close(*client, *is_reported)?,
            Event::Disconnect(client) => self.hang_up(*client)?,
            Event::ReadLimit(client, limit) => {
                if let Some(socket) = self.sockets.get(client) {
                    self.driver.set_room(socket.client, *limit);
                    self.visit_all()?;
                }
            }
            Event::EndIteration => self.end_iteration()?,
            Event::Advance(span) => return self.advance(*span),
            Event::AdvanceUntilDue => {
                self.run_until_idle()?;
                let due = self.driver.next_due().map(Nanos::as_nanos);
                if let Some(due) = due.filter(|&due| due < END_OF_TIME) {
                    self.set_now(self.now().max(due.next_multiple_of(TICK)));
                }
            }
            Event::Suspend(span) => {
                self.run_until_idle()?;
                self.set_now((self.now() + span).next_multiple_of(TICK));
            }
            Event::ClockOffset(offset) => {
                self.end_iteration()?;
                self.clock_offset = *offset;
                self.journal.set_clock_offset(*offset);
            }
            Event::Drain(is_draining) => {
                self.begin_iteration()?;
                self.driver.set_draining(*is_draining);
                self.model.is_draining = *is_draining;
            }
            Event::DiskCapacity(bytes) => {
                self.end_iteration()?;
                self.set_capacity(*bytes);
            }
            Event::FailDiskAfter(changes, crash) => self.fail_disk_after(*changes, *crash),
            Event::FailSyncsAfter(syncs, crash) => self.fail_syncs_after(*syncs, *crash),
            Event::FailReads(count) => self.fail_reads(*count),
            Event::Acknowledge(changes) => {
                self.disk.acknowledge(*changes);
                // The disk wakes the loop.
                self.begin_iteration()?;
            }
            Event::EndReads(count) => {
                self.read_at = self.now();
                self.disk.faults().reads_left = Some(*count);
                // The disk wakes the loop.
                self.begin_iteration()?;
            }
            Event::EndSync => self.end_sync()?,
            Event::LoseLeadership(seed) => {
                self.disk.refuse(&mut fastrand::Rng::with_seed(*seed));
            }
            Event::Crash(crash) => self.crash(*crash)?,
            Event::Restart => self.restart()?,
        }
        self.driver.check();
        Ok(())
    }

    fn connect(&mut self, number: ClientNumber) -> Result<(), Failure> {
        if self.sockets.contains_key(&number) {
            return Ok(());
        }
        self.begin_iteration()?;
        let client = self.driver.connect();
        self.sockets.insert(number, Socket { client, ..Socket::default() });
        self.numbers.insert(client, number);
        self.model.connect(number, self.driver.id(client), self.now());
        self.compare()
    }

    fn half_close(&mut self, number: ClientNumber, is_reported: bool) -> Result<(), Failure> {
        let socket = self.sockets.get_mut(&number).filter(|socket| !socket.is_half_closed);
        let Some(socket) = socket else { return Ok(()) };
        socket.is_half_closed = true;
        let end = if is_reported { driver::End::HalfClose } else { driver::End::SilentHalfClose };
        self.driver.end(socket.client, end);
        self.visit_all()
    }

    fn hang_up(&mut self, number: ClientNumber) -> Result<(), Failure> {
        if self.sockets.contains_key(&number) {
            // The server may close it now.
            self.begin_iteration()?;
        }
        if let Some(client) = self.sockets.get(&number).map(|socket| socket.client) {
            self.driver.end(client, driver::End::HangUp);
            self.forget(number);
            self.compare()?;
        }
        Ok(())
    }

    fn forget(&mut self, number: ClientNumber) {
        let socket = self.sockets.remove(&number).expect("the client is connected");
        self.numbers.remove(&socket.client);
        let closing = self.model.closing.len();
        self.model.begin_close(number);
        self.follow_closes();
        // The rest of it, if there is any, waits behind the others.
        if self.model.closing.len() > closing {
            self.model.closing.rotate_left(1);
        }
    }

    fn fail_disk_after(&mut self, changes: u64, crash: Crash) {
        if self.may_fail_disk() {
            self.disk.faults().fail_from =
                Some((self.disk.counts().changes + 1 + changes, ErrorKind::Other));
            self.crash_to_come = Some(crash);
            self.had_disk_faults = true;
            self.model.may_refuse_updates = true;
            self.model.may_refuse_deletes = true;
        }
    }

    fn fail_syncs_after(&mut self, syncs: u64, crash: Crash) {
        if self.may_fail_disk() {
            self.disk.faults().syncs_left = Some(syncs);
            self.crash_to_come = Some(crash);
            self.model.may_refuse_updates = true;
            self.model.may_refuse_deletes = true;
        }
    }

    /// Only with threads a reply may wait for its bodies.
    fn fail_reads(&mut self, count: usize) {
        if self.setup.has_threads {
            let faults = std::iter::repeat_n(ReadFault::TooManyFiles, count);
            self.disk.faults().of_reads.extend(faults);
            self.had_read_faults = true;
        }
    }

    fn may_fail_disk(&self) -> bool {
        let is_local = self.setup.has_binlog() && self.setup.chunk_len.is_none();
        is_local && self.crash_to_come.is_none()
    }

    fn set_capacity(&mut self, bytes: Option<u64>) {
        self.had_disk_faults = true;
        self.disk.faults().capacity = bytes;
        // A command that finds a failed disk may be refused: the commit fails then, and no client
        // gets the reply.
        let may_refuse = bytes.is_some() || self.crash_to_come.is_some();
        self.model.may_refuse_updates = may_refuse || self.setup.limit.is_some();
        self.model.may_refuse_deletes &= may_refuse;
    }

    // ---- One iteration ----

    fn begin_iteration(&mut self) -> Result<(), Failure> {
        if self.driver.is_iteration_open() {
            return Ok(());
        }
        if self.setup.has_binlog() {
            let wall_clock = self.now().saturating_add_signed(self.clock_offset);
            self.driver.set_wall_clock(nanos(wall_clock));
        }
        self.is_congested = self.driver.is_congested();
        if self.is_congested {
            self.congested_at = self.now();
        }
        if !self.disk.faults().of_reads.is_empty() {
            self.read_at = self.now();
        }
        // With a body cache the server looks in each iteration at what is due.
        let has_due = self.driver.next_due().is_some_and(|due| due <= self.driver.now);
        let has_tick = has_due || self.setup.body_cache.is_some();
        self.driver.begin();
        self.follow_tick(has_tick)?;
        self.visit_all()
    }

    /// Lets the server visit all clients that are ready, within its budget.
    fn visit_all(&mut self) -> Result<(), Failure> {
        self.begin_iteration()?;
        while let Some(visit) = self.driver.visit() {
            self.follow_visit(&visit)?;
        }
        Ok(())
    }

    fn follow_visit(&mut self, visit: &Visit) -> Result<(), Failure> {
        let number = self.numbers[&visit.client];
        if visit.is_half_close_reported {
            self.model.half_close(number);
        }
        if !visit.read.is_empty() {
            self.model.receive(number, &visit.read);
            self.socket(number).has_progress = true;
        }
        self.socket(number).has_progress |= self.driver.is_in_steps(visit.client);
        self.follow(number, visit.is_end_read)?;
        if visit.is_end_read {
            self.model.end_input(number);
        }
        if visit.is_closed {
            self.check_close(number)?;
            self.forget(number);
        }
        self.compare()
    }

    fn socket(&mut self, number: ClientNumber) -> &mut Socket {
        self.sockets.get_mut(&number).expect("the client is connected")
    }

    /// Commits, and sends replies.
    fn end_iteration(&mut self) -> Result<(), Failure> {
        self.begin_iteration()?;
        // A command may have congested the disk, so that the clients behind it wait.
        let was_congested = self.is_congested || self.driver.is_congested();
        if let Err(failure) = self.driver.commit() {
            let crash = self.crash_to_come.take();
            return self
                .crash(crash.ok_or_else(|| format!("commit without a disk fault: {failure}"))?);
        }
        if self.has_failed_sync {
            return Err("a background sync has failed, and the commit after it succeeds".to_owned());
        }
        self.compare()?;
        if std::mem::take(&mut self.model.refusals) > 0 && !self.may_lack_space() {
            return Err("OUT_OF_MEMORY, but the disk has no limit and works".to_owned());
        }
        self.judge_each_step()?;
        self.note_commit()?;
        let sent = self.driver.send();
        self.follow_sent(&sent)?;
        self.check_clients(was_congested)
    }

    fn note_commit(&mut self) -> Result<(), Failure> {
        if !self.disk.has_all() {
            return Err("changes are not handed over in the commit".to_owned());
        }
        self.commits.push(Commit { at: self.now(), change: self.disk.progress().made });
        self.check_syncs()?;
        self.hold_replies();
        let worst_end = self.end(&self.disk, Some(0));
        self.journal.commit(self.now(), worst_end);
        Ok(())
    }

    /// Checks that no record stays without a sync for longer than `-f` allows. Until a sync has ended, no other
    /// one can begin.
    fn check_syncs(&self) -> Result<(), Failure> {
        // The deletes of flushed jobs, which the record of the flush has deleted, make no sync due.
        let is_exempt =
            self.disk.is_syncing() || self.had_disk_faults || self.model.last_flush_at > 0;
        let (Some(span), Some(first)) = (self.setup.sync_within, self.disk.first_unsynced_record())
        else {
            return Ok(());
        };
        let commit = self.commits.iter().find(|commit| commit.change >= first);
        let since = commit.expect("each record is in a commit").at;
        if since + span < self.now() && !is_exempt {
            return Err(format!("records wait for a sync since {since}"));
        }
        Ok(())
    }

    /// The disk ends the background sync.
    fn end_sync(&mut self) -> Result<(), Failure> {
        self.has_failed_sync |= !self.disk.let_sync_end();
        self.judge_each_step()
    }

    /// Notes which replies wait for the changes until now.
    fn hold_replies(&mut self) {
        let progress = self.disk.progress();
        for socket in self.sockets.values_mut() {
            socket.held.commit(self.driver.made(socket.client).len(), progress);
        }
    }

    /// Returns how the process ends with a crash when the disk is so. A `power_cut` leaves on the disk what must
    /// be there.
    fn end(&self, disk: &FakeDisk, power_cut: Option<u64>) -> End {
        let commits_until = |last| End::Unacknowledged {
            commits: self.commits.partition_point(|commit| commit.change <= last) as u64,
        };
        let is_lossless = power_cut.is_none() && !disk.is_refused();
        match (self.setup.chunk_len, self.setup.sync_within) {
            (Some(_), _) if is_lossless => commits_until(disk.last_handed_over()),
            (Some(_), _) => commits_until(disk.progress().stored),
            (None, _) if is_lossless => End::Killed,
            (None, Some(1..)) if self.setup.has_threads => commits_until(disk.synced()),
            (None, synced_within) => End::PowerCut { synced_within },
        }
    }

    /// Checks what the server has sent and closed, and lets the model close the same connections.
    fn follow_sent(&mut self, sent: &Sent) -> Result<(), Failure> {
        let progress = self.disk.progress();
        for (client, bytes) in &sent.replies {
            let number = self.numbers[client];
            // Nothing takes it later.
            self.driver.take(*client);
            let socket = self.socket(number);
            let allowed = socket.held.allowed(progress);
            if bytes.len() > allowed {
                let len = bytes.len();
                return Err(format!("client {number}: {len} bytes are sent, {allowed} may be"));
            }
            if !bytes.is_empty() {
                socket.held.sent(bytes.len());
            }
            socket.compared = socket.compared.saturating_sub(bytes.len());
            let known = self.model.clients.get_mut(&number).expect("the model has each client");
            if !known.output.starts_with(bytes) {
                return Err(difference(number, &known.output, bytes));
            }
            known.output.drain(..bytes.len());
            if let Some(all) = &mut self.sent {
                all.push((number, bytes.clone()));
            }
        }
        let Simulation { model, driver, sockets, .. } = self;
        let client_of = |number| sockets[&number].client;
        let deadline = |number, id| driver.deadline(client_of(number), id).map(Nanos::as_nanos);
        let is_sent = |number| driver.made(client_of(number)).is_empty();
        model.begin_ttrs(deadline, is_sent, driver.now.as_nanos())?;
        for client in &sent.closed {
            // It was closed in its visit.
            let Some(&number) = self.numbers.get(client) else { continue };
            self.check_close(number)?;
            self.forget(number);
        }
        self.compare()
    }

    // ---- Time ----

    /// Runs iterations as long as there is something to do at once.
    fn run_until_idle(&mut self) -> Result<(), Failure> {
        for _ in 0..MAX_ITERATIONS_UNTIL_IDLE {
            self.end_iteration()?;
            self.driver.check();
            let is_due = self.driver.next_due().is_some_and(|due| due <= self.driver.now);
            if !self.driver.is_busy() && !is_due {
                self.check_idle()?;
                return self.check_disk_use();
            }
        }
        Err(format!("the server does not become idle: next due {:?}", self.driver.next_due()))
    }

    fn advance(&mut self, span: u64) -> Result<(), Failure> {
        let end = (self.now() + span).next_multiple_of(TICK);
        let starts = self.starts;
        for _ in 0..MAX_WAKES {
            self.run_until_idle()?;
            let due = self.driver.next_due().map(|due| due.as_nanos().next_multiple_of(TICK));
            if self.starts != starts {
                return Ok(());
            }
            let due = due.filter(|&due| due < end);
            self.set_now(self.now().max(due.unwrap_or(end)));
            if due.is_none() {
                return Ok(());
            }
        }
        Err(format!("timers are due again and again: {}", self.disk.names()))
    }
}

fn options(setup: &Setup) -> driver::Options {
    let settings = Settings {
        max_job_size: setup.max_job_size,
        max_binlog_bytes: setup.limit.unwrap_or(u64::MAX),
        binlog_file_size: setup.file_size.map_or(0, |len| u32::try_from(len).expect("it is small")),
        body_cache_bytes: setup.body_cache,
        bury_after: setup.bury_after.and_then(|limit| NonZero::new(u16::try_from(limit).ok()?)),
        ..Settings::DEFAULT
    };
    let syncing = match setup.sync_within {
        // No connection is given up.
        None if setup.chunk_len.is_some() => Syncing::Remote(Nanos::NEVER),
        None => Syncing::Never,
        Some(0) => Syncing::EachIteration,
        Some(span) => Syncing::Within(nanos(span)),
    };
    // Only with threads a body of any length is read in the background, and replies wait for theirs. What is due
    // after a long time is done at once, unless the setup has a small limit.
    let least_due_work = setup.limits.most_due_work;
    let congested_bytes = setup.congested_above.map_or(usize::MAX, to_usize);
    let read_at_once_bytes = usize::MAX;
    let cached_bodies_work = Limits::DEFAULT.cached_bodies_work << 10;
    let limits = Limits {
        read_at_once_bytes,
        cached_bodies_work,
        least_due_work,
        congested_bytes,
        ..setup.limits
    };
    driver::Options { settings, syncing, limits, ..driver::Options::DEFAULT }
}

fn nanos(nanos: u64) -> Nanos {
    Nanos::from_nanos(nanos)
}
