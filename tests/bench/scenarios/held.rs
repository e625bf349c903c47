//! What it costs to delete or touch a job when one connection holds many.

use super::{Scenario, Settings};
use crate::client::{Limits, Outcome, Pool};
use crate::load::{Fill, Say, Take};
use crate::server::Server;
use fastrand::Rng;
use std::time::Duration;

pub fn all() -> Vec<Scenario> {
    const COUNTS: [usize; 2] = [1000, 50_000];
    let delete = COUNTS.into_iter().map(|held| one_of("delete", held));
    let touch = COUNTS.into_iter().map(|held| one_of("touch", held));
    delete.chain(touch).collect()
}

/// Requests of a round: few compared with the jobs held, so that their number hardly changes.
const REQUESTS: usize = 300;

fn one_of(verb: &'static str, held: usize) -> Scenario {
    let what = format!("{verb} of one of {held} jobs that the connection holds, at random");
    Scenario::new(format!("held-{verb}-{held}"), what, move |server, settings| {
        let mut holder = Holder::new(server, settings);
        holder.hold(held)?;
        Ok(Box::new(move |server| {
            let lines: Vec<String> = (0..REQUESTS)
                .map(|_| format!("{verb} {}", holder.pick(verb == "delete")))
                .collect();
            let mut script = Say::one_by_one(lines);
            let limits = Limits::within(holder.patience);
            let measured = server.measure(|| holder.pool.run(&mut script, limits))?;
            holder.hold(held)?;
            Ok(measured.figures())
        }))
    })
}

/// One connection and the jobs it holds.
struct Holder {
    pool: Pool,
    ids: Vec<u64>,
    random: Rng,
    patience: Duration,
}

impl Holder {
    fn new(server: &Server, settings: &Settings) -> Holder {
        let pool = Pool::connect(server.address, 1);
        Holder { pool, ids: Vec::new(), random: Rng::with_seed(1), patience: settings.patience }
    }

    /// Puts and reserves the jobs that are missing.
    fn hold(&mut self, count: usize) -> Outcome<()> {
        let limits = Limits::within(self.patience);
        let missing = count - self.ids.len();
        self.pool.run(&mut Fill::new(missing, 64), limits)?;
        let mut take = Take::new(missing);
        self.pool.run(&mut take, limits)?;
        self.ids.append(&mut take.ids);
        Ok(())
    }

    /// One of the jobs, which it may be the last time to speak of.
    fn pick(&mut self, is_last_time: bool) -> u64 {
        let index = self.random.usize(..self.ids.len());
        if is_last_time { self.ids.swap_remove(index) } else { self.ids[index] }
    }
}
