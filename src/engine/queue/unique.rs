//! Unique jobs: while a tube has a job with some key, a put with this key inserts no other job.
//!
//! The index has a digest of each key and of the name of its tube, not the key itself
//! ([`digest`](crate::engine::digest)). So the tube of a kept key may be gone. A key is in force from the
//! put until its job is deleted or flushed, and then for its TTL, if it has one: for this time it is
//! kept. While it is in force, the same job is the reply to further puts.
//!
//! ```text
//!   put                         delete, flush                       the TTL has passed
//!   ---> hash -> job -> KeyOfJob -------------> hash -> Kept ----------------------------> gone
//!                       digest, TTL                     digest, TTL, until, id of the job
//! ```
//!
//! A flush decides at one moment, but frees the jobs later. Until then the index has a flushed job next
//! to a new job with the same key. A search skips keys that are not in force.
//!
//! A key takes 24 bytes, of which the digest is 16, and 14 to 15 bytes in the index. A kept key takes 48
//! bytes instead of 24, and 16 in a heap of all kept keys: the first ones are forgotten when their time has
//! passed, some in each tick. They have no timers, because a flush can end the time of a million keys at one
//! moment, and all other timers would wait for them. A job without a key takes nothing: see [`LogRef`].

use super::Queue;
use super::flush::Decision;
use super::job::{Job, LogRef, LogTarget, State};
use crate::engine::binlog::key_record::KeyRecord;
use crate::engine::binlog::record;
use crate::engine::binlog::segments::Owner;
use crate::engine::collections::hash_index::HashIndex;
use crate::engine::collections::heap::{Entry, Heap};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::digest::{Digest, Secret};
use crate::engine::keys::{Either, EitherKey, JobKey, KeptKey, Key, LogKey, UniqueKey};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::num::NonZero;

/// The keys of jobs, and the kept keys of deleted jobs.
#[derive(Debug)]
pub struct UniqueKeys {
    /// The keys of jobs that are not freed.
    of_jobs: PagedSlab<UniqueKey, KeyOfJob>,
    kept: PagedSlab<KeptKey, Kept>,
    /// All kept keys, by their end.
    ends: Heap<KeptEntry>,
    /// The [`Owner`]s of all keys, by digest.
    index: HashIndex,
    secret: Secret,
    /// The number of puts that inserted no job, because their key was in force.
    hits: u64,
}

/// The key of a job that is not freed.
#[derive(Debug)]
struct KeyOfJob {
    digest: Digest,
    /// For how many seconds the key is kept after the delete of its job.
    ttl_secs: u32,
    /// The job's entry in the binlog, in the form of [`encode_log`].
    log: NonZero<u32>,
}

/// The key of a deleted job.
#[derive(Debug)]
struct Kept {
    /// The id of the job. No job has the id 0.
    id: NonZero<u64>,
    until: Nanos,
    digest: Digest,
    ttl_secs: u32,
    /// The entry of the key in the binlog; [`LogKey::NONE`] without a binlog.
    log: LogKey,
    /// The index in [`UniqueKeys::ends`].
    index: u32,
}

/// A kept key in the heap of all of them.
#[derive(Clone, Copy, Debug)]
struct KeptEntry {
    until: Nanos,
    key: KeptKey,
}

impl Entry for KeptEntry {
    type Store = PagedSlab<KeptKey, Kept>;

    fn is_before(self, other: KeptEntry, _: &PagedSlab<KeptKey, Kept>) -> bool {
        (self.until, self.key) < (other.until, other.key)
    }

    fn set_index(self, index: u32, kept: &mut PagedSlab<KeptKey, Kept>) {
        kept[self.key].index = index;
    }

    fn index(self, kept: &PagedSlab<KeptKey, Kept>) -> Option<u32> {
        kept.get(self.key).filter(|kept| kept.until == self.until).map(|kept| kept.index)
    }
}

/// An [`Owner`] in the index.
type OwnerKey = EitherKey<JobKey, KeptKey>;

/// The key of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewKey {
    pub digest: Digest,
    /// For how many seconds the key is kept after the delete of its job.
    pub ttl_secs: u32,
}

/// The job whose key is that of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    pub id: u64,
    pub state: HitState,
}

/// The state of the job in a [`Hit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HitState {
    Ready,
    Reserved,
    Delayed,
    Buried,
    /// The job is deleted, and its key is kept.
    Deleted,
}

impl Queue {
    /// Returns the job that has this key in its tube, or had it and whose key is kept.
    pub fn find_unique(&self, digest: Digest, now: Nanos) -> Option<Hit> {
        let mut hit = None;
        self.find_other_owner(None, digest, |owner| {
            hit = self.hit(owner, now);
            hit.is_some()
        })?;
        hit
    }

    /// Counts a put that inserted no job because of its key.
    pub fn count_hit(&mut self) {
        self.unique.hits += 1;
    }

    /// Returns the job of an owner if its key is in force.
    fn hit(&self, owner: Owner, now: Nanos) -> Option<Hit> {
        let kept = |id, until| (until > now).then_some(Hit { id, state: HitState::Deleted });
        match owner {
            Owner::KeptKey(key) => {
                let Kept { id, until, .. } = self.unique.kept[key];
                kept(id.get(), until)
            }
            Owner::Job(key) => {
                let job = &self.jobs[key];
                if self.is_flushed(job) {
                    let ttl_secs = self.unique.of_jobs[key_of(job)].ttl_secs;
                    // Looking up the moment takes a time that grows with the number of flushes.
                    if ttl_secs == 0 {
                        return None;
                    }
                    return kept(job.id, self.flushed_at(job) + Nanos::from_secs(ttl_secs));
                }
                let state = match job.state {
                    State::Ready { .. } => HitState::Ready,
                    State::Reserved { .. } => HitState::Reserved,
                    State::Delayed(_) | State::Postponed(_) => HitState::Delayed,
                    State::Buried(_) => HitState::Buried,
                    State::Detached => unreachable!("a put runs between two transitions"),
                };
                Some(Hit { id: job.id, state })
            }
        }
    }

    /// Returns the owner of a key, in force or not.
    pub(super) fn find_owner(&self, digest: Digest) -> Option<Owner> {
        self.find_other_owner(None, digest, |_| true)
    }

    /// Returns an owner of the key for which `matches` returns true. Skips `except`, which may be a job that
    /// was removed.
    fn find_other_owner(
        &self,
        except: Option<Owner>,
        digest: Digest,
        mut matches: impl FnMut(Owner) -> bool,
    ) -> Option<Owner> {
        let is_it = |number| {
            let owner = from_number(number);
            Some(owner) != except && self.digest_of(owner) == digest && matches(owner)
        };
        self.unique.index.find(digest.hash(), is_it).map(from_number)
    }

    fn digest_of(&self, owner: Owner) -> Digest {
        match owner {
            Owner::Job(job) => self.unique.of_jobs[key_of(&self.jobs[job])].digest,
            Owner::KeptKey(kept) => self.unique.kept[kept].digest,
        }
    }

    /// Gives a key to a new job, after [`UniqueKeys::try_reserve_one`]. The key must not be in force, and
    /// [`Queue::forget_expired`] must have been called for it.
    pub(super) fn add_unique(&mut self, key: JobKey, new: NewKey) {
        let unique = self.unique.add_of_job(new, key, LogKey::NONE);
        self.jobs[key].log = unique.into();
    }

    /// Forgets the kept key with this digest, if there is one. It must not be in force any more.
    pub(super) fn forget_expired(&mut self, digest: Digest) {
        let is_kept = |owner| matches!(owner, Owner::KeptKey(_));
        if !self.unique.kept.is_empty()
            && let Some(Owner::KeptKey(expired)) = self.find_other_owner(None, digest, is_kept)
        {
            self.forget_kept(expired);
        }
    }

    /// Ends the key of a job that was removed from under `job_key`, and records the delete of the job. A
    /// flush has deleted the job if `flushed_by` is not `None`.
    pub(super) fn end_unique(
        &mut self,
        job_key: JobKey,
        job: &Job,
        flushed_by: Option<Decision>,
        now: Nanos,
    ) {
        let key = key_of(job);
        let of_job = &self.unique.of_jobs[key];
        let (digest, log) = (of_job.digest, of_job.log());
        let ended_at = flushed_by.map_or(now, |flush| flush.decided_at);
        let until = ended_at + Nanos::from_secs(of_job.ttl_secs);
        // Since the flush another job may have taken the key. Without space or memory it is not kept; a
        // delete has reserved both.
        let is_kept = of_job.ttl_secs > 0
            && until > now
            && !(flushed_by.is_some() && self.has_other_owner(job_key, digest, now))
            && self.reserve_delete(job.log).is_ok();
        let kind = flushed_by.map(|flush| flush.kind);
        if !is_kept {
            self.unique.remove(key, job_key);
            return self.record_end(job, log, kind);
        }
        let kept = self.unique.keep(key, job_key, job.id, until);
        self.record_kept(job, kept, kind);
    }

    /// Returns whether a key is in force with another owner than the job that was removed.
    fn has_other_owner(&self, removed: JobKey, digest: Digest, now: Nanos) -> bool {
        let is_in_force = |owner| self.hit(owner, now).is_some();
        self.find_other_owner(Some(Owner::Job(removed)), digest, is_in_force).is_some()
    }

    /// Forgets a kept key.
    pub(super) fn forget_kept(&mut self, key: KeptKey) {
        let log = self.unique.remove_kept(key);
        self.forget_key(log);
    }

    /// Forgets kept keys whose time has passed, or the first of many.
    pub(super) fn forget_ended(&mut self, now: Nanos) {
        for _ in 0..self.limits.keys_forgotten_per_tick {
            let first = self.unique.ends.first().filter(|first| first.until <= now);
            let Some(KeptEntry { key, .. }) = first else { return };
            self.forget_kept(key);
        }
    }

    // ---- Checking ----

    /// Checks that each key is found, that each has at most one owner that is not flushed, and that keys and
    /// their jobs refer to each other.
    pub(super) fn check_unique(&self) {
        let UniqueKeys { of_jobs, kept, ends, index, .. } = &self.unique;
        of_jobs.check(format_args!("the keys of jobs"));
        kept.check(format_args!("the kept keys"));
        let mut all = Vec::new();
        for (key, job) in self.jobs.iter() {
            let Some(unique) = job.log.unique() else { continue };
            all.push((Owner::Job(key), of_jobs[unique].digest, self.is_flushed(job)));
        }
        assert_eq!(of_jobs.len(), all.len(), "keys of jobs, and jobs with keys");
        all.extend(kept.iter().map(|(key, it)| (Owner::KeptKey(key), it.digest, false)));
        let numbers = all.iter().map(|&(owner, digest, _)| (digest.hash(), to_number(owner)));
        index.check(numbers, format_args!("the index of keys"));
        for (owner, digest, is_flushed) in all {
            let is_current =
                |other| !matches!(other, Owner::Job(job) if self.is_flushed(&self.jobs[job]));
            let other = self.find_other_owner(Some(owner), digest, is_current);
            assert!(is_flushed || other.is_none(), "{owner:?} and {other:?} have the same key");
        }
        ends.check(kept, format_args!("the ends of kept keys"));
        assert_eq!(ends.len(), kept.len(), "kept keys with an end, and all of them");
        for (key, Kept { id, log, .. }) in kept.iter() {
            self.check_log(*log, Owner::KeptKey(key), id.get(), record::SHORT_LEN);
        }
    }
}

impl Default for UniqueKeys {
    /// Returns no keys, and a random secret.
    fn default() -> UniqueKeys {
        UniqueKeys {
            // `LogRef` and `OwnerKey` have 31 bits for a number.
            of_jobs: PagedSlab::with_31_bits(),
            kept: PagedSlab::with_31_bits(),
            ends: Heap::default(),
            index: HashIndex::default(),
            secret: Secret::random(),
            hits: 0,
        }
    }
}

impl UniqueKeys {
    /// The most memory that one more key of a job takes, in bytes.
    pub const MOST_GROWTH_OF_A_KEY: u64 = size_of::<KeyOfJob>() as u64 + HashIndex::MOST_GROWTH;

    /// Returns the key of a put into this tube.
    pub fn new_key(&self, tube: &str, key: &[u8], ttl_secs: u32) -> NewKey {
        NewKey { digest: self.secret.digest(tube, key), ttl_secs }
    }

    /// Returns the number of keys of jobs, and that of kept keys.
    pub fn counts(&self) -> (usize, usize) {
        (self.of_jobs.len(), self.kept.len())
    }

    /// Returns the number of puts that inserted no job.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Returns the memory of all keys, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.page_bytes() + self.index.taken_bytes()
    }

    /// Returns the memory of all keys without their index, in bytes.
    pub fn page_bytes(&self) -> u64 {
        let ends = self.ends.len() * size_of::<KeptEntry>();
        self.of_jobs.taken_bytes() + self.kept.taken_bytes() + ends as u64
    }

    /// Ensures that one more job can have a key without allocating.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.of_jobs.try_reserve_one()?;
        self.index.try_reserve_one()
    }

    /// Ensures that the key of a job can be kept without allocating.
    pub fn try_reserve_kept(&mut self) -> Result<(), TryReserveError> {
        self.ends.try_reserve_one()?;
        self.kept.try_reserve_one()
    }

    /// Returns when the time of the next kept key has passed.
    pub fn next_end(&self) -> Option<Nanos> {
        self.ends.first().map(|first| first.until)
    }

    /// Returns whether the key of a job is kept after the delete of the job.
    pub fn will_keep(&self, log: LogRef) -> bool {
        log.unique().is_some_and(|key| self.of_jobs[key].ttl_secs > 0)
    }

    /// Returns the entry of a job in the binlog.
    pub fn log_of(&self, log: LogRef) -> LogKey {
        match log.target() {
            LogTarget::Entry(log) => log,
            LogTarget::Unique(key) => self.of_jobs[key].log(),
        }
    }

    /// Changes the entry of a job in the binlog.
    pub fn set_log(&mut self, job: &mut Job, log: LogKey) {
        match job.log.target() {
            LogTarget::Entry(_) => job.log = log.into(),
            LogTarget::Unique(key) => self.of_jobs[key].log = encode_log(log),
        }
    }

    /// Returns the record of the key of a job, if it has one.
    pub fn record_of(&self, job: &Job) -> Option<KeyRecord> {
        let &KeyOfJob { digest, ttl_secs, .. } = &self.of_jobs[job.log.unique()?];
        let secret = self.secret;
        Some(KeyRecord { id: job.id, digest, secret, ttl_secs, kept_until: None })
    }

    /// Returns the record of a kept key, with a moment of the engine.
    pub fn record_of_kept(&self, key: KeptKey) -> KeyRecord {
        let Kept { id, until, digest, ttl_secs, .. } = self.kept[key];
        let (id, secret) = (id.get(), self.secret);
        KeyRecord { id, digest, secret, ttl_secs, kept_until: Some(until) }
    }

    /// Returns the entry of a kept key in the binlog.
    pub fn log_of_kept(&self, key: KeptKey) -> LogKey {
        self.kept[key].log
    }

    /// Removes the key of a job.
    pub fn remove(&mut self, key: UniqueKey, job_key: JobKey) {
        let KeyOfJob { digest, .. } = self.of_jobs.remove(key).expect("a job refers to its key");
        self.index.remove(digest.hash(), to_number(Owner::Job(job_key)));
    }

    /// Removes a kept key. Returns its entry in the binlog.
    pub(super) fn remove_kept(&mut self, key: KeptKey) -> LogKey {
        self.ends.remove(self.kept[key].index, &mut self.kept);
        let kept = self.kept.remove(key).expect("its index was just read");
        self.index.remove(kept.digest.hash(), to_number(Owner::KeptKey(key)));
        kept.log
    }

    // ---- Replay ----

    /// Uses the secret of a record from now on. Returns whether keys have another one, which must be
    /// forgotten.
    pub fn use_secret(&mut self, secret: Secret) -> bool {
        let before = std::mem::replace(&mut self.secret, secret);
        before != secret && !(self.of_jobs.is_empty() && self.kept.is_empty())
    }

    /// Returns the digest of any key.
    pub fn any_digest(&self) -> Option<Digest> {
        let of_jobs = self.of_jobs.iter().map(|(_, of_job)| of_job.digest);
        of_jobs.chain(self.kept.iter().map(|(_, kept)| kept.digest)).next()
    }

    /// Adds the key of a job with this entry in the binlog, after [`UniqueKeys::try_reserve_one`].
    pub fn add_of_job(&mut self, new: NewKey, job_key: JobKey, log: LogKey) -> UniqueKey {
        let NewKey { digest, ttl_secs } = new;
        self.index.insert(digest.hash(), to_number(Owner::Job(job_key)));
        self.of_jobs.insert(KeyOfJob { digest, ttl_secs, log: encode_log(log) })
    }

    /// Adds a kept key with the entry in the binlog that `add_log` makes, after
    /// [`UniqueKeys::try_reserve_one`] and [`UniqueKeys::try_reserve_kept`].
    pub(super) fn add_kept(
        &mut self,
        new: NewKey,
        id: u64,
        until: Nanos,
        add_log: impl FnOnce(KeptKey) -> LogKey,
    ) {
        let key = self.insert_kept(new, id, until, LogKey::NONE);
        self.kept[key].log = add_log(key);
        self.index.insert(new.digest.hash(), to_number(Owner::KeptKey(key)));
    }

    /// Keeps no key for longer than its TTL from now on.
    pub(super) fn limit_kept(&mut self, now: Nanos) {
        for page in 0..self.kept.page_count() {
            let entries = self.kept.in_page(page).filter_map(|(key, kept)| {
                let latest = now + Nanos::from_secs(kept.ttl_secs);
                (kept.until > latest).then_some(KeptEntry { until: latest, key })
            });
            let entries: Vec<KeptEntry> = entries.collect();
            for entry in entries {
                let kept = &mut self.kept[entry.key];
                kept.until = entry.until;
                let index = kept.index;
                self.ends.replace(index, entry, &mut self.kept);
            }
        }
    }

    /// Keeps the key of a deleted job. The memory for that is reserved.
    fn keep(&mut self, key: UniqueKey, job_key: JobKey, id: u64, until: Nanos) -> KeptKey {
        let of_job = self.of_jobs.remove(key).expect("a job refers to its key");
        let KeyOfJob { digest, ttl_secs, .. } = of_job;
        let kept = self.insert_kept(NewKey { digest, ttl_secs }, id, until, of_job.log());
        let numbers = [Owner::Job(job_key), Owner::KeptKey(kept)].map(to_number);
        self.index.replace(digest.hash(), numbers[0], numbers[1]);
        kept
    }

    fn insert_kept(&mut self, new: NewKey, id: u64, until: Nanos, log: LogKey) -> KeptKey {
        let NewKey { digest, ttl_secs } = new;
        let id = NonZero::new(id).expect("no job has the id 0");
        // The heap sets the index.
        let key = self.kept.insert(Kept { id, until, digest, ttl_secs, log, index: 0 });
        self.ends.insert(KeptEntry { until, key }, &mut self.kept);
        key
    }
}

impl KeyOfJob {
    /// Returns the job's entry in the binlog; [`LogKey::NONE`] without a binlog.
    fn log(&self) -> LogKey {
        LogKey::from_number(self.log.get() ^ HIGHEST_BIT)
    }
}

/// Returns the key of an entry with the highest bit inverted: never 0, so that an `Option<KeyOfJob>` takes
/// no more memory.
fn encode_log(log: LogKey) -> NonZero<u32> {
    NonZero::new(log.number() ^ HIGHEST_BIT).expect("keys of entries have 31 bits, or are NONE")
}

const HIGHEST_BIT: u32 = 1 << 31;

/// Returns the number of an owner in the index.
fn to_number(owner: Owner) -> u32 {
    match owner {
        Owner::Job(job) => OwnerKey::from_first(job),
        Owner::KeptKey(kept) => OwnerKey::from_second(kept),
    }
    .number()
}

/// Returns the owner with this number in the index.
fn from_number(number: u32) -> Owner {
    match OwnerKey::from_number(number).split() {
        Either::First(job) => Owner::Job(job),
        Either::Second(kept) => Owner::KeptKey(kept),
    }
}

/// Returns the key of a job that has one.
fn key_of(job: &Job) -> UniqueKey {
    job.log.unique().expect("the index has only jobs with keys")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::ConnKey;
    use crate::engine::limits::Limits;
    use crate::engine::queue::Outcome;
    use crate::engine::queue::flush::FlushKind;
    use crate::engine::queue::job::JobParams;
    use std::collections::BTreeMap;

    const NOW: Nanos = Nanos::from_secs(100);

    fn secs(secs: u32) -> Nanos {
        NOW + Nanos::from_secs(secs)
    }

    /// Puts a job as the server does. Returns the job that has the key.
    fn put(queue: &mut Queue, id: u64, key: &str, ttl_secs: u32, now: Nanos) -> Option<Hit> {
        let new = queue.unique.new_key("a", key.as_bytes(), ttl_secs);
        let hit = queue.find_unique(new.digest, now);
        if hit.is_none() {
            let tube = queue.find_or_create_tube("a").unwrap();
            let params = JobParams { pri: 0, delay_secs: 0, ttr_secs: 60 };
            let body = queue.bodies.add(b"body\r\n").unwrap();
            queue.put_unique(tube, id, params, Some(&new), body, now).unwrap();
        }
        hit
    }

    fn connect(queue: &mut Queue) -> ConnKey {
        let conn = ConnKey::from_index(0);
        queue.connect(conn).unwrap();
        conn
    }

    #[test]
    fn keys_agree_with_a_map_under_random_steps() {
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut queue = Queue::new(Limits::DEFAULT, NOW);
            let conn = connect(&mut queue);
            // The job of each key, and until when it is kept once the job is deleted.
            let mut model: BTreeMap<String, (u64, u32, Option<Nanos>)> = BTreeMap::new();
            let mut now = NOW;
            for id in 1..1_000 {
                now = now + Nanos::from_millis(random.u64(..500));
                queue.tick(usize::MAX, now);
                queue.check();
                model.retain(|_, (_, _, until)| until.is_none_or(|until| until > now));
                if random.bool() {
                    let key = format!("key-{}", random.u8(..40));
                    let ttl = [0, 0, 1, 5][random.usize(..4)];
                    let hit = put(&mut queue, id, &key, ttl, now);
                    let expected = model.get(&key).map(|(id, _, until)| {
                        let state = until.map_or(HitState::Ready, |_| HitState::Deleted);
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
                    assert_eq!(queue.delete(conn, *id, now), Outcome::Done);
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
        let mut queue = Queue::new(Limits::DEFAULT, NOW);
        let conn = connect(&mut queue);
        for id in 1..=MANY {
            let ttl = if id % 2 == 0 { 10 } else { 0 };
            assert_eq!(put(&mut queue, id, &id.to_string(), ttl, NOW), None);
            if id > 200 {
                continue;
            }
            queue.ensure_can_reserve(conn).unwrap();
            queue.reserve_job(conn, id, NOW).unwrap().unwrap();
            if id > 100 {
                assert_eq!(queue.bury(conn, id, 0, NOW), Outcome::Done);
            }
        }
        let tube = queue.tubes.find("a").unwrap();
        assert_eq!(queue.flush(conn, tube, FlushKind::Buried, secs(1)), Ok(Some(100)));
        let tube = queue.tubes.find("a").unwrap();
        assert_eq!(queue.flush(conn, tube, FlushKind::All, secs(5)), Ok(None));
        // Most jobs are not freed yet.
        let deleted = |id| Some(Hit { id, state: HitState::Deleted });
        for id in [2, 102, MANY - 2, MANY] {
            assert_eq!(put(&mut queue, MANY + id, &id.to_string(), 0, secs(6)), deleted(id));
        }
        for id in [1, 101, MANY - 3, MANY - 1] {
            assert_eq!(put(&mut queue, MANY + id, &id.to_string(), 0, secs(6)), None);
        }
        // The key of a job that is not freed has passed, and another job takes it.
        assert_eq!(put(&mut queue, 3 * MANY, &MANY.to_string(), 10, secs(15)), None);
        queue.check();
        assert_eq!(queue.flush_step(&mut usize::MAX.clone(), secs(14)), Some((conn, MANY - 100)));
        queue.check();
        let ready = |id| Some(Hit { id, state: HitState::Ready });
        assert_eq!(put(&mut queue, 0, &MANY.to_string(), 0, secs(14)), ready(3 * MANY));
        assert_eq!(put(&mut queue, 0, "1", 0, secs(14)), ready(MANY + 1));
        assert_eq!(put(&mut queue, 0, "2", 0, secs(14)), deleted(2));
        // The flush of the buried ones was earlier.
        assert_eq!(put(&mut queue, 4 * MANY, "102", 0, secs(12)), None);
        while queue.next_due().is_some_and(|due| due <= secs(16)) {
            queue.tick(usize::MAX, secs(16));
        }
        queue.check();
        assert_eq!(queue.unique.counts(), (6, 0));
    }

    #[test]
    fn a_key_takes_at_most_40_bytes() {
        assert_eq!(size_of::<Option<KeyOfJob>>(), 24);
        assert_eq!(size_of::<Option<Kept>>(), 48);
        let mut queue = Queue::new(Limits::DEFAULT, NOW);
        for id in 1..=10_000 {
            assert_eq!(put(&mut queue, id, &id.to_string(), 0, NOW), None);
        }
        let bytes = queue.unique.taken_bytes();
        assert!(bytes <= 40 * 10_000, "{bytes} bytes for 10,000 keys");
    }
}
