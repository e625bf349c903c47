//! The budget of one loop iteration. Work is counted in units of about 0.25 us, not timed, so that
//! tests can assert it.

use crate::engine::queue::{MAX_DUE_WORK, MIN_DUE_WORK, MIN_LATE_DUE_WORK};

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
}

/// The budget of an iteration: about 1 ms.
const ITERATION_WORK: usize = 4096;
/// The work of pipelined commands of all ready connections in an iteration, if each has more than
/// [`MIN_SHARE`]: about 16 us. So a client that sends one command at a time is hardly delayed by
/// one that sends thousands.
const SHARED_WORK: usize = 64;
/// As [`SHARED_WORK`], for iterations that end in a sync, which takes longer than all commands.
const SHARED_WORK_BEFORE_SYNC: usize = 1024;
pub const MIN_SHARE: usize = 16;

impl Default for Budget {
    fn default() -> Budget {
        Budget { left: ITERATION_WORK, share: SHARED_WORK, share_left: 0, due_work: MAX_DUE_WORK }
    }
}

impl Budget {
    /// Begins an iteration in which `ready` connections are to be served. `is_late` if due work was
    /// postponed.
    ///
    /// Due work gets half of the units that clients used in the previous iteration. So it gets few
    /// when iterations are short. It gets more when it is late, and most when no client is ready.
    pub fn begin_iteration(&mut self, ready: usize, is_late: bool) {
        let used = ITERATION_WORK - self.left;
        let least = if is_late { MIN_LATE_DUE_WORK } else { MIN_DUE_WORK };
        self.due_work =
            if ready == 0 { MAX_DUE_WORK } else { (used / 2).clamp(least, MAX_DUE_WORK) };
        self.left = ITERATION_WORK;
    }

    /// Divides the work of pipelined commands between `connections`. `syncs` if the iteration ends
    /// in a sync.
    pub fn divide(&mut self, connections: usize, syncs: bool) {
        let shared = if syncs { SHARED_WORK_BEFORE_SYNC } else { SHARED_WORK };
        self.share = (shared / connections.max(1)).max(MIN_SHARE);
    }

    /// Returns whether another connection may be served.
    pub fn is_left(&self) -> bool {
        self.left > 0
    }

    /// Gives a whole share to the connection that is served next.
    pub fn begin_share(&mut self) {
        self.share_left = self.share;
    }

    /// Returns whether the connection may run another command.
    pub fn has_share(&self) -> bool {
        self.share_left > 0
    }

    /// Charges work that no connection caused alone.
    pub fn charge(&mut self, work: usize) {
        self.left = self.left.saturating_sub(work);
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
