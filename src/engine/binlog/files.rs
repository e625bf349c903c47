//! The table of files, and of the jobs that belong to them.
//!
//! ```text
//!     closed          free      closed       current           prepared
//!   [jobs and garbage] [garbage] [jobs] [records | space] [space] [space]
//!   oldest                                                        newest
//! ```
//!
//! Only the current file is written. Files newer than it are prepared: they have a version and
//! no record. Older ones are closed. A job belongs to the file that has its full record, and a deleted job whose
//! key is kept to the file that has the record of the key. A closed file is free when nothing belongs to it, and it
//! supersedes no record of an older file that is needed: then it can be removed. If older files are left, the
//! gap in the numbers must be recorded before.
//!
//! The table knows no disk. Other modules decide when a file is created or removed. A function panics if it
//! is called with the key of a job that was removed.

use super::Seq;
use super::disk::FileNumber;
use super::gaps::{Gap, Gaps};
use super::record::{FILE_HEAD_LEN, Layout, SHORT_LEN, VERSION_LEN};
use crate::engine::collections::list::{Linked, Links, List};
use crate::engine::collections::slab::PagedSlab;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::{JobKey, Key};
use crate::engine::time::Nanos;
use std::num::NonZero;

/// The length of a short record in bytes.
pub const SHORT: u64 = SHORT_LEN as u64;
/// The length of the version and the file header record in bytes.
pub const HEAD: u64 = FILE_HEAD_LEN as u64;
/// The disk gives space to files in blocks of this many bytes.
pub const BLOCK: u64 = 4096;

/// Files are removed before older ones only if all numbers are within this range: C beanstalkd logs each
/// missing file.
const MOST_NUMBERS: FileNumber = 1000;

/// All files, the oldest first, and the jobs that belong to them.
#[derive(Default)]
pub struct Files {
    // Each record needs the current one, and an index costs less than in a `VecDeque`. Files are few.
    pub list: Vec<File>,
    /// The index of the current file, or of the one that is being read. At the start, before there is a current
    /// one, it is the number of files.
    pub current: usize,
    /// The number before that of the first file.
    pub number_before: FileNumber,
    /// The files that were removed before older ones, and those that soon will be.
    pub gaps: Gaps,
    /// At most this many gaps; without any, files leave oldest first.
    pub most_gaps: usize,
    entries: Entries,
    /// The bytes of the full records of all jobs, with the records of their keys, and of kept keys.
    pub live_bytes: u64,
    /// The number of jobs whose keys will be kept.
    keeping_jobs: u64,
    /// The number of deleted jobs whose keys are kept.
    kept: u64,
    /// No other file has become free since [`Files::count_free`].
    are_free_known: bool,
    /// What [`Files::recount`] has counted.
    pub sums: Sums,
}

/// The sums of the table of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// The bytes that all files take on the disk.
    pub disk_bytes: u64,
    /// The index of the oldest free file, and the bytes that all free ones take on the disk.
    pub first_free: Option<usize>,
    pub free_bytes: u64,
    /// The bytes that closed files take on the disk, without free ones, and the bytes of their records.
    pub closed_bytes: u64,
    pub closed_records: u64,
    /// One of these files is damaged.
    pub has_damaged: bool,
    /// The number of short records that fit in the prepared files.
    pub prepared_room: u64,
    /// The length of the head of the next file in bytes, with the records of gaps.
    pub head_len: u64,
}

/// One file.
pub struct File {
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
    /// A record of it could not be read, which is not lost. It is not emptied before this moment.
    pub unreadable_until: Nanos,
    /// It is free: none of its records is needed. The number of syncs that were begun before, and before the
    /// removal of the file before.
    pub free_since: Option<Seq>,
    /// The oldest file of which a record was superseded by one of this file so far.
    reaches: FileNumber,
    jobs: List,
    /// The bytes of the full records of its jobs, with the records of their keys, and of kept keys.
    pub live_bytes: u64,
}

type Entries = PagedSlab<JobKey, Entry>;

/// The entry of a job in 20 bytes.
pub struct Entry {
    file: NonZero<FileNumber>,
    /// The offset of its full record in that file in bytes; 0 if the job is deleted and its key is kept.
    pub offset: u32,
    /// The length in bytes of its full record with the record of its key, or of the kept key; [`KEEPS_KEY`]
    /// is its highest bit.
    len: u32,
    links: Links,
}

/// Set in the length of a job whose key is kept after its delete. Its delete needs two records.
const KEEPS_KEY: u32 = 1 << 31;

const _: () = assert!(size_of::<Option<Entry>>() == 20, "a slot for an entry has 20 bytes");

/// The longest file in bytes: an entry has 32 bits for an offset. C beanstalkd writes no file of 2 GiB.
pub const LONGEST_FILE: u64 = 1 << 32;

impl Entry {
    fn new((file, offset): (FileNumber, u64), len: u64, is_keeping: bool) -> Entry {
        let file = NonZero::new(file).expect("files are numbered from 1");
        let offset = u32::try_from(offset).expect("no file is longer than 4 GiB");
        let len = u32::try_from(len).ok().filter(|len| len & KEEPS_KEY == 0);
        let len = len.expect("a body has at most 2^30 bytes");
        let len = len | if is_keeping { KEEPS_KEY } else { 0 };
        Entry { file, offset, len, links: Links::LOOSE }
    }

    /// Returns the number of the file to which it belongs.
    pub fn file(&self) -> FileNumber {
        self.file.get()
    }

    /// Returns the length in bytes of its full record with the record of its key, or of the kept key.
    pub fn live_bytes(&self) -> u64 {
        u64::from(self.len & !KEEPS_KEY)
    }

    fn keeps_key(&self) -> bool {
        self.len & KEEPS_KEY != 0
    }

    fn is_kept(&self) -> bool {
        self.offset == 0
    }
}

impl File {
    /// Returns a file without jobs.
    pub fn new(number: FileNumber, size: u64, used: u64) -> File {
        File {
            number,
            size,
            used,
            nonce: None,
            layout: Layout::V7_WITH_CRC,
            is_damaged: false,
            unreadable_until: Nanos::ZERO,
            free_since: None,
            reaches: number,
            jobs: List::default(),
            live_bytes: 0,
        }
    }

    /// Returns how many bytes are free.
    pub fn left(&self) -> u64 {
        self.size - self.used
    }

    /// Returns the bytes of its records, without its head.
    pub fn records_len(&self) -> u64 {
        self.used.saturating_sub(HEAD)
    }

    /// Returns whether it has no record.
    pub fn is_unused(&self) -> bool {
        self.used <= VERSION_LEN as u64 && !self.is_damaged
    }

    /// Returns whether each record of a closed file supersedes only records of this file and newer ones, and of
    /// files older than `older`, the newest one before it that is needed. So it can be removed before that.
    pub fn is_apart_from(&self, older: FileNumber) -> bool {
        self.reaches > older && !self.is_damaged
    }

    /// Returns whether no job belongs to it.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Returns the job that has belonged to it longest.
    pub fn first_job(&self) -> Option<JobKey> {
        self.jobs.front().map(JobKey::from_number)
    }
}

impl Files {
    // ---- Files ----

    /// Makes sure that the next [`Files::push`] needs no memory.
    pub fn try_reserve_file(&mut self) -> Result<(), NoMemory> {
        headroom::keeping(Headroom::Quarter, || self.list.try_reserve(1))
    }

    /// Adds a file that is newer than all other files.
    pub fn push(&mut self, file: File) {
        assert!(self.last_number() < file.number, "binlog.{} is not the newest", file.number);
        self.list.push(file);
    }

    /// Returns the number of the newest file. There must be no gap between it and the next one.
    pub fn last_number(&self) -> FileNumber {
        self.list.last().map_or(self.number_before, |file| file.number)
    }

    /// Returns the number of the oldest file, or 0.
    pub fn oldest_number(&self) -> FileNumber {
        self.list.first().map_or(0, |file| file.number)
    }

    /// Returns whether there is a current file. Only at the start there is none.
    pub fn has_current(&self) -> bool {
        self.current < self.list.len()
    }

    /// Returns the current file.
    pub fn current(&self) -> &File {
        &self.list[self.current]
    }

    /// Returns the closed files, the oldest first.
    pub fn closed(&self) -> impl Iterator<Item = &File> {
        self.list.iter().take(self.current)
    }

    /// Returns the prepared files, the oldest first.
    pub fn prepared(&self) -> impl DoubleEndedIterator<Item = &File> + ExactSizeIterator {
        self.list.iter().skip(self.current + 1)
    }

    /// Returns the index of the file with this number.
    pub fn find_file(&self, number: FileNumber) -> Option<usize> {
        let is_at = |index: usize| self.list.get(index).is_some_and(|file| file.number == number);
        // That is its index unless numbers are missing.
        let index = number.checked_sub(self.oldest_number())? as usize;
        if is_at(index) {
            return Some(index);
        }
        let index = self.list.partition_point(|file| file.number < number);
        is_at(index).then_some(index)
    }

    /// Returns the file with this number, which must exist.
    pub fn by_number(&mut self, number: FileNumber) -> &mut File {
        let found = self.find_file(number);
        let index = found.unwrap_or_else(|| panic!("no file has the number {number}"));
        &mut self.list[index]
    }

    /// Returns how many short records fit in a prepared file.
    pub fn fresh_room(&self, prepared: &File) -> u64 {
        prepared.size.saturating_sub(self.sums.head_len) / SHORT
    }

    /// Counts again what depends on the table of files. Each change of it ends with this.
    pub fn recount(&mut self) {
        self.sums = self.count();
    }

    fn count(&self) -> Sums {
        let head_len = HEAD + self.carried_gaps().len() as u64 * SHORT;
        let mut sums = Sums { head_len, ..Sums::default() };
        for (index, file) in self.list.iter().enumerate() {
            let bytes = on_disk(file.size);
            sums.disk_bytes += bytes;
            if file.free_since.is_some() {
                sums.first_free = sums.first_free.or(Some(index));
                sums.free_bytes += bytes;
            } else if index < self.current {
                sums.closed_bytes += bytes;
                sums.closed_records += file.records_len();
                sums.has_damaged |= file.is_damaged;
            } else if index > self.current {
                sums.prepared_room += file.size.saturating_sub(head_len) / SHORT;
            }
        }
        sums
    }

    /// Closes the current file. The oldest prepared one, which must exist, becomes the current one.
    pub fn advance(&mut self) {
        self.are_free_known &= !self.current().is_empty();
        self.current += 1;
        self.recount();
    }

    /// Removes a file from the table, which must have no jobs.
    pub fn remove_file(&mut self, index: usize) {
        let removed = self.list.remove(index);
        assert!(removed.is_empty(), "binlog.{} has jobs", removed.number);
        self.current -= usize::from(index < self.current);
        if index == 0 {
            self.gaps.forget_before(self.oldest_number());
            // There may be room for another gap.
            self.are_free_known = false;
        }
        self.recount();
    }

    // ---- Free files ----

    /// Finds the files that have become free, after this many syncs were begun. A closed file never gets
    /// another job.
    pub fn count_free(&mut self, syncs_begun: Seq) {
        if std::mem::replace(&mut self.are_free_known, true) {
            return;
        }
        let mut gaps_left = self.gaps_left();
        let mut needed = None;
        for file in self.list.iter_mut().take(self.current) {
            if needed.is_some() && gaps_left == 0 {
                break;
            }
            let may_go = needed.is_none_or(|older| file.is_apart_from(older));
            if file.free_since.is_none() && file.is_empty() && may_go {
                gaps_left -= usize::from(needed.is_some());
                file.free_since = Some(syncs_begun);
            }
            if file.free_since.is_none() {
                needed = Some(file.number);
            }
        }
        self.recount();
    }

    /// Returns how many more files may be removed while older ones are needed.
    pub fn gaps_left(&self) -> usize {
        if self.last_number() - self.oldest_number() >= MOST_NUMBERS {
            return 0;
        }
        let is_new = |file: &&File| file.free_since.is_some() && !self.gaps.contains(file.number);
        let unrecorded = self.closed().skip(1).filter(is_new).count();
        self.most_gaps.saturating_sub(self.gaps.iter().len() + unrecorded)
    }

    /// Returns the gaps that the next file begins with: all, unless many files were lost.
    pub fn carried_gaps(&self) -> impl ExactSizeIterator<Item = Gap> + '_ {
        self.gaps.iter().take(self.most_gaps)
    }

    /// Returns whether a file can be removed without the record of a gap: no older file is left, or the
    /// gap is recorded.
    pub fn is_recorded_gap(&self, index: usize) -> bool {
        index == 0 || self.gaps.contains(self.list[index].number)
    }

    // ---- Jobs ----

    /// Returns how many jobs there are that are not deleted.
    pub fn job_count(&self) -> u64 {
        self.entries.len() as u64 - self.kept
    }

    /// Returns how many short records the deletes of all jobs need.
    pub fn delete_records(&self) -> u64 {
        self.job_count() + self.keeping_jobs
    }

    /// Returns the entry of a job.
    pub fn entry(&self, job: JobKey) -> &Entry {
        &self.entries[job]
    }

    /// Returns all jobs, in the order of their files.
    pub fn jobs(&self) -> impl Iterator<Item = JobKey> + '_ {
        self.list.iter().flat_map(|file| file.jobs.iter(&self.entries)).map(JobKey::from_number)
    }

    /// Returns the bytes of memory that all entries take.
    pub fn taken_bytes(&self) -> u64 {
        self.entries.taken_bytes()
    }

    /// Makes sure that the next [`Files::add`] needs no memory, which is of this job.
    pub fn try_reserve(&mut self, job: JobKey) -> Result<(), NoMemory> {
        self.entries.try_reserve(job)
    }

    /// Adds a job whose record, of `len` bytes with that of its key, is in this file at `offset`.
    /// Its key is kept after its delete if it `is_keeping`. Call [`Files::try_reserve`] before.
    pub fn add(&mut self, job: JobKey, place: (FileNumber, u64), len: u64, is_keeping: bool) {
        let added = self.entries.try_insert(job, Entry::new(place, len, is_keeping));
        added.expect("the memory is reserved");
        self.attach(job);
    }

    /// Notes that the job has a new full record in this file at `offset`, of `len` bytes with the record
    /// of its key.
    pub fn move_to(&mut self, job: JobKey, place: (FileNumber, u64), len: u64) {
        self.supersede(job);
        let is_keeping = self.entry(job).keeps_key();
        self.replace(job, Entry::new(place, len, is_keeping));
    }

    /// Notes that the job is deleted, and that the current file has the record of its key, which is kept.
    pub fn keep(&mut self, job: JobKey) {
        self.supersede(job);
        self.replace(job, Entry::new((self.current().number, 0), SHORT, false));
    }

    /// Notes that a job has a key, which will be kept after its delete or not, or no key, and the length of its
    /// records together.
    pub fn set_key(&mut self, key: JobKey, len: u64, is_keeping: bool) {
        let &Entry { file, offset, .. } = self.entry(key);
        let place = (file.get(), offset.into());
        self.replace(key, Entry::new(place, len, is_keeping));
    }

    fn replace(&mut self, job: JobKey, entry: Entry) {
        self.detach(job);
        self.entries[job] = entry;
        self.attach(job);
    }

    /// Removes a job and returns its entry.
    pub fn remove(&mut self, job: JobKey) -> Entry {
        self.detach(job);
        self.entries.remove(job).expect("it was just detached")
    }

    /// Notes that a record of the current file supersedes one of a job.
    pub fn supersede(&mut self, job: JobKey) {
        self.supersede_file(self.entry(job).file());
    }

    /// Notes that a record of the current file supersedes one of this file, or of any for 0.
    pub fn supersede_file(&mut self, older: FileNumber) {
        let file = &mut self.list[self.current];
        file.reaches = file.reaches.min(older);
    }

    #[inline(always)]
    fn attach(&mut self, job: JobKey) {
        let entry = &self.entries[job];
        let (number, len) = (entry.file(), entry.live_bytes());
        self.keeping_jobs += u64::from(entry.keeps_key());
        self.kept += u64::from(entry.is_kept());
        let index = self.find_file(number).expect("a record is in a file");
        let file = &mut self.list[index];
        file.jobs.push_back(&mut self.entries, job.number());
        file.live_bytes += len;
        self.live_bytes += len;
    }

    #[inline(always)]
    fn detach(&mut self, job: JobKey) {
        let entry = &self.entries[job];
        let (number, len) = (entry.file(), entry.live_bytes());
        self.keeping_jobs -= u64::from(entry.keeps_key());
        self.kept -= u64::from(entry.is_kept());
        let index = self.find_file(number).expect("a record is in a file");
        let file = &mut self.list[index];
        file.jobs.remove(&mut self.entries, job.number());
        let rest = file.live_bytes.checked_sub(len);
        file.live_bytes = rest.expect("the record counts as live in its file");
        self.are_free_known &= !file.is_empty() || index == self.current;
        self.live_bytes -= len;
    }

    // ---- Checking ----

    /// Panics unless all sums and lists agree, and each file is in the state that its position requires.
    pub fn check(&self) {
        assert_eq!(self.sums, self.count(), "sums of all files, noted and counted");
        self.list.iter().for_each(|file| self.check_file(file));
        self.entries.check(format_args!("the entries of jobs"));
        let of_files: u32 = self.list.iter().map(|file| file.jobs.len()).sum();
        assert_eq!(self.entries.len(), of_files as usize, "jobs with entries, and of all files");
        assert!(self.list.iter().is_sorted_by_key(|file| file.number), "files are in order");
        let live_bytes: u64 = self.list.iter().map(|file| file.live_bytes).sum();
        assert_eq!(self.live_bytes, live_bytes, "live bytes of the binlog, and of its files");
        let count = |is_such: fn(&Entry) -> bool| {
            self.entries.iter().filter(|(_, entry)| is_such(entry)).count() as u64
        };
        let counted = [count(Entry::keeps_key), count(Entry::is_kept)];
        assert_eq!([self.keeping_jobs, self.kept], counted, "jobs that will keep or keep keys");
        let File { number, used, is_damaged, .. } = *self.current();
        assert!(used >= HEAD && !is_damaged, "binlog.{number} is the current file without a head");
        for (number, prepared) in (number + 1..).zip(self.prepared()) {
            assert_eq!(prepared.number, number, "the number of a prepared file");
            let is_unused = prepared.is_unused() && prepared.is_empty();
            assert!(
                is_unused,
                "binlog.{number} is only prepared, but {} bytes are used",
                prepared.used
            );
        }
    }

    fn check_file(&self, file: &File) {
        let File { number, size, used, .. } = *file;
        assert!(used <= size, "binlog.{number}: {used} bytes of {size} are used");
        assert!(
            file.free_since.is_none() || file.is_empty(),
            "binlog.{number} is free and has jobs"
        );
        let mut live_bytes = 0;
        file.jobs.check(&self.entries, format_args!("the jobs of binlog.{number}"), |key| {
            let entry = self.entry(JobKey::from_number(key));
            assert_eq!(entry.file(), number, "the file of an entry, and of the list with it");
            live_bytes += entry.live_bytes();
        });
        assert_eq!(file.live_bytes, live_bytes, "live bytes of binlog.{number}, noted and counted");
    }
}

/// Returns the bytes that a file of `size` bytes takes on the disk.
pub fn on_disk(size: u64) -> u64 {
    size.next_multiple_of(BLOCK)
}

/// The links of the list of jobs in a file.
impl Linked for Entries {
    fn links(&self, key: u32) -> Links {
        self[JobKey::from_number(key)].links
    }

    fn links_mut(&mut self, key: u32) -> &mut Links {
        &mut self[JobKey::from_number(key)].links
    }
}
