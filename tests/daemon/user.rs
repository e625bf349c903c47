//! The user that the server changes to.

use crate::harness::process::{BEANSTALKD, Daemon, command, connect_when_ready, path_text};
use crate::harness::{cannot_test, skip};
use crate::sockets::start_on_path;
use crate::{UnixPath, assert_refused};
use std::fs::{create_dir, set_permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

#[test]
fn no_privilege_is_left_after_a_change_of_user() {
    let user = ["12345", "23456"];
    let as_user = ["--reuid", "12345", "--regid", "23456"];
    let capabilities = |both: &'static str| ["--inh-caps", both, "--ambient-caps", both];
    let groups = ["--groups", "5,6"];
    // With the last flags the kernel would leave all capabilities, and C beanstalkd the groups.
    let root = [&["--groups", "5"][..], &["--groups", "5,6", "--securebits", "+no_setuid_fixup"]];
    let capable = [&as_user[..], &groups, &capabilities("+setuid,+setgid")].concat();
    // Without a change of user no privilege is needed, and none is dropped.
    let same_user = [&as_user[..], &["--groups", "23456"]].concat();
    let bound = [&as_user[..], &groups, &capabilities("+net_bind_service")].concat();
    let log = "-u 12345:23456: cannot drop supplementary groups";
    for (privileges, user, groups, log) in [
        (root[0], user, "23456", ""),
        (root[1], user, "23456", ""),
        (&capable, ["54321", "65432"], "65432", ""),
        (&same_user, user, "23456", ""),
        (&bound, user, "5 6", log),
    ] {
        let Some(daemon) = start_with(privileges, &user.join(":")) else { return };
        assert_is_unprivileged(&daemon, user, groups);
        let rest = daemon.stop();
        assert!(rest.contains(log) && rest.is_empty() == log.is_empty(), "{privileges:?}: {rest}");
    }
}

#[test]
fn root_may_stay_root() {
    let Some(daemon) = start_with(&["--groups", "5,6"], "root") else { return };
    assert_eq!(daemon.status("Uid:"), "0 0 0 0");
    assert_eq!(daemon.status("Groups:"), "0");
    assert_ne!(daemon.status("CapEff:"), "0000000000000000");
}

/// Starts a server that changes to `user`, with these privileges, which are flags of setpriv(1).
/// Returns it when the change is complete, or `None` if the privileges cannot be set.
fn start_with(privileges: &[&str], user: &str) -> Option<Daemon> {
    let command =
        |arguments: &[&str]| command("setpriv", [privileges, &[BEANSTALKD], arguments].concat());
    let tried = command(&["-v"]).output();
    if !tried.is_ok_and(|output| output.status.success()) {
        skip("setpriv needs root, and a binary that all users can run");
        return None;
    }
    let socket = UnixPath::new();
    set_permissions(socket.directory.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let daemon = Daemon::spawn(command(&["-l", &socket.flag, "-u", user]));
    connect_when_ready(&socket.address());
    // The server replies after the change of user.
    socket.connect().expect_service();
    Some(daemon)
}

/// Asserts that the server has no privilege, has saved no id, and cannot gain more by an exec.
fn assert_is_unprivileged(daemon: &Daemon, [uid, gid]: [&str; 2], groups: &str) {
    let status = |key| daemon.status(key);
    assert_eq!(status("Uid:"), [uid; 4].join(" "));
    assert_eq!(status("Gid:"), [gid; 4].join(" "));
    assert_eq!(status("Groups:"), groups);
    for capabilities in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(status(capabilities), "0000000000000000", "{capabilities}");
    }
    assert_eq!(status("NoNewPrivs:"), "1");
}

fn is_root() -> bool {
    let is_root = rustix::process::getuid().is_root();
    if !is_root {
        cannot_test("only root may change the user");
    }
    is_root
}

#[test]
fn the_binlog_is_locked_with_the_rights_of_the_user() {
    if !is_root() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let binlog = directory.path().join("binlog");
    create_dir(&binlog).unwrap();
    let flags = ["-l", "127.0.0.1", "-p", "0", "-u", "12345:23456", "-b", path_text(&binlog)];
    assert_refused(&flags, 10, "");
    chown(&binlog, Some(12345), Some(23456)).unwrap();
    let mut daemon = Daemon::start(BEANSTALKD, &[&["-V"][..], &flags].concat());
    daemon.wait_for_log("recovered 0 jobs");
    assert_is_unprivileged(&daemon, ["12345", "23456"], "23456");
    for name in ["lock", "binlog.1"] {
        let file = binlog.join(name).metadata().unwrap();
        assert_eq!((file.uid(), file.gid()), (12345, 23456), "{name}");
    }
}

#[test]
fn a_unix_socket_with_a_mode_belongs_to_the_user() {
    if !is_root() {
        return;
    }
    let socket = UnixPath::new();
    let directory = socket.directory.path();
    let started = |flags: &[&str]| {
        let _daemon = start_on_path(&socket, flags);
        let socket = socket.path.metadata().unwrap();
        (socket.uid(), socket.gid(), socket.mode() & 0o7777)
    };
    let (user, mode) = (["-u", "12345:23456"], ["--socket-mode", "660"]);
    assert_eq!(started(&[user, mode].concat()), (12345, 23456, 0o660));
    // One flag alone changes nothing else; -u alone has the effect of C.
    assert_eq!(started(&mode), (0, 0, 0o660));
    assert_eq!(started(&user), (0, 0, 0o777));
    // A directory with the set-group-ID bit decides the group.
    chown(directory, None, Some(34567)).unwrap();
    set_permissions(directory, PermissionsExt::from_mode(0o2700)).unwrap();
    assert_eq!(started(&[user, mode].concat()), (12345, 34567, 0o660));
}
