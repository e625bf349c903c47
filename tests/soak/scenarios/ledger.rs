//! A journal of the jobs of all clients, under one lock.
//!
//! It is exact although clients read replies late, and a client that crashes reads none:
//!
//! - A job is noted as held when its `RESERVED` was read, and as let go before its holder sends a
//!   command that gives the job away, or closes. TTRs are long, so a `RESERVED` for a held job is
//!   an error.
//! - A server that is killed releases all jobs at once, but clients may read its last replies after
//!   its successor has handed the jobs out again. Every note has the number of the instance of the
//!   server that sent the reply.
//! - A delete without a reply may have been done or not. Every other delete must be acknowledged
//!   exactly once, and no later instance may hand the job out.

use std::collections::HashMap;

/// Which of the servers, in the order in which they were started.
pub type Instance = usize;

/// A connection to one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holder {
    pub instance: Instance,
    pub connection: u64,
}

#[derive(Default)]
pub struct Ledger {
    /// Of all instances.
    pids: Vec<u64>,
    jobs: HashMap<u64, Job>,
    ids: HashMap<u64, u64>,
    sent: u64,
    pub totals: Totals,
}

#[derive(Debug, Default, Clone, Copy)]
pub struct Totals {
    pub inserted: u64,
    pub reserved: u64,
    pub deleted: u64,
    /// Whose delete was sent, and the reply not read; if they were not seen again.
    pub perhaps_deleted: u64,
}

/// A job under its id.
struct Job {
    /// The number of its body.
    number: u64,
    is_acknowledged: bool,
    holder: Option<Holder>,
    /// The last instance that has handed it out.
    reserved_by: Option<Instance>,
    deletion: Deletion,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Deletion {
    None,
    Unknown,
    Told(Instance),
}

impl Ledger {
    /// A server has been started; the one before it has ended.
    pub fn begin_instance(&mut self, pid: u32) {
        self.pids.push(pid.into());
    }

    pub fn instances(&self) -> usize {
        self.pids.len()
    }

    /// The instance with this process id.
    pub fn instance(&self, pid: u64) -> Instance {
        let place = self.pids.iter().rposition(|&known| known == pid);
        place.expect("the instance was noted at its start")
    }

    /// Returns a number for one body.
    pub fn next_number(&mut self) -> u64 {
        self.sent += 1;
        self.sent
    }

    /// How many jobs are there, as far as is known.
    pub fn live(&self) -> u64 {
        self.totals.inserted.saturating_sub(self.totals.deleted)
    }

    pub fn inserted(&mut self, id: u64, number: u64) {
        self.job(id, number).is_acknowledged = true;
        self.totals.inserted += 1;
    }

    pub fn reserved(&mut self, by: Holder, id: u64, number: u64) {
        let present = self.pids.len() - 1;
        self.totals.reserved += 1;
        let job = self.job(id, number);
        if let Deletion::Told(instance) = job.deletion {
            assert!(by.instance < instance, "job {id} is reserved after it was deleted");
        }
        job.reserved_by = job.reserved_by.max(Some(by.instance));
        if by.instance < present {
            return;
        }
        if let Some(holder) = job.holder.replace(by) {
            assert!(holder.instance < present, "job {id} is held by {holder:?} and {by:?}");
        }
        if job.deletion == Deletion::Unknown {
            job.deletion = Deletion::None;
        }
    }

    /// It is about to be given away.
    pub fn let_go(&mut self, by: Holder, id: u64) {
        let job = self.jobs.get_mut(&id).expect("it was reserved");
        job.holder.take_if(|holder| *holder == by);
    }

    /// A delete is about to be sent whose reply will not be read.
    pub fn perhaps_deleted(&mut self, by: Holder, id: u64) {
        let job = self.jobs.get_mut(&id).expect("it was reserved");
        if job.holder == Some(by) && by.instance + 1 == self.pids.len() {
            job.deletion = Deletion::Unknown;
        }
    }

    pub fn deleted(&mut self, by: Holder, id: u64) {
        let job = self.jobs.get_mut(&id).expect("it was reserved");
        let is_first = !matches!(job.deletion, Deletion::Told(_));
        assert!(is_first, "job {id} is deleted twice");
        assert!(
            job.reserved_by <= Some(by.instance),
            "job {id} is there again after its delete was acknowledged"
        );
        job.holder.take_if(|holder| *holder == by);
        job.deletion = Deletion::Told(by.instance);
        self.totals.deleted += 1;
    }

    /// When no job is left, all that were acknowledged must have been deleted.
    pub fn check_none_is_lost(&mut self) {
        for (id, job) in &self.jobs {
            match job.deletion {
                Deletion::Told(_) => {}
                Deletion::Unknown => self.totals.perhaps_deleted += 1,
                Deletion::None => {
                    // A job that was reserved exists, even without a reply to its put.
                    let known = if job.is_acknowledged { "was acknowledged" } else { "was seen" };
                    panic!("job {id} {known} and is lost");
                }
            }
        }
    }

    fn job(&mut self, id: u64, number: u64) -> &mut Job {
        assert!(number <= self.sent, "no client has put the body of job {id}");
        let known = *self.ids.entry(number).or_insert(id);
        assert_eq!(known, id, "the same put has made two jobs");
        let job = self.jobs.entry(id).or_insert(Job {
            number,
            is_acknowledged: false,
            holder: None,
            reserved_by: None,
            deletion: Deletion::None,
        });
        assert_eq!(job.number, number, "id {id} is given out twice");
        job
    }
}
