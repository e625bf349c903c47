//! Which files there are, and which jobs belong to which: a job belongs to the file that has
//! its full record.
//!
//! Only that is kept here. When files come and go is decided in `binlog.rs`.

use super::disk::FileNumber;
use super::record::RecordState;
use crate::engine::collections::list::{Linked, Links, List};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, Key, LogKey};
use crate::engine::time::Nanos;
use std::collections::{TryReserveError, VecDeque};
use std::ops::{Index, IndexMut};

/// All files, from the oldest on, and the jobs that belong to them.
#[derive(Debug, Default)]
pub struct Segments {
    segments: VecDeque<Segment>,
    entries: Entries,
    /// The full records of all jobs, in bytes.
    live_bytes: u64,
}

/// One file.
#[derive(Debug)]
pub struct Segment {
    /// Its number.
    pub number: FileNumber,
    /// How many bytes it has.
    pub size: u64,
    /// How many of them are used.
    pub used: u64,
    /// The nonce of its records, if it was read from the first record of the file.
    pub nonce: Option<u32>,
    /// When it is not needed any more it is set aside, not removed.
    pub is_damaged: bool,
    jobs: List,
    live_bytes: u64,
}

/// What the binlog knows of a live job.
#[derive(Debug)]
pub struct Entry {
    /// The job.
    pub job: JobKey,
    /// The number of the file to which it belongs.
    pub file: FileNumber,
    /// The length of its full record in bytes.
    pub len: u32,
    /// What the record read last says; of no use once all files have been read.
    pub state: RecordState,
    /// When it was buried; while files are read, also when it is due.
    pub due_or_buried_at: Nanos,
    links: Links,
}

#[derive(Debug, Default)]
struct Entries(PagedSlab<LogKey, Entry>);

impl Segment {
    /// A file to which no job belongs.
    pub fn new(number: FileNumber, size: u64, used: u64) -> Segment {
        let jobs = List::default();
        Segment { number, size, used, nonce: None, is_damaged: false, jobs, live_bytes: 0 }
    }

    /// How many bytes are free.
    pub fn left(&self) -> u64 {
        self.size - self.used
    }

    /// How many bytes the full records of the jobs have that belong to it.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// Whether no job belongs to it.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    fn check(&self, entries: &Entries) {
        let Segment { number, size, used, .. } = self;
        assert!(used <= size, "binlog.{number}: {used} bytes of {size} are used");
        let mut live_bytes = 0;
        self.jobs.check(entries, format_args!("the jobs of binlog.{number}"), |key| {
            let Entry { job, file, len, .. } = &entries.0[LogKey::from_number(key)];
            assert_eq!(file, number, "the file of {job:?}, and the one among whose jobs it is");
            live_bytes += u64::from(*len);
        });
        assert_eq!(self.live_bytes, live_bytes, "live bytes of binlog.{number}, noted and counted");
    }

    /// The job that has belonged to it longest.
    pub fn first_job(&self) -> Option<LogKey> {
        self.jobs.front().map(LogKey::from_number)
    }
}

impl Segments {
    // ---- Files ----

    /// How many files there are.
    pub fn len(&self) -> usize {
        self.segments.len()
    }

    /// Whether there is no file.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Makes sure that the next [`Segments::push`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_file(&mut self) -> Result<(), TryReserveError> {
        headroom::leave(Headroom::Quarter, || self.segments.try_reserve(1))
    }

    /// Adds a file that is newer than all others.
    pub fn push(&mut self, segment: Segment) {
        self.segments.push_back(segment);
    }

    /// The newest file.
    pub fn newest(&self) -> Option<&Segment> {
        self.segments.back()
    }

    /// Takes away the oldest file.
    ///
    /// # Panics
    /// A job belongs to it, or there is none.
    pub fn pop_oldest(&mut self) -> Segment {
        let segment = self.segments.pop_front().filter(Segment::is_empty);
        segment.expect("only a file without jobs goes")
    }

    /// Takes away the newest file.
    ///
    /// # Panics
    /// A job belongs to it, or there is none.
    pub fn pop_newest(&mut self) -> Segment {
        let segment = self.segments.pop_back().filter(Segment::is_empty);
        segment.expect("only a file without jobs goes")
    }

    /// The files, from the oldest on.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Segment> + ExactSizeIterator + Clone {
        self.segments.iter()
    }

    /// The file of this number.
    ///
    /// # Panics
    /// There is none.
    pub fn numbered(&mut self, number: FileNumber) -> &mut Segment {
        let place = self.place_of(number);
        let segment = self.segments.get_mut(place).filter(|segment| segment.number == number);
        segment.expect("it was pushed and not popped")
    }

    fn place_of(&self, number: FileNumber) -> usize {
        self.segments.partition_point(|segment| segment.number < number)
    }

    // ---- Jobs ----

    /// How many jobs there are.
    pub fn job_count(&self) -> u64 {
        self.entries.0.len() as u64
    }

    /// How many bytes their full records have.
    pub fn live_bytes(&self) -> u64 {
        self.live_bytes
    }

    /// What is known of a job.
    pub fn entry(&self, key: LogKey) -> &Entry {
        &self.entries.0[key]
    }

    /// The same, if it is known.
    pub fn find(&self, key: LogKey) -> Option<&Entry> {
        self.entries.0.get(key)
    }

    /// The same, to be changed.
    pub fn entry_mut(&mut self, key: LogKey) -> &mut Entry {
        &mut self.entries.0[key]
    }

    /// All jobs, by the files to which they belong.
    pub fn jobs(&self) -> impl Iterator<Item = JobKey> + '_ {
        let keys = self.segments.iter().flat_map(|segment| segment.jobs.iter(&self.entries));
        keys.map(|key| self.entries.0[LogKey::from_number(key)].job)
    }

    /// How many bytes of memory it takes to know all that.
    pub fn taken_bytes(&self) -> u64 {
        self.entries.0.taken_bytes()
    }

    /// The part of one job.
    pub const BYTES_OF_A_JOB: u64 = size_of::<Entry>() as u64;

    /// Makes sure that the next [`Segments::add_job`] needs no memory.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn try_reserve_one(&mut self) -> Result<(), TryReserveError> {
        self.entries.0.try_reserve_one()
    }

    /// Adds a job whose full record, of `len` bytes, is in this file.
    ///
    /// # Panics
    /// There was no successful [`Segments::try_reserve_one`] before.
    pub fn add_job(&mut self, job: JobKey, file: FileNumber, len: u64) -> LogKey {
        let len = short(len);
        let links = Links::LOOSE;
        let entry = Entry {
            job,
            file,
            len,
            state: RecordState::Ready,
            due_or_buried_at: Nanos::ZERO,
            links,
        };
        let key = self.entries.0.insert(entry);
        self.enter(key);
        key
    }

    /// The full record of the job is in this file from now on.
    pub fn move_job(&mut self, key: LogKey, file: FileNumber, len: u64) {
        self.leave(key);
        let entry = &mut self.entries.0[key];
        entry.file = file;
        entry.len = short(len);
        self.enter(key);
    }

    /// The job is gone; says what was known of it.
    ///
    /// # Panics
    /// It was gone before.
    pub fn remove_job(&mut self, key: LogKey) -> Entry {
        self.leave(key);
        self.entries.0.remove(key).expect("a job goes once")
    }

    /// Files have rising numbers, and every job belongs to one of them, which counts the bytes of its
    /// record.
    ///
    /// # Panics
    /// It is not so.
    pub fn check(&self) {
        self.entries.0.check(format_args!("what the binlog knows of jobs"));
        let (mut jobs, mut live_bytes) = (0, 0);
        let mut last = None;
        for segment in &self.segments {
            assert!(last < Some(segment.number), "binlog.{} comes after {last:?}", segment.number);
            last = Some(segment.number);
            segment.check(&self.entries);
            jobs += u64::from(segment.jobs.len());
            live_bytes += segment.live_bytes;
        }
        assert_eq!(self.job_count(), jobs, "jobs that the binlog knows, and jobs in its files");
        assert_eq!(self.live_bytes, live_bytes, "live bytes of the binlog, and of its files");
    }

    fn enter(&mut self, key: LogKey) {
        let Entry { file, len, .. } = self.entries.0[key];
        let place = self.place_of(file);
        let segment = &mut self.segments[place];
        segment.jobs.push_back(&mut self.entries, key.number());
        segment.live_bytes += u64::from(len);
        self.live_bytes += u64::from(len);
    }

    fn leave(&mut self, key: LogKey) {
        let Entry { file, len, .. } = self.entries.0[key];
        let place = self.place_of(file);
        let segment = &mut self.segments[place];
        segment.jobs.remove(&mut self.entries, key.number());
        segment.live_bytes -= u64::from(len);
        self.live_bytes -= u64::from(len);
    }
}

fn short(len: u64) -> u32 {
    u32::try_from(len).expect("bodies are not much longer than 2^30 bytes")
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

/// For the lists of jobs in a file.
impl Linked for Entries {
    fn links(&self, key: u32) -> Links {
        self.0[LogKey::from_number(key)].links
    }

    fn set_links(&mut self, key: u32, links: Links) {
        self.0[LogKey::from_number(key)].links = links;
    }
}
