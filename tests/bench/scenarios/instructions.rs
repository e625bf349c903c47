//! Instructions of user space for a command: what is left of a server's cost when the kernel, the
//! machine and other programs are left out. They are counted only when asked for: in valgrind a
//! server takes fifty times as long.

use super::{Round, Scenario, Settings, Turns};
use crate::client::{Limits, Outcome, Pool};
use crate::figures::Figures;
use crate::load::Cycle;
use crate::server::{Server, Setup};
use std::time::Duration;

pub fn all() -> Vec<Scenario> {
    vec![cycle("instructions-1", 1), cycle("instructions-50", 50)]
}

const BODY_SIZE: usize = 64;

/// Two runs, of which one is longer, so that starting, connecting and ending do not count.
fn cycle(name: &str, connections: usize) -> Scenario {
    const SHORT: usize = 1_000;
    const LONG: usize = 10_000;
    let what = format!(
        "put, reserve, delete of {BODY_SIZE} bytes, one by one; connections: {connections}; in \
         valgrind"
    );
    let prepare = move |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = settings.patience;
        Ok(Box::new(move |server| {
            let (short, few) = run(server, connections, SHORT, patience)?;
            server.start_again(patience)?;
            let (long, many) = run(server, connections, LONG, patience)?;
            let mut figures = Figures::default();
            figures.add("user_instructions_per_op", (long - short) / (many - few));
            Ok(figures)
        }))
    };
    let setup = Setup { counts_instructions: true, body_size: BODY_SIZE, ..Setup::default() };
    Scenario {
        setup,
        rounds: 1,
        turns: Turns::Alone,
        has_limit: true,
        ..Scenario::new(name, what, prepare)
    }
}

/// Puts, reserves and deletes the given number of jobs on all connections together, and ends the
/// server.
/// Returns how many instructions it has run, and for how many commands.
fn run(
    server: &mut Server,
    connections: usize,
    jobs: usize,
    patience: Duration,
) -> Outcome<(f64, f64)> {
    let mut pool = Pool::connect(server.address, connections);
    let mut script = Cycle::new(connections, 1, BODY_SIZE).ending_after(jobs / connections);
    let run = pool.run(&mut script, Limits::within(patience))?;
    server.terminate();
    Ok((server.instructions(), run.replies as f64))
}
