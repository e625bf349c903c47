//! Status reporting: notifies the service manager and serves metrics over HTTP, once per loop
//! iteration and without waiting for either.

use super::metrics_server::MetricsServer;
use super::notify::{Notifier, Status};
use crate::engine::monitor::http_conn::ServerState;
use crate::engine::monitor::measurements::Measurements;
use crate::engine::server::Server;
use crate::engine::time::Nanos;
use socket2::Socket;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// The service manager and the metrics server, where there are any.
#[derive(Debug)]
pub struct Monitor {
    pub notifier: Notifier,
    metrics_server: Option<MetricsServer>,
    /// The descriptor of the metrics server is readable.
    is_readable: bool,
    /// When the metrics server or the measurements have something to do without an event.
    metrics_due: Nanos,
    /// Empty without a metrics server, which is the only reader.
    measurements: Measurements,
}

impl Monitor {
    /// Creates the monitor of a server that is about to start.
    pub fn new(notifier: Notifier, metrics_server: Option<MetricsServer>) -> Monitor {
        let measurements = Measurements::default();
        let metrics_due = if metrics_server.is_some() { Nanos::ZERO } else { Nanos::NEVER };
        Monitor { notifier, metrics_server, is_readable: true, metrics_due, measurements }
    }

    /// Returns the descriptor to poll, if metrics are served.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.metrics_server.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// The descriptor has become readable.
    pub fn on_readable(&mut self) {
        self.is_readable = true;
    }

    /// Answers HTTP requests of a server that does not serve clients yet.
    ///
    /// # Errors
    /// Polling the metrics connections fails.
    pub fn answer(&mut self, state: ServerState<'_>, now: Nanos) -> io::Result<()> {
        self.metrics_server
            .as_mut()
            .map_or(Ok(()), |metrics_server| metrics_server.turn(state, now))
    }

    /// Reports the state after an iteration: notifies the service manager if that is due, and makes at
    /// most one slice of the measurements and one slice of a page.
    ///
    /// # Errors
    /// Polling the metrics connections fails.
    pub fn update(&mut self, server: &Server<Socket>, now: Nanos) -> io::Result<()> {
        self.notifier.update(now, || Status::Serving(server.summary()));
        let Some(metrics_server) = &mut self.metrics_server else { return Ok(()) };
        if std::mem::take(&mut self.is_readable) || self.metrics_due <= now {
            if self.measurements.next_due() <= now {
                self.measurements.update(server, now);
            }
            metrics_server.turn(ServerState::Serving(server, &self.measurements), now)?;
            self.metrics_due = metrics_server.next_due().min(self.measurements.next_due());
        }
        Ok(())
    }

    /// Counts an iteration, if metrics are served.
    pub fn iteration_took(&mut self, span: impl FnOnce() -> Nanos) {
        if self.metrics_server.is_some() {
            self.measurements.iterations.count(span());
        }
    }

    /// Returns when [`Monitor::update`] has something to do without an event.
    pub fn next_due(&self) -> Nanos {
        self.metrics_due.min(self.notifier.next_due())
    }

    /// Returns when a server that stands by has something to do without an event.
    pub fn next_standby_due(&self) -> Nanos {
        let metrics = self.metrics_server.as_ref().map_or(Nanos::NEVER, MetricsServer::next_due);
        metrics.min(self.notifier.next_due())
    }
}
