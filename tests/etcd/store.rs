//! The state of the fake: keys and leases. Of older revisions it has only the last deletion of each key.

use crate::fake::{Kind, failure};
use beanstalkd::testing::etcd::Failure;
use beanstalkd::testing::etcd::api::{Compare, Lease, NOT_FOUND, Op, Pair, Range, Txn, TxnAnswer};
use std::collections::BTreeMap;

/// The key of the leader of the only queue.
pub const LEADER: &str = "/jobs/leader";

#[derive(Clone)]
pub struct Store {
    revision: i64,
    /// Revisions before this one were dropped.
    compacted: i64,
    keys: BTreeMap<String, Pair>,
    /// The revision in which each key was deleted last.
    deleted: BTreeMap<String, i64>,
    leases: BTreeMap<i64, Granted>,
    last_lease: i64,
    pub has_no_space: bool,
    /// The TTL that is granted, if it is another one than was asked for.
    pub granted_ttl_secs: Option<i64>,
    /// The most bytes in a value.
    pub longest_value: usize,
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
            longest_value: 1_500_000,
        }
    }
}

impl Store {
    // ---- Keys ----

    /// Returns the kind of a transaction. Every change of a binlog must be fenced: rule 2.
    pub fn kind(txn: &Txn) -> Kind {
        let mut keys = txn.then.iter().filter_map(|op| match op {
            Op::Get(_) => None,
            Op::Put { key, .. } | Op::Delete { key, .. } => Some(key),
        });
        match keys.next() {
            None => Kind::Read,
            Some(key) if key == LEADER => Kind::Claim,
            Some(key) => {
                let is_fence = |compare: &Compare| matches!(compare, Compare::Modified(key, at) if key == LEADER && *at != 0);
                assert!(txn.when.iter().any(is_fence), "a change of {key} is not fenced");
                Kind::Write
            }
        }
    }

    pub fn txn(&mut self, txn: &Txn) -> Result<TxnAnswer, Failure> {
        for op in &txn.then {
            if let Op::Put { value, lease, .. } = op {
                if self.has_no_space {
                    return Err(no_space());
                }
                if value.len() > self.longest_value {
                    return Err(failure(3, "request is too large"));
                }
                if *lease != 0 && !self.leases.contains_key(lease) {
                    return Err(failure(NOT_FOUND, "requested lease not found"));
                }
            }
        }
        let succeeded = txn.when.iter().all(|compare| match compare {
            Compare::Modified(key, at) => self.get(key).map_or(0, |pair| pair.mod_revision) == *at,
            Compare::Exists(key) => self.get(key).is_some(),
        });
        let ops = if succeeded { &txn.then[..] } else { &[] };
        let revision = self.revision + 1;
        let mut found = Vec::new();
        for op in ops {
            found.push(match op {
                Op::Get(range) => self.range(range)?,
                Op::Put { key, value, lease } => {
                    self.put(revision, key, value, *lease);
                    Vec::new()
                }
                Op::Delete { key, end } => {
                    let range = Range { key: key.clone(), end: end.clone(), ..Range::default() };
                    for pair in self.range(&range)? {
                        self.delete(revision, str::from_utf8(&pair.key).expect("text"));
                    }
                    Vec::new()
                }
            });
        }
        Ok(TxnAnswer { succeeded, revision: self.revision, found })
    }

    fn put(&mut self, revision: i64, key: &str, value: &[u8], lease: i64) {
        let (key_bytes, value) = (key.as_bytes().to_vec(), value.to_vec());
        let pair = Pair { key: key_bytes, value, mod_revision: revision, lease };
        self.keys.insert(key.to_owned(), pair);
        self.revision = revision;
    }

    fn delete(&mut self, revision: i64, key: &str) {
        self.keys.remove(key);
        self.deleted.insert(key.to_owned(), revision);
        self.revision = revision;
    }

    pub fn get(&self, key: &str) -> Option<&Pair> {
        self.keys.get(key)
    }

    fn range(&self, range: &Range) -> Result<Vec<Pair>, Failure> {
        if (1..self.revision).contains(&range.revision) {
            return Err(compacted());
        }
        let end = range.end.clone().unwrap_or_else(|| format!("{}\0", range.key));
        let limit = if range.limit > 0 { range.limit } else { i64::MAX };
        let limit = usize::try_from(limit).expect("64 bits");
        let pairs = self.keys.range(range.key.clone()..end).take(limit);
        let mut pairs: Vec<Pair> = pairs.map(|(_, pair)| pair.clone()).collect();
        if range.keys_only {
            pairs.iter_mut().for_each(|pair| pair.value.clear());
        }
        Ok(pairs)
    }

    pub fn check_revision(&self, revision: i64) -> Result<(), Failure> {
        if revision < self.compacted { Err(compacted()) } else { Ok(()) }
    }

    pub fn compact(&mut self) {
        self.compacted = self.revision;
    }

    pub fn is_deleted_since(&self, key: &str, from: i64) -> bool {
        self.deleted.get(key).is_some_and(|&at| at >= from)
    }

    /// Empties a value, as no server does with a chunk in the middle of a file.
    pub fn overwrite(&mut self, key: &str, value: &str) {
        self.keys.get_mut(key).expect("the key is there").value = value.into();
    }

    /// Deletes a key, as an operator does.
    pub fn remove(&mut self, key: &str) {
        self.delete(self.revision + 1, key);
    }

    // ---- Leases ----

    pub fn grant(&mut self, ttl_secs: u32, now_ms: u64) -> Result<Lease, Failure> {
        if self.has_no_space {
            return Err(no_space());
        }
        self.last_lease += 1;
        let ttl_secs = self.granted_ttl_secs.unwrap_or(ttl_secs.into());
        let ttl_ms = u64::try_from(ttl_secs).expect("not negative") * 1_000;
        self.leases.insert(self.last_lease, Granted { ttl_ms, ends_ms: now_ms + ttl_ms });
        Ok(Lease { id: self.last_lease, ttl_secs })
    }

    pub fn keep_alive(&mut self, lease: i64, now_ms: u64) -> Result<(), Failure> {
        let granted = self.leases.get_mut(&lease);
        let granted = granted.ok_or_else(|| failure(NOT_FOUND, "requested lease not found"))?;
        granted.ends_ms = now_ms + granted.ttl_ms;
        Ok(())
    }

    pub fn revoke(&mut self, lease: i64) -> Result<(), Failure> {
        let revoked = self.leases.remove(&lease);
        revoked.ok_or_else(|| failure(NOT_FOUND, "requested lease not found"))?;
        let keys = self.keys.iter().filter(|(_, pair)| pair.lease == lease);
        let keys: Vec<String> = keys.map(|(key, _)| key.clone()).collect();
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
        self.leases.values_mut().for_each(|granted| granted.ends_ms = now_ms + granted.ttl_ms);
    }

    pub fn chunks(&self) -> usize {
        self.range(&Range::below("/jobs/log/".to_owned())).map_or(0, |pairs| pairs.len())
    }

    pub fn leader(&self) -> Option<(String, i64)> {
        let pair = self.get(LEADER)?;
        Some((String::from_utf8_lossy(&pair.value).into_owned(), pair.lease))
    }
}

fn no_space() -> Failure {
    failure(8, "mvcc: database space exceeded")
}

fn compacted() -> Failure {
    failure(11, "mvcc: required revision has been compacted")
}
