//! What needs attention in a tube and in the server: the rules, as a pure function for the status page
//! and `beanstalkctl`. It must not know where the facts come from, nor how a problem is printed.

use crate::engine::text::{CountOf, Grouped, largest_unit};
use crate::engine::time::Nanos;
use std::borrow::Cow;

/// The urgency of a problem, from the least to the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// An operator has caused it and knows of it.
    Notice,
    /// An operator should act during the day.
    Warning,
    /// An operator should act now.
    Critical,
}

/// The facts of a tube.
#[derive(Clone, Copy, Debug, Default)]
pub struct TubeFacts {
    /// The number of ready jobs.
    pub ready: u64,
    /// The number of reserved jobs.
    pub held: u64,
    /// The number of buried jobs.
    pub buried: u64,
    /// The job that was buried first, if it is known.
    pub first_buried: Option<u64>,
    /// The number of connections that watch it.
    pub watching: u64,
    /// The number of connections that wait for a job of it.
    pub waiting: u64,
    /// Age minus delay of the oldest ready job.
    pub oldest: Nanos,
    /// The rest of its pause; zero if it is not paused.
    pub pause_left: Nanos,
    /// Whether one of its jobs was deleted in the last 5 s.
    pub has_recent_delete: bool,
    /// The number of reservations that ended in the last 5 to 10 minutes; 0 if it is not known.
    pub reservations_ended: u64,
    /// The number of these that failed.
    pub reservations_failed: u64,
}

/// The facts of the server.
#[derive(Clone, Copy, Debug, Default)]
pub struct ServerFacts {
    /// Whether the binlog rejects new jobs.
    pub is_binlog_full: bool,
    /// Whether etcd has not acknowledged a change for more than a second.
    pub is_stalled: bool,
    /// The number of connections.
    pub connections: usize,
    /// The limit of connections, if there is one.
    pub max_connections: Option<usize>,
    /// The memory of jobs, in bytes.
    pub memory: u64,
    /// The limit of that memory, if there is one.
    pub max_memory: Option<u64>,
    /// Whether no connection can be accepted, for want of files or memory.
    pub is_accept_failing: bool,
    /// Whether puts are rejected.
    pub is_draining: bool,
}

/// A problem of a tube, or of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Its urgency.
    pub level: Level,
    /// The name of the rule.
    pub rule: &'static str,
    /// One line of text for people.
    pub text: String,
    /// The command line that helps; empty if none does.
    pub remedy: String,
}

impl Level {
    /// Returns its name.
    pub fn name(self) -> &'static str {
        ["notice", "warning", "critical"][self as usize]
    }
}

/// Returns the problems of the tube `name`, the worst first. `server` is the argument of `-s` for the remedies,
/// `None` for the default server.
pub fn of_tube(name: &str, tube: &TubeFacts, server: Option<&str>) -> Vec<Problem> {
    let &TubeFacts { ready, buried, reservations_ended: ended, .. } = tube;
    let mut problems = Vec::new();
    let mut add = |level, rule, text, command: &str| {
        let remedy = remedy(command, Some(name), server);
        problems.push(Problem { level, rule, text, remedy });
    };
    let pause_left = tube.pause_left.whole_secs();
    let is_given_out = ready > 0 && tube.pause_left == Nanos::ZERO;
    let waited = if is_given_out { tube.oldest.whole_secs() } else { 0 };
    let wait = || {
        let verb = if ready == 1 { "waits" } else { "wait" };
        format!("{} {verb}, the oldest for {}", CountOf(ready, "job"), span(waited))
    };
    if waited >= 60 && tube.watching == 0 {
        let text = format!("{}; no worker watches", wait());
        add(Level::Critical, "no-worker", text, "workers");
    } else if waited >= 60 && tube.waiting == 0 && tube.held == 0 && !tube.has_recent_delete {
        let workers = CountOf(tube.watching, "worker");
        let text = format!("{}; of {workers} none waits or holds a job", wait());
        add(Level::Warning, "stuck", text, "workers");
    } else if waited >= 900 {
        add(Level::Warning, "slow", wait(), "workers");
    }
    let failed = tube.reservations_failed;
    if failed >= 5 && failed * 10 >= ended {
        let level = if failed * 2 >= ended { Level::Critical } else { Level::Warning };
        let [failed, ended] = [failed, ended].map(Grouped);
        let text = format!("{failed} of {ended} reservations failed in the last 10 min");
        // Its buried jobs show why. A TTR that ends, or a lost connection, leaves none.
        add(level, "failing", text, if buried > 0 { "failed" } else { "workers" });
    }
    if buried > 0 {
        let first = tube.first_buried.map(|id| format!(", the first is job {id}"));
        let text = format!("{} buried{}", Grouped(buried), first.unwrap_or_default());
        add(Level::Warning, "buried", text, "failed");
    }
    if tube.pause_left > Nanos::ZERO && ready > 0 {
        let text = format!("{} ready, paused for another {}", Grouped(ready), span(pause_left));
        add(Level::Notice, "paused", text, "resume");
    }
    // A stable sort: rules of one level stay in the order of the table.
    problems.sort_by_key(|problem| std::cmp::Reverse(problem.level));
    problems
}

/// Returns the problems of the server, the worst first.
pub fn of_server(facts: &ServerFacts, server: Option<&str>) -> Vec<Problem> {
    let &ServerFacts { connections, memory, .. } = facts;
    let mut problems = Vec::new();
    let mut add = |level, text: String, command: &str| {
        let is_none = command.is_empty();
        let remedy = if is_none { String::new() } else { remedy(command, None, server) };
        problems.push(Problem { level, rule: "server", text, remedy });
    };
    if facts.is_binlog_full {
        let text = "the binlog is full: puts are rejected with OUT_OF_MEMORY".into();
        // It shows which tubes grow.
        add(Level::Critical, text, "top");
    }
    if facts.is_stalled {
        let text = "etcd has not stored a change for more than 1 s: replies wait".into();
        add(Level::Critical, text, "");
    }
    if let Some(limit) = facts.max_connections.filter(|&limit| connections >= limit) {
        let text =
            format!("all {} connections are in use: new clients wait", Grouped(limit as u64));
        // The tool waits for a connection too.
        add(Level::Critical, text, "workers --timeout 1m");
    }
    if facts.is_accept_failing {
        let text =
            format!("cannot accept more than {connections} connections: out of files or memory");
        add(Level::Critical, text, "workers --timeout 1m");
    }
    if let Some(limit) = facts.max_memory.filter(|limit| memory / 9 > limit / 10) {
        let percent = memory.saturating_mul(100) / limit.max(1);
        add(Level::Warning, format!("{percent}% of the memory for jobs is in use"), "top");
    }
    if facts.is_draining {
        add(Level::Warning, "draining: puts are rejected until SIGUSR2".into(), "");
    }
    problems
}

/// Returns a command line of `beanstalkctl`.
fn remedy(command: &str, tube: Option<&str>, server: Option<&str>) -> String {
    let server = server.map(|server| format!("-s {} ", shell_word(server))).unwrap_or_default();
    let tube = tube.map(|tube| format!(" {}", shell_word(tube))).unwrap_or_default();
    format!("beanstalkctl {server}{command}{tube}")
}

/// Returns `text` as one word of a shell, in quotes if a shell could interpret it: names of tubes may
/// contain `;`, `$` and parentheses.
pub fn shell_word(text: &str) -> Cow<'_, str> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-+/._:".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        Cow::Borrowed(text)
    } else {
        Cow::Owned(format!("'{}'", text.replace('\'', r"'\''")))
    }
}

/// Returns a time in its largest unit of which there are two.
fn span(secs: u64) -> String {
    let (number, unit) = largest_unit(secs);
    format!("{number} {}", ["s", "min", "h", "days"][unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns level, rule and text of each problem.
    fn told(problems: &[Problem]) -> Vec<String> {
        let line = |p: &Problem| format!("{} {}: {}", p.level.name(), p.rule, p.text);
        problems.iter().map(line).collect()
    }

    fn mail() -> TubeFacts {
        TubeFacts { ready: 7, oldest: Nanos::from_secs(1200), ..TubeFacts::default() }
    }

    #[test]
    fn each_rule_holds_at_its_bound_and_not_below() {
        let watched = TubeFacts { watching: 2, ..mail() };
        const NO_WORKER: &str =
            "critical no-worker: 7 jobs wait, the oldest for 20 min; no worker watches";
        const SLOW: &str = "warning slow: 7 jobs wait, the oldest for 20 min";
        let failing = |ended, failed| TubeFacts {
            reservations_ended: ended,
            reservations_failed: failed,
            ..TubeFacts::default()
        };
        let cases: Vec<(TubeFacts, &[&str])> = vec![
            (TubeFacts::default(), &[]),
            (mail(), &[NO_WORKER]),
            (
                TubeFacts { ready: 1, oldest: Nanos::from_secs(60), ..mail() },
                &["critical no-worker: 1 job waits, the oldest for 60 s; no worker watches"],
            ),
            (TubeFacts { oldest: Nanos::from_secs(59), ..mail() }, &[]),
            (TubeFacts { ready: 0, ..mail() }, &[]),
            (
                TubeFacts { oldest: Nanos::from_secs(60), ..watched },
                &[
                    "warning stuck: 7 jobs wait, the oldest for 60 s; of 2 workers none waits or holds a job",
                ],
            ),
            (TubeFacts { oldest: Nanos::from_secs(59), ..watched }, &[]),
            (TubeFacts { oldest: Nanos::from_secs(60), waiting: 1, ..watched }, &[]),
            (TubeFacts { oldest: Nanos::from_secs(60), held: 1, ..watched }, &[]),
            (TubeFacts { oldest: Nanos::from_secs(60), has_recent_delete: true, ..watched }, &[]),
            (TubeFacts { held: 1, ..watched }, &[SLOW]),
            (TubeFacts { held: 1, oldest: Nanos::from_secs(899), ..watched }, &[]),
            (
                TubeFacts { held: 1, oldest: Nanos::from_secs(900), ..watched },
                &["warning slow: 7 jobs wait, the oldest for 15 min"],
            ),
            (failing(40, 4), &[]),
            (failing(51, 5), &[]),
            (failing(50, 5), &["warning failing: 5 of 50 reservations failed in the last 10 min"]),
            (failing(13, 6), &["warning failing: 6 of 13 reservations failed in the last 10 min"]),
            (failing(12, 6), &["critical failing: 6 of 12 reservations failed in the last 10 min"]),
            (TubeFacts { buried: 12, ..TubeFacts::default() }, &["warning buried: 12 buried"]),
            (
                TubeFacts { buried: 12, first_buried: Some(17), ..TubeFacts::default() },
                &["warning buried: 12 buried, the first is job 17"],
            ),
            (
                TubeFacts { pause_left: Nanos::from_secs(540), ..mail() },
                &["notice paused: 7 ready, paused for another 9 min"],
            ),
            (TubeFacts { pause_left: Nanos::from_secs(540), ready: 0, ..mail() }, &[]),
            // The worst first.
            (
                TubeFacts { buried: 1, reservations_failed: 9, reservations_ended: 9, ..mail() },
                &[
                    NO_WORKER,
                    "critical failing: 9 of 9 reservations failed in the last 10 min",
                    "warning buried: 1 buried",
                ],
            ),
        ];
        for (facts, problems) in cases {
            assert_eq!(told(&of_tube("mail", &facts, None)), problems, "{facts:?}");
        }
    }

    #[test]
    fn the_server_has_its_own_rules() {
        let none = ServerFacts::default();
        let limits = ServerFacts { max_connections: Some(10), max_memory: Some(1000), ..none };
        let cases: [(ServerFacts, &[&str]); 8] = [
            (ServerFacts { connections: 9, memory: 900, ..limits }, &[]),
            (
                ServerFacts { is_stalled: true, ..none },
                &["critical server: etcd has not stored a change for more than 1 s: replies wait"],
            ),
            (
                ServerFacts { is_binlog_full: true, ..none },
                &["critical server: the binlog is full: puts are rejected with OUT_OF_MEMORY"],
            ),
            (
                ServerFacts { connections: 10, ..limits },
                &["critical server: all 10 connections are in use: new clients wait"],
            ),
            (
                ServerFacts { is_accept_failing: true, connections: 9, ..none },
                &["critical server: cannot accept more than 9 connections: out of files or memory"],
            ),
            (
                ServerFacts { memory: 910, ..limits },
                &["warning server: 91% of the memory for jobs is in use"],
            ),
            (
                ServerFacts { is_draining: true, ..none },
                &["warning server: draining: puts are rejected until SIGUSR2"],
            ),
            (ServerFacts { connections: 10, memory: 910, ..none }, &[]),
        ];
        for (facts, problems) in cases {
            assert_eq!(told(&of_server(&facts, None)), problems, "{facts:?}");
        }
    }

    #[test]
    fn remedies_are_safe_in_a_shell() {
        let of = |name, server| {
            let facts = TubeFacts { buried: 1, ..TubeFacts::default() };
            of_tube(name, &facts, server).remove(0).remedy
        };
        assert_eq!(of("bill", None), "beanstalkctl failed bill");
        assert_eq!(of("a;b", None), "beanstalkctl failed 'a;b'");
        assert_eq!(of("$(id)", None), "beanstalkctl failed '$(id)'");
        assert_eq!(
            of("a/b", Some("127.0.0.1:11301")),
            "beanstalkctl -s 127.0.0.1:11301 failed a/b"
        );
        assert_eq!(of("a", Some("unix:it's")), r"beanstalkctl -s 'unix:it'\''s' failed a");
        let none = ServerFacts::default();
        let full = ServerFacts { is_binlog_full: true, ..none };
        assert_eq!(of_server(&full, Some("[::1]:2"))[0].remedy, "beanstalkctl -s '[::1]:2' top");
        // No command of the tool helps.
        let draining = ServerFacts { is_draining: true, is_stalled: true, ..none };
        assert!(of_server(&draining, None).iter().all(|problem| problem.remedy.is_empty()));
    }
}
