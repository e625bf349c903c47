//! The cost of scrapes without pause for the clients.

use super::{Scenario, Settings, Turns, tubes};
use crate::client::{Limits, Outcome, Pool};
use crate::load::{Cycle, Fill};
use crate::server::{Measured, Server, Setup};
use std::time::Duration;

pub fn all() -> Vec<Scenario> {
    const TUBES: usize = 10_000;
    const JOBS: usize = 1_000_000;
    let beside_tubes = move |server: &Server, settings: &Settings| {
        let keeper = tubes::watch_all(server, settings, TUBES)?;
        Ok(vec![keeper])
    };
    let beside_jobs = move |server: &Server, settings: &Settings| {
        let mut producer = Pool::connect(server.address, 1);
        let limits = Limits::within(5 * settings.patience);
        producer.run(&mut Fill::with_priorities(JOBS, 64), limits)?;
        Ok(Vec::new())
    };
    vec![
        scrape("scrape-tubes", "10,000 tubes, 1,000 of them told one by one", &[], beside_tubes),
        scrape(
            "scrape-all-tubes",
            "10,000 tubes that are told one by one",
            &["--metrics-tubes", "20000"],
            beside_tubes,
        ),
        scrape("scrape-jobs", "a million ready jobs of random priorities", &[], beside_jobs),
    ]
}

/// One by one, so that each delay is visible.
const CONNECTIONS: usize = 10;
/// Long enough that a thousandth of the operations are some.
const TIME: Duration = Duration::from_secs(1);

fn scrape(
    name: &str,
    beside: &str,
    flags: &[&str],
    fill: impl Fn(&Server, &Settings) -> Outcome<Vec<Pool>> + 'static,
) -> Scenario {
    let what = format!(
        "put, reserve, delete on 10 connections beside {beside}; a second without scrapes, and one \
         (scraped) with one after the other; latencies are without the time in which server or \
         client waited for a core"
    );
    let scenario = Scenario::new(name, what, move |server, settings| {
        let keepers = fill(server, settings)?;
        let mut pool = Pool::without_noise(server.address, CONNECTIONS, server.waits());
        Ok(Box::new(move |server| {
            let _kept = &keepers;
            let without = cycle(server, &mut pool)?;
            pool.start_scraping(server.metrics.expect("the server was started with them"));
            let with = cycle(server, &mut pool)?;
            let scrapes = pool.stop_scraping();
            let mut figures = without.figures().only(&LATENCIES);
            figures.append(with.figures().only(&LATENCIES).with_prefix("scraped_"));
            let cpu_us = with.cpu_us - with.ops * (without.cpu_us / without.ops);
            figures.append(scrapes.figures(cpu_us));
            Ok(figures)
        }))
    });
    let flags = flags.iter().map(|&flag| flag.to_owned()).collect();
    Scenario {
        setup: Setup { flags, tells_metrics: true, ..Setup::default() },
        turns: Turns::Interleaved { is_traced: false },
        ..scenario
    }
}

const LATENCIES: [&str; 5] = ["ops_per_s", "p50_us", "p99_us", "p99.9_us", "max_us"];

fn cycle(server: &Server, pool: &mut Pool) -> Outcome<Measured> {
    let mut script = Cycle::new(CONNECTIONS, 1, 64);
    server.measure(|| pool.run(&mut script, Limits::lasting(TIME)))
}
