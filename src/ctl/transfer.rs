//! `move`, `export` and `import`: jobs that leave a tube, or come into one.
//!
//! A job is reserved, written elsewhere, and deleted last: a crash in between leaves it in both places, and
//! never in none.

use super::act::not_found;
use super::args;
use super::conn::{Conn, EXIT_REFUSED, Fields, WINDOW, lacks};
use super::dump;
use super::look::{self, Otherwise, Pages};
use super::print::grouped;
use super::work::{Work, confirm};
use super::{Args, Ctl, EXIT_USAGE, print, unwritten, usage_error};
use crate::os::failure::Failure;
use crate::os::sys::clock;
use rustix::io::Errno;
use std::io::{self, BufRead, Write};

/// `move`
pub fn move_jobs(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let [from, to, ..] = &args.words[..] else { unreachable!("the table asks for two words") };
    let (from, to) = (args::tube(from)?, args::tube(to)?);
    if from == to {
        return Err(usage_error("move: both tubes are the same"));
    }
    let ids = args.ids(2)?;
    let state = args.state(if ids.is_empty() { "buried" } else { "any" })?;
    if state == "reserved" {
        return Err(usage_error("move: held jobs stay with their workers"));
    }
    let limit = args.number("limit")?.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, from)?;
    let free = if state == "any" { tube.jobs("any") - tube.held } else { tube.jobs(state) };
    let total = limit.min(if ids.is_empty() { free } else { ids.len() as u64 });
    if ctl.is_dry_run && ids.is_empty() {
        print(&format!("would move {total} jobs of tube {from} to {to}"))?;
        return Ok(0);
    }
    if !ctl.is_dry_run {
        let jobs = grouped(total);
        confirm(ctl, &format!("Move {jobs} jobs of tube {from} to tube {to}?"))?;
    }
    let mut work = Work::start(if ctl.is_dry_run { "would move" } else { "moved" }, total);
    let mut pages = Pages::new(from, state, 0, if ids.is_empty() { tube.jobs(state) } else { 0 });
    let mut ids = ids.chunks(WINDOW);
    let mut step = || -> Result<bool, Failure> {
        let jobs = match ids.next() {
            Some(window) => named(&mut conn, window, from, state, &mut work)?,
            None => pages.next(&mut conn, Otherwise::Peek)?,
        };
        for job in &jobs {
            if work.done >= limit || work.is_stopped() {
                return Ok(false);
            }
            if ctl.is_dry_run
                || (job.text("state") != "reserved" && move_job(&mut conn, job, to, &mut work)?)
            {
                work.add(1);
            }
        }
        Ok(!jobs.is_empty() || ids.len() > 0)
    };
    let ended = loop {
        match step() {
            Ok(true) => {}
            Ok(false) => break Ok(()),
            Err(failure) => break Err(failure),
        }
    };
    work.end(ended)
}

/// Returns those of these jobs that can be moved, and reports the others.
fn named(
    conn: &mut Conn,
    ids: &[u64],
    from: &str,
    state: &str,
    work: &mut Work,
) -> Result<Vec<Fields>, Failure> {
    let mut jobs = Vec::new();
    for (&id, job) in ids.iter().zip(look::jobs(conn, ids)?) {
        let Some(job) = job.filter(|job| job.text("tube") == from) else {
            work.fail(&format!("{} in tube {from}", not_found(id)));
            continue;
        };
        match job.text("state") {
            "reserved" => work.fail(&format!("job {id}: held by a worker")),
            own if state != "any" && own != state => {
                work.fail(&format!("job {id}: {own}, not {state}"))
            }
            _ => jobs.push(job),
        }
    }
    Ok(jobs)
}

/// Moves a job. Returns false if it is gone since it was listed.
fn move_job(conn: &mut Conn, job: &Fields, to: &str, work: &mut Work) -> Result<bool, Failure> {
    let id = job.number("id");
    let Some(body) = reserve(conn, id)? else { return Ok(false) };
    let put = conn.use_tube(to).and_then(|()| {
        let (pri, ttr) = (job.number("pri"), job.number("ttr"));
        conn.put(&format!("{pri} {} {ttr}", delay_left(job)), "", &body)
    });
    if let Err(Failure { exit_code, message }) = put {
        if exit_code == EXIT_REFUSED {
            give_back(conn, job)?;
        }
        return Err(Failure::new(exit_code, format!("job {id}: {message}")));
    }
    let is_deleted = conn.ask(&format!("delete {id}"))?.is("DELETED");
    if !is_deleted {
        work.fail(&format!("job {id}: now in both tubes, as its time to run has ended"));
    }
    Ok(is_deleted)
}

/// Reserves a job, and returns its body; `None` if it is gone or held.
fn reserve(conn: &mut Conn, id: u64) -> Result<Option<Vec<u8>>, Failure> {
    let reply = conn.ask(&format!("reserve-job {id}"))?;
    match reply.line.as_str() {
        "NOT_FOUND" => Ok(None),
        "UNKNOWN_COMMAND" => Err(lacks("reserve-job")),
        _ => reply.found().map(Some),
    }
}

/// Returns a reserved job to the state that it had.
fn give_back(conn: &mut Conn, job: &Fields) -> Result<(), Failure> {
    let (id, pri) = (job.number("id"), job.number("pri"));
    match job.text("state") {
        "buried" => conn.ask(&format!("bury {id} {pri}"))?,
        _ => conn.ask(&format!("release {id} {pri} {}", delay_left(job)))?,
    };
    Ok(())
}

/// Returns the rest of the delay of a job, in seconds: at least 1 while it is delayed.
fn delay_left(job: &Fields) -> u64 {
    if job.text("state") == "delayed" { job.number("time-left").max(1) } else { 0 }
}

/// `export`
pub fn export(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let name = args::tube(&args.words[0])?;
    let takes = args.has("take");
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, name)?;
    let total = if takes { tube.jobs("any") - tube.held } else { tube.jobs("any") };
    if ctl.is_dry_run {
        let verb = if takes { "take" } else { "export" };
        print(&format!("would {verb} {total} jobs of tube {name}"))?;
        return Ok(0);
    }
    if takes {
        confirm(ctl, &format!("Take {} jobs out of tube {name}?", grouped(total)))?;
    }
    let mut work = Work::start("exported", total);
    let otherwise = if takes { Otherwise::Peek } else { Otherwise::Fail };
    // What is put meanwhile is not part of the export.
    let mut pages = Pages::new(name, "any", 0, tube.jobs("any"));
    let ended = loop {
        let jobs = match pages.next(&mut conn, otherwise) {
            Ok(jobs) if jobs.is_empty() || work.is_stopped() => break Ok(()),
            Ok(jobs) => jobs,
            Err(failure) => break Err(failure),
        };
        let exported = match takes {
            true => take(&mut conn, jobs, name, &mut work),
            false => look::bodies(&mut conn, &jobs, u64::MAX).and_then(|bodies| {
                let jobs: Vec<(Fields, Vec<u8>)> = jobs
                    .into_iter()
                    .zip(bodies)
                    .filter_map(|(job, body)| Some((job, body?)))
                    .collect();
                write(&jobs, name).map_err(unwritten)?;
                work.add(jobs.len() as u64);
                Ok(())
            }),
        };
        if let Err(failure) = exported {
            break Err(failure);
        }
    };
    work.end(ended)
}

/// Reserves jobs, writes them to stdout, syncs it, and deletes them.
fn take(conn: &mut Conn, jobs: Vec<Fields>, tube: &str, work: &mut Work) -> Result<(), Failure> {
    let mut taken = Vec::with_capacity(jobs.len());
    for job in jobs.into_iter().filter(|job| job.text("state") != "reserved") {
        if let Some(body) = reserve(conn, job.number("id"))? {
            taken.push((job, body));
        }
    }
    if let Err(error) = write(&taken, tube).and_then(|()| sync()) {
        for (job, _) in &taken {
            give_back(conn, job)?;
        }
        return Err(unwritten(error));
    }
    let requests: Vec<String> =
        taken.iter().map(|(job, _)| format!("delete {}", job.number("id"))).collect();
    for ((job, _), reply) in taken.iter().zip(conn.ask_all(&requests)?) {
        match reply.is("DELETED") {
            true => work.add(1),
            false => work.fail(&format!(
                "job {}: written and not deleted, as its time to run has ended",
                job.number("id")
            )),
        }
    }
    Ok(())
}

fn now() -> u64 {
    u64::try_from(clock::time_of_day().as_nanos()).unwrap_or(u64::MAX)
}

fn write(jobs: &[(Fields, Vec<u8>)], tube: &str) -> io::Result<()> {
    let now = now();
    let lines: String =
        jobs.iter().map(|(job, body)| dump::line(job, tube, body, now) + "\n").collect();
    let mut out = io::stdout().lock();
    out.write_all(lines.as_bytes())?;
    out.flush()
}

/// Syncs stdout, if it is a file.
fn sync() -> io::Result<()> {
    match rustix::fs::fsync(io::stdout()) {
        Err(Errno::INVAL | Errno::ROFS | Errno::OPNOTSUPP) => Ok(()),
        synced => Ok(synced?),
    }
}

/// `import`
pub fn import(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let tube = args.tube("tube")?;
    let mut conn = if ctl.is_dry_run { None } else { Some(ctl.connect()?) };
    let verb = if ctl.is_dry_run { "would import" } else { "imported" };
    let mut work = Work::start(verb, 0);
    let mut ended = Ok(());
    for (index, line) in io::stdin().lock().split(b'\n').enumerate() {
        if work.is_stopped() {
            break;
        }
        let at = |failure: Failure| {
            Failure::new(failure.exit_code, format!("line {}: {}", index + 1, failure.message))
        };
        let done = line.map_err(|error| Failure::new(EXIT_USAGE, error.to_string()));
        ended = done
            .and_then(|line| import_line(&line, tube.as_deref(), conn.as_mut(), &mut work))
            .map_err(at);
        if ended.is_err() {
            break;
        }
    }
    let done = work.done;
    let ended = ended.map_err(|Failure { exit_code, message }| {
        Failure::new(exit_code, format!("{message}; {done} jobs were put before it"))
    });
    work.end(ended)
}

/// Puts the job of a line.
fn import_line(
    line: &[u8],
    tube: Option<&str>,
    conn: Option<&mut Conn>,
    work: &mut Work,
) -> Result<(), Failure> {
    let bad = |message: String| Failure::new(EXIT_USAGE, message);
    let line = str::from_utf8(line).map_err(|_| bad("not UTF-8".into()))?;
    if line.trim().is_empty() {
        return Ok(());
    }
    let job = dump::parse(line, now()).map_err(bad)?;
    let tube = tube.or(job.tube.as_deref()).ok_or_else(|| bad("no tube, and no --tube".into()))?;
    let Some(conn) = conn else {
        work.add(1);
        return Ok(());
    };
    conn.use_tube(tube)?;
    let key = match job.key {
        Some(key) if conn.has_keys()? => format!(" idp:{key}"),
        Some(_) => {
            work.fail("this server has no unique keys: the job is put without its key");
            String::new()
        }
        None => String::new(),
    };
    let arguments = format!("{} {} {}", job.pri, job.delay, job.ttr);
    let inserted = conn.put(&arguments, &key, &job.body)?;
    // INSERTED, an id, and the state of a job with this key.
    match &inserted.split(' ').collect::<Vec<_>>()[..] {
        [_, id, state] => {
            work.fail(&format!("not put: job {id} has its key ({})", state.to_lowercase()));
        }
        _ => work.add(1),
    }
    Ok(())
}
