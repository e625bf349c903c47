//! The fuzz targets and their judges. `tests/fuzz/README.md` describes how to run them.
//!
//! A target takes any bytes and panics where the server is wrong. The bytes come from libFuzzer
//! (`make fuzz`) or from the seeded mutations of `tests/fuzz_smoke.rs`.
#![allow(dead_code, unreachable_pub, reason = "each program that includes this uses some of it")]
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

pub mod connection;
pub mod program;
pub mod replay;

/// The name of a target, and its function.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: [Target; 2] = [("connection", connection::run), ("replay", replay::run)];

pub fn named(name: &str) -> fn(&[u8]) {
    TARGETS.iter().find(|(target, _)| *target == name).expect("it is a target").1
}

/// Asserts that each message of the log is one line.
struct LogChecker;

impl log::Log for LogChecker {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = record.args().to_string();
        assert!(!line.is_empty() && !line.contains('\n'), "not one line: {line}");
    }

    fn flush(&self) {}
}

/// Checks all messages of the log from now on.
pub fn check_log() {
    static CHECKER: LogChecker = LogChecker;
    // Another target may have installed it.
    let _ = log::set_logger(&CHECKER);
    log::set_max_level(log::LevelFilter::Trace);
}

/// Bytes as a sequence of numbers; zeros after the last byte.
pub struct Bytes<'b>(pub &'b [u8]);

impl Bytes<'_> {
    pub fn byte(&mut self) -> u8 {
        let Some((&byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        byte
    }

    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::from(self.byte()) % values.len()]
    }

    /// A byte stands for one of `values`, for a number up to 247, or for the next eight bytes.
    pub fn number(&mut self, values: &[u64]) -> u64 {
        let byte = self.byte();
        match values.get(usize::from(byte)) {
            Some(&value) => value,
            None if byte < 0xf8 => byte.into(),
            None => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    pub fn take(&mut self, len: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
