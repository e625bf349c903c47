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

/// Formats a time in UTC, as in `2026-11-21T14:03:55.120Z`. The C library would read the files of the
/// time zone first.
fn utc(since_1970: Duration) -> impl fmt::Display {
    humantime::format_rfc3339_millis(UNIX_EPOCH + since_1970)
}

fn now() -> impl fmt::Display {
    utc(Duration::from_nanos(clock::time_of_day().as_nanos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(since_1970: Duration) -> String {
        utc(since_1970).to_string()
    }

    #[test]
    fn times_are_formatted_in_utc() {
        assert_eq!(text(Duration::ZERO), "1970-01-01T00:00:00.000Z");
        assert_eq!(text(Duration::from_millis(1_709_210_096_007)), "2024-02-29T12:34:56.007Z");
        assert_eq!(text(Duration::from_secs(4_107_542_399)), "2100-02-28T23:59:59.000Z");
        assert_eq!(text(Duration::from_secs(4_107_542_400)), "2100-03-01T00:00:00.000Z");
        assert_eq!(text(Duration::from_secs(253_402_300_799)), "9999-12-31T23:59:59.000Z");
    }

    #[test]
    fn every_day_of_a_thousand_years_has_its_date() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..365_250 {
            let midnight = text(Duration::from_secs(days * 86_400));
            assert_eq!(midnight, format!("{year}-{month:02}-{day:02}T00:00:00.000Z"));
            let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
            let last = match month {
                2 => 28 + u64::from(is_leap),
                4 | 6 | 9 | 11 => 30,
                _ => 31,
            };
            (year, month, day) = match (month, day) {
                (12, 31) => (year + 1, 1, 1),
                (_, day) if day == last => (year, month + 1, 1),
                _ => (year, month, day + 1),
            };
        }
    }
}
