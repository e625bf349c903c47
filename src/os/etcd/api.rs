//! The part of etcd's interface that a binlog needs: the seam between the rules of this folder and the
//! client of etcd ([`super::client`]). Tests put a fake with virtual time in its place.
//!
//! Names and meanings are those of etcd. All requests but [`Node::grant`] may be sent again. A request
//! that fails, or whose answer is not awaited any more, may nevertheless be carried out, also later.

use std::pin::Pin;
use std::sync::Arc;

/// The answer that comes to a request.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Failure>> + Send>>;

/// A cluster of etcd nodes.
pub trait Etcd: Send + Sync {
    /// Connects to the node with this address.
    fn connect(&self, address: &str) -> Answer<Arc<dyn Node>>;
}

/// A connection to a node. All reads are linearizable.
pub trait Node: Send + Sync {
    fn txn(&self, txn: Txn) -> Answer<TxnAnswer>;
    fn grant(&self, ttl_secs: u32) -> Answer<Lease>;
    /// Renews a lease. An answer with a TTL of 0 is the failure [`NOT_FOUND`].
    fn keep_alive(&self, lease: i64) -> Answer<()>;
    fn revoke(&self, lease: i64) -> Answer<()>;
    /// Watches a key from a revision on, until it is deleted. The failure is that the node does not
    /// watch it any more.
    fn watch(&self, key: String, from: i64) -> Answer<()>;
    fn status(&self) -> Answer<Status>;
}

/// The state of a node.
#[derive(Clone, Debug)]
pub struct Status {
    /// The version of etcd.
    pub version: String,
    /// The size of its database in bytes, which etcd compares with its quota.
    pub db_bytes: u64,
    /// The bytes of it that are in use.
    pub used_bytes: u64,
}

/// Carries out `then` if all comparisons hold.
#[derive(Clone, Debug, Default)]
pub struct Txn {
    pub when: Vec<Compare>,
    pub then: Vec<Op>,
}

/// A condition of a transaction.
#[derive(Clone, Debug)]
pub enum Compare {
    /// The last change of the key was in this revision; 0 if it does not exist.
    Modified(String, i64),
    Exists(String),
}

#[derive(Clone, Debug)]
pub enum Op {
    Get(Range),
    /// The lease is 0 for a key without one.
    Put {
        key: String,
        value: Vec<u8>,
        lease: i64,
    },
    /// Deletes a key, or those up to `end`, without it.
    Delete {
        key: String,
        end: Option<String>,
    },
}

/// The keys from `key` up to `end`, without it; `key` alone if `end` is `None`.
#[derive(Clone, Debug, Default)]
pub struct Range {
    pub key: String,
    pub end: Option<String>,
    /// The most keys in the answer, or 0 for all.
    pub limit: i64,
    /// The revision to read, or 0 for the newest.
    pub revision: i64,
    /// The answer has no values.
    pub keys_only: bool,
}

/// A key as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub mod_revision: i64,
    pub lease: i64,
}

#[derive(Clone, Debug)]
pub struct TxnAnswer {
    pub succeeded: bool,
    /// The revision after the transaction.
    pub revision: i64,
    /// The keys that each operation has found, in their order; none if it was no [`Op::Get`].
    pub found: Vec<Vec<Pair>>,
}

#[derive(Clone, Copy, Debug)]
pub struct Lease {
    pub id: i64,
    /// The TTL that was granted, which may differ from the one that was asked for.
    pub ttl_secs: i64,
}

/// Why a request has failed, or why a server does not lead, or not any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
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

impl Op {
    pub fn get(key: String) -> Op {
        Op::Get(Range { key, ..Range::default() })
    }

    pub fn put(key: String, value: impl Into<Vec<u8>>) -> Op {
        Op::Put { key, value: value.into(), lease: 0 }
    }
}

impl Range {
    /// Returns the keys that begin with a text that ends in a slash.
    pub fn below(key: String) -> Range {
        let end = key.strip_suffix('/').map(|start| format!("{start}0"));
        assert!(end.is_some(), "{key} does not end in a slash, which 0 follows");
        Range { key, end, ..Range::default() }
    }
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

impl Failure {
    /// Returns the failure of a server that does not lead any more.
    pub fn lost(text: impl Into<String>) -> Failure {
        Failure { kind: Kind::Lost, text: text.into() }
    }

    /// Returns a failure that another start would not mend.
    pub fn lasting(text: impl Into<String>) -> Failure {
        Failure { kind: Kind::Lasting, text: text.into() }
    }

    /// Returns whether another try may succeed.
    pub fn may_pass(&self) -> bool {
        matches!(self.kind, Kind::Passing | Kind::NoSpace)
    }

    /// Returns a failure with a code of gRPC, or one of the connection. etcd's texts count only where
    /// answers with the same code differ.
    pub fn of_code(code: Option<i32>, text: String) -> Failure {
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
        Failure { kind, text: text + &remedy }
    }
}
