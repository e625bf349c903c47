//! A drop-in replacement of beanstalkd, the simple, fast work queue.
//!
//! One process, one thread, one poll loop. This page is the map of the house; each room
//! tells its own story at its head.
//!
//! # Rooms
//!
//! Two wings. [`engine`] is the whole server without sockets, clock and disk: plain
//! structs, mutated in place, driven by calls. [`os`] is everything that touches the
//! operating system. The engine never names `os`. Within a wing, imports run downward.
//!
//! | floor | room | owns |
//! |---|---|---|
//! | 7 | `main` | parse, run, report |
//! | 7 | [`startup`] | the steps before the first client, how each can fail, and its exit code |
//! | 7 | [`logging`] | how the log looks |
//! | 7 | [`options`] | flags to [`options::Options`], with what each means |
//! | 6 | [`os::event_loop`] | the one loop: readiness, everybody's share of a turn, flush |
//! | 5 | [`os::onlookers`] | those who want to know how the server does, and are told between two turns |
//! | 5 | [`os::visitors`] | the sockets of those who ask over HTTP |
//! | 5 | [`engine::monitor::http_conn`] | one of them: bytes to a request, an answer in pieces |
//! | 5 | [`os::notify`] | what a service manager is told, and when |
//! | 5 | [`os::listen`], [`os::stream`] | listening sockets; one accepted socket |
//! | 5 | [`os::disk`] | the directory of the binlog: its files, its lock, syncing |
//! | 5 | [`os::first_process`] | what falls to the first process of a container, and of a machine |
//! | 5 | [`os::memory`] | the allocator, with memory kept back; `unsafe` is here and in `os::process` |
//! | 5 | [`os::process`] | clock, signals, user, limits, what a machine asks for |
//! | 5 | [`os::names`] | addresses of hosts; in a static binary they and users come from files |
//! | 4 | [`engine::server`] | the whole state; runs commands; the calls of the loop |
//! | 3 | [`engine::conn`] | one client's state machine: bytes to lines and bodies |
//! | 3 | [`engine::protocol::stats`] | the YAML documents, and how the server does in a line |
//! | 3 | [`engine::monitor::metrics`] | the page for Prometheus, in slices |
//! | 3 | [`engine::binlog::inspect`] | what `--check` and `--dump` tell of the files of a binlog |
//! | 2 | [`engine::queue`] | the rules: put, reserve, release, bury, kick, delete, time |
//! | 2 | [`engine::queue::waiters`] | how workers and tubes find each other |
//! | 2 | [`engine::queue::log`] | what the binlog is told, and when |
//! | 2 | [`engine::queue::replay`] | how the queue comes back from the files of a binlog |
//! | 2 | [`engine::queue::check`] | what holds between any two commands, counted anew |
//! | 2 | [`engine::binlog`] | where records go, and when they are safe |
//! | 2 | [`engine::binlog::space`], [`engine::binlog::compaction`] | room for records; how old files are emptied |
//! | 1 | [`engine::queue::job`], [`engine::queue::tube`] | jobs and tubes, and where to find them |
//! | 1 | [`engine::protocol::command`] | a line to a [`engine::protocol::command::Command`] |
//! | 1 | [`engine::protocol::reply`], [`engine::protocol::output`] | replies to bytes; bytes on their way out |
//! | 1 | [`engine::queue::body`] | the bytes of jobs, side by side; the large ones are shared with replies |
//! | 1 | [`engine::protocol::listing`] | lists of very many tubes: made in steps, shared by replies |
//! | 1 | [`engine::binlog::record`], [`engine::binlog::reader`] | one record to and from bytes; a file read in whatever state it is |
//! | 1 | [`engine::binlog::segments`] | which jobs belong to which file |
//! | 0 | [`engine::collections::heap`], [`engine::collections::list`], [`engine::collections::wheel`] | indexed heap; linked list; timer wheel |
//! | 0 | [`engine::collections::slots`], [`engine::collections::pages`] | which slots of a page are taken; entries in pages that come and go |
//! | 0 | [`engine::collections::beside`] | entries beside those of another slab, under its keys |
//! | 0 | [`engine::collections::index`], [`engine::collections::table`] | a hash index that never rebuilds; entries in pages found by it |
//! | 0 | [`engine::collections::ids`] | jobs by id, in blocks of eight ids |
//! | 0 | [`engine::time`], [`engine::keys`] | nanoseconds; names of things |
//! | 0 | [`engine::protocol::input`] | bytes that have arrived and were not used yet |
//! | 0 | [`engine::monitor::http`], [`engine::monitor::histogram`] | heads of HTTP; how often something took how long |
//! | 0 | [`engine::bytes`], [`engine::json`] | looking for a byte, writing a number; text in JSON |
//! | 0 | [`engine::headroom`] | which allocations may use the memory that is kept back |
//! | 0 | [`engine::binlog::disk`] | the disk as the binlog sees it |
//!
//! Some know each other: `tube` keeps the line that `waiting` tells of; `waiting`, `durable`,
//! `replay` and `check` are chapters of `queue`, `space` and `compaction` of `binlog`, told apart.
//!
//! # How a command travels
//!
//! ```text
//! event_loop  readable: read into the scratch buffer, and a large body to where it stays
//!   server.receive(conn, bytes, now)
//!     conn.next_step         cuts a line or a body out of the bytes
//!       command::parse       the line becomes a Command, or earns BAD_FORMAT
//!     server.execute         one arm for each command
//!       queue.put ...        the rules move jobs; whoever waited is noted in queue.answers
//!         binlog.put ...     and what becomes of a job is recorded in the batch of the turn
//!     reply.write            into the output of the connection
//!     server.deliver_answers into the outputs of those who waited
//! event_loop  all reads of the turn are done
//!   server.commit            the batch in one write, and one sync if it is due
//!   flush                    one write for each connection with output; close what has ended
//!   accept                   new clients, which are read from in the next iteration
//!   onlookers.turn           a word to the service manager, a slice of a page of metrics
//! ```
//!
//! # Invariants
//!
//! - Every job stands in exactly one structure, and its [`engine::queue::job::State`] says in
//!   which and where.
//! - How many jobs are where is counted as they enter and leave, and nowhere else.
//! - After each command no connection waits while a tube that it watches has an offer.
//! - A timer is set to at most one tick (66 us) after the moment that it is for; it may be set to
//!   an earlier moment, and then finds nothing. If more is due than the budget of one iteration
//!   allows, the rest is done in the next iterations.
//! - On balance no command costs more when other tubes, jobs or connections are added, but
//!   for those that list or count them.
//! - One iteration moves at most a few thousand jobs, whether they are kicked, come due, or were held
//!   by connections that end. One step of the rules answers at most 128 connections that wait.
//! - What is kept for a connection is bounded: 68 KiB of input behind commands that wait, one body,
//!   and 256 KiB of unread replies plus one. With `--max-memory` all of them together are bounded.
//! - No reply leaves before the record of what it tells has been written, and synced if that
//!   was asked for.
//! - What an older file of the binlog says never outlives the record that takes it back.
//! - `now` is a parameter. Clocks are read in `os::process`.

#![allow(rustdoc::private_intra_doc_links, reason = "the map is for those who read the source")]

mod engine;
mod logging;
pub mod options;
mod os;
pub mod program;
mod startup;
#[doc(hidden)]
pub mod testing;

pub use os::memory::Allocator;
