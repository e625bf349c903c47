//! Copies a binlog from one disk to another, for `--import` and `--export`.
//!
//! Each file is copied up to its last record. What a crash has left behind the very last record is left
//! out. A damaged file is not copied: a server that starts on it saves what is intact.

use super::disk::{Disk, FileNumber};
use super::error::{BinlogError, Step};
use super::history::{Event, History};
use super::reader::Damage;
use super::record::VERSION_LEN;
use std::io;
use std::iter;

const PIECE_LEN: usize = 1024 * 1024;

/// Copies these files, which were [measured](measure). `settle` is called after each piece, and waits until
/// the disk has stored it.
pub fn copy(
    from: &mut dyn Disk,
    files: &[(FileNumber, u64)],
    to: &mut dyn Disk,
    mut settle: impl FnMut(&mut dyn Disk) -> io::Result<()>,
) -> Result<(), BinlogError> {
    for &(number, used) in files {
        let read_failed = |error| BinlogError::of_read(number, error);
        let what = format!("cannot write binlog.{number}");
        let write_failed = |error| BinlogError::new(Step::Write, &what, error);
        to.create(number, used).map_err(write_failed)?;
        let mut piece = vec![0; PIECE_LEN];
        // The version is written alone, as a server writes it. A file without records has one piece, which is empty:
        // etcd stores a file with it.
        let version_len = VERSION_LEN as u64;
        let pieces = (version_len..used.max(version_len + 1)).step_by(PIECE_LEN);
        for offset in iter::once(0).chain(pieces) {
            let most = if offset == 0 { VERSION_LEN } else { PIECE_LEN };
            let len = usize::try_from(used - offset).map_or(most, |left| left.min(most));
            let count = from.read(number, offset, &mut piece[..len]).map_err(read_failed)?;
            if count < len && offset > 0 {
                return Err(read_failed(io::ErrorKind::UnexpectedEof.into()));
            }
            to.write(number, offset, &piece[..len]).map_err(write_failed)?;
            settle(to).map_err(write_failed)?;
        }
        to.begin_sync(&[number], true, false);
        to.close(number);
        to.finished_sync(true).unwrap_or(Ok(()))?;
    }
    Ok(())
}

/// Fails if the disk has files, which would mix with those of a copy.
pub fn check_empty(to: &mut dyn Disk) -> Result<(), BinlogError> {
    if to.list().map_err(BinlogError::of_list)?.is_empty() {
        return Ok(());
    }
    let error = io::Error::other("there is a binlog already");
    Err(BinlogError::new(Step::Write, "cannot write there", error))
}

/// Returns the files up to the last one with a record, and the offset behind the last record of each. Fails
/// if one is damaged.
pub fn measure(disk: &mut dyn Disk) -> Result<Vec<(FileNumber, u64)>, BinlogError> {
    let mut files = Vec::new();
    // The bytes behind the very last record were left by a crash.
    let mut history = History::default();
    for number in disk.list().map_err(BinlogError::of_list)? {
        history.read_file(disk, number, |event| match event {
            Event::Opened { .. } | Event::Record(..) => Ok(()),
            Event::Damage(number, Damage { offset, .. }) => {
                let why = "the file is damaged; start a server on it, which keeps the intact jobs, and \
                           stop it again";
                let what = format!("binlog.{number}:{offset}");
                Err(BinlogError::new(Step::Read, what, io::Error::other(why)))
            }
            Event::End(used) => {
                // A power cut may have left less than a version.
                files.push((number, used.max(VERSION_LEN as u64)));
                Ok(())
            }
        })?;
    }
    while files.pop_if(|&mut (_, used)| used == VERSION_LEN as u64).is_some() {}
    Ok(files)
}
