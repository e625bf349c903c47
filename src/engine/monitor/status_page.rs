//! The status page of the server: totals, the last ten minutes, and a table of tubes; as HTML, as
//! columns of text, and as JSON.
//!
//! The page is made in slices, at most one in each iteration of the loop. All tubes are scanned, and
//! the first 100 in the chosen order are shown. The HTML page has at most 30,000 bytes for any number
//! of tubes and any length of their names.

use super::accept::MediaType;
use super::history::{History, Point, SAMPLES};
use super::html::{self, Escaped};
use super::measurements::Measurements;
use super::ranking::{self, Order, Ranking, TubeQuery, TubeRow};
use super::table::{self, Column, push};
use super::tube_scan::{ScanStep, TubeScan};
use super::url::Encoded;
use super::value::{JsonNumber, Readable, Value};
use crate::engine::limits::Limits;
use crate::engine::protocol::stats::{self, ProcessInfo};
use crate::engine::queue::Totals;
use crate::engine::queue::body_cache::BodyCache;
use crate::engine::server::View;
use crate::engine::text::JsonText;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::fmt::{self, Display};

/// A status page that is being made.
#[derive(Debug)]
pub struct StatusPage {
    media_type: MediaType,
    query: TubeQuery,
    /// The columns of the table.
    columns: &'static [Column<TubeRow>],
    stage: Stage,
    ranking: Ranking,
    /// The number of bytes of the earlier slices.
    written: usize,
}

#[derive(Debug)]
enum Stage {
    /// Begins the scan.
    Begin,
    /// Scans the tubes.
    Tubes(TubeScan),
    /// Sorts the rows.
    Sort,
    /// Writes the totals and what is above them.
    Head,
    /// Writes a part of the last ten minutes: one of the two plots in HTML, or half of the points in
    /// JSON.
    History {
        part: usize,
    },
    /// Writes the head of the table.
    TableHead,
    /// Writes the rows from this one on, and the end of the page.
    Rows {
        next: usize,
    },
    Done,
}

/// The values above the table.
struct Overview {
    totals: Totals,
    latest: Option<Point>,
    tubes: usize,
    connections: usize,
    job_bytes: u64,
}

const OVERVIEW: [Column<Overview>; 13] = [
    Column::new("ready", "ready", |all| Value::Count(all.totals.ready)),
    Column::new("urgent", "urgent", |all| Value::Count(all.totals.urgent)),
    Column::new("reserved", "reserved", |all| Value::Count(all.totals.reserved)),
    Column::new("delayed", "delayed", |all| Value::Count(all.totals.delayed)),
    Column::new("buried", "buried", |all| Value::Count(all.totals.buried)),
    Column::new("puts_per_second", "puts/s", |all| Value::Rate(all.latest.map(|point| point.puts))),
    Column::new("deletes_per_second", "deletes/s", |all| {
        Value::Rate(all.latest.map(|point| point.deletes))
    }),
    Column::new("timeouts", "timeouts", |all| Value::Count(all.totals.timeouts)),
    Column::new("tubes", "tubes", |all| Value::Count(all.tubes as u64)),
    Column::new("connections", "connections", |all| Value::Count(all.connections as u64)),
    Column::new("workers", "workers", |all| Value::Count(all.totals.workers)),
    Column::new("waiting", "waiting", |all| Value::Count(all.totals.waiting)),
    Column::new("job_memory_bytes", "memory", |all| Value::Bytes(all.job_bytes)),
];

/// The values of a server with a body cache, after those of [`OVERVIEW`].
const CACHE_OVERVIEW: [Column<BodyCache>; 7] = [
    Column::new("cold_jobs", "cold", |cache| Value::Count(cache.cold().jobs)),
    Column::new("cold_body_bytes", "cold bodies", |cache| Value::Bytes(cache.cold().bytes)),
    Column::new("body_cache_bytes", "body cache", |cache| Value::Bytes(cache.warm_bytes())),
    Column::new("body_cache_limit_bytes", "cache limit", |cache| {
        Value::Bytes(cache.limit.unwrap_or(u64::MAX))
    }),
    Column::new("body_reads", "body reads", |cache| Value::Count(cache.stats().reads)),
    Column::new("body_waits", "disk waits", |cache| Value::Count(cache.stats().wait_times.total())),
    Column::new("body_read_failures", "unreadable", |cache| Value::Count(cache.stats().failures)),
];

const POINT_COLUMNS: [Column<Point>; 5] = [
    Column::new("seconds_ago", "", |point| Value::Span(point.age)),
    Column::new("ready", "", |point| Value::Count(point.ready)),
    Column::new("reserved", "", |point| Value::Count(point.reserved)),
    Column::new("puts_per_second", "", |point| Value::Rate(Some(point.puts))),
    Column::new("deletes_per_second", "", |point| Value::Rate(Some(point.deletes))),
];

/// The maximum length of the HTML page in bytes, so that a phone loads it quickly.
pub const HTML_MAX: usize = 30_000;
/// The maximum length of the text after the rows in HTML, without the script, in bytes.
const HTML_END_MAX: usize = 200;

impl StatusPage {
    /// Returns a page with the tubes that the query selects.
    pub fn new(media_type: MediaType, query: &str) -> StatusPage {
        StatusPage {
            media_type,
            query: TubeQuery::parse(query),
            columns: &[],
            stage: Stage::Begin,
            ranking: Ranking::default(),
            written: 0,
        }
    }

    /// Returns whether the page is complete.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    /// Does the work of the next slice, and appends its text, if any, to `text`.
    pub fn write_slice(
        &mut self,
        view: &View<'_>,
        measurements: &Measurements,
        text: &mut String,
    ) -> Result<(), TryReserveError> {
        let start = text.len();
        match self.stage {
            Stage::Begin => {
                self.columns = ranking::columns(view.queue.body_cache.limit.is_some());
                self.query.limit_order(self.columns);
                self.stage = Stage::Tubes(TubeScan::new(&view.queue.tubes));
            }
            Stage::Tubes(_) => self.scan_tubes(view, measurements)?,
            Stage::Sort => {
                self.ranking.sort();
                self.stage = Stage::Head;
            }
            Stage::Head => {
                self.write_head(view, measurements, text);
                self.stage = Stage::History { part: 0 };
            }
            Stage::History { part } => {
                let (history, now) = (&measurements.history, view.now);
                match self.media_type {
                    MediaType::Html => html::write_plot(part, history, now, text),
                    MediaType::Text => {}
                    MediaType::Json => write_json_history(part, history, now, text),
                }
                self.stage = match part + 1 {
                    html::PLOT_COUNT => Stage::TableHead,
                    part => Stage::History { part },
                };
            }
            Stage::TableHead => {
                match self.media_type {
                    MediaType::Html => self.write_html_table_head(text),
                    MediaType::Text => {
                        table::write_text_head(self.columns, "tube", self.name_width(), text);
                    }
                    MediaType::Json => text.push_str("],\n\"tubes\":["),
                }
                self.stage = Stage::Rows { next: 0 };
            }
            Stage::Rows { next } => self.write_rows(next, start, &view.queue.limits, text),
            Stage::Done => {}
        }
        self.written += text.len() - start;
        Ok(())
    }

    /// Scans tubes until the budget of the slice is used up, or all were scanned.
    fn scan_tubes(
        &mut self,
        view: &View<'_>,
        measurements: &Measurements,
    ) -> Result<(), TryReserveError> {
        let tubes = &view.queue.tubes;
        let mut budget = view.queue.limits.jobs_per_page_slice;
        let Stage::Tubes(scan) = &mut self.stage else { return Ok(()) };
        loop {
            match scan.step(view, &mut budget, |name| self.query.matches(name)) {
                ScanStep::Tube { key, stats, .. } => {
                    let tube = &tubes[key];
                    let row = TubeRow { stats, rates: measurements.tube_rates.get(key, tube) };
                    self.ranking.add(row, &tube.name, &self.query)?;
                }
                ScanStep::Unfinished => return Ok(()),
                ScanStep::Done => {
                    self.stage = Stage::Sort;
                    return Ok(());
                }
            }
        }
    }

    // ---- Writing ----

    fn write_head(&self, view: &View<'_>, measurements: &Measurements, text: &mut String) {
        let overview = Overview {
            totals: view.queue.totals,
            latest: measurements.history.points(view.now).last(),
            tubes: view.queue.tubes.len(),
            connections: view.server.connections,
            job_bytes: view.queue.job_bytes(),
        };
        match self.media_type {
            MediaType::Html => write_html_head(view, &overview, text),
            MediaType::Text => write_text_head(view, &overview, text),
            MediaType::Json => write_json_head(view, &overview, text),
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
        self.write_sort_link(Order::Name, TubeQuery::BY_NAME, "tube", text);
        for (index, column) in self.columns.iter().enumerate() {
            self.write_sort_link(Order::Column(index), column.key, column.title, text);
        }
        text.push_str("<tbody>\n");
    }

    /// Writes the head of a column, with a link that sorts by it or reverses the order.
    fn write_sort_link(&self, order: Order, key: &str, title: &str, text: &mut String) {
        let TubeQuery { is_reversed, ref filter, .. } = self.query;
        let is_current = self.query.order == order;
        // By default names are ascending, and numbers descending.
        let is_ascending = is_reversed != (order == Order::Name);
        let sort = match (is_current, is_ascending) {
            (false, _) => "",
            (true, true) => " aria-sort=ascending",
            (true, false) => " aria-sort=descending",
        };
        let minus = if is_current && !is_reversed { "-" } else { "" };
        push(text, format_args!("<th scope=col{sort}><a href=\"?sort={minus}{key}"));
        if !filter.is_empty() {
            push(text, format_args!("&amp;filter={}", Encoded(filter)));
        }
        push(text, format_args!("\">{title}</a>"));
    }

    /// Returns the width of the names in a table of text.
    fn name_width(&self) -> usize {
        let widths = self.ranking.rows().map(|row| row.stats.name.len());
        widths.max().unwrap_or(0).max("tube".len())
    }

    /// Writes the next rows, which follow `start` bytes of `text`, and the end after the last row.
    fn write_rows(&mut self, next: usize, start: usize, limits: &Limits, text: &mut String) {
        let (mut shown, mut is_full) = (next, false);
        let rows = self.ranking.rows();
        let last = rows.len().min(next + limits.rows_per_page_slice);
        let width = if self.media_type == MediaType::Text { self.name_width() } else { 0 };
        for row in rows.take(last).skip(next) {
            let row_start = text.len();
            if row_start - start >= limits.rows_per_page_slice_bytes {
                break;
            }
            match self.media_type {
                MediaType::Html => write_html_row(self.columns, row, text),
                MediaType::Text => {
                    table::write_text_row(self.columns, &row.stats.name, width, row, text);
                }
                MediaType::Json => write_json_row(self.columns, row, shown == 0, text),
            }
            let end = html::SCRIPT.len() + HTML_END_MAX;
            let total = self.written + text.len() - start + end;
            if self.media_type == MediaType::Html && total > HTML_MAX {
                text.truncate(row_start);
                is_full = true;
                break;
            }
            shown += 1;
        }
        self.stage = Stage::Rows { next: shown };
        if is_full || shown == self.ranking.rows().len() {
            self.write_end(shown, text);
            self.stage = Stage::Done;
        }
    }

    fn write_end(&self, shown: usize, text: &mut String) {
        let more = self.ranking.added().saturating_sub(shown as u64);
        match self.media_type {
            MediaType::Html => {
                push(text, format_args!("</table></div>\n<p id=more>{}</p>\n", More(more)));
                html::write_end(text);
            }
            MediaType::Text if more > 0 => push(text, format_args!("{}\n", More(more))),
            MediaType::Text => {}
            MediaType::Json => push(text, format_args!("],\"tubes_not_shown\":{more}}}\n")),
        }
    }
}

/// Returns the state of the body cache if bodies can be cold.
fn body_cache<'v>(view: &View<'v>) -> Option<&'v BodyCache> {
    Some(&view.queue.body_cache).filter(|cache| cache.limit.is_some())
}

fn write_html_head(view: &View<'_>, overview: &Overview, text: &mut String) {
    html::write_head("", view, text);
    text.push_str("<h1>beanstalkd</h1>\n");
    html::write_identity(view, text);
    text.push_str("<dl id=totals>\n");
    table::write_html_list(&OVERVIEW, overview, text);
    if let Some(cache) = body_cache(view) {
        table::write_html_list(&CACHE_OVERVIEW, cache, text);
    }
    text.push_str("</dl>\n");
}

fn write_html_row(columns: &[Column<TubeRow>], row: &TubeRow, text: &mut String) {
    let name = &*row.stats.name;
    text.push_str("<tr><th scope=row>");
    match html::tube_link(name) {
        Some(link) => push(text, format_args!("<a href=\"{link}\">{}</a>", Escaped(name))),
        None => push(text, format_args!("{}", Escaped(name))),
    }
    table::write_html_cells(columns, row, text);
    text.push('\n');
}

fn write_json_row(columns: &[Column<TubeRow>], row: &TubeRow, is_first: bool, text: &mut String) {
    let separator = if is_first { "" } else { "," };
    push(text, format_args!("{separator}\n{{\"name\":\"{}\",", JsonText(&row.stats.name)));
    table::write_json_members(columns, row, text);
    text.push('}');
}

fn write_text_head(view: &View<'_>, overview: &Overview, text: &mut String) {
    let ProcessInfo { hostname, pid, started_at, .. } = view.server.process;
    let uptime = Readable(Value::Span(view.now.since(*started_at)));
    let (protocol, version) = (stats::VERSION, env!("CARGO_PKG_VERSION"));
    let draining = if view.server.is_draining { ", draining" } else { "" };
    push(
        text,
        format_args!(
            "beanstalkd {protocol} (beanstalkd-server {version}), process {pid} on \
             {hostname}, up {uptime}{draining}\n"
        ),
    );
    let (jobs, others) = OVERVIEW.split_at(OVERVIEW.len() / 2 + 1);
    table::write_text_list(jobs, overview, text);
    table::write_text_list(others, overview, text);
    if let Some(cache) = body_cache(view) {
        table::write_text_list(&CACHE_OVERVIEW, cache, text);
    }
    text.push('\n');
}

fn write_json_head(view: &View<'_>, overview: &Overview, text: &mut String) {
    let ProcessInfo { hostname, pid, started_at, .. } = view.server.process;
    let (protocol, version, host) = (stats::VERSION, env!("CARGO_PKG_VERSION"), JsonText(hostname));
    let uptime = JsonNumber(Value::Span(view.now.since(*started_at)));
    let is_draining = view.server.is_draining;
    push(
        text,
        format_args!(
            "{{\"server\":{{\"version\":\"{version}\",\"protocol\":\"{protocol}\",\
             \"hostname\":\"{host}\",\"pid\":{pid},\"uptime_seconds\":{uptime},\
             \"draining\":{is_draining}}},\n\"totals\":{{"
        ),
    );
    table::write_json_members(&OVERVIEW, overview, text);
    if let Some(cache) = body_cache(view) {
        text.push(',');
        table::write_json_members(&CACHE_OVERVIEW, cache, text);
    }
    text.push_str("},\n\"history\":[");
}

fn write_json_history(part: usize, history: &History, now: Nanos, text: &mut String) {
    const POINTS: usize = SAMPLES.div_ceil(html::PLOT_COUNT);
    let points = history.points(now).enumerate();
    for (index, point) in points.skip(part * POINTS).take(POINTS) {
        text.push_str(if index == 0 { "\n{" } else { ",\n{" });
        table::write_json_members(&POINT_COLUMNS, &point, text);
        text.push('}');
    }
}

/// Displays the number of tubes that are not shown.
struct More(u64);

impl Display for More {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            1 => f.write_str("1 more tube is not shown"),
            more => write!(f, "{} more tubes are not shown", Readable(Value::Count(more))),
        }
    }
}
