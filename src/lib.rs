//! A drop-in replacement for C beanstalkd, the simple, fast work queue.
//!
//! One process with one poll loop, whose thread has all jobs. Other threads only sync and read files, or exchange
//! messages with etcd. The engine is the whole server without sockets, clock and disk: plain structs that are
//! mutated in place and driven by calls. `os` is everything that touches the operating system. `engine` never
//! names `os`.
//!
//! # Layers
//!
//! A module imports only modules of its own row or of rows below. The head of each folder's `mod.rs`
//! lists its files.
//!
//! | module | owns |
//! |---|---|
//! | `main` | the allocator and the call of [`program`] |
//! | [`ctl`] | `beanstalkctl`, the tool for operators |
//! | [`program`] | parse the command line, run, report, exit code |
//! | [`startup`] | the steps before the first client, how each can fail, and its exit code |
//! | [`logging`] | the format of log lines |
//! | [`options`] | flags to [`options::Options`], with meaning and default of each |
//! | [`flags`] | command lines to flags, for the server and `beanstalkctl` |
//! | [`os`] | sockets, files, signals, users, clock, the event loop |
//! | [`engine::monitor`] | metrics for Prometheus, the status page, and the HTTP connections that ask for them |
//! | [`engine::server`] | the connections with their streams: one iteration, from reading to sending |
//! | [`engine::commands`], [`engine::conn`], [`engine::lists`], [`engine::reads`], [`engine::store`], [`engine::protocol::stats`] | the table of commands and their handlers; what a connection does; what all connections share |
//! | [`engine::protocol`] | arguments of command lines; replies to bytes |
//! | [`engine::queue`] | the rules: jobs, tubes, waiting workers, time, what is logged |
//! | [`engine::binlog`] | records on disk: writing, syncing, space, compaction, reading |
//! | [`attention`] | what needs attention: the rules, for the status page and `beanstalkctl` |
//! | [`engine::collections`], [`engine::digest`], [`engine::headroom`], [`engine::keys`], [`engine::limits`], [`engine::text`], [`engine::time`], [`engine::work`] | containers, and values that every layer uses |
//!
//! # A command from socket to socket
//!
//! ```text
//! event_loop      an event: server.note(key, readiness); the iteration begins with server.begin(now, next_due)
//!   server.visit_next      borrows the connection `c` and the store `s` once
//!     link.read            bytes into the scratch buffer, a large body straight into its job
//!       c.receive, c.run   cuts a line or a body out of the bytes
//!         lines::run_next  finds the row of the command in COMMANDS, parses its arguments
//!           put::put ...   the handler: fn(c, s, args) -> Answer
//!             queue.put    the rules move jobs; queue.woken has the workers that get one
//!               binlog.put the change is recorded in the batch of the iteration
//!       c.reply            the answer, into the output of the connection
//!     server.deliver       into the outputs of the workers that waited
//!   server.commit          the batch in one write, and a sync if it is due, perhaps in the background
//!   server.send            one write for each connection with output; close what has ended
//!   accept                 new clients; they are read from in the next iteration
//!   monitoring             a line for the service manager, a slice of a page
//! ```
//!
//! # Invariants
//!
//! - Each job is in exactly one structure: its [`engine::queue::job::State`] names the structure and the
//!   position in it.
//! - Jobs are counted where they enter and leave a structure, and nowhere else.
//! - After each command no connection waits while a tube that it watches has a job for it.
//! - A timer goes off in the first iteration after its moment, or earlier: then nothing is due and it is set
//!   again. Due work that exceeds its part of an iteration is done in the next ones.
//! - The amortized cost of a command does not grow with the number of other tubes, jobs or
//!   connections, except for commands that list or count them.
//! - One iteration moves at most a few thousand jobs: kicked, due, flushed, reserved or deleted in a
//!   batch, or released by connections that close. One step of the rules wakes at most 128 waiting
//!   connections.
//! - At most one job of a tube has some key, and while a job has it or it is kept, no other job gets it.
//! - A flush of a tube deletes its jobs by changing an epoch of the tube. No command finds these jobs
//!   from then on, although they are freed later.
//! - Memory for a connection is bounded: 68 KiB of input behind commands that wait, one body, and
//!   256 KiB of unread replies plus one reply. A reply with several bodies has at most 1 MiB of them
//!   and 64 KiB of lines. `--max-memory` bounds the sum.
//! - A reply leaves only after its record is written, and synced if `-f 0` asks for that.
//! - A record in an older binlog file never outlives the record that supersedes it.
//! - Only `os` reads clocks. The loop passes the time in, and the rules find it in one place, as they find the
//!   work that is left to them.

#![allow(rustdoc::private_intra_doc_links, reason = "the map is for those who read the source")]

mod attention;
pub mod ctl;
mod engine;
mod flags;
mod logging;
pub mod options;
mod os;
pub mod program;
mod startup;
#[doc(hidden)]
pub mod testing;

pub use os::sys::memory::Allocator;

// As in the program: tests let it refuse memory.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;
