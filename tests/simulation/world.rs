//! The core and the model as one world: conversations are played into both, and the model judges each
//! event. So it is right before it judges random histories, and each history can be replayed.

use super::driver::Simulation;
use super::event::{Crash, Event, Setup};
use crate::harness::driver::{Nanos, Settings};
use crate::harness::script::Script;
use crate::harness::world::{Client, Restart, World};
use std::collections::BTreeMap;
use std::time::Duration;

pub struct JudgedWorld {
    simulation: Simulation,
    /// All events until now.
    pub history: Vec<Event>,
    /// What each client has received and not taken.
    received: BTreeMap<Client, Vec<u8>>,
    /// A client reads at most this many bytes at once.
    room: Option<usize>,
}

/// A server that has more to do after this many events never ends.
const MOST_EVENTS: usize = 1_000_000;

impl JudgedWorld {
    /// A server with the options of the script, and always with a binlog. Its files are small, because the disk is in
    /// memory.
    pub fn new(script: &Script, setup: Setup, room: Option<usize>) -> JudgedWorld {
        let settings = Settings { binlog_file_size: 1 << 20, ..Settings::DEFAULT };
        let settings = script.settings(settings);
        let setup = Setup {
            max_job_size: settings.max_job_size,
            bury_after: settings.bury_after.map(|limit| limit.get().into()),
            file_size: Some(settings.binlog_file_size.into()),
            ..setup
        };
        let simulation = Simulation::new(setup).expect("the disk is empty");
        JudgedWorld { simulation, history: Vec::new(), received: BTreeMap::new(), room }
    }

    fn apply_one(&mut self, event: Event) {
        let applied = self.simulation.apply(&event);
        applied.unwrap_or_else(|failure| panic!("{event}: {failure}"));
        self.history.push(event);
        assert!(self.history.len() < MOST_EVENTS, "the server does not end what it does");
    }

    /// Applies an event, and lets the server do all that it can do then.
    fn apply(&mut self, event: Event) {
        self.apply_one(event);
        self.apply_one(Event::Advance(0));
        while let Some(event) = self.next_step() {
            self.apply_one(event);
            self.apply_one(Event::Advance(0));
        }
        let sent = self.simulation.take_sent().into_iter().filter(|(_, bytes)| !bytes.is_empty());
        sent.for_each(|(client, bytes)| self.received.entry(client).or_default().extend(bytes));
    }

    /// A client reads on, a read ends, or a change is acknowledged.
    fn next_step(&self) -> Option<Event> {
        let disk = &self.simulation.disk;
        if let Some((client, len)) = self.simulation.blocked_client() {
            // Of a long reply a part.
            return Some(Event::ReadLimit(client, self.room.map(|room| room.max(len / 64))));
        }
        if disk.begun_reads() > 0 {
            return Some(Event::EndReads(usize::MAX));
        }
        (disk.waiting() > 0).then_some(Event::Acknowledge(1))
    }

    fn is_open(&self, client: Client) -> bool {
        self.simulation.clients().contains(&client)
    }
}

impl World for JudgedWorld {
    fn connect(&mut self) -> Client {
        let is_connect = |event: &&Event| matches!(event, Event::Connect(_));
        let client = self.history.iter().filter(is_connect).count();
        self.apply(Event::Connect(client));
        if self.room.is_some() {
            self.apply(Event::ReadLimit(client, self.room));
        }
        client
    }

    fn send(&mut self, client: Client, bytes: &[u8]) {
        self.apply(Event::Send(client, bytes.to_vec()));
    }

    fn half_close(&mut self, client: Client) {
        self.apply(Event::HalfClose(client, true));
    }

    fn hang_up(&mut self, client: Client) {
        self.half_close(client);
        assert!(!self.is_open(client), "the server does not close");
    }

    fn take(&mut self, client: Client, _is_brief: bool) -> Option<Vec<u8>> {
        let received = self.received.remove(&client);
        received.or_else(|| self.is_open(client).then(Vec::new))
    }

    fn advance(&mut self, span: Duration) {
        let now = |it: &JudgedWorld| it.simulation.driver.now.as_nanos();
        let end = now(self) + u64::try_from(span.as_nanos()).expect("scripts are short");
        while now(self) < end {
            let due = self.simulation.driver.next_due().map_or(end, Nanos::as_nanos);
            self.apply(Event::Advance(due.min(end).saturating_sub(now(self))));
        }
    }

    fn restart(&mut self, how: Restart) {
        self.apply(match how {
            Restart::Stop => Event::Restart,
            Restart::Kill => Event::Crash(Crash { power_cut: None, flipped_bits: 0 }),
        });
    }

    fn drain(&mut self) {
        self.apply(Event::Drain(true));
    }
}
