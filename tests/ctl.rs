//! `beanstalkctl` against our server and against C beanstalkd: what it prints, what it changes, and its
//! exit codes. Only one test has a terminal, so that nothing is asked in the others.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod harness;

use harness::client::{Client, unix};
use harness::process::{self, BEANSTALKD, Daemon, Process, command, path_text, run_command};
use harness::{skip, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write, read_to_string};
use std::net::{TcpListener, TcpStream};
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// Returns the tool with these arguments, in which `~` stands for a space.
fn tool(arguments: &str) -> Command {
    let arguments = arguments.split_whitespace().map(|argument| argument.replace('~', " "));
    command(TOOL, arguments)
}

const TOOL: &str = env!("CARGO_BIN_EXE_beanstalkctl");

/// Where a server, or a fake of one, listens.
struct Place(String);

struct Server {
    /// Whether it has the commands that C beanstalkd lacks.
    is_ours: bool,
    place: Place,
    address: SockAddr,
    daemon: Daemon,
    directory: TempDir,
}

/// What the tool did.
#[derive(Debug)]
struct Done {
    code: i32,
    out: String,
    err: String,
}

impl Deref for Server {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl Done {
    /// Asserts the exit code, the output and the errors, or a part of a line of these.
    #[track_caller]
    fn expect(&self, code: i32, out: &str, err: &str) {
        assert_eq!((self.code, self.out.as_str()), (code, out), "{self:?}");
        let is_whole = err.is_empty() || err.ends_with('\n');
        assert!(if is_whole { self.err == err } else { self.err.contains(err) }, "{self:?}");
    }
}

impl Server {
    fn ours(flags: &[&str]) -> Server {
        let (daemon, address) = Daemon::on_loopback(flags);
        let directory = tempfile::tempdir().unwrap();
        let (place, address) = (Place(address.to_string()), address.into());
        Server { is_ours: true, place, address, daemon, directory }
    }

    fn c() -> Option<Server> {
        let Some(program) = process::c_beanstalkd() else {
            skip("C beanstalkd is not installed");
            return None;
        };
        Some(Server::on_path(&program, false))
    }

    /// A server on a Unix socket.
    fn on_path(program: &Path, is_ours: bool) -> Server {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let place = format!("unix:{}", path_text(&path));
        let daemon = Daemon::start(program, &["-l", &place]);
        process::connect_when_ready(&unix(&path));
        Server { is_ours, place: Place(place), address: unix(&path), daemon, directory }
    }

    fn client(&self) -> Client {
        Client::connect(self.address.clone())
    }

    /// A worker of one tube.
    fn worker(&self, tube: &str) -> Client {
        Client::in_tube(self.address.clone(), tube)
    }

    /// Runs the tool with standard input.
    fn feed(&self, arguments: &str, input: &[u8]) -> Done {
        let path = self.directory.path().join("input");
        std::fs::write(&path, input).unwrap();
        let mut command = self.command(arguments);
        command.stdin(File::open(path).unwrap());
        done(run_command(command))
    }

    /// Returns a number of the statistics of a tube; 0 without the tube.
    fn count(&self, tube: &str, key: &str) -> u64 {
        self.client().ask(format!("stats-tube {tube}\r\n")).value(key).unwrap_or_default()
    }

    /// Returns the values of these keys of a job.
    fn values<const N: usize>(&self, id: u64, keys: [&str; N]) -> [u64; N] {
        let stats = self.client().ask(format!("stats-job {id}\r\n"));
        keys.map(|key| stats.value(key).unwrap())
    }

    /// From now on the server refuses puts.
    fn drain(&self) {
        self.daemon.signal(Signal::USR1);
        let mut client = self.client();
        wait_until("puts are refused", || client.ask("put 0 0 1 0\r\n\r\n").line == "DRAINING");
    }

    fn counts(&self, tube: &str) -> [u64; 4] {
        ["ready", "reserved", "delayed", "buried"]
            .map(|state| self.count(tube, &format!("current-jobs-{state}")))
    }

    /// Puts jobs and buries them; returns their ids.
    fn bury(&self, tube: &str, count: usize) -> Vec<u64> {
        let mut worker = self.worker(tube);
        let bury = |number| {
            let id = worker.put(format!("body {number:02}"));
            worker.expect(format!("reserve-job {id}\r\n"), &format!("RESERVED {id} 7"));
            worker.expect(format!("bury {id} 7\r\n"), "BURIED");
            id
        };
        (0..count).map(bury).collect()
    }
}

impl Place {
    fn command(&self, arguments: &str) -> Command {
        tool(&format!("-s {} {arguments}", self.0))
    }

    fn run(&self, arguments: &str) -> Done {
        done(run_command(self.command(arguments)))
    }

    /// Starts the tool, whose output the test reads.
    fn spawn(&self, arguments: &str) -> Process {
        Process::spawn(self.command(arguments).stdout(Stdio::piped()))
    }

    /// Runs the tool, which must succeed, and returns its output.
    #[track_caller]
    fn ok(&self, arguments: &str) -> String {
        let done = self.run(arguments);
        assert_eq!((done.code, done.err.as_str()), (0, ""), "{arguments:?}: {}", done.out);
        done.out
    }

    /// Runs the tool, and asserts its exit code, output and a part of its errors.
    #[track_caller]
    fn expect(&self, arguments: &str, code: i32, out: &str, err: &str) {
        self.run(arguments).expect(code, out, err);
    }

    /// Returns the objects that the tool prints with `--json`.
    #[track_caller]
    fn json(&self, arguments: &str) -> Vec<Value> {
        let out = self.ok(&format!("{arguments} --json"));
        out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Returns the first lines of what `top` prints in a loop, those with this beginning.
    fn top(&self, arguments: &str, start: &str, count: usize) -> Vec<String> {
        let mut top = self.spawn(&format!("top {arguments}"));
        let lines = top.stdout().lines();
        lines.map(Result::unwrap).filter(|line| line.starts_with(start)).take(count).collect()
    }
}

fn done(output: Output) -> Done {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().expect("it exits by itself");
    Done { code, out: text(output.stdout), err: text(output.stderr) }
}

fn run(arguments: &str) -> Done {
    done(run_command(tool(arguments)))
}

/// Returns the keys of an object.
fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

/// Runs a test on our server and on C beanstalkd.
fn on_both(test: impl Fn(&Server)) {
    test(&Server::ours(&[]));
    if let Some(c) = Server::c() {
        test(&c);
    }
}

fn ids(jobs: &[Value]) -> Vec<u64> {
    jobs.iter().map(|job| job["id"].as_u64().unwrap()).collect()
}

// ---- See ----

#[test]
fn status_shows_tubes_in_trouble_first_and_not_itself() {
    on_both(|server| {
        server.bury("zoo", 2);
        let mut worker = server.worker("mail");
        worker.put("a");
        worker.put("b");
        worker.expect("reserve\r\n", "RESERVED 3 1");
        let _waits = {
            let mut idle = server.worker("idle");
            idle.send("reserve\r\n");
            wait_until("it waits", || server.count("idle", "current-waiting") == 1);
            idle
        };
        let rows = server.json("status");
        let names: Vec<&str> = rows.iter().map(|row| row["tube"].as_str().unwrap()).collect();
        assert_eq!(names, ["zoo", "default", "idle", "mail"]);
        let wanted = "buried delayed held idle level oldest ready rule tube workers";
        assert_eq!(keys(&rows[0]), wanted.split(' ').collect());
        assert_eq!((&rows[0]["level"], &rows[0]["rule"]), (&"warning".into(), &"buried".into()));
        assert_eq!((&rows[1]["level"], &rows[1]["workers"]), (&Value::Null, &0.into()));
        assert_eq!((&rows[2]["workers"], &rows[2]["idle"]), (&1.into(), &1.into()));
        assert_eq!((&rows[3]["ready"], &rows[3]["held"]), (&1.into(), &1.into()));
        let table = server.ok("status");
        let head: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
        let wanted = "TUBE READY HELD DELAY BURIED OLDEST WORKERS IDLE NOTE";
        assert_eq!(head, wanted.split(' ').collect::<Vec<_>>());
        assert!(table.lines().nth(1).unwrap().ends_with("buried"), "{table}");
        assert_eq!(server.ok("tubes"), "default\nidle\nmail\nzoo\n");
        assert_eq!(server.json("tubes")[0]["tube"], "default");
    });
}

#[test]
fn tables_have_80_columns_with_the_longest_names() {
    let server = Server::ours(&[]);
    let long = |first: char| format!("{first}{}", "x".repeat(199));
    for first in ['a', 'b'] {
        server.bury(&long(first), 1);
    }
    server.client().expect(format!("pause-tube {} 4294967295\r\n", long('a')), "PAUSED");
    for arguments in ["status", "failed", &format!("jobs {}", long('a'))] {
        let table = server.ok(arguments);
        assert!(table.lines().count() >= 2, "{arguments:?}: {table}");
        for line in table.lines() {
            assert!(line.chars().count() <= 80, "{arguments:?}: {line}");
        }
    }
    assert!(server.ok("status").contains('…'));
    assert_eq!(server.json("status")[0]["tube"], long('a'));
}

#[test]
fn check_has_the_codes_of_a_nagios_plugin() {
    on_both(|server| {
        server.expect("check", 0, "OK: 1 tube, 0 ready, 0 buried\n", "");
        // A notice is no problem.
        let mut worker = server.worker("paused");
        worker.put("a");
        server.ok("pause paused");
        server.expect("check", 0, "OK: 2 tubes, 1 ready, 0 buried\n", "");
        server.bury("bill", 12);
        server.expect("check", 1, "WARNING: bill: 12 buried\n", "");
        let json = "{\"state\":\"WARNING\",\"text\":\"bill: 12 buried\"}\n";
        server.expect("check --json", 1, json, "");
    });
    // A wrong command line is not critical.
    for arguments in
        ["check --bad", "check -s http://x", "check --all", "--timeout 0 check", "check x"]
    {
        let done = run(arguments);
        assert_eq!((done.code, &*done.err, done.out.lines().count()), (3, "", 1), "{done:?}");
        assert!(done.out.starts_with("UNKNOWN: "), "{done:?}");
    }
    // Words of options name no command.
    let done = run("-s jobs check --bad");
    assert_eq!((done.code, &*done.err, &*done.out), (3, "", "UNKNOWN: unknown flag: --bad\n"));
    assert_eq!(run("-s check jobs --bad").code, 2);
    let json = "{\"state\":\"UNKNOWN\",\"text\":\"unknown flag: --bad\"}\n";
    for arguments in ["check --json --bad", "--bad --json check", "-s jobs check --bad --json"] {
        run(arguments).expect(3, json, "");
    }
    // Of several that are critical, the one that has waited longest.
    let place = fake(|line| match line {
        "list-tubes" => "---\n- a\n- b\n",
        "list-jobs a ready 1" => "---\njobs:\n- {id: 7, age: 100}\n",
        "list-jobs b ready 1" => "---\njobs:\n- {id: 8, age: 200}\n",
        _ => "---\ncurrent-jobs-ready: 2\n",
    });
    let critical = "CRITICAL: b: 2 jobs wait, the oldest for 3 min; no worker watches; 1 more\n";
    place.expect("check", 2, critical, "");
    let done = run("-s unix:/nowhere/at/all check");
    assert_eq!(done.code, 3);
    assert!(done.out.starts_with("UNKNOWN: cannot connect to unix:/nowhere/at/all: "), "{done:?}");
}

/// A check takes 5 seconds if a tube looks stuck.
#[test]
fn a_tube_whose_jobs_were_deleted_between_two_looks_is_not_stuck() {
    let looks = AtomicU64::new(0);
    let place = fake(move |line| match line.split(' ').next().unwrap() {
        "list-tubes" => "---\n- mail\n".into(),
        "stats-tube" => {
            let deletes = looks.fetch_add(1, Ordering::Relaxed);
            format!("---\ncurrent-jobs-ready: 2\ncurrent-watching: 1\ncmd-delete: {deletes}\n")
        }
        _ => "---\njobs:\n- {id: 7, age: 100}\n".into(),
    });
    place.expect("check", 0, "OK: 1 tube, 2 ready, 0 buried\n", "");
}

#[test]
fn top_prints_one_table_after_the_other_until_it_is_interrupted() {
    let server = Server::ours(&[]);
    server.bury("bill", 1);
    let mut top = server.spawn("top 1");
    let lines = top.stdout().lines().map(Result::unwrap);
    assert_eq!(lines.filter(|line| line.starts_with("TUBE")).take(2).count(), 2);
    assert_eq!(top.end(Signal::INT).code(), Some(0));
}

/// In one look it is not known whether a job was just deleted.
#[test]
fn top_shows_a_stuck_tube_once_it_has_looked_long_enough() {
    let place = fake(|line| match line.split(' ').next().unwrap() {
        "list-tubes" => "---\n- mail\n",
        "stats-tube" => "---\ncurrent-jobs-ready: 2\ncurrent-watching: 1\n",
        _ => "---\njobs:\n- {id: 7, age: 100}\n",
    });
    let lines = place.top("3", "mail", 3);
    let is_stuck = lines.iter().map(|line| line.contains("stuck")).collect::<Vec<_>>();
    assert_eq!(is_stuck, [false, false, true], "{lines:?}");
}

#[test]
fn top_shows_the_whole_rule_in_80_columns() {
    let place = fake(|line| match line.split(' ').next().unwrap() {
        "list-tubes" => format!("---\n- {}\n", "x".repeat(200)),
        "stats-tube" => "---\ncurrent-jobs-ready: 123456\ncurrent-jobs-buried: 12345\n".into(),
        _ => "---\njobs:\n- {id: 7, age: 4800, delay: 3600}\n".into(),
    });
    let lines = place.top("", "", 2);
    assert!(lines[1].contains(" no-worker") && lines[1].contains(" 20m "), "{lines:?}");
    assert!(lines.iter().all(|line| line.chars().count() <= 80), "{lines:?}");
}

#[test]
fn jobs_are_listed_page_by_page() {
    let server = Server::ours(&[]);
    let mut worker = server.worker("mail");
    let put: Vec<u64> = (0..250).map(|_| worker.put("x")).collect();
    worker.expect("reserve\r\n", "RESERVED 1 1");
    let jobs = server.json("jobs mail");
    assert_eq!(ids(&jobs), put);
    let wanted =
        "age buries bytes delay id kicks pri releases reserves state time-left timeouts ttr tube";
    assert_eq!(keys(&jobs[1]), wanted.split(' ').collect());
    assert_eq!(ids(&server.json("jobs mail --after 248")), [249, 250]);
    assert_eq!(ids(&server.json("--limit 2 jobs mail --state ready")), [2, 3]);
    assert_eq!(ids(&server.json("jobs mail --state reserved")), [1]);
    // Without rows nothing is printed, not even the header.
    server.expect("jobs mail --state buried", 0, "", "");
    server.expect("failed", 0, "", "");
    server.expect("jobs gone", 1, "", "tube gone: not found");
    server.expect("failed gone", 1, "", "tube gone: not found");
    // The limit is that of all tubes.
    server.bury("a", 2);
    server.bury("b", 2);
    assert_eq!(ids(&server.json("failed --limit 3")), [251, 252, 253]);
}

#[test]
fn c_beanstalkd_shows_what_it_can() {
    let Some(server) = Server::c() else { return };
    let first = server.bury("mail", 3)[0];
    let done = server.run("failed --json");
    assert_eq!((done.code, done.out.lines().count()), (0, 1));
    assert!(done.out.contains(&format!("{{\"id\":{first},\"tube\":\"mail\"")), "{done:?}");
    assert!(done.out.contains("\"bytes\":7"), "{done:?}");
    assert!(done.err.contains("only the first buried job"), "{done:?}");
    server.expect("jobs mail", 4, "", "this server has no list-jobs");
    server.expect("export mail", 4, "", "this server has no list-jobs");
    server.expect("workers", 4, "", "this server has no list-clients");
    server.expect("put mail x --key a", 4, "", "this server has no keys of jobs");
    server.expect("put mail x --con a", 4, "", "this server has no keys of jobs");
    let done = server.feed("import --tube new", b"{\"body\":\"x\",\"key\":\"a\"}");
    done.expect(1, "imported 1\n", "a job is put without its key");
    assert_eq!(server.counts("mail"), [0, 0, 0, 3]);
}

#[test]
fn a_job_has_its_body() {
    on_both(|server| {
        let mut worker = server.worker("mail");
        let id = worker.put(b"a\x1b[31m\xff\n").to_string();
        let text = server.ok(&format!("job {id}"));
        assert!(text.ends_with("body: a\\x1b[31m\\xff\\n\n"), "{text}");
        assert!(text.contains("tube: mail\n") && text.contains("bytes: 8\n"), "{text}");
        assert!(!text.contains("\nfile: "), "{text}");
        let raw = run_command(server.command(&format!("job {id} --body")));
        assert_eq!(raw.stdout, b"a\x1b[31m\xff\n");
        assert_eq!(server.json(&format!("job {id}"))[0]["body_base64"], "YRtbMzFt/wo=");
        server.expect("job 99", 1, "", "job 99: not found");
        let usage = "beanstalkctl: x: not the id of a job\nTry 'beanstalkctl --help'.\n";
        server.expect("job x", 2, "", usage);
    });
}

/// Serves one connection: replies to each line with what `answer` returns, a document or bytes.
fn fake<A: AsRef<str>>(answer: impl Fn(&str) -> A + Send + 'static) -> Place {
    fake_with(move |stream| {
        for line in BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok) {
            let mut text = answer(&line).as_ref().to_owned();
            if text.starts_with("---\n") {
                text = format!("OK {}\r\n{text}\r\n", text.len());
            }
            stream.write_all(text.as_bytes()).unwrap();
        }
    })
}

/// Serves one connection with `serve`.
fn fake_with(serve: impl Fn(&mut TcpStream) + Send + 'static) -> Place {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = Place(listener.local_addr().unwrap().to_string());
    thread::spawn(move || serve(&mut listener.accept().unwrap().0));
    place
}

#[test]
fn a_lost_connection_is_no_server_without_lists() {
    let place = fake(|line| match line {
        "stats-tube bill" => "---\ncurrent-jobs-buried: 2\n".into(),
        "list-jobs default any 1" => "x".repeat(2_000),
        _ => "---\njobs: []\n".into(),
    });
    assert_eq!(place.run("failed bill").code, 3);
}

/// With their header they are printed at once, and nothing is left to print.
#[test]
fn a_tube_with_999_workers_has_workers() {
    let clients: String = (1..=999).map(|id| format!("- {{id: {id}}}\n")).collect();
    let place = fake(move |line| match line {
        "list-clients 1000 0 mail" => format!("---\nclients:\n{clients}"),
        "list-tubes" => "---\n".into(),
        _ => "---\nclients: []\n".into(),
    });
    let done = place.run("workers mail");
    assert_eq!((done.code, done.out.lines().count(), &*done.err), (0, 1_000, ""));
}

#[test]
fn workers_show_who_holds_what() {
    workers_of(&Server::ours(&[]));
    workers_of(&Server::on_path(Path::new(BEANSTALKD), true));
}

fn workers_of(server: &Server) {
    let mut idle = server.worker("mail");
    idle.expect_service();
    let mut busy = server.worker("mail");
    busy.put("x");
    busy.expect("reserve\r\n", "RESERVED 1 1");
    server.expect("workers default", 0, "", "no client watches tube default");
    let clients = server.json("workers mail");
    // The client that holds a job comes first, and the tool is not listed.
    assert_eq!(clients.len(), 2);
    assert_eq!((&clients[0]["reserved"], &clients[0]["using"]), (&1.into(), &"mail".into()));
    let held = &clients[0]["jobs"][0];
    assert_eq!((&held["id"], &held["tube"]), (&1.into(), &"mail".into()));
    assert_eq!(held["client"], clients[0]["id"]);
    assert_eq!(clients[1]["jobs"], serde_json::json!([]));
    let table = server.ok("workers");
    assert!(table.contains("0s: job 1 of mail") && table.lines().count() == 3, "{table}");
    assert!(server.ok("job 1").contains("client: "));
    assert_eq!(server.json("jobs mail --state reserved")[0]["client"], held["client"]);
    server.expect("workers gone", 1, "", "tube gone: not found");
    busy.put("y");
    busy.expect("reserve-job 2\r\n", "RESERVED 2 1");
    let table = server.ok("workers");
    assert!(table.contains("2 jobs: 0s: job 1 of mail"), "{table}");
}

// ---- Act ----

#[test]
fn retry_makes_buried_jobs_ready_and_leaves_delayed_ones() {
    on_both(|server| {
        let buried = server.bury("mail", 3);
        let delayed = server.ok("put mail --delay 1h x").trim().to_owned();
        server.expect("-n retry mail --all", 0, "would retry 3 jobs of tube mail\n", "");
        server.expect("retry mail --all", 2, "", "needs --yes");
        assert_eq!(server.counts("mail"), [0, 0, 1, 3]);
        server.expect(&format!("retry {}", buried[0]), 0, "retried 1\n", "");
        server.expect(&format!("retry {delayed} 99"), 1, "retried 0\n", "job 99: not found");
        server.expect("retry mail --limit 1 --delayed", 0, "retried 1\n", "");
        server.expect("-n retry mail --all", 0, "would retry 1 job of tube mail\n", "");
        assert_eq!(server.json("-n retry mail --all")[0]["would"], "retry 1 job of tube mail");
        server.expect("retry mail --all --yes", 0, "retried 1\n", "");
        server.expect("retry mail --all --yes", 0, "retried 0\n", "");
        assert_eq!(server.counts("mail"), [3, 0, 1, 0]);
        server.expect("retry mail --all --delayed --yes", 0, "retried 1\n", "");
        assert_eq!(server.counts("mail"), [4, 0, 0, 0]);
        server.expect("retry mail", 2, "", "Try 'beanstalkctl --help'.");
        server.expect("retry gone --all --yes", 1, "", "tube gone: not found");
    });
}

#[test]
fn delete_and_flush_ask_and_name_what_is_missing() {
    on_both(|server| {
        let ids = server.bury("mail", 4);
        let [a, b] = [ids[0].to_string(), ids[1].to_string()];
        server.expect(&format!("delete {a} {b}"), 2, "", "needs --yes");
        server.expect(&format!("-n delete {a} 99"), 1, "would delete 1\n", "job 99: not found");
        server.expect(&format!("-n delete {a} {a}"), 0, "would delete 1\n", "");
        server.expect(&format!("delete {a}"), 0, "deleted 1\n", "");
        let missing = format!("job {a}: not found");
        server.expect(&format!("delete {a} {b} --yes"), 1, "deleted 1\n", &missing);
        let mut worker = server.worker("mail");
        worker.put("held");
        worker.expect("reserve\r\n", "RESERVED 5 4");
        worker.put("ready");
        server.expect("delete 5", 1, "deleted 0\n", "job 5: a worker holds it");
        server.expect("flush mail", 2, "", "needs --yes");
        // Jobs may be put after the look that has found none.
        server.expect("flush default", 2, "", "needs --yes");
        // C beanstalkd deletes no held job of another connection.
        let count = if server.is_ours { 4 } else { 3 };
        let would = format!("would delete {count} jobs of tube mail\n");
        server.expect("-n flush mail", 0, &would, "");
        server.expect("-n flush mail --buried", 0, "would delete 2 buried jobs of tube mail\n", "");
        assert_eq!(server.counts("mail"), [1, 1, 0, 2]);
        server.expect("flush mail --buried --yes", 0, "deleted 2\n", "");
        if server.is_ours {
            server.expect("flush mail --yes", 0, "deleted 2\n", "");
            worker.expect("delete 5\r\n", "NOT_FOUND");
        } else {
            server.expect("flush mail --yes", 1, "deleted 1\n", "1 held job of tube mail is left");
        }
        server.expect("flush gone --yes", 1, "", "tube gone: not found");
    });
}

#[test]
fn put_has_defaults_keys_and_bodies_of_any_bytes() {
    on_both(|server| {
        assert_eq!(server.ok("put mail hello"), "1\n");
        let done = server.feed("put --pri 3 mail --ttr 2m --delay 1h", b"\0\r\n\xff");
        done.expect(0, "2\n", "");
        assert_eq!(server.client().ask("peek 2\r\n").body, b"\0\r\n\xff");
        assert_eq!(server.values(2, ["pri", "delay", "ttr"]), [3, 3600, 120]);
        assert_eq!(server.ok("-n put mail x"), "would put 1 byte into tube mail\n");
        server.expect("put a~b x", 2, "", "a b: not a name of a tube");
        let refused = "beanstalkctl: the server answered JOB_TOO_BIG\n";
        server.feed("put mail", &[b'x'; 65_536]).expect(4, "", refused);
        assert_eq!(server.counts("mail"), [1, 0, 1, 0]);
    });
    let server = Server::ours(&[]);
    assert_eq!(server.ok("put mail x --key a:60"), "1\n");
    server.expect("put mail x --key a", 0, "1\n", "job 1 has this key already (ready)");
    server.expect("put mail x --key a~b", 2, "", "a b: not a key");
    for (id, con) in [("3", "c:2"), ("4", "c:2"), ("5", "c:2"), ("6", "d")] {
        assert_eq!(server.ok(&format!("put con x --con {con} --key {id}")), format!("{id}\n"));
    }
    let mut worker = server.worker("con");
    for reserved in ["3", "4", "6"] {
        worker.expect("reserve-with-timeout 0\r\n", &format!("RESERVED {reserved} 1"));
    }
    worker.expect("reserve-with-timeout 0\r\n", "TIMED_OUT");
    for con in ["c:0", "c:", "c:x", "c:1:2", ":1"] {
        server.expect(&format!("put con x --con {con}"), 2, "", "not a key, such as order-17:2");
    }
}

#[test]
fn pause_and_resume_tell_times_from_tubes() {
    on_both(|server| {
        let _tubes = (server.worker("90"), server.worker("mail"));
        let left = |tube| server.count(tube, "pause-time-left");
        server.expect("pause 90", 0, "paused 1\n", "");
        assert!((3000..=3600).contains(&left("90")));
        server.expect("pause 90 mail 15m", 0, "paused 2\n", "");
        assert!((800..=900).contains(&left("90")) && (800..=900).contains(&left("mail")));
        server.expect("resume mail gone", 1, "resumed 1\n", "tube gone: not found");
        assert_eq!(left("mail"), 0);
        server.expect("pause mail 2d", 0, "paused 1\n", "");
        assert!((172_700..=172_800).contains(&left("mail")));
        server.ok("resume mail");
        for time in ["10min", "1h30m"] {
            let message = format!("{time}: neither a tube nor a time");
            server.expect(&format!("pause mail {time}"), 2, "", &message);
        }
        server.expect("pause mail 10 min", 2, "", "10: neither a tube nor a time");
        assert_eq!(left("mail"), 0);
        server.expect("pause --all 2h", 2, "", "needs --yes");
        server.expect("-n pause --all 2h", 0, "would pause 3\n", "");
        assert_eq!(left("mail"), 0);
        server.expect("pause --all 2h --yes", 0, "paused 3\n", "");
        assert!((7000..=7200).contains(&left("default")));
        server.expect("resume --all --yes", 0, "resumed 3\n", "");
        assert_eq!((left("default"), left("90")), (0, 0));
        server.expect("pause", 2, "", "needs names of tubes, or --all");
        // The longest time of the protocol.
        server.expect("pause mail 2000000h", 0, "paused 1\n", "");
        assert!(left("mail") > 4_294_000_000);
    });
}

#[test]
fn drain_waits_until_a_tube_is_empty_or_gone() {
    on_both(|server| {
        let mut worker = server.worker("mail");
        worker.put("a");
        server.expect("drain mail --held", 0, "drained 1\n", "");
        let left = "tube mail: 1 ready, 0 held, 0 delayed";
        server.expect("drain mail --within 1s", 1, "drained 0\n", left);
        server.ok("pause mail");
        server.expect("-n drain mail", 0, &format!("would wait for {left}, paused\n"), "");
        server.ok("resume mail");
        worker.expect("reserve\r\n", "RESERVED 1 1");
        let looks = server.client().stat("cmd-stats-tube");
        let mut drain = server.spawn("drain mail --held");
        let mut client = server.client();
        wait_until("it looks", || client.stat("cmd-stats-tube") > looks);
        worker.expect("delete 1\r\n", "DELETED");
        // The tube disappears.
        drop(worker);
        assert_eq!(read_to_string(drain.stdout()).unwrap(), "drained 1\n");
        server.expect("drain gone", 1, "drained 0\n", "tube gone: not found");
    });
}

// ---- Move, save, restore ----

#[test]
fn move_keeps_priority_ttr_and_delay() {
    on_both(|server| {
        let buried = server.bury("from", 3);
        server.ok("put from late --delay 1h --pri 5 --ttr 9");
        server.expect("move from to", 2, "", "needs --yes");
        server.expect("-n move from to", 0, "would move 3 jobs of tube from to to\n", "");
        server.expect("move from from --yes", 2, "", "both tubes are the same");
        assert_eq!(server.counts("from"), [0, 0, 1, 3]);
        server.expect("move from to --limit 1 --yes", 0, "moved 1\n", "");
        let id = buried[2].to_string();
        server.expect(&format!("move from to {id} 99 --yes"), 1, "moved 1\n", "job 99: not found");
        server.expect("move from to 5 --yes", 1, "moved 0\n", "job 5: it is in tube to");
        server.expect("move from to --yes", 0, "moved 1\n", "");
        server.expect("move from to --state delayed --yes", 0, "moved 1\n", "");
        assert_eq!(server.counts("from"), [0; 4]);
        assert_eq!(server.counts("to"), [3, 0, 1, 0]);
        let [pri, ttr, delay] = server.values(8, ["pri", "ttr", "delay"]);
        assert_eq!((pri, ttr, (3500..=3600).contains(&delay)), (5, 9, true), "{delay}");
        let [pri] = server.values(5, ["pri"]);
        assert!([0, 7].contains(&pri), "{pri}");
        // Some jobs, no more than the limit.
        let ids = server.bury("from", 2);
        let some = format!("move from to {} {} --limit 1", ids[0], ids[1]);
        server.expect(&format!("-n {some}"), 0, "would move 1\n", "");
        server.expect(&format!("{some} --yes"), 0, "moved 1\n", "");
        assert_eq!([server.counts("from")[3], server.counts("to")[0]], [1, 4]);
        // With ids, jobs in any state but reserved are moved.
        server.ok(&format!("retry {}", ids[1]));
        server.expect(&format!("move from to {} --yes", ids[1]), 0, "moved 1\n", "");
    });
}

#[test]
fn a_job_that_a_worker_reserves_meanwhile_is_reported() {
    let looks = AtomicU64::new(0);
    let place = fake(move |line| match line.split(' ').next().unwrap() {
        "reserve-job" => "NOT_FOUND\r\n",
        "stats-job" if looks.fetch_add(1, Ordering::Relaxed) > 0 => {
            "---\nid: 7\ntube: from\nstate: reserved\n"
        }
        _ => "---\nid: 7\ntube: from\nstate: ready\n",
    });
    let held = "beanstalkctl: job 7: a worker holds it\n";
    place.expect("move from to 7 --yes", 1, "moved 0\n", held);
}

/// The job that a server without lists shows first may be one that a worker holds for a moment.
#[test]
fn work_on_a_tube_ends_well_only_if_nothing_is_left() {
    on_both(|server| {
        for line in ["move a b --state ready", "flush a"] {
            let mut producer = server.client();
            producer.ask("use a\r\n");
            let first = producer.put("x");
            (1..300).for_each(|_| _ = producer.put("x"));
            let is_over = AtomicBool::new(false);
            let done = thread::scope(|scope| {
                for _ in 0..2 {
                    let (mut worker, is_over) = (server.worker("a"), &is_over);
                    scope.spawn(move || {
                        while !is_over.load(Ordering::Relaxed) {
                            let line = worker.ask("reserve-with-timeout 0\r\n").line;
                            let Some(id) = line.split(' ').nth(1) else { continue };
                            worker.ask(format!("release {id} 0 0\r\n"));
                        }
                    });
                }
                wait_until("they work", || server.values(first, ["reserves"]) != [0]);
                let done = server.run(&format!("{line} --yes"));
                is_over.store(true, Ordering::Relaxed);
                done
            });
            // Two may be held when the jobs are counted.
            let count: u64 = done.out.trim().rsplit(' ').next().unwrap().parse().unwrap();
            let is_told = done.err.contains(" left: ") || done.err.contains(" held job");
            assert!(if done.code == 0 { count >= 298 } else { is_told }, "{done:?}");
            server.run("flush a --yes");
        }
    });
}

#[test]
fn the_jobs_that_workers_hold_are_reported() {
    on_both(|server| {
        let mut worker = server.worker("mail");
        for body in ["held", "a", "b"] {
            worker.put(body);
        }
        worker.expect("reserve\r\n", "RESERVED 1 4");
        let report = "1 held job of tube mail is left";
        server.expect("move mail other --state any --limit 1 --yes", 0, "moved 1\n", "");
        server.expect("move mail other --state any --yes", 1, "moved 1\n", report);
        server.expect("export mail --take --yes", 1, "", report);
    });
}

#[test]
fn a_job_that_a_worker_had_for_a_moment_is_taken_too() {
    for lists in [true, false] {
        let reserves = AtomicU64::new(0);
        let place = fake(move |line| match line.split(' ').next().unwrap() {
            "stats-tube" => "---\ncurrent-jobs-ready: 1\n",
            "list-jobs" if lists => "---\njobs:\n- {id: 7, state: ready}\n",
            "peek-ready" => "FOUND 7 1\r\nx\r\n",
            "stats-job" => "---\nid: 7\ntube: from\nstate: ready\n",
            "reserve-job" if reserves.fetch_add(1, Ordering::Relaxed) > 1 => {
                "RESERVED 7 1\r\nx\r\n"
            }
            "reserve-job" => "NOT_FOUND\r\n",
            "use" => "USING to\r\n",
            "put" => "",
            "x" => "INSERTED 8\r\n",
            "delete" => "DELETED\r\n",
            _ => "UNKNOWN_COMMAND\r\n",
        });
        place.expect("move from to --state ready --yes", 0, "moved 1\n", "");
    }
}

#[test]
fn a_name_of_digits_is_a_string_in_json() {
    on_both(|server| {
        for tube in ["007", "90"] {
            let id = server.ok(&format!("put {tube} x"));
            assert_eq!(server.json(&format!("job {id}"))[0]["tube"], tube);
            let taken = server.run(&format!("export {tube} --take --yes"));
            assert_eq!(server.feed("import", taken.out.as_bytes()).out, "imported 1\n");
            assert_eq!(server.counts(tube), [1, 0, 0, 0]);
        }
    });
}

/// C beanstalkd never ends a line that is longer than 224 bytes.
#[test]
fn a_long_name_is_no_obstacle() {
    on_both(|server| {
        server.bury("mail", 1);
        for len in [190, 200] {
            let name = "n".repeat(len);
            server.bury(&name, 2);
            assert_eq!(server.run("failed").code, 0);
            server.expect(&format!("retry {name} --limit 1"), 0, "retried 1\n", "");
            assert_eq!(server.json("status").len(), 3);
            assert_eq!(server.json(&format!("job {}", 1))[0]["tube"], "mail");
            server.ok(&format!("move {name} to --limit 1 --yes"));
            server.ok(&format!("flush {name} --yes"));
            server.ok("flush to --yes");
        }
    });
}

/// A producer may be faster than the tool.
#[test]
fn jobs_that_are_put_meanwhile_are_left_out() {
    let place = fake(|line| match line {
        "list-jobs mail buried 1 0" => "---\njobs:\n- {id: 1}\n",
        "list-jobs mail buried 100 0" => "---\njobs:\n- {id: 1}\n- {id: 2}\n",
        _ if line.starts_with("kick-job") => "KICKED\r\n",
        _ => "---\ncurrent-jobs-buried: 1\n",
    });
    place.expect("retry mail --all --yes", 0, "retried 1\n", "");
}

#[test]
fn a_refused_put_leaves_the_job_where_it_was() {
    on_both(|server| {
        server.bury("from", 2);
        server.ok("put from late --delay 1h");
        server.ok("put from now");
        server.drain();
        for state in ["buried", "delayed", "ready"] {
            let arguments = format!("move from to --state {state} --yes");
            server.expect(&arguments, 4, "moved 0\n", "the server answered DRAINING");
            assert_eq!(server.counts("from"), [1, 0, 1, 2]);
        }
        let check = server.run("check");
        assert_eq!((check.code, check.out.contains("draining")), (1, true), "{check:?}");
        let mut top = server.command("top");
        let mut top = top.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let first = BufReader::new(top.stderr.take().unwrap()).lines().next().unwrap().unwrap();
        assert!(first.contains("warning: draining"), "{first}");
        top.kill().unwrap();
        top.wait().unwrap();
    });
}

#[test]
fn jobs_that_wait_for_their_con_key_stay_and_are_counted() {
    let server = Server::ours(&[]);
    for _ in 0..4 {
        server.ok("put mail x --con k");
    }
    server.ok("put mail x");
    let mut worker = server.worker("mail");
    worker.expect("reserve\r\n", "RESERVED 1 1");
    let left = "3 jobs of tube mail are left: ";
    for (arguments, out, err) in [
        ("move mail other 2 3 4 --yes", "moved 0\n", "job 4: reserved by a worker, or blocked by"),
        ("move mail other --state ready --yes", "moved 1\n", left),
        ("export mail --take --yes", "", left),
    ] {
        server.expect(arguments, 1, out, err);
        assert_eq!(server.counts("mail"), [if out == "moved 0\n" { 4 } else { 3 }, 1, 0, 0]);
    }
    worker.expect("delete 1\r\n", "DELETED");
    // The jobs that the tool holds do not block the others for good.
    let taken = server.run("export mail --take --yes");
    assert_eq!((taken.code, taken.err.as_str()), (0, "exported 3\n"));
    server.ok("put mail x --con k");
    server.ok("put mail x --con k");
    server.expect("move mail other --state ready --yes", 0, "moved 2\n", "");
}

#[test]
fn a_killed_move_loses_no_job() {
    on_both(|server| {
        let mut worker = server.worker("from");
        for number in 0..3000 {
            worker.put(number.to_string());
        }
        let mut mover = Process::spawn(
            server.command("move from to --state ready --yes").stdout(Stdio::null()),
        );
        wait_until("some jobs are moved", || server.count("to", "total-jobs") > 10);
        mover.kill();
        wait_until("its job is back", || server.count("from", "current-jobs-reserved") == 0);
        let (from, to) = (server.counts("from")[0], server.counts("to")[0]);
        assert!((3000..=3001).contains(&(from + to)), "{from} and {to}");
        assert!(from > 0, "it was killed too late to show anything");
        // The rest can be moved.
        server.expect("move from to --state ready --yes", 0, &format!("moved {from}\n"), "");
    });
}

#[test]
fn export_and_import_keep_every_byte() {
    let bodies: [&[u8]; 5] = [b"", b"\"\\\n\x01", b"\xff\xfe\0", "ä\u{1f600}".as_bytes(), b"\r\nx"];
    on_both(|server| {
        for (index, body) in bodies.iter().enumerate() {
            let pri = index.to_string();
            assert_eq!(server.feed(&format!("put mail --pri {pri} --ttr 17"), body).code, 0);
        }
        server.expect("export mail --take", 2, "", "needs --yes");
        let mut exported = server.run("export mail");
        if server.is_ours {
            assert_eq!((exported.code, exported.err.as_str()), (0, "exported 5\n"));
            assert_eq!(server.counts("mail"), [5, 0, 0, 0]);
        }
        let taken = server.run("export mail --take --yes");
        assert_eq!((taken.code, taken.err.as_str()), (0, "exported 5\n"));
        assert_eq!(server.counts("mail"), [0; 4]);
        if !server.is_ours {
            exported = taken;
        }
        let input = exported.out.as_bytes();
        assert_eq!(server.feed("-n import", input).out, "would import 5\n");
        assert_eq!(server.feed("import --tube new", input).out, "imported 5\n");
        assert_eq!(server.feed("import", input).out, "imported 5\n");
        assert_eq!(server.counts("mail"), [5, 0, 0, 0]);
        let mut worker = server.worker("new");
        for (index, body) in bodies.iter().enumerate() {
            let reply = worker.ask("reserve-with-timeout 0\r\n");
            assert_eq!(&reply.body, body);
            let id = reply.number("RESERVED").unwrap();
            assert_eq!(server.values(id, ["pri", "ttr"]), [index as u64, 17]);
        }
    });
}

#[test]
fn export_holds_only_a_few_large_bodies() {
    let server = Server::ours(&["-z", "4M"]);
    let mut client = server.client();
    let body = "x".repeat(4 << 20);
    for _ in 0..30 {
        client.put(&body);
    }
    let export = format!("exec {TOOL} -s {} export default --take --yes", server.place.0);
    let limited = format!("ulimit -v 100000; {export} | wc -l");
    let done = done(run_command(command("bash", ["-c", &limited])));
    assert_eq!((done.out.as_str(), done.err.as_str()), ("30\n", "exported 30\n"));
}

#[test]
fn import_stops_at_a_bad_line_and_names_it() {
    let server = Server::ours(&[]);
    let lines = "{\"tube\":\"mail\",\"state\":\"buried\",\"delay\":9,\"body\":\"a\",\"key\":\"k\"}\nno\n{}\n";
    let done = server.feed("import", lines.as_bytes());
    done.expect(2, "imported 1\n", "line 2: ");
    assert!(done.err.contains("; 1 job put before it"), "{done:?}");
    // A buried job is put as ready, with its key.
    assert_eq!(server.counts("mail"), [1, 0, 0, 0]);
    let again = server.feed("import", lines.lines().next().unwrap().as_bytes());
    again.expect(1, "imported 0\n", "job 1 has its key");
}

#[test]
fn a_dump_of_the_server_can_be_imported() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-b", path_text(directory.path())];
    let old = Server::ours(&flags);
    old.ok("put mail a --key k");
    old.ok("put mail b --delay 1h");
    for _ in 0..2 {
        old.ok("put con c --con k");
    }
    old.daemon.stop();
    let dump = process::run(&[&flags[..], &["--dump"]].concat()).stdout;
    let new = Server::ours(&[]);
    assert_eq!(new.feed("import", &dump).out, "imported 4\n");
    assert_eq!(new.counts("mail"), [1, 0, 1, 0]);
    // One of these jobs is reserved at a time, as before.
    let mut worker = new.worker("con");
    assert_eq!(worker.ask("reserve\r\n").body, b"c");
    worker.expect("reserve-with-timeout 0\r\n", "TIMED_OUT");
}

#[test]
fn a_failed_write_or_sync_deletes_nothing() {
    let traced = |options: &[&str]| command("strace", [&["-o", "/dev/null"], options].concat());
    let can_trace = traced(&["true"]).output().is_ok_and(|output| output.status.success());
    if !can_trace {
        skip("strace is not installed, or may not trace here");
    }
    on_both(|server| {
        if can_trace {
            server.ok("put safe x");
            let path = server.directory.path().join("jobs");
            let tool = ["-einject=fsync:error=EIO", TOOL, "-s", &server.place.0];
            let mut export = traced(&[&tool[..], &["export", "safe", "--take", "--yes"]].concat());
            let failed = export.stdout(File::create(path).unwrap()).stderr(Stdio::piped()).output();
            assert_eq!(done(failed.unwrap()).code, 1);
            assert_eq!(server.counts("safe"), [1, 0, 0, 0]);
        }
        server.bury("mail", 2);
        for arguments in ["export mail --take --yes", "export mail"] {
            let mut command = server.command(arguments);
            let full = File::options().write(true).open("/dev/full").unwrap();
            let failed = done(command.stdout(full).stderr(Stdio::piped()).output().unwrap());
            if server.is_ours || arguments.contains("--take") {
                assert_eq!(failed.code, 1, "{failed:?}");
                assert!(failed.err.starts_with("exported 0\n"), "{failed:?}");
                assert!(failed.err.contains("cannot write to stdout"), "{failed:?}");
            }
        }
        assert_eq!(server.counts("mail"), [0, 0, 0, 2]);
    });
}

#[test]
fn bench_measures_and_removes_its_tube() {
    on_both(|server| {
        let rows = server.json("bench --jobs 50 --connections 3 --size 1K");
        let commands: Vec<&str> = rows.iter().map(|row| row["command"].as_str().unwrap()).collect();
        assert_eq!(commands, ["put", "reserve", "delete"]);
        assert_eq!(rows[0]["jobs"], 50);
        assert_eq!(server.ok("tubes"), "default\n");
        server.expect("bench --jobs 0", 2, "", "at least 1 job");
        for arguments in ["bench --size 70000", "bench --size 100G", "-n bench --size 100G"] {
            server.expect(arguments, 2, "", "the server takes at most 65535 bytes");
        }
        server.drain();
        server.expect("bench --jobs 1", 4, "", "DRAINING");
        assert_eq!(server.ok("tubes"), "default\n");
    });
}

// ---- On a terminal, interrupted, and without a server ----

#[test]
fn on_a_terminal_it_asks_and_shows_progress() {
    let server = Server::ours(&[]);
    server.bury("mail", 2);
    let on_terminal = |arguments: &str, answer: &[u8]| {
        let path = server.directory.path().join("answer");
        std::fs::write(&path, answer).unwrap();
        let line = format!("{TOOL} -s {} {arguments}", server.place.0);
        let mut script = command("script", ["-qec", &line, "/dev/null"]);
        script.stdin(File::open(path).unwrap()).output().ok().map(done)
    };
    let Some(done) = on_terminal("flush mail", b"n\n") else {
        return skip("script(1) is not installed");
    };
    assert!(done.out.contains("Delete 2 jobs of tube mail? [y/N] "), "{done:?}");
    assert!(done.out.ends_with("beanstalkctl: nothing was changed\r\n"), "{done:?}");
    assert_eq!((done.code, server.counts("mail")[3]), (2, 2));
    // A body has no end of line, and nothing erases it.
    assert_eq!(on_terminal("job 1 --body", b"").unwrap().out.trim_end(), "body 00");
    server.ok("put other \x1b[2J");
    assert_eq!(on_terminal("job 3 --body", b"").unwrap().out.trim_end(), "\\x1b[2J");
    let done = on_terminal("flush mail", b"y\n").unwrap();
    assert!(done.out.ends_with("\r\u{1b}[K2/2 100%\r\u{1b}[Kdeleted 2\r\n"), "{done:?}");
    assert_eq!((done.code, server.counts("mail")[3]), (0, 0));
    // Progress is one line, however many tubes are left.
    let tubes: Vec<String> = (0..5).map(|number| format!("{number}{}", "x".repeat(60))).collect();
    tubes.iter().for_each(|tube| _ = server.ok(&format!("put {tube} x")));
    let done = on_terminal(&format!("drain {} --within 1", tubes.join(" ")), b"").unwrap();
    let (shown, _) = done.out.split_once("beanstalkctl: ").unwrap();
    assert!(shown.split("\r\u{1b}[K").all(|line| line.chars().count() < 80), "{shown}");
    assert!(shown.contains("1 ready"), "{shown}");
    let path = server.directory.path().join("lines");
    std::fs::write(&path, "{\"tube\":\"mail\",\"body\":\"x\"}\n".repeat(200)).unwrap();
    let done = on_terminal(&format!("import <{}", path_text(&path)), b"").unwrap();
    assert!(done.out.contains("\r\u{1b}[K100 jobs, 50%\r\u{1b}[K"), "{done:?}");
    let done = on_terminal("bench --jobs 100", b"").unwrap();
    assert!(done.out.contains("100/100 100%\r\u{1b}[KCOMMAND "), "{done:?}");
}

#[test]
fn a_small_terminal_shows_that_there_are_more_tubes() {
    let server = Server::ours(&[]);
    server.bury("bad", 2);
    (0..9).for_each(|number| _ = server.ok(&format!("put tube-{number} x")));
    let in_8_rows = |arguments: &str| {
        let line = format!("stty rows 8 cols 80; {TOOL} -s {} {arguments}", server.place.0);
        command("script", ["-qec", &line, "/dev/null"])
    };
    let Ok(status) = in_8_rows("status").stdin(Stdio::null()).output() else {
        return skip("script(1) is not installed");
    };
    let out = done(status).out;
    assert!(out.starts_with("TUBE ") && out.contains("tube-8 "), "{out}");
    let last = "beanstalkctl: 1 of 11 tubes need attention; they are at the top\r\n";
    assert!(out.ends_with(last), "{out}");
    let mut top = Process::spawn(in_8_rows("top").stdout(Stdio::piped()));
    let lines = top.stdout().lines().map(Result::unwrap);
    let lines: Vec<String> = lines.take_while(|line| line != "and 7 more").collect();
    assert!(lines.len() == 6 && lines[2].starts_with("bad "), "{lines:?}");
}

/// Between jobs, while it waits for lines, and while it waits for a reply.
#[test]
fn an_interrupt_ends_what_waits_and_it_reports() {
    let server = Server::ours(&[]);
    let mut client = server.client();
    let (lines, mut writer) = std::io::pipe().unwrap();
    let import = Process::spawn(server.command("import").stdin(lines).stdout(Stdio::piped()));
    writer.write_all(b"{\"tube\":\"mail\",\"body\":\"x\"}\n{\"tube").unwrap();
    wait_until("a job is put", || client.stat("total-jobs") == 1);
    let drain = server.spawn("drain mail");
    // It has asked once, so that it waits with its signals blocked.
    wait_until("it looks", || client.stat("cmd-stats-tube") > 1);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let status = Place(silent.local_addr().unwrap().to_string()).spawn("status");
    let _connection = silent.accept().unwrap();
    for (mut child, expected) in [(import, "imported 1\n"), (drain, "drained 0\n"), (status, "")] {
        let code = child.end(Signal::INT).code();
        assert_eq!((code, &*read_to_string(child.stdout()).unwrap()), (Some(1), expected));
    }
}

#[test]
fn without_a_reply_the_exit_code_is_3() {
    let done = run("-s unix:/nowhere status");
    assert_eq!((done.code, done.out.as_str()), (3, ""), "{done:?}");
    assert!(done.err.starts_with("beanstalkctl: cannot connect to unix:/nowhere: "), "{done:?}");
    // The kernel accepts for a server that never does.
    let dead = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = Place(dead.local_addr().unwrap().to_string());
    let message = format!("beanstalkctl: no reply from {} within 1 s\n", place.0);
    place.expect("--timeout 1 tubes", 3, "", &message);
    // A reply that comes byte by byte.
    let place = fake_with(|stream| {
        while stream.write_all(b"OK 1000\r\n").is_ok() {
            thread::sleep(Duration::from_millis(300));
        }
    });
    place.expect("--timeout 1 tubes", 3, "", "no reply from");
    // A Unix socket whose queue is full.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let full = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    full.bind(&unix(&path)).and_then(|()| full.listen(0)).unwrap();
    let _first = UnixStream::connect(&path).unwrap();
    let full_place = Place(format!("unix:{}", path_text(&path)));
    full_place.expect("--timeout 1 tubes", 3, "", "no reply from");
    // A body that it does not read.
    let put = format!("head -c 64M /dev/zero | {TOOL} -s {} --timeout 1 put default", place.0);
    let put = command("sh", ["-c", &put]);
    assert_eq!(run_command(put).status.code(), Some(3));
    // A line without an end, and a body that is longer than its reply gives.
    for (reply, code, message) in [
        ("x".repeat(2048), 3, " is lost: invalid data\n"),
        ("OK 1\r\nabc".to_owned(), 3, ""),
        ("HTTP/1.1 400 Bad Request\r\n".to_owned(), 4, ""),
        ("\x1b[2J\r\n".to_owned(), 4, "the server answered \\x1b[2J\n"),
    ] {
        let done = fake(move |_| reply.clone()).run("--timeout 1 tubes");
        assert!(done.code == code && done.err.ends_with(message), "{done:?}");
    }
}

#[test]
fn usage_errors_are_two_lines() {
    let cases = [
        "",
        "nothing",
        "status mail",
        "status --limit 1",
        "jobs",
        "jobs mail --state x",
        "jobs mail --limit x",
        "status --what",
        "top x",
        "--timeout 0 status",
        "delete 1 x",
        "delete 0",
        "drain mail --within 1w",
        "pause --all mail",
        "tubes -s localhost:",
        "tubes -s http://localhost",
    ];
    for arguments in cases {
        let done = run(&format!("-s unix:/nowhere {arguments}"));
        assert_eq!((done.code, done.out.as_str()), (2, ""), "{arguments:?}: {done:?}");
        let lines: Vec<&str> = done.err.lines().collect();
        assert_eq!(lines.len(), 2, "{arguments:?}: {done:?}");
        assert!(lines[0].starts_with("beanstalkctl: "), "{done:?}");
        assert_eq!(lines[1], "Try 'beanstalkctl --help'.");
    }
    let help = run("--help");
    assert_eq!((help.code, help.err.as_str()), (0, ""));
    assert!(help.out.lines().all(|line| line.chars().count() <= 80), "{}", help.out);
    // All commands are in the help, the man page and the completions.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let commands = "status check top failed jobs job retry move delete flush pause resume drain export \
        import workers bench put tubes";
    for command in commands.split_whitespace() {
        assert!(help.out.contains(&format!("\n  {command}")), "--help has no {command}");
        let page = std::fs::read_to_string(root.join("man/beanstalkctl.1")).unwrap();
        assert!(page.contains(&format!(".It Cm {command}")), "the man page has no {command}");
        for file in ["beanstalkctl.bash", "_beanstalkctl", "beanstalkctl.fish"] {
            let text = std::fs::read_to_string(root.join("dist/completions").join(file)).unwrap();
            let has =
                text.split(|char: char| !char.is_ascii_alphanumeric()).any(|word| word == command);
            assert!(has, "{file} has no {command}");
        }
    }
}

#[test]
fn the_server_is_named_by_option_or_environment() {
    let server = Server::ours(&[]);
    let run_with = |mut command: Command, place: &str| {
        command.env("BEANSTALKD", place);
        done(run_command(command))
    };
    assert_eq!(run_with(tool("tubes"), &server.place.0).out, "default\n");
    assert_eq!(run_with(server.command("tubes"), "unix:/nowhere").out, "default\n");
    for (arguments, code, expected) in [
        ("--help", 0, "Use: beanstalkctl "),
        ("-v", 0, "beanstalkctl "),
        ("tubes", 2, "beanstalkctl: $BEANSTALKD: http://x: not a server"),
    ] {
        let done = run_with(tool(arguments), "http://x");
        assert_eq!(done.code, code, "{done:?}");
        assert!((done.out.clone() + &done.err).starts_with(expected), "{done:?}");
    }
    // An empty one names the default address, where a server may listen.
    assert_ne!(run_with(tool("tubes"), "").code, 2);
}
