//! Instructions that a server runs in user space, counted by valgrind's cachegrind. They are the
//! same on every machine and under any load, unlike processor time.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::NamedTempFile;

/// Whether valgrind can be run here.
pub fn can_be_counted() -> bool {
    let mut command = Command::new("valgrind");
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The count of one server.
pub struct Instructions {
    /// Valgrind writes it when the server ends.
    report: NamedTempFile,
}

impl Instructions {
    pub fn new() -> Instructions {
        Instructions { report: NamedTempFile::new().expect("a temporary file can be made") }
    }

    /// The command that runs a program in valgrind; its arguments are to be added.
    pub fn command(&self, program: &Path) -> Command {
        let mut log = std::ffi::OsString::from("--log-file=");
        log.push(self.report.path());
        let mut command = Command::new("valgrind");
        command.args(["--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]);
        command.arg(log).arg(program);
        command
    }

    /// From the line `==1234== I   refs:      79,993,386` of the report.
    pub fn count(&self) -> f64 {
        let report = fs::read_to_string(self.report.path()).expect("the report is text");
        let count = report.lines().find_map(|line| {
            let (before, digits) = line.split_once("refs:")?;
            let digits = digits.replace(',', "");
            before.trim_end().ends_with(" I").then(|| digits.trim().parse().ok()).flatten()
        });
        count.unwrap_or_else(|| panic!("valgrind has not counted instructions: {report}"))
    }
}
