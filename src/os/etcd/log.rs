//! The chunks of a binlog: reads them, and changes them by transactions that only the leader can make.
//!
//! Files are read whole. A closed file stays as it is, so a server that stands by keeps it, and finds by
//! the value of the file's key whether it is still the same one, also after etcd was restored to an older
//! state. The newest file is read after the server leads.
//!
//! Each change is one transaction, or one for each chunk. It can be made again after an unknown outcome:
//!
//! - A chunk is added if this server leads, the chunk is not there, and the one before it is. So a
//!   delayed twin of a transaction cannot bring back a chunk of a removed file. The first chunk of all
//!   has none before it: it also changes the key of the format, which must not have changed.
//! - A batch that is not complete is cut by the size in the key of its file. Its chunks stay.
//! - A file is removed, also from between others, by the deletion of its key. After that no server reads its chunks, which are
//!   deleted some at a time: to delete 70,000 small ones at once takes etcd 2.7 s on a busy machine,
//!   and it renews no lease meanwhile. They go in ascending order, so that a delayed twin finds none
//!   before its own. Their numbers are never used again, because a newer chunk exists.

use super::api::{Compare, Found, Op, Pair, Range, Txn};
use super::keys::{CHUNK_MAX, Chunk, ChunkNumber, IMPORTING, Keys, Listed, format_value};
use super::lease::{Leader, RETRY_PAUSE};
use super::membership::Standing;
use super::nodes::{Error, Kind, Nodes};
use super::shared::Shared;
use crate::engine::binlog::disk::FileNumber;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::time::sleep;

/// A change of the files.
#[derive(Debug)]
pub enum Change {
    /// Adds bytes to the end of a file.
    Append { file: FileNumber, offset: u64, bytes: Vec<u8> },
    /// Removes a file.
    Remove { file: FileNumber },
    /// Shortens a file that an earlier leader wrote to this many bytes.
    Truncate { file: FileNumber, size: u64 },
    /// Copies the chunks of a file to other keys, and removes the file.
    SetAside { file: FileNumber },
    /// Ends an import: servers can use the binlog from now on.
    EndImport,
}

/// The bytes of a file.
pub type Bytes = Arc<Vec<u8>>;

/// Files that were read, by the values of their keys.
type Cache = Arc<Mutex<BTreeMap<FileNumber, (Listed, Bytes)>>>;

/// The files of a log, and the requests that read and change them. Clones share what was read.
#[derive(Clone, Debug)]
pub struct Log {
    nodes: Nodes,
    keys: Keys,
    shared: Arc<Shared>,
    /// The files that are there. Each but the newest has an end.
    files: BTreeMap<FileNumber, Listed>,
    cache: Cache,
    /// The number of chunks in the next page.
    page_len: i64,
    /// The most bytes in a chunk.
    chunk_max: usize,
    /// The number of the last chunk, or 0 if there is none.
    last_chunk: ChunkNumber,
    /// No chunk below this number is left, but for garbage.
    lowest: ChunkNumber,
    /// Chunks of removed files: the first one, and the first one behind them.
    garbage: VecDeque<(ChunkNumber, ChunkNumber)>,
}

/// Why the bytes of a file are not there.
enum Missing {
    Request(Error),
    /// This chunk is missing, or is one of another file.
    Chunk(ChunkNumber),
}

/// A page has about this many bytes, so that it comes in time.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
const LONGEST_PAGE_LEN: i64 = 512;
/// A node that does not answer is asked again once.
const TRIES_PER_NODE: usize = 2;
/// At most this many chunks are deleted at once, which takes etcd a few milliseconds.
const GARBAGE_STEP: u64 = 256;
/// With shorter chunks etcd would store little but keys.
const SHORTEST_CHUNK: usize = 4 * 1024;

impl Log {
    /// Returns the log with this prefix, whose files are not listed yet.
    pub fn new(nodes: Nodes, keys: Keys, shared: Arc<Shared>) -> Log {
        Log {
            nodes,
            keys,
            shared,
            files: BTreeMap::new(),
            cache: Cache::default(),
            page_len: 64,
            chunk_max: CHUNK_MAX,
            last_chunk: 0,
            lowest: 0,
            garbage: VecDeque::new(),
        }
    }

    // ---- Reading ----

    /// Lists the files, and drops what was read of others.
    pub async fn list(&mut self) -> Result<Vec<FileNumber>, Error> {
        self.files = self.listed().await?;
        let files = &self.files;
        self.cached(|cache| cache.retain(|file, (listed, _)| files.get(file) == Some(listed)));
        Ok(self.files.keys().copied().collect())
    }

    async fn listed(&mut self) -> Result<BTreeMap<FileNumber, Listed>, Error> {
        let answer = self.read(Range::below(self.keys.files())).await?;
        let mut files = BTreeMap::new();
        let mut end = ChunkNumber::MAX;
        for pair in answer.pairs.iter().rev() {
            let file = self.keys.parse_file(&pair.key).zip(Listed::decode(&pair.value));
            let (file, listed) = file.ok_or_else(|| unknown_key(pair))?;
            files.insert(file, Listed { end: listed.end.min(end), ..listed });
            end = listed.first;
        }
        Ok(files)
    }

    /// Lists the files for a leader, which changes them later.
    pub async fn list_to_lead(&mut self) -> Result<Vec<FileNumber>, Error> {
        let files = self.list().await?;
        self.find_ends().await?;
        Ok(files)
    }

    /// Lists and reads all files, as they are at one moment: until none goes between the first one that is
    /// read and the last one. A record that was moved out of a file is in another one then.
    pub async fn list_whole(&mut self) -> Result<Vec<FileNumber>, Error> {
        loop {
            // The newest file may have grown.
            self.cached(|cache| cache.retain(|_, (listed, _)| listed.end != ChunkNumber::MAX));
            let files = self.list().await?;
            for &file in &files {
                let _ = self.file(file).await?;
            }
            let left = self.listed().await?;
            let is_there =
                |file| left.contains_key(file) && self.cached(|it| it.contains_key(file));
            if files.iter().all(is_there) {
                return Ok(files);
            }
        }
    }

    /// Returns the bytes of a file, or `None` if there is no such file.
    pub async fn file(&mut self, file: FileNumber) -> Result<Option<Bytes>, Error> {
        while let Some(&listed) = self.files.get(&file) {
            if let Some((_, bytes)) = self.cached(|cache| cache.get(&file).cloned()) {
                return Ok(Some(bytes));
            }
            let missing = match self.read_file(file, listed).await {
                Ok(bytes) => {
                    let bytes = Bytes::new(bytes);
                    let entry = (listed, Arc::clone(&bytes));
                    self.cached(|cache| cache.insert(file, entry));
                    return Ok(Some(bytes));
                }
                Err(Missing::Request(error)) => return Err(error),
                Err(Missing::Chunk(chunk)) => chunk,
            };
            // Another server may have removed the file, or begun the next one.
            self.list().await?;
            if self.files.get(&file) == Some(&listed) {
                let (key, prefix) = (self.keys.chunk(missing), self.keys.all());
                return Err(Error::new(
                    Kind::Lasting,
                    format!(
                        "{key} is missing: binlog.{file} has a gap; nothing was changed; restore etcd \
                         from a snapshot that has this key, or delete all keys that begin with {prefix} \
                         to lose all jobs"
                    ),
                ));
            }
        }
        Ok(None)
    }

    async fn read_file(&mut self, file: FileNumber, listed: Listed) -> Result<Vec<u8>, Missing> {
        let Listed { first: mut next, end, size, .. } = listed;
        let mut bytes = Vec::new();
        while next < end {
            let range = Range::until(self.keys.chunk(next), self.keys.chunk(end));
            let range = Range { limit: self.page_len, ..range };
            let answer = self.read(range).await.map_err(Missing::Request)?;
            let before = bytes.len();
            for pair in &answer.pairs {
                let chunk = self.keys.parse_chunk(&pair.key).zip(Chunk::decode(&pair.value));
                let (number, chunk) = chunk.ok_or_else(|| Missing::Request(unknown_key(pair)))?;
                let offset = usize::try_from(chunk.offset).unwrap_or(usize::MAX);
                if (number, chunk.file) != (next, file) || offset > bytes.len() {
                    return Err(Missing::Chunk(next));
                }
                // A leader may continue a file that it has cut.
                bytes.truncate(offset);
                bytes.extend_from_slice(chunk.bytes);
                next += 1;
            }
            let is_long = bytes.len() - before > PAGE_BYTES;
            let page_len = if is_long { self.page_len / 2 } else { self.page_len * 2 };
            self.page_len = page_len.clamp(1, LONGEST_PAGE_LEN);
            if !answer.more {
                break;
            }
        }
        // The newest file has no end, but at least one chunk.
        if next != end && (end != ChunkNumber::MAX || next == listed.first) {
            return Err(Missing::Chunk(next));
        }
        bytes.truncate(usize::try_from(size).unwrap_or(usize::MAX));
        Ok(bytes)
    }

    /// Reads one closed file that was not read yet, for the case that this server leads later. Returns
    /// `false` if there is none.
    pub async fn prefetch(&mut self) -> Result<bool, Error> {
        self.list().await?;
        let is_unread = |file: &FileNumber| self.cached(|cache| !cache.contains_key(file));
        let mut closed = self.files.iter().filter(|(_, listed)| listed.end != ChunkNumber::MAX);
        let Some((&file, _)) = closed.find(|(file, _)| is_unread(file)) else { return Ok(false) };
        Ok(self.file(file).await?.is_some())
    }

    /// Reads the file after this one, which is probably wanted next.
    pub async fn read_ahead(&mut self, file: FileNumber) {
        if let Some((&next, _)) = self.files.range(file + 1..).next() {
            // A failure is that of the next request too.
            let _ = self.file(next).await;
        }
    }

    /// Forgets what was read of a file, and of those before it.
    pub fn forget(&self, file: FileNumber) {
        self.cached(|cache| cache.retain(|&other, _| other > file));
    }

    fn cached<T>(&self, run: impl FnOnce(&mut BTreeMap<FileNumber, (Listed, Bytes)>) -> T) -> T {
        run(&mut self.cache.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads until there is an answer: a leader as long as it leads, and others some times.
    async fn read(&mut self, range: Range) -> Result<Found, Error> {
        let mut tries = TRIES_PER_NODE * self.nodes.count();
        loop {
            let answer = self.nodes.get_page(range.clone()).await;
            tries = tries.saturating_sub(1);
            match (answer, self.shared.standing()) {
                (Ok(found), Ok(_)) => return Ok(found),
                (_, Err(error)) => return Err(Error::new(Kind::Lost, error.to_string())),
                (Err(error), Ok(standing)) => {
                    if error.kind != Kind::Passing || tries == 0 && standing != Standing::Leader {
                        return Err(error);
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    // ---- Changing ----

    /// Finds the last chunk, and the chunks of removed files that an earlier leader has left.
    async fn find_ends(&mut self) -> Result<(), Error> {
        let ends = (self.files.values().next(), self.files.values().next_back());
        let (oldest, newest) = (ends.0.map(|file| file.first), ends.1.map_or(0, |file| file.first));
        let chunks = Range { keys_only: true, ..Range::below(self.keys.chunks()) };
        let rest = Range { key: self.keys.chunk(newest), ..chunks.clone() };
        let first = self.first_of(Range { limit: 1, ..chunks }).await?;
        let rest = self.read(rest).await?;
        let last = rest.pairs.last().map(|pair| self.parse_chunk(pair)).transpose()?;
        self.last_chunk = last.unwrap_or(0);
        self.lowest = oldest.unwrap_or(self.last_chunk);
        let garbage = first.zip(oldest).filter(|(first, oldest)| first < oldest);
        self.garbage = garbage.into_iter().collect();
        Ok(())
    }

    async fn first_of(&mut self, range: Range) -> Result<Option<ChunkNumber>, Error> {
        let answer = self.read(range).await?;
        answer.pairs.first().map(|pair| self.parse_chunk(pair)).transpose()
    }

    fn parse_chunk(&self, pair: &Pair) -> Result<ChunkNumber, Error> {
        self.keys.parse_chunk(&pair.key).ok_or_else(|| unknown_key(pair))
    }

    /// Tries once to make a change, or the next transaction of it. Returns whether it is made
    /// completely.
    pub async fn change(&mut self, leader: &Leader, change: &mut Change) -> Result<bool, Error> {
        match change {
            Change::Append { file, offset, bytes } => {
                let len = self.append(leader, *file, *offset, bytes).await?;
                bytes.drain(..len);
                *offset += len as u64;
                return Ok(bytes.is_empty());
            }
            Change::Remove { file } => self.remove(leader, *file).await?,
            Change::Truncate { file, size } => {
                if let Some(listed) = self.files.get(file) {
                    let cut = Listed { size: *size, ..*listed };
                    let put = vec![Op::put(self.keys.file(*file), cut.encode())];
                    let when = self.unless_appended(cut.end);
                    self.transact(leader, when, put).await?;
                    self.files.insert(*file, cut);
                }
            }
            Change::SetAside { file } => {
                self.copy_aside(leader, *file).await?;
                self.remove(leader, *file).await?;
            }
            Change::EndImport => {
                let value = format_value(leader.file_size);
                self.transact(leader, Vec::new(), vec![Op::put(self.keys.format(), value)]).await?;
            }
        }
        Ok(true)
    }

    /// Adds a chunk with the first ones of these bytes. Returns how many are stored.
    async fn append(
        &mut self,
        leader: &Leader,
        file: FileNumber,
        offset: u64,
        bytes: &[u8],
    ) -> Result<usize, Error> {
        let number = self.last_chunk + 1;
        let key = self.keys.chunk(number);
        let mut len = bytes.len().min(self.chunk_max);
        let value = Chunk { file, offset, bytes: &bytes[..len] }.encode();
        let before = match self.last_chunk {
            0 => Compare::Modified(self.keys.format(), leader.format_revision),
            last => Compare::Exists(self.keys.chunk(last)),
        };
        let when = vec![Compare::Created(key.clone(), 0), before];
        let mut puts = vec![Op::put(key.clone(), value)];
        let known = self.files.get(&file).copied().filter(|_| offset > 0);
        let listed = known.map_or(Listed::new(number), |it| Listed { size: u64::MAX, ..it });
        if known != Some(listed) {
            puts.push(Op::put(self.keys.file(file), listed.encode()));
        }
        if self.last_chunk == 0 {
            let size = format_value(leader.file_size);
            let value = if leader.is_import { IMPORTING.to_owned() } else { size };
            puts.push(Op::put(self.keys.format(), value));
        }
        if let Err(found) = self.transact_if(leader, when, puts, Some(key)).await? {
            // An earlier try has succeeded if these bytes are there. It may have had more of them.
            let found = found.as_deref().and_then(Chunk::decode);
            let is_own = |chunk: &Chunk<'_>| {
                (chunk.file, chunk.offset) == (file, offset)
                    && chunk.bytes.len() >= len
                    && bytes.starts_with(chunk.bytes)
            };
            let Some(chunk) = found.filter(is_own) else {
                let text =
                    format!("chunk {number:x} is there already, or the one before it is gone");
                return Err(Error::new(Kind::Lost, text));
            };
            len = chunk.bytes.len();
        }
        self.last_chunk = number;
        if known.is_none()
            && let Some(mut before) = self.files.last_entry()
        {
            before.get_mut().end = before.get().end.min(number);
        }
        self.files.insert(file, listed);
        Ok(len)
    }

    /// Halves chunks, because etcd refuses one as too large.
    pub fn shorten_chunks(&mut self, refusal: &Error) -> Result<(), Error> {
        self.chunk_max /= 2;
        if self.chunk_max >= SHORTEST_CHUNK {
            return Ok(());
        }
        let text = format!("{refusal}; raise --max-request-bytes of etcd to at least 16384");
        Err(Error::new(Kind::Lasting, text))
    }

    async fn remove(&mut self, leader: &Leader, file: FileNumber) -> Result<(), Error> {
        let Some(&Listed { first, end, .. }) = self.files.get(&file) else { return Ok(()) };
        let mut changes = vec![Op::delete(self.keys.file(file))];
        let mut when = self.unless_appended(end);
        // The oldest file goes with the first chunks of those that were removed before it.
        let mut garbage = self.lowest.min(first);
        if let Some((&before, listed)) = self.files.range(..file).next_back() {
            // Its end was the first chunk of the removed file. That key stays, without bytes: otherwise a
            // delayed twin of its transaction would find the chunk before it, and bring the file back.
            when.push(Compare::Exists(self.keys.file(before)));
            changes.push(Op::put(self.keys.file(before), listed.encode()));
            changes.push(Op::put(self.keys.chunk(first), Vec::new()));
            garbage = first + 1;
        }
        self.transact(leader, when, changes).await?;
        self.files.remove(&file);
        // The last chunk stays, because the next one needs it.
        let end = end.min(self.last_chunk);
        if garbage <= first {
            self.lowest = end;
        }
        if garbage < end {
            self.garbage.push_back((garbage, end));
        }
        Ok(())
    }

    /// Returns whether there are chunks of removed files.
    pub fn has_garbage(&self) -> bool {
        !self.garbage.is_empty()
    }

    /// Tries to delete some chunks of removed files.
    pub async fn delete_garbage(&mut self, leader: &Leader) -> Result<(), Error> {
        let Some(&(first, end)) = self.garbage.front() else { return Ok(()) };
        let next = (first + GARBAGE_STEP).min(end);
        let end_key = Some(self.keys.chunk(next));
        let delete = vec![Op::Delete { key: self.keys.chunk(first), end: end_key }];
        self.transact(leader, Vec::new(), delete).await?;
        if next == end {
            self.garbage.pop_front();
        } else {
            self.garbage[0].0 = next;
        }
        Ok(())
    }

    async fn copy_aside(&mut self, leader: &Leader, file: FileNumber) -> Result<(), Error> {
        let Some(&Listed { first, end, .. }) = self.files.get(&file) else { return Ok(()) };
        for number in first..end {
            let mut answer = self.nodes.get(Range::key(self.keys.chunk(number))).await?;
            let Some(pair) = answer.pairs.pop() else { return Ok(()) };
            let put = vec![Op::put(self.keys.damaged_chunk(file, number), pair.value)];
            self.transact(leader, Vec::new(), put).await?;
        }
        Ok(())
    }

    /// Returns the condition of a change to the newest file, whose number or bytes may be used again: a
    /// delayed twin must not change what was appended later. Other files need none.
    fn unless_appended(&self, end: ChunkNumber) -> Vec<Compare> {
        let next = Compare::Created(self.keys.chunk(self.last_chunk + 1), 0);
        if end == ChunkNumber::MAX { vec![next] } else { Vec::new() }
    }

    /// Makes a transaction if this server leads. The conditions hold unless it is a delayed twin.
    async fn transact(
        &mut self,
        leader: &Leader,
        when: Vec<Compare>,
        then: Vec<Op>,
    ) -> Result<(), Error> {
        let done = self.transact_if(leader, when, then, None).await?;
        done.map_err(|_| Error::new(Kind::Lost, "another program has changed the keys"))
    }

    /// Makes a transaction if this server leads and the conditions hold. If a condition does not
    /// hold, returns the value of `key` as the error.
    async fn transact_if(
        &mut self,
        leader: &Leader,
        mut when: Vec<Compare>,
        then: Vec<Op>,
        key: Option<String>,
    ) -> Result<Result<(), Option<Vec<u8>>>, Error> {
        let leader_key = self.keys.leader();
        when.push(Compare::Created(leader_key.clone(), leader.revision));
        let lens =
            then.iter().map(|op| if let Op::Put { value, .. } = op { value.len() } else { 0 });
        let bytes: usize = lens.sum();
        let otherwise = std::iter::once(leader_key).chain(key).map(Op::get).collect();
        let begun_at = self.shared.now();
        let answer = self.nodes.ask(|node| node.txn(Txn { when, then, otherwise })).await?;
        let took = self.shared.now().since(begun_at);
        let mut state = self.shared.state();
        state.transactions.count(took);
        if answer.succeeded {
            state.stored_bytes += bytes as u64;
            return Ok(Ok(()));
        }
        let mut found = answer.found.into_iter().map(|mut pairs| pairs.pop());
        match found.next().flatten() {
            Some(pair) if pair.create_revision == leader.revision => {
                Ok(Err(found.next().flatten().map(|pair| pair.value)))
            }
            Some(pair) => {
                let name = String::from_utf8_lossy(&pair.value);
                Err(Error::new(Kind::Lost, format!("{name} leads")))
            }
            None => Err(Error::new(Kind::Lost, "the lease has ended")),
        }
    }
}

fn unknown_key(pair: &Pair) -> Error {
    let key = String::from_utf8_lossy(&pair.key);
    Error::new(Kind::Lasting, format!("{key} is no key of a binlog"))
}
