//! Unique jobs: the processor time of a put with a key, and the memory of a key.

use super::{Round, Scenario, Settings, Turns};
use crate::client::{Limits, Outcome, Pool};
use crate::figures::Figures;
use crate::load::Fill;
use crate::server::Server;
use std::time::{Duration, Instant};

pub fn all() -> Vec<Scenario> {
    vec![keys()]
}

/// There are this many jobs without keys, and this many with keys.
const DEPTH: usize = 1_000_000;
/// The cost of a put is measured with this many jobs: pipelined, and one by one.
const PIPELINED: usize = 200_000;
const ONE_BY_ONE: usize = 20_000;
const BODY_SIZE: usize = 64;

fn keys() -> Scenario {
    let what = format!(
        "put of {BODY_SIZE} bytes in front of {DEPTH} jobs without keys and {DEPTH} with keys, 100 to a \
         write and one by one (single): without a key, with a new one, and with one that another job \
         has (hit); cpu us/op; and one random read of as much memory as their index has (read)"
    );
    let prepare = |_: &mut Server, settings: &Settings| -> Outcome<Round> {
        let patience = 5 * settings.patience;
        Ok(Box::new(move |server| measure(server, patience)))
    };
    let scenario = Scenario::new("keys-1m", what, prepare);
    Scenario { rounds: 3, turns: Turns::Alone, needs_extensions: true, ..scenario }
}

fn measure(server: &Server, patience: Duration) -> Outcome<Figures> {
    let mut pool = Pool::connect(server.address, 1);
    let mut put = |fill: &mut Fill| -> Outcome<f64> {
        let measured = server.measure(|| pool.run(fill, Limits::within(patience)))?;
        Ok(measured.cpu_us / measured.ops)
    };
    let mut sizes = vec![server.rss_bytes()];
    for mut fill in [Fill::new(DEPTH, BODY_SIZE), Fill::with_keys(0, DEPTH, BODY_SIZE)] {
        put(&mut fill)?;
        sizes.push(server.rss_bytes());
    }
    let mut figures = Figures::default();
    let grown_bytes = (sizes[2] - sizes[1]) - (sizes[1] - sizes[0]);
    figures.add("bytes_per_key", grown_bytes / DEPTH as f64);
    let mut first_new = DEPTH as u64;
    for (prefix, count, batch) in [("", PIPELINED, None), ("single_", ONE_BY_ONE, Some(1))] {
        let mut cost = |mut fill: Fill| {
            fill.batch = batch.unwrap_or(fill.batch);
            put(&mut fill)
        };
        let plain = cost(Fill::new(count, BODY_SIZE))?;
        let with_key = cost(Fill::with_keys(first_new, count, BODY_SIZE))?;
        let hit = cost(Fill::with_keys(0, count, BODY_SIZE))?;
        first_new += count as u64;
        for (name, us) in [("no_key_us", plain), ("key_us", with_key), ("hit_us", hit)] {
            figures.add(&format!("{prefix}{name}"), us);
        }
        figures.add(&format!("{prefix}key_ratio"), with_key / plain);
    }
    figures.add("read_us", random_read_us());
    Ok(figures)
}

/// The memory of the index of all keys at the end, in bytes.
const INDEX_BYTES: usize = 18_000_000;
const READS: usize = 2_000_000;

/// Returns the time of one read at a random place in as much memory as the index has, when each read yields
/// the place of the next one. A put with a new key has at least one such read.
fn random_read_us() -> f64 {
    const LINE: usize = 64;
    // Each line has the number of another one, in one cycle through all lines.
    let mut order: Vec<usize> = (1..INDEX_BYTES / LINE).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut order);
    let mut lines = vec![[0; LINE / size_of::<usize>()]; INDEX_BYTES / LINE];
    let mut last = 0;
    for line in order {
        lines[last][0] = line;
        last = line;
    }
    let mut line = 0;
    let began = Instant::now();
    for _ in 0..READS {
        line = lines[line][0];
    }
    std::hint::black_box(line);
    began.elapsed().as_secs_f64() * 1e6 / READS as f64
}
