//! The part of etcd's interface that a binlog needs: the seam between the rules of this folder and the
//! client of etcd ([`super::client`]). Tests put a fake with virtual time in its place.
//!
//! Requests and answers are those of the crate `etcd-client`. All requests but [`Node::grant`] may be sent
//! again. A request that fails, or whose answer is not awaited any more, may nevertheless be carried out,
//! also later.

use etcd_client::{
    Compare, CompareOp, KeyValue, LeaseGrantResponse, ResponseHeader, StatusResponse, Txn,
    TxnOpResponse, TxnResponse,
};
use std::pin::Pin;
use std::sync::Arc;

/// The result of a request to etcd, or of work that needs some.
pub type Result<T = (), E = EtcdError> = std::result::Result<T, E>;

/// The answer that comes to a request.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T>> + Send>>;

/// A cluster of etcd nodes.
pub trait Etcd: Send + Sync {
    /// Connects to the node with this address.
    fn connect(&self, address: &str) -> Answer<Arc<dyn Node>>;
}

/// A connection to a node. All reads are linearizable.
pub trait Node: Send + Sync {
    fn txn(&self, txn: Txn) -> Answer<TxnResponse>;
    /// The TTL that is granted may differ from the one that was asked for.
    fn grant(&self, ttl_secs: u32) -> Answer<LeaseGrantResponse>;
    /// Renews a lease. An answer with a TTL of 0 is the failure [`NOT_FOUND`].
    fn keep_alive(&self, lease: i64) -> Answer<()>;
    fn revoke(&self, lease: i64) -> Answer<()>;
    /// Watches a key from a revision on, until it is deleted. The failure is that the node does not
    /// watch it any more.
    fn watch(&self, key: String, from: i64) -> Answer<()>;
    fn status(&self) -> Answer<StatusResponse>;
}

/// Returns the condition that the last change of a key was in this revision; 0 if it does not exist.
pub fn modified(key: String, revision: i64) -> Compare {
    Compare::mod_revision(key, CompareOp::Equal, revision)
}

/// Returns the condition that a key exists.
pub fn exists(key: String) -> Compare {
    Compare::create_revision(key, CompareOp::Greater, 0)
}

/// Returns the revision after a transaction, and the keys that each of its reads has found.
pub fn outcome(answer: &TxnResponse) -> (i64, impl Iterator<Item = Vec<KeyValue>>) {
    let found = answer.op_responses().into_iter().filter_map(|response| match response {
        TxnOpResponse::Get(mut got) => Some(got.take_kvs()),
        TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => None,
    });
    (answer.header().map_or(0, ResponseHeader::revision), found)
}

/// Why a request has failed, or why a server does not lead, or not any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdError {
    /// What helps.
    pub kind: Kind,
    /// The reason.
    pub text: String,
}

/// What helps after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Another try. The one before may have succeeded.
    Passing,
    /// More space in etcd, and then another try.
    NoSpace,
    /// A shorter request.
    TooLarge,
    /// Another start: the lease has ended, or another server leads.
    Lost,
    /// The operator.
    Lasting,
}

/// The codes of gRPC for a wrong request, a lease that has ended, a missing right, a lack of space, a
/// request that does not fit the state of etcd, and lost data.
const INVALID_ARGUMENT: i32 = 3;
pub const NOT_FOUND: i32 = 5;
const PERMISSION_DENIED: i32 = 7;
const RESOURCE_EXHAUSTED: i32 = 8;
const FAILED_PRECONDITION: i32 = 9;
const DATA_LOSS: i32 = 15;

/// The variables of the environment that have the name and the password for etcd.
pub const USER: &str = "BEANSTALKD_ETCD_USER";
pub const PASSWORD: &str = "BEANSTALKD_ETCD_PASSWORD";

impl EtcdError {
    /// Returns the failure of a server that does not lead any more.
    pub fn lost(text: impl Into<String>) -> EtcdError {
        EtcdError { kind: Kind::Lost, text: text.into() }
    }

    /// Returns a failure that another start would not mend.
    pub fn lasting(text: impl Into<String>) -> EtcdError {
        EtcdError { kind: Kind::Lasting, text: text.into() }
    }

    /// Returns whether another try may succeed.
    pub fn may_pass(&self) -> bool {
        matches!(self.kind, Kind::Passing | Kind::NoSpace | Kind::TooLarge)
    }

    /// Returns a failure with a code of gRPC, or one of the connection. etcd's texts count only where
    /// answers with the same code differ.
    pub fn of_code(code: Option<i32>, text: String) -> EtcdError {
        let has = |part| text.contains(part);
        // The TLS library's words for the alert of a node that does not accept the certificate.
        let is_tls = ["invalid peer certificate", "received fatal alert", "certificate required"];
        let kind = match code {
            _ if is_tls.into_iter().any(has) => Kind::Lasting,
            Some(NOT_FOUND) => Kind::Lost,
            Some(RESOURCE_EXHAUSTED) if has("space exceeded") => Kind::NoSpace,
            Some(INVALID_ARGUMENT | RESOURCE_EXHAUSTED)
                if has("too large") || has("larger than max") =>
            {
                Kind::TooLarge
            }
            // The next connection has a new token.
            Some(INVALID_ARGUMENT) if has("auth store is old") => Kind::Passing,
            Some(INVALID_ARGUMENT | PERMISSION_DENIED | FAILED_PRECONDITION | DATA_LOSS) => {
                Kind::Lasting
            }
            Some(_) | None => Kind::Passing,
        };
        let remedy = if has("user name is empty") {
            format!("; set {USER} and {PASSWORD}, because etcd wants authentication")
        } else if has("authentication is not enabled") {
            format!("; unset {USER} and {PASSWORD}, or enable it in etcd")
        } else if has("permission denied") {
            "; the user needs a role that can read and write all keys of the prefix".to_owned()
        } else if kind == Kind::NoSpace {
            "; compact and defragment etcd, or raise its quota, then disarm its alarm".to_owned()
        } else {
            String::new()
        };
        EtcdError { kind, text: text + &remedy }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_and_what_lasts_differ() {
        for (code, text, kind) in [
            (None, "connection refused", Kind::Passing),
            (None, "invalid peer certificate: Expired", Kind::Lasting),
            (None, "received fatal alert: BadCertificate", Kind::Lasting),
            (Some(INVALID_ARGUMENT), "user name is empty", Kind::Lasting),
            (Some(INVALID_ARGUMENT), "revision of auth store is old", Kind::Passing),
            (Some(INVALID_ARGUMENT), "request is too large", Kind::TooLarge),
            (Some(RESOURCE_EXHAUSTED), "trying to send message larger than max", Kind::TooLarge),
            (Some(RESOURCE_EXHAUSTED), "mvcc: database space exceeded", Kind::NoSpace),
            (Some(RESOURCE_EXHAUSTED), "too many requests", Kind::Passing),
            (Some(NOT_FOUND), "requested lease not found", Kind::Lost),
            (Some(PERMISSION_DENIED), "permission denied", Kind::Lasting),
        ] {
            assert_eq!(EtcdError::of_code(code, text.to_owned()).kind, kind, "{text}");
        }
    }
}
