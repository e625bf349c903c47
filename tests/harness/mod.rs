//! What the test programs share, one of each.
//!
//! | module | owns |
//! |---|---|
//! | [`reply`] | reply framing: where a reply ends |
//! | [`request`] | requests as bytes, and bodies that differ by a number |
//! | [`yaml`] | values in the documents of the stats commands |
//! | [`client`] | a client over TCP or a Unix socket |
//! | [`process`] | a server process: its start, log, signals, end, and its figures in `/proc` |
//! | [`etcd`] | an etcd process with one node |
//! | [`engine`] | the engine with virtual time and without sockets |
//! | [`event_loop`] | connections and iterations of the engine |
//! | [`fake_disk`] | a disk in memory that fills up, fails and crashes |
//! | [`remote_disk`] | a remote disk in memory that acknowledges changes late |
//! | [`fixtures`] | constant values that the engine needs from its process |
//! | [`journal`] | a record of what was acknowledged, to judge what a crash left |
//! | [`script`] | conversations: text files to requests and expected replies |
//! | [`program`] | flags and limits that the benchmark and the soak share |
//!
//! Nothing here waits for a time: [`wait_until`] and all reads and writes end after [`PATIENCE`].
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]
#![allow(clippy::disallowed_methods, reason = "tests measure time from outside")]

pub mod client;
pub mod engine;
pub mod etcd;
pub mod event_loop;
pub mod fake_disk;
pub mod fixtures;
pub mod journal;
pub mod process;
pub mod program;
pub mod remote_disk;
pub mod reply;
pub mod request;
pub mod script;
pub mod yaml;

use std::io::Write;
use std::time::{Duration, Instant};

/// The deadline of every wait in a test. It ends a test whose event never comes and measures
/// nothing: a busy machine needs seconds for what an idle machine does in a millisecond.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Polls a condition that has no event of its own until it holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    const PAUSE: Duration = Duration::from_millis(2);
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "after {PATIENCE:?} it does not hold that {what}");
        std::thread::sleep(PAUSE);
    }
}

/// Prints why a test is skipped here. The test runner would swallow the output of `eprintln`.
pub fn skip(why: &str) {
    writeln!(std::io::stderr(), "SKIPPED: {why}").expect("standard error is open");
}
