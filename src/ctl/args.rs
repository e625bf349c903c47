//! Command lines: which command runs, its options, names and times. It must not know a server.

use super::conn::Conn;
use super::look::STATES;
use super::work::Work;
use super::{COMMANDS, Command, Ctl, EXIT_USAGE, Result, print};
use crate::engine::text::is_tube_name;
use crate::engine::time::Nanos;
use crate::flags::{self, Flags, UsageError, is_digits, number};
use crate::options::DEFAULT_PORT;
use crate::os::failure::Failure;
use getopts::Options;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Display;

/// The options of all commands.
const OPTIONS: &str = "\
-s --server SERVER: HOST[:PORT] or unix:PATH ($BEANSTALKD)
--json: print one JSON object a line
-n --dry-run: print what would happen, and change nothing
--yes: do not ask
--timeout SECS: time to connect, and for each reply (5 s)
-h --help: print this help
-v --version: print the version";

const DEFAULT_SERVER: &str = "127.0.0.1";

/// What is expected of a time.
pub const A_TIME: &str = "a time, such as 90, 90s, 15m, 2h or 1d";

/// Returns the failure of a usage error, with the line that helps.
pub fn usage_error(message: impl Display) -> Failure {
    Failure::new(EXIT_USAGE, format!("{message}\nTry 'beanstalkctl --help'."))
}

impl From<UsageError> for Failure {
    fn from(UsageError(message): UsageError) -> Failure {
        usage_error(message)
    }
}

/// Returns the options in the usage of a command, each with the name of its argument, if it has one.
fn options(usage: &'static str) -> impl Iterator<Item = (&'static str, &'static str)> {
    let words = usage.split([' ', '|', '[', ']']);
    let next = words.clone().skip(1).chain([""]);
    words.zip(next).filter_map(|(word, next)| {
        let is_argument = next.starts_with(char::is_uppercase);
        Some((word.strip_prefix("--")?, if is_argument { next } else { "" }))
    })
}

/// Returns the options of all commands.
fn all_options() -> impl Iterator<Item = (&'static str, &'static str)> {
    COMMANDS.iter().flat_map(|command| options(command.0))
}

/// Returns a parser of the options of all commands.
fn parser() -> Options {
    let line = |(name, argument)| format!("--{name} {argument}: ");
    let lines: BTreeSet<String> = all_options().map(line).collect();
    flags::parser(OPTIONS.lines().chain(lines.iter().map(String::as_str)))
}

/// Runs what the arguments after the program's name ask for. Returns the exit code.
pub fn run(arguments: &[OsString]) -> Result<u8> {
    let mut args = Flags::parse(&parser(), arguments.to_vec())?;
    if args.has("help") {
        return print(help()).map(|()| 0);
    }
    if args.has("version") {
        return print(concat!("beanstalkctl ", env!("CARGO_PKG_VERSION"))).map(|()| 0);
    }
    let &(usage, _, _, _, done, run) = command(&mut args)?;
    let named = std::env::var("BEANSTALKD").ok().filter(|server| !server.is_empty());
    let source = if args.has("server") { "" } else { "$BEANSTALKD: " };
    let server = args.text("server").or(named).unwrap_or(DEFAULT_SERVER.into());
    let expected = "not a server, such as host:11300 or unix:PATH";
    let wrong = || usage_error(format_args!("{source}{server}: {expected}"));
    let address = address(&server).ok_or_else(wrong)?;
    let timeout = Nanos::from_secs(args.time("timeout")?.unwrap_or(5));
    if timeout == Nanos::ZERO {
        return Err(usage_error("--timeout 0: at least 1 s"));
    }
    let verb = usage.split(' ').next().unwrap_or_default();
    let mut ctl = Ctl {
        verb,
        done,
        conn: Conn::to(address, timeout),
        is_json: args.has("json"),
        is_dry_run: args.has("dry-run"),
        is_confirmed: args.has("yes"),
        work: Work::default(),
    };
    let ended = run(&mut ctl, &args);
    ctl.end(ended)
}

/// Returns the command with a name.
fn named(name: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.0.split(' ').next() == Some(name))
}

/// Returns whether the command of these arguments, which may not be valid, is `check`.
pub fn is_check(arguments: &[OsString]) -> bool {
    let parser = parser();
    let is_valid = |arguments: &[OsString]| Flags::parse(&parser, arguments.to_vec()).is_ok();
    // The argument of an option may have the name of a command.
    let is_value = |at| !is_valid(&arguments[at - 1..at]) && is_valid(&arguments[at - 1..=at]);
    let is_command = |at: &usize| {
        arguments[*at].to_str().and_then(named).is_some() && (*at == 0 || !is_value(*at))
    };
    (0..arguments.len()).find(is_command).is_some_and(|at| arguments[at] == "check")
}

/// Removes the name of the command from the words, and returns it. Its words must be as many as it
/// takes, and of the options that commands have, only its own are allowed.
fn command(args: &mut Flags) -> Result<&'static Command> {
    if args.words.is_empty() {
        return Err(usage_error("no command"));
    }
    let name = args.words.remove(0);
    let command =
        named(&name).ok_or_else(|| usage_error(format_args!("unknown command: {name}")))?;
    let &(usage, least, most, ..) = command;
    if !(least..=most).contains(&args.words.len()) {
        return Err(usage_error(format_args!("use: beanstalkctl {usage}")));
    }
    let is_own = |name: &str| options(usage).any(|own| own.0 == name);
    match all_options().find(|(other, _)| args.has(other) && !is_own(other)) {
        Some((other, _)) => Err(usage_error(format_args!("{name} has no option --{other}"))),
        None => Ok(command),
    }
}

/// Adds the default port to an address without one; `None` for what is no address.
fn address(text: &str) -> Option<String> {
    let is_path = text.starts_with("unix:");
    if is_path { Some(text.into()) } else { flags::with_port(text, DEFAULT_PORT) }
}

fn help() -> String {
    let mut text = "Use: beanstalkctl [OPTIONS] COMMAND ...\n\nCommands:\n".to_string();
    for (usage, _, _, help, ..) in COMMANDS {
        text += &match usage.len() {
            0..29 => format!("  {usage:28} {help}\n"),
            _ => format!("  {usage}\n  {:28} {help}\n", ""),
        };
    }
    flags::parser(OPTIONS.lines()).usage(text.trim_end())
        + "\nTimes: 90, 90s, 15m, 2h, 1d. States: ready, reserved, delayed, buried, any.\n\
           Exit codes: 0 done, 1 not found or partly done, 2 usage or not confirmed,\n\
           3 no connection or no reply, 4 the server refused."
}

impl Flags {
    /// Returns the seconds that an option has.
    pub fn time(&self, option: &str) -> Result<Option<u32>, UsageError> {
        self.value(option, A_TIME, seconds)
    }

    /// Returns the state of jobs that `--state` has.
    pub fn state(&self) -> Result<Option<&'static str>, UsageError> {
        self.value("state", "ready, reserved, delayed, buried or any", |text| {
            STATES.into_iter().chain(["any"]).find(|state| *state == text)
        })
    }

    /// Returns the words from an index on as ids of jobs, each once.
    pub fn ids(&self, from: usize) -> Result<Vec<u64>> {
        let mut ids: Vec<u64> =
            self.words[from..].iter().map(|word| id(word)).collect::<Result<_>>()?;
        let mut seen = BTreeSet::new();
        ids.retain(|&id| seen.insert(id));
        Ok(ids)
    }
}

/// Returns `text` if it is a valid name of a tube.
pub fn tube(text: &str) -> Result<&str> {
    let name = Some(text).filter(|text| is_tube_name(text.as_bytes()));
    name.ok_or_else(|| usage_error(format_args!("{text}: not a name of a tube")))
}

/// Returns the id of a job.
pub fn id(text: &str) -> Result<u64> {
    let id = number(text).filter(|&id| id > 0);
    id.ok_or_else(|| usage_error(format_args!("{text}: not the id of a job")))
}

/// Returns the seconds of a time such as `90`, `90s`, `15m`, `2h` or `1d`. A time with more than 32 bits of seconds is
/// the longest of the protocol.
pub fn seconds(text: &str) -> Option<u32> {
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 86_400)];
    let (digits, secs) = flags::split_unit(text, &units);
    is_digits(digits).then(|| number(digits).unwrap_or(u32::MAX).saturating_mul(secs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let times = [
            ("90", Some(90)),
            ("90s", Some(90)),
            ("15m", Some(900)),
            ("2h", Some(7200)),
            ("0", Some(0)),
            ("", None),
            ("m", None),
            ("+1", None),
            ("1d", Some(86_400)),
            ("1w", None),
            ("2000000h", Some(u32::MAX)),
            ("4294967296", Some(u32::MAX)),
            ("99999999999999999999", Some(u32::MAX)),
        ];
        for (text, secs) in times {
            assert_eq!(seconds(text), secs, "{text}");
        }
    }

    #[test]
    fn addresses_get_the_default_port() {
        let addresses = [
            ("localhost", "localhost:11300"),
            ("localhost:1", "localhost:1"),
            ("::1", "[::1]:11300"),
            ("[::1]", "[::1]:11300"),
            ("[::1]:1", "[::1]:1"),
            ("unix:/run/b", "unix:/run/b"),
        ];
        for (text, full) in addresses {
            assert_eq!(address(text).as_deref(), Some(full));
        }
        for text in ["localhost:", "localhost:65536", "http://localhost", ":", ":1", ""] {
            assert_eq!(address(text), None, "{text}");
        }
    }

    #[test]
    fn options_stand_in_the_usage() {
        let of = |usage| options(usage).collect::<Vec<_>>();
        let retry = [("all", ""), ("limit", "N"), ("delayed", "")];
        assert_eq!(of("retry ID...|TUBE --all|--limit N [--delayed]"), retry);
        assert_eq!(of("pause TUBE...|--all [TIME]"), [("all", "")]);
        assert_eq!(
            of("drain TUBE... [--held] [--within TIME]"),
            [("held", ""), ("within", "TIME")]
        );
    }
}
