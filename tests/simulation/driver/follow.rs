//! Lets the model do what the engine has just done, in the same order, and compares the replies.

use super::super::event::escape;
use super::super::model::{Client, ClientNumber, Due, Flush, Model, UNREAD_LIMIT};
use super::{Failure, Simulation, Socket, bury_log, nanos};
use beanstalkd::testing::{Histogram, Nanos, Page, Server};
use std::collections::BTreeSet;
use std::io::IoSlice;

/// At most this many steps are tried to find the order of what was due at once.
const MAX_ORDER_STEPS: usize = 20_000;
/// The parts of the output of a client: a batch has two for each large body.
const SLICES: usize = 2_048;
/// The engine shows this many bytes of output at once, or less by the first line of a reply with a
/// body. Each reply begins before them, because no command is run behind 256 KiB of output.
const SHOWN_LEN: usize = 512 * 1024;
const MAX_LINE_LEN: usize = 64;

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
    /// Takes the replies that the engine has made since the last call.
    pub(super) fn take_replies(&mut self) {
        // What was read in the background ends at once: the model knows no reply that waits for it.
        while self.disk.has_reads() {
            self.server.tick(nanos(self.now));
        }
        let mut keys = Vec::new();
        self.server.take_dirty(&mut keys);
        for key in keys {
            let client = self.numbers.get(&key).copied();
            self.to_flush.extend(client.filter(|client| !self.to_flush.contains(client)));
        }
        // A client stays dirty until it is flushed, and may get more replies.
        for client in &self.to_flush {
            let Some(socket) = self.sockets.get_mut(client) else { continue };
            let (output, bodies) = self.server.unsent(socket.key);
            if output.len() == socket.output.len() {
                socket.is_output_cut = false;
                continue;
            }
            let mut slices = [IoSlice::new(&[]); SLICES];
            let filled = output.unsent_slices(&mut slices, bodies);
            let mut known = socket.output.len();
            let shown: usize = slices[..filled].iter().map(|slice| slice.len()).sum();
            socket.is_output_cut = shown + MAX_LINE_LEN > SHOWN_LEN;
            for slice in &slices[..filled] {
                let skipped = known.min(slice.len());
                known -= skipped;
                socket.output.extend_from_slice(&slice[skipped..]);
            }
        }
    }

    /// Lets the model run the commands of a client that the engine has just run, one for each
    /// reply. A `reserve` that waits, a flush in steps, a `quit` and the line of a put have no reply:
    /// they were run if nothing is left for the engine to run.
    pub(super) fn follow(&mut self, client: ClientNumber) -> Result<(), Failure> {
        self.take_replies();
        loop {
            let socket = self.sockets.get_mut(&client).expect("the client is served");
            let known = self.model.clients[&client].output.len();
            let seen = socket.output.get(known..).unwrap_or_default();
            let has_left = self.server.actions(socket.key).run;
            let is_put_line = || {
                let sends_put = self.model.clients[&client].sends_put_line();
                sends_put && puts(&self.server, self.now) > self.model.puts()
            };
            if seen.is_empty() && has_left && !is_put_line() {
                break;
            }
            if !self.model.run_next(client, self.now, seen) {
                if seen.is_empty() {
                    break;
                }
                let why = if known >= UNREAD_LIMIT { "too much is unread" } else { "no command" };
                return Err(format!("client {client}: a reply, but {why}\n  came: {}", cut(seen)));
            }
            socket.commands += 1;
            socket.has_progress = true;
            let expected = &self.model.clients[&client].output;
            if !socket.begins_with(expected) {
                return Err(difference(client, expected, &socket.output));
            }
        }
        self.compare()
    }

    /// Lets the model do what was due. What is due at once may be done in any order: the replies
    /// must be those of one of them.
    pub(super) fn follow_tick(&mut self) -> Result<(), Failure> {
        self.take_replies();
        let due = self.model.due(self.now);
        // Without waiters the order makes no difference, except to the order of buried jobs.
        let is_open = due.len() > 1 && !self.model.waiters.is_empty();
        let mut search = OrderSearch::new(if is_open { self.orders.next() } else { 0 });
        if is_open {
            self.find_order(&self.model, &due, &mut search);
        }
        if search.is_exhausted() {
            return Err(NO_OTHER_ORDER.to_owned());
        }
        match search.found {
            Some(model) => self.model = model,
            None => due.iter().for_each(|it| self.model.on_due(it, self.now)),
        }
        if due.len() > 1 {
            self.model.open_batches();
            self.model.order_buried(&bury_log::take());
        }
        self.follow_flushes()?;
        self.compare()
    }

    /// Ends the flushes that the engine has ended in this tick: those with a reply, and those of
    /// clients that have gone away. The engine frees the jobs of the oldest one first.
    fn follow_flushes(&mut self) -> Result<(), Failure> {
        while let Some(Flush { client, tube, .. }) = self.model.flushes.first() {
            let is_over = match client {
                Some(client) => self.has_more_output(*client),
                // The engine deletes no job then.
                None if self.server.is_congested() => false,
                // A tube that another client needs does not show it.
                None => self.server.next_due() != Some(Nanos::ZERO) || !self.has_tube(tube),
            };
            if !is_over {
                break;
            }
            self.model.end_flush(0);
            self.iterations_of_flush = 0;
        }
        self.check_flushes()
    }

    /// Returns whether the engine has a tube, without a command.
    fn has_tube(&self, name: &str) -> bool {
        let sample = format!("{{tube=\"{name}\"");
        let mut has = false;
        visit_metrics(&self.server, self.now, |text| has |= text.contains(&sample));
        has
    }

    /// Searches for the model after all that is due, in an order that explains the replies.
    fn find_order(&self, model: &Model, due: &[Due], search: &mut OrderSearch) {
        if due.is_empty() {
            let is_it = |(client, it): (&ClientNumber, &Client)| {
                self.sockets[client].is_output(&it.output) || model.is_flushing(*client)
            };
            if model.clients.iter().all(is_it) {
                search.add(model);
            }
            return;
        }
        for index in 0..due.len() {
            if search.is_over() {
                return;
            }
            search.steps_left -= 1;
            let mut next = model.clone();
            next.on_due(&due[index], self.now);
            if next.clients.iter().all(|(client, it)| self.sockets[client].begins_with(&it.output))
            {
                let mut rest = due.to_vec();
                rest.remove(index);
                self.find_order(&next, &rest, search);
            }
        }
    }

    /// Returns whether the engine has made replies to the client that the model does not know.
    fn has_more_output(&self, client: ClientNumber) -> bool {
        self.sockets[&client].output.len() > self.model.clients[&client].output.len()
    }

    /// Ends the oldest flushes that have a reply. A tick that ends a read of a body also frees jobs.
    fn follow_replies_to_flushes(&mut self) {
        while let Some(Flush { client: Some(client), .. }) = self.model.flushes.first()
            && self.has_more_output(*client)
        {
            self.model.end_flush(0);
            self.iterations_of_flush = 0;
        }
    }

    /// Compares the replies to all clients, and keeps what has become of jobs.
    pub(super) fn compare(&mut self) -> Result<(), Failure> {
        self.take_replies();
        self.follow_replies_to_flushes();
        for (client, known) in &self.model.clients {
            let socket = &self.sockets[client];
            let is_changed = self.to_flush.contains(client);
            let is_len = socket.output.len() == known.output.len() || socket.is_output_cut;
            if !is_len || is_changed && !socket.is_output(&known.output) {
                return Err(difference(*client, &known.output, &socket.output));
            }
        }
        for change in self.model.changes.drain(..) {
            if self.setup.binlog.is_some() {
                self.journal.record(change);
            }
        }
        Ok(())
    }
}

impl Socket {
    /// Returns whether the output begins with these replies.
    fn begins_with(&self, replies: &[u8]) -> bool {
        self.output.starts_with(replies) || self.is_output_cut && replies.starts_with(&self.output)
    }

    /// Returns whether the output is these replies and no more.
    fn is_output(&self, replies: &[u8]) -> bool {
        self.begins_with(replies) && self.output.len() <= replies.len()
    }
}

/// Returns the counters of puts from the page for Prometheus. They show whether the engine has
/// parsed the line of a put whose body has not been used.
fn puts(server: &Server, now: u64) -> u64 {
    const SAMPLES: [&str; 2] = [
        "beanstalkd_commands_total{command=\"put\"} ",
        "beanstalkd_commands_total{command=\"put-in-tube\"} ",
    ];
    let mut puts = 0;
    visit_metrics(server, now, |text| {
        for line in text.lines() {
            let counts = SAMPLES.iter().filter_map(|sample| line.strip_prefix(sample));
            puts += counts.map(|count| count.parse::<u64>().expect("it is a number")).sum::<u64>();
        }
    });
    puts
}

/// Calls `visit` with the slices of the page for Prometheus. Each has whole lines.
fn visit_metrics(server: &Server, now: u64, mut visit: impl FnMut(&str)) {
    let (mut page, iterations) = (Page::new(0), Histogram::default());
    while !page.is_done() {
        let mut text = String::new();
        let made = page.write_slice(&server.view(&iterations, nanos(now)), &mut text);
        made.expect("the test has memory");
        visit(&text);
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
