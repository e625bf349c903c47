//! The program: parse, run, report. Failures come here as values and are told once.

use beanstalkd::options::{self, Options, Request};
use beanstalkd::os::process::{self, Stop};
use beanstalkd::startup::{self, StartupError};
use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;

/// What a shell reports for a process that SIGTERM has ended: expected of the first
/// process of a container.
const ENDED_BY_SIGTERM: u8 = 128 + 15;

fn main() -> ExitCode {
    match options::parse(std::env::args_os().skip(1)) {
        Ok(Request::Serve(options)) => serve(&options).unwrap_or_else(|error| report(&error)),
        Ok(Request::Help) => tell(io::stdout(), options::usage()),
        Ok(Request::Version) => tell(io::stdout(), options::version()),
        Err(error) => {
            let code = report(&StartupError::Usage(error));
            tell(io::stderr(), options::usage());
            code
        }
    }
}

/// Whether anybody listens is not for the program to judge: a closed pipe is no failure.
fn tell(mut to: impl Write, text: impl Display) -> ExitCode {
    let _ = writeln!(to, "{text}");
    ExitCode::SUCCESS
}

fn serve(options: &Options) -> Result<ExitCode, StartupError> {
    startup::start_logging(options);
    let stop = startup::start(options)?
        .run()
        .map_err(|error| StartupError::System("wait for events any more", error))?;
    log::info!("stopped: {stop:?}");
    match stop {
        Stop::Terminate if process::is_first_process() => Ok(ExitCode::from(ENDED_BY_SIGTERM)),
        Stop::Terminate | Stop::Interrupt => Ok(ExitCode::SUCCESS),
    }
}

fn report(error: &StartupError) -> ExitCode {
    tell(io::stderr(), format_args!("beanstalkd: {error}"));
    ExitCode::from(error.exit_code())
}
