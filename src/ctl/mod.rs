//! `beanstalkctl`, the tool for operators: what it can do, and how a command line becomes a call.
//!
//! | file | owns |
//! |---|---|
//! | [`args`] | the words, options, names and times of a command line |
//! | [`conn`] | the connection: requests, replies, documents |
//! | [`print`] | tables, JSON, escaped bodies |
//! | [`look`] | the facts of tubes and of jobs, also from a server without `list-jobs` |
//! | [`work`] | work on many jobs: which ones, questions, progress, Ctrl-C, the last line |
//! | [`status`] | `status`, `check`, `top`, `tubes` |
//! | [`list`] | `failed`, `jobs`, `job`, `workers` |
//! | [`act`] | `retry`, `delete`, `flush`, `pause`, `resume`, `drain` |
//! | [`transfer`] | `put`, `move`, `export`, `import` |
//! | [`dump`] | one job as a line of JSON, written and parsed |
//! | [`bench`] | `bench` |
//!
//! [`bench`]: mod@bench
//! [`print`]: mod@print

mod act;
mod args;
mod bench;
mod conn;
mod dump;
mod list;
mod look;
mod print;
mod status;
mod transfer;
mod work;

use crate::flags::Flags;
use crate::os::failure::{Failure, Result};
use crate::os::sys::signals::exit_on_interrupt;
use args::usage_error;
use conn::Conn;
use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;
use work::Work;

/// The exit code if something was not found, or was done in part only.
const EXIT_PARTLY: u8 = 1;

/// The exit code of a usage error, and without a confirmation.
const EXIT_USAGE: u8 = 2;

/// The exit code of `check` if it does not know the state.
const EXIT_UNKNOWN: u8 = 3;

/// Runs a command.
type Run = fn(&mut Ctl, &Flags) -> Result;

/// A command: its words and options, the least and the most words, help, how its last line begins if it has one,
/// and what runs it.
type Command = (&'static str, usize, usize, &'static str, &'static str, Run);

const ANY: usize = usize::MAX;

#[rustfmt::skip]
static COMMANDS: [Command; 19] = [
    ("status", 0, 0, "all tubes, those that need attention first", "", status::status),
    ("check", 0, 0, "one line and an exit code, for cron and Nagios", "", status::check),
    ("top [SECS]", 0, 1, "status with rates, again every SECS (2)", "", status::top),
    ("failed [TUBE] [--limit N]", 0, 1, "buried jobs", "", list::failed),
    ("jobs TUBE [--state S] [--after ID] [--limit N]", 1, 1, "jobs of a tube", "", list::jobs),
    ("job ID [--body]", 1, 1, "one job with its body, or its body only", "", list::job),
    ("retry ID...|TUBE --all|--limit N [--delayed]", 1, ANY, "make buried jobs ready", "retried", act::retry),
    ("move FROM TO [ID...] [--state S] [--limit N]", 2, ANY, "move jobs; without IDs or a state the buried ones", "moved", transfer::move_jobs),
    ("delete ID...", 1, ANY, "delete jobs", "deleted", act::delete),
    ("flush TUBE [--buried]", 1, 1, "delete all jobs of a tube", "deleted", act::flush),
    ("pause TUBE...|--all [TIME]", 0, ANY, "give out no jobs for a time (1h)", "paused", act::pause),
    ("resume TUBE...|--all", 0, ANY, "end a pause", "resumed", act::resume),
    ("drain TUBE... [--held] [--within TIME]", 1, ANY, "wait until nothing is ready, held or delayed", "drained", act::drain),
    ("export TUBE [--take]", 1, 1, "print jobs as lines of JSON", "exported", transfer::export),
    ("import [--tube T]", 0, 0, "put jobs from lines of JSON", "imported", transfer::import),
    ("workers [TUBE]", 0, 1, "clients, and the jobs that they hold", "", list::workers),
    ("bench [--jobs N] [--connections N] [--size S]", 0, 0, "measure latency", "", bench::bench),
    ("put TUBE [--pri N] [--delay T] [--ttr T] [--key K] [--con K] [BODY]", 1, 2, "put a job, its body from stdin without BODY", "", transfer::put),
    ("tubes", 0, 0, "names of tubes", "", status::tubes),
];

/// One run of the tool: the connection, the options of all commands, and what was done.
struct Ctl {
    /// What the command does, such as `retry`, and its past tense for the last line.
    verb: &'static str,
    done: &'static str,
    conn: Conn,
    is_json: bool,
    is_dry_run: bool,
    is_confirmed: bool,
    work: Work,
}

/// Runs the command line. Returns the exit code.
pub fn main() -> ExitCode {
    exit_on_interrupt();
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    ExitCode::from(args::run(&arguments).unwrap_or_else(|Failure { exit_code, message }| {
        // For a plugin of Nagios, 2 would be a critical problem.
        if exit_code == EXIT_USAGE && args::is_check(&arguments) {
            let is_json = arguments.iter().any(|argument| argument == "--json");
            let text = message.lines().next().unwrap_or_default();
            let _ = status::print_state(is_json, EXIT_UNKNOWN, text);
            return EXIT_UNKNOWN;
        }
        // Without a message, the reader of the output has closed it.
        if !message.is_empty() {
            complain(message);
        }
        exit_code
    }))
}

/// Prints a line on stdout.
fn print(line: impl Display) -> Result {
    print_with(|out| writeln!(out, "{line}"))
}

/// Prints on stdout, which is a buffer until the end of `write`.
fn print_with(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result {
    let mut out = io::BufWriter::new(io::stdout().lock());
    write(&mut out).and_then(|()| out.flush()).map_err(|error| unwritten(&error))
}

/// Prints a line on stderr.
fn complain(message: impl Display) {
    let _ = writeln!(io::stderr(), "beanstalkctl: {message}");
}

/// Returns the failure of a write to stdout.
fn unwritten(error: &io::Error) -> Failure {
    let is_closed = error.kind() == ErrorKind::BrokenPipe;
    let message = format!("cannot write to stdout: {error}");
    Failure::new(EXIT_PARTLY, if is_closed { String::new() } else { message })
}
