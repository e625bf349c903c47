//! What is fed with hostile bytes, and how it is judged. `tests/fuzz/README.md` tells the ways in.
//!
//! A target takes any bytes and panics where the server is wrong. Nothing here knows who makes the
//! bytes: libFuzzer (`make fuzz`) or the seeded mutations of `tests/fuzz_smoke.rs`.
#![allow(dead_code, unreachable_pub, reason = "each program that includes this uses some of it")]
#![allow(clippy::unwrap_used, reason = "in a test it is an assertion")]

pub mod command;
pub mod connection;
#[path = "../../made_up/mod.rs"]
mod made_up;
pub mod options;
pub mod replay;
pub mod talk;

use beanstalkd::testing::ConnKey;
use beanstalkd::testing::Nanos;
use beanstalkd::testing::{Server, Settings};
use std::io::IoSlice;

/// A target, and what it is called.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 4] = [
    ("command", command::run),
    ("connection", connection::run),
    ("replay", replay::run),
    ("options", options::run),
];

/// Whatever is logged must be fit to be told.
struct Reader;

impl log::Log for Reader {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = record.args().to_string();
        assert!(!line.is_empty() && !line.contains('\n'), "this is no line: {line}");
    }

    fn flush(&self) {}
}

/// Has all that is logged read, which costs a little.
pub fn read_log() {
    static READER: Reader = Reader;
    // It may be there already.
    let _ = log::set_logger(&READER);
    log::set_max_level(log::LevelFilter::Trace);
}

/// When every story begins.
pub const START: Nanos = Nanos::from_secs(1_700_000_000);

/// A server without jobs and connections.
pub fn server(settings: Settings, now: Nanos) -> Server {
    Server::new(settings, made_up::facts(START), now)
}

/// What the server says to `input`, as text.
pub fn ask(server: &mut Server, key: ConnKey, input: &str, now: Nanos) -> String {
    String::from_utf8_lossy(&ask_bytes(server, key, input, now)).into_owned()
}

/// What the server says to `input`, all of it; the connection must be between two commands.
pub fn ask_bytes(server: &mut Server, key: ConnKey, input: &str, now: Nanos) -> Vec<u8> {
    assert!(server.actions(key).read, "the server does not listen");
    server.receive(key, input.as_bytes(), now);
    server.commit(now).unwrap();
    let mut said = take_output(server, key, usize::MAX);
    while server.actions(key).run {
        server.resume(key, now);
        server.commit(now).unwrap();
        said.extend(take_output(server, key, usize::MAX));
    }
    said
}

/// Takes up to `limit` bytes of what the connection is to be sent.
pub fn take_output(server: &mut Server, key: ConnKey, limit: usize) -> Vec<u8> {
    // The loop would look after those who ask for it; here everybody is looked after.
    server.take_dirty(&mut Vec::new());
    let mut output_handle = server.output_handle(key);
    let mut taken = Vec::new();
    while output_handle.actions().write && taken.len() < limit {
        let mut slices = [IoSlice::new(&[]); 3];
        let filled = output_handle.next_slices(&mut slices);
        assert!(filled > 0, "there is output, and it cannot be had");
        let before = taken.len();
        for slice in &slices[..filled] {
            let count = slice.len().min(limit - taken.len());
            taken.extend_from_slice(&slice[..count]);
        }
        let count = taken.len() - before;
        assert!(count > 0, "slices have nothing in them");
        output_handle.sent(count);
    }
    taken
}

/// The value of a line `key: value` in a document, without quotes.
pub fn field<'t>(document: &'t str, key: &str) -> Option<&'t str> {
    let value = |line: &'t str| line.strip_prefix(key)?.strip_prefix(": ");
    document.lines().find_map(value).map(|value| value.trim_matches('"'))
}

/// The same as a number.
pub fn number(document: &str, key: &str) -> u64 {
    let value = field(document, key).unwrap_or_else(|| panic!("there is no {key}: {document}"));
    value.parse().unwrap_or_else(|_| panic!("{key} is no number: {document}"))
}

/// Bytes as numbers, one after the other; zeros when there are no more.
pub struct Bytes<'b>(pub &'b [u8]);

impl Bytes<'_> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((&byte, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        byte
    }

    /// One of these.
    pub fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[usize::from(self.byte()) % values.len()]
    }

    /// Eight bytes as they are.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    pub fn take(&mut self, len: usize) -> &[u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
