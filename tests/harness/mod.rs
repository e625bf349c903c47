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
//! | [`driver`] | the core with virtual time and without sockets: the only file that names it |
//! | [`instance`] | the core on a disk, with one client |
//! | [`world`] | one trait for all servers that a test plays into: processes, and the core with the model |
//! | [`fake_disk`] | a disk in memory that fills up, fails and crashes, or acknowledges changes late |
//! | [`record`] | records of the binlog as bytes, written without the server's code |
//! | [`script`] | conversations: text files to requests and expected replies |
//! | [`play`] | plays a conversation into a world |
//!
//! Nothing here waits for a time: [`wait_until`] and all reads and writes end after [`PATIENCE`].
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]
#![allow(clippy::disallowed_methods, reason = "tests measure time from outside")]

pub mod client;
pub mod driver;
pub mod etcd;
pub mod fake_disk;
pub mod instance;
pub mod play;
pub mod process;
pub mod record;
pub mod reply;
pub mod request;
pub mod script;
pub mod world;
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

/// Prints that a test is skipped because a tool is missing; panics where all tools are installed.
#[track_caller]
pub fn skip(why: &str) {
    let has_all_tools = std::env::var("CI").is_ok_and(|value| value == "true");
    assert!(!has_all_tools, "{why}; the test fails, because CI is set");
    cannot_test(why);
}

/// Prints what this machine or its kernel does not allow a test, with all tools installed. The test
/// runner would swallow the output of `eprintln`.
pub fn cannot_test(why: &str) {
    writeln!(std::io::stderr(), "SKIPPED: {why}").expect("standard error is open");
}
