//! How the model reads a line, word by word as BEHAVIOUR tells it: no table, no cleverness, and
//! nothing of the engine.

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    Put {
        pri: u32,
        delay: u32,
        ttr: u32,
        len: u32,
        is_followed: bool,
    },
    Use(String),
    Reserve,
    ReserveWithTimeout(u32),
    ReserveJob(u64),
    Delete(u64),
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
    Watch(String),
    Ignore(String),
    Peek(u64),
    PeekReady,
    PeekDelayed,
    PeekBuried,
    Kick(u32),
    KickJob(u64),
    Stats,
    StatsJob(u64),
    StatsTube(String),
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
    /// Nothing: a browser has lost its way.
    Http,
}

/// The counters in their order in `stats`, each with the word that it counts.
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

impl Asked {
    /// The word of its counter, if it has one.
    pub fn counter(&self) -> Option<&'static str> {
        Some(match self {
            Asked::Put { .. } => "put",
            Asked::Use(_) => "use",
            Asked::Reserve => "reserve",
            Asked::ReserveWithTimeout(_) => "reserve-with-timeout",
            Asked::Delete(_) => "delete",
            Asked::Release { .. } => "release",
            Asked::Bury { .. } => "bury",
            Asked::Touch(_) => "touch",
            Asked::Watch(_) => "watch",
            Asked::Ignore(_) => "ignore",
            Asked::Peek(_) => "peek",
            Asked::PeekReady => "peek-ready",
            Asked::PeekDelayed => "peek-delayed",
            Asked::PeekBuried => "peek-buried",
            Asked::Kick(_) => "kick",
            Asked::Stats => "stats",
            Asked::StatsJob(_) => "stats-job",
            Asked::StatsTube(_) => "stats-tube",
            Asked::ListTubes => "list-tubes",
            Asked::ListTubeUsed => "list-tube-used",
            Asked::ListTubesWatched => "list-tubes-watched",
            Asked::PauseTube { .. } => "pause-tube",
            Asked::ReserveJob(_)
            | Asked::KickJob(_)
            | Asked::Quit
            | Asked::BadFormat
            | Asked::Unknown
            | Asked::Http => return None,
        })
    }
}

/// Reads a line without its CR LF.
pub fn read(line: &[u8]) -> Asked {
    match read_command(line) {
        Asked::BadFormat | Asked::Unknown if is_http(line) => Asked::Http,
        asked => asked,
    }
}

/// Whether a line that is no command is the first one of an HTTP request.
pub fn is_http(line: &[u8]) -> bool {
    let Some((_, end)) = line.split_last_chunk::<9>() else { return false };
    let are_digits = end[6].is_ascii_digit() && end[8].is_ascii_digit();
    end.starts_with(b" HTTP/") && are_digits && end[7] == b'.'
}

type ReadRest = fn(Rest<'_>) -> Option<Asked>;

fn read_command(line: &[u8]) -> Asked {
    if line.contains(&0) {
        return Asked::BadFormat;
    }
    // The first word that the line begins with counts, and longer words come first.
    let words: [(&str, ReadRest); 25] = [
        ("put ", put),
        ("peek-ready", |rest| rest.nothing(Asked::PeekReady)),
        ("peek-delayed", |rest| rest.nothing(Asked::PeekDelayed)),
        ("peek-buried", |rest| rest.nothing(Asked::PeekBuried)),
        ("peek ", |rest| rest.id(Asked::Peek)),
        ("reserve-with-timeout ", reserve_with_timeout),
        ("reserve-job ", |rest| rest.id(Asked::ReserveJob)),
        ("reserve", |rest| rest.nothing(Asked::Reserve)),
        ("release ", release),
        ("delete ", |rest| rest.id(Asked::Delete)),
        ("bury ", bury),
        ("kick-job ", |rest| rest.id(Asked::KickJob)),
        ("kick ", kick),
        ("touch ", |rest| rest.id(Asked::Touch)),
        ("stats-job ", |rest| rest.id(Asked::StatsJob)),
        ("stats-tube ", |rest| rest.name().map(Asked::StatsTube)),
        ("stats", |rest| rest.nothing(Asked::Stats)),
        ("use ", |rest| rest.name().map(Asked::Use)),
        ("watch ", |rest| rest.name().map(Asked::Watch)),
        ("ignore ", |rest| rest.name().map(Asked::Ignore)),
        ("list-tubes-watched", |rest| rest.nothing(Asked::ListTubesWatched)),
        ("list-tube-used", |rest| rest.nothing(Asked::ListTubeUsed)),
        ("list-tubes", |rest| rest.nothing(Asked::ListTubes)),
        ("pause-tube", pause_tube),
        ("quit", |_| Some(Asked::Quit)),
    ];
    for (word, read_rest) in words {
        if let Some(rest) = line.strip_prefix(word.as_bytes()) {
            return read_rest(Rest(rest)).unwrap_or(Asked::BadFormat);
        }
    }
    Asked::Unknown
}

fn put(mut rest: Rest) -> Option<Asked> {
    let (pri, delay, ttr, len) = (rest.u32()?, rest.u32()?, rest.u32()?, rest.u32()?);
    Some(Asked::Put { pri, delay, ttr, len, is_followed: !rest.0.is_empty() })
}

fn release(mut rest: Rest) -> Option<Asked> {
    let (id, pri, delay) = (rest.u64()?, rest.u32()?, rest.u32()?);
    rest.nothing(Asked::Release { id, pri, delay })
}

fn bury(mut rest: Rest) -> Option<Asked> {
    let (id, pri) = (rest.u64()?, rest.u32()?);
    rest.nothing(Asked::Bury { id, pri })
}

fn reserve_with_timeout(mut rest: Rest) -> Option<Asked> {
    let secs = rest.u32()?;
    (secs < 1 << 31).then_some(Asked::ReserveWithTimeout(secs))
}

fn pause_tube(mut rest: Rest) -> Option<Asked> {
    rest.spaces();
    let len = rest.0.iter().take_while(|&&byte| is_of_names(byte)).count();
    let name = Rest(&rest.0[..len]);
    rest.0 = &rest.0[len..];
    let secs = rest.u32()?;
    let is_all = rest.0.is_empty() && len > 0;
    is_all.then(|| Asked::PauseTube { tube: name.name(), secs })
}

/// As strtoul(3) reads, cut to 32 bits.
fn kick(rest: Rest) -> Option<Asked> {
    // It knows one more blank than Rust does.
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
    u32::try_from(number & 0xffff_ffff).ok().map(Asked::Kick)
}

fn is_of_names(byte: u8) -> bool {
    matches!(byte, b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9')
        || [b'-', b'+', b'/', b';', b'.', b'$', b'_', b'(', b')'].contains(&byte)
}

/// What is still to be read of a line.
#[derive(Clone, Copy)]
struct Rest<'l>(&'l [u8]);

impl Rest<'_> {
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

    fn nothing(self, asked: Asked) -> Option<Asked> {
        self.0.is_empty().then_some(asked)
    }

    fn id(mut self, asked: fn(u64) -> Asked) -> Option<Asked> {
        let id = self.u64()?;
        self.nothing(asked(id))
    }

    fn name(self) -> Option<String> {
        let is_name = (1..=200).contains(&self.0.len())
            && self.0[0] != b'-'
            && self.0.iter().all(|&byte| is_of_names(byte));
        is_name.then(|| String::from_utf8_lossy(self.0).into_owned())
    }
}
