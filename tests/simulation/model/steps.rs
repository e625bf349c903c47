//! Commands of which the server does one part after the other, while other clients are served, and
//! connections that give back their jobs in parts.
//!
//! How much the server does at once is its own choice: the caller passes how many jobs are in each
//! state, and the model does as much. What it does in the end must be what one client could have seen
//! between the beginning and the end of the command.

use super::super::request::{self, Arguments, Command};
use super::{Batch, Call, Client, ClientNumber, Item, Model, NO_DEADLINE, State};
use crate::harness::fake_disk::to_usize;
use crate::harness::reply::frame;
use std::collections::BTreeSet;
use std::rc::Rc;

/// A command of which the server has done a part.
#[derive(Clone, Debug)]
pub(super) struct Step {
    command: &'static Command,
    arguments: Arguments,
    /// When it began, among all events.
    began: u64,
    began_at: u64,
    /// The jobs that the client had reserved.
    held: Vec<u64>,
    /// The tubes that there were.
    tubes: Vec<Rc<str>>,
    /// For a kick: whether it takes buried jobs.
    takes_buried: bool,
    /// How many jobs a kick or a `delete-batch` is to move or delete at most, and has moved or deleted.
    planned: usize,
    moved: usize,
}

impl Model {
    /// The server has done a part of a command, and has more to do. `facts` are the jobs in each state,
    /// `ids_left` the ids that a `delete-batch` has not come to.
    pub fn step(
        &mut self,
        number: ClientNumber,
        now: u64,
        facts: [u64; 4],
        ids_left: usize,
    ) -> Result<(), String> {
        let client = &self.clients[&number];
        if client.batch.is_none() && client.step.is_none() {
            self.begin_step(number, now)?;
        } else {
            // A client that was woken takes more jobs later than it gave its command.
            self.last_command_at = now.max(self.last_command_at);
        }
        let [_, reserved, delayed, buried] = self.jobs_in_states();
        let more = facts[1].saturating_sub(reserved);
        let client = self.client(number);
        if let Some(step) = client.step.take_if(|it| it.command.word == "reserve-batch" && more > 0)
        {
            let count = step.arguments.count;
            let batch = Batch { first: None, taken: Vec::new(), count, is_first_open: false };
            client.batch = Some(batch);
        }
        if client.batch.is_some() {
            self.take_more(number, usize::try_from(more).expect("a batch is short"));
        }
        let moved = (delayed + buried).saturating_sub(facts[2] + facts[3]);
        let deleted =
            self.jobs_in_states().iter().sum::<u64>().saturating_sub(facts.iter().sum::<u64>());
        if let Some(mut step) = self.client(number).step.take() {
            match step.command.word {
                "kick" if moved > 0 => self.kick_more(number, &mut step, to_usize(moved)),
                "delete-batch" => {
                    let rest = &mut step.arguments.ids;
                    let next: Vec<u64> = rest.drain(..rest.len() - ids_left).collect();
                    step.moved += self.delete_jobs(number, &next, to_usize(deleted));
                }
                _ => {}
            }
            self.client(number).step = Some(step);
        }
        Ok(())
    }

    fn begin_step(&mut self, number: ClientNumber, now: u64) -> Result<(), String> {
        let Some((Item::Line(line), used)) = self.clients[&number].next_item() else {
            return Err(format!("client {number}: the server is in steps without a command"));
        };
        self.client(number).input.drain(..used);
        self.last_command_at = now.max(self.last_command_at + 1);
        let Ok((command, arguments)) = request::parse(&line) else {
            return Err(format!("client {number}: the server is in steps of a malformed line"));
        };
        *self.counters.entry(command.word).or_default() += 1;
        let word = command.word;
        self.client(number).is_worker |=
            ["reserve", "reserve-with-timeout", "reserve-batch"].contains(&word);
        let mut step = Step {
            began: self.next_seq(),
            began_at: self.last_command_at,
            held: self.in_order(|job| job.reserved_by(number)),
            tubes: self.tubes.iter().map(|tube| Rc::clone(&tube.name)).collect(),
            takes_buried: false,
            planned: 0,
            moved: 0,
            command,
            arguments,
        };
        match word {
            "kick" => {
                let bound = step.arguments.count;
                let (takes_buried, jobs) = self.kickable(&self.clients[&number].used, bound);
                (step.takes_buried, step.planned) = (takes_buried, jobs.len());
            }
            "delete-batch" => step.planned = step.arguments.ids.len(),
            "reserve"
            | "reserve-with-timeout"
            | "reserve-batch"
            | "touch-all"
            | "list-jobs"
            | "peek-batch"
            | "list-tubes"
            | "list-tubes-watched" => {}
            other => return Err(format!("client {number}: the server does {other} in steps")),
        }
        self.client(number).step = Some(Box::new(step));
        Ok(())
    }

    pub(super) fn end_step(&mut self, call: &Call<'_>, mut step: Step) {
        let arguments = step.arguments.clone();
        match step.command.word {
            "kick" => {
                let mut more = step.planned - step.moved;
                if self.may_refuse_updates
                    && let Some(fewer) = call.seen_number(b"KICKED ")
                {
                    more = more.min(fewer.saturating_sub(step.moved));
                }
                self.kick_more(call.by, &mut step, more);
                self.reply(call.by, &format!("KICKED {}", step.moved));
            }
            "delete-batch" => {
                self.end_delete_batch(call, &arguments.ids, step.planned, step.moved);
            }
            "reserve" | "reserve-with-timeout" => self.end_reserve(call, &step, arguments.secs),
            "reserve-batch" => {
                let began = (step.began, step.began_at);
                self.begin_batch(call, arguments.count, arguments.secs, began);
            }
            "touch-all" => self.end_touch_all(call, &step),
            "list-jobs" | "peek-batch" if self.may_have_paged(call, &step) => {
                let len = reply_len(call.seen);
                let seen = &call.seen[..len];
                self.client(call.by).output.extend_from_slice(seen);
            }
            "list-tubes" => self.end_list_tubes(call, &step),
            _ => (step.command.run)(self, call, &arguments),
        }
    }

    pub fn is_listing(&self, number: ClientNumber) -> bool {
        self.is_in_step_of(number, "list-tubes")
    }

    pub(super) fn is_touching_all(&self, number: ClientNumber) -> bool {
        self.is_in_step_of(number, "touch-all")
    }

    fn is_in_step_of(&self, number: ClientNumber, word: &str) -> bool {
        let step = self.clients.get(&number).and_then(|client| client.step.as_ref());
        step.is_some_and(|step| step.command.word == word)
    }

    pub fn is_in_step(&self, number: ClientNumber) -> bool {
        self.clients[&number].step.is_some()
    }

    // ---- Reserve, kick and touch ----

    fn take_more(&mut self, number: ClientNumber, count: usize) {
        let Some(mut batch) = self.client(number).batch.take() else { return };
        batch.taken = batch.first.take().into_iter().chain(batch.taken).collect();
        batch.taken.retain(|id| self.has_reserved(number, *id));
        let now = self.last_command_at;
        let count = batch.taken.len() + count;
        batch.taken = self.reserve_more(number, batch.taken, count, now);
        batch.taken.iter().for_each(|id| self.set_deadline(*id, NO_DEADLINE));
        self.client(number).batch = Some(batch);
    }

    fn kick_more(&mut self, number: ClientNumber, step: &mut Step, count: usize) {
        let tube = Rc::clone(&self.clients[&number].used);
        let mut jobs = if step.takes_buried {
            self.in_order(|job| job.buried_in(&tube))
        } else {
            self.in_order(|job| job.delayed_in(&tube))
        };
        jobs.truncate(count);
        jobs.iter().for_each(|id| self.kick_one(*id, self.last_command_at));
        step.moved += jobs.len();
    }

    /// A job that becomes ready during the search may be found or not.
    fn end_reserve(&mut self, call: &Call<'_>, step: &Step, secs: Option<u32>) {
        let client = &self.clients[&call.by];
        let best = self.first_ready(|tube| client.watches(tube));
        let is_old = |id: u64| {
            let job = self.find(id).expect("it is ready");
            job.changed <= step.began && self.pauses_changed <= step.began
        };
        let seen = call.seen_number(b"RESERVED ").map(|id| id as u64);
        let may_miss = best.is_none_or(|id| !is_old(id));
        let found = match seen.filter(|id| Some(*id) != best) {
            Some(id) if may_miss && self.is_ready_for(call.by, id) => Some(id),
            _ if may_miss && !call.seen.is_empty() && seen.is_none() => None,
            _ => best,
        };
        if let Some(id) = found {
            self.reserve(id, call.by, call.now);
            self.reply_job(call.by, "RESERVED", id);
        } else {
            self.wait(call, secs, None, (step.began, step.began_at));
        }
    }

    fn is_ready_for(&self, number: ClientNumber, id: u64) -> bool {
        let is_open = |name: &str| self.find_tube(name).is_some_and(|tube| tube.pause.is_none());
        let job = self.find(id).filter(|job| self.can_be_reserved(job) && is_open(&job.tube));
        job.is_some_and(|job| self.clients[&number].watches(&job.tube))
    }

    /// A job that is lost during the command may be counted or not.
    fn end_touch_all(&mut self, call: &Call<'_>, step: &Step) {
        let held = self.in_order(|job| job.reserved_by(call.by));
        let left = step.held.iter().filter(|id| held.contains(id)).count();
        let count = call.seen_number(b"TOUCHED_ALL ").unwrap_or(left);
        self.touch(call, &held);
        let count = count.clamp(left, step.held.len());
        self.reply(call.by, &format!("TOUCHED_ALL {count}"));
    }

    // ---- Lists ----

    /// A tube that is made or removed meanwhile may be listed or not.
    fn end_list_tubes(&mut self, call: &Call<'_>, step: &Step) {
        let seen = frame(call.seen).and_then(|reply| reply.body);
        let seen = seen.and_then(|body| str::from_utf8(body).ok()).unwrap_or_default();
        let names: Vec<&str> = seen.lines().filter_map(|line| line.strip_prefix("- ")).collect();
        let listed: BTreeSet<&str> = names.iter().copied().collect();
        let stays =
            |name: &&Rc<str>| self.find_tube(name).is_some_and(|tube| tube.made <= step.began);
        let is_known = |name: &&&str| {
            step.tubes.iter().any(|tube| **tube == ***name) || self.find_tube(name).is_some()
        };
        let is_possible = self.tubes_changed > step.began
            && listed.len() == names.len()
            && names.iter().filter(is_known).count() == names.len()
            && step.tubes.iter().filter(stays).all(|name| listed.contains(&**name));
        if is_possible {
            let text = seen.to_owned();
            self.reply_document(call, &text);
        } else {
            self.list_tubes(call);
        }
    }

    /// Returns whether the reply is a page that is not what the model has now, and may have been what it
    /// had meanwhile: jobs that have changed may be listed or not.
    fn may_have_paged(&self, call: &Call<'_>, step: &Step) -> bool {
        let (page, began) = (&step.arguments, step.began);
        let Some((ids, _)) = self.select(page, call.now) else { return false };
        let is_list = step.command.word == "list-jobs";
        let word = if is_list { "\n- {id: " } else { "\nFOUND " };
        let seen = String::from_utf8_lossy(call.seen);
        let numbers = seen.split(word).skip(1).map(|rest| {
            let end = rest.find(|char: char| !char.is_ascii_digit()).unwrap_or(rest.len());
            rest[..end].parse::<u64>().unwrap_or(0)
        });
        let listed: Vec<u64> = numbers.take(page.count).collect();
        let Some(&last) = listed.last() else { return false };
        let has_changed = |id: u64| self.find(id).is_none_or(|job| job.changed > began);
        let stays = |id: &&u64| **id <= last && !has_changed(**id);
        let is_new = |id: &&u64| has_changed(**id);
        listed.is_sorted_by(|a, b| a < b)
            && listed[0] > page.after
            && ids.iter().filter(stays).all(|id| listed.contains(id))
            && (ids.iter().any(|id| has_changed(*id)) || listed.iter().any(|id| is_new(&id)))
            && listed.iter().all(|id| ids.contains(id) || has_changed(*id))
    }

    // ---- Close ----

    /// Closes a connection. It gives back its jobs in the order of their reservations, then its tubes:
    /// [`Model::close_step`]. A first part of them comes before those of connections that were closed earlier.
    pub fn begin_close(&mut self, number: ClientNumber) {
        self.waiters.retain(|waiter| waiter.client != number);
        for flush in self.flushes.iter_mut().filter(|flush| flush.client == Some(number)) {
            flush.client = None;
        }
        let client = self.clients.remove(&number).expect("the client was connected");
        // The number is used again.
        let own = ClientNumber::MAX - usize::try_from(self.next_seq()).expect("runs are short");
        for job in &mut self.jobs {
            if let State::Reserved { by, .. } = &mut job.state
                && *by == number
            {
                *by = own;
            }
        }
        self.closing.insert(0, (own, client));
    }

    /// A closed connection gives back its next job, or its tubes. Returns `false` if there is none.
    pub fn close_step(&mut self, now: u64) -> bool {
        // Not before the commands that ran before.
        let now = now.max(self.last_command_at);
        let Some((own, _)) = self.closing.first() else { return false };
        let own = *own;
        let held = self.in_order(|job| job.reserved_by(own).map(|(_, seq)| seq));
        if let Some(id) = held.first() {
            self.take_back(*id, now);
            return true;
        }
        while let Some(tube) = self.closing[0].1.watched.first().cloned() {
            self.closing[0].1.watched.swap_remove(0);
            self.remove_if_idle(&tube);
        }
        let (_, Client { used, .. }) = self.closing.remove(0);
        self.remove_if_idle(&used);
        true
    }
}

/// Returns the length of the first reply with all that belongs to it.
fn reply_len(seen: &[u8]) -> usize {
    let mut len = frame(seen).map_or(seen.len(), |reply| reply.len);
    if seen.starts_with(b"FOUND_BATCH ") {
        while seen[len..].starts_with(b"FOUND ")
            && let Some(next) = frame(&seen[len..])
        {
            len += next.len;
        }
    }
    len
}
