//! The event loop: polls sockets, timers and signals, and calls the engine.
//!
//! One iteration:
//!
//! ```text
//! monitor -> poll -> tick -> each ready connection once: read, run commands
//!   -> commit -> flush: write, close connections that have ended -> free keys -> accept
//! ```
//!
//! Clients are accepted last, so that a connection that ended makes room for one that came in
//! the same iteration. A new connection is read from in the next iteration.
//!
//! Each ready connection is served once per iteration: one read, or two with a large body, and
//! commands within its share. An iteration ends when its budget of work is used up. Replies to a
//! connection with more commands to run are sent once 16 KiB have gathered, or after 16 iterations.
//!
//! Sockets are registered once, for both directions and edge-triggered. The readiness of an event is
//! remembered until the kernel returns `WouldBlock`. A connection with work left is in the list
//! `ready`, and while that list is not empty the loop does not sleep. Replies are written after all
//! reads of the iteration, when its changes are in the binlog: one write and one sync serve the whole
//! iteration.
//!
//! The loop knows no command and no rule. For each connection the engine returns the next actions:
//! read, run, write, close.

use super::acceptor::Acceptor;
use super::disk_thread::DiskWaker;
use super::etcd::{EXIT_LOST, Membership, MembershipError};
use super::listen::Listener;
use super::monitor::Monitor;
use super::stream::Stream;
use super::sys::clock::{self, Alarm, Clock};
use super::sys::signals::{Signal, Signals, Stop};
use crate::engine::binlog::IoFailed;
use crate::engine::collections::slab::PAGE_BYTES;
use crate::engine::conn::OutputHandle;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::ConnKey;
use crate::engine::limits::Limits;
use crate::engine::server::Server;
use crate::engine::time::Nanos;
use log::{debug, info};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use slab::Slab;
use std::collections::TryReserveError;
use std::fmt;
use std::hint::black_box;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// The loop with everything that it serves.
#[derive(Debug)]
pub struct EventLoop {
    poll: Poll,
    server: Server,
    limits: Limits,
    clock: Clock,
    alarm: Alarm,
    signals: Signals,
    monitor: Monitor,
    acceptor: Acceptor,
    /// Gives out the keys of connections. `None` while the engine gives back what a closed connection
    /// had: its key is not free yet.
    sockets: Slab<Option<Socket>>,
    /// Connections to serve, in this order.
    ready: Vec<ConnKey>,
    /// Connections to write to at the end of the iteration; empty between iterations.
    dirty: Vec<ConnKey>,
    /// Connections to close at the end of the iteration, with the error if there was one; empty between
    /// iterations.
    closing: Vec<(ConnKey, Option<io::Error>)>,
    /// The time when the clock was last read: after each poll, and for each connection with commands to
    /// run.
    now: Nanos,
    /// When this iteration began.
    iteration_at: Nanos,
    /// Connections whose commands may have to wait until memory for replies is not short.
    stalled: Vec<ConnKey>,
    /// How many bytes one read takes in this iteration.
    read_len: usize,
    /// The bytes of the last read, of whatever connection. Longer than a read, because the system maps
    /// only the written pages of a block of this size.
    scratch: Box<[u8]>,
    stop: Option<Stop>,
    /// The membership in a cluster, if there is one. No reply may leave without its leave.
    membership: Option<Membership>,
}

/// Why the loop cannot go on.
#[derive(Debug)]
pub enum RunError {
    /// Polling for events fails.
    Wait(io::Error),
    /// Writing the binlog fails, so that no change can be acknowledged any more.
    Binlog(IoFailed),
    /// Another server of the cluster may lead.
    Lost(MembershipError),
    /// Replies wait for etcd, and the server is to stop.
    Unacknowledged,
}

impl RunError {
    /// Returns the exit code. For a disk that fails it is EX_IOERR of sysexits(3).
    pub fn exit_code(&self) -> u8 {
        match self {
            RunError::Wait(_) => 1,
            RunError::Binlog(_) => 74,
            RunError::Lost(error) => error.exit_code(),
            RunError::Unacknowledged => EXIT_LOST,
        }
    }
}

/// One socket with its readiness.
#[derive(Debug)]
struct Socket {
    stream: Stream,
    /// Reading may return bytes.
    is_readable: bool,
    /// Writing may accept bytes.
    is_writable: bool,
    /// The client has shut down its sending side, and the engine has not been called for it yet.
    is_half_closed: bool,
    /// The connection is gone: the client takes no reply.
    is_hung_up: bool,
    /// Reading continues after a short read, until `WouldBlock`: a half-close causes no new event, and a
    /// read ends at urgent data and at descriptors sent over a Unix socket.
    reads_to_the_end: bool,
    /// In the list `ready`.
    is_queued: bool,
    /// Iterations since replies were last sent.
    delayed_sends: u8,
    /// In the list `stalled`.
    is_stalled: bool,
}

/// The lists of connections grow by at least this many.
const FEW: usize = 64;
/// The clock is read again before a shorter wait. A longer one may count from the last reading.
const SHORT_WAIT: Nanos = Nanos::from_millis(5);

/// The time between two looks for changes that etcd has not acknowledged.
const LOOK_INTERVAL: Nanos = Nanos::from_millis(200);
/// Reading this many bytes takes as long as one unit of the engine's work.
const READ_PER_WORK: usize = 2048;
/// Enough for eight replies with large bodies.
const SLICES_PER_WRITE: usize = 16;

/// For waits longer than this the alarm is set, which counts the time in which the machine is
/// suspended. The timeout of a poll does not, so a suspend delays a shorter wait by at most this.
const LONG_WAIT: Nanos = Nanos::from_secs(1);

const SIGNALS: Token = Token(usize::MAX);
const MONITOR: Token = Token(usize::MAX - 1);
const ALARM: Token = Token(usize::MAX - 2);
const MEMBERSHIP: Token = Token(usize::MAX - 3);
const DISK: Token = Token(usize::MAX - 4);
const FIRST_LISTENER: usize = usize::MAX - 5;

/// A server that stops waits for acknowledgements at most this long.
const STOP_TIMEOUT: Nanos = Nanos::from_secs(10);
/// And at most this long for clients to take their last replies.
const LAST_REPLIES_TIMEOUT: Nanos = Nanos::from_millis(100);
/// A server that stops looks at least this often whether it is done.
const STOP_WAIT: Duration = Duration::from_millis(5);

/// The threads that wake the loop.
#[derive(Debug)]
pub struct LoopWakers {
    /// The membership in a cluster.
    pub membership: Option<Membership>,
    /// Wakes the loop when a read or sync of a file has ended.
    pub disk: Option<DiskWaker>,
}

impl EventLoop {
    /// Creates the loop, which serves at most `max_connections` clients at once.
    pub fn new(
        server: Server,
        clock: Clock,
        signals: Signals,
        monitor: Monitor,
        listeners: Vec<Listener>,
        max_connections: usize,
        LoopWakers { membership, disk }: LoopWakers,
    ) -> io::Result<EventLoop> {
        let poll = Poll::new()?;
        let registry = poll.registry();
        registry.register(&mut SourceFd(&signals.as_raw_fd()), SIGNALS, Interest::READABLE)?;
        let alarm = Alarm::new()?;
        registry.register(&mut SourceFd(&alarm.as_raw_fd()), ALARM, Interest::READABLE)?;
        let acceptor =
            Acceptor::new("connections", listeners, max_connections, registry, FIRST_LISTENER)?;
        if let Some(descriptor) = monitor.descriptor() {
            registry.register(&mut SourceFd(&descriptor), MONITOR, Interest::READABLE)?;
        }
        if let Some(membership) = &membership {
            membership.set_waker(Waker::new(registry, MEMBERSHIP)?);
        }
        if let Some(disk) = disk {
            disk.set(Waker::new(registry, DISK)?);
        }
        let limits = *server.limits();
        let Limits { read_bytes, short_read_bytes, crowded_read_bytes, head_read_bytes, .. } =
            limits;
        let reads = [read_bytes, short_read_bytes, crowded_read_bytes, head_read_bytes];
        let scratch_len = reads.into_iter().fold(PAGE_BYTES, usize::max);
        Ok(EventLoop {
            poll,
            server,
            limits,
            clock,
            alarm,
            signals,
            monitor,
            acceptor,
            sockets: Slab::new(),
            ready: Vec::new(),
            dirty: Vec::new(),
            closing: Vec::with_capacity(FEW),
            stalled: Vec::new(),
            now: clock.now(),
            iteration_at: clock.now(),
            read_len: read_bytes,
            scratch: vec![0; scratch_len].into_boxed_slice(),
            stop: None,
            membership,
        })
    }

    /// Serves until a signal stops the server. Returns that signal.
    pub fn run(mut self) -> Result<Stop, RunError> {
        let mut events = Events::with_capacity(self.limits.events_per_iteration);
        loop {
            self.monitor.update(&self.server, self.now).map_err(RunError::Wait)?;
            self.wait(&mut events).map_err(RunError::Wait)?;
            if let Some(stop) = self.stop {
                self.monitor.stopping();
                self.server.close(self.now).map_err(RunError::Binlog)?;
                self.send_last_replies(&mut events)?;
                return Ok(stop);
            }
            if self.server.has_binlog() {
                self.server.set_clock_offset(clock::offset(self.now));
            }
            self.server.begin_iteration(self.ready.len());
            self.server.tick(self.now);
            self.serve_ready();
            self.server.commit(self.now).map_err(RunError::Binlog)?;
            self.flush();
            self.check_membership()?;
            self.free_keys();
            self.accept();
        }
    }

    /// Fails if another server of the cluster may lead.
    fn check_membership(&self) -> Result<(), RunError> {
        let Some(membership) = &self.membership else { return Ok(()) };
        membership.check().map_err(RunError::Lost)
    }

    /// Waits until the cluster has acknowledged all changes, and sends the replies that have waited.
    /// No command runs any more.
    fn send_last_replies(&mut self, events: &mut Events) -> Result<(), RunError> {
        if self.membership.is_none() {
            return Ok(());
        }
        let began_at = self.now;
        while !self.server.is_acknowledged() {
            if self.now.since(began_at) > STOP_TIMEOUT {
                return Err(RunError::Unacknowledged);
            }
            self.wait_for(events, Some(STOP_WAIT)).map_err(RunError::Wait)?;
            self.server.hand_over();
            self.check_membership()?;
        }
        let began_at = self.read_clock();
        self.flush();
        while self.server.has_replies() && self.now.since(began_at) < LAST_REPLIES_TIMEOUT {
            self.wait_for(events, Some(STOP_WAIT)).map_err(RunError::Wait)?;
            for key in std::mem::take(&mut self.ready) {
                if let Some(socket) = socket(&mut self.sockets, key) {
                    socket.is_queued = false;
                    self.server.mark_dirty(key);
                }
            }
            self.flush();
        }
        self.check_membership()
    }

    // ---- Waiting ----

    fn wait(&mut self, events: &mut Events) -> io::Result<()> {
        if self.monitor.counts_iterations() {
            self.monitor.iteration_took(self.clock.now().since(self.iteration_at));
        }
        let timeout = self.timeout();
        self.wait_for(events, timeout)
    }

    fn wait_for(&mut self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        let polled = self.poll.poll(events, timeout);
        self.iteration_at = self.read_clock();
        match polled {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        }
        for event in events.iter() {
            match event.token() {
                SIGNALS => self.take_signals(),
                MONITOR => self.monitor.on_readable(),
                ALARM => self.alarm.on_readable(),
                MEMBERSHIP | DISK => {}
                token if self.acceptor.on_event(token) => {}
                Token(index) => self.note(ConnKey::from_index(index), event),
            }
        }
        Ok(())
    }

    fn read_clock(&mut self) -> Nanos {
        self.now = self.clock.now();
        self.now
    }

    fn timeout(&mut self) -> Option<Duration> {
        let can_serve = !self.ready.is_empty() && !self.server.is_congested();
        if can_serve || self.server.has_dirty() {
            return Some(Duration::ZERO);
        }
        let due = self.acceptor.next_due().into_iter().chain(self.monitor.next_due());
        // There is no event when etcd does not acknowledge changes for some time.
        let is_waiting = self.membership.is_some() && !self.server.is_acknowledged();
        let look = is_waiting.then(|| self.now + LOOK_INTERVAL);
        let next = self.server.next_due().into_iter().chain(due).chain(look).min()?;
        // The poll rounds up to milliseconds, so only a short wait needs the exact time.
        let now = if next.since(self.now) < SHORT_WAIT { self.read_clock() } else { self.now };
        let span = next.since(now);
        if span > LONG_WAIT {
            self.alarm.set(self.clock.to_monotonic(next));
        }
        Some(Duration::from_nanos(span.as_nanos()))
    }

    /// Remembers the readiness of an event.
    fn note(&mut self, key: ConnKey, event: &mio::event::Event) {
        let Some(socket) = socket(&mut self.sockets, key) else { return };
        socket.is_readable |= event.is_readable() || event.is_read_closed() || event.is_error();
        socket.is_writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        socket.is_half_closed |= event.is_read_closed();
        let is_closed = event.is_read_closed() && event.is_write_closed();
        socket.is_hung_up |= event.is_error() || is_closed;
        socket.reads_to_the_end |= event.is_read_closed() || event.is_priority();
        socket.queue(key, &mut self.ready);
    }

    fn take_signals(&mut self) {
        while let Some(signal) = self.signals.next() {
            match signal {
                Signal::Drain => {
                    info!("SIGUSR1: draining: puts are rejected from now on");
                    self.server.set_draining(true);
                }
                Signal::StopDraining => {
                    info!("SIGUSR2: not draining: puts are accepted from now on");
                    self.server.set_draining(false);
                }
                Signal::Reopen => info!("SIGHUP: ignored: there is no file to reopen"),
                Signal::Stop(stop) => self.stop = Some(stop),
            }
        }
    }

    // ---- Accepting ----

    fn accept(&mut self) {
        for _ in 0..self.limits.accepts_per_iteration {
            if !self.acceptor.is_due(self.now) {
                return;
            }
            if let Err(error) = self.accept_one() {
                self.acceptor.back_off(&error, self.server.connection_count(), self.now);
            }
        }
    }

    fn accept_one(&mut self) -> io::Result<()> {
        // A client that is not accepted waits in the kernel.
        if !self.server.has_room() || self.try_reserve_one().is_err() {
            return Err(ErrorKind::OutOfMemory.into());
        }
        match self.acceptor.accept(self.server.connection_count(), self.now)? {
            Some(stream) => self.connect(stream),
            None => Ok(()),
        }
    }

    /// Reserves memory for one more client. Each client is named once in each list, and clients that
    /// were just closed may still be named too.
    fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        let clients = self.server.connection_count() + 1;
        headroom::leave(Headroom::Half, || {
            self.ready.try_reserve(clients)?;
            self.dirty.try_reserve(clients + self.limits.accepts_per_iteration)
        })?;
        try_reserve_entry(&mut self.sockets)
    }

    fn connect(&mut self, stream: Stream) -> io::Result<()> {
        let entry = self.sockets.vacant_entry();
        let (index, mut source) = (entry.key(), SourceFd(&stream.as_raw_fd()));
        let interest = Interest::READABLE | Interest::WRITABLE | Interest::PRIORITY;
        self.poll.registry().register(&mut source, Token(index), interest)?;
        let connected = self.server.connect_as(ConnKey::from_index(index));
        connected.map_err(|_| ErrorKind::OutOfMemory)?;
        debug!("connection {index} opened");
        entry.insert(Some(Socket {
            is_readable: false,
            is_writable: true,
            is_half_closed: false,
            is_hung_up: false,
            reads_to_the_end: matches!(stream, Stream::Unix(_)),
            is_queued: false,
            delayed_sends: 0,
            is_stalled: false,
            stream,
        }));
        Ok(())
    }

    /// Frees the keys of connections that were closed and have given back everything.
    fn free_keys(&mut self) {
        while let Some(key) = self.server.next_freed() {
            self.sockets.remove(key.index());
        }
    }

    // ---- Serving ----

    /// Serves each ready connection once, or as many as the iteration has a budget for: the rest
    /// come first in the next one.
    fn serve_ready(&mut self) {
        let mut ready = std::mem::take(&mut self.ready);
        self.server.share_budget(ready.len());
        self.read_len = if self.server.is_crowded() {
            self.limits.crowded_read_bytes
        } else if ready.len() <= self.limits.long_reads_per_iteration {
            self.limits.read_bytes
        } else {
            self.limits.short_read_bytes
        };
        let mut served = 0;
        for &key in &ready {
            if !self.server.has_budget() {
                break;
            }
            self.serve(key);
            served += 1;
        }
        ready.drain(..served);
        self.ready = ready;
    }

    /// Serves one connection. One that is gone is closed as soon as a command waits for bodies: its jobs are
    /// for others. The commands before it have run.
    fn serve(&mut self, key: ConnKey) {
        self.run_and_read(key);
        let is_gone = socket(&mut self.sockets, key).is_some_and(|socket| socket.is_hung_up);
        if is_gone && self.server.waits_for_bodies(key) {
            self.close(key, None);
        }
    }

    /// Runs buffered commands, or reads once, and once more into a large body.
    fn run_and_read(&mut self, key: ConnKey) {
        let Some(socket) = socket(&mut self.sockets, key) else { return };
        socket.is_queued = false;
        if std::mem::take(&mut socket.is_half_closed) {
            self.server.half_close(key);
        }
        // So `flush` takes this connection even if nothing happens now.
        let mut actions = self.server.mark_dirty(key);
        if actions.run {
            self.now = self.clock.now();
            self.server.resume(key, self.now);
            actions = self.server.actions(key);
        }
        if !socket.is_readable || !actions.read {
            return;
        }
        if !self.server.sends_large_bodies(key) {
            self.read(key, self.read_len);
        } else if !self.read_body(key) {
            // Only the beginning of a large body passes through the scratch buffer.
            self.read(key, self.limits.head_read_bytes.min(self.read_len));
            self.read_body(key);
        }
    }

    fn read(&mut self, key: ConnKey, read_len: usize) {
        let Some(socket) = socket(&mut self.sockets, key) else { return };
        let read = socket.stream.read(&mut self.scratch[..read_len]);
        let Some(count) = self.on_read(key, read, read_len) else { return };
        self.server.receive(key, &self.scratch[..count], self.now);
    }

    /// Reads into the large body that is arriving, and the bytes after it into the scratch buffer.
    /// Returns `false` if no large body is arriving, or the socket is not readable.
    fn read_body(&mut self, key: ConnKey) -> bool {
        let Some(socket) = socket(&mut self.sockets, key).filter(|socket| socket.is_readable)
        else {
            return false;
        };
        let Limits { body_read_bytes, head_read_bytes, .. } = self.limits;
        let Some(space) = self.server.body_space(key, body_read_bytes) else { return false };
        let (in_body, behind) = (space.len(), &mut self.scratch[..head_read_bytes]);
        let mut slices = [IoSliceMut::new(space), IoSliceMut::new(behind)];
        let read = socket.stream.read_vectored(&mut slices);
        let Some(count) = self.on_read(key, read, in_body + head_read_bytes) else { return true };
        self.server.receive_body(key, count.min(in_body), self.now);
        if let Some(more) = count.checked_sub(in_body).filter(|&more| more > 0) {
            self.server.receive(key, &self.scratch[..more], self.now);
        }
        true
    }

    /// Handles the result of a read of up to `most` bytes. Returns how many bytes have arrived.
    fn on_read(&mut self, key: ConnKey, read: io::Result<usize>, most: usize) -> Option<usize> {
        let socket = socket(&mut self.sockets, key)?;
        match read {
            Ok(0) => {
                socket.is_readable = false;
                self.server.end_input(key);
            }
            Ok(count) => {
                socket.is_readable = count == most || socket.reads_to_the_end;
                self.server.charge(count / READ_PER_WORK);
                // A timeout must not count from a moment before its command arrived.
                self.now = self.clock.now();
                return Some(count);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => socket.is_readable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => self.close(key, Some(&error)),
        }
        None
    }

    // ---- Sending ----

    /// Sends the replies of this iteration, then closes connections. A close may give jobs to waiting
    /// workers, whose replies must wait for the next commit.
    fn flush(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        self.server.take_dirty(&mut dirty);
        let is_crowded = self.server.is_crowded();
        let mut bytes_left = self.limits.sent_per_iteration_bytes;
        for key in dirty.drain(..) {
            self.flush_one(key, is_crowded, &mut bytes_left);
        }
        self.dirty = dirty;
        if !self.server.is_crowded() {
            self.wake_stalled();
        }
        if self.server.is_congested() {
            self.mark_writable();
        }
        if self.server.has_given_up() {
            for key in self.ready.extract_if(.., |key| !self.server.has_reply(*key)) {
                if headroom::leave(Headroom::Quarter, || self.closing.try_reserve(1)).is_ok() {
                    self.closing.push((key, None));
                }
            }
        }
        let mut closing = std::mem::take(&mut self.closing);
        for (key, why) in closing.drain(..) {
            self.close(key, why.as_ref());
        }
        self.closing = closing;
    }

    /// Sends replies to one connection, unless it is worth waiting for more of them. Then enqueues the
    /// connection if there is more to do.
    fn flush_one(&mut self, key: ConnKey, is_crowded: bool, bytes_left: &mut usize) {
        let Some(socket) = socket(&mut self.sockets, key) else { return };
        // The process may have been stopped since the last reply.
        if self.membership.as_ref().is_some_and(|membership| membership.check().is_err()) {
            return;
        }
        let mut output = self.server.output_handle(key);
        let is_stopping = self.stop.is_some();
        let gathers =
            output.actions().run && output.len() < self.limits.gathered_bytes && !is_stopping;
        if *bytes_left == 0 || (gathers && socket.delayed_sends < self.limits.delayed_sends) {
            socket.delayed_sends = socket.delayed_sends.saturating_add(1);
            return socket.queue(key, &mut self.ready);
        }
        socket.delayed_sends = 0;
        let can_close = self.closing.len() < self.closing.capacity()
            || headroom::leave(Headroom::Quarter, || self.closing.try_reserve(1)).is_ok();
        if !can_close {
            // There is room in the list in the next iteration.
            return socket.queue(key, &mut self.ready);
        }
        let before = output.len();
        if let Err(error) = socket.send(&mut output) {
            return self.closing.push((key, Some(error)));
        }
        *bytes_left = bytes_left.saturating_sub(before - output.len());
        let actions = output.actions();
        let may_stall = is_crowded && actions.write && !socket.is_stalled;
        if may_stall && headroom::leave(Headroom::Quarter, || self.stalled.try_reserve(1)).is_ok() {
            socket.is_stalled = true;
            self.stalled.push(key);
        }
        let may_write = socket.is_writable && actions.write;
        let may_read = socket.is_readable && actions.read;
        if actions.close {
            self.closing.push((key, None));
        } else if may_write || may_read || actions.run {
            socket.queue(key, &mut self.ready);
        }
    }

    /// Serves stalled connections again, some in each iteration, now that memory for replies is not
    /// short. Some of them may have ended or been served since.
    fn wake_stalled(&mut self) {
        let first = self.stalled.len().saturating_sub(self.limits.stalled_per_iteration);
        for key in self.stalled.drain(first..) {
            if let Some(socket) = socket(&mut self.sockets, key) {
                socket.is_stalled = false;
                socket.queue(key, &mut self.ready);
            }
        }
    }

    /// Makes the next iteration flush clients that are not served while the disk is congested.
    fn mark_writable(&mut self) {
        for &key in &self.ready {
            let Some(socket) = socket(&mut self.sockets, key) else { continue };
            if socket.is_writable && self.server.actions(key).write {
                self.server.mark_dirty(key);
            }
        }
    }

    fn close(&mut self, key: ConnKey, why: Option<&io::Error>) {
        if self.sockets.get_mut(key.index()).and_then(Option::take).is_none() {
            return;
        }
        match why {
            Some(error) => debug!("connection {} lost: {error}", key.index()),
            None => debug!("connection {} closed", key.index()),
        }
        self.server.disconnect(key, self.now);
        self.acceptor.on_close();
    }
}

impl Socket {
    /// Serves the connection in the next iteration.
    fn queue(&mut self, own_key: ConnKey, ready: &mut Vec<ConnKey>) {
        if !std::mem::replace(&mut self.is_queued, true) {
            ready.push(own_key);
        }
    }

    /// Writes what the kernel takes without waiting.
    fn send(&mut self, output: &mut OutputHandle<'_>) -> io::Result<()> {
        if !self.is_writable {
            return Ok(());
        }
        // Most replies are text alone: one slice is enough, and many would have to be cleared first.
        let (mut one, mut many);
        let slices: &mut [IoSlice<'_>] = if output.has_parts() {
            many = [IoSlice::new(&[]); SLICES_PER_WRITE];
            &mut many
        } else {
            one = [IoSlice::new(&[])];
            &mut one
        };
        let filled = output.next_slices(slices);
        if filled == 0 {
            return Ok(());
        }
        match self.stream.write(&slices[..filled]) {
            Ok(count) => output.sent(count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_writable = false,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Reserves memory for one more entry. A `Slab` has no fallible call for that, so a block of the size
/// that it is going to have is allocated first. After that the slab can grow.
fn try_reserve_entry<T>(slab: &mut Slab<T>) -> Result<(), TryReserveError> {
    if slab.len() < slab.capacity() {
        return Ok(());
    }
    let more = slab.capacity().max(FEW);
    let mut block: Vec<(usize, T)> = Vec::new();
    headroom::leave(Headroom::Half, || block.try_reserve_exact(slab.capacity() + more))?;
    // The compiler may leave out an allocation that nothing uses.
    drop(black_box(block));
    slab.reserve_exact(more);
    Ok(())
}

fn socket(sockets: &mut Slab<Option<Socket>>, key: ConnKey) -> Option<&mut Socket> {
    sockets.get_mut(key.index())?.as_mut()
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunError::Wait(error) => write!(f, "cannot wait for events: {error}; the server exits"),
            RunError::Lost(error) => write!(f, "{error}; the server exits"),
            RunError::Unacknowledged => f.write_str(
                "etcd does not acknowledge the last changes; their replies are not sent",
            ),
            RunError::Binlog(failure) => {
                write!(f, "{failure}; nothing more can be acknowledged, so the server exits")
            }
        }
    }
}
