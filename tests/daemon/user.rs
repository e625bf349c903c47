//! The user that the server changes to.

use crate::harness::process::{BEANSTALKD, Daemon, command, connect_when_ready, path_text};
use crate::harness::skip;
use crate::sockets::start_on_path;
use crate::{UnixPath, refusal};
use std::fs::{create_dir, set_permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

#[test]
fn the_log_names_an_unknown_user() {
    let (code, log) = refusal(&["-l", "127.0.0.1", "-p", "0", "-u", "nosuchuser"]);
    assert_eq!(code, Some(33));
    assert!(log.contains("nosuchuser"));
}

#[test]
fn root_keeps_no_privilege_after_a_change_of_user() {
    // With these flags the kernel would leave all capabilities, and C beanstalkd the groups.
    let odd = &["--groups", "5,6", "--securebits", "+no_setuid_fixup"];
    for privileges in [&["--groups", "5"][..], odd] {
        let Some(daemon) = start_with(privileges, "12345:23456") else { return };
        assert_is_unprivileged(&daemon, "12345", "23456", "23456");
    }
}

#[test]
fn a_user_with_capabilities_keeps_none_after_a_change_of_user() {
    let privileges = &[
        &AS_ANOTHER[..],
        &["--groups", "5,6", "--inh-caps", "+setuid,+setgid", "--ambient-caps", "+setuid,+setgid"],
    ];
    let Some(daemon) = start_with(&privileges.concat(), "54321:65432") else { return };
    assert_is_unprivileged(&daemon, "54321", "65432", "65432");
    // Without a change of user no privilege is needed, and none is dropped.
    let privileges = &[&AS_ANOTHER[..], &["--groups", "23456"]];
    let Some(daemon) = start_with(&privileges.concat(), "12345:23456") else { return };
    assert_is_unprivileged(&daemon, "12345", "23456", "23456");
    assert_eq!(daemon.stop(), "");
}

#[test]
fn groups_that_cannot_be_dropped_are_logged() {
    let capabilities = ["--inh-caps", "+net_bind_service", "--ambient-caps", "+net_bind_service"];
    let privileges = [&AS_ANOTHER[..], &["--groups", "5,6"], &capabilities].concat();
    let Some(daemon) = start_with(&privileges, "12345:23456") else { return };
    assert_is_unprivileged(&daemon, "12345", "23456", "5 6");
    assert!(daemon.stop().contains("-u 12345:23456: cannot drop supplementary groups"));
}

#[test]
fn root_may_stay_root() {
    let Some(daemon) = start_with(&["--groups", "5,6"], "root") else { return };
    assert_eq!(daemon.status("Uid:"), "0 0 0 0");
    assert_eq!(daemon.status("Groups:"), "0");
    assert_ne!(daemon.status("CapEff:"), "0000000000000000");
}

const AS_ANOTHER: [&str; 4] = ["--reuid", "12345", "--regid", "23456"];

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
fn assert_is_unprivileged(daemon: &Daemon, uid: &str, gid: &str, groups: &str) {
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
        skip("only root may change the user");
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
    let (code, log) = refusal(&flags);
    assert_eq!(code, Some(10), "{log}");
    chown(&binlog, Some(12345), Some(23456)).unwrap();
    let mut daemon = Daemon::start(BEANSTALKD, &[&["-V"][..], &flags].concat());
    daemon.wait_for_log("recovered 0 jobs");
    assert_is_unprivileged(&daemon, "12345", "23456", "23456");
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
