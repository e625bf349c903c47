//! Replies and documents, and the values in them that BEHAVIOUR.md leaves open.

use super::super::request::Arguments;
use super::input::Expects;
use super::{
    BodyReply, Call, Client, ClientNumber, Counts, Job, Model, NO_DEADLINE, SECOND, State, Tube,
};
use crate::harness::reply::frame;
use std::rc::Rc;
use std::str::FromStr;

/// The commands that `stats` counts, in its order.
const COUNTERS: &str = "put peek peek-ready peek-delayed peek-buried reserve reserve-with-timeout \
    delete release use watch ignore bury kick touch stats stats-job stats-tube list-tubes \
    list-tube-used list-tubes-watched pause-tube";

impl Model {
    pub(super) fn reply(&mut self, number: ClientNumber, line: &str) {
        self.reply_bytes(number, line.as_bytes());
    }

    fn reply_bytes(&mut self, number: ClientNumber, bytes: &[u8]) {
        let output = &mut self.client(number).output;
        output.extend_from_slice(bytes);
        output.extend_from_slice(b"\r\n");
    }

    /// Replies with a job. Replies of one command follow each other.
    pub(super) fn reply_job(&mut self, number: ClientNumber, word: &str, id: u64) {
        let body = Rc::clone(&self.job(id).body);
        if self.client(number).bodies.is_none() {
            self.begin_body_reply(number);
        }
        if word == "RESERVED" {
            if let Some(reply) = &mut self.client(number).bodies {
                reply.reserved.push(id);
            }
            if self.holds_replies {
                self.set_deadline(id, NO_DEADLINE);
            }
        }
        self.reply(number, &format!("{word} {id} {}", body.len()));
        self.reply_bytes(number, &body);
    }

    /// Notes that the server may have to read the bodies of the reply that begins here.
    pub(super) fn begin_body_reply(&mut self, number: ClientNumber) {
        let asked_at = self.last_command_at;
        let client = self.client(number);
        let start = client.output.len();
        client.bodies =
            Some(BodyReply { start, asked_at, bytes: Vec::new(), reserved: Vec::new() });
    }

    pub(super) fn reply_document(&mut self, call: &Call<'_>, text: &str) {
        self.reply(call.by, &format!("OK {}", text.len()));
        self.reply(call.by, text);
    }

    // ---- Statistics ----

    pub(super) fn stats_job(&mut self, call: &Call<'_>, it: &Arguments) {
        let id = it.ids[0];
        let Some(job) = self.find(id) else { return self.reply(call.by, "NOT_FOUND") };
        let file = if self.has_binlog { call.seen_value("file") } else { 0 };
        let job = self.as_touched(job, call.now, || call.seen_value("time-left"));
        let text = job.document(call.now, file, |key| call.seen_value(key));
        self.reply_document(call, &text);
    }

    pub(super) fn reply_jobs(&mut self, call: &Call<'_>, ids: &[u64], next: u64) {
        let mut text = format!("---\nnext: {next}\n");
        text += if ids.is_empty() { "jobs: []\n" } else { "jobs:\n" };
        for &id in ids {
            let Some(job) = self.find(id) else { continue };
            let shown_left = || call.seen_in_list(id, "time-left");
            let job = &self.as_touched(job, call.now, shown_left);
            let (state, time_left) = job.shown_state(call.now, shown_left);
            let Job { pri, delay, ttr, .. } = job;
            let age = shown_age(job, call.now, || call.seen_in_list(id, "age"));
            let holder = match job.state {
                State::Reserved { by, at, .. } => {
                    let held = shown_secs(at, call.now, || call.seen_in_list(id, "held"));
                    format!(", client: {}, held: {held}", self.client_id(by))
                }
                _ => String::new(),
            };
            let Counts { reserves, timeouts, releases, buries, kicks } = job.counts;
            text += &format!(
                "- {{id: {id}, state: {state}, pri: {pri}, age: {age}, delay: {delay}, ttr: {ttr}, \
                 time-left: {time_left}, bytes: {}, reserves: {reserves}, timeouts: {timeouts}, \
                 releases: {releases}, buries: {buries}, kicks: {kicks}{holder}}}\n",
                job.body.len()
            );
        }
        self.reply_document(call, &text);
    }

    /// Returns the job as it is for other clients. In the middle of a `touch-all` its TTR may have begun again: the
    /// server has then `shown` that all of it is left.
    fn as_touched(&self, job: &Job, now: u64, shown: impl Fn() -> u64) -> Job {
        let mut job = job.clone();
        let ttr = u64::from(job.ttr);
        if let State::Reserved { by, deadline, .. } = &mut job.state
            && self.is_touching_all(*by)
            && shown() + 1 >= ttr
        {
            *deadline = now + ttr * SECOND;
        }
        job
    }

    pub(super) fn reply_clients(
        &mut self,
        call: &Call<'_>,
        clients: &[(u64, ClientNumber)],
        next: u64,
    ) {
        let mut text = format!("---\nnext: {next}\n");
        text += if clients.is_empty() { "clients: []\n" } else { "clients:\n" };
        for &(id, number) in clients {
            let Client { used, watched, opened_at, .. } = &self.clients[&number];
            let age = shown_secs(*opened_at, call.now, || call.seen_in_list(id, "age"));
            let activity = self.activity(number, call);
            let held =
                self.jobs.iter().filter(|it| it.reserved_by(number).is_some()).count() as u64;
            // Those that a flush has deleted are counted until they are freed.
            let counted = || call.seen_in_list(id, "reserved");
            let reserved = if self.flushes.is_empty() { held } else { held.max(counted()) };
            text += &format!(
                "- {{id: {id}, address: \"10.0.0.7:51514\", age: {age}, activity: {activity}, \
                 reserved: {reserved}, watching: {}, using: \"{used}\"}}\n",
                watched.len()
            );
        }
        self.reply_document(call, &text);
    }

    fn activity(&self, number: ClientNumber, call: &Call<'_>) -> &'static str {
        let client = &self.clients[&number];
        let is_busy = number == call.by
            || !client.input.is_empty()
            || !matches!(client.expects, Expects::Line)
            || client.has_batch()
            || client.step.is_some()
            || self.is_flushing(number)
            || self.is_reading(number);
        if client.is_closing {
            "closing"
        } else if !client.output.is_empty() {
            "sending"
        } else if self.is_waiting(number) {
            "waiting"
        } else if is_busy {
            "receiving"
        } else {
            "idle"
        }
    }

    /// Returns the id of a client, also of one that is being closed.
    fn client_id(&self, number: ClientNumber) -> u64 {
        let mut closing = self.closing.iter();
        let open = self.clients.get(&number);
        let client = open.or_else(|| closing.find(|(own, _)| *own == number).map(|(_, it)| it));
        client.expect("a client has reserved the job").id
    }

    pub(super) fn stats_tube(&mut self, call: &Call<'_>, it: &Arguments) {
        let name = it.tube();
        let Some(tube) = self.find_tube(name) else {
            return self.reply(call.by, "NOT_FOUND");
        };
        let [urgent, ready, reserved, delayed, buried] =
            self.jobs_by_state(|job| job.tube == tube.name);
        let clients = || self.clients.iter();
        let using = clients().filter(|(_, client)| client.used == tube.name).count();
        let watching = clients().filter(|(_, client)| client.watches(name)).count();
        let waits = |number| self.is_waiting(number);
        let waiting = clients().filter(|(number, it)| it.watches(name) && waits(**number)).count();
        let (pause, left) = tube
            .pause
            .map_or((0, 0), |(secs, until)| (secs, until.saturating_sub(call.now) / SECOND));
        let Tube { total_jobs, deletes, pauses, .. } = tube;
        let text = format!(
            "---\nname: \"{name}\"\ncurrent-jobs-urgent: {urgent}\ncurrent-jobs-ready: {ready}\n\
             current-jobs-reserved: {reserved}\ncurrent-jobs-delayed: {delayed}\n\
             current-jobs-buried: {buried}\ntotal-jobs: {total_jobs}\ncurrent-using: {using}\n\
             current-watching: {watching}\ncurrent-waiting: {waiting}\ncmd-delete: {deletes}\n\
             cmd-pause-tube: {pauses}\npause: {pause}\npause-time-left: {left}\n"
        );
        self.reply_document(call, &text);
    }

    pub(super) fn stats(&mut self, call: &Call<'_>) {
        let [urgent, ready, reserved, delayed, buried] = self.jobs_by_state(|_| true);
        let mut text = format!(
            "---\ncurrent-jobs-urgent: {urgent}\ncurrent-jobs-ready: {ready}\n\
             current-jobs-reserved: {reserved}\ncurrent-jobs-delayed: {delayed}\n\
             current-jobs-buried: {buried}\n"
        );
        for command in COUNTERS.split(' ') {
            text += &format!("cmd-{command}: {}\n", self.counters.get(command).unwrap_or(&0));
        }
        let clients = || self.clients.values();
        text += &format!(
            "job-timeouts: {}\ntotal-jobs: {}\nmax-job-size: {}\ncurrent-tubes: {}\n\
             current-connections: {}\ncurrent-producers: {}\ncurrent-workers: {}\n\
             current-waiting: {}\ntotal-connections: {}\npid: 7\nversion: \"1.13\"\n\
             rusage-utime: 0.000000\nrusage-stime: 0.000000\nuptime: {}\n",
            self.timeouts,
            self.total_jobs,
            self.options.settings.max_job_size,
            self.tubes.len(),
            self.clients.len(),
            clients().filter(|client| client.is_producer).count(),
            clients().filter(|client| client.is_worker).count(),
            self.waiters.len(),
            self.total_connections,
            (call.now - self.started_at) / SECOND,
        );
        for key in ["oldest-index", "current-index", "records-migrated", "records-written"] {
            let key = format!("binlog-{key}");
            let value = if self.has_binlog { call.seen_value(&key) } else { 0 };
            text += &format!("{key}: {value}\n");
        }
        text += &format!(
            "binlog-max-size: {}\ndraining: {}\nid: 0123456789abcdef\nhostname: \"host\"\n\
             os: \"version\"\nplatform: \"machine\"\n",
            self.options.settings.binlog_file_size, self.is_draining
        );
        self.reply_document(call, &text);
    }

    /// Returns how many jobs are ready, reserved, delayed and buried.
    pub fn jobs_in_states(&self) -> [u64; 4] {
        let [_, counts @ ..] = self.jobs_by_state(|_| true);
        counts
    }

    /// Returns how many jobs are urgent, ready, reserved, delayed and buried.
    pub(super) fn jobs_by_state(&self, is_counted: impl Fn(&Job) -> bool) -> [u64; 5] {
        let mut counts = [0; 5];
        for job in self.jobs.iter().filter(|job| is_counted(job)) {
            match job.state {
                State::Ready => {
                    counts[0] += u64::from(job.pri < 1024);
                    counts[1] += 1;
                }
                State::Reserved { .. } => counts[2] += 1,
                State::Delayed { .. } => counts[3] += 1,
                State::Buried { .. } => counts[4] += 1,
            }
        }
        counts
    }

    // ---- Open results ----

    /// Returns whether the server had no space on the disk for the record of the command, if that
    /// is allowed.
    pub(super) fn is_refused(&mut self, call: &Call<'_>) -> bool {
        let is_refused = self.may_refuse_updates && call.seen.starts_with(b"OUT_OF_MEMORY\r\n");
        self.refusals += u64::from(is_refused);
        is_refused
    }
}

impl Job {
    /// Returns the document of `stats-job`. The server may have `shown` another number where it is open.
    pub fn document(&self, now: u64, file: u64, shown: impl Fn(&str) -> u64) -> String {
        let (state, time_left) = self.shown_state(now, || shown("time-left"));
        let age = shown_age(self, now, || shown("age"));
        let Job { id, tube, pri, delay, ttr, .. } = self;
        let Counts { reserves, timeouts, releases, buries, kicks } = self.counts;
        format!(
            "---\nid: {id}\ntube: \"{tube}\"\nstate: {state}\npri: {pri}\nage: {age}\n\
             delay: {delay}\nttr: {ttr}\ntime-left: {time_left}\nfile: {file}\n\
             reserves: {reserves}\ntimeouts: {timeouts}\nreleases: {releases}\n\
             buries: {buries}\nkicks: {kicks}\n"
        )
    }

    /// Returns the state and the seconds left, as `stats-job` shows them.
    pub(super) fn shown_state(&self, now: u64, shows: impl FnOnce() -> u64) -> (&'static str, u64) {
        let left = |at: u64| shown_secs(now, at, shows);
        match self.state {
            State::Ready => ("ready", 0),
            State::Delayed { due } => ("delayed", left(due)),
            // All of the TTR is left while the disk reads the body.
            State::Reserved { deadline: NO_DEADLINE, .. } => ("reserved", u64::from(self.ttr)),
            State::Reserved { deadline, .. } => ("reserved", left(deadline)),
            State::Buried { .. } => ("buried", 0),
        }
    }
}

impl Call<'_> {
    /// Returns whether the server's reply is this line.
    pub(super) fn has_seen(&self, line: &str) -> bool {
        self.seen.strip_prefix(line.as_bytes()).is_some_and(|rest| rest.starts_with(b"\r\n"))
    }

    /// Returns the number behind `word`, with which the server's reply begins.
    pub(super) fn seen_number(&self, word: &[u8]) -> Option<usize> {
        leading_number(self.seen.strip_prefix(word)?)
    }

    /// Returns the first job of the batch that the server has sent.
    pub(super) fn seen_reserved(&self) -> Option<u64> {
        leading_number(self.seen_behind("RESERVED ")?)
    }

    /// Returns a value of the document that the server has sent.
    fn seen_value(&self, key: &str) -> u64 {
        let line = format!("\n{key}: ");
        self.seen_behind(&line).and_then(leading_number).unwrap_or(0)
    }

    /// Returns a number of a job in the list that the server has sent.
    fn seen_in_list(&self, id: u64, key: &str) -> u64 {
        let line = self.seen_behind(&format!("\n- {{id: {id}, ")).unwrap_or_default();
        let line = Call { seen: line, ..*self };
        line.seen_behind(&format!(" {key}: ")).and_then(leading_number).unwrap_or(0)
    }

    /// Returns what the server has sent behind the first such text.
    fn seen_behind(&self, text: &str) -> Option<&[u8]> {
        let at = self.seen.windows(text.len()).position(|window| window == text.as_bytes())?;
        Some(&self.seen[at + text.len()..])
    }
}

/// The moments of the engine and of the model may be this far apart: the engine gives the commands of an
/// iteration, and the steps of a command, moments that differ by a nanosecond.
const MOST_APART_NS: u64 = 100_000;

/// Returns the age of a job in seconds, or what the server `shows` where the model cannot know it.
fn shown_age(job: &Job, now: u64, shows: impl FnOnce() -> u64) -> u64 {
    if job.is_age_unknown { shows() } else { shown_secs(job.created, now, shows) }
}

/// Returns the whole seconds between two moments, or what the server `shows` if that may be on the other side
/// of a whole second.
fn shown_secs(from: u64, to: u64, shows: impl FnOnce() -> u64) -> u64 {
    let span = to.saturating_sub(from);
    let (least, most) =
        (span.saturating_sub(MOST_APART_NS) / SECOND, (span + MOST_APART_NS) / SECOND);
    if least == most { least } else { shows().clamp(least, most) }
}

fn leading_number<T: FromStr>(bytes: &[u8]) -> Option<T> {
    let digits = bytes.iter().take_while(|byte| byte.is_ascii_digit()).count();
    str::from_utf8(&bytes[..digits]).ok()?.parse().ok()
}

pub(super) fn list<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let mut text = "---\n".to_owned();
    for name in names {
        text += &format!("- {name}\n");
    }
    text
}

/// Returns a reply to `peek` or `peek-batch` without the deleted jobs that `seen` does not have, or `None` if
/// it has them all.
pub(super) fn without_deleted(
    reply: &[u8],
    seen: &[u8],
    is_there: impl Fn(u64) -> bool,
) -> Option<Vec<u8>> {
    let is_found = |bytes: &[u8]| leading_number::<u64>(bytes.strip_prefix(b"FOUND ")?);
    if let Some(id) = is_found(reply) {
        return (!is_there(id) && seen.starts_with(b"NOT_FOUND\r\n"))
            .then(|| b"NOT_FOUND\r\n".to_vec());
    }
    let next = str::from_utf8(frame(reply)?.line).ok()?.strip_prefix("FOUND_BATCH ")?;
    let (_, next) = next.split_once(' ')?;
    let (mut count, mut jobs) = (0, Vec::new());
    let mut rest = &reply[frame(reply)?.len..];
    while let (Some(id), Some(job)) = (is_found(rest), frame(rest)) {
        let head = &rest[..job.line.len() + 2];
        if is_there(id) || seen.windows(head.len()).any(|window| window == head) {
            count += 1;
            jobs.extend_from_slice(&rest[..job.len]);
        }
        rest = &rest[job.len..];
    }
    Some([format!("FOUND_BATCH {count} {next}\r\n").as_bytes(), &jobs].concat())
}
