//! Runs the commands of one connection: calls the rules and replies.

use super::{REPLY_COST_PER_WORK, Server, WARN_INTERVAL};
use crate::engine::binlog::NoSpace;
use crate::engine::conn::{
    Answer, Conn, Continuation, JobPart, LargePut, Phase, Put, Refusal, ReserveKind, Step,
};
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{ConnKey, JobKey, TubeKey};
use crate::engine::protocol::batch::Batch;
use crate::engine::protocol::command::{self, Command, LineTail, Rejection, UniqueTag};
use crate::engine::protocol::reply::Reply;
use crate::engine::protocol::stats;
use crate::engine::queue::body::{Body, LARGE};
use crate::engine::queue::flush::FlushKind;
use crate::engine::queue::job::{Job, JobParams};
use crate::engine::queue::read_body::BodyRef;
use crate::engine::queue::touch::TouchAll;
use crate::engine::queue::tube::Tube;
use crate::engine::queue::unique::NewKey;
use crate::engine::queue::waiters::{Search, Wait};
use crate::engine::queue::{Kick, Outcome, Queue, WORK_PER_WAKE, WaitResult};
use crate::engine::text::{self, CR_LF};
use crate::engine::time::Nanos;
use log::{debug, trace, warn};
use std::collections::TryReserveError;

/// Units of work to read from a connection and to write to it.
const WORK_PER_CONN: usize = 16;
/// Checking this many watches is one unit of work.
const WATCHES_PER_WORK: usize = 2;
/// Counting this many waiters of a tube is one unit of work.
const WAITERS_PER_WORK: usize = 8;

impl Server {
    // ---- Running commands ----

    /// Runs commands that have just arrived, and buffers the rest.
    pub(super) fn run_fresh(&mut self, key: ConnKey, bytes: &[u8], now: Nanos) {
        let rest = self.run(key, bytes, now);
        if !rest.is_empty()
            && !matches!(self.conns[key].phase, Phase::Closing)
            && self.conns.push_input(key, rest).is_err()
        {
            self.drop_input(key, rest.len());
        }
    }

    /// Runs buffered commands.
    pub(super) fn run_buffered(&mut self, key: ConnKey, now: Nanos) {
        let mut input = self.conns.take_input(key);
        let left = self.run(key, input.unused(), now).len();
        if !matches!(self.conns[key].phase, Phase::Closing) {
            input.keep_last(left);
            self.conns.put_back_input(key, input);
        }
    }

    /// Drops the input of a connection, for which there is no memory. Returns whether the
    /// connection stays open: the `arrived` bytes were the beginning of a body and nothing else.
    pub(super) fn drop_input(&mut self, key: ConnKey, arrived: usize) -> bool {
        let continues = self.conns[key].skip_body(arrived);
        if !continues {
            self.close_now(key);
        }
        continues
    }

    /// Runs the complete commands of `input` within the connection's share of the iteration.
    /// Returns the rest.
    fn run<'a>(&mut self, key: ConnKey, mut input: &'a [u8], now: Nanos) -> &'a [u8] {
        self.charge(WORK_PER_CONN);
        self.budget.begin_share();
        while self.budget.has_share() && self.conns[key].has_step(input) {
            let output_limit = self.conns.output_limit();
            let has_memory = !self.conns.are_crowded();
            let step = self.conns[key].next_step(&mut input, output_limit, has_memory);
            let Some(step) = step else { break };
            let now = self.command_time(now);
            match step {
                Step::Line(line) => self.run_line(key, line, now),
                Step::TooLongLine(tail) => self.reject(key, tail, Rejection::BadFormat),
                Step::SkippedLongLine => self.reply(key, Reply::OutOfMemory),
                Step::Put(put, body) => self.finish_small_put(key, put, body, now),
                Step::BeginBody(put) => self.begin_body(key, put),
                Step::BodyPart(part) => self.add_to_body(key, part, now),
                Step::SkippedBody(refusal) => self.reply(key, refusal.into()),
                Step::Continue(continuation) => self.continue_command(key, continuation, now),
            }
            self.after_command();
        }
        let output_limit = self.conns.output_limit();
        let conn = &mut self.conns[key];
        conn.has_backlog =
            conn.has_step(input) && (!self.budget.has_share() || !conn.can_run(output_limit));
        if conn.has_backlog {
            self.conns.mark_dirty(key);
        }
        input
    }

    /// Runs the next step of a command. Other connections are served between two steps.
    fn continue_command(&mut self, key: ConnKey, continuation: Continuation, now: Nanos) {
        match continuation {
            Continuation::Kick(kick) => self.kick_step(key, kick, now),
            Continuation::Reserve(wait, kind) => self.reserve_step(key, wait, kind, now),
            Continuation::FillBatch(batch, until) => self.fill_batch_step(key, batch, until, now),
            Continuation::TouchAll(touch) => self.touch_all_step(key, touch, now),
            Continuation::Select(scan, part) => {
                self.selections -= 1;
                self.select_step(key, scan, part, now);
            }
            Continuation::ListWatched(text, next) => self.list_watched_step(key, text, next),
        }
    }

    /// Continues a command in the next iteration, or in this one if the connection has work left.
    pub(super) fn continue_later(&mut self, key: ConnKey, continuation: Continuation) {
        self.conns[key].phase = Phase::InSteps(continuation);
    }

    /// Continues the command of a connection that is not being served in the next iteration.
    pub(super) fn continue_next(&mut self, key: ConnKey, continuation: Continuation) {
        self.continue_later(key, continuation);
        self.conns[key].has_backlog = true;
        self.conns.mark_dirty(key);
    }

    /// Delivers the results of waits, and charges the work of the command.
    fn after_command(&mut self) {
        let wakes =
            if self.queue.wait_results.is_empty() { 0 } else { self.deliver_wait_results() };
        let replied = self.conns.take_reply_cost() / REPLY_COST_PER_WORK;
        let invalidation = self.queue.take_invalidation_work();
        self.charge(invalidation);
        let work = self.queue.take_work();
        self.budget.charge_share(1 + replied + wakes + work);
    }

    /// Returns a time for the next command that is later than that of the previous one. So jobs
    /// that one read delays by the same time become ready in their order.
    fn command_time(&mut self, now: Nanos) -> Nanos {
        self.last_command_at = now.max(self.last_command_at + Nanos::ONE);
        self.last_command_at
    }

    fn run_line(&mut self, key: ConnKey, line: &[u8], now: Nanos) {
        trace!("connection {}: {}", key.index(), line.escape_ascii());
        match command::parse(line) {
            Ok(command) => {
                if let Some(counter) = command.counter() {
                    self.commands[counter as usize] += 1;
                }
                self.execute(key, command, now);
            }
            Err(rejection) => self.reject(key, line.into(), rejection),
        }
    }

    /// Replies to a line that is no command. Closes the connection after an HTTP request, so that
    /// its headers and body do not run as commands.
    fn reject(&mut self, key: ConnKey, line: LineTail, rejection: Rejection) {
        if line.is_http() {
            debug!("connection {}: received an HTTP request; closing after the reply", key.index());
            self.reply(key, Reply::UnknownCommand);
            return self.close_after_write(key);
        }
        self.reply(key, rejection.into());
    }

    #[expect(clippy::too_many_lines, reason = "one arm for each command, and nothing else")]
    fn execute(&mut self, key: ConnKey, command: Command<'_>, now: Nanos) {
        match command {
            Command::Put { pri, delay_secs, ttr_secs, body_len, tag } => {
                let params = JobParams { pri, delay_secs, ttr_secs };
                self.begin_put(key, None, params, body_len, tag);
            }
            Command::PutInTube { tube, pri, delay_secs, ttr_secs, body_len, tag } => {
                let params = JobParams { pri, delay_secs, ttr_secs };
                self.begin_put(key, Some(tube), params, body_len, tag);
            }
            Command::Reserve => self.reserve(key, Nanos::NEVER, ReserveKind::Job, now),
            Command::ReserveWithTimeout { timeout_secs } => {
                self.reserve(key, now + Nanos::from_secs(timeout_secs), ReserveKind::Job, now);
            }
            Command::ReserveBatch { count, timeout_secs } => {
                let until = now + Nanos::from_secs(timeout_secs);
                self.reserve(key, until, ReserveKind::Batch(count), now);
            }
            Command::ReserveJob { id } => self.reserve_job(key, id, now),
            Command::Delete { id } => {
                let outcome = self.queue.delete(key, id, now);
                self.reply_outcome(key, outcome, Reply::Deleted);
            }
            Command::DeleteBatch { ids } => self.delete_batch(key, ids, now),
            Command::Release { id, pri, delay_secs } => {
                let outcome = self.queue.release(key, id, pri, delay_secs, now);
                self.reply_outcome(key, outcome, Reply::Released);
            }
            Command::Bury { id, pri } => {
                let outcome = self.queue.bury(key, id, pri, now);
                self.reply_outcome(key, outcome, Reply::Buried);
            }
            Command::Touch { id } => {
                let is_done = self.queue.touch(key, id, now);
                self.reply_if(key, is_done, Reply::Touched);
            }
            Command::TouchAll => self.touch_all_step(key, TouchAll::new(now), now),
            Command::Kick { bound } => {
                let kick = self.queue.plan_kick(self.queue.clients[key].used, bound);
                self.kick_step(key, kick, now);
            }
            Command::KickJob { id } => {
                let outcome = self.queue.kick_job(id, now);
                self.reply_outcome(key, outcome, Reply::KickedJob);
            }
            Command::FlushTube { tube } => self.begin_flush(key, tube, FlushKind::All, now),
            Command::FlushBuried { tube } => self.begin_flush(key, tube, FlushKind::Buried, now),

            Command::Use { tube } => self.use_tube(key, tube),
            Command::Watch { tube } => self.watch(key, tube),
            Command::Ignore { tube } => self.ignore(key, tube),
            Command::PauseTube { tube: Some(_), pause_secs: 1.. } if !self.has_room_for_tubes() => {
                self.reply(key, Reply::OutOfMemory);
            }
            Command::PauseTube { tube: Some(tube), pause_secs } => {
                let is_done = self.queue.pause(tube, pause_secs, now);
                self.reply_if(key, is_done, Reply::Paused);
            }
            Command::PauseTube { tube: None, .. } => self.reply(key, Reply::BadFormat),

            Command::Peek { id } => self.reply_found(key, self.queue.find(id)),
            Command::PeekReady => {
                self.reply_found(key, self.used_tube(key).first_ready(&self.queue.jobs));
            }
            Command::PeekDelayed => {
                self.reply_found(key, self.used_tube(key).first_delayed(&self.queue.jobs));
            }
            Command::PeekBuried => {
                self.reply_found(key, self.used_tube(key).first_buried());
            }
            Command::PeekBatch { selection } => {
                self.begin_page(key, selection, JobPart::Body, now);
            }
            Command::ListJobs { selection } => {
                self.begin_page(key, selection, JobPart::Stats, now);
            }

            Command::Stats => {
                let text = self.stats(now);
                self.reply(key, Reply::Document { text: &text });
            }
            Command::StatsJob { id } => {
                let queue = &self.queue;
                match queue.find(id).map(|job| stats::job(&queue.jobs[job], queue, now)) {
                    Some(text) => self.reply(key, Reply::Document { text: &text }),
                    None => self.reply(key, Reply::NotFound),
                }
            }
            Command::StatsTube { tube } => self.stats_tube(key, tube, now),
            Command::ListTubes => self.list_tubes(key),
            Command::ListTubesWatched => self.list_tubes_watched(key),
            Command::ListTubeUsed => {
                let tube = self.used_tube(key).name.clone();
                self.reply(key, Reply::Using { tube: &tube });
            }

            Command::Quit => self.close_after_write(key),
        }
    }

    // ---- Put ----

    // The compiler inlines a function into every command only if it has one caller.
    #[inline(always)]
    fn begin_put(
        &mut self,
        key: ConnKey,
        tube: Option<&str>,
        params: JobParams,
        body_len: u32,
        tag: &[u8],
    ) {
        let full_len = body_len as usize + CR_LF.len();
        if body_len > self.settings.max_job_size {
            return self.refuse_body(key, full_len, Refusal::JobTooBig);
        }
        let mut unique_tag = None;
        if !tag.is_empty() {
            unique_tag = UniqueTag::parse(tag);
            if unique_tag.is_none() {
                // Quirk: the body is read as commands; pinned by
                // tests/conversations/put-bad-format.txt.
                return self.reply(key, Reply::BadFormat);
            }
        }
        self.queue.mark_producer(key);
        // If a job has the same key at the end of the body, a small body needs no memory.
        let needs_memory = unique_tag.is_none() || full_len >= LARGE;
        // In drain mode the reply to a put is `DRAINING`, at the end of the body.
        let has_memory = self.is_draining
            || !needs_memory
            || self.has_memory_for(full_len, unique_tag.is_some());
        let unique = unique_tag.map(|tag| {
            let name = tube.unwrap_or(&self.used_tube(key).name);
            self.queue.unique.new_key(name, tag.key, tag.ttl_secs)
        });
        let Ok(tube) = tube.map(text::try_boxed).transpose() else {
            return self.refuse_body(key, full_len, self.refusal());
        };
        if !has_memory || (needs_memory && !(self.process.has_headroom)(Headroom::Whole)) {
            return self.refuse_body(key, full_len, Refusal::OutOfMemory);
        }
        self.last_id += 1;
        let full_len = u32::try_from(full_len).expect("a body of more than 2^30 bytes");
        let conn = &mut self.conns[key];
        conn.sends_large_bodies = full_len as usize >= Conn::WORTH_TWO_READS;
        conn.phase = Phase::ReadingBody(Put { id: self.last_id, params, full_len, tube, unique });
    }

    /// Returns whether a job with a body of this length fits into `--max-memory`.
    fn has_memory_for(&mut self, full_len: usize, is_unique: bool) -> bool {
        let limit = self.settings.max_memory_bytes;
        // The default. Adding up the memory would take a twentieth of the time of a put.
        if limit == u64::MAX {
            return true;
        }
        let is_over = |queue: &Queue| {
            let taken = queue.job_bytes().saturating_add(queue.bytes_of_a_job(full_len, is_unique));
            taken.checked_sub(limit).filter(|&over| over > 0)
        };
        // Pages that are kept for the next bodies are freed first.
        let has_memory = loop {
            let Some(over) = is_over(&self.queue) else { break true };
            if !self.queue.bodies.free_empty(over) {
                break false;
            }
        };
        let taken = self.queue.job_bytes();
        let now = self.last_command_at;
        if !has_memory && self.memory_warned_at.is_none_or(|at| at + WARN_INTERVAL <= now) {
            self.memory_warned_at = Some(now);
            warn!(
                "a put is answered OUT_OF_MEMORY: jobs, arriving bodies and unread replies take \
                 {taken} bytes of memory, and {limit} are allowed"
            );
        }
        has_memory
    }

    /// Returns the reason for which a body without memory is dropped.
    fn refusal(&self) -> Refusal {
        if self.is_draining { Refusal::Draining } else { Refusal::OutOfMemory }
    }

    fn refuse_body(&mut self, key: ConnKey, left: usize, reason: Refusal) {
        self.conns[key].phase = Phase::SkippingBody { left, reason };
    }

    /// Allocates the slot of a large body that is about to arrive.
    fn begin_body(&mut self, key: ConnKey, put: Put) {
        let full_len = put.full_len as usize;
        let body = if self.has_memory_for(full_len, put.unique.is_some()) {
            headroom::leave(Headroom::Whole, || self.queue.bodies.begin(full_len)).ok()
        } else {
            None
        };
        match body {
            Some(body) => {
                self.conns[key].phase = Phase::ReadingLargeBody(LargePut { put, body, filled: 0 });
            }
            None => self.refuse_body(key, full_len, self.refusal()),
        }
    }

    /// Returns the slot's next bytes, at most `limit`, to which the loop may read a large body.
    /// Returns `None` if no large body is arriving, or if the connection must not be read.
    pub fn body_space(&mut self, key: ConnKey, limit: usize) -> Option<&mut [u8]> {
        let conn = &self.conns[key];
        if !conn.actions(self.conns.output_limit()).read {
            return None;
        }
        let Phase::ReadingLargeBody(LargePut { body, filled, .. }) = &conn.phase else {
            return None;
        };
        let end = (*filled + limit).min(body.full_len() as usize);
        Some(self.queue.bodies.bytes_mut(body, *filled, end))
    }

    /// Accepts `count` bytes that were read into the slice that [`Server::body_space`] returned.
    pub fn receive_body(&mut self, key: ConnKey, count: usize, now: Nanos) {
        self.charge(WORK_PER_CONN);
        self.budget.begin_share();
        let now = self.command_time(now);
        self.advance_body(key, count, now);
        self.after_command();
    }

    fn add_to_body(&mut self, key: ConnKey, part: &[u8], now: Nanos) {
        let Phase::ReadingLargeBody(LargePut { body, filled, .. }) = &self.conns[key].phase else {
            return;
        };
        let (from, to) = (*filled, *filled + part.len());
        self.queue.bodies.bytes_mut(body, from, to).copy_from_slice(part);
        self.advance_body(key, part.len(), now);
    }

    fn advance_body(&mut self, key: ConnKey, count: usize, now: Nanos) {
        let phase = &mut self.conns[key].phase;
        let Phase::ReadingLargeBody(arriving) = phase else { return };
        arriving.filled += count;
        if arriving.filled < arriving.put.full_len as usize {
            return;
        }
        if let Phase::ReadingLargeBody(LargePut { put, body, .. }) = std::mem::take(phase) {
            let ends_in_cr_lf = self.queue.bodies.bytes(&body).ends_with(CR_LF);
            if let Some(reply) = self.reply_without_job(&put, ends_in_cr_lf, now) {
                self.queue.drop_body(body);
                return self.reply(key, reply);
            }
            self.finish_put(key, put, Ok(body), now);
        }
    }

    fn finish_small_put(&mut self, key: ConnKey, put: Put, bytes: &[u8], now: Nanos) {
        if let Some(reply) = self.reply_without_job(&put, bytes.ends_with(CR_LF), now) {
            return self.reply(key, reply);
        }
        // Other clients may have put jobs while this body arrived.
        let has_memory = self.has_memory_for(bytes.len(), put.unique.is_some());
        let body = if has_memory && self.has_room() {
            headroom::leave(Headroom::Whole, || self.queue.bodies.add(bytes)).map_err(NoSpace::from)
        } else {
            Err(NoSpace::Space)
        };
        self.finish_put(key, put, body, now);
    }

    /// Returns the reply to a put that inserts no job, although there is memory for it.
    fn reply_without_job(
        &mut self,
        put: &Put,
        ends_in_cr_lf: bool,
        now: Nanos,
    ) -> Option<Reply<'static>> {
        if !ends_in_cr_lf {
            return Some(Reply::ExpectedCrLf);
        }
        if self.is_draining {
            return Some(Reply::Draining);
        }
        self.hit(put.unique?, now)
    }

    /// Returns the reply to a put whose key is in force.
    #[cold]
    fn hit(&mut self, unique: NewKey, now: Nanos) -> Option<Reply<'static>> {
        let hit = self.queue.find_unique(unique.digest, now)?;
        self.queue.count_hit();
        Some(Reply::InsertedBefore(hit))
    }

    fn finish_put(&mut self, key: ConnKey, put: Put, body: Result<Body, NoSpace>, now: Nanos) {
        let Put { id, params, tube: name, unique, .. } = put;
        let put = |body| {
            headroom::leave(Headroom::Whole, || {
                let tube = match self.tube_of_put(key, name.as_deref()) {
                    Ok(tube) => tube,
                    Err(no_memory) => {
                        self.queue.drop_body(body);
                        return Err(no_memory.into());
                    }
                };
                self.queue.put_unique(tube, id, params, unique.as_ref(), body, now)
            })
        };
        let reply = match body.and_then(put) {
            Ok(()) => Reply::Inserted { id },
            Err(NoSpace::Space | NoSpace::Memory) => Reply::OutOfMemory,
        };
        self.reply(key, reply);
    }

    // ---- Reserve, release and kick ----

    fn reserve(&mut self, key: ConnKey, until: Nanos, kind: ReserveKind, now: Nanos) {
        self.queue.mark_worker(key);
        // The job may also come while the connection waits, when it is too late to refuse it.
        if self.queue.ensure_can_reserve(key).is_err() {
            return self.reply(key, Reply::OutOfMemory);
        }
        let seq = self.queue.next_wait_seq();
        self.reserve_step(key, Wait { seq, until }, kind, now);
    }

    /// Reserves jobs, or begins to wait. With more than 2,048 watched tubes this takes several
    /// iterations; tubes that change between them are checked again.
    fn reserve_step(&mut self, key: ConnKey, wait: Wait, kind: ReserveKind, now: Nanos) {
        let most = self.queue.limits.watches_per_step;
        let mut steps_left = most;
        let outcome = self.reserve_or_wait(key, wait, kind, &mut steps_left, now);
        self.charge_watches(most - steps_left);
        match outcome {
            Ok(Some(phase)) => self.conns[key].phase = phase,
            Ok(None) => {}
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Charges the watches that a reserve has checked.
    pub(super) fn charge_watches(&mut self, steps: usize) {
        // With one watch there is no step.
        if steps > 0 {
            let charged = steps.saturating_sub(self.queue.limits.free_steps);
            self.budget.charge_share(charged / WATCHES_PER_WORK);
        }
    }

    /// Returns the next phase of the connection, or `None` if it has its reply.
    fn reserve_or_wait(
        &mut self,
        key: ConnKey,
        wait: Wait,
        kind: ReserveKind,
        steps_left: &mut usize,
        now: Nanos,
    ) -> Result<Option<Phase>, TryReserveError> {
        let later = Phase::InSteps(Continuation::Reserve(wait, kind));
        match kind {
            ReserveKind::Job => match self.queue.reserve(key, steps_left, now)? {
                Search::Found(job) => {
                    self.reply_job(key, job, Answer::Reserved { kind, until: wait.until });
                    return Ok(None);
                }
                Search::Unfinished => return Ok(Some(later)),
                Search::Nothing => {}
            },
            ReserveKind::Batch(max) => {
                let mut batch = Batch::new(max);
                match (self.fill_batch(key, &mut batch, steps_left, now)?, batch.is_empty()) {
                    (true, true) => {}
                    (true, false) => {
                        self.reply_reserved_batch(key, batch, wait.until);
                        return Ok(None);
                    }
                    (false, true) => return Ok(Some(later)),
                    (false, false) => {
                        return Ok(Some(Phase::InSteps(Continuation::FillBatch(
                            batch, wait.until,
                        ))));
                    }
                }
            }
        }
        let mut tops_work = self.queue.limits.flushed_tops_work;
        if !self.queue.free_flushed_tops(key, &mut tops_work, now) {
            return Ok(Some(later));
        }
        if self.queue.is_deadline_soon(key, now) {
            self.reply(key, Reply::DeadlineSoon);
            return Ok(None);
        }
        if wait.until <= now || self.conns[key].is_half_closed {
            self.reply(key, kind.timeout_reply());
            return Ok(None);
        }
        let waits = self.queue.wait(key, wait, steps_left, now)?;
        Ok(Some(if waits { Phase::Waiting(kind, wait.until) } else { later }))
    }

    fn reserve_job(&mut self, key: ConnKey, id: u64, now: Nanos) {
        if self.queue.ensure_can_reserve(key).is_err() {
            return self.reply(key, Reply::OutOfMemory);
        }
        let job = self.queue.find(id).map(|job| &self.queue.jobs[job]);
        if job.is_some_and(|job| !self.settings.can_hold(&job.body)) {
            return self.reply(key, Reply::OutOfMemory);
        }
        match self.queue.reserve_job(key, id, now) {
            Ok(Some(job)) => {
                self.queue.mark_worker(key);
                self.reply_job(key, job, Answer::ReservedById);
            }
            Ok(None) => self.reply(key, Reply::NotFound),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Kicks the next jobs.
    fn kick_step(&mut self, key: ConnKey, mut kick: Kick, now: Nanos) {
        let before = kick.kicked;
        let outcome = self.queue.kick(&mut kick, now);
        self.budget.charge_share((kick.kicked - before) as usize);
        match outcome {
            Ok(()) if kick.left > 0 => self.continue_later(key, Continuation::Kick(kick)),
            Ok(()) => self.reply(key, Reply::Kicked { count: kick.kicked }),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    // ---- Tubes ----

    /// Returns the tube of a put: that of `put-in-tube`, which is created if there is none, or the
    /// used one.
    fn tube_of_put(
        &mut self,
        key: ConnKey,
        name: Option<&str>,
    ) -> Result<TubeKey, TryReserveError> {
        let Some(name) = name else { return Ok(self.queue.clients[key].used) };
        self.queue.find_or_create_tube(name)
    }

    /// Returns whether there is memory for more tubes and watches.
    fn has_room_for_tubes(&self) -> bool {
        (self.process.has_headroom)(Headroom::ThreeQuarters)
    }

    fn use_tube(&mut self, key: ConnKey, tube: &str) {
        let is_used = self.has_room_for_tubes()
            && headroom::leave(Headroom::ThreeQuarters, || self.queue.use_tube(key, tube)).is_ok();
        self.reply(key, if is_used { Reply::Using { tube } } else { Reply::OutOfMemory });
    }

    fn watch(&mut self, key: ConnKey, tube: &str) {
        self.queue.clients[key].watching.prepare_to_compare();
        let is_watched = self.has_room_for_tubes()
            && headroom::leave(Headroom::ThreeQuarters, || self.queue.watch(key, tube)).is_ok();
        if is_watched {
            self.reply_watching(key);
        } else {
            self.reply(key, Reply::OutOfMemory);
        }
    }

    fn ignore(&mut self, key: ConnKey, tube: &str) {
        if self.queue.ignore(key, tube) {
            self.reply_watching(key);
        } else {
            self.reply(key, Reply::NotIgnored);
        }
    }

    fn reply_watching(&mut self, key: ConnKey) {
        let count = self.queue.clients[key].watching.len();
        self.reply(key, Reply::Watching { count });
    }

    fn used_tube(&self, key: ConnKey) -> &Tube {
        &self.queue.tubes[self.queue.clients[key].used]
    }

    fn stats(&self, now: Nanos) -> String {
        stats::server(&self.own_stats(), &self.queue, now)
    }

    fn stats_tube(&mut self, key: ConnKey, name: &str, now: Nanos) {
        let Some(tube) = self.queue.tubes.find(name) else {
            return self.reply(key, Reply::NotFound);
        };
        let text = stats::tube(&self.queue.tubes[tube], self.queue.count_waiting(tube), now);
        // The count has checked each waiter.
        self.budget.charge_share(self.queue.tubes[tube].waiters.len() / WAITERS_PER_WORK);
        self.reply(key, Reply::Document { text: &text });
    }

    // ---- Replies ----

    /// Replies to the connections whose waits have ended. Returns the work of that.
    pub(super) fn deliver_wait_results(&mut self) -> usize {
        let work = self.queue.wait_results.len() * WORK_PER_WAKE;
        while let Some((key, result)) = self.queue.wait_results.pop_front() {
            let phase = std::mem::replace(&mut self.conns[key].phase, Phase::ReadingLine);
            let Phase::Waiting(kind, until) = phase else {
                unreachable!("a wait has ended of a connection that does not wait")
            };
            match result {
                WaitResult::Reserved(job) => self.reply_awaited(key, job, kind, until),
                WaitResult::DeadlineSoon => self.reply(key, Reply::DeadlineSoon),
                WaitResult::TimedOut => self.reply(key, kind.timeout_reply()),
            }
        }
        work
    }

    pub(super) fn reply(&mut self, key: ConnKey, reply: Reply<'_>) {
        if self.conns.reply(key, reply, &mut self.queue.bodies).is_err() {
            self.close_now(key);
        }
    }

    pub(super) fn reply_list(&mut self, key: ConnKey, list: Result<String, TryReserveError>) {
        match list {
            Ok(text) => self.reply(key, Reply::Document { text: &text }),
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    fn reply_if(&mut self, key: ConnKey, is_done: bool, reply: Reply<'_>) {
        self.reply(key, if is_done { reply } else { Reply::NotFound });
    }

    fn reply_outcome(&mut self, key: ConnKey, outcome: Outcome, done: Reply<'_>) {
        let reply = match outcome {
            Outcome::Done => done,
            Outcome::NotFound => Reply::NotFound,
            Outcome::NoSpace => Reply::OutOfMemory,
        };
        self.reply(key, reply);
    }

    pub(super) fn reply_found(&mut self, key: ConnKey, job: Option<JobKey>) {
        match job {
            Some(job) => self.reply_job(key, job, Answer::Found),
            None => self.reply(key, Reply::NotFound),
        }
    }

    #[inline]
    pub(super) fn reply_job(&mut self, key: ConnKey, job_key: JobKey, answer: Answer) {
        let Queue { jobs, bodies, .. } = &mut self.queue;
        let Job { id, ref body, .. } = jobs[job_key];
        if body.is_cold() {
            return self.answer(key, answer, &[(job_key, id)]);
        }
        let reply = answer.reply(id, BodyRef::Stored(body));
        if self.conns.reply(key, reply, bodies).is_err() {
            return self.close_now(key);
        }
        if answer.is_reserved() {
            self.queue.after_reserve(job_key);
        }
    }

    /// Closes the connection when its output is sent. Its input is not read any more.
    fn close_after_write(&mut self, key: ConnKey) {
        self.conns[key].phase = Phase::Closing;
        self.conns.mark_dirty(key);
    }

    /// Cancels the command of a connection that is about to be closed.
    pub(super) fn cancel_command(&mut self, key: ConnKey) {
        self.cancel_list(key);
        self.cancel_page(key);
        self.cancel_bodies(key);
        if matches!(self.conns[key].phase, Phase::Flushing) {
            self.queue.abandon_flush(key);
        }
    }

    /// Closes the connection, for which there is no memory, and drops its unsent output: the client
    /// must not take half a reply for a whole one.
    pub(super) fn close_now(&mut self, key: ConnKey) {
        self.cancel_command(key);
        self.queue.stop_waiting(key);
        self.conns.drop_buffers(key, &mut self.queue.bodies);
        self.close_after_write(key);
    }
}
