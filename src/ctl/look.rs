//! The facts of tubes and of jobs, as a server reports them. Where it lacks `list-jobs`, the first job of
//! a state is found with `peek-ready` and its kind. It must not know what they are used for.

use super::conn::{Conn, Fields, Reply, WINDOW, lacks, names};
use super::{EXIT_PARTLY, args};
use crate::attention::{self, Problem, TubeFacts};
use crate::os::failure::Failure;

/// A tube.
#[derive(Clone, Debug, Default)]
pub struct Tube {
    pub name: String,
    pub ready: u64,
    pub held: u64,
    pub delayed: u64,
    pub buried: u64,
    /// Connections that watch it, without this one.
    pub watching: u64,
    /// Connections that wait for a job of it.
    pub waiting: u64,
    /// The number of jobs ever put.
    pub puts: u64,
    /// The number of deletes ever.
    pub deletes: u64,
    /// The rest of its pause, in seconds.
    pub pause_left: u64,
    /// Age minus delay of the oldest ready job, in seconds; 0 without one.
    pub oldest: u64,
}

impl Tube {
    fn of_stats(stats: &Fields) -> Tube {
        let name = stats.text("name").to_owned();
        // Each connection watches `default` until it ignores it.
        let own = u64::from(name == "default");
        Tube {
            ready: stats.number("current-jobs-ready"),
            held: stats.number("current-jobs-reserved"),
            delayed: stats.number("current-jobs-delayed"),
            buried: stats.number("current-jobs-buried"),
            watching: stats.number("current-watching").saturating_sub(own),
            waiting: stats.number("current-waiting"),
            puts: stats.number("total-jobs"),
            deletes: stats.number("cmd-delete"),
            pause_left: stats.number("pause-time-left"),
            oldest: 0,
            name,
        }
    }

    /// Returns the number of jobs in a state.
    pub fn jobs(&self, state: &str) -> u64 {
        match state {
            "ready" => self.ready,
            "reserved" => self.held,
            "delayed" => self.delayed,
            "buried" => self.buried,
            _ => self.ready + self.held + self.delayed + self.buried,
        }
    }

    /// Returns its problems, the worst first.
    pub fn problems(&self, has_recent_delete: bool, server: Option<&str>) -> Vec<Problem> {
        let facts = TubeFacts {
            name: &self.name,
            ready: self.ready,
            held: self.held,
            buried: self.buried,
            watching: self.watching,
            waiting: self.waiting,
            oldest_secs: self.oldest,
            pause_left_secs: self.pause_left,
            has_recent_delete,
            ..TubeFacts::default()
        };
        attention::of_tube(&facts, server)
    }
}

/// Returns the names of all tubes.
pub fn tube_names(conn: &mut Conn) -> Result<Vec<String>, Failure> {
    let document = conn.ask("list-tubes")?.document("list-tubes")?;
    Ok(names(&document.unwrap_or_default()))
}

/// Returns all tubes, or those with these names that are there.
pub fn tubes(conn: &mut Conn, names: &[String]) -> Result<Vec<Tube>, Failure> {
    let requests: Vec<String> = names.iter().map(|name| format!("stats-tube {name}")).collect();
    let mut tubes = Vec::new();
    for reply in conn.ask_all(&requests)? {
        // A tube may be gone since it was listed.
        if let Some(stats) = reply.document("stats-tube")? {
            tubes.push(Tube::of_stats(&Fields::of_document(&stats)));
        }
    }
    Ok(tubes)
}

/// Returns all tubes, with the wait of their oldest ready jobs.
pub fn tubes_with_oldest(conn: &mut Conn) -> Result<Vec<Tube>, Failure> {
    let names = tube_names(conn)?;
    let mut tubes = tubes(conn, &names)?;
    let has_ready: Vec<&mut Tube> = tubes.iter_mut().filter(|tube| tube.ready > 0).collect();
    let requests: Vec<String> =
        has_ready.iter().map(|tube| format!("list-jobs {} ready 1", tube.name)).collect();
    let replies = conn.ask_all(&requests)?;
    for (tube, reply) in has_ready.into_iter().zip(replies) {
        let job = match reply.is("UNKNOWN_COMMAND") {
            true => peek(conn, &tube.name, "ready")?,
            false => {
                reply.document("list-jobs")?.and_then(|list| Fields::of_entries(&list).0.pop())
            }
        };
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
    let requests: Vec<String> = ids.iter().map(|id| format!("stats-job {id}")).collect();
    let replies = conn.ask_all(&requests)?;
    let fields =
        |reply: Reply| Ok(reply.document("stats-job")?.map(|stats| Fields::of_document(&stats)));
    replies.into_iter().map(fields).collect()
}

/// Returns the bodies of jobs; `None` for those that are gone or have more than `most` bytes.
pub fn bodies(
    conn: &mut Conn,
    jobs: &[Fields],
    most: u64,
) -> Result<Vec<Option<Vec<u8>>>, Failure> {
    let is_small = |job: &Fields| job.number("bytes") <= most;
    let ids = jobs.iter().filter(|job| is_small(job)).map(|job| job.text("id"));
    let requests: Vec<String> = ids.map(|id| format!("peek {id}")).collect();
    let mut replies = conn.ask_all(&requests)?.into_iter();
    let body = |job| {
        let reply = if is_small(job) { replies.next() } else { None };
        reply.filter(|reply| !reply.is("NOT_FOUND")).map(Reply::found).transpose()
    };
    jobs.iter().map(body).collect()
}

/// Returns the first job of a state, as `peek-ready` and its kind find it.
fn peek(conn: &mut Conn, tube: &str, state: &str) -> Result<Option<Fields>, Failure> {
    conn.use_tube(tube)?;
    let reply = conn.ask(&format!("peek-{state}"))?;
    match reply.line.split(' ').nth(1).and_then(|id| id.parse().ok()) {
        Some(id) => Ok(jobs(conn, &[id])?.pop().flatten()),
        None if reply.is("NOT_FOUND") => Ok(None),
        None => Err(reply.refusal()),
    }
}

/// The jobs of a tube in a state, or in `any`, page by page.
pub struct Pages {
    tube: String,
    state: &'static str,
    /// The last page ended with this job.
    pub after: u64,
    /// The number of jobs that may still come.
    left: u64,
    source: Source,
}

/// Where the jobs come from.
enum Source {
    /// `list-jobs`; `has_more` is false after the last page.
    List { has_more: bool },
    /// The peek commands, one state after the other. They find one job of a state, and the next one if
    /// that job has left its state.
    Peek(Vec<&'static str>),
}

/// What to do on a server without `list-jobs`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Otherwise {
    /// Fail.
    Fail,
    /// Peek at the first jobs.
    Peek,
}

impl Pages {
    /// Returns the pages of `tube`, with at most `limit` jobs.
    pub fn new(tube: &str, state: &'static str, after: u64, limit: u64) -> Pages {
        let (tube, source) = (tube.to_owned(), Source::List { has_more: true });
        Pages { tube, state, after, left: limit, source }
    }

    /// Returns whether the server lacks `list-jobs`.
    pub fn peeks(&self) -> bool {
        matches!(self.source, Source::Peek(_))
    }

    /// Returns the next jobs; none after the last one.
    pub fn next(&mut self, conn: &mut Conn, otherwise: Otherwise) -> Result<Vec<Fields>, Failure> {
        while self.left > 0 {
            let jobs = match &mut self.source {
                Source::List { has_more: false } => break,
                Source::List { has_more } => {
                    let (tube, state, after) = (&self.tube, self.state, self.after);
                    let count = self.left.min(WINDOW as u64);
                    let reply = conn.ask(&format!("list-jobs {tube} {state} {count} {after}"))?;
                    if reply.is("UNKNOWN_COMMAND") && otherwise == Otherwise::Peek {
                        self.source = Source::Peek(match self.state {
                            "any" => vec!["buried", "delayed", "ready"],
                            state => vec![state],
                        });
                        self.after = 0;
                        continue;
                    }
                    let Some(list) = reply.document("list-jobs")? else { break };
                    let (jobs, next) = Fields::of_entries(&list);
                    *has_more = next != 0;
                    jobs
                }
                Source::Peek(states) => {
                    let Some(&state) = states.last() else { break };
                    if state == "reserved" {
                        return Err(lacks("list-jobs"));
                    }
                    let job = peek(conn, &self.tube, state)?;
                    let job = job.filter(|job| job.number("id") != self.after);
                    if job.is_none() {
                        states.pop();
                        continue;
                    }
                    job.into_iter().collect()
                }
            };
            self.left = self.left.saturating_sub(jobs.len() as u64);
            self.after = jobs.last().map_or(self.after, |job| job.number("id"));
            if !jobs.is_empty() {
                return Ok(jobs);
            }
        }
        Ok(Vec::new())
    }
}
