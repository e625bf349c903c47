//! The target `command` for libFuzzer.
#![no_main]

mod harness;
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::command::run(bytes));
