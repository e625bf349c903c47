//! The binlog with real processes and real files: killed servers, C beanstalkd and ours taking
//! turns, directories that cannot be used, and a disk that fails.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod support;

use rustix::process::{Resource, Rlimit, Signal};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use support::{BEANSTALKD, Daemon, field, run, skip, text, wait_until};
use tempfile::TempDir;

/// A server on the binlog of a directory, and one client of it.
struct Served {
    daemon: Daemon,
    client: BufReader<UnixStream>,
}

/// Starts a server, ours or C's, with its binlog and its socket in the directory.
fn serve(program: &Path, directory: &Path, flags: &[&str]) -> Served {
    let socket = directory.join("socket");
    let listen = format!("unix:{}", socket.display());
    // What a killed server has left would be taken for the new one's.
    let _ = std::fs::remove_file(&socket);
    let mut arguments = vec!["-l", &listen, "-b", directory.to_str().unwrap()];
    arguments.extend(flags);
    let daemon = Daemon::start(program, &arguments);
    let mut stream = None;
    wait_until("the server listens", || {
        stream = support::connect_unix(&socket).ok();
        stream.is_some()
    });
    let stream = stream.unwrap();
    Served { daemon, client: BufReader::new(stream) }
}

fn ours(directory: &Path, flags: &[&str]) -> Served {
    serve(Path::new(BEANSTALKD), directory, flags)
}

impl Served {
    fn send(&mut self, request: &str) {
        self.client.get_mut().write_all(request.as_bytes()).expect("the server reads");
    }

    /// One line; with the body, where one follows.
    fn reply(&mut self) -> String {
        let mut line = String::new();
        self.client.read_line(&mut line).expect("the server answers");
        let words: Vec<&str> = line.split_whitespace().collect();
        let body_len = match words.as_slice() {
            ["RESERVED" | "FOUND", _, len] | ["OK", len] => len.parse().unwrap(),
            _ => return line.trim_end().to_owned(),
        };
        let mut body = vec![0; body_len + 2];
        self.client.read_exact(&mut body).expect("the server sends what it says");
        format!("{line}{}", String::from_utf8_lossy(&body[..body_len]))
    }

    fn ask(&mut self, request: &str) -> String {
        self.send(&format!("{request}\r\n"));
        self.reply()
    }

    fn put(&mut self, body: &str) -> u64 {
        let reply = self.ask(&format!("put 5 0 120 {}\r\n{body}", body.len()));
        reply.strip_prefix("INSERTED ").expect("there is space").parse().unwrap()
    }

    /// State, tube, pri, delay, ttr and body of a job.
    fn job(&mut self, id: u64) -> Option<String> {
        let stats = self.ask(&format!("stats-job {id}"));
        let keys = ["state", "tube", "pri", "delay", "ttr"];
        let found: Vec<&str> = keys.iter().filter_map(|key| field(&stats, key)).collect();
        let body = self.ask(&format!("peek {id}"));
        let (_, body) = body.split_once('\n')?;
        Some(format!("{} {body}", found.join(" ")))
    }

    fn end(mut self, signal: Signal) {
        self.daemon.end(signal);
    }
}

fn path(directory: &TempDir) -> &str {
    directory.path().to_str().unwrap()
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
            for (id, expected) in &kept {
                assert_eq!(served.job(*id).as_ref(), Some(expected), "{flags:?}");
            }
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
            // It is in the middle of this when it is killed; nothing of it is acknowledged.
            served.send(&"put 0 0 1 5\r\nnever\r\n".repeat(random.usize(..50)));
            served.end(Signal::KILL);
        }
        assert!(kept.len() > 20, "only {} jobs", kept.len());
    }
}

// ---- C beanstalkd and back ----

#[test]
fn c_beanstalkd_and_ours_take_turns_on_one_directory() {
    let Some(c) = support::c_beanstalkd() else {
        return skip("C beanstalkd is not installed, so it cannot take turns with ours");
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
        for (id, expected) in &kept {
            let found = served.job(*id);
            assert_eq!(found.as_ref(), Some(expected), "round {round}, {}", program.display());
        }
        let total = field(&served.ask("stats"), "current-jobs-buried").unwrap().to_owned();
        let buried = kept.values().filter(|job| job.starts_with("buried")).count();
        assert_eq!(total, buried.to_string());
        served.ask("use work");
        for index in 0..20 {
            let body = format!("job {index} of round {round}");
            let id = served.put(&body);
            assert!(kept.keys().all(|old| *old < id), "ids go on");
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
        // Some of the old ones go, and some are kicked.
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
    let checked = run(&["-b", path(&directory), "--check"]);
    assert!(checked.status.success(), "{}", text(&checked.stdout));
}

// ---- Directories ----

#[test]
fn a_directory_in_use_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let _served = ours(directory.path(), &[]);
    let output = run(&["-l", "127.0.0.1", "-p", "0", "-b", path(&directory)]);
    assert_eq!(output.status.code(), Some(10));
    assert!(text(&output.stderr).contains("another process keeps its binlog there"));
    let Some(c) = support::c_beanstalkd() else {
        return skip("C beanstalkd is not installed, so it cannot be kept out");
    };
    let mut other = Daemon::start(&c, &["-l", "127.0.0.1", "-p", "0", "-b", path(&directory)]);
    assert_eq!(other.wait_for_exit().code(), Some(10));
}

#[test]
fn a_directory_that_is_not_there_is_refused() {
    let output = run(&["-l", "127.0.0.1", "-p", "0", "-b", "/no/such/directory"]);
    assert_eq!(output.status.code(), Some(10));
    let complaint = text(&output.stderr);
    assert!(complaint.starts_with("beanstalkd: -b /no/such/directory: cannot lock"), "{complaint}");
}

#[test]
fn a_file_that_cannot_be_read_is_not_passed_over() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("binlog.3")).unwrap();
    let output = run(&["-l", "127.0.0.1", "-p", "0", "-b", path(&directory)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("binlog.3 cannot be read"), "{}", text(&output.stderr));
}

#[test]
fn damage_is_told_and_the_rest_is_kept() {
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
    served.daemon.wait_for_log("binlog.1: set aside as binlog.1.damaged");
    let found: Vec<bool> = ids.iter().map(|id| served.job(*id).is_some()).collect();
    assert_eq!(found, [true, false, true]);
    assert_eq!(std::fs::read(directory.path().join("binlog.1.damaged")).unwrap(), bytes);
    served.end(Signal::TERM);
    let checked = run(&["-b", path(&directory), "--check"]);
    assert!(checked.status.success(), "{}", text(&checked.stdout));
}

// ---- A look inside ----

#[test]
fn a_look_inside_changes_nothing_and_disturbs_nobody() {
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
    let told = text(&checked.stdout);
    for line in [
        "binlog.1: version 7 with checksums, 378 of 4096 bytes used, 3 records (2 full), 206 bytes live, 84 dead",
        "  default: 1 ready, 0 reserved, 0 delayed, 0 buried",
        "  other: 0 ready, 0 reserved, 1 delayed, 0 buried",
    ] {
        assert!(told.lines().any(|told| told == line), "no {line:?} in:\n{told}");
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
fn a_look_needs_a_directory() {
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
    // No write beyond the first few bytes of a file works from here on.
    let limit = Rlimit { current: Some(300), maximum: Some(300) };
    rustix::process::prlimit(Some(served.daemon.pid()), Resource::Fsize, limit).unwrap();
    served.send(&format!("put 0 0 9 400\r\n{}\r\n", "x".repeat(400)));
    let mut rest = String::new();
    served.client.read_to_string(&mut rest).unwrap_or_default();
    assert_eq!(rest, "");
    let Served { daemon, .. } = served;
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(74));
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.starts_with("beanstalkd: binlog.1: cannot write it: File too large"), "{log}");
    let mut served = ours(directory.path(), &[]);
    assert!(served.job(id).unwrap().ends_with(" safe"));
}

#[test]
fn what_a_closed_connection_hands_on_waits_for_the_binlog_too() {
    // Whose words are heard first in the turn is for the system to choose.
    for _ in 0..6 {
        close_while_another_waits();
    }
}

fn close_while_another_waits() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0"]);
    served.put("job");
    assert!(served.ask("reserve-job 1").starts_with("RESERVED"));
    let mut other = support::connect_unix(&directory.path().join("socket")).unwrap();
    other.write_all(b"list-tube-used\r\n").unwrap();
    let mut reply = [0; b"USING default\r\n".len()];
    other.read_exact(&mut reply).unwrap();
    let size = std::fs::metadata(directory.path().join("binlog.1")).unwrap().len();
    assert!(size > 300);
    // The record of the delete cannot be written.
    let limit = Rlimit { current: Some(100), maximum: Some(100) };
    rustix::process::prlimit(Some(served.daemon.pid()), Resource::Fsize, limit).unwrap();
    // Both are heard in one turn: the job goes to the other one when the first is gone.
    served.daemon.signal(Signal::STOP);
    let stat = format!("/proc/{}/stat", served.daemon.child.id());
    let is_stopped = || std::fs::read_to_string(&stat).unwrap().contains(") T ");
    wait_until("the server has stopped", is_stopped);
    served.send("quit\r\n");
    other.write_all(b"reserve\r\ndelete 1\r\n").unwrap();
    served.daemon.signal(Signal::CONT);
    let mut rest = String::new();
    other.read_to_string(&mut rest).unwrap_or_default();
    assert_eq!(rest, "", "it is acknowledged before it is written");
    assert_eq!(served.daemon.wait().0.code(), Some(74));
}

#[test]
fn clients_that_hold_all_descriptors_do_not_stop_the_binlog() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let listen = format!("unix:{}", socket.display());
    let script = r#"ulimit -n 40; exec "$0" "$@""#;
    let mut command = support::command("sh");
    command.args(["-c", script, BEANSTALKD, "-l", &listen, "-s", "8192", "-b", path(&directory)]);
    let daemon = Daemon::spawn(command);
    wait_until("the server listens", || socket.exists());
    let connect = || support::connect_unix(&socket);
    let mut served = None;
    wait_until("the server accepts", || {
        served = connect().ok();
        served.is_some()
    });
    let client = BufReader::new(served.unwrap());
    let mut served = Served { daemon, client };
    served.put("first");
    // More than it has descriptors for; the rest wait to be accepted.
    let crowd: Vec<UnixStream> = (0..60).filter_map(|_| connect().ok()).collect();
    assert!(crowd.len() > 40);
    for _ in 0..600 {
        let id = served.put(&"x".repeat(100));
        assert_eq!(served.ask(&format!("delete {id}")), "DELETED");
    }
    let current: u32 =
        field(&served.ask("stats"), "binlog-current-index").unwrap().parse().unwrap();
    assert!(current > 5, "only {current} files came and went");
}
