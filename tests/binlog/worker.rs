//! A client with random commands, and the journal of what they have done.

use crate::harness::engine::Instance;
use crate::harness::fake_disk::FakeDisk;
use crate::harness::journal::{Event, Journal, View, is_same};
use beanstalkd::testing::Nanos;

/// A client with random commands, the same for the same seed.
pub struct Worker {
    random: fastrand::Rng,
    pub journal: Journal,
    held: Vec<u64>,
    pub next_id: u64,
}

const TUBES: [&str; 3] = ["default", "mail", "a-tube-with-a-longer-name"];

impl Worker {
    pub fn new(seed: u64) -> Worker {
        Worker {
            random: fastrand::Rng::with_seed(seed),
            journal: Journal::default(),
            held: Vec::new(),
            next_id: 1,
        }
    }

    /// Runs one iteration with a few commands, on a disk that works.
    pub fn work(&mut self, disk: &FakeDisk, engine: &mut Instance) {
        assert!(self.try_work(disk, engine), "the disk works");
    }

    /// Runs the same on a disk that may fail. Returns `false` if it fails: then the commands are in
    /// the journal and not acknowledged.
    pub fn try_work(&mut self, disk: &FakeDisk, engine: &mut Instance) -> bool {
        let count = self.random.usize(1..4);
        let mut input = String::new();
        let mut expected = Vec::new();
        for _ in 0..count {
            let (line, reply) = self.command(engine.now);
            input.push_str(&line);
            expected.push(reply);
        }
        let (syncs, (begun, ended)) = (disk.syncs(), disk.background_syncs());
        let Some(replies) = engine.try_ask(&input) else { return false };
        if replies.contains("OUT_OF_MEMORY") {
            return false;
        }
        let (begun_since, ended_since) = disk.background_syncs();
        if ended_since > ended {
            self.journal.end_sync();
        }
        if begun_since > begun {
            // The sync may have begun before the last record of this iteration, so it covers only what was
            // acknowledged earlier.
            self.journal.begin_sync();
        }
        self.journal.acknowledge(disk.syncs() > syncs);
        assert_eq!(replies, expected.concat(), "after {input:?}");
        true
    }

    /// Returns a command and its reply, and notes the effect in the journal.
    fn command(&mut self, now: Nanos) -> (String, String) {
        let pri = self.random.u32(..3000);
        match self.random.u8(..10) {
            0..=3 => self.put(pri, now),
            4 | 5 => self.reserve(),
            6 => self.delete(),
            _ => self.give_back(pri, now),
        }
    }

    fn put(&mut self, pri: u32, now: Nanos) -> (String, String) {
        let tube = TUBES[self.random.usize(..TUBES.len())];
        let len = if self.random.u8(..20) == 0 { 3000 } else { self.random.usize(..60) };
        let body: String =
            std::iter::repeat_with(|| self.random.alphanumeric()).take(len).collect();
        let delay_secs = if self.random.u8(..4) == 0 { self.random.u32(1..500) } else { 0 };
        let id = self.next_id;
        self.next_id += 1;
        let line = format!("use {tube}\r\nput {pri} {delay_secs} 1000 {len}\r\n{body}\r\n");
        // The command runs a millisecond later, see [`Instance::try_ask`].
        let due = now + Nanos::from_millis(1) + Nanos::from_secs(delay_secs);
        let state = if delay_secs > 0 { "delayed" } else { "ready" }.to_owned();
        let tube_name = tube.to_owned();
        self.journal.add(
            id,
            Some(View {
                tube: tube_name,
                body,
                pri,
                delay_secs,
                ttr_secs: 1000,
                state,
                due,
                counts: [0; 5],
            }),
        );
        (line, format!("USING {tube}\r\nINSERTED {id}\r\n"))
    }

    /// Reserves any job that is not reserved.
    fn reserve(&mut self) -> (String, String) {
        let free: Vec<u64> = (1..self.next_id)
            .filter(|id| self.journal.last(*id).is_some() && !self.held.contains(id))
            .collect();
        let Some(&id) = self.random.choice(&free) else { return self.nothing() };
        let mut view = self.journal.last(id).unwrap().clone();
        let reply = format!("RESERVED {id} {}\r\n{}\r\n", view.body.len(), view.body);
        // No record of its own; but compaction may move the job while it is reserved.
        view.counts[0] += 1;
        view.state = "ready".to_owned();
        self.held.push(id);
        self.journal.add_unrecorded(id, view);
        (format!("reserve-job {id}\r\n"), reply)
    }

    fn delete(&mut self) -> (String, String) {
        let all: Vec<u64> =
            (1..self.next_id).filter(|id| self.journal.last(*id).is_some()).collect();
        let Some(&id) = self.random.choice(&all) else { return self.nothing() };
        self.held.retain(|held| *held != id);
        self.journal.add(id, None);
        (format!("delete {id}\r\n"), "DELETED\r\n".to_owned())
    }

    /// Releases or buries a reserved job, or kicks one.
    fn give_back(&mut self, pri: u32, now: Nanos) -> (String, String) {
        if self.held.is_empty() || self.random.u8(..4) == 0 {
            return self.kick(now);
        }
        let id = self.held.swap_remove(self.random.usize(..self.held.len()));
        let mut view = self.journal.last(id).unwrap().clone();
        view.pri = pri;
        let (line, reply) = if self.random.bool() {
            view.counts[3] += 1;
            view.state = "buried".to_owned();
            (format!("bury {id} {pri}\r\n"), "BURIED\r\n")
        } else {
            view.counts[2] += 1;
            view.delay_secs = if self.random.bool() { 0 } else { self.random.u32(1..500) };
            view.state = if view.delay_secs > 0 { "delayed" } else { "ready" }.to_owned();
            view.due = now + Nanos::from_millis(1) + Nanos::from_secs(view.delay_secs);
            (format!("release {id} {pri} {}\r\n", view.delay_secs), "RELEASED\r\n")
        };
        self.journal.add(id, Some(view));
        (line, reply.to_owned())
    }

    fn kick(&mut self, now: Nanos) -> (String, String) {
        let is_kickable = |view: &View| {
            view.state == "buried"
                || (view.state == "delayed" && view.due > now + Nanos::from_secs(1))
        };
        let kickable: Vec<u64> = (1..self.next_id)
            .filter(|id| !self.held.contains(id) && self.journal.last(*id).is_some_and(is_kickable))
            .collect();
        let Some(&id) = self.random.choice(&kickable) else { return self.nothing() };
        let mut view = self.journal.last(id).unwrap().clone();
        view.counts[4] += 1;
        view.state = "ready".to_owned();
        self.journal.add(id, Some(view));
        (format!("kick-job {id}\r\n"), "KICKED\r\n".to_owned())
    }

    fn nothing(&self) -> (String, String) {
        ("list-tubes-watched\r\n".to_owned(), "OK 14\r\n---\n- default\n\r\n".to_owned())
    }

    /// After a restart no job is reserved, and each job is as a recorded event or a later one left it.
    pub fn reconnect(&mut self, engine: &mut Instance) {
        self.held.clear();
        for (&id, events) in &mut self.journal.jobs {
            let first = self.journal.safe.acknowledged[&id];
            let found = View::of(engine, id);
            let is_it = |event: &&Event| is_same(&event.view, &found, engine.now);
            let event = events[first..].iter().find(is_it);
            let view = event.expect("the job is as an event left it").view.clone();
            events.push(Event { view, is_recorded: true });
        }
        self.journal.acknowledge(true);
    }
}
