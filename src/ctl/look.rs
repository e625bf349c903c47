//! The facts of tubes and of jobs, as a server reports them. Where it lacks `list-jobs`, the first job of
//! a state is found with `peek-ready` and its kind. It must not know what they are used for.

use super::conn::{Conn, Fields, Reply, WINDOW};
use super::print::json_string;
use super::{EXIT_PARTLY, args};
use crate::attention::{self, Problem, TubeFacts};
use crate::engine::time::Nanos;
use crate::os::failure::Failure;

/// A tube.
pub struct Tube {
    pub name: String,
    pub stats: Fields,
    /// Age minus delay of the oldest ready job, in seconds; 0 without one.
    pub oldest: u64,
}

impl Tube {
    /// Returns the number of jobs in a state, or in `any`.
    pub fn jobs(&self, state: &str) -> u64 {
        match state {
            "any" => ["ready", "reserved", "delayed", "buried"]
                .map(|state| self.jobs(state))
                .iter()
                .sum(),
            state => self.stats.number(&format!("current-jobs-{state}")),
        }
    }

    /// Returns the number of connections that watch it, without this one: each watches `default` until
    /// it ignores it.
    pub fn watching(&self) -> u64 {
        self.stats.number("current-watching").saturating_sub(u64::from(self.name == "default"))
    }

    /// Returns its problems, the worst first.
    pub fn problems(&self, has_recent_delete: bool) -> Vec<Problem> {
        let time = |secs: u64| Nanos::from_secs(u32::try_from(secs).unwrap_or(u32::MAX));
        let facts = TubeFacts {
            ready: self.jobs("ready"),
            held: self.jobs("reserved"),
            buried: self.jobs("buried"),
            watching: self.watching(),
            waiting: self.stats.number("current-waiting"),
            oldest: time(self.oldest),
            pause_left: time(self.stats.number("pause-time-left")),
            has_recent_delete,
            ..TubeFacts::default()
        };
        attention::of_tube(&self.name, &facts, None)
    }
}

/// Returns the names of all tubes, sorted.
pub fn tube_names(conn: &mut Conn) -> Result<Vec<String>, Failure> {
    let list = conn.ask("list-tubes")?.document("list-tubes")?.unwrap_or_default();
    let mut names: Vec<String> =
        list.lines().filter_map(|line| line.strip_prefix("- ")).map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// Returns those of these tubes that are there.
pub fn tubes(conn: &mut Conn, names: &[String]) -> Result<Vec<Tube>, Failure> {
    let replies = conn.ask_each(names, |name| format!("stats-tube {name}"))?;
    let tube = |(name, reply): (&String, Reply)| {
        let stats = reply.document("stats-tube").transpose()?;
        let stats = stats.map(|stats| Fields::of_document(&stats));
        Some(stats.map(|stats| Tube { name: name.clone(), stats, oldest: 0 }))
    };
    names.iter().zip(replies).filter_map(tube).collect()
}

/// Returns all tubes by name.
pub fn all_tubes(conn: &mut Conn) -> Result<Vec<Tube>, Failure> {
    let names = tube_names(conn)?;
    tubes(conn, &names)
}

/// Returns all tubes by name, with the wait of their oldest ready jobs.
pub fn all_tubes_and_waits(conn: &mut Conn) -> Result<Vec<Tube>, Failure> {
    let mut tubes = all_tubes(conn)?;
    let mut with_ready: Vec<&mut Tube> =
        tubes.iter_mut().filter(|tube| tube.jobs("ready") > 0).collect();
    let replies = conn.ask_each(&with_ready, |tube| format!("list-jobs {} ready 1", tube.name))?;
    let jobs: Vec<Option<Fields>> = match replies.first() {
        Some(reply) if reply.line == "UNKNOWN_COMMAND" => {
            let names: Vec<&str> = with_ready.iter().map(|tube| tube.name.as_str()).collect();
            peek(conn, &names, "ready")?
        }
        _ => {
            let first = |reply: Reply| listed(reply, "").map(|mut jobs| jobs.pop());
            replies.into_iter().map(first).collect::<Result<Vec<_>, Failure>>()?
        }
    };
    for (tube, job) in with_ready.iter_mut().zip(jobs) {
        let waited = |job: Fields| job.number("age").saturating_sub(job.number("delay"));
        tube.oldest = job.map_or(0, waited);
    }
    Ok(tubes)
}

/// Returns one tube, or the failure that it is not there.
pub fn tube(conn: &mut Conn, name: &str) -> Result<Tube, Failure> {
    let found = tubes(conn, &[args::tube(name)?.to_owned()])?.pop();
    found.ok_or_else(|| Failure::new(EXIT_PARTLY, format!("tube {name}: not found")))
}

/// Returns the statistics of jobs; `None` for those that are gone.
pub fn jobs(conn: &mut Conn, ids: &[u64]) -> Result<Vec<Option<Fields>>, Failure> {
    let fields = |reply: Reply| {
        let mut job = reply.document("stats-job")?.map(|stats| Fields::of_document(&stats));
        // The number of its binlog file.
        job.iter_mut().for_each(|job| job.0.retain(|(key, _)| key != "file"));
        Ok(job)
    };
    conn.ask_each(ids, |id| format!("stats-job {id}"))?.into_iter().map(fields).collect()
}

/// Returns the jobs in the reply to `list-jobs`, with their tube.
pub fn listed(reply: Reply, tube: &str) -> Result<Vec<Fields>, Failure> {
    let list = reply.document("list-jobs")?.unwrap_or_default();
    let mut jobs = Fields::of_entries(&list).0;
    for Fields(pairs) in &mut jobs {
        pairs.insert(pairs.len().min(1), ("tube".into(), json_string(tube)));
    }
    Ok(jobs)
}

/// Returns the first job of a state in each of these tubes, as `peek-ready` and its kind find it.
fn peek(conn: &mut Conn, tubes: &[&str], state: &str) -> Result<Vec<Option<Fields>>, Failure> {
    let peek = |tube: &&str| [format!("use {tube}"), format!("peek-{state}")];
    let requests: Vec<String> = tubes.iter().flat_map(peek).collect();
    let replies = conn.ask_each(&requests, String::clone)?.into_iter().skip(1).step_by(2);
    let id_and_bytes = |reply: Reply| {
        let id = reply.line.split(' ').nth(1).and_then(|id| id.parse().ok());
        reply.content("peek").map(|body| id.zip(body.map(|body| body.len())))
    };
    let found = replies.map(id_and_bytes).collect::<Result<Vec<_>, Failure>>()?;
    conn.used = tubes.last().map_or(String::new(), |tube| (*tube).to_owned());
    let ids: Vec<u64> = found.iter().flatten().map(|&(id, _)| id).collect();
    let mut jobs = jobs(conn, &ids)?.into_iter();
    let mut job = |(_, bytes): (u64, usize)| {
        let mut job = jobs.next().flatten()?;
        job.0.push(("bytes".into(), bytes.to_string()));
        Some(job)
    };
    Ok(found.into_iter().map(|found| found.and_then(&mut job)).collect())
}

/// The jobs of a tube in a state, or in `any`, page by page.
pub struct Pages {
    tube: String,
    state: &'static str,
    /// The page before ended with this job.
    after: u64,
    /// The number of jobs that may still come.
    left: u64,
    /// Whether a peek command stands in on a server without `list-jobs`. It finds one job of the state, and the
    /// next one once that job has left it.
    may_peek: bool,
    /// Whether it does.
    pub peeks: bool,
}

impl Pages {
    /// Returns the pages of `tube`, with at most `left` jobs after job `after`.
    pub fn new(tube: &str, state: &'static str, after: u64, left: u64, may_peek: bool) -> Pages {
        Pages { tube: tube.into(), state, after, left, may_peek, peeks: false }
    }

    /// Returns the next jobs; none after the last one.
    pub fn next(&mut self, conn: &mut Conn) -> Result<Vec<Fields>, Failure> {
        let Pages { tube, state, after, left, .. } = self;
        let count = (*left).min(WINDOW as u64);
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut jobs = Vec::new();
        if !self.peeks {
            let reply = conn.ask(&format!("list-jobs {tube} {state} {count} {after}"))?;
            self.peeks = reply.line == "UNKNOWN_COMMAND" && self.may_peek;
            if !self.peeks {
                jobs = listed(reply, tube)?;
            }
        }
        if self.peeks {
            let first = peek(conn, &[tube], state)?.pop().flatten();
            jobs.extend(first.filter(|job| job.number("id") != *after));
        }
        self.left -= (jobs.len() as u64).min(self.left);
        self.after = jobs.last().map_or(0, |job| job.number("id"));
        Ok(jobs)
    }
}
