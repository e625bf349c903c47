//! Those who want to know how the server does: a service manager, and visitors over HTTP. They are told
//! between two turns of the loop, and nobody waits for them.

use super::notify::Notifier;
use super::visitors::Visitors;
use crate::engine::binlog::disk::FileNumber;
use crate::engine::collections::histogram::Histogram;
use crate::engine::monitor::http_conn::Subject;
use crate::engine::server::Server;
use crate::engine::time::Nanos;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// All who want to know.
#[derive(Debug)]
pub struct Onlookers {
    notifier: Notifier,
    visitors: Option<Visitors>,
    /// Something has happened to visitors.
    is_visited: bool,
    /// How long the turns of the loop took; counted only for visitors.
    turns: Histogram,
}

impl Onlookers {
    /// A service manager, if there is one, and visitors, if they may come.
    pub fn new(notifier: Notifier, visitors: Option<Visitors>) -> Onlookers {
        Onlookers { notifier, visitors, is_visited: true, turns: Histogram::default() }
    }

    /// The descriptor that becomes readable when something happens to visitors.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.visitors.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// It has become readable.
    pub fn are_visited(&mut self) {
        self.is_visited = true;
    }

    /// A file of the binlog is about to be read, before the first turn.
    ///
    /// # Errors
    /// The system does not let visitors be looked after.
    pub fn reading(&mut self, file: FileNumber, now: Nanos) -> io::Result<()> {
        self.notifier.reading(file, now);
        match &mut self.visitors {
            Some(visitors) => visitors.turn(Subject::Starting, now),
            None => Ok(()),
        }
    }

    /// A turn of the loop is over, which took until now: says what there is to say, and makes a
    /// piece of an answer.
    ///
    /// # Errors
    /// The system does not let visitors be looked after.
    pub fn turn(&mut self, server: &Server, now: Nanos) -> io::Result<()> {
        self.notifier.turn(now, || server.summary());
        let Some(visitors) = &mut self.visitors else { return Ok(()) };
        let is_due = visitors.next_due().is_some_and(|due| due <= now);
        if std::mem::take(&mut self.is_visited) || is_due {
            visitors.turn(Subject::Serving(server, &self.turns), now)?;
        }
        Ok(())
    }

    /// Whether somebody wants to know how long turns take.
    pub fn count_turns(&self) -> bool {
        self.visitors.is_some()
    }

    /// A turn took so long.
    pub fn turn_took(&mut self, span: Nanos) {
        self.turns.count(span);
    }

    /// When there is something to do though nothing happens.
    pub fn next_due(&self) -> Option<Nanos> {
        let visitors = self.visitors.as_ref().and_then(Visitors::next_due);
        self.notifier.next_due().into_iter().chain(visitors).min()
    }

    /// The server stops.
    pub fn stopping(&mut self) {
        self.notifier.stopping();
    }
}
