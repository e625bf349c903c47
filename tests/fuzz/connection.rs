//! The target `connection` for libFuzzer.
#![no_main]

mod harness;
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::connection::run(bytes));
