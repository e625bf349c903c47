//! Conversations: a text file to requests and expectations, and received bytes to lines that are
//! compared with them. `tests/conversations/README.md` describes the form.

use super::driver::Settings;
use super::reply::{Frame, frame};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A whole conversation.
#[derive(Clone)]
pub struct Script {
    pub name: String,
    pub path: PathBuf,
    /// Flags for the server, as they were written.
    options: Vec<String>,
    /// The server keeps a binlog.
    pub has_binlog: bool,
    /// C beanstalkd is not played this one.
    pub skips_c: bool,
    /// With their numbers in the file.
    pub lines: Vec<(usize, Line)>,
}

/// One step. A restart ends the server in good order, or kills it, and starts it again.
#[derive(Clone)]
pub enum Line {
    Send { client: String, bytes: Vec<u8> },
    Expect { client: String, expectation: Expectation },
    ExpectNothing { client: String },
    HalfClose { client: String },
    HangUp { client: String },
    Drain,
    Restart { is_crash: bool },
    Advance { span: Duration },
}

/// What one received line must be.
#[derive(Clone)]
pub struct Expectation {
    ours: String,
    /// The reply of C beanstalkd if it differs: of all versions, or only of 1.12.
    c: Option<String>,
    c_1_12: Option<String>,
}

/// How a closed connection is written.
pub const CLOSED: &str = "<closed>";
/// Written where a client must have received nothing.
const NOTHING: &str = "<nothing>";
/// A line or body without bytes.
const EMPTY: &str = "\"\"";
/// Stands between two lines that are sent or received.
const SEPARATOR: &str = " | ";

/// A result of parsing: what is wrong is printed with the place in the file.
type Parsed<T> = Result<T, &'static str>;

/// All conversations, in the order of their names.
pub fn all() -> Vec<Script> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conversations");
    let entries = std::fs::read_dir(&directory).expect("the scripts are there");
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be read").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txt"));
    paths.sort();
    assert!(!paths.is_empty(), "there are no scripts");
    paths.iter().map(|path| Script::read(path)).collect()
}

impl Script {
    fn read(path: &Path) -> Script {
        let text = std::fs::read_to_string(path).expect("a script can be read");
        let name = path.file_stem().expect("it has a name").to_string_lossy().into_owned();
        let path = path.strip_prefix(env!("CARGO_MANIFEST_DIR")).unwrap_or(path).to_owned();
        let mut script = Script {
            name,
            path,
            options: Vec::new(),
            has_binlog: false,
            skips_c: false,
            lines: Vec::new(),
        };
        let mut group = None;
        for (index, text) in text.lines().enumerate() {
            let lines = script.parse(text, &mut group).unwrap_or_else(|why| {
                panic!("{}:{}: {why}: {text}", script.path.display(), index + 1)
            });
            script.lines.extend(lines.into_iter().map(|line| (index + 1, line)));
        }
        script
    }

    /// Returns the lines that one line of the file stands for. `group` has the client of the group
    /// above and its replies as they are written.
    fn parse(&mut self, text: &str, group: &mut Option<(String, String)>) -> Parsed<Vec<Line>> {
        let unindented = text.trim_start();
        if unindented.is_empty() || unindented.starts_with('#') {
            return Ok(Vec::new());
        }
        if unindented.len() < text.len() {
            let (client, replies) = group.as_ref().ok_or("indented, but not in a group")?;
            let exchange = |line| exchange(client, ">", &format!("{line} => {replies}"));
            let lines: Parsed<Vec<_>> = unindented.split(SEPARATOR).map(exchange).collect();
            return Ok(lines?.concat());
        }
        let group_above = group.take();
        if let Some(directive) = text.strip_prefix("! ") {
            return Ok(self.directive(directive)?.into_iter().collect());
        }
        if let Some(span) = text.strip_prefix('+') {
            return Ok(vec![Line::Advance { span: parse_span(span).ok_or("no span of time")? }]);
        }
        let (head, text) = text.split_once(' ').ok_or("no such line")?;
        let end = head.find(|char: char| !char.is_ascii_lowercase()).ok_or("no such line")?;
        let (name, sign) = head.split_at(end);
        let client = name.to_owned();
        match sign {
            _ if name.is_empty() => Err("no client"),
            ">" | ">>" => exchange(name, sign, text),
            "<" => replies(name, text),
            "=" => {
                *group = Some((client, text.to_owned()));
                Ok(Vec::new())
            }
            "<c" | "<12" if group_above.is_some() => Err("a group has no alternative"),
            "<c" | "<12" => self.add_alternative(name, sign, text),
            "!" if text == "half-close" => Ok(vec![Line::HalfClose { client }]),
            "!" if text == "hang-up" => Ok(vec![Line::HangUp { client }]),
            _ => Err("no such line"),
        }
    }

    fn directive(&mut self, directive: &str) -> Parsed<Option<Line>> {
        let (word, rest) = directive.split_once(' ').unwrap_or((directive, ""));
        match word {
            "options" => self.options.extend(rest.split_whitespace().map(str::to_owned)),
            "skip" if rest.starts_with("c ") => self.skips_c = true,
            "binlog" => self.has_binlog = true,
            "restart" | "crash" if self.has_binlog => {
                return Ok(Some(Line::Restart { is_crash: word == "crash" }));
            }
            "drain" => return Ok(Some(Line::Drain)),
            _ => return Err("no such directive"),
        }
        Ok(None)
    }

    fn add_alternative(&mut self, client: &str, sign: &str, text: &str) -> Parsed<Vec<Line>> {
        match self.lines.last_mut() {
            Some((_, Line::Expect { client: last, expectation })) if last == client => {
                let of_c = if sign == "<c" { &mut expectation.c } else { &mut expectation.c_1_12 };
                *of_c = Some(escape(&bytes_of(text)?));
                Ok(Vec::new())
            }
            _ => Err("no reply to the same client just above"),
        }
    }

    pub fn options(&self) -> Vec<&str> {
        self.options.iter().map(String::as_str).collect()
    }

    /// Returns what the flags mean to the core, which has none.
    pub fn settings(&self, mut settings: Settings) -> Settings {
        let mut options = self.options().into_iter();
        while let Some(flag) = options.next() {
            let value = options.next().unwrap_or_default();
            match flag {
                "-s" => settings.binlog_file_size = value.parse().expect("a size is a number"),
                "-z" => settings.max_job_size = value.parse().expect("a size is a number"),
                "--bury-after" => settings.bury_after = value.parse().ok(),
                _ => panic!("{}: the core cannot be given {flag}", self.path.display()),
            }
        }
        settings
    }
}

/// What is sent, with its replies if they stand behind it.
fn exchange(client: &str, sign: &str, text: &str) -> Parsed<Vec<Line>> {
    let (sent, replied) = match text.split_once(" => ") {
        Some((sent, replied)) => (sent, replies(client, replied)?),
        None => (text, Vec::new()),
    };
    let bytes = if sign == ">" {
        let lines: Parsed<Vec<_>> = sent.split(SEPARATOR).map(bytes_of).collect();
        lines?.iter().flat_map(|line| [line, &b"\r\n"[..]].concat()).collect()
    } else {
        bytes_of(sent)?
    };
    let send = Line::Send { client: client.to_owned(), bytes };
    Ok([send].into_iter().chain(replied).collect())
}

fn replies(client: &str, text: &str) -> Parsed<Vec<Line>> {
    let reply = |text: &str| {
        let client = client.to_owned();
        if text == NOTHING {
            return Ok(Line::ExpectNothing { client });
        }
        // Written forms are compared, and each byte has only one.
        let ours = escape(&bytes_of(text)?);
        Ok(Line::Expect { client, expectation: Expectation { ours, c: None, c_1_12: None } })
    };
    text.split(SEPARATOR).map(reply).collect()
}

impl Expectation {
    /// Compares it with the line that `receive` gets.
    pub fn check(
        &self,
        c_version: Option<&str>,
        receive: impl FnOnce() -> String,
    ) -> Result<(), String> {
        let expected = match c_version {
            None => &self.ours,
            Some(version) => {
                let for_1_12 = self.c_1_12.as_ref().filter(|_| version == "1.12");
                for_1_12.or(self.c.as_ref()).unwrap_or(&self.ours)
            }
        };
        let received = receive();
        if matches(expected, &received) {
            return Ok(());
        }
        Err(format!("\n  expected {expected}\n  received {received}"))
    }
}

/// Whether `text` is `pattern`, in which `...` stands for anything.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, mut pattern)) = pattern.split_once("...") else { return pattern == text };
    let Some(mut text) = text.strip_prefix(first) else { return false };
    while let Some((part, rest)) = pattern.split_once("...") {
        let Some(at) = text.find(part) else { return false };
        text = &text[at + part.len()..];
        pattern = rest;
    }
    text.ends_with(pattern)
}

/// Returns a received line with the values that a server without a binlog sends. Only documents have
/// such values.
pub fn without_binlog(line: &str) -> String {
    const KEYS: [&str; 4] =
        [" file: ", "binlog-oldest-index: ", "binlog-current-index: ", "binlog-records-written: "];
    let mut text = line.to_owned();
    for key in KEYS.into_iter().filter(|_| line.starts_with("OK ")) {
        let mut parts = text.split(key);
        let mut changed = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let rest = part.trim_start_matches(|char: char| char.is_ascii_digit());
            changed += &format!("{key}0{rest}");
        }
        text = changed;
    }
    text
}

/// Received bytes that were not compared yet.
#[derive(Default)]
pub struct Inbox {
    bytes: Vec<u8>,
    /// The lines of a reply that has been taken out of the bytes, in their written form.
    lines: VecDeque<String>,
}

impl Inbox {
    pub fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.lines.is_empty()
    }

    pub fn check_empty(&self) -> Result<(), String> {
        if self.is_empty() {
            return Ok(());
        }
        Err(format!("\n  expected nothing\n  received {}", self.rest()))
    }

    /// Returns what has been received, in its written form.
    pub fn rest(&self) -> String {
        let lines = self.lines.iter().map(|line| format!("{line}\\r\\n"));
        lines.chain([escape(&self.bytes)]).collect()
    }

    /// Takes the next line of a whole reply: its first line, or its body. A document is part of
    /// the first line.
    pub fn next_line(&mut self) -> Option<String> {
        if self.lines.is_empty() {
            let Frame { line, body, len } = frame(&self.bytes)?;
            let mut line = escape(line);
            match body {
                Some(document) if line.starts_with("OK ") => {
                    // A document that does not end with LF keeps the difference.
                    let text = document.strip_suffix(b"\n").map(escape);
                    let text = text.unwrap_or_else(|| escape(document) + "\\r\\n");
                    line += &format!(" {}", text.replace("\\n", " "));
                    self.lines.push_back(line);
                }
                _ => self.lines.extend([line].into_iter().chain(body.map(escape))),
            }
            self.bytes.drain(..len);
        }
        self.lines.pop_front()
    }
}

fn parse_span(text: &str) -> Option<Duration> {
    if let Some(millis) = text.strip_suffix("ms") {
        return millis.parse().ok().map(Duration::from_millis);
    }
    let seconds: f64 = text.strip_suffix('s')?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// Returns the bytes of a line or piece.
fn bytes_of(text: &str) -> Parsed<Vec<u8>> {
    if text == EMPTY {
        return Ok(Vec::new());
    }
    if text.is_empty() || text.starts_with(' ') || text.ends_with(' ') {
        return Err("no text or a space at its end, which are written \"\" and \\x20");
    }
    if text.split(' ').any(|word| word == "|" || word == "=>") {
        return Err("a | or => that separates nothing; in a text they are \\x7c and \\x3d>");
    }
    unescape(text)
}

/// Bytes with a letter as their written form.
const LETTERS: [(u8, char); 5] =
    [(b'\r', 'r'), (b'\n', 'n'), (b'\t', 't'), (0, '0'), (b'\\', '\\')];

/// In bytes.
const LONGEST_REPETITION: usize = 2 << 20;

/// From bytes to their written form.
pub fn escape(bytes: &[u8]) -> String {
    let mut text = String::new();
    for &byte in bytes {
        match LETTERS.iter().find(|(escaped, _)| *escaped == byte) {
            Some((_, letter)) => text.extend(['\\', *letter]),
            None if matches!(byte, b' '..=b'~') => text.push(char::from(byte)),
            None => text.push_str(&format!("\\x{byte:02x}")),
        }
    }
    text
}

/// From a written form to bytes.
pub fn unescape(text: &str) -> Parsed<Vec<u8>> {
    const BAD: &str = "no such written form of a byte";
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some((plain, form)) = rest.split_once('\\') {
        bytes.extend_from_slice(plain.as_bytes());
        let letter = form.chars().next().ok_or(BAD)?;
        rest = &form[letter.len_utf8()..];
        match letter {
            'x' => {
                let (digits, after) = rest.split_at_checked(2).ok_or(BAD)?;
                bytes.push(u8::from_str_radix(digits, 16).map_err(|_| BAD)?);
                rest = after;
            }
            '(' => {
                let (inside, after) = rest.split_once(')').ok_or(BAD)?;
                let (count, repeated) = inside.split_once('*').ok_or(BAD)?;
                let (count, repeated): (usize, _) =
                    (count.parse().map_err(|_| BAD)?, unescape(repeated)?);
                let len =
                    repeated.len().checked_mul(count).filter(|&len| len <= LONGEST_REPETITION);
                len.ok_or(BAD)?;
                bytes.extend(repeated.repeat(count));
                rest = after;
            }
            _ => {
                let known = LETTERS.iter().find(|(_, known)| *known == letter);
                bytes.push(known.ok_or(BAD)?.0);
            }
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    Ok(bytes)
}
