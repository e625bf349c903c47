//! The table of files and jobs. A job belongs to the file that has its full record. The kept key of a
//! deleted job belongs to the file that has its record.
//!
//! Other modules decide when a file is created or removed. A function panics if it is called with
//! the key of a job that was removed.

use super::disk::FileNumber;
use super::record::Layout;
use crate::engine::collections::list::{Linked, Links, List};
use crate::engine::collections::secondary_map::SecondaryMap;
use crate::engine::collections::slab::PagedSlab;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{Either, EitherKey, JobKey, KeptKey, Key, LogKey};
use crate::engine::time::Nanos;
use std::collections::{TryReserveError, VecDeque};
use std::num::NonZero;
use std::ops::{Index, IndexMut};

/// All files, the oldest first, and the jobs that belong to them.
#[derive(Debug)]
pub struct Segments {
    segments: VecDeque<Segment>,
    entries: Entries,
    /// The bytes of the full records of all jobs, with the records of their keys, and of kept keys.
    live_bytes: u64,
    /// The number of kept keys.
    kept_keys: u64,
    /// The number of jobs whose keys will be kept.
    keeping_jobs: u64,
    /// When each buried job was buried, in nanoseconds. It is no field of [`Entry`], because few jobs are
    /// buried.
    burials: SecondaryMap<LogKey, NonZero<u64>>,
    /// The oldest file of which a record was superseded since the last file was closed.
    reaches: FileNumber,
    /// A file has lost its last job since [`Segments::take_emptied`].
    has_emptied: bool,
}

/// One file.
#[derive(Debug)]
pub struct Segment {
    /// The N of `binlog.N`.
    pub number: FileNumber,
    /// Its size in bytes.
    pub size: u64,
    /// The bytes up to the end of its last record.
    pub used: u64,
    /// The nonce of its records, if it was read from the first record of the file.
    pub nonce: Option<u32>,
    /// The layout of its records.
    pub layout: Layout,
    /// Some of its records are damaged. When it has no jobs left, it is renamed, not removed.
    pub is_damaged: bool,
    /// The oldest file of which a record was superseded by one of this file. It is not known of the current
    /// file.
    reaches: FileNumber,
    /// It gets no more records.
    pub is_closed: bool,
    /// It is free: none of its records is needed. The number of syncs that were begun before.
    pub free_since: Option<u64>,
    jobs: List,
    live_bytes: u64,
}

/// The entry of a live job, or of a kept key, in 24 bytes.
#[derive(Debug)]
pub struct Entry {
    /// The job, or the key of a deleted job.
    owner: EitherKey<JobKey, KeptKey>,
    file: NonZero<FileNumber>,
    offset: u32,
    /// The length in bytes; [`KEEPS_KEY`] is its highest bit.
    len: u32,
    links: Links,
}

/// Set in the length of a job whose key is kept after its delete. Its delete needs two records.
const KEEPS_KEY: u32 = 1 << 31;

const _: () = assert!(size_of::<Option<Entry>>() == 24, "a slot for an entry has 24 bytes");

/// Stands for every offset from this one on: an entry has 32 bits for it.
pub const FAR_OFFSET: u32 = u32::MAX;

/// The owner of an entry, or of the key of a unique job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Job(JobKey),
    /// The key of a deleted job.
    KeptKey(KeptKey),
}

#[derive(Debug)]
struct Entries(PagedSlab<LogKey, Entry>);

impl Default for Entries {
    fn default() -> Entries {
        // `LogRef` stores these keys in an `EitherKey`, which has 31 bits for a number.
        Entries(PagedSlab::with_31_bits())
    }
}

impl Entry {
    /// Returns the job or the kept key.
    pub fn owner(&self) -> Owner {
        match self.owner.split() {
            Either::First(job) => Owner::Job(job),
            Either::Second(kept) => Owner::KeptKey(kept),
        }
    }

    /// Returns the number of the file to which it belongs.
    pub fn file(&self) -> FileNumber {
        self.file.get()
    }

    /// Returns the offset of its full record in that file in bytes. Only a file of C beanstalkd can be so
    /// long that it has a record at [`FAR_OFFSET`] or behind it. That of a kept key is not used.
    pub fn offset(&self) -> u32 {
        self.offset
    }

    /// Returns the length in bytes of its full record with the record of its key, or of the kept key.
    pub fn live_bytes(&self) -> u32 {
        self.len & !KEEPS_KEY
    }

    fn is_kept_key(&self) -> bool {
        self.owner.second().is_some()
    }

    fn keeps_key(&self) -> bool {
        self.len & KEEPS_KEY != 0
    }

    fn set_place(&mut self, file: FileNumber, offset: u64, len: u64) {
        self.file = file_number(file);
        self.offset = record_offset(offset);
        self.set_len(len);
    }

    fn set_len(&mut self, len: u64) {
        self.len = record_len(len) | (self.len & KEEPS_KEY);
    }
}

impl Segment {
    /// Returns a file without jobs.
    pub fn new(number: FileNumber, size: u64, used: u64) -> Segment {
        let jobs = List::default();
        let layout = Layout::V7WithCrc;
        Segment {
            number,
            size,
            used,
            nonce: None,
            layout,
            is_damaged: false,
            reaches: number,
            is_closed: false,
            free_since: None,
            jobs,
            live_bytes: 0,
        }
    }

    /// Returns how many bytes are free.
    pub fn left(&self) -> u64 {
        self.size - self.used
    }

    /// Returns the bytes of the full records of its jobs, with the records of their keys, and of kept keys.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Returns whether each record of a closed file supersedes only records of this file and newer ones, and of
    /// files older than `older`, the newest one before it that is needed. So it can be removed before that.
    pub fn is_apart_from(&self, older: FileNumber) -> bool {
        self.reaches > older && !self.is_damaged
    }

    /// Returns whether no job and no kept key belongs to it.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    fn check(&self, entries: &Entries) {
        let Segment { number, size, used, .. } = self;
        assert!(used <= size, "binlog.{number}: {used} bytes of {size} are used");
        let mut live_bytes = 0;
        self.jobs.check(entries, format_args!("the jobs of binlog.{number}"), |key| {
            let entry = &entries.0[LogKey::from_number(key)];
            let owner = entry.owner();
            assert_eq!(
                entry.file(),
                *number,
                "the file of {owner:?}, in its entry and by its list"
            );
            live_bytes += u64::from(entry.live_bytes());
        });
        assert_eq!(self.live_bytes, live_bytes, "live bytes of binlog.{number}, noted and counted");
    }

    /// Returns the job or kept key that has belonged to it longest.
    pub fn first_job(&self) -> Option<LogKey> {
        self.jobs.front().map(LogKey::from_number)
    }
}

impl Default for Segments {
    fn default() -> Segments {
        Segments {
            segments: VecDeque::new(),
            entries: Entries::default(),
            live_bytes: 0,
            kept_keys: 0,
            keeping_jobs: 0,
            burials: SecondaryMap::default(),
            reaches: FileNumber::MAX,
            has_emptied: false,
        }
    }
}

impl Segments {
    // ---- Files ----

    /// Returns how many files there are.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Returns whether there is no file.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Makes sure that the next [`Segments::push`] needs no memory.
    pub fn try_reserve_file(&mut self) -> Result<(), TryReserveError> {
        headroom::leave(Headroom::Quarter, || self.segments.try_reserve(1))
    }

    /// Adds a file that is newer than all other files.
    pub fn push(&mut self, segment: Segment) {
        let last = self.newest().map(|newest| newest.number);
        assert!(last < Some(segment.number), "binlog.{} after {last:?}", segment.number);
        self.segments.push_back(segment);
    }

    /// Returns the newest file.
    pub fn newest(&self) -> Option<&Segment> {
        self.segments.back()
    }

    /// Removes a file, which must have no jobs.
    pub fn remove_file(&mut self, index: usize) -> Segment {
        let segment = self.segments.remove(index).filter(Segment::is_empty);
        segment.expect("there is a file, and it has no jobs")
    }

    /// Removes the newest file, which must have no jobs.
    pub fn pop_newest(&mut self) -> Segment {
        let segment = self.segments.pop_back().filter(Segment::is_empty);
        segment.expect("there is a file, and it has no jobs")
    }

    /// Returns the files, the oldest first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Segment> + ExactSizeIterator + Clone {
        self.segments.iter()
    }

    /// Returns the file with this number.
    pub fn find_file(&self, number: FileNumber) -> Option<&Segment> {
        find_index(&self.segments, number).map(|index| &self.segments[index])
    }

    /// Returns the layout of the file with this number, which must exist.
    pub fn layout_of(&self, number: FileNumber) -> Layout {
        self.segments[index_of(&self.segments, number)].layout
    }

    /// Returns the file with this number, which must exist.
    pub fn by_number(&mut self, number: FileNumber) -> &mut Segment {
        by_number(&mut self.segments, number)
    }

    /// Notes that a record supersedes one of a job or a kept key.
    pub fn supersede(&mut self, key: LogKey) {
        self.supersede_file(self.entries.0[key].file());
    }

    /// Notes that a record supersedes one of this file, or of any for 0.
    pub fn supersede_file(&mut self, older: FileNumber) {
        self.reaches = self.reaches.min(older);
    }

    /// Notes that a file gets no more records: those since the last call are in it.
    pub fn close_file(&mut self, index: usize) {
        let reaches = std::mem::replace(&mut self.reaches, FileNumber::MAX);
        let segment = &mut self.segments[index];
        segment.reaches = segment.reaches.min(reaches);
        segment.is_closed = true;
        self.has_emptied |= segment.is_empty();
    }

    /// Makes the next [`Segments::take_emptied`] return `true`.
    pub fn look_for_free(&mut self) {
        self.has_emptied = true;
    }

    /// Returns whether a file has lost its last job since the last call.
    pub fn take_emptied(&mut self) -> bool {
        std::mem::take(&mut self.has_emptied)
    }

    // ---- Jobs ----

    /// Returns how many jobs there are.
    pub fn job_count(&self) -> u64 {
        self.entries.0.len() as u64 - self.kept_keys
    }

    /// Returns how many short records the deletes of all jobs need.
    pub fn delete_records(&self) -> u64 {
        self.job_count() + self.keeping_jobs
    }

    /// Returns the bytes of the full records of all jobs, with the records of their keys, and of kept keys.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Returns the entry of a job.
    pub fn entry(&self, key: LogKey) -> &Entry {
        &self.entries.0[key]
    }

    /// Returns the entry of a job, or `None` if the job was removed.
    pub fn find(&self, key: LogKey) -> Option<&Entry> {
        self.entries.0.get(key)
    }

    /// Returns when a job was buried, by its last record, or zero if that is not known.
    pub fn buried_at(&self, key: LogKey) -> Nanos {
        self.burials.get(key).map_or(Nanos::ZERO, |moment| Nanos::from_nanos(moment.get()))
    }

    /// Notes when a job was buried, by its last record. `None` is for a job that is not buried.
    pub fn set_buried_at(
        &mut self,
        key: LogKey,
        moment: Option<Nanos>,
    ) -> Result<(), TryReserveError> {
        let Some(moment) = moment.and_then(|moment| NonZero::new(moment.as_nanos())) else {
            self.burials.remove(key);
            return Ok(());
        };
        match self.burials.get_mut(key) {
            Some(noted) => *noted = moment,
            None => self.burials.try_insert(key, moment)?,
        }
        Ok(())
    }

    /// Returns all jobs, in the order of their files.
    pub fn jobs(&self) -> impl Iterator<Item = JobKey> + '_ {
        let keys = self.segments.iter().flat_map(|segment| segment.jobs.iter(&self.entries));
        keys.filter_map(|key| match self.entries.0[LogKey::from_number(key)].owner() {
            Owner::Job(job) => Some(job),
            Owner::KeptKey(_) => None,
        })
    }

    /// Returns the bytes of memory that all entries take, with the moments of burials.
    pub fn taken_bytes(&self) -> u64 {
        self.entries.0.taken_bytes() + self.burials.taken_bytes()
    }

    /// The bytes of memory of one entry.
    pub const BYTES_PER_JOB: u64 = size_of::<Entry>() as u64;

    /// Makes sure that the next [`Segments::add_job`] needs no memory.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.entries.0.try_reserve_one()
    }

    /// Adds a job whose full record, of `len` bytes, is in this file at `offset`. Call
    /// [`Segments::try_reserve_one`] before.
    pub fn add_job(&mut self, job: JobKey, file: FileNumber, offset: u64, len: u64) -> LogKey {
        self.add(EitherKey::from_first(job), (file, offset), len)
    }

    /// Adds a kept key whose record, of `len` bytes, is in this file. Call
    /// [`Segments::try_reserve_one`] before.
    pub fn add_kept_key(&mut self, kept: KeptKey, file: FileNumber, len: u64) -> LogKey {
        self.kept_keys += 1;
        self.add(EitherKey::from_second(kept), (file, 0), len)
    }

    /// Notes whether the key of a job will be kept after its delete.
    pub fn set_keeping(&mut self, key: LogKey, is_keeping: bool) {
        let entry = &mut self.entries.0[key];
        self.keeping_jobs -= u64::from(entry.keeps_key());
        self.keeping_jobs += u64::from(is_keeping);
        entry.len = entry.live_bytes() | if is_keeping { KEEPS_KEY } else { 0 };
    }

    /// Turns the entry of a job that is deleted into that of its kept key, whose record, of `len` bytes, is
    /// in this file.
    pub fn keep_key(&mut self, key: LogKey, kept: KeptKey, file: FileNumber, len: u64) {
        self.set_keeping(key, false);
        self.kept_keys += 1;
        self.entries.0[key].owner = EitherKey::from_second(kept);
        self.burials.remove(key);
        self.move_job(key, file, 0, len);
    }

    /// Notes that the records of a job have this length together, because its key has come or gone.
    pub fn set_len(&mut self, key: LogKey, len: u64) {
        self.detach(key);
        self.entries.0[key].set_len(len);
        self.attach(key);
    }

    fn add(
        &mut self,
        owner: EitherKey<JobKey, KeptKey>,
        (file, offset): (FileNumber, u64),
        len: u64,
    ) -> LogKey {
        let key = self.entries.0.insert(Entry {
            owner,
            file: file_number(file),
            offset: record_offset(offset),
            len: record_len(len),
            links: Links::LOOSE,
        });
        self.attach(key);
        key
    }

    /// Notes that the job has a new full record in this file at `offset`, of `len` bytes with the record
    /// of its key, or that a kept key has a new record there.
    pub fn move_job(&mut self, key: LogKey, file: FileNumber, offset: u64, len: u64) {
        self.supersede(key);
        self.detach(key);
        self.entries.0[key].set_place(file, offset, len);
        self.attach(key);
    }

    /// Removes a job or a kept key and returns its entry.
    pub fn remove_job(&mut self, key: LogKey) -> Entry {
        self.detach(key);
        let entry = self.entries.0.remove(key).expect("it was just detached");
        self.kept_keys -= u64::from(entry.is_kept_key());
        self.keeping_jobs -= u64::from(entry.keeps_key());
        self.burials.remove(key);
        entry
    }

    /// Panics unless the numbers of files ascend, and each job belongs to one file, which counts the
    /// bytes of its record.
    pub fn check(&self) {
        self.entries.0.check(format_args!("the entries of the binlog"));
        let (mut jobs, mut live_bytes) = (0, 0);
        let mut last = None;
        for segment in &self.segments {
            assert!(last < Some(segment.number), "binlog.{} comes after {last:?}", segment.number);
            last = Some(segment.number);
            segment.check(&self.entries);
            jobs += u64::from(segment.jobs.len());
            live_bytes += segment.live_bytes;
        }
        assert_eq!(self.entries.0.len() as u64, jobs, "entries, and entries of all files");
        let entries = || self.entries.0.iter().map(|(_, entry)| entry);
        let kept = entries().filter(|entry| entry.is_kept_key()).count();
        let keeping = entries().filter(|entry| entry.keeps_key()).count();
        assert_eq!(self.kept_keys, kept as u64, "kept keys, noted and counted");
        assert_eq!(self.keeping_jobs, keeping as u64, "jobs that keep keys, noted and counted");
        assert_eq!(self.live_bytes, live_bytes, "live bytes of the binlog, and of its files");
        self.burials.check(format_args!("the moments of burials"));
        for (key, _) in self.burials.iter() {
            let owner = self.find(key).map(Entry::owner);
            assert!(matches!(owner, Some(Owner::Job(_))), "{owner:?} is noted as buried");
        }
    }

    fn attach(&mut self, key: LogKey) {
        let entry = &self.entries.0[key];
        let (file, len) = (entry.file(), entry.live_bytes());
        let segment = by_number(&mut self.segments, file);
        segment.jobs.push_back(&mut self.entries, key.number());
        segment.live_bytes += u64::from(len);
        self.live_bytes += u64::from(len);
    }

    fn detach(&mut self, key: LogKey) {
        let entry = &self.entries.0[key];
        let (file, len) = (entry.file(), entry.live_bytes());
        let segment = by_number(&mut self.segments, file);
        segment.jobs.remove(&mut self.entries, key.number());
        let rest = segment.live_bytes.checked_sub(u64::from(len));
        segment.live_bytes = rest.expect("the record counts as live in its file");
        self.has_emptied |= segment.is_closed && segment.is_empty();
        self.live_bytes -= u64::from(len);
    }
}

fn by_number(segments: &mut VecDeque<Segment>, number: FileNumber) -> &mut Segment {
    let index = index_of(segments, number);
    &mut segments[index]
}

fn index_of(segments: &VecDeque<Segment>, number: FileNumber) -> usize {
    let found = find_index(segments, number);
    found.unwrap_or_else(|| panic!("no file has the number {number}"))
}

fn find_index(segments: &VecDeque<Segment>, number: FileNumber) -> Option<usize> {
    let index = segments.partition_point(|segment| segment.number < number);
    segments.get(index).filter(|segment| segment.number == number)?;
    Some(index)
}

/// Returns whether the entry of a job keeps the offset of a record there.
pub fn is_known_offset(offset: u64) -> bool {
    record_offset(offset) != FAR_OFFSET
}

fn record_offset(offset: u64) -> u32 {
    u32::try_from(offset).unwrap_or(FAR_OFFSET)
}

fn record_len(len: u64) -> u32 {
    let len = u32::try_from(len).ok().filter(|len| len & KEEPS_KEY == 0);
    len.expect("a body has at most 2^30 bytes")
}

fn file_number(number: FileNumber) -> NonZero<FileNumber> {
    NonZero::new(number).expect("files are numbered from 1")
}

impl Index<usize> for Segments {
    type Output = Segment;

    fn index(&self, index: usize) -> &Segment {
        &self.segments[index]
    }
}

impl IndexMut<usize> for Segments {
    fn index_mut(&mut self, index: usize) -> &mut Segment {
        &mut self.segments[index]
    }
}

/// The links of the lists of jobs in a file.
impl Linked for Entries {
    fn links(&self, key: u32) -> Links {
        self.0[LogKey::from_number(key)].links
    }

    fn set_links(&mut self, key: u32, links: Links) {
        self.0[LogKey::from_number(key)].links = links;
    }
}
