//! The program: parses the command line, runs, prints failures, returns the exit code.

use crate::engine::binlog::copy::{Copied, CopyError, copy};
use crate::engine::binlog::disk::{Disk, Progress};
use crate::engine::binlog::inspect::{self, InspectError};
use crate::logging;
use crate::options::{
    self, BinlogPlace, CopyDirection, EtcdOptions, InspectMode, LogFormat, Options, Request,
};
use crate::os::disk::Directory;
use crate::os::etcd::{Duty, LeaseNote, Membership, Standing};
use crate::os::init::Machine;
use crate::os::sys::machine::{self, Shutdown};
use crate::os::sys::signals::Stop;
use crate::startup::{self, Started, StartupError};
use log::LevelFilter;
use std::fmt::Display;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// The status of a process that SIGTERM has killed, as shells report it. Container managers expect it
/// of a first process.
const ENDED_BY_SIGTERM: u8 = 128 + 15;

/// The exit code when a binlog cannot be used, as of C beanstalkd.
const EXIT_REFUSED: u8 = 10;

/// The pause between two looks at the progress of a copy.
const POLL_PAUSE: Duration = Duration::from_millis(2);

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
        Ok(Request::Inspect(mode, BinlogPlace::Directory(path))) => inspect_directory(mode, &path),
        Ok(Request::Inspect(mode, BinlogPlace::Etcd(etcd))) => inspect_etcd(mode, &etcd),
        Ok(Request::Copy(CopyDirection::Import, path, etcd)) => import(&path, &etcd),
        Ok(Request::Copy(CopyDirection::Export, path, etcd)) => export(&path, &etcd),
        Ok(Request::Leave(file, place)) => leave(&file, place),
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
    logging::start(options.log_level, options.log_format);
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

fn inspect_directory(mode: InspectMode, path: &Path) -> ExitCode {
    match Directory::open_unlocked(path) {
        Ok(mut directory) => inspect(mode, &path.display(), &mut directory),
        Err(error) => report_place(&path.display(), &error, 1),
    }
}

fn inspect_etcd(mode: InspectMode, etcd: &EtcdOptions) -> ExitCode {
    let membership = match Membership::join(etcd, Duty::Read) {
        Ok(membership) => membership,
        Err(error) => return report_place(&etcd.url, &error, EXIT_REFUSED),
    };
    let mut disk = membership.disk();
    match disk.list() {
        Ok(_) => inspect(mode, &etcd.url, &mut disk),
        Err(error) => report_place(&etcd.url, &error, EXIT_REFUSED),
    }
}

/// Prints the contents of a binlog, or checks it. Fails if the binlog is damaged.
fn inspect(mode: InspectMode, place: &dyn Display, disk: &mut dyn Disk) -> ExitCode {
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = match mode {
        InspectMode::Check => inspect::check(disk, &mut out),
        InspectMode::Dump => inspect::dump(disk, &mut out),
    };
    match printed.and_then(|is_sound| out.flush().map(|()| is_sound).map_err(InspectError::Output))
    {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        // The reader of the output has stopped reading.
        Err(InspectError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => report_place(place, &error, 1),
    }
}

/// Copies the binlog in a directory, which no server uses, to etcd.
fn import(path: &Path, etcd: &EtcdOptions) -> ExitCode {
    logging::start(LevelFilter::Warn, LogFormat::Text);
    let mut directory = match Directory::lock(path) {
        Ok(directory) => directory,
        Err(error) => return report_place(&path.display(), &error, EXIT_REFUSED),
    };
    let refused = |error: &dyn Display| report_place(&etcd.url, error, EXIT_REFUSED);
    let membership = match Membership::join(etcd, Duty::Import) {
        Ok(membership) => membership,
        Err(error) => return refused(&error),
    };
    loop {
        match membership.standing() {
            Ok(Standing::Leader) => break,
            Ok(Standing::Undecided) => thread::sleep(POLL_PAUSE),
            Ok(Standing::Standby(leader)) => return refused(&format_args!("{leader} leads")),
            Err(error) => return refused(&error),
        }
    }
    let wait_until_stored = |disk: &mut dyn Disk| {
        disk.hand_over();
        while !disk.progress().is_none_or(Progress::is_complete) {
            membership.check().map_err(|error| io::Error::other(error.to_string()))?;
            thread::sleep(POLL_PAUSE);
            disk.hand_over();
        }
        Ok(())
    };
    let mut disk = membership.disk();
    let copied = copy(&mut directory, &mut disk, wait_until_stored).and_then(|copied| {
        membership.end_import(&mut disk);
        wait_until_stored(&mut disk).map_err(CopyError::End)?;
        Ok(copied)
    });
    report_copy(copied, &path.display(), &etcd.url)
}

/// Copies the binlog in etcd, as it is now, to an empty directory.
fn export(path: &Path, etcd: &EtcdOptions) -> ExitCode {
    let mut directory = match Directory::lock(path) {
        Ok(directory) => directory,
        Err(error) => return report_place(&path.display(), &error, EXIT_REFUSED),
    };
    let membership = match Membership::join(etcd, Duty::Read) {
        Ok(membership) => membership,
        Err(error) => return report_place(&etcd.url, &error, EXIT_REFUSED),
    };
    let copied = copy(&mut membership.disk(), &mut directory, |_| Ok(()));
    report_copy(copied, &etcd.url, &path.display())
}

/// Ends the lease of a server that was killed. There is nothing to do for one that runs, or that had no
/// lease.
fn leave(file: &Path, place: Option<BinlogPlace>) -> ExitCode {
    let note = LeaseNote::read(file).filter(|note| note.is_over());
    match (note, place) {
        (Some(note), Some(BinlogPlace::Etcd(etcd))) => match Membership::leave(&etcd, note.lease) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => report_place(&etcd.url, &error, EXIT_REFUSED),
        },
        (_, _) => ExitCode::SUCCESS,
    }
}

fn report_copy(
    copied: Result<Copied, CopyError>,
    from: &dyn Display,
    to: &dyn Display,
) -> ExitCode {
    match copied {
        Ok(Copied { files, bytes }) => {
            print(io::stdout(), format_args!("copied {files} files with {bytes} bytes to {to}"))
        }
        Err(error) => report(&format_args!("cannot copy {from} to {to}: {error}"), EXIT_REFUSED),
    }
}

fn report_place(place: &dyn Display, error: &dyn Display, exit_code: u8) -> ExitCode {
    report(&format_args!("-b {place}: {error}"), exit_code)
}

fn report(error: &dyn Display, exit_code: u8) -> ExitCode {
    print(io::stderr(), format_args!("beanstalkd: {error}"));
    ExitCode::from(exit_code)
}
