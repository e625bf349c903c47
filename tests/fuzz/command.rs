//! The target `command` for libFuzzer.
#![no_main]

#[path = "../fake_disk/mod.rs"]
mod fake_disk;
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::command::run(bytes));
