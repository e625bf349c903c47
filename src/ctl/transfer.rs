//! `put`, `export` and `import`: jobs that come into a tube, or leave it.
//!
//! A job that leaves is reserved, written, and deleted last: a crash in between leaves it in both places,
//! and never in none.

use super::act::{count_blocked, give_back};
use super::conn::{Fields, lacks};
use super::look;
use super::select::{NOT_HELD, Selection, Task};
use super::{Ctl, EXIT_PARTLY, EXIT_USAGE, Flags, args, complain, dump, print};
use super::{print_with, unwritten, usage_error};
use crate::engine::text::{CountOf, name_prefix_len};
use crate::flags;
use crate::os::failure::Failure;
use crate::os::sys::clock;
use rustix::io::Errno;
use std::io::{self, BufRead, Read};

/// The priority and the TTR of a job for which nothing else is asked.
pub const DEFAULT_PRI: u32 = 1024;
pub const DEFAULT_TTR: u32 = 60;

/// Jobs are exported together until their bodies have this many bytes: they are in memory meanwhile.
const PIECE_MAX: u64 = 1 << 20;

/// `put`
pub fn put(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let tube = args::tube(&args.words[0])?;
    let pri = args.number("pri")?.unwrap_or(DEFAULT_PRI).into();
    let delay = args.time("delay")?.unwrap_or(0).into();
    let ttr = args.time("ttr")?.unwrap_or(DEFAULT_TTR).into();
    let mut tags = String::new();
    for (option, word, example) in [("key", "idp", 600), ("con", "con", 2)] {
        let Some(key) = args.text(option) else { continue };
        let expected = format!("a key, such as order-17:{example} or order-17");
        let bad = || usage_error(&format!("--{option} {key}: not {expected}"));
        tags += &tag(word, &key).ok_or_else(bad)?;
    }
    let mut body = Vec::new();
    if let Some(word) = args.words.get(1) {
        body.extend(word.bytes());
    } else if let Err(error) = io::stdin().lock().read_to_end(&mut body) {
        return Err(Failure::new(EXIT_PARTLY, format!("cannot read the body from stdin: {error}")));
    }
    if ctl.is_dry_run {
        let bytes = CountOf(body.len() as u64, "byte");
        return ctl.would(&format!("put {bytes} into tube {tube}"));
    }
    if !tags.is_empty() && !ctl.conn.has_keys()? {
        return Err(lacks("keys of jobs"));
    }
    let (id, other) = ctl.conn.put(tube, [pri, delay, ttr], &tags, &body)?;
    if let Some(state) = other {
        complain(&format!("job {id} has this key already ({})", state.to_lowercase()));
    }
    print(&ctl.either(Fields::of([("id", id.clone())]), id))
}

/// Returns the tag of a put with this word: a key, or a key, a colon and a number. The limit of `con` is at least
/// 1. Returns `None` if `key` is something else.
pub fn tag(word: &str, key: &str) -> Option<String> {
    let least = u32::from(word == "con");
    let number = &key[name_prefix_len(key.as_bytes())?..];
    let is_valid = match number.strip_prefix(':') {
        Some(number) => flags::number(number).is_some_and(|number: u32| number >= least),
        None => number.is_empty(),
    };
    is_valid.then(|| format!(" {word}:{key}"))
}

/// `export`
pub fn export(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let takes = args.has("take");
    let (verb, states): (_, &[&str]) =
        if takes { ("take", NOT_HELD) } else { ("export", &["any"]) };
    let tube = look::tube(&mut ctl.conn, &args.words[0])?;
    let task = Task { verb, done: "exported", to: "", asks: takes };
    Selection::of_tube(tube, states).run(ctl, &task, |ctl, jobs| {
        let mut bytes = 0;
        let mut pieces = jobs.chunk_by(|job, _| {
            bytes += job.number("bytes");
            let has_room = bytes < PIECE_MAX;
            bytes *= u64::from(has_room);
            has_room
        });
        pieces.try_for_each(|piece| export_jobs(ctl, piece, takes))
    })
}

/// Writes jobs to stdout. If it `takes` them, they are reserved before, and deleted once stdout is synced.
fn export_jobs(ctl: &mut Ctl, jobs: &[Fields], takes: bool) -> Result<(), Failure> {
    let Ctl { conn, work, .. } = ctl;
    let word = if takes { "reserve-job" } else { "peek" };
    let (mut lines, mut written, mut left) = (String::new(), Vec::new(), Vec::<Fields>::new());
    let replies = conn.ask_each(jobs, |job| format!("{word} {}", job.text("id")))?;
    for (job, reply) in jobs.iter().zip(replies) {
        match reply.content(word)? {
            Some(body) => {
                lines += &(dump::line(job, &body, clock::time_of_day().as_nanos()) + "\n");
                written.push(job);
            }
            None => left.push(job.clone()),
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
        let id = job.text("id");
        match reply.line == "DELETED" {
            true => work.add(1),
            false => work.fail(&format!("job {id}: written and not deleted, as its TTR has ended")),
        }
    }
    match written[..] {
        _ if left.is_empty() => Ok(()),
        [] => count_blocked(conn, work, &left),
        // The jobs that were written no longer block others with their `con:` key.
        [_, ..] => export_jobs(ctl, &left, takes),
    }
}

/// `import`
pub fn import(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let tube = args.text("tube");
    tube.as_deref().map(args::tube).transpose()?;
    ctl.begin("import", "imported", 0);
    for (index, line) in io::stdin().lock().split(b'\n').enumerate() {
        if ctl.work.is_stopped() {
            break;
        }
        let line = line.map_err(|error| Failure::new(EXIT_USAGE, error.to_string()));
        let put = line.and_then(|line| import_line(ctl, &line, tube.as_deref()));
        put.map_err(|Failure { exit_code, message }| {
            let (number, done) = (index + 1, CountOf(ctl.work.done, "job"));
            let message = format!("line {number}: {message}; {done} put before it");
            Failure::new(exit_code, message)
        })?;
    }
    Ok(())
}

/// Puts the job of a line.
fn import_line(ctl: &mut Ctl, line: &[u8], tube: Option<&str>) -> Result<(), Failure> {
    let bad = |message: &str| Failure::new(EXIT_USAGE, message);
    let line = str::from_utf8(line).map_err(|_| bad("not UTF-8"))?;
    if line.trim().is_empty() {
        return Ok(());
    }
    let job =
        dump::parse(line, clock::time_of_day().as_nanos()).map_err(|message| bad(&message))?;
    let tube = tube.or(job.tube.as_deref()).ok_or_else(|| bad("no tube, and no --tube"))?;
    let Ctl { conn, work, .. } = ctl;
    if ctl.is_dry_run {
        work.add(1);
        return Ok(());
    }
    let mut tags = job.tags;
    if !tags.is_empty() && !conn.has_keys()? {
        work.fail("this server has no keys of jobs: a job is put without its key");
        tags.clear();
    }
    let numbers = [job.pri, job.delay, job.ttr].map(u64::from);
    match conn.put(tube, numbers, &tags, &job.body)? {
        (id, Some(_)) => work.fail(&format!("not put: job {id} has its key")),
        (_, None) => work.add(1),
    }
    Ok(())
}
