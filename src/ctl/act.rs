//! `retry`, `delete`, `flush` and `move`.

use super::conn::{Conn, EXIT_REFUSED, Fields};
use super::look;
use super::select::{NOT_HELD, Selection, Task, request};
use super::work::Work;
use super::{Ctl, Flags, args, usage_error};
use crate::engine::text::CountOf;
use crate::os::failure::Failure;
use std::slice;

/// `retry`
pub fn retry(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let states: &[&str] = if args.has("delayed") { &["buried", "delayed"] } else { &["buried"] };
    let (is_all, limit) = (args.has("all"), args.number("limit")?);
    let needs = |what: &str| usage_error(&format!("retry: needs {what}"));
    let takes_tube = is_all || limit.is_some();
    if takes_tube && (args.words.len() > 1 || is_all && limit.is_some()) {
        return Err(needs("one tube, and --all or --limit N"));
    }
    let ids = if takes_tube { Ok(Vec::new()) } else { args.ids(0) };
    let ids = ids.map_err(|_| needs("ids of jobs, or a tube with --all or --limit N"))?;
    let tube = if takes_tube { Some(look::tube(&mut ctl.conn, &args.words[0])?) } else { None };
    let selection = Selection { tube, ids, states, limit: limit.unwrap_or(u64::MAX) };
    let task = Task { verb: "retry", done: "retried", to: "", asks: is_all };
    selection.run(ctl, &task, |ctl, jobs| request(ctl, jobs, "kick-job", "KICKED"))
}

/// `delete`
pub fn delete(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let ids = args.ids(0)?;
    let task = Task { verb: "delete", done: "deleted", to: "", asks: ids.len() > 1 };
    let selection = Selection { tube: None, ids, states: NOT_HELD, limit: u64::MAX };
    selection.run(ctl, &task, delete_each)
}

fn delete_each(ctl: &mut Ctl, jobs: &[Fields]) -> Result<(), Failure> {
    request(ctl, jobs, "delete", "DELETED")
}

/// `flush`
pub fn flush(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let states: &[&str] = if args.has("buried") { &["buried"] } else { &["any"] };
    let tube = look::tube(&mut ctl.conn, &args.words[0])?;
    let selection = Selection::of_tube(tube, states);
    let task = Task { verb: "delete", done: "deleted", to: "", asks: true };
    if selection.begin(ctl, &task)? { flush_selected(ctl, selection) } else { Ok(()) }
}

/// Deletes the selected jobs of a tube. Without a command for that they are deleted one by one, and those that
/// workers hold stay.
pub fn flush_selected(ctl: &mut Ctl, mut selection: Selection) -> Result<(), Failure> {
    let Some(tube) = &selection.tube else { return Ok(()) };
    let is_all = selection.states == ["any"];
    let word = if is_all { "flush-tube" } else { "flush-buried" };
    let reply = ctl.conn.ask(&format!("{word} {}", tube.name))?;
    match reply.line.as_str() {
        // Without a job, the tube may be gone since.
        "NOT_FOUND" => return Ok(()),
        "UNKNOWN_COMMAND" if is_all => {}
        "UNKNOWN_COMMAND" => return selection.each(ctl, delete_each),
        _ => {
            let line = reply.expect("FLUSHED")?;
            ctl.work.add(line[8..].parse().unwrap_or(0));
            return Ok(());
        }
    }
    let held = tube.jobs("reserved");
    let rest = format!("tube {}: {} not deleted", tube.name, CountOf(held, "held job"));
    selection.states = NOT_HELD;
    selection.each(ctl, delete_each)?;
    if held > 0 {
        ctl.work.fail(&rest);
    }
    Ok(())
}

/// `move`
pub fn move_jobs(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
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
    let tube = Some(look::tube(&mut ctl.conn, from)?);
    let task = Task { verb: "move", done: "moved", to: &format!(" to {to}"), asks: true };
    Selection { tube, ids, states, limit }.run(ctl, &task, |ctl, jobs| {
        for job in jobs {
            if ctl.work.done >= limit || ctl.work.is_stopped() {
                return Ok(());
            }
            move_job(ctl, job, to)?;
        }
        Ok(())
    })
}

/// Moves a job, unless it is gone since it was found. It is deleted last: a crash in between leaves it in both
/// tubes, and never in none.
fn move_job(Ctl { conn, work, .. }: &mut Ctl, job: &Fields, to: &str) -> Result<(), Failure> {
    let id = job.number("id");
    let reply = conn.ask(&format!("reserve-job {id}"))?;
    let Some(body) = reply.content("reserve-job")? else {
        return count_blocked(conn, work, slice::from_ref(job));
    };
    let numbers = [job.number("pri"), delay_left(job), job.number("ttr")];
    if let Err(Failure { exit_code, message }) = conn.put(to, numbers, "", &body) {
        if exit_code == EXIT_REFUSED {
            give_back(conn, job)?;
        }
        return Err(Failure::new(exit_code, format!("job {id}: {message}")));
    }
    match conn.ask(&format!("delete {id}"))?.line == "DELETED" {
        true => work.add(1),
        false => work.fail(&format!("job {id}: now in both tubes, as its time to run has ended")),
    }
    Ok(())
}

/// Counts those of these jobs that are ready, and yet could not be reserved.
pub fn count_blocked(conn: &mut Conn, work: &mut Work, jobs: &[Fields]) -> Result<(), Failure> {
    let is_ready = |job: &&Fields| job.text("state") == "ready";
    let ids: Vec<u64> = jobs.iter().filter(is_ready).map(|job| job.number("id")).collect();
    work.blocked += look::jobs(conn, &ids)?.iter().flatten().filter(is_ready).count() as u64;
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
