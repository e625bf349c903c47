//! The form of a command line, as BEHAVIOUR.md, section 1, and EXTENSIONS.md describe it, without code of
//! the engine. [`COMMANDS`] and [`EXTENSIONS`] have one row for each command. The parser, the model
//! and the generator go by it.

use super::model::{COMMANDS, Call, Con, EXTENSIONS, JobKey, Model};

/// A row of the table.
#[derive(Debug)]
pub struct Command {
    pub word: &'static str,
    /// How often it is generated, relative to the others.
    pub weight: u32,
    pub arguments: &'static [Argument],
    /// Runs it in the model.
    pub run: Run,
}

pub type Run = fn(&mut Model, &Call<'_>, &Arguments);

/// What stands at a place of a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A tube, which other arguments follow or do not follow.
    Tube,
    LastTube,
    /// A tube, or nothing.
    AnyTube,
    /// A tube and a number of seconds. No space is required before and between them.
    Pause,
    /// Any job, a job that the client has reserved, or several jobs.
    Id,
    Held,
    Ids,
    Pri,
    Delay,
    Ttr,
    /// The length of a body, and the key of a unique job, if there is one.
    Len,
    Tag,
    /// A number of seconds. Anything may follow.
    Timeout,
    /// The same, or nothing.
    Wait,
    /// The number of jobs of a batch, of a page, and of a kick.
    BatchCount,
    PageCount,
    Bound,
    State,
    /// The id of a job or of a client before a page, or nothing.
    After,
    AfterClient,
    Anything,
}

/// The values of a command line. Its command uses some of them.
#[derive(Clone, Debug, Default)]
pub struct Arguments {
    pub tube: Option<String>,
    pub ids: Vec<u64>,
    pub pri: u32,
    pub delay: u32,
    pub ttr: u32,
    pub len: u32,
    pub tag: PutTag,
    pub count: usize,
    pub secs: Option<u32>,
    /// One of [`STATES`].
    pub state: &'static str,
    pub after: u64,
}

/// A line that is no command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    BadFormat,
    Unknown,
    /// The first line of an HTTP request.
    Http,
}

/// What follows the numbers of a put.
#[derive(Clone, Debug, Default)]
pub enum PutTag {
    #[default]
    None,
    Keys(Option<JobKey>, Option<Con>),
    Wrong,
}

/// The states of a page. The last one stands for all of them.
pub const STATES: [&str; 5] = ["ready", "reserved", "delayed", "buried", "any"];
/// The most jobs of a page or a batch.
pub const MAX_COUNT: usize = 1_000;

impl Arguments {
    pub fn tube(&self) -> &str {
        self.tube.as_deref().expect("the command has a tube")
    }
}

impl Command {
    pub const fn new(
        word: &'static str,
        weight: u32,
        arguments: &'static [Argument],
        run: Run,
    ) -> Command {
        Command { word, weight, arguments, run }
    }

    /// Returns what follows the word in a line, if the line has this command.
    fn rest_of<'l>(&self, line: &'l [u8]) -> Option<&'l [u8]> {
        let rest = line.strip_prefix(self.word.as_bytes())?;
        match self.arguments.first() {
            None | Some(Argument::Anything | Argument::Pause) => Some(rest),
            Some(_) => rest.strip_prefix(b" "),
        }
    }
}

pub fn commands() -> impl Iterator<Item = &'static Command> {
    COMMANDS.iter().chain(EXTENSIONS)
}

pub fn command_named(word: &str) -> &'static Command {
    commands().find(|command| command.word == word).expect("it is in the table")
}

/// Parses a line without its CR LF.
pub fn parse(line: &[u8]) -> Result<(&'static Command, Arguments), Malformed> {
    // Commands match by prefix.
    let matching = commands().filter_map(|command| Some((command, command.rest_of(line)?)));
    let longest = matching.max_by_key(|(command, _)| command.word.len());
    let malformed = match longest {
        _ if line.contains(&0) => Malformed::BadFormat,
        None => Malformed::Unknown,
        Some((command, rest)) => match Rest(rest).arguments(command) {
            Some(arguments) => return Ok((command, arguments)),
            None => Malformed::BadFormat,
        },
    };
    Err(if is_http(line) { Malformed::Http } else { malformed })
}

/// Returns whether a line that is no command is the first one of an HTTP request.
pub fn is_http(line: &[u8]) -> bool {
    let Some((_, end)) = line.split_last_chunk::<9>() else { return false };
    let are_digits = end[6].is_ascii_digit() && end[8].is_ascii_digit();
    end.starts_with(b" HTTP/") && are_digits && end[7] == b'.'
}

/// Returns whether a line is a put with a tag, right or wrong, which may be longer than others.
pub fn is_tagged_put(line: &[u8]) -> bool {
    let (rest, has_tube) = match line.strip_prefix(b"put ") {
        Some(rest) => (rest, false),
        None => (line.strip_prefix(b"put-in-tube ").unwrap_or_default(), true),
    };
    let mut rest = Rest(rest);
    let has_arguments =
        (!has_tube || rest.first_name().is_some()) && (0..4).all(|_| rest.u32().is_some());
    rest.spaces();
    has_arguments && (rest.0.starts_with(b"idp:") || rest.0.starts_with(b"con:"))
}

/// Parses a number like strtoul(3), truncated to 32 bits.
fn kick_bound(rest: Rest) -> Option<usize> {
    // The vertical tab is a blank in C, but not in Rust.
    let start = rest.0.iter().position(|byte| !byte.is_ascii_whitespace() && *byte != 11)?;
    let text = &rest.0[start..];
    let (is_negative, text) = match text.first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number: u64 = str::from_utf8(&text[..digits]).ok()?.parse().ok()?;
    let number = if is_negative { 0_u64.wrapping_sub(number) } else { number };
    usize::try_from(number & 0xffff_ffff).ok()
}

fn is_name_byte(byte: u8) -> bool {
    matches!(byte, b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9')
        || [b'-', b'+', b'/', b';', b'.', b'$', b'_', b'(', b')'].contains(&byte)
}

/// The rest of a line that has not been parsed.
#[derive(Clone, Copy)]
struct Rest<'l>(&'l [u8]);

impl<'l> Rest<'l> {
    fn arguments(mut self, command: &Command) -> Option<Arguments> {
        let mut it = Arguments::default();
        for argument in command.arguments {
            match argument {
                Argument::Tube => it.tube = Some(self.first_name()?),
                Argument::LastTube => it.tube = Some(self.take_all().name()?),
                Argument::Pause => (it.tube, it.secs) = self.pause()?,
                Argument::Id | Argument::Held => it.ids.push(self.u64()?),
                Argument::Ids => {
                    while it.ids.is_empty() || !self.0.is_empty() {
                        it.ids.push(self.u64()?);
                    }
                }
                Argument::Pri => it.pri = self.u32()?,
                Argument::Delay => it.delay = self.u32()?,
                Argument::Ttr => it.ttr = self.u32()?,
                Argument::Len => it.len = self.u32()?,
                Argument::Tag if self.0.is_empty() => {}
                Argument::Tag => it.tag = self.take_all().tags().unwrap_or(PutTag::Wrong),
                Argument::Timeout => {
                    it.secs = Some(self.timeout()?);
                    self.take_all();
                }
                Argument::Wait if self.0.is_empty() => it.secs = Some(0),
                Argument::Wait => it.secs = Some(self.timeout()?),
                Argument::BatchCount | Argument::PageCount => it.count = self.count()?,
                Argument::Bound => it.count = kick_bound(self.take_all())?,
                Argument::State => {
                    let word = self.word();
                    it.state = *STATES.iter().find(|state| state.as_bytes() == word.0)?;
                }
                Argument::AnyTube if self.0.is_empty() => {}
                Argument::AnyTube if self.0[0] != b' ' => return None,
                Argument::AnyTube => it.tube = Some(self.first_name()?),
                Argument::After | Argument::AfterClient if self.0.is_empty() => {}
                Argument::After | Argument::AfterClient => it.after = self.u64()?,
                Argument::Anything => _ = self.take_all(),
            }
        }
        (self.0.is_empty() && it.ids.len() <= MAX_COUNT).then_some(it)
    }

    fn count(&mut self) -> Option<usize> {
        let count = self.u32()? as usize;
        (1..=MAX_COUNT).contains(&count).then_some(count)
    }

    fn timeout(&mut self) -> Option<u32> {
        self.u32().filter(|&secs| secs < 1 << 31)
    }

    fn take_all(&mut self) -> Rest<'l> {
        Rest(std::mem::take(&mut self.0))
    }

    /// Takes the tube and the seconds of a `pause-tube`. A name that is not valid is `None`.
    fn pause(&mut self) -> Option<(Option<String>, Option<u32>)> {
        self.spaces();
        let len = self.0.iter().take_while(|&&byte| is_name_byte(byte)).count();
        let (name, rest) = self.0.split_at(len);
        self.0 = rest;
        let secs = self.u32()?;
        (len > 0).then(|| (Rest(name).name(), Some(secs)))
    }

    fn spaces(&mut self) {
        let count = self.0.iter().take_while(|&&byte| byte == b' ').count();
        self.0 = &self.0[count..];
    }

    fn u64(&mut self) -> Option<u64> {
        self.spaces();
        let count = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at(count);
        self.0 = rest;
        str::from_utf8(digits).ok()?.parse().ok()
    }

    fn u32(&mut self) -> Option<u32> {
        self.u64()?.try_into().ok()
    }

    /// Skips spaces, and takes the bytes up to the next one.
    fn word(&mut self) -> Rest<'l> {
        self.spaces();
        let count = self.0.iter().take_while(|&&byte| byte != b' ').count();
        let (word, rest) = self.0.split_at(count);
        self.0 = rest;
        Rest(word)
    }

    /// Takes spaces, keys and their numbers up to the end.
    fn tags(mut self) -> Option<PutTag> {
        let (mut unique, mut con) = (None, None);
        while !self.0.is_empty() {
            if self.0.first() != Some(&b' ') {
                return None;
            }
            let word = self.word();
            let (kind, tag) = word.0.split_at_checked(4)?;
            let words: Vec<&[u8]> = tag.split(|&byte| byte == b':').collect();
            let key = Rest(words[0]).name()?.into();
            let number: Option<u32> = match words[..] {
                [_] => None,
                [_, digits] if digits.iter().all(u8::is_ascii_digit) => {
                    Some(str::from_utf8(digits).ok()?.parse().ok()?)
                }
                _ => return None,
            };
            match kind {
                b"idp:" if unique.is_none() => {
                    let ttl = number.unwrap_or(0);
                    unique = Some(JobKey { key, ttl, is_unsure: false });
                }
                b"con:" if con.is_none() && number != Some(0) => {
                    con = Some(Con { key, limit: number.unwrap_or(1) });
                }
                _ => return None,
            }
        }
        Some(PutTag::Keys(unique, con))
    }

    /// Takes a tube name that other arguments follow.
    fn first_name(&mut self) -> Option<String> {
        self.word().name()
    }

    fn name(self) -> Option<String> {
        let is_name = (1..=200).contains(&self.0.len())
            && self.0[0] != b'-'
            && self.0.iter().all(|&byte| is_name_byte(byte));
        is_name.then(|| String::from_utf8_lossy(self.0).into_owned())
    }
}
