//! The commands: one row for each in [`COMMANDS`], and its handler.
//!
//! A row drives the parser, the counters in `stats` and in the metrics, and what tests generate. A
//! handler checks, changes the store, and answers. It has the connection and the store in hand and
//! knows no other connection: when it ends the wait of one, the store notes that, and the loop
//! delivers it after the visit. A handler that cannot finish leaves the rest in [`Conn::doing`].
//!
//! | file | commands |
//! |---|---|
//! | [`put`] | `put`, `put-in-tube` |
//! | [`reserve`] | `reserve`, `reserve-with-timeout`, `reserve-batch`, `reserve-job` |
//! | [`change`] | commands for jobs that exist, and for tubes |
//! | [`show`] | statistics, peeks, lists of tubes |
//! | [`pages`] | `list-jobs`, `peek-batch` |

pub mod change;
pub mod pages;
pub mod put;
pub mod reserve;
pub mod show;

use super::conn::Conn;
use super::protocol::parse::Argument::{
    self, Anything, Bound, Count, Id, Ids, Name, Number, OptionalId, OptionalSeconds, Pause,
    Seconds, State, Tag, Tube,
};
use super::protocol::parse::{Args, LineTail};
use super::protocol::reply::{Answer, Reply, Word};
use super::store::Store;
use super::text;
use log::{debug, trace};

/// Runs a command whose arguments are parsed.
pub type Handler = fn(&mut Conn, &mut Store, &Args<'_>) -> Answer;

/// One command.
#[derive(Debug)]
pub struct Command {
    /// The beginning of the line, with the space if arguments must follow.
    // Quirk: words match as prefixes, so `statsx` is a `stats` with bad arguments; pinned by
    // tests/conversations/prefix-matching.txt.
    pub word: &'static str,
    /// The arguments after the word.
    pub arguments: &'static [Argument],
    /// Where the number of these commands is shown.
    pub counted: Counted,
    run: Handler,
}

/// Where the number of commands is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// In `stats`, as `cmd-...`, and in the metrics.
    InStats,
    /// In the metrics only: C beanstalkd has no such line, and clients depend on the keys.
    InMetrics,
    Nowhere,
}

const fn row(
    word: &'static str,
    arguments: &'static [Argument],
    counted: Counted,
    run: Handler,
) -> Command {
    Command { word, arguments, counted, run }
}

const fn stats(word: &'static str, arguments: &'static [Argument], run: Handler) -> Command {
    row(word, arguments, Counted::InStats, run)
}

const fn metrics(word: &'static str, arguments: &'static [Argument], run: Handler) -> Command {
    row(word, arguments, Counted::InMetrics, run)
}

const fn uncounted(word: &'static str, arguments: &'static [Argument], run: Handler) -> Command {
    row(word, arguments, Counted::Nowhere, run)
}

/// All commands. Those of `stats` come first, in the order of their lines there.
pub static COMMANDS: [Command; 33] = [
    stats("put ", &[Number, Number, Number, Number, Tag], put::put),
    stats("peek ", &[Id], show::peek),
    stats("peek-ready", &[], show::peek_ready),
    stats("peek-delayed", &[], show::peek_delayed),
    stats("peek-buried", &[], show::peek_buried),
    stats("reserve", &[], reserve::reserve),
    // Quirk: bytes after the number are ignored; pinned by
    // tests/conversations/reserve-with-timeout-format.txt.
    stats("reserve-with-timeout ", &[Seconds, Anything], reserve::reserve_with_timeout),
    stats("delete ", &[Id], change::delete),
    stats("release ", &[Id, Number, Number], change::release),
    stats("use ", &[Name], change::use_tube),
    stats("watch ", &[Name], change::watch),
    stats("ignore ", &[Name], change::ignore),
    stats("bury ", &[Id, Number], change::bury),
    stats("kick ", &[Bound], change::kick),
    stats("touch ", &[Id], change::touch),
    stats("stats", &[], show::stats),
    stats("stats-job ", &[Id], show::stats_job),
    stats("stats-tube ", &[Name], show::stats_tube),
    stats("list-tubes", &[], show::list_tubes),
    stats("list-tube-used", &[], show::list_tube_used),
    stats("list-tubes-watched", &[], show::list_tubes_watched),
    stats("pause-tube", &[Pause], change::pause_tube),
    metrics("put-in-tube ", &[Tube, Number, Number, Number, Number, Tag], put::put_in_tube),
    metrics("reserve-batch ", &[Count, OptionalSeconds], reserve::reserve_batch),
    metrics("delete-batch ", &[Ids], change::delete_batch),
    metrics("touch-all", &[], change::touch_all),
    metrics("flush-tube ", &[Name], change::flush_tube),
    metrics("flush-buried ", &[Name], change::flush_buried),
    metrics("list-jobs ", &[Tube, State, Count, OptionalId], pages::list_jobs),
    metrics("peek-batch ", &[Tube, State, Count, OptionalId], pages::peek_batch),
    uncounted("reserve-job ", &[Id], reserve::reserve_job),
    uncounted("kick-job ", &[Id], change::kick_job),
    uncounted("quit", &[Anything], quit),
];

impl Command {
    /// Returns the name, as the protocol's page has it.
    pub fn name(&self) -> &'static str {
        self.word.trim_end()
    }

    /// Returns the number of the command in [`COMMANDS`] of this name.
    ///
    /// # Panics
    /// There is none.
    pub fn number_of(name: &str) -> usize {
        COMMANDS.iter().position(|row| row.name() == name).expect("there is such a command")
    }
}

/// The most commands that begin with the same letter.
const MOST_OF_A_LETTER: usize = 8;
const LETTERS: usize = 26;

/// For each letter the numbers of its commands, the longest word first: one may be a prefix of another.
static BY_LETTER: [[Option<usize>; MOST_OF_A_LETTER]; LETTERS] = {
    let mut table = [[None::<usize>; MOST_OF_A_LETTER]; LETTERS];
    let mut number = 0;
    while number < COMMANDS.len() {
        let word = COMMANDS[number].word.as_bytes();
        let row = &mut table[(word[0] - b'a') as usize];
        let mut moved: Option<usize> = Some(number);
        let mut at = 0;
        while let Some(one) = moved {
            let is_before = match row[at] {
                None => true,
                Some(other) => COMMANDS[one].word.len() > COMMANDS[other].word.len(),
            };
            if is_before {
                let next = row[at];
                row[at] = moved;
                moved = next;
            }
            at += 1;
        }
        number += 1;
    }
    table
};

/// The first eight bytes of each word, and the mask of those that it has: a call to compare bytes would
/// cost more than the rest of the search.
static HEADS: [(u64, u64); COMMANDS.len()] = {
    let mut heads = [(0, 0); COMMANDS.len()];
    let mut number = 0;
    while number < COMMANDS.len() {
        let word = COMMANDS[number].word.as_bytes();
        let mut at = 0;
        while at < word.len() && at < 8 {
            heads[number].0 |= (word[at] as u64) << (8 * at);
            heads[number].1 |= 0xff << (8 * at);
            at += 1;
        }
        number += 1;
    }
    heads
};

/// Returns the number of the command at the start of a line.
fn find(line: &[u8]) -> Option<usize> {
    let letter = usize::from(line.first()?.wrapping_sub(b'a'));
    let head = line.first_chunk().copied().unwrap_or_else(|| {
        let mut head = [0; 8];
        head[..line.len()].copy_from_slice(line);
        head
    });
    let head = u64::from_le_bytes(head);
    let mut numbers = BY_LETTER.get(letter)?.iter().map_while(|number| *number);
    numbers.find(|&number| {
        let (value, mask) = HEADS[number];
        let word = COMMANDS[number].word.as_bytes();
        head & mask == value && (word.len() <= 8 || line.starts_with(word))
    })
}

/// Runs a line without its CR LF.
pub fn run_line(c: &mut Conn, s: &mut Store, line: &[u8]) -> Answer {
    trace!("connection {}: {}", c.index(), line.escape_ascii());
    let Some(number) = find(line) else {
        let has_nul = text::find_byte(0, line).is_some();
        let word = if has_nul { Word::BadFormat } else { Word::UnknownCommand };
        return reject(c, line.into(), word);
    };
    let Command { word, arguments, run, .. } = &COMMANDS[number];
    let Some(args) = Args::parse(arguments, &line[word.len()..]) else {
        return reject(c, line.into(), Word::BadFormat);
    };
    s.commands[number] += 1;
    run(c, s, &args)
}

/// Answers a line that is no command. Closes the connection after an HTTP request, so that its headers
/// and body do not run as commands.
#[cold]
pub fn reject(c: &mut Conn, line: LineTail, word: Word) -> Answer {
    if line.is_http() {
        debug!("connection {}: received an HTTP request; closing after the reply", c.index());
        c.close_after_write();
        return Err(Word::UnknownCommand);
    }
    Err(word)
}

fn quit(c: &mut Conn, _: &mut Store, _: &Args<'_>) -> Answer {
    c.close_after_write();
    Ok(Reply::Later)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_finds_its_command() {
        for (number, command) in COMMANDS.iter().enumerate() {
            assert_eq!(find(command.word.as_bytes()), Some(number), "{}", command.word);
        }
        for line in ["", "put", "PUT 1", " put 1", "peek", "use\tx", "kick", "{", "@"] {
            assert_eq!(find(line.as_bytes()), None, "{line}");
        }
    }

    #[test]
    fn commands_of_stats_come_first() {
        assert!(COMMANDS.is_sorted_by_key(|command| command.counted as u8));
    }
}
