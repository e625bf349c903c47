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
//! | [`pages`] | `list-jobs`, `peek-batch`, `list-clients` |

pub mod change;
pub mod pages;
pub mod put;
pub mod reserve;
pub mod show;

use super::conn::Conn;
use super::protocol::parse::Argument::{
    self, Anything, Bound, Ids, Name, OptionalTube, Pause, State, Tag, Tube,
};
use super::protocol::parse::{
    Args, COUNT, ID, LINE_MAX, LineTail, NUMBER, OPTIONAL_ID, OPTIONAL_SECONDS, SECONDS, line_max,
};
use super::protocol::reply::{Answer, Reply, Word};
use super::store::Store;
use super::text::{self, CR_LF};
use Counted::{InMetrics, InStats, Nowhere};
use log::{debug, trace};

/// Runs a command whose arguments are parsed.
pub type Handler = fn(&mut Conn, &mut Store, &Args<'_>) -> Answer;

/// One command.
pub struct Command {
    /// The beginning of the line, with the space if arguments must follow.
    // Quirk: words match as prefixes, so `statsx` is a `stats` with bad arguments; pinned by
    // tests/conversations/prefix-matching.txt.
    pub word: &'static str,
    /// The arguments after the word.
    pub arguments: &'static [Argument],
    /// The maximum length of the line with its CR LF, in bytes.
    line_max: usize,
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
    Command { word, arguments, line_max: line_max(arguments), counted, run }
}

/// All commands. Those of `stats` come first, in the order of their lines there. A word comes after those that
/// are prefixes of it.
pub static COMMANDS: &[Command] = &[
    row("put ", &[NUMBER, NUMBER, NUMBER, NUMBER, Tag], InStats, put::put),
    row("peek ", &[ID], InStats, show::peek),
    row("peek-ready", &[], InStats, show::peek_ready),
    row("peek-delayed", &[], InStats, show::peek_delayed),
    row("peek-buried", &[], InStats, show::peek_buried),
    row("reserve", &[], InStats, reserve::reserve),
    // Quirk: bytes after the number are ignored; pinned by
    // tests/conversations/reserve-with-timeout-format.txt.
    row("reserve-with-timeout ", &[SECONDS, Anything], InStats, reserve::reserve_with_timeout),
    row("delete ", &[ID], InStats, change::delete),
    row("release ", &[ID, NUMBER, NUMBER], InStats, change::release),
    row("use ", &[Name], InStats, change::use_tube),
    row("watch ", &[Name], InStats, change::watch),
    row("ignore ", &[Name], InStats, change::ignore),
    row("bury ", &[ID, NUMBER], InStats, change::bury),
    row("kick ", &[Bound], InStats, change::kick),
    row("touch ", &[ID], InStats, change::touch),
    row("stats", &[], InStats, show::stats),
    row("stats-job ", &[ID], InStats, show::stats_job),
    row("stats-tube ", &[Name], InStats, show::stats_tube),
    row("list-tubes", &[], InStats, show::list_tubes),
    row("list-tube-used", &[], InStats, show::list_tube_used),
    row("list-tubes-watched", &[], InStats, show::list_tubes_watched),
    row("pause-tube", &[Pause], InStats, change::pause_tube),
    row("put-in-tube ", &[Tube, NUMBER, NUMBER, NUMBER, NUMBER, Tag], InMetrics, put::put_in_tube),
    row("reserve-batch ", &[COUNT, OPTIONAL_SECONDS], InMetrics, reserve::reserve_batch),
    row("delete-batch ", &[Ids], InMetrics, change::delete_batch),
    row("touch-all", &[], InMetrics, change::touch_all),
    row("flush-tube ", &[Name], InMetrics, change::flush_tube),
    row("flush-buried ", &[Name], InMetrics, change::flush_buried),
    row("list-jobs ", &[Tube, State, COUNT, OPTIONAL_ID], InMetrics, pages::list_jobs),
    row("peek-batch ", &[Tube, State, COUNT, OPTIONAL_ID], InMetrics, pages::peek_batch),
    row("list-clients ", &[COUNT, OPTIONAL_ID, OptionalTube], InMetrics, pages::list_clients),
    row("reserve-job ", &[ID], InMetrics, reserve::reserve_job),
    row("kick-job ", &[ID], InMetrics, change::kick_job),
    row("quit", &[Anything], Nowhere, quit),
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

/// The most commands that begin with the same letter. With more of them, the table below does not compile.
const MOST_OF_A_LETTER: usize = 8;
const LETTERS: usize = 26;

/// The first eight bytes of the word of a command, and the mask of those that it has: a call to compare bytes would
/// cost more than the rest of the search.
#[derive(Clone, Copy)]
struct Head {
    number: usize,
    value: u64,
    mask: u64,
}

/// The commands of each letter. First those whose words end in a space, which are no prefix of another word: so a
/// line is compared with `put ` first. Then the others, the last row first.
static BY_LETTER: [[Option<Head>; MOST_OF_A_LETTER]; LETTERS] = {
    let mut table = [[None; MOST_OF_A_LETTER]; LETTERS];
    let mut lens = [0; LETTERS];
    let mut step = 0;
    while step < 2 * COMMANDS.len() {
        let is_second_pass = step >= COMMANDS.len();
        let number = if is_second_pass { 2 * COMMANDS.len() - 1 - step } else { step };
        let word = COMMANDS[number].word.as_bytes();
        if (word[word.len() - 1] == b' ') != is_second_pass {
            let (mut value, mut mask, mut at) = (0, 0, 0);
            while at < word.len() && at < 8 {
                value |= (word[at] as u64) << (8 * at);
                mask |= 0xff << (8 * at);
                at += 1;
            }
            let letter = (word[0] - b'a') as usize;
            table[letter][lens[letter]] = Some(Head { number, value, mask });
            lens[letter] += 1;
        }
        step += 1;
    }
    table
};

/// Returns the number of the command at the start of these bytes, which may be a part of a line, or more than one.
pub fn find(line: &[u8]) -> Option<usize> {
    let letter = usize::from(line.first()?.wrapping_sub(b'a'));
    let head = line.first_chunk().copied().unwrap_or_else(|| {
        let mut head = [0; 8];
        head[..line.len()].copy_from_slice(line);
        head
    });
    let head = u64::from_le_bytes(head);
    let mut commands = BY_LETTER.get(letter)?.iter().map_while(|head| *head);
    let is_word = |&Head { number, value, mask }: &Head| {
        head & mask == value
            && (mask != u64::MAX || line.starts_with(COMMANDS[number].word.as_bytes()))
    };
    commands.find(is_word).map(|found| found.number)
}

/// Returns the maximum length of the line of a command with its CR LF, in bytes.
pub fn longest_line(command: Option<usize>) -> usize {
    command.map_or(LINE_MAX, |number| COMMANDS[number].line_max)
}

/// Runs the line, without its CR LF, of a command that was found at its start.
pub fn run_line(c: &mut Conn, s: &mut Store, command: Option<usize>, line: &[u8]) -> Answer {
    trace!("connection {}: {}", c.id(), line.escape_ascii());
    let Some(number) = command else {
        let has_nul = text::find_byte(0, line).is_some();
        let word = if has_nul { Word::BadFormat } else { Word::UnknownCommand };
        return reject(c, line.into(), word);
    };
    let Command { word, arguments, run, .. } = &COMMANDS[number];
    let Some(args) = Args::parse(arguments, &line[word.len()..]) else {
        return reject(c, line.into(), Word::BadFormat);
    };
    let full_len = line.len() + CR_LF.len();
    // Only the tags make the line of a put longer than others.
    let is_long_put = full_len > LINE_MAX && arguments.last() == Some(&Tag);
    if is_long_put && full_len > args.rest.tags_line_max() {
        return reject(c, line.into(), Word::BadFormat);
    }
    s.commands[number] += 1;
    run(c, s, &args)
}

/// Answers a line that is no command. Closes the connection after an HTTP request, so that its headers
/// and body do not run as commands.
#[cold]
pub fn reject(c: &mut Conn, line: LineTail, word: Word) -> Answer {
    if line.is_http() {
        debug!("connection {}: received an HTTP request; closing after the reply", c.id());
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
