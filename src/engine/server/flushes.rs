//! `flush-tube` and `flush-buried`. A client gets its reply when all flushed jobs are freed.

use super::Server;
use crate::engine::conn::Phase;
use crate::engine::keys::ConnKey;
use crate::engine::protocol::reply::Reply;
use crate::engine::queue::flush::{FlushKind, WORK_PER_FREE};
use crate::engine::time::Nanos;

impl Server {
    /// Deletes all jobs of a tube, or the buried ones.
    pub(super) fn begin_flush(&mut self, key: ConnKey, tube: &str, kind: FlushKind, now: Nanos) {
        let Some(tube) = self.queue.tubes.find(tube) else {
            return self.reply(key, Reply::NotFound);
        };
        match self.queue.flush(key, tube, kind, now) {
            Ok(Some(count)) => {
                let freed = usize::try_from(count).unwrap_or(usize::MAX);
                self.budget.charge_share(freed.saturating_mul(WORK_PER_FREE));
                self.reply(key, Reply::Flushed { count });
            }
            Ok(None) => {
                self.budget.charge_share(self.queue.limits.first_flush_work);
                self.conns[key].phase = Phase::Flushing;
            }
            Err(_) => self.reply(key, Reply::OutOfMemory),
        }
    }

    /// Frees flushed jobs, and replies to the clients whose flushes are complete.
    pub(super) fn flush_step(&mut self, now: Nanos) {
        // With `-f 0` clients wait for the sync of the iteration, which takes longer than this work.
        let syncs = self.queue.syncs_each_iteration();
        let most = self.queue.limits.most_due_work;
        let mut work_left = if syncs { most } else { self.budget.due_work() };
        while let Some((key, count)) = self.queue.flush_step(&mut work_left, now) {
            self.conns[key].phase = Phase::ReadingLine;
            self.reply(key, Reply::Flushed { count });
        }
    }
}
