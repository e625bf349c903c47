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

use super::api::{EtcdError, Kind, Result, exists, modified, outcome};
use super::disk::{Change, Files};
use super::keys::{CHUNK_MAX, Chunk, ChunkNumber, File, last_value, parse_last, printable};
use super::lease::{LEASE_ENDED, Member, ask_as_member, name_of};
use super::nodes::ask_often;
use super::shared::State;
use crate::engine::binlog::disk::FileNumber;
use crate::engine::headroom::{self, Headroom};
use crate::engine::time::Nanos;
use crate::os::membership::Duty;
use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, KeyValue, Txn, TxnOp};
use log::warn;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The files of a log, and the requests that read and change them.
pub struct Log {
    pub member: Member,
    /// The files that are there. Each but the newest has an end.
    files: BTreeMap<FileNumber, File>,
    /// Files that were read.
    pub cache: Files,
    /// The most bytes in a chunk, which must come in time, and which etcd takes.
    chunk_max: usize,
    longest_chunk: usize,
    /// No chunk below this number is left. From here to the first chunk of the oldest file are those of
    /// removed files.
    lowest: ChunkNumber,
    /// The chunk that was last noted as the last one, and when.
    noted: (ChunkNumber, Nanos),
}

/// Chunks that were read.
type Chunks = BTreeMap<ChunkNumber, KeyValue>;

/// A page has about this many bytes, so that it comes in time.
const PAGE_BYTES: usize = 4 * 1024 * 1024;
const LONGEST_PAGE_LEN: i64 = 512;
/// A program that only reads asks at least this many times, for shorter and shorter pages.
const LEAST_TRIES: usize = 8;
/// A program that only reads gives up when it has read as many chunks that are new as there were, and this many.
const MOST_NEW: ChunkNumber = 4096;
/// At most this many chunks are deleted at once, which takes etcd a few milliseconds.
const GARBAGE_STEP: u64 = 256;
/// At most this many chunks are copied at once: etcd allows 128 changes in a transaction.
const MOST_COPIED: i64 = 64;
/// The last chunk is noted at most once in this time.
const NOTE_INTERVAL: Nanos = Nanos::from_secs(1);
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
            longest_chunk: CHUNK_MAX,
            lowest: 0,
            noted: (0, Nanos::ZERO),
        }
    }

    // ---- Reading ----

    /// Reads all files, although another server may lead.
    pub async fn read_unled(&mut self) -> Result {
        let member = &mut self.member;
        ask_often(2 * member.nodes.count(), async || member.check().await).await?;
        match self.read(true).await {
            // Another server may have cut a file that was read before. It cuts each file once.
            Err(failure) if failure.kind == Kind::Lasting => self.read(true).await,
            done => done,
        }
    }

    /// Reads the closed files, or all files as they are at one moment, that of the last page. Closed files that
    /// were read before and are still the same are not read again.
    ///
    /// Another server may write meanwhile. Chunks do not change, and their numbers ascend. So those of a file that
    /// is there at the end were there when their page was read, and what was read of other files is dropped.
    /// This has an end, because a page has many chunks, and a server writes them one by one. Over a slow link a program
    /// that only reads gives up.
    pub async fn read(&mut self, with_newest: bool) -> Result {
        self.files.clear();
        let (keys, two) = (&self.member.keys, GetOptions::new().with_prefix().with_limit(2));
        // A chunk is long, and a server that stands by looks again and again.
        let two = if with_newest { two } else { two.with_keys_only() };
        let first = [self.all_files(), (keys.last(), GetOptions::new()), (keys.chunks(), two)];
        let [files, last, chunks] = self.page(|| first.clone()).await?;
        let noted = last.first().map(|pair| parse_last(pair.value()));
        let (noted, noted_lowest) = noted.unwrap_or((0, ChunkNumber::MAX));
        (self.noted.0, self.lowest) = (noted, self.number_in(chunks.first())?);
        self.note_files(&files)?;
        // A file that was removed lacks the bytes of its first chunk too.
        let mut chunks = chunks.iter().filter_map(|pair| Chunk::decode(pair.value()));
        let is_lost = |it: &Chunk<'_>| it.offset == 0 && !self.files.contains_key(&it.file);
        if let Some(chunk) = chunks.find(is_lost) {
            return Err(self.missing(&self.member.keys.file(chunk.file)));
        }
        // A server of an earlier version does not note what it deletes, until all chunks before the first file are gone.
        let is_first = self.files.values().next().is_none_or(|file| self.lowest >= file.first);
        if self.lowest > noted_lowest && is_first {
            return Err(self.missing(&self.member.keys.chunk(noted_lowest)));
        }
        let end = if with_newest { ChunkNumber::MAX } else { self.newest() };
        self.forget_others();
        let mut chunks = self.read_chunks(end).await?;
        self.forget_others();
        if with_newest {
            let newest = self.newest();
            // The newest file may have any number, and few are behind the one that was noted as the last one.
            let (key, all) = self.chunks(newest.max(self.noted.0), ChunkNumber::MAX);
            let [chunks] = self.page(|| [(key.clone(), all.clone().with_keys_only())]).await?;
            if chunks.is_empty() {
                return Err(self.missing(&key));
            }
            self.member.shared.state().last_chunk = self.number_in(chunks.last())?;
        }
        for (number, file) in self.files.clone() {
            if file.first < end && !self.cache.contains_key(&number) {
                let later = chunks.split_off(&file.end);
                let bytes = self.bytes_of(number, file, &chunks);
                let bytes = bytes.map_err(|key| self.missing(&key))?;
                self.cache.insert(number, (file, bytes));
                chunks = later;
            }
        }
        Ok(())
    }

    /// Forgets files that are not there any more, or are others.
    fn forget_others(&mut self) {
        self.cache.retain(|number, (file, _)| self.files.get(number) == Some(file));
    }

    /// Notes the files that are there now. A file ends where the next one began, also if that is removed since.
    fn note_files(&mut self, pairs: &[KeyValue]) -> Result {
        let before = std::mem::take(&mut self.files);
        let mut end = ChunkNumber::MAX;
        for pair in pairs.iter().rev() {
            let found = self.member.keys.parse_file(pair.key()).zip(File::decode(pair.value()));
            let (number, file) = found.ok_or_else(|| unknown_key(pair))?;
            let known = before.get(&number).filter(|known| known.nonce == file.nonce);
            let end_before = known.map_or(ChunkNumber::MAX, |known| known.end);
            self.files.insert(number, File { end: end.min(end_before), ..file });
            end = file.first;
        }
        Ok(())
    }

    /// Reads the chunks of all files before this one, but for those in the cache. Each page also has the files that
    /// are there at its moment.
    async fn read_chunks(&mut self, end: ChunkNumber) -> Result<Chunks> {
        let (mut chunks, mut next) = (Chunks::new(), 0);
        // The most chunks in the next page, and about how many bytes they have.
        let (mut limit, mut expected) = (8, 8 * CHUNK_MAX);
        // Without the note it is not known how many there were.
        let may_give_up = self.member.duty == Duty::Read && self.noted.0 > 0;
        let most = self.noted.0 + self.noted.0.saturating_sub(self.lowest) + MOST_NEW;
        loop {
            let mut files = self.files.iter();
            let file = files.find(|(number, it)| it.end > next && !self.cache.contains_key(number));
            next = file.map_or(end, |(_, file)| file.first.max(next));
            if next >= end {
                return Ok(chunks);
            }
            // A page is in memory three times while it is decoded, and then its file.
            while headroom::ensure_free(Headroom::Quarter, 3 * expected).is_err() {
                if limit == 1 {
                    return Err(EtcdError::lasting(
                        "there is too little memory to read the binlog",
                    ));
                }
                (limit, expected) = (limit / 2, expected / 2);
            }
            let ((key, rest), files) = (self.chunks(next, end), self.all_files());
            // A page that has not come in time may be too long.
            let mut next_limit = limit;
            let reads = || {
                limit = next_limit;
                next_limit = (limit / 2).max(1);
                [(key.clone(), rest.clone().with_limit(limit)), files.clone()]
            };
            let [pairs, files] = self.page(reads).await?;
            self.note_files(&files)?;
            let is_last = i64::try_from(pairs.len()).is_ok_and(|len| len < limit);
            let len: usize = pairs.iter().map(|pair| pair.value().len()).sum();
            for pair in pairs {
                next = self.number_in(Some(&pair))? + 1;
                chunks.insert(next - 1, pair);
            }
            if is_last {
                return Ok(chunks);
            }
            if may_give_up && next > most {
                let text = "the server writes faster than this program reads".to_owned();
                return Err(EtcdError { kind: Kind::Passing, text });
            }
            let oldest = self.files.values().next().map_or(next, |file| file.first);
            chunks = chunks.split_off(&oldest);
            (limit, expected) =
                if len > PAGE_BYTES { (limit / 2, len / 2) } else { (limit * 2, len * 2) };
            limit = limit.clamp(1, LONGEST_PAGE_LEN);
        }
    }

    /// Returns the bytes of a file, or the key that is missing: of a chunk, or of the file that begins here.
    fn bytes_of(
        &self,
        number: FileNumber,
        File { first, size, end, .. }: File,
        chunks: &Chunks,
    ) -> Result<Vec<u8>, String> {
        let keys = &self.member.keys;
        let chunk = |at| chunks.get(&at).and_then(|pair| Chunk::decode(pair.value()));
        let len = chunks.values().map(|pair| pair.value().len()).sum();
        let (mut bytes, mut next) = (Vec::with_capacity(len), first);
        while next < end {
            match chunk(next) {
                Some(Chunk { file, offset, bytes: more })
                    if (file, offset) == (number, bytes.len() as u64) =>
                {
                    bytes.extend_from_slice(more);
                }
                Some(Chunk { file, offset: 0, .. }) if file != number => {
                    return Err(keys.file(file));
                }
                Some(_) => return Err(keys.chunk(next)),
                None => {
                    // Here the next file began, which was removed, unless the same file continues: then an
                    // operator has emptied the chunk. The newest file has no end.
                    let is_empty = chunks.get(&next).is_some_and(|pair| pair.value().is_empty());
                    let continues = chunk(next + 1).is_some_and(|chunk| chunk.file == number);
                    let is_end = chunks.range(next..).next().is_none() && end == ChunkNumber::MAX;
                    if next > first && (is_empty && !continues || is_end) {
                        break;
                    }
                    return Err(keys.chunk(next));
                }
            }
            next += 1;
        }
        bytes.truncate(usize::try_from(size).unwrap_or(usize::MAX));
        Ok(bytes)
    }

    /// Returns the number of a chunk, or 0.
    fn number_in(&self, pair: Option<&KeyValue>) -> Result<ChunkNumber> {
        let Some(pair) = pair else { return Ok(0) };
        self.member.keys.parse_chunk(pair.key()).ok_or_else(|| unknown_key(pair))
    }

    fn missing(&self, key: &str) -> EtcdError {
        EtcdError::lasting(self.member.keys.missing(key))
    }

    fn all_files(&self) -> (String, GetOptions) {
        (self.member.keys.files(), GetOptions::new().with_prefix())
    }

    /// Returns how to read the chunks from one to another one.
    fn chunks(&self, first: ChunkNumber, end: ChunkNumber) -> (String, GetOptions) {
        let keys = &self.member.keys;
        (keys.chunk(first), GetOptions::new().with_range(keys.chunk(end)))
    }

    /// Returns the first chunk of the newest file, or 0.
    fn newest(&self) -> ChunkNumber {
        self.files.values().next_back().map_or(0, |file| file.first)
    }

    fn last_chunk(&self) -> ChunkNumber {
        self.member.shared.state().last_chunk
    }

    /// Reads pages of one moment: a leader asks as long as it leads, and others ask some times. `reads` returns what to
    /// ask for, each time.
    async fn page<const READS: usize>(
        &mut self,
        mut reads: impl FnMut() -> [(String, GetOptions); READS],
    ) -> Result<[Vec<KeyValue>; READS]> {
        let shared = Arc::clone(&self.member.shared);
        let nodes = &mut self.member.nodes;
        let tries = (2 * nodes.count()).max(LEAST_TRIES);
        let ask = async || nodes.page(&reads()).await;
        if shared.state().deadline > Nanos::ZERO {
            ask_as_member(&shared, ask).await
        } else {
            ask_often(tries, ask).await
        }
    }

    // ---- Changing ----

    /// Makes all changes, in their order. Fails if the server does not lead any more, or cannot.
    pub async fn store(&mut self, changes: Vec<Change>) -> Result {
        let shared = Arc::clone(&self.member.shared);
        for mut change in changes {
            // A server that has lost its lease makes no more changes.
            ask_as_member(&shared, async || self.change(&mut change).await).await?;
        }
        Ok(())
    }

    /// Makes a change. After a failure the bytes that are not stored are left of it.
    async fn change(&mut self, change: &mut Change) -> Result {
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
                    let put = vec![TxnOp::put(self.member.keys.file(*file), cut.encode(), None)];
                    self.transact(Vec::new(), put).await?;
                    self.files.insert(*file, cut);
                }
            }
            Change::SetAside { file } => {
                self.copy_aside(*file).await?;
                self.remove(*file).await?;
            }
            Change::Format { value } => {
                let put = TxnOp::put(self.member.keys.format(), value.clone(), None);
                self.transact(Vec::new(), vec![put]).await?;
            }
        }
        Ok(())
    }

    /// Adds a chunk with the first ones of these bytes. Returns how many are stored. After a quick success the next
    /// chunk is longer.
    async fn append(&mut self, number: FileNumber, offset: u64, bytes: &[u8]) -> Result<usize> {
        // There are two copies: its value, and the request.
        while self.chunk_max > SHORTEST_CHUNK
            && headroom::ensure_free(Headroom::Half, 2 * bytes.len().min(self.chunk_max)).is_err()
        {
            self.chunk_max /= 2;
        }
        let begun_at = self.member.shared.now();
        let last = self.last_chunk();
        let chunk = last + 1;
        let key = self.member.keys.chunk(chunk);
        let mut len = bytes.len().min(self.chunk_max);
        let value = Chunk { file: number, offset, bytes: &bytes[..len] }.encode();
        let mut puts = Vec::new();
        // A leader appends only to files that it has begun.
        let known = self.files.get(&number).copied().filter(|_| offset > 0);
        let file = known.unwrap_or_else(|| File::new(chunk));
        if known.is_none() {
            puts.push(TxnOp::put(self.member.keys.file(number), file.encode(), None));
        }
        // As the last one: the request is not copied to make room for more.
        puts.push(TxnOp::put(key.clone(), value, None));
        if !self.is_made(Vec::new(), puts).await? {
            // An earlier try has succeeded if these bytes are there. It may have had more of them.
            // A chunk takes longer than other answers, but a lost answer must not take longer than the lease.
            let nodes = &mut self.member.nodes;
            let ([found], _) = nodes.read(4 * nodes.timeout, &[(key, GetOptions::new())]).await?;
            let found = found.first().and_then(|pair| Chunk::decode(pair.value()));
            let is_own = |chunk: &Chunk<'_>| {
                (chunk.file, chunk.offset) == (number, offset)
                    && chunk.bytes.len() >= len
                    && bytes.starts_with(chunk.bytes)
            };
            let Some(own) = found.filter(is_own) else {
                let keys = &self.member.keys;
                let (key, before) = (keys.chunk(chunk), keys.chunk(last));
                return Err(EtcdError::lost(format!(
                    "{key} is there already, or {before} is gone"
                )));
            };
            len = own.bytes.len();
        }
        let took = self.member.shared.now().since(begun_at).as_nanos();
        if Duration::from_nanos(took) < self.member.nodes.timeout / 4 {
            self.chunk_max = (self.chunk_max * 2).min(self.longest_chunk);
        }
        let mut state = self.member.shared.state();
        state.stored_bytes += len as u64;
        state.last_chunk = chunk;
        drop(state);
        if known.is_none()
            && let Some(mut before) = self.files.last_entry()
        {
            before.get_mut().end = before.get().end.min(chunk);
        }
        self.files.insert(number, file);
        Ok(len)
    }

    async fn remove(&mut self, number: FileNumber) -> Result {
        let Some(&file) = self.files.get(&number) else { return Ok(()) };
        let first = self.member.keys.chunk(file.first);
        let gone = TxnOp::delete(self.member.keys.file(number), None);
        // A delayed twin of this transaction must not bring the chunk back.
        let when = vec![exists(first.clone())];
        self.transact(when, vec![gone, TxnOp::put(first, "", None)]).await?;
        self.files.remove(&number);
        Ok(())
    }

    /// Deletes some chunks of removed files, and notes which chunk is the last one, some time after it was added, so
    /// that its loss is noticed. Returns whether there may be more to delete.
    pub async fn tidy(&mut self) -> Result<bool> {
        let (last, (noted, noted_at)) = (self.last_chunk(), self.noted);
        let is_due = self.member.shared.now().since(noted_at) >= NOTE_INTERVAL;
        // The last chunk stays, because the next one needs it.
        let oldest = self.files.values().next().map_or(last, |file| file.first);
        let has_garbage = self.lowest < oldest;
        if !has_garbage && (last <= noted || !is_due) {
            return Ok(false);
        }
        let keys = &self.member.keys;
        let lowest = (self.lowest + GARBAGE_STEP).min(oldest).max(self.lowest);
        let mut then = vec![TxnOp::put(keys.last(), last_value(last, lowest), None)];
        if has_garbage {
            let some = DeleteOptions::new().with_range(keys.chunk(lowest));
            then.push(TxnOp::delete(keys.chunk(self.lowest), Some(some)));
        }
        // A delayed twin must not note a chunk that is gone since.
        self.transact(vec![exists(keys.chunk(lowest))], then).await?;
        (self.lowest, self.noted) = (lowest, (last, self.member.shared.now()));
        Ok(has_garbage)
    }

    /// Copies the chunks of a file to other keys, many at once: replies wait meanwhile. One that is longer than chunks
    /// may be now comes in parts.
    async fn copy_aside(&mut self, number: FileNumber) -> Result {
        let Some(&File { first, end, .. }) = self.files.get(&number) else { return Ok(()) };
        let (mut next, mut copy) = (first, first);
        let most = self.chunk_max + Chunk::HEAD_LEN;
        loop {
            let (key, rest) = self.chunks(next, end);
            let rest = rest.with_limit(MOST_COPIED);
            let [pairs] = self.page(|| [(key.clone(), rest.clone())]).await?;
            next += pairs.len() as u64;
            let copied = pairs.iter().map(|pair| pair.value().len() as u64).sum();
            self.member.shared.note_copied(copied);
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

    /// Makes a transaction if this server leads. The conditions hold unless another program has changed
    /// the keys.
    async fn transact(&mut self, when: Vec<Compare>, then: Vec<TxnOp>) -> Result {
        if self.is_made(when, then).await? {
            return Ok(());
        }
        Err(EtcdError::lost("another program has changed the keys, or etcd was restored"))
    }

    /// Makes a transaction if this server leads, the last chunk is there and no later one, and the conditions
    /// hold. Returns whether they do.
    async fn is_made(&mut self, mut when: Vec<Compare>, then: Vec<TxnOp>) -> Result<bool> {
        // After a restore of etcd another leader may have the same revision, but no other one has this lease. This
        // one may have it still, and the last chunk be lost.
        let State { lease, last_chunk, .. } = *self.member.shared.state();
        let key = self.member.keys.leader();
        // A delayed twin must not change what was appended later: numbers of files and bytes may be used again.
        when.push(modified(self.member.keys.chunk(last_chunk + 1), 0));
        when.push(Compare::lease(key.clone(), CompareOp::Equal, lease));
        when.push(exists(self.member.keys.chunk(last_chunk)));
        let txn = Txn::new().when(when).and_then(then).or_else([TxnOp::get(key, None)]);
        let begun_at = self.member.shared.now();
        let answer = self.member.nodes.ask(|node| node.txn(txn)).await;
        let answer = answer.map_err(|failure| self.heed(failure))?;
        let took = self.member.shared.now().since(begun_at);
        self.member.shared.state().transactions.count(took);
        let (revision, found) = outcome(&answer);
        if answer.succeeded() {
            let mut state = self.member.shared.state();
            state.revision = revision;
            if std::mem::take(&mut state.is_full) {
                warn!("etcd has space again: accepting puts");
            }
            return Ok(true);
        }
        match found.flatten().next() {
            Some(pair) if pair.lease() == lease => Ok(false),
            Some(pair) => Err(EtcdError::lost(format!("{} leads", name_of(&pair)))),
            None => Err(EtcdError::lost(LEASE_ENDED)),
        }
    }

    /// Shortens the chunks after a failure: one may not have come in time, or is too large for etcd. Refuses puts while
    /// that has no space. Returns the failure.
    fn heed(&mut self, mut failure: EtcdError) -> EtcdError {
        let was_shortest = self.chunk_max == SHORTEST_CHUNK;
        self.chunk_max = (self.chunk_max / 2).max(SHORTEST_CHUNK);
        if failure.kind == Kind::TooLarge {
            self.longest_chunk = self.chunk_max;
            if was_shortest {
                failure.kind = Kind::Lasting;
                failure.text += "; raise --max-request-bytes of etcd to at least 16384";
            }
        }
        if failure.kind == Kind::NoSpace
            && !std::mem::replace(&mut self.member.shared.state().is_full, true)
        {
            warn!("refusing puts, and trying again: {}", failure.text);
        }
        failure
    }
}

fn unknown_key(pair: &KeyValue) -> EtcdError {
    let key = printable(pair.key());
    let remedy = "delete it, after its owner has got a prefix that does not begin with this one";
    EtcdError::lasting(format!("{key} is no key of a binlog; {remedy}"))
}
