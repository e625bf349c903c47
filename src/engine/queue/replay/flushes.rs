//! The flushes of each tube that a replay has read: how many, and when.
//!
//! A flush deletes the jobs of its tube that have no record after it.

use crate::engine::binlog::record::{FlushCounts, FlushKind};
use crate::engine::collections::secondary_map::SecondaryMap;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::TubeKey;
use crate::engine::queue::flush::Decision;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// The flushes of all tubes.
#[derive(Debug, Default)]
pub(super) struct Flushes(SecondaryMap<TubeKey, TubeFlushes>);

/// The flushes of one tube, in their order.
#[derive(Debug, Default)]
struct TubeFlushes {
    counts: FlushCounts,
    /// The flushes of all jobs.
    all: Vec<Flush>,
    /// The flushes of the buried jobs.
    buried: Vec<Flush>,
}

#[derive(Clone, Copy, Debug)]
struct Flush {
    /// The number of flushes of the tube before it.
    before: usize,
    decision: Decision,
}

impl Flushes {
    /// Notes a flush.
    pub(super) fn add(
        &mut self,
        tube: TubeKey,
        kind: FlushKind,
        decided_at: Nanos,
    ) -> Result<(), TryReserveError> {
        if self.0.get(tube).is_none() {
            self.0.try_insert(tube, TubeFlushes::default())?;
        }
        let TubeFlushes { counts, all, buried } = &mut self.0[tube];
        let before = all.len() + buried.len();
        let same_kind = match kind {
            FlushKind::All => all,
            FlushKind::Buried => buried,
        };
        headroom::leave(Headroom::Quarter, || same_kind.try_reserve(1))?;
        same_kind.push(Flush { before, decision: Decision { kind, decided_at } });
        counts.add(kind);
        Ok(())
    }

    /// Returns the numbers of flushes of a tube.
    pub(super) fn counts(&self, tube: TubeKey) -> FlushCounts {
        self.0.get(tube).map(|flushes| flushes.counts).unwrap_or_default()
    }

    /// Returns the first flush that has deleted a job, or `None` if none has. `before` are the flushes before
    /// its last record; `is_buried` if it is buried, and no worker has reserved it.
    pub(super) fn first_after(
        &self,
        tube: TubeKey,
        before: FlushCounts,
        is_buried: bool,
    ) -> Option<Decision> {
        let TubeFlushes { all, buried, .. } = self.0.get(tube)?;
        let all = all.get(before.all());
        let buried = buried.get(before.buried()).filter(|_| is_buried);
        let first = all.into_iter().chain(buried).min_by_key(|flush| flush.before)?;
        Some(first.decision)
    }
}
