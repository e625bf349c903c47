//! The status page of the server: totals, the last ten minutes, and a table of tubes; as HTML, as
//! columns of text, and as JSON.
//!
//! All tubes are scanned, and the first 100 in the chosen order are shown. The HTML page has at most 30,000
//! bytes for any number of tubes and any length of their names.

use super::html::{self, Escaped, percent_encoded};
use super::http::MediaType;
use super::http_conn::{Page, View};
use super::measurements::SAMPLES;
use super::ranking::{BY_NAME, Ranking, TubeQuery};
use super::table::{self, Column, JsonNumber, Readable, Value, push};
use super::tube_scan::{self, TubeScan, TubeStats};
use crate::engine::limits::Limits;
use crate::engine::protocol::stats::{self, ProcessInfo};
use crate::engine::text::JsonText;
use std::collections::TryReserveError;

/// A status page that is being made.
#[derive(Debug)]
pub struct StatusPage {
    media_type: MediaType,
    query: TubeQuery,
    /// The columns of the table.
    columns: Vec<Column<TubeStats>>,
    stage: Stage,
    ranking: Ranking,
    /// The number of bytes of the earlier slices.
    written: usize,
}

#[derive(Debug)]
enum Stage {
    /// Scans the tubes.
    Tubes(TubeScan),
    /// Writes the totals and what is above them.
    Head,
    /// Writes a part of the last ten minutes: one of the two plots in HTML, or half of the points in
    /// JSON.
    History(usize),
    /// Writes the head of the table before the first row, the rows from this one on, and the end of the
    /// page.
    Rows(usize),
}

/// The number of values on the first line of text, and on the second one.
const LINES: [usize; 2] = [7, 6];

/// Returns the values above the table. The last ones are those of a body cache, if there is one.
fn overview<'a>(view: &View<'a>) -> Vec<Column<View<'a>>> {
    let values: [Column<View<'a>>; 20] = [
        ("ready", "ready", |view| Value::Count(view.queue.totals.ready)),
        ("urgent", "urgent", |view| Value::Count(view.queue.totals.urgent)),
        ("reserved", "reserved", |view| Value::Count(view.queue.totals.reserved)),
        ("delayed", "delayed", |view| Value::Count(view.queue.totals.delayed)),
        ("buried", "buried", |view| Value::Count(view.queue.totals.buried)),
        ("puts_per_second", "puts/s", |view| Value::Rate(view.latest().map(|rates| rates.puts))),
        ("deletes_per_second", "deletes/s", |view| {
            Value::Rate(view.latest().map(|rates| rates.deletes))
        }),
        ("timeouts", "timeouts", |view| Value::Count(view.queue.totals.timeouts)),
        ("tubes", "tubes", |view| Value::Count(view.queue.tubes.len() as u64)),
        ("connections", "connections", |view| Value::Count(view.server.connections as u64)),
        ("workers", "workers", |view| Value::Count(view.queue.totals.workers)),
        ("waiting", "waiting", |view| Value::Count(view.queue.totals.waiting)),
        ("job_memory_bytes", "memory", |view| Value::Bytes(view.queue.job_bytes())),
        ("cold_jobs", "cold", |view| Value::Count(view.queue.body_cache.cold().jobs)),
        ("cold_body_bytes", "cold bodies", |view| Value::Bytes(view.queue.body_cache.cold().bytes)),
        ("body_cache_bytes", "body cache", |view| Value::Bytes(view.queue.body_cache.warm_bytes())),
        ("body_cache_limit_bytes", "cache limit", |view| {
            Value::Bytes(view.queue.body_cache.limit.unwrap_or(u64::MAX))
        }),
        ("body_reads", "body reads", |view| Value::Count(view.queue.body_cache.stats().reads)),
        ("body_waits", "disk waits", |view| {
            Value::Count(view.queue.body_cache.stats().wait_times.total())
        }),
        ("body_read_failures", "unreadable", |view| {
            Value::Count(view.queue.body_cache.stats().failures)
        }),
    ];
    let has_cache = view.queue.body_cache.limit.is_some();
    let shown = if has_cache { values.len() } else { LINES.iter().sum() };
    values.into_iter().take(shown).collect()
}

/// The maximum length of the HTML page in bytes, so that a phone loads it quickly.
const HTML_MAX: usize = 30_000;
/// The maximum length of the text after the rows in HTML, without the script, in bytes.
const HTML_END_MAX: usize = 200;

impl StatusPage {
    /// Returns a page with the tubes that the query selects.
    pub fn new(media_type: MediaType, query: &str, view: &View<'_>) -> StatusPage {
        let columns = tube_scan::columns(false, view);
        StatusPage {
            media_type,
            query: TubeQuery::parse(query, &columns),
            columns,
            stage: Stage::Tubes(TubeScan::new(&view.queue.tubes)),
            ranking: Ranking::default(),
            written: 0,
        }
    }
}

impl Page for StatusPage {
    fn write_slice(&mut self, view: &View<'_>, text: &mut String) -> Result<bool, TryReserveError> {
        let start = text.len();
        match &mut self.stage {
            Stage::Tubes(scan) => {
                let query = &self.query;
                let add = |_, key, stats: TubeStats| {
                    let tube = &view.queue.tubes[key];
                    let mut stats = stats.named(&tube.name)?;
                    stats.rates = view.measurements.tube_rates(key, tube);
                    self.ranking.add(stats, query)
                };
                if scan.advance(view, |name| name.contains(&*query.filter), add)? {
                    self.ranking.sort(query);
                    self.stage = Stage::Head;
                }
            }
            Stage::Head => {
                self.write_head(view, text);
                self.stage = Stage::History(0);
            }
            &mut Stage::History(part) => {
                match self.media_type {
                    MediaType::Html => html::write_plot(part, view, text),
                    MediaType::Text => {}
                    MediaType::Json => write_json_history(part, view, text),
                }
                self.stage =
                    if part + 1 == html::PLOTS { Stage::Rows(0) } else { Stage::History(part + 1) };
            }
            &mut Stage::Rows(next) => {
                let next = self.write_rows(next, start, &view.queue.limits, text);
                self.stage = Stage::Rows(next.unwrap_or(0));
                if next.is_none() {
                    return Ok(true);
                }
            }
        }
        self.written += text.len() - start;
        Ok(false)
    }
}

impl StatusPage {
    fn write_head(&self, view: &View<'_>, text: &mut String) {
        let overview = overview(view);
        let ProcessInfo { hostname, pid, started_at, .. } = view.server.process;
        let is_draining = view.server.is_draining;
        match self.media_type {
            MediaType::Html => {
                html::write_head("", view, text);
                text.push_str("<h1>beanstalkd</h1>\n");
                html::write_identity(view, text);
                text.push_str("<dl id=totals>\n");
                table::write_html_list(&overview, view, text);
                text.push_str("</dl>\n");
            }
            MediaType::Text => {
                text.push_str(&html::identity(view, hostname));
                text.push_str(if is_draining { ", draining\n" } else { "\n" });
                let (jobs, others) = overview.split_at(LINES[0]);
                let (others, cache) = others.split_at(LINES[1]);
                for line in [jobs, others, cache].into_iter().filter(|line| !line.is_empty()) {
                    table::write_text_list(line, view, text);
                }
                text.push('\n');
            }
            MediaType::Json => {
                let (protocol, version) = (stats::VERSION, env!("CARGO_PKG_VERSION"));
                let uptime = JsonNumber(Value::Span(view.now.since(*started_at)));
                let host = JsonText(hostname);
                push(
                    text,
                    format_args!(
                        "{{\"server\":{{\"version\":\"{version}\",\"protocol\":\"{protocol}\",\
                         \"hostname\":\"{host}\",\"pid\":{pid},\"uptime_seconds\":{uptime},\
                         \"draining\":{is_draining}}},\n\"totals\":{{"
                    ),
                );
                table::write_json_members(&overview, view, text);
                text.push_str("},\n\"history\":[");
            }
        }
    }

    fn write_html_table_head(&self, text: &mut String) {
        let filter = Escaped(&self.query.filter);
        push(
            text,
            format_args!(
                "<form role=search><input type=search name=filter value=\"{filter}\" \
                 placeholder=\"Part of a tube name\" aria-label=\"Part of a tube name\">"
            ),
        );
        if let Some(key) = self.query.key() {
            let minus = if self.query.is_reversed { "-" } else { "" };
            push(text, format_args!("<input type=hidden name=sort value=\"{minus}{key}\">"));
        }
        text.push_str("<button>Filter</button></form>\n");
        text.push_str("<div class=scroll><table id=tubes><thead><tr>");
        self.write_sort_link(BY_NAME, "tube", text);
        for (key, title, _) in &self.columns {
            self.write_sort_link(key, title, text);
        }
        text.push_str("<tbody>\n");
    }

    /// Writes the head of a column, with a link that sorts by it or reverses the order.
    fn write_sort_link(&self, key: &str, title: &str, text: &mut String) {
        let is_current = self.query.key() == Some(key);
        // By default names are ascending, and numbers descending.
        let is_ascending = self.query.is_reversed != (key == BY_NAME);
        let sort = match (is_current, is_ascending) {
            (false, _) => "",
            (true, true) => " aria-sort=ascending",
            (true, false) => " aria-sort=descending",
        };
        let minus = if is_current && !self.query.is_reversed { "-" } else { "" };
        push(text, format_args!("<th scope=col{sort}><a href=\"?sort={minus}{key}"));
        if !self.query.filter.is_empty() {
            push(text, format_args!("&amp;filter={}", percent_encoded(&self.query.filter)));
        }
        push(text, format_args!("\">{title}</a>"));
    }

    /// Writes the next rows, which follow `start` bytes of `text`, and the end after the last row. Returns
    /// the row after them, if the page is not complete.
    fn write_rows(
        &self,
        next: usize,
        start: usize,
        limits: &Limits,
        text: &mut String,
    ) -> Option<usize> {
        let width = self.ranking.rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max(4);
        if next == 0 {
            match self.media_type {
                MediaType::Html => self.write_html_table_head(text),
                MediaType::Text => {
                    table::write_text_head(&self.columns, &format!("{:width$}", "tube"), text);
                }
                MediaType::Json => text.push_str("],\n\"tubes\":["),
            }
        }
        let mut shown = next;
        for row in self.ranking.rows.iter().skip(next) {
            let (columns, name, row_start) = (&self.columns, &*row.name, text.len());
            let is_full = row_start - start >= limits.rows_per_page_slice_bytes
                || shown - next == limits.rows_per_page_slice;
            if is_full && shown > next {
                return Some(shown);
            }
            match self.media_type {
                MediaType::Html => write_html_row(columns, row, text),
                MediaType::Text => {
                    table::write_text_row(columns, &format!("{name:width$}"), row, text);
                }
                MediaType::Json => {
                    let separator = if shown == 0 { "" } else { "," };
                    push(text, format_args!("{separator}\n{{\"name\":\"{}\",", JsonText(name)));
                    table::write_json_members(columns, row, text);
                    text.push('}');
                }
            }
            let total = self.written + text.len() - start + html::SCRIPT.len() + HTML_END_MAX;
            if self.media_type == MediaType::Html && total > HTML_MAX {
                text.truncate(row_start);
                break;
            }
            shown += 1;
        }
        self.write_end(self.ranking.added.saturating_sub(shown as u64), text);
        None
    }

    /// Writes what is below the table. `more` tubes are not shown.
    fn write_end(&self, more: u64, text: &mut String) {
        let not_shown = match more {
            0 => String::new(),
            1 => "1 more tube is not shown".to_owned(),
            more => format!("{} more tubes are not shown", Readable(Value::Count(more))),
        };
        match self.media_type {
            MediaType::Html => {
                push(text, format_args!("</table></div>\n<p id=more>{not_shown}</p>\n"));
                html::write_end(text);
            }
            MediaType::Text if more > 0 => push(text, format_args!("{not_shown}\n")),
            MediaType::Text => {}
            MediaType::Json => push(text, format_args!("],\"tubes_not_shown\":{more}}}\n")),
        }
    }
}

fn write_html_row(columns: &[Column<TubeStats>], row: &TubeStats, text: &mut String) {
    let (name, link) = (Escaped(&row.name), percent_encoded(&row.name));
    // Browsers remove the parts `.` and `..` from a path, so the pages of these tubes have no link.
    match &*row.name {
        "." | ".." => push(text, format_args!("<tr><th scope=row>{name}")),
        _ => push(text, format_args!("<tr><th scope=row><a href=\"tube/{link}\">{name}</a>")),
    }
    table::write_html_cells(columns, row, text);
    text.push('\n');
}

fn write_json_history(part: usize, view: &View<'_>, text: &mut String) {
    const POINTS: usize = SAMPLES.div_ceil(html::PLOTS);
    let points = view.measurements.points(view.now).enumerate();
    for (index, point) in points.skip(part * POINTS).take(POINTS) {
        text.push_str(if index == 0 { "\n{" } else { ",\n{" });
        table::write_json_members(&html::POINT, &point, text);
        text.push('}');
    }
}
