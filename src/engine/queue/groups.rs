//! The jobs with one key of `con:` are a group: which of them are ready or have a slot, and in which order.
//!
//! A group is known by a hash of its key with the secret of the server, not by the key itself. All links are in
//! the members and the groups: only a put needs memory. The rules are in `queue/con.rs`.

use crate::engine::collections::chains::{HashSlab, Hashed, low_half, mix};
use crate::engine::collections::list::{Linked, Links, List};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::collections::tree::{Order, Tree};
use crate::engine::digest::Con;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{GroupKey, JobKey, Key, MemberKey, TubeKey};
use std::cell::Cell;
use std::collections::BTreeMap;

/// A job in its group.
pub struct Member {
    pub con: Con,
    pub job: JobKey,
    /// Its rank when it became ready or was reserved.
    pub rank: MemberRank,
    pub place: MemberPlace,
    /// In [`Groups::placed`], and among the parked jobs of the group.
    links: [Links; 2],
}

/// The order of jobs with groups: those of a tube are next to each other, the ready ones of a group in it too.
/// A flush changes the epoch of a tube.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct MemberRank {
    pub tube: TubeKey,
    pub epoch: u8,
    pub has_slot: bool,
    pub group: GroupKey,
    pub pri: u32,
    pub id: u64,
}

/// The place of a job in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberPlace {
    /// It is neither ready nor reserved, or a flush has freed its slot.
    Elsewhere,
    /// It is reserved, and has a slot.
    Slot,
    /// It is ready, and not the first of its group in its tube.
    Behind,
    /// It is the first, and among the ready jobs of its tube.
    Offered,
    /// It is the first, and waits for a slot.
    Parked,
}

/// All groups.
#[derive(Default)]
pub struct Groups {
    groups: HashSlab<GroupKey, Group>,
    /// No job has a group as long as it is empty, as is usual.
    pub members: Members,
    /// The ready jobs, and the reserved ones with a slot.
    placed: Tree<InTube>,
    /// Groups with a free slot that have parked jobs.
    freed: List,
    /// The number of ready jobs of full groups, which cannot be reserved.
    pub blocked: u64,
}

type Members = PagedSlab<MemberKey, Member>;

#[derive(Debug, Default)]
struct Group {
    /// The hash of its key.
    hash: u64,
    /// How many of its jobs have each limit.
    limits: BTreeMap<u32, u32>,
    slots: u32,
    ready: u32,
    parked: Tree<InGroup, PARKED>,
    /// It is in [`Groups::freed`].
    is_freed: bool,
    links: Links,
    /// The next group in its chain.
    next: Cell<u32>,
}

/// By rank.
struct InTube;

/// By priority and id.
#[derive(Debug)]
struct InGroup;

/// The number of the links of parked jobs.
const PARKED: usize = 1;
/// Of this many groups with a free slot the best parked job is searched.
const FEW_GROUPS: usize = 16;
/// About what the limits of a group take, in bytes.
const LIMITS_BYTES: usize = 120;

impl Groups {
    /// The most memory that one more member takes, in bytes.
    pub const MOST_GROWTH: u64 = (size_of::<Option<Member>>() + LIMITS_BYTES) as u64
        + HashSlab::<GroupKey, Group>::MOST_GROWTH;

    /// Returns the memory of all groups, in bytes.
    pub fn taken_bytes(&self) -> u64 {
        let limits = self.groups.len() * LIMITS_BYTES;
        self.members.taken_bytes() + self.groups.taken_bytes() + limits as u64
    }

    /// Ensures that one more job can have a group.
    pub fn try_reserve_one(&mut self) -> Result<(), NoMemory> {
        headroom::ensure_free(Headroom::Half, LIMITS_BYTES)?;
        self.groups.try_reserve_one()?;
        self.members.try_reserve_one()
    }

    /// Adds a job to its group. The largest limit of all its jobs counts.
    pub fn join(&mut self, con: Con, job: JobKey) -> MemberKey {
        let is_same = |group: &Group| group.hash == con.group;
        let found = self.groups.find_by(low_half(con.group), is_same).map(|(key, _)| key);
        let new = Group { hash: con.group, ..Group::default() };
        let group = found.unwrap_or_else(|| self.groups.insert(new));
        self.change(group, |group| *group.limits.entry(con.limit).or_default() += 1);
        let rank = MemberRank { group, ..MemberRank::default() };
        let links = [Links::LOOSE; 2];
        self.members.insert(Member { con, job, rank, place: MemberPlace::Elsewhere, links })
    }

    /// Removes a job that is elsewhere from its group.
    pub fn leave(&mut self, key: MemberKey) {
        self.forget_limit(key);
        self.members.remove(key);
    }

    /// Does not count the limit of a member any more. The limit 0 is not counted.
    pub fn forget_limit(&mut self, key: MemberKey) {
        let Member { con, rank, .. } = &mut self.members[key];
        let limit = std::mem::take(&mut con.limit);
        if limit == 0 {
            return;
        }
        let group = rank.group;
        self.change(group, |group| {
            let count = group.limits.get_mut(&limit).expect("a member has counted its limit");
            *count -= 1;
            if *count == 0 {
                group.limits.remove(&limit);
            }
        });
    }

    /// Changes a group, and notes whether it has a free slot for a parked job now. Without a limit it has no job, and
    /// is removed.
    fn change(&mut self, key: GroupKey, change: impl FnOnce(&mut Group)) {
        let group = &mut self.groups[key];
        let before = group.blocked();
        change(group);
        self.blocked = self.blocked - before + group.blocked();
        let (is_freed, is_gone) = (group.waits(), group.limits.is_empty());
        match (std::mem::replace(&mut group.is_freed, is_freed), is_freed) {
            (false, true) => self.freed.push_back(&mut self.groups, key.number()),
            (true, false) => self.freed.remove(&mut self.groups, key.number()),
            (false, false) | (true, true) => {}
        }
        if is_gone {
            self.groups.remove(key);
        }
    }

    /// Returns whether the group of a member is full.
    pub fn is_full(&self, key: MemberKey) -> bool {
        self.groups[self.members[key].rank.group].is_full()
    }

    /// Adds a member that was elsewhere: it becomes ready, behind others, or takes a slot.
    pub fn add(&mut self, key: MemberKey, rank: MemberRank) {
        let member = &mut self.members[key];
        member.rank = rank;
        member.place = if rank.has_slot { MemberPlace::Slot } else { MemberPlace::Behind };
        self.placed.insert(key.number(), &mut self.members);
        self.change(rank.group, |group| *group.count_of(rank) += 1);
    }

    /// Removes a member that is ready or has a slot. It is elsewhere then, if it was not before.
    pub fn remove(&mut self, key: MemberKey) {
        let Member { rank, place, .. } = self.members[key];
        if place != MemberPlace::Elsewhere {
            self.placed.remove(key.number(), &mut self.members);
            self.move_to(key, MemberPlace::Elsewhere);
            self.change(rank.group, |group| *group.count_of(rank) -= 1);
        }
    }

    // ---- Ready jobs ----

    /// Changes the place of a member, and parks it or takes it from the parked ones.
    pub fn move_to(&mut self, key: MemberKey, to: MemberPlace) {
        let Member { rank, place, .. } = &mut self.members[key];
        let (group, from) = (rank.group, std::mem::replace(place, to));
        let parked = &mut self.groups[group].parked;
        if from == MemberPlace::Parked {
            parked.remove(key.number(), &mut self.members);
        }
        if to == MemberPlace::Parked {
            parked.insert(key.number(), &mut self.members);
        }
        self.change(group, |_| {});
    }

    /// Returns the first ready job of a group in a tube, of which this is the rank of some job.
    pub fn first_of_group(&self, of: MemberRank) -> Option<MemberKey> {
        let first = self.first_from(MemberRank { pri: 0, id: 0, ..of });
        first.filter(|&first| self.members[first].rank.group == of.group)
    }

    /// Returns the best ready job with a group in a tube, and how many groups were compared; of more than `most`
    /// groups, that of some.
    pub fn best_in_tube(&self, tube: TubeKey, epoch: u8, most: usize) -> (Option<JobKey>, usize) {
        let first_from = |least| self.first_from(least).map(|key| &self.members[key]);
        let next = |it: &&Member| {
            let group = it.rank.group.number().checked_add(1).map(GroupKey::from_number)?;
            first_from(MemberRank { group, pri: 0, id: 0, ..it.rank })
        };
        let firsts = std::iter::successors(first_from(MemberRank::first(tube, epoch)), next);
        let mut compared = 0;
        let some = firsts.take(most).inspect(|_| compared += 1);
        (some.min_by_key(|it| it.rank.in_group()).map(|it| it.job), compared)
    }

    /// Returns the ready jobs with a group in a tube, from this rank on.
    pub fn ready_from(&self, least: MemberRank) -> impl Iterator<Item = &Member> {
        let from = self.placed.iter_from(&self.members, move |key| self.rank(key) < least);
        let members = from.map(|key| at(key, &self.members));
        members.take_while(move |member| member.rank.is_next_to(least))
    }

    /// Returns the first job of a tube that is ready, or has a slot, from this rank on.
    pub fn first_from(&self, least: MemberRank) -> Option<MemberKey> {
        let first = self.placed.first_from(&self.members, |key| self.rank(key) < least);
        let first = first.filter(|&first| self.rank(first).is_next_to(least));
        first.map(MemberKey::from_number)
    }

    fn rank(&self, key: u32) -> MemberRank {
        at(key, &self.members).rank
    }

    // ---- Slots ----

    /// Returns whether a group has a free slot and parked jobs.
    pub fn has_freed(&self) -> bool {
        !self.freed.is_empty()
    }

    /// Returns the parked job that is offered next, if there is such a group: of a few groups the best job.
    pub fn next_to_offer(&self) -> Option<MemberKey> {
        let few = self.freed.iter(&self.groups).take(FEW_GROUPS).map(GroupKey::from_number);
        let firsts = few.filter_map(|group| self.groups[group].parked.first(&self.members));
        firsts.map(MemberKey::from_number).min_by_key(|&it| self.members[it].rank.in_group())
    }

    // ---- Checking ----

    /// Checks the trees and counts. Calls `each` with each member.
    ///
    /// # Panics
    /// An invariant is broken.
    pub fn check(&self, mut each: impl FnMut(MemberKey, &Member)) {
        let Groups { groups, members, placed, freed, blocked } = self;
        let mut counted: BTreeMap<GroupKey, Group> = BTreeMap::new();
        let [mut parked, mut are_placed, mut are_parked] = [0; 3];
        for (key, member) in members.iter() {
            let Member { con, rank, place, .. } = *member;
            // With the limit 0 a flush has deleted it.
            if con.limit > 0 {
                let group = counted.entry(rank.group).or_default();
                *group.limits.entry(con.limit).or_default() += 1;
            }
            if place != MemberPlace::Elsewhere {
                *counted.entry(rank.group).or_default().count_of(rank) += 1;
                are_placed += 1;
                assert_eq!(rank.has_slot, place == MemberPlace::Slot, "{key:?} is {place:?}");
            }
            are_parked += usize::from(place == MemberPlace::Parked);
            each(key, member);
        }
        placed.check(members, format_args!("the jobs of groups"), |key| {
            assert_ne!(at(key, members).place, MemberPlace::Elsewhere, "a placed job");
        });
        for (key, group) in groups.iter() {
            group.parked.check(members, format_args!("the parked jobs of {key:?}"), |member| {
                let Member { rank, place, .. } = members[MemberKey::from_number(member)];
                assert_eq!((rank.group, place), (key, MemberPlace::Parked), "a parked job");
            });
            parked += group.parked.len();
            assert_eq!(group.is_freed, group.waits(), "whether {key:?} is freed");
            let Group { limits, slots, ready, .. } = &counted[&key];
            let is_right = (limits, slots, ready) == (&group.limits, &group.slots, &group.ready);
            assert!(is_right, "group {group:?}, counted {:?}", counted[&key]);
        }
        assert_eq!((placed.len(), parked), (are_placed, are_parked), "placed, and parked jobs");
        let is_freed = groups.iter().filter(|(_, group)| group.is_freed);
        freed.check(groups, format_args!("the freed groups"), |_| {});
        assert_eq!(is_freed.count(), freed.len() as usize, "groups that are freed, and freed ones");
        assert_eq!(counted.len(), groups.len(), "groups with jobs, and groups");
        let all_blocked = groups.iter().map(|(_, group)| group.blocked()).sum::<u64>();
        assert_eq!(all_blocked, *blocked, "blocked jobs");
    }
}

impl MemberRank {
    /// Returns a place before all jobs with groups in a tube.
    pub fn first(tube: TubeKey, epoch: u8) -> MemberRank {
        MemberRank { tube, epoch, ..MemberRank::default() }
    }

    /// Returns whether both are ready jobs of a tube, or both have slots.
    fn is_next_to(self, other: MemberRank) -> bool {
        let part = |rank: MemberRank| (rank.tube, rank.epoch, rank.has_slot);
        part(self) == part(other)
    }

    fn in_group(self) -> (u32, u64) {
        (self.pri, self.id)
    }
}

impl Group {
    fn is_full(&self) -> bool {
        // A group that is being made or removed has no limit, and no ready job.
        self.limits.last_key_value().is_none_or(|(&limit, _)| self.slots >= limit)
    }

    /// Returns the number of its jobs that are ready, or that of those with a slot.
    fn count_of(&mut self, rank: MemberRank) -> &mut u32 {
        if rank.has_slot { &mut self.slots } else { &mut self.ready }
    }

    fn blocked(&self) -> u64 {
        if self.is_full() { self.ready.into() } else { 0 }
    }

    /// Returns whether it has a free slot and parked jobs.
    fn waits(&self) -> bool {
        self.parked.len() > 0 && !self.is_full()
    }
}

impl Hashed for Group {
    fn hash(&self) -> u32 {
        low_half(self.hash)
    }

    fn next(&self) -> &Cell<u32> {
        &self.next
    }
}

impl Linked for HashSlab<GroupKey, Group> {
    fn links(&self, key: u32) -> Links {
        self[GroupKey::from_number(key)].links
    }

    fn links_mut(&mut self, key: u32) -> &mut Links {
        &mut self[GroupKey::from_number(key)].links
    }
}

impl<const LIST: usize> Linked<LIST> for Members {
    fn links(&self, key: u32) -> Links {
        at(key, self).links[LIST]
    }

    fn links_mut(&mut self, key: u32) -> &mut Links {
        &mut self[MemberKey::from_number(key)].links[LIST]
    }
}

impl Order for InTube {
    type Store = Members;

    fn precedes(key: u32, other: u32, members: &Members) -> bool {
        at(key, members).rank < at(other, members).rank
    }

    fn weight(key: u32, members: &Members) -> u32 {
        weight(key, members)
    }
}

impl Order<PARKED> for InGroup {
    type Store = Members;

    fn precedes(key: u32, other: u32, members: &Members) -> bool {
        at(key, members).rank.in_group() < at(other, members).rank.in_group()
    }

    fn weight(key: u32, members: &Members) -> u32 {
        weight(key, members)
    }
}

fn at(key: u32, members: &Members) -> &Member {
    &members[MemberKey::from_number(key)]
}

/// Clients do not know the secret with which the hash of a group is made.
fn weight(key: u32, members: &Members) -> u32 {
    low_half(mix(at(key, members).con.group ^ mix(key.into())))
}
