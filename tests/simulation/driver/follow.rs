//! Lets the model do what the engine has just done, in the same order, and compares the replies.

use super::super::event::escape;
use super::super::model::{ClientNumber, Due, Flush, Model, UNREAD_LIMIT};
use super::{Failure, Nanos, Simulation};
use std::collections::BTreeSet;

/// At most this many steps are tried to find the order of what was due at once.
const MAX_ORDER_STEPS: usize = 20_000;
/// The failure of a history for which another order was wanted where there is none.
const NO_OTHER_ORDER: &str = "nothing else explains the replies";

/// The orders in which things were done that were due at once. Several orders may explain the replies; only
/// later replies show which one the engine took.
#[derive(Clone, Debug, Default)]
pub struct Orders {
    /// For each moment at which several things were due, the number of the order to take; 0 after the last.
    choices: Vec<usize>,
    /// How many such moments there were.
    open_moments: usize,
}

impl Orders {
    fn next(&mut self) -> usize {
        self.open_moments += 1;
        self.choices.get(self.open_moments - 1).copied().unwrap_or(0)
    }

    /// Returns the orders to be tried after a failure with these: another one at the last moment, or, if
    /// there is none, at the one before.
    pub fn next_to_try(mut self, failure: &Failure) -> Option<Orders> {
        let is_exhausted = failure == NO_OTHER_ORDER;
        self.choices
            .resize(if is_exhausted { self.open_moments - 1 } else { self.open_moments }, 0);
        *self.choices.last_mut()? += 1;
        Some(Orders { choices: self.choices, open_moments: 0 })
    }
}

/// A search for an order.
struct OrderSearch {
    /// The number of different models to skip.
    skip: usize,
    /// States of the models found so far.
    explained: BTreeSet<String>,
    found: Option<Model>,
    steps_left: usize,
}

impl OrderSearch {
    fn new(skip: usize) -> OrderSearch {
        let explained = BTreeSet::new();
        OrderSearch { skip, explained, found: None, steps_left: MAX_ORDER_STEPS }
    }

    fn is_over(&self) -> bool {
        self.found.is_some() || self.steps_left == 0
    }

    fn is_exhausted(&self) -> bool {
        self.skip > 0 && self.found.is_none()
    }

    fn add(&mut self, model: &Model) {
        let is_wanted = self.skip == 0
            || (self.explained.insert(format!("{model:?}")) && self.explained.len() > self.skip);
        if is_wanted {
            self.found = Some(model.clone());
        }
    }
}

impl Simulation {
    /// Lets the model run the commands of a client that the engine has just run, one for each
    /// reply. A `reserve` that waits, a flush in steps, a `quit` and the line of a put have no reply:
    /// they were run if nothing is left for the engine to run. If the end of the input `is_read` too, the
    /// last reply may be that to a wait.
    pub(super) fn follow(&mut self, client: ClientNumber, is_read: bool) -> Result<(), Failure> {
        loop {
            let seen = self.unknown(client);
            let has_left = self.driver.has_commands_left(self.sockets[&client].client);
            let is_put_line = || {
                let sends_put = self.model.clients[&client].sends_put_line();
                sends_put && self.driver.facts().puts_begun > self.model.puts()
            };
            if seen.is_empty() && !is_put_line() {
                let socket = self.sockets[&client].client;
                if self.driver.is_in_steps(socket) {
                    let (jobs, ids_left) =
                        (self.driver.facts().jobs(), self.driver.ids_left(socket));
                    return self.model.step(client, self.now(), jobs, ids_left);
                }
                if has_left {
                    return Ok(());
                }
            }
            let seen = seen.to_vec();
            self.model.woken = self.model.clients.keys().filter(|it| self.is_woken(**it)).count();
            let has_run = self.model.run_next(client, self.now(), &seen);
            self.wait_for_bodies();
            if !has_run {
                if seen.is_empty() || is_read {
                    return Ok(());
                }
                let known = self.model.clients[&client].output.len();
                let why = if known >= UNREAD_LIMIT { "too much is unread" } else { "no command" };
                return Err(format!("client {client}: a reply, but {why}\n  came: {}", cut(&seen)));
            }
            let socket = self.socket(client);
            socket.commands += 1;
            socket.has_progress = true;
            let expected = &self.model.clients[&client].output;
            if !self.made(client).starts_with(expected) {
                return Err(difference(client, expected, self.made(client)));
            }
        }
    }

    /// Lets the model do what was due. What is due at once may be done in any order: the replies
    /// must be those of one of them.
    pub(super) fn follow_tick(&mut self, has_tick: bool) -> Result<(), Failure> {
        // A tick is not before the commands that ran.
        let ran_at = if has_tick { self.model.last_command_at } else { 0 };
        let now = self.now().max(ran_at);
        let last_seq = self.model.last_seq;
        self.end_reads();
        let due = self.model.due(now);
        // Without waiters the order makes no difference, except to the order of buried jobs.
        let has_choice = due.len() > 1 || due.len() + self.model.waiters.len() > 2;
        let is_open = !due.is_empty() && has_choice && !self.model.waiters.is_empty();
        let mut search = OrderSearch::new(if is_open { self.orders.next() } else { 0 });
        if is_open {
            self.find_order(&self.model, &due, &mut search);
        }
        if search.is_exhausted() {
            return Err(NO_OTHER_ORDER.to_owned());
        }
        match search.found {
            Some(model) => self.model = model,
            None => due.iter().for_each(|it| _ = self.model.on_due(it, usize::MAX, now)),
        }
        self.wait_for_bodies();
        if due.len() > 1 {
            self.model.open_batches();
            for tube in self.model.tubes_with_burials_since(last_seq) {
                self.model.order_buried(&self.driver.buried(&tube), last_seq);
            }
        }
        self.follow_flushes(true);
        self.check_flushes()?;
        self.follow_closes();
        self.compare()
    }

    /// Lets closed connections give back as many jobs as the engine has.
    pub(super) fn follow_closes(&mut self) {
        self.wait_for_bodies();
        let now = self.now();
        loop {
            let is_over = self.driver.facts().closing == 0;
            let is_same = self.driver.facts().jobs() == self.model.jobs_in_states()
                && !self.model.clients.keys().any(|it| self.is_woken(*it));
            if is_same && !is_over || !self.model.close_step(now) {
                return;
            }
            self.wait_for_bodies();
        }
    }

    /// Returns whether a worker that waits in the model has got a job. It may have no reply yet, because it makes a batch
    /// or waits for the body.
    fn is_woken(&self, client: ClientNumber) -> bool {
        self.model.is_waiting(client) && !self.driver.waits(self.sockets[&client].client)
    }

    /// Ends the flushes that the engine has ended: those with a reply, and in a tick those of clients that
    /// have gone away. The engine frees the jobs of the oldest one first. A tick that ends a read of a body
    /// also frees jobs.
    fn follow_flushes(&mut self, in_tick: bool) {
        while let Some(Flush { client, tube, .. }) = self.model.flushes.first() {
            let is_over = match client {
                Some(client) => !self.unknown(*client).is_empty(),
                // The engine deletes no job on a congested disk.
                None if self.driver.is_congested() || !in_tick => false,
                // A tube that another client needs does not show it.
                None => self.driver.next_due() != Some(Nanos::ZERO) || !self.driver.has_tube(tube),
            };
            if !is_over {
                return;
            }
            self.model.end_flush(0);
            self.iterations_of_flush = 0;
        }
    }

    /// Searches for the model after what was due, in an order that explains the replies. An engine with other
    /// work may leave some of it to the next tick, which is then due at once.
    fn find_order(&self, model: &Model, due: &[Due], search: &mut OrderSearch) {
        let explains = |next: &mut Model| {
            if self.reads_late() {
                next.wait_for_bodies(|client| self.made(client).len());
            }
            next.clients.iter().all(|(client, it)| self.made(*client).starts_with(&it.output))
        };
        let each = |index: usize| (due[index].clone(), [&due[..index], &due[index + 1..]].concat());
        let mut firsts: Vec<(Due, Vec<Due>)> = (0..due.len()).map(each).collect();
        // Pauses that end in the same tick give the best job of all their tubes first.
        let paused = model.ended_pauses(due, self.now());
        if paused.len() > 1 {
            let is_other =
                |it: &&Due| !matches!(it, Due::Tubes(names) if paused.contains(&names[0]));
            let others = due.iter().filter(is_other).cloned().collect();
            firsts.push((Due::Tubes(paused), others));
        }
        for (first, rest) in firsts {
            if search.is_over() {
                return;
            }
            search.steps_left -= 1;
            // Of the clients that wait for the end of a pause some may be left to the next tick.
            for wakes in [usize::MAX, 1] {
                let mut next = model.clone();
                let has_more = next.on_due(&first, wakes, self.now());
                if explains(&mut next) && (has_more || wakes > 1) {
                    self.find_order(&next, if has_more { due } else { &rest }, search);
                    break;
                }
            }
        }
        let is_it = |client: &ClientNumber| {
            self.made(*client) == model.clients[client].output
                || model.is_flushing(*client)
                || model.is_listing(*client)
        };
        let has_more = || self.driver.next_due().is_some_and(|next| next <= self.driver.now);
        let is_left = || has_more() && self.driver.facts().jobs() == model.jobs_in_states();
        if !search.is_over() && model.clients.keys().all(is_it) && (due.is_empty() || is_left()) {
            search.add(model);
        }
    }

    /// Compares the replies to all clients and the facts, and keeps what has become of jobs.
    pub(super) fn compare(&mut self) -> Result<(), Failure> {
        self.end_reads();
        self.wait_for_bodies();
        self.follow_lists();
        self.follow_flushes(false);
        for (client, known) in &self.model.clients {
            let socket = self.sockets.get_mut(client).expect("the client is connected");
            let (made, expected) = (self.driver.made(socket.client), &known.output);
            // Neither changes what it has made.
            let same = socket.compared.min(expected.len());
            if made.get(same..) != expected.get(same..) {
                return Err(difference(*client, expected, made));
            }
            socket.compared = made.len();
        }
        self.record_changes();
        self.compare_facts()
    }

    /// Keeps what has become of jobs.
    pub(super) fn record_changes(&mut self) {
        for change in self.model.changes.drain(..) {
            if self.setup.has_binlog() {
                self.journal.record(change);
            }
        }
    }

    /// Lets replies wait whose bodies are read.
    fn wait_for_bodies(&mut self) {
        if self.reads_late() {
            let Simulation { model, driver, sockets, .. } = self;
            model.wait_for_bodies(|client| driver.made(sockets[&client].client).len());
        }
    }

    /// Lets the model make the replies whose bodies were read.
    fn end_reads(&mut self) {
        let Simulation { model, driver, sockets, .. } = self;
        let now = driver.now.as_nanos();
        let is_held = |client, id| driver.deadline(sockets[&client].client, id).is_some();
        model.end_reads(|client| driver.made(sockets[&client].client), is_held, now);
    }

    /// Returns whether a reply may wait for its bodies: for the disk, or because its iteration has no work left.
    fn reads_late(&self) -> bool {
        self.setup.body_cache.is_some()
    }

    /// Ends the lists of tubes that the engine has sent.
    fn follow_lists(&mut self) {
        let is_listing = |it: &&ClientNumber| self.model.is_listing(**it);
        let listing: Vec<ClientNumber> =
            self.model.clients.keys().filter(is_listing).copied().collect();
        for client in listing {
            let seen = self.unknown(client).to_vec();
            if !seen.is_empty() {
                self.model.run_next(client, self.now(), &seen);
            }
        }
    }

    fn compare_facts(&self) -> Result<(), Failure> {
        let came = self.driver.facts().jobs();
        let expected = self.model.jobs_in_states();
        if came != expected {
            return Err(format!(
                "ready, reserved, delayed, buried jobs: {came:?}\n  expected: {expected:?}"
            ));
        }
        Ok(())
    }
}

/// Describes a reply that is not the expected one, from shortly before the first different byte.
pub(super) fn difference(client: ClientNumber, expected: &[u8], came: &[u8]) -> Failure {
    const BEFORE: usize = 40;
    let same = expected.iter().zip(came).take_while(|(a, b)| a == b).count();
    let from = same.saturating_sub(BEFORE);
    format!(
        "client {client}: wrong reply (shown from byte {from})\n  expected: {}\n  came:     {}",
        cut(&expected[from..]),
        cut(&came[from..]),
    )
}

/// Formats the first bytes of a reply.
fn cut(bytes: &[u8]) -> String {
    const SHOWN: usize = 120;
    match bytes.len() {
        0 => "nothing".to_owned(),
        len if len > SHOWN => format!("{} and {} more bytes", escape(&bytes[..SHOWN]), len - SHOWN),
        _ => escape(bytes),
    }
}
