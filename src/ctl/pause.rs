//! `pause`, `resume` and `drain`.

use super::args::{self, seconds};
use super::look::{self, Tube};
use super::print::{capitalized, cut};
use super::{Ctl, Flags, usage_error};
use crate::engine::text::CountOf;
use crate::os::failure::Failure;
use crate::os::sys::clock;
use std::time::Duration;

/// The time of a pause for which nothing else is asked, in seconds.
const DEFAULT_PAUSE: u32 = 3600;

/// The time between two looks at the tubes that drain.
const POLL_PAUSE: Duration = Duration::from_millis(200);

/// `pause`
pub fn pause(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let mut work = (&args.words[..], DEFAULT_PAUSE);
    // The name of a tube may look like a time.
    if let [tubes @ .., last] = work.0
        && (!tubes.is_empty() || args.has("all"))
        && let Some(secs) = seconds(last)
    {
        work = (tubes, secs);
    }
    set_pause(ctl, args, work, ("pause", "paused"))
}

/// `resume`
pub fn resume(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    set_pause(ctl, args, (&args.words, 0), ("resume", "resumed"))
}

fn set_pause(
    ctl: &mut Ctl,
    args: &Flags,
    (words, time): (&[String], u32),
    (verb, done): (&str, &str),
) -> Result<(), Failure> {
    if args.has("all") != words.is_empty() {
        return Err(usage_error(&format!("{verb}: needs names of tubes, or --all")));
    }
    words.iter().try_for_each(|word| args::tube(word).map(|_| ()))?;
    let is_all = words.is_empty();
    let names = if is_all { look::tube_names(&mut ctl.conn)? } else { words.to_vec() };
    if is_all && !ctl.is_dry_run {
        let tubes = CountOf(names.len() as u64, "tube");
        ctl.confirm(&format!("{} {tubes}?", capitalized(verb)))?;
    }
    ctl.begin(verb, done, names.len() as u64);
    let request = |name: &String| match ctl.is_dry_run {
        true => format!("stats-tube {name}"),
        false => format!("pause-tube {name} {time}"),
    };
    let replies = ctl.conn.ask_each(&names, request)?;
    for (name, reply) in names.iter().zip(replies) {
        match reply.word() {
            "NOT_FOUND" => ctl.work.fail(&format!("tube {name}: not found")),
            "PAUSED" | "OK" => ctl.work.add(1),
            _ => return Err(reply.refusal()),
        }
    }
    Ok(())
}

/// `drain`
pub fn drain(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let within = args.time("within")?;
    let states: &[&str] =
        if args.has("held") { &["reserved"] } else { &["ready", "reserved", "delayed"] };
    args.words.iter().try_for_each(|word| args::tube(word).map(|_| ()))?;
    let is_drained = |tube: &Tube| states.iter().all(|state| tube.jobs(state) == 0);
    let line = |tube: &Tube, name_max: usize| {
        let count = |state: &&str| {
            format!("{} {}", tube.jobs(state), if *state == "reserved" { "held" } else { state })
        };
        let counts = states.iter().map(count).collect::<Vec<_>>().join(", ");
        format!("tube {}: {counts}", cut(&tube.name, name_max, true))
    };
    if !ctl.is_dry_run {
        ctl.begin("drain", "drained", 0);
    }
    let start = clock::monotonic();
    let mut tubes = look::tubes(&mut ctl.conn, &args.words)?;
    // A tube that disappears later is drained.
    let is_there = |name: &String| tubes.iter().any(|tube| tube.name == *name);
    let (names, missing): (Vec<_>, Vec<_>) = args.words.iter().cloned().partition(is_there);
    missing.iter().for_each(|name| ctl.work.fail(&format!("tube {name}: not found")));
    loop {
        let rest: Vec<&Tube> = tubes.iter().filter(|tube| !is_drained(tube)).collect();
        let lines = rest.iter().map(|tube| line(tube, usize::MAX)).collect::<Vec<_>>();
        if ctl.is_dry_run {
            let lines = if rest.is_empty() { "nothing".into() } else { lines.join("; ") };
            return ctl.would(&format!("wait for {lines}"));
        }
        let waited = clock::monotonic().since(start).whole_secs();
        let is_late = within.is_some_and(|secs| waited >= secs.into());
        // One line of a terminal, so that the next one replaces it.
        let first = rest.first().map_or(String::new(), |tube| line(tube, 20));
        let more = rest.len().saturating_sub(1);
        ctl.work.show(&if more > 0 { format!("{first}; {more} more") } else { first });
        if rest.is_empty() || is_late || ctl.work.wait(POLL_PAUSE) {
            ctl.work.add((names.len() - rest.len()) as u64);
            lines.iter().for_each(|line| ctl.work.fail(line));
            return Ok(());
        }
        tubes = look::tubes(&mut ctl.conn, &names)?;
    }
}
