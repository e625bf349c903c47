//! Jobs of which only a limited number may be reserved at the same time: those with one key of `con:`.
//!
//! The jobs of a key are a group, whatever their tubes. While as many of them are reserved as its limit
//! says, the group is full, and its ready jobs are blocked. Of all ready jobs of a group in one tube only
//! the first matters, because it comes before the others: it is offered, among the ready jobs of the tube,
//! or it is parked.
//!
//! ```text
//!            first of the group in the tube              the others
//!   ready    offered: in `Tube::ready`                   behind it
//!            parked: found when a slot becomes free
//! ```
//!
//! A job that becomes the first is parked, and only [`Queue::offer_parked`] offers it, at once if there is a
//! slot, and gives it to a worker that waits. A group may become full while its jobs are offered in a thousand
//! other tubes. So these are parked when a search finds them at the front of their tube. Each of these steps
//! takes O(log n). A job without such a key is not touched.
//!
//! A group is known by a hash of its key with the secret of the server, not by the key itself.

use super::Queue;
use super::due::LATE;
use super::job::{Job, State};
use super::tube::Tube;
use crate::engine::collections::slab::PagedSlab;
use crate::engine::digest::Con;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, Key, MemberKey, TubeKey};
use crate::engine::time::Nanos;
use std::collections::{BTreeMap, BTreeSet, TryReserveError};

/// A job in its group.
#[derive(Debug)]
pub struct Member {
    pub con: Con,
    place: Place,
}

/// The place of a job in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// It is not ready.
    Elsewhere,
    /// It is ready, and not the first of its group in its tube.
    Behind,
    /// It is the first, and among the ready jobs of its tube.
    Offered,
    /// It is the first, and waits for a slot.
    Parked,
}

/// All groups.
#[derive(Debug, Default)]
pub struct Groups {
    by_key: BTreeMap<u64, Group>,
    /// The ready jobs of all groups.
    ready: BTreeSet<ReadyJob>,
    /// The parked jobs, by group and rank.
    parked: BTreeSet<ParkedJob>,
    /// The reserved jobs, by tube and epoch.
    reserved: BTreeSet<(TubeKey, u8, JobKey)>,
    /// Groups with a free slot that have parked jobs.
    freed: BTreeSet<u64>,
    /// Of many of these, the one whose turn is next.
    turn: u64,
    /// The last parked job was not offered, because there was no memory for it.
    is_refused: bool,
    /// The number of ready jobs of full groups.
    blocked: u64,
    /// The jobs with a group.
    members: PagedSlab<MemberKey, Member>,
}

/// Group, priority and id of a parked job.
type ParkedJob = (u64, u32, u64, JobKey);

/// Tube, epoch, group, priority and id of a ready job.
pub type ReadyJob = (TubeKey, u8, u64, u32, u64, JobKey);

#[derive(Debug, Default)]
struct Group {
    /// How many of its jobs have each limit.
    limits: BTreeMap<u32, u32>,
    reserved: u32,
    ready: u32,
}

/// Units of work to add a job to the ready ones of its group, to remove it, to free its slot, to offer or to park it.
const WORK_PER_CHANGE: usize = 4;
/// Parked jobs that are offered in one step, each in about 1 us.
const OFFERED_PER_STEP: usize = 256;
/// Of at most this many groups the best parked job is searched. More take turns.
const FEW_GROUPS: usize = 16;
/// About what a member and a group take, in bytes, with the free space in the nodes of the maps.
const MEMBER_BYTES: u64 = 144;
const GROUP_BYTES: u64 = 224;
/// The maps take at most this many bytes for one more ready job: a node each, and one more if a node is divided.
const CHANGE_BYTES: usize = 4096;

impl Groups {
    /// The most memory that one more member takes, in bytes.
    pub const MOST_GROWTH: u64 = MEMBER_BYTES + GROUP_BYTES;

    /// Returns the memory of all groups, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        self.members.len() as u64 * MEMBER_BYTES + self.by_key.len() as u64 * GROUP_BYTES
    }

    /// Returns whether no job has a group, as is usual.
    fn are_unused(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns the number of ready jobs that cannot be reserved because their groups are full.
    pub fn blocked(&self) -> u64 {
        self.blocked
    }

    /// Ensures that one more job can have a group.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        headroom::ensure_free(Headroom::Half, CHANGE_BYTES)?;
        self.members.try_reserve_one()
    }

    pub fn member(&self, key: MemberKey) -> Option<&Member> {
        self.members.get(key)
    }

    pub fn member_mut(&mut self, key: MemberKey) -> Option<&mut Member> {
        self.members.get_mut(key)
    }

    /// Adds a job to its group. The largest limit of all its jobs counts.
    pub fn join(&mut self, con: Con) -> MemberKey {
        self.change(con.group, |group| *group.limits.entry(con.limit).or_default() += 1);
        self.members.insert(Member { con, place: Place::Elsewhere })
    }

    /// Removes a job that is neither ready nor reserved from its group, if it has one.
    pub fn leave(&mut self, key: MemberKey) {
        if let Some(Member { con, .. }) = self.members.remove(key) {
            self.forget_limit(con);
        }
    }

    /// Does not count the limit of a member any more. The limit 0 is not counted.
    fn forget_limit(&mut self, Con { group: key, limit }: Con) {
        if limit == 0 {
            return;
        }
        self.change(key, |group| {
            let count = group.limits.get_mut(&limit).expect("a member has counted its limit");
            *count -= 1;
            if *count == 0 {
                group.limits.remove(&limit);
            }
        });
    }

    /// Returns the group with a free slot whose parked job is offered next: of a few the one with the best job.
    fn next_freed(&self) -> Option<u64> {
        if self.freed.len() <= FEW_GROUPS {
            let rank = |group: &u64| self.first_parked(*group).map(|parked| (parked.1, parked.2));
            return self.freed.iter().copied().min_by_key(rank);
        }
        self.freed.range(self.turn..).next().or(self.freed.first()).copied()
    }

    fn is_full(&self, group: u64) -> bool {
        self.by_key[&group].is_full()
    }

    /// Changes a group, and notes whether it has a free slot now. Without a limit it has no job, and is gone.
    fn change(&mut self, key: u64, change: impl FnOnce(&mut Group)) {
        let group = self.by_key.entry(key).or_default();
        let before = group.blocked();
        change(group);
        self.blocked = self.blocked - before + group.blocked();
        if group.limits.is_empty() {
            self.by_key.remove(&key);
        } else if group.ready > 0 && !group.is_full() && self.first_parked(key).is_some() {
            self.freed.insert(key);
        }
    }

    fn first_parked(&self, group: u64) -> Option<ParkedJob> {
        let first = self.parked.range((group, 0, 0, JobKey::default())..).next();
        first.filter(|parked| parked.0 == group).copied()
    }

    /// Returns the first ready job of a group in a tube.
    fn first_ready(&self, tube: TubeKey, epoch: u8, group: u64) -> Option<JobKey> {
        let first = self.ready_from(Groups::place(tube, epoch, group)).next();
        first.filter(|ready| ready.2 == group).map(|ready| ready.5)
    }

    /// Returns the best ready job with a group in a tube; of many groups, that of some.
    fn best_in_tube(&self, tube: TubeKey, epoch: u8) -> Option<JobKey> {
        let first_from = |group: u64| self.ready_from(Groups::place(tube, epoch, group)).next();
        let next = |it: &&ReadyJob| it.2.checked_add(1).and_then(first_from);
        let firsts = std::iter::successors(first_from(0), next).take(OFFERED_PER_STEP);
        firsts.min_by_key(|it| (it.3, it.4)).map(|it| it.5)
    }

    /// Returns the place before the ready jobs of a group in a tube. All groups come after 0.
    pub fn place(tube: TubeKey, epoch: u8, group: u64) -> ReadyJob {
        (tube, epoch, group, 0, 0, JobKey::default())
    }

    /// Returns the ready jobs with a group in a tube, from this place on.
    pub fn ready_from(&self, place: ReadyJob) -> impl Iterator<Item = &ReadyJob> {
        let from = self.ready.range(place..);
        from.take_while(move |ready| (ready.0, ready.1) == (place.0, place.1))
    }
}

impl Group {
    fn is_full(&self) -> bool {
        // A group that is being made or removed has no limit, and no ready job.
        self.limits.last_key_value().is_none_or(|(&limit, _)| self.reserved >= limit)
    }

    fn blocked(&self) -> u64 {
        if self.is_full() { self.ready.into() } else { 0 }
    }
}

impl Queue {
    #[inline]
    fn member(&self, job: JobKey) -> Option<&Member> {
        // Looking at the job would cost more.
        if self.unique.groups.are_unused() {
            return None;
        }
        self.unique.member(self.jobs[job].unique()?)
    }

    fn place_in_group(&self, job: JobKey) -> Place {
        self.member(job).expect("only members are looked up").place
    }

    fn set_place(&mut self, job: JobKey, place: Place) {
        let key = self.jobs[job].unique().expect("only members have places");
        self.unique.member_mut(key).expect("only members have places").place = place;
    }

    /// Returns whether a ready job cannot be reserved because its group is full.
    pub(super) fn is_blocked(&self, job: JobKey) -> bool {
        self.member(job).is_some_and(|member| self.unique.groups.is_full(member.con.group))
    }

    fn ready_job(&self, key: JobKey, group: u64) -> ReadyJob {
        let Job { tube, epoch, pri, id, .. } = self.jobs[key];
        (tube, epoch, group, pri, id, key)
    }

    fn parked_job(&self, key: JobKey, group: u64) -> ParkedJob {
        let Job { pri, id, .. } = self.jobs[key];
        (group, pri, id, key)
    }

    // ---- Ready jobs ----

    /// Adds a detached job to the ready jobs of its tube. Returns `false` if there is no memory for it. A job
    /// with a group comes there with [`Queue::offer_parked`], which must follow.
    pub(super) fn add_ready(&mut self, key: JobKey) -> bool {
        match self.member(key) {
            None => self.insert_ready(key),
            Some(member) => {
                let group = member.con.group;
                let has_room = headroom::ensure_free(Headroom::Half, CHANGE_BYTES).is_ok();
                if has_room {
                    self.add_member(key, group);
                }
                has_room
            }
        }
    }

    fn insert_ready(&mut self, key: JobKey) -> bool {
        let tube = &mut self.tubes[self.jobs[key].tube];
        tube.ready.insert(key.number(), tube.postponed.is_empty(), &mut self.jobs)
    }

    #[cold]
    fn add_member(&mut self, key: JobKey, group: u64) {
        self.work.spend(WORK_PER_CHANGE);
        let ready = self.ready_job(key, group);
        let first = self.unique.groups.first_ready(ready.0, ready.1, group);
        self.unique.groups.ready.insert(ready);
        self.unique.groups.change(group, |group| group.ready += 1);
        self.tubes[ready.0].behind += 1;
        self.set_place(key, Place::Behind);
        if first.is_none_or(|first| self.jobs[key].rank() < self.jobs[first].rank()) {
            if let Some(first) = first {
                self.withdraw(first, group);
            }
            self.park(key, group);
        }
    }

    /// Removes a job from the ready jobs of its tube. [`Queue::offer_parked`] must follow.
    pub(super) fn remove_ready(&mut self, key: JobKey) {
        match self.member(key) {
            None => self.tubes[self.jobs[key].tube].ready.remove(key.number(), &mut self.jobs),
            Some(member) => self.remove_member(key, member.con.group),
        }
    }

    #[cold]
    fn remove_member(&mut self, key: JobKey, group: u64) {
        self.work.spend(WORK_PER_CHANGE);
        let ready = self.ready_job(key, group);
        let was_first = self.place_in_group(key) != Place::Behind;
        self.withdraw(key, group);
        self.tubes[ready.0].behind -= 1;
        self.forget_ready(ready);
        if was_first && let Some(next) = self.unique.groups.first_ready(ready.0, ready.1, group) {
            self.park(next, group);
        }
    }

    fn forget_ready(&mut self, ready: ReadyJob) {
        self.set_place(ready.5, Place::Elsewhere);
        self.unique.groups.ready.remove(&ready);
        self.unique.groups.change(ready.2, |group| group.ready -= 1);
    }

    /// Takes a ready job back from where it is found: it is behind others.
    fn withdraw(&mut self, key: JobKey, group: u64) {
        match self.place_in_group(key) {
            Place::Offered => {
                let tube = &mut self.tubes[self.jobs[key].tube];
                tube.ready.remove(key.number(), &mut self.jobs);
                tube.behind += 1;
            }
            Place::Parked => {
                let parked = self.parked_job(key, group);
                self.unique.groups.parked.remove(&parked);
            }
            Place::Behind | Place::Elsewhere => {}
        }
        self.set_place(key, Place::Behind);
    }

    /// Lets the first job of a group in a tube, which is behind others, wait for a slot or for
    /// [`Queue::offer_parked`].
    fn park(&mut self, key: JobKey, group: u64) {
        self.set_place(key, Place::Parked);
        let parked = self.parked_job(key, group);
        let groups = &mut self.unique.groups;
        groups.parked.insert(parked);
        groups.turn = group;
        groups.change(group, |_| {});
    }

    /// Parks the first ready job of a tube if it is blocked. Returns whether it was.
    #[inline]
    pub(super) fn park_first(&mut self, tube: TubeKey) -> bool {
        if self.unique.groups.are_unused() {
            return false;
        }
        let Some(first) = self.tubes[tube].first_ready(&self.jobs) else { return false };
        let is_blocked = self.is_blocked(first);
        if is_blocked {
            let group = self.member(first).expect("it is blocked").con.group;
            self.withdraw(first, group);
            self.park(first, group);
            self.work.spend(WORK_PER_CHANGE);
        }
        is_blocked
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
    pub fn first_ready(&mut self, tube: TubeKey) -> Option<JobKey> {
        let _ = (0..OFFERED_PER_STEP).find(|_| !self.park_first(tube));
        let Tube { epoch, .. } = self.tubes[tube];
        let first = self.tubes[tube].first_ready(&self.jobs);
        first.or_else(|| self.unique.groups.best_in_tube(tube, epoch))
    }

    /// Returns the ready jobs of a tube that are not among [`Tube::ready`].
    pub fn ready_behind(&self, tube: TubeKey) -> impl Iterator<Item = JobKey> + '_ {
        let epoch = self.tubes[tube].epoch;
        let all = self.unique.groups.ready_from(Groups::place(tube, epoch, 0));
        all.map(|ready| ready.5).filter(|&job| self.place_in_group(job) != Place::Offered)
    }

    // ---- Slots ----

    /// Takes a slot for a job that is about to be reserved.
    pub(super) fn take_slot(&mut self, key: JobKey) {
        let Some(con) = self.member(key).map(|member| member.con) else { return };
        let Job { tube, epoch, .. } = self.jobs[key];
        self.unique.groups.reserved.insert((tube, epoch, key));
        self.unique.groups.change(con.group, |group| group.reserved += 1);
    }

    /// Frees the slot of a reserved job, unless a flush has freed it. [`Queue::offer_parked`] must follow.
    pub(super) fn free_slot(&mut self, key: JobKey) {
        let Some(con) = self.member(key).map(|member| member.con) else { return };
        self.work.spend(WORK_PER_CHANGE);
        let Job { tube, epoch, .. } = self.jobs[key];
        if self.unique.groups.reserved.remove(&(tube, epoch, key)) {
            self.unique.groups.change(con.group, |group| group.reserved -= 1);
        }
    }

    /// Offers parked jobs of groups that have a free slot: gives them to workers that wait.
    #[inline]
    pub fn offer_parked(&mut self) {
        if !self.unique.groups.freed.is_empty() {
            self.offer_freed();
        }
    }

    #[cold]
    fn offer_freed(&mut self) {
        for _ in 0..OFFERED_PER_STEP {
            let Some(group) = self.unique.groups.next_freed() else { return };
            self.work.spend(WORK_PER_CHANGE);
            self.unique.groups.turn = group.wrapping_add(1);
            // A group without jobs may be gone.
            let first = self.unique.groups.first_parked(group);
            let Some((.., first)) = first.filter(|_| !self.unique.groups.is_full(group)) else {
                self.unique.groups.freed.remove(&group);
                continue;
            };
            if self.is_flushed(&self.jobs[first]) {
                self.withdraw(first, group);
                continue;
            }
            self.unique.groups.is_refused = !self.insert_ready(first);
            if self.unique.groups.is_refused {
                return;
            }
            self.withdraw(first, group);
            self.set_place(first, Place::Offered);
            self.tubes[self.jobs[first].tube].behind -= 1;
            self.announce(first);
        }
    }

    /// Returns when the next tick offers parked jobs: at once if some can be, but later without memory.
    pub(super) fn offers_due(&self) -> Nanos {
        match &self.unique.groups {
            groups if groups.freed.is_empty() => Nanos::NEVER,
            groups if groups.is_refused => self.ticked_at + LATE,
            _ => self.ticked_at,
        }
    }

    // ---- Flushes ----

    /// Takes a flushed job out of its group, before it is freed.
    pub(super) fn forget_flushed(&mut self, key: JobKey) {
        let Some(group) = self.member(key).map(|member| member.con.group) else { return };
        match self.jobs[key].state {
            State::Ready(_) => {
                if self.place_in_group(key) == Place::Parked {
                    self.withdraw(key, group);
                }
                self.forget_ready(self.ready_job(key, group));
            }
            State::Reserved(_) => self.free_slot(key),
            State::Delayed(_) | State::Postponed(_) | State::Buried(_) | State::Detached => {}
        }
    }

    /// Frees the slots of jobs that a flush deletes while workers hold them, at the moment of the flush. With very
    /// many the rest follows in its steps.
    pub(super) fn free_flushed_slots(&mut self, tube: TubeKey, epoch: u8) {
        let _ = (0..OFFERED_PER_STEP).find(|_| !self.free_flushed_slot(tube, epoch));
    }

    /// Frees the slot of a job that a flush has deleted while a worker holds it, and forgets its limit. Returns
    /// `false` if there is none.
    pub(super) fn free_flushed_slot(&mut self, tube: TubeKey, epoch: u8) -> bool {
        let first = self.unique.groups.reserved.range((tube, epoch, JobKey::default())..).next();
        let Some(&(_, _, job)) = first.filter(|it| (it.0, it.1) == (tube, epoch)) else {
            return false;
        };
        self.free_slot(job);
        let key = self.jobs[job].unique().expect("it had a slot");
        if let Some(member) = self.unique.member_mut(key) {
            let con = member.con;
            member.con.limit = 0;
            self.unique.groups.forget_limit(con);
        }
        true
    }

    // ---- Checking ----

    /// Checks that each group counts its jobs, and that its first job in each tube can be found.
    pub(super) fn check_groups(&self) {
        let groups = &self.unique.groups;
        let mut counted: BTreeMap<u64, Group> = BTreeMap::new();
        let (mut members, mut ready, mut parked) = (0, 0, 0);
        let mut behind: BTreeMap<TubeKey, u32> = BTreeMap::new();
        for (key, job) in self.jobs.iter() {
            let Some(&Member { con: Con { group, limit }, place }) = self.member(key) else {
                continue;
            };
            members += 1;
            if limit == 0 {
                // A flush has deleted it.
                continue;
            }
            let of_group = counted.entry(group).or_default();
            *of_group.limits.entry(limit).or_default() += 1;
            let is_held = groups.reserved.contains(&(job.tube, job.epoch, key));
            of_group.reserved += u32::from(is_held);
            let is_ready = matches!(job.state, State::Ready(_));
            assert_eq!(is_ready, place != Place::Elsewhere, "job {} is {place:?}", job.id);
            if !is_ready {
                let is_reserved = matches!(job.state, State::Reserved(_));
                assert!(is_reserved || !is_held, "job {} has a slot", job.id);
                assert!(is_held || !is_reserved || self.is_flushed(job), "job {}", job.id);
                continue;
            }
            (of_group.ready, ready) = (of_group.ready + 1, ready + 1);
            assert!(groups.ready.contains(&self.ready_job(key, group)), "job {} is lost", job.id);
            let is_parked = groups.parked.contains(&self.parked_job(key, group));
            assert_eq!(is_parked, place == Place::Parked, "job {} is parked", job.id);
            parked += usize::from(is_parked);
            if self.is_flushed(job) {
                continue;
            }
            *behind.entry(job.tube).or_default() += u32::from(place != Place::Offered);
            let first = groups.first_ready(job.tube, job.epoch, group) == Some(key);
            assert_eq!(first, place != Place::Behind, "job {} is {place:?}", job.id);
            let waits = place == Place::Parked && !groups.is_full(group);
            assert!(!waits || groups.freed.contains(&group), "job {} stays parked", job.id);
        }
        let counts = (members, ready, parked);
        assert_eq!(counts, (groups.members.len(), groups.ready.len(), groups.parked.len()));
        for (_, tube) in self.tubes.entries().filter(|(_, tube)| tube.behind > 0) {
            assert!(!behind.is_empty(), "tube {} has no job behind others", tube.name);
        }
        for (key, count) in behind {
            assert_eq!(self.tubes[key].behind, count, "jobs behind others in {key:?}");
        }
        assert_eq!(counted.len(), groups.by_key.len(), "groups with jobs, and groups");
        let mut blocked = 0;
        for (key, group) in &groups.by_key {
            let Group { limits, reserved, ready } = &counted[key];
            let same = (limits, reserved, ready) == (&group.limits, &group.reserved, &group.ready);
            assert!(same, "group {group:?}, counted {:?}", counted[key]);
            blocked += group.blocked();
        }
        assert_eq!(blocked, groups.blocked, "blocked jobs");
    }
}
