//! The page of one tube: its values, and the first jobs in each state; as HTML, as columns of text,
//! and as JSON. It never shows the bodies of jobs.
//!
//! The page is made in slices, at most one in each iteration of the loop. A tube that is removed
//! between two slices is shown as it was before.

use super::accept::MediaType;
use super::html::{self, Escaped};
use super::measurements::Measurements;
use super::ranking::TubeRow;
use super::reserved_scan::ReservedScan;
use super::table::{self, Column, push};
use super::tube_scan::Cursor;
use super::value::Value;
use crate::engine::binlog::record::Counts;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, Key, TubeKey};
use crate::engine::protocol::stats;
use crate::engine::queue::Queue;
use crate::engine::queue::job::Job;
use crate::engine::server::View;
use crate::engine::text::JsonText;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// The page of a tube that is being made.
#[derive(Debug)]
pub struct TubePage {
    media_type: MediaType,
    name: String,
    stage: Stage,
    values: TubeRow,
    columns: &'static [Column<TubeRow>],
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
    Done,
}

/// The last one is shown only with a body cache.
const TUBE_COLUMNS: [Column<TubeRow>; 16] = [
    Column::new("ready", "ready", |tube| Value::Count(tube.stats.ready)),
    Column::new("urgent", "urgent", |tube| Value::Count(tube.stats.urgent)),
    Column::new("reserved", "reserved", |tube| Value::Count(tube.stats.reserved)),
    Column::new("delayed", "delayed", |tube| Value::Count(tube.stats.delayed)),
    Column::new("buried", "buried", |tube| Value::Count(tube.stats.buried)),
    Column::new("waiting", "waiting", |tube| Value::Count(tube.stats.waiting)),
    Column::new("watching", "watching", |tube| Value::Count(tube.stats.watching)),
    Column::new("using", "using", |tube| Value::Count(tube.stats.using)),
    Column::new("pause_left_seconds", "paused", |tube| Value::Span(tube.stats.pause_left)),
    Column::new("oldest_ready_seconds", "oldest ready", |tube| {
        Value::Span(tube.stats.oldest_ready_age)
    }),
    Column::new("puts_per_second", "puts/s", |tube| {
        Value::Rate(tube.rates.map(|rates| rates.puts))
    }),
    Column::new("deletes_per_second", "deletes/s", |tube| {
        Value::Rate(tube.rates.map(|rates| rates.deletes))
    }),
    Column::new("puts", "puts", |tube| Value::Count(tube.stats.total_jobs)),
    Column::new("deletes", "deletes", |tube| Value::Count(tube.stats.deletes)),
    Column::new("pauses", "pauses", |tube| Value::Count(tube.stats.pauses)),
    Column::new("cold", "cold", |tube| Value::Count(tube.stats.cold)),
];

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
    Column::new("id", "id", |job| Value::Id(job.id)),
    Column::new("pri", "pri", |job| Value::Id(job.pri.into())),
    Column::new("age_seconds", "age", |job| Value::Span(job.age)),
    Column::new("delay_seconds", "delay", |job| Value::Span(job.delay)),
    Column::new("ttr_seconds", "ttr", |job| Value::Span(job.ttr)),
    Column::new("time_left_seconds", "time left", |job| Value::Span(job.time_left)),
    Column::new("bytes", "bytes", |job| Value::Count(job.body_len.into())),
    Column::new("reserves", "reserves", |job| Value::Count(job.counts.reserves.into())),
    Column::new("timeouts", "timeouts", |job| Value::Count(job.counts.timeouts.into())),
    Column::new("releases", "releases", |job| Value::Count(job.counts.releases.into())),
    Column::new("buries", "buries", |job| Value::Count(job.counts.buries.into())),
    Column::new("kicks", "kicks", |job| Value::Count(job.counts.kicks.into())),
];

/// The number of jobs of each state that are shown, so that the page is made in one slice.
const JOBS_PER_STATE: usize = 10;
/// The number of states of jobs.
const STATES: usize = 4;
/// The width of the states in a table of text.
const STATE_WIDTH: usize = "reserved".len();

impl TubePage {
    /// Returns the page of the tube with this name.
    pub fn new(media_type: MediaType, name: &str) -> TubePage {
        TubePage {
            media_type,
            name: name.to_owned(),
            stage: Stage::Scan(None),
            values: TubeRow::default(),
            columns: &TUBE_COLUMNS,
            jobs: Vec::new(),
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
        let tube = view.queue.tubes.find(&self.name);
        match (std::mem::replace(&mut self.stage, Stage::Write), tube) {
            (Stage::Scan(cursor), Some(tube)) => self.scan(cursor, tube, view, measurements),
            (Stage::Jobs(mut scan), Some(tube)) => {
                if scan.advance(view.queue, tube, JOBS_PER_STATE)? {
                    self.collect_jobs(&scan, tube, view)?;
                } else {
                    self.stage = Stage::Jobs(scan);
                }
            }
            (Stage::Scan(_) | Stage::Jobs(_), None) => {}
            (Stage::Write, _) => {
                self.write(view, text);
                self.stage = Stage::Done;
            }
            (Stage::Done, _) => self.stage = Stage::Done,
        }
        Ok(())
    }

    // ---- Collecting ----

    fn scan(
        &mut self,
        cursor: Option<Cursor>,
        key: TubeKey,
        view: &View<'_>,
        measurements: &Measurements,
    ) {
        let tube = &view.queue.tubes[key];
        let current = cursor.filter(|cursor| cursor.tube == key);
        let mut current = current.unwrap_or_else(|| Cursor::at(key, tube, view.now));
        if !current.advance(view, &mut view.queue.limits.jobs_per_page_slice.clone()) {
            self.stage = Stage::Scan(Some(current));
            return;
        }
        let rates = measurements.tube_rates.get(key, tube);
        self.values = TubeRow { stats: current.stats, rates };
        let has_cache = view.queue.body_cache.limit.is_some();
        self.columns = &TUBE_COLUMNS[..TUBE_COLUMNS.len() - usize::from(!has_cache)];
        self.stage = Stage::Jobs(ReservedScan::default());
    }

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

    // ---- Writing ----

    fn write(&self, view: &View<'_>, text: &mut String) {
        match self.media_type {
            MediaType::Html => self.write_html(view, text),
            MediaType::Text => self.write_text(text),
            MediaType::Json => self.write_json(text),
        }
    }

    fn write_html(&self, view: &View<'_>, text: &mut String) {
        html::write_head(&self.name, view, text);
        let name = Escaped(&self.name);
        push(text, format_args!("<h1>{name}</h1>\n<p><a href=\"../\">All tubes</a></p>\n"));
        html::write_identity(view, text);
        text.push_str("<dl id=tube>\n");
        table::write_html_list(self.columns, &self.values, text);
        push(
            text,
            format_args!(
                "</dl>\n<h2>The first {JOBS_PER_STATE} jobs in each state</h2>\n\
                 <div class=scroll><table id=jobs><thead><tr><th scope=col>state"
            ),
        );
        for column in &JOB_COLUMNS {
            push(text, format_args!("<th scope=col>{}", column.title));
        }
        text.push_str("<tbody>\n");
        for job in &self.jobs {
            push(text, format_args!("<tr><th scope=row>{}", job.state));
            table::write_html_cells(&JOB_COLUMNS, job, text);
            text.push('\n');
        }
        text.push_str("</table></div>\n<p id=none>");
        if self.jobs.is_empty() {
            text.push_str("There are no jobs.");
        }
        text.push_str("</p>\n");
        html::write_end(text);
    }

    fn write_text(&self, text: &mut String) {
        push(text, format_args!("tube {}\n", self.name));
        let (jobs, others) = self.columns.split_at(TUBE_COLUMNS.len() / 2);
        table::write_text_list(jobs, &self.values, text);
        table::write_text_list(others, &self.values, text);
        text.push('\n');
        table::write_text_head(&JOB_COLUMNS, "state", STATE_WIDTH, text);
        for job in &self.jobs {
            table::write_text_row(&JOB_COLUMNS, job.state, STATE_WIDTH, job, text);
        }
    }

    fn write_json(&self, text: &mut String) {
        push(text, format_args!("{{\"name\":\"{}\",", JsonText(&self.name)));
        table::write_json_members(self.columns, &self.values, text);
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
