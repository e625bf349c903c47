//! A disk in memory: a local one, which fills up, fails and loses power, or a remote one, which
//! stores changes late.
//!
//! It keeps two images and the changes between them: the live one, which the server sees, and the
//! stored one, which every crash leaves. On a local disk a sync stores changes, and a power cut leaves
//! some of the others, in any order and in part. A sync of a remote disk hands over all changes, which are
//! stored one by one, in their order. It divides a write into chunks, as a cluster does. A crash leaves what is
//! stored and any number of the next changes that were handed over: their outcome is unknown to the server. After
//! a change is refused, because another server leads, nothing is stored any more.

use super::driver::{BinlogError, Disk, FileNumber, RecordRead};
use std::cell::{RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io::{self, ErrorKind};
use std::rc::Rc;

/// Files by their names.
pub type Files = BTreeMap<String, Vec<u8>>;

/// A handle on the disk: clones are of the same one.
#[derive(Clone, Debug, Default)]
pub struct FakeDisk(Rc<RefCell<State>>);

#[derive(Clone, Debug, Default)]
struct State {
    live: Image,
    stored: Image,
    /// The changes that are not stored, the oldest first, with their numbers, which have gaps.
    waiting: VecDeque<(u64, Change)>,
    /// The files that a directory has open for writing.
    open: BTreeSet<FileNumber>,
    /// The numbers of the last change, and of the last one that a sync covers.
    written: u64,
    synced: u64,
    /// `None`: the disk is local.
    remote: Option<Remote>,
    faults: Faults,
    /// Copies of the disk before each change, if a test wants them.
    history: Option<Vec<FakeDisk>>,
    /// What was begun to be read: it is read when the result is taken.
    reads: VecDeque<RecordRead>,
    /// The sync that was begun, until the server takes its result.
    sync: Option<Sync>,
    counts: Counts,
    /// The most bytes that all files had at once.
    peak: u64,
}

/// What a test makes the disk do from now on. Changes are counted from 1.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// How many bytes fit, in whole blocks. A remote disk with a capacity refuses puts.
    pub capacity: Option<u64>,
    /// The first change that fails, and the error of it and of all later ones.
    pub fail_from: Option<(u64, ErrorKind)>,
    /// How many syncs of files and names succeed; `None` for all. Other changes succeed.
    pub syncs_left: Option<u64>,
    /// The error of each truncation.
    pub cut_error: Option<ErrorKind>,
    /// Files cannot be removed.
    pub removals_fail: bool,
    /// Reads of bodies that begin are never done at once.
    pub reads_late: bool,
    /// At most this many reads end; `None` for no limit.
    pub reads_left: Option<usize>,
    /// There is no memory for longer reads of bodies.
    pub longest_read: Option<usize>,
    /// The next reads of bodies have these results.
    pub of_reads: VecDeque<ReadFault>,
    /// Syncs that replies do not wait for are done in the background.
    pub syncs_in_background: bool,
    /// The number of steps in which the space of removed files is still to be freed.
    pub cuts_left: u32,
}

/// Names, and the bytes of each inode. A file that is renamed keeps its inode.
#[derive(Clone, Debug, Default)]
struct Image {
    names: BTreeMap<String, usize>,
    inodes: Vec<Vec<u8>>,
}

#[derive(Clone, Debug)]
enum Change {
    /// A file on a remote disk appears with its first bytes, which have its name.
    Write {
        inode: usize,
        offset: usize,
        bytes: Vec<u8>,
        name: Option<String>,
    },
    Resize {
        inode: usize,
        size: usize,
    },
    /// Names that appear with an inode, or disappear, at the same time.
    Names(Vec<(String, Option<usize>)>),
}

/// How a remote disk stores changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RemoteSetup {
    /// The number of bytes that are stored at once.
    pub chunk_len: usize,
    /// The seed that decides which changes are stored in the commit that hands them over. `None`: none.
    pub eager: Option<u64>,
}

/// How far a disk is, by the numbers of changes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stored {
    /// The last change that was made.
    pub made: u64,
    /// The last one that is stored, with all before it.
    pub stored: u64,
}

#[derive(Clone, Debug, Default)]
struct Remote {
    /// Inodes of which nothing is stored, because they have no record.
    unstored: BTreeSet<usize>,
    /// The number of the last change that the server has handed over.
    handed_over: u64,
    /// That of the last one that is stored.
    stored: u64,
    setup: RemoteSetup,
    /// Decides how many changes are stored as soon as they are handed over.
    eager: Option<fastrand::Rng>,
    /// A change was refused. The stored files are those of the next server.
    is_refused: bool,
}

/// What the server has done with the disk.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Calls that change something.
    pub changes: u64,
    pub writes: u64,
    pub bytes_written: u64,
    /// Syncs of files that the server has waited for.
    pub syncs: u64,
    /// How many were begun, and how many results the server has taken.
    pub background_syncs: (u64, u64),
}

/// A sync. What is written later is not synced by it.
#[derive(Clone, Debug)]
struct Sync {
    /// The last change that it stores.
    last: u64,
    files: Vec<(FileNumber, usize)>,
    with_names: bool,
    in_background: bool,
    /// `None` until it has ended.
    result: Option<Result<(), (Option<FileNumber>, ErrorKind)>>,
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

/// Files that may be open for writing at once: the directory keeps descriptors for no more.
const MOST_OPEN: usize = 4;

const BLOCK: u64 = 4096;
const SECTOR: usize = 512;
/// The bytes of the version at the start of a file. A remote disk stores it with the first record.
const VERSION_LEN: usize = 4;
/// The number of the first change of a remote disk is not 1, so that no test depends on it.
const FIRST_NUMBER: u64 = 1_000;

impl FakeDisk {
    pub fn with_files(files: &Files) -> FakeDisk {
        let names = (0..).zip(files.keys()).map(|(inode, name)| (name.clone(), inode)).collect();
        let image = Image { names, inodes: files.values().cloned().collect() };
        let state = State { live: image.clone(), stored: image, ..State::default() };
        FakeDisk(Rc::new(RefCell::new(state)))
    }

    /// An empty disk on which this number of bytes fits.
    pub fn with_capacity(capacity: u64) -> FakeDisk {
        let disk = FakeDisk::default();
        disk.faults().capacity = Some(capacity);
        disk
    }

    pub fn remote(files: &Files, setup: RemoteSetup) -> FakeDisk {
        let disk = FakeDisk::with_files(files);
        disk.0.borrow_mut().written = FIRST_NUMBER;
        disk.0.borrow_mut().remote = Some(Remote {
            setup,
            handed_over: FIRST_NUMBER,
            stored: FIRST_NUMBER,
            eager: setup.eager.map(fastrand::Rng::with_seed),
            ..Remote::default()
        });
        disk
    }

    pub fn boxed(&self) -> Box<dyn Disk> {
        Box::new(self.clone())
    }

    // ---- Faults ----

    pub fn faults(&self) -> RefMut<'_, Faults> {
        RefMut::map(self.0.borrow_mut(), |state| &mut state.faults)
    }

    /// Makes reads of bodies that begin from now on end when the test lets them, or at once.
    pub fn hold_reads(&self, are_held: bool) {
        self.faults().reads_late = are_held;
        self.faults().reads_left = are_held.then_some(0);
    }

    /// Ends the background sync, if there is one. The server notices that later. Returns `false` if it fails.
    pub fn let_sync_end(&self) -> bool {
        let mut state = self.0.borrow_mut();
        state.end_sync();
        state.sync.as_ref().is_none_or(|sync| sync.result.as_ref().is_none_or(Result::is_ok))
    }

    /// Flips a bit in the middle of these bytes, wherever they are first in the file.
    pub fn flip_byte(&self, name: &str, bytes: &str) {
        let mut state = self.0.borrow_mut();
        let inode = state.live.names[name];
        let live = &mut state.live.inodes[inode];
        let at = live.windows(bytes.len()).position(|window| window == bytes.as_bytes());
        live[at.expect("the file has these bytes") + bytes.len() / 2] ^= 1;
    }

    /// Renames a file behind the back of the server.
    pub fn rename(&self, from: &str, to: &str) {
        let names = &mut self.0.borrow_mut().live.names;
        let inode = names.remove(from).expect("there is such a file");
        names.insert(to.to_owned(), inode);
    }

    /// Returns whether a read of a body can end.
    pub fn has_reads(&self) -> bool {
        let state = self.0.borrow();
        !state.reads.is_empty() && state.faults.reads_left != Some(0)
    }

    /// Returns how many reads of bodies were begun and have not ended.
    pub fn begun_reads(&self) -> usize {
        self.0.borrow().reads.len()
    }

    /// Returns whether a background sync was begun and has not ended.
    pub fn is_syncing(&self) -> bool {
        self.0.borrow().syncing().is_some()
    }

    /// Returns the number of the last change that a sync covers which has ended.
    pub fn synced(&self) -> u64 {
        self.0.borrow().synced
    }

    /// Returns the number of the first record that no sync covers, also none in progress. A prepared file has
    /// none, only its version.
    pub fn first_unsynced_record(&self) -> Option<u64> {
        let state = &*self.0.borrow();
        let State { waiting, live, .. } = state;
        let is_record = |change: &Change| match change {
            Change::Write { inode, offset, .. } => {
                *offset >= VERSION_LEN && live.names.values().any(|named| named == inode)
            }
            Change::Resize { .. } | Change::Names(_) => false,
        };
        let covered = state.syncing().map_or(0, |sync| sync.last);
        let unsynced = |it: &&(u64, Change)| it.0 > covered && is_record(&it.1);
        waiting.iter().find(unsynced).map(|(number, _)| *number)
    }

    pub fn has_failed(&self) -> bool {
        let state = self.0.borrow();
        state.faults.fail_from.is_some_and(|(from, _)| from <= state.counts.changes)
    }

    /// Flips random bits of the files, except in the version at the start of a file.
    pub fn flip_bits(&self, random: &mut fastrand::Rng, count: u32) {
        let State { live, stored, .. } = &mut *self.0.borrow_mut();
        let inodes: Vec<usize> = live.names.values().copied().collect();
        for _ in 0..count {
            let Some(&inode) = random.choice(&inodes) else { return };
            let len = live.inodes[inode].len();
            if len <= VERSION_LEN {
                continue;
            }
            let (place, bit) = (random.usize(VERSION_LEN..len), 1 << random.u8(..8));
            for bytes in [&mut live.inodes[inode], stored.inode(inode)] {
                bytes.get_mut(place).into_iter().for_each(|byte| *byte ^= bit);
            }
        }
    }

    /// Returns copies of the disk before each change since the last call, and in the middle of each
    /// write. They are kept from the first call on.
    pub fn take_history(&self) -> Vec<FakeDisk> {
        self.0.borrow_mut().history.replace(Vec::new()).unwrap_or_default()
    }

    // ---- A remote disk ----

    /// Stores the next `count` changes that were handed over, or all that there are. With the last one the sync
    /// ends.
    pub fn acknowledge(&self, count: usize) {
        self.0.borrow_mut().acknowledge(count);
    }

    /// Refuses one of the changes that were handed over: another server leads. Those before it are
    /// stored, but the server does not get to know that.
    pub fn refuse(&self, random: &mut fastrand::Rng) {
        let mut state = self.0.borrow_mut();
        let Some(remote) = &state.remote else { return };
        let count = random.usize(..=state.handed_over(remote));
        state.stored = state.image_after(count);
        state.remote.iter_mut().for_each(|remote| remote.is_refused = true);
    }

    pub fn is_refused(&self) -> bool {
        self.0.borrow().remote.as_ref().is_some_and(|remote| remote.is_refused)
    }

    /// Returns the number of changes that are not stored.
    pub fn waiting(&self) -> usize {
        let state = self.0.borrow();
        if state.remote.is_some() { state.waiting.len() } else { 0 }
    }

    /// Returns how far the disk is. On a local one replies wait for no change.
    pub fn progress(&self) -> Stored {
        let state = self.0.borrow();
        let stored = state.remote.as_ref().map_or(state.written, |remote| remote.stored);
        Stored { made: state.written, stored }
    }

    /// Returns whether the server has handed over all changes that it may: it waits for the end of a sync.
    pub fn has_all(&self) -> bool {
        let state = self.0.borrow();
        let is_handed_over = |it: &Remote| state.sync.is_some() || it.handed_over == state.written;
        state.remote.as_ref().is_none_or(is_handed_over)
    }

    /// Returns the number of the last change that was handed over.
    pub fn last_handed_over(&self) -> u64 {
        self.0.borrow().remote.as_ref().map_or(0, |remote| remote.handed_over)
    }

    // ---- The end of a process ----

    /// Returns the disk that the next process finds. A power cut loses changes that were not synced, or not
    /// acknowledged.
    pub fn after_end(&self, power_cut: Option<&mut fastrand::Rng>) -> FakeDisk {
        let mut state = self.0.borrow_mut();
        (state.faults.fail_from, state.faults.syncs_left) = (None, None);
        state.faults.of_reads.clear();
        state.sync = None;
        state.reads.clear();
        state.open.clear();
        let files = match (&state.remote, power_cut) {
            (None, None) => return self.clone(),
            (None, Some(random)) => state.files_after_power_cut(random),
            (Some(remote), power_cut) => {
                let most = state.handed_over(remote);
                let count = power_cut.map_or(most, |random| random.usize(..=most));
                state.image_after(count).files()
            }
        };
        let next = match &state.remote {
            Some(remote) => FakeDisk::remote(&files, remote.setup),
            None => FakeDisk::with_files(&files),
        };
        next.faults().clone_from(&state.faults);
        next
    }

    // ---- Figures ----

    pub fn counts(&self) -> Counts {
        self.0.borrow().counts
    }

    /// How many bytes the files take.
    pub fn used(&self) -> u64 {
        self.0.borrow().used(|_| true)
    }

    /// How many bytes the files take without those that were set aside.
    pub fn used_by_binlog(&self) -> u64 {
        self.0.borrow().used(|name| !name.ends_with(".damaged"))
    }

    /// The most that they took since the last call.
    pub fn take_peak(&self) -> u64 {
        let used = self.used();
        std::mem::replace(&mut self.0.borrow_mut().peak, used)
    }

    /// The names of the files, and how many bytes each takes.
    pub fn names(&self) -> String {
        let files = self.live_files();
        let sizes = files.iter().map(|(name, bytes)| format!("{name}: {}", bytes.len()));
        sizes.collect::<Vec<String>>().join(", ")
    }

    /// The files as a process sees them.
    pub fn live_files(&self) -> Files {
        self.0.borrow().live.files()
    }

    /// The files as a power cut leaves them.
    pub fn files_after_power_cut(&self, random: &mut fastrand::Rng) -> Files {
        self.0.borrow().files_after_power_cut(random)
    }
}

impl Image {
    fn inode(&mut self, inode: usize) -> &mut Vec<u8> {
        if self.inodes.len() <= inode {
            self.inodes.resize(inode + 1, Vec::new());
        }
        &mut self.inodes[inode]
    }

    fn number(&self, name: &str) -> io::Result<usize> {
        self.names.get(name).copied().ok_or_else(|| ErrorKind::NotFound.into())
    }

    fn files(&self) -> Files {
        let bytes = |inode: usize| self.inodes.get(inode).cloned().unwrap_or_default();
        self.names.iter().map(|(name, &inode)| (name.clone(), bytes(inode))).collect()
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Write { inode, offset, bytes: written, name } => {
                let bytes = self.inode(*inode);
                let end = offset + written.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[*offset..end].copy_from_slice(written);
                self.names.extend(name.clone().map(|name| (name, *inode)));
            }
            Change::Resize { inode, size } => resize(self.inode(*inode), *size),
            Change::Names(names) => {
                for (name, inode) in names {
                    match inode {
                        Some(inode) => self.names.insert(name.clone(), *inode),
                        None => self.names.remove(name),
                    };
                }
            }
        }
    }
}

impl Change {
    /// The inode whose bytes change.
    fn inode(&self) -> Option<usize> {
        match self {
            Change::Write { inode, .. } | Change::Resize { inode, .. } => Some(*inode),
            Change::Names(_) => None,
        }
    }

    fn len(&self) -> usize {
        if let Change::Write { bytes, .. } = self { bytes.len() } else { 0 }
    }
}

impl State {
    fn inode(&self, number: FileNumber) -> io::Result<usize> {
        self.live.number(&name(number))
    }

    fn bytes(&self, number: FileNumber) -> io::Result<&Vec<u8>> {
        Ok(&self.live.inodes[self.inode(number)?])
    }

    fn used(&self, is_counted: impl Fn(&str) -> bool) -> u64 {
        let block = if self.remote.is_some() { 1 } else { BLOCK };
        let files = self.live.names.iter().filter(|(name, _)| is_counted(name));
        let sizes = files.map(|(_, &inode)| self.live.inodes[inode].len() as u64);
        sizes.map(|size| size.next_multiple_of(block)).sum()
    }

    /// Counts a call that changes a file, which is open from then on.
    fn count_open(&mut self, number: FileNumber) -> io::Result<()> {
        self.open.insert(number);
        let are_few = self.open.len() <= MOST_OPEN || self.remote.is_some();
        assert!(are_few, "files {:?} are not closed", self.open);
        self.count_change()
    }

    /// Counts a call that changes something, and fails it if it was ordered to.
    fn count_change(&mut self) -> io::Result<()> {
        self.counts.changes += 1;
        self.take_snapshot();
        match self.faults.fail_from {
            Some((from, error)) if from <= self.counts.changes => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Counts a sync as a change, and fails it if it was ordered to.
    fn count_sync(&mut self) -> io::Result<()> {
        self.count_change()?;
        let Some(left) = &mut self.faults.syncs_left else { return Ok(()) };
        *left = left.checked_sub(1).ok_or(ErrorKind::Other)?;
        Ok(())
    }

    fn take_snapshot(&mut self) {
        if let Some(mut history) = self.history.take() {
            history.push(FakeDisk(Rc::new(RefCell::new(self.clone()))));
            self.history = Some(history);
        }
    }

    fn change(&mut self, change: Change) {
        self.live.apply(&change);
        self.queue(change);
    }

    /// Queues a change that the live image has.
    fn queue(&mut self, change: Change) {
        self.written += 1 + change.len() as u64;
        self.waiting.push_back((self.written, change));
    }

    fn resize(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let (inode, size) = (self.inode(number)?, to_usize(size));
        let old_size = self.live.inodes[inode].len();
        resize(&mut self.live.inodes[inode], size);
        let used = self.used(|_| true);
        if size > old_size && self.faults.capacity.is_some_and(|capacity| used > capacity) {
            self.live.inodes[inode].truncate(old_size);
            return Err(ErrorKind::StorageFull.into());
        }
        self.queue(Change::Resize { inode, size });
        self.peak = self.peak.max(used);
        Ok(())
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (inode, offset) = (self.inode(number)?, to_usize(offset));
        let end = offset + bytes.len();
        assert!(end <= self.live.inodes[inode].len(), "space was set aside for what is written");
        self.change(Change::Write { inode, offset, bytes: bytes.to_vec(), name: None });
        Ok(())
    }

    /// Appends to a file of a remote disk.
    fn append(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let (inode, mut offset) = (self.inode(number)?, to_usize(offset));
        let file = &mut self.live.inodes[inode];
        assert_eq!(file.len(), offset, "{} is appended to", name(number));
        file.extend_from_slice(bytes);
        let remote = self.remote.as_mut().expect("the disk is remote");
        let chunk_len = remote.setup.chunk_len;
        if offset == 0 {
            return Ok(());
        }
        // The version is stored with the first record.
        let mut first_name = remote.unstored.remove(&inode).then(|| name(number));
        if first_name.is_some() {
            offset = 0;
        }
        let bytes = file[offset..].to_vec();
        for chunk in bytes.chunks(chunk_len) {
            let (bytes, name) = (chunk.to_vec(), first_name.take());
            self.queue(Change::Write { inode, offset, bytes, name });
            offset += chunk.len();
        }
        Ok(())
    }

    /// Stores the changes up to a number for which `is_stored` holds.
    fn store(&mut self, last: u64, is_stored: impl Fn(&Change) -> bool) {
        let stored = &mut self.stored;
        self.waiting.retain(|(number, change)| {
            let is_kept = *number > last || !is_stored(change);
            if !is_kept {
                stored.apply(change);
            }
            is_kept
        });
    }

    fn store_names(&mut self, last: u64) {
        self.store(last, |change| matches!(change, Change::Names(_)));
        // What changes in a file without a name cannot be seen.
        let named: BTreeSet<usize> =
            self.live.names.values().chain(self.stored.names.values()).copied().collect();
        self.waiting.retain(|(_, change)| change.inode().is_none_or(|it| named.contains(&it)));
    }

    /// Returns the sync that has not ended.
    fn syncing(&self) -> Option<&Sync> {
        self.sync.as_ref().filter(|sync| sync.result.is_none())
    }

    fn end_sync(&mut self) {
        if let Some(sync) = self.syncing().cloned() {
            let result = Some(self.apply_sync(&sync));
            self.sync = Some(Sync { result, ..sync });
        }
    }

    fn apply_sync(&mut self, sync: &Sync) -> Result<(), (Option<FileNumber>, ErrorKind)> {
        if sync.with_names {
            self.count_sync().map_err(|error| (None, error.kind()))?;
            self.store_names(sync.last);
        }
        for &(number, inode) in &sync.files {
            self.count_sync().map_err(|error| (Some(number), error.kind()))?;
            self.store(sync.last, |change| change.inode() == Some(inode));
        }
        self.synced = sync.last;
        Ok(())
    }

    /// Each sector is as it was at some moment since the last sync, and so is the length; and of the names
    /// that changed, each may be back.
    fn files_after_power_cut(&self, random: &mut fastrand::Rng) -> Files {
        let mut names = Image { names: self.stored.names.clone(), inodes: Vec::new() };
        for (_, change) in &self.waiting {
            if matches!(change, Change::Names(_)) && random.bool() {
                names.apply(change);
            }
        }
        let mut after = |inode| self.inode_after_power_cut(inode, random);
        names.names.into_iter().map(|(name, inode)| (name, after(inode))).collect()
    }

    fn inode_after_power_cut(&self, inode: usize, random: &mut fastrand::Rng) -> Vec<u8> {
        let mut moments = vec![self.stored.inodes.get(inode).cloned().unwrap_or_default()];
        let mut image = Image::default();
        image.inode(inode).clone_from(&moments[0]);
        let changes = self.waiting.iter().map(|(_, change)| change);
        for change in changes.filter(|change| change.inode() == Some(inode)) {
            image.apply(change);
            moments.push(image.inodes[inode].clone());
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
            copy(&moments[moment()], (index * SECTOR) as u64, sector);
        }
        bytes
    }

    fn acknowledge(&mut self, count: usize) {
        let Some(remote) = self.remote.as_mut().filter(|remote| !remote.is_refused) else { return };
        for _ in 0..count {
            let first = self.waiting.pop_front_if(|(number, _)| *number <= remote.handed_over);
            let Some((number, change)) = first else { break };
            self.stored.apply(&change);
            remote.stored = number;
        }
        if remote.stored == remote.handed_over {
            self.end_sync();
        }
    }

    /// Begins a sync of a remote disk.
    fn hand_over(&mut self) {
        let (last, waiting) = (self.written, self.waiting.len());
        let sync =
            Sync { last, files: Vec::new(), with_names: false, in_background: false, result: None };
        self.sync = Some(sync);
        let Some(remote) = &mut self.remote else { return };
        remote.handed_over = last;
        let eager = remote.eager.as_mut().map(|random| (random.bool(), random.usize(..=waiting)));
        let count = eager.map_or(0, |(is_now, count)| if is_now { count } else { 0 });
        // Without a change that waits, the sync has ended.
        self.acknowledge(count);
    }

    /// Returns the number of changes that are handed over and not stored.
    fn handed_over(&self, remote: &Remote) -> usize {
        self.waiting.partition_point(|(number, _)| *number <= remote.handed_over)
    }

    /// Returns the stored image with the next `count` changes.
    fn image_after(&self, count: usize) -> Image {
        let mut image = self.stored.clone();
        if !self.remote.as_ref().is_some_and(|remote| remote.is_refused) {
            self.waiting.iter().take(count).for_each(|(_, change)| image.apply(change));
        }
        image
    }
}

/// Gives a file another size. The zeros of a new file are those of the allocator, which mostly are there already.
fn resize(bytes: &mut Vec<u8>, size: usize) {
    if bytes.is_empty() {
        *bytes = vec![0; size];
    } else {
        bytes.resize(size, 0);
    }
}

fn name(number: FileNumber) -> String {
    format!("binlog.{number}")
}

/// Copies what a file has from `offset` on, and returns how many bytes these are.
fn copy(file: &[u8], offset: u64, bytes: &mut [u8]) -> usize {
    let rest = &file[file.len().min(to_usize(offset))..];
    let count = bytes.len().min(rest.len());
    bytes[..count].copy_from_slice(&rest[..count]);
    count
}

pub fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("the numbers of tests are small")
}

impl FakeDisk {
    /// Reads a body, or what a fault makes of it.
    fn read_back(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let fault = self.faults().of_reads.pop_front().unwrap_or(ReadFault::None);
        match fault {
            ReadFault::Error => return Err(ErrorKind::InvalidData.into()),
            ReadFault::NotOpened => return Err(ErrorKind::PermissionDenied.into()),
            // As the directory reports it.
            ReadFault::TooManyFiles => return Err(ErrorKind::StorageFull.into()),
            ReadFault::None | ReadFault::FlippedBit => {}
        }
        if self.faults().longest_read.is_some_and(|longest| bytes.len() > longest) {
            return Err(ErrorKind::OutOfMemory.into());
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
        let digits = state.live.names.keys().filter_map(|name| name.strip_prefix("binlog."));
        let mut numbers: Vec<FileNumber> = digits.filter_map(|text| text.parse().ok()).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        Ok(self.0.borrow().bytes(number)?.len() as u64)
    }

    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(copy(self.0.borrow().bytes(number)?, offset, bytes))
    }

    fn read_now(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
        let fault = self.faults().of_reads.front().copied();
        // Only a read that waits for the disk returns its errors.
        if self.faults().reads_late || fault == Some(ReadFault::Error) {
            return Ok(false);
        }
        match self.read_back(number, offset, bytes) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Ok(false),
            read => read.map(|()| true),
        }
    }

    fn begin_read(&mut self, read: RecordRead) {
        self.0.borrow_mut().reads.push_back(read);
    }

    fn finished_read(&mut self) -> Option<io::Result<Vec<u8>>> {
        if !self.has_reads() {
            return None;
        }
        let mut state = self.0.borrow_mut();
        state.faults.reads_left = state.faults.reads_left.map(|left| left - 1);
        let read = state.reads.pop_front()?;
        drop(state);
        let mut bytes = vec![0; read.len as usize];
        let done = self.read_back(read.file, read.offset.into(), &mut bytes);
        Some(done.and_then(|()| read.verify(bytes)))
    }

    fn free_bytes(&self) -> Option<u64> {
        let state = self.0.borrow();
        let capacity = state.faults.capacity.filter(|_| state.remote.is_none())?;
        Some(capacity.saturating_sub(state.used(|_| true)))
    }

    fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.count_change()?;
        assert!(state.inode(number).is_err(), "{} is there", name(number));
        let inode = state.live.inodes.len();
        state.live.inodes.push(Vec::new());
        let added = Change::Names(vec![(name(number), Some(inode))]);
        if let Some(remote) = &mut state.remote {
            remote.unstored.insert(inode);
            state.live.apply(&added);
            return Ok(());
        }
        state.change(added);
        let resized = state.resize(number, size);
        match resized {
            Ok(()) => _ = state.open.insert(number),
            Err(_) => state.change(Change::Names(vec![(name(number), None)])),
        }
        resized
    }

    fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.count_open(number)?;
        if state.remote.is_some() { Ok(()) } else { state.resize(number, size) }
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        // The kernel takes a write page by page, and a disk sector by sector.
        let middle = to_usize(offset) + bytes.len() / 2;
        let (first, second) =
            bytes.split_at((middle - middle % SECTOR).saturating_sub(to_usize(offset)));
        if let Err(error) = state.count_open(number) {
            // A failed write may have written a part.
            if state.counts.changes.is_multiple_of(2) {
                state.write(number, offset, first)?;
            }
            return Err(error);
        }
        state.counts.writes += 1;
        state.counts.bytes_written += bytes.len() as u64;
        if state.remote.is_some() {
            return state.append(number, offset, bytes);
        }
        state.write(number, offset, first)?;
        state.take_snapshot();
        state.write(number, offset + first.len() as u64, second)
    }

    fn begin_sync(&mut self, files: &[FileNumber], with_names: bool, in_background: bool) {
        let mut state = self.0.borrow_mut();
        assert!(state.sync.is_none(), "a sync is begun, and another one has not ended");
        if state.remote.is_some() {
            return state.hand_over();
        }
        let inode = |number: FileNumber| state.live.names[&name(number)];
        let files: Vec<_> = files.iter().map(|&number| (number, inode(number))).collect();
        let (in_background, last) =
            (in_background && state.faults.syncs_in_background, state.written);
        if in_background {
            state.counts.background_syncs.0 += 1;
        } else {
            state.counts.syncs += files.len() as u64;
        }
        state.sync = Some(Sync { last, files, with_names, in_background, result: None });
        if !in_background {
            state.end_sync();
        }
    }

    fn finished_sync(&mut self, must_wait: bool) -> Option<Result<(), BinlogError>> {
        let mut state = self.0.borrow_mut();
        if must_wait && state.remote.is_none() {
            state.end_sync();
        }
        let ended = state.sync.take_if(|sync| sync.result.is_some())?;
        state.counts.background_syncs.1 += u64::from(ended.in_background);
        Some(ended.result?.map_err(|(file, kind)| BinlogError::of_sync(file, kind.into())))
    }

    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut state = self.0.borrow_mut();
        state.count_open(number)?;
        if let Some(error) = state.faults.cut_error {
            return Err(error.into());
        }
        if state.remote.is_some() && size >= state.bytes(number)?.len() as u64 {
            return Ok(());
        }
        state.resize(number, size)
    }

    fn close(&mut self, number: FileNumber) {
        self.0.borrow_mut().open.remove(&number);
    }

    fn remove(&mut self, number: FileNumber) -> io::Result<()> {
        self.close(number);
        let mut state = self.0.borrow_mut();
        state.count_change()?;
        if state.faults.removals_fail {
            return Err(ErrorKind::Other.into());
        }
        let removed = Change::Names(vec![(name(number), None)]);
        let inode = state.inode(number).ok();
        let is_unstored = |remote: &mut Remote| inode.is_none_or(|it| remote.unstored.remove(&it));
        if state.remote.as_mut().is_some_and(is_unstored) {
            state.live.apply(&removed);
        } else {
            state.change(removed);
        }
        Ok(())
    }

    fn truncate_step(&mut self) -> bool {
        let cuts_left = &mut self.faults().cuts_left;
        *cuts_left = cuts_left.saturating_sub(1);
        *cuts_left > 0
    }

    fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        self.close(number);
        let mut state = self.0.borrow_mut();
        state.count_change()?;
        let (inode, to) = (state.inode(number)?, format!("{}.damaged", name(number)));
        state.change(Change::Names(vec![(name(number), None), (to.clone(), Some(inode))]));
        Ok(to)
    }

    fn is_remote(&self) -> bool {
        self.0.borrow().remote.is_some()
    }

    fn stored_bytes(&self) -> u64 {
        self.progress().stored
    }

    fn refuses_puts(&self) -> bool {
        let state = self.0.borrow();
        state.remote.is_some() && state.faults.capacity.is_some()
    }

    fn refuses_moves(&self) -> bool {
        self.refuses_puts()
    }
}
