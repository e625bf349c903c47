//! The page of one tube: its problems, its values, how reservations end, and its first jobs; as HTML, as
//! columns of text, and as JSON. It never shows the bodies of jobs.
//!
//! A tube that is removed between two slices is shown as it was before, without its jobs.

use super::html::{self, Escaped};
use super::http::MediaType;
use super::http_conn::{Page, View};
use super::problems::Problems;
use super::table::{Column, JsonNumber, Out, Value};
use super::tube_scan::{self, Oldest, TubeStats};
use crate::engine::conn::Conn;
use crate::engine::keys::{JobKey, Key, TubeKey};
use crate::engine::protocol::stats;
use crate::engine::queue::Queue;
use crate::engine::queue::counts::CountedEvent;
use crate::engine::queue::job::{Holder, Job, State};
use crate::engine::queue::outcomes::{End, Outcomes};
use crate::engine::text::{CountOf, JsonText};
use crate::engine::time::Nanos;
use std::collections::BTreeSet;

/// The page of a tube that is being made.
pub struct TubePage {
    stage: Stage,
    /// Only with a name, until all jobs were scanned.
    values: TubeStats,
    problems: Problems,
    /// The jobs to write, once they were found.
    ids: Vec<u64>,
    /// Whether a job was written. Those of the first slices may be gone.
    has_jobs: bool,
}

enum Stage {
    /// Scans all jobs, from this memory page on, for the oldest ready one, and for the first reserved ones: their
    /// deadlines and ids.
    Scan { next_page: usize, oldest: Option<Oldest>, reserved: BTreeSet<(Nanos, u64)> },
    /// Writes what is above the jobs, the jobs from this index on, and the end.
    Jobs(usize),
}

/// A job that the page shows.
struct ShownJob<'q> {
    job: &'q Job,
    view: &'q View<'q>,
}

impl ShownJob<'_> {
    fn count(&self, event: CountedEvent) -> Value {
        Value::Count(self.view.queue.counts(self.job)[event as usize].into())
    }

    /// Returns the connection that has reserved the job, and the time since then.
    fn holder(&self) -> Option<(&Conn, Nanos)> {
        let State::Reserved(Holder { by, index }) = self.job.state else { return None };
        let conn = self.view.conns.conn(by.number() as usize)?;
        Some((conn, self.view.now.since(conn.client.held[index as usize].reserved_at)))
    }

    /// Returns why the job is buried.
    fn why(&self) -> Option<String> {
        let State::Buried(_) = self.job.state else { return None };
        let &Job { id, returns, .. } = self.job;
        let Queue { settings, body_cache, .. } = self.view.queue;
        Some(if body_cache.unreadable.contains(&id) {
            "its body cannot be read".to_owned()
        } else if settings.bury_after.is_some_and(|limit| returns >= limit.get()) {
            format!("came back {}", CountOf(returns.into(), "time"))
        } else {
            "worker".to_owned()
        })
    }
}

fn job_columns<'q>() -> [Column<ShownJob<'q>>; 12] {
    [
        ("id", "id", |it| Value::Id(it.job.id)),
        ("pri", "pri", |it| Value::Id(it.job.pri.into())),
        ("age_seconds", "age", |it| Value::Span(it.view.now.since(it.job.created_at))),
        ("delay_seconds", "delay", |it| Value::Span(Nanos::from_secs(it.job.delay_secs))),
        ("ttr_seconds", "ttr", |it| Value::Span(Nanos::from_secs(it.job.ttr_secs))),
        ("time_left_seconds", "time left", |it| Value::Span(it.view.queue.time_left(it.job))),
        ("bytes", "bytes", |it| Value::Count(it.job.body.content_len().into())),
        ("reserves", "reserves", |it| it.count(CountedEvent::Reserve)),
        ("timeouts", "timeouts", |it| it.count(CountedEvent::Timeout)),
        ("releases", "releases", |it| it.count(CountedEvent::Release)),
        ("buries", "buries", |it| it.count(CountedEvent::Bury)),
        ("kicks", "kicks", |it| it.count(CountedEvent::Kick)),
    ]
}

/// How the reservations have ended, and the times up to which half and 95% of the jobs waited and ran.
const OUTCOMES: [Column<Outcomes>; 9] = [
    ("ended_delete", "ended: deleted", |it| Value::Count(it.ended[End::Delete as usize])),
    ("ended_release", "released", |it| Value::Count(it.ended[End::Release as usize])),
    ("ended_bury", "buried", |it| Value::Count(it.ended[End::Bury as usize])),
    ("ended_timeout", "timed out", |it| Value::Count(it.ended[End::Timeout as usize])),
    ("ended_disconnect", "disconnected", |it| Value::Count(it.ended[End::Disconnect as usize])),
    ("wait_50_seconds", "50% waited", |it| Value::Bound(it.waits.percentile(50))),
    ("wait_95_seconds", "95% waited", |it| Value::Bound(it.waits.percentile(95))),
    ("run_50_seconds", "50% ran", |it| Value::Bound(it.runs.percentile(50))),
    ("run_95_seconds", "95% ran", |it| Value::Bound(it.runs.percentile(95))),
];

/// At most this many buried and this many reserved jobs are shown.
const MOST: usize = 100;
/// The number of ready and of delayed jobs that are shown.
const FEW: usize = 10;

impl TubePage {
    /// Returns the page of the tube with this name.
    pub fn new(name: &str) -> TubePage {
        TubePage {
            stage: Stage::Scan { next_page: 0, oldest: None, reserved: BTreeSet::new() },
            values: TubeStats { name: name.to_owned(), ..TubeStats::default() },
            problems: Problems::default(),
            ids: Vec::new(),
            has_jobs: false,
        }
    }
}

impl Page for TubePage {
    fn write_slice(&mut self, view: &View<'_>, out: &mut Out<'_>) -> bool {
        let tube = view.queue.tubes.find(&self.values.name);
        match (&mut self.stage, tube) {
            (Stage::Scan { next_page, oldest, reserved }, Some(tube)) => {
                let is_done = view.queue.scan_jobs(next_page, |job| {
                    if job.tube == tube {
                        *oldest = [*oldest, Oldest::of(job)].into_iter().flatten().min();
                        note_reserved(reserved, job, view);
                    }
                });
                if is_done {
                    self.values = TubeStats::of(tube, *oldest, view);
                    self.problems.add_tube(&self.values, view);
                    self.ids = first_jobs(self.values.oldest_ready, reserved, tube, view);
                    self.stage = Stage::Jobs(0);
                }
            }
            (Stage::Scan { .. }, None) => self.stage = Stage::Jobs(0),
            (&mut Stage::Jobs(first), _) => return self.write_jobs(first, view, out),
        }
        false
    }
}

/// Keeps the reserved jobs that time out first.
fn note_reserved(reserved: &mut BTreeSet<(Nanos, u64)>, job: &Job, view: &View<'_>) {
    if let State::Reserved(_) = job.state {
        reserved.insert((view.queue.due(job).unwrap_or(Nanos::NEVER), job.id));
        if reserved.len() > MOST {
            reserved.pop_last();
        }
    }
}

/// Returns the ids of the first jobs of each state, after the oldest ready one.
fn first_jobs(
    oldest: u64,
    reserved: &BTreeSet<(Nanos, u64)>,
    key: TubeKey,
    view: &View<'_>,
) -> Vec<u64> {
    let (tube, jobs) = (&view.queue.tubes[key], &view.queue.jobs);
    let id_of = |key: JobKey| jobs[key].id;
    let delayed = tube.jobs.delayed.first_keys(FEW, jobs);
    // 0 is the id of no job.
    let mut ids = vec![oldest];
    ids.extend(tube.jobs.buried.iter(jobs).take(MOST).map(JobKey::from_number).map(id_of));
    ids.extend(reserved.iter().map(|&(_, id)| id));
    let behind = view.queue.ready_behind(key);
    let ready = tube.jobs.ready.first_keys(FEW, jobs).chain(behind).take(FEW);
    ids.extend(ready.chain(delayed).map(id_of));
    ids
}

impl TubePage {
    /// Writes the next jobs, those above them before the first, and the end after the last. Returns whether the page
    /// is complete.
    fn write_jobs(&mut self, first: usize, view: &View<'_>, out: &mut Out<'_>) -> bool {
        let end = self.ids.len().min(first + view.queue.limits.rows_per_page_slice);
        if first == 0 {
            self.write_head(view, out);
        }
        for index in first..end {
            let Some(key) = view.queue.find(self.ids[index]) else { continue };
            if index == 0 && out.format == MediaType::Json {
                continue;
            }
            let separator = if std::mem::replace(&mut self.has_jobs, true) { ",\n" } else { "\n" };
            write_job(index, separator, &ShownJob { job: &view.queue.jobs[key], view }, out);
        }
        let is_done = end == self.ids.len();
        if is_done {
            let none = if self.ids.len() < 2 { "There are no jobs." } else { "" };
            out.each(format_args!("</table></div>\n<p id=none>{none}</p>\n"), "", "\n]}\n");
            html::write_end(out);
        }
        self.stage = Stage::Jobs(end);
        is_done
    }

    fn write_head(&self, view: &View<'_>, out: &mut Out<'_>) {
        let name = &*self.values.name;
        html::write_head(name, view, out);
        out.each(
            format_args!("<h1>{}</h1>\n<p><a href=\"../\">All tubes</a></p>\n", Escaped(name)),
            format_args!("tube {name}\n"),
            format_args!("{{\"name\":\"{}\",", JsonText(name)),
        );
        self.problems.write("", out);
        html::write_identity(view, out);
        let (first, others) = tube_scan::columns(view).split_at(tube_scan::IN_TABLE);
        out.each("<dl id=tube>\n", "", "");
        out.values(first, &self.values);
        out.each("", "\n", ",");
        out.values(others, &self.values);
        out.each("</dl>\n<dl id=outcomes>\n", "\n", ",\n");
        out.values(&OUTCOMES, &self.values.outcomes);
        // The longest state has 8 characters.
        out.each(
            format_args!(
                "</dl>\n<h2>The oldest job, the first {MOST} buried and held, the first {FEW} ready and \
                 delayed</h2>\n<div class=scroll><table id=jobs><thead><tr><th scope=col>state<th scope=col>why, or \
                 holder"
            ),
            "\n\nstate   ",
            ",\n\"jobs\":[",
        );
        out.titles(&job_columns());
        out.each("<tbody>\n", "\n", "");
    }
}

/// Writes a job. The first one is the oldest ready one, which JSON has among the values already.
fn write_job(index: usize, separator: &str, job: &ShownJob<'_>, out: &mut Out<'_>) {
    let state = job.job.state.shown().name();
    let (id, label) = if index == 0 { (" id=oldest", "oldest") } else { ("", state) };
    let (note, members) = match (job.why(), job.holder()) {
        (Some(why), _) => (why.clone(), format!(",\"why\":\"{why}\"")),
        (None, Some((conn, since))) => {
            let (client, address, since) = (conn.id(), stats::address(conn), Value::Span(since));
            let secs = JsonNumber(since);
            (
                format!("{address} for {since}"),
                format!(",\"client\":{client},\"address\":\"{address}\",\"held_seconds\":{secs}"),
            )
        }
        (None, None) => (String::new(), String::new()),
    };
    out.each(
        format_args!("<tr{id}><th scope=row>{label}<td>{note}"),
        format_args!("{label:8}"),
        format_args!("{separator}{{\"state\":\"{state}\","),
    );
    out.cells(&job_columns(), job);
    let gap = if note.is_empty() { "" } else { " " };
    out.each("\n", format_args!("{gap}{note}\n"), members + "}");
}
