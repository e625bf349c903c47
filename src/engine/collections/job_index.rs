//! A map from the id of a job to its key.
//!
//! Ids are consecutive, so the map keeps blocks of eight consecutive ids in a hash index. It
//! remembers the block of the last insertion and the block that was found last:
//!
//! ```text
//! id 42 = block 5, offset 2       block 5   | 40 | 41 | 42 | .. | 47 |  -> keys of jobs
//! ```
//!
//! With ten million consecutive ids a job takes 7.8 bytes here. It takes 28 bytes in a `HashMap`,
//! whose largest rebuild stalls the loop for 0.3 s.
//!
//! A hash index over the jobs themselves would be simpler, but takes 14 to 15 bytes for a job, and each
//! put would read another part of the index.

use super::hash_index::{HashSlab, Hashed, low_half, mix};
use crate::engine::keys::BlockKey;
use crate::engine::keys::NIL;
use std::cell::Cell;
use std::collections::TryReserveError;

/// The numbers of the keys of jobs, by job id.
#[derive(Debug, Default)]
pub struct JobIndex {
    blocks: HashSlab<BlockKey, IdBlock>,
    /// The block of the last insertion. It stays when it has no job any more, since the next id is
    /// usually in it.
    last_inserted: Option<(u64, BlockKey)>,
    /// The block that was found last, unless it was removed. Most jobs are looked up to be deleted,
    /// in the order of their ids.
    last_found: Cell<Option<(u64, BlockKey)>>,
}

#[derive(Debug)]
struct IdBlock {
    /// The ids, divided by [`BLOCK_LEN`].
    number: u64,
    /// The number of the key for each id, or [`NIL`].
    jobs: [u32; BLOCK_LEN],
}

const BLOCK_LEN: usize = 8;

impl JobIndex {
    /// Returns the number of the key of the job with this id.
    pub fn find(&self, id: u64) -> Option<u32> {
        let (number, offset) = block_and_offset(id);
        let job = self.blocks[self.block(number)?].jobs[offset];
        (job != NIL).then_some(job)
    }

    /// Returns the memory of all blocks without their index, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.blocks.taken_bytes()
    }

    /// The memory of an id that is alone in its block, without the index of the blocks, in bytes.
    pub const MAX_BYTES_PER_ID: u64 = size_of::<Option<IdBlock>>() as u64;

    /// Ensures that the next [`JobIndex::insert`] allocates nothing, if nothing is removed before it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.blocks.try_reserve_one()
    }

    /// Adds the job with this id, which must be new.
    ///
    /// # Panics
    /// [`JobIndex::try_reserve_one`] has not succeeded since the last insertion or removal.
    pub fn insert(&mut self, id: u64, job: u32) {
        let (number, offset) = block_and_offset(id);
        let key = self.block(number).unwrap_or_else(|| {
            let jobs = [NIL; BLOCK_LEN];
            self.blocks.insert(IdBlock { number, jobs })
        });
        self.blocks[key].jobs[offset] = job;
        let before = self.last_inserted.replace((number, key));
        if let Some((other, before)) = before
            && other != number
        {
            self.remove_if_empty(before);
        }
    }

    /// Removes the job with this id, which must be in the map.
    pub fn remove(&mut self, id: u64) {
        let (number, offset) = block_and_offset(id);
        let key = self.block(number).expect("each job has a block");
        let block = &mut self.blocks[key];
        block.jobs[offset] = NIL;
        if self.last_inserted.is_none_or(|(inserted, _)| inserted != number) {
            self.remove_if_empty(key);
        }
    }

    fn remove_if_empty(&mut self, key: BlockKey) {
        if self.blocks[key].is_empty() {
            self.blocks.remove(key);
            self.last_found.take();
        }
    }

    /// Counts the jobs, in a time that grows with their number.
    pub fn count(&self) -> usize {
        self.blocks.iter().map(|(_, block)| block.len()).sum()
    }

    /// Checks that each block is found and has a job.
    ///
    /// # Panics
    /// An invariant is broken.
    pub fn check(&self) {
        self.blocks.check(format_args!("the blocks of ids"));
        // First, since each search below replaces the block that was found last.
        for (number, key) in self.last_inserted.into_iter().chain(self.last_found.get()) {
            let block = self.blocks.get(key).map(|block| block.number);
            assert_eq!(block, Some(number), "number of the remembered block of ids");
        }
        for (key, block) in self.blocks.iter() {
            let number = block.number;
            let is_last = self.last_inserted.is_some_and(|(_, last)| last == key);
            assert!(is_last || !block.is_empty(), "block {number} of ids has no job");
            let found = self.block(number);
            assert_eq!(found, Some(key), "key that is found for block {number}");
        }
    }

    fn block(&self, number: u64) -> Option<BlockKey> {
        let matches = |&(of, _): &(u64, BlockKey)| of == number;
        let last_found = self.last_found.get().filter(matches);
        if let Some((_, key)) = self.last_inserted.filter(matches).or(last_found) {
            return Some(key);
        }
        let key = self.blocks.find_by(low_half(mix(number)), |block| block.number == number)?;
        self.last_found.set(Some((number, key)));
        Some(key)
    }
}

impl IdBlock {
    fn is_empty(&self) -> bool {
        self.jobs == [NIL; BLOCK_LEN]
    }

    /// Returns the number of jobs.
    fn len(&self) -> usize {
        self.jobs.iter().filter(|&&job| job != NIL).count()
    }
}

impl Hashed for IdBlock {
    fn hash(&self) -> u32 {
        low_half(mix(self.number))
    }
}

/// Returns the number of the block of an id, and its offset in the block.
fn block_and_offset(id: u64) -> (u64, usize) {
    let offset = id % BLOCK_LEN as u64;
    (id / BLOCK_LEN as u64, usize::try_from(offset).expect("an offset is below 8"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn random_operations_match_a_btree_map() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut ids = JobIndex::default();
        let mut model: BTreeMap<u64, u32> = BTreeMap::new();
        for job in 0..50_000 {
            // Most ids are close together; one of nine is above 2^63.
            let id = u64::from(random.u32(..2_000)) | u64::from(random.u8(..9) == 0) << 63;
            if model.remove(&id).is_some() {
                ids.remove(id);
            } else {
                ids.try_reserve_one().expect("the test has memory");
                ids.insert(id, job);
                model.insert(id, job);
            }
            let id = u64::from(random.u32(..2_000));
            assert_eq!(ids.find(id), model.get(&id).copied());
            if job % 64 == 0 {
                ids.check();
                assert_eq!(ids.count(), model.len());
            }
        }
        for &id in model.keys() {
            ids.remove(id);
            assert_eq!(ids.find(id), None);
        }
    }
}
