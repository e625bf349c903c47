//! A server on a disk with one client, for the tests of the binlog. The client receives a reply only
//! after its commit.

use super::driver::{Client, Driver, Nanos, Options, ReplayError, Settings, Syncing};
use super::fake_disk::{FakeDisk, Files};
use super::request::put;
use super::yaml;
use std::ops::{Deref, DerefMut};

/// How a binlog is kept.
#[derive(Clone, Copy)]
pub struct Policy {
    pub file_size: u32,
    pub syncing: Syncing,
    pub max_job_size: u32,
    pub max_bytes: u64,
    /// The bytes of bodies that stay in memory. `None`: all do.
    pub body_cache: Option<u64>,
    /// As `--max-memory`.
    pub max_memory: u64,
}

impl Policy {
    pub const fn new(file_size: u32, syncing: Syncing) -> Policy {
        let (max_job_size, max_bytes, body_cache, max_memory) = (1 << 20, u64::MAX, None, u64::MAX);
        Policy { file_size, syncing, max_job_size, max_bytes, body_cache, max_memory }
    }

    pub const fn with_limit(self, max_bytes: u64) -> Policy {
        Policy { max_bytes, ..self }
    }

    pub const fn with_max_job_size(self, max_job_size: u32) -> Policy {
        Policy { max_job_size, ..self }
    }

    /// Syncs in each iteration.
    pub const fn synced(file_size: u32) -> Policy {
        Policy::new(file_size, Syncing::EachIteration)
    }
}

pub struct Instance {
    driver: Driver,
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

impl Instance {
    /// Starts on the files of the disk, or returns the error.
    pub fn try_start(disk: &FakeDisk, policy: Policy, now: Nanos) -> Result<Instance, ReplayError> {
        let settings = Settings {
            max_job_size: policy.max_job_size,
            binlog_file_size: policy.file_size,
            max_binlog_bytes: policy.max_bytes,
            body_cache_bytes: policy.body_cache,
            max_memory_bytes: policy.max_memory,
            ..Settings::DEFAULT
        };
        let options = Options { settings, syncing: policy.syncing, ..Options::DEFAULT };
        let mut driver = Driver::start(options, Some(disk.boxed()), now)?;
        let client = driver.connect();
        driver.check();
        Ok(Instance { driver, client, asked: 0 })
    }

    pub fn start(disk: &FakeDisk, policy: Policy, now: Nanos) -> Instance {
        Instance::try_start(disk, policy, now).expect("the server starts")
    }

    /// Starts on a copy of these files.
    pub fn on_files(files: &Files, policy: Policy, now: Nanos) -> Instance {
        Instance::start(&FakeDisk::with_files(files), policy, now)
    }

    /// Runs `commands` a millisecond later. Returns the replies, or `None` if the disk fails.
    pub fn try_ask(&mut self, commands: impl AsRef<[u8]>) -> Option<String> {
        self.driver.now = self.driver.now + STEP;
        let commands = commands.as_ref();
        let replies = self.driver.try_ask(self.client, commands);
        if !commands.starts_with(b"stats") && !commands.starts_with(b"peek") {
            self.check_some();
        }
        replies.ok()
    }

    /// Runs `commands` on a disk that works.
    pub fn ask(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.try_ask(commands).expect("the disk works")
    }

    /// Runs `commands` in the present moment, without a check.
    pub fn ask_now(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.driver.ask(self.client, commands)
    }

    /// Runs a command and asserts the whole reply.
    #[track_caller]
    pub fn expect(&mut self, command: &str, reply: &str) {
        assert_eq!(self.ask(command), reply, "to {command:?}");
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

    pub fn stat(&mut self, key: &str) -> u64 {
        yaml::number(&self.ask("stats\r\n"), key)
    }

    #[track_caller]
    pub fn delete(&mut self, id: u64) {
        self.expect(&format!("delete {id}\r\n"), "DELETED\r\n");
    }

    pub fn close(&mut self) {
        self.driver.stop().expect("the disk works");
    }
}
