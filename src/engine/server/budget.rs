//! The budget of one loop iteration: work is counted in units of about 0.25 us, not timed, so that
//! tests can assert it.

use crate::engine::queue::{LATE_DUE_WORK, LEAST_DUE_WORK, MOST_DUE_WORK};

/// Units of work that are left in the present iteration.
#[derive(Debug)]
pub struct Budget {
    /// Left to all connections.
    left: usize,
    /// What each connection may use.
    share: usize,
    /// What is left of its share to the connection whose commands are run.
    share_left: usize,
    /// What a tick may use for each kind of thing that is due.
    due_work: usize,
}

/// The work of one iteration that many connections cause together: about 1 ms.
pub const ITERATION_WORK: usize = 4096;
/// The work that pipelined commands of all ready connections may cause together in one iteration,
/// unless the smallest share for each is more: some 15 us, so that a client that sends one command
/// at a time waits little behind one that sends thousands.
pub const SHARED_WORK: usize = 64;
/// The same where each iteration ends in a sync of the disk, which takes longer than all commands.
pub const SHARED_WORK_BEFORE_SYNC: usize = 1024;
pub const SMALLEST_SHARE: usize = 16;

impl Default for Budget {
    fn default() -> Budget {
        Budget { left: ITERATION_WORK, share: SHARED_WORK, share_left: 0, due_work: MOST_DUE_WORK }
    }
}

impl Budget {
    /// Begins an iteration in which `ready` connections are to be served. `is_late` if work was due
    /// before and was not done.
    ///
    /// What is due gets about half of what clients used in the previous iteration: little when
    /// iterations are short, more when work is late or iterations are long anyway, and most when no
    /// client is to be served.
    pub fn begin_iteration(&mut self, ready: usize, is_late: bool) {
        let used = ITERATION_WORK - self.left;
        let least = if is_late { LATE_DUE_WORK } else { LEAST_DUE_WORK };
        self.due_work =
            if ready == 0 { MOST_DUE_WORK } else { (used / 2).clamp(least, MOST_DUE_WORK) };
        self.left = ITERATION_WORK;
    }

    /// Divides the work for pipelined commands between `connections`. `syncs` if the iteration ends in
    /// a sync.
    pub fn divide(&mut self, connections: usize, syncs: bool) {
        let shared = if syncs { SHARED_WORK_BEFORE_SYNC } else { SHARED_WORK };
        self.share = (shared / connections.max(1)).max(SMALLEST_SHARE);
    }

    /// Returns whether another connection may be served.
    pub fn is_left(&self) -> bool {
        self.left > 0
    }

    /// Gives a whole share to the connection that is served next.
    pub fn begin_share(&mut self) {
        self.share_left = self.share;
    }

    /// Returns whether the present connection may run another command.
    pub fn has_share(&self) -> bool {
        self.share_left > 0
    }

    /// Charges work that no connection caused alone.
    pub fn charge(&mut self, work: usize) {
        self.left = self.left.saturating_sub(work);
    }

    /// Charges work of the present connection.
    pub fn charge_share(&mut self, work: usize) {
        self.share_left = self.share_left.saturating_sub(work);
        self.charge(work);
    }

    /// Returns the units of work that a tick may use for each kind of thing that is due.
    pub fn due_work(&self) -> usize {
        self.due_work
    }
}
