//! The binlog with processes and files: killed servers, C beanstalkd and ours in turn on one
//! directory, directories that cannot be used, and a disk that fails.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod harness;

use harness::client::{Client, connect, unix};
use harness::journal::View;
use harness::process::{self, BEANSTALKD, Daemon, connect_when_ready, path_text, run, text};
use harness::request::put;
use harness::skip;
use rustix::process::{Resource, Rlimit, Signal};
use socket2::Socket;
use std::collections::BTreeMap;
use std::path::Path;
use tempfile::TempDir;

/// A server on the binlog of a directory, and one client of it.
struct Served {
    daemon: Daemon,
    client: Client,
}

/// Starts a server, ours or C's, with its binlog and its socket in the directory.
fn serve(program: impl AsRef<Path>, directory: &Path, flags: &[&str]) -> Served {
    let socket = directory.join("socket");
    let listen = format!("unix:{}", socket.display());
    // A killed server leaves its socket, which must not pass for the new one.
    let _ = std::fs::remove_file(&socket);
    let arguments = [&["-l", &listen, "-b", path_text(directory)], flags].concat();
    let daemon = Daemon::start(program.as_ref(), &arguments);
    let client = Client::over(connect_when_ready(&unix(&socket)));
    Served { daemon, client }
}

fn ours(directory: &Path, flags: &[&str]) -> Served {
    serve(BEANSTALKD, directory, flags)
}

impl Served {
    /// Sends a line and returns the line of the reply.
    fn ask(&mut self, request: &str) -> String {
        self.client.ask(format!("{request}\r\n")).line
    }

    fn put(&mut self, body: &str) -> u64 {
        self.client.ask(put(5, 0, 120, body)).number("INSERTED").expect("there is space")
    }

    /// Returns state, tube, pri, delay, ttr and body of a job.
    fn job(&mut self, id: u64) -> Option<String> {
        let ask = |request: &str| {
            let reply = self.client.ask(request);
            (reply.line != "NOT_FOUND").then(|| reply.text().to_owned())
        };
        let View { state, tube, pri, delay_secs, ttr_secs, body, .. } = View::read(ask, id)?;
        Some(format!("{state} {tube} {pri} {delay_secs} {ttr_secs} {body}"))
    }

    fn check_jobs(&mut self, expected: &BTreeMap<u64, String>, when: &str) {
        for (id, job) in expected {
            assert_eq!(self.job(*id).as_ref(), Some(job), "{when}");
        }
    }

    fn end(mut self, signal: Signal) {
        self.daemon.end(signal);
    }
}

/// Runs our binary on a directory that it must refuse; returns its exit code and its log.
fn refusal(directory: &str) -> (Option<i32>, String) {
    let output = run(&["-l", "127.0.0.1", "-p", "0", "-b", directory]);
    (output.status.code(), text(&output.stderr).to_owned())
}

fn path(directory: &TempDir) -> &str {
    path_text(directory.path())
}

/// Asserts that `--check` finds no damage.
fn assert_sound(directory: &TempDir) {
    let output = run(&["-b", path(directory), "--check"]);
    assert!(output.status.success(), "{}", text(&output.stdout));
}

/// Makes each write of the server fail beyond this length of a file.
fn limit_file_size(daemon: &Daemon, bytes: u64) {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    rustix::process::prlimit(Some(daemon.pid()), Resource::Fsize, limit).unwrap();
}

// ---- Killed ----

#[test]
fn a_server_killed_under_load_loses_nothing_acknowledged() {
    for flags in [&["-f", "0", "-s", "4096"][..], &["-f", "50", "-s", "65536"], &["-F"]] {
        let directory = tempfile::tempdir().unwrap();
        let mut random = fastrand::Rng::with_seed(flags.len() as u64);
        let mut kept: BTreeMap<u64, String> = BTreeMap::new();
        for _ in 0..8 {
            let mut served = ours(directory.path(), flags);
            served.check_jobs(&kept, &format!("{flags:?}"));
            let rounds = random.usize(1..40);
            for _ in 0..rounds {
                let body: String =
                    std::iter::repeat_with(|| random.alphanumeric()).take(30).collect();
                let id = served.put(&body);
                let mut expected = format!("ready default 5 0 120 {body}");
                match random.u8(..4) {
                    0 => {
                        assert_eq!(served.ask(&format!("delete {id}")), "DELETED");
                        continue;
                    }
                    1 => {
                        served.ask(&format!("reserve-job {id}"));
                        assert_eq!(served.ask(&format!("bury {id} 6")), "BURIED");
                        expected = format!("buried default 6 0 120 {body}");
                    }
                    2 => {
                        served.ask(&format!("reserve-job {id}"));
                        assert_eq!(served.ask(&format!("release {id} 7 9999")), "RELEASED");
                        expected = format!("delayed default 7 9999 120 {body}");
                    }
                    _ => {}
                }
                kept.insert(id, expected);
            }
            // The server is killed while it runs this; nothing of it is acknowledged.
            served.client.send("put 0 0 1 5\r\nnever\r\n".repeat(random.usize(..50)));
            served.end(Signal::KILL);
        }
        assert!(kept.len() > 20, "only {} jobs", kept.len());
    }
}

/// Producers put the same keys again and again, and workers delete their jobs, while the server is
/// killed. There are never two jobs with one key, and never a key whose job is gone.
#[test]
fn a_server_killed_under_load_has_one_job_for_each_key() {
    const KEYS: usize = 10_000;
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-f", "50", "-s", "262144"];
    let mut random = fastrand::Rng::with_seed(18);
    for _ in 0..10 {
        let served = ours(directory.path(), &flags);
        let address = || unix(&directory.path().join("socket"));
        let (progress, pipelines) = std::sync::mpsc::channel();
        std::thread::scope(|threads| {
            for seed in 0..6 {
                let (mut client, progress) = (Client::connect(address()), progress.clone());
                let mut random = random.fork();
                threads.spawn(move || {
                    let mut work = || match seed {
                        0 | 1 => try_to_delete(&mut client),
                        _ => try_to_put_keys(&mut client, &mut random, KEYS),
                    };
                    while work().is_ok() && progress.send(()).is_ok() {}
                });
            }
            let count = random.usize(1..250);
            assert_eq!(pipelines.iter().take(count).count(), count);
            served.end(Signal::KILL);
        });
        let mut served = ours(directory.path(), &flags);
        let jobs = jobs_by_key(&mut served.client);
        for (key, id) in jobs.iter().step_by(7) {
            let reply = served.ask(&format!("put 0 0 60 1 idp:{key}\r\nx"));
            assert_eq!(reply, format!("INSERTED {id} READY"), "{key}");
        }
        served.end(if random.bool() { Signal::KILL } else { Signal::TERM });
    }
    // A key whose job is gone could not be put.
    let mut served = ours(directory.path(), &flags);
    for number in 0..KEYS {
        let key = format!("key-{number}");
        served.client.send(format!("put 0 0 60 {} idp:{key}\r\n{key}\r\n", key.len()));
    }
    (0..KEYS).for_each(|_| assert!(served.client.line().starts_with("INSERTED ")));
    assert_eq!(jobs_by_key(&mut served.client).len(), KEYS);
    served.end(Signal::TERM);
    assert_sound(&directory);
}

/// Puts some keys in one pipeline. The body of each job is its key.
fn try_to_put_keys(
    client: &mut Client,
    random: &mut fastrand::Rng,
    keys: usize,
) -> std::io::Result<()> {
    const PIPELINE: usize = 200;
    let first = random.usize(..keys);
    let mut requests = String::new();
    for index in 0..PIPELINE {
        let key = format!("key-{}", (first + index * 7) % keys);
        requests += &format!("put 0 0 60 {} idp:{key}\r\n{key}\r\n", key.len());
    }
    client.try_send(requests)?;
    for _ in 0..PIPELINE {
        let reply = client.try_line()?;
        assert!(reply.starts_with("INSERTED "), "{reply}");
    }
    Ok(())
}

/// Deletes some jobs, as a worker does.
fn try_to_delete(client: &mut Client) -> std::io::Result<()> {
    client.try_send("reserve-batch 100\r\n")?;
    let head = client.try_line()?;
    let count: usize = head.strip_prefix("RESERVED_BATCH ").unwrap().parse().unwrap();
    let mut ids = String::new();
    for _ in 0..count {
        let reply = client.try_reply()?;
        ids += &format!(" {}", reply.number("RESERVED").unwrap());
    }
    if count > 0 {
        let reply = client.try_ask(format!("delete-batch{ids}\r\n"))?;
        assert_eq!(reply.line, format!("DELETED_BATCH {count} 0"));
    }
    Ok(())
}

/// Returns the id of each job, by its body, which is its key. Fails if two jobs have the same.
fn jobs_by_key(client: &mut Client) -> BTreeMap<String, u64> {
    let (mut jobs, mut after) = (BTreeMap::new(), 0);
    loop {
        let head = client.ask(format!("peek-batch default any 1000 {after}\r\n")).line;
        let mut numbers = head.strip_prefix("FOUND_BATCH ").unwrap().split(' ');
        let mut number = || numbers.next().unwrap().parse::<u64>().unwrap();
        let (count, next) = (number(), number());
        for _ in 0..count {
            let reply = client.reply();
            let id = reply.number("FOUND").unwrap();
            let key = reply.text().to_owned();
            if let Some(other) = jobs.insert(key.clone(), id) {
                panic!("jobs {other} and {id} have the key {key}");
            }
        }
        if next == 0 {
            return jobs;
        }
        after = next;
    }
}

// ---- C beanstalkd and back ----

#[test]
fn c_beanstalkd_and_ours_take_turns_on_one_directory() {
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    let directory = tempfile::tempdir().unwrap();
    let mut kept: BTreeMap<u64, String> = BTreeMap::new();
    for round in 0..8 {
        let (program, signal) = match round % 4 {
            0 => (Path::new(BEANSTALKD), Signal::TERM),
            1 => (c.as_path(), Signal::TERM),
            2 => (Path::new(BEANSTALKD), Signal::KILL),
            _ => (c.as_path(), Signal::KILL),
        };
        let mut served = serve(program, directory.path(), &["-f", "0", "-s", "8192"]);
        served.check_jobs(&kept, &format!("round {round}, {}", program.display()));
        let buried = kept.values().filter(|job| job.starts_with("buried")).count();
        assert_eq!(served.client.stat("current-jobs-buried"), buried as u64);
        served.ask("use work");
        for index in 0..20 {
            let body = format!("job {index} of round {round}");
            let id = served.put(&body);
            assert!(kept.keys().all(|old| *old < id), "id {id} was assigned before");
            served.ask(&format!("reserve-job {id}"));
            match index % 4 {
                0 => {
                    served.ask(&format!("delete {id}"));
                    continue;
                }
                1 => {
                    served.ask(&format!("bury {id} 6"));
                    kept.insert(id, format!("buried work 6 0 120 {body}"));
                }
                2 => {
                    served.ask(&format!("release {id} 7 9999"));
                    kept.insert(id, format!("delayed work 7 9999 120 {body}"));
                }
                _ => {
                    kept.insert(id, format!("ready work 5 0 120 {body}"));
                }
            }
        }
        // Some old jobs are deleted, and some are kicked.
        let old: Vec<u64> = kept.keys().copied().take(6).collect();
        for id in &old[..3] {
            assert_eq!(served.ask(&format!("delete {id}")), "DELETED");
            kept.remove(id);
        }
        for id in &old[3..] {
            if served.ask(&format!("kick-job {id}")) == "KICKED" {
                let job = kept.get_mut(id).unwrap();
                let (_, rest) = job.split_once(' ').unwrap();
                *job = format!("ready {rest}");
            }
        }
        served.end(signal);
    }
    assert!(kept.len() > 50);
    assert_sound(&directory);
}

#[test]
fn c_beanstalkd_finds_the_same_jobs_after_flushes_and_batches() {
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    let requests = [
        ("use a", "USING a"),
        ("put 5 0 120 3\r\nold", "INSERTED 1"),
        ("put 5 9999 120 3\r\nold", "INSERTED 2"),
        ("put 5 0 120 3\r\nold", "INSERTED 3"),
        ("reserve-job 3", "RESERVED 3 3"),
        ("flush-tube a", "FLUSHED 3"),
        ("put 5 0 120 3\r\nnew", "INSERTED 4"),
        ("put-in-tube b 6 9999 120 3\r\nnew", "INSERTED 5"),
        ("put-in-tube b 7 0 120 3\r\nnew", "INSERTED 6"),
        ("put-in-tube b 7 0 120 4\r\nheld", "INSERTED 7"),
        ("put-in-tube b 7 0 120 3\r\nold", "INSERTED 8"),
        ("put-in-tube b 7 0 120 3\r\nold", "INSERTED 9"),
        ("reserve-job 6", "RESERVED 6 3"),
        ("bury 6 8", "BURIED"),
        ("reserve-job 7", "RESERVED 7 4"),
        ("bury 7 9", "BURIED"),
        ("reserve-job 7", "RESERVED 7 4"),
        ("flush-buried b", "FLUSHED 1"),
        ("delete-batch 8 9 9 100", "DELETED_BATCH 2 2"),
    ];
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0", "-s", "8192"]);
    for (request, reply) in requests {
        assert_eq!(served.ask(request), reply, "to {request}");
    }
    served.end(Signal::KILL);
    let mut served = serve(c, directory.path(), &["-f", "0", "-s", "8192"]);
    for gone in [1, 2, 3, 6, 8, 9] {
        assert_eq!(served.job(gone), None, "job {gone}");
    }
    assert_eq!(served.job(4).as_deref(), Some("ready a 5 0 120 new"));
    assert_eq!(served.job(5).as_deref(), Some("delayed b 6 9999 120 new"));
    assert!(served.job(7).is_some_and(|job| job.ends_with(" b 9 0 120 held")));
    let held = served.job(7);
    served.end(Signal::TERM);
    // And back.
    let mut served = ours(directory.path(), &[]);
    assert_eq!(served.job(1), None);
    assert_eq!(served.job(4).as_deref(), Some("ready a 5 0 120 new"));
    assert_eq!(served.job(7), held);
    served.end(Signal::TERM);
    assert_sound(&directory);
}

#[test]
fn keys_of_jobs_that_c_beanstalkd_has_deleted_are_gone() {
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0"]);
    for (request, reply) in [
        ("put 5 0 120 3 idp:plain\r\none", "INSERTED 1"),
        ("put 5 0 120 3 idp:kept:1000\r\ntwo", "INSERTED 2"),
        ("put 5 0 120 5 idp:stays:1000\r\nthree", "INSERTED 3"),
        ("put 5 9999 120 4 idp:delayed\r\nfour", "INSERTED 4"),
        ("put 5 0 120 4 idp:deleted:1000\r\nfive", "INSERTED 5"),
        ("delete 5", "DELETED"),
    ] {
        assert_eq!(served.ask(request), reply, "to {request}");
    }
    // Of more than two files, C beanstalkd would move the jobs to its own, without their keys.
    served.end(Signal::TERM);
    let mut served = serve(c, directory.path(), &["-f", "0"]);
    assert_eq!(served.job(1).as_deref(), Some("ready default 5 0 120 one"));
    assert_eq!(served.job(2).as_deref(), Some("ready default 5 0 120 two"));
    assert_eq!(served.job(4).as_deref(), Some("delayed default 5 9999 120 four"));
    assert_eq!(served.job(5), None);
    assert_eq!(served.ask("put 5 0 120 1 idp:plain"), "BAD_FORMAT");
    assert_eq!(served.ask("delete 1"), "DELETED");
    assert_eq!(served.ask("delete 2"), "DELETED");
    assert!(served.ask("reserve-job 3").starts_with("RESERVED"));
    assert_eq!(served.ask("bury 3 6"), "BURIED");
    served.end(Signal::TERM);
    let mut served = ours(directory.path(), &["-f", "0"]);
    for (request, reply) in [
        ("put 5 0 120 1 idp:stays\r\nx", "INSERTED 3 BURIED"),
        ("put 5 0 120 1 idp:delayed\r\nx", "INSERTED 4 DELAYED"),
        ("put 5 0 120 1 idp:deleted\r\nx", "INSERTED 5 DELETED"),
        ("put 5 0 120 1 idp:plain\r\nx", "INSERTED 9"),
        ("put 5 0 120 1 idp:kept\r\nx", "INSERTED 10"),
    ] {
        assert_eq!(served.ask(request), reply, "to {request}");
    }
    served.end(Signal::TERM);
    assert_sound(&directory);
}

/// The flush is freed in steps, and the server is killed when the client has the reply.
#[test]
fn c_beanstalkd_finds_no_job_of_a_large_flush() {
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    const JOBS: usize = 5_000;
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0", "-s", "65536"]);
    assert_eq!(served.ask("put-in-tube b 5 0 120 4\r\nkept"), "INSERTED 1");
    assert_eq!(served.ask("use a"), "USING a");
    served.client.send(b"put 5 0 120 3\r\nold\r\n".repeat(JOBS));
    (0..JOBS).for_each(|index| assert_eq!(served.client.line(), format!("INSERTED {}", index + 2)));
    assert_eq!(served.ask("flush-tube a"), format!("FLUSHED {JOBS}"));
    served.end(Signal::KILL);
    let mut served = serve(c, directory.path(), &["-f", "0", "-s", "65536"]);
    assert_eq!(served.client.stat("current-jobs-ready"), 1);
    assert_eq!(served.job(1).as_deref(), Some("ready b 5 0 120 kept"));
}

#[test]
fn c_beanstalkd_finds_a_job_buried_that_came_back_too_often() {
    let requests = [
        ("put 5 0 120 1\r\nx", "INSERTED 1"),
        ("put 6 0 120 1\r\ny", "INSERTED 2"),
        ("reserve-batch 2", "RESERVED_BATCH 2"),
    ];
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0", "--bury-after", "1"]);
    for (request, reply) in requests {
        assert_eq!(served.ask(request), reply, "to {request}");
    }
    assert_eq!(served.client.reply().line, "RESERVED 1 1");
    assert_eq!(served.client.reply().line, "RESERVED 2 1");
    assert_eq!(served.ask("release 2 6 0"), "RELEASED");
    // The server buries the job when it has read the end of this connection, and closes it then.
    served.client.half_close();
    assert!(served.client.is_at_end());
    served.client = Client::connect(unix(&directory.path().join("socket")));
    assert_eq!(served.client.stat("current-jobs-buried"), 1);
    served.end(Signal::KILL);
    let mut served = serve(c, directory.path(), &["-f", "0"]);
    assert_eq!(served.job(1).as_deref(), Some("buried default 5 0 120 x"));
    assert_eq!(served.job(2).as_deref(), Some("ready default 6 0 120 y"));
}

// ---- Directories ----

#[test]
fn a_directory_in_use_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let _served = ours(directory.path(), &[]);
    let (code, log) = refusal(path(&directory));
    assert_eq!(code, Some(10));
    assert!(log.contains("another process keeps its binlog there"), "{log}");
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    let mut other = Daemon::start(&c, &["-l", "127.0.0.1", "-p", "0", "-b", path(&directory)]);
    assert_eq!(other.wait_for_exit().code(), Some(10));
}

#[test]
fn a_missing_directory_is_refused() {
    let (code, log) = refusal("/no/such/directory");
    assert_eq!(code, Some(10));
    assert!(log.starts_with("beanstalkd: -b /no/such/directory: cannot lock"), "{log}");
}

#[test]
fn a_file_that_cannot_be_read_ends_the_server() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("binlog.3")).unwrap();
    let (code, log) = refusal(path(&directory));
    assert_eq!(code, Some(1));
    assert!(log.contains("cannot read binlog.3"), "{log}");
}

#[test]
fn damage_is_logged_and_intact_jobs_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0"]);
    let bodies = ["first", "second", "third"];
    let ids = bodies.map(|body| served.put(body));
    served.end(Signal::KILL);
    let file = directory.path().join("binlog.1");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(6).position(|window| window == b"second").unwrap();
    bytes[at] = b'S';
    std::fs::write(&file, &bytes).unwrap();

    let checked = run(&["-b", path(&directory), "--check"]);
    assert_eq!(checked.status.code(), Some(1));
    assert!(text(&checked.stdout).contains("the record fails its checksum"));
    let mut served = ours(directory.path(), &[]);
    served
        .daemon
        .wait_for_log("binlog.1:186: the record fails its checksum (99 bytes); job 2 is lost");
    served.daemon.wait_for_log("1 jobs lost, 2 kept");
    served.daemon.wait_for_log("binlog.1: damaged; renamed to binlog.1.damaged");
    let found: Vec<bool> = ids.iter().map(|id| served.job(*id).is_some()).collect();
    assert_eq!(found, [true, false, true]);
    assert_eq!(std::fs::read(directory.path().join("binlog.1.damaged")).unwrap(), bytes);
    served.end(Signal::TERM);
    assert_sound(&directory);
}

// ---- --check and --dump ----

#[test]
fn check_and_dump_change_nothing_while_a_server_runs() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0", "-s", "4096"]);
    served.put("a \"text\"\twith\\all");
    served.ask("use other");
    let id = served.put("later");
    served.ask(&format!("reserve-job {id}"));
    served.ask(&format!("release {id} 9 1000"));
    let before = std::fs::read(directory.path().join("binlog.1")).unwrap();

    let checked = run(&["-b", path(&directory), "--check"]);
    assert!(checked.status.success());
    let report = text(&checked.stdout);
    for line in [
        "binlog.1: version 7 with checksums, 378 of 4096 bytes used, 3 records (2 full), 206 bytes live, 84 dead",
        "  default: 1 ready, 0 reserved, 0 delayed, 0 buried",
        "  other: 0 ready, 0 reserved, 1 delayed, 0 buried",
    ] {
        assert!(report.lines().any(|found| found == line), "no {line:?} in:\n{report}");
    }
    let dumped = run(&["-b", path(&directory), "--dump"]);
    assert!(dumped.status.success());
    let lines: Vec<&str> = text(&dumped.stdout).lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(
        lines[0].starts_with(
            r#"{"id":1,"tube":"default","state":"ready","pri":5,"delay":0,"ttr":120,"#
        )
    );
    assert!(lines[0].ends_with(r#""kicks":0,"body":"a \"text\"\twith\\all"}"#), "{}", lines[0]);
    assert!(lines[1].contains(r#""state":"delayed","pri":9,"delay":1000"#), "{}", lines[1]);
    assert!(lines[1].contains(r#""due_at_ns":"#));

    assert_eq!(std::fs::read(directory.path().join("binlog.1")).unwrap(), before);
    assert_eq!(served.ask("delete 1"), "DELETED");
}

#[test]
fn check_and_dump_need_a_directory() {
    assert_eq!(run(&["--check"]).status.code(), Some(5));
    assert_eq!(run(&["--check", "--dump", "-b", "/"]).status.code(), Some(5));
    let output = run(&["--dump", "-b", "/no/such/directory"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/no/such/directory"));
}

// ---- A disk that fails ----

#[test]
fn a_write_that_fails_ends_the_server_with_nothing_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &[]);
    let id = served.put("safe");
    limit_file_size(&served.daemon, 300);
    served.client.send(put(0, 0, 9, "x".repeat(400)));
    assert_eq!(served.client.rest(), b"");
    let (status, log) = served.daemon.wait();
    assert_eq!(status.code(), Some(74));
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.starts_with("beanstalkd: cannot write binlog.1: File too large"), "{log}");
    let mut served = ours(directory.path(), &[]);
    assert!(served.job(id).unwrap().ends_with(" safe"));
}

#[test]
fn a_job_of_a_closed_connection_is_reserved_after_its_records_are_written() {
    // The kernel chooses which of the connections the server reads first.
    for _ in 0..6 {
        close_while_another_waits();
    }
}

fn close_while_another_waits() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0"]);
    served.put("job");
    assert!(served.ask("reserve-job 1").starts_with("RESERVED"));
    let mut other = Client::connect(unix(&directory.path().join("socket")));
    other.expect_service();
    let size = std::fs::metadata(directory.path().join("binlog.1")).unwrap().len();
    assert!(size > 300);
    // The record of the delete cannot be written.
    limit_file_size(&served.daemon, 100);
    // The server reads both requests in one iteration; the job goes to the other client when the
    // first has disconnected.
    let Served { daemon, mut client } = served;
    daemon.while_stopped(|| {
        client.send("quit\r\n");
        other.send("reserve\r\ndelete 1\r\n");
    });
    assert_eq!(other.rest(), b"", "a reply precedes the failed write");
    assert_eq!(daemon.wait().0.code(), Some(74));
}

#[test]
fn clients_that_hold_all_descriptors_do_not_stop_the_binlog() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let listen = format!("unix:{}", socket.display());
    let flags = ["-l", &listen, "-s", "8192", "-b", path(&directory)];
    let daemon = Daemon::spawn(process::script(r#"ulimit -n 40; exec "$0" "$@""#, &flags));
    let client = Client::over(connect_when_ready(&unix(&socket)));
    let mut served = Served { daemon, client };
    served.put("first");
    // More than the server has descriptors for; the rest wait to be accepted.
    let _crowd: Vec<Socket> = (0..60).map(|_| connect(unix(&socket))).collect();
    for _ in 0..600 {
        let id = served.put(&"x".repeat(100));
        assert_eq!(served.ask(&format!("delete {id}")), "DELETED");
    }
    let current = served.client.stat("binlog-current-index");
    assert!(current > 5, "only {current} files were used");
}
