//! A server in a world that is all made up: clients, time and disk. Each event of a history happens
//! here to the engine as the event loop would have it happen, and turn by turn to the model; what
//! the two say and want must be the same, and `check` must hold at each step.

use super::event::{BinlogSetup, Crash, Event, Setup};
use super::journal::{End, Found, Journal, Verdict, View};
use super::model::{Actions, ClientNumber, Counts, Job, Model, Rules};
use crate::fake_disk::FakeDisk;
use crate::made_up;
use crate::support::field;
use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Syncing;
use beanstalkd::testing::{ClockOffset, Nanos};
use beanstalkd::testing::{Recovered, ReplayError};
use beanstalkd::testing::{Server, Settings};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, IoSlice};
use std::rc::Rc;

/// What is not as it must be.
pub type Wrong = String;

pub struct World {
    setup: Setup,
    server: Server,
    disk: FakeDisk,
    model: Model,
    /// The time that never jumps.
    now: u64,
    /// How far the time of day is ahead of it.
    drift: i64,
    capacity: Option<u64>,
    sockets: BTreeMap<ClientNumber, Socket>,
    numbers: BTreeMap<ConnKey, ClientNumber>,
    /// Clients to be served when the next turn begins.
    ready: Vec<ClientNumber>,
    has_turn_begun: bool,
    /// What has happened to the engine in this turn, when, and not yet to the model.
    calls: Vec<(u64, Call)>,
    /// How the process ends when the disk fails.
    crash_to_come: Option<Crash>,
    /// The disk was limited, failed or damaged: how much the files take cannot be told.
    is_disk_use_open: bool,
    pub lives: u64,
    /// What was sent to whom since somebody last asked, if anybody does.
    sent: Option<Vec<(ClientNumber, Vec<u8>)>>,
}

/// The end of a connection that is the system's.
struct Socket {
    key: ConnKey,
    /// Sent, and not read by the server.
    inbound: Vec<u8>,
    /// Nothing more will come.
    is_half_closed: bool,
    /// The server knows that.
    has_ended: bool,
    /// How much more the client takes.
    takes: Option<usize>,
}

/// A call of the engine.
#[derive(Clone, Debug)]
enum Call {
    Tick,
    Connect(ClientNumber),
    Receive(ClientNumber, Vec<u8>),
    Resume(ClientNumber),
    HalfClose(ClientNumber),
    EndInput(ClientNumber),
    Disconnect(ClientNumber),
    Drain(bool),
}

/// Time passes in steps of the timer wheel, so that nothing is due between two of them.
const TICK: u64 = 1 << 16;
const START: u64 = 1_700_000_000_000_000_000;
/// After a century nothing far away is waited for: there must be room for what lies after it.
const END: u64 = START + 3_200_000_000_000_000_000;
/// How long it takes to start anew.
const DOWN_TIME: u64 = 2 * TICK;
/// No server wants more turns than that without anything happening.
const MOST_TURNS: usize = 2_000;
/// No more orders than that are tried of what is due at once.
const MOST_ORDERS: usize = 720;
const SLICES_PER_WRITE: usize = 16;
const SLICES: usize = 192;

impl World {
    pub fn new(setup: Setup) -> Result<World, Wrong> {
        let now = START.next_multiple_of(TICK);
        let disk = FakeDisk::default();
        let mut server = server(&setup, now);
        if setup.binlog.is_some() {
            let recovered = server.recover(disk.boxed(), syncing(&setup), nanos(now));
            recovered.map_err(|error| format!("an empty directory cannot be used: {error}"))?;
        }
        server.share_budget(setup.sharers);
        let rules = Rules {
            max_job_size: setup.max_job_size,
            binlog_file_size: setup.binlog.map_or(0, |binlog| binlog.file_size),
            has_binlog: setup.binlog.is_some(),
            sharers: setup.sharers,
            is_synced_each_turn: syncing(&setup) == Syncing::EachIteration,
        };
        Ok(World {
            setup,
            server,
            disk,
            model: Model::new(rules, now),
            now,
            drift: 0,
            capacity: None,
            sockets: BTreeMap::new(),
            numbers: BTreeMap::new(),
            ready: Vec::new(),
            has_turn_begun: false,
            calls: Vec::new(),
            crash_to_come: None,
            is_disk_use_open: false,
            lives: 1,
            sent: None,
        })
    }

    // ---- What can be seen ----

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn clients(&self) -> Vec<ClientNumber> {
        self.sockets.keys().copied().collect()
    }

    /// What was sent to whom since this was last asked.
    pub fn take_sent(&mut self) -> Vec<(ClientNumber, Vec<u8>)> {
        self.sent.replace(Vec::new()).unwrap_or_default()
    }

    /// How many bytes the files of the binlog take.
    pub fn disk_use(&self) -> u64 {
        self.disk.used()
    }

    /// Whether the server has something to do at once.
    pub fn is_busy(&self) -> bool {
        self.has_turn_begun || !self.ready.is_empty() || self.server.has_dirty()
    }

    /// How much a client has sent that the server has not read.
    pub fn unread(&self, client: ClientNumber) -> usize {
        self.sockets.get(&client).map_or(0, |socket| socket.inbound.len())
    }

    /// Whether a client can still send.
    pub fn can_send(&self, client: ClientNumber) -> bool {
        self.sockets.get(&client).is_some_and(|socket| !socket.is_half_closed)
    }

    // ---- Events ----

    /// Lets an event happen.
    pub fn apply(&mut self, event: &Event) -> Result<(), Wrong> {
        self.happen(event)?;
        self.server.check();
        Ok(())
    }

    fn happen(&mut self, event: &Event) -> Result<(), Wrong> {
        match event {
            Event::Connect(client) => self.connect(*client),
            Event::Send(client, bytes) => self.send(*client, bytes),
            Event::HalfClose(client, is_noticed) => self.half_close(*client, *is_noticed),
            Event::HangUp(client) => self.close_after_write(*client)?,
            Event::Take(client, limit) => self.take(*client, *limit),
            Event::Turn => self.turn()?,
            Event::Wait(span) => self.wait(*span)?,
            Event::WaitUntilDue => {
                self.come_to_rest()?;
                let due = self.server.next_due().map(Nanos::as_nanos);
                if let Some(due) = due.filter(|&due| due < END) {
                    self.now = self.now.max(due.next_multiple_of(TICK));
                }
            }
            Event::Sleep(span) => {
                self.come_to_rest()?;
                self.now = (self.now + span).next_multiple_of(TICK);
            }
            Event::ClockOffset(drift) => {
                self.turn()?;
                self.drift = *drift;
                self.model.journal.drifted(*drift);
            }
            Event::Drain(is_draining) => {
                self.begin_turn();
                self.server.set_draining(*is_draining);
                self.called(Call::Drain(*is_draining));
            }
            Event::Capacity(bytes) => {
                self.turn()?;
                self.set_capacity(*bytes);
            }
            Event::FailAfter(changes, crash) => {
                if self.setup.binlog.is_some() && self.crash_to_come.is_none() {
                    self.disk.fail_from(self.disk.changes() + 1 + changes, ErrorKind::Other);
                    self.crash_to_come = Some(*crash);
                    self.is_disk_use_open = true;
                }
            }
            Event::Crash(crash) => self.crash(*crash)?,
            Event::Restart => self.restart_in_good_order()?,
        }
        Ok(())
    }

    fn connect(&mut self, client: ClientNumber) {
        if self.sockets.contains_key(&client) {
            return;
        }
        self.begin_turn();
        let key = self.server.connect().expect("there is memory");
        let inbound = Vec::new();
        let socket = Socket { key, inbound, is_half_closed: false, has_ended: false, takes: None };
        self.sockets.insert(client, socket);
        self.numbers.insert(key, client);
        self.called(Call::Connect(client));
    }

    fn send(&mut self, client: ClientNumber, bytes: &[u8]) {
        let socket = self.sockets.get_mut(&client).filter(|socket| !socket.is_half_closed);
        if let Some(socket) = socket {
            socket.inbound.extend_from_slice(bytes);
            self.begin_turn();
            self.serve(client);
        }
    }

    fn half_close(&mut self, client: ClientNumber, is_noticed: bool) {
        let socket = self.sockets.get_mut(&client).filter(|socket| !socket.is_half_closed);
        let Some(socket) = socket else { return };
        socket.is_half_closed = true;
        let key = socket.key;
        self.begin_turn();
        if is_noticed {
            self.server.half_close(key);
            self.called(Call::HalfClose(client));
        }
        self.serve(client);
    }

    fn close_after_write(&mut self, client: ClientNumber) -> Result<(), Wrong> {
        if self.capacity.is_some() {
            // What it is refused must be heard.
            self.turn()?;
        }
        if self.sockets.contains_key(&client) {
            self.begin_turn();
            self.disconnect(client);
        }
        Ok(())
    }

    fn take(&mut self, client: ClientNumber, limit: Option<usize>) {
        if let Some(socket) = self.sockets.get_mut(&client) {
            socket.takes = limit;
            self.begin_turn();
            self.serve(client);
        }
    }

    fn set_capacity(&mut self, bytes: Option<u64>) {
        self.is_disk_use_open = true;
        self.capacity = bytes;
        self.disk.set_capacity(bytes);
        self.model.is_space_short = bytes.is_some();
        self.model.is_space_short_for_deletes &= bytes.is_some();
    }

    // ---- A turn of the loop ----

    fn begin_turn(&mut self) {
        if std::mem::replace(&mut self.has_turn_begun, true) {
            return;
        }
        if self.setup.binlog.is_some() {
            let time_of_day = self.now.saturating_add_signed(self.drift);
            self.server.set_clock_offset(ClockOffset::between(nanos(self.now), nanos(time_of_day)));
        }
        self.server.tick(nanos(self.now));
        self.called(Call::Tick);
        for client in std::mem::take(&mut self.ready) {
            self.serve(client);
        }
    }

    /// As the event loop serves a connection: what it held back first, then one read.
    fn serve(&mut self, client: ClientNumber) {
        let Some(socket) = self.sockets.get_mut(&client) else { return };
        let key = socket.key;
        let mut actions = self.server.mark_dirty(key);
        if actions.run {
            self.server.resume(key, nanos(self.now));
            actions = self.server.actions(key);
            self.called(Call::Resume(client));
        }
        let Some(socket) = self.sockets.get_mut(&client) else { return };
        if !actions.read {
            return;
        }
        if !socket.inbound.is_empty() {
            let bytes = std::mem::take(&mut socket.inbound);
            self.server.receive(key, &bytes, nanos(self.now));
            self.called(Call::Receive(client, bytes));
        } else if socket.is_half_closed && !socket.has_ended {
            socket.has_ended = true;
            self.server.end_input(key);
            self.called(Call::EndInput(client));
        }
    }

    fn disconnect(&mut self, client: ClientNumber) {
        let socket = self.sockets.remove(&client).expect("it is connected");
        self.numbers.remove(&socket.key);
        self.server.disconnect(socket.key, nanos(self.now));
        self.called(Call::Disconnect(client));
    }

    fn called(&mut self, call: Call) {
        self.calls.push((self.now, call));
    }

    /// Commits, lets the model do the same, compares, and sends.
    fn turn(&mut self) -> Result<(), Wrong> {
        self.begin_turn();
        if let Err(failure) = self.server.commit(nanos(self.now)) {
            let crash = self.crash_to_come.take();
            return self.crash(crash.ok_or_else(|| format!("the disk works, and yet: {failure}"))?);
        }
        let pending = self.pending();
        self.verify(&pending)?;
        self.model.journal.committed(self.now, power_cut(&self.setup));
        let over = self.flush(&pending)?;
        self.has_turn_begun = false;
        for client in over {
            self.disconnect(client);
        }
        Ok(())
    }

    /// What is to be sent to each client that wants to be looked after.
    fn pending(&mut self) -> BTreeMap<ClientNumber, Vec<u8>> {
        let mut keys = Vec::new();
        self.server.take_dirty(&mut keys);
        let mut pending = BTreeMap::new();
        for key in keys {
            let Some(&client) = self.numbers.get(&key) else { continue };
            let mut slices = [IoSlice::new(&[]); SLICES];
            let output_handle = self.server.output_handle(key);
            let filled = output_handle.next_slices(&mut slices);
            let mut bytes = Vec::new();
            slices[..filled].iter().for_each(|slice| bytes.extend_from_slice(slice));
            pending.insert(client, bytes);
        }
        pending
    }

    /// Sends as the event loop does; says who is to be disconnected.
    fn flush(
        &mut self,
        pending: &BTreeMap<ClientNumber, Vec<u8>>,
    ) -> Result<Vec<ClientNumber>, Wrong> {
        let mut over = Vec::new();
        for &client in pending.keys() {
            let socket = self.sockets.get_mut(&client).expect("it was just looked after");
            let mut slices = [IoSlice::new(&[]); SLICES_PER_WRITE];
            let mut output_handle = self.server.output_handle(socket.key);
            let filled = output_handle.next_slices(&mut slices);
            let ready: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
            let sent = ready.min(socket.takes.unwrap_or(usize::MAX));
            if sent > 0 {
                output_handle.sent(sent);
            }
            socket.takes = socket.takes.map(|takes| takes - sent);
            let actions = output_handle.actions();
            let has_more = !socket.inbound.is_empty() || socket.is_half_closed && !socket.has_ended;
            let may_write = actions.write && socket.takes != Some(0);
            if actions.close {
                over.push(client);
            } else if may_write || actions.run || (actions.read && has_more) {
                self.ready.push(client);
            }
            let model = self.model.clients.get_mut(&client).expect("it is there in both worlds");
            let bytes = model.output.drain(..sent);
            if let Some(all) = &mut self.sent {
                all.push((client, bytes.collect()));
            }
        }
        for (client, socket) in &self.sockets {
            let actions = self.server.actions(socket.key);
            let actions = Actions {
                read: actions.read,
                run: actions.run,
                write: actions.write,
                close: actions.close,
            };
            let expected = self.model.clients[client].actions();
            if actions != expected {
                return Err(format!(
                    "client {client}: the server wants {actions:?}, not {expected:?}"
                ));
            }
        }
        Ok(over)
    }

    // ---- The model ----

    /// Lets happen to the model what has happened to the engine in this turn, and compares what
    /// is said. What is due in the same moment may happen in any order.
    fn verify(&mut self, pending: &BTreeMap<ClientNumber, Vec<u8>>) -> Result<(), Wrong> {
        let calls = std::mem::take(&mut self.calls);
        let mut heard = BTreeMap::new();
        for (&client, bytes) in pending {
            let is_new =
                calls.iter().any(|(_, call)| matches!(call, Call::Connect(new) if *new == client));
            let known = self.model.clients.get(&client).filter(|_| !is_new);
            let before = known.map_or(0, |client| client.output.len());
            heard.insert(client, bytes.get(before..).unwrap_or_default().to_vec());
        }
        self.model.hear(heard);
        let (tubes, clients) = self.model.due(self.now);
        let is_open = tubes.len() + clients.len() > 1 && self.model.is_somebody_waiting();
        let others = is_open.then(|| self.model.clone());
        play(&mut self.model, &calls, 0);
        let first = self.compare(&self.model, pending);
        if first.is_ok() {
            return Ok(());
        }
        if let Some(before) = others {
            for order in 1..MOST_ORDERS {
                let mut other = before.clone();
                if !play(&mut other, &calls, order) {
                    break;
                }
                if self.compare(&other, pending).is_ok() {
                    self.model = other;
                    return Ok(());
                }
            }
        }
        first
    }

    fn compare(
        &self,
        model: &Model,
        pending: &BTreeMap<ClientNumber, Vec<u8>>,
    ) -> Result<(), Wrong> {
        for (number, client) in &model.clients {
            let (said, expected) = match pending.get(number) {
                Some(bytes) => (&bytes[..], &client.output[..]),
                // Nothing more than what was there before.
                None => (&[][..], &client.output[client.said_before.min(client.output.len())..]),
            };
            if said != expected {
                let same = said.iter().zip(expected).take_while(|(a, b)| a == b).count();
                let from = same.saturating_sub(60);
                return Err(format!(
                    "client {number} is told\n    {}\nand should be told\n    {}\n(both from byte {from} on)",
                    said[from.min(said.len())..].escape_ascii(),
                    expected[from.min(expected.len())..].escape_ascii(),
                ));
            }
        }
        let is_same = model.clients.keys().eq(self.sockets.keys());
        if is_same { Ok(()) } else { Err("not all clients are there in both worlds".to_owned()) }
    }

    // ---- Time ----

    /// Turns follow each other as long as the server has something to do at once.
    fn come_to_rest(&mut self) -> Result<(), Wrong> {
        for _ in 0..MOST_TURNS {
            self.turn()?;
            self.server.check();
            let is_due = self.server.next_due().is_some_and(|due| due.as_nanos() <= self.now);
            if self.ready.is_empty() && !self.server.has_dirty() && !is_due {
                return self.check_disk_use();
            }
        }
        Err(format!("the server never comes to rest: next due {:?}", self.server.next_due()))
    }

    /// All files together stay below three times what is live and two files, unless these are so
    /// small that what is set aside for a full disk takes more.
    fn check_disk_use(&self) -> Result<(), Wrong> {
        const SMALL_FILE: u32 = 16_384;
        let Some(BinlogSetup { file_size, .. }) = self.setup.binlog else { return Ok(()) };
        if file_size < SMALL_FILE {
            return Ok(());
        }
        let record_len = |job: &Job| (4 + job.tube.len() + 80 + job.body.len() + 2) as u64;
        let live: u64 = self.model.jobs.iter().map(record_len).sum();
        let limit = 3 * live + 2 * u64::from(file_size);
        let used = self.disk.used_by_binlog();
        if used <= limit || self.is_disk_use_open {
            return Ok(());
        }
        Err(format!("the files take {used} bytes for {live} that are live: {}", self.disk.names()))
    }

    fn wait(&mut self, span: u64) -> Result<(), Wrong> {
        let end = (self.now + span).next_multiple_of(TICK);
        let life = self.lives;
        for _ in 0..MOST_TURNS {
            self.come_to_rest()?;
            let due = self.server.next_due().map(|due| due.as_nanos().next_multiple_of(TICK));
            if self.lives != life {
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
        Err(format!("the server is busy for ever: {}", self.disk.names()))
    }

    // ---- Ends and new lives ----

    fn restart_in_good_order(&mut self) -> Result<(), Wrong> {
        if self.setup.binlog.is_none() {
            return Ok(());
        }
        let life = self.lives;
        self.turn()?;
        if self.lives != life {
            return Ok(());
        }
        let none = Crash { power_cut: None, flipped_bits: 0 };
        let crash = match self.server.close(nanos(self.now)) {
            Ok(()) => none,
            Err(failure) => {
                let crash = self.crash_to_come.take();
                crash.ok_or_else(|| format!("the disk works, and yet: {failure}"))?
            }
        };
        self.crash(crash)
    }

    /// The process ends at once, and another one begins.
    fn crash(&mut self, crash: Crash) -> Result<(), Wrong> {
        if self.setup.binlog.is_none() {
            return Ok(());
        }
        // All of that may have come to the disk.
        let calls = std::mem::take(&mut self.calls);
        self.model.hear(BTreeMap::new());
        play(&mut self.model, &calls, 0);
        self.crash_to_come = None;
        self.disk.heal();
        if let Some(seed) = crash.power_cut {
            let mut random = fastrand::Rng::with_seed(seed);
            self.disk = FakeDisk::with_files(&self.disk.files_after_power_cut(&mut random));
            self.disk.set_capacity(self.capacity);
        }
        if crash.flipped_bits > 0 {
            self.is_disk_use_open = true;
            let seed = crash.power_cut.unwrap_or(self.now);
            self.disk.flip_bits(&mut fastrand::Rng::with_seed(seed), crash.flipped_bits);
        }
        self.sockets.clear();
        self.numbers.clear();
        self.ready.clear();
        self.has_turn_begun = false;
        self.now = self.now.saturating_add_signed(self.drift) + DOWN_TIME;
        self.now = self.now.next_multiple_of(TICK);
        self.drift = 0;
        self.lives += 1;
        self.begin_life(crash)
    }

    fn begin_life(&mut self, crash: Crash) -> Result<(), Wrong> {
        let recovered = self.recover()?;
        let end = if crash.power_cut.is_some() { power_cut(&self.setup) } else { End::Killed };
        let mut survey = Survey::begin(&mut self.server, self.now);
        let jobs = judge(&self.model.journal, &mut survey, end, crash.flipped_bits)?;
        if recovered.jobs != jobs.count() {
            let count = jobs.count();
            return Err(format!("there are {} jobs, and {count} may be there", recovered.jobs));
        }
        let sure_id = self.model.journal.highest_sure_id(end);
        if recovered.last_id < sure_id && crash.flipped_bits == 0 {
            return Err(format!("ids begin after {}, but {sure_id} was used", recovered.last_id));
        }
        // Nobody knows when those were put, or what comes next of them.
        for (id, found) in &jobs.unexplained {
            if survey.delete(*id, &found.tube) != "DELETED\r\n" {
                survey.end();
                self.set_capacity(None);
                return self.crash(Crash { power_cut: None, flipped_bits: 0 });
            }
        }
        let tubes = survey.tubes();
        let mut expected: BTreeSet<&str> =
            jobs.views.iter().map(|(_, views)| &*views[0].tube).collect();
        expected.insert("default");
        let names: Vec<&str> = tubes.iter().map(|name| &**name).collect();
        if names.iter().copied().collect::<BTreeSet<&str>>() != expected {
            return Err(format!("the tubes are {tubes:?}, not {expected:?}"));
        }
        let live = jobs.views.iter().map(|(id, views)| job(*id, &views[0], self.now)).collect();
        let mut model = self.model.restarted(live, &names, recovered.last_id, self.now);
        survey.tell(&mut model);
        survey.end();
        let committed = self.server.commit(nanos(self.now));
        committed.map_err(|failure| format!("the first commit: {failure}"))?;
        model.journal = std::mem::take(&mut self.model.journal);
        let deleted: Vec<u64> = jobs.unexplained.iter().map(|(id, _)| *id).collect();
        model.journal.begin_anew(&jobs.views, &deleted, self.now);
        model.is_space_short = self.capacity.is_some();
        model.is_space_short_for_deletes = self.capacity.is_some();
        self.model = model;
        Ok(())
    }

    /// A new server on what is on the disk.
    fn recover(&mut self) -> Result<Recovered, Wrong> {
        let now = nanos(self.now);
        self.server = server(&self.setup, self.now);
        let mut recovered = self.server.recover(self.disk.boxed(), syncing(&self.setup), now);
        if matches!(recovered, Err(ReplayError::Begin(_))) && self.capacity.is_some() {
            self.set_capacity(None);
            self.server = server(&self.setup, self.now);
            recovered = self.server.recover(self.disk.boxed(), syncing(&self.setup), now);
        }
        let recovered = recovered.map_err(|error| format!("it does not start again: {error}"))?;
        self.server.check();
        self.server.share_budget(self.setup.sharers);
        Ok(recovered)
    }
}

/// The jobs that are there after a restart.
#[derive(Default)]
struct Judged {
    /// As they may be; the first of the views is as good as any.
    views: Vec<(u64, Vec<View>)>,
    /// What they are now comes from damage, from what was lost, or from a clock that was set.
    unexplained: Vec<(u64, Found)>,
}

impl Judged {
    fn count(&self) -> u64 {
        (self.views.len() + self.unexplained.len()) as u64
    }
}

/// Compares all jobs with what may be there after such an end. Each bit that was flipped may have
/// changed one job, though not what is in it.
fn judge(
    journal: &Journal,
    survey: &mut Survey<'_>,
    end: End,
    flipped_bits: u32,
) -> Result<Judged, Wrong> {
    let is_never_synced = end == End::PowerCut { synced_within: None };
    let may_deviate = if is_never_synced { usize::MAX } else { flipped_bits as usize };
    let ids = if may_deviate > 0 { journal.all_ids() } else { journal.candidates() };
    let mut judged = Judged::default();
    let mut deviations = Vec::new();
    for id in ids {
        let found = survey.find(id);
        match journal.judge(id, found.as_ref(), end, survey.now) {
            Verdict::Is(views) => judged.views.push((id, views)),
            Verdict::IsGone => {}
            Verdict::IsUnclear => judged.unexplained.extend(found.map(|found| (id, found))),
            Verdict::Wrong(what) => {
                deviations.push(what);
                let Some(found) = found else { continue };
                if !journal.is_intact(id, &found) {
                    return Err(deviations.pop().unwrap_or_default());
                }
                judged.unexplained.push((id, found));
            }
        }
    }
    if deviations.len() > may_deviate {
        return Err(format!(
            "with {flipped_bits} flipped bits {} jobs are not as they may be, the first: {}",
            deviations.len(),
            deviations[0]
        ));
    }
    Ok(judged)
}

/// Lets happen to the model what has happened to the engine. Says whether there are so many orders
/// in which what is due can happen.
fn play(model: &mut Model, calls: &[(u64, Call)], order: usize) -> bool {
    let mut is_one = true;
    for (now, call) in calls {
        let now = *now;
        match call {
            Call::Tick => {
                let (mut tubes, mut clients) = model.due(now);
                let rest = permute(&mut tubes, order);
                is_one = permute(&mut clients, rest) == 0;
                model.tick(&tubes, &clients, now);
            }
            Call::Connect(client) => model.connect(*client),
            Call::Receive(client, bytes) => model.receive(*client, bytes, now),
            Call::Resume(client) => model.resume(*client, now),
            Call::HalfClose(client) => model.half_close(*client),
            Call::EndInput(client) => model.end_input(*client),
            Call::Disconnect(client) => model.disconnect(*client, now),
            Call::Drain(is_draining) => model.is_draining = *is_draining,
        }
    }
    is_one
}

/// Brings things into the order of this number; what is left of it is for others.
fn permute<T>(things: &mut [T], mut order: usize) -> usize {
    for at in 0..things.len() {
        let choices = things.len() - at;
        things[at..].rotate_left(order % choices);
        order /= choices;
    }
    order
}

fn job(id: u64, view: &View, now: u64) -> Job {
    Job {
        id,
        tube: Rc::clone(&view.tube),
        pri: view.pri,
        delay: view.delay,
        ttr: view.ttr,
        body: Rc::clone(&view.body),
        created: view.created,
        place: view.place_at(now),
        counts: view.counts,
        is_age_unknown: view.is_age_unknown,
    }
}

/// Looks at a server that has just started, over a connection of its own.
struct Survey<'s> {
    server: &'s mut Server,
    key: ConnKey,
    now: u64,
    /// How often each command was given.
    commands: BTreeMap<&'static str, u64>,
    /// How many jobs were deleted in each tube.
    deletes: BTreeMap<String, u64>,
}

impl Survey<'_> {
    fn begin(server: &mut Server, now: u64) -> Survey<'_> {
        let key = server.connect().expect("there is memory");
        Survey { server, key, now, commands: BTreeMap::new(), deletes: BTreeMap::new() }
    }

    fn ask(&mut self, line: &str) -> String {
        let word = line.split([' ', '\r']).next().unwrap_or_default();
        let word = super::words::COUNTERS.iter().find(|counter| **counter == word);
        *self.commands.entry(word.expect("it is counted")).or_default() += 1;
        self.server.receive(self.key, line.as_bytes(), nanos(self.now));
        let mut slices = [IoSlice::new(&[]); SLICES_PER_WRITE];
        let mut output_handle = self.server.output_handle(self.key);
        let filled = output_handle.next_slices(&mut slices);
        let bytes: Vec<u8> =
            slices[..filled].iter().flat_map(|slice| slice.iter().copied()).collect();
        output_handle.sent(bytes.len());
        // Bodies are the only part that may not be text.
        bytes.iter().map(|&byte| char::from(byte)).collect()
    }

    fn count(&self) -> u64 {
        self.commands.values().sum()
    }

    fn find(&mut self, id: u64) -> Option<Found> {
        let text = self.ask(&format!("stats-job {id}\r\n"));
        if text == "NOT_FOUND\r\n" {
            return None;
        }
        let moment = self.now + self.count();
        let peeked = self.ask(&format!("peek {id}\r\n"));
        let (_, body) = peeked.split_once("\r\n").unwrap_or_default();
        let body = body.strip_suffix("\r\n").unwrap_or_default();
        let word = |key: &str| field(&text, key).unwrap_or_default().to_owned();
        let number = |key: &str| word(key).parse::<u64>().unwrap_or(u64::MAX);
        let small = |key: &str| u32::try_from(number(key)).unwrap_or(u32::MAX);
        Some(Found {
            tube: word("tube"),
            body: body.chars().map(|char| u8::try_from(char).unwrap_or(b'?')).collect(),
            state: word("state"),
            pri: small("pri"),
            delay: small("delay"),
            ttr: small("ttr"),
            age: number("age"),
            time_left: number("time-left"),
            counts: Counts {
                reserves: small("reserves"),
                timeouts: small("timeouts"),
                releases: small("releases"),
                buries: small("buries"),
                kicks: small("kicks"),
            },
            moment,
        })
    }

    fn delete(&mut self, id: u64, tube: &str) -> String {
        *self.deletes.entry(tube.to_owned()).or_default() += 1;
        self.ask(&format!("delete {id}\r\n"))
    }

    fn tubes(&mut self) -> Vec<String> {
        let text = self.ask("list-tubes\r\n");
        text.lines().filter_map(|line| line.strip_prefix("- ")).map(str::to_owned).collect()
    }

    /// The model has not heard all that.
    fn tell(&self, model: &mut Model) {
        model.total_connections = 1;
        model.counts.clone_from(&self.commands);
        model.last_moment = self.now + self.count();
        for tube in &mut model.tubes {
            tube.deletes = self.deletes.get(&*tube.name).copied().unwrap_or(0);
        }
    }

    fn end(self) {
        self.server.disconnect(self.key, nanos(self.now));
    }
}

fn server(setup: &Setup, now: u64) -> Server {
    let settings = Settings {
        max_job_size: setup.max_job_size,
        binlog_file_size: setup.binlog.map_or(0, |binlog| binlog.file_size),
        ..Settings::DEFAULT
    };
    Server::new(settings, made_up::facts(nanos(now)), nanos(now))
}

fn syncing(setup: &Setup) -> Syncing {
    match setup.binlog.and_then(|BinlogSetup { sync_within, .. }| sync_within) {
        None => Syncing::Never,
        Some(0) => Syncing::EachIteration,
        Some(span) => Syncing::Within(nanos(span)),
    }
}

fn power_cut(setup: &Setup) -> End {
    End::PowerCut { synced_within: setup.binlog.and_then(|binlog| binlog.sync_within) }
}

fn nanos(nanos: u64) -> Nanos {
    Nanos::from_nanos(nanos)
}
