//! The HTML of the status page around its values: head, style, script, and plots.
//!
//! Style and script are inside the page, so that it needs no other request. The Content-Security-Policy
//! allows only them, by their hashes, so that no text of a client can become script. All text of
//! clients is escaped by [`Escaped`] or percent-encoded.

use super::http_conn::View;
use super::measurements::{INTERVAL, Point, SAMPLES};
use super::table::{Column, Out, Rate, Value};
use crate::engine::protocol::stats::{self, ProcessInfo};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::fmt::{self, Display, Write};
use std::ops::Range;

/// The style of the page.
pub const STYLE: &str = include_str!("page/style.css");
/// The script of the page. Without it the page is complete, and reloads itself more slowly.
pub const SCRIPT: &str = include_str!("page/script.js");

/// The fields of each response with a status page. `tests/status_page` compares the hashes.
pub const HEADER_FIELDS: &str = concat!(
    "Content-Security-Policy: default-src 'none'; ",
    "style-src 'sha256-4uYT6oUVmG8bIvichcCea+6sE8UvXVbHkCO9FVc4AWs='; ",
    "script-src 'sha256-gDEt0ycmIn074xnX6T+CoSDFaL5LH+KlDuXc65kyfWY='; ",
    "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; ",
    "frame-ancestors 'none'\r\n",
    "Cross-Origin-Resource-Policy: same-origin\r\n",
    "Referrer-Policy: no-referrer\r\n",
    "X-Content-Type-Options: nosniff\r\n",
    "Vary: Accept\r\n",
);

/// Displays text with escapes for HTML content and quoted attributes.
pub struct Escaped<'t>(pub &'t str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|char| match char {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            _ => f.write_char(char),
        })
    }
}

/// Displays text, percent-encoded, as a part of a path or as a value of a query.
pub fn percent_encoded(text: &str) -> impl Display {
    const ENCODED: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    utf8_percent_encode(text, &ENCODED)
}

/// Writes the page up to its first heading, in HTML. `subject` is a tube, or the server if empty.
pub fn write_head(subject: &str, view: &View<'_>, out: &mut Out<'_>) {
    let host = Escaped(&view.server.process.hostname);
    let (subject, separator) = (Escaped(subject), if subject.is_empty() { "" } else { " - " });
    let head = format_args!(
        "<!DOCTYPE html>\n<html lang=en>\n<meta charset=utf-8>\n\
         <meta name=viewport content=\"width=device-width,initial-scale=1\">\n\
         <link rel=icon href=\"data:image/svg+xml,{ICON}\">\n\
         <title>{subject}{separator}beanstalkd on {host}</title>\n\
         <noscript><meta http-equiv=refresh content=10></noscript>\n\
         <style>{STYLE}</style>\n"
    );
    out.each(head, "", "");
}

/// An SVG image of a plant with two leaves, percent-encoded.
const ICON: &str = "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E\
    %3Cpath d='M8 15V6M8 9C3 9 2 6 2 3c4 0 6 2 6 6Zm0-3c0-3 2-5 6-5 0 3-1 6-6 6Z' \
    fill='%23177a45' stroke='%23177a45'/%3E%3C/svg%3E";

/// Returns the name of the server, its version and its process.
pub fn identity(view: &View<'_>, host: impl Display) -> String {
    let ProcessInfo { pid, started_at, .. } = &view.server.process;
    let uptime = Value::Span(view.now.since(*started_at));
    let (protocol, version) = (stats::VERSION, env!("CARGO_PKG_VERSION"));
    format!(
        "beanstalkd {protocol} (beanstalkd-server {version}), process {pid} on {host}, up {uptime}"
    )
}

/// Writes what is above the values, in HTML.
pub fn write_identity(view: &View<'_>, out: &mut Out<'_>) {
    let identity = identity(view, Escaped(&view.server.process.hostname));
    out.each(format_args!("<p id=server>{identity}</p>\n<p role=status></p>\n"), "", "");
}

/// Writes the script, in HTML. It is last, so that all elements exist when it runs.
pub fn write_end(out: &mut Out<'_>) {
    out.each(format_args!("<script>{SCRIPT}</script>\n"), "", "");
}

/// Displays a link to the page of a tube, to which `path` leads. Browsers remove the parts `.` and `..` from a
/// path, so only the label is displayed for tubes with these names.
pub fn tube_link(path: &str, name: &str, fragment: &str, label: impl Display) -> impl Display {
    fmt::from_fn(move |f| match name {
        "." | ".." => write!(f, "{label}"),
        _ => write!(f, "<a href=\"{path}{}{fragment}\">{label}</a>", percent_encoded(name)),
    })
}

// ---- Plots ----

/// The values of a point in JSON. Each of [`PLOTS`] has some of them.
pub const POINT: [Column<Point>; 6] = [
    ("seconds_ago", "", |point| Value::Span(point.age)),
    ("ready", "ready", |point| Value::Count(point.totals.ready)),
    ("reserved", "held", |point| Value::Count(point.totals.reserved)),
    ("buried", "buried", |point| Value::Count(point.totals.buried)),
    ("puts_per_second", "in/s", |point| Value::Rate(Some(point.rates.puts))),
    ("deletes_per_second", "out/s", |point| Value::Rate(Some(point.rates.deletes))),
];

/// The indices of the lines of a plot in [`POINT`], and what makes a value of a number on its axis.
type Plot = (Range<usize>, fn(u64) -> Value);

const PLOTS: [Plot; 2] = [(1..4, Value::Count), (4..6, |tenths| Value::Rate(Some(Rate(tenths))))];

/// The width and the height of a plot, in units of its `viewBox`.
const WIDTH: u64 = 600;
const HEIGHT: u64 = 100;

/// Writes the plots of the last ten minutes.
pub fn write_plots(view: &View<'_>, out: &mut Out<'_>) {
    out.text.push_str("<div id=plots>\n");
    for (columns, value_of) in PLOTS {
        let lines = || ["a", "b", "c"].into_iter().zip(&POINT[columns.clone()]);
        let points = || view.measurements.points(view.now);
        let numbers = points().flat_map(|point| {
            lines().map(move |(_, (_, _, value))| value(&point).number().unwrap_or(0))
        });
        let top = axis_top(numbers.max().unwrap_or(0));
        out.text.push_str("<figure><figcaption>");
        let mut titles = Vec::new();
        for (class, (_, title, _)) in lines() {
            out.push(format_args!("<span class={class}>{title}</span> "));
            titles.push(*title);
        }
        let [top_label, half] = [top, top / 2].map(value_of);
        out.push(format_args!(
            "</figcaption>\n<div class=axis><span>{top_label}</span><span>{half}</span>\
             <span>0</span></div><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=none \
             role=img aria-label=\"{} in the last 10 minutes\"><path d=\"M0,0H{WIDTH}M0,50H{WIDTH}\"/>",
            titles.join(", ")
        ));
        for (class, (_, _, value)) in lines() {
            out.push(format_args!("<polyline class={class} points=\""));
            for point in points() {
                let x = WIDTH.saturating_sub(WIDTH * point.age.whole_secs() / SHOWN_SECS);
                let number = value(&point).number().unwrap_or(0).min(top);
                let y = HEIGHT * 10 - number.saturating_mul(HEIGHT * 10) / top;
                out.push(format_args!("{x},{}.{} ", y / 10, y % 10));
            }
            out.text.push_str("\"/>");
        }
        out.text.push_str(
            "</svg>\n<p><span>-10 min</span><span>-5</span><span>0 min</span></p></figure>\n",
        );
    }
    out.text.push_str("</div>\n");
}

/// Returns the smallest even number of one digit and zeros that is at least `highest`, or 10^17 and more.
fn axis_top(highest: u64) -> u64 {
    let highest = highest.clamp(1, u64::MAX / 100);
    let unit = 2 * 10_u64.pow(highest.ilog10());
    highest.div_ceil(unit) * unit
}

/// The time that the plots show.
const SHOWN_SECS: u64 = (SAMPLES as u64 - 1) * INTERVAL.whole_secs();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_even_numbers() {
        let tops = [(0, 2), (1, 2), (3, 4), (9, 10), (14, 20), (21, 40), (99, 100), (1234, 2000)];
        assert!(tops.into_iter().all(|(highest, top)| axis_top(highest) == top));
        assert_eq!(axis_top(u64::MAX), 200_000_000_000_000_000);
    }

    #[test]
    fn markup_is_escaped() {
        let text = Escaped("<a href=\"x\" id='y'>&amp;</a>").to_string();
        assert_eq!(text, "&lt;a href=&quot;x&quot; id=&#39;y&#39;&gt;&amp;amp;&lt;/a&gt;");
    }
}
