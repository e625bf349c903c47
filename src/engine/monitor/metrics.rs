//! The metrics page: the values of `stats` and `stats-tube` and more, in the Prometheus text format
//! 0.0.4. To add a metric of the server or of a tube, add a row to one of the functions `write_...` or to
//! [`TUBE_METRICS`], and its kind and help to `page/metrics.txt`.
//!
//! The number of tubes, jobs and connections is not bounded, so the page is written in slices. The first
//! slices scan connections and tubes, and store the values: samples of one metric are adjacent in the page,
//! and must fit those of the next metric. A limited number of tubes have samples of their own. All other
//! tubes are added up under a name that no tube can have.
//!
//! The counts of one slice are exact. An object that changes between two slices is counted in its
//! old or its new state.

use super::http_conn::{Page, View};
use super::table::Out;
use super::tube_scan::{self, TubeScan, TubeStats};
use crate::engine::collections::histogram::{Histogram, Scale};
use crate::engine::commands::{COMMANDS, Counted};
use crate::engine::conn::Activity;
use crate::engine::headroom::{self, Headroom};
use crate::engine::protocol::stats;
use crate::engine::queue::outcomes::End;
use crate::engine::queue::{Queue, Totals};
use crate::engine::store::Store;
use crate::engine::text::is_unprintable;
use crate::engine::time::Nanos;
use std::fmt::{self, Display, Write};

/// A page that is being written.
pub struct MetricsPage {
    stage: Stage,
    /// The number of connections, by [`Activity`].
    connections: [u64; Activity::NAMES.len()],
    /// In the order of the scan, from the last one to the first: turning a long list would take milliseconds.
    tubes: Vec<TubeStats>,
    /// The sum of all other tubes, until it is the last one of the list.
    rest: TubeStats,
    rest_count: u64,
    /// The number of removed tubes when the scan of the tubes started.
    removed_before: u64,
}

enum Stage {
    /// Counts connections, from this number on.
    Connections(usize),
    /// Scans the tubes, and then writes the metrics of the whole server.
    Tubes(TubeScan),
    /// Writes the samples of [`TUBE_METRICS`], those of all these tubes for each metric, from the next one on.
    Samples { next: usize, tubes: usize },
}

/// The costs of counting a connection, and of writing a metric of a tube, in units of about 10 ns.
const CONNECTION_COST: usize = 8;
const SAMPLES_COST: usize = 8;

/// The number of tubes with histograms of their own, which are half of their samples: so 1,000 tubes with names of
/// 20 bytes fit in 2 MB.
const HISTOGRAM_TUBES: usize = 300;

/// The name of the sum of the other tubes. A tube name has no space.
const OTHER_TUBES: &str = "other tubes";

impl MetricsPage {
    /// Returns a page that is to be written.
    pub fn new() -> MetricsPage {
        MetricsPage {
            stage: Stage::Connections(0),
            connections: [0; Activity::NAMES.len()],
            tubes: Vec::new(),
            rest: TubeStats { name: OTHER_TUBES.to_owned(), ..TubeStats::default() },
            rest_count: 0,
            removed_before: 0,
        }
    }
}

impl Page for MetricsPage {
    fn write_slice(&mut self, view: &View<'_>, out: &mut Out<'_>) -> bool {
        let Queue { tubes, limits, settings, .. } = view.queue;
        match &mut self.stage {
            Stage::Connections(from) => {
                let count = limits.work_per_page_slice.div_ceil(CONNECTION_COST);
                let end = view.conns.numbers_end();
                for conn in (*from..end.min(*from + count)).filter_map(|it| view.conns.conn(it)) {
                    self.connections[conn.activity() as usize] += 1;
                }
                *from += count;
                if *from >= end {
                    self.removed_before = tubes.removed_count;
                    self.stage = Stage::Tubes(TubeScan::default());
                }
            }
            Stage::Tubes(scan) => {
                let is_done = scan.advance(view, |index, mut stats| {
                    if index >= HISTOGRAM_TUBES {
                        self.rest.outcomes.take_times(&mut stats.outcomes);
                    }
                    // Without memory for a larger list, tubes are summed too. The sum needs a place as well.
                    let grow = || self.tubes.try_reserve(2);
                    if settings.metrics_tubes.is_none_or(|most| index >= most)
                        || headroom::keeping(Headroom::ThreeQuarters, grow).is_err()
                    {
                        self.rest.add(&stats);
                        self.rest_count += 1;
                    } else {
                        self.tubes.push(stats);
                    }
                });
                if is_done {
                    if tubes.removed_count != self.removed_before {
                        // Prometheus rejects a page with duplicates.
                        tube_scan::dedup(&mut self.tubes);
                    }
                    self.write_totals(view, &mut Samples::of_server(out.text));
                    if self.rest_count > 0 || self.rest.outcomes.has_times() {
                        self.tubes.push(std::mem::take(&mut self.rest));
                    }
                    // At least one, as there is the tube `default`.
                    self.stage = Stage::Samples { next: 0, tubes: self.tubes.len() };
                }
            }
            &mut Stage::Samples { next, tubes } => {
                return self.write_samples(view, next, tubes, out.text);
            }
        }
        false
    }
}

impl MetricsPage {
    /// Writes samples from the next one on, for this number of tubes. Returns whether the page is complete.
    fn write_samples(
        &mut self,
        view: &View<'_>,
        mut next: usize,
        tubes: usize,
        text: &mut String,
    ) -> bool {
        let limits = &view.queue.limits;
        let has_cache = view.queue.settings.body_cache_bytes.is_some();
        let metrics = &TUBE_METRICS[..TUBE_METRICS.len() - usize::from(!has_cache)];
        let end = metrics.len() * tubes;
        // Some metrics of a tube have no sample, and so no text.
        let most = next + limits.work_per_page_slice.div_ceil(SAMPLES_COST);
        while next < end.min(most) && text.len() < limits.metrics_per_page_slice_bytes {
            let (tube, (name, write)) = (next % tubes, metrics[next / tubes]);
            let mut to = Samples { text: &mut *text, family: name, tube: None };
            if tube == 0 {
                to.family(name);
            }
            let stats = &self.tubes[tubes - 1 - tube];
            to.tube = Some(&stats.name);
            write(stats, &mut to);
            // After its last sample a tube is freed: to free all at once would take milliseconds.
            if next + tubes >= end {
                self.tubes.pop();
            }
            next += 1;
        }
        self.stage = Stage::Samples { next, tubes };
        // The page is done with its last sample, so that no empty slice follows.
        next == end
    }

    fn write_totals(&self, view: &View<'_>, to: &mut Samples<'_>) {
        let View { server, queue, .. } = *view;
        write_process(server, to);
        self.write_clients(server, to);
        write_jobs(queue, to);
        to.one("beanstalkd_tubes", queue.tubes.len());
        to.one("beanstalkd_tubes_aggregated", self.rest_count);
        to.family("beanstalkd_loop_iteration_seconds").histogram(&view.measurements.iterations);
        write_binlog(queue, to);
        write_body_cache(queue, to);
    }

    fn write_clients(&self, server: &Store, to: &mut Samples<'_>) {
        let connections = to.family("beanstalkd_connections");
        for (activity, count) in Activity::NAMES.into_iter().zip(self.connections) {
            connections.with("state", activity, count);
        }
        to.one("beanstalkd_connections_opened_total", server.total_connections);
        let totals = &server.queue.totals;
        to.one("beanstalkd_producers", totals.producers);
        to.one("beanstalkd_workers", totals.workers);
        let commands = to.family("beanstalkd_commands_total");
        let counted = COMMANDS.iter().zip(&server.commands);
        for (command, count) in counted.filter(|(row, _)| row.counted != Counted::Nowhere) {
            commands.with("command", command.name(), count);
        }
    }
}

// ---- Metrics of the whole server ----

fn write_process(server: &Store, to: &mut Samples<'_>) {
    let info = &server.process;
    let (own, protocol) = (env!("CARGO_PKG_VERSION"), stats::VERSION);
    let labels = format_args!("version=\"{own}\",protocol=\"{protocol}\"");
    to.family("beanstalkd_build_info").sample("", labels, 1);
    let labels = format_args!(
        "id=\"{}\",pid=\"{}\",hostname=\"{}\",os=\"{}\",platform=\"{}\"",
        label(&info.instance_id),
        info.pid,
        label(&info.hostname),
        label(&info.os_version),
        label(&info.platform)
    );
    to.family("beanstalkd_instance_info").sample("", labels, 1);
    to.one("process_start_time_seconds", seconds(info.started_at));
    let time = (info.processor_time)();
    let [user, system] = [time.user_us, time.system_us].map(|us| Nanos::from_nanos(us * 1_000));
    to.one("process_cpu_seconds_total", seconds(user + system));
    let processor = to.family("beanstalkd_cpu_seconds_total");
    processor.with("mode", "user", seconds(user));
    processor.with("mode", "system", seconds(system));
    if let Some(bytes) = (info.resident_bytes)() {
        to.one("process_resident_memory_bytes", bytes);
    }
    to.one("beanstalkd_draining", u8::from(server.is_draining));
}

fn write_jobs(queue: &Queue, to: &mut Samples<'_>) {
    let Queue { totals, settings, .. } = queue;
    let Totals { ready, reserved, delayed, buried, .. } = *totals;
    to.family("beanstalkd_jobs").states([ready, reserved, delayed, buried]);
    to.one("beanstalkd_urgent_jobs", totals.urgent);
    to.one("beanstalkd_jobs_created_total", totals.total_jobs);
    to.one("beanstalkd_unique_hits_total", queue.unique.hits);
    let (jobs, kept) = queue.unique.counts();
    let keys = to.family("beanstalkd_unique_keys");
    keys.with("state", "job", jobs);
    keys.with("state", "kept", kept);
    to.one("beanstalkd_blocked_jobs", queue.unique.groups.blocked);
    to.one("beanstalkd_job_timeouts_total", totals.timeouts);
    to.one("beanstalkd_job_memory_bytes", queue.job_bytes());
    if let Some(limit) = settings.max_memory() {
        to.one("beanstalkd_job_memory_limit_bytes", limit);
    }
    to.one("beanstalkd_job_size_limit_bytes", settings.max_job_size);
}

/// The page of a server that stands by.
pub fn standby_metrics(leader: Option<&str>) -> String {
    let mut text = String::new();
    let mut to = Samples::of_server(&mut text);
    to.one("beanstalkd_leading", 0_u8);
    if let Some(leader) = leader {
        let labels = format_args!("leader=\"{}\"", label(leader));
        to.family("beanstalkd_leader_info").sample("", labels, 1);
    }
    text
}

fn write_binlog(queue: &Queue, to: &mut Samples<'_>) {
    let Some(binlog) = &queue.binlog else { return };
    to.one("beanstalkd_binlog_files", binlog.files.list.len());
    to.one("beanstalkd_binlog_oldest_file_number", binlog.files.oldest_number());
    to.one("beanstalkd_binlog_current_file_number", binlog.files.current().number);
    to.one("beanstalkd_binlog_file_size_bytes", queue.settings.binlog_file_size);
    to.one("beanstalkd_binlog_disk_bytes", binlog.files.sums.disk_bytes);
    to.one("beanstalkd_binlog_live_bytes", binlog.files.live_bytes);
    to.one("beanstalkd_binlog_dead_bytes", binlog.dead_bytes());
    to.one("beanstalkd_binlog_full", u8::from(binlog.refuses_puts()));
    to.one("beanstalkd_binlog_records_written_total", binlog.records_written);
    to.one("beanstalkd_binlog_records_migrated_total", binlog.records_migrated);
    to.family("beanstalkd_binlog_sync_seconds").histogram(&binlog.disk.sync_times());
    if let Some((remote, progress)) = binlog.disk.remote_stats().zip(binlog.progress()) {
        to.one("beanstalkd_leading", 1_u8);
        to.one("beanstalkd_lease_seconds", seconds(remote.lease_left));
        to.family("beanstalkd_etcd_transaction_seconds").histogram(&remote.transactions);
        to.one("beanstalkd_etcd_written_bytes_total", binlog.disk.stored_bytes());
        to.one("beanstalkd_etcd_unacknowledged_bytes", progress.waiting_bytes);
        to.one("beanstalkd_etcd_waiting_seconds", seconds(progress.waiting_for));
    }
}

fn write_body_cache(queue: &Queue, to: &mut Samples<'_>) {
    let cache = &queue.body_cache;
    let Some(limit) = queue.settings.body_cache_bytes else { return };
    let (cold, stats) = (cache.cold, &cache.stats);
    to.one("beanstalkd_body_cache_bytes", cache.warm_bytes);
    to.one("beanstalkd_body_cache_limit_bytes", limit);
    to.one("beanstalkd_cold_jobs", cold.jobs);
    to.one("beanstalkd_cold_body_bytes", cold.bytes);
    to.one("beanstalkd_body_reads_total", stats.reads);
    to.family("beanstalkd_body_wait_seconds").histogram(&stats.wait_times);
    to.one("beanstalkd_body_read_failures_total", stats.failures);
}

// ---- Metrics of each tube ----

/// Writes the samples of one tube.
type WriteSamples = fn(&TubeStats, &mut Samples<'_>);

/// The last one is written only with a body cache.
const TUBE_METRICS: [(&str, WriteSamples); 17] = [
    ("beanstalkd_tube_jobs", |tube, to| {
        to.states([tube.facts.ready, tube.facts.held, tube.delayed, tube.facts.buried])
    }),
    ("beanstalkd_tube_urgent_jobs", |tube, to| to.only(tube.urgent)),
    ("beanstalkd_tube_oldest_ready_job_age_seconds", |tube, to| {
        to.only(seconds(tube.oldest_ready_age));
    }),
    ("beanstalkd_tube_jobs_created_total", |tube, to| to.only(tube.total_jobs)),
    ("beanstalkd_tube_deletes_total", |tube, to| to.only(tube.deletes)),
    ("beanstalkd_tube_using", |tube, to| to.only(tube.using)),
    ("beanstalkd_tube_watching", |tube, to| to.only(tube.facts.watching)),
    ("beanstalkd_tube_waiting", |tube, to| to.only(tube.facts.waiting)),
    ("beanstalkd_tube_pauses_total", |tube, to| to.only(tube.pauses)),
    ("beanstalkd_tube_buried_after_returns_total", |tube, to| to.only(tube.buried_after_returns)),
    ("beanstalkd_tube_pause_seconds", |tube, to| to.only(seconds(tube.pause))),
    ("beanstalkd_tube_pause_left_seconds", |tube, to| to.only(seconds(tube.facts.pause_left))),
    ("beanstalkd_tube_job_wait_seconds", |tube, to| to.histogram(&tube.outcomes.waits)),
    ("beanstalkd_tube_job_run_seconds", |tube, to| to.histogram(&tube.outcomes.runs)),
    ("beanstalkd_tube_reservations_ended_total", |tube, to| {
        let ends = End::NAMES.into_iter().zip(tube.outcomes.ended);
        for (how, count) in ends.filter(|_| tube.outcomes.ends().0 > 0) {
            to.with("how", how, count);
        }
    }),
    ("beanstalkd_tube_kicks_total", |tube, to| {
        if tube.outcomes.kicks > 0 {
            to.only(tube.outcomes.kicks);
        }
    }),
    ("beanstalkd_tube_cold_jobs", |tube, to| to.only(tube.cold)),
];

// ---- The text format ----

/// Each metric on a line: its name, its kind and its help.
const METRICS: &str = include_str!("page/metrics.txt");

/// The text of a page, with the family of metrics that is being written.
struct Samples<'a> {
    text: &'a mut String,
    family: &'static str,
    /// The tube of the next samples; `None` means the whole server.
    tube: Option<&'a str>,
}

impl Samples<'_> {
    fn of_server(text: &mut String) -> Samples<'_> {
        Samples { text, family: "", tube: None }
    }

    /// Begins a family: writes its head, which is in [`METRICS`].
    fn family(&mut self, name: &'static str) -> &mut Self {
        let about = METRICS.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let (kind, help) = about.and_then(|about| about.split_once(' ')).unwrap_or_default();
        self.push(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
        self.family = name;
        self
    }

    /// Writes a family with one sample.
    fn one(&mut self, name: &'static str, value: impl Display) {
        self.family(name).only(value);
    }

    /// Writes the only sample of the server or the tube.
    fn only(&mut self, value: impl Display) {
        self.sample("", format_args!(""), value);
    }

    /// Writes a sample with a label.
    fn with(&mut self, label: &str, label_value: &str, value: impl Display) {
        self.sample("", format_args!("{label}=\"{label_value}\""), value);
    }

    /// Writes a histogram; of a tube only if it has a count.
    fn histogram<S: Scale>(&mut self, histogram: &Histogram<S>) {
        let total = histogram.total();
        if total == 0 && self.tube.is_some() {
            return;
        }
        for (bound, count) in histogram.cumulative() {
            self.sample("_bucket", format_args!("le=\"{bound}\""), count);
        }
        self.sample("_sum", format_args!(""), seconds(histogram.sum()));
        self.sample("_count", format_args!(""), total);
    }

    /// Writes the numbers of ready, reserved, delayed and buried jobs.
    fn states(&mut self, counts: [u64; 4]) {
        for (state, count) in ["ready", "reserved", "delayed", "buried"].iter().zip(counts) {
            self.with("state", state, count);
        }
    }

    /// Writes a sample whose name is that of the family with a suffix. The label of the tube comes before the
    /// others.
    fn sample(&mut self, suffix: &str, labels: fmt::Arguments<'_>, value: impl Display) {
        let family = self.family;
        self.push(format_args!("{family}{suffix}"));
        // A tube name has no character that needs an escape.
        match (self.tube, labels.as_str()) {
            (None, Some("")) => {}
            (None, _) => self.push(format_args!("{{{labels}}}")),
            (Some(tube), Some("")) => self.push(format_args!("{{tube=\"{tube}\"}}")),
            (Some(tube), _) => self.push(format_args!("{{tube=\"{tube}\",{labels}}}")),
        }
        self.push(format_args!(" {value}\n"));
    }

    fn push(&mut self, arguments: fmt::Arguments<'_>) {
        self.text.write_fmt(arguments).expect("writing to a string cannot fail");
    }
}

/// Returns text as the value of a label. The format has no escapes for characters that a terminal may interpret.
fn label(text: &str) -> String {
    text.replace(is_unprintable, "\u{fffd}").replace('\\', r"\\").replace('"', "\\\"")
}

/// Returns a time or duration in seconds. Code for floating point numbers would be a hundredth of the static binary.
fn seconds(time: Nanos) -> String {
    let exact = format!("{}.{:09}", time.whole_secs(), time.as_nanos() % 1_000_000_000);
    exact.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_metric_has_a_kind_and_a_help() {
        let names = METRICS.lines().map(|line| line.split_once(' ').unwrap_or_default().0);
        let listed: std::collections::BTreeSet<&str> = names.collect();
        let code = include_str!("metrics.rs").split('"');
        let is_name = |text: &&str| {
            (text.starts_with("beanstalkd_") || text.starts_with("process_"))
                && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        };
        let used: std::collections::BTreeSet<&str> =
            code.filter(is_name).filter(|name| !name.ends_with('_')).collect();
        assert_eq!(listed, used);
        let kinds = ["counter", "gauge", "histogram"];
        assert!(METRICS.lines().all(|line| {
            let mut words = line.splitn(3, ' ').skip(1);
            words.next().is_some_and(|kind| kinds.contains(&kind)) && words.next().is_some()
        }));
    }

    #[test]
    fn labels_have_no_escape_that_prometheus_lacks() {
        let text = standby_metrics(Some("a\"b\\c\td\ne\u{9b}"));
        let sample = "beanstalkd_leader_info{leader=\"a\\\"b\\\\c\u{fffd}d\u{fffd}e\u{fffd}\"} 1\n";
        assert!(text.ends_with(sample), "{text}");
    }

    #[test]
    fn times_are_in_seconds() {
        let times = [(0, "0"), (3_000_000_000, "3"), (1_500_000_000, "1.5"), (7, "0.000000007")];
        for (nanos, text) in times {
            assert_eq!(seconds(Nanos::from_nanos(nanos)).to_string(), text);
        }
    }
}
