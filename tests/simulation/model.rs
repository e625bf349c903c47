//! A beanstalkd that is slow and obvious, written from BEHAVIOUR.md, EXTENSIONS.md and
//! beanstalkd-protocol(7). It shares no code with the engine: each lookup is a search, and nothing is counted in advance.
//!
//! This file has the state, the rules for jobs and tubes, and what time brings. `input.rs` splits
//! bytes into lines and bodies, `commands.rs` has one function for each command, `extensions.rs` has
//! the commands that C beanstalkd does not have, `steps.rs` commands of which the server does one part
//! after the other, `keys.rs` the keys of jobs, and `replies.rs` formats the documents.
//!
//! The model runs one command at a time. Its caller decides which client is next and when, in the
//! order in which the server has run the commands. BEHAVIOUR.md leaves some results open: the
//! file of a job, or whether a full disk has space for a record. For these the caller passes the
//! reply that the server has sent, and the model accepts the values that are allowed.

use super::request;
use crate::harness::driver::Options;
use input::{Expects, Item};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use steps::Step;

mod commands;
mod extensions;
mod input;
mod keys;
mod replies;
mod steps;

pub use commands::COMMANDS;
pub use extensions::EXTENSIONS;
pub use keys::{Con, JobKey, KeptKey};

/// A client, by the number that the history gives it.
pub type ClientNumber = usize;

/// In nanoseconds, like all times here.
pub const SECOND: u64 = 1_000_000_000;

/// No command of a client is run while it has not read this many bytes of replies.
pub const UNREAD_LIMIT: usize = 256 * 1024;

#[derive(Clone, Debug, Default)]
pub struct Model {
    options: Options,
    has_binlog: bool,
    /// Replies wait for a remote disk, and the TTR of a job begins when its reply may be sent.
    pub holds_replies: bool,
    /// By ascending id.
    pub jobs: Vec<Job>,
    /// In the order of `list-tubes`.
    pub tubes: Vec<Tube>,
    pub clients: BTreeMap<ClientNumber, Client>,
    /// The clients that wait for a job, the longest-waiting one first.
    pub waiters: Vec<Waiter>,
    pub kept_keys: Vec<KeptKey>,
    /// Flushes that have deleted their jobs and have no reply yet, the oldest first.
    pub flushes: Vec<Flush>,
    /// What has become of jobs since the caller took this last.
    pub changes: Vec<Change>,
    /// The disk may be too full for the record of a put, release, bury or kick.
    pub may_refuse_updates: bool,
    /// The disk may be too full for the record of a delete.
    pub may_refuse_deletes: bool,
    /// How many commands were refused, since the caller set this to 0.
    pub refusals: u64,
    /// How many workers that wait here have got a job in the server.
    pub woken: usize,
    pub is_draining: bool,
    pub last_id: u64,
    /// How often each command was given, by its name.
    pub counters: BTreeMap<&'static str, u64>,
    pub total_connections: u64,
    /// The time of the last command. Time passes between any two commands.
    pub last_command_at: u64,
    started_at: u64,
    total_jobs: u64,
    timeouts: u64,
    flush_count: u64,
    /// The time of the last flush that has deleted jobs.
    pub last_flush_at: u64,
    /// Rises with each change of a job or a tube.
    pub last_seq: u64,
    /// The last change of the tubes, and of their pauses.
    tubes_changed: u64,
    pauses_changed: u64,
    /// Closed connections that have not given back everything, with numbers of their own.
    pub closing: Vec<(ClientNumber, Client)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    pub id: u64,
    pub tube: Rc<str>,
    pub pri: u32,
    pub delay: u32,
    pub ttr: u32,
    /// Without CR LF.
    pub body: Rc<[u8]>,
    pub created: u64,
    pub state: State,
    pub counts: Counts,
    /// How often it came back against the will of its worker, since it was put or kicked.
    pub returns: u32,
    /// The clock was set in such a way that `created` is one of several possible times.
    pub is_age_unknown: bool,
    pub key: Option<JobKey>,
    pub con: Option<Con>,
    /// The last change, among all events.
    pub changed: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub reserves: u32,
    pub timeouts: u32,
    pub releases: u32,
    pub buries: u32,
    pub kicks: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Ready,
    Delayed { due: u64 },
    Reserved { by: ClientNumber, at: u64, deadline: u64, seq: u64 },
    Buried { seq: u64 },
}

#[derive(Clone, Debug)]
pub struct Tube {
    pub name: Rc<str>,
    /// The length of the pause in seconds, and its end.
    pub pause: Option<(u32, u64)>,
    total_jobs: u64,
    pub deletes: u64,
    pauses: u64,
    /// When it was made, among all events.
    made: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Client {
    /// The id that the server gives it.
    id: u64,
    opened_at: u64,
    used: Rc<str>,
    /// In the order of `list-tubes-watched`.
    watched: Vec<Rc<str>>,
    /// Replies that the client has not read.
    pub output: Vec<u8>,
    /// Bytes that have arrived and were not used yet.
    pub input: Vec<u8>,
    expects: Expects,
    batch: Option<Batch>,
    /// A command of which the server has done a part.
    step: Option<Box<Step>>,
    /// The last reply, while it is the last output, if its bodies may have to be read.
    bodies: Option<BodyReply>,
    /// A reply that waits for its bodies. No other command runs meanwhile.
    reading: Option<BodyReply>,
    pub is_closing: bool,
    is_producer: bool,
    is_worker: bool,
    is_half_closed: bool,
    pub has_input_ended: bool,
}

/// A reply with bodies. The server may have to read them from the disk before it replies.
#[derive(Clone, Debug)]
struct BodyReply {
    /// The length of the output before it.
    start: usize,
    asked_at: u64,
    /// The reply, once it waits.
    bytes: Vec<u8>,
    /// The jobs that it reserves. Their TTRs begin with the reply.
    reserved: Vec<u64>,
}

const REFUSED: &[u8] = b"OUT_OF_MEMORY\r\n";
/// The time after which a reply is refused whose bodies cannot be read now.
const READ_PATIENCE: u64 = 10 * SECOND;

/// The deadline of a job whose TTR has not begun.
pub(super) const NO_DEADLINE: u64 = u64::MAX;

/// A `reserve-batch` that has waited, or that takes jobs in steps. The client takes more jobs when it is
/// served next.
#[derive(Clone, Debug)]
struct Batch {
    /// The job for which it has waited.
    first: Option<u64>,
    /// The jobs that were taken in steps.
    taken: Vec<u64>,
    count: usize,
    /// Other jobs became ready at the same moment, and may have been the first.
    is_first_open: bool,
}

/// A client that waits for a job.
#[derive(Clone, Copy, Debug)]
pub struct Waiter {
    pub client: ClientNumber,
    /// The end of its timeout.
    until: Option<u64>,
    /// The count of a `reserve-batch`.
    batch: Option<usize>,
    /// When it began to wait, among all events.
    seq: u64,
}

/// A flush that has no reply yet. Its tube stays until then.
#[derive(Clone, Debug)]
pub struct Flush {
    /// `None`: the client has gone away.
    pub client: Option<ClientNumber>,
    pub tube: Rc<str>,
    pub count: usize,
}

/// A job as a command or the time has left it.
#[derive(Clone, Debug)]
pub struct Change {
    pub id: u64,
    /// `None`: it is deleted.
    pub job: Option<Job>,
    /// The binlog has a record of it.
    pub is_logged: bool,
    /// The number of the flush that has deleted it: after a crash all its jobs are gone, or none.
    pub flush: Option<u64>,
    pub at: u64,
}

/// Tubes or a client for which something is due.
#[derive(Clone, Debug)]
pub enum Due {
    /// Delays end, or pauses.
    Tubes(Vec<Rc<str>>),
    /// TTRs run out, or a wait ends.
    Client(ClientNumber),
}

/// A command that is being run.
pub struct Call<'a> {
    by: ClientNumber,
    now: u64,
    /// The bytes that the server has sent to the client from here on; empty if there are none.
    seen: &'a [u8],
}

impl Job {
    /// Returns the deadline and the number of the reservation, if the client has reserved the job.
    fn reserved_by(&self, client: ClientNumber) -> Option<(u64, u64)> {
        match self.state {
            State::Reserved { by, deadline, seq, .. } if by == client => Some((deadline, seq)),
            _ => None,
        }
    }

    // What jobs in each state of a tube are ordered by; `None` for all other jobs.

    fn ready_in(&self, tube: &str) -> Option<u32> {
        (self.state == State::Ready && *self.tube == *tube).then_some(self.pri)
    }

    fn delayed_in(&self, tube: &str) -> Option<u64> {
        match self.state {
            State::Delayed { due } if *self.tube == *tube => Some(due),
            _ => None,
        }
    }

    fn buried_in(&self, tube: &str) -> Option<u64> {
        match self.state {
            State::Buried { seq } if *self.tube == *tube => Some(seq),
            _ => None,
        }
    }

    /// Returns the job as a restart brings it back: a reserved one is ready.
    fn stored(&self) -> Job {
        let is_reserved = matches!(self.state, State::Reserved { .. });
        let state = if is_reserved { State::Ready } else { self.state };
        Job { state, returns: 0, changed: 0, ..self.clone() }
    }
}

impl Model {
    pub fn new(options: Options, has_binlog: bool, now: u64) -> Model {
        Model {
            options,
            has_binlog,
            holds_replies: false,
            tubes: vec![Tube::new("default")],
            last_command_at: now,
            started_at: now,
            ..Model::default()
        }
    }

    /// Returns the state of a server that has just been started with these jobs.
    pub fn restarted(&self, jobs: Vec<Job>, tubes: &[&str], last_id: u64, now: u64) -> Model {
        Model {
            tubes: tubes.iter().map(|name| Tube::new(name)).collect(),
            last_seq: self.last_seq,
            flush_count: self.flush_count,
            // The server deletes the rest of a flush when it starts.
            last_flush_at: if self.last_flush_at > 0 { now } else { 0 },
            last_id,
            jobs,
            holds_replies: self.holds_replies,
            ..Model::new(self.options, self.has_binlog, now)
        }
    }

    // ---- Connections ----

    pub fn connect(&mut self, number: ClientNumber, id: u64, now: u64) {
        let default: Rc<str> = "default".into();
        let used = Rc::clone(&default);
        let opened_at = now.max(self.last_command_at);
        let watched = vec![default];
        let client = Client { id, opened_at, used, watched, ..Client::default() };
        self.clients.insert(number, client);
        self.total_connections += 1;
    }

    /// Adds bytes to the input of a client; [`Model::run_next`] runs the commands.
    pub fn receive(&mut self, number: ClientNumber, bytes: &[u8]) {
        self.client(number).input.extend_from_slice(bytes);
    }

    /// The client has shut down its sending side: it does not wait any longer.
    pub fn half_close(&mut self, number: ClientNumber) {
        self.client(number).is_half_closed = true;
        if self.is_waiting(number) {
            self.time_out(number);
        }
    }

    /// All that the client has sent has arrived.
    pub fn end_input(&mut self, number: ClientNumber) {
        self.client(number).has_input_ended = true;
        self.half_close(number);
    }

    /// Runs the next complete command of a client, or fills its batch. Returns `false` if there is none, or if it must
    /// not be run. `seen` is what the server has sent to the client and the model has not.
    pub fn run_next(&mut self, number: ClientNumber, now: u64, seen: &[u8]) -> bool {
        if !self.is_free(number) && !self.is_listing(number) {
            return false;
        }
        let client = self.client(number);
        let (batch, step) = (client.batch.take(), client.step.take());
        if batch.is_some() || step.is_some() {
            self.last_command_at = now.max(self.last_command_at + 1);
            let call = Call { by: number, now: self.last_command_at, seen };
            if let Some(batch) = batch {
                self.fill_batch(&call, batch);
            }
            if let Some(step) = step {
                self.end_step(&call, *step);
            }
            return true;
        }
        let Some((item, used)) = client.next_item() else { return false };
        client.input.drain(..used);
        let expected = std::mem::replace(&mut client.expects, Expects::Line);
        self.last_command_at = now.max(self.last_command_at + 1);
        let call = Call { by: number, now: self.last_command_at, seen };
        match item {
            Item::Line(line) => self.execute(&call, &line),
            Item::TooLongLine(line) if request::is_http(&line) => self.http(&call),
            Item::TooLongLine(_) => self.reply(number, "BAD_FORMAT"),
            Item::Body(bytes) => {
                let Expects::Body { id, put } = expected else {
                    unreachable!("a body follows a put")
                };
                self.finish_put(&call, id, put, &bytes);
            }
            Item::TooLargeBody => self.reply(number, "JOB_TOO_BIG"),
        }
        true
    }

    // ---- Time ----

    /// Returns the tubes and then the clients for which something is due, the soonest first.
    pub fn due(&self, now: u64) -> Vec<Due> {
        let mut all = self.moments();
        all.retain(|(due, _)| *due <= now);
        // A job that becomes ready wins over a timeout.
        all.sort_by_key(|(due, it)| (matches!(it, Due::Client(_)), *due));
        all.into_iter().map(|(_, it)| it).collect()
    }

    /// Returns when each tube and client is due next.
    fn moments(&self) -> Vec<(u64, Due)> {
        let mut all: Vec<(u64, Due)> = Vec::new();
        for tube in &self.tubes {
            let delays = self.jobs.iter().filter_map(|job| job.delayed_in(&tube.name));
            let first = delays.chain(tube.pause.map(|(_, until)| until)).min();
            all.extend(first.map(|due| (due, Due::Tubes(vec![Rc::clone(&tube.name)]))));
        }
        for &number in self.clients.keys() {
            let deadline = self.first_deadline(number);
            let waiter = self.waiters.iter().find(|waiter| waiter.client == number);
            let warning = deadline.filter(|_| waiter.is_some());
            let warning = warning.map(|deadline| deadline.saturating_sub(SECOND));
            let timeout = waiter.and_then(|waiter| waiter.until);
            let first = deadline.into_iter().chain(warning).chain(timeout).min();
            all.extend(first.map(|due| (due, Due::Client(number))));
        }
        all
    }

    /// Does what is due. Ended pauses wake at most `wakes` clients. Returns whether more wait for these tubes.
    pub fn on_due(&mut self, due: &Due, wakes: usize, now: u64) -> bool {
        match due {
            Due::Tubes(names) => self.on_tubes_due(names, wakes, now),
            Due::Client(number) => {
                self.on_client_due(*number, now);
                false
            }
        }
    }

    fn on_tubes_due(&mut self, names: &[Rc<str>], wakes: usize, now: u64) -> bool {
        for name in names {
            for id in self.in_order(|job| job.delayed_in(name).filter(|&due| due <= now)) {
                self.job(id).state = State::Ready;
                self.note(id, false, now);
                self.make_ready(id, now);
            }
        }
        let paused = self.paused_until(names, now);
        if !paused.is_empty() {
            self.pauses_changed = self.next_seq();
            self.end_pauses(&paused, wakes, now);
        }
        paused.iter().any(|name| self.tube(name).pause.is_some())
    }

    /// Returns the tubes whose pause ends until `now`.
    fn paused_until(&self, names: &[Rc<str>], now: u64) -> Vec<Rc<str>> {
        let pause = |name: &Rc<str>| self.find_tube(name)?.pause;
        let is_due = |name: &&Rc<str>| pause(name).is_some_and(|(_, until)| until <= now);
        names.iter().filter(is_due).cloned().collect()
    }

    fn on_client_due(&mut self, number: ClientNumber, now: u64) {
        let has_run_out = |&(deadline, _): &(u64, u64)| deadline <= now;
        for id in self.in_order(|job| job.reserved_by(number).filter(has_run_out)) {
            self.timeouts += 1;
            self.job(id).counts.timeouts += 1;
            self.take_back(id, now);
        }
        if self.is_waiting(number) {
            let waiter = self.waiters.iter().find(|waiter| waiter.client == number);
            if self.is_deadline_soon(number, now) {
                self.end_wait(number, "DEADLINE_SOON");
            } else if waiter.and_then(|waiter| waiter.until).is_some_and(|until| until <= now) {
                self.time_out(number);
            }
        }
    }

    fn first_deadline(&self, number: ClientNumber) -> Option<u64> {
        let reserved = self.jobs.iter().filter_map(|job| job.reserved_by(number));
        reserved.map(|(deadline, _)| deadline).min()
    }

    fn is_deadline_soon(&self, number: ClientNumber, now: u64) -> bool {
        self.first_deadline(number).is_some_and(|deadline| deadline <= now + SECOND)
    }

    // ---- Waiting ----

    pub fn is_waiting(&self, number: ClientNumber) -> bool {
        self.waiters.iter().any(|waiter| waiter.client == number)
    }

    /// Ends a wait for which there was no job.
    fn time_out(&mut self, number: ClientNumber) {
        let waiter = self.waiters.iter().find(|waiter| waiter.client == number);
        let is_batch = waiter.is_some_and(|waiter| waiter.batch.is_some());
        self.end_wait(number, if is_batch { "RESERVED_BATCH 0" } else { "TIMED_OUT" });
    }

    fn end_wait(&mut self, number: ClientNumber, reply: &str) {
        self.waiters.retain(|waiter| waiter.client != number);
        self.reply(number, reply);
    }

    /// Returns the client that has waited longest for jobs of the tube, and the job that it gets.
    fn next_served(&self, tube: &str) -> Option<(Waiter, u64)> {
        let waits = |waiter: &&Waiter| self.clients[&waiter.client].watches(tube);
        Some((*self.waiters.iter().find(waits)?, self.first_ready(|name| name == tube)?))
    }

    fn serve_waiter(&mut self, Waiter { client, batch, .. }: Waiter, id: u64, now: u64) {
        self.waiters.retain(|waiter| waiter.client != client);
        self.reserve(id, client, now);
        match batch {
            Some(count) => {
                self.set_deadline(id, NO_DEADLINE);
                let (first, taken) = (Some(id), Vec::new());
                let batch = Batch { first, taken, count, is_first_open: false };
                self.client(client).batch = Some(batch);
            }
            None => self.reply_job(client, "RESERVED", id),
        }
    }

    /// Returns all tubes of which a pause is among what is due.
    pub fn ended_pauses(&self, due: &[Due], now: u64) -> Vec<Rc<str>> {
        let of = |due: &Due| match due {
            Due::Tubes(names) => self.paused_until(names, now),
            Due::Client(_) => Vec::new(),
        };
        due.iter().flat_map(of).collect()
    }

    /// Ends pauses, which wakes some clients, with the best job of all these tubes first. If more wait, the
    /// next tick ends their pauses.
    fn end_pauses(&mut self, tubes: &[Rc<str>], wakes: usize, now: u64) {
        let pauses: Vec<_> = tubes.iter().map(|name| self.tube(name).pause.take()).collect();
        for _ in 0..wakes {
            let served = tubes.iter().filter_map(|name| self.next_served(name));
            let best = served.min_by_key(|(_, id)| (self.find(*id).map(|job| job.pri), *id));
            let Some((waiter, id)) = best else { return };
            self.serve_waiter(waiter, id, now);
        }
        for (name, pause) in tubes.iter().zip(pauses) {
            if self.next_served(name).is_some() {
                self.tube(name).pause = pause.map(|(secs, _)| (secs, now));
            }
        }
    }

    // ---- Bodies that are read ----

    /// Lets replies wait for their bodies which the server has not made, although it has made what comes
    /// before: `made_len` is the length of its output.
    pub fn wait_for_bodies(&mut self, made_len: impl Fn(ClientNumber) -> usize) {
        for (&number, client) in &mut self.clients {
            let Some(mut reply) = client.bodies.take() else { continue };
            if made_len(number) != reply.start || client.output.len() == reply.start {
                continue;
            }
            reply.bytes = client.output.split_off(reply.start);
            for job in self.jobs.iter_mut().filter(|job| reply.reserved.contains(&job.id)) {
                if let State::Reserved { deadline, .. } = &mut job.state {
                    *deadline = NO_DEADLINE;
                }
            }
            client.reading = Some(reply);
        }
    }

    /// Makes the replies whose bodies the server has read: `made` is its output, longer than that of the
    /// model. A job that was deleted meanwhile may be left out. A reply that has waited for 10 s may be refused if a
    /// read has failed. `is_held` returns whether a client has got a job that it gives back: replies are refused in
    /// any order.
    pub fn end_reads<'m>(
        &mut self,
        made: impl Fn(ClientNumber) -> &'m [u8],
        is_held: impl Fn(ClientNumber, u64) -> bool,
        now: u64,
    ) {
        // Not before the commands that ran before.
        let now = now.max(self.last_command_at);
        let mut given_back = Vec::new();
        for (&number, client) in &mut self.clients {
            let seen = made(number).get(client.output.len()..).unwrap_or_default();
            if seen.is_empty() {
                continue;
            }
            let Some(reply) = client.reading.take() else { continue };
            if seen.starts_with(REFUSED) && now >= reply.asked_at + READ_PATIENCE {
                client.output.extend_from_slice(REFUSED);
                given_back.extend(reply.reserved);
                continue;
            }
            let is_there = |id: u64| self.jobs.binary_search_by_key(&id, |job| job.id).is_ok();
            let without = replies::without_deleted(&reply.bytes, seen, is_there);
            client.output.extend(without.unwrap_or(reply.bytes));
            for job in self.jobs.iter_mut().filter(|job| reply.reserved.contains(&job.id)) {
                let ttr = u64::from(job.ttr);
                if let State::Reserved { deadline, .. } = &mut job.state
                    && !self.holds_replies
                {
                    *deadline = now + ttr * SECOND;
                }
            }
        }
        let waiters = self.waiters.clone();
        let place_of = |id: &u64| waiters.iter().position(|it| is_held(it.client, *id));
        given_back.sort_by_key(|id| place_of(id).unwrap_or(usize::MAX));
        for id in given_back {
            if self.find(id).is_some() {
                self.take_back(id, now);
            }
        }
    }

    /// Begins the TTRs of jobs whose replies may be sent now. `deadline` is that of a job in the server.
    pub fn begin_ttrs(
        &mut self,
        deadline: impl Fn(ClientNumber, u64) -> Option<u64>,
        is_sent: impl Fn(ClientNumber) -> bool,
        now: u64,
    ) -> Result<(), String> {
        // Incomplete commands take a nanosecond too.
        let last = now.max(self.last_command_at) + 1000;
        for job in self.jobs.iter_mut().filter(|_| self.holds_replies) {
            let ttr = u64::from(job.ttr) * SECOND;
            let State::Reserved { by, at, deadline: known, .. } = &mut job.state else { continue };
            let Some(found) = deadline(*by, job.id) else {
                // The connection was closed right after its last reply was sent.
                if *known == NO_DEADLINE && is_sent(*by) {
                    *known = last + ttr;
                }
                continue;
            };
            let is_read = |client: &Client| client.reading.is_none() && client.batch.is_none();
            let is_read = self.clients.get(by).is_some_and(is_read);
            // Steps of lists that connections share take no nanosecond of their own.
            let may_begin = (*at + ttr - 1000..=last + ttr).contains(&found);
            if may_begin && (*known == NO_DEADLINE || found > *known) {
                *known = found;
                // The server's time of commands is not before this: each step takes a nanosecond.
                self.last_command_at = self.last_command_at.max(found - ttr);
            } else if *known == NO_DEADLINE && found != NO_DEADLINE {
                return Err(format!("the TTR of job {} has begun at another time", job.id));
            } else if found == NO_DEADLINE && is_read && is_sent(*by) {
                return Err(format!("the TTR of job {} does not begin", job.id));
            }
        }
        Ok(())
    }

    pub fn is_reading(&self, number: ClientNumber) -> bool {
        self.clients[&number].reading.is_some()
    }

    // ---- Jobs ----

    /// Returns the ready job with the lowest priority and id of these tubes, if they are not
    /// paused.
    fn first_ready(&self, is_wanted: impl Fn(&str) -> bool) -> Option<u64> {
        let is_open = |name: &str| self.find_tube(name).is_some_and(|tube| tube.pause.is_none());
        let ready = self.jobs.iter().filter(|job| self.can_be_reserved(job));
        let wanted = ready.filter(|job| is_wanted(&job.tube) && is_open(&job.tube));
        wanted.min_by_key(|job| (job.pri, job.id)).map(|job| job.id)
    }

    /// Takes a job back from a worker that has lost it. A job that has come back too often is
    /// buried.
    fn take_back(&mut self, id: u64, now: u64) {
        let bury_after = self.options.settings.bury_after;
        let job = self.job(id);
        // A worker that waits for the body never had the job.
        let is_read = !matches!(job.state, State::Reserved { deadline: NO_DEADLINE, .. });
        job.returns += u32::from(is_read);
        job.counts.reserves -= u32::from(!is_read);
        if is_read && bury_after.is_some_and(|limit| job.returns >= u32::from(limit.get())) {
            job.counts.buries += 1;
            let seq = self.next_seq();
            self.move_to(id, State::Buried { seq }, now);
        } else {
            // It is ready before a waiting worker reserves it.
            job.state = State::Ready;
            self.note(id, false, now);
            self.make_ready(id, now);
        }
    }

    /// Returns the tubes with jobs that were buried after this number was taken.
    pub fn tubes_with_burials_since(&self, last_seq: u64) -> BTreeSet<Rc<str>> {
        let is_new = |job: &&Job| matches!(job.state, State::Buried { seq } if seq > last_seq);
        self.jobs.iter().filter(is_new).map(|job| Rc::clone(&job.tube)).collect()
    }

    /// The jobs of a tube were buried in this order. The order of those that were buried before is known.
    pub fn order_buried(&mut self, ids: &[u64], last_seq: u64) {
        for &id in ids {
            let new_seq = self.next_seq();
            let mut states: Vec<&mut State> = Vec::new();
            states
                .extend(self.jobs.iter_mut().filter(|job| job.id == id).map(|job| &mut job.state));
            let changes = self.changes.iter_mut().filter(|change| change.id == id);
            states.extend(changes.filter_map(|it| it.job.as_mut().map(|job| &mut job.state)));
            for state in states {
                if let State::Buried { seq } = state
                    && *seq > last_seq
                {
                    *seq = new_seq;
                }
            }
        }
    }

    fn make_ready(&mut self, id: u64, now: u64) {
        let job = self.job(id);
        job.state = State::Ready;
        let (tube, has_limit) = (Rc::clone(&job.tube), job.con.is_some());
        // The others of its tube are known already. With a slot, a better job of its key may be in another one.
        if !has_limit
            && let Some((waiter, first)) = self.next_served(&tube)
            && first == id
        {
            self.serve_waiter(waiter, id, now);
        }
        self.serve_unblocked(now);
    }

    fn reserve(&mut self, id: u64, by: ClientNumber, now: u64) {
        let seq = self.next_seq();
        let job = self.job(id);
        let deadline = now + u64::from(job.ttr) * SECOND;
        job.state = State::Reserved { by, at: now, deadline, seq };
        job.counts.reserves += 1;
        self.note(id, false, now);
    }

    /// Moves a job to another state, which is logged.
    fn move_to(&mut self, id: u64, state: State, now: u64) {
        self.job(id).state = state;
        self.note(id, true, now);
        if state == State::Ready {
            self.make_ready(id, now);
        }
        self.serve_unblocked(now);
    }

    fn note(&mut self, id: u64, is_logged: bool, at: u64) {
        let seq = self.next_seq();
        if self.find(id).is_some() {
            self.job(id).changed = seq;
        }
        let job = self.find(id).map(Job::stored);
        self.changes.push(Change { id, job, is_logged, flush: None, at });
    }

    // ---- Tubes ----

    /// Removes a tube that no client uses or watches and that has no job.
    fn remove_if_idle(&mut self, name: &str) {
        let is_needed = name == "default"
            || self.jobs.iter().any(|job| *job.tube == *name)
            || self.flushes.iter().any(|flush| *flush.tube == *name)
            || self.clients.values().any(|client| client.needs(name))
            || self.closing.iter().any(|(_, client)| client.needs(name));
        if !is_needed {
            self.tubes_changed = self.next_seq();
            let position = self.tubes.iter().position(|tube| *tube.name == *name);
            self.tubes.swap_remove(position.expect("the tube was needed until now"));
        }
    }

    fn find_or_create_tube(&mut self, name: &str) -> Rc<str> {
        if self.find_tube(name).is_none() {
            self.tubes_changed = self.next_seq();
            self.tubes.push(Tube { made: self.tubes_changed, ..Tube::new(name) });
        }
        Rc::clone(&self.tube(name).name)
    }

    // ---- Lookup ----

    /// Returns the ids of the jobs that have a rank, in its order and then by id.
    fn in_order<R: Ord>(&self, rank: impl Fn(&Job) -> Option<R>) -> Vec<u64> {
        let ranks = self.jobs.iter().filter_map(|job| Some((rank(job)?, job.id)));
        let mut ranks: Vec<(R, u64)> = ranks.collect();
        ranks.sort_unstable();
        ranks.into_iter().map(|(_, id)| id).collect()
    }

    /// Returns how many puts there were, in the used tube or in another one.
    pub fn puts(&self) -> u64 {
        ["put", "put-in-tube"].iter().filter_map(|word| self.counters.get(word)).sum()
    }

    fn find(&self, id: u64) -> Option<&Job> {
        let index = self.jobs.binary_search_by_key(&id, |job| job.id).ok()?;
        Some(&self.jobs[index])
    }

    fn job(&mut self, id: u64) -> &mut Job {
        let index = self.jobs.binary_search_by_key(&id, |job| job.id);
        &mut self.jobs[index.expect("the job exists")]
    }

    fn find_tube(&self, name: &str) -> Option<&Tube> {
        self.tubes.iter().find(|tube| *tube.name == *name)
    }

    fn tube(&mut self, name: &str) -> &mut Tube {
        let tube = self.tubes.iter_mut().find(|tube| *tube.name == *name);
        tube.expect("a tube exists as long as it is needed")
    }

    fn client(&mut self, number: ClientNumber) -> &mut Client {
        self.clients.get_mut(&number).expect("the client is connected")
    }

    fn next_seq(&mut self) -> u64 {
        self.last_seq += 1;
        self.last_seq
    }
}

impl Tube {
    fn new(name: &str) -> Tube {
        Tube { name: name.into(), pause: None, total_jobs: 0, deletes: 0, pauses: 0, made: 0 }
    }
}
