//! Draws costs that stay flat, or do not, from the JSON document of a run: processor time
//! per operation against the number of tubes and against depth, as an SVG file.

use serde_json::Value;
use std::fmt::Write;

/// Draws what the document has; none if it has nothing of what is drawn.
pub fn draw(document: &Value) -> Option<String> {
    let servers = document["servers"].as_array()?;
    let mut lines: Vec<Line> =
        servers.iter().filter_map(|server| Line::find(document, server)).collect();
    tell_apart(&mut lines);
    let highest = lines.iter().flat_map(Line::values).fold(f64::NAN, f64::max);
    if highest.is_nan() {
        return None;
    }
    let scale = Scale { highest: highest.log10().ceil().max(1.0) };
    let mut svg = Svg::new();
    svg.bold(Anchor::Start, (LEFT, 24.0), TITLE);
    legend(&mut svg, &lines);
    for (index, chart) in CHARTS.iter().enumerate() {
        let left = LEFT + index as f64 * (PLOT_WIDTH + GAP);
        axes(&mut svg, chart, left, &scale);
        for (rank, line) in lines.iter().enumerate() {
            line.draw(&mut svg, index, left, &scale, rank);
        }
    }
    Some(svg.end())
}

const TITLE: &str =
    "Processor time per operation in microseconds: put, reserve, delete on 10 connections";

/// One of the two charts.
struct Chart {
    title: &'static str,
    points: &'static [Point],
}

/// A place on the horizontal axis, and the scenario that belongs there.
struct Point {
    label: &'static str,
    scenario: &'static str,
    /// From 0 at the left to 1 at the right.
    position: f64,
}

const fn point(label: &'static str, scenario: &'static str, position: f64) -> Point {
    Point { label, scenario, position }
}

const CHARTS: [Chart; 2] = [
    Chart {
        title: "beside so many tubes",
        points: &[
            point("1", "tubes-1", 0.0),
            point("1,000", "tubes-1000", 0.6),
            point("10,000", "tubes-10000", 0.8),
            point("100,000", "tubes-100000", 1.0),
        ],
    },
    Chart {
        title: "beside so many ready jobs",
        points: &[
            // Nothing else is in the queue there.
            point("0", "tubes-1", 0.0),
            point("1 million", "deep-1m", 0.75),
            point("10 million", "deep-10m", 1.0),
        ],
    },
];
const FIGURE: &str = "cpu_us_per_op";

const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 60.0;
const TOP: f64 = 76.0;
const GAP: f64 = 80.0;
const PLOT_WIDTH: f64 = 350.0;
const PLOT_HEIGHT: f64 = 220.0;
/// From the ends of the plot to the outermost points.
const INSET: f64 = 30.0;
/// Our own server first; the colors differ in grey too.
const COLOURS: [&str; 5] = ["#0550ae", "#d1500a", "#6e7781", "#8250df", "#1a7f37"];

/// The vertical axis.
struct Scale {
    /// The decade, as a power of ten, at the top.
    highest: f64,
}

impl Scale {
    /// A tenth of a microsecond.
    const LOWEST: f64 = -1.0;

    fn y(&self, value: f64) -> f64 {
        let share =
            (value.log10().max(Scale::LOWEST) - Scale::LOWEST) / (self.highest - Scale::LOWEST);
        TOP + PLOT_HEIGHT * (1.0 - share)
    }

    fn decades(&self) -> impl Iterator<Item = f64> {
        let highest = self.highest;
        (0..)
            .map(|index| Scale::LOWEST + f64::from(index))
            .take_while(move |&decade| decade <= highest)
    }
}

/// What one server has come to.
struct Line {
    name: String,
    path: String,
    /// For each chart, the place and the value of each point there is.
    charts: Vec<Vec<(f64, Cost)>>,
}

#[derive(Clone, Copy)]
enum Cost {
    Microseconds(f64),
    TooSlow,
}

impl Line {
    fn find(document: &Value, server: &Value) -> Option<Line> {
        let path = server["server"].as_str()?;
        let results = document["results"].as_array()?;
        let cost = |scenario: &str| {
            let mut own = results
                .iter()
                .filter(|result| result["server"] == path && result["scenario"] == scenario);
            own.find_map(|result| match result["figure"].as_str() {
                // It was too slow for any.
                None => Some(Cost::TooSlow),
                Some(FIGURE) => result["median"].as_f64().map(Cost::Microseconds),
                Some(_) => None,
            })
        };
        let place = |point: &Point| Some((point.position, cost(point.scenario)?));
        let charts = CHARTS.iter().map(|chart| chart.points.iter().filter_map(place).collect());
        let charts: Vec<Vec<_>> = charts.collect();
        let has_points = charts.iter().any(|points| !points.is_empty());
        let name = name(server["version"].as_str()?);
        has_points.then(|| Line { name, path: path.to_owned(), charts })
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        (0..self.charts.len()).flat_map(|chart| self.points(chart)).map(|(_, value)| value)
    }

    fn points(&self, chart: usize) -> impl Iterator<Item = (f64, f64)> {
        self.charts[chart].iter().filter_map(|&(position, cost)| match cost {
            Cost::Microseconds(value) => Some((position, value)),
            Cost::TooSlow => None,
        })
    }

    fn draw(&self, svg: &mut Svg, chart: usize, left: f64, scale: &Scale, rank: usize) {
        /// The values of the first server stand below its line, all others above theirs.
        const ABOVE: f64 = -9.0;
        const BELOW: f64 = 19.0;
        let place = |(position, value)| (x_of(left, position), scale.y(value));
        svg.polyline(self.points(chart).map(place), colour(rank));
        for point in self.points(chart) {
            let ((x, y), (_, value)) = (place(point), point);
            svg.dot((x, y), colour(rank));
            let offset = if rank == 0 { BELOW } else { ABOVE };
            svg.text(Anchor::Middle, (x, y + offset), &number(value));
        }
        self.draw_too_slow(svg, chart, left, rank);
    }

    /// At the top edge, each server in a row of its own.
    fn draw_too_slow(&self, svg: &mut Svg, chart: usize, left: f64, rank: usize) {
        const ROW_HEIGHT: f64 = 14.0;
        let y = TOP + ROW_HEIGHT * (rank + 1) as f64;
        for &(position, cost) in &self.charts[chart] {
            if let Cost::TooSlow = cost {
                svg.small((x_of(left, position), y), colour(rank), "too slow");
            }
        }
    }
}

/// Two builds may have the same version.
fn tell_apart(lines: &mut [Line]) {
    let names: Vec<String> = lines.iter().map(|line| line.name.clone()).collect();
    for line in lines {
        if names.iter().filter(|&name| *name == line.name).count() > 1 {
            line.name = format!("{}, {}", line.name, line.path);
        }
    }
}

fn number(value: f64) -> String {
    match value {
        ..1.0 => format!("{value:.2}"),
        ..10.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

fn x_of(left: f64, position: f64) -> f64 {
    left + INSET + position * (PLOT_WIDTH - 2.0 * INSET)
}

/// `beanstalkd 1.13 (beanstalkd-server 0.1.0)` is ours, `beanstalkd 1.13` is C's.
fn name(version: &str) -> String {
    match version.split_once('(') {
        Some((_, own)) => own.trim_end_matches(')').to_owned(),
        None => format!("C {version}"),
    }
}

fn colour(rank: usize) -> &'static str {
    COLOURS[rank % COLOURS.len()]
}

fn legend(svg: &mut Svg, lines: &[Line]) {
    /// As good as always more than a letter needs.
    const LETTER_WIDTH: f64 = 7.0;
    const DOT_WIDTH: f64 = 16.0;
    const BETWEEN: f64 = 30.0;
    const Y: f64 = 48.0;
    let mut x = LEFT;
    for (rank, line) in lines.iter().enumerate() {
        svg.dot((x + 5.0, Y - 5.0), colour(rank));
        svg.text(Anchor::Start, (x + DOT_WIDTH, Y), &line.name);
        x += DOT_WIDTH + line.name.chars().count() as f64 * LETTER_WIDTH + BETWEEN;
    }
}

fn axes(svg: &mut Svg, chart: &Chart, left: f64, scale: &Scale) {
    let bottom = TOP + PLOT_HEIGHT;
    for decade in scale.decades() {
        let value = 10.0_f64.powf(decade);
        let y = scale.y(value);
        svg.grid_line(left, y);
        svg.text(Anchor::End, (left - 8.0, y + 4.0), &value.to_string());
    }
    for point in chart.points {
        svg.text(Anchor::Middle, (x_of(left, point.position), bottom + 22.0), point.label);
    }
    svg.bold(Anchor::Middle, (left + PLOT_WIDTH / 2.0, bottom + 46.0), chart.title);
}

/// The text of an SVG file, element by element.
struct Svg(String);

/// Which end of a text stands at its place.
#[derive(Clone, Copy)]
enum Anchor {
    Start,
    Middle,
    End,
}

impl Svg {
    /// White behind it, whatever the page is.
    fn new() -> Svg {
        Svg(format!(
            r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"
     font-family="sans-serif" font-size="13" fill="#24292f">
<title>{TITLE}</title>
<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>
"##
        ))
    }

    fn end(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }

    fn text(&mut self, anchor: Anchor, place: (f64, f64), words: &str) {
        self.weighted("normal", anchor, place, words);
    }

    fn bold(&mut self, anchor: Anchor, place: (f64, f64), words: &str) {
        self.weighted("bold", anchor, place, words);
    }

    fn weighted(&mut self, weight: &str, anchor: Anchor, (x, y): (f64, f64), words: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let words = words.replace('&', "&amp;").replace('<', "&lt;");
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" font-weight="{weight}">{words}</text>"#
        ));
    }

    fn small(&mut self, (x, y): (f64, f64), colour: &str, words: &str) {
        self.add(format_args!(
            r#"<text x="{x:.1}" y="{y:.1}" text-anchor="middle" font-size="11" fill="{colour}">{words}</text>"#
        ));
    }

    fn dot(&mut self, (x, y): (f64, f64), colour: &str) {
        self.add(format_args!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{colour}"/>"#));
    }

    fn grid_line(&mut self, left: f64, y: f64) {
        self.add(format_args!(
            r##"<path d="M{left:.1} {y:.1} h{PLOT_WIDTH:.1}" stroke="#d0d7de"/>"##
        ));
    }

    fn polyline(&mut self, places: impl Iterator<Item = (f64, f64)>, colour: &str) {
        let corners: Vec<String> = places.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let corners = corners.join(" ");
        self.add(format_args!(
            r#"<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2.5"/>"#
        ));
    }

    fn add(&mut self, element: std::fmt::Arguments) {
        writeln!(self.0, "{element}").expect("memory takes it");
    }
}
