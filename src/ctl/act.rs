//! `retry`, `delete`, `flush` and `put`.

use super::conn::{Conn, Fields, WINDOW, lacks};
use super::look::{self, Pages, Tube};
use super::print::{grouped, json_object};
use super::work::{Work, confirm};
use super::{Args, Ctl, EXIT_PARTLY, args, complain, print, usage_error};
use crate::engine::text::name_prefix_len;
use crate::os::failure::Failure;
use std::io::{self, Read};

/// The priority and the TTR of a job for which nothing else is asked.
pub const DEFAULT_PRI: u32 = 1024;
pub const DEFAULT_TTR: u32 = 60;

/// `retry`
pub fn retry(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let states = if args.has("delayed") { &["buried", "delayed"][..] } else { &["buried"] };
    let limit: Option<u64> = args.number("limit")?;
    if !args.has("all") && limit.is_none() {
        let needs = "retry: needs ids of jobs, or a tube with --all or --limit N";
        return retry_ids(ctl, &args.ids(0).map_err(|_| usage_error(needs))?, states);
    }
    let ([name], false) = (&args.words[..], args.has("all") && limit.is_some()) else {
        return Err(usage_error("retry: needs one tube, and --all or --limit N"));
    };
    let mut left = limit.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, name)?;
    let total = left.min(states.iter().map(|state| tube.jobs(state)).sum());
    if ctl.is_dry_run {
        print(&format!("would retry {total} jobs of tube {name}"))?;
        return Ok(0);
    }
    if args.has("all") {
        confirm(ctl, &format!("Retry {} jobs of tube {name}?", grouped(total)))?;
    }
    let mut work = Work::start(ctl, "retried", "", total);
    let ended = states.iter().try_for_each(|state| {
        let before = work.done;
        all(&mut conn, &tube, state, left, ("kick-job", "KICKED"), &mut work)?;
        left -= work.done - before;
        Ok(())
    });
    work.end(ended)
}

fn retry_ids(ctl: &Ctl, ids: &[u64], states: &[&str]) -> Result<u8, Failure> {
    let mut conn = ctl.connect()?;
    let mut work = Work::start(ctl, "retried", "would retry", ids.len() as u64);
    let ended = in_windows(&mut work, ids, |work, window| {
        let jobs = named(&mut conn, window, work, |job| match job.text("state") {
            "delayed" if !states.contains(&"delayed") => Some("delayed; --delayed takes it".into()),
            "buried" | "delayed" => None,
            state => Some(format!("{state}, not buried")),
        })?;
        let ids: Vec<u64> = jobs.iter().map(|job| job.number("id")).collect();
        each(&mut conn, ctl, &ids, ("kick-job", "KICKED"), work)
    });
    work.end(ended)
}

/// `delete`
pub fn delete(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let ids = args.ids(0)?;
    let mut conn = ctl.connect()?;
    if ids.len() > 1 && !ctl.is_dry_run {
        confirm(ctl, &format!("Delete {} jobs?", grouped(ids.len() as u64)))?;
    }
    let mut work = Work::start(ctl, "deleted", "would delete", ids.len() as u64);
    let ended = in_windows(&mut work, &ids, |work, window| match ctl.is_dry_run {
        true => named(&mut conn, window, work, |_| None).map(|jobs| work.add(jobs.len() as u64)),
        false => each(&mut conn, ctl, window, ("delete", "DELETED"), work),
    });
    work.end(ended)
}

/// Works on a window of the jobs after the other.
fn in_windows(
    work: &mut Work,
    ids: &[u64],
    mut act: impl FnMut(&mut Work, &[u64]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for window in ids.chunks(WINDOW) {
        if !work.is_stopped() {
            act(work, window)?;
        }
    }
    Ok(())
}

/// Returns the statistics of these jobs, except those that are gone or for which `refuse` has a reason. They
/// are reported.
pub fn named(
    conn: &mut Conn,
    ids: &[u64],
    work: &mut Work,
    refuse: impl Fn(&Fields) -> Option<String>,
) -> Result<Vec<Fields>, Failure> {
    let mut jobs = Vec::new();
    for (id, job) in ids.iter().zip(look::jobs(conn, ids)?) {
        match job
            .ok_or_else(|| "not found".into())
            .and_then(|job| refuse(&job).map_or(Ok(job), Err))
        {
            Ok(job) => jobs.push(job),
            Err(reason) => work.fail(&format!("job {id}: {reason}")),
        }
    }
    Ok(jobs)
}

/// Sends a request for each of these jobs, and reports those that are gone.
fn each(
    conn: &mut Conn,
    ctl: &Ctl,
    ids: &[u64],
    (request, done): (&str, &str),
    work: &mut Work,
) -> Result<(), Failure> {
    if ctl.is_dry_run {
        work.add(ids.len() as u64);
        return Ok(());
    }
    for (id, reply) in ids.iter().zip(conn.ask_each(ids, |id| format!("{request} {id}"))?) {
        match reply.line == "NOT_FOUND" {
            true => work.fail(&format!("job {id}: not found, or held by a worker")),
            false => reply.expect(done).map(|_| work.add(1))?,
        }
    }
    Ok(())
}

/// Sends a request for each job of a tube in a state, for at most `limit`. A job that is gone since it
/// was listed needs none.
fn all(
    conn: &mut Conn,
    tube: &Tube,
    state: &'static str,
    limit: u64,
    (request, done): (&str, &str),
    work: &mut Work,
) -> Result<(), Failure> {
    let mut pages = Pages::new(&tube.name, state, 0, limit.min(tube.jobs(state)), true);
    while !work.is_stopped()
        && let jobs @ [_, ..] = &pages.next(conn)?[..]
    {
        let replies = conn.ask_each(jobs, |job| format!("{request} {}", job.text("id")))?;
        for reply in replies.into_iter().filter(|reply| reply.line != "NOT_FOUND") {
            reply.expect(done).map(|_| work.add(1))?;
        }
    }
    Ok(())
}

/// Deletes the jobs of a tube, except those that workers hold.
pub fn delete_all(
    conn: &mut Conn,
    tube: &Tube,
    state: &'static str,
    work: &mut Work,
) -> Result<(), Failure> {
    all(conn, tube, state, u64::MAX, ("delete", "DELETED"), work)
}

/// `flush`
pub fn flush(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let name = args::tube(&args.words[0])?;
    let (word, state, kind) = match args.has("buried") {
        true => ("flush-buried", "buried", "buried jobs"),
        false => ("flush-tube", "any", "jobs"),
    };
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, name)?;
    let total = tube.jobs(state);
    if ctl.is_dry_run {
        print(&format!("would delete {total} {kind} of tube {name}"))?;
        return Ok(0);
    }
    confirm(ctl, &format!("Delete {} {kind} of tube {name}?", grouped(total)))?;
    let mut work = Work::start(ctl, "deleted", "", total);
    let reply = conn.ask(&format!("{word} {name}"))?;
    let ended = match reply.line.as_str() {
        "UNKNOWN_COMMAND" => {
            let ended = delete_all(&mut conn, &tube, state, &mut work);
            if state == "any" && tube.jobs("reserved") > 0 {
                work.fail(&format!("tube {name}: {} held jobs stay", tube.jobs("reserved")));
            }
            ended
        }
        // Without a job, the tube may be gone since.
        "NOT_FOUND" => Ok(()),
        _ => reply.expect("FLUSHED").map(|line| work.add(line[8..].parse().unwrap_or(0))),
    };
    work.end(ended)
}

/// `put`
pub fn put(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let tube = args::tube(&args.words[0])?;
    let pri = args.number("pri")?.unwrap_or(DEFAULT_PRI);
    let delay = args.time("delay")?.unwrap_or(0);
    let ttr = args.time("ttr")?.unwrap_or(DEFAULT_TTR);
    let mut tags = String::new();
    for (option, word, least) in [("key", "idp", 0), ("con", "con", 1)] {
        let Some(tag) = args.text(option) else { continue };
        if !is_key(&tag, least) {
            let example = "not a key, such as order-17 or order-17:600";
            return Err(usage_error(&format!("--{option} {tag}: {example}")));
        }
        tags += &format!(" {word}:{tag}");
    }
    let mut body = Vec::new();
    if let Some(word) = args.words.get(1) {
        body.extend(word.bytes());
    } else if let Err(error) = io::stdin().lock().read_to_end(&mut body) {
        return Err(Failure::new(EXIT_PARTLY, format!("cannot read the body from stdin: {error}")));
    }
    if ctl.is_dry_run {
        print(&format!("would put {} bytes into tube {tube}", body.len()))?;
        return Ok(0);
    }
    let mut conn = ctl.connect()?;
    if !tags.is_empty() && !conn.has_keys()? {
        return Err(lacks("keys of jobs"));
    }
    conn.use_tube(tube)?;
    let inserted = conn.put(&format!("{pri} {delay} {ttr}"), &tags, &body)?;
    let mut words = inserted.split(' ').skip(1);
    let id = words.next().unwrap_or_default();
    if let Some(state) = words.next() {
        complain(&format!("job {id} has this key already ({})", state.to_lowercase()));
    }
    print(&if ctl.is_json { json_object([("id", id.into())]) } else { id.into() })?;
    Ok(0)
}

/// Returns whether `text` is a key, or a key, a colon and a number that is at least `least`.
pub fn is_key(text: &str, least: u32) -> bool {
    let number = name_prefix_len(text.as_bytes()).map(|len| &text[len..]);
    number.is_some_and(|number| match number.strip_prefix(':') {
        Some(number) => args::number(number).is_some_and(|number: u32| number >= least),
        None => number.is_empty(),
    })
}
