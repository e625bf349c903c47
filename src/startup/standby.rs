//! Waits until this server leads its cluster. Meanwhile it answers health checks, and notifies the
//! service manager.

use super::{cannot_lead, cannot_wait};
use crate::engine::monitor::http_conn::ServerState;
use crate::options::EtcdOptions;
use crate::os::failure::Failure;
use crate::os::membership::{Membership, Standing};
use crate::os::monitor::Monitor;
use crate::os::notify::Status;
use crate::os::sys::clock::Clock;
use crate::os::sys::signals::{Signals, Stop};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

const SIGNALS: Token = Token(0);
const MONITOR: Token = Token(1);
const MEMBERSHIP: Token = Token(2);

/// Waits until this server leads. Returns the signal that has stopped it before.
pub fn wait_to_lead(
    membership: &Membership,
    etcd: &EtcdOptions,
    signals: &Signals,
    monitor: &mut Monitor,
    clock: &Clock,
) -> Result<Option<Stop>, Failure> {
    let mut poll = open_poll(membership, signals, monitor).map_err(cannot_wait)?;
    let mut events = Events::with_capacity(8);
    loop {
        let status = match membership.standing().map_err(cannot_lead(etcd))? {
            Standing::Leader => return Ok(None),
            Standing::Undecided => "waiting for etcd".to_owned(),
            Standing::Standby(leader) => format!("standing by: {leader} leads"),
        };
        monitor.notifier.update(clock.now(), || Status::StandingBy(status));
        if let Some(stop) = signals.pending_stop() {
            return Ok(Some(stop));
        }
        monitor.answer(ServerState::StandingBy, clock.now()).map_err(cannot_wait)?;
        let due = monitor.next_standby_due();
        let timeout = due.map(|due| Duration::from_nanos(due.since(clock.now()).as_nanos()));
        match poll.poll(&mut events, timeout) {
            Err(error) if error.kind() != ErrorKind::Interrupted => return Err(cannot_wait(error)),
            Ok(()) | Err(_) => {}
        }
        if events.iter().any(|event| event.token() == MONITOR) {
            monitor.on_readable();
        }
    }
}

fn open_poll(membership: &Membership, signals: &Signals, monitor: &Monitor) -> io::Result<Poll> {
    let poll = Poll::new()?;
    let register = |descriptor: RawFd, token| {
        poll.registry().register(&mut SourceFd(&descriptor), token, Interest::READABLE)
    };
    register(signals.as_raw_fd(), SIGNALS)?;
    if let Some(descriptor) = monitor.descriptor() {
        register(descriptor, MONITOR)?;
    }
    membership.set_waker(Waker::new(poll.registry(), MEMBERSHIP)?);
    Ok(poll)
}
