//! A chapter of the model: each command, by the book.

use super::super::words::{self, Asked};
use super::client::Step;
use super::telling::list;
use super::{ClientNumber, Counts, Job, Model, Phase, Place, SECOND};
use std::rc::Rc;

/// How much work a turn has for all, and for each at least.
const WORK_PER_TURN: usize = 64;
const WORK_PER_SYNCED_TURN: usize = 1024;
const SMALLEST_SHARE: usize = 16;
/// What it takes to send something to a client that waited.
const WORK_PER_WAKE: usize = 16;
const OUTPUT_PER_WORK: usize = 128;

impl Model {
    /// Each has its share of a turn: so many pieces of work. Some commands are several.
    pub(super) fn run(&mut self, number: ClientNumber, now: u64) {
        let is_synced = self.rules.is_synced_each_turn;
        let work = if is_synced { WORK_PER_SYNCED_TURN } else { WORK_PER_TURN };
        let mut share = (work / self.rules.sharers).max(SMALLEST_SHARE);
        while share > 0 {
            let Some(step) = self.client(number).next_step() else { break };
            (self.said, self.kicked) = (0, 0);
            // Each has a moment of its own.
            let now = now.max(self.last_moment + 1);
            self.last_moment = now;
            match step {
                Step::Line(line) => self.execute(number, words::read(&line), now),
                Step::TooLong(line) if words::is_http(&line) => {
                    self.execute(number, Asked::Http, now);
                }
                Step::TooLong(_) => self.say(number, "BAD_FORMAT"),
                Step::Body(bytes) => self.put(number, &bytes, now),
                Step::UnwantedEnds => {
                    self.client(number).phase = Phase::Line;
                    self.say(number, "JOB_TOO_BIG");
                }
            }
            let wakes = self.deliver() * WORK_PER_WAKE;
            share = share.saturating_sub(1 + self.said / OUTPUT_PER_WORK + self.kicked + wakes);
        }
        let client = self.client(number);
        let has_more = !client.input.is_empty();
        client.has_backlog = has_more && (share == 0 || !client.takes_commands());
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
            Asked::PeekReady => self.say_first(number, Job::ready_in),
            Asked::PeekDelayed => self.say_first(number, Job::delayed_in),
            Asked::PeekBuried => self.say_first(number, Job::buried_in),
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
            Asked::Http => {
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
        if self.find(id).is_none_or(|job| job.held_by(number).is_none()) {
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
        if self.find(id).is_none_or(|job| job.held_by(number).is_none()) {
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
        let mut kicked = self.in_order(|job| job.buried_in(&tube));
        if kicked.is_empty() {
            kicked = self.in_order(|job| job.delayed_in(&tube));
        }
        kicked.truncate(bound as usize);
        if !kicked.is_empty() && self.is_refused(number) {
            return self.say(number, "OUT_OF_MEMORY");
        }
        if self.is_space_short
            && let Some(fewer) = self.number_heard(number, b"KICKED ")
        {
            kicked.truncate(fewer.max(1));
        }
        for &id in &kicked {
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
}
