//! Unique jobs: while a tube has a job with some key, a put with this key inserts no other job.
//!
//! The index has a digest of each key and of the name of its tube, not the key itself
//! ([`digest`](crate::engine::digest)). So the tube of a kept key may be gone. A key is in force from the
//! put until its job is deleted or flushed, and then for its TTL, if it has one: for this time it is
//! kept. While it is in force, the same job is the reply to further puts.
//!
//! ```text
//!   put                 delete, flush                the TTL has passed
//!   ---> job with a key --------------> key is kept -------------------> gone
//!        `KeyOfJob`                     `State::Kept`
//! ```
//!
//! A flush decides at one moment, but frees the jobs later. Until then the index has a flushed job next
//! to a new job with the same key. A search skips keys that are not in force.
//!
//! A key takes 36 bytes, of which the digest is 16. A job whose key is kept is only deleted for clients: its body and
//! its counts are freed, its record of 72 bytes stays. Some of those whose time has passed are forgotten in each
//! tick: a flush can end the time of a million keys at one moment. A job without a key takes nothing.

use super::Queue;
use super::groups::Groups;
use super::job::Job;
use super::ordered::{KeptUntil, Ordered};
use crate::engine::binlog::record::{Decision, JobState, KeyRecord};
use crate::engine::collections::chains::{HashSlab, Hashed};
use crate::engine::digest::{Con, Digest, Secret};
use crate::engine::headroom::NoMemory;
use crate::engine::keys::{JobKey, MemberKey, UniqueKey};
use crate::engine::time::{ClockOffset, Nanos};
use std::cell::Cell;
use std::collections::BTreeSet;

/// The keys of jobs.
#[derive(Default)]
pub struct UniqueKeys {
    /// The keys of jobs that are not freed.
    of_jobs: HashSlab<UniqueKey, KeyOfJob>,
    /// The deleted jobs whose keys are kept.
    pub(super) kept: Ordered<KeptUntil>,
    /// The groups of jobs of which only some may be reserved.
    pub groups: Groups,
    /// Random, or that of the records that were replayed.
    pub(super) secret: Secret,
    /// The number of puts that inserted no job, because their key was in force.
    pub hits: u64,
    /// How many of `of_jobs` are of jobs with a group alone.
    without_key: usize,
}

/// The key of a job that is not freed.
pub struct KeyOfJob {
    digest: Digest,
    job: JobKey,
    /// For how many seconds the key is kept after the delete of its job.
    ttl_secs: u32,
    /// Its group, if it has one. A job with a group alone has [`Digest::none`].
    member: MemberKey,
    /// The next key in its chain.
    next: Cell<u32>,
}

/// The key of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewKey {
    pub digest: Digest,
    /// For how many seconds the key is kept after the delete of its job.
    pub ttl_secs: u32,
    /// The group, and the limit of this job.
    pub con: Option<Con>,
}

/// The job whose key is that of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    pub id: u64,
    pub state: JobState,
}

impl Queue {
    /// Returns the job that has this key in its tube, or had it and whose key is kept.
    pub fn find_unique(&self, digest: Digest) -> Option<Hit> {
        if digest.is_none() {
            return None;
        }
        let is_hit = |it: &KeyOfJob| it.digest == digest && self.hit(it).is_some();
        let (_, key) = self.unique.of_jobs.find_by(digest.hash(), is_hit)?;
        self.hit(key)
    }

    /// Returns the job of a key that is in force.
    fn hit(&self, key: &KeyOfJob) -> Option<Hit> {
        let job = &self.jobs[key.job];
        let until = if job.is_kept() {
            job.due
        } else if !self.is_flushed(job) {
            return Some(Hit { id: job.id, state: job.state.shown() });
        } else if key.ttl_secs == 0 {
            // Looking up the moment takes a time that grows with the number of flushes.
            return None;
        } else {
            self.flushed_at(job) + Nanos::from_secs(key.ttl_secs)
        };
        (until > self.now).then_some(Hit { id: job.id, state: JobState::Deleted })
    }

    /// Returns the job that has a key, in force or not.
    pub(super) fn find_owner(&self, digest: Digest) -> Option<JobKey> {
        let is_owned = |it: &KeyOfJob| it.digest == digest && !digest.is_none();
        Some(self.unique.of_jobs.find_by(digest.hash(), is_owned)?.1.job)
    }

    /// Gives a key to a new job, after [`UniqueKeys::try_reserve_one`]. The key must not be in force, and
    /// [`Queue::forget_expired`] must have been called for it.
    pub(super) fn add_unique(&mut self, job: JobKey, new: NewKey) {
        let NewKey { digest, ttl_secs, con } = new;
        let keys = &mut self.unique;
        keys.without_key += usize::from(digest.is_none());
        let member = con.map_or(MemberKey::NONE, |con| keys.groups.join(con, job));
        let key = KeyOfJob { digest, job, ttl_secs, member, next: Cell::default() };
        self.jobs[job].key = keys.of_jobs.insert(key);
    }

    /// Forgets the kept key with this digest, if there is one. It must not be in force any more.
    pub(super) fn forget_expired(&mut self, digest: Digest) {
        let is_kept = |it: &KeyOfJob| it.digest == digest && self.jobs[it.job].is_kept();
        let expired = self.unique.of_jobs.find_by(digest.hash(), is_kept);
        if let Some(job) = expired.map(|(_, key)| key.job) {
            self.forget_kept(job);
        }
    }

    /// Ends the key of a job that is deleted now, or that this flush has deleted. Returns until when it is kept; `None`
    /// if it is gone. Until now it was in force for its TTL, so no other job has it.
    pub(super) fn end_key(&mut self, job: JobKey, flushed_by: Option<Decision>) -> Option<Nanos> {
        let ended_at = flushed_by.map_or(self.now, |flush| flush.decided_at);
        let ttl_secs = self.unique.ttl_secs(&self.jobs[job]).unwrap_or(0);
        let until = ended_at + Nanos::from_secs(ttl_secs);
        // Without space it is not kept; a delete has reserved it.
        let is_kept = until > self.now && self.reserve_delete(job).is_ok();
        if !is_kept {
            self.drop_key(job);
        }
        is_kept.then_some(until)
    }

    /// Deletes a detached job but for its key, which is kept until this moment. Returns the rest.
    pub(super) fn keep_key(&mut self, key: JobKey, until: Nanos) -> Job {
        let job = self.jobs[key].keep_key(until);
        self.unique.leave_group(job.key);
        self.unique.kept.insert(key, &mut self.jobs);
        job
    }

    /// Ends the key of a job, if it has one, which leaves its group.
    pub(super) fn drop_key(&mut self, job: JobKey) {
        if let Some(key) = self.jobs[job].unique() {
            self.jobs[job].key = UniqueKey::NONE;
            self.unique.remove(key);
        }
    }

    /// Removes a deleted job whose key was kept.
    fn forget_kept(&mut self, job: JobKey) {
        self.unique.kept.remove(job, &mut self.jobs);
        self.drop_key(job);
        self.jobs.remove(job);
        self.binlog.iter_mut().for_each(|binlog| binlog.forget(job));
    }

    /// Forgets kept keys whose time has passed, the first one first.
    pub(super) fn forget_ended(&mut self) {
        self.work.begin_due();
        while self.work.is_left()
            && self.next_key_end() <= self.now
            && let Some(job) = self.unique.kept.first(&self.jobs)
        {
            let mapped_before = self.mapped_bytes();
            self.forget_kept(job);
            self.spend_for_freed(mapped_before);
        }
    }

    /// Returns when the time of the next kept key has passed.
    pub(super) fn next_key_end(&self) -> Nanos {
        // Each iteration asks, and most servers have none.
        if self.unique.kept.len() == 0 {
            return Nanos::NEVER;
        }
        self.unique.kept.first(&self.jobs).map_or(Nanos::NEVER, |job| self.jobs[job].due)
    }

    // ---- Checking ----

    /// Checks that each key is found, that each has at most one owner that is not flushed, and that keys and
    /// their jobs refer to each other.
    pub(super) fn check_unique(&self) {
        let UniqueKeys { of_jobs, kept, .. } = &self.unique;
        of_jobs.check(format_args!("the keys of jobs"));
        let mut digests = BTreeSet::new();
        for (key, KeyOfJob { job, digest, .. }) in of_jobs.iter() {
            let job = &self.jobs[*job];
            assert_eq!(job.unique(), Some(key), "the key of job {}, and its own", job.id);
            let is_new = self.is_flushed(job) || digest.is_none() || digests.insert(digest.0);
            assert!(is_new, "job {} and another owner have the same key", job.id);
        }
        let with_key = self.jobs.iter().filter(|(_, job)| job.unique().is_some());
        assert_eq!(of_jobs.len(), with_key.count(), "keys of jobs, and jobs with keys");
        kept.check(&self.jobs, format_args!("jobs whose keys are kept"), |job| {
            assert!(self.jobs[job].is_kept(), "{job:?} is kept");
        });
        let counted = self.jobs.iter().filter(|(_, job)| job.is_kept()).count();
        assert_eq!(kept.len(), counted, "jobs whose keys are kept");
    }
}

impl UniqueKeys {
    /// The most memory that one more key of a job takes, in bytes.
    pub const MOST_GROWTH_OF_A_KEY: u64 =
        HashSlab::<UniqueKey, KeyOfJob>::MOST_GROWTH + Groups::MOST_GROWTH;

    /// Returns the keys of a put into this tube, whose job will have this id: that of a unique job with its
    /// TTL, and that of a group with its limit.
    pub fn new_key(
        &self,
        tube: &str,
        unique: Option<(&[u8], u32)>,
        con: Option<(&[u8], u32)>,
        id: u64,
    ) -> NewKey {
        let (digest, ttl_secs) = match unique {
            Some((key, ttl_secs)) => (self.secret.digest(tube, key), ttl_secs),
            None => (Digest::none(id), 0),
        };
        let con = con.map(|(key, limit)| Con { group: self.secret.hash(key), limit });
        NewKey { digest, ttl_secs, con }
    }

    /// Returns the number of keys of jobs, and that of kept keys.
    pub fn counts(&self) -> (usize, usize) {
        (self.of_jobs.len() - self.without_key - self.kept.len(), self.kept.len())
    }

    /// Returns the memory of all keys, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.of_jobs.taken_bytes() + self.groups.taken_bytes()
    }

    /// Returns the memory of all keys without their chains, in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.of_jobs.page_bytes()
    }

    /// Ensures that one more job can have a key without allocating.
    pub fn try_reserve_one(&mut self, con: Option<Con>) -> Result<(), NoMemory> {
        self.of_jobs.try_reserve_one()?;
        con.map_or(Ok(()), |_| self.groups.try_reserve_one())
    }

    /// Returns for how many seconds the key of a job is kept after its delete, if it is kept.
    pub fn ttl_secs(&self, job: &Job) -> Option<u32> {
        Some(self.of_jobs[job.unique()?].ttl_secs).filter(|&secs| secs > 0)
    }

    /// Returns the record of the key of a job, if it has one.
    pub fn record_of(&self, job: &Job, clock_offset: ClockOffset) -> Option<KeyRecord> {
        let KeyOfJob { digest, ttl_secs, member, .. } = self.of_jobs[job.unique()?];
        let (id, secret) = (job.id, self.secret);
        let con = member.in_group().map(|member| self.groups.members[member].con);
        let kept_until = job.is_kept().then(|| job.due.to_wall_clock(clock_offset));
        Some(KeyRecord { id, digest, secret, ttl_secs, kept_until, con })
    }

    fn remove(&mut self, key: UniqueKey) {
        self.leave_group(key);
        self.without_key -= usize::from(self.of_jobs.remove(key).digest.is_none());
    }

    /// Removes the job of a key from its group, if it has one.
    fn leave_group(&mut self, key: UniqueKey) {
        let member = std::mem::replace(&mut self.of_jobs[key].member, MemberKey::NONE);
        member.in_group().into_iter().for_each(|member| self.groups.leave(member));
    }

    /// Returns the key of a job in its group, if it has one.
    pub(super) fn member_of(&self, key: UniqueKey) -> Option<MemberKey> {
        self.of_jobs[key].member.in_group()
    }
}

impl Hashed for KeyOfJob {
    fn hash(&self) -> u32 {
        self.digest.hash()
    }

    fn next(&self) -> &Cell<u32> {
        &self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::binlog::record::FlushKind;
    use crate::engine::keys::ConnKey;
    use crate::engine::limits::{Limits, Settings};
    use crate::engine::queue::client::Client;
    use crate::engine::queue::job::JobParams;
    use std::collections::BTreeMap;

    const NOW: Nanos = Nanos::from_secs(100);

    fn secs(secs: u32) -> Nanos {
        NOW + Nanos::from_secs(secs)
    }

    /// Puts a job as the server does. Returns the job that has the key.
    fn put(queue: &mut Queue, id: u64, key: &str, ttl_secs: u32, now: Nanos) -> Option<Hit> {
        let unique = Some((key.as_bytes(), ttl_secs));
        let new = queue.unique.new_key("a", unique, None, 0);
        queue.now = now;
        let hit = queue.find_unique(new.digest);
        if hit.is_none() {
            let tube = queue.find_or_create_tube("a").unwrap();
            let params = JobParams { pri: 0, delay_secs: 0, ttr_secs: 60 };
            let body = queue.bodies.add(b"body\r\n").unwrap();
            queue.put(tube, id, params, Some(&new), body).unwrap();
        }
        hit
    }

    fn connect(queue: &mut Queue) -> Client {
        queue.connect(ConnKey::from_index(0)).unwrap()
    }

    fn check(queue: &Queue, client: &Client) {
        queue.check(std::iter::once(client), std::iter::empty());
    }

    #[test]
    fn keys_agree_with_a_map_under_random_steps() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
            let mut client = connect(&mut queue);
            // The job of each key, and until when it is kept once the job is deleted.
            let mut model: BTreeMap<String, (u64, u32, Option<Nanos>)> = BTreeMap::new();
            let mut now = NOW;
            for id in 1..1_000 {
                now = now + Nanos::from_millis(random.u64(..500));
                queue.now = now;
                queue.tick();
                check(&queue, &client);
                model.retain(|_, (_, _, until)| until.is_none_or(|until| until > now));
                if random.bool() {
                    let key = format!("key-{}", random.u8(..40));
                    let ttl = [0, 0, 1, 5][random.usize(..4)];
                    let hit = put(&mut queue, id, &key, ttl, now);
                    let expected = model.get(&key).map(|(id, _, until)| {
                        let state = until.map_or(JobState::Ready, |_| JobState::Deleted);
                        Hit { id: *id, state }
                    });
                    assert_eq!(hit, expected, "seed {seed}, put {id}");
                    model.entry(key).or_insert((id, ttl, None));
                } else {
                    let there = model.iter_mut().filter(|(_, (_, _, until))| until.is_none());
                    let Some((_, (id, ttl, until))) = random.choice(there.collect::<Vec<_>>())
                    else {
                        continue;
                    };
                    let job = queue.find(*id).unwrap();
                    assert_eq!(queue.delete(&mut client, job), Ok(()));
                    *until = Some(now + Nanos::from_secs(*ttl));
                }
            }
            let (jobs, kept) = queue.unique.counts();
            assert!(jobs + kept <= 40 && queue.jobs.len() == jobs + kept, "seed {seed}");
        }
    }

    /// More jobs than a flush frees at once.
    const MANY: u64 = 5_000;

    #[test]
    fn a_flush_ends_keys_at_once_and_keeps_those_with_a_ttl() {
        let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
        let mut client = connect(&mut queue);
        for id in 1..=MANY {
            let ttl = match id {
                MANY => 2,
                _ if id % 2 == 0 => 10,
                _ => 0,
            };
            assert_eq!(put(&mut queue, id, &id.to_string(), ttl, NOW), None);
            if id > 200 {
                continue;
            }
            client.held.try_reserve_one().unwrap();
            let job = queue.find(id).unwrap();
            queue.reserve_job(&mut client, job).unwrap();
            if id > 100 {
                assert_eq!(queue.bury(&mut client, job, 0), Ok(()));
            }
        }
        let tube = queue.tubes.find("a").unwrap();
        queue.now = secs(1);
        assert_eq!(queue.flush(client.key, tube, FlushKind::Buried), Ok(Some(100)));
        let tube = queue.tubes.find("a").unwrap();
        queue.now = secs(5);
        assert_eq!(queue.flush(client.key, tube, FlushKind::All), Ok(None));
        // Most jobs are not freed yet.
        let deleted = |id| Some(Hit { id, state: JobState::Deleted });
        for id in [2, 102, MANY - 2, MANY] {
            assert_eq!(put(&mut queue, MANY + id, &id.to_string(), 0, secs(6)), deleted(id));
        }
        for id in [1, 101, MANY - 3, MANY - 1] {
            assert_eq!(put(&mut queue, MANY + id, &id.to_string(), 0, secs(6)), None);
        }
        // The key of a job that is not freed has passed, and another job takes it.
        assert_eq!(put(&mut queue, 3 * MANY, &MANY.to_string(), 10, secs(8)), None);
        check(&queue, &client);
        queue.now = secs(14);
        let complete = Some((client.key, MANY - 100));
        let step = queue.flush_step(|queue| _ = queue.free_all_held(&mut client, &mut 0));
        assert_eq!(step, complete);
        check(&queue, &client);
        let ready = |id| Some(Hit { id, state: JobState::Ready });
        assert_eq!(put(&mut queue, 0, &MANY.to_string(), 0, secs(14)), ready(3 * MANY));
        assert_eq!(put(&mut queue, 0, "1", 0, secs(14)), ready(MANY + 1));
        assert_eq!(put(&mut queue, 0, "2", 0, secs(14)), deleted(2));
        // The flush of the buried ones was earlier.
        assert_eq!(put(&mut queue, 4 * MANY, "102", 0, secs(14)), None);
        queue.now = secs(16);
        while queue.next_due() <= secs(16) {
            queue.tick();
        }
        check(&queue, &client);
        assert_eq!(queue.unique.counts(), (6, 0));
    }

    #[test]
    fn a_key_takes_at_most_40_bytes() {
        assert_eq!(size_of::<Option<KeyOfJob>>(), 32);
        let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
        for id in 1..=10_000 {
            assert_eq!(put(&mut queue, id, &id.to_string(), 0, NOW), None);
        }
        let bytes = queue.unique.taken_bytes();
        assert!(bytes <= 40 * 10_000, "{bytes} bytes for 10,000 keys");
    }
}
