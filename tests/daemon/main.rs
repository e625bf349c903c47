//! The binary from outside.
//!
//! | module | subject |
//! |---|---|
//! | [`flags`] | flags, exit codes and the log |
//! | [`user`] | the user that the server changes to |
//! | [`sockets`] | addresses and Unix sockets |
//! | [`inherited`] | sockets inherited from a service manager |
//! | [`manager`] | notifications of a service manager |
//! | [`signals`] | signals, and the first process of a container |
//! | [`limits`] | limits of connections and descriptors |
//! | [`memory`] | memory use and `--max-memory` |
//! | [`no_memory`] | a system that refuses memory |
//! | [`faults`] | system calls that fail |
//! | [`stream`] | the stream of bytes |
//! | [`time`] | timers |
#![allow(clippy::disallowed_methods, reason = "a test measures time from outside")]
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod faults;
mod flags;
#[path = "../harness/mod.rs"]
mod harness;
mod inherited;
mod limits;
mod manager;
mod memory;
mod no_memory;
mod signals;
mod sockets;
mod stream;
mod time;
mod user;

use harness::client::{Client, unix};
use harness::process::{run, text};
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

/// Runs the server with flags that it must refuse; returns its exit code and its log.
fn refusal(flags: &[&str]) -> (Option<i32>, String) {
    let output = run(flags);
    (output.status.code(), text(&output.stderr).to_owned())
}

/// A number of `stats`, as a connection of its own receives it.
fn stat(address: SocketAddr, key: &str) -> u64 {
    Client::connect(address).stat(key)
}

const PUT: &str = "put 0 0 9 1\r\na\r\n";
const HEALTH: &str = "GET /healthz HTTP/1.1\r\n\r\n";
