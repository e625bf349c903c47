//! The commands: one row for each in [`COMMANDS`], and its handler.
//!
//! A row drives the parser, the counters in `stats` and in the metrics, and what tests generate. A
//! handler checks, changes the store, and answers. It has the connection and the store in hand and
//! knows no other connection: when it ends the wait of one, the store notes that, and the loop
//! delivers it after the visit. A handler that cannot finish leaves the rest in [`Conn::doing`].
//!
//! | file | commands |
//! |---|---|
//! | [`lines`] | none: it cuts lines out of what clients send, and finds their commands |
//! | [`put`] | `put`, `put-in-tube` |
//! | [`reserve`] | `reserve`, `reserve-with-timeout`, `reserve-batch`, `reserve-job` |
//! | [`change`] | commands for jobs that exist, and for tubes |
//! | [`show`] | statistics, peeks, lists of tubes |
//! | [`pages`] | `list-jobs`, `peek-batch`, `list-clients` |

pub mod change;
pub mod lines;
pub mod pages;
pub mod put;
pub mod reserve;
pub mod show;

use super::conn::{Conn, Doing};
use super::protocol::parse::Argument::{
    self, Anything, Bound, Ids, LastTube, OptionalTube, Pause, State, Tag, Tube,
};
use super::protocol::parse::{
    Args, COUNT, ID, NUMBER, OPTIONAL_ID, OPTIONAL_SECONDS, SECONDS, line_max,
};
use super::protocol::reply::Answer;
use super::store::Store;
use Counted::{InMetrics, InStats, Nowhere};

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
    row("use ", &[LastTube], InStats, change::use_tube),
    row("watch ", &[LastTube], InStats, change::watch),
    row("ignore ", &[LastTube], InStats, change::ignore),
    row("bury ", &[ID, NUMBER], InStats, change::bury),
    row("kick ", &[Bound], InStats, change::kick),
    row("touch ", &[ID], InStats, change::touch),
    row("stats", &[], InStats, show::stats),
    row("stats-job ", &[ID], InStats, show::stats_job),
    row("stats-tube ", &[LastTube], InStats, show::stats_tube),
    row("list-tubes", &[], InStats, show::list_tubes),
    row("list-tube-used", &[], InStats, show::list_tube_used),
    row("list-tubes-watched", &[], InStats, show::list_tubes_watched),
    row("pause-tube", &[Pause], InStats, change::pause_tube),
    row("put-in-tube ", &[Tube, NUMBER, NUMBER, NUMBER, NUMBER, Tag], InMetrics, put::put_in_tube),
    row("reserve-batch ", &[COUNT, OPTIONAL_SECONDS], InMetrics, reserve::reserve_batch),
    row("delete-batch ", &[Ids], InMetrics, change::delete_batch),
    row("touch-all", &[], InMetrics, change::touch_all),
    row("flush-tube ", &[LastTube], InMetrics, change::flush_tube),
    row("flush-buried ", &[LastTube], InMetrics, change::flush_buried),
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

fn quit(c: &mut Conn, _: &mut Store, _: &Args<'_>) -> Answer {
    c.then(Doing::Closing)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_of_stats_come_first() {
        assert!(COMMANDS.is_sorted_by_key(|command| command.counted as u8));
    }
}
