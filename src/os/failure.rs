//! Why the server does not serve, or serves no longer: the message and the exit code.

use std::io;

/// Why the server does not serve.
#[derive(Debug)]
pub struct Failure {
    /// The exit code; that of C beanstalkd where it has one.
    pub exit_code: u8,
    /// The message for the operator.
    pub message: String,
}

/// EX_IOERR of sysexits(3), for a disk that fails.
pub const EXIT_DISK: u8 = 74;

impl Failure {
    /// Returns a failure.
    pub fn new(exit_code: u8, message: impl Into<String>) -> Failure {
        Failure { exit_code, message: message.into() }
    }

    /// Returns the failure of a system call that the server needs.
    pub fn of_system(what: &str) -> impl Fn(io::Error) -> Failure + '_ {
        move |error| Failure::new(1, format!("cannot {what}: {error}"))
    }
}
