//! The binlog with processes and files: C beanstalkd and ours in turn on one directory, directories that
//! cannot be used, and a disk that fails. `daemon::soak` kills servers under load.
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod harness;

use harness::client::{Client, connect, unix};
use harness::process::{self, BEANSTALKD, Daemon, connect_when_ready, path_text, run, text};
use harness::record::VERSION_7;
use harness::request::put;
use harness::{skip, yaml};
use rustix::process::{Resource, Rlimit, Signal};
use socket2::Socket;
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
    /// Sends a line and returns the line of the reply. An empty one is not sent: it reads the
    /// next line that an earlier one has brought.
    fn ask(&mut self, request: &str) -> String {
        if request.is_empty() {
            return self.client.line();
        }
        self.client.ask(format!("{request}\r\n")).line
    }

    /// Asserts the line of each reply.
    #[track_caller]
    fn play(&mut self, requests: &[(&str, &str)]) {
        for (request, line) in requests {
            assert_eq!(self.ask(request), *line, "to {request}");
        }
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
        yaml::job(ask, id, "state tube pri delay ttr")
    }

    fn end(mut self, signal: Signal) {
        self.daemon.end(signal);
    }
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

// ---- C beanstalkd and back ----

/// One server of several on one directory: the jobs that it finds, and what it is asked then.
struct Turn<'t> {
    is_c: bool,
    /// Not there, if the text is empty.
    jobs: &'t [(u64, &'t str)],
    requests: &'t [(&'t str, &'t str)],
    end: Signal,
}

/// Lets servers run in turn.
fn take_turns(flags: &[&str], turns: &[Turn<'_>]) {
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    let directory = tempfile::tempdir().unwrap();
    for (index, turn) in turns.iter().enumerate() {
        let program = if turn.is_c { c.as_path() } else { Path::new(BEANSTALKD) };
        let mut served = serve(program, directory.path(), flags);
        for (id, job) in turn.jobs {
            assert_eq!(served.job(*id).unwrap_or_default(), *job, "job {id} in turn {index}");
        }
        served.play(turn.requests);
        served.end(turn.end);
    }
    assert_sound(&directory);
}

#[test]
fn c_beanstalkd_finds_the_same_jobs_after_flushes_and_batches() {
    let jobs = [
        (1, ""),
        (2, ""),
        (3, ""),
        (4, "ready a 5 0 120 new"),
        (5, "delayed b 6 9999 120 new"),
        (6, ""),
        (7, "buried b 9 0 120 held"),
        (8, ""),
        (9, ""),
    ];
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
    take_turns(
        &["-f", "0", "-s", "8192"],
        &[
            Turn { is_c: false, jobs: &[], requests: &requests, end: Signal::KILL },
            Turn { is_c: true, jobs: &jobs, requests: &[], end: Signal::TERM },
            Turn { is_c: false, jobs: &jobs, requests: &[], end: Signal::TERM },
        ],
    );
}

/// Of more than two files, C beanstalkd would move the jobs to its own, without their keys.
#[test]
fn keys_of_jobs_that_c_beanstalkd_has_deleted_are_gone() {
    let puts = [
        ("put 5 0 120 3 idp:plain\r\none", "INSERTED 1"),
        ("put 5 0 120 3 idp:kept:1000\r\ntwo", "INSERTED 2"),
        ("put 5 0 120 5 idp:stays:1000\r\nthree", "INSERTED 3"),
        ("put 5 9999 120 4 idp:delayed\r\nfour", "INSERTED 4"),
        ("put 5 0 120 4 idp:deleted:1000\r\nfive", "INSERTED 5"),
        ("delete 5", "DELETED"),
    ];
    let found_by_c = [
        (1, "ready default 5 0 120 one"),
        (2, "ready default 5 0 120 two"),
        (4, "delayed default 5 9999 120 four"),
        (5, ""),
    ];
    let by_c = [
        ("put 5 0 120 1 idp:plain", "BAD_FORMAT"),
        ("delete 1", "DELETED"),
        ("delete 2", "DELETED"),
        ("reserve-job 3", "RESERVED 3 5"),
        ("bury 3 6", "BURIED"),
    ];
    let puts_again = [
        ("put 5 0 120 1 idp:stays\r\nx", "INSERTED 3 BURIED"),
        ("put 5 0 120 1 idp:delayed\r\nx", "INSERTED 4 DELAYED"),
        ("put 5 0 120 1 idp:deleted\r\nx", "INSERTED 5 DELETED"),
        ("put 5 0 120 1 idp:plain\r\nx", "INSERTED 9"),
        ("put 5 0 120 1 idp:kept\r\nx", "INSERTED 10"),
    ];
    let end = Signal::TERM;
    take_turns(
        &["-f", "0"],
        &[
            Turn { is_c: false, jobs: &[], requests: &puts, end },
            Turn { is_c: true, jobs: &found_by_c, requests: &by_c, end },
            Turn { is_c: false, jobs: &[], requests: &puts_again, end },
        ],
    );
}

/// The flush is freed in steps, and the server is killed when the client has the reply.
#[test]
fn c_beanstalkd_finds_no_job_of_a_large_flush() {
    const JOBS: usize = 5_000;
    let puts = "put 5 0 120 3\r\nold\r\n".repeat(JOBS - 1) + "put 5 0 120 3\r\nold";
    let more: Vec<String> = (3..JOBS + 2).map(|id| format!("INSERTED {id}")).collect();
    let flushed = format!("FLUSHED {JOBS}");
    let mut requests = vec![
        ("put-in-tube b 5 0 120 4\r\nkept", "INSERTED 1"),
        ("use a", "USING a"),
        (&puts, "INSERTED 2"),
    ];
    requests.extend(more.iter().map(|line| ("", &line[..])));
    requests.push(("flush-tube a", &flushed));
    let jobs = [(1, "ready b 5 0 120 kept"), (2, ""), (3000, ""), (5001, "")];
    take_turns(
        &["-f", "0", "-s", "65536"],
        &[
            Turn { is_c: false, jobs: &[], requests: &requests, end: Signal::KILL },
            Turn { is_c: true, jobs: &jobs, requests: &[], end: Signal::TERM },
        ],
    );
}

// ---- Directories ----

#[test]
fn a_directory_that_cannot_be_used_is_refused() {
    let [used, broken] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let _served = ours(used.path(), &[]);
    std::fs::create_dir(broken.path().join("binlog.3")).unwrap();
    for (flags, code, message) in [
        (["-p0", "-b", path(&broken)], 1, "cannot read binlog.3"),
        (["--dump", "-b", "/no/such/directory"], 1, "/no/such/directory"),
        (["--check", "--dump", "-b/"], 5, "exclude each other"),
        (["--check", "-p0", "-V"], 5, "-b is missing"),
    ] {
        let output = run(&flags);
        let log = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{flags:?}: {log}");
        assert!(log.contains(message), "{flags:?}: {log}");
    }
    let Some(c) = process::c_beanstalkd() else {
        return skip("C beanstalkd is not installed");
    };
    let mut other = Daemon::start(&c, &["-l", "127.0.0.1", "-p", "0", "-b", path(&used)]);
    assert_eq!(other.wait_for_exit().code(), Some(10));
}

#[test]
fn damage_is_logged_and_intact_jobs_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0"]);
    let bodies = ["first", "second", "third", "delete"];
    let ids = bodies.map(|body| served.put(body));
    // A job that was deleted is not lost.
    served.play(&[("delete 4", "DELETED")]);
    served.end(Signal::KILL);
    let file = directory.path().join("binlog.1");
    let mut bytes = std::fs::read(&file).unwrap();
    for body in [b"second", b"delete"] {
        let at = bytes.windows(6).position(|window| window == body).unwrap();
        bytes[at] = b'X';
    }
    std::fs::write(&file, &bytes).unwrap();
    // Those before it are missing.
    std::fs::write(directory.path().join("binlog.9"), VERSION_7).unwrap();

    let checked = run(&["-b", path(&directory), "--check"]);
    assert_eq!(checked.status.code(), Some(1));
    let report = text(&checked.stdout);
    assert!(report.contains("the record fails its checksum"), "{report}");
    assert!(report.ends_with("2 jobs: 3 damaged places\n"), "{report}");
    let mut served = ours(directory.path(), &[]);
    served
        .daemon
        .wait_for_log("binlog.1:186: the record fails its checksum (99 bytes); job 2 is lost");
    served.daemon.wait_for_log("is damaged in 3 places: at least 1 job lost, 2 kept");
    served.daemon.wait_for_log("binlog.1: damaged; renamed to binlog.1.damaged");
    let found: Vec<bool> = ids.iter().map(|id| served.job(*id).is_some()).collect();
    assert_eq!(found, [true, false, true, false]);
    assert_eq!(std::fs::read(directory.path().join("binlog.1.damaged")).unwrap(), bytes);
    served.end(Signal::TERM);
    assert_sound(&directory);
}

#[test]
fn a_body_that_cannot_be_read_back_is_logged_once_until_its_job_is_kicked() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0", "--body-cache", "1"]);
    for number in 0..150 {
        served.put(&format!("body {number:03}"));
    }
    let file = directory.path().join("binlog.1");
    let intact = std::fs::read(&file).unwrap();
    let mut bytes = intact.clone();
    for at in 0..bytes.len() - 5 {
        if bytes[at..].starts_with(b"body ") {
            bytes[at] = b'B';
        }
    }
    std::fs::write(&file, &bytes).unwrap();
    for request in ["peek 2", "reserve-job 2", "peek 2", "reserve-job 2"] {
        served.play(&[(request, "NOT_FOUND")]);
    }
    // Or can be read again meanwhile.
    std::fs::write(&file, &intact).unwrap();
    served.play(&[("peek 2", "FOUND 2 8")]);
    std::fs::write(&file, &bytes).unwrap();
    served.play(&[("peek 2", "NOT_FOUND"), ("peek 2", "NOT_FOUND")]);
    served.play(&[("kick-job 2", "KICKED"), ("peek 2", "NOT_FOUND"), ("peek 2", "NOT_FOUND")]);
    // Of many, the first hundred are logged.
    served.play(&[("reserve-with-timeout 0", "TIMED_OUT")]);
    let log = served.daemon.stop();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!(lines("job 2 "), 3, "{log}");
    assert_eq!(lines("job "), 100, "{log}");
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
fn dump_has_the_digest_of_a_key() {
    let directory = tempfile::tempdir().unwrap();
    let mut served = ours(directory.path(), &["-f", "0"]);
    served.put("without a key");
    assert_eq!(served.ask("put 0 0 9 1 idp:once\r\n1"), "INSERTED 2");
    let dumped = run(&["-b", path(&directory), "--dump"]);
    let lines: Vec<&str> = text(&dumped.stdout).lines().collect();
    assert!(!lines[0].contains(r#""key""#), "{}", lines[0]);
    let (_, rest) = lines[1].split_once(r#","key":""#).expect(lines[1]);
    let (digest, _) = rest.split_once('"').unwrap();
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    assert!(digest.len() == 32 && digest.bytes().all(is_digit), "{digest}");

    // C beanstalkd moves the job without the record of its key.
    served.end(Signal::TERM);
    let file = std::fs::read(directory.path().join("binlog.1")).unwrap();
    let name = b"default";
    let record = file.windows(name.len()).rposition(|window| window == name).unwrap() - 4;
    let moved = [&VERSION_7, &file[record..]].concat();
    std::fs::write(directory.path().join("binlog.2"), moved).unwrap();
    let dump = || run(&["-b", path(&directory), "--dump"]).stdout;
    assert_eq!(dump(), dumped.stdout);
    ours(directory.path(), &[]).end(Signal::TERM);
    assert_eq!(dump(), dumped.stdout);
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
    (0..6).for_each(|_| close_while_another_waits());
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
    let flags = ["-s", "8192", "-b", path(&directory)];
    let (daemon, address) = Daemon::with_limit("-n 40", &flags);
    let mut served = Served { daemon, client: Client::connect(address) };
    served.put("first");
    // More than the server has descriptors for; the rest wait to be accepted.
    let _crowd: Vec<Socket> = (0..60).map(|_| connect(address)).collect();
    for _ in 0..600 {
        let id = served.put(&"x".repeat(100));
        assert_eq!(served.ask(&format!("delete {id}")), "DELETED");
    }
    let current = served.client.stat("binlog-current-index");
    assert!(current > 5, "only {current} files were used");
}
