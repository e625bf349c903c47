//! `status`, `check`, `top` and `tubes`: all tubes at once.

use super::conn::Fields;
use super::look::{self, TIME_TO_DELETE, Tube};
use super::print::{Listing, json_string, terminal_size};
use super::work::Work;
use super::{Ctl, EXIT_UNKNOWN, Flags, Result, args, complain, print, print_with, usage_error};
use crate::attention::{self, Level, Problem, ServerFacts};
use crate::engine::text::{CountOf, Grouped, Span};
use crate::engine::time::Nanos;
use crate::os::sys::clock;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

/// Looks at all tubes: those that need attention first, then by name. What happened since is known from the look
/// before. `deleted_at` is when a job was deleted, as far as it is known, from a tube that was not seen before.
fn look_again(ctl: &mut Ctl, before: &[Tube], deleted_at: Option<Nanos>) -> Result<Vec<Tube>> {
    let now = clock::monotonic();
    let before: HashMap<&str, &Tube> = before.iter().map(|tube| (&*tube.name, tube)).collect();
    let mut tubes = look::all_tubes_and_waits(&mut ctl.conn)?;
    for tube in &mut tubes {
        (tube.seen_at, tube.deleted_at) = (now, deleted_at);
        let Some(before) = before.get(&*tube.name) else { continue };
        let nanos = now.since(before.seen_at).as_nanos().max(1);
        #[expect(clippy::cast_precision_loss, reason = "rates are printed with one digit")]
        let rate = |key: &str| {
            let count = tube.stats.number(key).saturating_sub(before.stats.number(key));
            count as f64 * 1e9 / nanos as f64
        };
        let [puts, deletes] = ["total-jobs", "cmd-delete"].map(rate);
        tube.rates = Some([puts, deletes]);
        tube.deleted_at = if deletes > 0.0 { Some(now) } else { before.deleted_at };
    }
    tubes.sort_by_cached_key(|tube| Reverse(tube.problems().first().map(|problem| problem.level)));
    Ok(tubes)
}

/// Prints the tubes in at most this many lines after the header, with rates in `top`.
fn show(ctl: &Ctl, tubes: &[Tube], lines: usize, is_top: bool) -> Result {
    let most = if tubes.len() > lines { lines.saturating_sub(1) } else { lines };
    let rates = if is_top { "in>IN/S out>OUT/S " } else { "" };
    let columns = format!(
        "tube~TUBE ready>READY held>HELD delayed>DELAY buried>BURIED oldest:OLDEST \
         workers>WORKERS idle>IDLE {rates}note.NOTE"
    );
    let mut listing = Listing::new(ctl.is_json, &columns);
    for tube in tubes.iter().take(most) {
        let problems = tube.problems();
        let of_worst = |text: fn(&Problem) -> &str| {
            problems.first().map_or("null".into(), |worst| json_string(text(worst)))
        };
        let jobs = |state| tube.jobs(state).to_string();
        let mut row = Fields::of([
            ("tube", json_string(&tube.name)),
            ("level", of_worst(|problem| problem.level.name())),
            ("rule", of_worst(|problem| problem.rule)),
            ("ready", jobs("ready")),
            ("held", jobs("reserved")),
            ("delayed", jobs("delayed")),
            ("buried", jobs("buried")),
            ("oldest", tube.oldest.to_string()),
            ("workers", tube.watching().to_string()),
            ("idle", tube.stats.number("current-waiting").to_string()),
        ]);
        let mut texts = vec![("note", note(tube, &problems))];
        if tube.jobs("ready") == 0 {
            texts.push(("oldest", "-".into()));
        }
        for (index, key) in ["in", "out"].into_iter().enumerate().filter(|_| is_top) {
            let rate = tube.rates.map(|rates| format!("{:.1}", rates[index]));
            texts.push((key, rate.clone().unwrap_or("-".into())));
            row.push(key, rate.unwrap_or("null".into()));
        }
        listing.add(&row, &texts)?;
    }
    listing.print()?;
    let more = tubes.len().saturating_sub(most);
    if more > 0 { print(format_args!("and {} more", Grouped(more as u64))) } else { Ok(()) }
}

/// Returns the rules of the problems, and the rest of a pause.
fn note(tube: &Tube, problems: &[Problem]) -> String {
    let rules = problems.iter().map(|problem| problem.rule).filter(|rule| *rule != "paused");
    let mut notes: Vec<String> = rules.map(str::to_owned).collect();
    let pause = tube.stats.number("pause-time-left");
    notes.extend((pause > 0).then(|| format!("paused {}", Span(pause))));
    notes.join(", ")
}

/// Returns whether a tube has the problem for which two looks are needed.
fn has_stuck(tubes: &[Tube]) -> bool {
    tubes.iter().flat_map(Tube::problems).any(|problem| problem.rule == "stuck")
}

/// `status`
pub fn status(ctl: &mut Ctl, _: &Flags) -> Result {
    let tubes = look_again(ctl, &[], None)?;
    show(ctl, &tubes, usize::MAX, false)?;
    if terminal_size().is_some_and(|(_, rows)| tubes.len() >= rows) && !ctl.is_json {
        let is_bad = |tube: &&Tube| tube.problems().iter().any(|it| it.level > Level::Notice);
        let bad = Grouped(tubes.iter().filter(is_bad).count() as u64);
        let all = CountOf(tubes.len() as u64, "tube");
        complain(format_args!("{bad} of {all} need attention; they are at the top"));
    }
    server_problems(ctl)?.iter().for_each(complain_of);
    if has_stuck(&tubes) {
        complain("'stuck' assumes that no job was just deleted; 'check' looks twice");
    }
    Ok(())
}

/// `check`
pub fn check(ctl: &mut Ctl, _: &Flags) -> Result {
    let (exit_code, text) = verdict(ctl).unwrap_or_else(|failure| (EXIT_UNKNOWN, failure.message));
    ctl.work.exit_code = exit_code;
    print_state(ctl.is_json, exit_code, &text)
}

/// Prints the line of `check`.
pub fn print_state(is_json: bool, exit_code: u8, text: &str) -> Result {
    let word = ["OK", "WARNING", "CRITICAL", "UNKNOWN"][usize::from(exit_code)];
    let object = Fields::of([("state", json_string(word)), ("text", json_string(text))]);
    print(if is_json { object.to_string() } else { format!("{word}: {text}") })
}

/// Returns the exit code of a plugin of Nagios, and the worst problem.
fn verdict(ctl: &mut Ctl) -> Result<(u8, String)> {
    let mut tubes = look_again(ctl, &[], None)?;
    if has_stuck(&tubes) {
        std::thread::sleep(Duration::from_nanos(TIME_TO_DELETE.as_nanos()));
        tubes = look_again(ctl, &tubes, None)?;
    }
    // Of several that are as bad, the first: in the tube where a job has waited longest.
    tubes.sort_by_key(|tube| Reverse(tube.oldest));
    let of_server = server_problems(ctl)?.into_iter().map(|problem| ("server", problem));
    let of_tubes =
        tubes.iter().flat_map(|tube| tube.problems().into_iter().map(|it| (&*tube.name, it)));
    let problems: Vec<(&str, Problem)> =
        of_server.chain(of_tubes).filter(|(_, problem)| problem.level > Level::Notice).collect();
    let worst = problems.iter().min_by_key(|(_, problem)| Reverse(problem.level));
    let Some((place, Problem { level, text, .. })) = worst else {
        let count = |state| Grouped(tubes.iter().map(|tube| tube.jobs(state)).sum());
        let (tubes, ready) = (CountOf(tubes.len() as u64, "tube"), count("ready"));
        return Ok((0, format!("{tubes}, {ready} ready, {} buried", count("buried"))));
    };
    let more = problems.len() - 1;
    let more = if more > 0 { format!("; {} more", Grouped(more as u64)) } else { String::new() };
    // 1 is a warning, and 2 is critical.
    Ok((*level as u8, format!("{place}: {text}{more}")))
}

/// `top`
pub fn top(ctl: &mut Ctl, args: &Flags) -> Result {
    let secs = args.words.first().map_or(Some(2), |word| args::seconds(word));
    let secs = secs.filter(|&secs| secs > 0);
    let secs = secs.ok_or_else(|| usage_error("top: not a time, such as 2 or 10s"))?;
    ctl.begin(0);
    let mut tubes = Vec::new();
    loop {
        // A tube is stuck only if it was seen for long enough.
        tubes = look_again(ctl, &tubes, Some(clock::monotonic()))?;
        let problems = server_problems(ctl)?;
        let mut height = usize::MAX;
        if let Some((_, rows)) = terminal_size().filter(|_| !ctl.is_json) {
            // A line for the header, one for the cursor, and the one that clears the screen.
            height = rows.saturating_sub(3 + problems.len());
            print("\x1b[H\x1b[J")?;
        }
        show(ctl, &tubes, height, true)?;
        problems.iter().for_each(complain_of);
        if ctl.work.wait(Duration::from_secs(secs.into())) {
            // Ctrl-C is its regular end.
            ctl.work = Work::default();
            return Ok(());
        }
    }
}

/// `tubes`
pub fn tubes(ctl: &mut Ctl, _: &Flags) -> Result {
    let names = look::tube_names(&mut ctl.conn)?;
    let line = |name: String| ctl.either("tube", json_string(&name), name);
    print_with(|out| names.into_iter().try_for_each(|name| writeln!(out, "{}", line(name))))
}

/// Prints a problem of the server on stderr.
fn complain_of(Problem { level, text, .. }: &Problem) {
    complain(format_args!("{}: {text}", level.name()));
}

/// Returns the problems of the server that its protocol shows.
fn server_problems(ctl: &mut Ctl) -> Result<Vec<Problem>> {
    let stats = look::server(&mut ctl.conn)?;
    let facts = ServerFacts { is_draining: stats.text("draining") == "true", ..Default::default() };
    Ok(attention::of_server(&facts, None))
}
