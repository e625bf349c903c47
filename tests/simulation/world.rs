//! The model as a world: conversations are played into it too, so that it is right before it judges.

use super::model::{ClientNumber, Model};
use crate::harness::driver::{Options, START};
use crate::harness::world::{Client, Restart, World};
use std::time::Duration;

pub struct ModelWorld {
    model: Model,
    now: u64,
    /// What each client has received and not taken, and whether its connection is closed.
    clients: Vec<(Vec<u8>, bool)>,
}

impl ModelWorld {
    pub fn new(options: Options) -> ModelWorld {
        let now = START.as_nanos();
        ModelWorld { model: Model::new(options, false, now), now, clients: Vec::new() }
    }

    /// Runs all commands that can be run, and closes the connections that have ended.
    fn settle(&mut self) {
        let mut numbers: Vec<ClientNumber> = self.model.clients.keys().copied().collect();
        while let Some(number) = numbers.pop() {
            while self.model.run_next(number, self.now, b"") || !self.model.flushes.is_empty() {
                if !self.model.flushes.is_empty() {
                    self.model.end_flush(0);
                }
                // It may have woken others.
                numbers.extend(self.model.clients.keys().filter(|it| self.model.can_run(**it)));
                self.take_output();
            }
        }
        self.take_output();
        let is_over = |number: &ClientNumber| {
            let client = &self.model.clients[number];
            client.is_closing || client.has_input_ended && !self.model.is_waiting(*number)
        };
        let over: Vec<ClientNumber> = self.model.clients.keys().copied().filter(is_over).collect();
        over.iter().for_each(|number| self.close(*number));
        if !over.is_empty() {
            self.settle();
        }
    }

    fn take_output(&mut self) {
        for (number, client) in &mut self.model.clients {
            self.clients[*number].0.append(&mut client.output);
        }
    }

    fn close(&mut self, number: ClientNumber) {
        self.clients[number].1 = true;
        self.model.begin_close(number);
        while self.model.close_step(self.now) {}
    }
}

impl World for ModelWorld {
    fn connect(&mut self) -> Client {
        let client = self.clients.len();
        self.clients.push((Vec::new(), false));
        self.model.connect(client, client as u64 + 1, self.now);
        client
    }

    fn send(&mut self, client: Client, bytes: &[u8]) {
        if !self.clients[client].1 {
            self.model.receive(client, bytes);
            self.settle();
        }
    }

    fn half_close(&mut self, client: Client) {
        self.model.end_input(client);
        self.settle();
    }

    fn hang_up(&mut self, client: Client) {
        if !self.clients[client].1 {
            self.half_close(client);
        }
    }

    fn take(&mut self, client: Client, _is_brief: bool) -> Option<Vec<u8>> {
        let (received, is_closed) = &mut self.clients[client];
        let received = std::mem::take(received);
        (!*is_closed || !received.is_empty()).then_some(received)
    }

    fn advance(&mut self, span: Duration) {
        let end = self.now + u64::try_from(span.as_nanos()).expect("scripts are short");
        let next = |it: &ModelWorld| it.model.moments().iter().map(|(due, _)| *due).min();
        while let Some(next) = next(self).filter(|&next| next <= end) {
            self.now = self.now.max(next);
            for due in self.model.due(self.now) {
                self.model.on_due(&due, self.now);
            }
            self.settle();
        }
        self.now = end;
    }

    fn restart(&mut self, _how: Restart) {
        unreachable!("the model has no binlog")
    }

    fn drain(&mut self) {
        self.model.is_draining = true;
    }
}
