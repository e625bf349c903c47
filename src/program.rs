//! The program: parses the command line, runs, prints failures, returns the exit code.

use crate::engine::binlog::copy::{check_empty, copy, measure};
use crate::engine::binlog::disk::{Disk, FileNumber};
use crate::engine::binlog::error::{BinlogError, Step};
use crate::engine::binlog::inspect;
use crate::logging;
use crate::options::{self, BinlogPlace, EtcdOptions, LogFormat, Mode, Options};
use crate::os::disk::{Directory, MOVING};
use crate::os::failure::{EXIT_REFUSED, Failure, Result};
use crate::os::init::Machine;
use crate::os::membership::{Duty, Membership, Standing, puts_end};
use crate::os::sys::machine;
use crate::os::sys::signals::Stop;
use crate::startup::{self, EXIT_USAGE};
use log::LevelFilter;
use rustix::system::RebootCommand;
use std::fmt::Display;
use std::fs;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

/// The status of a process that SIGTERM has killed, as shells report it. Container managers expect it
/// of a first process.
const ENDED_BY_SIGTERM: u8 = 128 + 15;

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
fn run(machine: Option<&mut Machine>) -> (ExitCode, RebootCommand) {
    let done = match options::parse(std::env::args_os().skip(1)) {
        Ok(Mode::Serve(options)) => return serve(&options, machine),
        Ok(Mode::Help) => Ok(print(io::stdout(), options::usage(cfg!(feature = "etcd")))),
        Ok(Mode::Version) => Ok(print(io::stdout(), options::version())),
        Ok(Mode::Check(place)) => inspect(inspect::check, &place),
        Ok(Mode::Dump(place)) => inspect(inspect::dump, &place),
        Ok(Mode::Import(path, etcd)) => import(&path, &etcd),
        Ok(Mode::Export(path, etcd)) => export(&path, &etcd),
        Ok(Mode::Leave(file, place)) => leave(&file, place),
        Err(error) => Err(Failure::new(EXIT_USAGE, error)),
    };
    let exit_code = done.unwrap_or_else(|failure| report(LogFormat::Text, &failure));
    (exit_code, RebootCommand::PowerOff)
}

/// Prints `text`. A closed pipe is no failure.
fn print(mut to: impl Write, text: impl Display) -> ExitCode {
    let _ = writeln!(to, "{text}");
    ExitCode::SUCCESS
}

fn report(format: LogFormat, failure: &Failure) -> ExitCode {
    print(io::stderr(), logging::failure_line(format, &failure.message));
    if failure.exit_code == EXIT_USAGE && format == LogFormat::Text {
        print(io::stderr(), "Try 'beanstalkd --help'.");
    }
    ExitCode::from(failure.exit_code)
}

fn serve(options: &Options, machine: Option<&mut Machine>) -> (ExitCode, RebootCommand) {
    logging::start(options.log_level, options.log_format);
    let stop = match startup::run(options, machine) {
        Ok(stop) => stop,
        Err(failure) => return (report(options.log_format, &failure), RebootCommand::PowerOff),
    };
    log::info!("stopped: {stop:?}");
    match stop {
        Stop::Terminate if machine::is_first_process() => {
            (ExitCode::from(ENDED_BY_SIGTERM), RebootCommand::PowerOff)
        }
        Stop::Terminate => (ExitCode::SUCCESS, RebootCommand::PowerOff),
        // For the first process of a machine SIGINT means Ctrl-Alt-Del.
        Stop::Interrupt => (ExitCode::SUCCESS, RebootCommand::Restart),
    }
}

/// Returns the failure of a binlog at `place`.
fn failed<E: Display>(place: impl Display, exit_code: u8) -> impl FnOnce(E) -> Failure {
    move |error| Failure::new(exit_code, format!("-b {place}: {error}"))
}

/// Prints the contents of a binlog, or checks it.
type Inspect = fn(&mut dyn Disk, &mut dyn Write) -> Result<bool, BinlogError>;

/// Fails if the binlog is damaged.
fn inspect(inspect: Inspect, place: &BinlogPlace) -> Result<ExitCode> {
    // It serves the disk for as long as it lives.
    let membership;
    let (name, mut disk, exit_code): (String, Box<dyn Disk>, u8) = match place {
        BinlogPlace::Directory(path) => {
            let directory = Directory::open_unlocked(path).map_err(failed(path.display(), 1))?;
            (path.display().to_string(), Box::new(directory), 1)
        }
        BinlogPlace::Etcd(etcd) => {
            membership = Membership::join(etcd, Duty::Read)?;
            (etcd.url.clone(), membership.disk(), EXIT_REFUSED)
        }
    };
    let mut out = BufWriter::new(io::stdout().lock());
    let printed = inspect(&mut *disk, &mut out)
        .and_then(|is_sound| out.flush().map(|()| is_sound).map_err(BinlogError::of_output));
    match printed {
        Ok(true) => Ok(ExitCode::SUCCESS),
        Ok(false) => Ok(ExitCode::FAILURE),
        // The reader of the output has stopped reading.
        Err(failure) if failure.step == Step::Output && failure.kind == ErrorKind::BrokenPipe => {
            Ok(ExitCode::SUCCESS)
        }
        Err(error) => Err(failed(name, exit_code)(error)),
    }
}

/// Copies the binlog in a directory, which no server uses, to etcd.
fn import(path: &Path, etcd: &EtcdOptions) -> Result<ExitCode> {
    logging::start(LevelFilter::Warn, LogFormat::Text);
    let mut directory = Directory::lock(path)?;
    let cannot_copy = cannot_copy(path.display(), &etcd.url);
    // Nothing is written for a damaged binlog.
    let files = measure(&mut directory).map_err(&cannot_copy)?;
    let (bytes, quota) = (length_of(&files), etcd.quota);
    if bytes > puts_end(quota) {
        let why = format_args!(
            "{bytes} bytes of {} are too many for a quota of {quota}; set --etcd-quota to that of etcd",
            path.display()
        );
        return Err(failed(&etcd.url, EXIT_REFUSED)(why));
    }
    let membership = Membership::join(etcd, Duty::Import)?;
    loop {
        match membership.standing()? {
            Standing::Leader => break,
            Standing::Undecided => thread::sleep(POLL_PAUSE),
            Standing::Standby(leader) => {
                return Err(failed(&etcd.url, EXIT_REFUSED)(format_args!("{leader} leads")));
            }
        }
    }
    let wait_until_stored = |disk: &mut dyn Disk| {
        disk.begin_sync(&[], false, true);
        while disk.finished_sync(false).is_none() {
            membership.check().map_err(|error| io::Error::other(error.message))?;
            if disk.refuses_puts() {
                let why = format!(
                    "etcd is full, or nearly, with a quota of {quota}; delete all keys that begin with {}/, \
                     make space, and import again",
                    etcd.prefix
                );
                return Err(io::Error::other(why));
            }
            thread::sleep(POLL_PAUSE);
        }
        Ok(())
    };
    let mut disk = membership.disk();
    check_empty(&mut *disk).map_err(&cannot_copy)?;
    copy(&mut directory, &files, &mut *disk, wait_until_stored).map_err(&cannot_copy)?;
    let not_ended = |error| BinlogError::new(Step::Write, "cannot complete the copy", error);
    membership.end_import().map_err(not_ended).map_err(&cannot_copy)?;
    Ok(report_copy(&files, &etcd.url))
}

/// Copies the binlog in etcd, as it is now, to an empty directory. No server takes a part of the copy for the whole:
/// its files are in a directory of their own until the end.
fn export(path: &Path, etcd: &EtcdOptions) -> Result<ExitCode> {
    let mut directory = Directory::lock(path)?;
    let membership = Membership::join(etcd, Duty::Read)?;
    let mut disk = membership.disk();
    let part = path.join("binlog.unfinished");
    let copied = check_empty(&mut directory).and_then(|()| {
        let files = measure(&mut *disk)?;
        // That of an export that was killed.
        let _ = fs::remove_dir_all(&part);
        let moved = copy_through(&part, &mut *disk, &files, &mut directory);
        if moved.is_err() {
            files.iter().for_each(|&(number, _)| _ = directory.remove(number));
            let _ = fs::remove_dir_all(part);
            let _ = fs::remove_dir_all(path.join(MOVING));
        }
        moved.map(|()| report_copy(&files, path.display()))
    });
    copied.map_err(cannot_copy(&etcd.url, path.display()))
}

/// Copies files to a new directory, and moves them from there once all are synced.
fn copy_through(
    part: &Path,
    disk: &mut dyn Disk,
    files: &[(FileNumber, u64)],
    directory: &mut Directory,
) -> Result<(), BinlogError> {
    let cannot = |what| move |error| BinlogError::new(Step::Write, what, error);
    let opened = fs::create_dir(part).and_then(|()| Directory::open_unlocked(part));
    let mut to = opened.map_err(cannot("cannot make a directory there"))?;
    copy(disk, files, &mut to, |_| Ok(()))?;
    directory.take_all(&mut to).map_err(cannot("cannot move the files"))?;
    directory.begin_sync(&[], true, false);
    directory.finished_sync(true).unwrap_or(Ok(()))
}

fn cannot_copy(from: impl Display, to: impl Display) -> impl Fn(BinlogError) -> Failure {
    move |error| Failure::new(EXIT_REFUSED, format!("cannot copy {from} to {to}: {error}"))
}

/// Returns the length of all files together, in bytes.
fn length_of(files: &[(FileNumber, u64)]) -> u64 {
    files.iter().map(|&(_, used)| used).sum()
}

fn report_copy(files: &[(FileNumber, u64)], to: impl Display) -> ExitCode {
    let (count, bytes) = (files.len(), length_of(files));
    print(io::stdout(), format_args!("copied {count} files with {bytes} bytes to {to}"))
}

/// Ends the lease of a server that was killed. Without a cluster no server has one.
fn leave(file: &Path, place: Option<BinlogPlace>) -> Result<ExitCode> {
    logging::start(LevelFilter::Warn, LogFormat::Text);
    match place {
        Some(BinlogPlace::Etcd(etcd)) => Membership::leave(&etcd, file)?,
        Some(BinlogPlace::Directory(_)) | None if file.exists() => {
            let why = "the URL of etcd with -b is missing, to end the lease in this file";
            return Err(Failure::new(EXIT_USAGE, format!("--leave {}: {why}", file.display())));
        }
        Some(BinlogPlace::Directory(_)) | None => {}
    }
    Ok(ExitCode::SUCCESS)
}
