//! What the server tells of itself over HTTP: that the page says what `stats` says, in the format that
//! Prometheus reads, and that no visitor can hold anything up.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod made_up;
mod support;

use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Histogram;
use beanstalkd::testing::MetricsServer;
use beanstalkd::testing::Nanos;
use beanstalkd::testing::Syncing;
use beanstalkd::testing::{Address, listen};
use beanstalkd::testing::{HttpConn, ServerState};
use beanstalkd::testing::{LONGEST_SAMPLE, Page, SLICE_LEN};
use beanstalkd::testing::{Server, Settings};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use support::{BEANSTALKD, Daemon, PATIENCE, field};

const START: Nanos = Nanos::from_secs(1_000);

fn server() -> Server {
    let settings =
        Settings { max_job_size: 65535, binlog_file_size: 4096, max_memory_bytes: 1_000_000_000 };
    Server::new(settings, made_up::facts(START), START)
}

/// One with `count` tubes more, which a client watches.
fn server_with_tubes(count: usize) -> (Server, ConnKey) {
    let mut server = server();
    let client = server.connect().unwrap();
    for tube in 0..count {
        say(&mut server, client, &format!("watch tube{tube}\r\n"), START);
    }
    (server, client)
}

/// Sends commands and takes the replies.
fn say(server: &mut Server, key: ConnKey, commands: &str, now: Nanos) -> String {
    server.receive(key, commands.as_bytes(), now);
    let mut said = Vec::new();
    loop {
        let mut slices = [IoSlice::new(&[]); 64];
        let mut output_handle = server.output_handle(key);
        let filled = output_handle.next_slices(&mut slices);
        let before = said.len();
        slices[..filled].iter().for_each(|slice| said.extend_from_slice(slice));
        output_handle.sent(said.len() - before);
        if !server.actions(key).run {
            return String::from_utf8(said).unwrap();
        }
        server.resume(key, now);
    }
}

fn next_slice(server: &Server, page: &mut Page, now: Nanos) -> String {
    let mut text = String::new();
    page.go_on(&server.view(&Histogram::default(), now), &mut text).unwrap();
    assert!(text.len() < SLICE_LEN + LONGEST_SAMPLE, "a slice of {} bytes", text.len());
    text
}

/// A whole page, and in how many slices it came.
fn page(server: &Server, tubes_max: usize, now: Nanos) -> (Samples, usize) {
    let mut page = Page::new(tubes_max);
    let (mut text, mut slices) = (String::new(), 0);
    while !page.is_done() {
        text += &next_slice(server, &mut page, now);
        slices += 1;
    }
    (Samples::read(&text), slices)
}

/// What a page says, by name and labels.
struct Samples(BTreeMap<String, f64>);

impl Samples {
    /// Reads a page as strictly as Prometheus does, and more: each family stands in one piece under its
    /// help and its type, and nothing is told twice.
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

    /// Of one family, by tube; seconds are rounded, since each command has a moment of its own.
    fn tubes(&self, name: &str) -> BTreeMap<&str, f64> {
        let prefix = format!("{name}{{tube=\"");
        let samples = self.0.iter().filter_map(|(series, value)| {
            let tube = series.strip_prefix(&prefix)?.split('"').next()?;
            Some((tube, value.round()))
        });
        samples.collect()
    }
}

/// A server in which much has happened.
fn busy_server(now: Nanos) -> Server {
    let mut server = server();
    let [producer, worker, waiter] = [(); 3].map(|()| server.connect().unwrap());
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
        say(&mut server, producer, command, START);
    }
    let reserve = "watch mail\r\nwatch print\r\nreserve\r\nbury 1 7\r\nreserve\r\n";
    say(&mut server, worker, reserve, START);
    // One job comes back from its worker, and goes.
    say(&mut server, producer, "use quick\r\nput 0 0 1 0\r\n\r\n", START);
    say(&mut server, worker, "watch quick\r\nreserve\r\nignore quick\r\n", START);
    server.tick(START + Nanos::from_secs(2));
    say(&mut server, producer, "watch quick\r\ndelete 6\r\nuse print\r\n", START);
    say(&mut server, waiter, "watch rare\r\nreserve\r\n", now);
    say(&mut server, producer, "put 0 0 1", now);
    server
}

#[test]
fn the_page_says_what_stats_says() {
    let now = START + Nanos::from_secs(30);
    let mut server = busy_server(now);
    let asker = server.connect().unwrap();
    let stats = say(&mut server, asker, "stats\r\n", now);
    let (samples, _) = page(&server, 1000, now);
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
        let told: f64 = field(&stats, key).unwrap().parse().unwrap();
        assert_eq!(samples.get(series), told, "{key}");
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
        let stats = say(&mut server, asker, &format!("stats-tube {tube}\r\n"), now);
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
            let told: f64 = field(&stats, key).unwrap().parse().unwrap();
            let state = if state.is_empty() { "" } else { &format!(",state=\"{state}\"") };
            let series = format!("beanstalkd_tube_{name}{{tube=\"{tube}\"{state}}}");
            assert_eq!(samples.get(&series).floor(), told, "{key} of {tube}");
        }
    }
    let ages = samples.tubes("beanstalkd_tube_oldest_ready_job_age_seconds");
    let expected =
        [("default", 0.0), ("mail", 30.0), ("print", 30.0), ("quick", 0.0), ("rare", 0.0)];
    assert_eq!(ages, BTreeMap::from(expected));
}

#[test]
fn tubes_beyond_the_limit_are_told_together() {
    let mut server = server();
    let client = server.connect().unwrap();
    for tube in 0..25 {
        let put = format!("use tube{tube}\r\nput 0 0 9 1\r\nx\r\nwatch tube{tube}\r\n");
        say(&mut server, client, &put, START + Nanos::from_secs(tube));
    }
    let now = START + Nanos::from_secs(100);
    for (limit, named) in [(0, 0_u8), (10, 10), (26, 26), (1000, 26)] {
        let (samples, _) = page(&server, limit, now);
        let jobs = samples.tubes("beanstalkd_tube_jobs_created_total");
        assert_eq!(jobs.values().sum::<f64>(), 25.0);
        let others = 26 - named;
        assert_eq!(samples.get("beanstalkd_tubes_told_together"), f64::from(others));
        assert_eq!(jobs.len(), usize::from(named) + usize::from(others > 0), "{jobs:?}");
        assert_eq!(jobs.contains_key("other tubes"), others > 0);
        let watching = samples.tubes("beanstalkd_tube_watching");
        assert_eq!(watching.values().sum::<f64>(), 26.0);
        if others > 0 {
            // That of the first of them: `default` is there too.
            let ages = samples.tubes("beanstalkd_tube_oldest_ready_job_age_seconds");
            let first = if named == 0 { 0 } else { named - 1 };
            assert_eq!(ages["other tubes"], 100.0 - f64::from(first));
        }
    }
}

#[test]
fn no_slice_looks_at_very_many_of_anything() {
    let mut server = server();
    let client = server.connect().unwrap();
    let empty = page(&server, 1000, START).1;
    // Tubes, ready jobs, connections, and a line of those who wait.
    for tube in 0..2_000 {
        say(&mut server, client, &format!("watch tube{tube}\r\n"), START);
    }
    let with_tubes = page(&server, 1000, START).1;
    assert!(with_tubes >= empty + 2_000 / 128, "{with_tubes} slices");
    for _ in 0..50_000 {
        say(&mut server, client, "put 0 0 9 0\r\n\r\n", START);
    }
    let with_jobs = page(&server, 1000, START).1;
    assert!(with_jobs >= with_tubes + 50_000 / 8192, "{with_jobs} slices");
    for _ in 0..5_000 {
        let waiter = server.connect().unwrap();
        say(&mut server, waiter, "watch line\r\nignore default\r\nreserve\r\n", START);
    }
    let (samples, with_line) = page(&server, 3000, START);
    assert!(with_line >= with_jobs + 5_000 / 1024 + 5_000 / 512, "{with_line} slices");
    assert_eq!(samples.tubes("beanstalkd_tube_waiting")["line"], 5_000.0);
}

#[test]
fn the_oldest_job_is_found_whatever_its_priority_and_whoever_comes_and_goes() {
    let mut random = fastrand::Rng::with_seed(3);
    let mut server = server();
    let client = server.connect().unwrap();
    let put = |server: &mut Server, pri: u32, now| {
        say(server, client, &format!("put {pri} 0 9 0\r\n\r\n"), now);
    };
    // The least urgent of all.
    put(&mut server, u32::MAX, START);
    let later = START + Nanos::from_secs(50);
    for _ in 0..20_000 {
        put(&mut server, random.u32(..), later);
    }
    let now = START + Nanos::from_secs(80);
    let mut page = Page::new(1000);
    let mut text = String::new();
    while !page.is_done() {
        text += &next_slice(&server, &mut page, now);
        for _ in 0..500 {
            say(&mut server, client, "reserve\r\n", now);
        }
    }
    let samples = Samples::read(&text);
    let age = samples.tubes("beanstalkd_tube_oldest_ready_job_age_seconds")["default"];
    assert_eq!(age, 80.0);
}

#[test]
fn tubes_that_stay_are_told_while_others_go() {
    let (mut server, client) = server_with_tubes(1_000);
    let mut page = Page::new(10_000);
    let mut text = String::new();
    let mut gone = 0;
    while !page.is_done() {
        text += &next_slice(&server, &mut page, START);
        // From anywhere, so that others take their places.
        for _ in 0..30.min(500 - gone) {
            let tube = gone * 7 % 500 * 2;
            say(&mut server, client, &format!("ignore tube{tube}\r\n"), START);
            gone += 1;
        }
    }
    assert_eq!(gone, 500);
    let samples = Samples::read(&text);
    let told = samples.tubes("beanstalkd_tube_watching");
    for tube in (1..1_000).step_by(2) {
        assert!(told.contains_key(&*format!("tube{tube}")), "tube{tube} is not told");
    }
}

#[test]
fn a_tube_that_goes_and_comes_back_is_told_once() {
    let (mut server, client) = server_with_tubes(1_000);
    let mut page = Page::new(10_000);
    let mut text = String::new();
    let mut next = 0;
    while !page.is_done() {
        text += &next_slice(&server, &mut page, START);
        for _ in 0..100 {
            let tube = next % 1_000;
            say(&mut server, client, &format!("ignore tube{tube}\r\nwatch tube{tube}\r\n"), START);
            next += 1;
        }
    }
    assert!(next > 1_000, "{next} tubes came back");
    Samples::read(&text);
}

#[test]
fn a_binlog_tells_its_sizes_and_its_syncs() {
    let directory = tempfile::tempdir().unwrap();
    let disk = beanstalkd::testing::Directory::take(directory.path()).unwrap();
    let mut server = server();
    server.recover(Box::new(disk), Syncing::EachIteration, START).unwrap();
    let client = server.connect().unwrap();
    say(&mut server, client, "put 0 0 9 1\r\nx\r\nput 0 0 9 1\r\ny\r\ndelete 1\r\n", START);
    server.commit(START).unwrap();
    let (samples, _) = page(&server, 1000, START);
    let value = |name: &str| samples.get(&format!("beanstalkd_binlog_{name}"));
    // A record of 84 bytes, the name of the tube, and the body with its CR LF.
    let record = 84.0 + 7.0 + 3.0;
    assert_eq!((value("live_bytes"), value("dead_bytes")), (record, record + 84.0));
    assert_eq!(value("records_written_total"), 3.0);
    assert_eq!((value("files"), value("full")), (2.0, 0.0));
    assert!(value("sync_seconds_count") >= 1.0);
    assert_eq!(value("sync_seconds_count"), value("sync_seconds_bucket{le=\"+Inf\"}"));
}

// ---- MetricsServer ----

/// What a visitor is answered who asks all at once and takes whatever comes.
fn conn(server: Option<&Server>, request: &str) -> String {
    let iterations = Histogram::default();
    let subject =
        server.map_or(ServerState::Starting, |server| ServerState::Serving(server, &iterations));
    let mut conn = HttpConn::new(1000, START);
    conn.receive(request.as_bytes(), subject, START).unwrap();
    let mut answer = Vec::new();
    while !conn.is_leaving() {
        conn.tell(subject, START).unwrap();
        answer.extend_from_slice(conn.to_send());
        conn.sent(conn.to_send().len(), START);
    }
    String::from_utf8(answer).unwrap()
}

fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").unwrap().1
}

#[test]
fn readiness_is_told_apart_from_health() {
    let mut server = server();
    let mut status = |path: &str, is_draining: Option<bool>| {
        if let Some(is_draining) = is_draining {
            server.set_draining(is_draining);
        }
        let server = is_draining.map(|_| &server);
        let answer = conn(server, &format!("GET {path} HTTP/1.1\r\n\r\n"));
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    for (is_draining, ready, metrics) in
        [(None, 503, 503), (Some(true), 503, 200), (Some(false), 200, 200)]
    {
        assert_eq!(status("/healthz", is_draining), 200);
        assert_eq!(status("/readyz", is_draining), ready, "{is_draining:?}");
        assert_eq!(status("/metrics", is_draining), metrics, "{is_draining:?}");
        assert_eq!(status("/", is_draining), 404);
    }
}

#[test]
fn chunks_make_up_the_page() {
    let (server, _) = server_with_tubes(500);
    let whole = conn(Some(&server), "GET /metrics HTTP/1.0\r\n\r\n");
    assert!(!whole.contains("chunked") && !whole.contains("Content-Length"));
    let whole = body(&whole);
    Samples::read(whole);
    let chunked = conn(Some(&server), "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n");
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
        let head = conn(Some(&server), &format!("HEAD {path} HTTP/1.1\r\n\r\n"));
        assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")) && body(&head).is_empty());
    }
}

/// Sockets for visitors on loopback, and their address.
fn http_server() -> (MetricsServer, SocketAddr) {
    let listeners = listen::open(&Address::Host("127.0.0.1".into()), 0, None).unwrap();
    let address = listeners[0].to_string().parse().unwrap();
    (MetricsServer::new(listeners, 1000).unwrap(), address)
}

/// Lets the sockets turn until the visitor has been told all, or turned out.
fn answer(
    http: &mut MetricsServer,
    visitor: &mut TcpStream,
    now: Nanos,
) -> std::io::Result<String> {
    let server = server();
    let iterations = Histogram::default();
    visitor.set_nonblocking(true)?;
    let mut answer = Vec::new();
    for _ in 0..PATIENCE.as_millis() {
        http.turn(ServerState::Serving(&server, &iterations), now)?;
        match visitor.read_to_end(&mut answer) {
            Ok(_) => return Ok(String::from_utf8(answer).unwrap()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Err(error) => return Err(error),
        }
    }
    panic!("the visitor waits for ever");
}

#[test]
fn who_is_slow_is_turned_out() {
    let (mut http, address) = http_server();
    let mut slow = support::connect(address);
    slow.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    let mut quick = support::connect(address);
    quick.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    let told = answer(&mut http, &mut quick, START).unwrap();
    assert!(told.ends_with("\r\n\r\nok\n"), "{told}");
    let due = START + Nanos::from_secs(5);
    assert!(http.next_due().is_some_and(|next| next > START && next <= due));
    // A byte now and then is not enough.
    slow.write_all(b"A").unwrap();
    let told = answer(&mut http, &mut slow, due);
    assert!(told.as_ref().is_ok_and(String::is_empty) || told.is_err(), "{told:?}");
}

#[test]
fn those_who_say_nothing_keep_nobody_waiting() {
    let (mut http, address) = http_server();
    let connect = |_| support::connect(address);
    let mut idle: Vec<TcpStream> = (0..300).map(connect).collect();
    let mut last = connect(0);
    last.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    last.set_nonblocking(true).unwrap();
    let server = server();
    let iterations = Histogram::default();
    let mut answer = Vec::new();
    // No time goes by, and with each turn more of them come.
    for _ in 0..50 {
        idle.extend((0..10).map(connect));
        http.turn(ServerState::Serving(&server, &iterations), START).unwrap();
        if last.read_to_end(&mut answer).is_ok() {
            break;
        }
    }
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.ends_with("\r\n\r\nok\n"), "{answer}");
}

#[test]
fn a_request_that_comes_late_finds_its_place() {
    let (mut http, address) = http_server();
    let mut late = support::connect(address);
    let _idle: Vec<TcpStream> = (0..60).map(|_| support::connect(address)).collect();
    let server = server();
    let iterations = Histogram::default();
    for _ in 0..10 {
        http.turn(ServerState::Serving(&server, &iterations), START).unwrap();
    }
    late.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    assert!(answer(&mut http, &mut late, START).unwrap().ends_with("ok\n"));
}

/// A server with so many tubes that its page does not fit into the buffers of a connection.
fn server_with_a_long_page() -> Server {
    let mut server = server();
    let client = server.connect().unwrap();
    for tube in 0..1_000 {
        say(&mut server, client, &format!("watch tube{tube:0>150}\r\n"), START);
    }
    server
}

#[test]
fn who_takes_the_answer_byte_by_byte_has_no_more_time_than_others() {
    let server = server_with_a_long_page();
    let iterations = Histogram::default();
    let subject = ServerState::Serving(&server, &iterations);
    let mut conn = HttpConn::new(1000, START);
    conn.receive(b"GET /metrics HTTP/1.1\r\n\r\n", subject, START).unwrap();
    for second in (9..30).step_by(9) {
        let now = START + Nanos::from_secs(second);
        conn.tell(subject, now).unwrap();
        assert!(!conn.is_late(now), "after {second} seconds");
        conn.sent(1, now);
    }
    let end = START + Nanos::from_secs(30);
    assert_eq!(conn.deadline(), end);
    assert!(conn.is_late(end));
}

#[test]
fn those_who_take_the_answer_byte_by_byte_keep_nobody_out() {
    // The buffers of a Unix socket do not grow until they have taken the whole page.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metrics");
    let unix = Address::Unix { path: path.clone(), mode: None };
    let mut doors = listen::open(&unix, 0, None).unwrap();
    doors.extend(listen::open(&Address::Host("127.0.0.1".into()), 0, None).unwrap());
    let address: SocketAddr = doors[1].to_string().parse().unwrap();
    let mut http = MetricsServer::new(doors, 1000).unwrap();

    let server = server_with_a_long_page();
    let iterations = Histogram::default();
    let subject = ServerState::Serving(&server, &iterations);
    let slow: Vec<UnixStream> = (0..64).map(|_| support::connect_unix(&path).unwrap()).collect();
    for mut visitor in &slow {
        visitor.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    }
    http.turn(subject, START).unwrap();
    let mut scraper = support::connect(address);
    scraper.write_all(b"GET /healthz HTTP/1.1\r\n\r\n").unwrap();
    // All that fits into the buffers goes there, and then each takes a byte.
    let now = START + Nanos::from_secs(1);
    let due = START + Nanos::from_secs(2);
    let takes_a_byte = |mut visitor: &UnixStream| visitor.read(&mut [0]).is_ok_and(|len| len == 1);
    for _ in 0..2 {
        support::wait_until("all wait for those who are slow", || {
            (0..1_000).any(|_| {
                http.turn(subject, now).unwrap();
                http.next_due() == Some(due)
            })
        });
        assert!(slow.iter().all(takes_a_byte));
    }
    scraper.set_nonblocking(true).unwrap();
    assert!(scraper.read(&mut [0]).is_err(), "there is a place too soon");
    assert!(answer(&mut http, &mut scraper, due).unwrap().ends_with("ok\n"));
    // One had to make room, and no more.
    let ends = |mut visitor: &UnixStream| visitor.read_to_end(&mut Vec::new()).is_ok();
    slow.iter().for_each(|visitor| visitor.set_nonblocking(true).unwrap());
    assert_eq!(slow.iter().filter(|visitor| ends(visitor)).count(), 1);
}

// ---- The binary ----

fn get(mut stream: impl Read + Write, path: &str) -> String {
    stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn the_binary_tells_of_itself_where_it_is_asked_to() {
    let directory = tempfile::tempdir().unwrap();
    let unix = directory.path().join("metrics");
    let unix_flag = format!("unix:{}", unix.display());
    for metrics in ["127.0.0.1:0", &unix_flag] {
        let flags = ["-V", "-l", "127.0.0.1", "-p", "0", "--metrics", metrics];
        let mut daemon = Daemon::start(Path::new(BEANSTALKD), &flags);
        let queue = support::logged_address(&mut daemon);
        let line = daemon.wait_for_log("telling metrics on ");
        let (_, address) = line.split_once("telling metrics on ").unwrap();
        let ask = |path: &str| match address.parse::<SocketAddr>() {
            Ok(address) => get(support::connect(address), path),
            Err(_) => get(support::connect_unix(&unix).unwrap(), path),
        };
        let mut client = support::connect(queue);
        client.write_all(b"use mail\r\n").unwrap();
        client.read_exact(&mut [0; 12]).unwrap();
        assert!(ask("/readyz").starts_with("HTTP/1.1 200 "));
        let told = ask("/metrics");
        let samples = Samples::read(body(&told));
        assert_eq!(samples.get("beanstalkd_tube_using{tube=\"mail\"}"), 1.0);
        assert!(samples.get("process_resident_memory_bytes") > 500_000.0);
        assert!(samples.get("beanstalkd_turn_seconds_count") > 1.0);
        daemon.signal(rustix::process::Signal::USR1);
        assert!(ask("/readyz").starts_with("HTTP/1.1 503 "));
        assert!(ask("/healthz").starts_with("HTTP/1.1 200 "));
    }
}

#[test]
fn metrics_that_cannot_be_had_keep_the_server_from_starting() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = support::run(&["-l", "127.0.0.1", "-p", "0", "--metrics", &address]);
    assert_eq!(output.status.code(), Some(111));
    assert!(support::text(&output.stderr).contains(&address));
}
