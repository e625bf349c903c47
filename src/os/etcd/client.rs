//! The real etcd: requests of [`super::api`] by the crate `etcd-client`.

use super::api::{
    Answer, Compare, Etcd, Failure, Lease, NOT_FOUND, Node, Op, Pair, Range, Status, Txn, TxnAnswer,
};
use etcd_client::{
    Client, CompareOp, ConnectOptions, DeleteOptions, Error, EventType, GetOptions, KeyValue,
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
        let mut client = self.kv_client().max_decoding_message_size(LONGEST_ANSWER);
        let when: Vec<_> = txn.when.into_iter().map(etcd_client::Compare::from).collect();
        let then: Vec<_> = txn.then.into_iter().map(TxnOp::from).collect();
        let request = etcd_client::Txn::new().when(when).and_then(then);
        Box::pin(async move {
            let answer = client.txn(request).await?;
            let found = answer.op_responses().into_iter().map(|response| {
                let TxnOpResponse::Get(mut got) = response else { return Vec::new() };
                got.take_kvs().into_iter().map(Pair::from).collect()
            });
            let revision = answer.header().map_or(0, ResponseHeader::revision);
            Ok(TxnAnswer { succeeded: answer.succeeded(), revision, found: found.collect() })
        })
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
        Box::pin(async move { Ok(client.keep_alive(lease).await.map(drop)?) })
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
            Err(Failure::of_code(None, "the node has ended a watch".to_owned()))
        })
    }

    fn status(&self) -> Answer<Status> {
        let mut client = self.maintenance_client();
        Box::pin(async move {
            let status = client.status().await?;
            let bytes = |size| u64::try_from(size).unwrap_or(0);
            Ok(Status {
                version: status.version().to_owned(),
                db_bytes: bytes(status.db_size()),
                used_bytes: bytes(status.raft_used_db_size()),
            })
        })
    }
}

impl From<Compare> for etcd_client::Compare {
    fn from(compare: Compare) -> etcd_client::Compare {
        type Real = etcd_client::Compare;
        match compare {
            Compare::Modified(key, at) => Real::mod_revision(key, CompareOp::Equal, at),
            Compare::Exists(key) => Real::create_revision(key, CompareOp::Greater, 0),
        }
    }
}

impl From<Op> for TxnOp {
    fn from(op: Op) -> TxnOp {
        match op {
            Op::Get(Range { key, end, limit, revision, keys_only }) => {
                let mut options = GetOptions::new().with_limit(limit).with_revision(revision);
                if let Some(end) = end {
                    options = options.with_range(end);
                }
                TxnOp::get(key, Some(if keys_only { options.with_keys_only() } else { options }))
            }
            Op::Put { key, value, lease } => {
                TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease)))
            }
            Op::Delete { key, end } => {
                TxnOp::delete(key, end.map(|end| DeleteOptions::new().with_range(end)))
            }
        }
    }
}

impl From<KeyValue> for Pair {
    fn from(pair: KeyValue) -> Pair {
        let (mod_revision, lease) = (pair.mod_revision(), pair.lease());
        let (key, value) = pair.into_key_value();
        Pair { key, value, mod_revision, lease }
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
        Failure::of_code(code, text)
    }
}
