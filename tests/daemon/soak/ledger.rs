//! A journal of the jobs of all clients, under one lock.
//!
//! It is exact although clients read replies late, and a client that crashes reads none:
//!
//! - A job is noted as held when its `RESERVED` was read, and as let go before its holder sends a
//!   command that gives the job away, or closes. TTRs are long, so a `RESERVED` for a held job is
//!   an error.
//! - A delete without a reply may have been done or not. Every other delete must be acknowledged
//!   exactly once, and the job is never handed out again.
//! - After a server is killed, the next one starts when all connections to the first have ended.

use crate::harness::request::{body_number, numbered_body};
use std::collections::{BTreeMap, HashSet};

/// The number of a connection.
pub type Holder = u64;

#[derive(Default)]
pub struct Ledger {
    /// The put with the number `n` is at `n - 1`.
    puts: Vec<Put>,
    /// By id: jobs that were inserted or reserved, and not deleted.
    live: BTreeMap<u64, Job>,
    deleted: HashSet<u64>,
    /// At least the bytes that the records of all jobs need.
    pub live_bytes: u64,
    pub inserted: u64,
    pub reserved: u64,
}

struct Put {
    body_len: usize,
    record_bytes: u64,
    /// Known when a reply has it.
    id: Option<u64>,
}

#[derive(Default)]
struct Job {
    number: u64,
    is_acknowledged: bool,
    holder: Option<Holder>,
    /// A delete was sent whose reply was not read.
    may_be_deleted: bool,
}

impl Ledger {
    /// Notes a put that is about to be sent; returns the body for it.
    pub fn next_body(&mut self, body_len: usize, tube: &str) -> Vec<u8> {
        // The format needs 84 bytes for each job, the name of its tube, and its body.
        let record_bytes = (84 + tube.len() + body_len + b"\r\n".len()) as u64;
        self.live_bytes += record_bytes;
        self.puts.push(Put { body_len, record_bytes, id: None });
        numbered_body(self.puts.len() as u64, body_len)
    }

    /// Returns the number of jobs, as far as is known.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// Returns the number of jobs that connections hold.
    pub fn held(&self) -> usize {
        self.live.values().filter(|job| job.holder.is_some()).count()
    }

    /// Returns the id of a job at or after `from`, or of the first job.
    pub fn any_id(&self, from: u64) -> Option<u64> {
        let ids = self.live.range(from..).chain(&self.live);
        ids.map(|(&id, _)| id).next()
    }

    pub fn inserted(&mut self, id: u64, body: &[u8]) {
        self.note(id, body);
        if let Some(job) = self.live.get_mut(&id) {
            job.is_acknowledged = true;
        }
        self.inserted += 1;
    }

    pub fn reserved(&mut self, by: Holder, id: u64, body: &[u8]) {
        self.note(id, body);
        assert!(!self.deleted.contains(&id), "job {id} is reserved after its delete");
        let job = self.live.get_mut(&id).expect("it is not deleted");
        if let Some(holder) = job.holder.replace(by) {
            panic!("job {id} is held by the connections {holder} and {by}");
        }
        job.may_be_deleted = false;
        self.reserved += 1;
    }

    /// Notes that a holder is about to give a job away.
    pub fn let_go(&mut self, by: Holder, id: u64) {
        if let Some(job) = self.live.get_mut(&id) {
            job.holder.take_if(|holder| *holder == by);
        }
    }

    /// Notes a delete that is about to be sent, and whose reply may not be read.
    pub fn may_be_deleted(&mut self, id: u64) {
        self.live.get_mut(&id).expect("a held job is not deleted").may_be_deleted = true;
    }

    pub fn deleted(&mut self, by: Holder, id: u64) {
        let Some(job) = self.live.remove(&id) else { panic!("job {id} is deleted twice") };
        let may_delete = job.holder.is_none_or(|holder| holder == by);
        assert!(may_delete, "{by} has deleted job {id}, which {:?} holds", job.holder);
        self.deleted.insert(id);
        self.live_bytes -= self.put(job.number).record_bytes;
    }

    /// When no job is left, all that were acknowledged must have been deleted. Returns how many
    /// were, with a reply and perhaps.
    pub fn check_none_is_lost(&self) -> (usize, usize) {
        for (id, job) in &self.live {
            // A job that was reserved exists, even without a reply to its put.
            let known = if job.is_acknowledged { "was acknowledged" } else { "was seen" };
            assert!(job.may_be_deleted, "job {id} {known} and is lost");
        }
        (self.deleted.len(), self.live.len())
    }

    /// Asserts that the body of a job is one that was put for this job; returns its number.
    pub fn check_body(&self, id: u64, body: &[u8]) -> u64 {
        let number = body_number(body);
        let number = number.unwrap_or_else(|| panic!("the body of job {id} is not whole"));
        assert!(number <= self.puts.len() as u64, "no client has put the body of job {id}");
        let put = self.put(number);
        assert_eq!(body.len(), put.body_len, "the length of the body of job {id}");
        assert_eq!(put.id.unwrap_or(id), id, "two jobs have the same body");
        number
    }

    /// Notes that a job exists, or has existed.
    fn note(&mut self, id: u64, body: &[u8]) {
        let number = self.check_body(id, body);
        if self.put(number).id.is_none() {
            let is_new = !self.live.contains_key(&id) && !self.deleted.contains(&id);
            assert!(is_new, "id {id} is given out twice");
            self.live.insert(id, Job { number, ..Job::default() });
            self.puts[index(number)].id = Some(id);
        }
    }

    fn put(&self, number: u64) -> &Put {
        &self.puts[index(number)]
    }
}

/// Returns the index of the put with this number, which begins with 1.
fn index(number: u64) -> usize {
    usize::try_from(number - 1).expect("this many puts were noted")
}
