//! The commands and replies of one client, and whether they match.
//!
//! Commands are parsed here without code of the server. Each command has one reply, in order, which
//! is one of the replies that the command can have.

use super::command::{Call, Reading, Tag, may_be_long, reading};
use crate::harness::reply::{Frame, frame};
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};

/// One client's side of the conversation.
#[derive(Debug)]
pub struct Talk {
    max_job_size: usize,
    asked: Vec<u8>,
    asking: Parsing,
    /// Commands without a reply yet.
    open: VecDeque<Asked>,
    received: Vec<u8>,
    /// The sending side is shut down.
    pub is_shut: bool,
    used: Vec<u8>,
    /// In the order in which they are listed.
    watched: Vec<Vec<u8>>,
}

#[derive(Debug)]
enum Parsing {
    Line,
    TooLongLine,
    Body { len: usize, has_key: bool },
    Unwanted { len: usize },
    Nothing,
}

/// A whole command.
#[derive(Debug)]
enum Asked {
    Call(Call),
    /// With its body, as it came.
    Put {
        body: Digest,
        is_ended: bool,
        has_key: bool,
    },
    TooBig,
    BadFormat,
    Unknown,
    /// The rest of the reply to a batch: this number of jobs, each with this word.
    Jobs {
        word: &'static str,
        left: u64,
    },
}

/// Length and hash of a body.
type Digest = (usize, u64);

/// The jobs, as all clients together know them.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Every body that was ever received, by its job.
    bodies: HashMap<u64, Digest>,
    /// How many puts were begun: each takes an id. Clients may not have read the replies.
    begun: u64,
    pub inserted: u64,
    pub deleted: u64,
    /// How many tubes there may be.
    pub names: usize,
    /// The disk may be full.
    pub may_lack_space: bool,
    /// A client has asked for many jobs in one reply.
    pub has_batches: bool,
}

/// The longest line with CR LF.
fn line_max(bytes: &[u8]) -> usize {
    if bytes.starts_with(b"delete-batch ") {
        21_015
    } else if bytes.starts_with(b"put") {
        512
    } else {
        224
    }
}

impl Talk {
    pub fn new(max_job_size: u32) -> Talk {
        let default = b"default".to_vec();
        Talk {
            max_job_size: max_job_size as usize,
            asked: Vec::new(),
            asking: Parsing::Line,
            open: VecDeque::new(),
            received: Vec::new(),
            is_shut: false,
            used: default.clone(),
            watched: vec![default],
        }
    }

    // ---- Asking ----

    /// Takes bytes that the server was given.
    pub fn ask(&mut self, bytes: &[u8], ledger: &mut Ledger) {
        let mut all = std::mem::take(&mut self.asked);
        all.extend_from_slice(bytes);
        let mut rest = &all[..];
        while let Some(used) = self.next_asked(rest, ledger) {
            rest = &rest[used..];
        }
        self.asked = rest.to_vec();
    }

    /// Takes the next command or body; returns its length, or `None` if it is incomplete.
    fn next_asked(&mut self, bytes: &[u8], ledger: &mut Ledger) -> Option<usize> {
        let end = |bytes: &[u8]| bytes.windows(2).position(|pair| pair == b"\r\n");
        match self.asking {
            Parsing::Line => match end(&bytes[..bytes.len().min(line_max(bytes))]) {
                Some(len) => {
                    self.line(&bytes[..len], ledger);
                    Some(len + 2)
                }
                None if bytes.len() < line_max(bytes) => None,
                None => {
                    self.asking = Parsing::TooLongLine;
                    Some(0)
                }
            },
            Parsing::TooLongLine => {
                let len = end(bytes)?;
                self.asking = Parsing::Line;
                self.no_command(&bytes[..len], Asked::BadFormat);
                Some(len + 2)
            }
            Parsing::Body { len, has_key } => {
                let (body, end) = bytes.get(..len + 2)?.split_at(len);
                self.asking = Parsing::Line;
                let is_ended = end == b"\r\n";
                self.open.push_back(Asked::Put { body: digest(body), is_ended, has_key });
                Some(len + 2)
            }
            Parsing::Unwanted { len } => {
                bytes.get(..len + 2)?;
                self.asking = Parsing::Line;
                self.open.push_back(Asked::TooBig);
                Some(len + 2)
            }
            Parsing::Nothing => None,
        }
    }

    fn line(&mut self, line: &[u8], ledger: &mut Ledger) {
        if line.len() + 2 > 224 && !may_be_long(line) {
            return self.no_command(line, Asked::BadFormat);
        }
        match reading(line) {
            Reading::BadFormat => self.no_command(line, Asked::BadFormat),
            Reading::UnknownCommand => self.no_command(line, Asked::Unknown),
            Reading::Command(call) if call.word == "quit" => self.asking = Parsing::Nothing,
            Reading::Command(call) if ["put", "put-in-tube"].contains(&call.word) => {
                ledger.names += usize::from(call.tube.is_some());
                let len = usize::try_from(call.numbers[3]).unwrap();
                if len > self.max_job_size {
                    self.asking = Parsing::Unwanted { len };
                } else if call.tag == Tag::Wrong {
                    self.open.push_back(Asked::BadFormat);
                } else {
                    ledger.begun += 1;
                    self.asking = Parsing::Body { len, has_key: call.tag != Tag::None };
                }
            }
            Reading::Command(call) => {
                ledger.names += usize::from(call.tube.is_some());
                let is_batch = ["reserve-batch", "peek-batch", "list-jobs"].contains(&call.word);
                ledger.has_batches |= is_batch;
                self.open.push_back(Asked::Call(call));
            }
        }
    }

    /// An HTTP request is an unknown command, and the last one that is run.
    fn no_command(&mut self, line: &[u8], otherwise: Asked) {
        let end = line.last_chunk().unwrap_or(b"         ");
        if matches!(end, [b' ', b'H', b'T', b'T', b'P', b'/', b'0'..=b'9', b'.', b'0'..=b'9']) {
            self.open.push_back(Asked::Unknown);
            self.asking = Parsing::Nothing;
        } else {
            self.open.push_back(otherwise);
        }
    }

    /// Returns whether every whole command has a reply.
    pub fn is_answered(&self) -> bool {
        self.open.is_empty() && self.received.is_empty()
    }

    /// Returns whether the next command may wait.
    pub fn may_wait(&self) -> bool {
        let waits = ["reserve", "reserve-with-timeout", "reserve-batch"];
        let is_reserve = |call: &Call| waits.contains(&call.word) && !self.is_shut;
        matches!(self.open.front(), Some(Asked::Call(call)) if is_reserve(call))
    }

    /// Returns whether the next command without a reply is a flush.
    pub fn is_flushing(&self) -> bool {
        let is_flush = |call: &Call| ["flush-tube", "flush-buried"].contains(&call.word);
        matches!(self.open.front(), Some(Asked::Call(call)) if is_flush(call))
    }

    // ---- Replies ----

    /// Takes output of the server.
    pub fn receive(&mut self, bytes: &[u8], ledger: &mut Ledger) {
        let mut all = std::mem::take(&mut self.received);
        all.extend_from_slice(bytes);
        let mut rest = &all[..];
        while let Some(used) = self.next_reply(rest, ledger) {
            rest = &rest[used..];
        }
        self.received = rest.to_vec();
    }

    fn next_reply(&mut self, bytes: &[u8], ledger: &mut Ledger) -> Option<usize> {
        let Frame { line, body, len } = frame(bytes)?;
        let line = std::str::from_utf8(line).expect("replies are ASCII");
        let words: Vec<&str> = line.split(' ').collect();
        if let Some(body) = body {
            assert_eq!(words.last().copied().map(decimal), Some(body.len() as u64));
        }
        let body = body.unwrap_or_default();
        let asked = self.open.pop_front();
        let asked = asked.unwrap_or_else(|| panic!("a reply without a command: {line}"));
        let is_right = match &asked {
            Asked::Call(call) => self.is_reply_to(call, &words, body, ledger),
            Asked::Put { has_key: true, is_ended: true, .. } if words.len() == 3 => {
                is_hit(&words, ledger)
            }
            Asked::Put { body, is_ended, .. } => is_reply_to_put(&words, *body, *is_ended, ledger),
            Asked::TooBig => words == ["JOB_TOO_BIG"],
            Asked::BadFormat => words == ["BAD_FORMAT"],
            Asked::Unknown => words == ["UNKNOWN_COMMAND"],
            Asked::Jobs { word, left } => {
                if *left > 1 {
                    self.open.push_front(Asked::Jobs { word, left: left - 1 });
                }
                let id = words.get(1).copied().map_or(0, decimal);
                words.len() == 3 && words[0] == *word && ledger.knows(id, digest(body))
            }
        };
        assert!(is_right, "{line} is no reply to {asked:?}");
        Some(len)
    }

    fn is_reply_to(
        &mut self,
        call: &Call,
        words: &[&str],
        body: &[u8],
        ledger: &mut Ledger,
    ) -> bool {
        let number = |place: usize| call.numbers.get(place).copied();
        let lacks_space = ledger.may_lack_space && *words == ["OUT_OF_MEMORY"];
        let is_found = |ledger: &mut Ledger| match words {
            ["NOT_FOUND"] => true,
            ["FOUND" | "RESERVED", id, _] => ledger.knows(decimal(id), digest(body)),
            _ => false,
        };
        match call.word {
            "reserve" | "reserve-with-timeout" => match words {
                ["RESERVED", ..] => is_found(ledger),
                ["TIMED_OUT"] => call.word != "reserve" || self.is_shut,
                ["DEADLINE_SOON"] => true,
                _ => false,
            },
            "reserve-job" | "peek" => {
                let verb = if call.word == "peek" { "FOUND" } else { "RESERVED" };
                // The reserve-job of a buried job is recorded.
                if lacks_space && call.word == "reserve-job" {
                    return true;
                }
                let is_that =
                    words.len() < 3 || words[0] == verb && number(0) == Some(decimal(words[1]));
                is_that && is_found(ledger)
            }
            "peek-ready" | "peek-delayed" | "peek-buried" => {
                words[0] != "RESERVED" && is_found(ledger)
            }
            "delete" => {
                ledger.deleted += u64::from(*words == ["DELETED"]);
                *words == ["DELETED"] || *words == ["NOT_FOUND"] || lacks_space
            }
            "release" => {
                [["RELEASED"], ["NOT_FOUND"]].iter().any(|reply| reply == words) || lacks_space
            }
            "bury" => [["BURIED"], ["NOT_FOUND"]].iter().any(|reply| reply == words) || lacks_space,
            "touch" => [["TOUCHED"], ["NOT_FOUND"]].iter().any(|reply| reply == words),
            "kick" => match words {
                ["KICKED", count] => Some(decimal(count)) <= number(0),
                _ => lacks_space,
            },
            "kick-job" => {
                [["KICKED"], ["NOT_FOUND"]].iter().any(|reply| reply == words) || lacks_space
            }
            "stats-job" => match words {
                ["OK", _] => document(body).starts_with(&format!("id: {}\n", number(0).unwrap())),
                _ => *words == ["NOT_FOUND"],
            },
            "stats-tube" => match words {
                ["OK", _] => document(body).starts_with("name: \""),
                _ => *words == ["NOT_FOUND"],
            },
            "stats" => document(body).starts_with("current-jobs-urgent: "),
            "pause-tube" if call.tube.is_none() => *words == ["BAD_FORMAT"],
            "pause-tube" => [["PAUSED"], ["NOT_FOUND"]].iter().any(|reply| reply == words),
            "reserve-batch" | "peek-batch" | "list-jobs" | "flush-tube" | "flush-buried"
            | "delete-batch" | "touch-all" => self.is_reply_about_many(call, words, body, ledger),
            _ => self.is_reply_about_tubes(call, words, body),
        }
    }

    /// Judges the reply to a command for many jobs at once.
    fn is_reply_about_many(
        &mut self,
        call: &Call,
        words: &[&str],
        body: &[u8],
        ledger: &mut Ledger,
    ) -> bool {
        let number = |place: usize| call.numbers.get(place).copied();
        let lacks_space = ledger.may_lack_space && *words == ["OUT_OF_MEMORY"];
        match call.word {
            "reserve-batch" => match words {
                ["RESERVED_BATCH", count] => {
                    self.expects_jobs("RESERVED", decimal(count), number(0))
                }
                ["DEADLINE_SOON"] => true,
                _ => false,
            },
            "peek-batch" => match words {
                ["FOUND_BATCH", count, next] => {
                    let is_next = decimal(next) == 0 || Some(decimal(next)) > number(1);
                    is_next && self.expects_jobs("FOUND", decimal(count), number(0))
                }
                _ => *words == ["NOT_FOUND"],
            },
            "list-jobs" => match words {
                ["OK", _] => is_page(document(body), call),
                _ => *words == ["NOT_FOUND"],
            },
            "flush-tube" | "flush-buried" => match words {
                ["FLUSHED", count] => {
                    ledger.deleted += decimal(count);
                    true
                }
                _ => *words == ["NOT_FOUND"] || lacks_space,
            },
            "delete-batch" => match words {
                ["DELETED_BATCH", deleted, not_found] => {
                    ledger.deleted += decimal(deleted);
                    decimal(deleted) + decimal(not_found) == call.numbers.len() as u64
                }
                _ => lacks_space,
            },
            _ => match words {
                ["TOUCHED_ALL", count] => decimal(count) <= ledger.begun,
                _ => false,
            },
        }
    }

    /// Notes that this number of jobs is the rest of the reply, if it may have this number.
    fn expects_jobs(&mut self, word: &'static str, count: u64, most: Option<u64>) -> bool {
        if count > 0 {
            self.open.push_front(Asked::Jobs { word, left: count });
        }
        Some(count) <= most
    }

    fn is_reply_about_tubes(&mut self, call: &Call, words: &[&str], body: &[u8]) -> bool {
        let tube = call.tube.clone().unwrap_or_default();
        let place = self.watched.iter().position(|name| *name == tube);
        match (call.word, place) {
            ("use" | "list-tube-used", _) => {
                if call.word == "use" {
                    self.used = tube;
                }
                matches!(words, ["USING", name] if name.as_bytes() == self.used)
            }
            ("ignore", Some(_)) if self.watched.len() == 1 => *words == ["NOT_IGNORED"],
            ("watch" | "ignore", place) => {
                match place {
                    Some(place) if call.word == "ignore" => {
                        self.watched.swap_remove(place);
                    }
                    None if call.word == "watch" => self.watched.push(tube),
                    _ => {}
                }
                matches!(words, ["WATCHING", count] if decimal(count) == self.watched.len() as u64)
            }
            ("list-tubes-watched", _) => {
                let lines = self.watched.iter().map(|name| format!("- {}\n", name.escape_ascii()));
                words[0] == "OK" && document(body) == lines.collect::<String>()
            }
            ("list-tubes", _) => {
                let names: Vec<&str> = document(body).lines().collect();
                let mut different = names.clone();
                different.sort_unstable();
                different.dedup();
                different.len() == names.len() && names.contains(&"- default")
            }
            _ => false,
        }
    }
}

/// Returns whether a document has jobs in the order of their ids, as many as were asked for at most.
fn is_page(document: &str, call: &Call) -> bool {
    let mut lines = document.lines();
    let next = lines.next().and_then(|line| line.strip_prefix("next: ")).map(decimal);
    let head = lines.next();
    let ids = lines.map(|line| {
        let id = line.strip_prefix("- {id: ").and_then(|line| line.split(',').next());
        id.map_or(0, decimal)
    });
    let ids: Vec<u64> = ids.collect();
    let (count, after) = (call.numbers[0], call.numbers[1]);
    let is_ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
    let is_next = next == Some(0) || next == ids.last().copied() && ids.len() as u64 == count;
    let is_head = head == Some(if ids.is_empty() { "jobs: []" } else { "jobs:" });
    is_head
        && is_next
        && is_ascending
        && ids.len() as u64 <= count
        && ids.iter().all(|&id| id > after)
}

fn is_reply_to_put(words: &[&str], body: Digest, is_ended: bool, ledger: &mut Ledger) -> bool {
    match words {
        ["INSERTED", id] if is_ended => {
            ledger.inserted += 1;
            ledger.knows(decimal(id), body)
        }
        ["EXPECTED_CRLF"] => !is_ended,
        ["DRAINING"] => is_ended,
        ["OUT_OF_MEMORY"] => is_ended && ledger.may_lack_space,
        _ => false,
    }
}

/// Returns whether this is a reply to a put with the key of another job. The client that has put that job
/// may not have read its reply.
fn is_hit(words: &[&str], ledger: &Ledger) -> bool {
    let states = ["READY", "RESERVED", "DELAYED", "BURIED", "DELETED"];
    let is_job = (1..=ledger.begun).contains(&decimal(words[1]));
    words[0] == "INSERTED" && states.contains(&words[2]) && is_job
}

impl Ledger {
    /// Returns whether the job has this body, as in all earlier replies.
    fn knows(&mut self, id: u64, body: Digest) -> bool {
        id > 0 && *self.bodies.entry(id).or_insert(body) == body
    }

    /// The number of jobs that exist.
    pub fn jobs(&self) -> u64 {
        self.inserted - self.deleted
    }
}

fn digest(body: &[u8]) -> Digest {
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    (body.len(), hasher.finish())
}

/// The text after the first line of a document.
fn document(body: &[u8]) -> &str {
    let text = std::str::from_utf8(body).expect("documents are ASCII");
    text.strip_prefix("---\n").unwrap_or_else(|| panic!("no document: {text}"))
}

/// Parses a number without sign and leading zeros.
fn decimal(text: &str) -> u64 {
    let number: u64 = text.parse().unwrap_or_else(|_| panic!("{text} is no number"));
    assert_eq!(number.to_string(), text, "a number has one form");
    number
}
