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
use crate::engine::protocol::stats;
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
    jobs: Vec<JobRow>,
}

#[derive(Debug)]
enum Stage {
    /// Scans ready jobs and waiters for their counts.
    Scan(Option<Cursor>),
    /// Finds reserved jobs, and then collects the first jobs of all states.
    Jobs(ReservedScan),
    /// Writes the whole page.
    Write,
}

/// The values of a job that the page shows.
#[derive(Debug)]
struct JobRow {
    state: &'static str,
    id: u64,
    pri: u32,
    age: Nanos,
    delay: Nanos,
    ttr: Nanos,
    time_left: Nanos,
    body_len: u32,
    counts: Counts,
}

const JOB_COLUMNS: [Column<JobRow>; 12] = [
    ("id", "id", |job| Value::Id(job.id)),
    ("pri", "pri", |job| Value::Id(job.pri.into())),
    ("age_seconds", "age", |job| Value::Span(job.age)),
    ("delay_seconds", "delay", |job| Value::Span(job.delay)),
    ("ttr_seconds", "ttr", |job| Value::Span(job.ttr)),
    ("time_left_seconds", "time left", |job| Value::Span(job.time_left)),
    ("bytes", "bytes", |job| Value::Count(job.body_len.into())),
    ("reserves", "reserves", |job| Value::Count(job.counts.reserves.into())),
    ("timeouts", "timeouts", |job| Value::Count(job.counts.timeouts.into())),
    ("releases", "releases", |job| Value::Count(job.counts.releases.into())),
    ("buries", "buries", |job| Value::Count(job.counts.buries.into())),
    ("kicks", "kicks", |job| Value::Count(job.counts.kicks.into())),
];

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
            jobs: Vec::new(),
        }
    }
}

impl Page for TubePage {
    fn write_slice(&mut self, view: &View<'_>, text: &mut String) -> Result<bool, TryReserveError> {
        let tube = view.queue.tubes.find(&self.name);
        self.stage = match (std::mem::replace(&mut self.stage, Stage::Write), tube) {
            (Stage::Scan(cursor), Some(key)) => {
                let current = cursor.filter(|cursor| cursor.tube == key);
                let mut current = current.unwrap_or_else(|| Cursor::at(key, view));
                if current.advance(view, &mut view.queue.limits.jobs_per_page_slice.clone()) {
                    self.values = current.stats;
                    self.values.rates = view.measurements.tube_rates(key, &view.queue.tubes[key]);
                    Stage::Jobs(ReservedScan::default())
                } else {
                    Stage::Scan(Some(current))
                }
            }
            (Stage::Jobs(mut scan), Some(key)) => {
                if scan.advance(view.queue, key, JOBS_PER_STATE)? {
                    self.collect_jobs(&scan, key, view)?;
                    Stage::Write
                } else {
                    Stage::Jobs(scan)
                }
            }
            (Stage::Scan(_) | Stage::Jobs(_), None) => Stage::Write,
            (Stage::Write, _) => {
                self.write(view, text);
                return Ok(true);
            }
        };
        Ok(false)
    }
}

impl TubePage {
    fn collect_jobs(
        &mut self,
        reserved: &ReservedScan,
        key: TubeKey,
        view: &View<'_>,
    ) -> Result<(), TryReserveError> {
        let queue = view.queue;
        let tube = &queue.tubes[key];
        headroom::leave(Headroom::ThreeQuarters, || {
            self.jobs.try_reserve_exact(STATES * JOBS_PER_STATE)
        })?;
        let ready = tube.ready.first_keys(JOBS_PER_STATE, &queue.jobs).map(JobKey::from_number);
        let delayed = tube.postponed.iter(&queue.jobs);
        let delayed = delayed.chain(tube.delayed.first_keys(JOBS_PER_STATE, &queue.jobs));
        let delayed = delayed.take(JOBS_PER_STATE);
        let buried = tube.buried.iter(&queue.jobs).take(JOBS_PER_STATE);
        let others = delayed.chain(buried).map(JobKey::from_number);
        let keys = ready.chain(reserved.jobs(queue, key)).chain(others);
        self.jobs.extend(keys.map(|key| JobRow::of(&queue.jobs[key], queue, view.now)));
        Ok(())
    }

    fn write(&self, view: &View<'_>, text: &mut String) {
        let columns = tube_scan::columns(true, view);
        match self.media_type {
            MediaType::Html => self.write_html(&columns, view, text),
            MediaType::Text => self.write_text(&columns, text),
            MediaType::Json => self.write_json(&columns, text),
        }
    }

    fn write_html(&self, columns: &[Column<TubeStats>], view: &View<'_>, text: &mut String) {
        html::write_head(&self.name, view, text);
        let name = Escaped(&self.name);
        push(text, format_args!("<h1>{name}</h1>\n<p><a href=\"../\">All tubes</a></p>\n"));
        html::write_identity(view, text);
        text.push_str("<dl id=tube>\n");
        table::write_html_list(columns, &self.values, text);
        push(
            text,
            format_args!(
                "</dl>\n<h2>The first {JOBS_PER_STATE} jobs in each state</h2>\n\
                 <div class=scroll><table id=jobs><thead><tr><th scope=col>state"
            ),
        );
        for (_, title, _) in &JOB_COLUMNS {
            push(text, format_args!("<th scope=col>{title}"));
        }
        text.push_str("<tbody>\n");
        for job in &self.jobs {
            push(text, format_args!("<tr><th scope=row>{}", job.state));
            table::write_html_cells(&JOB_COLUMNS, job, text);
            text.push('\n');
        }
        let none = if self.jobs.is_empty() { "There are no jobs." } else { "" };
        push(text, format_args!("</table></div>\n<p id=none>{none}</p>\n"));
        html::write_end(text);
    }

    fn write_text(&self, columns: &[Column<TubeStats>], text: &mut String) {
        push(text, format_args!("tube {}\n", self.name));
        let (jobs, others) = columns.split_at(FIRST_LINE);
        table::write_text_list(jobs, &self.values, text);
        table::write_text_list(others, &self.values, text);
        text.push('\n');
        // The longest state has 8 characters.
        table::write_text_head(&JOB_COLUMNS, "state   ", text);
        for job in &self.jobs {
            table::write_text_row(&JOB_COLUMNS, &format!("{:8}", job.state), job, text);
        }
    }

    fn write_json(&self, columns: &[Column<TubeStats>], text: &mut String) {
        push(text, format_args!("{{\"name\":\"{}\",", JsonText(&self.name)));
        table::write_json_members(columns, &self.values, text);
        text.push_str(",\n\"jobs\":[");
        for (index, job) in self.jobs.iter().enumerate() {
            let separator = if index == 0 { "" } else { "," };
            push(text, format_args!("{separator}\n{{\"state\":\"{}\",", job.state));
            table::write_json_members(&JOB_COLUMNS, job, text);
            text.push('}');
        }
        text.push_str("]}\n");
    }
}

impl JobRow {
    fn of(job: &Job, queue: &Queue, now: Nanos) -> JobRow {
        JobRow {
            state: stats::state_name(job),
            id: job.id,
            pri: job.pri,
            age: now.since(job.created_at),
            delay: Nanos::from_secs(job.delay_secs),
            ttr: Nanos::from_secs(job.ttr_secs),
            time_left: queue.time_left(job, now),
            body_len: job.body.content_len(),
            counts: queue.jobs.counts(job),
        }
    }
}
