//! The budget of one loop iteration. Work is counted in units of about 0.25 us, not timed, so that
//! tests can assert it.

use crate::engine::limits::Limits;

/// The units of work that are left in an iteration.
#[derive(Debug)]
pub struct Budget {
    /// The units left to all connections.
    left: usize,
    /// The units of each connection.
    share: usize,
    /// The units left to the connection whose commands run.
    share_left: usize,
    /// The units of a tick for tubes, and again for connections.
    due_work: usize,
    /// The units that due work has charged in this iteration.
    charged_as_due: usize,
}

/// Units of work to read from a connection and to write to it.
const WORK_PER_VISIT: usize = 16;

impl Budget {
    /// Returns the budget before the first iteration.
    pub fn new(limits: &Limits) -> Budget {
        let Limits { iteration_work: left, shared_work: share, most_due_work, .. } = *limits;
        Budget { left, share, share_left: 0, due_work: most_due_work, charged_as_due: 0 }
    }

    /// Begins an iteration in which `ready` connections are to be served. `is_late` if due work was
    /// postponed.
    ///
    /// Due work gets half of the units that clients used in the previous iteration, or as many when it
    /// is late. So it gets few when iterations are short. It gets most when no client is ready.
    pub fn begin_iteration(&mut self, ready: usize, is_late: bool, limits: &Limits) {
        let used = limits.iteration_work - self.left - std::mem::take(&mut self.charged_as_due);
        let wanted = match is_late {
            _ if ready == 0 => limits.most_due_work,
            true => used.max(limits.least_late_due_work),
            false => (used / 2).max(limits.least_due_work),
        };
        self.due_work = wanted.min(limits.most_due_work);
        self.left = limits.iteration_work;
    }

    /// Divides the work of pipelined commands between `connections`. `syncs` if the iteration ends
    /// in a sync.
    pub fn divide(&mut self, connections: usize, syncs: bool, limits: &Limits) {
        let shared = if syncs { limits.shared_work_before_sync } else { limits.shared_work };
        self.share = (shared / connections.max(1)).max(limits.least_share_work);
    }

    /// Returns whether another connection may be served.
    pub fn is_left(&self) -> bool {
        self.left > 0
    }

    /// Gives a whole share to the connection that is visited, and charges the system calls of that.
    pub fn begin_share(&mut self) {
        self.charge(WORK_PER_VISIT);
        self.share_left = self.share;
    }

    /// Ends the share of the connection that was visited last.
    pub fn end_share(&mut self) {
        self.share_left = 0;
    }

    /// Returns whether the connection may run another command.
    pub fn has_share(&self) -> bool {
        self.share_left > 0
    }

    /// Charges work that no connection caused alone.
    pub fn charge(&mut self, work: usize) {
        self.left = self.left.saturating_sub(work);
    }

    /// Charges work that no client of this iteration caused, and leaves a quarter of the iteration to them.
    pub fn charge_due(&mut self, work: usize, limits: &Limits) {
        let taken = work.min(self.left.saturating_sub(limits.iteration_work / 4));
        self.left -= taken;
        self.charged_as_due += taken;
    }

    /// Charges work of the connection whose commands run.
    pub fn charge_share(&mut self, work: usize) {
        self.share_left = self.share_left.saturating_sub(work);
        self.charge(work);
    }

    /// Returns the units of a tick for tubes, and again for connections.
    pub fn due_work(&self) -> usize {
        self.due_work
    }
}
