//! Requests to the nodes of etcd: one node at a time, the next one after each failure.
//!
//! A request that failed may nevertheless have been carried out, or be carried out later. So the
//! caller must be able to send it again.

use super::api::{Answer, Etcd, Failure, Found, Lease, NOT_FOUND, Node, Range, Txn, TxnAnswer};
use super::options::EtcdOptions;
use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use std::env;
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The nodes, and a connection to one of them.
#[derive(Clone)]
pub struct Nodes {
    etcd: Arc<dyn Etcd>,
    addresses: Vec<String>,
    /// The time for one request.
    timeout: Duration,
    /// The time for a connection.
    connect_timeout: Duration,
    current: usize,
    node: Option<Arc<dyn Node>>,
    tls: Tls,
    /// The number of nodes in a row that have refused a request.
    refusals: usize,
}

/// Whether connections are encrypted, and whether this server shows a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    None,
    WithoutIdentity,
    WithIdentity,
}

/// Why a request failed.
#[derive(Clone, Debug)]
pub enum RequestError {
    /// The node does not answer, or cannot serve now. Another try may succeed.
    Unavailable(String),
    /// etcd has no space for more.
    NoSpace(String),
    /// The answer is too long.
    TooLong(String),
    /// The lease that the request names has ended.
    LeaseEnded(String),
    /// Another try will fail too.
    Refused(String),
}

/// Why the files for TLS cannot be used.
#[derive(Debug)]
pub struct FileError(String);

/// A page may take longer than other answers.
const PAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without an answer to a ping for this long is given up.
const PING_INTERVAL: Duration = Duration::from_secs(5);

/// etcd takes 0.1 s and more of its time to check a password.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(2);

const USER: &str = "BEANSTALKD_ETCD_USER";
const PASSWORD: &str = "BEANSTALKD_ETCD_PASSWORD";

impl Nodes {
    /// Reads the files for TLS, and the user and the password from the environment.
    pub fn new(etcd: &EtcdOptions) -> Result<Nodes, FileError> {
        let timeout = Duration::from_secs(etcd.lease_ttl_secs.into()) / 5;
        let mut connect_timeout = timeout;
        let mut options = ConnectOptions::new()
            .with_keep_alive(PING_INTERVAL, timeout)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        let tls = match etcd.tls.as_ref().map(|files| files.identity.is_some()) {
            None => Tls::None,
            Some(false) => Tls::WithoutIdentity,
            Some(true) => Tls::WithIdentity,
        };
        let scheme = if etcd.tls.is_some() { "https" } else { "http" };
        if let Some(files) = &etcd.tls {
            let authorities = Certificate::from_pem(read_pem(&files.authorities, "CERTIFICATE")?);
            let mut tls = TlsOptions::new().ca_certificate(authorities);
            if let Some((certificate, key)) = &files.identity {
                tls = tls.identity(Identity::from_pem(
                    read_pem(certificate, "CERTIFICATE")?,
                    read_pem(key, "PRIVATE KEY")?,
                ));
            }
            options = options.with_tls(tls);
        }
        let variable = |name| match env::var(name) {
            Ok(value) => Ok(Some(value)),
            Err(env::VarError::NotPresent) => Ok(None),
            Err(env::VarError::NotUnicode(_)) => Err(FileError(format!("{name} is not UTF-8"))),
        };
        match (variable(USER)?, variable(PASSWORD)?) {
            (Some(user), Some(password)) => {
                options = options.with_user(user, password);
                connect_timeout = timeout.max(LOGIN_TIMEOUT);
            }
            (None, None) => {}
            _ => return Err(FileError(format!("{USER} and {PASSWORD} need each other"))),
        }
        let addresses = etcd.nodes.iter().map(|node| format!("{scheme}://{node}")).collect();
        options = options.with_connect_timeout(connect_timeout);
        let nodes = Nodes::over(Arc::new(options), addresses, timeout);
        Ok(Nodes { connect_timeout, tls, ..nodes })
    }

    /// Returns the nodes of an etcd with these addresses. A request may take `timeout`.
    pub fn over(etcd: Arc<dyn Etcd>, addresses: Vec<String>, timeout: Duration) -> Nodes {
        Nodes {
            etcd,
            addresses,
            timeout,
            connect_timeout: timeout,
            current: 0,
            node: None,
            tls: Tls::None,
            refusals: 0,
        }
    }

    /// Returns the same nodes, to be asked over connections of their own and from the next node on.
    pub fn asking_next(&self) -> Nodes {
        let current = (self.current + 1) % self.addresses.len();
        Nodes { current, node: None, ..self.clone() }
    }

    /// Returns how many nodes there are.
    pub fn count(&self) -> usize {
        self.addresses.len()
    }

    /// Returns the time that one request may take.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    // ---- Requests ----

    pub async fn txn(&mut self, txn: Txn) -> Result<TxnAnswer, RequestError> {
        self.ask(|node| node.txn(txn)).await
    }

    /// Reads keys with short values.
    pub async fn get(&mut self, range: Range) -> Result<Found, RequestError> {
        self.ask(|node| node.range(range)).await
    }

    /// Reads many keys, or long values, for which there is more time.
    pub async fn get_page(&mut self, range: Range) -> Result<Found, RequestError> {
        self.ask_within(self.timeout.max(PAGE_TIMEOUT), |node| node.range(range)).await
    }

    pub async fn grant_lease(&mut self, ttl_secs: u32) -> Result<Lease, RequestError> {
        self.ask(|node| node.grant(ttl_secs)).await
    }

    pub async fn renew_lease(&mut self, lease: i64) -> Result<(), RequestError> {
        self.ask(|node| node.keep_alive(lease)).await
    }

    pub async fn revoke_lease(&mut self, lease: i64) -> Result<(), RequestError> {
        self.ask(|node| node.revoke(lease)).await
    }

    /// Watches a key from a revision on. The answer comes when the key is deleted.
    pub async fn watch(&mut self, key: String, from: i64) -> Result<Answer<()>, RequestError> {
        self.ask(|node| node.watch(key, from)).await
    }

    /// Returns the version of etcd.
    pub async fn version(&mut self) -> Result<String, RequestError> {
        self.ask(|node| node.status()).await
    }

    /// Asks the next node from now on.
    pub fn next_node(&mut self) {
        self.node = None;
        self.current = (self.current + 1) % self.addresses.len();
    }

    async fn ask<T>(
        &mut self,
        request: impl FnOnce(&dyn Node) -> Answer<T>,
    ) -> Result<T, RequestError> {
        self.ask_within(self.timeout, request).await
    }

    async fn ask_within<T>(
        &mut self,
        timeout: Duration,
        request: impl FnOnce(&dyn Node) -> Answer<T>,
    ) -> Result<T, RequestError> {
        let answer = async {
            let node = match &self.node {
                Some(node) => node,
                None => {
                    let connected = self.etcd.connect(&self.addresses[self.current]);
                    self.node.insert(within(self.connect_timeout, connected).await?)
                }
            };
            within(timeout, request(&**node)).await
        };
        let answer = answer.await.map_err(|error| error.at(&self.addresses[self.current]));
        if answer.is_ok() {
            self.refusals = 0;
        }
        answer.map_err(|error| match error {
            RequestError::Unavailable(text) => {
                let hint = self.hint(&text);
                self.next_node();
                RequestError::Unavailable(text + hint)
            }
            // One node may have a wrong certificate, or an old one.
            RequestError::Refused(text) if self.refusals + 1 < self.addresses.len() => {
                self.refusals += 1;
                self.next_node();
                RequestError::Unavailable(text)
            }
            other @ (RequestError::NoSpace(_)
            | RequestError::TooLong(_)
            | RequestError::LeaseEnded(_)
            | RequestError::Refused(_)) => other,
        })
    }

    /// Returns the likely reason why etcd has closed a connection, which it does not report.
    fn hint(&self, text: &str) -> &'static str {
        let is_closed = ["connection closed", "broken pipe"].iter().any(|what| text.contains(what));
        match self.tls {
            _ if !is_closed => "",
            Tls::None => " (etcd may want TLS: etcds://)",
            Tls::WithoutIdentity => " (etcd may want a certificate: --etcd-cert and --etcd-key)",
            Tls::WithIdentity => "",
        }
    }
}

async fn within<T>(timeout: Duration, answer: Answer<T>) -> Result<T, RequestError> {
    match tokio::time::timeout(timeout, answer).await {
        Ok(answer) => answer.map_err(RequestError::from),
        Err(_) => Err(RequestError::Unavailable(format!("no answer in {timeout:?}"))),
    }
}

impl RequestError {
    /// Adds the address of the node to the text.
    fn at(self, address: &str) -> RequestError {
        let at = |text| format!("{address}: {text}");
        match self {
            RequestError::Unavailable(text) => RequestError::Unavailable(at(text)),
            RequestError::NoSpace(text) => RequestError::NoSpace(at(text)),
            RequestError::TooLong(text) => RequestError::TooLong(at(text)),
            RequestError::LeaseEnded(text) => RequestError::LeaseEnded(at(text)),
            RequestError::Refused(text) => RequestError::Refused(at(text)),
        }
    }
}

/// The texts of etcd by which its answers differ: some have the same code.
impl From<Failure> for RequestError {
    fn from(Failure { code, text }: Failure) -> RequestError {
        const NO_SPACE: &str = "database space exceeded";
        const TOO_LONG: &str = "message length too large";
        const REFUSED: [&str; 10] = [
            "invalid user ID or password",
            "authentication is not enabled",
            "user name is empty",
            "permission denied",
            "request is too large",
            "required revision has been compacted",
            "invalid peer certificate",
            // The TLS library's words for an alert: the node does not accept the certificate.
            "received fatal alert",
            "keys may not be consistent",
            "certificate required",
        ];
        if text.contains(NO_SPACE) {
            return RequestError::NoSpace(text);
        }
        if text.contains(TOO_LONG) {
            return RequestError::TooLong(text);
        }
        if code == Some(NOT_FOUND) {
            return RequestError::LeaseEnded(text);
        }
        if REFUSED.iter().any(|refused| text.contains(refused)) {
            return RequestError::Refused(text);
        }
        RequestError::Unavailable(text)
    }
}

/// Reads a file in PEM format with a block of this kind.
fn read_pem(path: &Path, kind: &str) -> Result<Vec<u8>, FileError> {
    let wrong = |what: &dyn fmt::Display| FileError(format!("{}: {what}", path.display()));
    let text = fs::read(path).map_err(|error| wrong(&error))?;
    let has_kind = String::from_utf8_lossy(&text)
        .lines()
        .any(|line| line.starts_with("-----BEGIN ") && line.contains(kind));
    if has_kind { Ok(text) } else { Err(wrong(&format_args!("there is no {kind} in it"))) }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RequestError::Unavailable(text)
            | RequestError::NoSpace(text)
            | RequestError::TooLong(text)
            | RequestError::LeaseEnded(text)
            | RequestError::Refused(text) => f.write_str(text),
        }
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The options have the password.
        f.debug_struct("Nodes").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}
