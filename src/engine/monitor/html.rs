//! The HTML of the status page around its values: head, style, script, and plots.
//!
//! Style and script are inside the page, so that it needs no other request. The Content-Security-Policy
//! allows only them, by their hashes, so that no text of a client can become script. All text of
//! clients is escaped by [`Escaped`] or percent-encoded.

use super::history::{History, INTERVAL, Point, SAMPLES};
use super::table::push;
use super::url::Encoded;
use super::value::{Rate, Readable, Value};
use crate::engine::protocol::stats::{self, ProcessInfo};
use crate::engine::server::View;
use crate::engine::time::Nanos;
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

/// Returns the path of a tube's page, relative to that of the server. Browsers remove the parts `.`
/// and `..` from a path, so tubes of these names have none.
pub fn tube_link(name: &str) -> Option<impl Display> {
    (name != "." && name != "..").then_some(TubeLink(name))
}

struct TubeLink<'t>(&'t str);

impl Display for TubeLink<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tube/{}", Encoded(self.0))
    }
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

/// Writes the name of the server, its version and its process.
pub fn write_identity(view: &View<'_>, text: &mut String) {
    let ProcessInfo { hostname, pid, started_at, .. } = view.server.process;
    let uptime = Readable(Value::Span(view.now.since(*started_at)));
    let (protocol, version, host) = (stats::VERSION, env!("CARGO_PKG_VERSION"), Escaped(hostname));
    let draining =
        if view.server.is_draining { " <strong>draining: puts are rejected</strong>" } else { "" };
    push(
        text,
        format_args!(
            "<p id=server>beanstalkd {protocol} (beanstalkd-server {version}), process {pid} on \
             {host}, up {uptime}{draining}</p>\n<p role=status></p>\n"
        ),
    );
}

/// Writes the script, which is last, so that all elements exist when it runs.
pub fn write_end(text: &mut String) {
    push(text, format_args!("<script>{SCRIPT}</script>\n"));
}

// ---- Plots ----

/// One of the two lines of a plot.
struct Line {
    class: &'static str,
    title: &'static str,
    value: fn(&Point) -> Value,
}

/// The plots of the last ten minutes.
const PLOTS: [[Line; 2]; PLOT_COUNT] = [
    [
        Line { class: "a", title: "ready", value: |point| Value::Count(point.ready) },
        Line { class: "b", title: "reserved", value: |point| Value::Count(point.reserved) },
    ],
    [
        Line { class: "a", title: "puts/s", value: |point| Value::Rate(Some(point.puts)) },
        Line { class: "b", title: "deletes/s", value: |point| Value::Rate(Some(point.deletes)) },
    ],
];

/// The number of plots.
pub const PLOT_COUNT: usize = 2;

/// The width and the height of a plot, in units of its `viewBox`.
const WIDTH: u64 = 600;
const HEIGHT: u64 = 100;

/// Writes the plot with this index. The first one opens the element around all plots, the last one
/// closes it.
pub fn write_plot(index: usize, history: &History, now: Nanos, text: &mut String) {
    if index == 0 {
        text.push_str("<div id=plots>\n");
    }
    let lines = &PLOTS[index];
    let values = history.points(now).flat_map(|point| lines.each_ref().map(|l| (l.value)(&point)));
    let highest = values.max_by_key(|value| magnitude(*value));
    let top = highest.map_or(1, magnitude).max(1);
    text.push_str("<figure><figcaption>");
    for Line { class, title, .. } in lines {
        push(text, format_args!("<span class={class}>{title}</span> "));
    }
    if let Some(highest) = highest {
        push(text, format_args!("<span>highest {}</span>", Readable(highest)));
    }
    push(
        text,
        format_args!(
            "</figcaption>\n<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=none \
             role=img aria-label=\"{} and {} in the last 10 minutes\">",
            lines[0].title, lines[1].title
        ),
    );
    for Line { class, value, .. } in lines {
        push(text, format_args!("<polyline class={class} points=\""));
        for point in history.points(now) {
            let x = WIDTH.saturating_sub(WIDTH * point.age.whole_secs() / SHOWN.whole_secs());
            let height = magnitude(value(&point)).saturating_mul(HEIGHT * 10) / top;
            let y = HEIGHT * 10 - height;
            push(text, format_args!("{x},{}.{} ", y / 10, y % 10));
        }
        text.push_str("\"/>");
    }
    text.push_str("</svg>\n<p><span>10 minutes ago</span><span>now</span></p></figure>\n");
    if index + 1 == PLOT_COUNT {
        text.push_str("</div>\n");
    }
}

/// The time that the plots show.
#[expect(clippy::cast_possible_truncation, reason = "600 seconds")]
const SHOWN: Nanos = Nanos::from_secs((SAMPLES as u64 - 1) as u32 * INTERVAL.whole_secs() as u32);

/// Returns a number that is proportional to the value, for the height of a point.
fn magnitude(value: Value) -> u64 {
    match value {
        Value::Rate(rate) => rate.map_or(0, Rate::tenths),
        Value::Id(_) | Value::Count(_) | Value::Bytes(_) | Value::Span(_) => value.rank(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_is_escaped() {
        let text = Escaped("<a href=\"x\" id='y'>&amp;</a>").to_string();
        assert_eq!(text, "&lt;a href=&quot;x&quot; id=&#39;y&#39;&gt;&amp;amp;&lt;/a&gt;");
    }
}
