//! A server on a disk with one client, for the tests of the binlog. The client receives a reply only
//! after its commit.

use super::driver::{BinlogError, Client, Driver, Nanos, Options, Settings, Syncing};
use super::fake_disk::{FakeDisk, Files};
use super::reply::frame;
use super::request::put;
use super::yaml;
use std::ops::{Deref, DerefMut};

impl Options {
    /// Those of a server with a binlog.
    pub const fn binlog(binlog_file_size: u32, syncing: Syncing) -> Options {
        let settings = Settings { max_job_size: 1 << 20, binlog_file_size, ..Settings::DEFAULT };
        Options { settings, syncing, ..Options::DEFAULT }
    }

    /// Syncs in each iteration.
    pub const fn synced(binlog_file_size: u32) -> Options {
        Options::binlog(binlog_file_size, Syncing::EachIteration)
    }

    pub const fn with_limit(mut self, bytes: u64) -> Options {
        self.settings.max_binlog_bytes = bytes;
        self
    }

    pub const fn with_max_job_size(mut self, bytes: u32) -> Options {
        self.settings.max_job_size = bytes;
        self
    }

    /// No body stays in memory.
    pub const fn cold(mut self) -> Options {
        self.settings.body_cache_bytes = Some(0);
        self
    }
}

pub struct Instance {
    driver: Driver,
    pub disk: FakeDisk,
    pub client: Client,
    /// How often commands were sent.
    asked: u64,
}

impl Deref for Instance {
    type Target = Driver;

    fn deref(&self) -> &Driver {
        &self.driver
    }
}

impl DerefMut for Instance {
    fn deref_mut(&mut self) -> &mut Driver {
        &mut self.driver
    }
}

/// Virtual time from one request to the next.
pub const STEP: Nanos = Nanos::from_millis(1);

/// A server takes what the disk has read in fewer rounds.
const MOST_ROUNDS: usize = 100_000;

impl Instance {
    /// Starts on the files of the disk, or returns the error.
    pub fn try_start(
        disk: &FakeDisk,
        options: Options,
        now: Nanos,
    ) -> Result<Instance, BinlogError> {
        let mut driver = Driver::start(options, Some(disk.boxed()), now)?;
        let client = driver.connect();
        driver.check();
        Ok(Instance { driver, disk: disk.clone(), client, asked: 0 })
    }

    pub fn start(disk: &FakeDisk, options: Options, now: Nanos) -> Instance {
        Instance::try_start(disk, options, now).expect("the server starts")
    }

    /// Starts on a copy of these files.
    pub fn on_files(files: &Files, options: Options, now: Nanos) -> Instance {
        Instance::start(&FakeDisk::with_files(files), options, now)
    }

    /// Runs the commands of a client a millisecond later. Returns what has come for it, or `None` if the
    /// disk fails.
    pub fn try_send(&mut self, client: Client, commands: impl AsRef<[u8]>) -> Option<String> {
        self.driver.now = self.driver.now + STEP;
        let commands = commands.as_ref();
        self.driver.receive(client, commands);
        self.try_settle().ok()?;
        if !commands.starts_with(b"stats") && !commands.starts_with(b"peek") {
            self.check_some();
        }
        Some(self.driver.take_text(client))
    }

    pub fn try_ask(&mut self, commands: impl AsRef<[u8]>) -> Option<String> {
        self.try_send(self.client, commands)
    }

    /// Runs commands on a disk that works.
    pub fn send(&mut self, client: Client, commands: impl AsRef<[u8]>) -> String {
        self.try_send(client, commands).expect("the disk works")
    }

    pub fn ask(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.send(self.client, commands)
    }

    /// Runs until nothing is left but reads of bodies that may not end.
    pub fn try_settle(&mut self) -> Result<(), BinlogError> {
        for _ in 0..MOST_ROUNDS {
            self.driver.try_settle()?;
            if !self.disk.has_reads() {
                return Ok(());
            }
        }
        panic!("the server does not take what the disk has read");
    }

    pub fn settle(&mut self) {
        self.try_settle().expect("the disk works");
        self.driver.check();
    }

    pub fn advance(&mut self, span: Nanos) {
        self.driver.advance(span);
        self.settle();
    }

    /// Runs `commands` in the present moment, without a check.
    pub fn ask_now(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.driver.ask(self.client, commands)
    }

    /// Runs a command and asserts the whole reply.
    #[track_caller]
    pub fn expect(&mut self, command: impl AsRef<[u8]>, reply: &str) {
        let command = command.as_ref();
        assert_eq!(self.ask(command), reply, "to {}", command.escape_ascii());
    }

    /// Recounts the state of the server: each time in a short test, and some times in a long one.
    fn check_some(&mut self) {
        self.asked += 1;
        if self.asked < 100 || self.asked.is_multiple_of(64) {
            self.driver.check();
        }
    }

    /// Runs what comes due without commands, in at most `iterations` iterations.
    pub fn idle(&mut self, iterations: usize) {
        for _ in 0..iterations {
            let Some(due) = self.driver.next_due() else { break };
            self.driver.now = self.driver.now.max(due);
            self.driver.iterate();
            self.check_some();
        }
        self.driver.check();
    }

    /// Puts a job; returns its id, or `None` if there is no space for it.
    pub fn put(&mut self, body: impl AsRef<[u8]>) -> Option<u64> {
        let reply = self.ask(put(0, 0, 1000, body));
        reply.trim_end().strip_prefix("INSERTED ").map(|id| id.parse().expect("ids are numbers"))
    }

    /// Returns values and the body of a job: see [`yaml::job`].
    pub fn job(&mut self, id: u64, keys: &str) -> Option<String> {
        let ask = |request: &str| {
            let reply = self.ask_now(request);
            let body = frame(reply.as_bytes()).expect("the reply is whole").body?;
            Some(String::from_utf8(body.to_vec()).expect("bodies are text"))
        };
        yaml::job(ask, id, keys)
    }

    pub fn stat(&mut self, key: &str) -> u64 {
        yaml::number(&self.ask("stats\r\n"), key)
    }

    #[track_caller]
    pub fn delete(&mut self, id: u64) {
        self.expect(format!("delete {id}\r\n"), "DELETED\r\n");
    }

    pub fn close(&mut self) {
        self.driver.stop().expect("the disk works");
    }
}
