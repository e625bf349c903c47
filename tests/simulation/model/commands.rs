//! One function for each command, as BEHAVIOUR.md describes it.

use super::super::request::{self, Argument, Arguments, Command, Malformed, PutTag};
use super::input::Expects;
use super::replies::list;
use super::{Call, ClientNumber, Counts, Job, Model, NO_DEADLINE, SECOND, State, Waiter};
use std::rc::Rc;

/// The commands of C beanstalkd.
pub const COMMANDS: &[Command] = {
    use Argument::{
        Anything, Bound, Delay, Held, Id, LastTube, Len, Pause, Pri, Tag, Timeout, Ttr,
    };
    &[
        Command::new("put", 200, &[Pri, Delay, Ttr, Len, Tag], Model::begin_put),
        Command::new("use", 40, &[LastTube], Model::use_tube),
        Command::new("watch", 40, &[LastTube], Model::watch),
        Command::new("ignore", 25, &[LastTube], Model::ignore),
        Command::new("reserve", 60, &[], Model::reserve_best),
        Command::new("reserve-with-timeout", 120, &[Timeout], Model::reserve_best),
        Command::new("reserve-job", 20, &[Id], Model::reserve_job),
        Command::new("delete", 130, &[Id], Model::delete),
        Command::new("release", 60, &[Held, Pri, Delay], Model::release),
        Command::new("bury", 40, &[Held, Pri], Model::bury),
        Command::new("touch", 25, &[Held], Model::touch_one),
        Command::new("kick", 20, &[Bound], Model::kick),
        Command::new("kick-job", 15, &[Id], Model::kick_job),
        Command::new("peek", 10, &[Id], Model::peek),
        Command::new("peek-ready", 8, &[], |it, call, _| it.peek_ready(call)),
        Command::new("peek-delayed", 8, &[], |it, call, _| it.peek_first(call, Job::delayed_in)),
        Command::new("peek-buried", 8, &[], |it, call, _| it.peek_first(call, Job::buried_in)),
        Command::new("stats", 3, &[], |it, call, _| it.stats(call)),
        Command::new("stats-job", 25, &[Id], Model::stats_job),
        Command::new("stats-tube", 12, &[LastTube], Model::stats_tube),
        Command::new("list-tubes", 6, &[], |it, call, _| it.list_tubes(call)),
        Command::new("list-tube-used", 4, &[], |it, call, _| it.list_tube_used(call)),
        Command::new("list-tubes-watched", 6, &[], |it, call, _| it.list_tubes_watched(call)),
        Command::new("pause-tube", 12, &[Pause], Model::pause_tube),
        Command::new("quit", 2, &[Anything], |it, call, _| it.client(call.by).is_closing = true),
    ]
};

impl Model {
    pub(super) fn execute(&mut self, call: &Call<'_>, line: &[u8]) {
        match request::parse(line) {
            Ok((command, arguments)) => {
                *self.counters.entry(command.word).or_default() += 1;
                let is_too_big = arguments.len > self.options.settings.max_job_size;
                match arguments.tag {
                    PutTag::Wrong if !is_too_big && request::is_http(line) => self.http(call),
                    _ => (command.run)(self, call, &arguments),
                }
            }
            Err(Malformed::BadFormat) => self.reply(call.by, "BAD_FORMAT"),
            Err(Malformed::Unknown) => self.reply(call.by, "UNKNOWN_COMMAND"),
            Err(Malformed::Http) => self.http(call),
        }
    }

    /// A browser sends more lines: the connection is closed behind the first one.
    pub(super) fn http(&mut self, call: &Call<'_>) {
        self.reply(call.by, "UNKNOWN_COMMAND");
        self.client(call.by).is_closing = true;
    }

    // ---- Put ----

    pub(super) fn begin_put(&mut self, call: &Call<'_>, put: &Arguments) {
        if put.len > self.options.settings.max_job_size {
            self.client(call.by).expects = Expects::TooLargeBody { len: put.len as usize };
            return;
        }
        if matches!(put.tag, PutTag::Wrong) {
            return self.reply(call.by, "BAD_FORMAT");
        }
        self.last_id += 1;
        let id = self.last_id;
        let client = self.client(call.by);
        client.is_producer = true;
        client.expects = Expects::Body { id, put: put.clone() };
    }

    pub(super) fn finish_put(&mut self, call: &Call<'_>, id: u64, put: Arguments, bytes: &[u8]) {
        let Arguments { tube, pri, delay, ttr, tag, .. } = put;
        let (key, con) = if let PutTag::Keys(key, con) = tag { (key, con) } else { (None, None) };
        let Some(body) = bytes.strip_suffix(b"\r\n") else {
            return self.reply(call.by, "EXPECTED_CRLF");
        };
        if self.is_draining {
            return self.reply(call.by, "DRAINING");
        }
        if let Some(key) = &key {
            let used = Rc::clone(&self.clients[&call.by].used);
            let name = tube.as_deref().unwrap_or(&used);
            if let Some(reply) = self.find_key(call, name, &key.key) {
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
            ttr: ttr.max(1),
            body: body.into(),
            created: call.now,
            state: State::Ready,
            counts: Counts::default(),
            returns: 0,
            is_age_unknown: false,
            key,
            con,
            changed: 0,
        };
        let index = self.jobs.partition_point(|other| other.id < id);
        self.jobs.insert(index, job);
        self.move_to(id, delayed_or_ready(delay, call.now), call.now);
        self.reply(call.by, &format!("INSERTED {id}"));
    }

    // ---- Reserve ----

    fn reserve_best(&mut self, call: &Call<'_>, it: &Arguments) {
        self.client(call.by).is_worker = true;
        let client = &self.clients[&call.by];
        if let Some(id) = self.first_ready(|tube| client.watches(tube)) {
            self.reserve(id, call.by, call.now);
            self.reply_job(call.by, "RESERVED", id);
        } else {
            let seq = self.next_seq();
            self.wait(call, it.secs, None, (seq, call.now));
        }
    }

    /// A reserve has found no job: it ends, or waits since it began.
    pub(super) fn wait(
        &mut self,
        call: &Call<'_>,
        secs: Option<u32>,
        batch: Option<usize>,
        (seq, began_at): (u64, u64),
    ) {
        if self.is_deadline_soon(call.by, call.now) {
            return self.reply(call.by, "DEADLINE_SOON");
        }
        let until = secs.map(|secs| began_at + u64::from(secs) * SECOND);
        let at = self.waiters.partition_point(|other| other.seq < seq);
        self.waiters.insert(at, Waiter { client: call.by, until, batch, seq });
        // One in steps may find none after its time, if the disk was congested meanwhile.
        let is_over = until.is_some_and(|until| until <= call.now);
        if is_over || self.clients[&call.by].is_half_closed {
            self.time_out(call.by);
        }
    }

    fn reserve_job(&mut self, call: &Call<'_>, it: &Arguments) {
        let id = it.ids[0];
        match self.find(id).map(|job| job.state) {
            None | Some(State::Reserved { .. }) => self.reply(call.by, "NOT_FOUND"),
            Some(State::Ready) if self.find(id).is_some_and(|job| self.is_blocked(job)) => {
                self.reply(call.by, "NOT_FOUND");
            }
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

    fn delete(&mut self, call: &Call<'_>, it: &Arguments) {
        let id = it.ids[0];
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
        self.serve_unblocked(self.last_command_at);
    }

    fn release(&mut self, call: &Call<'_>, it: &Arguments) {
        let (id, pri, delay) = (it.ids[0], it.pri, it.delay);
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

    fn bury(&mut self, call: &Call<'_>, it: &Arguments) {
        let (id, pri) = (it.ids[0], it.pri);
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

    fn touch_one(&mut self, call: &Call<'_>, it: &Arguments) {
        let id = it.ids[0];
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
            if let State::Reserved { deadline, .. } = &mut job.state
                && *deadline != NO_DEADLINE
            {
                *deadline = call.now + ttr * SECOND;
            }
        }
    }

    pub(super) fn has_reserved(&self, by: ClientNumber, id: u64) -> bool {
        self.find(id).is_some_and(|job| job.reserved_by(by).is_some())
    }

    // ---- Kick ----

    fn kick(&mut self, call: &Call<'_>, it: &Arguments) {
        let tube = Rc::clone(&self.clients[&call.by].used);
        let (_, mut kicked) = self.kickable(&tube, it.count);
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
    pub(super) fn kickable(&self, tube: &str, bound: usize) -> (bool, Vec<u64>) {
        let mut kicked = self.in_order(|job| job.buried_in(tube));
        let takes_buried = !kicked.is_empty();
        if !takes_buried {
            kicked = self.in_order(|job| job.delayed_in(tube));
        }
        kicked.truncate(bound);
        (takes_buried, kicked)
    }

    pub(super) fn kick_one(&mut self, id: u64, now: u64) {
        self.job(id).counts.kicks += 1;
        self.job(id).returns = 0;
        self.move_to(id, State::Ready, now);
    }

    fn kick_job(&mut self, call: &Call<'_>, it: &Arguments) {
        let id = it.ids[0];
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

    fn use_tube(&mut self, call: &Call<'_>, it: &Arguments) {
        let name = it.tube();
        let tube = self.find_or_create_tube(name);
        let left = std::mem::replace(&mut self.client(call.by).used, tube);
        self.remove_if_idle(&left);
        self.reply(call.by, &format!("USING {name}"));
    }

    fn watch(&mut self, call: &Call<'_>, it: &Arguments) {
        let name = it.tube();
        let tube = self.find_or_create_tube(name);
        let client = self.client(call.by);
        if !client.watches(name) {
            client.watched.push(tube);
        }
        self.reply_watching(call);
    }

    fn ignore(&mut self, call: &Call<'_>, it: &Arguments) {
        let name = it.tube();
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

    fn pause_tube(&mut self, call: &Call<'_>, it: &Arguments) {
        let (Some(name), Some(secs)) = (it.tube.as_deref(), it.secs) else {
            return self.reply(call.by, "BAD_FORMAT");
        };
        if self.find_tube(name).is_none() {
            return self.reply(call.by, "NOT_FOUND");
        }
        let tube = self.tube(name);
        tube.pauses += 1;
        if secs > 0 {
            tube.pause = Some((secs, call.now + u64::from(secs) * SECOND));
        } else {
            let mut wakes = self.options.limits.wakes_per_step;
            if self.jobs.iter().any(|job| job.con.is_some()) {
                // A step that parks jobs has less left for wakes.
                wakes = wakes.min(self.woken);
            }
            self.end_pauses(&[name.into()], wakes, call.now);
        }
        self.pauses_changed = self.next_seq();
        self.reply(call.by, "PAUSED");
    }

    // ---- Peek and lists ----

    fn peek(&mut self, call: &Call<'_>, it: &Arguments) {
        self.reply_found(call, self.find(it.ids[0]).map(|job| job.id));
    }

    /// A blocked job is shown only if all are.
    fn peek_ready(&mut self, call: &Call<'_>) {
        let tube = Rc::clone(&self.clients[&call.by].used);
        let ready = self.in_order(|job| job.ready_in(&tube));
        let is_blocked = |id: &u64| self.find(*id).is_some_and(|job| self.is_blocked(job));
        let shown = ready.iter().find(|id| !is_blocked(id)).or(ready.first());
        self.reply_found(call, shown.copied());
    }

    /// Replies with the first job of the used tube that has such a rank.
    fn peek_first<R: Ord>(&mut self, call: &Call<'_>, rank: impl Fn(&Job, &str) -> Option<R>) {
        let ranked = self.in_order(|job| rank(job, &self.clients[&call.by].used));
        self.reply_found(call, ranked.first().copied());
    }

    fn reply_found(&mut self, call: &Call<'_>, id: Option<u64>) {
        match id {
            Some(id) => self.reply_job(call.by, "FOUND", id),
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
