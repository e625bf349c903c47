//! Leadership: a key with a lease, which is created only if it does not exist, and kept alive.
//!
//! The lease also ends by the clock of this server. No reply may leave later than the moment at which
//! the last successful renewal was SENT, plus four fifths of the TTL that etcd has granted. The clock
//! also runs while the machine is suspended. etcd can end a lease early, so the key is watched too.

use super::api::{Compare, Op, Range, Txn};
use super::keys::{IMPORTING, Keys, format_value, parse_format};
use super::log::{ChangeError, Log, ReadError, begin_format};
use super::nodes::{Nodes, RequestError};
use super::shared::{Leader, Role, Shared};
use crate::engine::time::Nanos;
use log::warn;
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
    /// The prefix must have no log.
    pub must_be_unused: bool,
}

/// A lease that was granted.
#[derive(Clone, Copy, Debug)]
struct Lease {
    id: i64,
    /// The time for which it was granted, minus a fifth.
    safe_time: Nanos,
}

/// Why a server cannot lead.
pub enum Hindrance {
    /// Another try may succeed.
    Passing(RequestError),
    /// Another try would fail too.
    Lasting(String),
}

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
    /// Waits until no other server leads, and leads. From then on other tasks keep the lease. The
    /// progress is in the role.
    pub async fn lead(mut self) {
        let mut logged_at = None;
        loop {
            match self.try_to_lead().await {
                Ok(()) => return,
                Err(Hindrance::Lasting(reason)) => {
                    return self.shared.set_role(Role::Refused(reason));
                }
                Err(Hindrance::Passing(error)) => {
                    let now = self.shared.now();
                    if logged_at.is_none_or(|logged_at| now.since(logged_at) >= LOG_INTERVAL) {
                        warn!("etcd cannot serve: {error}; trying again");
                        logged_at = Some(now);
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    // ---- Becoming the leader ----

    async fn try_to_lead(&mut self) -> Result<(), Hindrance> {
        check_version(&mut self.nodes).await?;
        check_prefix(&mut self.nodes, &self.keys, Some(self.file_size)).await?;
        loop {
            self.wait_for_vacancy().await?;
            let sent_at = self.shared.now();
            let granted = self.nodes.grant_lease(self.ttl_secs).await?;
            let ttl_secs = u64::try_from(granted.ttl_secs).unwrap_or(0);
            let safe_time = Nanos::from_nanos(ttl_secs * 1_000_000_000 / 5 * 4);
            let lease = Lease { id: granted.id, safe_time };
            self.shared.set_lease(lease.id);
            let deadline = sent_at + safe_time;
            if let Some(revision) = self.claim(lease, deadline).await? {
                self.shared.set_deadline(deadline);
                return self.begin(lease, revision).await;
            }
            // It would end by itself.
            let _ = self.nodes.revoke_lease(lease.id).await;
            // A lease may be too short to ever lead.
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Waits until the key of the leader does not exist.
    async fn wait_for_vacancy(&mut self) -> Result<(), Hindrance> {
        loop {
            let answer = self.nodes.get(Range::key(self.keys.leader())).await?;
            let Some(pair) = answer.pairs.first() else { return Ok(()) };
            let leader = String::from_utf8_lossy(&pair.value).into_owned();
            let is_new = !matches!(self.shared.role(), Role::StandingBy(known) if known == leader);
            if is_new {
                warn!("standing by: {leader} leads {}", self.keys.prefix());
                self.shared.set_role(Role::StandingBy(leader));
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
    async fn wait_for_end(&mut self, revision: i64) -> Result<bool, RequestError> {
        let deletion = self.nodes.watch(self.keys.leader(), revision).await?.await;
        if deletion.is_err() {
            self.nodes.next_node();
        }
        Ok(deletion.is_ok())
    }

    /// Creates the key of the leader with this lease. Returns the revision of that, or `None` if
    /// another server was first or the lease is too old.
    async fn claim(&mut self, lease: Lease, deadline: Nanos) -> Result<Option<i64>, Hindrance> {
        let key = self.keys.leader();
        while self.shared.now() < deadline {
            let value = self.name.clone().into_bytes();
            let txn = Txn {
                when: vec![Compare::Created(key.clone(), 0)],
                then: vec![Op::Put { key: key.clone(), value, lease: lease.id }],
                otherwise: vec![Op::get(key.clone())],
            };
            let mut answer = match self.nodes.txn(txn).await {
                Ok(answer) => answer,
                // It may have succeeded.
                Err(RequestError::Unavailable(_)) => {
                    sleep(RETRY_PAUSE).await;
                    continue;
                }
                Err(RequestError::LeaseEnded(_)) => return Ok(None),
                Err(error) => return Err(error.into()),
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
    async fn begin(&mut self, lease: Lease, revision: i64) -> Result<(), Hindrance> {
        tokio::spawn(self.clone().renew(lease, revision));
        tokio::spawn(self.clone().watch(revision));
        loop {
            match self.read_end(revision).await {
                Ok((format_revision, last_chunk)) => {
                    warn!("leading {}", self.keys.prefix());
                    let Candidate { file_size, must_be_unused: is_import, .. } = *self;
                    let leader =
                        Leader { revision, format_revision, file_size, is_import, last_chunk };
                    self.shared.set_role(Role::Leading(leader));
                    return Ok(());
                }
                Err(Hindrance::Passing(_)) if self.shared.may_answer() => sleep(RETRY_PAUSE).await,
                Err(Hindrance::Passing(error)) => {
                    self.shared.set_role(Role::Lost(error.to_string()));
                    return Ok(());
                }
                Err(lasting) => return Err(lasting),
            }
        }
    }

    /// Returns the revision of the key of the format, which exists after that, and the last chunk.
    async fn read_end(&mut self, revision: i64) -> Result<(i64, u64), Hindrance> {
        check_prefix(&mut self.nodes, &self.keys, Some(self.file_size)).await?;
        let last_chunk = Log::new(self.nodes.clone(), self.keys.clone()).last_chunk().await?;
        if self.must_be_unused && last_chunk > 0 {
            return Err(Hindrance::Lasting(format!("{} has jobs already", self.keys.prefix())));
        }
        let value = if self.must_be_unused { IMPORTING } else { &format_value(self.file_size) };
        let format = begin_format(&mut self.nodes, &self.keys, revision, value).await;
        match format {
            Ok(format_revision) => Ok((format_revision, last_chunk)),
            Err(ChangeError::Unknown(error)) => Err(error.into()),
            Err(ChangeError::NotLeading(reason)) => {
                Err(Hindrance::Passing(RequestError::Unavailable(reason)))
            }
        }
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
                    self.shared.set_deadline(sent_at + lease.safe_time);
                    sleep(pause).await;
                }
                Err(RequestError::LeaseEnded(text) | RequestError::Refused(text)) => {
                    return self.shared.set_role(Role::Lost(text));
                }
                Err(error) => {
                    if self.shared.lease_left() == Nanos::ZERO {
                        let reason = format!("the lease was not renewed in time: {error}");
                        return self.shared.set_role(Role::Lost(reason));
                    }
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
    }

    /// Renews the lease, and makes sure that the key of the leader is still there. A leader of etcd
    /// whose disk hangs may answer a renewal although the other nodes have elected another one, but
    /// it cannot read the key without them.
    async fn renew_once(
        &self,
        nodes: &mut Nodes,
        lease: Lease,
        revision: i64,
    ) -> Result<(), RequestError> {
        nodes.renew_lease(lease.id).await?;
        let answer = nodes.get(Range::key(self.keys.leader())).await?;
        match answer.pairs.first() {
            Some(pair) if pair.create_revision == revision => Ok(()),
            Some(_) | None => Err(RequestError::LeaseEnded(GONE.to_owned())),
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
                        return self.shared.set_role(Role::Lost(GONE.to_owned()));
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
pub async fn check_version(nodes: &mut Nodes) -> Result<(), Hindrance> {
    let version = nodes.version().await?;
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let found = parts.next().flatten().zip(parts.next().flatten());
    if found.is_some_and(|found| found >= OLDEST_VERSION) {
        return Ok(());
    }
    let (major, minor) = OLDEST_VERSION;
    Err(Hindrance::Lasting(format!("etcd {version} is older than {major}.{minor}")))
}

/// Fails if the keys of a prefix are not those of a binlog with files of this size.
pub async fn check_prefix(
    nodes: &mut Nodes,
    keys: &Keys,
    file_size: Option<u32>,
) -> Result<(), Hindrance> {
    // Both at one moment: another server may write its first keys.
    let others = Range { limit: 2, keys_only: true, ..Range::below(keys.all()) };
    let reads = vec![Op::get(keys.format()), Op::Get(others)];
    let answer = nodes.txn(Txn { then: reads, ..Txn::default() }).await?;
    let mut found = answer.found.into_iter();
    let (format, others) = (found.next().unwrap_or_default(), found.next().unwrap_or_default());
    if let Some(pair) = format.first() {
        if pair.value == IMPORTING.as_bytes() {
            return Err(Hindrance::Lasting(format!(
                "an import was begun and not completed; delete the keys that begin with {} and \
                 import again",
                keys.all()
            )));
        }
        return match (parse_format(&pair.value), file_size) {
            (None, _) => Err(Hindrance::Lasting(format!(
                "{} does not have a format that this version knows",
                keys.format()
            ))),
            (Some(found), Some(wanted)) if found != wanted => Err(Hindrance::Lasting(format!(
                "the files of this binlog have {found} bytes; start all its servers with -s {found}"
            ))),
            (Some(_), _) => Ok(()),
        };
    }
    let own = keys.leader();
    match others.iter().find(|pair| pair.key != own.as_bytes()) {
        None => Ok(()),
        Some(pair) => Err(Hindrance::Lasting(format!(
            "something else has keys with this prefix, such as {}; nothing was written",
            String::from_utf8_lossy(&pair.key)
        ))),
    }
}

/// Fails if there is no binlog with this prefix.
pub async fn check_used(nodes: &mut Nodes, keys: &Keys) -> Result<(), Hindrance> {
    let answer = nodes.get(Range::key(keys.format())).await?;
    if answer.pairs.is_empty() {
        return Err(Hindrance::Lasting(format!("no binlog has the prefix {}", keys.prefix())));
    }
    Ok(())
}

impl From<RequestError> for Hindrance {
    fn from(error: RequestError) -> Hindrance {
        match error {
            RequestError::Refused(text) => Hindrance::Lasting(text),
            passing @ (RequestError::Unavailable(_)
            | RequestError::LeaseEnded(_)
            | RequestError::TooLong(_)
            | RequestError::NoSpace(_)) => Hindrance::Passing(passing),
        }
    }
}

impl From<ReadError> for Hindrance {
    fn from(error: ReadError) -> Hindrance {
        match error {
            ReadError::Request(error) => error.into(),
            ReadError::Invalid(text) => Hindrance::Lasting(text),
        }
    }
}
