//! The directory of the binlog on disk: its files, its lock, allocated space and syncs.
//!
//! This module does not know the records, nor when files are created and removed.

use super::disk_thread::{DiskThread, FinishedSync, Home, Unsynced, read_record};
use super::failure::{EXIT_REFUSED, EXIT_SYSTEM, Failure, remedy};
use super::sys::files;
use crate::engine::binlog::disk::{Disk, FileNumber, LAST_NUMBER};
use crate::engine::binlog::error::BinlogError;
use crate::engine::binlog::files::LONGEST_FILE;
use crate::engine::binlog::reads::RecordRead;
use crate::engine::collections::histogram::Histogram;
use crate::engine::headroom::{self, Headroom};
use mio::Waker;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A directory with a binlog.
pub struct Directory {
    home: Arc<Home>,
    /// The open files, the one that was used last at the end.
    files: Vec<OpenFile>,
    /// The thread that syncs files, and the one that reads bodies back, if they are started:
    /// two, so that reads do not wait for syncs, nor syncs for reads. Without them the allocator and system calls need
    /// no locks, which is measurable for each command.
    syncs: Option<DiskThread<FinishedSync>>,
    reads: Option<DiskThread<io::Result<Vec<u8>>>>,
    /// Removed files that are truncated in steps, and their lengths: freeing the whole space of a file
    /// at once would stall the loop for milliseconds.
    unlinked: Vec<(File, u64)>,
    sync_times: Histogram,
    /// The sync that has ended, if no thread has done it.
    synced: Option<FinishedSync>,
    /// Holds the lock as long as it is open; `None` if the directory is only read.
    lock: Option<File>,
}

/// An open file.
struct OpenFile {
    number: FileNumber,
    file: Arc<File>,
    /// It is open for writing, and stays open until [`Disk::close`]: a sync reports a failed write only to
    /// descriptors that were open then.
    is_written: bool,
}

/// Files that can be open for writing at once: the current file, two that are not synced yet, one that is being
/// created, and removed files.
const MAX_WRITTEN: usize = 4 + MAX_REMOVED;

/// If there are more removed files whose space is not freed, the loop frees one at once.
const MAX_REMOVED: usize = 4;

/// Files that are closed while a thread syncs them.
const MAX_SYNCING: usize = 3;

/// Files with bodies that are read back that can be open at once.
const MAX_READ: usize = 32;

/// With this many tasks, nothing is read ahead.
const MAX_QUEUED: usize = 8;

/// An iteration truncates a removed file by at most this much, which takes about 0.2 ms.
const TRUNCATE_STEP: u64 = 256 * 1024;

/// The directory from which an export moves the files of a binlog to their places.
pub const MOVING: &str = "binlog.moving";

impl Directory {
    /// Returns how many descriptors a directory takes at most that is written. Clients get none of these, so that
    /// opening a file never fails because clients have all descriptors.
    pub fn descriptors(reads_back: bool) -> usize {
        // Its lock and its handle, those of the threads, and the files.
        2 + 2 + MAX_WRITTEN + MAX_SYNCING + if reads_back { MAX_READ } else { 1 }
    }

    /// Opens and locks the directory. C beanstalkd uses the same lock.
    pub fn lock(path: &Path) -> Result<Directory, Failure> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        // Opening a pipe waits for a reader.
        options.custom_flags(libc::O_NONBLOCK);
        let opened = options.open(path.join("lock"));
        let locked = opened.and_then(|lock| Ok((files::lock_file(&lock)?, lock)));
        let (is_locked, lock) = locked.map_err(cannot("lock the file lock", path))?;
        if !is_locked {
            let message =
                "another process keeps its binlog there; stop it, or choose another directory";
            return Err(Failure::new(EXIT_REFUSED, format!("{}: {message}", path.display())));
        }
        let opened = Directory::open_unlocked(path);
        let mut directory = opened.map_err(cannot("read the directory", path))?;
        directory.lock = Some(lock);
        Ok(directory)
    }

    /// Opens the directory for reading, without the lock: another process may write to it. It is refused if it
    /// has only some files of an export.
    pub fn open_unlocked(path: &Path) -> io::Result<Directory> {
        if path.join(MOVING).exists() {
            let why =
                "an export ended before it had moved all files there; empty it and export again";
            return Err(io::Error::other(why));
        }
        Ok(Directory {
            home: Arc::new(Home { path: path.to_owned(), file: File::open(path)? }),
            files: Vec::new(),
            syncs: None,
            reads: None,
            unlinked: Vec::new(),
            sync_times: Histogram::default(),
            synced: None,
            lock: None,
        })
    }

    /// Moves the files of another directory of the same file system here. Until it has all of them, this directory
    /// cannot be opened again.
    pub fn take_all(&self, from: &mut Directory) -> io::Result<()> {
        let moving = self.home.path.join(MOVING);
        let numbers = from.list()?;
        fs::rename(&from.home.path, &moving)?;
        for number in numbers {
            let path = self.path_of(number);
            fs::rename(moving.join(path.file_name().expect("it has a name")), path)?;
        }
        fs::remove_dir(moving)
    }

    fn path_of(&self, number: FileNumber) -> PathBuf {
        self.home.path.join(format!("binlog.{number}"))
    }

    fn open(&self, number: FileNumber, options: &OpenOptions) -> io::Result<File> {
        options.open(self.path_of(number)).map_err(|error| match error.raw_os_error() {
            // This may pass, unlike an error of the disk.
            Some(libc::EMFILE | libc::ENFILE) => io::Error::new(ErrorKind::StorageFull, error),
            _ => error,
        })
    }

    /// Allocates the space of a part of a file, so that writing there cannot run out of space. If there
    /// is too little, the space of all removed files is freed first.
    fn allocate(&mut self, number: FileNumber, from: u64, to: u64) -> io::Result<()> {
        let taken = allocate(self.file(number, true)?, from, to);
        if taken.is_ok() || self.unlinked.is_empty() {
            return taken;
        }
        self.unlinked.clear();
        allocate(self.file(number, true)?, from, to)
    }

    /// Starts a thread for [`Disk::begin_sync`], and one for [`Disk::begin_read`] if it `reads_back` bodies. They
    /// wake the event loop when a sync or read has ended.
    pub fn start_threads(&mut self, waker: Waker, reads_back: bool) -> io::Result<()> {
        let waker = Arc::new(waker);
        let reads = reads_back.then(|| DiskThread::start("reads", Arc::clone(&waker)));
        self.syncs = Some(DiskThread::start("syncs", waker)?);
        self.reads = reads.transpose()?;
        Ok(())
    }

    /// Returns the file, open for reading or, if it `is_written`, for both. It may be a file of C beanstalkd, which
    /// is read-only.
    fn file(&mut self, number: FileNumber, is_written: bool) -> io::Result<&Arc<File>> {
        let is_usable = |it: &OpenFile| it.number == number && (it.is_written || !is_written);
        if !self.files.last().is_some_and(is_usable) {
            match self.files.iter().rposition(is_usable) {
                Some(index) => self.files[index..].rotate_left(1),
                None => self.open_one(number, is_written)?,
            }
        }
        Ok(&self.files.last().expect("it was just added, or found").file)
    }

    /// Opens a file. Reads that wait keep their files open.
    #[cold]
    fn open_one(&mut self, number: FileNumber, is_written: bool) -> io::Result<()> {
        let most = if self.reads.is_some() { MAX_READ } else { 1 };
        if !is_written && self.files.iter().filter(|it| !it.is_written).count() == most {
            let is_idle = |it: &OpenFile| !it.is_written && Arc::strong_count(&it.file) == 1;
            let idle = self.files.iter().position(is_idle);
            let too_many = || io::Error::new(ErrorKind::StorageFull, "too many open files");
            self.files.remove(idle.ok_or_else(too_many)?);
        }
        let file = self.open(number, OpenOptions::new().read(true).write(is_written))?;
        self.files.push(OpenFile { number, file: Arc::new(file), is_written });
        Ok(())
    }
}

impl Disk for Directory {
    fn list(&mut self) -> io::Result<Vec<FileNumber>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.home.path)? {
            let number = entry?.file_name().to_str().and_then(number_of);
            headroom::keeping(Headroom::Quarter, || numbers.try_reserve(1))
                .map_err(|_| ErrorKind::OutOfMemory)?;
            numbers.extend(number);
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        let metadata = fs::metadata(self.path_of(number))?;
        if !metadata.is_file() || metadata.len() > LONGEST_FILE {
            return Err(io::Error::other("not a regular file of at most 4 GiB"));
        }
        Ok(metadata.len())
    }

    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let file = self.file(number, false)?;
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(files::name_loss(error)),
            }
        }
        Ok(filled)
    }

    fn read_now(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<bool> {
        Ok(files::read_cached(self.file(number, false)?, offset, bytes))
    }

    fn free_bytes(&self) -> Option<u64> {
        files::free_bytes(&self.home.file).ok()
    }

    fn begin_read(&mut self, read: RecordRead) {
        let file = self.file(read.file, false).cloned();
        let reads = self.reads.as_ref().expect("the thread is started before bodies are read back");
        reads.ask(move || read_record(&*file?, read));
    }

    fn finished_read(&mut self) -> Option<io::Result<Vec<u8>>> {
        self.reads.as_ref()?.finished(false)
    }

    fn will_read(&mut self, RecordRead { file, offset, len, .. }: RecordRead) {
        if self.reads.as_ref().is_some_and(|reads| reads.waiting() < MAX_QUEUED)
            && let Ok(file) = self.file(file, false).cloned()
            && let Some(reads) = &self.reads
        {
            reads.run(move || files::begin_reading_in(&file, offset.into(), len.into()));
        }
    }

    fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = self.open(number, &options)?;
        self.files.push(OpenFile { number, file: Arc::new(file), is_written: true });
        self.allocate(number, 0, size).or_else(|error| {
            self.close(number);
            fs::remove_file(self.path_of(number))?;
            Err(error)
        })
    }

    fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let old_size = self.file(number, true)?.metadata()?.len();
        self.allocate(number, old_size, size).or_else(|error| {
            self.file(number, true)?.set_len(old_size)?;
            Err(error)
        })
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(number, true)?.write_all_at(bytes, offset)
    }

    fn begin_sync(&mut self, files: &[FileNumber], with_names: bool, in_background: bool) {
        let home = with_names.then(|| Arc::clone(&self.home));
        let open = |&number: &FileNumber| (number, self.file(number, false).cloned());
        let files: Unsynced = files.iter().map(open).collect();
        match &self.syncs {
            Some(syncs) if in_background => {
                syncs.ask(move || FinishedSync::of(home.as_deref(), files));
            }
            Some(_) | None => self.synced = Some(FinishedSync::of(home.as_deref(), files)),
        }
    }

    fn finished_sync(&mut self, must_wait: bool) -> Option<Result<(), BinlogError>> {
        let FinishedSync { result, took } = match self.synced.take() {
            Some(finished) => finished,
            None => self.syncs.as_ref()?.finished(must_wait)?,
        };
        self.sync_times.count(took);
        Some(result)
    }

    fn sync_times(&self) -> Histogram {
        self.sync_times.clone()
    }

    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let cut = self.file(number, true).and_then(|file| file.set_len(size));
        match cut {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                // C beanstalkd creates files that even their owner may not write to.
                fs::set_permissions(self.path_of(number), Permissions::from_mode(0o600))?;
                self.file(number, true)?.set_len(size)
            }
            done => done,
        }
    }

    fn close(&mut self, number: FileNumber) {
        self.files.retain(|it| it.number != number);
    }

    fn remove(&mut self, number: FileNumber) -> io::Result<()> {
        self.close(number);
        let file = self.open(number, OpenOptions::new().write(true));
        match fs::remove_file(self.path_of(number)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            done => done?,
        }
        // Without a descriptor the space is freed at once. A file with other names, such as a backup, is
        // not truncated.
        if let Some(file) = file.ok()
            && let Ok(metadata) = file.metadata()
            && metadata.nlink() == 0
        {
            if self.unlinked.len() == MAX_REMOVED {
                self.unlinked.remove(0);
            }
            self.unlinked.push((file, metadata.len()));
        }
        Ok(())
    }

    fn truncate_step(&mut self) -> bool {
        while let Some((file, len)) = self.unlinked.first_mut() {
            *len = len.saturating_sub(TRUNCATE_STEP);
            if file.set_len(*len).is_ok() && *len > 0 {
                return true;
            }
            // If truncating has failed, closing the descriptor frees the space.
            self.unlinked.remove(0);
        }
        false
    }

    fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        self.close(number);
        let first = format!("binlog.{number}.damaged");
        let others = (2_u32..).map(|copy| format!("{first}.{copy}"));
        // Files that were quarantined before stay.
        let mut names = std::iter::once(first.clone()).chain(others);
        let is_free = |name: &String| !self.home.path.join(name).exists();
        let name = names.find(is_free).expect("some name is free");
        fs::rename(self.path_of(number), self.home.path.join(&name))?;
        Ok(name)
    }
}

/// Returns the number of a binlog file, or `None` for the name of another file.
fn number_of(name: &str) -> Option<FileNumber> {
    let digits = name.strip_prefix("binlog.")?;
    let number = digits.parse().ok().filter(|number| (1..=LAST_NUMBER).contains(number))?;
    // The number has no leading zeros and no sign.
    (number.to_string() == digits).then_some(number)
}

/// Allocates the space of a file from `from` to `to`, and extends it with zeros if it is shorter.
fn allocate(file: &File, from: u64, to: u64) -> io::Result<()> {
    if files::allocate(file, from, to - from)? {
        return Ok(());
    }
    let mut end = file;
    end.seek(SeekFrom::Start(from))?;
    io::copy(&mut io::repeat(0).take(to - from), &mut end)?;
    Ok(())
}

/// Returns the failure to use the directory.
fn cannot(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Failure {
    move |error| {
        let is_full = matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
        let exit_code = if is_full { EXIT_SYSTEM } else { EXIT_REFUSED };
        let help = remedy(&error);
        Failure::new(exit_code, format!("{}: cannot {what}: {error}{help}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waker() -> Waker {
        let poll = mio::Poll::new().unwrap();
        Waker::new(poll.registry(), mio::Token(0)).unwrap()
    }

    /// Returns a directory with its threads and this number of closed files of one byte.
    fn with_threads(files: FileNumber) -> (tempfile::TempDir, Directory) {
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::lock(home.path()).unwrap();
        directory.start_threads(waker(), true).unwrap();
        for number in 1..=files {
            directory.create(number, 1).unwrap();
            directory.close(number);
        }
        (home, directory)
    }

    #[test]
    fn only_binlog_files_have_a_number() {
        assert_eq!(number_of("binlog.1"), Some(1));
        assert_eq!(number_of("binlog.2147483647"), Some(LAST_NUMBER));
        for name in [
            "binlog",
            "binlog.",
            "binlog.0",
            "binlog.01",
            "binlog.+1",
            "binlog.7.damaged",
            "binlog.2147483648",
            "lock",
            "xbinlog.1",
        ] {
            assert_eq!(number_of(name), None, "{name}");
        }
    }

    #[test]
    fn written_bytes_are_read_and_the_rest_is_zeros() {
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::lock(home.path()).unwrap();
        directory.create(3, 8192).unwrap();
        directory.write(3, 4, b"record").unwrap();
        directory.extend(3, 10_000).unwrap();
        directory.begin_sync(&[3], true, false);
        assert!(matches!(directory.finished_sync(false), Some(Ok(()))));
        assert_eq!(directory.list().unwrap(), [3]);
        assert_eq!(directory.size(3).unwrap(), 10_000);
        let mut bytes = [1; 16];
        assert_eq!(directory.read(3, 2, &mut bytes).unwrap(), 16);
        assert_eq!(&bytes, b"\0\0record\0\0\0\0\0\0\0\0");
        assert_eq!(directory.read(3, 9_990, &mut bytes).unwrap(), 10);
        directory.truncate(3, 10).unwrap();
        assert_eq!(directory.size(3).unwrap(), 10);
        assert_eq!(directory.create(3, 1).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(directory.size(3).unwrap(), 10);
        directory.remove(3).unwrap();
        directory.remove(3).unwrap();
        assert!(directory.list().unwrap().is_empty());
    }

    #[test]
    fn a_removed_file_is_truncated_in_steps_and_its_backup_is_kept() {
        const SIZE: u64 = 3 * TRUNCATE_STEP + 1;
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::lock(home.path()).unwrap();
        directory.create(1, SIZE).unwrap();
        directory.create(2, SIZE).unwrap();
        let backup = home.path().join("backup");
        fs::hard_link(home.path().join("binlog.2"), &backup).unwrap();
        let open = File::open(home.path().join("binlog.1")).unwrap();
        directory.remove(1).unwrap();
        directory.remove(2).unwrap();
        assert!(directory.list().unwrap().is_empty());
        let mut pieces = 0;
        while directory.truncate_step() {
            pieces += 1;
            assert_eq!(open.metadata().unwrap().len(), SIZE - pieces * TRUNCATE_STEP);
        }
        assert_eq!(pieces, 3);
        assert_eq!(fs::metadata(&backup).unwrap().len(), SIZE);
    }

    #[test]
    fn many_removed_files_keep_few_descriptors() {
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::lock(home.path()).unwrap();
        for number in 1..20 {
            directory.create(number, 2 * TRUNCATE_STEP).unwrap();
            directory.remove(number).unwrap();
            assert!(directory.unlinked.len() <= MAX_REMOVED);
        }
        directory.create(20, 1).unwrap();
        while directory.truncate_step() {}
        assert_eq!(directory.list().unwrap(), [20]);
    }

    #[test]
    fn a_thread_syncs_files() {
        let (_home, mut directory) = with_threads(0);
        directory.begin_sync(&[], true, true);
        assert!(matches!(directory.finished_sync(true), Some(Ok(()))));
        for number in 1..20 {
            directory.create(number, 2 * TRUNCATE_STEP).unwrap();
            directory.write(number, 0, b"record").unwrap();
            directory.begin_sync(&[number], true, true);
            // The thread has the file.
            directory.close(number);
            assert!(matches!(directory.finished_sync(true), Some(Ok(()))));
            directory.remove(number).unwrap();
            assert!(directory.unlinked.len() <= MAX_REMOVED);
        }
        assert_eq!(directory.sync_times().total(), 20);
        assert!(directory.list().unwrap().is_empty());
    }

    /// Only files that no read uses are closed for it.
    #[test]
    fn a_read_closes_a_file_that_no_other_one_uses_or_is_refused() {
        let most = FileNumber::try_from(MAX_READ).unwrap();
        let (_home, mut directory) = with_threads(most + 2);
        // Each read waits, and keeps its file open.
        let open = |directory: &mut Directory, number| directory.file(number, false).cloned();
        let mut waiting: Vec<Arc<File>> =
            (1..most).map(|number| open(&mut directory, number).unwrap()).collect();
        directory.file(most, false).unwrap();
        waiting.push(open(&mut directory, most + 1).unwrap());
        assert!(directory.files.iter().all(|it| it.number != most), "the idle one is open");
        let refused = open(&mut directory, most + 2).map_err(|error| error.kind());
        assert_eq!(refused.map(drop), Err(ErrorKind::StorageFull));
        directory.write(most, 0, b"x").unwrap();
        drop(waiting);
        assert!(open(&mut directory, most + 2).is_ok());
    }

    #[test]
    fn quarantined_files_do_not_replace_each_other() {
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::lock(home.path()).unwrap();
        for name in ["binlog.3.damaged", "binlog.3.damaged.2"] {
            directory.create(3, 1).unwrap();
            assert_eq!(directory.quarantine(3).unwrap(), name);
            assert!(home.path().join(name).exists());
        }
        assert!(directory.list().unwrap().is_empty());
    }
}
