//! The HTML of the status page around its values: head, style, script, and plots.
//!
//! Style and script are inside the page, so that it needs no other request. The Content-Security-Policy
//! allows only them, by their hashes, so that no text of a client can become script. All text of
//! clients is escaped by [`Escaped`] or percent-encoded.

use super::http_conn::View;
use super::measurements::{INTERVAL, Point, SAMPLES};
use super::table::{Column, Readable, Value, push};
use crate::engine::protocol::stats::{self, ProcessInfo};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use std::fmt::{self, Display};

/// The style of the page.
pub const STYLE: &str = include_str!("page/style.css");
/// The script of the page. Without it the page is complete, and reloads itself more slowly.
pub const SCRIPT: &str = include_str!("page/script.js");

/// The fields of each response with a status page. `tests/status_page` compares the hashes.
pub const HEADER_FIELDS: &str = concat!(
    "Content-Security-Policy: default-src 'none'; ",
    "style-src 'sha256-bL6HRUAowpMdIhMUt2BBE5XuRGDisshrYI9Pk/j3QvM='; ",
    "script-src 'sha256-gDEt0ycmIn074xnX6T+CoSDFaL5LH+KlDuXc65kyfWY='; ",
    "connect-src 'self'; img-src data:; form-action 'self'; base-uri 'none'; ",
    "frame-ancestors 'none'\r\n",
    "Cross-Origin-Resource-Policy: same-origin\r\n",
    "Referrer-Policy: no-referrer\r\n",
    "X-Content-Type-Options: nosniff\r\n",
    "Vary: Accept\r\n",
);

/// Displays text with escapes for HTML content and quoted attributes.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'t>(pub &'t str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(index) = rest.find(['&', '<', '>', '"', '\'']) {
            f.write_str(&rest[..index])?;
            f.write_str(match rest.as_bytes()[index] {
                b'&' => "&amp;",
                b'<' => "&lt;",
                b'>' => "&gt;",
                b'"' => "&quot;",
                _ => "&#39;",
            })?;
            rest = &rest[index + 1..];
        }
        f.write_str(rest)
    }
}

/// Displays text, percent-encoded, as a part of a path or as a value of a query.
pub fn percent_encoded(text: &str) -> impl Display {
    const ENCODED: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    utf8_percent_encode(text, &ENCODED)
}

/// Writes the page up to its first heading. `subject` is a tube, or the server if empty.
pub fn write_head(subject: &str, view: &View<'_>, text: &mut String) {
    let host = Escaped(&view.server.process.hostname);
    let (subject, separator) = (Escaped(subject), if subject.is_empty() { "" } else { " - " });
    push(
        text,
        format_args!(
            "<!DOCTYPE html>\n<html lang=en>\n<meta charset=utf-8>\n\
             <meta name=viewport content=\"width=device-width,initial-scale=1\">\n\
             <link rel=icon href=\"data:image/svg+xml,{ICON}\">\n\
             <title>{subject}{separator}beanstalkd on {host}</title>\n\
             <noscript><meta http-equiv=refresh content=10></noscript>\n\
             <style>{STYLE}</style>\n"
        ),
    );
}

/// An SVG image of a plant with two leaves, percent-encoded.
const ICON: &str = "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E\
    %3Cpath d='M8 15V6M8 9C3 9 2 6 2 3c4 0 6 2 6 6Zm0-3c0-3 2-5 6-5 0 3-1 6-6 6Z' \
    fill='%23177a45' stroke='%23177a45'/%3E%3C/svg%3E";

/// Returns the name of the server, its version and its process.
pub fn identity(view: &View<'_>, host: impl Display) -> String {
    let ProcessInfo { pid, started_at, .. } = view.server.process;
    let uptime = Readable(Value::Span(view.now.since(*started_at)));
    let (protocol, version) = (stats::VERSION, env!("CARGO_PKG_VERSION"));
    format!(
        "beanstalkd {protocol} (beanstalkd-server {version}), process {pid} on {host}, up {uptime}"
    )
}

/// Writes what is above the values.
pub fn write_identity(view: &View<'_>, text: &mut String) {
    let identity = identity(view, Escaped(&view.server.process.hostname));
    let draining =
        if view.server.is_draining { " <strong>draining: puts are rejected</strong>" } else { "" };
    push(text, format_args!("<p id=server>{identity}{draining}</p>\n<p role=status></p>\n"));
}

/// Writes the script, which is last, so that all elements exist when it runs.
pub fn write_end(text: &mut String) {
    push(text, format_args!("<script>{SCRIPT}</script>\n"));
}

// ---- Plots ----

/// The values of a point. Each two after the first are the lines of a plot.
pub const POINT: [Column<Point>; 1 + 2 * PLOTS] = [
    ("seconds_ago", "", |point| Value::Span(point.age)),
    ("ready", "ready", |point| Value::Count(point.ready)),
    ("reserved", "reserved", |point| Value::Count(point.reserved)),
    ("puts_per_second", "puts/s", |point| Value::Rate(Some(point.rates.puts))),
    ("deletes_per_second", "deletes/s", |point| Value::Rate(Some(point.rates.deletes))),
];

/// The number of plots.
pub const PLOTS: usize = 2;

/// The width and the height of a plot, in units of its `viewBox`.
const WIDTH: u64 = 600;
const HEIGHT: u64 = 100;

/// Writes the plot of the last ten minutes with this index. The first one opens the element around all
/// plots, the last one closes it.
pub fn write_plot(index: usize, view: &View<'_>, text: &mut String) {
    if index == 0 {
        text.push_str("<div id=plots>\n");
    }
    let lines = || ["a", "b"].into_iter().zip(&POINT[1 + 2 * index..]);
    let points = || view.measurements.points(view.now);
    let highest = points().flat_map(|point| lines().map(move |(_, (_, _, value))| value(&point)));
    let highest = highest.max_by_key(|value| value.number());
    let top = highest.and_then(Value::number).unwrap_or(0).max(1);
    text.push_str("<figure><figcaption>");
    for (class, (_, title, _)) in lines() {
        push(text, format_args!("<span class={class}>{title}</span> "));
    }
    if let Some(highest) = highest {
        push(text, format_args!("<span>highest {}</span>", Readable(highest)));
    }
    let (title, other) = (POINT[1 + 2 * index].1, POINT[2 + 2 * index].1);
    push(
        text,
        format_args!(
            "</figcaption>\n<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=none \
             role=img aria-label=\"{title} and {other} in the last 10 minutes\">"
        ),
    );
    for (class, (_, _, value)) in lines() {
        push(text, format_args!("<polyline class={class} points=\""));
        for point in points() {
            let x = WIDTH.saturating_sub(WIDTH * point.age.whole_secs() / SHOWN_SECS);
            let number = value(&point).number().unwrap_or(0);
            let y = HEIGHT * 10 - number.saturating_mul(HEIGHT * 10) / top;
            push(text, format_args!("{x},{}.{} ", y / 10, y % 10));
        }
        text.push_str("\"/>");
    }
    text.push_str("</svg>\n<p><span>10 minutes ago</span><span>now</span></p></figure>\n");
    if index + 1 == PLOTS {
        text.push_str("</div>\n");
    }
}

/// The time that the plots show.
const SHOWN_SECS: u64 = (SAMPLES as u64 - 1) * INTERVAL.whole_secs();

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_escaped() {
        let text = Escaped("<a href=\"x\" id='y'>&amp;</a>").to_string();
        assert_eq!(text, "&lt;a href=&quot;x&quot; id=&#39;y&#39;&gt;&amp;amp;&lt;/a&gt;");
    }
}
