//! Why the server does not serve, or serves no longer: the message and the exit code.

use std::io;

/// Why the server does not serve.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The exit code; that of C beanstalkd where it has one.
    pub exit_code: u8,
    /// The message for the operator.
    pub message: String,
}

/// The result of what ends the program if it fails.
pub type Result<T = (), E = Failure> = std::result::Result<T, E>;

/// The exit code when the system refuses what the server needs, such as space on its disk or open files.
pub const EXIT_SYSTEM: u8 = 1;

/// The exit code when a binlog cannot be used.
pub const EXIT_REFUSED: u8 = 10;

/// EX_IOERR of sysexits(3), for a disk that fails.
pub const EXIT_DISK: u8 = 74;

impl Failure {
    /// Returns a failure.
    pub fn new(exit_code: u8, message: impl Into<String>) -> Failure {
        Failure { exit_code, message: message.into() }
    }

    /// Returns the failure to listen on an address, with the exit code of C beanstalkd.
    pub fn of_listening(message: String) -> Failure {
        Failure::new(111, message)
    }

    /// Returns the failure of a system call that the server needs.
    pub fn of_system(what: &str) -> impl Fn(io::Error) -> Failure + '_ {
        move |error| Failure::new(EXIT_SYSTEM, format!("cannot {what}: {error}"))
    }
}

/// Returns what helps if a directory, a file in it or an address cannot be used, as the end of a message.
pub fn remedy(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT) => "; create the directory",
        Some(libc::EACCES) => "; make the directory and its files belong to the user of the server",
        Some(libc::EROFS) => {
            "; mount it writable, or name it in ReadWritePaths= of the systemd unit"
        }
        Some(libc::ENOSPC | libc::EDQUOT) => "; free space on its file system",
        Some(libc::EADDRINUSE) => "; stop the program that listens there, or choose another port",
        Some(libc::EADDRNOTAVAIL) => "; no network interface has this address",
        _ => "",
    }
}
