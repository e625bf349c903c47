//! Parses a command line as BEHAVIOUR.md, section 1, and EXTENSIONS.md describe it, without code of
//! the engine.

/// One command line, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    Put {
        pri: u32,
        delay: u32,
        ttr: u32,
        len: u32,
        rest: PutRest,
    },
    PutInTube {
        tube: String,
        pri: u32,
        delay: u32,
        ttr: u32,
        len: u32,
        rest: PutRest,
    },
    Use(String),
    Reserve,
    ReserveWithTimeout(u32),
    ReserveJob(u64),
    ReserveBatch {
        count: usize,
        secs: u32,
    },
    Delete(u64),
    DeleteBatch(Vec<u64>),
    Release {
        id: u64,
        pri: u32,
        delay: u32,
    },
    Bury {
        id: u64,
        pri: u32,
    },
    Touch(u64),
    TouchAll,
    Watch(String),
    Ignore(String),
    Peek(u64),
    PeekReady,
    PeekDelayed,
    PeekBuried,
    PeekBatch(Page),
    Kick(u32),
    KickJob(u64),
    FlushTube(String),
    FlushBuried(String),
    Stats,
    StatsJob(u64),
    StatsTube(String),
    ListJobs(Page),
    ListTubes,
    ListTubeUsed,
    ListTubesWatched,
    PauseTube {
        tube: Option<String>,
        secs: u32,
    },
    Quit,
    BadFormat,
    Unknown,
    /// The first line of an HTTP request.
    Http,
}

/// What follows the numbers of a put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PutRest {
    Nothing,
    Tag(Tag),
    Wrong,
}

/// The key of a unique job, and for how many seconds it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tag {
    pub key: String,
    pub ttl: u32,
}

/// The jobs of a tube that a `list-jobs` or a `peek-batch` asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    pub tube: String,
    /// One of [`STATES`].
    pub state: &'static str,
    pub count: usize,
    pub after: u64,
}

/// The states of a page. The last one stands for all of them.
pub const STATES: [&str; 5] = ["ready", "reserved", "delayed", "buried", "any"];
/// The most jobs of a page or a batch.
pub const MAX_COUNT: usize = 1_000;

/// The commands that `stats` counts, in its order.
pub const COUNTERS: [&str; 22] = [
    "put",
    "peek",
    "peek-ready",
    "peek-delayed",
    "peek-buried",
    "reserve",
    "reserve-with-timeout",
    "delete",
    "release",
    "use",
    "watch",
    "ignore",
    "bury",
    "kick",
    "touch",
    "stats",
    "stats-job",
    "stats-tube",
    "list-tubes",
    "list-tube-used",
    "list-tubes-watched",
    "pause-tube",
];

impl Request {
    /// Returns the command that `stats` counts for it, if any.
    pub fn counter(&self) -> Option<&'static str> {
        Some(match self {
            Request::Put { .. } => "put",
            Request::Use(_) => "use",
            Request::Reserve => "reserve",
            Request::ReserveWithTimeout(_) => "reserve-with-timeout",
            Request::Delete(_) => "delete",
            Request::Release { .. } => "release",
            Request::Bury { .. } => "bury",
            Request::Touch(_) => "touch",
            Request::Watch(_) => "watch",
            Request::Ignore(_) => "ignore",
            Request::Peek(_) => "peek",
            Request::PeekReady => "peek-ready",
            Request::PeekDelayed => "peek-delayed",
            Request::PeekBuried => "peek-buried",
            Request::Kick(_) => "kick",
            Request::Stats => "stats",
            Request::StatsJob(_) => "stats-job",
            Request::StatsTube(_) => "stats-tube",
            Request::ListTubes => "list-tubes",
            Request::ListTubeUsed => "list-tube-used",
            Request::ListTubesWatched => "list-tubes-watched",
            Request::PauseTube { .. } => "pause-tube",
            Request::ReserveJob(_)
            | Request::KickJob(_)
            | Request::PutInTube { .. }
            | Request::ReserveBatch { .. }
            | Request::DeleteBatch(_)
            | Request::TouchAll
            | Request::PeekBatch(_)
            | Request::FlushTube(_)
            | Request::FlushBuried(_)
            | Request::ListJobs(_)
            | Request::Quit
            | Request::BadFormat
            | Request::Unknown
            | Request::Http => return None,
        })
    }
}

/// Parses a line without its CR LF.
pub fn parse(line: &[u8]) -> Request {
    match parse_command(line) {
        Request::BadFormat | Request::Unknown if is_http(line) => Request::Http,
        request => request,
    }
}

/// Returns whether a line that is no command is the first one of an HTTP request.
pub fn is_http(line: &[u8]) -> bool {
    let Some((_, end)) = line.split_last_chunk::<9>() else { return false };
    let are_digits = end[6].is_ascii_digit() && end[8].is_ascii_digit();
    end.starts_with(b" HTTP/") && are_digits && end[7] == b'.'
}

type ParseRest = fn(Rest<'_>) -> Option<Request>;

fn parse_command(line: &[u8]) -> Request {
    if line.contains(&0) {
        return Request::BadFormat;
    }
    // Commands match by prefix: the longer one of two comes first.
    let words: [(&str, ParseRest); 33] = [
        ("put ", put),
        ("put-in-tube ", put_in_tube),
        ("peek-ready", |rest| rest.nothing(Request::PeekReady)),
        ("peek-delayed", |rest| rest.nothing(Request::PeekDelayed)),
        ("peek-buried", |rest| rest.nothing(Request::PeekBuried)),
        ("peek-batch ", |rest| rest.page().map(Request::PeekBatch)),
        ("peek ", |rest| rest.id(Request::Peek)),
        ("reserve-with-timeout ", reserve_with_timeout),
        ("reserve-job ", |rest| rest.id(Request::ReserveJob)),
        ("reserve-batch ", reserve_batch),
        ("reserve", |rest| rest.nothing(Request::Reserve)),
        ("release ", release),
        ("delete ", |rest| rest.id(Request::Delete)),
        ("delete-batch ", delete_batch),
        ("bury ", bury),
        ("kick-job ", |rest| rest.id(Request::KickJob)),
        ("kick ", kick),
        ("touch ", |rest| rest.id(Request::Touch)),
        ("touch-all", |rest| rest.nothing(Request::TouchAll)),
        ("flush-tube ", |rest| rest.name().map(Request::FlushTube)),
        ("flush-buried ", |rest| rest.name().map(Request::FlushBuried)),
        ("stats-job ", |rest| rest.id(Request::StatsJob)),
        ("stats-tube ", |rest| rest.name().map(Request::StatsTube)),
        ("stats", |rest| rest.nothing(Request::Stats)),
        ("use ", |rest| rest.name().map(Request::Use)),
        ("watch ", |rest| rest.name().map(Request::Watch)),
        ("ignore ", |rest| rest.name().map(Request::Ignore)),
        ("list-jobs ", |rest| rest.page().map(Request::ListJobs)),
        ("list-tubes-watched", |rest| rest.nothing(Request::ListTubesWatched)),
        ("list-tube-used", |rest| rest.nothing(Request::ListTubeUsed)),
        ("list-tubes", |rest| rest.nothing(Request::ListTubes)),
        ("pause-tube", pause_tube),
        ("quit", |_| Some(Request::Quit)),
    ];
    for (word, parse_rest) in words {
        if let Some(rest) = line.strip_prefix(word.as_bytes()) {
            return parse_rest(Rest(rest)).unwrap_or(Request::BadFormat);
        }
    }
    Request::Unknown
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
    has_arguments && rest.0.starts_with(b"idp:")
}

fn put(mut rest: Rest) -> Option<Request> {
    let (pri, delay, ttr, len) = (rest.u32()?, rest.u32()?, rest.u32()?, rest.u32()?);
    let rest = if rest.0.is_empty() {
        PutRest::Nothing
    } else {
        rest.tag().map_or(PutRest::Wrong, PutRest::Tag)
    };
    Some(Request::Put { pri, delay, ttr, len, rest })
}

fn put_in_tube(mut rest: Rest) -> Option<Request> {
    let tube = rest.first_name()?;
    match put(rest)? {
        Request::Put { pri, delay, ttr, len, rest } => {
            Some(Request::PutInTube { tube, pri, delay, ttr, len, rest })
        }
        _ => None,
    }
}

fn release(mut rest: Rest) -> Option<Request> {
    let (id, pri, delay) = (rest.u64()?, rest.u32()?, rest.u32()?);
    rest.nothing(Request::Release { id, pri, delay })
}

fn bury(mut rest: Rest) -> Option<Request> {
    let (id, pri) = (rest.u64()?, rest.u32()?);
    rest.nothing(Request::Bury { id, pri })
}

fn reserve_with_timeout(mut rest: Rest) -> Option<Request> {
    let secs = rest.u32()?;
    (secs < 1 << 31).then_some(Request::ReserveWithTimeout(secs))
}

fn reserve_batch(mut rest: Rest) -> Option<Request> {
    let count = rest.count()?;
    let secs = if rest.0.is_empty() { 0 } else { rest.u32()? };
    let request = rest.nothing(Request::ReserveBatch { count, secs })?;
    (secs < 1 << 31).then_some(request)
}

fn delete_batch(mut rest: Rest) -> Option<Request> {
    let mut ids = vec![rest.u64()?];
    while !rest.0.is_empty() {
        ids.push(rest.u64()?);
    }
    (ids.len() <= MAX_COUNT).then_some(Request::DeleteBatch(ids))
}

fn pause_tube(mut rest: Rest) -> Option<Request> {
    rest.spaces();
    let len = rest.0.iter().take_while(|&&byte| is_name_byte(byte)).count();
    let name = Rest(&rest.0[..len]);
    rest.0 = &rest.0[len..];
    let secs = rest.u32()?;
    let is_all = rest.0.is_empty() && len > 0;
    is_all.then(|| Request::PauseTube { tube: name.name(), secs })
}

/// Parses a number like strtoul(3), truncated to 32 bits.
fn kick(rest: Rest) -> Option<Request> {
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
    u32::try_from(number & 0xffff_ffff).ok().map(Request::Kick)
}

fn is_name_byte(byte: u8) -> bool {
    matches!(byte, b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9')
        || [b'-', b'+', b'/', b';', b'.', b'$', b'_', b'(', b')'].contains(&byte)
}

/// The rest of a line that has not been parsed.
#[derive(Clone, Copy)]
struct Rest<'l>(&'l [u8]);

impl<'l> Rest<'l> {
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

    /// Parses a number of jobs.
    fn count(&mut self) -> Option<usize> {
        let count = self.u32()? as usize;
        (1..=MAX_COUNT).contains(&count).then_some(count)
    }

    /// Skips spaces, and takes the bytes up to the next one.
    fn word(&mut self) -> Rest<'l> {
        self.spaces();
        let count = self.0.iter().take_while(|&&byte| byte != b' ').count();
        let (word, rest) = self.0.split_at(count);
        self.0 = rest;
        Rest(word)
    }

    /// Takes spaces, a key and seconds up to the end.
    fn tag(mut self) -> Option<Tag> {
        if self.0.first() != Some(&b' ') {
            return None;
        }
        let word = self.word();
        let words: Vec<&[u8]> = word.0.strip_prefix(b"idp:")?.split(|&byte| byte == b':').collect();
        let ttl = match words[..] {
            [_] => 0,
            [_, digits] if digits.iter().all(u8::is_ascii_digit) => {
                str::from_utf8(digits).ok()?.parse().ok()?
            }
            _ => return None,
        };
        let key = Rest(words[0]).name()?;
        self.0.is_empty().then_some(Tag { key, ttl })
    }

    /// Takes a tube name that other arguments follow.
    fn first_name(&mut self) -> Option<String> {
        self.word().name()
    }

    fn page(mut self) -> Option<Page> {
        let tube = self.first_name()?;
        let word = self.word();
        let state = *STATES.iter().find(|state| state.as_bytes() == word.0)?;
        let count = self.count()?;
        let after = if self.0.is_empty() { 0 } else { self.u64()? };
        self.0.is_empty().then_some(Page { tube, state, count, after })
    }

    fn nothing(self, request: Request) -> Option<Request> {
        self.0.is_empty().then_some(request)
    }

    fn id(mut self, request: fn(u64) -> Request) -> Option<Request> {
        let id = self.u64()?;
        self.nothing(request(id))
    }

    fn name(self) -> Option<String> {
        let is_name = (1..=200).contains(&self.0.len())
            && self.0[0] != b'-'
            && self.0.iter().all(|&byte| is_name_byte(byte));
        is_name.then(|| String::from_utf8_lossy(self.0).into_owned())
    }
}
