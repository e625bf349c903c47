//! Why a binlog cannot be used, in one type from the disk to the exit code, and why bytes in it are no record.

use super::disk::FileNumber;
use crate::engine::headroom::NoMemory;
use std::fmt;
use std::io;

/// Why a binlog cannot be read or written.
#[derive(Clone, Debug)]
pub struct BinlogError {
    /// When it happened.
    pub step: Step,
    /// The kind of the error of the disk: `NotFound` if the file was removed, and `Unsupported` if a newer
    /// server has written it.
    pub kind: io::ErrorKind,
    /// Its number, if it is one of the system.
    pub os_error: Option<i32>,
    /// What was tried, such as `cannot read binlog.3`, and the error.
    text: String,
}

/// What was tried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Files are listed and read into memory.
    Read,
    /// The first file of a start is created.
    Begin,
    /// Files are written and synced. The kernel reports such a failure once, and records may be lost.
    Write,
    /// The output of the program is written.
    Output,
}

/// Why bytes are no intact record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Corruption {
    /// The version of the file is unknown.
    Version(i32),
    /// The file was created with another number.
    Number(FileNumber),
    Other(&'static str),
}

impl BinlogError {
    /// Returns an error.
    pub fn new(step: Step, what: impl fmt::Display, error: io::Error) -> BinlogError {
        let text = format!("{what}: {error}");
        BinlogError { step, kind: error.kind(), os_error: error.raw_os_error(), text }
    }

    /// Returns the failure to list the files.
    pub fn of_list(error: io::Error) -> BinlogError {
        BinlogError::new(Step::Read, "cannot list the files", error)
    }

    /// Returns the failure to read a file.
    pub fn of_read(file: FileNumber, error: io::Error) -> BinlogError {
        BinlogError::new(Step::Read, format!("cannot read binlog.{file}"), error)
    }

    /// Returns the failure to sync a file, or the names of files.
    pub fn of_sync(file: Option<FileNumber>, error: io::Error) -> BinlogError {
        let what = file.map_or("the directory".to_owned(), |file| format!("binlog.{file}"));
        BinlogError::new(Step::Write, format!("cannot sync {what}"), error)
    }

    /// Returns the failure to print.
    pub fn of_output(error: io::Error) -> BinlogError {
        BinlogError::new(Step::Output, "cannot write the output", error)
    }
}

impl From<NoMemory> for BinlogError {
    fn from(error: NoMemory) -> BinlogError {
        let error = io::Error::new(io::ErrorKind::OutOfMemory, error);
        BinlogError::new(Step::Read, "too little memory for its jobs", error)
    }
}

impl fmt::Display for BinlogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Corruption {
    pub const NAME_LENGTH: Corruption =
        Corruption::Other("no record: the length of the name of the tube is out of range");
    pub const NAME: Corruption =
        Corruption::Other("no record: the name of the tube is not allowed");
    pub const ID: Corruption = Corruption::Other("no record: the id is out of range");
    pub const STATE: Corruption = Corruption::Other("no record: the state is out of range");
    pub const BODY_LENGTH: Corruption =
        Corruption::Other("no record: the length of the body is out of range");
    pub const FILE_HEADER: Corruption = Corruption::Other("the file header record is damaged");
    /// The file header record of the next file has another end of this one, or another nonce.
    pub const FILE_END: Corruption = Corruption::Other(
        "the file ended otherwise when the next one was begun, so jobs may be lost and deleted ones back",
    );
    /// The record does not end within the file.
    pub const CUT_SHORT: Corruption = Corruption::Other("the record is cut short");
    /// For a damaged place, other bytes follow.
    pub const ZEROS: Corruption = Corruption::Other("zeros in the place of a record");
    pub const CHECKSUM: Corruption = Corruption::Other("the record fails its checksum");
    pub const BODY_END: Corruption = Corruption::Other("the body does not end in CR LF");
    /// The record is that of another job, or of another length.
    pub const OTHER_RECORD: Corruption = Corruption::Other("another record is in its place");
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Corruption::Version(version) => write!(f, "version {version} is unknown"),
            Corruption::Number(number) => {
                write!(f, "the file was binlog.{number}, so deleted jobs may be back")
            }
            Corruption::Other(cause) => f.write_str(cause),
        }
    }
}
