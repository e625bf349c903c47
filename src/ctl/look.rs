//! The facts of tubes and of jobs, as a server reports them. Where it lacks `list-jobs`, the first job of
//! a state is found with `peek-ready` and its kind. It must not know what they are used for.

use super::conn::{Conn, Fields, Reply, WINDOW};
use super::print::json_string;
use super::{EXIT_PARTLY, Result, args};
use crate::attention::{self, Problem, TubeFacts};
use crate::engine::time::Nanos;
use crate::os::failure::Failure;
use std::fmt::Display;

/// The states of jobs.
pub const STATES: [&str; 4] = ["ready", "reserved", "delayed", "buried"];

/// The states of jobs that no worker holds. Commands such as `peek-ready` find a job in each.
pub const NOT_HELD: &[&str] = &["buried", "delayed", "ready"];

/// In one look it is not known whether a job was deleted in this time.
pub const TIME_TO_DELETE: Nanos = Nanos::from_secs(5);

/// A tube, as it was at one time.
#[derive(Default)]
pub struct Tube {
    pub name: String,
    pub stats: Fields,
    /// Age minus delay of the oldest ready job, in seconds; 0 without one.
    pub oldest: u64,
    /// The time of this look.
    pub seen_at: Nanos,
    /// The time of the last look that saw that jobs were deleted.
    pub deleted_at: Option<Nanos>,
    /// Jobs put and jobs deleted per second since the look before, if there was one.
    pub rates: Option<[f64; 2]>,
}

impl Tube {
    /// Returns the number of jobs in a state, or in `any`.
    pub fn jobs(&self, state: &str) -> u64 {
        let states = STATES.iter().filter(|own| state == "any" || state == **own);
        states.map(|state| self.stats.number(&format!("current-jobs-{state}"))).sum()
    }

    /// Returns the number of connections that watch it, without this one: each watches `default` until
    /// it ignores it.
    pub fn watching(&self) -> u64 {
        self.stats.number("current-watching").saturating_sub(u64::from(self.name == "default"))
    }

    /// Returns its problems, the worst first.
    pub fn problems(&self) -> Vec<Problem> {
        let time = |secs: u64| Nanos::from_secs(u32::try_from(secs).unwrap_or(u32::MAX));
        let is_recent = |moment| self.seen_at.since(moment) < TIME_TO_DELETE;
        let facts = TubeFacts {
            ready: self.jobs("ready"),
            held: self.jobs("reserved"),
            buried: self.jobs("buried"),
            watching: self.watching(),
            waiting: self.stats.number("current-waiting"),
            oldest: time(self.oldest),
            pause_left: time(self.stats.number("pause-time-left")),
            has_recent_delete: self.deleted_at.is_some_and(is_recent),
            ..TubeFacts::default()
        };
        attention::of_tube(&self.name, &facts, None)
    }
}

/// Returns the names of all tubes, sorted.
pub fn tube_names(conn: &mut Conn) -> Result<Vec<String>> {
    let list = conn.ask("list-tubes")?.document("list-tubes")?.unwrap_or_default();
    let names = list.lines().filter_map(|line| line.strip_prefix("- "));
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

/// Returns the statistics of the server.
pub fn server(conn: &mut Conn) -> Result<Fields> {
    Ok(conn.ask("stats")?.fields("stats")?.unwrap_or_default())
}

/// Returns the documents of a stats command for each of these; `None` for what is not there.
fn stats<T: Display>(conn: &mut Conn, command: &str, of: &[T]) -> Result<Vec<Option<Fields>>> {
    let replies = conn.ask_each(of, |item| format!("{command} {item}"))?;
    replies.into_iter().map(|reply| reply.fields(command)).collect()
}

/// Returns these tubes; `None` for those that are not there.
pub fn tubes(conn: &mut Conn, names: &[String]) -> Result<Vec<Option<Tube>>> {
    let tube = |(name, stats): (&String, Option<Fields>)| {
        Some(Tube { name: name.clone(), stats: stats?, ..Tube::default() })
    };
    Ok(names.iter().zip(stats(conn, "stats-tube", names)?).map(tube).collect())
}

/// Returns the tube with a name, if it is there.
pub fn find_tube(conn: &mut Conn, name: &str) -> Result<Option<Tube>> {
    Ok(tubes(conn, &[name.to_owned()])?.remove(0))
}

/// Returns all tubes by name.
pub fn all_tubes(conn: &mut Conn) -> Result<Vec<Tube>> {
    let names = tube_names(conn)?;
    Ok(tubes(conn, &names)?.into_iter().flatten().collect())
}

/// Returns all tubes by name, with the wait of their oldest ready jobs.
pub fn all_tubes_and_waits(conn: &mut Conn) -> Result<Vec<Tube>> {
    let mut tubes = all_tubes(conn)?;
    let with_ready: Vec<_> = tubes.iter_mut().filter(|tube| tube.jobs("ready") > 0).collect();
    let first: Vec<_> = if conn.has_more()? {
        let replies = conn.ask_each(&with_ready, |tube| format!("list-jobs {} ready 1", tube.name));
        replies?.into_iter().map(listed).collect::<Result<_>>()?
    } else {
        let peeks = with_ready.iter().map(|tube| peek(conn, &tube.name, "ready"));
        peeks.collect::<Result<_>>()?
    };
    for (tube, mut jobs) in with_ready.into_iter().zip(first) {
        let job = jobs.pop().unwrap_or_default();
        tube.oldest = job.number("age").saturating_sub(job.number("delay"));
    }
    Ok(tubes)
}

/// Returns one tube, or the failure that it is not there.
pub fn tube(conn: &mut Conn, name: &str) -> Result<Tube> {
    find_tube(conn, args::tube(name)?)?
        .ok_or_else(|| Failure::new(EXIT_PARTLY, format!("tube {name}: not found")))
}

/// Returns the statistics of jobs; `None` for those that are gone.
pub fn jobs(conn: &mut Conn, ids: &[u64]) -> Result<Vec<Option<Fields>>> {
    let mut jobs = stats(conn, "stats-job", ids)?;
    // The number of its binlog file.
    jobs.iter_mut().flatten().for_each(|job| job.0.retain(|(key, _)| key != "file"));
    Ok(jobs)
}

/// Returns the jobs in the reply to `list-jobs`.
fn listed(reply: Reply) -> Result<Vec<Fields>> {
    Ok(reply.entries("list-jobs")?.unwrap_or_default())
}

/// Returns the first job of a state, as `peek-ready` and its kind find it.
fn peek(conn: &mut Conn, tube: &str, state: &str) -> Result<Vec<Fields>> {
    conn.use_tube(tube)?;
    let reply = conn.ask(&format!("peek-{state}"))?;
    let id = reply.word(1).parse();
    let (Ok(id), Some(body)) = (id, reply.content("peek")?) else { return Ok(Vec::new()) };
    let mut job = jobs(conn, &[id])?.remove(0);
    job.iter_mut().for_each(|job| job.push("bytes", body.len()));
    Ok(Vec::from_iter(job))
}

/// The jobs of a tube in a state, or in `any`, page by page. Without lists a page is one job, and the next one is
/// there once that job has left the state.
pub struct Pages<'t> {
    pub tube: &'t str,
    pub state: &'static str,
    /// The page before ended with this job.
    pub after: u64,
    /// The number of jobs that may still come.
    pub left: u64,
}

impl Pages<'_> {
    /// Returns the next jobs; none after the last one.
    pub fn next(&mut self, conn: &mut Conn) -> Result<Vec<Fields>> {
        let Pages { tube, state, after, left } = self;
        let count = (*left).min(WINDOW as u64);
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut jobs = if NOT_HELD.contains(state) && !conn.has_more()? {
            peek(conn, tube, state)?
        } else {
            conn.must_have("list-jobs")?;
            listed(conn.ask(&format!("list-jobs {tube} {state} {count} {after}"))?)?
        };
        // A peek finds the same job again, if it has not left the state.
        jobs.retain(|job| job.number("id") != *after);
        for Fields(pairs) in jobs.iter_mut().filter(|job| job.text("tube").is_empty()) {
            pairs.insert(pairs.len().min(1), ("tube".into(), json_string(tube)));
        }
        *left -= (jobs.len() as u64).min(*left);
        *after = jobs.last().map_or(*after, |job| job.number("id"));
        Ok(jobs)
    }
}
