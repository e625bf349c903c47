//! Unique jobs: while a tube has a job with some key, a put with this key inserts no other job.
//!
//! The index has a digest of each key and of the name of its tube, not the key itself
//! ([`digest`](crate::engine::digest)). So the tube of a kept key may be gone. A key is in force from the
//! put until its job is deleted or flushed, and then for its TTL, if it has one: for this time it is
//! kept. While it is in force, the same job is the reply to further puts.
//!
//! ```text
//!   put                  delete, flush                       the TTL has passed
//!   ---> hash -> KeyOfJob -------------> hash -> Kept ----------------------------> gone
//!                digest, TTL, job                digest, TTL, until, id of the job
//! ```
//!
//! A flush decides at one moment, but frees the jobs later. Until then the index has a flushed job next
//! to a new job with the same key. A search skips keys that are not in force.
//!
//! A key takes 36 bytes, of which the digest is 16. A kept key takes 44, and 20 for its timer. Some of those whose
//! time has passed are forgotten in each tick: a flush can end the time of a million keys at one moment, so their
//! timers are apart from those of tubes and connections. A job without a key takes nothing.

use super::Queue;
use super::groups::Groups;
use super::job::Job;
use crate::engine::binlog::record::{Decision, JobState, KeyRecord, SHORT_LEN};
use crate::engine::collections::chains::{HashSlab, Hashed};
use crate::engine::collections::timers::Timers;
use crate::engine::digest::{Con, Digest, Secret};
use crate::engine::keys::{JobKey, KeptKey, Key, MemberKey, Owner, UniqueKey};
use crate::engine::time::Nanos;
use std::cell::Cell;
use std::collections::{BTreeSet, TryReserveError};
use std::num::NonZero;

/// The keys of jobs, and the kept keys of deleted jobs.
#[derive(Default)]
pub struct UniqueKeys {
    /// The keys of jobs that are not freed.
    of_jobs: HashSlab<UniqueKey, KeyOfJob>,
    kept: HashSlab<KeptKey, Kept>,
    /// When each kept key is forgotten.
    ends: Timers<KeptKey>,
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

/// The key of a deleted job.
struct Kept {
    /// The id of the job. No job has the id 0.
    id: NonZero<u64>,
    until: Nanos,
    digest: Digest,
    ttl_secs: u32,
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
        let UniqueKeys { of_jobs, kept, .. } = &self.unique;
        let is_hit = |it: &KeyOfJob| it.digest == digest && self.hit(it).is_some();
        if let Some((_, key)) = of_jobs.find_by(digest.hash(), is_hit) {
            return self.hit(key);
        }
        let kept = &kept[self.unique.find_kept(digest)?];
        hit_of_deleted(kept.id.get(), kept.until, self.now)
    }

    /// Returns the job of a key that is in force.
    fn hit(&self, key: &KeyOfJob) -> Option<Hit> {
        let job = &self.jobs[key.job];
        if self.is_flushed(job) {
            // Looking up the moment takes a time that grows with the number of flushes.
            if key.ttl_secs == 0 {
                return None;
            }
            let until = self.flushed_at(job) + Nanos::from_secs(key.ttl_secs);
            return hit_of_deleted(job.id, until, self.now);
        }
        let state = job.state.shown();
        Some(Hit { id: job.id, state })
    }

    /// Returns the owner of a key, in force or not.
    pub(super) fn find_owner(&self, digest: Digest) -> Option<Owner> {
        let UniqueKeys { of_jobs, .. } = &self.unique;
        let is_owned = |it: &KeyOfJob| it.digest == digest && !digest.is_none();
        let of_job = of_jobs.find_by(digest.hash(), is_owned);
        let owner = of_job.map(|(_, key)| Owner::Job(key.job));
        owner.or_else(|| self.unique.find_kept(digest).map(Owner::KeptKey))
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
        if let Some(expired) = self.unique.find_kept(digest) {
            self.forget_kept(expired);
        }
    }

    /// Ends the key of a job that was removed. Returns it if it is kept. A flush has deleted the job if
    /// `flushed_by` is not `None`: until now the key was in force for its TTL, so no other job has it.
    pub(super) fn end_unique(
        &mut self,
        job: &Job,
        key: UniqueKey,
        flushed_by: Option<Decision>,
    ) -> Option<KeptKey> {
        let of_job = &self.unique.of_jobs[key];
        let ended_at = flushed_by.map_or(self.now, |flush| flush.decided_at);
        let until = ended_at + Nanos::from_secs(of_job.ttl_secs);
        // Without space or memory it is not kept; a delete has reserved both.
        let is_kept =
            of_job.ttl_secs > 0 && until > self.now && self.reserve_delete(Some(key)).is_ok();
        let KeyOfJob { digest, ttl_secs, .. } = self.unique.remove(key);
        is_kept.then(|| self.unique.add_kept(digest, ttl_secs, job.id, until))
    }

    /// Forgets a kept key.
    pub(super) fn forget_kept(&mut self, key: KeptKey) {
        self.unique.remove_kept(key);
        if let Some(binlog) = &mut self.binlog {
            binlog.forget_key(key);
        }
    }

    /// Forgets kept keys whose time has passed, or the first of many.
    pub(super) fn forget_ended(&mut self) {
        for _ in 0..self.limits.keys_forgotten_per_tick {
            let Some(key) = self.unique.ends.pop_due(self.now) else { return };
            self.forget_kept(key);
        }
    }

    // ---- Checking ----

    /// Checks that each key is found, that each has at most one owner that is not flushed, and that keys and
    /// their jobs refer to each other.
    pub(super) fn check_unique(&self) {
        let UniqueKeys { of_jobs, kept, ends, .. } = &self.unique;
        of_jobs.check(format_args!("the keys of jobs"));
        kept.check(format_args!("the kept keys"));
        let mut digests: BTreeSet<[u32; 4]> = kept.iter().map(|(_, kept)| kept.digest.0).collect();
        assert_eq!(digests.len(), kept.len(), "digests of kept keys, and kept keys");
        for (key, KeyOfJob { job, digest, .. }) in of_jobs.iter() {
            let job = &self.jobs[*job];
            assert_eq!(job.unique(), Some(key), "the key of job {}, and its own", job.id);
            let is_new = self.is_flushed(job) || digest.is_none() || digests.insert(digest.0);
            assert!(is_new, "job {} and another owner have the same key", job.id);
        }
        let with_key = self.jobs.iter().filter(|(_, job)| job.unique().is_some());
        assert_eq!(of_jobs.len(), with_key.count(), "keys of jobs, and jobs with keys");
        ends.check(kept.len(), format_args!("the ends of kept keys"));
        let is_timed = |(key, kept): (KeptKey, &Kept)| ends.at(key) == kept.until;
        assert!(kept.iter().all(is_timed), "a kept key is not forgotten at its end");
        if let Some(binlog) = &self.binlog {
            kept.iter().for_each(|(key, _)| binlog.check_entry(Owner::KeptKey(key), SHORT_LEN));
        }
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
        (self.of_jobs.len() - self.without_key, self.kept.len())
    }

    /// Returns the memory of all keys, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        let groups = self.groups.taken_bytes();
        self.of_jobs.taken_bytes() + self.kept.taken_bytes() + self.ends.taken_bytes() + groups
    }

    /// Returns the memory of all keys without their chains, in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.of_jobs.page_bytes() + self.kept.page_bytes() + self.ends.taken_bytes()
    }

    /// Ensures that one more job can have a key without allocating.
    pub fn try_reserve_one(&mut self, con: Option<Con>) -> Result<(), TryReserveError> {
        self.of_jobs.try_reserve_one()?;
        con.map_or(Ok(()), |_| self.groups.try_reserve_one())
    }

    /// Ensures that the key of a job can be kept without allocating. Returns it.
    pub fn try_reserve_kept(&mut self) -> Result<KeptKey, TryReserveError> {
        self.kept.try_reserve_one()?;
        let key = self.kept.next_key();
        self.ends.try_reserve(key).map(|()| key)
    }

    /// Returns when the time of the next kept key has passed.
    pub fn next_end(&self) -> Nanos {
        self.ends.next_due()
    }

    /// Returns whether the key of a job is kept after the delete of the job.
    pub fn will_keep(&self, key: UniqueKey) -> bool {
        self.of_jobs[key].ttl_secs > 0
    }

    /// Returns the record of the key of a job, if it has one.
    pub fn record_of(&self, job: &Job) -> Option<KeyRecord> {
        let KeyOfJob { digest, ttl_secs, member, .. } = self.of_jobs[job.unique()?];
        let (id, secret) = (job.id, self.secret);
        let con = member.in_group().map(|member| self.groups.members[member].con);
        Some(KeyRecord { id, digest, secret, ttl_secs, kept_until: None, con })
    }

    /// Returns the record of a kept key, with a moment of the engine.
    pub fn record_of_kept(&self, key: KeptKey) -> KeyRecord {
        let Kept { id, until, digest, ttl_secs, .. } = self.kept[key];
        let (id, secret) = (id.get(), self.secret);
        KeyRecord { id, digest, secret, ttl_secs, kept_until: Some(until), con: None }
    }

    /// Removes the key of a job, which leaves its group.
    pub fn remove(&mut self, key: UniqueKey) -> KeyOfJob {
        self.member_of(key).into_iter().for_each(|member| self.groups.leave(member));
        let of_job = self.of_jobs.remove(key);
        self.without_key -= usize::from(of_job.digest.is_none());
        of_job
    }

    /// Returns the key of a job in its group, if it has one.
    pub(super) fn member_of(&self, key: UniqueKey) -> Option<MemberKey> {
        self.of_jobs[key].member.in_group()
    }

    fn find_kept(&self, digest: Digest) -> Option<KeptKey> {
        Some(self.kept.find_by(digest.hash(), |kept| kept.digest == digest)?.0)
    }

    /// Removes a kept key.
    pub(super) fn remove_kept(&mut self, key: KeptKey) {
        self.ends.remove(key);
        self.kept.remove(key);
    }

    // ---- Replay ----

    /// Keeps no key for longer than its TTL from now on.
    pub(super) fn limit_kept(&mut self, now: Nanos) {
        for key in (0..).take(self.kept.numbers_end()).map(KeptKey::from_number) {
            let Some(kept) = self.kept.get_mut(key) else { continue };
            kept.until = kept.until.min(now + Nanos::from_secs(kept.ttl_secs));
            self.ends.set_no_later_than(key, kept.until);
        }
    }

    /// Adds a kept key, after [`UniqueKeys::try_reserve_kept`].
    pub(super) fn add_kept(
        &mut self,
        digest: Digest,
        ttl_secs: u32,
        id: u64,
        until: Nanos,
    ) -> KeptKey {
        let id = NonZero::new(id).expect("no job has the id 0");
        let key = self.kept.insert(Kept { id, until, digest, ttl_secs, next: Cell::default() });
        self.ends.add(key);
        self.ends.set_no_later_than(key, until);
        key
    }
}

/// Returns the hit of a job whose key is kept, if that is in force.
fn hit_of_deleted(id: u64, until: Nanos, now: Nanos) -> Option<Hit> {
    (until > now).then_some(Hit { id, state: JobState::Deleted })
}

impl Hashed for KeyOfJob {
    fn hash(&self) -> u32 {
        self.digest.hash()
    }

    fn next(&self) -> &Cell<u32> {
        &self.next
    }
}

impl Hashed for Kept {
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
            assert!(jobs + kept <= 40 && queue.jobs.len() == jobs, "seed {seed}");
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
        assert_eq!(size_of::<Option<Kept>>(), 40);
        let mut queue = Queue::new(Settings::DEFAULT, Limits::DEFAULT);
        for id in 1..=10_000 {
            assert_eq!(put(&mut queue, id, &id.to_string(), 0, NOW), None);
        }
        let bytes = queue.unique.taken_bytes();
        assert!(bytes <= 40 * 10_000, "{bytes} bytes for 10,000 keys");
    }
}
