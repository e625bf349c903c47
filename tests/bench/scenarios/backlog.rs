//! What a server keeps: connections, tubes, held jobs, millions of jobs, keys, jobs on disk. Their
//! memory and space, what operations cost beside them, and what scrapes of them cost.

use super::{CONSUME, Scenario, meanwhile, watch_all};
use crate::client::Outcome;
use crate::load::{Load, Step};
use crate::probe::{Probe, scrape};
use crate::report::Figures;
use crate::server::{MIB, PATIENCE, Server};
use fastrand::Rng;
use std::thread;
use std::time::{Duration, Instant};

const MILLION: usize = 1_000_000;
const TIME: Duration = Duration::from_secs(1);

const EMPTY: &str =
    "from start to the first reply, and resident memory of a server that has nothing to do";
const TUBE_MEMORY: &str = "memory of a tube, with up to 100,000 watched by one connection";
const KEYS: &str = "put of 64 bytes in front of a million jobs without keys and a million with keys, \
    100 to a write and one by one (single): without a key, with a new one, and with one that another \
    job has (hit); cpu us/op";
const START_UP: &str = "from start to the first reply with a million live jobs of 150 bytes, whose \
    files the kernel has in memory";

pub fn all() -> Vec<Scenario> {
    vec![
        one_of("delete", 1000),
        one_of("delete", 50_000),
        one_of("touch", 1000),
        one_of("touch", 50_000),
        Scenario::new("empty", 3, EMPTY, empty),
        idle(),
        Scenario::new("tube-memory", 1, TUBE_MEMORY, tube_memory),
        deep("deep-1m", MILLION, true),
        deep("deep-10m", 10 * MILLION, true),
        deep("deep-10m-in-order", 10 * MILLION, false),
        scraped("scrape-tubes", 10_000, 0, ""),
        scraped("scrape-all-tubes", 10_000, 0, "--metrics-tubes 20000"),
        scraped("scrape-jobs", 0, MILLION, ""),
        Scenario { needs_extensions: true, ..Scenario::new("keys-1m", 3, KEYS, keys) },
        Scenario {
            flags: "-b DIR -F".to_owned(),
            ..Scenario::new("start-up", 3, START_UP, start_up)
        },
        churn("churn", 20_000, 1024, 400_000, 1, 0),
        churn("compact-live", 200_000, 64, 600_000, 100, 0),
        churn("compact-mixed", 200_000, 64, 600_000, 100, 200),
    ]
}

fn empty(server: &mut Server) -> Outcome<Figures> {
    server.terminate();
    let start = Instant::now();
    server.start_again()?;
    server.connect(1).say("use default")?;
    let start_ms = start.elapsed().as_secs_f64() * 1e3;
    Ok(Figures::of([("start_ms", start_ms), ("rss_kib", server.rss_bytes() / 1024.0)]))
}

/// What it costs to delete or touch a job when one connection holds many.
fn one_of(verb: &'static str, held: usize) -> Scenario {
    /// Few compared with the jobs held, so that their number hardly changes.
    const REQUESTS: usize = 300;
    let what = format!("{verb} of one of {held} jobs that the connection holds, at random");
    let round = move |server: &mut Server| {
        let mut pool = server.connect(1);
        pool.run(&Load::put(held))?;
        pool.run(&Load::reserve(held))?;
        let mut ids = pool.take_held();
        Rng::new().shuffle(&mut ids);
        let lines = ids.iter().take(REQUESTS).map(|id| format!("{verb} {id}")).collect();
        Ok(server.measure(|| pool.run(&Load::lines(lines)))?.figures())
    };
    let scenario = Scenario::new(format!("held-{verb}-{held}"), 5, what, round);
    Scenario { is_traced: true, ..scenario }
}

/// Two servers at once would need more files than one client process may open.
fn idle() -> Scenario {
    const IDLE: usize = 10_000;
    const ACTIVE: usize = 50;
    let what = "put, reserve, delete on 50 connections beside 10,000 idle ones";
    let scenario = Scenario::new("idle-10k", 3, what, |server| {
        let before_bytes = server.rss_bytes();
        let _idle = server.connect(IDLE);
        // The last of them has been accepted when one that came later is served.
        let mut active = server.connect(ACTIVE);
        active.say("use default")?;
        let bytes_per_connection = (server.rss_bytes() - before_bytes) / (IDLE + ACTIVE) as f64;
        let measured = server.measure(|| active.run_for(&Load::cycle(), TIME))?;
        let memory = Figures::of([("bytes_per_connection", bytes_per_connection)]);
        Ok(measured.figures().with("", memory))
    });
    Scenario { open_files: 10_500, ..scenario }
}

/// As many as it makes in some seconds: where each has to be looked for among all others,
/// the last ones take longest.
fn tube_memory(server: &mut Server) -> Outcome<Figures> {
    const MOST: usize = 100_000;
    let mut keeper = server.connect(1);
    let before_bytes = server.rss_bytes();
    let load = Load { tubes: MOST, ..Load::of_jobs(&[&[Step::Watch]], MOST) };
    let made = keeper.run_for(&load, PATIENCE / 2)?.replies as f64;
    let bytes_per_tube = (server.rss_bytes() - before_bytes) / made;
    Ok(Figures::of([("tubes", made), ("bytes_per_tube", bytes_per_tube)]))
}

// ---- Millions of jobs ----

fn deep(name: &str, depth: usize, has_random_priorities: bool) -> Scenario {
    const BESIDE_PROBE: [&str; 3] = ["stall_ms", "stall_with_noise_ms", "cpu_us_per_op"];
    let order = if has_random_priorities { "random priorities" } else { "one priority" };
    let what = format!(
        "{depth} jobs of 64 bytes, {order}: fill, put-reserve-delete on 10 connections, \
         drain, rest; stalls are of a probe beside filling and draining, and after the rest"
    );
    Scenario::new(name, 1, what, move |server| {
        let before_bytes = server.rss_bytes();
        let fill = Load { has_random_priorities, ..Load::put(depth) };
        let filled = Probe::beside(server, "use default", || server.run(&fill))?;
        let bytes_per_job = (server.rss_bytes() - before_bytes) / depth as f64;
        let mut pool = server.connect(10);
        pool.run_for(&Load::cycle(), TIME / 5)?;
        let cycled = server.measure(|| pool.run_for(&Load::cycle(), TIME))?;
        let drain = Load::of_jobs(CONSUME, depth);
        let drained = Probe::beside(server, "use default", || {
            server.connect(1).run_for(&drain, 2 * PATIENCE)
        })?;
        let drained_percent = 100.0 * drained.run.deleted as f64 / depth as f64;
        let peak_rss_mib = server.peak_rss_bytes() / MIB;
        let figures = Figures::default()
            .with("fill_", filled.figures().only(&BESIDE_PROBE))
            .with("", Figures::of([("bytes_per_job", bytes_per_job)]))
            .with("", cycled.figures())
            .with("drain_", drained.figures().only(&BESIDE_PROBE))
            .with("drained_", Figures::of([("percent", drained_percent)]))
            .with("peak_", Figures::of([("rss_mib", peak_rss_mib)]));
        // What a server does not get done in time stays undone; then there is nothing to report of
        // the memory that it gives back.
        if drained.run.deleted < depth {
            return Ok(figures);
        }
        Ok(figures.with("rest_", rest(server)?))
    })
}

/// Only a server without requests has time to give memory back; a client that comes then may have
/// to wait for that.
fn rest(server: &Server) -> Outcome<Figures> {
    const REST: Duration = Duration::from_secs(3);
    const AFTERMATH: Duration = Duration::from_millis(500);
    thread::sleep(REST);
    let left_percent = 100.0 * server.rss_bytes() / server.peak_rss_bytes();
    let probe = Probe::start(server, "use default");
    thread::sleep(AFTERMATH);
    Ok(probe.take_stalls()?.with("", Figures::of([("rss_left_percent", left_percent)])))
}

// ---- Scrapes ----

/// The cost of scrapes without pause for the clients.
fn scraped(name: &str, tubes: usize, jobs: usize, flags: &str) -> Scenario {
    const LATENCIES: [&str; 5] = ["ops_per_s", "p50_us", "p99_us", "p99.9_us", "max_us"];
    let what = format!(
        "put, reserve, delete on 10 connections beside {tubes} tubes and {jobs} jobs; a second \
         without scrapes, and one (scraped) with one after the other; latencies are without the \
         time in which server or client waited for a core; flags: {flags}"
    );
    let round = move |server: &mut Server| {
        let _keeper = watch_all(server, 1, tubes)?;
        server.run(&Load::put_with_priorities(jobs))?;
        let mut pool = server.connect(10).without_noise(server.waits());
        // Warms up.
        pool.run_for(&Load::cycle(), TIME / 10)?;
        let without = server.measure(|| pool.run_for(&Load::cycle(), TIME))?;
        let (scrapes, with) = meanwhile(
            |is_over| scrape(server.metrics, is_over),
            || server.measure(|| pool.run_for(&Load::cycle(), TIME)),
        );
        let with = with?;
        let cpu_us = with.cpu_us - with.ops * (without.cpu_us / without.ops);
        let pages = f64::from(scrapes.pages);
        let costs = Figures::of([
            ("page_kib", scrapes.bytes as f64 / pages / 1024.0),
            ("ms_per_scrape", scrapes.time.as_secs_f64() * 1e3 / pages),
            ("cpu_ms_per_scrape", cpu_us / 1e3 / pages),
        ]);
        let scraped = with.figures().only(&LATENCIES);
        Ok(without.figures().only(&LATENCIES).with("scraped_", scraped).with("", costs))
    };
    let flags = format!("--metrics METRICS {flags}");
    Scenario { flags, ..Scenario::new(name, 5, what, round) }
}

// ---- Jobs with keys ----

/// The processor time of a put with a key, and the memory of a key.
fn keys(server: &mut Server) -> Outcome<Figures> {
    let mut pool = server.connect(1);
    let mut put = |load: &Load| -> Outcome<f64> {
        let measured = server.measure(|| pool.run(load))?;
        Ok(measured.cpu_us / measured.ops)
    };
    let mut sizes = vec![server.rss_bytes()];
    for first_key in [None, Some(0)] {
        put(&Load { first_key, ..Load::put(MILLION) })?;
        sizes.push(server.rss_bytes());
    }
    let grown_bytes = (sizes[2] - sizes[1]) - (sizes[1] - sizes[0]);
    let mut figures = Figures::of([("bytes_per_key", grown_bytes / MILLION as f64)]);
    let mut first_new = MILLION;
    for (prefix, jobs, batch) in [("", 200_000, 100), ("single_", 20_000, 1)] {
        let mut cost = |first_key| put(&Load { first_key, batch, ..Load::put(jobs) });
        let (plain, with_key, hit) = (cost(None)?, cost(Some(first_new))?, cost(Some(0))?);
        first_new += jobs;
        let costs = [("no_key_us", plain), ("key_us", with_key), ("hit_us", hit)];
        figures = figures.with(prefix, Figures::of(costs));
        figures = figures.with(prefix, Figures::of([("key_ratio", with_key / plain)]));
    }
    Ok(figures)
}

// ---- Jobs on disk ----

/// Each server reads what it has written itself.
fn start_up(server: &mut Server) -> Outcome<Figures> {
    server.run(&Load { body_len: 150, ..Load::put(MILLION) })?;
    server.terminate();
    let start = Instant::now();
    server.start_again()?;
    server.connect(1).say("use default")?;
    Ok(Figures::of([
        ("elapsed_ms", start.elapsed().as_secs_f64() * 1e3),
        ("cpu_ms", server.cpu_ns() as f64 / 1e6),
        ("binlog_mib", server.binlog_bytes() / MIB),
    ]))
}

/// Jobs that stay (`live`), but for some that are `deleted`, while others come and go (`cycles`).
fn churn(
    name: &str,
    live: usize,
    body_len: usize,
    cycles: usize,
    batch: usize,
    deleted: usize,
) -> Scenario {
    /// The work is cut into this number of pieces, between which some jobs are deleted.
    const PIECES: usize = 20;
    let what = format!(
        "{live} jobs of {body_len} bytes stay, but for {deleted}, while {cycles} others come and \
         go on 10 connections, {batch} to a write; what is written and kept per byte needed, \
         and the stalls of a probe that puts and deletes"
    );
    let round = move |server: &mut Server| {
        let mut producer = server.connect(1);
        producer.say("use long-lived")?;
        producer.run(&Load { body_len, ..Load::put(live) })?;
        let mut pool = server.connect(10);
        let load = Load { body_len, batch, jobs: cycles / PIECES, ..Load::cycle() };
        let before_bytes = server.written_bytes();
        let measured = Probe::beside(server, "put 0 0 60 5\r\nprobe", || {
            let mut all = pool.run(&load)?;
            for piece in 1..PIECES {
                // Spread over all jobs that stay: they have the first ids.
                let ids =
                    (0..deleted / PIECES).map(|index| piece + index * live * PIECES / deleted);
                producer.run(&Load::lines(ids.map(|id| format!("delete {id}")).collect()))?;
                all.append(pool.run(&load)?);
            }
            Ok(all)
        })?;
        let written_bytes = server.written_bytes() - before_bytes;
        // A put, a reserve and a delete; the reserve is not recorded.
        let needed_bytes = measured.ops / 3.0 * (put_bytes("default", body_len) + RECORD_BYTES);
        let live_bytes = live as f64 * put_bytes("long-lived", body_len);
        let space = Figures::of([
            ("written_per_needed", written_bytes / needed_bytes),
            ("kept_per_live", server.binlog_bytes() / live_bytes),
        ]);
        Ok(space.with("", measured.figures()))
    };
    Scenario { flags: "-b DIR -f 50".to_owned(), ..Scenario::new(name, 1, what, round) }
}

/// What version 7 of the format needs for a change of a job: the length of a name, and what
/// the job is now.
const RECORD_BYTES: f64 = 84.0;

/// And for a new job: the name of its tube and its body too.
fn put_bytes(tube: &str, body_len: usize) -> f64 {
    RECORD_BYTES + (tube.len() + body_len + b"\r\n".len()) as f64
}
