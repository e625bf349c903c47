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
    /// Empty without a metrics server, which is the only reader.
    measurements: Measurements,
}

impl Monitor {
    /// Creates the monitor of a server that is about to start.
    pub fn new(notifier: Notifier, metrics_server: Option<MetricsServer>) -> Monitor {
        let measurements = Measurements::default();
        Monitor { notifier, metrics_server, is_readable: true, measurements }
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
        if self.measurements.next_due() <= now {
            self.measurements.update(server, now);
        }
        let is_due = metrics_server.next_due().is_some_and(|due| due <= now);
        if std::mem::take(&mut self.is_readable) || is_due {
            metrics_server.turn(ServerState::Serving(server, &self.measurements), now)?;
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
    pub fn next_due(&self) -> Option<Nanos> {
        let measurements = self.metrics_server.is_some().then(|| self.measurements.next_due());
        [self.next_standby_due(), measurements].into_iter().flatten().min()
    }

    /// Returns when a server that stands by has something to do without an event.
    pub fn next_standby_due(&self) -> Option<Nanos> {
        let metrics = self.metrics_server.as_ref().and_then(MetricsServer::next_due);
        [self.notifier.next_due(), metrics].into_iter().flatten().min()
    }
}
