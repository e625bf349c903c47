//! Requests to the nodes of etcd: one node at a time, the next one after each failure.
//!
//! A request that failed may nevertheless have been carried out, or be carried out later. So the
//! caller must be able to send it again.

use super::api::{
    Answer, DATA_LOSS, Etcd, FAILED_PRECONDITION, Failure, Found, INVALID_ARGUMENT, NOT_FOUND,
    Node, PERMISSION_DENIED, RESOURCE_EXHAUSTED, Range,
};
use super::membership::EtcdOptions;
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

/// Why something cannot be done.
#[derive(Clone, Debug)]
pub struct Error {
    pub kind: Kind,
    pub text: String,
}

/// What may help.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Another try. The one before may have succeeded.
    Passing,
    /// More space in etcd.
    NoSpace,
    /// A shorter request.
    TooLarge,
    /// Another start: the lease has ended, or another server leads.
    Lost,
    /// The operator.
    Lasting,
}

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
    pub fn new(etcd: &EtcdOptions) -> Result<Nodes, String> {
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

    /// Reads keys with short values.
    pub async fn get(&mut self, range: Range) -> Result<Found, Error> {
        self.ask(|node| node.range(range)).await
    }

    /// Reads many keys, or long values, for which there is more time.
    pub async fn get_page(&mut self, range: Range) -> Result<Found, Error> {
        self.ask_within(self.timeout.max(PAGE_TIMEOUT), |node| node.range(range)).await
    }

    /// Asks the next node from now on.
    pub fn next_node(&mut self) {
        self.node = None;
        self.current = (self.current + 1) % self.addresses.len();
    }

    /// Sends a request, for which there is the time of a short one.
    pub async fn ask<T>(
        &mut self,
        request: impl FnOnce(&dyn Node) -> Answer<T>,
    ) -> Result<T, Error> {
        self.ask_within(self.timeout, request).await
    }

    async fn ask_within<T>(
        &mut self,
        timeout: Duration,
        request: impl FnOnce(&dyn Node) -> Answer<T>,
    ) -> Result<T, Error> {
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
        let mut error = match answer.await {
            Ok(answer) => {
                self.refusals = 0;
                return Ok(answer);
            }
            Err(error) => error,
        };
        let hint = if error.kind == Kind::Passing { self.hint(&error.text) } else { "" };
        error.text = format!("{}: {}{hint}", self.addresses[self.current], error.text);
        // One node may have a wrong certificate, or an old one.
        if error.kind == Kind::Lasting && self.refusals + 1 < self.addresses.len() {
            self.refusals += 1;
            error.kind = Kind::Passing;
        }
        if error.kind == Kind::Passing {
            self.next_node();
        }
        Err(error)
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

async fn within<T>(timeout: Duration, answer: Answer<T>) -> Result<T, Error> {
    match tokio::time::timeout(timeout, answer).await {
        Ok(answer) => answer.map_err(Error::from),
        Err(_) => Err(Error::new(Kind::Passing, format!("no answer in {timeout:?}"))),
    }
}

impl Error {
    pub fn new(kind: Kind, text: impl Into<String>) -> Error {
        Error { kind, text: text.into() }
    }
}

/// etcd's texts count only where answers with the same code differ.
impl From<Failure> for Error {
    fn from(Failure { code, text }: Failure) -> Error {
        let has = |part| text.contains(part);
        let is_too_large = || has("too large") || has("larger than max");
        // The TLS library's words for the alert of a node that does not accept the certificate.
        let is_tls = ["invalid peer certificate", "received fatal alert", "certificate required"];
        let kind = match code {
            _ if is_tls.into_iter().any(has) => Kind::Lasting,
            Some(NOT_FOUND) => Kind::Lost,
            Some(RESOURCE_EXHAUSTED) if has("space exceeded") => Kind::NoSpace,
            Some(INVALID_ARGUMENT | RESOURCE_EXHAUSTED) if is_too_large() => Kind::TooLarge,
            // The next connection has a new token.
            Some(INVALID_ARGUMENT) if has("auth store is old") => Kind::Passing,
            Some(INVALID_ARGUMENT | PERMISSION_DENIED | FAILED_PRECONDITION | DATA_LOSS) => {
                Kind::Lasting
            }
            Some(_) | None => Kind::Passing,
        };
        if has("user name is empty") {
            let text = format!("etcd wants authentication: set {USER} and {PASSWORD} ({text})");
            return Error::new(kind, text);
        }
        Error::new(kind, text)
    }
}

/// Reads a file in PEM format with a block of this kind.
fn read_pem(path: &Path, kind: &str) -> Result<Vec<u8>, String> {
    let wrong = |what: &dyn fmt::Display| format!("{}: {what}", path.display());
    let text = fs::read(path).map_err(|error| wrong(&error))?;
    let has_kind = String::from_utf8_lossy(&text)
        .lines()
        .any(|line| line.starts_with("-----BEGIN ") && line.contains(kind));
    if has_kind { Ok(text) } else { Err(wrong(&format_args!("there is no {kind} in it"))) }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The options have the password.
        f.debug_struct("Nodes").field("addresses", &self.addresses).finish_non_exhaustive()
    }
}
