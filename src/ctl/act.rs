//! `retry`, `delete`, `flush` and `put`.

use super::args;
use super::conn::{Conn, WINDOW};
use super::look::{self, Otherwise, Pages, Tube};
use super::print::grouped;
use super::work::{Work, confirm};
use super::{Args, Ctl, EXIT_PARTLY, complain, print, usage_error};
use crate::engine::text::name_prefix_len;
use crate::os::failure::Failure;
use std::io::{self, Read};

/// The priority and the TTR of a job for which nothing else is asked.
pub const DEFAULT_PRI: u32 = 1024;
pub const DEFAULT_TTR: u32 = 60;

/// `retry`
pub fn retry(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let takes_delayed = args.has("delayed");
    let limit = args.number("limit")?;
    if !args.has("all") && limit.is_none() {
        return retry_ids(ctl, args, takes_delayed);
    }
    let [name] = &args.words[..] else {
        return Err(usage_error("retry: --all and --limit need one tube"));
    };
    if args.has("all") && limit.is_some() {
        return Err(usage_error("retry: --all and --limit exclude each other"));
    }
    let mut left = limit.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, name)?;
    let states = if takes_delayed { &["buried", "delayed"][..] } else { &["buried"] };
    let total = left.min(states.iter().map(|state| tube.jobs(state)).sum());
    if ctl.is_dry_run {
        print(&format!("would retry {total} jobs of tube {name}"))?;
        return Ok(0);
    }
    if args.has("all") {
        confirm(ctl, &format!("Retry {} jobs of tube {name}?", grouped(total)))?;
    }
    let mut work = Work::start("retried", total);
    let ended = states.iter().try_for_each(|state| {
        let mut pages = Pages::new(name, state, 0, left.min(tube.jobs(state)));
        while !work.is_stopped()
            && let jobs @ [_, ..] = &pages.next(&mut conn, Otherwise::Peek)?[..]
        {
            let ids: Vec<u64> = jobs.iter().map(|job| job.number("id")).collect();
            // A job that is gone since it was listed needs no retry.
            let kicked = each(&mut conn, "kick-job", "KICKED", &ids, |_| ())?;
            work.add(kicked);
            left -= kicked;
        }
        Ok(())
    });
    work.end(ended)
}

fn retry_ids(ctl: &Ctl, args: &Args, takes_delayed: bool) -> Result<u8, Failure> {
    let needs = "retry: needs ids of jobs, or a tube with --all or --limit N";
    let ids = args.ids(0).map_err(|_| usage_error(needs))?;
    let mut conn = ctl.connect()?;
    on_ids(ctl, ids, ("would retry", "retried"), |work, window, is_dry_run| {
        let mut found = Vec::new();
        for (&id, job) in window.iter().zip(look::jobs(&mut conn, window)?) {
            match job.as_ref().map(|job| job.text("state")) {
                None => work.fail(&not_found(id)),
                Some("buried") => found.push(id),
                Some("delayed") if takes_delayed => found.push(id),
                Some("delayed") => {
                    work.fail(&format!("job {id}: delayed; retry --delayed takes it"))
                }
                Some(state) => work.fail(&format!("job {id}: {state}, not buried")),
            }
        }
        match is_dry_run {
            true => Ok(found.len() as u64),
            false => each(&mut conn, "kick-job", "KICKED", &found, |id| work.fail(&not_found(id))),
        }
    })
}

/// `delete`
pub fn delete(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let ids = args.ids(0)?;
    let mut conn = ctl.connect()?;
    if ids.len() > 1 && !ctl.is_dry_run {
        confirm(ctl, &format!("Delete {} jobs?", grouped(ids.len() as u64)))?;
    }
    on_ids(ctl, ids, ("would delete", "deleted"), |work, window, is_dry_run| {
        if !is_dry_run {
            return each(&mut conn, "delete", "DELETED", window, |id| {
                work.fail(&format!("job {id}: not found, or held by a worker"));
            });
        }
        let jobs = look::jobs(&mut conn, window)?;
        for (&id, _) in window.iter().zip(&jobs).filter(|(_, job)| job.is_none()) {
            work.fail(&not_found(id));
        }
        Ok(jobs.iter().flatten().count() as u64)
    })
}

pub fn not_found(id: u64) -> String {
    format!("job {id}: not found")
}

/// Works on these jobs, a window of them at a time. `would` is the
/// beginning of the last line of a dry run, `done` that of the others.
fn on_ids(
    ctl: &Ctl,
    ids: Vec<u64>,
    (would, done): (&'static str, &'static str),
    mut act: impl FnMut(&mut Work, &[u64], bool) -> Result<u64, Failure>,
) -> Result<u8, Failure> {
    let mut work = Work::start(if ctl.is_dry_run { would } else { done }, ids.len() as u64);
    let ended = ids.chunks(WINDOW).try_for_each(|window| {
        if !work.is_stopped() {
            let done = act(&mut work, window, ctl.is_dry_run)?;
            work.add(done);
        }
        Ok(())
    });
    work.end(ended)
}

/// Sends a request for each job, and returns the number of those with the reply `done`.
fn each(
    conn: &mut Conn,
    request: &str,
    done: &str,
    ids: &[u64],
    mut missing: impl FnMut(u64),
) -> Result<u64, Failure> {
    let requests: Vec<String> = ids.iter().map(|id| format!("{request} {id}")).collect();
    let mut count = 0;
    let replies = conn.ask_all(&requests)?;
    for (&id, reply) in ids.iter().zip(replies) {
        match reply.is("NOT_FOUND") {
            true => missing(id),
            false => count += reply.expect(done).map(|_| 1)?,
        }
    }
    Ok(count)
}

/// `flush`
pub fn flush(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let name = args::tube(&args.words[0])?;
    let is_buried = args.has("buried");
    let (word, state) = if is_buried { ("flush-buried", "buried") } else { ("flush-tube", "any") };
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, name)?;
    let kind = if is_buried { "buried jobs" } else { "jobs" };
    let total = tube.jobs(state);
    if ctl.is_dry_run {
        print(&format!("would delete {total} {kind} of tube {name}"))?;
        return Ok(0);
    }
    confirm(ctl, &format!("Delete {} {kind} of tube {name}?", grouped(total)))?;
    let mut work = Work::start("deleted", total);
    let reply = conn.ask(&format!("{word} {name}"))?;
    let ended = match reply.is("UNKNOWN_COMMAND") {
        true => delete_one_by_one(&mut conn, &tube, state, &mut work),
        // Without a job, the tube may be gone since.
        false if reply.is("NOT_FOUND") => Ok(()),
        false => reply.expect("FLUSHED").map(|line| {
            work.add(line.split(' ').nth(1).and_then(|count| count.parse().ok()).unwrap_or(0));
        }),
    };
    work.end(ended)
}

/// Deletes jobs of a tube, except those that workers hold.
pub fn delete_one_by_one(
    conn: &mut Conn,
    tube: &Tube,
    state: &'static str,
    work: &mut Work,
) -> Result<(), Failure> {
    let limit = tube.jobs(state);
    let mut pages = Pages::new(&tube.name, state, 0, limit);
    while !work.is_stopped()
        && let jobs @ [_, ..] = &pages.next(conn, Otherwise::Peek)?[..]
    {
        let ids: Vec<u64> = jobs.iter().map(|job| job.number("id")).collect();
        work.add(each(conn, "delete", "DELETED", &ids, |_| ())?);
    }
    if state == "any" && tube.held > 0 {
        work.fail(&format!("tube {}: {} held jobs stay", tube.name, tube.held));
    }
    Ok(())
}

/// `put`
pub fn put(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let tube = args::tube(&args.words[0])?;
    let pri = args.number("pri")?.unwrap_or(DEFAULT_PRI);
    let delay = args.time("delay")?.unwrap_or(0);
    let ttr = args.time("ttr")?.unwrap_or(DEFAULT_TTR);
    let key = args.text("key");
    if let Some(key) = key.as_deref().filter(|key| !is_key(key)) {
        return Err(usage_error(&format!(
            "--key {key}: not a key, such as order-17 or order-17:600"
        )));
    }
    let body = match args.words.get(1) {
        Some(body) => body.clone().into_bytes(),
        None => {
            let mut body = Vec::new();
            let read = io::stdin().lock().read_to_end(&mut body);
            read.map_err(|error| {
                Failure::new(EXIT_PARTLY, format!("cannot read the body from stdin: {error}"))
            })?;
            body
        }
    };
    if ctl.is_dry_run {
        print(&format!("would put {} bytes into tube {tube}", body.len()))?;
        return Ok(0);
    }
    let mut conn = ctl.connect()?;
    if key.is_some() && !conn.has_keys()? {
        return Err(super::conn::lacks("unique keys"));
    }
    conn.use_tube(tube)?;
    let key = key.map_or(String::new(), |key| format!(" idp:{key}"));
    let inserted = conn.put(&format!("{pri} {delay} {ttr}"), &key, &body)?;
    let mut words = inserted.split(' ').skip(1);
    let id = words.next().unwrap_or_default();
    if let Some(state) = words.next() {
        complain(&format!("job {id} has this key already ({})", state.to_lowercase()));
    }
    match ctl.is_json {
        true => print(&format!("{{\"id\":{id}}}"))?,
        false => print(id)?,
    }
    Ok(0)
}

/// Returns whether `text` is a key of a unique job, or a key and its time to live.
pub fn is_key(text: &str) -> bool {
    let Some(len) = name_prefix_len(text.as_bytes()) else { return false };
    text[len..].is_empty()
        || text[len..]
            .strip_prefix(':')
            .is_some_and(|ttl| !ttl.is_empty() && ttl.bytes().all(|byte| byte.is_ascii_digit()))
}
