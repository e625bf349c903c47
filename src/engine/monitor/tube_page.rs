//! The page of one tube: its values, and the first jobs in each state; as HTML, as columns of text,
//! and as JSON. It has facts about jobs, and never their bodies.
//!
//! The page is made in slices, at most one in each iteration of the loop. A tube that is removed
//! between two slices is shown as it was before.

use super::accept::MediaType;
use super::html::{self, Escaped};
use super::measurements::Measurements;
use super::ranking::TubeRow;
use super::reserved_scan::ReservedScan;
use super::table::{self, Column, push};
use super::tube_scan::{Cursor, SCAN_BUDGET};
use super::value::Value;
use crate::engine::binlog::record::Counts;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::{JobKey, Key, TubeKey};
use crate::engine::queue::Queue;
use crate::engine::queue::job::{Job, State};
use crate::engine::server::View;
use crate::engine::text::{CR_LF, JsonText};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;

/// The page of a tube that is being made.
#[derive(Debug)]
pub struct TubePage {
    media_type: MediaType,
    name: String,
    stage: Stage,
    values: TubeRow,
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

const TUBE_COLUMNS: [Column<TubeRow>; 15] = [
    tube_column("ready", "ready", |tube| Value::Count(tube.stats.ready)),
    tube_column("urgent", "urgent", |tube| Value::Count(tube.stats.urgent)),
    tube_column("reserved", "reserved", |tube| Value::Count(tube.stats.reserved)),
    tube_column("delayed", "delayed", |tube| Value::Count(tube.stats.delayed)),
    tube_column("buried", "buried", |tube| Value::Count(tube.stats.buried)),
    tube_column("waiting", "waiting", |tube| Value::Count(tube.stats.waiting)),
    tube_column("watching", "watching", |tube| Value::Count(tube.stats.watching)),
    tube_column("using", "using", |tube| Value::Count(tube.stats.using)),
    tube_column("pause_left_seconds", "paused", |tube| Value::Span(tube.stats.pause_left)),
    tube_column("oldest_ready_seconds", "oldest ready", |tube| {
        Value::Span(tube.stats.oldest_ready_age)
    }),
    tube_column("puts_per_second", "puts/s", |tube| {
        Value::Rate(tube.rates.map(|rates| rates.puts))
    }),
    tube_column("deletes_per_second", "deletes/s", |tube| {
        Value::Rate(tube.rates.map(|rates| rates.deletes))
    }),
    tube_column("puts", "puts", |tube| Value::Count(tube.stats.total_jobs)),
    tube_column("deletes", "deletes", |tube| Value::Count(tube.stats.deletes)),
    tube_column("pauses", "pauses", |tube| Value::Count(tube.stats.pauses)),
];

const fn tube_column(
    key: &'static str,
    title: &'static str,
    value: fn(&TubeRow) -> Value,
) -> Column<TubeRow> {
    Column { key, title, value }
}

/// What the page shows of a job.
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
    job_column("id", "id", |job| Value::Id(job.id)),
    job_column("pri", "pri", |job| Value::Id(job.pri.into())),
    job_column("age_seconds", "age", |job| Value::Span(job.age)),
    job_column("delay_seconds", "delay", |job| Value::Span(job.delay)),
    job_column("ttr_seconds", "ttr", |job| Value::Span(job.ttr)),
    job_column("time_left_seconds", "time left", |job| Value::Span(job.time_left)),
    job_column("bytes", "bytes", |job| Value::Count(job.body_len.into())),
    job_column("reserves", "reserves", |job| Value::Count(job.counts.reserves.into())),
    job_column("timeouts", "timeouts", |job| Value::Count(job.counts.timeouts.into())),
    job_column("releases", "releases", |job| Value::Count(job.counts.releases.into())),
    job_column("buries", "buries", |job| Value::Count(job.counts.buries.into())),
    job_column("kicks", "kicks", |job| Value::Count(job.counts.kicks.into())),
];

const fn job_column(
    key: &'static str,
    title: &'static str,
    value: fn(&JobRow) -> Value,
) -> Column<JobRow> {
    Column { key, title, value }
}

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
        if !current.advance(view, &mut SCAN_BUDGET.clone()) {
            self.stage = Stage::Scan(Some(current));
            return;
        }
        let rates = measurements.tube_rates.get(key, tube);
        self.values = TubeRow { stats: current.stats, rates };
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
        let ready = tube.ready.first_entries(JOBS_PER_STATE).into_iter().map(|entry| entry.job);
        let delayed = tube.delayed.first_entries(JOBS_PER_STATE).into_iter().map(|entry| entry.job);
        let buried = tube.buried.iter(&queue.jobs).map(JobKey::from_number).take(JOBS_PER_STATE);
        let keys = ready.chain(reserved.jobs(queue, key)).chain(delayed).chain(buried);
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
        table::write_html_list(&TUBE_COLUMNS, &self.values, text);
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
        let (jobs, others) = TUBE_COLUMNS.split_at(TUBE_COLUMNS.len() / 2 + 1);
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
        table::write_json_members(&TUBE_COLUMNS, &self.values, text);
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
        let state = match job.state {
            State::Ready { .. } => "ready",
            State::Delayed { .. } => "delayed",
            State::Reserved { .. } => "reserved",
            State::Buried(_) => "buried",
            State::Detached => unreachable!("between commands no job is detached"),
        };
        JobRow {
            state,
            id: job.id,
            pri: job.pri,
            age: now.since(job.created_at),
            delay: Nanos::from_secs(job.delay_secs),
            ttr: Nanos::from_secs(job.ttr_secs),
            time_left: queue.due(job).map_or(Nanos::ZERO, |due| due.since(now)),
            body_len: job.body.full_len() - CR_LF_LEN,
            counts: job.counts,
        }
    }
}

/// The length of the CR LF that the body ends with.
#[expect(clippy::cast_possible_truncation, reason = "2")]
const CR_LF_LEN: u32 = CR_LF.len() as u32;
