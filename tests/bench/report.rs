//! Figures: numbers with names, those of several rounds, and their output as a table.

use crate::scenarios::Scenario;
use crate::server::Program;

/// What one round has come to. Names end with their unit.
#[derive(Debug, Default, Clone)]
pub struct Figures(Vec<(String, f64)>);

impl Figures {
    pub fn of<const N: usize>(figures: [(&str, f64); N]) -> Figures {
        Figures(figures.map(|(name, value)| (name.to_owned(), value)).into())
    }

    pub fn only(mut self, names: &[&str]) -> Figures {
        self.0.retain(|(name, _)| names.contains(&name.as_str()));
        self
    }

    /// These figures and others, which get this before their names.
    pub fn with(mut self, prefix: &str, others: Figures) -> Figures {
        self.0.extend(others.0.into_iter().map(|(name, value)| (format!("{prefix}{name}"), value)));
        self
    }
}

/// The figures of one server in all rounds of a scenario.
#[derive(Debug, Default)]
pub struct Series(Vec<(String, Vec<f64>)>);

impl Series {
    /// Adds the figures of a round. Of a traced round only those that others do not have: counting
    /// system calls disturbs everything else.
    pub fn add(&mut self, figures: Figures, is_traced: bool) {
        for (name, value) in figures.0 {
            match self.0.iter_mut().find(|(known, _)| *known == name) {
                Some((_, values)) if !is_traced => values.push(value),
                Some(_) => {}
                None => self.0.push((name, vec![value])),
            }
        }
    }

    fn median(&self, name: &str) -> Option<f64> {
        let mut values = self.0.iter().find(|(known, _)| known == name)?.1.clone();
        values.sort_by(f64::total_cmp);
        Some(f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2]))
    }
}

/// What a scenario has come to for one server; no figures if it was too slow.
pub struct Row<'p> {
    pub program: &'p Program,
    pub series: Option<Series>,
}

/// Prints the medians of a scenario, and how the servers compare: all others with the first, and
/// the first with the ceiling.
pub fn print(scenario: &Scenario, rows: &[Row<'_>]) {
    println!("\n{}: {}\n", scenario.name, scenario.what);
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in rows.iter().filter_map(|row| row.series.as_ref()).flat_map(|row| &row.0) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    if names.is_empty() {
        names.push("figure");
    }
    let cells = |cell: &dyn Fn(&str) -> String| names.iter().map(|name| cell(name)).collect();
    // `cpu_us_per_op` as it stands over a column.
    let heading = cells(&|name| name.replace("_per_", "/").replace('_', " "));
    let mut table: Vec<(Vec<String>, String)> = vec![(heading, "server".to_owned())];
    for Row { program, series } in rows {
        let medians = cells(&|name| match series {
            None => "too slow".to_owned(),
            Some(series) => series.median(name).map_or_else(|| "-".to_owned(), number),
        });
        table.push((medians, program.name.clone()));
    }
    for row in &rows[1..] {
        let (of, to) = if row.program.is_limit { (&rows[0], row) } else { (row, &rows[0]) };
        let (Some(of_series), Some(to_series)) = (&of.series, &to.series) else { continue };
        let ratios = cells(&|name| match (of_series.median(name), to_series.median(name)) {
            (Some(of), Some(to)) if to != 0.0 => format!("{:.2}", of / to),
            _ => "-".to_owned(),
        });
        table.push((ratios, format!("{} : {}", of.program.name, to.program.name)));
    }
    for (cells, label) in &table {
        for (column, cell) in cells.iter().enumerate() {
            let width = table.iter().map(|(cells, _)| cells[column].len()).max().unwrap_or(0);
            print!("  {cell:>width$}");
        }
        println!("  {label}");
    }
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
