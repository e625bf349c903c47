//! Metrics over HTTP: the page agrees with `stats` and has the format of Prometheus, and no client can
//! delay the server.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod harness;

use beanstalkd::testing::{
    Address, ConnKey, Histogram, HttpConn, LONGEST_SAMPLE, Measurements, MetricsServer, Nanos,
    Page, SLICE_LEN, Server, ServerState, Settings, Syncing, listen,
};
use harness::client::{Client, connect, unix};
use harness::engine::Engine;
use harness::fake_disk::{FakeDisk, ReadFault};
use harness::process::{self, Daemon, ON_LOOPBACK, run};
use harness::request::put;
use harness::yaml::field;
use harness::{PATIENCE, wait_until};
use rustix::process::Signal;
use socket2::{SockAddr, Socket};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::SocketAddr;

const START: Nanos = Nanos::from_secs(1_000);

fn engine() -> Engine {
    let settings =
        Settings { binlog_file_size: 4096, max_memory_bytes: 1_000_000_000, ..Settings::DEFAULT };
    Engine::new(settings, START)
}

/// Returns a server in which a client watches `count` tubes in addition to `default`.
fn engine_with_tubes(count: usize) -> (Engine, ConnKey) {
    let mut engine = engine();
    let client = engine.connect();
    for tube in 0..count {
        engine.ask(client, format!("watch tube{tube}\r\n"));
    }
    (engine, client)
}

/// Runs commands at another moment.
fn ask_at(engine: &mut Engine, conn: ConnKey, commands: &str, now: Nanos) -> String {
    engine.now = now;
    engine.ask(conn, commands)
}

fn next_slice(engine: &Engine, page: &mut Page) -> String {
    let mut text = String::new();
    page.write_slice(&engine.server.view(&Histogram::default(), engine.now), &mut text).unwrap();
    assert!(text.len() < SLICE_LEN + LONGEST_SAMPLE, "a slice of {} bytes", text.len());
    text
}

/// Returns a whole page and its number of slices.
fn page(engine: &Engine, tubes_max: usize) -> (Samples, usize) {
    let mut page = Page::new(tubes_max);
    let (mut text, mut slices) = (String::new(), 0);
    while !page.is_done() {
        text += &next_slice(engine, &mut page);
        slices += 1;
    }
    (Samples::read(&text), slices)
}

/// The samples of a page, by name and labels.
struct Samples(BTreeMap<String, f64>);

impl Samples {
    /// Parses a page as strictly as Prometheus does. In addition, each family must be in one piece
    /// under its help and its type, and no sample may come twice.
    fn read(text: &str) -> Samples {
        let mut samples = BTreeMap::new();
        let mut families = BTreeSet::new();
        let mut family = String::new();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').expect("a help has a text");
                assert!(help.ends_with('.'), "{line}");
                let kind = lines.next().and_then(|line| line.strip_prefix("# TYPE "));
                let (named, kind) = kind.unwrap().split_once(' ').unwrap();
                assert_eq!(named, name);
                assert!(["gauge", "counter", "histogram"].contains(&kind), "{kind}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
                assert!(families.insert(name.to_owned()), "{name} comes twice");
                family = name.to_owned();
                continue;
            }
            let (series, value) = line.rsplit_once(' ').expect("a sample has a value");
            let name = series.split('{').next().unwrap();
            let of_family = name.strip_prefix(&family);
            assert!(
                matches!(of_family, Some("" | "_bucket" | "_sum" | "_count")),
                "{line} stands below {family}"
            );
            let value: f64 = value.parse().unwrap();
            assert!(samples.insert(series.to_owned(), value).is_none(), "{series} comes twice");
        }
        Samples(samples)
    }

    fn get(&self, series: &str) -> f64 {
        *self.0.get(series).unwrap_or_else(|| panic!("there is no {series}"))
    }

    /// The samples of one family, by tube. Seconds are rounded.
    fn tubes(&self, name: &str) -> BTreeMap<&str, f64> {
        let prefix = format!("{name}{{tube=\"");
        let samples = self.0.iter().filter_map(|(series, value)| {
            let tube = series.strip_prefix(&prefix)?.split('"').next()?;
            Some((tube, value.round()))
        });
        samples.collect()
    }
}

/// Returns a server with jobs in all states, a pause, a timeout and a waiter.
fn busy_engine(now: Nanos) -> Engine {
    let mut engine = engine();
    let [producer, worker, waiter] = [(); 3].map(|()| engine.connect());
    for command in [
        "use mail\r\n",
        "put 5 0 60 5\r\nhello\r\n",
        "put 5000 0 60 5\r\nhello\r\n",
        "put 5 100 60 5\r\nhello\r\n",
        "put 5 0 60 5\r\nhello\r\n",
        "use print\r\n",
        "put 0 0 60 5\r\nhello\r\n",
        "pause-tube print 90\r\n",
    ] {
        engine.ask(producer, command);
    }
    let reserve = "watch mail\r\nwatch print\r\nreserve\r\nbury 1 7\r\nreserve\r\n";
    engine.ask(worker, reserve);
    // A TTR runs out, and the job is deleted.
    engine.ask(producer, "use quick\r\nput 0 0 1 0\r\n\r\n");
    engine.ask(worker, "watch quick\r\nreserve\r\nignore quick\r\n");
    engine.advance(Nanos::from_secs(2));
    engine.tick();
    engine.ask(producer, "watch quick\r\ndelete 6\r\nuse print\r\n");
    ask_at(&mut engine, waiter, "watch rare\r\nreserve\r\n", now);
    ask_at(&mut engine, producer, "put 0 0 1", now);
    engine
}

#[test]
fn the_page_agrees_with_stats() {
    let now = START + Nanos::from_secs(30);
    let mut engine = busy_engine(now);
    let asker = engine.connect();
    let stats = ask_at(&mut engine, asker, "stats\r\n", now);
    let (samples, _) = page(&engine, 1000);
    for (key, series) in [
        ("current-jobs-urgent", "beanstalkd_urgent_jobs"),
        ("current-jobs-ready", "beanstalkd_jobs{state=\"ready\"}"),
        ("current-jobs-reserved", "beanstalkd_jobs{state=\"reserved\"}"),
        ("current-jobs-delayed", "beanstalkd_jobs{state=\"delayed\"}"),
        ("current-jobs-buried", "beanstalkd_jobs{state=\"buried\"}"),
        ("cmd-put", "beanstalkd_commands_total{command=\"put\"}"),
        ("cmd-pause-tube", "beanstalkd_commands_total{command=\"pause-tube\"}"),
        ("job-timeouts", "beanstalkd_job_timeouts_total"),
        ("total-jobs", "beanstalkd_jobs_created_total"),
        ("max-job-size", "beanstalkd_job_size_limit_bytes"),
        ("current-tubes", "beanstalkd_tubes"),
        ("current-producers", "beanstalkd_producers"),
        ("current-workers", "beanstalkd_workers"),
        ("current-waiting", "beanstalkd_connections{state=\"waiting\"}"),
        ("total-connections", "beanstalkd_connections_opened_total"),
    ] {
        let expected: f64 = field(&stats, key).unwrap().parse().unwrap();
        assert_eq!(samples.get(series), expected, "{key}");
    }
    let by_state =
        |state: &str| samples.get(&format!("beanstalkd_connections{{state=\"{state}\"}}"));
    assert_eq!(["idle", "receiving", "sending", "closing"].map(by_state), [2.0, 1.0, 0.0, 0.0]);
    assert_eq!(samples.get("beanstalkd_draining"), 0.0);
    assert_eq!(samples.get("process_start_time_seconds"), 1000.0);
    assert_eq!(samples.get("beanstalkd_job_memory_limit_bytes"), 1e9);
    assert_eq!(samples.get("beanstalkd_build_info{version=\"0.1.0\",protocol=\"1.13\"}"), 1.0);

    assert_eq!(field(&stats, "job-timeouts"), Some("1"));
    assert_eq!(samples.tubes("beanstalkd_tube_deletes_total")["quick"], 1.0);
    for tube in ["default", "mail", "print", "quick", "rare"] {
        let stats = ask_at(&mut engine, asker, &format!("stats-tube {tube}\r\n"), now);
        for (key, name, state) in [
            ("current-jobs-urgent", "urgent_jobs", ""),
            ("current-jobs-ready", "jobs", "ready"),
            ("current-jobs-reserved", "jobs", "reserved"),
            ("current-jobs-delayed", "jobs", "delayed"),
            ("current-jobs-buried", "jobs", "buried"),
            ("total-jobs", "jobs_created_total", ""),
            ("current-using", "using", ""),
            ("current-watching", "watching", ""),
            ("current-waiting", "waiting", ""),
            ("cmd-delete", "deletes_total", ""),
            ("cmd-pause-tube", "pauses_total", ""),
            ("pause", "pause_seconds", ""),
            ("pause-time-left", "pause_left_seconds", ""),
        ] {
            let expected: f64 = field(&stats, key).unwrap().parse().unwrap();
            let state = if state.is_empty() { "" } else { &format!(",state=\"{state}\"") };
            let series = format!("beanstalkd_tube_{name}{{tube=\"{tube}\"{state}}}");
            assert_eq!(samples.get(&series).floor(), expected, "{key} of {tube}");
        }
    }
    let ages = samples.tubes("beanstalkd_tube_oldest_ready_job_age_seconds");
    let expected =
        [("default", 0.0), ("mail", 30.0), ("print", 30.0), ("quick", 0.0), ("rare", 0.0)];
    assert_eq!(ages, BTreeMap::from(expected));
}

#[test]
fn tubes_beyond_the_limit_share_a_sample() {
    let mut engine = engine();
    let client = engine.connect();
    for tube in 0..25 {
        let put = format!("use tube{tube}\r\nput 0 0 9 1\r\nx\r\nwatch tube{tube}\r\n");
        ask_at(&mut engine, client, &put, START + Nanos::from_secs(tube));
    }
    engine.now = START + Nanos::from_secs(100);
    for (limit, named) in [(0, 0_u8), (10, 10), (26, 26), (1000, 26)] {
        let (samples, _) = page(&engine, limit);
        let jobs = samples.tubes("beanstalkd_tube_jobs_created_total");
        assert_eq!(jobs.values().sum::<f64>(), 25.0);
        let others = 26 - named;
        assert_eq!(samples.get("beanstalkd_tubes_told_together"), f64::from(others));
        assert_eq!(jobs.len(), usize::from(named) + usize::from(others > 0), "{jobs:?}");
        assert_eq!(jobs.contains_key("other tubes"), others > 0);
        let watching = samples.tubes("beanstalkd_tube_watching");
        assert_eq!(watching.values().sum::<f64>(), 26.0);
        if others > 0 {
            // The age of the first of them; `default` counts as a tube too.
            let ages = samples.tubes("beanstalkd_tube_oldest_ready_job_age_seconds");
            let first = if named == 0 { 0 } else { named - 1 };
            assert_eq!(ages["other tubes"], 100.0 - f64::from(first));
        }
    }
}

#[test]
fn the_work_of_a_slice_is_bounded() {
    let mut engine = engine();
    let client = engine.connect();
    let empty = page(&engine, 1000).1;
    // Tubes, ready jobs, connections and waiters.
    for tube in 0..2_000 {
        engine.ask(client, format!("watch tube{tube}\r\n"));
    }
    let with_tubes = page(&engine, 1000).1;
    assert!(with_tubes >= empty + 2_000 / 128, "{with_tubes} slices");
    for _ in 0..50_000 {
        engine.ask(client, "put 0 0 9 0\r\n\r\n");
    }
    let with_jobs = page(&engine, 1000).1;
    assert!(with_jobs >= with_tubes + 50_000 / 8192, "{with_jobs} slices");
    for _ in 0..5_000 {
        let waiter = engine.connect();
        engine.ask(waiter, "watch waited\r\nignore default\r\nreserve\r\n");
    }
    let (samples, with_waiters) = page(&engine, 3000);
    assert!(with_waiters >= with_jobs + 5_000 / 1024 + 5_000 / 512, "{with_waiters} slices");
    assert_eq!(samples.tubes("beanstalkd_tube_waiting")["waited"], 5_000.0);
}

#[test]
fn the_oldest_job_is_found_while_other_jobs_are_reserved() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut engine = engine();
    let client = engine.connect();
    let put = |engine: &mut Engine, pri: u32, now| {
        ask_at(engine, client, &format!("put {pri} 0 9 0\r\n\r\n"), now);
    };
    // The lowest priority of all.
    put(&mut engine, u32::MAX, START);
    let later = START + Nanos::from_secs(50);
    for _ in 0..20_000 {
        put(&mut engine, random.u32(..), later);
    }
    engine.now = START + Nanos::from_secs(80);
    let mut page = Page::new(1000);
    let mut text = String::new();
    while !page.is_done() {
        text += &next_slice(&engine, &mut page);
        for _ in 0..500 {
            engine.ask(client, "reserve\r\n");
        }
    }
    let samples = Samples::read(&text);
    let age = samples.tubes("beanstalkd_tube_oldest_ready_job_age_seconds")["default"];
    assert_eq!(age, 80.0);
}

#[test]
fn a_page_has_all_lasting_tubes_while_other_tubes_are_removed() {
    let (mut engine, client) = engine_with_tubes(1_000);
    let mut page = Page::new(10_000);
    let mut text = String::new();
    let mut gone = 0;
    while !page.is_done() {
        text += &next_slice(&engine, &mut page);
        // From all over the list, so that other tubes move to their places.
        for _ in 0..30.min(500 - gone) {
            let tube = gone * 7 % 500 * 2;
            engine.ask(client, format!("ignore tube{tube}\r\n"));
            gone += 1;
        }
    }
    assert_eq!(gone, 500);
    let samples = Samples::read(&text);
    let watching = samples.tubes("beanstalkd_tube_watching");
    for tube in (1..1_000).step_by(2) {
        assert!(watching.contains_key(&*format!("tube{tube}")), "tube{tube} is missing");
    }
}

#[test]
fn a_tube_that_is_removed_and_made_again_is_on_the_page_once() {
    let (mut engine, client) = engine_with_tubes(1_000);
    let mut page = Page::new(10_000);
    let mut text = String::new();
    let mut next = 0;
    while !page.is_done() {
        text += &next_slice(&engine, &mut page);
        for _ in 0..100 {
            let tube = next % 1_000;
            engine.ask(client, format!("ignore tube{tube}\r\nwatch tube{tube}\r\n"));
            next += 1;
        }
    }
    assert!(next > 1_000, "{next} tubes were made again");
    Samples::read(&text);
}

#[test]
fn the_page_has_sizes_and_syncs_of_the_binlog() {
    let directory = tempfile::tempdir().unwrap();
    let disk = beanstalkd::testing::Directory::lock(directory.path()).unwrap();
    let mut engine = engine();
    engine.server.recover(Box::new(disk), Syncing::EachIteration, START).unwrap();
    let client = engine.connect();
    engine.ask(client, "put 0 0 9 1\r\nx\r\nput 0 0 9 1\r\ny\r\ndelete 1\r\n");
    let (samples, _) = page(&engine, 1000);
    let value = |name: &str| samples.get(&format!("beanstalkd_binlog_{name}"));
    // A record of 84 bytes, the name of the tube, and the body with its CR LF.
    let record = 84.0 + 7.0 + 3.0;
    assert_eq!((value("live_bytes"), value("dead_bytes")), (record, record + 84.0));
    assert_eq!(value("records_written_total"), 3.0);
    assert_eq!((value("files"), value("full")), (2.0, 0.0));
    assert!(value("sync_seconds_count") >= 1.0);
    assert_eq!(value("sync_seconds_count"), value("sync_seconds_bucket{le=\"+Inf\"}"));
}

#[test]
fn the_page_has_the_body_cache_and_its_reads() {
    let settings = Settings { body_cache_bytes: Some(20), ..Settings::DEFAULT };
    let mut engine = Engine::new(settings, START);
    let disk = FakeDisk::default();
    engine.recover(&disk, Syncing::EachIteration).unwrap();
    let client = engine.connect();
    let put = |len: usize| format!("put 0 0 9 {len}\r\n{}\r\n", "x".repeat(len));
    // Of 12, 16, 30 and 40 bytes with their CR LF: all but the first are too much.
    engine.ask(client, put(10) + &put(14) + "use mail\r\n" + &put(28) + &put(38));
    // From the page cache, and from the disk after half a second.
    assert!(engine.ask(client, "peek 2\r\n").starts_with("FOUND 2 14\r\n"));
    disk.delay_reads();
    assert_eq!(engine.ask(client, "peek 3\r\n"), "");
    engine.advance(Nanos::from_millis(500));
    engine.tick();
    assert!(engine.ask(client, "").starts_with("FOUND 3 28\r\n"));
    disk.add_read_fault(ReadFault::FlippedBit);
    engine.ask(client, "peek 4\r\n");
    engine.tick();
    assert_eq!(engine.ask(client, ""), "NOT_FOUND\r\n");

    let (samples, _) = page(&engine, 1000);
    for (name, expected) in [
        ("body_cache_bytes", 12.0),
        ("body_cache_limit_bytes", 20.0),
        ("cold_jobs", 3.0),
        ("cold_body_bytes", 86.0),
        ("body_reads_total", 2.0),
        ("body_read_failures_total", 1.0),
        // The third one has waited too, for nothing.
        ("body_wait_seconds_count", 2.0),
        ("body_wait_seconds_bucket{le=\"0.25\"}", 1.0),
        ("body_wait_seconds_bucket{le=\"0.5\"}", 2.0),
        ("jobs{state=\"buried\"}", 1.0),
    ] {
        assert_eq!(samples.get(&format!("beanstalkd_{name}")), expected, "{name}");
    }
    // Each command takes some nanoseconds.
    let waited = samples.get("beanstalkd_body_wait_seconds_sum");
    assert!((waited - 0.5).abs() < 0.001, "{waited} s");
    let cold = BTreeMap::from([("default", 1.0), ("mail", 2.0)]);
    assert_eq!(samples.tubes("beanstalkd_tube_cold_jobs"), cold);
    let sum = BTreeMap::from([("other tubes", 3.0)]);
    assert_eq!(page(&engine, 0).0.tubes("beanstalkd_tube_cold_jobs"), sum);
}

#[test]
fn a_server_without_a_body_cache_has_no_metrics_of_it() {
    let mut engine = engine();
    engine.recover(&FakeDisk::default(), Syncing::EachIteration).unwrap();
    let (Samples(samples), _) = page(&engine, 1000);
    let of_cache = |name: &&String| name.contains("_cold_") || name.contains("_body_");
    assert_eq!(samples.keys().find(of_cache), None);
}

#[test]
fn the_binlog_is_full_while_it_exceeds_a_lower_limit() {
    let disk = FakeDisk::default();
    for (max_binlog_bytes, is_full) in [(u64::MAX, 0.0), (200_000, 1.0)] {
        let mut engine = Engine::new(Settings { max_binlog_bytes, ..Settings::DEFAULT }, START);
        engine.recover(&disk, Syncing::EachIteration).unwrap();
        let client = engine.connect();
        for _ in 0..5 {
            let reply = engine.ask(client, put(0, 0, 9, "x".repeat(60_000)));
            assert_eq!(reply == "OUT_OF_MEMORY\r\n", is_full > 0.0);
        }
        let (Samples(samples), _) = page(&engine, 1000);
        assert_eq!(samples["beanstalkd_binlog_full"], is_full);
    }
}

// ---- HTTP ----

/// Returns the response to a client that sends `request` at once and reads without delay.
fn respond(server: Option<&Server>, request: &str) -> String {
    let measurements = Measurements::default();
    let subject =
        server.map_or(ServerState::Starting, |server| ServerState::Serving(server, &measurements));
    let mut conn = HttpConn::new(1000, START);
    conn.receive(request.as_bytes(), subject, START).unwrap();
    let mut response = Vec::new();
    while !conn.is_lingering() {
        conn.write_slice(subject, START).unwrap();
        response.extend_from_slice(conn.to_send());
        conn.sent(conn.to_send().len(), START);
    }
    String::from_utf8(response).unwrap()
}

fn body(response: &str) -> &str {
    response.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn readiness_and_health_differ_while_the_server_starts_or_drains() {
    let mut engine = engine();
    let mut status = |path: &str, is_draining: Option<bool>| {
        if let Some(is_draining) = is_draining {
            engine.server.set_draining(is_draining);
        }
        let server = is_draining.map(|_| &engine.server);
        let response = respond(server, &format!("GET {path} HTTP/1.1\r\n\r\n"));
        response.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    for (is_draining, ready, metrics) in
        [(None, 503, 503), (Some(true), 503, 200), (Some(false), 200, 200)]
    {
        assert_eq!(status("/healthz", is_draining), 200);
        assert_eq!(status("/readyz", is_draining), ready, "{is_draining:?}");
        assert_eq!(status("/metrics", is_draining), metrics, "{is_draining:?}");
        assert_eq!(status("/", is_draining), metrics, "{is_draining:?}");
        assert_eq!(status("/tube/default", is_draining), metrics, "{is_draining:?}");
        assert_eq!(status("/metrics/", is_draining), 404);
    }
}

#[test]
fn a_chunked_response_has_the_whole_page() {
    let (engine, _) = engine_with_tubes(500);
    let whole = respond(Some(&engine.server), "GET /metrics HTTP/1.0\r\n\r\n");
    assert!(!whole.contains("chunked") && !whole.contains("Content-Length"));
    let whole = body(&whole);
    Samples::read(whole);
    let chunked = respond(Some(&engine.server), "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(chunked.contains("Transfer-Encoding: chunked\r\n"));
    let (mut rest, mut text, mut chunks) = (body(&chunked), String::new(), 0);
    loop {
        let (len, after) = rest.split_once("\r\n").unwrap();
        let len = usize::from_str_radix(len, 16).unwrap();
        text.push_str(&after[..len]);
        rest = after[len..].strip_prefix("\r\n").unwrap();
        if len == 0 {
            break;
        }
        chunks += 1;
    }
    assert!(rest.is_empty() && chunks > 10, "{chunks} chunks");
    assert_eq!(text, whole);
    for (path, status) in [("/metrics", "200 OK"), ("/nothing", "404 Not Found")] {
        let head = respond(Some(&engine.server), &format!("HEAD {path} HTTP/1.1\r\n\r\n"));
        assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")) && body(&head).is_empty());
    }
}

/// Opens the sockets for metrics on loopback; returns them and their address.
fn http_server() -> (MetricsServer, SocketAddr) {
    let listeners = listen::open(&Address::Host("127.0.0.1".into()), 0, None).unwrap();
    let address = listeners[0].to_string().parse().unwrap();
    (MetricsServer::new(listeners, 1000).unwrap(), address)
}

/// Runs the sockets until the client has the whole response, or an error.
fn response(http: &mut MetricsServer, client: &mut Socket, now: Nanos) -> std::io::Result<String> {
    let engine = engine();
    let measurements = Measurements::default();
    client.set_nonblocking(true)?;
    let mut response = Vec::new();
    for _ in 0..PATIENCE.as_millis() {
        http.turn(ServerState::Serving(&engine.server, &measurements), now)?;
        match client.read_to_end(&mut response) {
            Ok(_) => return Ok(String::from_utf8(response).unwrap()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
    panic!("no response within {PATIENCE:?}");
}

#[test]
fn a_client_that_sends_its_request_slowly_is_closed() {
    let (mut http, address) = http_server();
    let mut slow = connect(address);
    slow.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let mut quick = connect(address);
    quick.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    let received = response(&mut http, &mut quick, START).unwrap();
    assert!(received.ends_with("\r\n\r\nok\n"), "{received}");
    let due = START + Nanos::from_secs(5);
    assert!(http.next_due().is_some_and(|next| next > START && next <= due));
    // More bytes do not extend the deadline.
    slow.write_all(b"A").unwrap();
    let received = response(&mut http, &mut slow, due);
    assert!(received.as_ref().is_ok_and(String::is_empty) || received.is_err(), "{received:?}");
}

#[test]
fn silent_clients_delay_no_request() {
    let (mut http, address) = http_server();
    let connect = |_| connect(address);
    let mut idle: Vec<Socket> = (0..300).map(connect).collect();
    let mut last = connect(0);
    last.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    last.set_nonblocking(true).unwrap();
    let engine = engine();
    let measurements = Measurements::default();
    let mut response = Vec::new();
    // No time passes, and in each iteration 10 more connect.
    for _ in 0..50 {
        idle.extend((0..10).map(connect));
        http.turn(ServerState::Serving(&engine.server, &measurements), START).unwrap();
        if last.read_to_end(&mut response).is_ok() {
            break;
        }
    }
    let response = String::from_utf8(response).unwrap();
    assert!(response.ends_with("\r\n\r\nok\n"), "{response}");
}

#[test]
fn a_late_request_is_served_among_idle_connections() {
    let (mut http, address) = http_server();
    let mut late = connect(address);
    let _idle: Vec<Socket> = (0..60).map(|_| connect(address)).collect();
    let engine = engine();
    let measurements = Measurements::default();
    for _ in 0..10 {
        http.turn(ServerState::Serving(&engine.server, &measurements), START).unwrap();
    }
    late.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    assert!(response(&mut http, &mut late, START).unwrap().ends_with("ok\n"));
}

/// Returns a server whose page is larger than the buffers of a connection.
fn engine_with_a_long_page() -> Engine {
    let mut engine = engine();
    let client = engine.connect();
    for tube in 0..1_000 {
        engine.ask(client, format!("watch tube{tube:0>150}\r\n"));
    }
    engine
}

#[test]
fn a_client_that_reads_byte_by_byte_is_late_after_30_seconds() {
    let engine = engine_with_a_long_page();
    let measurements = Measurements::default();
    let subject = ServerState::Serving(&engine.server, &measurements);
    let mut conn = HttpConn::new(1000, START);
    conn.receive(b"GET /metrics HTTP/1.1\r\n\r\n", subject, START).unwrap();
    for second in (9..30).step_by(9) {
        let now = START + Nanos::from_secs(second);
        conn.write_slice(subject, now).unwrap();
        assert!(!conn.is_expired(now), "after {second} seconds");
        conn.sent(1, now);
    }
    let end = START + Nanos::from_secs(30);
    assert_eq!(conn.deadline(), end);
    assert!(conn.is_expired(end));
}

#[test]
fn clients_that_read_byte_by_byte_do_not_keep_a_new_client_out() {
    // The buffers of a Unix socket do not grow to the size of the page.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics");
    let at_path = Address::Unix { path: path.clone(), mode: None };
    let mut listeners = listen::open(&at_path, 0, None).unwrap();
    listeners.extend(listen::open(&Address::Host("127.0.0.1".into()), 0, None).unwrap());
    let address: SocketAddr = listeners[1].to_string().parse().unwrap();
    let mut http = MetricsServer::new(listeners, 1000).unwrap();

    let engine = engine_with_a_long_page();
    let measurements = Measurements::default();
    let subject = ServerState::Serving(&engine.server, &measurements);
    let slow: Vec<Socket> = (0..64).map(|_| connect(unix(&path))).collect();
    for mut client in &slow {
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    }
    // One turn accepts 32 connections.
    for _ in 0..2 {
        http.turn(subject, START).unwrap();
    }
    let mut scraper = connect(address);
    scraper.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    // The buffers fill up, and then each client reads a byte.
    let now = START + Nanos::from_secs(1);
    let due = START + Nanos::from_secs(2);
    let reads_a_byte = |mut client: &Socket| client.read(&mut [0]).is_ok_and(|len| len == 1);
    for _ in 0..2 {
        wait_until("the responses wait for the slow clients", || {
            (0..1_000).any(|_| {
                http.turn(subject, now).unwrap();
                http.next_due() == Some(due)
            })
        });
        assert!(slow.iter().all(reads_a_byte));
    }
    scraper.set_nonblocking(true).unwrap();
    assert!(scraper.read(&mut [0]).is_err(), "a slow client is closed too soon");
    assert!(response(&mut http, &mut scraper, due).unwrap().ends_with("ok\n"));
    // Exactly one connection is evicted.
    let ends = |mut client: &Socket| client.read_to_end(&mut Vec::new()).is_ok();
    slow.iter().for_each(|client| client.set_nonblocking(true).unwrap());
    assert_eq!(slow.iter().filter(|client| ends(client)).count(), 1);
}

// ---- The binary ----

#[test]
fn the_binary_serves_metrics_at_the_address_of_its_flag() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics");
    let unix_flag = format!("unix:{}", path.display());
    for metrics in ["127.0.0.1:0", &unix_flag] {
        let flags = [&ON_LOOPBACK[..], &["--metrics", metrics]].concat();
        let mut daemon = Daemon::start(process::BEANSTALKD, &flags);
        let queue = daemon.address();
        let address = daemon.wait_for_value("serving metrics on ");
        let address = address.parse::<SocketAddr>().map_or_else(|_| unix(&path), SockAddr::from);
        let get = |path: &str| {
            let mut client = Client::connect(address.clone());
            client.send(format!("GET {path} HTTP/1.0\r\n\r\n"));
            String::from_utf8(client.rest()).unwrap()
        };
        let mut client = Client::connect(queue);
        client.expect("use mail\r\n", "USING mail");
        assert!(get("/readyz").starts_with("HTTP/1.1 200 "));
        let response = get("/metrics");
        let samples = Samples::read(body(&response));
        assert_eq!(samples.get("beanstalkd_tube_using{tube=\"mail\"}"), 1.0);
        assert!(samples.get("process_resident_memory_bytes") > 500_000.0);
        assert!(samples.get("beanstalkd_turn_seconds_count") > 1.0);
        daemon.signal(Signal::USR1);
        assert!(get("/readyz").starts_with("HTTP/1.1 503 "));
        assert!(get("/healthz").starts_with("HTTP/1.1 200 "));
    }
}

#[test]
fn the_server_does_not_start_without_the_address_for_metrics() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = run(&["-l", "127.0.0.1", "-p", "0", "--metrics", &address]);
    assert_eq!(output.status.code(), Some(111));
    assert!(process::text(&output.stderr).contains(&address));
}
