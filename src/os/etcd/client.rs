//! The real etcd: the requests of [`super::api`] by the crate `etcd-client`.

use super::api::{Answer, Etcd, EtcdError, NOT_FOUND, Node};
use crate::os::membership::TlsFiles;
use etcd_client::{
    Certificate, Client, ConnectOptions, Error, EventType, Identity, LeaseGrantResponse,
    StatusResponse, TlsOptions, Txn, TxnResponse, WatchOptions,
};
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// A page of the log has at most 512 chunks of 256 KiB.
const LONGEST_ANSWER: usize = 160 * 1024 * 1024;

/// The wait for the end of a stream that has brought its answer.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// How to connect to a node.
pub struct Login {
    /// With the certificates of the start.
    pub options: ConnectOptions,
    /// They are renewed in place. A server that has changed its user may not be allowed to read them again.
    pub tls: Option<TlsFiles>,
}

impl Etcd for Login {
    fn connect(&self, address: &str) -> Answer<Arc<dyn Node>> {
        let (addresses, mut options) = ([address.to_owned()], self.options.clone());
        if let Some(Ok(tls)) = self.tls.as_ref().map(read_tls) {
            options = options.with_tls(tls);
        }
        Box::pin(async move {
            let client = Client::connect(addresses, Some(options)).await?;
            Ok(Arc::new(client) as Arc<dyn Node>)
        })
    }
}

impl Node for Client {
    fn txn(&self, txn: Txn) -> Answer<TxnResponse> {
        let mut client = self.kv_client().max_decoding_message_size(LONGEST_ANSWER);
        Box::pin(async move { Ok(client.txn(txn).await?) })
    }

    fn grant(&self, ttl_secs: u32) -> Answer<LeaseGrantResponse> {
        let mut client = self.lease_client();
        Box::pin(async move { Ok(client.grant(ttl_secs.into(), None).await?) })
    }

    /// Renews a lease, by the first answer of a new stream: answers have no number, so on an old
    /// stream a late one could be taken for that of another request.
    fn keep_alive(&self, lease: i64) -> Answer<()> {
        let mut client = self.lease_client();
        Box::pin(async move {
            let (keeper, mut stream) = client.keep_alive(lease).await?;
            // etcd counts a stream that is dropped before its end as a request that has failed.
            drop(keeper);
            tokio::spawn(timeout(END_TIMEOUT, async move { drop(stream.message().await) }));
            Ok(())
        })
    }

    fn revoke(&self, lease: i64) -> Answer<()> {
        let mut client = self.lease_client();
        Box::pin(async move { Ok(client.revoke(lease).await.map(drop)?) })
    }

    fn watch(&self, key: String, from: i64) -> Answer<()> {
        let mut client = self.watch_client();
        Box::pin(async move {
            let options = WatchOptions::new().with_start_revision(from);
            let mut changes = client.watch(key, Some(options)).await?;
            while let Some(message) = changes.message().await?.filter(|it| !it.canceled()) {
                let mut kinds = message.events().iter().map(|event| event.event_type());
                if kinds.any(|kind| kind == EventType::Delete) {
                    return Ok(());
                }
            }
            Err(EtcdError::of_code(None, "the node has ended a watch".to_owned()))
        })
    }

    fn status(&self) -> Answer<StatusResponse> {
        let mut client = self.maintenance_client();
        Box::pin(async move { Ok(client.status().await?) })
    }
}

/// Reads the files for TLS.
pub fn read_tls(files: &TlsFiles) -> Result<TlsOptions, String> {
    let authorities = Certificate::from_pem(read_pem(&files.authorities, "CERTIFICATE")?);
    let tls = TlsOptions::new().ca_certificate(authorities);
    let Some((certificate, key)) = &files.identity else { return Ok(tls) };
    let certificate = read_pem(certificate, "CERTIFICATE")?;
    Ok(tls.identity(Identity::from_pem(certificate, read_pem(key, "PRIVATE KEY")?)))
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

/// The text has the causes too.
impl From<Error> for EtcdError {
    fn from(error: Error) -> EtcdError {
        let (code, mut text, mut cause) = if let Error::GRpcStatus(status) = &error {
            let cause = std::error::Error::source(status);
            (Some(status.code() as i32), status.message().to_owned(), cause)
        } else if let Error::LeaseKeepAliveError(text) = &error {
            (Some(NOT_FOUND), text.clone(), None)
        } else if let Error::TransportError(transport) = &error {
            (None, error.to_string(), std::error::Error::source(transport))
        } else {
            (None, error.to_string(), None)
        };
        while let Some(error) = cause {
            let more = error.to_string();
            if !text.contains(&more) {
                text = format!("{text}: {more}");
            }
            cause = error.source();
        }
        EtcdError::of_code(code, text)
    }
}
