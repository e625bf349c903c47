//! Lets the model do what the engine has just done, in the same order, and compares the replies.

use super::super::event::escape;
use super::super::model::{ClientNumber, Due, Model, UNREAD_LIMIT};
use super::{Failure, Simulation, nanos};
use beanstalkd::testing::{Histogram, Page, Server};
use std::io::IoSlice;

/// At most this many steps are tried to find the order of what was due at once.
const MAX_ORDER_STEPS: usize = 20_000;
const SLICES: usize = 192;

impl Simulation {
    /// Takes the replies that the engine has made since the last call.
    pub(super) fn take_replies(&mut self) {
        let mut keys = Vec::new();
        self.server.take_dirty(&mut keys);
        for key in keys {
            let Some(&client) = self.numbers.get(&key) else { continue };
            if !self.to_flush.contains(&client) {
                self.to_flush.push(client);
            }
            let socket = self.sockets.get_mut(&client).expect("it has a number");
            let mut slices = [IoSlice::new(&[]); SLICES];
            let output = self.server.output_handle(key);
            let filled = output.next_slices(&mut slices);
            let mut known = socket.output.len();
            for slice in &slices[..filled] {
                let skipped = known.min(slice.len());
                known -= skipped;
                socket.output.extend_from_slice(&slice[skipped..]);
            }
        }
    }

    /// Lets the model run the commands of a client that the engine has just run, one for each
    /// reply. A `reserve` that waits, a `quit` and the line of a put have no reply: they were run
    /// if nothing is left for the engine to run.
    pub(super) fn follow(&mut self, client: ClientNumber) -> Result<(), Failure> {
        self.take_replies();
        loop {
            let socket = self.sockets.get_mut(&client).expect("the client is served");
            let known = self.model.clients[&client].output.len();
            let seen = &socket.output[known..];
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
            if !socket.output.starts_with(expected) {
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
        // Without waiters the order makes no difference.
        let is_open = due.len() > 1 && !self.model.waiters.is_empty();
        let mut steps_left = MAX_ORDER_STEPS;
        let found =
            if is_open { self.find_order(&self.model, &due, &mut steps_left) } else { None };
        match found {
            Some(model) => self.model = model,
            None => due.iter().for_each(|it| self.model.on_due(it, self.now)),
        }
        self.compare()
    }

    /// Returns the model after all that is due, in an order that explains the replies.
    fn find_order(&self, model: &Model, due: &[Due], steps_left: &mut usize) -> Option<Model> {
        let output = |client: &ClientNumber| &self.sockets[client].output;
        if due.is_empty() {
            let is_it = model.clients.iter().all(|(client, it)| it.output == *output(client));
            return is_it.then(|| model.clone());
        }
        for index in 0..due.len() {
            *steps_left = steps_left.checked_sub(1)?;
            let mut next = model.clone();
            next.on_due(&due[index], self.now);
            if next.clients.iter().all(|(client, it)| output(client).starts_with(&it.output)) {
                let mut rest = due.to_vec();
                rest.remove(index);
                if let Some(found) = self.find_order(&next, &rest, steps_left) {
                    return Some(found);
                }
            }
        }
        None
    }

    /// Compares the replies to all clients, and keeps what has become of jobs.
    pub(super) fn compare(&mut self) -> Result<(), Failure> {
        self.take_replies();
        for (client, known) in &self.model.clients {
            let output = &self.sockets[client].output;
            let is_changed = self.to_flush.contains(client);
            if output.len() != known.output.len() || is_changed && *output != known.output {
                return Err(difference(*client, &known.output, output));
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

/// Returns the counter of puts from the page for Prometheus. It shows whether the engine has parsed
/// the line of a put whose body has not been used.
fn puts(server: &Server, now: u64) -> u64 {
    const SAMPLE: &str = "beanstalkd_commands_total{command=\"put\"} ";
    let (mut page, mut text) = (Page::new(0), String::new());
    let iterations = Histogram::default();
    while !page.is_done() {
        let made = page.write_slice(&server.view(&iterations, nanos(now)), &mut text);
        made.expect("the test has memory");
        let sample = text.split_once(SAMPLE).and_then(|(_, rest)| rest.split_once('\n'));
        if let Some((count, _)) = sample {
            return count.parse().expect("a counter is a number");
        }
    }
    unreachable!("the page has the counter");
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
