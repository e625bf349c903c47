//! The jobs that may be on the disk: all that has become of each job, in order, and how much of it
//! a crash can no longer undo.
//!
//! After a crash a job is as its last durable record describes it, or as it became later. A change
//! without a record of its own, such as a reserve, may be on the disk too: compaction writes the
//! whole job.

use super::model::{Change, Job, JobKey, KeptKey, SECOND, State};
use crate::harness::yaml::{field, number};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;

/// A job as `stats-job` and `peek` show it.
#[derive(Clone, Debug)]
pub struct FoundJob {
    /// The document of `stats-job`.
    pub text: String,
    pub body: Vec<u8>,
    /// The time of the `stats-job`.
    pub at: u64,
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All that it has written is there.
    Killed,
    /// All that was there when it started is there, and all that was logged this long before the
    /// last commit. `None`: the server never syncs, and nothing has to be there.
    PowerCut { synced_within: Option<u64> },
    /// On a remote disk: all that was there when the server started is there, and all that was logged
    /// before the last of these commits.
    Unacknowledged { commits: u64 },
}

/// The result of comparing a job with what is allowed.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The job is as one of these, which look the same now.
    Expected(Vec<Job>),
    /// The job is as allowed, but it may become due at more than one time.
    Ambiguous,
    /// The job is not there, which is allowed.
    Gone,
    /// The job is not as allowed.
    Wrong(String),
}

#[derive(Clone, Debug, Default)]
pub struct Journal {
    jobs: BTreeMap<u64, Vec<Version>>,
    /// The tube, the body and the key of every job of the run, for jobs that damage brings back. Damage may also
    /// give an id out again.
    origins: BTreeMap<u64, Vec<Origin>>,
    /// The jobs of each flush whose record may be lost.
    flushes: BTreeMap<u64, Vec<u64>>,
    /// The most jobs that one flush has deleted since the first start: the damage of its record may bring
    /// all of them back.
    most_flushed: usize,
    /// The keys of deleted jobs that may be kept.
    kept_keys: Vec<LoggedKey>,
    /// The jobs that the simulation deleted after the last start, because it could not know them.
    deleted: Vec<u64>,
    /// How far the wall clock has been ahead, since the server started.
    clock_offsets: Vec<i64>,
    /// The number of commits.
    commits: u64,
    committed_at: u64,
}

/// A key that the delete of its job keeps.
#[derive(Clone, Debug)]
struct LoggedKey {
    key: KeptKey,
    /// Of the delete.
    version: Version,
}

/// The tube, the body and the key with which a job was put.
type Origin = (Rc<str>, Rc<[u8]>, Option<JobKey>);

/// What a job became.
#[derive(Clone, Debug, Default)]
struct Version {
    /// `None`: it did not exist.
    job: Option<Job>,
    is_logged: bool,
    at: u64,
    /// The number of commits before it.
    commits: u64,
    /// The index of the clock offset in force.
    clock_offset: usize,
}

/// Versions that can no longer come back are dropped after this many commits.
const COMMITS_PER_PRUNE: u64 = 64;

impl Journal {
    // ---- Recording ----

    pub fn record(&mut self, change: Change) {
        let Change { id, job, is_logged, flush, at } = change;
        let before = self.jobs.get(&id).and_then(|versions| versions.last()?.job.clone());
        if let Some(flush) = flush {
            let jobs = self.flushes.entry(flush).or_default();
            jobs.push(id);
            self.most_flushed = self.most_flushed.max(jobs.len());
        }
        if let (Some(job), false) = (&job, self.jobs.contains_key(&id)) {
            let origin = (Rc::clone(&job.tube), Rc::clone(&job.body), job.key.clone());
            self.origins.entry(id).or_default().push(origin);
            let none = Version { is_logged: true, ..Version::default() };
            self.jobs.insert(id, vec![none]);
        }
        let clock_offset = self.clock_offsets.len().saturating_sub(1);
        let version = Version { job, is_logged, at, commits: self.commits, clock_offset };
        if let (None, Some(before)) = (&version.job, before)
            && let Some(JobKey { key, ttl: ttl @ 1.., is_unsure }) = before.key
        {
            let until = at + u64::from(ttl) * SECOND;
            let key = KeptKey { id, tube: before.tube, key, until, ttl, is_unsure };
            self.kept_keys.push(LoggedKey { key, version: version.clone() });
        }
        self.jobs.get_mut(&id).expect("a job is put before it changes").push(version);
    }

    pub fn set_clock_offset(&mut self, offset: i64) {
        if self.clock_offsets.is_empty() {
            self.clock_offsets.push(0);
        }
        self.clock_offsets.push(offset);
    }

    /// The server has committed. `worst_end` is the end that can undo most.
    pub fn commit(&mut self, now: u64, worst_end: End) {
        self.commits += 1;
        self.committed_at = now;
        if self.commits.is_multiple_of(COMMITS_PER_PRUNE) {
            self.prune(worst_end);
        }
    }

    fn prune(&mut self, end: End) {
        let mut jobs = std::mem::take(&mut self.jobs);
        jobs.retain(|_, versions| {
            let first = self.first_possible(versions, end);
            versions.drain(..first);
            versions.len() > 1 || versions[0].job.is_some()
        });
        self.jobs = jobs;
        let jobs = &self.jobs;
        self.flushes.retain(|_, ids| ids.iter().any(|id| jobs.contains_key(id)));
    }

    // ---- Comparing ----

    pub fn candidates(&self) -> Vec<u64> {
        self.jobs.keys().chain(&self.deleted).copied().collect()
    }

    pub fn all_ids(&self) -> Vec<u64> {
        self.origins.keys().copied().collect()
    }

    /// Returns the highest id that the next process must not give out again.
    pub fn highest_durable_id(&self, end: End) -> u64 {
        if end == (End::PowerCut { synced_within: None }) {
            return 0;
        }
        let is_durable = |versions: &[Version]| {
            self.first_possible(versions, end) > 0 || versions[0].job.is_some()
        };
        let durable = self.jobs.iter().filter(|(_, versions)| is_durable(versions));
        durable.map(|(&id, _)| id).max().unwrap_or(0)
    }

    /// Compares a job with what may be there. `restarted_at` is on the clock of the new process.
    pub fn judge(&self, id: u64, found: Option<&FoundJob>, end: End, restarted_at: u64) -> Verdict {
        let versions = self
            .jobs
            .get(&id)
            .map_or(&[][..], |versions| &versions[self.first_possible(versions, end)..]);
        let Some(found) = found else {
            let may_be_gone = versions.is_empty() || versions.iter().any(|it| it.job.is_none());
            return if may_be_gone {
                Verdict::Gone
            } else {
                Verdict::Wrong(format!(
                    "job {id} is gone; expected{}",
                    Listed(versions, restarted_at)
                ))
            };
        };
        if versions.is_empty() && self.deleted.contains(&id) && self.is_intact(id, found) {
            return Verdict::Ambiguous;
        }
        let mut matches: Vec<Job> = Vec::new();
        for version in versions {
            let Some(job) = &version.job else { continue };
            let offsets = self.clock_offsets.get(version.clock_offset..).unwrap_or_default();
            for &offset in if offsets.is_empty() { &[0][..] } else { offsets } {
                let job = job.ahead_by(offset);
                if found.is(&job, restarted_at) && !matches.contains(&job) {
                    matches.push(job);
                }
            }
        }
        let Some(first) = matches.first().cloned() else {
            return Verdict::Wrong(format!(
                "job {id} is not as any of its versions\n  came: {}\n  expected{}\n  \
                 clock offsets: {:?}",
                found.text.replace('\n', ", "),
                Listed(versions, restarted_at),
                self.clock_offsets
            ));
        };
        let state = |job: &Job| job.state_at(restarted_at);
        if matches.iter().any(|other| state(other) != state(&first)) {
            return Verdict::Ambiguous;
        }
        if matches.iter().any(|other| other.created != first.created) {
            matches.iter_mut().for_each(|job| job.is_age_unknown = true);
        }
        Verdict::Expected(matches)
    }

    /// Returns the keys of deleted jobs that are or may be kept after such an end, with those whose time is
    /// over: their records are still there if the clock is set back. `found` has the ids of all jobs.
    pub fn kept_keys(&self, found: &BTreeSet<u64>, end: End, restarted_at: u64) -> Vec<KeptKey> {
        let is_clock_set = self.clock_offsets.iter().any(|&offset| offset != 0);
        let gone = self.kept_keys.iter().filter(|it| !found.contains(&it.key.id));
        gone.map(|LoggedKey { key, version }| {
            let latest = restarted_at + u64::from(key.ttl) * SECOND;
            // After the clock was set back, each start may keep the key again.
            let is_open = is_clock_set || key.is_unsure;
            let until = if is_open { latest } else { key.until.min(latest) };
            let is_durable = self.last_durable(std::slice::from_ref(version), end).is_some();
            KeptKey {
                until,
                is_unsure: key.is_unsure || is_clock_set || !is_durable,
                ..key.clone()
            }
        })
        .collect()
    }

    pub fn key_of(&self, id: u64) -> Option<JobKey> {
        self.origins.get(&id)?.last()?.2.clone()
    }

    /// Returns how many jobs one flipped bit may change.
    pub fn jobs_of_a_bit(&self) -> usize {
        self.most_flushed.max(1)
    }

    /// Returns whether a job must be there in some version, so that its key must be there too.
    pub fn is_put_durable(&self, id: u64, end: End) -> bool {
        let versions = self.jobs.get(&id).map_or(&[][..], Vec::as_slice);
        self.last_durable(versions, end).is_some_and(|index| versions[index].job.is_some())
            || versions.first().is_some_and(|version| version.job.is_some())
    }

    /// Checks that of each flush all jobs are gone or none, except jobs that need not be there anyway.
    /// `found` has the ids of all jobs.
    pub fn check_flushes(&self, found: &BTreeSet<u64>, end: End) -> Result<(), String> {
        let was_there = |id: &&u64| {
            let versions = self.jobs.get(*id).map_or(&[][..], Vec::as_slice);
            let first = versions.get(self.first_possible(versions, end));
            first.is_some_and(|version| version.job.is_some())
        };
        for (flush, ids) in &self.flushes {
            let ids = ids.iter().filter(was_there);
            let (left, gone): (Vec<u64>, Vec<u64>) = ids.partition(|id| found.contains(id));
            if !left.is_empty() && !gone.is_empty() {
                return Err(format!(
                    "flush {flush} is there in part\n  gone: {gone:.20?}\n  left: {left:.20?}"
                ));
            }
        }
        Ok(())
    }

    /// Returns whether the job has the tube and the body with which it was put.
    pub fn is_intact(&self, id: u64, found: &FoundJob) -> bool {
        let mut origins = self.origins.get(&id).into_iter().flatten();
        origins.any(|(tube, body, _)| **tube == *found.tube() && **body == *found.body)
    }

    /// A new process starts at that time with these jobs, each in its possible versions, and with these
    /// kept keys. Those in `deleted` may come back once more. A delay may have ended meanwhile, which is not logged.
    pub fn restart(
        &mut self,
        jobs: &[(u64, Vec<Job>)],
        kept_keys: &[KeptKey],
        deleted: &[u64],
        now: u64,
    ) {
        let stored = Version { is_logged: true, ..Version::default() };
        let kept = kept_keys.iter();
        self.kept_keys =
            kept.map(|key| LoggedKey { key: key.clone(), version: stored.clone() }).collect();
        self.jobs.clear();
        self.flushes.clear();
        self.clock_offsets.clear();
        self.commits = 1;
        self.deleted.clear();
        self.deleted.extend(deleted);
        for (id, possible) in jobs {
            let current = possible[0].at(now);
            let all = possible.iter().chain([&current]).enumerate();
            let versions = all.map(|(index, job)| Version {
                job: Some(job.clone()),
                is_logged: index == 0,
                ..Version::default()
            });
            self.jobs.insert(*id, versions.collect());
        }
    }

    /// Returns the index of the first version that may be there after such an end.
    fn first_possible(&self, versions: &[Version], end: End) -> usize {
        self.last_durable(versions, end).unwrap_or(0)
    }

    /// Returns the index of the last version that must be there, unless a later one is.
    fn last_durable(&self, versions: &[Version], end: End) -> Option<usize> {
        let is_durable = |version: &Version| {
            let is_written = version.commits < self.commits;
            version.is_logged
                && match end {
                    End::Killed => is_written,
                    End::PowerCut { synced_within: Some(span) } => {
                        is_written && version.at + span <= self.committed_at
                    }
                    End::PowerCut { synced_within: None } => false,
                    End::Unacknowledged { commits } => version.commits < commits,
                }
        };
        versions.iter().rposition(is_durable)
    }
}

impl Job {
    fn ahead_by(&self, offset: i64) -> Job {
        let ahead = |at: u64| at.saturating_add_signed(offset);
        let state = match self.state {
            State::Delayed { due } => State::Delayed { due: ahead(due) },
            state @ (State::Ready | State::Reserved { .. } | State::Buried { .. }) => state,
        };
        Job { created: ahead(self.created), state, ..self.clone() }
    }

    /// Returns the job after a restart at that time.
    pub fn at(&self, restarted_at: u64) -> Job {
        Job { state: self.state_at(restarted_at), ..self.clone() }
    }

    /// Returns the state after a restart at that time. If the clock was set back, the job is
    /// delayed at most as long as the client asked for.
    fn state_at(&self, restarted_at: u64) -> State {
        match self.state {
            State::Delayed { due } if due <= restarted_at => State::Ready,
            State::Delayed { due } => {
                State::Delayed { due: due.min(restarted_at + u64::from(self.delay) * SECOND) }
            }
            state @ (State::Ready | State::Reserved { .. } | State::Buried { .. }) => state,
        }
    }
}

impl FoundJob {
    pub fn tube(&self) -> &str {
        field(&self.text, "tube").unwrap_or_default()
    }

    fn is(&self, job: &Job, restarted_at: u64) -> bool {
        let value = |key: &str| number(&self.text, key);
        let expected = job.at(restarted_at).document(self.at, value("file"), value);
        self.text == expected && *self.body == *job.body
    }
}

/// The last versions of a job, one a line, as a server that starts at a time shows them.
struct Listed<'v>(&'v [Version], u64);

const VERSIONS_LISTED: usize = 8;

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Listed(versions, at) = *self;
        let omitted = versions.len().saturating_sub(VERSIONS_LISTED);
        write!(f, " one of, behind {omitted} older versions:")?;
        for version in &versions[omitted..] {
            let shown = version.job.as_ref().map(|job| job.at(at).document(at, 0, |_| 0));
            let shown = shown.unwrap_or_else(|| "no job".to_owned()).replace('\n', ", ");
            write!(f, "\n    {shown}{}", if version.is_logged { ", logged" } else { "" })?;
        }
        writeln!(f)
    }
}
