//! `pause`, `resume` and `drain`.

use super::args::{self, seconds};
use super::look::{self, Tube};
use super::print::grouped;
use super::work::{Work, confirm};
use super::{Args, Ctl, print, usage_error};
use crate::os::failure::Failure;
use crate::os::sys::clock;
use std::time::Duration;

/// The time of a pause for which nothing else is asked, in seconds.
const DEFAULT_PAUSE: u32 = 3600;

/// The time between two looks at the tubes that drain.
const POLL_PAUSE: Duration = Duration::from_millis(200);

/// `pause`
pub fn pause(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let mut words = &args.words[..];
    let mut time = DEFAULT_PAUSE;
    // The name of a tube may look like a time.
    if let [tubes @ .., last] = words
        && (!tubes.is_empty() || args.has("all"))
        && let Some(secs) = seconds(last)
    {
        (words, time) = (tubes, secs);
    }
    set_pause(ctl, args, words, time, ["pause", "paused", "would pause"])
}

/// `resume`
pub fn resume(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    set_pause(ctl, args, &args.words, 0, ["resume", "resumed", "would resume"])
}

fn set_pause(
    ctl: &Ctl,
    args: &Args,
    words: &[String],
    time: u32,
    [verb, done, would]: [&'static str; 3],
) -> Result<u8, Failure> {
    let is_all = args.has("all");
    if is_all != words.is_empty() {
        return Err(usage_error(&format!("{verb}: needs names of tubes, or --all")));
    }
    words.iter().try_for_each(|word| args::tube(word).map(|_| ()))?;
    let mut conn = ctl.connect()?;
    let names = if is_all { look::tube_names(&mut conn)? } else { words.to_vec() };
    if ctl.is_dry_run {
        let found = look::tubes(&mut conn, &names)?;
        let is_missing = |name: &&String| !found.iter().any(|tube| tube.name == **name);
        let mut work = Work::start(would, 0);
        names.iter().filter(is_missing).for_each(|name| work.fail(&not_found(name)));
        work.add(found.len() as u64);
        return work.end(Ok(()));
    }
    if is_all {
        let first = verb[..1].to_uppercase() + &verb[1..];
        confirm(ctl, &format!("{first} {} tubes?", grouped(names.len() as u64)))?;
    }
    let mut work = Work::start(done, names.len() as u64);
    let requests: Vec<String> =
        names.iter().map(|name| format!("pause-tube {name} {time}")).collect();
    let ended = names.iter().zip(conn.ask_all(&requests)?).try_for_each(|(name, reply)| {
        match reply.is("NOT_FOUND") {
            true => work.fail(&not_found(name)),
            false => {
                reply.expect("PAUSED")?;
                work.add(1);
            }
        }
        Ok(())
    });
    work.end(ended)
}

fn not_found(name: &str) -> String {
    format!("tube {name}: not found")
}

/// `drain`
pub fn drain(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let within = args.time("within")?;
    let only_held = args.has("held");
    args.words.iter().try_for_each(|word| args::tube(word).map(|_| ()))?;
    let mut conn = ctl.connect()?;
    let left = |tube: &Tube| {
        let held = if only_held { tube.held } else { tube.ready + tube.held + tube.delayed };
        (held > 0).then(|| match only_held {
            true => format!("tube {}: {held} held", tube.name),
            false => {
                let Tube { name, ready, held, delayed, .. } = tube;
                format!("tube {name}: {ready} ready, {held} held, {delayed} delayed")
            }
        })
    };
    let mut names = args.words.clone();
    names.sort();
    names.dedup();
    let mut work = Work::start(if ctl.is_dry_run { "" } else { "drained" }, 0);
    let deadline =
        within.map(|secs| clock::monotonic().as_nanos() + u64::from(secs) * 1_000_000_000);
    let mut is_first = true;
    loop {
        let tubes = look::tubes(&mut conn, &names)?;
        if is_first {
            // A tube that disappears later is drained.
            let is_missing = |name: &String| !tubes.iter().any(|tube| tube.name == *name);
            names.retain(|name| {
                if is_missing(name) {
                    work.fail(&not_found(name));
                }
                !is_missing(name)
            });
            is_first = false;
        }
        let rest: Vec<String> = tubes.iter().filter_map(left).collect();
        if ctl.is_dry_run {
            let line = if rest.is_empty() { "nothing".into() } else { rest.join("; ") };
            print(&format!("would wait for {line}"))?;
            return work.end(Ok(()));
        }
        let is_late = deadline.is_some_and(|at| clock::monotonic().as_nanos() >= at);
        let ends = rest.is_empty() || is_late || work.is_stopped();
        if ends || work.wait(POLL_PAUSE) {
            work.add((names.len() - rest.len()) as u64);
            rest.iter().for_each(|line| work.fail(line));
            return work.end(Ok(()));
        }
        work.show(&rest.join("; "));
    }
}
