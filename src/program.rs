//! The program: parses the command line, runs, prints failures, returns the exit code.

use crate::engine::binlog::inspect::{self, InspectError};
use crate::logging;
use crate::options::{self, InspectMode, Options, Request};
use crate::os::disk::Directory;
use crate::os::init::Machine;
use crate::os::sys::machine::{self, Shutdown};
use crate::os::sys::signals::Stop;
use crate::startup::{self, Started, StartupError};
use std::fmt::Display;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

/// The status of a process that SIGTERM has killed, as shells report it. Container managers expect it
/// of a first process.
const ENDED_BY_SIGTERM: u8 = 128 + 15;

/// Runs the command line. Returns the exit code.
pub fn main() -> ExitCode {
    let mut machine = Machine::of_this_process();
    let (exit_code, end) = run(machine.as_mut());
    match machine {
        Some(machine) => machine.end(end),
        None => exit_code,
    }
}

/// Runs the command line. Returns how to shut the machine down too, if this is its first process.
fn run(machine: Option<&mut Machine>) -> (ExitCode, Shutdown) {
    let exit_code = match options::parse(std::env::args_os().skip(1)) {
        Ok(Request::Serve(options)) => return serve(&options, machine),
        // C beanstalkd prints the usage to stderr too.
        Ok(Request::Help) => print(io::stderr(), options::usage()),
        Ok(Request::Inspect(mode, directory)) => inspect(mode, &directory),
        Ok(Request::Version) => print(io::stdout(), options::version()),
        Err(error) => {
            let error = StartupError::Usage(error);
            let code = report(&error, error.exit_code());
            print(io::stderr(), options::usage());
            code
        }
    };
    (exit_code, Shutdown::PowerOff)
}

/// Prints `text`. A closed pipe is no failure.
fn print(mut to: impl Write, text: impl Display) -> ExitCode {
    let _ = writeln!(to, "{text}");
    ExitCode::SUCCESS
}

fn serve(options: &Options, machine: Option<&mut Machine>) -> (ExitCode, Shutdown) {
    logging::start(options);
    let fail = |error: &dyn Display, exit_code| {
        print(io::stderr(), logging::failure_line(options.log_format, error));
        ExitCode::from(exit_code)
    };
    let stopped = match startup::start(options, machine) {
        Ok(Started::Serving(event_loop)) => {
            event_loop.run().map_err(|error| fail(&error, error.exit_code()))
        }
        Ok(Started::Stopped(stop)) => Ok(stop),
        Err(error) => Err(fail(&error, error.exit_code())),
    };
    let stop = match stopped {
        Ok(stop) => stop,
        Err(exit_code) => return (exit_code, Shutdown::PowerOff),
    };
    log::info!("stopped: {stop:?}");
    match stop {
        Stop::Terminate if machine::is_first_process() => {
            (ExitCode::from(ENDED_BY_SIGTERM), Shutdown::PowerOff)
        }
        Stop::Terminate => (ExitCode::SUCCESS, Shutdown::PowerOff),
        // For the first process of a machine SIGINT means Ctrl-Alt-Del.
        Stop::Interrupt => (ExitCode::SUCCESS, Shutdown::Restart),
    }
}

/// Prints the contents of a binlog, or checks it. Fails if the binlog is damaged.
fn inspect(mode: InspectMode, path: &Path) -> ExitCode {
    let mut directory = match Directory::open_unlocked(path) {
        Ok(directory) => directory,
        Err(error) => return report_directory(path, &error),
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = match mode {
        InspectMode::Check => inspect::check(&mut directory, &mut out),
        InspectMode::Dump => inspect::dump(&mut directory, &mut out),
    };
    match printed.and_then(|is_sound| out.flush().map(|()| is_sound).map_err(InspectError::Output))
    {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The reader of the output has stopped reading.
        Err(InspectError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => report_directory(path, &error),
    }
}

fn report_directory(path: &Path, error: &dyn Display) -> ExitCode {
    report(&format_args!("-b {}: {error}", path.display()), 1)
}

fn report(error: &dyn Display, exit_code: u8) -> ExitCode {
    print(io::stderr(), format_args!("beanstalkd: {error}"));
    ExitCode::from(exit_code)
}
