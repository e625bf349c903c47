//! The work that is left in an iteration of the loop. Work is counted in units of about 0.25 us, not timed, so
//! that tests can assert it.
//!
//! An iteration is a tick and visits. The parts of a tick follow each other, each with the same units
//! ([`Work::begin_due`]). Otherwise a part may have parts: a part of a tick has the work of each tube that is due,
//! visits have the share of each connection. The part that runs asks [`Work::is_left`] before each step, and spends.
//! What it spends is spent of the whole as well:
//!
//! ```text
//! let rest = work.give(units);        the part has these units, and the rest waits
//! while work.is_left() { ...; work.spend(2); }
//! work.end(rest);                     what the part has left, or has spent too much, is of the rest again
//! ```
//!
//! The work of waking a connection, moving a record or freeing memory is spent where it is done.

use crate::engine::limits::Limits;

/// The units of work that are left.
pub struct Work {
    /// What the part that runs has left, in fractions; below 0 if its last step took more.
    left: i64,
    /// What the parts around it have besides.
    outside: i64,
    /// The units of each part of a tick.
    due: usize,
    /// The units of each visit.
    share: usize,
    /// A command that may take more units in its first step lets the other connections go before.
    most_at_once: usize,
}

/// What waits while a part of the work is done.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Rest(i64);

/// The fractions of a unit: the price of a step can be a fraction.
const FRACTIONS: usize = 2048;
/// More than any part spends: ticks have a bound for each part.
const UNBOUNDED: i64 = i64::MAX / 4;

impl Work {
    /// Returns the work before the first iteration, which has no bound.
    pub fn new(limits: &Limits) -> Work {
        let Limits { least_share_work: share, most_due_work: due, .. } = *limits;
        Work { left: UNBOUNDED, outside: 0, due, share, most_at_once: usize::MAX }
    }

    // ---- An iteration ----

    /// Sets the units of the parts of a tick, in an iteration in which `ready` connections are to be visited.
    /// `is_late` if due work was postponed.
    ///
    /// Each part of the tick gets half of the units that the previous iteration used, or as many when it is late. So
    /// it gets few when iterations are short. It gets most when no client is ready.
    pub fn begin_tick(&mut self, ready: usize, is_late: bool, limits: &Limits) {
        let used = usize::try_from(fractions(limits.iteration_work) - self.left);
        let used = used.unwrap_or(0) / FRACTIONS;
        let wanted = match is_late {
            _ if ready == 0 => limits.most_due_work,
            true => used.max(limits.least_late_due_work),
            false => (used / 2).max(limits.least_due_work),
        };
        self.due = wanted.min(limits.most_due_work);
    }

    /// Begins the next part of a tick.
    pub fn begin_due(&mut self) {
        self.begin(self.due);
    }

    /// Begins what is no part of anything, with this many units.
    pub fn begin(&mut self, units: usize) {
        (self.left, self.outside) = (fractions(units), 0);
    }

    /// Begins the visits, and divides the work of pipelined commands between `connections`. `syncs` if the
    /// iteration ends in a sync.
    pub fn begin_visits(&mut self, connections: usize, syncs: bool, limits: &Limits) {
        let shared = if syncs { limits.shared_work_before_sync } else { limits.shared_work };
        self.share = (shared / connections.max(1)).max(limits.least_share_work);
        self.most_at_once = limits.iteration_work / connections.max(1);
        self.begin(limits.iteration_work);
    }

    // ---- Parts ----

    /// Gives this many units to a part, whatever is left.
    #[inline]
    pub fn give(&mut self, units: usize) -> Rest {
        self.begin_part(fractions(units))
    }

    /// Gives at most this many units to a part, of those that are left.
    pub fn give_at_most(&mut self, units: usize) -> Rest {
        self.begin_part(self.left.min(fractions(units)))
    }

    /// Gives its share to a visit, whose last command may exceed it.
    pub fn give_share(&mut self) -> Rest {
        self.give(self.share)
    }

    #[inline]
    fn begin_part(&mut self, given: i64) -> Rest {
        let rest = Rest(self.outside);
        self.outside += self.left - given;
        self.left = given;
        rest
    }

    /// Ends a part.
    #[inline]
    pub fn end(&mut self, rest: Rest) {
        self.left += self.outside - rest.0;
        self.outside = rest.0;
    }

    // ---- Spending ----

    /// Returns whether the part that runs may begin another step.
    #[inline]
    pub fn is_left(&self) -> bool {
        self.left > 0
    }

    /// Returns whether a command whose first step may take this many units has to wait for the visits of others. Then
    /// nothing is left of its own.
    pub fn must_wait(&mut self, units: usize) -> bool {
        let must_wait = units > self.most_at_once;
        if must_wait {
            self.leave_rest();
        }
        must_wait
    }

    /// Spends the price of a step.
    #[inline]
    pub fn spend(&mut self, units: usize) {
        self.left -= fractions(units);
    }

    /// Spends the price of `count` small steps, of which `per_unit` cost a unit.
    #[inline]
    pub fn spend_for(&mut self, count: usize, per_unit: usize) {
        self.left -= price(count, per_unit);
    }

    /// Spends the price of steps that the part has not caused alone: it may go on while the parts around it have
    /// work left.
    pub fn spend_outside(&mut self, count: usize, per_unit: usize) {
        self.outside -= price(count, per_unit);
        if self.left + self.outside <= 0 {
            self.leave_rest();
        }
    }

    /// Leaves the work of the part that runs to the parts around it.
    fn leave_rest(&mut self) {
        (self.left, self.outside) = (0, self.outside + self.left);
    }
}

fn fractions(units: usize) -> i64 {
    price(units, 1)
}

fn price(count: usize, per_unit: usize) -> i64 {
    (count as u64 * (FRACTIONS / per_unit) as u64).cast_signed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_part_spends_is_spent_of_the_whole() {
        let mut work = Work::new(&Limits::DEFAULT);
        work.begin_visits(1, false, &Limits { iteration_work: 100, ..Limits::DEFAULT });
        let visit = work.give(10);
        let step = work.give_at_most(20);
        work.spend(9);
        assert!(work.is_left());
        work.spend_for(3, 2);
        assert!(!work.is_left());
        work.end(step);
        assert!(!work.is_left(), "10.5 of 10 are spent");
        work.spend_outside(80, 1);
        work.end(visit);
        assert!(work.is_left(), "90.5 of 100 are spent");
        let visit = work.give(50);
        work.spend_outside(9, 1);
        assert!(work.is_left(), "99.5 of 100 are spent");
        work.spend_outside(1, 1);
        assert!(!work.is_left(), "100.5 of 100 are spent");
        work.end(visit);
        assert!(!work.is_left());
    }

    #[test]
    fn a_tick_has_half_of_what_visits_used_and_more_when_it_is_late() {
        let limits = Limits::DEFAULT;
        let mut work = Work::new(&limits);
        for (ready, is_late, used, due) in [
            (0, false, 1_000, limits.most_due_work),
            (1, false, 1_000, 500),
            (1, true, 1_000, 1_000),
            (1, false, 10, limits.least_due_work),
            (1, true, 10, limits.least_late_due_work),
            (1, true, limits.iteration_work + 50, limits.most_due_work),
        ] {
            work.begin_visits(1, false, &limits);
            work.spend(used);
            work.begin_tick(ready, is_late, &limits);
            assert_eq!(work.due, due, "{used} units were used");
        }
    }
}
