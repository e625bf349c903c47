//! The format of the log: lines on standard error, as text or as JSON objects.

use crate::engine::text::JsonText;
use crate::options::LogFormat;
use crate::os::sys::clock;
use log::{Level, LevelFilter};
use std::fmt;
use std::io::Write;
use std::time::{Duration, UNIX_EPOCH};

/// Sets up logging on stderr: a line has the time in UTC, the level and the message.
pub fn start(level: LevelFilter, format: LogFormat) {
    env_logger::Builder::new()
        .filter_level(level)
        .parse_default_env()
        .format(move |out, record| match format {
            LogFormat::Text => {
                writeln!(out, "{} {:5} {}", now(), record.level(), record.args())
            }
            LogFormat::Json => writeln!(out, "{}", json_line(record.level(), record.args())),
        })
        .init();
}

/// Returns the line for a failure that ends the server, in the format of the log. It is printed at
/// every log level.
pub fn failure_line(format: LogFormat, failure: &dyn fmt::Display) -> String {
    match format {
        LogFormat::Text => format!("beanstalkd: {failure}"),
        LogFormat::Json => json_line(Level::Error, failure),
    }
}

fn json_line(level: Level, message: &dyn fmt::Display) -> String {
    let (now, message) = (now(), message.to_string());
    format!(r#"{{"time":"{now}","level":"{level}","message":"{}"}}"#, JsonText(&message))
}

/// Returns the time of day in UTC, as in `2026-11-21T14:03:55.120Z`. The C library would read the files of the time
/// zone first.
fn now() -> impl fmt::Display {
    let since_1970 = Duration::from_nanos(clock::time_of_day().as_nanos());
    humantime::format_rfc3339_millis(UNIX_EPOCH + since_1970)
}
