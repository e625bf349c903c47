//! Those who want to know how the server does: a service manager, and visitors over HTTP. They are told
//! between two turns of the loop, and nobody waits for them.

use super::metrics_server::MetricsServer;
use super::notify::Notifier;
use crate::engine::binlog::disk::FileNumber;
use crate::engine::collections::histogram::Histogram;
use crate::engine::monitor::http_conn::ServerState;
use crate::engine::server::Server;
use crate::engine::time::Nanos;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// All who want to know.
#[derive(Debug)]
pub struct Monitor {
    notifier: Notifier,
    metrics_server: Option<MetricsServer>,
    /// Something has happened to visitors.
    is_visited: bool,
    /// How long the turns of the loop took; counted only for visitors.
    iterations: Histogram,
}

impl Monitor {
    /// A service manager, if there is one, and visitors, if they may come.
    pub fn new(notifier: Notifier, metrics_server: Option<MetricsServer>) -> Monitor {
        Monitor { notifier, metrics_server, is_visited: true, iterations: Histogram::default() }
    }

    /// The descriptor that becomes readable when something happens to visitors.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.metrics_server.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// It has become readable.
    pub fn on_readable(&mut self) {
        self.is_visited = true;
    }

    /// A file of the binlog is about to be read, before the first turn.
    ///
    /// # Errors
    /// The system does not let visitors be looked after.
    pub fn reading(&mut self, file: FileNumber, now: Nanos) -> io::Result<()> {
        self.notifier.reading(file, now);
        match &mut self.metrics_server {
            Some(metrics_server) => metrics_server.turn(ServerState::Starting, now),
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
        let Some(metrics_server) = &mut self.metrics_server else { return Ok(()) };
        let is_due = metrics_server.next_due().is_some_and(|due| due <= now);
        if std::mem::take(&mut self.is_visited) || is_due {
            metrics_server.turn(ServerState::Serving(server, &self.iterations), now)?;
        }
        Ok(())
    }

    /// Whether somebody wants to know how long turns take.
    pub fn counts_iterations(&self) -> bool {
        self.metrics_server.is_some()
    }

    /// A turn took so long.
    pub fn iteration_took(&mut self, span: Nanos) {
        self.iterations.count(span);
    }

    /// When there is something to do though nothing happens.
    pub fn next_due(&self) -> Option<Nanos> {
        let metrics_server = self.metrics_server.as_ref().and_then(MetricsServer::next_due);
        self.notifier.next_due().into_iter().chain(metrics_server).min()
    }

    /// The server stops.
    pub fn stopping(&mut self) {
        self.notifier.stopping();
    }
}
