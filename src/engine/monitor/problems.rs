//! The problems that the pages show, the worst first, in the three formats. The rules are in
//! [`crate::attention`]; their facts come from here.

use super::html::{Escaped, write_tube_link};
use super::http_conn::View;
use super::table::{Readable, Value, push};
use super::tube_scan::TubeStats;
use crate::attention::{self, Level, Problem, ServerFacts, TubeFacts};
use crate::engine::text::JsonText;
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
}

/// At most this many problems are shown.
const SHOWN_MAX: usize = 20;
/// In HTML, no problem is shown after this many bytes of problems: names and links can be long.
const HTML_LIST_MAX: usize = 8 * 1024;

impl Problems {
    /// Adds the problems of a tube.
    pub fn add_tube(&mut self, stats: &TubeStats, name: &str, view: &View<'_>) {
        let facts = TubeFacts {
            name,
            ready: stats.ready,
            held: stats.reserved,
            buried: stats.buried,
            first_buried: stats.first_buried,
            watching: stats.watching,
            waiting: stats.waiting,
            oldest_secs: stats.oldest_wait.whole_secs(),
            pause_left_secs: stats.pause_left.whole_secs(),
            has_recent_delete: stats.recent.has_delete,
            reservations_ended: stats.recent.ended,
            reservations_failed: stats.recent.failed,
        };
        let problems = attention::of_tube(&facts, view.server.process.tool_server.as_deref());
        self.tubes += 1;
        self.tubes_in_need += u64::from(problems.iter().any(|it| it.level > Level::Notice));
        problems.into_iter().for_each(|problem| self.add(name, problem));
    }

    /// Adds the problems of the server.
    pub fn add_server(&mut self, view: &View<'_>) {
        let facts = ServerFacts {
            is_binlog_full: view.queue.binlog.as_ref().is_some_and(|it| it.stats().is_full),
            connections: view.server.connections as u64,
            max_connections: view.server.process.max_connections.map(|max| max as u64),
            memory: view.queue.job_bytes(),
            max_memory: view.server.max_memory_bytes,
            is_draining: view.server.is_draining,
        };
        let problems = attention::of_server(&facts, view.server.process.tool_server.as_deref());
        problems.into_iter().for_each(|problem| self.add("", problem));
    }

    /// Adds a problem behind those that are as bad, in the order of names, if it is among the first.
    fn add(&mut self, tube: &str, problem: Problem) {
        // A tube that moved to a lower index during the scan was scanned twice.
        if self
            .shown
            .iter()
            .any(|(other, it)| other == tube && it.rule == problem.rule && !tube.is_empty())
        {
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
        let server =
            if self.shown.iter().any(|(tube, _)| tube.is_empty()) { "The server" } else { "" };
        let all = Readable(Value::Count(self.tubes));
        match (server, self.tubes_in_need) {
            ("", 0) => "Nothing needs attention".to_owned(),
            (server, 0) => format!("{server} needs attention"),
            ("", 1) => format!("1 of {all} tubes needs attention"),
            (server, count) => {
                let (and, count) =
                    (if server.is_empty() { "" } else { " and " }, Readable(Value::Count(count)));
                format!("{server}{and}{count} of {all} tubes need attention")
            }
        }
    }

    /// Writes a list. `path` leads to the pages of tubes.
    pub fn write_html(&self, path: &str, text: &mut String) {
        text.push_str("<ul id=attention>\n");
        let start = text.len();
        let mut shown = 0;
        for (tube, Problem { level, text: what, remedy, .. }) in &self.shown {
            if text.len() > start + HTML_LIST_MAX {
                break;
            }
            shown += 1;
            let level = level.name();
            push(text, format_args!("<li class={level}><b>{level}</b> "));
            match &**tube {
                "" => text.push_str("server"),
                tube => write_tube_link(path, tube, "", Escaped(tube), text),
            }
            push(
                text,
                format_args!(" <span>{}</span> <code>{}</code>\n", Escaped(what), Escaped(remedy)),
            );
        }
        if self.count > shown {
            push(
                text,
                format_args!("<li>and {} more\n", Readable(Value::Count(self.count - shown))),
            );
        }
        text.push_str("</ul>\n");
    }

    /// Writes a line for each problem.
    pub fn write_text(&self, text: &mut String) {
        let width =
            |of: fn(&(String, Problem)) -> usize| self.shown.iter().map(of).max().unwrap_or(0);
        let (names, texts) = (width(|it| it.0.len()).max(6), width(|it| it.1.text.len()));
        for (tube, Problem { level, text: what, remedy, .. }) in &self.shown {
            let (level, tube) = (level.name(), if tube.is_empty() { "server" } else { tube });
            push(text, format_args!("{level:8}  {tube:names$}  {what:texts$}  {remedy}\n"));
        }
        if self.count > self.shown.len() as u64 {
            push(text, format_args!("and {} more\n", self.count - self.shown.len() as u64));
        }
    }

    /// Writes the member of an object.
    pub fn write_json(&self, text: &mut String) {
        text.push_str("\"attention\":[");
        for (index, (tube, Problem { level, rule, text: what, remedy })) in
            self.shown.iter().enumerate()
        {
            let separator = if index == 0 { "\n" } else { ",\n" };
            let tube =
                if tube.is_empty() { "null".to_owned() } else { format!("\"{}\"", JsonText(tube)) };
            let (level, what, remedy) = (level.name(), JsonText(what), JsonText(remedy));
            push(
                text,
                format_args!(
                    "{separator}{{\"level\":\"{level}\",\"rule\":\"{rule}\",\"tube\":{tube},\
                     \"text\":\"{what}\",\"remedy\":\"{remedy}\"}}"
                ),
            );
        }
        text.push_str("],\n");
    }
}
