//! `status`, `check`, `top` and `tubes`: all tubes at once.

use super::conn::{Conn, Fields};
use super::look::{self, Tube};
use super::print::{Cell, Listing, json_object, json_string, optional, span, terminal_size};
use super::work::Work;
use super::{Args, Ctl, args, complain, print, print_with, usage_error};
use crate::attention::{self, Level, Problem, ServerFacts};
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
    fn after(before: &Look, ctl: &Ctl, conn: &mut Conn) -> Result<Look, Failure> {
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
            let problems = tube.problems(has_recent_delete, ctl.server.as_deref());
            Row { tube, problems, rates, deleted_at }
        };
        let mut rows: Vec<Row> = look::all_tubes(conn)?.into_iter().map(row).collect();
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
        "tube~TUBE level! rule! ready>READY held>HELD delayed>DELAY buried>BURIED oldest>OLDEST \
         workers>WORKERS idle>IDLE {rates}.NOTE"
    );
    let mut listing = Listing::new(ctl.is_json, &columns);
    for Row { tube, problems, rates, .. } in rows.iter().take(most) {
        let worst = problems.first();
        let rate = |index: usize| rates[index].map(|rate| format!("{rate:.1}"));
        listing.add(|key| match key {
            "tube" => Cell::text(&tube.name),
            "level" => optional(worst, |problem| Cell::text(problem.level.name())),
            "rule" => optional(worst, |problem| Cell::text(problem.rule)),
            "held" => Cell::number(tube.jobs("reserved")),
            "oldest" if tube.jobs("ready") == 0 => Cell("0".into(), "-".into()),
            "oldest" => Cell::span(tube.oldest),
            "workers" => Cell::number(tube.watching()),
            "idle" => Cell::number(tube.stats.number("current-waiting")),
            "in" => optional(rate(0), Cell::number),
            "out" => optional(rate(1), Cell::number),
            "" => Cell::text(&note(tube, problems)),
            state => Cell::number(tube.jobs(state)),
        })?;
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
pub fn status(ctl: &Ctl, _: &Args) -> Result<u8, Failure> {
    let mut conn = ctl.connect()?;
    let Look { rows, .. } = Look::after(&Look::default(), ctl, &mut conn)?;
    show(ctl, &rows, usize::MAX, false)?;
    for problem in server_problems(ctl, &mut conn)? {
        complain(&format!("{}: {}", problem.level.name(), problem.text));
    }
    if is_stuck(&rows) {
        complain("'stuck' assumes that no job was deleted in the last 5 s; 'check' looks twice");
    }
    Ok(0)
}

/// `check`
pub fn check(ctl: &Ctl, _: &Args) -> Result<u8, Failure> {
    let mut conn = ctl.connect()?;
    let mut look = Look::after(&Look::default(), ctl, &mut conn)?;
    if is_stuck(&look.rows) {
        std::thread::sleep(Duration::from_nanos(TIME_TO_DELETE.as_nanos()));
        look = Look::after(&look, ctl, &mut conn)?;
    }
    let rows = look.rows;
    let count = |state| rows.iter().map(|row| row.tube.jobs(state)).sum::<u64>();
    let line =
        format!("OK: {} tubes, {} ready, {} buried", rows.len(), count("ready"), count("buried"));
    let of_server = server_problems(ctl, &mut conn)?.into_iter().map(|problem| ("server", problem));
    let of_tubes = rows.iter().flat_map(|row| {
        row.problems.iter().map(|problem| (row.tube.name.as_str(), problem.clone()))
    });
    let mut problems: Vec<(&str, Problem)> = of_server.chain(of_tubes).collect();
    problems.retain(|(_, problem)| problem.level != Level::Notice);
    problems.sort_by_key(|(_, problem)| Reverse(problem.level));
    let Some((place, Problem { level, text, .. })) = problems.first() else {
        return print(&line).map(|()| 0);
    };
    let is_critical = *level == Level::Critical;
    let word = if is_critical { "CRITICAL" } else { "WARNING" };
    let more = match problems.len() - 1 {
        0 => String::new(),
        more => format!("; {more} more"),
    };
    print(&format!("{word}: {place}: {text}{more}")).map(|()| if is_critical { 2 } else { 1 })
}

/// `top`
pub fn top(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let secs =
        args.words.first().map_or(Some(2), |word| args::seconds(word)).filter(|&secs| secs > 0);
    let secs = secs.ok_or_else(|| usage_error("top: not a time, such as 2 or 10s"))?;
    let mut conn = ctl.connect()?;
    let mut work = Work::start(ctl, "", "", 0);
    let mut look = Look::default();
    loop {
        look = Look::after(&look, ctl, &mut conn)?;
        // A line for the header, one for the cursor, and the one that clears the screen.
        let height =
            terminal_size().filter(|_| !ctl.is_json).map(|(_, height)| height.saturating_sub(3));
        if height.is_some() {
            print("\x1b[H\x1b[J")?;
        }
        show(ctl, &look.rows, height.unwrap_or(usize::MAX), true)?;
        if work.wait(Duration::from_secs(secs.into())) {
            return Ok(0);
        }
    }
}

/// `tubes`
pub fn tubes(ctl: &Ctl, _: &Args) -> Result<u8, Failure> {
    let names = look::tube_names(&mut ctl.connect()?)?;
    print_with(|out| {
        names.iter().try_for_each(|name| match ctl.is_json {
            true => writeln!(out, "{}", json_object([("tube", json_string(name))])),
            false => writeln!(out, "{name}"),
        })
    })?;
    Ok(0)
}

/// Returns the problems of the server that its protocol shows.
fn server_problems(ctl: &Ctl, conn: &mut Conn) -> Result<Vec<Problem>, Failure> {
    let stats = conn.ask("stats")?.document("stats")?.unwrap_or_default();
    let is_draining = Fields::of_document(&stats).text("draining") == "true";
    let facts = ServerFacts { is_draining, ..ServerFacts::default() };
    Ok(attention::of_server(&facts, ctl.server.as_deref()))
}
