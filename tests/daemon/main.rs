//! The binary from outside: flags, sockets, signals, limits and what the system refuses. [`soak`] has
//! what depends on the number of clients or jobs.
#![allow(clippy::disallowed_methods, reason = "a test measures time from outside")]
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod faults;
mod first_failure;
mod flags;
#[path = "../harness/mod.rs"]
mod harness;
mod inherited;
mod limits;
mod manager;
mod memory;
mod no_memory;
mod signals;
mod soak;
mod sockets;
mod stream;
mod user;

use harness::client::{Client, unix};
use harness::process::{Daemon, path_text, run, text};
use socket2::SockAddr;
use std::net::SocketAddr;
use std::path::PathBuf;
use tempfile::TempDir;

/// The path of a Unix socket in a directory of its own.
struct UnixPath {
    directory: TempDir,
    path: PathBuf,
    /// As `-l` takes it.
    flag: String,
}

impl UnixPath {
    fn new() -> UnixPath {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let flag = format!("unix:{}", path.display());
        UnixPath { directory, path, flag }
    }

    fn address(&self) -> SockAddr {
        unix(&self.path)
    }

    fn connect(&self) -> Client {
        Client::connect(self.address())
    }
}

fn serve(flags: &[&str]) -> (Daemon, Client) {
    let (daemon, address) = Daemon::on_loopback(flags);
    (daemon, Client::connect(address))
}

/// Makes a directory with a binlog of one job, whose id and body length are 1.
fn binlog_with_one_job() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let (daemon, mut client) = serve(&["-b", path_text(directory.path())]);
    client.expect(PUT, "INSERTED 1");
    daemon.stop();
    directory
}

/// Asserts that the server refuses these flags with an exit code, nothing on its standard output, and
/// a log that contains `message`; returns the log.
#[track_caller]
fn assert_refused(flags: &[&str], code: i32, message: &str) -> String {
    let output = run(flags);
    let log = text(&output.stderr).to_owned();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(code), 0), "{flags:?}: {log}");
    assert!(log.contains(message), "{flags:?}: {log}");
    log
}

/// A number of `stats`, as a connection of its own receives it.
fn stat(address: SocketAddr, key: &str) -> u64 {
    Client::connect(address).stat(key)
}

const PUT: &str = "put 0 0 9 1\r\na\r\n";
const HEALTH: &str = "GET /healthz HTTP/1.1\r\n\r\n";
