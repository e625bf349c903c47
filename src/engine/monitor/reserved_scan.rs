//! Finds the reserved jobs of a tube that time out first.
//!
//! Reserved jobs are in the heaps of their connections, and no tube has a list of them. So the heaps
//! of all connections are scanned, some entries in each iteration of the loop. A job that is reserved
//! between two slices may be missed.

use super::http_conn::View;
use crate::engine::keys::TubeKey;
use crate::engine::time::Nanos;

/// A scan of the heaps of all connections.
#[derive(Debug, Default)]
pub struct ReservedScan {
    /// The number of the connection that is scanned.
    conn: usize,
    /// The number of its entries to scan, from the last index to the first; `None` if its scan has not
    /// begun. When the first entry is removed, the last one moves forward: that one was scanned
    /// before.
    left: Option<usize>,
    /// The number of jobs of the tube that were found.
    found: u32,
    /// The deadlines and ids of the jobs that time out first, in order.
    soonest: Vec<(Nanos, u64)>,
}

impl ReservedScan {
    /// Scans the next entries, and keeps the `count` jobs that time out first. Returns whether the scan
    /// is complete.
    pub fn advance(&mut self, view: &View<'_>, tube: TubeKey, count: usize) -> bool {
        let queue = view.queue;
        let mut budget = queue.limits.reserved_per_page_slice;
        while self.conn < view.conns.numbers_end() && self.found < queue.tubes[tube].jobs.reserved {
            if budget == 0 {
                return false;
            }
            budget -= 1;
            let mut start = 0;
            if let Some(conn) = view.conns.conn(self.conn) {
                let reserved = &conn.client.held;
                let left = self.left.unwrap_or(reserved.len()).min(reserved.len());
                start = left - left.min(budget);
                budget -= left - start;
                for entry in &reserved[start..left] {
                    let job = &queue.jobs[entry.job];
                    if job.tube == tube && !queue.is_flushed(job) {
                        self.add((entry.deadline, job.id), count);
                    }
                }
            }
            (self.conn, self.left) = match start {
                0 => (self.conn + 1, None),
                _ => (self.conn, Some(start)),
            };
        }
        true
    }

    fn add(&mut self, job: (Nanos, u64), count: usize) {
        self.found += 1;
        let index = self.soonest.partition_point(|other| *other < job);
        if index < count && self.soonest.get(index) != Some(&job) {
            self.soonest.insert(index, job);
            self.soonest.truncate(count);
        }
    }

    /// Returns the ids of the jobs, in the order of their deadlines.
    pub fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.soonest.iter().map(|&(_, id)| id)
    }
}
