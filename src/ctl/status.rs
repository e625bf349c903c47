//! `status`, `check`, `top` and `tubes`: all tubes at once.

use super::conn::Fields;
use super::look::{self, Tube};
use super::print::{Listing, json_string, span, terminal_size};
use super::work::Work;
use super::{Ctl, Flags, args, complain, print, print_with, usage_error};
use crate::attention::{self, Level, Problem, ServerFacts};
use crate::engine::text::CountOf;
use crate::engine::time::Nanos;
use crate::os::failure::Failure;
use crate::os::sys::clock;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

/// The rule that needs two looks: in one, it is not known whether a job was deleted in the last 5 s.
const STUCK: &str = "stuck";
const TIME_TO_DELETE: Nanos = Nanos::from_secs(5);

/// All tubes at one time.
#[derive(Default)]
struct Look {
    at: Nanos,
    /// Those that need attention first, then by name.
    rows: Vec<Row>,
}

/// A tube with its problems, the worst first.
struct Row {
    tube: Tube,
    problems: Vec<Problem>,
    /// Jobs put and jobs deleted per second since the last look, if there was one.
    rates: [Option<f64>; 2],
    /// The time of the last look that saw a delete.
    deleted_at: Option<Nanos>,
}

impl Look {
    /// Looks at all tubes. What happened since is known from the look before.
    fn after(before: &Look, ctl: &mut Ctl) -> Result<Look, Failure> {
        let at = clock::monotonic();
        let old: HashMap<&str, &Row> =
            before.rows.iter().map(|row| (row.tube.name.as_str(), row)).collect();
        let row = |tube: Tube| {
            let old = old.get(tube.name.as_str());
            #[expect(clippy::cast_precision_loss, reason = "rates are printed with one digit")]
            let rate = |key: &str| {
                let count = tube.stats.number(key).saturating_sub(old?.tube.stats.number(key));
                Some(count as f64 * 1e9 / at.since(before.at).as_nanos().max(1) as f64)
            };
            let rates = ["total-jobs", "cmd-delete"].map(rate);
            let has_deleted = rates[1].is_some_and(|rate| rate > 0.0);
            let deleted_at =
                if has_deleted { Some(at) } else { old.and_then(|old| old.deleted_at) };
            let has_recent_delete = deleted_at.is_some_and(|then| at.since(then) < TIME_TO_DELETE);
            let problems = tube.problems(has_recent_delete);
            Row { tube, problems, rates, deleted_at }
        };
        let mut rows: Vec<Row> =
            look::all_tubes_and_waits(&mut ctl.conn)?.into_iter().map(row).collect();
        rows.sort_by_key(|row| Reverse(row.problems.first().map(|problem| problem.level)));
        Ok(Look { at, rows })
    }
}

fn is_stuck(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.problems.iter().any(|problem| problem.rule == STUCK))
}

/// Prints the first rows, with rates in `top`.
fn show(ctl: &Ctl, rows: &[Row], most: usize, is_top: bool) -> Result<(), Failure> {
    let rates = if is_top { "in>IN/S out>OUT/S " } else { "" };
    let columns = format!(
        "tube~TUBE ready>READY held>HELD delayed>DELAY buried>BURIED oldest:OLDEST \
         workers>WORKERS idle>IDLE {rates}note.NOTE"
    );
    let mut listing = Listing::new(ctl.is_json, &columns);
    for Row { tube, problems, rates, .. } in rows.iter().take(most) {
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
        let mut texts = vec![("note", note(tube, problems))];
        if tube.jobs("ready") == 0 {
            texts.push(("oldest", "-".into()));
        }
        for (key, rate) in ["in", "out"].into_iter().zip(rates).filter(|_| is_top) {
            let rate = rate.map(|rate| format!("{rate:.1}"));
            texts.push((key, rate.clone().unwrap_or("-".into())));
            row.0.push((key.into(), rate.unwrap_or("null".into())));
        }
        listing.add(&row, &texts)?;
    }
    listing.print()
}

/// Returns the rules of the problems, and the rest of a pause.
fn note(tube: &Tube, problems: &[Problem]) -> String {
    let rules = problems.iter().map(|problem| problem.rule).filter(|rule| *rule != "paused");
    let mut notes: Vec<String> = rules.map(str::to_owned).collect();
    let pause = tube.stats.number("pause-time-left");
    notes.extend((pause > 0).then(|| format!("paused {}", span(pause))));
    notes.join(", ")
}

/// `status`
pub fn status(ctl: &mut Ctl, _: &Flags) -> Result<(), Failure> {
    let Look { rows, .. } = Look::after(&Look::default(), ctl)?;
    show(ctl, &rows, usize::MAX, false)?;
    for problem in server_problems(ctl)? {
        complain(&format!("{}: {}", problem.level.name(), problem.text));
    }
    if is_stuck(&rows) {
        complain("'stuck' assumes that no job was deleted in the last 5 s; 'check' looks twice");
    }
    Ok(())
}

/// `check`
pub fn check(ctl: &mut Ctl, _: &Flags) -> Result<(), Failure> {
    let unknown = |failure: Failure| (3, "UNKNOWN", failure.message);
    let (exit_code, word, text) = verdict(ctl).unwrap_or_else(unknown);
    ctl.work.exit_code = exit_code;
    let object = Fields::of([("state", json_string(word)), ("text", json_string(&text))]);
    print(&ctl.either(object, format!("{word}: {text}")))
}

/// Returns the exit code of a plugin of Nagios, its name, and the worst problem.
fn verdict(ctl: &mut Ctl) -> Result<(u8, &'static str, String), Failure> {
    let mut look = Look::after(&Look::default(), ctl)?;
    if is_stuck(&look.rows) {
        std::thread::sleep(Duration::from_nanos(TIME_TO_DELETE.as_nanos()));
        look = Look::after(&look, ctl)?;
    }
    let rows = look.rows;
    let of_server = server_problems(ctl)?.into_iter().map(|problem| ("server", problem));
    let of_tubes = rows.iter().flat_map(|row| {
        row.problems.iter().map(|problem| (row.tube.name.as_str(), problem.clone()))
    });
    let mut problems: Vec<(&str, Problem)> = of_server.chain(of_tubes).collect();
    problems.retain(|(_, problem)| problem.level != Level::Notice);
    problems.sort_by_key(|(_, problem)| Reverse(problem.level));
    let Some((place, Problem { level, text, .. })) = problems.first() else {
        let count = |state| rows.iter().map(|row| row.tube.jobs(state)).sum::<u64>();
        let tubes = CountOf(rows.len() as u64, "tube");
        let (ready, buried) = (count("ready"), count("buried"));
        return Ok((0, "OK", format!("{tubes}, {ready} ready, {buried} buried")));
    };
    let more = match problems.len() - 1 {
        0 => String::new(),
        more => format!("; {more} more"),
    };
    let (exit_code, word) =
        if *level == Level::Critical { (2, "CRITICAL") } else { (1, "WARNING") };
    Ok((exit_code, word, format!("{place}: {text}{more}")))
}

/// `top`
pub fn top(ctl: &mut Ctl, args: &Flags) -> Result<(), Failure> {
    let secs =
        args.words.first().map_or(Some(2), |word| args::seconds(word)).filter(|&secs| secs > 0);
    let secs = secs.ok_or_else(|| usage_error("top: not a time, such as 2 or 10s"))?;
    ctl.begin("", "", 0);
    let mut look = Look::default();
    loop {
        look = Look::after(&look, ctl)?;
        // A line for the header, one for the cursor, and the one that clears the screen.
        let height =
            terminal_size().filter(|_| !ctl.is_json).map(|(_, height)| height.saturating_sub(3));
        if height.is_some() {
            print("\x1b[H\x1b[J")?;
        }
        show(ctl, &look.rows, height.unwrap_or(usize::MAX), true)?;
        if ctl.work.wait(Duration::from_secs(secs.into())) {
            // Ctrl-C is its regular end.
            ctl.work = Work::default();
            return Ok(());
        }
    }
}

/// `tubes`
pub fn tubes(ctl: &mut Ctl, _: &Flags) -> Result<(), Failure> {
    let names = look::tube_names(&mut ctl.conn)?;
    let line = |name: String| ctl.either(Fields::of([("tube", json_string(&name))]), name);
    print_with(|out| names.into_iter().try_for_each(|name| writeln!(out, "{}", line(name))))
}

/// Returns the problems of the server that its protocol shows.
fn server_problems(ctl: &mut Ctl) -> Result<Vec<Problem>, Failure> {
    let stats = ctl.conn.ask("stats")?.document("stats")?.unwrap_or_default();
    let is_draining = Fields::of_document(&stats).text("draining") == "true";
    let facts = ServerFacts { is_draining, ..ServerFacts::default() };
    Ok(attention::of_server(&facts, None))
}
