//! The engine without sockets: a [`Server`] with virtual time, and on a fake disk if a test wants
//! a binlog. [`Instance`] adds what most tests of the binlog need: a start on a disk and one client.

use super::fake_disk::{FakeDisk, Files};
use super::request::put;
use super::{fixtures, yaml};
use beanstalkd::testing::{
    ClockOffset, ConnKey, Disk, Nanos, Recovered, ReplayError, Server, Settings, Syncing,
};
use std::io::IoSlice;
use std::ops::{Deref, DerefMut};

/// A server and the present moment of its world.
pub struct Engine {
    pub server: Server,
    pub now: Nanos,
}

impl Engine {
    /// Starts a server without jobs, connections and binlog.
    pub fn new(settings: Settings, now: Nanos) -> Engine {
        Engine { server: Server::new(settings, fixtures::facts(now), now), now }
    }

    /// Replays the binlog on the disk, and keeps it from now on.
    pub fn recover(&mut self, disk: &FakeDisk, syncing: Syncing) -> Result<Recovered, ReplayError> {
        self.recover_from(disk.boxed(), syncing)
    }

    /// Does the same on any disk.
    pub fn recover_from(
        &mut self,
        disk: Box<dyn Disk>,
        syncing: Syncing,
    ) -> Result<Recovered, ReplayError> {
        self.server.recover(disk, syncing, self.now)
    }

    pub fn connect(&mut self) -> ConnKey {
        self.server.connect().expect("a connection needs little memory")
    }

    pub fn disconnect(&mut self, conn: ConnKey) {
        self.server.disconnect(conn, self.now);
    }

    /// Gives `bytes` to the server.
    pub fn receive(&mut self, conn: ConnKey, bytes: impl AsRef<[u8]>) {
        assert!(self.server.actions(conn).read, "the server does not read from this connection");
        self.server.receive(conn, bytes.as_ref(), self.now);
    }

    /// Runs more commands of a connection whose budget was spent.
    pub fn resume(&mut self, conn: ConnKey) {
        self.server.resume(conn, self.now);
    }

    /// Commits on a disk that works.
    pub fn commit(&mut self) {
        self.server.commit(self.now).expect("the disk works");
    }

    pub fn tick(&mut self) {
        self.server.tick(self.now);
    }

    pub fn advance(&mut self, span: Nanos) {
        self.now = self.now + span;
    }

    /// Sets the wall clock ahead of virtual time.
    pub fn set_wall_clock_ahead(&mut self, offset: Nanos) {
        self.server.set_clock_offset(ClockOffset::between(self.now, self.now + offset));
    }

    /// Takes all output of a connection.
    pub fn output(&mut self, conn: ConnKey) -> Vec<u8> {
        self.take_output(conn, usize::MAX)
    }

    /// Takes up to `limit` bytes of the output of a connection that may be sent.
    pub fn take_output(&mut self, conn: ConnKey, limit: usize) -> Vec<u8> {
        let mut outlet = self.server.output_handle(conn);
        let mut taken = Vec::new();
        while outlet.actions().write && taken.len() < limit {
            let mut slices = [IoSlice::new(&[]); 16];
            let filled = outlet.next_slices(&mut slices);
            let before = taken.len();
            for slice in &slices[..filled] {
                let count = slice.len().min(limit - taken.len());
                taken.extend_from_slice(&slice[..count]);
            }
            let count = taken.len() - before;
            assert!(count > 0, "output is announced but missing");
            outlet.sent(count);
        }
        taken
    }

    /// Runs `commands` to their end and returns the replies, or `None` if the disk fails.
    pub fn try_ask(&mut self, conn: ConnKey, commands: impl AsRef<[u8]>) -> Option<Vec<u8>> {
        self.receive(conn, commands);
        let mut replies = Vec::new();
        loop {
            while self.server.actions(conn).run {
                self.resume(conn);
            }
            self.server.commit(self.now).ok()?;
            replies.extend(self.output(conn));
            // The event loop would serve the connections that are named here.
            self.server.take_dirty(&mut Vec::new());
            if !self.server.actions(conn).run {
                return Some(replies);
            }
        }
    }

    /// Runs `commands` on a disk that works.
    pub fn ask_bytes(&mut self, conn: ConnKey, commands: impl AsRef<[u8]>) -> Vec<u8> {
        self.try_ask(conn, commands).expect("the disk works")
    }

    /// Runs `commands` and returns the replies as text.
    pub fn ask(&mut self, conn: ConnKey, commands: impl AsRef<[u8]>) -> String {
        String::from_utf8_lossy(&self.ask_bytes(conn, commands)).into_owned()
    }

    /// Returns a number of `stats`.
    pub fn stat(&mut self, conn: ConnKey, key: &str) -> u64 {
        yaml::number(&self.ask(conn, "stats\r\n"), key)
    }
}

/// How a binlog is kept.
#[derive(Clone, Copy)]
pub struct Policy {
    pub file_size: u32,
    pub syncing: Syncing,
    pub max_job_size: u32,
    pub max_bytes: u64,
}

impl Policy {
    pub fn new(file_size: u32, syncing: Syncing) -> Policy {
        Policy { file_size, syncing, max_job_size: 1 << 20, max_bytes: u64::MAX }
    }

    pub fn with_limit(self, max_bytes: u64) -> Policy {
        Policy { max_bytes, ..self }
    }

    pub fn with_max_job_size(self, max_job_size: u32) -> Policy {
        Policy { max_job_size, ..self }
    }

    /// Syncs in each iteration.
    pub fn synced(file_size: u32) -> Policy {
        Policy::new(file_size, Syncing::EachIteration)
    }
}

/// A server that was started on a disk, with one client. The client receives a reply only after
/// its commit.
pub struct Instance {
    engine: Engine,
    pub conn: ConnKey,
    pub recovered: Recovered,
    iterations: u64,
}

impl Deref for Instance {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for Instance {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl Instance {
    /// Starts on the files of the disk, or returns the error.
    pub fn try_start(disk: &FakeDisk, policy: Policy, now: Nanos) -> Result<Instance, ReplayError> {
        let settings = Settings {
            max_job_size: policy.max_job_size,
            binlog_file_size: policy.file_size,
            max_binlog_bytes: policy.max_bytes,
            ..Settings::DEFAULT
        };
        let mut engine = Engine::new(settings, now);
        let recovered = engine.recover(disk, policy.syncing)?;
        let conn = engine.connect();
        engine.server.check();
        Ok(Instance { engine, conn, recovered, iterations: 0 })
    }

    pub fn start(disk: &FakeDisk, policy: Policy, now: Nanos) -> Instance {
        Instance::try_start(disk, policy, now).expect("the server starts")
    }

    /// Starts on a copy of these files.
    pub fn on_files(files: &Files, policy: Policy, now: Nanos) -> Instance {
        Instance::start(&FakeDisk::with_files(files), policy, now)
    }

    /// Runs `commands` in one iteration, a millisecond later. Returns the replies, or `None` if the
    /// disk fails.
    pub fn try_ask(&mut self, commands: impl AsRef<[u8]>) -> Option<String> {
        let commands = commands.as_ref();
        self.engine.advance(Nanos::from_millis(1));
        self.engine.tick();
        let replies = self.engine.try_ask(self.conn, commands);
        if !commands.starts_with(b"stats") && !commands.starts_with(b"peek") {
            self.check();
        }
        Some(String::from_utf8_lossy(&replies?).into_owned())
    }

    /// Runs `commands` on a disk that works.
    pub fn ask(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.try_ask(commands).expect("the disk works")
    }

    /// Runs `commands` in the present moment, without a check.
    pub fn ask_now(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.engine.ask(self.conn, commands)
    }

    /// Runs a command and asserts the whole reply.
    #[track_caller]
    pub fn expect(&mut self, command: &str, reply: &str) {
        assert_eq!(self.ask(command), reply, "to {command:?}");
    }

    /// Recounts the state of the server: in each iteration of a short test, and in some of a long
    /// one.
    fn check(&mut self) {
        self.iterations += 1;
        if self.iterations < 100 || self.iterations.is_multiple_of(64) {
            self.engine.server.check();
        }
    }

    /// Runs what comes due without commands, in at most `iterations` iterations.
    pub fn idle(&mut self, iterations: usize) {
        for _ in 0..iterations {
            let Some(due) = self.engine.server.next_due() else { break };
            self.engine.now = self.engine.now.max(due);
            self.engine.tick();
            self.engine.commit();
            self.check();
        }
        self.engine.server.check();
    }

    /// Puts a job; returns its id, or `None` if there is no space for it.
    pub fn put(&mut self, body: impl AsRef<[u8]>) -> Option<u64> {
        let reply = self.ask(put(0, 0, 1000, body));
        reply.trim_end().strip_prefix("INSERTED ").map(|id| id.parse().expect("ids are numbers"))
    }

    /// Returns a number of `stats`.
    pub fn stat(&mut self, key: &str) -> u64 {
        yaml::number(&self.ask("stats\r\n"), key)
    }

    /// Deletes a job that must exist.
    #[track_caller]
    pub fn delete(&mut self, id: u64) {
        self.expect(&format!("delete {id}\r\n"), "DELETED\r\n");
    }

    /// Ends the server as an operator does.
    pub fn close(&mut self) {
        self.engine.server.close(self.engine.now).expect("the disk works");
    }
}
