//! Tubes: named queues, and the one rule for when a tube goes.
//!
//! A tube comes with the first who uses or watches it and goes when nobody does and no
//! job is in it. `default` stays for ever. The rules by which jobs move are in `queue.rs`,
//! how workers wait at a tube in `waiting.rs`.

use super::job::{DelayedEntry, ReadyEntry};
use super::waiters::{FRESHNESS, Waiter};
use crate::engine::collections::hash_index::{HashSlab, Keyed, mix};
use crate::engine::collections::heap::Heap;
use crate::engine::collections::list::List;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::NIL;
use crate::engine::keys::{ConnKey, JobKey, Key, TimerKey, TubeKey};
use crate::engine::queue::listing::ListText;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::hash::{BuildHasher, RandomState};

/// One tube.
#[derive(Debug)]
pub struct Tube {
    /// What clients call it.
    pub name: Box<str>,
    /// The ready jobs.
    pub ready: Heap<ReadyEntry>,
    /// The delayed jobs.
    pub delayed: Heap<DelayedEntry>,
    /// The buried jobs.
    pub buried: List,
    /// How many of the ready jobs are urgent.
    pub urgent: u32,
    /// How many of its jobs connections hold reserved.
    pub reserved: u32,
    /// How many connections use it.
    pub using: u32,
    /// How many connections watch it.
    pub watching: u32,
    /// The watching connections that wait, or did when last looked at.
    pub line: Heap<Waiter>,
    /// The watches whose connection filed this tube under its present offer, or under a
    /// better one that has gone.
    pub clean: List<FRESHNESS>,
    /// The pause in force; few tubes have one.
    pub pause: Option<Box<Pause>>,
    /// Goes off when the first delayed job is due and when a pause ends.
    pub timer: TimerKey,
    /// It is among those that are overdue.
    pub is_overdue: bool,
    /// How many jobs were put.
    pub total_jobs: u64,
    /// How many times a job was deleted.
    pub deletes: u64,
    /// How many times it was paused.
    pub pauses: u64,
    /// Half of the hash of the name: as many bits as there can be tubes.
    hash: u32,
    next_in_bucket: u32,
    /// The place among all tubes.
    place: u32,
}

/// A pause of a tube, as a client asked for it.
#[derive(Clone, Copy, Debug)]
pub struct Pause {
    /// How long, in seconds.
    pub secs: u32,
    /// When it ends.
    pub until: Nanos,
}

/// All tubes.
#[derive(Debug, Default)]
pub struct Tubes {
    table: HashSlab<TubeKey, Tube>,
    /// As `list-tubes` lists them.
    order: Vec<TubeKey>,
    removed_count: u64,
    hasher: RandomState,
    /// A list that is being made.
    listing: Option<Listing>,
}

/// The result of one step of a list of all tubes.
#[derive(Debug)]
pub enum Listed {
    /// It is complete.
    Whole(ListText),
    /// There are more tubes.
    Unfinished,
    /// There is no memory for it; it was given up.
    NoMemory,
}

/// A list of all tubes that is made in steps, while tubes come and go.
#[derive(Debug)]
struct Listing {
    text: ListText,
    /// The tubes before this place are in it.
    next: usize,
    /// There was no memory for a part of it.
    has_failed: bool,
}

impl Tube {
    /// The job that a worker gets here next; none while the tube is paused.
    pub fn offer(&self) -> Option<ReadyEntry> {
        if self.pause.is_some() { None } else { self.ready.first() }
    }

    /// The ready job that comes first.
    pub fn first_ready(&self) -> Option<JobKey> {
        self.ready.first().map(|entry| entry.job)
    }

    /// The delayed job that is due first.
    pub fn first_delayed(&self) -> Option<JobKey> {
        self.delayed.first().map(|entry| entry.job)
    }

    /// The job that has been buried longest.
    pub fn first_buried(&self) -> Option<JobKey> {
        self.buried.front().map(JobKey::from_number)
    }

    /// The place in the order of `list-tubes`.
    pub fn place(&self) -> usize {
        self.place as usize
    }

    /// Returns a hash of the tube and a connection. The hash of the name has a secret, so that no
    /// client can choose tubes whose watches are all in one bucket.
    #[expect(clippy::cast_possible_truncation, reason = "half of the bits are enough")]
    pub fn hash_with(&self, conn: ConnKey) -> u32 {
        mix(u64::from(conn.number()) << u32::BITS | u64::from(self.hash)) as u32
    }

    /// Whether nobody uses or watches the tube and no job is in it.
    fn is_idle(&self) -> bool {
        self.using == 0
            && self.watching == 0
            && self.reserved == 0
            && self.ready.is_empty()
            && self.delayed.is_empty()
            && self.buried.is_empty()
    }
}

impl Tubes {
    /// The tube that always exists.
    pub const DEFAULT: TubeKey = TubeKey::FIRST;

    /// How many tubes there are.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether there is no tube; only before the default one was made.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The tube under this key, if there is one.
    pub fn get(&self, key: TubeKey) -> Option<&Tube> {
        self.table.get(key)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: TubeKey) -> Option<&mut Tube> {
        self.table.get_mut(key)
    }

    /// The tube that stands at this place in the order of `list-tubes`.
    ///
    /// # Panics
    /// There are fewer.
    pub fn at(&self, place: usize) -> TubeKey {
        self.order[place]
    }

    /// How many tubes have gone since the start.
    pub fn removed_count(&self) -> u64 {
        self.removed_count
    }

    /// The tube of this name.
    pub fn find(&self, name: &str) -> Option<TubeKey> {
        self.table.find_by(self.hash(name).into(), |tube| &*tube.name == name)
    }

    #[expect(clippy::cast_possible_truncation, reason = "half of the bits are enough")]
    fn hash(&self, name: &str) -> u32 {
        self.hasher.hash_one(name) as u32
    }

    /// Makes a tube of a name that no other has.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn create(&mut self, name: &str, timer: TimerKey) -> Result<TubeKey, TryReserveError> {
        self.table.try_reserve_one()?;
        let mut own_name = String::new();
        headroom::leave(Headroom::Quarter, || {
            self.order.try_reserve(1)?;
            own_name.try_reserve_exact(name.len())
        })?;
        own_name.push_str(name);
        let tube = Tube {
            name: own_name.into_boxed_str(),
            ready: Heap::default(),
            delayed: Heap::default(),
            buried: List::default(),
            urgent: 0,
            reserved: 0,
            using: 0,
            watching: 0,
            line: Heap::default(),
            clean: List::default(),
            pause: None,
            timer,
            is_overdue: false,
            total_jobs: 0,
            deletes: 0,
            pauses: 0,
            hash: self.hash(name),
            next_in_bucket: NIL,
            place: u32::try_from(self.order.len()).expect("keys are u32"),
        };
        let key = self.table.insert(tube);
        self.order.push(key);
        Ok(key)
    }

    /// Removes the tube if it is time for it to go; says what its timer was.
    pub fn remove_if_idle(&mut self, key: TubeKey) -> Option<TimerKey> {
        if key == Tubes::DEFAULT || !self[key].is_idle() {
            return None;
        }
        let tube = self.table.remove(key);
        self.removed_count += 1;
        // Quirk: the last tube of the list takes the place of the one that goes; pinned by
        // tests/conversations/list-tubes-order.txt.
        self.order.swap_remove(tube.place as usize);
        if let Some(&moved) = self.order.get(tube.place as usize) {
            self[moved].place = tube.place;
        }
        self.keep_listing_whole(tube.place as usize);
        Some(tube.timer)
    }

    // ---- Long lists ----

    /// Begins a list of all tubes; [`Tubes::list_step`] adds the tubes.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn begin_listing(&mut self) -> Result<(), TryReserveError> {
        self.listing = Some(Listing { text: ListText::new()?, next: 0, has_failed: false });
        Ok(())
    }

    /// Nobody wants the list any more that is being made.
    pub fn give_up_listing(&mut self) {
        self.listing = None;
    }

    /// Adds at most `steps_left` tubes to the list. In the end each tube that was there all the time is
    /// in it once.
    pub fn list_step(&mut self, steps_left: &mut usize) -> Listed {
        let Some(listing) = &mut self.listing else { return Listed::NoMemory };
        while *steps_left > 0 && !listing.has_failed {
            let Some(&key) = self.order.get(listing.next) else { break };
            *steps_left -= 1;
            listing.next += 1;
            listing.has_failed = listing.text.push_name(&self.table[key].name).is_err();
        }
        let is_complete = listing.next >= self.order.len();
        if !is_complete && !listing.has_failed {
            return Listed::Unfinished;
        }
        let has_failed = listing.has_failed || listing.text.finish().is_err();
        match self.listing.take() {
            Some(listing) if !has_failed => Listed::Whole(listing.text),
            Some(_) | None => Listed::NoMemory,
        }
    }

    /// Lists the tube that was moved from the end of the order to `place`, if `place` was passed
    /// already and the tube is not in the list yet.
    fn keep_listing_whole(&mut self, place: usize) {
        let Some(listing) = &mut self.listing else { return };
        if place >= listing.next {
            return;
        }
        if listing.next > self.order.len() {
            // All were listed, and there is one less.
            listing.next = self.order.len();
            return;
        }
        if let Some(&moved) = self.order.get(place) {
            listing.has_failed |= listing.text.push_name(&self.table[moved].name).is_err();
        }
    }

    /// All tubes with their keys, in the same order.
    pub fn entries(&self) -> impl Iterator<Item = (TubeKey, &Tube)> + '_ {
        self.order.iter().map(|&key| (key, &self[key]))
    }

    /// Every tube is found by its name and knows its place in the order, and none is kept that
    /// nobody needs.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(&self) {
        self.table.check(format_args!("the tubes"));
        assert_eq!(self.len(), self.table.len(), "tubes in the order, and tubes");
        for (place, &key) in self.order.iter().enumerate() {
            let tube = self.get(key).unwrap_or_else(|| {
                panic!("{key:?}, at {place} in the order of tubes, is not there")
            });
            let name = &tube.name;
            assert_eq!(tube.place(), place, "the place of tube {name}, as noted and as found");
            assert_eq!(
                self.find(name),
                Some(key),
                "what is found for tube {name}, and where it is"
            );
            assert!(key == Tubes::DEFAULT || !tube.is_idle(), "nobody needs tube {name}");
        }
        assert!(self.get(Tubes::DEFAULT).is_some(), "there is no default tube");
    }

    /// All tubes, in the order of `list-tubes`.
    pub fn iter(&self) -> impl Iterator<Item = &Tube> + Clone {
        self.order.iter().map(|&key| &self[key])
    }
}

impl std::ops::Index<TubeKey> for Tubes {
    type Output = Tube;

    fn index(&self, key: TubeKey) -> &Tube {
        &self.table[key]
    }
}

impl std::ops::IndexMut<TubeKey> for Tubes {
    fn index_mut(&mut self, key: TubeKey) -> &mut Tube {
        &mut self.table[key]
    }
}

impl Keyed for Tube {
    fn hash(&self) -> u64 {
        self.hash.into()
    }

    fn next_in_bucket(&self) -> u32 {
        self.next_in_bucket
    }

    fn next_in_bucket_mut(&mut self) -> &mut u32 {
        &mut self.next_in_bucket
    }
}
