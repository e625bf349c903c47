//! A real etcd with one node, for servers that keep their binlog in it.

use super::process::{Daemon, command};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use tempfile::TempDir;

/// An etcd on a port of loopback that the kernel chooses. Its files are removed when it is dropped.
pub struct Etcd {
    /// It is dropped before the directory, so that etcd has ended when its files are removed.
    /// Tests on several threads share it.
    _daemon: Mutex<Daemon>,
    _directory: TempDir,
    /// The address for clients.
    address: String,
    prefixes: AtomicU64,
}

const PROGRAM: &str = "etcd";
const ANY_PORT: &str = "http://127.0.0.1:0";

impl Etcd {
    pub fn is_installed() -> bool {
        let version = Command::new(PROGRAM).arg("--version").stdout(Stdio::null()).status();
        version.is_ok_and(|status| status.success())
    }

    /// Starts an empty etcd, and waits until it serves clients.
    pub fn start() -> Etcd {
        let directory = tempfile::tempdir().expect("there is space for files");
        let data = directory.path().join("data");
        let cluster = format!("test={ANY_PORT}");
        let arguments = [
            ("--name", "test"),
            ("--data-dir", data.to_str().expect("the path is text")),
            ("--listen-client-urls", ANY_PORT),
            ("--advertise-client-urls", ANY_PORT),
            ("--listen-peer-urls", ANY_PORT),
            ("--initial-advertise-peer-urls", ANY_PORT),
            ("--initial-cluster", &cluster),
            ("--logger", "zap"),
        ];
        let mut command =
            command(PROGRAM, arguments.map(|(flag, value)| format!("{flag}={value}")));
        // Variables set flags too.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("ETCD_") {
                command.env_remove(name);
            }
        }
        let mut daemon = Daemon::spawn(command);
        let line = daemon.wait_for_log("serving client traffic insecurely");
        let address = line.split_once("\"address\":\"").and_then(|(_, rest)| rest.split_once('"'));
        let address = address.expect("etcd logs its address").0.to_owned();
        Etcd {
            _daemon: Mutex::new(daemon),
            _directory: directory,
            address,
            prefixes: AtomicU64::new(1),
        }
    }

    /// Returns the URL of a binlog that no other server uses.
    pub fn new_binlog(&self) -> String {
        let number = self.prefixes.fetch_add(1, Ordering::Relaxed);
        format!("etcd://{}/test{number}", self.address)
    }
}

/// Returns our binary with support for etcd: `$BEANSTALKD_ETCD_BINARY`, or what `make etcd` builds.
pub fn beanstalkd_with_etcd() -> Option<PathBuf> {
    let built = concat!(env!("CARGO_MANIFEST_DIR"), "/target/etcd/release/beanstalkd");
    let named = std::env::var_os("BEANSTALKD_ETCD_BINARY");
    let path = named.map_or_else(|| PathBuf::from(built), PathBuf::from);
    path.is_file().then_some(path)
}
