//! The cost of idle connections.

use super::{Scenario, Turns};
use crate::client::{Limits, Pool};
use crate::load::{Cycle, Say};
use std::time::Duration;

pub fn all() -> Vec<Scenario> {
    vec![idle()]
}

/// Two servers at once would need more files than one client process may open.
fn idle() -> Scenario {
    const IDLE: usize = 10_000;
    const ACTIVE: usize = 50;
    const TIME: Duration = Duration::from_secs(1);
    let what = "put, reserve, delete on 50 connections beside 10,000 idle ones";
    let scenario = Scenario::new("idle-10k", what, |server, settings| {
        let before_bytes = server.rss_bytes();
        let idle = Pool::connect(server.address, IDLE);
        // The last of them has been accepted when one that came later is served.
        let mut active = Pool::connect(server.address, ACTIVE);
        let mut greet = Say::one_by_one(vec!["use default".to_owned(); ACTIVE]);
        active.run(&mut greet, Limits::within(settings.patience))?;
        let bytes_per_connection = (server.rss_bytes() - before_bytes) / (IDLE + ACTIVE) as f64;
        Ok(Box::new(move |server| {
            let _kept = &idle;
            let mut script = Cycle::new(ACTIVE, 1, 64);
            let measured = server.measure(|| active.run(&mut script, Limits::lasting(TIME)))?;
            let mut figures = measured.figures();
            figures.add("bytes_per_connection", bytes_per_connection);
            Ok(figures)
        }))
    });
    Scenario { rounds: 3, turns: Turns::Alone, open_files: IDLE + ACTIVE, ..scenario }
}
