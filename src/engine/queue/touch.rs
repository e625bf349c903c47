//! Renews the deadlines of all jobs that a connection has reserved, in steps.
//!
//! The heap of reserved jobs is passed from its first index to its last. A later deadline moves a
//! job down, and another job takes its index. So the pass goes to the next index only when the job at
//! this one has its new deadline. If a job has left the heap between two steps, the pass begins again.

use super::Queue;
use super::client::Client;
use crate::engine::time::Nanos;

/// The progress of a `touch-all`.
#[derive(Clone, Copy, Debug)]
pub struct TouchAll {
    /// The time of the command. The new deadline of a job is one TTR after it.
    at: Nanos,
    /// The jobs before this index in the heap have their new deadlines.
    index: usize,
    /// The number of these jobs.
    pub touched: usize,
    /// The number of reserved jobs after the previous step.
    reserved: usize,
}

/// Units of work to touch a job.
pub const WORK_PER_TOUCH: usize = 2;

impl TouchAll {
    /// Begins to touch the jobs of a connection.
    pub fn new(now: Nanos) -> TouchAll {
        TouchAll { at: now, index: 0, touched: 0, reserved: 0 }
    }
}

impl Queue {
    /// Checks the jobs of a step. Returns whether all jobs of the connection were touched.
    pub fn touch_all_step(&mut self, client: &mut Client, touch: &mut TouchAll) -> bool {
        if client.held.len() != touch.reserved {
            *touch = TouchAll { reserved: client.held.len(), ..TouchAll::new(touch.at) };
        }
        for _ in 0..self.limits.jobs_per_touch_step {
            self.work.spend(WORK_PER_TOUCH);
            let Some(&entry) = client.held.get(touch.index) else { return true };
            let job = &self.jobs[entry.job];
            let deadline = touch.at + Nanos::from_secs(job.ttr_secs);
            let is_flushed = self.is_flushed(job);
            if entry.deadline >= deadline || is_flushed {
                touch.index += 1;
                touch.touched += usize::from(!is_flushed);
            } else {
                self.set_deadline(client, entry.job, deadline);
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::ConnKey;
    use crate::engine::limits::{Limits, Settings};
    use crate::engine::queue::job::{JobParams, State};

    const NOW: Nanos = Nanos::from_secs(100);

    #[test]
    fn all_jobs_are_touched_in_steps_while_some_expire() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
            queue.now = NOW;
            let mut client = queue.connect(ConnKey::from_index(0)).unwrap();
            let tube = queue.tubes.find("default").unwrap();
            for id in 1..=2_000 {
                let params = JobParams { pri: 0, delay_secs: 0, ttr_secs: random.u32(2..50) };
                let body = queue.bodies.add(b"\r\n").unwrap();
                queue.put(tube, id, params, None, body).unwrap();
                client.held.try_reserve_one().unwrap();
                let job = queue.find(id).unwrap();
                queue.reserve_job(&mut client, job).unwrap();
            }
            let at = NOW + Nanos::from_millis(1_900);
            let (mut touch, mut steps) = (TouchAll::new(at), 0);
            queue.now = at;
            while !queue.touch_all_step(&mut client, &mut touch) {
                queue.limits.jobs_per_touch_step = random.usize(1..300);
                queue.now = queue.now + Nanos::from_millis(random.u64(..8));
                // Jobs with the least TTR are lost before they are reached.
                queue.tick();
                if queue.next_due_conn().is_some() {
                    let rest = queue.work.give(random.usize(..9));
                    queue.run_due_client(&mut client);
                    queue.work.end(rest);
                }
                steps += 1;
            }
            queue.check([&client].into_iter(), std::iter::empty());
            assert!(steps > 5, "seed {seed}: {steps} steps");
            let held = queue.jobs.iter().filter(|(_, job)| match job.state {
                State::Reserved { .. } => {
                    let deadline = at + Nanos::from_secs(job.ttr_secs);
                    assert_eq!(queue.due(job), Some(deadline), "seed {seed}, job {}", job.id);
                    true
                }
                State::Ready { .. }
                | State::Delayed(_)
                | State::Buried(_)
                | State::Detached
                | State::Kept(_) => false,
            });
            assert_eq!(touch.touched, held.count(), "seed {seed}");
        }
    }
}
