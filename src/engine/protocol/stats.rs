//! The YAML documents: `stats`, `stats-job`, `stats-tube` and the lists.
//!
//! Telling only: nothing is counted here. Names, order and quotes of the lines are part
//! of the protocol; clients compare whole documents. beanstalkd-protocol(7) tells what each
//! line means.

use super::command::Counter;
use crate::engine::headroom::{self, Headroom};
use crate::engine::queue::job::{Job, State};
use crate::engine::queue::tube::Tube;
use crate::engine::queue::{Queue, Totals};
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::fmt::{self, Display, Write};

/// What the process says of itself in `stats`.
#[derive(Clone, Debug)]
pub struct ProcessInfo {
    /// The process id.
    pub pid: u32,
    /// 16 hex digits, new at each start.
    pub instance_id: String,
    /// The host's own name for itself.
    pub hostname: String,
    /// The version of the operating system, as uname tells it.
    pub os_version: String,
    /// The kind of machine, as uname tells it.
    pub platform: String,
    /// When the server began.
    pub started_at: Nanos,
    /// Reads how much processor time the process has had.
    pub processor_time: fn() -> ProcessorTime,
    /// Reads how many bytes of memory the process has, if that can be known.
    pub resident_bytes: fn() -> Option<u64>,
    /// Returns whether at least this much of the memory that is kept back is there.
    pub has_headroom: fn(Headroom) -> bool,
}

/// Processor time, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessorTime {
    /// In the program itself.
    pub user_us: u64,
    /// In the system on its behalf.
    pub system_us: u64,
}

/// What `stats` tells beside the sums of the queue.
#[derive(Debug)]
pub struct ServerStats<'a> {
    /// Of the process.
    pub facts: &'a ProcessInfo,
    /// By [`Counter`].
    pub commands: &'a [u64; Counter::COUNT],
    /// The largest body allowed, in bytes.
    pub max_job_size: u32,
    /// The size of a binlog file, in bytes.
    pub binlog_file_size: u32,
    /// How many bytes of memory jobs may take, if there is a limit.
    pub max_memory_bytes: Option<u64>,
    /// Connections at present.
    pub connections: usize,
    /// Connections since the start.
    pub total_connections: u64,
    /// Whether puts are refused.
    pub is_draining: bool,
}

/// How the server does, for a line of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusLine {
    /// Jobs that wait for a worker.
    pub ready: u64,
    /// Jobs that a worker has.
    pub reserved: u64,
    /// Jobs that wait for their time.
    pub delayed: u64,
    /// Jobs that wait for a kick.
    pub buried: u64,
    /// Connections.
    pub connections: usize,
    /// Whether puts are refused.
    pub is_draining: bool,
}

/// The version of C beanstalkd that this server stands in for, as clients parse it.
pub const VERSION: &str = "1.13";

/// A document of `key: value` lines.
struct Yaml(String);

impl Yaml {
    fn new() -> Yaml {
        Yaml("---\n".to_owned())
    }

    fn line(&mut self, key: &str, value: impl Display) -> &mut Yaml {
        writeln!(self.0, "{key}: {value}").expect(STRINGS_TAKE_ALL);
        self
    }

    fn quoted(&mut self, key: &str, value: impl Display) -> &mut Yaml {
        writeln!(self.0, "{key}: \"{value}\"").expect(STRINGS_TAKE_ALL);
        self
    }
}

const STRINGS_TAKE_ALL: &str = "writing to a string cannot fail";

/// The list of the given names.
///
/// # Errors
/// There is no memory for it: there may be very many.
pub fn list<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Result<String, TryReserveError> {
    const HEAD: &str = "---\n";
    let mut text = String::new();
    let lines = names.clone().map(|name| name.len() + "- \n".len());
    let len = HEAD.len() + lines.sum::<usize>();
    headroom::leave(Headroom::ThreeQuarters, || text.try_reserve_exact(len))?;
    text.push_str(HEAD);
    for name in names {
        text.push_str("- ");
        text.push_str(name);
        text.push('\n');
    }
    Ok(text)
}

/// The answer to `stats-job`.
pub fn job(job: &Job, queue: &Queue, now: Nanos) -> String {
    let state = match job.state {
        State::Ready { .. } => "ready",
        State::Delayed { .. } => "delayed",
        State::Reserved { .. } => "reserved",
        State::Buried(_) => "buried",
        State::Moving => unreachable!("between commands every job stands somewhere"),
    };
    let mut yaml = Yaml::new();
    yaml.line("id", job.id)
        .quoted("tube", &queue.tubes[job.tube].name)
        .line("state", state)
        .line("pri", job.pri)
        .line("age", now.since(job.created_at).whole_secs())
        .line("delay", job.delay_secs)
        .line("ttr", job.ttr_secs)
        .line("time-left", queue.due(job).map_or(0, |due| due.secs_left(now)))
        .line("file", queue.file_of(job))
        .line("reserves", job.counts.reserves)
        .line("timeouts", job.counts.timeouts)
        .line("releases", job.counts.releases)
        .line("buries", job.counts.buries)
        .line("kicks", job.counts.kicks);
    yaml.0
}

/// The answer to `stats-tube`. `waiting` is how many of the connections that watch the
/// tube wait.
pub fn tube(tube: &Tube, waiting: usize, now: Nanos) -> String {
    let mut yaml = Yaml::new();
    yaml.quoted("name", &tube.name)
        .line("current-jobs-urgent", tube.urgent)
        .line("current-jobs-ready", tube.ready.len())
        .line("current-jobs-reserved", tube.reserved)
        .line("current-jobs-delayed", tube.delayed.len())
        .line("current-jobs-buried", tube.buried.len())
        .line("total-jobs", tube.total_jobs)
        .line("current-using", tube.using)
        .line("current-watching", tube.watching)
        .line("current-waiting", waiting)
        .line("cmd-delete", tube.deletes)
        .line("cmd-pause-tube", tube.pauses)
        .line("pause", tube.pause.as_ref().map_or(0, |pause| pause.secs))
        .line("pause-time-left", tube.pause.as_ref().map_or(0, |pause| pause.until.secs_left(now)));
    yaml.0
}

/// The answer to `stats`.
pub fn server(server: &ServerStats<'_>, queue: &Queue, now: Nanos) -> String {
    let mut yaml = Yaml::new();
    current_jobs(&mut yaml, &queue.totals);
    commands(&mut yaml, server.commands);
    yaml.line("job-timeouts", queue.totals.timeouts)
        .line("total-jobs", queue.totals.total_jobs)
        .line("max-job-size", server.max_job_size)
        .line("current-tubes", queue.tubes.len())
        .line("current-connections", server.connections)
        .line("current-producers", queue.totals.producers)
        .line("current-workers", queue.totals.workers)
        .line("current-waiting", queue.totals.waiting)
        .line("total-connections", server.total_connections);
    process(&mut yaml, server.facts, now);
    let binlog = queue.binlog_stats();
    yaml.line("binlog-oldest-index", binlog.oldest)
        .line("binlog-current-index", binlog.current)
        .line("binlog-records-migrated", binlog.records_migrated)
        .line("binlog-records-written", binlog.records_written)
        .line("binlog-max-size", server.binlog_file_size)
        .line("draining", server.is_draining)
        .line("id", &server.facts.instance_id)
        .quoted("hostname", &server.facts.hostname)
        .quoted("os", &server.facts.os_version)
        .quoted("platform", &server.facts.platform);
    yaml.0
}

fn current_jobs(yaml: &mut Yaml, totals: &Totals) {
    yaml.line("current-jobs-urgent", totals.urgent)
        .line("current-jobs-ready", totals.ready)
        .line("current-jobs-reserved", totals.reserved)
        .line("current-jobs-delayed", totals.delayed)
        .line("current-jobs-buried", totals.buried);
}

fn commands(yaml: &mut Yaml, counts: &[u64; Counter::COUNT]) {
    for (name, count) in Counter::NAMES.iter().zip(counts) {
        yaml.line(name, count);
    }
}

fn process(yaml: &mut Yaml, facts: &ProcessInfo, now: Nanos) {
    let processor = (facts.processor_time)();
    let seconds = |us: u64| format!("{}.{:06}", us / 1_000_000, us % 1_000_000);
    yaml.line("pid", facts.pid)
        .quoted("version", VERSION)
        .line("rusage-utime", seconds(processor.user_us))
        .line("rusage-stime", seconds(processor.system_us))
        .line("uptime", now.since(facts.started_at).whole_secs());
}

impl fmt::Display for StatusLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StatusLine { ready, reserved, delayed, buried, connections, is_draining } = *self;
        let jobs = ready + reserved + delayed + buried;
        write!(f, "{} {}", grouped(jobs), if jobs == 1 { "job" } else { "jobs" })?;
        let mut before = " (";
        for (count, state) in
            [(ready, "ready"), (reserved, "reserved"), (delayed, "delayed"), (buried, "buried")]
        {
            if count > 0 {
                write!(f, "{before}{} {state}", grouped(count))?;
                before = ", ";
            }
        }
        f.write_str(if jobs > 0 { "), " } else { ", " })?;
        let noun = if connections == 1 { "connection" } else { "connections" };
        write!(f, "{} {noun}", grouped(connections as u64))?;
        f.write_str(if is_draining { ", draining" } else { "" })
    }
}

/// `number` with commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_says_what_there_is() {
        let nothing = StatusLine::default();
        assert_eq!(nothing.to_string(), "0 jobs, 0 connections");
        let one = StatusLine { buried: 1, connections: 1, ..nothing };
        assert_eq!(one.to_string(), "1 job (1 buried), 1 connection");
        let many = StatusLine {
            ready: 1_100,
            reserved: 4,
            delayed: 90,
            buried: 10,
            connections: 12,
            is_draining: true,
        };
        assert_eq!(
            many.to_string(),
            "1,204 jobs (1,100 ready, 4 reserved, 90 delayed, 10 buried), 12 connections, draining"
        );
        let odd = [(0, "0"), (999, "999"), (100_000, "100,000"), (1_234_567, "1,234,567")];
        for (number, text) in odd {
            assert_eq!(grouped(number), text);
        }
    }
}
