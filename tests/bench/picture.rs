//! Draws costs that stay flat, or do not, from the JSON document of a run: processor time
//! per operation against the number of tubes and against depth, as an SVG file.

use serde_json::Value;
use std::fmt::Write;

/// Draws what the document has; none if it has nothing of what is drawn.
pub fn draw(document: &Value) -> Option<String> {
    let servers = document["servers"].as_array()?;
    let lines: Vec<Line> =
        servers.iter().filter_map(|server| Line::find(document, server)).collect();
    let highest = lines.iter().flat_map(Line::values).fold(f64::NAN, f64::max);
    if highest.is_nan() {
        return None;
    }
    let scale = Scale { decades: highest.log10().ceil().max(1.0) };
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

const CHARTS: [Chart; 2] = [
    Chart {
        title: "beside so many tubes",
        points: &[
            Point { label: "1", scenario: "tubes-1", position: 0.0 },
            Point { label: "1,000", scenario: "tubes-1000", position: 0.6 },
            Point { label: "10,000", scenario: "tubes-10000", position: 0.8 },
            Point { label: "100,000", scenario: "tubes-100000", position: 1.0 },
        ],
    },
    Chart {
        title: "beside so many ready jobs",
        points: &[
            // Nothing else is in the queue there.
            Point { label: "0", scenario: "tubes-1", position: 0.0 },
            Point { label: "1 million", scenario: "deep-1m", position: 0.75 },
            Point { label: "10 million", scenario: "deep-10m", position: 1.0 },
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
/// Our own server first; told apart in grey too.
const COLOURS: [&str; 5] = ["#0550ae", "#d1500a", "#6e7781", "#8250df", "#1a7f37"];

/// The vertical axis: it counts decades, from 1 up.
struct Scale {
    decades: f64,
}

impl Scale {
    fn y(&self, value: f64) -> f64 {
        let share = value.max(1.0).log10() / self.decades;
        TOP + PLOT_HEIGHT * (1.0 - share)
    }
}

/// What one server has come to.
struct Line {
    name: String,
    /// For each chart, the place and the value of each point there is.
    charts: Vec<Vec<(f64, f64)>>,
}

impl Line {
    fn find(document: &Value, server: &Value) -> Option<Line> {
        let path = server["server"].as_str()?;
        let results = document["results"].as_array()?;
        let value = |scenario: &str| {
            let result = results.iter().find(|result| {
                result["server"] == path
                    && result["scenario"] == scenario
                    && result["figure"] == FIGURE
            })?;
            result["median"].as_f64()
        };
        let place = |point: &Point| Some((point.position, value(point.scenario)?));
        let charts = CHARTS.iter().map(|chart| chart.points.iter().filter_map(place).collect());
        let line = Line { name: name(server["version"].as_str()?), charts: charts.collect() };
        let is_empty = line.values().next().is_none();
        (!is_empty).then_some(line)
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.charts.iter().flatten().map(|&(_, value)| value)
    }

    fn draw(&self, svg: &mut Svg, chart: usize, left: f64, scale: &Scale, rank: usize) {
        /// The values of the first server stand below its line, all others above theirs.
        const ABOVE: f64 = -9.0;
        const BELOW: f64 = 19.0;
        let colour = colour(rank);
        let points = self.charts[chart].iter();
        let place = |&(position, value)| (x_of(left, position), scale.y(value));
        svg.polyline(points.clone().map(place), colour);
        for point in points {
            let ((x, y), value) = (place(point), point.1);
            svg.dot((x, y), colour);
            let value = if value < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") };
            let offset = if rank == 0 { BELOW } else { ABOVE };
            svg.text(Anchor::Middle, (x, y + offset), &value);
        }
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
    const ENTRY_WIDTH: f64 = 220.0;
    const Y: f64 = 48.0;
    for (rank, line) in lines.iter().enumerate() {
        let x = LEFT + rank as f64 * ENTRY_WIDTH;
        svg.dot((x + 5.0, Y - 5.0), colour(rank));
        svg.text(Anchor::Start, (x + 16.0, Y), &line.name);
    }
}

fn axes(svg: &mut Svg, chart: &Chart, left: f64, scale: &Scale) {
    let bottom = TOP + PLOT_HEIGHT;
    for decade in (0..).map(f64::from).take_while(|&decade| decade <= scale.decades) {
        let value = 10.0_f64.powf(decade);
        let y = scale.y(value);
        svg.grid_line(left, y);
        svg.text(Anchor::End, (left - 8.0, y + 4.0), &format!("{value:.0}"));
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
