//! The status page of the server: what needs attention, totals, the last ten minutes, and a table of tubes;
//! as HTML, as columns of text, and as JSON.
//!
//! All tubes are scanned, and the first 100 in the chosen order are shown. The HTML page has at most 50,000
//! bytes for any number of tubes and any length of their names.

use super::html::{self, Escaped, percent_encoded, tube_link};
use super::http::MediaType;
use super::http_conn::{Page, View};
use super::problems::Problems;
use super::ranking::{BY_NAME, Ranking};
use super::table::{Column, JsonNumber, Out, Value};
use super::tube_scan::{self, TubeScan, TubeStats};
use crate::engine::protocol::stats::{self, ProcessInfo};
use crate::engine::text::JsonText;
use crate::engine::time::Nanos;

/// A status page that is being made.
pub struct StatusPage {
    stage: Stage,
    problems: Problems,
    ranking: Ranking,
    /// The number of bytes of the earlier slices.
    written: usize,
}

enum Stage {
    /// Scans the tubes, and then writes the totals and what is above them.
    Tubes(TubeScan),
    /// Writes the last ten minutes.
    History,
    /// Writes the head of the table before the first row, the rows from this one on, and the end of the
    /// page.
    Rows(usize),
}

/// The number of totals that are always in view.
const FIRST_TOTALS: usize = 6;
/// The number of totals of a body cache, the last ones.
const CACHE_TOTALS: usize = 7;

/// Returns the values above the table. The last ones are those of a body cache, if there is one.
fn overview<'a>(view: &View<'a>) -> Vec<Column<View<'a>>> {
    let values: [Column<View<'a>>; 20] = [
        ("ready", "ready", |view| Value::Count(view.queue.totals.ready)),
        ("reserved", "held", |view| Value::Count(view.queue.totals.reserved)),
        ("delayed", "delayed", |view| Value::Count(view.queue.totals.delayed)),
        ("buried", "buried", |view| Value::Count(view.queue.totals.buried)),
        ("puts_per_second", "in/s", |view| view.rate(|rates| rates.puts)),
        ("deletes_per_second", "out/s", |view| view.rate(|rates| rates.deletes)),
        ("urgent", "urgent", |view| Value::Count(view.queue.totals.urgent)),
        ("timeouts", "timeouts", |view| Value::Count(view.queue.totals.timeouts)),
        ("tubes", "tubes", |view| Value::Count(view.queue.tubes.len() as u64)),
        ("connections", "connections", |view| Value::Count(view.server.connections as u64)),
        ("workers", "workers", |view| Value::Count(view.queue.totals.workers)),
        ("waiting", "waiting", |view| Value::Count(view.queue.totals.waiting)),
        ("job_memory_bytes", "memory", |view| Value::Bytes(view.queue.job_bytes())),
        ("cold_jobs", "cold", |view| Value::Count(view.queue.body_cache.cold.jobs)),
        ("cold_body_bytes", "cold bodies", |view| Value::Bytes(view.queue.body_cache.cold.bytes)),
        ("body_cache_bytes", "body cache", |view| Value::Bytes(view.queue.body_cache.warm_bytes)),
        ("body_cache_limit_bytes", "cache limit", |view| {
            Value::Bytes(view.queue.settings.body_cache_bytes.unwrap_or(u64::MAX))
        }),
        ("body_reads", "body reads", |view| Value::Count(view.queue.body_cache.stats.reads)),
        ("body_waits", "disk waits", |view| {
            Value::Count(view.queue.body_cache.stats.wait_times.total())
        }),
        ("body_read_failures", "unreadable", |view| {
            Value::Count(view.queue.body_cache.stats.failures)
        }),
    ];
    let has_cache = view.queue.settings.body_cache_bytes.is_some();
    let shown = values.len() - if has_cache { 0 } else { CACHE_TOTALS };
    values.into_iter().take(shown).collect()
}

/// The maximum length of the HTML page in bytes, so that a phone loads it quickly.
const HTML_MAX: usize = 50_000;
/// The maximum length of the text after the rows in HTML, without the script, in bytes.
const HTML_END_MAX: usize = 200;

impl StatusPage {
    /// Returns a page with the tubes that the query selects.
    pub fn new(query: &str, view: &View<'_>) -> StatusPage {
        StatusPage {
            stage: Stage::Tubes(TubeScan::default()),
            problems: Problems::default(),
            ranking: Ranking::of(query, tube_scan::columns(view)),
            written: 0,
        }
    }
}

impl Page for StatusPage {
    fn write_slice(&mut self, view: &View<'_>, out: &mut Out<'_>) -> bool {
        match &mut self.stage {
            Stage::Tubes(scan) => {
                let is_done = scan.advance(view, |_, stats| {
                    self.problems.add_tube(&stats, view);
                    if stats.name.contains(&*self.ranking.filter) {
                        self.ranking.add(stats);
                    }
                });
                if is_done {
                    self.problems.add_server(view);
                    self.ranking.sort();
                    self.write_head(view, out);
                    self.stage = Stage::History;
                }
            }
            Stage::History => {
                write_history(view, out);
                self.stage = Stage::Rows(0);
            }
            &mut Stage::Rows(next) => {
                let Some(next) = self.write_rows(next, view, out) else { return true };
                self.stage = Stage::Rows(next);
            }
        }
        self.written += out.text.len();
        false
    }
}

impl StatusPage {
    fn write_head(&self, view: &View<'_>, out: &mut Out<'_>) {
        let overview = overview(view);
        let ProcessInfo { hostname, pid, started_at, .. } = &view.server.process;
        let (first, others) = overview.split_at(FIRST_TOTALS);
        let verdict = self.problems.verdict();
        let (protocol, version) = (stats::VERSION, env!("CARGO_PKG_VERSION"));
        let uptime = JsonNumber(Value::Span(view.now.since(*started_at)));
        let (host, is_draining) = (JsonText(hostname), view.server.is_draining);
        html::write_head("", view, out);
        out.each(
            format_args!("<h1 id=verdict>{verdict}</h1>\n"),
            format_args!("{verdict}\n"),
            format_args!(
                "{{\"server\":{{\"version\":\"{version}\",\"protocol\":\"{protocol}\",\
                 \"hostname\":\"{host}\",\"pid\":{pid},\"uptime_seconds\":{uptime},\
                 \"draining\":{is_draining}}},\n"
            ),
        );
        self.problems.write("tube/", out);
        html::write_identity(view, out);
        let identity = html::identity(view, hostname);
        out.each("<dl id=totals>\n", format_args!("\n{identity}\n"), "\"totals\":{");
        out.values(first, view);
        let more = "</dl>\n<details><summary>More totals</summary><dl id=others>\n";
        out.each(more, "\n", ",");
        out.values(others, view);
        out.each("</dl></details>\n", "\n\n", "},\n");
    }

    fn write_html_table_head(&self, columns: &[Column<TubeStats>], out: &mut Out<'_>) {
        let filter = Escaped(&self.ranking.filter);
        let (minus, key) = (if self.ranking.is_reversed { "-" } else { "" }, self.ranking.key());
        out.push(format_args!(
            "<form role=search><input type=search name=filter value=\"{filter}\" \
             placeholder=\"Part of a tube name\" aria-label=\"Part of a tube name\">\
             <input type=hidden name=sort value=\"{minus}{key}\"><button>Filter</button></form>\n\
             <div class=scroll><table id=tubes><thead><tr>"
        ));
        self.write_sort_link(BY_NAME, "tube", out);
        for (key, title, _) in columns {
            self.write_sort_link(key, title, out);
        }
        out.text.push_str("<tbody>\n");
    }

    /// Writes the head of a column, with a link that sorts by it or reverses the order.
    fn write_sort_link(&self, key: &str, title: &str, out: &mut Out<'_>) {
        let is_current = self.ranking.key() == key;
        // By default names are ascending, and numbers descending.
        let is_ascending = self.ranking.is_reversed != (key == BY_NAME);
        let sort = match (is_current, is_ascending) {
            (false, _) => "",
            (true, true) => " aria-sort=ascending",
            (true, false) => " aria-sort=descending",
        };
        let minus = if is_current && !self.ranking.is_reversed { "-" } else { "" };
        out.push(format_args!("<th scope=col{sort}><a href=\"?sort={minus}{key}"));
        if !self.ranking.filter.is_empty() {
            out.push(format_args!("&amp;filter={}", percent_encoded(&self.ranking.filter)));
        }
        out.push(format_args!("\">{title}</a>"));
    }

    /// Writes the next rows, and the end after the last row. Returns the row after them, if the page is not
    /// complete.
    fn write_rows(&self, next: usize, view: &View<'_>, out: &mut Out<'_>) -> Option<usize> {
        let limits = &view.queue.limits;
        let columns = tube_scan::columns(view);
        let in_table = &columns[..tube_scan::IN_TABLE];
        let width = self.ranking.rows.iter().map(|row| label(row).len()).max().unwrap_or(0).max(4);
        if next == 0 {
            match out.format {
                MediaType::Html => self.write_html_table_head(in_table, out),
                MediaType::Text => {
                    out.push(format_args!("{:width$}", "tube"));
                    out.titles(in_table);
                    out.text.push('\n');
                }
                MediaType::Json => out.text.push_str("],\n\"tubes\":["),
            }
        }
        let mut shown = next;
        for row in self.ranking.rows.iter().skip(next) {
            let row_start = out.text.len();
            let is_full = row_start >= limits.rows_per_page_slice_bytes
                || shown - next == limits.rows_per_page_slice;
            if is_full && shown > next {
                return Some(shown);
            }
            match out.format {
                MediaType::Html => write_html_row(in_table, row, out),
                MediaType::Text => {
                    out.push(format_args!("{:width$}", label(row)));
                    out.cells(in_table, row);
                    out.text.push('\n');
                }
                MediaType::Json => {
                    let (separator, name) = (out.separator(), JsonText(&row.name));
                    out.push(format_args!("{separator}{{\"name\":\"{name}\","));
                    out.cells(columns, row);
                    out.text.push('}');
                }
            }
            let total = self.written + out.text.len() + html::SCRIPT.len() + HTML_END_MAX;
            if out.format == MediaType::Html && total > HTML_MAX {
                out.text.truncate(row_start);
                break;
            }
            shown += 1;
        }
        self.write_end(self.ranking.added.saturating_sub(shown as u64), out);
        None
    }

    /// Writes what is below the table. `more` tubes are not shown.
    fn write_end(&self, more: u64, out: &mut Out<'_>) {
        let (not_shown, end) = match more {
            0 => (String::new(), ""),
            1 => ("1 more tube is not shown".to_owned(), "\n"),
            more => (format!("{} more tubes are not shown", Value::Count(more)), "\n"),
        };
        out.each(
            format_args!("</table></div>\n<p id=more>{not_shown}</p>\n"),
            format_args!("{not_shown}{end}"),
            format_args!("],\"tubes_not_shown\":{more}}}\n"),
        );
        html::write_end(out);
    }
}

/// Returns the name of a tube, and the rest of its pause.
fn label(row: &TubeStats) -> String {
    match row.facts.pause_left {
        Nanos::ZERO => row.name.clone(),
        left => format!("{} paused {}", row.name, Value::Span(left)),
    }
}

fn write_html_row(columns: &[Column<TubeStats>], row: &TubeStats, out: &mut Out<'_>) {
    let link = tube_link("tube/", &row.name, "", Escaped(&row.name));
    out.push(format_args!("<tr><th scope=row>{link}"));
    if row.facts.pause_left > Nanos::ZERO {
        let left = Value::Span(row.facts.pause_left);
        out.push(format_args!(" <small>paused {left}</small>"));
    }
    for column in columns {
        match column.0 == tube_scan::OLDEST.0 && row.facts.ready > 0 {
            true => {
                let oldest = Value::Span(row.facts.oldest);
                let link = tube_link("tube/", &row.name, "#oldest", oldest);
                out.push(format_args!("<td>{link}"));
            }
            false => out.cells(&[*column], row),
        }
    }
    out.text.push('\n');
}

/// Writes the points of the last ten minutes: plots in HTML, and nothing in text.
fn write_history(view: &View<'_>, out: &mut Out<'_>) {
    match out.format {
        MediaType::Html => html::write_plots(view, out),
        MediaType::Text => {}
        MediaType::Json => {
            out.text.push_str("\"history\":[");
            for point in view.measurements.points(view.now) {
                out.push(format_args!("{}{{", out.separator()));
                out.values(&html::POINT, &point);
                out.text.push('}');
            }
        }
    }
}
