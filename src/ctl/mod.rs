//! `beanstalkctl`, the tool for operators: what it can do, and how a command line becomes a call.
//!
//! | file | owns |
//! |---|---|
//! | [`args`] | the words, options, names and times of a command line |
//! | [`conn`] | the connection: requests, replies, documents |
//! | [`print`] | tables, JSON, escaped bodies |
//! | [`look`] | the facts of tubes and of jobs, also from a server without `list-jobs` |
//! | [`work`] | work on many jobs: questions, progress, Ctrl-C, the last line |
//! | [`status`] | `status`, `check`, `top`, `tubes` |
//! | [`list`] | `failed`, `jobs`, `job`, `workers` |
//! | [`act`] | `retry`, `delete`, `flush`, `put` |
//! | [`pause`] | `pause`, `resume`, `drain` |
//! | [`transfer`] | `move`, `export`, `import` |
//! | [`dump`] | one job as a line of JSON, written and parsed |
//! | [`bench`] | `bench` |

mod act;
mod args;
mod bench;
mod conn;
mod dump;
mod list;
mod look;
mod pause;
mod print;
mod status;
mod transfer;
mod work;

use crate::os::failure::Failure;
use args::{Args, Request, usage_error};
use conn::{Conn, Place};
use std::io::{self, Write};
use std::process::ExitCode;

/// The exit code if something was not found, or was done in part only.
const EXIT_PARTLY: u8 = 1;

/// The exit code of a usage error, and without a confirmation.
const EXIT_USAGE: u8 = 2;

/// A command of the tool.
struct Command {
    name: &'static str,
    /// Its words and options, for `--help`.
    usage: &'static str,
    /// The number of words after its name: the least and the most.
    words: (usize, usize),
    /// The options that only some commands have.
    options: &'static [&'static str],
    help: &'static str,
    /// Returns the exit code.
    run: fn(&Ctl, &Args) -> Result<u8, Failure>,
}

const ANY: usize = usize::MAX;

#[rustfmt::skip]
const COMMANDS: [Command; 19] = [
    Command { name: "status", usage: "", words: (0, 0), options: &[], help: "all tubes, those that need attention first", run: status::status },
    Command { name: "check", usage: "", words: (0, 0), options: &[], help: "one line and an exit code, for cron and Nagios", run: status::check },
    Command { name: "top", usage: "[SECS]", words: (0, 1), options: &[], help: "status with rates, again every SECS (2)", run: status::top },
    Command { name: "failed", usage: "[TUBE]", words: (0, 1), options: &["limit"], help: "buried jobs", run: list::failed },
    Command { name: "jobs", usage: "TUBE [--state S] [--after ID] [--limit N]", words: (1, 1), options: &["state", "after", "limit"], help: "jobs of a tube", run: list::jobs },
    Command { name: "job", usage: "ID [--body]", words: (1, 1), options: &["body"], help: "one job with its body, or its body only", run: list::job },
    Command { name: "retry", usage: "ID... | TUBE --all|--limit N [--delayed]", words: (1, ANY), options: &["all", "limit", "delayed"], help: "make buried jobs ready", run: act::retry },
    Command { name: "move", usage: "FROM TO [ID...] [--state S] [--limit N]", words: (2, ANY), options: &["state", "limit"], help: "move jobs to another tube (buried)", run: transfer::move_jobs },
    Command { name: "delete", usage: "ID...", words: (1, ANY), options: &[], help: "delete jobs", run: act::delete },
    Command { name: "flush", usage: "TUBE [--buried]", words: (1, 1), options: &["buried"], help: "delete all jobs of a tube", run: act::flush },
    Command { name: "pause", usage: "TUBE...|--all [TIME]", words: (0, ANY), options: &["all"], help: "give out no jobs for a time (1h)", run: pause::pause },
    Command { name: "resume", usage: "TUBE...|--all", words: (0, ANY), options: &["all"], help: "end a pause", run: pause::resume },
    Command { name: "drain", usage: "TUBE... [--held] [--within TIME]", words: (1, ANY), options: &["held", "within"], help: "wait until nothing is ready, held or delayed", run: pause::drain },
    Command { name: "export", usage: "TUBE [--take]", words: (1, 1), options: &["take"], help: "print jobs as lines of JSON", run: transfer::export },
    Command { name: "import", usage: "[--tube T]", words: (0, 0), options: &["tube"], help: "put jobs from lines of JSON", run: transfer::import },
    Command { name: "workers", usage: "[TUBE]", words: (0, 1), options: &[], help: "clients, and the jobs that they hold", run: list::workers },
    Command { name: "bench", usage: "[--jobs N] [--connections N] [--size S]", words: (0, 0), options: &["jobs", "connections", "size"], help: "measure latency", run: bench::bench },
    Command { name: "put", usage: "TUBE [--pri N] [--delay T] [--ttr T] [--key K] [BODY]", words: (1, 2), options: &["pri", "delay", "ttr", "key"], help: "put a job, its body from stdin without BODY", run: act::put },
    Command { name: "tubes", usage: "", words: (0, 0), options: &[], help: "names of tubes", run: status::tubes },
];

/// What all commands need.
struct Ctl {
    place: Place,
    /// `place` as an argument of `-s`, unless it is the default.
    server: Option<String>,
    is_json: bool,
    is_dry_run: bool,
    is_confirmed: bool,
}

impl Ctl {
    fn connect(&self) -> Result<Conn, Failure> {
        Conn::open(&self.place)
    }
}

/// Runs the command line. Returns the exit code.
pub fn main() -> ExitCode {
    let is_check = |command: &Command| command.name == "check";
    let mut checks = false;
    let done = args::parse(std::env::args_os().skip(1)).and_then(|request| match request {
        Request::Print(text) => print(&text).map(|()| 0),
        Request::Run(command, ctl, args) => {
            checks = is_check(command);
            (command.run)(&ctl, &args)
        }
    });
    let exit_code = done.unwrap_or_else(|Failure { exit_code, message }| {
        // Plugins of Nagios have one exit code for everything that keeps them from an answer.
        if checks {
            let _ = print(&format!("UNKNOWN: {message}"));
            return 3;
        }
        // The reader of the output has stopped reading.
        if !message.is_empty() {
            complain(&message);
        }
        exit_code
    });
    ExitCode::from(exit_code)
}

/// Prints a line on stdout.
fn print(line: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(unwritten)
}

/// Prints a line on stderr.
fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "beanstalkctl: {message}");
}

/// Returns the failure of a write to stdout.
#[expect(clippy::needless_pass_by_value, reason = "it is used as a function of a result's error")]
fn unwritten(error: io::Error) -> Failure {
    let is_closed = error.kind() == io::ErrorKind::BrokenPipe;
    let message =
        if is_closed { String::new() } else { format!("cannot write to stdout: {error}") };
    Failure::new(EXIT_PARTLY, message)
}
