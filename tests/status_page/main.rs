//! The status page: its values agree with `stats`, its length and the work of each slice are bounded,
//! and no text of a client becomes markup. `tests/browser` shows it to a real browser.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

#[path = "../harness/mod.rs"]
mod harness;
mod site;

use base64::Engine;
use harness::driver::{Nanos, Options, Settings, Syncing};
use harness::fake_disk::{FakeDisk, Files, RemoteSetup};
use serde_json::Value;
use sha2::{Digest, Sha256};
use site::{HTML, JSON, PUT, Response, Site, TEXT, get};
use std::num::NonZero;

const INTERVAL: Nanos = Nanos::from_secs(5);
/// The most bytes of an HTML page, so that a phone loads it quickly.
const HTML_MAX: usize = 50_000;

impl Site {
    /// Returns the names of the tubes on the page, in their order.
    fn names(&mut self, path: &str) -> String {
        let page = self.json(path);
        let name = |tube: &Value| tube["name"].as_str().unwrap().to_owned();
        page["tubes"].as_array().unwrap().iter().map(name).collect::<Vec<String>>().join(" ")
    }

    /// Asserts that a page has these texts.
    #[track_caller]
    fn expect(&mut self, path: &str, accept: &str, texts: &[&str]) {
        let page = self.body(path, accept);
        texts.iter().for_each(|text| assert!(page.contains(text), "no {text:?} in {page}"));
    }
}

/// Rounds down, as `stats` does.
fn whole(value: &Value) -> Option<f64> {
    value.as_f64().map(f64::floor)
}

fn inner<'p>(page: &'p str, tag: &str) -> &'p str {
    let (_, after) = page.split_once(&format!("<{tag}>")).unwrap();
    after.split_once(&format!("</{tag}>")).unwrap().0
}

// ---- Values ----

#[test]
fn pages_are_as_they_were_reviewed() {
    let mut site = Site::busy(1000);
    for path in ["/", "/tube/mail"] {
        for accept in [HTML, TEXT, JSON] {
            let mut page = site.body(path, accept);
            assert!(!page.contains("secret"), "{path} shows a body");
            if accept == HTML {
                // They have hashes in the head.
                page = page.replace(inner(&page.clone(), "style"), "...");
                page = page.replace(inner(&page.clone(), "script"), "...");
            }
            let name = if path == "/" { "server" } else { "tube" };
            let name = format!("{name}-{}", accept.rsplit('/').next().unwrap());
            insta::assert_snapshot!(name, site.redacted(&page));
        }
    }
    site.expect("/tube/default", HTML, &["There are no jobs."]);
    site.driver.set_draining(true);
    assert_eq!(site.json("/")["server"]["draining"], true);
    let attention = &site.json("/")["attention"];
    assert_eq!((&attention[0]["rule"], &attention[0]["tube"]), (&"server".into(), &Value::Null));
    let line = "\nwarning   server  draining: puts are rejected until SIGUSR2\n";
    site.expect("/", TEXT, &[line]);
}

#[test]
fn rates_are_those_of_the_last_interval() {
    let mut site = Site::new();
    // The first sample is taken.
    site.driver.iterate();
    site.ask("use mail\r\n".to_owned() + &PUT.repeat(7));
    for page in [site.json("/")["totals"].clone(), site.json("/tube/mail")] {
        assert!(page["puts_per_second"].is_null() && page["deletes_per_second"].is_null());
    }
    site.expect("/", HTML, &["<td>-<td>-<td>"]);
    site.driver.advance(INTERVAL);
    site.ask(PUT.repeat(50) + "delete 1\r\ndelete 2\r\n");
    site.driver.advance(INTERVAL);
    for page in [site.json("/")["totals"].clone(), site.json("/tube/mail")] {
        let rates = (&page["puts_per_second"], &page["deletes_per_second"]);
        assert_eq!(rates, (&10.0.into(), &0.4.into()));
    }
    site.driver.advance(INTERVAL);
    assert_eq!(site.json("/tube/mail")["puts_per_second"], 0.0);
    // The tube is removed, and another one gets its place.
    let delete = |id| format!("delete {id}\r\n");
    site.ask((3..=57).map(delete).collect::<String>());
    for commands in [
        "use default\r\nuse again\r\n".to_owned(),
        (58..=117).map(|id| PUT.to_owned() + &delete(id)).collect(),
    ] {
        site.ask(commands);
        assert!(site.json("/tube/again")["puts_per_second"].is_null());
    }
    assert_eq!(site.get("/tube/mail", JSON).status, 404);
}

/// It may have as many puts and deletes as the former one, and fewer ends of reservations.
#[test]
fn a_tube_that_is_created_again_has_no_failures_of_the_former_one() {
    let mut site = Site::new();
    site.driver.iterate();
    let put = "use mail\r\n".to_owned() + PUT;
    site.ask(put.clone() + "watch mail\r\nreserve\r\nrelease 1 0 0\r\n");
    for _ in 0..150 {
        site.driver.advance(INTERVAL);
    }
    site.ask("delete 1\r\nignore mail\r\nuse default\r\n".to_owned() + &put);
    assert_eq!(site.json("/tube/mail")["recent_ends"], 0);
}

#[test]
fn the_history_has_a_fixed_size() {
    let mut site = Site::new();
    site.driver.iterate();
    assert_eq!(site.json("/")["history"], Value::Array(Vec::new()));
    for _ in 0..300 {
        site.ask(PUT.repeat(5));
        site.driver.advance(INTERVAL);
    }
    let page = site.json("/");
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
    site.ask(PUT.repeat(36));
    site.driver.now = site.driver.now + Nanos::from_secs(3_600);
    site.driver.advance(Nanos::from_secs(6));
    let page = site.json("/");
    let history = page["history"].as_array().unwrap();
    assert_eq!((history.len(), &history[118]["puts_per_second"]), (120, &0.0.into()));
    assert!(site.body("/", HTML).len() < HTML_MAX);
}

// ---- What needs attention ----

#[test]
fn the_page_begins_with_what_needs_attention() {
    let mut site = Site::new();
    assert!(site.body("/", TEXT).starts_with("Nothing needs attention\n\n"));
    assert!(site.body("/", HTML).contains("<h1 id=verdict>Nothing needs attention</h1>"));
    assert_eq!(site.json("/")["attention"], Value::Array(Vec::new()));
    // A job that waits, a name that a shell would interpret, and a pause, which is only a notice.
    site.ask("use a;b\r\nput 0 0 9 1\r\nx\r\n");
    site.ask("use bill\r\nput 0 0 9 1\r\nx\r\nwatch bill\r\nreserve\r\nbury 2 0\r\n");
    site.ask("use slow\r\nput 0 0 9 1\r\nx\r\npause-tube slow 540\r\nwatch slow\r\n");
    site.ask("ignore bill\r\n");
    site.driver.advance(Nanos::from_millis(61_500));
    let lines = [
        "critical  a;b     1 job waits, the oldest for 61 s; no worker watches  beanstalkctl workers 'a;b'",
        "warning   bill    1 buried, the first is job 2                         beanstalkctl failed bill",
        "notice    slow    1 ready, paused for another 7 min                    beanstalkctl resume slow",
    ];
    let text = format!("2 of 4 tubes need attention\n{}\n\n", lines.join("\n"));
    assert_eq!(site.body("/", TEXT).split_inclusive("\n\n").next(), Some(&*text));
    // A filter of the table hides no problem.
    assert!(site.body("/?filter=none", TEXT).starts_with("2 of 4 tubes need attention\n"));
    let expected = serde_json::json!({
        "level": "critical", "rule": "no-worker", "tube": "a;b",
        "text": "1 job waits, the oldest for 61 s; no worker watches",
        "remedy": "beanstalkctl workers 'a;b'",
    });
    assert_eq!(site.json("/")["attention"][0], expected);
    let item = "<li class=critical><b>critical</b> <a href=\"tube/a%3Bb\">a;b</a> <span>1 job waits, the oldest \
                for 61 s; no worker watches</span> <code>beanstalkctl workers &#39;a;b&#39;</code>\n";
    let row = "slow</a> <small>paused 7m</small><td>1<td>";
    site.expect("/", HTML, &[item, row, "<a href=\"tube/slow#oldest\">61s</a>"]);
    assert_eq!(site.json("/tube/bill")["attention"][0]["rule"], "buried");
    assert_eq!(site.json("/tube/slow")["attention"].as_array().unwrap().len(), 1);
    // Jobs that wait for a slot of their key wait too. Here the oldest one is the last of those that are found.
    site.ask("use keys\r\nwatch keys\r\nput 9 0 9000 1 con:k\r\nx\r\n");
    site.ask("put 0 0 9000 1 con:k\r\nx\r\n".repeat(2_000));
    assert!(site.ask("reserve\r\n").starts_with("RESERVED 5 "));
    site.driver.advance(Nanos::from_secs(1_000));
    let page = site.json("/tube/keys");
    assert_eq!(page["attention"][0]["rule"], "slow");
    assert_eq!(page["oldest_ready_id"], 4);
    assert_eq!(page["jobs"][0]["state"], "reserved");
    let ready = page["jobs"].as_array().unwrap().iter().filter(|job| job["state"] == "ready");
    assert_eq!(ready.count(), 10);
    // A server at another port has another line.
    site.driver.set_tool_server("127.0.0.1:11305");
    let remedy = &site.json("/")["attention"][1]["remedy"];
    assert_eq!(remedy, "beanstalkctl -s 127.0.0.1:11305 failed bill");
}

#[test]
fn changes_that_are_not_stored_need_attention() {
    let disk = FakeDisk::remote(&Files::new(), RemoteSetup { chunk_len: 30, eager: None });
    let syncing = Syncing::Remote(Nanos::from_secs(5));
    let mut site = Site::start_with(Options::binlog(64 * 1024, syncing), Some(&disk));
    site.ask(PUT);
    site.driver.advance(Nanos::from_millis(1_100));
    assert_eq!(site.get("/readyz", TEXT).body, "changes are not stored\n");
    let text = "critical  server  etcd has not stored a change for more than 1 s: replies wait";
    let page = site.body("/", TEXT);
    // No command helps.
    assert_eq!(page.lines().nth(1), Some(text), "{page}");
    assert!(!site.body("/", HTML).contains("<code>"));
}

#[test]
fn at_most_20_problems_are_shown() {
    let mut site = Site::new();
    for number in 0..30 {
        let name = format!("{number:/>200}");
        site.ask(format!(
            "use {name}\r\nput 0 0 9 1\r\nx\r\nwatch {name}\r\nreserve\r\nbury {} 0\r\n",
            number + 1
        ));
    }
    let page = site.json("/");
    let problems = page["attention"].as_array().unwrap();
    assert_eq!((problems.len(), problems[19]["tube"].as_str().unwrap().len()), (20, 200));
    assert!(problems.is_sorted_by_key(|problem| problem["tube"].as_str().unwrap()));
    let text = site.body("/", TEXT);
    assert!(
        text.starts_with("30 of 31 tubes need attention\n") && text.contains("\nand 10 more\n\n")
    );
    let html = site.body("/", HTML);
    let shown = html.matches("<li class=warning>").count();
    assert!((5..20).contains(&shown) && html.contains(&format!("<li>and {} more\n", 30 - shown)));
    assert!(html.len() < HTML_MAX, "{} bytes", html.len());
    // The first line counts the server too if its problem is not among them.
    let mut site = Site::new();
    for number in 0..21 {
        site.ask(format!("use t{number}\r\nput 0 0 9 1\r\nx\r\n"));
    }
    site.driver.advance(Nanos::from_secs(61));
    site.driver.set_draining(true);
    let text = site.body("/", TEXT);
    assert!(text.starts_with("The server and 21 of 22 tubes need attention\n"), "{text}");
    assert!(!text.contains("draining:"), "{text}");
}

#[test]
fn failures_of_the_last_minutes_need_attention() {
    let mut site = Site::new();
    let fail = |site: &mut Site, from: u64| {
        for id in from..from + 6 {
            site.ask(format!("put 0 0 9 1\r\nx\r\nreserve\r\nbury {id} 0\r\nkick-job {id}\r\nreserve\r\ndelete {id}\r\n"));
        }
    };
    let rules = |site: &mut Site| {
        let page = site.json("/tube/default");
        let rules = page["attention"].as_array().unwrap().iter().map(|it| it["text"].to_string());
        (rules.collect::<Vec<String>>().concat(), page["recent_failures"].as_u64().unwrap())
    };
    fail(&mut site, 1);
    // None is buried any more.
    let remedy = &site.json("/tube/default")["attention"][0]["remedy"];
    assert_eq!(remedy, "beanstalkctl workers default");
    let text = "\"6 of 12 reservations failed in the last 10 min\"".to_owned();
    assert_eq!(rules(&mut site), (text.clone(), 6));
    let minutes =
        |site: &mut Site, count| (0..count * 12).for_each(|_| site.driver.advance(INTERVAL));
    minutes(&mut site, 6);
    assert_eq!(rules(&mut site), (text, 6));
    minutes(&mut site, 5);
    assert_eq!(rules(&mut site), (String::new(), 0));
    assert_eq!(site.json("/tube/default")["ended_bury"], 6);
}

#[test]
fn a_tube_with_a_recent_delete_is_not_stuck() {
    let mut site = Site::new();
    site.ask(PUT.repeat(2));
    site.driver.advance(Nanos::from_secs(61));
    assert_eq!(site.json("/tube/default")["attention"][0]["rule"], "stuck");
    // No sample has it yet.
    site.ask("reserve\r\ndelete 1\r\n");
    assert_eq!(site.json("/tube/default")["attention"], Value::Array(Vec::new()));
}

// ---- Order and limits ----

#[test]
fn tubes_are_sorted_and_filtered() {
    let mut site = Site::new();
    for (name, jobs, pri) in [("a", 1, 0), ("b", 3, 5_000), ("ab", 2, 5_000), ("c+d", 0, 0)] {
        let put = format!("put {pri} 0 9 1\r\nx\r\n").repeat(jobs);
        site.ask(format!("use {name}\r\nwatch {name}\r\n{put}"));
    }
    // There are no cold jobs, and no such order.
    for (path, expected) in [
        ("/", "a ab b c+d default"),
        ("/?sort=cold", "a ab b c+d default"),
        ("/?sort=-unknown", "default c+d b ab a"),
        ("/?sort=unknown", "a ab b c+d default"),
        ("/?sort=name", "a ab b c+d default"),
        ("/?sort=-name", "default c+d b ab a"),
        ("/?sort=ready", "b ab a c+d default"),
        ("/?sort=-ready", "c+d default a ab b"),
        ("/?sort=urgent", "a ab b c+d default"),
        ("/?filter=b", "ab b"),
        ("/?sort=-ready&filter=b", "ab b"),
        ("/?filter=c%2Bd", "c+d"),
        ("/?filter=c+d", ""),
        ("/?filter=nothing", ""),
        ("/?filter=", "a ab b c+d default"),
    ] {
        assert_eq!(site.names(path), expected, "{path}");
    }
    assert_eq!(site.json("/?filter=b")["tubes_not_shown"], 0);
    let column = "<th scope=col aria-sort=ascending><a href=\"?sort=ready&amp;filter=b\">ready</a>";
    let input = "<input type=hidden name=sort value=\"-ready\">";
    site.expect("/?sort=-ready&filter=b", HTML, &[column, input]);
    // Rows do not jump while tubes change.
    site.ask("use c+d\r\nput 0 0 9 1\r\nx\r\nwatch c+d\r\n");
    site.driver.advance(INTERVAL);
    assert_eq!(site.names("/"), "a ab b c+d default");
}

#[test]
fn a_tube_that_moves_while_the_page_is_made_is_counted_once() {
    let mut site = Site::new();
    site.watch_tubes(300, 0);
    site.ask((0..700).map(|number| format!("use mail{number}\r\n{PUT}")).collect::<String>());
    site.driver.advance(Nanos::from_secs(61));
    let mut idle = 0..300;
    let page = site.request_while(get("/?filter=mail", TEXT), |site| {
        // The last tube, which was scanned before, moves to the place of each that is removed.
        let removed = idle.by_ref().take(20).map(|tube| format!("ignore tube{tube}\r\n"));
        site.ask(removed.collect::<String>());
    });
    let text = page.body;
    assert!(text.starts_with("700 of ") && text.contains("\nand 680 more\n"), "{text}");
    assert!(text.ends_with("\n600 more tubes are not shown\n"), "{text}");
}

#[test]
fn of_10000_tubes_the_first_100_are_shown() {
    let mut site = Site::new();
    for number in 0..10_000 {
        let jobs = number * 7_919 % 10_000 / 100;
        let put = "put 0 0 9 0\r\n\r\n".repeat(jobs.min(3));
        site.ask(format!("use tube{number}\r\nwatch tube{number}\r\n{put}"));
    }
    site.ask("use tube77\r\n".to_owned() + &"put 0 0 9 0\r\n\r\n".repeat(5));
    let page = site.json("/");
    assert_eq!(page["tubes"].as_array().unwrap().len(), 100);
    assert_eq!(page["tubes_not_shown"], 9_901);
    assert_eq!(page["tubes"][0]["name"], "default");
    let by_ready = site.names("/?sort=ready");
    let by_ready: Vec<&str> = by_ready.split(' ').collect();
    assert!(by_ready[0] == "tube77" && by_ready[1..].is_sorted(), "{by_ready:?}");
    let names = site.names("/");
    assert!(names.starts_with("default tube0 tube1 tube10 ") && names.ends_with(" tube1086"));
    let html = site.get("/", HTML);
    assert!(html.body.contains("<p id=more>9,901 more tubes are not shown</p>"));
    assert!(html.body.len() < HTML_MAX, "{} bytes", html.body.len());
    // 128 tubes in a slice.
    assert!(html.pieces > 10_000 / 128, "{} pieces", html.pieces);
    assert!(site.body("/", TEXT).ends_with("\n9,901 more tubes are not shown\n"));
    // Rates of all tubes are sampled, in slices as well.
    let before = site.driver.iterations;
    site.driver.advance(INTERVAL);
    site.driver.advance(INTERVAL);
    let iterations = site.driver.iterations - before;
    assert!(iterations > 2 * 10_000 / 128, "all were sampled in {iterations} iterations");
    let page = site.json("/?sort=puts_per_second");
    assert_eq!(page["tubes"][99]["puts_per_second"], 0.0);
}

#[test]
fn a_page_is_short_even_with_the_longest_names() {
    let mut site = Site::new();
    site.driver.advance(Nanos::from_secs(700));
    site.ask((0..300).map(|number| format!("watch {number:/>200}\r\n")).collect::<String>());
    let filter = "%2F".repeat(170);
    let [one, both] = [1, 2].map(|count| format!("/?filter={}", filter.repeat(count)));
    for path in [&one, &both, "/"] {
        let html = site.body(path, HTML);
        assert!(html.len() < HTML_MAX, "{} bytes", html.len());
        assert!(html.ends_with("</script>\n"));
    }
    // The part of a filter that fits in the page would match.
    assert_eq!(site.names(&both), "");
    let html = site.body("/", HTML);
    let shown = html.matches("<tr><th scope=row>").count();
    assert!(shown > 10, "{shown} rows");
    assert!(html.contains(&format!("<p id=more>{} more tubes", 301 - shown)));
    assert_eq!(site.names("/").split(' ').count(), 100);
}

// ---- The page of a tube ----

#[test]
fn a_tube_has_its_first_jobs_in_the_order_of_their_service() {
    let mut site = Site::new();
    for (name, pri) in [("other", 0), ("mail", 500)] {
        site.ask(format!("use {name}\r\n"));
        for number in 0..50 {
            site.ask(format!("put {} 0 60 6\r\nsecret\r\n", pri + number % 7));
            site.ask(format!("put {pri} {} 60 6\r\nsecret\r\n", 100 - number));
        }
    }
    site.ask("watch mail\r\nignore default\r\n");
    for _ in 0..20 {
        let reply = site.ask("reserve\r\n");
        let id = reply.split(' ').nth(1).unwrap();
        site.ask(format!("bury {id} 3\r\n"));
    }
    // The reserved jobs of other tubes are not shown.
    for _ in 0..12 {
        let worker = site.driver.connect();
        let reserve = "watch other\r\nignore default\r\nreserve\r\nwatch mail\r\nignore other\r\n";
        site.driver.ask(worker, format!("{reserve}reserve\r\n"));
    }
    site.driver.advance(Nanos::from_millis(3_500));
    let page = site.json("/tube/mail");
    let jobs = page["jobs"].as_array().unwrap();
    let of = |state| -> Vec<&Value> { jobs.iter().filter(|job| job["state"] == state).collect() };
    let [ready, reserved, delayed, buried] = ["ready", "reserved", "delayed", "buried"].map(of);
    assert_eq!([ready.len(), reserved.len(), delayed.len(), buried.len()], [10, 12, 10, 20]);
    let order = |job: &&Value| (job["pri"].as_u64().unwrap(), job["id"].as_u64().unwrap());
    assert!(ready.is_sorted_by_key(order) && order(&ready[0]).0 > 502);
    let left = |job: &&Value| job["time_left_seconds"].as_f64().unwrap();
    assert!(delayed.is_sorted_by(|a, b| left(a) < left(b)));
    assert!(reserved.is_sorted_by(|a, b| left(a) <= left(b)) && left(&reserved[0]) < 57.0);
    assert_eq!((left(&delayed[0]).ceil(), &delayed[0]["delay_seconds"]), (48.0, &51.0.into()));
    assert_eq!((&buried[0]["buries"], &buried[0]["pri"]), (&1.into(), &3.into()));
    assert_eq!((&buried[0]["bytes"], whole(&buried[0]["age_seconds"])), (&6.into(), Some(3.0)));
    for accept in [HTML, TEXT, JSON] {
        let body = site.body("/tube/mail", accept);
        assert!(!body.contains("secret") && body.len() < HTML_MAX, "{accept}");
    }
}

#[test]
fn a_tube_page_has_holders_and_the_reasons_of_buries() {
    let settings = Settings { bury_after: NonZero::new(3), ..Settings::DEFAULT };
    let mut site = Site::start(settings, None);
    site.ask("use mail\r\nwatch mail\r\nput 0 0 1 1\r\nx\r\n");
    site.ask("put 9 0 60 1\r\nx\r\nput 5 0 60 1\r\nx\r\n");
    for _ in 0..3 {
        assert!(site.ask("reserve\r\n").starts_with("RESERVED 1 "));
        site.driver.advance(Nanos::from_millis(1_100));
    }
    site.ask("reserve\r\nbury 3 0\r\nreserve\r\n");
    site.driver.advance(Nanos::from_millis(30_500));
    let page = site.json("/tube/mail");
    let jobs = page["jobs"].as_array().unwrap();
    let of = |id: u64, key: &str| jobs.iter().find(|job| job["id"] == id).unwrap()[key].clone();
    let why = |id: u64| of(id, "why");
    assert_eq!((why(1), why(3)), ("came back 3 times".into(), "worker".into()));
    assert_eq!((why(2), of(2, "address")), (Value::Null, "10.0.0.7:51514".into()));
    assert_eq!(whole(&of(2, "held_seconds")), Some(30.0));
    let texts = [" came back 3 times\n", " 10.0.0.7:51514 for 30s\n"];
    site.expect("/tube/mail", TEXT, &texts);
}

#[test]
fn tube_names_in_paths_are_decoded_and_validated() {
    let mut site = Site::new();
    for name in ["a/b", "+;.$_()", "..", "-", "a%2Fb"] {
        site.ask(format!("watch {name}\r\n"));
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
        assert_eq!(site.json(path)["name"], name, "{path}");
    }
    let paths = "/tube /tube/ /tube/none /tube/- /tube/a%252Fb /tube/%00 /tube/%ff /tube/default/ \
                 /tubes/default // /index.html /favicon.ico";
    for path in paths.split(' ') {
        assert_eq!(site.get(path, HTML).status, 404, "{path}");
    }
    // A browser removes the part `..` from a path.
    site.expect("/", HTML, &["<a href=\"tube/a%2Fb\">a/b</a>", "<th scope=row>..<td>"]);
}

#[test]
fn a_tube_that_is_removed_while_its_page_is_made_is_shown_as_it_was() {
    let mut site = Site::new();
    site.ask("watch short\r\n");
    let response = site.request_while(get("/tube/short", HTML), |site| {
        site.ask("ignore short\r\n");
    });
    assert!(response.body.contains("<h1>short</h1>") && response.body.ends_with("</script>\n"));
    assert_eq!(site.get("/tube/short", HTML).status, 404);
}

// ---- HTTP ----

#[test]
fn no_text_becomes_markup() {
    let hostile = Options { hostname: "<b>\"host'&", ..Options::DEFAULT };
    let mut site = Site::start_with(hostile, None);
    let path = "/?filter=%22%3E%3Cscript%3Ealert(1)%3C/script%3E%27%26";
    let html = site.body(path, HTML);
    assert!(html.contains("on &lt;b&gt;&quot;host&#39;&amp;</title>"), "{html}");
    let value = "value=\"&quot;&gt;&lt;script&gt;alert(1)&lt;/script&gt;&#39;&amp;\"";
    assert!(html.contains(value), "{html}");
    assert!(html.contains("&amp;filter=%22%3E%3Cscript%3Ealert%281%29%3C%2Fscript%3E%27%26\""));
    assert_eq!(html.matches("<script").count(), 1);
    assert_eq!(site.json(path)["server"]["hostname"], "<b>\"host'&");
}

#[test]
fn the_accepted_type_is_sent_with_strict_fields() {
    let mut site = Site::new();
    insta::assert_snapshot!("head", site.get("/", HTML).head.replace('\r', ""));
    let head = site.get("/", HTML).head;
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    for (accept, expected) in [
        ("*/*", "text/html; charset=utf-8"),
        (browser, "text/html; charset=utf-8"),
        (TEXT, "text/plain; charset=utf-8"),
        ("application/json;q=0.9, text/plain;q=0.8", JSON),
    ] {
        for path in ["/", "/tube/default"] {
            let expected = head.replace("text/html; charset=utf-8", expected);
            assert_eq!(site.get(path, accept).head, expected);
        }
    }
    // `format` overrides `Accept`.
    for (format, expected) in [
        ("html", "text/html; charset=utf-8"),
        ("text", "text/plain; charset=utf-8"),
        ("json", JSON),
        ("xml", JSON),
    ] {
        let expected = head.replace("text/html; charset=utf-8", expected);
        for path in ["/?sort=name&", "/tube/default?"] {
            assert_eq!(site.get(&format!("{path}format={format}"), JSON).head, expected);
        }
    }
    assert_eq!(site.request("GET / HTTP/1.0\r\n\r\n").head, head);
    // Other paths have no more fields than before.
    let expected = "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
                    Cache-Control: no-store\r\nConnection: close\r\n";
    assert_eq!(site.get("/metrics", HTML).head, expected);
}

#[test]
fn the_policy_allows_the_style_and_the_script_of_the_page() {
    let mut site = Site::new();
    for path in ["/", "/tube/default"] {
        let Response { head, body, .. } = site.get(path, HTML);
        for element in ["style", "script"] {
            let hash = Sha256::digest(inner(&body, element));
            let hash = base64::engine::general_purpose::STANDARD.encode(hash);
            let source = format!("{element}-src 'sha256-{hash}';");
            assert!(head.contains(&source), "html.rs must have {source}");
            assert_eq!(body.matches(&format!("<{element}")).count(), 1);
        }
    }
}
