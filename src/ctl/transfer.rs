//! `move`, `export` and `import`: jobs that leave a tube, or come into one.
//!
//! A job is reserved, written elsewhere, and deleted last: a crash in between leaves it in both places, and
//! never in none.

use super::act::named;
use super::conn::{Conn, EXIT_REFUSED, Fields, WINDOW, lacks};
use super::look::{self, Pages};
use super::print::grouped;
use super::work::{Work, confirm};
use super::{Args, Ctl, EXIT_USAGE, args, dump, print, print_with, unwritten, usage_error};
use crate::os::failure::Failure;
use crate::os::sys::clock;
use rustix::io::Errno;
use std::io::{self, BufRead};

/// `move`
pub fn move_jobs(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let (from, to) = (args::tube(&args.words[0])?, args::tube(&args.words[1])?);
    let ids = args.ids(2)?;
    let state = args.state()?.unwrap_or(if ids.is_empty() { "buried" } else { "any" });
    if from == to || state == "reserved" {
        let reason = if from == to {
            "both tubes are the same"
        } else {
            "held jobs stay with their workers"
        };
        return Err(usage_error(&format!("move: {reason}")));
    }
    let limit = args.number("limit")?.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tube = look::tube(&mut conn, from)?;
    let held = if state == "any" { tube.jobs("reserved") } else { 0 };
    let total = limit.min(if ids.is_empty() { tube.jobs(state) - held } else { ids.len() as u64 });
    if ctl.is_dry_run && ids.is_empty() {
        print(&format!("would move {total} jobs of tube {from} to {to}"))?;
        return Ok(0);
    }
    if !ctl.is_dry_run {
        confirm(ctl, &format!("Move {} jobs of tube {from} to tube {to}?", grouped(total)))?;
    }
    let mut work = Work::start(ctl, "moved", "would move", total);
    let mut pages =
        Pages::new(from, state, 0, if ids.is_empty() { tube.jobs(state) } else { 0 }, true);
    let mut windows = ids.chunks(WINDOW);
    let refuse = |job: &Fields| match job.text("state") {
        _ if job.text("tube") != from => Some(format!("not found in tube {from}")),
        "reserved" => Some("held by a worker".into()),
        own => (state != "any" && own != state).then(|| format!("{own}, not {state}")),
    };
    let mut step = || {
        let jobs = match windows.next() {
            Some(window) => named(&mut conn, window, &mut work, refuse)?,
            None => pages.next(&mut conn)?,
        };
        for job in jobs.iter().filter(|job| job.text("state") != "reserved") {
            if work.done >= limit || work.is_stopped() {
                return Ok(false);
            }
            let moved = ctl.is_dry_run || move_job(&mut conn, job, to, &mut work)?;
            work.add(moved.into());
        }
        Ok(!jobs.is_empty() || windows.len() > 0)
    };
    let ended = loop {
        match step() {
            Ok(true) => {}
            ended => break ended.map(|_| ()),
        }
    };
    work.end(ended)
}

/// Moves a job. Returns false if it is gone since it was listed.
fn move_job(conn: &mut Conn, job: &Fields, to: &str, work: &mut Work) -> Result<bool, Failure> {
    let id = job.number("id");
    let Some(body) = reserve(conn, id)? else { return Ok(false) };
    let put = conn.use_tube(to).and_then(|()| {
        conn.put(
            &format!("{} {} {}", job.number("pri"), delay_left(job), job.number("ttr")),
            "",
            &body,
        )
    });
    if let Err(Failure { exit_code, message }) = put {
        if exit_code == EXIT_REFUSED {
            give_back(conn, job)?;
        }
        return Err(Failure::new(exit_code, format!("job {id}: {message}")));
    }
    let is_deleted = conn.ask(&format!("delete {id}"))?.line == "DELETED";
    if !is_deleted {
        work.fail(&format!("job {id}: now in both tubes, as its time to run has ended"));
    }
    Ok(is_deleted)
}

/// Reserves a job, and returns its body; `None` if it is gone or held.
fn reserve(conn: &mut Conn, id: u64) -> Result<Option<Vec<u8>>, Failure> {
    let reply = conn.ask(&format!("reserve-job {id}"))?;
    if reply.line == "UNKNOWN_COMMAND" { Err(lacks("reserve-job")) } else { reply.job() }
}

/// Returns a reserved job to the state that it had.
fn give_back(conn: &mut Conn, job: &Fields) -> Result<(), Failure> {
    let (id, pri) = (job.number("id"), job.number("pri"));
    let request = match job.text("state") {
        "buried" => format!("bury {id} {pri}"),
        _ => format!("release {id} {pri} {}", delay_left(job)),
    };
    conn.ask(&request).map(|_| ())
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
    let total = tube.jobs("any") - if takes { tube.jobs("reserved") } else { 0 };
    if ctl.is_dry_run {
        print(&format!(
            "would {} {total} jobs of tube {name}",
            if takes { "take" } else { "export" }
        ))?;
        return Ok(0);
    }
    if takes {
        confirm(ctl, &format!("Take {} jobs out of tube {name}?", grouped(total)))?;
    }
    let mut work = Work::start(ctl, "exported", "", total);
    // What is put meanwhile is not part of the export.
    let mut pages = Pages::new(name, "any", 0, tube.jobs("any"), takes);
    let mut step = || {
        let jobs = pages.next(&mut conn)?;
        if !jobs.is_empty() && !work.is_stopped() {
            export_page(&mut conn, &jobs, name, takes, &mut work)?;
            return Ok(true);
        }
        Ok(false)
    };
    let ended = loop {
        match step() {
            Ok(true) => {}
            ended => break ended.map(|_| ()),
        }
    };
    work.end(ended)
}

/// Writes jobs to stdout. If it `takes` them, they are reserved before, and deleted once stdout is synced.
fn export_page(
    conn: &mut Conn,
    jobs: &[Fields],
    tube: &str,
    takes: bool,
    work: &mut Work,
) -> Result<(), Failure> {
    let jobs: Vec<&Fields> =
        jobs.iter().filter(|job| !takes || job.text("state") != "reserved").collect();
    let word = if takes { "reserve-job" } else { "peek" };
    let (mut lines, mut written) = (String::new(), Vec::new());
    for (job, reply) in
        jobs.iter().zip(conn.ask_each(&jobs, |job| format!("{word} {}", job.text("id")))?)
    {
        if reply.line == "UNKNOWN_COMMAND" {
            return Err(lacks(word));
        }
        if let Some(body) = reply.job()? {
            lines += &(dump::line(job, tube, &body, now()) + "\n");
            written.push(job);
        }
    }
    let saved = print_with(|out| out.write_all(lines.as_bytes()));
    if !takes {
        work.add(written.len() as u64);
        return saved;
    }
    let saved = saved.and_then(|()| match rustix::fs::fsync(io::stdout()) {
        // It is no file.
        Err(Errno::INVAL | Errno::ROFS | Errno::OPNOTSUPP) => Ok(()),
        synced => synced.map_err(|error| unwritten(&error.into())),
    });
    if saved.is_err() {
        written.iter().try_for_each(|job| give_back(conn, job))?;
        return saved;
    }
    let replies = conn.ask_each(&written, |job| format!("delete {}", job.text("id")))?;
    for (job, reply) in written.iter().zip(replies) {
        match reply.line == "DELETED" {
            true => work.add(1),
            false => work.fail(&format!(
                "job {}: written and not deleted, as its time to run has ended",
                job.text("id")
            )),
        }
    }
    Ok(())
}

/// Returns the time of day, in ns.
fn now() -> u64 {
    u64::try_from(clock::time_of_day().as_nanos()).unwrap_or(u64::MAX)
}

/// `import`
pub fn import(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let tube = args.text("tube");
    tube.as_deref().map(args::tube).transpose()?;
    let mut conn = if ctl.is_dry_run { None } else { Some(ctl.connect()?) };
    let mut work = Work::start(ctl, "imported", "would import", 0);
    let mut lines = io::stdin().lock().split(b'\n').enumerate();
    let mut ended = Ok(());
    while ended.is_ok()
        && !work.is_stopped()
        && let Some((index, line)) = lines.next()
    {
        let bad = |error: io::Error| Failure::new(EXIT_USAGE, error.to_string());
        let put = line
            .map_err(bad)
            .and_then(|line| import_line(&line, tube.as_deref(), conn.as_mut(), &mut work));
        ended = put.map_err(|Failure { exit_code, message }| {
            let message =
                format!("line {}: {message}; {} jobs were put before it", index + 1, work.done);
            Failure::new(exit_code, message)
        });
    }
    work.end(ended)
}

/// Puts the job of a line.
fn import_line(
    line: &[u8],
    tube: Option<&str>,
    conn: Option<&mut Conn>,
    work: &mut Work,
) -> Result<(), Failure> {
    let bad = |message: &str| Failure::new(EXIT_USAGE, message);
    let line = str::from_utf8(line).map_err(|_| bad("not UTF-8"))?;
    if line.trim().is_empty() {
        return Ok(());
    }
    let job = dump::parse(line, now()).map_err(|message| bad(&message))?;
    let tube = tube.or(job.tube.as_deref()).ok_or_else(|| bad("no tube, and no --tube"))?;
    let Some(conn) = conn else {
        work.add(1);
        return Ok(());
    };
    conn.use_tube(tube)?;
    let mut key = String::new();
    if let Some(own) = job.key {
        match conn.has_keys()? {
            true => key = format!(" idp:{own}"),
            false => work.fail("this server has no unique keys: a job is put without its key"),
        }
    }
    let inserted = conn.put(&format!("{} {} {}", job.pri, job.delay, job.ttr), &key, &job.body)?;
    // INSERTED, an id, and the state of a job with this key.
    match inserted.split(' ').collect::<Vec<_>>()[..] {
        [_, id, _] => work.fail(&format!("not put: job {id} has its key")),
        _ => work.add(1),
    }
    Ok(())
}
