//! The engine driven as the event loop drives it: a connection is a queue of bytes in each direction,
//! and an iteration serves the ready connections within its budget.

use super::engine::Engine;
use beanstalkd::testing::{ConnKey, Nanos};
use std::collections::{BTreeMap, VecDeque};
use std::ops::{Deref, DerefMut};

/// Identifies a client for the whole test, unlike the key of its connection.
pub type ClientId = usize;

pub struct EventLoop {
    engine: Engine,
    /// The most bytes read from a connection at once.
    read_len: usize,
    /// Virtual time from one iteration to the next.
    period: Nanos,
    clients: Vec<Client>,
    by_key: BTreeMap<ConnKey, ClientId>,
    ready: VecDeque<ClientId>,
    pub iterations: usize,
}

#[derive(Default)]
struct Client {
    /// `None` once the connection is closed.
    key: Option<ConnKey>,
    /// Sent and not yet received by the server.
    sent: VecDeque<u8>,
    received: Vec<u8>,
    is_queued: bool,
    /// The client has shut its sending side down, and the server has not read the end yet.
    has_end: bool,
}

impl Deref for EventLoop {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for EventLoop {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl EventLoop {
    pub fn new(engine: Engine, read_len: usize, period: Nanos) -> EventLoop {
        let (clients, by_key, ready) = (Vec::new(), BTreeMap::new(), VecDeque::new());
        EventLoop { engine, read_len, period, clients, by_key, ready, iterations: 0 }
    }

    /// Returns the engine with the connections that it has.
    pub fn into_engine(self) -> Engine {
        self.engine
    }

    // ---- Clients ----

    pub fn connect(&mut self) -> ClientId {
        let key = self.engine.connect();
        self.by_key.insert(key, self.clients.len());
        self.clients.push(Client { key: Some(key), ..Client::default() });
        self.clients.len() - 1
    }

    /// Ends the connection at once.
    pub fn disconnect(&mut self, id: ClientId) {
        if let Some(key) = self.clients[id].key.take() {
            self.by_key.remove(&key);
            self.engine.disconnect(key);
        }
    }

    pub fn send(&mut self, id: ClientId, bytes: impl AsRef<[u8]>) {
        self.clients[id].sent.extend(bytes.as_ref());
        self.enqueue(id);
    }

    /// Shuts the sending side of the client down.
    pub fn half_close(&mut self, id: ClientId) {
        let client = &mut self.clients[id];
        if let Some(key) = client.key {
            client.has_end = true;
            self.engine.server.half_close(key);
            self.enqueue(id);
        }
    }

    /// The key of the connection, or `None` if it is closed.
    pub fn key(&self, id: ClientId) -> Option<ConnKey> {
        self.clients[id].key
    }

    /// What the client has received and not taken.
    pub fn received(&self, id: ClientId) -> &[u8] {
        &self.clients[id].received
    }

    /// Takes what the client has received.
    pub fn take(&mut self, id: ClientId) -> Vec<u8> {
        std::mem::take(&mut self.clients[id].received)
    }

    // ---- Iterations ----

    /// Runs one iteration. Returns the number of flushed connections.
    pub fn iterate(&mut self) -> usize {
        self.iterations += 1;
        self.engine.advance(self.period);
        self.engine.server.begin_iteration(self.ready.len());
        self.engine.tick();
        self.engine.server.share_budget(self.ready.len());
        for _ in 0..self.ready.len() {
            if !self.engine.server.has_budget() {
                break;
            }
            let Some(id) = self.ready.pop_front() else { break };
            self.serve(id);
        }
        self.engine.commit();
        self.flush()
    }

    /// Iterates until no connection has anything to do, or the disk is congested.
    pub fn settle(&mut self) {
        self.iterate();
        while self.can_serve() || self.engine.server.has_dirty() {
            self.iterate();
        }
    }

    fn can_serve(&self) -> bool {
        !self.ready.is_empty() && !self.engine.server.is_congested()
    }

    fn enqueue(&mut self, id: ClientId) {
        if !std::mem::replace(&mut self.clients[id].is_queued, true) {
            self.ready.push_back(id);
        }
    }

    fn serve(&mut self, id: ClientId) {
        let client = &mut self.clients[id];
        client.is_queued = false;
        let Some(key) = client.key else { return };
        let mut actions = self.engine.server.mark_dirty(key);
        if actions.run {
            self.engine.resume(key);
            actions = self.engine.server.actions(key);
        }
        if !actions.read {
            return;
        }
        if client.sent.is_empty() {
            if std::mem::take(&mut client.has_end) {
                self.engine.server.end_input(key);
            }
        } else {
            let count = client.sent.len().min(self.read_len);
            self.engine.receive(key, client.sent.drain(..count).collect::<Vec<u8>>());
        }
    }

    fn flush(&mut self) -> usize {
        let mut keys = Vec::new();
        self.engine.server.take_dirty(&mut keys);
        let mut flushed = 0;
        for key in keys {
            let Some(&id) = self.by_key.get(&key) else { continue };
            let client = &mut self.clients[id];
            client.received.extend(self.engine.output(key));
            let actions = self.engine.server.actions(key);
            let has_input = !client.sent.is_empty() || client.has_end;
            if actions.close {
                self.disconnect(id);
            } else if actions.run || (actions.read && has_input) {
                self.enqueue(id);
            }
            flushed += 1;
        }
        flushed
    }
}
