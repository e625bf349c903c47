//! `retry`, `delete`, `flush` and `move`.

use super::conn::{Conn, EXIT_REFUSED, Fields, lacks};
use super::look;
use super::select::{NOT_HELD, Selection, Task, request};
use super::work::Work;
use super::{Args, Ctl, args, usage_error};
use crate::os::failure::Failure;

const DELETE: (&str, &str) = ("delete", "DELETED");

/// `retry`
pub fn retry(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let states: &[&str] = if args.has("delayed") { &["buried", "delayed"] } else { &["buried"] };
    let (is_all, limit) = (args.has("all"), args.number("limit")?);
    let needs = |what: &str| usage_error(&format!("retry: needs {what}"));
    let takes_tube = is_all || limit.is_some();
    if takes_tube && (args.words.len() > 1 || is_all && limit.is_some()) {
        return Err(needs("one tube, and --all or --limit N"));
    }
    let ids = if takes_tube { Ok(Vec::new()) } else { args.ids(0) };
    let ids = ids.map_err(|_| needs("ids of jobs, or a tube with --all or --limit N"))?;
    let mut conn = ctl.connect()?;
    let tube = if takes_tube { Some(look::tube(&mut conn, &args.words[0])?) } else { None };
    let selection = Selection { tube, ids, states, limit: limit.unwrap_or(u64::MAX) };
    let task = Task { verb: "retry", done: "retried", to: "", asks: is_all };
    selection.run(ctl, &mut conn, &task, |conn, jobs, work| {
        request(conn, jobs, ("kick-job", "KICKED"), work)
    })
}

/// `delete`
pub fn delete(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let ids = args.ids(0)?;
    let task = Task { verb: "delete", done: "deleted", to: "", asks: ids.len() > 1 };
    let selection = Selection { tube: None, ids, states: NOT_HELD, limit: u64::MAX };
    selection
        .run(ctl, &mut ctl.connect()?, &task, |conn, jobs, work| request(conn, jobs, DELETE, work))
}

/// `flush`
pub fn flush(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let name = args::tube(&args.words[0])?;
    let (word, states): (_, &[&str]) = match args.has("buried") {
        true => ("flush-buried", &["buried"]),
        false => ("flush-tube", &["any"]),
    };
    let mut conn = ctl.connect()?;
    let tube = Some(look::tube(&mut conn, name)?);
    let selection = Selection { tube, ids: Vec::new(), states, limit: u64::MAX };
    let task = Task { verb: "delete", done: "deleted", to: "", asks: true };
    let Some(mut work) = selection.begin(ctl, &task)? else { return Ok(0) };
    let reply = conn.ask(&format!("{word} {name}"))?;
    let ended = match reply.line.as_str() {
        "UNKNOWN_COMMAND" => delete_all(&mut conn, name, states, &mut work),
        // Without a job, the tube may be gone since.
        "NOT_FOUND" => Ok(()),
        _ => reply.expect("FLUSHED").map(|line| work.add(line[8..].parse().unwrap_or(0))),
    };
    work.end(ended)
}

/// Deletes the jobs of a tube in a state, or in `any`, one by one. Those that workers hold stay.
pub fn delete_all(
    conn: &mut Conn,
    name: &str,
    states: &'static [&'static str],
    work: &mut Work,
) -> Result<(), Failure> {
    let tube = look::tube(conn, name)?;
    let held = if states == ["any"] { tube.jobs("reserved") } else { 0 };
    let states = if states == ["any"] { NOT_HELD } else { states };
    let selection = Selection { tube: Some(tube), ids: Vec::new(), states, limit: u64::MAX };
    let ended = selection.each(conn, work, |conn, jobs, work| request(conn, jobs, DELETE, work));
    if held > 0 {
        work.fail(&format!("tube {name}: {held} held jobs stay"));
    }
    ended
}

/// `move`
pub fn move_jobs(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let (from, to) = (args::tube(&args.words[0])?, args::tube(&args.words[1])?);
    let ids = args.ids(2)?;
    let states: &[&str] = match args.state()? {
        Some("reserved") => return Err(usage_error("move: held jobs stay with their workers")),
        _ if from == to => return Err(usage_error("move: both tubes are the same")),
        Some("ready") => &["ready"],
        Some("delayed") => &["delayed"],
        None if !ids.is_empty() => NOT_HELD,
        None | Some("buried") => &["buried"],
        Some(_) => NOT_HELD,
    };
    let limit = args.number("limit")?.unwrap_or(u64::MAX);
    let mut conn = ctl.connect()?;
    let tube = Some(look::tube(&mut conn, from)?);
    let task = Task { verb: "move", done: "moved", to: &format!(" to {to}"), asks: true };
    let selection = Selection { tube, ids, states, limit };
    selection.run(ctl, &mut conn, &task, |conn, jobs, work| {
        for job in jobs {
            if work.done >= limit || work.is_stopped() {
                return Ok(());
            }
            move_job(conn, job, to, work)?;
        }
        Ok(())
    })
}

/// Moves a job, unless it is gone since it was found. It is deleted last: a crash in between leaves it in both
/// tubes, and never in none.
fn move_job(conn: &mut Conn, job: &Fields, to: &str, work: &mut Work) -> Result<(), Failure> {
    let id = job.number("id");
    let reply = conn.ask(&format!("reserve-job {id}"))?;
    if reply.line == "UNKNOWN_COMMAND" {
        return Err(lacks("reserve-job"));
    }
    let Some(body) = reply.job()? else { return Ok(()) };
    let numbers = [job.number("pri"), delay_left(job), job.number("ttr")];
    if let Err(Failure { exit_code, message }) = conn.put(to, numbers, "", &body) {
        if exit_code == EXIT_REFUSED {
            give_back(conn, job)?;
        }
        return Err(Failure::new(exit_code, format!("job {id}: {message}")));
    }
    match conn.ask(&format!("delete {id}"))?.line == "DELETED" {
        true => work.add(1),
        false => {
            work.fail(&format!("job {id}: now in both tubes, as its time to run has ended"));
        }
    }
    Ok(())
}

/// Returns a reserved job to the state that it had.
pub fn give_back(conn: &mut Conn, job: &Fields) -> Result<(), Failure> {
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
