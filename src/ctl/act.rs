//! `retry`, `delete` and `flush`, which act on jobs; `pause`, `resume` and `drain`, which act on tubes.

use super::args::{self, A_TIME, seconds};
use super::conn::Fields;
use super::look::{self, NOT_HELD, Tube};
use super::print::cut;
use super::work::Task;
use super::{Ctl, Flags, Result, usage_error};
use crate::engine::text::CountOf;
use crate::os::sys::clock;
use std::time::Duration;

/// The time of a pause for which nothing else is asked, in seconds.
const DEFAULT_PAUSE: u32 = 3600;

/// The time between two looks at the tubes that drain.
const POLL_PAUSE: Duration = Duration::from_millis(200);

/// `retry`
pub fn retry(ctl: &mut Ctl, args: &Flags) -> Result {
    let (asks, limit, mut states) = (args.has("all"), args.number("limit")?, vec!["buried"]);
    states.extend(args.has("delayed").then_some("delayed"));
    let mut task = Task { asks, states, limit, ..Task::default() };
    let needs = |what: &str| usage_error(format_args!("retry: needs {what}"));
    match (&args.words[..], asks, limit) {
        (_, false, None) => {
            let ids = args.ids(0);
            task.ids = ids.map_err(|_| needs("ids of jobs, or a tube with --all or --limit N"))?;
        }
        ([tube], true, None) | ([tube], false, Some(_)) => {
            task.tube = Some(look::tube(&mut ctl.conn, tube)?);
        }
        _ => return Err(needs("one tube, and --all or --limit N")),
    }
    task.run(ctl, &|ctl, jobs| {
        ctl.request(jobs, |job| format!("kick-job {}", job.text("id")), "KICKED")
    })
}

/// `delete`
pub fn delete(ctl: &mut Ctl, args: &Flags) -> Result {
    let (ids, states) = (args.ids(0)?, NOT_HELD.to_vec());
    Task { asks: ids.len() > 1, ids, states, ..Task::default() }.run(ctl, &delete_each)
}

fn delete_each<'j>(ctl: &mut Ctl, jobs: &'j [Fields]) -> Result<Vec<&'j Fields>> {
    ctl.request(jobs, |job| format!("delete {}", job.text("id")), "DELETED")
}

/// `flush`
pub fn flush(ctl: &mut Ctl, args: &Flags) -> Result {
    ctl.verb = "delete";
    let tube = look::tube(&mut ctl.conn, &args.words[0])?;
    let states = match args.has("buried") {
        true => vec!["buried"],
        false if ctl.conn.has_more()? => vec!["any"],
        false => NOT_HELD.to_vec(),
    };
    let task = Task { asks: true, tube: Some(tube), states, ..Task::default() };
    if task.begin(ctl)? { flush_selected(ctl, &task) } else { Ok(()) }
}

/// Deletes the buried jobs of a tube, or all. Without a command for that they are deleted one by one, and those
/// that workers hold stay.
pub fn flush_selected(ctl: &mut Ctl, task: &Task) -> Result {
    let Some(tube) = &task.tube else { return Ok(()) };
    if !ctl.conn.has_more()? {
        return task.each(ctl, &delete_each);
    }
    let word = if task.states == ["buried"] { "flush-buried" } else { "flush-tube" };
    let reply = ctl.conn.ask(&format!("{word} {}", tube.name))?;
    // Without a job, the tube may be gone since.
    if reply.word(0) != "NOT_FOUND" {
        ctl.work.add(reply.expect("FLUSHED")?.word(1).parse().unwrap_or(0));
    }
    Ok(())
}

/// `pause`
pub fn pause(ctl: &mut Ctl, args: &Flags) -> Result {
    let (mut words, mut time) = (&args.words[..], DEFAULT_PAUSE);
    // The name of a tube may look like a time.
    if let [tubes @ .., last] = words
        && (!tubes.is_empty() || args.has("all"))
        && let Some(secs) = seconds(last)
    {
        (words, time) = (tubes, secs);
    }
    // Such as `10 min`.
    for word in words.iter().filter(|word| word.starts_with(|first: char| first.is_ascii_digit())) {
        if look::find_tube(&mut ctl.conn, word)?.is_none() {
            return Err(usage_error(format_args!("{word}: neither a tube nor {A_TIME}")));
        }
    }
    set_pause(ctl, args, words, time)
}

/// `resume`
pub fn resume(ctl: &mut Ctl, args: &Flags) -> Result {
    set_pause(ctl, args, &args.words, 0)
}

fn set_pause(ctl: &mut Ctl, args: &Flags, words: &[String], time: u32) -> Result {
    let is_all = args.has("all");
    if is_all != words.is_empty() {
        let needs = "needs names of tubes, or --all";
        return Err(usage_error(format_args!("{}: {needs}", ctl.verb)));
    }
    words.iter().try_for_each(|word| args::tube(word).map(|_| ()))?;
    let names = if is_all { look::tube_names(&mut ctl.conn)? } else { words.to_vec() };
    let count = names.len() as u64;
    if is_all {
        ctl.confirm(CountOf(count, "tube"))?;
    }
    ctl.begin(count);
    let tubes = known(ctl, &names)?;
    if ctl.is_dry_run {
        ctl.work.add(tubes.len() as u64);
        return Ok(());
    }
    ctl.request(&tubes, |tube| format!("pause-tube {} {time}", tube.name), "PAUSED").map(|_| ())
}

/// Returns those of these tubes that are there. The others are reported.
fn known(ctl: &mut Ctl, names: &[String]) -> Result<Vec<Tube>> {
    let mut known = Vec::new();
    for (name, tube) in names.iter().zip(look::tubes(&mut ctl.conn, names)?) {
        match tube {
            Some(tube) => known.push(tube),
            None => ctl.work.fail(format_args!("tube {name}: not found")),
        }
    }
    Ok(known)
}

/// `drain`
pub fn drain(ctl: &mut Ctl, args: &Flags) -> Result {
    let within = args.time("within")?;
    let states: &[&str] =
        if args.has("held") { &["reserved"] } else { &["ready", "reserved", "delayed"] };
    args.words.iter().try_for_each(|word| args::tube(word).map(|_| ()))?;
    let line = |tube: &Tube, name_max: usize| {
        let word = |state| if state == "reserved" { "held" } else { state };
        let count = |state: &&'static str| format!("{} {}", tube.jobs(state), word(*state));
        let counts: Vec<String> = states.iter().map(count).collect();
        let paused = if tube.stats.number("pause-time-left") > 0 { ", paused" } else { "" };
        format!("tube {}: {}{paused}", cut(&tube.name, name_max, true), counts.join(", "))
    };
    if !ctl.is_dry_run {
        ctl.begin(0);
    }
    let start = clock::monotonic();
    let mut tubes = known(ctl, &args.words)?;
    let names: Vec<String> = tubes.iter().map(|tube| tube.name.clone()).collect();
    loop {
        tubes.retain(|tube| states.iter().any(|state| tube.jobs(state) > 0));
        let lines: Vec<String> = tubes.iter().map(|tube| line(tube, usize::MAX)).collect();
        if ctl.is_dry_run {
            let lines = if lines.is_empty() { "nothing".into() } else { lines.join("; ") };
            return ctl.would(format_args!("wait for {lines}"));
        }
        // One line of a terminal, so that the next one replaces it.
        let first = tubes.first().map_or(String::new(), |tube| line(tube, 20));
        let more = tubes.len().saturating_sub(1);
        ctl.work.show(&if more > 0 { format!("{first}; {more} more") } else { first });
        let waited = clock::monotonic().since(start).whole_secs();
        let is_late = within.is_some_and(|secs| waited >= secs.into());
        if tubes.is_empty() || is_late || ctl.work.wait(POLL_PAUSE) {
            ctl.work.add((names.len() - tubes.len()) as u64);
            lines.iter().for_each(|line| ctl.work.fail(line));
            return Ok(());
        }
        // A tube that has disappeared is drained.
        tubes = look::tubes(&mut ctl.conn, &names)?.into_iter().flatten().collect();
    }
}
