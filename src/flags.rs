//! Flags of command lines, those of the server and of `beanstalkctl`: how they are described, parsed and read. It
//! knows none of them.

use getopts::{Fail, Matches, Options, ParsingStyle};
use std::ffi::OsString;
use std::net::Ipv6Addr;
use std::str::FromStr;

/// The flags and the other words of a command line.
pub struct Flags {
    pub words: Vec<String>,
    matches: Matches,
}

/// Why a command line is not valid.
pub struct UsageError(pub String);

/// Returns a parser of flags. A line describes each: its names, its argument if it has one, and its help.
pub fn parser<'l>(lines: impl Iterator<Item = &'l str>) -> Options {
    let mut parser = Options::new();
    parser.parsing_style(ParsingStyle::FloatingFrees);
    for line in lines {
        let (names, help) = line.split_once(": ").expect("each flag has a help");
        let (mut short, mut long, mut argument) = ("", "", "");
        for word in names.split(' ') {
            match (word.strip_prefix("--"), word.strip_prefix('-')) {
                (Some(name), _) => long = name,
                (None, Some(name)) => short = name,
                (None, None) => argument = word,
            }
        }
        // The last one of several flags counts, as in C; getopts calls that "multi".
        match argument {
            "" => parser.optflagmulti(short, long, help),
            _ => parser.optmulti(short, long, help, argument),
        };
    }
    parser
}

impl Flags {
    /// Parses the arguments after the program's name.
    pub fn parse(
        parser: &Options,
        arguments: impl IntoIterator<Item = OsString>,
    ) -> Result<Flags, UsageError> {
        let arguments = arguments.into_iter().map(OsString::into_string);
        let not_text = |argument: OsString| format!("not UTF-8: {}", argument.display());
        let arguments: Result<Vec<String>, String> =
            arguments.map(|argument| argument.map_err(not_text)).collect();
        let parsed = arguments.and_then(|all| parser.parse(all).map_err(|error| describe(&error)));
        let matches = parsed.map_err(UsageError)?;
        Ok(Flags { words: matches.free.clone(), matches })
    }

    pub fn has(&self, flag: &str) -> bool {
        self.matches.opt_present(flag)
    }

    pub fn count(&self, flag: &str) -> usize {
        self.matches.opt_count(flag)
    }

    /// Returns the argument of a flag, the last one if it is repeated.
    pub fn text(&self, flag: &str) -> Option<String> {
        self.matches.opt_strs(flag).pop()
    }

    /// Returns whether the flag comes after the last one of another. In one word the flag with an argument is the last.
    pub fn is_last(&self, flag: &str, other: &str) -> bool {
        let last = |flag| self.matches.opt_positions(flag).last().copied();
        last(flag) >= last(other)
    }

    /// Returns the parsed argument of a flag, the last one if it is repeated. The error names what is `expected`.
    pub fn value<T>(
        &self,
        flag: &str,
        expected: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, UsageError> {
        let mut value = None;
        for text in self.matches.opt_strs(flag) {
            value = parse(&text);
            if value.is_none() {
                let message = format!("{}{flag} {text}: not {expected}", dashes(flag));
                return Err(UsageError(message));
            }
        }
        Ok(value)
    }

    pub fn number<N: FromStr>(&self, flag: &str) -> Result<Option<N>, UsageError> {
        self.value(flag, "a number in range", number)
    }

    /// Returns a size in bytes.
    pub fn size(&self, flag: &str) -> Result<Option<u64>, UsageError> {
        self.value(flag, A_SIZE, size)
    }
}

/// What is expected of a size.
pub const A_SIZE: &str = "a size, such as 65535, 64K or 1M";

/// Returns the number of bytes that `text` is, or of KiB, MiB or GiB with a suffix.
pub fn size(text: &str) -> Option<u64> {
    let (digits, bytes) = split_unit(text, &[('K', 1 << 10), ('M', 1 << 20), ('G', 1 << 30)]);
    number::<u64>(digits)?.checked_mul(bytes.into())
}

/// Returns what stands before the unit at the end of `text`, and what the unit stands for: 1 without one.
pub fn split_unit<'t>(text: &'t str, units: &[(char, u32)]) -> (&'t str, u32) {
    let with_unit = |&(unit, number)| Some((text.strip_suffix(unit)?, number));
    units.iter().find_map(with_unit).unwrap_or((text, 1))
}

/// Returns the number that `text` is: digits, without a sign.
pub fn number<N: FromStr>(text: &str) -> Option<N> {
    // `FromStr` would take a sign too.
    text.parse().ok().filter(|_| is_digits(text))
}

/// Returns whether `text` is digits, at least one.
pub fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns an address with this port, unless it has one: `HOST`, `HOST:PORT`, or an IPv6 address, which is in brackets
/// before a port. Returns `None` for what is no address.
pub fn with_port(text: &str, default: u16) -> Option<String> {
    if text.parse::<Ipv6Addr>().is_ok() {
        return Some(format!("[{text}]:{default}"));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !text.ends_with(']') => (host, number(port)?),
        _ => (text, default),
    };
    let (name, others) = match host.strip_prefix('[').and_then(|it| it.strip_suffix(']')) {
        Some(literal) => (literal, ":.%"),
        None => (host, "-_."),
    };
    let is_valid = |char: char| char.is_ascii_alphanumeric() || others.contains(char);
    (port > 0 && !name.is_empty() && name.chars().all(is_valid)).then(|| format!("{host}:{port}"))
}

fn dashes(flag: &str) -> &'static str {
    if flag.chars().count() == 1 { "-" } else { "--" }
}

fn describe(error: &Fail) -> String {
    let (what, name) = match error {
        Fail::UnrecognizedOption(name) => ("unknown flag", name),
        Fail::ArgumentMissing(name) => ("flag requires an argument", name),
        Fail::UnexpectedArgument(name) => ("flag takes no argument", name),
        Fail::OptionMissing(_) | Fail::OptionDuplicated(_) => return error.to_string(),
    };
    format!("{what}: {}{name}", dashes(name))
}

impl From<UsageError> for String {
    fn from(UsageError(message): UsageError) -> String {
        message
    }
}
