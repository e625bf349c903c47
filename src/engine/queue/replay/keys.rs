//! Replays the keys of unique jobs.
//!
//! The record of a key belongs to the record directly after it: to the full record of its job, or, if
//! the key is kept, to the delete of its job. Alone it has no effect, unless it is a kept key whose job
//! is gone: compaction has moved it. A key that two jobs have belongs to the second one: the first one is
//! flushed, or the record of its delete is damaged.

use super::ReplayState;
use crate::engine::binlog::disk::FileNumber;
use crate::engine::binlog::key_record::KeyRecord;
use crate::engine::binlog::record::SHORT_LEN;
use crate::engine::binlog::segments::Owner;
use crate::engine::keys::JobKey;
use crate::engine::queue::job::Job;
use crate::engine::queue::unique::NewKey;
use log::warn;
use std::collections::TryReserveError;

/// The length of the record of a key in bytes.
pub(super) const KEY_LEN: u64 = SHORT_LEN as u64;

impl ReplayState<'_> {
    /// Applies the record of a key: notes it for the next record, or keeps the key.
    pub(super) fn apply_key(
        &mut self,
        number: FileNumber,
        record: KeyRecord,
    ) -> Result<(), TryReserveError> {
        self.note_id(record.id);
        if self.queue.unique.use_secret(record.secret) {
            self.forget_all_keys();
        }
        if record.kept_until.is_some() && self.queue.jobs.find(record.id).is_none() {
            return self.keep_key(number, &record);
        }
        self.key_before = Some((number, record));
        Ok(())
    }

    /// Gives the key of `record` to the job of the full record after it, which was just applied. Takes the
    /// key from another owner, and another key from the job.
    pub(super) fn give_key(
        &mut self,
        key: JobKey,
        record: &KeyRecord,
    ) -> Result<(), TryReserveError> {
        let KeyRecord { digest, ttl_secs, .. } = *record;
        self.to_rewrite.remove(&key);
        let own = self.queue.jobs[key].log.unique().map(|_| Owner::Job(key));
        let owner = self.queue.find_owner(digest);
        if owner.is_some() && owner == own {
            return Ok(());
        }
        for other in [owner, own].into_iter().flatten() {
            self.forget_key(other);
        }
        self.queue.unique.try_reserve_one()?;
        let log = self.queue.unique.log_of(self.queue.jobs[key].log);
        let unique = self.queue.unique.add_of_job(NewKey { digest, ttl_secs }, key, log);
        self.queue.jobs[key].log = unique.into();
        self.segments.set_keeping(log, ttl_secs > 0);
        let len = u64::from(self.segments.entry(log).live_bytes()) + KEY_LEN;
        self.segments.set_len(log, len);
        Ok(())
    }

    /// Removes the entry and the key of a job that was removed from under `key`.
    pub(super) fn remove_job(&mut self, key: JobKey, job: &Job) {
        let log = self.queue.unique.log_of(job.log);
        if let Some(unique) = job.log.unique() {
            self.queue.unique.remove(unique, key);
        }
        self.segments.remove_job(log);
    }

    /// Keeps the key of a deleted job, if the record is that of a kept key, and no job has the key.
    pub(super) fn keep_key(
        &mut self,
        number: FileNumber,
        record: &KeyRecord,
    ) -> Result<(), TryReserveError> {
        let KeyRecord { id, digest, ttl_secs, kept_until, .. } = *record;
        let Some(until) = kept_until else { return Ok(()) };
        match self.queue.find_owner(digest) {
            Some(Owner::Job(_)) => return Ok(()),
            Some(kept) => self.forget_key(kept),
            None => {}
        }
        self.queue.unique.try_reserve_one()?;
        self.queue.unique.try_reserve_kept()?;
        self.segments.try_reserve_one()?;
        let new = NewKey { digest, ttl_secs };
        let segments = &mut self.segments;
        self.queue
            .unique
            .add_kept(new, id, until, |kept| segments.add_kept_key(kept, number, KEY_LEN));
        Ok(())
    }

    fn forget_all_keys(&mut self) {
        let mut count = 0;
        while let Some(digest) = self.queue.unique.any_digest() {
            let owner = self.queue.find_owner(digest).expect("each key has an owner");
            self.forget_key(owner);
            count += 1;
        }
        warn!("{count} keys of jobs have another secret than newer ones: forgetting them");
    }

    /// Forgets a key. If its owner is a job, the job stays.
    fn forget_key(&mut self, owner: Owner) {
        match owner {
            Owner::Job(key) => {
                let job = &mut self.queue.jobs[key];
                let log = self.queue.unique.log_of(job.log);
                if let Some(unique) = job.log.unique() {
                    self.queue.unique.remove(unique, key);
                }
                job.log = log.into();
                self.segments.set_keeping(log, false);
                let len = u64::from(self.segments.entry(log).live_bytes()) - KEY_LEN;
                self.segments.set_len(log, len);
            }
            Owner::KeptKey(kept) => {
                let log = self.queue.unique.remove_kept(kept);
                self.segments.supersede(log);
                self.segments.remove_job(log);
            }
        }
    }
}
