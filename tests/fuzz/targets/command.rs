//! The parser of commands against a second parser that is slow, obvious and shares no code with it.
//! The other targets use the second parser to know the commands of a connection.

use beanstalkd::testing::{Command, Counter, Rejection, UniqueTag, command, text};

/// The result of the second parser.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reading {
    BadFormat,
    UnknownCommand,
    Command(Call),
}

/// A command and its arguments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Without the space that may be part of it.
    pub word: &'static str,
    pub numbers: Vec<u64>,
    pub tube: Option<Vec<u8>>,
    /// The state of the jobs of a page.
    pub state: Option<String>,
    /// What follows the numbers of a put.
    pub tag: Tag,
}

/// What follows the numbers of a put.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tag {
    #[default]
    None,
    /// The key of a unique job, and its seconds.
    Key(String, u32),
    /// Anything else.
    Wrong,
}

/// What a word takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    Nothing,
    Whatever,
    U32,
    U64,
    Timeout,
    Count,
    Name,
    NameAndU32,
    /// A name that more arguments follow.
    FirstName,
    State,
    /// A number of jobs.
    Jobs,
    /// These two may be missing, which is as 0.
    OptionalTimeout,
    OptionalId,
    Ids,
}

const PAGE: &[Takes] = &[Takes::FirstName, Takes::State, Takes::Jobs, Takes::OptionalId];
const PUT_IN_TUBE: &[Takes] = &[Takes::FirstName, Takes::U32, Takes::U32, Takes::U32, Takes::U32];
const STATES: [&str; 5] = ["ready", "reserved", "delayed", "buried", "any"];
const MAX_JOBS: usize = 1_000;

/// Words, with the space if that is part of them, what follows, and whether there may be more.
const WORDS: [(&str, &[Takes], bool); 33] = [
    ("put ", &[Takes::U32, Takes::U32, Takes::U32, Takes::U32], true),
    ("put-in-tube ", PUT_IN_TUBE, true),
    ("use ", &[Takes::Name], false),
    ("reserve", &[Takes::Nothing], false),
    ("reserve-with-timeout ", &[Takes::Timeout], true),
    ("reserve-job ", &[Takes::U64], false),
    ("reserve-batch ", &[Takes::Jobs, Takes::OptionalTimeout], false),
    ("delete ", &[Takes::U64], false),
    ("delete-batch ", &[Takes::Ids], false),
    ("release ", &[Takes::U64, Takes::U32, Takes::U32], false),
    ("bury ", &[Takes::U64, Takes::U32], false),
    ("touch ", &[Takes::U64], false),
    ("touch-all", &[Takes::Nothing], false),
    ("watch ", &[Takes::Name], false),
    ("ignore ", &[Takes::Name], false),
    ("peek ", &[Takes::U64], false),
    ("peek-ready", &[Takes::Nothing], false),
    ("peek-delayed", &[Takes::Nothing], false),
    ("peek-buried", &[Takes::Nothing], false),
    ("peek-batch ", PAGE, false),
    ("list-jobs ", PAGE, false),
    ("flush-tube ", &[Takes::Name], false),
    ("flush-buried ", &[Takes::Name], false),
    ("kick ", &[Takes::Count], true),
    ("kick-job ", &[Takes::U64], false),
    ("stats", &[Takes::Nothing], false),
    ("stats-job ", &[Takes::U64], false),
    ("stats-tube ", &[Takes::Name], false),
    ("list-tubes", &[Takes::Nothing], false),
    ("list-tube-used", &[Takes::Nothing], false),
    ("list-tubes-watched", &[Takes::Nothing], false),
    ("pause-tube", &[Takes::NameAndU32], false),
    ("quit", &[Takes::Whatever], true),
];

const NAME_BYTES: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-+/;.$_()";

/// Judges any line.
pub fn run(bytes: &[u8]) {
    let parsed = command::parse(bytes);
    let ours = match &parsed {
        Ok(command) => Reading::Command(call(command)),
        Err(Rejection::BadFormat) => Reading::BadFormat,
        Err(Rejection::UnknownCommand) => Reading::UnknownCommand,
    };
    assert_eq!(ours, reading(bytes), "{}", bytes.escape_ascii());
    if let (Ok(command), Reading::Command(read)) = (&parsed, &ours) {
        check_counter(command, read);
        let plain = read.plain();
        let again = command::parse(plain.as_bytes());
        assert_eq!(again.as_ref().map(call), Ok(read.clone()), "{plain:?} is the same");
    }
    assert_eq!(command::may_be_long(bytes), may_be_long(bytes), "{}", bytes.escape_ascii());
    let is_name = is_name(bytes);
    assert_eq!(text::is_tube_name(bytes), is_name, "{}", bytes.escape_ascii());
}

fn check_counter(command: &Command<'_>, call: &Call) {
    let has_none = ["reserve-job", "kick-job", "quit"].contains(&call.word);
    match command.counter() {
        Some(counter) => {
            let name = Counter::NAMES[counter as usize];
            assert_eq!(name, call.word);
        }
        None => assert!(has_none, "{} is not counted", call.word),
    }
}

impl Call {
    /// The canonical line of this command.
    fn plain(&self) -> String {
        // What stands for a name that no tube can have.
        let no_name = (self.word == "pause-tube").then(|| b"-".to_vec());
        let tube = self.tube.clone().or(no_name);
        let tube = tube.into_iter().map(|name| String::from_utf8_lossy(&name).into_owned());
        let words = [self.word.to_owned()].into_iter().chain(tube).chain(self.state.clone());
        let mut words: Vec<String> = words.chain(self.numbers.iter().map(u64::to_string)).collect();
        match &self.tag {
            Tag::None => {}
            Tag::Key(key, 0) => words.push(format!("idp:{key}")),
            Tag::Key(key, secs) => words.push(format!("idp:{key}:{secs}")),
            Tag::Wrong => words.push("more".to_owned()),
        }
        words.join(" ")
    }
}

/// Parses a line without its CR LF.
pub fn reading(line: &[u8]) -> Reading {
    if line.contains(&0) {
        return Reading::BadFormat;
    }
    let matching = WORDS.iter().filter(|(word, ..)| line.starts_with(word.as_bytes()));
    let Some(&(word, takes, may_have_more)) = matching.max_by_key(|(word, ..)| word.len()) else {
        return Reading::UnknownCommand;
    };
    let mut call = Call { word: word.trim_end(), ..Call::default() };
    let mut rest = line[word.len()..].to_vec();
    if takes.iter().all(|&what| call.take(what, &mut rest)) && (may_have_more || rest.is_empty()) {
        if call.is_put() {
            call.tag = tag_of(&rest);
        }
        Reading::Command(call)
    } else {
        Reading::BadFormat
    }
}

impl Call {
    /// Returns whether a body follows.
    fn is_put(&self) -> bool {
        ["put", "put-in-tube"].contains(&self.word)
    }

    /// Takes an argument from the front of `rest`; `false` when it is none.
    fn take(&mut self, what: Takes, rest: &mut Vec<u8>) -> bool {
        let number = match what {
            Takes::Nothing | Takes::Whatever => return true,
            Takes::U32 => take_number(rest, b" ", u32::MAX.into()),
            Takes::U64 => take_number(rest, b" ", u64::MAX),
            Takes::Timeout => take_number(rest, b" ", i32::MAX as u64),
            Takes::Count => take_count(rest),
            Takes::Jobs => take_number(rest, b" ", MAX_JOBS as u64).filter(|&count| count > 0),
            Takes::OptionalTimeout | Takes::OptionalId if rest.is_empty() => Some(0),
            Takes::OptionalTimeout => take_number(rest, b" ", i32::MAX as u64),
            Takes::OptionalId => take_number(rest, b" ", u64::MAX),
            Takes::Ids => {
                while !rest.is_empty() {
                    let Some(id) = take_number(rest, b" ", u64::MAX) else { return false };
                    self.numbers.push(id);
                }
                return (1..=MAX_JOBS).contains(&self.numbers.len());
            }
            Takes::FirstName => {
                let name = take_word(rest);
                let is_name = is_name(&name);
                self.tube = Some(name);
                return is_name;
            }
            Takes::State => {
                let word = String::from_utf8_lossy(&take_word(rest)).into_owned();
                let is_state = STATES.contains(&&*word);
                self.state = Some(word);
                return is_state;
            }
            Takes::Name => {
                let name = std::mem::take(rest);
                let is_name = is_name(&name);
                self.tube = Some(name);
                return is_name;
            }
            Takes::NameAndU32 => {
                take_while(rest, b" ");
                let name = take_while(rest, NAME_BYTES.as_bytes());
                // A name that no tube can have is found out later.
                self.tube = is_name(&name).then_some(name.clone());
                if name.is_empty() { None } else { take_number(rest, b" ", u32::MAX.into()) }
            }
        };
        self.numbers.extend(number);
        number.is_some()
    }
}

/// Reads what follows the numbers of a put.
fn tag_of(rest: &[u8]) -> Tag {
    if rest.is_empty() {
        return Tag::None;
    }
    let text = String::from_utf8_lossy(rest).into_owned();
    let (blanks, tag) = text.split_at(text.len() - text.trim_start_matches(' ').len());
    let parts: Vec<&str> = tag.split(':').collect();
    let (key, secs) = match parts[..] {
        ["idp", key] => (key, Some(0)),
        ["idp", key, secs] => {
            let mut digits = secs.as_bytes().to_vec();
            let number = take_number(&mut digits, b"", u32::MAX.into());
            (key, number.filter(|_| digits.is_empty()))
        }
        _ => ("", None),
    };
    match secs.and_then(|secs| u32::try_from(secs).ok()) {
        Some(secs) if !blanks.is_empty() && is_name(key.as_bytes()) => {
            Tag::Key(key.to_owned(), secs)
        }
        _ => Tag::Wrong,
    }
}

/// Returns whether a line may be longer than 224 bytes: a put with good numbers before a tag.
pub fn may_be_long(line: &[u8]) -> bool {
    let matches = |word: &str| line.starts_with(word.as_bytes());
    if matches("delete-batch ") {
        return true;
    }
    let Some((word, takes, _)) = WORDS[..2].iter().find(|(word, ..)| matches(word)) else {
        return false;
    };
    let mut rest = line[word.len()..].to_vec();
    let has_numbers = takes.iter().all(|&what| Call::default().take(what, &mut rest));
    take_while(&mut rest, b" ");
    has_numbers && rest.starts_with(b"idp:")
}

/// Takes the bytes between spaces.
fn take_word(rest: &mut Vec<u8>) -> Vec<u8> {
    take_while(rest, b" ");
    let end = rest.iter().position(|&byte| byte == b' ').unwrap_or(rest.len());
    rest.drain(..end).collect()
}

fn take_while(rest: &mut Vec<u8>, bytes: &[u8]) -> Vec<u8> {
    let end = rest.iter().position(|byte| !bytes.contains(byte)).unwrap_or(rest.len());
    rest.drain(..end).collect()
}

fn take_number(rest: &mut Vec<u8>, blanks: &[u8], max: u64) -> Option<u64> {
    take_while(rest, blanks);
    let digits = String::from_utf8(take_while(rest, b"0123456789")).unwrap();
    if digits.is_empty() {
        return None;
    }
    let significant = digits.trim_start_matches('0');
    let is_long = significant.len() > 20;
    let number: u128 = if is_long { u128::MAX } else { format!("0{significant}").parse().unwrap() };
    u64::try_from(number).ok().filter(|&number| number <= max)
}

/// As `strtoul` does it, and cut to 32 bits.
fn take_count(rest: &mut Vec<u8>) -> Option<u64> {
    take_while(rest, b" \t\n\x0b\x0c\r");
    let sign = rest.first().copied().filter(|byte| b"+-".contains(byte));
    if sign.is_some() {
        rest.remove(0);
    }
    let number = take_number(rest, b"", u64::MAX)?;
    let signed = if sign == Some(b'-') { -i128::from(number) } else { number.into() };
    Some(signed.rem_euclid(1 << 32).try_into().unwrap())
}

fn is_name(name: &[u8]) -> bool {
    let is_long_enough = !name.is_empty() && name.len() <= 200;
    let text = String::from_utf8_lossy(name);
    is_long_enough && !text.starts_with('-') && text.chars().all(|char| NAME_BYTES.contains(char))
}

/// What the parser made of a line, in the words of the second reading.
fn call(command: &Command<'_>) -> Call {
    let (word, numbers): (_, &[u64]) = match *command {
        Command::Put { pri, delay_secs, ttr_secs, body_len, .. } => {
            ("put", &[pri.into(), delay_secs.into(), ttr_secs.into(), body_len.into()])
        }
        Command::PutInTube { pri, delay_secs, ttr_secs, body_len, .. } => {
            ("put-in-tube", &[pri.into(), delay_secs.into(), ttr_secs.into(), body_len.into()])
        }
        Command::Use { .. } => ("use", &[]),
        Command::Reserve => ("reserve", &[]),
        Command::ReserveWithTimeout { timeout_secs } => {
            ("reserve-with-timeout", &[timeout_secs.into()])
        }
        Command::ReserveJob { id } => ("reserve-job", &[id]),
        Command::ReserveBatch { count, timeout_secs } => {
            ("reserve-batch", &[count as u64, timeout_secs.into()])
        }
        Command::Delete { id } => ("delete", &[id]),
        Command::DeleteBatch { ids } => ("delete-batch", &ids.collect::<Vec<u64>>()),
        Command::Release { id, pri, delay_secs } => {
            ("release", &[id, pri.into(), delay_secs.into()])
        }
        Command::Bury { id, pri } => ("bury", &[id, pri.into()]),
        Command::Touch { id } => ("touch", &[id]),
        Command::TouchAll => ("touch-all", &[]),
        Command::Watch { .. } => ("watch", &[]),
        Command::Ignore { .. } => ("ignore", &[]),
        Command::Peek { id } => ("peek", &[id]),
        Command::PeekReady => ("peek-ready", &[]),
        Command::PeekDelayed => ("peek-delayed", &[]),
        Command::PeekBuried => ("peek-buried", &[]),
        Command::PeekBatch { selection } => {
            ("peek-batch", &[selection.count as u64, selection.after])
        }
        Command::Kick { bound } => ("kick", &[bound.into()]),
        Command::KickJob { id } => ("kick-job", &[id]),
        Command::FlushTube { .. } => ("flush-tube", &[]),
        Command::FlushBuried { .. } => ("flush-buried", &[]),
        Command::Stats => ("stats", &[]),
        Command::StatsJob { id } => ("stats-job", &[id]),
        Command::StatsTube { .. } => ("stats-tube", &[]),
        Command::ListJobs { selection } => {
            ("list-jobs", &[selection.count as u64, selection.after])
        }
        Command::ListTubes => ("list-tubes", &[]),
        Command::ListTubeUsed => ("list-tube-used", &[]),
        Command::ListTubesWatched => ("list-tubes-watched", &[]),
        Command::PauseTube { pause_secs, .. } => ("pause-tube", &[pause_secs.into()]),
        Command::Quit => ("quit", &[]),
    };
    let numbers = numbers.to_vec();
    let tube = tube(command).map(|name| name.as_bytes().to_vec());
    let mut found_tag = Tag::None;
    if let Command::Put { tag, .. } | Command::PutInTube { tag, .. } = *command {
        found_tag = match UniqueTag::parse(tag) {
            Some(UniqueTag { key, ttl_secs }) => {
                Tag::Key(String::from_utf8_lossy(key).into_owned(), ttl_secs)
            }
            None if tag.is_empty() => Tag::None,
            None => Tag::Wrong,
        };
    }
    let mut state = None;
    if let Command::PeekBatch { selection } | Command::ListJobs { selection } = command {
        state = Some(format!("{:?}", selection.state).to_lowercase());
    }
    Call { word, numbers, tube, state, tag: found_tag }
}

fn tube<'c>(command: &Command<'c>) -> Option<&'c str> {
    match *command {
        Command::Use { tube }
        | Command::Watch { tube }
        | Command::Ignore { tube }
        | Command::StatsTube { tube }
        | Command::FlushTube { tube }
        | Command::FlushBuried { tube }
        | Command::PutInTube { tube, .. } => Some(tube),
        Command::PeekBatch { selection } | Command::ListJobs { selection } => Some(selection.tube),
        Command::PauseTube { tube, .. } => tube,
        Command::Put { .. }
        | Command::Reserve
        | Command::ReserveWithTimeout { .. }
        | Command::ReserveJob { .. }
        | Command::ReserveBatch { .. }
        | Command::Delete { .. }
        | Command::DeleteBatch { .. }
        | Command::Release { .. }
        | Command::Bury { .. }
        | Command::Touch { .. }
        | Command::TouchAll
        | Command::Peek { .. }
        | Command::PeekReady
        | Command::PeekDelayed
        | Command::PeekBuried
        | Command::Kick { .. }
        | Command::KickJob { .. }
        | Command::Stats
        | Command::StatsJob { .. }
        | Command::ListTubes
        | Command::ListTubeUsed
        | Command::ListTubesWatched
        | Command::Quit => None,
    }
}
