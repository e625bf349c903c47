//! The real disk under the binlog: one directory of files, its lock, and how writing is made
//! safe.
//!
//! What the records mean, and when files come and go, is not known here.

use super::sys::clock::monotonic;
use super::sys::files;
use crate::engine::binlog::disk::{Disk, FileNumber, LAST_NUMBER};
use crate::engine::collections::histogram::Histogram;
use crate::engine::headroom::{self, Headroom};
use log::warn;
use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A directory with a binlog.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    /// To sync it.
    handle: File,
    /// Open to be written to.
    writing: Vec<(FileNumber, File)>,
    /// Files that have no name any more, and how many bytes they still have: to take all of a file
    /// away at once would stall everybody for milliseconds.
    unlinked: Vec<(File, u64)>,
    /// The file that was read last.
    reading: Option<(FileNumber, File)>,
    /// One is given up when a file is to be opened, and taken back when one is closed, so that
    /// this never fails because clients have all descriptors.
    spare: Vec<File>,
    /// How long syncs took.
    sync_times: Histogram,
    /// The warning that the directory cannot be synced has been logged.
    has_warned: bool,
    /// Locked for as long as it is open; nothing when the directory is only looked into.
    lock: Option<File>,
}

/// Why a directory cannot be used.
#[derive(Debug)]
pub enum OpenError {
    /// It cannot be read.
    Directory(io::Error),
    /// The file to be locked cannot be opened or made.
    LockFile(io::Error),
    /// Another process keeps its binlog there.
    InUse,
}

const LOCK_NAME: &str = "lock";

/// The current file is open, two that wait to be synced, one that is made, and those that were
/// removed.
const SPARE_DESCRIPTORS: usize = 4 + MOST_NAMELESS;

/// So much of a removed file is taken away in a turn, which takes some 0.2 ms.
const REMOVED_AT_ONCE: u64 = 256 * 1024;
/// When more files are removed than that at a time, there is no time to do it piece by piece.
const MOST_NAMELESS: usize = 4;

/// Where the system cannot set space aside, zeros are written, so many at a time.
static ZEROS: [u8; 16 * 1024] = [0; 16 * 1024];

impl Directory {
    /// Takes the directory, and keeps everybody else from doing the same. C beanstalkd locks
    /// in this way too.
    ///
    /// # Errors
    /// It cannot be had.
    pub fn take(path: &Path) -> Result<Directory, OpenError> {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(path.join(LOCK_NAME)).map_err(OpenError::LockFile)?;
        match files::lock_file(&lock) {
            Ok(true) => {}
            Ok(false) => return Err(OpenError::InUse),
            Err(error) => return Err(OpenError::LockFile(error)),
        }
        let mut directory = Directory::look_into(path).map_err(OpenError::Directory)?;
        directory.lock = Some(lock);
        directory.keep_spare();
        Ok(directory)
    }

    /// Opens the directory only to be read, whoever uses it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn look_into(path: &Path) -> io::Result<Directory> {
        Ok(Directory {
            path: path.to_owned(),
            handle: File::open(path)?,
            writing: Vec::new(),
            unlinked: Vec::new(),
            reading: None,
            spare: Vec::new(),
            sync_times: Histogram::default(),
            has_warned: false,
            lock: None,
        })
    }

    fn path_of(&self, number: FileNumber) -> PathBuf {
        self.path.join(format!("binlog.{number}"))
    }

    /// Opens a file while the spare descriptor is free.
    fn open(&mut self, number: FileNumber, options: &OpenOptions) -> io::Result<File> {
        self.spare.pop();
        let file = options.open(self.path_of(number));
        self.keep_spare();
        file.map_err(|error| match error.raw_os_error() {
            // Which passes, unlike an error of the disk.
            Some(libc::EMFILE | libc::ENFILE) => io::Error::new(ErrorKind::StorageFull, error),
            _ => error,
        })
    }

    /// Makes a part of a file take its space now, so that writing there cannot run out of it. If
    /// there is too little, all of what is left of removed files goes first.
    fn take_space(&mut self, number: FileNumber, from: u64, to: u64) -> io::Result<()> {
        let taken = take_space(self.writable(number)?, from, to);
        if taken.is_ok() || self.unlinked.is_empty() {
            return taken;
        }
        self.unlinked.clear();
        self.keep_spare();
        take_space(self.writable(number)?, from, to)
    }

    fn keep_spare(&mut self) {
        while self.lock.is_some() && self.spare.len() < SPARE_DESCRIPTORS {
            match self.handle.try_clone() {
                Ok(spare) => self.spare.push(spare),
                Err(_) => return,
            }
        }
    }

    /// The file, open to be written to.
    fn writable(&mut self, number: FileNumber) -> io::Result<&File> {
        let place = match self.writing.iter().position(|(open, _)| *open == number) {
            Some(place) => place,
            None => {
                let file = self.open(number, OpenOptions::new().write(true))?;
                self.writing.push((number, file));
                self.writing.len() - 1
            }
        };
        Ok(&self.writing[place].1)
    }
}

impl Disk for Directory {
    fn list(&mut self) -> io::Result<Vec<FileNumber>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let number = entry?.file_name().to_str().and_then(number_of);
            headroom::leave(Headroom::Quarter, || numbers.try_reserve(1))
                .map_err(|_| ErrorKind::OutOfMemory)?;
            numbers.extend(number);
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn size(&mut self, number: FileNumber) -> io::Result<u64> {
        let metadata = fs::metadata(self.path_of(number))?;
        if !metadata.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        Ok(metadata.len())
    }

    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        if self.reading.as_ref().is_none_or(|(open, _)| *open != number) {
            let file = self.open(number, OpenOptions::new().read(true))?;
            self.reading = Some((number, file));
        }
        let (_, file) = self.reading.as_ref().expect("it was just opened");
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let file = self.open(number, &options)?;
        self.writing.push((number, file));
        self.take_space(number, 0, size).or_else(|error| {
            self.close(number);
            fs::remove_file(self.path_of(number))?;
            Err(error)
        })
    }

    fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let old_size = self.writable(number)?.metadata()?.len();
        self.take_space(number, old_size, size).or_else(|error| {
            self.writable(number)?.set_len(old_size)?;
            Err(error)
        })
    }

    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.writable(number)?.write_all_at(bytes, offset)
    }

    fn begin_sync(&mut self, number: FileNumber, offset: u64, len: u64) {
        if let Some((_, file)) = self.writing.iter().find(|(open, _)| *open == number) {
            files::begin_writing_out(file, offset, len);
        }
    }

    fn sync(&mut self, number: FileNumber) -> io::Result<()> {
        let begun_at = monotonic();
        let synced = match self.writing.iter().find(|(open, _)| *open == number) {
            Some((_, file)) => file.sync_data(),
            // It may be one of C beanstalkd's, which nobody may write to.
            None => self.open(number, OpenOptions::new().read(true))?.sync_data(),
        };
        self.sync_times.count(monotonic().since(begun_at));
        synced
    }

    fn sync_times(&self) -> Histogram {
        self.sync_times.clone()
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        match self.handle.sync_all() {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    warn!(
                        "-b {}: this file system cannot sync a directory: {error}; after a power \
                         cut, files may be missing or removed files may be back",
                        self.path.display()
                    );
                }
                Ok(())
            }
            synced => synced,
        }
    }

    fn truncate(&mut self, number: FileNumber, size: u64) -> io::Result<()> {
        let cut = self.writable(number).and_then(|file| file.set_len(size));
        match cut {
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                // C beanstalkd makes files that even their owner may not write to.
                fs::set_permissions(self.path_of(number), Permissions::from_mode(0o600))?;
                self.writable(number)?.set_len(size)
            }
            done => done,
        }
    }

    fn close(&mut self, number: FileNumber) {
        self.writing.retain(|(open, _)| *open != number);
        // Space that a removed file takes comes back when nobody has it open any more.
        self.reading.take_if(|(open, _)| *open == number);
        self.keep_spare();
    }

    fn remove(&mut self, number: FileNumber) -> io::Result<()> {
        self.close(number);
        let file = self.open(number, OpenOptions::new().write(true));
        match fs::remove_file(self.path_of(number)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            done => done?,
        }
        // Without a descriptor all of it goes at once. What has other names is not ours alone.
        if let Some(file) = file.ok()
            && let Ok(metadata) = file.metadata()
            && metadata.nlink() == 0
        {
            if self.unlinked.len() == MOST_NAMELESS {
                self.unlinked.remove(0);
            }
            self.unlinked.push((file, metadata.len()));
        }
        Ok(())
    }

    fn truncate_step(&mut self) -> bool {
        let Some((file, len)) = self.unlinked.first_mut() else { return false };
        *len = len.saturating_sub(REMOVED_AT_ONCE);
        // What cannot be cut goes with the descriptor.
        if *len == 0 || file.set_len(*len).is_err() {
            self.unlinked.remove(0);
            self.keep_spare();
        }
        !self.unlinked.is_empty()
    }

    fn quarantine(&mut self, number: FileNumber) -> io::Result<String> {
        self.close(number);
        let first = format!("binlog.{number}.damaged");
        let others = (2_u32..).map(|copy| format!("{first}.{copy}"));
        // What was set aside before stays too.
        let mut names = std::iter::once(first.clone()).chain(others);
        let is_free = |name: &String| !self.path.join(name).exists();
        let name = names.find(is_free).expect("there is no end of names");
        fs::rename(self.path_of(number), self.path.join(&name))?;
        Ok(name)
    }
}

/// The number in the name of a file of a binlog; nothing for other files.
fn number_of(name: &str) -> Option<FileNumber> {
    let digits = name.strip_prefix("binlog.")?;
    let number = digits.parse().ok().filter(|number| (1..=LAST_NUMBER).contains(number))?;
    // There is one way to write it.
    (number.to_string() == digits).then_some(number)
}

/// Lengthens a file from `from` to `to` bytes, all zeros.
/// The same, with the space that there is.
fn take_space(file: &File, from: u64, to: u64) -> io::Result<()> {
    if files::allocate(file, from, to - from)? {
        return Ok(());
    }
    let mut offset = from;
    while offset < to {
        let left = usize::try_from(to - offset).unwrap_or(usize::MAX);
        let zeros = &ZEROS[..left.min(ZEROS.len())];
        file.write_all_at(zeros, offset)?;
        offset += zeros.len() as u64;
    }
    Ok(())
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpenError::Directory(error) => write!(f, "cannot read the directory: {error}"),
            OpenError::LockFile(error) => write!(f, "cannot lock the file {LOCK_NAME}: {error}"),
            OpenError::InUse => f.write_str("another process keeps its binlog there"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_a_binlog_have_a_number() {
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
    fn what_is_written_is_read_and_the_rest_is_zeros() {
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::take(home.path()).unwrap();
        directory.create(3, 8192).unwrap();
        directory.write(3, 4, b"record").unwrap();
        directory.extend(3, 10_000).unwrap();
        directory.sync(3).unwrap();
        directory.sync_directory().unwrap();
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
    fn a_removed_file_goes_piece_by_piece_and_a_backup_of_it_stays() {
        const SIZE: u64 = 3 * REMOVED_AT_ONCE + 1;
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::take(home.path()).unwrap();
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
            assert_eq!(open.metadata().unwrap().len(), SIZE - pieces * REMOVED_AT_ONCE);
        }
        assert_eq!(pieces, 3);
        assert_eq!(fs::metadata(&backup).unwrap().len(), SIZE);
    }

    #[test]
    fn many_removed_files_hold_few_descriptors() {
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::take(home.path()).unwrap();
        for number in 1..20 {
            directory.create(number, 2 * REMOVED_AT_ONCE).unwrap();
            directory.remove(number).unwrap();
            assert!(directory.unlinked.len() <= MOST_NAMELESS);
        }
        directory.create(20, 1).unwrap();
        while directory.truncate_step() {}
        assert_eq!(directory.list().unwrap(), [20]);
    }

    #[test]
    fn files_set_aside_keep_out_of_each_others_way() {
        let home = tempfile::tempdir().unwrap();
        let mut directory = Directory::take(home.path()).unwrap();
        for name in ["binlog.3.damaged", "binlog.3.damaged.2"] {
            directory.create(3, 1).unwrap();
            assert_eq!(directory.quarantine(3).unwrap(), name);
            assert!(home.path().join(name).exists());
        }
        assert!(directory.list().unwrap().is_empty());
    }
}
