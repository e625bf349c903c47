//! The binlog on a fake disk: crashes at every step, torn and reordered writes, flipped bits, full
//! and failing disks, and files of C beanstalkd.
//!
//! | module | subject |
//! |---|---|
//! | [`cold`] | bodies that are read back late, or wrong |
//! | [`crash`] | syncs that bound what a crash loses |
//! | [`space`] | disk use |
//! | [`full`] | full disks, and disks that fail |
//! | [`damage`] | damaged files |
//! | [`replay`] | what a start restores |
//! | [`remote`] | a remote disk that acknowledges changes late, and a limit of the binlog |
//! | [`original`] | files of C beanstalkd |
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]
#![allow(unreachable_pub, reason = "a test program has no interface")]

mod cold;
mod crash;
mod damage;
mod full;
#[path = "../harness/mod.rs"]
mod harness;
mod original;
mod remote;
mod replay;
mod space;

use harness::driver::{Client, Options, START};
use harness::fake_disk::{FakeDisk, Files};
use harness::instance::Instance;

/// The length of a job's full record.
fn record_len(tube: &str, body: usize) -> u64 {
    (84 + tube.len() + body + 2) as u64
}

/// A server on an empty disk.
fn start(options: Options) -> (FakeDisk, Instance) {
    let disk = FakeDisk::default();
    let server = Instance::start(&disk, options, START);
    (disk, server)
}

/// A disk with one file.
fn disk_with_file(bytes: Vec<u8>) -> FakeDisk {
    FakeDisk::with_files(&Files::from([("binlog.1".to_owned(), bytes)]))
}

impl Instance {
    /// Puts jobs with this body, for which there is space.
    fn put_all(&mut self, count: u64, body: impl AsRef<[u8]>) {
        (0..count).for_each(|_| assert!(self.put(&body).is_some(), "there is no space"));
    }

    /// Starts again on this disk, without an end of this server.
    fn again_on(&self, disk: &FakeDisk, options: Options) -> Instance {
        Instance::start(disk, options, self.now)
    }

    /// Starts a server on a copy of the files, as a crash leaves them.
    fn after_crash(&self, options: Options) -> Instance {
        Instance::on_files(&self.disk.live_files(), options, self.now)
    }
}

/// Puts and deletes jobs; returns the last id.
fn fill_and_drain(server: &mut Instance) -> u64 {
    const LAST: u64 = 10;
    for id in 1..=LAST {
        assert_eq!(server.put("job"), Some(id));
        server.delete(id);
    }
    LAST
}

/// Sends a flush that takes more than one step, and runs the first.
fn begin_flush(server: &mut Instance, flusher: Client, command: &str) {
    server.receive(flusher, command);
    server.iterate();
    assert_eq!(server.take_text(flusher), "", "all jobs are freed in one step");
}
