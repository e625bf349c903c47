//! The binary: everything is in the library, so that tests reach it.

use beanstalkd::{Allocator, program};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

fn main() -> ExitCode {
    program::main()
}
