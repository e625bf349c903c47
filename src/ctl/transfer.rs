//! `put`, `move`, `export` and `import`: jobs that come into a tube, or leave it.

use super::conn::{Conn, Fields};
use super::look::{self, NOT_HELD};
use super::work::{Input, Task};
use super::{Ctl, EXIT_PARTLY, EXIT_USAGE, Flags, Result, args, complain, dump, print};
use super::{print_with, unwritten, usage_error};
use crate::engine::text::{CountOf, name_prefix_len};
use crate::flags;
use crate::os::failure::Failure;
use crate::os::sys::clock;
use crate::os::sys::signals::Signals;
use rustix::io::Errno;
use std::io::{self, BufRead, BufReader, Read};

/// The priority and the TTR of a job for which nothing else is asked.
pub const DEFAULT_PRI: u32 = 1024;
pub const DEFAULT_TTR: u32 = 60;

/// The bodies of jobs that are exported together, which are in memory meanwhile, have at most this many bytes.
const PIECE_MAX: u64 = 1 << 20;

/// A job with its body.
type Whole<'j> = (&'j Fields, Vec<u8>);

/// `put`
pub fn put(ctl: &mut Ctl, args: &Flags) -> Result {
    let tube = args::tube(&args.words[0])?;
    let pri = args.number("pri")?.unwrap_or(DEFAULT_PRI).into();
    let delay = args.time("delay")?.unwrap_or(0).into();
    let ttr = args.time("ttr")?.unwrap_or(DEFAULT_TTR).into();
    let mut tags = String::new();
    for (option, word, example) in [("key", "idp", 600), ("con", "con", 2)] {
        let expected = format!("a key, such as order-17:{example} or order-17");
        tags += &args.value(option, &expected, |key| tag(word, key))?.unwrap_or_default();
    }
    let mut body = Vec::new();
    if let Some(word) = args.words.get(1) {
        body.extend(word.bytes());
    } else if let Err(error) = io::stdin().lock().read_to_end(&mut body) {
        return Err(Failure::new(EXIT_PARTLY, format!("cannot read the body from stdin: {error}")));
    }
    if !tags.is_empty() {
        ctl.conn.must_have("keys of jobs")?;
    }
    if ctl.is_dry_run {
        let bytes = CountOf(body.len() as u64, "byte");
        return ctl.would(format_args!("put {bytes} into tube {tube}"));
    }
    let reply = ctl.conn.put(tube, [pri, delay, ttr], &tags, &body)?;
    let (id, state) = (reply.word(1), reply.word(2).to_lowercase());
    if !state.is_empty() {
        complain(format_args!("job {id} has this key already ({state})"));
    }
    print(ctl.either("id", id.into(), id.into()))
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

/// `move`
pub fn move_jobs(ctl: &mut Ctl, args: &Flags) -> Result {
    let (from, to) = (args::tube(&args.words[0])?, args::tube(&args.words[1])?);
    let ids = args.ids(2)?;
    let states = match args.state()? {
        Some("reserved") => return Err(usage_error("move: held jobs stay with their workers")),
        _ if from == to => return Err(usage_error("move: both tubes are the same")),
        Some("any") => NOT_HELD.to_vec(),
        None if !ids.is_empty() => NOT_HELD.to_vec(),
        state => vec![state.unwrap_or("buried")],
    };
    let limit = args.number("limit")?;
    let tube = Some(look::tube(&mut ctl.conn, from)?);
    let task = Task { to: format!(" to {to}"), asks: true, tube, ids, states, limit };
    let put = |conn: &mut Conn, jobs: &[Whole<'_>]| {
        jobs.iter().try_for_each(|(job, body)| {
            let numbers = [job.number("pri"), delay_left(job), job.number("ttr")];
            let put = conn.put(to, numbers, "", body).map(|_| ());
            put.map_err(|Failure { exit_code, message }| {
                Failure::new(exit_code, format!("job {}: {message}", job.text("id")))
            })
        })
    };
    // One at a time, so that at most one is in both tubes.
    let twice = "now in both tubes, as its time to run has ended";
    task.run(ctl, &|ctl, jobs| take(ctl, jobs, 1, twice, put))
}

/// `export`
pub fn export(ctl: &mut Ctl, args: &Flags) -> Result {
    let takes = args.has("take");
    let tube = Some(look::tube(&mut ctl.conn, &args.words[0])?);
    if !takes {
        ctl.conn.must_have("list-jobs")?;
    }
    ctl.verb = if takes { "take" } else { "export" };
    let states = if takes { NOT_HELD.to_vec() } else { vec!["any"] };
    Task { asks: takes, tube, states, ..Task::default() }.run(ctl, &|ctl, jobs| {
        let largest = jobs.iter().map(|job| job.number("bytes")).fold(1, u64::max);
        let count = usize::try_from(PIECE_MAX / largest).unwrap_or(1).max(1);
        if takes {
            let twice = "written and not deleted, as its TTR has ended";
            return take(ctl, jobs, count, twice, |_, jobs| print_jobs(jobs).and_then(|()| sync()));
        }
        for piece in jobs.chunks(count) {
            let (found, _) = with_bodies(&mut ctl.conn, piece.iter().collect(), "peek")?;
            print_jobs(&found)?;
            ctl.work.add(found.len() as u64);
        }
        Ok(Vec::new())
    })
}

/// Takes jobs out of their tube, some at once: they are reserved, saved, and deleted last. A crash in between
/// leaves them in both places, and never in none. Those that cannot be saved return to the state that they had.
/// `twice` is the message for a job that cannot be deleted. Returns those that cannot be reserved.
fn take<'j>(
    Ctl { conn, work, .. }: &mut Ctl,
    jobs: &'j [Fields],
    count: usize,
    twice: &str,
    save: impl Fn(&mut Conn, &[Whole<'_>]) -> Result,
) -> Result<Vec<&'j Fields>> {
    let mut missed = Vec::new();
    for piece in jobs.chunks(count) {
        let mut left = piece.iter().collect();
        while !work.is_stopped() {
            let (taken, others) = with_bodies(conn, left, "reserve-job")?;
            // The jobs that are gone no longer block others with their `con:` key.
            left = others;
            if taken.is_empty() {
                break;
            }
            if let Err(failure) = save(conn, &taken) {
                let _ = taken.iter().try_for_each(|(job, _)| give_back(conn, job));
                return Err(failure);
            }
            let replies = conn.ask_each(&taken, |(job, _)| format!("delete {}", job.text("id")))?;
            for ((job, _), reply) in taken.iter().zip(replies) {
                match reply.line == "DELETED" {
                    true => work.add(1),
                    false => work.fail(format_args!("job {}: {twice}", job.text("id"))),
                }
            }
        }
        missed.extend(left);
    }
    Ok(missed)
}

/// Returns those of these jobs whose bodies a command gets, and the others.
fn with_bodies<'j>(
    conn: &mut Conn,
    jobs: Vec<&'j Fields>,
    command: &str,
) -> Result<(Vec<Whole<'j>>, Vec<&'j Fields>)> {
    let (mut found, mut others) = (Vec::new(), Vec::new());
    let replies = conn.ask_each(&jobs, |job| format!("{command} {}", job.text("id")))?;
    for (job, reply) in jobs.into_iter().zip(replies) {
        match reply.content(command)? {
            Some(body) => found.push((job, body)),
            None => others.push(job),
        }
    }
    Ok((found, others))
}

/// Returns a reserved job to the state that it had.
fn give_back(conn: &mut Conn, job: &Fields) -> Result {
    let (id, pri) = (job.number("id"), job.number("pri"));
    let request = match job.text("state") {
        "buried" => format!("bury {id} {pri}"),
        _ => format!("release {id} {pri} {}", delay_left(job)),
    };
    conn.ask(&request).map(|_| ())
}

/// Returns the rest of the delay of a job, in seconds; 0 if it has none. Whole ones are shown, and no delay ends early.
pub fn delay_left(job: &Fields) -> u64 {
    if job.text("state") == "delayed" { job.number("time-left") + 1 } else { 0 }
}

/// Writes jobs to stdout.
fn print_jobs(jobs: &[Whole<'_>]) -> Result {
    let now = clock::time_of_day().as_nanos();
    print_with(|out| {
        jobs.iter().try_for_each(|(job, body)| writeln!(out, "{}", dump::line(job, body, now)))
    })
}

/// Waits until stdout is on disk, if it is a file.
fn sync() -> Result {
    match rustix::fs::fsync(io::stdout()) {
        // It is none.
        Err(Errno::INVAL | Errno::ROFS | Errno::OPNOTSUPP) => Ok(()),
        synced => synced.map_err(|error| unwritten(&error.into())),
    }
}

/// `import`
pub fn import(ctl: &mut Ctl, args: &Flags) -> Result {
    let tube = args.text("tube");
    tube.as_deref().map(args::tube).transpose()?;
    ctl.begin(0);
    // The size of a file, for progress; 0 for a pipe or a terminal.
    let size = rustix::fs::fstat(io::stdin()).map_or(0, |stat| stat.st_size.cast_unsigned());
    let mut read = 0;
    for (index, line) in BufReader::new(Input(Signals::take().ok())).split(b'\n').enumerate() {
        if ctl.work.is_stopped() {
            break;
        }
        let line = line.map_err(|error| Failure::new(EXIT_USAGE, error.to_string()));
        let put = line.and_then(|line| {
            read += line.len() as u64 + 1;
            import_line(ctl, &line, tube.as_deref())
        });
        put.map_err(|Failure { exit_code, message }| {
            let (number, done) = (index + 1, CountOf(ctl.work.done, "job"));
            let message = format!("line {number}: {message}; {done} put before it");
            Failure::new(exit_code, message)
        })?;
        let done = CountOf(ctl.work.done, "job");
        ctl.work.show_part(read, size, format_args!("{done},"));
    }
    Ok(())
}

/// Puts the job of a line.
fn import_line(ctl: &mut Ctl, line: &[u8], tube: Option<&str>) -> Result {
    let bad = |message: String| Failure::new(EXIT_USAGE, message);
    let line = str::from_utf8(line).map_err(|_| bad("not UTF-8".into()))?;
    if line.trim().is_empty() {
        return Ok(());
    }
    let job = dump::parse(line, clock::time_of_day().as_nanos()).map_err(bad)?;
    let tube = tube.or(job.tube.as_deref());
    let tube = tube.ok_or_else(|| bad("no tube, and no --tube".into()))?;
    let Ctl { conn, work, .. } = ctl;
    if ctl.is_dry_run {
        work.add(1);
        return Ok(());
    }
    let mut tags = job.tags;
    if !tags.is_empty() && !conn.has_more()? {
        work.fail("this server has no keys of jobs: a job is put without its key");
        tags.clear();
    }
    let numbers = [job.pri, job.delay, job.ttr].map(u64::from);
    let reply = conn.put(tube, numbers, &tags, &job.body)?;
    match reply.word(2) {
        "" => work.add(1),
        _ => work.fail(format_args!("not put: job {} has its key", reply.word(1))),
    }
    Ok(())
}
