//! The chunks of a binlog: reads them, and changes them by transactions that only the leader can make.
//!
//! Files are read whole. A closed file stays as it is, so a server that stands by keeps it, and finds by
//! the value of the file's key whether it is still the same one, also after etcd was restored to an older
//! state. The newest file is read after the server leads.
//!
//! Each change is one transaction, or one for each chunk. It can be made again after an unknown outcome:
//!
//! - A chunk is added if this server leads, the chunk is not there, and the one before it is. So a
//!   delayed twin of a transaction cannot bring back a chunk of a removed file.
//! - A batch that is not complete is cut by the size in the key of its file. Its chunks stay.
//! - A file is removed by the deletion of its key. If it is not the oldest one, its first chunk stays
//!   without bytes: there the file before ends, and a delayed twin of its transaction cannot bring the
//!   file back. After that no server reads its chunks, which are deleted some at a time: to delete 70,000
//!   small ones at once takes etcd 2.7 s on a busy machine, and it renews no lease meanwhile. They go in
//!   ascending order, so that a delayed twin finds none before its own. Their numbers are never used
//!   again, because a newer chunk exists.

use super::api::{Compare, Op, Pair, Range, Txn};
use super::disk::{Bytes, Change};
use super::keys::{CHUNK_MAX, Chunk, ChunkNumber, File, Keys, WHOLE, format_value};
use super::lease::{Candidate, LEASE_ENDED};
use super::nodes::{Nodes, RETRY_PAUSE, ask_again};
use super::shared::Shared;
use crate::engine::binlog::disk::FileNumber;
use crate::os::membership::{Failure, Kind, Standing};
use log::warn;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use tokio::time::sleep;

/// The files of a log, and the requests that read and change them.
pub struct Log {
    nodes: Nodes,
    keys: Keys,
    shared: Arc<Shared>,
    /// The value of the key of the format after an import.
    format: String,
    /// The files that are there. Each but the newest has an end.
    files: BTreeMap<FileNumber, File>,
    /// Files that were read.
    cache: BTreeMap<FileNumber, (File, Bytes)>,
    /// The most bytes in a chunk.
    chunk_max: usize,
    /// The number of the last chunk.
    last_chunk: ChunkNumber,
    /// No chunk below this number is left, but for garbage.
    lowest: ChunkNumber,
    /// Chunks of removed files: the first one, and the first one behind them.
    garbage: VecDeque<(ChunkNumber, ChunkNumber)>,
}

/// A page has about this many bytes, so that it comes in time.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
const LONGEST_PAGE_LEN: i64 = 512;
/// At most this many chunks are deleted at once, which takes etcd a few milliseconds.
const GARBAGE_STEP: u64 = 256;
/// With shorter chunks etcd would store little but keys.
const SHORTEST_CHUNK: usize = 4 * 1024;

impl Log {
    /// Returns the log, whose files are not listed yet.
    pub fn new(candidate: &Candidate) -> Log {
        let Candidate { nodes, keys, shared, file_size, .. } = candidate.clone();
        Log {
            nodes,
            keys,
            shared,
            format: format_value(file_size),
            files: BTreeMap::new(),
            cache: BTreeMap::new(),
            chunk_max: CHUNK_MAX,
            last_chunk: 0,
            lowest: 0,
            garbage: VecDeque::new(),
        }
    }

    // ---- Reading ----

    /// Lists the files, and keeps of those that were read the closed ones that are still the same.
    async fn list(&mut self) -> Result<Vec<FileNumber>, Failure> {
        self.files = self.listed().await?;
        let files = &self.files;
        self.cache.retain(|number, (file, _)| {
            files.get(number) == Some(file) && file.end != ChunkNumber::MAX
        });
        Ok(self.files.keys().copied().collect())
    }

    async fn listed(&mut self) -> Result<BTreeMap<FileNumber, File>, Failure> {
        let mut files = BTreeMap::new();
        let mut end = ChunkNumber::MAX;
        for pair in self.read(Range::below(self.keys.files())).await?.iter().rev() {
            let found = self.keys.parse_file(&pair.key).zip(File::decode(&pair.value));
            let (number, file) = found.ok_or_else(|| unknown_key(pair))?;
            files.insert(number, File { end, ..file });
            end = file.first;
        }
        Ok(files)
    }

    /// Lists the files for a leader, which changes them later, and finds the last chunk and the chunks of
    /// removed files that an earlier leader has left.
    pub async fn list_to_lead(&mut self) -> Result<Vec<FileNumber>, Failure> {
        let files = self.list().await?;
        let chunks = Range { keys_only: true, ..Range::below(self.keys.chunks()) };
        let newest = self.files.values().next_back().map_or(0, |file| file.first);
        let newest = Range { key: self.keys.chunk(newest), ..chunks.clone() };
        let first = self.read(Range { limit: 1, ..chunks }).await?.pop();
        let last = self.read(newest).await?.pop();
        let number = |pair: Option<Pair>| {
            let number = |pair: &Pair| self.keys.parse_chunk(&pair.key);
            pair.map_or(Ok(0), |pair| number(&pair).ok_or_else(|| unknown_key(&pair)))
        };
        (self.lowest, self.last_chunk) = (number(first)?, number(last)?);
        let oldest = self.files.values().next().map_or(self.lowest, |file| file.first);
        if self.lowest < oldest {
            self.garbage.push_back((self.lowest, oldest));
            self.lowest = oldest;
        }
        Ok(files)
    }

    /// Lists and reads all files, as they are at one moment: until none goes between the first one that is
    /// read and the last one. A record that was moved out of a file is in another one then.
    pub async fn list_whole(&mut self) -> Result<Vec<FileNumber>, Failure> {
        loop {
            let files = self.list().await?;
            for &number in &files {
                self.file(number).await?;
            }
            let left = self.listed().await?;
            if files.iter().all(|file| left.contains_key(file) && self.cache.contains_key(file)) {
                return Ok(files);
            }
        }
    }

    /// Returns the bytes of a file, or `None` if there is no such file.
    pub async fn file(&mut self, number: FileNumber) -> Result<Option<Bytes>, Failure> {
        while let Some(&file) = self.files.get(&number) {
            if let Some((_, bytes)) = self.cache.get(&number) {
                return Ok(Some(Arc::clone(bytes)));
            }
            let missing = match self.read_file(number, file).await? {
                Ok(bytes) => {
                    let bytes = Bytes::new(bytes);
                    self.cache.insert(number, (file, Arc::clone(&bytes)));
                    return Ok(Some(bytes));
                }
                Err(chunk) => self.keys.chunk(chunk),
            };
            // Another server may have removed the file, or begun the next one.
            self.list().await?;
            if self.files.get(&number) == Some(&file) {
                let text = format!(
                    "{missing} is missing: binlog.{number} has a gap; nothing was changed; restore etcd \
                     from a snapshot that has this key, or delete all keys that begin with {} to lose \
                     all jobs",
                    self.keys.all()
                );
                return Err(Failure::lasting(text));
            }
        }
        Ok(None)
    }

    /// Returns the bytes of a file, or the number of a chunk that is missing or is one of another file.
    async fn read_file(
        &mut self,
        number: FileNumber,
        File { first, size, mut end, .. }: File,
    ) -> Result<Result<Vec<u8>, ChunkNumber>, Failure> {
        let (mut bytes, mut next, mut limit) = (Vec::new(), first, 64);
        while next < end {
            let (key, end_key) = (self.keys.chunk(next), Some(self.keys.chunk(end)));
            let range = Range { key, end: end_key, limit, ..Range::default() };
            let pairs = self.read(range).await?;
            let before = bytes.len();
            for pair in &pairs {
                if pair.value.is_empty() && pair.key == self.keys.chunk(next).as_bytes() {
                    // Here the next file began, which was removed.
                    end = next;
                    break;
                }
                let chunk = self.keys.parse_chunk(&pair.key).zip(Chunk::decode(&pair.value));
                let (found, chunk) = chunk.ok_or_else(|| unknown_key(pair))?;
                let offset = usize::try_from(chunk.offset).unwrap_or(usize::MAX);
                if (found, chunk.file) != (next, number) || offset > bytes.len() {
                    return Ok(Err(next));
                }
                // A leader may continue a file that it has cut.
                bytes.truncate(offset);
                bytes.extend_from_slice(chunk.bytes);
                next += 1;
            }
            if i64::try_from(pairs.len()).is_ok_and(|len| len < limit) {
                break;
            }
            limit = if bytes.len() - before > PAGE_BYTES { limit / 2 } else { limit * 2 };
            limit = limit.clamp(1, LONGEST_PAGE_LEN);
        }
        // The newest file has no end, but at least one chunk.
        if next != end && (end != ChunkNumber::MAX || next == first) {
            return Ok(Err(next));
        }
        bytes.truncate(usize::try_from(size).unwrap_or(usize::MAX));
        Ok(Ok(bytes))
    }

    /// Reads one closed file that was not read yet, for the case that this server leads later. Returns
    /// `false` if there is none.
    pub async fn prefetch(&mut self) -> Result<bool, Failure> {
        self.list().await?;
        let is_unread = |number: &FileNumber| !self.cache.contains_key(number);
        let mut closed = self.files.iter().filter(|(_, file)| file.end != ChunkNumber::MAX);
        let unread = closed.find(|(number, _)| is_unread(number)).map(|(&number, _)| number);
        let Some(number) = unread else { return Ok(false) };
        Ok(self.file(number).await?.is_some())
    }

    /// Forgets what was read of a file and of those before it, and reads the one after it, which is
    /// probably wanted next.
    pub async fn read_ahead(&mut self, number: FileNumber) {
        self.cache.retain(|&other, _| other > number);
        if let Some((&next, _)) = self.files.range(number + 1..).next() {
            // A failure is that of the next request too.
            let _ = self.file(next).await;
        }
    }

    /// Reads until there is an answer: a leader as long as it leads, and others some times.
    async fn read(&mut self, range: Range) -> Result<Vec<Pair>, Failure> {
        loop {
            let nodes = self.nodes.count();
            let answer = ask_again(nodes, async || self.nodes.page(range.clone()).await).await;
            match (answer, self.shared.standing()?) {
                (Err(failure), Standing::Leader) if failure.kind == Kind::Passing => {}
                (answer, _) => return answer,
            }
        }
    }

    // ---- Changing ----

    /// Makes all changes, in their order. Fails if the server does not lead any more, or cannot.
    pub async fn store(&mut self, changes: Vec<Change>) -> Result<(), Failure> {
        for mut change in changes {
            while let Err(failure) = self.change(&mut change).await {
                self.prepare_retry(failure).await?;
            }
        }
        Ok(())
    }

    /// Does what helps after a failure, and waits. Fails if nothing helps.
    async fn prepare_retry(&mut self, failure: Failure) -> Result<(), Failure> {
        // A server that has lost its lease makes no more changes.
        self.shared.standing()?;
        match failure.kind {
            Kind::Lost | Kind::Lasting => return Err(failure),
            Kind::TooLarge if self.chunk_max / 2 < SHORTEST_CHUNK => {
                let text = "raise --max-request-bytes of etcd to at least 16384";
                return Err(Failure::lasting(format!("{}; {text}", failure.text)));
            }
            Kind::TooLarge => {
                self.chunk_max /= 2;
                return Ok(());
            }
            Kind::NoSpace if !std::mem::replace(&mut self.shared.state().is_full, true) => warn!(
                "{}; refusing puts, and trying again; compact and defragment etcd, then disarm its \
                 alarm",
                failure.text
            ),
            Kind::NoSpace | Kind::Passing => {}
        }
        sleep(RETRY_PAUSE).await;
        Ok(())
    }

    /// Makes a change. After a failure the bytes that are not stored are left of it.
    async fn change(&mut self, change: &mut Change) -> Result<(), Failure> {
        match change {
            Change::Append { file, offset, bytes } => {
                while !bytes.is_empty() {
                    let len = self.append(*file, *offset, bytes).await?;
                    bytes.drain(..len);
                    *offset += len as u64;
                }
            }
            Change::Remove { file } => self.remove(*file).await?,
            Change::Truncate { file, size } => {
                if let Some(&known) = self.files.get(file) {
                    let cut = File { size: *size, ..known };
                    let put = vec![Op::put(self.keys.file(*file), cut.encode())];
                    self.transact(self.unless_appended(known), put).await?;
                    self.files.insert(*file, cut);
                }
            }
            Change::SetAside { file } => {
                self.copy_aside(*file).await?;
                self.remove(*file).await?;
            }
            Change::EndImport => {
                let put = Op::put(self.keys.format(), self.format.clone());
                self.transact(Vec::new(), vec![put]).await?;
            }
        }
        Ok(())
    }

    /// Adds a chunk with the first ones of these bytes. Returns how many are stored.
    async fn append(
        &mut self,
        number: FileNumber,
        offset: u64,
        bytes: &[u8],
    ) -> Result<usize, Failure> {
        let chunk = self.last_chunk + 1;
        let key = self.keys.chunk(chunk);
        let mut len = bytes.len().min(self.chunk_max);
        let value = Chunk { file: number, offset, bytes: &bytes[..len] }.encode();
        let before = Compare::Exists(self.keys.chunk(self.last_chunk));
        let when = vec![Compare::Created(key.clone(), 0), before];
        let mut puts = vec![Op::put(key.clone(), value)];
        let known = self.files.get(&number).copied().filter(|_| offset > 0);
        let file = known.map_or(File::new(chunk), |known| File { size: WHOLE, ..known });
        if known != Some(file) {
            puts.push(Op::put(self.keys.file(number), file.encode()));
        }
        if !self.is_made(when, puts).await? {
            // An earlier try has succeeded if these bytes are there. It may have had more of them.
            let (found, _) = self.nodes.get(key).await?;
            let found = found.as_ref().and_then(|pair| Chunk::decode(&pair.value));
            let is_own = |chunk: &Chunk<'_>| {
                (chunk.file, chunk.offset) == (number, offset)
                    && chunk.bytes.len() >= len
                    && bytes.starts_with(chunk.bytes)
            };
            let Some(own) = found.filter(is_own) else {
                let text =
                    format!("chunk {chunk:x} is there already, or the one before it is gone");
                return Err(Failure::lost(text));
            };
            len = own.bytes.len();
        }
        self.last_chunk = chunk;
        if known.is_none()
            && let Some(mut before) = self.files.last_entry()
        {
            before.get_mut().end = before.get().end.min(chunk);
        }
        self.files.insert(number, file);
        Ok(len)
    }

    async fn remove(&mut self, number: FileNumber) -> Result<(), Failure> {
        let Some(&file) = self.files.get(&number) else { return Ok(()) };
        // The last chunk stays, because the next one needs it.
        let end = file.end.min(self.last_chunk);
        let is_oldest = self.files.keys().next() == Some(&number);
        let mut changes = vec![Op::Delete { key: self.keys.file(number), end: None }];
        let mut garbage = self.lowest.min(file.first);
        if !is_oldest {
            changes.push(Op::put(self.keys.chunk(file.first), ""));
            garbage = file.first + 1;
        }
        self.transact(self.unless_appended(file), changes).await?;
        self.files.remove(&number);
        if is_oldest {
            self.lowest = end;
        }
        if garbage < end {
            self.garbage.push_back((garbage, end));
        }
        Ok(())
    }

    /// Tries to delete some chunks of removed files. Returns `false` if there are none.
    pub async fn delete_garbage(&mut self) -> Result<bool, Failure> {
        let Some(&(first, end)) = self.garbage.front() else { return Ok(false) };
        let next = (first + GARBAGE_STEP).min(end);
        let (key, end_key) = (self.keys.chunk(first), Some(self.keys.chunk(next)));
        self.transact(Vec::new(), vec![Op::Delete { key, end: end_key }]).await?;
        self.garbage[0].0 = next;
        self.garbage.pop_front_if(|(first, end)| first == end);
        Ok(true)
    }

    async fn copy_aside(&mut self, number: FileNumber) -> Result<(), Failure> {
        let Some(&File { first, end, .. }) = self.files.get(&number) else { return Ok(()) };
        for chunk in first..end {
            let Some(pair) = self.nodes.get(self.keys.chunk(chunk)).await?.0 else { return Ok(()) };
            let put = Op::put(self.keys.damaged_chunk(number, chunk), pair.value);
            self.transact(Vec::new(), vec![put]).await?;
        }
        Ok(())
    }

    /// Returns the condition of a change to the newest file, whose number or bytes may be used again: a
    /// delayed twin must not change what was appended later. Other files need none.
    fn unless_appended(&self, file: File) -> Vec<Compare> {
        let next = Compare::Created(self.keys.chunk(self.last_chunk + 1), 0);
        if file.end == ChunkNumber::MAX { vec![next] } else { Vec::new() }
    }

    /// Makes a transaction if this server leads. The conditions hold unless another program has changed
    /// the keys.
    async fn transact(&mut self, when: Vec<Compare>, then: Vec<Op>) -> Result<(), Failure> {
        if self.is_made(when, then).await? {
            return Ok(());
        }
        Err(Failure::lost("another program has changed the keys"))
    }

    /// Makes a transaction if this server leads and the conditions hold. Returns whether they do.
    async fn is_made(&mut self, mut when: Vec<Compare>, then: Vec<Op>) -> Result<bool, Failure> {
        let (key, leader) = (self.keys.leader(), self.shared.state().leader);
        when.push(Compare::Created(key.clone(), leader));
        let len = |op: &Op| if let Op::Put { value, .. } = op { value.len() as u64 } else { 0 };
        let bytes: u64 = then.iter().map(len).sum();
        let begun_at = self.shared.now();
        let answer = self.nodes.ask(|node| node.txn(Txn { when, then })).await?;
        let took = self.shared.now().since(begun_at);
        self.shared.state().transactions.count(took);
        if answer.succeeded {
            let mut state = self.shared.state();
            state.stored_bytes += bytes;
            state.revision = answer.revision;
            if std::mem::take(&mut state.is_full) {
                warn!("etcd has space again: accepting puts");
            }
            return Ok(true);
        }
        match self.nodes.get(key).await?.0 {
            Some(pair) if pair.create_revision == leader => Ok(false),
            Some(pair) => {
                let text = format!("{} leads", String::from_utf8_lossy(&pair.value));
                Err(Failure::lost(text))
            }
            None => Err(Failure::lost(LEASE_ENDED)),
        }
    }
}

fn unknown_key(pair: &Pair) -> Failure {
    let key = String::from_utf8_lossy(&pair.key);
    Failure::lasting(format!("{key} is no key of a binlog"))
}
