//! Conversations: a text file to requests and expectations, and received bytes to lines that are
//! compared with them. `tests/conversations/README.md` describes the form.

use super::reply::{Frame, frame};
use beanstalkd::testing::Settings;
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

#[derive(Clone)]
pub enum Line {
    Send {
        client: String,
        bytes: Vec<u8>,
    },
    Expect {
        client: String,
        expectation: Expectation,
    },
    ExpectNothing {
        client: String,
    },
    HalfClose {
        client: String,
    },
    HangUp {
        client: String,
    },
    Drain,
    /// The server ends and is started again: in good order, or killed.
    Restart {
        is_crash: bool,
    },
    Advance {
        span: Duration,
    },
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
        for (index, line) in text.lines().enumerate() {
            if let Err(why) = script.add(index + 1, line) {
                panic!("{}:{}: {why}: {line}", script.path.display(), index + 1);
            }
        }
        script
    }

    fn add(&mut self, number: usize, text: &str) -> Result<(), &'static str> {
        if text.is_empty() || text.starts_with('#') {
            return Ok(());
        }
        if let Some(directive) = text.strip_prefix("! ") {
            return self.add_directive(number, directive);
        }
        if let Some(span) = text.strip_prefix('+') {
            let line = Line::Advance { span: parse_span(span).ok_or("no span of time")? };
            self.lines.push((number, line));
            return Ok(());
        }
        let end = text.find(|char: char| !char.is_ascii_lowercase()).ok_or("no client")?;
        let (client, rest) = text.split_at(end);
        let client = client.to_owned();
        if client.is_empty() {
            return Err("no client");
        }
        let (sign, text) = rest.split_once(' ').unwrap_or((rest, ""));
        let line = match sign {
            ">" => Line::Send { client, bytes: [&unescape(text)?, &b"\r\n"[..]].concat() },
            ">>" => Line::Send { client, bytes: unescape(text)? },
            "<" => {
                // Written forms are compared, and each byte has only one.
                let expectation = Expectation { ours: normal_form(text)?, c: None, c_1_12: None };
                Line::Expect { client, expectation }
            }
            "<-" => Line::ExpectNothing { client },
            "<c" | "<12" => return self.add_alternative(&client, sign, text),
            "!" if text == "half-close" => Line::HalfClose { client },
            "!" if text == "hang-up" => Line::HangUp { client },
            _ => return Err("no such line"),
        };
        self.lines.push((number, line));
        Ok(())
    }

    fn add_directive(&mut self, number: usize, directive: &str) -> Result<(), &'static str> {
        let (word, rest) = directive.split_once(' ').unwrap_or((directive, ""));
        match word {
            "options" => self.options.extend(rest.split_whitespace().map(str::to_owned)),
            "skip" if rest.starts_with("c ") => self.skips_c = true,
            "binlog" => self.has_binlog = true,
            "restart" if self.has_binlog => {
                self.lines.push((number, Line::Restart { is_crash: false }));
            }
            "crash" if self.has_binlog => {
                self.lines.push((number, Line::Restart { is_crash: true }));
            }
            "drain" => self.lines.push((number, Line::Drain)),
            _ => return Err("no such directive"),
        }
        Ok(())
    }

    fn add_alternative(
        &mut self,
        client: &str,
        sign: &str,
        text: &str,
    ) -> Result<(), &'static str> {
        match self.lines.last_mut() {
            Some((_, Line::Expect { client: last, expectation })) if last == client => {
                let alternative =
                    if sign == "<c" { &mut expectation.c } else { &mut expectation.c_1_12 };
                *alternative = Some(normal_form(text)?);
                Ok(())
            }
            _ => Err("no line of the same client just above"),
        }
    }

    /// Flags for the server.
    pub fn options(&self) -> Vec<&str> {
        self.options.iter().map(String::as_str).collect()
    }

    /// What the flags mean to the engine, which has none.
    pub fn settings(&self) -> Settings {
        let mut settings = Settings { binlog_file_size: 10_485_760, ..Settings::DEFAULT };
        let mut options = self.options().into_iter();
        while let Some(flag) = options.next() {
            let value = options.next().unwrap_or_default();
            match flag {
                "-z" => settings.max_job_size = value.parse().expect("a size is a number"),
                "--bury-after" => settings.bury_after = value.parse().ok(),
                _ => panic!("{}: the engine cannot be given {flag}", self.path.display()),
            }
        }
        settings
    }
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

/// The one written form of what `text` writes.
fn normal_form(text: &str) -> Result<String, &'static str> {
    Ok(escape(&unescape(text)?))
}

/// From bytes to their written form.
fn escape(bytes: &[u8]) -> String {
    let mut text = String::new();
    for &byte in bytes {
        match byte {
            b'\r' => text.push_str("\\r"),
            b'\n' => text.push_str("\\n"),
            b'\t' => text.push_str("\\t"),
            0 => text.push_str("\\0"),
            b'\\' => text.push_str("\\\\"),
            b' '..=b'~' => text.push(char::from(byte)),
            _ => text.push_str(&format!("\\x{byte:02x}")),
        }
    }
    text
}

/// From a written form to bytes.
fn unescape(text: &str) -> Result<Vec<u8>, &'static str> {
    const BAD: &str = "no such written form of a byte";
    let mut bytes = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        bytes.extend_from_slice(&rest.as_bytes()[..at]);
        let form = &rest[at + 1..];
        let used = match form.as_bytes() {
            [letter @ (b'r' | b'n' | b't' | b'0' | b'\\'), ..] => {
                let byte = match letter {
                    b'r' => b'\r',
                    b'n' => b'\n',
                    b't' => b'\t',
                    b'0' => 0,
                    _ => b'\\',
                };
                bytes.push(byte);
                1
            }
            [b'x', ..] => {
                let digits = form.get(1..3).ok_or(BAD)?;
                bytes.push(u8::from_str_radix(digits, 16).map_err(|_| BAD)?);
                3
            }
            [b'(', ..] => {
                let (count, repeated) = form[1..]
                    .split_once(')')
                    .and_then(|(inside, _)| inside.split_once('*'))
                    .ok_or(BAD)?;
                let count: usize = count.parse().map_err(|_| BAD)?;
                bytes.extend(unescape(repeated)?.repeat(count));
                form.find(')').ok_or(BAD)? + 1
            }
            _ => return Err(BAD),
        };
        rest = &form[used..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    Ok(bytes)
}
