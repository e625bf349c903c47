//! A remote disk in memory. It queues changes, stores them later in their order, and acknowledges
//! each stored change.
//!
//! A write is divided into chunks, as in a cluster, and each chunk is a change of its own. A crash
//! leaves the stored changes, and any number of the next ones: their outcome is unknown to the
//! server. After a change is refused, because another server leads, nothing is stored any more.

use super::fake_disk::{Files, name};
use beanstalkd::testing::{Disk, FileNumber, Progress};
use std::cell::RefCell;
use std::collections::{BTreeSet, VecDeque};
use std::io::{self, ErrorKind};
use std::rc::Rc;

/// A handle on the disk: clones are of the same one.
#[derive(Clone, Debug)]
pub struct RemoteDisk(Rc<RefCell<State>>);

#[derive(Debug)]
struct State {
    /// The files with all changes, as the server knows them.
    live: Files,
    /// Files of which nothing is stored, because they have no record.
    unstored: BTreeSet<FileNumber>,
    /// The files with the stored changes.
    stored: Files,
    /// The changes that are not acknowledged, the oldest first.
    waiting: VecDeque<Waiting>,
    waiting_bytes: usize,
    /// The number of the last change.
    written: u64,
    /// The number of the last change that the server has handed over.
    handed_over: u64,
    acknowledged: u64,
    /// The number of bytes in a chunk.
    chunk_len: usize,
    /// The disk is congested while more bytes wait.
    congested_above: usize,
    /// Changes are handed over only when all earlier ones are acknowledged.
    is_batched: bool,
    /// Decides how many changes are acknowledged as soon as they are handed over.
    eager: Option<fastrand::Rng>,
    refuses_puts: bool,
    /// A change was refused. The stored files are those of the next server.
    is_refused: bool,
}

/// A change that is not acknowledged.
#[derive(Debug)]
struct Waiting {
    number: u64,
    change: Change,
}

#[derive(Debug)]
enum Change {
    Write { name: String, offset: usize, bytes: Vec<u8> },
    Truncate { name: String, size: usize },
    Remove { name: String },
    Rename { from: String, to: String },
}

/// The bytes of the version at the start of a file. A file of which nothing else was written is not
/// stored.
const VERSION_LEN: usize = 4;
/// The number of the first change is not 1, so that no test depends on it.
const FIRST_NUMBER: u64 = 1_000;

impl RemoteDisk {
    /// Returns an empty disk that stores `chunk_len` bytes at once.
    pub fn new(chunk_len: usize) -> RemoteDisk {
        RemoteDisk::with_files(Files::new(), chunk_len)
    }

    /// Returns a disk with these files.
    pub fn with_files(files: Files, chunk_len: usize) -> RemoteDisk {
        RemoteDisk(Rc::new(RefCell::new(State {
            live: files.clone(),
            unstored: BTreeSet::new(),
            stored: files,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            written: FIRST_NUMBER,
            handed_over: FIRST_NUMBER,
            acknowledged: FIRST_NUMBER,
            chunk_len,
            congested_above: usize::MAX,
            is_batched: false,
            eager: None,
            refuses_puts: false,
            is_refused: false,
        })))
    }

    pub fn boxed(&self) -> Box<dyn Disk> {
        Box::new(self.clone())
    }

    /// Makes the disk congested while more than this number of bytes wait.
    pub fn set_congested_above(&self, bytes: usize) {
        self.0.borrow_mut().congested_above = bytes;
    }

    /// Hands changes over only when all earlier ones are acknowledged, from now on.
    pub fn set_batched(&self) {
        self.0.borrow_mut().is_batched = true;
    }

    /// Sets whether the disk has no space for puts.
    pub fn set_refusing_puts(&self, is_refusing: bool) {
        self.0.borrow_mut().refuses_puts = is_refusing;
    }

    /// Acknowledges some changes as soon as they are handed over, from now on.
    pub fn set_eager(&self, random: fastrand::Rng) {
        self.0.borrow_mut().eager = Some(random);
    }

    // ---- Acknowledging ----

    /// Stores and acknowledges the next `count` changes that were handed over, or all that there are.
    pub fn acknowledge(&self, count: usize) {
        self.0.borrow_mut().acknowledge(count);
    }

    /// Stores and acknowledges all changes that were handed over.
    pub fn acknowledge_all(&self) {
        self.acknowledge(usize::MAX);
    }

    /// Refuses one of the changes that were handed over: another server leads. Those before it are
    /// stored, but not acknowledged.
    pub fn refuse(&self, random: &mut fastrand::Rng) {
        let count = random.usize(..=self.handed_over());
        let mut state = self.0.borrow_mut();
        if !state.is_refused {
            state.stored = state.files_after(count);
            state.is_refused = true;
        }
    }

    pub fn is_refused(&self) -> bool {
        self.0.borrow().is_refused
    }

    /// Returns the number of changes that are not acknowledged.
    pub fn waiting(&self) -> usize {
        self.0.borrow().waiting.len()
    }

    /// Returns the number of changes that are handed over and not acknowledged.
    pub fn handed_over(&self) -> usize {
        let state = self.0.borrow();
        state.waiting.partition_point(|waiting| waiting.number <= state.handed_over)
    }

    /// Returns whether the server has handed over all changes that it may.
    pub fn has_all(&self) -> bool {
        let state = self.0.borrow();
        state.is_batched && state.acknowledged < state.handed_over
            || state.handed_over == state.written
    }

    /// Returns the number of the last change that was handed over.
    pub fn last_handed_over(&self) -> u64 {
        self.0.borrow().handed_over
    }

    pub fn progress(&self) -> Progress {
        let State { written, acknowledged, waiting_bytes, congested_above, .. } = *self.0.borrow();
        Progress { written, acknowledged, is_congested: waiting_bytes > congested_above }
    }

    // ---- Files ----

    /// Returns the files that the next server finds if `count` changes that wait were stored.
    pub fn files_after(&self, count: usize) -> Files {
        self.0.borrow().files_after(count)
    }

    /// Returns the files as the server knows them.
    pub fn live_files(&self) -> Files {
        self.0.borrow().live.clone()
    }

    /// Returns the number of bytes of all files, also of those that were set aside.
    pub fn used(&self) -> u64 {
        self.0.borrow().live.values().map(|bytes| bytes.len() as u64).sum()
    }

    /// Returns the number of bytes of all files that were not set aside.
    pub fn used_by_binlog(&self) -> u64 {
        let state = self.0.borrow();
        let files = state.live.iter().filter(|(name, _)| !name.ends_with(".damaged"));
        files.map(|(_, bytes)| bytes.len() as u64).sum()
    }
}

impl State {
    fn acknowledge(&mut self, count: usize) {
        if self.is_refused {
            return;
        }
        for _ in 0..count {
            let handed_over = self.handed_over;
            let first = self.waiting.pop_front_if(|first| first.number <= handed_over);
            let Some(Waiting { number, change }) = first else { return };
            change.apply(&mut self.stored);
            self.waiting_bytes -= change.len();
            self.acknowledged = number;
        }
    }

    /// Returns the stored files with the next `count` changes.
    fn files_after(&self, count: usize) -> Files {
        let mut files = self.stored.clone();
        if !self.is_refused {
            self.waiting.iter().take(count).for_each(|waiting| waiting.change.apply(&mut files));
        }
        files
    }

    /// Queues a change. The numbers of changes have gaps.
    fn queue(&mut self, change: Change) {
        self.written += 1 + change.len() as u64;
        self.waiting_bytes += change.len();
        self.waiting.push_back(Waiting { number: self.written, change });
    }

    fn file(&mut self, number: FileNumber) -> io::Result<&mut Vec<u8>> {
        self.live.get_mut(&name(number)).ok_or_else(|| ErrorKind::NotFound.into())
    }
}

impl Change {
    fn len(&self) -> usize {
        match self {
            Change::Write { bytes, .. } => bytes.len(),
            Change::Truncate { .. } | Change::Remove { .. } | Change::Rename { .. } => 0,
        }
    }

    fn apply(&self, files: &mut Files) {
        match self {
            Change::Write { name, offset, bytes } => {
                let file = files.entry(name.clone()).or_default();
                assert_eq!(file.len(), *offset, "{name} is appended to");
                file.extend_from_slice(bytes);
            }
            Change::Truncate { name, size } => {
                files
                    .get_mut(name)
                    .expect("a file is truncated before it is removed")
                    .truncate(*size);
            }
            Change::Remove { name } => {
                files.remove(name);
            }
            Change::Rename { from, to } => {
                let bytes = files.remove(from).expect("a stored file is renamed");
                files.insert(to.clone(), bytes);
            }
        }
    }
}

impl Disk for RemoteDisk {
    fn list(&mut self) -> io::Result<Vec<FileNumber>> {
        let state = self.0.borrow();
        let digits = state.live.keys().filter_map(|name| name.strip_prefix("binlog."));
        let mut numbers: Vec<FileNumber> = digits.filter_map(|text| text.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        Ok(self.0.borrow_mut().file(number)?.len() as u64)
    }

    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let mut state = self.0.borrow_mut();
        let file = state.file(number)?;
        let offset = usize::try_from(offset).expect("test files are small").min(file.len());
        let count = bytes.len().min(file.len() - offset);
        bytes[..count].copy_from_slice(&file[offset..offset + count]);
        Ok(count)
    }

    fn create(&mut self, number: FileNumber, _size: u64) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        let replaced = state.live.insert(name(number), Vec::new());
        assert!(replaced.is_none(), "{} exists", name(number));
        state.unstored.insert(number);
        Ok(())
    }

    fn extend(&mut self, _number: FileNumber, _size: u64) -> io::Result<()> {
        Ok(())
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        let file = state.file(number)?;
        assert_eq!(file.len() as u64, offset, "{} is appended to", name(number));
        file.extend_from_slice(bytes);
        let len = file.len();
        if len <= VERSION_LEN {
            return Ok(());
        }
        // The version is stored with the first record.
        let is_first = state.unstored.remove(&number);
        let mut offset = if is_first { 0 } else { len - bytes.len() };
        let bytes = state.file(number)?[offset..].to_vec();
        for chunk in bytes.chunks(state.chunk_len) {
            state.queue(Change::Write { name: name(number), offset, bytes: chunk.to_vec() });
            offset += chunk.len();
        }
        Ok(())
    }

    fn will_sync(&mut self, _: FileNumber, _: u64, _: u64) {}

    fn sync(&mut self, number: FileNumber) -> io::Result<()> {
        panic!("a sync of {}: a remote disk needs none", name(number))
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        panic!("a sync of the directory: a remote disk needs none")
    }

    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let size = usize::try_from(size).expect("test files are small");
        let mut state = self.0.borrow_mut();
        let file = state.file(number)?;
        if size < file.len() {
            file.truncate(size);
            state.queue(Change::Truncate { name: name(number), size });
        }
        Ok(())
    }

    fn close(&mut self, _number: FileNumber) {}

    fn remove(&mut self, number: FileNumber) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        let existed = state.live.remove(&name(number)).is_some();
        if existed && !state.unstored.remove(&number) {
            state.queue(Change::Remove { name: name(number) });
        }
        Ok(())
    }

    fn truncate_step(&mut self) -> bool {
        false
    }

    fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        let (from, to) = (name(number), format!("{}.damaged", name(number)));
        let mut state = self.0.borrow_mut();
        let bytes = state.live.remove(&from).ok_or(ErrorKind::NotFound)?;
        state.live.insert(to.clone(), bytes);
        state.queue(Change::Rename { from, to: to.clone() });
        Ok(to)
    }

    fn hand_over(&mut self) {
        let mut state = self.0.borrow_mut();
        if state.is_batched && state.acknowledged < state.handed_over {
            return;
        }
        state.handed_over = state.written;
        let waiting = state.waiting.len();
        if let Some(random) = &mut state.eager
            && random.bool()
        {
            let count = random.usize(..=waiting);
            state.acknowledge(count);
        }
    }

    fn progress(&self) -> Option<Progress> {
        Some(RemoteDisk::progress(self))
    }

    fn refuses_puts(&self) -> bool {
        self.0.borrow().refuses_puts
    }
}
