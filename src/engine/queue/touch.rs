//! Renews the deadlines of all jobs that a connection has reserved, in steps.
//!
//! The heap of reserved jobs is passed from its first index to its last. A later deadline moves a
//! job down, and another job takes its index. So the pass goes to the next index only when the job at
//! this one has its new deadline. If a job has left the heap between two steps, the pass begins again.

use super::Queue;
use super::job::ReservedEntry;
use crate::engine::keys::ConnKey;
use crate::engine::time::Nanos;

/// The progress of a `touch-all`.
#[derive(Clone, Copy, Debug)]
pub struct TouchAll {
    /// The time of the command. The new deadline of a job is one TTR after it.
    at: Nanos,
    /// The jobs before this index in the heap have their new deadlines.
    index: u32,
    /// The number of these jobs.
    pub touched: usize,
    /// The number of reserved jobs after the previous step.
    reserved: usize,
}

impl TouchAll {
    /// Begins to touch the jobs of a connection.
    pub fn new(now: Nanos) -> TouchAll {
        TouchAll { at: now, index: 0, touched: 0, reserved: 0 }
    }
}

impl Queue {
    /// Checks at most `checks_left` jobs, and subtracts their number. Returns whether all jobs of the
    /// connection were touched.
    pub fn touch_all_step(
        &mut self,
        conn: ConnKey,
        touch: &mut TouchAll,
        checks_left: &mut usize,
        now: Nanos,
    ) -> bool {
        let reserved = &self.clients[conn].reserved;
        if reserved.len() != touch.reserved {
            *touch = TouchAll { reserved: reserved.len(), ..TouchAll::new(touch.at) };
        }
        let mut is_done = false;
        while *checks_left > 0 {
            *checks_left -= 1;
            let Some(entry) = self.clients[conn].reserved.get(touch.index) else {
                is_done = true;
                break;
            };
            let job = &self.jobs[entry.job];
            let deadline = touch.at + Nanos::from_secs(job.ttr_secs);
            let is_flushed = self.is_flushed(job);
            if entry.deadline >= deadline || is_flushed {
                touch.index += 1;
                touch.touched += usize::from(!is_flushed);
                continue;
            }
            let entry = ReservedEntry { deadline, ..entry };
            self.clients[conn].reserved.replace(touch.index, entry, &mut self.jobs);
        }
        self.set_client_timer(conn, now);
        is_done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::limits::Limits;
    use crate::engine::queue::job::{JobParams, State};

    const NOW: Nanos = Nanos::from_secs(100);

    #[test]
    fn all_jobs_are_touched_in_steps_while_some_expire() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::new(Limits::DEFAULT);
            let conn = ConnKey::from_index(0);
            queue.connect(conn).unwrap();
            let tube = queue.tubes.find("default").unwrap();
            for id in 1..=2_000 {
                let params = JobParams { pri: 0, delay_secs: 0, ttr_secs: random.u32(2..50) };
                let body = queue.bodies.add(b"\r\n").unwrap();
                queue.put(tube, id, params, None, body, NOW).unwrap();
                queue.ensure_can_reserve(conn).unwrap();
                queue.reserve_job(conn, id, NOW).unwrap().unwrap();
            }
            let at = NOW + Nanos::from_millis(1_900);
            let (mut touch, mut now, mut steps) = (TouchAll::new(at), at, 0);
            while !queue.touch_all_step(conn, &mut touch, &mut random.usize(1..300), now) {
                now = now + Nanos::from_millis(random.u64(..8));
                // Jobs with the least TTR are lost before they are reached.
                queue.tick(random.usize(..9), now);
                steps += 1;
            }
            queue.check();
            assert!(steps > 5, "seed {seed}: {steps} steps");
            let held = queue.jobs.iter().filter(|(_, job)| match job.state {
                State::Reserved { .. } => {
                    let deadline = at + Nanos::from_secs(job.ttr_secs);
                    assert_eq!(queue.due(job), Some(deadline), "seed {seed}, job {}", job.id);
                    true
                }
                State::Ready { .. }
                | State::Delayed(_)
                | State::Postponed(_)
                | State::Buried(_)
                | State::Detached => false,
            });
            assert_eq!(touch.touched, held.count(), "seed {seed}");
        }
    }
}
