//! The page for Prometheus: what `stats` and `stats-tube` tell, and what operators ask beside that, in
//! the text format of version 0.0.4.
//!
//! There may be very many tubes, jobs and connections, so the page is made in slices, between which
//! others have their turn. First the connections and the tubes are gone through, and what they
//! say is kept: the samples of one family stand together in the page, and must agree with those of
//! the next. Only so many tubes are told one by one; the others come as one of a name that no tube
//! can have.
//!
//! A slice comes between two turns, and what it counts is exact. What changes between two slices may be
//! counted as it was or as it is; of a tube with more ready jobs than one slice looks at, a job that
//! moves about meanwhile may be overlooked when the oldest is looked for.

use crate::engine::collections::histogram::Histogram;
use crate::engine::conn::Activity;
use crate::engine::headroom::{self, Headroom};
use crate::engine::keys::TubeKey;
use crate::engine::protocol::command::Counter;
use crate::engine::protocol::stats::{self, ServerStats};
use crate::engine::queue::Queue;
use crate::engine::queue::tube::Tube;
use crate::engine::server::View;
use crate::engine::time::Nanos;
use std::collections::TryReserveError;
use std::fmt::{self, Display, Write};

/// A page in the making.
#[derive(Debug)]
pub struct Page {
    stage: Stage,
    /// As many tubes are told one by one.
    tubes_max: usize,
    /// By [`Activity`].
    connections: [u64; Activity::ALL.len()],
    tubes: Vec<TubeFigures>,
    /// The sum of the tubes beyond that.
    others: TubeFigures,
    others_count: u64,
    /// How many tubes had been removed since the start, when the first one was looked at.
    removed_before: u64,
}

#[derive(Debug)]
enum Stage {
    /// Connections are counted, from this number on.
    Connections {
        from: usize,
    },
    /// Tubes are looked at, from the end of their order on: when one goes, the last one takes its
    /// place, and has been seen then. How many are left, and what is known of the last of those.
    Tubes {
        left: usize,
        look: Option<Cursor>,
    },
    /// What concerns the whole server is told.
    Counters,
    /// A family of samples is told, one for each tube; which tube is next.
    Family {
        number: usize,
        place: usize,
    },
    Done,
}

/// A tube that is being looked at.
#[derive(Debug)]
struct Cursor {
    tube: TubeKey,
    stats: TubeFigures,
    /// How many of its ready jobs, and of those who stand in its line, are still to be looked at. They
    /// are gone through from the end: when the first one leaves, the last one takes a place in
    /// front, and has been seen then.
    ready_left: usize,
    line_left: usize,
}

/// What is told of a tube.
#[derive(Debug, Default)]
struct TubeFigures {
    name: String,
    ready: u64,
    reserved: u64,
    delayed: u64,
    buried: u64,
    urgent: u64,
    total_jobs: u64,
    deletes: u64,
    pauses: u64,
    using: u64,
    watching: u64,
    waiting: u64,
    pause: Nanos,
    pause_left: Nanos,
    oldest_ready_age: Nanos,
}

/// How much is looked at in a slice, in ready jobs: well below a tenth of a millisecond.
const LOOKS: usize = 8192;
/// How much longer it takes to look at a connection, at one in a line, and at a tube.
const LOOKS_PER_CONNECTION: usize = 8;
const LOOKS_PER_PLACE_IN_LINE: usize = 16;
const LOOKS_PER_TUBE: usize = 64;

/// How long a slice of text gets: once it has so many bytes, it ends with the next sample.
pub const SLICE_LEN: usize = 16 * 1024;

/// What may come behind that: the samples of one tube in one family.
pub const LONGEST_SAMPLE: usize = 4096;

/// A tube cannot be called that.
const OTHER_TUBES: &str = "other tubes";

impl Page {
    /// A page on which `tubes_max` tubes are told one by one.
    pub fn new(tubes_max: usize) -> Page {
        Page {
            stage: Stage::Connections { from: 0 },
            tubes_max,
            connections: [0; Activity::ALL.len()],
            tubes: Vec::new(),
            others: TubeFigures { name: OTHER_TUBES.to_owned(), ..TubeFigures::default() },
            others_count: 0,
            removed_before: 0,
        }
    }

    /// Whether all has been told.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    /// Makes the next slice; adds to `text` what there is to tell already.
    ///
    /// # Errors
    /// There is no memory for what is to be kept.
    pub fn go_on(&mut self, view: &View<'_>, text: &mut String) -> Result<(), TryReserveError> {
        let mut looks = LOOKS;
        match &mut self.stage {
            Stage::Connections { from } => {
                let count = LOOKS / LOOKS_PER_CONNECTION;
                for conn in view.conns.numbered(*from..*from + count) {
                    self.connections[conn.activity() as usize] += 1;
                }
                *from += count;
                if *from >= view.conns.numbers_end() {
                    self.removed_before = view.queue.tubes.removed_count();
                    self.stage = Stage::Tubes { left: view.queue.tubes.len(), look: None };
                }
            }
            Stage::Tubes { .. } => while looks > 0 && self.look_at_tube(view, &mut looks)? {},
            Stage::Counters => {
                self.write_totals(view, &mut Text(text));
                self.stage = Stage::Family { number: 0, place: 0 };
            }
            Stage::Family { .. } => while text.len() < SLICE_LEN && self.write_tube(text) {},
            Stage::Done => {}
        }
        Ok(())
    }

    // ---- Looking ----

    /// Goes on looking at a tube, or begins with the next one. `false` when there are no more.
    fn look_at_tube(
        &mut self,
        view: &View<'_>,
        looks: &mut usize,
    ) -> Result<bool, TryReserveError> {
        let Stage::Tubes { left, look } = &mut self.stage else { return Ok(false) };
        let tubes = &view.queue.tubes;
        *left = (*left).min(tubes.len());
        let Some(place) = left.checked_sub(1) else {
            self.tubes.reverse();
            self.dedup_tubes(tubes.removed_count());
            self.stage = Stage::Counters;
            return Ok(false);
        };
        let tube = tubes.at(place);
        // Another may have come to its place.
        let mut present = match look.take().filter(|look| look.tube == tube) {
            Some(present) => present,
            None => {
                *looks = looks.saturating_sub(LOOKS_PER_TUBE);
                Cursor::at(tube, &tubes[tube], view.now)
            }
        };
        if !present.go_on(view, looks) {
            *look = Some(present);
            return Ok(true);
        }
        *left = place;
        let mut stats = present.stats;
        if place < self.tubes_max {
            let name = &tubes[tube].name;
            headroom::leave(Headroom::ThreeQuarters, || {
                self.tubes.try_reserve(1)?;
                stats.name.try_reserve_exact(name.len())
            })?;
            stats.name.push_str(name);
            self.tubes.push(stats);
        } else {
            self.others.add(stats);
            self.others_count += 1;
        }
        Ok(true)
    }

    /// A tube that took another place meanwhile may have been looked at twice, but Prometheus must not
    /// be told twice.
    fn dedup_tubes(&mut self, removed_count: u64) {
        if removed_count != self.removed_before {
            self.tubes.sort_unstable_by(|a, b| a.name.cmp(&b.name));
            self.tubes.dedup_by(|a, b| a.name == b.name);
        }
    }

    // ---- Telling ----

    /// Tells the next samples of the present family. `false` when there are no more.
    fn write_tube(&mut self, text: &mut String) -> bool {
        let Stage::Family { number, place } = &mut self.stage else { return false };
        let family = &TUBE_FAMILIES[*number];
        if *place == 0 {
            Text(text).family(family.name, family.kind, family.help);
        }
        let others = (self.others_count > 0).then_some(&self.others);
        if let Some(tube) = self.tubes.iter().chain(others).nth(*place) {
            let tube_name = Some(&*tube.name);
            (family.tell)(tube, &mut Family { name: family.name, tube_name, text });
        }
        *place += 1;
        if *place >= self.tubes.len() + others.iter().len() {
            (*number, *place) = (*number + 1, 0);
        }
        // With the last sample it is done: no empty slice comes after that.
        if *number == TUBE_FAMILIES.len() {
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
        let help = "Tubes that are told of together, as one called \"other tubes\".";
        text.gauge("beanstalkd_tubes_told_together", help, self.others_count);
        let help = "How long the turns of the event loop took, without waiting.";
        text.histogram("beanstalkd_turn_seconds", help, iterations);
        write_binlog(server, queue, text);
    }

    fn write_clients(&self, server: &ServerStats<'_>, queue: &Queue, text: &mut Text<'_>) {
        let help = "Connections of clients, by what they are doing.";
        let mut connections = text.family("beanstalkd_connections", GAUGE, help);
        for (activity, count) in Activity::ALL.into_iter().zip(self.connections) {
            connections.with("state", activity.name(), count);
        }
        let help = "Connections that were accepted.";
        text.counter("beanstalkd_connections_opened_total", help, server.total_connections);
        let help = "Connections that have put a job.";
        text.gauge("beanstalkd_producers", help, queue.totals.producers);
        let help = "Connections that have reserved a job.";
        text.gauge("beanstalkd_workers", help, queue.totals.workers);
        let mut commands = text.family("beanstalkd_commands_total", COUNTER, "Commands, by name.");
        for (name, count) in Counter::NAMES.iter().zip(server.commands) {
            commands.with("command", name.strip_prefix("cmd-").unwrap_or(name), count);
        }
    }
}

impl Cursor {
    fn at(key: TubeKey, tube: &Tube, now: Nanos) -> Cursor {
        Cursor {
            tube: key,
            stats: TubeFigures::of(tube, now),
            ready_left: tube.ready.len(),
            line_left: tube.line.len(),
        }
    }

    /// Looks at so many of its jobs and of those in its line. Whether it is done with them.
    fn go_on(&mut self, view: &View<'_>, looks: &mut usize) -> bool {
        let tube = &view.queue.tubes[self.tube];
        self.ready_left = self.ready_left.min(tube.ready.len());
        let ready = self.ready_left.min(*looks);
        // Ids rise with time.
        let oldest = tube.ready.slice(self.ready_left - ready..self.ready_left);
        if let Some(oldest) = oldest.iter().min_by_key(|entry| entry.id) {
            let age = view.now.since(view.queue.jobs[oldest.job].created_at);
            self.stats.oldest_ready_age = self.stats.oldest_ready_age.max(age);
        }
        self.ready_left -= ready;
        *looks -= ready;

        self.line_left = self.line_left.min(tube.line.len());
        let in_line = self.line_left.min(looks.div_ceil(LOOKS_PER_PLACE_IN_LINE));
        let waiting = tube.line.slice(self.line_left - in_line..self.line_left);
        let waiting = waiting.iter().filter(|&&place| view.queue.waits_at(place)).count();
        self.stats.waiting += waiting as u64;
        self.line_left -= in_line;
        *looks = looks.saturating_sub(in_line * LOOKS_PER_PLACE_IN_LINE);
        self.ready_left == 0 && self.line_left == 0
    }
}

impl TubeFigures {
    /// All that can be had at once, but for the name.
    fn of(tube: &Tube, now: Nanos) -> TubeFigures {
        let pause = tube.pause.as_deref();
        TubeFigures {
            name: String::new(),
            ready: tube.ready.len() as u64,
            reserved: tube.reserved.into(),
            delayed: tube.delayed.len() as u64,
            buried: tube.buried.len().into(),
            urgent: tube.urgent.into(),
            total_jobs: tube.total_jobs,
            deletes: tube.deletes,
            pauses: tube.pauses,
            using: tube.using.into(),
            watching: tube.watching.into(),
            waiting: 0,
            pause: pause.map_or(Nanos::ZERO, |pause| Nanos::from_secs(pause.secs)),
            pause_left: pause.map_or(Nanos::ZERO, |pause| pause.until.since(now)),
            oldest_ready_age: Nanos::ZERO,
        }
    }

    /// The sum of both, or whatever is longer.
    fn add(&mut self, other: TubeFigures) {
        let TubeFigures { ready, reserved, delayed, buried, urgent, .. } = other;
        let TubeFigures { total_jobs, deletes, pauses, using, watching, waiting, .. } = other;
        let TubeFigures { name: _, pause, pause_left, oldest_ready_age, .. } = other;
        self.ready += ready;
        self.reserved += reserved;
        self.delayed += delayed;
        self.buried += buried;
        self.urgent += urgent;
        self.total_jobs += total_jobs;
        self.deletes += deletes;
        self.pauses += pauses;
        self.using += using;
        self.watching += watching;
        self.waiting += waiting;
        self.pause = self.pause.max(pause);
        self.pause_left = self.pause_left.max(pause_left);
        self.oldest_ready_age = self.oldest_ready_age.max(oldest_ready_age);
    }
}

// ---- Of the whole server ----

fn write_process(server: &ServerStats<'_>, text: &mut Text<'_>) {
    let facts = server.process;
    let help = "The version of the server, and of C beanstalkd that it stands in for.";
    let (own, protocol) = (env!("CARGO_PKG_VERSION"), stats::VERSION);
    text.family("beanstalkd_build_info", GAUGE, help)
        .labelled(format_args!("version=\"{own}\",protocol=\"{protocol}\""), 1);
    let help = "What stats tells of the process and its machine.";
    let labels = format_args!(
        "id=\"{}\",pid=\"{}\",hostname=\"{}\",os=\"{}\",platform=\"{}\"",
        Label(&facts.instance_id),
        facts.pid,
        Label(&facts.hostname),
        Label(&facts.os_version),
        Label(&facts.platform)
    );
    text.family("beanstalkd_instance_info", GAUGE, help).labelled(labels, 1);
    let help = "When the server was started, in seconds since 1970.";
    text.gauge("process_start_time_seconds", help, Seconds(facts.started_at));
    let time = (facts.processor_time)();
    let [user, system] = [time.user_us, time.system_us].map(|us| Nanos::from_nanos(us * 1_000));
    text.counter("process_cpu_seconds_total", "Processor time.", Seconds(user + system));
    let help = "Processor time, in the program and in the system for it.";
    let mut processor = text.family("beanstalkd_cpu_seconds_total", COUNTER, help);
    processor.with("mode", "user", Seconds(user));
    processor.with("mode", "system", Seconds(system));
    if let Some(bytes) = (facts.resident_bytes)() {
        text.gauge("process_resident_memory_bytes", "Memory in use.", bytes);
    }
    let help = "Whether puts are refused so that the queue runs empty.";
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
    text.counter("beanstalkd_jobs_created_total", "Jobs that were put.", totals.total_jobs);
    let help = "Times that a worker had a job for longer than its time to run.";
    text.counter("beanstalkd_job_timeouts_total", help, totals.timeouts);
    let help = "Memory that jobs take, with their bodies.";
    text.gauge("beanstalkd_job_memory_bytes", help, queue.job_bytes());
    if let Some(limit) = server.max_memory_bytes {
        let help = "Memory that jobs may take before puts are refused.";
        text.gauge("beanstalkd_job_memory_limit_bytes", help, limit);
    }
    let help = "The largest body that a job may have.";
    text.gauge("beanstalkd_job_size_limit_bytes", help, server.max_job_size);
}

fn write_binlog(server: &ServerStats<'_>, queue: &Queue, text: &mut Text<'_>) {
    let Some(binlog) = queue.binlog() else { return };
    let (stats, sizes) = (binlog.stats(), binlog.sizes());
    text.gauge("beanstalkd_binlog_files", "Binlog files.", sizes.files);
    let help = "The number of the oldest binlog file.";
    text.gauge("beanstalkd_binlog_oldest_file_number", help, stats.oldest);
    let help = "The number of the binlog file that is written to.";
    text.gauge("beanstalkd_binlog_current_file_number", help, stats.current);
    let help = "The size of a new binlog file.";
    text.gauge("beanstalkd_binlog_file_size_bytes", help, server.binlog_file_size);
    let help = "Space that binlog files take on the disk.";
    text.gauge("beanstalkd_binlog_disk_bytes", help, sizes.disk_bytes);
    let help = "Records of live jobs in the binlog.";
    text.gauge("beanstalkd_binlog_live_bytes", help, sizes.live_bytes);
    let help = "Records in the binlog that are not needed any more.";
    text.gauge("beanstalkd_binlog_dead_bytes", help, sizes.dead_bytes);
    let help = "Whether there is no space for more binlog files.";
    text.gauge("beanstalkd_binlog_full", help, u8::from(sizes.is_full));
    let help = "Records that were written to the binlog.";
    text.counter("beanstalkd_binlog_records_written_total", help, stats.records_written);
    let help = "Jobs that were moved to newer binlog files.";
    text.counter("beanstalkd_binlog_records_migrated_total", help, stats.records_migrated);
    let help = "How long syncs of binlog files took.";
    text.histogram("beanstalkd_binlog_sync_seconds", help, &binlog.sync_times());
}

// ---- Of each tube ----

/// A family with one or more samples for each tube.
struct TubeMetric {
    name: &'static str,
    kind: &'static str,
    help: &'static str,
    tell: Tell,
}

type Tell = fn(&TubeFigures, &mut Family<'_>);

const fn gauge(name: &'static str, help: &'static str, tell: Tell) -> TubeMetric {
    TubeMetric { name, kind: GAUGE, help, tell }
}

const fn counter(name: &'static str, help: &'static str, tell: Tell) -> TubeMetric {
    TubeMetric { name, kind: COUNTER, help, tell }
}

const TUBE_FAMILIES: [TubeMetric; 11] = [
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
        "How long ago the oldest ready job of a tube was put; 0 if there is none.",
        |tube, family| family.one(Seconds(tube.oldest_ready_age)),
    ),
    counter(
        "beanstalkd_tube_jobs_created_total",
        "Jobs that were put into a tube.",
        |tube, family| family.one(tube.total_jobs),
    ),
    counter(
        "beanstalkd_tube_deletes_total",
        "Jobs of a tube that were deleted.",
        |tube, family| family.one(tube.deletes),
    ),
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
    counter("beanstalkd_tube_pauses_total", "Times that a tube was paused.", |tube, family| {
        family.one(tube.pauses);
    }),
    gauge(
        "beanstalkd_tube_pause_seconds",
        "How long the present pause of a tube is all in all.",
        |tube, family| family.one(Seconds(tube.pause)),
    ),
    gauge(
        "beanstalkd_tube_pause_left_seconds",
        "How long the present pause of a tube still lasts.",
        |tube, family| family.one(Seconds(tube.pause_left)),
    ),
];

// ---- The text format ----

const GAUGE: &str = "gauge";
const COUNTER: &str = "counter";

/// The text of a page.
struct Text<'a>(&'a mut String);

/// A family of samples, those of one tube or of none.
struct Family<'a> {
    name: &'a str,
    tube_name: Option<&'a str>,
    text: &'a mut String,
}

impl Text<'_> {
    /// Begins a family.
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
        let mut all = 0;
        for (bound, count) in histogram.cumulative() {
            write_line(self.0, format_args!("{name}_bucket{{le=\"{bound}\"}} {count}"));
            all = count;
        }
        write_line(self.0, format_args!("{name}_sum {}", Seconds(histogram.sum())));
        write_line(self.0, format_args!("{name}_count {all}"));
    }
}

impl Family<'_> {
    /// The only sample, or that of the tube.
    fn one(&mut self, value: impl Display) {
        match self.tube_name {
            Some(tube) => self.labelled(format_args!("tube=\"{}\"", Label(tube)), value),
            None => write_line(self.text, format_args!("{} {value}", self.name)),
        }
    }

    /// The sample that has this label beside the tube.
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

/// The value of a label, between its quotes.
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

/// A span or moment in seconds.
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
    fn labels_and_seconds_are_written_as_prometheus_reads_them() {
        assert_eq!(Label("a\"b\\c\nd").to_string(), "a\\\"b\\\\c\\nd");
        for (nanos, text) in
            [(0, "0"), (3_000_000_000, "3"), (1_500_000_000, "1.500000000"), (7, "0.000000007")]
        {
            assert_eq!(Seconds(Nanos::from_nanos(nanos)).to_string(), text);
        }
    }
}
