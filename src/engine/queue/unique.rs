//! Unique jobs: while a tube has a job with some key, a put with this key inserts no other job.
//!
//! The index has a digest of each key and of the name of its tube, not the key itself
//! ([`digest`](crate::engine::digest)). So the tube of a kept key may be gone. A key is in force as long
//! as its job: from the put to the delete or to the flush of the tube. If it has a TTL, it is then kept
//! for this time: the same job is the reply to further puts.
//!
//! ```text
//!   put          Job           delete, flush           Kept           TTL has passed
//!   ---> [digest, TTL, job] -------------------> [digest, until, id] ---------------> gone
//! ```
//!
//! A flush decides at one moment, but frees the jobs later. Until then the entry of a flushed job
//! remains, next to that of a new job with the same key. A search skips entries that are not in force.
//!
//! A key takes 32 bytes, of which the digest is 16, and 8 to 16 bytes in the index. A kept key takes 48
//! bytes more instead of its job. A job without a key takes nothing: see [`LogRef`].

use super::job::{Job, LogRef, LogTarget, State};
use super::{Queue, TimerOwner};
use crate::engine::binlog::key_record::KeyRecord;
use crate::engine::binlog::record;
use crate::engine::binlog::segments::Owner;
use crate::engine::collections::hash_index::{HashSlab, Keyed};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::collections::wheel::Wheel;
use crate::engine::digest::{Digest, Secret};
use crate::engine::keys::{JobKey, KeptKey, Key, LogKey, NIL, TimerKey, UniqueKey};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::num::NonZero;

/// All keys of jobs.
#[derive(Debug)]
pub struct UniqueKeys {
    entries: HashSlab<UniqueKey, Entry>,
    kept: PagedSlab<KeptKey, Kept>,
    secret: Secret,
    /// The number of puts that inserted no job, because their key was in force.
    hits: u64,
}

/// The key of a job.
#[derive(Debug)]
struct Entry {
    digest: Digest,
    next_in_bucket: u32,
    /// For how many seconds the key is kept after the delete of its job.
    ttl_secs: u32,
    /// The number of the job or of the kept key, plus 1.
    holder: NonZero<u32>,
    /// The job's entry in the binlog, or [`KEPT`].
    log: LogKey,
}

/// What makes a key be in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Job(JobKey),
    Kept(KeptKey),
}

/// The key of a deleted job.
#[derive(Debug)]
struct Kept {
    /// The id of the job. No job has the id 0.
    id: NonZero<u64>,
    until: Nanos,
    /// The entry of the key in the binlog; [`LogKey::NONE`] without a binlog.
    log: LogKey,
    /// Fires when the key is not in force any more.
    timer: TimerKey,
}

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

/// The value of [`Entry::log`] of a kept key. No entry in the binlog has this number.
const KEPT: u32 = NIL - 1;

impl Queue {
    /// Returns the job that has this key in its tube, or had it and whose key is kept.
    pub fn find_unique(&self, digest: Digest, now: Nanos) -> Option<Hit> {
        let is_in_force = |entry: &Entry| entry.digest == digest && self.hit(entry, now).is_some();
        let found = self.unique.entries.find_by(digest.half(), is_in_force)?;
        self.hit(&self.unique.entries[found], now)
    }

    /// Counts a put that inserted no job because of its key.
    pub fn count_hit(&mut self) {
        self.unique.hits += 1;
    }

    /// Returns the job of a key that is in force.
    fn hit(&self, entry: &Entry, now: Nanos) -> Option<Hit> {
        match entry.holder() {
            Holder::Kept(kept) => {
                let Kept { id, until, .. } = self.unique.kept[kept];
                (until > now).then_some(Hit { id: id.get(), state: HitState::Deleted })
            }
            Holder::Job(key) => {
                let job = &self.jobs[key];
                if self.is_flushed(job) {
                    let until = self.flushed_at(job) + Nanos::from_secs(entry.ttl_secs);
                    return (until > now).then_some(Hit { id: job.id, state: HitState::Deleted });
                }
                let state = match job.state {
                    State::Ready { .. } => HitState::Ready,
                    State::Reserved { .. } => HitState::Reserved,
                    State::Delayed { .. } => HitState::Delayed,
                    State::Buried(_) => HitState::Buried,
                    State::Detached => unreachable!("a put runs between two transitions"),
                };
                Some(Hit { id: job.id, state })
            }
        }
    }

    /// Gives a key to a new job, after [`UniqueKeys::try_reserve_one`]. The key must not be in force.
    pub(super) fn add_unique(&mut self, key: JobKey, new: NewKey) {
        // A kept key whose time has passed may not be forgotten yet.
        let is_kept =
            |entry: &Entry| entry.digest == new.digest && matches!(entry.holder(), Holder::Kept(_));
        if !self.unique.kept.is_empty()
            && let Some(expired) = self.unique.entries.find_by(new.digest.half(), is_kept)
        {
            self.forget_kept(expired);
        }
        let unique = self.unique.insert(new, Holder::Job(key), LogKey::NONE);
        self.jobs[key].log = unique.into();
    }

    /// Ends the key of a job that was removed, and records the delete of the job. A flush has deleted the
    /// job at `flushed_at`, if that is not `None`.
    pub(super) fn end_unique(
        &mut self,
        job: &Job,
        key: UniqueKey,
        flushed_at: Option<Nanos>,
        now: Nanos,
    ) {
        let is_flushed = flushed_at.is_some();
        let Entry { ttl_secs, log, .. } = self.unique.entries[key];
        let until = flushed_at.unwrap_or(now) + Nanos::from_secs(ttl_secs);
        // Without space or memory the key of a flushed job is lost. A delete has reserved both.
        let is_kept = ttl_secs > 0
            && until > now
            && !(is_flushed && self.is_replaced(key, now))
            && self.reserve_delete(job.log).is_ok();
        if !is_kept {
            self.unique.entries.remove(key);
            return self.record_end(job, log, is_flushed);
        }
        self.unique.keep(key, job.id, until, log, &mut self.wheel);
        self.record_kept(job, log, key, is_flushed);
    }

    /// Returns whether a newer job with the key of a flushed job is in force.
    fn is_replaced(&self, key: UniqueKey, now: Nanos) -> bool {
        let Entry { digest, holder, .. } = self.unique.entries[key];
        let is_newer = |entry: &Entry| {
            entry.digest == digest && entry.holder != holder && self.hit(entry, now).is_some()
        };
        self.unique.entries.find_by(digest.half(), is_newer).is_some()
    }

    /// Forgets a kept key.
    pub(super) fn forget_kept(&mut self, key: UniqueKey) {
        let log = self.unique.remove_kept(key, &mut self.wheel);
        self.forget_key(log);
    }

    // ---- Checking ----

    /// Checks that each key is found, that at most one of the same is in force, and that keys and their
    /// jobs refer to each other.
    pub(super) fn check_unique(&self) {
        self.unique.entries.check(format_args!("the keys of jobs"));
        self.unique.kept.check(format_args!("the kept keys"));
        let mut held = 0;
        for (key, entry) in self.unique.entries.iter() {
            let is_current = match entry.holder() {
                Holder::Kept(kept) => {
                    let Kept { id, log, timer, until } = &self.unique.kept[kept];
                    let what = format_args!("the kept key of job {id}");
                    self.check_timer(*timer, TimerOwner::KeptKey(key), what, [Some(*until)]);
                    self.check_log(*log, Owner::KeptKey(key), id.get(), record::SHORT_LEN);
                    true
                }
                Holder::Job(job) => {
                    held += 1;
                    let job = self.jobs.get(job).expect("a key refers to a job that is gone");
                    assert_eq!(job.log.unique(), Some(key), "the key of job {}", job.id);
                    !self.is_flushed(job)
                }
            };
            let is_other = |other: &Entry| {
                let is_flushed =
                    matches!(other.holder(), Holder::Job(job) if self.is_flushed(&self.jobs[job]));
                other.digest == entry.digest && other.holder != entry.holder && !is_flushed
            };
            let other = self.unique.entries.find_by(entry.digest.half(), is_other);
            assert!(!is_current || other.is_none(), "{entry:?} is in force twice");
        }
        let keyed = self.jobs.iter().filter(|(_, job)| job.log.unique().is_some()).count();
        assert_eq!(held, keyed, "keys of jobs, and jobs with keys");
        let kept = self.unique.entries.len() - held;
        assert_eq!(kept, self.unique.kept.len(), "entries of kept keys, and kept keys");
    }
}

impl Default for UniqueKeys {
    /// Returns an empty index with a random secret.
    fn default() -> UniqueKeys {
        UniqueKeys {
            entries: HashSlab::default(),
            kept: PagedSlab::default(),
            secret: Secret::random(),
            hits: 0,
        }
    }
}

impl UniqueKeys {
    /// The most memory that one more key of a job takes, in bytes.
    pub const MOST_GROWTH_OF_A_KEY: u64 =
        size_of::<Entry>() as u64 + HashSlab::<UniqueKey, Entry>::INDEX_BYTES_PER_ENTRY;

    /// Returns the key of a put into this tube.
    pub fn new_key(&self, tube: &str, key: &str, ttl_secs: u32) -> NewKey {
        NewKey { digest: self.secret.digest(tube, key), ttl_secs }
    }

    /// Returns the number of keys of jobs, and that of kept keys.
    pub fn counts(&self) -> (usize, usize) {
        (self.entries.len() - self.kept.len(), self.kept.len())
    }

    /// Returns the number of puts that inserted no job.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Returns the memory of all keys, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.page_bytes() + self.entries.index_bytes()
    }

    /// Returns the memory of all keys without their index, in bytes.
    pub fn page_bytes(&self) -> u64 {
        let timers = self.kept.len() * Wheel::<TimerOwner>::BYTES_PER_TIMER;
        self.entries.taken_bytes() + self.kept.taken_bytes() + timers as u64
    }

    /// Ensures that one more job can have a key without allocating.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.entries.try_reserve_one()
    }

    /// Ensures that the key of a job can be kept without allocating, but for its timer.
    pub fn try_reserve_kept(&mut self) -> Result<(), TryReserveError> {
        self.kept.try_reserve_one()
    }

    /// Returns whether the key of a job is kept after the delete of the job.
    pub fn will_keep(&self, log: LogRef) -> bool {
        log.unique().is_some_and(|key| self.entries[key].ttl_secs > 0)
    }

    /// Returns the entry of a job in the binlog.
    pub fn log_of(&self, log: LogRef) -> LogKey {
        match log.target() {
            LogTarget::Entry(log) => log,
            LogTarget::Unique(key) => self.entries[key].log,
        }
    }

    /// Changes the entry of a job in the binlog.
    pub fn set_log(&mut self, job: &mut Job, log: LogKey) {
        match job.log.target() {
            LogTarget::Entry(_) => job.log = log.into(),
            LogTarget::Unique(key) => self.entries[key].log = log,
        }
    }

    /// Returns the record of the key of a job, if it has one.
    pub fn record_of(&self, job: &Job) -> Option<KeyRecord> {
        let key = job.log.unique()?;
        let Entry { digest, ttl_secs, .. } = self.entries[key];
        let secret = self.secret;
        Some(KeyRecord { id: job.id, digest, secret, ttl_secs, kept_until: None })
    }

    /// Returns the record of a kept key, with a moment of the engine.
    pub fn record_of_kept(&self, key: UniqueKey) -> KeyRecord {
        let Entry { digest, ttl_secs, .. } = self.entries[key];
        let Kept { id, until, .. } = self.kept[self.kept_key(key)];
        let (id, secret) = (id.get(), self.secret);
        KeyRecord { id, digest, secret, ttl_secs, kept_until: Some(until) }
    }

    // ---- Replay ----

    /// Uses the secret of a record from now on. Returns whether keys have another one, which must be
    /// forgotten.
    pub fn use_secret(&mut self, secret: Secret) -> bool {
        let before = std::mem::replace(&mut self.secret, secret);
        before != secret && !self.entries.is_empty()
    }

    /// Returns a key with this digest, in force or not.
    pub fn find(&self, digest: Digest) -> Option<UniqueKey> {
        self.entries.find_by(digest.half(), |entry| entry.digest == digest)
    }

    /// Returns any key.
    pub fn any(&self) -> Option<UniqueKey> {
        self.entries.iter().map(|(key, _)| key).next()
    }

    /// Returns the job of a key, or `None` if the key is kept.
    pub fn job_of(&self, key: UniqueKey) -> Option<JobKey> {
        match self.entries[key].holder() {
            Holder::Job(job) => Some(job),
            Holder::Kept(_) => None,
        }
    }

    /// Adds the key of a job with this entry in the binlog.
    pub fn add_of_job(&mut self, new: NewKey, job: JobKey, log: LogKey) -> UniqueKey {
        self.insert(new, Holder::Job(job), log)
    }

    /// Adds a kept key with the entry in the binlog that `add_log` makes. Its memory must be reserved.
    pub(super) fn add_kept(
        &mut self,
        new: NewKey,
        id: u64,
        until: Nanos,
        wheel: &mut Wheel<TimerOwner>,
        add_log: impl FnOnce(UniqueKey) -> LogKey,
    ) {
        // The holder is set below.
        let key = self.insert(new, Holder::Job(JobKey::from_number(0)), LogKey::NONE);
        let log = add_log(key);
        self.keep(key, id, until, log, wheel);
    }

    /// Keeps no key for longer than its TTL from now on.
    pub(super) fn limit_kept(&mut self, now: Nanos, wheel: &mut Wheel<TimerOwner>) {
        let entries = self.entries.iter();
        let kept = entries.filter_map(|(_, entry)| match entry.holder() {
            Holder::Kept(kept) => Some((kept, entry.ttl_secs)),
            Holder::Job(_) => None,
        });
        for (key, ttl_secs) in kept {
            let latest = now + Nanos::from_secs(ttl_secs);
            let kept = &mut self.kept[key];
            if kept.until > latest {
                kept.until = latest;
                wheel.set_no_later_than(kept.timer, latest);
            }
        }
    }

    /// Removes the key of a job.
    pub fn remove(&mut self, key: UniqueKey) {
        self.entries.remove(key);
    }

    /// Removes a kept key. Returns its entry in the binlog.
    pub(super) fn remove_kept(&mut self, key: UniqueKey, wheel: &mut Wheel<TimerOwner>) -> LogKey {
        let kept = self.kept.remove(self.kept_key(key)).expect("a kept key refers to it");
        wheel.destroy(kept.timer);
        self.entries.remove(key);
        kept.log
    }

    fn kept_key(&self, key: UniqueKey) -> KeptKey {
        match self.entries[key].holder() {
            Holder::Kept(kept) => kept,
            Holder::Job(job) => unreachable!("the key of {job:?} is not kept"),
        }
    }

    fn insert(&mut self, new: NewKey, holder: Holder, log: LogKey) -> UniqueKey {
        let NewKey { digest, ttl_secs } = new;
        let mut entry =
            Entry { digest, next_in_bucket: NIL, ttl_secs, holder: NonZero::<u32>::MIN, log };
        entry.set_holder(holder);
        self.entries.insert(entry)
    }

    /// Keeps the key of a deleted job. The memory for that is reserved.
    fn keep(
        &mut self,
        key: UniqueKey,
        id: u64,
        until: Nanos,
        log: LogKey,
        wheel: &mut Wheel<TimerOwner>,
    ) {
        let id = NonZero::new(id).expect("no job has the id 0");
        let timer = wheel.create(TimerOwner::KeptKey(key)).expect("its memory was reserved");
        wheel.set_no_later_than(timer, until);
        let kept = self.kept.insert(Kept { id, until, log, timer });
        self.entries[key].set_holder(Holder::Kept(kept));
    }
}

/// Returns the number of a key, plus 1.
fn plus_one(number: u32) -> NonZero<u32> {
    NonZero::<u32>::MIN.checked_add(number).expect("no key has the number NIL")
}

impl Entry {
    fn holder(&self) -> Holder {
        let number = self.holder.get() - 1;
        if self.log.number() == KEPT {
            Holder::Kept(KeptKey::from_number(number))
        } else {
            Holder::Job(JobKey::from_number(number))
        }
    }

    fn set_holder(&mut self, holder: Holder) {
        let number = match holder {
            Holder::Job(job) => job.number(),
            Holder::Kept(kept) => {
                self.log = LogKey::from_number(KEPT);
                kept.number()
            }
        };
        self.holder = plus_one(number);
    }
}

impl Keyed for Entry {
    fn hash(&self) -> u64 {
        self.digest.half()
    }

    fn next_in_bucket(&self) -> u32 {
        self.next_in_bucket
    }

    fn next_in_bucket_mut(&mut self) -> &mut u32 {
        &mut self.next_in_bucket
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::keys::ConnKey;
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
        let new = queue.unique.new_key("a", key, ttl_secs);
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
            let mut queue = Queue::new(NOW);
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
        let mut queue = Queue::new(NOW);
        let conn = connect(&mut queue);
        for id in 1..=MANY {
            let ttl = if id % 2 == 0 { 10 } else { 0 };
            assert_eq!(put(&mut queue, id, &id.to_string(), ttl, NOW), None);
            if id > 200 {
                continue;
            }
            queue.ensure_can_reserve(conn).unwrap();
            queue.reserve_job(conn, id, NOW).unwrap();
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
        assert_eq!(size_of::<Option<Entry>>(), 32);
        assert_eq!(size_of::<Option<Kept>>(), 24);
        let mut queue = Queue::new(NOW);
        for id in 1..=10_000 {
            assert_eq!(put(&mut queue, id, &id.to_string(), 0, NOW), None);
        }
        let bytes = queue.unique.taken_bytes();
        assert!(bytes <= 40 * 10_000, "{bytes} bytes for 10,000 keys");
    }
}
