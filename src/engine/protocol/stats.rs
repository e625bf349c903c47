//! Writes the YAML documents of `stats`, `stats-job`, `stats-tube` and the lists.
//!
//! Keys, order and quotes of the lines are part of the protocol, since clients compare whole
//! documents. beanstalkd-protocol(7) describes each line. Counting is done elsewhere.

use crate::engine::commands::{COMMANDS, Counted};
use crate::engine::conn::Conn;
use crate::engine::headroom::{self, Headroom, NoMemory};
use crate::engine::keys::JobKey;
use crate::engine::queue::Queue;
use crate::engine::queue::job::{Holder, Job, ReservedEntry, State};
use crate::engine::queue::tube::Tube;
use crate::engine::store::Store;
use crate::engine::text::{self, CountOf, Grouped};
use crate::engine::time::Nanos;
use std::fmt::{self, Display, Write};
use std::net::SocketAddr;

/// Properties of the process and its host, for `stats`.
#[derive(Clone, Debug)]
pub struct ProcessInfo {
    /// The process id.
    pub pid: u32,
    /// 16 random hex digits, chosen at each start.
    pub instance_id: String,
    /// The host name.
    pub hostname: String,
    /// The version of the operating system, from uname.
    pub os_version: String,
    /// The hardware platform, from uname.
    pub platform: String,
    /// The start time of the server.
    pub started_at: Nanos,
    /// The argument of `-s` with which `beanstalkctl` finds the server; `None` if it needs none.
    pub tool_server: Option<String>,
    /// The limit of connections, if there is one.
    pub max_connections: Option<usize>,
    /// Returns the processor time of the process.
    pub processor_time: fn() -> ProcessorTime,
    /// Returns the resident memory of the process in bytes, if the system reports it.
    pub resident_bytes: fn() -> Option<u64>,
    /// Returns whether at least this part of the headroom is left.
    pub has_headroom: fn(Headroom) -> bool,
}

/// Processor time, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessorTime {
    /// In user mode.
    pub user_us: u64,
    /// In the kernel.
    pub system_us: u64,
}

/// A summary of the queue for the service manager; displays as one line of text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusLine {
    /// Ready jobs.
    pub ready: u64,
    /// Reserved jobs.
    pub reserved: u64,
    /// Delayed jobs.
    pub delayed: u64,
    /// Buried jobs.
    pub buried: u64,
    /// Open connections.
    pub connections: usize,
    /// True while puts are rejected with `DRAINING`.
    pub is_draining: bool,
}

/// The version of C beanstalkd that this server replaces. Clients parse it.
pub const VERSION: &str = "1.13";

/// A document of `key: value` lines.
struct Yaml(String);

impl Yaml {
    fn new() -> Yaml {
        Yaml("---\n".to_owned())
    }

    fn line(&mut self, key: impl Display, value: impl Display) -> &mut Yaml {
        writeln!(self.0, "{key}: {value}").expect(STRING_WRITE);
        self
    }

    fn quoted(&mut self, key: &str, value: impl Display) -> &mut Yaml {
        writeln!(self.0, "{key}: \"{value}\"").expect(STRING_WRITE);
        self
    }
}

const STRING_WRITE: &str = "writing to a string cannot fail";

/// Returns a YAML list of `names`, whose number is not bounded.
pub fn list<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Result<String, NoMemory> {
    const HEAD: &str = "---\n";
    let mut text = String::new();
    let lines = names.clone().map(|name| name.len() + "- \n".len());
    let len = HEAD.len() + lines.sum::<usize>();
    headroom::keeping(Headroom::ThreeQuarters, || text.try_reserve_exact(len))?;
    text.push_str(HEAD);
    for name in names {
        text.push_str("- ");
        text.push_str(name);
        text.push('\n');
    }
    Ok(text)
}

/// Returns the document of `list-jobs`. `next` is the id after which the next page begins, or 0. `entry_of`
/// returns the entry of a reserved job.
pub fn jobs(
    keys: &[JobKey],
    next: u64,
    queue: &Queue,
    entry_of: impl Fn(Holder) -> ReservedEntry,
) -> Result<String, NoMemory> {
    let mut text = begin_page("jobs", next, keys.is_empty(), longest_jobs_len(keys.len()))?;
    for &key in keys {
        let job = &queue.jobs[key];
        push_job_line(&mut text, job, queue);
        if let State::Reserved(holder) = job.state {
            text.push_str(", client: ");
            text::push_decimal(&mut text, holder.by.id());
            text.push_str(", held: ");
            text::push_decimal(
                &mut text,
                queue.now.since(entry_of(holder).reserved_at).whole_secs(),
            );
        }
        text.push_str("}\n");
    }
    Ok(text)
}

/// Returns the document of `list-clients` with these lines.
pub fn clients(lines: &str, next: u64) -> Result<String, NoMemory> {
    let mut text = begin_page("clients", next, lines.is_empty(), longest_page_len(lines.len()))?;
    text.push_str(lines);
    Ok(text)
}

/// Returns the lines before those of a page, in a text with memory for `len` bytes.
fn begin_page(name: &str, next: u64, is_empty: bool, len: usize) -> Result<String, NoMemory> {
    let mut text = String::new();
    headroom::keeping(Headroom::Quarter, || text.try_reserve_exact(len))?;
    let end = if is_empty { " []\n" } else { "\n" };
    write!(text, "---\nnext: {next}\n{name}:{end}").expect(STRING_WRITE);
    Ok(text)
}

/// Appends the line of `list-clients` with a client.
pub fn push_client_line(text: &mut String, c: &Conn, queue: &Queue) -> Result<(), NoMemory> {
    headroom::keeping(Headroom::Quarter, || text.try_reserve(LONGEST_CLIENT_LINE))?;
    let (id, activity, age) =
        (c.id(), c.activity().name(), queue.now.since(c.opened_at).whole_secs());
    let (reserved, watching) = (c.client.held.len(), c.client.watching.len());
    let using = &queue.tubes[c.client.used].name;
    writeln!(
        text,
        "- {{id: {id}, address: \"{}\", age: {age}, activity: {activity}, reserved: {reserved}, watching: {watching}, \
         using: \"{using}\"}}",
        address(c)
    )
    .expect(STRING_WRITE);
    Ok(())
}

/// Returns the address of a client as text. A client of IPv4 may come through a socket of IPv6.
pub fn address(c: &Conn) -> impl Display {
    fmt::from_fn(|f| match c.address {
        Some((ip, port)) => write!(f, "{}", SocketAddr::new(ip.to_canonical(), port)),
        None => f.write_str("unix"),
    })
}

/// The maximum length of such a line, in bytes.
const LONGEST_CLIENT_LINE: usize = 448;

/// The maximum length of a line of `list-jobs` with a job, in bytes.
const LONGEST_JOB_LINE: usize = 352;
/// The maximum length of the lines before those of a page, in bytes.
const LONGEST_HEAD: usize = 64;

/// Returns the maximum length of the document of `list-jobs` with `count` jobs, in bytes.
pub fn longest_jobs_len(count: usize) -> usize {
    longest_page_len(count * LONGEST_JOB_LINE)
}

/// Returns the maximum length of a page with lines of `len` bytes.
pub fn longest_page_len(len: usize) -> usize {
    LONGEST_HEAD + len
}

/// Appends the line of a job, without its end. A reply has up to 1,000 lines, so they are not formatted by `write!`,
/// which takes three times as long.
fn push_job_line(text: &mut String, job: &Job, queue: &Queue) {
    let [reserves, timeouts, releases, buries, kicks] = queue.counts(job);
    text.push_str("- {id: ");
    text::push_decimal(text, job.id);
    text.push_str(", state: ");
    text.push_str(job.state.shown().name());
    for (name, number) in [
        (", pri: ", job.pri.into()),
        (", age: ", queue.now.since(job.created_at).whole_secs()),
        (", delay: ", job.delay_secs.into()),
        (", ttr: ", job.ttr_secs.into()),
        (", time-left: ", queue.time_left(job).whole_secs()),
        (", bytes: ", job.body.content_len().into()),
        (", reserves: ", reserves.into()),
        (", timeouts: ", timeouts.into()),
        (", releases: ", releases.into()),
        (", buries: ", buries.into()),
        (", kicks: ", kicks.into()),
    ] {
        text.push_str(name);
        text::push_decimal(text, number);
    }
}

/// Returns the document of `stats-job`.
pub fn job(key: JobKey, queue: &Queue) -> String {
    let job = &queue.jobs[key];
    let [reserves, timeouts, releases, buries, kicks] = queue.counts(job);
    let mut yaml = Yaml::new();
    yaml.line("id", job.id)
        .quoted("tube", &queue.tubes[job.tube].name)
        .line("state", job.state.shown().name())
        .line("pri", job.pri)
        .line("age", queue.now.since(job.created_at).whole_secs())
        .line("delay", job.delay_secs)
        .line("ttr", job.ttr_secs)
        .line("time-left", queue.time_left(job).whole_secs())
        .line("file", queue.binlog.as_ref().map_or(0, |binlog| binlog.file_of(key)))
        .line("reserves", reserves)
        .line("timeouts", timeouts)
        .line("releases", releases)
        .line("buries", buries)
        .line("kicks", kicks);
    yaml.0
}

/// Returns the document of `stats-tube`. `waiting` is the number of waiting connections that watch
/// the tube.
pub fn tube(tube: &Tube, waiting: usize, now: Nanos) -> String {
    let mut yaml = Yaml::new();
    yaml.quoted("name", &tube.name)
        .line("current-jobs-urgent", tube.jobs.urgent)
        .line("current-jobs-ready", tube.jobs.ready_count())
        .line("current-jobs-reserved", tube.jobs.reserved)
        .line("current-jobs-delayed", tube.jobs.delayed.len())
        .line("current-jobs-buried", tube.jobs.buried.len())
        .line("total-jobs", tube.total_jobs)
        .line("current-using", tube.using)
        .line("current-watching", tube.watching)
        .line("current-waiting", waiting)
        .line("cmd-delete", tube.deletes)
        .line("cmd-pause-tube", tube.pauses)
        .line("pause", tube.pause.as_ref().map_or(0, |pause| pause.secs))
        .line(
            "pause-time-left",
            tube.pause.as_ref().map_or(0, |pause| pause.until.since(now).whole_secs()),
        );
    yaml.0
}

/// Returns the document of `stats`.
pub fn server(store: &Store) -> String {
    let Store { queue, process, .. } = store;
    let totals = &queue.totals;
    let processor = (process.processor_time)();
    let seconds = |us: u64| format!("{}.{:06}", us / 1_000_000, us % 1_000_000);
    let mut yaml = Yaml::new();
    yaml.line("current-jobs-urgent", totals.urgent)
        .line("current-jobs-ready", totals.ready)
        .line("current-jobs-reserved", totals.reserved)
        .line("current-jobs-delayed", totals.delayed)
        .line("current-jobs-buried", totals.buried);
    for (command, count) in COMMANDS.iter().zip(&store.commands) {
        if command.counted == Counted::InStats {
            yaml.line(format_args!("cmd-{}", command.name()), count);
        }
    }
    yaml.line("job-timeouts", totals.timeouts)
        .line("total-jobs", totals.total_jobs)
        .line("max-job-size", queue.settings.max_job_size)
        .line("current-tubes", queue.tubes.len())
        .line("current-connections", store.connections)
        .line("current-producers", totals.producers)
        .line("current-workers", totals.workers)
        .line("current-waiting", totals.waiting)
        .line("total-connections", store.total_connections)
        .line("pid", process.pid)
        .quoted("version", VERSION)
        .line("rusage-utime", seconds(processor.user_us))
        .line("rusage-stime", seconds(processor.system_us))
        .line("uptime", queue.now.since(process.started_at).whole_secs());
    let binlog = queue.binlog.as_ref();
    yaml.line("binlog-oldest-index", binlog.map_or(0, |it| it.files.oldest_number()))
        .line("binlog-current-index", binlog.map_or(0, |it| it.files.current().number))
        .line("binlog-records-migrated", binlog.map_or(0, |it| it.records_migrated))
        .line("binlog-records-written", binlog.map_or(0, |it| it.records_written))
        .line("binlog-max-size", queue.settings.binlog_file_size)
        .line("draining", store.is_draining)
        .line("id", &process.instance_id)
        .quoted("hostname", &process.hostname)
        .quoted("os", &process.os_version)
        .quoted("platform", &process.platform);
    yaml.0
}

impl fmt::Display for StatusLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StatusLine { ready, reserved, delayed, buried, connections, is_draining } = *self;
        let jobs = ready + reserved + delayed + buried;
        CountOf(jobs, "job").fmt(f)?;
        let mut before = " (";
        for (count, state) in
            [(ready, "ready"), (reserved, "reserved"), (delayed, "delayed"), (buried, "buried")]
        {
            if count > 0 {
                write!(f, "{before}{} {state}", Grouped(count))?;
                before = ", ";
            }
        }
        f.write_str(if jobs > 0 { "), " } else { ", " })?;
        CountOf(connections as u64, "connection").fmt(f)?;
        f.write_str(if is_draining { ", draining" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_line_lists_jobs_by_state_and_connections() {
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
        let numbers = [(0, "0"), (999, "999"), (100_000, "100,000"), (1_234_567, "1,234,567")];
        for (number, text) in numbers {
            assert_eq!(Grouped(number).to_string(), text);
        }
    }
}
