//! `status`, `check`, `top` and `tubes`: all tubes at once.

use super::conn::{Conn, Fields};
use super::look::{self, Tube};
use super::print::{Cell, Listing, json_object, json_string, optional, span, terminal_size};
use super::work::Work;
use super::{Args, Ctl, args, complain, print, print_with, usage_error};
use crate::attention::{self, Level, Problem, ServerFacts};
use crate::os::failure::Failure;
use crate::os::sys::clock;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;

/// The rule that needs two looks: in one, it is not known whether a job was deleted in the last 5 s.
const STUCK: &str = "stuck";
const TIME_TO_DELETE: Duration = Duration::from_secs(5);

/// A tube with its problems, the worst first.
struct Row {
    tube: Tube,
    problems: Vec<Problem>,
    /// In `top`, jobs put and jobs deleted per second since the last look, if there was one.
    rates: Option<[Option<f64>; 2]>,
}

/// Returns a row for each tube, those that need attention first, then by name. `deletes_since` returns whether a
/// job of the tube was deleted in the last 5 s.
fn rows(
    ctl: &Ctl,
    conn: &mut Conn,
    mut deletes_since: impl FnMut(&Tube) -> bool,
) -> Result<Vec<Row>, Failure> {
    let row = |tube: Tube| {
        let problems = tube.problems(deletes_since(&tube), ctl.server.as_deref());
        Row { tube, problems, rates: None }
    };
    let mut rows: Vec<Row> = look::all_tubes(conn)?.into_iter().map(row).collect();
    rows.sort_by_key(|row| Reverse(row.problems.first().map(|problem| problem.level)));
    Ok(rows)
}

fn is_stuck(rows: &[Row]) -> bool {
    rows.iter().any(|row| row.problems.iter().any(|problem| problem.rule == STUCK))
}

/// Prints the first rows.
fn show(ctl: &Ctl, rows: &[Row], most: usize) -> Result<(), Failure> {
    let is_top = rows.iter().any(|row| row.rates.is_some());
    let rates = if is_top { "in>IN/S out>OUT/S " } else { "" };
    let columns = format!(
        "tube~TUBE level! rule! ready>READY held>HELD delayed>DELAY buried>BURIED oldest>OLDEST \
         workers>WORKERS idle>IDLE {rates}.NOTE"
    );
    let mut listing = Listing::new(ctl.is_json, &columns);
    for Row { tube, problems, rates } in rows.iter().take(most) {
        let worst = problems.first();
        let rate =
            |index: usize| rates.and_then(|rates| rates[index]).map(|rate| format!("{rate:.1}"));
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
    let rows = rows(ctl, &mut conn, |_| false)?;
    show(ctl, &rows, usize::MAX)?;
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
    let mut rows = self::rows(ctl, &mut conn, |_| false)?;
    if is_stuck(&rows) {
        std::thread::sleep(TIME_TO_DELETE);
        let deletes = |tube: &Tube| tube.stats.number("cmd-delete");
        let before: HashMap<String, u64> =
            rows.into_iter().map(|row| (row.tube.name.clone(), deletes(&row.tube))).collect();
        rows = self::rows(ctl, &mut conn, |tube| before.get(&tube.name) != Some(&deletes(tube)))?;
    }
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
    // For each tube: the puts and deletes at the last look, and the time of the last delete seen.
    let mut before: HashMap<String, ([u64; 2], Option<u64>)> = HashMap::new();
    let mut last = 0;
    loop {
        let now = clock::monotonic().as_nanos();
        let mut seen = HashMap::new();
        let mut rates = HashMap::new();
        let mut rows = rows(ctl, &mut conn, |tube| {
            let counts = ["total-jobs", "cmd-delete"].map(|key| tube.stats.number(key));
            let old = before.get(&tube.name);
            let has_deleted = old.is_some_and(|old| old.0[1] != counts[1]);
            let deleted_at = if has_deleted { Some(now) } else { old.and_then(|old| old.1) };
            #[expect(clippy::cast_precision_loss, reason = "rates are printed with one digit")]
            let rate = |index: usize| {
                let count = counts[index].saturating_sub(old?.0[index]);
                Some(count as f64 * 1e9 / (now - last).max(1) as f64)
            };
            rates.insert(tube.name.clone(), [rate(0), rate(1)]);
            seen.insert(tube.name.clone(), (counts, deleted_at));
            deleted_at.is_some_and(|at| now - at < 5_000_000_000)
        })?;
        rows.iter_mut().for_each(|row| row.rates = rates.remove(&row.tube.name));
        (before, last) = (seen, now);
        // A line for the header, one for the cursor, and the one that clears the screen.
        let height =
            terminal_size().filter(|_| !ctl.is_json).map(|(_, height)| height.saturating_sub(3));
        if height.is_some() {
            print("\x1b[H\x1b[J")?;
        }
        show(ctl, &rows, height.unwrap_or(usize::MAX))?;
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
