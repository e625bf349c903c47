//! A beanstalkd that is slow and obvious: everything is looked for anew each time, nothing is
//! kept that could be counted. It predicts every byte that the server says.
//!
//! Here is what there is, what can happen, and the rules; `client.rs` cuts bytes into lines,
//! `commands.rs` has an arm for each command, `telling.rs` the words of the replies.
//!
//! It follows `BEHAVIOUR` and beanstalkd-protocol(7), and shares no code with the engine. What it
//! cannot know (in which file a job is; whether a disk that is limited has space) it reads off
//! what was really said, within the limits of what may be said.

use super::journal::{Journal, View};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

mod client;
mod commands;
mod telling;

/// A client, by the number that the history gives it.
pub type ClientNumber = usize;

/// Moments are nanoseconds.
pub const SECOND: u64 = 1_000_000_000;

/// How the server was started.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub max_job_size: u32,
    pub binlog_file_size: u32,
    pub has_binlog: bool,
    /// Among how many connections each turn is shared.
    pub sharers: usize,
    /// Each turn ends in a sync of the disk.
    pub is_synced_each_turn: bool,
}

#[derive(Clone, Debug)]
pub struct Model {
    rules: Rules,
    /// By rising id.
    pub jobs: Vec<Job>,
    /// As `list-tubes` lists them.
    pub tubes: Vec<Tube>,
    pub clients: BTreeMap<ClientNumber, Client>,
    /// What may be on the disk.
    pub journal: Journal,
    heard: BTreeMap<ClientNumber, Vec<u8>>,
    /// The disk may have no space for a record.
    pub is_space_short: bool,
    /// Nor for that of a delete.
    pub is_space_short_for_deletes: bool,
    pub is_draining: bool,
    pub last_id: u64,
    pub counts: BTreeMap<&'static str, u64>,
    pub total_connections: u64,
    pub last_moment: u64,
    started_at: u64,
    total_jobs: u64,
    timeouts: u64,
    /// How many bytes have been said, and how many jobs kicked, in the present step.
    said: usize,
    kicked: usize,
    /// Rises with each wait, reservation and burial: what came first has the lower one.
    turns: u64,
    wait_results: VecDeque<(ClientNumber, WaitResult)>,
}

#[derive(Clone, Debug)]
pub struct Job {
    pub id: u64,
    pub tube: Rc<str>,
    pub pri: u32,
    pub delay: u32,
    pub ttr: u32,
    /// Without CR LF.
    pub body: Rc<[u8]>,
    pub created: u64,
    pub place: Place,
    pub counts: Counts,
    /// The clock was set meanwhile in such a way that `created` is only a guess.
    pub is_age_unknown: bool,
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
pub enum Place {
    Ready,
    Delayed { due: u64 },
    Reserved { by: ClientNumber, deadline: u64, turn: u64 },
    Buried { turn: u64 },
}

#[derive(Clone, Debug)]
pub struct Tube {
    pub name: Rc<str>,
    /// For how many seconds, and until when.
    pub pause: Option<(u32, u64)>,
    total_jobs: u64,
    pub deletes: u64,
    pauses: u64,
}

#[derive(Clone, Debug)]
pub struct Client {
    pub phase: Phase,
    pub used: Rc<str>,
    pub watched: Vec<Rc<str>>,
    /// Said, and not taken by the client.
    pub output: Vec<u8>,
    /// How much of it was said before this turn.
    pub said_before: usize,
    /// Arrived, and not used.
    input: Vec<u8>,
    has_backlog: bool,
    is_producer: bool,
    is_worker: bool,
    is_half_closed: bool,
    has_input_ended: bool,
}

#[derive(Clone, Debug)]
pub enum Phase {
    Line,
    /// With all of it so far but what is in the input.
    TooLongLine(Vec<u8>),
    Body {
        id: u64,
        pri: u32,
        delay: u32,
        ttr: u32,
        len: usize,
    },
    Unwanted {
        left: usize,
    },
    Waiting {
        turn: u64,
        until: Option<u64>,
    },
    Closing,
}

/// What there is to do for a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Actions {
    pub read: bool,
    pub run: bool,
    pub write: bool,
    pub close: bool,
}

#[derive(Clone, Copy, Debug)]
enum WaitResult {
    Reserved(u64),
    DeadlineSoon,
    TimedOut,
}

impl Job {
    fn is_ready(&self) -> bool {
        self.place == Place::Ready
    }

    /// The deadline and the turn of its reservation, if that is the client's.
    fn held_by(&self, client: ClientNumber) -> Option<(u64, u64)> {
        match self.place {
            Place::Reserved { by, deadline, turn } if by == client => Some((deadline, turn)),
            _ => None,
        }
    }

    fn delayed_in(&self, tube: &str) -> Option<u64> {
        match self.place {
            Place::Delayed { due } if *self.tube == *tube => Some(due),
            _ => None,
        }
    }

    fn buried_in(&self, tube: &str) -> Option<u64> {
        match self.place {
            Place::Buried { turn } if *self.tube == *tube => Some(turn),
            _ => None,
        }
    }

    fn ready_in(&self, tube: &str) -> Option<u32> {
        (self.is_ready() && *self.tube == *tube).then_some(self.pri)
    }

    /// As a restart brings it back.
    pub fn view(&self) -> View {
        View {
            pri: self.pri,
            delay: self.delay,
            ttr: self.ttr,
            created: self.created,
            is_age_unknown: self.is_age_unknown,
            place: if matches!(self.place, Place::Reserved { .. }) {
                Place::Ready
            } else {
                self.place
            },
            counts: self.counts,
            tube: Rc::clone(&self.tube),
            body: Rc::clone(&self.body),
        }
    }
}

impl Model {
    pub fn new(rules: Rules, now: u64) -> Model {
        let default = Tube::new("default");
        Model {
            rules,
            jobs: Vec::new(),
            tubes: vec![default],
            clients: BTreeMap::new(),
            journal: Journal::default(),
            heard: BTreeMap::new(),
            is_space_short: false,
            is_space_short_for_deletes: false,
            is_draining: false,
            last_id: 0,
            counts: BTreeMap::new(),
            total_connections: 0,
            last_moment: now,
            started_at: now,
            total_jobs: 0,
            timeouts: 0,
            said: 0,
            kicked: 0,
            turns: 0,
            wait_results: VecDeque::new(),
        }
    }

    /// What a server knows that has just been started with these jobs.
    pub fn restarted(&self, jobs: Vec<Job>, tubes: &[&str], last_id: u64, now: u64) -> Model {
        Model {
            tubes: tubes.iter().map(|name| Tube::new(name)).collect(),
            turns: self.turns,
            last_id,
            jobs,
            ..Model::new(self.rules, now)
        }
    }

    // ---- What happens ----

    pub fn connect(&mut self, number: ClientNumber) {
        let default: Rc<str> = "default".into();
        let client = Client {
            phase: Phase::Line,
            used: Rc::clone(&default),
            watched: vec![default],
            output: Vec::new(),
            said_before: 0,
            input: Vec::new(),
            has_backlog: false,
            is_producer: false,
            is_worker: false,
            is_half_closed: false,
            has_input_ended: false,
        };
        self.clients.insert(number, client);
        self.total_connections += 1;
    }

    pub fn receive(&mut self, client: ClientNumber, bytes: &[u8], now: u64) {
        self.client(client).input.extend_from_slice(bytes);
        self.resume(client, now);
    }

    pub fn resume(&mut self, client: ClientNumber, now: u64) {
        self.run(client, now);
    }

    pub fn half_close(&mut self, number: ClientNumber) {
        let client = self.client(number);
        client.is_half_closed = true;
        if client.is_waiting() {
            self.answer(number, WaitResult::TimedOut);
        }
        self.deliver();
    }

    pub fn end_input(&mut self, number: ClientNumber) {
        self.client(number).has_input_ended = true;
        self.half_close(number);
    }

    pub fn disconnect(&mut self, number: ClientNumber, now: u64) {
        let gone = self.clients.remove(&number).expect("it was connected");
        let held = self.in_order(|job| job.held_by(number).map(|(_, turn)| turn));
        // Its tubes stay until the last of its jobs is back.
        self.clients.insert(number, Client { phase: Phase::Closing, ..gone.clone() });
        for id in held {
            self.make_ready(id, now);
        }
        let mut watched = gone.watched;
        while !watched.is_empty() {
            let tube = watched.swap_remove(0);
            self.client(number).watched.clone_from(&watched);
            self.remove_if_idle(&tube);
        }
        self.clients.remove(&number);
        self.remove_if_idle(&gone.used);
        self.deliver();
    }

    /// The tubes and the clients for which something is due, the soonest first.
    pub fn due(&self, now: u64) -> (Vec<Rc<str>>, Vec<ClientNumber>) {
        let mut tubes: Vec<(u64, Rc<str>)> = Vec::new();
        let mut clients: Vec<(u64, ClientNumber)> = Vec::new();
        for tube in &self.tubes {
            let delays = self.jobs.iter().filter_map(|job| job.delayed_in(&tube.name));
            let first = delays.chain(tube.pause.map(|(_, until)| until)).min();
            tubes.extend(first.filter(|&due| due <= now).map(|due| (due, Rc::clone(&tube.name))));
        }
        for (&number, client) in &self.clients {
            let deadline = self.first_deadline(number);
            let (warning, timeout) = match client.phase {
                Phase::Waiting { until, .. } => {
                    (deadline.map(|it| it.saturating_sub(SECOND)), until)
                }
                _ => (None, None),
            };
            let first = [deadline, warning, timeout].into_iter().flatten().min();
            clients.extend(first.filter(|&due| due <= now).map(|due| (due, number)));
        }
        tubes.sort();
        clients.sort_unstable();
        let tubes = tubes.into_iter().map(|(_, name)| name).collect();
        (tubes, clients.into_iter().map(|(_, number)| number).collect())
    }

    /// Whether somebody waits, so that it matters in which order jobs become ready.
    pub fn is_somebody_waiting(&self) -> bool {
        self.clients.values().any(Client::is_waiting)
    }

    /// Does what is due, in this order.
    pub fn tick(&mut self, tubes: &[Rc<str>], clients: &[ClientNumber], now: u64) {
        for name in tubes {
            let tube = self.tube(name);
            if tube.pause.is_some_and(|(_, until)| until <= now) {
                tube.pause = None;
                self.serve(name, now);
            }
            for id in self.in_order(|job| job.delayed_in(name).filter(|&due| due <= now)) {
                self.job(id).place = Place::Ready;
                self.note(id, false);
                self.make_ready(id, now);
            }
        }
        for &number in clients {
            self.end_ttrs(number, now);
            let deadline = self.first_deadline(number);
            if let Phase::Waiting { until, .. } = self.clients[&number].phase {
                if deadline.is_some_and(|deadline| deadline <= now + SECOND) {
                    self.answer(number, WaitResult::DeadlineSoon);
                } else if until.is_some_and(|until| until <= now) {
                    self.answer(number, WaitResult::TimedOut);
                }
            }
        }
        self.deliver();
    }

    fn end_ttrs(&mut self, number: ClientNumber, now: u64) {
        let is_over = |&(deadline, _): &(u64, u64)| deadline <= now;
        for id in self.in_order(|job| job.held_by(number).filter(is_over)) {
            self.timeouts += 1;
            self.job(id).counts.timeouts += 1;
            self.make_ready(id, now);
            self.note(id, false);
        }
    }

    fn first_deadline(&self, number: ClientNumber) -> Option<u64> {
        let held = self.jobs.iter().filter_map(|job| job.held_by(number));
        held.map(|(deadline, _)| deadline).min()
    }

    // ---- The rules ----

    fn make_ready(&mut self, id: u64, now: u64) {
        let job = self.job(id);
        job.place = Place::Ready;
        let tube = Rc::clone(&job.tube);
        self.serve(&tube, now);
    }

    /// The best ready job of those tubes.
    fn best(&self, is_wanted: impl Fn(&str) -> bool) -> Option<u64> {
        let is_offered = |tube: &Tube| tube.pause.is_none() && is_wanted(&tube.name);
        let offers = self.jobs.iter().filter(|job| {
            job.is_ready()
                && self.tubes.iter().any(|tube| tube.name == job.tube && is_offered(tube))
        });
        offers.min_by_key(|job| (job.pri, job.id)).map(|job| job.id)
    }

    /// Jobs of the tube go to those who have waited longest for one.
    fn serve(&mut self, tube: &str, now: u64) {
        loop {
            let mut waiting: Vec<(u64, ClientNumber)> = Vec::new();
            for (&number, client) in &self.clients {
                if let Phase::Waiting { turn, .. } = client.phase
                    && client.watches(tube)
                {
                    waiting.push((turn, number));
                }
            }
            let Some(&(_, longest)) = waiting.iter().min() else { return };
            let Some(id) = self.best(|name| name == tube) else { return };
            self.hold(id, longest, now);
            self.answer(longest, WaitResult::Reserved(id));
        }
    }

    fn hold(&mut self, id: u64, by: ClientNumber, now: u64) {
        let turn = self.next_turn();
        let job = self.job(id);
        job.place = Place::Reserved { by, deadline: now + u64::from(job.ttr) * SECOND, turn };
        job.counts.reserves += 1;
        self.note(id, false);
    }

    /// It has waited long enough, and will be told why when the others have been served.
    fn answer(&mut self, number: ClientNumber, answer: WaitResult) {
        self.client(number).phase = Phase::Line;
        self.wait_results.push_back((number, answer));
    }

    /// Answers the connections that waited; they run commands in a later iteration. Returns how many
    /// there are.
    fn deliver(&mut self) -> usize {
        let count = self.wait_results.len();
        while let Some((number, answer)) = self.wait_results.pop_front() {
            match answer {
                WaitResult::Reserved(id) => self.say_job(number, "RESERVED", id),
                WaitResult::DeadlineSoon => self.say(number, "DEADLINE_SOON"),
                WaitResult::TimedOut => self.say(number, "TIMED_OUT"),
            }
        }
        count
    }

    /// Somebody has to use or watch a tube, or a job has to be in it.
    fn remove_if_idle(&mut self, name: &str) {
        let is_needed = name == "default"
            || self.jobs.iter().any(|job| *job.tube == *name)
            || self.clients.values().any(|client| *client.used == *name || client.watches(name));
        if !is_needed {
            let place = self.tubes.iter().position(|tube| *tube.name == *name);
            self.tubes.swap_remove(place.expect("it was used until now"));
        }
    }

    fn find_or_make_tube(&mut self, name: &str) -> Rc<str> {
        if !self.has_tube(name) {
            self.tubes.push(Tube::new(name));
        }
        Rc::clone(&self.tube(name).name)
    }

    // ---- Finding ----

    /// The jobs that have a rank, in the order of that.
    fn in_order<R: Ord>(&self, rank: impl Fn(&Job) -> Option<R>) -> Vec<u64> {
        let ranks = self.jobs.iter().filter_map(|job| Some((rank(job)?, job.id)));
        let mut ranks: Vec<(R, u64)> = ranks.collect();
        ranks.sort_unstable();
        ranks.into_iter().map(|(_, id)| id).collect()
    }

    pub fn find(&self, id: u64) -> Option<&Job> {
        let place = self.jobs.binary_search_by_key(&id, |job| job.id).ok()?;
        Some(&self.jobs[place])
    }

    fn job(&mut self, id: u64) -> &mut Job {
        let place = self.jobs.binary_search_by_key(&id, |job| job.id);
        &mut self.jobs[place.expect("the job was just found")]
    }

    fn has_tube(&self, name: &str) -> bool {
        self.tubes.iter().any(|tube| *tube.name == *name)
    }

    fn tube(&mut self, name: &str) -> &mut Tube {
        let tube = self.tubes.iter_mut().find(|tube| *tube.name == *name);
        tube.expect("a tube is there as long as it is needed")
    }

    fn client(&mut self, number: ClientNumber) -> &mut Client {
        self.clients.get_mut(&number).expect("the client is connected")
    }

    fn next_turn(&mut self) -> u64 {
        self.turns += 1;
        self.turns
    }

    fn note(&mut self, id: u64, is_recorded: bool) {
        if self.rules.has_binlog {
            let view = self.find(id).expect("it was just changed").view();
            self.journal.changed(id, view, is_recorded, self.last_moment);
        }
    }
}

impl Tube {
    fn new(name: &str) -> Tube {
        Tube { name: name.into(), pause: None, total_jobs: 0, deletes: 0, pauses: 0 }
    }
}
