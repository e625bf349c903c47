//! Metrics over HTTP: the page agrees with `stats` and has the format of Prometheus, and no client can
//! delay the server.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod harness;
#[path = "status_page/site.rs"]
mod site;

use harness::client::{Client, connect, unix};
use harness::driver::{Driver, End, Http, HttpSockets, Nanos, Options, Settings, Subject};
use harness::fake_disk::{FakeDisk, ReadFault};
use harness::process::{self, Daemon, ON_LOOPBACK};
use harness::request::put;
use harness::wait_until;
use harness::yaml::{field, number};
use rustix::process::Signal;
use serde_json::Value;
use site::{HTML, JSON, PUT, Response, START, Site, TEXT, get, idle_response};
use socket2::{SockAddr, Socket};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;

impl Site {
    fn samples(&mut self) -> Samples {
        Samples::read(&self.body("/metrics", TEXT))
    }
}

struct Samples(BTreeMap<String, f64>);

impl Samples {
    /// Reads the samples of a page, of which none may come twice. A snapshot shows the form of the page, and
    /// promtool checks it.
    fn read(text: &str) -> Samples {
        let mut samples = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect("a sample has a value");
            let before = samples.insert(series.to_owned(), value.parse().unwrap());
            assert!(before.is_none(), "{series} comes twice");
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

// ---- Values ----

#[test]
fn the_pages_agree_with_stats() {
    let mut site = Site::busy(1000);
    let stats = site.ask("stats\r\n");
    let (samples, page) = (site.samples(), site.json("/"));
    for (key, series, name) in [
        ("current-jobs-urgent", "urgent_jobs", "urgent"),
        ("current-jobs-ready", "jobs{state=\"ready\"}", "ready"),
        ("current-jobs-reserved", "jobs{state=\"reserved\"}", "reserved"),
        ("current-jobs-delayed", "jobs{state=\"delayed\"}", "delayed"),
        ("current-jobs-buried", "jobs{state=\"buried\"}", "buried"),
        ("cmd-put", "commands_total{command=\"put\"}", ""),
        ("cmd-pause-tube", "commands_total{command=\"pause-tube\"}", ""),
        ("job-timeouts", "job_timeouts_total", "timeouts"),
        ("total-jobs", "jobs_created_total", ""),
        ("max-job-size", "job_size_limit_bytes", ""),
        ("current-tubes", "tubes", "tubes"),
        ("current-producers", "producers", ""),
        ("current-workers", "workers", "workers"),
        ("current-waiting", "connections{state=\"waiting\"}", "waiting"),
        ("total-connections", "connections_opened_total", "connections"),
    ] {
        let expected = number(&stats, key);
        assert_eq!(samples.get(&format!("beanstalkd_{series}")).to_string(), expected.to_string());
        assert!(name.is_empty() || page["totals"][name] == expected, "{key}");
    }
    for tube in ["default", "mail", "print", "quick", "rare"] {
        let stats = site.ask(format!("stats-tube {tube}\r\n"));
        let facts = site.json(&format!("/tube/{tube}"));
        let rows = page["tubes"].as_array().unwrap();
        let row = rows.iter().find(|row| row["name"] == tube).unwrap();
        for (key, name, member) in [
            ("current-jobs-urgent", "urgent_jobs", "urgent"),
            ("current-jobs-ready", "jobs", "ready"),
            ("current-jobs-reserved", "jobs", "reserved"),
            ("current-jobs-delayed", "jobs", "delayed"),
            ("current-jobs-buried", "jobs", "buried"),
            ("total-jobs", "jobs_created_total", "puts"),
            ("current-using", "using", "using"),
            ("current-watching", "watching", "watching"),
            ("current-waiting", "waiting", "waiting"),
            ("cmd-delete", "deletes_total", "deletes"),
            ("cmd-pause-tube", "pauses_total", "pauses"),
            ("pause", "pause_seconds", ""),
            ("pause-time-left", "pause_left_seconds", "pause_left_seconds"),
        ] {
            let expected: f64 = field(&stats, key).unwrap().parse().unwrap();
            let state = if name == "jobs" { format!(",state=\"{member}\"") } else { String::new() };
            let series = format!("beanstalkd_tube_{name}{{tube=\"{tube}\"{state}}}");
            assert_eq!(samples.get(&series).floor(), expected, "{key} of {tube}");
            // Rounded down, as `stats` does. The table has fewer members.
            let is_expected = |value: &Value| value.as_f64().map(f64::floor) == Some(expected);
            assert!(member.is_empty() || is_expected(&facts[member]), "{key} of {tube}");
            assert!(row[member].is_null() || is_expected(&row[member]), "{key} of {tube}");
        }
    }
    // All samples, and the tubes together. This server has run the same commands.
    let mut site = Site::busy(0);
    site.ask(format!("stats\r\n{}", "stats-tube default\r\n".repeat(5)));
    let page = site.body("/metrics", TEXT);
    let page: Vec<&str> = page.lines().filter(|line| !line.contains("_bucket{")).collect();
    insta::assert_snapshot!("metrics", site.redacted(&page.join("\n")));
}

#[test]
fn tubes_beyond_the_limit_share_a_sample() {
    for (limit, named) in [(0, 0_u8), (10, 10), (26, 26), (1000, 26)] {
        let mut site = Site::listing(limit, Site::SETTINGS, None);
        for tube in 0..25 {
            site.ask(format!("use tube{tube}\r\nput 0 0 9 1\r\nx\r\nwatch tube{tube}\r\n"));
            site.driver.advance(Nanos::from_secs(1));
        }
        site.driver.advance(Nanos::from_secs(75));
        let samples = site.samples();
        let jobs = samples.tubes("beanstalkd_tube_jobs_created_total");
        assert_eq!(jobs.values().sum::<f64>(), 25.0);
        let others = 26 - named;
        assert_eq!(samples.get("beanstalkd_tubes_aggregated"), f64::from(others));
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
fn the_page_has_the_sizes_of_the_binlog() {
    let disk = FakeDisk::default();
    let settings = Settings { binlog_file_size: 4096, ..Settings::DEFAULT };
    let mut site = Site::start(settings, Some(&disk));
    site.ask("put 0 0 9 1\r\nx\r\nput 0 0 9 1\r\ny\r\ndelete 1\r\n");
    let samples = site.samples();
    let value = |name: &str| samples.get(&format!("beanstalkd_binlog_{name}"));
    // A record of 84 bytes, the name of the tube, and the body with its CR LF.
    let record = 84.0 + 7.0 + 3.0;
    assert_eq!((value("live_bytes"), value("dead_bytes")), (record, record + 84.0));
    assert_eq!((value("records_written_total"), value("files"), value("full")), (3.0, 2.0, 0.0));
    // Without a body cache it has no metrics of it.
    let of_cache = |name: &&String| name.contains("_cold_") || name.contains("_body_");
    assert_eq!(samples.0.keys().find(of_cache), None);
    // The binlog is full while it exceeds a lower limit.
    assert_eq!(site.ask(put(0, 0, 9, "x".repeat(60_000))), "INSERTED 3\r\n");
    let mut site = Site::start(Settings { max_binlog_bytes: 8192, ..settings }, Some(&disk));
    assert_eq!(site.ask(put(0, 0, 9, "x".repeat(60_000))), "OUT_OF_MEMORY\r\n");
    assert_eq!(site.samples().get("beanstalkd_binlog_full"), 1.0);
}

#[test]
fn the_page_has_the_body_cache_and_its_reads() {
    let settings = Settings { body_cache_bytes: Some(20), ..Settings::DEFAULT };
    let disk = FakeDisk::default();
    let mut site = Site::start(settings, Some(&disk));
    // Of 12, 16, 30 and 40 bytes with their CR LF: all but the first are too much.
    let puts = [10, 14, 28, 38].map(|len| put(0, 0, 9, "x".repeat(len)));
    let [first, second, third, fourth] = &puts;
    site.ask([first, second, b"use mail\r\n".as_slice(), third, fourth].concat());
    // From the page cache, and from the disk after 0.65 s.
    assert!(site.ask("peek 2\r\n").starts_with("FOUND 2 14\r\n"));
    disk.faults().reads_late = true;
    site.driver.receive(site.client, "peek 3\r\n");
    site.driver.iterate();
    assert_eq!(site.driver.received(site.client), b"");
    site.driver.now = site.driver.now + Nanos::from_millis(650);
    assert!(site.ask("").starts_with("FOUND 3 28\r\n"));
    disk.faults().of_reads.push_back(ReadFault::FlippedBit);
    site.ask("peek 4\r\n");
    site.driver.now = site.driver.now + Nanos::from_nanos(5_000);
    assert_eq!(site.ask(""), "NOT_FOUND\r\n");
    // Another attempt, from the page cache.
    disk.faults().reads_late = false;
    disk.faults().of_reads.push_back(ReadFault::FlippedBit);
    assert_eq!(site.ask("peek 4\r\n"), "NOT_FOUND\r\n");

    let page = site.body("/metrics", TEXT);
    let is_of_cache = |line: &&str| {
        !line.contains("_bucket{")
            && !line.starts_with('#')
            && (line.contains("_body_") || line.contains("cold_"))
    };
    let lines: Vec<&str> = page.lines().filter(is_of_cache).collect();
    insta::assert_snapshot!("metrics-of-the-body-cache", site.redacted(&lines.join("\n")));
    // The third read has waited too, for 5 us and for nothing.
    let wait = |le: &str| format!("\nbeanstalkd_body_wait_seconds_bucket{{le=\"{le}\"}}");
    assert!(page.contains(&(wait("0.5") + " 1")) && page.contains(&(wait("1") + " 2")));
    let pages = ["/?sort=cold", "/tube/mail"].map(|path| site.body(path, TEXT)).concat();
    insta::assert_snapshot!("pages-of-the-body-cache", site.redacted(&pages));
    let html = site.body("/", HTML);
    assert!(html.contains("<div><dt>cold bodies<dd>0.0 MiB</div>"), "{html}");
    // A read that is tried again is no failure.
    disk.faults().of_reads.push_back(ReadFault::TooManyFiles);
    assert_eq!(site.ask("peek 2\r\n"), "");
    site.driver.advance(Nanos::from_millis(200));
    assert!(site.ask("").starts_with("FOUND 2 14\r\n"));
    assert_eq!(site.samples().get("beanstalkd_body_read_failures_total"), 2.0);
    let mut site = Site::listing(0, settings, Some(&disk));
    let sum = BTreeMap::from([("other tubes", 3.0)]);
    assert_eq!(site.samples().tubes("beanstalkd_tube_cold_jobs"), sum);
}

// ---- Pieces ----

#[test]
fn the_work_of_a_piece_is_bounded() {
    let mut site = Site::listing(3000, Site::SETTINGS, None);
    let mut last = [0; 3];
    // Asserts how many more pieces each page has since the last call.
    let mut expect_more = |site: &mut Site, least: [usize; 3]| {
        let paths = [("/metrics", TEXT), ("/", HTML), ("/tube/default", HTML)];
        let pieces = paths.map(|(path, accept)| site.get(path, accept).pieces);
        for page in 0..3 {
            let more = pieces[page] - last[page].min(pieces[page]);
            assert!(more >= least[page], "{more} more pieces of {}", paths[page].0);
        }
        last = pieces;
    };
    expect_more(&mut site, [1, 1, 1]);
    site.watch_tubes(2_000, 0);
    expect_more(&mut site, [2_000 / 128, 2_000 / 128, 0]);
    // Each job is scanned.
    let put = |pri| format!("put {pri} 0 9000 0\r\n\r\n");
    site.ask((0..50_000).rev().map(put).collect::<String>());
    expect_more(&mut site, [50_000 / 8_192; 3]);
    for _ in 0..5_000 {
        let waiter = site.driver.connect();
        site.driver.receive(waiter, "watch waited\r\nignore default\r\nreserve\r\n");
    }
    site.driver.settle();
    expect_more(&mut site, [5_000 / 1_024, 0, 0]);
    assert_eq!(site.samples().tubes("beanstalkd_tube_waiting")["waited"], 5_000.0);
    site.ask("use waited\r\nput 0 0 9000 0\r\n\r\n");
    assert_eq!(site.samples().tubes("beanstalkd_tube_waiting")["waited"], 4_999.0);
    site.ask("reserve\r\n".repeat(5_000));
    // The jobs that are held for the longest come first.
    let page = site.json("/tube/default");
    let held = page["jobs"].as_array().unwrap().iter().find(|job| job["state"] == "reserved");
    assert_eq!(held.unwrap()["id"], 50_000);
    // Their worker deletes jobs meanwhile.
    let mut deleted = 45_000;
    let page = site.request_while(get("/tube/default", JSON), |site| {
        let next = (deleted + 150).min(49_900);
        site.ask((deleted..next).map(|id| format!("delete {}\r\n", id + 1)).collect::<String>());
        deleted = next;
    });
    assert!(serde_json::from_str::<Value>(&page.body).is_ok(), "{}", page.body);
}

#[test]
fn the_oldest_job_is_found_while_other_jobs_are_reserved() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut site = Site::new();
    // The lowest priority of all.
    site.ask(put(u32::MAX, 0, 9000, ""));
    site.driver.advance(Nanos::from_secs(50));
    site.ask((0..20_000).flat_map(|_| put(random.u32(..), 0, 9000, "")).collect::<Vec<u8>>());
    site.driver.advance(Nanos::from_secs(30));
    let page = site.request_while(get("/metrics", TEXT), |site| {
        site.ask("reserve-with-timeout 0\r\n".repeat(500));
    });
    let samples = Samples::read(&page.body);
    let ages = samples.tubes("beanstalkd_tube_oldest_ready_job_age_seconds");
    assert_eq!(ages["default"], 80.0);
}

#[test]
fn pages_have_each_tube_once_while_tubes_are_removed_and_made_again() {
    for accept in [TEXT, JSON] {
        let mut site = Site::listing(10_000, Site::SETTINGS, None);
        site.watch_tubes(1_000, 0);
        // These stay. The page has only those that have jobs.
        let shown = if accept == TEXT { 1_000 } else { 100 };
        let lasting = (1..shown).step_by(2).map(|tube| format!("tube{tube}"));
        let lasting: Vec<String> = lasting.collect();
        site.ask(lasting.iter().map(|tube| format!("use {tube}\r\n{PUT}")).collect::<String>());
        let path = if accept == TEXT { "/metrics" } else { "/?sort=ready" };
        let mut gone = 0;
        let page = site.request_while(get(path, accept), |site| {
            // From all over the list, so that other tubes move to their places.
            for _ in 0..60 {
                let tube = gone * 7 % 500 * 2;
                site.ask(format!("ignore tube{tube}\r\n"));
                if gone % 3 == 0 {
                    site.ask(format!("watch tube{tube}\r\n"));
                }
                gone += 1;
            }
        });
        assert!(gone > 500, "{gone} tubes are gone");
        if accept == TEXT {
            Samples::read(&page.body);
        }
        for tube in lasting {
            let series = format!("\nbeanstalkd_tube_watching{{tube=\"{tube}\"}} 1\n");
            let row = format!("{{\"name\":\"{tube}\",");
            let count = [series, row].map(|text| page.body.matches(&text).count());
            assert_eq!(count[0] + count[1], 1, "{tube} in {path}");
        }
    }
}

// ---- Outcomes ----

#[test]
fn waits_runs_and_ends_of_reservations_are_counted_by_tube() {
    let mut site = Site::new();
    let [producer, worker, other] = site.driver.clients();
    site.driver.ask(producer, "use a\r\n");
    for client in [worker, other] {
        site.driver.ask(client, "watch a\r\nignore default\r\n");
    }
    let sample = |site: &mut Site, text: &str| site.samples().get(text);
    let page = site.body("/metrics", TEXT);
    assert!(!page.contains("beanstalkd_tube_kicks_total{"), "nothing is counted");
    // The wait counts from the end of the delay, and only once. A touch does not restart the run.
    site.driver.ask(producer, "put 0 5 100 1\r\na\r\nput 0 0 1 1\r\nb\r\nput 0 0 100 1\r\nc\r\n");
    site.driver.advance(Nanos::from_millis(5_500));
    site.driver.ask(worker, "reserve-job 1\r\n");
    site.driver.advance(Nanos::from_secs(30));
    site.driver.ask(worker, "touch 1\r\n");
    site.driver.advance(Nanos::from_secs(40));
    site.driver.ask(worker, "release 1 0 0\r\nreserve-job 1\r\n".repeat(70));
    site.driver.advance(Nanos::from_secs(50));
    site.driver.ask(worker, "touch 1\r\n");
    site.driver.advance(Nanos::from_secs(50));
    site.driver.ask(worker, "delete 1\r\n");
    const WAITS: &str = "beanstalkd_tube_job_wait_seconds";
    const RUNS: &str = "beanstalkd_tube_job_run_seconds";
    let bucket = |name, le| format!("{name}_bucket{{tube=\"a\",le=\"{le}\"}}");
    for (name, bounds) in [
        (WAITS, [("0.1", 0.0), ("1", 1.0), ("+Inf", 1.0)]),
        (RUNS, [("60", 0.0), ("600", 1.0), ("+Inf", 1.0)]),
    ] {
        for (bound, count) in bounds {
            assert_eq!(sample(&mut site, &bucket(name, bound)), count, "{name} up to {bound}");
        }
    }
    // A timeout, a bury, a lost connection, and a delete of a job that no connection holds.
    site.driver.ask(other, "reserve-job 2\r\n");
    site.driver.advance(Nanos::from_secs(2));
    site.driver.ask(other, "reserve-job 3\r\nbury 3 0\r\nreserve-job 2\r\n");
    site.driver.end(other, End::HangUp);
    site.driver.settle();
    site.driver.ask(producer, "kick 10\r\ndelete 3\r\n");
    for (how, count) in
        [("delete", 1.0), ("release", 70.0), ("bury", 1.0), ("timeout", 1.0), ("disconnect", 1.0)]
    {
        let name = format!("beanstalkd_tube_reservations_ended_total{{tube=\"a\",how=\"{how}\"}}");
        assert_eq!(sample(&mut site, &name), count, "{how}");
    }
    assert_eq!(sample(&mut site, "beanstalkd_tube_kicks_total{tube=\"a\"}"), 1.0);
    assert_eq!(sample(&mut site, &format!("{WAITS}_count{{tube=\"a\"}}")), 3.0);
    // A flush takes a job from its holder: the reservation has ended, but the job has not run.
    site.driver.ask(worker, "reserve\r\n");
    site.driver.ask(producer, "flush-tube a\r\n");
    site.driver.advance(Nanos::from_millis(1));
    let deletes = "beanstalkd_tube_reservations_ended_total{tube=\"a\",how=\"delete\"}";
    assert_eq!(sample(&mut site, deletes), 2.0);
    assert_eq!(sample(&mut site, &format!("{RUNS}_count{{tube=\"a\"}}")), 1.0);
}

#[test]
fn keys_that_only_bound_how_many_jobs_run_are_no_unique_keys() {
    let mut site = Site::new();
    site.ask("put 0 0 9 1 con:k\r\nx\r\nput 0 0 9 1 con:k idp:a\r\nx\r\ndelete 1\r\n");
    assert_eq!(site.samples().get("beanstalkd_unique_keys{state=\"job\"}"), 1.0);
}

#[test]
fn a_thousand_tubes_with_outcomes_fit_in_two_megabytes() {
    let mut site = Site::new();
    for tube in 0..999 {
        let name = format!("a-name-of-20-bytes-{tube:03}");
        site.ask(format!(
            "use {name}\r\nput 0 0 9 1\r\nx\r\nreserve-job {id}\r\nrelease {id} 0 0\r\n\
             reserve-job {id}\r\nbury {id} 0\r\nkick 1\r\nreserve-job {id}\r\ndelete {id}\r\n\
             put 0 0 9 1\r\nx\r\n",
            id = 2 * tube + 1
        ));
    }
    let page = site.body("/metrics", TEXT);
    assert!(page.len() < 2_000_000, "{} bytes", page.len());
    let samples = site.samples();
    assert_eq!(samples.get("beanstalkd_tubes_aggregated"), 0.0);
    for (name, listed) in [("wait", 300), ("run", 300), ("", 1000)] {
        let (family, all) = match name {
            "" => ("beanstalkd_tube_jobs_created_total".to_owned(), 1998.0),
            name => (format!("beanstalkd_tube_job_{name}_seconds_count"), 999.0),
        };
        let tubes = samples.tubes(&family);
        assert_eq!(tubes.values().sum::<f64>(), all, "{family}");
        // `default` is a tube without outcomes.
        let named = tubes.len() - 1;
        assert!((listed - 1..=listed).contains(&named), "{named} tubes and others in {family}");
    }
}

// ---- HTTP ----

#[test]
fn readiness_and_health_differ_while_the_server_starts_stands_by_or_drains() {
    const PATHS: [&str; 6] = ["/healthz", "/readyz", "/metrics", "/", "/tube/default", "/metrics/"];
    let idle = |subject| PATHS.map(|path| idle_response(subject, &get(path, TEXT)));
    let status = |responses: [Response; 6]| responses.map(|response| response.status);
    assert_eq!(status(idle(Subject::Starting)), [200, 503, 503, 503, 503, 404]);
    assert_eq!(status(idle(Subject::StandingBy)), [200, 503, 200, 503, 503, 404]);
    for (subject, body) in
        [(Subject::Starting, "reading the binlog\n"), (Subject::StandingBy, "standing by\n")]
    {
        assert_eq!(idle_response(subject, &get("/readyz", TEXT)).body, body);
    }
    // A server that stands by names the one that leads.
    let [_, _, metrics, page, ..] = idle(Subject::StandingBy);
    assert_eq!(page.body, "b:11300 leads\n");
    let page = idle_response(Subject::StandingBy, &get("/", JSON));
    assert_eq!(page.body, "{\"leader\":\"b:11300\"}\n");
    let samples = Samples::read(&metrics.body);
    assert_eq!(samples.get("beanstalkd_leader_info{leader=\"b:11300\"}"), 1.0);
    let mut site = Site::new();
    assert_eq!(PATHS.map(|path| site.get(path, TEXT).status), [200, 200, 200, 200, 200, 404]);
    site.driver.set_draining(true);
    assert_eq!(PATHS.map(|path| site.get(path, TEXT).status), [200, 503, 200, 200, 200, 404]);
    assert_eq!(site.samples().get("beanstalkd_draining"), 1.0);
}

#[test]
fn invalid_requests_are_refused_and_only_the_first_is_answered() {
    let mut site = Site::new();
    let fields = |count| "A: b\r\n".repeat(count);
    for (request, status) in [
        ("POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".to_owned(), 405),
        ("POST / HTTP/1.1\r\n\r\n".to_owned(), 405),
        ("POST /tube/default HTTP/1.1\r\n\r\n".to_owned(), 405),
        ("POST /readyz HTTP/1.1\r\n\r\n".to_owned(), 405),
        ("GET /healthz HTTP/1.1\r\nHost : a\r\n\r\n".to_owned(), 400),
        ("GET /healthz\r\n\r\n".to_owned(), 400),
        ("\0\u{1}\u{2}\r\n".to_owned(), 400),
        (format!("GET /healthz HTTP/1.1\r\n{}\r\n", fields(64)), 200),
        (format!("GET /healthz HTTP/1.1\r\n{}\r\n", fields(65)), 431),
        (format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(4096)), 431),
        ("GET /nothing HTTP/1.1\r\n\r\n".to_owned(), 404),
        ("GET http://host/healthz HTTP/1.1\r\n\r\n".to_owned(), 200),
        ("\r\nGET /healthz HTTP/1.1\r\n\r\n".to_owned(), 200),
        ("GET /healthz HTTP/1.1\r\n\r\nGET /readyz HTTP/1.1\r\n\r\n".to_owned(), 200),
        ("GET /healthz HTTP/1.1\r\n\r\n\0garbage".to_owned(), 200),
    ] {
        let Response { status: received, head, body, .. } = site.request(&request);
        assert_eq!(received, status, "{request:.40}");
        let len = format!("\r\nContent-Length: {}\r\n", body.len());
        assert!(head.contains(&len) && head.contains("\r\nConnection: close\r\n"), "{head}");
        assert_eq!(head.contains("\r\nAllow: GET, HEAD\r\n"), status == 405, "{head}");
        assert!(!body.contains("HTTP/1.1 "), "{body}");
    }
    // The request may come in pieces.
    let mut http = Http::open(START);
    for byte in get("/healthz", TEXT).bytes() {
        assert!(http.next_piece(Subject::Serving(&site.driver)).is_empty());
        http.receive(Subject::Serving(&site.driver), [byte]);
    }
    let response = http.next_piece(Subject::Serving(&site.driver));
    assert!(response.ends_with(b"\r\n\r\nok\n") && http.is_done());
}

/// A slice ends after 16 KiB of text. Metrics without a sample have no text, and take time too.
#[test]
fn tubes_without_samples_are_passed_in_slices() {
    let mut site = Site::listing(20_000, Site::SETTINGS, None);
    site.watch_tubes(10_000, 4);
    let subject = Subject::Serving(&site.driver);
    let mut http = Http::open(START);
    http.receive(subject, "GET /metrics HTTP/1.0\r\n\r\n");
    let (mut has_text, mut empty) = (false, 0);
    while !http.is_done() {
        let piece = http.next_piece(subject);
        has_text |= piece.starts_with(b"# HELP");
        empty += usize::from(has_text && piece.is_empty());
    }
    // No job was reserved or kicked, so four metrics have no samples.
    assert!((36..=44).contains(&empty), "{empty} slices without text");
}

#[test]
fn a_chunked_response_has_the_whole_page() {
    let mut site = Site::new();
    site.watch_tubes(500, 0);
    let whole = site.get("/metrics", TEXT);
    assert!(!whole.head.contains("chunked") && !whole.head.contains("Content-Length"));
    let chunked = site.request("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
    assert!(chunked.head.contains("Transfer-Encoding: chunked\r\n"));
    let (mut rest, mut text, mut chunks) = (&*chunked.body, String::new(), 0);
    while let Some((len, after)) = rest.split_once("\r\n").filter(|(len, _)| *len != "0") {
        let len = usize::from_str_radix(len, 16).unwrap();
        text.push_str(&after[..len]);
        rest = after[len..].strip_prefix("\r\n").unwrap();
        chunks += 1;
    }
    assert!(rest == "0\r\n\r\n" && chunks > 10, "{chunks} chunks, then {rest}");
    assert_eq!(text, whole.body);
    let paths = ["/metrics", "/", "/tube/default", "/healthz", "/readyz", "/nothing"];
    for (path, status) in paths.into_iter().zip([200, 200, 200, 200, 200, 404]) {
        let Response { status: received, head, body, .. } =
            site.request(format!("HEAD {path} HTTP/1.1\r\n\r\n"));
        assert_eq!((received, &*body), (status, ""));
        let is_page = !["/healthz", "/readyz", "/nothing"].contains(&path);
        assert_eq!(head.contains("Transfer-Encoding: chunked\r\n"), is_page);
    }
}

// ---- Slow clients ----

const HEALTH: &[u8] = b"GET /healthz HTTP/1.1\r\n\r\n";

/// A server with its sockets for HTTP, in which no time passes but what a test lets pass.
struct Sockets {
    http: HttpSockets,
    driver: Driver,
    address: SocketAddr,
    directory: tempfile::TempDir,
}

impl Sockets {
    fn of(driver: Driver) -> Sockets {
        let directory = tempfile::tempdir().unwrap();
        let (http, address) = HttpSockets::open(directory.path().join("metrics"));
        Sockets { http, driver, address, directory }
    }

    fn new() -> Sockets {
        Sockets::of(Driver::new(Options::DEFAULT, START))
    }

    fn iterate(&mut self) {
        self.http.iterate(&self.driver);
    }

    /// Iterates until the connection ends, and returns what the client has received.
    fn response(&mut self, client: &mut Socket) -> String {
        client.set_nonblocking(true).unwrap();
        let mut response = Vec::new();
        wait_until("the connection ends", || {
            self.iterate();
            let read = client.read_to_end(&mut response);
            !read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
        });
        String::from_utf8(response).unwrap()
    }
}

#[test]
fn a_client_that_sends_its_request_slowly_is_closed() {
    let mut sockets = Sockets::new();
    let mut slow = connect(sockets.address);
    slow.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let mut quick = connect(sockets.address);
    quick.write_all(HEALTH).unwrap();
    assert!(sockets.response(&mut quick).ends_with("\r\n\r\nok\n"));
    let due = START + Nanos::from_secs(5);
    assert!(sockets.http.next_due() > START && sockets.http.next_due() <= due);
    // More bytes do not extend the deadline.
    slow.write_all(b"A").unwrap();
    sockets.driver.now = due;
    assert_eq!(sockets.response(&mut slow), "");
    // The connection of the quick one has ended too.
    assert_eq!(sockets.http.next_due(), Nanos::NEVER);
}

#[test]
fn silent_clients_delay_no_request() {
    let mut sockets = Sockets::new();
    let address = sockets.address;
    let mut idle: Vec<Socket> = (0..300).map(|_| connect(address)).collect();
    let mut last = connect(address);
    last.write_all(HEALTH).unwrap();
    // No time passes, and in each iteration 10 more connect.
    for _ in 0..20 {
        idle.extend((0..10).map(|_| connect(address)));
        sockets.iterate();
    }
    assert!(sockets.response(&mut last).ends_with("\r\n\r\nok\n"));
    // A late request is served among connections that are no more than the limit.
    let mut sockets = Sockets::new();
    let mut late = connect(sockets.address);
    let _idle: Vec<Socket> = (0..60).map(|_| connect(sockets.address)).collect();
    (0..10).for_each(|_| sockets.iterate());
    late.write_all(HEALTH).unwrap();
    assert!(sockets.response(&mut late).ends_with("ok\n"));
    // They are evicted before a client that reads a page.
    let mut site = Site::new();
    site.watch_tubes(1_000, 150);
    let mut sockets = Sockets::of(site.driver);
    let mut reader = connect(unix(&sockets.directory.path().join("metrics")));
    reader.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    sockets.iterate();
    let _idle: Vec<Socket> = (0..63).map(|_| connect(sockets.address)).collect();
    (0..10).for_each(|_| sockets.iterate());
    let mut last = connect(sockets.address);
    last.write_all(HEALTH).unwrap();
    assert!(sockets.response(&mut last).ends_with("ok\n"));
}

#[test]
fn a_client_that_reads_byte_by_byte_is_late_after_30_seconds() {
    let mut site = Site::new();
    site.watch_tubes(1_000, 150);
    let subject = Subject::Serving(&site.driver);
    let mut http = Http::open(START);
    http.receive(subject, "GET /metrics HTTP/1.1\r\n\r\n");
    for second in (9..30).step_by(9) {
        http.now = START + Nanos::from_secs(second);
        assert!(http.make_piece(subject));
        assert!(http.deadline() > http.now, "after {second} seconds");
        assert_eq!(http.take(subject, 1).len(), 1);
    }
    http.now = START + Nanos::from_secs(30);
    assert_eq!(http.deadline(), http.now);
    // One that reads nothing is late after 10 s.
    let mut http = Http::open(START);
    http.receive(subject, "GET /metrics HTTP/1.1\r\n\r\n");
    assert_eq!(http.deadline(), START + Nanos::from_secs(10));
}

#[test]
fn clients_that_read_byte_by_byte_do_not_keep_a_new_client_out() {
    let mut site = Site::new();
    site.watch_tubes(1_000, 150);
    let mut sockets = Sockets::of(site.driver);
    // The buffers of a Unix socket do not grow to the size of the page.
    let path = sockets.directory.path().join("metrics");
    let slow: Vec<Socket> = (0..64).map(|_| connect(unix(&path))).collect();
    for mut client in &slow {
        client.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    }
    // One iteration accepts 32 connections.
    sockets.iterate();
    sockets.iterate();
    let mut scraper = connect(sockets.address);
    scraper.write_all(HEALTH).unwrap();
    // The buffers fill up, and then each client reads a byte.
    sockets.driver.now = START + Nanos::from_secs(1);
    let due = START + Nanos::from_secs(2);
    let reads_a_byte = |mut client: &Socket| client.read(&mut [0]).is_ok_and(|len| len == 1);
    for _ in 0..2 {
        wait_until("the responses wait for the slow clients", || {
            (0..1_000).any(|_| {
                sockets.iterate();
                sockets.http.next_due() == due
            })
        });
        assert!(slow.iter().all(reads_a_byte));
    }
    scraper.set_nonblocking(true).unwrap();
    assert!(scraper.read(&mut [0]).is_err(), "a slow client is closed too soon");
    sockets.driver.now = due;
    assert!(sockets.response(&mut scraper).ends_with("ok\n"));
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
    for metrics in ["127.0.0.1:0", &format!("unix:{}", path.display())] {
        let binlog = tempfile::tempdir().unwrap();
        let binlog = ["-f", "0", "-b", process::path_text(binlog.path())];
        let flags = [&ON_LOOPBACK[..], &["--metrics", metrics], &binlog].concat();
        let mut daemon = Daemon::start(process::BEANSTALKD, &flags);
        let queue = daemon.address();
        let address = daemon.wait_for_value("serving metrics on ");
        let address = address.parse::<SocketAddr>().map_or_else(|_| unix(&path), SockAddr::from);
        let response = |path: &str| {
            let mut client = Client::connect(address.clone());
            client.send(get(path, TEXT));
            Response::parse(client.rest())
        };
        let mut client = Client::connect(queue);
        client.expect("use mail\r\n", "USING mail");
        client.expect(PUT, "INSERTED 1");
        client.expect("reserve-job 1\r\n", "RESERVED 1 1");
        client.expect("release 1 0 0\r\n", "RELEASED");
        assert_eq!(response("/readyz").status, 200);
        let samples = Samples::read(&response("/metrics").body);
        assert_eq!(samples.get("beanstalkd_tube_using{tube=\"mail\"}"), 1.0);
        let ended = "beanstalkd_tube_reservations_ended_total{tube=\"mail\",how=\"release\"}";
        assert_eq!(samples.get(ended), 1.0);
        assert!(samples.get("process_resident_memory_bytes") > 500_000.0);
        assert!(samples.get("beanstalkd_loop_iteration_seconds_count") > 1.0);
        // Waiting does not count.
        (0..20).for_each(|_| assert_eq!(response("/healthz").status, 200));
        let worked = Samples::read(&response("/metrics").body);
        let worked = worked.get("beanstalkd_loop_iteration_seconds_sum");
        let uptime = u32::try_from(client.stat("uptime")).unwrap() + 1;
        assert!(worked <= uptime.into(), "iterations of {worked} s in {uptime} s");
        let syncs = samples.get("beanstalkd_binlog_sync_seconds_count");
        let last_bucket = samples.get("beanstalkd_binlog_sync_seconds_bucket{le=\"+Inf\"}");
        assert!(syncs >= 1.0 && syncs == last_bucket, "{syncs} syncs");
        let page = response("/");
        assert!(page.body.lines().any(|line| line.starts_with("mail  ")), "{}", page.body);
        assert!(response("/tube/mail").body.starts_with("tube mail\nready 1, "));
        daemon.signal(Signal::USR1);
        wait_until("it drains", || response("/readyz").status == 503);
        assert_eq!(response("/healthz").status, 200);
        daemon.signal(Signal::USR2);
        wait_until("it is ready again", || response("/readyz").status == 200);
    }
}
