//! The disk as the binlog sees it: numbered files, and the few things done with them.
//!
//! The real one is in the other wing; the tests have one that tears, fails and fills up.
//! Whoever implements it continues short writes and starts interrupted calls again, so that
//! an error is final.

use crate::engine::collections::histogram::Histogram;
use std::fmt;
use std::io;

/// The number N of a file `binlog.N`.
pub type FileNumber = u32;

/// The largest number that C beanstalkd reads.
pub const LAST_NUMBER: FileNumber = i32::MAX as FileNumber;

/// A directory of files `binlog.N`.
pub trait Disk: fmt::Debug {
    /// The numbers of the files that there are, in rising order.
    ///
    /// # Errors
    /// The directory cannot be read.
    fn list(&mut self) -> io::Result<Vec<FileNumber>>;

    /// How many bytes the file has.
    ///
    /// # Errors
    /// There is no such file, or it cannot be looked at.
    fn size(&mut self, number: FileNumber) -> io::Result<u64>;

    /// Reads from `offset` on into `bytes`; says how many bytes, fewer only at the end of the
    /// file.
    ///
    /// # Errors
    /// The file cannot be read.
    fn read(&mut self, number: FileNumber, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;

    /// Makes a file of `size` zero bytes, which writing will not run out of space in.
    ///
    /// # Errors
    /// There is no space for it, or the file cannot be made; then there is none.
    fn create(&mut self, number: FileNumber, size: u64) -> io::Result<()>;

    /// Lengthens a file in the same way to `size` bytes.
    ///
    /// # Errors
    /// There is no space for it, and the file is as it was.
    fn extend(&mut self, number: FileNumber, size: u64) -> io::Result<()>;

    /// Writes all of `bytes` at `offset`.
    ///
    /// # Errors
    /// Some of them may not have been written.
    fn write(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Lets the disk begin with these bytes that were written, so that the sync that follows has
    /// less to do. Nothing is promised, and nothing can fail.
    fn begin_sync(&mut self, number: FileNumber, offset: u64, len: u64);

    /// Sees to it that everything written to the file survives a power cut.
    ///
    /// # Errors
    /// It may not.
    fn sync(&mut self, number: FileNumber) -> io::Result<()>;

    /// How long [`Disk::sync`] took, each time; nothing where nobody looks at a clock.
    fn sync_times(&self) -> Histogram {
        Histogram::default()
    }

    /// Sees to it that files made, renamed and removed stay so after a power cut.
    ///
    /// # Errors
    /// They may not.
    fn sync_directory(&mut self) -> io::Result<()>;

    /// Cuts the file to `size` bytes.
    ///
    /// # Errors
    /// It is as it was.
    fn cut(&mut self, number: FileNumber, size: u64) -> io::Result<()>;

    /// Nothing will be written to the file any more.
    fn close(&mut self, number: FileNumber);

    /// Removes the file. That there is none is no error. Its space may come back only as
    /// [`Disk::truncate_step`] is called, or when it is needed.
    ///
    /// # Errors
    /// It is still there.
    fn remove(&mut self, number: FileNumber) -> io::Result<()>;

    /// Gives back some of the space of removed files, since all of it at once takes long. Says
    /// whether there is more.
    fn truncate_step(&mut self) -> bool;

    /// Gives the file another name, which [`Disk::list`] does not know; says which.
    ///
    /// # Errors
    /// It is still there under its number.
    fn quarantine(&mut self, number: FileNumber) -> io::Result<String>;
}
