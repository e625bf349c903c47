//! Waits until this server leads its cluster. Meanwhile it answers health checks, and notifies the
//! service manager.

use super::{Ended, Start, cannot_lead, cannot_wait};
use crate::engine::monitor::http_conn::ServerState;
use crate::engine::time::Nanos;
use crate::options::EtcdOptions;
use crate::os::membership::{Membership, Standing};
use crate::os::notify::Status;
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

const SIGNALS: Token = Token(0);
const MONITOR: Token = Token(1);
const MEMBERSHIP: Token = Token(2);

impl Start<'_> {
    /// Waits until this server leads.
    pub(super) fn wait_to_lead(
        &mut self,
        membership: &Membership,
        etcd: &EtcdOptions,
    ) -> Result<(), Ended> {
        let mut poll = self.open_poll(membership).map_err(cannot_wait)?;
        let mut events = Events::with_capacity(8);
        loop {
            let leader = match membership.standing().map_err(cannot_lead(etcd))? {
                Standing::Leader => return Ok(()),
                Standing::Undecided => None,
                Standing::Standby(leader) => Some(leader),
            };
            let leads = |leader| format!("standing by: {leader} leads");
            let status = leader.as_ref().map_or_else(|| "waiting for etcd".to_owned(), leads);
            let now = self.clock.now();
            self.monitor.notifier.update(now, || Status::StandingBy(status));
            self.check_stop()?;
            let state = ServerState::StandingBy(leader.as_deref());
            self.monitor.answer(state, now).map_err(cannot_wait)?;
            let due = self.monitor.next_standby_due();
            let until = || Duration::from_nanos(due.since(self.clock.now()).as_nanos());
            match poll.poll(&mut events, (due != Nanos::NEVER).then(until)) {
                Err(error) if error.kind() != ErrorKind::Interrupted => {
                    return Err(cannot_wait(error).into());
                }
                Ok(()) | Err(_) => {}
            }
            if events.iter().any(|event| event.token() == MONITOR) {
                self.monitor.on_readable();
            }
        }
    }

    fn open_poll(&self, membership: &Membership) -> io::Result<Poll> {
        let poll = Poll::new()?;
        let register = |descriptor: RawFd, token| {
            poll.registry().register(&mut SourceFd(&descriptor), token, Interest::READABLE)
        };
        register(self.signals.as_raw_fd(), SIGNALS)?;
        if let Some(descriptor) = self.monitor.descriptor() {
            register(descriptor, MONITOR)?;
        }
        membership.set_waker(Waker::new(poll.registry(), MEMBERSHIP)?);
        Ok(poll)
    }
}
