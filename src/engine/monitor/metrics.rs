//! The metrics page: the values of `stats` and `stats-tube` and more, in the Prometheus text format
//! 0.0.4.
//!
//! The number of tubes, jobs and connections is not bounded, so the page is written in slices: at
//! most one in each loop iteration. The first slices scan connections and tubes, and store the
//! values: samples of one metric are adjacent in the page, and must fit those of the next metric. A
//! limited number of tubes have samples of their own. All other tubes are added up under a name
//! that no tube can have.
//!
//! The counts of one slice are exact. An object that changes between two slices is counted in its
//! old or its new state. In a tube with more than 8192 ready jobs, the search for the oldest job
//! may miss a job that moves between two slices.

use super::tube_scan::{ScanStep, TubeScan, TubeStats};
use crate::engine::binlog::disk::RemoteStats;
use crate::engine::collections::histogram::Histogram;
use crate::engine::conn::Activity;
use crate::engine::headroom::{self, Headroom};
use crate::engine::protocol::command::Counter;
use crate::engine::protocol::stats::{self, ServerStats};
use crate::engine::queue::Queue;
use crate::engine::server::View;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::fmt::{self, Display, Write};

/// A page that is being written.
#[derive(Debug)]
pub struct Page {
    stage: Stage,
    /// The maximum number of tubes with samples of their own.
    tubes_max: usize,
    /// The number of connections, by [`Activity`].
    connections: [u64; Activity::ALL.len()],
    tubes: Vec<TubeStats>,
    /// The sum of all other tubes.
    rest: TubeStats,
    rest_count: u64,
    /// The number of removed tubes when the scan of the tubes started.
    removed_before: u64,
    /// The number of metrics of [`TUBE_METRICS`] that the page has.
    tube_metrics: usize,
}

#[derive(Debug)]
enum Stage {
    /// Counts connections, from this number on.
    Connections {
        from: usize,
    },
    /// Scans the tubes.
    Tubes(TubeScan),
    /// Writes the metrics of the whole server.
    Counters,
    /// Writes the samples of a metric of [`TUBE_METRICS`], from the tube with this index on.
    TubeMetrics {
        metric: usize,
        tube: usize,
    },
    Done,
}

/// Counting a connection costs as much as scanning this many ready jobs.
const CONNECTION_COST: usize = 8;

/// The maximum length of the samples of one tube in one metric, in bytes.
pub const LONGEST_SAMPLE: usize = 4096;

/// The name of the sum of the other tubes. A tube name has no space.
const OTHER_TUBES: &str = "other tubes";

impl Page {
    /// Returns a page on which at most `tubes_max` tubes have samples of their own.
    pub fn new(tubes_max: usize) -> Page {
        Page {
            stage: Stage::Connections { from: 0 },
            tubes_max,
            connections: [0; Activity::ALL.len()],
            tubes: Vec::new(),
            rest: TubeStats { name: OTHER_TUBES.to_owned(), ..TubeStats::default() },
            rest_count: 0,
            removed_before: 0,
            tube_metrics: TUBE_METRICS.len(),
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
        text: &mut String,
    ) -> Result<(), TryReserveError> {
        match &mut self.stage {
            Stage::Connections { from } => {
                let count = view.queue.limits.jobs_per_page_slice.div_ceil(CONNECTION_COST);
                for conn in view.conns.numbered(*from..*from + count) {
                    self.connections[conn.activity() as usize] += 1;
                }
                *from += count;
                if *from >= view.conns.numbers_end() {
                    self.removed_before = view.queue.tubes.removed_count();
                    self.stage = Stage::Tubes(TubeScan::new(&view.queue.tubes));
                }
            }
            Stage::Tubes(_) => self.scan_tubes(view)?,
            Stage::Counters => {
                self.write_totals(view, &mut Text(text));
                let has_cache = view.queue.body_cache.limit.is_some();
                self.tube_metrics = TUBE_METRICS.len() - usize::from(!has_cache);
                self.stage = Stage::TubeMetrics { metric: 0, tube: 0 };
            }
            Stage::TubeMetrics { .. } => {
                let most = view.queue.limits.metrics_per_page_slice_bytes;
                while text.len() < most && self.write_tube_metric(text) {}
            }
            Stage::Done => {}
        }
        Ok(())
    }

    // ---- Scanning ----

    /// Scans tubes until the budget of the slice is used up, or all were scanned.
    fn scan_tubes(&mut self, view: &View<'_>) -> Result<(), TryReserveError> {
        let tubes = &view.queue.tubes;
        let mut budget = view.queue.limits.jobs_per_page_slice;
        loop {
            let Stage::Tubes(scan) = &mut self.stage else { return Ok(()) };
            match scan.step(view, &mut budget, |_| true) {
                ScanStep::Tube { index, key, stats } => {
                    self.add_tube(index, &tubes[key].name, stats)?;
                }
                ScanStep::Unfinished => return Ok(()),
                ScanStep::Done => {
                    self.tubes.reverse();
                    self.dedup_tubes(tubes.removed_count());
                    self.stage = Stage::Counters;
                }
            }
        }
    }

    /// Stores the values of a tube, or adds them to those of the other tubes.
    fn add_tube(
        &mut self,
        index: usize,
        name: &str,
        mut stats: TubeStats,
    ) -> Result<(), TryReserveError> {
        if index >= self.tubes_max {
            self.rest.add(stats);
            self.rest_count += 1;
            return Ok(());
        }
        headroom::leave(Headroom::ThreeQuarters, || {
            self.tubes.try_reserve(1)?;
            stats.name.try_reserve_exact(name.len())
        })?;
        stats.name.push_str(name);
        self.tubes.push(stats);
        Ok(())
    }

    /// Removes duplicates: Prometheus rejects a page with them. A tube that moved to a lower index
    /// during the scan was scanned twice.
    fn dedup_tubes(&mut self, removed_count: u64) {
        if removed_count != self.removed_before {
            self.tubes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            self.tubes.dedup_by(|a, b| a.name == b.name);
        }
    }

    // ---- Writing ----

    /// Writes the samples of one tube in the current metric. Returns false after the last ones.
    fn write_tube_metric(&mut self, text: &mut String) -> bool {
        let Stage::TubeMetrics { metric: number, tube: index } = &mut self.stage else {
            return false;
        };
        let metric = &TUBE_METRICS[*number];
        if *index == 0 {
            Text(text).family(metric.name, metric.kind, metric.help);
        }
        let rest = (self.rest_count > 0).then_some(&self.rest);
        if let Some(tube) = self.tubes.iter().chain(rest).nth(*index) {
            let tube_name = Some(&*tube.name);
            (metric.write)(tube, &mut Family { name: metric.name, tube_name, text });
        }
        *index += 1;
        if *index >= self.tubes.len() + rest.iter().len() {
            (*number, *index) = (*number + 1, 0);
        }
        // The page is done with its last sample, so that no empty slice follows.
        if *number == self.tube_metrics {
            self.stage = Stage::Done;
        }
        !self.is_done()
    }

    fn write_totals(&self, view: &View<'_>, text: &mut Text<'_>) {
        let View { ref server, queue, iterations, .. } = *view;
        write_process(server, text);
        self.write_clients(server, queue, text);
        write_jobs(server, queue, text);
        text.gauge("beanstalkd_tubes", "Tubes.", queue.tubes.len());
        let help = "Tubes without samples of their own, which are added up as \"other tubes\".";
        text.gauge("beanstalkd_tubes_told_together", help, self.rest_count);
        let help = "Duration of event loop iterations, without waiting.";
        text.histogram("beanstalkd_turn_seconds", help, iterations);
        write_binlog(server, queue, text);
        write_body_cache(queue, text);
    }

    fn write_clients(&self, server: &ServerStats<'_>, queue: &Queue, text: &mut Text<'_>) {
        let help = "Open client connections, by state.";
        let mut connections = text.family("beanstalkd_connections", GAUGE, help);
        for (activity, count) in Activity::ALL.into_iter().zip(self.connections) {
            connections.with("state", activity.name(), count);
        }
        let help = "Accepted client connections.";
        text.counter("beanstalkd_connections_opened_total", help, server.total_connections);
        let help = "Open connections that have put a job.";
        text.gauge("beanstalkd_producers", help, queue.totals.producers);
        let help = "Open connections that have reserved a job.";
        text.gauge("beanstalkd_workers", help, queue.totals.workers);
        let mut commands =
            text.family("beanstalkd_commands_total", COUNTER, "Received commands, by name.");
        for (name, count) in Counter::NAMES.iter().zip(server.commands) {
            commands.with("command", name, count);
        }
    }
}

// ---- Metrics of the whole server ----

fn write_process(server: &ServerStats<'_>, text: &mut Text<'_>) {
    let info = server.process;
    let help = "Version of the server, and of C beanstalkd that it replaces; always 1.";
    let (own, protocol) = (env!("CARGO_PKG_VERSION"), stats::VERSION);
    text.family("beanstalkd_build_info", GAUGE, help)
        .labelled(format_args!("version=\"{own}\",protocol=\"{protocol}\""), 1);
    let help = "Process and host, as in stats; always 1.";
    let labels = format_args!(
        "id=\"{}\",pid=\"{}\",hostname=\"{}\",os=\"{}\",platform=\"{}\"",
        Label(&info.instance_id),
        info.pid,
        Label(&info.hostname),
        Label(&info.os_version),
        Label(&info.platform)
    );
    text.family("beanstalkd_instance_info", GAUGE, help).labelled(labels, 1);
    let help = "Start time of the server, in seconds since 1970.";
    text.gauge("process_start_time_seconds", help, Seconds(info.started_at));
    let time = (info.processor_time)();
    let [user, system] = [time.user_us, time.system_us].map(|us| Nanos::from_nanos(us * 1_000));
    text.counter(
        "process_cpu_seconds_total",
        "Processor time in user mode and in the kernel.",
        Seconds(user + system),
    );
    let help = "Processor time, by mode: user or system.";
    let mut processor = text.family("beanstalkd_cpu_seconds_total", COUNTER, help);
    processor.with("mode", "user", Seconds(user));
    processor.with("mode", "system", Seconds(system));
    if let Some(bytes) = (info.resident_bytes)() {
        text.gauge("process_resident_memory_bytes", "Resident memory of the process.", bytes);
    }
    let help = "1 while puts are rejected with DRAINING, otherwise 0.";
    text.gauge("beanstalkd_draining", help, u8::from(server.is_draining));
}

fn write_jobs(server: &ServerStats<'_>, queue: &Queue, text: &mut Text<'_>) {
    let totals = &queue.totals;
    let mut jobs = text.family("beanstalkd_jobs", GAUGE, "Jobs, by state.");
    jobs.with("state", "ready", totals.ready);
    jobs.with("state", "reserved", totals.reserved);
    jobs.with("state", "delayed", totals.delayed);
    jobs.with("state", "buried", totals.buried);
    let help = "Ready jobs with a priority below 1024.";
    text.gauge("beanstalkd_urgent_jobs", help, totals.urgent);
    text.counter("beanstalkd_jobs_created_total", "Created jobs.", totals.total_jobs);
    let help = "Puts that inserted no job, because another job has their key.";
    text.counter("beanstalkd_unique_hits_total", help, queue.unique.hits());
    let (jobs, kept) = queue.unique.counts();
    let help = "Keys of jobs, and of deleted jobs whose keys are kept.";
    let mut keys = text.family("beanstalkd_unique_keys", GAUGE, help);
    keys.with("state", "job", jobs);
    keys.with("state", "kept", kept);
    let help = "Reservations that ended because the time to run had passed.";
    text.counter("beanstalkd_job_timeouts_total", help, totals.timeouts);
    let help = "Memory of all jobs with their bodies.";
    text.gauge("beanstalkd_job_memory_bytes", help, queue.job_bytes());
    if let Some(limit) = server.max_memory_bytes {
        let help = "Job memory from which puts are rejected with OUT_OF_MEMORY.";
        text.gauge("beanstalkd_job_memory_limit_bytes", help, limit);
    }
    let help = "Maximum size of a job body.";
    text.gauge("beanstalkd_job_size_limit_bytes", help, server.max_job_size);
}

/// The page of a server that stands by.
pub const STANDBY_METRICS: &str = "\
# HELP beanstalkd_leading 1 if this server leads its cluster, otherwise 0.
# TYPE beanstalkd_leading gauge
beanstalkd_leading 0
";

fn write_remote(remote: &RemoteStats, text: &mut Text<'_>) {
    let help = "1 if this server leads its cluster, otherwise 0.";
    text.gauge("beanstalkd_leading", help, 1_u8);
    let help = "Time until the server may not answer, unless its lease is renewed.";
    text.gauge("beanstalkd_lease_seconds", help, Seconds(remote.lease_left));
    let help = "Duration of transactions of etcd.";
    text.histogram("beanstalkd_etcd_transaction_seconds", help, &remote.transactions);
    let help = "Bytes written to etcd.";
    text.counter("beanstalkd_etcd_written_bytes_total", help, remote.stored_bytes);
    let help = "Bytes that etcd has not acknowledged yet.";
    text.gauge("beanstalkd_etcd_unacknowledged_bytes", help, remote.waiting_bytes);
    let help = "Time for which a write to etcd has waited, or 0.";
    text.gauge("beanstalkd_etcd_waiting_seconds", help, Seconds(remote.waiting_for));
}

fn write_binlog(server: &ServerStats<'_>, queue: &Queue, text: &mut Text<'_>) {
    let Some(binlog) = queue.binlog() else { return };
    let (stats, sizes) = (binlog.stats(), binlog.sizes());
    text.gauge("beanstalkd_binlog_files", "Binlog files.", sizes.files);
    let help = "Number of the oldest binlog file.";
    text.gauge("beanstalkd_binlog_oldest_file_number", help, stats.oldest);
    let help = "Number of the current binlog file.";
    text.gauge("beanstalkd_binlog_current_file_number", help, stats.current);
    let help = "Size of a binlog file on a large disk, as set.";
    text.gauge("beanstalkd_binlog_file_size_bytes", help, server.binlog_file_size);
    let help = "Disk space of all binlog files.";
    text.gauge("beanstalkd_binlog_disk_bytes", help, sizes.disk_bytes);
    let help = "Size of the records of live jobs and kept keys.";
    text.gauge("beanstalkd_binlog_live_bytes", help, sizes.live_bytes);
    let help = "Size of the records that compaction can drop.";
    text.gauge("beanstalkd_binlog_dead_bytes", help, sizes.dead_bytes);
    let help = "1 while puts are refused for want of space, otherwise 0.";
    text.gauge("beanstalkd_binlog_full", help, u8::from(sizes.is_full));
    let help = "Records written to the binlog.";
    text.counter("beanstalkd_binlog_records_written_total", help, stats.records_written);
    let help = "Jobs that compaction has moved to newer binlog files.";
    text.counter("beanstalkd_binlog_records_migrated_total", help, stats.records_migrated);
    let help = "Duration of binlog syncs.";
    text.histogram("beanstalkd_binlog_sync_seconds", help, &binlog.sync_times());
    if let Some(remote) = binlog.remote_stats() {
        write_remote(&remote, text);
    }
}

fn write_body_cache(queue: &Queue, text: &mut Text<'_>) {
    let cache = &queue.body_cache;
    let Some(limit) = cache.limit else { return };
    let (cold, stats) = (cache.cold(), cache.stats());
    text.gauge("beanstalkd_body_cache_bytes", "Size of the bodies in memory.", cache.warm_bytes());
    let help = "Size of bodies in memory beyond which bodies become cold (--body-cache).";
    text.gauge("beanstalkd_body_cache_limit_bytes", help, limit);
    let help = "Jobs whose bodies are cold: only in the binlog.";
    text.gauge("beanstalkd_cold_jobs", help, cold.jobs);
    text.gauge("beanstalkd_cold_body_bytes", "Size of the cold bodies.", cold.bytes);
    let help = "Cold bodies that were read back for clients.";
    text.counter("beanstalkd_body_reads_total", help, stats.reads);
    let help = "Time for which a reply has waited until the disk had read its cold bodies.";
    text.histogram("beanstalkd_body_wait_seconds", help, &stats.wait_times);
    let help = "Attempts to read a cold body that failed: the job was buried, or lost.";
    text.counter("beanstalkd_body_read_failures_total", help, stats.failures);
}

// ---- Metrics of each tube ----

/// A metric with one or more samples for each tube.
struct TubeMetric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    write: WriteSamples,
}

type WriteSamples = fn(&TubeStats, &mut Family<'_>);

const fn gauge(name: &'static str, help: &'static str, write: WriteSamples) -> TubeMetric {
    TubeMetric { name, kind: GAUGE, help, write }
}

const fn counter(name: &'static str, help: &'static str, write: WriteSamples) -> TubeMetric {
    TubeMetric { name, kind: COUNTER, help, write }
}

/// The last one is written only with a body cache.
const TUBE_METRICS: [TubeMetric; 13] = [
    gauge("beanstalkd_tube_jobs", "Jobs of a tube, by state.", |tube, jobs| {
        jobs.with("state", "ready", tube.ready);
        jobs.with("state", "reserved", tube.reserved);
        jobs.with("state", "delayed", tube.delayed);
        jobs.with("state", "buried", tube.buried);
    }),
    gauge(
        "beanstalkd_tube_urgent_jobs",
        "Ready jobs of a tube with a priority below 1024.",
        |tube, family| family.one(tube.urgent),
    ),
    gauge(
        "beanstalkd_tube_oldest_ready_job_age_seconds",
        "Age of the oldest ready job of a tube; 0 without ready jobs.",
        |tube, family| family.one(Seconds(tube.oldest_ready_age)),
    ),
    counter("beanstalkd_tube_jobs_created_total", "Created jobs of a tube.", |tube, family| {
        family.one(tube.total_jobs)
    }),
    counter("beanstalkd_tube_deletes_total", "Deleted jobs of a tube.", |tube, family| {
        family.one(tube.deletes)
    }),
    gauge("beanstalkd_tube_using", "Connections that use a tube.", |tube, family| {
        family.one(tube.using);
    }),
    gauge("beanstalkd_tube_watching", "Connections that watch a tube.", |tube, family| {
        family.one(tube.watching);
    }),
    gauge(
        "beanstalkd_tube_waiting",
        "Connections that watch a tube and wait for a job.",
        |tube, family| family.one(tube.waiting),
    ),
    counter("beanstalkd_tube_pauses_total", "Pauses of a tube.", |tube, family| {
        family.one(tube.pauses);
    }),
    counter(
        "beanstalkd_tube_buried_after_returns_total",
        "Jobs of a tube that were buried because they came back too often (--bury-after).",
        |tube, family| family.one(tube.buried_after_returns),
    ),
    gauge(
        "beanstalkd_tube_pause_seconds",
        "Duration of the current pause of a tube; 0 without a pause.",
        |tube, family| family.one(Seconds(tube.pause)),
    ),
    gauge(
        "beanstalkd_tube_pause_left_seconds",
        "Remaining time of the current pause of a tube; 0 without a pause.",
        |tube, family| family.one(Seconds(tube.pause_left)),
    ),
    gauge(
        "beanstalkd_tube_cold_jobs",
        "Jobs of a tube whose bodies are cold: only in the binlog.",
        |tube, family| family.one(tube.cold),
    ),
];

// ---- The text format ----

const GAUGE: &str = "gauge";
const COUNTER: &str = "counter";

/// The text of a page, with a method for each kind of metric.
struct Text<'a>(&'a mut String);

/// A metric family, whose samples are of the tube `tube_name` or of the whole server.
struct Family<'a> {
    name: &'a str,
    tube_name: Option<&'a str>,
    text: &'a mut String,
}

impl Text<'_> {
    /// Writes the head of a family.
    fn family<'t>(&'t mut self, name: &'t str, kind: &str, help: &str) -> Family<'t> {
        write_line(self.0, format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
        Family { name, tube_name: None, text: self.0 }
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, GAUGE, help).one(value);
    }

    fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, COUNTER, help).one(value);
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let mut total = 0;
        for (bound, count) in histogram.cumulative() {
            write_line(self.0, format_args!("{name}_bucket{{le=\"{bound}\"}} {count}"));
            total = count;
        }
        write_line(self.0, format_args!("{name}_sum {}", Seconds(histogram.sum())));
        write_line(self.0, format_args!("{name}_count {total}"));
    }
}

impl Family<'_> {
    /// Writes the only sample of the server or the tube.
    fn one(&mut self, value: impl Display) {
        match self.tube_name {
            Some(tube) => self.labelled(format_args!("tube=\"{}\"", Label(tube)), value),
            None => write_line(self.text, format_args!("{} {value}", self.name)),
        }
    }

    /// Writes a sample with a label, in addition to the label of the tube.
    fn with(&mut self, label: &str, label_value: &str, value: impl Display) {
        match self.tube_name {
            Some(tube) => {
                let tube = Label(tube);
                self.labelled(format_args!("tube=\"{tube}\",{label}=\"{label_value}\""), value);
            }
            None => self.labelled(format_args!("{label}=\"{label_value}\""), value),
        }
    }

    fn labelled(&mut self, labels: fmt::Arguments<'_>, value: impl Display) {
        write_line(self.text, format_args!("{}{{{labels}}} {value}", self.name));
    }
}

fn write_line(text: &mut String, line: fmt::Arguments<'_>) {
    text.write_fmt(line).expect("writing to a string cannot fail");
    text.push('\n');
}

/// Displays the value of a label with escapes, without the quotes.
struct Label<'a>(&'a str);

impl Display for Label<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for char in self.0.chars() {
            match char {
                '"' | '\\' => write!(f, "\\{char}")?,
                '\n' => f.write_str("\\n")?,
                _ => f.write_char(char)?,
            }
        }
        Ok(())
    }
}

/// Displays a time or duration in seconds.
struct Seconds(Nanos);

impl Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NANOS_PER_SEC: u64 = 1_000_000_000;
        let nanos = self.0.as_nanos();
        match nanos % NANOS_PER_SEC {
            0 => write!(f, "{}", nanos / NANOS_PER_SEC),
            rest => write!(f, "{}.{rest:09}", nanos / NANOS_PER_SEC),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_times_are_in_seconds() {
        assert_eq!(Label("a\"b\\c\nd").to_string(), "a\\\"b\\\\c\\nd");
        for (nanos, text) in
            [(0, "0"), (3_000_000_000, "3"), (1_500_000_000, "1.500000000"), (7, "0.000000007")]
        {
            assert_eq!(Seconds(Nanos::from_nanos(nanos)).to_string(), text);
        }
    }
}
