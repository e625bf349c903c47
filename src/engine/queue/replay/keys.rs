//! Replays the keys of unique jobs.
//!
//! A key that two jobs have belongs to the second one: the first one is flushed, or the record of its
//! delete is damaged.

use super::ReplayState;
use crate::engine::binlog::disk::FileNumber;
use crate::engine::binlog::files::SHORT;
use crate::engine::binlog::record::KeyRecord;
use crate::engine::headroom::NoMemory;
use crate::engine::keys::JobKey;
use crate::engine::queue::job::Job;
use crate::engine::queue::unique::NewKey;

impl ReplayState<'_> {
    /// Gives the key of `record` to the job of the full record after it, which was just applied. Takes the
    /// key from another owner, and another key from the job.
    pub(super) fn give_key(&mut self, key: JobKey, record: &KeyRecord) -> Result<(), NoMemory> {
        let KeyRecord { digest, ttl_secs, con, .. } = *record;
        self.last_states.get_mut(key).into_iter().for_each(|last| last.must_rewrite = false);
        let own = self.queue.jobs[key].unique().map(|_| key);
        let owner = self.queue.find_owner(digest);
        if own.is_some() && (owner == own || digest.is_none()) {
            return Ok(());
        }
        for other in [owner, own].into_iter().flatten() {
            self.forget_key(other);
        }
        self.queue.unique.try_reserve_one(con)?;
        self.queue.add_unique(key, NewKey { digest, ttl_secs, con });
        let len = self.files.entry(key).live_bytes() + SHORT;
        self.files.set_key(key, len, ttl_secs > 0);
        Ok(())
    }

    /// Applies the record of a key: keeps the key if it is a kept one, its job is gone, and no job has the key.
    pub(super) fn apply_key(
        &mut self,
        number: FileNumber,
        record: &KeyRecord,
    ) -> Result<(), NoMemory> {
        let KeyRecord { id, digest, ttl_secs, kept_until, .. } = *record;
        // The records of a binlog have one secret.
        self.queue.unique.secret = record.secret;
        let is_gone = self.queue.jobs.find(id).is_none();
        let Some(until) = kept_until.filter(|_| is_gone) else { return Ok(()) };
        if let Some(owner) = self.queue.find_owner(digest) {
            if !self.queue.jobs[owner].is_kept() {
                return Ok(());
            }
            self.forget_key(owner);
        }
        self.queue.unique.try_reserve_one(None)?;
        self.queue.jobs.try_reserve_one()?;
        self.files.try_reserve(self.queue.jobs.next_key())?;
        let kept = self.queue.insert(Job::kept(id, until));
        self.queue.add_unique(kept, NewKey { digest, ttl_secs, con: None });
        self.files.add(kept, (number, 0), SHORT, false);
        Ok(())
    }

    /// Forgets the key of a job. The job stays, unless it was deleted.
    fn forget_key(&mut self, owner: JobKey) {
        self.queue.drop_key(owner);
        if self.queue.jobs[owner].is_kept() {
            self.queue.jobs.remove(owner);
            self.files.supersede(owner);
            self.files.remove(owner);
        } else {
            let len = self.files.entry(owner).live_bytes() - SHORT;
            self.files.set_key(owner, len, false);
        }
    }
}
