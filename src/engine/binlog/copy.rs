//! Copies a binlog from one disk to another, for `--import` and `--export`.
//!
//! Each file is copied up to its last record. What a crash has left behind the very last record is left
//! out. A damaged file is not copied: a server that starts on it saves what is intact.

use super::disk::{Disk, FileNumber};
use super::history::{Event, History};
use super::reader::ReadError;
use super::record::VERSION_LEN;
use std::fmt;
use std::io;

/// What was copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    pub files: usize,
    pub bytes: u64,
}

/// Why a binlog cannot be copied.
#[derive(Debug)]
pub enum CopyError {
    /// The files cannot be listed.
    List(io::Error),
    /// A file cannot be read.
    Read(ReadError),
    /// Records of a file are damaged, at this offset.
    Damaged(FileNumber, u64),
    /// There are files already where the copy is to be.
    NotEmpty,
    /// A file cannot be written.
    Write(FileNumber, io::Error),
    /// The files were written, but the copy cannot be completed.
    End(io::Error),
}

const PIECE_LEN: usize = 1024 * 1024;

/// Copies all files. `settle` is called after each piece, and waits until the disk has stored it.
pub fn copy(
    from: &mut dyn Disk,
    to: &mut dyn Disk,
    mut settle: impl FnMut(&mut dyn Disk) -> io::Result<()>,
) -> Result<Copied, CopyError> {
    if !to.list().map_err(CopyError::List)?.is_empty() {
        return Err(CopyError::NotEmpty);
    }
    let files = measure_all(from)?;
    for &(number, used) in &files {
        copy_file(from, to, number, used, &mut settle)?;
    }
    Ok(Copied { files: files.len(), bytes: files.iter().map(|&(_, used)| used).sum() })
}

/// Returns the files with more than a version, and the offset behind the last record of each. Fails if
/// one is damaged.
fn measure_all(disk: &mut dyn Disk) -> Result<Vec<(FileNumber, u64)>, CopyError> {
    let mut files = Vec::new();
    // The bytes behind the very last record were left by a crash.
    let mut history = History::default();
    for number in disk.list().map_err(CopyError::List)? {
        history.read_file(disk, number, |event| match event {
            Event::Opened { .. } | Event::Record(..) => Ok(()),
            Event::Damage(number, damage) => Err(CopyError::Damaged(number, damage.offset)),
            Event::End(used) => {
                files.extend((used > VERSION_LEN as u64).then_some((number, used)));
                Ok(())
            }
        })?;
    }
    Ok(files)
}

fn copy_file(
    from: &mut dyn Disk,
    to: &mut dyn Disk,
    number: FileNumber,
    used: u64,
    settle: &mut impl FnMut(&mut dyn Disk) -> io::Result<()>,
) -> Result<(), CopyError> {
    let read_failed = |error| CopyError::Read(ReadError::io(number, error));
    let write_failed = |error| CopyError::Write(number, error);
    to.create(number, used).map_err(write_failed)?;
    let mut piece = vec![0; PIECE_LEN];
    let mut offset = 0;
    while offset < used {
        // The version is written alone, as a server writes it.
        let most = if offset == 0 { VERSION_LEN } else { PIECE_LEN };
        let len = usize::try_from(used - offset).map_or(most, |left| left.min(most));
        let count = from.read(number, offset, &mut piece[..len]).map_err(read_failed)?;
        if count < len {
            return Err(read_failed(io::ErrorKind::UnexpectedEof.into()));
        }
        to.write(number, offset, &piece[..len]).map_err(write_failed)?;
        settle(to).map_err(write_failed)?;
        offset += len as u64;
    }
    to.begin_sync(&[number], true, false);
    to.close(number);
    let synced = to.finished_sync(true).unwrap_or(Ok(()));
    synced.map_err(|failed| write_failed(failed.error))
}

impl From<ReadError> for CopyError {
    fn from(error: ReadError) -> CopyError {
        CopyError::Read(error)
    }
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CopyError::List(error) => write!(f, "cannot list the files: {error}"),
            CopyError::Read(error) => error.fmt(f),
            CopyError::Damaged(number, offset) => write!(
                f,
                "binlog.{number}:{offset}: the file is damaged; start a server on it, which keeps \
                 the intact jobs, and stop it again"
            ),
            CopyError::NotEmpty => f.write_str("there is a binlog already where the copy is to be"),
            CopyError::End(error) => write!(f, "cannot complete the copy: {error}"),
            CopyError::Write(number, error) => write!(f, "cannot write binlog.{number}: {error}"),
        }
    }
}
