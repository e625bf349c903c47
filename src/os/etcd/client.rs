//! The real etcd: requests of [`super::api`] by the crate `etcd-client`.

use super::api::{
    Answer, Compare, Etcd, Failure, Found, Lease, NOT_FOUND, Node, Op, Pair, Range, Status, Txn,
    TxnAnswer,
};
use etcd_client::{
    Client, CompareOp, ConnectOptions, DeleteOptions, Error, EventType, GetOptions, GetResponse,
    PutOptions, ResponseHeader, TxnOp, TxnOpResponse, WatchOptions,
};
use std::sync::Arc;

/// A page of the log has at most 512 chunks of 256 KiB.
const LONGEST_ANSWER: usize = 160 * 1024 * 1024;

impl Etcd for ConnectOptions {
    fn connect(&self, address: &str) -> Answer<Arc<dyn Node>> {
        let (addresses, options) = ([address.to_owned()], self.clone());
        Box::pin(async move {
            let client = Client::connect(addresses, Some(options)).await?;
            Ok(Arc::new(client) as Arc<dyn Node>)
        })
    }
}

impl Node for Client {
    fn txn(&self, txn: Txn) -> Answer<TxnAnswer> {
        let mut client = self.kv_client();
        let ops = |ops: Vec<Op>| ops.into_iter().map(TxnOp::from).collect::<Vec<_>>();
        let when: Vec<_> = txn.when.into_iter().map(etcd_client::Compare::from).collect();
        let request = etcd_client::Txn::new().when(when).and_then(ops(txn.then));
        let request = request.or_else(ops(txn.otherwise));
        Box::pin(async move {
            let answer = client.txn(request).await?;
            let found = answer.op_responses().into_iter().map(|response| match response {
                TxnOpResponse::Get(got) => Found::from(got).pairs,
                TxnOpResponse::Put(_) | TxnOpResponse::Delete(_) | TxnOpResponse::Txn(_) => {
                    Vec::new()
                }
            });
            let revision = answer.header().map_or(0, ResponseHeader::revision);
            Ok(TxnAnswer { succeeded: answer.succeeded(), revision, found: found.collect() })
        })
    }

    fn range(&self, range: Range) -> Answer<Found> {
        let mut client = self.kv_client().max_decoding_message_size(LONGEST_ANSWER);
        let options = options(&range);
        Box::pin(async move { Ok(client.get(range.key, Some(options)).await?.into()) })
    }

    fn grant(&self, ttl_secs: u32) -> Answer<Lease> {
        let mut client = self.lease_client();
        Box::pin(async move {
            let granted = client.grant(ttl_secs.into(), None).await?;
            Ok(Lease { id: granted.id(), ttl_secs: granted.ttl() })
        })
    }

    /// Renews a lease, by the first answer of a new stream: answers have no number, so on an old
    /// stream a late one could be taken for that of another request.
    fn keep_alive(&self, lease: i64) -> Answer<()> {
        let mut client = self.lease_client();
        Box::pin(async move {
            client.keep_alive(lease).await?;
            Ok(())
        })
    }

    fn revoke(&self, lease: i64) -> Answer<()> {
        let mut client = self.lease_client();
        Box::pin(async move {
            client.revoke(lease).await?;
            Ok(())
        })
    }

    fn watch(&self, key: String, from: i64) -> Answer<Answer<()>> {
        let mut client = self.watch_client();
        Box::pin(async move {
            let options = WatchOptions::new().with_start_revision(from);
            let mut changes = client.watch(key, Some(options)).await?;
            let deletion: Answer<()> = Box::pin(async move {
                while let Some(message) = changes.message().await? {
                    if message.canceled() {
                        break;
                    }
                    let mut kinds = message.events().iter().map(|event| event.event_type());
                    if kinds.any(|kind| kind == EventType::Delete) {
                        return Ok(());
                    }
                }
                Err(Failure { code: None, text: "the node has ended a watch".to_owned() })
            });
            Ok(deletion)
        })
    }

    fn status(&self) -> Answer<Status> {
        let mut client = self.maintenance_client();
        Box::pin(async move {
            let status = client.status().await?;
            let bytes = |size| u64::try_from(size).unwrap_or(0);
            let (db_bytes, used_bytes) =
                (bytes(status.db_size()), bytes(status.raft_used_db_size()));
            Ok(Status { version: status.version().to_owned(), db_bytes, used_bytes })
        })
    }
}

fn options(range: &Range) -> GetOptions {
    let mut options = GetOptions::new().with_limit(range.limit).with_revision(range.revision);
    if let Some(end) = &range.end {
        options = options.with_range(end.as_str());
    }
    if range.keys_only {
        options = options.with_keys_only();
    }
    options
}

impl From<Compare> for etcd_client::Compare {
    fn from(compare: Compare) -> etcd_client::Compare {
        type Real = etcd_client::Compare;
        match compare {
            Compare::Created(key, at) => Real::create_revision(key, CompareOp::Equal, at),
            Compare::Modified(key, at) => Real::mod_revision(key, CompareOp::Equal, at),
            Compare::Exists(key) => Real::create_revision(key, CompareOp::Greater, 0),
        }
    }
}

impl From<Op> for TxnOp {
    fn from(op: Op) -> TxnOp {
        match op {
            Op::Get(range) => TxnOp::get(range.key.as_str(), Some(options(&range))),
            Op::Put { key, value, lease } => {
                TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)))
            }
            Op::Delete { key, end } => {
                let range = end.map(|end| DeleteOptions::new().with_range(end));
                TxnOp::delete(key, range)
            }
        }
    }
}

impl From<GetResponse> for Found {
    fn from(mut got: GetResponse) -> Found {
        let revision = got.header().map_or(0, ResponseHeader::revision);
        let pairs = got.take_kvs().into_iter().map(|pair| {
            let (create_revision, mod_revision) = (pair.create_revision(), pair.mod_revision());
            let lease = pair.lease();
            let (key, value) = pair.into_key_value();
            Pair { key, value, create_revision, mod_revision, lease }
        });
        Found { revision, pairs: pairs.collect(), more: got.more() }
    }
}

/// The text has the causes too.
impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
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
        Failure { code, text }
    }
}
