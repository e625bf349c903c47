//! One function for each command, as BEHAVIOUR.md describes it.

use super::super::request::{PutRest, Request};
use super::input::Expects;
use super::keys::JobKey;
use super::replies::list;
use super::{Call, ClientNumber, Counts, Job, Model, SECOND, State, Waiter};
use std::rc::Rc;

impl Model {
    pub(super) fn execute(&mut self, call: &Call<'_>, request: Request) {
        if let Some(command) = request.counter() {
            *self.counters.entry(command).or_default() += 1;
        }
        match request {
            Request::Put { pri, delay, ttr, len, rest } => {
                self.begin_put(call, None, (pri, delay, ttr), len, rest);
            }
            Request::PutInTube { tube, pri, delay, ttr, len, rest } => {
                self.puts_in_tubes += 1;
                self.begin_put(call, Some(tube), (pri, delay, ttr), len, rest);
            }
            Request::Reserve => self.reserve_best(call, None),
            Request::ReserveWithTimeout(secs) => self.reserve_best(call, Some(secs)),
            Request::ReserveJob(id) => self.reserve_job(call, id),
            Request::ReserveBatch { count, secs } => self.reserve_batch(call, count, secs),
            Request::Delete(id) => self.delete(call, id),
            Request::DeleteBatch(ids) => self.delete_batch(call, &ids),
            Request::Release { id, pri, delay } => self.release(call, id, pri, delay),
            Request::Bury { id, pri } => self.bury(call, id, pri),
            Request::Touch(id) => self.touch_one(call, id),
            Request::TouchAll => self.touch_all(call),
            Request::Kick(bound) => self.kick(call, bound),
            Request::KickJob(id) => self.kick_job(call, id),
            Request::FlushTube(name) => self.flush_tube(call, &name, |_| true),
            Request::FlushBuried(name) => {
                self.flush_tube(call, &name, |state| matches!(state, State::Buried { .. }));
            }
            Request::Use(name) => self.use_tube(call, &name),
            Request::Watch(name) => self.watch(call, &name),
            Request::Ignore(name) => self.ignore(call, &name),
            Request::PauseTube { tube, secs } => self.pause_tube(call, tube.as_deref(), secs),
            Request::Peek(id) => self.peek(call, id),
            Request::PeekReady => self.peek_first(call, Job::ready_in),
            Request::PeekDelayed => self.peek_first(call, Job::delayed_in),
            Request::PeekBuried => self.peek_first(call, Job::buried_in),
            Request::PeekBatch(page) => self.peek_batch(call, &page),
            Request::Stats => self.stats(call),
            Request::StatsJob(id) => self.stats_job(call, id),
            Request::StatsTube(name) => self.stats_tube(call, &name),
            Request::ListJobs(page) => self.list_jobs(call, &page),
            Request::ListTubes => self.list_tubes(call),
            Request::ListTubesWatched => self.list_tubes_watched(call),
            Request::ListTubeUsed => self.list_tube_used(call),
            Request::Quit => self.client(call.by).is_closing = true,
            Request::BadFormat => self.reply(call.by, "BAD_FORMAT"),
            Request::Unknown => self.reply(call.by, "UNKNOWN_COMMAND"),
            Request::Http => self.http(call),
        }
    }

    /// A browser sends more lines: the connection is closed behind the first one.
    pub(super) fn http(&mut self, call: &Call<'_>) {
        self.reply(call.by, "UNKNOWN_COMMAND");
        self.client(call.by).is_closing = true;
    }

    // ---- Put ----

    fn begin_put(
        &mut self,
        call: &Call<'_>,
        tube: Option<String>,
        (pri, delay, ttr): (u32, u32, u32),
        len: u32,
        rest: PutRest,
    ) {
        let is_too_large = len > self.options.max_job_size;
        let len = len as usize;
        if is_too_large {
            self.client(call.by).expects = Expects::TooLargeBody { len };
            return;
        }
        let tag = match rest {
            PutRest::Nothing => None,
            PutRest::Tag(tag) => Some(tag),
            PutRest::Wrong => return self.reply(call.by, "BAD_FORMAT"),
        };
        self.last_id += 1;
        let id = self.last_id;
        let client = self.client(call.by);
        client.is_producer = true;
        client.expects = Expects::Body { id, tube, pri, delay, ttr: ttr.max(1), len, tag };
    }

    pub(super) fn finish_put(&mut self, call: &Call<'_>, put: Expects, bytes: &[u8]) {
        let Expects::Body { id, tube, pri, delay, ttr, tag, .. } = put else {
            unreachable!("a body follows a put")
        };
        let Some(body) = bytes.strip_suffix(b"\r\n") else {
            return self.reply(call.by, "EXPECTED_CRLF");
        };
        if self.is_draining {
            return self.reply(call.by, "DRAINING");
        }
        if let Some(tag) = &tag {
            let used = Rc::clone(&self.clients[&call.by].used);
            let name = tube.as_deref().unwrap_or(&used);
            if let Some(reply) = self.find_key(call, name, &tag.key) {
                return self.reply(call.by, &reply);
            }
        }
        if self.is_refused(call) {
            return self.reply(call.by, "OUT_OF_MEMORY");
        }
        let tube = match tube {
            Some(name) => self.find_or_create_tube(&name),
            None => Rc::clone(&self.clients[&call.by].used),
        };
        self.tube(&tube).total_jobs += 1;
        self.total_jobs += 1;
        let job = Job {
            id,
            tube,
            pri,
            delay,
            ttr,
            body: body.into(),
            created: call.now,
            state: State::Ready,
            counts: Counts::default(),
            returns: 0,
            is_age_unknown: false,
            key: JobKey::new(tag.as_ref()),
            changed: 0,
        };
        let index = self.jobs.partition_point(|other| other.id < id);
        self.jobs.insert(index, job);
        self.move_to(id, delayed_or_ready(delay, call.now), call.now);
        self.reply(call.by, &format!("INSERTED {id}"));
    }

    // ---- Reserve ----

    fn reserve_best(&mut self, call: &Call<'_>, timeout: Option<u32>) {
        self.client(call.by).is_worker = true;
        let client = &self.clients[&call.by];
        if let Some(id) = self.first_ready(|tube| client.watches(tube)) {
            self.reserve(id, call.by, call.now);
            self.reply_job(call.by, "RESERVED", id);
        } else if self.is_deadline_soon(call.by, call.now) {
            self.reply(call.by, "DEADLINE_SOON");
        } else if timeout == Some(0) || client.is_half_closed {
            self.reply(call.by, "TIMED_OUT");
        } else {
            let until = timeout.map(|secs| call.now + u64::from(secs) * SECOND);
            let seq = self.next_seq();
            self.waiters.push(Waiter { client: call.by, until, batch: None, seq });
        }
    }

    fn reserve_job(&mut self, call: &Call<'_>, id: u64) {
        match self.find(id).map(|job| job.state) {
            None | Some(State::Reserved { .. }) => self.reply(call.by, "NOT_FOUND"),
            // A flush of buried jobs must not delete it: that is recorded.
            Some(State::Buried { .. }) if self.is_refused(call) => {
                self.reply(call.by, "OUT_OF_MEMORY");
            }
            Some(State::Ready | State::Delayed { .. } | State::Buried { .. }) => {
                self.client(call.by).is_worker = true;
                self.reserve(id, call.by, call.now);
                self.reply_job(call.by, "RESERVED", id);
            }
        }
    }

    // ---- Commands for one job ----

    fn delete(&mut self, call: &Call<'_>, id: u64) {
        if !self.can_delete(call.by, id) {
            return self.reply(call.by, "NOT_FOUND");
        }
        if self.may_refuse_deletes && self.is_refused(call) {
            return self.reply(call.by, "OUT_OF_MEMORY");
        }
        self.remove_job(id);
        self.reply(call.by, "DELETED");
    }

    /// Returns whether the job exists, and no other client has reserved it.
    pub(super) fn can_delete(&self, by: ClientNumber, id: u64) -> bool {
        let is_others =
            |job: &Job| matches!(job.state, State::Reserved { by: other, .. } if other != by);
        self.find(id).is_some_and(|job| !is_others(job))
    }

    pub(super) fn remove_job(&mut self, id: u64) {
        let job = self.job(id).clone();
        let tube = Rc::clone(&job.tube);
        self.jobs.retain(|job| job.id != id);
        self.keep_key(&job, self.last_command_at, false);
        self.note(id, true, self.last_command_at);
        self.tube(&tube).deletes += 1;
        self.remove_if_idle(&tube);
    }

    fn release(&mut self, call: &Call<'_>, id: u64, pri: u32, delay: u32) {
        if !self.has_reserved(call.by, id) {
            return self.reply(call.by, "NOT_FOUND");
        }
        if self.is_refused(call) {
            return self.reply(call.by, "OUT_OF_MEMORY");
        }
        let job = self.job(id);
        job.pri = pri;
        job.delay = delay;
        job.counts.releases += 1;
        self.move_to(id, delayed_or_ready(delay, call.now), call.now);
        self.reply(call.by, "RELEASED");
    }

    fn bury(&mut self, call: &Call<'_>, id: u64, pri: u32) {
        if !self.has_reserved(call.by, id) {
            return self.reply(call.by, "NOT_FOUND");
        }
        if self.is_refused(call) {
            return self.reply(call.by, "OUT_OF_MEMORY");
        }
        let seq = self.next_seq();
        let job = self.job(id);
        job.pri = pri;
        job.counts.buries += 1;
        self.move_to(id, State::Buried { seq }, call.now);
        self.reply(call.by, "BURIED");
    }

    fn touch_one(&mut self, call: &Call<'_>, id: u64) {
        if !self.has_reserved(call.by, id) {
            return self.reply(call.by, "NOT_FOUND");
        }
        self.touch(call, &[id]);
        self.reply(call.by, "TOUCHED");
    }

    /// Begins the TTRs of reserved jobs again.
    pub(super) fn touch(&mut self, call: &Call<'_>, ids: &[u64]) {
        for &id in ids {
            let job = self.job(id);
            let ttr = u64::from(job.ttr);
            if let State::Reserved { deadline, .. } = &mut job.state {
                *deadline = call.now + ttr * SECOND;
            }
        }
    }

    pub(super) fn has_reserved(&self, by: ClientNumber, id: u64) -> bool {
        self.find(id).is_some_and(|job| job.reserved_by(by).is_some())
    }

    // ---- Kick ----

    fn kick(&mut self, call: &Call<'_>, bound: u32) {
        let tube = Rc::clone(&self.clients[&call.by].used);
        let (_, mut kicked) = self.kickable(&tube, bound);
        if !kicked.is_empty() && self.is_refused(call) {
            return self.reply(call.by, "OUT_OF_MEMORY");
        }
        if self.may_refuse_updates
            && let Some(fewer) = call.seen_number(b"KICKED ")
        {
            kicked.truncate(fewer.max(1));
        }
        kicked.iter().for_each(|id| self.kick_one(*id, call.now));
        self.reply(call.by, &format!("KICKED {}", kicked.len()));
    }

    /// Returns whether a kick takes buried jobs, and the jobs that it moves.
    pub(super) fn kickable(&self, tube: &str, bound: u32) -> (bool, Vec<u64>) {
        let mut kicked = self.in_order(|job| job.buried_in(tube));
        let takes_buried = !kicked.is_empty();
        if !takes_buried {
            kicked = self.in_order(|job| job.delayed_in(tube));
        }
        kicked.truncate(bound as usize);
        (takes_buried, kicked)
    }

    pub(super) fn kick_one(&mut self, id: u64, now: u64) {
        self.job(id).counts.kicks += 1;
        self.job(id).returns = 0;
        self.move_to(id, State::Ready, now);
    }

    fn kick_job(&mut self, call: &Call<'_>, id: u64) {
        match self.find(id).map(|job| job.state) {
            Some(State::Buried { .. } | State::Delayed { .. }) => {
                if self.is_refused(call) {
                    return self.reply(call.by, "OUT_OF_MEMORY");
                }
                self.kick_one(id, call.now);
                self.reply(call.by, "KICKED");
            }
            None | Some(State::Ready | State::Reserved { .. }) => self.reply(call.by, "NOT_FOUND"),
        }
    }

    // ---- Tubes ----

    fn use_tube(&mut self, call: &Call<'_>, name: &str) {
        let tube = self.find_or_create_tube(name);
        let left = std::mem::replace(&mut self.client(call.by).used, tube);
        self.remove_if_idle(&left);
        self.reply(call.by, &format!("USING {name}"));
    }

    fn watch(&mut self, call: &Call<'_>, name: &str) {
        let tube = self.find_or_create_tube(name);
        let client = self.client(call.by);
        if !client.watches(name) {
            client.watched.push(tube);
        }
        self.reply_watching(call);
    }

    fn ignore(&mut self, call: &Call<'_>, name: &str) {
        let client = self.client(call.by);
        if let Some(index) = client.watched.iter().position(|watched| **watched == *name) {
            if client.watched.len() == 1 {
                return self.reply(call.by, "NOT_IGNORED");
            }
            client.watched.swap_remove(index);
            self.remove_if_idle(name);
        }
        self.reply_watching(call);
    }

    fn reply_watching(&mut self, call: &Call<'_>) {
        let line = format!("WATCHING {}", self.clients[&call.by].watched.len());
        self.reply(call.by, &line);
    }

    fn pause_tube(&mut self, call: &Call<'_>, name: Option<&str>, secs: u32) {
        let Some(name) = name else { return self.reply(call.by, "BAD_FORMAT") };
        if self.find_tube(name).is_none() {
            return self.reply(call.by, "NOT_FOUND");
        }
        let tube = self.tube(name);
        tube.pauses += 1;
        tube.pause = (secs > 0).then_some((secs, call.now + u64::from(secs) * SECOND));
        self.pauses_changed = self.next_seq();
        if secs == 0 {
            self.serve_waiters(name, call.now);
        }
        self.reply(call.by, "PAUSED");
    }

    // ---- Peek and lists ----

    fn peek(&mut self, call: &Call<'_>, id: u64) {
        match self.find(id) {
            Some(_) => self.reply_job(call.by, "FOUND", id),
            None => self.reply(call.by, "NOT_FOUND"),
        }
    }

    /// Replies with the first job of the used tube that has such a rank.
    fn peek_first<R: Ord>(&mut self, call: &Call<'_>, rank: impl Fn(&Job, &str) -> Option<R>) {
        let ranked = self.in_order(|job| rank(job, &self.clients[&call.by].used));
        match ranked.first() {
            Some(&id) => self.reply_job(call.by, "FOUND", id),
            None => self.reply(call.by, "NOT_FOUND"),
        }
    }

    pub(super) fn list_tubes(&mut self, call: &Call<'_>) {
        let text = list(self.tubes.iter().map(|tube| &*tube.name));
        self.reply_document(call, &text);
    }

    pub(super) fn list_tubes_watched(&mut self, call: &Call<'_>) {
        let text = list(self.clients[&call.by].watched.iter().map(|name| &**name));
        self.reply_document(call, &text);
    }

    fn list_tube_used(&mut self, call: &Call<'_>) {
        let line = format!("USING {}", self.clients[&call.by].used);
        self.reply(call.by, &line);
    }
}

fn delayed_or_ready(delay: u32, now: u64) -> State {
    if delay == 0 { State::Ready } else { State::Delayed { due: now + u64::from(delay) * SECOND } }
}
