//! Jobs of which only a limited number may be reserved at the same time: those with one key of `con:`.
//!
//! The jobs of a key are a group, whatever their tubes. While as many of them are reserved as its limit
//! says, the group is full, and its ready jobs are blocked. Of all ready jobs of a group in one tube only
//! the first matters, because it comes before the others: it is offered, among the ready jobs of the tube,
//! or it is parked.
//!
//! ```text
//!            first of the group in the tube              the others
//!   ready    offered: in `TubeJobs::ready`               behind it
//!            parked: found when a slot becomes free
//! ```
//!
//! A job that becomes the first is parked, and only [`Queue::offer_parked`] offers it, at once if there is a
//! slot, and gives it to a worker that waits. A group may become full while its jobs are offered in a thousand
//! other tubes. So these are parked when a search finds them at the front of their tube. Each of these steps
//! takes O(log n). A job without such a key is not touched.

use super::Queue;
use super::groups::{Member, MemberPlace, MemberRank};
use super::job::{Job, State};
use super::tube::Tube;
use crate::engine::keys::{JobKey, MemberKey, TubeKey};
use crate::engine::time::Nanos;
use std::collections::BTreeMap;

/// Units of work to add a job to the ready ones of its group, to remove it, to free its slot, to offer or to park it.
const WORK_PER_CHANGE: usize = 4;
/// The groups of a tube that are compared in one unit of work.
const COMPARED_PER_WORK: usize = 2;
/// A look at the first ready job of a tube parks or compares this many jobs, and a flush frees this many slots at once.
const MOST_AT_ONCE: usize = 256;

impl Queue {
    /// Returns the key of a job in its group, if it has one.
    #[inline]
    fn member_key(&self, job: JobKey) -> Option<MemberKey> {
        // Looking at the job would cost more.
        if self.unique.groups.members.is_empty() {
            return None;
        }
        self.unique.member_of(self.jobs[job].unique()?)
    }

    /// Returns whether a ready job cannot be reserved because its group is full.
    pub(super) fn is_blocked(&self, job: JobKey) -> bool {
        self.member_key(job).is_some_and(|member| self.unique.groups.is_full(member))
    }

    // ---- Ready jobs ----

    /// Adds a detached job to the ready jobs of its tube. A job with a group comes there with
    /// [`Queue::offer_parked`], which must follow.
    pub(super) fn add_ready(&mut self, key: JobKey, tube: TubeKey) {
        match self.member_key(key) {
            None => self.insert_ready(key, tube),
            Some(member) => self.add_member(key, member),
        }
    }

    fn insert_ready(&mut self, key: JobKey, tube: TubeKey) {
        self.tubes[tube].jobs.ready.insert(key, &mut self.jobs);
    }

    #[cold]
    fn add_member(&mut self, job: JobKey, key: MemberKey) {
        self.work.spend(WORK_PER_CHANGE);
        let rank = self.rank_of(job, key);
        let first = self.unique.groups.first_of_group(rank);
        self.unique.groups.add(key, rank);
        self.tubes[rank.tube].jobs.behind += 1;
        if first.is_none_or(|first| rank < self.unique.groups.members[first].rank) {
            if let Some(first) = first {
                self.withdraw(first);
            }
            self.unique.groups.move_to(key, MemberPlace::Parked);
        }
    }

    /// Returns the rank of a job in its group while it is ready.
    fn rank_of(&self, job: JobKey, key: MemberKey) -> MemberRank {
        let Job { tube, epoch, pri, id, .. } = self.jobs[job];
        let group = self.unique.groups.members[key].rank.group;
        MemberRank { tube, epoch, has_slot: false, group, pri, id }
    }

    /// Removes a job from the ready jobs of its tube. [`Queue::offer_parked`] must follow.
    pub(super) fn remove_ready(&mut self, key: JobKey, tube: TubeKey) {
        match self.member_key(key) {
            None => self.tubes[tube].jobs.ready.remove(key, &mut self.jobs),
            Some(member) => self.remove_member(member),
        }
    }

    #[cold]
    fn remove_member(&mut self, key: MemberKey) {
        self.work.spend(WORK_PER_CHANGE);
        let Member { rank, place, .. } = self.unique.groups.members[key];
        self.withdraw(key);
        self.tubes[rank.tube].jobs.behind -= 1;
        let groups = &mut self.unique.groups;
        groups.remove(key);
        if place != MemberPlace::Behind
            && let Some(next) = groups.first_of_group(rank)
        {
            groups.move_to(next, MemberPlace::Parked);
        }
    }

    /// Takes a ready job back from where it is found: it is behind others.
    fn withdraw(&mut self, key: MemberKey) {
        let Member { job, rank, place, .. } = self.unique.groups.members[key];
        if place == MemberPlace::Offered {
            let tube = &mut self.tubes[rank.tube];
            tube.jobs.ready.remove(job, &mut self.jobs);
            tube.jobs.behind += 1;
        }
        self.unique.groups.move_to(key, MemberPlace::Behind);
    }

    /// Parks the first ready job of a tube if it is blocked. Returns whether it was.
    #[inline]
    pub(super) fn park_first(&mut self, tube: TubeKey) -> bool {
        if self.unique.groups.members.is_empty() {
            return false;
        }
        let first = self.tubes[tube].first_ready(&self.jobs);
        let first = first.and_then(|first| self.member_key(first));
        let blocked = first.filter(|&first| self.unique.groups.is_full(first));
        if let Some(first) = blocked {
            self.withdraw(first);
            self.unique.groups.move_to(first, MemberPlace::Parked);
            self.work.spend(WORK_PER_CHANGE);
        }
        blocked.is_some()
    }

    /// Parks all of these. Returns `false` without work left for that.
    #[inline]
    pub(super) fn park_blocked(&mut self, tube: TubeKey) -> bool {
        while self.park_first(tube) {
            if !self.work.is_left() {
                return false;
            }
        }
        true
    }

    /// Returns the ready job that a worker reserves next while the tube is not paused; if all are blocked, the
    /// best of these.
    pub fn first_unblocked(&mut self, tube: TubeKey) -> Option<JobKey> {
        for _ in 0..MOST_AT_ONCE {
            if !self.park_first(tube) {
                break;
            }
        }
        let Tube { epoch, .. } = self.tubes[tube];
        let first = self.tubes[tube].first_ready(&self.jobs);
        first.or_else(|| {
            let (best, compared) = self.unique.groups.best_in_tube(tube, epoch, MOST_AT_ONCE);
            self.work.spend_for(compared, COMPARED_PER_WORK);
            best
        })
    }

    /// Returns the ready jobs of a tube that are not among [`TubeJobs::ready`](super::tube::TubeJobs).
    pub fn ready_behind(&self, tube: TubeKey) -> impl Iterator<Item = JobKey> + '_ {
        let all = self.unique.groups.ready_from(MemberRank::first(tube, self.tubes[tube].epoch));
        all.filter(|member| member.place != MemberPlace::Offered).map(|member| member.job)
    }

    // ---- Slots ----

    /// Takes a slot for a detached job that is about to be reserved.
    pub(super) fn take_slot(&mut self, job: JobKey) {
        if let Some(key) = self.member_key(job) {
            self.unique.groups.add(key, MemberRank { has_slot: true, ..self.rank_of(job, key) });
        }
    }

    /// Frees the slot of a reserved job, unless a flush has freed it, or takes a flushed job from the ready ones of its
    /// group. [`Queue::offer_parked`] must follow.
    pub(super) fn free_slot(&mut self, job: JobKey) {
        let Some(key) = self.member_key(job) else { return };
        self.work.spend(WORK_PER_CHANGE);
        self.unique.groups.remove(key);
    }

    /// Offers parked jobs of groups that have a free slot: gives them to workers that wait. Returns `false` if there
    /// are more of them than a step offers, of which one may be the best job of a tube.
    #[inline]
    pub fn offer_parked(&mut self) -> bool {
        if self.unique.groups.has_freed() {
            self.offer_freed();
        }
        !self.unique.groups.has_freed()
    }

    #[cold]
    fn offer_freed(&mut self) {
        let rest = self.work.give(self.limits.offers_work);
        while self.work.is_left()
            && let Some(first) = self.unique.groups.next_to_offer()
        {
            self.work.spend(WORK_PER_CHANGE);
            let groups = &mut self.unique.groups;
            let job = groups.members[first].job;
            groups.move_to(first, MemberPlace::Behind);
            if !self.is_flushed(&self.jobs[job]) {
                let tube = self.jobs[job].tube;
                self.insert_ready(job, tube);
                self.unique.groups.members[first].place = MemberPlace::Offered;
                self.tubes[tube].jobs.behind -= 1;
                self.announce(job, tube);
            }
        }
        self.work.end(rest);
    }

    /// Returns when the next tick offers parked jobs: at once if some can be.
    pub(super) fn offers_due(&self) -> Nanos {
        if self.unique.groups.has_freed() { Nanos::ZERO } else { Nanos::NEVER }
    }

    // ---- Flushes ----

    /// Returns a flushed ready job that is behind others.
    pub(super) fn flushed_behind(&self, tube: TubeKey, epoch: u8) -> Option<JobKey> {
        let groups = &self.unique.groups;
        groups.first_from(MemberRank::first(tube, epoch)).map(|first| groups.members[first].job)
    }

    /// Frees the slots of jobs that a flush deletes while workers hold them, at the moment of the flush. With very
    /// many the rest follows in its steps.
    pub(super) fn free_flushed_slots(&mut self, tube: TubeKey, epoch: u8) {
        for _ in 0..MOST_AT_ONCE {
            if !self.free_flushed_slot(tube, epoch) {
                break;
            }
        }
    }

    /// Frees the slot of a job that a flush has deleted while a worker holds it, and forgets its limit. Returns
    /// `false` if there is none.
    pub(super) fn free_flushed_slot(&mut self, tube: TubeKey, epoch: u8) -> bool {
        let least = MemberRank { has_slot: true, ..MemberRank::first(tube, epoch) };
        let first = self.unique.groups.first_from(least);
        if let Some(key) = first {
            self.work.spend(WORK_PER_CHANGE);
            self.unique.groups.remove(key);
            self.unique.groups.forget_limit(key);
        }
        first.is_some()
    }

    // ---- Checking ----

    /// Checks that each group counts its jobs, and that its first job in each tube can be found.
    pub(super) fn check_groups(&self) {
        let groups = &self.unique.groups;
        let mut behind: BTreeMap<TubeKey, u32> = BTreeMap::new();
        groups.check(|key, member| {
            let (job, place) = (&self.jobs[member.job], member.place);
            assert_eq!(self.member_key(member.job), Some(key), "the member of job {}", job.id);
            let is_right = match job.state {
                State::Ready(_) => !matches!(place, MemberPlace::Elsewhere | MemberPlace::Slot),
                State::Reserved(_) => place == MemberPlace::Slot || self.is_flushed(job),
                State::Delayed(_) | State::Buried(_) | State::Detached | State::Kept(_) => {
                    place == MemberPlace::Elsewhere
                }
            };
            assert!(is_right, "job {}, {:?}, is {place:?}", job.id, job.state);
            let MemberRank { has_slot, .. } = member.rank;
            let rank = MemberRank { has_slot, ..self.rank_of(member.job, key) };
            assert!(
                place == MemberPlace::Elsewhere || rank == member.rank,
                "the rank of job {}",
                job.id
            );
            if matches!(job.state, State::Ready(_)) && !self.is_flushed(job) {
                let is_first = groups.first_of_group(rank) == Some(key);
                assert_eq!(is_first, place != MemberPlace::Behind, "job {} is {place:?}", job.id);
                *behind.entry(job.tube).or_default() += u32::from(place != MemberPlace::Offered);
            }
        });
        for (key, tube) in self.tubes.entries() {
            let count = behind.get(&key).copied().unwrap_or_default();
            assert_eq!(tube.jobs.behind, count, "jobs behind others in tube {}", tube.name);
        }
    }
}
