//! A disk in memory that fills up, fails and loses power.
//!
//! It keeps two images: the live one, which a process that starts again sees, and the durable
//! one, which a power cut leaves. What is between the two may reach the durable image in any
//! order, in part, or not at all.

use beanstalkd::testing::{Disk, FileNumber, FinishedRead, ReadToken, SyncError};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};
use std::rc::Rc;

/// Files by their names.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A handle on the disk: clones are of the same one.
#[derive(Clone, Debug, Default)]
pub struct FakeDisk(Rc<RefCell<State>>);

#[derive(Clone, Debug, Default)]
struct State {
    files: BTreeMap<String, usize>,
    durable_files: BTreeMap<String, usize>,
    name_changes: Vec<NameChange>,
    inodes: Vec<Inode>,
    /// How many bytes fit, in whole blocks.
    capacity: Option<u64>,
    /// How many calls that change something there were.
    changes: u64,
    /// The first change that fails, and the error of it and of all later ones.
    fail_from: Option<(u64, ErrorKind)>,
    /// How many syncs of files and names succeed from now on; `None` for all.
    syncs_left: Option<u64>,
    /// The error of each truncation.
    cut_error: Option<ErrorKind>,
    /// Copies of the disk before each change, if a test wants them.
    history: Option<Vec<FakeDisk>>,
    /// Reads of bodies are never done at once.
    reads_late: bool,
    /// What was begun to be read: it is read when the result is taken.
    reads: VecDeque<(ReadToken, FileNumber, u64, u32)>,
    /// At most this many reads end from now on; `None` for no limit.
    reads_left: Option<usize>,
    /// The next reads of bodies have these results.
    read_faults: VecDeque<ReadFault>,
    /// Syncs that replies do not wait for are done in the background.
    syncs_in_background: bool,
    background_sync: Option<BackgroundSync>,
    /// The result of the last background sync, until the server takes it.
    ended_sync: Option<Result<(), (Option<FileNumber>, ErrorKind)>>,
    background_syncs_begun: u64,
    sync_results_taken: u64,
    syncs: u64,
    writes: u64,
    bytes_written: u64,
    /// The most bytes that all files had at once.
    peak: u64,
}

/// A background sync. What is written later is not synced by it.
#[derive(Clone, Debug)]
struct BackgroundSync {
    /// The number of each file, its inode, and the number of its changes.
    files: Vec<(FileNumber, usize, usize)>,
    /// The number of changes of names, if they are synced.
    name_changes: Option<usize>,
}

#[derive(Clone, Debug, Default)]
struct Inode {
    live: Vec<u8>,
    durable: Vec<u8>,
    changes: Vec<Change>,
}

#[derive(Clone, Debug)]
enum Change {
    Write { offset: usize, bytes: Vec<u8> },
    Resize { size: usize },
}

#[derive(Clone, Debug)]
enum NameChange {
    Add { name: String, inode: usize },
    Remove { name: String },
    Rename { from: String, to: String },
}

/// What goes wrong when a body is read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadFault {
    /// Nothing.
    None,
    /// The disk reports that it has lost the bytes.
    Error,
    /// A bit is another one, but not on the disk.
    FlippedBit,
    /// Too many files are open.
    TooManyFiles,
    /// The file cannot be opened: it was moved away, or others may not read it any more.
    NotOpened,
}

const BLOCK: u64 = 4096;
const SECTOR: usize = 512;

impl FakeDisk {
    /// A disk with these files.
    pub fn with_files(files: &Files) -> FakeDisk {
        let disk = FakeDisk::default();
        let mut state = disk.0.borrow_mut();
        for (name, bytes) in files {
            let inode = state.inodes.len();
            state.inodes.push(Inode {
                live: bytes.clone(),
                durable: bytes.clone(),
                changes: Vec::new(),
            });
            state.files.insert(name.clone(), inode);
            state.durable_files.insert(name.clone(), inode);
        }
        drop(state);
        disk
    }

    /// An empty disk on which this number of bytes fits.
    pub fn with_capacity(capacity: u64) -> FakeDisk {
        let disk = FakeDisk::default();
        disk.set_capacity(Some(capacity));
        disk
    }

    pub fn boxed(&self) -> Box<dyn Disk> {
        Box::new(self.clone())
    }

    // ---- Faults ----

    /// Sets the number of bytes that fit.
    pub fn set_capacity(&self, capacity: Option<u64>) {
        self.0.borrow_mut().capacity = capacity;
    }

    /// Makes this change, counted from 1, and all later ones fail.
    pub fn fail_from(&self, change: u64, error: ErrorKind) {
        self.0.borrow_mut().fail_from = Some((change, error));
    }

    /// Makes all syncs of files and names fail after this number of them. Other changes succeed.
    pub fn fail_syncs_after(&self, count: u64) {
        self.0.borrow_mut().syncs_left = Some(count);
    }

    /// Makes each truncation fail from now on.
    pub fn fail_cuts(&self, error: ErrorKind) {
        self.0.borrow_mut().cut_error = Some(error);
    }

    /// Makes reads of bodies end later.
    pub fn delay_reads(&self) {
        self.set_reads_late(true);
    }

    /// Decides whether reads of bodies that begin from now on end later.
    pub fn set_reads_late(&self, are_late: bool) {
        self.0.borrow_mut().reads_late = are_late;
    }

    /// Carries out syncs that replies do not wait for in the background.
    pub fn sync_in_background(&self) {
        self.0.borrow_mut().syncs_in_background = true;
    }

    pub fn are_syncs_in_background(&self) -> bool {
        self.0.borrow().syncs_in_background
    }

    /// Ends the background sync, if there is one. The server notices that later.
    pub fn let_sync_end(&self) {
        self.0.borrow_mut().end_background_sync();
    }

    /// Drops the reads and the sync that the killed process had begun.
    pub fn kill_process(&self) {
        let mut state = self.0.borrow_mut();
        state.background_sync = None;
        state.ended_sync = None;
        state.reads.clear();
    }

    /// Flips a bit in the middle of these bytes, wherever they are first in the file.
    pub fn flip_byte(&self, name: &str, bytes: &str) {
        let mut state = self.0.borrow_mut();
        let inode = state.files[name];
        let live = &mut state.inodes[inode].live;
        let mut windows = live.windows(bytes.len());
        let at = windows.position(|window| window == bytes.as_bytes());
        live[at.expect("the file has these bytes") + bytes.len() / 2] ^= 1;
    }

    pub fn are_reads_late(&self) -> bool {
        self.0.borrow().reads_late
    }

    /// Lets this many reads of bodies end from now on; `None` for all.
    pub fn let_reads_end(&self, count: Option<usize>) {
        self.0.borrow_mut().reads_left = count;
    }

    /// Sets what goes wrong with one of the next reads of bodies.
    pub fn add_read_fault(&self, fault: ReadFault) {
        self.0.borrow_mut().read_faults.push_back(fault);
    }

    /// From now on nothing goes wrong with reads of bodies.
    pub fn end_read_faults(&self) {
        self.0.borrow_mut().read_faults.clear();
    }

    /// Returns whether a read of a body can end.
    pub fn has_reads(&self) -> bool {
        let state = self.0.borrow();
        !state.reads.is_empty() && state.reads_left != Some(0)
    }

    /// Ends all failures.
    pub fn heal(&self) {
        self.0.borrow_mut().fail_from = None;
    }

    /// Flips random bits of the files, except in the version at the start of a file.
    pub fn flip_bits(&self, random: &mut fastrand::Rng, count: u32) {
        const VERSION_LEN: usize = 4;
        let mut state = self.0.borrow_mut();
        let inodes: Vec<usize> = state.files.values().copied().collect();
        for _ in 0..count {
            let Some(&inode) = random.choice(&inodes) else { return };
            let Inode { live, durable, .. } = &mut state.inodes[inode];
            if live.len() <= VERSION_LEN {
                continue;
            }
            let (place, bit) = (random.usize(VERSION_LEN..live.len()), 1 << random.u8(..8));
            live[place] ^= bit;
            if let Some(byte) = durable.get_mut(place) {
                *byte ^= bit;
            }
        }
    }

    /// Keeps a copy of the disk before each change from now on, and in the middle of each write.
    pub fn remember(&self) {
        self.0.borrow_mut().history = Some(Vec::new());
    }

    /// Takes the copies since the last call.
    pub fn take_history(&self) -> Vec<FakeDisk> {
        self.0.borrow_mut().history.replace(Vec::new()).unwrap_or_default()
    }

    // ---- Figures ----

    /// How many changes there were so far.
    pub fn changes(&self) -> u64 {
        self.0.borrow().changes
    }

    /// How many syncs of files there were that the server has waited for.
    pub fn syncs(&self) -> u64 {
        self.0.borrow().syncs
    }

    /// How many background syncs were begun, and how many results the server has taken.
    pub fn background_syncs(&self) -> (u64, u64) {
        let state = self.0.borrow();
        (state.background_syncs_begun, state.sync_results_taken)
    }

    /// How many writes there were.
    pub fn writes(&self) -> u64 {
        self.0.borrow().writes
    }

    /// How many bytes were written.
    pub fn bytes_written(&self) -> u64 {
        self.0.borrow().bytes_written
    }

    /// How many bytes the files take.
    pub fn used(&self) -> u64 {
        self.0.borrow().used()
    }

    /// The most that they took since the last call.
    pub fn take_peak(&self) -> u64 {
        let mut state = self.0.borrow_mut();
        let used = state.used();
        std::mem::replace(&mut state.peak, used)
    }

    /// How many bytes the files take without those that were set aside.
    pub fn used_by_binlog(&self) -> u64 {
        let state = self.0.borrow();
        let files = state.files.iter().filter(|(name, _)| !name.ends_with(".damaged"));
        let sizes = files.map(|(_, &inode)| state.inodes[inode].live.len() as u64);
        sizes.map(|size| size.next_multiple_of(BLOCK)).sum()
    }

    /// The names of the files, and how many bytes each takes.
    pub fn names(&self) -> String {
        let files = self.live_files();
        let sizes = files.iter().map(|(name, bytes)| format!("{name}: {}", bytes.len()));
        sizes.collect::<Vec<String>>().join(", ")
    }

    /// The files as a process sees them.
    pub fn live_files(&self) -> Files {
        let state = self.0.borrow();
        let files = state.files.iter();
        files.map(|(name, &inode)| (name.clone(), state.inodes[inode].live.clone())).collect()
    }

    /// The files as a power cut leaves them: each sector is as it was at some moment since the
    /// last sync, and so is the length; and of the names that changed, each may be back.
    pub fn files_after_power_cut(&self, random: &mut fastrand::Rng) -> Files {
        let state = self.0.borrow();
        let mut names = state.durable_files.clone();
        for change in &state.name_changes {
            if random.bool() {
                change.apply(&mut names);
            }
        }
        let mut files = BTreeMap::new();
        for (name, inode) in names {
            let bytes = state.inodes[inode].after_power_cut(random);
            files.insert(name, bytes);
        }
        files
    }
}

impl State {
    fn used(&self) -> u64 {
        let sizes = self.files.values().map(|&inode| self.inodes[inode].live.len() as u64);
        sizes.map(|size| size.next_multiple_of(BLOCK)).sum()
    }

    /// Counts a change, and fails it if it was ordered to.
    fn change(&mut self) -> io::Result<()> {
        self.changes += 1;
        self.take_snapshot();
        match self.fail_from {
            Some((from, error)) if from <= self.changes => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Counts a sync as a change, and fails it if it was ordered to.
    fn sync_change(&mut self) -> io::Result<()> {
        self.change()?;
        let Some(left) = &mut self.syncs_left else { return Ok(()) };
        *left = left.checked_sub(1).ok_or(ErrorKind::Other)?;
        Ok(())
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let offset = usize::try_from(offset).expect("test files are small");
        let inode = self.inode(number)?;
        assert!(
            offset + bytes.len() <= inode.live.len(),
            "space was set aside for what is written"
        );
        let change = Change::Write { offset, bytes: bytes.to_vec() };
        change.apply(&mut inode.live);
        inode.changes.push(change);
        Ok(())
    }

    fn end_background_sync(&mut self) {
        if let Some(sync) = self.background_sync.take() {
            self.ended_sync = Some(self.apply_sync(sync));
        }
    }

    fn apply_sync(&mut self, sync: BackgroundSync) -> Result<(), (Option<FileNumber>, ErrorKind)> {
        if let Some(count) = sync.name_changes {
            self.sync_change().map_err(|error| (None, error.kind()))?;
            let State { durable_files, name_changes, .. } = self;
            name_changes.drain(..count).for_each(|change| change.apply(durable_files));
        }
        for (number, inode, count) in sync.files {
            self.sync_change().map_err(|error| (Some(number), error.kind()))?;
            let Inode { durable, changes, .. } = &mut self.inodes[inode];
            for change in changes.drain(..count) {
                change.apply(durable);
            }
        }
        Ok(())
    }

    fn take_snapshot(&mut self) {
        if let Some(mut history) = self.history.take() {
            history.push(FakeDisk(Rc::new(RefCell::new(self.clone()))));
            self.history = Some(history);
        }
    }

    fn inode(&mut self, number: FileNumber) -> io::Result<&mut Inode> {
        let index = *self.files.get(&name(number)).ok_or(ErrorKind::NotFound)?;
        Ok(&mut self.inodes[index])
    }

    fn rename(&mut self, change: NameChange) {
        change.apply(&mut self.files);
        self.name_changes.push(change);
    }

    fn resize(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let size = usize::try_from(size).expect("test files are small");
        let inode = self.inode(number)?;
        let old_size = inode.live.len();
        inode.live.resize(size, 0);
        let used = self.used();
        if size > old_size && self.capacity.is_some_and(|capacity| used > capacity) {
            self.inode(number)?.live.truncate(old_size);
            return Err(ErrorKind::StorageFull.into());
        }
        self.inode(number)?.changes.push(Change::Resize { size });
        self.peak = self.peak.max(used);
        Ok(())
    }
}

impl Change {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            Change::Write { offset, bytes: written } => {
                let end = offset + written.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*offset..end].copy_from_slice(written);
            }
            Change::Resize { size } => bytes.resize(*size, 0),
        }
    }
}

impl Inode {
    fn after_power_cut(&self, random: &mut fastrand::Rng) -> Vec<u8> {
        let mut moments = vec![self.durable.clone()];
        for change in &self.changes {
            let mut bytes = moments.last().expect("there is a first one").clone();
            change.apply(&mut bytes);
            moments.push(bytes);
        }
        let latest = moments.len() - 1;
        // Mostly all or nothing, as on most disks.
        let mut moment = || match random.u8(..4) {
            0 => 0,
            1 => random.usize(..=latest),
            _ => latest,
        };
        let mut bytes = vec![0; moments[moment()].len()];
        for (index, sector) in bytes.chunks_mut(SECTOR).enumerate() {
            let from = &moments[moment()];
            let start = (index * SECTOR).min(from.len());
            let end = (start + sector.len()).min(from.len());
            sector[..end - start].copy_from_slice(&from[start..end]);
        }
        bytes
    }
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            NameChange::Add { name, inode } => {
                names.insert(name.clone(), *inode);
            }
            NameChange::Remove { name } => {
                names.remove(name);
            }
            NameChange::Rename { from, to } => {
                if let Some(inode) = names.remove(from) {
                    names.insert(to.clone(), inode);
                }
            }
        }
    }
}

/// Returns the name of a file.
pub fn name(number: FileNumber) -> String {
    format!("binlog.{number}")
}

impl FakeDisk {
    /// Reads a body, or what a fault makes of it.
    fn read_back(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let fault = self.0.borrow_mut().read_faults.pop_front().unwrap_or(ReadFault::None);
        match fault {
            ReadFault::Error => return Err(ErrorKind::InvalidData.into()),
            ReadFault::NotOpened => return Err(ErrorKind::PermissionDenied.into()),
            // As the directory reports it.
            ReadFault::TooManyFiles => return Err(ErrorKind::StorageFull.into()),
            ReadFault::None | ReadFault::FlippedBit => {}
        }
        if self.read(number, offset, bytes)? < bytes.len() {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if fault == ReadFault::FlippedBit {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        Ok(())
    }
}

impl Disk for FakeDisk {
    fn list(&mut self) -> io::Result<Vec<FileNumber>> {
        let state = self.0.borrow();
        let digits = state.files.keys().filter_map(|name| name.strip_prefix("binlog."));
        let mut numbers: Vec<FileNumber> = digits.filter_map(|text| text.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        Ok(self.0.borrow_mut().inode(number)?.live.len() as u64)
    }

    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let mut state = self.0.borrow_mut();
        let live = &state.inode(number)?.live;
        let offset = usize::try_from(offset).expect("test files are small").min(live.len());
        let count = bytes.len().min(live.len() - offset);
        bytes[..count].copy_from_slice(&live[offset..offset + count]);
        Ok(count)
    }

    fn read_now(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
        let fault = self.0.borrow().read_faults.front().copied();
        // Only a read that waits for the disk returns its errors.
        if self.0.borrow().reads_late || fault == Some(ReadFault::Error) {
            return Ok(false);
        }
        match self.read_back(number, offset, bytes) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
            read => read.map(|()| true),
        }
    }

    fn begin_read(&mut self, token: ReadToken, number: FileNumber, offset: u64, len: u32) {
        self.0.borrow_mut().reads.push_back((token, number, offset, len));
    }

    fn finished_read(&mut self) -> Option<FinishedRead> {
        if !self.has_reads() {
            return None;
        }
        let mut state = self.0.borrow_mut();
        state.reads_left = state.reads_left.map(|left| left - 1);
        let (token, number, offset, len) = state.reads.pop_front()?;
        drop(state);
        let mut bytes = vec![0; len as usize];
        let read = self.read_back(number, offset, &mut bytes);
        Some(FinishedRead { token, bytes: read.map(|()| bytes) })
    }

    fn free_bytes(&self) -> Option<u64> {
        let state = self.0.borrow();
        state.capacity.map(|capacity| capacity.saturating_sub(state.used()))
    }

    fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.change()?;
        assert!(!state.files.contains_key(&name(number)), "{} is there", name(number));
        let inode = state.inodes.len();
        state.inodes.push(Inode::default());
        state.rename(NameChange::Add { name: name(number), inode });
        let resized = state.resize(number, size);
        if resized.is_err() {
            state.rename(NameChange::Remove { name: name(number) });
        }
        resized
    }

    fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.change()?;
        state.resize(number, size)
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        let (first, second) = bytes.split_at(bytes.len() / 2);
        if let Err(error) = state.change() {
            // A failed write may have written a part.
            if state.changes.is_multiple_of(2) {
                state.write(number, offset, first)?;
            }
            return Err(error);
        }
        state.writes += 1;
        state.bytes_written += bytes.len() as u64;
        state.write(number, offset, first)?;
        state.take_snapshot();
        state.write(number, offset + first.len() as u64, second)
    }

    fn truncate_step(&mut self) -> bool {
        false
    }

    /// What is only announced is not safe from a power cut.
    fn will_sync(&mut self, _: FileNumber, _: u64, _: u64) {}

    fn begin_sync(&mut self, files: &[FileNumber], with_names: bool) -> bool {
        let mut state = self.0.borrow_mut();
        if !state.syncs_in_background {
            return false;
        }
        assert!(
            state.background_sync.is_none() && state.ended_sync.is_none(),
            "a sync is begun, and another one has not ended"
        );
        state.background_syncs_begun += 1;
        let begun = files.iter().map(|&number| {
            let inode = state.files[&name(number)];
            (number, inode, state.inodes[inode].changes.len())
        });
        let files = begun.collect();
        let name_changes = with_names.then_some(state.name_changes.len());
        state.background_sync = Some(BackgroundSync { files, name_changes });
        true
    }

    fn finished_sync(&mut self, must_wait: bool) -> Option<Result<(), SyncError>> {
        let mut state = self.0.borrow_mut();
        if must_wait {
            state.end_background_sync();
        }
        let ended = state.ended_sync.take()?;
        state.sync_results_taken += 1;
        Some(ended.map_err(|(file, kind)| SyncError { file, error: kind.into() }))
    }

    fn sync(&mut self, number: FileNumber) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.sync_change()?;
        state.syncs += 1;
        let inode = state.inode(number)?;
        inode.changes.clear();
        inode.durable = inode.live.clone();
        Ok(())
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.sync_change()?;
        state.name_changes.clear();
        state.durable_files = state.files.clone();
        Ok(())
    }

    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.change()?;
        if let Some(error) = state.cut_error {
            return Err(error.into());
        }
        state.resize(number, size)
    }

    fn close(&mut self, _number: FileNumber) {}

    fn remove(&mut self, number: FileNumber) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.change()?;
        state.rename(NameChange::Remove { name: name(number) });
        Ok(())
    }

    fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        let mut state = self.0.borrow_mut();
        state.change()?;
        let to = format!("{}.damaged", name(number));
        state.rename(NameChange::Rename { from: name(number), to: to.clone() });
        Ok(to)
    }
}
