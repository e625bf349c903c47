//! From the bytes of a client to a command: the ends of lines, and the words at their starts.
//!
//! Most commands have numbers alone. Their arguments are parsed in one pass over the bytes, and what follows is the end
//! of the line. For the others, and for whatever else clients send, the end is searched first. Handlers know
//! nothing of this.

use super::{COMMANDS, Command};
use crate::engine::conn::{Conn, Doing};
use crate::engine::protocol::parse::Argument::Tag;
use crate::engine::protocol::parse::{Args, COMMAND_LINE_MAX, LineTail, TAGGED_LINE_MAX};
use crate::engine::protocol::reply::{Answer, Word};
use crate::engine::store::Store;
use crate::engine::text::CR_LF;
use log::{debug, trace};
use memchr::{memchr, memmem};

/// The most commands that begin with the same letter. With more of them, the table below does not compile.
const MOST_OF_A_LETTER: usize = 10;
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
fn find(line: &[u8]) -> Option<usize> {
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

/// Runs the command at the start of the input. Returns `None` if it needs more bytes.
#[inline]
pub fn run_next(c: &mut Conn, s: &mut Store, input: &mut &[u8]) -> Option<Answer> {
    let command = find(input);
    let window = &input[..input.len().min(COMMAND_LINE_MAX)];
    if let Some(number) = command
        && let Command { word, arguments, .. } = &COMMANDS[number]
        && let Some((args, rest)) = Args::of_numbers(arguments, &window[word.len()..])
        && rest.starts_with(CR_LF)
    {
        let (line, rest) = input.split_at(window.len() - rest.len());
        *input = &rest[CR_LF.len()..];
        return Some(run(c, s, number, line, &args));
    }
    run_line(c, s, command, input)
}

/// Searches for the end of the line, and runs the command.
fn run_line(
    c: &mut Conn,
    s: &mut Store,
    command: Option<usize>,
    input: &mut &[u8],
) -> Option<Answer> {
    let line_max = longest_line(command);
    let window = &input[..input.len().min(line_max)];
    if let Some(length) = find_line_end(window) {
        let (line, rest) = input.split_at(length);
        *input = &rest[CR_LF.len()..];
        let answer = parse_and_run(c, s, command, line);
        return Some(answer.or_else(|word| reject(c, line.into(), word)));
    }
    if window.len() < line_max {
        if window.len() >= TAGGED_LINE_MAX && s.is_crowded() {
            return skip_line(c, None, input);
        }
        return None;
    }
    skip_line(c, Some(LineTail::default()), input)
}

/// Runs the line, without its CR LF, of a command that was found at its start.
fn parse_and_run(c: &mut Conn, s: &mut Store, command: Option<usize>, line: &[u8]) -> Answer {
    let Some(number) = command else {
        let has_nul = memchr(0, line).is_some();
        return Err(if has_nul { Word::BAD_FORMAT } else { Word::UNKNOWN_COMMAND });
    };
    let Command { word, arguments, .. } = &COMMANDS[number];
    let args = Args::parse(arguments, &line[word.len()..]).ok_or(Word::BAD_FORMAT)?;
    let full_len = line.len() + CR_LF.len();
    // Only the tags make the line of a put longer than others.
    let is_long_put = full_len > COMMAND_LINE_MAX && arguments.last() == Some(&Tag);
    if is_long_put && full_len > args.rest.tags_line_max() {
        return Err(Word::BAD_FORMAT);
    }
    run(c, s, number, line, &args)
}

/// Counts a command, and runs it.
#[inline]
fn run(c: &mut Conn, s: &mut Store, number: usize, line: &[u8], args: &Args<'_>) -> Answer {
    trace!("connection {}: {}", c.id(), line.escape_ascii());
    s.commands[number] += 1;
    (COMMANDS[number].run)(c, s, args)
}

/// Drops a line up to its end. `tail` is the tail of the bytes that were dropped, unless there is no memory
/// for the line.
pub fn skip_line(c: &mut Conn, mut tail: Option<LineTail>, input: &mut &[u8]) -> Option<Answer> {
    let end = find_line_end(input);
    // A CR at the end may be the first half of the line's end.
    let len = end.unwrap_or(input.len() - usize::from(input.ends_with(b"\r")));
    if let Some(tail) = &mut tail {
        tail.add(&input[..len]);
    }
    *input = &input[len..];
    if end.is_none() {
        c.doing = Doing::SkipLine(tail);
        return None;
    }
    *input = &input[CR_LF.len()..];
    Some(tail.map_or(Err(Word::OUT_OF_MEMORY), |tail| reject(c, tail, Word::BAD_FORMAT)))
}

/// Answers a line with an error. Closes the connection after an HTTP request, which is no command, so that its headers
/// and body do not run as commands.
#[cold]
fn reject(c: &mut Conn, line: LineTail, word: Word) -> Answer {
    if matches!(word, Word::BAD_FORMAT | Word::UNKNOWN_COMMAND) && line.is_http() {
        debug!("connection {}: received an HTTP request; closing after the reply", c.id());
        c.doing = Doing::Closing;
        return Err(Word::UNKNOWN_COMMAND);
    }
    Err(word)
}

/// Returns whether these bytes are the beginning of a line, for the check.
pub fn is_incomplete(input: &[u8]) -> bool {
    input.len() < longest_line(find(input)) && find_line_end(input).is_none()
}

/// Returns the maximum length of the line of a command with its CR LF, in bytes.
fn longest_line(command: Option<usize>) -> usize {
    command.map_or(COMMAND_LINE_MAX, |number| COMMANDS[number].line_max)
}

/// Returns the length of the first line, if its end is in `bytes`.
fn find_line_end(bytes: &[u8]) -> Option<usize> {
    let at = memchr(b'\n', bytes)?;
    if bytes[..at].ends_with(b"\r") {
        return Some(at - 1);
    }
    // Lines seldom have an LF alone. A long one that comes in many parts is searched from its start each time, in
    // less than 2 us whatever it has.
    Some(at + memmem::find(&bytes[at..], CR_LF)?)
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
}
