//! Leadership: a key with a lease, which is created only if it does not exist, and kept alive.
//!
//! The lease also ends by the clock of this server. No reply may leave later than the moment at which
//! the last successful renewal was SENT, plus four fifths of the TTL that etcd has granted. The clock
//! also runs while the machine is suspended. etcd can end a lease early, so the key is watched too.

use super::api::{Compare, Op, Range, Txn};
use super::keys::{IMPORTING, Keys, format_value, parse_format};
use super::membership::{Duty, LeaseNote, MembershipError, Standing};
use super::nodes::{Error, Kind, Nodes};
use super::shared::Shared;
use crate::engine::time::Nanos;
use log::warn;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// A server that wants to lead.
#[derive(Clone, Debug)]
pub struct Candidate {
    pub nodes: Nodes,
    pub keys: Keys,
    pub shared: Arc<Shared>,
    /// The name of this server.
    pub name: String,
    pub file_size: u32,
    pub ttl_secs: u32,
    /// The quota of etcd in bytes.
    pub quota: u64,
    /// Where the lease is noted for `--leave`.
    pub lease_file: Option<PathBuf>,
    pub duty: Duty,
}

/// What the transactions of a leader need.
#[derive(Clone, Copy, Debug)]
pub struct Leader {
    /// The revision in which the key of the leader was created.
    pub revision: i64,
    /// The revision in which the key of the format was last changed.
    pub format_revision: i64,
    /// The size of a file in bytes, which that key has.
    pub file_size: u32,
    /// A binlog is being imported.
    pub is_import: bool,
}

/// A lease that was granted.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: i64,
    /// The time for which it was granted, minus a fifth.
    safe_time: Nanos,
}

/// The pause between two looks at the size of etcd's databases. At 60 MB/s half of a sixteenth of 2 GiB,
/// which is kept for deletes, is written meanwhile.
const SIZE_PAUSE: Duration = Duration::from_secs(1);
/// A failure is logged at this interval.
const LOG_INTERVAL: Nanos = Nanos::from_secs(10);
/// The pause before a request is made again.
pub const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// etcd should drop a revision sooner than this.
const REVISION_LIFETIME: Nanos = Nanos::from_secs(600);
/// Why a server does not lead any more that was not too slow.
const GONE: &str = "the key of the leader is gone: the lease has ended";
/// The oldest etcd that is supported.
const OLDEST_VERSION: (u32, u32) = (3, 4);

impl Candidate {
    /// Waits until no other server leads, and leads. From then on other tasks keep the lease. Returns
    /// `None` if this server cannot lead; the standing has the reason.
    pub async fn lead(mut self) -> Option<Leader> {
        let mut logged_at = None;
        loop {
            let error = match self.try_to_lead().await {
                Ok(leader) => return Some(leader),
                Err(error) => error,
            };
            if error.kind == Kind::Lasting || self.shared.standing().is_err() {
                self.shared.set_standing(Err(MembershipError::Refused(error.text)));
                return None;
            }
            let now = self.shared.now();
            if logged_at.is_none_or(|logged_at| now.since(logged_at) >= LOG_INTERVAL) {
                warn!("etcd cannot serve: {error}; trying again");
                logged_at = Some(now);
            }
            sleep(RETRY_PAUSE).await;
        }
    }

    // ---- Becoming the leader ----

    async fn try_to_lead(&mut self) -> Result<Leader, Error> {
        check_version(&mut self.nodes).await?;
        check_prefix(&mut self.nodes, &self.keys, Some(self.file_size)).await?;
        loop {
            self.wait_for_vacancy().await?;
            let sent_at = self.shared.now();
            let granted = self.nodes.ask(|node| node.grant(self.ttl_secs)).await?;
            let ttl_secs = u64::try_from(granted.ttl_secs).unwrap_or(0);
            let safe_time = Nanos::from_nanos(ttl_secs * 1_000_000_000 / 5 * 4);
            let lease = Lease { id: granted.id, safe_time };
            self.shared.state().lease = lease.id;
            self.note_lease(lease.id);
            let deadline = sent_at + safe_time;
            if let Some(revision) = self.claim(lease, deadline).await? {
                self.shared.state().deadline = deadline;
                return self.begin(lease, revision).await;
            }
            // It would end by itself.
            let _ = self.nodes.ask(|node| node.revoke(lease.id)).await;
            // A lease may be too short to ever lead.
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Writes the lease and this process into the file for `--leave`.
    fn note_lease(&self, lease: i64) {
        let Some(file) = &self.lease_file else { return };
        if let Err(error) = LeaseNote::of_this_process(lease).write(file) {
            warn!("cannot write {}: {error}; a killed server is followed later", file.display());
        }
    }

    /// Waits until the key of the leader does not exist.
    async fn wait_for_vacancy(&mut self) -> Result<(), Error> {
        loop {
            let answer = self.nodes.get(Range::key(self.keys.leader())).await?;
            let Some(pair) = answer.pairs.first() else { return Ok(()) };
            let leader = String::from_utf8_lossy(&pair.value).into_owned();
            let standing = Ok(Standing::Standby(leader.clone()));
            if self.shared.standing() != standing {
                warn!("standing by: {leader} leads {}", self.keys.prefix());
                self.shared.set_standing(standing);
            }
            // Events may be missed while a node has no connection to the others.
            let patience = Duration::from_secs(self.ttl_secs.into());
            if let Ok(Ok(true)) = timeout(patience, self.wait_for_end(answer.revision + 1)).await {
                return Ok(());
            }
        }
    }

    /// Waits until the key of the leader is removed, as far as one node knows. Returns `false` if it
    /// may be there still.
    async fn wait_for_end(&mut self, revision: i64) -> Result<bool, Error> {
        let deletion = self.nodes.ask(|node| node.watch(self.keys.leader(), revision)).await?.await;
        if deletion.is_err() {
            self.nodes.next_node();
        }
        Ok(deletion.is_ok())
    }

    /// Creates the key of the leader with this lease. Returns the revision of that, or `None` if
    /// another server was first or the lease is too old.
    async fn claim(&mut self, lease: Lease, deadline: Nanos) -> Result<Option<i64>, Error> {
        let key = self.keys.leader();
        while self.shared.now() < deadline {
            let value = self.name.clone().into_bytes();
            let txn = Txn {
                when: vec![Compare::Created(key.clone(), 0)],
                then: vec![Op::Put { key: key.clone(), value, lease: lease.id }],
                otherwise: vec![Op::get(key.clone())],
            };
            let mut answer = match self.nodes.ask(|node| node.txn(txn)).await {
                Ok(answer) => answer,
                // It may have succeeded.
                Err(Error { kind: Kind::Passing, .. }) => {
                    sleep(RETRY_PAUSE).await;
                    continue;
                }
                Err(Error { kind: Kind::Lost, .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
            if answer.succeeded {
                return Ok(Some(answer.revision));
            }
            let pair = answer.found.pop().and_then(|mut pairs| pairs.pop());
            // An earlier try has succeeded if the lease is ours.
            let own = pair.filter(|pair| pair.lease == lease.id);
            return Ok(own.map(|pair| pair.create_revision));
        }
        Ok(None)
    }

    /// Begins to lead: from now on no other server changes the log. The lease is kept meanwhile.
    async fn begin(&mut self, lease: Lease, revision: i64) -> Result<Leader, Error> {
        tokio::spawn(self.clone().renew(lease, revision));
        tokio::spawn(self.clone().watch(revision));
        tokio::spawn(self.clone().watch_size());
        loop {
            match self.begin_format(revision).await {
                Err(error) if error.kind != Kind::Lasting && self.shared.check().is_ok() => {
                    sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(error),
                Ok(format_revision) => {
                    warn!("leading {}", self.keys.prefix());
                    self.shared.set_standing(Ok(Standing::Leader));
                    let (file_size, is_import) = (self.file_size, self.duty == Duty::Import);
                    return Ok(Leader { revision, format_revision, file_size, is_import });
                }
            }
        }
    }

    /// Writes the key of the format if it is not there. Returns the revision of its last change.
    async fn begin_format(&mut self, revision: i64) -> Result<i64, Error> {
        let (keys, is_import) = (&self.keys, self.duty == Duty::Import);
        check_prefix(&mut self.nodes, keys, Some(self.file_size)).await?;
        if is_import {
            let any = Range { limit: 1, keys_only: true, ..Range::below(keys.files()) };
            if !self.nodes.get(any).await?.pairs.is_empty() {
                let text = format!("{} has jobs already", keys.prefix());
                return Err(Error::new(Kind::Lasting, text));
            }
        }
        let value = if is_import { IMPORTING } else { &format_value(self.file_size) };
        let leads = Compare::Created(keys.leader(), revision);
        let is_absent = Compare::Created(keys.format(), 0);
        let (put, read) = (Op::put(keys.format(), value), Op::get(keys.format()));
        let (when, then) = (vec![leads, is_absent], vec![put, read.clone()]);
        let mut answer =
            self.nodes.ask(|node| node.txn(Txn { when, then, otherwise: vec![read] })).await?;
        let format = answer.found.pop().and_then(|mut pairs| pairs.pop());
        let format = format.ok_or_else(|| Error::new(Kind::Lost, "the lease has ended"))?;
        Ok(format.mod_revision)
    }

    // ---- Staying the leader ----

    /// Renews the lease every fifth of its time, by short tries over different nodes, until it is lost.
    async fn renew(self, lease: Lease, revision: i64) {
        let mut nodes = self.nodes.asking_next();
        let pause = nodes.timeout();
        loop {
            let sent_at = self.shared.now();
            match self.renew_once(&mut nodes, lease, revision).await {
                Ok(()) => {
                    self.shared.state().deadline = sent_at + lease.safe_time;
                    sleep(pause).await;
                }
                Err(Error { kind: Kind::Lost | Kind::Lasting, text }) => {
                    return self.lose(text);
                }
                Err(error) => {
                    if self.shared.lease_left() == Nanos::ZERO {
                        return self.lose(format!("the lease was not renewed in time: {error}"));
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    fn lose(&self, reason: String) {
        self.shared.set_standing(Err(MembershipError::Lost(reason)));
    }

    /// Renews the lease, and makes sure that the key of the leader is still there. A leader of etcd
    /// whose disk hangs may answer a renewal although the other nodes have elected another one, but
    /// it cannot read the key without them.
    async fn renew_once(
        &self,
        nodes: &mut Nodes,
        lease: Lease,
        revision: i64,
    ) -> Result<(), Error> {
        nodes.ask(|node| node.keep_alive(lease.id)).await?;
        let answer = nodes.get(Range::key(self.keys.leader())).await?;
        match answer.pairs.first() {
            Some(pair) if pair.create_revision == revision => Ok(()),
            Some(_) | None => Err(Error::new(Kind::Lost, GONE)),
        }
    }

    /// Watches the key of the leader, which etcd may remove early, at another node.
    async fn watch(mut self, revision: i64) {
        self.nodes = self.nodes.asking_next().asking_next();
        let mut compaction = CompactionCheck { noted_at: self.shared.now(), revision };
        loop {
            match self.nodes.get(Range::key(self.keys.leader())).await {
                Ok(answer) => {
                    let pair = answer.pairs.first();
                    if pair.is_none_or(|pair| pair.create_revision != revision) {
                        return self.lose(GONE.to_owned());
                    }
                    let now = self.shared.now();
                    compaction.check(&mut self.nodes, &self.keys, answer.revision, now).await;
                    let patience = self.nodes.timeout();
                    let _ = timeout(patience, self.wait_for_end(answer.revision + 1)).await;
                }
                Err(_) => sleep(RETRY_PAUSE).await,
            }
        }
    }
}

impl Candidate {
    /// Lets puts be refused before etcd is full, so that deletes work.
    async fn watch_size(mut self) {
        self.nodes = self.nodes.asking_next();
        loop {
            let (mut size, mut used) = (None, 0);
            for _ in 0..self.nodes.count() {
                if let Ok(status) = self.nodes.ask(|node| node.status()).await {
                    size = size.max(Some(status.db_bytes));
                    used = used.max(status.used_bytes);
                    self.nodes.next_node();
                }
            }
            if let Some(size) = size {
                self.note_size(size, used);
            }
            sleep(SIZE_PAUSE).await;
        }
    }

    fn note_size(&self, size: u64, used: u64) {
        let quota = self.quota;
        // etcd uses free pages again, but counts them.
        let is_nearly_full = used >= quota / 8 * 7 || size >= quota / 16 * 15;
        let was = std::mem::replace(&mut self.shared.state().is_nearly_full, is_nearly_full);
        match (was, is_nearly_full) {
            (false, true) => warn!(
                "etcd has {used} bytes in use and {size} in its database, near its quota of {quota}: \
                 refusing puts, so that deletes work; compact and defragment etcd, or raise its quota \
                 and --etcd-quota"
            ),
            (true, false) => warn!("etcd has space again: accepting puts"),
            (false, false) | (true, true) => {}
        }
    }
}

/// A check whether etcd drops old revisions. Without that its database grows without bound.
struct CompactionCheck {
    noted_at: Nanos,
    /// A revision that was the newest at that moment.
    revision: i64,
}

impl CompactionCheck {
    /// Warns if a revision can still be read after [`REVISION_LIFETIME`]. `newest` is the newest one.
    async fn check(&mut self, nodes: &mut Nodes, keys: &Keys, newest: i64, now: Nanos) {
        if now.since(self.noted_at) < REVISION_LIFETIME {
            return;
        }
        let old = Range { revision: self.revision, ..Range::key(keys.leader()) };
        if nodes.get(old).await.is_ok() && newest > self.revision {
            warn!(
                "etcd keeps old revisions for more than {} s, until its quota is reached; start it \
                 with --auto-compaction-mode=periodic --auto-compaction-retention=1m",
                REVISION_LIFETIME.whole_secs()
            );
        }
        *self = CompactionCheck { noted_at: now, revision: newest };
    }
}

/// Fails if etcd is too old.
pub async fn check_version(nodes: &mut Nodes) -> Result<(), Error> {
    let version = nodes.ask(|node| node.status()).await?.version;
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let found = parts.next().flatten().zip(parts.next().flatten());
    if found.is_some_and(|found| found >= OLDEST_VERSION) {
        return Ok(());
    }
    let (major, minor) = OLDEST_VERSION;
    Err(lasting(format!("etcd {version} is older than {major}.{minor}")))
}

/// Fails if the keys of a prefix are not those of a binlog with files of this size.
pub async fn check_prefix(
    nodes: &mut Nodes,
    keys: &Keys,
    file_size: Option<u32>,
) -> Result<(), Error> {
    // Both at one moment: another server may write its first keys.
    let others = Range { limit: 2, keys_only: true, ..Range::below(keys.all()) };
    let reads = vec![Op::get(keys.format()), Op::Get(others)];
    let answer = nodes.ask(|node| node.txn(Txn { then: reads, ..Txn::default() })).await?;
    let mut found = answer.found.into_iter();
    let (format, others) = (found.next().unwrap_or_default(), found.next().unwrap_or_default());
    if let Some(pair) = format.first() {
        if pair.value == IMPORTING.as_bytes() {
            return Err(lasting(format!(
                "an import was begun and not completed; delete the keys that begin with {} and \
                 import again",
                keys.all()
            )));
        }
        return match (parse_format(&pair.value), file_size) {
            (None, _) => Err(lasting(format!(
                "{} does not have a format that this version knows",
                keys.format()
            ))),
            (Some(found), Some(wanted)) if found != wanted => Err(lasting(format!(
                "the files of this binlog have {found} bytes; start all its servers with -s {found}"
            ))),
            (Some(_), _) => Ok(()),
        };
    }
    let own = keys.leader();
    match others.iter().find(|pair| pair.key != own.as_bytes()) {
        None => Ok(()),
        Some(pair) => Err(lasting(format!(
            "something else has keys with this prefix, such as {}; nothing was written",
            String::from_utf8_lossy(&pair.key)
        ))),
    }
}

/// Fails if there is no binlog with this prefix.
pub async fn check_used(nodes: &mut Nodes, keys: &Keys) -> Result<(), Error> {
    let answer = nodes.get(Range::key(keys.format())).await?;
    if answer.pairs.is_empty() {
        return Err(lasting(format!("no binlog has the prefix {}", keys.prefix())));
    }
    Ok(())
}

fn lasting(text: String) -> Error {
    Error::new(Kind::Lasting, text)
}
