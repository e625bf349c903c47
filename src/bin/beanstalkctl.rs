//! The binary of the tool for operators: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    beanstalkd::ctl::main()
}
