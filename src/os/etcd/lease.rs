//! Leadership: a key with a lease, which is created only if it does not exist, and kept alive.
//!
//! The lease also ends by the clock of this server. No reply may leave later than the moment at which
//! the last successful renewal was SENT, plus four fifths of the TTL that etcd has granted. The clock
//! also runs while the machine is suspended. etcd can end a lease early, so the key is watched too.

use super::api::{EtcdError, Kind, Result, modified, outcome};
use super::keys::{ChunkNumber, IMPORTING, Keys, format_value, parse_format, printable};
use super::nodes::{Nodes, RETRY_PAUSE, ask_again};
use super::shared::{Shared, State};
use crate::engine::time::Nanos;
use crate::os::failure::remedy;
use crate::os::membership::{Duty, EtcdOptions, Standing};
use etcd_client::{GetOptions, KeyValue, LeaseGrantResponse, PutOptions, Txn, TxnOp};
use log::warn;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// A server that wants to lead, or a program that only reads the log.
#[derive(Clone)]
pub struct Member {
    pub etcd: EtcdOptions,
    pub duty: Duty,
    /// The name of this server.
    pub name: String,
    pub nodes: Nodes,
    pub keys: Keys,
    pub shared: Arc<Shared>,
    /// Where the lease is noted for `--leave`.
    pub lease_file: Option<PathBuf>,
}

/// What the keys of a prefix were at one moment.
pub struct Found {
    revision: i64,
    leader: Option<KeyValue>,
    /// The revision of the last change of the key of the format, or 0.
    format: i64,
}

/// The pause between two looks at the size of etcd's databases.
const SIZE_PAUSE: Duration = Duration::from_secs(1);
/// A failure is logged at this interval.
const LOG_INTERVAL: Nanos = Nanos::from_secs(10);
/// etcd should drop a revision sooner than this.
const REVISION_LIFETIME: Nanos = Nanos::from_secs(600);
/// The oldest etcd that is supported.
const OLDEST_VERSION: (u32, u32) = (3, 4);

impl Member {
    /// Waits until no other server leads, leads, and keeps the lease until it is lost.
    pub async fn lead(mut self) {
        let shared = Arc::clone(&self.shared);
        let failure = match ask_as_member(&shared, async || self.try_to_lead().await).await {
            Ok((lease, _note)) => {
                warn!("leading {}", self.keys.prefix);
                self.shared.won.notify_one();
                tokio::spawn(self.clone().watch_space());
                self.keep(&lease).await
            }
            Err(failure) => failure,
        };
        shared.set_standing(Err(failure));
    }

    // ---- Becoming the leader ----

    /// Returns the lease, and the file with it.
    async fn try_to_lead(&mut self) -> Result<(LeaseGrantResponse, Option<File>)> {
        loop {
            let found = self.check().await?;
            if let Some(leader) = &found.leader {
                self.stand_by(leader, found.revision).await;
                continue;
            }
            // Until this server has read the log, or finds another leader.
            self.shared.set_standing(Ok(Standing::Undecided));
            let sent_at = self.shared.now();
            let ttl_secs = self.etcd.lease_ttl_secs;
            let lease = self.nodes.ask(|node| node.grant(ttl_secs)).await?;
            let deadline = sent_at + safe_time(&lease);
            self.shared.state().lease = lease.id();
            let note = self.lease_file.as_ref().and_then(|path| {
                let noted = note_lease(path, lease.id()).inspect_err(|error| {
                    let (file, help) = (path.display(), remedy(error));
                    warn!(
                        "cannot write {file}: {error}{help}; if this server is killed, the next one waits \
                         for the end of its lease"
                    );
                });
                noted.ok()
            });
            let claimed = self.claim(&lease, deadline, &found).await;
            if let Ok(Some(revision)) = claimed {
                let mut state = self.shared.state();
                (state.deadline, state.revision) = (deadline, revision);
                return Ok((lease, note));
            }
            // It would end by itself.
            let _ = self.nodes.ask(|node| node.revoke(lease.id())).await;
            claimed?;
            // A lease may be too short to ever lead.
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Fails if etcd is too old, or the keys of the prefix are not those that this server needs.
    pub async fn check(&mut self) -> Result<Found> {
        // All at one moment: another server may write its first keys.
        let keys = &self.keys;
        let two = GetOptions::new().with_prefix().with_limit(2).with_keys_only();
        let one = |key| TxnOp::get(key, None);
        let names = |key| TxnOp::get(key, Some(two.clone()));
        let (format, leader) = (one(keys.format()), one(keys.leader()));
        let (all, files) = (names(keys.all()), names(keys.files()));
        let reads = [format, leader, all, files, names(keys.chunks())];
        // What etcd is asked to do if it is not asked to read, which never happens: so it only checks the rights of
        // the user.
        let write = Some(TxnOp::delete(keys.all(), None)).filter(|_| self.duty != Duty::Read);
        let txn = Txn::new().and_then(reads).or_else(Vec::from_iter(write));
        let answer = self.nodes.ask(|node| node.txn(txn)).await?;
        // etcd answers this without a user too, so it comes after what a node may refuse.
        let status = self.nodes.ask(|node| node.status()).await?;
        let version = status.version();
        let (revision, mut found) = outcome(&answer);
        let mut next = || found.next().unwrap_or_default();
        let (format, leader) = (next().pop(), next().pop());
        let (all, files, chunks) = (next(), next(), next());
        let other = all.iter().find(|pair| pair.key() != keys.leader().as_bytes());
        let is_importing = format.as_ref().is_some_and(|pair| pair.value() == IMPORTING.as_bytes());
        // After its end everything is looked at again.
        let waited_for = leader.as_ref().filter(|_| self.duty != Duty::Read);
        let size = format.as_ref().map(|pair| parse_format(pair.value()));
        let wrong = match (size, other) {
            _ if !is_supported(version) => {
                let (major, minor) = OLDEST_VERSION;
                format!("etcd {version} is older than {major}.{minor}")
            }
            (None, _) if !chunks.is_empty() => keys.missing(&keys.format()),
            (None, Some(other)) => format!(
                "something else has keys with this prefix, such as {}; nothing was written",
                printable(other.key())
            ),
            (None, None) if self.duty == Duty::Read => {
                format!("no binlog has the prefix {}", keys.prefix)
            }
            _ if waited_for.is_some_and(|leader| leader.lease() == 0) => {
                format!("{} has no lease: no server wrote it; delete it", keys.leader())
            }
            (Some(None), _) if is_importing && waited_for.is_none() => match &leader {
                Some(leader) => format!("{} imports a binlog", name_of(leader)),
                None => format!(
                    "an import was begun and not completed; delete the keys that begin with {} and \
                     import again",
                    keys.all()
                ),
            },
            (Some(None), _) if !is_importing => {
                format!("{} does not have a format that this version knows", keys.format())
            }
            (Some(Some(size)), _) if size != self.etcd.file_size && self.duty != Duty::Read => {
                format!(
                    "the files of this binlog have {size} bytes; start all its servers with -s {size}"
                )
            }
            _ if self.duty == Duty::Import && waited_for.is_none() && !files.is_empty() => format!(
                "{} has a binlog already; import into another prefix, or delete all keys that begin with \
                 {} to lose its jobs",
                keys.prefix,
                keys.all()
            ),
            (None, None) | (Some(_), _) => {
                let format = format.map_or(0, |pair| pair.mod_revision());
                return Ok(Found { revision, leader, format });
            }
        };
        Err(EtcdError::lasting(wrong))
    }

    /// Waits until the key of the leader is removed, or for half of a lease: a node that hangs must be left
    /// before the lease ends.
    async fn stand_by(&mut self, leader: &KeyValue, revision: i64) {
        let leader = name_of(leader);
        let standing = Standing::Standby(leader.clone());
        if self.shared.standing().as_ref() != Ok(&standing) {
            warn!("standing by: {leader} leads {}", self.keys.prefix);
            self.shared.set_standing(Ok(standing));
        }
        // Events may be missed while a node has no connection to the others.
        let ttl = Duration::from_secs(self.etcd.lease_ttl_secs.into());
        self.wait_for_end(revision, ttl / 2).await;
    }

    /// Waits until the key of the leader is removed after this revision, as far as one node knows.
    async fn wait_for_end(&mut self, revision: i64, most: Duration) {
        let (key, pause) = (self.keys.leader(), self.nodes.timeout);
        let end = async {
            let watched =
                self.nodes.ask_within(2 * most, |node| node.watch(key, revision + 1)).await;
            if watched.is_err() {
                sleep(pause).await;
            }
        };
        let _ = timeout(most, end).await;
    }

    /// Creates the key of the leader with this lease, and the first keys of the binlog. Returns the
    /// revision of that, or `None` if the keys have changed or the lease is too old.
    async fn claim(
        &mut self,
        lease: &LeaseGrantResponse,
        deadline: Nanos,
        found: &Found,
    ) -> Result<Option<i64>> {
        let (leader, format) = (self.keys.leader(), self.keys.format());
        let value = self.name.clone().into_bytes();
        let options = PutOptions::new().with_lease(lease.id());
        let mut then = vec![TxnOp::put(leader.clone(), value, Some(options))];
        if found.format == 0 {
            then.push(TxnOp::put(format.clone(), format_value(self.etcd.file_size), None));
            then.push(TxnOp::put(self.keys.chunk(0), "", None));
        }
        let when = [modified(leader.clone(), 0), modified(format, found.format)];
        let txn = Txn::new().when(when).and_then(then).or_else([TxnOp::get(leader, None)]);
        let (nodes, shared) = (&mut self.nodes, &self.shared);
        if shared.now() >= deadline {
            return Ok(None);
        }
        let claim = async || {
            let answer = nodes.ask(|node| node.txn(txn.clone())).await?;
            let (revision, found) = outcome(&answer);
            // An earlier try has succeeded if the lease is this one.
            let own = found.flatten().find(|pair| pair.lease() == lease.id());
            let own = own.map(|pair| pair.mod_revision());
            Ok(if answer.succeeded() { Some(revision) } else { own })
        };
        let claimed = ask_again(claim, |_| shared.now() < deadline).await;
        claimed.or_else(|failure| if failure.kind == Kind::Lost { Ok(None) } else { Err(failure) })
    }

    // ---- Staying the leader ----

    /// Renews the lease every fifth of its time, and when the key of the leader is removed, by short
    /// tries over different nodes. Returns why it is lost.
    async fn keep(&mut self, lease: &LeaseGrantResponse) -> EtcdError {
        let (shared, pause) = (Arc::clone(&self.shared), self.nodes.timeout);
        let has_time = |_: &EtcdError| shared.lease_left() > Nanos::ZERO;
        loop {
            match ask_again(async || self.renew(lease).await, has_time).await {
                Ok(revision) => self.wait_for_end(revision, pause).await,
                Err(EtcdError { kind: Kind::Lost | Kind::Lasting, text }) => {
                    return EtcdError::lost(text);
                }
                Err(EtcdError { text, .. }) => {
                    return EtcdError::lost(format!("the lease was not renewed in time: {text}"));
                }
            }
        }
    }

    /// Makes sure that the key of the leader is still there, and then renews the lease. A node that does not know of
    /// a new leader of etcd may answer a renewal, which has no effect, but it cannot read the key without the
    /// others. So it knew the leader at the time of the read, and one that etcd elects later renews all leases. The
    /// last chunk is there until a later one is, unless etcd was restored. Returns the newest revision.
    async fn renew(&mut self, lease: &LeaseGrantResponse) -> Result<i64> {
        let sent_at = self.shared.now();
        // From before the request, because changes go on meanwhile.
        let State { revision, last_chunk, .. } = *self.shared.state();
        let end = self.keys.chunk(ChunkNumber::MAX);
        let one = GetOptions::new().with_range(end).with_limit(1).with_keys_only();
        let reads = [(self.keys.leader(), GetOptions::new()), (self.keys.chunk(last_chunk), one)];
        let ([leader, chunks], newest) = self.nodes.read(self.nodes.timeout, &reads).await?;
        if leader.first().is_none_or(|pair| pair.lease() != lease.id()) {
            return Err(EtcdError::lost(LEASE_ENDED));
        }
        // Before this server has read the log, it names what is missing.
        if newest < revision || last_chunk > 0 && chunks.is_empty() {
            return Err(EtcdError::lost("etcd was restored to an older state"));
        }
        self.nodes.ask(|node| node.keep_alive(lease.id())).await?;
        self.shared.state().deadline = sent_at + safe_time(lease);
        Ok(newest)
    }

    /// Lets puts be refused before etcd is full, so that deletes work, and warns if etcd does not drop
    /// old revisions: its database grows without bound then.
    async fn watch_space(mut self) {
        // A connection to each stays: with passwords a new one takes etcd 0.1 s.
        let mut each: Vec<Nodes> =
            (0..self.nodes.count()).map(|index| self.nodes.only(index)).collect();
        let (mut noted, mut noted_at) = (self.shared.state().revision, self.shared.now());
        let (mut counted_len, mut refused_puts) = (0, false);
        loop {
            let stored_len = self.shared.state().stored_len;
            let (mut size, mut used) = (0, 0);
            for node in &mut each {
                if let Ok(status) = node.ask(|node| node.status()).await {
                    size = size.max(u64::try_from(status.db_size()).unwrap_or(0));
                    used = used.max(u64::try_from(status.raft_used_db_size()).unwrap_or(0));
                }
            }
            // Without an answer the look before counts.
            if size > 0 {
                let mut state = self.shared.state();
                // Perhaps since the last look.
                let refused = state.refuses_puts();
                (state.size, state.used, state.counted_len) = (size, used, counted_len);
                let (recent, refuses) = (state.recent_len(), refused || state.refuses_puts());
                drop(state);
                match (refused_puts, refuses) {
                    (false, true) => warn!(
                        "etcd has {size} bytes in its database, of which {used} and {recent} written \
                         since are in use, near its quota of {}: refusing puts, so that deletes work; \
                         compact and defragment etcd, or raise its quota and --etcd-quota",
                        self.etcd.quota
                    ),
                    (true, false) => warn!("etcd has space again: accepting puts"),
                    (false, false) | (true, true) => {}
                }
                refused_puts = refuses;
            }
            counted_len = stored_len;
            let (now, newest) = (self.shared.now(), self.shared.state().revision);
            if now.since(noted_at) >= REVISION_LIFETIME {
                let old = GetOptions::new().with_revision(noted);
                if self.nodes.page(&[(self.keys.leader(), old)]).await.is_ok() && newest > noted {
                    warn!(
                        "etcd keeps old revisions for more than {} s, until its quota is reached; \
                         start it with --auto-compaction-mode=periodic \
                         --auto-compaction-retention=1m",
                        REVISION_LIFETIME.whole_secs()
                    );
                }
                (noted, noted_at) = (newest, now);
            }
            sleep(SIZE_PAUSE).await;
        }
    }
}

/// Asks again after each failure that may pass, as long as this server is a member, and logs them.
pub async fn ask_as_member<T>(shared: &Shared, ask: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let mut logged_at = None;
    let is_member = |failure: &EtcdError| {
        let now = shared.now();
        // The next chunk is shorter.
        let is_too_large = failure.kind == Kind::TooLarge;
        if !is_too_large && logged_at.is_none_or(|logged_at| now.since(logged_at) >= LOG_INTERVAL) {
            warn!("etcd cannot serve; trying again: {}", failure.text);
            logged_at = Some(now);
        }
        shared.standing().is_ok()
    };
    ask_again(ask, is_member).await
}

/// Why a server does not lead any more that was not too slow.
pub const LEASE_ENDED: &str = "the key of the leader is gone: the lease has ended";

/// Returns the name of the server that leads.
pub fn name_of(leader: &KeyValue) -> String {
    printable(leader.value())
}

/// Returns whether this version of etcd is not too old.
fn is_supported(version: &str) -> bool {
    let mut parts = version.split('.').map(|part| part.parse::<u32>().ok());
    let number = parts.next().flatten().zip(parts.next().flatten());
    number.is_some_and(|number| number >= OLDEST_VERSION)
}

/// Returns the time for which a lease was granted, minus a fifth.
fn safe_time(lease: &LeaseGrantResponse) -> Nanos {
    let secs = u64::try_from(lease.ttl()).unwrap_or(0);
    Nanos::from_nanos(secs * 1_000_000_000 / 5 * 4)
}

/// Writes a lease into a file, so that `--leave` can end it after the process was killed. The file that is returned is
/// locked while it is open.
pub fn note_lease(path: &Path, lease: i64) -> io::Result<File> {
    let mut file = File::options().create(true).truncate(false).write(true).open(path)?;
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => io::Error::other("another server has locked it"),
        TryLockError::Error(error) => error,
    })?;
    file.set_len(0)?;
    writeln!(file, "{lease:x}")?;
    Ok(file)
}

/// Returns the lease in a file. It fails with [`ErrorKind::WouldBlock`] if the process has it open.
pub fn noted_lease(path: &Path) -> io::Result<i64> {
    let file = File::open(path)?;
    file.try_lock()?;
    let text = io::read_to_string(file)?;
    let lease = text.strip_suffix('\n').and_then(|text| i64::from_str_radix(text, 16).ok());
    lease.ok_or_else(|| io::Error::new(ErrorKind::InvalidData, "there is no lease in it"))
}
