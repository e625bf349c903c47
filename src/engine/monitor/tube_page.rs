//! The page of one tube: its values, and the first jobs in each state; as HTML, as columns of text,
//! and as JSON. It never shows the bodies of jobs.
//!
//! A tube that is removed between two slices is shown as it was before.

use super::html::{self, Escaped};
use super::http::MediaType;
use super::http_conn::{Page, View};
use super::reserved_scan::ReservedScan;
use super::table::{self, Column, Value, push};
use super::tube_scan::{self, Cursor, TubeStats};
use crate::engine::binlog::record::Counts;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, Key, TubeKey};
use crate::engine::queue::Queue;
use crate::engine::queue::job::Job;
use crate::engine::text::JsonText;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// The page of a tube that is being made.
#[derive(Debug)]
pub struct TubePage {
    media_type: MediaType,
    name: String,
    stage: Stage,
    values: TubeStats,
}

#[derive(Debug)]
enum Stage {
    /// Scans ready jobs and waiters for their counts.
    Scan(Option<Box<Cursor>>),
    /// Finds reserved jobs, and then writes the whole page.
    Jobs(ReservedScan),
}

/// A job that the page shows.
struct ShownJob<'q> {
    job: &'q Job,
    queue: &'q Queue,
    now: Nanos,
}

impl ShownJob<'_> {
    fn counts(&self) -> Counts {
        self.queue.counts(self.job)
    }
}

fn job_columns<'q>() -> [Column<ShownJob<'q>>; 12] {
    [
        ("id", "id", |it| Value::Id(it.job.id)),
        ("pri", "pri", |it| Value::Id(it.job.pri.into())),
        ("age_seconds", "age", |it| Value::Span(it.now.since(it.job.created_at))),
        ("delay_seconds", "delay", |it| Value::Span(Nanos::from_secs(it.job.delay_secs))),
        ("ttr_seconds", "ttr", |it| Value::Span(Nanos::from_secs(it.job.ttr_secs))),
        ("time_left_seconds", "time left", |it| Value::Span(it.queue.time_left(it.job, it.now))),
        ("bytes", "bytes", |it| Value::Count(it.job.body.content_len().into())),
        ("reserves", "reserves", |it| Value::Count(it.counts().reserves.into())),
        ("timeouts", "timeouts", |it| Value::Count(it.counts().timeouts.into())),
        ("releases", "releases", |it| Value::Count(it.counts().releases.into())),
        ("buries", "buries", |it| Value::Count(it.counts().buries.into())),
        ("kicks", "kicks", |it| Value::Count(it.counts().kicks.into())),
    ]
}

/// The number of jobs of each state that are shown, so that the page is made in one slice.
const JOBS_PER_STATE: usize = 10;
/// The number of states of jobs.
const STATES: usize = 4;
/// The number of values on the first line of text.
const FIRST_LINE: usize = 8;

impl TubePage {
    /// Returns the page of the tube with this name.
    pub fn new(media_type: MediaType, name: &str) -> TubePage {
        TubePage {
            media_type,
            name: name.to_owned(),
            stage: Stage::Scan(None),
            values: TubeStats::default(),
        }
    }
}

impl Page for TubePage {
    fn write_slice(&mut self, view: &View<'_>, text: &mut String) -> Result<bool, TryReserveError> {
        let Some(tube) = view.queue.tubes.find(&self.name) else {
            self.write(&[], view, text);
            return Ok(true);
        };
        match &mut self.stage {
            Stage::Scan(cursor) => {
                let current = cursor.take().filter(|cursor| cursor.tube == tube);
                let mut current = current.unwrap_or_else(|| Box::new(Cursor::at(tube, view)));
                if current.advance(view, &mut view.queue.limits.jobs_per_page_slice.clone()) {
                    self.values = current.stats;
                    self.values.rates = view.measurements.tube_rates(tube, &view.queue.tubes[tube]);
                    self.stage = Stage::Jobs(ReservedScan::default());
                } else {
                    *cursor = Some(current);
                }
                Ok(false)
            }
            Stage::Jobs(scan) => {
                let is_done = scan.advance(view, tube, JOBS_PER_STATE)?;
                if is_done {
                    let jobs = first_jobs(scan, tube, view)?;
                    self.write(&jobs, view, text);
                }
                Ok(is_done)
            }
        }
    }
}

/// Returns the first jobs of each state.
fn first_jobs<'q>(
    reserved: &ReservedScan,
    key: TubeKey,
    view: &View<'q>,
) -> Result<Vec<ShownJob<'q>>, TryReserveError> {
    let (queue, now) = (view.queue, view.now);
    let tube = &queue.tubes[key];
    let mut jobs = Vec::new();
    headroom::leave(Headroom::ThreeQuarters, || jobs.try_reserve_exact(STATES * JOBS_PER_STATE))?;
    let ready = tube.ready.first_keys(JOBS_PER_STATE, &queue.jobs).map(JobKey::from_number);
    let delayed = tube.postponed.iter(&queue.jobs);
    let delayed = delayed.chain(tube.delayed.first_keys(JOBS_PER_STATE, &queue.jobs));
    let delayed = delayed.take(JOBS_PER_STATE);
    let buried = tube.buried.iter(&queue.jobs).take(JOBS_PER_STATE);
    let others = delayed.chain(buried).map(JobKey::from_number);
    let keys = ready.chain(reserved.jobs(queue, key)).chain(others);
    jobs.extend(keys.map(|key| ShownJob { job: &queue.jobs[key], queue, now }));
    Ok(jobs)
}

impl TubePage {
    fn write(&self, jobs: &[ShownJob<'_>], view: &View<'_>, text: &mut String) {
        match self.media_type {
            MediaType::Html => self.write_html(jobs, view, text),
            MediaType::Text => self.write_text(jobs, view, text),
            MediaType::Json => self.write_json(jobs, view, text),
        }
    }

    fn write_html(&self, jobs: &[ShownJob<'_>], view: &View<'_>, text: &mut String) {
        html::write_head(&self.name, view, text);
        let name = Escaped(&self.name);
        push(text, format_args!("<h1>{name}</h1>\n<p><a href=\"../\">All tubes</a></p>\n"));
        html::write_identity(view, text);
        text.push_str("<dl id=tube>\n");
        table::write_html_list(&tube_scan::columns(true, view), &self.values, text);
        push(
            text,
            format_args!(
                "</dl>\n<h2>The first {JOBS_PER_STATE} jobs in each state</h2>\n\
                 <div class=scroll><table id=jobs><thead><tr><th scope=col>state"
            ),
        );
        for (_, title, _) in job_columns() {
            push(text, format_args!("<th scope=col>{title}"));
        }
        text.push_str("<tbody>\n");
        for job in jobs {
            push(text, format_args!("<tr><th scope=row>{}", job.job.state.shown().name()));
            table::write_html_cells(&job_columns(), job, text);
            text.push('\n');
        }
        let none = if jobs.is_empty() { "There are no jobs." } else { "" };
        push(text, format_args!("</table></div>\n<p id=none>{none}</p>\n"));
        html::write_end(text);
    }

    fn write_text(&self, jobs: &[ShownJob<'_>], view: &View<'_>, text: &mut String) {
        push(text, format_args!("tube {}\n", self.name));
        let columns = tube_scan::columns(true, view);
        let (first, others) = columns.split_at(FIRST_LINE);
        table::write_text_list(first, &self.values, text);
        table::write_text_list(others, &self.values, text);
        text.push('\n');
        // The longest state has 8 characters.
        table::write_text_head(&job_columns(), "state   ", text);
        for job in jobs {
            let state = format!("{:8}", job.job.state.shown().name());
            table::write_text_row(&job_columns(), &state, job, text);
        }
    }

    fn write_json(&self, jobs: &[ShownJob<'_>], view: &View<'_>, text: &mut String) {
        push(text, format_args!("{{\"name\":\"{}\",", JsonText(&self.name)));
        table::write_json_members(&tube_scan::columns(true, view), &self.values, text);
        text.push_str(",\n\"jobs\":[");
        for (index, job) in jobs.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            let state = job.job.state.shown().name();
            push(text, format_args!("{separator}\n{{\"state\":\"{state}\","));
            table::write_json_members(&job_columns(), job, text);
            text.push('}');
        }
        text.push_str("]}\n");
    }
}
