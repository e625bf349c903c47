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
//! - A file is removed by the deletion of its key, and of the bytes of its first chunk: there the file before
//!   ends, a delayed twin of its transaction cannot bring the file back, and it differs from a file whose key
//!   was lost. After that no server reads its chunks, which are deleted some at a time: to delete 70,000
//!   small ones at once takes etcd 2.7 s on a busy machine, and it renews no lease meanwhile. They go in
//!   ascending order, up to those of the oldest file, so that a delayed twin finds none before its own. Their
//!   numbers are never used again, because a newer chunk exists.

use super::api::{Failure, Kind, exists, modified, outcome};
use super::disk::{Change, Files};
use super::keys::{CHUNK_MAX, Chunk, ChunkNumber, File, WHOLE, format_value};
use super::lease::{LEASE_ENDED, Member, name_of};
use super::nodes::{ask_again, ask_each};
use crate::engine::binlog::disk::FileNumber;
use etcd_client::{Compare, DeleteOptions, GetOptions, KeyValue, Txn, TxnOp};
use log::warn;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The files of a log, and the requests that read and change them.
pub struct Log {
    pub member: Member,
    /// The files that are there. Each but the newest has an end.
    files: BTreeMap<FileNumber, File>,
    /// Files that were read.
    pub cache: Files,
    /// The most bytes in a chunk.
    chunk_max: usize,
    /// The number of the last chunk.
    last_chunk: ChunkNumber,
    /// No chunk below this number is left. From here to the first chunk of the oldest file are those of
    /// removed files.
    lowest: ChunkNumber,
}

/// A page has about this many bytes, so that it comes in time.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
const LONGEST_PAGE_LEN: i64 = 512;
/// At most this many chunks are deleted at once, which takes etcd a few milliseconds.
const GARBAGE_STEP: u64 = 256;
/// At most this many chunks are copied at once: etcd allows 128 changes in a transaction.
const MOST_COPIED: i64 = 64;
/// With shorter chunks etcd would store little but keys.
const SHORTEST_CHUNK: usize = 4 * 1024;

impl Log {
    /// Returns the log, of which nothing is read yet.
    pub fn new(member: Member) -> Log {
        Log {
            member,
            files: BTreeMap::new(),
            cache: Files::new(),
            chunk_max: CHUNK_MAX,
            last_chunk: 0,
            lowest: 0,
        }
    }

    // ---- Reading ----

    /// Reads all files for a server that has just won the lead, and finds the chunks that it changes later.
    pub async fn take_over(&mut self) -> Result<(), Failure> {
        self.read(true).await?;
        let newest = self.files.values().next_back().map_or(0, |file| file.first);
        let (lowest, newest) = (self.member.keys.chunk(0), self.member.keys.chunk(newest));
        let chunks = self.chunks(ChunkNumber::MAX).with_keys_only();
        let first = self.page(lowest, chunks.clone().with_limit(1)).await?.pop();
        let last = self.page(newest, chunks).await?.pop();
        let number = |pair: Option<KeyValue>| {
            let number = |pair: &KeyValue| self.member.keys.parse_chunk(pair.key());
            pair.map_or(Ok(0), |pair| number(&pair).ok_or_else(|| unknown_key(&pair)))
        };
        (self.lowest, self.last_chunk) = (number(first)?, number(last)?);
        Ok(())
    }

    /// Reads all files, although another server may lead.
    pub async fn read_unled(&mut self) -> Result<(), Failure> {
        let member = &mut self.member;
        ask_each(member.nodes.count(), async || member.check().await).await?;
        self.read(true).await
    }

    /// Reads the closed files, or also the newest one, as they are at one moment: until none goes between the
    /// first one that is read and the last one. A record that was moved out of a file is in another one then.
    /// Closed files that were read before and are still the same are not read again.
    pub async fn read(&mut self, with_newest: bool) -> Result<(), Failure> {
        loop {
            self.files = self.listed().await?;
            let files = &self.files;
            self.cache.retain(|number, (file, _)| {
                files.get(number) == Some(file) && file.end != ChunkNumber::MAX
            });
            let missing = self.read_listed(with_newest).await?;
            let left = self.listed().await?;
            let Some((number, key)) = missing else {
                if self.files.keys().all(|number| left.contains_key(number)) {
                    return Ok(());
                }
                continue;
            };
            // Another server may have removed the file, or begun the next one.
            if left.get(&number) == self.files.get(&number) {
                return Err(Failure::lasting(self.member.keys.missing(&key)));
            }
        }
    }

    async fn listed(&mut self) -> Result<BTreeMap<FileNumber, File>, Failure> {
        let mut files = BTreeMap::new();
        let mut end = ChunkNumber::MAX;
        let all = GetOptions::new().with_prefix();
        for pair in self.page(self.member.keys.files(), all).await?.iter().rev() {
            let found = self.member.keys.parse_file(pair.key()).zip(File::decode(pair.value()));
            let (number, file) = found.ok_or_else(|| unknown_key(pair))?;
            files.insert(number, File { end, ..file });
            end = file.first;
        }
        Ok(files)
    }

    /// Reads the files that were listed. Returns a file and the key that is missing for it.
    async fn read_listed(
        &mut self,
        with_newest: bool,
    ) -> Result<Option<(FileNumber, String)>, Failure> {
        for (number, file) in self.files.clone() {
            let is_wanted = with_newest || file.end != ChunkNumber::MAX;
            if !is_wanted || self.cache.contains_key(&number) {
                continue;
            }
            match self.read_file(number, file).await? {
                Ok(bytes) => drop(self.cache.insert(number, (file, Arc::new(bytes)))),
                Err(key) => return Ok(Some((number, key))),
            }
        }
        Ok(None)
    }

    /// Returns the bytes of a file, or the key that is missing: of a chunk, or of the file that begins here.
    async fn read_file(
        &mut self,
        number: FileNumber,
        File { first, size, mut end, .. }: File,
    ) -> Result<Result<Vec<u8>, String>, Failure> {
        let (mut bytes, mut next, mut limit) = (Vec::new(), first, 64);
        while next < end {
            let chunks = self.chunks(end).with_limit(limit);
            let pairs = self.page(self.member.keys.chunk(next), chunks).await?;
            let before = bytes.len();
            for (index, pair) in pairs.iter().enumerate() {
                let key = self.member.keys.chunk(next);
                if pair.value().is_empty() && pair.key() == key.as_bytes() {
                    let after = pairs.get(index + 1).and_then(|it| Chunk::decode(it.value()));
                    // The same file continues after it: an operator has emptied the chunk.
                    if after.is_some_and(|it| it.file == number) {
                        return Ok(Err(key));
                    }
                    // Here the next file began, which was removed.
                    end = next;
                    break;
                }
                let number_found = self.member.keys.parse_chunk(pair.key());
                let chunk = number_found.zip(Chunk::decode(pair.value()));
                let (found, chunk) = chunk.ok_or_else(|| unknown_key(pair))?;
                let offset = usize::try_from(chunk.offset).unwrap_or(usize::MAX);
                if found == next && chunk.file != number && offset == 0 {
                    return Ok(Err(self.member.keys.file(chunk.file)));
                }
                if found != next || chunk.file != number || offset > bytes.len() {
                    return Ok(Err(key));
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
            return Ok(Err(self.member.keys.chunk(next)));
        }
        bytes.truncate(usize::try_from(size).unwrap_or(usize::MAX));
        Ok(Ok(bytes))
    }

    /// Returns the options to read chunks before this one.
    fn chunks(&self, end: ChunkNumber) -> GetOptions {
        GetOptions::new().with_range(self.member.keys.chunk(end))
    }

    /// Reads keys: a leader asks as long as it leads, and others ask some times.
    async fn page(&mut self, key: String, options: GetOptions) -> Result<Vec<KeyValue>, Failure> {
        let shared = Arc::clone(&self.member.shared);
        let leads = || shared.state().leader > 0 && shared.standing().is_ok();
        let nodes = &mut self.member.nodes;
        let mut left = 2 * nodes.count();
        let may_go_on = |_: &Failure| {
            left = left.saturating_sub(1);
            left > 0 || leads()
        };
        ask_again(async || nodes.page(key.clone(), options.clone()).await, may_go_on).await
    }

    // ---- Changing ----

    /// Makes all changes, in their order. Fails if the server does not lead any more, or cannot.
    pub async fn store(&mut self, changes: Vec<Change>) -> Result<(), Failure> {
        let shared = Arc::clone(&self.member.shared);
        for mut change in changes {
            // A server that has lost its lease makes no more changes.
            ask_again(async || self.change(&mut change).await, |_| shared.standing().is_ok())
                .await?;
        }
        Ok(())
    }

    /// Makes a change. After a failure the bytes that are not stored are left of it.
    async fn change(&mut self, change: &mut Change) -> Result<(), Failure> {
        match change {
            Change::Append { file, offset, bytes } => {
                while !bytes.is_empty() {
                    let len = match self.append(*file, *offset, bytes).await {
                        Err(failure) if failure.kind == Kind::TooLarge => {
                            self.shorten_chunks(failure)?;
                            continue;
                        }
                        done => done?,
                    };
                    bytes.drain(..len);
                    *offset += len as u64;
                }
            }
            Change::Remove { file } => self.remove(*file).await?,
            Change::Truncate { file, size } => {
                if let Some(&known) = self.files.get(file) {
                    let cut = File { size: *size, ..known };
                    let put = vec![TxnOp::put(self.member.keys.file(*file), cut.encode(), None)];
                    self.transact(self.unless_appended(known), put).await?;
                    self.files.insert(*file, cut);
                }
            }
            Change::SetAside { file } => {
                while let Err(failure) = self.copy_aside(*file).await {
                    if failure.kind != Kind::TooLarge {
                        return Err(failure);
                    }
                    self.shorten_chunks(failure)?;
                }
                self.remove(*file).await?;
            }
            Change::EndImport => {
                let format = format_value(self.member.etcd.file_size);
                let put = TxnOp::put(self.member.keys.format(), format, None);
                self.transact(Vec::new(), vec![put]).await?;
            }
        }
        Ok(())
    }

    /// Halves the chunks, which etcd refuses as too large.
    fn shorten_chunks(&mut self, Failure { text, .. }: Failure) -> Result<(), Failure> {
        self.chunk_max /= 2;
        if self.chunk_max >= SHORTEST_CHUNK {
            return Ok(());
        }
        let remedy = "raise --max-request-bytes of etcd to at least 16384";
        Err(Failure::lasting(format!("{text}; {remedy}")))
    }

    /// Adds a chunk with the first ones of these bytes. Returns how many are stored.
    async fn append(
        &mut self,
        number: FileNumber,
        offset: u64,
        bytes: &[u8],
    ) -> Result<usize, Failure> {
        let chunk = self.last_chunk + 1;
        let key = self.member.keys.chunk(chunk);
        let mut len = bytes.len().min(self.chunk_max);
        let value = Chunk { file: number, offset, bytes: &bytes[..len] }.encode();
        let before = exists(self.member.keys.chunk(self.last_chunk));
        let when = vec![modified(key.clone(), 0), before];
        let mut puts = vec![TxnOp::put(key.clone(), value, None)];
        let known = self.files.get(&number).copied().filter(|_| offset > 0);
        let file = known.map_or(File::new(chunk), |known| File { size: WHOLE, ..known });
        if known != Some(file) {
            puts.push(TxnOp::put(self.member.keys.file(number), file.encode(), None));
        }
        if !self.is_made(when, puts).await? {
            // An earlier try has succeeded if these bytes are there. It may have had more of them.
            let (found, _) = self.member.nodes.get(key).await?;
            let found = found.as_ref().and_then(|pair| Chunk::decode(pair.value()));
            let is_own = |chunk: &Chunk<'_>| {
                (chunk.file, chunk.offset) == (number, offset)
                    && chunk.bytes.len() >= len
                    && bytes.starts_with(chunk.bytes)
            };
            let Some(own) = found.filter(is_own) else {
                let (keys, last) = (&self.member.keys, self.last_chunk);
                let (key, before) = (keys.chunk(chunk), keys.chunk(last));
                return Err(Failure::lost(format!("{key} is there already, or {before} is gone")));
            };
            len = own.bytes.len();
        }
        self.member.shared.state().stored_bytes += len as u64;
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
        let (keys, mut when) = (&self.member.keys, self.unless_appended(file));
        let first = keys.chunk(file.first);
        // A delayed twin of this transaction must not bring the chunk back.
        when.push(exists(first.clone()));
        let gone = TxnOp::delete(keys.file(number), None);
        self.transact(when, vec![gone, TxnOp::put(first, "", None)]).await?;
        self.files.remove(&number);
        Ok(())
    }

    /// Tries to delete some chunks of removed files. Returns `false` if there are none.
    pub async fn delete_garbage(&mut self) -> Result<bool, Failure> {
        // The last chunk stays, because the next one needs it.
        let oldest = self.files.values().next().map_or(self.last_chunk, |file| file.first);
        if self.lowest >= oldest {
            return Ok(false);
        }
        let next = (self.lowest + GARBAGE_STEP).min(oldest);
        let keys = &self.member.keys;
        let some = DeleteOptions::new().with_range(keys.chunk(next));
        let delete = TxnOp::delete(keys.chunk(self.lowest), Some(some));
        self.transact(Vec::new(), vec![delete]).await?;
        self.lowest = next;
        Ok(true)
    }

    /// Copies the chunks of a file to other keys, many at once: replies wait meanwhile. One that is longer than chunks
    /// may be now comes in parts.
    async fn copy_aside(&mut self, number: FileNumber) -> Result<(), Failure> {
        let Some(&File { first, end, .. }) = self.files.get(&number) else { return Ok(()) };
        let (mut next, mut copy) = (first, first);
        let most = self.chunk_max + Chunk::HEAD_LEN;
        loop {
            let chunks = self.chunks(end).with_limit(MOST_COPIED);
            let pairs = self.page(self.member.keys.chunk(next), chunks).await?;
            next += pairs.len() as u64;
            let (mut puts, mut len) = (Vec::new(), 0);
            for part in pairs.iter().flat_map(|pair| pair.value().chunks(most)) {
                if len + part.len() > most && !puts.is_empty() {
                    self.transact(Vec::new(), std::mem::take(&mut puts)).await?;
                    len = 0;
                }
                len += part.len();
                let key = self.member.keys.damaged_chunk(number, copy);
                puts.push(TxnOp::put(key, part, None));
                copy += 1;
            }
            if puts.is_empty() {
                return Ok(());
            }
            self.transact(Vec::new(), puts).await?;
        }
    }

    /// Returns the condition of a change to the newest file, whose number or bytes may be used again: a
    /// delayed twin must not change what was appended later. Other files need none.
    fn unless_appended(&self, file: File) -> Vec<Compare> {
        let next = modified(self.member.keys.chunk(self.last_chunk + 1), 0);
        if file.end == ChunkNumber::MAX { vec![next] } else { Vec::new() }
    }

    /// Makes a transaction if this server leads. The conditions hold unless another program has changed
    /// the keys.
    async fn transact(&mut self, when: Vec<Compare>, then: Vec<TxnOp>) -> Result<(), Failure> {
        if self.is_made(when, then).await? {
            return Ok(());
        }
        Err(Failure::lost("another program has changed the keys"))
    }

    /// Makes a transaction if this server leads and the conditions hold. Returns whether they do.
    async fn is_made(&mut self, mut when: Vec<Compare>, then: Vec<TxnOp>) -> Result<bool, Failure> {
        let (key, leader) = (self.member.keys.leader(), self.member.shared.state().leader);
        when.push(modified(key.clone(), leader));
        let begun_at = self.member.shared.now();
        let answer =
            self.member.nodes.ask(|node| node.txn(Txn::new().when(when).and_then(then))).await;
        if let Err(Failure { kind: Kind::NoSpace, text }) = &answer
            && !std::mem::replace(&mut self.member.shared.state().is_full, true)
        {
            warn!("refusing puts, and trying again: {text}");
        }
        let answer = answer?;
        let took = self.member.shared.now().since(begun_at);
        self.member.shared.state().transactions.count(took);
        if answer.succeeded() {
            let mut state = self.member.shared.state();
            state.revision = outcome(&answer).0;
            if std::mem::take(&mut state.is_full) {
                warn!("etcd has space again: accepting puts");
            }
            return Ok(true);
        }
        match self.member.nodes.get(key).await?.0 {
            Some(pair) if pair.mod_revision() == leader => Ok(false),
            Some(pair) => Err(Failure::lost(format!("{} leads", name_of(&pair)))),
            None => Err(Failure::lost(LEASE_ENDED)),
        }
    }
}

fn unknown_key(pair: &KeyValue) -> Failure {
    let key = String::from_utf8_lossy(pair.key());
    Failure::lasting(format!("{key} is no key of a binlog"))
}
