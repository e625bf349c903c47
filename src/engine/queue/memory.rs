//! How much memory jobs take, for `--max-memory` and the metrics.

use super::Queue;
use super::job::Jobs;
use super::ordered::TubeEntry;
use super::unique::UniqueKeys;
use crate::engine::binlog::Binlog;

impl Queue {
    /// Returns the bytes of memory that all jobs take. They include the entries in the binlog, bodies
    /// that are arriving or being sent, keys, and free space between them.
    pub fn job_bytes(&self) -> u64 {
        let entries = self.binlog.as_ref().map_or(0, |binlog| binlog.files.taken_bytes());
        let keys = self.unique.taken_bytes();
        let read_back = self.body_cache.read_bodies.all_granted();
        let jobs = self.jobs.taken_bytes() + self.large_counts.taken_bytes();
        let links = (self.jobs.len() * size_of::<TubeEntry<u32>>()) as u64;
        jobs + links + self.bodies.taken_bytes() + read_back + entries + keys
    }

    /// Returns the bytes of the pages that jobs take without their bodies: a page is unmapped with its
    /// last entry.
    pub(super) fn mapped_bytes(&self) -> u64 {
        let entries = self.binlog.as_ref().map_or(0, |binlog| binlog.files.taken_bytes());
        self.jobs.page_bytes()
            + self.large_counts.taken_bytes()
            + self.unique.page_bytes()
            + entries
    }

    /// Returns at most how many bytes of memory one more job takes. Its body has `full_len` bytes with
    /// the CR LF.
    pub fn bytes_of_a_job(&self, full_len: usize, is_unique: bool) -> u64 {
        let entry = if self.binlog.is_some() { Binlog::BYTES_PER_JOB } else { 0 };
        let key = if is_unique { UniqueKeys::MOST_GROWTH_OF_A_KEY } else { 0 };
        let job = Jobs::MOST_GROWTH + size_of::<TubeEntry<u32>>() as u64;
        job + self.bodies.growth_for(full_len) + entry + key
    }
}
