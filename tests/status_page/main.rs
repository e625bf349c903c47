//! The status page: its values agree with `stats`, its length and the work of each slice are bounded,
//! and no text of a client becomes markup. `tests/browser` shows it to a real browser.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

#[path = "../harness/mod.rs"]
mod harness;
mod sha256;

use beanstalkd::testing::html::{HEADER_FIELDS, SCRIPT, STYLE};
use beanstalkd::testing::{
    ConnKey, HTML_MAX, HttpConn, LONGEST_SAMPLE, Measurements, Nanos, SLICE_LEN, Server,
    ServerState, Settings, Syncing,
};
use harness::client::Client;
use harness::engine::Engine;
use harness::fake_disk::FakeDisk;
use harness::fixtures;
use harness::process::{self, Daemon, ON_LOOPBACK};
use harness::yaml::field;
use serde_json::Value;
use std::net::SocketAddr;

const START: Nanos = Nanos::from_secs(1_000);
/// The time between two samples.
const INTERVAL: Nanos = Nanos::from_secs(5);

const HTML: &str = "text/html";
const TEXT: &str = "text/plain";
const JSON: &str = "application/json";

/// A server with its measurements, and a client.
struct World {
    engine: Engine,
    measurements: Measurements,
    client: ConnKey,
}

/// A response without chunks.
struct Response {
    status: u16,
    head: String,
    body: String,
    /// The number of slices, with those that only scanned.
    slices: usize,
}

impl World {
    fn new() -> World {
        World::of(Engine::new(Settings::DEFAULT, START))
    }

    /// Keeps no body in memory.
    fn cold() -> World {
        let settings = Settings { body_cache_bytes: Some(0), ..Settings::DEFAULT };
        let mut engine = Engine::new(settings, START);
        engine.recover(&FakeDisk::default(), Syncing::EachIteration).unwrap();
        World::of(engine)
    }

    fn of(mut engine: Engine) -> World {
        let client = engine.connect();
        World { engine, measurements: Measurements::default(), client }
    }

    fn ask(&mut self, commands: impl AsRef<[u8]>) -> String {
        self.engine.ask(self.client, commands)
    }

    /// Lets time pass, and measures when that is due.
    fn advance(&mut self, span: Nanos) {
        let end = self.engine.now + span;
        loop {
            let due = self.measurements.next_due().max(self.engine.now);
            if due > end {
                break;
            }
            self.engine.now = due;
            self.measurements.update(&self.engine.server, due);
        }
        self.engine.now = end;
        self.engine.tick();
    }

    fn request(&self, request: &str) -> Response {
        let state = ServerState::Serving(&self.engine.server, &self.measurements);
        respond(state, request, self.engine.now, |_| {})
    }

    fn get(&self, path: &str, accept: &str) -> Response {
        self.request(&format!("GET {path} HTTP/1.0\r\nAccept: {accept}\r\n\r\n"))
    }

    fn body(&self, path: &str, accept: &str) -> String {
        let Response { status, head, body, .. } = self.get(path, accept);
        assert_eq!(status, 200, "{path}");
        assert!(head.contains(&format!("\r\nContent-Type: {accept}")), "{head}");
        body
    }

    fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.body(path, JSON)).unwrap()
    }

    /// Returns the names of the tubes on the page, in their order.
    fn names(&self, path: &str) -> Vec<String> {
        let page = self.json(path);
        let name = |tube: &Value| tube["name"].as_str().unwrap().to_owned();
        page["tubes"].as_array().unwrap().iter().map(name).collect()
    }
}

/// Makes a whole response for a client that reads without delay. `between` runs between two slices.
fn respond(
    state: ServerState<'_>,
    request: &str,
    now: Nanos,
    mut between: impl FnMut(usize),
) -> Response {
    let mut conn = HttpConn::new(1000, now);
    conn.receive(request.as_bytes(), state, now).unwrap();
    let (mut bytes, mut slices) = (Vec::new(), 0);
    while !conn.is_lingering() {
        if conn.wants_slice() {
            between(slices);
            slices += 1;
        }
        conn.write_slice(state, now).unwrap();
        let sent = conn.to_send().len();
        assert!(sent < SLICE_LEN + LONGEST_SAMPLE + 100, "a slice of {sent} bytes");
        bytes.extend_from_slice(conn.to_send());
        conn.sent(sent, now);
    }
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Response { status, head: format!("{head}\r\n"), body: body.to_owned(), slices }
}

/// Returns the tube of this name on a page.
fn tube<'p>(page: &'p Value, name: &str) -> &'p Value {
    let tubes = page["tubes"].as_array().unwrap();
    tubes.iter().find(|tube| tube["name"] == name).unwrap_or_else(|| panic!("no tube {name}"))
}

// ---- Values ----

/// Returns a world with jobs in all states, a pause and a waiter.
fn busy_world() -> World {
    let mut world = World::new();
    world.ask("use mail\r\n");
    for put in ["5 0 60", "5000 0 60", "7 0 60", "5 100 60", "9 0 60"] {
        world.ask(format!("put {put} 9\r\n<secret>!\r\n"));
    }
    world.ask("watch mail\r\nreserve\r\nbury 1 7\r\nreserve\r\n");
    world.ask("use print\r\nput 0 0 60 1\r\nx\r\npause-tube print 90\r\n");
    let waiter = world.engine.connect();
    world.engine.ask(waiter, "watch rare\r\nreserve\r\n");
    world.advance(Nanos::from_millis(12_500));
    world
}

/// Rounds down, as `stats` does.
fn whole(value: &Value) -> Option<f64> {
    value.as_f64().map(f64::floor)
}

#[test]
fn the_page_agrees_with_stats() {
    let mut world = busy_world();
    let page = world.json("/");
    let stats = world.ask("stats\r\n");
    for (key, name) in [
        ("current-jobs-ready", "ready"),
        ("current-jobs-urgent", "urgent"),
        ("current-jobs-reserved", "reserved"),
        ("current-jobs-delayed", "delayed"),
        ("current-jobs-buried", "buried"),
        ("job-timeouts", "timeouts"),
        ("current-tubes", "tubes"),
        ("current-connections", "connections"),
        ("current-workers", "workers"),
        ("current-waiting", "waiting"),
    ] {
        assert_eq!(page["totals"][name].to_string(), field(&stats, key).unwrap(), "{key}");
    }
    for name in ["default", "mail", "print", "rare"] {
        let stats = world.ask(format!("stats-tube {name}\r\n"));
        let facts = world.json(&format!("/tube/{name}"));
        for (key, name) in [
            ("current-jobs-ready", "ready"),
            ("current-jobs-urgent", "urgent"),
            ("current-jobs-reserved", "reserved"),
            ("current-jobs-delayed", "delayed"),
            ("current-jobs-buried", "buried"),
            ("current-waiting", "waiting"),
            ("pause-time-left", "pause_left_seconds"),
            ("current-watching", "watching"),
            ("current-using", "using"),
            ("total-jobs", "puts"),
            ("cmd-delete", "deletes"),
            ("cmd-pause-tube", "pauses"),
        ] {
            let expected: f64 = field(&stats, key).unwrap().parse().unwrap();
            assert_eq!(whole(&facts[name]), Some(expected), "{key}");
            let row = &tube(&page, facts["name"].as_str().unwrap())[name];
            assert!(row.is_null() || whole(row) == Some(expected), "{key}");
        }
    }
    assert_eq!(page["server"]["uptime_seconds"], 12.5);
    assert_eq!(page["server"]["draining"], false);
    assert_eq!(whole(&tube(&page, "mail")["oldest_ready_seconds"]), Some(12.0));
    assert_eq!(tube(&page, "rare")["oldest_ready_seconds"], 0.0);
    world.engine.server.set_draining(true);
    assert_eq!(world.json("/")["server"]["draining"], true);
    assert!(world.body("/", HTML).contains("<strong>draining: puts are rejected</strong>"));
}

#[test]
fn html_and_text_have_the_values() {
    let world = busy_world();
    let html = world.body("/", HTML);
    let row = "<tr><th scope=row><a href=\"tube/mail\">mail</a><td>2<td>1<td>1<td>1<td>1\
               <td><i>0</i><td><i>0s</i><td>12s<td><i>0</i><td><i>0</i>\n";
    assert!(html.contains(row), "{html}");
    assert!(html.contains("<div><dt>connections<dd>2</div>"));
    let text = world.body("/", TEXT);
    let line = text.lines().find(|line| line.starts_with("print")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words, ["print", "1", "1", "0", "0", "0", "0", "1m", "17s", "12s", "0", "0"]);
    let head = text.lines().find(|line| line.starts_with("tube")).unwrap();
    assert_eq!(head.len(), line.len());
    let text = world.body("/tube/rare", TEXT);
    assert!(text.starts_with("tube rare\nready 0, urgent 0, "), "{text}");
}

#[test]
fn rates_are_those_of_the_last_interval() {
    let mut world = World::new();
    world.ask("use mail\r\n");
    let put = "put 0 0 9 1\r\nx\r\n";
    world.ask(put.repeat(7));
    world.advance(Nanos::ONE);
    // There is one sample.
    for page in [world.json("/")["totals"].clone(), world.json("/tube/mail")] {
        assert!(page["puts_per_second"].is_null() && page["deletes_per_second"].is_null());
    }
    assert!(world.body("/", HTML).contains("<td>-<td>-\n"));
    world.ask(put.repeat(50) + "delete 1\r\ndelete 2\r\n");
    world.advance(INTERVAL);
    for page in [world.json("/")["totals"].clone(), world.json("/tube/mail")] {
        assert_eq!(
            (&page["puts_per_second"], &page["deletes_per_second"]),
            (&10.0.into(), &0.4.into())
        );
    }
    world.advance(INTERVAL);
    assert_eq!(world.json("/tube/mail")["puts_per_second"], 0.0);
    // The tube is removed, and another one gets its key.
    for id in 3..=57 {
        world.ask(format!("delete {id}\r\n"));
    }
    world.ask("use again\r\n");
    assert!(world.json("/tube/again")["puts_per_second"].is_null());
    assert_eq!(world.get("/tube/mail", JSON).status, 404);
}

#[test]
fn the_history_has_a_fixed_size() {
    let mut world = World::new();
    world.advance(INTERVAL);
    assert_eq!(world.json("/")["history"].as_array().unwrap().len(), 1);
    for _ in 0..300 {
        world.ask("put 0 0 9 1\r\nx\r\n".repeat(5));
        world.advance(INTERVAL);
    }
    let page = world.json("/");
    let history = page["history"].as_array().unwrap();
    assert_eq!(history.len(), 120);
    for (point, before) in history[1..].iter().zip(history) {
        assert_eq!(point["ready"].as_u64(), before["ready"].as_u64().map(|ready| ready + 5));
        assert_eq!(point["puts_per_second"], 1.0);
        let age = |point: &Value| point["seconds_ago"].as_f64().unwrap();
        assert!((age(before) - age(point) - 5.0).abs() < 0.01);
    }
    assert_eq!(history[119]["ready"], 1_500);
    // The process was stopped for an hour: the next sample covers all of it.
    world.engine.now = world.engine.now + Nanos::from_secs(3_600);
    world.ask("put 0 0 9 1\r\nx\r\n".repeat(36));
    world.advance(Nanos::from_secs(6));
    let page = world.json("/");
    let history = page["history"].as_array().unwrap();
    assert_eq!((history.len(), &history[118]["puts_per_second"]), (120, &0.0.into()));
    assert!(world.body("/", HTML).len() < HTML_MAX);
}

#[test]
fn cold_jobs_are_shown_with_a_body_cache_only() {
    let mut world = World::cold();
    for (name, jobs) in [("a", 1), ("b", 3), ("c", 2)] {
        let put = format!("put 0 0 9 98\r\n{}\r\n", "x".repeat(98));
        world.ask(format!("use {name}\r\n") + &put.repeat(jobs));
    }
    world.ask("peek 1\r\n");
    let page = world.json("/");
    for (name, expected) in [
        ("cold_jobs", 6),
        ("cold_body_bytes", 600),
        ("body_cache_bytes", 0),
        ("body_cache_limit_bytes", 0),
        ("body_reads", 1),
        ("body_waits", 0),
        ("body_read_failures", 0),
    ] {
        assert_eq!(page["totals"][name], expected, "{name}");
    }
    assert_eq!(tube(&page, "b")["cold"], 3);
    assert_eq!(world.json("/tube/b")["cold"], 3);
    assert_eq!(world.names("/?sort=cold").join(" "), "b c a default");
    let html = world.body("/?sort=cold", HTML);
    assert!(html.contains("<th scope=col aria-sort=descending><a href=\"?sort=-cold\">cold</a>"));
    assert!(html.contains("<div><dt>cold bodies<dd>600 B</div>"), "{html}");
    let text = world.body("/", TEXT);
    let line = "\ncold 6, cold bodies 600 B, body cache 0 B, cache limit 0 B, body reads 1, \
                disk waits 0, unreadable 0\n\ntube ";
    assert!(text.contains(line), "{text}");
    assert!(text.lines().any(|line| line.starts_with("b ") && line.ends_with(" 3")), "{text}");
    assert!(world.body("/tube/b", TEXT).contains(", pauses 0, cold 3\n"));

    let mut world = busy_world();
    world.ask("use z\r\nput 0 0 9 1\r\nx\r\n");
    for (path, accept) in [("/", JSON), ("/", HTML), ("/", TEXT), ("/tube/z", JSON)] {
        assert!(!world.body(path, accept).contains("cold"), "{accept}");
    }
    // There is no such order.
    assert_eq!(world.names("/?sort=cold"), world.names("/"));
    assert_eq!(world.names("/?sort=-cold"), world.names("/?sort=-unknown"));
}

// ---- Order and limits ----

#[test]
fn tubes_are_sorted_and_filtered() {
    let mut world = World::new();
    for (name, jobs, pri) in [("a", 1, 0), ("b", 3, 5_000), ("ab", 2, 5_000), ("c+d", 0, 0)] {
        let put = format!("put {pri} 0 9 1\r\nx\r\n").repeat(jobs);
        world.ask(format!("use {name}\r\nwatch {name}\r\n{put}"));
    }
    for (path, expected) in [
        ("/", "b ab a c+d default"),
        ("/?sort=unknown", "b ab a c+d default"),
        ("/?sort=name", "a ab b c+d default"),
        ("/?sort=-name", "default c+d b ab a"),
        ("/?sort=ready", "b ab a c+d default"),
        ("/?sort=-ready", "c+d default a ab b"),
        ("/?sort=urgent", "a ab b c+d default"),
        ("/?filter=b", "b ab"),
        ("/?sort=-ready&filter=b", "ab b"),
        ("/?filter=c%2Bd", "c+d"),
        ("/?filter=c+d", ""),
        ("/?filter=nothing", ""),
        ("/?filter=", "b ab a c+d default"),
    ] {
        assert_eq!(world.names(path).join(" "), expected, "{path}");
    }
    assert_eq!(world.json("/?filter=b")["tubes_not_shown"], 0);
    let html = world.body("/?sort=-ready&filter=b", HTML);
    let column = "<th scope=col aria-sort=ascending><a href=\"?sort=ready&amp;filter=b\">ready</a>";
    assert!(html.contains(column), "{html}");
    assert!(html.contains("<input type=hidden name=sort value=\"-ready\">"));
    // The busiest tube comes first, even with fewer jobs.
    world.advance(INTERVAL);
    world.ask("use c+d\r\nput 0 0 9 1\r\nx\r\nwatch c+d\r\n");
    world.advance(INTERVAL);
    assert_eq!(world.names("/")[0], "c+d");
}

#[test]
fn of_10000_tubes_the_first_100_are_shown() {
    let mut world = World::new();
    for number in 0..10_000 {
        let jobs = number * 7_919 % 10_000 / 100;
        let put = "put 0 0 9 0\r\n\r\n".repeat(jobs.min(3));
        let name = format!("tube{number}");
        world.ask(format!("use {name}\r\nwatch {name}\r\n{put}"));
    }
    for _ in 0..5 {
        world.ask("use tube77\r\nput 0 0 9 0\r\n\r\n");
    }
    let page = world.json("/");
    assert_eq!(page["tubes"].as_array().unwrap().len(), 100);
    assert_eq!(page["tubes_not_shown"], 9_901);
    assert_eq!(page["tubes"][0]["name"], "tube77");
    let names = world.names("/?sort=name");
    assert_eq!((&*names[0], &*names[1], &*names[99]), ("default", "tube0", "tube1086"));
    let html = world.get("/", HTML);
    assert!(html.body.contains("<p id=more>9,901 more tubes are not shown</p>"));
    assert!(html.body.len() < HTML_MAX, "{} bytes", html.body.len());
    // 128 tubes in a slice.
    assert!(html.slices > 10_000 / 128, "{} slices", html.slices);
    assert!(world.body("/", TEXT).ends_with("\n9,901 more tubes are not shown\n"));
    // Rates of all tubes are sampled, in slices as well.
    let (mut updates, mut now) = (0, world.engine.now);
    for _ in 0..2 {
        now = now + INTERVAL;
        while world.measurements.next_due() <= now {
            world.measurements.update(&world.engine.server, now);
            updates += 1;
        }
    }
    assert!(updates > 2 * 10_000 / 128, "{updates} updates");
    world.engine.now = now;
    let page = world.json("/?sort=puts_per_second");
    assert_eq!(page["tubes"][99]["puts_per_second"], 0.0);
}

#[test]
fn a_page_is_short_even_with_the_longest_names() {
    let mut world = World::new();
    world.advance(Nanos::from_secs(700));
    for number in 0..300 {
        world.ask(format!("watch {:/>200}\r\n", number));
    }
    let filter = "%2F".repeat(170);
    for path in ["/".to_owned(), format!("/?filter={filter}"), format!("/?filter={filter}{filter}")]
    {
        let html = world.body(&path, HTML);
        assert!(html.len() < HTML_MAX, "{} bytes", html.len());
        assert!(html.ends_with("</script>\n"));
    }
    let html = world.body("/", HTML);
    let shown = html.matches("<tr><th scope=row>").count();
    assert!(shown > 10, "{shown} rows");
    assert!(html.contains(&format!("<p id=more>{} more tubes", 301 - shown)));
    assert_eq!(world.names("/").len(), 100);
}

#[test]
fn the_work_of_a_slice_is_bounded() {
    let mut world = World::new();
    let empty = world.get("/", HTML).slices;
    for _ in 0..50_000 {
        world.ask("put 0 0 9 0\r\n\r\n");
    }
    for path in ["/", "/tube/default"] {
        let slices = world.get(path, HTML).slices;
        assert!(slices > empty.max(50_000 / 8_192), "{slices} slices");
    }
    for _ in 0..5_000 {
        world.ask("reserve\r\n");
    }
    let slices = world.get("/tube/default", HTML).slices;
    assert!(slices > 45_000 / 8_192 + 5_000 / 128, "{slices} slices");
}

#[test]
fn lasting_tubes_are_shown_once_while_other_tubes_are_removed() {
    let mut world = World::new();
    for number in 0..1_000 {
        world.ask(format!("watch tube{number}\r\n"));
    }
    // Enough jobs to be among the first.
    for number in (1..100).step_by(2) {
        world.ask(format!("use tube{number}\r\nput 0 0 9 0\r\n\r\n"));
    }
    let now = world.engine.now;
    let mut conn = HttpConn::new(1000, now);
    let request = format!("GET / HTTP/1.0\r\nAccept: {JSON}\r\n\r\n");
    let (mut bytes, mut removed) = (Vec::new(), 0);
    let state = ServerState::Serving(&world.engine.server, &world.measurements);
    conn.receive(request.as_bytes(), state, now).unwrap();
    while !conn.is_lingering() {
        let state = ServerState::Serving(&world.engine.server, &world.measurements);
        conn.write_slice(state, now).unwrap();
        bytes.extend_from_slice(conn.to_send());
        conn.sent(conn.to_send().len(), now);
        for _ in 0..60.min(500 - removed) {
            let number = removed * 7 % 500 * 2;
            world.engine.ask(world.client, format!("ignore tube{number}\r\n"));
            removed += 1;
        }
    }
    assert_eq!(removed, 500);
    let text = String::from_utf8(bytes).unwrap();
    let page: Value = serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap();
    for number in (1..100).step_by(2) {
        let name = format!("tube{number}");
        let tubes = page["tubes"].as_array().unwrap();
        assert_eq!(tubes.iter().filter(|tube| tube["name"] == *name).count(), 1, "{name}");
    }
}

// ---- The page of a tube ----

#[test]
fn a_tube_has_its_first_jobs_in_the_order_of_their_service() {
    let mut world = World::new();
    for (name, pri) in [("other", 0), ("mail", 500)] {
        world.ask(format!("use {name}\r\n"));
        for number in 0..50 {
            world.ask(format!("put {} 0 60 6\r\nsecret\r\n", pri + number % 7));
            world.ask(format!("put {pri} {} 60 6\r\nsecret\r\n", 100 - number));
        }
    }
    world.ask("watch mail\r\nignore default\r\n");
    for _ in 0..20 {
        let reply = world.ask("reserve\r\n");
        let id = reply.split(' ').nth(1).unwrap();
        world.ask(format!("bury {id} 3\r\n"));
    }
    // The reserved jobs of other tubes are not shown.
    for _ in 0..12 {
        let worker = world.engine.connect();
        world.engine.ask(worker, "watch other\r\nreserve\r\n");
        world.engine.ask(worker, "watch mail\r\nignore default\r\nignore other\r\nreserve\r\n");
    }
    world.advance(Nanos::from_millis(3_500));
    let page = world.json("/tube/mail");
    let jobs = page["jobs"].as_array().unwrap();
    let of_state = |state: &str| {
        let jobs = jobs.iter().filter(|job| job["state"] == state);
        jobs.cloned().collect::<Vec<Value>>()
    };
    let [ready, reserved, delayed, buried] =
        ["ready", "reserved", "delayed", "buried"].map(of_state);
    assert_eq!([ready.len(), reserved.len(), delayed.len(), buried.len()], [10; 4]);
    let order = |job: &Value| (job["pri"].as_u64().unwrap(), job["id"].as_u64().unwrap());
    assert!(ready.is_sorted_by_key(order) && order(&ready[0]).0 > 502);
    let left = |job: &Value| job["time_left_seconds"].as_f64().unwrap();
    assert!(delayed.is_sorted_by(|a, b| left(a) < left(b)));
    assert!(reserved.is_sorted_by(|a, b| left(a) <= left(b)) && left(&reserved[0]) < 57.0);
    assert_eq!((left(&delayed[0]).ceil(), &delayed[0]["delay_seconds"]), (48.0, &51.0.into()));
    assert_eq!((&buried[0]["buries"], &buried[0]["pri"]), (&1.into(), &3.into()));
    assert_eq!((&buried[0]["bytes"], whole(&buried[0]["age_seconds"])), (&6.into(), Some(3.0)));
    for accept in [HTML, TEXT, JSON] {
        let body = world.body("/tube/mail", accept);
        assert!(!body.contains("secret"), "{accept} shows a body");
        assert!(body.len() < HTML_MAX);
    }
    assert!(world.body("/tube/default", HTML).contains("There are no jobs."));
}

#[test]
fn tube_names_in_paths_are_decoded_and_validated() {
    let mut world = World::new();
    for name in ["a/b", "+;.$_()", "..", "-", "a%2Fb"] {
        world.ask(format!("watch {name}\r\n"));
    }
    for (path, name) in [
        ("/tube/a/b", "a/b"),
        ("/tube/a%2Fb", "a/b"),
        ("/tube/%61%2fb", "a/b"),
        ("/tube/+;.$_()", "+;.$_()"),
        ("/tube/%2B%3B.%24_%28%29", "+;.$_()"),
        ("/tube/..", ".."),
        ("/tube/default?sort=name", "default"),
    ] {
        assert_eq!(world.json(path)["name"], name, "{path}");
    }
    for path in [
        "/tube",
        "/tube/",
        "/tube/none",
        "/tube/-",
        "/tube/a%252Fb",
        "/tube/%00",
        "/tube/%ff",
        "/tube/default/",
        "/tubes/default",
        "//",
        "/index.html",
        "/favicon.ico",
    ] {
        assert_eq!(world.get(path, HTML).status, 404, "{path}");
    }
    let html = world.body("/", HTML);
    assert!(html.contains("<a href=\"tube/a%2Fb\">a/b</a>"));
    // A browser removes the part `..` from a path.
    assert!(html.contains("<th scope=row>..<td>"), "{html}");
}

#[test]
fn a_tube_that_is_removed_while_its_page_is_made_is_shown_as_it_was() {
    let mut world = World::new();
    world.ask("watch short\r\n");
    let now = world.engine.now;
    let mut conn = HttpConn::new(1000, now);
    let state = ServerState::Serving(&world.engine.server, &world.measurements);
    conn.receive(b"GET /tube/short HTTP/1.0\r\n\r\n", state, now).unwrap();
    world.engine.ask(world.client, "ignore short\r\n");
    let mut text = String::new();
    let state = ServerState::Serving(&world.engine.server, &world.measurements);
    while !conn.is_lingering() {
        conn.write_slice(state, now).unwrap();
        text += std::str::from_utf8(conn.to_send()).unwrap();
        conn.sent(conn.to_send().len(), now);
    }
    assert!(text.contains("<h1>short</h1>") && text.ends_with("</script>\n"));
}

// ---- HTTP ----

#[test]
fn no_text_becomes_markup() {
    let mut process = fixtures::facts(START);
    process.hostname = "<b>\"host'&".to_owned();
    let server = Server::new(Settings::DEFAULT, process, START);
    let measurements = Measurements::default();
    let state = ServerState::Serving(&server, &measurements);
    let filter = "%22%3E%3Cscript%3Ealert(1)%3C/script%3E%27%26";
    let request =
        |accept: &str| format!("GET /?filter={filter} HTTP/1.0\r\nAccept: {accept}\r\n\r\n");
    let html = respond(state, &request(HTML), START, |_| {}).body;
    assert!(html.contains("on &lt;b&gt;&quot;host&#39;&amp;</title>"), "{html}");
    let value = "value=\"&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;&#39;&amp;\"";
    assert!(html.contains(value), "{html}");
    assert!(html.contains("&amp;filter=%22%3E%3Cscript%3Ealert%281%29%3C%2Fscript%3E%27%26\""));
    assert_eq!(html.matches("<script").count(), 1);
    let json = respond(state, &request(JSON), START, |_| {}).body;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["server"]["hostname"], "<b>\"host'&");
}

#[test]
fn the_accepted_type_is_sent_with_strict_fields() {
    let world = World::new();
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    for (accept, expected) in [
        ("*/*", "text/html; charset=utf-8"),
        (browser, "text/html; charset=utf-8"),
        (TEXT, "text/plain; charset=utf-8"),
        ("application/json;q=0.9, text/plain;q=0.8", JSON),
    ] {
        for path in ["/", "/tube/default"] {
            let response = world.get(path, accept);
            assert_eq!(response.status, 200);
            assert!(response.head.contains(&format!("\r\nContent-Type: {expected}\r\n")));
            assert!(response.head.contains(HEADER_FIELDS), "{}", response.head);
            assert!(!response.head.contains("Access-Control"), "{}", response.head);
        }
    }
    let response = world.request("GET / HTTP/1.0\r\n\r\n");
    assert!(response.body.starts_with("<!DOCTYPE html>"));
    for field in [
        "default-src 'none'",
        "frame-ancestors 'none'",
        "\r\nX-Content-Type-Options: nosniff\r\n",
        "\r\nReferrer-Policy: no-referrer\r\n",
        "\r\nVary: Accept\r\n",
        "\r\nCache-Control: no-store\r\n",
    ] {
        assert!(response.head.contains(field), "{field}");
    }
    assert!(!HEADER_FIELDS.contains("unsafe"));
    // Other paths have no more fields than before.
    let metrics = world.get("/metrics", HTML);
    let expected = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
                    Cache-Control: no-store\r\nConnection: close\r\n";
    assert_eq!(metrics.head, expected);
}

#[test]
fn head_post_and_a_starting_server_have_no_page() {
    let world = World::new();
    for path in ["/", "/tube/default"] {
        let head = world.request(&format!("HEAD {path} HTTP/1.1\r\nHost: a\r\n\r\n"));
        assert_eq!((head.status, &*head.body), (200, ""));
        assert!(head.head.contains("Transfer-Encoding: chunked\r\n"));
        assert_eq!(world.request(&format!("POST {path} HTTP/1.1\r\n\r\n")).status, 405);
        let request = format!("GET {path} HTTP/1.1\r\n\r\n");
        let starting = respond(ServerState::Starting, &request, START, |_| {});
        assert_eq!((starting.status, &*starting.body), (503, "reading the binlog\n"));
    }
}

#[test]
fn the_policy_allows_the_style_and_the_script_of_the_page() {
    for (kind, text) in [("style", STYLE), ("script", SCRIPT)] {
        let source = format!("{kind}-src 'sha256-{}';", sha256::base64_of(text));
        assert!(HEADER_FIELDS.contains(&source), "html.rs must have {source}");
        assert!(!text.contains("</"), "the {kind} ends its element");
    }
}

#[test]
fn the_binary_serves_the_status_page() {
    let flags = [&ON_LOOPBACK[..], &["--metrics", "127.0.0.1:0"]].concat();
    let mut daemon = Daemon::start(process::BEANSTALKD, &flags);
    let queue = daemon.address();
    let address: SocketAddr = daemon.wait_for_value("serving metrics on ").parse().unwrap();
    let get = |path: &str, accept: &str| {
        let mut client = Client::connect(address);
        client.send(format!("GET {path} HTTP/1.0\r\nAccept: {accept}\r\n\r\n"));
        let response = String::from_utf8(client.rest()).unwrap();
        response.split_once("\r\n\r\n").unwrap().1.to_owned()
    };
    let mut client = Client::connect(queue);
    client.expect("use mail\r\n", "USING mail");
    client.expect("put 5 0 60 5\r\nhello\r\n", "INSERTED 1");
    let page: Value = serde_json::from_str(&get("/", JSON)).unwrap();
    assert_eq!(page["totals"]["ready"], 1);
    assert_eq!(tube(&page, "mail")["ready"], 1);
    let page: Value = serde_json::from_str(&get("/tube/mail", JSON)).unwrap();
    assert_eq!((&page["jobs"][0]["id"], &page["jobs"][0]["bytes"]), (&1.into(), &5.into()));
    assert!(get("/", HTML).ends_with("</script>\n"));
    // The first rates are those of the second sample.
    harness::wait_until("a rate is known", || {
        let page: Value = serde_json::from_str(&get("/", JSON)).unwrap();
        page["totals"]["puts_per_second"].is_number() && !page["history"][0].is_null()
    });
}
