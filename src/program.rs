//! The program: parse, run, report. Failures come here as values and are told once.

use crate::engine::binlog::inspect::{self, InspectError};
use crate::logging;
use crate::options::{self, InspectMode, Options, Request};
use crate::os::disk::Directory;
use crate::os::init::Machine;
use crate::os::sys::machine::{self, MachineEnd};
use crate::os::sys::signals::Stop;
use crate::startup::{self, Started, StartupError};
use std::fmt::Display;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;

/// What a shell reports for a process that SIGTERM has ended: expected of the first
/// process of a container.
const ENDED_BY_SIGTERM: u8 = 128 + 15;

/// Does what the command line asks for. Returns the exit code.
pub fn main() -> ExitCode {
    let mut machine = Machine::of_this_process();
    let (exit_code, end) = run(machine.as_mut());
    match machine {
        Some(machine) => machine.end(end),
        None => exit_code,
    }
}

/// Does what is asked for; says too how the machine is to end, should it be this program's.
fn run(machine: Option<&mut Machine>) -> (ExitCode, MachineEnd) {
    let exit_code = match options::parse(std::env::args_os().skip(1)) {
        Ok(Request::Serve(options)) => return serve(&options, machine),
        // As C beanstalkd does.
        Ok(Request::Help) => tell(io::stderr(), options::usage()),
        Ok(Request::Inspect(mode, directory)) => inspect(mode, &directory),
        Ok(Request::Version) => tell(io::stdout(), options::version()),
        Err(error) => {
            let error = StartupError::Usage(error);
            let code = report(&error, error.exit_code());
            tell(io::stderr(), options::usage());
            code
        }
    };
    (exit_code, MachineEnd::PowerOff)
}

/// Whether anybody listens is not for the program to judge: a closed pipe is no failure.
fn tell(mut to: impl Write, text: impl Display) -> ExitCode {
    let _ = writeln!(to, "{text}");
    ExitCode::SUCCESS
}

fn serve(options: &Options, machine: Option<&mut Machine>) -> (ExitCode, MachineEnd) {
    logging::start(options);
    let fail = |error: &dyn Display, exit_code| {
        tell(io::stderr(), logging::failure_line(options.log_format, error));
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
        Err(exit_code) => return (exit_code, MachineEnd::PowerOff),
    };
    log::info!("stopped: {stop:?}");
    match stop {
        Stop::Terminate if machine::is_first_process() => {
            (ExitCode::from(ENDED_BY_SIGTERM), MachineEnd::PowerOff)
        }
        Stop::Terminate => (ExitCode::SUCCESS, MachineEnd::PowerOff),
        // To the first process of a machine it means Ctrl-Alt-Del.
        Stop::Interrupt => (ExitCode::SUCCESS, MachineEnd::Restart),
    }
}

/// Tells what is in a binlog; fails when it is not sound.
fn inspect(mode: InspectMode, path: &Path) -> ExitCode {
    let mut directory = match Directory::look_into(path) {
        Ok(directory) => directory,
        Err(error) => return complain(path, &error),
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let told = match mode {
        InspectMode::Check => inspect::check(&mut directory, &mut out),
        InspectMode::Dump => inspect::dump(&mut directory, &mut out),
    };
    match told.and_then(|sound| out.flush().map(|()| sound).map_err(InspectError::Output)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // Whoever reads it has seen enough.
        Err(InspectError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => complain(path, &error),
    }
}

fn complain(path: &Path, error: &dyn Display) -> ExitCode {
    report(&format_args!("-b {}: {error}", path.display()), 1)
}

fn report(error: &dyn Display, exit_code: u8) -> ExitCode {
    tell(io::stderr(), format_args!("beanstalkd: {error}"));
    ExitCode::from(exit_code)
}
