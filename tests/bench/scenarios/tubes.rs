//! The cost of tubes for clients that do not use them, that use them, and that watch many.

use super::{ROUND, Round, Scenario, Settings, Turns};
use crate::client::{Limits, Outcome, Pool};
use crate::figures::Figures;
use crate::load::{Cycle, Say, UseRandom, Watcher, watch};
use crate::server::Server;

pub fn all() -> Vec<Scenario> {
    const COUNTS: [usize; 4] = [1, 1000, 10_000, 100_000];
    let beside = COUNTS.into_iter().map(beside);
    let used = COUNTS.into_iter().map(used);
    let watched = [1, 1000].into_iter().map(watched);
    beside.chain(used).chain(watched).chain([memory()]).collect()
}

const CONNECTIONS: usize = 10;

fn beside(tubes: usize) -> Scenario {
    let what =
        format!("put, reserve, delete in one tube on 10 connections; tubes beside it: {tubes}");
    Scenario::new(format!("tubes-{tubes}"), what, move |server, settings| {
        let keeper = watch_all(server, settings, tubes)?;
        let mut pool = Pool::connect(server.address, CONNECTIONS);
        Ok(Box::new(move |server| {
            let _kept = &keeper;
            let mut script = Cycle::new(CONNECTIONS, 1, 64);
            Ok(server.measure(|| pool.run(&mut script, Limits::lasting(ROUND)))?.figures())
        }))
    })
}

fn used(tubes: usize) -> Scenario {
    let what = format!("use of a random tube on 10 connections; tubes: {tubes}");
    Scenario::new(format!("use-{tubes}"), what, move |server, settings| {
        let keeper = watch_all(server, settings, tubes)?;
        let mut pool = Pool::connect(server.address, CONNECTIONS);
        Ok(Box::new(move |server| {
            let _kept = &keeper;
            let mut script = UseRandom::new(tubes);
            Ok(server.measure(|| pool.run(&mut script, Limits::lasting(ROUND)))?.figures())
        }))
    })
}

fn watched(tubes: usize) -> Scenario {
    let what = format!(
        "put into a random tube that is watched, reserve, delete; tubes watched: {tubes}; \
         an op is a job, latencies are of writes"
    );
    Scenario::new(format!("watch-{tubes}"), what, move |server, settings| {
        let mut worker = watch_all(server, settings, tubes)?;
        Ok(Box::new(move |server| {
            let run = || worker.run(&mut Watcher::new(tubes), Limits::lasting(ROUND));
            let mut measured = server.measure(run)?;
            measured.ops /= f64::from(Watcher::REPLIES_PER_JOB);
            Ok(measured.figures())
        }))
    })
}

/// As many as it makes in some seconds: where each has to be looked for among all others,
/// the last ones take longest.
fn memory() -> Scenario {
    const MOST: usize = 100_000;
    let what = "memory of a tube, with up to 100,000 watched by one connection";
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let time = settings.patience / 2;
        Ok(Box::new(move |server| {
            let mut keeper = Pool::connect(server.address, 1);
            let before_bytes = server.rss_bytes();
            let mut script = Say::pipelined((0..MOST).map(watch));
            let made = keeper.run(&mut script, Limits::lasting(time))?.replies as f64;
            let mut figures = Figures::default();
            figures.add("tubes", made);
            figures.add("bytes_per_tube", (server.rss_bytes() - before_bytes) / made);
            Ok(figures)
        }))
    };
    Scenario { rounds: 1, turns: Turns::Alone, ..Scenario::new("tube-memory", what, prepare) }
}

/// A connection that watches this number of tubes.
pub fn watch_all(server: &Server, settings: &Settings, tubes: usize) -> Outcome<Pool> {
    let mut keeper = Pool::connect(server.address, 1);
    let lines = (0..tubes).map(watch);
    keeper.run(&mut Say::pipelined(lines), Limits::within(settings.patience))?;
    Ok(keeper)
}
