//! The problems that the pages show, the worst first, in the three formats. The rules are in
//! [`crate::attention`]; their facts come from here.

use super::html::{Escaped, tube_link};
use super::http::MediaType;
use super::http_conn::View;
use super::table::{Out, Value};
use super::tube_scan::TubeStats;
use crate::attention::{self, Level, Problem, ServerFacts};
use crate::engine::binlog::Binlog;
use crate::engine::text::{CountOf, JsonText};
use std::cmp::Reverse;

/// The problems of one page.
#[derive(Debug, Default)]
pub struct Problems {
    /// The worst ones, each with the name of its tube; without a name it is one of the server.
    shown: Vec<(String, Problem)>,
    /// The number of problems.
    count: u64,
    /// The number of tubes.
    tubes: u64,
    /// The number of tubes that need attention. A notice does not count.
    tubes_in_need: u64,
    /// The server needs attention.
    is_server_in_need: bool,
}

/// At most this many problems are shown.
const SHOWN_MAX: usize = 20;
/// In HTML, no problem is shown after this many bytes of problems: names and links can be long.
const HTML_LIST_MAX: usize = 8 * 1024;

impl Problems {
    /// Adds the problems of a tube.
    pub fn add_tube(&mut self, stats: &TubeStats, view: &View<'_>) {
        let server = view.server.process.tool_server.as_deref();
        let problems = attention::of_tube(&stats.name, &stats.facts, server);
        self.tubes += 1;
        self.tubes_in_need += u64::from(problems.iter().any(|it| it.level > Level::Notice));
        problems.into_iter().for_each(|problem| self.add(&stats.name, problem));
    }

    /// Adds the problems of the server.
    pub fn add_server(&mut self, view: &View<'_>) {
        let facts = ServerFacts {
            is_binlog_full: view.queue.binlog.as_ref().is_some_and(Binlog::refuses_puts),
            is_stalled: view.server.is_stalled(),
            connections: view.server.connections,
            max_connections: view.server.process.max_connections,
            memory: view.queue.job_bytes(),
            max_memory: view.queue.settings.max_memory(),
            is_accept_failing: view.server.is_accept_failing,
            is_draining: view.server.is_draining,
        };
        let problems = attention::of_server(&facts, view.server.process.tool_server.as_deref());
        self.is_server_in_need = !problems.is_empty();
        problems.into_iter().for_each(|problem| self.add("", problem));
    }

    /// Adds a problem behind those that are as bad, in the order of names, if it is among the first.
    fn add(&mut self, tube: &str, problem: Problem) {
        // A tube that was created again during the scan may have been scanned twice.
        let is_same = |(other, it): &(String, Problem)| other == tube && it.rule == problem.rule;
        if !tube.is_empty() && self.shown.iter().any(is_same) {
            return;
        }
        self.count += 1;
        let own = (Reverse(problem.level), tube);
        let at = self.shown.partition_point(|(other, it)| (Reverse(it.level), &**other) <= own);
        if at < SHOWN_MAX {
            self.shown.insert(at, (tube.to_owned(), problem));
            self.shown.truncate(SHOWN_MAX);
        }
    }

    /// Returns the first line of the page of the server.
    pub fn verdict(&self) -> String {
        let (all, count) = (CountOf(self.tubes, "tube"), Value::Count(self.tubes_in_need));
        match (self.is_server_in_need, self.tubes_in_need) {
            (false, 0) => "Nothing needs attention".to_owned(),
            (true, 0) => "The server needs attention".to_owned(),
            (false, 1) => format!("1 of {all} needs attention"),
            (false, _) => format!("{count} of {all} need attention"),
            (true, _) => format!("The server and {count} of {all} need attention"),
        }
    }

    /// Writes a list, a line for each problem, or a member of an object. `path` leads to the pages of tubes.
    pub fn write(&self, path: &str, out: &mut Out<'_>) {
        let width =
            |of: fn(&(String, Problem)) -> usize| self.shown.iter().map(of).max().unwrap_or(0);
        let (names, texts) = (width(|it| it.0.len()).max(6), width(|it| it.1.text.len()));
        out.each("<ul id=attention>\n", "", "\"attention\":[");
        let (start, mut shown) = (out.text.len(), 0);
        for (tube, Problem { level, rule, text, remedy }) in &self.shown {
            if out.format == MediaType::Html && out.text.len() > start + HTML_LIST_MAX {
                break;
            }
            shown += 1;
            let level = level.name();
            let (name, link, json) = match &**tube {
                "" => ("server", "server".to_owned(), "null".to_owned()),
                tube => {
                    let link = tube_link(path, tube, "", Escaped(tube)).to_string();
                    (tube, link, format!("\"{}\"", JsonText(tube)))
                }
            };
            let code = match &**remedy {
                "" => String::new(),
                remedy => format!(" <code>{}</code>", Escaped(remedy)),
            };
            let line = format!("{level:8}  {name:names$}  {text:texts$}  {remedy}");
            out.each(
                format_args!(
                    "<li class={level}><b>{level}</b> {link} <span>{}</span>{code}\n",
                    Escaped(text)
                ),
                format_args!("{}\n", line.trim_end()),
                format_args!(
                    "{}{{\"level\":\"{level}\",\"rule\":\"{rule}\",\"tube\":{json},\"text\":\"{}\",\"remedy\":\"{}\"}}",
                    out.separator(),
                    JsonText(text),
                    JsonText(remedy)
                ),
            );
        }
        if self.count > shown {
            let more = Value::Count(self.count - shown);
            out.each(format_args!("<li>and {more} more\n"), format_args!("and {more} more\n"), "");
        }
        out.each("</ul>\n", "", "],\n");
    }
}
