//! The binary itself: flags, exit codes, sockets, inherited sockets, signals, limits.
#![allow(clippy::disallowed_methods, reason = "a test looks at the clock from outside")]
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

mod support;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{SocketAddr as UnixSocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};
use support::{
    BEANSTALKD, Daemon, PATIENCE, connect, connect_unix, is_asleep, logged_address,
    processor_ticks, run, skip, start_on_loopback, start_on_own_port, start_with_limit, status_kib,
    text, wait_until,
};

/// Sends a request and reads one line of reply.
fn ask(stream: impl Read + Write, request: &str) -> String {
    let mut stream = BufReader::new(stream);
    stream.get_mut().write_all(request.as_bytes()).expect("the server reads");
    let mut line = String::new();
    stream.read_line(&mut line).expect("the server answers");
    line
}

/// The value of a key in `stats`.
fn stat(address: SocketAddr, key: &str) -> String {
    let mut stream = connect(address);
    stream.write_all(b"stats\r\nquit\r\n").expect("the server reads");
    let mut document = String::new();
    stream.read_to_string(&mut document).expect("the server answers and closes");
    let value = document.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
    value.unwrap_or_else(|| panic!("no {key} in {document}")).to_owned()
}

// ---- Flags and exit codes ----

#[test]
fn version_and_help_go_where_those_of_c_go() {
    for flag in ["-v", "--version"] {
        let output = run(&[flag]);
        assert_eq!(text(&output.stdout), "beanstalkd 1.13 (beanstalkd-server 0.1.0)\n");
        assert_eq!(output.status.code(), Some(0));
    }
    for flag in ["-h", "--help"] {
        let output = run(&[flag]);
        assert!(text(&output.stderr).starts_with("Use: beanstalkd"));
        assert!(text(&output.stderr).contains("--max-job-size BYTES"));
        assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 0));
    }
}

#[test]
fn a_wrong_command_line_is_told_with_the_usage() {
    for arguments in
        [&["-X"][..], &["-p"], &["-z", "1x"], &["-p", "70000"], &["--socket-mode", "8"], &["what"]]
    {
        let output = run(arguments);
        let complaint = text(&output.stderr);
        assert_eq!(output.status.code(), Some(5), "{arguments:?}");
        assert!(complaint.starts_with("beanstalkd: ") && complaint.contains("Use: beanstalkd"));
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn old_flags_are_accepted_with_a_warning() {
    let (mut daemon, _) = start_on_loopback(&["-c", "-n", "-z", "2000000000"]);
    daemon.wait_for_log("-c has no effect");
    daemon.wait_for_log("-n has no effect");
    daemon.wait_for_log("-z 2000000000");
}

#[test]
fn what_cannot_be_bound_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    for (arguments, named) in [
        (&["-l", "127.0.0.1", "-p", &port][..], "127.0.0.1"),
        (&["-l", "192.0.2.1", "-p", "0"], "192.0.2.1"),
        (&["-l", "no such host", "-p", "0"], "no such host"),
        (
            &["-l", "127.0.0.1", "-p", "no-such-service"],
            "the service no-such-service: /etc/services",
        ),
        (&["-l", "unix:/no/such/directory/socket"], "/no/such/directory"),
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(111), "{arguments:?}");
        assert!(text(&output.stderr).contains(named), "{}", text(&output.stderr));
    }
}

#[test]
fn an_unknown_user_is_named() {
    let output = run(&["-l", "127.0.0.1", "-p", "0", "-u", "nosuchuser"]);
    assert_eq!(output.status.code(), Some(33));
    assert!(text(&output.stderr).contains("nosuchuser"));
}

#[test]
fn nothing_is_left_of_root_after_the_user_is_changed() {
    // With these the kernel itself would leave all capabilities, and C beanstalkd the groups.
    let odd = &["--groups", "5,6", "--securebits", "+no_setuid_fixup"];
    for privileges in [&["--groups", "5"][..], odd] {
        let Some(daemon) = start_with(privileges, "12345:23456") else { return };
        assert_is_unprivileged(&daemon, "12345", "23456", "23456");
    }
}

#[test]
fn nothing_is_left_of_the_capabilities_of_another_user() {
    let privileges = &[
        &AS_ANOTHER[..],
        &["--groups", "5,6", "--inh-caps", "+setuid,+setgid", "--ambient-caps", "+setuid,+setgid"],
    ];
    let Some(daemon) = start_with(&privileges.concat(), "54321:65432") else { return };
    assert_is_unprivileged(&daemon, "54321", "65432", "65432");
    // Who has no right to change the user may stay who he is, and has nothing more to drop.
    let privileges = &[&AS_ANOTHER[..], &["--groups", "23456"]];
    let Some(daemon) = start_with(&privileges.concat(), "12345:23456") else { return };
    assert_is_unprivileged(&daemon, "12345", "23456", "23456");
    assert_eq!(log_of(daemon), "");
}

#[test]
fn groups_that_may_not_be_dropped_are_told() {
    let capabilities = ["--inh-caps", "+net_bind_service", "--ambient-caps", "+net_bind_service"];
    let privileges = [&AS_ANOTHER[..], &["--groups", "5,6"], &capabilities].concat();
    let Some(daemon) = start_with(&privileges, "12345:23456") else { return };
    assert_is_unprivileged(&daemon, "12345", "23456", "5 6");
    assert!(log_of(daemon).contains("-u 12345:23456: supplementary groups are kept"));
}

#[test]
fn root_may_stay_root() {
    let Some(daemon) = start_with(&["--groups", "5,6"], "root") else { return };
    assert_eq!(status(daemon.child.id(), "Uid:"), "0 0 0 0");
    assert_eq!(status(daemon.child.id(), "Groups:"), "0");
    assert_ne!(status(daemon.child.id(), "CapEff:"), "0000000000000000");
}

const AS_ANOTHER: [&str; 4] = ["--reuid", "12345", "--regid", "23456"];

/// Starts a server that is to become `user`, with these privileges, in the words of setpriv(1);
/// none if they cannot be had. It listens when this returns.
fn start_with(privileges: &[&str], user: &str) -> Option<Daemon> {
    let command = |arguments: &[&str]| {
        let mut command = support::command("setpriv");
        command.args(privileges).arg(BEANSTALKD).args(arguments).stdin(Stdio::null());
        command
    };
    let tried = command(&["-v"]).output();
    if !tried.is_ok_and(|output| output.status.success()) {
        skip("only root may change the user, with setpriv, and the binary where others can run it");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let mode = PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(directory.path(), mode).unwrap();
    let path = directory.path().join("socket");
    let listen = format!("unix:{}", path.display());
    let daemon = Daemon::spawn(command(&["-l", &listen, "-u", user]));
    // The first reply comes when all has been changed.
    wait_until("the server listens", || connect_unix(&path).is_ok());
    assert_eq!(ask(connect_unix(&path).unwrap(), "use a\r\n"), "USING a\r\n");
    Some(daemon)
}

/// What a server has logged when it has been stopped.
fn log_of(daemon: Daemon) -> String {
    daemon.signal(Signal::TERM);
    daemon.wait().1
}

/// Neither now nor ever again: no id is saved, and no program that it runs can have more.
fn assert_is_unprivileged(daemon: &Daemon, uid: &str, gid: &str, groups: &str) {
    let status = |key| status(daemon.child.id(), key);
    assert_eq!(status("Uid:"), [uid; 4].join(" "));
    assert_eq!(status("Gid:"), [gid; 4].join(" "));
    assert_eq!(status("Groups:"), groups);
    for capabilities in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(status(capabilities), "0000000000000000", "{capabilities}");
    }
    assert_eq!(status("NoNewPrivs:"), "1");
}

/// A line of the status of a process.
fn status(pid: u32, key: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    value.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn verbosity_comes_from_flags_and_environment() {
    let (mut daemon, address) = start_on_loopback(&["-VV"]);
    let line = daemon.wait_for_log("listening on ");
    assert!(line.contains(" INFO ") && line.contains('T') && line.contains('Z'), "{line}");
    ask(connect(address), "list-tube-used\r\n");
    daemon.wait_for_log("DEBUG connection 0 opened");

    let mut command = support::command(BEANSTALKD);
    command.args(["-l", "127.0.0.1", "-p", "0"]).env("RUST_LOG", "info");
    command.stdin(Stdio::null());
    let line = Daemon::spawn(command).wait_for_log("listening on ");
    assert!(line.contains(" INFO "), "{line}");
}

#[test]
fn the_log_can_be_one_object_a_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = run(&["-V", "--log-format", "json", "-l", "127.0.0.1", "-p", &port]);
    assert_eq!(output.status.code(), Some(111));
    let mut levels = Vec::new();
    for line in text(&output.stderr).lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        let keys: Vec<&String> = line.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["level", "message", "time"]);
        assert!(line["time"].as_str().unwrap().ends_with('Z'));
        levels.push((line["level"].as_str().unwrap().to_owned(), line["message"].to_string()));
    }
    let (last, message) = levels.last().unwrap();
    assert!(last == "ERROR" && message.contains("cannot listen on 127.0.0.1"), "{message}");
    assert!(levels.iter().any(|(level, _)| level == "INFO"));
}

#[test]
fn requests_are_logged_at_trace_and_not_below() {
    let lines_for = |verbosity: &str, requests: usize| {
        let (daemon, address) = start_on_loopback(&[verbosity]);
        let stream = connect(address);
        for _ in 0..requests {
            ask(&stream, "use some-tube\r\n");
        }
        drop(stream);
        daemon.signal(Signal::TERM);
        let (_, log) = daemon.wait();
        log.lines().filter(|line| !line.contains("connection 0 closed")).count()
    };
    assert_eq!(lines_for("-VV", 1), lines_for("-VV", 100));
    assert_eq!(lines_for("-VVV", 1) + 99, lines_for("-VVV", 100));
}

// ---- Listening ----

#[test]
fn the_default_serves_ipv4_and_ipv6() {
    let (_daemon, address) = start_on_own_port(&[]);
    assert_eq!(ask(connect(([127, 0, 0, 1], address.port()).into()), "use a\r\n"), "USING a\r\n");
    match TcpStream::connect((std::net::Ipv6Addr::LOCALHOST, address.port())) {
        Ok(stream) => assert_eq!(ask(stream, "use a\r\n"), "USING a\r\n"),
        Err(error) => {
            assert!(address.is_ipv4(), "IPv6 is bound but refuses: {error}");
            skip("this machine has no IPv6");
        }
    }
}

#[test]
fn addresses_and_names_are_listened_on() {
    for name in ["127.0.0.1", "localhost"] {
        let (_daemon, address) = start_on_own_port(&["-l", name]);
        assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
    }
}

#[test]
fn the_name_of_a_service_counts_for_tcp_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listen = format!("unix:{}", path.display());
    let mut daemon =
        Daemon::start(Path::new(BEANSTALKD), &["-V", "-l", &listen, "-p", "no-such-service"]);
    daemon.wait_for_log("listening on unix:");
    assert_eq!(ask(UnixStream::connect(&path).unwrap(), "use a\r\n"), "USING a\r\n");
}

#[test]
fn a_stale_unix_socket_is_replaced_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "the listener has left its socket behind");
    let listen = format!("unix:{}", path.display());
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &["-V", "-l", &listen]);
    daemon.wait_for_log(&listen);
    assert_eq!(ask(connect_unix(&path).unwrap(), "use a\r\n"), "USING a\r\n");

    let file = directory.path().join("file");
    std::fs::write(&file, "precious").unwrap();
    let output = run(&["-l", &format!("unix:{}", file.display())]);
    assert_eq!(output.status.code(), Some(111));
    assert!(text(&output.stderr).contains("is no socket"));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
}

/// Starts a server that is to end by itself; returns its exit code and its log.
fn refusal(flags: &[&str]) -> (Option<i32>, String) {
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), flags);
    wait_until("the server has ended", || daemon.child.try_wait().unwrap().is_some());
    let (status, log) = daemon.wait();
    (status.code(), log)
}

#[test]
fn a_unix_socket_is_not_taken_from_a_server_that_listens_there() {
    let directory = tempfile::tempdir().unwrap();
    let [path, metrics] = ["socket", "metrics"].map(|name| directory.path().join(name));
    let [listen, tell] = [&path, &metrics].map(|path| format!("unix:{}", path.display()));
    let flags = ["-V", "-l", &listen, "--metrics", &tell];
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &flags);
    daemon.wait_for_log("telling metrics on ");
    for flags in [&["-l", &*listen][..], &["-l", "127.0.0.1", "-p", "0", "--metrics", &tell]] {
        let (code, log) = refusal(flags);
        assert_eq!(code, Some(111), "{log}");
        let socket = flags[flags.len() - 1];
        let message = format!("cannot listen on {socket}: another server listens there");
        assert!(log.contains(&message), "{log}");
    }
    assert_eq!(ask(UnixStream::connect(&path).unwrap(), "use a\r\n"), "USING a\r\n");
    let answer = ask(UnixStream::connect(&metrics).unwrap(), "GET /healthz HTTP/1.1\r\n\r\n");
    assert_eq!(answer, "HTTP/1.1 200 OK\r\n");
}

#[test]
fn a_server_with_a_full_queue_keeps_its_unix_socket() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let address = socket2::SockAddr::unix(&path).unwrap();
    let stream =
        || socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).unwrap();
    let listener = stream();
    listener.bind(&address).unwrap();
    listener.listen(1).unwrap();
    let mut clients = Vec::new();
    let full = loop {
        let client = stream();
        client.set_nonblocking(true).unwrap();
        match client.connect(&address) {
            Ok(()) => clients.push(client),
            Err(error) => break error,
        }
    };
    assert_eq!(full.kind(), std::io::ErrorKind::WouldBlock);
    let inode = path.metadata().unwrap().ino();
    let (code, log) = refusal(&["-l", &format!("unix:{}", path.display())]);
    assert_eq!(code, Some(111), "{log}");
    assert_eq!(path.metadata().unwrap().ino(), inode);
}

#[test]
fn a_server_that_cannot_lock_the_binlog_replaces_no_socket() {
    let directory = tempfile::tempdir().unwrap();
    let binlog = directory.path().to_str().unwrap();
    let (_daemon, address) = start_on_loopback(&["-b", binlog]);
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
    let path = directory.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    // Its number is not given to another file while it has two names.
    std::fs::hard_link(&path, directory.path().join("backup")).unwrap();
    let inode = path.metadata().unwrap().ino();
    let unix = format!("unix:{}", path.display());
    for flags in [&["-l", &*unix][..], &["-l", "127.0.0.1", "-p", "0", "--metrics", &unix]] {
        let (code, log) = refusal(&[flags, &["-b", binlog]].concat());
        assert_eq!(code, Some(10), "{log}");
        assert_eq!(path.metadata().unwrap().ino(), inode, "{flags:?}");
    }
}

#[test]
fn the_binlog_is_locked_with_the_rights_of_the_user() {
    if !rustix::process::getuid().is_root() {
        skip("only root may change the user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let binlog = directory.path().join("binlog");
    std::fs::create_dir(&binlog).unwrap();
    let flags = ["-l", "127.0.0.1", "-p", "0", "-u", "12345:23456", "-b", binlog.to_str().unwrap()];
    let (code, log) = refusal(&flags);
    assert_eq!(code, Some(10), "{log}");
    chown(&binlog, Some(12345), Some(23456)).unwrap();
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &[&["-V"][..], &flags].concat());
    daemon.wait_for_log("recovered 0 jobs");
    assert_is_unprivileged(&daemon, "12345", "23456", "23456");
    for name in ["lock", "binlog.1"] {
        let file = binlog.join(name).metadata().unwrap();
        assert_eq!((file.uid(), file.gid()), (12345, 23456), "{name}");
    }
}

/// Starts the binary under a umask that leaves everything, with a Unix socket at `path`.
fn start_on_path(path: &Path, flags: &[&str]) -> Daemon {
    let mut command = support::command("sh");
    command.args(["-c", r#"umask 000; exec "$0" "$@""#, BEANSTALKD, "-V"]);
    command.arg("-l").arg(format!("unix:{}", path.display())).args(flags);
    Daemon::spawn(command)
}

#[test]
fn a_unix_socket_has_its_mode_from_its_first_moment_on() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    for mode in [0o600, 0o660, 0o777, 0o000].repeat(5) {
        let mut daemon = start_on_path(&path, &["--socket-mode", &format!("{mode:o}")]);
        let start = Instant::now();
        let first_seen = loop {
            assert!(start.elapsed() < PATIENCE, "there is no socket");
            if let Ok(socket) = path.symlink_metadata() {
                break socket.mode() & 0o7777;
            }
        };
        assert_eq!(first_seen, mode, "{first_seen:o} is not {mode:o}");
        daemon.wait_for_log("listening on unix:");
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, mode);
        assert_eq!(status(daemon.child.id(), "Umask:"), "0000", "the mask is as before");
        drop(daemon);
        std::fs::remove_file(&path).unwrap();
    }
}

/// More bodies than leave in one write, to a client that says nothing more.
#[test]
fn many_large_bodies_at_once_all_arrive() {
    const COUNT: usize = 20;
    let (_daemon, address) = start_on_loopback(&[]);
    let mut client = connect(address);
    let body = "x".repeat(5_000);
    client.write_all(format!("put 0 0 9 5000\r\n{body}\r\n").as_bytes()).unwrap();
    let mut inserted = [0; 12];
    client.read_exact(&mut inserted).unwrap();
    client.write_all("peek 1\r\n".repeat(COUNT).as_bytes()).unwrap();
    let mut found = vec![0; COUNT * (14 + 5_002)];
    client.read_exact(&mut found).unwrap();
    assert!(found == format!("FOUND 1 5000\r\n{body}\r\n").repeat(COUNT).as_bytes());
}

/// Whether the server is about to read a line, or the rest of a body.
#[test]
fn a_client_that_sends_large_bodies_may_break_off_anywhere() {
    let (_daemon, address) = start_on_loopback(&[]);
    let put = format!("put 0 0 9 60000\r\n{}\r\n", "x".repeat(60_000));
    for sent in [0, 17, 18, 5_000, 60_000, put.len() - 1] {
        for _ in 0..20 {
            let stream = connect(address);
            assert!(ask(&stream, &put).starts_with("INSERTED "));
            (&stream).write_all(&put.as_bytes()[..sent]).unwrap();
            // Closing it then resets the connection.
            socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        }
    }
    assert_eq!(stat(address, "current-jobs-ready"), "120");
    wait_until("all connections have ended", || stat(address, "current-connections") == "1");
}

#[test]
fn a_stale_unix_socket_leaves_nothing_of_its_mode() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    for (flags, mode) in [
        (&["--socket-mode", "600"][..], 0o600),
        (&["--socket-mode", "0660"], 0o660),
        (&[], 0o777),
        (&["--socket-mode", "200"], 0o200),
    ] {
        let mut daemon = start_on_path(&path, flags);
        daemon.wait_for_log("listening on unix:");
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, mode, "{flags:?}");
    }
}

#[test]
fn a_unix_socket_with_a_mode_is_the_users() {
    if !rustix::process::getuid().is_root() {
        skip("only root may change the user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let started = |flags: &[&str]| {
        let mut daemon = start_on_path(&path, flags);
        daemon.wait_for_log("listening on unix:");
        let socket = path.metadata().unwrap();
        (socket.uid(), socket.gid(), socket.mode() & 0o7777)
    };
    let (user, mode) = (["-u", "12345:23456"], ["--socket-mode", "660"]);
    assert_eq!(started(&[user, mode].concat()), (12345, 23456, 0o660));
    // One of the two alone changes nothing else; with -u alone it is as in C.
    assert_eq!(started(&mode), (0, 0, 0o660));
    assert_eq!(started(&user), (0, 0, 0o777));
    // Where the directory says whose group its files have, it stays so.
    chown(directory.path(), None, Some(34567)).unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o2700)).unwrap();
    assert_eq!(started(&[user, mode].concat()), (12345, 34567, 0o660));
}

#[test]
fn inherited_sockets_are_used_instead_of_flags() {
    let (mut daemon, address) = start_on_loopback(&["-l", "192.0.2.1", "-p", "1"]);
    daemon.wait_for_log("-l, -p and --socket-mode have no effect");
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let mode = listener.local_addr().unwrap().as_pathname().unwrap().metadata().unwrap().mode();
    let flags = ["-l", "unix:/no/such/directory/socket", "--socket-mode", "000"];
    let mut daemon = Daemon::with_inherited(Path::new(BEANSTALKD), &flags, listener);
    daemon.wait_for_log("-l, -p and --socket-mode have no effect");
    assert_eq!(ask(connect_unix(&path).unwrap(), "use a\r\n"), "USING a\r\n");
    assert_eq!(path.metadata().unwrap().mode(), mode);
}

#[test]
fn flags_that_name_an_inherited_socket_are_no_mistake() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port().to_string();
    let unix = format!("unix:{}", path.display());
    let address = tcp.local_addr().unwrap();
    let flags = ["-l", "127.0.0.1", "-p", &port];
    let daemon = Daemon::with_inherited(Path::new(BEANSTALKD), &flags, tcp);
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
    assert_eq!(log_of(daemon), "");
    let socket = UnixListener::bind(&path).unwrap();
    let daemon = Daemon::with_inherited(Path::new(BEANSTALKD), &["-l", &unix, "-p", "1"], socket);
    assert_eq!(ask(connect_unix(&path).unwrap(), "use a\r\n"), "USING a\r\n");
    assert_eq!(log_of(daemon), "");
}

/// A server with two sockets on loopback, and their addresses.
fn start_with_two_sockets(flags: &[&str]) -> (Daemon, [SocketAddr; 2]) {
    let first = TcpListener::bind("127.0.0.1:0").unwrap();
    let second = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = [first.local_addr().unwrap(), second.local_addr().unwrap()];
    let mut command = support::command("sh");
    let script =
        r#"exec 3<&0 4<&1 </dev/null >/dev/null; LISTEN_PID=$$ LISTEN_FDS=2 exec "$0" "$@""#;
    command.args(["-c", script, BEANSTALKD]).args(flags);
    command.stdin(OwnedFd::from(first)).stdout(OwnedFd::from(second));
    (Daemon::spawn_with_stdout(&mut command), addresses)
}

#[test]
fn all_inherited_sockets_are_served() {
    let (_daemon, addresses) = start_with_two_sockets(&[]);
    for address in addresses {
        assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
    }
}

#[test]
fn where_places_are_scarce_no_socket_starves_another() {
    let (mut daemon, [crowded, calm]) = start_with_two_sockets(&["--max-connections", "1"]);
    let inside = connect(crowded);
    assert_eq!(ask(&inside, "use a\r\n"), "USING a\r\n");
    let _crowd: Vec<TcpStream> = (0..3).map(|_| connect(crowded)).collect();
    daemon.wait_for_log("cannot accept more connections");
    let waiting = connect(calm);
    drop(inside);
    assert_eq!(ask(&waiting, "use b\r\n"), "USING b\r\n");
}

#[test]
fn inherited_descriptors_of_another_kind_are_refused() {
    let datagram = UdpSocket::bind("127.0.0.1:0").unwrap();
    let (status, log) = Daemon::with_inherited(Path::new(BEANSTALKD), &[], datagram).wait();
    assert_eq!(status.code(), Some(111));
    assert!(log.contains("inherited descriptor 3"), "{log}");

    let (here, _there) = UnixStream::pair().unwrap();
    let (status, log) = Daemon::with_inherited(Path::new(BEANSTALKD), &[], here).wait();
    assert_eq!(status.code(), Some(111));
    assert!(log.contains("inherited descriptor 3"), "{log}");
}

#[test]
fn a_malformed_count_of_inherited_descriptors_is_an_error() {
    let script = r#"LISTEN_PID=$$ LISTEN_FDS="$0" exec "$@""#;
    for count in ["", "one", "-1", "1 ", "0x1", "4294967296", "99999999999999999999"] {
        let mut command = Command::new("sh");
        command.args(["-c", script, count, BEANSTALKD, "-V", "-l", "127.0.0.1", "-p", "0"]);
        let mut daemon = Daemon::spawn(command);
        wait_until("the server has ended", || daemon.child.try_wait().unwrap().is_some());
        let (status, log) = daemon.wait();
        assert_eq!(status.code(), Some(111), "{count}: {log}");
        assert!(log.contains(&format!("LISTEN_FDS={count}: not a number")), "{log}");
    }
    // More than there are is an error too, and none is none.
    let mut command = Command::new("sh");
    command.args(["-c", script, "2147483647", BEANSTALKD, "-l", "127.0.0.1", "-p", "0"]);
    let (status, log) = Daemon::spawn(command).wait();
    assert_eq!(status.code(), Some(111), "{log}");
    assert!(log.contains("inherited descriptor 3: it is not open"), "{log}");
    let mut command = Command::new("sh");
    command.args(["-c", script, "0", BEANSTALKD, "-V", "-l", "127.0.0.1", "-p", "0"]);
    logged_address(&mut Daemon::spawn(command));
}

#[test]
fn sockets_meant_for_another_process_are_left_alone() {
    let mut command = support::command(BEANSTALKD);
    command
        .args(["-V", "-l", "127.0.0.1", "-p", "0"])
        .env("LISTEN_PID", "1")
        .env("LISTEN_FDS", "1");
    command.stdin(Stdio::null());
    let mut daemon = Daemon::spawn(command);
    daemon.wait_for_log("listening on 127.0.0.1:");
}

// ---- Signals ----

#[test]
fn sigint_stays_ignored_where_it_was() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut command = support::command("sh");
    let script = r#"trap '' INT; exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$0""#;
    command.args(["-c", script, BEANSTALKD]).stdin(OwnedFd::from(listener));
    let mut daemon = Daemon::spawn(command);
    let stream = connect(address);
    assert_eq!(ask(&stream, "use a\r\n"), "USING a\r\n");
    daemon.signal(Signal::INT);
    assert_eq!(ask(&stream, "use b\r\n"), "USING b\r\n");
    assert_eq!(daemon.end(Signal::TERM).code(), Some(0));
}

#[test]
fn term_and_int_stop_with_success() {
    for signal in [Signal::TERM, Signal::INT] {
        let (daemon, address) = start_on_loopback(&[]);
        assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
        daemon.signal(signal);
        let (status, log) = daemon.wait();
        assert_eq!((status.code(), log.as_str()), (Some(0), ""));
    }
}

/// The signal is there when the server starts, before it reads the first file.
#[test]
fn term_stops_the_server_while_it_reads_the_binlog() {
    let blocking = Command::new("env").args(["--block-signal=TERM", "true"]).output();
    if !blocking.is_ok_and(|output| output.status.success()) {
        skip("env cannot block signals here");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-V", "-l", "127.0.0.1", "-p", "0", "-b", directory.path().to_str().unwrap()];
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &flags);
    let client = connect(logged_address(&mut daemon));
    assert_eq!(ask(&client, "put 0 0 9 1\r\na\r\n"), "INSERTED 1\r\n");
    assert!(daemon.end(Signal::TERM).success());
    let mut command = Command::new("env");
    let script = r#"kill -TERM $$; exec "$0" "$@""#;
    command.args(["--block-signal=TERM", "sh", "-c", script, BEANSTALKD]).args(flags);
    let (status, log) = Daemon::spawn(command).wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("stopped: Terminate"), "{log}");
    assert!(!log.contains("binlog.1: read"), "{log}");
    // Nothing is lost.
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &flags);
    let client = connect(logged_address(&mut daemon));
    assert_eq!(ask(&client, "reserve\r\n"), "RESERVED 1 1\r\n");
}

#[test]
fn usr1_drains_and_usr2_ends_that() {
    let (daemon, address) = start_on_loopback(&[]);
    let stream = connect(address);
    assert_eq!(ask(&stream, "put 0 0 9 1\r\na\r\n"), "INSERTED 1\r\n");
    daemon.signal(Signal::USR1);
    assert_eq!(ask(&stream, "put 0 0 9 1\r\na\r\n"), "DRAINING\r\n");
    assert_eq!(ask(&stream, "reserve\r\n"), "RESERVED 1 1\r\n");
    assert_eq!(stat(address, "draining"), "true");
    daemon.signal(Signal::USR2);
    assert_eq!(ask(&stream, "put 0 0 9 1\r\na\r\n"), "INSERTED 3\r\n");
    assert_eq!(stat(address, "draining"), "false");
}

#[test]
fn hup_changes_nothing() {
    let (mut daemon, address) = start_on_loopback(&["-V"]);
    let stream = connect(address);
    assert_eq!(ask(&stream, "put 0 0 9 1\r\na\r\n"), "INSERTED 1\r\n");
    daemon.signal(Signal::HUP);
    daemon.wait_for_log("SIGHUP: ");
    assert_eq!(ask(&stream, "reserve\r\n"), "RESERVED 1 1\r\n");
}

#[test]
fn the_first_process_of_a_container_ends_as_if_killed() {
    if !can_have_a_process_namespace() {
        return;
    }
    for (name, code) in [("TERM", 143), ("INT", 0)] {
        // unshare stays behind and passes on the exit code.
        let mut command = support::command("unshare");
        command.args(["--fork", "--pid", BEANSTALKD, "-V", "-l", "127.0.0.1", "-p", "0"]);
        let mut daemon = Daemon::spawn(command);
        let address = logged_address(&mut daemon);
        // Inside it is the first; outside it is a child.
        assert_eq!(stat(address, "pid"), "1");
        let [server] = children(daemon.child.id())[..] else { panic!("unshare has one child") };
        kill(name, server);
        assert_eq!(daemon.wait().0.code(), Some(code), "{name}");
    }
}

/// The children of a process.
fn children(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    children.unwrap().split_whitespace().map(|child| child.parse().unwrap()).collect()
}

#[test]
fn the_first_process_of_a_container_reaps_orphans() {
    if !can_have_a_process_namespace() {
        return;
    }
    // The first ends before the server begins, and the second when we say so; what started it
    // has ended by then.
    let script = r#"true & (sleep 1000 &); exec "$0" -V -l 127.0.0.1 -p 0"#;
    let mut command = support::command("unshare");
    command.args(["--fork", "--pid", "sh", "-c", script, BEANSTALKD]);
    let mut daemon = Daemon::spawn(command);
    let address = logged_address(&mut daemon);
    let [server] = children(daemon.child.id())[..] else { panic!("unshare has one child") };
    wait_until("only one child is left", || children(server).len() == 1);
    kill("KILL", children(server)[0]);
    wait_until("no child is left", || children(server).is_empty());
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
    kill("TERM", server);
    assert_eq!(daemon.wait().0.code(), Some(143));
}

fn can_have_a_process_namespace() -> bool {
    let namespace = Command::new("unshare").args(["--fork", "--pid", "true"]).output();
    let can = namespace.is_ok_and(|output| output.status.success());
    if !can {
        skip("no new process namespace can be had here");
    }
    can
}

fn kill(signal: &str, pid: u32) {
    let killed = Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status();
    assert!(killed.unwrap().success());
}

// ---- The service manager ----

/// The end of the service manager.
struct Manager {
    socket: UnixDatagram,
}

impl Manager {
    fn at(address: &UnixSocketAddr) -> Manager {
        let socket = UnixDatagram::bind_addr(address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Manager { socket }
    }

    /// The next message.
    fn hear(&self) -> String {
        let mut buffer = [0; 512];
        loop {
            match self.socket.recv(&mut buffer) {
                Ok(len) => return text(&buffer[..len]).to_owned(),
                // The test was stopped and continued.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("no message within {PATIENCE:?}: {error}"),
            }
        }
    }

    /// The next message in which a line begins with `text`.
    fn hear_of(&self, text: &str) -> String {
        loop {
            let message = self.hear();
            if message.lines().any(|line| line.starts_with(text)) {
                return message;
            }
        }
    }
}

/// A server whose manager is at `name`.
fn start_managed(
    name: impl AsRef<OsStr>,
    flags: &[&str],
    environment: &[(&str, &str)],
) -> (Daemon, SocketAddr) {
    let mut command = support::command(BEANSTALKD);
    command.args(["-V", "-l", "127.0.0.1", "-p", "0"]).args(flags).stdin(Stdio::null());
    command.env("NOTIFY_SOCKET", name.as_ref()).envs(environment.iter().copied());
    let mut daemon = Daemon::spawn(command);
    let address = logged_address(&mut daemon);
    (daemon, address)
}

#[test]
fn the_service_manager_hears_how_the_server_does() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("notify");
    let manager = Manager::at(&UnixSocketAddr::from_pathname(&path).unwrap());
    let (mut daemon, address) = start_managed(&path, &[], &[]);
    assert_eq!(manager.hear(), "READY=1\nSTATUS=0 jobs, 0 connections");
    let client = connect(address);
    assert_eq!(ask(&client, "put 0 0 9 1\r\na\r\n"), "INSERTED 1\r\n");
    daemon.signal(Signal::USR1);
    let status = "STATUS=1 job (1 ready), 1 connection, draining";
    assert_eq!(manager.hear_of(status), status);
    assert!(daemon.end(Signal::TERM).success());
    assert_eq!(manager.hear(), "STOPPING=1\nSTATUS=stopping");
}

#[test]
fn the_service_manager_may_have_an_abstract_name() {
    let name = format!("beanstalkd-test-{}", std::process::id());
    let manager = Manager::at(&UnixSocketAddr::from_abstract_name(&name).unwrap());
    let (mut daemon, _) = start_managed(format!("@{name}"), &[], &[]);
    assert_eq!(manager.hear(), "READY=1\nSTATUS=0 jobs, 0 connections");
    assert!(daemon.end(Signal::TERM).success());
    assert_eq!(manager.hear(), "STOPPING=1\nSTATUS=stopping");
}

#[test]
fn the_service_manager_is_asked_for_patience_while_the_binlog_is_read() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("notify");
    let manager = Manager::at(&UnixSocketAddr::from_pathname(&path).unwrap());
    let flags = ["-b", home.path().to_str().unwrap()];
    let (mut daemon, address) = start_managed(&path, &flags, &[]);
    assert_eq!(manager.hear(), "READY=1\nSTATUS=0 jobs, 0 connections");
    assert_eq!(ask(connect(address), "put 0 0 9 1\r\na\r\n"), "INSERTED 1\r\n");
    assert!(daemon.end(Signal::TERM).success());
    manager.hear_of("STOPPING=1");
    let _daemon = start_managed(&path, &flags, &[]);
    assert_eq!(manager.hear(), "EXTEND_TIMEOUT_USEC=120000000\nSTATUS=reading binlog.1");
    assert_eq!(manager.hear(), "READY=1\nSTATUS=1 job (1 ready), 0 connections");
}

#[test]
fn the_watchdog_hears_that_the_loop_turns() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("notify");
    let manager = Manager::at(&UnixSocketAddr::from_pathname(&path).unwrap());
    let _daemon = start_managed(&path, &[], &[("WATCHDOG_USEC", "20000")]);
    for _ in 0..5 {
        manager.hear_of("WATCHDOG=1");
    }
}

#[test]
fn a_service_manager_that_does_not_read_or_is_gone_holds_nobody_up() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("notify");
    let manager = Manager::at(&UnixSocketAddr::from_pathname(&path).unwrap());
    let sender = UnixDatagram::unbound().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.send_to(b"in the way", &path).is_ok() {}
    let (mut daemon, address) = start_managed(&path, &["-VV"], &[("WATCHDOG_USEC", "2000")]);
    daemon.wait_for_log("the service manager does not keep up");
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
    // What it would not hear at first it hears later.
    manager.hear_of("READY=1");
    drop(manager);
    daemon.wait_for_log("the service manager cannot be told anything");
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert!(status.success());
    assert!(!log.contains("cannot be told"), "once is enough: {log}");
}

#[test]
fn a_service_manager_that_has_no_address_is_done_without() {
    let (mut daemon, address) = start_managed("vsock:2:1234", &[], &[]);
    daemon.wait_for_log("NOTIFY_SOCKET=vsock:2:1234: cannot be told anything");
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
}

// ---- Limits ----

#[test]
fn the_soft_limit_of_open_files_is_raised() {
    let (daemon, _) = start_with_limit("-Sn 50", &[]);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.child.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let numbers: Vec<&str> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(numbers[0], numbers[1]);
}

#[test]
fn at_the_descriptor_limit_clients_are_served_and_accepting_resumes() {
    let start = Instant::now();
    let (mut daemon, address) = start_with_limit("-n 32", &[]);
    let mut clients: Vec<TcpStream> = (0..64).map(|_| connect(address)).collect();
    daemon.wait_for_log("cannot accept more connections at present");

    // Those who were let in are served.
    assert_eq!(ask(&clients[0], "use a\r\n"), "USING a\r\n");
    let pid = daemon.child.id();
    wait_until("the server rests", || is_asleep(pid));
    let used_before = processor_ticks(pid);
    thread::sleep(Duration::from_millis(300));
    assert!(processor_ticks(pid) - used_before <= 2, "the server spins");

    // When they leave, those who wait are let in, down to the last.
    let last = clients.pop().unwrap();
    drop(clients);
    assert_eq!(ask(&last, "use a\r\n"), "USING a\r\n");
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0));
    let told = log.matches("cannot accept").count() as u64;
    assert!(told <= start.elapsed().as_secs() / 60, "once a minute is enough: {log}");
}

#[test]
fn as_many_clients_as_are_allowed_are_served_and_the_next_waits() {
    let (mut daemon, address) = start_on_loopback(&["--max-connections", "2"]);
    let (first, second, mut third) = (connect(address), connect(address), connect(address));
    assert_eq!(ask(&first, "use a\r\n"), "USING a\r\n");
    assert_eq!(ask(&second, "use a\r\n"), "USING a\r\n");
    daemon.wait_for_log("cannot accept more connections at present, 2 are open");
    third.set_nonblocking(true).unwrap();
    third.write_all(b"use c\r\n").unwrap();
    assert_eq!(ask(&second, "use b\r\n"), "USING b\r\n");
    let nothing = third.read(&mut [0]).expect_err("nobody listens to the third");
    assert_eq!(nothing.kind(), std::io::ErrorKind::WouldBlock);
    drop(first);
    third.set_nonblocking(false).unwrap();
    let mut reply = [0; 9];
    third.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"USING c\r\n");
    drop((second, third));
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
}

#[test]
fn as_many_clients_as_are_allowed_are_no_reason_to_complain() {
    let (daemon, address) = start_on_loopback(&["--max-connections", "1"]);
    for _ in 0..3 {
        let mut client = connect(address);
        assert_eq!(ask(&client, "use a\r\n"), "USING a\r\n");
        // There is room for the next client once the server has closed its end.
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "the server closes");
    }
    assert_eq!(log_of(daemon), "");
}

/// The end of one connection and the beginning of the next come with the same poll.
#[test]
fn a_client_that_comes_as_another_goes_finds_its_place() {
    let (daemon, address) = start_on_loopback(&["--max-connections", "1"]);
    let first = connect(address);
    assert_eq!(ask(&first, "use a\r\n"), "USING a\r\n");
    stop_for_a_moment(&daemon, || {
        drop(first);
        connect(address)
    });
    let second = connect(address);
    assert_eq!(ask(&second, "use b\r\n"), "USING b\r\n");
    // A last command comes together with the end of its connection.
    let third = stop_for_a_moment(&daemon, || {
        (&second).write_all(b"use c\r\n").unwrap();
        drop(second);
        connect(address)
    });
    assert_eq!(ask(&third, "use d\r\n"), "USING d\r\n");
    assert_eq!(log_of(daemon), "");
}

/// Does something while the server stands still.
fn stop_for_a_moment<T>(daemon: &Daemon, something: impl FnOnce() -> T) -> T {
    daemon.signal(Signal::STOP);
    wait_until("the server stands still", || status(daemon.child.id(), "State:").starts_with('T'));
    let done = something();
    daemon.signal(Signal::CONT);
    done
}

#[test]
fn errors_of_one_client_do_not_keep_the_next_waiting() {
    let flags = ["-V", "-l", "127.0.0.1", "-p", "0"];
    let fault = |error: &str| format!("accept4:error={error}:when=1..3");
    for error in ["EPERM", "ENONET", "EHOSTDOWN", "ENOPROTOOPT", "EOPNOTSUPP", "ECONNABORTED"] {
        let Some(mut daemon) = start_with_fault(&fault(error), &flags) else { return };
        let address = logged_address(&mut daemon);
        assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n");
        let log = log_of(daemon);
        assert!(!log.contains("cannot accept"), "{error}: {log}");
    }
    // Where every call fails, the server does not spin.
    let Some(mut daemon) = start_with_fault("accept4:error=EPERM", &flags) else { return };
    let _client = connect(logged_address(&mut daemon));
    daemon.wait_for_log("cannot accept more connections at present, 0 are open: Operation not");
}

#[test]
fn health_is_told_while_clients_have_all_descriptors() {
    let flags = ["--metrics", "127.0.0.1:0"];
    let script = r#"ulimit -n 32; exec "$0" -V -l 127.0.0.1 -p 0 "$@""#;
    let mut command = support::command("sh");
    command.args(["-c", script, BEANSTALKD]).args(flags).stdin(Stdio::null());
    let mut daemon = Daemon::spawn(command);
    let address = logged_address(&mut daemon);
    let line = daemon.wait_for_log("telling metrics on ");
    let metrics = line.split_once("telling metrics on ").unwrap().1.parse().unwrap();
    let _clients: Vec<TcpStream> = (0..64).map(|_| connect(address)).collect();
    daemon.wait_for_log("cannot accept more connections at present");
    for _ in 0..10 {
        let answer = ask(connect(metrics), "GET /healthz HTTP/1.1\r\n\r\n");
        assert_eq!(answer, "HTTP/1.1 200 OK\r\n");
    }
    // Nor can visitors who say nothing take all that is held back for visitors.
    let _silent: Vec<TcpStream> = (0..4).map(|_| connect(metrics)).collect();
    let answer = ask(connect(metrics), "GET /healthz HTTP/1.1\r\n\r\n");
    assert_eq!(answer, "HTTP/1.1 200 OK\r\n");
}

#[test]
fn puts_are_refused_while_jobs_take_as_much_memory_as_they_may() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let flags = ["--max-memory", "10000", "-b", path];
    let (mut daemon, address) = start_on_loopback(&flags);
    let stream = connect(address);
    let put = format!("put 0 0 9 3000\r\n{}\r\n", "x".repeat(3000));
    for id in 1..=3 {
        assert_eq!(ask(&stream, &put), format!("INSERTED {id}\r\n"));
    }
    assert_eq!(ask(&stream, &put), "OUT_OF_MEMORY\r\n");
    daemon.wait_for_log("a put is answered OUT_OF_MEMORY");
    assert_eq!(ask(&stream, "use a\r\n"), "USING a\r\n");
    assert_eq!(daemon.end(Signal::KILL).code(), None);
    // What was acknowledged comes back, allowed or not.
    let (daemon, address) = start_on_loopback(&["--max-memory", "5000", "-b", path]);
    let stream = connect(address);
    assert_eq!(stat(address, "current-jobs-ready"), "3");
    assert_eq!(ask(&stream, &put), "OUT_OF_MEMORY\r\n");
    for id in 1..=3 {
        assert_eq!(ask(&stream, &format!("delete {id}\r\n")), "DELETED\r\n");
    }
    assert_eq!(ask(&stream, &put), "INSERTED 4\r\n");
    // Once a minute is enough to say so.
    let log = log_of(daemon);
    assert_eq!(log.matches("OUT_OF_MEMORY").count(), 1, "{log}");
}

#[test]
fn more_than_a_thousand_clients_find_room_in_the_backlog() {
    let largest = std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap();
    if largest.trim().parse::<u32>().unwrap() < 1024 {
        return skip("this machine allows no backlog of 1024");
    }
    let (daemon, address) = start_on_own_port(&["-l", "127.0.0.1"]);
    // While the server stands still nobody is accepted, and who finds no room never connects.
    daemon.signal(Signal::STOP);
    let clients: Vec<TcpStream> = (0..1024).map(|_| connect(address)).collect();
    daemon.signal(Signal::CONT);
    assert_eq!(ask(clients.last().unwrap(), "use a\r\n"), "USING a\r\n");
}

#[test]
fn ten_thousand_clients_are_served() {
    const WANTED: u64 = 10_000;
    // The test opens as many files as the server, beside those of other tests.
    const OTHERS: u64 = 500;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let limit = match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => maximum,
        Err(_) => current,
    };
    let count = limit.unwrap_or(u64::MAX).saturating_sub(OTHERS).min(WANTED);
    if count < WANTED {
        skip(&format!(
            "{} of {WANTED} clients: the limit of open files is {limit:?}",
            WANTED - count
        ));
    }
    let (_daemon, address) = start_on_own_port(&["-l", "127.0.0.1"]);
    let clients: Vec<TcpStream> = (0..count).map(|_| connect(address)).collect();
    assert_eq!(ask(clients.last().unwrap(), "use a\r\n"), "USING a\r\n");
    assert_eq!(stat(address, "current-connections"), (count + 1).to_string());
}

#[test]
fn memory_comes_back_after_a_backlog() {
    const JOBS: usize = 100_000;
    let (daemon, address) = start_on_loopback(&[]);
    // Not `VmRSS`: how much of the program file is in memory is up to the system.
    let rss = || status_kib(daemon.child.id(), "RssAnon:");
    let stream = connect(address);
    let empty = rss();
    let mut lines = BufReader::new(&stream).lines();
    let put = [&b"put 0 0 9 500\r\n"[..], &[b'x'; 500], b"\r\n"].concat();
    for _ in 0..JOBS / 1000 {
        (&stream).write_all(&put.repeat(1000)).unwrap();
        assert!(lines.by_ref().take(1000).all(|line| line.unwrap().starts_with("INSERTED ")));
    }
    let backlog = rss() - empty;
    assert!(backlog > 50_000, "{backlog} KiB");
    for first in (0..JOBS).step_by(1000) {
        let deletes: String =
            (first..first + 1000).map(|id| format!("delete {}\r\n", id + 1)).collect();
        (&stream).write_all(deletes.as_bytes()).unwrap();
        assert!(lines.by_ref().take(1000).all(|line| line.unwrap() == "DELETED"));
    }
    if cfg!(target_env = "gnu") {
        let what = format!("all but a tenth of {backlog} KiB has been given back");
        wait_until(&what, || rss() < empty + backlog / 10);
    }
}

/// Whatever the size of the bodies, and although the server is never at rest for long.
#[test]
fn memory_comes_back_under_traffic() {
    const JOBS: usize = 20_000;
    const BATCH: usize = 100;
    let (daemon, address) = start_on_loopback(&[]);
    let rss = || status_kib(daemon.child.id(), "VmRSS:");
    let traffic = Traffic::start(address);
    let stream = connect(address);
    let mut lines = BufReader::new(&stream).lines();
    let put = [&b"put 0 0 9 16000\r\n"[..], &[b'x'; 16_000], b"\r\n"].concat();
    let empty = rss();
    for _ in 0..JOBS / BATCH {
        (&stream).write_all(&put.repeat(BATCH)).unwrap();
        assert!(lines.by_ref().take(BATCH).all(|line| line.unwrap().starts_with("INSERTED ")));
    }
    let full = rss();
    assert!(full > 300_000, "{full} KiB");
    for first in (1..=JOBS).step_by(BATCH) {
        let deletes: String = (first..first + BATCH).map(|id| format!("delete {id}\r\n")).collect();
        (&stream).write_all(deletes.as_bytes()).unwrap();
        assert!(lines.by_ref().take(BATCH).all(|line| line.unwrap() == "DELETED"));
    }
    if cfg!(target_env = "gnu") {
        // The defect would leave all 300 MiB.
        let what = format!("of {full} KiB no more than 16 MiB are left beyond {empty} KiB");
        wait_until(&what, || rss() < empty + 16 * 1024);
    }
    traffic.end();
}

/// A client that sends a command every 50 ms and reads the reply.
struct Traffic {
    end: mpsc::Sender<()>,
    client: thread::JoinHandle<()>,
}

impl Traffic {
    fn start(address: SocketAddr) -> Traffic {
        const PAUSE: Duration = Duration::from_millis(50);
        let (end, is_over) = mpsc::channel();
        let stream = connect(address);
        let client = thread::spawn(move || {
            while is_over.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout) {
                assert_eq!(ask(&stream, "use a\r\n"), "USING a\r\n");
            }
        });
        Traffic { end, client }
    }

    fn end(self) {
        drop(self.end);
        self.client.join().expect("it was served");
    }
}

const MIB: u64 = 1024;
/// What `--max-memory` allows in these tests, in KiB.
const MOST_KIB: u64 = 16 * MIB;

fn start_with_max_memory() -> (Daemon, SocketAddr) {
    let bytes = (MOST_KIB * 1024).to_string();
    start_on_loopback(&["--max-memory", &bytes])
}

/// The process may take a quarter more than is allowed, and 32 MiB.
fn assert_is_within_memory(daemon: &Daemon) {
    let rss = status_kib(daemon.child.id(), "VmRSS:");
    let most = MOST_KIB + MOST_KIB / 4 + 32 * MIB;
    assert!(rss <= most, "{rss} KiB are taken of {most}");
}

/// Puts jobs until one is refused; returns their ids.
fn fill_with(stream: &TcpStream, len: usize) -> Vec<u64> {
    let put = format!("put 0 0 9 {len}\r\n{}\r\n", "x".repeat(len));
    let replies = (0..1_000_000).map(|_| ask(stream, &put));
    let ids = replies.map_while(|reply| reply.trim_end().strip_prefix("INSERTED ")?.parse().ok());
    ids.collect()
}

#[test]
fn pages_with_one_job_left_in_each_are_counted_as_memory() {
    let (daemon, address) = start_with_max_memory();
    let stream = connect(address);
    for len in [60_000, 20_000, 7_000, 3_000, 2_000, 1_500, 1_100, 800, 600] {
        let ids = fill_with(&stream, len);
        // One of each page of 128 KiB or more stays.
        let in_page = 2 * 128 * 1024 / len;
        let gone: Vec<u64> =
            ids.iter().enumerate().filter(|(n, _)| n % in_page != 0).map(|(_, &id)| id).collect();
        for id in gone {
            assert_eq!(ask(&stream, &format!("delete {id}\r\n")), "DELETED\r\n");
        }
        assert_is_within_memory(&daemon);
    }
}

#[test]
fn replies_that_were_not_read_are_bounded_with_memory() {
    const CLIENTS: usize = 600;
    let (daemon, address) = start_with_max_memory();
    let first = connect(address);
    let body = "x".repeat(4_000);
    assert_eq!(ask(&first, &format!("put 0 0 9 4000\r\n{body}\r\n")), "INSERTED 1\r\n");
    let clients: Vec<TcpStream> = (0..CLIENTS).map(|_| connect(address)).collect();
    for mut client in &clients {
        client.write_all("peek 1\r\n".repeat(1_500).as_bytes()).unwrap();
    }
    // The server has come to rest when it answers others at once, and again.
    for _ in 0..1_000 {
        assert_eq!(ask(&first, "use a\r\n"), "USING a\r\n");
    }
    assert_is_within_memory(&daemon);
    // Those who read get all that they have asked for.
    let reply = format!("FOUND 1 4000\r\n{body}\r\n");
    let mut received = vec![0; reply.len() * 1_500];
    (&clients[0]).read_exact(&mut received).unwrap();
    assert!(received.chunks(reply.len()).all(|chunk| chunk == reply.as_bytes()));
}

#[test]
fn bodies_and_commands_that_wait_are_bounded_with_memory() {
    const CLIENTS: usize = 1_500;
    let (daemon, address) = start_with_max_memory();
    let unfinished = format!("put 0 0 9 60000\r\n{}\r", "x".repeat(60_000));
    let held_up = format!("reserve\r\n{}", "list-tube-used\r\n".repeat(4_200));
    let clients: Vec<TcpStream> = (0..CLIENTS).map(|_| connect(address)).collect();
    for (number, mut client) in clients.iter().enumerate() {
        let bytes = if number % 2 == 0 { &unfinished } else { &held_up };
        client.set_nonblocking(true).unwrap();
        // What the kernel does not take is not sent.
        let _ = client.write(bytes.as_bytes());
    }
    let other = connect(address);
    for _ in 0..1_000 {
        assert_eq!(ask(&other, "use a\r\n"), "USING a\r\n");
    }
    assert_is_within_memory(&daemon);
    drop(clients);
    wait_until("a put is taken again", || {
        ask(&other, "put 0 0 9 1\r\nx\r\n").starts_with("INSERTED ")
    });
}

#[test]
fn without_memory_clients_are_told_and_served() {
    let (_daemon, address) = start_with_limit("-v 100000", &[]);
    let stream = connect(address);
    let put = format!("put 0 0 600 60000\r\n{}\r\n", "x".repeat(60_000));
    let mut replies = (0..10_000).map(|_| ask(&stream, &put));
    let refusal = replies.find(|reply| !reply.starts_with("INSERTED "));
    assert_eq!(refusal.as_deref(), Some("OUT_OF_MEMORY\r\n"));

    // Everything else goes on, and puts do once there is room.
    let clients: Vec<TcpStream> = (0..200).map(|_| connect(address)).collect();
    for (id, client) in (1..).zip(&clients) {
        assert_eq!(ask(client, &format!("watch tube-{id}\r\n")), "WATCHING 2\r\n");
        assert_eq!(ask(client, &format!("delete {id}\r\n")), "DELETED\r\n");
    }
    assert!(ask(&stream, &put).starts_with("INSERTED "));
}

/// Watches these tubes; returns the last reply, without its end.
fn watch_all(mut stream: &TcpStream, names: impl ExactSizeIterator<Item = String>) -> String {
    let count = names.len();
    let watches: String = names.map(|name| format!("watch {name}\r\n")).collect();
    stream.write_all(watches.as_bytes()).unwrap();
    BufReader::new(stream).lines().nth(count - 1).unwrap().unwrap()
}

/// Watches tubes with long names until there is no memory for one more.
fn watch_until_refused(stream: &TcpStream) {
    const AT_ONCE: u32 = 500;
    let batches = (0..).step_by(AT_ONCE as usize);
    let mut replies = batches.map(|first: u32| {
        watch_all(stream, (0..AT_ONCE).map(move |number| format!("{:0>200}", first + number)))
    });
    let refusal = replies.find(|reply| !reply.starts_with("WATCHING "));
    assert_eq!(refusal.as_deref(), Some("OUT_OF_MEMORY"));
}

/// Waits until the server takes jobs again; only then is all of its headroom there.
fn wait_for_memory(producer: &TcpStream) {
    wait_until("there is memory again", || {
        ask(producer, "put 0 0 9 1\r\nx\r\n").starts_with("INSERTED ")
    });
}

const ONE_OF_TWO: [&str; 2] = ["TIMED_OUT\r\n", "OUT_OF_MEMORY\r\n"];

#[test]
fn without_memory_to_wait_for_many_tubes_a_worker_is_told() {
    let (_daemon, address) = start_with_limit("-v 40000", &[]);
    let (hog, producer) = (connect(address), connect(address));
    assert_eq!(ask(&producer, "use kept\r\n"), "USING kept\r\n");
    assert_eq!(ask(&producer, "put 0 0 9 1\r\nx\r\n"), "INSERTED 1\r\n");
    watch_until_refused(&hog);
    for _ in 0..3 {
        let reply = ask(&hog, "reserve-with-timeout 1\r\n");
        assert!(ONE_OF_TWO.contains(&reply.as_str()), "{reply}");
    }
    assert_eq!(ask(&connect(address), "list-tube-used\r\n"), "USING default\r\n");
    drop(hog);
    wait_for_memory(&producer);
    assert_eq!(ask(&producer, "delete 1\r\n"), "DELETED\r\n");
}

#[test]
fn without_memory_that_others_have_taken_a_worker_is_told_and_then_served() {
    const BATCHES: u32 = 40;
    const AT_ONCE: u32 = 500;
    let (_daemon, address) = start_with_limit("-v 40000", &[]);
    let [worker, hog, producer] = [(); 3].map(|()| connect(address));
    for batch in 0..BATCHES {
        let last = watch_all(&worker, (0..AT_ONCE).map(|number| format!("own-{batch}-{number}")));
        assert_eq!(last, format!("WATCHING {}", (batch + 1) * AT_ONCE + 1));
    }
    assert_eq!(ask(&producer, "use own-1-1\r\n"), "USING own-1-1\r\n");
    watch_until_refused(&hog);
    let reply = ask(&worker, "reserve-with-timeout 1\r\n");
    assert!(ONE_OF_TWO.contains(&reply.as_str()), "{reply}");
    drop(hog);
    wait_for_memory(&producer);
    assert!(ask(&worker, "reserve-with-timeout 0\r\n").starts_with("RESERVED "));
}

#[test]
fn without_memory_for_a_longer_list_of_clients_one_more_waits_or_is_served() {
    // The list has room for a power of two.
    const CLIENTS: usize = 1024;
    let (_daemon, address) = start_with_limit("-v 40000", &[]);
    let mut clients: Vec<TcpStream> = (0..CLIENTS).map(|_| connect(address)).collect();
    let producer = clients.pop().unwrap();
    assert_eq!(ask(&producer, "put 0 0 9 1\r\nx\r\n"), "INSERTED 1\r\n");
    let hog = clients.pop().unwrap();
    watch_until_refused(&hog);
    let newcomers: Vec<TcpStream> = (0..3).map(|_| connect(address)).collect();
    // Clients are accepted before commands are run.
    for client in &clients {
        assert_eq!(ask(client, "list-tube-used\r\n"), "USING default\r\n");
    }
    drop(hog);
    for newcomer in &newcomers {
        assert_eq!(ask(newcomer, "list-tube-used\r\n"), "USING default\r\n");
    }
    wait_for_memory(&producer);
    assert_eq!(ask(&producer, "delete 1\r\n"), "DELETED\r\n");
}

#[test]
fn without_memory_for_tubes_the_rest_goes_on() {
    let (_daemon, address) = start_with_limit("-v 40000", &[]);
    let stream = connect(address);
    watch_until_refused(&stream);
    // None of these may end the server, and those that need little memory are answered.
    assert_eq!(ask(&stream, "list-tubes\r\n"), "OUT_OF_MEMORY\r\n");
    assert_eq!(ask(&stream, "list-tubes-watched\r\n"), "OUT_OF_MEMORY\r\n");
    // In a quiet moment what the lists would have taken may have become room for one more.
    let used = ask(&stream, "use another\r\n");
    assert!(["OUT_OF_MEMORY\r\n", "USING another\r\n"].contains(&used.as_str()), "{used}");
    assert_eq!(ask(&stream, "reserve-with-timeout 0\r\n"), "TIMED_OUT\r\n");
    (&stream).write_all(b"stats\r\nquit\r\n").unwrap();
    let stats: Vec<String> = BufReader::new(&stream).lines().map(Result::unwrap).collect();
    assert!(stats.iter().any(|line| line == "current-waiting: 0"), "{stats:?}");
    // Its tubes are gone with it.
    wait_until("there is memory again", || {
        let other = connect(address);
        ask(&other, "put 0 0 9 1\r\nx\r\n").starts_with("INSERTED ")
    });
}

#[test]
fn a_client_that_never_reads_costs_bounded_memory() {
    let (daemon, address) = start_on_loopback(&["-z", "1000000"]);
    let mut hostile = connect(address);
    let body = vec![b'x'; 1_000_000];
    hostile.write_all(b"put 0 0 9 1000000\r\n").unwrap();
    hostile.write_all(&body).unwrap();
    assert_eq!(ask(&hostile, "\r\n"), "INSERTED 1\r\n");
    // The replies to these would be 2 TB; the server stops reading long before.
    hostile.set_nonblocking(true).unwrap();
    let pid = daemon.child.id();
    let mut requests = &*b"peek 1\r\nstats\r\n".repeat(2_000_000);
    wait_until("the server reads no more of the requests", || {
        let was_asleep = is_asleep(pid);
        match hostile.write(requests) {
            Ok(count) => {
                requests = &requests[count..];
                assert!(!requests.is_empty(), "the server has read all requests");
                false
            }
            // It sleeps although there is more to read than fits into the buffers of the kernel.
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                was_asleep
            }
        }
    });
    assert_eq!(ask(connect(address), "use a\r\n"), "USING a\r\n", "others are served");
    let kib = status_kib(daemon.child.id(), "VmRSS:");
    assert!(kib < 32 * 1024, "{kib} KiB");
}

// ---- A disk that fails ----

/// A server in which a system call fails, in the words of strace(1); none where that cannot be had.
fn start_with_fault(fault: &str, flags: &[&str]) -> Option<Daemon> {
    let traced = |arguments: &[&str]| {
        let mut command = Command::new("strace");
        // The server, not strace, is the child of this process.
        command.args(["-D", "-o", "/dev/null", "-e", &format!("inject={fault}")]);
        command.args(arguments).stdin(Stdio::null());
        command
    };
    if !traced(&["true"]).output().is_ok_and(|output| output.status.success()) {
        skip("strace is not installed, or may not trace here");
        return None;
    }
    Some(Daemon::spawn(traced(&[&[BEANSTALKD], flags].concat())))
}

/// The kernel reports the error once: a server that is started again would not see it.
#[test]
fn a_sync_that_fails_at_the_start_is_final() {
    let directory = tempfile::tempdir().unwrap();
    let flags = ["-V", "-l", "127.0.0.1", "-p", "0", "-b", directory.path().to_str().unwrap()];
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &flags);
    assert_eq!(ask(connect(logged_address(&mut daemon)), "put 0 0 9 1\r\na\r\n"), "INSERTED 1\r\n");
    assert!(daemon.end(Signal::TERM).success());
    let files_before = std::fs::read_dir(directory.path()).unwrap().count();
    for (fault, code, message) in [
        ("fdatasync:error=EIO:when=1", 74, "binlog.1: cannot sync it: Input/output error"),
        ("fsync:error=EIO:when=1", 74, "the directory: cannot sync it: Input/output error"),
        ("fallocate:error=EIO", 74, "no new file can be made: Input/output error"),
        ("fallocate:error=EPERM", 1, "no new file can be made: Operation not permitted"),
    ] {
        let Some(mut daemon) = start_with_fault(fault, &flags) else { return };
        wait_until("the server has ended", || daemon.child.try_wait().unwrap().is_some());
        let (status, log) = daemon.wait();
        assert_eq!(status.code(), Some(code), "{fault}: {log}");
        assert!(log.contains(message), "{fault}: {log}");
        assert!(!log.contains("recovered"), "{fault}: {log}");
    }
    assert!(std::fs::read_dir(directory.path()).unwrap().count() >= files_before);
    let mut daemon = Daemon::start(Path::new(BEANSTALKD), &flags);
    assert_eq!(ask(connect(logged_address(&mut daemon)), "reserve\r\n"), "RESERVED 1 1\r\n");
}

#[test]
fn a_file_system_that_cannot_sync_directories_is_used_with_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let binlog = directory.path().to_str().unwrap();
    let flags = ["-V", "-l", "127.0.0.1", "-p", "0", "-f", "0", "-s", "4096", "-b", binlog];
    let Some(mut daemon) = start_with_fault("fsync:error=EINVAL", &flags) else { return };
    let address = logged_address(&mut daemon);
    daemon.wait_for_log("this file system cannot sync a directory: Invalid argument");
    let client = connect(address);
    for id in 1..=10 {
        let put = format!("put 0 0 9 3000\r\n{}\r\n", "x".repeat(3000));
        assert_eq!(ask(&client, &put), format!("INSERTED {id}\r\n"));
    }
    daemon.signal(Signal::TERM);
    let (status, log) = daemon.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!log.contains("cannot sync a directory"), "once is enough: {log}");
}

// ---- The stream of bytes ----

#[test]
fn urgent_data_is_no_part_of_the_stream_and_holds_nothing_up() {
    let (_daemon, address) = start_on_loopback(&[]);
    let stream = connect(address);
    for _ in 0..50 {
        send(&stream, b"use a\r\nuse b\r", false);
        send(&stream, b"!", true);
        send(&stream, b"\nuse c\r\n", false);
        let mut replies = [0; 27];
        (&stream).read_exact(&mut replies).unwrap();
        assert_eq!(&replies, b"USING a\r\nUSING b\r\nUSING c\r\n");
    }
}

fn send(stream: &TcpStream, bytes: &[u8], is_urgent: bool) {
    let flags =
        if is_urgent { rustix::net::SendFlags::OOB } else { rustix::net::SendFlags::empty() };
    assert_eq!(rustix::net::send(stream, bytes, flags).unwrap(), bytes.len());
}

#[test]
fn an_http_request_is_answered_and_nothing_behind_it_is_run() {
    let (_daemon, address) = start_on_loopback(&[]);
    let mut stream = connect(address);
    let request = [&b"POST / HTTP/1.1\r\n"[..], &b"put 0 0 9 1\r\nx\r\n".repeat(10_000)].concat();
    // The server closes while much of this is still on its way.
    let _ = stream.write_all(&request);
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).unwrap();
    assert_eq!(line, "UNKNOWN_COMMAND\r\n");
    assert_eq!(stat(address, "total-jobs"), "0");
    wait_until("only the one who asks is connected", || {
        stat(address, "current-connections") == "1"
    });
}

#[test]
fn a_large_body_passes_unchanged() {
    const LEN: usize = 100_000_000;
    let (_daemon, address) = start_on_loopback(&["-z", "1073741824"]);
    let body: Vec<u8> = (0..=250).cycle().take(LEN).collect();
    let mut stream = connect(address);
    write!(stream, "put 0 0 60 {LEN}\r\n").unwrap();
    stream.write_all(&body).unwrap();
    assert_eq!(ask(&stream, "\r\n"), "INSERTED 1\r\n");
    let mut stream = BufReader::new(stream);
    stream.get_mut().write_all(b"reserve\r\ndelete 1\r\n").unwrap();
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    assert_eq!(line, format!("RESERVED 1 {LEN}\r\n"));
    // Deleted while it is still being sent.
    let mut received = vec![0; LEN + 2];
    stream.read_exact(&mut received).unwrap();
    assert!(received[..LEN] == body[..] && received.ends_with(b"\r\n"));
    line.clear();
    stream.read_line(&mut line).unwrap();
    assert_eq!(line, "DELETED\r\n");
}

#[test]
fn pipelining_has_no_end() {
    const COUNT: usize = 100_000;
    let (_daemon, address) = start_on_loopback(&[]);
    let stream = connect(address);
    let mut writer = stream.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        writer.write_all(&b"put 0 0 9 3\r\nabc\r\n".repeat(COUNT)).unwrap();
        writer.write_all(&b"reserve-with-timeout 0\r\n".repeat(COUNT)).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut lines = BufReader::new(stream).lines();
    for id in 1..=COUNT {
        assert_eq!(lines.next().unwrap().unwrap(), format!("INSERTED {id}"));
    }
    for id in 1..=COUNT {
        assert_eq!(lines.next().unwrap().unwrap(), format!("RESERVED {id} 3"));
        assert_eq!(lines.next().unwrap().unwrap(), "abc");
    }
    assert!(lines.next().is_none(), "then the server closes");
    sender.join().unwrap();
}

#[test]
fn a_client_that_resets_its_connection_while_waiting_leaves_no_worker_behind() {
    let (_daemon, address) = start_on_loopback(&[]);
    let waiting = connect(address);
    (&waiting).write_all(b"reserve\r\n").unwrap();
    wait_until("the client waits", || stat(address, "current-waiting") == "1");
    // Closing with a linger of zero sends a reset.
    socket2::SockRef::from(&waiting).set_linger(Some(Duration::ZERO)).unwrap();
    drop(waiting);
    wait_until("nobody waits", || stat(address, "current-waiting") == "0");
    let stream = connect(address);
    assert_eq!(ask(&stream, "put 0 0 9 1\r\na\r\n"), "INSERTED 1\r\n");
    assert_eq!(ask(&stream, "reserve-with-timeout 0\r\n"), "RESERVED 1 1\r\n");
}

/// No test can suspend the machine: this one looks for the timer of the clock that goes on then.
#[test]
fn a_long_wait_ends_though_the_machine_was_suspended() {
    let (daemon, address) = start_on_loopback(&[]);
    let timer = || {
        let directory = format!("/proc/{}/fdinfo", daemon.child.id());
        std::fs::read_dir(directory).unwrap().find_map(|entry| {
            let info = std::fs::read_to_string(entry.unwrap().path()).ok()?;
            // CLOCK_BOOTTIME.
            let (_, left) =
                info.contains("clockid: 7\n").then(|| info.split_once("it_value: ("))??;
            left.split_once(',')?.0.parse::<u32>().ok()
        })
    };
    let client = connect(address);
    assert_eq!(ask(&client, "use a\r\n"), "USING a\r\n");
    assert_eq!(timer(), Some(0), "nothing is due");
    assert_eq!(ask(&client, "put 0 1000 9 1\r\na\r\n"), "INSERTED 1\r\n");
    wait_until("the timer is set", || timer().is_some_and(|left| (900..1000).contains(&left)));
    assert_eq!(ask(&client, "put 0 500 9 1\r\na\r\n"), "INSERTED 2\r\n");
    wait_until("the timer is set", || timer().is_some_and(|left| (400..500).contains(&left)));
}

#[test]
fn reserve_with_timeout_does_not_end_early() {
    let (_daemon, address) = start_on_loopback(&[]);
    let stream = connect(address);
    let start = Instant::now();
    assert_eq!(ask(&stream, "reserve-with-timeout 1\r\n"), "TIMED_OUT\r\n");
    assert!(start.elapsed() >= Duration::from_secs(1));
}
