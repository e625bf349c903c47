//! What may come back from the disk: all that became of each job, in order, and from when on
//! nothing of it may be taken back.
//!
//! A job comes back as the last record left it that is sure to be there, or as anything that
//! became of it later: what was not recorded may have been written down all the same when the
//! job was moved to a newer file.

use super::model::{Counts, Place, SECOND};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A job as a restart brings it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    pub tube: Rc<str>,
    /// Without CR LF.
    pub body: Rc<[u8]>,
    pub pri: u32,
    pub delay: u32,
    pub ttr: u32,
    pub created: u64,
    /// The clock was set meanwhile in such a way that `created` is only a guess.
    pub is_age_unknown: bool,
    /// Never reserved.
    pub place: Place,
    pub counts: Counts,
}

/// A job as the server tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub tube: String,
    pub body: Vec<u8>,
    pub state: String,
    pub pri: u32,
    pub delay: u32,
    pub ttr: u32,
    /// In seconds.
    pub age: u64,
    pub time_left: u64,
    pub counts: Counts,
    /// When it was told.
    pub moment: u64,
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// What has been written is there.
    Killed,
    /// What was recorded so many nanoseconds before the last commit is there, and so is all that was
    /// there when it started; nothing at all if that is never synced.
    PowerCut { synced_within: Option<u64> },
}

/// What came of comparing a job with what may be there.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// It is as it may be. What the disk has of it is one of these, which all look alike now.
    Is(Vec<View>),
    /// It is as it may be, but there is more than one moment at which it may be due.
    IsUnclear,
    /// There is none, which may be.
    IsGone,
    /// It is not as it may be.
    Wrong(String),
}

#[derive(Clone, Debug, Default)]
pub struct Journal {
    jobs: BTreeMap<u64, Vec<Version>>,
    /// Of all jobs that ever were, for those that come back from the dead.
    origins: BTreeMap<u64, (Rc<str>, Rc<[u8]>)>,
    /// Deleted when this life began, since nobody knew what they were.
    deleted: Vec<u64>,
    /// How far the time of day has been ahead, since the server started.
    drifts: Vec<i64>,
    /// How many turns have been committed.
    commits: u64,
    committed_at: u64,
}

/// What a job became: this, or nothing.
#[derive(Clone, Debug)]
struct Version {
    view: Option<View>,
    is_recorded: bool,
    at: u64,
    /// How many turns had been committed.
    commits: u64,
    /// The place of the drift in force.
    drift: usize,
}

/// Versions that cannot come back are forgotten so often.
const COMMITS_BETWEEN_PRUNINGS: u64 = 64;

impl Journal {
    // ---- Writing down ----

    pub fn changed(&mut self, id: u64, view: View, is_recorded: bool, at: u64) {
        if !self.jobs.contains_key(&id) {
            self.origins.insert(id, (Rc::clone(&view.tube), Rc::clone(&view.body)));
            let nothing = Version { view: None, is_recorded: true, at: 0, commits: 0, drift: 0 };
            self.jobs.insert(id, vec![nothing]);
        }
        self.add(id, Some(view), is_recorded, at);
    }

    pub fn deleted(&mut self, id: u64, at: u64) {
        self.add(id, None, true, at);
    }

    fn add(&mut self, id: u64, view: Option<View>, is_recorded: bool, at: u64) {
        let drift = self.drifts.len().saturating_sub(1);
        let version = Version { view, is_recorded, at, commits: self.commits, drift };
        self.jobs.get_mut(&id).expect("a job is put first").push(version);
    }

    pub fn drifted(&mut self, drift: i64) {
        if self.drifts.is_empty() {
            self.drifts.push(0);
        }
        self.drifts.push(drift);
    }

    /// A turn has been committed.
    pub fn committed(&mut self, now: u64, end_at_worst: End) {
        self.commits += 1;
        self.committed_at = now;
        if self.commits.is_multiple_of(COMMITS_BETWEEN_PRUNINGS) {
            self.prune(end_at_worst);
        }
    }

    fn prune(&mut self, end: End) {
        let mut jobs = std::mem::take(&mut self.jobs);
        jobs.retain(|_, versions| {
            let first = self.first_possible(versions, end);
            versions.drain(..first);
            versions.len() > 1 || versions[0].view.is_some()
        });
        self.jobs = jobs;
    }

    // ---- Judging ----

    /// The jobs that may be there.
    pub fn candidates(&self) -> Vec<u64> {
        self.jobs.keys().chain(&self.deleted).copied().collect()
    }

    /// All jobs that ever were.
    pub fn all_ids(&self) -> Vec<u64> {
        self.origins.keys().copied().collect()
    }

    /// The highest id that the next life of the server must know.
    pub fn highest_sure_id(&self, end: End) -> u64 {
        if end == (End::PowerCut { synced_within: None }) {
            return 0;
        }
        let is_sure = |versions: &[Version]| {
            self.first_possible(versions, end) > 0 || versions[0].view.is_some()
        };
        let sure = self.jobs.iter().filter(|(_, versions)| is_sure(versions));
        sure.map(|(&id, _)| id).max().unwrap_or(0)
    }

    /// Compares what is there with what may be. `restarted_at` is on the clock of the new life.
    pub fn judge(&self, id: u64, found: Option<&Found>, end: End, restarted_at: u64) -> Verdict {
        let nothing: &[Version] = &[];
        let versions = self
            .jobs
            .get(&id)
            .map_or(nothing, |versions| &versions[self.first_possible(versions, end)..]);
        let Some(found) = found else {
            let is_allowed = versions.is_empty() || versions.iter().any(|it| it.view.is_none());
            return if is_allowed {
                Verdict::IsGone
            } else {
                Verdict::Wrong(format!("job {id} is gone, and should be {:?}", versions))
            };
        };
        if versions.is_empty() && self.deleted.contains(&id) && self.is_intact(id, found) {
            return Verdict::IsUnclear;
        }
        let mut matches: Vec<View> = Vec::new();
        for version in versions {
            for &drift in
                self.drifts.get(version.drift..).filter(|it| !it.is_empty()).unwrap_or(&[0])
            {
                let Some(view) = version.view.as_ref().map(|view| view.to_wall_clock(drift)) else {
                    continue;
                };
                if found.is(&view, restarted_at) && !matches.contains(&view) {
                    matches.push(view);
                }
            }
        }
        let Some(view) = matches.first().cloned() else {
            let drifts = &self.drifts;
            return Verdict::Wrong(format!(
                "job {id} is {found:?}, and should be one of {versions:?}, \
                 the clock being ahead by {drifts:?}"
            ));
        };
        let place = |view: &View| view.place_at(restarted_at);
        if matches.iter().any(|other| place(other) != place(&view)) {
            return Verdict::IsUnclear;
        }
        let is_one = matches.iter().all(|other| other.created == view.created);
        if !is_one {
            matches.iter_mut().for_each(|view| view.is_age_unknown = true);
        }
        Verdict::Is(matches)
    }

    /// Whether this is what was put under this id, whatever became of it since.
    pub fn is_intact(&self, id: u64, found: &Found) -> bool {
        let origin = self.origins.get(&id);
        origin.is_some_and(|(tube, body)| **tube == *found.tube && **body == *found.body)
    }

    /// A new life begins at that moment with these jobs, and without those that had to be deleted,
    /// which may come back once more. A delay may have ended meanwhile, which is not recorded.
    pub fn begin_anew(&mut self, jobs: &[(u64, Vec<View>)], deleted: &[u64], now: u64) {
        self.jobs.clear();
        self.drifts.clear();
        self.commits = 1;
        self.deleted.clear();
        self.deleted.extend(deleted);
        for (id, views) in jobs {
            let placed = View { place: views[0].place_at(now), ..views[0].clone() };
            let all = views.iter().chain([&placed]).enumerate();
            let versions = all.map(|(index, view)| Version {
                view: Some(view.clone()),
                is_recorded: index == 0,
                at: 0,
                commits: 0,
                drift: 0,
            });
            self.jobs.insert(*id, versions.collect());
        }
    }

    /// The first of those that may be there after such an end.
    fn first_possible(&self, versions: &[Version], end: End) -> usize {
        let is_sure = |version: &Version| {
            let is_written = version.commits < self.commits;
            version.is_recorded
                && match end {
                    End::Killed => is_written,
                    End::PowerCut { synced_within: Some(span) } => {
                        is_written && version.at + span <= self.committed_at
                    }
                    End::PowerCut { synced_within: None } => false,
                }
        };
        versions.iter().rposition(is_sure).unwrap_or(0)
    }
}

impl View {
    fn to_wall_clock(&self, drift: i64) -> View {
        let ahead = |moment: u64| moment.saturating_add_signed(drift);
        let place = match self.place {
            Place::Delayed { due } => Place::Delayed { due: ahead(due) },
            place => place,
        };
        View { created: ahead(self.created), place, ..self.clone() }
    }

    /// Where the job is after a restart at that moment. If the clock was set back, it is delayed no
    /// longer than was asked for.
    pub fn place_at(&self, restarted_at: u64) -> Place {
        match self.place {
            Place::Delayed { due } if due <= restarted_at => Place::Ready,
            Place::Delayed { due } => {
                Place::Delayed { due: due.min(restarted_at + u64::from(self.delay) * SECOND) }
            }
            place => place,
        }
    }
}

impl Found {
    fn is(&self, view: &View, restarted_at: u64) -> bool {
        let (state, time_left) = match view.place_at(restarted_at) {
            Place::Delayed { due } => ("delayed", due.saturating_sub(self.moment) / SECOND),
            Place::Buried { .. } => ("buried", 0),
            Place::Ready | Place::Reserved { .. } => ("ready", 0),
        };
        let age = self.moment.saturating_sub(view.created) / SECOND;
        let is_of_age = view.is_age_unknown || self.age == age;
        is_of_age
            && (&*self.tube, &*self.body, &*self.state) == (&*view.tube, &*view.body, state)
            && (self.pri, self.delay, self.ttr) == (view.pri, view.delay, view.ttr)
            && (self.time_left, self.counts) == (time_left, view.counts)
    }
}
