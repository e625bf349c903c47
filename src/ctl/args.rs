//! Command lines: words and options to numbers, names and times. It must not know a server.

use super::conn::Place;
use super::{COMMANDS, Command, Ctl, EXIT_USAGE};
use crate::engine::text::is_tube_name;
use crate::os::failure::Failure;
use getopts::{Matches, ParsingStyle};
use std::ffi::OsString;
use std::time::Duration;

/// What a command line asks for.
pub enum Request {
    /// Print this text.
    Print(String),
    /// Run a command.
    Run(&'static Command, Ctl, Args),
}

/// The words after the command, and the options of some commands.
pub struct Args {
    pub words: Vec<String>,
    matches: Matches,
}

/// The options of the command line, in the form of getopts: a letter, a name, its argument, help. Those
/// without help are described with their commands.
const OPTIONS: [(&str, &str, &str, &str); 25] = [
    ("s", "server", "SERVER", "HOST[:PORT] or unix:PATH ($BEANSTALKD)"),
    ("", "json", "", "print one JSON object a line"),
    ("n", "dry-run", "", "print what would happen, and change nothing"),
    ("", "yes", "", "do not ask"),
    ("", "timeout", "SECS", "time to connect, and for each reply (5 s)"),
    ("h", "help", "", "print this help"),
    ("v", "version", "", "print the version"),
    ("", "state", "S", ""),
    ("", "after", "ID", ""),
    ("", "limit", "N", ""),
    ("", "body", "", ""),
    ("", "all", "", ""),
    ("", "delayed", "", ""),
    ("", "buried", "", ""),
    ("", "held", "", ""),
    ("", "within", "TIME", ""),
    ("", "take", "", ""),
    ("", "tube", "T", ""),
    ("", "jobs", "N", ""),
    ("", "connections", "N", ""),
    ("", "size", "S", ""),
    ("", "pri", "N", ""),
    ("", "delay", "T", ""),
    ("", "ttr", "T", ""),
    ("", "key", "K", ""),
];

/// The first of [`OPTIONS`], which all commands have.
const COMMON: usize = 7;

const DEFAULT_SERVER: &str = "127.0.0.1:11300";
const DEFAULT_PORT: &str = "11300";

/// Returns the failure of a usage error, with the line that helps.
pub fn usage_error(message: &str) -> Failure {
    Failure::new(EXIT_USAGE, format!("{message}\nTry 'beanstalkctl --help'."))
}

/// Parses the arguments after the program's name.
pub fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Request, Failure> {
    let mut options = getopts::Options::new();
    options.parsing_style(ParsingStyle::FloatingFrees);
    for (short, long, argument, _) in OPTIONS {
        match argument {
            "" => options.optflag(short, long, ""),
            _ => options.optopt(short, long, "", argument),
        };
    }
    let arguments: Vec<OsString> = arguments.collect();
    let matches = options.parse(arguments).map_err(|error| usage_error(&error.to_string()))?;
    if matches.opt_present("help") {
        return Ok(Request::Print(help()));
    }
    if matches.opt_present("version") {
        return Ok(Request::Print(format!("beanstalkctl {}", env!("CARGO_PKG_VERSION"))));
    }
    let mut words = matches.free.clone().into_iter();
    let name = words.next().ok_or_else(|| usage_error("no command"))?;
    let command = COMMANDS.iter().find(|command| command.name == name);
    let command = command.ok_or_else(|| usage_error(&format!("unknown command: {name}")))?;
    let args = Args { words: words.collect(), matches };
    let (least, most) = command.words;
    if !(least..=most).contains(&args.words.len()) {
        return Err(usage_error(&format!("use: beanstalkctl {name} {}", command.usage)));
    }
    for (_, option, ..) in &OPTIONS[COMMON..] {
        if args.has(option) && !command.options.contains(option) {
            return Err(usage_error(&format!("{name} has no option --{option}")));
        }
    }
    let ctl = common(&args)?;
    Ok(Request::Run(command, ctl, args))
}

/// Returns what the options of all commands say.
fn common(args: &Args) -> Result<Ctl, Failure> {
    let from_environment = || std::env::var("BEANSTALKD").ok().filter(|text| !text.is_empty());
    let server = args.matches.opt_str("server").or_else(from_environment);
    let address = address(server.as_deref().unwrap_or(DEFAULT_SERVER));
    let timeout = match args.time("timeout")?.unwrap_or(5) {
        0 => return Err(usage_error("--timeout 0: at least 1 s")),
        secs => Duration::from_secs(secs.into()),
    };
    Ok(Ctl {
        server: Some(address.clone()).filter(|address| address != DEFAULT_SERVER),
        place: Place { address, timeout },
        is_json: args.has("json"),
        is_dry_run: args.has("dry-run"),
        is_confirmed: args.has("yes"),
    })
}

/// Adds the default port to an address without one. An IPv6 address with a port is in brackets.
fn address(text: &str) -> String {
    let has_port = match text.rsplit_once(':') {
        _ if text.starts_with("unix:") => true,
        Some((host, _)) => !host.contains(':') || host.ends_with(']'),
        None => false,
    };
    match has_port {
        true => text.to_owned(),
        false if text.contains(':') && !text.starts_with('[') => format!("[{text}]:{DEFAULT_PORT}"),
        false => format!("{text}:{DEFAULT_PORT}"),
    }
}

fn help() -> String {
    let mut text = "Use: beanstalkctl [OPTIONS] COMMAND ...\n\nCommands:\n".to_string();
    for Command { name, usage, help, .. } in &COMMANDS {
        let line = format!("{name} {usage}");
        text += &match line.len() {
            0..28 => format!("  {line:28} {help}\n"),
            _ => format!("  {line}\n  {:28} {help}\n", ""),
        };
    }
    text += "\nOptions, before or after the command:\n";
    for (short, long, argument, help) in &OPTIONS[..COMMON] {
        let short = if short.is_empty() { String::new() } else { format!("-{short}, ") };
        text += &format!("  {:28} {help}\n", format!("{short}--{long} {argument}"));
    }
    text + "\nTimes: 90, 90s, 15m, 2h. States: ready, reserved, delayed, buried, any.\n\
        Exit codes: 0 done, 1 not found or partly done, 2 usage or not confirmed,\n\
        3 no connection or no reply, 4 the server refused."
}

impl Args {
    /// Returns whether the option is there.
    pub fn has(&self, option: &str) -> bool {
        self.matches.opt_present(option)
    }

    /// Returns the argument of an option.
    pub fn text(&self, option: &str) -> Option<String> {
        self.matches.opt_str(option)
    }

    /// Returns the number that an option has.
    pub fn number<N: std::str::FromStr>(&self, option: &str) -> Result<Option<N>, Failure> {
        self.parsed(option, "not a number", |text| digits(text)?.parse().ok())
    }

    /// Returns the seconds that an option has.
    pub fn time(&self, option: &str) -> Result<Option<u32>, Failure> {
        self.parsed(option, "not a time, such as 90, 90s, 15m or 2h", seconds)
    }

    /// Returns the name of a tube that an option has.
    pub fn tube(&self, option: &str) -> Result<Option<String>, Failure> {
        self.text(option).map(|name| tube(&name).map(str::to_owned)).transpose()
    }

    /// Returns the state that `--state` has.
    pub fn state(&self, default: &'static str) -> Result<&'static str, Failure> {
        const STATES: [&str; 6] = ["ready", "reserved", "delayed", "buried", "any", "held"];
        let state =
            self.parsed("state", "not ready, reserved, delayed, buried or any", |text| {
                STATES.into_iter().find(|state| *state == text)
            })?;
        Ok(state.map_or(default, |state| if state == "held" { "reserved" } else { state }))
    }

    /// Returns the words from an index on as ids of jobs.
    pub fn ids(&self, from: usize) -> Result<Vec<u64>, Failure> {
        self.words[from..].iter().map(|word| id(word)).collect()
    }

    fn parsed<T>(
        &self,
        option: &str,
        wanted: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, Failure> {
        let wrong = |text: &str| usage_error(&format!("--{option} {text}: {wanted}"));
        let parse = |text: String| parse(&text).ok_or_else(|| wrong(&text));
        self.text(option).map(parse).transpose()
    }
}

/// Returns `text` if it is a valid name of a tube.
pub fn tube(text: &str) -> Result<&str, Failure> {
    let is_valid = is_tube_name(text.as_bytes());
    if is_valid { Ok(text) } else { Err(usage_error(&format!("{text}: not a name of a tube"))) }
}

/// Returns the id of a job.
pub fn id(text: &str) -> Result<u64, Failure> {
    let id = digits(text).and_then(|text| text.parse().ok());
    id.ok_or_else(|| usage_error(&format!("{text}: not the id of a job")))
}

/// Returns the seconds of a time such as `90`, `90s`, `15m` or `2h`.
pub fn seconds(text: &str) -> Option<u32> {
    let (number, unit) = match text.as_bytes().last()? {
        b's' => (&text[..text.len() - 1], 1),
        b'm' => (&text[..text.len() - 1], 60),
        b'h' => (&text[..text.len() - 1], 3600),
        _ => (text, 1),
    };
    digits(number)?.parse::<u32>().ok()?.checked_mul(unit)
}

/// Returns `text` if it consists of digits: a sign is no part of a number.
fn digits(text: &str) -> Option<&str> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then_some(text)
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
            ("1d", None),
            ("2000000h", None),
            ("4294967296", None),
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
            assert_eq!(address(text), full);
        }
    }
}
