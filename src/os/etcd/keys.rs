//! The keys of a binlog in etcd, and their values.
//!
//! ```text
//! PREFIX/format                    the version of this layout, and the size of a file
//! PREFIX/leader                    the name of the server that leads, with its lease
//! PREFIX/last                      about the last chunk: it is there, or later ones; and the lowest one
//! PREFIX/file/00000003             the file's first chunk, and what else is known of it: [`File`]
//! PREFIX/log/000000000000002a      a chunk: file number, offset, bytes
//! PREFIX/damaged/00000003/...2a    a chunk of a damaged file that was set aside
//! ```
//!
//! Chunks are numbered over all files, without gaps: a chunk is added only if the one before it is
//! there. Chunk 0 is there before the first one, without bytes. The chunks of a file are those from its
//! first one to the first one of the next file, or to one without bytes.

use crate::engine::binlog::disk::FileNumber;
use crate::engine::text::is_unprintable;
use std::hash::{BuildHasher, RandomState};

/// The number of a chunk.
pub type ChunkNumber = u64;

/// The keys of one binlog.
#[derive(Clone, Debug)]
pub struct Keys {
    pub prefix: String,
}

/// What is known of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct File {
    pub first: ChunkNumber,
    /// A random number. By it a file differs from one of the same chunks that was lost when etcd was
    /// restored to an older state.
    pub nonce: u64,
    /// The number of its bytes, or [`WHOLE`]. A leader cuts a batch that the one before has not
    /// completed.
    pub size: u64,
    /// The first chunk of the next file. It is not in the value.
    pub end: ChunkNumber,
}

/// The size of a file that has all bytes of its chunks.
pub const WHOLE: u64 = u64::MAX;

/// A part of a file, as it is stored under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<'v> {
    /// The number of the file.
    pub file: FileNumber,
    /// The offset in the file of the first byte.
    pub offset: u64,
    pub bytes: &'v [u8],
}

/// The most bytes in a chunk. etcd takes transactions of 1.5 MiB, but keeps at least the last 5,000 of
/// them in memory: with chunks of up to 1 MiB, and large bodies, a node took 11 GB.
pub const CHUNK_MAX: usize = 256 * 1024;

/// The value of the key of the format while a binlog is imported.
pub const IMPORTING: &str = "beanstalkd-binlog importing\n";

const FORMAT: &str = "beanstalkd-binlog 1 file-size ";

impl Keys {
    pub fn new(prefix: &str) -> Keys {
        Keys { prefix: prefix.to_owned() }
    }

    /// Returns the beginning of all keys.
    pub fn all(&self) -> String {
        format!("{}/", self.prefix)
    }

    pub fn format(&self) -> String {
        format!("{}/format", self.prefix)
    }

    pub fn leader(&self) -> String {
        format!("{}/leader", self.prefix)
    }

    pub fn last(&self) -> String {
        format!("{}/last", self.prefix)
    }

    /// Returns the beginning of the keys of all files.
    pub fn files(&self) -> String {
        format!("{}/file/", self.prefix)
    }

    pub fn file(&self, number: FileNumber) -> String {
        format!("{}/file/{number:08x}", self.prefix)
    }

    /// Returns the beginning of the keys of all chunks.
    pub fn chunks(&self) -> String {
        format!("{}/log/", self.prefix)
    }

    pub fn chunk(&self, number: ChunkNumber) -> String {
        format!("{}/log/{number:016x}", self.prefix)
    }

    pub fn damaged_chunk(&self, file: FileNumber, number: ChunkNumber) -> String {
        format!("{}/damaged/{file:08x}/{number:016x}", self.prefix)
    }

    /// Returns the message of a binlog that lacks a key.
    pub fn missing(&self, key: &str) -> String {
        format!(
            "{key} is missing or damaged; nothing was changed; restore etcd from a snapshot that has this \
             key, or delete all keys that begin with {} to lose all jobs",
            self.all()
        )
    }

    /// Returns the number of the file with this key.
    pub fn parse_file(&self, key: &[u8]) -> Option<FileNumber> {
        let number = parse_number(key.strip_prefix(self.files().as_bytes())?)?.try_into().ok()?;
        // Files are numbered from 1.
        (number > 0 && self.file(number).as_bytes() == key).then_some(number)
    }

    /// Returns the number of the chunk with this key.
    pub fn parse_chunk(&self, key: &[u8]) -> Option<ChunkNumber> {
        let number = parse_number(key.strip_prefix(self.chunks().as_bytes())?)?;
        (self.chunk(number).as_bytes() == key).then_some(number)
    }
}

/// Returns the value of the key of the last chunk, with the lowest one that is left.
pub fn last_value(last: ChunkNumber, lowest: ChunkNumber) -> String {
    format!("{last:016x} {lowest:016x}")
}

/// Returns the numbers in that value. Another value promises nothing. Earlier versions wrote only the last chunk.
pub fn parse_last(value: &[u8]) -> (ChunkNumber, ChunkNumber) {
    let mut numbers = value.split(|&byte| byte == b' ').map(parse_number);
    let mut number = || numbers.next().flatten();
    (number().unwrap_or(0), number().unwrap_or(ChunkNumber::MAX))
}

/// Returns the value of the key of the format.
pub fn format_value(file_size: u32) -> String {
    format!("{FORMAT}{file_size}\n")
}

/// Returns the size of a file in the value of the key of the format, or `None` for another value.
pub fn parse_format(value: &[u8]) -> Option<u32> {
    let text = str::from_utf8(value).ok()?;
    let file_size = text.strip_prefix(FORMAT)?.strip_suffix('\n')?.parse().ok()?;
    (format_value(file_size) == text).then_some(file_size)
}

fn parse_number(value: &[u8]) -> Option<ChunkNumber> {
    ChunkNumber::from_str_radix(str::from_utf8(value).ok()?, 16).ok()
}

/// Returns what other programs have written as text for messages: it must not forge lines of the log.
pub fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace(is_unprintable, "\u{fffd}")
}

impl File {
    /// Returns a new file.
    pub fn new(first: ChunkNumber) -> File {
        let nonce = RandomState::new().hash_one(first);
        File { first, nonce, size: WHOLE, end: ChunkNumber::MAX }
    }

    /// Returns the value of its key. Earlier versions had an end in the third number.
    pub fn encode(self) -> String {
        let File { first, nonce, size, .. } = self;
        format!("{first:016x} {nonce:016x} {:016x} {size:016x}", ChunkNumber::MAX)
    }

    /// Returns what a value means. The first version wrote only the first chunk.
    pub fn decode(value: &[u8]) -> Option<File> {
        let mut numbers = value.split(|&byte| byte == b' ').map(parse_number);
        let first = numbers.next()??;
        let mut number = || numbers.next().unwrap_or(Some(u64::MAX));
        let (nonce, _, size) = (number()?, number()?, number()?);
        numbers.next().is_none().then_some(File { first, nonce, size, end: ChunkNumber::MAX })
    }
}

impl<'v> Chunk<'v> {
    /// The bytes of a value before those of the file.
    pub const HEAD_LEN: usize = size_of::<FileNumber>() + size_of::<u64>();

    /// Returns the value of the key of a chunk.
    pub fn encode(self) -> Vec<u8> {
        [&self.file.to_le_bytes()[..], &self.offset.to_le_bytes(), self.bytes].concat()
    }

    /// Returns the chunk in a value, or `None` if the value is too short.
    pub fn decode(value: &'v [u8]) -> Option<Chunk<'v>> {
        let (file, rest) = value.split_first_chunk()?;
        let (offset, bytes) = rest.split_first_chunk()?;
        let (file, offset) = (FileNumber::from_le_bytes(*file), u64::from_le_bytes(*offset));
        Some(Chunk { file, offset, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_are_read_as_they_were_written() {
        let keys = Keys::new("/team/jobs");
        assert_eq!(keys.parse_file(b"/team/jobs/file/0000002a"), Some(42));
        assert_eq!(keys.parse_chunk(keys.chunk(u64::MAX).as_bytes()), Some(u64::MAX));
        for key in ["/team/jobs/file/2a", "/team/jobs/file/0000002A", "/team/jobs/log/0000002a"] {
            assert_eq!(keys.parse_file(key.as_bytes()), None, "{key}");
        }
        assert_eq!(keys.parse_chunk(b"/team/jobs/log/+00000000000002a"), None);
        assert_eq!(parse_format(format_value(4096).as_bytes()), Some(4096));
        for value in [
            "",
            "4096",
            "beanstalkd-binlog 2 file-size 4096\n",
            "beanstalkd-binlog 1 file-size +1\n",
        ] {
            assert_eq!(parse_format(value.as_bytes()), None, "{value}");
        }
        let file = File { size: 3, ..File::new(7) };
        assert_eq!(File::decode(file.encode().as_bytes()), Some(file));
        let of_first_version = File { nonce: u64::MAX, ..File::new(7) };
        assert_eq!(File::decode(b"0000000000000007"), Some(of_first_version));
        for value in ["", "x", "7 x", "1 2 3 4 5"] {
            assert_eq!(File::decode(value.as_bytes()), None, "{value}");
        }
        let chunk = Chunk { file: 3, offset: 1 << 40, bytes: b"record" };
        let value = chunk.encode();
        assert_eq!(Chunk::decode(&value), Some(chunk));
        assert_eq!(Chunk::decode(&value[..11]), None);
    }
}
