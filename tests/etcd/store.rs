//! The state of the fake: keys and leases. Of older revisions it has only the last deletion of each key.

use crate::fake::{Kind, failure};
use beanstalkd::testing::etcd::EtcdError;
use beanstalkd::testing::etcd::api::NOT_FOUND;
use beanstalkd::testing::etcd::client::proto::{
    PbCompare, PbKeyValue, PbLeaseGrantResponse, PbRangeResponse, PbResponseHeader, PbResponseOp,
    PbTargetUnion, PbTxnOpRequest, PbTxnOpResponse, PbTxnRequest, PbTxnResponse,
};
use beanstalkd::testing::etcd::client::{LeaseGrantResponse, TxnResponse};
use std::collections::BTreeMap;

/// The key of the leader of the only queue.
pub const LEADER: &str = "/jobs/leader";

#[derive(Clone)]
pub struct Store {
    revision: i64,
    /// Revisions before this one were dropped.
    compacted: i64,
    keys: BTreeMap<Vec<u8>, PbKeyValue>,
    /// The revision in which each key was deleted last.
    deleted: BTreeMap<Vec<u8>, i64>,
    leases: BTreeMap<i64, Granted>,
    last_lease: i64,
    pub has_no_space: bool,
    /// The TTL that is granted, if it is another one than was asked for.
    pub granted_ttl_secs: Option<i64>,
    /// The most keys that a request has found.
    pub most_found: usize,
    /// The most bytes in the values of a request.
    pub longest_request: usize,
}

#[derive(Clone)]
struct Granted {
    ttl_ms: u64,
    ends_ms: u64,
}

impl Default for Store {
    fn default() -> Store {
        Store {
            revision: 1,
            compacted: 0,
            keys: BTreeMap::new(),
            deleted: BTreeMap::new(),
            leases: BTreeMap::new(),
            last_lease: 100,
            has_no_space: false,
            granted_ttl_secs: None,
            most_found: 0,
            longest_request: 1_500_000,
        }
    }
}

impl Store {
    // ---- Keys ----

    /// Returns the kind of a transaction. Every change of a binlog must be fenced: rule 2.
    pub fn kind(txn: &PbTxnRequest) -> Kind {
        let mut keys = requests(txn).filter_map(|request| match request {
            PbTxnOpRequest::RequestPut(put) => Some(&put.key),
            PbTxnOpRequest::RequestDeleteRange(delete) => Some(&delete.key),
            PbTxnOpRequest::RequestRange(_) | PbTxnOpRequest::RequestTxn(_) => None,
        });
        match keys.next() {
            None => Kind::Read,
            Some(key) if key == LEADER.as_bytes() => Kind::Claim,
            Some(key) => {
                let is_fence = |compare: &PbCompare| {
                    let lease = compare.target_union.as_ref();
                    let leads =
                        lease.is_some_and(|it| matches!(it, PbTargetUnion::Lease(it) if *it != 0));
                    compare.key == LEADER.as_bytes() && leads
                };
                let key = key.escape_ascii();
                assert!(txn.compare.iter().any(is_fence), "a change of {key} is not fenced");
                Kind::Write
            }
        }
    }

    /// Returns the bytes of all values that a transaction puts.
    pub fn value_len(txn: &PbTxnRequest) -> usize {
        let len_of = |request: &PbTxnOpRequest| {
            if let PbTxnOpRequest::RequestPut(put) = request { put.value.len() } else { 0 }
        };
        requests(txn).map(len_of).sum()
    }

    pub fn txn(&mut self, txn: &PbTxnRequest) -> Result<TxnResponse, EtcdError> {
        let len = Store::value_len(txn);
        for request in requests(txn) {
            if let PbTxnOpRequest::RequestPut(put) = request {
                if self.has_no_space {
                    return Err(no_space());
                }
                if len > self.longest_request {
                    return Err(failure(3, "request is too large"));
                }
                if put.lease != 0 && !self.leases.contains_key(&put.lease) {
                    return Err(failure(NOT_FOUND, "requested lease not found"));
                }
            }
        }
        let succeeded = txn.compare.iter().all(|compare| {
            let pair = self.keys.get(&compare.key);
            match compare.target_union {
                Some(PbTargetUnion::ModRevision(at)) => {
                    pair.map_or(0, |pair| pair.mod_revision) == at
                }
                Some(PbTargetUnion::CreateRevision(0)) => pair.is_some(),
                Some(PbTargetUnion::Lease(lease)) => pair.is_some_and(|pair| pair.lease == lease),
                _ => panic!("no server compares {compare:?}"),
            }
        });
        let revision = self.revision + 1;
        let mut responses = Vec::new();
        let made = if succeeded { &txn.success } else { &txn.failure };
        for request in made.iter().filter_map(|op| op.request.as_ref()) {
            let mut found = PbRangeResponse::default();
            match request {
                PbTxnOpRequest::RequestRange(range) => {
                    if (1..self.revision).contains(&range.revision) {
                        return Err(compacted());
                    }
                    let limit = if range.limit > 0 { range.limit } else { i64::MAX };
                    let limit = usize::try_from(limit).expect("64 bits");
                    found.kvs = self.range(&range.key, &range.range_end).take(limit).collect();
                    self.most_found = self.most_found.max(found.kvs.len());
                    if range.keys_only {
                        found.kvs.iter_mut().for_each(|pair| pair.value.clear());
                    }
                }
                PbTxnOpRequest::RequestPut(put) => {
                    self.put(revision, &put.key, &put.value, put.lease);
                }
                PbTxnOpRequest::RequestDeleteRange(delete) => {
                    let pairs: Vec<_> = self.range(&delete.key, &delete.range_end).collect();
                    pairs.iter().for_each(|pair| self.delete(revision, &pair.key));
                }
                PbTxnOpRequest::RequestTxn(_) => panic!("no server nests transactions"),
            }
            let response = Some(PbTxnOpResponse::ResponseRange(found));
            responses.push(PbResponseOp { response });
        }
        let header = Some(PbResponseHeader { revision: self.revision, ..Default::default() });
        Ok(TxnResponse(PbTxnResponse { header, succeeded, responses }))
    }

    fn put(&mut self, revision: i64, key: &[u8], value: &[u8], lease: i64) {
        let (key, value) = (key.to_vec(), value.to_vec());
        let pair =
            PbKeyValue { key, value, mod_revision: revision, lease, ..PbKeyValue::default() };
        self.keys.insert(pair.key.clone(), pair);
        self.revision = revision;
    }

    fn delete(&mut self, revision: i64, key: &[u8]) {
        self.keys.remove(key);
        self.deleted.insert(key.to_vec(), revision);
        self.revision = revision;
    }

    pub fn get(&self, key: &str) -> Option<&PbKeyValue> {
        self.keys.get(key.as_bytes())
    }

    /// Returns the keys up to `end`, without it, or only the first one without an end.
    fn range(&self, key: &[u8], end: &[u8]) -> impl Iterator<Item = PbKeyValue> {
        let end = if end.is_empty() { [key, b"\0"].concat() } else { end.to_vec() };
        self.keys.range(key.to_vec()..end).map(|(_, pair)| pair.clone())
    }

    pub fn check_revision(&self, revision: i64) -> Result<(), EtcdError> {
        if revision < self.compacted { Err(compacted()) } else { Ok(()) }
    }

    pub fn compact(&mut self) {
        self.compacted = self.revision;
    }

    pub fn is_deleted_since(&self, key: &str, from: i64) -> bool {
        self.deleted.get(key.as_bytes()).is_some_and(|&at| at >= from)
    }

    /// Empties a value, as no server does with a chunk in the middle of a file.
    pub fn overwrite(&mut self, key: &str, value: &str) {
        self.keys.get_mut(key.as_bytes()).expect("the key is there").value = value.into();
    }

    /// Puts the value of a key under another one, as an operator does.
    pub fn copy(&mut self, from: &str, to: &str) {
        let value = self.get(from).expect("the key is there").value.clone();
        self.put(self.revision + 1, to.as_bytes(), &value, 0);
    }

    /// Deletes a key, as an operator does.
    pub fn remove(&mut self, key: &str) {
        self.delete(self.revision + 1, key.as_bytes());
    }

    // ---- Leases ----

    pub fn grant(&mut self, ttl_secs: u32, now_ms: u64) -> Result<LeaseGrantResponse, EtcdError> {
        if self.has_no_space {
            return Err(no_space());
        }
        self.last_lease += 1;
        let ttl_secs = self.granted_ttl_secs.unwrap_or(ttl_secs.into());
        let ttl_ms = u64::try_from(ttl_secs).expect("not negative") * 1_000;
        self.leases.insert(self.last_lease, Granted { ttl_ms, ends_ms: now_ms + ttl_ms });
        let (id, ttl) = (self.last_lease, ttl_secs);
        Ok(LeaseGrantResponse(PbLeaseGrantResponse { id, ttl, ..Default::default() }))
    }

    pub fn keep_alive(&mut self, lease: i64, now_ms: u64) -> Result<(), EtcdError> {
        let granted = self.leases.get_mut(&lease);
        let granted = granted.ok_or_else(|| failure(NOT_FOUND, "requested lease not found"))?;
        granted.ends_ms = now_ms + granted.ttl_ms;
        Ok(())
    }

    pub fn revoke(&mut self, lease: i64) -> Result<(), EtcdError> {
        let revoked = self.leases.remove(&lease);
        revoked.ok_or_else(|| failure(NOT_FOUND, "requested lease not found"))?;
        let keys = self.keys.iter().filter(|(_, pair)| pair.lease == lease);
        let keys: Vec<_> = keys.map(|(key, _)| key.clone()).collect();
        keys.iter().for_each(|key| self.delete(self.revision + 1, key));
        Ok(())
    }

    /// Ends the leases that were not renewed.
    pub fn end_leases(&mut self, now_ms: u64) {
        let ended = self.leases.iter().filter(|(_, granted)| granted.ends_ms <= now_ms);
        let ended: Vec<i64> = ended.map(|(&id, _)| id).collect();
        ended.into_iter().for_each(|id| drop(self.revoke(id)));
    }

    /// Puts another state in the place of this one. Leases begin again.
    pub fn restore(&mut self, state: Store, now_ms: u64) {
        let last_lease = self.last_lease;
        *self = Store { last_lease, ..state };
        self.renew_leases(now_ms);
    }

    /// Lets all leases begin again, as a new leader of etcd does.
    pub fn renew_leases(&mut self, now_ms: u64) {
        self.leases.values_mut().for_each(|granted| granted.ends_ms = now_ms + granted.ttl_ms);
    }

    pub fn chunks(&self) -> usize {
        self.range(b"/jobs/log/", b"/jobs/log0").count()
    }

    pub fn leader(&self) -> Option<(String, i64)> {
        let pair = self.get(LEADER)?;
        Some((String::from_utf8_lossy(&pair.value).into_owned(), pair.lease))
    }
}

fn requests(txn: &PbTxnRequest) -> impl Iterator<Item = &PbTxnOpRequest> {
    txn.success.iter().filter_map(|op| op.request.as_ref())
}

fn no_space() -> EtcdError {
    failure(8, "mvcc: database space exceeded")
}

fn compacted() -> EtcdError {
    failure(11, "mvcc: required revision has been compacted")
}
