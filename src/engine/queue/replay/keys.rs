//! Replays the keys of unique jobs.
//!
//! A key that two jobs have belongs to the second one: the first one is flushed, or the record of its
//! delete is damaged.

use super::ReplayState;
use crate::engine::binlog::disk::FileNumber;
use crate::engine::binlog::files::SHORT;
use crate::engine::binlog::record::KeyRecord;
use crate::engine::keys::{JobKey, Owner, UniqueKey};
use crate::engine::queue::unique::NewKey;
use std::collections::TryReserveError;

impl ReplayState<'_> {
    /// Gives the key of `record` to the job of the full record after it, which was just applied. Takes the
    /// key from another owner, and another key from the job.
    pub(super) fn give_key(
        &mut self,
        key: JobKey,
        record: &KeyRecord,
    ) -> Result<(), TryReserveError> {
        let KeyRecord { digest, ttl_secs, con, .. } = *record;
        self.last_states.get_mut(key).into_iter().for_each(|last| last.must_rewrite = false);
        let own = self.queue.jobs[key].unique().map(|_| Owner::Job(key));
        let owner = self.queue.find_owner(digest);
        if own.is_some() && (owner == own || digest.is_none()) {
            return Ok(());
        }
        for other in [owner, own].into_iter().flatten() {
            self.forget_key(other);
        }
        self.queue.unique.try_reserve_one(con)?;
        self.queue.add_unique(key, NewKey { digest, ttl_secs, con });
        let len = self.files.entry(Owner::Job(key)).live_bytes() + SHORT;
        self.files.set_key(key, len, ttl_secs > 0);
        Ok(())
    }

    /// Applies the record of a key: keeps the key if it is a kept one, its job is gone, and no job has the key.
    pub(super) fn apply_key(
        &mut self,
        number: FileNumber,
        record: &KeyRecord,
    ) -> Result<(), TryReserveError> {
        let KeyRecord { id, digest, ttl_secs, kept_until, .. } = *record;
        // The records of a binlog have one secret.
        self.queue.unique.secret = record.secret;
        let is_gone = self.queue.jobs.find(id).is_none();
        let Some(until) = kept_until.filter(|_| is_gone) else { return Ok(()) };
        match self.queue.find_owner(digest) {
            Some(Owner::Job(_)) => return Ok(()),
            Some(kept) => self.forget_key(kept),
            None => {}
        }
        self.queue.unique.try_reserve_one(None)?;
        let kept = Owner::KeptKey(self.queue.unique.try_reserve_kept()?);
        self.files.try_reserve(kept)?;
        self.queue.unique.add_kept(digest, ttl_secs, id, until);
        self.files.add(kept, (number, 0), SHORT, false);
        Ok(())
    }

    /// Forgets a key. If its owner is a job, the job stays.
    fn forget_key(&mut self, owner: Owner) {
        match owner {
            Owner::Job(key) => {
                let unique = std::mem::replace(&mut self.queue.jobs[key].key, UniqueKey::NONE);
                self.queue.unique.remove(unique);
                let len = self.files.entry(owner).live_bytes() - SHORT;
                self.files.set_key(key, len, false);
            }
            Owner::KeptKey(kept) => {
                self.queue.unique.remove_kept(kept);
                self.files.supersede(owner);
                self.files.remove(owner);
            }
        }
    }
}
