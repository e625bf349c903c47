//! The key of a job by its id.
//!
//! Ids are given out one after the other, so they are kept in blocks of eight consecutive ids, and
//! the block that was found last is looked at first:
//!
//! ```text
//! id 42 = block 5, place 2        block 5   | 40 | 41 | 42 | .. | 47 |  -> keys of jobs
//! ```
//!
//! A hash index over the jobs themselves would be simpler. Measured with a million jobs, pipelined,
//! server CPU: a put costs 1.0 us with it and 0.6 us with blocks, a delete in order of ids 1.4 and 1.0
//! us, since each split of a bucket touches another job; in random order a delete costs 1.3 and 1.5 us.

use super::hash_index::{HashSlab, Keyed, mix};
use crate::engine::keys::BlockKey;
use crate::engine::keys::NIL;
use std::cell::Cell;
use std::collections::TryReserveError;

/// The numbers of jobs, found by id.
#[derive(Debug, Default)]
pub struct JobIndex {
    blocks: HashSlab<BlockKey, IdBlock>,
    /// The block that was inserted into last, if it is still there: the next id is mostly in it.
    inserted: Option<(u64, BlockKey)>,
    /// The block that was found last, if it is still there. Most jobs are looked up to be deleted, one
    /// after the other in the order of their ids.
    found: Cell<Option<(u64, BlockKey)>>,
}

#[derive(Debug)]
struct IdBlock {
    /// The ids without their last bits.
    number: u64,
    /// The jobs; [`NIL`] where there is none.
    jobs: [u32; BLOCK_LEN],
    next_in_bucket: u32,
    used: u32,
}

const BLOCK_LEN: usize = 8;

impl JobIndex {
    /// The number of the job with this id.
    pub fn find(&self, id: u64) -> Option<u32> {
        let (number, place) = split(id);
        let job = self.blocks[self.block(number)?].jobs[place];
        (job != NIL).then_some(job)
    }

    /// How many bytes of memory all of them take.
    pub fn taken_bytes(&self) -> u64 {
        self.blocks.taken_bytes()
    }

    /// How many one id takes, if it is alone in its block.
    pub const MOST_BYTES_OF_AN_ID: u64 = size_of::<IdBlock>() as u64;

    /// Makes sure that the next [`JobIndex::insert`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.blocks.try_reserve_one()
    }

    /// The job with this id, which no other has, has this number.
    ///
    /// # Panics
    /// There was no successful [`JobIndex::try_reserve_one`] before.
    pub fn insert(&mut self, id: u64, job: u32) {
        let (number, place) = split(id);
        let key = self.block(number).unwrap_or_else(|| {
            let jobs = [NIL; BLOCK_LEN];
            self.blocks.insert(IdBlock { number, jobs, next_in_bucket: NIL, used: 0 })
        });
        self.inserted = Some((number, key));
        let block = &mut self.blocks[key];
        block.jobs[place] = job;
        block.used += 1;
    }

    /// There is no job with this id any more.
    ///
    /// # Panics
    /// There was none.
    pub fn remove(&mut self, id: u64) {
        let (number, place) = split(id);
        let key = self.block(number).expect("the block of a job is there");
        let block = &mut self.blocks[key];
        block.jobs[place] = NIL;
        block.used -= 1;
        if block.used == 0 {
            self.blocks.remove(key);
            self.inserted.take_if(|(inserted, _)| *inserted == number);
            self.found.take();
        }
    }

    /// How many jobs there are.
    pub fn count(&self) -> usize {
        self.blocks.iter().map(|(_, block)| block.used as usize).sum()
    }

    /// Every block is found, and none is kept without a job.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(&self) {
        self.blocks.check(format_args!("the blocks of ids"));
        // First, since each block that is found below is noted.
        for (number, key) in self.inserted.into_iter().chain(self.found.get()) {
            let block = self.blocks.get(key).map(|block| block.number);
            assert_eq!(block, Some(number), "a block of ids, and what is noted of it");
        }
        for (key, IdBlock { number, jobs, used, .. }) in self.blocks.iter() {
            let counted = jobs.iter().filter(|&&job| job != NIL).count();
            assert_eq!(*used as usize, counted, "jobs of block {number}, noted and counted");
            assert!(counted > 0, "block {number} of ids is kept without a job");
            let found = self.block(*number);
            assert_eq!(found, Some(key), "what is found for block {number}, and where it is");
        }
    }

    fn block(&self, number: u64) -> Option<BlockKey> {
        let noted = |&(of, _): &(u64, BlockKey)| of == number;
        if let Some((_, key)) = self.inserted.filter(noted).or(self.found.get().filter(noted)) {
            return Some(key);
        }
        let key = self.blocks.find_by(mix(number), |block| block.number == number)?;
        self.found.set(Some((number, key)));
        Some(key)
    }
}

impl Keyed for IdBlock {
    fn hash(&self) -> u64 {
        mix(self.number)
    }

    fn next_in_bucket(&self) -> u32 {
        self.next_in_bucket
    }

    fn next_in_bucket_mut(&mut self) -> &mut u32 {
        &mut self.next_in_bucket
    }
}

/// The number of the block, and the place in it.
fn split(id: u64) -> (u64, usize) {
    let place = id % BLOCK_LEN as u64;
    (id / BLOCK_LEN as u64, usize::try_from(place).expect("a block is short"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn behaves_as_a_map_under_random_steps() {
        let mut random = fastrand::Rng::with_seed(6);
        let mut ids = JobIndex::default();
        let mut model: BTreeMap<u64, u32> = BTreeMap::new();
        for job in 0..50_000 {
            // Most in a row, and some at the far end.
            let id = u64::from(random.u32(..2_000)) | u64::from(random.u8(..9) == 0) << 63;
            if model.remove(&id).is_some() {
                ids.remove(id);
            } else {
                ids.try_reserve_one().expect("the test needs little memory");
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
