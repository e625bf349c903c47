//! Values, and tables and lists of them, in the three formats of the status page: HTML, columns of text,
//! and JSON. It knows nothing of tubes and jobs.
//!
//! People read `12,345`, `125m` and `0.4`. Programs read plain numbers; durations are in seconds.

use super::http::MediaType;
use crate::engine::text::{Grouped, Span};
use crate::engine::time::Nanos;
use std::fmt::{self, Display, Write};

/// A column of a table, or a named value of a list: its name in JSON and in URLs, its title for people,
/// and the value of a row.
pub type Column<R> = (&'static str, &'static str, fn(&R) -> Value);

/// A value of the server, of a tube or of a job, displayed for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// An id or a priority, which people read without groups of digits.
    Id(u64),
    Count(u64),
    Bytes(u64),
    Span(Nanos),
    /// `None` until two samples were taken.
    Rate(Option<Rate>),
    /// The upper bound of a time in seconds, as text; `None` if no time was counted.
    Bound(Option<&'static str>),
}

/// A rate, in tenths of an event per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(pub u64);

/// Displays a value as a JSON number or `null`.
pub struct JsonNumber(pub Value);

impl Rate {
    /// Returns the rate of `count` events in `span`, rounded to a tenth.
    pub fn of(count: u64, span: Nanos) -> Rate {
        const TENTHS: u64 = 10_000_000_000;
        let nanos = span.as_nanos().max(1);
        // More than 1.8 billion events saturate. A division of 128 bits would be slow.
        Rate(count.saturating_mul(TENTHS).saturating_add(nanos / 2) / nanos)
    }
}

impl Value {
    /// Returns the number by which values of one variant compare; `None` for an unknown rate.
    pub fn number(self) -> Option<u64> {
        match self {
            Value::Id(count) | Value::Count(count) | Value::Bytes(count) => Some(count),
            Value::Span(span) => Some(span.as_nanos()),
            Value::Rate(rate) => rate.map(|Rate(tenths)| tenths),
            Value::Bound(_) => None,
        }
    }
}

impl Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Value::Id(id) => write!(f, "{id}"),
            Value::Count(count) => Grouped(count).fmt(f),
            Value::Bytes(bytes) => {
                write_tenths(bytes.saturating_mul(10) >> 20, f)?;
                f.write_str(" MiB")
            }
            Value::Span(span) => Span(span.whole_secs()).fmt(f),
            Value::Rate(None) | Value::Bound(None) => f.write_str("-"),
            Value::Bound(Some("+Inf")) => f.write_str("longer"),
            Value::Bound(Some(secs)) => write!(f, "≤ {secs}s"),
            Value::Rate(Some(Rate(0))) => f.write_str("0"),
            Value::Rate(Some(Rate(tenths @ 1..100))) => write_tenths(tenths, f),
            Value::Rate(Some(Rate(tenths))) => Grouped((tenths + 5) / 10).fmt(f),
        }
    }
}

impl Display for JsonNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Value::Id(count) | Value::Count(count) | Value::Bytes(count) => write!(f, "{count}"),
            Value::Span(span) => {
                write!(f, "{}.{:03}", span.whole_secs(), span.as_nanos() / 1_000_000 % 1_000)
            }
            // JSON has no infinity.
            Value::Rate(None) | Value::Bound(None | Some("+Inf")) => f.write_str("null"),
            Value::Bound(Some(secs)) => f.write_str(secs),
            Value::Rate(Some(Rate(tenths))) => write_tenths(tenths, f),
        }
    }
}

fn write_tenths(tenths: u64, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "{}.{}", tenths / 10, tenths % 10)
}

// ---- Tables and lists ----

/// A part of a page in one of the three formats, to which text is appended.
pub struct Out<'t> {
    pub format: MediaType,
    pub text: &'t mut String,
}

impl Out<'_> {
    /// Appends formatted text.
    pub fn push(&mut self, arguments: fmt::Arguments<'_>) {
        self.text.write_fmt(arguments).expect("writing to a string cannot fail");
    }

    /// Appends the one of these texts that is in the format of the page.
    pub fn each(&mut self, html: impl Display, plain: impl Display, json: impl Display) {
        match self.format {
            MediaType::Html => self.push(format_args!("{html}")),
            MediaType::Text => self.push(format_args!("{plain}")),
            MediaType::Json => self.push(format_args!("{json}")),
        }
    }

    /// Returns what is between two elements of an array in JSON, and before the first.
    pub fn separator(&self) -> &'static str {
        if self.text.ends_with('[') { "\n" } else { ",\n" }
    }

    /// Writes values with their names: entries of a list, a part of a line, or members of an object.
    pub fn values<R>(&mut self, columns: &[Column<R>], row: &R) {
        for (index, (key, title, value)) in columns.iter().enumerate() {
            let value = value(row);
            let [comma, gap] = if index == 0 { ["", ""] } else { [",", " "] };
            self.each(
                format_args!("<div><dt>{title}<dd>{value}</div>\n"),
                format_args!("{comma}{gap}{title} {value}"),
                format_args!("{comma}\"{key}\":{}", JsonNumber(value)),
            );
        }
    }

    /// Writes the titles of the columns of a table.
    pub fn titles<R>(&mut self, columns: &[Column<R>]) {
        for (_, title, _) in columns {
            self.each(format_args!("<th scope=col>{title}"), format_args!(" {title:>8}"), "");
        }
    }

    /// Writes the values of a row: cells, a part of a line, or members of an object.
    pub fn cells<R>(&mut self, columns: &[Column<R>], row: &R) {
        if self.format == MediaType::Json {
            return self.values(columns, row);
        }
        for (_, title, value) in columns {
            let value = value(row);
            let text = value.to_string();
            // Zeros are dim.
            let [dim, end] = if value.number() == Some(0) { ["<i>", "</i>"] } else { ["", ""] };
            // Most values fit into 8 characters. Padding needs the whole text of the value.
            let width = title.len().max(8);
            self.each(format_args!("<td>{dim}{text}{end}"), format_args!(" {text:>width$}"), "");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_displayed_for_people_and_for_programs() {
        let rate = |count, secs| Value::Rate(Some(Rate::of(count, Nanos::from_secs(secs))));
        for (value, text, json) in [
            (Value::Count(0), "0", "0"),
            (Value::Count(1_234_007), "1,234,007", "1234007"),
            (Value::Id(1_234_007), "1234007", "1234007"),
            (Value::Bytes(0), "0.0 MiB", "0"),
            (Value::Bytes(1_048_575), "0.9 MiB", "1048575"),
            (Value::Bytes(52_428_800), "50.0 MiB", "52428800"),
            (Value::Span(Nanos::ZERO), "0s", "0.000"),
            (Value::Span(Nanos::from_millis(59_999)), "59s", "59.999"),
            (Value::Span(Nanos::from_secs(3_599)), "59m", "3599.000"),
            (Value::Span(Nanos::from_secs(7_500)), "2h", "7500.000"),
            (Value::Span(Nanos::from_secs(90_000)), "25h", "90000.000"),
            (Value::Rate(None), "-", "null"),
            (Value::Bound(None), "-", "null"),
            (Value::Bound(Some("0.1")), "≤ 0.1s", "0.1"),
            (Value::Bound(Some("+Inf")), "longer", "null"),
            (rate(0, 5), "0", "0.0"),
            (rate(2, 5), "0.4", "0.4"),
            (rate(1, 3), "0.3", "0.3"),
            (rate(21, 2), "11", "10.5"),
            (rate(62, 5), "12", "12.4"),
            (rate(5_000_000, 5), "1,000,000", "1000000.0"),
        ] {
            assert_eq!(value.to_string(), text);
            assert_eq!(JsonNumber(value).to_string(), json);
        }
        assert_eq!(Rate::of(u64::MAX, Nanos::ZERO), Rate(u64::MAX));
        assert!(Rate::of(1_800_000_000, Nanos::from_secs(5)) >= Rate(3_600_000_000));
        assert!(Value::Rate(None).number() < rate(0, 5).number());
    }
}
