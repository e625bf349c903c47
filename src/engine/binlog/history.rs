//! What the records of all files mean together.
//!
//! - The last record of a job counts. A full record replaces an older one; a short record or a delete
//!   without a full record before it has no effect.
//! - The record of a key belongs to the record directly after it: to the full record of its job, or, if
//!   the key is kept, to the delete of its job. Alone it has no effect, unless it is that of a kept key
//!   whose job is gone: compaction has moved it. A job keeps its key if a newer full record has none before it:
//!   C beanstalkd has moved the job.
//! - A flush deletes the jobs of its tube that have no record after it ([`Flushes`]).
//! - Bytes that are no record are damage. But if no record follows in any file, and they are cut short or
//!   have a sector that was never written, a crash has left them: the last record is torn. They may be an
//!   acknowledged record only if the operator chose not to sync each iteration.
//! - A file under the number of another one is damage. From it on flushes do not count: jobs may stand before a
//!   flush that were put after it.
//! - A file that ends otherwise than the next one has noted is damaged.
//! - A file that is missing between two others was lost, unless it is in a gap.
//! - The highest id of all records was given out.
//!
//! A replay, `--check`, `--dump`, `--import` and `--export` read a binlog by [`History::read_file`].

use super::disk::{Disk, FileNumber};
use super::error::{BinlogError, Corruption};
use super::gaps::Gaps;
use super::reader::{Damage, Item, Reader, Record};
use super::record::{
    Content, Decision, FlushKind, GAP_ID, HIGHEST_ID, JobState, KeyRecord, Layout, Mark,
};
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::time::Nanos;
use std::collections::HashMap;
use std::hash::Hash;

/// What is known from the files that were read so far.
#[derive(Debug, Default)]
pub struct History {
    /// The bytes behind the last intact record. They are damage if a record follows.
    pub torn: Option<(FileNumber, Damage)>,
    /// The files that were removed before older ones.
    pub gaps: Gaps,
    /// The highest id that was given out.
    pub last_id: u64,
    /// A file has had another number.
    has_misplaced: bool,
    /// The file before, the offset behind its last record, and the nonce of its file header record.
    before: Option<(FileNumber, u64, Option<u32>)>,
    /// The record of a key, and its file, if that was the last record.
    key_before: Option<(FileNumber, KeyRecord)>,
}

/// A part of a file.
pub enum Event<'r> {
    /// The file is open.
    Opened { size: u64, layout: Layout, nonce: Option<u32> },
    /// A record, with that of its key directly before it, and the file of that.
    Record(&'r Record<'r>, Option<(FileNumber, KeyRecord)>),
    /// Damage, in this file or in an older one.
    Damage(FileNumber, Damage),
    /// There are no more records. The last one ends at this offset.
    End(u64),
}

/// The flushes of all tubes, which have keys of type `T`. A flush deletes the jobs of its tube that have no
/// record after it. A server records nothing of a flushed job but its delete; a later record is of C
/// beanstalkd, which skips the record of a flush.
#[derive(Default)]
pub struct Flushes<T> {
    /// The number of flushes so far.
    pub count: u32,
    /// The flushes of each tube, by kind: the number of flushes before it, and when it was decided.
    of_tubes: HashMap<T, [Vec<(u32, Nanos)>; 2]>,
}

/// At most this many ids can be missing between two records. An id that is farther away is damaged.
const MAX_ID_GAP: u64 = 1 << 20;

impl History {
    /// Reads the next file. Numbers ascend from call to call.
    pub fn read_file(
        &mut self,
        disk: &mut dyn Disk,
        number: FileNumber,
        mut visit: impl FnMut(Event<'_>) -> Result<(), BinlogError>,
    ) -> Result<(), BinlogError> {
        let mut reader = Reader::open(disk, number)?;
        self.note_id(reader.last_id);
        let Reader { size, layout, nonce, .. } = reader;
        visit(Event::Opened { size, layout, nonce })?;
        let (used, nonce_before) = reader.before;
        if let Some((before, offset, known)) = self.before
            && number - before == 1
            && used > 0
            && (used != offset || known.is_some_and(|known| known != nonce_before))
            && !self.has_misplaced
        {
            let (len, cause) = (used.saturating_sub(offset), Corruption::FILE_END);
            let lost = (before, Damage { offset, len, cause, id: None, is_full: false });
            let damage = self.torn.take().unwrap_or(lost);
            visit(self.damaged(damage))?;
        }
        loop {
            let item = reader.next_item()?;
            if !matches!(item, Item::End { .. })
                && let Some(torn) = self.torn.take()
            {
                visit(self.damaged(torn))?;
            }
            let key_before = self.key_before.take();
            match item {
                Item::Record(record) => {
                    let key = self.note_record(number, &record, key_before);
                    if self.has_misplaced && matches!(record.content, Content::Flush(_)) {
                        continue;
                    }
                    visit(Event::Record(&record, key))?;
                }
                Item::Damage(damage) => visit(self.damaged((number, damage)))?,
                Item::End { used, tail } => {
                    if tail.is_none() {
                        self.key_before = key_before;
                    }
                    let damage = tail.and_then(|tail| match tail.offset {
                        // The file has no intact record.
                        0 => Some((number, tail)),
                        _ => self.torn.replace((number, tail)),
                    });
                    if let Some(damage) = damage {
                        visit(self.damaged(damage))?;
                    }
                    self.before = Some((number, used, nonce));
                    return visit(Event::End(used));
                }
            }
        }
    }

    /// Notes a record. Returns that of its key.
    fn note_record(
        &mut self,
        number: FileNumber,
        record: &Record<'_>,
        key_before: Option<(FileNumber, KeyRecord)>,
    ) -> Option<(FileNumber, KeyRecord)> {
        match record.content {
            Content::Job(job) => {
                self.note_id(job.id);
                let is_deleted = job.state == JobState::Deleted;
                return key_before
                    .filter(|(_, key)| key.id == job.id && key.kept_until.is_some() == is_deleted);
            }
            Content::Key(key) => {
                self.note_id(key.id);
                self.key_before = Some((number, key));
            }
            // It is also between the record of a kept key and that of the delete, in the next file.
            Content::Gap(gap) => {
                self.gaps.add(gap);
                self.key_before = key_before;
            }
            Content::Flush(_) | Content::FileHeader(..) => {}
        }
        None
    }

    /// Notes damage. The id of a full record was given out, unless it is damaged too.
    fn damaged(&mut self, (number, damage): (FileNumber, Damage)) -> Event<'static> {
        let id = damage.id.filter(|&id| damage.is_full && id < GAP_ID && self.is_near(id));
        self.last_id = self.last_id.max(id.unwrap_or(0));
        self.has_misplaced |= matches!(damage.cause, Corruption::Number(_));
        Event::Damage(number, damage)
    }

    /// Notes that an id was given out. Huge ids are ignored unless they are near the last one, because
    /// few ids are left behind them.
    fn note_id(&mut self, id: u64) {
        if id <= HIGHEST_ID || self.is_near(id) {
            self.last_id = self.last_id.max(id);
        }
    }

    fn is_near(&self, id: u64) -> bool {
        id.saturating_sub(self.last_id) < MAX_ID_GAP
    }
}

impl<T: Eq + Hash> Flushes<T> {
    /// Adds a flush, which is newer than the others.
    pub fn add(&mut self, tube: T, flush: Decision) -> Result<(), NoMemory> {
        headroom::keeping(Headroom::Quarter, || self.of_tubes.try_reserve(1))?;
        let of_kind = &mut self.of_tubes.entry(tube).or_default()[flush.kind as usize];
        headroom::keeping(Headroom::Quarter, || of_kind.try_reserve(1))?;
        of_kind.push((self.count, flush.decided_at));
        self.count += 1;
        Ok(())
    }

    /// Returns the first flush that has deleted a job, or `None`. Its last record is after `since` flushes. In
    /// it the job `is_buried`, and no worker has reserved it.
    pub fn first_after(&self, tube: &T, since: u32, is_buried: bool) -> Option<Decision> {
        let all = self.first_of_kind(tube, since, FlushKind::All);
        let buried = self.first_of_kind(tube, since, FlushKind::Buried).filter(|_| is_buried);
        Some(all.into_iter().chain(buried).min_by_key(|(number, _)| *number)?.1)
    }

    /// Returns whether the record of a delete with this mark counts: if it needs the record of a flush, that is
    /// one of these. The last record of the job is as for [`Flushes::first_after`].
    pub fn allow(&self, mark: Mark, tube: &T, since: u32, is_buried: bool) -> bool {
        match mark {
            Mark::None | Mark::Held => true,
            Mark::Flushed => self.first_after(tube, since, is_buried).is_some(),
            // On a full disk a bury may have no record.
            Mark::FlushedBuried => self.first_of_kind(tube, since, FlushKind::Buried).is_some(),
        }
    }

    fn first_of_kind(&self, tube: &T, since: u32, kind: FlushKind) -> Option<(u32, Decision)> {
        let of_kind = &self.of_tubes.get(tube)?[kind as usize];
        let first = of_kind.partition_point(|&(number, _)| number < since);
        let &(number, decided_at) = of_kind.get(first)?;
        Some((number, Decision { kind, decided_at }))
    }
}
