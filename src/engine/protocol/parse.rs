//! Command lines: how long they may be, and their arguments.
//!
//! Parsing needs no jobs or connections. It accepts and rejects exactly the lines that C beanstalkd
//! accepts and rejects, because clients depend on how it parses malformed lines. The only exceptions
//! are the commands that C beanstalkd does not have, and the key of a unique job.

use crate::engine::binlog::record::JobState;
use crate::engine::text::{self, is_tube_name};
use memchr::memchr;

/// The kind of one argument of a command, or of several that belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    /// A number between these two.
    Number { least: u64, most: u64 },
    /// A number up to this one, or nothing for 0.
    Optional { most: u64 },
    /// The name of a tube, which is the rest of the line.
    LastTube,
    /// The name of a tube up to the next space.
    Tube,
    /// The name of a tube, or nothing for an empty one.
    OptionalTube,
    /// A state of jobs.
    State,
    /// A number as C's `strtoul` parses it.
    Bound,
    /// The name of a tube and seconds, as C beanstalkd parses them for `pause-tube`.
    Pause,
    /// Ids up to the end of the line.
    Ids,
    /// Nothing, or the key of a unique job, which the handler parses.
    Tag,
    /// Bytes that are ignored.
    Anything,
}

/// The id of a job: 64 bits.
pub const ID: Argument = Argument::Number { least: 0, most: u64::MAX };
/// A number of 32 bits.
pub const NUMBER: Argument = Argument::Number { least: 0, most: u32::MAX as u64 };
/// Seconds: 31 bits.
pub const SECONDS: Argument = Argument::Number { least: 0, most: i32::MAX as u64 };
/// A number of jobs from 1 to [`BATCH_MAX`].
pub const COUNT: Argument = Argument::Number { least: 1, most: BATCH_MAX as u64 };
/// An id, or nothing for 0.
pub const OPTIONAL_ID: Argument = Argument::Optional { most: u64::MAX };
/// Seconds, or nothing for 0.
pub const OPTIONAL_SECONDS: Argument = Argument::Optional { most: i32::MAX as u64 };

/// The arguments of a command.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    numbers: [u64; 4],
    /// The name of a tube; empty if the name for `pause-tube` is invalid, which is counted before it is
    /// rejected.
    pub tube: &'a str,
    /// `None` for all states.
    pub state: Option<JobState>,
    /// The bytes after these, for [`Argument::Ids`] and [`Argument::Tag`].
    pub rest: Rest<'a>,
}

/// What follows the length of the body in a put.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tags<'a> {
    /// The key of a unique job, and for how many seconds it is kept after the delete of the job.
    pub unique: Option<KeyTag<'a>>,
    /// The key of a group, and how many of its jobs may be reserved.
    pub con: Option<KeyTag<'a>>,
}

/// A key, as long as, and with the bytes of, the name of a tube; and a number.
pub type KeyTag<'a> = (&'a [u8], u32);

/// The maximum length of a command line with its CR LF, in bytes.
pub const COMMAND_LINE_MAX: usize = 224;
/// The maximum length of a `delete-batch` line with its CR LF, in bytes. A line with 1,000 ids of 20
/// digits has 21,014.
const DELETE_BATCH_LINE_MAX: usize = 21_015;
/// The maximum length of a `put` or `put-in-tube` line with `idp:`, and of the line of a page, with its CR LF, in
/// bytes. A line with a tube and a key of 200 bytes each and the largest numbers has 474.
const NAMES_LINE_MAX: usize = 512;
/// The maximum length of a `put` or `put-in-tube` line with `con:`. One with both keys has at most 690 bytes.
pub const TAGGED_LINE_MAX: usize = 720;
/// The maximum number of jobs in a batch, or of jobs or clients in a page.
pub const BATCH_MAX: usize = 1000;

/// The words before the key of a unique job, and before that of a group.
const UNIQUE_WORD: &[u8] = b"idp:";
const CON_WORD: &[u8] = b"con:";

/// Returns the maximum length of a line with these arguments and its CR LF, in bytes. That of a put depends on its
/// tags: [`Rest::tags_line_max`].
pub const fn line_max(arguments: &[Argument]) -> usize {
    match arguments {
        [.., Argument::Tag] => TAGGED_LINE_MAX,
        [Argument::Ids] => DELETE_BATCH_LINE_MAX,
        [Argument::Tube, Argument::State, ..] | [.., Argument::OptionalTube] => NAMES_LINE_MAX,
        _ => COMMAND_LINE_MAX,
    }
}

impl<'a> Args<'a> {
    const NONE: Args<'static> = Args { numbers: [0; 4], tube: "", state: None, rest: Rest(b"") };

    /// Parses the numbers after the word of a command that needs nothing else, and returns the bytes behind them.
    /// Returns `None` if it needs more, or if these are no such numbers.
    #[inline]
    pub fn of_numbers(kinds: &[Argument], bytes: &'a [u8]) -> Option<(Args<'a>, &'a [u8])> {
        let (mut args, mut rest) = (Args::NONE, Rest(bytes));
        let mut numbers = args.numbers.iter_mut();
        // These may be nothing.
        for kind in
            kinds.iter().take_while(|kind| !matches!(kind, Argument::Tag | Argument::Anything))
        {
            let &Argument::Number { least, most } = kind else { return None };
            *numbers.next()? = rest.number(least, most)?;
        }
        Some((args, rest.0))
    }

    /// Parses the bytes after the word of a command. Returns `None` if they are not these arguments.
    #[inline]
    pub fn parse(kinds: &[Argument], line: &'a [u8]) -> Option<Args<'a>> {
        let mut rest = Rest(line);
        let mut args = Args::NONE;
        let mut numbers = args.numbers.iter_mut();
        for kind in kinds {
            let number = match kind {
                Argument::Optional { .. } if rest.0.is_empty() => 0,
                &Argument::Optional { most } => rest.number(0, most)?,
                &Argument::Number { least, most } => rest.number(least, most)?,
                Argument::Bound => rest.like_strtoul()?.into(),
                Argument::Pause => {
                    args.tube = rest.name_prefix()?;
                    rest.number(0, u32::MAX.into())?
                }
                Argument::LastTube => {
                    args.tube = std::mem::take(&mut rest).name()?;
                    continue;
                }
                Argument::OptionalTube if rest.0.is_empty() => continue,
                Argument::OptionalTube if !rest.0.starts_with(b" ") => return None,
                Argument::Tube | Argument::OptionalTube => {
                    args.tube = rest.tube()?;
                    continue;
                }
                Argument::State => {
                    args.state = rest.state()?;
                    continue;
                }
                Argument::Ids => {
                    args.rest = std::mem::take(&mut rest).ids()?;
                    continue;
                }
                Argument::Tag => {
                    args.rest = std::mem::take(&mut rest).without_nul()?;
                    continue;
                }
                Argument::Anything => {
                    std::mem::take(&mut rest).without_nul()?;
                    continue;
                }
            };
            *numbers.next()? = number;
        }
        rest.0.is_empty().then_some(args)
    }

    /// Returns the id that is the first number.
    pub fn id(&self) -> u64 {
        self.numbers[0]
    }

    /// Returns the number at this index, of a kind with at most 32 bits.
    #[expect(clippy::cast_possible_truncation, reason = "the kind of the argument has 32 bits")]
    pub fn number(&self, index: usize) -> u32 {
        self.numbers[index] as u32
    }

    /// Returns the number of jobs that is the first number.
    pub fn count(&self) -> usize {
        self.number(0) as usize
    }

    /// Returns the second number, which is an id.
    pub fn second_id(&self) -> u64 {
        self.numbers[1]
    }
}

/// Parses `<key>` or `<key>:<number>`.
fn key_tag(tag: &[u8], default: u32) -> Option<KeyTag<'_>> {
    let (key, rest) = tag.split_at(text::name_prefix_len(tag)?);
    let [b':', number @ ..] = rest else {
        return rest.is_empty().then_some((key, default));
    };
    let mut number = Rest(number);
    let parsed = u32::try_from(number.digits()?).ok()?;
    number.0.is_empty().then_some((key, parsed))
}

/// The bytes of a line that are not parsed yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    pub fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    /// Returns the rest if it contains no NUL. A NUL anywhere in a line is BAD_FORMAT. No word, number or
    /// name contains one, so only the bytes that are not parsed are searched for it.
    fn without_nul(self) -> Option<Rest<'a>> {
        memchr(0, self.0).is_none().then_some(self)
    }

    fn name(self) -> Option<&'a str> {
        // All bytes of a name are ASCII.
        is_tube_name(self.0).then(|| str::from_utf8(self.0).ok()).flatten()
    }

    /// Parses any number of spaces, then the name of a tube up to the next space.
    fn tube(&mut self) -> Option<&'a str> {
        Rest(self.word()).name()
    }

    /// Parses any number of spaces, then the bytes up to the next space.
    fn word(&mut self) -> &'a [u8] {
        self.skip_spaces();
        let end = memchr(b' ', self.0).unwrap_or(self.0.len());
        let (word, rest) = self.0.split_at(end);
        self.0 = rest;
        word
    }

    // Quirk: the space between the word and the name is optional; pinned by
    // tests/conversations/prefix-matching.txt.
    fn name_prefix(&mut self) -> Option<&'a str> {
        self.skip_spaces();
        let end = self.0.iter().position(|&byte| !text::is_name_byte(byte)).unwrap_or(self.0.len());
        let (name, rest) = self.0.split_at(end);
        self.0 = rest;
        (!name.is_empty()).then(|| Rest(name).name().unwrap_or(""))
    }

    /// Parses the name of a state, or `any`.
    fn state(&mut self) -> Option<Option<JobState>> {
        let word = self.word();
        if word == b"any" {
            return Some(None);
        }
        let states = [JobState::Ready, JobState::Reserved, JobState::Delayed, JobState::Buried];
        states.into_iter().find(|state| state.name().as_bytes() == word).map(Some)
    }

    /// Returns the maximum length of a put with this behind its numbers and its CR LF, in bytes.
    #[cold]
    pub fn tags_line_max(mut self) -> usize {
        self.skip_spaces();
        if ![UNIQUE_WORD, CON_WORD].iter().any(|word| self.0.starts_with(word)) {
            return COMMAND_LINE_MAX;
        }
        let has_con = self.0.windows(CON_WORD.len()).any(|word| word == CON_WORD);
        if has_con { TAGGED_LINE_MAX } else { NAMES_LINE_MAX }
    }

    /// Parses `idp:<key>[:<ttl>]` and `con:<key>[:<limit>]`, each once and in any order, with at least one
    /// space before each.
    #[cold]
    pub fn tags(mut self) -> Option<Tags<'a>> {
        let mut tags = Tags::default();
        while !self.0.is_empty() {
            self.0.starts_with(b" ").then_some(())?;
            let word = self.word();
            if let Some(tag) = word.strip_prefix(UNIQUE_WORD) {
                let is_first = tags.unique.replace(key_tag(tag, 0)?).is_none();
                is_first.then_some(())?;
            } else {
                let tag = key_tag(word.strip_prefix(CON_WORD)?, 1)?;
                // No job of a group with the limit 0 could ever be reserved.
                (tag.1 > 0 && tags.con.replace(tag).is_none()).then_some(())?;
            }
        }
        Some(tags)
    }

    /// Returns the rest if it has ids up to its end. [`Rest::next`] returns each.
    fn ids(self) -> Option<Rest<'a>> {
        let mut rest = self;
        let mut count = 0;
        while !rest.0.is_empty() {
            rest.u64()?;
            count += 1;
        }
        (1..=BATCH_MAX).contains(&count).then_some(self)
    }

    #[inline]
    fn number(&mut self, least: u64, most: u64) -> Option<u64> {
        self.u64().filter(|number| (least..=most).contains(number))
    }

    /// Parses any number of spaces, then digits.
    #[inline]
    fn u64(&mut self) -> Option<u64> {
        self.skip_spaces();
        self.digits()
    }

    fn skip_spaces(&mut self) {
        while let [b' ', rest @ ..] = self.0 {
            self.0 = rest;
        }
    }

    /// Parses one or more digits, or returns `None` if the number overflows.
    fn digits(&mut self) -> Option<u64> {
        let (bytes, mut number) = (self.0, 0u64);
        while let [digit @ b'0'..=b'9', rest @ ..] = self.0 {
            number = number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'));
            self.0 = rest;
        }
        match bytes.len() - self.0.len() {
            0 => None,
            // Too few digits to overflow.
            1..20 => Some(number),
            len => str::from_utf8(&bytes[..len]).ok()?.parse().ok(),
        }
    }

    /// Parses a number like C's `strtoul`: white space, a sign, digits, then arbitrary bytes. The
    /// number is truncated to 32 bits, as in C beanstalkd.
    // Quirk: pinned by tests/conversations/kick-strtoul.txt.
    #[expect(clippy::cast_possible_truncation, reason = "C beanstalkd truncates the number")]
    fn like_strtoul(&mut self) -> Option<u32> {
        const VERTICAL_TAB: u8 = 0x0b;
        while let [b' ' | b'\t' | b'\n' | VERTICAL_TAB | b'\x0c' | b'\r', rest @ ..] = self.0 {
            self.0 = rest;
        }
        let (negative, rest) = match self.0 {
            [b'-', rest @ ..] => (true, rest),
            [b'+', rest @ ..] => (false, rest),
            rest => (false, rest),
        };
        *self = Rest(rest);
        let number = self.digits()?;
        std::mem::take(self).without_nul()?;
        Some(if negative { number.wrapping_neg() } else { number } as u32)
    }
}

impl Iterator for Rest<'_> {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.u64()
    }
}

/// The length of the version at the end of the first line of an HTTP request, in bytes.
const HTTP_VERSION_LEN: usize = b" HTTP/1.1".len();

/// The last bytes of a line, which show whether it is the first line of an HTTP request.
#[derive(Clone, Copy, Debug, Default)]
pub struct LineTail([u8; HTTP_VERSION_LEN]);

impl LineTail {
    /// Appends `bytes` to the line.
    pub fn add(&mut self, bytes: &[u8]) {
        let added = &bytes[bytes.len().saturating_sub(HTTP_VERSION_LEN)..];
        self.0.copy_within(added.len().., 0);
        self.0[HTTP_VERSION_LEN - added.len()..].copy_from_slice(added);
    }

    /// Returns whether the line, which must not be a valid command, is the first line of an HTTP
    /// request. A web page can make a browser send requests to hosts that only the browser can
    /// reach. The lines after the first one would be executed as commands.
    ///
    /// Valid commands need no check. A page can choose the method, even a command word. The target
    /// after it starts with `/` or `http:`, and the version follows: neither is a number, and
    /// together they are no tube name. Only `quit` is valid with them, and closes the connection.
    /// No browser sends `kick 1 HTTP/1.1`, which is a valid command as in C.
    pub fn is_http(self) -> bool {
        matches!(self.0, [b' ', b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9'])
    }
}

impl From<&[u8]> for LineTail {
    fn from(line: &[u8]) -> LineTail {
        let mut tail = LineTail::default();
        tail.add(line);
        tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::text::CR_LF;
    use Argument::{Anything, Bound, LastTube, Pause, Tag, Tube};

    const COUNT_AND_SECONDS: [Argument; 2] = [COUNT, OPTIONAL_SECONDS];

    #[test]
    fn arguments_are_those_of_c_beanstalkd() {
        let put = [NUMBER, NUMBER, NUMBER, NUMBER, Tag];
        let longest = "a".repeat(200);
        let too_long = format!("{longest}a");
        let good: &[(&[Argument], &str, [u64; 4], &str)] = &[
            (&put, "1 2 3 4", [1, 2, 3, 4], ""),
            (&put, "  1  2   3    4294967295 x", [1, 2, 3, 4_294_967_295], ""),
            (&[ID], "18446744073709551615", [u64::MAX, 0, 0, 0], ""),
            (&[Bound], " \t-1x", [4_294_967_295, 0, 0, 0], ""),
            (&[Bound], "4294967297", [1, 0, 0, 0], ""),
            (&COUNT_AND_SECONDS, "1000", [1000, 0, 0, 0], ""),
            (&COUNT_AND_SECONDS, "1 2147483647", [1, 2_147_483_647, 0, 0], ""),
            (&[SECONDS, Anything], "5 x", [5, 0, 0, 0], ""),
            (&[SECONDS, Anything], "5", [5, 0, 0, 0], ""),
            (&[Pause], "a 5", [5, 0, 0, 0], "a"),
            (&[Pause], "-a 5", [5, 0, 0, 0], ""),
            (&[LastTube], &longest, [0; 4], &longest),
            (&[LastTube], "az09-+/;.$_()", [0; 4], "az09-+/;.$_()"),
            (&[Tube, ID], "  a 7", [7, 0, 0, 0], "a"),
        ];
        let full_line = |line: &str| format!("{line}\r\n");
        let mut in_one_pass = 0;
        for (kinds, line, numbers, tube) in good {
            let args = Args::parse(kinds, line.as_bytes()).unwrap_or_else(|| panic!("{line}"));
            assert_eq!((args.numbers, args.tube), (*numbers, *tube), "{line}");
            let line = full_line(line);
            if let Some((args, b"\r\n")) = Args::of_numbers(kinds, line.as_bytes()) {
                assert_eq!((args.numbers, args.tube), (*numbers, ""), "{line}");
                in_one_pass += 1;
            }
        }
        assert_eq!(in_one_pass, 3, "lines whose arguments are numbers alone");
        let bad: &[(&[Argument], &str)] = &[
            (&put, "1 2 3"),
            (&put, "4294967296 2 3 4"),
            (&put, "-1 2 3 4"),
            (&put, "1 +2 3 4"),
            (&put, "1 2 3 4 x\0"),
            (&[ID], "18446744073709551616"),
            (&[ID], "1 "),
            (&[ID], "\t1"),
            (&[], "x"),
            (&[Bound], "x"),
            (&[Bound], "1\0"),
            (&COUNT_AND_SECONDS, "0"),
            (&COUNT_AND_SECONDS, "1001"),
            (&COUNT_AND_SECONDS, "1 2147483648"),
            (&[Argument::Ids], ""),
            (&[Argument::Ids], "1 x"),
            (&[Anything], "\0"),
            (&[Pause], " 5"),
            (&[Pause], "a 5 "),
            (&[LastTube], ""),
            (&[LastTube], "-a"),
            (&[LastTube], " a"),
            (&[LastTube], "a b"),
            (&[LastTube], "\u{e9}"),
            (&[LastTube], &too_long),
        ];
        for (kinds, line) in bad {
            assert!(Args::parse(kinds, line.as_bytes()).is_none(), "{}", line.escape_debug());
            let line = full_line(line);
            let rest = Args::of_numbers(kinds, line.as_bytes()).map(|(_, rest)| rest);
            assert_ne!(rest, Some(CR_LF), "{}", line.escape_debug());
        }
    }

    #[test]
    fn a_tag_of_a_put_has_a_key_and_a_number() {
        let longest = "k".repeat(200);
        let (tag, too_long) = (format!(" idp:{longest}:5"), format!(" idp:{longest}k"));
        for (tag, key, ttl_secs) in [
            (" idp:a", "a", 0),
            ("   idp:Az09-+/;.$_():007", "Az09-+/;.$_()", 7),
            (" idp:a:4294967295", "a", u32::MAX),
            (&tag, &longest, 5),
        ] {
            let unique = Some((key.as_bytes(), ttl_secs));
            let expected = Tags { unique, con: None };
            assert_eq!(Rest(tag.as_bytes()).tags(), Some(expected), "{tag}");
            if ttl_secs > 0 {
                let tag = tag.replace("idp:", "con:");
                let expected = Tags { unique: None, con: unique };
                assert_eq!(Rest(tag.as_bytes()).tags(), Some(expected), "{tag}");
            }
        }
        let bad = "idp:a| | idp:| idp::5| idp:a:| idp:a: 5| idp:a:+5| idp:a:-1| idp:a:5x| \
            idp:a:4294967296| idp:a:5:6| idp:-a| idp:a,b| idp:a | idp:a idp:b| idp: a| IDP:a| id:a| x| \
            con:| con:a:0| con:a con:a| con:a:1:2| con:a idp:b con:c| con:a  | con:,";
        for tag in bad.split('|').skip(1).chain(["\tidp:a", &too_long]) {
            assert_eq!(Rest(tag.as_bytes()).tags(), None, "{tag}");
        }
        let (unique, con) = ((&b"a"[..], 5), (&b"b"[..], 1));
        for tags in [" idp:a:5 con:b", "  con:b:1   idp:a:5"] {
            let expected = Tags { unique: Some(unique), con: Some(con) };
            assert_eq!(Rest(tags.as_bytes()).tags(), Some(expected), "{tags}");
        }
    }
}
