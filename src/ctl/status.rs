//! `status`, `check`, `top` and `tubes`: all tubes at once.

use super::conn::{Conn, Fields};
use super::look::{self, Tube};
use super::print::{Column, Table, is_terminal, json_object, json_string, span, terminal_size};
use super::work::Work;
use super::{Args, Ctl, complain, print, unwritten, usage_error};
use crate::attention::{self, Level, Problem, ServerFacts};
use crate::os::failure::Failure;
use crate::os::sys::clock;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::time::Duration;

/// The rule that needs two looks: in one, it is not known whether a job was deleted in the last 5 s.
const STUCK: &str = "stuck";
const TIME_TO_DELETE: Duration = Duration::from_secs(5);

/// A tube with its problems, the worst first, and its rates.
struct Row {
    tube: Tube,
    problems: Vec<Problem>,
    /// Jobs put and jobs deleted per second, since the last look.
    rates: Option<(f64, f64)>,
}

impl Row {
    fn new(tube: Tube, has_recent_delete: bool, server: Option<&str>) -> Row {
        let problems = tube.problems(has_recent_delete, server);
        Row { tube, problems, rates: None }
    }

    fn has(&self, rule: &str) -> bool {
        self.problems.iter().any(|problem| problem.rule == rule)
    }

    fn note(&self) -> String {
        let mut notes: Vec<String> = Vec::new();
        for problem in self.problems.iter().filter(|problem| problem.rule != "paused") {
            notes.push(problem.rule.into());
        }
        if self.tube.pause_left > 0 {
            notes.push(format!("paused {}", span(self.tube.pause_left)));
        }
        notes.join(", ")
    }

    fn json(&self, is_top: bool) -> String {
        let Tube { name, ready, held, delayed, buried, oldest, watching, waiting, .. } = &self.tube;
        let worst = self.problems.first();
        let text = |text: Option<&str>| text.map_or("null".into(), json_string);
        let mut pairs = vec![
            ("tube", json_string(name)),
            ("level", text(worst.map(|problem| problem.level.name()))),
            ("rule", text(worst.map(|problem| problem.rule))),
        ];
        let numbers = [
            ("ready", ready),
            ("held", held),
            ("delayed", delayed),
            ("buried", buried),
            ("oldest", oldest),
            ("workers", watching),
            ("idle", waiting),
        ];
        pairs.extend(numbers.map(|(key, number)| (key, number.to_string())));
        if is_top {
            let rate = |rate: Option<f64>| rate.map_or("null".into(), |rate| format!("{rate:.1}"));
            pairs.push(("in", rate(self.rates.map(|rates| rates.0))));
            pairs.push(("out", rate(self.rates.map(|rates| rates.1))));
        }
        json_object(pairs)
    }

    fn cells(&self, is_top: bool) -> Vec<String> {
        let Tube { name, ready, held, delayed, buried, oldest, watching, waiting, .. } = &self.tube;
        let mut cells = vec![name.clone()];
        cells.extend([ready, held, delayed, buried].map(u64::to_string));
        cells.push(if *ready > 0 { span(*oldest) } else { "-".into() });
        if is_top {
            let rate = |rate: Option<f64>| rate.map_or("-".into(), |rate| format!("{rate:.1}"));
            cells.push(rate(self.rates.map(|rates| rates.0)));
            cells.push(rate(self.rates.map(|rates| rates.1)));
        }
        cells.extend([watching.to_string(), waiting.to_string(), self.note()]);
        cells
    }
}

/// `status`
pub fn status(ctl: &Ctl, _: &Args) -> Result<u8, Failure> {
    let mut conn = ctl.connect()?;
    let tubes = look::tubes_with_oldest(&mut conn)?;
    let mut rows: Vec<Row> =
        tubes.into_iter().map(|tube| Row::new(tube, false, ctl.server.as_deref())).collect();
    show(ctl, &mut rows, false, usize::MAX)?;
    for problem in server_problems(ctl, &mut conn)? {
        complain(&format!("{}: {}", problem.level.name(), problem.text));
    }
    if rows.iter().any(|row| row.has(STUCK)) {
        complain("'stuck' assumes that no job was deleted in the last 5 s; `check' looks twice");
    }
    Ok(0)
}

/// `check`
pub fn check(ctl: &Ctl, _: &Args) -> Result<u8, Failure> {
    let mut conn = ctl.connect()?;
    let server = ctl.server.as_deref();
    let tubes = look::tubes_with_oldest(&mut conn)?;
    let mut rows: Vec<Row> = tubes.into_iter().map(|tube| Row::new(tube, false, server)).collect();
    if rows.iter().any(|row| row.has(STUCK)) {
        std::thread::sleep(TIME_TO_DELETE);
        let before: HashMap<String, u64> =
            rows.into_iter().map(|row| (row.tube.name, row.tube.deletes)).collect();
        let row = |tube: Tube| {
            let has_deleted = before.get(&tube.name).is_none_or(|&count| count != tube.deletes);
            Row::new(tube, has_deleted, server)
        };
        rows = look::tubes_with_oldest(&mut conn)?.into_iter().map(row).collect();
    }
    let mut problems: Vec<(String, Problem)> = Vec::new();
    for problem in server_problems(ctl, &mut conn)? {
        problems.push(("server".into(), problem));
    }
    let (tubes, mut ready, mut buried) = (rows.len(), 0, 0);
    rows.sort_by(|one, other| one.tube.name.cmp(&other.tube.name));
    for Row { tube, problems: own, .. } in rows {
        ready += tube.ready;
        buried += tube.buried;
        problems.extend(own.into_iter().map(|problem| (tube.name.clone(), problem)));
    }
    problems.retain(|(_, problem)| problem.level != Level::Notice);
    problems.sort_by_key(|(_, problem)| Reverse(problem.level));
    let Some((place, Problem { level, text, .. })) = problems.first() else {
        print(&format!("OK: {tubes} tubes, {ready} ready, {buried} buried"))?;
        return Ok(0);
    };
    let more = match problems.len() - 1 {
        0 => String::new(),
        1 => "; 1 more problem".into(),
        more => format!("; {more} more problems"),
    };
    let (word, exit_code) =
        if *level == Level::Critical { ("CRITICAL", 2) } else { ("WARNING", 1) };
    print(&format!("{word}: {place}: {text}{more}"))?;
    Ok(exit_code)
}

/// `top`
pub fn top(ctl: &Ctl, args: &Args) -> Result<u8, Failure> {
    let secs = match args.words.first() {
        Some(word) => super::args::seconds(word).filter(|&secs| secs > 0),
        None => Some(2),
    };
    let secs = secs.ok_or_else(|| usage_error("top: not a time, such as 2 or 10s"))?;
    let mut conn = ctl.connect()?;
    let mut work = Work::start("", 0);
    // For each tube: its last look, and the time of the last delete that was seen.
    let mut before: HashMap<String, (Tube, Option<u64>)> = HashMap::new();
    let mut last = 0;
    loop {
        let now = clock::monotonic().as_nanos();
        #[expect(clippy::cast_precision_loss, reason = "rates are printed with one digit")]
        let rate = |count: u64| count as f64 * 1e9 / (now - last).max(1) as f64;
        let tubes = look::tubes_with_oldest(&mut conn)?;
        let mut now_seen = HashMap::with_capacity(tubes.len());
        let mut rows = Vec::with_capacity(tubes.len());
        for tube in tubes {
            let (old, mut deleted_at) = before.remove(&tube.name).unzip();
            if old.as_ref().is_some_and(|old: &Tube| old.deletes != tube.deletes) {
                deleted_at = Some(Some(now));
            }
            let deleted_at = deleted_at.flatten();
            let is_recent = |at| u128::from(now - at) < TIME_TO_DELETE.as_nanos();
            let mut row = Row::new(tube, deleted_at.is_some_and(is_recent), ctl.server.as_deref());
            row.rates = old.map(|old| {
                let puts = row.tube.puts.saturating_sub(old.puts);
                (rate(puts), rate(row.tube.deletes.saturating_sub(old.deletes)))
            });
            now_seen.insert(row.tube.name.clone(), (row.tube.clone(), deleted_at));
            rows.push(row);
        }
        (before, last) = (now_seen, now);
        let height = terminal_size().filter(|_| !ctl.is_json).map(|(_, height)| height);
        if height.is_some() && is_terminal() {
            print("\x1b[H\x1b[J")?;
        }
        // A line for the cursor, the header and the line that clears the screen.
        show(ctl, &mut rows, true, height.map_or(usize::MAX, |height| height.saturating_sub(3)))?;
        if work.wait(Duration::from_secs(secs.into())) {
            return Ok(0);
        }
    }
}

/// `tubes`
pub fn tubes(ctl: &Ctl, _: &Args) -> Result<u8, Failure> {
    let mut names = look::tube_names(&mut ctl.connect()?)?;
    names.sort();
    let mut out = BufWriter::new(io::stdout().lock());
    for name in names {
        match ctl.is_json {
            true => writeln!(out, "{}", json_object([("tube", json_string(&name))])),
            false => writeln!(out, "{name}"),
        }
        .map_err(unwritten)?;
    }
    out.flush().map_err(unwritten)?;
    Ok(0)
}

/// Prints rows: those that need attention first, then by name.
fn show(ctl: &Ctl, rows: &mut [Row], is_top: bool, most: usize) -> Result<(), Failure> {
    let level = |row: &Row| row.problems.first().map(|problem| problem.level);
    rows.sort_by(|one, other| {
        level(other).cmp(&level(one)).then_with(|| one.tube.name.cmp(&other.tube.name))
    });
    let mut out = BufWriter::new(io::stdout().lock());
    let mut columns = vec![Column::Name("TUBE")];
    columns.extend(["READY", "HELD", "DELAY", "BURIED", "OLDEST"].map(Column::Number));
    if is_top {
        columns.extend(["IN/S", "OUT/S"].map(Column::Number));
    }
    columns.extend([Column::Number("WORKERS"), Column::Number("IDLE"), Column::Text("NOTE")]);
    let mut table = Table::new(&columns);
    for row in rows.iter().take(most) {
        match ctl.is_json {
            true => writeln!(out, "{}", row.json(is_top)).map_err(unwritten)?,
            false => table.add(row.cells(is_top)),
        }
    }
    table.print(&mut out).and_then(|()| out.flush()).map_err(unwritten)
}

/// Returns the problems of the server that its protocol shows.
fn server_problems(ctl: &Ctl, conn: &mut Conn) -> Result<Vec<Problem>, Failure> {
    let stats = conn.ask("stats")?.document("stats")?.unwrap_or_default();
    let is_draining = Fields::of_document(&stats).text("draining") == "true";
    let facts = ServerFacts { is_draining, ..ServerFacts::default() };
    Ok(attention::of_server(&facts, ctl.server.as_deref()))
}
