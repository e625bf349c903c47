//! The output: a plain table for each scenario, and a JSON document of everything.

use crate::figures::{Series, median};
use crate::machine;
use crate::rounds::Row;
use crate::scenarios::Scenario;
use crate::server::Program;
use serde_json::{Value, json};
use std::time::SystemTime;

/// Prints the medians of a scenario, and how the servers compare.
pub fn print(scenario: &Scenario, rows: &[Row]) {
    println!("\n{}: {}\n", scenario.name, scenario.what);
    let columns = columns(rows);
    let mut table = vec![Line {
        cells: columns.iter().map(|name| heading(name)).collect(),
        label: "server".to_owned(),
    }];
    for row in rows {
        let cell = |name: &&str| match &row.series {
            None => "too slow".to_owned(),
            Some(series) => series.median(name).map_or_else(|| "-".to_owned(), number),
        };
        let cells = columns.iter().map(cell).collect();
        table.push(Line { cells, label: row.program.name().to_owned() });
    }
    table.extend(ratios(rows, &columns));
    print_table(&table);
}

/// All other servers against the first, and the first against the ceiling.
fn ratios(rows: &[Row], columns: &[&str]) -> Vec<Line> {
    let (first, others) = rows.split_first().expect("there is at least one server");
    let compare = |other: &Row| {
        let (of, to) = match other.program {
            Program::Limit => (first, other),
            Program::Real { .. } => (other, first),
        };
        let (of_series, to_series) = (of.series.as_ref()?, to.series.as_ref()?);
        let cell = |name: &&str| match (of_series.median(name), to_series.median(name)) {
            (Some(of), Some(to)) if to != 0.0 => format!("{:.2}", of / to),
            _ => "-".to_owned(),
        };
        let label = format!("{} : {}", of.program.name(), to.program.name());
        Some(Line { cells: columns.iter().map(cell).collect(), label })
    };
    others.iter().filter_map(compare).collect()
}

/// A line of the table; the label comes last.
struct Line {
    cells: Vec<String>,
    label: String,
}

fn print_table(lines: &[Line]) {
    let width = |column: usize| lines.iter().map(|line| line.cells[column].len()).max();
    let widths: Vec<usize> =
        (0..lines[0].cells.len()).map(|column| width(column).unwrap_or_default()).collect();
    for line in lines {
        for (cell, width) in line.cells.iter().zip(&widths) {
            print!("  {cell:>width$}");
        }
        println!("  {}", line.label);
    }
}

/// The names of all figures, in the order of their first use.
fn columns(rows: &[Row]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().filter_map(|row| row.series.as_ref()).flat_map(|row| &row.0) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    if names.is_empty() {
        // All were too slow, which has to stand somewhere.
        names.push("figure");
    }
    names
}

/// `cpu_us_per_op` as it stands over a column.
fn heading(name: &str) -> String {
    name.replace("_per_", "/").replace('_', " ")
}

/// As many digits as are significant.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        ..10.0 => format!("{value:.2}"),
        ..1000.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

/// Everything that was measured.
#[derive(Default)]
pub struct Document {
    results: Vec<Value>,
}

impl Document {
    pub fn add(&mut self, scenario: &Scenario, rows: &[Row]) {
        for row in rows {
            let server = row.program.name();
            let Some(Series(figures)) = &row.series else {
                self.results.push(json!({
                    "scenario": scenario.name, "server": server, "too_slow": true,
                }));
                continue;
            };
            for (figure, rounds) in figures {
                self.results.push(json!({
                    "scenario": scenario.name,
                    "server": server,
                    "figure": figure,
                    "median": median(rounds),
                    "rounds": rounds,
                }));
            }
        }
    }

    /// The document as text. Servers stand in the order of the command line, the
    /// time is Unix time.
    pub fn text(&self, programs: &[Program]) -> String {
        let servers: Vec<Value> = programs
            .iter()
            .map(|program| json!({ "server": program.name(), "version": program.version() }))
            .collect();
        let machine =
            json!({ "cores": machine::core_count(), "kernel": machine::kernel_version() });
        let document = json!({
            "servers": servers,
            "machine": machine,
            "written_at_s": SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs(),
            "results": self.results,
        });
        let text = serde_json::to_string_pretty(&document);
        text.expect("what is numbers and text can be written") + "\n"
    }
}
