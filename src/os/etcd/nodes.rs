//! Requests to the nodes of etcd: one node at a time, the next one after each failure.
//!
//! A request that failed may nevertheless have been carried out, or be carried out later. So the
//! caller must be able to send it again.

use super::api::{Answer, Etcd, EtcdError, Kind, Node, PASSWORD, Result, USER, outcome};
use super::client::{Login, read_tls};
use crate::os::membership::EtcdOptions;
use etcd_client::{ConnectOptions, GetOptions, KeyValue, ResponseHeader, Txn, TxnOp};
use std::array::from_fn;
use std::collections::BTreeMap;
use std::env;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

/// The nodes, and a connection to one of them.
#[derive(Clone)]
pub struct Nodes {
    etcd: Arc<dyn Etcd>,
    addresses: Vec<String>,
    /// The time for one request.
    pub timeout: Duration,
    /// The time for a connection.
    connect_timeout: Duration,
    /// Why etcd may have closed a connection, which it does not report.
    hint: &'static str,
    current: usize,
    /// The id of the cluster of the nodes, for all clones; 0 before the first connection.
    cluster: Arc<AtomicU64>,
    /// The node that has answered last, to whichever clone.
    answering: Arc<AtomicUsize>,
    node: Option<Arc<dyn Node>>,
    /// The number of nodes in a row that have refused a request.
    refusals: usize,
}

/// The pause before a request is made again.
pub const RETRY_PAUSE: Duration = Duration::from_millis(100);
/// A page of the log may take longer than other answers.
const PAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without an answer to a ping for this long is given up.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// etcd takes 0.1 s and more of its time to check a password.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(2);

impl Nodes {
    /// Reads the files for TLS, and the user and the password from the environment.
    pub fn new(etcd: &EtcdOptions) -> Result<Nodes, String> {
        let timeout = Duration::from_secs(etcd.lease_ttl_secs.into()) / 5;
        let mut connect_timeout = timeout;
        let mut options = ConnectOptions::new()
            .with_keep_alive(PING_INTERVAL, timeout)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        let (mut scheme, mut hint) = ("http", " (etcd may want TLS: etcds://)");
        if let Some(files) = &etcd.tls {
            options = options.with_tls(read_tls(files)?);
            scheme = "https";
            hint = match files.identity {
                None => " (etcd may want a certificate: --etcd-cert and --etcd-key)",
                Some(_) => "",
            };
        }
        let variable = |name| match env::var(name) {
            Ok(value) => Ok(Some(value)),
            Err(env::VarError::NotPresent) => Ok(None),
            Err(env::VarError::NotUnicode(_)) => Err(format!("{name} is not UTF-8")),
        };
        match (variable(USER)?, variable(PASSWORD)?) {
            (Some(user), Some(password)) => {
                options = options.with_user(user, password);
                connect_timeout = timeout.max(LOGIN_TIMEOUT);
            }
            (None, None) => {}
            _ => return Err(format!("{USER} and {PASSWORD} need each other")),
        }
        let addresses = etcd.nodes.iter().map(|node| format!("{scheme}://{node}")).collect();
        options = options.with_connect_timeout(connect_timeout);
        let login = Login { options, tls: etcd.tls.clone() };
        let nodes = Nodes::over(Arc::new(login), addresses, timeout);
        Ok(Nodes { connect_timeout, hint, ..nodes })
    }

    /// Returns the nodes of an etcd with these addresses. A request may take `timeout`.
    pub fn over(etcd: Arc<dyn Etcd>, addresses: Vec<String>, timeout: Duration) -> Nodes {
        Nodes {
            etcd,
            addresses,
            timeout,
            connect_timeout: timeout,
            hint: "",
            current: 0,
            cluster: Arc::default(),
            answering: Arc::default(),
            node: None,
            refusals: 0,
        }
    }

    /// Returns how many nodes there are.
    pub fn count(&self) -> usize {
        self.addresses.len()
    }

    /// Returns one of these nodes alone, whatever its cluster is.
    pub fn only(&self, index: usize) -> Nodes {
        let address = self.addresses[index].clone();
        let (timeout, connect_timeout) = (self.timeout, self.connect_timeout);
        let one = Nodes::over(Arc::clone(&self.etcd), vec![address], timeout);
        Nodes { connect_timeout, ..one }
    }

    /// Ends a lease. Asks the node first that has answered last, to whichever clone.
    pub async fn revoke(&mut self, lease: i64) -> Result {
        self.node = None;
        self.current = self.answering.load(Ordering::Relaxed);
        ask_often(2 * self.count(), async || self.ask(|node| node.revoke(lease)).await).await
    }

    /// Reads pages of one moment, for which there is more time than for other requests. A node that hangs does
    /// not even find the first key, and is left sooner.
    pub async fn page<const READS: usize>(
        &mut self,
        reads: &[(String, GetOptions); READS],
    ) -> Result<[Vec<KeyValue>; READS]> {
        let (key, options) = reads[0].clone();
        self.read(self.timeout, &[(key, options.with_limit(1).with_keys_only())]).await?;
        Ok(self.read(self.timeout.max(PAGE_TIMEOUT), reads).await?.0)
    }

    /// Makes reads of one moment. Also returns the newest revision.
    pub async fn read<const READS: usize>(
        &mut self,
        most: Duration,
        reads: &[(String, GetOptions); READS],
    ) -> Result<([Vec<KeyValue>; READS], i64)> {
        let reads = reads.iter().cloned().map(|(key, options)| TxnOp::get(key, Some(options)));
        let txn = Txn::new().and_then(reads.collect::<Vec<_>>());
        let answer = self.ask_within(most, |node| node.txn(txn)).await?;
        let (revision, mut found) = outcome(&answer);
        Ok((from_fn(|_| found.next().unwrap_or_default()), revision))
    }

    /// Sends a request, for which there is the time of a short one.
    pub async fn ask<T>(&mut self, request: impl FnOnce(&dyn Node) -> Answer<T>) -> Result<T> {
        self.ask_within(self.timeout, request).await
    }

    /// Connects to the current node. Requests to nodes of two clusters would find two leaders. So a node is refused
    /// that has another cluster than before, as after a start with a wrong list of members, unless most nodes have it:
    /// then etcd was restored. The first node is refused if another cluster has as many of the nodes that answer.
    async fn connect(&self) -> Result<Arc<dyn Node>> {
        let (node, cluster) = self.connect_to(self.current).await?;
        let known = self.cluster.load(Ordering::Relaxed);
        if known != cluster && !self.may_join(cluster, known == 0).await {
            let text = "it is in another cluster than the other nodes".to_owned();
            return Err(EtcdError { kind: Kind::Passing, text });
        }
        self.cluster.store(cluster, Ordering::Relaxed);
        Ok(node)
    }

    /// Returns whether most nodes have the cluster of the current one, or, if it `is_first`, no other cluster has as
    /// many nodes.
    async fn may_join(&self, cluster: u64, is_first: bool) -> bool {
        let mut asked = JoinSet::new();
        for other in (0..self.count()).filter(|&other| other != self.current) {
            let nodes = self.clone();
            asked.spawn(async move { nodes.connect_to(other).await.ok().map(|(_, id)| id) });
        }
        let mut members = BTreeMap::from([(cluster, 1)]);
        while members[&cluster] * 2 <= self.count()
            && let Some(other) = asked.join_next().await
        {
            if let Ok(Some(id)) = other {
                *members.entry(id).or_default() += 1;
            }
        }
        let own = members.remove(&cluster).expect("the current node is a member");
        own * 2 > self.count() || is_first && members.into_values().all(|others| others < own)
    }

    /// Connects to a node. Also returns the id of its cluster.
    async fn connect_to(&self, index: usize) -> Result<(Arc<dyn Node>, u64)> {
        let connected = self.etcd.connect(&self.addresses[index]);
        let node = within(self.connect_timeout, connected).await?;
        let status = within(self.timeout, node.status()).await?;
        Ok((node, status.header().map_or(0, ResponseHeader::cluster_id)))
    }

    /// Sends a request, which may take this long.
    pub async fn ask_within<T>(
        &mut self,
        most: Duration,
        request: impl FnOnce(&dyn Node) -> Answer<T>,
    ) -> Result<T> {
        let answer = async {
            if self.node.is_none() {
                self.node = Some(self.connect().await?);
            }
            let node = self.node.as_ref().expect("it was connected");
            within(most, request(&**node)).await
        };
        let mut failure = match answer.await {
            Ok(answer) => {
                self.refusals = 0;
                self.answering.store(self.current, Ordering::Relaxed);
                return Ok(answer);
            }
            Err(failure) => failure,
        };
        let is_closed =
            ["connection closed", "broken pipe"].iter().any(|it| failure.text.contains(it));
        failure.text = format!("{}: {}", self.addresses[self.current], failure.text);
        if failure.kind == Kind::Passing {
            let hint = if is_closed { self.hint } else { "" };
            failure.text += &format!("{hint}; check that etcd runs there, and the URL of -b");
        }
        // One node may have a wrong certificate, or an old one. The others must refuse too, and not be gone.
        self.refusals = if failure.kind == Kind::Lasting { self.refusals + 1 } else { 0 };
        if failure.kind == Kind::Lasting && self.refusals < self.count() {
            failure.kind = Kind::Passing;
        }
        if failure.kind == Kind::Passing {
            self.node = None;
            self.current = (self.current + 1) % self.count();
        }
        Err(failure)
    }
}

/// Asks again after each failure that may pass, while the caller `may_go_on`. No other function asks again.
pub async fn ask_again<T>(
    mut ask: impl AsyncFnMut() -> Result<T>,
    mut may_go_on: impl FnMut(&EtcdError) -> bool,
) -> Result<T> {
    loop {
        match ask().await {
            Err(failure) if failure.may_pass() && may_go_on(&failure) => sleep(RETRY_PAUSE).await,
            outcome => return outcome,
        }
    }
}

/// Asks again until `tries` have failed: no lease ends them before.
pub async fn ask_often<T>(mut tries: usize, ask: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let may_go_on = |_: &EtcdError| {
        tries -= 1;
        tries > 0
    };
    ask_again(ask, may_go_on).await
}

async fn within<T>(most: Duration, answer: Answer<T>) -> Result<T> {
    let late = |_| EtcdError { kind: Kind::Passing, text: format!("no answer in {most:?}") };
    timeout(most, answer).await.map_err(late)?
}
