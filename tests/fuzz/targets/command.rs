//! One line of a client. The model of the simulation parses it with a parser of its own. Its reply, and
//! what it changes, must be what the model gives.

use super::connection::judge;
use crate::simulation::event::{Event, Setup};

/// Jobs in each state for the line: 1 is reserved by its client, 2 buried, 3 delayed, 4 ready.
const BEFORE: &[u8] =
    b"put 1 0 90 1\r\na\r\nput 2 0 90 1\r\nb\r\nreserve-job 2\r\nbury 2 5\r\nreserve\r\n\
    put 3 60 90 1\r\nc\r\nput 4 0 90 1\r\nd\r\n";
/// Shows the arguments of the line by what they have changed.
const OF_CLIENT: &[u8] = b"\r\nlist-tube-used\r\nlist-tubes-watched\r\n";
const OF_SERVER: &[u8] =
    b"stats-job 1\r\nstats-job 2\r\nstats-job 3\r\nstats-job 4\r\nstats-job 5\r\n\
    list-jobs default any 1000\r\nstats-tube default\r\nlist-tubes\r\nstats\r\n";

pub fn run(bytes: &[u8]) {
    let setup: Setup = "setup 10".parse().expect("it is a setup");
    judge(
        setup,
        &[
            Event::Connect(0),
            Event::Send(0, BEFORE.to_vec()),
            Event::EndIteration,
            Event::Send(0, [bytes, b"\r\n"].concat()),
            Event::EndIteration,
            Event::Send(0, OF_CLIENT.to_vec()),
            Event::Connect(1),
            Event::Send(1, OF_SERVER.to_vec()),
            // A line that waits for a job has a timeout.
            Event::AdvanceUntilDue,
            Event::Advance(1),
        ],
    );
}
