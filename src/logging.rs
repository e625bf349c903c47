//! The format of the log: lines on standard error, as text or as JSON objects.

use crate::engine::text::JsonText;
use crate::options::LogFormat;
use crate::os::sys::clock;
use log::{Level, LevelFilter};
use std::fmt;
use std::io::Write;
use std::time::Duration;

/// Sets up logging on stderr: a line has the time in UTC, the level and the message.
pub fn start(level: LevelFilter, format: LogFormat) {
    env_logger::Builder::new()
        .filter_level(level)
        .parse_default_env()
        .format(move |out, record| match format {
            LogFormat::Text => {
                let now = utc(clock::time_of_day());
                writeln!(out, "{now} {:5} {}", record.level(), record.args())
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
    let now = utc(clock::time_of_day());
    let message = message.to_string();
    format!(r#"{{"time":"{now}","level":"{level}","message":"{}"}}"#, JsonText(&message))
}

/// Formats a time in UTC, as in `2026-11-21T14:03:55.120Z`. The C library would read the files of the
/// time zone first.
fn utc(since_1970: Duration) -> String {
    let seconds = since_1970.as_secs();
    let (year, month, day) = date(seconds / 86_400);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:03}Z",
        seconds / 3600 % 24,
        seconds / 60 % 60,
        seconds % 60,
        since_1970.subsec_millis()
    )
}

/// Returns the date this many days after 1970-01-01.
fn date(days_since_1970: u64) -> (u64, u64, u64) {
    const DAYS_FROM_YEAR_0_TO_1970: u64 = 719_468;
    const DAYS_IN_400_YEARS: u64 = 146_097;
    // Years are counted from March on, so that the leap day is their last day.
    let days = days_since_1970 + DAYS_FROM_YEAR_0_TO_1970;
    let day = days % DAYS_IN_400_YEARS;
    let year = (day - day / 1_460 + day / 36_524 - day / (DAYS_IN_400_YEARS - 1)) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // Any five months from March or August on have 153 days.
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let year = days / DAYS_IN_400_YEARS * 400 + year;
    if month < 10 { (year, month + 3, day) } else { (year + 1, month - 9, day) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_in_utc() {
        assert_eq!(utc(Duration::ZERO), "1970-01-01T00:00:00.000Z");
        assert_eq!(utc(Duration::from_millis(1_709_210_096_007)), "2024-02-29T12:34:56.007Z");
        assert_eq!(utc(Duration::from_secs(4_107_542_399)), "2100-02-28T23:59:59.000Z");
        assert_eq!(utc(Duration::from_secs(4_107_542_400)), "2100-03-01T00:00:00.000Z");
        assert_eq!(utc(Duration::from_secs(253_402_300_799)), "9999-12-31T23:59:59.000Z");
    }

    #[test]
    fn every_day_of_a_thousand_years_has_its_date() {
        let (mut year, mut month, mut day) = (1970, 1, 1);
        for days in 0..365_250 {
            assert_eq!(date(days), (year, month, day));
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
