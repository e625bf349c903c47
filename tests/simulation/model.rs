//! A beanstalkd that is slow and obvious: everything is looked for anew each time, nothing is
//! kept that could be counted. It predicts every byte that the server says.
//!
//! It follows `BEHAVIOUR` and beanstalkd-protocol(7), and shares no code with the engine. What it
//! cannot know (in which file a job is; whether a disk that is limited has space) it reads off
//! what was really said, within the limits of what may be said.

use super::journal::{Journal, View};
use super::words::{self, Asked, COUNTERS};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

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
    answers: VecDeque<(ClientNumber, Answer)>,
    answered: VecDeque<ClientNumber>,
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
    is_held_up: bool,
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
pub struct Wants {
    pub input: bool,
    pub resume: bool,
    pub output: bool,
    pub end: bool,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Reserved(u64),
    DeadlineSoon,
    TimedOut,
}

/// One thing that came out of the bytes of a client.
enum Step {
    Line(Vec<u8>),
    TooLong(Vec<u8>),
    Body(Vec<u8>),
    UnwantedEnds,
}

/// A client that leaves so much unread is not listened to.
const OUTPUT_LIMIT: usize = 256 * 1024;
/// How much work a turn has for all, and for each at least.
const WORK_PER_TURN: usize = 1024;
const SMALLEST_SHARE: usize = 16;
const OUTPUT_PER_WORK: usize = 128;
/// With its CR LF.
const LINE_LIMIT: usize = 224;

impl Client {
    fn takes_commands(&self) -> bool {
        !matches!(self.phase, Phase::Waiting { .. } | Phase::Closing)
            && self.output.len() < OUTPUT_LIMIT
    }

    pub fn wants(&self) -> Wants {
        let is_over = match self.phase {
            Phase::Closing => true,
            Phase::Waiting { .. } => false,
            _ => self.has_input_ended && !self.is_held_up,
        };
        Wants {
            input: self.takes_commands() && !self.is_held_up && !self.has_input_ended,
            resume: self.takes_commands() && self.is_held_up,
            output: !self.output.is_empty(),
            end: is_over && self.output.is_empty(),
        }
    }

    fn watches(&self, tube: &str) -> bool {
        self.watched.iter().any(|name| **name == *tube)
    }

    fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting { .. })
    }

    fn next_step(&mut self) -> Option<Step> {
        if !self.takes_commands() {
            return None;
        }
        match self.phase {
            Phase::Line | Phase::TooLongLine(_) => self.next_line(),
            Phase::Body { len, .. } => {
                (self.input.len() >= len + 2).then(|| Step::Body(self.take(len + 2)))
            }
            Phase::Unwanted { left } => {
                let taken = left.min(self.input.len());
                self.take(taken);
                self.phase = Phase::Unwanted { left: left - taken };
                (left == taken).then_some(Step::UnwantedEnds)
            }
            Phase::Waiting { .. } | Phase::Closing => None,
        }
    }

    fn next_line(&mut self) -> Option<Step> {
        let end = self.input.windows(2).position(|pair| pair == b"\r\n");
        let (was_too_long, mut line) = match std::mem::replace(&mut self.phase, Phase::Line) {
            Phase::TooLongLine(line) => (true, line),
            _ => (false, Vec::new()),
        };
        if let Some(end) = end {
            line.extend(self.take(end + 2));
            line.truncate(line.len() - 2);
            let is_too_long = was_too_long || end + 2 > LINE_LIMIT;
            return Some(if is_too_long { Step::TooLong(line) } else { Step::Line(line) });
        }
        if was_too_long || self.input.len() >= LINE_LIMIT {
            // All but what may be half of its end.
            let kept = usize::from(self.input.ends_with(b"\r"));
            line.extend(self.take(self.input.len() - kept));
            self.phase = Phase::TooLongLine(line);
        }
        None
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        self.input.drain(..count).collect()
    }
}

impl Job {
    fn is_ready(&self) -> bool {
        self.place == Place::Ready
    }

    fn is_held_by(&self, client: ClientNumber) -> bool {
        matches!(self.place, Place::Reserved { by, .. } if by == client)
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
            answers: VecDeque::new(),
            answered: VecDeque::new(),
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
            is_held_up: false,
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
        self.run_answered(now);
    }

    pub fn half_close(&mut self, number: ClientNumber, now: u64) {
        let client = self.client(number);
        client.is_half_closed = true;
        if client.is_waiting() {
            self.answer(number, Answer::TimedOut);
        }
        self.settle(now);
    }

    pub fn end_input(&mut self, number: ClientNumber, now: u64) {
        self.client(number).has_input_ended = true;
        self.half_close(number, now);
    }

    pub fn disconnect(&mut self, number: ClientNumber, now: u64) {
        let gone = self.clients.remove(&number).expect("it was connected");
        let mut held: Vec<(u64, u64)> = Vec::new();
        for job in &self.jobs {
            if let Place::Reserved { by, turn, .. } = job.place
                && by == number
            {
                held.push((turn, job.id));
            }
        }
        held.sort_unstable();
        // Its tubes stay until the last of its jobs is back.
        self.clients.insert(number, Client { phase: Phase::Closing, ..gone.clone() });
        for (_, id) in held {
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
        self.settle(now);
    }

    pub fn drain(&mut self) {
        self.is_draining = true;
    }

    /// The tubes and the clients for which something is due, the soonest first.
    pub fn due(&self, now: u64) -> (Vec<Rc<str>>, Vec<ClientNumber>) {
        let mut tubes: Vec<(u64, Rc<str>)> = Vec::new();
        let mut clients: Vec<(u64, ClientNumber)> = Vec::new();
        for tube in &self.tubes {
            let delays = self.jobs.iter().filter_map(|job| match job.place {
                Place::Delayed { due } if job.tube == tube.name => Some(due),
                _ => None,
            });
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
            let mut due: Vec<(u64, u64)> = Vec::new();
            for job in self.jobs.iter().filter(|job| job.tube == *name) {
                match job.place {
                    Place::Delayed { due: at } if at <= now => due.push((at, job.id)),
                    _ => {}
                }
            }
            due.sort_unstable();
            for (_, id) in due {
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
                    self.answer(number, Answer::DeadlineSoon);
                } else if until.is_some_and(|until| until <= now) {
                    self.answer(number, Answer::TimedOut);
                }
            }
        }
        self.settle(now);
    }

    fn end_ttrs(&mut self, number: ClientNumber, now: u64) {
        let mut over: Vec<(u64, u64, u64)> = Vec::new();
        for job in &self.jobs {
            match job.place {
                Place::Reserved { by, deadline, turn } if by == number && deadline <= now => {
                    over.push((deadline, turn, job.id));
                }
                _ => {}
            }
        }
        over.sort_unstable();
        for (_, _, id) in over {
            self.timeouts += 1;
            self.job(id).counts.timeouts += 1;
            self.make_ready(id, now);
            self.note(id, false);
        }
    }

    fn first_deadline(&self, number: ClientNumber) -> Option<u64> {
        let deadlines = self.jobs.iter().filter_map(|job| match job.place {
            Place::Reserved { by, deadline, .. } if by == number => Some(deadline),
            _ => None,
        });
        deadlines.min()
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
            self.answer(longest, Answer::Reserved(id));
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
    fn answer(&mut self, number: ClientNumber, answer: Answer) {
        self.client(number).phase = Phase::Line;
        self.answers.push_back((number, answer));
    }

    fn deliver(&mut self) {
        while let Some((number, answer)) = self.answers.pop_front() {
            match answer {
                Answer::Reserved(id) => self.say_job(number, "RESERVED", id),
                Answer::DeadlineSoon => self.say(number, "DEADLINE_SOON"),
                Answer::TimedOut => self.say(number, "TIMED_OUT"),
            }
            self.answered.push_back(number);
        }
    }

    fn settle(&mut self, now: u64) {
        self.deliver();
        self.run_answered(now);
    }

    fn run_answered(&mut self, now: u64) {
        while let Some(number) = self.answered.pop_front() {
            if self.clients[&number].wants().resume {
                self.run(number, now);
            }
        }
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

    // ---- Commands ----

    /// Each has its share of a turn: so many pieces of work. Some commands are several.
    fn run(&mut self, number: ClientNumber, now: u64) {
        let mut share = (WORK_PER_TURN / self.rules.sharers).max(SMALLEST_SHARE);
        while share > 0 {
            let Some(step) = self.client(number).next_step() else { break };
            (self.said, self.kicked) = (0, 0);
            // Each has a moment of its own.
            let now = now.max(self.last_moment + 1);
            self.last_moment = now;
            match step {
                Step::Line(line) => self.execute(number, words::read(&line), now),
                Step::TooLong(line) if words::is_from_browser(&line) => {
                    self.execute(number, Asked::FromBrowser, now);
                }
                Step::TooLong(_) => self.say(number, "BAD_FORMAT"),
                Step::Body(bytes) => self.put(number, &bytes, now),
                Step::UnwantedEnds => {
                    self.client(number).phase = Phase::Line;
                    self.say(number, "JOB_TOO_BIG");
                }
            }
            self.deliver();
            share = share.saturating_sub(1 + self.said / OUTPUT_PER_WORK + self.kicked);
        }
        let client = self.client(number);
        let has_more = !client.input.is_empty();
        client.is_held_up = has_more && (share == 0 || !client.takes_commands());
    }

    fn execute(&mut self, number: ClientNumber, asked: Asked, now: u64) {
        if let Some(word) = asked.counter() {
            *self.counts.entry(word).or_default() += 1;
        }
        match asked {
            Asked::Put { pri, delay, ttr, len, is_followed } => {
                self.begin_put(number, (pri, delay, ttr), len, is_followed);
            }
            Asked::Reserve => self.reserve(number, None, now),
            Asked::ReserveWithTimeout(secs) => self.reserve(number, Some(secs), now),
            Asked::ReserveJob(id) => match self.find(id).map(|job| job.place) {
                None | Some(Place::Reserved { .. }) => self.say(number, "NOT_FOUND"),
                Some(_) => {
                    self.client(number).is_worker = true;
                    self.hold(id, number, now);
                    self.say_job(number, "RESERVED", id);
                }
            },
            Asked::Delete(id) => self.delete(number, id),
            Asked::Release { id, pri, delay } => self.release(number, id, pri, delay, now),
            Asked::Bury { id, pri } => self.bury(number, id, pri),
            Asked::Touch(id) => self.touch(number, id, now),
            Asked::Kick(bound) => self.kick(number, bound, now),
            Asked::KickJob(id) => self.kick_job(number, id, now),
            Asked::Use(name) => {
                let tube = self.find_or_make_tube(&name);
                let left = std::mem::replace(&mut self.client(number).used, tube);
                self.remove_if_idle(&left);
                self.say(number, &format!("USING {name}"));
            }
            Asked::Watch(name) => {
                let tube = self.find_or_make_tube(&name);
                let client = self.client(number);
                if !client.watches(&name) {
                    client.watched.push(tube);
                }
                self.say_watching(number);
            }
            Asked::Ignore(name) => self.ignore(number, &name),
            Asked::PauseTube { tube, secs } => self.pause(number, tube.as_deref(), secs, now),
            Asked::Peek(id) => self.say_found(number, self.find(id).map(|job| job.id)),
            Asked::PeekReady => self.say_found(number, self.first_ready(number)),
            Asked::PeekDelayed => self.say_found(number, self.first_delayed(number)),
            Asked::PeekBuried => self.say_found(number, self.first_buried(number)),
            Asked::Stats => self.say_stats(number, now),
            Asked::StatsJob(id) => self.say_stats_job(number, id, now),
            Asked::StatsTube(name) => self.say_stats_tube(number, &name, now),
            Asked::ListTubes => {
                let names = self.tubes.iter().map(|tube| &*tube.name);
                let list = list(names);
                self.say_document(number, &list);
            }
            Asked::ListTubesWatched => {
                let list = list(self.clients[&number].watched.iter().map(|name| &**name));
                self.say_document(number, &list);
            }
            Asked::ListTubeUsed => {
                let line = format!("USING {}", self.clients[&number].used);
                self.say(number, &line);
            }
            Asked::Quit => self.client(number).phase = Phase::Closing,
            Asked::BadFormat => self.say(number, "BAD_FORMAT"),
            Asked::Unknown => self.say(number, "UNKNOWN_COMMAND"),
            Asked::FromBrowser => {
                self.say(number, "UNKNOWN_COMMAND");
                self.client(number).phase = Phase::Closing;
            }
        }
    }

    fn begin_put(
        &mut self,
        number: ClientNumber,
        (pri, delay, ttr): (u32, u32, u32),
        len: u32,
        is_followed: bool,
    ) {
        let size = len as usize;
        if len > self.rules.max_job_size {
            self.client(number).phase = Phase::Unwanted { left: size + 2 };
        } else if is_followed {
            self.say(number, "BAD_FORMAT");
        } else {
            self.last_id += 1;
            let id = self.last_id;
            let client = self.client(number);
            client.is_producer = true;
            client.phase = Phase::Body { id, pri, delay, ttr: ttr.max(1), len: size };
        }
    }

    fn put(&mut self, number: ClientNumber, bytes: &[u8], now: u64) {
        let phase = std::mem::replace(&mut self.client(number).phase, Phase::Line);
        let Phase::Body { id, pri, delay, ttr, .. } = phase else { unreachable!("a body ends") };
        let Some(body) = bytes.strip_suffix(b"\r\n") else {
            return self.say(number, "EXPECTED_CRLF");
        };
        if self.is_draining {
            return self.say(number, "DRAINING");
        }
        if self.is_refused(number) {
            return self.say(number, "OUT_OF_MEMORY");
        }
        let name = Rc::clone(&self.clients[&number].used);
        self.tube(&name).total_jobs += 1;
        self.total_jobs += 1;
        let place = self.delayed_or_ready(delay, now);
        let job = Job {
            id,
            tube: name,
            pri,
            delay,
            ttr,
            body: body.into(),
            created: now,
            place: Place::Ready,
            counts: Counts::default(),
            is_age_unknown: false,
        };
        let at = self.jobs.partition_point(|other| other.id < id);
        self.jobs.insert(at, job);
        self.send(id, place, now);
        self.say(number, &format!("INSERTED {id}"));
    }

    fn delayed_or_ready(&self, delay: u32, now: u64) -> Place {
        if delay == 0 {
            Place::Ready
        } else {
            Place::Delayed { due: now + u64::from(delay) * SECOND }
        }
    }

    /// The job goes there; that is recorded.
    fn send(&mut self, id: u64, place: Place, now: u64) {
        self.job(id).place = place;
        self.note(id, true);
        if place == Place::Ready {
            self.make_ready(id, now);
        }
    }

    fn reserve(&mut self, number: ClientNumber, timeout: Option<u32>, now: u64) {
        self.client(number).is_worker = true;
        let client = &self.clients[&number];
        if let Some(id) = self.best(|name| client.watches(name)) {
            self.hold(id, number, now);
            return self.say_job(number, "RESERVED", id);
        }
        if self.first_deadline(number).is_some_and(|deadline| deadline <= now + SECOND) {
            return self.say(number, "DEADLINE_SOON");
        }
        if timeout == Some(0) || client.is_half_closed {
            return self.say(number, "TIMED_OUT");
        }
        let turn = self.next_turn();
        let until = timeout.map(|secs| now + u64::from(secs) * SECOND);
        self.client(number).phase = Phase::Waiting { turn, until };
    }

    fn delete(&mut self, number: ClientNumber, id: u64) {
        let Some(job) = self.find(id) else { return self.say(number, "NOT_FOUND") };
        if matches!(job.place, Place::Reserved { by, .. } if by != number) {
            return self.say(number, "NOT_FOUND");
        }
        if self.is_space_short_for_deletes && self.is_refused(number) {
            return self.say(number, "OUT_OF_MEMORY");
        }
        let name = Rc::clone(&job.tube);
        if self.rules.has_binlog {
            self.journal.deleted(id, self.last_moment);
        }
        self.jobs.retain(|job| job.id != id);
        self.tube(&name).deletes += 1;
        self.remove_if_idle(&name);
        self.say(number, "DELETED");
    }

    fn release(&mut self, number: ClientNumber, id: u64, pri: u32, delay: u32, now: u64) {
        if !self.find(id).is_some_and(|job| job.is_held_by(number)) {
            return self.say(number, "NOT_FOUND");
        }
        if self.is_refused(number) {
            return self.say(number, "OUT_OF_MEMORY");
        }
        let place = self.delayed_or_ready(delay, now);
        let job = self.job(id);
        job.pri = pri;
        job.delay = delay;
        job.counts.releases += 1;
        self.send(id, place, now);
        self.say(number, "RELEASED");
    }

    fn bury(&mut self, number: ClientNumber, id: u64, pri: u32) {
        if !self.find(id).is_some_and(|job| job.is_held_by(number)) {
            return self.say(number, "NOT_FOUND");
        }
        if self.is_refused(number) {
            return self.say(number, "OUT_OF_MEMORY");
        }
        let turn = self.next_turn();
        let job = self.job(id);
        job.pri = pri;
        job.counts.buries += 1;
        job.place = Place::Buried { turn };
        self.note(id, true);
        self.say(number, "BURIED");
    }

    fn touch(&mut self, number: ClientNumber, id: u64, now: u64) {
        match self.find(id).map(|job| (job.place, job.ttr)) {
            Some((Place::Reserved { by, turn, .. }, ttr)) if by == number => {
                let deadline = now + u64::from(ttr) * SECOND;
                self.job(id).place = Place::Reserved { by, turn, deadline };
                self.say(number, "TOUCHED");
            }
            _ => self.say(number, "NOT_FOUND"),
        }
    }

    fn kick(&mut self, number: ClientNumber, bound: u32, now: u64) {
        let tube = Rc::clone(&self.clients[&number].used);
        let in_tube = || self.jobs.iter().filter(|job| job.tube == tube);
        let mut buried: Vec<(u64, u64)> = Vec::new();
        let mut delayed: Vec<(u64, u64)> = Vec::new();
        for job in in_tube() {
            match job.place {
                Place::Buried { turn } => buried.push((turn, job.id)),
                Place::Delayed { due } => delayed.push((due, job.id)),
                Place::Ready | Place::Reserved { .. } => {}
            }
        }
        let mut kicked = if buried.is_empty() { delayed } else { buried };
        kicked.sort_unstable();
        kicked.truncate(bound as usize);
        if !kicked.is_empty() && self.is_refused(number) {
            return self.say(number, "OUT_OF_MEMORY");
        }
        if self.is_space_short
            && let Some(fewer) = self.number_heard(number, b"KICKED ")
        {
            kicked.truncate(fewer.max(1));
        }
        for &(_, id) in &kicked {
            self.job(id).counts.kicks += 1;
            self.send(id, Place::Ready, now);
        }
        self.kicked = kicked.len();
        self.say(number, &format!("KICKED {}", kicked.len()));
    }

    fn kick_job(&mut self, number: ClientNumber, id: u64, now: u64) {
        match self.find(id).map(|job| job.place) {
            Some(Place::Buried { .. } | Place::Delayed { .. }) => {
                if self.is_refused(number) {
                    return self.say(number, "OUT_OF_MEMORY");
                }
                self.job(id).counts.kicks += 1;
                self.send(id, Place::Ready, now);
                self.say(number, "KICKED");
            }
            _ => self.say(number, "NOT_FOUND"),
        }
    }

    fn ignore(&mut self, number: ClientNumber, name: &str) {
        let client = self.client(number);
        let place = client.watched.iter().position(|watched| **watched == *name);
        if let Some(place) = place {
            if client.watched.len() == 1 {
                return self.say(number, "NOT_IGNORED");
            }
            client.watched.swap_remove(place);
            self.remove_if_idle(name);
        }
        self.say_watching(number);
    }

    fn pause(&mut self, number: ClientNumber, name: Option<&str>, secs: u32, now: u64) {
        let Some(name) = name else { return self.say(number, "BAD_FORMAT") };
        if !self.has_tube(name) {
            return self.say(number, "NOT_FOUND");
        }
        let tube = self.tube(name);
        tube.pauses += 1;
        tube.pause = (secs > 0).then_some((secs, now + u64::from(secs) * SECOND));
        if secs == 0 {
            self.serve(name, now);
        }
        self.say(number, "PAUSED");
    }

    // ---- Finding ----

    fn first_ready(&self, number: ClientNumber) -> Option<u64> {
        let tube = &self.clients[&number].used;
        let ready = self.jobs.iter().filter(|job| job.tube == *tube && job.is_ready());
        ready.min_by_key(|job| (job.pri, job.id)).map(|job| job.id)
    }

    fn first_delayed(&self, number: ClientNumber) -> Option<u64> {
        let tube = &self.clients[&number].used;
        let delayed = self.jobs.iter().filter_map(|job| match job.place {
            Place::Delayed { due } if job.tube == *tube => Some((due, job.id)),
            _ => None,
        });
        delayed.min().map(|(_, id)| id)
    }

    fn first_buried(&self, number: ClientNumber) -> Option<u64> {
        let tube = &self.clients[&number].used;
        let buried = self.jobs.iter().filter_map(|job| match job.place {
            Place::Buried { turn } if job.tube == *tube => Some((turn, job.id)),
            _ => None,
        });
        buried.min().map(|(_, id)| id)
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

    // ---- Speaking ----

    fn say(&mut self, number: ClientNumber, line: &str) {
        self.say_bytes(number, line.as_bytes());
    }

    fn say_bytes(&mut self, number: ClientNumber, bytes: &[u8]) {
        let output = &mut self.client(number).output;
        output.extend_from_slice(bytes);
        output.extend_from_slice(b"\r\n");
        self.said += bytes.len() + 2;
    }

    fn say_watching(&mut self, number: ClientNumber) {
        let line = format!("WATCHING {}", self.clients[&number].watched.len());
        self.say(number, &line);
    }

    fn say_job(&mut self, number: ClientNumber, word: &str, id: u64) {
        let body = Rc::clone(&self.job(id).body);
        self.say(number, &format!("{word} {id} {}", body.len()));
        self.say_bytes(number, &body);
    }

    fn say_found(&mut self, number: ClientNumber, id: Option<u64>) {
        match id {
            Some(id) => self.say_job(number, "FOUND", id),
            None => self.say(number, "NOT_FOUND"),
        }
    }

    fn say_document(&mut self, number: ClientNumber, text: &str) {
        self.say(number, &format!("OK {}", text.len()));
        self.say(number, text);
    }

    fn say_stats_job(&mut self, number: ClientNumber, id: u64, now: u64) {
        let Some(job) = self.find(id) else { return self.say(number, "NOT_FOUND") };
        let left = |at: u64| at.saturating_sub(now) / SECOND;
        let (state, time_left) = match job.place {
            Place::Ready => ("ready", 0),
            Place::Delayed { due } => ("delayed", left(due)),
            Place::Reserved { deadline, .. } => ("reserved", left(deadline)),
            Place::Buried { .. } => ("buried", 0),
        };
        let heard = |key: &str| self.figure_heard(number, key);
        let file = if self.rules.has_binlog { heard("file") } else { 0 };
        let age = if job.is_age_unknown {
            heard("age")
        } else {
            now.saturating_sub(job.created) / SECOND
        };
        let Job { tube, pri, delay, ttr, .. } = job;
        let Counts { reserves, timeouts, releases, buries, kicks } = job.counts;
        let text = format!(
            "---\nid: {id}\ntube: \"{tube}\"\nstate: {state}\npri: {pri}\nage: {age}\n\
             delay: {delay}\nttr: {ttr}\ntime-left: {time_left}\nfile: {file}\n\
             reserves: {reserves}\ntimeouts: {timeouts}\nreleases: {releases}\n\
             buries: {buries}\nkicks: {kicks}\n"
        );
        self.say_document(number, &text);
    }

    fn say_stats_tube(&mut self, number: ClientNumber, name: &str, now: u64) {
        let Some(tube) = self.tubes.iter().find(|tube| *tube.name == *name) else {
            return self.say(number, "NOT_FOUND");
        };
        let [urgent, ready, reserved, delayed, buried] = self.sums(|job| job.tube == tube.name);
        let clients = || self.clients.values();
        let using = clients().filter(|client| client.used == tube.name).count();
        let watching = clients().filter(|client| client.watches(name)).count();
        let waiting =
            clients().filter(|client| client.watches(name) && client.is_waiting()).count();
        let (pause, left) =
            tube.pause.map_or((0, 0), |(secs, until)| (secs, until.saturating_sub(now) / SECOND));
        let Tube { total_jobs, deletes, pauses, .. } = tube;
        let text = format!(
            "---\nname: \"{name}\"\ncurrent-jobs-urgent: {urgent}\ncurrent-jobs-ready: {ready}\n\
             current-jobs-reserved: {reserved}\ncurrent-jobs-delayed: {delayed}\n\
             current-jobs-buried: {buried}\ntotal-jobs: {total_jobs}\ncurrent-using: {using}\n\
             current-watching: {watching}\ncurrent-waiting: {waiting}\ncmd-delete: {deletes}\n\
             cmd-pause-tube: {pauses}\npause: {pause}\npause-time-left: {left}\n"
        );
        self.say_document(number, &text);
    }

    fn say_stats(&mut self, number: ClientNumber, now: u64) {
        let [urgent, ready, reserved, delayed, buried] = self.sums(|_| true);
        let mut text = format!(
            "---\ncurrent-jobs-urgent: {urgent}\ncurrent-jobs-ready: {ready}\n\
             current-jobs-reserved: {reserved}\ncurrent-jobs-delayed: {delayed}\n\
             current-jobs-buried: {buried}\n"
        );
        for word in COUNTERS {
            text += &format!("cmd-{word}: {}\n", self.counts.get(word).unwrap_or(&0));
        }
        let clients = || self.clients.values();
        text += &format!(
            "job-timeouts: {}\ntotal-jobs: {}\nmax-job-size: {}\ncurrent-tubes: {}\n\
             current-connections: {}\ncurrent-producers: {}\ncurrent-workers: {}\n\
             current-waiting: {}\ntotal-connections: {}\npid: 7\nversion: \"1.13\"\n\
             rusage-utime: 0.000000\nrusage-stime: 0.000000\nuptime: {}\n",
            self.timeouts,
            self.total_jobs,
            self.rules.max_job_size,
            self.tubes.len(),
            self.clients.len(),
            clients().filter(|client| client.is_producer).count(),
            clients().filter(|client| client.is_worker).count(),
            clients().filter(|client| client.is_waiting()).count(),
            self.total_connections,
            (now - self.started_at) / SECOND,
        );
        for key in ["oldest-index", "current-index", "records-migrated", "records-written"] {
            let key = format!("binlog-{key}");
            let figure = if self.rules.has_binlog { self.figure_heard(number, &key) } else { 0 };
            text += &format!("{key}: {figure}\n");
        }
        text += &format!(
            "binlog-max-size: {}\ndraining: {}\nid: 0\nhostname: \"here\"\nos: \"#1\"\n\
             platform: \"any\"\n",
            self.rules.binlog_file_size, self.is_draining
        );
        self.say_document(number, &text);
    }

    /// How many jobs are urgent, ready, reserved, delayed and buried.
    fn sums(&self, is_meant: impl Fn(&Job) -> bool) -> [usize; 5] {
        let mut sums = [0; 5];
        for job in self.jobs.iter().filter(|job| is_meant(job)) {
            match job.place {
                Place::Ready => {
                    sums[0] += usize::from(job.pri < 1024);
                    sums[1] += 1;
                }
                Place::Reserved { .. } => sums[2] += 1,
                Place::Delayed { .. } => sums[3] += 1,
                Place::Buried { .. } => sums[4] += 1,
            }
        }
        sums
    }

    // ---- Hints ----

    /// A turn begins; this is what is really said in it, as far as that is known: a hint for what
    /// cannot be predicted.
    pub fn hear(&mut self, heard: BTreeMap<ClientNumber, Vec<u8>>) {
        self.heard = heard;
        for client in self.clients.values_mut() {
            client.said_before = client.output.len();
        }
    }

    /// What was really said where the model goes on.
    fn heard(&self, number: ClientNumber) -> &[u8] {
        let client = &self.clients[&number];
        let said = client.output.len() - client.said_before;
        self.heard.get(&number).and_then(|heard| heard.get(said..)).unwrap_or_default()
    }

    /// Whether the disk had no space for what the client asks, which may be.
    fn is_refused(&self, number: ClientNumber) -> bool {
        self.is_space_short && self.heard(number).starts_with(b"OUT_OF_MEMORY\r\n")
    }

    fn number_heard(&self, number: ClientNumber, word: &[u8]) -> Option<usize> {
        let rest = self.heard(number).strip_prefix(word)?;
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        str::from_utf8(&rest[..digits]).ok()?.parse().ok()
    }

    /// A figure of a document.
    fn figure_heard(&self, number: ClientNumber, key: &str) -> u64 {
        let heard = self.heard(number);
        let line = format!("\n{key}: ");
        let at = heard.windows(line.len()).position(|window| window == line.as_bytes());
        let figure = at.and_then(|at| {
            let rest = &heard[at + line.len()..];
            let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
            str::from_utf8(&rest[..digits]).ok()?.parse().ok()
        });
        figure.unwrap_or(0)
    }
}

impl Tube {
    fn new(name: &str) -> Tube {
        Tube { name: name.into(), pause: None, total_jobs: 0, deletes: 0, pauses: 0 }
    }
}

fn list<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let mut text = "---\n".to_owned();
    for name in names {
        text += &format!("- {name}\n");
    }
    text
}
