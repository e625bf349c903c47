//! The chunks of a binlog: reads them, and changes them by transactions that only the leader can make.
//!
//! Each change is one transaction, or one for each chunk. It can be made again after an unknown outcome:
//!
//! - A chunk is added if this server leads, the chunk is not there, and the one before it is. So a
//!   delayed twin of a transaction cannot bring back a chunk of a removed file. The first chunk of all
//!   has none before it: it also changes the key of the format, which must not have changed.
//! - The end of a log is cut if the first chunk to be changed is as it was read. Its numbers are used
//!   again, and a delayed twin must not remove the new chunks. The key of the file is written again, so
//!   that a server that stands by forgets what it has read of it ([`super::pages`]).
//! - A file is removed by the deletion of its key. After that no server reads its chunks, which are
//!   deleted some at a time: to delete 70,000 small ones at once takes etcd 2.7 s on a busy machine,
//!   and it renews no lease meanwhile. They go in ascending order, so that a delayed twin finds none
//!   before its own. Their numbers are never used again, because a newer chunk exists.

use super::api::{Compare, Op, Pair, Range, Txn};
use super::keys::{
    CHUNK_MAX, Chunk, ChunkNumber, IMPORTING, Keys, file_value, format_value, parse_number,
};
use super::nodes::{Nodes, RequestError};
use super::pages::{ListedFile, Page, Pages};
use super::shared::Leader;
use crate::engine::binlog::disk::FileNumber;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

/// A change of the files.
#[derive(Debug)]
pub enum Change {
    /// Adds bytes to the end of a file.
    Append { file: FileNumber, offset: u64, bytes: Vec<u8> },
    /// Removes the oldest file.
    Remove { file: FileNumber },
    /// Shortens a file to this many bytes, before the first append.
    Truncate { file: FileNumber, size: u64 },
    /// Copies the chunks of a file to other keys, and removes the file.
    SetAside { file: FileNumber },
    /// Ends an import: servers can use the binlog from now on.
    EndImport,
}

impl Change {
    /// Returns the number of bytes that the next transaction stores.
    pub fn next_len(&self) -> usize {
        match self {
            Change::Append { bytes, .. } => bytes.len().min(CHUNK_MAX),
            Change::Remove { .. }
            | Change::Truncate { .. }
            | Change::SetAside { .. }
            | Change::EndImport => 0,
        }
    }
}

/// Why a change is not made.
#[derive(Debug)]
pub enum ChangeError {
    /// Its outcome is unknown, or it was not made. It must be tried again.
    Unknown(RequestError),
    /// This server does not lead any more.
    NotLeading(String),
}

/// The files of a log, and the requests that read them.
#[derive(Debug)]
pub struct Log {
    nodes: Nodes,
    keys: Keys,
    /// The revision to read, or 0 for the newest.
    revision: i64,
    /// The files that are there.
    files: BTreeMap<FileNumber, ListedFile>,
    /// What was read before it was wanted.
    pages: Pages,
    /// The file of the page that was wanted last.
    wanted: FileNumber,
    /// The first chunk behind the last one of the newest file, once its size was asked for.
    end: ChunkNumber,
    /// The number of chunks in the next page.
    page_len: i64,
    /// Chunks of removed files: the first one, and the first one behind them.
    garbage: VecDeque<(ChunkNumber, ChunkNumber)>,
}

/// Why the log cannot be read.
#[derive(Debug)]
pub enum ReadError {
    Request(RequestError),
    /// The keys are not those of a binlog.
    Invalid(String),
}

/// A page has about this many bytes, so that it comes in time and takes little memory.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
const FIRST_PAGE_LEN: i64 = 64;
const LONGEST_PAGE_LEN: i64 = 512;
/// At most this many chunks are deleted at once, which takes etcd a few milliseconds.
const GARBAGE_STEP: u64 = 256;
/// While a server stands by: the pause after a page, and the time after which it asks for new ones.
const PREFETCH_PAUSE: Duration = Duration::from_millis(10);
const PREFETCH_INTERVAL: Duration = Duration::from_millis(500);

impl Log {
    /// Returns the log with this prefix, whose files are not listed yet.
    pub fn new(nodes: Nodes, keys: Keys) -> Log {
        Log {
            nodes,
            keys,
            revision: 0,
            files: BTreeMap::new(),
            pages: Pages::default(),
            wanted: 0,
            end: ChunkNumber::MAX,
            page_len: FIRST_PAGE_LEN,
            garbage: VecDeque::new(),
        }
    }

    // ---- Reading ----

    /// Lists the files. If `is_pinned`, later reads show the state of this moment.
    pub async fn list(&mut self, is_pinned: bool) -> Result<Vec<FileNumber>, ReadError> {
        let answer = self.nodes.get_page(Range::below(self.keys.files())).await?;
        let mut files = BTreeMap::new();
        for pair in &answer.pairs {
            let file = self.keys.parse_file(&pair.key).zip(parse_number(&pair.value));
            let (file, first) = file.ok_or_else(|| unknown_key(pair))?;
            files.insert(file, ListedFile { first, revision: pair.mod_revision });
        }
        self.pages.keep(&files);
        self.files = files;
        self.wanted = 0;
        self.end = ChunkNumber::MAX;
        self.revision = if is_pinned { answer.revision } else { 0 };
        Ok(self.files.keys().copied().collect())
    }

    /// Returns the number of the last chunk, or 0 if there is none.
    pub async fn last_chunk(&mut self) -> Result<ChunkNumber, ReadError> {
        let files = self.list(false).await?;
        let Some(range) = files.last().and_then(|&file| self.range(file)) else { return Ok(0) };
        self.last_of(range).await
    }

    /// Returns the number of the last chunk of a file. The chunks are only counted: to sort keys in
    /// descending order, etcd would load all values.
    async fn last_of(
        &mut self,
        (first, end): (ChunkNumber, ChunkNumber),
    ) -> Result<ChunkNumber, ReadError> {
        let range = Range { count_only: true, ..self.range_of(first, end) };
        let answer = self.nodes.get(range).await?;
        Ok(first + answer.count.saturating_sub(1))
    }

    /// Returns a chunk with the revision of its last change, if it is there.
    async fn chunk(&mut self, number: ChunkNumber) -> Result<Option<(i64, Chunk)>, ReadError> {
        let range = Range { revision: self.revision, ..Range::key(self.keys.chunk(number)) };
        let answer = self.nodes.get(range).await?;
        let Some(pair) = answer.pairs.first() else { return Ok(None) };
        let chunk = Chunk::decode(&pair.value).ok_or_else(|| unknown_key(pair))?;
        Ok(Some((pair.mod_revision, chunk)))
    }

    /// Returns the size of a file in bytes, or `None` if there is no such file.
    pub async fn size(&mut self, file: FileNumber) -> Result<Option<u64>, ReadError> {
        let Some(range) = self.range(file) else { return Ok(None) };
        let (read_bytes, next) = self.pages.next_unread(file, self.files[&file]);
        if next == range.1 {
            return Ok(Some(read_bytes));
        }
        let last = self.last_of(range).await?;
        if range.1 == ChunkNumber::MAX {
            // There is nothing to be read ahead behind it, which changes would wait for.
            self.end = last + 1;
        }
        Ok(self.chunk(last).await?.map(|(_, chunk)| chunk.end()))
    }

    /// Returns bytes of a file with the offset of the first one, which is at most `offset`. There
    /// are none behind the end of the file, or if there is no such file.
    pub async fn page(
        &mut self,
        file: FileNumber,
        offset: u64,
    ) -> Result<(u64, Vec<u8>), ReadError> {
        self.wanted = file;
        loop {
            if let Some(page) = self.pages.take(file, offset) {
                return Ok((page.at, page.bytes));
            }
            let Some(&listed) = self.files.get(&file) else { return Ok((offset, Vec::new())) };
            let next = self.pages.next(file, listed, offset);
            if !self.read_page(file, listed, next).await? {
                return Ok((next.0, Vec::new()));
            }
        }
    }

    /// Reads one page that is probably wanted next: the one behind the last one, or the first one of
    /// the next file.
    pub async fn read_ahead(&mut self) -> Result<(), ReadError> {
        if !self.pages.has_untaken() {
            self.read_unread().await?;
        }
        Ok(())
    }

    /// Reads a page that was not read yet, for the case that this server leads later. Returns the time
    /// until there may be another one.
    pub async fn prefetch(&mut self) -> Duration {
        let is_read = match self.revision {
            0 => self.list(true).await.map(|files| !files.is_empty()),
            _ => self.read_unread().await,
        };
        match is_read {
            Ok(true) => PREFETCH_PAUSE,
            // Revisions are dropped after some time, so the next pages are of another one.
            Ok(false) | Err(_) => {
                self.revision = 0;
                PREFETCH_INTERVAL
            }
        }
    }

    /// Reads a page that was not read yet. Returns `false` if there is none.
    async fn read_unread(&mut self) -> Result<bool, ReadError> {
        for (file, listed) in self.files.range(self.wanted..) {
            let next = self.pages.next_unread(*file, *listed);
            if self.range(*file).is_some_and(|(_, end)| next.1 < end.min(self.end)) {
                let (file, listed) = (*file, *listed);
                return self.read_page(file, listed, next).await;
            }
        }
        Ok(false)
    }

    /// Reads the page with this offset and chunk. Returns `false` if it is behind the end of the file.
    async fn read_page(
        &mut self,
        file: FileNumber,
        listed: ListedFile,
        (at, chunk): (u64, ChunkNumber),
    ) -> Result<bool, ReadError> {
        let end = self.range(file).map_or(chunk, |(_, end)| end);
        if chunk == end {
            return Ok(false);
        }
        let (count, bytes) = self.chunks(file, chunk, end, at).await?;
        if count > 0 {
            self.pages.push(file, listed, Page { at, bytes }, count);
        }
        Ok(count > 0)
    }

    /// Forgets what was read ahead.
    pub fn end_reading(&mut self) {
        self.pages.clear();
    }

    /// Returns the number of the next chunks of a file, up to a page, and their bytes.
    async fn chunks(
        &mut self,
        file: FileNumber,
        from: ChunkNumber,
        end: ChunkNumber,
        offset: u64,
    ) -> Result<(u64, Vec<u8>), ReadError> {
        let answer = loop {
            let range = Range { limit: self.page_len, ..self.range_of(from, end) };
            match self.nodes.get_page(range).await {
                // Large chunks follow many small ones.
                Err(RequestError::TooLong(_)) if self.page_len > 1 => self.page_len /= 2,
                answer => break answer?,
            }
        };
        let mut bytes = Vec::new();
        for (number, pair) in (from..).zip(&answer.pairs) {
            let chunk = self.keys.parse_chunk(&pair.key).zip(Chunk::split(&pair.value));
            let (found, (of, at, part)) = chunk.ok_or_else(|| unknown_key(pair))?;
            let expected = offset + bytes.len() as u64;
            if (found, of, at) != (number, file, expected) {
                let text = format!("chunk {number:x} of binlog.{file} is missing or another one");
                return Err(ReadError::Invalid(text));
            }
            bytes.extend_from_slice(part);
        }
        if bytes.len() > PAGE_BYTES {
            self.page_len = (self.page_len / 2).max(1);
        } else if bytes.len() < PAGE_BYTES / 2 && answer.more {
            self.page_len = (self.page_len * 2).min(LONGEST_PAGE_LEN);
        }
        Ok((answer.pairs.len() as u64, bytes))
    }

    /// Returns the keys of some chunks, in the revision to read.
    fn range_of(&self, first: ChunkNumber, end: ChunkNumber) -> Range {
        let range = Range::until(self.keys.chunk(first), self.keys.chunk(end));
        Range { revision: self.revision, ..range }
    }

    /// Returns the first chunk of a file, and the first one behind it.
    fn range(&self, file: FileNumber) -> Option<(ChunkNumber, ChunkNumber)> {
        let mut files = self.files.range(file..);
        let (_, listed) = files.next().filter(|&(&found, _)| found == file)?;
        Some((listed.first, files.next().map_or(ChunkNumber::MAX, |(_, next)| next.first)))
    }

    // ---- Changing ----

    /// Tries once to make a change, or the next transaction of it. Returns whether it is made
    /// completely.
    pub async fn change(
        &mut self,
        leader: &mut Leader,
        change: &mut Change,
    ) -> Result<bool, ChangeError> {
        match change {
            Change::Append { file, offset, bytes } => {
                let len = bytes.len().min(CHUNK_MAX);
                self.append(leader, *file, *offset, &bytes[..len]).await?;
                bytes.drain(..len);
                *offset += len as u64;
                Ok(bytes.is_empty())
            }
            Change::Remove { file } => self.remove(leader, *file).await.map(|()| true),
            Change::Truncate { file, size } => {
                self.truncate(leader, *file, *size).await.map(|()| true)
            }
            Change::SetAside { file } => {
                self.copy_aside(leader, *file).await?;
                self.remove(leader, *file).await.map(|()| true)
            }
            Change::EndImport => {
                let value = format_value(leader.file_size);
                let put = vec![Op::put(self.keys.format(), value)];
                let _ = self.transact(leader, Vec::new(), put, None).await?;
                Ok(true)
            }
        }
    }

    async fn append(
        &mut self,
        leader: &mut Leader,
        file: FileNumber,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), ChangeError> {
        let number = leader.last_chunk + 1;
        let key = self.keys.chunk(number);
        let value = Chunk::encode(file, offset, bytes);
        let before = match leader.last_chunk {
            0 => Compare::Modified(self.keys.format(), leader.format_revision),
            last => Compare::Exists(self.keys.chunk(last)),
        };
        let is_absent = Compare::Created(key.clone(), 0);
        let mut puts = vec![Op::put(key.clone(), value.clone())];
        if offset == 0 {
            puts.push(Op::put(self.keys.file(file), file_value(number)));
        }
        if leader.last_chunk == 0 {
            let size = format_value(leader.file_size);
            let value = if leader.is_import { IMPORTING.to_owned() } else { size };
            puts.push(Op::put(self.keys.format(), value));
        }
        let found = self.transact(leader, vec![is_absent, before], puts, Some(key)).await?;
        if let Err(found) = found
            && found.is_none_or(|found| found != value)
        {
            let text = format!("chunk {number:x} is there already, or the one before it is gone");
            return Err(ChangeError::NotLeading(text));
        }
        leader.last_chunk = number;
        if offset == 0 {
            // What is read of a file that is written here is not kept.
            self.files.insert(file, ListedFile { first: number, revision: 0 });
        }
        Ok(())
    }

    async fn remove(&mut self, leader: &Leader, file: FileNumber) -> Result<(), ChangeError> {
        let Some((first, end)) = self.range(file) else { return Ok(()) };
        assert!(
            end <= leader.last_chunk,
            "no chunk of a newer file is there, but binlog.{file} goes"
        );
        let oldest = self.files.keys().next();
        assert_eq!(oldest, Some(&file), "files are removed in their order, without gaps");
        let delete = vec![Op::delete(self.keys.file(file))];
        // It has no condition but that this server leads.
        let _ = self.transact(leader, Vec::new(), delete, None).await?;
        self.files.remove(&file);
        self.garbage.push_back((first, end));
        Ok(())
    }

    /// Finds the chunks of removed files that an earlier leader has left.
    pub async fn find_garbage(&mut self) -> Result<(), ReadError> {
        // The last chunk stays, because the next one needs it. It belongs to a file.
        let Some(oldest) = self.files.values().next().map(|file| file.first) else { return Ok(()) };
        let first = Range { limit: 1, keys_only: true, ..Range::below(self.keys.chunks()) };
        let answer = self.nodes.get(first).await?;
        let Some(pair) = answer.pairs.first() else { return Ok(()) };
        let first = self.keys.parse_chunk(&pair.key).ok_or_else(|| unknown_key(pair))?;
        if first < oldest {
            self.garbage.push_back((first, oldest));
        }
        Ok(())
    }

    /// Returns whether there are chunks of removed files.
    pub fn has_garbage(&self) -> bool {
        !self.garbage.is_empty()
    }

    /// Tries to delete some chunks of removed files.
    pub async fn delete_garbage(&mut self, leader: &Leader) -> Result<(), ChangeError> {
        let Some(&(first, end)) = self.garbage.front() else { return Ok(()) };
        let next = (first + GARBAGE_STEP).min(end);
        let end_key = Some(self.keys.chunk(next));
        let delete = vec![Op::Delete { key: self.keys.chunk(first), end: end_key }];
        let _ = self.transact(leader, Vec::new(), delete, None).await?;
        if next == end {
            self.garbage.pop_front();
        } else {
            self.garbage[0].0 = next;
        }
        Ok(())
    }

    /// Shortens a file. Only its last chunk that stays may be written again, shorter.
    async fn truncate(
        &mut self,
        leader: &mut Leader,
        file: FileNumber,
        size: u64,
    ) -> Result<(), ChangeError> {
        let Some((first, end)) = self.range(file) else { return Ok(()) };
        let is_newest = end == ChunkNumber::MAX;
        let mut number = self.last_of((first, end)).await?;
        let mut cut = None;
        let (revision, kept) = loop {
            match self.chunk(number).await? {
                Some((revision, chunk)) if chunk.offset < size => break (revision, chunk),
                Some((revision, _)) if number > first => cut = Some(revision),
                Some(_) | None => {
                    let text = format!("binlog.{file} has lost its first chunk");
                    return Err(ChangeError::NotLeading(text));
                }
            }
            number -= 1;
        };
        let mut conditions = Vec::new();
        let mut operations = Vec::new();
        let is_shorter = kept.end() > size;
        if is_shorter {
            let len = usize::try_from(size - kept.offset).expect("it is shorter than a chunk");
            let value = Chunk::encode(file, kept.offset, &kept.bytes[..len]);
            let key = self.keys.chunk(number);
            conditions.push(Compare::Modified(key.clone(), revision));
            operations.push(Op::put(key, value));
        }
        if let Some(revision) = cut {
            let key = self.keys.chunk(number + 1);
            conditions.push(Compare::Modified(key.clone(), revision));
            operations.push(Op::Delete { key, end: Some(self.keys.chunk(end)) });
        }
        if !operations.is_empty() {
            operations.push(Op::put(self.keys.file(file), file_value(first)));
            // If a chunk has changed since it was read, an earlier try has succeeded. The next one
            // finds nothing to do.
            let done = self.transact(leader, conditions, operations, None).await?;
            done.map_err(|_| {
                ChangeError::Unknown(RequestError::Unavailable(
                    "the end was cut already".to_owned(),
                ))
            })?;
        }
        if is_newest {
            leader.last_chunk = number;
        }
        Ok(())
    }

    async fn copy_aside(&mut self, leader: &Leader, file: FileNumber) -> Result<(), ChangeError> {
        let Some((first, end)) = self.range(file) else { return Ok(()) };
        let mut number = first;
        while number < end {
            let mut answer = self.nodes.get(Range::key(self.keys.chunk(number))).await?;
            let Some(pair) = answer.pairs.pop() else { return Ok(()) };
            let put = vec![Op::put(self.keys.damaged_chunk(file, number), pair.value)];
            let _ = self.transact(leader, Vec::new(), put, None).await?;
            number += 1;
        }
        Ok(())
    }

    /// Makes a transaction if this server leads and the conditions hold. If a condition does not
    /// hold, returns the value of `key` as the error.
    async fn transact(
        &mut self,
        leader: &Leader,
        mut when: Vec<Compare>,
        then: Vec<Op>,
        key: Option<String>,
    ) -> Result<Result<(), Option<Vec<u8>>>, ChangeError> {
        let leader_key = self.keys.leader();
        when.push(Compare::Created(leader_key.clone(), leader.revision));
        let otherwise = std::iter::once(leader_key).chain(key).map(Op::get).collect();
        let answer = self.nodes.txn(Txn { when, then, otherwise }).await?;
        if answer.succeeded {
            return Ok(Ok(()));
        }
        let mut found = answer.found.into_iter().map(|mut pairs| pairs.pop());
        let present = found.next().flatten();
        match present {
            Some(pair) if pair.create_revision == leader.revision => {
                Ok(Err(found.next().flatten().map(|pair| pair.value)))
            }
            Some(pair) => {
                let name = String::from_utf8_lossy(&pair.value).into_owned();
                Err(ChangeError::NotLeading(format!("{name} leads")))
            }
            None => Err(ChangeError::NotLeading("the lease has ended".to_owned())),
        }
    }
}

/// Writes the key of the format if it is not there. Returns the revision of its last change.
pub async fn begin_format(
    nodes: &mut Nodes,
    keys: &Keys,
    leader_revision: i64,
    value: &str,
) -> Result<i64, ChangeError> {
    let leads = Compare::Created(keys.leader(), leader_revision);
    let is_absent = Compare::Created(keys.format(), 0);
    let (put, read) = (Op::put(keys.format(), value), Op::get(keys.format()));
    let (when, then) = (vec![leads, is_absent], vec![put, read.clone()]);
    let mut answer = nodes.txn(Txn { when, then, otherwise: vec![read] }).await?;
    let format = answer.found.pop().and_then(|mut pairs| pairs.pop());
    let format = format.ok_or_else(|| ChangeError::NotLeading("the lease has ended".to_owned()))?;
    Ok(format.mod_revision)
}

fn unknown_key(pair: &Pair) -> ReadError {
    ReadError::Invalid(format!("{} is no key of a binlog", String::from_utf8_lossy(&pair.key)))
}

impl From<RequestError> for ReadError {
    fn from(error: RequestError) -> ReadError {
        ReadError::Request(error)
    }
}

impl From<ReadError> for ChangeError {
    fn from(error: ReadError) -> ChangeError {
        match error {
            ReadError::Request(error) => error.into(),
            ReadError::Invalid(text) => ChangeError::NotLeading(text),
        }
    }
}

impl From<RequestError> for ChangeError {
    fn from(error: RequestError) -> ChangeError {
        match error {
            RequestError::LeaseEnded(text) | RequestError::Refused(text) => {
                ChangeError::NotLeading(text)
            }
            unknown @ (RequestError::Unavailable(_)
            | RequestError::TooLong(_)
            | RequestError::NoSpace(_)) => ChangeError::Unknown(unknown),
        }
    }
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReadError::Request(error) => write!(f, "{error}"),
            ReadError::Invalid(text) => f.write_str(text),
        }
    }
}
